"""Every tensor that a torch function returns while a model runs carries a node that knows the nodes it was computed from."""

import math
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

Range = tuple[float, float]
SHAPING = frozenset(
    {"view", "reshape", "expand", "expand_as", "unsqueeze", "squeeze", "permute", "transpose", "flatten", "unflatten"}
)
# What there may be between a gate and what it multiplies: the values stay.
BEHIND_GATE = SHAPING | {
    *("getitem", "view_as", "reshape_as", "broadcast_to", "repeat", "repeat_interleave", "interpolate", "contiguous", "clone"),
    *("to", "type", "type_as", "float", "half", "bfloat16", "double", "detach", "dropout", "chunk", "split", "unbind", "flip"),
    *("movedim", "moveaxis", "swapaxes", "swapdims", "rearrange"),
}
CONVOLUTIONS = {f"{name}{n}d": n for name in ("conv", "conv_transpose") for n in (1, 2, 3)}
OVER_DIM_1 = frozenset({"batch_norm", "group_norm", "instance_norm"})
OVER_LAST = frozenset({"linear", "layer_norm", "rms_norm", "embedding", "matmul", "mm", "addmm"})
LAYERS = frozenset({*CONVOLUTIONS, *OVER_DIM_1, *OVER_LAST})
SAMPLE = "sample"  # in place of the name of a function
SEVERAL = 10**6  # in place of a dimension: channels were split into several
ATTRIBUTE = "_pwlu_node"
ANYTHING = (-math.inf, math.inf)
_CONSTANT = (-1e30, 1e30)  # of a parameter, say: bounded, but its values are not known

_RANGES: dict[str, Range] = {
    **dict.fromkeys(("sigmoid", "hardsigmoid", "softmax", "softmin", "special_expit", "expit", "_softmax"), (0.0, 1.0)),
    **dict.fromkeys(("tanh", "softsign", "erf", "special_erf"), (-1.0, 1.0)),
    **dict.fromkeys(("exp", "softplus", "abs", "square"), (0.0, math.inf)),
}
_LIMITS = {"relu": (0.0, math.inf), "relu6": (0.0, 6.0), "hardtanh": (-1.0, 1.0), "clamp": ANYTHING, "clip": ANYTHING}
_AS_BEFORE = BEHIND_GATE | {"mean", "amax", "amin", "cat", "concat", "stack", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"}


class Node:
    """One call of a torch function: its name, what it was computed from, its shape, and the range of its values.

    ``channel_dim``: the dimension of its channels if known. ``factors``: what it multiplies, element by element. ``call``: its
    number. ``varies``: with the sample, unlike a parameter or a constant. ``behind_layer``: some layer took part.
    """

    __slots__ = ("behind_layer", "call", "channel_dim", "factors", "inputs", "name", "range", "shape", "varies")

    def __init__(self, name: str, inputs: list["Node"], shape: tuple[int, ...], range: Range, channel_dim: int | None) -> None:
        self.name, self.inputs, self.shape, self.range, self.channel_dim = name, inputs, shape, range, channel_dim
        self.factors: list[Node] = []
        self.call = 0
        self.behind_layer: bool = name in LAYERS or any(node.behind_layer for node in inputs)
        self.varies: bool = name == SAMPLE or name in LAYERS or any(node.varies for node in inputs)

    @property
    def size(self) -> float:
        """Return the largest absolute value it can have."""
        return max(abs(limit) for limit in self.range)


def node_of(tensor: Tensor) -> Node | None:
    """Return the call that made this tensor, if it was seen."""
    return getattr(tensor, ATTRIBUTE, None)


def plain_name(function_name: str) -> str:
    """Return the name of a function, the same for all ways to call it: ``mul`` for ``mul_`` and ``multiply``."""
    name = function_name.strip("_") if function_name.startswith("__") else function_name.removesuffix("_")
    return {"multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div", "truediv": "div"}.get(name, name)


def range_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Range:
    """Return between which numbers the result of this call lies, as far as that is easily said."""
    values = [_range(value) for value in args[:2]]
    if name in _RANGES:
        return _RANGES[name]
    if name in _LIMITS:
        return _limited(values[0] if values else ANYTHING, *_limits(name, args, kwargs))
    if name in _AS_BEFORE:
        found = [_range(leaf) for leaf in tree_leaves(args[:1]) if isinstance(leaf, Tensor)]
        return (min(low for low, _ in found), max(high for _, high in found)) if found else ANYTHING
    if name in ("rsub", "rtruediv", "rdiv"):
        name, values = name[1:].replace("truediv", "div"), values[::-1]
    if name == "neg" and values:
        return -values[0][1], -values[0][0]
    if name == "reciprocal" and values:
        return _divided((1.0, 1.0), values[0])
    if len(values) < 2 or kwargs:
        return ANYTHING
    (a, b), (c, d) = values
    if name == "add":
        return a + c, b + d
    if name == "sub":
        return a - d, b - c
    if name == "mul":
        return _multiplied((a, b), (c, d))
    return _divided((a, b), (c, d)) if name == "div" else ANYTHING


def _range(value: Any) -> Range:
    if isinstance(value, Tensor):
        node = node_of(value)
        return node.range if node is not None and node.varies else _CONSTANT
    return (float(value), float(value)) if isinstance(value, (int, float)) else ANYTHING


def _limits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    low, high = _LIMITS[name]
    if name in ("clamp", "clip", "hardtanh"):
        given = dict(zip(("min", "max"), args[1:3], strict=False))
        given |= {key.removesuffix("_val"): value for key, value in kwargs.items()}
        low, high = given.get("min", low), given.get("max", high)
    return low, high


def _limited(values: Range, low: Any, high: Any) -> Range:
    low = _range(low)[0] if low is not None else -math.inf
    high = _range(high)[1] if high is not None else math.inf
    return max(values[0], low), min(values[1], high)


def _multiplied(one: Range, other: Range) -> Range:
    products = [a * b if a and b else 0.0 for a in one for b in other]  # 0 times infinity: values are finite
    return min(products), max(products)


def _divided(one: Range, other: Range) -> Range:
    low, high = other
    return _multiplied(one, (1 / high, 1 / low)) if low > 0 or high < 0 else ANYTHING
