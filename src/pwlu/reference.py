"""The mathematics of PWLU in plain torch: the only place where it is stated. Kernels are tested against this file.

A unit has N intervals between the bounds B_L < B_R, heights Y_0..Y_N at the knots B_k = B_L + k d with
d = (B_R - B_L)/N, and a slope on either side, K_L and K_R (equation 1 of the paper):

    x <  B_L        y = (x - B_L) K_L + Y_0
    x >= B_R        y = (x - B_R) K_R + Y_N
    otherwise       y = (x - B_i) K_i + Y_i,   i = floor((x - B_L)/d),   K_i = (Y_{i+1} - Y_i)/d

Shapes: ``x`` any; ``left``, ``right``, ``left_slope``, ``right_slope`` (C,); ``heights`` (C, N+1), where C is 1 (one
function for the whole input) or the size of x's dimension ``channel_dim``. A module and the operators hold them as blocks of
one flat tensor, ``weight`` (C (N + 5),): see :func:`pack`.

Arithmetic is in float64 for float64 x and else in float32; results have x's dtype. Segments are numbered
-1 (left of B_L), 0..N-1, N (right of B_R).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """The parameters of a unit, in the order in which the functions below take them."""

    left: Tensor
    right: Tensor
    heights: Tensor
    left_slope: Tensor
    right_slope: Tensor


def pack(left: Tensor, right: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor) -> Tensor:
    """Return the weight: left | right | left_slope | right_slope | heights, each contiguous, in one dimension."""
    return torch.cat([left, right, left_slope, right_slope, heights.reshape(-1)])


def unpack(weight: Tensor, intervals: int) -> Blocks:
    """Return the blocks of a weight, as views of it."""
    channels = weight.shape[0] // (intervals + 5)
    left, right, left_slope, right_slope = (weight.narrow(0, i * channels, channels) for i in range(4))
    heights = weight.narrow(0, 4 * channels, channels * (intervals + 1)).view(channels, intervals + 1)
    return Blocks(left, right, heights, left_slope, right_slope)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type arithmetic is done in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def along(parameter: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    """A parameter of shape (C,) in a shape that broadcasts against x."""
    if parameter.shape[0] == 1:
        return parameter.reshape(())
    shape = [1] * x.ndim
    shape[channel_dim] = parameter.shape[0]
    return parameter.reshape(shape)


def pick(table: Tensor, index: Tensor, x: Tensor, channel_dim: int, *, unchecked: bool = False) -> Tensor:
    """table[c, index], element by element: from (C, M) and an index shaped like x to the shape of x."""
    rows = torch.arange(table.shape[0], device=table.device, dtype=index.dtype) * table.shape[1]
    flat, place = table.reshape(-1), along(rows, x, channel_dim) + index
    return torch.ops.aten._unsafe_index(flat, [place]) if unchecked else flat[place]


def finite(x: Tensor) -> Tensor:
    """An infinite input counts as the largest finite number, so that a slope of 0 gives 0 there. NaN stays NaN."""
    largest = torch.finfo(x.dtype).max
    return x.clamp(-largest, largest)


def scale_and_open(left: Tensor, right: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """r = N/(B_R - B_L), and whether anything lies between the bounds.

    Bounds that crossed or fell together leave r negative or infinite. The definition, read from top to bottom, then
    has the two outer pieces alone, which meet at B_L.
    """
    width = right - left
    scale = torch.full_like(width, intervals) / width  # of two tensors: `number / tensor` rounds twice in torch
    is_open = (scale > 0) & (scale <= torch.finfo(scale.dtype).max)
    return torch.where(is_open, scale, torch.ones_like(scale)), is_open


def segments(x: Tensor, left: Tensor, right: Tensor, intervals: int) -> Tensor:
    """The segment of every element, all arguments broadcast and of the compute type.

    By comparison left or right of the bounds, else clip(floor((x - B_L) r), 0, N-1), each operation rounded on its
    own. This is part of the definition: slopes differ between neighbours. NaN belongs to interval 0.
    """
    scale, is_open = scale_and_open(left, right, intervals)
    position = ((x - left) * scale).floor()
    inside = position.nan_to_num(nan=0.0).clamp(0, intervals - 1).long()
    inside = torch.where(x >= torch.where(is_open, right, left), intervals, inside)
    return torch.where(x < left, -1, inside)


class Pieces(NamedTuple):
    """What the definition needs at every element: its segment, and origin B, slope K and height Y of the line there."""

    segment: Tensor
    origin: Tensor
    slope: Tensor
    height: Tensor


def pieces(
    x: Tensor, left: Tensor, right: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor, channel_dim: int
) -> Pieces:
    """The line that holds at every element of x; everything in the compute type."""
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
    """The definition. Differentiable: plain autograd through it gives the gradient table below."""
    dtype = compute_dtype(x)
    value = finite(x.to(dtype))
    left, right, heights, left_slope, right_slope = (p.to(dtype) for p in (left, right, heights, left_slope, right_slope))
    piece = pieces(value, left, right, heights, left_slope, right_slope, channel_dim)
    y = (value - piece.origin) * piece.slope + piece.height
    return y.to(x.dtype)


def partials(
    x: Tensor, left: Tensor, right: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor, channel_dim: int
) -> dict[str, Tensor]:
    """The gradient table of the paper, written out: dy/d. at every element, with i held constant.

    | d y / d .   | x < B_L | B_L <= x < B_R            | x >= B_R |
    |-------------|---------|---------------------------|----------|
    | x           | K_L     | K_i                       | K_R      |
    | left        | -K_L    | K_i (x - B_R)/(B_R - B_L) | 0        |
    | right       | 0       | K_i (B_L - x)/(B_R - B_L) | -K_R     |
    | left_slope  | x - B_L | 0                         | 0        |
    | right_slope | 0       | 0                         | x - B_R  |
    | heights     | 1 (Y_0) | (B_{i+1} - x)/d (Y_i), (x - B_i)/d (Y_{i+1}) | 1 (Y_N) |

    ``heights`` has a last dimension of N+1 more than x.
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
    of_heights = torch.where(
        inside.unsqueeze(-1), (k == i) * (1 - share_k) + (k == i + 1) * share_k, (k == i.clamp(0)).to(x.dtype)
    )
    return {
        "x": piece.slope + zero,
        "left": torch.where(at_left, -piece.slope, torch.where(inside, piece.slope * (x - b_r) / width, zero)),
        "right": torch.where(at_right, -piece.slope, torch.where(inside, piece.slope * (b_l - x) / width, zero)),
        "heights": of_heights,
        "left_slope": torch.where(at_left, position, zero),
        "right_slope": torch.where(at_right, position, zero),
    }


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
    """The gradients of x and of the parameters, each None unless asked for.

    All the parameters need is, a channel and segment, G = sum of g and P = sum of g (x - B), with B the segment's
    origin: 2(N+2) numbers a channel. Differentiable once more with respect to everything.
    """
    originals = (left, right, heights, left_slope, right_slope)
    dtype = compute_dtype(x)
    grad, x_dtype, x = grad.to(dtype), x.dtype, finite(x.to(dtype))
    left, right, heights, left_slope, right_slope = (p.to(dtype) for p in originals)
    piece = pieces(x, left, right, heights, left_slope, right_slope, channel_dim)
    grad_x = (grad * piece.slope).to(x_dtype) if need_input else None
    if not need_parameters:
        return grad_x, None

    channels, intervals = heights.shape[0], heights.shape[1] - 1
    where = along(torch.arange(channels, device=x.device) * (intervals + 2), x, channel_dim) + piece.segment + 1
    wide = torch.float32 if x.device.type == "mps" else torch.float64  # many small numbers are added
    both = torch.stack([grad.to(wide), grad.to(wide) * (x - piece.origin)]).reshape(2, -1)
    sums = both.new_zeros(2, channels * (intervals + 2)).index_add(1, where.reshape(-1), both)
    g, p = sums.to(dtype).reshape(2, channels, intervals + 2)
    (g_left, g_in, g_right), (p_left, p_in, p_right) = (s.split([1, intervals, 1], dim=1) for s in (g, p))

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
    if not x.numel():  # 0, also where a parameter is not finite
        gradients = [torch.where(g.new_zeros((), dtype=torch.bool), g, torch.zeros_like(g)) for g in gradients]
    return grad_x, [g.to(p.dtype) for g, p in zip(gradients, originals, strict=True)]


def tables(
    left: Tensor, right: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """1/d (C,) and the tables S and O (C, N+2) of the form for inference, y = x S_j + O_j.

    Where nothing lies between the bounds, the entries inside are those of the right.
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
    """The form for inference: y = x S_j + O_j with j = clip(floor((x - B_L)/d), -1, N).

    Equal to the definition, which is continuous, up to rounding. It has aten operators alone, so that what is
    exported runs anywhere. `unchecked`: the same numbers with 32-bit indices and without a check of their range, which Inductor
    makes faster code of, and other runtimes may not know.
    """
    dtype = compute_dtype(x)
    value = finite(x.to(dtype))
    left, inv_step, slopes, offsets = (t.to(dtype) for t in (left, inv_step, slopes, offsets))
    position = ((value - along(left, x, channel_dim)) * along(inv_step, x, channel_dim)).floor()
    # NaN may go to any segment: the result is NaN.
    known = torch.where(position >= -1, position, -1.0) if unchecked else position.nan_to_num(nan=0.0)
    j = known.clamp(-1, slopes.shape[1] - 2).to(torch.int32 if unchecked else torch.int64) + 1
    slope, offset = (pick(table, j, x, channel_dim, unchecked=unchecked) for table in (slopes, offsets))
    return (value * slope + offset).to(x.dtype)


def moments(x: Tensor, channels: int, channel_dim: int) -> tuple[Tensor, Tensor]:
    """The mean of each channel and the sum of squared deviations from it, both (C,) and of the compute type."""
    x = x.to(compute_dtype(x))
    values = x.reshape(1, -1) if channels == 1 else x.movedim(channel_dim, 0).reshape(channels, -1)
    if not values.numel():
        return x.new_zeros(channels), x.new_zeros(channels)
    variance, mean = torch.var_mean(values, dim=1, correction=0)
    return mean, variance * values.shape[1]


def merge(pool: Tensor, count: Tensor, mean: Tensor, m2: Tensor) -> Tensor:
    """Count, mean and M2 of two sets of numbers from those of either: rows of (3, C), as `pool` has them.

    n = n_1 + n_2, with e = mean_2 - mean_1: mean = mean_1 + e n_2/n, M2 = M2_1 + M2_2 + e^2 n_1 n_2/n.
    """
    n_1, mean_1, m2_1 = pool
    n_2 = count.to(pool.dtype)
    n = n_1 + n_2
    share = n_2 / n.clamp(min=1)  # of nothing and nothing: 0
    distance = mean.to(pool.dtype) - mean_1
    return torch.stack([n, mean_1 + distance * share, m2_1 + m2.to(pool.dtype) + distance * n_1 * (distance * share)])


# Behind a batch norm: z = gamma (x - m)/sqrt(v + eps) + beta (+ r), y = PWLU(z). x is (B, C, ...), the channels are its
# dimension 1. z is not rounded to the type of x. A norm is four vectors (4, C) of the compute type: mean m, 1/sqrt(v + eps),
# scale gamma/sqrt(v + eps), shift beta.


def normalization(mean: Tensor, variance: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> Tensor:
    """Return the norm of a mean and a (biased) variance: (4, C)."""
    inv_std = (variance + eps).rsqrt()
    scale = inv_std if gamma is None else gamma.to(inv_std.dtype) * inv_std
    shift = torch.zeros_like(mean) if beta is None else beta.to(mean.dtype)
    return torch.stack([mean, inv_std, scale, shift])


def normalize(x: Tensor, residual: Tensor | None, norm: Tensor) -> Tensor:
    """Return z = (x - mean) scale + shift (+ residual) in the compute type.

    Each operation is rounded on its own, in this order. This is part of the definition, as the segment depends on it.
    """
    mean, _, scale, shift = (along(row, x, 1) for row in norm)
    z = (x.to(norm.dtype) - mean) * scale + shift
    return z if residual is None else z + residual.to(norm.dtype)


def norm_forward(x: Tensor, residual: Tensor | None, norm: Tensor, *blocks: Tensor) -> Tensor:
    """Return y, in the type of x. `blocks`: of a unit with C channels."""
    left, right, heights, left_slope, right_slope = blocks
    z = normalize(x, residual, norm)
    return forward(z, left, right, heights, left_slope, right_slope, 1).to(x.dtype)


def norm_sums(grad_z: Tensor, x: Tensor, norm: Tensor) -> Tensor:
    """Return three sums per channel (3, C): of g_z, the gradient of beta; of g_z (x - m); and the gradient of gamma.

    The last is the second over sqrt(v + eps).
    """
    wide = torch.float32 if x.device.type == "mps" else torch.float64  # many small numbers are added
    others = [d for d in range(x.ndim) if d != 1]
    centred = x.to(norm.dtype) - along(norm[0], x, 1)
    of_g = grad_z.sum(others, dtype=wide).to(norm.dtype)
    of_centred = (grad_z.to(wide) * centred).sum(others).to(norm.dtype)
    return torch.stack([of_g, of_centred, of_centred * norm[1]])


def norm_input(grad_z: Tensor, x: Tensor, norm: Tensor, sums: Tensor | None, count: float) -> Tensor:
    """Return the gradient of x, scale (g_z - mean(g_z) - x_hat mean(g_z x_hat)), in the type of x.

    Without sums, mean and variance are constants: scale g_z. `count`: elements per channel, of all processes.
    """
    mean, inv_std, scale, _ = (along(row, x, 1) for row in norm)
    grad_z = grad_z.to(norm.dtype)
    if sums is not None:
        of_g, of_centred = (along(row / count, x, 1) for row in sums[:2])
        grad_z = grad_z - of_g - (x.to(norm.dtype) - mean) * (of_centred * inv_std * inv_std)
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
    """Return y, with mean and variance given or, without them, those of x. Differentiable: this defines all gradients."""
    values = x.to(compute_dtype(x))
    if mean is None or variance is None:
        variance, mean = torch.var_mean(values.movedim(1, 0).reshape(x.shape[1], -1), dim=1, correction=0)
    return norm_forward(x, residual, normalization(mean, variance, gamma, beta, eps), *blocks)


def start(function: Callable[[Tensor], Tensor], left: Tensor, right: Tensor, intervals: int) -> tuple[Tensor, Tensor, Tensor]:
    """Heights, left slope and right slope with which a unit with these bounds (C,) starts as `function`.

    Heights are the function at the knots; the outer slopes are its slopes over one more interval on either side.
    For ReLU with 0 well inside that is K_L = 0 and K_R = 1; where the bounds lie on one side of 0, the unit goes on
    as ReLU does there. The type is that of the bounds: pass float64 to have values rounded once.
    """
    step = ((right - left) / intervals)[:, None]
    knots = left[:, None] + torch.arange(-1, intervals + 2, device=left.device) * step
    values = function(knots)
    slopes = values.diff(dim=1) / step
    return values[:, 1:-1], slopes[:, 0], slopes[:, -1]
