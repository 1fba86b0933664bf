"""Replace PWLUs with 8-bit inputs by tables of 256 entries per channel."""

import itertools
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from pwlu import ops
from pwlu.common.reports import RowReport
from pwlu.common.text import columns

_QUANTISE = ("quantized_decomposed::quantize_per_tensor", "quantized_decomposed::quantize_per_channel")
_DEQUANTISE = ("quantized_decomposed::dequantize_per_tensor", "quantized_decomposed::dequantize_per_channel")
_FLOW = "prepare_pt2e with pwlu.integrations.pt2e.PWLUQuantizer, calibrate, convert_pt2e"


@dataclass
class Tabulated:
    """One call of a PWLU.

    Attributes:
        name: name of the PWLU.
        rows: the number of rows of its table: one per channel, or one for all. 0 if it has no table.
        given: the dtype of its input, such as ``"uint8"``.
        gives: the dtype of its output. It is ``"float32"`` unless all users of the output quantize it in the same way.
        reason: why it has no table.
    """

    name: str
    rows: int = 0
    given: str = ""
    gives: str = ""
    reason: str = ""


@dataclass
class Tables(RowReport[Tabulated], rows="calls"):
    """The report of :func:`tabulate_`: every call of a PWLU, in graph order. Prints as a table; iterates over calls.

    Attributes:
        model: class name of the model.
        calls: one :class:`Tabulated` per call.
    """

    model: str
    calls: list[Tabulated]

    @property
    def tabulated(self) -> list[Tabulated]:
        """Return the calls that are tables now."""
        return [call for call in self.calls if call.rows]

    def __str__(self) -> str:
        rows = [
            (call.name, f"{call.rows} x 256, {call.given} -> {call.gives}" if call.rows else "none", call.reason)
            for call in self.calls
        ]
        summary = f"{self.model}: {len(self.tabulated)} of {len(self)} PWLUs are tables"
        return "\n".join([*columns(("name", "table", "why"), rows), summary])


class _Plan(NamedTuple):
    """The plan to replace a call: ``table[starts + q]`` takes the place of the nodes in `replaced`.

    q is the quantized input of the call. ``table``: (256 rows,). ``starts``: for each row, the index of its entry for q = 0, in
    a shape that broadcasts.
    """

    call: fx.Node
    entry: Tabulated
    replaced: list[fx.Node]
    table: Tensor
    starts: Tensor


def tabulate_(model: fx.GraphModule) -> Tables:
    """Replace every PWLU with an 8-bit input by a table lookup, in place: y_q = table[c, x_q].

    table[c, q] = quantize(PWLU_c(dequantize(q))) for all 256 values q of an 8-bit integer and all channels c. The operators of
    the model compute the entries, so the outputs of the model do not change by a single bit. If the output of a PWLU is not
    quantized, its table holds floating-point values.

    The lookup is one aten operator, so the compiled or exported model runs without pwlu. Compile the model with
    ``torch.compile`` (with ``torch._inductor.config.freezing = True``) or AOTInductor.

    Args:
        model: a model quantized by PyTorch's PT2E flow, as ``convert_pt2e`` returns it. Its PWLUs must not be fused
            (:func:`pwlu.fuse_`): each is one operator of the graph.

    Returns:
        A report: which PWLUs are tables now, and why the others are not.

    Raises:
        TypeError: if the model is not an ``fx.GraphModule``.
        ValueError: if the graph has no PWLU, or none with an 8-bit input.

    Example:
        ```python
        prepared = prepare_pt2e(torch.export.export(model.eval(), (sample,)).module(), PWLUQuantizer(quantizer))
        prepared(images)  # calibrate
        quantized = convert_pt2e(prepared)
        print(pwlu.tabulate_(quantized))
        ```
    """
    if not isinstance(model, fx.GraphModule):
        raise TypeError(
            f"tabulate_: the model must be the graph that convert_pt2e returns, not {type(model).__name__}. Use {_FLOW}"
        )
    calls = [node for node in model.graph.nodes if node.target is ops.forward]
    if not calls:
        raise ValueError(
            "tabulate_: the graph has no PWLU. Export and quantize the model without pwlu.fuse_, which splits PWLUs into "
            "smaller operators"
        )
    plans = [_plan(model, node) for node in calls]  # make all plans before the model changes, in case one fails
    entries = [plan.entry if isinstance(plan, _Plan) else plan for plan in plans]
    report = Tables(type(model).__name__, entries)
    if not report.tabulated:
        raise ValueError(f"tabulate_: no PWLU has an 8-bit input. To quantize it, use {_FLOW}\n{report}")
    made = [plan for plan in plans if isinstance(plan, _Plan)]
    owners = {_owner(plan.call) for plan in made}
    for plan in made:
        _apply_plan(model, plan)
    model.graph.eliminate_dead_code()
    for owner in owners:
        _remove_unused(model, owner)
    model.graph.lint()
    model.recompile()
    return report


def _plan(model: fx.GraphModule, call: fx.Node) -> _Plan | Tabulated:
    entry = Tabulated(_owner(call) or call.name, reason=_why_not(model, call))
    if entry.reason:
        return entry
    before: Any = call.args[0]
    ndim = call.meta["val"].ndim
    steps = [(node, _arguments(model, node)) for node in (before, call, _common_quantiser(model, call)) if node is not None]
    if len(_dims(steps, ndim)) > 1:  # the scales of the output are along another dimension: quantize after the lookup
        steps = steps[:2]
    dims = _dims(steps, ndim)
    if len(dims) > 1:
        entry.reason = f"its input has scales along dimension {dims[0]}, but the PWLU has functions along dimension {dims[1]}"
        return entry
    (_, given), (_, unit), *after = steps
    entry.rows = max(_channels(arguments) for _, arguments in steps)
    limits = torch.iinfo(given["dtype"])
    numbers = torch.arange(limits.min, limits.max + 1, device=unit["weight"].device).to(given["dtype"])
    value = numbers[:, None].repeat(1, entry.rows)
    with torch.no_grad():
        for node, arguments in steps:
            value = _run(node, arguments, value)
    entry.given, entry.gives = (str(tensor.dtype).removeprefix("torch.") for tensor in (numbers, value))
    starts = torch.arange(entry.rows, dtype=torch.int32, device=value.device) * 256 - limits.min
    starts = starts.reshape(-1, *[1] * (ndim - 1 - dims[0])) if dims else starts.reshape(())
    return _Plan(call, entry, list(call.users) if after else [call], value.t().reshape(-1), starts)


def _why_not(model: fx.GraphModule, call: fx.Node) -> str:
    """Return why this PWLU cannot become a table; empty if it can."""
    before = call.args[0]
    if not isinstance(before, fx.Node) or _operator(before) not in _DEQUANTISE:
        return "its input is not quantized"
    given = _arguments(model, before)
    if given["dtype"] not in (torch.uint8, torch.int8):
        return f"its input is quantized to {given['dtype']}".replace("torch.", "") + ", not to 8 bits"
    if _any_computed(given):
        return "the scale of its input is computed at run time"
    if _any_computed(_arguments(model, call)):
        return "its parameters are computed at run time"
    return "" if "val" in call.meta else "the graph does not record the number of dimensions of its input"


def _common_quantiser(model: fx.GraphModule, call: fx.Node) -> fx.Node | None:
    """Return a node that quantizes the output if all users of the output quantize it in the same way; else None."""
    users = list(call.users)
    if not users or _operator(users[0]) not in _QUANTISE or _any_computed(_arguments(model, users[0])):
        return None
    first, *others = ((user.target, user.args, user.kwargs) for user in users)
    return users[0] if all(other == first for other in others) else None


def _operator(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _arguments(model: nn.Module, node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a node by name, except the first. Replace constants of the model by their values."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    given: dict[str, Any] = dict(zip(names[1:], node.args[1:], strict=False)) | node.kwargs
    constants = {name: value.target for name, value in given.items() if isinstance(value, fx.Node) and value.op == "get_attr"}
    return given | {name: attrgetter(str(path))(model) for name, path in constants.items()}


def _any_computed(arguments: dict[str, Any]) -> bool:
    return any(isinstance(value, fx.Node) for value in arguments.values())


def _dims(steps: list[tuple[fx.Node, dict[str, Any]]], ndim: int) -> list[int]:
    """Return the distinct dimensions along which these operators have channels."""
    given = [arguments for _, arguments in steps if _channels(arguments) > 1]
    return list(dict.fromkeys(arguments["axis" if "axis" in arguments else "channel_dim"] % ndim for arguments in given))


def _channels(arguments: dict[str, Any]) -> int:
    if "channel_dim" in arguments:
        return arguments["weight"].numel() // (arguments["intervals"] + 5)
    return arguments["scales"].numel() if "axis" in arguments else 1


def _run(node: fx.Node, arguments: dict[str, Any], value: Tensor) -> Tensor:
    """Apply the operator of a node to all values (256, rows), with channels in dimension 1."""
    target: Any = node.target
    moved = {name: 1 for name in ("axis", "channel_dim") if name in arguments}
    return target(**{target._schema.arguments[0].name: value}, **arguments | moved)


def _apply_plan(model: fx.GraphModule, plan: _Plan) -> None:
    graph, owner = model.graph, _owner(plan.call)
    dequantised: Any = plan.call.args[0]
    with graph.inserting_before(plan.call):
        starts, table = _constant(model, owner, "starts", plan.starts), _constant(model, owner, "table", plan.table)
        # Use one 32-bit index: in a compiled network, two indices take a tenth more time, and 64-bit indices a sixth.
        number = graph.call_function(torch.ops.aten.to.dtype, (dequantised.args[0], torch.int32))
        place = graph.call_function(torch.ops.aten.add.Tensor, (number, starts))
        look_up = graph.call_function(torch.ops.aten.index.Tensor, (table, [place]))
    look_up.meta = dict(plan.replaced[0].meta)
    for node in plan.replaced:
        node.replace_all_uses_with(look_up)


def _constant(model: fx.GraphModule, owner: str, what: str, value: Tensor) -> fx.Node:
    module = model.get_submodule(owner)
    names = (what if count == 0 else f"{what}_{count}" for count in itertools.count())
    name = next(name for name in names if not hasattr(module, name))  # a PWLU that is called twice has two tables
    module.register_buffer(name, value)
    return model.graph.get_attr(f"{owner}.{name}".removeprefix("."))


def _owner(call: fx.Node) -> str:
    """Return the module that holds the parameters of the call; empty if they are not the model's."""
    names = [str(node.target) for node in call.all_input_nodes if node.op == "get_attr"]
    return names[0].rpartition(".")[0] if names else ""


def _remove_unused(model: fx.GraphModule, owner: str) -> None:
    """Remove parameters and buffers of a PWLU that nothing uses any more."""
    module = model.get_submodule(owner)
    used = {node.target for node in model.graph.nodes if node.op == "get_attr"}
    for name in dict([*module.named_parameters(), *module.named_buffers()]):
        if f"{owner}.{name}".removeprefix(".") not in used:
            holder, _, last = name.rpartition(".")
            delattr(module.get_submodule(holder), last)
