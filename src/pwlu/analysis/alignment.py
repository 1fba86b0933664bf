"""Alignment: do the bounds of every unit lie where its inputs are?"""

import inspect
import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pwlu import reference
from pwlu.analysis.quantiles import Sketch
from pwlu.module import PWLU, require_units, unwrapped
from pwlu.text import columns, counted, parsed

BARS = 32
HEALTHY = 0.548  # IOU of normally distributed inputs and bounds at mu +- 3 sigma, where realignment puts them: 2 * 1.645 / 6
_ACCEPTED = (
    "A batch is what the model is called with: a tensor, a tuple of arguments, or a dictionary of keyword arguments; or what a "
    "loader gives, inputs and labels. If a loader gives something else, pick the inputs: "
    "pwlu.alignment(model, (batch['image'] for batch in loader))."
)


@dataclass
class UnitAlignment:
    """One unit: lists have an entry for each channel of its input; those of a layer-wise unit have the same bounds.

    ``left``, ``right``: the bounds. ``p5``, ``p95``: quantiles of the input (``pwlu.analysis.quantiles`` says how exact
    they are). ``iou``: of both intervals. ``outside``: the share of inputs outside of the bounds. ``count``: finite
    inputs seen; where it is 0, what follows from them is NaN. ``nonfinite``: others, which are in no other number.
    ``histogram``: of 10,000 inputs, those in each of 32 equal bars from ``low`` to ``high``, beyond which lies at most a
    thousandth on either side.
    """

    name: str
    left: list[float]
    right: list[float]
    p5: list[float]
    p95: list[float]
    iou: list[float]
    outside: list[float]
    count: list[int]
    nonfinite: list[int]
    low: list[float] = field(default_factory=list, repr=False)
    high: list[float] = field(default_factory=list, repr=False)
    histogram: list[list[int]] = field(default_factory=list, repr=False)

    @property
    def channels(self) -> int:
        """Of the input."""
        return len(self.iou)


@dataclass
class Alignment:
    """Every unit that was reached, in the order of the model. Prints as a table; iterates over units."""

    model: str
    batches: int
    units: list[UnitAlignment]
    unreached: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[UnitAlignment]:
        return iter(self.units)

    def __len__(self) -> int:
        return len(self.units)

    @property
    def iou(self) -> list[float]:
        """Of every channel of every unit that had inputs."""
        return [value for unit in self.units for value in unit.iou if not math.isnan(value)]

    def as_dicts(self) -> list[dict[str, Any]]:
        """A row for each channel, without the histograms, for a data frame."""
        columns = ("left", "right", "p5", "p95", "iou", "outside", "count", "nonfinite")
        return [
            {"unit": unit.name, "channel": channel} | {column: getattr(unit, column)[channel] for column in columns}
            for unit in self.units
            for channel in range(unit.channels)
        ]

    def to_json(self) -> str:
        """Numbers have 6 digits; what is not finite becomes null. 50 bytes a channel, and 140 for its histogram."""
        return json.dumps(_rounded(asdict(self)), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Alignment":
        """What :meth:`to_json` wrote; null becomes NaN."""
        try:
            values = parsed(text)
            units = [UnitAlignment(**{key: _restored(value) for key, value in unit.items()}) for unit in values.pop("units")]
            for unit in units:
                _check_unit(unit)
            if not all(isinstance(name, str) for name in (*(unit.name for unit in units), *values.get("unreached", ()))):
                raise ValueError("names of units must be texts")
            return cls(units=units, **values)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"Alignment.from_json: this is not what Alignment.to_json writes: {error!r}") from error

    def __str__(self) -> str:
        head = ("unit", "channels", "median IOU", "inputs outside", "not finite")
        rows = [
            (u.name or "the model", str(u.channels), _median(u.iou), _outside([u]), f"{sum(u.nonfinite):,}") for u in self.units
        ]
        lines = columns(head, rows, numbers=True)
        lines.append(
            f"{self.model}, {counted(self.batches, 'batch', 'batches')}: median IOU {_median(self.iou)} over "
            f"{counted(len(self.iou), 'channel')}; {_outside(self.units)} of inputs outside of the bounds"
        )
        if self.unreached:
            lines.append(f"Never reached: {', '.join(name or 'the model' for name in self.unreached)}")
        return "\n".join(lines)


def alignment(model: nn.Module, batches: Iterable[Any], *, limit: int | None = None, histogram: bool = True) -> Alignment:
    """Measure, for every input channel of every PWLU, how well its bounds fit its inputs:

        IOU = |[B_L, B_R] ∩ [p5, p95]| / |[B_L, B_R] ∪ [p5, p95]|

    with p5 and p95 the 5 % and 95 % quantiles of the input over all batches. 1 is a perfect fit, 0 none; normally distributed
    inputs score 0.55 at mu +- 3 sigma, where realignment puts the bounds.

    The model runs in evaluation mode, without gradients, and is left as it was. Inputs are counted as they come, in bounded
    memory, and the IOU is known to 1/128 or better (see ``pwlu.analysis.quantiles``).

    A layer-wise unit has its shared bounds compared with each channel of its input, along its ``channel_dim``; if its calls
    differ in the number of channels, all are taken as one. The inputs of a unit that is called several times are pooled.

    Args:
        batches: a loader, or what the model is called with, again and again: a tensor, a tuple of arguments, or a dictionary of
            keyword arguments. Of a list, as a loader gives of inputs and labels, the model gets as many entries as its forward
            requires; of a tuple, as many as it takes. Tensors on the CPU are moved to the model's device. Each batch is used
            once, so a generator will do.
        limit: use that many batches and no more.
        histogram: keep a small histogram of each channel's inputs, to draw.
    """
    units = require_units("alignment", model)
    _check(batches, limit)
    watches = {name: _Watch(unit) for name, unit in units.items()}
    required, taken = _positional(model)
    device = next(iter(units.values())).weight.device
    number = 0
    with _watched(model, watches.values()):
        for number, batch in enumerate(islice(batches, limit), start=1):
            arguments, keywords = _arguments(batch, required, taken)
            arguments, keywords = tree_map_only(Tensor, partial(_moved, device), (arguments, keywords))
            try:
                model(*arguments, **keywords)
            except Exception as error:
                error.add_note(f"alignment: the model raised this on batch {number}. {_ACCEPTED}")
                raise
    if not number:
        raise ValueError("alignment: there was no batch. Is batches a generator that was used before?")
    reached = [_measured(name, watch, histogram) for name, watch in watches.items() if watch.sketch is not None]
    unreached = [name for name, watch in watches.items() if watch.sketch is None]
    return Alignment(type(model).__name__, number, reached, unreached)


def without_histograms(aligned: Alignment) -> Alignment:
    """The same numbers in a quarter of the space."""
    return replace(aligned, units=[replace(unit, low=[], high=[], histogram=[]) for unit in aligned])


def iou(left: Tensor, right: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """|[left, right] ∩ [low, high]| / |[left, right] ∪ [low, high]|; 0 where they are disjoint or bounds have crossed."""
    common = (torch.minimum(right, high) - torch.maximum(left, low)).clamp(min=0)
    union = (right - left).clamp(min=0) + (high - low) - common
    return torch.where(common == 0, common, common / union)


class _Watch:
    """Counts the inputs of a unit, after every call of it."""

    def __init__(self, unit: PWLU) -> None:
        self.unit = unit
        self.left, self.right = (bound.detach().to(reference.compute_dtype(bound)) for bound in unit.blocks()[:2])
        self.sketch: Sketch | None = None

    def __call__(self, unit: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, Tensor], output: Tensor) -> None:
        x = arguments[0] if arguments else keywords["x"]
        dim = self.unit.channel_dim
        channels = x.shape[dim] if -x.ndim <= dim < x.ndim else 1
        if self.sketch is None:
            self.sketch = Sketch(self.left, self.right, channels)
        elif self.sketch.channels != channels:
            self.sketch.pool()
        self.sketch.add(x, dim)


@contextmanager
def _watched(model: nn.Module, watches: Iterable[_Watch]) -> Iterator[None]:
    """The model in evaluation mode, with a watch on every unit; afterwards all is as before, whatever happened."""
    modes = {module: module.training for module in model.modules()}
    handles = []
    try:
        for module in modes:  # not by eval(), which some models use to do more, and we could not undo that
            module.training = False
        for watch in watches:
            handles.append(watch.unit.register_forward_hook(watch, with_kwargs=True))
        with torch.no_grad(), _eagerly():
            yield
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training


def _eagerly() -> AbstractContextManager[Any]:
    """A compiled model does not look for new hooks. Whatever was compiled has imported dynamo, which takes a second."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _measured(name: str, watch: _Watch, histogram: bool) -> UnitAlignment:
    assert watch.sketch is not None
    inputs = watch.sketch.distribution()
    left, right = (t.to("cpu", torch.float64).expand(watch.sketch.channels) for t in (watch.left, watch.right))
    p5, p95 = inputs.quantile(0.05), inputs.quantile(0.95)
    outside = torch.where((right > left) | (inputs.total == 0), inputs.outside(), 1.0)
    columns = (left, right, p5, p95, iou(left, right, p5, p95), outside, inputs.total, inputs.nonfinite)
    unit = UnitAlignment(name, *(column.tolist() for column in columns))
    if histogram:
        low, high, shares = inputs.histogram(BARS)
        unit.low, unit.high = low.tolist(), high.tolist()
        unit.histogram = (10_000 * shares.nan_to_num(0.0)).round().long().tolist()
    return unit


def _check(batches: Any, limit: Any) -> None:
    if isinstance(batches, (Tensor, Mapping)):
        raise TypeError(
            f"alignment: batches must be a list of batches, or a loader, not one {type(batches).__name__}: write [x]"
        )
    if not isinstance(batches, Iterable):
        raise TypeError(f"alignment: batches must be a list of batches, or a loader, not {batches!r}")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"alignment: limit must be a number of batches, 1 or more, or None for all of them, not {limit!r}")


def _arguments(batch: Any, required: int, taken: int | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, list) and batch and isinstance(batch[0], Tensor):  # DataLoader makes lists of tuples
        return tuple(batch[:required]), {}
    if not isinstance(batch, (Tensor, tuple)):
        raise TypeError(f"alignment: a batch came as {type(batch).__name__}. {_ACCEPTED}")
    return batch[:taken] if isinstance(batch, tuple) else (batch,), {}


def _positional(model: nn.Module) -> tuple[int, int | None]:
    """Return how many arguments forward requires by position, at least one, and how many it takes; None: any number."""
    parameters = inspect.signature(unwrapped(model).forward).parameters.values()  # wrappers take anything
    some = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = None if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(some)
    return max(1, sum(p.default is p.empty for p in some)), taken


def _moved(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device) if tensor.device.type == "cpu" else tensor


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _check_unit(unit: UnitAlignment) -> None:
    """Raise ValueError unless the lists of a unit that was read have a number for each channel."""
    for name, values in asdict(unit).items():
        expected = 0 if name in ("low", "high", "histogram") and not unit.histogram else unit.channels
        numbers = [number for row in values for number in row] if name == "histogram" else values
        if name != "name" and not (len(values) == expected and all(type(number) in (int, float) for number in numbers)):
            raise ValueError(f"{name} of {unit.name!r} must be {counted(expected, 'number')}, one per channel")
    if unit.histogram and {len(row) for row in unit.histogram} != {BARS}:
        raise ValueError(f"the histograms of {unit.name!r} must have {BARS} bars")


def _restored(value: Any) -> Any:
    return [math.nan if entry is None else entry for entry in value] if isinstance(value, list) else value


def _median(values: Iterable[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{statistics.median(known):.2f}" if known else "-"


def _outside(units: Iterable[UnitAlignment]) -> str:
    seen = [(share, n) for unit in units for share, n in zip(unit.outside, unit.count, strict=True) if n]
    return f"{100 * sum(share * n for share, n in seen) / sum(n for _, n in seen):.2f} %" if seen else "-"
