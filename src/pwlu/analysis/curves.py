"""Compute points of learned functions, from a model or from saved parameters."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pwlu import functional, reference
from pwlu.analysis.alignment import Alignment, UnitAlignment, pooled
from pwlu.initial_functions import InitialFunction, find_initial_function
from pwlu.units.module import require_units
from pwlu.units.nonuniform import blocks_to_show

_PARAMETERS = reference.Blocks._fields


class Curves(NamedTuple):
    """The functions of one unit, in float64 on the CPU, and its initial function, if known."""

    left: Tensor
    right: Tensor
    heights: Tensor
    left_slope: Tensor
    right_slope: Tensor
    start: InitialFunction | None

    @property
    def channels(self) -> int:
        """Return the number of functions."""
        return self.left.shape[0]

    def at(self, channel: int, x: Tensor) -> Tensor:
        """Evaluate the function of one channel."""
        left, right, heights, left_slope, right_slope = (p[channel, None] for p in self[:5])
        return reference.forward(x, left, right, heights, left_slope, right_slope, channel_dim=0)

    def points(self, channel: int, low: float, high: float) -> tuple[Tensor, Tensor]:
        """Return x and y of one function at its knots, low and high. The function is exactly linear between these points."""
        left, right = self.left[channel, None], self.right[channel, None]
        places = torch.linspace(0, 1, self.heights.shape[1], dtype=torch.float64, device="cpu")[1:-1]
        # A function with crossed bounds is discontinuous at B_L, so add the point just before.
        just_before = torch.nextafter(left, torch.full_like(left, -torch.inf))
        ends = torch.tensor([low, high], dtype=torch.float64, device="cpu")
        x = torch.cat([ends, just_before, left, left + (right - left) * places, right]).sort().values
        return x, self.at(channel, x)

    def start_points(self, low: float, high: float) -> tuple[Tensor, Tensor]:
        """Return x and y of the initial function, in 200 steps and with a point on each kink."""
        assert self.start is not None
        kinks = torch.tensor([kink for kink in self.start.kinks if low < kink < high], dtype=torch.float64, device="cpu")
        x = torch.cat([torch.linspace(low, high, 201, dtype=torch.float64, device="cpu"), kinks]).sort().values
        return x, self.start.function(x)


def curves_of(model: Any, caller: str) -> dict[str, Curves]:
    """Return the functions of every PWLU by name, from a model or from parameters as in :func:`pwlu.plot_functions`.

    `caller`: the public function that errors name.
    """
    if isinstance(model, Mapping):
        if not model:
            raise ValueError(f"{caller}: the dictionary of parameters is empty")
        return {name: _parse_curves(name, values, caller) for name, values in model.items()}
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller}: expected a model, or the parameters of its PWLUs by name, not {type(model).__name__}")
    units = require_units(caller, model)
    starts = {name: find_initial_function(unit.init) for name, unit in units.items()}
    return {
        name: _to_curves(blocks_to_show(unit), starts[name] if starts[name].channels == 1 else None)
        for name, unit in units.items()
    }


def inputs_of(units: Mapping[str, Any], alignment: Alignment | None, caller: str) -> dict[str, UnitAlignment]:
    """Return the measured inputs by name, one entry per function. Leave out units without inputs.

    `units`: objects with the number of functions as ``channels``, by name.
    """
    if alignment is None:
        return {}
    if not isinstance(alignment, Alignment):
        raise TypeError(
            f"{caller}: alignment must be a pwlu.Alignment, not {type(alignment).__name__}: "
            "write alignment=pwlu.alignment(model, batches)"
        )
    inputs = {unit.name: unit for unit in alignment if unit.name in units}
    if not inputs:
        names = ", ".join(name or "the model" for name in units)
        if all(name in alignment.unreached for name in units):
            raise ValueError(
                f"{caller}: no input reached {names} when the alignment was measured. Leave the alignment out, or measure it "
                "again with other batches"
            )
        raise ValueError(f"{caller}: the alignment has none of these units: {names}. Is it of another model?")
    for name, unit in inputs.items():
        count = units[name].channels
        if count not in (1, unit.channels):
            raise ValueError(
                f"{caller}: {name!r} has {count} channels, but {unit.channels} in the alignment. Is it of another model?"
            )
    return {name: pooled(unit) if units[name].channels < unit.channels else unit for name, unit in inputs.items()}


def _to_curves(parameters: Iterable[Tensor], start: InitialFunction | None) -> Curves:
    left, right, heights, left_slope, right_slope = (p.detach().to("cpu", torch.float64) for p in parameters)
    return Curves(left, right, heights, left_slope, right_slope, start)


def _parse_curves(name: str, values: Any, caller: str) -> Curves:
    if not isinstance(values, Mapping):
        raise TypeError(f"{caller}: {name!r} must be a dictionary of parameters, not {type(values).__name__}")
    if missing := [key for key in _PARAMETERS if key not in values]:
        raise ValueError(f"{caller}: {name!r} lacks {', '.join(missing)}. It needs {', '.join(_PARAMETERS)}")
    start = find_initial_function(values["init"]) if "init" in values else None
    curves = _to_curves((torch.as_tensor(values[key]) for key in _PARAMETERS), start)
    rows = curves.heights.shape[:1]  # empty for a 0-d tensor, which check refuses
    try:
        functional.check(torch.zeros(rows, dtype=torch.float64, device="cpu"), *curves[:5])
    except ValueError as error:
        raise ValueError(f"{caller}: {name!r}: {error}") from None
    return curves
