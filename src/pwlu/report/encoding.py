"""Encode numbers in few bytes, precisely enough to draw them. ``decode.js`` decodes them."""

import ctypes

import torch
from torch import Tensor

_NOT_FINITE = {torch.uint8: 255, torch.uint16: 65535}  # the code of non-finite values, one above the highest level


def to_bytes(values: Tensor) -> bytes:
    """Return the bytes of a tensor in C order and in the byte order of the machine, little-endian on all platforms of torch."""
    values = values.contiguous()
    return ctypes.string_at(values.data_ptr(), values.numel() * values.element_size())


def encode_float16(values: Tensor) -> bytes:
    """Encode numbers as float16, which has 3 significant digits."""
    return to_bytes(values.to(torch.float16))


def quantise(values: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the index of the nearest evenly spaced level from low to high, as int64; the last index for non-finite values."""
    last = _NOT_FINITE[dtype] - 1
    found = ((values - low) / (high - low) * last).round().clamp(0, last)
    return torch.where(values.isfinite(), found, last + 1).long()


def encode_shares(values: Tensor) -> bytes:
    """Encode numbers from 0 to 1 in one byte each."""
    return to_bytes(quantise(values, torch.zeros(()), torch.ones(()), torch.uint8).to(torch.uint8))


def encode_snapshots(values: Tensor) -> bytes:
    """Encode the numbers (T, C, K) of T snapshots, C channels and K columns.

    First come the smallest and the largest level of each channel, as bfloat16. Then come the levels of the last snapshot in 16
    bits, and those of the other snapshots, from the first on, in 8 bits. The 8-bit levels are stored as differences from the
    previous snapshot, modulo 256, because small numbers compress well.
    """
    known = values.isfinite()
    low = torch.where(known, values, torch.inf).amin((0, 2)).nan_to_num(posinf=0.0)
    high = torch.where(known, values, -torch.inf).amax((0, 2)).nan_to_num(neginf=0.0)
    margin = torch.maximum(low.abs(), high.abs()) * 2.0**-7 + 1e-30  # larger than the rounding error of bfloat16
    scale = torch.stack([low - margin, high + margin], dim=1).to(torch.bfloat16)
    low, high = scale.to(values.dtype)[:, :, None].unbind(1)
    last = quantise(values[-1], low, high, torch.uint16)
    earlier = quantise(values[:-1], low, high, torch.uint8)
    differences = earlier.diff(dim=0, prepend=torch.zeros_like(earlier[:1])) % 256
    return to_bytes(scale) + to_bytes(last.to(torch.uint16)) + to_bytes(differences.to(torch.uint8))
