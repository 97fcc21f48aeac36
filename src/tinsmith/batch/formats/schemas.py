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
"""JSON."""
Schema = dict[str, Type]

EXACT_IN_FLOAT = 2**53
LARGEST = 2**63
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


class SchemaConflictError(TypeError):
    """Two values of one column have types that cannot be merged."""


def type_of(value: object) -> Type:
    """Raises TypeError for a value that no column holds, SchemaConflictError for a list of types that do not merge."""
    if value is None:
        return "null"
    if isinstance(value, int) and not isinstance(value, bool):
        return _int(value, value)
    if isinstance(value, datetime.datetime):
        return "timestamp" if value.tzinfo is None else "timestamp UTC"
    for kinds, name in ATOMS:
        if isinstance(value, kinds):
            return name
    if isinstance(value, Decimal) and value.is_finite():
        _, digits, exponent = value.as_tuple()
        after = max(0, -int(exponent))
        return {"decimal": [max(len(digits) + int(exponent), 0), after]}
    if isinstance(value, Mapping):
        return {"struct": {_name(name): type_of(each) for name, each in value.items()}}
    if isinstance(value, list | tuple):
        return {"list": _of_elements(value)}
    raise TypeError(f"a {type(value).__module__}.{type(value).__name__} is not a supported column type; convert it")


def _int(low: int, high: int) -> str:
    if low >= -EXACT_IN_FLOAT and high <= EXACT_IN_FLOAT:
        return "int"
    if low >= -LARGEST and high < LARGEST:
        return "int64"
    raise TypeError(f"{low if low < -LARGEST else high} is outside 64 bits; use a str")


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the field name {name!r} is a {type(name).__name__}; it must be a str")
    return name


def _of_elements(values: list[Any] | tuple[Any, ...]) -> Type:
    kinds = set(map(type, values))
    if kinds == {int}:  # token ids: many, and of one kind
        return _int(min(values), max(values))
    if kinds in ({float}, {str}):
        return "float" if kinds == {float} else "string"
    found: Type = "null"
    for value in values:
        found = merged_type(found, type_of(value), "its elements")
    return found


def schema_of(row: Mapping[str, object]) -> Schema:
    """Raises TypeError that names the column."""
    found: Schema = {}
    for name, value in row.items():
        try:
            found[_name(name)] = type_of(value)
        except SchemaConflictError as error:
            raise SchemaConflictError(f"column {name!r}: {error}") from None
        except TypeError as error:
            raise TypeError(f"column {name!r}: {error}") from None
    return found


def merged(first: Schema, other: Schema, prefix: str = "column", values: Mapping[str, object] | None = None) -> Schema:
    """The columns of both, merged; `values` are those of the other. Raises SchemaConflictError that names the column,
    both types and the value."""
    if first == other:
        return first
    columns = dict(first)
    for name, kind in other.items():
        if name not in columns:
            columns[name] = kind
            continue
        value = "" if values is None else f" The value here is {reprlib.repr(values.get(name))}."
        columns[name] = merged_type(columns[name], kind, f"{prefix} {name!r}", value)
    return columns


def merged_type(first: Type, other: Type, prefix: str, value: str = "") -> Type:
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
            return {"list": merged_type(first["list"], other["list"], f"{prefix}, its elements", value)}
        if "struct" in first:
            fields = dict(first["struct"])
            for name, kind in other["struct"].items():
                fields[name] = merged_type(fields.get(name, "null"), kind, f"{prefix}, field {name!r}", value)
            return {"struct": fields}
        digits = [max(pair) for pair in zip(first["decimal"], other["decimal"], strict=True)]
        if sum(digits) <= MAX_DIGITS:
            return {"decimal": digits}
    advice = "Convert it in the function, or write JSON Lines"
    if "int64" in pair and "float" in pair:
        advice = "A float would lose digits of an integer beyond 2**53: write such integers as str, or write JSON Lines"
    raise SchemaConflictError(
        f"{prefix} is {shown(other)} here and {shown(first)} in other rows; in this format a column has one type."
        f"{value} {advice}"
    )


def shown(kind: Type) -> str:
    if isinstance(kind, str):
        return {"int": "int64", "float": "float64"}.get(kind, kind)
    ((name, inner),) = kind.items()
    if name == "list":
        return f"list of {shown(inner)}"
    if name == "decimal":
        return f"decimal({sum(inner)}, {inner[1]})"
    return "{" + ", ".join(f"{field}: {shown(each)}" for field, each in inner.items()) + "}"
