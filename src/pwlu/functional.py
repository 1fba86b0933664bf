"""The function: checks its arguments and calls the operator."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pwlu import ops

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def pwlu(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    heights: Tensor,
    left_slope: Tensor,
    right_slope: Tensor,
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
    """
    if ops.direct(x, left, right, heights, left_slope, right_slope):
        return explained(ops.direct_forward, check, x, left, right, heights, left_slope, right_slope, channel_dim)
    if not torch.jit.is_tracing():  # sizes are then tensors, and comparing them would be recorded
        check(x, left, right, heights, left_slope, right_slope, channel_dim)
    return ops.forward(x, left, right, heights, left_slope, right_slope, channel_dim)


def observe(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    heights: Tensor,
    left_slope: Tensor,
    right_slope: Tensor,
    channel_dim: int = 1,
) -> tuple[Tensor, ...]:
    """As :func:`pwlu`, for a unit that stands still and watches its input (Phase I of the learning method).

    Returns y, and of each channel of x count, mean (C,) and sum of squared deviations from it (C,). The gradients of the
    parameters are zero, but not missing.
    """
    if ops.direct(x, left, right, heights, left_slope, right_slope):
        return explained(ops.direct_observe, check, x, left, right, heights, left_slope, right_slope, channel_dim)
    check(x, left, right, heights, left_slope, right_slope, channel_dim)
    return ops.observe(x, left, right, heights, left_slope, right_slope, channel_dim)


# What fx.symbolic_trace records is the call itself; the checks below need real shapes.
torch.fx.wrap("pwlu")


def explained(call: Callable[..., Any], checks: Callable[..., None], *arguments: Any) -> Any:
    """``call(*arguments)``, by a kernel, which looks at its arguments too and says less about them than `checks` does."""
    try:
        return call(*arguments)
    except (IndexError, TypeError, ValueError) as error:
        failure = error
    checks(*arguments)
    raise failure


def check(
    x: Tensor, left: Tensor, right: Tensor, heights: Tensor, left_slope: Tensor, right_slope: Tensor, channel_dim: int
) -> None:
    """Raise TypeError or ValueError, saying what was expected, what came and what to write instead."""
    check_input(x)
    if heights.ndim != 2 or heights.shape[1] < 2:
        raise ValueError(
            f"pwlu: heights must have the shape (channels, intervals + 1) with at least 1 interval, not {tuple(heights.shape)}"
        )
    channels, device = heights.shape[0], x.device
    for name, parameter in (("left", left), ("right", right), ("left_slope", left_slope), ("right_slope", right_slope)):
        if parameter.shape != (channels,):
            raise ValueError(
                f"pwlu: {name} must have the shape ({channels},), one a row of heights, not {tuple(parameter.shape)}"
            )
        if parameter.device != device:
            check_device(name, parameter, x)
        if parameter.dtype not in _FLOATS:
            raise TypeError(f"pwlu: {name} must be of a floating-point type (float32, say), not {parameter.dtype}")
    check_device("heights", heights, x)
    if heights.dtype not in _FLOATS:
        raise TypeError(f"pwlu: heights must be of a floating-point type (float32, say), not {heights.dtype}")
    if channels > 1:
        check_channels(x, channels, channel_dim)


def check_channels(x: Tensor, channels: int, channel_dim: int) -> None:
    """Raise unless x has `channels` entries along `channel_dim`."""
    if not -x.ndim <= channel_dim < x.ndim:
        raise ValueError(
            f"pwlu: channel_dim is {channel_dim}, but x has {x.ndim} dimensions {tuple(x.shape)}. "
            + ("Write channel_dim=-1 for channels in the last dimension" if x.ndim else "A number takes a unit of 1 channel")
        )
    if x.shape[channel_dim] != channels:
        fitting = [d for d in range(x.ndim) if x.shape[d] == channels]
        hint = f"write channel_dim={fitting[-1]}" if fitting else f"make the unit with channels={x.shape[channel_dim]}, or 1"
        raise ValueError(
            f"pwlu: the unit has {channels} channels, but x of shape {tuple(x.shape)} has {x.shape[channel_dim]} "
            f"in dimension {channel_dim}: {hint}"
        )


def check_input(x: Tensor) -> None:
    """Raise unless x is a tensor of a floating-point type."""
    if not isinstance(x, Tensor):
        raise TypeError(f"pwlu: x must be a tensor, not {type(x).__name__}. Write torch.as_tensor(x)")
    if x.dtype not in _FLOATS:
        raise TypeError(f"pwlu: x must be float32, bfloat16, float16 or float64, not {x.dtype}. Write pwlu(x.float(), ...)")


def check_device(name: str, parameter: Tensor, x: Tensor) -> None:
    """Raise unless both are on one device."""
    if parameter.device != x.device:
        raise ValueError(f"pwlu: {name} is on {parameter.device} and x on {x.device}. Move the module: act.to('{x.device}')")


def whole_number(owner: str, name: str, value: Any, hint: str, least: int | None = None) -> int:
    """The value as an int; ValueError if it is none, or too small."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        at_least = "" if least is None else f" of at least {least}"
        raise ValueError(f"{owner}: {name} must be a whole number{at_least} ({hint}), not {value!r}")
    return number
