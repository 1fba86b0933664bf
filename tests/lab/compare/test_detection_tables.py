"""Tables of detectors: box AP and mask AP, beside the paper's."""

import csv

import pytest
from example_runs import example_run

from pwlu.lab.compare import paper
from pwlu.lab.compare.job import flags
from pwlu.lab.compare.presets import comparison
from pwlu.lab.compare.table import Table
from pwlu.lab.recipes.catalog import RECIPES, settings
from pwlu.lab.recipes.metrics import format_metrics
from pwlu.lab.runs.results import find_runs

NUCLEI = "nuclei/maskrcnn_resnet18_fpn"
ON = {"measured_on": "validation images", "measured_images": 133}


def made(root, recipe, what="relu,pwlu,frelu"):
    runs, complaints = find_runs(root)
    assert not complaints
    return Table(comparison(recipe, what, {}), runs)


@pytest.fixture
def runs(tmp_path):
    for seed, (relu, pwlu) in enumerate([((30.0, 20.0), (32.0, 23.0)), ((34.0, 22.0), (34.0, 23.0))]):
        for activation, (box, mask) in (("relu", relu), ("pwlu", pwlu)):
            result = ON | {"box_ap": box, "mask_ap": mask}
            example_run(tmp_path / f"{activation}{seed}", 0.0, NUCLEI, result, activation=activation, seed=seed)
    return tmp_path


def test_boxes_and_masks(runs):
    lines = made(runs, NUCLEI).markdown().splitlines()
    assert lines[0] == (
        "|  | box AP | gain over ReLU | mask AP | gain over ReLU | parameters | paper (COCO, ResNet-50): box AP | "
        "paper's gain | paper (COCO, ResNet-50): mask AP | paper's gain |"
    )
    # standard deviations 2 sqrt(2), sqrt(2), sqrt(2), 0; errors sqrt(8 / 2 + 2 / 2) and sqrt(2 / 2)
    assert lines[2] == "| ReLU | 32.00 ± 2.83 (2) |  | 21.00 ± 1.41 (2) |  | 1,234,567 | 39.06 |  | 35.30 |  |"
    assert lines[3] == (
        "| PWLU | 33.00 ± 1.41 (2) | +1.00 ± 2.24 | 23.00 ± 0.00 (2) | +2.00 ± 1.00 | 1,234,567 | 40.48 | +1.42 | 37.13 | "
        "+1.83 |"
    )
    assert lines[4] == "| FReLU | not measured yet |  |  |  |  | 40.25 | +1.19 | 36.90 | +1.60 |"
    assert lines[6].startswith(f"`{NUCLEI}`, 20 epochs, 133 validation images. ")


def test_boxes_alone(tmp_path):
    recipe = "coco/retinanet_resnet50_fpn"
    example_run(tmp_path / "a", 0.0, recipe, ON | {"box_ap": 37.0}, activation="relu")
    lines = made(tmp_path, recipe, "relu,swish").markdown().splitlines()
    assert lines[2] == "| ReLU | 37.00 (1) |  | 1,234,567 | 37.06 |  |"
    assert lines[3] == "| Swish | not measured yet |  |  | 37.82 | +0.76 |"
    assert f"`{recipe}`, 270,000 iterations, " in lines[5]


def test_csv(runs):
    table = made(runs, NUCLEI)
    relu, pwlu = csv.DictReader(table.csv().splitlines())
    assert {name: float(pwlu[name]) for name in ("box_ap", "gain", "mask_ap", "mask_ap_gain", "paper_gain")} == {
        "box_ap": 33.0,
        "gain": 1.0,
        "mask_ap": 23.0,
        "mask_ap_gain": 2.0,
        "paper_gain": 1.42,
    }
    assert relu["mask_ap_gain"] == ""
    assert float(pwlu["mask_ap_paper"]) == 37.13
    assert [float(row["mask_ap"]) for row in csv.DictReader(table.runs_csv().splitlines())] == [20, 22, 23, 23]
    assert table.statistics()["PWLU"] == (33.0, pytest.approx(2**0.5), 2)
    assert {title: round(gain, 2) for title, gain in table.paper_gains().items()} == {"PWLU": 1.42}


def test_a_result_without_masks_is_not_one_of_mask_rcnn(tmp_path):
    example_run(tmp_path / "a", 0.0, NUCLEI, ON | {"box_ap": 37.0})
    _, (complaint,) = find_runs(tmp_path)
    assert "result.json does not say mask_ap. Copy it again" in complaint


def test_the_paper():
    assert {d: paper.value("box_ap", f"{d}_resnet50_fpn", "relu") for d in ("maskrcnn", "retinanet")} == {
        "maskrcnn": 39.06,
        "retinanet": 37.06,
    }
    assert paper.gain("retinanet_resnet50_fpn", "pwlu", "box_ap") == pytest.approx(1.25)
    assert paper.value("mask_ap", "retinanet_resnet50_fpn", "relu") is None
    assert paper.value("box_ap", "maskrcnn_resnet50_fpn", "pau") is None


def test_words():
    assert format_metrics({"accuracy": 71.339, "test_loss": 1.0}) == "accuracy 71.34 %"
    assert format_metrics({"box_ap": 39.06, "best_box_ap": 40.0, "mask_ap": 35.3}) == "box AP 39.06, mask AP 35.30"


def test_flags_say_it_all():
    """What `pwlu compare` starts is what it was asked for."""
    for name in RECIPES:
        words = dict(word.split("=") for word in flags(settings(name, epochs=99)) if "=" in word)
        assert (words["--epochs"], words["--iterations"]) == ("99", "0")
    assert "--iterations=270000" in flags(settings("coco/maskrcnn_resnet50_fpn"))
