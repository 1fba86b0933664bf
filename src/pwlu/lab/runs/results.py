"""Find runs on disk, and keep a few kilobytes of each in ``results/``."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pwlu.common import files
from pwlu.common.text import abbreviate
from pwlu.lab.recipes import catalog
from pwlu.lab.recipes.experiment import label
from pwlu.lab.recipes.settings import Settings, UserError
from pwlu.lab.runs.records import FILE, add_record, read_records
from pwlu.lab.runs.run_folder import RunFolder

_MEASURED = ("measured_on", "measured_images", "seconds_per_epoch", "parameters", "diverged")
_ATTACHED = ("functions.pt", "alignment.json")  # copied for seed 0 only, because they are large and no table needs them


@dataclass(frozen=True)
class Run:
    """A run on disk. ``result``: None until the run is finished. ``epochs``: the number of finished epochs."""

    path: Path
    settings: Settings
    result: dict[str, Any] | None
    environment: dict[str, Any]
    epochs: int

    @cached_property
    def iou(self) -> float | None:
        """Return the median over channels of the IOU of bounds and inputs, at the end; None if there are no PWLUs."""
        return RunFolder(self.path).iou()


def read_run(path: Path) -> Run:
    """Return the run at a path, which is a run folder or stands for a line of runs.jsonl. Raise UserError if it is damaged.

    A setting that the run does not name gets the recipe's value: it is a machine setting, or a later version introduced it.
    """
    folder = RunFolder(path)
    folder.check_format()
    config = folder.config()
    try:
        settings = catalog.settings(**config)
    except (TypeError, UserError) as error:
        raise folder.unreadable(f"{folder.locate('config.json')} does not hold the settings of a run: {error}") from None
    epochs = len(folder.metrics())
    if not folder.finished:
        return Run(path, settings, None, {}, epochs)
    result = folder.result()
    measured = (*catalog.find(settings.recipe).metrics, *_MEASURED)
    if missing := [name for name in measured if result.get(name) is None]:
        raise folder.unreadable(f"{folder.locate('result.json')} does not say {', '.join(missing)}")
    return Run(path, settings, result, folder.environment(), epochs)


def find_runs(root: Path) -> tuple[list[Run], list[str]]:
    """Return all runs below a folder, and one sentence for each that cannot be read."""
    runs, complaints = list[Run](), list[str]()
    for folder, folders, names in os.walk(root):
        path = Path(folder)
        empty = not folders and not names and path != root  # a process created it and was killed at once
        if empty or "config.json" in names or "result.json" in names:
            folders.clear()
            found = [path]
        else:
            records, wrong = read_records(path)
            found = [path / name for name in records]
            complaints += wrong
        for run in found:
            try:
                runs.append(read_run(run))
            except UserError as error:
                complaints.append(str(error))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    return runs, complaints


def settings_of(path: Path) -> Settings:
    """Return the settings of a run folder. If there is none, raise an error that names runs nearby."""
    folder = RunFolder(path)
    if not folder.has("config.json"):
        raise no_run_error(path, "config.json")
    return folder.settings()


def no_run_error(path: Path, *names: str) -> UserError:
    """Return the error for a path without a run. It names runs nearby that have all of these files."""
    levels = range(2)
    if path.is_dir():
        inside = sorted(entry.name for entry in path.iterdir())
        there = f", only {abbreviate(inside, 5)}" if inside else " and is empty"
        what, near, levels = f"{path} is not a run folder: it has no config.json{there}", path, range(4)
    elif path.exists():
        what, near = f"{path} is a file. Write the folder of a run", path.parent
    else:
        what, near = f"there is no folder {path}", next(parent for parent in path.parents if parent.is_dir())
    for level in levels:  # results/ has runs three levels down
        if runs := [str(run) for run in _runs_at(near, level) if all(RunFolder(run).has(name) for name in names)]:
            return UserError(f"{what}. Runs nearby: {abbreviate(runs, 5)}")
    return UserError(f"{what}. pwlu train creates run folders, with {' and '.join(names)}")


def _runs_at(root: Path, level: int) -> list[Path]:
    """Return the paths of the runs that are exactly `level` levels below a folder."""
    folders = {file.parent for file in root.glob("*/" * level + "config.json")}
    if level:
        folders |= {
            file.parent / name for file in root.glob("*/" * (level - 1) + FILE) for name in read_records(file.parent)[0]
        }
    return sorted(folders)


def keep(run: Run, results: Path) -> Path:
    """Add a finished run to ``results/RECIPE/runs.jsonl``, and return its path there.

    If its seed is 0, copy its functions and their alignment to a folder at that path.
    """
    record = {
        "settings": run.settings.identity(),
        "environment": run.environment,
        "metrics": RunFolder(run.path).metrics(),
        "result": run.result,
        "iou": run.iou,
    }

    def attach(path: Path) -> None:
        for name in _ATTACHED if run.settings.seed == 0 else ():
            if (run.path / name).exists():
                with files.explain_errors(path):
                    path.mkdir(exist_ok=True)
                files.write(path / name, (run.path / name).read_bytes())

    return add_record(results / run.settings.recipe, f"{label(run.settings)}-seed{run.settings.seed}", record, attach)
