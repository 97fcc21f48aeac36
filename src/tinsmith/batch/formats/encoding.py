"""Rows as JSON, with the values that occur in rows: numpy, dates, bytes, very large integers.

Arrays become lists and scalars numbers; dates ISO 8601; bytes base64 text; paths, UUIDs and decimals text; NaN and
infinities null. Any other value is an error that names the column.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from pathlib import PurePath
from typing import Any

import orjson

from tinsmith.batch.types import Row

LARGE = 2.0**63
MANY_DIGITS = re.compile(rb"\d{19}")
"""What every integer beyond 64 bits has."""
OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def encode(row: object) -> bytes:
    """One line of JSON, without its newline. Raises TypeError for a value that JSON cannot express."""
    try:
        return orjson.dumps(row, default=_plain, option=OPTIONS)
    except TypeError as error:
        if "64-bit" in str(error):  # Python's own encoder takes integers of any size
            return json.dumps(row, default=_plain, ensure_ascii=False, separators=(",", ":")).encode()
        raise TypeError(_explain_type_error(row, error)) from None


def decode(line: bytes) -> Any:  # noqa: ANN401  a JSON value
    """The value of a JSON text; integers of any size are exact. Raises orjson.JSONDecodeError."""
    value = orjson.loads(line)
    # orjson makes floats of integers beyond 64 bits.
    return json.loads(line) if MANY_DIGITS.search(line) and _has_large_float(value) else value


def _has_large_float(value: object) -> bool:
    if isinstance(value, float):
        return not -LARGE < value < LARGE
    if isinstance(value, dict):
        return any(map(_has_large_float, value.values()))
    return isinstance(value, list) and any(map(_has_large_float, value))


def select_columns(row: Row, columns: str | Sequence[str] | None) -> Row:
    """The row with only these columns. Raises KeyError naming one that it lacks."""
    if columns is None:
        return row
    names = [columns] if isinstance(columns, str) else columns
    for column in names:
        if column not in row:
            raise KeyError(f"the row has no column {column!r}; it has {sorted(map(str, row))}")
    return {column: row[column] for column in names}


def plain(row: object) -> object:
    """The row after a round trip through JSON; a value that JSON cannot express becomes its repr."""
    try:
        return json.loads(encode(row))
    except TypeError:
        return {str(name): _or_repr(value) for name, value in row.items()} if isinstance(row, dict) else repr(row)


def _or_repr(value: object) -> object:
    try:
        return json.loads(encode(value))
    except TypeError:
        return repr(value)[:200]


def _plain(value: object) -> object:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, PurePath | Decimal):
        return str(value)
    if isinstance(value, date):  # of a subclass, such as a timestamp of pandas, which may be no date at all
        return value.isoformat() if value == value else None
    if hasattr(value, "tolist"):  # numpy values that orjson does not know, and torch tensors
        return value.tolist()  # type: ignore[attr-defined]
    raise TypeError(f"a {type(value).__module__}.{type(value).__name__} cannot be written as JSON; convert it first")


def _explain_type_error(row: object, error: TypeError) -> str:
    if isinstance(row, dict):
        for name, value in row.items():
            try:
                orjson.dumps(value, default=_plain, option=OPTIONS)
            except TypeError as column_error:
                cause = column_error.__cause__ or column_error
                return f"column {name!r}: {cause}"
    return str(error.__cause__ or error)
