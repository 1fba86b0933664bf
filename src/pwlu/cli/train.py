"""``pwlu train``: train a network on a data set with a chosen activation."""

import argparse
import dataclasses
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

from pwlu.lab.recipes.catalog import RECIPES, settings
from pwlu.lab.recipes.settings import Settings, UserError, flag, needs_packages
from pwlu.lab.runs.processes import join_process_group
from pwlu.lab.runs.results import read_run, settings_of
from pwlu.lab.runs.run_folder import RunFolder

RUNS = Path("runs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recipe and a flag for each setting."""
    parser.description = (
        "Train a network on a data set with a chosen activation. pwlu.convert_ replaces the activations of the network, and\n"
        "PWLUs learn in the two phases of the paper. Without arguments, train on handwritten digits: a minute on a CPU.\n\n"
        "recipes: " + textwrap.fill(", ".join(RECIPES), 110, subsequent_indent=" " * 9, break_on_hyphens=False)
    )
    parser.epilog = (
        "examples:\n"
        "  pwlu train                                        handwritten digits, built in\n"
        "  pwlu train cifar100/resnet18 --data DIR --act relu\n"
        "  pwlu train --resume runs/digits-pwlu-seed0        continue an interrupted run\n"
        "  torchrun --nproc-per-node 8 -m pwlu train imagenet/resnet18 --data DIR --precision bf16"
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="train this recipe (default: digits)")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="continue the run in this folder with its settings (default: start a new run)",
    )
    parser.add_argument(
        "--again", action="store_true", help="train again in a new folder if a run with the same settings exists (default: off)"
    )
    add_settings(parser)
    add_runs(parser)


def add_settings(parser: argparse.ArgumentParser, leave_out: tuple[str, ...] = ()) -> None:
    """Add a flag for each setting that is not in `leave_out`."""
    training = parser.add_argument_group("training")
    units = parser.add_argument_group("PWLUs")
    machine = parser.add_argument_group("data, hardware and output")
    for field in dataclasses.fields(Settings):
        if "help" not in field.metadata or field.name in leave_out:
            continue
        group = machine if field.metadata["machine"] else units if field.metadata["unit"] else training
        options: dict[str, Any] = {k: v for k, v in field.metadata["options"].items() if k != "flag"}
        text = field.metadata["help"]
        if "default" not in text:
            default = "set by the recipe" if field.default is None else "off" if field.default is False else field.default
            text += f" (default: {default})"
        if field.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = field.type
            if "choices" not in options:
                options.setdefault("metavar", {int: "N", float: "X"}.get(field.type, "NAME"))  # type: ignore[arg-type]
        group.add_argument(flag(field.name), dest=field.name, default=None, help=text.replace("%", "%%"), **options)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the folder of runs."""
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="DIR", help=f"create run folders in DIR (default: {RUNS})")


def changed_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the command line sets."""
    names = {field.name for field in dataclasses.fields(Settings)} - {"recipe"}
    return {name: value for name, value in vars(options).items() if name in names and value is not None}


def run(options: argparse.Namespace) -> int:
    """Train, and print the result."""
    with needs_packages("training", "train"):
        from pwlu.lab.training.loop import create_run, train
    from pwlu.lab.runs.divergence import STATUS
    from pwlu.lab.training.summary import headline

    changes = changed_settings(options)
    chosen = settings(options.recipe or "digits", **changes) if options.resume is None else _resumed(options, changes)
    with join_process_group(chosen.device) as processes:
        path = create_run(options.runs, chosen, processes, options.again) if options.resume is None else options.resume
        if RunFolder(path).finished:
            result = read_run(path).result
            assert result is not None
            if processes.is_main:
                print(f"{path} is finished: {headline(result, chosen.as_dict())}")
            return STATUS if result["diverged"] else 0
        try:
            result = train(chosen, path, processes)
        except KeyboardInterrupt:
            if processes.is_main:
                print(f"\nstopped. To continue: pwlu train --resume {shlex.quote(str(path))}", file=sys.stderr)
            return 130
        if processes.is_main:
            print(headline(result, chosen.as_dict()))
            figure = path / "functions.png"
            drawn = figure.exists() and not result["diverged"]
            print(f"run folder: {path}" + (f", figure of the learned functions: {figure}" if drawn else ""))
    return STATUS if result["diverged"] else 0


def _resumed(options: argparse.Namespace, changes: dict[str, Any]) -> Settings:
    """Return the settings of the run to resume. Only machine settings may change."""
    fixed = [
        flag(field.name) for field in dataclasses.fields(Settings) if field.name in changes and not field.metadata["machine"]
    ]
    if options.runs != RUNS:
        fixed.append("--runs")
    if options.recipe or fixed:
        written = ", ".join(([options.recipe] if options.recipe else []) + fixed)
        raise UserError(f"--resume uses the settings of that run: leave out {written}, or start a new run without --resume")
    return settings_of(options.resume).replace(**changes)
