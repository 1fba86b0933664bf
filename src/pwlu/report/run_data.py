"""Read the data of a report from a run folder, and note what is missing: a run may be unfinished or partly deleted."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pwlu.analysis.alignment import Alignment
from pwlu.analysis.curves import curves_of
from pwlu.analysis.shapes import Shapes, describe
from pwlu.initial_functions import INITIAL_FUNCTIONS, initial_parameters
from pwlu.lab.compare.presets import TITLES
from pwlu.lab.recipes import catalog
from pwlu.lab.recipes.settings import UNITS, Settings, UserError
from pwlu.lab.runs.results import no_run_error
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.lab.runs.tensor_files import tensors

Functions = dict[str, dict[str, Tensor]]  # by unit and parameter, as in functions.pt
FILES = ("config.json", "environment.json", "metrics.jsonl", "result.json", "functions.pt", "alignment.json", "inputs.json")


@dataclass
class RunData:
    """Everything known about a run.

    Attributes:
        path: the run folder.
        config: the contents of config.json; empty if it is missing. Likewise for the next three.
        environment: the contents of environment.json.
        result: the contents of result.json.
        metrics: the rows of metrics.jsonl.
        alignment: how well bounds fit inputs; None if unknown.
        shapes: the shapes of the last functions; None if there are none.
        snapshots: the functions by training step. If no file states the step of the last functions, it is infinity.
        ended: whether the last snapshot was taken at the end of training.
        starts: the name of the initial function by unit.
        notes: sentences on what is missing, and why.
        damaged: those of the notes that are about unreadable files.
    """

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]
    metrics: list[dict[str, Any]]
    alignment: Alignment | None = None
    shapes: Shapes | None = None
    snapshots: dict[float, Functions] = field(default_factory=dict)
    ended: bool = False
    starts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    @property
    def functions(self) -> Functions:
        """Return the last known functions; empty for a run without PWLUs."""
        return next(reversed(self.snapshots.values()), {})

    @property
    def diverged(self) -> bool:
        """Return whether training diverged."""
        return bool(self.result.get("diverged"))

    @property
    def learned(self) -> bool:
        """Return whether the last known functions are from after Phase I, so that they have learned."""
        return self.ended or max(self.snapshots, default=0) > self.realigned_after

    @property
    def progress(self) -> str:
        """Return the number of finished epochs, such as "3 of 9", or "3" if the length of training is given in iterations."""
        known = self.config.get("epochs") and not self.config.get("iterations")
        return f"{len(self.metrics)} of {self.config['epochs']}" if known else f"{len(self.metrics)}"

    @property
    def title(self) -> str:
        """Return recipe, activation and seed, or the name of the folder if they are unknown."""
        if not self.config:
            return self.path.resolve().name
        activation = self.config.get("activation", "pwlu")
        return f"{self.config['recipe']}, {TITLES.get(activation, activation)}, seed {self.config.get('seed', 0)}"

    @property
    def settings(self) -> Settings | None:
        """Return the settings; None if they are unknown, or of another version."""
        try:
            return catalog.settings(**self.config)
        except (TypeError, UserError):
            return None

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of steps per epoch; 0 before the end of the first."""
        return self.metrics[0]["step"] if self.metrics else 0

    def points(self, name: str) -> list[tuple[float, float]]:
        """Return the values of a metric by epoch."""
        steps = self.steps_per_epoch
        return [(row["step"] / steps, row[name]) for row in self.metrics if row.get(name) is not None]

    @property
    def realigned_after(self) -> int:
        """Return the step T' that ends Phase I; 0 if there is none or it is unknown."""
        epochs = self.config.get("realign_epochs", 0)
        if not epochs or self.config.get("fix_init") or self.config.get("activation") not in UNITS or not self.metrics:
            return 0
        return max(1, round(epochs * self.steps_per_epoch))


def read_run_data(path: Path) -> RunData:
    """Read a run folder, finished or not, or the files of a run that ``pwlu compare`` keeps."""
    folder, notes = RunFolder(path), list[str]()
    if not any(folder.has(name) for name in (*FILES, "snapshots")):
        raise no_run_error(path, "config.json", "metrics.jsonl")
    folder.check_format()

    def read_if_present(name: str, read: Callable[[str], Any]) -> Any:
        if not folder.has(name):
            return None
        try:
            return read(name)
        except UserError as error:
            notes.append(f"{error}. It is left out here.")
        except Exception as error:  # one bad file must not hide the others
            notes.append(f"{name} cannot be read and is left out: {error}")
        return None

    def read_functions(name: str) -> Functions:
        try:
            functions = tensors(path / name)
        except ValueError:
            raise ValueError("it does not hold saved functions") from None
        curves_of(functions, name)
        return functions

    def read_alignment(name: str) -> Alignment:
        return Alignment.from_json((path / name).read_text(encoding="utf-8"))

    config = read_if_present("config.json", lambda _: folder.config())
    if config is not None and "recipe" not in config:
        raise UserError(f"{path / 'config.json'} does not hold the settings of a run: it names no recipe")
    run = RunData(
        path,
        config or {},
        read_if_present("environment.json", lambda _: folder.environment()) or {},
        read_if_present("result.json", lambda _: folder.result()) or {},
        read_if_present("metrics.jsonl", lambda _: folder.metrics()) or [],
        notes=notes,
    )
    for snapshot in sorted((path / "snapshots").glob("step-*.pt")):
        number = snapshot.stem.removeprefix("step-")
        if not number.isdecimal():
            notes.append(
                f"snapshots/{snapshot.name} is left out: its name must have the number of a step, as in step-00000098.pt."
            )
        elif (functions := read_if_present(f"snapshots/{snapshot.name}", read_functions)) is not None:
            run.snapshots[int(number)] = functions
    end = run.metrics[-1]["step"] if run.metrics else math.inf
    last = read_if_present("functions.pt", read_functions)
    if last is not None:
        run.snapshots = {step: old for step, old in run.snapshots.items() if step < end} | {end: last}
    run.ended = last is not None or (folder.finished and end in run.snapshots)
    unlike = [step for step, old in run.snapshots.items() if not _same_shapes(old, run.functions)]
    for step in unlike:
        notes.append(f"The snapshot of step {step} has other units than the last functions and is left out.")
        del run.snapshots[step]
    run.alignment = read_if_present("inputs.json", read_alignment) or read_if_present("alignment.json", read_alignment)
    run.damaged = list(notes)
    _describe(run)
    run.notes += _missing_notes(run)
    return run


def _same_shapes(first: Functions, second: Functions) -> bool:
    """Return whether both have the same units with the same shapes."""
    sizes = [{name: {key: p.shape for key, p in unit.items()} for name, unit in each.items()} for each in (first, second)]
    return sizes[0] == sizes[1]


def _describe(run: RunData) -> None:
    functions = run.functions
    if not functions:
        return
    run.starts = _starts(run)
    named = {name: dict(unit) | ({"init": run.starts[name]} if name in run.starts else {}) for name, unit in functions.items()}
    try:
        run.shapes = describe(named, run.alignment)
    except ValueError as error:
        run.notes.append(f"The alignment does not fit the functions and is left out: {error}")
        run.alignment = None
        run.shapes = describe(named)


def _starts(run: RunData) -> dict[str, str]:
    """Return the initial functions by name: from config.json, or, for init=same, from the functions before the first step."""
    init = run.config.get("init")
    if init in INITIAL_FUNCTIONS:
        return dict.fromkeys(run.functions, init)
    starts: dict[str, str] = {}
    for name, curves in curves_of(run.snapshots[0], "starts").items() if 0 in run.snapshots else ():
        for start in INITIAL_FUNCTIONS.values():
            heights, *_ = initial_parameters(start, curves.left, curves.right, curves.heights.shape[1] - 1)
            if torch.allclose(heights, curves.heights, rtol=1e-5, atol=1e-6):
                starts.setdefault(name, start.name)
    return starts


def _missing_notes(run: RunData) -> list[str]:
    """Return one sentence for each thing that the page cannot show."""
    notes, config, folder = [], run.config, RunFolder(run.path)
    learned = config.get("activation", "pwlu") in UNITS

    def without(name: str, consequence: str) -> str:
        there = folder.has(name)  # if it is there, another note says what is wrong with it
        return consequence[0].upper() + consequence[1:] if there else f"There is no {name}: {consequence}"

    if not folder.finished:
        done = f"{run.progress} epochs are done" if run.metrics else "it has no result.json"
        notes.append(f"The run is not finished: {done}.")
    if not config:
        notes.append(without("config.json", "the settings are unknown."))
    if not run.metrics:
        notes.append("No epoch was recorded, so there are no curves.")
    elif folder.finished and not run.diverged and not config.get("iterations") and len(run.metrics) < config.get("epochs", 0):
        notes.append(f"metrics.jsonl is incomplete: it has {run.progress} epochs.")
    if not learned:
        notes.append(f"The activation is {config['activation']}. The network has no PWLUs, so there are no functions to show.")
    elif not run.functions:
        notes.append(without("functions.pt", "the functions cannot be shown, and there is no snapshot to show instead."))
    elif run.alignment is None:
        notes.append(without("alignment.json", "shapes are measured between the bounds instead of where the inputs are."))
    elif not any(unit.histogram for unit in run.alignment):
        notes.append(
            without("inputs.json", "the 5 % and 95 % quantiles of the inputs are shown instead of their distribution.")
        )
    if run.functions and not run.ended:
        what = "" if run.learned else ", before they began to learn"
        notes.append(f"The functions are from step {max(run.snapshots):,}{what}.")
    elif len(run.snapshots) == 1:
        notes.append("There are no earlier snapshots, so only the final functions are shown.")
    return notes
