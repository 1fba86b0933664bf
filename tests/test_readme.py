"""What README.md and the pages of docs/ show must work as it stands there."""

import os
import re
import runpy
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace

import pytest
import torch

import pwlu
from pwlu.cli import main

ROOT = Path(__file__).parent.parent
SHAPES = ("v_shaped", "relu_like", "linear")


@pytest.fixture
def run_page(tmp_path, monkeypatch):
    """A function of a page: its blocks, each with what it printed and what the page shows, and the names they leave behind."""
    for package in ("torchvision", "onnxruntime", "sklearn", "matplotlib"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()

    def run(page):
        names = {}
        return list(runpy.run_path(str(ROOT / "docs/run.py"))["run"](ROOT / page, names)), names

    yield run
    torch.set_num_threads(threads)


def test_what_is_printed_is_written_into_the_page(tmp_path, monkeypatch, capsys):
    page = "```python\nfrom pathlib import Path\n```\n\nText.\n\n```python\nPath('a.png').write_text('new')\nprint(2)\n```\n\n"
    page += "```text\n{}```\n\n![a](images/a.png)\n\n```python\nprint(3)\n```\n\n```text\n{}```\n"
    (tmp_path / "page.md").write_text(page.format("old\nold\n", ""))
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_text("old")
    monkeypatch.chdir(tmp_path)  # and back, afterwards
    for flags in ([], ["--write"]):
        assert "old" in (tmp_path / "page.md").read_text()
        monkeypatch.setattr("sys.argv", ["run.py", "page.md", *flags])
        runpy.run_path(str(ROOT / "docs/run.py"), run_name="__main__")
        assert capsys.readouterr().out == "2\n3\n"
        os.chdir(tmp_path)
    assert (tmp_path / "page.md").read_text() == page.format("2\n", "3\n")
    assert (tmp_path / "images/a.png").read_text() == "new"


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # AOTInductor of torch 2.11
@pytest.mark.parametrize(
    "page",
    [
        "README",
        "docs/constraints",
        "docs/conversion",
        "docs/deploy",
        "docs/dynamic",
        "docs/learning-rule",
        "docs/nonuniform",
        "docs/norms",
    ],
)
def test_the_code_runs(page, run_page):
    blocks, _ = run_page(f"{page}.md")
    assert blocks
    for block in blocks:
        assert_shows(block)


VERSION, RULE = re.compile(r"\d+(\.\d+){2,}\S*"), re.compile(r"-{2,}")
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?(?: %)?(?!\w)")
OF_TRAINING = re.compile(r" intervals?\b|^operators: | parameters removed$")  # whole numbers that follow from what was learned

OF_ONE_LAYER = re.compile(r"^(?!all )\S+ +\d+(?: +\d+ %){8}")  # describe: of 8 or 16 functions; rounding changes them


def assert_shows(block):
    """Compare what a block prints with what the page shows, line by line: all words, and all numbers.

    Whole numbers must be equal. What is measured may differ from machine to machine: see `close`.
    """
    if block.shown is not None:
        printed, shown = block.printed.splitlines(), block.shown.splitlines()
        assert len(printed) == len(shown) > 0
        for ours, pages in zip(printed, shown, strict=True):
            assert words(ours) == words(pages)
            learned, few = bool(OF_TRAINING.search(pages)), bool(OF_ONE_LAYER.match(pages))
            for a, b in zip(NUMBER.findall(VERSION.sub("", ours)), NUMBER.findall(VERSION.sub("", pages)), strict=True):
                assert close(a, b, learned) or (few and "%" in a and "%" in b), f"{ours!r}: {a}, where the page shows {b}"


def words(line):
    """Return a line without its numbers; columns and plurals follow from these."""
    line = RULE.sub("--", NUMBER.sub("#", VERSION.sub("version", line)))
    return " ".join(line.replace("intervals", "interval").split())


def close(a, b, learned=False):
    """Return whether two numbers are equal or, if one was measured, near: within 15 %, or within a half of the larger."""
    x, y = (float(n.replace(",", "").removesuffix(" %")) for n in (a, b))
    near = 15 if "%" in a + b else max(abs(x) / 2, abs(y) / 2, 1e-3)
    measured = learned or any(sign in a + b for sign in ".e%")
    return x == y or (measured and abs(x - y) <= near)


@pytest.mark.parametrize(
    "shown",
    [
        "5 converted, 94.98 %",  # a number, and a word, in the second line
        "5 converted, 94.98 %\nlayer1  2 x 8 x 16  converted",
        "5 converted, 94.98 %\nlayer1  2 x 8 x 8   skipped",
        "6 converted, 94.98 %\nlayer1  2 x 8 x 8   converted",
        "5 converted, 70.98 %\nlayer1  2 x 8 x 8   converted",
    ],
)
def test_a_page_that_shows_something_else(shown):
    printed = "5 converted, 93.11 %\nlayer1 2 x 8 x 8  converted\n"
    assert_shows(SimpleNamespace(printed=printed, shown="5 converted, 94.98 %\nlayer1  2 x 8 x 8   converted"))
    with pytest.raises(AssertionError):
        assert_shows(SimpleNamespace(printed=printed, shown=shown))


def test_the_tutorial(run_page):
    blocks, names = run_page("docs/tutorial.md")
    for block in blocks:
        assert_shows(block)
    assert sum(block.shown is not None for block in blocks) >= 10
    assert Path("tutorial.svg").stat().st_size > 10_000

    # What its text claims, with room for what another machine makes of it.
    (relu, relu_losses), (pwlu, pwlu_losses) = names["results"]["ReLU"], names["results"]["PWLU"]
    trained = names["accuracy"](names["relu_net"])
    assert names["difference"] < 1e-4  # of outputs around 10, in float32
    assert names["rounding"] < 1e-4
    assert trained > 90
    assert mean(relu) > trained + 0.5
    assert mean(pwlu) > trained + 0.5
    assert abs(mean(pwlu) - mean(relu)) < 1  # "an image or two": up to 9
    assert mean(pwlu_losses) < mean(relu_losses)
    assert pwlu[0] == names["accuracy"](names["model"])  # the walk-through is the first of the three
    assert median(names["aligned"].iou) == pytest.approx(0.55, abs=0.05)
    assert abs(names["accuracy"](names["small"]) - names["accuracy"](names["model"])) < 1
    assert torch.equal(names["fused"](names["test_images"]).argmax(1), torch.tensor(names["outputs"]).argmax(1))


def test_how_much_of_relu_realignment_cuts_off():
    """The tutorial's 0.09 standard deviations, where 0 lies in the middle of an interval."""
    unit = pwlu.PWLU()
    for state, value in (
        (unit.statistics.running_mean, 3 / 16),
        (unit.statistics.running_std, 1.0),
        (unit.statistics.updates, 1),
    ):
        state.fill_(value)
    pwlu.realign_(unit)
    x = torch.linspace(-3, 3, 4801)
    assert (unit(x) - x.relu()).abs().max().item() == pytest.approx(6 / 16 / 4, abs=1e-6)


def test_when_not_to_use_it(run_page):
    """What its code prints is shown to the letter, but for what comes from training."""
    blocks, _ = run_page("docs/when-not.md")
    assert blocks
    for block in blocks:
        assert_shows(block)
        assert block.printed == block.shown or "IOU" in block.shown


def test_shapes_in_the_results(run_page):
    """The shares of docs/results.md, between quantiles of the inputs and (between the bounds), are those of results/."""
    Path("results").symlink_to(ROOT / "results")
    blocks, _ = run_page("docs/results.md")
    assert "layer4.1.relu_2 " in blocks[0].printed
    found = {name: [] for name in ("V-shaped", "ReLU-like", "nearly linear, first layer", "nearly linear, all")}
    for network in ("resnet18", "mobilenet_v3_small"):
        for label in ("pwlu", "pwlu-curvature-0.001"):
            run = Path("results/cifar100", network, f"{label}-precision-bf16-seed0")
            functions = torch.load(run / "functions.pt", weights_only=True)
            aligned = pwlu.Alignment.from_json((run / "alignment.json").read_text())
            seen, whole = ([list(map(unit.members, SHAPES)) for unit in pwlu.describe(functions, a)] for a in (aligned, None))
            for name, shape, units in zip(found, (0, 1, 2, 2), (None, None, 1, None), strict=True):
                shares = [100 * mean(x for unit in each[:units] for x in unit[shape]) for each in (seen, whole)]
                found[name].append("{:.0f} % ({:.0f})".format(*shares))
    text = (ROOT / "docs/results.md").read_text()
    for name, shares in found.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {name}")]
        assert row.split(" | ")[1:] == [*shares[:-1], f"{shares[-1]} |"]


def test_figures_stand_where_they_are_said_to_come_from():
    """In docs/when-not.md, every number with a decimal point stands in a page to which its section links."""
    page = re.sub(r"```.*?```", "", (ROOT / "docs/when-not.md").read_text(), flags=re.DOTALL)
    figures = 0
    for section in page.split("\n##"):
        sources = "".join((ROOT / "docs" / target).read_text() for target in re.findall(r"\]\((?!http)([^)#]+\.md)", section))
        found = set(re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*\w)", section))
        missing = {figure for figure in found if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", sources)}
        assert not missing, section.splitlines()[0]
        figures += len(found)
    assert figures > 40


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_what_it_links_to_exists(page):
    for target, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", (ROOT / page).read_text()):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
            assert heading in anchors, f"{target}#{heading}"


def test_tables_are_made_from_results(capsys):
    assert main(["compare", "--document", str(ROOT / "docs/results.md"), "--results", str(ROOT / "results"), "--check"]) == 0
    assert "skipped" not in capsys.readouterr().err


def test_the_table_of_the_readme_is_that_of_the_results():
    """The rows are those of docs/results.md, and a gain is bold exactly if it exceeds 2.78 times its standard error."""
    results, readme = (ROOT / "docs/results.md").read_text(), (ROOT / "README.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in readme.splitlines() if re.match(r"\|.*\d ± ", line)]
    assert len(rows) == 9
    for name, *cells in rows:
        found = re.findall(rf"^\| {name} \| ([\d.]+ ± [\d.]+) \(3\) \| ([-+][\d.]+ ± [\d.]+)? ?\|", results, re.M)
        ours = list(dict.fromkeys(found))[:2]  # of the ResNet, of the MobileNet; those of digits follow
        for shown, (accuracy, gain) in zip((cells[:2], cells[2:]), ours, strict=True):
            value, error = map(float, gain.split(" ± ")) if gain else (0, 1)
            assert shown == [accuracy, f"**{gain}**" if value > 2.78 * error else gain], name


def test_the_tests_it_names_exist():
    """docs/paper.md names the test of every decision."""
    names = set(re.findall(r"`(test_\w+(?:\.py)?)`", (ROOT / "docs" / "paper.md").read_text()))
    assert names
    tests = {path.name: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    missing = [name for name in names if name not in tests and not any(f"def {name}(" in text for text in tests.values())]
    assert not missing
