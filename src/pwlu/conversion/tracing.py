"""Watching a model run on a sample: every call of an activation, where in the code it stands, and on what.

A copy of the model runs, once in training and once in evaluation mode: on fake tensors, which have shapes but no values, or
for real where a model's course depends on values.
"""

import copy
import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pwlu.conversion.dataflow import SAMPLE, Dataflow, Node, node_of
from pwlu.conversion.kinds import recognise, recognise_module
from pwlu.conversion.source import Location, caller
from pwlu.starts import Start


@dataclass
class Call:
    """An activation applied once: kind and start, the module that owns the call (or is it), the place, and the input."""

    kind: str
    start: Start
    was: str
    module: str | None
    location: Location
    method: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    channel_dim: int | None
    node: Node | None = field(repr=False)
    output: Tensor | None = field(repr=False)
    x: Tensor | None = field(repr=False)
    feeds_gate: bool = False
    reused: bool = False  # in place, and what it wrote into was used again
    arguments: int = 1  # given to the module
    by_keyword: bool = False  # which a PWLU cannot be called with


class Recorder(TorchFunctionMode):
    """Sees every torch function that a model calls."""

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.names, self.calls, self.dataflow = names, list[Call](), Dataflow()
        self.written: dict[int, list[tuple[Call, Tensor]]] = {}  # by storage: what activations wrote into
        self.used_again: list[tuple[Call, Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        activation = recognise(func, args, kwargs)
        result = func(*args, **kwargs) if activation is None else activation.apply()
        name = getattr(func, "__name__", "")
        before = node_of(activation.x) if activation else None
        node = self.dataflow.record(name, args, kwargs, result)
        if node is not None:
            self._used((args, kwargs))
        if activation is not None:
            call = self._call(activation.kind, activation.start, name, activation.x, before, node, result)
            call.method = not hasattr(func, "__module__") or func.__module__ is None  # x.relu(), not F.relu(x)
            if activation.in_place:  # the result above is a new tensor: whoever uses the old one saw what was written into it
                self.written.setdefault(_storage(activation.x), []).append((call, activation.x))
        return result

    def _used(self, values: Any) -> None:
        for tensor in tree_leaves(values):
            if self.written and isinstance(tensor, Tensor):
                self.used_again += [(call, x, tensor) for call, x in self.written.get(_storage(tensor), ())]

    def _call(self, kind: str, start: Start, was: str, x: Tensor, before: Node | None, node: Node | None, y: Tensor) -> Call:
        channel_dim = before.channel_dim if before is not None else None
        location = caller(sys._getframe(2), self.names)
        call = Call(
            kind, start, was, None, location, False, tuple(x.shape), x.dtype, x.device, channel_dim, node, output=y, x=x
        )
        self.calls.append(call)
        return call

    def module_called(self, name: str, module: nn.Module, kinds: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        """In place of the forward of a module that may be an activation: if all it does is one activation, it is that."""
        before = len(self.calls)
        given = (*args, *kwargs.values())
        before_node = node_of(given[0]) if given and isinstance(given[0], Tensor) else None
        y = type(module).forward(module, *args, **kwargs)
        inner = self.calls[before:]
        by_class = recognise_module(module, kinds)
        if len(inner) == 1 and len(given) == 1 and inner[0].x is given[0] and inner[0].output is y:
            (call,) = inner
            call.kind = by_class[0] if by_class else call.kind
        elif by_class is not None and given and isinstance(given[0], Tensor) and isinstance(y, Tensor):
            del self.calls[before:]
            call = self._call(*by_class, "", given[0], before_node, node_of(y), y)
        else:
            return y
        call.module, call.was, call.method = name, str(module), False
        call.arguments, call.by_keyword = len(given), bool(kwargs)
        call.location = caller(sys._getframe(1), self.names)
        return y

    def finish(self, outputs: Any) -> list[Call]:
        """All calls, told which of them feed a gate, and what they wrote into that was used again; tensors are let go."""
        self._used(outputs)
        for call, x, tensor in self.used_again:
            call.reused = call.reused or _overlap(x, tensor)
        feeding = self.dataflow.feeding_gates(outputs)
        for call in self.calls:
            call.feeds_gate = call.node in feeding
            call.node = call.output = call.x = None
        return self.calls


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # sparse, say
        return id(tensor)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    if a is b or a.dtype != b.dtype:
        return True
    marks = torch.zeros(a.untyped_storage().nbytes() // a.element_size(), dtype=torch.bool, device="cpu")
    one, other = (marks.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (a, b))
    one.fill_(True)
    return bool(other.any())


def stateless_leaf(module: nn.Module) -> bool:
    """Whether a module has neither children nor parameters nor buffers, as activations do."""
    return not (module._modules or module._parameters or module._buffers)


def registrations(model: nn.Module) -> dict[str, tuple[nn.Module, str, nn.Module]]:
    """Parent, key and module of everything that is registered, by full name; a module in a shared parent counts once."""
    return {
        f"{prefix}.{key}" if prefix else key: (parent, key, module)
        for prefix, parent in model.named_modules()
        for key, module in parent._modules.items()
        if module is not None
    }


def unshare(model: nn.Module, which: Callable[[nn.Module], bool]) -> list[tuple[nn.Module, str, nn.Module]]:
    """Give every place where such a module is registered one of its own; return the places that got one, and what was there."""
    seen: set[int] = set()
    changed = []
    for parent, key, module in registrations(model).values():
        if id(module) in seen and which(module):
            parent._modules[key] = copy.deepcopy(module)
            changed.append((parent, key, module))
        seen.add(id(module))
    return changed


class Runs:
    """Copies of a model that can be run on a sample, fake where possible."""

    def __init__(self, model: nn.Module, sample: Any) -> None:
        self.model, self.sample = model, dict(sample) if isinstance(sample, Mapping) else sample
        self.failures: dict[str, Exception] = {}
        self.for_real: dict[str, bool] = {}

    def copy(self, real: bool) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
        """A copy of the model, arguments for it, and the mode to run it in."""
        if real:
            mode: Any = None
            model, sample = copy.deepcopy(self.model), copy.deepcopy(self.sample)
        else:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with FakeCopyMode(mode):
                model = copy.deepcopy(self.model)
            sample = tree_map_only(Tensor, mode.from_tensor, self.sample)
        if isinstance(sample, dict):
            return model, (), sample, mode
        return model, (sample if isinstance(sample, tuple) else (sample,)), {}, mode

    def record(self, kinds: Iterable[Any]) -> dict[str, list[Call]]:
        """The calls in training and in evaluation mode; a mode in which the model cannot run is left out."""
        found = {}
        for mode in ("train", "eval"):
            for real in (False, True):
                try:
                    found[mode] = self._record(mode, real, kinds)
                    self.for_real[mode] = real
                    self.failures.pop(mode, None)
                    break
                except Exception as error:
                    self.failures[mode] = error
        return found

    def _record(self, mode: str, real: bool, kinds: Iterable[Any]) -> list[Call]:
        model, args, kwargs, fake = self.copy(real)
        classes = tuple(kind for kind in kinds if isinstance(kind, type))

        def candidate(module: nn.Module) -> bool:
            return stateless_leaf(module) or isinstance(module, classes)

        unshare(model, candidate)
        names = {module: name for name, module in model.named_modules()}
        recorder = Recorder(names)
        recorder.dataflow.record(SAMPLE, (), {}, (args, kwargs))
        for name, (_, _, module) in registrations(model).items():
            if candidate(module):
                module.forward = partial(recorder.module_called, name, module, kinds)
        model.train(mode == "train")
        with quiet(), _maybe(fake), recorder:
            outputs = model(*args, **kwargs)
        return recorder.finish(outputs)

    def outputs(self) -> list[Tensor] | Exception:
        """The numbers that the model, as it is now, returns for the sample in evaluation mode, or why there are none."""
        try:
            model, args, kwargs, _ = self.copy(real=True)
            with quiet():
                outputs = model.eval()(*args, **kwargs)
        except Exception as error:
            return error
        tensors = [leaf.detach() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            return RuntimeError("the model is on the meta device")
        return [tensor for tensor in tensors if tensor.is_floating_point()]

    def check(self, change: Any, expected: Mapping[str, Counter[str]]) -> dict[str, bool]:
        """Make the change to a copy and run it again: which of these modules are never called (False) or too often (True)?"""
        wrong = {}
        for mode, real in self.for_real.items():
            model, args, kwargs, fake = self.copy(real)
            change(model)
            called = Counter[str]()
            for name in expected:
                model.get_submodule(name).register_forward_pre_hook(partial(_note, called, name))
            model.train(mode == "train")
            with quiet(), _maybe(fake):
                model(*args, **kwargs)
            for name, calls in expected.items():
                if called[name] > calls[mode] or (calls[mode] and not called[name]):
                    wrong[name] = called[name] > calls[mode]
        return wrong


def _note(called: Counter[str], name: str, *_: Any) -> None:
    called[name] += 1


@contextmanager
def _maybe(mode: Any) -> Iterator[None]:
    if mode is None:
        yield
    else:
        with mode:
            yield


@contextmanager
def quiet() -> Iterator[None]:
    """No gradients, no warnings, and random numbers afterwards as if nothing had been drawn."""
    state, log = random.getstate(), logging.getLogger("torch._subclasses.fake_tensor")
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    enabled, log.disabled = not log.disabled, True  # it logs as an error that a shape does not fit, which is raised too
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(of_numpy)
        log.disabled = not enabled
