"""The reports of public functions: tables with one row per place, unit or call."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Generic, TypeVar

Row = TypeVar("Row")


class RowReport(Generic[Row]):
    """A report that iterates over its rows. A subclass names the attribute that has them: ``RowReport[Site], rows="sites"``."""

    _rows: str

    def __init_subclass__(cls, rows: str = "") -> None:
        if rows:  # a user's subclass of a report has the same rows
            cls._rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(getattr(self, self._rows))

    def __len__(self) -> int:
        return len(getattr(self, self._rows))

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return one dictionary per row, for a data frame or JSON."""
        return [asdict(row) for row in getattr(self, self._rows)]
