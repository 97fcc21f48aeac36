"""Functions as payloads for workers: `@remote_function`, and the check that a function can run from its source.

A function that needs nothing from outside itself travels as its source, which can be read and needs neither this
module's file nor the same Python. Any other one (a lambda, or a function with helpers and constants of its module) is
pickled with cloudpickle, by value with everything of the user's own modules; its workers need the same Python minor
version. `@remote_function` and `serializer="source"` refuse what cannot travel as source, with the fix.

The payload is a JSON object: {type, source, name, version} and {sha256, python, kwargs, is_async, is_class, kind,
options, provided, sky}. `provided` names what the source takes from tinsmith.batch; `sky` says that it may import that
as `sky.batch` (`sky.py`). A pickled function has its `identity` (`identity.py`), too, by which it is recognized.

`shipping.py` extracts, checks, runs and pickles. Only `mapper_of` runs a payload, and only workers call it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, cast, overload

from tinsmith.batch import shipping
from tinsmith.batch.client.identity import function_identity
from tinsmith.batch.shipping import (
    SourceUnavailableError,
    definition_of,
    namespace_of,
    pickle_callable,
    resolve,
    text_of,
    unpickle_callable,
)

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
    provided = shipping.references_of(function, definition, _reference)
    return {"type": "source", "source": text_of(definition), "provided": provided}


def _pickle_body(function: Callable[..., object]) -> dict[str, Any]:
    return {"type": "cloudpickle", "source": pickle_callable(function), "identity": function_identity(function)}


def mapper_of(data: Mapping[str, Any]) -> Mapper:
    """The function of a payload and how to call it. Runs the source, so only in workers. Raises ValueError."""
    kind = data.get("type")
    if kind not in SERIALIZERS:
        raise ValueError(f"Unknown or missing serialization type: {kind!r}")
    text, name = data["source"], data["name"]
    if "sha256" in data:
        shipping.check_digest(name, hashlib.sha256(text.encode()).hexdigest(), data["sha256"])
    if data.get("sky"):
        importlib.import_module(SKY_MODULE)
    call = _run(data) if kind == "source" else unpickle_callable(text, name, data["python"])
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
    advice = (
        'Move imports, helpers and constants inside the function, or pickle it with them: serializer="cloudpickle".'
    )
    shipping.references_of(function, definition, _reference, advice)


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
    name, provided = data["name"], data.get("provided", {})
    for reference in provided.values():
        if reference.partition(":")[0].partition(".")[0] != "tinsmith":
            raise ValueError(f"the payload of {name!r} asks for {reference!r}, which is not part of {PACKAGE}")
    return shipping.run_source(data["source"], name, provided, {"__name__": "tinsmith_mapper"})
