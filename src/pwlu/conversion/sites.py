"""Group calls into sites, determine their channels, and decide which sites to convert."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pwlu.common.text import counted
from pwlu.conversion.conversion_report import Site
from pwlu.conversion.nodes import SPLIT_CHANNELS
from pwlu.conversion.rewrite import Edit
from pwlu.conversion.sample_runs import Recorded, Run
from pwlu.conversion.tracing import Call, full_name


@dataclass
class Candidate:
    """A site, and the plan for its conversion."""

    site: Site
    calls: list[Call]
    modes: Counter[Run]  # number of calls per run
    edit: Edit | None = None  # the call to rewrite; None if the new activation replaces a registered module
    module: nn.Module | None = None  # the new activation
    inputs: tuple[float, float] | None = None  # the range of the inputs on the sample, for bounds='sample'

    @property
    def selected(self) -> bool:
        """Return whether it will be converted."""
        return self.site.action == "converted"

    @property
    def runs(self) -> int:
        """Return the largest number of calls in one forward pass."""
        return max(self.modes.values())


@dataclass
class Rules:
    """The rules that decide which sites to convert."""

    kinds: tuple[str | type[nn.Module], ...]
    granularity: str
    where: Callable[[Site], bool] | None
    min_positions: int

    def includes(self, kind: str) -> bool:
        """Return whether activations of this kind are replaced."""
        return kind in {k if isinstance(k, str) else k.__name__ for k in self.kinds}


def find_sites(recorded: Recorded) -> list[Candidate]:
    """Group calls of the same module at the same place into sites."""
    groups: dict[Any, list[Call]] = {}
    runs: dict[Any, list[Run]] = {}
    for run, calls in recorded.items():
        for call in calls:
            place = call.location
            key = (call.module, place.owner or place.nearest, place.filename, place.line, place.end)
            groups.setdefault(key, []).append(call)
            runs.setdefault(key, []).append(run)
    return [
        Candidate(_site(calls, tuple(dict.fromkeys(run.mode for run in runs[key]))), calls, Counter(runs[key]))
        for key, calls in groups.items()
    ]


def _site(calls: list[Call], modes: tuple[str, ...]) -> Site:
    first = calls[0]
    if first.module is not None:
        name, was = first.module, first.was
    else:
        name = full_name(first.location.owner or first.location.nearest, first.kind)
        was = f"{'x' if first.method else 'F'}.{first.was}" if not first.written_out else f"{first.was} as a formula"
    return Site(
        name, was, first.kind, first.shape, modes=modes, calls=len(calls), source=str(first.location), start=first.start
    )


def _find_channel_dims(site: Site, calls: list[Call]) -> None:
    """Set ``dim``, the channel dimension of every call.

    If no layer determines it, it is the only dimension after the batch whose size is the same in all samples. If all shapes are
    equal, it is a guess.
    """
    unknown = []
    for call in calls:
        n = len(call.shape)
        call.dim = call.channel_dim if call.channel_dim is not None and -n <= call.channel_dim < n else 1 if n >= 4 else -1
        if call.channel_dim == SPLIT_CHANNELS:
            site.layout = "several"
        elif call.dim != call.channel_dim and n > 1:
            unknown.append(call)
    if not unknown or site.layout:
        return
    shapes = {call.shape for call in unknown}
    if len({len(shape) for shape in shapes}) > 1 or len(shapes) == 1:
        site.layout = "guess"
        return
    same = [d for d, sizes in enumerate(zip(*shapes, strict=True)) if d and len(set(sizes)) == 1]
    if len(same) == 1:
        for call in unknown:
            call.dim = same[0] if same[0] < len(call.shape) - 1 else -1
    else:
        site.layout = "several"


def _positions(call: Call, dim: int) -> int | None:
    """Return height x width of a feature map; None for a vector or a sequence."""
    n = len(call.shape)
    if n < 3 or (n == 3 and dim % n == n - 1):
        return None
    rest = [size for d, size in enumerate(call.shape) if d != dim % n and (d != 0 or dim % n == 0)]
    return int(torch.Size(rest).numel())


def decide(candidate: Candidate, rules: Rules) -> None:
    """Decide whether to convert a site, and record why not."""
    site, calls = candidate.site, candidate.calls
    _find_channel_dims(site, calls)
    dims = {call.dim for call in calls if call.shape}
    if len({len(call.shape) for call in calls}) == 1 and len({dim % len(calls[0].shape) for dim in dims}) == 1:
        dims = {max(dims)}  # 1 and -1 are the same dimension of a matrix
    sizes = {call.shape[call.dim] for call in calls if call.shape and site.layout != "several"}
    site.channel_dim = next(iter(dims), 1)
    positions = [p for call in calls if site.layout != "several" and (p := _positions(call, call.dim)) is not None]
    site.positions = max(positions, default=None)
    site.channels = next(iter(sizes), 1)
    site.glu = any(call.glu for call in calls) and not any(call.is_gate for call in calls)
    if why := _why_skipped(site, calls, rules):
        site.action, site.reason = "skipped", why
    elif why := _why_impossible(site, calls, rules, sizes, dims):
        site.action, site.reason = "impossible", why
    else:
        site.action = "converted"
    if rules.granularity == "layer":
        site.layout = ""  # one function does not depend on the channels


def _why_skipped(site: Site, calls: list[Call], rules: Rules) -> str:
    """Return why the rules leave the site out; empty if they do not."""
    if not any(rules.includes(call.kind) for call in calls):
        return f"{site.kind} is not in kinds"
    if not all(call.dtype.is_floating_point for call in calls):
        return f"its input is {calls[0].dtype}"
    if all(call.is_gate for call in calls):
        return "it is a gate"
    if all(call.feeds_gate for call in calls):
        return "it feeds a gate"
    if site.positions is not None and site.positions < rules.min_positions:
        return f"feature maps of {counted(site.positions, 'position')}"
    return "where returned False" if rules.where is not None and not rules.where(site) else ""


def _why_impossible(site: Site, calls: list[Call], rules: Rules, sizes: set[int], dims: set[int]) -> str:
    """Return why the site cannot be converted; empty if it can.

    `sizes`, `dims`: the numbers of channels of its calls, and their dimensions.
    """
    if len(starts := sorted({call.start.name for call in calls})) > 1:
        return f"the same place applies {' and '.join(starts)}"
    if any(call.written_out for call in calls):
        return (
            f"it is written as a formula: call F.{site.kind}, or pass the class of its module in kinds if it computes only that"
        )
    if any(call.kind == "prelu" and call.module is None for call in calls):
        return "it is F.prelu, whose slopes belong to no module: use nn.PReLU"
    if any(call.arguments > 1 for call in calls):
        return "it is called with more than one argument"
    if any(call.reused for call in calls):
        return "it works in place, and its input is used again: set inplace=False"
    if rules.granularity == "channel" and len(sizes) > 1:
        return f"the same place is called with {', '.join(map(str, sorted(sizes)))} channels: pass granularity='layer'"
    if rules.granularity == "channel" and len(dims) > 1 and site.layout != "several":
        return f"the same place is called with channels in dimensions {', '.join(map(str, sorted(dims)))}"
    return ""
