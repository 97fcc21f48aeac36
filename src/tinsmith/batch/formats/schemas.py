"""The types of columns, for outputs whose rows must all have the same: the type of a value, and how types merge.

A type is a name, {"list": type}, {"struct": {name: type}} or {"decimal": [digits before the point, digits after it]}.
Types of the same column merge by these rules, and no others:

- null and any type: that type;
- int and float: float. An int is a whole number of at most 53 bits, which a float holds exactly. A larger one is int64:
  int and int64 merge to int64, int64 and float do not merge;
- decimals: one that holds both;
- lists: of the merged type; structs: of the fields of both, merged.

These are Arrow's rules (`arrow_schemas.py`) without the promotions that change values. Pure values: a schema is JSON.
The coordinator, which does not load Arrow, keeps one for each output, and workers check rows against it.
"""

from __future__ import annotations

import datetime
import reprlib
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

Type = Any
"""The JSON of a type: a name, or an object with one key."""
Schema = dict[str, Type]

EXACT_IN_FLOAT = 2**53
INT64_BOUND = 2**63
MAX_DIGITS = 76
ATOMS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "bool"),
    (float, "float"),
    (str, "string"),
    ((bytes, bytearray, memoryview), "binary"),
    (datetime.date, "date"),
    (datetime.time, "time"),
    (datetime.timedelta, "duration"),
)


PLAIN_NAMES = {bool: "bool", float: "float", str: "string", bytes: "binary"}
"""The types of lists whose elements have one of these types, and are many."""


class SchemaConflictError(TypeError):
    """Two values of one column have types that cannot be merged."""


def type_of(value: object) -> Type:
    """The type of a value. Raises TypeError if no column holds it, SchemaConflictError for a list of types that do not
    merge."""
    if value is None:
        return "null"
    if isinstance(value, int) and not isinstance(value, bool):
        return _int(value, value)
    if isinstance(value, datetime.datetime):
        return "timestamp" if value.tzinfo is None else "timestamp UTC"
    if isinstance(value, datetime.time) and value.tzinfo is not None:
        raise TypeError("a time with a time zone is not a supported column type; use a datetime or a str")
    for kinds, name in ATOMS:
        if isinstance(value, kinds):
            return name
    if isinstance(value, Decimal) and value.is_finite():
        _, digits, exponent = value.as_tuple()
        after = max(0, -int(exponent))
        before = max(len(digits) + int(exponent), 0)
        if before + after > MAX_DIGITS:
            raise TypeError(f"a number of {before + after} digits is too long; a column holds {MAX_DIGITS}: use a str")
        return {"decimal": [before, after]}
    if isinstance(value, Mapping):
        return {"struct": {_name(name): type_of(element) for name, element in value.items()}}
    if isinstance(value, list | tuple):
        return {"list": _element_type(value)}
    if isinstance(value, Decimal):
        raise TypeError(f"{value} is not a number that a column of decimals holds; use a float or a str")
    raise TypeError(f"a {type(value).__module__}.{type(value).__name__} is not a supported column type; convert it")


def _int(low: int, high: int) -> str:
    if low >= -EXACT_IN_FLOAT and high <= EXACT_IN_FLOAT:
        return "int"
    if low >= -INT64_BOUND and high < INT64_BOUND:
        return "int64"
    raise TypeError(f"{low if low < -INT64_BOUND else high} is outside 64 bits; use a str")


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the field name {name!r} is a {type(name).__name__}; it must be a str")
    return name


def _element_type(values: list[Any] | tuple[Any, ...]) -> Type:
    kinds = set(map(type, values)) - {type(None)}
    if kinds == {int}:  # token ids: many, and of one kind
        integers = [value for value in values if value is not None]
        return _int(min(integers), max(integers))
    if len(kinds) == 1 and (name := PLAIN_NAMES.get(next(iter(kinds)))):
        return name
    element_type: Type = "null"
    for value in values:
        element_type = merge_types(element_type, type_of(value), "its elements")
    return element_type


def schema_of(row: Mapping[str, object]) -> Schema:
    """The types of a row's columns. Raises TypeError that names the column."""
    schema: Schema = {}
    for name, value in row.items():
        try:
            schema[_name(name)] = type_of(value)
        except SchemaConflictError as error:
            raise SchemaConflictError(f"column {name!r}: {error}") from None
        except TypeError as error:
            raise TypeError(f"column {name!r}: {error}") from None
    return schema


def merge_schemas(
    first: Schema, other: Schema, prefix: str = "column", values: Mapping[str, object] | None = None
) -> Schema:
    """The columns of both schemas, merged; `values` are those of `other`. Raises SchemaConflictError that names the
    column, both types and the value."""
    if first == other:
        return first
    columns = dict(first)
    for name, kind in other.items():
        if name not in columns:
            columns[name] = kind
            continue
        value = "" if values is None else f" The value here is {reprlib.repr(values.get(name))}."
        columns[name] = merge_types(columns[name], kind, f"{prefix} {name!r}", value)
    return columns


def merge_types(first: Type, other: Type, prefix: str, value: str = "") -> Type:
    if first == other or other == "null":
        return first
    if first == "null":
        return other
    pair = [first, other]
    if isinstance(first, str) and isinstance(other, str):
        if sorted(pair) == ["int", "int64"]:
            return "int64"
        if sorted(pair) == ["float", "int"]:
            return "float"
    elif isinstance(first, dict) and isinstance(other, dict) and first.keys() == other.keys():
        if "list" in first:
            return {"list": merge_types(first["list"], other["list"], f"{prefix}, its elements", value)}
        if "struct" in first:
            fields = dict(first["struct"])
            for name, kind in other["struct"].items():
                fields[name] = merge_types(fields.get(name, "null"), kind, f"{prefix}, field {name!r}", value)
            return {"struct": fields}
        digits = [max(pair) for pair in zip(first["decimal"], other["decimal"], strict=True)]
        if sum(digits) <= MAX_DIGITS:
            return {"decimal": digits}
    advice = "Convert it in the function, or write JSON Lines"
    if "int64" in pair and "float" in pair:
        advice = "A float would lose digits of an integer beyond 2**53: write such integers as str, or write JSON Lines"
    raise SchemaConflictError(
        f"{prefix} is {format_type(other)} here and {format_type(first)} in other rows; in this format a column has "
        f"one type.{value} {advice}"
    )


def format_type(kind: Type) -> str:
    if isinstance(kind, str):
        return {"int": "int64", "float": "float64"}.get(kind, kind)
    ((name, inner),) = kind.items()
    if name == "list":
        return f"list of {format_type(inner)}"
    if name == "decimal":
        return f"decimal({sum(inner)}, {inner[1]})"
    return "{" + ", ".join(f"{field_name}: {format_type(field_type)}" for field_name, field_type in inner.items()) + "}"
