"""A job's copy of an input that has no versions, such as a table: one Parquet file, written when the job is planned.

All workers of the job, also later ones and those of a job that resumes it, read the copy, so that rows that the source
changes afterwards shift nothing. It lies in the job's directory beside its first output, and is deleted with the parts.
A planner writes a directory of its own; the location that the job's specification names is the one that counts.

Values come back as they were: a column has one type, which holds all of its values exactly, or the input is refused
with the row and the column. Columns of JSON are stored as text, with their names in the file's metadata, since Arrow
would give all objects the same fields. Memory is bounded: pages go to a temporary directory of this machine with the
types of their own rows, then to the file with those of all rows.
"""

from __future__ import annotations

import io
import json
import tempfile
import uuid
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tinsmith.batch.formats import arrow_schemas, publishing
from tinsmith.batch.formats.pages import Page, parse_json, refuse_value
from tinsmith.batch.formats.parquet import PART_COMPRESSION, ParquetReader, ParquetWriter
from tinsmith.batch.formats.registry import InputReader
from tinsmith.batch.formats.row_groups import RowGroup
from tinsmith.batch.formats.schemas import Schema, SchemaConflictError, format_type, merge_types, type_of
from tinsmith.batch.types import JobSpec, PartInfo, Row, RowRange
from tinsmith.errors import UserError
from tinsmith.storage.locations import open_object
from tinsmith.storage.stores import join

FILE_NAME = "rows.parquet"
JSON_COLUMNS = b"tinsmith.json_columns"


@dataclass
class SnapshotReader(ParquetReader):
    """The rows of a snapshot; `path` is its file."""

    @cached_property
    def _groups(self) -> list[RowGroup]:
        return self._decoder.read_footer(self.path)

    @cached_property
    def _json_names(self) -> list[str]:
        import pyarrow.parquet

        with open_object(self.path) as source:
            metadata = pyarrow.parquet.read_schema(source).metadata or {}
        return json.loads(metadata.get(JSON_COLUMNS, b"[]"))

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        rows = super().download_batch(start_idx, end_idx, cache_dir)
        return [parse_json(row, self._json_names) for row in rows] if self._json_names else rows


def open_input(spec: JobSpec) -> InputReader:
    """The reader of a job's rows: of its snapshot where it has one."""
    if spec.input_snapshot is not None:
        return SnapshotReader(spec.input_snapshot)
    return InputReader.from_dict(spec.batch_input_format)


def write_snapshot(
    pages: Generator[Page, None, None], directory: str, source: str, limit: int | None = None
) -> tuple[str, int]:
    """Copies the rows, at most `limit`, to a file in a directory that only this call writes; returns its location and
    the number of rows. Raises UserError, which names the `source`."""
    base = join(directory, f"input-{uuid.uuid4().hex}")
    writer = ParquetWriter(join(base, FILE_NAME))
    schema: Schema = {}
    json_names: frozenset[str] = frozenset()
    parts: list[PartInfo] = []
    num_rows = 0
    with tempfile.TemporaryDirectory(prefix="tinsmith-snapshot-") as spool, closing(pages):
        for page in _first_rows(pages, limit):
            json_names |= page.json_names
            page_schema: Schema = {}
            for column, values in page.columns.items():
                try:
                    page_schema[column] = type_of(values)["list"]
                    schema[column] = merge_types(schema.get(column, "null"), page_schema[column], column)
                except TypeError:
                    raise _explain_value(source, column, values, num_rows, schema.get(column, "null")) from None
            part = _store_page(page, page_schema, num_rows, spool)
            parts.append(part)
            num_rows += part.rows
        metadata = {JSON_COLUMNS: json.dumps(sorted(json_names)).encode()}
        arrow_schema = arrow_schemas.schema_of_types(schema).with_metadata(metadata)
        publishing.stage_file(base, FILE_NAME, writer.encode_parts(parts, arrow_schema), parts)
    return writer.path, num_rows


def _first_rows(pages: Iterable[Page], limit: int | None) -> Iterator[Page]:
    remaining = limit
    for page in pages:
        yield page if remaining is None else page.head(remaining)
        if remaining is not None:
            remaining -= page.rows
            if remaining <= 0:
                return


def _store_page(page: Page, schema: Schema, first_row: int, spool: str) -> PartInfo:
    import pyarrow.parquet

    arrow_schema = arrow_schemas.schema_of_types(schema)
    arrays = [pyarrow.array(values, arrow_schema.field(name).type) for name, values in page.columns.items()]
    table = pyarrow.Table.from_arrays(arrays, schema=arrow_schema)
    span = RowRange(first_row, first_row + table.num_rows - 1)
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink, compression=PART_COMPRESSION)
    return publishing.store_part(spool, span, "parquet", sink.getvalue(), table.num_rows)


def _explain_value(source: str, column: str, values: list[Any], first_row: int, before: Any) -> UserError:  # noqa: ANN401
    """The error for the first value that a column does not hold; `before` is the type of the rows before these."""
    merged = before
    for row_idx, value in enumerate(values, first_row):
        try:
            kind = type_of(value)
            merged = merge_types(merged, kind, column)
        except SchemaConflictError:
            reason = f"it is {format_type(type_of(value))} here and {format_type(merged)} before; a column has one type"
            return refuse_value(source, row_idx, column, value, reason)
        except TypeError as error:
            return refuse_value(source, row_idx, column, value, str(error))
    raise AssertionError(f"the values of column {column!r} have one type")
