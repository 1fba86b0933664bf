"""The experiments that stand alone, with their smallest settings."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def printed_by(name, *arguments, cwd):
    command = [sys.executable, str(EXPERIMENTS / name), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(text):
    """Return the cells of each row of a Markdown table by the name of the row."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {cells[0]: cells[1:] for cells in lines[2:]}


def test_language_model(tmp_path):
    found = rows(printed_by("language_model.py", "--tiny", "--seeds", "1", "--kinds", "pwlu", "--out", "lm", cwd=tmp_path))
    assert list(found) == ["PWLU per channel, from GELU"]
    assert len((tmp_path / "lm" / "language_model.jsonl").read_text().splitlines()) == 1


def test_the_table_of_language_models_is_that_of_the_runs(tmp_path):
    printed = printed_by("language_model.py", "--table", str(EXPERIMENTS / "language_model.jsonl"), cwd=tmp_path)
    assert printed.strip() in (EXPERIMENTS.parent / "docs" / "results.md").read_text()


def test_lipschitz_functions(tmp_path):
    found = rows(printed_by("lipschitz_functions.py", "--networks", "2", "--steps", "2", cwd=tmp_path))
    assert {"ReLU", "GroupSort", "PWLU from the identity", "PWLU from the absolute value"} <= set(found)
    assert all(float(cell.split()[0]) > 0 for cells in found.values() for cell in cells)


def test_ridge_denoiser(tmp_path):
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        ramp = torch.arange(160)[:, None] + torch.arange(160)[None] + number
        pixels = bytes((ramp % 256).to(torch.uint8).flatten().tolist())
        image.frombytes("L", (160, 160), pixels).save(folder / f"{number:02}.png")
    found = rows(printed_by("ridge_denoiser.py", "--images", str(folder), "--tests", "1", "--steps", "1", cwd=tmp_path))
    assert set(found) == {"(noisy image)", "ReLU", "soft shrinkage", "PWLU"}
    assert all(10 < float(cell.split()[0]) < 60 for cells in found.values() for cell in cells)
