"""Shape descriptors: known functions get their classes, and their numbers follow from the formulas."""

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pwlu
from pwlu.analysis.shapes import CLASSES, describe

BOUNDS = (-3.0, 3.0)


def hard_tanh(x):
    return x.clamp(-1.125, 1.125)  # on knots


def classes(unit, channel=0):
    return {shape for shape in CLASSES if unit.members(shape)[channel]}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("relu", {"relu_like", "flat_left"}),
        ("leaky_relu", {"relu_like", "flat_left"}),
        ("silu", {"relu_like"}),
        ("identity", {"linear"}),
        (lambda x: 2 - x, {"linear"}),
        (torch.abs, {"v_shaped", "non_monotone"}),
        (torch.square, {"v_shaped", "non_monotone"}),
        (lambda x: x.relu() - 0.3 * (-x).relu() * -1, {"v_shaped", "non_monotone"}),
        (lambda x: -x.abs(), {"non_monotone"}),
        (hard_tanh, {"flat_left", "flat_right"}),
        (torch.tanh, {"flat_left", "flat_right"}),
        (torch.sin, {"non_monotone"}),
        (lambda x: (-x).relu(), {"flat_right"}),
        (torch.zeros_like, {"linear", "flat_left", "flat_right"}),
    ],
)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_known_shapes(function, expected, scale):
    """The classes do not depend on the scale of the output, nor on its sign unless they name one."""
    act = pwlu.PWLU(2, bounds=BOUNDS, init=function)
    with torch.no_grad():
        for parameter in (act.heights, act.left_slope, act.right_slope):
            parameter.mul_(scale)
    (unit,) = describe(act)
    moved = {"moved"} if scale != 1 and function is not torch.zeros_like else set()
    assert classes(unit) == classes(unit, 1) == expected | moved


def test_numbers():
    model = nn.ModuleDict({"relu": pwlu.PWLU(), "abs": pwlu.PWLU(init=torch.abs), "sin": pwlu.PWLU(init=torch.sin)})
    relu, absolute, sine = describe(model)
    assert (relu.low, relu.high) == ([-3], [3])
    # least squares: x/2 + 3/4, which is 3/4 away at 0; on 257 points a little more
    assert relu.bend == pytest.approx([0.25], rel=0.01)
    assert relu.relu_distance == pytest.approx([0], abs=1e-12)
    assert relu.left_end + relu.right_end == pytest.approx([0, 2])
    assert (relu.v, relu.back) == ([0], [0])
    assert relu.movement == [0]
    assert relu.width == [1]
    assert math.isnan(relu.outside[0])
    assert math.isnan(relu.empty[0])
    # a constant is best, 3/2, which is half the range away at both ends
    assert absolute.bend == pytest.approx([0.5], rel=0.01)
    assert absolute.v + absolute.back == pytest.approx([1, 1])
    # falls from sin(-3) to -1, rises to 1, falls to sin(3)
    assert sine.back == pytest.approx([1 - math.sin(3)], rel=0.02)
    assert sine.v == pytest.approx([0], abs=0.01)


def test_movement():
    act = pwlu.PWLU(3, init="silu")
    assert describe(act).units[0].movement == pytest.approx([0] * 3, abs=1e-6)
    with torch.no_grad():
        act.heights[1, 5] += 0.5
        act.heights[2] = 0.0
    (unit,) = describe(act)
    start = pwlu.reference.unpack(act.initial_weight(), act.intervals).heights[0]
    span = float(start.max() - start.min())
    assert unit.movement[1] == pytest.approx(0.5 / span, rel=1e-4)
    assert unit.movement[2] == pytest.approx(float(start.abs().max()) / span, rel=1e-4)
    assert unit.members("moved") == [False, True, True]


def test_where_the_inputs_are():
    """A hyperbolic tangent is straight where its inputs are small; most of its intervals are empty then."""
    act = pwlu.PWLU(2, init="tanh")
    torch.manual_seed(3)
    x = torch.randn(4000, 2) * torch.tensor([0.05, 2.0]) + torch.tensor([0.3, 0.0])
    aligned = pwlu.alignment(act, [x])
    (unit,) = describe(act, aligned)
    assert unit.members("linear") == [True, False]
    assert unit.low == aligned.units[0].p5
    assert unit.high == aligned.units[0].p95
    assert unit.outside == aligned.units[0].outside
    # between 0.1 and 0.5, so in the intervals from 0 to 0.375 and to 0.75
    assert unit.empty == [14 / 16, 0]
    assert unit.width[1] == pytest.approx(6 / (2 * 1.645 * 2), rel=0.1)
    without = pwlu.alignment(act, [x], histogram=False)
    assert all(math.isnan(share) for share in describe(act, without).units[0].empty)
    assert describe(act, without).units[0].bend == unit.bend


def test_layer_wise_units_see_all_channels():
    act = pwlu.PWLU()
    x = torch.stack([torch.linspace(-2, -1, 1000), torch.linspace(1, 5, 1000)], 1)
    aligned = pwlu.alignment(act, [x])
    (unit,) = describe(act, aligned)
    (seen,) = aligned
    assert (unit.low, unit.high) == ([seen.p5[0]], [seen.p95[1]])
    assert unit.outside == pytest.approx([0.25], abs=0.01)
    assert unit.empty == [6 / 16]  # from -3 to -2.25 and from -0.75 to 0.75, in steps of 0.375


def test_gaps_between_inputs():
    act = pwlu.PWLU(2)
    ends = torch.cat([torch.linspace(-3, -2, 500), torch.linspace(2, 3, 500)])
    (unit,) = describe(act, pwlu.alignment(act, [torch.stack([ends, torch.linspace(-3, 3, 1000)], 1)]))
    assert unit.empty == [10 / 16, 0]  # from -1.875 to 1.875


def test_no_inputs():
    act = pwlu.PWLU(2)
    x = torch.stack([torch.full((50,), torch.nan), torch.full((50,), 0.5)], 1)
    (unit,) = describe(act, pwlu.alignment(act, [x]))
    assert (unit.low[0], unit.high[0]) == (-3, 3)
    assert (classes(unit), classes(unit, 1)) == ({"relu_like", "flat_left"}, {"linear"})
    assert math.isnan(unit.empty[0])
    assert unit.empty[1] == 15 / 16


def test_collapsed_bounds():
    act = pwlu.PWLU(5)
    with torch.no_grad():
        act.right[0] = act.left[0] + 0.01
        act.right[1] = act.left[1]
        act.right[2] = act.left[2] - 2
    (unit,) = describe(act)
    assert unit.members("collapsed") == [True, True, True, False, False]
    assert classes(unit, 1) - {"moved"} == classes(unit, 2) - {"moved"} == {"collapsed"}  # there is nothing to look at
    (unit,) = describe(act, pwlu.alignment(act, [torch.randn(1000, 5)]))
    assert unit.members("collapsed") == [True, True, True, False, False]
    assert not math.isnan(unit.bend[2])


NUMBERS = ("bend", "relu_distance", "v", "back", "left_end", "right_end", "movement")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("seen", [False, True])
def test_a_function_that_is_not_finite(value, seen):
    """It has no shape, and the shapes of the other functions do not change."""
    act = pwlu.PWLU(3)
    aligned = pwlu.alignment(act, [torch.randn(500, 3)]) if seen else None
    (whole,) = describe(act, aligned)
    with torch.no_grad():
        act.heights[1, 8] = value
    (unit,) = describe(act, aligned)
    for name in NUMBERS:
        numbers = getattr(unit, name)
        assert math.isnan(numbers[1]), name
        assert [numbers[0], numbers[2]] == [getattr(whole, name)[0], getattr(whole, name)[2]]
    assert classes(unit, 1) == set()
    assert classes(unit) == classes(whole)
    assert unit.share("relu_like") == unit.share("flat_left") == 1  # of the two that are known
    assert unit.share("linear") == unit.share("moved") == 0
    with torch.no_grad():
        act.heights[:] = value
    shapes = describe(nn.ModuleDict({"act": act}))
    assert all(math.isnan(shapes.share(shape)) for shape in CLASSES if shape != "collapsed")
    assert re.match(r"act +3( +-){7} +0 % +- +-$", str(shapes).splitlines()[2])
    assert json.loads(shapes.to_json())[0]["bend"] == [None] * 3


def test_bounds_that_are_not_finite():
    """They do not affect the widths of other functions, and no interval counts as empty."""
    act = pwlu.PWLU(4)
    aligned = pwlu.alignment(act, [torch.randn(500, 4)])
    with torch.no_grad():
        act.left[0] = math.nan
        act.right[1] = act.left[1] + 0.01
    (unit,) = describe(act)
    assert unit.members("collapsed") == [False, True, False, False]
    assert [math.isnan(number) for number in unit.width] == [True, False, False, False]
    assert unit.share("collapsed") == 1 / 3
    (unit,) = describe(act, aligned)
    assert [math.isnan(number) for number in unit.empty] == [True, False, False, False]


def test_saved_parameters():
    act = pwlu.PWLU(3, init="silu")
    saved = {name: block.tolist() for name, block in act.blocks()._asdict().items()}
    assert describe({"act": saved | {"init": "silu"}}).to_json() == describe(nn.ModuleDict({"act": act})).to_json()
    shapes = describe({"act": saved, "other": saved | {"init": "silu"}})
    assert math.isnan(shapes.units[0].movement[0])
    assert shapes.share("moved") == 0  # of those of which it is known
    lines = str(shapes).splitlines()
    assert re.match(r"act +3( +\d+ %){6} +- +0 % +- +-$", lines[2])
    assert re.match(r"other +3( +\d+ %){6} +0 % +0 % +- +-$", lines[3])


def test_report():
    """The report has a table, rows and JSON, with the shares of every class."""
    model = nn.ModuleDict({"first": pwlu.PWLU(4), "second": pwlu.PWLU(init=torch.abs)})
    with torch.no_grad():
        model["first"].heights[0] = torch.linspace(-3, 3, 17)
    shapes = describe(model)
    assert len(shapes) == len(list(shapes)) == 2
    assert shapes.share("v_shaped") == 0.2
    lines = str(shapes).splitlines()
    assert re.match(r"unit +channels +linear +ReLU-like +V-shaped ", lines[0])
    assert re.match(r"first +4 +25 % +75 % +0 % +0 % +75 % +0 % +25 % +0 % +- +-$", lines[2])
    assert re.match(r"all +5 +20 % +60 % +20 % +20 % ", lines[-1])
    rows = shapes.as_dicts()
    assert [(row["unit"], row["channel"]) for row in rows] == [
        ("first", 0),
        ("first", 1),
        ("first", 2),
        ("first", 3),
        ("second", 0),
    ]
    assert (rows[0]["linear"], rows[4]["v_shaped"], rows[4]["v"]) == (True, True, pytest.approx(1))
    first, second = json.loads(shapes.to_json())
    assert first["linear"] == [True, False, False, False]
    assert (second["outside"], second["bend"]) == ([None], pytest.approx(shapes.units[1].bend, rel=1e-5))
    with pytest.raises(ValueError, match=r"'round' is not a class of shapes\. Choose from linear, relu_like"):
        shapes.share("round")


def test_a_trained_network():
    """Absolute values as targets turn ReLUs into V shapes where there are inputs to learn from."""
    act = pwlu.PWLU(2)
    optimizer = torch.optim.SGD(act.parameters(), lr=0.2)
    for _ in range(300):
        x = torch.randn(256, 2)
        optimizer.zero_grad()
        (4 * F.mse_loss(act(x), x.abs())).backward()
        optimizer.step()
    (unit,) = describe(act, pwlu.alignment(act, [torch.randn(4000, 2)]))
    assert all(unit.members("v_shaped"))
    assert all(unit.members("moved"))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Linear(2, 2), "describe: Linear has no PWLU. Convert it first"),
        ({}, "describe: the dictionary of parameters is empty"),
        ([1], "describe: expected a model, or the parameters of its PWLUs by name, not list"),
        ({"a": {"left": [0.0]}}, "describe: 'a' lacks right, heights"),
    ],
)
def test_bad_models(model, text):
    with pytest.raises((ValueError, TypeError), match=text):
        describe(model)


def test_bad_alignments():
    model = nn.Sequential(pwlu.PWLU(3))
    with pytest.raises(TypeError, match=r"describe: alignment must be a pwlu\.Alignment, not int"):
        describe(model, 3)
    with pytest.raises(ValueError, match=r"describe: the alignment has none of these units: 0\. Is it of another model"):
        describe(model, pwlu.alignment(pwlu.PWLU(3), [torch.randn(4, 3)]))
    with pytest.raises(ValueError, match=r"describe: '0' has 3 channels, but 5 in the alignment\. Is it of another model"):
        describe(model, pwlu.alignment(nn.Sequential(pwlu.PWLU(5)), [torch.randn(4, 5)]))
