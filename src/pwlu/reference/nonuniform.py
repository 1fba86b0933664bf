"""The mathematics of non-uniform PWLUs in plain PyTorch. This file is the definition; all kernels are tested against it.

A unit has N intervals between the knots b_0 <= b_1 <= ... <= b_N, with the heights Y_0..Y_N there. Outside the knots it has the
slopes K_L and K_R::

    x <  b_0              y = (x - b_0) K_L + Y_0
    b_i <= x < b_{i+1}    y = (x - b_i) K_i + Y_i,   K_i = (Y_{i+1} - Y_i)/(b_{i+1} - b_i)
    x >= b_N              y = (x - b_N) K_R + Y_N

The segment of x is the number of knots that are not greater than x, minus 1. Only comparisons determine it, without rounding,
so the kernels and this file find the same segment for every element. NaN is in segment -1, because all comparisons are false.
No x lies in an interval whose knots coincide.

The parameters are b_0 (``left``) and the logarithms of the widths (``log_widths``)::

    b_k = b_0 + sum over j < k of exp(w_j)

So the knots are in order for all values of the parameters. With the exponential, a step of the optimizer multiplies a width
by a factor. So it suits inputs of any scale: f and f(c x) have the same w up to a constant. With softplus, this would hold for
narrow intervals only.

Shapes: ``left``, ``left_slope``, ``right_slope`` are (C,), ``log_widths`` is (C, N), ``knots`` and ``heights`` are (C, N+1).
The dtypes are those of ``pwlu.reference``. Segments are numbered -1 (left), 0..N-1 (the intervals), N (right).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pwlu.reference import along, compute_dtype, finite, pick, segment_sums, stored_gradients


class Blocks(NamedTuple):
    """The parameters of a non-uniform PWLU."""

    left: Tensor
    log_widths: Tensor
    heights: Tensor
    left_slope: Tensor
    right_slope: Tensor


class Knots(NamedTuple):
    """The functions themselves, as the operators take them: knots in place of left and log_widths."""

    knots: Tensor
    heights: Tensor
    left_slope: Tensor
    right_slope: Tensor


def size(intervals: int) -> int:
    """Return the number of elements per channel, 2N + 4. It is the same for a weight and for a knot weight."""
    return 2 * intervals + 4


def pack(left: Tensor, log_widths: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor) -> Tensor:
    """Concatenate the parameters into one flat weight (C (2N + 4),): left | left_slope | right_slope | log_widths | heights."""
    return torch.cat([left, left_slope, right_slope, log_widths.reshape(-1), heights.reshape(-1)])


def unpack(weight: Tensor, intervals: int) -> Blocks:
    """Split a weight into its blocks, as views of it."""
    channels = weight.shape[0] // size(intervals)
    left, left_slope, right_slope, widths, heights = weight.split([channels * n for n in (1, 1, 1, intervals, intervals + 1)])
    return Blocks(left, widths.view(channels, intervals), heights.view(channels, intervals + 1), left_slope, right_slope)


def knots_of(left: Tensor, log_widths: Tensor) -> Tensor:
    """Return the knots (C, N+1) in the compute dtype."""
    dtype = compute_dtype(left)
    return torch.cat([left.to(dtype)[:, None], log_widths.to(dtype).exp()], 1).cumsum(1)


def pack_knots(knots: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor) -> Tensor:
    """Return one flat knot weight (C (2N + 4),) for the operators: knots | left_slope | right_slope | heights."""
    return torch.cat([knots.reshape(-1), left_slope, right_slope, heights.reshape(-1)])


def unpack_knots(weight: Tensor, intervals: int) -> Knots:
    """Split a knot weight into its blocks, as views of it."""
    channels = weight.shape[0] // size(intervals)
    knots, left_slope, right_slope, heights = weight.split([channels * n for n in (intervals + 1, 1, 1, intervals + 1)])
    return Knots(knots.view(channels, -1), heights.view(channels, -1), left_slope, right_slope)


def to_knots(weight: Tensor, intervals: int) -> Tensor:
    """Convert a weight to a knot weight, in the compute dtype. The conversion is differentiable."""
    left, log_widths, heights, left_slope, right_slope = unpack(weight, intervals)
    knots = knots_of(left, log_widths)
    return pack_knots(knots, heights.to(knots.dtype), left_slope.to(knots.dtype), right_slope.to(knots.dtype))


def segments(x: Tensor, knots: Tensor, channel_dim: int) -> Tensor:
    """Return the segment of every element, -1..N."""
    found = torch.full_like(x, -1, dtype=torch.int64)
    for knot in knots.detach().unbind(1):
        found = found + (x >= along(knot, x, channel_dim))
    return found


def widths_of(knots: Tensor) -> Tensor:
    """Return the widths (C, N), with 1 in place of 0. No element lies in an interval of width 0, so 1 only avoids 0/0."""
    widths = knots.diff(dim=1)
    return torch.where(widths > 0, widths, torch.ones_like(widths))


def lines(
    x: Tensor, knots: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor, channel_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return segment, origin, slope and height of the line at every element. All arguments must have the compute dtype."""
    segment = segments(x, knots, channel_dim)
    slopes = torch.cat([left_slope[:, None], heights.diff(dim=1) / widths_of(knots), right_slope[:, None]], 1)
    begin = segment.clamp(min=0)
    picked = (pick(t, j, x, channel_dim) for t, j in ((knots, begin), (slopes, segment + 1), (heights, begin)))
    origin, slope, height = picked
    return segment, origin, slope, height


def forward(x: Tensor, knots: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor, channel_dim: int) -> Tensor:
    """Compute y by the definition above. Autograd through this function defines all gradients."""
    dtype = compute_dtype(x)
    value = finite(x.to(dtype))
    knots, heights, left_slope, right_slope = (p.to(dtype) for p in (knots, heights, left_slope, right_slope))
    _, origin, slope, height = lines(value, knots, heights, left_slope, right_slope, channel_dim)
    return ((value - origin) * slope + height).to(x.dtype)


def backward(
    grad: Tensor,
    x: Tensor,
    knots: Tensor,
    heights: Tensor,
    left_slope: Tensor,
    right_slope: Tensor,
    channel_dim: int,
    *,
    need_input: bool = True,
    need_parameters: bool = True,
) -> tuple[Tensor | None, Knots | None]:
    """Return the gradients of x and of the parameters; None for those that are not needed.

    They follow from two sums per channel and segment: G = sum of g, and P = sum of g (x - b). Here b is the knot at which the
    segment begins. The right end of interval i has the share s_i = P_i/(b_{i+1} - b_i), and the left end the share G_i - s_i::

        heights   dY_k = s_{k-1} + (G_k - s_k)                  and G_left for Y_0, G_right for Y_N
        knots     db_k = -K_{k-1} s_{k-1} - K_k (G_k - s_k)     and -K_L G_left for b_0, -K_R G_right for b_N
        slopes    dK_L = P_left, dK_R = P_right

    This function is differentiable in all its inputs.
    """
    originals = (knots, heights, left_slope, right_slope)
    dtype = compute_dtype(x)
    grad, x_dtype, x = grad.to(dtype), x.dtype, finite(x.to(dtype))
    knots, heights, left_slope, right_slope = (p.to(dtype) for p in originals)
    segment, origin, slope, _ = lines(x, knots, heights, left_slope, right_slope, channel_dim)
    grad_x = (grad * slope).to(x_dtype) if need_input else None
    if not need_parameters:
        return grad_x, None

    sums = segment_sums(grad, x - origin, segment, heights.shape, x, channel_dim)
    (g_left, g_in, g_right), (p_left, p_in, p_right) = sums
    widths = widths_of(knots)
    share, slopes = p_in / widths, heights.diff(dim=1) / widths
    gradients = [
        -torch.cat([left_slope[:, None] * g_left, slopes * share], 1)
        - torch.cat([slopes * (g_in - share), right_slope[:, None] * g_right], 1),
        torch.cat([g_left, share], 1) + torch.cat([g_in - share, g_right], 1),
        p_left[:, 0],
        p_right[:, 0],
    ]
    return grad_x, Knots(*stored_gradients(gradients, originals, x))
