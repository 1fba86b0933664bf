"""The bars of improvements, read back from the figure."""

import math
import sys

import numpy as np
import pytest
from test_plot import legend, lines, saved

import pwlu
from pwlu.plotting.gain_chart import plot_improvements

ROWS = {
    "a": {"ReLU": (70.0, 0.3, 9), "Swish": (71.0, 0.4, 4), "PWLU": (72.0, 0.0, 1)},
    "b": {"PWLU": (80.5, None, 1), "ReLU": (80.0, 0.1, 3)},
}


def test_improvements():
    figure = plot_improvements(ROWS, paper={"b": {"PWLU": 0.7, "PAU": 0.2}})
    (axis,) = figure.axes
    containers = {c.get_label(): c for c in axis.containers if hasattr(c, "patches")}
    assert list(containers) == ["Swish", "PWLU", "PAU"]
    heights = {label: [patch.get_height() for patch in c.patches] for label, c in containers.items()}
    np.testing.assert_allclose([heights[label] for label in containers], [[1, math.nan], [2, 0.5], [math.nan, math.nan]])
    bars_of_error = [segment for segment in containers["Swish"].errorbar.lines[2][0].get_segments() if len(segment)]
    deviation = math.sqrt(0.3**2 / 9 + 0.4**2 / 4)
    np.testing.assert_allclose(bars_of_error[0][:, 1], [1 - deviation, 1 + deviation])
    np.testing.assert_allclose(containers["PWLU"].errorbar.lines[2][0].get_segments()[0][:, 1], [1.9, 2.1])
    (diamonds,) = lines(axis, "the paper")
    middles = {label: c.patches[1].get_x() + c.patches[1].get_width() / 2 for label, c in containers.items()}
    np.testing.assert_allclose(diamonds.get_data(), [[middles["PWLU"], middles["PAU"]], [0.7, 0.2]])
    assert (diamonds.get_marker(), diamonds.get_markerfacecolor()) == ("D", "white")
    assert [text.get_text() for text in axis.get_xticklabels()] == ["a\nReLU: 70.00", "b\nReLU: 80.00"]
    assert legend(figure) == ["Swish", "PWLU", "PAU", "the paper"]
    assert saved(figure)


def test_the_diamonds_are_explained():
    figure = plot_improvements(ROWS, paper={"b": {"PWLU": 0.7}}, paper_name="the paper, same network, ImageNet")
    assert "the paper, same network, ImageNet" in legend(figure)


def test_improvements_over_another_baseline():
    figure = plot_improvements({"a": ROWS["a"]}, baseline="Swish")
    assert sorted(legend(figure)) == ["PWLU", "ReLU"]
    assert [p.get_height() for p in figure.axes[0].patches] == [-1.0, 1.0]
    assert figure.axes[0].get_ylabel() == "improvement over Swish, points"


def test_it_can_be_had_where_the_other_pictures_are():
    assert pwlu.plot_improvements is plot_improvements


def read(figure):
    """The entries of the legend as one reads them: row by row, from left to right."""
    figure.draw_without_rendering()
    rows = {}
    for text in figure.legends[0].texts:
        box = text.get_window_extent()
        rows.setdefault(-round(box.y0), []).append((box.x0, text.get_text()))
    return [[label for _, label in sorted(row)] for _, row in sorted(rows.items())]


NAMES = ("Leaky ReLU", "PReLU", "Swish", "APL", "PAU", "FReLU", "PWLU")


@pytest.mark.parametrize(
    ("labels", "groups", "rows"),
    [(NAMES[:3], 1, [3]), (NAMES, 4, [7]), (NAMES, 1, [4, 3]), ([f"{n} {'long' * 20}" for n in NAMES], 1, [1] * 7)],
)
def test_the_legend_is_read_in_the_order_of_the_bars(labels, groups, rows):
    """In one row if the figure is wide enough, else in more of much the same length."""
    results = {label: (71.0 + place, 0.4, 4) for place, label in enumerate(("ReLU", *labels))}
    figure = plot_improvements({str(group): results for group in range(groups)})
    (axis,) = figure.axes
    firsts = sorted((c.patches[0].get_x(), c.get_label()) for c in axis.containers if hasattr(c, "patches"))
    assert [label for _, label in firsts] == list(labels)
    found = read(figure)
    assert [len(row) for row in found] == rows
    assert [label for row in found for label in row] == list(labels)
    assert len(figure.legends) == 1


# Files, and what goes wrong.


def test_files(monkeypatch):
    """Without pyplot and its global state."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    figure = plot_improvements(ROWS)
    assert saved(figure, "png").startswith(b"\x89PNG")
    assert b"</svg>" in saved(figure, "svg")
    assert saved(figure, "pdf").startswith(b"%PDF")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: plot_improvements(ROWS, baseline="RelU"),
            r"in 'a', the baseline 'RelU' is unknown\. Did you mean 'ReLU'\? Known: 'ReLU', 'Swish', 'PWLU'$",
        ),
        (lambda: plot_improvements(ROWS, paper={"c": {}}), r"group 'c' is unknown\. Known: 'a', 'b'$"),
        (lambda: plot_improvements({}, paper={"c": {}}), r"group 'c' is unknown\. Known: none$"),
        (lambda: plot_improvements({"a": {"ReLU": (1.0, 0.1, 3)}}), "must have results to compare with the baseline 'ReLU'"),
        (lambda: plot_improvements({}), "must have results to compare with the baseline 'ReLU'"),
    ],
)
def test_bad_input(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"plot_improvements: drawing needs matplotlib \(.*\): pip install '\.\[train\]'"):
        plot_improvements(ROWS)
