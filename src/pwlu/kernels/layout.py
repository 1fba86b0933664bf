"""Describe a tensor as the kernels need it: an address, and the sizes (outer, channels, inner) in memory order.

Every dense layout has this form: `inner` is the stride of the channel dimension.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class NormState(NamedTuple):
    """The arguments of a batch norm other than its input, in the order of the operators.

    `factor` is the weight of the new batch in the running statistics.
    """

    gamma: Tensor | None
    beta: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    batches: Tensor | None
    factor: float
    eps: float
    training: bool
    pool: Tensor | None


class NormInput(NamedTuple):
    """The arguments of ``norm_input``, in the order of the operator.

    `grad` is the gradient of z if `grad_is_of_z`, else that of y. If `sums` is None, mean and variance are constants.
    """

    grad: Tensor
    x: Tensor
    norm: Tensor
    weight: Tensor
    intervals: int
    sums: Tensor | None
    elements: float  # per channel
    grad_is_of_z: bool


def laid_out_as(like: Tensor, x: Tensor) -> Tensor:
    """Return x in the memory layout of `like`, which is dense: x itself if possible, else a copy."""
    if x.stride() == like.stride():
        return x
    return torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def dense(x: Tensor) -> Tensor:
    """Return x in the memory layout of ``torch.empty_like(x)``: x itself if possible, else a copy."""
    return x if x.is_contiguous() else laid_out_as(torch.empty_like(x, device="meta"), x)


def geometry(x: Tensor, channels: int, channel_dim: int, samples: int = 1) -> tuple[int, int, int]:
    """Return (outer, channels, inner) of a dense x that is not empty, or of one of its samples."""
    inner = x.numel() // samples if channels == 1 else x.stride(channel_dim)
    return x.numel() // (samples * channels * inner), channels, inner


def samples_first(x: Tensor) -> Tensor:
    """Return x without gaps and with its samples one after another in memory: x itself if possible, else a copy."""
    like = torch.empty_like(x, device="meta")
    if x.shape[0] > 1 and like.stride(0) * x.shape[0] != x.numel():
        like = torch.empty(x.shape, device="meta")
    return laid_out_as(like, x)


def sample_geometry(x: Tensor, functions: int, channel_dim: int) -> tuple[tuple[int, int, int], int]:
    """Return (outer, channels, inner) of a sample of x, as :func:`samples_first` returns it, and the number of samples.

    If every channel of a sample is one piece of memory, fold the samples into the channels: all count as one sample.
    """
    samples = x.shape[0]
    outer, channels, inner = geometry(x, functions, channel_dim, samples)
    return ((1, samples * channels, inner), 1) if outer == 1 else ((outer, channels, inner), samples)


def samples_are_rows(x: Tensor, functions: int, channel_dim: int) -> bool:
    """Return whether the samples of x follow each other in memory, and each has several rows with one function per channel.

    Otherwise, samples and channels can be folded into one dimension without a copy, or x has an unusual layout.
    """
    like, samples = torch.empty_like(x, device="meta"), x.shape[0]
    if samples in (1, functions) or not x.numel() or like.stride(0) * samples != x.numel():
        return False
    outer, _, _ = geometry(like, functions // samples, channel_dim, samples)
    return outer > 1


def is_plain(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether a kernel can use a vector or pool without a copy: it is contiguous and has this dtype, or is None."""
    return tensor is None or (tensor.dtype == dtype and tensor.is_contiguous())


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
    """Return the addresses of tensors; 0 for None."""
    return [0 if tensor is None else addresses([tensor])[0] for tensor in tensors]


def note_changes(state: NormState) -> None:
    """Increment the version counters of the tensors that a norm has changed in place, except the running statistics.

    PyTorch's batch norm does not increment those either: autograd may have saved them for an earlier call of the same norm.
    """
    for changed in (state.batches, state.pool):
        if state.training and changed is not None:
            torch.autograd.graph.increment_version(changed)


def blocks(weight: int, channels: int, intervals: int, itemsize: int) -> list[int]:
    """Return the addresses of left, right, heights, left_slope and right_slope in a packed weight or its gradient."""
    left, right, left_slope, right_slope, heights = (weight + i * channels * itemsize for i in range(5))
    return [left, right, heights, left_slope, right_slope]


def knot_blocks(weight: int, channels: int, intervals: int, itemsize: int) -> list[int]:
    """Return the addresses of knots, heights, left_slope and right_slope in a knot weight or its gradient.

    There is a 0 after knots, so that the others have the places that :func:`blocks` gives them.
    """
    knots, of_channel = intervals + 1, channels * itemsize
    left_slope, right_slope, heights = (weight + i * of_channel for i in (knots, knots + 1, knots + 2))
    return [weight, 0, heights, left_slope, right_slope]


def channels_and_blocks(
    what: str, weight: Tensor, intervals: int, of_knots: Callable[..., list[int]] = knot_blocks
) -> tuple[int, Callable[[int], list[int]]]:
    """Return the number of channels, and a function from the address of a weight or its gradient to those of its blocks.

    For non-uniform operators, this function is `of_knots`, and else :func:`blocks`.
    """
    size, found = (2 * intervals + 4, of_knots) if "nonuniform" in what else (intervals + 5, blocks)
    channels = weight.shape[0] // size
    return channels, functools.partial(found, channels=channels, intervals=intervals, itemsize=weight.itemsize)
