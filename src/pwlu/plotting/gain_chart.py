"""Draw the gains of activations over a baseline, one panel per network."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pwlu.plotting.style import COLOURS, panels, require_known, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 3
Result = tuple[float, float | None, int]  # mean, standard deviation, number of runs
Gain = tuple[float, float]  # the gain and its standard error, NaN if unknown


def plot_improvements(
    rows: Mapping[str, Mapping[str, Result]],
    baseline: str = "ReLU",
    paper: Mapping[str, Mapping[str, float]] | None = None,
    *,
    paper_name: str = "the paper",
    limit: float = math.inf,
) -> "Figure":
    """Draw the gain of each activation over the baseline in points: one panel per group, one line per activation.

    Error bars show the standard error of the gain, sqrt(s^2/n + s_0^2/n_0). A gain has no error bar if a standard deviation is
    missing, as after a single run. PWLUs are blue and come last, other activations are grey. All panels have the same axes.

    Args:
        rows: mean, standard deviation and number of runs, by group and label:
            ``{"cifar100/resnet18": {"ReLU": (77.8, 0.2, 3), "PWLU": (78.9, 0.1, 3)}, ...}``.
        baseline: label of the baseline, which every group must contain. Default: ``"ReLU"``.
        paper: published gains by group and label, which open diamonds show.
        paper_name: legend entry of the diamonds. It should name the publication and the data set.
        limit: write a gain of more points than this as a number beside an arrow. Default: no limit.

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
    paper = {group: {label: gain for label, gain in theirs.items() if label != baseline} for group, theirs in paper.items()}
    labels = list(dict.fromkeys(label for part in (rows, paper) for results in part.values() for label in results))
    if not (labels := sorted((label for label in labels if label != baseline), key=lambda label: "PWLU" in label)):
        raise ValueError(
            f"plot_improvements: rows must have results to compare with the baseline {baseline!r}, not {dict(rows)!r} alone"
        )
    gains = {
        group: {label: _gain(results[label], results[baseline]) for label in labels if label in results}
        for group, results in rows.items()
    }
    low, high = _ends([*gains.values()], paper, limit)
    drawn = [{*gains[group], *paper.get(group, {})} for group in rows]
    batches = [set().union(*drawn[start : start + _COLUMNS]) for start in range(0, len(rows), _COLUMNS)]
    shown = [[label for label in labels if label in batch] for batch in batches]  # the lines of each row of panels
    heights = [0.9 + 0.24 * len(part) for part in shown]
    columns = min(_COLUMNS, len(rows))
    figure, axes = panels(len(rows), columns, 1.8 + 3.0 / columns, heights)  # 3 inches for the labels
    for number, (axis, group) in enumerate(zip(axes, rows, strict=True)):
        part = shown[number // _COLUMNS]
        axis.axvline(0, color="0.2", linewidth=1)
        axis.set(xlim=(low, high), ylim=(len(part) - 0.4, -0.6))
        axis.locator_params(axis="x", nbins=5, steps=[1, 2, 5, 10])
        for label, gain in gains[group].items():
            _draw_gain(axis, part.index(label), gain, COLOURS[0] if "PWLU" in label else "0.35", limit)
        for label, theirs in paper.get(group, {}).items():
            axis.plot(theirs, part.index(label), "D", color="black", markerfacecolor="white", markersize=5, label=paper_name)
        axis.set_title(group, loc="left", fontsize=9)
        axis.set_xlabel(f"{baseline}: {rows[group][baseline][0]:.2f}", fontsize=8)
        axis.set_yticks(range(len(part)), part if number % _COLUMNS == 0 else [""] * len(part))
        axis.tick_params(axis="y", length=0)
    figure.supxlabel(f"improvement over {baseline}, points", fontsize=9)
    if diamonds := [line for axis in axes for line in axis.lines if line.get_label() == paper_name]:
        figure.legend(handles=diamonds[:1], loc="outside upper right", frameon=False, fontsize=8)
    return figure


def _draw_gain(axis: "Axes", place: int, gain: Gain, colour: str, limit: float) -> None:
    """Draw one gain as a dot with an error bar, or as an arrow at the edge with its number."""
    value, error = gain
    if abs(value) <= limit:
        axis.errorbar(value, place, xerr=error, fmt="o", color=colour, markersize=4.5, elinewidth=1.5, capsize=2.5, zorder=3)
        return
    text = f"{value:+.1f}".replace("-", "\N{MINUS SIGN}") + ("" if math.isnan(error) else f" ± {error:.1f}")
    edge, text, side = (0.03, f"← {text}", "left") if value < 0 else (0.97, f"{text} →", "right")
    look: dict[str, Any] = {"color": colour, "fontsize": 8, "ha": side, "va": "center"}
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axis.text(edge, place, text, transform=axis.get_yaxis_transform(), bbox=behind, **look)


def _ends(gains: list[dict[str, Gain]], paper: Mapping[str, Mapping[str, float]], limit: float) -> tuple[float, float]:
    """Return the range of all gains within the limit and of their error bars, with a margin."""
    drawn = [gain for group in gains for gain in group.values() if abs(gain[0]) <= limit]
    values = [0.0, *(gain for group in paper.values() for gain in group.values())]
    values += [value + sign * (0 if math.isnan(error) else error) for value, error in drawn for sign in (-1, 1)]
    margin = 0.06 * (max(values) - min(values)) or 1.0
    return min(values) - margin, max(values) + margin


def _gain(ours: Result, baseline: Result) -> Gain:
    """Return the difference of the means and its standard error."""
    squares = [math.nan if deviation is None else deviation**2 / runs for _, deviation, runs in (ours, baseline)]
    return ours[0] - baseline[0], math.sqrt(sum(squares))
