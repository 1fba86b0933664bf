"""The plainest function within a tolerance of a unit's: a plain activation, or a unit with fewer intervals.

Everything is in float64 on the CPU. Parameters are those of a unit, in the usual order; x and y have the shape (C, J). Both
functions are straight between the places where one of them bends, so their difference is largest at one of these places.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pwlu import reference

PLAIN = ("identity", "relu", "line", "prelu")
_ROUNDS = 30
_Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_Three = tuple[Tensor, Tensor, Tensor]


class Fit(NamedTuple):
    """What a unit can become: of :data:`PLAIN`, "fewer" or "kept"; the error of each channel, and the channel's range.

    ``parameters``, as they will be stored: of a plain activation bias, slope below 0 and slope above 0, (C,) each; of a unit
    with fewer intervals left, right (C,) and heights (C, M+1).
    """

    became: str
    parameters: tuple[Tensor, ...]
    error: Tensor
    range: Tensor
    reason: str = ""


def fit(parameters: _Five, dtype: torch.dtype, tolerance: float, replace: bool) -> Fit:
    """The plainest there is with an error of at most tolerance (max Y - min Y) in every channel, from B_L - W to B_R + W,
    that beyond grows by no more than twice that for every W.

    Args:
        dtype: the type in which parameters are stored; the error is that of what is stored.
        replace: whether plain activations are tried.
    """
    left, right, heights, left_slope, right_slope = parameters
    scale = heights.amax(1) - heights.amin(1)
    nothing = torch.zeros_like(scale)
    if not all(p.isfinite().all() for p in parameters):
        return Fit("kept", (), nothing, scale, "its parameters are not finite")
    allowed = tolerance * scale
    if replace and (right > left).all():  # else it jumps at B_L
        x = _places(parameters)
        x = torch.cat([x, nothing[:, None].clamp(x[:, :1], x[:, -1:])], 1)  # plain activations bend at 0
        y = _function(x, parameters)
        for became, lines in _plain(x, y, parameters, allowed):
            stored = tuple(p.to(dtype).double() for p in lines)
            error = (_broken_line(x, *stored) - y).abs().amax(1)
            _, below, above = stored
            bend = torch.maximum((below - left_slope).abs(), (above - right_slope).abs())  # 0 may lie far outside
            if ((error <= allowed) & (bend * (right - left) <= 2 * allowed)).all():
                return Fit(became, stored, error, scale)
    hard = torch.arange(min(8, len(left)), device="cpu")
    for intervals in range(1, heights.shape[1] - 1):
        k_l, k_r = left_slope[hard], right_slope[hard]
        _, error = _with(intervals, (left[hard], right[hard], heights[hard], k_l, k_r), allowed[hard], dtype)
        if (error > allowed[hard]).any():  # channels that needed more before mostly do so again: no need to try the others
            continue
        new, error = _with(intervals, parameters, allowed, dtype)
        if (error <= allowed).all():
            return Fit("fewer", new, error, scale)
        hard = (error / allowed).nan_to_num(0.0).topk(len(hard)).indices
    return Fit("kept", (), nothing, scale, "no fewer will do" if heights.shape[1] > 2 else "it has but one")


def _function(x: Tensor, parameters: _Five) -> Tensor:
    return reference.forward(x, *parameters, channel_dim=0)


def _knots(left: Tensor, right: Tensor, intervals: int) -> Tensor:
    return left[:, None] + (right - left)[:, None] * torch.arange(intervals + 1, device="cpu") / intervals


def _places(parameters: _Five) -> Tensor:
    """From B_L - W to B_R + W, with every knot between."""
    left, right, heights, *_ = parameters
    width = right - left
    return torch.cat([(left - width)[:, None], _knots(left, right, heights.shape[1] - 1), (right + width)[:, None]], 1)


def _broken_line(x: Tensor, bias: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """b + a_1 min(x, 0) + a_2 max(x, 0): every plain activation is one of these."""
    return bias[:, None] + below[:, None] * x.clamp(max=0) + above[:, None] * x.clamp(min=0)


def _plain(x: Tensor, y: Tensor, parameters: _Five, allowed: Tensor) -> Iterator[tuple[str, _Three]]:
    left, _, heights, left_slope, _ = parameters
    zero, one = torch.zeros_like(left), torch.ones_like(left)
    yield "identity", (zero, one, one)
    yield "relu", (zero, zero, one)
    start = torch.stack([left_slope, heights[:, 0] - left_slope * left], 1)
    slope, bias = least_maximum(torch.stack([x, torch.ones_like(x)], 2), y, start, allowed).unbind(1)
    yield "line", (bias, slope, slope)
    below = least_maximum(x.clamp(max=0)[:, :, None], y - x.clamp(min=0), left_slope[:, None], allowed)
    yield "prelu", (zero, below[:, 0], one)


def _with(intervals: int, parameters: _Five, allowed: Tensor, dtype: torch.dtype) -> tuple[_Three, Tensor]:
    """Bounds and heights of a unit with so many intervals, and the error of each channel.

    The outer slopes stay as they are, so that the error goes on for ever as it is at the bounds. Channels that cannot do it
    with their bounds try narrower ones.
    """
    left, right, heights, left_slope, right_slope = parameters
    closed = right <= left  # nothing lies between the bounds, and of the heights only the outermost count
    new = left, right, torch.cat([heights[:, :1].expand(-1, intervals), heights[:, -1:]], 1)
    error = torch.where(closed, torch.zeros_like(left), torch.full_like(left, torch.inf))
    for bounds in ((left, right), _trimmed(parameters, allowed)):
        todo = (error > allowed).nonzero()[:, 0]
        if not len(todo):
            break
        k_l, k_r = left_slope[todo], right_slope[todo]
        here = left[todo], right[todo], heights[todo], k_l, k_r
        low, high = (bound[todo].to(dtype).double() for bound in bounds)
        knots = _knots(low, high, intervals)
        x = torch.cat([_places(here), knots], 1)
        y = _function(x, here)
        flat = low, high, torch.zeros_like(knots), k_l, k_r
        basis = reference.partials(x, *flat, channel_dim=0)["heights"]
        fitted = least_maximum(basis, y - _function(x, flat), _function(knots, here), allowed[todo]).to(dtype).double()
        made = (_function(x, (low, high, fitted, k_l, k_r)) - y).abs().amax(1)
        made[high <= low] = torch.inf  # knots that fell together when they were rounded
        new = new[0].index_copy(0, todo, low), new[1].index_copy(0, todo, high), new[2].index_copy(0, todo, fitted)
        error = error.index_copy(0, todo, made)
    return new, error


def _trimmed(parameters: _Five, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds moved inwards, to the last knot up to which the function goes on as it does outside, give or take `allowed`."""
    left, right, heights, left_slope, right_slope = parameters
    intervals = heights.shape[1] - 1
    knots = _knots(left, right, intervals)

    def straight(above: Tensor) -> Tensor:  # how many intervals it stays on the line on which `above` is constant
        return (above.cummax(1).values - above.cummin(1).values <= allowed[:, None]).sum(1) - 1

    first = straight(heights - left_slope[:, None] * knots)
    last = intervals - straight((heights - right_slope[:, None] * knots).flip(1))
    # one corner alone, or none: the interval after it
    first = torch.where(first < last, first, last.clamp(max=intervals - 1))
    last = torch.maximum(last, first + 1)
    return knots.gather(1, first[:, None])[:, 0], knots.gather(1, last[:, None])[:, 0]


def least_maximum(basis: Tensor, target: Tensor, start: Tensor, allowed: Tensor) -> Tensor:
    """Coefficients c (C, P) with a small max_j |basis c - target|; basis (C, J, P), target (C, J), allowed (C,).

    Lawson's algorithm: least squares, again and again, with weights that grow where the error is large. Whatever c is, its
    largest error is at least the weighted root mean square of those errors, so it is also seen when `allowed` is out of
    reach; then it stops. `start` is returned where that is about as good.
    """
    target = target[:, :, None]
    best, error = start, (basis @ start[:, :, None] - target).abs().amax((1, 2))
    weights = torch.full_like(target, 1 / target.shape[1])
    ridge = 1e-13 * torch.eye(basis.shape[2], dtype=torch.float64, device="cpu")  # a column may be 0
    tiny = 1e-12 * target.abs().amax((1, 2)) + 1e-300  # less is rounding
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
