"""Triton kernels of APL, one for forward and one for backward.

A tensor is (outer, channels, inner) in memory order: `outer` rows of channels * inner elements each. A program works on a group
of neighbouring columns. There are two modes. With "planes", a group has the columns of one channel. With "rows", a group may
have columns of several channels. "Rows" is used if one channel has fewer bytes per row than a GPU fetches at once. A tile is a
rectangle of neighbouring rows and columns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pwlu.baselines.fused import max_programs
from pwlu.kernels import layout
from pwlu.reference import compute_dtype

_FETCH_BYTES = 32  # the number of bytes that a GPU fetches at once
_COLUMNS = 32  # columns of a tile with "rows"
_MIN_ROWS = 64  # rows that a program adds up with "rows", because it writes 2 S sums per column


class _Plan(NamedTuple):
    """The arguments of the kernels, in their order."""

    outer: int
    channels: int
    inner: int
    planes: bool
    tile_rows: int
    tile_columns: int

    @classmethod
    def of(cls, x: Tensor, channels: int, channel_dim: int, hinges: int) -> "_Plan":
        """Return the plan for a dense x that is not empty."""
        outer, channels, inner = layout.geometry(x, channels, channel_dim)
        elements = 1024 if hinges <= 3 else 512  # backward keeps 2 S sums per element of a tile in registers
        planes = channels == 1 or inner * x.element_size() >= _FETCH_BYTES
        columns = min(triton.next_power_of_2(inner), elements) if planes else _COLUMNS
        columns = min(columns, triton.next_power_of_2(channels * inner))
        return cls(outer, channels, inner, planes, min(triton.next_power_of_2(outer), elements // columns), columns)

    def grid(self) -> tuple[int, int]:
        """Return the number of groups, and the number of tiles per group."""
        down = triton.cdiv(self.outer, self.tile_rows)
        if self.planes:
            return self.channels, down * triton.cdiv(self.inner, self.tile_columns)
        return triton.cdiv(self.channels * self.inner, self.tile_columns), down


def forward(x: Tensor, slopes: Tensor, offsets: Tensor, channel_dim: int) -> Tensor:
    """Return y for an x that is not empty."""
    y = torch.empty_like(x)
    x = layout.laid_out_as(y, x)
    channels, hinges = slopes.shape
    plan = _Plan.of(x, channels, channel_dim, hinges)
    groups, tiles = plan.grid()
    with torch.cuda.device_of(x):
        _forward[(groups * tiles,)](x, slopes.contiguous(), offsets.contiguous(), y, *plan, hinges)
    return y


def backward(
    grad: Tensor, x: Tensor, slopes: Tensor, offsets: Tensor, channel_dim: int, need_x: bool, need_parameters: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradient of x, and those of slopes and offsets as one tensor (2, C, S) in float64; None if not needed.

    A program visits k tiles. It adds in float32 (float64 for float64): first each element of the tile over the k tiles, then
    all elements of the tile. The sums of the programs are added in float64. So the rounding error of a sum is at most (k + 10)
    eps/2 times the sum of the absolute values of its terms.
    """
    like = torch.empty_like(x)
    x, grad = layout.laid_out_as(like, x), layout.laid_out_as(like, grad)
    channels, hinges = slopes.shape
    plan = _Plan.of(x, channels, channel_dim, hinges)
    groups, tiles = plan.grid()
    min_tiles = 1 if plan.planes else triton.cdiv(_MIN_ROWS, plan.tile_rows)
    programs = min(triton.cdiv(tiles, min_tiles), triton.cdiv(max_programs(x.device), groups))  # per group
    grad_x = like if need_x else None
    sums = None
    if need_parameters:
        wide = compute_dtype(x)
        sums = x.new_empty(programs, 2, channels, 1 if plan.planes else plan.inner, hinges, dtype=wide)
    with torch.cuda.device_of(x):
        _backward[(groups * programs,)](grad, x, slopes.contiguous(), offsets.contiguous(), grad_x, sums, *plan, hinges)
    return grad_x, None if sums is None else sums.sum((0, 3), dtype=torch.float64)


@triton.jit
def _groups(channels: tl.tensor, inner: tl.tensor, PLANES: tl.constexpr, TILE_COLUMNS: tl.constexpr) -> tl.tensor:
    """Return the number of groups."""
    return channels if PLANES else tl.cdiv(tl.cast(channels, tl.int64) * inner, TILE_COLUMNS)


@triton.jit
def _group(
    group: tl.tensor, channels: tl.tensor, inner: tl.tensor, PLANES: tl.constexpr, TILE_COLUMNS: tl.constexpr
) -> tl.tensor:
    """Return for a group: its first column, the columns from there on, the number of tiles across, and its channels."""
    if PLANES:
        channel, start, columns, across = group, tl.cast(group, tl.int64) * inner, inner, tl.cdiv(inner, TILE_COLUMNS)
    else:
        start, across = tl.cast(group, tl.int64) * TILE_COLUMNS, 1
        channel = (start + tl.arange(0, TILE_COLUMNS)[None, :]) // inner
        columns = tl.cast(channels, tl.int64) * inner - start
    return start, columns, across, channel


@triton.jit
def _tile(
    tile: tl.tensor,
    start: tl.tensor,
    columns: tl.tensor,
    across: tl.tensor,
    outer: tl.tensor,
    period: tl.tensor,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return the offsets of the elements of a tile, and a mask of those inside the tensor."""
    row = tl.cast(tile // across, tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    column = tl.cast(tile % across, tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    return row * period + start + column, (row < outer) & (column < columns)


@triton.jit
def _hinges(parameter: tl.tensor, channel: tl.tensor, channels: tl.tensor, S: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Load a parameter of all S hinges, for one channel or for several."""
    found: tl.tuple = ()
    for s in tl.static_range(S):
        value = tl.load(parameter + channel * S + s, mask=channel < channels, other=0)
        found = found + (value.to(WIDE),)  # noqa: RUF005 (Triton does not unpack)
    return found


@triton.jit
def _forward(
    x: tl.tensor,
    slopes: tl.tensor,
    offsets: tl.tensor,
    y: tl.tensor,
    outer: tl.tensor,
    channels: tl.tensor,
    inner: tl.tensor,
    PLANES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    S: tl.constexpr,
) -> None:
    """Compute one tile of y."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    groups = _groups(channels, inner, PLANES, TILE_COLUMNS)
    program = tl.program_id(0)
    start, columns, across, channel = _group(program % groups, channels, inner, PLANES, TILE_COLUMNS)
    slope, offset = _hinges(slopes, channel, channels, S, WIDE), _hinges(offsets, channel, channels, S, WIDE)
    period = tl.cast(channels, tl.int64) * inner
    at, exists = _tile(program // groups, start, columns, across, outer, period, TILE_ROWS, TILE_COLUMNS)
    value = tl.load(x + at, mask=exists, other=0).to(WIDE)
    result = tl.maximum(value, 0.0)  # this is 0 for NaN, but the hinges below make it NaN again
    for s in tl.static_range(S):
        result += slope[s] * tl.where(value > offset[s], 0.0, offset[s] - value)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=exists)


@triton.jit
def _backward(
    grad: tl.tensor,
    x: tl.tensor,
    slopes: tl.tensor,
    offsets: tl.tensor,
    grad_x: tl.tensor,
    sums: tl.tensor,
    outer: tl.tensor,
    channels: tl.tensor,
    inner: tl.tensor,
    PLANES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    S: tl.constexpr,
) -> None:
    """Compute every n-th tile of a group, for n programs per group, and the sums over these tiles.

    The sums are (programs per group, 2, channels or columns, S).
    """
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    groups = _groups(channels, inner, PLANES, TILE_COLUMNS)
    group, program, programs = tl.program_id(0) % groups, tl.program_id(0) // groups, tl.num_programs(0) // groups
    start, columns, across, channel = _group(group, channels, inner, PLANES, TILE_COLUMNS)
    slope, offset = _hinges(slopes, channel, channels, S, WIDE), _hinges(offsets, channel, channels, S, WIDE)
    period = tl.cast(channels, tl.int64) * inner
    totals: tl.tuple = (tl.zeros((TILE_ROWS, TILE_COLUMNS), WIDE),) * S
    moments = totals  # totals and moments: sums of g and of g x over the elements left of each hinge
    for tile in range(program, tl.cdiv(outer, TILE_ROWS) * across, programs):
        at, exists = _tile(tile, start, columns, across, outer, period, TILE_ROWS, TILE_COLUMNS)
        value = tl.load(x + at, mask=exists, other=0).to(WIDE)
        given = tl.load(grad + at, mask=exists, other=0).to(WIDE)
        result = tl.where(value > 0, given, 0.0)
        new_totals: tl.tuple = ()
        new_moments: tl.tuple = ()
        for s in tl.static_range(S):
            left = tl.where(value < offset[s], given, 0.0)
            result -= slope[s] * left
            new_totals = new_totals + (totals[s] + left,)  # noqa: RUF005
            new_moments = new_moments + (moments[s] + left * value,)  # noqa: RUF005
        totals, moments = new_totals, new_moments
        if grad_x is not None:
            tl.store(grad_x + at, result.to(grad_x.dtype.element_ty), mask=exists)
    if sums is not None:
        if PLANES:
            entries, entry = channels, group
        else:
            entries, entry = period, start + tl.arange(0, TILE_COLUMNS)[None, :]
        for s in tl.static_range(S):
            if PLANES:
                total, moment = tl.sum(totals[s]), tl.sum(moments[s])
            else:
                total, moment = tl.sum(totals[s], 0, keep_dims=True), tl.sum(moments[s], 0, keep_dims=True)
            place = sums + (program * 2 * entries + entry) * S + s
            tl.store(place, offset[s] * total - moment, mask=entry < entries)
            tl.store(place + entries * S, slope[s] * total, mask=entry < entries)
