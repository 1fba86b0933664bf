"""The learning rule "shared": the channels of a layer share their gradients, and bends are penalized.

It minimizes the loss plus, for each PWLU with C functions,

    bend (N/16)^3 (mean over the functions) sum_k (Y_{k+1} - 2 Y_k + Y_{k-1})^2

with the second differences of :func:`pwlu.curvature`. It changes how fast parameters move, but not the minimum of this sum:

1. Before the optimizer's step, the gradient of the heights is multiplied by N/16. With more intervals, each height gets the
   gradients of fewer inputs. The factor makes a function move as fast as one with 16 intervals.
2. Each function then gets ``sharing`` times the sum of the gradients of all functions of its layer. Heights are shared in
   units of d, slopes as they are, bounds not at all. In other words, the gradient is multiplied by P = I + sharing w w', with
   w = d / (RMS of d in the layer). P has the eigenvalue 1 + sharing C for the function that the channels have in common, and
   1 for their deviations from it.
3. After the step, the penalty acts as an implicit (proximal) step in the same metric: v <- (I + t P M'M)^-1 v. Here
   v = (K_L d, Y_0, ..., Y_N, K_R d), M v are the second differences, and t = 2 bend (N/16)^4 / C times the rate. An implicit
   step is stable at any strength. An explicit one diverges if t times the largest eigenvalue of P M'M exceeds 2.

The rate is how far a constant gradient of 1 moves a parameter per step. For SGD it is lr (1 - dampening) / (1 - momentum).
Other optimizers scale the gradient. For them, the rule measures the rate of each layer in every step. It is the RMS of the
step of the heights, divided by the RMS of their gradient including the penalty's. With LBFGS, the penalty is added to the loss
and nothing is shared, because LBFGS estimates a metric of its own.

The penalty does not act on the bounds: only the loss moves them. In a :class:`pwlu.DynamicPWLU`, the rule changes only
``weight``, not the directions.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from pwlu.kernels import dispatch
from pwlu.learning.function_table import HEIGHTS, SLOPES, FunctionTable, bends, interval, table_of
from pwlu.units.module import PWLU
from pwlu.units.sharding import is_sharded

INTERVALS = 16  # sharing and bend are stated for this number of intervals
_TINY = 1e-24  # added to the mean of d^2, so that a layer whose intervals all have the length 0 does not divide by 0


@dataclass(frozen=True)
class SharedRule:
    """The strengths of the learning rule ``"shared"`` of :class:`pwlu.TwoPhase`.

    Args:
        sharing: each function gets this multiple of the sum of the gradients of all functions of its layer. Default: 0.1.
        bend: the factor of the penalty on squared second differences, for 16 intervals. Default: 0.03.

    Raises:
        ValueError: if a strength is negative or not finite.
    """

    sharing: float = 0.1
    bend: float = 0.03

    def __post_init__(self) -> None:
        for name in ("sharing", "bend"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ValueError(f"SharedRule: {name} must be a number of at least 0, such as 0.1, not {value!r}")


PAPER = "paper"
RULES: dict[str, SharedRule | None] = {PAPER: None, "shared": SharedRule()}
DEFAULT_RULE = PAPER


def find_rule(rule: Any) -> SharedRule | None:
    """Return a rule by its name. None is the paper's method."""
    if isinstance(rule, SharedRule) or rule is None:
        return rule
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(
            f"TwoPhase: rule must be {', '.join(map(repr, RULES))} or a pwlu.learning.shared_rule.SharedRule, not {rule!r}"
        )
    return RULES[rule]


def penalty(rule: SharedRule, units: Iterable[PWLU]) -> Tensor:
    """Return the penalty of the rule as a differentiable tensor. Training applies it as an implicit step, not in the loss."""
    each = []
    for unit in units:
        left, right, heights, left_slope, right_slope = unit.blocks()
        table = torch.cat([torch.stack([left.detach(), right.detach(), left_slope, right_slope], 1), heights], 1)
        squares = bends(table, interval(table)).square().sum() / unit.channels
        each.append(rule.bend * (unit.intervals / INTERVALS) ** 3 * squares)
    return torch.stack([value.to(each[0]) for value in each]).sum()


def add_penalty_(rule: SharedRule, units: Iterable[PWLU]) -> Tensor:
    """Add the gradient of the penalty to the gradients of units that have any. Return the penalty."""
    with torch.enable_grad():
        total = penalty(rule, (unit for unit in units if unit.weight.grad is not None))
        total.backward()
    return total.detach()


class _Group(NamedTuple):
    """Units that are computed together, with the tables of their state before the optimizer's step."""

    weights: Sequence[Any]
    settings: dict[str, Any]  # the optimizer's settings of their parameter group
    table: FunctionTable
    before: Tensor  # the weights
    gradient: Tensor  # the shared gradients
    share: Tensor  # w, (F, 1)
    factors: Tensor | None  # the factors of scale_gradients, (F, N + 5)


class _KernelGroup(NamedTuple):
    """Units that kernels compute together."""

    weights: Sequence[Any]
    settings: dict[str, Any]
    kernel: Any
    kept: Any  # its state from before the optimizer's step


@torch._disable_dynamo  # it reads cached tables; torch.compiler.disable would import the compiler with pwlu
@torch.no_grad()
def share_gradients_(rule: SharedRule, units: Iterable[PWLU], optimizer: Optimizer) -> list[_Group | _KernelGroup]:
    """Share the gradients of units, in place. Return what :func:`smooth_` needs after the optimizer's step."""
    group_index = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    found: dict[Any, list[tuple[PWLU, Any, Tensor]]] = defaultdict(list)
    for unit in units:
        weight: Any = unit._parameters["weight"]  # TwoPhase has checked that it is a parameter
        # A unit that was frozen when the optimizer was made is not in it, and no step moves it. pop() because several units may
        # have one weight.
        number = group_index.pop(id(weight), None)
        if number is not None and weight.requires_grad and (gradient := weight.grad) is not None:
            key = unit.intervals, weight.device, weight.dtype, number, is_sharded(weight)
            found[key].append((unit, weight, gradient))
    groups: list[_Group | _KernelGroup] = []
    for (_, device, _, number, sharded), each in found.items():
        members, weights, gradients = zip(*each, strict=True)
        settings = optimizer.param_groups[number]
        scaled = any(unit._buffers["gradient_scale"] is not None for unit in members)
        if not (sharded or scaled) and (group := _shared_by_kernel(rule, members, weights, gradients, settings)):
            groups.append(group)
            continue
        table = table_of(members)
        with torch.autocast(device.type, enabled=False):
            before = table.read(weights)
            d = interval(before)
            share = d * (table.mean(d.square()) + _TINY).rsqrt()[table.layer]
            factors = _gradient_factors(members, table) if scaled else None
            gradient = shared(table.read(gradients), share, table, rule.sharing, factors)
            table.write(gradients, gradient)
        groups.append(_Group(weights, settings, table, before, gradient, share, factors))
    return groups


def _shared_by_kernel(
    rule: SharedRule, units: Sequence[PWLU], weights: Sequence[Tensor], gradients: Sequence[Tensor], settings: dict[str, Any]
) -> _KernelGroup | None:
    """Share gradients by a kernel, in place. Return None if no kernel can."""
    kernel = dispatch.kernel_of(weights[0])
    if not hasattr(kernel, "share_gradients"):
        return None
    channels = [unit.channels for unit in units]
    kept = kernel.share_gradients(weights, gradients, channels, units[0].intervals, rule.sharing, not _tells_rate(settings))
    return None if kept is NotImplemented else _KernelGroup(weights, settings, kernel, kept)


def shared(gradient: Tensor, share: Tensor, table: FunctionTable, sharing: float, factors: Tensor | None) -> Tensor:
    """Return gradients after steps 1 and 2: heights times N/16, then plus `sharing` times the sum over each layer."""
    columns = _columns(table.intervals, table.device, table.dtype)
    gradient = gradient * columns.speed if table.intervals != INTERVALS else gradient
    unit = torch.addcmul(columns.slopes, share, columns.heights)
    common = table.layer_mean(gradient * unit) * unit
    if factors is not None:
        common = common * (factors != 0)  # a frozen entry keeps a gradient of 0
    return torch.addcmul(gradient, common, table.counts, value=sharing)


@torch._disable_dynamo  # it reads cached tables; torch.compiler.disable would import the compiler with pwlu
@torch.no_grad()
def smooth_(rule: SharedRule, groups: Iterable[_Group | _KernelGroup], optimizer: Optimizer) -> None:
    """Take the implicit step of the penalty on the weights of units, in place, after a step of the optimizer."""
    if not rule.bend:
        return
    for group in groups:
        if isinstance(group, _KernelGroup):
            _smooth_by_kernel(rule, group, optimizer)
            continue
        table, rate = group.table, _known_rate(group.settings, optimizer, group.before)
        with torch.autocast(table.device.type, enabled=False):
            now = table.read(group.weights)
            d = interval(now)
            bent = bends(now, d)
            if rate is None:
                rate = _measured_rate(rule, group, optimizer, now, bent)
            change = implicit_change(bent, group.share, table, rule, rate)
            change[:, SLOPES].div_(d).nan_to_num_(0.0, 0.0, 0.0)  # if d is 0, the slopes do not change
            if group.factors is not None:
                change = change * group.factors.clamp(max=1)  # a frozen entry does not change; factors above 1 are unstable
            table.write(group.weights, now - change)


def _smooth_by_kernel(rule: SharedRule, group: _KernelGroup, optimizer: Optimizer) -> None:
    """Take the implicit step by a kernel, in place."""
    (now, *_), scale = group.weights, None
    strength = 2 * rule.bend * (group.kept.intervals / INTERVALS) ** 4
    rate = _known_rate(group.settings, optimizer, now)
    if rate is None:  # the kernel measures it
        scale = getattr(optimizer, "grad_scale", None)
        scale = scale if scale is None else scale.to(now)
    elif isinstance(rate, Tensor) and rate.device.type != "cpu":
        rate = rate.to(now)
    else:
        strength, rate = strength * float(rate), None
    if group.kernel.smooth(group.weights, group.kept, strength, rate, scale) is NotImplemented:
        raise RuntimeError("TwoPhase: the optimizer has changed the dtype or layout of weights, so the rule cannot follow")


def implicit_change(bent: Tensor, share: Tensor, table: FunctionTable, rule: SharedRule, rate: Any) -> Tensor:
    """Return v - (I + t P M'M)^-1 v for functions with the second differences `bent`, in the columns of a table.

    With M M' = Q diag(q) Q', this equals M'Q [t/(1 + t q)] Q'M v for the deviations. For the common function, t is multiplied
    by 1 + sharing C. The computation starts from second differences, so the change of a straight line is exactly 0.

    `bent` holds the second differences (F, N + 1), and `share` w (F, 1). The rate is a number, a tensor without dimensions, or
    one value per row (F, 1).
    """
    modes = _bending_modes(table.intervals, table.device, table.dtype)
    coefficients = bent @ modes.vectors
    common = table.layer_mean(coefficients * share) * share
    # 1/(1/t + q) is 0 for t = 0.
    inverse = _inverse_speeds(table, rule.sharing) / (2 * rule.bend * (table.intervals / INTERVALS) ** 4 * rate)
    deviation_factor, common_factor = (inverse + modes.values).reciprocal()
    return torch.addcmul(coefficients * deviation_factor, common, common_factor - deviation_factor) @ modes.back


def _tells_rate(settings: dict[str, Any]) -> bool:
    return "momentum" in settings and "dampening" in settings


def _known_rate(settings: dict[str, Any], optimizer: Optimizer, like: Tensor) -> Any:
    """Return how far a constant gradient of 1 moves a parameter per step, if the settings say so: a number or a tensor."""
    if not _tells_rate(settings):
        return None
    found_inf = getattr(optimizer, "found_inf", None)
    momentum = settings["momentum"]  # without it, SGD ignores dampening
    rate = settings["lr"] * ((1 - settings["dampening"]) / (1 - momentum) if momentum else 1)
    # GradScaler calls a fused optimizer even for a skipped step, and sets found_inf.
    return rate if found_inf is None else rate * (found_inf == 0).to(like)


def _measured_rate(rule: SharedRule, group: _Group, optimizer: Optimizer, now: Tensor, bent: Tensor) -> Tensor:
    """Return how far a constant gradient of 1 moved a parameter in this step: one value per row (F, 1)."""
    table = group.table
    steps = (now - group.before)[:, HEIGHTS].square().mean(1, keepdim=True)
    scale = getattr(optimizer, "grad_scale", None)
    gradient = group.gradient if scale is None else group.gradient / scale
    squares = gradient[:, HEIGHTS].square().mean(1, keepdim=True)
    strength = 2 * rule.bend * (table.intervals / INTERVALS) ** 4 * (1 / table.counts + rule.sharing)
    squares = squares + (strength * bent).square().mean(1, keepdim=True)
    rate = (table.layer_mean(steps) / table.layer_mean(squares)).sqrt()
    return torch.where(rate.isfinite(), rate, 0.0)  # not finite: there was no gradient, or the step was skipped


def _gradient_factors(units: Sequence[PWLU], table: FunctionTable) -> Tensor:
    """Return the factors of scale_gradients, 1 for units without any."""
    scales = [unit._buffers["gradient_scale"] for unit in units]
    ones = [torch.ones(length, device=table.device) for length in table.lengths]
    return table.read(one if scale is None else scale for one, scale in zip(ones, scales, strict=True))


@functools.lru_cache(64)
def _inverse_speeds(table: FunctionTable, sharing: float) -> Tensor:
    """Return C for deviations and C/(1 + sharing C) for the common function, (2, F, 1)."""
    return torch.stack([table.counts, table.counts / (1 + sharing * table.counts)])


class _Columns(NamedTuple):
    """Masks of columns, (N + 5,)."""

    slopes: Tensor
    heights: Tensor
    speed: Tensor  # N/16 for heights, else 1


@functools.lru_cache(64)
def _columns(intervals: int, device: torch.device, dtype: torch.dtype) -> _Columns:
    slopes, heights, speed = torch.zeros(intervals + 5), torch.zeros(intervals + 5), torch.ones(intervals + 5)
    slopes[SLOPES], heights[HEIGHTS], speed[HEIGHTS] = 1.0, 1.0, intervals / INTERVALS
    return _Columns(*(each.to(device, dtype) for each in (slopes, heights, speed)))


class _Modes(NamedTuple):
    """M M' = Q diag(q) Q', where M maps v = (K_L d, Y_0, ..., Y_N, K_R d) to its second differences."""

    values: Tensor  # q, (N + 1,)
    vectors: Tensor  # Q, (N + 1, N + 1)
    back: Tensor  # Q'M with columns as in a table, (N + 1, N + 5); those of the bounds are 0


@functools.lru_cache(64)
def _bending_modes(intervals: int, device: torch.device, dtype: torch.dtype) -> _Modes:
    rows = torch.eye(intervals + 5, dtype=torch.float64)
    bending = bends(rows, torch.ones(intervals + 5, 1, dtype=torch.float64)).T
    values, vectors = torch.linalg.eigh(bending @ bending.T)
    return _Modes(*(each.to(device, dtype) for each in (values, vectors, vectors.T @ bending)))
