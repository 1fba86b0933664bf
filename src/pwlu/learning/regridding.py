"""Regridding: move the bounds of PWLUs to their inputs, and approximate their functions on the new knots."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pwlu import reference
from pwlu.analysis.quantiles import bin_width
from pwlu.common.text import abbreviate
from pwlu.learning.function_table import HEIGHTS, LEFT, RIGHT, SLOPES, interval, table_of
from pwlu.learning.optimizers import state_optimizer, unwrap_optimizer
from pwlu.learning.realignment import OWN_BOUNDS
from pwlu.learning.two_phase_checks import check_copies, check_optimizer
from pwlu.units.dynamic import DynamicPWLU
from pwlu.units.module import PWLU, apply_constraint, require_own_weights, require_units, require_values, weight_parameter
from pwlu.units.nonuniform import NonUniformPWLU
from pwlu.units.sharding import full_values, write_parameter

_POINTS = 8  # per interval; functions are compared at these points
_DEVIATIONS = 2 * 1.6448536269514722  # distance of the 5 % and 95 % quantiles of a normal distribution, in sigma
_REFUSED: dict[type[PWLU], str] = {
    DynamicPWLU: "whose directions cannot be fitted between new bounds. Pass the parts of the model that have other PWLUs",
    NonUniformPWLU: "whose knots follow the inputs by themselves. Pass the parts of the model that have other PWLUs",
}


class Measured(Protocol):
    """The inputs of one PWLU, as :func:`pwlu.alignment` measures them."""

    name: str
    p5: list[float]
    p95: list[float]
    count: list[int]


class Regridded(NamedTuple):
    """The result of :func:`regrid_` for one PWLU.

    Attributes:
        name: the name of the module.
        channels: its number of functions.
        kept: the number of functions that were left unchanged.
        error: the RMS difference between new and old functions, divided by the standard deviation of the old outputs. Both
            assume normally distributed inputs and include all functions that moved. 0 if no function moved.
    """

    name: str
    channels: int
    kept: int
    error: float


@torch.no_grad()
def regrid_(
    model: nn.Module, inputs: Iterable[Measured], *, optimizer: Any = None, copies: nn.Module | Sequence[nn.Module] = ()
) -> list[Regridded]:
    """Move the bounds of all PWLUs of a model to their inputs, in place, and approximate their functions on the new knots.

    The new bounds are mu - 3 sigma and mu + 3 sigma, with mu = (p5 + p95)/2 and sigma = (p95 - p5)/3.29. The new heights are a
    weighted least-squares fit of the old function between the new bounds; the weights are the density of a normal distribution.
    The outer slopes are the mean slopes of the old function over one more interval on each side. If the old function is
    straight between neighbouring new knots and over these two intervals, it stays the same up to rounding.

    Unlike :func:`pwlu.realign_`, you can call it repeatedly, in Phase II or without a :class:`pwlu.TwoPhase`. A function keeps
    its parameters if it has no inputs, or only equal ones: if p95 - p5 is less than the width of a bin of
    :mod:`pwlu.analysis.quantiles`. So does every function of a PWLU that is frozen or has a frozen block. The result satisfies
    the constraints of :func:`pwlu.constrain_`.

    Args:
        model: a model with PWLUs.
        inputs: the inputs of the PWLUs, as ``pwlu.alignment(model, batches)`` returns them. PWLUs that are missing keep their
            parameters. In distributed training, pass equal measurements on all ranks.
        optimizer: the optimizer of the PWLUs. Its momentum (``momentum_buffer`` or ``exp_avg``) of heights and slopes changes
            by the same linear map as these do. The momentum of the bounds becomes 0. Second moments do not change. Default:
            None.
        copies: models with the same structure, such as a moving average. They get the same bounds. Default: none.

    Returns:
        One :class:`pwlu.learning.regridding.Regridded` per PWLU.

    Raises:
        TypeError: if ``model`` is not a module, ``inputs`` are not measurements, ``optimizer`` is not an optimizer, or a PWLU
            is a :class:`pwlu.DynamicPWLU` or a :class:`pwlu.NonUniformPWLU`.
        ValueError: if the model has no PWLUs, two of them share one weight, ``inputs`` does not fit them, or ``optimizer`` does
            not hold their parameters.
        RuntimeError: if Phase I has not ended, or the weight of a PWLU is computed (parametrized or pruned).

    Example::

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), pwlu.PWLU(channels=8))
        report = pwlu.regrid_(model, pwlu.alignment(model, [torch.randn(64, 4)]))
    """
    units = require_units("regrid_", model, _REFUSED)
    found = _by_name(inputs)
    _check(units, found)
    others = check_copies("regrid_", copies, units)
    state: Mapping[Any, Any] = {}
    if optimizer is not None:
        optimizer = unwrap_optimizer("regrid_", optimizer)
        check_optimizer("regrid_", optimizer, units)
        state = state_optimizer(optimizer).state
    reports = []
    for number, (name, unit) in enumerate(units.items()):
        old = _read(unit, weight_parameter(unit))
        left, right, moves = _new_bounds(unit, old, found.get(name))
        for key in ("momentum_buffer", "exp_avg"):
            buffer = state.get(unit.weight, {}).get(key)
            if buffer is not None:
                momentum = _read(unit, buffer)
                mapped = fitted(torch.cat([old[:, :2], momentum[:, 2:]], 1), left, right)
                mapped[:, :2] = 0
                _write(unit, buffer, torch.where(moves, mapped, momentum))
        for each in (unit, *(copy[number] for copy in others)):
            values = _read(each, weight_parameter(each))
            _write(each, weight_parameter(each), torch.where(moves, fitted(values, left, right), values))
            if moves.any():
                apply_constraint(each)
        moved = moves[:, 0]
        error = _error(old[moved], _read(unit, unit.weight)[moved])
        reports.append(Regridded(name, unit.channels, int((~moved).sum()), error))
    return reports


def fitted(table: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the table of the same functions, fitted between new bounds (F, 1). The map is linear in heights and slopes."""
    intervals = table.shape[1] - 5
    d = (right - left) / intervals
    x = left + d * torch.arange(-1, intervals + 1 + 1 / (2 * _POINTS), 1 / _POINTS, dtype=table.dtype)
    y = _evaluate(table, x)
    slopes = [(y[:, _POINTS] - y[:, 0]) / d[:, 0], (y[:, -1] - y[:, -1 - _POINTS]) / d[:, 0]]
    return torch.cat([left, right, torch.stack(slopes, 1), y[:, _POINTS:-_POINTS] @ _fit(intervals).T], 1)


@functools.lru_cache(16)
def _fit(intervals: int) -> Tensor:
    """Return the matrix from values at the points between the bounds to the heights of the weighted least-squares fit."""
    points = torch.arange(intervals * _POINTS + 1, dtype=torch.float64) / _POINTS
    hats = (1 - (points[:, None] - torch.arange(intervals + 1)).abs()).clamp(min=0)
    root = _density(intervals).sqrt()
    return torch.linalg.pinv(root[:, None] * hats) * root


def _density(intervals: int) -> Tensor:
    """Return the density of inputs at the points between the bounds, which are at -3 and 3 standard deviations."""
    deviations = torch.linspace(-3, 3, intervals * _POINTS + 1, dtype=torch.float64)
    return torch.softmax(-deviations.square() / 2, 0)


def _evaluate(table: Tensor, x: Tensor) -> Tensor:
    slopes = table[:, SLOPES]
    blocks = table[:, LEFT][:, 0], table[:, RIGHT][:, 0], table[:, HEIGHTS], slopes[:, 0], slopes[:, 1]
    return reference.forward(x, *blocks, channel_dim=0)


def _error(old: Tensor, new: Tensor) -> float:
    if not len(old):
        return 0.0
    intervals = old.shape[1] - 5
    x = new[:, LEFT] + interval(new) * torch.arange(intervals * _POINTS + 1) / _POINTS
    weight = _density(intervals)
    before, after = _evaluate(old, x), _evaluate(new, x)
    spread = before - (before * weight).sum(1, keepdim=True)
    squares = [(each.square() * weight).sum() for each in (after - before, spread)]
    return float((squares[0] / squares[1].clamp(min=1e-300)).sqrt())


def _new_bounds(unit: PWLU, old: Tensor, measured: Measured | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new bounds of each function and whether it moves, all (F, 1)."""
    left, right = old[:, LEFT].clone(), old[:, RIGHT].clone()
    scale = unit.gradient_scale
    if measured is None or not unit.weight.requires_grad or (scale is not None and bool((scale == 0).any())):
        return left, right, torch.zeros_like(left, dtype=torch.bool)
    p5, p95, count = (torch.tensor(list(each), dtype=torch.float64) for each in (measured.p5, measured.p95, measured.count))
    mean, sigma = (p5 + p95) / 2, (p95 - p5) / _DEVIATIONS
    if unit.channels == 1 and len(mean) > 1:  # one function for all channels: use the moments of all inputs together
        share, mean, sigma = count / count.sum(), mean.nan_to_num(), sigma.nan_to_num()
        centre = (share * mean).sum(0, keepdim=True)
        sigma = (share * (sigma.square() + (mean - centre).square())).sum(0, keepdim=True).sqrt()
        mean, count = centre, count.sum(0, keepdim=True)
    dtype = unit.weight.dtype
    new = [(mean + sign * 3 * sigma).to(dtype).double()[:, None] for sign in (-1, 1)]  # rounded to the dtype that stores them
    # As for realign_: an interval must be wider than the rounding error of the parameters.
    roundoff = torch.finfo(dtype).eps * torch.maximum(new[0].abs(), new[1].abs())
    apart = (sigma * _DEVIATIONS)[:, None] >= bin_width(left, right, mean[:, None])
    usable = (count > 0)[:, None] & apart & ((new[1] - new[0]) / unit.intervals > 4 * roundoff) & (new[1] - new[0]).isfinite()
    moves = usable & ((new[0] != left) | (new[1] != right))
    return torch.where(moves, new[0], left), torch.where(moves, new[1], right), moves


def _read(unit: PWLU, tensor: Tensor) -> Tensor:
    """Return the table of a tensor with the layout of the weight, in float64 on the CPU."""
    return full_values(tensor).to("cpu", torch.float64)[table_of([unit]).rows.cpu()]


def _write(unit: PWLU, tensor: Tensor, table: Tensor) -> None:
    write_parameter(tensor, table.reshape(-1)[table_of([unit]).places.cpu()].to(tensor.device, tensor.dtype))


def _by_name(inputs: Any) -> dict[str, Measured]:
    found = {}
    for each in inputs if isinstance(inputs, Iterable) else [inputs]:
        if not hasattr(each, "p95"):
            raise TypeError(
                f"regrid_: inputs must be what pwlu.alignment returns, not a {type(inputs).__name__}. Write "
                "pwlu.regrid_(model, pwlu.alignment(model, batches))"
            )
        found[each.name] = each
    return found


def _check(units: dict[str, PWLU], found: dict[str, Measured]) -> None:
    require_own_weights("regrid_", units, OWN_BOUNDS)
    require_values("regrid_", units)
    if early := [name for name, unit in units.items() if unit.phase == 1]:
        raise RuntimeError(
            f"regrid_: {abbreviate(early)} is in Phase I, in which PWLUs do not change. Train until phases.phase is 2, or call "
            "pwlu.realign_(model)"
        )
    if unknown := [name for name in found if name not in units]:
        raise ValueError(
            f"regrid_: inputs has {abbreviate(unknown)}, which is not a PWLU of this model. Write "
            "pwlu.regrid_(model, pwlu.alignment(model, batches))"
        )
    for name, measured in found.items():
        if units[name].channels not in (1, len(measured.p5)):
            raise ValueError(
                f"regrid_: inputs has {len(measured.p5)} channels of {name or 'the model'}, which has {units[name].channels} "
                "functions. Measure the inputs of this model: pwlu.alignment(model, batches)"
            )
