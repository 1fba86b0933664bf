"""Record the activations that a model calls: where in the code, and on which inputs."""

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
from pwlu.conversion.nodes import SAMPLE, Node, node_of
from pwlu.conversion.source import Location, call_location
from pwlu.initial_functions import INITIAL_FUNCTIONS, InitialFunction
from pwlu.units.module import PWLU


@dataclass
class Call:
    """One call of an activation. ``module``: the name of the module that is the activation; None for a function call."""

    kind: str
    start: InitialFunction
    was: str
    module: str | None
    location: Location
    method: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    channel_dim: int | None  # None if no layer determines it
    node: Node | None = field(repr=False)
    output: Tensor | None = field(repr=False)
    x: Tensor | None = field(repr=False)
    is_gate: bool = False
    feeds_gate: bool = False
    dim: int = 1  # the channel dimension, known or guessed
    glu: bool = False  # its output is multiplied with a parallel path
    written_out: bool = False  # it is a formula, such as x * torch.sigmoid(x)
    reused: bool = False  # it works in place, and its input was used again
    arguments: int = 1  # number of arguments
    by_keyword: bool = False  # a PWLU takes no keyword arguments


class Recorder(TorchFunctionMode):
    """Records every torch function that a model calls."""

    def __init__(self, names: Mapping[nn.Module, str], clamps: bool) -> None:
        super().__init__()
        self.clamps = clamps  # whether every clamp may be an activation, or only ReLU and ReLU6
        self.reached: set[str] = set()  # names of the modules that were called and may be activations
        self.names, self.calls, self.dataflow = names, list[Call](), Dataflow()
        self.written: dict[int, list[tuple[Call, Tensor]]] = {}  # inputs of in-place activations, by storage
        self.used_again: list[tuple[Call, Tensor, Tensor]] = []

    def note_sample(self, _: nn.Module, *inputs: Any) -> None:
        """Note the tensors of the sample. This is a forward pre-hook of the model."""
        for leaf in tree_leaves(inputs):
            self.dataflow.record(SAMPLE, (), {}, leaf)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        activation = recognise(func, args, kwargs)
        if activation is not None and activation.kind == "clamp" and not self._may_be_activation(activation):
            activation = None
        result = func(*args, **kwargs) if activation is None else activation.apply()
        name = getattr(func, "__name__", "")
        node = self.dataflow.record(name, args, kwargs, result)
        if node is not None:
            self._note_use((args, kwargs))
        if activation is not None:
            call = self._call(activation.kind, activation.start, name, activation.x, node_of(activation.x), result)
            call.method = not hasattr(func, "__module__") or func.__module__ is None  # x.relu(), not F.relu(x)
            if activation.in_place:  # here, the result is a new tensor: note the input, because a later use expects the result
                self.written.setdefault(_storage(activation.x), []).append((call, activation.x))
        elif node is not None and node.factors:
            self._check_product(node, args, result)
        return result

    def _may_be_activation(self, clamp: Activation) -> bool:
        """Return whether a clamp may be an activation. Most clamps limit parameters, integers or boxes, or work in place."""
        node = node_of(clamp.x)
        if not self.clamps and clamp.start not in (INITIAL_FUNCTIONS["relu"], INITIAL_FUNCTIONS["relu6"]):
            return False
        return node is not None and node.varies and clamp.x.is_floating_point() and not clamp.in_place

    def _check_product(self, node: Node, args: Any, y: Any) -> None:
        """Record a product that is an activation written as a formula, instead of the functions in the formula."""
        found = gates.written_out(node)
        x = next((x for x in tree_leaves(args) if isinstance(x, Tensor) and x.shape == y.shape), None)
        if found is not None and x is not None:
            kind, parts = found
            self.dataflow.written_out.add(node)
            self.calls = [call for call in self.calls if call.node not in parts]
            call = self._call(kind, INITIAL_FUNCTIONS[kind], kind, x, node_of(x), y)
            call.written_out = True

    def _note_use(self, values: Any) -> None:
        for tensor in tree_leaves(values):
            if self.written and isinstance(tensor, Tensor):
                self.used_again += [(call, x, tensor) for call, x in self.written.get(_storage(tensor), ())]

    def _call(self, kind: str, start: InitialFunction, was: str, x: Tensor, before: Node | None, y: Tensor) -> Call:
        """Record a call with the input x, whose node was `before`, and the output y."""
        channel_dim = before.channel_dim if before is not None else None
        location = call_location(sys._getframe(2), self.names)
        like = tuple(x.shape), x.dtype, x.device
        self.calls.append(Call(kind, start, was, None, location, False, *like, channel_dim, node_of(y), output=y, x=x))
        return self.calls[-1]

    def module_called(
        self, name: str, module: nn.Module, forward: Any, by_class: Any, known: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the forward of a module that may be an activation. Record the module as one if it computes nothing else.

        `by_class`: kind and initial function if the class of the module is in kinds. `known`: the same if the values that it
        computes are those of a known activation.
        """
        self.reached.add(name)
        before = {id(call) for call in self.calls}
        given = (*args, *kwargs.values())
        before_node = node_of(given[0]) if given and isinstance(given[0], Tensor) else None
        y = forward(*args, **kwargs)
        inner = [call for call in self.calls if id(call) not in before]
        alone = len(inner) == 1 and len(given) == 1 and not inner[0].written_out
        alone = alone and (by_class is None or stateless_leaf(module))  # a module with a state may do more than its one call
        recognised: Recognised | None = by_class or known
        if alone and inner[0].x is given[0] and inner[0].output is y:
            (call,) = inner
            if module._modules and not by_class:  # a child is the activation
                return y
            if by_class:
                call.kind = by_class[0]
            elif known:  # a module that only computes x.clamp(min=0) is ReLU
                call.kind, call.start = known
        elif recognised is not None and given and isinstance(given[0], Tensor) and isinstance(y, Tensor):
            self.calls = [call for call in self.calls if id(call) in before]
            call = self._call(*recognised, "", given[0], before_node, y)
            if recognised[1].channels > 1:
                call.channel_dim = getattr(module, "channel_dim", 1)
        else:
            return y
        call.module, call.was, call.method = name, str(module), False
        call.arguments, call.by_keyword = len(given), bool(kwargs)
        call.location = call_location(sys._getframe(1), self.names)
        return y

    def finish(self, outputs: Any) -> list[Call]:
        """Return all calls outside of PWLUs, with their relation to gates and the reuse of inputs. Release the tensors."""
        self._note_use(outputs)
        units = [name for module, name in self.names.items() if isinstance(module, PWLU)]
        self.calls = [call for call in self.calls if not any(f"{call.location.nearest}.".startswith(f"{u}.") for u in units)]
        for call, x, tensor in self.used_again:
            call.reused = call.reused or _overlap(x, tensor)
        found, feeding = self.dataflow.feeding_gates(outputs)
        products = [node for node in self.dataflow.nodes if node.factors]
        multiplied = gates.gated_linear_units(products, {call.node for call in self.calls if call.node is not None})
        for call in self.calls:
            call.is_gate, call.feeds_gate, call.glu = (call.node in nodes for nodes in (found, feeding, multiplied))
            call.node = call.output = call.x = None
        return self.calls


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # for example, a sparse tensor
        return id(tensor)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors on the same storage share an element."""
    if a is b or a.dtype != b.dtype:
        return True
    marks = torch.zeros(a.untyped_storage().nbytes() // a.element_size(), dtype=torch.bool, device="cpu")
    one, other = (marks.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (a, b))
    one.fill_(True)
    return bool(other.any())


def stateless_leaf(module: nn.Module) -> bool:
    """Return whether a module has no children, parameters or buffers. This holds for most activations."""
    return not (module._modules or module._parameters or module._buffers)


def full_name(prefix: str, name: str) -> str:
    """Return the full name of a child."""
    return f"{prefix}.{name}" if prefix else name


def registrations(model: nn.Module) -> dict[str, tuple[nn.Module, str, nn.Module]]:
    """Return parent, key and module of every registered module by full name. Children of a shared parent appear once."""
    return {
        full_name(prefix, key): (parent, key, module)
        for prefix, parent in model.named_modules()
        for key, module in parent._modules.items()
        if module is not None
    }


def unshare(model: nn.Module, which: Callable[[nn.Module], bool]) -> list[tuple[nn.Module, str, nn.Module]]:
    """Copy modules that several places share and for which `which` is true, so that each place has its own module.

    Return parent, key and old module of the changed places.
    """
    seen: set[int] = set()
    changed = []
    for parent, key, module in registrations(model).values():
        if id(module) in seen and which(module):
            parent._modules[key] = copy.deepcopy(module)
            changed.append((parent, key, module))
        seen.add(id(module))
    return changed
