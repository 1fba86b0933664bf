"""Find activations that the sample did not reach: modules that were not called, and calls in the source that did not run."""

import ast
import inspect
from collections.abc import Iterator
from types import FunctionType

from torch import nn

from pwlu.conversion.conversion_report import Site
from pwlu.conversion.kinds import ARGUMENTS, recognise_module
from pwlu.conversion.probing import stateless
from pwlu.conversion.rewrite import CannotRewrite, definition, original_class, rewritten_places
from pwlu.conversion.sample_runs import Recorded
from pwlu.conversion.sites import Rules
from pwlu.conversion.tracing import Call, full_name, registrations, stateless_leaf

_REASON = "the sample does not reach it, in training or in evaluation mode"
_LIBRARIES = frozenset({"F", "functional", "torch"})


def unreached(model: nn.Module, recorded: Recorded, reached: set[str], rules: Rules) -> list[Site]:
    """Return the sites that no run reached. `reached`: names of the called modules that may be activations."""
    calls = [call for calls in recorded.values() for call in calls]
    return [*_unreached_modules(model, reached, rules), *_unreached_calls(model, calls, rules)]


def _unreached_modules(model: nn.Module, reached: set[str], rules: Rules) -> Iterator[Site]:
    names = {kind.replace("_", ""): kind for kind in ARGUMENTS}
    for name, (_, _, module) in registrations(model).items():
        by_class = recognise_module(module, rules.kinds)
        kind = by_class[0] if by_class else names.get(type(module).__name__.lower()) if stateless_leaf(module) else None
        if name not in reached and kind is not None:
            yield Site(name, str(module), kind, action="unreached", reason=_REASON)


def _unreached_calls(model: nn.Module, calls: list[Call], rules: Rules) -> Iterator[Site]:
    """Yield a site for every ``F.relu(...)`` or ``torch.relu(...)`` in the model's methods, once per class."""
    sites = {call.module for call in calls}
    reached = {(call.location.filename, call.location.end) for call in calls}
    reached |= {place for module in model.modules() for place in rewritten_places(type(module))}  # from earlier conversions
    seen: set[type] = set()
    for name, module in model.named_modules():
        cls = original_class(type(module))
        if cls in seen or cls.__module__.startswith("torch.nn.") or stateless(module) or name in sites:
            continue  # the module itself is a site
        seen.add(cls)
        for function in _methods(cls):
            for call, kind in _activation_calls(function):
                place = (function.__code__.co_filename, (call.end_lineno, call.end_col_offset))
                if rules.includes(kind) and place not in reached:
                    where = f"{function.__qualname__}, line {call.lineno}"
                    was = ast.unparse(call.func)
                    yield Site(full_name(name, kind), was, kind, source=where, action="unreached", reason=f"{where}: {_REASON}")


def _methods(cls: type) -> Iterator[FunctionType]:
    for klass in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for value in vars(klass).values():
            if isinstance(function := inspect.unwrap(value), FunctionType):
                yield function


def _activation_calls(function: FunctionType) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls of torch's activations in the source of a function, with their kinds."""
    try:
        tree = definition(function)
    except (CannotRewrite, SyntaxError):  # there is no source to search
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            library, kind = node.func.value, node.func.attr.removesuffix("_")
            name = library.id if isinstance(library, ast.Name) else library.attr if isinstance(library, ast.Attribute) else ""
            if kind in ARGUMENTS and name in _LIBRARIES:
                yield node, kind
