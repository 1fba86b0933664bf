"""How far ONNX Runtime and PyTorch lie apart: what is judged, what is reported, and what the pages say of operators."""

import copy
import math
import re
from pathlib import Path

import pytest
import torch
from test_onnx_export import trained_
from torch import nn

import pwlu
from pwlu.deploy.onnx_check import Inputs, agreement
from pwlu.deploy.onnx_export import export_onnx
from pwlu.deploy.onnx_forms import FORMS, set_form_
from pwlu.deploy.onnx_units import Call, check_units

DOCS = Path(__file__).parents[2] / "docs"
for package in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package)


class Two(nn.Module):
    """An output, and another that is 8 times as large."""

    def forward(self, x):
        return x, 8 * x


SAMPLE = Inputs.of(torch.randn(5, 600))
LARGE = SAMPLE.large_batch  # it has 16 times the sample's spread, the batch of 2 a quarter of it


@pytest.mark.parametrize("worst", [5e-4, 2e-3])
def test_the_largest_difference_is_reported_and_the_closest_judged(worst):
    """A small output that is off by much of its size has no part in the largest difference, and decides all the same."""
    shares, sizes = {1: 1e-5, 3: 1e-5, 2: worst, LARGE: 1e-4}, {}  # in batches of these sizes, of the largest output

    def run(inputs):
        outputs = [y.double() for y in Two()(*inputs.tensors)]
        sizes[inputs.batch] = float(outputs[1].abs().max())
        return [y + shares[inputs.batch] * y.abs().max() for y in outputs]

    found = agreement(Two(), run, SAMPLE, True, 2, tolerance=1e-3)
    assert found.closest.difference / found.closest.tolerance == pytest.approx(worst / 1e-3, rel=1e-9)
    assert (found.closest.difference <= found.closest.tolerance) == (worst <= 1e-3)
    size = sizes[LARGE]
    assert found.largest == pytest.approx((1e-4 * size, 1e-4, 1e-3 * size), rel=1e-9)
    assert found.largest.difference > 2 * found.closest.difference
    assert found.batches == (1, 3, 2, LARGE)
    text = f"largest difference {found.largest.difference:.2g} (0.0001 of the largest output), tolerance {1e-3 * size:.2g}"
    assert str(found.largest) == text


def test_outputs_of_zero():
    """The relative difference of an output of 0 is 0, unless the other output is not 0."""
    zero = nn.Threshold(math.inf, 0.0)
    for error, share in ((0.0, 0.0), (1.0, math.inf)):
        run = lambda inputs, error=error: [torch.full_like(x, error) for x in inputs.tensors]  # noqa: E731
        found = agreement(zero, run, SAMPLE, True, 2, tolerance=1e-3)
        assert found.largest == (error, share, 0.0)
        assert (found.closest.difference <= found.closest.tolerance) == (error == 0)


def test_units_likewise():
    """Of two units, one 1000 times as large: the small one comes closest to its bound, the large one is off by most."""
    model = trained_(nn.Sequential(pwlu.PWLU(3), pwlu.PWLU(), pwlu.PWLU(2)))
    with torch.no_grad():
        for parameter in (model[1].heights, model[1].left_slope, model[1].right_slope):
            parameter.mul_(1000)
    written = copy.deepcopy(model)
    pwlu.fuse_(written)
    exact, errors, largest = copy.deepcopy(model).double(), (1e-6, 1e-5), []

    def run(inputs):
        outputs = [unit(x.double()) for unit, x in zip(exact, inputs, strict=False)]
        largest.append(float(outputs[1].abs().max()))
        return [y + error for y, error in zip(outputs, errors, strict=True)]

    calls = [Call("0", torch.empty(100, 3)), Call("1", torch.empty(50))]
    with torch.no_grad():
        found = check_units(model, set_form_(written, "elements"), calls, run)
    assert (found.unit, found.units, found.reached) == ("0", ["0", "1"], 1.0)  # the third is never called
    assert found.closest.difference == pytest.approx(1e-6, rel=1e-6)
    assert 1e-7 < found.closest.tolerance < 1e-4
    assert found.largest.difference == pytest.approx(1e-5, rel=1e-6)
    assert found.largest.share == pytest.approx(1e-5 / max(largest), rel=1e-6)
    assert found.largest.tolerance > 10 * found.closest.tolerance


class Beside(nn.Module):
    """The second unit works on images alone; the first may get its input by keyword."""

    def __init__(self, by_keyword=False):
        super().__init__()
        self.first, self.second, self.by_keyword = pwlu.PWLU(), pwlu.PWLU(2, 40), by_keyword

    def forward(self, x):
        y = self.first(x=x) if self.by_keyword else self.first(x)
        return self.second(y) if x.ndim == 4 else y


@pytest.mark.parametrize("by_keyword", [False, True])
def test_units_that_the_sample_does_not_reach(by_keyword, tmp_path):
    report = export_onnx(trained_(Beside(by_keyword)), torch.randn(3, 2), tmp_path / "model.onnx")
    assert (report.units, report.unreached, report.reached) == (["first"], ["second"], 1.0)
    lines = str(report).splitlines()
    assert lines[0].endswith(", any batch size, 1 PWLU as elements")
    assert lines[3].startswith("each PWLU alone, on 100 % of all segments: largest difference ")
    assert lines[4] == "not reached by the sample, so not in the file: second"


# What the pages say.


def counted(text, intervals):
    """Operators by name and their sum, from "4 N + 9: N + 3 Mul, 1 Max, ..."."""

    def number(formula):
        times, more = re.fullmatch(r"(?:(\d*) ?N(?: \+ )?)?(\d*)", formula).groups()
        return intervals * int(times or 1) * ("N" in formula) + int(more or 0)

    total, _, rest = text.partition(": ")
    return number(total), {name: number(formula) for formula, name in re.findall(r"([\dN+ ]+) (\w+)(?:, |;|$)", rest)}


def test_how_pages_are_read():
    assert counted("17: 3 Clip, 14 Mul", 5) == (17, {"Clip": 3, "Mul": 14})
    assert counted("4 N + 9: N + 3 Mul, 3 N Add, 6 Max; no index", 5) == (29, {"Mul": 8, "Add": 15, "Max": 6})


@pytest.mark.parametrize("form", FORMS)
def test_the_operators_of_a_form_are_those_on_the_page(form, tmp_path):
    (row,) = re.findall(rf'^\| `"{form}"`.*\|.*\| (.*) \|$', (DOCS / "deploy.md").read_text(), re.MULTILINE)
    model = trained_(nn.Sequential(nn.Conv2d(3, 6, 3), pwlu.PWLU(6, intervals=5), nn.Conv2d(6, 4, 3)))
    found = export_onnx(model, torch.randn(1, 3, 8, 8), tmp_path / "model.onnx", form=form).operators
    assert found.pop("Conv") == 2
    assert counted(row, 5) == (sum(found.values()), found)
    if form == "clips":
        text = (DOCS / "when-not.md").read_text()
        names, total = re.search(r'`form="clips"` needs only (.*), (.*) of them per PWLU', text).groups()
        assert set(re.split(", | and ", names)) == set(found)
        assert counted(total, 5)[0] == sum(found.values())
