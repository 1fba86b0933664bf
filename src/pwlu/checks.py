"""Checks of arguments: each raises an error that says what was expected, what came, and what to write instead."""

import operator
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_input(x: Tensor) -> None:
    """Raise unless x is a tensor of a floating-point type."""
    if not isinstance(x, Tensor):
        raise TypeError(f"pwlu: x must be a tensor, not {type(x).__name__}. Write torch.as_tensor(x)")
    if x.dtype not in FLOATS:
        raise TypeError(f"pwlu: x must be float32, bfloat16, float16 or float64, not {x.dtype}. Write pwlu(x.float(), ...)")


def check_parameter(name: str, parameter: Tensor, x: Tensor) -> None:
    """Raise unless a parameter is of a floating-point type and on the device of x."""
    if parameter.device != x.device:
        raise ValueError(f"pwlu: {name} is on {parameter.device} and x on {x.device}. Move the module: act.to('{x.device}')")
    if parameter.dtype not in FLOATS:
        raise TypeError(f"pwlu: {name} must be of a floating-point type (float32, say), not {parameter.dtype}")


def check_channels(x: Tensor, channels: int, channel_dim: int) -> None:
    """Raise unless x has `channels` entries along `channel_dim`; one channel serves any x."""
    if channels == 1:
        return
    if not -x.ndim <= channel_dim < x.ndim:
        raise ValueError(
            f"pwlu: channel_dim is {channel_dim}, but x has {x.ndim} dimensions {tuple(x.shape)}. "
            + ("Write channel_dim=-1 for channels in the last dimension" if x.ndim else "A 0-d tensor needs PWLU(channels=1)")
        )
    if x.shape[channel_dim] != channels:
        fitting = [d for d in range(x.ndim) if x.shape[d] == channels]
        hint = f"write channel_dim={fitting[-1]}" if fitting else f"make the unit with channels={x.shape[channel_dim]}, or 1"
        raise ValueError(
            f"pwlu: the unit has {channels} channels, but x of shape {tuple(x.shape)} has {x.shape[channel_dim]} "
            f"in dimension {channel_dim}: {hint}"
        )


def check_weight(x: Tensor, weight: Tensor, intervals: int, channel_dim: int) -> int:
    """Return the number of channels of a packed weight; raise unless it fits x."""
    check_input(x)
    check_parameter("weight", weight, x)
    if intervals < 1 or weight.ndim != 1 or not weight.shape[0] or weight.shape[0] % (intervals + 5):
        raise ValueError(
            f"pwlu: weight must have the shape (channels * (intervals + 5),) with at least 1 channel and 1 interval, not "
            f"{tuple(weight.shape)} with intervals={intervals}. pwlu.reference.pack makes one of left, right, heights, ..."
        )
    channels = weight.shape[0] // (intervals + 5)
    check_channels(x, channels, channel_dim)
    return channels


def check_gradient(grad: Tensor, x: Tensor) -> None:
    """Raise unless grad can be the gradient of something of x's shape."""
    if grad.shape != x.shape or grad.device != x.device:
        raise ValueError(
            f"pwlu: grad must have the shape {tuple(x.shape)} and device {x.device} of x, "
            f"not {tuple(grad.shape)} on {grad.device}"
        )


def check_pool(x: Tensor, channel_dim: int, pool: Tensor) -> int:
    """Return the number of channels of a pool of moments; raise unless it fits x."""
    check_input(x)
    check_parameter("pool", pool, x)
    if pool.ndim != 2 or pool.shape[0] != 3 or not pool.shape[1]:
        raise ValueError(f"pwlu: pool must have the shape (3, channels): count, mean and M2, not {tuple(pool.shape)}")
    check_channels(x, pool.shape[1], channel_dim)
    return pool.shape[1]


def check_tables(x: Tensor, left: Tensor, inv_step: Tensor, slopes: Tensor, offsets: Tensor, channel_dim: int) -> None:
    """Raise unless the tables of a fused unit fit each other and x."""
    check_input(x)
    for name, table in (("left", left), ("inv_step", inv_step), ("slopes", slopes), ("offsets", offsets)):
        check_parameter(name, table, x)
    wide = slopes.shape
    if len(wide) != 2 or wide[0] < 1 or wide[1] < 3 or offsets.shape != wide or not left.shape == inv_step.shape == wide[:1]:
        found = ", ".join(str(tuple(table.shape)) for table in (left, inv_step, slopes, offsets))
        raise ValueError(
            f"pwlu: tables must have the shapes (C,), (C,), (C, N+2), (C, N+2) with C and N of at least 1, not {found}"
        )
    check_channels(x, wide[0], channel_dim)


def check_norm_input(x: Tensor, *rest: Any) -> None:
    """Raise unless x can be normalised per channel, and with running statistics if it is not training."""
    check_input(x)
    if x.ndim < 2:
        raise ValueError(f"pwlu: x must have the shape (batch, channels, ...) to be normalised, not {tuple(x.shape)}")
    gamma, beta, running_mean, running_var, *_, training, pool = rest
    if not training and (running_mean is None or running_var is None):
        raise ValueError("pwlu: a norm that is not training needs running_mean and running_var")
    for name, vector in (("gamma", gamma), ("beta", beta), ("running_mean", running_mean), ("running_var", running_var)):
        if vector is not None:
            check_parameter(name, vector, x)
            if vector.shape != (x.shape[1],):
                raise ValueError(
                    f"pwlu: {name} must have the shape ({x.shape[1]},), one per channel, not {tuple(vector.shape)}"
                )
    if pool is not None and check_pool(x, 1, pool) != x.shape[1]:
        raise ValueError(f"pwlu: pool must have {x.shape[1]} channels as x has, not {pool.shape[1]}")


def check_norm(x: Tensor, residual: Tensor | None, norm: Tensor, weight: Tensor, intervals: int, *rest: Any) -> None:
    """Raise unless a norm, a residual and a weight fit x."""
    channels = check_weight(x, weight, intervals, 1)
    if x.ndim < 2 or norm.shape != (4, x.shape[1]) or channels != x.shape[1]:
        raise ValueError(
            f"pwlu: behind a norm, x must be (batch, channels, ...), the norm (4, channels) and the weight one of as many "
            f"channels, not {tuple(x.shape)}, {tuple(norm.shape)} and {channels}"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device):
        raise ValueError(
            f"pwlu: residual must have the shape, type and device of x, {tuple(x.shape)}, {x.dtype} and {x.device}, not "
            f"{tuple(residual.shape)}, {residual.dtype} and {residual.device}"
        )


def whole_number(owner: str, name: str, value: Any, hint: str, least: int | None = None) -> int:
    """Return the value as an int; raise ValueError if it is none, or too small."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        at_least = "" if least is None else f" of at least {least}"
        raise ValueError(f"{owner}: {name} must be a whole number{at_least} ({hint}), not {value!r}")
    return number
