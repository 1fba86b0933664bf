"""The ways in which a fused PWLU can be written with the operators of ONNX. All of them compute the same function.

A runtime goes through memory once for every operator, so what counts is how many there are and how good each one is.
Arithmetic is in float32, also where x is of float16.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from pwlu import reference
from pwlu.deploy.fuse import FusedPWLU

MARKS = "pwlu.marks"  # a domain of operators that never reaches the file


class Form(FusedPWLU):
    """A fused PWLU that is going to be exported. Marks of no meaning tell later where in the file it begins and ends."""

    name: str

    def forward(self, x: Tensor) -> Tensor:
        """x as it is, marked, through the form, marked again."""
        return self._marked("Leave", self.written(self._marked("Enter", x)))

    def _marked(self, mark: str, x: Tensor) -> Tensor:
        return torch.onnx.ops.symbolic(f"{MARKS}::{mark}", (x,), {"unit": self.name}, dtype=x.dtype, shape=x.shape, version=1)

    def written(self, x: Tensor) -> Tensor:
        """What the unit computes, in operators that ONNX has."""
        raise NotImplementedError

    def prepare_(self) -> None:
        """Compute tables that the form needs besides those it has."""

    @property
    def terms(self) -> int:
        """Of the sum that the result is."""
        return 2


class Elements(Form):
    """S_j and O_j by GatherElements from a table of its own for every row: y = x S_j + O_j.

    x r + (1 - B_L r) is the position, counted from the left tail. What Cast makes of NaN is not defined, and GatherElements
    fails on an index that is out of range: hence the second clamp, of the index. The value stays NaN.
    """

    shift: Tensor

    def prepare_(self) -> None:
        """1 - B_L/d, rounded once."""
        self.register_buffer("shift", (1 - self.left.double() * self.inv_step.double()).float())

    def written(self, x: Tensor) -> Tensor:
        """As the class says."""
        dim, last = self.channel_dim, self.slopes.shape[1] - 1
        value = reference.finite(x.float())
        inv_step, shift = (reference.along(t, x, dim) for t in (self.inv_step, self.shift))
        index = (value * inv_step + shift).clamp(0, last).to(torch.int32).clamp(0, last)
        if self.channels > 1 and dim % x.ndim == x.ndim - 1:
            rows: tuple[int, ...] = (math.prod(x.shape[:-1]), self.channels)
            slopes, offsets, axis = self.slopes.T, self.offsets.T, 0
        else:
            # one function for everything: any rows will do, and threads share them out
            before = x.shape[: dim % x.ndim] if self.channels > 1 else x.shape[: min(2, x.ndim - 1)]
            rest = math.prod(x.shape[len(before) + (self.channels > 1) :])
            rows = (math.prod(before), self.channels, rest)
            slopes, offsets = (t.expand(rows[0], -1, -1) for t in (self.slopes, self.offsets))
            axis = 2
        index = index.reshape(rows)
        y = value.reshape(rows) * _gather_elements(slopes, index, axis) + _gather_elements(offsets, index, axis)
        return y.reshape(x.shape).to(x.dtype)


def _gather_elements(table: Tensor, index: Tensor, axis: int) -> Tensor:
    """torch.gather, which ONNX would be given with an index of 64 bits."""
    return torch.onnx.ops.symbolic("GatherElements", (table, index), {"axis": axis}, dtype=table.dtype, shape=index.shape)


class Clips(Form):
    """y = Y_0 + K_L min(x - B_L, 0) + K_R max(x - B_R, 0) + sum over i of (Y_{i+1} - Y_i) clip((x - B_L)/d - i, 0, 1).

    No index and no table. Far out all but one of the terms are constant, so that none of them grow and cancel, as those of a
    sum of c_k relu(x - t_k) do.
    """

    start: Tensor
    right: Tensor
    rises: Tensor

    @property
    def terms(self) -> int:
        """Of the sum that the result is."""
        return self.intervals + 3

    def prepare_(self) -> None:
        """Y_0 and B_R (C,), and Y_{i+1} - Y_i (C, N), rounded once."""
        left, inv_step, slopes, offsets = (t.double() for t in (self.left, self.inv_step, self.slopes, self.offsets))
        wide = {
            "start": left * slopes[:, 0] + offsets[:, 0],
            "right": left + self.intervals / inv_step,
            "rises": slopes[:, 1:-1] / inv_step[:, None],
        }
        for name, tensor in wide.items():
            self.register_buffer(name, tensor.float())

    def written(self, x: Tensor) -> Tensor:
        """As the class says."""

        def along(parameter: Tensor) -> Tensor:
            return reference.along(parameter, x, self.channel_dim)

        value = reference.finite(x.float())
        distance = value - along(self.left)
        y = along(self.start) + along(self.slopes[:, 0]) * distance.clamp(max=0)
        y = y + along(self.slopes[:, -1]) * (value - along(self.right)).clamp(min=0)
        position = distance * along(self.inv_step)
        for i in range(self.intervals):
            y = y + along(self.rises[:, i]) * (position - i).clamp(0, 1)
        return y.to(x.dtype)


class Gather(Form):
    """S_j and O_j by GatherND from one long table, as torch exports :func:`pwlu.reference.lookup`."""

    def written(self, x: Tensor) -> Tensor:
        """The function as it is exported without this file."""
        return reference.lookup(x, self.left, self.inv_step, self.slopes, self.offsets, self.channel_dim)


FORMS: dict[str, type[Form]] = {"elements": Elements, "gather": Gather, "clips": Clips}
FASTEST = "elements"


def write_as_(model: nn.Module, form: str) -> dict[str, Form]:
    """Let every fused PWLU of the model be exported in that form; return them by name."""
    units: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, FusedPWLU)}
    for name, unit in units.items():
        for table in ("left", "inv_step", "slopes", "offsets"):
            setattr(unit, table, getattr(unit, table).float())
        unit.__class__ = FORMS[form]
        unit.name = name
        unit.prepare_()
    return units
