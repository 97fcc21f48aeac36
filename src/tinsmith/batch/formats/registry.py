"""Readers and writers by name, and as dictionaries that travel.

    @registry.OUTPUT_WRITER_REGISTRY.type_register(name="yaml")
    @dataclass
    class YamlWriter(OutputWriter): ...

A dictionary has the class's fields and `format`, its registered name. That of a class which is not ours also has its
source and the imports it needs (`_class_source`, `_class_imports`, and their `_class_sha256`). Making an object from
one runs that source, so only workers do it; anyone else passes `run_source=False` and is refused.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import inspect
import json
import linecache
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import ModuleType
from typing import Any, Generic, TypeVar

from tinsmith.batch.client import functions
from tinsmith.batch.formats.protocols import InputReader, OutputWriter
from tinsmith.errors import UserError

Kind = TypeVar("Kind")
Class = TypeVar("Class")
SHIPPED = ("_class_source", "_class_imports", "_class_name", "_class_sha256")


class Registry(Generic[Kind]):
    """The classes of one interface, by name."""

    def __init__(self, what: str, modules: Mapping[str, str]) -> None:
        self._what = what
        self._modules = dict(modules)  # imported when asked for: some load large libraries
        self._classes: dict[str, type[Kind]] = {}

    def type_register(self, name: str) -> Callable[[type[Class]], type[Class]]:
        """Makes a class known as `name`. A second class of the name takes its place."""

        def register(cls: type[Class]) -> type[Class]:
            self._classes[name] = cls  # type: ignore[assignment]
            cls._format = name  # type: ignore[attr-defined]
            return cls

        return register

    def find(self, name: str) -> type[Kind]:
        if name not in self._classes and name in self._modules:
            importlib.import_module(self._modules[name])
        if name not in self._classes:
            raise UserError(f"there is no {self._what} {name!r}; known: {self.names()}")
        return self._classes[name]

    def names(self) -> list[str]:
        return sorted({*self._classes, *self._modules})


def _ours(kind: str, names: str) -> dict[str, str]:
    return {
        name: f"tinsmith.batch.formats.{kind}.{module}" for module, _, name in (n.partition(":") for n in names.split())
    }


INPUT_READER_REGISTRY: Registry[InputReader] = Registry(
    "reader",
    _ours(
        "readers",
        "lines:json lines:text csv:csv parquet:parquet images:images webdataset:webdataset items:items "
        "huggingface:huggingface openai:openai_batch sql:sql",
    ),
)
OUTPUT_WRITER_REGISTRY: Registry[OutputWriter] = Registry(
    "writer",
    _ours(
        "writers",
        "lines:json lines:text csv:csv parquet:parquet images:images webdataset:webdataset openai:openai_batch sql:sql",
    ),
)


def to_dict(instance: InputReader | OutputWriter) -> dict[str, Any]:
    """The dictionary of a reader or writer: its format and fields, and its class's source if that is not ours."""
    cls = type(instance)
    if not is_dataclass(instance):
        raise UserError(f"{cls.__name__} must be a dataclass")
    data = {each.name: getattr(instance, each.name) for each in fields(instance) if each.init}
    try:
        json.dumps(data)
    except (TypeError, ValueError) as error:
        raise UserError(f"the fields of a {cls.__name__} must be JSON: {error}") from None
    found = {"format": getattr(cls, "_format", cls.__name__), **data}
    if not cls.__module__.startswith("tinsmith.batch."):
        found |= ship(cls)
    return found


def reader_from_dict(data: Mapping[str, Any]) -> InputReader:
    made = _from_dict(data, INPUT_READER_REGISTRY, InputReader)
    assert isinstance(made, InputReader)
    return made


def writer_from_dict(data: Mapping[str, Any]) -> OutputWriter:
    """A writer of parts: one whose class has the older methods comes wrapped."""
    made = _from_dict(data, OUTPUT_WRITER_REGISTRY, OutputWriter)
    assert isinstance(made, OutputWriter)
    if type(made).write_part is not OutputWriter.write_part:
        return made
    from tinsmith.batch.formats.writers.sky import LegacyWriter

    return LegacyWriter(path=made.path, inner=made)


def ship(cls: type) -> dict[str, Any]:
    """A class's own source and the imports that it needs. Raises ValueError if it needs more than imports."""
    definition = functions.definition_of(cls)
    namespace = functions.namespace_of(cls)
    definition.decorator_list = [node for node in definition.decorator_list if "type_register" not in ast.unparse(node)]
    imports: dict[str, str] = {}
    bad = []
    for name in functions.globals_of(definition):
        if functions.is_builtin(name, namespace):
            continue
        reference = _import_of(namespace.get(name), cls)
        if reference is None:
            bad.append(name)
        else:
            imports[name] = reference
    if bad:
        raise ValueError(
            f"class {cls.__name__!r} references {', '.join(sorted(bad))} of its own file, which workers do not have; "
            "move them into the class, or into an installed package"
        )
    text = functions.text_of(definition)
    return {
        "_class_name": cls.__name__,
        "_class_source": text,
        "_class_imports": imports,
        "_class_sha256": _digest(text, imports),
    }


def _import_of(value: object, cls: type) -> str | None:
    """`module` or `module:name` to import a value from on another machine, if it is from a package."""
    if isinstance(value, ModuleType):
        return value.__name__
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or getattr(value, "_name", None)
    if not module or not name or module in (cls.__module__, "__main__"):
        return None
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return f"{module}:{name}" if found is value else None


def _from_dict(data: Mapping[str, Any], registry: Registry[Any], kind: type) -> object:
    given = {name: value for name, value in data.items() if name != "format" and name not in SHIPPED}
    cls = _shipped_class(data) if "_class_source" in data else registry.find(str(data.get("format")))
    if not (inspect.isclass(cls) and issubclass(cls, kind) and is_dataclass(cls)):
        raise UserError(f"{getattr(cls, '__name__', cls)!r} is no {kind.__name__} that is a dataclass")
    known = {each.name: each for each in fields(cls) if each.init}
    if unknown := sorted(set(given) - set(known)):
        raise UserError(f"{data['format']!r} has no field {unknown}; it has {sorted(known)}")
    needed = {n for n, each in known.items() if each.default is MISSING and each.default_factory is MISSING}
    if missing := sorted(needed - set(given)):
        raise UserError(f"{data['format']!r} lacks {missing}")
    return cls(**given)


def _shipped_class(data: Mapping[str, Any]) -> type:
    text, imports, name = data["_class_source"], data["_class_imports"], data["_class_name"]
    digest = _digest(text, imports)
    if digest != data["_class_sha256"]:
        raise UserError(f"the source of {name!r} is not the one that was sent: its sha256 differs")
    file = f"<class {name} {digest[:8]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    # A module of its own: dataclasses and pickle look classes up by it.
    module = ModuleType(f"tinsmith_shipped_{digest[:16]}")
    if module.__name__ in sys.modules:
        return getattr(sys.modules[module.__name__], name)
    namespace = vars(module)
    namespace |= {"__builtins__": builtins, "__file__": file}
    for local, reference in imports.items():
        package, _, attribute = reference.partition(":")
        found: object = importlib.import_module(package)
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
        namespace[local] = found
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, file, "exec"), namespace)
    except Exception as error:
        del sys.modules[module.__name__]
        raise ValueError(f"the source of {name!r} failed: {type(error).__name__}: {error}") from error
    return namespace[name]


def _digest(text: str, imports: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps([text, dict(imports)], sort_keys=True).encode()).hexdigest()
