"""Rewrite a method of one instance so that one call goes to a child module: ``F.relu(x)`` becomes ``self.relu(x)``.

The instance gets its own class: a subclass of its former class, with the same name and the rewritten methods. So
``isinstance`` and hooks keep working. Only the call changes: source lines, globals, closures and defaults are those of the
original method. Unpickling builds the class again from the source.
"""

import __future__

import ast
import builtins
import copy
import functools
import hashlib
import inspect
import linecache
import types
from collections.abc import Iterator, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from pwlu.conversion.source import nested_code

_FUTURES = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag, __future__.all_feature_names, 0
)


class CannotRewrite(Exception):
    """Raised if a call cannot be rewritten. The message says why."""


class Edit(NamedTuple):
    """One call to rewrite: its method, its end (lines counted from the first line of the method), and the child to call."""

    method: str
    end: tuple[int, int]
    child: str
    on_tensor: bool  # whether the call is x.relu() rather than F.relu(x)
    digest: str  # hash of the method's source, to notice later edits


def plan(cls: type, code: CodeType, end: tuple[int, int] | None, on_tensor: bool) -> Edit:
    """Return the edit of the call that ends there, in a method of `cls`, without the name of the child.

    Raise CannotRewrite if that is not possible.
    """
    if end is None:
        raise CannotRewrite("Python runs without code positions: start it without -X no_debug_ranges")
    name, function = _find_method(cls, code)
    tree = definition(function)
    edit = Edit(name, (end[0] - function.__code__.co_firstlineno, end[1]), "", on_tensor, _digest(tree))
    rewritten_class(original_class(cls), (edit,))  # raises now if the edit fails, before anything is changed
    return edit


def rewrite_(module: nn.Module, edit: Edit) -> None:
    """Give the module a class in which this call, and all calls rewritten before, go to its children."""
    cls = type(module)
    module.__class__ = rewritten_class(original_class(cls), tuple(sorted({*getattr(cls, "_pwlu_edits", ()), edit})))


def original_class(cls: type) -> type:
    """Return the class before any rewriting."""
    return cls.__dict__.get("_pwlu_original", cls)


@functools.cache
def rewritten_class(cls: type, edits: tuple[Edit, ...]) -> type:
    """Return a subclass of `cls` that has the same name and applies the edits."""
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": _reduce,
        "_pwlu_original": cls,
        "_pwlu_edits": edits,
    }
    for name in dict.fromkeys(edit.method for edit in edits):
        outer = _original_attribute(cls, name)
        inner = inspect.unwrap(outer)
        method_edits = [edit for edit in edits if edit.method == name]
        tree = copy.deepcopy(definition(inner))
        if any(edit.digest != _digest(tree) for edit in method_edits):
            raise RuntimeError(
                f"pwlu: the source of {cls.__qualname__}.{name} has changed since the model was converted. "
                "Create the model, convert it again with pwlu.convert_(model, sample), and load the state dict."
            )
        new = _replace_inner(outer, inner, _Rewriter(method_edits, inner.__code__).function(inner, tree))
        body |= {alias: new for alias in _attribute_names(cls) if _original_attribute(cls, alias) is outer}
    try:
        return types.new_class(cls.__name__, (_SkipInitSubclass, cls), exec_body=lambda namespace: namespace.update(body))
    except Exception as error:
        raise CannotRewrite(f"{cls.__qualname__} cannot be subclassed ({error})") from error


class _SkipInitSubclass(nn.Module):
    """Skips ``__init_subclass__`` of the original class, which often registers classes by name."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def rewritten_places(cls: type) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield file and end of the calls that were rewritten in this class."""
    for edit in getattr(cls, "_pwlu_edits", ()):
        code = inspect.unwrap(_original_attribute(cls, edit.method)).__code__
        yield code.co_filename, (edit.end[0] + code.co_firstlineno, edit.end[1])


def _reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
    cls = type(self)
    return _rebuild, (cls._pwlu_original, cls._pwlu_edits), self.__getstate__()  # type: ignore[attr-defined]


def _rebuild(cls: type, edits: Sequence[Sequence[Any]]) -> nn.Module:
    new: Any = rewritten_class(cls, tuple(Edit(*edit) for edit in edits))
    return new.__new__(new)


# Methods and their source.


def _original_attribute(cls: type, name: str) -> Any:
    """Return the raw attribute before any edit. Torch's parametrizations may have subclassed a rewritten class."""
    return next(vars(klass)[name] for klass in cls.__mro__ if name in vars(klass) and original_class(klass) is klass)


def _attribute_names(cls: type) -> list[str]:
    return list(dict.fromkeys(name for klass in cls.__mro__ for name in vars(klass)))


def _find_method(cls: type, code: CodeType) -> tuple[str, FunctionType]:
    for klass in cls.__mro__:
        for name, value in vars(klass).items():
            function = inspect.unwrap(value)
            if isinstance(function, FunctionType) and function.__code__ is code:
                if inspect.getattr_static(cls, name) is not value:
                    raise CannotRewrite(
                        f"it is in {klass.__name__}.{name}, which {cls.__name__} overrides and calls through super()"
                    )
                return name, inspect.unwrap(_original_attribute(klass, name))
    raise CannotRewrite(f"it is in {code.co_qualname}, which is not a method of {cls.__name__}")


@functools.cache
def _parse_functions(source: str, flags: int) -> tuple[dict[tuple[str, int], ast.FunctionDef], frozenset[CodeType]]:
    """Return the functions in a source file by name and first line, and the code objects they compile to."""
    try:
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        codes = nested_code(compile(source, "", "exec", flags=flags, dont_inherit=True))
    except SyntaxError:
        return {}, frozenset()
    return {(node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)])): node for node in nodes}, frozenset(codes)


def definition(function: FunctionType) -> ast.FunctionDef:
    """Return the syntax tree of the function. Raise if its file was edited since the import."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename)
    if not lines:
        raise CannotRewrite(f"the source {code.co_filename} cannot be read")
    nodes, codes = _parse_functions("".join(lines), code.co_flags & _FUTURES)
    node = nodes.get((code.co_name, code.co_firstlineno))
    if node is None or not (code in codes or _has_assert(node)):
        raise CannotRewrite(f"the source of {code.co_qualname} has changed since {code.co_filename} was imported")
    return node


def _has_assert(tree: ast.AST) -> bool:
    """Return whether there is an assert statement: pytest compiles these in its own way, so the code objects differ."""
    return any(isinstance(node, ast.Assert) for node in ast.walk(tree))


def _digest(tree: ast.AST) -> str:
    return hashlib.sha256(ast.dump(tree, include_attributes=False).encode()).hexdigest()[:16]


class _Rewriter(ast.NodeTransformer):
    """Replaces the calls that end at given places by calls of children of self."""

    def __init__(self, edits: Sequence[Edit], code: CodeType) -> None:
        self.edits = {(edit.end[0] + code.co_firstlineno, edit.end[1]): edit for edit in edits}
        self.code, self.done = code, set[Edit]()

    def run(self, tree: ast.FunctionDef) -> ast.FunctionDef:
        """Return the tree with all edits applied."""
        tree = self.visit(tree)
        if missing := set(self.edits.values()) - self.done:
            ends = ", ".join(str(edit.end) for edit in missing)
            raise CannotRewrite(f"no call was found at {ends} of {self.code.co_qualname}")
        return tree

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if isinstance(call, ast.Call) and (call.end_lineno, call.end_col_offset) in self.edits:
            raise CannotRewrite("its result is not used")
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        edit = self.edits.get((node.end_lineno or 0, node.end_col_offset or 0))
        self.generic_visit(node)
        if edit is None:
            return node
        self.done.add(edit)
        child = ast.Attribute(ast.Name(self.code.co_varnames[0], ast.Load()), edit.child, ast.Load())
        new = ast.Call(child, [_input_of_call(node, edit.on_tensor)], [])
        for part in (child, child.value, new):
            ast.copy_location(part, node)
        return new

    def function(self, old: FunctionType, tree: ast.FunctionDef) -> FunctionType:
        """Return the method with all edits applied, with the globals, defaults and closure of the old one."""
        code = _compile_like(self.run(tree), old)
        cells = dict(zip(old.__code__.co_freevars, old.__closure__ or (), strict=True))
        new = FunctionType(
            code.replace(co_qualname=old.__code__.co_qualname),
            old.__globals__,
            old.__name__,
            old.__defaults__,
            tuple(cells[name] for name in code.co_freevars),
        )
        return _copy_metadata(new, old)


def _compile_like(tree: ast.FunctionDef, old: FunctionType) -> CodeType:
    """Return the code of the tree, compiled in the scope of the old function."""
    tree.decorator_list = []
    # Wrap it in a class, which mangles names with two leading underscores, and in a function, which has its free variables.
    free = [name for name in old.__code__.co_freevars if name != "__class__"]
    arguments = ast.arguments([], [ast.arg(name) for name in free], None, [], [], None, [])
    # Leading underscores in the name of the class do not change mangling, and avoid names that the method uses.
    class_name, used = _enclosing_class(old.__code__), {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    while class_name in used or class_name in free:
        class_name = f"_{class_name}"
    around = ast.ClassDef(class_name, [], [], [tree], [])
    factory = ast.FunctionDef("_", arguments, [around], [])
    for part in (factory, around):
        if hasattr(part, "type_params") or "type_params" in part._fields:
            part.type_params = []
    module = ast.fix_missing_locations(ast.Module([factory], []))
    compiled = compile(module, old.__code__.co_filename, "exec", flags=old.__code__.co_flags & _FUTURES, dont_inherit=True)
    return next(c for c in nested_code(compiled) if c.co_name == tree.name and c.co_firstlineno >= old.__code__.co_firstlineno)


def _enclosing_class(code: CodeType) -> str:
    """Return the name of the class that contains the function; "_", which mangles no names, if there is none."""
    names = code.co_qualname.split(".")[:-1]
    while names and names[-1] == "<locals>":
        del names[-2:]  # remove "<locals>" and the name of the function
    return names[-1] if names else "_"


def _input_of_call(node: ast.Call, on_tensor: bool) -> ast.expr:
    """Return the expression that the activation is applied to."""
    if isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id):
        raise CannotRewrite(f"it is called inside {node.func.id}(...), not directly")
    if on_tensor and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value).split(".")[-1] != "Tensor":
        return node.func.value  # x.clamp(0), unlike torch.Tensor.clamp(x, 0)
    if node.args:
        if isinstance(node.args[0], ast.Starred):
            raise CannotRewrite("its arguments are passed as *args")
        return node.args[0]
    named = [keyword.value for keyword in node.keywords if keyword.arg in ("input", "x")]
    if named:
        return named[0]
    raise CannotRewrite("its input is not among its arguments")


def _replace_inner(outer: Any, inner: FunctionType, new: FunctionType) -> Any:
    """Return the decorated function `outer` with `inner` replaced. Its decorators must be closures over it."""
    if outer is inner:
        return new
    if not isinstance(outer, FunctionType) or outer.__closure__ is None:
        raise CannotRewrite(f"the decorator of its method returns a {type(outer).__name__}, not a function")
    changed = {
        index: _replace_inner(cell.cell_contents, inner, new)
        for index, cell in enumerate(outer.__closure__)
        if _cell_holds(cell, inner)
    }
    if not changed:
        raise CannotRewrite(f"the decorator of {inner.__qualname__} does not keep the original function in its closure")
    cells = tuple(CellType(changed[i]) if i in changed else cell for i, cell in enumerate(outer.__closure__))
    copied = FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, cells)
    _copy_metadata(copied, outer).__wrapped__ = changed[next(iter(changed))]  # type: ignore[attr-defined]
    return copied


def _copy_metadata(new: FunctionType, old: FunctionType) -> FunctionType:
    """Copy name, docstring, annotations and attributes of the old function."""
    functools.update_wrapper(new, old)
    del new.__wrapped__  # type: ignore[attr-defined]
    new.__kwdefaults__ = old.__kwdefaults__
    return new


def _cell_holds(cell: CellType, inner: FunctionType) -> bool:
    try:
        return inspect.unwrap(cell.cell_contents) is inner
    except ValueError:  # the cell is empty
        return False
