"""Colours and layout of all figures, and errors for missing packages and unknown names.

Figures do not use pyplot, so they can be drawn without a display and in threads. ``figure.savefig(path)`` writes a figure.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pwlu.common.text import abbreviate, install, nearest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colour-blind safe palette of Okabe and Ito, without yellow, which is faint on white. Line styles distinguish the lines in
# black and white: 7 colours and 4 styles make 28 different lines.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
STYLES = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1.5, 1)))


def evenly_spaced(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced numbers of 0..count-1, including the first and the last."""
    if most >= count:
        return list(range(count))
    return [round(i * (count - 1) / max(1, most - 1)) for i in range(most)]


def columns_of(count: int) -> int:
    """Return the number of columns for this many panels."""
    return math.ceil(count / math.ceil(count / (4 if count <= 20 else 6)))


def grid(count: int, width: float, height: float) -> "tuple[Figure, list[Axes]]":
    """Return a figure with this many panels of this size in inches, in rows of similar length."""
    columns = columns_of(count)
    return panels(count, columns, width, [height] * math.ceil(count / columns))


def panels(count: int, columns: int, width: float, heights: Sequence[float]) -> "tuple[Figure, list[Axes]]":
    """Return a figure with this many panels in rows of these heights in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, sum(heights) + 0.4), dpi=150, layout="constrained")
    places = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    axes = [figure.add_subplot(places[divmod(number, columns)]) for number in range(count)]
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return figure, axes


def require_matplotlib(caller: str) -> None:
    """Raise ImportError, naming the extra to install, if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{caller}: drawing needs matplotlib ({error}): {install('train')}") from None


def require_known(caller: str, what: str, name: Any, known: list[str]) -> None:
    """Raise ValueError, listing the known names, if `name` is not one of them."""
    if name not in known:
        near = nearest(str(name), known)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        names = abbreviate([repr(other) for other in known], 8) or "none"
        raise ValueError(f"{caller}: {what} {name!r} is unknown. {hint}Known: {names}")
