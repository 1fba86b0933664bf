"""Create the new activation of a site: a PWLU with its initial function, or another activation."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from pwlu.baselines import PAU, FReLU, ReLU, activation, check_name
from pwlu.conversion.conversion_report import Site
from pwlu.conversion.probing import why_unusable
from pwlu.conversion.sites import Candidate
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
from pwlu.units.dynamic import DynamicPWLU
from pwlu.units.module import PWLU
from pwlu.units.nonuniform import NonUniformPWLU

UNITS: dict[str, type[PWLU]] = {"pwlu": PWLU, "dynamic_pwlu": DynamicPWLU, "nonuniform_pwlu": NonUniformPWLU}
Factory = Callable[[int, Site], nn.Module]


def activation_maker(
    to: str | Factory, bounds: Any, intervals: int, granularity: str, init: Any, tolerance: float | None
) -> Callable[[Candidate], nn.Module]:
    """Check the arguments and return a function that creates the new activation of a site."""
    if granularity not in ("channel", "layer"):
        raise ValueError(f"convert_: granularity must be 'channel' or 'layer', not {granularity!r}")
    if not isinstance(to, str) or to not in UNITS:
        _check_other(to, granularity)
        return partial(_make_other, to, granularity)
    if tolerance is not None and not 0 < tolerance < math.inf:
        raise ValueError(f"convert_: tolerance must be a positive number such as 1e-3, not {tolerance!r}")
    if isinstance(bounds, str) and bounds != "sample":
        raise ValueError(f"convert_: bounds must be two numbers such as (-3.0, 3.0), or 'sample', not {bounds!r}")
    fixed = None if bounds == "sample" else bounds
    start = find_initial_function("relu" if init == "same" else init)
    start = _check_start(start, f"init={start.name}", "channel")
    PWLU(1, intervals, fixed or (-3.0, 3.0), init="identity")  # check intervals and bounds before fitting
    PWLU(1, intervals, fixed or best_bounds(start, intervals), init=start)
    given = start if init != "same" else None

    def unit(candidate: Candidate) -> nn.Module:
        site, call = candidate.site, candidate.calls[0]
        assert site.start is not None
        start = given or _check_start(site.start, f"{site.name} ({site.was})", granularity)
        near = fixed or (candidate.inputs if _kinks_fit(start, candidate.inputs, intervals) else None)
        enough = intervals if tolerance is None else enough_intervals(start, intervals, tolerance, near)
        fitted = best_bounds(start, enough, near)
        by_name = start.name if INITIAL_FUNCTIONS.get(start.name) == start else start
        options: dict[str, Any] = {"init": by_name, "channel_dim": site.channel_dim}
        options |= {"device": call.device, "dtype": _parameter_dtype(call)}
        if to == "dynamic_pwlu":  # with several layouts, there is no common channel dimension
            options["features"] = 1 if site.layout == "several" else site.channels
        act = UNITS[to](_channels(site, granularity), enough, fitted, **options)
        if given in (None, site.start):
            site.error = initial_error(start, act.bounds, enough, candidate.inputs or (-100, 100))
        return act

    return unit


def _channels(site: Site, granularity: str) -> int:
    return site.channels if granularity == "channel" else 1


def _kinks_fit(start: InitialFunction, inputs: tuple[float, float] | None, intervals: int) -> bool:
    """Return whether a PWLU whose bounds fit these inputs can have a knot on every kink."""
    try:
        best_bounds(start, intervals, inputs)
    except ValueError:
        return False
    return True


def _check_start(start: InitialFunction, what: str, granularity: str) -> InitialFunction:
    """Return the initial function with its outer slopes; raise an error that names `what` if a PWLU cannot start as it."""
    if (start.channels > 1 and granularity == "channel") or INITIAL_FUNCTIONS.get(start.name) == start:
        return start
    why = "differs between channels" if start.channels > 1 else why_unusable(start.function)
    if why:
        raise ValueError(
            f"convert_: {what} {why}, so it cannot be the initial function of a PWLU. Pass another initial function such as "
            "init='relu', or leave its kind out of kinds"
        )
    return start if start.slopes is not None else start._replace(slopes=far_slopes(start.function))


def _check_other(to: str | Factory, granularity: str) -> None:
    if isinstance(to, str):
        check_name(to)
    elif name := next((name for name, unit in UNITS.items() if unit is to), None):
        raise ValueError(f"convert_: to must be a name or a function of (channels, site), not a class. Write to={name!r}")
    elif not callable(to):
        raise ValueError(
            f"convert_: to must be the name of an activation or a function of (channels, site), not {to!r}. Write to='apl', or "
            "to=lambda channels, site: MyActivation(channels)"
        )
    if to == "frelu" and granularity == "layer":
        raise ValueError(
            "convert_: to='frelu' needs granularity='channel', not 'layer', because FReLU has one window per channel. Leave "
            "granularity out, or pass another activation such as to='prelu'"
        )


def _make_other(to: str | Factory, granularity: str, candidate: Candidate) -> nn.Module:
    """Create an activation other than PWLU."""
    site, call = candidate.site, candidate.calls[0]
    channels = _channels(site, granularity)
    if not isinstance(to, str):
        module = to(channels, site)
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"convert_: to(channels, site) must return a torch.nn.Module, but for {site.name} it returned {module!r}. "
                "Write to=lambda channels, site: MyActivation(channels)"
            )
        return module
    flat = to == "frelu" and (len(site.shape) != 4 or site.layout == "several")
    site.reason = "replaced by ReLU: FReLU needs a 4-d feature map" if flat else ""
    if to == "relu" or flat:
        return nn.ReLU() if site.kind == "relu" else ReLU()
    if to == "frelu":  # a convolution needs the dtype of its input
        norm = "group" if candidate.runs > 1 else "batch"  # batch norm would mix the statistics of several calls
        site.reason = f"with group norm: it runs {candidate.runs} times per forward pass" if norm == "group" else ""
        return FReLU(site.channels, site.channel_dim, norm=norm).to(call.device, call.dtype)
    if to == "pau":
        assert site.start is not None
        start = _check_start(site.start, f"{site.name} ({site.was})", "layer")
        pau = PAU(start, call.device, _parameter_dtype(call))
        site.reason = f"starts within {pau.start_error:.2g} of {pau.start} for |x| <= 3"
        return pau
    return activation(to, channels, site.channel_dim).to(call.device, _parameter_dtype(call))


def _parameter_dtype(call: Call) -> torch.dtype:
    return torch.float64 if call.dtype == torch.float64 else torch.float32  # 16 bits would round the knots too much
