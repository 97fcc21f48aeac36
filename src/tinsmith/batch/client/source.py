"""The text of one function or class, alone: cut out of its file, and checked that it can live without that file.

A definition that runs elsewhere has no module around it. What it refers to outside itself is found with `symtable`,
the compiler's own resolution of scopes, rather than by guessing from names. Nothing here runs the source.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import symtable
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

# Names that every module has.
MODULE_NAMES = frozenset({"__name__", "__file__", "__builtins__", "__doc__"})


class SourceUnavailableError(TypeError):
    """The text of a definition is in no file and no notebook cell."""


def definition_of(target: Callable[..., object]) -> Definition:
    """The syntax tree of a function or class, annotations of signatures and of local variables stripped.

    The source is wrapped rather than dedented when it is indented: the lines of a text in it keep their own spaces.
    """
    try:
        source = inspect.getsource(target)
    except (OSError, TypeError):
        raise SourceUnavailableError(
            f"unable to retrieve source code of {_name(target)}: it was not defined in a file or a notebook cell; "
            'move it to a file, or pass serializer="cloudpickle"'
        ) from None
    wrapped = f"if True:\n{source}" if source[:1].isspace() else source
    try:
        tree = ast.parse(wrapped)
    except SyntaxError:
        raise ValueError(
            f"the source of {_name(target)} does not stand alone (is it a lambda, or part of a longer line?); "
            "write it as a def of its own"
        ) from None
    for node in ast.walk(tree):
        if isinstance(node, Definition) and node.name == _name(target):
            _strip_annotations(node)
            return node
    raise ValueError(f"the source of {_name(target)} is not a def; write it as a def of its own")


def text_of(definition: Definition) -> str:
    return ast.unparse(ast.fix_missing_locations(definition))


def globals_of(definition: Definition) -> list[str]:
    """The names that a definition takes from outside itself and the builtins' namespace, sorted.

    Left out: its own name, and what it assigns itself after `global`.
    """
    table = symtable.symtable(text_of(definition), "<definition>", "exec")
    referenced: set[str] = set()
    assigned: set[str] = {definition.name}
    for scope in _scopes(table):
        for symbol in scope.get_symbols():
            if symbol.is_global() and symbol.is_referenced():
                referenced.add(symbol.get_name())
            if symbol.is_declared_global() and (symbol.is_assigned() or symbol.is_imported()):
                assigned.add(symbol.get_name())
    return sorted(referenced - assigned - MODULE_NAMES)


def is_builtin(name: str, namespace: Mapping[str, object]) -> bool:
    """Whether a name means the builtin of that name; a module can put something else in its place."""
    if not hasattr(builtins, name):
        return False
    return name not in namespace or namespace[name] is getattr(builtins, name)


def decorators_of(definition: Definition, namespace: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Each decorator as it is written, with what it is in `namespace` (None if that cannot be told)."""
    for node in definition.decorator_list:
        yield ast.unparse(node), resolve(node.func if isinstance(node, ast.Call) else node, namespace)


def resolve(node: ast.expr, namespace: Mapping[str, object]) -> object:
    """What a dotted name means; None for anything else."""
    if isinstance(node, ast.Name):
        return namespace.get(node.id, getattr(builtins, node.id, None))
    if isinstance(node, ast.Attribute):
        return getattr(resolve(node.value, namespace), node.attr, None)
    return None


def free_names(target: Callable[..., object]) -> list[str]:
    """The names that a function, or a method of a class, takes from a function around it."""
    functions: Iterable[object] = vars(target).values() if inspect.isclass(target) else [target]
    found: dict[str, None] = {}
    for function in functions:
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None:
            found.update(dict.fromkeys(code.co_freevars))
    return [name for name in found if name not in ("__class__", _name(target))]


def namespace_of(target: Callable[..., object]) -> dict[str, object]:
    """The globals around a definition, under its closure."""
    if isinstance(target, FunctionType):
        return {**target.__globals__, **_closure(target)}
    module = inspect.getmodule(target)
    around: dict[str, object] = dict(vars(module)) if module is not None else {}
    for function in vars(target).values():
        if isinstance(function, FunctionType):
            around.update(_closure(function))
    return around


def fix_for(name: str, namespace: Mapping[str, object]) -> str:
    """One line saying what to do about a name that a definition must not take from outside."""
    if name not in namespace:
        return f"  - {name!r} is not defined: define or import it inside"
    value = namespace[name]
    if isinstance(value, ModuleType):
        return f"  - {name!r} is a module: import it inside"
    if isinstance(value, bool | int | float | str) or value is None:
        shown = textwrap.shorten(repr(value), 60)
        return f"  - {name}={shown} is a constant: take it as a parameter and pass fn_kwargs={{{name!r}: {shown}}}"
    if inspect.isclass(value) or callable(value):
        return f"  - {name!r} is a {'class' if inspect.isclass(value) else 'function'}: define or import it inside"
    return f"  - {name!r} is a {type(value).__name__}: make it inside"


def _closure(function: FunctionType) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet: a function that refers to itself, while it is decorated
            continue
    return found


def _name(target: object) -> str:
    return getattr(target, "__name__", repr(target))


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _scopes(child)


def _strip_annotations(definition: Definition) -> None:
    """Annotations may use names of the file, and do nothing in a function. Those of a class's own fields may matter
    (to a dataclass), and stay."""
    fields = {
        id(child)
        for node in ast.walk(definition)
        if isinstance(node, ast.ClassDef)
        for child in node.body
        if isinstance(child, ast.AnnAssign)
    }
    for node in ast.walk(definition):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign) and id(node) not in fields:
            node.annotation = ast.Constant(None)
