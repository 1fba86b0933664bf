"""``pwlu report RUN ... --baseline RUN ...``: what is gained, in the first sentence of the page, in a table and as curves."""

import math
import re

import pytest
from report_page_helpers import functions_of, small_network, write_run

from pwlu.cli import main
from pwlu.lab.runs.run_folder import RunFolder


@pytest.fixture
def runs(tmp_path):
    """A function that writes a run of an activation with an accuracy, and returns its folder."""

    def write(accuracy, activation="pwlu", seed=0, finished=True, result=None, **changes):
        path = tmp_path / f"{activation}-{seed}-{len(list(tmp_path.iterdir()))}"
        functions = functions_of(small_network()) if activation == "pwlu" else None
        write_run(path, functions, finished=finished, activation=activation, seed=seed, **changes)
        if finished:
            folder = RunFolder(path)
            known = folder.result() | {"accuracy": accuracy, "train_loss": 0.25}
            folder.write_json("result.json", known | (result or {}))
        return path

    return write


def reported(capsys, runs, *baseline):
    """The page, and what was printed."""
    runs = runs if isinstance(runs, list) else [runs]
    arguments = ["report", *map(str, runs), *(["--baseline", *map(str, baseline)] if baseline else [])]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    return (runs[0] / "report.html").read_text(), printed.out


def refused(capsys, *arguments):
    assert main(["report", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def headline(html):
    return re.search(r'<p class="headline">(.*?)</p>', html)[1]


def rows(html):
    section = html.partition('<section id="comparison"')[2].partition("</section>")[0]
    found = re.findall(r"<tr>(.*?)</tr>", section)
    return [[re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in found]


def test_one_seed_each(runs, capsys):
    html, printed = reported(capsys, runs(98.5), runs(98.0, "relu"))
    words = "accuracy 98.50 % against 98.00 %, +0.50 points with 1 and 1 seed, too few to estimate the error."
    assert headline(html).startswith(f"PWLU and ReLU: {words} Accuracy 98.50 % on 899 ")
    assert words in printed
    assert [row[2:4] for row in rows(html)] == [["accuracy, %", "over ReLU"], ["98.50", "+0.50"], ["98.00", ""]]
    assert 'href="#comparison"' in html
    charts = html.partition('<section id="comparison"')[2].partition("</section>")[0]
    assert charts.count("<svg") == 2
    assert '<path class="line second"' in charts  # the baseline
    assert ">ReLU</text>" in charts


def test_several_seeds(runs, capsys):
    """The error of the difference is sqrt(s^2/n + s_0^2/n_0)."""
    ours = [runs(value, seed=seed) for seed, value in enumerate((98.0, 98.5, 99.0))]
    theirs = [runs(value, "relu", seed=seed) for seed, value in enumerate((96.0, 97.0))]
    html, _ = reported(capsys, ours, *theirs)
    error = math.sqrt(0.5**2 / 3 + 0.5 / 2)
    assert f"is better than ReLU: accuracy 98.50 % against 96.50 %, +2.00 ± {error:.2f} points" in headline(html)
    assert "with 3 and 2 seeds, more than 2 standard errors." in headline(html)
    first, base = rows(html)[1:]
    assert first[:4] == ["1 PWLU", "0, 1, 2", "98.50 ± 0.50", f"+2.00 ± {error:.2f}"]
    assert base[:4] == ["2 ReLU", "0, 1", "96.50 ± 0.71", ""]


@pytest.mark.parametrize(
    ("shift", "words"), [(0.0, "is not clearly different from"), (-3.0, "is worse than"), (3.0, "is better than")]
)
def test_the_first_sentence(runs, capsys, shift, words):
    ours = [runs(90.0 + shift + seed, seed=seed) for seed in range(3)]
    theirs = [runs(90.0 + seed, "relu", seed=seed) for seed in range(3)]
    html, _ = reported(capsys, ours, *theirs)
    assert headline(html).startswith(f"PWLU {words} ReLU: ")


def test_other_runs_in_one_page(runs, capsys):
    """Without a baseline, and one of them not finished."""
    html, printed = reported(capsys, [runs(98.0), runs(97.0, curvature=0.001), runs(0, "swish", finished=False)])
    assert [row[:3] for row in rows(html)[1:]] == [
        ["1 PWLU", "0", "98.00"],
        ["2 PWLU, curvature 0.001", "0", "97.00"],
        ["3 Swish", "0", "not finished"],
    ]
    assert ">row 2</text>" in html  # a name too long to stand beside its line
    assert "against" not in headline(html)
    assert "against" not in printed


def test_other_settings_of_the_baseline(runs, capsys):
    """Are named: it is not the same recipe."""
    html, _ = reported(capsys, runs(98.0), runs(97.0, "relu", lr=0.1))
    assert headline(html).startswith("PWLU and ReLU, lr 0.1: ")


def test_runs_that_diverged(runs, capsys):
    html, _ = reported(capsys, runs(98.0), runs(10.0, "relu", result={"diverged": True}))
    assert "; diverged: 1 of ReLU." in headline(html)
    assert rows(html)[2][2] == "10.00 (1 diverged)"
    html, _ = reported(capsys, runs(10.0, result={"diverged": True}), runs(98.0, "relu"))
    assert headline(html).startswith("The training diverged")


def test_runs_that_cannot_be_compared(runs, capsys, tmp_path):
    ours, base = runs(98.0), runs(97.0, "relu")
    other = runs(97.0, "relu", seed=1, recipe="cifar100/resnet18")
    assert f"{other} cannot be compared with {ours}: recipe cifar100/resnet18, not digits" in refused(
        capsys, ours, "--baseline", other
    )
    held_out = runs(97.0, "relu", seed=2, result={"measured_on": "held-out training images"})
    assert "measured on held-out training images, not test images" in refused(capsys, ours, "--baseline", held_out)
    unfinished = runs(0, "relu", seed=3, finished=False)
    assert f"the baseline {unfinished} is not finished" in refused(capsys, ours, "--baseline", unfinished)
    assert "--baseline is the same experiment as the run, PWLU" in refused(capsys, ours, "--baseline", runs(97.0, seed=1))
    assert "must be runs of one experiment that differ only in their seeds, not ReLU and Swish" in refused(
        capsys, ours, "--baseline", base, runs(97.0, "swish")
    )
    assert f"{ours} and {ours} are the same experiment with the same seed: leave one out" in refused(capsys, ours, ours)
    assert f"there is no folder {tmp_path / 'none'}" in refused(capsys, ours, "--baseline", tmp_path / "none")


def test_the_best_epoch_is_no_result(runs, capsys):
    """It was chosen on the test images."""
    html, _ = reported(capsys, [runs(98.0, result={"best_accuracy": 99.0})])
    assert "<dt>best accuracy</dt><dd>99</dd>" in html.partition("<details>")[2]  # among all that is known
    assert "best" not in html.partition("<details>")[0].partition("<body>")[2]


def test_a_damaged_file_of_another_run(runs, capsys):
    ours, base = runs(98.0), runs(97.0, "relu")
    (base / "metrics.jsonl").write_text("{\n")
    assert main(["report", str(ours), "--baseline", str(base)]) == 0
    assert f"line 1 of {base / 'metrics.jsonl'} is damaged" in capsys.readouterr().err
