"""The mathematics of a dynamic PWLU in plain PyTorch: a PWLU whose heights depend on the input.

For sample b and channel c, the heights are

    Y(x)_bc = Y_c + sum over m = 1..M of a_m(x)_bc D_mc

and bounds and outer slopes are those of the channel. The coefficients a_m(x) lie in (-1, 1). A small network computes them from
the means p of the input over all positions of a sample, as in squeeze-and-excitation:

    a(x) = tanh(W_2 relu(W_1 p + b_1) + b_2)

A PWLU is linear in its heights. So the output equals PWLU(x; Y) + sum of a_m(x) PWLU(x; D_m), where the functions of D_m have
the same bounds and outer slopes of 0.

Shapes: x is (B, ...), with the samples in dimension 0. Y is (C, N+1), D is (M, C, N+1), and C is the size of ``channel_dim`` or
1. The means are (B, F), and the coefficients (B, M, R). R is 1 (per layer) or F (per channel).
"""

import torch
from torch import Tensor

from pwlu import reference


def means(x: Tensor, features: int, channel_dim: int) -> Tensor:
    """Return the mean of each sample per channel, (B, F), or over all its elements if F is 1, in the compute dtype.

    The mean of no elements is 0, so that gradients stay finite.
    """
    x = x.to(reference.compute_dtype(x))
    if not x.numel():
        return x.new_zeros(x.shape[0], features)
    if features == 1:
        return x.flatten(1).mean(1, keepdim=True)
    positions = [d for d in range(1, x.ndim) if d != channel_dim % x.ndim]
    return x.mean(positions) if positions else x


def squeeze(means: Tensor, first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor) -> Tensor:
    """Return W_2 relu(W_1 p + b_1) + b_2 in the dtype of the means.

    Args:
        means: p, (B, F).
        first: W_1, (H, F).
        first_bias: b_1, (H,).
        second: W_2, (O, H).
        second_bias: b_2, (O,).

    Returns:
        The output, (B, O).
    """
    first, first_bias, second, second_bias = (t.to(means.dtype) for t in (first, first_bias, second, second_bias))
    hidden = (means @ first.T + first_bias).clamp(min=0)
    return hidden @ second.T + second_bias


def mix(base: Tensor, directions: Tensor, coefficients: Tensor) -> Tensor:
    """Return base + sum over m of a_m directions_m, with one row per sample and channel.

    Args:
        base: Y, (C, K).
        directions: D, (M, C, K).
        coefficients: a, (B, M, R). C and R are equal, or one of them is 1.

    Returns:
        (B, max(C, R), K) in the dtype of the coefficients.
    """
    mixed = base.to(coefficients.dtype)
    for m in range(directions.shape[0]):
        mixed = mixed + coefficients[:, m, :, None] * directions[m].to(coefficients.dtype)
    return mixed


def forward(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    heights: Tensor,
    left_slope: Tensor,
    right_slope: Tensor,
    directions: Tensor,
    coefficients: Tensor,
    channel_dim: int,
) -> Tensor:
    """Compute y for given coefficients (B, M, R), one sample after another."""
    dim = channel_dim % x.ndim - 1  # the channel dimension of a single sample
    sample_heights = mix(heights, directions, coefficients)
    rows = sample_heights.shape[1]
    left, right, left_slope, right_slope = (t.expand(rows) for t in (left, right, left_slope, right_slope))
    samples = zip(x, sample_heights, strict=True)
    return torch.stack([reference.forward(each, left, right, y, left_slope, right_slope, dim) for each, y in samples])
