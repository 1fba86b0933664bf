"""Draw the distribution of the IOU of bounds and inputs."""

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pwlu.analysis.alignment import HEALTHY, Alignment
from pwlu.common.text import counted
from pwlu.plotting.style import COLOURS, STYLES, grid, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_alignment(alignments: Alignment | Mapping[str, Alignment], bars: int = 20) -> "Figure":
    """Draw the distribution of the IOU of bounds and inputs over all channels, one histogram per label.

    Args:
        alignments: a result of :func:`pwlu.alignment`, or several by label, such as
            ``{"fix-init-10": ..., "stat-realign": ...}``.
        bars: number of equal bars from 0 to 1. Default: 20.

    Returns:
        A matplotlib figure; ``figure.savefig(path)`` writes it.

    Raises:
        ValueError: if ``alignments`` is something else, or has no finite inputs.
        ImportError: if matplotlib is not installed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), pwlu.PWLU(8))
        >>> figure = pwlu.plot_alignment(pwlu.alignment(model, [torch.randn(64, 4)]))
        >>> figure.savefig("alignment.png")
    """
    require_matplotlib("plot_alignment")
    import numpy as np

    if isinstance(alignments, Alignment):
        alignments = {alignments.model: alignments}
    if wrong := _describe_wrong(alignments):
        raise ValueError(
            "plot_alignment: expected a pwlu.Alignment, or several by label, such as "
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


def _describe_wrong(alignments: Any) -> str:
    """Return a description of wrong input; empty if the input is right."""
    if not isinstance(alignments, Mapping):
        return type(alignments).__name__
    if not alignments:
        return "an empty dictionary"
    for label, measured in alignments.items():
        if not isinstance(measured, Alignment):
            return f"{type(measured).__name__} for {label!r}"
        if not measured.iou:
            return f"{label!r}, where no unit had finite inputs"
    return ""
