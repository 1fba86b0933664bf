"""Watching a model run on a sample: every call of an activation, where in the code it stands, and on what.

A copy of the model runs, once in training and once in evaluation mode: on fake tensors, which have shapes but no values, or for real
where a model's course depends on values.
"""

import copy
import random
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from pwlu.conversion.dataflow import Dataflow, Node, node_of
from pwlu.conversion.kinds import recognise, recognise_module
from pwlu.conversion.source import Location, caller
from pwlu.starts import Start

CONSUMED = "_pwlu_consumed"


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


class Recorder(TorchFunctionMode):
    """Sees every torch function that a model calls."""

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.names, self.calls, self.dataflow = names, list[Call](), Dataflow()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        activation = recognise(func, args, kwargs)
        result = func(*args, **kwargs) if activation is None else activation.apply()
        name = getattr(func, "__name__", "")
        before = node_of(activation.x) if activation else None
        node = self.dataflow.record(name, args, kwargs, result)
        if node is not None:
            for argument in (*args, *kwargs.values()):
                if isinstance(argument, Tensor) and (writer := getattr(argument, CONSUMED, None)) is not None:
                    writer.reused = True
        if activation is not None:
            call = self._call(activation.kind, activation.start, name, activation.x, before, node, result)
            call.method = not hasattr(func, "__module__") or func.__module__ is None  # x.relu(), not F.relu(x)
            if activation.in_place:  # the result above is a new tensor: whoever uses the old one saw what was written into it
                setattr(activation.x, CONSUMED, call)
        return result

    def _call(self, kind: str, start: Start, was: str, x: Tensor, before: Node | None, node: Node | None, y: Tensor) -> Call:
        channel_dim = before.channel_dim if before is not None else None
        location = caller(sys._getframe(2), self.names)
        call = Call(
            kind, start, was, None, location, False, tuple(x.shape), x.dtype, x.device, channel_dim, node, output=y, x=x
        )
        self.calls.append(call)
        return call

    def module_called(self, name: str, module: nn.Module, kinds: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        """In place of the forward of a module without children and state: if all it does is one activation, it is that."""
        before = len(self.calls)
        given = (*args, *kwargs.values())
        before_node = node_of(given[0]) if given and isinstance(given[0], Tensor) else None
        y = type(module).forward(module, *args, **kwargs)
        inner = self.calls[before:]
        by_class = recognise_module(module, kinds)
        if by_class is not None and given and isinstance(given[0], Tensor) and isinstance(y, Tensor):
            del self.calls[before:]
            call = self._call(*by_class, "", given[0], before_node, node_of(y), y)
        elif len(inner) == 1 and len(given) == 1 and inner[0].x is given[0] and inner[0].output is y:
            (call,) = inner
        else:
            return y
        call.module, call.was, call.method = name, str(module), False
        call.location = caller(sys._getframe(1), self.names)
        return y

    def finish(self, outputs: Any) -> list[Call]:
        """All calls, told which of them feed a gate; tensors are let go."""
        feeding = self.dataflow.feeding_gates(outputs)
        for call in self.calls:
            call.feeds_gate = call.node in feeding
            call.node = call.output = call.x = None
        return self.calls


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


def unshare(model: nn.Module) -> None:
    """Give every place where a module without state is registered one of its own."""
    seen: set[int] = set()
    for parent, key, module in registrations(model).values():
        if id(module) in seen and stateless_leaf(module):
            parent._modules[key] = copy.deepcopy(module)
        seen.add(id(module))


class Runs:
    """Copies of a model that can be run on a sample, fake where possible."""

    def __init__(self, model: nn.Module, sample: Any) -> None:
        self.model, self.sample = model, sample
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
        if isinstance(sample, Mapping):
            return model, (), dict(sample), mode
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
        unshare(model)
        names = {module: name for name, module in model.named_modules()}
        recorder = Recorder(names)
        for name, (_, _, module) in registrations(model).items():
            if stateless_leaf(module):
                module.forward = partial(recorder.module_called, name, module, kinds)  # type: ignore[method-assign]
        model.train(mode == "train")
        with quiet(), _maybe(fake), recorder:
            outputs = model(*args, **kwargs)
        return recorder.finish(outputs)

    def check(self, change: Any, names: Mapping[str, set[str]]) -> list[str]:
        """Make the change to a copy and run it again: which of these modules, each with its modes, are not called?"""
        unreached = []
        for mode, real in self.for_real.items():
            model, args, kwargs, fake = self.copy(real)
            change(model)
            called: set[str] = set()
            for name in names:
                model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.add(name))
            model.train(mode == "train")
            with quiet(), _maybe(fake):
                model(*args, **kwargs)
            unreached += [name for name, modes in names.items() if mode in modes and name not in called]
        return unreached


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
    state = random.getstate()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    with torch.no_grad(), torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    random.setstate(state)
