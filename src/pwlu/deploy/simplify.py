"""Reduce PWLUs to fewer intervals or simpler modules (simplify_), or increase the number of intervals (refine_)."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pwlu import reference
from pwlu.baselines import PReLU
from pwlu.baselines.arguments import ChannelActivation, Device, DType
from pwlu.common import checks
from pwlu.common.reports import RowReport
from pwlu.common.text import abbreviate, columns, counted
from pwlu.conversion.convert import wrapper_of
from pwlu.deploy.fewest_knots import keep_fewest_knots
from pwlu.deploy.fitting import SIMPLE, Fit, fit
from pwlu.initial_functions import find_initial_function, fit_bounds
from pwlu.reference import nonuniform as nonuniform_reference
from pwlu.units.module import (
    PWLU,
    apply_constraint,
    controlled,
    exact_blocks,
    require_own_weights,
    require_units,
    require_values,
)
from pwlu.units.nonuniform import NonUniformPWLU, exact_knots


class Line(ChannelActivation):
    """y = a x + b with one line per channel. :func:`simplify_` replaces a PWLU that has become linear by it.

    The parameters are ``weight`` (C,), which is a, and ``bias`` (C,), which is b. They start at 1 and 0. The output has the
    shape of the input.
    """

    def __init__(self, channels: int = 1, channel_dim: int = 1, device: Device = None, dtype: DType = None) -> None:
        super().__init__(channels, channel_dim)
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return a x + b."""
        checks.check_channels(x, self.channels, self.channel_dim)
        wide = reference.compute_dtype(x)
        a, b = (reference.along(p.to(wide), x, self.channel_dim) for p in (self.weight, self.bias))
        return (x.to(wide) * a + b).to(x.dtype)


@dataclass
class Simplified:
    """The result of :func:`simplify_` for one unit.

    Attributes:
        name: full name.
        channels: number of channels.
        was: number of intervals before.
        became: ``"identity"``, ``"relu"``, ``"line"``, ``"prelu"``, ``"fewer"`` (intervals) or ``"kept"``.
        intervals: number of intervals now; 0 if it is no longer a PWLU.
        error: largest difference between the old and the new function over all channels.
        relative: largest error relative to the range max Y - min Y of the channel.
        parameters: number of parameters now.
        removed: number of parameters removed.
        reason: why it was kept.
    """

    name: str
    channels: int
    was: int
    became: str
    intervals: int
    error: float
    relative: float
    parameters: int
    removed: int
    reason: str = ""


@dataclass
class Simplification(RowReport[Simplified], rows="units"):
    """The report of :func:`simplify_`: every unit, in model order. Prints as a table; iterates over units.

    Attributes:
        model: class name of the model.
        tolerance: the tolerance.
        units: one :class:`Simplified` per unit.
    """

    model: str
    tolerance: float
    units: list[Simplified]

    def of(self, became: str) -> list[Simplified]:
        """Return the units that became this: identity, relu, line, prelu, fewer or kept."""
        return [unit for unit in self.units if unit.became == became]

    def __str__(self) -> str:
        head = ("unit", "channels", "intervals", "became", "error", "of the range", "why")
        rows = [
            (
                *(u.name or "the model", str(u.channels), str(u.was)),
                counted(u.intervals, "interval") if u.became == "fewer" else u.became,
                *(f"{u.error:.2g}", f"{100 * u.relative:.2g} %", u.reason),
            )
            for u in self.units
        ]
        parts = [f"{n} {became}" for became in (*SIMPLE, "fewer", "kept") if (n := len(self.of(became)))]
        removed = sum(unit.removed for unit in self.units)
        return "\n".join([*columns(head, rows), f"{self.model}: {', '.join(parts)}; {counted(removed, 'parameter')} removed"])


@torch.no_grad()
def simplify_(
    model: nn.Module,
    tolerance: float = 1e-3,
    *,
    replace: bool = True,
    where: Callable[[str, PWLU], bool] | None = None,
) -> Simplification:
    """Reduce every PWLU to as few intervals as its function needs, or replace it by a simpler module, in place.

    Let f be the old function of a channel and g the new one. Let W = B_R - B_L be the width between its bounds, and
    R = max Y - min Y the range of f there. Then

        |g(x) - f(x)| <= tolerance R    for all x in [B_L - W, B_R + W].

    This holds for the functions that the stored parameters describe; the forward pass rounds as before. Beyond this range, the
    error of a PWLU does not grow, because its outer slopes do not change. The error of another module may grow by at most
    2 tolerance R/W per unit of x.

    The candidates are tried in this order: y = x (``nn.Identity``), ``nn.ReLU``, y = a x + b (``Line``), PReLU with its kink at
    0 (``pwlu.baselines.PReLU``), a PWLU with 1, 2, ... intervals. One module, or one number of intervals, must fit all
    channels. The heights nearly minimize the maximum error. The bounds of a channel move inwards if its outermost intervals
    continue the outer lines. The new functions satisfy the constraints of :func:`pwlu.constrain_`.

    A :class:`pwlu.NonUniformPWLU` keeps the smallest possible subset of its knots, with their heights. For it, the tolerance
    holds before the new knots are rounded.

    Call this after training. Parameters are removed, so create a new optimizer if you continue training. The shapes in the
    state dict change too: save the model first, and simplify it again after loading. The modules are the same Python objects,
    so hooks and other references remain valid.

    Args:
        model: a trained model with PWLUs, not wrapped (DistributedDataParallel, ...). It must hold every module that
            shares a weight with one of them.
        tolerance: largest allowed error, as a share of the range of a channel. Default: 1e-3.
        replace: whether to replace PWLUs by simpler modules. If False, PWLUs stay PWLUs. Default: True.
        where: a function of a unit's name and the unit that returns False if the unit must not change.

    Returns:
        A report of every unit, which prints as a table.

    Raises:
        ValueError: if ``tolerance`` is not between 0 and 1, the model has no PWLU or is wrapped, a PWLU shares its weight with
            another module, or ``where`` excludes all.
        TypeError: if a unit is an instance of another subclass of PWLU.
        RuntimeError: if the model has a :class:`pwlu.TwoPhase` that was not removed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), pwlu.PWLU(8))
        >>> report = pwlu.simplify_(model)
        >>> report.units[0].became
        'relu'
    """
    checks.check_share("simplify_", tolerance)
    units = _check_model("simplify_", model, (PWLU, NonUniformPWLU))
    chosen = {name: unit for name, unit in units.items() if where is None or where(name, unit)}
    fits = {name: _fit(unit, tolerance, replace) for name, unit in chosen.items()}  # fit all units before the model changes
    if not fits:
        raise ValueError(
            f"simplify_: where must return True for at least one PWLU, but it returned False for all of "
            f"{abbreviate(list(units))}"
        )
    return Simplification(type(model).__name__, tolerance, [_apply_fit(name, units[name], fits[name]) for name in fits])


@torch.no_grad()
def refine_(model: nn.Module, intervals: int) -> list[str]:
    """Increase the number of intervals of every PWLU to a multiple of the current number, in place.

    The functions do not change, up to the rounding of the new heights: new knots lie on the lines between the old ones. The
    keys of the state dict and the running statistics stay the same. Create a new optimizer afterwards, as after
    :func:`simplify_`.

    Args:
        model: a model with PWLUs, not wrapped. It must hold every module that shares a weight with one of them.
        intervals: the new number of intervals.

    Returns:
        The names of the PWLUs that changed.

    Raises:
        ValueError: if ``intervals`` is not a positive multiple of the current number, the model has no PWLU or is wrapped, or
            a PWLU shares its weight with another module.
        TypeError: if a unit is an instance of a subclass of PWLU.
        RuntimeError: if the model has a :class:`pwlu.TwoPhase` that was not removed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), pwlu.PWLU(8, intervals=16))
        >>> pwlu.refine_(model, 32)
        ['1']
    """
    intervals = checks.check_integer("refine_", "intervals", intervals, "a multiple of the current number", 1)
    units = _check_model("refine_", model)
    for name, unit in units.items():
        if intervals % unit.intervals:
            below = intervals // unit.intervals * unit.intervals
            near = " or ".join(str(n) for n in (below, below + unit.intervals) if n)
            raise ValueError(
                f"refine_: {name or 'the model'} has {unit.intervals} intervals, and {intervals} is not a multiple of that, so "
                f"its function would change. Write {near}"
            )
    changed = {name: unit for name, unit in units.items() if unit.intervals != intervals}
    for unit in changed.values():
        old, times = exact_blocks(unit).heights, intervals // unit.intervals
        share = torch.arange(times, dtype=torch.float64, device="cpu") / times
        between = old[:, :-1, None] + old.diff(dim=1)[:, :, None] * share
        _set_parameters(unit, unit.left.detach(), unit.right.detach(), torch.cat([between.flatten(1), old[:, -1:]], 1))
        apply_constraint(unit)  # rounding may exceed a limit
    return list(changed)


def _check_model(caller: str, model: nn.Module, kinds: tuple[type[PWLU], ...] = (PWLU,)) -> dict[str, PWLU]:
    units = require_units(caller, model)
    if wrapper := wrapper_of(model):
        raise ValueError(f"{caller}: the model is wrapped by {wrapper}, which holds its parameters. Unwrap it first")
    if subclassed := [name for name, unit in units.items() if type(unit) not in kinds]:
        raise TypeError(
            f"{caller}: {abbreviate(subclassed)} is an instance of a subclass of PWLU ({type(units[subclassed[0]]).__name__}), "
            "whose forward may differ. Replace it by a PWLU first, or pass the parts of the model that have other PWLUs"
        )
    require_values(caller, units)
    require_own_weights(caller, units, "each would get a new weight of its own", dict(model.named_modules()))
    if trained := controlled(units):
        raise RuntimeError(
            f"{caller}: {abbreviate(trained)} has a TwoPhase, whose optimizer trains the parameters to be replaced. After "
            f"training, call its remove() first; during training, use a copy: pwlu.{caller}(copy.deepcopy(model), ...)"
        )
    return units


def _fit_knots(unit: NonUniformPWLU, tolerance: float) -> Fit:
    """Return a fit whose parameters are the new blocks, rounded to the dtype that stores them."""
    old = exact_knots(unit)
    scale = old.heights.amax(1) - old.heights.amin(1)
    zeros = torch.zeros_like(scale)
    if not all(block.isfinite().all() for block in old) or not (old.knots.diff(dim=1) > 0).all():
        return Fit("kept", (), zeros, scale, "its parameters are not finite, or an interval is empty")
    new = keep_fewest_knots(old, tolerance * scale)
    if new.knots.shape == old.knots.shape:
        return Fit("kept", (), zeros, scale, "fewer knots exceed the tolerance")
    blocks = (new.knots[:, 0], new.knots.diff(dim=1).log(), new.heights, new.left_slope, new.right_slope)
    stored = tuple(block.to(unit.weight.dtype).double() for block in blocks)
    found = nonuniform_reference.Knots(nonuniform_reference.knots_of(stored[0], stored[1]), *stored[2:])
    x = torch.cat([old.knots, found.knots], 1)
    y, expected = (nonuniform_reference.forward(x, *functions, channel_dim=0) for functions in (found, old))
    return Fit("fewer", stored, (y - expected).abs().amax(1), scale)


def _fit(unit: PWLU, tolerance: float, replace: bool) -> Fit:
    if isinstance(unit, NonUniformPWLU):
        return _fit_knots(unit, tolerance)
    return fit(exact_blocks(unit), unit.weight.dtype, tolerance, replace, unit.constraint)


def _apply_fit(name: str, unit: PWLU, plan: Fit) -> Simplified:
    was, channels, before = unit.intervals, unit.channels, sum(p.numel() for p in unit.parameters())
    if plan.became == "fewer":
        if isinstance(unit, NonUniformPWLU):
            _set_weight(unit, nonuniform_reference.pack(*plan.parameters), plan.parameters[2].shape[1] - 1)
        else:
            left, right, heights = plan.parameters
            _set_parameters(unit, left, right, heights)
        start = find_initial_function(unit.init)
        with contextlib.suppress(ValueError):  # the unit may have too few intervals for the kinks
            unit.bounds = fit_bounds(unit.bounds, unit.intervals, start.kinks, start.name)
    elif plan.became in SIMPLE:
        _turn_into(unit, _build_module(unit, plan))
    parameters = sum(p.numel() for p in unit.parameters())
    intervals = unit.intervals if isinstance(unit, PWLU) else 0
    relative = torch.where(plan.error == 0, 0.0, plan.error / plan.range)
    numbers = (float(plan.error.max()), float(relative.max()), parameters, before - parameters)
    return Simplified(name, channels, was, plan.became, intervals, *numbers, plan.reason)


def _set_parameters(unit: PWLU, left: Tensor, right: Tensor, heights: Tensor) -> None:
    """Give a unit new bounds and heights; the number of heights may differ."""
    old = unit.blocks()
    blocks = (block.detach().to(old.left) for block in old._replace(left=left, right=right, heights=heights))
    _set_weight(unit, reference.pack(*blocks), heights.shape[1] - 1)


def _set_weight(unit: PWLU, weight: Tensor, intervals: int) -> None:
    scale, old = unit.gradient_scale, unit.intervals
    unit.weight = nn.Parameter(weight.to(unit.weight), unit.weight.requires_grad)
    unit.intervals = intervals
    if scale is not None:  # a frozen block stays frozen; all heights of a function have the same factor
        pairs = zip(unit._layout.unpack(scale, old), unit.blocks(), strict=True)
        unit.gradient_scale = unit._layout.pack(*(a if a.ndim == 1 else a[:, :1].expand_as(b) for a, b in pairs))


def _build_module(unit: PWLU, plan: Fit) -> nn.Module:
    if plan.became in ("identity", "relu"):
        return nn.Identity() if plan.became == "identity" else nn.ReLU()
    bias, slope, _ = plan.parameters
    options: dict[str, Any] = {"device": unit.weight.device, "dtype": unit.weight.dtype}
    module: nn.Module
    if plan.became == "line":
        module = Line(unit.channels, unit.channel_dim, **options)
        module.bias.copy_(bias)
    else:
        module = PReLU(unit.channels, unit.channel_dim, **options)
    module.weight.copy_(slope)
    return module.requires_grad_(unit.weight.requires_grad)


def _turn_into(unit: PWLU, module: nn.Module) -> None:
    """Give a unit the class and the parameters of another module. It stays the same object, with its hooks."""
    for name in vars(PWLU()).keys() - vars(nn.Module()).keys():
        del unit.__dict__[name]
    new = {name: value for name, value in vars(module).items() if name not in vars(nn.Module())}
    unit.__dict__.update(new, _parameters=module._parameters, _buffers=module._buffers, _modules=module._modules)
    unit.__class__ = type(module)  # type: ignore[assignment]
