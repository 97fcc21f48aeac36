"""The interfaces of readers and writers, the table of formats, and both as dictionaries.

    @registry.OUTPUT_WRITER_REGISTRY.type_register(name="yaml")
    @dataclass
    class YamlWriter(OutputWriter): ...

A dictionary has the class's fields and `format`, its registered name. For a class outside tinsmith it also has the
class's source and the imports it needs (`_class_source`, `_class_imports`, and their `_class_sha256`). Building an
object from such a dictionary runs that source, so only workers do it; the server only looks for the `SHIPPED_KEYS`.

To add a format: one module here with its reader and writer, each with a `type_register` decorator, one entry in
`FORMATS`, and the names in `tinsmith.batch`.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import importlib
import inspect
import json
import os
import pkgutil
import sys
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import accumulate
from types import ModuleType
from typing import Any, ClassVar, Generic, Self, TypeVar

from tinsmith.batch import shipping
from tinsmith.batch.formats import input_versions, publishing, sky_writers
from tinsmith.batch.formats.input_versions import Version
from tinsmith.batch.formats.pages import Page
from tinsmith.batch.formats.schemas import Schema
from tinsmith.batch.types import OutputInfo, PartInfo, ProgramError, Row, RowRange
from tinsmith.errors import TinsmithError, UserError
from tinsmith.storage.locations import locations

Kind = TypeVar("Kind")
Class = TypeVar("Class")
Opened = TypeVar("Opened")
SHIPPED_KEYS = ("_class_source", "_class_imports", "_class_name", "_class_sha256")


@dataclass(frozen=True)
class Format:
    """The properties of a format that are known without importing its module."""

    module: str
    """Below `tinsmith.batch.formats`."""
    extensions: tuple[str, ...] = ()
    """Endings of paths that mean this format."""
    reads: bool = True
    writes: bool = True
    confined: bool = False
    """Whether every location is opened through the store, which checks it against the roots of a confined job."""
    has_location: bool = True
    """Whether `path` names a location that is read or written."""
    has_snapshot: bool = False
    """Whether a job copies the rows when it is planned (`InputReader.snapshot_pages`)."""
    resumes_as: bool = True
    """Whether the outputs of a job may be resumed in this format by naming one of its extensions."""


FORMATS = {
    "json": Format("lines", (".jsonl", ".ndjson", ".json"), confined=True),
    "csv": Format("csv", (".csv", ".tsv"), confined=True),
    "parquet": Format("parquet", (".parquet",), confined=True),
    "text": Format("lines", (".txt",), confined=True),
    "webdataset": Format("webdataset", (".tar",), confined=True, resumes_as=False),
    "images": Format("images", confined=True),
    "items": Format("lines", writes=False, confined=True, has_location=False),
    "openai_batch": Format("openai", confined=True),
    "sql": Format("sql", has_snapshot=True),
    "huggingface": Format("huggingface"),
}


def has_snapshot(data: Mapping[str, Any]) -> bool:
    """Whether a job copies the rows of the reader with this dictionary."""
    format = FORMATS.get(str(data.get("format")))
    return format is not None and format.has_snapshot


class Registry(Generic[Kind]):
    """The classes of one interface, by name."""

    def __init__(self, noun: str, modules: Mapping[str, str]) -> None:
        self._noun = noun
        self._modules = dict(modules)  # imported at first use: some load large libraries
        self._classes: dict[str, type[Kind]] = {}

    def type_register(self, name: str) -> Callable[[type[Class]], type[Class]]:
        """Registers a class as `name`, in place of an earlier class of that name."""

        def register(cls: type[Class]) -> type[Class]:
            self._classes[name] = cls  # type: ignore[assignment]
            cls._format = name  # type: ignore[attr-defined]
            return cls

        return register

    def find(self, name: str) -> type[Kind]:
        if name not in self._classes and name in self._modules:
            importlib.import_module(self._modules[name])
        if name not in self._classes:
            raise UserError(f"there is no {self._noun} {name!r}; use one of {self.names()}")
        return self._classes[name]

    def names(self) -> list[str]:
        return sorted({*self._classes, *self._modules})


INPUT_READER_REGISTRY: Registry[InputReader] = Registry(
    "reader", {name: f"{__package__}.{format.module}" for name, format in FORMATS.items() if format.reads}
)
OUTPUT_WRITER_REGISTRY: Registry[OutputWriter] = Registry(
    "writer", {name: f"{__package__}.{format.module}" for name, format in FORMATS.items() if format.writes}
)


@dataclass
class ReaderOrWriter:
    """A dataclass whose fields are JSON; `path` says where the rows are."""

    path: str

    _registry: ClassVar[Registry[Any]]

    def to_dict(self) -> dict[str, Any]:
        """The format and the fields, and the source of a class outside tinsmith."""
        cls = type(self)
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        # A field that a release added is left out while it is not used: the dictionary of a stored job lacks it.
        added = {field.name for field in fields(self) if field.metadata.get("optional")}
        data = {name: value for name, value in values.items() if name not in added or value is not None}
        try:
            json.dumps(data)
        except (TypeError, ValueError) as error:
            raise UserError(f"the fields of a {cls.__name__} must be JSON: {error}") from None
        shipped = {} if cls.__module__.startswith("tinsmith.batch.") else serialize_class(cls)
        return {"format": getattr(cls, "_format", cls.__name__), **data, **shipped}

    @property
    def identity(self) -> str:
        """A text that is equal for two objects if and only if they have the same class and fields. Names of cached
        files are derived from it."""
        return canonical_json(self.to_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """A reader or writer from its dictionary. Runs the source of a user's class, so only in workers."""
        values = {name: value for name, value in data.items() if name != "format" and name not in SHIPPED_KEYS}
        kind = _build_shipped_class(data) if is_shipped(data) else cls._registry.find(str(data.get("format")))
        if not (inspect.isclass(kind) and issubclass(kind, cls)):
            raise UserError(f"{getattr(kind, '__name__', kind)!r} must be a dataclass that extends {cls.__name__}")
        return build_dataclass(kind, values, repr(data["format"]))


@dataclass
class InputReader(ReaderOrWriter, ABC):
    """Numbered rows."""

    _registry = INPUT_READER_REGISTRY
    in_store: ClassVar[bool] = False
    """Whether `path` names files of a store. A path on this machine is then sent as an absolute one."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @abstractmethod
    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        """The rows of an inclusive span, in order. `cache_dir` is a local directory that outlives the batch."""

    def locate_span(self, counts: Sequence[int], start_idx: int, end_idx: int) -> Iterator[tuple[int, int, int]]:
        """Find the units (files, row groups) that hold a span, as (index, first row, last row). `counts` has the rows
        of each unit. Raises IndexError."""
        ends = list(accumulate(counts))
        if not 0 <= start_idx <= end_idx < (ends[-1] if ends else 0):
            raise IndexError(f"rows {start_idx} to {end_idx} of {self.path}: it has {ends[-1] if ends else 0} rows")
        for unit_idx in range(bisect_right(ends, start_idx), bisect_left(ends, end_idx + 1) + 1):
            before = ends[unit_idx] - counts[unit_idx]
            first, last = max(start_idx, before) - before, min(end_idx + 1, ends[unit_idx]) - before - 1
            if last >= first:
                yield unit_idx, first, last

    def open_files(self, names: Sequence[str], open_file: Callable[[str], Opened]) -> list[Opened]:
        """The files at these locations. Raises FileNotFoundError if one is missing, or if there are none, except in a
        directory that a job without rows has published; UserError for one that is not of the format."""

        def open_named(location: str) -> Opened:
            try:
                return open_file(location)
            except (OSError, TinsmithError) as error:
                if not isinstance(error, gzip.BadGzipFile):
                    raise
                raise UserError(f"{location} cannot be read: {error}") from error
            except Exception as error:  # of a library that reads or unpacks the format
                raise UserError(f"{location} cannot be read: {error}") from error

        try:
            if names or publishing.is_published(self.path):
                return [open_named(location) for location in names]
        except FileNotFoundError:
            pass
        raise FileNotFoundError(f"no file matches {self.path}")

    def snapshot_pages(self) -> Generator[Page, None, None] | None:
        """All rows in one consistent read, for an input that has no version and may change: a job copies them when it
        is planned, and reads the copy. None for an input whose version is checked instead."""
        return None

    def version(self) -> Version | None:
        """The version of the input now (`input_versions.py`), by default of the files that `path` names; None if
        unknown. Raises FileNotFoundError."""
        if not self.in_store and not os.path.isfile(self.path):
            return None
        return input_versions.of_files(locations(self.path))

    def row_sizes(self) -> Iterator[int] | None:
        """An estimate of each row's tokens, in order, or None if that needs a read of every row."""
        return None


@dataclass
class OutputWriter(ReaderOrWriter):
    """The destination of rows. A subclass has either `write_part` and `publish`, or the three older methods, which are
    called on a staging path only (`sky_writers.py`)."""

    _registry = OUTPUT_WRITER_REGISTRY
    extension: ClassVar[str] = "part"
    in_store: ClassVar[bool] = True
    """Whether `path` names a file or a directory of a store, and not, say, a table."""

    @property
    def is_directory(self) -> bool:
        return self.path.endswith("/")

    @property
    def _has_older_methods(self) -> bool:
        return type(self).write_part is OutputWriter.write_part

    def check_output(self, if_exists: str) -> None:
        """Raises FileExistsError if publishing would, before any work is done."""
        publishing.check_output(self.path, if_exists)

    def delete_staging(self, staging: str) -> None:
        """Deletes parts that are not in a store; `staging` is the prefix of their directories."""

    def schema(self, row: Row) -> Schema | None:
        """The types of a row's columns (`schemas.py`), for outputs whose rows must have the same types."""
        return None

    def check(self, row: Row) -> None:
        """Raises ValueError or TypeError for a row that cannot be written: that row fails, in every output."""

    def write_part(self, rows: Sequence[Row | None], span: RowRange, part_base: str) -> PartInfo:
        """Writes an immutable part below `part_base`, a directory of this attempt alone.

        `rows` has one entry for each index of the span, None where a row failed or was dropped; in a job with
        `rows="any"` it may have more or fewer. The same rows written again are the same part.
        """
        return sky_writers.write_part(rows, span, part_base)

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        """Publishes the parts, in the order given; files of the output appear whole.

        Reads a few MiB at a time, and raises CorruptFilesError for a changed part. `staging` is a directory of this
        output alone. With `if_exists="error"`, an existing output that is not this very one raises FileExistsError.
        """
        if not self._has_older_methods:
            raise NotImplementedError(f"{type(self).__name__} has neither publish nor reduce_results; define one")
        return sky_writers.publish(self, parts, staging, if_exists)

    def read_part(self, part: PartInfo) -> Iterator[Row]:
        """The rows of a part, as they would be read from the output."""
        if not self._has_older_methods:
            raise NotImplementedError(f"the parts of a {type(self).__name__} cannot be read as rows; define read_part")
        return sky_writers.read_part(part)

    def read_published(self, output: OutputInfo) -> Iterator[Row]:
        """The rows of the published output, in order: those of all its parts."""
        if self._has_older_methods:
            raise UserError(f"a {type(self).__name__} cannot read its output {output.path}; read the files there")
        for file in publishing.iter_published_files(output, self.is_directory):
            yield from self.read_part(file)

    def upload_batch(self, results: list[Row], start_idx: int, end_idx: int, job_id: str) -> None:
        """Older form: writes one batch somewhere below `path`."""
        raise NotImplementedError(f"{type(self).__name__} has neither upload_batch nor write_part; define one")

    def reduce_results(self, job_id: str) -> None:
        """Older form: makes the output of what `upload_batch` wrote."""

    def cleanup(self, job_id: str) -> None:
        """Older form: deletes files that the output does not need."""


@dataclass
class FileWriter(OutputWriter):
    """A writer whose path must name a file, unless its output is split into several."""

    @property
    def _is_split(self) -> bool:
        return False

    def __post_init__(self) -> None:
        if not self.path or (self.is_directory and not self._is_split):
            raise ValueError(f"the path of a {type(self).__name__} is {self.path!r}; it must name a file")


@dataclass
class DirectoryWriter(OutputWriter):
    """A writer whose path is a directory, with or without a final slash, with names made of row indices."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError(f"the path of a {type(self).__name__} is empty; it must name a directory")
        self.path = self.path.rstrip("/") + "/"

    def check_one_each(self, rows: Sequence[Row | None], span: RowRange) -> None:
        """Raises ProgramError if rows were added or dropped."""
        if len(rows) != span.rows:
            raise ProgramError(f"{len(rows)} results for {span.rows} rows: return one per row, which names its file")


def is_shipped(data: Mapping[str, Any]) -> bool:
    """Whether a dictionary is that of a class outside tinsmith, whose source it has."""
    return "_class_source" in data


def format_of_part(part: PartInfo, part_formats: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The dictionary of the writer of a part that was written for another output, else None."""
    return next((data for prefix, data in part_formats.items() if part.path.startswith(f"{prefix}/")), None)


FORMAT_OF = {ending: name for name, format in FORMATS.items() for ending in format.extensions}
COMPRESSED_ENDINGS = (".gz", ".zst")


def format_of(path: str) -> str:
    """The format that a path's ending names. Raises UserError."""
    plain = path.removesuffix(".gz").removesuffix(".zst").rstrip("*")
    for ending, name in FORMAT_OF.items():
        if plain.endswith(ending):
            return name
    raise UserError(f"the extension of {path!r} is not that of a format; use batch.read_json or another reader")


def in_format(writer: OutputWriter, format: str) -> OutputWriter:
    """A writer of another format beside this one's output: `out.parquet`, or `out/`, in `jsonl` is `out.jsonl`. Raises
    UserError."""
    names = {ending: name for ending, name in FORMAT_OF.items() if FORMATS[name].resumes_as}
    ending = f".{format.removeprefix('.')}"
    if ending not in names:
        raise UserError(f"format is {format!r}; it must be one of {[name[1:] for name in names]}")
    base = writer.path.rstrip("/")
    for known_ending in (*COMPRESSED_ENDINGS, *FORMAT_OF):
        base = base.removesuffix(known_ending)
    kind = OUTPUT_WRITER_REGISTRY.find(names[ending])
    field_names = {field.name for field in fields(kind)}
    column = getattr(writer, "column", None)
    options = {"column": column} if "column" in field_names and column is not None else {}
    return kind(base + ending, **options)  # type: ignore[call-arg]


def request_dict(endpoint: InputReader | OutputWriter) -> dict[str, Any]:
    """The dictionary of a reader or writer with an absolute path, since workers have another working directory and
    home."""
    data = endpoint.to_dict()
    if endpoint.in_store:
        data["path"] = absolute_path(endpoint.path)
    return data


def absolute_path(path: str) -> str:
    """The path from the root, with `~` expanded and a final slash kept; a URL as it is."""
    return path if "://" in path else os.path.join(os.getcwd(), os.path.expanduser(path))


def canonical_json(data: Mapping[str, Any]) -> str:
    """A JSON text that is the same for equal objects."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def serialize_class(cls: type) -> dict[str, Any]:
    """A class's source and the imports that it needs. Raises ValueError if it uses other names of its file."""
    definition = shipping.definition_of(cls)
    definition.decorator_list = [node for node in definition.decorator_list if "type_register" not in ast.unparse(node)]
    advice = "Move them into the class, or into an installed package."
    imports = shipping.references_of(cls, definition, lambda value: _import_reference(value, cls), advice)
    text = shipping.text_of(definition)
    return {
        "_class_name": cls.__name__,
        "_class_source": text,
        "_class_imports": imports,
        "_class_sha256": _digest(text, imports),
    }


def _import_reference(value: object, cls: type) -> str | None:
    """`module` or `module:name` that imports a value on another machine; None if it is not from a package."""
    if isinstance(value, ModuleType):
        return value.__name__
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or getattr(value, "_name", None)
    if not module or not name or module in (cls.__module__, "__main__"):
        return None
    try:
        imported = pkgutil.resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError, ValueError):
        return None
    return f"{module}:{name}" if imported is value else None


def build_dataclass(cls: Any, values: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401  a dataclass and its instance
    """An instance of a dataclass from its fields. Raises UserError that begins with `name`."""
    init_fields = {field.name: field for field in fields(cls) if field.init}
    if unknown := sorted(set(values) - set(init_fields)):
        raise UserError(f"{name} has no field {unknown}; it has {sorted(init_fields)}")
    required = {
        field_name
        for field_name, field in init_fields.items()
        if field.default is MISSING and field.default_factory is MISSING
    }
    if missing := sorted(required - set(values)):
        raise UserError(f"{name} needs the fields {missing}")
    return cls(**values)


def _build_shipped_class(data: Mapping[str, Any]) -> type:
    text, imports, name = data["_class_source"], data["_class_imports"], data["_class_name"]
    digest = _digest(text, imports)
    shipping.check_digest(name, digest, data["_class_sha256"])
    # A separate module, because dataclasses and pickle look classes up by it.
    module = ModuleType(f"tinsmith_shipped_{digest[:16]}")
    if module.__name__ in sys.modules:
        return getattr(sys.modules[module.__name__], name)
    sys.modules[module.__name__] = module
    try:
        return shipping.run_source(text, name, imports, vars(module))
    except Exception:
        del sys.modules[module.__name__]
        raise


def _digest(text: str, imports: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps([text, dict(imports)], sort_keys=True).encode()).hexdigest()
