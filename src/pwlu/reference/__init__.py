"""The mathematics of PWLU in plain PyTorch. This file is the definition; all kernels are tested against it.

A unit has N intervals between the bounds B_L < B_R. The knots are B_k = B_L + k d with d = (B_R - B_L)/N, and the function has
the heights Y_0..Y_N there. Outside the bounds it has the slopes K_L and K_R (equation 1 of the paper):

    x <  B_L        y = (x - B_L) K_L + Y_0
    x >= B_R        y = (x - B_R) K_R + Y_N
    otherwise       y = (x - B_i) K_i + Y_i,   i = floor((x - B_L)/d),   K_i = (Y_{i+1} - Y_i)/d

Shapes: ``x`` has any shape; ``left``, ``right``, ``left_slope``, ``right_slope`` are (C,); ``heights`` is (C, N+1). C is the
size of dimension ``channel_dim`` of x, or 1 for one function that applies to all elements. The module and the operators store
these parameters as blocks of one flat tensor, ``weight`` (C (N + 5),): see :func:`pack`.

Computations run in float64 if x is float64, and in float32 otherwise. Results have the dtype of x. Segments are numbered
-1 (left of B_L), 0..N-1 (the intervals), N (right of B_R).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """The parameters of a PWLU, in the order in which the functions of this module take them."""

    left: Tensor
    right: Tensor
    heights: Tensor
    left_slope: Tensor
    right_slope: Tensor


def size(intervals: int) -> int:
    """Return the number of parameters per channel: N + 5."""
    return intervals + 5


def pack(left: Tensor, right: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor) -> Tensor:
    """Concatenate the parameters into one flat weight: left | right | left_slope | right_slope | heights.

    Args:
        left: left bounds, (C,).
        right: right bounds, (C,).
        heights: heights at the knots, (C, N+1).
        left_slope: slopes left of the left bounds, (C,).
        right_slope: slopes right of the right bounds, (C,).

    Returns:
        The weight, (C (N + 5),).
    """
    return torch.cat([left, right, left_slope, right_slope, heights.reshape(-1)])


def unpack(weight: Tensor, intervals: int) -> Blocks:
    """Split a weight into its blocks.

    Args:
        weight: as :func:`pack` returns it, (C (N + 5),).
        intervals: N.

    Returns:
        The blocks, as views of the weight.
    """
    channels = weight.shape[0] // (intervals + 5)
    left, right, left_slope, right_slope = (weight.narrow(0, i * channels, channels) for i in range(4))
    heights = weight.narrow(0, 4 * channels, channels * (intervals + 1)).view(channels, intervals + 1)
    return Blocks(left, right, heights, left_slope, right_slope)


@functools.lru_cache(64)
def parameter_indices(lengths: tuple[int, ...], intervals: int, device: torch.device) -> Tensor:
    """Return the indices of the N + 5 parameters of each function in concatenated weights: (functions, N + 5).

    A row is left, right, left_slope, right_slope, heights.
    """
    found = []
    for places in torch.arange(sum(lengths)).split(lengths):
        left, right, heights, left_slope, right_slope = unpack(places, intervals)
        found.append(torch.cat([torch.stack([left, right, left_slope, right_slope], 1), heights], 1))
    return torch.cat(found).to(device)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the computation: float64 if x is float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def along(parameter: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    """Reshape a parameter of shape (C,) so that it broadcasts against x."""
    if parameter.shape[0] == 1:
        return parameter.reshape(())
    shape = [1] * x.ndim
    shape[channel_dim] = parameter.shape[0]
    return parameter.reshape(shape)


def pick(table: Tensor, index: Tensor, x: Tensor, channel_dim: int, *, unchecked: bool = False) -> Tensor:
    """Return table[c, index] for every element of x, where c is its channel.

    Args:
        table: (C, M).
        index: the column for each element, in the shape of x.
        x: the input.
        channel_dim: the channel dimension of x.
        unchecked: skip the range check of the indices.
    """
    rows = torch.arange(table.shape[0], device=table.device, dtype=index.dtype) * table.shape[1]
    flat, place = table.reshape(-1), along(rows, x, channel_dim) + index
    return torch.ops.aten._unsafe_index(flat, [place]) if unchecked else flat[place]


def finite(x: Tensor) -> Tensor:
    """Replace infinities by the largest finite numbers, so that a slope of 0 gives 0 there. NaN stays NaN."""
    largest = torch.finfo(x.dtype).max
    return x.clamp(-largest, largest)


def scale_and_open(left: Tensor, right: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """Return the scale r = N/(B_R - B_L), and whether the interval between the bounds is open, that is, not empty.

    If the bounds have crossed or are equal, r is negative or infinite. Then the cases of the definition, taken in order, leave
    only the two outer pieces, which meet at B_L. In that case the returned scale is 1.
    """
    width = right - left
    scale = torch.full_like(width, intervals) / width  # tensor / tensor, because torch rounds `number / tensor` twice
    is_open = (scale > 0) & (scale <= torch.finfo(scale.dtype).max)
    return torch.where(is_open, scale, torch.ones_like(scale)), is_open


def segments(x: Tensor, left: Tensor, right: Tensor, intervals: int) -> Tensor:
    """Return the segment of every element. All arguments must broadcast and have the compute dtype.

    Comparisons with the bounds decide between left, right and inside. Inside, the segment is clip(floor((x - B_L) r), 0, N-1),
    and each operation is rounded separately. This rule is part of the definition, because neighbouring segments have different
    slopes. NaN is in segment 0.
    """
    scale, is_open = scale_and_open(left, right, intervals)
    position = ((x - left) * scale).floor()
    inside = position.nan_to_num(nan=0.0).clamp(0, intervals - 1).long()
    inside = torch.where(x >= torch.where(is_open, right, left), intervals, inside)
    return torch.where(x < left, -1, inside)


class Pieces(NamedTuple):
    """For every element: its segment, and the origin B, slope K and height Y of the line on that segment."""

    segment: Tensor
    origin: Tensor
    slope: Tensor
    height: Tensor


def pieces(
    x: Tensor, left: Tensor, right: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor, channel_dim: int
) -> Pieces:
    """Return the line that applies to every element of x. All arguments must have the compute dtype."""
    intervals = heights.shape[1] - 1
    b_l, b_r, k_l, k_r = (along(p, x, channel_dim) for p in (left, right, left_slope, right_slope))
    _, is_open = scale_and_open(b_l, b_r, intervals)
    step = torch.where(is_open, (b_r - b_l) / intervals, torch.ones_like(b_l))
    segment = segments(x, b_l, b_r, intervals)
    i = segment.clamp(0, intervals - 1)
    y_i, y_next = pick(heights, i, x, channel_dim), pick(heights, i + 1, x, channel_dim)

    def three(at_left: Tensor, inside: Tensor, at_right: Tensor) -> Tensor:
        return torch.where(segment < 0, at_left, torch.where(segment >= intervals, at_right, inside))

    return Pieces(
        segment,
        origin=three(b_l, b_l + i * step, b_r),
        slope=three(k_l, (y_next - y_i) / step, k_r),
        height=three(y_i, y_i, y_next),  # the clamped i is 0 on the left and N-1 on the right
    )


def forward(
    x: Tensor, left: Tensor, right: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor, channel_dim: int
) -> Tensor:
    """Compute y by the definition above. Autograd through this function gives the gradients in :func:`partials`."""
    dtype = compute_dtype(x)
    value = finite(x.to(dtype))
    left, right, heights, left_slope, right_slope = (p.to(dtype) for p in (left, right, heights, left_slope, right_slope))
    piece = pieces(value, left, right, heights, left_slope, right_slope, channel_dim)
    y = (value - piece.origin) * piece.slope + piece.height
    return y.to(x.dtype)


def partials(
    x: Tensor, left: Tensor, right: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor, channel_dim: int
) -> dict[str, Tensor]:
    """Return the derivatives of y at every element, by the gradient table of the paper, with i held constant.

    | d y / d .   | x < B_L | B_L <= x < B_R            | x >= B_R |
    |-------------|---------|---------------------------|----------|
    | x           | K_L     | K_i                       | K_R      |
    | left        | -K_L    | K_i (x - B_R)/(B_R - B_L) | 0        |
    | right       | 0       | K_i (B_L - x)/(B_R - B_L) | -K_R     |
    | left_slope  | x - B_L | 0                         | 0        |
    | right_slope | 0       | 0                         | x - B_R  |
    | heights     | 1 (Y_0) | (B_{i+1} - x)/d (Y_i), (x - B_i)/d (Y_{i+1}) | 1 (Y_N) |

    The derivative with respect to ``heights`` has one more dimension than x, of size N+1.
    """
    intervals = heights.shape[1] - 1
    x = finite(x)
    piece = pieces(x, left, right, heights, left_slope, right_slope, channel_dim)
    b_l, b_r = along(left, x, channel_dim), along(right, x, channel_dim)
    zero, position = torch.zeros_like(x), x - piece.origin
    at_left, at_right = piece.segment < 0, piece.segment >= intervals
    inside = ~(at_left | at_right)
    width = torch.where(inside, b_r - b_l, torch.ones_like(x))
    share = position / width * intervals  # (x - B_i)/d
    k = torch.arange(intervals + 1, device=x.device)
    i, share_k = piece.segment.unsqueeze(-1), share.unsqueeze(-1)
    height_partials = torch.where(
        inside.unsqueeze(-1), (k == i) * (1 - share_k) + (k == i + 1) * share_k, (k == i.clamp(0)).to(x.dtype)
    )
    return {
        "x": piece.slope + zero,
        "left": torch.where(at_left, -piece.slope, torch.where(inside, piece.slope * (x - b_r) / width, zero)),
        "right": torch.where(at_right, -piece.slope, torch.where(inside, piece.slope * (b_l - x) / width, zero)),
        "heights": height_partials,
        "left_slope": torch.where(at_left, position, zero),
        "right_slope": torch.where(at_right, position, zero),
    }


def segment_sums(
    grad: Tensor, position: Tensor, segment: Tensor, shape: torch.Size, x: Tensor, channel_dim: int
) -> list[tuple[Tensor, ...]]:
    """Return two sums per channel and segment: G = sum of g, and P = sum of g times the position on the segment.

    Each is a tuple: left (C, 1), the intervals (C, N), right (C, 1). `shape` is that of the heights, (C, N+1).
    """
    channels, intervals = shape[0], shape[1] - 1
    where = along(torch.arange(channels, device=x.device) * (intervals + 2), x, channel_dim) + segment + 1
    wide = torch.float32 if x.device.type == "mps" else torch.float64  # float32 loses too much over many small terms
    both = torch.stack([grad.to(wide), grad.to(wide) * position]).reshape(2, -1)
    sums = both.new_zeros(2, channels * (intervals + 2)).index_add(1, where.reshape(-1), both)
    return [s.split([1, intervals, 1], dim=1) for s in sums.to(x.dtype).reshape(2, channels, intervals + 2)]


def stored_gradients(gradients: list[Tensor], parameters: tuple[Tensor, ...], x: Tensor) -> list[Tensor]:
    """Return gradients in the dtypes of the parameters. They are exactly 0 if x is empty, even if a parameter is not finite."""
    if not x.numel():
        gradients = [torch.where(g.new_zeros((), dtype=torch.bool), g, torch.zeros_like(g)) for g in gradients]
    return [g.to(p.dtype) for g, p in zip(gradients, parameters, strict=True)]


def backward(
    grad: Tensor,
    x: Tensor,
    left: Tensor,
    right: Tensor,
    heights: Tensor,
    left_slope: Tensor,
    right_slope: Tensor,
    channel_dim: int,
    *,
    need_input: bool = True,
    need_parameters: bool = True,
) -> tuple[Tensor | None, list[Tensor] | None]:
    """Return the gradients of x and of the parameters; None for those that are not needed.

    The gradients of the parameters follow from two sums per channel and segment: G = sum of g, and P = sum of g (x - B). Here
    B is the origin of the segment. These are 2(N+2) numbers per channel. This function is differentiable in all its inputs.
    """
    originals = (left, right, heights, left_slope, right_slope)
    dtype = compute_dtype(x)
    grad, x_dtype, x = grad.to(dtype), x.dtype, finite(x.to(dtype))
    left, right, heights, left_slope, right_slope = (p.to(dtype) for p in originals)
    piece = pieces(x, left, right, heights, left_slope, right_slope, channel_dim)
    grad_x = (grad * piece.slope).to(x_dtype) if need_input else None
    if not need_parameters:
        return grad_x, None

    intervals = heights.shape[1] - 1
    sums = segment_sums(grad, x - piece.origin, piece.segment, heights.shape, x, channel_dim)
    (g_left, g_in, g_right), (p_left, p_in, p_right) = sums
    _, is_open = scale_and_open(left, right, intervals)
    step = torch.where(is_open, (right - left) / intervals, torch.ones_like(left))[:, None]
    slope = heights.diff(dim=1) / step
    share = p_in / step  # sum of g (x - B_i)/d
    i = torch.arange(intervals, device=x.device)
    gradients = [
        (slope * (share + (i - intervals) * g_in) / intervals).sum(1) - left_slope * g_left[:, 0],
        -(slope * (share + i * g_in) / intervals).sum(1) - right_slope * g_right[:, 0],
        torch.cat([g_left, share], 1) + torch.cat([g_in - share, g_right], 1),
        p_left[:, 0],
        p_right[:, 0],
    ]
    return grad_x, stored_gradients(gradients, originals, x)


def tables(
    left: Tensor, right: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return 1/d (C,) and the tables S and O (C, N+2) of the inference form y = x S_j + O_j.

    If the interval between the bounds is empty, the inner entries equal the rightmost one.
    """
    intervals = heights.shape[1] - 1
    scale, is_open = scale_and_open(left, right, intervals)
    step = torch.where(is_open, (right - left) / intervals, torch.ones_like(left))
    knots = left[:, None] + torch.arange(intervals, device=left.device) * step[:, None]
    inside = torch.where(is_open[:, None], heights.diff(dim=1) / step[:, None], right_slope[:, None])
    outside = (heights[:, -1] - right * right_slope)[:, None]
    offsets = torch.where(is_open[:, None], heights[:, :-1] - knots * inside, outside)
    return (
        scale,
        torch.cat([left_slope[:, None], inside, right_slope[:, None]], 1),
        torch.cat([(heights[:, 0] - left * left_slope)[:, None], offsets, outside], 1),
    )


def lookup(
    x: Tensor,
    left: Tensor,
    inv_step: Tensor,
    slopes: Tensor,
    offsets: Tensor,
    channel_dim: int,
    *,
    unchecked: bool = False,
) -> Tensor:
    """Compute y in the inference form: y = x S_j + O_j with j = clip(floor((x - B_L)/d), -1, N).

    The result equals the definition up to rounding, because the function is continuous. Only ATen operators are used, so an
    exported graph runs everywhere.

    Args:
        x: the input.
        left: left bounds, (C,).
        inv_step: 1/d, (C,).
        slopes: the table S, (C, N+2).
        offsets: the table O, (C, N+2).
        channel_dim: the channel dimension of x.
        unchecked: use 32-bit indices without a range check. The result is the same and Inductor generates faster code, but
            other runtimes may not support it.
    """
    dtype = compute_dtype(x)
    value = finite(x.to(dtype))
    left, inv_step, slopes, offsets = (t.to(dtype) for t in (left, inv_step, slopes, offsets))
    position = ((value - along(left, x, channel_dim)) * along(inv_step, x, channel_dim)).floor()
    # The segment of NaN does not matter: the result is NaN.
    known = torch.where(position >= -1, position, -1.0) if unchecked else position.nan_to_num(nan=0.0)
    j = known.clamp(-1, slopes.shape[1] - 2).to(torch.int32 if unchecked else torch.int64) + 1
    slope, offset = (pick(table, j, x, channel_dim, unchecked=unchecked) for table in (slopes, offsets))
    return (value * slope + offset).to(x.dtype)


def moments(x: Tensor, channels: int, channel_dim: int) -> tuple[Tensor, Tensor]:
    """Return the mean of each channel and the sum of squared deviations from it, both (C,) in the compute dtype."""
    x = x.to(compute_dtype(x))
    values = x.reshape(1, -1) if channels == 1 else x.movedim(channel_dim, 0).reshape(channels, -1)
    if not values.numel():
        return x.new_zeros(channels), x.new_zeros(channels)
    variance, mean = torch.var_mean(values, dim=1, correction=0)
    return mean, variance * values.shape[1]


def merge(pool: Tensor, count: Tensor, mean: Tensor, m2: Tensor) -> Tensor:
    """Merge the moments of two sets of numbers: add `count`, `mean` and `m2` to those of `pool` (3, C).

    With n = n_1 + n_2 and e = mean_2 - mean_1: mean = mean_1 + e n_2/n, M2 = M2_1 + M2_2 + e^2 n_1 n_2/n.

    Returns:
        Count, mean and M2 of the union, (3, C).
    """
    n_1, mean_1, m2_1 = pool
    n_2 = count.to(pool.dtype)
    n = n_1 + n_2
    share = n_2 / n.clamp(min=1)  # 0 if both sets are empty
    distance = mean.to(pool.dtype) - mean_1
    return torch.stack([n, mean_1 + distance * share, m2_1 + m2.to(pool.dtype) + distance * n_1 * (distance * share)])


# A batch norm followed by a PWLU: z = gamma (x - m)/sqrt(v + eps) + beta (+ r), y = PWLU(z). x is (B, C, ...) with the channels
# in dimension 1. z stays in the compute dtype. A norm is four vectors (4, C) in the compute dtype: mean m, 1/sqrt(v + eps),
# scale gamma/sqrt(v + eps), shift beta.


def normalization(mean: Tensor, variance: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> Tensor:
    """Return the norm (4, C) for a mean and a biased variance."""
    inv_std = (variance + eps).rsqrt()
    scale = inv_std if gamma is None else gamma.to(inv_std.dtype) * inv_std
    shift = torch.zeros_like(mean) if beta is None else beta.to(mean.dtype)
    return torch.stack([mean, inv_std, scale, shift])


def normalize(x: Tensor, residual: Tensor | None, norm: Tensor) -> Tensor:
    """Return z = (x - mean) scale + shift (+ residual) in the compute dtype.

    Each operation is rounded separately, in this order. This is part of the definition, because the segment depends on it.
    """
    mean, _, scale, shift = (along(row, x, 1) for row in norm)
    z = (x.to(norm.dtype) - mean) * scale + shift
    return z if residual is None else z + residual.to(norm.dtype)


def norm_forward(x: Tensor, residual: Tensor | None, norm: Tensor, *blocks: Tensor) -> Tensor:
    """Return y = PWLU(z) in the dtype of x. `blocks` are the parameters of a PWLU with C channels."""
    left, right, heights, left_slope, right_slope = blocks
    z = normalize(x, residual, norm)
    return forward(z, left, right, heights, left_slope, right_slope, 1).to(x.dtype)


def norm_sums(grad_z: Tensor, x: Tensor, norm: Tensor) -> Tensor:
    """Return three sums per channel (3, C): sum of g_z, sum of g_z (x - m), and the gradient of gamma.

    The first is also the gradient of beta. The third is the second divided by sqrt(v + eps).
    """
    wide = torch.float32 if x.device.type == "mps" else torch.float64  # float32 loses too much over many small terms
    others = [d for d in range(x.ndim) if d != 1]
    centred = x.to(norm.dtype) - along(norm[0], x, 1)
    sum_g = grad_z.sum(others, dtype=wide).to(norm.dtype)
    sum_g_centred = (grad_z.to(wide) * centred).sum(others).to(norm.dtype)
    return torch.stack([sum_g, sum_g_centred, sum_g_centred * norm[1]])


def norm_input(grad_z: Tensor, x: Tensor, norm: Tensor, sums: Tensor | None, count: float) -> Tensor:
    """Return the gradient of x, scale (g_z - mean(g_z) - x_hat mean(g_z x_hat)), in the dtype of x.

    If `sums` is None, mean and variance are constants, and the gradient is scale g_z. `count` is the number of elements per
    channel over all processes.
    """
    mean, inv_std, scale, _ = (along(row, x, 1) for row in norm)
    grad_z = grad_z.to(norm.dtype)
    if sums is not None:
        mean_g, mean_g_centred = (along(row / count, x, 1) for row in sums[:2])
        grad_z = grad_z - mean_g - (x.to(norm.dtype) - mean) * (mean_g_centred * inv_std * inv_std)
    return (scale * grad_z).to(x.dtype)


def norm_act(
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    eps: float,
    *blocks: Tensor,
) -> Tensor:
    """Return y, normalizing by the given mean and variance, or by those of x if they are None.

    Autograd through this function defines all gradients of the fused operator.
    """
    values = x.to(compute_dtype(x))
    if mean is None or variance is None:
        variance, mean = torch.var_mean(values.movedim(1, 0).reshape(x.shape[1], -1), dim=1, correction=0)
    return norm_forward(x, residual, normalization(mean, variance, gamma, beta, eps), *blocks)


def start(function: Callable[[Tensor], Tensor], left: Tensor, right: Tensor, intervals: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return heights, left slope and right slope of a PWLU with these bounds (C,) that interpolates `function`.

    The heights are the values of the function at the knots. The outer slopes are its slopes over one more interval on either
    side. For ReLU with 0 well between the bounds, these are K_L = 0 and K_R = 1. If both bounds lie on one side of 0, the PWLU
    continues as ReLU does on that side. Results have the dtype of the bounds: pass float64 to round only once.
    """
    step = ((right - left) / intervals)[:, None]
    knots = left[:, None] + torch.arange(-1, intervals + 2, device=left.device) * step
    values = function(knots)
    slopes = values.diff(dim=1) / step
    return values[:, 1:-1], slopes[:, 0], slopes[:, -1]
