"""Tables for a terminal, and numbers of things."""

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


def counted(number: int, one: str, many: str = "") -> str:
    """``1 image``, ``2,000 images``. `many`: where it is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
