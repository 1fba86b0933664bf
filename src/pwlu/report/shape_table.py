"""The table of shapes per layer: cells are darker where more functions have a shape."""

import math
import statistics
from collections.abc import Callable, Iterable
from html import escape

from pwlu.analysis.alignment import Alignment
from pwlu.analysis.shapes import CLASSES, Shapes, UnitShapes

_SATURATING = "saturating"
_SHAPES = {  # the columns of the table, with explanations
    "linear": "within 5 % of a straight line",
    "relu_like": "within 10 % of a line with one bend upwards",
    "v_shaped": "falls, then rises, by at least 20 % of its range",
    "non_monotone": "reverses its direction by at least 10 % of its range",
    "flat_left": "hardly changes over the first eighth",
    "flat_right": "hardly changes over the last eighth",
    _SATURATING: "flat on both sides",
    "moved": "at least 10 % away from its initial function",
    "collapsed": "distance of the bounds below 5 % of the inputs' range, or bounds crossed",
}
_NUMBERS = {
    "median movement": "distance of the heights from the initial function, relative to the range of the function",
    "outside, %": "inputs outside the bounds, mean over functions",
    "empty, %": "intervals without inputs",
    "median IOU": "IOU of the bounds and the middle 90 % of the inputs",
}


def shape_table(shapes: Shapes, alignment: Alignment | None) -> str:
    """Return a summary sentence and the table: one row per layer, one column per shape."""
    iou = {unit.name: unit.iou for unit in alignment or ()}
    columns = {CLASSES[shape].words if shape in CLASSES else shape: why for shape, why in _SHAPES.items()} | _NUMBERS
    head = "".join(f'<th scope="col" title="{escape(why)}"><span>{name}</span></th>' for name, why in columns.items())
    body = []
    for place, unit in enumerate(shapes):  # the chart of the alignment numbers the layers in the same way
        link = f'<a href="#functions" data-layer="{place}">{escape(unit.name or "the model")}</a>'
        body.append(f'<tr><th scope="row"><i>{place + 1}</i> {link}</th>{_cells(unit, iou.get(unit.name, []))}</tr>')
    every = _cells(shapes.together(), alignment.iou if alignment else [])
    where = "where their inputs are" if alignment else "between their bounds"
    return (
        f"<p>{_summary(shapes)}</p>"
        f'<p class="caption" id="shares">Percentage of the functions of each layer with a shape {where}. '
        "Inputs outside and empty intervals are means over functions.</p>"
        '<div class="scroll" tabindex="0" role="region" aria-labelledby="shares"><table class="heat">'
        f'<thead><tr><th scope="col">layer</th><th scope="col"><span>functions</span></th>{head}</tr></thead>'
        f'<tbody>{"".join(body)}</tbody><tfoot><tr><th scope="row">all</th>{every}</tr></tfoot></table></div>'
    )


def _summary(shapes: Shapes) -> str:
    """Compare with the paper's observations: V shapes are frequent, and the first layer is nearly linear."""
    first, others = shapes.units[0], Shapes(shapes.units[1:])
    name, linear = escape(first.name or "the model"), _percentage(first.share("linear"))
    rest = f"; in the others, {_percentage(others.share('linear'))}" if len(others) else ""
    return (
        f"Of all functions, <strong>{_percentage(shapes.share('v_shaped'))}</strong> are V-shaped. In layer 1 ({name}), "
        f"<strong>{linear}</strong> are nearly linear, that is {_SHAPES['linear']}{rest}. "
        "(The paper reports frequent V shapes and a nearly linear first layer.)"
    )


def _percentage(share: float) -> str:
    return "an unknown share" if math.isnan(share) else f"{100 * share:.0f} %"


def _cells(unit: UnitShapes, iou: list[float]) -> str:
    parts = [f"<td>{unit.channels:,}</td>"]
    for shape in _SHAPES:
        share = _saturating(unit) if shape == _SATURATING else unit.share(shape)
        known = not math.isnan(share)
        parts.append(f'<td class="share" style="--share:{share:.3f}">{100 * share:.0f}</td>' if known else "<td>-</td>")
    numbers = (
        _format("{:.2f}", unit.movement, statistics.median),
        *(_format("{:.1f}", v, _percent) for v in (unit.outside, unit.empty)),
    )
    return "".join(parts) + "".join(f"<td>{number}</td>" for number in (*numbers, _format("{:.2f}", iou, statistics.median)))


def _saturating(unit: UnitShapes) -> float:
    steeper = [max(ends) for ends in zip(unit.left_end, unit.right_end, strict=True) if not math.isnan(sum(ends))]
    return statistics.fmean(map(CLASSES["flat_left"].has, steeper)) if steeper else math.nan


def _format(template: str, values: Iterable[float], how: Callable[[list[float]], float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return template.format(how(known)) if known else "-"


def _percent(shares: list[float]) -> float:
    return 100 * statistics.fmean(shares)
