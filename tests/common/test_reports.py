"""What reports of functions share."""

from dataclasses import dataclass

from pwlu.common.reports import RowReport


@dataclass
class Place:
    name: str


@dataclass
class Places(RowReport[Place], rows="found"):
    found: list[Place]


class Mine(Places):
    """A user's subclass."""


def test_reports_iterate_over_their_rows():
    for kind in (Places, Mine):
        report = kind([Place("a"), Place("b")])
        assert [each.name for each in report] == ["a", "b"]
        assert len(report) == 2
        assert report.as_dicts() == [{"name": "a"}, {"name": "b"}]
