"""Nodes of the dataflow of a model. Each tensor that a torch function returns has a node, linked to the nodes of its inputs."""

import math
import operator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

Range = tuple[float, float]
SHAPING = frozenset(
    {"view", "reshape", "expand", "expand_as", "unsqueeze", "squeeze", "permute", "transpose", "flatten", "unflatten"}
)
# Functions that do not change values. A gate may pass through them before it is multiplied.
KEEPS_VALUES = SHAPING | {
    *("getitem", "view_as", "reshape_as", "broadcast_to", "repeat", "repeat_interleave", "interpolate", "contiguous", "clone"),
    *("to", "type", "type_as", "float", "half", "bfloat16", "double", "detach", "dropout", "chunk", "split", "unbind", "flip"),
    *("movedim", "moveaxis", "swapaxes", "swapdims", "rearrange"),
}
CONVOLUTIONS = {f"{name}{n}d": n for name in ("conv", "conv_transpose") for n in (1, 2, 3)}
CHANNELS_IN_DIM_1 = frozenset({"batch_norm", "group_norm", "instance_norm"})
CHANNELS_IN_LAST_DIM = frozenset({"linear", "layer_norm", "rms_norm", "embedding", "matmul", "mm", "addmm"})
LAYERS = frozenset({*CONVOLUTIONS, *CHANNELS_IN_DIM_1, *CHANNELS_IN_LAST_DIM})
SAMPLE = "sample"  # name of the nodes of the sample
SPLIT_CHANNELS = 10**6  # channel_dim of a tensor whose channels are spread over several dimensions
ATTRIBUTE = "_pwlu_node"
ANYTHING = (-math.inf, math.inf)
_CONSTANT = (-1e30, 1e30)  # range of a parameter: finite, but the values are unknown

_RANGES: dict[str, Range] = {
    **dict.fromkeys(("sigmoid", "hardsigmoid", "softmax", "softmin", "special_expit", "expit", "_softmax"), (0.0, 1.0)),
    **dict.fromkeys(("tanh", "softsign", "erf", "special_erf"), (-1.0, 1.0)),
    **dict.fromkeys(("exp", "softplus", "abs", "square"), (0.0, math.inf)),
}
_OPERATIONS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}
_UNARY = {"neg": ("sub", 0.0), "reciprocal": ("div", 1.0)}  # as an operation on a number and the input
_LIMITS = {"relu": (0.0, math.inf), "relu6": (0.0, 6.0), "hardtanh": (-1.0, 1.0), "clamp": ANYTHING, "clip": ANYTHING}
_RANGE_OF_INPUT = KEEPS_VALUES | {
    *("mean", "amax", "amin", "cat", "concat", "stack", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d")
}


class Node:
    """One call of a torch function: its name, its inputs, its shape, and the range of its values.

    Attributes:
        channel_dim: the dimension of the channels; None if unknown.
        factors: the factors of an elementwise product.
        call: the number of the call.
        varies: whether it depends on the sample, unlike a parameter or a constant.
        after_layer: whether it depends on the output of a layer.
    """

    __slots__ = ("after_layer", "call", "channel_dim", "factors", "inputs", "name", "range", "shape", "varies")

    def __init__(self, name: str, inputs: list["Node"], shape: tuple[int, ...], range: Range, channel_dim: int | None) -> None:
        self.name, self.inputs, self.shape, self.range, self.channel_dim = name, inputs, shape, range, channel_dim
        self.factors: list[Node] = []
        self.call = 0
        self.after_layer: bool = name in LAYERS or any(node.after_layer for node in inputs)
        self.varies: bool = name == SAMPLE or name in LAYERS or any(node.varies for node in inputs)

    @property
    def size(self) -> float:
        """Return the largest possible absolute value."""
        return max(abs(limit) for limit in self.range)


def node_of(tensor: Tensor) -> Node | None:
    """Return the node of a tensor; None if its computation was not recorded."""
    return getattr(tensor, ATTRIBUTE, None)


def canonical_name(function_name: str) -> str:
    """Return one name for all variants of a function: ``mul`` for ``mul_`` and ``multiply``."""
    name = function_name.strip("_") if function_name.startswith("__") else function_name.removesuffix("_")
    return {"multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div", "truediv": "div"}.get(name, name)


def range_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Range:
    """Return bounds of the values that a call returns, by simple rules."""
    values = [_range(value) for value in args[:2]]
    if name in _RANGES:
        return _RANGES[name]
    if name in _LIMITS:
        return _clamp_range(values[0] if values else ANYTHING, *_clamp_limits(name, args, kwargs))
    if name in _RANGE_OF_INPUT:
        found = [_range(leaf) for leaf in tree_leaves(args[:1]) if isinstance(leaf, Tensor)]
        return (min(low for low, _ in found), max(high for _, high in found)) if found else ANYTHING
    if name in ("rsub", "rtruediv", "rdiv"):
        name, values = name[1:].replace("truediv", "div"), values[::-1]
    elif name in _UNARY:
        name, first = _UNARY[name]
        values = [(first, first), *values]
    return _combine(name, *values) if name in _OPERATIONS and len(values) == 2 and not kwargs else ANYTHING


def _range(value: Any) -> Range:
    if isinstance(value, Tensor):
        node = node_of(value)
        return node.range if node is not None and node.varies else _CONSTANT
    return (float(value), float(value)) if isinstance(value, (int, float)) else ANYTHING


def _clamp_limits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    low, high = _LIMITS[name]
    if name in ("clamp", "clip", "hardtanh"):
        given = dict(zip(("min", "max"), args[1:3], strict=False))
        given |= {key.removesuffix("_val"): value for key, value in kwargs.items()}
        low, high = given.get("min", low), given.get("max", high)
    return low, high


def _clamp_range(values: Range, low: Any, high: Any) -> Range:
    low = _range(low)[0] if low is not None else -math.inf
    high = _range(high)[1] if high is not None else math.inf
    return max(values[0], low), min(values[1], high)


def _combine(name: str, one: Range, other: Range) -> Range:
    if name == "div" and other[0] <= 0 <= other[1]:
        return ANYTHING
    ends = [_OPERATIONS[name](a, b) for a in one for b in other]
    ends = [end for end in ends if not math.isnan(end)] or [0.0]  # values are finite, so 0 times an infinite bound is 0
    return min(ends), max(ends)
