"""What a run folder holds for its report, and what of it is missing: a run may be unfinished, or only its results kept."""

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
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.results import no_run
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.lab.runs.tensor_files import tensors

Functions = dict[str, dict[str, Tensor]]  # by unit and parameter, as functions.pt has them
FILES = ("config.json", "environment.json", "metrics.jsonl", "result.json", "functions.pt", "alignment.json", "inputs.json")


@dataclass
class RunData:
    """All that is known of a run.

    ``moments``: the functions in the course of training, by the number of steps; infinity for the end, if nothing says how many
    there were. ``ended``: whether the last of them are those of the end. ``starts``: of a unit, the name of the function that
    it began as. ``notes``: sentences on what is not known, and why; ``damaged``: those of them on files that cannot be read.
    """

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]
    metrics: list[dict[str, Any]]
    alignment: Alignment | None = None
    shapes: Shapes | None = None
    moments: dict[float, Functions] = field(default_factory=dict)
    ended: bool = False
    starts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    @property
    def functions(self) -> Functions:
        """The last that are known; empty for a run without PWLUs."""
        return next(reversed(self.moments.values()), {})

    @property
    def diverged(self) -> bool:
        """Return whether the training went wrong."""
        return bool(self.result.get("diverged"))

    @property
    def learned(self) -> bool:
        """Whether the last functions that are known have begun to learn: at the start and in Phase I they do not."""
        return self.ended or max(self.moments, default=0) > self.realigned_after

    @property
    def progress(self) -> str:
        """How many epochs are done, and of how many, if that is known: iterations may end in the middle of one."""
        known = self.config.get("epochs") and not self.config.get("iterations")
        return f"{len(self.metrics)} of {self.config['epochs']}" if known else f"{len(self.metrics)}"

    @property
    def title(self) -> str:
        """What was trained, as far as it is known."""
        if not self.config:
            return self.path.resolve().name
        activation = self.config.get("activation", "pwlu").replace("pwlu", "PWLU").replace("relu", "ReLU")
        return f"{self.config['recipe']}, {activation}, seed {self.config.get('seed', 0)}"

    @property
    def steps_per_epoch(self) -> int:
        """0 if no epoch has ended."""
        return self.metrics[0]["step"] if self.metrics else 0

    def points(self, name: str) -> list[tuple[float, float]]:
        """Return what was measured under a name, by epoch."""
        steps = self.steps_per_epoch
        return [(row["step"] / steps, row[name]) for row in self.metrics if row.get(name) is not None]

    @property
    def realigned_after(self) -> int:
        """The step T' that ends Phase I; 0 if there is none, or if it is not known."""
        epochs = self.config.get("realign_epochs", 0)
        if not epochs or self.config.get("fix_init") or self.config.get("activation") != "pwlu" or not self.metrics:
            return 0
        return max(1, round(epochs * self.steps_per_epoch))


def read_run_data(path: Path) -> RunData:
    """Read a run folder, finished or not, or what ``pwlu compare`` keeps of one."""
    folder, notes = RunFolder(path), list[str]()
    if not any(folder.has(name) for name in (*FILES, "snapshots")):
        raise no_run(path, "config.json", "metrics.jsonl")
    folder.check_format()

    def found(name: str, read: Callable[[str], Any]) -> Any:
        if not folder.has(name):
            return None
        try:
            return read(name)
        except UserError as error:
            notes.append(f"{error}. It is left out here.")
        except Exception as error:  # whatever is wrong with one file, the others have something to show
            notes.append(f"{name} cannot be read and is left out: {error}")
        return None

    def saved(name: str) -> Functions:
        try:
            functions = tensors(path / name)
        except ValueError:
            raise ValueError("it does not hold saved functions") from None
        curves_of(functions, name)
        return functions

    def measured(name: str) -> Alignment:
        return Alignment.from_json((path / name).read_text(encoding="utf-8"))

    config = found("config.json", lambda _: folder.config())
    if config is not None and "recipe" not in config:
        raise UserError(f"{path / 'config.json'} does not hold the settings of a run: it names no recipe")
    run = RunData(
        path,
        config or {},
        found("environment.json", lambda _: folder.environment()) or {},
        found("result.json", lambda _: folder.result()) or {},
        found("metrics.jsonl", lambda _: folder.metrics()) or [],
        notes=notes,
    )
    for snapshot in sorted((path / "snapshots").glob("step-*.pt")):
        number = snapshot.stem.removeprefix("step-")
        if not number.isdecimal():
            notes.append(
                f"snapshots/{snapshot.name} is left out: its name must have the number of a step, as step-00000098.pt."
            )
        elif (functions := found(f"snapshots/{snapshot.name}", saved)) is not None:
            run.moments[int(number)] = functions
    end = run.metrics[-1]["step"] if run.metrics else math.inf
    last = found("functions.pt", saved)
    if last is not None:
        run.moments = {step: old for step, old in run.moments.items() if step < end} | {end: last}
    run.ended = last is not None or (folder.finished and end in run.moments)
    strange = [step for step, old in run.moments.items() if not _alike(old, run.functions)]
    for step in strange:
        notes.append(f"The snapshot of step {step} is of other units than the last functions, and is left out.")
        del run.moments[step]
    run.alignment = found("inputs.json", measured) or found("alignment.json", measured)
    run.damaged = list(notes)
    _describe(run)
    run.notes += _missing(run)
    return run


def _alike(first: Functions, second: Functions) -> bool:
    """Whether they are of the same units with the same shapes."""
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
    """By name: config.json has it; if units began as what stood there before, the functions before the first step tell."""
    init = run.config.get("init")
    if init in INITIAL_FUNCTIONS:
        return dict.fromkeys(run.functions, init)
    starts: dict[str, str] = {}
    for name, curves in curves_of(run.moments[0], "starts").items() if 0 in run.moments else ():
        for start in INITIAL_FUNCTIONS.values():
            heights, *_ = initial_parameters(start, curves.left, curves.right, curves.heights.shape[1] - 1)
            if torch.allclose(heights, curves.heights, rtol=1e-5, atol=1e-6):
                starts.setdefault(name, start.name)
    return starts


def _missing(run: RunData) -> list[str]:
    """What the page cannot show, a sentence each."""
    notes, config, folder = [], run.config, RunFolder(run.path)
    learned = config.get("activation", "pwlu") == "pwlu"

    def without(name: str, consequence: str) -> str:
        there = folder.has(name)  # then another note says what is wrong with it
        return consequence[0].upper() + consequence[1:] if there else f"There is no {name}: {consequence}"

    if not folder.finished:
        done = f"{run.progress} epochs are done" if run.metrics else "it has no result.json"
        notes.append(f"The run is not finished: {done}.")
    if not config:
        notes.append(without("config.json", "the settings are not known."))
    if not run.metrics:
        notes.append("No epoch is known: there are no curves to show.")
    if not learned:
        notes.append(f"The activation is {config['activation']}: there are no PWLUs, so there are no functions to show.")
    elif not run.functions:
        notes.append(without("functions.pt", "the functions cannot be shown, nor is there a snapshot to show instead."))
    elif run.alignment is None:
        notes.append(without("alignment.json", "shapes are those between the bounds, whatever the inputs are."))
    elif not any(unit.histogram for unit in run.alignment):
        notes.append(without("inputs.json", "of the inputs, the 5 % and 95 % quantiles are shown, not the distribution."))
    if run.functions and not run.ended:
        what = "" if run.learned else ", when they had not begun to learn"
        notes.append(f"The functions are those of step {max(run.moments):,}{what}.")
    elif len(run.moments) == 1:
        notes.append("No earlier snapshot can be shown: the functions are as they are in the end, not as they grew.")
    return notes
