"""Draw charts as SVG text. They take their colours from ``page.css``, need no script, and can be printed."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 250  # the size of a chart; the page scales it, on a phone to three quarters
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 74, 22, 38  # margins; the names of lines are in the right margin
_APART = 13  # the smallest vertical distance between two names


@dataclass(frozen=True)
class Line:
    """A named polyline; ``css_class`` is a class of the style sheet. Without a label, no name is drawn."""

    label: str
    css_class: str
    points: Sequence[tuple[float, float]]


class Axes:
    """Maps numbers from x[0] to x[1] and y[0] to y[1] to pixels. `log`: use a logarithmic y axis."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], right: float = _RIGHT, log: bool = False) -> None:
        self.x, self.y, self.log = x, y, log
        self.left, self.right, self.top, self.bottom = float(_LEFT), WIDTH - right, float(_TOP), float(HEIGHT - _BOTTOM)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixels from the left and from the top."""
        low, high, y = (math.log(value) if self.log else value for value in (*self.y, y))
        return (
            self.left + (x - self.x[0]) / (self.x[1] - self.x[0]) * (self.right - self.left),
            self.bottom - (y - low) / (high - low) * (self.bottom - self.top),
        )

    def frame(self, x_title: str, y_title: str, x_ticks: Iterable[float] | None = None) -> str:
        """Draw horizontal grid lines for y, ticks for x, and the titles of both axes."""
        parts = []
        for tick in (log_ticks if self.log else ticks)(*self.y):
            _, y = self.at(self.x[0], tick)
            parts.append(f'<path class="grid" d="M{self.left:.1f} {y:.1f}H{self.right:.1f}"/>')
            parts.append(text(self.left - 7, y + 4, f"{tick:g}", "end"))
        for tick in ticks(*self.x) if x_ticks is None else x_ticks:
            x, _ = self.at(tick, self.y[0])
            parts.append(f'<path class="axis" d="M{x:.1f} {self.bottom:.1f}v4"/>')
            parts.append(text(x, self.bottom + 17, f"{tick:g}", "middle"))
        parts.append(f'<path class="axis" d="M{self.left:.1f} {self.bottom:.1f}H{self.right:.1f}"/>')
        parts.append(text((self.left + self.right) / 2, HEIGHT - 4, x_title, "middle", "name"))
        parts.append(text(0, self.top - 11, y_title, "start", "name"))
        return "".join(parts)

    def vertical_line(self, x: float, label: str, above: float) -> str:
        """Draw a dotted vertical line at x, with a label beside it. `above`: the height of the label above the x axis."""
        place, _ = self.at(x, self.y[0])
        left = place > (self.left + self.right) / 2
        return f'<path class="mark" d="M{place:.1f} {self.top:.1f}V{self.bottom:.1f}"/>' + text(
            place + (-5 if left else 5), self.bottom - above, label, "end" if left else "start", "mark"
        )


def lines(
    series: Sequence[Line], x_title: str, y_title: str, *, mark: tuple[float, str] | None = None, log: bool = False
) -> str:
    """Draw lines over x, each with its name at its end. `mark`: an x for a vertical line, and the label of that line."""
    xs, ys = ([point[side] for line in series for point in line.points] for side in (0, 1))
    log = log and min(ys) > 0
    axes = Axes((0, max(xs)), (min(ys) / 1.1, max(ys) * 1.1) if log else _with_margin(min(ys), max(ys)), log=log)
    parts = [axes.frame(x_title, y_title)]
    if mark is not None and mark[0] <= max(xs):
        parts.append(axes.vertical_line(*mark, above=9))
    ends = []
    for line in series:
        places = [axes.at(*point) for point in line.points]
        d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path class="line {line.css_class}" d="{d}"/>')
        x, y = places[-1]
        parts.append(f'<circle class="dot {line.css_class}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')
        if line.label:
            ends.append((y, line))
    above = -math.inf
    for number, (y, line) in enumerate(sorted(ends, key=lambda end: end[0])):
        lowest = axes.bottom - 4 - _APART * (len(ends) - 1 - number)  # leave room for the names below it
        above = max(min(y, lowest), above + _APART)
        parts.append(text(axes.right + 8, above + 4, line.label, "start", f"name {line.css_class}"))
    return svg(f"{y_title} over {x_title}: {', '.join(line.label for line in series if line.label)}", "".join(parts))


def histogram(values: Sequence[float], x_title: str, y_title: str, mark: tuple[float, str], bars: int = 20) -> str:
    """Draw the percentage of the values, which lie from 0 to 1, in each of equal bars."""
    counts = [0] * bars
    for value in values:
        counts[min(int(value * bars), bars - 1)] += 1
    percent = [100 * count / len(values) for count in counts]
    axes = Axes((0, 1), (0, max(percent) * 1.15), right=12)
    parts = [axes.frame(x_title, y_title)]
    for place, share in enumerate(percent):
        (left, top), (right, bottom) = axes.at(place / bars, share), axes.at((place + 1) / bars, 0)
        title = f"<title>{place / bars:.2f} to {(place + 1) / bars:.2f}: {share:.1f} %</title>"
        size = f'width="{right - left - 1:.1f}" height="{bottom - top:.1f}"'
        parts.append(f'<rect class="bar" x="{left + 0.5:.1f}" y="{top:.1f}" {size}>{title}</rect>')
    return svg(f"{y_title} over {x_title}", "".join(parts) + axes.vertical_line(*mark, above=axes.bottom - axes.top - 8))


def whisker_plot(
    rows: Sequence[tuple[str, tuple[float, float, float] | None]], x_title: str, y_title: str, level: float
) -> str:
    """Draw per row a dot at the second of three shares, and a vertical line from the first to the third.

    `level`: the height of a horizontal line across the chart.
    """
    axes = Axes((0.5, len(rows) + 0.5), (0, 1), right=12)
    _, across = axes.at(0.5, level)
    parts = [axes.frame(x_title, y_title, sorted({1, len(rows), *(t for t in ticks(0, len(rows)) if t and t == int(t))}))]
    parts.append(f'<path class="mark" d="M{axes.left:.1f} {across:.1f}H{axes.right:.1f}"/>')
    for number, (name, shares) in enumerate(rows, start=1):
        if shares is None:
            continue
        (x, bottom), (_, y), (_, top) = (axes.at(number, share) for share in shares)
        title = f"<title>{escape(name)}: {', '.join(f'{share:.2f}' for share in shares)}</title>"
        parts.append(f'<g>{title}<path class="whisker" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>')
        parts.append(f'<circle class="dot first" cx="{x:.1f}" cy="{y:.1f}" r="3"/></g>')
    return svg(f"{y_title} over {x_title}", "".join(parts))


def svg(label: str, content: str) -> str:
    """Return a drawing with a label for screen readers."""
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{content}</svg>'


def text(x: float, y: float, content: str, anchor: str, css_class: str = "") -> str:
    """Draw text at a position."""
    return f'<text class="{css_class}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers from low to high that are 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.7)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{k * step:.10g}") for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers for a logarithmic axis: powers of ten, and 2 and 5 times those if there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 300 else (1,)
    found = [float(f"{step * 10.0**power:.10g}") for power in powers for step in steps]
    found = [tick for tick in found if low <= tick <= high]
    return found if len(found) > 1 else ticks(low, high)


def _with_margin(low: float, high: float) -> tuple[float, float]:
    more = 0.05 * (high - low) or max(abs(high), 1.0) * 0.05
    return (0.0 if 0 <= low <= 0.3 * high else low - more), high + more
