"""Functions as payloads for workers: `@remote_function`, and the check that a function can run from its source.

A function that needs nothing from outside itself travels as its source, which can be read and needs neither this
module's file nor the same Python. Any other one (a lambda, or a function with helpers and constants of its module) is
pickled with cloudpickle, by value with everything of the user's own modules; its workers need the same Python minor
version. `@remote_function` and `serializer="source"` refuse what cannot travel as source, with the fix.

The payload is a JSON object: {type, source, name, version} and {sha256, python, kwargs, is_async, is_class, kind,
options, provided, sky}. `provided` names what the source takes from tinsmith.batch; `sky` says that it may import that
as `sky.batch` (`sky.py`). A pickled function has its `identity` (`identity.py`), too, by which it is recognized.

A function that passes the check runs on a worker without a NameError. The names that it takes from outside are found
with `symtable`, the compiler's own resolution of scopes. Only `mapper_of` runs a payload, and only workers call it.
"""

from __future__ import annotations

import ast
import base64
import builtins
import contextlib
import hashlib
import importlib
import inspect
import json
import linecache
import pkgutil
import symtable
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, cast, overload

from tinsmith.batch.client.identity import function_identity, is_own_module

T = TypeVar("T")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

# Names that every module has.
MODULE_NAMES = frozenset({"__name__", "__file__", "__builtins__", "__doc__"})

PARSER_LOCK = threading.Lock()
PARSER_TRIES = 5


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
    """The names that a definition takes from outside itself and the builtins' namespace, sorted.

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


def free_names(target: Callable[..., object]) -> list[str]:
    """The names that a function, or a method of a class, captures from an enclosing function."""
    functions: Iterable[object] = vars(target).values() if inspect.isclass(target) else [target]
    names: dict[str, None] = {}
    for function in functions:
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None:
            names.update(dict.fromkeys(code.co_freevars))
    return [name for name in names if name not in ("__class__", _name(target))]


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


VERSION = "1.0"
KINDS = ("loop", "row", "filter", "flat", "batch")
BATCH_FORMATS = ("rows", "columns", "numpy", "pandas", "pyarrow")
SERIALIZERS = ("source", "cloudpickle")
PACKAGE = "tinsmith.batch"
SKY_MODULE = "tinsmith.batch.sky"
SKY_STORAGE = "tinsmith.batch.client.sky_storage"
"""`sky.batch.utils`."""
Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True)
class Mapper:
    """A function from a payload. `kind` says how it is called: `loop` without arguments; `row`, `filter` and `flat`
    with one row; `batch` with a batch. A class is made once with its arguments, and its object is called."""

    call: Callable[..., Any]
    name: str
    kind: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    is_async: bool = False
    is_class: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def instance(self) -> Callable[..., Any]:
        """The callable for rows or batches."""
        return self.call(**self.kwargs) if self.is_class else partial(self.call, **self.kwargs)


@overload
def remote_function(function: Function) -> Function: ...
@overload
def remote_function(*, serializer: str = "source") -> Callable[[Function], Function]: ...


def remote_function(function: Any = None, *, serializer: str = "source") -> Any:
    """Marks a function that runs on workers, and checks that its source can. Returns the same function.

    `serializer="cloudpickle"` sends it pickled, without that check; workers need the same Python minor version.
    """
    if serializer not in SERIALIZERS:
        raise ValueError(f"serializer is {serializer!r}; it must be one of {list(SERIALIZERS)}")
    if function is None:
        return lambda function: _mark(function, serializer, sys._getframe(1))
    return _mark(function, serializer, sys._getframe(1))


def is_remote_function(function: object) -> bool:
    return getattr(function, "_is_remote_function", False) is True


def describe_function(
    function: Callable[..., object],
    *,
    kwargs: Mapping[str, Any] | None = None,
    kind: str = "loop",
    options: Mapping[str, Any] | None = None,
    serializer: str | None = None,
) -> dict[str, Any]:
    """The payload of a function that is called as `kind` says, with `kwargs` in addition (for a class: when made).
    Raises ValueError, TypeError."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; it must be one of {list(KINDS)}")
    kwargs = dict(kwargs or {})
    name = getattr(function, "__name__", type(function).__name__)
    try:
        json.dumps(kwargs, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"fn_kwargs of {name!r} must be JSON: {error}") from None
    body = _body(function, serializer or getattr(function, "_serializer", None))
    _check_call(function, name, kind, kwargs, dict(options or {}))
    called = cast(Any, _row_callable(function))
    return {
        **body,
        "name": name,
        "version": VERSION,
        "sha256": hashlib.sha256(body["source"].encode()).hexdigest(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "kwargs": kwargs,
        "is_async": inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called),
        "is_class": inspect.isclass(function),
        "kind": kind,
        "options": dict(options or {}),
        "sky": SKY_MODULE in sys.modules,
    }


def _body(function: Callable[..., object], serializer: str | None) -> dict[str, Any]:
    """The function's source, or, unless the serializer forbids that, its pickle."""
    if serializer == "cloudpickle":
        return _pickle_body(function)
    try:
        check_function(function)
        definition = definition_of(function)
    except (ValueError, SourceUnavailableError) as refusal:
        if serializer == "source":
            raise
        try:
            return _pickle_body(function)
        except Exception as error:
            raise ValueError(f"{refusal}\nIt cannot be pickled either: {error}") from error
    definition.decorator_list = []
    namespace = namespace_of(function)
    references = {name: _reference(namespace.get(name)) for name in globals_of(definition)}
    provided = {name: reference for name, reference in references.items() if reference is not None}
    return {"type": "source", "source": text_of(definition), "provided": provided}


def _pickle_body(function: Callable[..., object]) -> dict[str, Any]:
    return {"type": "cloudpickle", "source": _pickle(function), "identity": function_identity(function)}


def mapper_of(data: Mapping[str, Any]) -> Mapper:
    """The function of a payload and how to call it. Runs the source, so only in workers. Raises ValueError."""
    kind = data.get("type")
    if kind not in SERIALIZERS:
        raise ValueError(f"Unknown or missing serialization type: {kind!r}")
    text = data["source"]
    if "sha256" in data and hashlib.sha256(text.encode()).hexdigest() != data["sha256"]:
        raise ValueError(f"the source of {data['name']!r} was changed after it was sent (SHA-256); submit it again")
    if data.get("sky"):
        importlib.import_module(SKY_MODULE)
    call = _run(data) if kind == "source" else _unpickle(data)
    return Mapper(call=call, **{name: data[name] for name in Mapper.__dataclass_fields__ if name in data})


def check_function(function: Callable[..., object], around: Mapping[str, object] | None = None) -> None:
    """Raises ValueError unless a function or class can run from its own source alone.

    `around` has the names visible where it is decorated.
    """
    name = getattr(function, "__name__", repr(function))
    if name == "<lambda>":
        raise ValueError("the function is a lambda, whose source cannot be sent; write it as a def")
    if isinstance(function, MethodType):
        raise ValueError(f"{name!r} is a method of an object, which workers do not have; write it as a separate def")
    definition = definition_of(function)
    namespace = namespace_of(function)
    for node in definition.decorator_list:
        decorator = resolve(node.func if isinstance(node, ast.Call) else node, {**namespace, **(around or {})})
        if decorator is not remote_function and not (around is None and is_remote_function(function)):
            text = ast.unparse(node)
            raise ValueError(
                f"function {name!r} has the decorator @{text}, which workers do not have; do its work inside"
            )
    definition.decorator_list = []
    names = {
        *free_names(function),
        *(global_name for global_name in globals_of(definition) if not is_builtin(global_name, namespace)),
    }
    if bad := sorted(global_name for global_name in names if _reference(namespace.get(global_name)) is None):
        fixes = "\n".join(suggest_fix(global_name, namespace) for global_name in bad)
        raise ValueError(
            f"function {name!r} references external variables: {', '.join(bad)}\n"
            "It runs on workers in a clean namespace, where they do not exist. To fix this:\n"
            f"{fixes}\nMove imports, helpers and constants inside the function, or pickle it with them: "
            'serializer="cloudpickle".'
        )


def _mark(function: Callable[..., object], serializer: str, frame: FrameType) -> Callable[..., object]:
    function = inspect.unwrap(function) if hasattr(function, "__wrapped__") else function
    if not (inspect.isfunction(function) or inspect.isclass(function) or inspect.ismethod(function)):
        raise TypeError(f"remote_function marks functions and classes; this is a {type(function).__name__}")
    if serializer == "source":
        # Sending a function without source raises the error.
        with contextlib.suppress(SourceUnavailableError):
            check_function(function, around={**frame.f_globals, **frame.f_locals})
    marked = cast(Any, function)
    marked._is_remote_function = True
    marked._serializer = serializer
    return function


def _check_call(
    function: Callable[..., object], name: str, kind: str, kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Raises ValueError if a worker could not call the function with its arguments."""
    call = _row_callable(function)
    if kind not in ("flat", "batch") and (inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call)):
        instead = (
            "call save_results instead of yield" if kind == "loop" else "flat_map takes one, and so does map_batches"
        )
        raise ValueError(f"{name!r} is a generator, and a row has one result; {instead}")
    positional = 0 if kind == "loop" else 1 + bool(options.get("with_indices"))
    calls = [(function, 0, kwargs), (call, 1 + positional, {})] if inspect.isclass(function) else []
    for target, count, arguments in calls or [(function, positional, kwargs)]:
        try:
            signature = inspect.signature(cast(Any, target))
        except ValueError:  # of a builtin
            continue
        try:
            signature.bind(*[None] * count, **arguments)
        except TypeError as error:
            takes = f"{positional} argument(s)" if count else "nothing"
            raise ValueError(
                f"workers call {name!r} with {takes} and fn_kwargs {sorted(arguments)}, "
                f"but its signature is {name}{signature}: {error}"
            ) from None


def parameters_of(function: Callable[..., object]) -> int | None:
    """The number of a function's parameters; None if it is unknown."""
    try:
        return len(inspect.signature(function).parameters)
    except ValueError:
        return None


def _row_callable(function: Callable[..., object]) -> object:
    """The callable that gets the rows: the function itself or, of a class or an object, its `__call__`."""
    is_code = isinstance(function, FunctionType | MethodType | BuiltinFunctionType | partial)
    return function if is_code else getattr(function, "__call__", None)  # noqa: B004


def _reference(value: object) -> str | None:
    """`module` or `module:name` for a value that workers have: tinsmith.batch, or a name in its `__all__`."""
    ours = sys.modules.get(PACKAGE)
    if isinstance(value, ModuleType):
        return value.__name__ if value.__name__ in ("tinsmith", PACKAGE, SKY_MODULE, SKY_STORAGE) else None
    name = getattr(value, "__name__", "")
    if name in getattr(ours, "__all__", ()) and value is getattr(ours, name):
        return f"{PACKAGE}:{name}"
    return None


def _run(data: Mapping[str, Any]) -> Callable[..., Any]:
    text, name = data["source"], data["name"]
    file = f"<mapper {name} {hashlib.sha256(text.encode()).hexdigest()[:8]}>"
    namespace: dict[str, Any] = {"__builtins__": builtins, "__name__": "tinsmith_mapper", "__file__": file}
    for local, reference in data.get("provided", {}).items():
        if reference.partition(":")[0].partition(".")[0] != "tinsmith":
            raise ValueError(f"the payload of {name!r} asks for {reference!r}, which is not part of {PACKAGE}")
        namespace[local] = pkgutil.resolve_name(reference)
    try:
        execute(text, file, namespace)
    except Exception as error:
        raise ValueError(f"Failed to execute function source of {name!r}: {type(error).__name__}: {error}") from error
    if name not in namespace:
        raise ValueError(f"Failed to execute function source: it defines no {name!r}")
    return namespace[name]


def execute(text: str, file: str, namespace: dict[str, Any]) -> None:
    """Run the user's source on the user's worker; tracebacks show its lines."""
    linecache.cache[file] = (len(text), None, [f"{line}\n" for line in text.split("\n")], file)
    exec(compile(text, file, "exec"), namespace)


def _pickle(function: Callable[..., object]) -> str:
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


def _unpickle(data: Mapping[str, Any]) -> Callable[..., Any]:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if data["python"] != python:
        raise ValueError(
            f"{data['name']!r} was pickled by Python {data['python']}, and this worker is Python {python}. Use the "
            "same, or a function that travels as source: a def with its imports, helpers and constants inside"
        )
    import pickle

    return pickle.loads(base64.b64decode(data["source"]))
