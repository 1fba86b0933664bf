"""Figures: what is drawn are the numbers, read back from the figure."""

import copy
import io
import itertools
import math
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from blocks import conv
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from torch import nn

import pwlu
from pwlu.analysis.alignment import Alignment, UnitAlignment, alignment
from pwlu.initial_functions import INITIAL_FUNCTIONS
from pwlu.plotting.alignment import plot_alignment
from pwlu.plotting.functions import plot_functions
from pwlu.units.module import units_of


def shaped(unit):
    """Some learned function."""
    with torch.no_grad():
        for p in unit.blocks():
            p.add_(0.3 * torch.randn_like(p))
    return unit


def model_of(units=2, channels=16, **options):
    return nn.Sequential(*(shaped(pwlu.PWLU(channels, **options)) for _ in range(units)))


def saved(figure, kind="png"):
    file = io.BytesIO()
    figure.savefig(file, format=kind)
    return file.getvalue()


def lines(axis, label):
    return [line for line in axis.lines if str(line.get_label()).startswith(label)]


def bars(axis):
    """The filled histograms of an axis: values and edges of each."""
    filled = [patch for patch in axis.patches if isinstance(patch, StepPatch) and patch.get_fill()]
    return [(np.asarray(patch.get_data().values), np.asarray(patch.get_data().edges)) for patch in filled]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def function(unit, channel, x):
    """One function of a unit, in float64."""
    unit = copy.deepcopy(unit).double()
    with torch.no_grad():
        return pwlu.functional.pwlu(x, *(p[channel, None] for p in unit.blocks()))


# Functions.


@pytest.mark.parametrize("channels", [1, 16])
def test_lines_are_the_functions(channels):
    """At their corners and between them: straight lines. Sums of a few terms are rounded by a few 2^-53."""
    model = model_of(2, channels)
    figure = plot_functions(model, channels=3)
    assert isinstance(figure, Figure)
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["layer 1: 0", "layer 2: 1"]
    assert {axis.get_title(loc="right") for axis in figure.axes} == {"3 of 16 channels" if channels > 1 else "layer-wise"}
    for unit, axis in zip(model, figure.axes, strict=True):
        assert len(lines(axis, "channel")) == (3 if channels > 1 else 1)
        for line in lines(axis, "channel"):
            channel = int(line.get_label().split()[1])
            x, y = (torch.tensor(np.asarray(values)) for values in line.get_data())
            assert (x[0].item(), x[-1].item()) == axis.get_xlim()
            between = torch.linspace(*axis.get_xlim(), 1001, dtype=torch.float64)
            drawn = torch.tensor(np.interp(between, x, y))
            torch.testing.assert_close(drawn, function(unit, channel, between), rtol=0, atol=1e-13)
            low, high = axis.get_ylim()
            assert low < y.min() <= y.max() < high


def test_bounds_are_marked():
    (unit,) = model = model_of(1)
    (axis,) = plot_functions(model, channels=[3, 0]).axes
    for channel, dots, line in zip([3, 0], lines(axis, "_bounds"), lines(axis, "channel"), strict=True):
        x, y = dots.get_data()
        assert x.tolist() == [unit.left[channel].item(), unit.right[channel].item()]
        assert y.tolist() == [unit.heights[channel, 0].item(), unit.heights[channel, -1].item()]
        assert dots.get_color() == line.get_color()


@pytest.mark.parametrize(("init", "start"), [("relu", F.relu), ("silu", F.silu), ("hardswish", F.hardswish)])
def test_the_start_is_behind(init, start):
    figure = plot_functions(model_of(2, init=init))
    assert legend(figure) == [f"start: {init}", "bounds"]
    for axis in figure.axes:
        (line,) = lines(axis, "start")
        x, y = (torch.tensor(values) for values in line.get_data())
        assert torch.equal(y, start(x))
        assert line.get_zorder() < min(other.get_zorder() for other in axis.lines if other is not line)
    assert set(INITIAL_FUNCTIONS[init].kinks) <= set(x.tolist())


def test_different_starts():
    figure = plot_functions(nn.Sequential(pwlu.PWLU(init="relu"), pwlu.PWLU(init="gelu")))
    assert legend(figure) == ["start", "bounds"]


def test_every_line_looks_different():
    (axis,) = plot_functions(model_of(1, 32), channels=28).axes
    assert len({(to_hex(line.get_color()), repr(line._dash_pattern)) for line in lines(axis, "channel")}) == 28


def test_channels_are_sampled_evenly():
    (axis,) = plot_functions(model_of(1, 64)).axes
    assert [line.get_label() for line in lines(axis, "channel")] == [f"channel {c}" for c in (0, 16, 32, 47, 63)]
    (axis,) = plot_functions(model_of(1, 64), channels=1).axes
    assert [line.get_label() for line in lines(axis, "channel")] == ["channel 0"]


@pytest.mark.parametrize("which", [(3, 0), np.array([3, 0]), torch.tensor([3, 0]), range(3, -1, -3)])
def test_channels_by_number(which):
    (axis,) = plot_functions(model_of(1), channels=which).axes
    assert [line.get_label() for line in lines(axis, "channel")] == ["channel 3", "channel 0"]


def test_layers():
    model = model_of(50, 1)
    titles = [axis.get_title(loc="left") for axis in plot_functions(model).axes]
    names = [title.rpartition(" ")[2] for title in titles]
    assert (len(names), names[0], names[-1]) == (12, "0", "49")
    assert {b - a for a, b in itertools.pairwise(map(int, names))} == {4, 5}
    assert len(plot_functions(model, layers=(name for name in units_of(model))).axes) == 50
    titles = [axis.get_title(loc="left") for axis in plot_functions(model, layers=["7", "3"]).axes]
    assert titles == ["layer 8: 7", "layer 4: 3"]


def test_one_unit_names_its_channels():
    figure = plot_functions(shaped(pwlu.PWLU(8)), channels=2)
    assert figure.axes[0].get_title(loc="left") == "PWLU"
    assert legend(figure) == ["start: relu", "bounds", "channel 0", "channel 7"]
    assert legend(plot_functions(model_of(3), layers="1", channels=1)) == ["start: relu", "bounds", "channel 0"]


@pytest.mark.parametrize("kind", [torch.Tensor, np.asarray, list])
def test_from_saved_parameters(kind):
    """No model is needed, and without "init" no start is drawn."""
    model = model_of(2)
    of_run = {
        name: {
            key: kind(p.detach().numpy() if kind is np.asarray else p.detach().tolist())
            for key, p in unit.blocks()._asdict().items()
        }
        for name, unit in units_of(model).items()
    }
    figure = plot_functions(of_run)
    assert legend(figure) == ["bounds"]
    for ours, theirs in zip(figure.axes, plot_functions(model).axes, strict=True):
        assert not lines(ours, "start")
        for a, b in zip(lines(ours, "channel"), lines(theirs, "channel"), strict=True):
            np.testing.assert_array_equal(a.get_data(), b.get_data())
    of_run["0"]["init"] = "gelu"
    assert legend(plot_functions(of_run)) == ["start: gelu", "bounds"]


def test_where_bounds_have_crossed():
    """The two outer pieces alone, which meet, or do not, at B_L."""
    unit = pwlu.PWLU(1, intervals=4)
    with torch.no_grad():
        for p, value in zip(unit.blocks(), (1.0, -1.0, torch.tensor([5.0, 0, 0, 0, 7]), 0.5, 2.0), strict=True):
            p.copy_(torch.as_tensor(value))
    (axis,) = plot_functions(unit).axes
    ((x, y),) = (line.get_data() for line in lines(axis, "channel"))
    for place in (-1.1, 0.0, 0.99, 1.01, 1.2):
        assert np.interp(place, x, y) == pytest.approx(5 + (place - 1) / 2 if place < 1 else 7 + (place + 1) * 2, abs=1e-12)


def test_parameters_that_are_not_finite():
    unit = shaped(pwlu.PWLU(3))
    with torch.no_grad():
        unit.left[1], unit.heights[2] = math.nan, math.inf
    assert saved(plot_functions(unit))
    with torch.no_grad():
        unit.left.fill_(math.nan), unit.right.fill_(math.nan), unit.heights.fill_(math.nan)
    assert saved(plot_functions(unit))


# With inputs.


def test_the_distribution_of_inputs_is_behind():
    model = nn.Sequential(shaped(pwlu.PWLU(6)), shaped(pwlu.PWLU()))
    x = torch.randn(2000, 6) * torch.arange(1, 7) + 5
    measured = alignment(model, [x])
    figure = plot_functions(model, channels=[0], layers="0", alignment=measured)
    assert "distribution of inputs" in legend(figure)
    ((heights, edges),) = bars(figure.axes[0])
    (unit, shared) = measured
    wanted = np.array(unit.histogram[0])
    np.testing.assert_allclose(heights / heights.sum(), wanted / wanted.sum(), rtol=0, atol=1e-9)
    assert (edges[0], edges[-1]) == (unit.low[0], unit.high[0])
    assert heights.max() == pytest.approx(0.2)  # of the height of the axes, below all functions
    low, high = figure.axes[0].get_ylim()
    assert low + 0.2 * (high - low) < min(line.get_ydata().min() for line in figure.axes[0].lines)
    for axis in plot_functions(model, alignment=measured).axes:  # the output's axis ends above the distributions
        bottom, top = axis.spines["left"].get_bounds()
        low, high = axis.get_ylim()
        assert low + 0.2 * (high - low) < bottom < top == high
        assert len(axis.get_yticks()) > 1
        assert all(bottom <= tick <= top for tick in axis.get_yticks())
    figure = plot_functions(model, alignment=measured)
    assert [len(bars(axis)) for axis in figure.axes] == [5, 1]
    ((heights, edges),) = bars(figure.axes[1])
    assert (edges[0], edges[-1]) == (min(shared.low), max(shared.high))
    # as many inputs left of each edge as in the channels' histograms together
    below = sum(
        np.interp(edges, np.linspace(a, b, 33), np.concatenate([[0], np.cumsum(h)]))
        for a, b, h in zip(shared.low, shared.high, shared.histogram, strict=True)
    )
    np.testing.assert_allclose(np.cumsum(heights) / heights.sum(), below[1:] / below[-1], rtol=0, atol=1e-9)


def test_inputs_without_histograms():
    """A line from quantile to quantile, at a height of its own; of a layer-wise unit, over all channels."""
    model = nn.Sequential(shaped(pwlu.PWLU(6)), shaped(pwlu.PWLU()))
    measured = alignment(model, [torch.randn(2000, 6)], histogram=False)
    figure = plot_functions(model, channels=2, alignment=measured)
    (first, second), (shared,) = (lines(axis, "_inputs") for axis in figure.axes)
    unit, whole = measured
    assert list(first.get_data()[0]) == [unit.p5[0], unit.p95[0]]
    assert list(second.get_data()[0]) == [unit.p5[5], unit.p95[5]]
    assert list(shared.get_data()[0]) == [min(whole.p5), max(whole.p95)]
    for line, height in ((first, 0.15), (second, 0.05)):  # of the axes: below all functions
        np.testing.assert_allclose(line.get_data()[1], height)
    assert "middle 90 % of inputs" in legend(figure)
    assert "distribution of inputs" not in legend(figure)
    assert not bars(figure.axes[0])


@pytest.mark.parametrize("same", [False, True])
def test_one_scale(same):
    wide, narrow = pwlu.PWLU(2, bounds=(-9.0, 9.0)), pwlu.PWLU(2, bounds=(-1.0, 1.0))
    axes = plot_functions(nn.Sequential(wide, narrow), same_scale=same).axes
    assert len({(axis.get_xlim(), axis.get_ylim()) for axis in axes}) == (1 if same else 2)
    for axis in axes:
        (low, high), (bottom, top) = axis.get_xlim(), axis.get_ylim()
        for line in lines(axis, "channel"):
            x, y = line.get_data()
            assert (x.min(), x.max()) == (low, high)
            assert bottom < y.min()
            assert y.max() < top


def test_inputs_outside_of_the_bounds_are_seen():
    unit = pwlu.PWLU(2)
    measured = alignment(unit, [torch.randn(1000, 2) + torch.tensor([20.0, 0.0])])
    (axis,) = plot_functions(unit, alignment=measured).axes
    assert axis.get_xlim()[1] > measured.units[0].p95[0] > 20
    (axis,) = plot_functions(unit, channels=[1], alignment=measured).axes
    assert axis.get_xlim()[1] < 5


def test_a_channel_without_inputs():
    x = torch.randn(100, 2)
    x[:, 1] = math.nan
    unit = pwlu.PWLU(2)
    figure = plot_functions(unit, alignment=Alignment.from_json(alignment(unit, [x]).to_json()))
    assert len(bars(figure.axes[0])) == 1
    assert saved(figure)


def test_a_unit_that_was_not_measured():
    model = model_of(2, 3)
    measured = alignment(model, [torch.randn(100, 3)])
    del measured.units[0]
    assert [len(bars(axis)) for axis in plot_functions(model, alignment=measured).axes] == [0, 3]


# Alignment.


def measured(*iou):
    n = len(iou)
    unit = UnitAlignment("1", [-3.0] * n, [3.0] * n, [-1.0] * n, [1.0] * n, list(iou), [0.0] * n, [1] * n, [0] * n)
    return Alignment("Net", 1, [unit])


def test_alignment():
    figure = plot_alignment({"fix": measured(0.0, 0.12, 0.13, 1.0), "stat": measured(0.5, 0.62, math.nan)})
    (axis,) = figure.axes
    (fix, edges), (stat, _) = bars(axis)
    np.testing.assert_allclose(edges, np.arange(21) / 20, rtol=0, atol=1e-15)
    assert {i: share for i, share in enumerate(fix) if share} == {0: 25, 2: 50, 19: 25}
    assert {i: share for i, share in enumerate(stat) if share} == {10: 50, 12: 50}
    assert legend(figure)[:2] == ["fix: median 0.12, 4 channels", "stat: median 0.56, 2 channels"]
    assert axis.get_xlim() == (0, 1)
    (reference,) = axis.lines
    assert reference.get_xdata()[0] == pytest.approx(2 * 1.6449 / 6, abs=5e-4)
    assert legend(plot_alignment(measured(0.5), bars=10))[0] == "Net: median 0.50, 1 channel"


# Files, threads, and what goes wrong.

FIGURES = {
    "functions": lambda: plot_functions(model_of(5)),
    "alignment": lambda: plot_alignment({"fix": measured(0.1), "stat": measured(0.5)}),
}


@pytest.mark.parametrize("name", FIGURES)
def test_files(name, monkeypatch):
    """Without pyplot and its global state."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    figure = FIGURES[name]()
    assert saved(figure, "png").startswith(b"\x89PNG")
    assert b"</svg>" in saved(figure, "svg")
    assert saved(figure, "pdf").startswith(b"%PDF")


def test_whatever_the_default_device_is():
    model = model_of(1, 3)
    inputs = alignment(model, [torch.randn(50, 3)])
    with torch.device("meta"):
        figure = plot_functions(model, alignment=inputs)
        plot_alignment(inputs)
    (axis,), (wanted,) = figure.axes, plot_functions(model, alignment=inputs).axes
    for ours, theirs in zip(axis.lines, wanted.lines, strict=True):
        np.testing.assert_array_equal(ours.get_data(), theirs.get_data())


def test_threads():
    done = []
    threads = [threading.Thread(target=lambda: done.append(saved(FIGURES["alignment"]()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 2


def fused():
    model = model_of(1)
    pwlu.fuse_(model.eval())
    return model


def unreached(*names):
    return Alignment("Net", 1, measured(0.5).units, list(names))


EXPECTED = r"plot_alignment: expected a pwlu\.Alignment, or several by label, such as \{'stat-realign': .*\}"
UNIT = {key: p.detach() for key, p in pwlu.PWLU(3).blocks()._asdict().items()}
MODEL = nn.Sequential(pwlu.PWLU(3))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: plot_functions(conv()), r"Conv2d has no PWLU. Convert it first: pwlu\.convert_\(model, sample\)"),
        (lambda: plot_functions(fused()), r"Sequential has no PWLU. It is already fused: call pwlu\.plot_functions before"),
        (lambda: plot_functions(3), "expected a model, or the parameters of its PWLUs by name, not int"),
        (lambda: plot_functions({}), "the dictionary of parameters is empty"),
        (lambda: plot_functions({"a": 3}), "'a' must be a dictionary of parameters, not int"),
        (
            lambda: plot_functions({"a": {"left": 1, "heights": 2, "left_slope": 3}}),
            "'a' lacks right, right_slope. It needs left, right, heights, left_slope, right_slope",
        ),
        (
            lambda: plot_functions({"a": UNIT | {"right": torch.ones(2)}}),
            r"'a': pwlu: right must have the shape \(3,\), one per row of heights, not \(2,\)",
        ),
        (
            lambda: plot_functions({"a": UNIT | {"heights": 1.0}}),
            r"'a': pwlu: heights must have the shape \(channels, intervals",
        ),
        (
            lambda: plot_functions(model_of(12, 1), layers=["3", "100"]),
            r"layer '100' is unknown\. Did you mean '10'\? Known: '0', '1', '2', '3', '4', '5', '6', '7' and 4 more$",
        ),
        (
            lambda: plot_functions(model_of(8, 1), layers="layer1.relu"),
            r"layer 'layer1\.relu' is unknown\. Known: '0', '1', '2', '3', '4', '5', '6', '7'$",
        ),
        (lambda: plot_functions(model_of(3, 1), layers=[2]), "layer 2 is unknown. Did you mean '2'?"),
        (
            lambda: plot_functions(model_of(3, 1), layers=2),
            r"plot_functions: layers must be the name of a PWLU, or a list of names such as \['0', '1'\], not int$",
        ),
        (lambda: plot_functions(MODEL, layers=[]), "layers is empty. Leave it out to draw up to 12"),
        (
            lambda: plot_functions(MODEL, channels=0),
            r"the number of channels to draw, at least 1, or a list of channels such as \[0, 2\], not 0",
        ),
        (
            lambda: plot_functions(MODEL, channels=2.5),
            r"plot_functions: channels must be the number of channels to draw, at least 1, or a list .* \[0, 2\], not 2\.5",
        ),
        (lambda: plot_functions(MODEL, channels=["a"]), r"or a list of channels such as \[0, 2\], not \['a'\]"),
        (lambda: plot_functions(MODEL, channels=[0.5]), r"not \[0\.5\]"),
        (
            lambda: plot_functions(MODEL, channels=[0, 3]),
            "'0' has the channels 0 to 2, not 3. Pass layers= to select other layers",
        ),
        (lambda: plot_functions(MODEL, channels=[-1]), "'0' has the channels 0 to 2, not -1"),
        (lambda: plot_functions(MODEL, channels=[]), "channels is empty"),
        (
            lambda: plot_functions(MODEL, alignment=measured(0.5, 0.5, 0.5)),
            "the alignment has none of these units: 0. Is it of another model",
        ),
        (
            lambda: plot_functions({"1": UNIT}, alignment=measured(0.5)),
            "'1' has 3 channels, but 1 in the alignment. Is it of another model",
        ),
        (
            lambda: plot_functions(MODEL, alignment=[torch.ones(9)]),
            r"plot_functions: alignment must be a pwlu\.Alignment, not list: write alignment=pwlu\.alignment\(",
        ),
        (
            lambda: plot_functions(nn.ModuleDict({"a": pwlu.PWLU(), "b": pwlu.PWLU()}), layers="b", alignment=unreached("b")),
            "plot_functions: no input reached b when the alignment was measured. Leave the alignment out, or measure it",
        ),
        (
            lambda: plot_functions(nn.ModuleDict({"a": pwlu.PWLU(), "b": pwlu.PWLU()}), alignment=unreached("b")),
            "the alignment has none of these units: a, b. Is it of another model",
        ),
        (lambda: plot_alignment({}), rf"{EXPECTED}, not an empty dictionary$"),
        (lambda: plot_alignment({"a": 3}), rf"{EXPECTED}, not int for 'a'$"),
        (lambda: plot_alignment([measured(0.5)]), rf"{EXPECTED}, not list$"),
        (
            lambda: plot_alignment({"b": measured(0.5), "a": measured(math.nan)}),
            rf"{EXPECTED}, not 'a', where no unit had finite inputs$",
        ),
    ],
)
def test_bad_input(call, text):
    with pytest.raises((ValueError, TypeError), match=text):
        call()


@pytest.mark.parametrize("name", FIGURES)
def test_without_matplotlib(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=rf"plot_{name}: drawing needs matplotlib \(.*\): pip install '\.\[train\]'"):
        FIGURES[name]()
