"""The functional form of PWLU, with the parameters as five tensors or as one."""

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from pwlu import ops, reference
from pwlu.common import checks


def pwlu(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    heights: Tensor,
    left_slope: Tensor,
    right_slope: Tensor,
    *,
    channel_dim: int = 1,
) -> Tensor:
    """Apply the Piecewise Linear Unit with N intervals of width d = (B_R - B_L)/N::

        x <  B_L        y = (x - B_L) K_L + Y_0
        x >= B_R        y = (x - B_R) K_R + Y_N
        otherwise       y = (x - B_i) (Y_{i+1} - Y_i)/d + Y_i,   i = floor((x - B_L)/d),   B_i = B_L + i d

    This function copies the parameters into one tensor. If they are packed already, call :func:`packed`.

    Args:
        x: the input, of any shape; float32, bfloat16, float16 or float64. The computation runs in float32 (float64 for
            float64).
        left: the left bounds B_L, shape (C,).
        right: the right bounds B_R, shape (C,), with B_L < B_R.
        heights: the heights Y_0, ..., Y_N, shape (C, N+1).
        left_slope: the slopes K_L, shape (C,).
        right_slope: the slopes K_R, shape (C,).
        channel_dim: the dimension of x that has C entries. Default: 1, for images; use -1 for (batch, time, features). If C is
            1, the same function applies to all elements and ``channel_dim`` is ignored.

    Returns:
        y, with the shape, dtype and memory layout of x.

    Raises:
        TypeError: if x is not a floating-point tensor, or a parameter is not of a floating-point type.
        ValueError: if the shapes do not match each other, or a parameter is on another device than x.

    Example::

        left, right = torch.tensor([-1.0]), torch.tensor([1.0])
        heights = torch.tensor([[0.0, 0.0, 1.0]])  # ReLU with 2 intervals
        y = pwlu.functional.pwlu(torch.randn(8), left, right, heights, torch.tensor([0.0]), torch.tensor([1.0]))
    """
    if not isinstance(x, Tensor) and has_torch_function_unary(x):  # the output of a fused batch norm
        return handle_torch_function(pwlu, (x,), x, left, right, heights, left_slope, right_slope, channel_dim=channel_dim)
    if not torch.jit.is_tracing():  # while tracing, sizes are tensors and the comparisons would be recorded
        check(x, left, right, heights, left_slope, right_slope)
    weight = reference.pack(left, right, heights, left_slope, right_slope)
    return ops.forward(x, weight, heights.shape[1] - 1, channel_dim)


def packed(x: Tensor, weight: Tensor, intervals: int, channel_dim: int = 1) -> Tensor:
    """Apply :func:`pwlu` with the parameters packed into one tensor.

    Args:
        x: the input, of any shape.
        weight: the parameters, shape (C (N + 5),), as :func:`pwlu.reference.pack` returns them.
        intervals: N.
        channel_dim: the dimension of x that has C entries. Default: 1.

    Returns:
        y, with the shape, dtype and memory layout of x.
    """
    if not isinstance(x, Tensor):  # the operator checks tensors itself
        if has_torch_function_unary(x):  # the output of a fused batch norm, in a graph of torch.fx
            return handle_torch_function(packed, (x,), x, weight, intervals, channel_dim)
        checks.check_input(x)
    return ops.forward(x, weight, intervals, channel_dim)


# Make fx.symbolic_trace record the calls instead of tracing into them: the checks need real shapes.
torch.fx.wrap("pwlu")
torch.fx.wrap("packed")


def check(x: Tensor, left: Tensor, right: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor) -> None:
    """Check that the five parameters match each other and the device of x; raise TypeError or ValueError if not."""
    checks.check_input(x)
    if heights.ndim != 2 or heights.shape[1] < 2:
        raise ValueError(
            "pwlu: heights must have the shape (channels, intervals + 1) with at least 1 interval, not "
            f"{tuple(heights.shape)}. For one channel, write heights=torch.tensor([[0.0, 0.0, 1.0]])"
        )
    channels = heights.shape[0]
    for name, parameter in (("left", left), ("right", right), ("left_slope", left_slope), ("right_slope", right_slope)):
        if parameter.shape != (channels,):
            raise ValueError(
                f"pwlu: {name} must have the shape ({channels},), one per row of heights, not {tuple(parameter.shape)}. "
                f"If all channels have the same value, write {name}=torch.full(({channels},), number)"
            )
        checks.check_parameter(name, parameter, x)
    checks.check_parameter("heights", heights, x)
