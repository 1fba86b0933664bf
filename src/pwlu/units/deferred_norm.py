"""Defer a batch norm until the PWLU after it runs, so that both take one pass over memory.

A norm that :func:`pwlu.fuse_norms_` has fused returns a :class:`Deferred` instead of a tensor. Adding a tensor to a Deferred
gives another Deferred. A :class:`pwlu.PWLU` that gets a Deferred computes norm, addition and function in one operator. Any
other use first computes the output of the norm as PyTorch does, and continues with that tensor. So the results are right
whatever the model does with the output.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_map_only

from pwlu import reference
from pwlu.common import checks
from pwlu.ops import is_exporting
from pwlu.ops import norm as norm_ops
from pwlu.units.sharding import is_sharded

_functional, _autograd = cast("Any", F), cast("Any", torch._C._autograd)  # Any: private names are undeclared


def plain_forward(norm: Any, x: Tensor) -> Tensor:
    """Return the output of a norm as PyTorch computes it, without the activation that timm's classes also apply."""
    forward: Any = nn.SyncBatchNorm.forward if isinstance(norm, nn.SyncBatchNorm) else _BatchNorm.forward
    return forward(norm, x)


class DeferredNorm:
    """Base class that :func:`pwlu.fuse_norms_` adds to the class of a norm; see :func:`deferring`."""

    original: type[nn.Module]  # the class of the norm before fuse_norms_
    applies_activation: bool  # True for timm's classes

    def forward(self: Any, x: Any) -> Any:
        """Return a Deferred, or the output of the original class if the norm cannot be deferred."""
        if not _can_defer(self, x):
            return self.original.forward(self, x)
        deferred = Deferred(self, x)
        return self.act(self.drop(deferred)) if self.applies_activation else deferred

    def _get_name(self) -> str:
        return self.original.__name__

    def extra_repr(self) -> str:
        """Return the original text, and say that the norm is fused."""
        return f"{super().extra_repr()}, fused with the PWLU that follows"  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle cannot find the class by name, because it is created at run time.
        return _rebuild, (self.original,), self.__getstate__()


def stop_deferring_(norm: Any) -> None:
    """Give a norm its original class back."""
    norm.__class__ = norm.original
    del norm.recorder, norm.units, norm.through


def _rebuild(original: type[nn.Module]) -> Any:
    made: Any = deferring(original)  # type: ignore[arg-type]  # classes of modules are hashable
    return made.__new__(made)


@functools.cache
def deferring(original: Any) -> type[Any]:
    """Return the subclass of a norm class that defers its output.

    Raises:
        ValueError: if the class has its own forward, which cannot be deferred.
    """
    own = original.forward
    with_activation = original.__module__.startswith("timm.") and original.__name__ in ("BatchNormAct2d", "SyncBatchNormAct")
    if not with_activation and own not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise ValueError(f"its class, {original.__name__}, defines its own forward")
    return type(
        f"Deferred{original.__name__}",
        (DeferredNorm, original),
        {"original": original, "applies_activation": with_activation, "__module__": original.__module__},
    )


def _can_defer(norm: Any, x: Any) -> bool:
    """Return whether a norm may return a Deferred: not if a hook, tracer or transform expects a tensor."""
    if norm.recorder is not None:
        return True
    if type(x) is not Tensor or x.dtype not in checks.FLOATS or has_hooks(norm):
        return False
    for unit in norm.units:
        if has_hooks(unit) or not hasattr(unit, "statistics"):  # FusedPWLU has no statistics
            return False
    for module in norm.through:  # their hooks expect tensors too
        if has_hooks(module):
            return False
    if torch.compiler.is_compiling():
        return is_compiled() and not isinstance(norm, nn.SyncBatchNorm)
    return not (
        torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack()
        or _has_any_global_hook()
    )


def is_compiled() -> bool:
    """Return whether torch.compile, and not torch.export, traces the call."""
    return torch.compiler.is_dynamo_compiling() and not is_exporting()


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module has forward or backward hooks."""
    own = module.__dict__  # attribute access on modules is slow
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"])


def _version(tensor: Tensor) -> int:
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


class Deferred:
    """The output of a norm that is not computed yet, or the sum of that output and a residual.

    The residual is a tensor or the Deferred of another norm.
    """

    def __init__(self, norm: Any, x: Tensor) -> None:
        self.norm, self.x = norm, x
        self.residual: Tensor | Deferred | None = None
        self._versions = (_version(x), 0)
        self._value: Tensor | None = None
        self._statistics_updated = [False]  # whether this batch has updated the running statistics; a list, shared with sums

    # Methods for the PWLU that gets this object.

    def activate(self, unit: Any) -> Tensor:
        """Return the output of a unit: norm, addition and function in one pass if possible, else separately."""
        statistics, channels = unit._modules["statistics"], self.x.shape[1]
        observes = statistics.phase == 1 and unit.training
        weight = unit.effective_weight()
        if self._statistics_updated[0]:
            return unit(self.value())
        if why := self._why_separate(unit, weight, observes):
            return unit(self.value_for(f"{type(unit).__name__} ({why})"))
        if self.norm.recorder is not None:
            self.norm.recorder.record_pair(self, unit)
        if unit.channels != channels:
            blocks = reference.unpack(weight, unit.intervals)
            weight = reference.pack(*(block.expand(channels, *block.shape[1:]) for block in blocks))
        residual, hooks = self.residual, nullcontext()
        if isinstance(residual, Deferred):
            residual, hooks = residual._residual_value()
        with hooks:
            return self._act(residual, weight, unit.intervals, statistics.pool if observes else None)[0]

    def value_for(self, what: str) -> Tensor:
        """Return the value for a user that cannot run in one pass with a norm. `what` describes the user in the report."""
        self._note(what)
        return self.value()

    def _act(self, residual: Tensor | None, weight: Tensor, intervals: int, pool: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return y and the norm (4, C), and update the running statistics."""
        self._check_versions()
        self._statistics_updated[0] = True
        x, norm = self.x, self.norm
        # Attribute access on modules is slow, and this code runs for every norm in every step.
        parameters, buffers = norm._parameters, norm._buffers
        norm._check_input_dim(x)
        mean, variance, batches, factor = buffers["running_mean"], buffers["running_var"], None, norm.momentum or 0.0
        batch = self._uses_batch_statistics()
        if batch and x.numel() == x.shape[1]:
            _functional._verify_batch_size(list(x.size()))
        if norm.training:  # the rules of torch.nn.BatchNorm
            if not norm.track_running_stats:
                mean = variance = None
            elif norm.momentum is None:
                buffers["num_batches_tracked"].add_(1)
                factor = 1.0 / float(buffers["num_batches_tracked"])
            else:
                batches = buffers["num_batches_tracked"]
        state = (parameters["weight"], parameters["bias"], mean, variance, batches, factor, norm.eps, batch, pool)
        group = _group(norm)
        act = norm_ops.norm_act if group is None else functools.partial(norm_ops.norm_act_of_processes, group)
        y, norm_vectors = act(x, residual, weight, intervals, *state)
        return y, norm_vectors

    def _uses_batch_statistics(self) -> bool:
        return bool(self.norm.training or self.norm._buffers["running_mean"] is None)

    def _residual_value(self) -> tuple[Tensor, Any]:
        """Return the output of this norm, to be added to the output of another norm, and a context for that operator.

        Inside the context, autograd does not save the output. The backward pass recomputes it from x, which the backward pass
        of this norm needs anyway. The same kernel computes it both times, so the bits are the same.
        """
        x, version, gamma = self.x, _version(self.x), self.norm._parameters["weight"]
        # Save the output as usual in evaluation, under torch.compile (which decides itself what to save), and if parameters
        # are sharded.
        if not self._uses_batch_statistics() or torch.compiler.is_compiling() or is_sharded(gamma):
            return self.value(), nullcontext()
        recording = self.norm.recorder is not None  # the model may run on fake tensors, which must not be cached
        weight = (_identity.__wrapped__ if recording else _identity)(x.shape[1], reference.compute_dtype(x), x.device)
        value, norm = self._act(None, weight, 1, None)
        hooked = _autograd._top_saved_tensors_default_hooks(False) is not None  # for example by gradient checkpointing
        if recording or hooked or not _autograd._saved_tensors_hooks_is_enabled():
            return value, nullcontext()
        value_id = id(value)

        def pack(saved: Tensor) -> Any:
            return None if id(saved) == value_id else (saved, _version(saved))

        def unpack(packed: Any) -> Tensor:
            tensor, known = packed or (x, version)
            if _version(tensor) != known:
                raise RuntimeError(
                    "pwlu: the input of a fused batch norm or of its PWLU was changed in place, but the backward pass needs "
                    "it. Write x = x + 1 instead of x += 1, or undo the fusion: pwlu.unfuse_norms_(model)"
                )
            return tensor if packed else norm_ops.norm_forward(x.detach(), None, norm, weight, 1)

        return value, torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _why_separate(self, unit: Any, weight: Tensor, observes: bool) -> str:
        """Return why norm and unit cannot run in one pass; an empty string if they can."""
        x = self.x
        dimensions, channels = x.dim(), unit.channels
        if dimensions < 2 or unit.channel_dim not in (1, 1 - dimensions):
            return f"its channel_dim is {unit.channel_dim}"
        if channels != x.shape[1]:
            if channels != 1:
                return f"it has {channels} channels"
            if observes:
                return "in Phase I, it needs statistics over all channels"
        if weight.device != x.device:
            return f"it is on {weight.device}"
        if is_sharded(weight) or is_sharded(self.norm._parameters["weight"]):
            return "parameters are sharded here"
        return ""

    def _check_versions(self) -> None:
        residual = self.residual
        if (_version(self.x), _version(residual) if isinstance(residual, Tensor) else 0) != self._versions:
            raise RuntimeError(
                "pwlu: the input of a fused batch norm, or the tensor added to its output, was changed in place before its "
                "PWLU computed the norm. Write x = x + 1 instead of x += 1, or undo the fusion: pwlu.unfuse_norms_(model)"
            )

    # Methods for all other code.

    def norms(self) -> list[Any]:
        """Return the norm, and that of the residual if it is deferred too."""
        return [self.norm, *(self.residual.norms() if isinstance(self.residual, Deferred) else [])]

    def value(self) -> Tensor:
        """Return the tensor that this object represents; compute it on the first call."""
        if self._value is None:
            self._check_versions()
            z = self._recompute() if self._statistics_updated[0] else plain_forward(self.norm, self.x)
            self._statistics_updated[0] = True
            residual = self.residual.value() if isinstance(self.residual, Deferred) else self.residual
            self._value = z if residual is None else z + residual
        return self._value

    def _recompute(self) -> Tensor:
        """Return the output of the norm, without updating the running statistics a second time for this batch."""
        norm, batch = self.norm, self._uses_batch_statistics()
        if _group(norm) is not None:
            raise RuntimeError(
                "pwlu: only a PWLU may use the output of a fused SyncBatchNorm, but the model also uses it elsewhere. Undo the "
                "fusion: pwlu.unfuse_norms_(model)"
            )
        running = (None, None) if batch else (norm.running_mean, norm.running_var)
        return F.batch_norm(self.x, running[0], running[1], norm.weight, norm.bias, batch, 0.0, norm.eps)

    def _note(self, what: str) -> None:
        if self.norm.recorder is not None:
            self.norm.recorder.record_use(self, what)
            if isinstance(self.residual, Deferred):
                self.residual._note(what)

    def add(self, other: Any) -> Any:
        """Return the sum.

        It is a Deferred if `other` is a tensor of the same shape, dtype and device, or the Deferred of another norm. Otherwise
        it is a tensor.
        """
        x, other_is_deferred = self.x, isinstance(other, Deferred)
        fits = (other_is_deferred or isinstance(other, Tensor)) and self.residual is None and not self._statistics_updated[0]
        fits = fits and (other.shape, other.dtype, other.device) == (x.shape, x.dtype, x.device)
        if other_is_deferred and other.norm is self.norm:
            self._note("an addition with another output of the same norm")
            return self.value() + other.value()  # both update the running statistics, in this order
        if other_is_deferred and not (fits and other.residual is None and not other._statistics_updated[0]):
            other._note("an addition with another norm")
            other, other_is_deferred = other.value(), False
        if fits:
            total = Deferred(self.norm, x)
            total.residual, total._statistics_updated = other, self._statistics_updated
            total._versions = (self._versions[0], 0 if other_is_deferred else _version(other))
            return total
        self._note("an addition of another shape or type" if isinstance(other, Tensor) else "an addition")
        return self.value() + other

    __add__ = __radd__ = __iadd__ = add

    # Of the tensor that this object represents.
    shape = property(lambda self: self.x.shape)
    dtype = property(lambda self: self.x.dtype)
    device = property(lambda self: self.x.device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value_for(f"the attribute {name}"), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ADDITIONS and len(args) == 2 and not kwargs:
            one, other = args
            return one.add(other) if isinstance(one, Deferred) else other.add(one)
        if func in _DROPOUTS and not kwargs.get("training", True):
            return args[0]
        name = getattr(func, "__name__", str(func))

        def value(deferred: Deferred) -> Tensor:
            return deferred.value_for(name)

        return func(*tree_map_only(Deferred, value, args), **tree_map_only(Deferred, value, kwargs))


_ADDITIONS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


def _compute_then_call(name: str) -> Callable[..., Any]:
    """Return a method that computes the value of a Deferred and calls the method with this name on it."""

    def operator(deferred: Deferred, *args: Any) -> Any:
        return getattr(deferred.value_for(name), name)(*args)

    return operator


_BINARY = ("sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OTHERS = ("isub", "imul", "itruediv", "neg", "abs", "getitem", "setitem", "len", "iter", "bool", "float")
for _name in (*_BINARY, *("r" + name for name in _BINARY), *_OTHERS, "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Deferred, f"__{_name}__", _compute_then_call(f"__{_name}__"))


@functools.cache
def _identity(channels: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weight of a PWLU with one interval whose output is exactly its input."""
    zeros, ones = (make(channels, dtype=dtype, device=device) for make in (torch.zeros, torch.ones))
    return reference.pack(zeros, ones, torch.stack([zeros, ones], 1), ones, ones)


def _group(norm: Any) -> "dist.ProcessGroup | None":
    """Return the process group over which a norm computes its statistics; None if it uses only this process."""
    if not isinstance(norm, nn.SyncBatchNorm) or not norm.training or not (dist.is_available() and dist.is_initialized()):
        return None
    group: Any = norm.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None
