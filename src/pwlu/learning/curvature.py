"""A penalty that keeps learned functions smooth."""

import functools
from collections import defaultdict

import torch
from torch import Tensor, nn

from pwlu.module import gathered, require_units
from pwlu.reference import unpack


def curvature(model: nn.Module) -> Tensor:
    r"""How much the functions of all PWLUs bend, to be added to the loss: ``loss + 0.001 * pwlu.curvature(model)``.

    .. math:: \sum_{\text{channels}} \sum_{k=0}^{N} (Y_{k+1} - 2 Y_k + Y_{k-1})^2, \qquad
              Y_{-1} = Y_0 - K_L d, \quad Y_{N+1} = Y_N + K_R d, \quad d = \frac{B_R - B_L}{N}

    A second difference of heights is the jump of the slope at a knot, times d. It is 0 for a straight line; a ReLU whose kink
    is a knot has :math:`d^2`. Heights are penalised and not slopes: with slopes the largest stable step of gradient descent
    would shrink with :math:`d^2`, to nothing in a channel with narrow bounds.

    In Phase I :class:`pwlu.TwoPhase` lets no PWLU move, so the penalty may be there from the first step.

    Returns:
        A tensor without dimensions, on the device of the first PWLU, with a gradient. Units of one N are computed together.
    """
    units = require_units("curvature", model).values()
    alike = defaultdict(list)
    for unit in units:
        alike[unit.intervals, unit.weight.device, unit.weight.dtype].append(gathered(unit.weight))
    sums: list[Tensor] = []
    for (intervals, device, _), weights in alike.items():
        rows = _rows(tuple(weight.shape[0] for weight in weights), intervals, device)
        left, right, left_slope, right_slope, heights = torch.cat(weights)[rows].split([1, 1, 1, 1, intervals + 1], 1)
        step = (right - left) / intervals
        rises = torch.cat([left_slope * step, heights.diff(), right_slope * step], 1)
        sums.append(rises.diff().square().sum())
    return torch.stack([each.to(sums[0]) for each in sums]).sum()


@functools.lru_cache(64)
def _rows(lengths: tuple[int, ...], intervals: int, device: torch.device) -> Tensor:
    """Return where the N + 5 numbers of each function are in the weights, one after the other: (functions, N + 5)."""
    found = []
    for places in torch.arange(sum(lengths)).split(lengths):
        left, right, heights, left_slope, right_slope = unpack(places, intervals)
        found.append(torch.cat([torch.stack([left, right, left_slope, right_slope], 1), heights], 1))
    return torch.cat(found).to(device)
