"""Pictures of what was learned and measured, with matplotlib, which is imported when something is drawn.

Figures are objects of their own (no pyplot): they can be drawn without a display and in threads. ``figure.savefig(path)``.
"""

import difflib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pwlu.analysis import Alignment, UnitAlignment
from pwlu.curves import Curves, curves_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people tell apart (without yellow, faint on white). In black and white the line
# styles do it: 7 colours and 4 styles make 28 different lines.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
STYLES = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1.5, 1)))
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "++++")
_MOST_LAYERS = 12
Result = tuple[float, float | None, int]  # mean, standard deviation, number of runs


def plot_functions(
    model: nn.Module | Mapping[str, Mapping[str, Any]],
    layers: str | Iterable[str] | None = None,
    channels: int | Sequence[int] = 5,
    alignment: Alignment | None = None,
) -> "Figure":
    """Draw learned functions, one picture a PWLU: dots mark the bounds, what the unit started as is grey behind them.

    Args:
        model: with PWLUs; or their parameters, by name: ``{"layer1.relu": {"left": ..., "right": ..., "heights": ...,
            "left_slope": ..., "right_slope": ...}, ...}``, each with ``"init": "relu"`` if the start is to be drawn.
        layers: names of PWLUs; by default all, or 12 at even distances.
        channels: how many functions of each, at even distances, or which.
        alignment: what ``pwlu.alignment`` measured: the distribution of each function's inputs is drawn behind it.
    """
    _require_matplotlib("plot_functions")
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    units = curves_of(model, "plot_functions")
    names = _chosen_layers(list(units), layers)
    inputs = _inputs_of(alignment, units, names)
    alone = len(names) == 1
    figure, axes = _grid(len(names), 4.6 if alone else 2.9, 3.0 if alone else 2.35)
    for axis, name in zip(axes, names, strict=True):
        count = units[name].channels
        chosen = _chosen_channels(name, count, channels)
        _draw_unit(axis, units[name], chosen, inputs.get(name))
        axis.set_title(name or "PWLU", loc="left", fontsize=9)
        share = f"{len(chosen)} of {count} channels" if count > 1 else "layer-wise"
        axis.set_title(share, loc="right", fontsize=7, color="0.45")
    columns = _columns(len(names))
    for axis in axes[-columns:]:
        axis.set_xlabel("input", fontsize=8)
    for axis in axes[::columns]:
        axis.set_ylabel("output", fontsize=8)
    starts = {start.name for name in names if (start := units[name].start)}
    handles: list[Any] = [Line2D([], [], color="0.3", marker="o", markersize=4, linewidth=0, label="bounds")]
    if starts:
        label = f"start: {starts.pop()}" if len(starts) == 1 else "start"
        handles.insert(0, Line2D([], [], color="0.8", linewidth=4, label=label))
    if inputs:
        handles.append(Patch(facecolor="0.85", edgecolor="0.5", label="distribution of inputs"))
    if alone:  # there is room to tell the channels apart
        handles += [line for line in axes[0].lines if str(line.get_label()).startswith("channel")]
    place: dict[str, Any] = {"loc": "outside right center"} if alone else {"loc": "outside lower center", "ncols": len(handles)}
    figure.legend(handles=handles, frameon=False, fontsize=8, **place)
    return figure


def plot_alignment(alignments: Alignment | Mapping[str, Alignment], bars: int = 20) -> "Figure":
    """Draw how IOUs of bounds and inputs are distributed: the share of channels over IOU, one histogram a label.

    Args:
        alignments: what ``pwlu.alignment`` measured, by label, such as ``{"fix-init-10": ..., "stat-realign": ...}``.
        bars: equal ones from 0 to 1.
    """
    _require_matplotlib("plot_alignment")
    import numpy as np

    if isinstance(alignments, Alignment):
        alignments = {alignments.model: alignments}
    if not alignments or not all(isinstance(a, Alignment) and a.iou for a in alignments.values()):
        raise ValueError(
            "plot_alignment: expected what pwlu.alignment measured on some units, by label, such as "
            f"{{'stat-realign': pwlu.alignment(model, batches)}}, not {alignments!r}"
        )
    figure, (axis,) = _grid(1, 4.8, 3.0)
    for number, (label, measured) in enumerate(alignments.items()):
        counts, edges = np.histogram(measured.iou, bars, (0.0, 1.0))
        shares = 100 * counts / len(measured.iou)
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
        text = f"{label}: median {statistics.median(measured.iou):.2f}, {len(measured.iou):,} channels"
        axis.stairs(shares, edges, fill=True, color=colour, alpha=0.18)
        axis.stairs(shares, edges, color=colour, linestyle=style, linewidth=1.6, label=text)
    axis.axvline(
        0.548, color="0.55", linewidth=1, linestyle=":", label="normal distribution, bounds at $\\mu \\pm 3\\sigma$", zorder=0
    )
    axis.set(xlim=(0, 1), xlabel="IOU of [$B_L$, $B_R$] and [$x_{p5}$, $x_{p95}$]", ylabel="channels, %")
    figure.legend(loc="outside upper center", frameon=False, fontsize=8)
    return figure


def plot_improvements(
    rows: Mapping[str, Mapping[str, Result]],
    baseline: str = "ReLU",
    paper: Mapping[str, Mapping[str, float]] | None = None,
) -> "Figure":
    """Draw by how many points each activation is better than the baseline, groups side by side.

    An error bar is the standard deviation of the difference of the two means, sqrt(s^2/n + s_0^2/n_0); none where a
    standard deviation is missing, as it is after one run.

    Args:
        rows: by group and label, mean, standard deviation and number of runs:
            ``{"cifar100/resnet18": {"ReLU": (77.8, 0.2, 3), "PWLU": (78.9, 0.1, 3)}, ...}``.
        baseline: the label of which every group must have a row.
        paper: by group and label, the improvement that is to be drawn beside ours, as an open diamond.
    """
    _require_matplotlib("plot_improvements")
    paper = paper or {}
    for group in paper:
        _check_known("plot_improvements", "group", group, list(rows))
    for group, results in rows.items():
        _check_known("plot_improvements", f"baseline, in {group!r},", baseline, list(results))
    labels = list(dict.fromkeys(label for part in (rows, paper) for results in part.values() for label in results))
    if not (labels := [label for label in labels if label != baseline]):
        raise ValueError(f"plot_improvements: there is nothing to compare with the baseline {baseline!r} in {dict(rows)!r}")
    width = 0.8 / len(labels)
    figure, (axis,) = _grid(1, max(4.0, 1.2 + 0.42 * len(rows) * (len(labels) + 1)), 3.2)
    diamonds: list[tuple[float, float]] = []
    handles: list[Any] = []
    for number, label in enumerate(labels):
        places = [place + (number - (len(labels) - 1) / 2) * width for place in range(len(rows))]
        gains = [_gain(results.get(label), results[baseline]) for results in rows.values()]
        look: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "hatch": HATCHES[number % len(HATCHES)],
            "edgecolor": "white",  # of the hatches
            "linewidth": 0,
            "error_kw": {"elinewidth": 1, "capsize": 2.5, "ecolor": "0.2"},
        }
        heights, deviations = zip(*gains, strict=True)
        handles.append(axis.bar(places, heights, width * 0.9, yerr=deviations, label=label, **look))
        known = zip(places, (paper.get(group, {}).get(label) for group in rows), strict=True)
        diamonds += [(place, gain) for place, gain in known if gain is not None]
    if diamonds:
        look = {"markerfacecolor": "white", "markeredgecolor": "black", "markersize": 5, "linewidth": 0}
        handles += axis.plot(*zip(*diamonds, strict=True), marker="D", zorder=4, label="the paper", **look)
    axis.axhline(0, color="0.2", linewidth=1)
    ticks = [f"{group}\n{baseline}: {results[baseline][0]:.2f}" for group, results in rows.items()]
    axis.set_xticks(range(len(rows)), ticks, fontsize=8)
    axis.tick_params(axis="x", length=0)
    axis.grid(False, axis="x")
    axis.set_ylabel(f"improvement over {baseline}, points", fontsize=9)
    figure.legend(handles=handles, loc="outside upper center", ncols=6, frameon=False, fontsize=8)
    return figure


# What to draw.


def _chosen_layers(names: list[str], layers: str | Iterable[str] | None) -> list[str]:
    if layers is None:
        return [names[i] for i in _evenly(len(names), _MOST_LAYERS)]
    layers = [layers] if isinstance(layers, str) else list(layers)
    for layer in layers:
        _check_known("plot_functions", "layer", layer, names)
    if not layers:
        raise ValueError("plot_functions: layers is empty. Leave it out for up to 12 of them")
    return layers


def _chosen_channels(name: str, count: int, channels: int | Sequence[int]) -> list[int]:
    if isinstance(channels, int):
        if channels < 1:
            raise ValueError(f"plot_functions: channels must be how many to draw, 1 or more, or a list of them, not {channels}")
        return _evenly(count, channels)
    if not channels:
        raise ValueError("plot_functions: channels is empty. Write how many of them to draw, or which")
    if wrong := [channel for channel in channels if not 0 <= channel < count]:
        raise ValueError(
            f"plot_functions: {name!r} has the channels 0 to {count - 1}, not {wrong[0]}. Name the layers you want"
        )
    return list(channels)


def _evenly(count: int, most: int) -> list[int]:
    """At most that many of 0..count-1, at even distances, the first and the last among them."""
    if most >= count:
        return list(range(count))
    return [round(i * (count - 1) / max(1, most - 1)) for i in range(most)]


def _inputs_of(alignment: Alignment | None, units: Mapping[str, Curves], names: list[str]) -> dict[str, UnitAlignment]:
    if alignment is None:
        return {}
    inputs = {unit.name: unit for unit in alignment if unit.name in names}
    for name, unit in inputs.items():
        count = units[name].channels
        if count not in (1, unit.channels):
            raise ValueError(
                f"plot_functions: {name!r} has {count} channels, in the alignment {unit.channels}: is it of another model?"
            )
        if not unit.histogram:
            raise ValueError("plot_functions: the alignment has no histograms. Measure it with histogram=True")
    if not inputs:
        raise ValueError(f"plot_functions: the alignment has none of these units: {', '.join(names)}. Is it of another model?")
    return inputs


def _check_known(where: str, what: str, name: Any, known: list[str]) -> None:
    if name not in known:
        nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0)
        hint = f"Did you mean {nearest[0]!r}?" if nearest else "There is none."
        raise ValueError(f"{where}: {what} {name!r} is not known. {hint}")


def _gain(ours: Result | None, baseline: Result) -> tuple[float, float]:
    """The difference of the means, and its standard deviation; NaN where they are not known."""
    if ours is None:
        return math.nan, math.nan
    squares = [math.nan if deviation is None else deviation**2 / runs for _, deviation, runs in (ours, baseline)]
    return ours[0] - baseline[0], math.sqrt(sum(squares))


# Drawing it.


def _draw_unit(axis: "Axes", curves: Curves, channels: list[int], inputs: UnitAlignment | None) -> None:
    low, high = _range(curves, channels, inputs)
    drawn = []
    if curves.start:
        x, y = curves.start_corners(low, high)
        axis.plot(x.tolist(), y.tolist(), color="0.8", linewidth=4, label=f"start: {curves.start.name}", zorder=1)
        drawn.append(y)
    for number, channel in enumerate(channels):
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
        x, y = curves.corners(channel, low, high)
        axis.plot(x.tolist(), y.tolist(), color=colour, linestyle=style, linewidth=1.5, label=f"channel {channel}", zorder=2)
        bounds = torch.stack([curves.left[channel], curves.right[channel]])
        dots = curves.at(channel, bounds)
        axis.plot(bounds.tolist(), dots.tolist(), "o", color=colour, markersize=4.5, label="_bounds", zorder=3)
        drawn.append(y)
        if inputs:
            _draw_inputs(axis, inputs, channel if curves.channels > 1 else None, colour)
    bottom, top = _ends(torch.cat(drawn), otherwise=(0.0, 1.0), margin=0.06)
    axis.set(xlim=(low, high), ylim=(bottom - 0.3 * (top - bottom) if inputs else bottom, top))


def _range(curves: Curves, channels: list[int], inputs: UnitAlignment | None) -> tuple[float, float]:
    """What is to be seen of the input: the bounds, and 90 % of what comes in, of all these channels, and a bit more."""
    values = [curves.left[channels], curves.right[channels]]
    if inputs:
        seen = channels if curves.channels > 1 else range(inputs.channels)
        values += [curves.left.new_tensor([side[c] for c in seen]) for side in (inputs.p5, inputs.p95)]
    return _ends(torch.cat(values), otherwise=(-3.0, 3.0), margin=0.15)


def _ends(values: Tensor, otherwise: tuple[float, float], margin: float) -> tuple[float, float]:
    """The smallest and largest finite value, and a share more on both sides; a unit may have parameters that are not finite."""
    values = values[values.isfinite()]
    low, high = (values.min().item(), values.max().item()) if len(values) else otherwise
    more = margin * (high - low) or 1.0
    return low - more, high + more


def _draw_inputs(axis: "Axes", inputs: UnitAlignment, channel: int | None, colour: str) -> None:
    """How one channel's inputs are distributed, or those of all channels: the mean of their distributions."""
    import numpy as np

    chosen = [c for c in (range(inputs.channels) if channel is None else [channel]) if not math.isnan(inputs.low[c])]
    if not chosen:
        return
    bars = len(inputs.histogram[0])
    edges = np.linspace(min(inputs.low[c] for c in chosen), max(inputs.high[c] for c in chosen), bars + 1)
    shares = np.zeros(bars)
    for c in chosen:
        below = np.concatenate([[0], np.cumsum(inputs.histogram[c])])
        shares += np.diff(np.interp(edges, np.linspace(inputs.low[c], inputs.high[c], bars + 1), below))
    # along the lower edge, which the functions leave free, whatever the scale of the output is
    heights, lower_edge = 0.2 * shares / shares.max(), axis.get_xaxis_transform()
    axis.stairs(heights, edges, fill=True, color=colour, alpha=0.12, transform=lower_edge, zorder=0.5)
    axis.stairs(heights, edges, color=colour, linewidth=0.8, alpha=0.8, transform=lower_edge, zorder=0.5)


def _columns(count: int) -> int:
    return math.ceil(count / math.ceil(count / (4 if count <= 20 else 6)))


def _grid(count: int, width: float, height: float) -> "tuple[Figure, list[Axes]]":
    """A figure with that many pictures of that size in inches, in rows of much the same length."""
    from matplotlib.figure import Figure

    columns = _columns(count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * rows + 0.4), dpi=150, layout="constrained")
    axes = [figure.add_subplot(rows, columns, number) for number in range(1, count + 1)]
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return figure, axes


def _require_matplotlib(what: str) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{what}: drawing needs matplotlib ({error}): pip install 'pwlu[train]'") from None
