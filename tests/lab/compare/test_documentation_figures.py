"""The picture of all cells in docs/results.md."""

import runpy
from pathlib import Path

import pytest
from example_runs import example_run

ROOT = Path(__file__).parents[3]


@pytest.fixture
def cells():
    pytest.importorskip("matplotlib")
    return runpy.run_path(str(ROOT / "docs/figures.py"))["cells"]


def test_cells_that_are_measured_later_appear(tmp_path, cells):
    """In the order of the catalog: all trainings of ReLU on test images that another activation can be compared with."""
    for recipe, changes in (("imagenette/resnet18", {}), ("digits", {}), ("digits", {"epochs": 60}), ("cifar100/resnet18", {})):
        alone = recipe.startswith("cifar100")
        for activation in ("relu",) if alone else ("relu", "pwlu", "dyrelu"):
            for seed in (0, 1):
                name = f"{recipe}-{activation}{seed}-{changes}".replace("/", "-")
                example_run(tmp_path / name, 70.0 + seed, recipe, activation=activation, seed=seed, **changes)
    example_run(tmp_path / "tried", 99.0, "digits", holdout=100)
    example_run(tmp_path / "ablation", 99.0, "digits", intervals=4)
    example_run(tmp_path / "alone", 99.0, "digits", activation="relu", holdout=100)
    found = [(table.comparison.recipe, table.comparison.differences(), list(table.statistics())) for table in cells(tmp_path)]
    rows = ["ReLU", "PWLU", "DY-ReLU-B"]
    assert found == [("imagenette/resnet18", {}, rows), ("digits", {}, rows), ("digits", {"epochs": 60}, rows)]


def test_the_picture_is_up_to_date(cells):
    """It was drawn from the results/ of today: the names of its panels stand in the SVG as comments."""
    picture = (ROOT / "docs/images/improvements.svg").read_text()
    missing = [
        t.comparison.recipe
        for t in cells(ROOT / "results")
        if f"<!-- ReLU: {t.baseline.mean_of(t.metrics[0]):.2f} -->" not in picture
    ]
    assert not missing, "run python docs/figures.py improvements"
