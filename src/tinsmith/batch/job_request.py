"""The body that submits a bulk job, validated by the client before it is sent and by the server that takes it.

Its fields, types, defaults and bounds are those of `JobSpec`; those that the server sets, or that `to_dict` derives,
are accepted and ignored, since `to_dict` writes them. Workers read stored specifications (`JobSpec.from_dict`) and
never load this module, so that a user's own interpreter needs no pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, ConfigDict, Field, create_model

from tinsmith.batch import markers
from tinsmith.batch.formats.registry import SHIPPED_KEYS
from tinsmith.batch.markers import Bounds, Choices, MarkedField
from tinsmith.batch.secrets import VARIABLE_NAME
from tinsmith.batch.types import DERIVED_FIELDS, JobSpec
from tinsmith.errors import UserError
from tinsmith.wire.fields import Body, ClosedBody, Ignored, OneOf, show, validate, validation_error

MAX_VARIABLE = 64 * 1024
"""The most characters of an environment variable."""
MAX_NAME = 256


class FormatBody(Body):
    """A reader or writer: its format, its path, and the fields of its class."""

    model_config = ConfigDict(extra="allow")

    format: str
    path: str


class JobBody(ClosedBody):
    """The fields of `JobSpec` that a client sets. `JOB_BODY` has them."""

    def spec(self) -> JobSpec:
        """The specification. Raises UserError for fields that contradict each other."""
        spec = JobSpec.from_dict(self.model_dump(exclude_unset=True, exclude=IGNORED_FIELDS))
        if spec.num_gpus is not None and spec.num_gpus > 1 and not float(spec.num_gpus).is_integer():
            raise UserError(f"num_gpus is {spec.num_gpus:g}; above 1 it must be a whole number")
        if spec.requests_per_minute is not None and spec.batch_size > spec.requests_per_minute:
            raise UserError(
                f"batch_size is {spec.batch_size} and requests_per_minute is {spec.requests_per_minute:g}; a batch "
                "begins as a whole and counts as its rows, so batch_size must not be larger"
            )
        if (spec.min_concurrency or 1) > (spec.concurrency or markers.MAX_NUMBER):
            raise UserError(
                f"min_concurrency is {spec.min_concurrency} and concurrency, the most workers, is {spec.concurrency}; "
                "give a minimum that is not larger"
            )
        if repeated_names := sorted(spec.env.keys() & {*spec.secrets}):
            raise UserError(f"env and secrets both have {repeated_names}; give each name once")
        check_paths(spec.batch_input_format, spec.batch_output_formats, spec.batch_error_format)
        return spec


SERVER_FIELDS = markers.names_with(JobSpec, markers.SET_BY_SERVER)
IGNORED_FIELDS = {*SERVER_FIELDS} - {"roots"}
"""Fields of a stored specification that a new job does not take over. `permissions` refuses `roots`."""


def _check_variable_name(name: str) -> str:
    if not re.fullmatch(VARIABLE_NAME, name) or len(name) > MAX_NAME:
        raise validation_error(
            f"is {show(name)}; the name of a variable has letters, digits and underscores, does not begin with a "
            f"digit, and has at most {MAX_NAME} characters"
        )
    return name


def _constrain(marker: object, kind: object) -> list[object]:
    """What pydantic checks for a marker of a type."""
    if isinstance(marker, Bounds):
        low = {"gt" if marker.is_open else "ge": marker.low}
        finite = {"allow_inf_nan": False} if kind is float else {}
        return [Field(**low, le=marker.high, **finite)]  # type: ignore[arg-type]
    if isinstance(marker, Choices):
        return [OneOf(marker.values)]
    if marker is markers.IS_VARIABLE_NAME:
        return [AfterValidator(_check_variable_name)]
    if marker is markers.IS_VARIABLE_VALUE:
        return [Field(pattern=r"^[^\x00]*$", max_length=MAX_VARIABLE)]
    return []


def _body_type(kind: Any) -> Any:  # noqa: ANN401  an annotation
    """The type of a field of a body for that of a dataclass."""
    arguments = get_args(kind)
    if get_origin(kind) is Annotated:
        if markers.IS_ENDPOINT in arguments:
            return FormatBody
        constraints = [check for marker in arguments[1:] for check in _constrain(marker, arguments[0])]
        inner = _body_type(arguments[0])
        return Annotated[inner, *constraints] if constraints else inner
    if get_origin(kind) in (Union, UnionType):
        return reduce(or_, map(_body_type, arguments))
    if arguments:
        return get_origin(kind)[tuple(map(_body_type, arguments))]
    if isinstance(kind, type) and is_dataclass(kind):
        return create_model(f"{kind.__name__}Body", __base__=ClosedBody, **_body_fields(kind))
    return kind


def _body_fields(cls: type) -> dict[str, Any]:
    return {field.name: (_body_type(field.kind), _body_default(field)) for field in markers.fields_of(cls)}


def _body_default(field: MarkedField) -> object:
    if field.default is MISSING:
        return ...
    return None if is_dataclass(field.default) else field.default


JOB_BODY = create_model(
    "JobRequest",
    __base__=JobBody,
    __doc__=JobBody.__doc__,
    **{
        **_body_fields(JobSpec),
        **dict.fromkeys((*SERVER_FIELDS, *DERIVED_FIELDS), (Ignored, None)),
    },
)


def read_job(values: Mapping[str, object]) -> JobSpec:
    """The specification in a JSON object. Raises UserError that names the field, its value and what it must be."""
    return validate(JOB_BODY, values).spec()


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
