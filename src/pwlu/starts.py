"""Functions a unit can start as, by name, with the places where each has a kink."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Start(NamedTuple):
    """A function and its kinks: a knot on each lets a unit equal it there."""

    function: Callable[[Tensor], Tensor]
    kinks: tuple[float, ...] = ()


def _identity(x: Tensor) -> Tensor:
    return x


STARTS: dict[str, Start] = {
    "relu": Start(F.relu, (0.0,)),
    "relu6": Start(F.relu6, (0.0, 6.0)),
    "leaky_relu": Start(F.leaky_relu, (0.0,)),
    "elu": Start(F.elu),
    "selu": Start(F.selu, (0.0,)),
    "gelu": Start(F.gelu),
    "silu": Start(F.silu),
    "swish": Start(F.silu),
    "mish": Start(F.mish),
    "softplus": Start(F.softplus),
    "hardswish": Start(F.hardswish, (-3.0, 3.0)),
    "hardsigmoid": Start(F.hardsigmoid, (-3.0, 3.0)),
    "hardtanh": Start(F.hardtanh, (-1.0, 1.0)),
    "sigmoid": Start(torch.sigmoid),
    "tanh": Start(torch.tanh),
    "identity": Start(_identity),
}


def find_start(init: str | Callable[[Tensor], Tensor]) -> Start:
    """The start of that name; a function that is none of ours is taken as it is, without kinks."""
    if isinstance(init, nn.Module):
        raise ValueError(f"pwlu: init must be a name or a function, not a module: write 'silu' or F.silu, not {init}")
    if not isinstance(init, str):
        same = F.relu if init is torch.relu else init
        return next((start for start in STARTS.values() if start.function is same), Start(init))
    if init not in STARTS:
        raise ValueError(f"pwlu: init {init!r} is not known. Write one of {', '.join(STARTS)}, or pass a function")
    return STARTS[init]


def fit_bounds(bounds: tuple[float, float], intervals: int, kinks: tuple[float, ...], init: object) -> tuple[float, float]:
    """Bounds as near as possible to the given ones with a knot on every kink (at most two).

    One kink: the bounds slide by up to half an interval. Two: the interval becomes the nearest width of which their
    distance is a multiple, then the bounds slide. Bounds that leave a kink outside are an error, because the unit would
    then not start as the function it was asked for; so are two kinks too close together for these intervals.
    """
    left, right = bounds
    step = (right - left) / intervals
    for kink in kinks:
        if not left <= kink <= right:
            raise ValueError(
                f"pwlu: init={init!r} bends at {kink:g}, outside of bounds=({left:g}, {right:g}). "
                f"Write bounds that contain {', '.join(f'{k:g}' for k in kinks)}"
            )
    if len(kinks) == 2:
        between = max(1, round((kinks[1] - kinks[0]) / step))
        if between > intervals:  # only by rounding: both kinks lie within the bounds
            between = intervals
        step = (kinks[1] - kinks[0]) / between
    if kinks:
        before = round((kinks[0] - left) / step)  # intervals left of the first kink
        most = intervals - (round((kinks[1] - kinks[0]) / step) if len(kinks) == 2 else 0)
        left = kinks[0] - min(max(before, 0), most) * step
    fitted = left, left + intervals * step
    if max(abs(a - b) for a, b in zip(fitted, bounds, strict=True)) > (bounds[1] - bounds[0]) / intervals * 1.001:
        raise ValueError(
            f"pwlu: {intervals} intervals between bounds=({bounds[0]:g}, {bounds[1]:g}) are too wide for a knot on each kink "
            f"of init={init!r}, at {', '.join(f'{k:g}' for k in kinks)}. Write more intervals or narrower bounds"
        )
    return fitted
