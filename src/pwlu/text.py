"""Tables for a terminal, numbers of things, names in errors, how to install more, and JSON that others may have written."""

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = False) -> list[str]:
    """The lines of a table: the head, a rule, the rows. `numbers`: all columns but the first stand to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if numbers and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [line(head), "  ".join("-" * width for width in widths), *(line(row) for row in rows)]


def counted(number: int, one: str, many: str = "") -> str:
    """``1 image``, ``2,000 images``. `many`: where it is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def abbreviate(names: Sequence[str]) -> str:
    """Return the first three names of a list, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def nearest(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.5) -> list[str]:
    """Return the known names that look most like this one, for an error that asks whether they were meant."""
    return difflib.get_close_matches(name, list(known), most, cutoff)


def install(*extras: str) -> str:
    """Return how to install what an extra of the package needs: it is installed from its sources, not by name."""
    return f"pip install '.[{','.join(extras)}]' in the folder of pwlu's sources"


def parsed(text: str | bytes) -> Any:
    """Return what JSON says. Numbers are finite, and texts are UTF-8; else that is a ValueError."""
    try:
        text = text if isinstance(text, str) else text.decode()  # json would guess other encodings
        content = json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_within_reach)
        json.dumps(content, ensure_ascii=False).encode()  # an escape such as \ud800 alone is no character
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return content


def _finite(number: str) -> float:
    if not math.isfinite(float(number)):
        raise ValueError(f"{number} is no finite number")
    return float(number)


def _within_reach(number: str) -> int:
    _finite(number)  # a float can have it
    return int(number)
