"""Draw learned functions. Matplotlib is imported only when a figure is drawn."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pwlu.analysis.alignment import Alignment, UnitAlignment
from pwlu.analysis.curves import Curves, curves_of, inputs_of
from pwlu.plotting.style import COLOURS, STYLES, columns_of, evenly_spaced, grid, require_known, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_LAYERS = 12
_STRIP = 0.3  # height of the strip with the distributions of inputs, relative to that of the functions
_CHANNELS = "the number of channels to draw, at least 1, or a list of channels such as [0, 2]"


def plot_functions(
    model: nn.Module | Mapping[str, Mapping[str, Any]],
    *,
    layers: str | Iterable[str] | None = None,
    channels: int | Sequence[int] = 5,
    alignment: Alignment | None = None,
    same_scale: bool = False,
) -> "Figure":
    """Draw learned functions, one panel per PWLU. Dots mark the bounds; the initial function is grey in the background.

    Args:
        model: a model with PWLUs, or their parameters by name: ``{"layer1.relu": {"left": ..., "right": ..., "heights": ...,
            "left_slope": ..., "right_slope": ...}, ...}``. Add ``"init": "relu"`` to draw the initial function.
        layers: names of the PWLUs to draw. Default: all, or 12 evenly spaced ones if there are more.
        channels: number of evenly spaced functions per PWLU, or a list of channels. Default: 5.
        alignment: result of :func:`pwlu.alignment`. If given, the distribution of the inputs is drawn below each function;
            without histograms, a line from the 5 % to the 95 % quantile.
        same_scale: whether all panels share the same axes, to compare the sizes of functions. Default: False.

    Returns:
        A matplotlib figure; ``figure.savefig(path)`` writes it.

    Raises:
        ValueError: if the model has no PWLU, a layer or channel does not exist, or the alignment does not fit the model.
        TypeError: if an argument has the wrong type.
        ImportError: if matplotlib is not installed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), pwlu.PWLU(8))
        >>> figure = pwlu.plot_functions(model, channels=3)
        >>> figure.savefig("functions.png")
    """
    require_matplotlib("plot_functions")
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    units = curves_of(model, "plot_functions")
    names = _chosen_layers(list(units), layers)
    inputs = inputs_of({name: units[name] for name in names}, alignment, "plot_functions")
    alone = len(names) == 1
    figure, axes = grid(len(names), 4.6 if alone else 2.9, 3.0 if alone else 2.35)
    chosen_of = {name: _chosen_channels(name, units[name].channels, channels) for name in names}
    ranges = {name: _input_range(units[name], chosen_of[name], inputs.get(name)) for name in names}
    if same_scale:
        ranges = dict.fromkeys(names, _union(ranges.values()))
    numbers = {name: number for number, name in enumerate(units, start=1)}
    heights = []
    for axis, name in zip(axes, names, strict=True):
        count, chosen = units[name].channels, chosen_of[name]
        heights.append(_draw_unit(axis, units[name], chosen, inputs.get(name), ranges[name]))
        axis.set_title(f"layer {numbers[name]}: {name}" if name else "PWLU", loc="left", fontsize=9)
        share = f"{len(chosen)} of {count} channels" if count > 1 else "layer-wise"
        axis.set_title(share, loc="right", fontsize=7, color="0.45")
    if same_scale:
        heights = [_union(heights)] * len(heights)
    for axis, (bottom, top) in zip(axes, heights, strict=True):
        _set_output(axis, bottom, top, bool(inputs))
    columns = columns_of(len(names))
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
        whole = any(unit.histogram for unit in inputs.values())
        handles.append(
            Patch(facecolor="0.85", edgecolor="0.5", label="distribution of inputs")
            if whole
            else Line2D([], [], color="0.5", linewidth=2, label="middle 90 % of inputs")
        )
    if alone:  # a single panel has room for a legend of the channels
        handles += [line for line in axes[0].lines if str(line.get_label()).startswith("channel")]
    place: dict[str, Any] = {"loc": "outside right center"} if alone else {"loc": "outside lower center", "ncols": len(handles)}
    figure.legend(handles=handles, frameon=False, fontsize=8, **place)
    return figure


# Choosing what to draw.


def _chosen_layers(names: list[str], layers: str | Iterable[str] | None) -> list[str]:
    if layers is None:
        return [names[i] for i in evenly_spaced(len(names), _MOST_LAYERS)]
    if not isinstance(layers, Iterable):
        raise TypeError(
            f"plot_functions: layers must be the name of a PWLU, or a list of names such as {names[:2]}, not "
            f"{type(layers).__name__}"
        )
    layers = [layers] if isinstance(layers, str) else list(layers)
    for layer in layers:
        require_known("plot_functions", "layer", layer, names)
    if not layers:
        raise ValueError("plot_functions: layers is empty. Leave it out to draw up to 12 layers")
    return layers


def _chosen_channels(name: str, count: int, channels: int | Sequence[int]) -> list[int]:
    if isinstance(channels, int):
        if channels < 1:
            raise ValueError(f"plot_functions: channels must be {_CHANNELS}, not {channels}")
        return evenly_spaced(count, channels)
    try:
        chosen = [operator.index(channel) for channel in channels]
    except TypeError:
        raise TypeError(f"plot_functions: channels must be {_CHANNELS}, not {channels!r}") from None
    if not chosen:
        raise ValueError("plot_functions: channels is empty. Pass the number of channels to draw, or a list of them")
    if wrong := [channel for channel in chosen if not 0 <= channel < count]:
        raise ValueError(
            f"plot_functions: {name!r} has the channels 0 to {count - 1}, not {wrong[0]}. Pass layers= to select other layers"
        )
    return chosen


# Drawing.


def _draw_unit(
    axis: "Axes", curves: Curves, channels: list[int], inputs: UnitAlignment | None, ends: tuple[float, float]
) -> tuple[float, float]:
    """Draw one unit over this range of inputs; return the smallest and the largest visible output."""
    low, high = ends
    drawn = []
    if curves.start:
        x, y = curves.start_points(low, high)
        axis.plot(x.tolist(), y.tolist(), color="0.8", linewidth=4, label=f"start: {curves.start.name}", zorder=1)
        drawn.append(y)
    for number, channel in enumerate(channels):
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
        x, y = curves.points(channel, low, high)
        axis.plot(x.tolist(), y.tolist(), color=colour, linestyle=style, linewidth=1.5, label=f"channel {channel}", zorder=2)
        bounds = torch.stack([curves.left[channel], curves.right[channel]])
        dots = curves.at(channel, bounds)
        axis.plot(bounds.tolist(), dots.tolist(), "o", color=colour, markersize=4.5, label="_bounds", zorder=3)
        drawn.append(y)
        if inputs:
            height = 0.2 * (1 - (number + 0.5) / len(channels))  # one line above the other
            _draw_inputs(axis, inputs, channel, colour, height)
    axis.set_xlim(low, high)
    return _finite_range(torch.cat(drawn), otherwise=(0.0, 1.0), margin=0.06)


def _set_output(axis: "Axes", bottom: float, top: float, with_inputs: bool) -> None:
    """Set the limits of the output axis. Its ticks end above the strip with the distributions of inputs."""
    axis.set_ylim(bottom - _STRIP * (top - bottom) if with_inputs else bottom, top)
    if with_inputs:
        axis.set_yticks([tick for tick in axis.get_yticks() if bottom <= tick <= top])
        axis.spines["left"].set_bounds(bottom, top)


def _union(ends: Iterable[tuple[float, float]]) -> tuple[float, float]:
    lows, highs = zip(*ends, strict=True)
    return min(lows), max(highs)


def _input_range(curves: Curves, channels: list[int], inputs: UnitAlignment | None) -> tuple[float, float]:
    """Return the range of inputs to show: the bounds and 90 % of the inputs of these channels, with a margin."""
    values = [curves.left[channels], curves.right[channels]]
    if inputs:
        values += [curves.left.new_tensor(side)[channels] for side in (inputs.p5, inputs.p95)]
    return _finite_range(torch.cat(values), otherwise=(-3.0, 3.0), margin=0.15)


def _finite_range(values: Tensor, otherwise: tuple[float, float], margin: float) -> tuple[float, float]:
    """Return the smallest and largest finite value, with a margin; parameters may be infinite or NaN."""
    values = values[values.isfinite()]
    low, high = (values.min().item(), values.max().item()) if len(values) else otherwise
    more = margin * (high - low) or 1.0
    return low - more, high + more


def _draw_inputs(axis: "Axes", inputs: UnitAlignment, channel: int, colour: str, height: float) -> None:
    """Draw the distribution of the inputs of one channel.

    Without a histogram, draw a line at this height from the 5 % to the 95 % quantile.
    """
    if not inputs.count[channel]:
        return
    # Draw in axes coordinates along the lower edge, where there are no functions at any scale of the output.
    place: dict[str, Any] = {"color": colour, "transform": axis.get_xaxis_transform(), "zorder": 0.5}
    if not inputs.histogram:
        axis.plot([inputs.p5[channel], inputs.p95[channel]], [height] * 2, linewidth=2, label="_inputs", **place)
        return
    low, high, bars = inputs.low[channel], inputs.high[channel], inputs.histogram[channel]
    heights = [0.2 * bar / max(bars) for bar in bars]
    edges = [low + (high - low) * number / len(bars) for number in range(len(bars) + 1)]
    axis.stairs(heights, edges, fill=True, alpha=0.12, **place)
    axis.stairs(heights, edges, linewidth=0.8, alpha=0.8, **place)
