"""What flows where while a model runs: in which dimension the channels of a tensor are, and what feeds a gate.

Every tensor that a torch function returns carries a node that knows the nodes it was computed from.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

MULTIPLY = frozenset({"mul", "mul_", "multiply", "multiply_"})
GATES = frozenset({"sigmoid", "sigmoid_", "hardsigmoid", "hardsigmoid_"})
SHAPING = frozenset(
    {"view", "reshape", "expand", "expand_as", "unsqueeze", "squeeze", "permute", "transpose", "flatten", "unflatten"}
)
# What there may be between a gate and what it multiplies.
BEHIND_GATE = SHAPING | {"__getitem__", "view_as", "reshape_as", "broadcast_to", "repeat", "interpolate", "contiguous", "to"}
CONVOLUTIONS = {f"{name}{n}d": n for name in ("conv", "conv_transpose") for n in (1, 2, 3)}
OVER_DIM_1 = frozenset({"batch_norm", "group_norm", "instance_norm"})
OVER_LAST = frozenset({"linear", "layer_norm", "rms_norm", "embedding", "matmul", "mm", "addmm"})
LAYERS = frozenset({*CONVOLUTIONS, *OVER_DIM_1, *OVER_LAST})
SAMPLE = "sample"  # in place of the name of a function
ATTRIBUTE = "_pwlu_node"


class Node:
    """One call of a torch function: its name, what it was computed from, and the dimension of its channels if known.

    ``varies``: with the sample, unlike a parameter or a constant.
    """

    __slots__ = ("channel_dim", "consumed", "inputs", "name", "varies")

    def __init__(self, name: str, inputs: list["Node"], channel_dim: int | None) -> None:
        self.name, self.inputs, self.channel_dim, self.consumed = name, inputs, channel_dim, False
        self.varies: bool = name == SAMPLE or name in LAYERS or any(node.varies for node in inputs)


def node_of(tensor: Tensor) -> Node | None:
    """The call that made this tensor, if it was seen."""
    return getattr(tensor, ATTRIBUTE, None)


class Dataflow:
    """The nodes of one run."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def record(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Node | None:
        """A call and what it returned; None if that is no tensor."""
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not outputs:
            return None
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        inputs = [node for tensor in tensors if (node := node_of(tensor)) is not None]
        for node in inputs:
            node.consumed = True
        node = Node(name, inputs, _channel_dim(name, args, kwargs, tensors, outputs[0]))
        self.nodes.append(node)
        for output in outputs:
            setattr(output, ATTRIBUTE, node)
        return node

    def feeding_gates(self, outputs: Any) -> set[Node]:
        """The nodes from which every way to an output of the model leads through a gate: a sigmoid that multiplies features."""
        gates = {gate for node in self.nodes if node.name in MULTIPLY and (gate := _gate_of(node.inputs)) is not None}
        if not gates:
            return set()
        returned = [node for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and (node := node_of(leaf)) is not None]
        free = _before([*returned, *(node for node in self.nodes if not node.consumed)], stop=gates)
        return _before(gates) - free


def _gate_of(factors: list[Node]) -> Node | None:
    """The sigmoid among two factors, if the other one is no constant (as in 255 * sigmoid(x)) and no sigmoid (a score)."""
    gates = [_gate(node) for node in factors]
    others = [node for node, gate in zip(factors, gates, strict=True) if gate is None and node.varies]
    return next((gate for gate in gates if gate is not None), None) if others else None


def _gate(node: Node) -> Node | None:
    while node.name in BEHIND_GATE and node.inputs:
        node = node.inputs[0]
    return node if node.name in GATES else None


def _before(ends: Iterable[Node], stop: Iterable[Node] = ()) -> set[Node]:
    """All nodes from which a way leads to one of the ends, these included; no way leads through `stop`."""
    stop, found, todo = set(stop), set[Node](), list(ends)
    while todo:
        node = todo.pop()
        if node not in found and node not in stop:
            found.add(node)
            todo += node.inputs
    return found


def _channel_dim(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], y: Tensor) -> int | None:
    """Of y: 1 or -1 where a layer says so, else as before the call; None where nobody knows."""
    if name in CONVOLUTIONS:
        return y.ndim - CONVOLUTIONS[name] - 1  # 1, or 0 for a single image without a batch
    if name in OVER_DIM_1:
        return 1
    if name in OVER_LAST:
        return -1
    known = [(tensor, node.channel_dim) for tensor in tensors if (node := node_of(tensor)) and node.channel_dim is not None]
    if not known:
        return None
    x, dim = known[0]
    if name in ("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis"):
        return _permuted(name, args, kwargs, x, dim)
    same = [(t, d) for t, d in known if t.ndim == y.ndim]
    if same:
        return same[0][1]
    if name in SHAPING and -y.ndim <= dim < y.ndim and y.shape[dim] == x.shape[dim]:
        return dim
    return None


def _permuted(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor, dim: int) -> int | None:
    numbers = [n for n in tree_leaves((args, list(kwargs.values()))) if isinstance(n, int)]
    order = list(range(x.ndim))
    if name == "permute":
        order = [n % x.ndim for n in numbers]
    elif name in ("transpose", "swapaxes", "swapdims"):
        a, b = (n % x.ndim for n in numbers)
        order[a], order[b] = order[b], order[a]
    else:
        half = len(numbers) // 2
        moved = {t % x.ndim: s % x.ndim for s, t in zip(numbers[:half], numbers[half:], strict=True)}
        rest = iter([d for d in order if d not in moved.values()])
        order = [moved[d] if d in moved else next(rest) for d in order]
    place = order.index(dim % x.ndim)
    return -1 if place == x.ndim - 1 else place
