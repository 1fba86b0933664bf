"""Several forms of a fused PWLU in ONNX operators. All compute the same function.

A runtime passes over memory once per operator. So the speed of a form depends on the number of its operators and the speed of
each. All forms compute in float32, even if x is float16.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from pwlu import reference
from pwlu.deploy.fuse import FusedPWLU

MARKS = "pwlu.marks"  # operator domain of the marks, which are removed from the final file


class Form(FusedPWLU):
    """A fused PWLU for export. Marks around it show where it begins and ends in the file."""

    name: str

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of ``compute``, with marks at the input and the output."""
        return self._mark("Leave", self.compute(self._mark("Enter", x)))

    def _mark(self, mark: str, x: Tensor) -> Tensor:
        return torch.onnx.ops.symbolic(f"{MARKS}::{mark}", (x,), {"unit": self.name}, dtype=x.dtype, shape=x.shape, version=1)

    def compute(self, x: Tensor) -> Tensor:
        """Compute the unit with operators that ONNX has."""
        raise NotImplementedError

    def prepare_(self) -> None:
        """Compute additional tables that the form needs."""

    @property
    def terms(self) -> int:
        """Return the number of terms of the sum that gives the result."""
        return 2


class Elements(Form):
    """Reads S_j and O_j with GatherElements from one table per row: y = x S_j + O_j.

    With r = 1/d, the position x r + (1 - B_L r) is counted from the left outer segment. The result of Cast is undefined for
    NaN, and GatherElements fails if an index is out of range. So the index is clamped a second time. The result is still NaN.
    """

    shift: Tensor

    def prepare_(self) -> None:
        """Compute 1 - B_L/d, rounded once."""
        self.register_buffer("shift", (1 - self.left.double() * self.inv_step.double()).float())

    def compute(self, x: Tensor) -> Tensor:
        """Compute y = x S_j + O_j."""
        dim, last = self.channel_dim, self.slopes.shape[1] - 1
        value = reference.finite(x.float())
        inv_step, shift = (reference.along(t, x, dim) for t in (self.inv_step, self.shift))
        index = (value * inv_step + shift).clamp(0, last).to(torch.int32).clamp(0, last)
        if self.channels > 1 and dim % x.ndim == x.ndim - 1:
            rows: tuple[int, ...] = (math.prod(x.shape[:-1]), self.channels)
            slopes, offsets, axis = self.slopes.T, self.offsets.T, 0
        else:
            # If one function serves all elements, any division into rows is right. Threads divide the rows among them.
            before = x.shape[: dim % x.ndim] if self.channels > 1 else x.shape[: min(2, x.ndim - 1)]
            rest = math.prod(x.shape[len(before) + (self.channels > 1) :])
            rows = (math.prod(before), self.channels, rest)
            slopes, offsets = (t.expand(rows[0], -1, -1) for t in (self.slopes, self.offsets))
            axis = 2
        index = index.reshape(rows)
        y = value.reshape(rows) * _gather_elements(slopes, index, axis) + _gather_elements(offsets, index, axis)
        return y.reshape(x.shape).to(x.dtype)


def _gather_elements(table: Tensor, index: Tensor, axis: int) -> Tensor:
    """Apply torch.gather with a 32-bit index; torch would export a 64-bit one."""
    return torch.onnx.ops.symbolic("GatherElements", (table, index), {"axis": axis}, dtype=table.dtype, shape=index.shape)


class Clips(Form):
    """Computes y = Y_0 + K_L min(x - B_L, 0) + K_R max(x - B_R, 0) + sum_i (Y_{i+1} - Y_i) clip((x - B_L)/d - i, 0, 1).

    It needs no index and no table. For large |x|, all terms but one are constant. In a sum of c_k relu(x - t_k), terms would
    grow with |x| and cancel.
    """

    start: Tensor
    right: Tensor
    rises: Tensor

    @property
    def terms(self) -> int:
        """Return the number of terms of the sum that gives the result."""
        return self.intervals + 3

    def prepare_(self) -> None:
        """Compute Y_0 and B_R (C,), and Y_{i+1} - Y_i (C, N), rounded once."""
        left, inv_step, slopes, offsets = (t.double() for t in (self.left, self.inv_step, self.slopes, self.offsets))
        wide = {
            "start": left * slopes[:, 0] + offsets[:, 0],
            "right": left + self.intervals / inv_step,
            "rises": slopes[:, 1:-1] / inv_step[:, None],
        }
        for name, tensor in wide.items():
            self.register_buffer(name, tensor.float())

    def compute(self, x: Tensor) -> Tensor:
        """Compute the sum of clipped lines."""

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
    """Reads S_j and O_j with GatherND from one long table, as torch exports :func:`pwlu.reference.lookup`."""

    def compute(self, x: Tensor) -> Tensor:
        """Compute the function as torch exports it."""
        return reference.lookup(x, self.left, self.inv_step, self.slopes, self.offsets, self.channel_dim)


FORMS: dict[str, type[Form]] = {"elements": Elements, "gather": Gather, "clips": Clips}
FASTEST = "elements"


def set_form_(model: nn.Module, form: str) -> dict[str, Form]:
    """Set the form in which every fused PWLU of the model is exported; return them by name."""
    units: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, FusedPWLU)}
    for name, unit in units.items():
        for table in ("left", "inv_step", "slopes", "offsets"):
            setattr(unit, table, getattr(unit, table).float())
        unit.__class__ = FORMS[form]
        unit.name = name
        unit.prepare_()
    return units
