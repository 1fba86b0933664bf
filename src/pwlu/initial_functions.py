"""Functions a unit can start as, by name, with the places where each has a kink."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pwlu import reference


class InitialFunction(NamedTuple):
    """A function, its kinks (a knot on each lets a unit equal it there), its slopes far out where known, and its name.

    ``channels``: more than 1 if the function differs from channel to channel. It then takes x of the shape (C, J).
    """

    function: Callable[[Tensor], Tensor]
    kinks: tuple[float, ...] = ()
    slopes: tuple[float, float] | None = None
    name: str = ""
    channels: int = 1


class Slopes:
    """PReLU with one slope per channel, as a function of x (C, J), or of (K C, J) for K units."""

    def __init__(self, slopes: Tensor) -> None:
        self.slopes = slopes.detach().to("cpu", torch.float64).clone()

    def __call__(self, x: Tensor) -> Tensor:
        """y."""
        slopes = self.slopes.to(x).repeat(len(x) // len(self.slopes))
        return x.clamp(min=0) + slopes[:, None] * x.clamp(max=0)


def _identity(x: Tensor) -> Tensor:
    return x


_SELU_SCALE = 1.0507009873554805
INITIAL_FUNCTIONS: dict[str, InitialFunction] = {
    "relu": InitialFunction(F.relu, (0.0,), (0.0, 1.0)),
    "relu6": InitialFunction(F.relu6, (0.0, 6.0), (0.0, 0.0)),
    "leaky_relu": InitialFunction(F.leaky_relu, (0.0,), (0.01, 1.0)),
    "elu": InitialFunction(F.elu, (), (0.0, 1.0)),
    "celu": InitialFunction(F.celu, (), (0.0, 1.0)),
    "selu": InitialFunction(F.selu, (0.0,), (0.0, _SELU_SCALE)),
    "gelu": InitialFunction(F.gelu, (), (0.0, 1.0)),
    "silu": InitialFunction(F.silu, (), (0.0, 1.0)),
    "swish": InitialFunction(F.silu, (), (0.0, 1.0)),
    "mish": InitialFunction(F.mish, (), (0.0, 1.0)),
    "softplus": InitialFunction(F.softplus, (), (0.0, 1.0)),
    "hardswish": InitialFunction(F.hardswish, (-3.0, 3.0), (0.0, 1.0)),
    "hardsigmoid": InitialFunction(F.hardsigmoid, (-3.0, 3.0), (0.0, 0.0)),
    "hardtanh": InitialFunction(F.hardtanh, (-1.0, 1.0), (0.0, 0.0)),
    "softsign": InitialFunction(F.softsign, (), (0.0, 0.0)),
    "logsigmoid": InitialFunction(F.logsigmoid, (), (1.0, 0.0)),
    "softshrink": InitialFunction(F.softshrink, (-0.5, 0.5), (1.0, 1.0)),
    "tanhshrink": InitialFunction(F.tanhshrink, (), (1.0, 1.0)),
    "sigmoid": InitialFunction(torch.sigmoid, (), (0.0, 0.0)),
    "tanh": InitialFunction(torch.tanh, (), (0.0, 0.0)),
    "identity": InitialFunction(_identity, (), (1.0, 1.0)),
}
INITIAL_FUNCTIONS = {name: start._replace(name=name) for name, start in INITIAL_FUNCTIONS.items()}


def find_initial_function(init: "str | Callable[[Tensor], Tensor] | InitialFunction") -> InitialFunction:
    """The start of that name; a function that is none of ours is taken as it is, without kinks."""
    if isinstance(init, InitialFunction):
        return init
    if isinstance(init, nn.Module):
        raise ValueError(f"pwlu: init must be a name or a function, not a module: write 'silu' or F.silu, not {init}")
    if not isinstance(init, str) and not callable(init):
        raise ValueError(f"pwlu: init must be a name such as 'relu' or a function of a tensor, not {init!r}")
    if not isinstance(init, str):
        same = F.relu if init is torch.relu else init
        known = next((start for start in INITIAL_FUNCTIONS.values() if start.function is same), None)
        return known or InitialFunction(init, name=getattr(init, "__name__", repr(init)))
    if init not in INITIAL_FUNCTIONS:
        raise ValueError(f"pwlu: init {init!r} is not known. Write one of {', '.join(INITIAL_FUNCTIONS)}, or pass a function")
    return INITIAL_FUNCTIONS[init]


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


def initial_error(
    start: InitialFunction, bounds: tuple[float, float], intervals: int, between: tuple[float, float] = (-100, 100)
) -> float:
    """Return the largest difference between a unit at its start and the function, for x between two numbers, in float64."""
    return float(_start_errors(start, [bounds], intervals, between)[0])


def best_bounds(start: InitialFunction, intervals: int, bounds: tuple[float, float] | None = None) -> tuple[float, float]:
    """Bounds with which a unit comes close to the function everywhere: (-3, 3) if that is exact, else the best of a grid.

    Given bounds are only widened, where a kink lies outside.
    """
    left, right = bounds or (-3.0, 3.0)
    widened = min([left, *start.kinks]), max([right, *start.kinks])
    try:
        fitted = fit_bounds(widened, intervals, start.kinks, start.name)
    except ValueError:
        if bounds is not None:
            raise
        return _searched(start, intervals)
    return fitted if bounds is not None or initial_error(start, fitted, intervals) < 1e-6 else _searched(start, intervals)


def enough_intervals(start: InitialFunction, least: int, tolerance: float, bounds: tuple[float, float] | None = None) -> int:
    """Return a number of intervals, `least` or more, with which a unit starts within the tolerance of the function.

    It grows by a half at a time, up to 512, where it stays if that is not enough.
    """
    intervals = least
    while intervals < 512 and initial_error(start, best_bounds(start, intervals, bounds), intervals) > tolerance:
        intervals = min(512, intervals + (intervals + 1) // 2)
    return intervals


_COARSE = (0.25, 0.5, *map(float, range(1, 11)), 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 100.0)
_FOUND: dict[Any, tuple[float, float]] = {}  # functions are many, but of few values


def _searched(start: InitialFunction, intervals: int) -> tuple[float, float]:
    """Return the bounds with the smallest error: the best of a coarse grid, then of a fine one around it."""
    with torch.no_grad():
        values = start.function(_places((-100, 100)).expand(start.channels, -1))
    key = values.numpy().tobytes(), start.kinks, start.slopes, intervals
    if key not in _FOUND:
        left, right = _best(start, intervals, [-b for b in _COARSE], _COARSE)
        _FOUND[key] = _best(start, intervals, [-b for b in _around(-left)], _around(right))
    return _FOUND[key]


def _around(bound: float) -> list[float]:
    """Quarters between the coarse neighbours of a bound, or as many steps where these are further apart."""
    low = max((b for b in _COARSE if b < bound - 0.2), default=0.25)
    high = min((b for b in _COARSE if b > bound + 0.2), default=100.0)
    steps = min(8, round(4 * (high - low))) or 1
    return [low + (high - low) * n / steps for n in range(steps + 1)]


def _best(start: InitialFunction, intervals: int, lefts: Sequence[float], rights: Sequence[float]) -> tuple[float, float]:
    choices = [(start.kinks[0], start.kinks[1])] if len(start.kinks) == 2 else []
    for left, right in itertools.product(lefts, rights):
        with contextlib.suppress(ValueError):  # such bounds and kinks do not go together
            choices.append(fit_bounds((left, right), intervals, start.kinks, start.name))
    errors = _start_errors(start, choices, intervals).clamp(min=1e-6).tolist()
    return min(zip(errors, choices, strict=True), key=lambda pair: (pair[0], abs(pair[1][0] + 3) + abs(pair[1][1] - 3)))[1]


def _places(between: tuple[float, float]) -> Tensor:
    """Return where errors are measured: 0.01 apart near 0, and further apart far out."""
    options: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    x = torch.cat([torch.linspace(-10, 10, 2001, **options), torch.linspace(-100, 100, 201, **options)])
    return torch.cat([x[(x >= between[0]) & (x <= between[1])], torch.linspace(*between, 201, **options)]).unique()


def _start_errors(
    start: InitialFunction, choices: Sequence[tuple[float, float]], intervals: int, between: tuple[float, float] = (-100, 100)
) -> Tensor:
    """Of each choice of bounds."""
    x = _places(between)
    left, right = torch.tensor(choices, dtype=torch.float64, device="cpu").repeat_interleave(start.channels, 0).T
    with torch.no_grad():
        units = (left, right, *initial_parameters(start, left, right, intervals))
        y = reference.forward(x[:, None].expand(-1, len(left)), *units, channel_dim=1)
        expected = start.function(x.expand(start.channels, -1)).T.repeat(1, len(choices))
    return (y - expected).abs().amax(0).view(-1, start.channels).amax(1)


def far_slopes(function: Callable[[Tensor], Tensor]) -> tuple[float, float] | None:
    """Return the slopes that a function tends to far out on either side; None if it tends to none."""
    x = torch.tensor([-4e3, -2e3, -1e3, 1e3, 2e3, 4e3], dtype=torch.float64, device="cpu")
    with torch.no_grad():
        left, left_nearer, _, right_nearer, right = (function(x).double().diff() / x.diff()).tolist()
    settled = all(abs(a - b) <= 1e-3 * max(1.0, abs(b)) for a, b in ((left_nearer, left), (right_nearer, right)))
    return (round(left, 5), round(right, 5)) if settled else None  # of NaN and infinity, too


def initial_parameters(start: InitialFunction, left: Tensor, right: Tensor, intervals: int) -> tuple[Tensor, Tensor, Tensor]:
    """Heights and outer slopes of units with these bounds (C,) that begin as the function, with its own slopes far out."""
    heights, left_slope, right_slope = reference.start(start.function, left, right, intervals)
    if start.slopes is not None:
        left_slope, right_slope = (torch.full_like(left, slope) for slope in start.slopes)
    return heights, left_slope, right_slope
