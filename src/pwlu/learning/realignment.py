"""Realignment: the bounds of every unit go where its inputs are, and its function back to the start."""

from typing import NamedTuple

import torch
from torch import nn

from pwlu import reference
from pwlu.initial_functions import find_initial_function
from pwlu.module import PWLU, require_units
from pwlu.reference import Blocks
from pwlu.text import abbreviate


class Realigned(NamedTuple):
    """What :func:`realign_` did to one unit: of its channels, how many were left as they were."""

    name: str
    channels: int
    kept: int


@torch.no_grad()
def realign_(model: nn.Module) -> list[Realigned]:
    """Put the bounds of every PWLU where its inputs are, and its function back to the start: what happens at step T'.

        B_L = mu - 3 sigma,  B_R = mu + 3 sigma,  Y_k = f(B_k),  K_L, K_R = slopes of f over one more interval

    with f the start (``init``), and mu and sigma the running statistics of Phase I. Parameters are written in place. A channel
    that has no statistics, or a sigma of 0, keeps the parameters it has, and so does a unit that was frozen. A frozen block
    (``scale_gradients(left=0)``) keeps its values; the others then fit f between the bounds that result.
    """
    units = require_units("realign_", model)
    if done := [name for name, unit in units.items() if unit.statistics.realigned]:
        raise RuntimeError(
            f"realign_: {abbreviate(done)} had its Phase I already; realigning again would undo what was learned. "
            "To begin anew: call reset_parameters() on the units."
        )
    if not any(unit.statistics.updates.any() for unit in units.values()):
        raise RuntimeError(
            "realign_: no PWLU has statistics of its input yet. Train some steps, after model.train(), with "
            "pwlu.TwoPhase(model, optimizer, realign_at=...)"
        )
    return [_realign(name, unit) for name, unit in units.items()]


def _realign(name: str, unit: PWLU) -> Realigned:
    statistics, old = unit.statistics, Blocks(*(block.detach().to("cpu", torch.float64) for block in unit.blocks()))
    held = _held(unit)
    mu, sigma = (s.to("cpu", torch.float64) for s in (statistics.running_mean, statistics.running_std))
    left, right = torch.where(held.left, old.left, mu - 3 * sigma), torch.where(held.right, old.right, mu + 3 * sigma)
    # An interval must be wider than the parameters' rounding, or knots would fall together.
    roundoff = torch.finfo(unit.weight.dtype).eps * torch.maximum(left.abs(), right.abs())
    usable = (statistics.updates > 0).cpu() & ((right - left) / unit.intervals > 4 * roundoff)
    stored = [bound.to(unit.weight.dtype).to(reference.compute_dtype(unit.weight)) for bound in (left, right)]
    usable &= (stored[1] - stored[0]).isfinite()  # as it will be computed
    left, right = torch.where(usable, left, old.left), torch.where(usable, right, old.right)
    new = Blocks(left, right, *reference.start(find_initial_function(unit.init).function, left, right, unit.intervals))
    moves = Blocks(*((usable[:, None] if still.ndim == 2 else usable) & ~still for still in held))
    unit.assign(**{n: torch.where(m, v, o) for n, m, v, o in zip(Blocks._fields, moves, new, old, strict=True)})
    statistics.realigned.fill_(True)
    statistics.pool.zero_()
    if unit.phase == 1:
        unit.phase = 2
    moved = torch.cat([move.reshape(unit.channels, -1) for move in moves], 1).any(1)
    return Realigned(name, unit.channels, int((~moved).sum()))


def _held(unit: PWLU) -> Blocks:
    """Return what is frozen, entry by entry: all of a unit that needs no gradient, and blocks whose gradient is scaled by 0."""
    scale = unit.gradient_scale
    if scale is None or not unit.weight.requires_grad:
        scale = torch.full((unit.channels * (unit.intervals + 5),), float(unit.weight.requires_grad))
    return reference.unpack(scale.cpu() == 0, unit.intervals)
