"""One Arrow schema for all rows of an output: decided when it is published, from the schemas of its parts.

Arrow unifies the schemas (`pyarrow.unify_schemas`, permissive): null with anything, integers with floats, decimals,
lists and structs by element and field; a column that a part lacks is null there. Promotions that Arrow would make and
that may change values are refused: an integer beyond 2**53 to a float, decimals with floats or integers, text with
bytes. `schemas.py` has the same rules for the rows of a job that runs, which is why a conflict seldom comes this far.

Nothing here knows of files or jobs. pyarrow is loaded at the first call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tinsmith.batch.formats.schemas import Schema
from tinsmith.errors import UserError

if TYPE_CHECKING:
    import pyarrow

RESUME_ADVICE = "Nothing is lost: resume the job with format='jsonl', or with a function that converts the column"


def schema_of_types(schema: Schema) -> pyarrow.Schema:
    """The Arrow schema of the types of rows."""
    import pyarrow

    return pyarrow.schema([(name, arrow_type(kind)) for name, kind in schema.items()])


def arrow_type(kind: Any) -> pyarrow.DataType:  # noqa: ANN401  JSON
    import pyarrow

    if isinstance(kind, dict):
        if "list" in kind:
            return pyarrow.list_(arrow_type(kind["list"]))
        if "struct" in kind:
            if not kind["struct"]:
                raise TypeError("Parquet cannot store an object without fields; leave it out, or give it a field")
            return pyarrow.struct([(name, arrow_type(inner)) for name, inner in kind["struct"].items()])
        before, after = kind["decimal"]
        digits = max(1, before + after)
        return pyarrow.decimal128(digits, after) if digits <= 38 else pyarrow.decimal256(digits, after)
    return {
        "null": pyarrow.null(),
        "bool": pyarrow.bool_(),
        "int": pyarrow.int64(),
        "int64": pyarrow.int64(),
        "float": pyarrow.float64(),
        "string": pyarrow.string(),
        "binary": pyarrow.binary(),
        "date": pyarrow.date32(),
        "time": pyarrow.time64("us"),
        "duration": pyarrow.duration("us"),
        "timestamp": pyarrow.timestamp("us"),
        "timestamp UTC": pyarrow.timestamp("us", tz="UTC"),
    }[kind]


def unify(schemas: Iterable[pyarrow.Schema]) -> pyarrow.Schema:
    """The schema that holds the rows of all. Raises UserError that names the column, both types and the fix."""
    import pyarrow

    unified = pyarrow.schema([])
    for schema in schemas:
        plain = pyarrow.schema([(field.name, _without_dictionaries(field.type)) for field in schema])
        for field in plain:
            if (at := unified.get_field_index(field.name)) >= 0:
                _check_types(unified.field(at).type, field.type, f"column {field.name!r}")
        unified = pyarrow.unify_schemas([unified, plain], promote_options="permissive")
    return unified


def _without_dictionaries(kind: pyarrow.DataType) -> pyarrow.DataType:
    import pyarrow

    if pyarrow.types.is_dictionary(kind):
        return kind.value_type
    return kind


def _check_types(kind: pyarrow.DataType, other: pyarrow.DataType, column: str) -> None:
    """Raises UserError for two types that Arrow does not unify, or not without changing values."""
    import pyarrow
    from pyarrow import types

    if kind.equals(other) or types.is_null(kind) or types.is_null(other):
        return
    if types.is_list(kind) and types.is_list(other):
        _check_types(kind.value_type, other.value_type, f"{column}, its elements,")
        return
    if types.is_struct(kind) and types.is_struct(other):
        for field in other:
            if (at := kind.get_field_index(field.name)) >= 0:
                _check_types(kind.field(at).type, field.type, f"{column}, field {field.name!r},")
        return
    are_decimals = types.is_decimal(kind), types.is_decimal(other)
    texts_and_bytes = (_is_text(kind) and _is_bytes(other)) or (_is_bytes(kind) and _is_text(other))
    try:
        if are_decimals[0] != are_decimals[1] or texts_and_bytes:
            raise pyarrow.ArrowTypeError("a promotion would change values")
        fields = [pyarrow.schema([("", each_kind)]) for each_kind in (kind, other)]
        pyarrow.unify_schemas(fields, promote_options="permissive")
    except pyarrow.ArrowException:
        raise UserError(
            f"{column} is {kind} in some rows and {other} in others; in this format a column has one type. "
            f"{RESUME_ADVICE}"
        ) from None


def _is_text(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return types.is_string(kind) or types.is_large_string(kind)


def _is_bytes(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return types.is_binary(kind) or types.is_large_binary(kind)


def conform(table: pyarrow.Table, schema: pyarrow.Schema) -> pyarrow.Table:
    """The rows of a table in a schema that `unify` made of its own and others. Raises UserError that names a column and
    a value that the schema's type does not hold exactly."""
    import pyarrow

    columns = []
    for field in schema:
        if field.name not in table.column_names:
            columns.append(pyarrow.nulls(table.num_rows, field.type))
        elif table.column(field.name).type.equals(field.type):
            columns.append(table.column(field.name))
        else:
            columns.append(_cast(table.column(field.name), field))
    return pyarrow.Table.from_arrays(columns, schema=schema)


def _cast(column: pyarrow.ChunkedArray, field: pyarrow.Field) -> pyarrow.ChunkedArray:
    import pyarrow

    try:
        with contextlib.suppress(pyarrow.ArrowNotImplementedError, pyarrow.ArrowTypeError):
            cast = column.cast(field.type)
            if _is_valid(cast):
                return cast
        # What Arrow does not cast: lists of nulls, and in older releases structs that get fields.
        return pyarrow.chunked_array([pyarrow.array(column.to_pylist(), field.type)])
    except pyarrow.ArrowInvalid as error:
        raise UserError(
            f"column {field.name!r} is {column.type} in some rows and {field.type} in others, which does not hold all "
            f"values: {error}. Write such integers as str. {RESUME_ADVICE}"
        ) from None


def _is_valid(column: pyarrow.ChunkedArray) -> bool:
    import pyarrow

    try:
        column.validate()
    except pyarrow.ArrowInvalid:
        return False
    return True
