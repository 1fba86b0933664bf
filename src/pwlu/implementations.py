"""Which code serves which device: plain torch everywhere, and kernels where there are some.

The functions take and return what the operators of the same names do; see ``ops.py``.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pwlu import reference

# Every device: plain torch.


def _laid_out(x: Tensor, y: Tensor) -> Tensor:
    like = torch.empty_like(x)
    return y if y.stride() == like.stride() else like.copy_(y)


def gradients(x: Tensor, grad_x: Tensor | None, grads: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    """In the form of the schema."""
    grad_x = x.new_empty(0) if grad_x is None else grad_x
    return (grad_x, *(grads or (x.new_empty(0) for _ in range(5))))


def default_forward(x: Tensor, *rest: Any) -> Tensor:
    """y, in plain torch."""
    return _laid_out(x, reference.forward(x, *rest))


def default_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The gradients, in plain torch."""
    grad_x, grads = reference.backward(grad, x, *rest)
    grads = grads and [g.clone() for g in grads]  # some are views of one tensor; outputs must not share memory
    return gradients(x, None if grad_x is None else _laid_out(x, grad_x), grads)


def default_lookup(x: Tensor, *rest: Any) -> Tensor:
    """y of the fused form, in plain torch."""
    return _laid_out(x, reference.lookup(x, *rest))


def _count(x: Tensor, channels: int) -> Tensor:
    return torch.full((), x.numel() // channels, dtype=torch.int64, device=x.device)


def default_moments(x: Tensor, channels: int, channel_dim: int) -> tuple[Tensor, ...]:
    """Count, mean and M2, in plain torch."""
    return (_count(x, channels), *reference.moments(x, channels, channel_dim))


def default_observe(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """y and the moments, in plain torch."""
    return (default_forward(x, *rest), *default_moments(x, rest[0].shape[0], rest[-1]))


def default_pool(pool: Tensor, *moments: Tensor) -> None:
    """Moments added to a pool, in plain torch."""
    pool.copy_(reference.merge(pool, *moments))


# CPU and CUDA: a kernel where there is one and it takes such arguments (it returns None if it does not).


@functools.cache  # so that a warning that there is none comes once
def _serving(device: torch.device) -> Any:
    from pwlu.kernels import cpu, cuda, eager

    kernel = cuda.kernel(device.index) if device.type == "cuda" else cpu.kernel()
    if kernel is not None:
        eager.build_aside()
    return kernel


def kernel_of(x: Tensor) -> Any:
    """The kernels that serve the device of x, if there are any; imported when first used."""
    return _serving(x.device)


def kernel_forward(x: Tensor, *rest: Any) -> Tensor:
    """y, by a kernel if there is one."""
    kernel = kernel_of(x)
    y = kernel and kernel.forward(x, *rest)
    return default_forward(x, *rest) if y is None else y


def kernel_gradients(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor | None, Sequence[Tensor] | None]:
    """The gradients of x and of the parameters, by a kernel if there is one; None for what was not asked for."""
    kernel = kernel_of(x)
    found = kernel and kernel.backward(grad, x, *rest)
    if found is None:
        grad_x, *grads = default_backward(grad, x, *rest)
        found = grad_x, grads
    return found


def kernel_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The gradients, by a kernel if there is one."""
    return gradients(x, *kernel_gradients(grad, x, *rest))


def kernel_lookup(x: Tensor, *rest: Any) -> Tensor:
    """y of the fused form, by a kernel if there is one."""
    kernel = kernel_of(x)
    y = kernel and kernel.lookup(x, *rest)
    return default_lookup(x, *rest) if y is None else y


def kernel_moments(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Count, mean and M2, by a kernel if there is one."""
    kernel = kernel_of(x)
    found = kernel and kernel.moments(x, *rest)
    return default_moments(x, *rest) if found is None else found


def kernel_observe(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """y and the moments, by a kernel if there is one."""
    kernel = kernel_of(x)
    found = kernel and kernel.observe(x, *rest)
    return default_observe(x, *rest) if found is None else found


def kernel_pool(pool: Tensor, *moments: Tensor) -> None:
    """Moments added to a pool, by a kernel if there is one: CUDA alone has one, where plain torch takes 14 launches."""
    kernel = kernel_of(pool)
    if kernel is None or not kernel.pool(pool, *moments):
        default_pool(pool, *moments)


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
