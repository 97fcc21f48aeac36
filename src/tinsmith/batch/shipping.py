"""How code travels to workers: as the source of one function or class with the imports that it names, or as a pickle.

A definition travels as source if it needs nothing from outside itself but builtins and what workers import. Names are
found with `symtable`, the compiler's own resolution of scopes, so a definition that passes runs there without a
NameError. What workers may import is its caller's rule: names of tinsmith.batch for a function
(`client/functions.py`), names of any package for a reader or writer (`formats/registry.py`). Only workers call
`run_source` and `unpickle_callable`.
"""

from __future__ import annotations

import ast
import base64
import builtins
import contextlib
import hashlib
import inspect
import linecache
import pkgutil
import symtable
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from tinsmith.batch.client.identity import is_own_module
from tinsmith.errors import UserError

T = TypeVar("T")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

# Names that every module has.
MODULE_NAMES = frozenset({"__name__", "__file__", "__builtins__", "__doc__"})

PARSER_LOCK = threading.Lock()
PARSER_TRIES = 5


class ShippedCodeError(UserError, ValueError):
    """Code that was sent is not as it was, or does not run."""


class SourceUnavailableError(TypeError):
    """The source of a definition is in no file and no notebook cell."""


def _parse(parser: Callable[[Any], T], argument: object) -> T:
    """The result of a function that parses source.

    Python before 3.11.8 and 3.12.2 raises SystemError if something else is parsed meanwhile, in another thread or, as a
    traceback is that a finalizer logs, in this one (https://github.com/python/cpython/issues/106905).
    """
    for _ in range(PARSER_TRIES - 1):
        with contextlib.suppress(SystemError), PARSER_LOCK:
            return parser(argument)
    return parser(argument)


def definition_of(target: Callable[..., object]) -> Definition:
    """The syntax tree of a function or class, annotations of signatures and of local variables stripped.

    Indented source is wrapped rather than dedented, so that multi-line strings keep their spaces.
    """
    try:
        source = _parse(inspect.getsource, target)
    except (OSError, TypeError):
        raise SourceUnavailableError(
            f"unable to retrieve source code of {_name(target)}: it was not defined in a file or a notebook cell; "
            'move it to a file, or pass serializer="cloudpickle"'
        ) from None
    wrapped = f"if True:\n{source}" if source[:1].isspace() else source
    try:
        tree = _parse(ast.parse, wrapped)
    except SyntaxError:
        raise ValueError(
            f"the source of {_name(target)} cannot be parsed alone (is it a lambda, or part of a longer line?); "
            "write it as a separate def"
        ) from None
    for node in ast.walk(tree):
        if isinstance(node, Definition) and node.name == _name(target):
            _strip_annotations(node)
            return node
    raise ValueError(f"the source of {_name(target)} is not a def; write it as a separate def")


def text_of(definition: Definition) -> str:
    return ast.unparse(ast.fix_missing_locations(definition))


def globals_of(definition: Definition) -> list[str]:
    """The names that a definition takes from outside itself and the builtins' namespace, sorted; alone, a name that it
    captures is one, too.

    Without its own name, and names that it assigns itself after `global`.
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
    """Whether a name means the builtin of that name and is not shadowed by the module."""
    if not hasattr(builtins, name):
        return False
    return name not in namespace or namespace[name] is getattr(builtins, name)


def resolve(node: ast.expr, namespace: Mapping[str, object]) -> object:
    """The value of a dotted name; None for any other expression."""
    if isinstance(node, ast.Name):
        return namespace.get(node.id, getattr(builtins, node.id, None))
    if isinstance(node, ast.Attribute):
        return getattr(resolve(node.value, namespace), node.attr, None)
    return None


def namespace_of(target: Callable[..., object]) -> dict[str, object]:
    """The globals of a definition, updated with its closure."""
    if isinstance(target, FunctionType):
        return {**target.__globals__, **_closure(target)}
    module = inspect.getmodule(target)
    around: dict[str, object] = dict(vars(module)) if module is not None else {}
    for function in vars(target).values():
        if isinstance(function, FunctionType):
            around.update(_closure(function))
    return around


def suggest_fix(name: str, namespace: Mapping[str, object]) -> str:
    """Suggest in one line how to avoid a name from outside the definition."""
    if name not in namespace:
        return f"  - {name!r} is not defined: define or import it inside"
    value = namespace[name]
    if isinstance(value, ModuleType):
        return f"  - {name!r} is a module: import it inside"
    if isinstance(value, bool | int | float | str) or value is None:
        text = textwrap.shorten(repr(value), 60)
        return f"  - {name}={text} is a constant: take it as a parameter and pass fn_kwargs={{{name!r}: {text}}}"
    if inspect.isclass(value) or callable(value):
        return f"  - {name!r} is a {'class' if inspect.isclass(value) else 'function'}: define or import it inside"
    return f"  - {name!r} is a {type(value).__name__}: make it inside"


def _closure(function: FunctionType) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet: a recursive function, while it is decorated
            continue
    return values


def _name(target: object) -> str:
    return getattr(target, "__name__", repr(target))


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _scopes(child)


def _strip_annotations(definition: Definition) -> None:
    """Removes annotations, which may use names of the file and have no effect in a function. Those of a class's fields
    stay, since a dataclass needs them."""
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


def references_of(
    target: Callable[..., object], definition: Definition, refer: Callable[[object], str | None], advice: str = ""
) -> dict[str, str]:
    """What a definition takes from outside: each name with `module` or `module:name`, as `refer` has it for the name's
    value. Raises ValueError that names what has none and ends with the advice."""
    namespace = namespace_of(target)
    names = [name for name in globals_of(definition) if not is_builtin(name, namespace)]
    references = {name: refer(namespace.get(name)) for name in names}
    if missing := [name for name, reference in references.items() if reference is None]:
        kind = "class" if inspect.isclass(target) else "function"
        fixes = "\n".join(suggest_fix(name, namespace) for name in missing)
        raise ValueError(
            f"{kind} {_name(target)!r} references external variables: {', '.join(missing)}\n"
            f"It runs on workers in a clean namespace, where they do not exist. To fix this:\n{fixes}\n{advice}"
        )
    return {name: reference for name, reference in references.items() if reference is not None}


def check_digest(name: str, digest: str, sent_digest: str) -> None:
    """Raises ShippedCodeError unless the digests are equal."""
    if digest != sent_digest:
        raise ShippedCodeError(f"the source of {name!r} was changed after it was sent (SHA-256); submit it again")


def run_source(text: str, name: str, imports: Mapping[str, str], namespace: dict[str, Any]) -> Any:  # noqa: ANN401
    """The function or class that a source defines as `name`, run in a namespace with its imports. Tracebacks show its
    lines. Raises ShippedCodeError."""
    file = f"<shipped {name} {hashlib.sha256(text.encode()).hexdigest()[:8]}>"
    linecache.cache[file] = (len(text), None, [f"{line}\n" for line in text.split("\n")], file)
    try:
        namespace |= {"__builtins__": builtins, "__file__": file}
        namespace |= {local: pkgutil.resolve_name(reference) for local, reference in imports.items()}
        exec(compile(text, file, "exec"), namespace)
    except ImportError:
        raise
    except Exception as error:
        raise ShippedCodeError(f"the source of {name!r} cannot be run: {type(error).__name__}: {error}") from error
    if name not in namespace:
        raise ShippedCodeError(f"the source of {name!r} cannot be run: it defines no {name!r}")
    return namespace[name]


def pickle_callable(function: Callable[..., object]) -> str:
    """Pickle a function by value, with the parts of the user's own modules that it uses, which workers lack."""
    try:
        import cloudpickle
    except ImportError:
        raise ValueError("a pickled function needs the package cloudpickle; pip install cloudpickle") from None
    modules = [module for module in list(sys.modules.values()) if is_own_module(module)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return base64.b64encode(cloudpickle.dumps(function)).decode()
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def unpickle_callable(text: str, name: str, python: str) -> Callable[..., Any]:
    """The function that `pickle_callable` pickled on this minor version of Python. Raises ShippedCodeError."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if python != version:
        raise ShippedCodeError(
            f"{name!r} was pickled by Python {python}, and this worker is Python {version}. Use the same, or a "
            "function that travels as source: a def with its imports, helpers and constants inside"
        )
    import pickle

    return pickle.loads(base64.b64decode(text))
