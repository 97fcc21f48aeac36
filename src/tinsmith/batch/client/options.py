"""The options of `map` and the other methods of a data set: their types, which of them have an effect, and the fields
of a job's specification that they become.

A type checker reads the dictionaries here, so it needs the names and types of options once more. A contract test holds
`SpecOptions` to `types.JobSpec`, where an option's default, bounds and meaning stand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from tinsmith.batch.client import habits
from tinsmith.batch.client.http import Client
from tinsmith.batch.client.job import Job
from tinsmith.batch.formats.registry import OutputWriter, request_dict
from tinsmith.batch.markers import option_fields
from tinsmith.batch.types import JobSpec
from tinsmith.errors import NotSupportedError

Writers = OutputWriter | Sequence[OutputWriter]

OUTPUT_OPTIONS = ("errors", "if_exists", "resume_from")
"""The options that concern what a job writes."""


class StepOptions(TypedDict, total=False):
    """How one function is called; each step of a chain has its own."""

    batched: bool
    batch_format: str
    with_indices: bool
    remove_columns: str | list[str]
    rows: str
    fn_args: Sequence[Any]
    fn_kwargs: dict[str, Any]
    fn_constructor_args: Sequence[Any]
    fn_constructor_kwargs: dict[str, Any]
    serializer: str


class SpecOptions(TypedDict, total=False):
    """Options that are fields of `types.JobSpec`, as keywords of every method. They may be given at any step."""

    batch_tokens: int
    concurrency: int | tuple[int, int]
    env: dict[str, str]
    errors: OutputWriter
    if_exists: str
    limits: dict[str, Any]
    max_concurrent_batches: int
    max_failed_rows: float
    memory: int
    min_concurrency: int
    name: str
    num_cpus: float
    num_gpus: float
    pool: str
    priority: int
    python: str
    requests_per_minute: float
    resources: dict[str, float]
    resume_from: int | Job
    retry_on: Sequence[str | type[BaseException]]
    secrets: list[str]
    tokens_per_minute: float
    weight: float


class MapOptions(StepOptions, SpecOptions, total=False):
    """Keyword-only options of `map`. `num_proc` is another name of `concurrency`."""

    client: Client
    num_proc: int | None


class RunOptions(MapOptions, total=False):
    """Keyword-only options of the other methods. `map` takes these three by position, too."""

    batch_size: int
    activate_env: str
    stream: bool


class JobOptions(RunOptions):
    """The options of a call with an output, which submits a job."""

    output: Writers


SPEC_FIELDS = {name: field.name for name, field in option_fields(JobSpec).items()}
"""The field of `JobSpec` for each option."""
ENCODERS: dict[str, Callable[[Any], object]] = {
    "activate_env": os.path.expanduser,
    "errors": request_dict,
    "python": os.path.expanduser,
    "resume_from": lambda job: int(job) if hasattr(job, "__int__") else job,
    "retry_on": lambda classes: _names_of(classes) if isinstance(classes, Sequence | set) else classes,
}
"""Options whose values are not those of their fields."""
ARGUMENTS = ("fn_args", "fn_kwargs", "fn_constructor_args", "fn_constructor_kwargs")
STEP_OPTIONS: dict[str, tuple[str, ...]] = {
    "map": tuple(StepOptions.__annotations__),
    "map of a @remote_function that loops over load()": ("rows", "fn_args", "fn_kwargs", "serializer"),
    "map_batches": ("batched", "batch_format", "with_indices", "rows", *ARGUMENTS, "serializer"),
    "filter": ("batched", "batch_format", "with_indices", *ARGUMENTS, "serializer"),
    "flat_map": ("with_indices", *ARGUMENTS, "serializer"),
}
"""The options of a function that have an effect, by method. The others are refused."""
OPTION_ADVICE = {
    "map of a @remote_function that loops over load()": "such a function gets whole batches as lists of rows",
    "map_batches": "its results are the new rows whole; leave the columns out of them, or use map(batched=True)",
    "filter": "it keeps rows as they are; use map to change them",
    "flat_map": "its results are the new rows whole; map_batches(rows='any') takes a function of batches",
}


def spec_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a specification that the options set, as JSON."""
    return {
        field: ENCODERS.get(name, lambda value: value)(options[name])
        for name, field in SPEC_FIELDS.items()
        if options.get(name) is not None
    }


def _names_of(classes: Iterable[object]) -> object:
    """Classes of errors by their names. The check of the specification refuses other values."""
    return classes if isinstance(classes, str) else [getattr(data, "__qualname__", data) for data in classes]


def writers_of(output: object) -> list[OutputWriter]:
    """The writers of an `output`. Raises ValueError unless it is one, or a list of them."""
    writers = [output] if isinstance(output, OutputWriter) else output
    for writer in writers if isinstance(writers, list | tuple) else [output]:
        if not isinstance(writer, OutputWriter):
            raise ValueError(f"an output is {writer!r}; it must be a writer, such as batch.JsonWriter(PATH)")
    return list(writers)  # pyright: ignore[reportArgumentType]  checked above


def check_options(options: Mapping[str, Any]) -> None:
    """Raises NotSupportedError for an option that no method has."""
    option_names = sorted(JobOptions.__annotations__)
    habits.refuse_unknown(sorted(set(options) - set(option_names)), option_names)


def check_step_options(options: Mapping[str, Any], method: str, is_class: bool) -> None:
    """Raises NotSupportedError for an option that would have no effect, and ValueError for two that contradict."""
    effective = {name for name in StepOptions.__annotations__ if options.get(name) not in (None, False, [], {}, ())}
    if refused := sorted(effective - {*STEP_OPTIONS[method]}):
        raise NotSupportedError(f"{method} has no option {refused}: {OPTION_ADVICE[method]}")
    for name in {"fn_kwargs", "fn_constructor_kwargs"} & effective:
        if not isinstance(options[name], Mapping):
            raise ValueError(f"{name} is {options[name]!r}; it must be a dict of arguments by name")
    removed = options.get("remove_columns")
    if "remove_columns" in effective and not isinstance(removed, str | list | tuple | set):
        raise ValueError(f"remove_columns is {removed!r}; it must be the name of a column, or a list of names")
    if options.get("batched") is False and (method == "map_batches" or options.get("batch_format") is not None):
        raise ValueError("batched is False, but the function gets batches; leave batched out, or use map without it")
    of_class = sorted({"fn_constructor_args", "fn_constructor_kwargs"} & effective)
    if of_class and not is_class:
        raise ValueError(f"{', '.join(of_class)} are for a class, and this is a function; use fn_kwargs")
    if is_class and "fn_args" in effective:
        raise ValueError(
            "fn_args are for a function, and this is a class, which gets its arguments when it is made; "
            "use fn_constructor_args"
        )
    if of_class and "fn_kwargs" in effective:
        raise ValueError("a class is constructed with either fn_kwargs or fn_constructor_kwargs; pass one of them")
