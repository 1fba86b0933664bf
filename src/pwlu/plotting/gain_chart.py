"""Draw the gains of activations over a baseline as bars."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pwlu.plotting.style import COLOURS, grid, require_known, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "++++")
Result = tuple[float, float | None, int]  # mean, standard deviation, number of runs


def plot_improvements(
    rows: Mapping[str, Mapping[str, Result]],
    baseline: str = "ReLU",
    paper: Mapping[str, Mapping[str, float]] | None = None,
    paper_name: str = "the paper",
) -> "Figure":
    """Draw the gain of each activation over the baseline in points, as groups of bars.

    Error bars show the standard error of the gain, sqrt(s^2/n + s_0^2/n_0). A bar has no error bar if a standard deviation is
    missing, as after a single run.

    Args:
        rows: mean, standard deviation and number of runs, by group and label:
            ``{"cifar100/resnet18": {"ReLU": (77.8, 0.2, 3), "PWLU": (78.9, 0.1, 3)}, ...}``.
        baseline: label of the baseline, which every group must contain. Default: ``"ReLU"``.
        paper: published gains by group and label, which open diamonds show.
        paper_name: legend entry of the diamonds. It should name the publication and the data set.

    Returns:
        A matplotlib figure; ``figure.savefig(path)`` writes it.

    Raises:
        ValueError: if a group lacks the baseline, ``paper`` has an unknown group, or there is nothing to compare.
        ImportError: if matplotlib is not installed.

    Example:
        >>> rows = {"resnet18": {"ReLU": (77.8, 0.2, 3), "PWLU": (78.9, 0.1, 3)}}
        >>> figure = pwlu.plot_improvements(rows)
        >>> figure.savefig("improvements.png")
    """
    require_matplotlib("plot_improvements")
    paper = paper or {}
    for group in paper:
        require_known("plot_improvements", "group", group, list(rows))
    for group, results in rows.items():
        require_known("plot_improvements", f"in {group!r}, the baseline", baseline, list(results))
    labels = list(dict.fromkeys(label for part in (rows, paper) for results in part.values() for label in results))
    if not (labels := [label for label in labels if label != baseline]):
        raise ValueError(
            f"plot_improvements: rows must have results to compare with the baseline {baseline!r}, not {dict(rows)!r} alone"
        )
    width = 0.8 / len(labels)
    figure, (axis,) = grid(1, max(4.0, 1.2 + 0.42 * len(rows) * (len(labels) + 1)), 3.2)
    diamonds: list[tuple[float, float]] = []
    handles: list[Any] = []
    for number, label in enumerate(labels):
        places = [place + (number - (len(labels) - 1) / 2) * width for place in range(len(rows))]
        gains = [_gain(results.get(label), results[baseline]) for results in rows.values()]
        look: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "hatch": HATCHES[number % len(HATCHES)],
            "edgecolor": "white",  # the colour of the hatches
            "linewidth": 0,
            "error_kw": {"elinewidth": 1, "capsize": 2.5, "ecolor": "0.2"},
        }
        heights, deviations = zip(*gains, strict=True)
        handles.append(axis.bar(places, heights, width * 0.9, yerr=deviations, label=label, **look))
        known = zip(places, (paper.get(group, {}).get(label) for group in rows), strict=True)
        diamonds += [(place, gain) for place, gain in known if gain is not None]
    if diamonds:
        look = {"markerfacecolor": "white", "markeredgecolor": "black", "markersize": 5, "linewidth": 0}
        handles += axis.plot(*zip(*diamonds, strict=True), marker="D", zorder=4, label=paper_name, **look)
    axis.axhline(0, color="0.2", linewidth=1)
    ticks = [f"{group}\n{baseline}: {results[baseline][0]:.2f}" for group, results in rows.items()]
    axis.set_xticks(range(len(rows)), ticks, fontsize=8)
    axis.tick_params(axis="x", length=0)
    axis.grid(False, axis="x")
    axis.set_ylabel(f"improvement over {baseline}, points", fontsize=9)
    _add_legend(figure, handles)
    return figure


def _add_legend(figure: "Figure", handles: list[Any]) -> None:
    """Add a legend in as few rows as fit the width. Entries read row by row in the order of the bars."""
    for rows in range(1, len(handles) + 1):
        columns = math.ceil(len(handles) / rows)
        down = [handle for column in range(columns) for handle in handles[column::columns]]  # matplotlib fills columns first
        legend = figure.legend(handles=down, loc="outside upper center", ncols=columns, frameon=False, fontsize=8)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def _gain(ours: Result | None, baseline: Result) -> tuple[float, float]:
    """Return the difference of the means and its standard deviation; NaN if unknown."""
    if ours is None:
        return math.nan, math.nan
    squares = [math.nan if deviation is None else deviation**2 / runs for _, deviation, runs in (ours, baseline)]
    return ours[0] - baseline[0], math.sqrt(sum(squares))
