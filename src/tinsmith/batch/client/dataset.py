"""Data sets and what is mapped over them: the client's side of a bulk job.

`Dataset.map` with an output submits a job; without one it waits for `write_json` and the like. Invalid functions,
options, and outputs that exist are refused here, before anything is sent.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict, Unpack

from tinsmith.batch import operations
from tinsmith.batch.client import adapters, functions
from tinsmith.batch.client.http import Client, Status
from tinsmith.batch.client.job import Job
from tinsmith.batch.formats import registry
from tinsmith.batch.formats.publishing import check_output
from tinsmith.batch.formats.registry import InputReader, OutputWriter, format_of, sent
from tinsmith.batch.job_request import read_job
from tinsmith.batch.operations.base import RowOperation
from tinsmith.batch.types import DEFAULT_POOL, JobSpec, Row, identity_of
from tinsmith.errors import NotSupportedError, UserError

Writers = OutputWriter | Sequence[OutputWriter]

POSITIONAL = ("batch_size", "output", "activate_env", "stream")
DEFAULT_BATCH_SIZE = 32
SPEC_OPTIONS = (
    "batch_tokens", "if_exists", "limits", "max_failed_rows", "name", "priority", "python", "rows", "weight",
)  # fmt: skip
"""Options of `map` that are fields of the specification."""
ONLY_OF_FUNCTIONS = {
    "batched", "batch_format", "with_indices", "remove_columns", "fn_kwargs", "fn_constructor_kwargs", "serializer",
    "activate_env", "python",
}  # fmt: skip


class JobRefusedError(UserError, RuntimeError):
    """The server refused the job: it has no such pool, say, or the tenant may not run it."""


class MapOptions(TypedDict, total=False):
    """What `Dataset.map` and `map_batches` take by name. `types.JobSpec` says what most of them mean."""

    pool: str
    output: Writers
    errors: OutputWriter
    batch_size: int
    batch_tokens: int
    batched: bool
    batch_format: str
    with_indices: bool
    remove_columns: str | list[str]
    rows: str
    fn_kwargs: dict[str, Any]
    fn_constructor_kwargs: dict[str, Any]
    serializer: str
    max_failed_rows: float
    if_exists: str
    resume_from: int | Job
    activate_env: str
    python: str
    name: str
    weight: float
    priority: int
    limits: dict[str, Any]
    stream: bool
    client: Client


class Dataset:
    """Rows to be mapped: of a reader, a path, a list, or a Hugging Face data set."""

    def __init__(self, source: InputReader | str | Iterable[Row]) -> None:
        self.reader = _reader_of(source)

    @property
    def path(self) -> str:
        return self.reader.path

    @property
    def input_format(self) -> str:
        return str(self.reader.to_dict()["format"])

    def __repr__(self) -> str:
        return f"Dataset({self.reader!r})"

    def __len__(self) -> int:
        return len(self.reader)

    @classmethod
    def from_hf(cls, name: object, split: str | None = None, **options: object) -> Dataset:
        from tinsmith.batch.formats.huggingface import reader_of

        return cls(reader_of(name, split, **options))

    def map(
        self,
        mapper_fn: Callable[..., object] | RowOperation | Sequence[RowOperation],
        pool_name: str = "",
        *positional: Any,  # noqa: ANN401
        **options: Unpack[MapOptions],
    ) -> Job | Mapped:
        """Maps the rows. A `@remote_function` loops over `load()`; a class is built once on each worker and called with
        batches; any other function takes a row, or, with `batched=True`, a batch, and its result is merged over the
        row's columns. An operation, or a list of them, is run by the service and needs no code of yours.
        With an `output`, the job is submitted; else the result waits for its `write_...`.

        By position, after the pool: batch_size, output, activate_env, stream."""
        if len(positional) > len(POSITIONAL) or set(POSITIONAL[: len(positional)]) & set(options):
            raise TypeError(f"map takes a function, a pool and {list(POSITIONAL)} by position, and each of them once")
        options.update(zip(POSITIONAL, positional, strict=False))  # type: ignore[typeddict-item]
        pool = options.setdefault("pool", pool_name or DEFAULT_POOL)
        if pool_name and pool != pool_name:
            raise ValueError(f"pool_name {pool_name!r} and pool {pool!r} are two names of one thing")
        if isinstance(mapper_fn, RowOperation | Sequence):
            return self._operated([mapper_fn] if isinstance(mapper_fn, RowOperation) else list(mapper_fn), options)
        batched = options.get("batched", False) or options.get("batch_format") is not None
        return self._mapped(mapper_fn, "batch" if batched else "row", True, options)

    def sample(self, model: str, **given: Any) -> Job | Mapped:  # noqa: ANN401
        """Maps the rows with a `Sample` of the model; takes the fields of that and the options of `map`."""
        from tinsmith.batch.operations.sample import Sample

        options = {name: value for name, value in given.items() if name in MapOptions.__annotations__}
        fields = {name: value for name, value in given.items() if name not in options}
        return self.map(Sample(model, **fields), **options)  # type: ignore[arg-type]

    def map_batches(self, mapper: Callable[..., object], **options: Unpack[MapOptions]) -> Job | Mapped:
        """Maps batches with a function or a class. Results replace the rows."""
        return self._mapped(mapper, "batch", False, options)

    def _operated(self, steps: list[RowOperation], options: MapOptions) -> Job | Mapped:
        for step in steps:
            if not isinstance(step, RowOperation):
                raise ValueError(f"a step is {step!r}; it must be an operation, such as batch.Sample(...)")
        if refused := sorted(set(options) & ONLY_OF_FUNCTIONS):
            raise NotSupportedError(f"operations take no {refused}, which belong to functions")
        mapped = Mapped(self.reader, operations.payload_of(steps), options)
        output = options.get("output")
        return mapped if output is None else mapped.write(output)

    def _mapped(self, mapper: Callable[..., object], kind: str, merge: bool, options: MapOptions) -> Job | Mapped:
        unknown = sorted(set(options) - set(MapOptions.__annotations__))
        if unknown:
            raise NotSupportedError(f"map has no option {unknown}; it has {sorted(MapOptions.__annotations__)}")
        mapped = Mapped(self.reader, _payload(mapper, kind, merge, options), options)
        output = options.get("output")
        return mapped if output is None else mapped.write(output)


class Mapped:
    """A data set with a function, before its output is chosen."""

    def __init__(self, reader: InputReader, payload: str, options: MapOptions) -> None:
        self._reader = reader
        self._payload = payload
        self._options = options

    def write(self, output: Writers) -> Job:
        """Submits the job. Unless `stream=False`, shows its progress and returns once it has succeeded."""
        options = self._options
        outputs = [output] if isinstance(output, OutputWriter) else list(output)
        client = options.get("client") or Client()
        if options.get("if_exists") == "resume":
            options["if_exists"] = "error"
            if (last := _last_job(client, outputs)) is not None:
                status = last.status()
                self._check_same(client.partial(int(last), limit=1), status, outputs)
                if status["status"] not in ("FAILED", "CANCELLED"):
                    return self._followed(last)
                options["resume_from"] = last
        spec = self._spec(outputs)
        try:
            job = Job(client.submit(spec.to_dict()), client)
        except UserError as error:
            raise JobRefusedError(str(error)) from None
        return self._followed(job)

    def _check_same(self, told: Status, status: Status, outputs: list[OutputWriter]) -> None:
        """Raises JobRefusedError if a different job writes to these outputs and has rows."""
        given = sent(self._reader.of_job([str(sent(writer)["path"]) for writer in outputs]))
        mine = {
            "function": identity_of(self._payload),
            "input": {name: given[name] for name in ("format", "path")},
            "rows": self._options.get("rows", "one"),
        }
        other = [name for name, value in mine.items() if told[name] != value]
        if other and (status["rows_ok"] or status["status"] not in ("FAILED", "CANCELLED")):
            job_id, rows, name = status["job_id"], status["rows_ok"], other[0]
            raise JobRefusedError(
                f"bulk job {job_id} writes to these outputs, is {status['status']} and has {rows} rows, but its {name} "
                f"differs: {told[name]} there, {mine[name]} here. To keep its rows and do the rest with this job, pass "
                f"resume_from={job_id}; to start again, if_exists='overwrite'"
            )

    def _followed(self, job: Job) -> Job:
        if self._options.get("stream", True):
            job.wait(progress=True)
        return job

    def write_json(self, path: str, column: str | list[str] | None = None) -> Job:
        return self.write(_writer("json", path=path, column=column))

    def write_csv(self, path: str, column: list[str] | None = None) -> Job:
        return self.write(_writer("csv", path=path, column=column))

    def write_parquet(self, path: str, column: list[str] | None = None) -> Job:
        return self.write(_writer("parquet", path=path, column=column))

    def write_text(self, path: str, column: str = "text") -> Job:
        return self.write(_writer("text", path=path, column=column))

    def write_sql(self, url: str, table: str = "", *, append: bool = False, password: str = "") -> Job:
        return self.write(_writer("sql", path=url, table=table, append=append, password=password))

    def write_images(self, path: str, column: str = "image") -> Job:
        return self.write(_writer("images", path=path, column=column))

    def map(self, *_: object, **__: object) -> Job:
        raise NotSupportedError("a mapped data set cannot be mapped again; put both steps into one function")

    map_batches = map

    def _spec(self, outputs: list[OutputWriter]) -> JobSpec:
        options = self._options
        if_exists = options.get("if_exists", "error")
        errors = options.get("errors")
        for writer in [*outputs, *([errors] if errors is not None else [])]:
            if not isinstance(writer, OutputWriter):
                raise ValueError(f"an output is {writer!r}; it must be a writer, such as batch.JsonWriter(PATH)")
            if not writer.path:
                raise ValueError(f"the output path of a {type(writer).__name__} is empty")
            if writer.in_store:
                check_output(writer.path, if_exists)
        formats = [sent(writer) for writer in outputs]
        values: dict[str, Any] = {name: value for name, value in options.items() if name in SPEC_OPTIONS}
        values |= {
            "batch_serialized_fn": self._payload,
            "batch_input_format": sent(self._reader.of_job([str(each["path"]) for each in formats])),
            "batch_output_formats": formats,
            "batch_size": options.get("batch_size", DEFAULT_BATCH_SIZE),
            "batch_pool_name": options.get("pool", DEFAULT_POOL),
            "batch_error_format": sent(errors) if errors is not None else None,
            "batch_activate_env": options.get("activate_env"),
            "directory": os.getcwd(),
        }
        if (resumed := options.get("resume_from")) is not None:
            values["resume_from"] = int(resumed)
        try:
            return read_job(values)
        except UserError as error:
            raise ValueError(str(error)) from None


def _last_job(client: Client, outputs: Sequence[OutputWriter]) -> Job | None:
    """The newest of the last jobs with exactly these outputs."""
    wanted = [sent(writer) for writer in outputs]
    for job in client.jobs():
        if client.partial(job["job_id"], limit=1)["outputs"] == wanted:
            return Job(job["job_id"], client)
    return None


def _payload(mapper: Callable[..., object], kind: str, merge: bool, options: MapOptions) -> str:
    """The function's payload; its type decides how it is called."""
    kwargs = options.get("fn_kwargs")
    settings: dict[str, Any] = {}
    if inspect.isclass(mapper):
        kind, merge, kwargs = "class", False, options.get("fn_constructor_kwargs") or kwargs
    elif functions.is_remote_function(mapper) and not options.get("batched"):
        kind = "loop"
    elif kind == "row" and not inspect.signature(mapper).parameters:
        raise ValueError(
            "Mapper function must be decorated with @batch.remote_function if it takes no argument and loops over "
            "load(); else it takes a row, or with batched=True a batch"
        )
    shape = options.get("batch_format", "list")
    if shape not in adapters.BATCH_FORMATS:
        raise ValueError(f"batch_format is {shape!r}; it must be one of {list(adapters.BATCH_FORMATS)}")
    if kind != "loop":
        removed = options.get("remove_columns") or []
        settings = {
            "batch_format": shape,
            "with_indices": options.get("with_indices", False),
            "remove_columns": [removed] if isinstance(removed, str) else list(removed),
            "merge": merge,
        }
    return functions.serialize_function(
        mapper, kwargs=kwargs, kind=kind, options=settings, serializer=options.get("serializer")
    )


def from_items(items: Iterable[Row]) -> Dataset:
    return Dataset(list(items))


def from_huggingface(dataset: object, split: str | None = None) -> Dataset:
    return Dataset.from_hf(dataset, split)


def read_json(path: str) -> Dataset:
    return Dataset(_reader("json", path=path))


def read_csv(path: str) -> Dataset:
    return Dataset(_reader("csv", path=path))


def read_parquet(path: str) -> Dataset:
    return Dataset(_reader("parquet", path=path))


def read_text(path: str, column: str = "text") -> Dataset:
    return Dataset(_reader("text", path=path, column=column))


def read_images(path: str) -> Dataset:
    return Dataset(_reader("images", path=path))


def read_webdataset(path: str) -> Dataset:
    return Dataset(_reader("webdataset", path=path))


def read_sql(
    url: str, table: str = "", *, query: str = "", key: str | list[str] | None = None, password: str = ""
) -> Dataset:
    """The rows of a table, by its primary key or another unique one, or of a query."""
    return Dataset(_reader("sql", path=url, table=table, query=query, key=key, password=password))


def read_openai_batch(path: str) -> Dataset:
    return Dataset(_reader("openai_batch", path=path))


def resume(job_id: int | Job, client: Client | None = None) -> Job:
    """A new job that does the rest of a failed or cancelled one."""
    return Job(int(job_id), client).resume()


def _reader_of(source: object) -> InputReader:
    if isinstance(source, InputReader):
        return source
    if isinstance(source, str):
        return _reader(format_of(source), path=source)
    if type(source).__module__.startswith("datasets."):
        from tinsmith.batch.formats.huggingface import reader_of

        return reader_of(source, None)
    if isinstance(source, Iterable):
        return _reader("items", items=list(source))
    raise UserError(f"a data set is made of a reader, a path or rows, not of a {type(source).__name__}")


def _reader(format: str, **fields: object) -> InputReader:
    return registry.INPUT_READER_REGISTRY.find(format)(**fields)  # type: ignore[arg-type]


def _writer(format: str, **fields: object) -> OutputWriter:
    return registry.OUTPUT_WRITER_REGISTRY.find(format)(**fields)  # type: ignore[arg-type]
