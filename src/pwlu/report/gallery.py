"""Prepare the data of ``gallery.js``: the functions of all layers in all snapshots, and the distributions of their inputs."""

import base64
import bisect
import math
import zlib
from typing import Any

import torch
from torch import Tensor

from pwlu.analysis.alignment import BARS, UnitAlignment
from pwlu.analysis.curves import inputs_of
from pwlu.analysis.shapes import CLASSES, UnitShapes
from pwlu.initial_functions import INITIAL_FUNCTIONS
from pwlu.plotting.style import evenly_spaced
from pwlu.report.encoding import encode_float16, encode_shares, encode_snapshots, to_bytes
from pwlu.report.run_data import RunData

LIMIT = 4_750_000  # characters, so that the page stays below 5 MB


def gallery(run: RunData, limit: int = LIMIT) -> dict[str, Any]:
    """Return the content of the gallery for JSON: layers, snapshots, and bytes in base64.

    If it exceeds the limit, leave out snapshots, and keep evenly spaced ones with the first and the last. If that is not
    enough, leave out the distributions of inputs too. ``left_out`` lists what is missing.
    """
    every = list(run.snapshots)

    def chosen(most: int) -> list[float]:
        return [every[place] for place in evenly_spaced(len(every), most)]

    inputs = inputs_of({unit.name: unit for unit in run.shapes or ()}, run.alignment, "report")
    bars = any(unit.histogram for unit in inputs.values())
    fixed = _encode_fixed(run, inputs, bars)
    kept = len(every)
    content = _encode(run, every, fixed)
    if len(content) > limit and kept > 2:
        kept = 2 + bisect.bisect_right(range(3, kept), limit, key=lambda most: len(_encode(run, chosen(most), fixed)))
        content = _encode(run, chosen(kept), fixed)
    left_out = [] if kept == len(every) else [f"{len(every) - kept} of {len(every)} snapshots"]
    if len(content) > limit and bars:
        bars = False
        content = _encode(run, chosen(kept), _encode_fixed(run, inputs, bars))
        left_out.append("the distributions of inputs")
    used = {name: INITIAL_FUNCTIONS[name] for name in sorted(set(run.starts.values()))}
    return {
        "layers": [
            {
                "name": name or "the model",
                "channels": len(unit["left"]),
                "intervals": unit["heights"].shape[1] - 1,
                "start": run.starts.get(name),
                "members": _members(shapes),
            }
            for (name, unit), shapes in zip(run.functions.items(), run.shapes or (), strict=True)
        ],
        "moments": [_describe_snapshot(run, step) for step in chosen(kept)],
        "ended": run.ended,
        "classes": [shape.words for shape in CLASSES.values()],
        "starts": {name: _sample_function(start.function, start.kinks) for name, start in used.items()},
        "bars": BARS if bars else 0,
        "left_out": left_out,
        "bytes": content,
    }


def _describe_snapshot(run: RunData, step: float) -> dict[str, Any]:
    epoch = step / run.steps_per_epoch if run.steps_per_epoch else None
    after = run.realigned_after
    return {
        "step": step if math.isfinite(step) else None,
        "epoch": epoch,
        "phase": (1 if step < after else 2) if after else None,
    }


def _members(unit: UnitShapes) -> list[int | None]:
    """Return the number of functions in each class; None if it is unknown."""
    return [None if math.isnan(unit.share(shape)) else sum(unit.members(shape)) for shape in CLASSES]


def _sample_function(function: Any, kinks: tuple[float, ...]) -> list[list[float]]:
    """Return x and y of an initial function at points dense enough to look smooth at any scale around 0."""
    sizes = [2.0 ** (k / 8) for k in range(-64, 65)]
    x = sorted({0.0, *kinks, *sizes, *(-size for size in sizes)})
    y = function(torch.tensor(x, dtype=torch.float64, device="cpu")).tolist()
    return [[float(f"{number:.4g}") for number in numbers] for numbers in (x, y)]


def _encode_fixed(run: RunData, inputs: dict[str, UnitAlignment], bars: bool) -> dict[str, bytes]:
    """Return by layer the data that all snapshots share: a few numbers per channel, and the distributions of inputs."""
    assert run.shapes is not None
    parts = {}
    for unit in run.shapes:
        seen = inputs.get(unit.name)
        parts[unit.name] = b"".join(_numbers(unit, seen) + (_distribution(seen, unit.channels) if bars else []))
    return parts


def _encode(run: RunData, steps: list[float], fixed: dict[str, bytes]) -> str:
    """Encode all layers in order: the functions at these steps, then the data that all snapshots share."""
    parts: list[bytes] = []
    for name in run.functions:
        snapshots = [run.snapshots[step][name] for step in steps]
        for columns in (("left", "right"), ("heights",), ("left_slope", "right_slope")):
            values = [torch.cat([_columns(snapshot[column]) for column in columns], dim=1) for snapshot in snapshots]
            parts.append(encode_snapshots(torch.stack(values)))
        parts.append(fixed[name])
    return base64.b64encode(zlib.compress(b"".join(parts), 6)).decode("ascii")


def _columns(values: Tensor) -> Tensor:
    return values.to("cpu", torch.float64).reshape(len(values), -1)


def _numbers(unit: UnitShapes, inputs: UnitAlignment | None) -> list[bytes]:
    """Encode per function: its classes as bits; movement, p5 and p95 of the inputs; IOU, shares outside and empty."""
    memberships = zip(*(unit.members(shape) for shape in CLASSES), strict=True)
    bits = [sum(member << place for place, member in enumerate(members)) for members in memberships]
    known = torch.tensor([share == share for share in unit.outside], device="cpu")  # if not, low and high are the bounds
    iou = [math.nan] * unit.channels if inputs is None else inputs.iou
    as_float16 = [unit.movement, *(torch.where(known, _tensor(v), torch.nan) for v in (unit.low, unit.high))]
    return [
        bytes(bits),
        *(encode_float16(_tensor(values)) for values in as_float16),
        *(encode_shares(_tensor(values)) for values in (iou, unit.outside, unit.empty)),
    ]


def _tensor(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64, device="cpu")


def _distribution(inputs: UnitAlignment | None, channels: int) -> list[bytes]:
    """Encode per function the ends of its histogram and the height of each bar, relative to the highest."""
    low = high = torch.full((channels,), torch.nan, dtype=torch.float64, device="cpu")
    bars = torch.zeros(channels, BARS, dtype=torch.float64, device="cpu")
    if inputs is not None and inputs.histogram:
        low, high, bars = (_tensor(values) for values in (inputs.low, inputs.high, inputs.histogram))
    heights = bars / bars.amax(1, keepdim=True).clamp(min=1e-9) * 255
    return [encode_float16(low), encode_float16(high), to_bytes(heights.round().to(torch.uint8))]
