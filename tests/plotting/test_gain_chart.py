"""The gains of activations, read back from the figure."""

import math
import sys

import pytest
from test_plot import legend, lines, saved

import pwlu
from pwlu.plotting.gain_chart import plot_improvements
from pwlu.plotting.style import COLOURS

ROWS = {
    "a": {"ReLU": (70.0, 0.3, 9), "Swish": (71.0, 0.4, 4), "PWLU": (72.0, 0.0, 1)},
    "b": {"PWLU": (80.5, None, 1), "ReLU": (80.0, 0.1, 3)},
}


def names(axis):
    """The labels of the lines of a panel, from top to bottom."""
    bottom, top = axis.get_ylim()
    assert bottom > top
    return [text.get_text() for text in axis.get_yticklabels()]


def dots(axis):
    """By line of the panel: the gain, and the ends of its error bar if there is one."""
    found = {}
    for container in axis.containers:
        (x,), (y,) = container.lines[0].get_data()
        ends = [x for segment in container.lines[2][0].get_segments() for x, _ in segment if math.isfinite(x)]
        found[y] = (x, *ends)
    return found


def test_improvements():
    figure = plot_improvements(ROWS, paper={"b": {"ReLU": 0.0, "PWLU": 0.7, "PAU": 0.2}})
    a, b = figure.axes
    assert names(a) == ["Swish", "PAU", "PWLU"]  # PWLUs last
    assert names(b) == ["", "", ""]  # the same as to the left
    error = math.sqrt(0.3**2 / 9 + 0.4**2 / 4)
    assert dots(a) == {0: pytest.approx((1, 1 - error, 1 + error)), 2: pytest.approx((2, 1.9, 2.1))}
    assert dots(b) == {2: (0.5,)}
    assert a.get_xlim() == b.get_xlim()
    diamonds = {tuple(float(x[0]) for x in line.get_data()) for line in lines(b, "the paper")}
    assert diamonds == {(0.7, 2), (0.2, 1)}
    assert not lines(a, "the paper")
    colours = {container.lines[0].get_color() for container in a.containers}
    assert colours == {"0.35", COLOURS[0]}
    assert [(axis.get_title(loc="left"), axis.get_xlabel()) for axis in (a, b)] == [("a", "ReLU: 70.00"), ("b", "ReLU: 80.00")]
    assert legend(figure) == ["the paper"]
    assert saved(figure)


def test_the_diamonds_are_explained():
    figure = plot_improvements(ROWS, paper={"b": {"PWLU": 0.7}}, paper_name="the paper, same network, ImageNet")
    assert "the paper, same network, ImageNet" in legend(figure)
    assert not plot_improvements(ROWS).legends


def test_improvements_over_another_baseline():
    figure = plot_improvements({"a": ROWS["a"]}, baseline="Swish")
    assert names(figure.axes[0]) == ["ReLU", "PWLU"]
    assert [gain[0] for gain in dots(figure.axes[0]).values()] == [-1.0, 1.0]
    assert figure.get_supxlabel() == "improvement over Swish, points"


def test_a_gain_beyond_the_limit():
    """It is a number, so that it does not make all other gains small."""
    rows = {"a": ROWS["a"] | {"FReLU": (53.0, 3.0, 9), "PAU": (87.0, None, 1)}}
    (axis,) = plot_improvements(rows, limit=6).axes
    error = math.sqrt(0.3**2 / 9 + 3.0**2 / 9)
    texts = {text.get_position()[1]: text.get_text() for text in axis.texts}
    assert texts == {1: f"\u2190 \u221217.0 ± {error:.1f}", 2: "+17.0 \u2192"}
    assert list(dots(axis)) == [0, 3]
    assert -1 < axis.get_xlim()[0] < 0 < 2 < axis.get_xlim()[1] < 3
    assert len(dots(plot_improvements(rows).axes[0])) == 4


def test_rows_of_panels():
    """Three panels per row. A row has the lines of its own panels only, and names them once."""
    rows = {str(number): {"ReLU": (70.0, 0.1, 3), "PWLU": (71.0, 0.1, 3)} for number in range(4)}
    rows["1"]["Swish"] = (71.5, 0.1, 3)
    figure = plot_improvements(rows)
    assert [names(axis) for axis in figure.axes] == [["Swish", "PWLU"], ["", ""], ["", ""], ["PWLU"]]
    assert [sorted(dots(axis)) for axis in figure.axes] == [[1], [0, 1], [1], [0]]
    figure.draw_without_rendering()
    tops = [round(axis.get_position().y1, 3) for axis in figure.axes]
    assert tops[0] == tops[1] == tops[2] > tops[3]


def test_it_can_be_had_where_the_other_pictures_are():
    assert pwlu.plot_improvements is plot_improvements


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
