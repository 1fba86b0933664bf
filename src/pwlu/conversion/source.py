"""Where in the code a call stands: the module that owns it, the method, the position in the source."""

import functools
import os
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

_TORCH = os.path.dirname(torch.__file__)
# Between a model's code and the activation: the call of a module, and what functions of torch are wrapped in.
_MACHINERY = frozenset(
    os.path.join(_TORCH, *path.split("/"))
    for path in (
        "nn/modules/module.py",
        "nn/modules/activation.py",
        "nn/functional.py",
        "overrides.py",
        "_tensor.py",
        "_jit_internal.py",
    )
) | {os.path.join(os.path.dirname(__file__), name) for name in ("tracing.py", "sample_runs.py")}


class Location(NamedTuple):
    """A call in the source: its module (None if no method of a module contains it), the method's code, where the call ends."""

    owner: str | None
    nearest: str  # the module whose method led there
    code: CodeType  # of the method of the owner, or of the function
    filename: str
    line: int
    end: tuple[int, int] | None  # line and column after the call, which tells calls apart

    def __str__(self) -> str:
        return f"{os.path.basename(self.filename)}:{self.line}"


def caller(frame: FrameType, names: Mapping[nn.Module, str]) -> Location:
    """The call, outside of torch's own machinery, that led to `frame`."""
    place: FrameType | None = frame
    while place is not None and place.f_code.co_filename in _MACHINERY:
        place = place.f_back
    assert place is not None
    code, position = place.f_code, list(place.f_code.co_positions())[place.f_lasti // 2]
    line, end_line, _, end_column = position
    end = None if end_line is None or end_column is None else (end_line, end_column)
    owner, method, nearest = None, code, ""
    outer: FrameType | None = place
    while outer is not None:
        module = _self(outer)
        cls: Any = type(module)
        if module is not None and module in names and _has_method(cls, outer.f_code):
            nearest = names[module]
            if code is outer.f_code or code in nested(outer.f_code):
                owner, method = nearest, outer.f_code
            break
        outer = outer.f_back
    return Location(owner, nearest, method, code.co_filename, line or code.co_firstlineno, end)


def _self(frame: FrameType) -> nn.Module | None:
    """The module whose method this is, if it is one."""
    code = frame.f_code
    value = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return value if isinstance(value, nn.Module) else None


@functools.cache
def _has_method(cls: type, code: CodeType) -> bool:
    values = (innermost(value) for klass in cls.__mro__ for value in vars(klass).values())
    return any(getattr(value.fget if isinstance(value, property) else value, "__code__", None) is code for value in values)


def innermost(function: Any) -> Any:
    """The function inside its decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def nested(code: CodeType) -> Iterator[CodeType]:
    """The code of all functions written inside this one."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from nested(constant)
