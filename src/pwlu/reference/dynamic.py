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
import torch.nn.functional as F
from torch import Tensor

from pwlu import reference


def means(x: Tensor, features: int, channel_dim: int) -> Tensor:
    """Return the mean of each sample per channel, (B, F), or over all its elements if F is 1, in the compute dtype.

    The mean of no elements is 0, so that gradients stay finite.
    """
    dtype = reference.compute_dtype(x)
    if not x.numel():
        return x.new_zeros(x.shape[0], features, dtype=dtype)
    positions = [d for d in range(1, x.ndim) if features == 1 or d != channel_dim % x.ndim]
    found = x.mean(positions, dtype=dtype) if positions else x.to(dtype)
    return found.unsqueeze(1) if features == 1 else found


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
    return F.linear(F.relu(F.linear(means, first, first_bias)), second, second_bias)


def mix(weight: Tensor, directions: Tensor, coefficients: Tensor) -> Tensor:
    """Return the weight of the functions of all samples: the heights are Y + sum over m of a_m D_m.

    Args:
        weight: the weight of C functions; see :func:`pwlu.reference.pack`.
        directions: D, (M, C, N+1).
        coefficients: a, (B, M, R). C and R are equal, or one of them is 1.

    Returns:
        The weight of B max(C, R) functions, those of the first sample first, in the dtype of the coefficients.
    """
    _, channels, knots = directions.shape
    outer, heights = weight.to(coefficients.dtype).split([4 * channels, channels * knots])
    mixed = heights.view(channels, knots)
    for of_sample, direction in zip(coefficients.unbind(1), directions.to(coefficients.dtype).unbind(), strict=True):
        mixed = torch.addcmul(mixed, of_sample[:, :, None], direction)
    rows = mixed.shape[:2]
    return torch.cat([outer.view(4, 1, channels).expand(4, *rows).reshape(-1), mixed.reshape(-1)])


def fold(x: Tensor, functions: int, channel_dim: int) -> Tensor:
    """Return x with one entry of dimension 0 for each of the functions of all samples, B or B C."""
    return x if functions == x.shape[0] else x.movedim(channel_dim, 1).flatten(0, 1)


def unfold(y: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    """Return y, the result of a function of :func:`fold`, in the shape of x."""
    return y if y.shape == x.shape else y.reshape(x.movedim(channel_dim, 1).shape).movedim(1, channel_dim)


def forward(
    x: Tensor, left: Tensor, right: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor, channel_dim: int
) -> Tensor:
    """Compute y. The parameters are those of the functions of all samples, as in the weight of :func:`mix`."""
    folded = fold(x, left.shape[0], channel_dim)
    return unfold(reference.forward(folded, left, right, heights, left_slope, right_slope, 0), x, channel_dim)


def backward(
    grad: Tensor,
    x: Tensor,
    left: Tensor,
    right: Tensor,
    heights: Tensor,
    left_slope: Tensor,
    right_slope: Tensor,
    channel_dim: int,
    **need: bool,
) -> tuple[Tensor | None, list[Tensor] | None]:
    """Return the gradients of x and of the parameters; `need` is as for :func:`pwlu.reference.backward`."""
    grad, folded = (fold(t, left.shape[0], channel_dim) for t in (grad, x))
    grad_x, grads = reference.backward(grad, folded, left, right, heights, left_slope, right_slope, 0, **need)
    return None if grad_x is None else unfold(grad_x, x, channel_dim), grads
