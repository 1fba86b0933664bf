"""Find the simplest function within a tolerance of a unit's function: a simple activation, or a unit with fewer intervals.

All computations run in float64 on the CPU; x and y have the shape (C, J). Both functions are linear between the points where
either bends. So their difference is largest at such a point.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pwlu import reference
from pwlu.units.constraints import Constraint, project, satisfies

SIMPLE = ("identity", "relu", "line", "prelu")
_ROUNDS = 30
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
    old: reference.Blocks, dtype: torch.dtype, tolerance: float, replace: bool, constraint: Constraint | None = None
) -> Fit:
    """Return the simplest fit with an error of at most tolerance (max Y - min Y) per channel, from B_L - W to B_R + W.

    Here W = B_R - B_L. Further out, the error grows by at most 2 tolerance (max Y - min Y) per distance W.

    Args:
        old: the parameters of the unit.
        dtype: the dtype that stores the parameters; the error includes the rounding to it.
        tolerance: the largest error, as a share of the range max Y - min Y.
        replace: whether to try simple activations.
        constraint: the constraint that the new function must satisfy. Default: None.
    """
    scale = old.heights.amax(1) - old.heights.amin(1)
    zeros = torch.zeros_like(scale)
    if not all(p.isfinite().all() for p in old):
        return Fit("kept", (), zeros, scale, "its parameters are not finite")
    allowed = tolerance * scale
    if replace and (old.right > old.left).all():  # with crossed bounds, the function is discontinuous at B_L
        x = _evaluation_points(old)
        x = torch.cat([x, zeros[:, None].clamp(x[:, :1], x[:, -1:])], 1)  # simple activations bend at 0
        y = _function(x, old)
        for became, lines in _simple_fits(x, y, old, allowed):
            stored = tuple(p.to(dtype).double() for p in lines)
            error = (_bent_line(x, *stored) - y).abs().amax(1)
            _, below, above = stored
            # The bend at 0 may lie far outside the bounds.
            bend = torch.maximum((below - old.left_slope).abs(), (above - old.right_slope).abs())
            good = (error <= allowed) & (bend * (old.right - old.left) <= 2 * allowed)
            if constraint is not None:
                good &= satisfies(_bent_line_rows(*stored).to(dtype), constraint)
            if good.all():
                return Fit(became, stored, error, scale)
    hardest = torch.arange(min(8, len(scale)), device="cpu")
    for intervals in range(1, old.heights.shape[1] - 1):
        some = reference.Blocks(*(p[hardest] for p in old))
        _, error = _fit_intervals(intervals, some, allowed[hardest], dtype, constraint)
        if (error > allowed[hardest]).any():  # try the channels first that had the largest errors before: most fail again
            continue
        new, error = _fit_intervals(intervals, old, allowed, dtype, constraint)
        if (error <= allowed).all():
            return Fit("fewer", new, error, scale)
        hardest = (error / allowed).nan_to_num(0.0).topk(len(hardest)).indices
    why = "fewer intervals exceed the tolerance" if old.heights.shape[1] > 2 else "it has only one interval"
    return Fit("kept", (), zeros, scale, why)


def _function(x: Tensor, unit: reference.Blocks) -> Tensor:
    return reference.forward(x, *unit, channel_dim=0)


def _knots(left: Tensor, right: Tensor, intervals: int) -> Tensor:
    return left[:, None] + (right - left)[:, None] * torch.arange(intervals + 1, device="cpu") / intervals


def _evaluation_points(unit: reference.Blocks) -> Tensor:
    """Return B_L - W, every knot, and B_R + W."""
    width = (unit.right - unit.left)[:, None]
    knots = _knots(unit.left, unit.right, unit.heights.shape[1] - 1)
    return torch.cat([unit.left[:, None] - width, knots, unit.right[:, None] + width], 1)


def _bent_line(x: Tensor, bias: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """Return b + a_1 min(x, 0) + a_2 max(x, 0), the common form of the simple activations."""
    return bias[:, None] + below[:, None] * x.clamp(max=0) + above[:, None] * x.clamp(min=0)


def _simple_fits(x: Tensor, y: Tensor, old: reference.Blocks, allowed: Tensor) -> Iterator[tuple[str, _Triple]]:
    zero, one = torch.zeros_like(old.left), torch.ones_like(old.left)
    yield "identity", (zero, one, one)
    yield "relu", (zero, zero, one)
    start = torch.stack([old.left_slope, old.heights[:, 0] - old.left_slope * old.left], 1)
    slope, bias = minimax_fit(torch.stack([x, torch.ones_like(x)], 2), y, start, allowed).unbind(1)
    yield "line", (bias, slope, slope)
    below = minimax_fit(x.clamp(max=0)[:, :, None], y - x.clamp(min=0), old.left_slope[:, None], allowed)
    yield "prelu", (zero, below[:, 0], one)


def _fit_intervals(
    intervals: int, old: reference.Blocks, allowed: Tensor, dtype: torch.dtype, constraint: Constraint | None
) -> tuple[_Triple, Tensor]:
    """Return bounds and heights of a unit with this many intervals, and the error per channel.

    The outer slopes do not change, so the error beyond the bounds is the error at the bounds. For channels whose error is too
    large, narrower bounds are tried. If the best heights violate the constraint, the heights of the old function at the knots
    replace them, because interpolation satisfies every constraint.
    """
    # If no point lies between the bounds, only the first and last height matter.
    new = old.left, old.right, torch.cat([old.heights[:, :1].expand(-1, intervals), old.heights[:, -1:]], 1)
    error = torch.where(old.right <= old.left, 0.0, torch.full_like(old.left, torch.inf))
    for bounds in ((old.left, old.right), _trim_bounds(old, allowed)):
        todo = (error > allowed).nonzero()[:, 0]
        if not len(todo):
            break
        here = reference.Blocks(*(p[todo] for p in old))
        low, high = (bound[todo].to(dtype).double() for bound in bounds)
        if constraint is not None and constraint.odd:
            high = torch.maximum(low.abs(), high.abs())
            low = -high
        knots = _knots(low, high, intervals)
        x = torch.cat([_evaluation_points(here), knots], 1)
        y = _function(x, here)
        flat = here._replace(left=low, right=high, heights=torch.zeros_like(knots))
        basis = reference.partials(x, *flat, channel_dim=0)["heights"]
        fitted = minimax_fit(basis, y - _function(x, flat), _function(knots, here), allowed[todo]).to(dtype).double()
        outer_changed = torch.zeros_like(low, dtype=torch.bool)
        if constraint is not None:
            between = _function(knots, here)
            low, high, fitted, outer_changed = _constrained(flat._replace(heights=fitted), between, dtype, constraint)
        made = (_function(x, here._replace(left=low, right=high, heights=fitted)) - y).abs().amax(1)
        made[(high <= low) | outer_changed] = torch.inf  # the knots coincide after rounding, or an outer line has changed
        new = new[0].index_copy(0, todo, low), new[1].index_copy(0, todo, high), new[2].index_copy(0, todo, fitted)
        error = error.index_copy(0, todo, made)
    return new, error


def _constrained(
    best_fit: reference.Blocks, interpolated: Tensor, dtype: torch.dtype, constraint: Constraint
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return bounds and heights that satisfy a constraint, and whether an outer slope would have to change."""
    low, high, fitted, k_l, k_r = best_fit

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


def _trim_bounds(old: reference.Blocks, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Move bounds inwards, to the points where the function deviates from its outer lines by more than `allowed`."""
    heights, intervals = old.heights, old.heights.shape[1] - 1
    knots = _knots(old.left, old.right, intervals)

    def straight(above: Tensor) -> Tensor:  # number of intervals over which `above` is nearly constant
        return (above.cummax(1).values - above.cummin(1).values <= allowed[:, None]).sum(1) - 1

    first = straight(heights - old.left_slope[:, None] * knots)
    last = intervals - straight((heights - old.right_slope[:, None] * knots).flip(1))
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
