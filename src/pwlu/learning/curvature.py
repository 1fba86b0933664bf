"""A penalty that keeps learned functions smooth."""

from collections import defaultdict

import torch
from torch import Tensor, nn

from pwlu.learning.function_table import bends, interval
from pwlu.reference import pack, parameter_indices
from pwlu.units.dynamic import DynamicPWLU
from pwlu.units.module import require_units
from pwlu.units.nonuniform import NonUniformPWLU
from pwlu.units.sharding import gathered


def curvature(model: nn.Module) -> Tensor:
    """Return a penalty on the curvature of all PWLUs of a model, to add to the loss.

    The penalty is the sum of squared second differences of the heights, over all channels and knots::

        sum over channels and k = 0..N of (Y_{k+1} - 2 Y_k + Y_{k-1})^2
        with Y_{-1} = Y_0 - K_L d,  Y_{N+1} = Y_N + K_R d,  d = (B_R - B_L)/N

    A second difference is d times the jump of the slope at a knot. The penalty is 0 for a straight line, and d^2 for a ReLU
    with a knot on its kink. It penalizes heights instead of slopes. With slopes, the largest stable step of gradient descent
    would be proportional to d^2, which vanishes for narrow bounds.

    Functions that several PWLUs share count once. For a :class:`pwlu.DynamicPWLU`, the penalty of each direction is added, as
    that of a function with outer slopes of 0.

    You can add the penalty from the first step on: :class:`pwlu.TwoPhase` keeps the PWLUs unchanged in Phase I.

    Args:
        model: a model with PWLUs.

    Returns:
        The penalty, a 0-d tensor with a gradient, on the device of the first PWLU.

    Raises:
        TypeError: if ``model`` is not a module, or has a :class:`pwlu.NonUniformPWLU`.
        ValueError: if it has no PWLUs.

    Example::

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), pwlu.PWLU(channels=8))
        loss = model(torch.randn(2, 4)).sum() + 0.001 * pwlu.curvature(model)
        loss.backward()
    """
    why = "and the penalty needs equally spaced knots. Leave the penalty out, or convert the model with to='pwlu'"
    units = require_units("curvature", model, {NonUniformPWLU: why}).values()
    once = {(id(u._parameters.get("weight", u)), id(u._parameters.get("direction_weight"))): u for u in units}
    alike: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for unit in once.values():
        together = alike[unit.intervals, unit.weight.device, unit.weight.dtype]
        together.append(gathered(unit.weight))
        if isinstance(unit, DynamicPWLU):
            left, right, _, slope, _ = (block.detach() for block in unit.blocks())
            flat = torch.zeros_like(slope)
            together += [pack(left, right, heights, flat, flat) for heights in unit.direction_heights()]
    sums: list[Tensor] = []
    for (intervals, device, _), weights in alike.items():  # few operators, even for hundreds of units
        rows = parameter_indices(tuple(weight.shape[0] for weight in weights), intervals, device)
        table = torch.cat(weights)[rows]
        sums.append(bends(table, interval(table)).square().sum())
    return torch.stack([each.to(sums[0]) for each in sums]).sum()
