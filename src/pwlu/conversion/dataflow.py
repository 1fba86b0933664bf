"""The flow of tensors through a model: the channel dimension of each tensor, and which tensors feed a gate."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pwlu.conversion import gates
from pwlu.conversion.nodes import (
    ATTRIBUTE,
    CHANNELS_IN_DIM_1,
    CHANNELS_IN_LAST_DIM,
    CONVOLUTIONS,
    SHAPING,
    SPLIT_CHANNELS,
    Node,
    canonical_name,
    node_of,
    range_of,
)


class Dataflow:
    """The nodes of one run of a model."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.number, self.consumed = 0, set[int]()  # the number of the last call; the numbers of calls whose outputs were used
        self.written_out: set[Node] = set()  # products that are activations written as formulas

    def record(self, function_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Node | None:
        """Add nodes for the outputs of a call. Return the first; None if the call returned no tensor."""
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        inputs = [node for tensor in tensors if (node := node_of(tensor)) is not None] if outputs else []
        name = canonical_name(function_name)
        values, factors = range_of(name, args, kwargs), gates.factors(name, args, kwargs)
        self.consumed |= {node.call for node in inputs}
        first, self.number = len(self.nodes), self.number + 1
        for output in outputs:
            node = Node(name, inputs, tuple(output.shape), values, _channel_dim(name, args, kwargs, tensors, output))
            node.factors, node.call = factors, self.number
            self.nodes.append(node)
            setattr(output, ATTRIBUTE, node)
        return self.nodes[first] if outputs else None

    def feeding_gates(self, outputs: Any) -> tuple[set[Node], set[Node]]:
        """Return the nodes that are gates, and the nodes that reach the outputs of the model only through a gate."""
        products = [node for node in self.nodes if node.factors and node not in self.written_out]
        pairs = [pair for node in products if (pair := gates.gate_of(node)) is not None]
        found = {node for gate, _ in pairs for node in gates.gate_chain(gate)}
        if not found:
            return set(), set()
        returned = [node for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and (node := node_of(leaf)) is not None]
        ends = [*returned, *(node for node in self.nodes if node.call not in self.consumed)]
        return found, gates.ancestors(found) - gates.ancestors(ends, stop=found)


def _channel_dim(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], y: Tensor) -> int | None:
    """Return the channel dimension of y: 1 or -1 after a layer, else that of the input; None if it is unknown."""
    if name in CONVOLUTIONS:
        return y.ndim - CONVOLUTIONS[name] - 1  # 1, or 0 for a single image without a batch
    if name in CHANNELS_IN_DIM_1:
        return 1
    if name in CHANNELS_IN_LAST_DIM:
        return -1
    known = [(tensor, node.channel_dim) for tensor in tensors if (node := node_of(tensor)) and node.channel_dim is not None]
    if not known:
        return None
    x, dim = known[0]
    if dim == SPLIT_CHANNELS:
        return SPLIT_CHANNELS
    if name in ("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis"):
        return _permuted(name, args, kwargs, x, dim)
    same = [(t, d) for t, d in known if t.ndim == y.ndim]
    if same:
        return same[0][1]
    if name in SHAPING and y.ndim > x.ndim and (split := _split(x.shape, dim % x.ndim, y.shape)) is not None:
        return split
    if name in SHAPING and -y.ndim <= dim < y.ndim and y.shape[dim] == x.shape[dim]:
        return dim
    return None


def _split(old: torch.Size, dim: int, new: torch.Size) -> int | None:
    """Return the channel dimension after a view that splits it; SPLIT_CHANNELS if several parts are larger than 1."""
    after = len(old) - dim - 1
    middle = range(dim, len(new) - after)
    if old[:dim] != new[:dim] or old[dim + 1 :] != new[len(new) - after :] or not middle:
        return None
    large = [d for d in middle if new[d] > 1]
    if len(large) > 1:
        return SPLIT_CHANNELS
    place = large[0] if large else dim
    return -1 if place == len(new) - 1 else place


def _permuted(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor, dim: int) -> int:
    numbered = torch.empty(*range(x.ndim), device="meta")  # dimension d has the size d
    options = {key: value for key, value in kwargs.items() if key != "input"}
    place = getattr(numbered, name)(*args[1:], **options).shape.index(dim % x.ndim)
    return -1 if place == x.ndim - 1 else place
