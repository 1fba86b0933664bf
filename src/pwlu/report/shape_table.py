"""What shapes the functions have, layer by layer: a table that is darker where more of them have a shape."""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import fields
from html import escape

from pwlu.analysis import Alignment
from pwlu.shapes import Shapes, UnitShapes

_SHAPES: dict[str, tuple[str, Callable[[UnitShapes], list[bool]]]] = {  # a column: its explanation, and who belongs to it
    "linear": ("at most 5 % off a straight line", lambda unit: unit.members("linear")),
    "ReLU-like": ("at most 10 % off a line with one bend upwards", lambda unit: unit.members("relu_like")),
    "V-shaped": ("falls, then rises, by at least 20 % of its range", lambda unit: unit.members("v_shaped")),
    "not monotone": ("goes back by at least 10 % of its range", lambda unit: unit.members("non_monotone")),
    "flat left": ("hardly changes over the first eighth", lambda unit: unit.members("flat_left")),
    "flat right": ("hardly changes over the last eighth", lambda unit: unit.members("flat_right")),
    "saturating": ("flat on both sides", lambda unit: _both(unit.members("flat_left"), unit.members("flat_right"))),
    "moved": ("at least 10 % away from its start", lambda unit: unit.members("moved")),
    "collapsed": ("bounds closer than 5 % of the inputs' range, or crossed", lambda unit: unit.members("collapsed")),
}
_NUMBERS = {
    "median movement": "how far the heights are from the start, relative to the range of the function",
    "outside, %": "inputs outside of the bounds, the mean over functions",
    "empty, %": "intervals in which no input falls",
    "median IOU": "of the bounds and the middle 90 % of inputs",
}


def shape_table(shapes: Shapes, alignment: Alignment | None) -> str:
    """A sentence that sums up, and the table: a row a layer, a column a shape."""
    iou = {unit.name: unit.iou for unit in alignment or ()}
    explained = {name: why for name, (why, _) in _SHAPES.items()} | _NUMBERS
    head = "".join(f'<th scope="col" title="{escape(why)}"><span>{name}</span></th>' for name, why in explained.items())
    body = []
    for place, unit in enumerate(shapes):  # the number is that of the layer in the chart of the alignment
        link = f'<a href="#functions" data-layer="{place}">{escape(unit.name or "the model")}</a>'
        body.append(f'<tr><th scope="row"><i>{place + 1}</i> {link}</th>{_cells(unit, iou.get(unit.name, []))}</tr>')
    columns = ([number for unit in shapes for number in getattr(unit, f.name)] for f in fields(UnitShapes) if f.name != "name")
    every = _cells(UnitShapes("", *columns), alignment.iou if alignment else [])
    return (
        f"<p>{_glance(shapes)}</p>"
        '<p class="caption" id="shares">Percentage of the functions of each layer that have a shape where their inputs are.</p>'
        '<div class="scroll" tabindex="0" role="region" aria-labelledby="shares"><table class="heat">'
        f'<thead><tr><th scope="col">layer</th><th scope="col"><span>functions</span></th>{head}</tr></thead>'
        f'<tbody>{"".join(body)}</tbody><tfoot><tr><th scope="row">all</th>{every}</tr></tfoot></table></div>'
    )


def _glance(shapes: Shapes) -> str:
    """What the paper says of learned functions, as it is here: V shapes appear often, first layers are nearly linear."""
    early = max(1, len(shapes) // 4)
    first, others = Shapes(shapes.units[:early]), Shapes(shapes.units[early:])
    layers = "the first layer" if early == 1 else f"the first {early} layers"
    rest = f", in the others {100 * others.share('linear'):.0f} %" if len(others) else ""
    return (
        f"<strong>{100 * shapes.share('v_shaped'):.0f} %</strong> of all functions are V-shaped. In {layers} "
        f"<strong>{100 * first.share('linear'):.0f} %</strong> are nearly linear{rest}."
    )


def _cells(unit: UnitShapes, iou: list[float]) -> str:
    parts = [f"<td>{unit.channels:,}</td>"]
    for _, belongs in _SHAPES.values():
        share = statistics.mean(belongs(unit))
        parts.append(f'<td class="share" style="--share:{share:.3f}">{100 * share:.0f}</td>')
    numbers = (
        _said("{:.2f}", unit.movement, statistics.median),
        *(_said("{:.1f}", v, _percent) for v in (unit.outside, unit.empty)),
    )
    return "".join(parts) + "".join(f"<td>{number}</td>" for number in (*numbers, _said("{:.2f}", iou, statistics.median)))


def _said(words: str, values: Iterable[float], how: Callable[[list[float]], float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return words.format(how(known)) if known else "-"


def _percent(shares: list[float]) -> float:
    return 100 * statistics.fmean(shares)


def _both(first: list[bool], second: list[bool]) -> list[bool]:
    return [a and b for a, b in zip(first, second, strict=True)]
