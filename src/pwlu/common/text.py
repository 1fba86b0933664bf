"""Text for terminals and errors: tables, plurals, lists of names, install hints; and strict parsing of JSON."""

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = False) -> list[str]:
    """Return the lines of a table: the head, a rule, the rows. With `numbers`, align all columns but the first to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if numbers and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [line(head), "  ".join("-" * width for width in widths), *(line(row) for row in rows)]


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: ``1 image``, ``2,000 images``. `many` is the plural, if it is not `one` plus "s"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def abbreviate(names: Sequence[str], most: int = 3) -> str:
    """Join the first names of a list, and say how many more there are. An empty name is that of the model itself."""
    listed = ", ".join(name or "the model" for name in names[:most])
    return listed + (f" and {len(names) - most:,} more" if len(names) > most else "")


def nearest(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.5) -> list[str]:
    """Return the known names most similar to this one, for an error that suggests them."""
    return difflib.get_close_matches(name, list(known), most, cutoff)


def install(*extras: str) -> str:
    """Return the command that installs the packages of these extras. pwlu is installed from a clone, not by name."""
    return f"pip install '.[{','.join(extras)}]' in the folder of pwlu's sources"


def parse_json(text: str | bytes) -> Any:
    """Parse JSON strictly; raise ValueError if a number is not finite, or the text is not valid UTF-8."""
    try:
        text = text if isinstance(text, str) else text.decode()  # json would guess other encodings
        content = json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_finite_int)
        json.dumps(content, ensure_ascii=False).encode()  # fails for a lone surrogate such as \ud800
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    return content


def _finite(number: str) -> float:
    if not math.isfinite(float(number)):
        raise ValueError(f"{number} is not a finite number")
    return float(number)


def _finite_int(number: str) -> int:
    _finite(number)  # must fit into a float
    return int(number)
