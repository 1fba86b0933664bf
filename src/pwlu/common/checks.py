"""Argument checks. Each error says what was expected, what was given, and what to write instead."""

import operator
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_input(x: Tensor) -> None:
    """Check that x is a floating-point tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"pwlu: x must be a tensor, not {type(x).__name__}. Write torch.as_tensor(x)")
    if x.dtype not in FLOATS:
        raise TypeError(f"pwlu: x must be float32, bfloat16, float16 or float64, not {x.dtype}. Write pwlu(x.float(), ...)")


def check_parameter(name: str, parameter: Tensor, x: Tensor) -> None:
    """Check that a parameter has a floating-point type and is on the device of x."""
    if parameter.device != x.device:
        raise ValueError(f"pwlu: {name} is on {parameter.device} but x is on {x.device}. Move the module: act.to('{x.device}')")
    if parameter.dtype not in FLOATS:
        raise TypeError(f"pwlu: {name} must be of a floating-point type such as float32, not {parameter.dtype}")


def check_channels(x: Tensor, channels: int, channel_dim: int) -> None:
    """Check that x has `channels` entries in dimension `channel_dim`. One channel matches every x."""
    if channels == 1:
        return
    if not -x.ndim <= channel_dim < x.ndim:
        raise ValueError(
            f"pwlu: channel_dim={channel_dim} is not a dimension of x, which has the shape {tuple(x.shape)}. "
            + ("Write channel_dim=-1 for channels in the last dimension" if x.ndim else "A 0-d tensor needs PWLU(channels=1)")
        )
    if x.shape[channel_dim] != channels:
        fitting = [d for d in range(x.ndim) if x.shape[d] == channels]
        hint = f"Write channel_dim={fitting[-1]}" if fitting else f"Create it with channels={x.shape[channel_dim]} or 1"
        raise ValueError(
            f"pwlu: the activation has {channels} channels, but x of shape {tuple(x.shape)} has {x.shape[channel_dim]} "
            f"in dimension {channel_dim}. {hint}"
        )


def _weight_check(per_interval: int, others: int, size: str, pack: str) -> Callable[[Tensor, Tensor, int, int], int]:
    """Return a check of packed weights with `per_interval` * intervals + `others` elements per channel."""

    def check(x: Tensor, weight: Tensor, intervals: int, channel_dim: int) -> int:
        """Check that a packed weight matches x; return its number of channels."""
        check_input(x)
        check_parameter("weight", weight, x)
        elements = per_interval * intervals + others
        if intervals < 1 or weight.ndim != 1 or not weight.shape[0] or weight.shape[0] % elements:
            raise ValueError(
                f"pwlu: weight must have the shape (channels * ({size}),) with at least 1 channel and 1 interval, not "
                f"{tuple(weight.shape)} with intervals={intervals}. Write weight = pwlu.reference.{pack}"
            )
        channels = weight.shape[0] // elements
        check_channels(x, channels, channel_dim)
        return channels

    return check


check_weight = _weight_check(1, 5, "intervals + 5", "pack(left, right, heights, left_slope, right_slope)")
check_knot_weight = _weight_check(2, 4, "2 intervals + 4", "nonuniform.pack_knots(knots, heights, left_slope, right_slope)")


def check_samples(x: Tensor, features: int, channel_dim: int) -> None:
    """Check that x has samples in dimension 0 and `features` channels in another dimension. One feature matches every x."""
    check_input(x)
    if x.ndim < 2:
        raise ValueError(
            f"pwlu: x must have the shape (batch, ...) with at least two dimensions, because the function depends on the "
            f"sample, not {tuple(x.shape)}. Write x.unsqueeze(0) for a single sample"
        )
    check_channels(x, features, channel_dim)
    if features > 1 and channel_dim % x.ndim == 0:
        raise ValueError(
            f"pwlu: channel_dim is {channel_dim}, but dimension 0 of x, of shape {tuple(x.shape)}, holds the samples. Write "
            "channel_dim=1 for images, or channel_dim=-1 for channels in the last dimension"
        )


def check_dynamic(x: Tensor, *rest: Any) -> None:
    """Check that the parameters of a dynamic PWLU match each other and x."""
    *parameters, intervals, channel_dim = rest
    named = dict(zip(("weight", "directions", "first", "first_bias", "second", "second_bias"), parameters, strict=True))
    first = named["first"]
    check_samples(x, first.shape[1] if first.ndim == 2 else 1, channel_dim)
    for name, parameter in named.items():
        check_parameter(name, parameter, x)
    if [t.ndim for t in named.values()] != [1, 1, 2, 1, 2, 1] or not _fit_each_other(intervals, *parameters):
        found = ", ".join(f"{name} {tuple(parameter.shape)}" for name, parameter in named.items())
        raise ValueError(
            "pwlu: a dynamic PWLU with C functions, N intervals, M directions, F features, a hidden layer of size H and R "
            "coefficients per direction, where C and R are 1 or F, needs the shapes weight (C * (N + 5),), directions "
            "(M * C * (N + 1),), first (H, F), first_bias (H,), second (M * R, H), second_bias (M * R,), not "
            f"{found} with intervals={intervals}"
        )


def _fit_each_other(
    intervals: int, weight: Tensor, directions: Tensor, first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor
) -> bool:
    hidden, features = first.shape
    channels = weight.shape[0] // (intervals + 5) if intervals > 0 else 0
    if channels not in (1, features) or weight.shape[0] != channels * (intervals + 5):
        return False
    count = directions.shape[0] // (channels * (intervals + 1))
    if count < 1 or directions.shape[0] != count * channels * (intervals + 1):
        return False
    outputs = second.shape[0]
    return (
        outputs in (count, count * features)
        and (first_bias.shape, second_bias.shape) == ((hidden,), (outputs,))
        and second.shape[1] == hidden
    )


def check_dynamic_backward(grad: Tensor, x: Tensor, *rest: Any) -> None:
    """Check that the arguments of ``dynamic_backward`` match each other."""
    check_dynamic(x, *rest[:6], *rest[7:])
    check_gradient(grad, x)


def check_gradient(grad: Tensor, x: Tensor) -> None:
    """Check that grad has the shape and device of x."""
    if grad.shape != x.shape or grad.device != x.device:
        raise ValueError(
            f"pwlu: grad must have the shape and device of x, {tuple(x.shape)} on {x.device}, "
            f"not {tuple(grad.shape)} on {grad.device}"
        )


def check_pool(x: Tensor, channel_dim: int, pool: Tensor) -> int:
    """Check that a pool of moments matches x; return its number of channels."""
    check_input(x)
    check_parameter("pool", pool, x)
    if pool.ndim != 2 or pool.shape[0] != 3 or not pool.shape[1]:
        raise ValueError(f"pwlu: pool must have the shape (3, channels) for count, mean and M2, not {tuple(pool.shape)}")
    check_channels(x, pool.shape[1], channel_dim)
    return pool.shape[1]


def check_tables(x: Tensor, left: Tensor, inv_step: Tensor, slopes: Tensor, offsets: Tensor, channel_dim: int) -> None:
    """Check that the tables of a fused PWLU match each other and x."""
    check_input(x)
    for name, table in (("left", left), ("inv_step", inv_step), ("slopes", slopes), ("offsets", offsets)):
        check_parameter(name, table, x)
    wide = slopes.shape
    if len(wide) != 2 or wide[0] < 1 or wide[1] < 3 or offsets.shape != wide or not left.shape == inv_step.shape == wide[:1]:
        found = ", ".join(str(tuple(table.shape)) for table in (left, inv_step, slopes, offsets))
        raise ValueError(
            "pwlu: left, inv_step, slopes and offsets must have the shapes (C,), (C,), (C, N+2), (C, N+2) with C and N of at "
            f"least 1, not {found}"
        )
    check_channels(x, wide[0], channel_dim)


def check_norm_input(x: Tensor, *rest: Any) -> None:
    """Check that x can be normalized per channel, and that eval mode has running statistics."""
    check_input(x)
    if x.ndim < 2:
        raise ValueError(f"pwlu: x must have the shape (batch, channels, ...) to be normalized, not {tuple(x.shape)}")
    gamma, beta, running_mean, running_var, *_, training, pool = rest
    if not training and (running_mean is None or running_var is None):
        raise ValueError(
            "pwlu: a batch norm in eval mode needs running_mean and running_var, but one of them is None. Pass both"
        )
    for name, vector in (("gamma", gamma), ("beta", beta), ("running_mean", running_mean), ("running_var", running_var)):
        if vector is not None:
            check_parameter(name, vector, x)
            if vector.shape != (x.shape[1],):
                raise ValueError(
                    f"pwlu: {name} must have the shape ({x.shape[1]},), one per channel, not {tuple(vector.shape)}"
                )
    if pool is not None and check_pool(x, 1, pool) != x.shape[1]:
        raise ValueError(f"pwlu: pool must have {x.shape[1]} channels, like x, not {pool.shape[1]}")


def check_norm(x: Tensor, residual: Tensor | None, norm: Tensor, weight: Tensor, intervals: int, *rest: Any) -> None:
    """Check that a norm, a residual and a weight match x."""
    channels = check_weight(x, weight, intervals, 1)
    if x.ndim < 2 or norm.shape != (4, x.shape[1]) or channels != x.shape[1]:
        raise ValueError(
            "pwlu: x of shape (batch, channels, ...) needs a norm of shape (4, channels) and a weight of as many channels, "
            f"but x has the shape {tuple(x.shape)}, the norm {tuple(norm.shape)}, and the weight {channels} channels"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device):
        raise ValueError(
            f"pwlu: residual must have the shape, dtype and device of x, {tuple(x.shape)}, {x.dtype} and {x.device}, not "
            f"{tuple(residual.shape)}, {residual.dtype} and {residual.device}"
        )


def check_share(owner: str, tolerance: Any) -> None:
    """Check that a tolerance is a number between 0 and 1. The error names the `owner`, a function."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 < tolerance < 1:
        raise ValueError(
            f"{owner}: tolerance is a share of the function's range: write a number between 0 and 1, not {tolerance!r}"
        )


def check_rate(owner: str, name: str, value: Any) -> None:
    """Check that a learning rate, weight decay or factor is at least 0: optimizers do not check those of parameter groups."""
    if isinstance(value, bool) or not isinstance(value, (Real, Tensor)) or not 0 <= float(value) < float("inf"):
        raise ValueError(f"{owner}: {name} must be a finite number of at least 0, not {value!r}")


def check_integer(owner: str, name: str, value: Any, hint: str, minimum: int | None = None) -> int:
    """Return an argument as an int; raise ValueError if it is not an integer of at least `minimum`.

    The error names the `owner`, a class or function, and the argument `name`. `hint` says which values are good.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (minimum is not None and number < minimum):
        at_least = "" if minimum is None else f" of at least {minimum}"
        raise ValueError(f"{owner}: {name} must be an integer{at_least} ({hint}), not {value!r}")
    return number
