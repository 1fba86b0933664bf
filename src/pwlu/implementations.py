"""Which code serves which device: a kernel where there is one and it takes the arguments, else plain torch.

The functions take and return what the operators of the same names do; see ``ops.py``.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pwlu import checks, reference
from pwlu.kernels import eager

# Plain torch, on every device.


def _laid_out(x: Tensor, y: Tensor) -> Tensor:
    like = torch.empty_like(x)
    return y if y.stride() == like.stride() else like.copy_(y)


def plain_forward(x: Tensor, weight: Tensor, intervals: int, channel_dim: int) -> Tensor:
    """Return y."""
    return _laid_out(x, reference.forward(x, *reference.unpack(weight, intervals), channel_dim))


def plain_backward(
    grad: Tensor, x: Tensor, weight: Tensor, intervals: int, channel_dim: int, need_input: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight; an empty tensor for one that is not needed."""
    blocks = reference.unpack(weight, intervals)
    grad_x, grads = reference.backward(grad, x, *blocks, channel_dim, need_input, need_weight)
    none = x.new_empty(0)
    return none if grad_x is None else _laid_out(x, grad_x), none.clone() if grads is None else reference.pack(*grads)


def plain_lookup(x: Tensor, *rest: Any) -> Tensor:
    """Return y of the fused form."""
    return _laid_out(x, reference.lookup(x, *rest))


def plain_moments(x: Tensor, channel_dim: int, pool: Tensor) -> None:
    """Add the moments of x to a pool."""
    channels = pool.shape[1]
    count = torch.full((), x.numel() // channels, dtype=torch.int64, device=x.device)
    pool.copy_(reference.merge(pool, count, *reference.moments(x, channels, channel_dim)))


def plain_observe(x: Tensor, weight: Tensor, intervals: int, channel_dim: int, pool: Tensor) -> Tensor:
    """Return y and add the moments of x to a pool."""
    plain_moments(x, channel_dim, pool)
    return plain_forward(x, weight, intervals, channel_dim)


# Kernels.


@functools.cache  # so that a warning that there is none comes once
def _serving(device: torch.device) -> Any:
    from pwlu.kernels import cpu, cuda

    kernel: Any = None
    if device.type == "cuda":
        kernel = cuda.kernel(device.index)
    elif device.type == "cpu":
        kernel = cpu.kernel()
    if kernel is not None:
        eager.build_in_background()
    return kernel


def kernel_of(x: Tensor) -> Any:
    """Return the kernels that serve the device of x, or None; they are imported when first used."""
    eager.load_if_ready()
    return _serving(x.device)


def _served(name: str, plain: Callable[..., Any], check: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that checks its arguments and calls the kernel's method of that name, or plain torch."""

    def call(*arguments: Any) -> Any:
        check(*arguments)
        kernel = kernel_of(arguments[0])
        found = NotImplemented if kernel is None else getattr(kernel, name)(*arguments)
        return plain(*arguments) if found is NotImplemented else found

    return call


def check_backward(grad: Tensor, x: Tensor, *rest: Any) -> None:
    """Raise unless the arguments of ``backward`` fit each other."""
    checks.check_weight(x, *rest[:3])
    checks.check_gradient(grad, x)


def check_observe(x: Tensor, weight: Tensor, intervals: int, channel_dim: int, pool: Tensor) -> None:
    """Raise unless the arguments of ``observe`` fit each other."""
    channels = checks.check_weight(x, weight, intervals, channel_dim)
    if checks.check_pool(x, channel_dim, pool) != channels:
        raise ValueError(f"pwlu: pool must have {channels} channels as the weight has, not {pool.shape[1]}")


forward = _served("forward", plain_forward, checks.check_weight)
backward = _served("backward", plain_backward, check_backward)
lookup = _served("lookup", plain_lookup, checks.check_tables)
moments = _served("moments", plain_moments, checks.check_pool)


def _observe_apart(x: Tensor, weight: Tensor, intervals: int, channel_dim: int, pool: Tensor) -> Tensor:
    """A kernel that cannot do both may do one of them."""
    moments(x, channel_dim, pool)
    return forward(x, weight, intervals, channel_dim)


observe = _served("observe", _observe_apart, check_observe)


def warm_up(
    device: torch.device | str = "cuda", dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)
) -> int:
    """Compile and load now what the first calls on that device would; return the number of kernels.

    Worth it before a CUDA graph is captured, where nothing can be loaded, and before timing anything. `dtypes`: of the inputs.
    The first time on a machine takes some ten seconds of a core for each; later, kernels come from the cache. 0: plain torch
    serves the device, and `pwlu info` says why.
    """
    device = torch.device(device)
    if device.type == "cuda":
        from pwlu.kernels import cuda

        return cuda.warm_up(torch.cuda.current_device() if device.index is None else device.index, tuple(dtypes))
    return int(device.type == "cpu" and kernel_of(torch.empty(0, device=device)) is not None)
