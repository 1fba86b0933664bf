"""Rewriting a method so that one call in it goes to another module, for one instance: ``F.relu(x)`` becomes ``self.relu(x)``.

The instance gets a class of its own, derived from the one it had and of the same name, with the rewritten methods; so
``isinstance``, hooks and everything else stay as they were. Only the expressions change: source lines, globals, closures and
defaults are those of the original method. The class is made anew from the source when an instance is unpickled elsewhere.
"""

import __future__

import ast
import builtins
import copy
import functools
import hashlib
import linecache
import types
from collections.abc import Iterator, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from pwlu.conversion.source import innermost, nested

_FUTURES = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag, __future__.all_feature_names, 0
)


class NotPossible(Exception):
    """A call that cannot be rewritten; the text says why."""


class Edit(NamedTuple):
    """One call to be rewritten: its method, where it ends (line counted from the method's first), the child to call instead."""

    method: str
    end: tuple[int, int]
    child: str
    of_tensor: bool  # x.relu() rather than F.relu(x)
    digest: str  # of the method's source


def plan(cls: type, code: CodeType, end: tuple[int, int] | None, child: str, of_tensor: bool) -> Edit:
    """The edit of the call that ends there, in a method of that class; NotPossible if there is something in the way."""
    if end is None:
        raise NotPossible("Python was told to keep no positions in the code (-X no_debug_ranges)")
    name, function = _find_method(cls, code)
    tree = definition(function)
    edit = Edit(name, (end[0] - function.__code__.co_firstlineno, end[1]), child, of_tensor, _digest(tree))
    rewritten(original(cls), (edit,))  # all that can go wrong goes wrong here
    return edit


def rewrite_(module: nn.Module, edit: Edit) -> None:
    """Give the module a class in which this call, and those rewritten before, go to its children."""
    cls = type(module)
    module.__class__ = rewritten(original(cls), tuple(sorted({*getattr(cls, "_pwlu_edits", ()), edit})))


def original(cls: type) -> type:
    """The class as it was before anything was rewritten."""
    return cls.__dict__.get("_pwlu_original", cls)


@functools.cache
def rewritten(cls: type, edits: tuple[Edit, ...]) -> type:
    """A class derived from `cls`, of the same name, in which `edits` are made."""
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": _reduce,
        "_pwlu_original": cls,
        "_pwlu_edits": edits,
    }
    for name in dict.fromkeys(edit.method for edit in edits):
        outer = _unedited(cls, name)
        inner = innermost(outer)
        of_method = [edit for edit in edits if edit.method == name]
        tree = copy.deepcopy(definition(inner))
        if any(edit.digest != _digest(tree) for edit in of_method):
            raise RuntimeError(
                f"pwlu: the source of {cls.__qualname__}.{name} is not what it was when the model was converted. "
                "Convert again: make the model, pwlu.convert_(model, sample), and load its state dict."
            )
        new = _replaced(outer, inner, _Rewriter(of_method, inner.__code__).function(inner, tree))
        body |= {alias: new for alias in _names(cls) if _unedited(cls, alias) is outer}
    try:
        return types.new_class(cls.__name__, (_Unannounced, cls), exec_body=lambda namespace: namespace.update(body))
    except Exception as error:
        raise NotPossible(f"no class can be derived from {cls.__qualname__} ({error})") from error


class _Unannounced(nn.Module):
    """Keeps ``__init_subclass__`` of the class from being told: that is often where classes are registered by their names."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def rewritten_places(cls: type) -> Iterator[tuple[str, tuple[int, int]]]:
    """File and end of the calls that were rewritten in this class."""
    for edit in getattr(cls, "_pwlu_edits", ()):
        code = innermost(_unedited(cls, edit.method)).__code__
        yield code.co_filename, (edit.end[0] + code.co_firstlineno, edit.end[1])


def _reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
    cls = type(self)
    return _rebuild, (cls._pwlu_original, cls._pwlu_edits), self.__getstate__()  # type: ignore[attr-defined]


def _rebuild(cls: type, edits: Sequence[Sequence[Any]]) -> nn.Module:
    new: Any = rewritten(cls, tuple(Edit(*edit) for edit in edits))
    return new.__new__(new)


# Methods and their source.


def _lookup(cls: type, name: str) -> Any:
    """What `name` means in the class, undecorated by Python's lookup."""
    return next(vars(klass)[name] for klass in cls.__mro__ if name in vars(klass))


def _unedited(cls: type, name: str) -> Any:
    """The same, or what it was before an edit: the class may be derived from an edited one, as by torch's parametrizations."""
    return next(vars(klass)[name] for klass in cls.__mro__ if name in vars(klass) and original(klass) is klass)


def _names(cls: type) -> list[str]:
    return list(dict.fromkeys(name for klass in cls.__mro__ for name in vars(klass)))


def _find_method(cls: type, code: CodeType) -> tuple[str, FunctionType]:
    for klass in cls.__mro__:
        for name, value in vars(klass).items():
            function = innermost(value)
            if isinstance(function, FunctionType) and function.__code__ is code:
                if _lookup(cls, name) is not value:
                    raise NotPossible(
                        f"it is in {klass.__name__}.{name}, which {cls.__name__} overrides and calls through super()"
                    )
                return name, innermost(_unedited(klass, name))
    raise NotPossible(f"it is in {code.co_qualname}, which is not a method of {cls.__name__}")


@functools.cache
def _parsed(source: str, flags: int) -> tuple[dict[tuple[str, int], ast.FunctionDef], frozenset[CodeType]]:
    """The functions in a file, by name and first line, and what they are compiled to."""
    try:
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        codes = nested(compile(source, "", "exec", flags=flags, dont_inherit=True))
    except SyntaxError:
        return {}, frozenset()
    return {(node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)])): node for node in nodes}, frozenset(codes)


def definition(function: FunctionType) -> ast.FunctionDef:
    """The source of the function, which must be what was compiled: files are edited while a program runs."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename)
    if not lines:
        raise NotPossible(f"the source {code.co_filename} cannot be read")
    nodes, codes = _parsed("".join(lines), code.co_flags & _FUTURES)
    node = nodes.get((code.co_name, code.co_firstlineno))
    if node is None or not (code in codes or _asserts(node)):
        raise NotPossible(f"the source of {code.co_qualname} is not what it was when {code.co_filename} was imported")
    return node


def _asserts(tree: ast.AST) -> bool:
    """Whether there is an assert, for which pytest compiles something else than is written."""
    return any(isinstance(node, ast.Assert) for node in ast.walk(tree))


def _digest(tree: ast.AST) -> str:
    return hashlib.sha256(ast.dump(tree, include_attributes=False).encode()).hexdigest()[:16]


class _Rewriter(ast.NodeTransformer):
    """Replaces the calls that end at given places by calls of children of self."""

    def __init__(self, edits: Sequence[Edit], code: CodeType) -> None:
        self.edits = {(edit.end[0] + code.co_firstlineno, edit.end[1]): edit for edit in edits}
        self.code, self.done = code, set[Edit]()

    def run(self, tree: ast.FunctionDef) -> ast.FunctionDef:
        """The tree with all edits made."""
        tree = self.visit(tree)
        if missing := set(self.edits.values()) - self.done:
            raise NotPossible(f"no call was found at {', '.join(str(edit.end) for edit in missing)} of {self.code.co_qualname}")
        return tree

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if isinstance(call, ast.Call) and (call.end_lineno, call.end_col_offset) in self.edits:
            raise NotPossible("its result is not used")
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        edit = self.edits.get((node.end_lineno or 0, node.end_col_offset or 0))
        self.generic_visit(node)
        if edit is None:
            return node
        self.done.add(edit)
        child = ast.Attribute(ast.Name(self.code.co_varnames[0], ast.Load()), edit.child, ast.Load())
        new = ast.Call(child, [_argument(node, edit.of_tensor)], [])
        for part in (child, child.value, new):
            ast.copy_location(part, node)
        return new

    def function(self, old: FunctionType, tree: ast.FunctionDef) -> FunctionType:
        """The method with all edits made, in the surroundings of the old one."""
        code = _compiled(self.run(tree), old)
        cells = dict(zip(old.__code__.co_freevars, old.__closure__ or (), strict=True))
        new = FunctionType(
            code.replace(co_qualname=old.__code__.co_qualname),
            old.__globals__,
            old.__name__,
            old.__defaults__,
            tuple(cells[name] for name in code.co_freevars),
        )
        return _dressed(new, old)


def _compiled(tree: ast.FunctionDef, old: FunctionType) -> CodeType:
    """The code of the tree in the surroundings of the old function."""
    tree.decorator_list = []
    # Compiled inside a class, for names that begin with two underscores, and a function that has its free variables.
    free = [name for name in old.__code__.co_freevars if name != "__class__"]
    arguments = ast.arguments([], [ast.arg(name) for name in free], None, [], [], None, [])
    # Underscores before its name change nothing in it, and let the method mean the class itself where it names that.
    class_name, used = _class_around(old.__code__), {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    while class_name in used or class_name in free:
        class_name = f"_{class_name}"
    around = ast.ClassDef(class_name, [], [], [tree], [])
    factory = ast.FunctionDef("_", arguments, [around], [])
    for part in (factory, around):
        if hasattr(part, "type_params") or "type_params" in part._fields:
            part.type_params = []
    module = ast.fix_missing_locations(ast.Module([factory], []))
    compiled = compile(module, old.__code__.co_filename, "exec", flags=old.__code__.co_flags & _FUTURES, dont_inherit=True)
    return next(c for c in nested(compiled) if c.co_name == tree.name and c.co_firstlineno >= old.__code__.co_firstlineno)


def _class_around(code: CodeType) -> str:
    """The class that the function is written in; "_", which changes no name, if there is none."""
    names = code.co_qualname.split(".")[:-1]
    while names and names[-1] == "<locals>":
        del names[-2:]  # and the function that it is local to
    return names[-1] if names else "_"


def _argument(node: ast.Call, of_tensor: bool) -> ast.expr:
    """What the activation is applied to."""
    if isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id):
        raise NotPossible(f"it is called by {node.func.id}(...), not by the code itself")
    if of_tensor and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value).split(".")[-1] != "Tensor":
        return node.func.value  # x.clamp(0), unlike torch.Tensor.clamp(x, 0)
    if node.args:
        if isinstance(node.args[0], ast.Starred):
            raise NotPossible("its arguments are given as *args")
        return node.args[0]
    named = [keyword.value for keyword in node.keywords if keyword.arg in ("input", "x")]
    if named:
        return named[0]
    raise NotPossible("the tensor it is applied to is not among its arguments")


def _replaced(outer: Any, inner: FunctionType, new: FunctionType) -> Any:
    """The decorated function `outer` with `inner` replaced, if its decorators are functions that keep it in a cell."""
    if outer is inner:
        return new
    if not isinstance(outer, FunctionType) or outer.__closure__ is None:
        raise NotPossible(f"it is in a method decorated by something that is no function, {type(outer).__name__}")
    changed = {
        index: _replaced(cell.cell_contents, inner, new) for index, cell in enumerate(outer.__closure__) if _holds(cell, inner)
    }
    if not changed:
        raise NotPossible(f"the decorator of {inner.__qualname__} hides it")
    cells = tuple(CellType(changed[i]) if i in changed else cell for i, cell in enumerate(outer.__closure__))
    copied = FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, cells)
    _dressed(copied, outer).__wrapped__ = changed[next(iter(changed))]  # type: ignore[attr-defined]
    return copied


def _dressed(new: FunctionType, old: FunctionType) -> FunctionType:
    """With the name, documentation, annotations and attributes of the old one."""
    for name in ("__kwdefaults__", "__doc__", "__module__", "__qualname__", "__type_params__"):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))
    lazily = hasattr(old, "__annotate__")  # from Python 3.14 on annotations are a function
    name = "__annotate__" if lazily else "__annotations__"
    setattr(new, name, getattr(old, name))
    new.__dict__.update(old.__dict__)
    return new


def _holds(cell: CellType, inner: FunctionType) -> bool:
    try:
        return innermost(cell.cell_contents) is inner
    except ValueError:  # empty
        return False
