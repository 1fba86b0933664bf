"""Update the tables of a Markdown page from results/, so that nobody types their numbers.

    <!-- table: cifar100/resnet18 activations epochs=60 -->
    ... replaced ...
    <!-- end of table -->

A ``table`` marker names a recipe, a preset (or activations separated by commas), and changes of settings. A ``runs`` marker
names recipes and changes; its table has one row per experiment found. A marker must start at the beginning of a line. An
indented marker, as above, is ordinary text. Text outside of the tables does not change.
"""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pwlu.common.text import nearest
from pwlu.lab.compare.presets import comparison
from pwlu.lab.compare.table import Table
from pwlu.lab.compare.trials_table import trials_table
from pwlu.lab.recipes import catalog
from pwlu.lab.recipes.settings import Settings, UserError
from pwlu.lab.runs.results import Run

_END = "<!-- end of table -->"
_MARKER = re.compile(r"<!--\s*(table|runs|end of table)\b(.*?)-->")


def update(path: Path, runs: Iterable[Run]) -> tuple[str, str]:
    """Return the text of the page before and after its tables are updated."""
    try:
        before = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    runs, lines, opened, tables = list(runs), [], 0, 0
    for number, line in enumerate(before.split("\n"), start=1):
        found = _MARKER.match(line)
        try:
            if found is None:
                lines += [] if opened else [line]
            elif line[found.end() :].strip():
                raise UserError("a marker must be on a line of its own")
            elif found.group(1) != "end of table":
                if opened:
                    raise UserError(f"the table of line {opened} has no {_END} before the next table")
                lines += [line, "", _make_table(found.group(1), found.group(2), runs), ""]
                opened, tables = number, tables + 1
            else:
                if not opened:
                    raise UserError(f"{_END} has no <!-- table: RECIPE PRESET --> before it")
                lines.append(line)
                opened = 0
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    if opened:
        raise UserError(f"{path}: the table of line {opened} has no {_END}")
    if not tables:
        raise UserError(
            f"{path} has no markers for a table. Write\n    <!-- table: cifar100/resnet18 activations -->\n    {_END}"
        )
    return before, "\n".join(lines)


def _make_table(kind: str, text: str, runs: list[Run]) -> str:
    words = text.removeprefix(":").split()
    if not text.startswith(":") or len(words) < (2 if kind == "table" else 1):
        expected = "RECIPE PRESET" if kind == "table" else "RECIPE ..."
        raise UserError(f"expected <!-- {kind}: {expected} [setting=value ...] -->, not <!-- {kind}{text}-->")
    if kind == "table":
        return Table(comparison(words[0], words[1], dict(map(_parse_change, words[2:]))), runs).markdown()
    recipes = [word for word in words if "=" not in word]
    for recipe in recipes:
        catalog.find(recipe)
    return trials_table(recipes, dict(_parse_change(word) for word in words if "=" in word), runs)


def _parse_change(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    kinds = {field.name: field.type for field in dataclasses.fields(Settings) if field.metadata.get("machine") is False}
    kinds = {name: kind for name, kind in kinds.items() if name not in ("activation", "seed")}
    name = name.replace("-", "_")
    if name not in kinds:
        near = nearest(name, kinds)
        raise UserError(
            f"{word!r} does not name a setting."
            + (f" Did you mean {near[0]}=...?" if near else f" Settings are {', '.join(kinds)}")
        )
    try:
        return name, kinds[name](value)  # type: ignore[operator]
    except ValueError:
        raise UserError(f"{word!r}: {value!r} is not of type {getattr(kinds[name], '__name__', kinds[name])}") from None
