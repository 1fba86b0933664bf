"""Run folders for tests of the report, without a training: functions that grow at random, and inputs that fit them."""

import json
import math
import re

import torch
from torch import nn

import pwlu
from pwlu.analysis.alignment import Alignment, UnitAlignment
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.units.module import units_of

NAMES = ("left", "right", "heights", "left_slope", "right_slope")
STEPS_AN_EPOCH = 10
BELL = [round(10_000 * math.exp(-0.5 * ((bar - 15.5) / 5) ** 2) / 12.5) for bar in range(32)]


def small_network(granularity="channel"):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU())
    pwlu.convert_(model, torch.rand(1, 3, 8, 8), granularity=granularity, intervals=8)
    return model


def functions_of(model):
    return {
        name: {n: p.detach().clone() for n, p in zip(NAMES, unit.blocks(), strict=True)}
        for name, unit in units_of(model).items()
    }


def grown(functions, size):
    """Each parameter moved by so much, at random."""
    return {
        name: {key: p + size * torch.randn_like(p) * (0.2 if key in ("left", "right") else 1.0) for key, p in unit.items()}
        for name, unit in functions.items()
    }


def inputs_of(functions, channels=None, bars=True):
    """Bell-shaped ones from -2 to 2, of which a tenth lies outside of the bounds."""
    units = []
    for name, unit in functions.items():
        count = channels or len(unit["left"])
        left, right = (unit[side].expand(count).tolist() for side in ("left", "right"))
        numbers = [[-2.0] * count, [2.0] * count, [0.5] * count, [0.1] * count, [1000] * count, [0] * count]
        unit = UnitAlignment(name, left, right, *numbers)
        if bars:
            unit.low, unit.high = [-3.0] * count, [3.0] * count
            unit.histogram = (torch.tensor(BELL) * (0.8 + 0.4 * torch.rand(count, 32))).long().tolist()
        units.append(unit)
    return Alignment("Network", 4, units)


def write_run(path, functions, epochs=4, finished=True, alignment=None, wild=False, snapshots=None, **changes):
    """A run folder with these settings; a snapshot at the beginning and after every epoch; `functions` are the last.

    `snapshots`: keep only so many, the first ones.
    """
    path.mkdir(parents=True)
    folder = RunFolder(path)
    config = {"recipe": "digits", "activation": "pwlu", "seed": 0, "epochs": epochs, "realign_epochs": 1.0, "init": "relu"}
    folder.write_json("config.json", config | changes)
    folder.write_json("environment.json", {"pwlu": "0.1.0", "revision": "abc", "torch": "2.11", "device": "a processor"})
    for epoch in range(1, epochs + 1):
        row = {"epoch": epoch, "step": STEPS_AN_EPOCH * epoch, "loss": 2.0 / epoch, "train_accuracy": 20.0 * epoch}
        row |= {"test_loss": 2.5 / epoch, "accuracy": 19.0 * epoch, "phase": 1 if epoch < 2 else 2}
        folder.add_metrics(row)
    seed = 1
    if functions:
        for number in range(epochs):
            torch.manual_seed(seed)  # of a function that goes straight to its end
            moment = grown(functions, 0.4 * (1 - number / epochs))
            folder.write_tensors(f"snapshots/step-{STEPS_AN_EPOCH * number:08d}.pt", moment)
            seed += wild  # of one that jumps about
        folder.write_tensors(f"snapshots/step-{STEPS_AN_EPOCH * epochs:08d}.pt", functions)
        for unwanted in sorted((path / "snapshots").iterdir())[snapshots:] if snapshots is not None else ():
            unwanted.unlink()
    if finished:
        result = {"accuracy": 19.0 * epochs, "best_accuracy": 19.0 * epochs, "measured_on": "test images"}
        result |= {"measured_images": 899, "seconds_per_epoch": 0.3, "parameters": 4618, "diverged": False}
        folder.write_json("result.json", result)
        if functions:
            folder.write_tensors("functions.pt", functions)
    if alignment is not None:
        folder.write("inputs.json", alignment.to_json().encode())
    return path


def cells_of(html):
    """The texts in the cells of the table of shapes, row by row."""
    return [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr><th scope=\"row\">.*?</tr>", html)]


def data_of(page):
    """What the page gives its script."""
    text = page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    return json.loads(text)
