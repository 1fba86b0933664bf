"""A run on disk: what was asked for, where, what came out, and where to go on.

RUN/config.json         the settings
RUN/environment.json    source revision, versions, hardware, and what --fuse-norms auto came to
RUN/metrics.jsonl       a line an epoch
RUN/checkpoints/        step-00000980-1f2e3d4c.pt: the number of steps, and the beginning of the contents' SHA-256
RUN/snapshots/          step-00000980.pt: the functions of all PWLUs, 90 bytes a function
RUN/result.json         written last: the run is finished
RUN/functions.pt, alignment.json, report.md, model.pt    with it; inputs.json is alignment.json with histograms of the inputs
"""

import dataclasses
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pwlu import files
from pwlu.lab.recipes.settings import Settings, UserError, check
from pwlu.lab.runs.locks import locked
from pwlu.text import parsed
from pwlu.version import __version__

_AGAIN = "Copy it again from where it was trained, or train again"
_UNSAID = ("norm_weight_decay", "channels_last", "device", "workers")  # settings of a run that may be None
_KINDS: dict[Any, tuple[str, tuple[type, ...]]] = {  # of a setting: what it is called, and what JSON may have for it
    str: ("a text", (str,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    bool: ("true or false", (bool,)),
}
KEPT = 2  # checkpoints: the last, and one before it in case the last is damaged


def new_folder(root: Path, name: str) -> Path:
    """A folder that did not exist: `name`, or `name`-2, `name`-3, ... under `root`."""
    number = 1
    while True:
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except OSError as error:
            if not os.path.lexists(path):  # what is in the way is `root`
                raise UserError(f"the run folder {path} cannot be made: {error.strerror}. Write --runs DIR") from None
            number += 1
        else:
            return path


def no_run(path: Path, *files: str) -> UserError:
    """What is at a path instead of a run, and which runs are near: folders that have all these files."""
    levels = range(2)
    if path.is_dir():
        inside = sorted(entry.name for entry in path.iterdir())
        there = ", ".join(inside[:5]) + (", ..." if len(inside) > 5 else "") if inside else "nothing"
        said, near, levels = f"{path} is not a run folder: it has no config.json, but {there}", path, range(5)
    elif path.exists():
        said, near = f"{path} is a file. Write the folder of a run", path.parent
    else:
        said, near = f"there is no folder {path}", next(parent for parent in path.parents if parent.is_dir())
    for level in levels:  # results/ has runs four levels down; a folder that was not asked for is not searched for so long
        folders = sorted(file.parent for file in near.glob("*/" * level + files[0]))
        if runs := [str(folder) for folder in folders if all((folder / name).exists() for name in files)]:
            return UserError(f"{said}. There is {', '.join(runs[:5])}" + (", ..." if len(runs) > 5 else ""))
    return UserError(f"{said}. A run is what pwlu train makes, a folder with {' and '.join(files)}")


class RunFolder:
    """Reads and writes the files of one run. Every file appears complete or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / "result.json").exists()

    def remove_if_bare(self) -> None:
        """Take back a folder in which nothing was begun: settings that cannot be trained are no run."""
        if [path.name for path in self.path.iterdir()] == ["config.json"]:
            (self.path / "config.json").unlink()
            self.path.rmdir()

    @contextmanager
    def held(self) -> Iterator[None]:
        """As long as one process trains the run, no other may."""
        with (self.path / "config.json").open() as file:
            if not locked(file):
                raise UserError(f"{self.path} is being trained by another process")
            for left in self.path.rglob(f".*{files.PARTIAL}"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            yield

    def settings(self) -> Settings:
        """What was asked for, as config.json has it."""
        config = self.config()
        known = {f.name: f.default for f in dataclasses.fields(Settings)}
        said = {name: None if value is dataclasses.MISSING else value for name, value in known.items()} | config
        if strange := [name for name in config if name not in known]:
            raise self._no_settings(f"{', '.join(strange)} is no setting of pwlu {__version__}")
        if missing := [name for name, value in said.items() if value is None and name not in _UNSAID]:
            raise self._no_settings(f"it does not say {', '.join(missing)}")
        return check(Settings(**config))

    def config(self) -> dict[str, Any]:
        """config.json as it is: of another version, it may have other settings. Those that we know are of their kinds."""
        config = self.json("config.json")
        for f in dataclasses.fields(Settings):
            kind, types = _KINDS[f.type]
            if config.get(f.name) is not None and not isinstance(config[f.name], types):
                raise self._no_settings(f"{f.name} must be {kind}, not {config[f.name]!r}")
        return config

    def fuse_norms(self) -> str:
        """Return what --fuse-norms auto came to when the run was begun, on or off; auto if that is not known."""
        known = self.json("environment.json") if (self.path / "environment.json").exists() else {}
        return str(known.get("fuse_norms", "auto"))

    def _no_settings(self, wrong: str) -> UserError:
        return self.unreadable(f"{self.path / 'config.json'} does not hold the settings of a run: {wrong}")

    def unreadable(self, what: str, remedy: str = _AGAIN) -> UserError:
        """Return the error that says what is wrong with a file of the run, or that a later version wrote it."""
        try:
            written_by = parsed((self.path / "environment.json").read_text(encoding="utf-8"))["pwlu"]
        except (OSError, ValueError, LookupError, TypeError):
            written_by = ""
        if _release(written_by) > _release(__version__):
            return UserError(
                f"{self.path} was written by a later version, pwlu {written_by}, and this is pwlu {__version__}: update it "
                f"to read that run. ({what})"
            )
        return UserError(f"{what}. {remedy}")

    def json(self, name: str) -> dict[str, Any]:
        """The contents of a JSON file of the run."""
        path = self.path / name
        try:
            text = path.read_text(encoding="utf-8")
            content = parsed(text)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{self.path} is not a run folder: it has no {name}") from None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise self.unreadable(f"{path} is damaged: {error}") from None
        if not isinstance(content, dict):
            raise self.unreadable(f"{path} is damaged: expected {{...}}, not {text.strip():.40}")
        return content

    def environment(self) -> dict[str, Any]:
        """Return where and with what the run was made, as environment.json has it: texts and numbers."""
        found = self.json("environment.json")
        for name, value in found.items():
            kind = (int,) if name == "side_by_side" else (str, int, float, type(None))
            self._check("environment.json", name, value, kind, "a number" if name == "side_by_side" else "a text or a number")
        return found

    def result(self) -> dict[str, Any]:
        """Return what came out, as result.json has it: all of it but a name is numbers, or not known."""
        result = self.json("result.json")
        for name, value in result.items():
            text = name == "measured_on"
            kind = (str, type(None)) if text else (int, float, type(None))
            self._check("result.json", name, value, kind, "a text" if text else "a number")
        return result

    def _check(self, file: str, name: str, value: Any, kind: tuple[type, ...], words: str) -> None:
        if not isinstance(value, kind):
            raise self.unreadable(f"{self.path / file} is damaged: {name} must be {words}, not {value!r}")

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file."""
        self.write(name, as_json(content))

    def write_tensors(self, name: str, content: Any) -> None:
        """Write what ``torch.load(weights_only=True)`` reads."""
        self.write(name, _serialised(content))

    def write(self, name: str, content: bytes) -> None:
        """Write a file, as a whole or not at all; on a full disk, say how far the run has come."""
        target = self.path / name
        try:
            with files.explain_errors(target):
                target.parent.mkdir(exist_ok=True)
            files.write(target, content)
        except files.CannotWrite as error:
            last = next(reversed(self.checkpoints()), None)
            done = f"The run stands at {last.name}" if last else "Nothing of the run is saved yet"
            begun = (self.path / "config.json").exists()
            raise UserError(
                f"{error.what}. {done}: {error.remedy}, then "
                + (f"go on with pwlu train --resume {self.path}" if begun else "start again")
            ) from None

    # What was measured.

    def metrics(self) -> list[dict[str, Any]]:
        """Return a row for each epoch: numbers or None by name. An end that was cut off, as by a full disk, is left out."""
        path = self.path / "metrics.jsonl"
        try:
            *lines, end = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        rows = []
        for number, line in enumerate([*lines, end], start=1):
            try:
                rows.append(_row(line))
            except ValueError as error:
                if number <= len(lines) or not isinstance(error, json.JSONDecodeError):
                    raise self.unreadable(
                        f"line {number} of {path} is damaged: {error}, not {line.decode(errors='replace'):.40}",
                        "Mend it or remove it, or copy the file again from where it was trained. Nothing was changed",
                    ) from None
        return rows

    def add_metrics(self, row: dict[str, Any]) -> None:
        """One more epoch."""
        self._write_metrics([*self.metrics(), row])

    def forget_metrics_after(self, step: int) -> None:
        """Take back what was written after the checkpoint from which a run goes on."""
        rows = [row for row in self.metrics() if row["step"] <= step]
        self._write_metrics(rows)

    def _write_metrics(self, rows: list[dict[str, Any]]) -> None:
        self.write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())

    # Checkpoints.

    def checkpoints(self) -> list[Path]:
        """From the oldest to the newest."""
        return sorted((self.path / "checkpoints").glob("step-*.pt"))

    def save_checkpoint(self, step: int, state: dict[str, Any]) -> None:
        """Write one, then remove those that are not needed any more."""
        content = _serialised(state)
        self.write(f"checkpoints/step-{step:08d}-{_digest(content)}.pt", content)
        for old in self.checkpoints()[:-KEPT]:
            old.unlink()

    def load_checkpoint(self, device: torch.device) -> dict[str, Any] | None:
        """The newest, or None if there is none yet. A damaged one is an error that names it and the one before."""
        found = self.checkpoints()
        if not found:
            return None
        content = found[-1].read_bytes()
        if _digest(content) != found[-1].stem.rpartition("-")[2]:
            instead = f"from {found[-2].name}" if len(found) > 1 else "from the beginning"
            raise UserError(
                f"the checkpoint {found[-1]} is damaged: its contents are not what was written. Remove or rename it, and "
                f"--resume goes on {instead}"
            )
        try:
            return tensors(io.BytesIO(content), device)
        except ValueError as error:
            raise UserError(f"the checkpoint {found[-1]} is damaged: {error}. Remove or rename it") from None


def as_json(content: Any) -> bytes:
    """Return JSON for people and programs."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def _row(line: bytes) -> dict[str, Any]:
    row = parsed(line)
    numbers = isinstance(row, dict) and all(value is None or isinstance(value, (int, float)) for value in row.values())
    if not numbers or not isinstance(row.get("step"), int) or row["step"] < 1:
        raise ValueError('it must be the numbers of an epoch, such as {"epoch": 1, "step": 98, "loss": 2.5}')
    return row


def tensors(file: Path | io.BytesIO, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the dictionary of names that a file of torch's holds; whatever is wrong with the file is a ValueError."""
    try:
        content = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # torch raises errors of ten kinds, and speaks of its own options in six lines
        raise ValueError((str(error).strip().splitlines() or ["it is empty"])[0]) from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"expected a dictionary of names, not {type(content).__name__}")
    return content


def _release(version: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d{1,9}", str(version))[:3])


def _serialised(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]
