"""What a run folder holds for its report, and what of it is missing: a run may be unfinished, or only its results kept."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pwlu.analysis import Alignment
from pwlu.curves import curves_of
from pwlu.recipes.results import find_runs
from pwlu.recipes.run_folder import RunFolder
from pwlu.recipes.settings import UserError
from pwlu.shapes import Shapes, describe
from pwlu.starts import STARTS, start_parameters

Functions = dict[str, dict[str, Tensor]]  # by unit and parameter, as functions.pt has them
FILES = ("config.json", "environment.json", "metrics.jsonl", "result.json", "functions.pt", "alignment.json", "inputs.json")


@dataclass
class Evidence:
    """All that is known of a run.

    ``moments``: the functions in the course of training by the number of steps, the last of them in the end. ``starts``: of a
    unit, the name of the function that it began as. ``notes``: sentences on what is not known, and why.
    """

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]
    metrics: list[dict[str, Any]]
    alignment: Alignment | None = None
    shapes: Shapes | None = None
    moments: dict[int, Functions] = field(default_factory=dict)
    starts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def functions(self) -> Functions:
        """The last that are known; empty for a run without PWLUs."""
        return next(reversed(self.moments.values()), {})

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

    @property
    def realigned_after(self) -> int:
        """The step T' that ends Phase I; 0 if there is none, or if it is not known."""
        epochs = self.config.get("realign_epochs", 0)
        if not epochs or self.config.get("fix_init") or self.config.get("activation") != "pwlu" or not self.metrics:
            return 0
        return max(1, round(epochs * self.steps_per_epoch))


def read_evidence(path: Path) -> Evidence:
    """Read a run folder, finished or not, or what ``pwlu compare`` keeps of one."""
    _check(path)
    folder, notes = RunFolder(path), list[str]()

    def found(name: str, read: Callable[[str], Any]) -> Any:
        if not (path / name).exists():
            return None
        try:
            return read(name)
        except Exception as error:  # whatever is wrong with one file, the others have something to show
            notes.append(f"{name} cannot be read and is left out: {error}")
            return None

    def tensors(name: str) -> Functions:
        functions = torch.load(path / name, map_location="cpu", weights_only=True)
        curves_of(functions, name)
        return functions

    def measured(name: str) -> Alignment:
        return Alignment.from_json((path / name).read_text())

    config, environment, result = (found(f"{name}.json", folder.json) or {} for name in ("config", "environment", "result"))
    if config and "recipe" not in config:
        raise UserError(f"{path / 'config.json'} does not hold the settings of a run: it names no recipe")
    evidence = Evidence(path, config, environment, result, folder.metrics(), notes=notes)
    for snapshot in sorted((path / "snapshots").glob("step-*.pt")):
        functions = found(f"snapshots/{snapshot.name}", tensors)
        if functions is not None:
            evidence.moments[int(snapshot.stem.removeprefix("step-"))] = functions
    last = found("functions.pt", tensors)
    if last is not None:
        end = evidence.metrics[-1]["step"] if evidence.metrics else max(evidence.moments, default=-1) + 1
        evidence.moments = {step: old for step, old in evidence.moments.items() if step < end} | {end: last}
    strange = [step for step, old in evidence.moments.items() if not _alike(old, evidence.functions)]
    for step in strange:
        notes.append(f"The snapshot of step {step} is of other units than the functions in the end, and is left out.")
        del evidence.moments[step]
    evidence.alignment = found("inputs.json", measured) or found("alignment.json", measured)
    _describe(evidence)
    evidence.notes += _missing(evidence)
    return evidence


def _check(path: Path) -> None:
    """That there is anything of a run, else an error that says what there is."""
    if any((path / name).exists() for name in (*FILES, "snapshots")):
        return
    if not path.exists():
        raise UserError(f"there is no folder {path}. Write the folder of a run: pwlu train says which at the end")
    if not path.is_dir():
        raise UserError(f"{path} is a file. Write the folder of a run, not a file in it")
    if runs := [run.path for run in find_runs(path)[0]]:
        raise UserError(f"{path} is not a run, but holds {len(runs)}. Write one of them: pwlu report {runs[0]}")
    inside = sorted(entry.name for entry in path.iterdir())
    holds = ", ".join(inside[:5]) + (", ..." if len(inside) > 5 else "") if inside else "nothing"
    raise UserError(
        f"{path} is not the folder of a run: it holds {holds}, and none of {', '.join(FILES)}. Write a folder that pwlu train "
        "made, or one that pwlu compare kept under results/"
    )


def _alike(first: Functions, second: Functions) -> bool:
    """Whether they are of the same units with the same shapes."""
    sizes = [{name: {key: p.shape for key, p in unit.items()} for name, unit in each.items()} for each in (first, second)]
    return sizes[0] == sizes[1]


def _describe(evidence: Evidence) -> None:
    functions = evidence.functions
    if not functions:
        return
    evidence.starts = _starts(evidence)
    named = {
        name: dict(unit) | ({"init": evidence.starts[name]} if name in evidence.starts else {})
        for name, unit in functions.items()
    }
    try:
        evidence.shapes = describe(named, evidence.alignment)
    except ValueError as error:
        evidence.notes.append(f"The alignment does not fit the functions and is left out: {error}")
        evidence.alignment = None
        evidence.shapes = describe(named)


def _starts(evidence: Evidence) -> dict[str, str]:
    """By name: config.json has it; if units began as what stood there before, the functions before the first step tell."""
    init = evidence.config.get("init")
    if init in STARTS:
        return dict.fromkeys(evidence.functions, init)
    starts: dict[str, str] = {}
    for name, curves in curves_of(evidence.moments[0], "starts").items() if 0 in evidence.moments else ():
        for start in STARTS.values():
            heights, *_ = start_parameters(start, curves.left, curves.right, curves.heights.shape[1] - 1)
            if torch.allclose(heights, curves.heights, rtol=1e-5, atol=1e-6):
                starts.setdefault(name, start.name)
    return starts


def _missing(evidence: Evidence) -> list[str]:
    """What the page cannot show, a sentence each."""
    notes, config = [], evidence.config
    learned = config.get("activation", "pwlu") == "pwlu"
    if not evidence.result:
        done = (
            f"{len(evidence.metrics)} of {config['epochs']} epochs are done" if "epochs" in config else "it has no result.json"
        )
        notes.append(f"The run is not finished: {done}.")
    if not config:
        notes.append("There is no config.json: the settings are not known.")
    if not evidence.metrics:
        notes.append("There is no epoch in metrics.jsonl: there are no curves to show.")
    if not learned:
        notes.append(f"The activation is {config['activation']}: there are no PWLUs, so there are no functions to show.")
    elif not evidence.functions:
        notes.append("There is neither functions.pt nor a snapshot: the functions cannot be shown.")
    elif evidence.alignment is None:
        notes.append("There is no alignment.json: shapes are those between the bounds, whatever the inputs are.")
    elif not any(unit.histogram for unit in evidence.alignment):
        notes.append("There is no inputs.json: of the inputs, the 5 % and 95 % quantiles are shown, not the distribution.")
    if evidence.functions and len(evidence.moments) == 1:
        notes.append("There are no snapshots: the functions are shown as they are in the end, not as they grew.")
    return notes
