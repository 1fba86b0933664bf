"""Constraints on the shape of PWLUs, and the projection that enforces them. :func:`pwlu.constrain_` sets them.

Let s_0 = K_L, s_{i+1} = (Y_{i+1} - Y_i)/d and s_{N+1} = K_R be the N + 2 slopes of a function. The projection takes these
steps, in this order. No step violates the constraint of an earlier step:

1. odd: B_R = (B_R - B_L)/2, B_L = -B_R, Y_k = (Y_k - Y_{N-k})/2, and every s_j becomes (s_j + s_{N+1-j})/2. All constraints
   need B_L < B_R, because a function with crossed bounds is discontinuous. So under any constraint, this step moves bounds
   apart that are too close.
2. convex: isotonic regression of the slopes, min sum (t_j - s_j)^2 with t_0 <= ... <= t_{N+1}. If the function is odd too, all
   slopes become their mean, because only a straight line is both.
3. lipschitz, monotone: clip the slopes to [-L, L], or [0, L]. Then Y_k = Y_0 + d (s_1 + ... + s_k). Y_0 is chosen so that the
   mean of the heights does not change.
4. range: clip the heights to [a, b]; K_L = K_R = 0.

A function that satisfies its constraints stays the same, bit for bit. A function with parameters that are not finite stays the
same too, so that divergence remains visible.

The computation runs in float64. The function that the stored parameters describe is exactly L-Lipschitz, monotone, odd and in
range. For this, the projection reduces L by more than the rounding of the heights can add to a slope. The function is convex up
to the rounding of the heights. The forward pass adds its own rounding: see docs/constraints.md.
"""

import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from pwlu import reference
from pwlu.units.sharding import full_values, write_parameter

OWN_WEIGHT = "give each its own weight: act.weight = torch.nn.Parameter(act.weight.detach().clone())"  # ends errors
_LARGEST_TABLE = 2**23  # the number of elements of the largest temporary tensor in isotonic


class Constraint(NamedTuple):
    """What the functions of a PWLU must satisfy; see :func:`pwlu.constrain_`. Prints as words, such as ``1-Lipschitz, odd``."""

    lipschitz: float | None = None
    monotone: bool = False
    convex: bool = False
    odd: bool = False
    range: tuple[float, float] | None = None

    def __str__(self) -> str:
        words = [f"{self.lipschitz:g}-Lipschitz"] if self.lipschitz is not None else []
        words += [name for name in ("monotone", "convex", "odd") if getattr(self, name)]
        words += [f"range ({self.range[0]:g}, {self.range[1]:g})"] if self.range is not None else []
        return ", ".join(words)

    def limits(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return the smallest and the largest number of this dtype in the range; -inf and inf if there is no range."""
        if self.range is None:
            return -float("inf"), float("inf")
        low, high = self.range
        if self.odd:
            high = min(-low, high)
            low = -high
        return -_round_down(-low, dtype), _round_down(high, dtype)


def _round_down(number: float, dtype: torch.dtype) -> float:
    """Return a number of this dtype that is close to the given number and not above it."""
    info = torch.finfo(dtype)
    rounded = torch.tensor(number, dtype=dtype, device="cpu").item()
    lower = number - abs(number) * info.eps - info.smallest_normal * info.eps  # more than one unit in the last place
    return rounded if rounded <= number else min(torch.tensor(lower, dtype=dtype, device="cpu").item(), info.max)


def isotonic(values: Tensor) -> Tensor:
    """Return the isotonic regression of each row: the nondecreasing rows with the smallest sum of squared differences.

    The formula is t_j = max_{i <= j} min_{k >= j} mean(s_i, ..., s_k). The algorithm "pool adjacent violators" gives the same.
    """
    length = values.shape[1]
    index = torch.arange(length, device=values.device)
    count = index - index[:, None] + 1  # count[i, k]: the number of elements from i to k
    parts = []
    for rows in values.split(max(1, _LARGEST_TABLE // length**2)):
        sums = rows.cumsum(1)
        means = (sums[:, None, :] - (sums - rows)[:, :, None]) / count.clamp(min=1)
        smallest = means.masked_fill(count < 1, torch.inf).flip(2).cummin(2).values.flip(2)
        parts.append(smallest.masked_fill(count < 1, -torch.inf).amax(1))
    return torch.cat(parts)


class _Rows(NamedTuple):
    """Functions as columns: left, right, left_slope, right_slope (F, 1) and heights (F, N+1), in the wide dtype."""

    left: Tensor
    right: Tensor
    left_slope: Tensor
    right_slope: Tensor
    heights: Tensor

    @property
    def step(self) -> Tensor:
        return (self.right - self.left) / (self.heights.shape[1] - 1)

    @property
    def slopes(self) -> Tensor:
        return torch.cat([self.left_slope, self.heights.diff(dim=1) / self.step, self.right_slope], 1)


def _split(rows: Tensor) -> _Rows:
    wide = rows.to(torch.float32 if rows.device.type == "mps" else torch.float64)
    return _Rows(*wide.split([1, 1, 1, 1, rows.shape[1] - 4], 1))


def _least_width(f: _Rows, dtype: torch.dtype) -> Tensor:
    """Return the width below which the bounds, stored in this dtype, or neighbouring knots, computed, would coincide."""
    number, computed_dtype = f.heights.shape[1] - 1, torch.promote_types(dtype, torch.float32)
    stored, computed = torch.finfo(dtype), torch.finfo(computed_dtype)
    eps, smallest = max(stored.eps, number * computed.eps), max(stored.smallest_normal, number * computed.smallest_normal)
    return 4 * (eps * torch.maximum(f.left.abs(), f.right.abs()) + smallest)


def satisfies(rows: Tensor, constraint: Constraint) -> Tensor:
    """Return whether each function satisfies a constraint, (F,). The rows are those of :func:`project`."""
    f, unit = _split(rows), torch.finfo(rows.dtype).eps / 2
    slopes, rises = f.slopes, f.heights.diff(dim=1)
    holds = f.right - f.left >= _least_width(f, rows.dtype)
    if constraint.odd:
        holds &= (f.left == -f.right) & (f.left_slope == f.right_slope)
        holds &= (f.heights == -f.heights.flip(1)).all(1, keepdim=True)
    if constraint.lipschitz is not None:
        limit = constraint.lipschitz * (1 + 4 * torch.finfo(slopes.dtype).eps)  # allow for the rounding of this comparison
        outer = torch.maximum(f.left_slope.abs(), f.right_slope.abs())
        holds &= (rises.abs() <= limit * f.step).all(1, keepdim=True) & (outer <= limit)
    if constraint.monotone:
        holds &= (rises >= 0).all(1, keepdim=True) & (f.left_slope >= 0) & (f.right_slope >= 0)
    if constraint.convex:
        largest = [each.abs().amax(1, keepdim=True) for each in (f.heights, slopes)]
        height = largest[0] + torch.finfo(rows.dtype).smallest_normal  # below it, rounding stays as large
        computed = rises.shape[1] * torch.finfo(slopes.dtype).eps
        # A height moves by unit |Y|, and a slope by twice that over d.
        rounding = 4 * (unit + computed) * (height / f.step + largest[1])
        holds &= (slopes.diff(dim=1) >= -rounding).all(1, keepdim=True)
    if constraint.range is not None:
        low, high = constraint.limits(rows.dtype)
        holds &= ((f.heights >= low) & (f.heights <= high)).all(1, keepdim=True)
        holds &= (f.left_slope == 0) & (f.right_slope == 0)
    return holds[:, 0]


def project(rows: Tensor, constraint: Constraint) -> Tensor:
    """Return functions that satisfy a constraint, as the steps at the top of this file say.

    A row is left, right, left_slope, right_slope and heights of a function, (F, N + 5), in the dtype that stores them.
    """
    f, dtype = _split(rows), rows.dtype
    if constraint.odd:
        right = (f.right - f.left) / 2
        flipped = (f.heights - f.heights.flip(1)) / 2
        slope = (f.left_slope + f.right_slope) / 2
        f = _Rows(-right, right, slope, slope, flipped)
    f = _open_bounds(f, dtype)
    slopes = f.slopes
    if constraint.convex:
        slopes = slopes.mean(1, keepdim=True).expand_as(slopes) if constraint.odd else isotonic(slopes)
    mean = f.heights.mean(1, keepdim=True)
    slopes = _clip(slopes, f, mean, constraint, dtype)
    heights = torch.cat([torch.zeros_like(mean), (slopes[:, 1:-1] * f.step).cumsum(1)], 1)
    heights = heights - heights.mean(1, keepdim=True) + mean
    if constraint.monotone:
        heights = heights.cummax(1).values  # on a GPU, rounding in cumsum may make a constant part decrease
    if constraint.odd:
        heights = (heights - heights.flip(1)) / 2
    outer = slopes[:, :1], slopes[:, -1:]
    if constraint.range is not None:
        heights = heights.clamp(*constraint.limits(dtype))
        outer = torch.zeros_like(mean), torch.zeros_like(mean)
    new = torch.cat([f.left, f.right, *outer, heights], 1).to(dtype)
    keep = satisfies(rows, constraint) | ~(rows.isfinite() & new.isfinite()).all(1)
    return torch.where(keep[:, None], rows, new)


def _open_bounds(f: _Rows, dtype: torch.dtype) -> _Rows:
    """Move bounds apart that have crossed or nearly meet. Round all bounds to the dtype that stores them."""
    least = _least_width(f, dtype)
    closed = f.right - f.left < least
    centre = (f.left + f.right) / 2
    # Rounding reduces the new width by at most a quarter.
    left, right = (torch.where(closed, centre + sign * least, bound) for sign, bound in ((-1, f.left), (1, f.right)))
    return f._replace(left=left.to(dtype).to(left.dtype), right=right.to(dtype).to(right.dtype))


def _clip(slopes: Tensor, f: _Rows, mean: Tensor, constraint: Constraint, dtype: torch.dtype) -> Tensor:
    low, high = 0.0 if constraint.monotone else -torch.inf, torch.full_like(mean, torch.finfo(dtype).max)
    if constraint.lipschitz is not None:
        # With W = B_R - B_L, no height is further than L W from the mean. So `rounding` bounds the rounding error of a height.
        number, width = f.heights.shape[1] - 1, f.right - f.left
        unit, computed = torch.finfo(dtype).eps / 2, torch.finfo(slopes.dtype).eps / 2
        size = mean.abs() + constraint.lipschitz * width + torch.finfo(dtype).smallest_normal  # as in `satisfies`
        rounding = (unit + 4 * number * computed) * size
        largest = _round_down(constraint.lipschitz, dtype)  # an outer slope is stored as it is
        high = (largest - 2 * rounding / f.step).clamp(min=0)
    clipped = slopes.clamp(torch.maximum(torch.full_like(high, low), -high), high)
    if constraint.lipschitz is not None and not constraint.convex:  # the outer slopes need no margin
        clipped[:, [0, -1]] = slopes[:, [0, -1]].clamp(max(low, -largest), largest)
    return clipped


def symmetric(rows: Tensor) -> Tensor:
    """Resample functions between the bounds -h and h, for h = max(|B_L|, |B_R|). Symmetric bounds stay as they are."""
    f, intervals = _split(rows), rows.shape[1] - 5
    right = torch.maximum(f.left.abs(), f.right.abs())
    knots = right * torch.linspace(-1, 1, intervals + 1, dtype=right.dtype, device=right.device)
    blocks = f.left[:, 0], f.right[:, 0], f.heights, f.left_slope[:, 0], f.right_slope[:, 0]
    heights = reference.forward(knots, *blocks, channel_dim=0)
    new = torch.cat([-right, right, f.left_slope, f.right_slope, heights], 1).to(rows.dtype)
    keep = (f.left == -f.right)[:, 0] | ~(rows.isfinite() & new.isfinite()).all(1)
    return torch.where(keep[:, None], rows, new)


def constrained(weight: Tensor, intervals: int, constraint: Constraint | None) -> Tensor:
    """Return a weight whose functions satisfy a constraint. Call this outside of training steps, such as after realignment.

    For ``odd``, it first resamples the functions between symmetric bounds, which nearly keeps them. :func:`project` averages
    bounds and heights instead. It runs after every optimizer step, where repeated resampling would smooth the functions.
    """
    if constraint is None:
        return weight
    indices = reference.parameter_indices((weight.shape[0],), intervals, weight.device)
    rows = weight[indices]
    rows = project(symmetric(rows) if constraint.odd else rows, constraint)
    return torch.empty_like(weight).index_put_((indices,), rows)


@torch.no_grad()
def project_(units: Iterable[Any]) -> None:
    """Project the weights of constrained units in place: one computation for all units of the same N and constraint."""
    groups = defaultdict(list)
    for unit in units:
        weight = unit._parameters["weight"]
        groups[unit.intervals, unit.constraint, weight.device, weight.dtype].append(weight)
    for (intervals, constraint, device, _), parameters in groups.items():
        weights = [full_values(parameter) for parameter in parameters]
        lengths = tuple(weight.shape[0] for weight in weights)
        indices = reference.parameter_indices(lengths, intervals, device)
        flat = torch.cat(weights)
        new = torch.empty_like(flat).index_put_((indices,), project(flat[indices], constraint))
        for parameter, value in zip(parameters, new.split(lengths), strict=True):
            write_parameter(parameter, value)


_CONSTRAINED: "weakref.WeakSet[Any]" = weakref.WeakSet()
_LOCK = threading.RLock()  # threads may copy one model and train another


def keep_constrained(unit: Any) -> None:
    """Project the weight of a unit after every step of an optimizer that holds it, as long as it has a constraint."""
    with _LOCK:
        _CONSTRAINED.add(unit)
    _watch_optimizers()


@functools.cache  # register one hook for all optimizers, when the first unit is constrained
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_after_step)  # runs after the hooks of TwoPhase


def constrained_units() -> dict[int, list[Any]]:
    """Return all units that have a constraint, by the id of their weight, which several may share."""
    found = defaultdict(list)
    with _LOCK:
        for unit in _CONSTRAINED:
            if getattr(unit, "constraint", None) is not None:
                found[id(unit._parameters.get("weight"))].append(unit)
    return found


def check_agreement(name: str, constraints: Iterable[Constraint]) -> None:
    """Check that units that share a weight have the same constraint, because a step can enforce only one."""
    if len(found := set(constraints)) > 1:
        raise ValueError(
            f"constrain_: {name} shares its weight with another PWLU, so both need the same constraints, but one has "
            f"{' and another '.join(sorted(map(repr, map(str, found))))}. Constrain them in one call, such as "
            f"pwlu.constrain_(model, lipschitz=1.0), or {OWN_WEIGHT}"
        )


@torch._disable_dynamo  # the roundings of the projection are part of its guarantees, so a compiled step must not compile it
def _after_step(optimizer: Optimizer, *_: Any) -> None:
    units = constrained_units()
    if units:  # all ranks use the optimizer's order, because project_ all-gathers sharded weights
        held = [units[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in units]
        for sharing in held:  # units may share a weight since constrain_ checked them
            check_agreement("a PWLU", (unit.constraint for unit in sharing))
        project_(unit for unit, *_ in held)
