"""Find the simplest function within a tolerance of a unit's function: a simple activation, or a unit with fewer intervals.

All computations run in float64 on the CPU. ``parameters`` are left, right, heights, left_slope and right_slope of a unit; x
and y have the shape (C, J). Both functions are linear between the points where either bends. So their difference is largest at
such a point.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pwlu import reference
from pwlu.units.constraints import Constraint, project, satisfies

SIMPLE = ("identity", "relu", "line", "prelu")
_ROUNDS = 30
_Parameters = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_Triple = tuple[Tensor, Tensor, Tensor]


class Fit(NamedTuple):
    """The result for one unit.

    Attributes:
        became: one of :data:`SIMPLE`, "fewer" (intervals) or "kept".
        parameters: the new parameters, rounded to the dtype that stores them. For a simple activation: bias, slope below 0 and
            slope above 0, (C,) each. For a unit with fewer intervals: left and right (C,), and heights (C, M+1).
        error: the largest error of each channel, (C,).
        range: the range max Y - min Y of each channel, (C,).
        reason: why the unit was kept.
    """

    became: str
    parameters: tuple[Tensor, ...]
    error: Tensor
    range: Tensor
    reason: str = ""


def fit(
    parameters: _Parameters, dtype: torch.dtype, tolerance: float, replace: bool, constraint: Constraint | None = None
) -> Fit:
    """Return the simplest fit with an error of at most tolerance (max Y - min Y) per channel, from B_L - W to B_R + W.

    Here W = B_R - B_L. Further out, the error grows by at most 2 tolerance (max Y - min Y) per distance W.

    Args:
        parameters: the parameters of the unit.
        dtype: the dtype that stores the parameters; the error includes the rounding to it.
        tolerance: the largest error, as a share of the range max Y - min Y.
        replace: whether to try simple activations.
        constraint: the constraint that the new function must satisfy. Default: None.
    """
    left, right, heights, left_slope, right_slope = parameters
    scale = heights.amax(1) - heights.amin(1)
    zeros = torch.zeros_like(scale)
    if not all(p.isfinite().all() for p in parameters):
        return Fit("kept", (), zeros, scale, "its parameters are not finite")
    allowed = tolerance * scale
    if replace and (right > left).all():  # with crossed bounds, the function is discontinuous at B_L
        x = _evaluation_points(parameters)
        x = torch.cat([x, zeros[:, None].clamp(x[:, :1], x[:, -1:])], 1)  # simple activations bend at 0
        y = _function(x, parameters)
        for became, lines in _simple_fits(x, y, parameters, allowed):
            stored = tuple(p.to(dtype).double() for p in lines)
            error = (_bent_line(x, *stored) - y).abs().amax(1)
            _, below, above = stored
            # The bend at 0 may lie far outside the bounds.
            bend = torch.maximum((below - left_slope).abs(), (above - right_slope).abs())
            good = (error <= allowed) & (bend * (right - left) <= 2 * allowed)
            if constraint is not None:
                good &= satisfies(_bent_line_rows(*stored).to(dtype), constraint)
            if good.all():
                return Fit(became, stored, error, scale)
    hardest = torch.arange(min(8, len(left)), device="cpu")
    for intervals in range(1, heights.shape[1] - 1):
        some = left[hardest], right[hardest], heights[hardest], left_slope[hardest], right_slope[hardest]
        _, error = _fit_intervals(intervals, some, allowed[hardest], dtype, constraint)
        if (error > allowed[hardest]).any():  # try the channels first that had the largest errors before: most fail again
            continue
        new, error = _fit_intervals(intervals, parameters, allowed, dtype, constraint)
        if (error <= allowed).all():
            return Fit("fewer", new, error, scale)
        hardest = (error / allowed).nan_to_num(0.0).topk(len(hardest)).indices
    why = "fewer intervals exceed the tolerance" if heights.shape[1] > 2 else "it has only one interval"
    return Fit("kept", (), zeros, scale, why)


def _function(x: Tensor, parameters: _Parameters) -> Tensor:
    return reference.forward(x, *parameters, channel_dim=0)


def _knots(left: Tensor, right: Tensor, intervals: int) -> Tensor:
    return left[:, None] + (right - left)[:, None] * torch.arange(intervals + 1, device="cpu") / intervals


def _evaluation_points(parameters: _Parameters) -> Tensor:
    """Return B_L - W, every knot, and B_R + W."""
    left, right, heights, *_ = parameters
    width = right - left
    return torch.cat([(left - width)[:, None], _knots(left, right, heights.shape[1] - 1), (right + width)[:, None]], 1)


def _bent_line(x: Tensor, bias: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """Return b + a_1 min(x, 0) + a_2 max(x, 0), the common form of the simple activations."""
    return bias[:, None] + below[:, None] * x.clamp(max=0) + above[:, None] * x.clamp(min=0)


def _simple_fits(x: Tensor, y: Tensor, parameters: _Parameters, allowed: Tensor) -> Iterator[tuple[str, _Triple]]:
    left, _, heights, left_slope, _ = parameters
    zero, one = torch.zeros_like(left), torch.ones_like(left)
    yield "identity", (zero, one, one)
    yield "relu", (zero, zero, one)
    start = torch.stack([left_slope, heights[:, 0] - left_slope * left], 1)
    slope, bias = minimax_fit(torch.stack([x, torch.ones_like(x)], 2), y, start, allowed).unbind(1)
    yield "line", (bias, slope, slope)
    below = minimax_fit(x.clamp(max=0)[:, :, None], y - x.clamp(min=0), left_slope[:, None], allowed)
    yield "prelu", (zero, below[:, 0], one)


def _fit_intervals(
    intervals: int, parameters: _Parameters, allowed: Tensor, dtype: torch.dtype, constraint: Constraint | None
) -> tuple[_Triple, Tensor]:
    """Return bounds and heights of a unit with this many intervals, and the error per channel.

    The outer slopes do not change, so the error beyond the bounds is the error at the bounds. For channels whose error is too
    large, narrower bounds are tried. If the best heights violate the constraint, the heights of the old function at the knots
    replace them, because interpolation satisfies every constraint.
    """
    left, right, heights, left_slope, right_slope = parameters
    closed = right <= left  # no point lies between the bounds: only the first and last height matter
    new = left, right, torch.cat([heights[:, :1].expand(-1, intervals), heights[:, -1:]], 1)
    error = torch.where(closed, torch.zeros_like(left), torch.full_like(left, torch.inf))
    for bounds in ((left, right), _trim_bounds(parameters, allowed)):
        todo = (error > allowed).nonzero()[:, 0]
        if not len(todo):
            break
        k_l, k_r = left_slope[todo], right_slope[todo]
        here = left[todo], right[todo], heights[todo], k_l, k_r
        low, high = (bound[todo].to(dtype).double() for bound in bounds)
        if constraint is not None and constraint.odd:
            high = torch.maximum(low.abs(), high.abs())
            low = -high
        knots = _knots(low, high, intervals)
        x = torch.cat([_evaluation_points(here), knots], 1)
        y = _function(x, here)
        flat = low, high, torch.zeros_like(knots), k_l, k_r
        basis = reference.partials(x, *flat, channel_dim=0)["heights"]
        fitted = minimax_fit(basis, y - _function(x, flat), _function(knots, here), allowed[todo]).to(dtype).double()
        outer_changed = torch.zeros_like(low, dtype=torch.bool)
        if constraint is not None:
            between = _function(knots, here)
            low, high, fitted, outer_changed = _constrained(low, high, fitted, between, k_l, k_r, dtype, constraint)
        made = (_function(x, (low, high, fitted, k_l, k_r)) - y).abs().amax(1)
        made[(high <= low) | outer_changed] = torch.inf  # the knots coincide after rounding, or an outer line has changed
        new = new[0].index_copy(0, todo, low), new[1].index_copy(0, todo, high), new[2].index_copy(0, todo, fitted)
        error = error.index_copy(0, todo, made)
    return new, error


def _constrained(
    low: Tensor,
    high: Tensor,
    fitted: Tensor,
    interpolated: Tensor,
    k_l: Tensor,
    k_r: Tensor,
    dtype: torch.dtype,
    constraint: Constraint,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return bounds and heights that satisfy a constraint, and whether an outer slope would have to change."""

    def rows(heights: Tensor) -> Tensor:
        return torch.cat([torch.stack([low, high, k_l, k_r], 1), heights], 1).to(dtype)

    best = rows(fitted)
    kept = project(rows(interpolated), constraint)  # the projection only corrects rounding
    new = torch.where(satisfies(best, constraint)[:, None], best, kept).double()
    return new[:, 0], new[:, 1], new[:, 4:], (new[:, 2] != k_l) | (new[:, 3] != k_r) | ~satisfies(new.to(dtype), constraint)


def _bent_line_rows(bias: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """Return a simple activation as rows for :func:`pwlu.units.constraints.satisfies`: two intervals between -1 and 1."""
    one = torch.ones_like(bias)
    return torch.stack([-one, one, below, above, bias - below, bias, bias + above], 1)


def _trim_bounds(parameters: _Parameters, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Move bounds inwards, to the points where the function deviates from its outer lines by more than `allowed`."""
    left, right, heights, left_slope, right_slope = parameters
    intervals = heights.shape[1] - 1
    knots = _knots(left, right, intervals)

    def straight(above: Tensor) -> Tensor:  # number of intervals over which `above` is nearly constant
        return (above.cummax(1).values - above.cummin(1).values <= allowed[:, None]).sum(1) - 1

    first = straight(heights - left_slope[:, None] * knots)
    last = intervals - straight((heights - right_slope[:, None] * knots).flip(1))
    # If the function bends at one knot or at none, keep the interval after that knot.
    first = torch.where(first < last, first, last.clamp(max=intervals - 1))
    last = torch.maximum(last, first + 1)
    return knots.gather(1, first[:, None])[:, 0], knots.gather(1, last[:, None])[:, 0]


def minimax_fit(basis: Tensor, target: Tensor, start: Tensor, allowed: Tensor) -> Tensor:
    """Return coefficients c (C, P) with a small max_j |basis c - target|; basis (C, J, P), target (C, J), allowed (C,).

    This is Lawson's algorithm: repeated least squares with weights that grow where the error is large. The largest error of
    any c is at least the weighted root mean square of these errors. So the algorithm also notices that `allowed` cannot be
    reached, and stops. It returns `start` if that is about as good.
    """
    target = target[:, :, None]
    best, error = start, (basis @ start[:, :, None] - target).abs().amax((1, 2))
    weights = torch.full_like(target, 1 / target.shape[1])
    ridge = 1e-13 * torch.eye(basis.shape[2], dtype=torch.float64, device="cpu")  # in case a column is 0
    tiny = 1e-12 * target.abs().amax((1, 2)) + 1e-300  # smaller differences are rounding
    for _ in range(_ROUNDS):
        weighted = (basis * weights).mT
        normal = weighted @ basis
        trace = normal.diagonal(dim1=1, dim2=2).sum(1)
        c = torch.linalg.solve(normal + ridge * (trace + 1e-300)[:, None, None], weighted @ target)
        errors = (basis @ c - target).abs()
        largest, least = errors.amax((1, 2)), (weights * errors * errors).sum((1, 2)).sqrt()
        better = largest < 0.99 * error
        best, error = torch.where(better[:, None], c[:, :, 0], best), torch.where(better, largest, error)
        if ((least > allowed + tiny) | (error <= 1.02 * least + tiny)).all():
            break
        weights = weights * (errors + 1e-3 * largest[:, None, None] + 1e-300)
        weights = (weights / weights.sum(1, keepdim=True)).clamp(min=1e-9)
        weights = weights / weights.sum(1, keepdim=True)
    return best
