"""Define the operators for a batch norm followed by a PWLU.

They compute y = PWLU(z) with z = gamma (x - m)/sqrt(v + eps) + beta (+ residual)::

    normalization(x, state...) -> norm                              update the state; one pass over x
    norm_of(x, gamma, beta, mean, variance, eps) -> norm            no update; no pass over x if mean and variance are given
    norm_forward(x, residual, norm, weight, intervals) -> y         one pass
    norm_observe(x, residual, norm, weight, intervals, pool) -> y   the same, and add the moments of z to the pool
    norm_backward(grad, x, residual, norm, weight, intervals) -> gradient of z, sums of the norm, gradient of the weight
    norm_input(grad, x, norm, weight, intervals, sums, count, grad_is_of_z) -> gradient of x
    norm_act(x, residual, weight, intervals, state...) -> y, norm   the norm and y, with a derivative

``reference`` defines what they compute, and what a norm is: four vectors (4, C). ``NormState`` lists the state: parameters,
running statistics and so on. In training, the batch updates it. The channels are dimension 1 of ``x``, and ``weight`` has the
same number of channels. ``norm_act`` saves x, the residual and the norm for the backward pass. It never stores z or the output
of the norm.

Inductor cannot compile an operator that changes its arguments if all of those are None. So there are two operators each:
``normalization`` and ``norm_observe`` change arguments, ``norm_of`` and ``norm_forward`` do not.

A pool collects the moments of z in Phase I. In training and without a residual, they follow from gamma, beta and v, so no pass
over z is needed.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pwlu import ops, reference
from pwlu.common import checks
from pwlu.kernels import dispatch
from pwlu.kernels.layout import NormState

_STATE = (  # the fields of NormState
    "Tensor? gamma, Tensor? beta, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? batches, "
    "float factor, float eps, bool training, Tensor(d!)? pool"
)
_SCHEMAS = {
    "normalization": f"(Tensor x, {_STATE}) -> Tensor",
    "norm_of": "(Tensor x, Tensor? gamma, Tensor? beta, Tensor? mean, Tensor? variance, float eps) -> Tensor",
    "norm_forward": "(Tensor x, Tensor? residual, Tensor norm, Tensor weight, int intervals) -> Tensor",
    "norm_observe": "(Tensor x, Tensor? residual, Tensor norm, Tensor weight, int intervals, Tensor(a!) pool) -> Tensor",
    "norm_backward": "(Tensor grad, Tensor x, Tensor? residual, Tensor norm, Tensor weight, int intervals)"
    " -> (Tensor, Tensor, Tensor)",
    "norm_input": "(Tensor grad, Tensor x, Tensor norm, Tensor weight, int intervals, Tensor? sums, float count, "
    "bool grad_is_of_z) -> Tensor",
    "norm_act": f"(Tensor x, Tensor? residual, Tensor weight, int intervals, {_STATE}) -> (Tensor, Tensor)",
}

# Checks and output shapes, for fake tensors.


def _fake_normalization(x: Tensor, *rest: Any) -> Tensor:
    checks.check_norm_input(x, *rest)
    return x.new_empty(4, x.shape[1], dtype=reference.compute_dtype(x))


def _fake_norm_of(x: Tensor, gamma: Tensor | None, beta: Tensor | None, *statistics: Any) -> Tensor:
    return _fake_normalization(x, *_constant(gamma, beta, *statistics))


def _fake_backward(grad: Tensor, x: Tensor, residual: Tensor | None, norm: Tensor, weight: Tensor, *rest: Any) -> Any:
    checks.check_norm(x, residual, norm, weight, *rest)
    grad_z = x.new_empty(0) if residual is None else torch.empty_like(x)
    return grad_z, norm.new_empty(3, norm.shape[1]), torch.empty_like(weight)


def _fake_input(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _fake_act(x: Tensor, residual: Tensor | None, weight: Tensor, intervals: int, *state: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _fake_normalization(x, *state)


# Implementations.


def _constant(gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None, variance: Tensor | None, eps: float) -> NormState:
    """Return the state of a norm that has nothing to update."""
    return NormState(gamma, beta, mean, variance, None, 0.0, eps, mean is None, None)


def _norm_of(x: Tensor, *rest: Any) -> Tensor:
    return dispatch.normalization(x, *_constant(*rest))


def _normalization_once(x: Tensor, *rest: Any) -> Tensor:
    """Add each input to the pool once: not again when gradient checkpointing reruns the forward pass."""
    *state, pool = rest
    return dispatch.normalization(x, *state, None if ops.is_rerun() else pool)


def _forward(x: Tensor, *rest: Any) -> Tensor:
    return dispatch.norm_forward(x, *rest, None)


def _observe_once(x: Tensor, *rest: Any) -> Tensor:
    *arguments, pool = rest
    return dispatch.norm_forward(x, *arguments, None if ops.is_rerun() else pool)


def _act(x: Tensor, residual: Tensor | None, weight: Tensor, intervals: int, *rest: Any) -> tuple[Tensor, Tensor]:
    state = NormState(*rest)
    from_norm = state.training and residual is None  # whether the moments of z follow from the norm
    pool = state.pool if from_norm else None
    if state.training and any(t is not None for t in (state.running_mean, state.running_var, state.batches, pool)):
        norm = normalization(x, *state._replace(pool=pool))
    else:
        statistics = (None, None) if state.training else (state.running_mean, state.running_var)
        norm = norm_of(x, state.gamma, state.beta, *statistics, state.eps)
    return _apply(x, residual, norm, weight, intervals, None if from_norm else state.pool), norm


def _apply(x: Tensor, residual: Tensor | None, norm: Tensor, weight: Tensor, intervals: int, pool: Tensor | None) -> Tensor:
    if pool is None:
        return norm_forward(x, residual, norm, weight, intervals)
    return norm_observe(x, residual, norm, weight, intervals, pool)


# Derivatives.


class _NormAct(torch.autograd.Function):
    """Differentiate norm_act. With a process group, the statistics and sums of the norm cover all processes of the group."""

    @staticmethod
    def forward(
        ctx: Any,
        group: "dist.ProcessGroup | None",
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        intervals: int,
        *rest: Any,
    ) -> tuple[Tensor, Tensor]:
        state = NormState(*rest)
        with torch._C._AutoDispatchBelowAutograd():
            if group is None:
                y, norm = _act(x, residual, weight, intervals, *state)
                count = x.numel() // x.shape[1]
            else:
                norm, count = _over_processes(group, x, state)
                y = _apply(x, residual, norm, weight, intervals, state.pool)
        ctx.save_for_backward(x, residual, weight, state.gamma, state.beta, norm)
        ctx.mark_non_differentiable(norm)
        ctx.set_materialize_grads(False)
        ctx.intervals, ctx.eps, ctx.training, ctx.in_phase_one = intervals, state.eps, state.training, state.pool is not None
        ctx.group, ctx.count = group, float(count)
        return y, norm

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        weight = ctx.saved_tensors[2]
        found: list[Tensor | None] = [None] * 5
        if grad is not None:
            found = _differentiable_backward(ctx, grad) if torch.is_grad_enabled() else _backward(ctx, grad)
        if ctx.in_phase_one and ctx.needs_input_grad[3]:
            found[2] = torch.zeros_like(weight)  # not None: DistributedDataParallel waits for a gradient
        x, residual, weight, gamma, beta = found
        return (None, x, residual, weight, None, gamma, beta, *[None] * (len(ctx.needs_input_grad) - 7))


def _backward(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    x, residual, weight, gamma, beta, norm = ctx.saved_tensors
    with torch._C._AutoDispatchBelowAutograd():
        grad_z, sums, grad_weight = norm_backward(grad, x, residual, norm, weight, ctx.intervals)
        all_sums = sums
        if ctx.group is not None:
            all_sums = sums.clone()
            dist.all_reduce(all_sums, group=ctx.group)
        grad_x = None
        if ctx.needs_input_grad[1]:
            arguments = (all_sums if ctx.training else None, ctx.count, residual is not None)
            grad_x = norm_input(grad if residual is None else grad_z, x, norm, weight, ctx.intervals, *arguments)
    return [
        grad_x,
        grad_z if residual is not None else None,
        grad_weight,
        None if gamma is None else sums[2].to(gamma.dtype),
        None if beta is None else sums[0].to(beta.dtype),
    ]


def _differentiable_backward(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    if ctx.group is not None:
        raise RuntimeError(
            "pwlu: a fused SyncBatchNorm has no second derivative in training with several processes. Undo the fusion: "
            "pwlu.unfuse_norms_(model)"
        )
    x, residual, weight, gamma, beta, norm = ctx.saved_tensors
    settings = (ctx.intervals, ctx.eps, ctx.training)
    found = differentiable_backward(grad, x, residual, weight, gamma, beta, norm, *settings)
    needed = [ctx.needs_input_grad[i] for i in (1, 2, 3, 5, 6)]
    return [g if each else None for g, each in zip(found, needed, strict=True)]


def differentiable_backward(
    grad: Tensor,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    norm: Tensor,
    intervals: int,
    eps: float,
    training: bool,
) -> list[Tensor]:
    """Return the gradients of x, residual, weight, gamma and beta in plain PyTorch, so that they can be differentiated again.

    A gradient that is not needed is an empty tensor.
    """
    mean, variance = (None, None) if training else (norm[0], norm[1].square().reciprocal() - eps)
    with torch.enable_grad():
        # Use views of the tensors, to get partial derivatives even if x depends on the residual.
        tensors = [None if t is None else t.view_as(t) for t in (x, residual, weight, gamma, beta)]
        x_view, residual_view, weight_view, gamma_view, beta_view = tensors
        assert x_view is not None and weight_view is not None  # noqa: PT018
        blocks = reference.unpack(weight_view, intervals)
        y = reference.norm_act(x_view, residual_view, gamma_view, beta_view, mean, variance, eps, *blocks)
        inputs = [t for t in tensors if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(y, inputs, grad, create_graph=True))
    return [next(found) if t is not None and t.requires_grad else x.new_empty(0) for t in tensors]


def _over_processes(group: "dist.ProcessGroup", x: Tensor, state: NormState) -> tuple[Tensor, int]:
    """Return the norm and the number of elements per channel over all processes, and update the running statistics."""
    own = torch.zeros(3, x.shape[1], dtype=reference.compute_dtype(x), device=x.device)
    ops.moments(x, 1, own)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    counts, means, squares = torch.stack(every).to(torch.float64).unbind(1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    m2 = (squares + counts * (means - mean).square()).sum(0)
    total = int(count[0])
    norm = dispatch.follow_batch(state._replace(pool=None), total, mean, m2)  # each process adds its own z to its pool
    return norm.to(own.dtype), total


def _autograd_act(x: Tensor, residual: Tensor | None, weight: Tensor, intervals: int, *rest: Any) -> tuple[Tensor, Tensor]:
    state = NormState(*rest)
    if ops.wanted(x, residual, weight, state.gamma, state.beta):
        return _NormAct.apply(None, x, residual, weight, intervals, *state)
    return ops.below_autograd(norm_act, x, residual, weight, intervals, *state)


def norm_act_of_processes(group: "dist.ProcessGroup", *arguments: Any) -> tuple[Tensor, Tensor]:
    """Call norm_act with the statistics of all processes of a group."""
    return _NormAct.apply(group, *arguments)


def _define_part(name: str, serve: Any, fake: Any) -> Any:
    """Define an operator without a derivative, and return it."""

    def differentiate(*arguments: Any) -> Any:
        if ops.wanted(*(a for a in arguments if isinstance(a, Tensor))):
            raise RuntimeError(f"pwlu::{name} has no derivative. Call pwlu::norm_act instead, which can be differentiated")
        return ops.below_autograd(operator, *arguments)

    operator = ops.define(name, _SCHEMAS[name], serve, fake, differentiate)
    return operator


normalization = _define_part("normalization", _normalization_once, _fake_normalization)
norm_of = _define_part("norm_of", _norm_of, _fake_norm_of)
norm_forward = _define_part("norm_forward", _forward, ops.fake_map(checks.check_norm))
norm_observe = _define_part("norm_observe", _observe_once, ops.fake_map(checks.check_norm))
norm_backward = _define_part("norm_backward", dispatch.norm_backward, _fake_backward)
norm_input = _define_part("norm_input", dispatch.norm_input, _fake_input)
norm_act = ops.define("norm_act", _SCHEMAS["norm_act"], _act, _fake_act, _autograd_act)
ops.define_for_eager(
    "differentiable_norm_backward",
    "(Tensor grad, Tensor x, Tensor? residual, Tensor weight, Tensor? gamma, Tensor? beta, Tensor norm, int intervals, "
    "float eps, bool training) -> Tensor[]",
    differentiable_backward,
)
