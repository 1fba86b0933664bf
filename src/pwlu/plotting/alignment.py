"""A figure of alignment: how the IOUs of bounds and inputs are distributed."""

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pwlu.analysis.alignment import HEALTHY, Alignment
from pwlu.plotting.style import COLOURS, STYLES, grid, require_matplotlib
from pwlu.text import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_alignment(alignments: Alignment | Mapping[str, Alignment], bars: int = 20) -> "Figure":
    """Draw how IOUs of bounds and inputs are distributed: the share of channels over IOU, one histogram a label.

    Args:
        alignments: what ``pwlu.alignment`` measured, by label, such as ``{"fix-init-10": ..., "stat-realign": ...}``.
        bars: equal ones from 0 to 1.
    """
    require_matplotlib("plot_alignment")
    import numpy as np

    if isinstance(alignments, Alignment):
        alignments = {alignments.model: alignments}
    if wrong := _wrong_of(alignments):
        raise ValueError(
            "plot_alignment: expected what pwlu.alignment measured, or several of these by label, such as "
            f"{{'stat-realign': pwlu.alignment(model, batches)}}, not {wrong}"
        )
    figure, (axis,) = grid(1, 4.8, 3.0)
    for number, (label, measured) in enumerate(alignments.items()):
        counts, edges = np.histogram(measured.iou, bars, (0.0, 1.0))
        shares = 100 * counts / len(measured.iou)
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
        number_of = counted(len(measured.iou), "channel")
        text = f"{label}: median {statistics.median(measured.iou):.2f}, {number_of}"
        axis.stairs(shares, edges, fill=True, color=colour, alpha=0.18)
        axis.stairs(shares, edges, color=colour, linestyle=style, linewidth=1.6, label=text)
    text = "normal distribution, bounds at $\\mu \\pm 3\\sigma$"
    axis.axvline(HEALTHY, color="0.55", linewidth=1, linestyle=":", label=text, zorder=0)
    axis.set(xlim=(0, 1), xlabel="IOU of [$B_L$, $B_R$] and [$x_{p5}$, $x_{p95}$]", ylabel="channels, %")
    figure.legend(loc="outside upper center", frameon=False, fontsize=8)
    return figure


def _wrong_of(alignments: Any) -> str:
    """What came instead, in words; nothing if all is well."""
    if not isinstance(alignments, Mapping):
        return type(alignments).__name__
    if not alignments:
        return "an empty dictionary"
    for label, measured in alignments.items():
        if not isinstance(measured, Alignment):
            return f"{type(measured).__name__}, which {label!r} is"
        if not measured.iou:
            return f"{label!r}, where no unit had an input that was finite"
    return ""
