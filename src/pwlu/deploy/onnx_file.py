"""Edit the ONNX file that torch writes. Marks in this file show where each PWLU begins and ends."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pwlu.deploy.onnx_forms import MARKS


def finish(onnx: Any, file: Path, opset: int, metadata: Mapping[str, str]) -> dict[str, int]:
    """Remove the marks and torch's metadata, such as source paths; add the given metadata, and count the operators.

    Returns:
        The number of operators of each kind, most frequent first.
    """
    model = onnx.load(file, load_external_data=False)
    new_names = {node.output[0]: node.input[0] for node in model.graph.node if node.domain == MARKS}
    for node in [node for node in model.graph.node if node.domain == MARKS]:
        model.graph.node.remove(node)
    _rename(model.graph, new_names)
    for output in model.graph.output:  # an Identity keeps the names of both the output and the value before the mark
        if output.name in new_names:
            result = _resolve(new_names, output.name)
            model.graph.node.append(onnx.helper.make_node("Identity", [result], [output.name]))
    for imported in [o for o in model.opset_import if o.domain == MARKS]:
        model.opset_import.remove(imported)
    nodes = list(_nodes(model.graph))
    if foreign := sorted({f"{node.domain}::{node.op_type}" for node in nodes if node.domain not in ("", "ai.onnx")}):
        raise RuntimeError(
            f"export_onnx: the model needs operators that are not part of ONNX: {', '.join(foreign)}. Replace the layers that "
            "use them"
        )
    found = {(o.domain or "ai.onnx"): o.version for o in model.opset_import}
    if found.get("ai.onnx") != opset:
        raise RuntimeError(f"export_onnx: torch wrote opset {found.get('ai.onnx')} instead of {opset}. Choose another opset")
    for each in (model, model.graph, *nodes, *model.graph.input, *model.graph.output, *model.graph.value_info):
        del each.metadata_props[:]
    onnx.helper.set_model_props(model, dict(metadata))
    onnx.save(model, file)
    onnx.checker.check_model(str(file))
    return dict(Counter(node.op_type for node in _nodes(model.graph)).most_common())


def write_units_alone(onnx: Any, file: Path, copy: Path, element_types: list[int]) -> list[str]:
    """Write a copy whose PWLUs have their own inputs ``enter_k`` and outputs ``leave_k``; return the names of the PWLUs.

    The nodes of the PWLUs are the same as in the file. So each PWLU can be run on values from all of its segments, which the
    network may never produce. A unit that is called twice appears twice, in call order.
    """
    model = onnx.load(file, load_external_data=False)
    graph, value = model.graph, onnx.helper.make_tensor_value_info
    enters = [node for node in graph.node if (node.domain, node.op_type) == (MARKS, "Enter")]
    leaves = [node for node in graph.node if (node.domain, node.op_type) == (MARKS, "Leave")]
    results: dict[str, list[str]] = {_unit_of(leave): [] for leave in leaves}
    for leave in leaves:
        results[_unit_of(leave)].append(leave.input[0])
    names = {node.output[0]: node.input[0] for node in leaves}
    del graph.output[:]
    new_nodes = []
    for k, (enter, element_type) in enumerate(zip(enters, element_types, strict=False)):
        names[enter.output[0]] = f"enter_{k}"
        graph.input.append(value(f"enter_{k}", element_type, None))
        graph.output.append(value(f"leave_{k}", element_type, None))
        new_nodes.append((results[_unit_of(enter)].pop(0), f"leave_{k}"))
    for node in (*enters, *leaves):
        graph.node.remove(node)
    _rename(graph, names)
    for result, name in new_nodes:
        graph.node.append(onnx.helper.make_node("Identity", [_resolve(names, result)], [name]))
    del graph.value_info[:]
    onnx.save(model, copy)
    return [_unit_of(enter) for enter in enters]


def _unit_of(mark: Any) -> str:
    return next(a.s.decode() for a in mark.attribute if a.name == "unit")


def _resolve(names: dict[str, str], name: str) -> str:
    """Follow renamings to the final name, through consecutive marks."""
    while name in names:
        name = names[name]
    return name


def _rename(graph: Any, names: dict[str, str]) -> None:
    for node in _nodes(graph):
        for i, name in enumerate(node.input):
            node.input[i] = _resolve(names, name)


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from _nodes(inner)
