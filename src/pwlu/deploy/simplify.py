"""The functions a model has learned, with fewer intervals or as plainer modules; and the same functions with more intervals."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pwlu import checks, reference
from pwlu.baselines import PReLU
from pwlu.deploy.fitting import PLAIN, Fit, fit
from pwlu.initial_functions import find_initial_function, fit_bounds
from pwlu.module import PWLU, require_units
from pwlu.text import abbreviate, columns, counted

_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FSDPModule", "FullyShardedDataParallel", "OptimizedModule"}


class Line(nn.Module):
    """y = a x + b, a line for each channel: what :func:`simplify_` makes of a PWLU that has become straight.

    Parameters: ``weight`` (C,), a, at the start 1; ``bias`` (C,), b, at the start 0. Shape: any; output as input.
    """

    def __init__(
        self,
        channels: int = 1,
        channel_dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.channel_dim = channels, channel_dim
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """y."""
        if self.channels > 1:
            checks.check_channels(x, self.channels, self.channel_dim)
        wide = reference.compute_dtype(x)
        a, b = (reference.along(p.to(wide), x, self.channel_dim) for p in (self.weight, self.bias))
        return (x.to(wide) * a + b).to(x.dtype)

    def extra_repr(self) -> str:
        """For print."""
        return f"channels={self.channels}, channel_dim={self.channel_dim}"


@dataclass
class Simplified:
    """What became of one unit.

    ``became``: identity, relu, line, prelu, fewer (intervals) or kept. ``intervals``: of the PWLU it is now, 0 if it is none.
    ``error``: the largest difference to what it was, over all channels; ``relative``: the largest share of a channel's
    range, max Y - min Y. ``parameters``: how many it has now, and ``removed``: how many it has lost.
    """

    name: str
    channels: int
    was: int
    became: str
    intervals: int
    error: float
    relative: float
    parameters: int
    removed: int
    reason: str = ""


@dataclass
class Simplification:
    """Every unit of a model, in its order. Prints as a table; iterates over units."""

    model: str
    tolerance: float
    units: list[Simplified]

    def __iter__(self) -> Iterator[Simplified]:
        return iter(self.units)

    def __len__(self) -> int:
        return len(self.units)

    def of(self, became: str) -> list[Simplified]:
        """The units that became this: identity, relu, line, prelu, fewer or kept."""
        return [unit for unit in self.units if unit.became == became]

    def as_dicts(self) -> list[dict[str, Any]]:
        """For a data frame or JSON."""
        return [asdict(unit) for unit in self.units]

    def __str__(self) -> str:
        head = ("unit", "channels", "intervals", "became", "error", "of the range", "why")
        rows = [
            (
                *(u.name or "the model", str(u.channels), str(u.was)),
                counted(u.intervals, "interval") if u.became == "fewer" else u.became,
                *(f"{u.error:.2g}", f"{100 * u.relative:.2g} %", u.reason),
            )
            for u in self.units
        ]
        parts = [f"{n} {became}" for became in (*PLAIN, "fewer", "kept") if (n := len(self.of(became)))]
        removed = sum(unit.removed for unit in self.units)
        return "\n".join([*columns(head, rows), f"{self.model}: {', '.join(parts)}; {counted(removed, 'parameter')} removed"])


@torch.no_grad()
def simplify_(
    model: nn.Module,
    tolerance: float = 1e-3,
    *,
    replace: bool = True,
    where: Callable[[str, PWLU], bool] | None = None,
) -> Simplification:
    """Give every PWLU as few intervals as its function needs, or make it the plainer module it has become, in place.

    Returns a report of every unit, which prints as a table.

    With f the function a channel had, g the one it gets, W = B_R - B_L and R = max Y - min Y its range between the bounds:

        |g(x) - f(x)| <= tolerance R    for all x in [B_L - W, B_R + W],

    of the parameters as they are stored; rounding in a forward pass comes on top, before and after. Beyond, a PWLU has its
    slopes as before, so that the error stays what it is at the bounds; of a module in its place it may grow, by at most
    2 tolerance R/W for every unit of x.

    Tried in this order: y = x (``nn.Identity``), ``nn.ReLU``, y = a x + b (``Line``), PReLU with its kink in 0
    (``pwlu.baselines.PReLU``), a PWLU with 1, 2, ... intervals. A module must do for all channels, and so must the number of
    intervals. Heights are fitted for the least maximum error, and the bounds of a channel move inwards where its function goes
    on as it does outside.

    For the end of training: an optimizer still holds parameters that are gone, so make it anew if training goes on. The state
    dict has other shapes then: save it before, and simplify after loading. The modules stay the same objects, so hooks and
    other references to them hold.

    Args:
        tolerance: the error allowed, as a share of a channel's range.
        replace: False for PWLUs that stay PWLUs.
        where: a function of a unit's name and the unit that says False to leave it as it is.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 < tolerance < 1:
        raise ValueError(
            f"simplify_: tolerance must be a share of the function's range between 0 and 1, such as 1e-3, not {tolerance!r}"
        )
    units = _checked("simplify_", model)
    chosen = {name: unit for name, unit in units.items() if where is None or where(name, unit)}
    fits = {name: _fit(unit, tolerance, replace) for name, unit in chosen.items()}  # all that can fail, before any change
    if not fits:
        raise ValueError(f"simplify_: where said False to all of {abbreviate([name or 'the model' for name in units])}")
    return Simplification(type(model).__name__, tolerance, [_carry_out(name, units[name], fits[name]) for name in fits])


@torch.no_grad()
def refine_(model: nn.Module, intervals: int) -> list[str]:
    """Give every PWLU so many intervals, a multiple of those it has, in place; return the names of those that changed.

    Functions stay as they are: new knots lie on the lines between the old ones, up to the rounding of their heights. So do the
    keys of the state dict and the running statistics. An optimizer must be made anew, as after :func:`simplify_`.
    """
    if isinstance(intervals, bool) or not isinstance(intervals, int) or intervals < 1:
        raise ValueError(f"refine_: intervals must be a whole number of at least 1, not {intervals!r}")
    units = _checked("refine_", model)
    for name, unit in units.items():
        if intervals % unit.intervals:
            below = intervals // unit.intervals * unit.intervals
            near = " or ".join(str(n) for n in (below, below + unit.intervals) if n)
            raise ValueError(
                f"refine_: {name or 'the model'} has {unit.intervals} intervals, and {intervals} is no multiple of that, so "
                f"its function would change. Write {near}"
            )
    changed = {name: unit for name, unit in units.items() if unit.intervals != intervals}
    for unit in changed.values():
        old, times = unit.heights.detach().to("cpu", torch.float64), intervals // unit.intervals
        share = torch.arange(times, dtype=torch.float64, device="cpu") / times
        between = old[:, :-1, None] + old.diff(dim=1)[:, :, None] * share
        _set(unit, unit.left.detach(), unit.right.detach(), torch.cat([between.flatten(1), old[:, -1:]], 1))
    return list(changed)


def _checked(caller: str, model: nn.Module) -> dict[str, PWLU]:
    units = require_units(caller, model)
    for module in model.modules():
        if wrapper := _WRAPPERS.intersection(parent.__name__ for parent in type(module).__mro__):
            raise ValueError(f"{caller}: the model is wrapped, by {min(wrapper)}, which holds its parameters. Unwrap it first")
    if strange := [name for name, unit in units.items() if type(unit) is not PWLU]:
        raise TypeError(
            f"{caller}: {abbreviate(strange)} is of a subclass of PWLU, whose forward may do more than is seen here"
        )
    if empty := [name for name, unit in units.items() if unit.weight.is_meta]:
        raise ValueError(f"{caller}: {abbreviate(empty)} is on the meta device and has no values. Load the weights first")
    if any(unit.phase for unit in units.values()):
        gc.collect()  # a controller whose optimizer is gone does not matter
    if taken := [name for name, unit in units.items() if unit.phase]:
        raise RuntimeError(
            f"{caller}: {abbreviate(taken)} has a TwoPhase, whose optimizer trains the parameters that are to go. After "
            f"training, call its remove() first; until then, take a copy: pwlu.{caller}(copy.deepcopy(model), ...)"
        )
    return units


def _fit(unit: PWLU, tolerance: float, replace: bool) -> Fit:
    left, right, heights, left_slope, right_slope = (p.detach().to("cpu", torch.float64) for p in unit.blocks())
    return fit((left, right, heights, left_slope, right_slope), unit.weight.dtype, tolerance, replace)


def _carry_out(name: str, unit: PWLU, plan: Fit) -> Simplified:
    was, channels, before = unit.intervals, unit.channels, sum(p.numel() for p in unit.parameters())
    if plan.became == "fewer":
        left, right, heights = plan.parameters
        _set(unit, left, right, heights)
        start = find_initial_function(unit.init)
        with contextlib.suppress(ValueError):  # too few intervals to begin anew as that exactly
            unit.bounds = fit_bounds(unit.bounds, unit.intervals, start.kinks, start.name)
    elif plan.became in PLAIN:
        _become(unit, _module(unit, plan))
    parameters = sum(p.numel() for p in unit.parameters())
    intervals = unit.intervals if isinstance(unit, PWLU) else 0
    relative = torch.where(plan.error == 0, 0.0, plan.error / plan.range)
    numbers = (float(plan.error.max()), float(relative.max()), parameters, before - parameters)
    return Simplified(name, channels, was, plan.became, intervals, *numbers, plan.reason)


def _set(unit: PWLU, left: Tensor, right: Tensor, heights: Tensor) -> None:
    """Give a unit other bounds and heights, of another number."""
    old = unit.blocks()
    blocks = (block.detach().to(old.left) for block in old._replace(left=left, right=right, heights=heights))
    unit.weight = nn.Parameter(reference.pack(*blocks), unit.weight.requires_grad)
    unit.intervals = heights.shape[1] - 1
    unit.scale_gradients()  # one of another length


def _module(unit: PWLU, plan: Fit) -> nn.Module:
    if plan.became in ("identity", "relu"):
        return nn.Identity() if plan.became == "identity" else nn.ReLU()
    bias, slope, _ = plan.parameters
    options: dict[str, Any] = {"device": unit.weight.device, "dtype": unit.weight.dtype}
    module: nn.Module
    if plan.became == "line":
        module = Line(unit.channels, unit.channel_dim, **options)
        module.bias.copy_(bias)
    else:
        module = PReLU(unit.channels, unit.channel_dim, **options)
    module.weight.copy_(slope)
    return module.requires_grad_(unit.weight.requires_grad)


def _become(unit: PWLU, module: nn.Module) -> None:
    """The same object, with its hooks, but of the other class and with its parameters."""
    for name in vars(PWLU()).keys() - vars(nn.Module()).keys():
        del unit.__dict__[name]
    new = {name: value for name, value in vars(module).items() if name not in vars(nn.Module())}
    unit.__dict__.update(new, _parameters=module._parameters, _buffers=module._buffers, _modules=module._modules)
    unit.__class__ = type(module)  # type: ignore[assignment]
