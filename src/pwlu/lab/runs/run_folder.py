"""A run on disk: the settings, the environment, the results, and checkpoints to continue from.

RUN/config.json         the settings
RUN/environment.json    source revision, versions, hardware, the format of this folder, and the decision of --fuse-norms auto
RUN/metrics.jsonl       one line per epoch
RUN/checkpoints/        step-00000980-1f2e3d4c.pt: the number of steps, and the first digits of the contents' SHA-256
RUN/snapshots/          step-00000980.pt: the functions of all PWLUs, 90 bytes per function
RUN/result.json         written last: the run is finished

A finished run also has
RUN/model.safetensors   weights and conversion, as pwlu.save writes them; network.json describes the input and the classes
RUN/functions.pt        the parameters of all PWLUs
RUN/inputs.json         alignment of bounds and inputs, with histograms of the inputs; alignment.json has no histograms
RUN/report.md           the result for people to read, with functions.png
"""

import dataclasses
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pwlu.analysis.alignment import Alignment
from pwlu.common import files
from pwlu.common.text import parse_json
from pwlu.lab.recipes.settings import Settings, UserError, check
from pwlu.lab.runs.locks import try_lock
from pwlu.lab.runs.records import FILE, KEYS, Record, find_record
from pwlu.lab.runs.tensor_files import serialised, tensors
from pwlu.learning.shared_rule import PAPER
from pwlu.version import __version__, later_version

FORMAT = 2  # the format of run folders. Folders without a number in environment.json have format 1, with model.pt
_AGAIN = "Copy it again from where it was trained, or train again"
_OPTIONAL = ("norm_weight_decay", "channels_last", "device", "test_data", "workers")  # settings of a run that may be None
_Kind = tuple[str, tuple[type, ...]]  # the name of a type in errors, and what JSON may hold
_KINDS: dict[Any, _Kind] = {  # by type of a setting
    str: ("a string", (str,)),
    int: ("an integer", (int,)),
    float: ("a number", (int, float)),
    bool: ("true or false", (bool,)),
}
MODEL = "model.safetensors"
KEPT = 2  # the number of checkpoints to keep: the last, and the previous one in case the last is damaged


def new_folder(root: Path, name: str) -> Path:
    """Make and return a folder that did not exist: `name`, or `name`-2, `name`-3, ... under `root`."""
    number = 1
    while True:
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except OSError as error:
            if not os.path.lexists(path):  # the name is not taken, so the problem is `root`
                raise UserError(f"the run folder {path} cannot be made: {error.strerror}. Write --runs DIR") from None
            number += 1
        else:
            return path


class RunFolder:
    """Reads and writes the files of one run. A file is complete or does not exist.

    A path without config.json may stand for a line of runs.jsonl. Settings, metrics and results are then read from that line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def has(self, name: str) -> bool:
        """Return whether the run has this file, or a line that stands for it."""
        return (self.path / name).exists() or (name in KEYS and self._record() is not None)

    def _record(self) -> Record | None:
        """Return the line of runs.jsonl that stands for the folder, if one does."""
        return None if (self.path / "config.json").exists() else find_record(self.path)

    @property
    def finished(self) -> bool:
        """Return whether the run has ended."""
        return self.has("result.json")

    def locate(self, name: str) -> str:
        """Return where the contents of a file are, for an error."""
        path = self.path / name
        if not path.exists() and self.has(name):
            return f"{KEYS[name]!r} of {self.path.name} in {self.path.parent / FILE}"
        return str(path)

    def remove_if_only_settings(self) -> None:
        """Remove the folder if it contains only the settings. Call this if training rejected them."""
        if [path.name for path in self.path.iterdir()] == ["config.json"]:
            (self.path / "config.json").unlink()
            self.path.rmdir()

    def is_locked(self) -> bool:
        """Return whether another process trains the run."""
        with (self.path / "config.json").open() as file:
            return not try_lock(file)  # closing the file releases the lock

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run inside the context, so that no other process trains it. Remove leftovers of a killed process."""
        with (self.path / "config.json").open() as file:
            if not try_lock(file):
                raise UserError(f"{self.path} is being trained by another process")
            for leftover in self.path.rglob(f".*{files.PARTIAL}"):
                shutil.rmtree(leftover, ignore_errors=True)
            yield

    # Reading settings and results.

    def check_format(self) -> None:
        """Raise an error if a later version wrote the folder in a format that this version does not know."""
        stamp = self._raw_environment()
        if isinstance(found := stamp.get("format", 1), int) and found > FORMAT:
            raise UserError(later_version(str(self.path), stamp.get("pwlu"), (found, FORMAT)))

    def _raw_environment(self) -> dict[str, Any]:
        """Return environment.json unchecked; empty if it cannot be read."""
        path = self.path / "environment.json"
        try:
            found = parse_json(path.read_bytes()) if path.exists() else (self._record() or {}).get("environment")
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def settings(self) -> Settings:
        """Return the settings that the run was started with."""
        self.check_format()
        config = self.config()
        known = {f.name: f.default for f in dataclasses.fields(Settings)}
        values = {name: None if value is dataclasses.MISSING else value for name, value in known.items()} | config
        if unknown := [name for name in config if name not in known]:
            raise self._no_settings(f"{', '.join(unknown)} is not a setting of pwlu {__version__}")
        if missing := [name for name, value in values.items() if value is None and name not in _OPTIONAL]:
            raise self._no_settings(f"it does not say {', '.join(missing)}")
        return check(Settings(**config))

    def config(self) -> dict[str, Any]:
        """Return config.json, with the types of known settings checked. Other versions may have written unknown settings."""
        config = {"rule": PAPER} | self.json("config.json")  # older runs do not name a rule, and used that of the paper
        for f in dataclasses.fields(Settings):
            kind, types = _KINDS[f.type]
            if config.get(f.name) is not None and not isinstance(config[f.name], types):
                raise self._no_settings(f"{f.name} must be {kind}, not {config[f.name]!r}")
        return config

    def fuse_norms(self) -> str:
        """Return what --fuse-norms auto chose when the run started, on or off; auto if that is unknown."""
        known = self.json("environment.json") if (self.path / "environment.json").exists() else {}
        return str(known.get("fuse_norms", "auto"))

    def _no_settings(self, wrong: str) -> UserError:
        return self.unreadable(f"{self.locate('config.json')} does not hold the settings of a run: {wrong}")

    def unreadable(self, what: str, remedy: str = _AGAIN) -> UserError:
        """Return an error that says what is wrong with a file of the run. If a later version wrote it, say that instead."""
        written_by = self._raw_environment().get("pwlu")
        if _release(written_by) > _release(__version__):
            return UserError(f"{later_version(str(self.path), written_by)}. ({what})")
        return UserError(f"{what}. {remedy}")

    def json(self, name: str) -> dict[str, Any]:
        """Return the contents of a JSON file of the run."""
        path = self.path / name
        try:
            text = path.read_text(encoding="utf-8")
            content = parse_json(text)
        except (FileNotFoundError, NotADirectoryError):
            record = self._record() if name in KEYS else None
            if record is None:
                raise UserError(f"{self.path} is not a run folder: it has no {name}") from None
            content = record.get(KEYS[name])
            text = json.dumps(content)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise self.unreadable(f"{path} is damaged: {error}") from None
        if not isinstance(content, dict):
            raise self.unreadable(f"{self.locate(name)} is damaged: expected {{...}}, not {text.strip():.40}")
        return content

    def environment(self) -> dict[str, Any]:
        """Return environment.json: strings and numbers about the versions and the hardware of the run."""
        usual = "a string or a number", (str, int, float, type(None))
        return self._typed("environment.json", usual, side_by_side=("a number", (int,)))

    def result(self) -> dict[str, Any]:
        """Return result.json: numbers, None where unknown, and the kind of images that the run was measured on."""
        usual = "a number", (int, float, type(None))
        return self._typed("result.json", usual, measured_on=("a string", (str, type(None))))

    def _typed(self, file: str, usual: _Kind, **others: _Kind) -> dict[str, Any]:
        """Return the contents of a JSON file. Check that all values are of the usual kind, and `others` of theirs."""
        found = self.json(file)
        for name, value in found.items():
            words, types = others.get(name, usual)
            if not isinstance(value, types):
                raise self.unreadable(f"{self.locate(file)} is damaged: {name} must be {words}, not {value!r}")
        return found

    def iou(self) -> float | None:
        """Return the median over channels of the IOU of bounds and inputs; None if there are no PWLUs."""
        if (record := self._record()) is not None:
            if not isinstance(found := record.get("iou"), (int, float, type(None))):
                raise self.unreadable(f"'iou' of {self.path.name} in {self.path.parent / FILE} must be a number, not {found!r}")
            return found
        file = self.path / "alignment.json"
        if not file.exists():
            return None
        try:
            found = Alignment.from_json(file.read_text(encoding="utf-8")).iou
        except (ValueError, OSError) as error:
            raise UserError(f"{file} does not hold the alignment of a run: {error}") from None
        return statistics.median(found) if found else None

    # Writing.

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file."""
        self.write(name, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())

    def write_tensors(self, name: str, content: Any) -> None:
        """Write a file that ``torch.load(weights_only=True)`` reads."""
        self.write(name, serialised(content))

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically. If that fails, as on a full disk, the error names the last checkpoint."""
        target = self.path / name
        try:
            with files.explain_errors(target):
                target.parent.mkdir(exist_ok=True)
            files.write(target, content)
        except files.CannotWrite as error:
            last = next(reversed(self.checkpoints()), None)
            done = f"The last checkpoint is {last.name}" if last else "No checkpoint is saved yet"
            begun = (self.path / "config.json").exists()
            raise UserError(
                f"{error.what}. {done}: {error.remedy}, then "
                + (f"continue with pwlu train --resume {shlex.quote(str(self.path))}" if begun else "start again")
            ) from None

    # Metrics.

    def metrics(self) -> list[dict[str, Any]]:
        """Return one row per epoch: numbers or None by name. Leave out an incomplete last line, as a full disk leaves."""
        path = self.path / "metrics.jsonl"
        try:
            *lines, end = path.read_bytes().split(b"\n")
        except (FileNotFoundError, NotADirectoryError):
            rows = (self._record() or {}).get("metrics", [])
            lines, end = [json.dumps(row).encode() for row in (rows if isinstance(rows, list) else [rows])], b""
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        found = []
        for number, line in enumerate([*lines, end], start=1):
            try:
                found.append(_parse_row(line))
            except ValueError as error:
                if number <= len(lines) or not isinstance(error, json.JSONDecodeError):
                    raise self.unreadable(
                        f"line {number} of {self.locate('metrics.jsonl')} is damaged: {error}, not "
                        f"{line.decode(errors='replace'):.40}",
                        "Correct it or remove it, or copy the file again from where it was trained. Nothing was changed",
                    ) from None
        return found

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Add a row."""
        self._write_metrics([*self.metrics(), row])

    def forget_metrics_after(self, step: int) -> None:
        """Remove the rows after a step, because the run continues from the checkpoint of that step."""
        self._write_metrics([row for row in self.metrics() if row["step"] <= step])

    def _write_metrics(self, rows: list[dict[str, Any]]) -> None:
        self.write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())

    # Checkpoints.

    def checkpoints(self) -> list[Path]:
        """Return the checkpoint files from the oldest to the newest."""
        return sorted((self.path / "checkpoints").glob("step-*.pt"))

    def save_checkpoint(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint, then remove all but the last two."""
        content = serialised(state)
        self.write(f"checkpoints/step-{step:08d}-{_digest(content)}.pt", content)
        for old in self.checkpoints()[:-KEPT]:
            old.unlink()

    def load_checkpoint(self, device: torch.device) -> dict[str, Any] | None:
        """Return the newest checkpoint; None if there is none. If it is damaged, raise an error that names it."""
        found = self.checkpoints()
        if not found:
            return None
        content = found[-1].read_bytes()
        if _digest(content) != found[-1].stem.rpartition("-")[2]:
            instead = f"from {found[-2].name}" if len(found) > 1 else "from the beginning"
            raise UserError(
                f"the checkpoint {found[-1]} is damaged: its contents have changed since it was written. Remove or rename it. "
                f"Then --resume continues {instead}"
            )
        try:
            return tensors(io.BytesIO(content), device)
        except ValueError as error:
            raise UserError(f"the checkpoint {found[-1]} is damaged: {error}. Remove or rename it") from None


def _parse_row(line: bytes) -> dict[str, Any]:
    row = parse_json(line)
    numbers = isinstance(row, dict) and all(value is None or isinstance(value, (int, float)) for value in row.values())
    if not numbers or not isinstance(row.get("step"), int) or row["step"] < 1:
        raise ValueError('it must be the numbers of an epoch, such as {"epoch": 1, "step": 98, "loss": 2.5}')
    return row


def _release(version: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d{1,9}", str(version))[:3])


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]
