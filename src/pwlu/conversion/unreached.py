"""Activations that the sample did not reach: modules that were not called, calls in the source that did not happen."""

import ast
from collections.abc import Iterator
from types import FunctionType

from torch import nn

from pwlu.conversion.conversion_report import Site
from pwlu.conversion.kinds import ARGUMENTS, recognise_module
from pwlu.conversion.probing import stateless
from pwlu.conversion.rewrite import NotPossible, definition, original, rewritten_places
from pwlu.conversion.sample_runs import Recorded
from pwlu.conversion.sites import Rules, joined
from pwlu.conversion.source import innermost
from pwlu.conversion.tracing import Call, registrations, stateless_leaf

_REASON = "the sample reaches it in neither training nor evaluation mode"
_LIBRARIES = frozenset({"F", "functional", "torch"})


def unreached(model: nn.Module, recorded: Recorded, reached: set[str], rules: Rules) -> list[Site]:
    """Sites that were not found in either mode. `reached`: the modules that were called, of those that may be activations."""
    calls = [call for calls in recorded.values() for call in calls]
    return [*_modules(model, reached, rules), *_calls(model, calls, rules)]


def _modules(model: nn.Module, reached: set[str], rules: Rules) -> Iterator[Site]:
    names = {kind.replace("_", ""): kind for kind in ARGUMENTS}
    for name, (_, _, module) in registrations(model).items():
        by_class = recognise_module(module, rules.kinds)
        kind = by_class[0] if by_class else names.get(type(module).__name__.lower()) if stateless_leaf(module) else None
        if name not in reached and kind is not None:
            yield Site(name, str(module), kind, action="unreached", reason=_REASON)


def _calls(model: nn.Module, calls: list[Call], rules: Rules) -> Iterator[Site]:
    """``F.relu(...)``, ``torch.relu(...)`` in methods of the model's classes; once a class."""
    sites = {call.module for call in calls}
    reached = {(call.location.filename, call.location.end) for call in calls}
    reached |= {place for module in model.modules() for place in rewritten_places(type(module))}  # by an earlier conversion
    seen: set[type] = set()
    for name, module in model.named_modules():
        cls = original(type(module))
        if cls in seen or cls.__module__.startswith("torch.nn.") or stateless(module) or name in sites:
            continue  # an activation is a site itself
        seen.add(cls)
        for function in _methods(cls):
            for call, kind in _written_in(function):
                place = (function.__code__.co_filename, (call.end_lineno, call.end_col_offset))
                if rules.includes(kind) and place not in reached:
                    where = f"{function.__qualname__}, line {call.lineno}"
                    was = ast.unparse(call.func)
                    yield Site(joined(name, kind), was, kind, source=where, action="unreached", reason=f"{where}: {_REASON}")


def _methods(cls: type) -> Iterator[FunctionType]:
    for klass in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for value in vars(klass).values():
            if isinstance(function := innermost(value), FunctionType):
                yield function


def _written_in(function: FunctionType) -> Iterator[tuple[ast.Call, str]]:
    """The calls of activations of torch in the source of a function, with their kinds."""
    try:
        tree = definition(function)
    except (NotPossible, SyntaxError):  # without source, nothing can be said
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            library, kind = node.func.value, node.func.attr.removesuffix("_")
            name = library.id if isinstance(library, ast.Name) else library.attr if isinstance(library, ast.Attribute) else ""
            if kind in ARGUMENTS and name in _LIBRARIES:
                yield node, kind
