"""Tables for a terminal."""

from collections.abc import Sequence


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
