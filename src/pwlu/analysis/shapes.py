"""Classify the learned function of each channel by its shape."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pwlu import reference
from pwlu.analysis.alignment import Alignment, UnitAlignment, to_json
from pwlu.analysis.curves import Curves, curves_of, inputs_of
from pwlu.common.reports import RowReport
from pwlu.common.text import columns
from pwlu.initial_functions import initial_parameters
from pwlu.units.constraints import satisfies
from pwlu.units.sharding import full_values

STEPS = 256


class ShapeClass(NamedTuple):
    """A class of shapes: its label, the deciding attribute of :class:`UnitShapes`, and the condition on its value."""

    words: str
    column: str
    has: Callable[[float], bool]


CLASSES = {  # UnitShapes documents the thresholds
    "linear": ShapeClass("linear", "bend", lambda number: number <= 0.05),
    "relu_like": ShapeClass("ReLU-like", "relu_distance", lambda number: number <= 0.1),
    "v_shaped": ShapeClass("V-shaped", "v", lambda number: number >= 0.2),
    "non_monotone": ShapeClass("not monotone", "back", lambda number: number >= 0.1),
    "flat_left": ShapeClass("flat left", "left_end", lambda number: number <= 0.1),
    "flat_right": ShapeClass("flat right", "right_end", lambda number: number <= 0.1),
    "moved": ShapeClass("moved", "movement", lambda number: number >= 0.1),
    "collapsed": ShapeClass("collapsed", "width", lambda number: number < 0.05),
}


@dataclass
class UnitShapes:
    """The shapes of one PWLU. Every list has one entry per function; NaN marks unknown values.

    A function f is examined from ``low`` to ``high``. With an alignment, these are p5 and p95 of its inputs (for a layer-wise
    unit the smallest p5 and the largest p95 of all channels). Otherwise they are its bounds. f is evaluated at 257 evenly
    spaced points. Its range is R = max f - min f, and its variation is V = sum |f_{j+1} - f_j|.

    These numbers decide the classes (in italics):

    - ``bend``: max |f - line|/R with the least-squares line. *linear*: at most 0.05.
    - ``relu_distance``: max |f - g|/R with the least-squares g(x) = b + a max(0, x - k), a > 0. k is the best of 17 points in
      the middle half of [low, high]. It is infinite if no a is positive. *relu_like*: at most 0.1.
    - ``v``: how far f falls and then rises again, (min(f(low), f(high)) - min f - w)/R. Here w is the sum of all rises of f
      before its minimum and of all falls after it. ``v`` is 1 for |x| around 0. It is at most 0 for a function that is monotone
      or oscillates. *v_shaped*: at least 0.2.
    - ``back``: the smaller of the sum of all rises and the sum of all falls, divided by R; 0 if f is monotone.
      *non_monotone*: at least 0.1.
    - ``left_end``, ``right_end``: the mean |f'| over the first and the last eighth, relative to the mean over everything,
      8 V_end/V. *flat_left*, *flat_right*: at most 0.1. A function that saturates on both sides is in both classes.
    - ``movement``: the distance from the initial function s, max_k |Y_k - s(B_k)|, divided by the larger range of Y and s(B).
      *moved*: at least 0.1.
    - ``width``: (B_R - B_L)/(p95 - p5). Without inputs, B_R - B_L relative to the median of the unit. It is negative if the
      bounds have crossed. *collapsed*: below 0.05.
    - ``outside``: fraction of the inputs outside the bounds.
    - ``empty``: fraction of the intervals without inputs, according to the histograms of the alignment.

    ``constraint`` names the constraints of the unit (:func:`pwlu.constrain_`), and states how many functions violate them.
    """

    name: str
    low: list[float]
    high: list[float]
    bend: list[float]
    relu_distance: list[float]
    v: list[float]
    back: list[float]
    left_end: list[float]
    right_end: list[float]
    movement: list[float]
    width: list[float]
    outside: list[float]
    empty: list[float]
    constraint: str = field(default="", kw_only=True)

    @property
    def channels(self) -> int:
        """Return the number of functions."""
        return len(self.low)

    def members(self, shape: str) -> list[bool]:
        """Return, per channel, whether it belongs to a class of ``CLASSES``; False if that is unknown."""
        numbers, has = self._values_and_condition(shape)
        return [has(number) for number in numbers]

    def share(self, shape: str) -> float:
        """Return the fraction of the channels in a class, among those where it is known; NaN if there are none."""
        numbers, has = self._values_and_condition(shape)
        known = [has(number) for number in numbers if not math.isnan(number)]
        return sum(known) / len(known) if known else math.nan

    def _values_and_condition(self, shape: str) -> tuple[list[float], Callable[[float], bool]]:
        if shape not in CLASSES:
            raise ValueError(f"{shape!r} is not a class of shapes. Choose from {', '.join(CLASSES)}")
        return getattr(self, CLASSES[shape].column), CLASSES[shape].has


_COLUMNS = tuple(f.name for f in fields(UnitShapes) if f.name not in ("name", "constraint"))


@dataclass
class Shapes(RowReport[UnitShapes], rows="units"):
    """The shapes of every PWLU, in model order. Prints as a table: per unit, the fraction of channels in each class.

    Attributes:
        units: one :class:`~pwlu.analysis.shapes.UnitShapes` per PWLU.
    """

    units: list[UnitShapes] = field(default_factory=list)

    def share(self, shape: str) -> float:
        """Return the fraction of all channels in a class of ``CLASSES``, among those where it is known; NaN if none is."""
        return self.together().share(shape)

    def together(self) -> UnitShapes:
        """Return the channels of all units as one unit."""
        return UnitShapes("all", *([number for unit in self.units for number in getattr(unit, c)] for c in _COLUMNS))

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return one row per channel, with numbers and classes, for a data frame."""
        rows = []
        for unit in self.units:
            classes = {shape: unit.members(shape) for shape in CLASSES}
            for channel in range(unit.channels):
                numbers = {column: getattr(unit, column)[channel] for column in _COLUMNS}
                rows.append({"unit": unit.name, "channel": channel, **numbers} | {s: classes[s][channel] for s in CLASSES})
                rows[-1]["constraint"] = unit.constraint
        return rows

    def to_json(self) -> str:
        """Return the units with numbers and classes as JSON, with 6 digits per number and null for non-finite ones."""
        return to_json([asdict(unit) | {shape: unit.members(shape) for shape in CLASSES} for unit in self.units])

    def __str__(self) -> str:
        head = ("unit", "channels", *(shape.words for shape in CLASSES.values()), "inputs outside", "empty intervals")
        rows = [(u.name or "the model", str(u.channels), *_shares(u)) for u in (*self.units, self.together())]
        lines = columns(head, rows, numbers=True)
        lines.insert(-1, lines[1])
        return "\n".join([*lines, *(f"{u.name or 'the model'}: {u.constraint}" for u in self.units if u.constraint)])


def describe(model: nn.Module | Mapping[str, Mapping[str, Any]], alignment: Alignment | None = None) -> Shapes:
    """Classify every function of every PWLU by its shape: linear, ReLU-like, V-shaped, flat at its ends, and more.

    :class:`~pwlu.analysis.shapes.UnitShapes` has the formulas and the thresholds. According to the paper, V shapes are
    frequent, and the functions of the first layer are close to linear. ``print(pwlu.describe(model))`` shows the shares of all
    shapes in your model.

    Args:
        model: a model with PWLUs, or their parameters by name, as for :func:`pwlu.plot_functions`.
        alignment: result of :func:`pwlu.alignment`. With it, functions are examined over the range of their inputs. Without it,
            they are examined between their bounds, including parts without inputs, which did not learn.

    Returns:
        The numbers and classes of every unit.

    Raises:
        ValueError: if the model has no PWLU, or the alignment does not fit the model.
        TypeError: if an argument has the wrong type.

    Example:
        >>> shapes = pwlu.describe(torch.nn.Sequential(torch.nn.Linear(4, 8), pwlu.PWLU(8)))
        >>> shapes.share("relu_like")
        1.0
    """
    units = curves_of(model, "describe")
    inputs = inputs_of(units, alignment, "describe")
    shapes = Shapes([_describe_unit(name, curves, inputs.get(name)) for name, curves in units.items()])
    if isinstance(model, nn.Module):
        for each in shapes:
            each.constraint = _constraint(model.get_submodule(each.name))
    return shapes


def _constraint(unit: Any) -> str:
    if unit.constraint is None:
        return ""
    weight = full_values(unit.weight)
    rows = weight[reference.parameter_indices((weight.shape[0],), unit.intervals, weight.device)]
    violating = int((~satisfies(rows, unit.constraint)).sum())
    return f"{unit.constraint}" + (f" (violated by {violating} of {len(rows)} functions)" if violating else "")


def _describe_unit(name: str, curves: Curves, seen: UnitAlignment | None) -> UnitShapes:
    p5, p95, outside, empty = _inputs(curves, seen)
    has_spread = p95 > p5  # if not, there are no inputs, or all are equal
    low, high = torch.where(has_spread, p5, curves.left), torch.where(has_spread, p95, curves.right)
    between = curves.right - curves.left
    input_width = torch.where(has_spread, p95 - p5, between.abs().nanmedian())
    width = torch.where(between == 0, between, between / input_width)
    shares = torch.linspace(0, 1, STEPS + 1, dtype=torch.float64, device="cpu")
    x = low[:, None] + (high - low)[:, None] * shares
    y = reference.forward(x, *curves[:5], channel_dim=0)
    numbers = [torch.where(high > low, number, torch.nan) for number in _numbers(shares, y)]
    columns = (low, high, *numbers, _movement(curves), width, outside, empty)
    return UnitShapes(name, *(column.tolist() for column in columns))


def _numbers(x: Tensor, y: Tensor) -> Iterator[Tensor]:
    """Yield bend, relu_distance, v, back, left_end and right_end (C,) of functions with the values y (C, J) at x (J,)."""
    scale = y.amax(1) - y.amin(1)
    step = y.diff(dim=1)
    rises, falls = step.clamp(min=0), -step.clamp(max=0)

    def share(number: Tensor) -> Tensor:  # relative to the range; 0 for a constant function
        return torch.where(scale == 0, 0.0, number / scale)

    def distance(g: Tensor) -> tuple[Tensor, Tensor]:  # the distance to the least-squares b + a g, and a
        g = g - g.mean()
        a = (y @ g) / (g @ g)
        return share((y - y.mean(1, keepdim=True) - a[:, None] * g).abs().amax(1)), a

    yield distance(x)[0]
    kinks = x[STEPS // 4 : 3 * STEPS // 4 + 1 : STEPS // 32]
    hinges = [distance((x - k).clamp(min=0)) for k in kinks]
    yield torch.stack([torch.where(a <= 0, torch.inf, d) for d, a in hinges]).amin(0)
    lowest = y.argmin(1, keepdim=True)
    before = torch.arange(STEPS, device="cpu") < lowest
    wrong = torch.where(before, rises, falls).sum(1)
    yield share(torch.minimum(y[:, 0], y[:, -1]) - y.amin(1) - wrong)
    yield share(torch.minimum(rises.sum(1), falls.sum(1)))
    variation, end = step.abs().sum(1), STEPS // 8
    for part in (step[:, :end], step[:, -end:]):
        yield torch.where(variation == 0, 0.0, 8 * part.abs().sum(1) / variation)


def _movement(curves: Curves) -> Tensor:
    if curves.start is None:
        return torch.full_like(curves.left, torch.nan)
    with torch.no_grad():
        start = initial_parameters(curves.start, curves.left, curves.right, curves.heights.shape[1] - 1)[0]
    scale = torch.stack([h.amax(1) - h.amin(1) for h in (curves.heights, start)]).amax(0)
    distance = (curves.heights - start).abs().amax(1)
    return torch.where(distance == 0, 0.0, distance / scale)


def _inputs(curves: Curves, seen: UnitAlignment | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return p5 and p95 of the inputs, the share outside the bounds, and the share of empty intervals, (C,); NaN if unknown."""
    unknown = torch.full_like(curves.left, torch.nan)
    if seen is None:
        return unknown, unknown, unknown, unknown
    p5, p95, outside, count = (
        torch.tensor(values, dtype=torch.float64, device="cpu") for values in (seen.p5, seen.p95, seen.outside, seen.count)
    )
    empty = unknown
    if seen.histogram:
        known = (count > 0) & (curves.right - curves.left).isfinite()
        empty = torch.where(known, 1 - _intervals_with_inputs(curves, seen).double().mean(1), torch.nan)
    return p5, p95, outside, empty


def _intervals_with_inputs(curves: Curves, seen: UnitAlignment) -> Tensor:
    """Return whether inputs fall in each interval (C, N): whether a non-empty bar of the histogram overlaps it."""
    low, high, bars = (torch.tensor(v, dtype=torch.float64, device="cpu") for v in (seen.low, seen.high, seen.histogram))
    number = bars.shape[1]
    edges = low[:, None] + (high - low)[:, None] * torch.arange(number + 1, device="cpu") / number
    places = torch.linspace(0, 1, curves.heights.shape[1], dtype=torch.float64, device="cpu")
    knots = curves.left[:, None] + (curves.right - curves.left)[:, None] * places
    begin, end = knots[:, :-1, None], knots[:, 1:, None]
    overlap = (edges[:, None, :-1] < end) & (edges[:, None, 1:] > begin)
    return (overlap & (bars > 0)[:, None]).any(2)


def _shares(unit: UnitShapes) -> Iterator[str]:
    for shape in CLASSES:
        yield "-" if math.isnan(share := unit.share(shape)) else f"{100 * share:.0f} %"
    for numbers in (unit.outside, unit.empty):
        known = [number for number in numbers if not math.isnan(number)]
        yield f"{100 * statistics.mean(known):.1f} %" if known else "-"
