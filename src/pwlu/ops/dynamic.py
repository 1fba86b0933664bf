"""Define the operators of dynamic PWLUs, whose heights depend on the sample.

    dynamic_forward(x, parameters..., intervals, channel_dim) -> y, state
    dynamic_backward(grad, x, parameters..., state, intervals, channel_dim) -> gradients of x and of the parameters

The parameters are flat tensors: weight, directions, first, first_bias, second and second_bias; see ``reference.dynamic``. The
samples are in dimension 0 of x. ``state`` holds what the backward pass needs besides: the means, the hidden layer and the
coefficients of all samples, concatenated in the compute dtype. ``dynamic_forward`` has a derivative for y only.
"""

from typing import Any

import torch
from torch import Tensor

from pwlu import ops, reference
from pwlu.common import checks
from pwlu.kernels import dispatch
from pwlu.reference import dynamic as dynamic_reference

_PARAMETERS = "Tensor weight, Tensor directions, Tensor first, Tensor first_bias, Tensor second, Tensor second_bias"
_FORWARD = f"(Tensor x, {_PARAMETERS}, int intervals, int channel_dim) -> (Tensor, Tensor)"
_BACKWARD = (
    f"(Tensor grad, Tensor x, {_PARAMETERS}, Tensor state, int intervals, int channel_dim) -> ({', '.join(['Tensor'] * 7)})"
)


def _fake_forward(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    checks.check_dynamic(x, *rest)
    _, _, first, _, second, *_ = rest
    size = x.shape[0] * (first.shape[1] + second.shape[1] + second.shape[0])
    return torch.empty_like(x), x.new_empty(size, dtype=reference.compute_dtype(x))


def _fake_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    checks.check_dynamic_backward(grad, x, *rest)
    return torch.empty_like(x), *(p.new_empty(p.shape) for p in rest[:6])


class _Dynamic(torch.autograd.Function):
    """Differentiate dynamic_forward."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.intervals, ctx.channel_dim = arguments
        y, state = ops.below_autograd(forward, *arguments)
        ctx.save_for_backward(*tensors, state)
        ctx.mark_non_differentiable(state)
        ctx.set_materialize_grads(False)
        return y, state

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:  # no gradient reaches y; DistributedDataParallel waits for those of the parameters
            return None, *map(torch.zeros_like, ctx.saved_tensors[1:-1]), None, None
        arguments = (grad, *ctx.saved_tensors, ctx.intervals, ctx.channel_dim)
        # Gradients are enabled in a backward pass only if create_graph=True.
        differentiable = torch.is_grad_enabled() or torch.autograd.forward_ad._current_level >= 0
        found = backward(*arguments) if differentiable else ops.below_autograd(backward, *arguments)
        return *found, None, None


def _plain_forward(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return dispatch.dynamic_forward_apart(x, *rest, evaluate=dispatch.PER_SAMPLE.plain_forward)


def _plain_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Compute the state again, so that the result can be differentiated."""
    weight, directions, *network, _, intervals, channel_dim = rest
    found = dynamic_reference.layers(x, *network, channel_dim)
    plain = dispatch.PER_SAMPLE.plain_backward
    return dynamic_reference.gradients(plain, grad, x, weight, directions, network, found, intervals, channel_dim)


def _differentiate_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    if ops.transform_is_active():
        return _plain_forward(*arguments)
    if ops.wanted(*arguments[:-2]):
        found: tuple[Tensor, Tensor] = _Dynamic.apply(*arguments)
        return found
    return ops.below_autograd(forward, *arguments)


def _differentiate_backward(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Use the reference implementation, which is differentiable, for second derivatives."""
    if ops.transform_is_active() or ops.wanted(grad, *rest[:-3]):
        found: tuple[Tensor, ...] = dynamic_reference.without_autocast(grad, _plain_backward, grad, *rest)
        return found
    return ops.below_autograd(backward, grad, *rest)


forward = ops.define(
    "dynamic_forward", _FORWARD, dispatch.dynamic_forward, _fake_forward, _differentiate_forward, _plain_forward
)
backward = ops.define(
    "dynamic_backward", _BACKWARD, dispatch.dynamic_backward, _fake_backward, _differentiate_backward, _plain_backward
)
