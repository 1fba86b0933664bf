"""Train one run: a recipe of `pwlu train`, with a learning rule applied in every step."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rule_learner import Bank, Learner, Rule

from pwlu import NonUniformPWLU, alignment, baselines
from pwlu.initial_functions import find_initial_function
from pwlu.lab.recipes import catalog
from pwlu.lab.runs.processes import join_process_group
from pwlu.lab.tasks.classification import Classification
from pwlu.lab.training.trainer import Trainer

ACTIVATIONS = baselines.NAMES
SETTINGS = {  # words of rules that are settings of the recipe
    "N": "intervals",
    "init": "init",
    "unitlr": "unit_lr",
    "normdecay": "norm_weight_decay",
    "fixinit": "fix_init",
    "curvature": "curvature",
    "realign": "realign_epochs",
    "epochs": "epochs",
    "batch": "batch",
    "lr": "lr",
    "wd": "weight_decay",
    "ema": "ema",
}
RULE_FIELDS = {field.name: field for field in dataclasses.fields(Rule)}


def parse(text: str) -> tuple[Rule, dict[str, Any]]:
    """Parse a rule in words, such as "layer curv=0.03 prox", into a Rule and changes of settings."""
    rule: dict[str, Any] = {}
    changes: dict[str, Any] = {"activation": "pwlu"}
    for word in text.split():
        name, equals, value = word.partition("=")
        try:
            if not equals and name in ACTIVATIONS:
                changes["activation"] = name
            elif not equals and name in ("layer", "channel"):
                changes["granularity"] = name
            elif name in RULE_FIELDS and bool(equals) != (RULE_FIELDS[name].type is bool):
                rule[name] = float(value) if equals else True
            elif name in SETTINGS and equals:
                kind = {"N": int, "init": str, "epochs": int, "batch": int}.get(name, float)
                changes[SETTINGS[name]] = kind(value)
            else:
                raise ValueError
        except ValueError:
            flags = [name for name, field in RULE_FIELDS.items() if field.type is bool]
            numbers = [f"{name}=X" for name in [*RULE_FIELDS, *SETTINGS] if name not in flags]
            expected = ", ".join([*ACTIVATIONS, "layer", "channel", *flags, *numbers])
            raise ValueError(f"rule {text!r}: {word!r} is not a word of rules. Write {expected}") from None
    if rule and changes["activation"] != "pwlu":
        raise ValueError(f"rule {text!r}: {', '.join(rule)} works only for PWLUs: leave out {changes['activation']}")
    return Rule(**rule), changes


def train(spec: dict[str, Any], data: Path, device: str | None, deadline: float, log: Callable[[str], None]) -> dict[str, Any]:
    """Train one network with one rule, and return the result.

    Args:
        spec: network (a recipe of CIFAR-100), rule, seed, holdout (number of images), images (0: all).
        data: the folder of the data set.
        device: the name of the device; None for cuda if available.
        deadline: the time at which to stop and return the result so far.
        log: called with a line of text per epoch.
    """
    torch.set_num_threads(1)
    began = time.time()
    rule, changes = parse(spec["rule"])
    with join_process_group(device) as processes:
        cuda = processes.device.type == "cuda"
        settings = catalog.settings(
            f"cifar100/{spec['network']}",
            **changes,
            seed=spec["seed"],
            holdout=spec["holdout"],
            data=str(data),
            precision="bf16" if cuda else "float32",
            channels_last=cuda,
            cuda_graphs=cuda,
            fuse_norms="off",  # hooks see the inputs of PWLUs
        )
        task = Classification(settings, processes)
        if spec["images"]:
            task.data.train = task.data.train.part(torch.arange(min(spec["images"], len(task.data.train))))
            task.plan_steps(len(task.data.train))
        trainer = Trainer(task, settings, processes)
    learner = None
    uniform = all(not isinstance(unit, NonUniformPWLU) for unit in trainer.units.values())  # rules need equal intervals
    if trainer.units and uniform:
        bank = Bank(trainer.units.values())
        peak = settings.lr * settings.batch / catalog.find(settings.recipe).batch * settings.unit_lr
        learner = Learner(rule, bank, find_initial_function(settings.init) if rule.base else None, trainer, peak)

    curve, losses, numbers, number = {}, [], {}, 0
    for done in range(1, settings.epochs + 1):
        epoch_began = time.time()
        sums = torch.zeros((), device=processes.device)
        for step, batches in enumerate(task.epoch(done - 1)):
            if learner:
                learner.begin(step, task.steps_per_epoch)
            sums = sums + trainer.step(number, batches)
            number += 1
        summary = task.summary(sums)
        losses.append(summary["loss"])
        if learner:
            learner.end_epoch(done, settings.epochs)
        now = time.time()
        late = now + 1.5 * (now - epoch_began) + 15 > deadline  # the next epoch and its measurement would end too late
        last = done == settings.epochs or late or not math.isfinite(summary["loss"])
        line = f"epoch {done}/{settings.epochs} loss {summary['loss']:.4f} train {summary['train_accuracy']:.2f}"
        if last or done % 5 == 0:
            measured = task.measure(trainer.measured, trainer.autocast())
            curve[done] = round(measured["accuracy"], 2)
            numbers |= {done: learner.numbers} if learner and learner.numbers else {}
            line += f" held-out {measured['accuracy']:.2f} loss {measured['test_loss']:.4f}"
        log(f"{line} {now - began:.0f} s")
        if last:
            break
    result = {name: spec[name] for name in ("network", "rule", "seed")} | {
        "accuracy": round(measured["accuracy"], 2),
        "train_loss": _rounded(losses[-1]),
        "heldout_loss": _rounded(measured["test_loss"]),
        "iou": None,
        "epochs": done,
        "unfinished": done < settings.epochs,
        "train_accuracy": round(summary["train_accuracy"], 2),
        "curve": curve,
        "losses": [_rounded(loss) for loss in losses],
        "numbers": numbers,
        "settings": changes,
        "notes": learner.notes if learner else [],
    }
    if trainer.units and math.isfinite(losses[-1]):
        with trainer.autocast():
            aligned = alignment(trainer.measured, task.alignment_inputs(), histogram=False)
        result["iou"] = _rounded(statistics.median(aligned.iou))
    return result | {"seconds": round(time.time() - began, 1)}


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None  # JSON has no NaN
