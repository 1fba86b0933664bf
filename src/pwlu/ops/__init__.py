"""Define the operators ``torch.ops.pwlu.*``: schemas, output shapes and derivatives.

    forward(x, weight, intervals, channel_dim) -> y
    backward(grad, x, weight, intervals, channel_dim, need_input, need_weight) -> gradients of x and of weight
    lookup(x, left, inv_step, slopes, offsets, channel_dim) -> y               the inference form
    observe(x, weight, intervals, channel_dim, pool) -> y                      forward and moments in one pass over x
    moments(x, channel_dim, pool)

``weight`` has the layout of ``reference.pack``. ``pool`` (3, C) holds count, mean and M2 (the sum of squared deviations) per
channel; ``moments`` and ``observe`` add those of x in place. ``observe`` is the forward pass of Phase I, when units do not
learn: the gradient of its weight is zero. Outputs have the memory layout of ``torch.empty_like(x)``. ``backward`` returns an
empty tensor for a gradient that is not needed.

Each operator calls ``kernels.dispatch``, which calls a kernel. If ``eager.cpp`` is compiled, its functions for CPU and CUDA
replace those registered here. They fall back to the Python implementation for everything that they do not handle.

The derivatives are registered under the Autograd key directly. With ``torch.library.register_autograd`` a call on a small
tensor takes 1.5 times as long (benchmarks/overhead.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pwlu.common import checks
from pwlu.kernels import dispatch

_SCHEMAS = {
    "forward": "(Tensor x, Tensor weight, int intervals, int channel_dim) -> Tensor",
    "backward": "(Tensor grad, Tensor x, Tensor weight, int intervals, int channel_dim, bool need_input, bool need_weight)"
    " -> (Tensor, Tensor)",
    "lookup": "(Tensor x, Tensor left, Tensor inv_step, Tensor slopes, Tensor offsets, int channel_dim) -> Tensor",
    "observe": "(Tensor x, Tensor weight, int intervals, int channel_dim, Tensor(a!) pool) -> Tensor",
    "moments": "(Tensor x, int channel_dim, Tensor(a!) pool) -> ()",
}

# Derivatives.


def transform_is_active() -> bool:
    """Return whether forward-mode AD or a torch.func transform is active: only the reference implementation supports them."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def is_exporting() -> bool:
    """Return whether torch.export or torch.jit.trace traces this call: the result has to run without the operators of pwlu."""
    # Read the flag, because in torch 2.11 torch.compiler.is_exporting() is also true under torch.compile.
    return torch.compiler._is_exporting_flag or torch.jit.is_tracing()


def wanted(*tensors: Tensor | None) -> bool:
    """Return whether autograd has to record a call with these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def below_autograd(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Call an operator without recording it for autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


class _Differentiable(torch.autograd.Function):
    """Run an operator, ``forward`` of a kind or ``observe``, and differentiate it by `backward`. Save only x and the weight."""

    @staticmethod
    def forward(
        ctx: Any, operator: Any, backward: Any, x: Tensor, weight: Tensor, intervals: int, channel_dim: int, *pool: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.intervals, ctx.channel_dim, ctx.observed = backward, intervals, channel_dim, bool(pool)
        return below_autograd(operator, x, weight, intervals, channel_dim, *pool)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_input, need_weight = ctx.needs_input_grad[2:4]
        learns = need_weight and not ctx.observed and grad is not None
        grad_x = grad_weight = None
        if grad is not None:  # None: no gradient reaches the output
            arguments = (grad, x, weight, ctx.intervals, ctx.channel_dim, need_input, learns)
            # Gradients are enabled in a backward pass only if create_graph=True.
            differentiable = torch.is_grad_enabled() or torch.autograd.forward_ad._current_level >= 0
            grad_x, grad_weight = ctx.gradients(*arguments) if differentiable else below_autograd(ctx.gradients, *arguments)
        if need_weight and not learns:
            grad_weight = torch.zeros_like(weight)  # not None: DistributedDataParallel waits for this gradient
        return (None, None, grad_x, grad_weight, None, None, *[None] * ctx.observed)


class _Lookup(torch.autograd.Function):
    """The inference form. Its backward raises an error, because training would silently leave the tables unchanged."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        return below_autograd(lookup, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError(
            "a fused PWLU has no derivative: pwlu.fuse_ is for inference only. Train the unfused model "
            "and fuse a copy of it: fused = copy.deepcopy(model); pwlu.fuse_(fused)."
        )


def _autograd_lookup(*arguments: Any) -> Tensor:
    differentiated = wanted(*arguments[:-1])
    if torch.autograd.forward_ad._current_level >= 0 or (differentiated and transform_is_active()):
        _Lookup.backward(None, arguments[0])
    return _Lookup.apply(*arguments) if differentiated else below_autograd(lookup, *arguments)


def _autograd_observe(x: Tensor, weight: Tensor, intervals: int, channel_dim: int, pool: Tensor) -> Tensor:
    if transform_is_active():
        moments(x.detach(), channel_dim, pool)
        return dispatch.UNIFORM.apply(x, weight.detach(), intervals, channel_dim)
    if wanted(x, weight):
        return _Differentiable.apply(observe, backward, x, weight, intervals, channel_dim, pool)
    return below_autograd(observe, x, weight, intervals, channel_dim, pool)


def _autograd_moments(x: Tensor, channel_dim: int, pool: Tensor) -> None:
    """Add the moments without a derivative: statistics are constants for autograd."""
    below_autograd(moments, x.detach(), channel_dim, pool)


# Gradient checkpointing reruns the forward pass inside the backward pass. Its input must not be counted a second time. The
# check runs inside the operator, so that it also works in compiled code.


def is_rerun() -> bool:
    """Return whether this call is a recomputation by gradient checkpointing, that is, inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _observe_once(x: Tensor, weight: Tensor, intervals: int, channel_dim: int, pool: Tensor) -> Tensor:
    if is_rerun():
        dispatch.check_observe(x, weight, intervals, channel_dim, pool)
        return dispatch.forward(x, weight, intervals, channel_dim)
    return dispatch.observe(x, weight, intervals, channel_dim, pool)


def _moments_once(x: Tensor, channel_dim: int, pool: Tensor) -> None:
    if not is_rerun():
        dispatch.moments(x, channel_dim, pool)


def _observe_batched(x: Tensor, weight: Tensor, intervals: int, channel_dim: int, pool: Tensor) -> Tensor:
    moments(x, channel_dim, pool)
    return dispatch.plain_forward(x, weight, intervals, channel_dim)


def _moments_batched(info: Any, in_dims: Sequence[int | None], x: Tensor, channel_dim: int, pool: Tensor) -> tuple[None, None]:
    """Implement torch.vmap: count the batch of inputs as one input, unless each has its own pool."""
    x_dim, _, pool_dim = in_dims
    if pool_dim is not None:
        for i in range(info.batch_size):
            moments(x if x_dim is None else x.select(x_dim, i), channel_dim, pool.select(pool_dim, i))
    else:
        moments(x if x_dim is None else x.movedim(x_dim, 0), channel_dim + (channel_dim >= 0 and x_dim is not None), pool)
    return None, None


_library = torch.library.Library("pwlu", "DEF")
_python = torch.library.Library("pwlu_python", "DEF")  # what eager.cpp falls back to


def define(name: str, schema: str, serve: Callable[..., Any], fake: Any, differentiate: Any, batch: Any = None) -> Any:
    """Define an operator, make its implementations callable from eager.cpp, and return it.

    `serve` is the implementation below autograd, `fake` for fake tensors, `differentiate` under the Autograd key. `batch` is
    the batching rule for torch.vmap: the reference implementation, because torch can batch the operators it consists of.
    """
    serve = torch._disable_dynamo(serve)
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, serve, "CompositeExplicitAutograd")
    _library.impl(name, differentiate, "Autograd")
    torch.library.register_fake(f"pwlu::{name}", fake, lib=_library)
    if batch:
        _library.impl(name, batch, "FuncTorchBatchedDecomposition")
    define_for_eager(f"serve_{name}", schema, serve, "CompositeExplicitAutograd")
    define_for_eager(f"differentiate_{name}", schema, differentiate)
    return getattr(torch.ops.pwlu, name).default


def define_for_eager(name: str, schema: str, function: Callable[..., Any], key: str = "CompositeImplicitAutograd") -> None:
    """Define a Python function in the library ``pwlu_python``, which eager.cpp calls."""
    _python.define(name + schema)
    _python.impl(name, function, key)


def fake_map(check: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return an implementation for fake tensors: it checks its arguments and returns an empty y."""

    def fake(x: Tensor, *rest: Any) -> Tensor:
        check(x, *rest)
        return torch.empty_like(x)

    return fake


def _fake_moments(x: Tensor, channel_dim: int, pool: Tensor) -> None:
    checks.check_pool(x, channel_dim, pool)


def define_kind(prefix: str, kind: dispatch.Kind, serve_forward: Any, serve_backward: Any) -> tuple[Any, Any]:
    """Define the operators ``{prefix}forward`` and ``{prefix}backward`` of a kind of functions, and return them."""

    def fake_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        kind.check_backward(grad, x, weight, *rest)
        *_, need_input, need_weight = rest
        return torch.empty_like(x) if need_input else x.new_empty(0), weight.new_empty(weight.shape if need_weight else 0)

    def differentiate_forward(x: Tensor, weight: Tensor, intervals: int, channel_dim: int) -> Tensor:
        if transform_is_active():
            return kind.apply(x, weight, intervals, channel_dim)
        if wanted(x, weight):
            return _Differentiable.apply(forward, backward, x, weight, intervals, channel_dim)
        return below_autograd(forward, x, weight, intervals, channel_dim)

    def differentiate_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """Use the reference implementation, which is differentiable, for second derivatives."""
        if transform_is_active() or wanted(grad, x, weight):
            return kind.plain_backward(grad, x, weight, *rest)
        return below_autograd(backward, grad, x, weight, *rest)

    of_forward = (serve_forward, fake_map(kind.check), differentiate_forward, kind.plain_forward)
    of_backward = (serve_backward, fake_backward, differentiate_backward, kind.plain_backward)
    forward = define(prefix + "forward", _SCHEMAS["forward"], *of_forward)
    backward = define(prefix + "backward", _SCHEMAS["backward"], *of_backward)
    return forward, backward


forward, backward = define_kind("", dispatch.UNIFORM, dispatch.forward, dispatch.backward)
_of_lookup = (dispatch.lookup, fake_map(checks.check_tables), _autograd_lookup, dispatch.plain_lookup)
_of_observe = (_observe_once, fake_map(dispatch.check_observe), _autograd_observe, _observe_batched)
lookup = define("lookup", _SCHEMAS["lookup"], *_of_lookup)
observe = define("observe", _SCHEMAS["observe"], *_of_observe)
moments = define("moments", _SCHEMAS["moments"], _moments_once, _fake_moments, _autograd_moments)
torch.library.register_vmap("pwlu::moments", _moments_batched, lib=_library)
