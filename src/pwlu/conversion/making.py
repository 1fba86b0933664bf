"""Making the new activation of a site: a PWLU that starts as something, or another activation."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from pwlu.baselines import PAU, FReLU, ReLU, activation, check_name
from pwlu.conversion.conversion_report import Site
from pwlu.conversion.probing import refusal
from pwlu.conversion.sites import Found
from pwlu.conversion.tracing import Call
from pwlu.initial_functions import (
    INITIAL_FUNCTIONS,
    InitialFunction,
    best_bounds,
    enough_intervals,
    far_slopes,
    find_initial_function,
    initial_error,
)
from pwlu.module import PWLU

Factory = Callable[[int, Site], nn.Module]


def maker(
    to: str | Factory, bounds: Any, intervals: int, granularity: str, init: Any, tolerance: float | None
) -> Callable[[Found], nn.Module]:
    """Return a function that makes the new activation of a site; wrong arguments are found now."""
    if granularity not in ("channel", "layer"):
        raise ValueError(f"convert_: granularity must be 'channel' or 'layer', not {granularity!r}")
    if to != "pwlu":
        _check_other(to, granularity)
        return partial(_other, to, granularity)
    if tolerance is not None and not 0 < tolerance < math.inf:
        raise ValueError(f"convert_: tolerance must be a number above 0, such as 1e-3, not {tolerance!r}")
    if isinstance(bounds, str) and bounds != "sample":
        raise ValueError(f"convert_: bounds must be two numbers such as (-3.0, 3.0), or 'sample', not {bounds!r}")
    fixed = None if bounds == "sample" else bounds
    start = find_initial_function("relu" if init == "same" else init)
    start = _usable(start, f"init={start.name}", "channel")
    PWLU(1, intervals, fixed or (-3.0, 3.0), init="identity")  # intervals and bounds are checked before bounds are fitted
    PWLU(1, intervals, fixed or best_bounds(start, intervals), init=start)
    given = start if init != "same" else None

    def unit(found: Found) -> nn.Module:
        site, call = found.site, found.calls[0]
        assert site.start is not None
        start = given or _usable(site.start, f"{site.name}, {site.was}", granularity)
        near = fixed or (found.inputs if _fits(start, found.inputs, intervals) else None)
        enough = intervals if tolerance is None else enough_intervals(start, intervals, tolerance, near)
        fitted = best_bounds(start, enough, near)
        by_name = start.name if INITIAL_FUNCTIONS.get(start.name) == start else start
        channels = _channels(site, granularity)
        act = PWLU(channels, enough, fitted, init=by_name, channel_dim=site.channel_dim, device=call.device, dtype=_wide(call))
        if given in (None, site.start):
            site.error = initial_error(start, act.bounds, enough, found.inputs or (-100, 100))
        return act

    return unit


def _channels(site: Site, granularity: str) -> int:
    return site.channels if granularity == "channel" else 1


def _fits(start: InitialFunction, inputs: tuple[float, float] | None, intervals: int) -> bool:
    """Return whether bounds at these inputs leave a knot for each kink."""
    try:
        best_bounds(start, intervals, inputs)
    except ValueError:
        return False
    return True


def _usable(start: InitialFunction, what: str, granularity: str) -> InitialFunction:
    """Return the start, with its slopes far out; an error, which names it `what`, if a PWLU cannot start as that."""
    if (start.channels > 1 and granularity == "channel") or INITIAL_FUNCTIONS.get(start.name) == start:
        return start
    why = "differs from channel to channel" if start.channels > 1 else refusal(start.function)
    if why:
        raise ValueError(
            f"convert_: {what}, {why}: a function of one number cannot start as that. Write init='relu', say, or leave its "
            "kind out of kinds"
        )
    return start if start.slopes is not None else start._replace(slopes=far_slopes(start.function))


def _check_other(to: str | Factory, granularity: str) -> None:
    if isinstance(to, str):
        check_name(to)
    elif not callable(to):
        raise ValueError(f"convert_: to must be a name or a function of (channels, site), not {to!r}")
    if to == "frelu" and granularity == "layer":
        raise ValueError("convert_: FReLU has a window for each channel. Leave granularity out, or write to='prelu', say")


def _other(to: str | Factory, granularity: str, found: Found) -> nn.Module:
    """Another activation than PWLU."""
    site, call = found.site, found.calls[0]
    channels = _channels(site, granularity)
    if not isinstance(to, str):
        module = to(channels, site)
        if not isinstance(module, nn.Module):
            raise TypeError(f"convert_: to must return a module, but for {site.name} it returned {module!r}")
        return module
    flat = to == "frelu" and (len(site.shape) != 4 or site.layout == "several")
    site.reason = "as ReLU: FReLU needs a map" if flat else ""
    if to == "relu" or flat:
        return nn.ReLU() if site.kind == "relu" else ReLU()
    if to == "frelu":  # it convolves, and so is of the type of its input
        norm = "group" if found.runs > 1 else "batch"  # one batch norm would mix the statistics of several runs
        site.reason = f"with group norm: it runs {found.runs} times in a pass" if norm == "group" else ""
        return FReLU(site.channels, site.channel_dim, norm=norm).to(call.device, call.dtype)
    if to == "pau":
        assert site.start is not None
        pau = PAU(
            _usable(site.start, f"{site.name}, {site.was}", "layer"), call.device, _wide(call)
        )  # one function for the layer
        site.reason = f"starts within {pau.start_error:.2g} of {pau.start} for |x| <= 3"
        return pau
    return activation(to, channels, site.channel_dim).to(call.device, _wide(call))


def _wide(call: Call) -> torch.dtype:
    return torch.float64 if call.dtype == torch.float64 else torch.float32  # knots in 16 bits would be in the wrong places
