"""Data sets and the steps that are mapped over them: the client's side of a bulk job.

`Dataset.map`, `map_batches`, `filter` and `flat_map` give a data set with one step more, and a batch goes through all
steps in one pass. With an output, or by `write_json` and the like, they submit a job. Invalid functions, options, and
outputs that exist are refused here, before anything is sent.

One rule determines the output columns: `map` puts the result's columns over those of the row, less `remove_columns`;
`filter` keeps rows as they are; `flat_map`, `map_batches` and loops over `load()` give the new rows whole.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NoReturn, Unpack, overload

from tinsmith.batch import operations
from tinsmith.batch.client import functions, habits, local_run
from tinsmith.batch.client.http import Client, Status
from tinsmith.batch.client.job import Job
from tinsmith.batch.client.local_run import DryRun
from tinsmith.batch.client.options import (
    OUTPUT_OPTIONS,
    SPEC_FIELDS,
    JobOptions,
    MapOptions,
    RunOptions,
    StepOptions,
    Writers,
    check_options,
    check_step_options,
    spec_fields,
    writers_of,
)
from tinsmith.batch.formats import input_versions, registry
from tinsmith.batch.formats.offset_cache import cache_directory
from tinsmith.batch.formats.publishing import check_output
from tinsmith.batch.formats.registry import (
    COMPRESSED_ENDINGS,
    FORMAT_OF,
    InputReader,
    OutputWriter,
    absolute_path,
    format_of,
    request_dict,
)
from tinsmith.batch.job_identity import describe_job, differences
from tinsmith.batch.job_request import read_job
from tinsmith.batch.operations.base import RowOperation
from tinsmith.batch.stages import INTERPRETER, STAGE_OPTIONS, split, worker_options
from tinsmith.batch.types import CHAIN, JobSpec, Row, pack_payload
from tinsmith.errors import NotSupportedError, UserError
from tinsmith.runtime import notebook
from tinsmith.storage.locations import locations

SHOWN_CHARACTERS = 200
"""The most characters of a reader in a `repr`: a list of rows may be long."""

Mapped = Callable[..., object] | RowOperation | Sequence[RowOperation]


class JobRefusedError(UserError, RuntimeError):
    """The server refused the job: it has no such pool, say, or the tenant may not run it."""


@dataclass(eq=False)
class _Resumption:
    """One `resume_from` of a call, which is for one job."""

    is_used: bool = False


class Dataset:
    """Rows of a reader, a path, a list or a Hugging Face data set, and the steps that they will go through."""

    def __init__(self, source: InputReader | str | Iterable[Row]) -> None:
        self.reader = _reader_of(source)
        self._steps: tuple[dict[str, Any], ...] = ()
        self._options: Mapping[str, Any] = MappingProxyType({})

    _forgotten = False
    """Whether it has steps that nothing has run or extended."""

    _resumption: _Resumption | None = None
    """The use of its `resume_from`, which it shares with the data sets that were made of it."""

    def _derive(self, steps: tuple[dict[str, Any], ...], options: Mapping[str, Any]) -> Dataset:
        """A data set of the same rows. Its options are its own: nothing that is changed later reaches it."""
        dataset = Dataset(self.reader)
        dataset._steps = steps
        dataset._options = MappingProxyType({name: _copy_option(value) for name, value in options.items()})
        dataset._resumption = self._resumption
        return dataset

    @property
    def path(self) -> str:
        return self.reader.path

    @property
    def input_format(self) -> str:
        return str(self.reader.to_dict()["format"])

    def __repr__(self) -> str:
        steps = f", steps={list(self._step_names)}" if self._steps else ""
        limit = "" if self._limit is None else f", limit={self._limit}"
        return f"Dataset({_shorten(repr(self.reader))}{steps}{limit})"

    def _repr_html_(self) -> str:
        """The source and the steps. Nothing is read."""
        limit = None if self._limit is None else f"{self._limit:,}"
        source = self.path or type(self.reader).__name__
        fields = {
            "Source": source,
            "Format": self.input_format,
            "Row limit": limit,
            "Steps": ", ".join(self._step_names),
        }
        note = f"{NO_OUTPUT}." if self._forgotten else ""
        return notebook.card("Data set", fields, note=note)

    @property
    def _step_names(self) -> tuple[str, ...]:
        parts = [part for step in self._steps for part in step.get("steps") or [step]]
        return tuple(str(part.get("name") or part.get("operation") or part.get("type")) for part in parts)

    def __len__(self) -> int:
        """The number of input rows."""
        return len(self.reader) if self._limit is None else min(len(self.reader), self._limit)

    @property
    def _limit(self) -> int | None:
        return self._options.get("limit")

    def limit(self, rows: int) -> Dataset:
        """The first rows alone. A step that may return several rows for one, or none, comes after it."""
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise ValueError(f"rows is {rows!r}; limit takes a whole number from 1")
        if _rows_of(self._steps) != "one":
            raise ValueError(
                "limit counts input rows, and a step before it may return another number of rows; call limit first"
            )
        limit = rows if self._limit is None else min(rows, self._limit)
        dataset = self._derive(self._steps, {**self._options, "limit": limit})
        dataset._forgotten, self._forgotten = self._forgotten, False
        return dataset

    def take(self, rows: int = 20) -> list[Row]:
        """The first rows of the result as a list, computed in this process without a server, which needs the input
        here. Functions of rows are called for no more rows than it takes, others for whole batches. Raises
        RowFailedError if one of these rows fails."""
        if not self._steps:
            count = min(rows, len(self))
            return self.reader.download_batch(0, count - 1, str(cache_directory())) if count > 0 else []
        return self._run_here(None, max(rows, 0)).check().rows[: max(rows, 0)]

    def dry_run(self, rows: int = local_run.ROWS, output: Writers | None = None) -> DryRun:
        """The results and failures of the first input rows, computed in this process without a server, which needs the
        input here. With an `output`, raises UserError for results that it could not hold; nothing is written."""
        result = self._run_here(rows, None)
        if output is not None:
            local_run.check_outputs(result, writers_of(output))
        return result

    def _run_here(self, max_rows: int | None, max_results: int | None) -> DryRun:
        self._forgotten = False
        if not self._steps:
            raise ValueError("this data set has no step; call map, map_batches, filter or flat_map before running it")
        options = {name: value for name, value in self._options.items() if name not in OUTPUT_OPTIONS}
        with local_run.collect() as (writer, collected):
            return local_run.run_rows(self._spec([writer], options), collected, max_rows, max_results)

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith("_") and hasattr(Job, name):
            raise AttributeError(f"{NO_OUTPUT}. This starts the job, which has {name!r}")
        raise AttributeError(f"a Dataset has no attribute {name!r}")

    def __int__(self) -> int:
        raise TypeError(f"{NO_OUTPUT}. This starts the job, which has the id")

    def __del__(self) -> None:
        if self._forgotten and not sys.is_finalizing():
            warnings.warn(f"{NO_OUTPUT}. No job was started", UserWarning, stacklevel=2)

    @classmethod
    def from_hf(cls, name: object, split: str | None = None, **options: object) -> Dataset:
        from tinsmith.batch.formats.huggingface import reader_of

        return cls(reader_of(name, split, **options))

    @classmethod
    def from_ray(cls, dataset: object, path: str | None = None) -> Dataset:
        """The rows of a data set of Ray Data. It is run once, when they are first needed, and its rows are written to
        `path`, a new Parquet file that the workers can read; by default one of this machine, which it keeps for a
        week."""
        from tinsmith.batch.client.ray_data import RayReader

        return cls(RayReader(dataset, path))

    def to_ray(self) -> Any:  # noqa: ANN401  a data set of Ray
        """A data set of Ray Data with these rows, in their order, which Ray's tasks read when it is run. Raises
        NotSupportedError for a data set with steps."""
        from tinsmith.batch.client.ray_data import to_ray

        if self._steps:
            names = list(self._step_names)
            raise NotSupportedError(
                f"to_ray reads rows, and this data set has the steps {names}, which jobs run; write it "
                "to a file, and read that with batch.load(PATH).to_ray()"
            )
        return to_ray(self.reader, self._limit)

    @overload
    def map(
        self,
        mapper_fn: Mapped,
        pool_name: str = "",
        batch_size: int | None = None,
        output: None = None,
        activate_env: str | None = None,
        stream: bool | None = None,
        **options: Unpack[MapOptions],
    ) -> Dataset: ...
    @overload
    def map(self, mapper_fn: Mapped, pool_name: str = "", **options: Unpack[JobOptions]) -> Job: ...
    @overload
    def map(
        self,
        mapper_fn: Mapped,
        pool_name: str,
        batch_size: int | None,
        output: Writers,
        activate_env: str | None = None,
        stream: bool | None = None,
        **options: Unpack[MapOptions],
    ) -> Job: ...
    def map(
        self,
        mapper_fn: Mapped,
        pool_name: str = "",
        batch_size: int | None = None,
        output: Writers | None = None,
        activate_env: str | None = None,
        stream: bool | None = None,
        **options: object,
    ) -> Dataset | Job:
        """A function or class that takes a row, or with `batched=True` a batch; the columns of its result go over those
        of the row. A `@remote_function` without required parameters loops over `load()` instead. An operation, or a
        list of them, is run by the service and needs no code of yours.

        With an `output` the result is a Job; else a Dataset with this step, to be mapped again or written."""
        by_position = {"batch_size": batch_size, "output": output, "activate_env": activate_env, "stream": stream}
        all_options = {**options, **{name: value for name, value in by_position.items() if value is not None}}
        if pool_name and all_options.setdefault("pool", pool_name) != pool_name:
            raise ValueError(
                f"pool_name is {pool_name!r} and pool is {all_options['pool']!r}; they are one option: give one"
            )
        if isinstance(mapper_fn, RowOperation | Sequence):
            steps = [mapper_fn] if isinstance(mapper_fn, RowOperation) else list(mapper_fn)
            all_options = habits.translate(all_options)
            return self._add_step(_operations(steps, all_options), all_options)
        return self._add_function(mapper_fn, "row", all_options)

    @overload
    def map_batches(self, mapper: Callable[..., object], **options: Unpack[RunOptions]) -> Dataset: ...
    @overload
    def map_batches(self, mapper: Callable[..., object], **options: Unpack[JobOptions]) -> Job: ...
    def map_batches(self, mapper: Callable[..., object], **options: object) -> Dataset | Job:
        """A function or class that takes a batch in its `batch_format` and returns, or yields, the new rows."""
        return self._add_function(mapper, "batch", options)

    @overload
    def filter(self, predicate: Callable[..., object], **options: Unpack[RunOptions]) -> Dataset: ...
    @overload
    def filter(self, predicate: Callable[..., object], **options: Unpack[JobOptions]) -> Job: ...
    def filter(self, predicate: Callable[..., object], **options: object) -> Dataset | Job:
        """Keeps the rows for which the function returns something true; with `batched=True` or a `batch_format` it gets
        a batch and returns one value for each row."""
        return self._add_function(predicate, "filter", options)

    @overload
    def flat_map(self, mapper: Callable[..., object], **options: Unpack[RunOptions]) -> Dataset: ...
    @overload
    def flat_map(self, mapper: Callable[..., object], **options: Unpack[JobOptions]) -> Job: ...
    def flat_map(self, mapper: Callable[..., object], **options: object) -> Dataset | Job:
        """A function that takes a row and returns, or yields, any number of new rows."""
        return self._add_function(mapper, "flat", options)

    @overload
    def sample(self, model: str, *, output: None = None, **keywords: Any) -> Dataset: ...  # noqa: ANN401
    @overload
    def sample(self, model: str, *, output: Writers, **keywords: Any) -> Job: ...  # noqa: ANN401
    def sample(self, model: str, **keywords: Any) -> Dataset | Job:
        """Maps the rows with a `Sample` of the model; takes the fields of that and the options of `map`."""
        from tinsmith.batch.operations.sample import Sample

        options = {name: value for name, value in keywords.items() if name in JobOptions.__annotations__}
        fields = {name: value for name, value in keywords.items() if name not in options}
        return self.map(Sample(model, **fields), **options)  # type: ignore[arg-type]

    def _add_function(self, function: Callable[..., object], kind: str, options: Mapping[str, Any]) -> Dataset | Job:
        options = habits.translate(options)
        return self._add_step(_step(function, kind, options), options)

    def _add_step(self, step: dict[str, Any], options: Mapping[str, Any]) -> Dataset | Job:
        steps = (*self._steps, step)
        _check_chain(steps)
        job_options = {name: value for name, value in options.items() if name not in StepOptions.__annotations__}
        if stage_options := _take_stage_options(job_options):
            steps = (*self._steps, {**step, "stage_options": stage_options})
        for name, value in self._options.items():
            if job_options.setdefault(name, value) != value:
                raise ValueError(f"{name} is {value!r} at one step and {job_options[name]!r} at another; give it once")
        output = job_options.pop("output", None)
        dataset = self._derive(steps, job_options)
        if options.get("resume_from") is not None:
            dataset._resumption = _Resumption()
        self._forgotten = False
        if output is not None:
            return dataset.write(output)
        dataset._forgotten = True
        return dataset

    def write(self, output: Writers) -> Job:
        """Submits the job. Unless `stream=False`, shows its progress and returns once it has succeeded."""
        self._forgotten = False
        if not self._steps:
            raise ValueError("this data set has no step; call map, map_batches, filter or flat_map before writing it")
        options = dict(self._options)
        if self._resumption is not None and self._resumption.is_used:
            raise ValueError(
                f"resume_from={int(options['resume_from'])} belongs to the first output that this data set was "
                "written to; map the rows again, without resume_from, for another job"
            )
        outputs = writers_of(output)
        client = options.get("client") or Client()
        last = None
        if options.get("if_exists") == "resume":
            if options.get("resume_from") is not None:
                raise ValueError("if_exists='resume' looks for the job to resume; leave resume_from out, or if_exists")
            options["if_exists"] = "error"
            last = _last_job(client, outputs)
        spec = self._spec(outputs, options, is_resumed=last is not None)
        if last is not None:
            status = last.status()
            self._check_same(client.partial(int(last), limit=1), status, spec)
            is_resumed = status["status"] in ("FAILED", "CANCELLED")
            deleted = _find_deleted_output(client, status, outputs)
            if not is_resumed and deleted is None:
                return self._follow(last)
            spec = replace(self._spec(outputs, options), resume_from=int(last) if is_resumed else None)
            if deleted is not None:
                note = f"the output {deleted} of bulk job {int(last)} was deleted, as its parts were"
                warnings.warn(f"{note}; a new job computes it again", UserWarning, stacklevel=2)
        try:
            job = Job(client.submit(spec.to_dict()), client)
        except UserError as error:
            raise JobRefusedError(str(error)) from None
        if self._resumption is not None:
            self._resumption.is_used = True
        return self._follow(job)

    def _check_same(self, stored: Status, status: Status, spec: JobSpec) -> None:
        """Raises JobRefusedError if a different job writes to these outputs and has rows."""
        is_over = status["status"] not in ("FAILED", "CANCELLED")
        # A job that resumes another may take over its rows only later.
        if not status["rows_ok"] and status.get("resume_from") is None and not is_over:
            return
        other = differences(stored, describe_job(spec), self.reader, self._options.get("errors"))
        allowed = stored.get("max_failed_rows", spec.max_failed_rows), spec.max_failed_rows
        if is_over and status["rows_failed"] and allowed[0] != allowed[1]:
            other["max_failed_rows"] = allowed
        if other:
            name, (before, after) = next(iter(other.items()))
            change = f"its {name} is {before} and this job's is {after}"
        elif change := self._input_change(stored.get("input_version")) if is_over else "":
            pass
        else:
            return
        job_id, rows = status["job_id"], status["rows_ok"]
        again = "to start over, pass if_exists='overwrite'"
        if not is_over:
            again = f"To keep its rows and compute the rest with this job, pass resume_from={job_id}; {again}"
        raise JobRefusedError(
            f"bulk job {job_id} ({status['status']}, {rows} rows) writes to these outputs, but {change}. "
            f"{again[0].upper()}{again[1:]}"
        )

    def _input_change(self, before: input_versions.Version | None) -> str:
        """How the input differs from the one that a job read; empty if it does not, or cannot be read from here."""
        try:
            if before is not None:
                reader = self.reader
                if reader.in_store:  # the server has an absolute path
                    reader = replace(reader, path=absolute_path(reader.path))
                input_versions.check(before, reader.version())
        except input_versions.InputChangedError as error:
            return str(error)
        except OSError:
            return ""
        return ""

    def _follow(self, job: Job) -> Job:
        if self._options.get("stream", True):
            job.wait()
        return job

    def write_json(self, path: str, column: str | list[str] | None = None, *, rows_per_file: int | None = None) -> Job:
        return self.write(_writer("json", path=path, column=column, rows_per_file=rows_per_file))

    def write_csv(self, path: str, column: list[str] | None = None, *, rows_per_file: int | None = None) -> Job:
        return self.write(_writer("csv", path=path, column=column, rows_per_file=rows_per_file))

    def write_parquet(self, path: str, column: list[str] | None = None, *, rows_per_file: int | None = None) -> Job:
        return self.write(_writer("parquet", path=path, column=column, rows_per_file=rows_per_file))

    def write_huggingface(self, path: str, column: list[str] | None = None) -> Job:
        """A directory for `datasets.load_from_disk`."""
        return self.write(_writer("huggingface", path=path, column=column))

    def write_text(self, path: str, column: str = "text") -> Job:
        return self.write(_writer("text", path=path, column=column))

    def write_sql(self, url: str, table: str = "", *, append: bool = False, password: str = "") -> Job:
        return self.write(_writer("sql", path=url, table=table, append=append, password=password))

    def write_images(self, path: str, column: str = "image") -> Job:
        return self.write(_writer("images", path=path, column=column))

    def _payload(self) -> str:
        steps: Sequence[Mapping[str, Any]] = self._steps
        if len(split(steps)) == 1:
            steps = [{name: value for name, value in step.items() if name != "stage_options"} for step in steps]
        if len(steps) == 1:
            return pack_payload(steps[0])
        return pack_payload({"type": CHAIN, "version": functions.VERSION, "steps": steps})

    def _spec(
        self, outputs: list[OutputWriter], options: Mapping[str, Any] | None = None, *, is_resumed: bool = False
    ) -> JobSpec:
        """The specification with these options, by default the data set's. The outputs must not exist, unless
        `is_resumed`: they may be those of this very job."""
        options = self._options if options is None else options
        if_exists = options.get("if_exists") or JobSpec.if_exists
        errors = options.get("errors")
        for writer in [*outputs, *([errors] if errors is not None else [])]:
            if not isinstance(writer, OutputWriter):
                raise ValueError(f"an output is {writer!r}; it must be a writer, such as batch.JsonWriter(PATH)")
            if not writer.path:
                raise ValueError(f"the output path of a {type(writer).__name__} is empty")
            if writer.in_store and not is_resumed:
                check_output(writer.path, if_exists)
        values = {
            **spec_fields(options),
            "batch_serialized_fn": self._payload(),
            "batch_input_format": request_dict(self.reader),
            "batch_output_formats": [request_dict(writer) for writer in outputs],
            "rows": _rows_of(self._steps),
            "limit": options.get("limit"),
            "directory": os.getcwd(),
        }
        stages = split(self._steps)
        try:
            for stage in stages if len(stages) > 1 else ():
                read_job({**values, **stage.options})
            return read_job({**values, **worker_options(stages)})
        except UserError as error:
            raise ValueError(str(error)) from None


def _shorten(text: str) -> str:
    """A text of which a line shows enough."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _take_stage_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of a stage from those of a job, and return them by their names in a specification."""
    stage_options = {field: options.pop(name, None) for name, field in SPEC_FIELDS.items() if field in STAGE_OPTIONS}
    return {
        name: os.path.expanduser(value) if name in INTERPRETER and isinstance(value, str) else _copy_option(value)
        for name, value in stage_options.items()
        if value is not None
    }


def _copy_option(value: object) -> object:
    """A copy of a value of JSON or of a writer; other objects, such as a client, are shared."""
    if isinstance(value, OutputWriter):
        return replace(value)
    return deepcopy(value) if isinstance(value, dict | list | set) else value


def _last_job(client: Client, outputs: Sequence[OutputWriter]) -> Job | None:
    """The newest job with exactly these outputs, among the last page of jobs."""
    formats = [request_dict(writer) for writer in outputs]
    for job in client.jobs():
        if client.partial(job["job_id"], limit=1)["outputs"] == formats:
            return Job(job["job_id"], client)
    return None


def _find_deleted_output(client: Client, status: Status, outputs: Sequence[OutputWriter]) -> str | None:
    """The path of an output of a job that has succeeded which neither this process nor the server finds any more."""
    if status["status"] != "SUCCEEDED":
        return None
    for index, writer in enumerate(outputs):
        try:
            if writer.in_store:
                check_output(writer.path, "error")
        except FileExistsError:
            continue
        if writer.in_store and not client.has_output(status["job_id"], index):
            return writer.path
    return None


NO_OUTPUT = "this data set was mapped but has no output: pass output=batch.JsonWriter(PATH), or call .write_json(PATH)"


def _operations(steps: list[RowOperation], options: Mapping[str, Any]) -> dict[str, Any]:
    for step in steps:
        if not isinstance(step, RowOperation):
            raise ValueError(f"a step is {step!r}; it must be an operation, such as batch.Sample(...)")
    check_options(options)
    if refused := sorted(set(options) & {*StepOptions.__annotations__, "activate_env", "python", "env", "secrets"}):
        raise NotSupportedError(f"{refused} are options of functions; leave them out for operations")
    operations.payload_of(steps)
    return operations.describe_operations(steps)


def _step(mapper: Callable[..., object], kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The payload of one function; a `@remote_function` without required parameters is a loop."""
    check_options(options)
    method = {"row": "map", "batch": "map_batches", "flat": "flat_map"}.get(kind, kind)
    kwargs = options.get("fn_kwargs")
    is_class, merge = inspect.isclass(mapper), kind == "row"
    is_batch = bool(options.get("batched")) or options.get("batch_format") is not None
    if is_class:
        kwargs = options.get("fn_constructor_kwargs") or kwargs
    elif functions.is_remote_function(mapper) and kind in ("row", "batch") and not options.get("batched"):
        kind, method = "loop", "map of a @remote_function that loops over load()"
    elif kind == "row" and functions.parameters_of(mapper) == 0:
        raise ValueError(
            "Mapper function must be decorated with @batch.remote_function if it takes no argument and loops over "
            "load(); otherwise give it a parameter for a row, or with batched=True for a batch"
        )
    check_step_options(options, method, is_class)
    num_before = 0 if is_class or kind == "loop" else 1 + bool(options.get("with_indices"))
    by_position = "fn_constructor_args" if is_class else "fn_args"
    kwargs = habits.name_arguments(mapper, by_position, options.get(by_position), num_before, kwargs)
    shape, removed = options.get("batch_format", "rows"), options.get("remove_columns") or []
    if shape not in functions.BATCH_FORMATS:
        raise ValueError(f"batch_format is {shape!r}; it must be one of {list(functions.BATCH_FORMATS)}")
    settings = {
        "batch_format": shape,
        "with_indices": options.get("with_indices", False),
        "remove_columns": [removed] if isinstance(removed, str) else list(removed),
        "merge": merge,
        "rows": options.get("rows", "one"),
    }
    if kind == "row" and is_batch:
        kind = "batch"
    elif kind == "filter" and is_batch:
        settings["batched"] = True
    return functions.describe_function(
        mapper, kwargs=kwargs, kind=kind, options=settings, serializer=options.get("serializer")
    )


def _check_chain(steps: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for steps that cannot share a pass."""
    if len(steps) > 1 and any(step.get("kind") == "loop" for step in steps):
        raise ValueError(
            "a @remote_function that loops over load() must be the only step; run the other steps as a second job"
        )
    changes = False
    for step in steps:
        if changes and step["type"] == operations.TYPE:
            raise ValueError(
                "an operation follows a step that may return several rows for one, but its seeds are derived from the "
                "input's rows; put the operation first, or run two jobs"
            )
        changes |= step.get("kind") == "flat" or step.get("options", {}).get("rows") == "any"


def _rows_of(steps: Sequence[Mapping[str, Any]]) -> str:
    """`any` if a step may make another number of rows of one; a wrong value is refused with the specification."""
    if any(step.get("kind") in ("filter", "flat") for step in steps):
        return "any"
    modes = [step["options"]["rows"] for step in steps if "options" in step]
    return next((rows for rows in modes if rows != "one"), "one")


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
        return _reader_of_path(source)
    if type(source).__module__.startswith("datasets."):
        from tinsmith.batch.formats.huggingface import reader_of

        return reader_of(source, None)
    if isinstance(source, Iterable):
        return _reader("items", items=list(source))
    raise UserError(f"the source of a data set is a {type(source).__name__}; give a reader, a path or rows")


def _reader_of_path(path: str) -> InputReader:
    """The reader of a path, by its ending, or for a directory by that of the files in it."""
    if os.path.isdir(os.path.expanduser(path)):
        path = path.rstrip("/") + "/"
    if not path.endswith("/"):
        return _reader(format_of(path), path=path)
    files = locations(path)
    formats = {format_of(location) for location in files if location.endswith((*FORMAT_OF, *COMPRESSED_ENDINGS))}
    if len(formats) != 1:
        formats_text = f"files of the formats {sorted(formats)}" if formats else "no file of a format"
        raise UserError(f"the directory {path!r} has {formats_text}; use batch.read_json or another reader")
    return _reader(formats.pop(), path=path)


def _reader(format: str, **fields: object) -> InputReader:
    return registry.INPUT_READER_REGISTRY.find(format)(**fields)  # type: ignore[arg-type]


def _writer(format: str, **fields: object) -> OutputWriter:
    return registry.OUTPUT_WRITER_REGISTRY.find(format)(**fields)  # type: ignore[arg-type]
