"""Locate a call in the source: the module that makes it, the method, the position."""

import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

_TORCH = os.path.dirname(torch.__file__)
# Files whose frames lie between a model's code and the activation: module calls and wrappers of torch functions.
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
    """The place of a call in the source.

    Attributes:
        owner: the name of the module whose method makes the call; None if it is not in a method of a module.
        nearest: the name of the innermost module with a method on the stack.
        code: the code of the owner's method, or of the function.
        filename: the file.
        line: the line.
        end: line and column after the call, which identify it; None if Python does not record positions.
    """

    owner: str | None
    nearest: str
    code: CodeType
    filename: str
    line: int
    end: tuple[int, int] | None

    def __str__(self) -> str:
        return f"{os.path.basename(self.filename)}:{self.line}"


def call_location(frame: FrameType, names: Mapping[nn.Module, str]) -> Location:
    """Return the location of the call, outside of torch's own code, that led to `frame`."""
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
        module = _method_owner(outer)
        cls: Any = type(module)
        if module is not None and module in names and _has_method(cls, outer.f_code):
            nearest = names[module]
            if code is outer.f_code or code in nested_code(outer.f_code):
                owner, method = nearest, outer.f_code
            break
        outer = outer.f_back
    return Location(owner, nearest, method, code.co_filename, line or code.co_firstlineno, end)


def _method_owner(frame: FrameType) -> nn.Module | None:
    """Return the module whose method this frame runs; None if it runs no method of a module."""
    code = frame.f_code
    value = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return value if isinstance(value, nn.Module) else None


@functools.cache
def _has_method(cls: type, code: CodeType) -> bool:
    values = (inspect.unwrap(value) for klass in cls.__mro__ for value in vars(klass).values())
    return any(getattr(value.fget if isinstance(value, property) else value, "__code__", None) is code for value in values)


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of all functions defined inside this one."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from nested_code(constant)
