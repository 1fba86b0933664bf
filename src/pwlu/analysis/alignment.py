"""Measure how well the bounds of every PWLU fit its inputs: the alignment."""

import inspect
import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pwlu import reference
from pwlu.analysis.quantiles import QuantileSketch
from pwlu.common.checks import check_integer
from pwlu.common.reports import RowReport
from pwlu.common.text import columns, counted, parse_json
from pwlu.units.module import PWLU, require_units, unwrapped

BARS = 32
HEALTHY = 0.548  # IOU of normal inputs with the bounds mu +- 3 sigma, which realignment sets: 2 * 1.645 / 6
_ACCEPTED = (
    "A batch must be an input of the model: a tensor, a tuple of arguments, or a dictionary of keyword arguments. It may also "
    "be a list of inputs and labels from a loader. If your loader yields something else, select the inputs: "
    "pwlu.alignment(model, (batch['image'] for batch in loader))."
)


@dataclass
class UnitAlignment:
    """The alignment of one PWLU. Every list has one entry per channel of its input.

    If one function serves the whole layer, all channels have the same bounds.

    Attributes:
        name: full name of the unit.
        left: left bounds.
        right: right bounds.
        p5: 5 % quantiles of the inputs; :mod:`pwlu.analysis.quantiles` states their accuracy.
        p95: 95 % quantiles of the inputs.
        iou: intersection over union of [left, right] and [p5, p95].
        outside: fraction of the inputs outside the bounds.
        count: number of finite inputs. If it is 0, the numbers computed from inputs are NaN.
        nonfinite: number of infinite and NaN inputs, which no other number includes.
        low: lower ends of the histograms; at most a thousandth of the inputs lies below.
        high: upper ends of the histograms; at most a thousandth of the inputs lies above.
        histogram: how many of 10,000 inputs fall in each of 32 equal bars from ``low`` to ``high``.
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
    histogram: list[list[float]] = field(default_factory=list, repr=False)

    @property
    def channels(self) -> int:
        """Return the number of channels of the input."""
        return len(self.iou)


@dataclass
class Alignment(RowReport[UnitAlignment], rows="units"):
    """The alignment of every PWLU that was reached, in model order. Prints as a table; iterates over units.

    Attributes:
        model: class name of the model.
        batches: number of batches.
        units: one :class:`~pwlu.analysis.alignment.UnitAlignment` per PWLU.
        unreached: names of the PWLUs that had no input.
    """

    model: str
    batches: int
    units: list[UnitAlignment]
    unreached: list[str] = field(default_factory=list)

    @property
    def iou(self) -> list[float]:
        """Return the IOU of every channel, of all units, that had inputs."""
        return [value for unit in self.units for value in unit.iou if not math.isnan(value)]

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return one row per channel, without the histograms, for a data frame."""
        columns = ("left", "right", "p5", "p95", "iou", "outside", "count", "nonfinite")
        return [
            {"unit": unit.name, "channel": channel} | {column: getattr(unit, column)[channel] for column in columns}
            for unit in self.units
            for channel in range(unit.channels)
        ]

    def to_json(self) -> str:
        """Return JSON with 6 digits per number and null for non-finite ones: 50 bytes per channel, 140 for its histogram."""
        return to_json(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Alignment":
        """Return the alignment that :meth:`to_json` wrote; null becomes NaN."""
        try:
            values = parse_json(text)
            units = [UnitAlignment(**{key: _null_to_nan(value) for key, value in unit.items()}) for unit in values.pop("units")]
            for unit in units:
                _check_unit(unit)
            if not all(isinstance(name, str) for name in (*(unit.name for unit in units), *values.get("unreached", ()))):
                raise ValueError("names of units must be strings")
            return cls(units=units, **values)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"Alignment.from_json: the text is not JSON written by Alignment.to_json: {error!r}") from error

    def __str__(self) -> str:
        head = ("unit", "channels", "median IOU", "inputs outside", "not finite")
        rows = [
            (u.name or "the model", str(u.channels), _median(u.iou), share_outside([u]), f"{sum(u.nonfinite):,}")
            for u in self.units
        ]
        lines = columns(head, rows, numbers=True)
        lines.append(
            f"{self.model}, {counted(self.batches, 'batch', 'batches')}: median IOU {_median(self.iou)} over "
            f"{counted(len(self.iou), 'channel')}; {share_outside(self.units)} of inputs outside of the bounds"
        )
        if self.unreached:
            lines.append(f"Never reached: {', '.join(name or 'the model' for name in self.unreached)}")
        return "\n".join(lines)


def alignment(model: nn.Module, batches: Iterable[Any], *, limit: int | None = None, histogram: bool = True) -> Alignment:
    """Measure how well the bounds of every PWLU fit its inputs, per input channel:

        IOU = |[B_L, B_R] ∩ [p5, p95]| / |[B_L, B_R] ∪ [p5, p95]|

    Here p5 and p95 are the 5 % and 95 % quantiles of the input over all batches. 1 means a perfect fit, 0 no overlap. Normally
    distributed inputs have an IOU of 0.55 with the bounds mu +- 3 sigma, which realignment sets.

    The model runs in evaluation mode without gradients, and does not change. Inputs are counted batch by batch, in bounded
    memory; the error of the IOU is at most 1/128 (see :mod:`pwlu.analysis.quantiles`).

    The inputs of all calls of a unit are counted together. If a unit has one function for the layer, its bounds are compared
    with each channel of the input, along ``channel_dim``. If its calls differ in the number of channels, all inputs count as
    one channel.

    Args:
        model: a model with PWLUs.
        batches: a loader, or an iterable of inputs of the model: tensors, tuples of arguments, or dictionaries of keyword
            arguments. From a list, such as inputs and labels, the model gets as many entries as its forward requires. From a
            tuple, it gets as many as its forward accepts. Tensors on the CPU are moved to the model's device. Each batch is
            used once, so a generator works.
        limit: largest number of batches to use. Default: all of them.
        histogram: whether to keep a small histogram of each channel's inputs for figures. Default: True.

    Returns:
        The bounds, quantiles, IOU and histograms of every unit.

    Raises:
        ValueError: if the model has no PWLU, there is no batch, or ``limit`` is not a positive integer.
        TypeError: if ``batches`` or a batch has the wrong type.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), pwlu.PWLU(8))
        >>> aligned = pwlu.alignment(model, [torch.randn(64, 4)])
        >>> len(aligned.iou)
        8
    """
    units = require_units("alignment", model)
    _check(batches, limit)
    counters = {name: _InputCounter(unit) for name, unit in units.items()}
    required, taken = _count_positional(model)
    device = next(iter(units.values())).weight.device
    number = 0
    with _counting_inputs(model, counters.values()):
        for number, batch in enumerate(islice(batches, limit), start=1):
            arguments, keywords = _arguments(batch, required, taken)
            arguments, keywords = tree_map_only(Tensor, partial(_to_device, device), (arguments, keywords))
            try:
                model(*arguments, **keywords)
            except Exception as error:
                error.add_note(f"alignment: the model raised this on batch {number}. {_ACCEPTED}")
                raise
    if not number:
        raise ValueError("alignment: batches is empty. Was it a generator that is already exhausted?")
    reached = [_measure(name, counter, histogram) for name, counter in counters.items() if counter.sketch is not None]
    unreached = [name for name, counter in counters.items() if counter.sketch is None]
    return Alignment(type(model).__name__, number, reached, unreached)


def without_histograms(aligned: Alignment) -> Alignment:
    """Return the alignment without histograms, which take three quarters of its space."""
    return replace(aligned, units=[replace(unit, low=[], high=[], histogram=[]) for unit in aligned])


def pooled(unit: UnitAlignment) -> UnitAlignment:
    """Return the inputs of all channels as those of one channel, for a function that all channels share.

    The quantiles are the smallest p5 and the largest p95, the IOU is the median, and the histogram is the mean of all.
    """
    count = torch.tensor(unit.count, device="cpu")
    numbers = (unit.p5, unit.p95, unit.iou, unit.outside, *((unit.low, unit.high) if unit.histogram else ()))
    columns = [torch.tensor(values, dtype=torch.float64, device="cpu")[count > 0] for values in numbers]
    if not len(columns[0]):
        return replace(unit, **{f.name: getattr(unit, f.name)[:1] for f in fields(unit) if f.name != "name"})
    p5, p95, iou, outside, *ends = columns
    total = int(count.sum())
    share = float((outside * count[count > 0]).sum() / total)
    one = UnitAlignment(
        *(unit.name, unit.left[:1], unit.right[:1], [float(p5.min())], [float(p95.max())]),
        *([float(iou.median())], [share], [total], [sum(unit.nonfinite)]),
    )
    if ends:
        low, high = ends
        one.low, one.high = [float(low.min())], [float(high.max())]
        edges = torch.linspace(one.low[0], one.high[0], BARS + 1, dtype=torch.float64, device="cpu")
        bars = torch.tensor(unit.histogram, dtype=torch.float64, device="cpu")[count > 0]
        below = torch.nn.functional.pad(bars.cumsum(1), (1, 0))
        place = ((edges - low[:, None]) / (high - low).clamp(min=1e-30)[:, None]).clamp(0, 1) * BARS
        bar = place.long().clamp(max=BARS - 1)
        cumulated = torch.lerp(below.gather(1, bar), below.gather(1, bar + 1), place - bar)
        one.histogram = [cumulated.mean(0).diff().tolist()]
    return one


def iou(left: Tensor, right: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return |[left, right] ∩ [low, high]| / |[left, right] ∪ [low, high]|; 0 if they are disjoint or the bounds crossed."""
    common = (torch.minimum(right, high) - torch.maximum(left, low)).clamp(min=0)
    union = (right - left).clamp(min=0) + (high - low) - common
    return torch.where(common == 0, common, common / union)


class _InputCounter:
    """Forward hook that counts the inputs of a unit."""

    def __init__(self, unit: PWLU) -> None:
        self.unit = unit
        self.left, self.right = (bound.detach().to(reference.compute_dtype(bound)) for bound in (unit.left, unit.right))
        self.sketch: QuantileSketch | None = None

    def __call__(self, unit: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, Tensor], output: Tensor) -> None:
        x = arguments[0] if arguments else keywords["x"]
        dim = self.unit.channel_dim
        channels = x.shape[dim] if -x.ndim <= dim < x.ndim else 1
        if self.sketch is None:
            self.sketch = QuantileSketch(self.left, self.right, channels)
        elif self.sketch.channels != channels:
            self.sketch.pool()
        self.sketch.add(x, dim)


@contextmanager
def _counting_inputs(model: nn.Module, counters: Iterable[_InputCounter]) -> Iterator[None]:
    """Put the model in evaluation mode with a counter on every unit. Restore it afterwards, also after an error."""
    modes = {module: module.training for module in model.modules()}
    handles = []
    try:
        for module in modes:  # do not call eval(): some models override it, and we could not undo what it does
            module.training = False
        for counter in counters:
            handles.append(counter.unit.register_forward_hook(counter, with_kwargs=True))
        with torch.no_grad(), _force_eager():
            yield
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training


def _force_eager() -> AbstractContextManager[Any]:
    """Run compiled models in eager mode, because compiled code ignores new hooks. If dynamo is not imported, do nothing."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _measure(name: str, counter: _InputCounter, histogram: bool) -> UnitAlignment:
    assert counter.sketch is not None
    inputs = counter.sketch.distribution()
    left, right = (t.to("cpu", torch.float64).expand(counter.sketch.channels) for t in (counter.left, counter.right))
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
            f"alignment: batches must be a list of batches or a loader, not a single {type(batches).__name__}: write [x]"
        )
    if not isinstance(batches, Iterable):
        raise TypeError(f"alignment: batches must be a list of batches or a loader, not {batches!r}")
    if limit is not None:
        check_integer("alignment", "limit", limit, "the number of batches, or None for all of them", 1)


def _arguments(batch: Any, required: int, taken: int | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, list) and batch and isinstance(batch[0], Tensor):  # DataLoader turns tuples into lists
        return tuple(batch[:required]), {}
    if not isinstance(batch, (Tensor, tuple)):
        raise TypeError(f"alignment: a batch is of type {type(batch).__name__}. {_ACCEPTED}")
    return batch[:taken] if isinstance(batch, tuple) else (batch,), {}


def _count_positional(model: nn.Module) -> tuple[int, int | None]:
    """Return the number of positional arguments that forward requires (at least 1) and accepts (None: any number)."""
    parameters = inspect.signature(unwrapped(model).forward).parameters.values()  # wrappers accept any arguments
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = None if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)
    return max(1, sum(p.default is p.empty for p in positional)), taken


def _to_device(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device) if tensor.device.type == "cpu" else tensor


def to_json(content: Any) -> str:
    """Return compact JSON with 6 digits per number and null for non-finite ones."""
    return json.dumps(_round_floats(content), separators=(",", ":"), allow_nan=False)


def _round_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _round_floats(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_round_floats(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _check_unit(unit: UnitAlignment) -> None:
    """Raise ValueError unless every list of a parsed unit has one number per channel."""
    for name, values in asdict(unit).items():
        expected = 0 if name in ("low", "high", "histogram") and not unit.histogram else unit.channels
        numbers = [number for row in values for number in row] if name == "histogram" else values
        if name != "name" and not (len(values) == expected and all(type(number) in (int, float) for number in numbers)):
            raise ValueError(f"{name} of {unit.name!r} must be {counted(expected, 'number')}, one per channel")
    if not all(type(count) is int and 0 <= count < 2**63 for count in unit.count):
        raise ValueError(f"count of {unit.name!r} must be integers from 0 to 2^63 - 1")
    for name in ("p5", "p95", "low", "high"):
        if not all(math.isfinite(number) for number, count in zip(getattr(unit, name), unit.count, strict=False) if count):
            raise ValueError(f"{name} of {unit.name!r} must be finite for channels with inputs")
    if unit.histogram and {len(row) for row in unit.histogram} != {BARS}:
        raise ValueError(f"the histograms of {unit.name!r} must have {BARS} bars")


def _null_to_nan(value: Any) -> Any:
    return [math.nan if entry is None else entry for entry in value] if isinstance(value, list) else value


def _median(values: Iterable[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{statistics.median(known):.2f}" if known else "-"


def share_outside(units: Iterable[UnitAlignment]) -> str:
    """Return the percentage of all inputs of these units that lie outside the bounds."""
    seen = [(share, n) for unit in units for share, n in zip(unit.outside, unit.count, strict=True) if n]
    return f"{100 * sum(share * n for share, n in seen) / sum(n for _, n in seen):.2f} %" if seen else "-"
