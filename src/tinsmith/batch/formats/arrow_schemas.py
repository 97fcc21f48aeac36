"""One Arrow schema for all rows of an output: decided when it is published, from the schemas of its parts.

Arrow unifies the schemas (`pyarrow.unify_schemas`, permissive): null with anything, integers with floats and decimals,
decimals, lists and structs by element and field; a column that a part lacks is null there. Three promotions that Arrow
would make are refused, because they change values: an integer beyond 2**53 to a float, a decimal to a float, text to
bytes. `schemas.py` has the same rules for the rows of a job that runs, which is why a conflict seldom comes this far.

Nothing here knows of files or jobs. pyarrow is loaded at the first call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tinsmith.batch.formats.schemas import Schema
from tinsmith.errors import UserError

if TYPE_CHECKING:
    import pyarrow

FIX = "Nothing is lost: resume the job with format='jsonl', or with a function that converts the column"


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
            return pyarrow.struct([(name, arrow_type(each)) for name, each in kind["struct"].items()])
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


def _check_types(left: pyarrow.DataType, right: pyarrow.DataType, where: str) -> None:
    """Raises UserError for two types that Arrow does not unify, or not without changing values."""
    import pyarrow
    from pyarrow import types

    if left.equals(right) or types.is_null(left) or types.is_null(right):
        return
    if types.is_list(left) and types.is_list(right):
        _check_types(left.value_type, right.value_type, f"{where}, its elements,")
        return
    if types.is_struct(left) and types.is_struct(right):
        for field in right:
            if (at := left.get_field_index(field.name)) >= 0:
                _check_types(left.field(at).type, field.type, f"{where}, field {field.name!r},")
        return
    changes = (
        (types.is_floating(left) and types.is_decimal(right))
        or (types.is_decimal(left) and types.is_floating(right))
        or (_is_text(left) and _is_bytes(right))
        or (_is_bytes(left) and _is_text(right))
    )
    try:
        if changes:
            raise pyarrow.ArrowTypeError("a promotion would change values")
        fields = [pyarrow.schema([("", kind)]) for kind in (left, right)]
        pyarrow.unify_schemas(fields, promote_options="permissive")
    except pyarrow.ArrowException:
        raise UserError(
            f"{where} is {left} in some rows and {right} in others; in this format a column has one type. {FIX}"
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
            continue
        column = table.column(field.name)
        try:
            columns.append(column.cast(field.type))
        except pyarrow.ArrowInvalid as error:
            raise UserError(
                f"column {field.name!r} is {column.type} in some rows and {field.type} in others, which does not hold "
                f"all values: {error}. Write such integers as str. {FIX}"
            ) from None
        except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowTypeError):  # structs of older releases of pyarrow
            columns.append(pyarrow.array(column.to_pylist(), field.type))
    return pyarrow.Table.from_arrays(columns, schema=schema)
