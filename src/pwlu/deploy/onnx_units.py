"""Whether every PWLU of an ONNX file computes in ONNX Runtime what it should: on all segments of all of its functions.

A network on random inputs may never reach most of them, so the nodes of each unit are fed by hand.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pwlu import reference
from pwlu.deploy.fuse import FusedPWLU
from pwlu.deploy.onnx_check import Inputs, Largest, outputs, ratio
from pwlu.deploy.onnx_forms import Form
from pwlu.module import PWLU


class Call(NamedTuple):
    """A call of a unit: its name, and its input."""

    unit: str
    x: Tensor


class UnitsChecked(NamedTuple):
    """What is judged: ``difference`` and ``tolerance`` where they came closest, in ``unit``. To report: ``largest``; ``units``,
    those that are called; ``reached``, the share of all their segments.
    """

    difference: float
    tolerance: float
    unit: str
    largest: Largest
    units: list[str]
    reached: float


def calls_of(model: nn.Module, inputs: Inputs) -> list[Call]:
    """The inputs of all units, in the order of the calls."""
    calls: list[Call] = []
    units = {name: unit for name, unit in model.named_modules() if isinstance(unit, (PWLU, FusedPWLU))}
    handles = [
        unit.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: calls.append(Call(name, args[0] if args else kwargs["x"])), with_kwargs=True
        )
        for name, unit in units.items()
    ]
    try:
        outputs(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def check_units(
    model: nn.Module, forms: dict[str, Form], calls: list[Call], run: Callable[[list[Tensor]], list[Tensor]]
) -> UnitsChecked:
    """Compare all units that are called with themselves in float64, as often as it takes to reach all segments.

    Args:
        model: in PyTorch.
        forms: its units as they were written.
        calls: in PyTorch; they give the shapes.
        run: the same calls in the file, from inputs to outputs.
    """
    called = {call.unit for call in calls}
    forms = {name: form for name, form in forms.items() if name in called}
    exact = {name: copy.deepcopy(model.get_submodule(name)).double() for name in forms}
    hits = {name: torch.zeros(form.channels * (form.intervals + 2), dtype=torch.bool) for name, form in forms.items()}
    rounds = max(math.ceil((forms[name].intervals + 2) * forms[name].channels / max(x.numel(), 1)) for name, x in calls)
    found: list[tuple[Largest, str]] = []
    generator = torch.Generator().manual_seed(0)
    for turn in range(rounds):
        inputs = [_spread(forms[name], x, turn, hits[name], generator) for name, x in calls]
        for (name, _), x, y in zip(calls, inputs, run(inputs), strict=True):
            with torch.no_grad():
                right = exact[name](x.double())
            difference, bound = (y.double() - right).abs().nan_to_num(nan=math.inf), _bound(forms[name], x, right)
            size = float(right.abs().max())
            for at in (int((difference / bound).argmax()), int(difference.argmax())):
                one = float(difference.flatten()[at])
                found.append((Largest(one, ratio(one, size), float(bound.flatten()[at])), name))
    closest, unit = max(found, key=lambda each: ratio(each[0].difference, each[0].tolerance))
    reached = float(torch.cat(list(hits.values())).double().mean())
    return UnitsChecked(closest.difference, closest.tolerance, unit, max(found)[0], list(forms), reached)


def _spread(form: Any, like: Tensor, turn: int, hit: Tensor, generator: torch.Generator) -> Tensor:
    """One number of each segment after the other, in every channel; the tails are taken to be two widths long."""
    channels, segments, dim = form.channels, form.intervals + 2, form.channel_dim
    rows = like.numel() // channels
    segment = (torch.arange(rows) + turn * rows) % segments
    step = 1 / form.inv_step[:, None]
    within = torch.rand(channels, rows, generator=generator)
    far = 2 * form.intervals * within
    position = torch.where(segment == 0, -far, torch.where(segment == segments - 1, form.intervals + far, segment - 1 + within))
    x = form.left[:, None] + step * position
    hit[(torch.arange(channels)[:, None] * segments + segment).flatten()] = True
    if channels == 1:
        return x.reshape(like.shape).to(like.dtype)
    moved = like.movedim(dim, 0).shape
    return x.reshape(moved).movedim(0, dim).to(like.dtype).contiguous()


def _bound(form: Any, x: Tensor, y: Tensor) -> Tensor:
    """How far rounding can carry a result, with u = 2^-24 and every size taken as large as it can be in the channel.

    The tables are rounded (2), the position (4, where a neighbour's line may be taken, whose slope differs by up to twice the
    largest: 8), and every term of the sum once: (terms + 10) u (max|S| (|x| + |B|) + max|O|). Then y itself, to x's type.
    """
    along = lambda t: reference.along(t.double(), x, form.channel_dim)  # noqa: E731
    right = form.left.double() + form.intervals / form.inv_step.double()
    bounds = torch.maximum(form.left.abs().double(), right.abs())
    slope, offset = form.slopes.abs().amax(1), form.offsets.abs().amax(1)
    size = along(slope) * (x.double().abs() + along(bounds)) + along(offset)
    info = torch.finfo(x.dtype)
    return (form.terms + 10) * 2.0**-24 * size + info.eps * y.abs() + info.tiny
