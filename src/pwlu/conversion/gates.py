"""Recognize products in a model: gates, activations written as formulas, and gated linear units.

A gate is a bounded function whose output is multiplied with another path, such as the sigmoid in squeeze-and-excitation.
"""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from pwlu.conversion.nodes import KEEPS_VALUES, LAYERS, SAMPLE, Node, node_of

_WIDEST = 10.0  # the largest bound of a gate; a function with larger bounds may be a guard against overflow
# Activations of the form x * factor(x), by the name of a function in the factor.
_WRITTEN_OUT = {"hardsigmoid": "hardswish", "relu6": "hardswish", "clamp": "hardswish", "hardtanh": "hardswish"}
_WRITTEN_OUT |= {"tanh": "gelu", "erf": "gelu"}


def factors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Node]:
    """Return the factors of an elementwise product; an empty list if the call is not an elementwise product."""
    given = [*args, *kwargs.values()]
    if name == "mul":
        found = given
    elif name in ("addcmul", "lerp"):
        found = given[name == "addcmul" :]
    elif name == "einsum" and given and isinstance(given[0], str) and _sums_nothing(given[0]):
        found = given[1:]
    else:
        return []
    return [node for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and (node := node_of(leaf)) is not None]


def _sums_nothing(equation: str) -> bool:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    indices = [(index, operand) for operand in inputs.split(",") for index in operand if index.isalpha()]
    return bool(arrow) and all(operand.count(index) == 1 and index in output for index, operand in indices)


def gate_of(product: Node) -> tuple[Node, Node] | None:
    """Return the gate among the factors of a product, and the other factor; None if there is no gate.

    The gate is bounded, and its bounds are narrower than those of the other factor. The other factor depends on the sample,
    unlike the 255 of 255 * sigmoid(x). It has the shape of the product. It depends on a layer, or the gate is computed from
    it; this excludes masks that are part of the sample.
    """
    for factor in product.factors:
        for other in product.factors:
            if (
                factor.varies
                and other.varies
                and factor.size <= _WIDEST
                and factor.size < other.size
                and other.shape == product.shape
                and (other.after_layer or other in ancestors([factor]))
            ):
                return factor, other
    return None


def written_out(product: Node) -> tuple[str, set[Node]] | None:
    """Return the kind of activation that x * gate(x) computes, and its nodes; None if the product is not an activation."""
    found = gate_of(product)
    if found is None:
        return None
    factor, x = found
    while x.name in ("mul", "div", "neg") and len(varying := [node for node in x.inputs if node.varies]) == 1:
        (x,) = varying  # the x of 0.5 * x
    between = {node for node in ancestors([factor], stop=[x]) if node.varies}
    if any(node.name == SAMPLE or node.name in LAYERS or node.shape != x.shape for node in between):
        return None
    names = {node.name for node in between}
    kind = next((kind for name, kind in _WRITTEN_OUT.items() if name in names), "silu")
    return "mish" if {"tanh", "softplus"} <= names else kind, between


def gate_chain(factor: Node) -> set[Node]:
    """Return the nodes from the bounded function of a gate to the product: reshapes, scales, 1 - x."""
    found, todo = set[Node](), [factor]
    while todo:
        node = todo.pop()
        found.add(node)
        values = node.inputs[:1] if node.name in KEEPS_VALUES else node.inputs  # x.expand_as(y) has the values of x
        inputs = [other for other in values if other.varies]
        if all(other.size < math.inf for other in inputs):
            todo += inputs
    return found


def gated_linear_units(products: Iterable[Node], activations: set[Node]) -> set[Node]:
    """Return the activations whose output is multiplied with a parallel path, such as the SiLU of SwiGLU."""
    found = set()
    for product in products:
        for factor in product.factors:
            node = factor
            while node.name in KEEPS_VALUES and node.inputs:
                node = node.inputs[0]
            others = [other for other in product.factors if other is not factor and other.after_layer]
            if node in activations and any(other.shape == product.shape and _independent(other, node) for other in others):
                found.add(node)
    return found


def _independent(one: Node, other: Node) -> bool:
    return one not in ancestors([other]) and other not in ancestors([one])


def ancestors(ends: Iterable[Node], stop: Iterable[Node] = ()) -> set[Node]:
    """Return the given nodes and all nodes that they were computed from. Do not follow paths through `stop`."""
    stop, found, todo = set(stop), set[Node](), list(ends)
    while todo:
        node = todo.pop()
        if node not in found and node not in stop:
            found.add(node)
            todo += node.inputs
    return found
