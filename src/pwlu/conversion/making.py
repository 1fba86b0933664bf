"""Making the new activation of a site: a PWLU that starts as something, or another activation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pwlu.baselines import PAU, FReLU, ReLU, activation, check_name
from pwlu.conversion.report import Site
from pwlu.conversion.sites import Found
from pwlu.conversion.tracing import Call, stateless_leaf
from pwlu.module import PWLU
from pwlu.starts import STARTS, Start, best_bounds, find_start, start_error

Factory = Callable[[int, Site], nn.Module]


def maker(
    to: str | Factory, bounds: tuple[float, float] | None, intervals: int, granularity: str, init: Any
) -> Callable[[Found], nn.Module]:
    """A function that makes the new activation of a site; wrong arguments are found now."""
    if granularity not in ("channel", "layer"):
        raise ValueError(f"convert_: granularity must be 'channel' or 'layer', not {granularity!r}")

    def channels(site: Site) -> int:
        return site.channels if granularity == "channel" else 1

    def fixed(start: Start | None, site: Site, what: str) -> Start:
        assert start is not None
        if isinstance(start.function, nn.Module) and not stateless_leaf(start.function):
            raise ValueError(f"convert_: {site.name}, {site.was}, has parameters of its own: {what} cannot start as that")
        return start

    def unit(found: Found) -> nn.Module:
        site, call = found.site, found.calls[0]
        start = fixed(find_start(init) if init != "same" else site.start, site, "init='same'")
        fitted = best_bounds(start, intervals, bounds)
        by_name = start.name if STARTS.get(start.name) == start else start
        act = PWLU(channels(site), intervals, fitted, by_name, site.channel_dim, device=call.device, dtype=_wide(call))
        site.error = start_error(start, act.bounds, intervals) if start == site.start else None
        return act

    def other(found: Found) -> nn.Module:
        site, call = found.site, found.calls[0]
        if not isinstance(to, str):
            module = to(channels(site), site)
            if not isinstance(module, nn.Module):
                raise TypeError(f"convert_: to must return a module, but for {site.name} it returned {module!r}")
            return module
        flat = to == "frelu" and len(site.shape) != 4
        site.reason = "as ReLU: FReLU needs a map" if flat else ""
        if to == "relu" or flat:
            return nn.ReLU() if site.kind == "relu" else ReLU()
        if to == "frelu":  # it convolves, and so is of the type of its input
            norm = "group" if found.runs > 1 else "batch"  # one batch norm would mix the statistics of several runs
            site.reason = f"with group norm: it runs {found.runs} times in a pass" if norm == "group" else ""
            return FReLU(site.channels, site.channel_dim, norm=norm).to(call.device, call.dtype)
        if to == "pau":
            pau = PAU(fixed(site.start, site, "PAU"), call.device, _wide(call))
            site.reason = f"starts within {pau.start_error:.2g} of {pau.start} for |x| <= 3"
            return pau
        return activation(to, channels(site), site.channel_dim).to(call.device, _wide(call))

    if to != "pwlu":
        if isinstance(to, str):
            check_name(to)
        elif not callable(to):
            raise ValueError(f"convert_: to must be a name or a function of (channels, site), not {to!r}")
        if to == "frelu" and granularity == "layer":
            raise ValueError("convert_: FReLU has a window for each channel. Leave granularity out, or write to='prelu', say")
        return other
    start = find_start("relu" if init == "same" else init)
    PWLU(1, intervals, bounds or (-3.0, 3.0), "identity")  # intervals and bounds are checked before bounds are fitted
    PWLU(1, intervals, bounds or best_bounds(start, intervals), init=start)
    return unit


def _wide(call: Call) -> torch.dtype:
    return torch.float64 if call.dtype == torch.float64 else torch.float32  # knots in 16 bits would be in the wrong places
