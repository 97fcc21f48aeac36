"""The body that submits a bulk job, validated by the client before it is sent and by the server that takes it.

Workers read stored specifications (`JobSpec.from_dict`) and never load this module, so that a user's own interpreter
needs no pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field

from tinsmith.batch.formats.registry import SHIPPED_KEYS
from tinsmith.batch.secrets import VARIABLE_NAME
from tinsmith.batch.types import DEFAULT_POOL, IF_EXISTS, MAX_CONCURRENT_BATCHES, ROWS, JobSpec, Limits
from tinsmith.errors import UserError
from tinsmith.wire.fields import Body, ClosedBody, Ignored, OneOf, show, validate, validation_error

MAX_NUMBER = 2**53 - 1
MAX_VARIABLE = 64 * 1024
"""The most characters of an environment variable."""
Count = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
Number = Annotated[float, Field(ge=0, le=MAX_NUMBER, allow_inf_nan=False)]

MAX_NAME = 256


def _check_variable_name(name: str) -> str:
    if not re.fullmatch(VARIABLE_NAME, name) or len(name) > MAX_NAME:
        raise validation_error(
            f"is {show(name)}; the name of a variable has letters, digits and underscores, does not begin with a "
            f"digit, and has at most {MAX_NAME} characters"
        )
    return name


VariableName = Annotated[str, AfterValidator(_check_variable_name)]
VariableValue = Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=MAX_VARIABLE)]
Rate = Annotated[float, Field(gt=0, le=MAX_NUMBER, allow_inf_nan=False)]


class FormatBody(Body):
    """A reader or writer: its format, its path, and the fields of its class."""

    model_config = ConfigDict(extra="allow")

    format: str
    path: str


class LimitsBody(ClosedBody):
    """`types.Limits`, each field optional."""

    max_retries: Annotated[int, Field(ge=0, le=MAX_NUMBER)] = Limits.max_retries
    batch_timeout_s: Number = Limits.batch_timeout_s
    startup_timeout_s: Number = Limits.startup_timeout_s
    discovery_timeout_s: Number = Limits.discovery_timeout_s
    lease_s: Number = Limits.lease_s
    backoff_s: Number = Limits.backoff_s
    grace_s: Number = Limits.grace_s
    heartbeat_timeout_s: Number = Limits.heartbeat_timeout_s


class JobRequest(ClosedBody):
    """The fields of `JobSpec` that a client sets. The others are accepted and ignored, since `to_dict` writes them."""

    batch_serialized_fn: str
    batch_input_format: FormatBody
    batch_output_formats: list[FormatBody]
    batch_size: Count
    name: str = ""
    batch_pool_name: str = DEFAULT_POOL
    batch_error_format: FormatBody | None = None
    batch_tokens: Count | None = None
    batch_activate_env: str | None = None
    python: str | None = None
    max_failed_rows: Number = 0
    rows: Annotated[str, OneOf(ROWS)] = "one"
    if_exists: Annotated[str, OneOf(IF_EXISTS)] = "error"
    weight: Number = 1.0
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] = 0
    retry_on: list[str] | None = None
    concurrency: Count | None = None
    max_concurrent_batches: Annotated[int, Field(ge=1, le=MAX_CONCURRENT_BATCHES)] = JobSpec.max_concurrent_batches
    num_cpus: Number | None = None
    num_gpus: Number | None = None
    memory: Count | None = None
    resources: dict[str, Rate] | None = None
    requests_per_minute: Rate | None = None
    tokens_per_minute: Rate | None = None
    limit: Count | None = None
    env: dict[VariableName, VariableValue] = Field(default_factory=dict)
    secrets: list[VariableName] = Field(default_factory=list)
    resume_from: Annotated[int, Field(ge=0, le=MAX_NUMBER)] | None = None
    directory: str = ""
    limits: LimitsBody | None = None
    roots: Ignored = None
    batch_coordinator: Ignored = None
    batch_dataset_path: Ignored = None
    batch_output_path: Ignored = None
    input_version: Ignored = None
    input_snapshot: Ignored = None
    storage: Ignored = None
    part_formats: Ignored = None
    purge: Ignored = None

    def spec(self) -> JobSpec:
        """The specification. Raises UserError for fields that contradict each other."""
        if self.weight == 0:
            raise UserError("weight is 0; it must be more than 0, since it is the job's share of its pool")
        if self.num_gpus is not None and self.num_gpus > 1 and not self.num_gpus.is_integer():
            raise UserError(f"num_gpus is {self.num_gpus:g}; above 1 it must be a whole number")
        if self.requests_per_minute is not None and self.batch_size > self.requests_per_minute:
            raise UserError(
                f"batch_size is {self.batch_size} and requests_per_minute is {self.requests_per_minute:g}; a batch "
                "begins as a whole and counts as its rows, so batch_size must not be larger"
            )
        if repeated_names := sorted(self.env.keys() & {*self.secrets}):
            raise UserError(f"env and secrets both have {repeated_names}; give each name once")
        ignored = {"input_version", "input_snapshot", "storage", "part_formats", "purge"}
        spec = JobSpec.from_dict(self.model_dump(exclude_unset=True, exclude=ignored))
        check_paths(spec.batch_input_format, spec.batch_output_formats, spec.batch_error_format)
        return spec


def read_job(values: Mapping[str, object]) -> JobSpec:
    """The specification in a JSON object. Raises UserError that names the field, its value and what it must be."""
    return validate(JobRequest, values).spec()


def check_paths(
    source: Mapping[str, Any], outputs: Sequence[Mapping[str, Any]], errors: Mapping[str, Any] | None
) -> None:
    """Raises UserError for an empty path, except of a reader of the user's own, which may make its rows; for no
    outputs; and for two outputs with the same path.
    """
    if not outputs:
        raise UserError("batch_output_formats is empty; a bulk job writes to one output or more")
    endpoints = {"batch_input_format": source}
    endpoints |= {f"batch_output_formats[{index}]": output for index, output in enumerate(outputs)}
    if errors is not None:
        endpoints["batch_error_format"] = errors
    for name, data in endpoints.items():
        if not data["path"] and not (name == "batch_input_format" and any(key in data for key in SHIPPED_KEYS)):
            raise UserError(f"{name}.path is ''; it must be a string that is not empty")
    paths = [data["path"] for name, data in endpoints.items() if name != "batch_input_format"]
    for path in paths:
        if paths.count(path) > 1:
            raise UserError(f"two outputs of the bulk job have the path {path!r}; give each its own")
