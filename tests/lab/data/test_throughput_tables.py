"""The tables of images per second in docs/scale.md are those of the measurements."""

import importlib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = (ROOT / "docs" / "scale.md").read_text()
    for table in importlib.import_module("data").tables().split("\n\n"):
        assert table in page, f"docs/scale.md is out of date: copy the output of python benchmarks/data.py --tables\n{table}"
