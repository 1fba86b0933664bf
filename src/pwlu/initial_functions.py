"""Initial functions of a PWLU by name, each with the positions of its kinks, and bounds that fit them."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pwlu import reference


class InitialFunction(NamedTuple):
    """A function that a PWLU can start as.

    Attributes:
        function: from tensor to tensor, element by element.
        kinks: where its slope jumps, at most two positions. A knot is placed on each of them.
        slopes: its slopes towards minus and plus infinity, or None if they are not known.
        name: its name.
        channels: the number of channels, if it differs between channels. Then it takes x of shape (C, J).
    """

    function: Callable[[Tensor], Tensor]
    kinks: tuple[float, ...] = ()
    slopes: tuple[float, float] | None = None
    name: str = ""
    channels: int = 1


class Slopes:
    """PReLU with one slope per channel, as a function of x (C, J), or of x (K C, J) for K units."""

    def __init__(self, slopes: Tensor) -> None:
        self.slopes = slopes.detach().to("cpu", torch.float64).clone()

    def __call__(self, x: Tensor) -> Tensor:
        """Return PReLU(x)."""
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
    """Return the initial function for a name, a function, or an :class:`InitialFunction`.

    A function that is not in :data:`INITIAL_FUNCTIONS` is assumed to have no kinks.

    Raises:
        ValueError: if the name is not known, or the argument is none of these.
    """
    if isinstance(init, InitialFunction):
        return init
    if isinstance(init, nn.Module):
        raise ValueError(f"pwlu: init must be a name or a function, not the module {init}. Write 'silu' or F.silu")
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
    """Return bounds with a knot on every kink (at most two), as close as possible to the given bounds.

    With one kink, both bounds shift by up to half an interval. With two kinks, the interval width first changes so that the
    distance of the kinks is a multiple of it; then both bounds shift.

    Raises:
        ValueError: if a kink lies outside the bounds, or if two kinks are too close together for these intervals.
    """
    left, right = bounds
    step = (right - left) / intervals
    for kink in kinks:
        if not left <= kink <= right:
            raise ValueError(
                f"pwlu: init={init!r} has a kink at {kink:g}, outside of bounds=({left:g}, {right:g}). "
                f"Write bounds that contain {', '.join(f'{k:g}' for k in kinks)}"
            )
    if len(kinks) == 2:
        between = max(1, round((kinks[1] - kinks[0]) / step))
        if between > intervals:  # only by rounding, because both kinks lie within the bounds
            between = intervals
        step = (kinks[1] - kinks[0]) / between
    if kinks:
        before = round((kinks[0] - left) / step)  # number of intervals left of the first kink
        max_before = intervals - (round((kinks[1] - kinks[0]) / step) if len(kinks) == 2 else 0)
        left = kinks[0] - min(max(before, 0), max_before) * step
    fitted = left, left + intervals * step
    if max(abs(a - b) for a, b in zip(fitted, bounds, strict=True)) > (bounds[1] - bounds[0]) / intervals * 1.001:
        raise ValueError(
            f"pwlu: {intervals} intervals between bounds=({bounds[0]:g}, {bounds[1]:g}) are too wide to place a knot on each "
            f"kink of init={init!r}, at {', '.join(f'{k:g}' for k in kinks)}. Write more intervals or narrower bounds"
        )
    return fitted


def initial_error(
    start: InitialFunction, bounds: tuple[float, float], intervals: int, between: tuple[float, float] = (-100, 100)
) -> float:
    """Return the largest difference between a new unit and its initial function for x in the range `between`, in float64."""
    return float(_initial_errors(start, [bounds], intervals, between)[0])


def best_bounds(start: InitialFunction, intervals: int, bounds: tuple[float, float] | None = None) -> tuple[float, float]:
    """Return bounds for which a new unit is close to its initial function everywhere.

    Without `bounds`, return (-3, 3) if the unit is exact there, else the best bounds of a grid search. Given bounds are only
    widened until they contain all kinks.
    """
    left, right = bounds or (-3.0, 3.0)
    widened = min([left, *start.kinks]), max([right, *start.kinks])
    try:
        fitted = fit_bounds(widened, intervals, start.kinks, start.name)
    except ValueError:
        if bounds is not None:
            raise
        return _search_bounds(start, intervals)
    return fitted if bounds is not None or initial_error(start, fitted, intervals) < 1e-6 else _search_bounds(start, intervals)


def enough_intervals(start: InitialFunction, least: int, tolerance: float, bounds: tuple[float, float] | None = None) -> int:
    """Return a number of intervals, at least `least`, for which a new unit is within `tolerance` of its initial function.

    The number grows by half at a time, up to 512. If 512 is not enough, return 512.
    """
    intervals = least
    while intervals < 512 and initial_error(start, best_bounds(start, intervals, bounds), intervals) > tolerance:
        intervals = min(512, intervals + (intervals + 1) // 2)
    return intervals


_COARSE_GRID = (0.25, 0.5, *map(float, range(1, 11)), 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 100.0)
_SEARCH_CACHE: dict[Any, tuple[float, float]] = {}  # keyed by values, because many function objects compute the same function


def _search_bounds(start: InitialFunction, intervals: int) -> tuple[float, float]:
    """Return the bounds with the smallest error: the best of a coarse grid, then of a fine grid around these."""
    with torch.no_grad():
        values = start.function(_test_inputs((-100, 100)).expand(start.channels, -1))
    key = values.numpy().tobytes(), start.kinks, start.slopes, intervals
    if key not in _SEARCH_CACHE:
        left, right = _best_of_grid(start, intervals, [-b for b in _COARSE_GRID], _COARSE_GRID)
        _SEARCH_CACHE[key] = _best_of_grid(start, intervals, [-b for b in _fine_grid(-left)], _fine_grid(right))
    return _SEARCH_CACHE[key]


def _fine_grid(bound: float) -> list[float]:
    """Return a grid between the neighbours of a bound in the coarse grid, in steps of 1/4 or at most 8 steps."""
    low = max((b for b in _COARSE_GRID if b < bound - 0.2), default=0.25)
    high = min((b for b in _COARSE_GRID if b > bound + 0.2), default=100.0)
    steps = min(8, round(4 * (high - low))) or 1
    return [low + (high - low) * n / steps for n in range(steps + 1)]


def _best_of_grid(
    start: InitialFunction, intervals: int, lefts: Sequence[float], rights: Sequence[float]
) -> tuple[float, float]:
    choices = [(start.kinks[0], start.kinks[1])] if len(start.kinks) == 2 else []
    for left, right in itertools.product(lefts, rights):
        with contextlib.suppress(ValueError):  # no knots on the kinks with these bounds
            choices.append(fit_bounds((left, right), intervals, start.kinks, start.name))
    errors = _initial_errors(start, choices, intervals).clamp(min=1e-6).tolist()
    return min(zip(errors, choices, strict=True), key=lambda pair: (pair[0], abs(pair[1][0] + 3) + abs(pair[1][1] - 3)))[1]


def _test_inputs(between: tuple[float, float]) -> Tensor:
    """Return the inputs at which errors are measured: 0.01 apart near 0, and 1 apart far from it."""
    options: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    x = torch.cat([torch.linspace(-10, 10, 2001, **options), torch.linspace(-100, 100, 201, **options)])
    return torch.cat([x[(x >= between[0]) & (x <= between[1])], torch.linspace(*between, 201, **options)]).unique()


def _initial_errors(
    start: InitialFunction, choices: Sequence[tuple[float, float]], intervals: int, between: tuple[float, float] = (-100, 100)
) -> Tensor:
    """Return :func:`initial_error` for each choice of bounds."""
    x = _test_inputs(between)
    left, right = torch.tensor(choices, dtype=torch.float64, device="cpu").repeat_interleave(start.channels, 0).T
    with torch.no_grad():
        units = (left, right, *initial_parameters(start, left, right, intervals))
        y = reference.forward(x[:, None].expand(-1, len(left)), *units, channel_dim=1)
        expected = start.function(x.expand(start.channels, -1)).T.repeat(1, len(choices))
    return (y - expected).abs().amax(0).view(-1, start.channels).amax(1)


def far_slopes(function: Callable[[Tensor], Tensor]) -> tuple[float, float] | None:
    """Return the slopes of a function towards minus and plus infinity, or None if they do not converge."""
    x = torch.tensor([-4e3, -2e3, -1e3, 1e3, 2e3, 4e3], dtype=torch.float64, device="cpu")
    with torch.no_grad():
        left, left_nearer, _, right_nearer, right = (function(x).double().diff() / x.diff()).tolist()
    settled = all(abs(a - b) <= 1e-3 * max(1.0, abs(b)) for a, b in ((left_nearer, left), (right_nearer, right)))
    return (round(left, 5), round(right, 5)) if settled else None  # also None for NaN and infinity


def initial_parameters(start: InitialFunction, left: Tensor, right: Tensor, intervals: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return heights, left slope and right slope of a unit with these bounds (C,) that starts as the function.

    The outer slopes are the known slopes towards infinity, if there are any.
    """
    heights, left_slope, right_slope = reference.start(start.function, left, right, intervals)
    if start.slopes is not None:
        left_slope, right_slope = (torch.full_like(left, slope) for slope in start.slopes)
    return heights, left_slope, right_slope
