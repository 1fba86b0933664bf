"""Tables made from run folders: which runs belong together, the numbers, the text, and pages that hold tables."""

import csv
import math
import re

import pytest
from example_runs import example_run

from pwlu.cli import main
from pwlu.lab.compare import paper
from pwlu.lab.compare.presets import PRESETS, comparison
from pwlu.lab.compare.table import Table
from pwlu.lab.recipes import catalog
from pwlu.lab.recipes.experiment import experiment_key, label, method, run_key
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.results import find_runs

RESNET = "cifar100/resnet18"


def made(root, what="relu,pwlu", recipe=RESNET, **changes):
    runs, complaints = find_runs(root)
    assert not complaints
    return Table(comparison(recipe, what, changes), runs)


@pytest.fixture
def three(tmp_path):
    """Three seeds each of two activations, and in between what belongs to neither row."""
    for seed, accuracy in enumerate((70.0, 71.0, 75.0)):  # mean 72, squared deviations 4 + 1 + 9
        example_run(tmp_path / f"a{seed}", accuracy, activation="relu", seed=seed)
    for seed, accuracy in enumerate((74.0, 74.5, 75.5)):
        example_run(tmp_path / f"b{seed}", accuracy, activation="pwlu", seed=seed, result={"seconds_per_epoch": 2.5 + seed})
    example_run(tmp_path / "c", 10.0, activation="pwlu", seed=3, epochs=29)
    example_run(tmp_path / "d", 10.0, activation="pwlu", seed=4, holdout=5000)
    example_run(tmp_path / "e", 10.0, activation="pwlu", seed=5, recipe="cifar100/mobilenet_v2")
    example_run(tmp_path / "f", activation="pwlu", seed=6)
    return tmp_path


# Experiments and their names.


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"activation": "relu"}, "relu"),
        ({"activation": "pwlu"}, "pwlu"),
        ({"granularity": "layer"}, "pwlu-layer"),
        ({"granularity": "layer", "fix_init": 10.0}, "pwlu-fix-init-10-layer"),
        ({"intervals": 8}, "pwlu-intervals-8"),
        ({"epochs": 60, "ema": 0.999}, "pwlu-epochs-60-ema-0.999"),
        ({"lr": 0.30000001}, "pwlu-lr-0.30000001"),
        ({"augmentation": "crop", "norm": "group"}, "pwlu-augmentation-crop-norm-group"),
        ({"init": "../x y"}, "pwlu-init-.._x_y"),
        ({"data": "/elsewhere", "device": "cuda:1", "compile": True}, "pwlu"),
        ({"activation": "relu", "intervals": 8, "granularity": "layer", "realign_epochs": 1, "curvature": 1.0}, "relu"),
        ({"activation": "prelu", "granularity": "layer", "fix_init": 3.0}, "prelu-layer"),
        ({"fix_init": 3.0, "realign_epochs": 1}, "pwlu-fix-init-3"),
        ({"holdout": 5000}, "pwlu-holdout-5000"),
    ],
)
def test_labels(changes, name):
    assert label(catalog.settings(RESNET, **changes)) == name


def test_the_same_experiment():
    settings = catalog.settings(RESNET, seed=1)
    assert run_key(settings) == run_key(settings.replace(data="/elsewhere", channels_last=True, realign_epochs=2.0))
    assert run_key(settings) != run_key(settings.replace(seed=2))
    assert experiment_key(settings) == experiment_key(settings.replace(seed=2))
    assert experiment_key(settings) != experiment_key(settings.replace(intervals=8))
    relu = settings.replace(activation="relu")
    assert run_key(relu) == run_key(relu.replace(intervals=8, unit_lr=0.1))
    assert run_key(relu) != run_key(relu.replace(weight_decay=1e-4))


def test_presets():
    assert list(PRESETS["activations"]) == ["ReLU", "PReLU", "Swish", "APL", "PAU", "FReLU", "PWLU"]
    labels = {name: [label(s) for s in comparison(RESNET, name, {}).experiments.values()] for name in PRESETS}
    assert labels["intervals"] == [
        "relu",
        "pwlu-intervals-4",
        "pwlu-intervals-8",
        "pwlu-intervals-12",
        "pwlu",
        "pwlu-intervals-20",
    ]
    smooth = ["pwlu-curvature-0.001", "pwlu-init-swish-curvature-0.001"]
    assert labels["smoothing"] == ["relu", "swish", "pwlu", *smooth, "pwlu-rule-shared"]
    assert labels["improvements"][-2:] == ["pwlu-curvature-0.001", "pwlu-rule-shared"]
    assert labels["dynamic"][-2:] == ["pwlu", "dynamic-pwlu"]
    assert labels["knots"] == ["relu", "pwlu-intervals-4", "pwlu", "nonuniform-pwlu-intervals-4"]
    layers = ["pwlu-fix-init-3-layer", "pwlu-fix-init-6-layer", "pwlu-fix-init-10-layer", "pwlu-layer"]
    assert labels["bounds"] == ["relu", *layers, "pwlu-fix-init-3", "pwlu-fix-init-6", "pwlu-fix-init-10", "pwlu"]


def test_names_of_tables():
    assert comparison(RESNET, "pwlu,frelu,pau,apl,swish,prelu,relu", {}).stem == "activations"
    assert comparison(RESNET, "relu, pwlu,relu", {"data": "/here", "epochs": 30}).stem == "relu-pwlu"
    assert comparison(RESNET, "intervals", {"epochs": 60, "holdout": 5000}).stem == "intervals-epochs-60-holdout-5000"


@pytest.mark.parametrize(
    ("recipe", "what", "changes", "text"),
    [
        (RESNET, "bonds", {}, "there is no activation and no preset 'bonds'. Did you mean bounds\\?"),
        (RESNET, "relu,plwu", {}, "there is no activation 'plwu'. Did you mean pwlu\\? Activations are relu, swish"),
        (RESNET, " ,", {}, "expected names of activations separated by commas, not ' ,'. Write --acts relu,prelu"),
        (RESNET, "intervals", {"intervals": 8}, "the comparison 'intervals' varies --intervals: leave it out"),
        ("cifar100/resnet81", "bounds", {}, "there is no recipe 'cifar100/resnet81'. Did you mean cifar100/resnet18, "),
        (RESNET, "relu,pwlu", {"epochs": 2}, "Phase I must be shorter than training: --realign-epochs is 2, --epochs is 2"),
    ],
)
def test_arguments_that_give_no_comparison(recipe, what, changes, text):
    with pytest.raises(UserError, match=text):
        comparison(recipe, what, changes)


# The paper.


def test_the_paper_has_every_row_of_its_tables():
    for name in ("activations", "bounds", "intervals"):  # the others are ours
        for network in ("resnet18", "mobilenet_v3_small"):
            for settings in comparison(f"cifar100/{network}", name, {"epochs": 60, "ema": 0.999}).experiments.values():
                assert 67 < paper.value("accuracy", network, method(settings)) < 73
    settings = catalog.settings(RESNET)
    assert paper.value("accuracy", "resnet18", method(settings.replace(init="silu"))) is None
    assert paper.value("accuracy", "resnet18", method(settings.replace(intervals=10))) is None
    assert paper.value("accuracy", "convnet", "pwlu") is None
    assert paper.gain("resnet18", "relu") is None
    gains = {network: round(paper.gain(network, "pwlu"), 2) for network in paper.TOP1}
    assert gains == {
        "resnet18": 1.23,
        "resnet50": 0.88,
        "mobilenet_v2": 1.85,
        "mobilenet_v3_small": 1.91,
        "efficientnet_b0": 1.77,
    }


# The numbers.


def test_means_and_deviations(three):
    table = made(three)
    relu, pwlu = table.rows
    assert (relu.mean_of("accuracy"), len(relu.runs)) == (72, 3)
    assert relu.std_of("accuracy") == pytest.approx(math.sqrt(7))  # 14 / (3 - 1)
    assert pwlu.mean_of("accuracy") == pytest.approx(224 / 3)
    assert pwlu.std_of("accuracy") == pytest.approx(math.sqrt(7 / 12))  # (4/9 + 1/36 + 25/36) / 2
    gain, error = table.gain(pwlu, "accuracy")
    assert gain == pytest.approx(8 / 3)
    assert error == pytest.approx(math.sqrt(7 / 3 + 7 / 36))
    assert table.gain(relu, "accuracy") is None


def test_markdown(three):
    lines = made(three).markdown().splitlines()
    assert lines[0] == "|  | accuracy, % | gain over ReLU | parameters | paper (ImageNet), % | paper's gain |"
    assert lines[2] == "| ReLU | 72.00 ± 2.65 (3) |  | 1,234,567 | 71.34 |  |"
    assert lines[3] == "| PWLU | 74.67 ± 0.76 (3) | +2.67 ± 1.59 | 1,234,567 | 72.57 | +1.23 |"
    assert lines[4:] == [
        "",
        "`cifar100/resnet18`, 30 epochs, 10,000 test images. A GPU, torch 2.15.0, pwlu 0.1.0, revision 1a2b3c4d5e.",
    ]
    assert made(three).legend() == "Mean ± standard deviation over seeds (number of seeds); gain ± its standard error."


def test_median_iou(tmp_path):
    """Beside two rows that have some; of one row it would compare nothing."""
    example_run(tmp_path / "a", 70.0, activation="relu")
    example_run(tmp_path / "b0", 71.0, iou=(0.1, 0.5, 0.9, math.nan))
    example_run(tmp_path / "b1", 71.0, seed=1, iou=(0.1, 0.3, 0.4, 0.6))
    assert "IOU" not in made(tmp_path).markdown()
    example_run(tmp_path / "c", 72.0, fix_init=3.0, iou=(0.05, 0.1, 0.1))
    table = made(tmp_path, "bounds")
    lines = table.markdown().splitlines()
    assert lines[0].startswith("|  | accuracy, % | gain over ReLU | median IOU | parameters |")
    rows_of = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    assert rows_of["ReLU"] == "| ReLU | 70.00 (1) |  |  | 1,234,567 | 71.34 |  |"
    assert "| +1.00 | 0.42 | 1,234,567 |" in rows_of["stat-realign, channel-wise"]  # the mean of 0.5 and 0.35
    assert "| +2.00 | 0.10 | 1,234,567 |" in rows_of["fix-init-3, channel-wise"]
    assert rows_of["fix-init-6, layer-wise"].count("|") == rows_of["ReLU"].count("|")
    assert table.legend().endswith("Median IOU: of the bounds and the middle 90 % of the inputs, over channels.")
    assert [row["iou"] for row in csv.DictReader(table.csv().splitlines())] == ["", "0.1", "0.425"]
    (tmp_path / "c" / "alignment.json").write_text("{}")
    with pytest.raises(UserError, match=r"c.alignment.json does not hold the alignment of a run: .* KeyError\('units'\)"):
        made(tmp_path, "bounds")


def test_one_epoch(tmp_path):
    short = {"recipe": "digits", "epochs": 1, "realign_epochs": 0.3}
    example_run(tmp_path / "a", 60.0, **short)
    assert ", 1 epoch, " in made(tmp_path, **short).markdown()


def test_one_run_has_no_deviation(tmp_path):
    example_run(tmp_path / "a", 60.0, recipe="digits", activation="relu", epochs=60)
    example_run(tmp_path / "b", 59.0, recipe="digits", epochs=60)
    text = made(tmp_path, recipe="digits", epochs=60).markdown()
    assert "| PWLU | 59.00 (1) | -1.00 | 1,234,567 |\n" in text  # and no paper, which has no such network
    assert "`digits` with `--epochs 60`, 60 epochs, " in text


def test_missing_and_diverged_runs_are_shown(tmp_path):
    example_run(tmp_path / "a", 70.0, activation="relu")
    example_run(tmp_path / "b", 71.0, activation="swish", environment={"device": "Another"})
    for seed in (0, 1):
        result = {"diverged": not seed, "parameters": 100 + seed}
        example_run(tmp_path / f"c{seed}", 1.0 + 70 * seed, activation="apl", seed=seed, result=result)
    text = made(tmp_path, "relu,swish,apl,pwlu").markdown()
    assert "| APL | 36.00 ± 49.50 (2, 1 diverged) | -34.00 | 100 and 101 |" in text
    assert "| PWLU | not measured yet |  |  | 72.57 | +1.23 |" in text
    assert "test images, diverged runs count with their final result. A GPU and Another, " in text
    assert made(tmp_path, "pau,pwlu").markdown() == "not measured yet"
    assert made(tmp_path, "swish,pwlu").gain(made(tmp_path, "swish,pwlu").rows[0], "accuracy") is None  # there is no ReLU in it


def test_held_out_images_are_another_table(three):
    (row,) = made(three, "pwlu", holdout=5000).rows
    assert row.mean_of("accuracy") == 10
    assert ", 10,000 held-out training images. " in made(three, "pwlu", holdout=5000).markdown()


def test_a_run_counts_once(tmp_path):
    for name in ("pwlu-seed0", "pwlu-seed0-2"):
        example_run(tmp_path / name, 70.0)
    example_run(tmp_path / "pwlu-seed1", 71.0, seed=1, realign_epochs=2.0)
    assert [run.path.name for run in made(tmp_path, "pwlu").rows[0].runs] == ["pwlu-seed0", "pwlu-seed1"]


def test_csv(three):
    table = made(three, "relu,pwlu,pau")
    rows_of_cells = list(csv.DictReader(table.csv().splitlines()))
    assert [row["label"] for row in rows_of_cells] == ["relu", "pwlu"]
    assert rows_of_cells[0]["gain"] == rows_of_cells[0]["gain_error"] == ""
    assert {
        name: float(rows_of_cells[1][name]) for name in ("accuracy", "std", "gain", "gain_error", "paper_gain", "runs")
    } == {
        "accuracy": 74.666667,
        "std": 0.763763,
        "gain": 2.666667,
        "gain_error": 1.589899,
        "paper_gain": 1.23,
        "runs": 3,
    }
    rows_of_runs = list(csv.DictReader(table.runs_csv().splitlines()))
    assert [(row["row"], row["seed"], float(row["accuracy"])) for row in rows_of_runs][2:4] == [
        ("ReLU", "2", 75.0),
        ("PWLU", "0", 74.0),
    ]
    assert rows_of_runs[0]["revision"] == "1a2b3c4d5e"


def test_numbers_for_the_chart(three):
    table = made(three, "relu,pwlu,pau")
    assert table.statistics() == {row.title: (row.mean_of("accuracy"), row.std_of("accuracy"), 3) for row in table.rows[:2]}
    assert {title: round(gain, 2) for title, gain in table.paper_gains().items()} == {"PWLU": 1.23}


# Pages.

PAGE = """# Results

Before. Written as
    <!-- table: RECIPE PRESET -->

<!-- table: cifar100/resnet18 relu,pwlu -->
what was here
<!-- end of table -->
Between.\r
<!-- table: cifar100/resnet18 intervals epochs=60 unit-lr=0.5 -->
<!-- end of table -->
After, without a new line"""


def test_a_page(three, capsys):
    page = three / "page.md"
    page.write_bytes(PAGE.encode())
    command = ["compare", "--document", str(page), "--results", str(three)]
    assert main([*command, "--check"]) == 1
    assert "page.md is not up to date: run pwlu compare --document" in capsys.readouterr().err
    assert page.read_bytes() == PAGE.encode()
    assert main(command) == 0
    expected = PAGE.replace("what was here", f"\n{made(three).markdown()}\n")
    expected = expected.replace("unit-lr=0.5 -->\n", "unit-lr=0.5 -->\n\nnot measured yet\n\n")
    assert page.read_bytes().decode() == expected
    stamp = page.stat().st_mtime_ns
    assert main([*command, "--check"]) == main(command) == 0
    assert "is up to date" in capsys.readouterr().out
    assert page.stat().st_mtime_ns == stamp
    example_run(three / "more", 80.0, seed=3)
    assert main([*command, "--check"]) == 1
    assert main(command) == 0
    assert "(4)" in page.read_text()


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (
            "<!-- table: digits -->\n<!-- end of table -->",
            "line 1: expected <!-- table: RECIPE PRESET [setting=value ...] -->, not",
        ),
        ("<!-- tables digits relu -->", "has no markers for a table. Write"),
        ("<!-- table digits relu -->\n<!-- end of table -->", "line 1: expected <!-- table: RECIPE PRESET"),
        ("\n<!-- table: digitz relu -->\n<!-- end of table -->", "line 2: there is no recipe 'digitz'. Did you mean digits, "),
        ("<!-- table: digits bonds -->\n<!-- end of table -->", "line 1: there is no activation and no preset 'bonds'"),
        (
            "<!-- table: digits relu epoch=3 -->\n<!-- end of table -->",
            "'epoch=3' does not name a setting. Did you mean epochs=...?",
        ),
        ("<!-- table: digits relu epochs=x -->\n<!-- end of table -->", "'epochs=x': 'x' is not of type int"),
        ("<!-- table: digits relu seed=1 -->\n<!-- end of table -->", "'seed=1' does not name a setting"),
        ("<!-- table: digits relu data=/x -->\n<!-- end of table -->", "'data=/x' does not name a setting"),
        ("<!-- table: digits relu -->\n\n", "the table of line 1 has no <!-- end of table -->"),
        (
            "<!-- table: digits relu -->\n<!-- table: digits relu -->",
            "line 2: the table of line 1 has no <!-- end of table -->",
        ),
        ("<!-- end of table -->", "line 1: <!-- end of table --> has no <!-- table: RECIPE PRESET --> before it"),
        ("<!-- table: digits relu --> text\n<!-- end of table -->", "line 1: a marker must be on a line of its own"),
        (None, "cannot be read"),
    ],
)
def test_invalid_markers(tmp_path, capsys, page, text):
    path = tmp_path / "page.md"
    if page is not None:
        path.write_text(page)
    assert main(["compare", "--document", str(path), "--results", str(tmp_path)]) == 2
    assert re.search(re.escape(text), capsys.readouterr().err)
    assert page is None or path.read_text() == page
