"""Check every PWLU of an ONNX file in ONNX Runtime, on all segments of all of its functions.

With random inputs, a network may never reach most segments. So the check feeds the nodes of each unit directly.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pwlu import reference
from pwlu.deploy.fuse import FusedPWLU
from pwlu.deploy.onnx_check import Difference, Inputs, outputs, ratio
from pwlu.deploy.onnx_forms import Form
from pwlu.units.dynamic import DynamicPWLU
from pwlu.units.module import PWLU
from pwlu.units.nonuniform import NonUniformPWLU


class Call(NamedTuple):
    """A call of a unit: its name and its input."""

    unit: str
    x: Tensor


class UnitsCheck(NamedTuple):
    """The result of the check. It passes if ``closest.allowed``.

    Attributes:
        closest: the difference of ``unit``.
        unit: the unit that is closest to its tolerance.
        largest: the largest difference of all units, for reports.
        units: the names of the called units.
        reached: the fraction of all segments of these units that the inputs reached.
    """

    closest: Difference
    unit: str
    largest: Difference
    units: list[str]
    reached: float


def calls_of(model: nn.Module, inputs: Inputs) -> list[Call]:
    """Return the inputs of all units in call order. Dynamic and non-uniform PWLUs are left out."""
    calls: list[Call] = []
    every = {name: unit for name, unit in model.named_modules() if isinstance(unit, (PWLU, FusedPWLU))}
    units = {name: unit for name, unit in every.items() if not isinstance(unit, (DynamicPWLU, NonUniformPWLU))}
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
) -> UnitsCheck:
    """Compare all called units with copies in float64, in as many rounds as are needed to reach all segments.

    Args:
        model: the PyTorch model.
        forms: its units as exported.
        calls: the calls in PyTorch. Only the shapes of their inputs are used.
        run: a function that runs the same calls in the file, from inputs to outputs.
    """
    called = {call.unit for call in calls}
    forms = {name: form for name, form in forms.items() if name in called}
    exact = {name: copy.deepcopy(model.get_submodule(name)).double() for name in forms}
    hits = {name: torch.zeros(form.channels * (form.intervals + 2), dtype=torch.bool) for name, form in forms.items()}
    rounds = max(math.ceil((forms[name].intervals + 2) * forms[name].channels / max(x.numel(), 1)) for name, x in calls)
    found: list[tuple[Difference, str]] = []
    generator = torch.Generator().manual_seed(0)
    for round_ in range(rounds):
        inputs = [_inputs_in_all_segments(forms[name], x, round_, hits[name], generator) for name, x in calls]
        for (name, _), x, y in zip(calls, inputs, run(inputs), strict=True):
            with torch.no_grad():
                right = exact[name](x.double())
            difference, bound = (y.double() - right).abs().nan_to_num(nan=math.inf), _rounding_bound(forms[name], x, right)
            size = float(right.abs().max())
            for at in (int((difference / bound).argmax()), int(difference.argmax())):
                one = float(difference.flatten()[at])
                found.append((Difference(one, ratio(one, size), float(bound.flatten()[at])), name))
    closest, unit = max(found, key=lambda each: each[0].closeness)
    reached = float(torch.cat(list(hits.values())).double().mean())
    return UnitsCheck(closest, unit, max(found)[0], list(forms), reached)


def _inputs_in_all_segments(form: Any, like: Tensor, round_: int, hit: Tensor, generator: torch.Generator) -> Tensor:
    """Return inputs that visit the segments of every channel in turn. They reach up to 2 (B_R - B_L) beyond the bounds."""
    channels, segments, dim = form.channels, form.intervals + 2, form.channel_dim
    rows = like.numel() // channels
    segment = (torch.arange(rows) + round_ * rows) % segments
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


def _rounding_bound(form: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return a bound on the rounding error of a result, with u = 2^-24 and the largest values of the channel.

    The tables have 2 roundings. The position has 4, which may select a neighbouring line. The slope of that line differs by up
    to twice the largest slope, so these count as 8. Every term of the sum has 1. In total, the bound is
    (terms + 10) u (max|S| (|x| + |B|) + max|O|), plus the rounding of y to the dtype of x.
    """
    along = lambda t: reference.along(t.double(), x, form.channel_dim)  # noqa: E731
    right = form.left.double() + form.intervals / form.inv_step.double()
    bounds = torch.maximum(form.left.abs().double(), right.abs())
    slope, offset = form.slopes.abs().amax(1), form.offsets.abs().amax(1)
    size = along(slope) * (x.double().abs() + along(bounds)) + along(offset)
    info = torch.finfo(x.dtype)
    return (form.terms + 10) * 2.0**-24 * size + info.eps * y.abs() + info.tiny
