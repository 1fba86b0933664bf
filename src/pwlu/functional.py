"""The function, with its parameters as five tensors or as one."""

import torch
from torch import Tensor

from pwlu import checks, ops, reference


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
    r"""Piecewise Linear Unit with N intervals of width :math:`d = (B_R - B_L)/N`:

    .. math::
        y = \begin{cases}
            (x - B_L) K_L + Y_0 & x < B_L \\
            (x - B_R) K_R + Y_N & x \ge B_R \\
            (x - B_i) (Y_{i+1} - Y_i)/d + Y_i & \text{otherwise, with } i = \lfloor (x - B_L)/d \rfloor,\ B_i = B_L + i d
        \end{cases}

    Args:
        x: any shape; float32, bfloat16, float16 or float64. Arithmetic is in float32 (float64 for float64).
        left, right: the bounds :math:`B_L < B_R`, shape (C,).
        heights: :math:`Y_0 \dots Y_N`, shape (C, N+1).
        left_slope, right_slope: :math:`K_L` and :math:`K_R`, shape (C,).
        channel_dim: the dimension of x with C entries: 1 for images, -1 for (batch, time, features). With C = 1 the one
            function is applied to the whole of x, and channel_dim does not matter.

    Returns:
        y: shape, dtype and memory layout of x.

    The parameters are packed into one tensor first, which takes a copy: call :func:`packed` if they are packed already.
    """
    if not torch.jit.is_tracing():  # sizes are then tensors, and comparing them would be recorded
        check(x, left, right, heights, left_slope, right_slope)
    weight = reference.pack(left, right, heights, left_slope, right_slope)
    return ops.forward(x, weight, heights.shape[1] - 1, channel_dim)


def packed(x: Tensor, weight: Tensor, intervals: int, channel_dim: int = 1) -> Tensor:
    """Apply :func:`pwlu` with the parameters as one tensor of C (N + 5) numbers, as ``pwlu.reference.pack`` makes it."""
    if not isinstance(x, Tensor):  # else the operator checks
        checks.check_input(x)
    return ops.forward(x, weight, intervals, channel_dim)


# Record the calls themselves in fx.symbolic_trace: checks need real shapes.
torch.fx.wrap("pwlu")
torch.fx.wrap("packed")


def check(x: Tensor, left: Tensor, right: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor) -> None:
    """Raise TypeError or ValueError unless the five tensors fit each other and x's device."""
    checks.check_input(x)
    if heights.ndim != 2 or heights.shape[1] < 2:
        raise ValueError(
            f"pwlu: heights must have the shape (channels, intervals + 1) with at least 1 interval, not {tuple(heights.shape)}"
        )
    channels = heights.shape[0]
    for name, parameter in (("left", left), ("right", right), ("left_slope", left_slope), ("right_slope", right_slope)):
        if parameter.shape != (channels,):
            raise ValueError(
                f"pwlu: {name} must have the shape ({channels},), one per row of heights, not {tuple(parameter.shape)}"
            )
        checks.check_parameter(name, parameter, x)
    checks.check_parameter("heights", heights, x)
