"""Whether a call is a plain one: nothing but autograd and a kernel could have a say in it.

Such calls leave out checks that the kernel makes itself and, from Python, the dispatcher (benchmarks/overhead.py).
"""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_TYPES = (Tensor, nn.Parameter)
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
_known: set[int] = set()  # of what _ordinary_keys found so far


@functools.cache
def _ordinary_keys(device: str) -> frozenset[int]:
    """What the dispatcher knows of an ordinary tensor and of one made in inference mode."""
    keys = set()
    for inference in (False, True):  # whatever the mode is in which this is asked first
        with torch.inference_mode(inference):
            keys.add(torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr())
    return frozenset(keys)


def _ordinary(x: Tensor) -> bool:
    """Whether x is no subclass, on a device with kernels, and nothing special: negated, batched, zero, sparse, ..."""
    if type(x) not in _TYPES:
        return False
    keys = torch._C._dispatch_keys(x).raw_repr()
    if keys in _known:
        return True
    if x.is_cpu or x.is_cuda:
        _known.update(_ordinary_keys(x.device.type))
    return keys in _known


def eager() -> bool:
    """Whether nobody looks on: no compiler, no tracer, no mode, no transform of torch.func, no forward differentiation."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
        or torch._C._is_tracing()
        or transformed()
    )


def transformed() -> bool:
    """Whether forward-mode differentiation or a torch.func transform is under way: plain torch then does the work."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def plain(x: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether nobody looks on, and all of them are ordinary tensors."""
    if not eager() or not _ordinary(x):
        return False
    # Nothing but negation makes a parameter special, and asking is four times cheaper.
    for tensor in others:  # noqa: SIM110  # a generator would take as long as all the rest
        if type(tensor) not in _TYPES or tensor.is_neg():
            return False
    return True
