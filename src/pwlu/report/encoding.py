"""Numbers as few bytes, which ``decode.js`` reads: enough of them to draw with."""

import ctypes

import torch
from torch import Tensor

_NOT_FINITE = {torch.uint8: 255, torch.uint16: 65535}  # one more than the highest level


def packed(values: Tensor) -> bytes:
    """The bytes of a tensor, in C order and in the byte order of the machine, which is little-endian wherever torch runs."""
    values = values.contiguous()
    return ctypes.string_at(values.data_ptr(), values.numel() * values.element_size())


def halves(values: Tensor) -> bytes:
    """As float16: 3 digits."""
    return packed(values.to(torch.float16))


def levels(values: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest of evenly spaced levels from low to high, int64; what is not finite has a level of its own."""
    last = _NOT_FINITE[dtype] - 1
    found = ((values - low) / (high - low) * last).round().clamp(0, last)
    return torch.where(values.isfinite(), found, last + 1).long()


def shares(values: Tensor) -> bytes:
    """Numbers from 0 to 1: a byte each."""
    return packed(levels(values, torch.zeros(()), torch.ones(()), torch.uint8).to(torch.uint8))


def growth(values: Tensor) -> bytes:
    """Numbers (T, C, K) that K columns of C channels have at T moments.

    First the scale of each channel, two bfloat16; then the levels of the last moment, 16 bits; then those of the others, from
    the first on, 8 bits, each as the difference from the one before, modulo 256: small numbers, which can be compressed.
    """
    known = values.isfinite()
    low = torch.where(known, values, torch.inf).amin((0, 2)).nan_to_num(posinf=0.0)
    high = torch.where(known, values, -torch.inf).amax((0, 2)).nan_to_num(neginf=0.0)
    margin = torch.maximum(low.abs(), high.abs()) * 2.0**-7 + 1e-30  # more than the rounding to bfloat16
    scale = torch.stack([low - margin, high + margin], dim=1).to(torch.bfloat16)
    low, high = scale.to(values.dtype)[:, :, None].unbind(1)
    last = levels(values[-1], low, high, torch.uint16)
    earlier = levels(values[:-1], low, high, torch.uint8)
    differences = earlier.diff(dim=0, prepend=torch.zeros_like(earlier[:1])) % 256
    return packed(scale) + packed(last.to(torch.uint16)) + packed(differences.to(torch.uint8))
