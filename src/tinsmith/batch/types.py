"""The values of bulk jobs: rows, ranges of rows, parts, assignments, outcomes, and the specification of a job.

Invariants:
- Row indices count input rows from 0. Both ends of a span are inclusive: in the database, in file names, in readers.
- A part is immutable. Its path holds the attempt that wrote it, and only parts of winning attempts are published.
- Nothing here runs a user's code. A user's class travels as source and is built in workers only
  (`formats/registry.py`); the server treats the dictionaries of a `JobSpec` as opaque.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum, auto
from typing import Annotated, Any, NamedTuple, Self

from tinsmith.batch.formats.input_versions import InputChangedError, Version
from tinsmith.batch.formats.schemas import Schema
from tinsmith.batch.markers import (
    DECIDES_ROWS,
    OF_STEPS,
    SET_BY_SERVER,
    Amount,
    Bounds,
    Choices,
    Count,
    Endpoint,
    Option,
    Rate,
    VariableName,
    VariableValue,
)

Row = dict[str, Any]

TEMPORARY_DIRECTORY = ".tinsmith_batch_tmp"
IF_EXISTS = ("error", "overwrite")
ROWS = ("one", "any")
DEFAULT_POOL = "local"
MAX_CONCURRENT_BATCHES = 64
SOURCE_FIELDS = ("input_version", "input_snapshot")
"""The fields of a `JobSpec` that say which state of the input its rows were counted in. Resuming takes them over."""
DERIVED_FIELDS = ("batch_coordinator", "batch_dataset_path", "batch_output_path")
"""What `JobSpec.to_dict` adds to the fields."""
MAX_RETRIES = 3


class RowRange(NamedTuple):
    """Rows `start_idx` to `end_idx`, both included."""

    start_idx: int
    end_idx: int

    @property
    def rows(self) -> int:
        return self.end_idx - self.start_idx + 1


@dataclass(frozen=True)
class WrittenInfo:
    """Rows that were written to a path."""

    path: str
    rows: int
    bytes: int
    sha256: str
    etag: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None or name == "etag"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)


@dataclass(frozen=True)
class PartInfo(WrittenInfo):
    """The rows of one attempt at one batch for one output. `schema` has their types, for an output whose rows must have
    the same."""

    schema: Schema | None = None
    offset: int | None = None
    """Where the part begins in an object that holds the parts of several batches; None if the part is an object."""


class OutputInfo(WrittenInfo):
    """A published output. For a directory, `bytes` is the sum of its files; `sha256` and `etag` are of its manifest."""


def part_name(span: RowRange, extension: str) -> str:
    """`batch_00000000-00000031.jsonl`; wider than eight digits beyond 10^8 rows."""
    return f"batch_{span.start_idx:08d}-{span.end_idx:08d}.{extension}"


def temporary_directory(output_path: str) -> str:
    """The directory for files of jobs that write to an output: beside a file, inside a directory."""
    if output_path.endswith("/"):
        base = output_path.rstrip("/")
    else:
        base, slash, _ = output_path.rpartition("/")
        base = base if slash else "."
    return f"{base}/{TEMPORARY_DIRECTORY}"


def staging_of(output_path: str, job_id: str | int, output_idx: int) -> str:
    """The directory that holds the parts of one output of one job."""
    return f"{temporary_directory(output_path)}/{job_id}/out-{output_idx}"


def part_base(output_path: str, job_id: str | int, output_idx: int, attempt_id: int) -> str:
    return f"{staging_of(output_path, job_id, output_idx)}/attempt-{attempt_id}"


@dataclass(frozen=True)
class Assignment:
    """One attempt at one batch. `part_bases` has a directory for each output of the job, in their order, for this
    attempt alone."""

    batch_idx: int
    start_idx: int
    end_idx: int
    attempt_id: int
    part_bases: tuple[str, ...]
    schemas: tuple[Schema | None, ...] = ()
    """The types of the committed rows of each output; empty if no output has types yet."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Assignment:
        lists = {name: tuple(data.get(name, ())) for name in ("part_bases", "schemas")}
        return cls(**{**data, **lists})

    @property
    def key(self) -> tuple[int, int]:
        return self.batch_idx, self.attempt_id

    @property
    def span(self) -> RowRange:
        return RowRange(self.start_idx, self.end_idx)


@dataclass(frozen=True)
class RowFailure:
    """A row without a result, and its error. The coordinator adds attempts and worker."""

    idx: int
    error_type: str
    message: str
    traceback: str = ""
    row: Row | None = None


@dataclass(frozen=True)
class StageWork:
    """What one stage of the job did for a batch: the rows that came and went, and the seconds that it took."""

    stage: int
    rows_in: int
    rows_out: int
    rows_failed: int
    work_s: float


@dataclass(frozen=True)
class AttemptOutcome:
    """The result of an assignment: parts and counts, or `error`, the traceback of the failure of the whole batch."""

    batch_idx: int
    attempt_id: int
    parts: tuple[PartInfo, ...] = ()
    rows_ok: int = 0
    rows_failed: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    row_failures: tuple[RowFailure, ...] = ()
    stage_work: tuple[StageWork, ...] = ()
    error_type: str = ""
    error: str = ""
    final: bool = False
    """Whether no other attempt can succeed, so that the job fails at once."""
    retry: bool = True
    """Whether another attempt at the same rows may succeed; else they are split at once."""

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "parts": [part.to_dict() for part in self.parts],
            "row_failures": [vars(failure) for failure in self.row_failures],
            "stage_work": [vars(figures) for figures in self.stage_work],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttemptOutcome:
        nested = {
            "parts": tuple(PartInfo.from_dict(part) for part in data["parts"]),
            "row_failures": tuple(RowFailure(**failure) for failure in data["row_failures"]),
            "stage_work": tuple(StageWork(**figures) for figures in data.get("stage_work", ())),
        }
        return cls(**{**data, **nested})


class FailureCause(StrEnum):
    """Why an attempt ended without a result. `coordinator/failures.py` says what follows."""

    NOT_BEGUN = auto()
    """The worker gave the attempt back, or has no mapper."""
    WORKER = auto()
    """The worker, or its machine."""
    SETUP = auto()
    """The mapper did not start."""
    SETUP_OF_MACHINE = auto()
    """The mapper starts on no worker of this machine; another one may have what it lacks."""
    SETUP_OF_PROGRAM = auto()
    """The mapper starts on no worker."""
    DEATH = auto()
    """The mapper's process died while it worked on the batch."""
    ERROR = auto()
    """An error of the mapper that another attempt at the same rows may not have."""
    SAME_ERROR = auto()
    """An error of the mapper that the same rows raise again."""
    PROGRAM = auto()
    """A broken rule: no attempt can succeed."""

    @classmethod
    def of_setup(cls) -> tuple[FailureCause, ...]:
        return cls.SETUP, cls.SETUP_OF_MACHINE, cls.SETUP_OF_PROGRAM

    @classmethod
    def of_batch(cls) -> tuple[FailureCause, ...]:
        """Those in which the mapper has worked on the batch."""
        return cls.DEATH, cls.ERROR, cls.SAME_ERROR, cls.PROGRAM


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """An attempt that ended without a result."""

    error_class: str
    error: str
    cause: FailureCause = FailureCause.ERROR
    row: int | None = None
    """The row that the mapper worked on, if it is known."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttemptFailure:
        return cls(**{**data, "cause": FailureCause(data["cause"])})


PROCESS_DEATHS = ("MapperKilled", "MapperDied")
"""The error classes of a batch during which the mapper's process ended: by SIGKILL, or in any other way."""


class ProgramError(RuntimeError):
    """The function breaks a rule that holds for every batch, so that neither a retry nor bisection helps: the job fails
    at once."""


FINAL_ERRORS = (ProgramError, InputChangedError, ImportError)
"""Errors that a retry cannot resolve. An ImportError names the module that the interpreter lacks."""
MACHINE_ERRORS = (ImportError, OSError)
"""Errors that one machine may have and another not: it lacks a module, or a file."""
DETERMINISTIC_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, NotImplementedError, TypeError, ValueError,
)  # fmt: skip
"""Errors that the same rows raise again, unless the job's `retry_on` says otherwise."""


def is_retried(error: BaseException, retry_on: Sequence[str] | None) -> bool:
    """Whether the same rows are tried again after this error. `retry_on` has names of classes, with or without their
    module, or is None for all but `DETERMINISTIC_ERRORS`."""
    if retry_on is None:
        return not isinstance(error, DETERMINISTIC_ERRORS)
    names = {name for cls in type(error).__mro__ for name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")}
    return not names.isdisjoint(retry_on)


class MapperStartError(Exception):
    """The mapper failed before its first batch, while it was loaded or in its own setup. The cause is one of
    `FailureCause.of_setup()`."""

    def __init__(self, message: str, cause: FailureCause = FailureCause.SETUP) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class Limits:
    """Timeouts in seconds, and the number of retries."""

    max_retries: Annotated[int, Bounds()] = MAX_RETRIES
    batch_timeout_s: Amount = 3600.0
    startup_timeout_s: Amount = 600.0
    discovery_timeout_s: Amount = 1800.0
    """The time in which a pool with a free slot must start a new job's first worker. It may have to rent a machine; a
    job that asks for more than any machine has would wait forever."""
    lease_s: Annotated[float, Bounds(1)] = 60.0
    backoff_s: Amount = 1.0
    """Retry n waits for 2**n times this."""
    grace_s: Amount = 5.0
    """The time in which the mapper of a cancelled job may end by itself."""
    heartbeat_timeout_s: Annotated[float, Bounds(2)] = 30.0
    """A worker without a heartbeat, of which it sends one a second, for this long is considered lost."""


@dataclass(frozen=True)
class JobSpec:
    """A bulk job as it is submitted, stored and handed to workers; `to_dict` is its JSON.

    Each field is declared here alone: its annotation has its bounds, whether an option of `Dataset.map` sets it,
    and whether it decides the rows (`markers.py`). The body of a request and the client's options follow from it.
    """

    batch_serialized_fn: str
    batch_input_format: Endpoint
    batch_output_formats: list[Endpoint]
    batch_size: Annotated[Count, Option(), DECIDES_ROWS] = 32
    """The rows that are claimed, run and committed together."""
    name: Annotated[str, Option()] = ""
    batch_pool_name: Annotated[str, Option("pool")] = DEFAULT_POOL
    batch_error_format: Annotated[Endpoint | None, Option("errors")] = None
    """The writer that takes the failed rows."""
    batch_tokens: Annotated[Count | None, Option(), DECIDES_ROWS] = None
    """The most tokens of a batch, as `InputReader.row_sizes` estimates them; None for no limit."""
    batch_activate_env: Annotated[str | None, Option("activate_env"), OF_STEPS] = None
    """A virtual environment's directory, to take the interpreter from, or a shell command that activates one."""
    python: Annotated[str | None, Option(), OF_STEPS] = None
    """The interpreter of the mapper's process."""
    max_failed_rows: Annotated[Amount, Option(), DECIDES_ROWS] = 0
    """A count, or below 1 a share of all rows."""
    rows: Annotated[str, Choices(ROWS), DECIDES_ROWS] = "one"
    """With "any", a mapper may drop rows and make several of one."""
    if_exists: Annotated[str, Choices(IF_EXISTS), Option()] = "error"
    weight: Annotated[Rate, Option()] = 1.0
    """The job's share of its pool."""
    priority: Annotated[int, Bounds(-(2**31), 2**31 - 1), Option()] = 0
    """Higher ones go first."""
    retry_on: Annotated[list[str] | None, Option()] = None
    """Names of the classes of errors after which rows are tried again (`is_retried`). A function of rows is tried again
    only for these; without them, any of its errors fails its row."""
    concurrency: Annotated[Count | None, Option(), OF_STEPS] = None
    """The most workers of the pool that run the job at a time; None for all."""
    min_concurrency: Annotated[Count | None, Option(), OF_STEPS] = None
    """The workers that the job has before others of its priority have any, and that it does not leave to them while it
    has batches for them (`coordinator.FairShare`); None for its share alone."""
    max_concurrent_batches: Annotated[int, Bounds(1, MAX_CONCURRENT_BATCHES), Option()] = 8
    """The most batches that a worker runs at a time, if one of the steps is asynchronous."""
    num_cpus: Annotated[Amount | None, Option(), OF_STEPS] = None
    num_gpus: Annotated[Amount | None, Option(), OF_STEPS] = None
    memory: Annotated[Count | None, Option(), OF_STEPS] = None
    resources: Annotated[dict[str, Rate] | None, Option(), OF_STEPS] = None
    """The resources of each worker, by Ray's names and units (`memory` in bytes); None for the pool's. On a cluster,
    Ray reserves it. On one machine, fewer workers run the job at a time (`pools/specs.py`)."""
    requests_per_minute: Annotated[Rate | None, Option()] = None
    """The rate at which rows are given to the function, on all workers together; None for no limit."""
    tokens_per_minute: Annotated[Rate | None, Option()] = None
    """The most tokens per minute, on all workers together, as operations count them and `save_results` receives them;
    None for no limit."""
    limit: Annotated[Count | None, DECIDES_ROWS] = None
    """The most input rows, from the first one on; None for all."""
    env: Annotated[dict[VariableName, VariableValue], Option(), DECIDES_ROWS] = field(default_factory=dict)
    """Environment variables of the job's processes."""
    secrets: Annotated[list[VariableName], Option()] = field(default_factory=list)
    """Names of secrets, which are environment variables of the job's processes, too. Their values are not stored
    (`secrets.py`)."""
    resume_from: Annotated[int | None, Bounds(), Option()] = None
    directory: str = ""
    """The client's working directory. Relative paths of a confined job are below the tenant's directory instead."""
    roots: Annotated[list[str] | None, SET_BY_SERVER] = None
    """The locations that workers may read and write, or None for all."""
    input_version: Annotated[Version | None, SET_BY_SERVER] = None
    """The version of the input when its rows were counted."""
    input_snapshot: Annotated[str | None, SET_BY_SERVER] = None
    """The copy of an input that has no version (`formats/snapshots.py`)."""
    storage: Annotated[str, SET_BY_SERVER] = ""
    """Where the files of a job lie that has no output in a store."""
    part_formats: Annotated[dict[str, dict[str, Any]], SET_BY_SERVER] = field(default_factory=dict)
    """For a job that resumes another into other outputs: the writers of the older parts, by the prefix of their
    paths."""
    purge: Annotated[bool, SET_BY_SERVER] = False
    """Whether the parts may be deleted before the retention ends, at the user's request."""
    limits: Annotated[Limits, Option()] = field(default_factory=Limits)

    @property
    def batch_dataset_path(self) -> str:
        return str(self.batch_input_format.get("path", ""))

    @property
    def all_output_formats(self) -> list[dict[str, Any]]:
        """The writers of the outputs, then that of the failed rows."""
        return [*self.batch_output_formats, *([self.batch_error_format] if self.batch_error_format else [])]

    @property
    def batch_output_path(self) -> list[str]:
        return [str(output["path"]) for output in self.batch_output_formats]

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "batch_coordinator": True,
            "batch_dataset_path": self.batch_dataset_path,
            "batch_output_path": self.batch_output_path,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> JobSpec:
        """The specification that `to_dict` gave, or that `job_request` has validated."""
        values = {name: value for name, value in data.items() if name not in DERIVED_FIELDS}
        return cls(**{**values, "limits": Limits(**(values.get("limits") or {}))})


CHAIN = "chain"
"""The type of a payload whose `steps` are the payloads of functions and operations, one after the other."""


def pack_payload(data: Mapping[str, Any]) -> str:
    """Encode a payload for `JobSpec.batch_serialized_fn`. Raises ValueError or TypeError unless it is JSON."""
    return base64.b64encode(json.dumps(data, allow_nan=False).encode()).decode()


def unpack_payload(payload: str) -> dict[str, Any]:
    """The fields of a payload, of which nothing is run. Raises ValueError."""
    try:
        data = json.loads(base64.b64decode(payload, validate=True))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the function's payload is not base64 of JSON: {error}") from None
    return data if isinstance(data, dict) else {}


def steps_in(payload: str) -> Sequence[object]:
    """The payloads of the steps of a chain, or the one of a single step, unchecked; none for an invalid payload."""
    try:
        data = unpack_payload(payload)
    except ValueError:
        return []
    steps = data.get("steps") if data.get("type") == CHAIN else [data]
    return steps if isinstance(steps, list) else []


def identity_of(payload: str) -> str:
    """A digest that is equal for two payloads if and only if they do the same: of the source, or a pickled function's
    `identity`, its parameters and how it is called, or of the operations. Runs nothing of a payload; for an invalid
    one, the digest of its text.
    """
    names = ("type", "source", "name", "kwargs", "kind", "options", "steps")

    def essence(data: Mapping[str, Any]) -> dict[str, Any]:
        fields = {name: data.get(name) for name in names}
        if "identity" in data:
            fields["source"] = data["identity"]
        return fields | {"steps": [essence(step) for step in data["steps"]]} if data.get("type") == CHAIN else fields

    try:
        data = unpack_payload(payload)
        text = json.dumps(essence(data), sort_keys=True) if data else payload
    except (ValueError, TypeError, AttributeError, KeyError):
        text = payload
    return hashlib.sha256(text.encode()).hexdigest()
