"""Tables of everything that was tried."""

import pytest
from example_runs import example_run

from pwlu.cli import main
from pwlu.lab.compare.trials_table import trials_table
from pwlu.lab.runs.results import find_runs

RESNET, MOBILE = "cifar100/resnet18", "cifar100/mobilenet_v3_small"


def made(root, recipes, **changes):
    runs, complaints = find_runs(root)
    assert not complaints
    return trials_table(recipes, changes, runs)


@pytest.fixture
def tried(tmp_path):
    for seed in (1, 0):
        result = {"train_loss": 1.0 + seed, "test_loss": 2.0}
        example_run(tmp_path / f"a{seed}", 60.0 + seed, seed=seed, holdout=5000, result=result)
    example_run(tmp_path / "b", 61.5, RESNET, activation="relu", holdout=5000)
    example_run(tmp_path / "c", 62.5, MOBILE, activation="relu", holdout=5000, environment={"device": "Another"})
    example_run(tmp_path / "d", 63.0, MOBILE, holdout=5000, curvature=0.001, granularity="layer")
    example_run(tmp_path / "e", 1.0, MOBILE, holdout=5000, curvature=0.5, result={"diverged": True, "train_loss": None})
    example_run(tmp_path / "f", 99.0, RESNET)  # on test images
    example_run(tmp_path / "g", 99.0, "digits", holdout=5000)
    example_run(tmp_path / "h", None, RESNET, holdout=5000, lr=0.1)  # not finished
    return tmp_path


def test_rows(tried):
    lines = made(tried, [RESNET, MOBILE], holdout=5000).splitlines()
    title = "accuracy, % | training loss | loss on these images"
    assert lines == [
        f"|  | {RESNET}: {title} | {MOBILE}: {title} |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| ReLU | 61.50 | 0.40 | 0.50 | 62.50 | 0.40 | 0.50 |",
        "| PWLU | 60.00, 61.00 | 1.50 | 2.00 |  |  |  |",
        "| PWLU `--curvature 0.5` |  |  |  | 1.00 (diverged) |  | 0.50 |",
        "| PWLU `--granularity layer --curvature 0.001` |  |  |  | 63.00 | 0.40 | 0.50 |",
        "",
        "10,000 held-out training images, one number per seed; losses are means over seeds. A GPU and Another, torch 2.15.0, "
        "pwlu 0.1.0, revision 1a2b3c4d5e.",
    ]


def test_selected_settings_are_not_repeated_in_rows(tried):
    lines = made(tried, [MOBILE], holdout=5000, curvature=0.5).splitlines()
    assert lines[2:4] == ["| PWLU | 1.00 (diverged) |  | 0.50 |", ""]
    assert made(tried, [MOBILE], holdout=1) == "not measured yet"


def test_detectors_have_no_loss_on_other_images(tmp_path):
    recipe = "nuclei/retinanet_resnet18_fpn"
    for name, act in (("a", "relu"), ("b", "swish")):
        example_run(tmp_path / name, 0.0, recipe, activation=act, result={"box_ap": 25.0, "train_loss": 0.5})
        text = (tmp_path / name / "result.json").read_text()
        (tmp_path / name / "result.json").write_text(text.replace('"test_loss": 0.5, ', ""))
    text = made(tmp_path, [recipe])
    assert f"|  | {recipe}: box AP | training loss |\n" in text
    assert "\n| Swish | 25.00 | 0.50 |\n" in text


def test_in_a_page(tried, capsys):
    page = tried / "page.md"
    marker = f"<!-- runs: {RESNET} {MOBILE} holdout=5000 -->\n"
    page.write_text(f"{marker}<!-- end of table -->\n")
    assert main(["compare", "--document", str(page), "--results", str(tried)]) == 0
    assert page.read_text() == f"{marker}\n{made(tried, [RESNET, MOBILE], holdout=5000)}\n\n<!-- end of table -->\n"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (":", "line 1: expected <!-- runs: RECIPE ... [setting=value ...] -->, not <!-- runs: -->"),
        (": digitz", "line 1: there is no recipe 'digitz'. Did you mean digits, "),
        (": digits epoch=3", "line 1: 'epoch=3' does not name a setting. Did you mean epochs=...?"),
    ],
)
def test_invalid_markers(tmp_path, capsys, words, text):
    page = tmp_path / "page.md"
    page.write_text(f"<!-- runs{words} -->\n<!-- end of table -->")
    assert main(["compare", "--document", str(page), "--results", str(tmp_path)]) == 2
    assert text in capsys.readouterr().err
