"""What README.md and the page on conversion show must work as it stands there."""

import re
from pathlib import Path

import pytest

from pwlu.cli import main

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["README.md", "docs/conversion.md", "docs/deploy.md"])
def test_the_code_runs(page, tmp_path, monkeypatch):
    pytest.importorskip("torchvision")
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_what_it_links_to_exists(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target


def test_tables_are_made_from_results(capsys):
    assert main(["compare", "--document", str(ROOT / "docs/results.md"), "--results", str(ROOT / "results"), "--check"]) == 0
    assert "skipped" not in capsys.readouterr().err


def test_the_tests_it_names_exist():
    """docs/paper.md names the test of every decision."""
    names = set(re.findall(r"`(test_\w+(?:\.py)?)`", (ROOT / "docs" / "paper.md").read_text()))
    assert names
    tests = {path.name: path.read_text() for path in (ROOT / "tests").glob("*.py")}
    missing = [name for name in names if name not in tests and not any(f"def {name}(" in text for text in tests.values())]
    assert not missing
