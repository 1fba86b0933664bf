"""Runs found on disk, and the few kilobytes of each that are kept: results/RECIPE/LABEL-seedK/."""

import itertools
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pwlu import files
from pwlu.analysis.alignment import Alignment
from pwlu.lab.recipes import catalog
from pwlu.lab.recipes.experiment import label
from pwlu.lab.recipes.settings import Settings, UserError
from pwlu.lab.runs.run_folder import RunFolder, as_json

COPIED = ("environment.json", "metrics.jsonl", "result.json", "alignment.json")  # and config.json, shortened
_OF_ONE_SEED = "functions.pt"  # the largest file: of seed 0 alone, to be looked at; no table is made from it
_MEASURED = ("measured_on", "measured_images", "seconds_per_epoch", "parameters", "diverged")


@dataclass(frozen=True)
class Run:
    """What a run folder says. ``result`` is None while the run is not finished; ``epochs``: how many are done."""

    path: Path
    settings: Settings
    result: dict[str, Any] | None
    environment: dict[str, Any]
    epochs: int

    @cached_property
    def iou(self) -> float | None:
        """The median over channels of the IOU of bounds and inputs, at the end; None where there are no PWLUs."""
        file = self.path / "alignment.json"
        if not file.exists():
            return None
        try:
            found = Alignment.from_json(file.read_text(encoding="utf-8")).iou
        except (ValueError, OSError) as error:
            raise UserError(f"{file} does not hold the alignment of a run: {error}") from None
        return statistics.median(found) if found else None


def read_run(path: Path) -> Run:
    """The run in a folder, or an error that says what is wrong with it.

    A setting that config.json does not name, because it is the machine's or was not there yet, is as the recipe has it.
    """
    folder = RunFolder(path)
    config = folder.config()
    try:
        settings = catalog.settings(**config)
    except (TypeError, UserError) as error:
        raise folder.unreadable(f"{path / 'config.json'} does not hold the settings of a run: {error}") from None
    epochs = len(folder.metrics())
    if not folder.finished:
        return Run(path, settings, None, {}, epochs)
    result = folder.result()
    measured = (*catalog.find(settings.recipe).metrics, *_MEASURED)
    if missing := [name for name in measured if result.get(name) is None]:
        raise folder.unreadable(f"{path / 'result.json'} does not say {', '.join(missing)}")
    return Run(path, settings, result, folder.environment(), epochs)


def find_runs(root: Path) -> tuple[list[Run], list[str]]:
    """All runs below a folder, and what is wrong with each folder that should be one but cannot be read."""
    runs, complaints = [], []
    for path in _folders(root):
        try:
            runs.append(read_run(path))
        except UserError as error:
            complaints.append(str(error))
    return runs, complaints


def _folders(root: Path) -> Iterator[Path]:
    for path, folders, names in os.walk(root):
        begun = not folders and not names and Path(path) != root  # by a process that was killed at once
        if begun or "config.json" in names or "result.json" in names:
            folders.clear()
            yield Path(path)
        folders[:] = sorted(name for name in folders if not name.startswith("."))  # such as a copy that is being made


def keep(run: Run, results: Path) -> Path:
    """Copy what is to be kept of a finished run. The folder appears when it is complete."""
    parent = place(results, run.settings)
    target = parent / f"{label(run.settings)}-seed{run.settings.seed}"
    with files.explain_errors(target):
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=parent) as partial:
            copy = Path(partial) / "run"
            copy.mkdir()
            (copy / "config.json").write_bytes(as_json(run.settings.identity()))
            for name in (*COPIED, *([] if run.settings.seed else [_OF_ONE_SEED])):
                if (run.path / name).exists():
                    shutil.copyfile(run.path / name, copy / name)
            return _moved(copy, target)


def _moved(folder: Path, target: Path) -> Path:
    """Another experiment may have had the name first, if the recipe was another then: take the next number."""
    for number in itertools.count(1):
        path = target if number == 1 else target.with_name(f"{target.name}-{number}")
        try:
            return folder.rename(path)
        except OSError:
            if not path.exists():
                raise
    raise AssertionError("there is no last number")


def place(results: Path, settings: Settings) -> Path:
    """The folder for what concerns these settings. What chose settings is kept apart from what measures them."""
    return results / settings.recipe / ("held-out" if settings.holdout else "")
