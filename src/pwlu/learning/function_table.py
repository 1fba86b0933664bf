"""PWLUs as tables with one row per function, so that a few operators serve all PWLUs of a model."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pwlu.reference import compute_dtype, parameter_indices
from pwlu.units.module import PWLU
from pwlu.units.sharding import gathered, is_sharded, write_parameter

LEFT, RIGHT, SLOPES, HEIGHTS = slice(0, 1), slice(1, 2), slice(2, 4), slice(4, None)  # columns of a table


class FunctionTable:
    """The layout of the weights of several PWLUs with the same N, device and dtype. Either all or none of them are sharded.

    A table is a tensor (F, N + 5) with one row per function: left, right, left_slope, right_slope, heights. It has the compute
    dtype, float32 or float64. A layer means the functions of one PWLU; `channels` holds the number of functions of each.
    """

    def __init__(self, channels: tuple[int, ...], intervals: int, device: torch.device, dtype: torch.dtype) -> None:
        self.intervals, self.device, self.dtype = intervals, device, dtype
        self.lengths = [count * (intervals + 5) for count in channels]
        self.rows = parameter_indices(tuple(self.lengths), intervals, device)
        self.places = self.rows.reshape(-1).argsort()  # the inverse permutation
        counts = torch.tensor(channels)
        layers = torch.arange(len(channels)).repeat_interleave(counts)
        self.layer = layers.to(device)
        self.counts = counts.repeat_interleave(counts)[:, None].to(device, dtype)
        means = torch.nn.functional.one_hot(layers, len(channels)).T.double() / counts[:, None]
        self._means = means.to(device, dtype)

    def read(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the table of tensors that have the layout of the weights. All-gather them if they are sharded."""
        tensors = list(tensors)
        if is_sharded(tensors[0]):
            tensors = [gathered(t) for t in tensors]
        # index_select is several times as fast as indexing on CPUs.
        return torch.cat(tensors).index_select(0, self.rows.view(-1)).view(self.rows.shape).to(self.dtype)

    def write(self, tensors: Sequence[Tensor], table: Tensor) -> None:
        """Write a table into tensors that have the layout of the weights, in place."""
        values = table.reshape(-1).index_select(0, self.places).split(self.lengths)
        if is_sharded(tensors[0]):
            for tensor, value in zip(tensors, values, strict=True):
                write_parameter(tensor, value)
        else:
            torch._foreach_copy_(list(tensors), list(values))

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the rows of each layer, (layers, ...). The matrix product is deterministic on GPUs."""
        return self._means @ values

    def layer_mean(self, values: Tensor) -> Tensor:
        """Return, for each row, the mean over the rows of its layer."""
        return self.mean(values).index_select(0, self.layer)


@functools.lru_cache(64)
def _table(channels: tuple[int, ...], intervals: int, device: torch.device, dtype: torch.dtype) -> FunctionTable:
    return FunctionTable(channels, intervals, device, dtype)


def table_of(units: Sequence[PWLU]) -> FunctionTable:
    """Return the layout of the weights of units with the same N, device and dtype."""
    weight: Any = units[0].weight
    return _table(tuple(unit.channels for unit in units), units[0].intervals, weight.device, compute_dtype(weight))


def interval(table: Tensor) -> Tensor:
    """Return d = (B_R - B_L)/N of each row, (F, 1)."""
    return (table[:, RIGHT] - table[:, LEFT]) / (table.shape[1] - 5)


def bends(table: Tensor, d: Tensor) -> Tensor:
    """Return the second differences of the heights at the N + 1 knots, as in :func:`pwlu.curvature`: (F, N + 1)."""
    outer = table[:, SLOPES] * d
    return torch.cat([outer[:, :1], table[:, HEIGHTS].diff(), outer[:, 1:]], 1).diff()
