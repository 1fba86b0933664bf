"""The operators ``torch.ops.pwlu.*``: schemas, shapes and derivatives.

    forward(x, left, right, heights, left_slope, right_slope, channel_dim) -> y
    backward(grad, x, left, ..., right_slope, channel_dim, need_input, need_parameters) -> gradients in that order
    lookup(x, left, inv_step, slopes, offsets, channel_dim) -> y                      the fused form, for inference
    moments(x, channels, channel_dim) -> (count, mean, M2)
    observe(x, left, ..., right_slope, channel_dim) -> (y, count, mean, M2)
                          forward and moments in one pass over x; the parameters' gradients are zero, for they stand still
    pool(pool, count, mean, M2)                                     adds moments to those in `pool`, (3, C), in place

Outputs have the memory layout of ``torch.empty_like(x)``. In ``backward`` an empty tensor stands for a gradient that
was not asked for. What computes them on which device is in ``implementations.py``; where it could be compiled, ``eager.cpp``
calls that, with derivatives of its own.

The derivatives are registered under the Autograd key by hand: with ``torch.library.register_autograd`` a call on a small
tensor takes half as long again (benchmarks/overhead.py).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pwlu import implementations, reference
from pwlu.kernels import eager
from pwlu.plain import plain, transformed

_PARAMETERS = "Tensor left, Tensor right, Tensor heights, Tensor left_slope, Tensor right_slope"
_SCHEMAS = (
    f"forward(Tensor x, {_PARAMETERS}, int channel_dim) -> Tensor",
    f"backward(Tensor grad, Tensor x, {_PARAMETERS}, int channel_dim, bool need_input, bool need_parameters)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "lookup(Tensor x, Tensor left, Tensor inv_step, Tensor slopes, Tensor offsets, int channel_dim) -> Tensor",
    "moments(Tensor x, int channels, int channel_dim) -> (Tensor, Tensor, Tensor)",
    f"observe(Tensor x, {_PARAMETERS}, int channel_dim) -> (Tensor, Tensor, Tensor, Tensor)",
    "pool(Tensor(a!) pool, Tensor count, Tensor mean, Tensor m2) -> ()",
)
_library = torch.library.Library("pwlu", "DEF")
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
forward = torch.ops.pwlu.forward.default
backward = torch.ops.pwlu.backward.default
lookup = torch.ops.pwlu.lookup.default
moments = torch.ops.pwlu.moments.default
observe = torch.ops.pwlu.observe.default
pool = torch.ops.pwlu.pool.default


# Shapes, for tracing and the meta device.


def _fake_like_x(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _fake_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *parameters, _, need_input, need_parameters = rest
    grads = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in parameters] if need_parameters else None
    return implementations.gradients(x, torch.empty_like(x) if need_input else None, grads)


def _fake_moments(x: Tensor, channels: int, channel_dim: int) -> tuple[Tensor, ...]:
    mean, m2 = (x.new_empty(channels, dtype=reference.compute_dtype(x)) for _ in range(2))
    return torch.empty((), dtype=torch.int64, device=x.device), mean, m2


def _fake_observe(x: Tensor, left: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return (torch.empty_like(x), *_fake_moments(x, left.shape[0], rest[-1]))


# Derivatives.


def _wanted(tensors: Iterable[Tensor]) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    return False


def _below_autograd(operator: Callable[..., Any], *arguments: Any) -> Any:
    """The operator without derivatives; where possible without a second way through the dispatcher."""
    tensors = [a for a in arguments[1:] if isinstance(a, Tensor)]
    if plain(arguments[0], tensors):
        return _BY_KERNEL[operator](*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


class _Forward(torch.autograd.Function):
    """y, keeping x and the parameters alone."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, ctx.channel_dim = arguments
        ctx.save_for_backward(*inputs)
        return _below_autograd(forward, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        need_input, *needs = ctx.needs_input_grad  # where it is False, autograd does not look at what it gets
        grad_x, grads = _gradients(grad, ctx.saved_tensors, ctx.channel_dim, need_input, True in needs)
        return (grad_x, *(grads or (None,) * 5), None)


def _gradients(
    grad: Tensor, saved: tuple[Tensor, ...], channel_dim: int, need_input: bool, need_parameters: bool
) -> tuple[Tensor | None, Sequence[Tensor] | None]:
    """``backward`` in a backward pass: gradients are enabled there only if a second derivative is wanted."""
    arguments: tuple[Any, ...] = (grad, *saved, channel_dim, need_input, need_parameters)
    if torch.is_grad_enabled() or torch.autograd.forward_ad._current_level >= 0:
        grad_x, *grads = backward(*arguments)
        return grad_x, grads
    if plain(grad, saved):
        return implementations.kernel_gradients(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        grad_x, *grads = backward(*arguments)
    return grad_x, grads


def direct(x: Tensor, *parameters: Tensor) -> bool:
    """Whether no one but autograd and a kernel takes part, which looks at its arguments itself."""
    return plain(x, parameters) and implementations.kernel_of(x) is not None


def _only_y_differentiable(ctx: Any, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    ctx.mark_non_differentiable(*results[1:])
    ctx.set_materialize_grads(False)  # or zeros would be made for the moments
    return results


class _Observe(torch.autograd.Function):
    """y and the moments of x: the parameters stand still, so their gradients are zero, but not missing."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *inputs, ctx.channel_dim = arguments
        ctx.save_for_backward(*inputs)
        return _only_y_differentiable(ctx, _below_autograd(observe, *arguments))

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_moments: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[0] and grad is not None
        grad_x = _gradients(grad, saved, ctx.channel_dim, True, False)[0] if wanted else None
        return (grad_x, *_zeros(grad, saved[1:]), None)


def _zeros(grad: Tensor, parameters: tuple[Tensor, ...]) -> list[Tensor]:
    """Gradients of zero: in plain eager mode with one launch for all of them."""
    if not plain(grad, parameters):
        return [torch.zeros_like(p) for p in parameters]
    zeros = [torch.empty_like(p) for p in parameters]
    torch._foreach_zero_(zeros)
    return zeros


class _Lookup(torch.autograd.Function):
    """The fused form, whose backward is an error: its tables are constants that no training may pass by unnoticed."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        return _below_autograd(lookup, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError(
            "a derivative of a fused PWLU: pwlu.fuse_ is for inference alone. Train the model as it was before "
            "pwlu.fuse_, and fuse a copy: fused = copy.deepcopy(model); pwlu.fuse_(fused)."
        )


def _autograd_forward(*arguments: Any) -> Tensor:
    if transformed():
        return reference.forward(*arguments)
    if _wanted(arguments[:-1]):
        return _Forward.apply(*arguments)
    return _below_autograd(forward, *arguments)


def _autograd_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Differentiable, in plain torch, where a second derivative is asked for."""
    if transformed() or _wanted((grad, x, *rest[:-3])):
        return implementations.gradients(x, *reference.backward(grad, x, *rest))
    return _below_autograd(backward, grad, x, *rest)


def _autograd_lookup(*arguments: Any) -> Tensor:
    if torch.autograd.forward_ad._current_level >= 0 or (_wanted(arguments[:-1]) and transformed()):
        _Lookup.backward(None, arguments[0])
    if _wanted(arguments[:-1]):
        return _Lookup.apply(*arguments)
    return _below_autograd(lookup, *arguments)


def _autograd_moments(*arguments: Any) -> tuple[Tensor, ...]:
    """Statistics are observed, not differentiated."""
    return _below_autograd(moments, *arguments)


def _autograd_observe(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    if transformed():
        arguments = (x, *(p.detach() for p in rest[:-1]), rest[-1])
        return (reference.forward(*arguments), *implementations.default_moments(x.detach(), rest[0].shape[0], rest[-1]))
    if _wanted((x, *rest[:-1])):
        return _Observe.apply(x, *rest)
    return _below_autograd(observe, x, *rest)


_BY_KERNEL: dict[Any, Callable[..., Any]] = {
    forward: implementations.kernel_forward,
    backward: implementations.kernel_backward,
    lookup: implementations.kernel_lookup,
    moments: implementations.kernel_moments,
    observe: implementations.kernel_observe,
}
_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "forward": (implementations.default_forward, _fake_like_x, _autograd_forward),
    "backward": (implementations.default_backward, _fake_backward, _autograd_backward),
    "lookup": (implementations.default_lookup, _fake_like_x, _autograd_lookup),
    "moments": (implementations.default_moments, _fake_moments, _autograd_moments),
    "observe": (implementations.default_observe, _fake_observe, _autograd_observe),
}
_compiled = eager.load()  # its kernels are those of the CPU and of CUDA, and come to these where they do not know what to do:
_python = torch.library.Library("pwlu_python", "DEF")
for _schema, (_name, (_default, _fake, _autograd)) in zip(_SCHEMAS, _IMPLEMENTATIONS.items(), strict=False):
    _by_kernel = torch._disable_dynamo(_BY_KERNEL[getattr(torch.ops.pwlu, _name).default])
    _library.impl(_name, _default, "CompositeExplicitAutograd")
    _library.impl(_name, _autograd, "Autograd")
    _library.impl(_name, _default, "FuncTorchBatchedDecomposition")
    torch.library.register_fake(f"pwlu::{_name}", _fake, lib=_library)
    if _compiled and _name in eager.OPERATORS:
        _python.define(f"kernel_{_schema}")
        _python.impl(f"kernel_{_name}", _by_kernel, "CompositeExplicitAutograd")
        _python.define(f"autograd_{_schema}")
        _python.impl(f"autograd_{_name}", _autograd, "CompositeImplicitAutograd")
    else:
        _library.impl(_name, _by_kernel, "CPU")
        _library.impl(_name, _by_kernel, "CUDA")


# Where `direct` says so. Without compiled operators: past the dispatcher, which takes longer than what it calls.
direct_forward, direct_observe, direct_lookup = (
    (forward, observe, lookup) if _compiled else (_autograd_forward, _autograd_observe, _autograd_lookup)
)


def run_again() -> bool:
    """Whether a backward pass is under way: what runs forward then is gradient checkpointing, whose input has been counted."""
    return torch._C._current_graph_task_id() != -1


def _unless_run_again(add: Callable[..., None]) -> Callable[..., None]:
    def pool(*arguments: Tensor) -> None:
        if not run_again():  # asked when it runs, also from compiled code
            add(*arguments)

    return pool


_library.impl("pool", _unless_run_again(implementations.default_pool), "CompositeExplicitAutograd")
_library.impl("pool", _unless_run_again(implementations.kernel_pool), "CUDA")
torch.library.register_fake("pwlu::pool", lambda *_: None, lib=_library)


def _pool_each(info: Any, in_dims: Sequence[int | None], pool_: Tensor, *moments_: Tensor) -> tuple[None, None]:
    """torch.vmap: one after the other. Nobody batches the pool, which is no argument of a module's."""
    for i in range(info.batch_size):
        pool(pool_, *(m if dim is None else m.select(dim, i) for m, dim in zip(moments_, in_dims[1:], strict=True)))
    return None, None


torch.library.register_vmap("pwlu::pool", _pool_each, lib=_library)
