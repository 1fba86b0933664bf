"""Records of finished runs without their run folders: ``results/RECIPE/runs.jsonl`` has one line of JSON per run.

A line has the keys ``run`` (a name), ``settings``, ``environment``, ``metrics`` (one object per epoch), ``result`` and ``iou``.
The path of such a run consists of the folder of the file and the name, such as ``results/digits/pwlu-seed0``. A folder at that
path may hold further files of the run, such as its functions.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock

from pwlu.common import files
from pwlu.common.text import parse_json

FILE = "runs.jsonl"
KEYS = {"config.json": "settings", "environment.json": "environment", "metrics.jsonl": "metrics", "result.json": "result"}

Record = dict[str, Any]


def find_record(path: Path) -> Record | None:
    """Return the record of the run with this path; None if there is none."""
    return read_records(path.parent)[0].get(path.name)


def read_records(folder: Path) -> tuple[dict[str, Record], list[str]]:
    """Return the records in a folder's file by name, and one sentence for each line that cannot be read."""
    file = folder / FILE
    try:
        state = file.stat()
    except OSError:
        return {}, []
    return _read(file, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=64)
def _read(file: Path, *_: int) -> tuple[dict[str, Record], list[str]]:
    records: dict[str, Record] = {}
    wrong = []
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        return {}, [f"{file} cannot be read: {error.strerror}"]
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
            name = record["run"] if isinstance(record, dict) else None
            if not isinstance(name, str) or Path(name).name != name:
                raise ValueError('expected {"run": "pwlu-seed0", ...}')
            if name in records:
                raise ValueError(f"{name} is the name of an earlier line")
            records[name] = record
        except (ValueError, KeyError) as error:
            wrong.append(f"line {number} of {file} is damaged: {error}. Correct it or remove it")
    return records, wrong


def add_record(folder: Path, name: str, record: Record, attach: Callable[[Path], None]) -> Path:
    """Add a line to the runs.jsonl of a folder, and return the path of the new run.

    If the name is taken, a number is appended to it. This happens if a recipe has changed since an earlier run. `attach` writes
    further files of the run, given its path. It is called before the line is written.
    """
    file = folder / FILE
    with files.explain_errors(file):
        folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / f".{FILE}.lock"):
        taken, number, path = read_records(folder)[0], 1, folder / name
        while path.name in taken or (path / "config.json").exists():
            number += 1
            path = folder / f"{name}-{number}"
        attach(path)
        line = json.dumps({"run": path.name} | record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        before = file.read_bytes() if file.exists() else b""
        files.write(file, before + (b"" if before.endswith(b"\n") or not before else b"\n") + line.encode() + b"\n")
    return path
