"""Functions that travel: `@remote_function`, the check that one can run elsewhere, and its payload.

A function travels as its own source text, so that what runs on a worker can be read, and needs neither this module's
file nor the same Python. Its payload is base64 of a JSON object: {type, source, name, version} and {sha256, python,
kwargs, is_async, kind, options, provided, sky}. `provided` names what the source takes from tinsmith.batch; `sky` says
that it may call that by SkyPilot's name (`sky.py`).

What the check accepts runs on a worker without a NameError. Only `load_mapper` runs a source, and only workers call it.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import hashlib
import importlib
import inspect
import json
import linecache
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType, MethodType, ModuleType
from typing import Any, TypeVar, cast, overload

from tinsmith.batch.client import source as sources

VERSION = "1.0"
KINDS = ("loop", "row", "batch", "class")
SERIALIZERS = ("source", "cloudpickle")
OURS = "tinsmith.batch"
SKY = "tinsmith.batch.sky"
Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True)
class Mapper:
    """A function as it came out of a payload. `kind` says how it is called: with nothing (it loops over `load()`),
    a row, a batch, or, a class, once with its arguments and then with batches."""

    call: Callable[..., Any]
    name: str
    kind: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    is_async: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@overload
def remote_function(function: Function) -> Function: ...
@overload
def remote_function(*, serializer: str = "source") -> Callable[[Function], Function]: ...


def remote_function(function: Any = None, *, serializer: str = "source") -> Any:
    """Marks a function that runs on workers, and checks that it can. Returns the same function.

    `serializer="cloudpickle"` sends it pickled instead: for a session without files, and the same Python there.
    """
    if serializer not in SERIALIZERS:
        raise ValueError(f"serializer is {serializer!r}; it must be one of {list(SERIALIZERS)}")
    if function is None:
        return lambda function: _mark(function, serializer, sys._getframe(1))
    return _mark(function, serializer, sys._getframe(1))


def is_remote_function(function: object) -> bool:
    return getattr(function, "_is_remote_function", False) is True


def serialize_function(
    function: Callable[..., object],
    *,
    kwargs: Mapping[str, Any] | None = None,
    kind: str = "loop",
    options: Mapping[str, Any] | None = None,
    serializer: str | None = None,
) -> str:
    """The payload of a function that is called as `kind` says, with `kwargs` as well (for a class: when made)."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; it must be one of {list(KINDS)}")
    kwargs = dict(kwargs or {})
    serializer = serializer or getattr(function, "_serializer", "source")
    name = getattr(function, "__name__", type(function).__name__)
    try:
        json.dumps(kwargs, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"fn_kwargs of {name!r} must be JSON: {error}") from None
    if serializer == "cloudpickle":
        body: dict[str, Any] = {"type": "cloudpickle", "source": _pickled(function)}
    else:
        check_function(function)
        definition = sources.definition_of(function)
        definition.decorator_list = []
        names = sources.globals_of(definition)
        body = {
            "type": "source",
            "source": sources.text_of(definition),
            "provided": _provided(names, sources.namespace_of(function)),
        }
    _check_call(function, name, kind, kwargs, dict(options or {}))
    call = getattr(function, "__call__", None) if inspect.isclass(function) else function  # noqa: B004
    payload = {
        **body,
        "name": name,
        "version": VERSION,
        "sha256": hashlib.sha256(body["source"].encode()).hexdigest(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "kwargs": kwargs,
        "is_async": inspect.iscoroutinefunction(call),
        "kind": kind,
        "options": dict(options or {}),
        "sky": SKY in sys.modules,
    }
    return base64.b64encode(json.dumps(payload).encode()).decode()


def load_mapper(payload: str) -> Mapper:
    """The function of a payload and how to call it. Runs the source: in workers only."""
    try:
        data = json.loads(base64.b64decode(payload, validate=True))
    except ValueError as error:
        raise ValueError(f"the function's payload is not base64 of JSON: {error}") from None
    kind = data.get("type") if isinstance(data, dict) else None
    if kind not in SERIALIZERS:
        raise ValueError(f"Unknown or missing serialization type: {kind!r}")
    text = data["source"]
    if "sha256" in data and hashlib.sha256(text.encode()).hexdigest() != data["sha256"]:
        raise ValueError(f"the source of {data['name']!r} is not the one that was sent: its sha256 differs")
    if data.get("sky"):
        importlib.import_module(SKY)
    call = _run(data) if kind == "source" else _unpickled(data)
    return Mapper(
        call=call,
        name=data["name"],
        kind=data.get("kind", "loop"),
        kwargs=data.get("kwargs", {}),
        is_async=data.get("is_async", False),
        options=data.get("options", {}),
    )


def check_function(function: Callable[..., object], around: Mapping[str, object] | None = None) -> None:
    """Raises ValueError unless a function or class can run from its own source alone.

    `around` has the names where it is being decorated.
    """
    name = getattr(function, "__name__", repr(function))
    if name == "<lambda>":
        raise ValueError("a lambda cannot be sent to workers: write it as a def of its own")
    if isinstance(function, MethodType):
        raise ValueError(f"{name!r} is a method of an object, which workers do not have; write it as a def of its own")
    definition = sources.definition_of(function)
    namespace = sources.namespace_of(function)
    for text, decorator in sources.decorators_of(definition, {**namespace, **(around or {})}):
        if decorator is not remote_function and not (around is None and is_remote_function(function)):
            raise ValueError(
                f"function {name!r} has the decorator @{text}, which workers do not have; apply what it does inside"
            )
    definition.decorator_list = []
    captured = [each for each in sources.free_names(function) if _reference(namespace.get(each)) is None]
    taken = [
        each
        for each in sources.globals_of(definition)
        if not sources.is_builtin(each, namespace) and _reference(namespace.get(each)) is None
    ]
    bad = sorted({*captured, *taken})
    if bad:
        fixes = "\n".join(sources.fix_for(each, namespace) for each in bad)
        raise ValueError(
            f"function {name!r} references external variables: {', '.join(bad)}\n"
            "It runs on workers in a clean namespace, where they do not exist. To fix this:\n"
            f"{fixes}\nMove imports, helpers and constants inside the function."
        )


def _mark(function: Callable[..., object], serializer: str, frame: FrameType) -> Callable[..., object]:
    function = inspect.unwrap(function) if hasattr(function, "__wrapped__") else function
    if not (inspect.isfunction(function) or inspect.isclass(function) or inspect.ismethod(function)):
        raise TypeError(f"remote_function marks functions and classes; this is a {type(function).__name__}")
    if serializer == "source":
        # Without a source it may never be sent; sending it says what is wrong.
        with contextlib.suppress(sources.SourceUnavailableError):
            check_function(function, around={**frame.f_globals, **frame.f_locals})
    marked = cast(Any, function)
    marked._is_remote_function = True
    marked._serializer = serializer
    return function


def _check_call(
    function: Callable[..., object], name: str, kind: str, kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Raises ValueError if a worker could not call it: too few arguments, or more than it takes."""
    call = function.__call__ if inspect.isclass(function) else function
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise ValueError(f"{name!r} is a generator, which does nothing when called; call save_results instead of yield")
    positional = {"loop": 0, "class": 0, "row": 1, "batch": 1}[kind]
    positional += int(bool(options.get("with_indices"))) if kind in ("row", "batch") else 0
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * positional, **kwargs)
    except TypeError as error:
        takes = {"loop": "nothing", "class": "nothing when made"}.get(kind, f"{positional} argument(s)")
        raise ValueError(
            f"workers call {name!r} with {takes} and fn_kwargs {sorted(kwargs)}, but it is {name}{signature}: {error}"
        ) from None


def _reference(value: object) -> str | None:
    """`module` or `module:name` if a value is tinsmith.batch or in its `__all__`: workers have that."""
    ours = sys.modules.get(OURS)
    if isinstance(value, ModuleType):
        return value.__name__ if value.__name__ in ("tinsmith", OURS, SKY) else None
    name = getattr(value, "__name__", "")
    if name in getattr(ours, "__all__", ()) and value is getattr(ours, name):
        return f"{OURS}:{name}"
    return None


def _provided(names: list[str], namespace: Mapping[str, object]) -> dict[str, str]:
    found = {name: _reference(namespace.get(name)) for name in names}
    return {name: reference for name, reference in found.items() if reference is not None}


def _run(data: Mapping[str, Any]) -> Callable[..., Any]:
    text, name = data["source"], data["name"]
    file = f"<mapper {name} {hashlib.sha256(text.encode()).hexdigest()[:8]}>"
    # So that tracebacks show the lines.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__builtins__": builtins, "__name__": "tinsmith_mapper", "__file__": file}
    for local, reference in data.get("provided", {}).items():
        module, _, attribute = reference.partition(":")
        if module.partition(".")[0] != "tinsmith":
            raise ValueError(f"the payload of {name!r} asks for {reference!r}, which is no part of {OURS}")
        loaded = importlib.import_module(module)
        namespace[local] = getattr(loaded, attribute) if attribute else loaded
    try:
        exec(compile(text, file, "exec"), namespace)  # the source is the user's, and this is the user's worker
    except Exception as error:
        raise ValueError(f"Failed to execute function source of {name!r}: {type(error).__name__}: {error}") from error
    if name not in namespace:
        raise ValueError(f"Failed to execute function source: it defines no {name!r}")
    return namespace[name]


def _pickled(function: Callable[..., object]) -> str:
    try:
        import cloudpickle
    except ImportError:
        raise ValueError('serializer="cloudpickle" needs the package cloudpickle; pip install cloudpickle') from None
    return base64.b64encode(cloudpickle.dumps(function)).decode()


def _unpickled(data: Mapping[str, Any]) -> Callable[..., Any]:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if data["python"] != here:
        raise ValueError(
            f"{data['name']!r} was pickled by Python {data['python']}, and this worker is Python {here}; "
            "use the same, or send its source"
        )
    import pickle

    return pickle.loads(base64.b64decode(data["source"]))
