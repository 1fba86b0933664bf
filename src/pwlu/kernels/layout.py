"""Describe a tensor as the kernels need it: an address, and the sizes (outer, channels, inner) in memory order.

Every dense layout has this form: `inner` is the stride of the channel dimension.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class NormState(NamedTuple):
    """What a batch norm has besides its input, in the order in which operators take it. `factor`: of the running average."""

    gamma: Tensor | None
    beta: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    batches: Tensor | None
    factor: float
    eps: float
    training: bool
    pool: Tensor | None


def laid_out_as(like: Tensor, x: Tensor) -> Tensor:
    """Return x in the memory layout of `like`, which is dense: x itself if possible, else a copy."""
    if x.stride() == like.stride():
        return x
    return torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def dense(x: Tensor) -> Tensor:
    """Return x in the memory layout of ``torch.empty_like(x)``: x itself if possible, else a copy."""
    return x if x.is_contiguous() else laid_out_as(torch.empty_like(x, device="meta"), x)


def geometry(x: Tensor, channels: int, channel_dim: int) -> tuple[int, int, int]:
    """Return (outer, channels, inner) of a dense x that is not empty."""
    inner = x.numel() if channels == 1 else x.stride(channel_dim)
    return x.numel() // (channels * inner), channels, inner


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return the addresses of tensors; raise RuntimeError if one has no memory."""
    found = [tensor.data_ptr() for tensor in tensors]
    if 0 in found:
        raise RuntimeError(
            "pwlu: x or a parameter has no memory: it was freed (as fully_shard does between uses) or never allocated "
            "(as for torch._efficientzerotensor). Call the module that owns the parameter, or pass x.clone()"
        )
    return found


def optional_addresses(*tensors: Tensor | None) -> list[int]:
    """Where they are in memory; 0 for one that is missing."""
    return [0 if tensor is None else addresses([tensor])[0] for tensor in tensors]


def note_changes(state: NormState) -> None:
    """Count the changes in place that a norm of a batch makes; of running statistics torch counts none either.

    It holds them for the backward pass of a norm that is called twice.
    """
    for changed in (state.batches, state.pool):
        if state.training and changed is not None:
            torch.autograd.graph.increment_version(changed)


def blocks(weight: int, channels: int, intervals: int, itemsize: int) -> list[int]:
    """Return the addresses of left, right, heights, left_slope and right_slope in a packed weight or its gradient."""
    left, right, left_slope, right_slope, heights = (weight + i * channels * itemsize for i in range(5))
    return [left, right, heights, left_slope, right_slope]
