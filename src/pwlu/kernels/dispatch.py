"""Choose the implementation of every operator: a kernel if the device has one that supports the arguments, else plain PyTorch.

The functions have the arguments and results of the operators with the same names; see ``pwlu.ops``.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pwlu import reference
from pwlu.common import checks
from pwlu.kernels import eager
from pwlu.kernels.layout import NormInput, NormState, samples_are_rows
from pwlu.reference import dynamic as dynamic_reference
from pwlu.reference import nonuniform as nonuniform_reference

# The reference implementation in plain PyTorch, for every device.


def _laid_out(x: Tensor, y: Tensor) -> Tensor:
    """Return y in the memory layout of ``torch.empty_like(x)``."""
    like = torch.empty_like(x, device="meta")
    # The copy is made of y, because under vmap, y may be a batch even if x is not.
    return y if y.stride() == like.stride() else y.new_empty_strided(like.shape, like.stride()).copy_(y)


class Kind(NamedTuple):
    """One kind of functions: the check of the arguments, the reference implementation, and the layout of the weight."""

    check: Callable[..., int]
    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor | None, Any]]
    unpack: Callable[[Tensor, int], Any]
    pack: Callable[..., Tensor]

    def check_backward(self, grad: Tensor, x: Tensor, *rest: Any) -> None:
        """Check that the arguments of ``backward`` match each other."""
        self.check(x, *rest[:3])
        checks.check_gradient(grad, x)

    def apply(self, x: Tensor, weight: Tensor, intervals: int, channel_dim: int) -> Tensor:
        """Return y, for autograd and transforms."""
        return self.forward(x, *self.unpack(weight, intervals), channel_dim)

    def plain_forward(self, x: Tensor, weight: Tensor, intervals: int, channel_dim: int) -> Tensor:
        """Return y."""
        return _laid_out(x, self.apply(x, weight, intervals, channel_dim))

    def plain_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, intervals: int, channel_dim: int, need_input: bool, need_weight: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the weight; an empty tensor for a gradient that is not needed."""
        need = {"need_input": need_input, "need_parameters": need_weight}
        grad_x, grads = self.backward(grad, x, *self.unpack(weight, intervals), channel_dim, **need)
        grad_weight = weight.new_empty(0) if grads is None else self.pack(*grads)
        return x.new_empty(0) if grad_x is None else _laid_out(x, grad_x), grad_weight


UNIFORM = Kind(checks.check_weight, reference.forward, reference.backward, reference.unpack, reference.pack)
NON_UNIFORM = Kind(
    checks.check_knot_weight,
    nonuniform_reference.forward,
    nonuniform_reference.backward,
    nonuniform_reference.unpack_knots,
    nonuniform_reference.pack_knots,
)
PER_SAMPLE = Kind(  # the weight of reference.dynamic.mix
    lambda x, weight, intervals, channel_dim: weight.shape[0] // (intervals + 5),
    *(dynamic_reference.forward, dynamic_reference.backward, reference.unpack, reference.pack),
)
plain_forward, plain_backward = UNIFORM.plain_forward, UNIFORM.plain_backward
plain_nonuniform_forward, plain_nonuniform_backward = NON_UNIFORM.plain_forward, NON_UNIFORM.plain_backward


def plain_lookup(x: Tensor, *rest: Any) -> Tensor:
    """Return y in the inference form."""
    return _laid_out(x, reference.lookup(x, *rest))


def plain_moments(x: Tensor, channel_dim: int, pool: Tensor) -> None:
    """Add the moments of x to the pool in place."""
    channels = pool.shape[1]
    count = torch.full((), x.numel() // channels, dtype=torch.int64, device=x.device)
    pool.copy_(reference.merge(pool, count, *reference.moments(x, channels, channel_dim)))


# Kernels.


@functools.cache  # so that the warning about a missing kernel appears once
def _kernel_for_device(device: torch.device) -> Any:
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
    """Return the kernels for the device of x, or None if there are none. They are imported on first use."""
    eager.load_if_ready()
    return _kernel_for_device(x.device)


def _served(
    name: str, plain: Callable[..., Any], check: Callable[..., Any], suits: Callable[..., bool] = lambda *_: True
) -> Callable[..., Any]:
    """Return a function that checks its arguments and calls the method `name` of the kernels.

    It calls `plain` if there is no such method, the arguments do not suit it, or it returns NotImplemented.
    """

    def call(*arguments: Any) -> Any:
        check(*arguments)
        method = getattr(kernel_of(arguments[0]), name, None)
        if method is not None and suits(*arguments):
            found = method(*arguments)
            if found is not NotImplemented:
                return found
        return plain(*arguments)

    return call


def check_observe(x: Tensor, weight: Tensor, intervals: int, channel_dim: int, pool: Tensor) -> None:
    """Check that the arguments of ``observe`` match each other."""
    channels = checks.check_weight(x, weight, intervals, channel_dim)
    if checks.check_pool(x, channel_dim, pool) != channels:
        raise ValueError(f"pwlu: pool must have {channels} channels, like the weight, not {pool.shape[1]}")


forward = _served("forward", plain_forward, UNIFORM.check)
backward = _served("backward", plain_backward, UNIFORM.check_backward)
nonuniform_forward = _served("nonuniform_forward", plain_nonuniform_forward, NON_UNIFORM.check)
nonuniform_backward = _served("nonuniform_backward", plain_nonuniform_backward, NON_UNIFORM.check_backward)


def per_sample_forward_folded(x: Tensor, weight: Tensor, intervals: int, channel_dim: int) -> Tensor:
    """Return y by ``forward``, with samples and channels folded into one dimension. This may copy x and y."""
    if not weight.shape[0]:  # no samples
        return PER_SAMPLE.plain_forward(x, weight, intervals, channel_dim)
    folded = dynamic_reference.fold(x, weight.shape[0] // (intervals + 5), channel_dim)
    y = _laid_out(x, dynamic_reference.unfold(forward(folded, weight, intervals, 0), x, channel_dim))
    return y.data  # not a view: autograd forbids to change the views that an operator returns


def per_sample_backward_folded(
    grad: Tensor, x: Tensor, weight: Tensor, intervals: int, channel_dim: int, need_input: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight by ``backward``. This may copy both gradients and x."""
    if not weight.shape[0]:
        return PER_SAMPLE.plain_backward(grad, x, weight, intervals, channel_dim, need_input, need_weight)
    folded = (dynamic_reference.fold(t, weight.shape[0] // (intervals + 5), channel_dim) for t in (grad, x))
    grad_x, grad_weight = backward(*folded, weight, intervals, 0, need_input, need_weight)
    return _laid_out(x, dynamic_reference.unfold(grad_x, x, channel_dim)) if need_input else grad_x, grad_weight


def _folding_copies(x: Tensor, weight: Tensor, intervals: int, channel_dim: int, *_: Any) -> bool:
    return samples_are_rows(x, weight.shape[0] // (intervals + 5), channel_dim)


per_sample_forward = _served("per_sample_forward", per_sample_forward_folded, PER_SAMPLE.check, _folding_copies)
per_sample_backward = _served(
    "per_sample_backward", per_sample_backward_folded, PER_SAMPLE.check_backward, lambda grad, *rest: _folding_copies(*rest)
)


def dynamic_forward_apart(x: Tensor, *rest: Any, evaluate: Callable[..., Tensor] = per_sample_forward) -> tuple[Tensor, Tensor]:
    """Return y and the state of a dynamic PWLU: plain PyTorch mixes the directions, `evaluate` evaluates the functions."""
    y, found = dynamic_reference.apply(evaluate, x, *rest)
    return y, torch.cat([t.flatten() for t in found])


def dynamic_backward_apart(grad: Tensor, x: Tensor, weight: Tensor, directions: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return the gradients of x and of the parameters of a dynamic PWLU."""
    *network, state, intervals, channel_dim = rest
    samples, sizes = x.shape[0], [network[0].shape[1], network[2].shape[1], network[2].shape[0]]  # F, H and M R
    parts = state.split([samples * size for size in sizes])
    found = [part.view(samples, size) for part, size in zip(parts, sizes, strict=True)]
    arguments = (per_sample_backward, grad, x, weight, directions, network, found, intervals, channel_dim)
    grad_x, *others = dynamic_reference.without_autocast(x, dynamic_reference.gradients, *arguments)
    return _laid_out(x, grad_x), *others


dynamic_forward = _served("dynamic_forward", dynamic_forward_apart, checks.check_dynamic)
dynamic_backward = _served("dynamic_backward", dynamic_backward_apart, checks.check_dynamic_backward)
lookup = _served("lookup", plain_lookup, checks.check_tables)
moments = _served("moments", plain_moments, checks.check_pool)


def _observe_in_two_passes(x: Tensor, weight: Tensor, intervals: int, channel_dim: int, pool: Tensor) -> Tensor:
    """Call ``moments`` and ``forward``: a kernel that does not support ``observe`` may support one of them."""
    moments(x, channel_dim, pool)
    return forward(x, weight, intervals, channel_dim)


observe = _served("observe", _observe_in_two_passes, check_observe)


# A batch norm followed by a PWLU. If no kernel does both, PyTorch normalizes, and the kernels of the PWLU do the rest.


def follow_batch(state: NormState, count: int, mean: Tensor, m2: Tensor) -> Tensor:
    """Return the norm of a batch with these moments. Update the running statistics, the number of batches and the pool."""
    for running, new in ((state.running_mean, mean), (state.running_var, m2 / max(count - 1, 1))):
        if running is not None:
            running.copy_((1 - state.factor) * running.to(new.dtype) + state.factor * new)
    if state.batches is not None:
        state.batches.add_(1)
    norm = reference.normalization(mean, m2 / count, state.gamma, state.beta, state.eps)
    if state.pool is not None:  # apart from eps, z has mean beta and standard deviation gamma
        _, _, scale, shift = norm
        added = state.pool.new_full((), count)  # not torch.tensor(count): a CUDA graph cannot copy from the CPU
        state.pool.copy_(reference.merge(state.pool, added, shift, m2 * scale.square()))
    return norm


def plain_normalization(x: Tensor, *rest: Any) -> Tensor:
    """Return the norm: in training that of the batch (see :func:`follow_batch`), else that of the running statistics."""
    state, dtype = NormState(*rest), reference.compute_dtype(x)
    if not state.training:
        assert state.running_mean is not None and state.running_var is not None  # noqa: PT018  # checked
        mean, variance = state.running_mean.to(dtype), state.running_var.to(dtype)
        return reference.normalization(mean, variance, state.gamma, state.beta, state.eps)
    own = torch.zeros(3, x.shape[1], dtype=dtype, device=x.device)
    moments(x, 1, own)
    return follow_batch(state, x.numel() // x.shape[1], own[1], own[2])


def norm_forward_apart(
    x: Tensor, residual: Tensor | None, norm: Tensor, weight: Tensor, intervals: int, pool: Tensor | None
) -> Tensor:
    """Return y of the normalized x, in two steps. If there is a pool, add the moments of z to it in place."""
    z = reference.normalize(x, residual, norm)
    y = forward(z, weight, intervals, 1) if pool is None else observe(z, weight, intervals, 1, pool)
    return _laid_out(x, y.to(x.dtype))


def norm_backward_apart(
    grad: Tensor, x: Tensor, residual: Tensor | None, norm: Tensor, weight: Tensor, intervals: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of z (empty without a residual), the sums of the norm, and the gradient of the weight."""
    z = reference.normalize(x, residual, norm)
    grad_z, grad_weight = backward(grad.to(z.dtype), z, weight, intervals, 1, True, True)
    sums = reference.norm_sums(grad_z, x, norm)
    return x.new_empty(0) if residual is None else _laid_out(x, grad_z.to(x.dtype)), sums, grad_weight


def norm_input_apart(*arguments: Any) -> Tensor:
    """Return the gradient of x, the input of the norm; see :class:`NormInput`."""
    grad, x, norm, weight, intervals, sums, count, grad_is_of_z = NormInput(*arguments)
    if not grad_is_of_z:
        z = reference.normalize(x, None, norm)
        grad, _ = backward(grad.to(z.dtype), z, weight, intervals, 1, True, False)
    return _laid_out(x, reference.norm_input(grad, x, norm, sums, count))


_normalization = _served("normalization", plain_normalization, checks.check_norm_input)


def normalization(x: Tensor, *rest: Any) -> Tensor:
    """Return the norm, for parameters and statistics of any dtype.

    Kernels need them in the compute dtype. So convert others before the call, and copy the updated ones back.
    """
    state, dtype = NormState(*rest), reference.compute_dtype(x)
    vectors = {name: t for name, t in state._asdict().items() if isinstance(t, Tensor) and name != "batches"}
    converted = {name: t.to(dtype) for name, t in vectors.items()}
    norm: Tensor = _normalization(x, *(converted.get(name, value) for name, value in state._asdict().items()))
    for name in ("running_mean", "running_var", "pool"):
        if state.training and name in vectors and converted[name] is not vectors[name]:
            vectors[name].copy_(converted[name])
    return norm


norm_forward = _served("norm_forward", norm_forward_apart, checks.check_norm)
norm_backward = _served("norm_backward", norm_backward_apart, lambda grad, *rest: checks.check_norm(*rest))
norm_input = _served("norm_input", norm_input_apart, lambda grad, x, *rest: checks.check_norm(x, None, *rest))


def warm_up(
    device: torch.device | str = "cuda", dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)
) -> int:
    """Compile and load all kernels for a device, instead of when they are first used.

    Call this function before you capture a CUDA graph, because kernels cannot be loaded during the capture, and before you
    measure times. On the first call on a machine, compiling takes about ten seconds per dtype on one core. Later calls load the
    kernels from the cache.

    Args:
        device: the device. Default: "cuda", the current CUDA device.
        dtypes: the dtypes of the inputs. Default: float32, bfloat16 and float16.

    Returns:
        The number of kernels. 0 means that pwlu uses plain PyTorch on this device; ``pwlu info`` shows why.

    Raises:
        TypeError: if there are no CUDA kernels for a dtype.

    Example::

        pwlu.warm_up("cpu")  # 1 if the CPU kernel is available
    """
    device = torch.device(device)
    if device.type == "cuda":
        from pwlu.kernels import cuda

        return cuda.warm_up(torch.cuda.current_device() if device.index is None else device.index, tuple(dtypes))
    return int(device.type == "cpu" and kernel_of(torch.empty(0, device=device)) is not None)
