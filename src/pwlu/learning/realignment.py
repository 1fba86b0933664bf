"""Realignment: move the bounds of every PWLU to its inputs, and reset it to its initial function."""

from typing import Any, NamedTuple

import torch
from torch import nn

from pwlu import reference
from pwlu.common.text import abbreviate
from pwlu.initial_functions import find_initial_function
from pwlu.reference import Blocks
from pwlu.units.dynamic import DynamicPWLU
from pwlu.units.module import PWLU, apply_constraint, exact_blocks, require_own_weights, require_units
from pwlu.units.nonuniform import NonUniformPWLU

OWN_BOUNDS = "the bounds of each move to its own inputs"  # why units that share a weight cannot realign or regrid


class Realigned(NamedTuple):
    """The result of :func:`realign_` for one PWLU.

    Attributes:
        name: the name of the module.
        channels: its number of channels.
        kept: the number of channels that were left unchanged.
    """

    name: str
    channels: int
    kept: int


@torch.no_grad()
def realign_(model: nn.Module) -> list[Realigned]:
    """Realign all PWLUs of a model in place: move their bounds to their inputs, and reset them to their initial function.

    :class:`pwlu.TwoPhase` does this at the end of Phase I, at step T'. The new parameters are::

        B_L = mu - 3 sigma,  B_R = mu + 3 sigma,  Y_k = f(B_k),  K_L, K_R = slopes of f over one more interval on each side

    Here f is the initial function (``init``), and mu and sigma are the running statistics of Phase I. A channel keeps its
    parameters if it has no statistics, if its sigma is 0, or if the PWLU is frozen. A frozen block
    (``scale_gradients(left=0)``) keeps its values; the other blocks then fit f between the resulting bounds. Constraints
    (:func:`pwlu.constrain_`) are applied to the result.

    Args:
        model: a model with PWLUs that has trained in Phase I.

    Returns:
        One :class:`pwlu.learning.realignment.Realigned` per PWLU: name, number of channels, and number of channels kept.

    Raises:
        ValueError: if the model has no PWLUs, or two of them share one weight.
        RuntimeError: if a PWLU is already realigned, or no PWLU has statistics.

    Example::

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), pwlu.PWLU(channels=8))
        optimizer = torch.optim.SGD(pwlu.parameter_groups(model, lr=0.1))
        phases = pwlu.TwoPhase(model, optimizer, realign_at=100)
        model(torch.randn(16, 4)).sum().backward()
        optimizer.step()
        pwlu.realign_(model)  # now, instead of at step 100
    """
    units = require_units("realign_", model)
    require_own_weights("realign_", units, OWN_BOUNDS)
    if done := [name for name, unit in units.items() if unit.statistics.realigned]:
        raise RuntimeError(
            f"realign_: {abbreviate(done)} is already realigned; realigning again would undo what it has learned. "
            "To start again, call reset_parameters() on every PWLU."
        )
    if not any(unit.statistics.updates.any() for unit in units.values()):
        raise RuntimeError(
            "realign_: no PWLU has statistics of its input yet. Train for some steps in training mode (model.train()) with "
            "pwlu.TwoPhase(model, optimizer, realign_at=...)"
        )
    return [_realign(name, unit) for name, unit in units.items()]


def _realign(name: str, unit: PWLU) -> Realigned:
    kind = unit._layout.Blocks
    statistics, old = unit.statistics, exact_blocks(unit)
    frozen, old_right = _frozen_entries(unit), unit.right.detach().to("cpu", torch.float64)
    right_is_frozen = frozen.log_widths.all(1) if isinstance(unit, NonUniformPWLU) else frozen.right
    mu, sigma = (s.to("cpu", torch.float64) for s in (statistics.running_mean, statistics.running_std))
    left, right = torch.where(frozen.left, old.left, mu - 3 * sigma), torch.where(right_is_frozen, old_right, mu + 3 * sigma)
    # An interval must be wider than the rounding error of the parameters, or neighbouring knots would coincide.
    roundoff = torch.finfo(unit.weight.dtype).eps * torch.maximum(left.abs(), right.abs())
    usable = (statistics.updates > 0).cpu() & ((right - left) / unit.intervals > 4 * roundoff)
    stored = [bound.to(unit.weight.dtype).to(reference.compute_dtype(unit.weight)) for bound in (left, right)]
    usable &= (stored[1] - stored[0]).isfinite()  # in the dtypes of the forward pass
    left, right = torch.where(usable, left, old.left), torch.where(usable, right, old_right)
    new: Any
    if isinstance(unit, NonUniformPWLU):
        new = unit.start_between(left, right, frozen.log_widths)
    else:
        new = Blocks(left, right, *reference.start(find_initial_function(unit.init).function, left, right, unit.intervals))
    moves = kind(*((usable[:, None] if block.ndim == 2 else usable) & ~block for block in frozen))
    unit.assign(**{n: torch.where(m, v, o) for n, m, v, o in zip(kind._fields, moves, new, old, strict=True)})
    moved = torch.cat([move.reshape(unit.channels, -1) for move in moves], 1).any(1)
    if isinstance(unit, DynamicPWLU):
        unit.forget_directions(moved)
    apply_constraint(unit)
    statistics.realigned.fill_(True)
    statistics.pool.zero_()
    if unit.phase == 1:
        unit.phase = 2
    return Realigned(name, unit.channels, int((~moved).sum()))


def _frozen_entries(unit: PWLU) -> Any:
    """Return a mask of frozen entries: all if the weight needs no gradient, else those with a gradient factor of 0."""
    scale = unit.gradient_scale
    if scale is None or not unit.weight.requires_grad:
        scale = torch.full((unit.channels * unit._layout.size(unit.intervals),), float(unit.weight.requires_grad))
    return unit._layout.unpack(scale.cpu() == 0, unit.intervals)
