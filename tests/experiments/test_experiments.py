"""The experiments that stand alone, with their smallest settings."""

import os
from pathlib import Path

import pytest
import torch
from imported import SOURCES

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def printed_by(processes):
    """Run an experiment, and return what it prints."""

    def run(name, *arguments):
        folders = (EXPERIMENTS, SOURCES)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}  # for processes that it starts
        done = processes(["-m", name, *arguments], environment, folders)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def rows(text):
    """Return the cells of each row of a Markdown table by the name of the row."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {cells[0]: cells[1:] for cells in lines[2:]}


@pytest.mark.slow
def test_language_model(printed_by, tmp_path):
    found = rows(printed_by("language_model", "--tiny", "--seeds", "1", "--kinds", "pwlu", "--out", tmp_path))
    assert list(found) == ["PWLU per channel, from GELU"]
    assert len((tmp_path / "language_model.jsonl").read_text().splitlines()) == 1


def test_the_table_of_language_models_is_that_of_the_runs(printed_by):
    printed = printed_by("language_model", "--table", str(EXPERIMENTS / "language_model.jsonl"))
    assert printed.strip() in (EXPERIMENTS.parent / "docs" / "results.md").read_text()


def test_lipschitz_functions(printed_by):
    found = rows(printed_by("lipschitz_functions", "--networks", "2", "--steps", "2"))
    assert {"ReLU", "GroupSort", "PWLU from the identity", "PWLU from the absolute value"} <= set(found)
    assert all(float(cell.split()[0]) > 0 for cells in found.values() for cell in cells)


def test_ridge_denoiser(printed_by, tmp_path):
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        ramp = torch.arange(160)[:, None] + torch.arange(160)[None] + number
        pixels = bytes((ramp % 256).to(torch.uint8).flatten().tolist())
        image.frombytes("L", (160, 160), pixels).save(folder / f"{number:02}.png")
    found = rows(printed_by("ridge_denoiser", "--images", str(folder), "--tests", "1", "--steps", "1"))
    assert set(found) == {"(noisy image)", "ReLU", "soft shrinkage", "PWLU"}
    assert all(10 < float(cell.split()[0]) < 60 for cells in found.values() for cell in cells)
