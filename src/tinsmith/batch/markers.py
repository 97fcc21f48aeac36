"""What the annotation of a job's field says beside its type: the values it takes, and who sets it.

A field of `types.JobSpec` or `types.Limits` is the one place of its name, type, default, bounds and meaning. The body
of a request (`job_request.py`), the options of a client (`client/options.py`) and a job's identity (`job_identity.py`)
are derived from these markers. Workers load this module in a user's own interpreter, so it needs the standard library
only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

MAX_NUMBER = 2**53 - 1


@dataclass(frozen=True)
class Bounds:
    """A number from `low` to `high`; if `is_open`, above `low`."""

    low: float = 0
    high: float = MAX_NUMBER
    is_open: bool = False


@dataclass(frozen=True)
class Choices:
    values: tuple[str, ...]


@dataclass(frozen=True)
class Option:
    """A user sets the field, by the option of this name, or of the field's."""

    name: str = ""


@dataclass(frozen=True)
class Fact:
    """A property of a field that is either there or not."""

    text: str


SET_BY_SERVER = Fact("the server sets the field, whatever a request has")
DECIDES_ROWS = Fact("another value may give other rows or another output, so that it makes another job")
OF_STEPS = Fact("a step of a job may have a value of its own, which makes a stage of it (`stages.py`)")
IS_ENDPOINT = Fact("the object is a reader or a writer")
IS_VARIABLE_NAME = Fact("the text is the name of an environment variable")
IS_VARIABLE_VALUE = Fact("the text is the value of an environment variable")

Count = Annotated[int, Bounds(1)]
Amount = Annotated[float, Bounds()]
Rate = Annotated[float, Bounds(is_open=True)]
Endpoint = Annotated[dict[str, Any], IS_ENDPOINT]
VariableName = Annotated[str, IS_VARIABLE_NAME]
VariableValue = Annotated[str, IS_VARIABLE_VALUE]


class MarkedField(NamedTuple):
    """`kind` is the annotation with all markers, `markers` those of the field as a whole."""

    name: str
    kind: Any
    markers: tuple[object, ...]
    default: object
    """The value without one; `dataclasses.MISSING` if the field is required."""


def fields_of(cls: type) -> Iterator[MarkedField]:
    """The fields of a dataclass, in order."""
    kinds = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        kind = kinds[field.name]
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        markers = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
        yield MarkedField(field.name, kind, markers, default)


def names_with(cls: type, marker: Fact) -> tuple[str, ...]:
    """The fields of a dataclass that have a marker."""
    return tuple(field.name for field in fields_of(cls) if marker in field.markers)


def option_fields(cls: type) -> dict[str, MarkedField]:
    """The fields that a user sets, by the names of their options."""
    return {
        marker.name or field.name: field
        for field in fields_of(cls)
        for marker in field.markers
        if isinstance(marker, Option)
    }
