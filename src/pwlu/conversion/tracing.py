"""Watching a model run: every call of an activation, where in the code it stands, and on what."""

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pwlu.conversion import gates
from pwlu.conversion.dataflow import Dataflow
from pwlu.conversion.kinds import Activation, Recognised, recognise
from pwlu.conversion.nodes import Node, node_of
from pwlu.conversion.source import Location, caller
from pwlu.initial_functions import INITIAL_FUNCTIONS, InitialFunction


@dataclass
class Call:
    """An activation applied once: kind and start, the module that owns the call (or is it), the place, and the input."""

    kind: str
    start: InitialFunction
    was: str
    module: str | None
    location: Location
    method: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    channel_dim: int | None  # where layers tell
    node: Node | None = field(repr=False)
    output: Tensor | None = field(repr=False)
    x: Tensor | None = field(repr=False)
    is_gate: bool = False
    feeds_gate: bool = False
    dim: int = 1  # of channels, known or not
    glu: bool = False  # what it returns multiplies a path beside it
    written_out: bool = False  # by several functions, such as x * torch.sigmoid(x)
    reused: bool = False  # in place, and what it wrote into was used again
    arguments: int = 1  # given to the module
    by_keyword: bool = False  # which a PWLU cannot be called with


class Recorder(TorchFunctionMode):
    """Sees every torch function that a model calls."""

    def __init__(self, names: Mapping[nn.Module, str], clamps: bool) -> None:
        super().__init__()
        self.clamps = clamps  # whether any clamp may be an activation, or only one that is ReLU or ReLU6
        self.reached: set[str] = set()  # modules that were called, of those that may be activations
        self.names, self.calls, self.dataflow = names, list[Call](), Dataflow()
        self.written: dict[int, list[tuple[Call, Tensor]]] = {}  # by storage: what activations wrote into
        self.used_again: list[tuple[Call, Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        activation = recognise(func, args, kwargs)
        if activation is not None and activation.kind == "clamp" and not self._of_features(activation):
            activation = None
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
        elif node is not None and node.factors:
            self._product(node, args, result)
        return result

    def _of_features(self, clamp: Activation) -> bool:
        """Whether a clamp may be an activation: most limit parameters, whole numbers or boxes, or write into their input."""
        node = node_of(clamp.x)
        if not self.clamps and clamp.start not in (INITIAL_FUNCTIONS["relu"], INITIAL_FUNCTIONS["relu6"]):
            return False
        return node is not None and node.varies and clamp.x.is_floating_point() and not clamp.in_place

    def _product(self, node: Node, args: Any, y: Any) -> None:
        """A product may be an activation that is written out: then the functions it consists of are none."""
        found = gates.written_out(node)
        x = next((x for x in tree_leaves(args) if isinstance(x, Tensor) and x.shape == y.shape), None)
        if found is not None and x is not None:
            kind, parts = found
            self.dataflow.written_out.add(node)
            self.calls = [call for call in self.calls if call.node not in parts]
            call = self._call(kind, INITIAL_FUNCTIONS[kind], kind, x, node_of(x), node, y)
            call.written_out = True

    def _used(self, values: Any) -> None:
        for tensor in tree_leaves(values):
            if self.written and isinstance(tensor, Tensor):
                self.used_again += [(call, x, tensor) for call, x in self.written.get(_storage(tensor), ())]

    def _call(
        self, kind: str, start: InitialFunction, was: str, x: Tensor, before: Node | None, node: Node | None, y: Tensor
    ) -> Call:
        channel_dim = before.channel_dim if before is not None else None
        location = caller(sys._getframe(2), self.names)
        call = Call(
            kind, start, was, None, location, False, tuple(x.shape), x.dtype, x.device, channel_dim, node, output=y, x=x
        )
        self.calls.append(call)
        return call

    def module_called(
        self, name: str, module: nn.Module, forward: Any, by_class: Any, known: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """In place of the forward of a module that may be an activation: if all it does is one activation, it is that.

        Kind and start of the module where they are known: `by_class`, because that is one of kinds, or `known` by its values.
        """
        self.reached.add(name)
        before = {id(call) for call in self.calls}
        given = (*args, *kwargs.values())
        before_node = node_of(given[0]) if given and isinstance(given[0], Tensor) else None
        y = forward(*args, **kwargs)
        inner = [call for call in self.calls if id(call) not in before]
        alone = len(inner) == 1 and len(given) == 1 and not inner[0].written_out
        alone = alone and (by_class is None or stateless_leaf(module))  # what has a state may do more than it seems
        recognised: Recognised | None = by_class or known
        if alone and inner[0].x is given[0] and inner[0].output is y:
            (call,) = inner
            if module._modules and not by_class:  # a child is the activation
                return y
            if by_class:
                call.kind = by_class[0]
            elif known:  # x.clamp(min=0) is ReLU where a module does nothing else
                call.kind, call.start = known
        elif recognised is not None and given and isinstance(given[0], Tensor) and isinstance(y, Tensor):
            self.calls = [call for call in self.calls if id(call) in before]
            call = self._call(*recognised, "", given[0], before_node, node_of(y), y)
            if recognised[1].channels > 1:
                call.channel_dim = getattr(module, "channel_dim", 1)
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
        found, feeding = self.dataflow.feeding_gates(outputs)
        multiplied = self.dataflow.gated_linear_units({call.node for call in self.calls if call.node is not None})
        for call in self.calls:
            call.is_gate, call.feeds_gate, call.glu = (call.node in nodes for nodes in (found, feeding, multiplied))
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
