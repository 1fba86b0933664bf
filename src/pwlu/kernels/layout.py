"""Tensors as kernels see them: an address and three numbers, (outer, channels, inner) in memory order.

Every dense layout has such a form: inner is the stride of the channel dimension.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def laid_out_as(like: Tensor, x: Tensor) -> Tensor:
    """x in the memory layout of `like`, which is dense: x itself wherever possible."""
    if x.stride() == like.stride():
        return x
    return torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def dense(x: Tensor) -> Tensor:
    """x in the layout of ``torch.empty_like(x)``: x itself wherever possible."""
    return x if x.is_contiguous() else laid_out_as(torch.empty_like(x, device="meta"), x)


def geometry(x: Tensor, channels: int, channel_dim: int) -> tuple[int, int, int]:
    """(outer, channels, inner) of a dense x that is not empty."""
    inner = x.numel() if channels == 1 else x.stride(channel_dim)
    return x.numel() // (channels * inner), channels, inner


def check(x: Tensor, tables: Sequence[Tensor], intervals: int, channel_dim: int) -> int:
    """The number of channels, once types and shapes are such that a kernel stays inside of its arrays, whoever called it."""
    one, device = tables[0].shape, x.device
    channels = one[0] if len(one) == 1 else 0
    expected: tuple[tuple[int, ...], ...] = (one, one, (channels, intervals + 1), one, one)
    if len(tables) == 4:
        expected = (one, one, (channels, intervals + 2), (channels, intervals + 2))
    if not channels or intervals < 1:
        _refuse(x, tables)
    for table, shape in zip(tables, expected, strict=True):
        if table.shape != shape or table.device != device:
            _refuse(x, tables)
        if table.dtype not in FLOATS:
            raise TypeError(f"pwlu: parameters must be of a floating-point type, not {table.dtype}")
    check_channels(x, channels, channel_dim)
    return channels


def _refuse(x: Tensor, tables: Sequence[Tensor]) -> None:
    expected = "(C,), (C,), (C, N+1), (C,), (C,)" if len(tables) == 5 else "(C,), (C,), (C, N+2), (C, N+2)"
    found = ", ".join(f"{tuple(t.shape)} on {t.device}" for t in tables)
    raise ValueError(
        f"pwlu: expected parameters of the shapes {expected} with C and N of at least 1 on {x.device}, not {found}"
    )


def check_channels(x: Tensor, channels: int, channel_dim: int) -> None:
    """Raise unless x is of a type kernels know and has `channels` entries along `channel_dim`."""
    if x.dtype not in FLOATS:
        raise TypeError(f"pwlu: x must be float32, bfloat16, float16 or float64, not {x.dtype}")
    if channels < 1 or (channels > 1 and (not -x.ndim <= channel_dim < x.ndim or x.shape[channel_dim] != channels)):
        raise ValueError(f"pwlu: x of shape {tuple(x.shape)} does not have {channels} channels in dimension {channel_dim}")


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Where they are in memory; RuntimeError for one that has none."""
    found = [tensor.data_ptr() for tensor in tensors]
    if 0 in found:
        raise RuntimeError(
            "pwlu: x or a parameter has no memory: it was freed (as fully sharded training does between uses), or never made "
            "(torch's efficient zeros). Call the whole module that owns it, or write .clone()"
        )
    return found


def check_grad(grad: Tensor, x: Tensor) -> None:
    """Raise unless grad can be the gradient of something of x's shape."""
    if grad.shape != x.shape or grad.device != x.device:
        raise ValueError(
            f"pwlu: grad must have the shape {tuple(x.shape)} and device {x.device} of x, "
            f"not {tuple(grad.shape)} on {grad.device}"
        )
