"""Define the operators of non-uniform PWLUs.

    nonuniform_forward(x, weight, intervals, channel_dim) -> y
    nonuniform_backward(grad, x, weight, intervals, channel_dim, need_input, need_weight) -> gradients of x and of weight

``weight`` is a knot weight, as ``reference.nonuniform.pack_knots`` returns it. The other arguments are those of ``pwlu.ops``.
"""

from typing import Any

import torch
from torch import Tensor

from pwlu.common import checks
from pwlu.kernels import dispatch
from pwlu.ops import below_autograd, define, register, transform_is_active, wanted
from pwlu.reference import nonuniform as nonuniform_reference

_FORWARD = "(Tensor x, Tensor weight, int intervals, int channel_dim) -> Tensor"
_BACKWARD = (
    "(Tensor grad, Tensor x, Tensor weight, int intervals, int channel_dim, bool need_input, bool need_weight)"
    " -> (Tensor, Tensor)"
)
forward = define("nonuniform_forward", _FORWARD)
backward = define("nonuniform_backward", _BACKWARD)


def _fake_forward(x: Tensor, *rest: Any) -> Tensor:
    checks.check_knot_weight(x, *rest)
    return torch.empty_like(x)


def _fake_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dispatch.check_nonuniform_backward(grad, x, weight, *rest)
    *_, need_input, need_weight = rest
    return torch.empty_like(x) if need_input else x.new_empty(0), weight.new_empty(weight.shape if need_weight else 0)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, intervals: int, channel_dim: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.intervals, ctx.channel_dim = intervals, channel_dim
        return below_autograd(forward, x, weight, intervals, channel_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        need_input, need_weight = ctx.needs_input_grad[:2]
        grad_x, grad_weight = backward(grad, x, weight, ctx.intervals, ctx.channel_dim, need_input, need_weight)
        return grad_x if need_input else None, grad_weight if need_weight else None, None, None


def _autograd_forward(x: Tensor, weight: Tensor, intervals: int, channel_dim: int) -> Tensor:
    if transform_is_active():
        return nonuniform_reference.forward(x, *nonuniform_reference.unpack_knots(weight, intervals), channel_dim)
    if wanted(x, weight):
        return _Differentiable.apply(x, weight, intervals, channel_dim)
    return below_autograd(forward, x, weight, intervals, channel_dim)


def _autograd_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Run the reference implementation, which is differentiable, if a second derivative is needed. Else run the kernel."""
    if transform_is_active() or wanted(grad, x, weight):
        return dispatch.plain_nonuniform_backward(grad, x, weight, *rest)
    return below_autograd(backward, grad, x, weight, *rest)


register(
    "nonuniform_forward",
    _FORWARD,
    dispatch.nonuniform_forward,
    _fake_forward,
    _autograd_forward,
    dispatch.plain_nonuniform_forward,
)
register(
    "nonuniform_backward",
    _BACKWARD,
    dispatch.nonuniform_backward,
    _fake_backward,
    _autograd_backward,
    dispatch.plain_nonuniform_backward,
)
