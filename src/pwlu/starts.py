"""Functions a unit can start as, by name, with the places where each has a kink."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pwlu import reference


class Start(NamedTuple):
    """A function, its kinks (a knot on each lets a unit equal it there), its slopes far out where known, and its name."""

    function: Callable[[Tensor], Tensor]
    kinks: tuple[float, ...] = ()
    slopes: tuple[float, float] | None = None
    name: str = ""


def _identity(x: Tensor) -> Tensor:
    return x


_SELU_SCALE = 1.0507009873554805
STARTS: dict[str, Start] = {
    "relu": Start(F.relu, (0.0,), (0.0, 1.0)),
    "relu6": Start(F.relu6, (0.0, 6.0), (0.0, 0.0)),
    "leaky_relu": Start(F.leaky_relu, (0.0,), (0.01, 1.0)),
    "elu": Start(F.elu, (), (0.0, 1.0)),
    "celu": Start(F.celu, (), (0.0, 1.0)),
    "selu": Start(F.selu, (0.0,), (0.0, _SELU_SCALE)),
    "gelu": Start(F.gelu, (), (0.0, 1.0)),
    "silu": Start(F.silu, (), (0.0, 1.0)),
    "swish": Start(F.silu, (), (0.0, 1.0)),
    "mish": Start(F.mish, (), (0.0, 1.0)),
    "softplus": Start(F.softplus, (), (0.0, 1.0)),
    "hardswish": Start(F.hardswish, (-3.0, 3.0), (0.0, 1.0)),
    "hardsigmoid": Start(F.hardsigmoid, (-3.0, 3.0), (0.0, 0.0)),
    "hardtanh": Start(F.hardtanh, (-1.0, 1.0), (0.0, 0.0)),
    "sigmoid": Start(torch.sigmoid, (), (0.0, 0.0)),
    "tanh": Start(torch.tanh, (), (0.0, 0.0)),
    "identity": Start(_identity, (), (1.0, 1.0)),
}
STARTS = {name: start._replace(name=name) for name, start in STARTS.items()}


def find_start(init: "str | Callable[[Tensor], Tensor] | Start") -> Start:
    """The start of that name; a function that is none of ours is taken as it is, without kinks."""
    if isinstance(init, Start):
        return init
    if isinstance(init, nn.Module):
        raise ValueError(f"pwlu: init must be a name or a function, not a module: write 'silu' or F.silu, not {init}")
    if not isinstance(init, str) and not callable(init):
        raise ValueError(f"pwlu: init must be a name such as 'relu' or a function of a tensor, not {init!r}")
    if not isinstance(init, str):
        same = F.relu if init is torch.relu else init
        known = next((start for start in STARTS.values() if start.function is same), None)
        return known or Start(init, name=getattr(init, "__name__", repr(init)))
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


def start_error(start: Start, bounds: tuple[float, float], intervals: int) -> float:
    """The largest difference between a unit at its start and the function, for |x| <= 100, in float64."""
    return float(_start_errors(start, [bounds], intervals)[0])


def best_bounds(start: Start, intervals: int, bounds: tuple[float, float] | None = None) -> tuple[float, float]:
    """Bounds with which a unit comes close to the function everywhere: (-3, 3) if that is exact, else the best of a grid.

    Given bounds are only widened, where a kink lies outside. A function whose slopes far out are not known gets (-3, 3).
    """
    left, right = bounds or (-3.0, 3.0)
    widened = min([left, *start.kinks]), max([right, *start.kinks])
    try:
        fitted = fit_bounds(widened, intervals, start.kinks, start.name)
    except ValueError:
        if bounds is not None:
            raise
        return _searched(start, intervals)
    if bounds is not None or start.slopes is None or start_error(start, fitted, intervals) < 1e-6:
        return fitted
    return _searched(start, intervals)


@functools.cache
def _searched(start: Start, intervals: int) -> tuple[float, float]:
    choices = [(start.kinks[0], start.kinks[1])] if len(start.kinks) == 2 else []
    for left, right in itertools.product((-b / 4 for b in range(4, 41)), (b / 4 for b in range(4, 41))):
        with contextlib.suppress(ValueError):  # such bounds and kinks do not go together
            choices.append(fit_bounds((left, right), intervals, start.kinks, start.name))
    errors = _start_errors(start, choices, intervals).clamp(min=1e-6).tolist()
    return min(zip(errors, choices, strict=True), key=lambda pair: (pair[0], abs(pair[1][0] + 3) + abs(pair[1][1] - 3)))[1]


def _start_errors(start: Start, choices: Sequence[tuple[float, float]], intervals: int) -> Tensor:
    options: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    far = torch.logspace(1, 2, 50, **options)
    x = torch.cat([-far, torch.linspace(-10, 10, 2001, **options), far])
    left, right = torch.tensor(choices, **options).T
    units = (left, right, *start_parameters(start, left, right, intervals))
    with torch.no_grad():
        differences = reference.forward(x[:, None].expand(-1, len(choices)), *units, channel_dim=1) - start.function(x)[:, None]
    return differences.abs().amax(0)


def start_parameters(start: Start, left: Tensor, right: Tensor, intervals: int) -> tuple[Tensor, Tensor, Tensor]:
    """Heights and outer slopes of units with these bounds (C,) that begin as the function, with its own slopes far out."""
    heights, left_slope, right_slope = reference.start(start.function, left, right, intervals)
    if start.slopes is not None:
        left_slope, right_slope = (torch.full_like(left, slope) for slope in start.slopes)
    return heights, left_slope, right_slope
