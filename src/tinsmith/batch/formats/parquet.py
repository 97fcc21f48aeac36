"""Parquet files. A batch reads the row groups that it touches, and each row group is decoded once (`row_groups.py`).

The output is one file, or a directory (a path with a final slash) with one file for each batch. All rows have one
schema, decided when the output is published (`arrow_schemas.py`). Parts of that schema are published as they are; the
rows of the others are written again, some at a time. A row whose types cannot be merged with those of the others fails
while the job runs (`schemas.py`). In one file, row groups are made of whole batches until they hold `GROUP_ROWS` rows
or `GROUP_BYTES` bytes, which bounds the memory of publishing.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import IO, TYPE_CHECKING, Any

from tinsmith.batch.formats import arrow_schemas, publishing, schemas
from tinsmith.batch.formats.encoding import select_columns
from tinsmith.batch.formats.file_split import check_rows_per_file, publish_split, rows_per_file_field, split_tables
from tinsmith.batch.formats.part_lists import FilledParts, PublishedFile, files_on_disk
from tinsmith.batch.formats.registry import (
    COMPRESSED_ENDINGS,
    INPUT_READER_REGISTRY,
    OUTPUT_WRITER_REGISTRY,
    InputReader,
    OutputWriter,
)
from tinsmith.batch.formats.row_groups import RowGroup, RowGroups
from tinsmith.batch.formats.schemas import Schema
from tinsmith.batch.types import OutputInfo, PartInfo, Row, RowRange
from tinsmith.errors import UserError
from tinsmith.storage.locations import locations

if TYPE_CHECKING:
    import pyarrow


@INPUT_READER_REGISTRY.type_register(name="parquet")
@dataclass
class ParquetReader(InputReader):
    """`path` is a file, a directory with a final slash, or a pattern. `columns`, if given, are the ones to read."""

    in_store = True

    columns: list[str] | None = None

    @cached_property
    def _decoder(self) -> RowGroups:
        return RowGroups(self.columns)

    @cached_property
    def _groups(self) -> list[RowGroup]:
        names = [name for name in locations(self.path) if not self.path.endswith("/") or name.endswith(".parquet")]
        groups = [group for groups in self.open_files(names, self._decoder.read_footer) for group in groups]
        if groups:
            self._decoder.check_columns()
        return groups

    @cached_property
    def _rows(self) -> list[int]:
        return [group.rows for group in self._groups]

    def __len__(self) -> int:
        return sum(self._rows)

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        rows: list[Row] = []
        for group_idx, first, last in self.locate_span(self._rows, start_idx, end_idx):
            rows += self._decoder.read_rows(self._groups[group_idx], first, last)
        return rows


GROUP_ROWS = 65_536
PLAIN_TYPES = frozenset((int, float, str, bool, type(None)))
GROUP_BYTES = 8 * 1024 * 1024
PART_COMPRESSION = "zstd"


@dataclass
class TableWriter(OutputWriter):
    """Rows with one type for each column, in parts that are Parquet files. `column` names the columns to write, all
    where it is None."""

    column: str | list[str] | None = None

    def check(self, row: Row) -> None:
        selected = select_columns(row, self.column)
        _build_table([selected], _schema_of(selected))

    def schema(self, row: Row) -> Schema:
        return _schema_of(select_columns(row, self.column))

    def write_part(self, rows: Sequence[Row | None], span: RowRange, part_base: str) -> PartInfo:
        import pyarrow.parquet

        selected = [select_columns(row, self.column) for row in rows if row is not None]
        schema = reduce(schemas.merge_schemas, map(_schema_of, selected), {})
        buffer = io.BytesIO()
        compression = getattr(self, "compression", PART_COMPRESSION)
        pyarrow.parquet.write_table(_build_table(selected, schema), buffer, compression=compression)
        return replace(
            publishing.store_part(part_base, span, "parquet", buffer.getvalue(), len(selected)), schema=schema
        )

    def read_part(self, part: PartInfo) -> Iterator[Row]:
        with publishing.open_part(part) as source:
            for table in _tables_in(part, source):
                yield from table.to_pylist() if table.num_columns else ({} for _ in range(part.rows))

    def unify_schemas(self, parts: Iterable[PartInfo]) -> pyarrow.Schema:
        """The schema of the rows of all parts. Raises UserError."""
        distinct = {_text_of(part): part for part in parts}
        schema = arrow_schemas.unify(map(_schema_of_part, distinct.values()))
        if distinct and not schema.names:
            raise UserError(
                f"the rows of {self.path} have no columns, and {self._name} cannot count such rows. {NO_COLUMN_ADVICE}"
            )
        return schema

    def encode_parts(self, parts: Iterable[PartInfo], schema: pyarrow.Schema) -> Iterator[bytes]:
        """The bytes of one file with the rows of all parts."""
        return self.encode_tables(_tables_of(parts, schema), schema)

    def encode_tables(self, tables: Iterable[pyarrow.Table], schema: pyarrow.Schema) -> Iterator[bytes]:
        """The bytes of one file with the rows of these tables."""
        sink = Sink()
        with self.open_table(sink, schema) as writer:
            for table in tables:
                # Otherwise a stream of Arrow gets a record batch for each part.
                writer.write_table(table.combine_chunks(), max(1, table.num_rows))
                yield sink.drain()
        yield sink.drain()

    def open_table(self, sink: Sink, schema: pyarrow.Schema) -> Any:  # noqa: ANN401  a writer of pyarrow
        """A writer of pyarrow, whose tables become row groups."""
        raise NotImplementedError

    @property
    def _name(self) -> str:
        return type(self).__name__


NO_COLUMN_ADVICE = "Return rows with a column, or resume the job with format='jsonl'"


@OUTPUT_WRITER_REGISTRY.type_register(name="parquet")
@dataclass
class ParquetWriter(TableWriter):
    """`compression` is one that pyarrow knows."""

    compression: str = PART_COMPRESSION
    rows_per_file: int | None = rows_per_file_field()
    """The rows of each file of a directory; None for a file for each batch, or one file."""

    def __post_init__(self) -> None:
        check_rows_per_file(self.rows_per_file, self.path)
        if self.path.endswith(COMPRESSED_ENDINGS):
            raise ValueError(
                f"the path is {self.path!r}, but a Parquet file is compressed inside; leave the ending out"
            )

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        filled = FilledParts(parts)
        rows, schema = sum(part.rows for part in filled), self.unify_schemas(filled)
        if not self.is_directory:
            return publishing.publish_stream(self.path, self.encode_parts(filled, schema), filled, staging, if_exists)
        if self.rows_per_file is not None:
            tables = split_tables(_tables_of(filled, schema), self.rows_per_file)
            files = (self.encode_tables(tables_of_file, schema) for tables_of_file in tables)
            return publish_split(self.path, filled, files, self.rows_per_file, ".parquet", staging, if_exists)
        names = publishing.number_format(sum(1 for _ in filled), ".parquet")
        numbered = enumerate(filled)
        with files_on_disk(self._file_of(part, names.format(idx), schema, staging) for idx, part in numbered) as files:
            return publishing.publish_directory(self.path, files, rows, staging, if_exists)

    def _file_of(self, part: PartInfo, name: str, schema: pyarrow.Schema, staging: str) -> PublishedFile:
        """A part as a file of a directory, written again if its schema is not that of all."""
        if _schema_of_part(part).equals(schema):
            return PublishedFile(name, part)
        return publishing.stage_file(staging, name, self.encode_parts([part], schema), [part])

    def open_table(self, sink: Sink, schema: pyarrow.Schema) -> Any:  # noqa: ANN401  a ParquetWriter of pyarrow
        import pyarrow.parquet

        return pyarrow.parquet.ParquetWriter(sink, schema, compression=self.compression)


def _text_of(part: PartInfo) -> str:
    """The schema of a part as text, or its path if the schema is unknown. Equal texts mean equal schemas."""
    return part.path if part.schema is None else json.dumps(part.schema)


def _schema_of_part(part: PartInfo) -> pyarrow.Schema:
    import pyarrow.parquet

    if part.schema is not None:
        return arrow_schemas.schema_of_types(part.schema)
    publishing.check_part(part)
    with publishing.open_part(part) as source:
        return pyarrow.parquet.read_schema(source)


def _tables_in(part: PartInfo, source: IO[bytes]) -> Iterator[pyarrow.Table]:
    """The rows of a part, some at a time; one table without columns if its rows have none."""
    import pyarrow
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(source)
    if not file.schema_arrow.names:
        yield pyarrow.table({})
        return
    size = sum(file.metadata.row_group(group_idx).total_byte_size for group_idx in range(file.num_row_groups))
    rows = max(1, min(GROUP_ROWS, GROUP_BYTES * max(1, part.rows) // max(1, size)))
    for batch in file.iter_batches(rows):
        yield pyarrow.Table.from_batches([batch])


def _tables_of(parts: Iterable[PartInfo], schema: pyarrow.Schema) -> Iterator[pyarrow.Table]:
    """The rows of the parts as tables of one schema."""
    import pyarrow

    waiting: list[pyarrow.Table] = []
    rows = size = 0
    for part, source in publishing.open_verified_parts(parts):
        for table in _tables_in(part, source):
            if table.num_columns:
                table = arrow_schemas.conform(table, schema)
            else:
                nulls = [pyarrow.nulls(part.rows, field.type) for field in schema]
                table = pyarrow.Table.from_arrays(nulls, schema=schema)
            waiting.append(table)
            rows, size = rows + table.num_rows, size + table.nbytes
            if rows >= GROUP_ROWS or size >= GROUP_BYTES:
                yield pyarrow.concat_tables(waiting)
                waiting, rows, size = [], 0, 0
    if waiting:
        yield pyarrow.concat_tables(waiting)


def _build_table(rows: list[Row], schema: Schema) -> Any:  # noqa: ANN401
    import pyarrow

    arrow = arrow_schemas.schema_of_types(schema)
    try:
        arrays = [pyarrow.array([_to_python(row.get(name)) for row in rows], arrow.field(name).type) for name in schema]
    except (pyarrow.ArrowException, OverflowError) as error:
        raise TypeError(f"the rows do not form a table: {error}") from None
    return pyarrow.Table.from_arrays(arrays, schema=arrow)


def _schema_of(row: Row) -> Schema:
    return schemas.schema_of({name: _to_python(value) for name, value in row.items()})


def _to_python(value: object) -> object:
    """Convert values of numpy and torch to Python values, at any depth."""
    if hasattr(value, "tolist"):
        return value.tolist()  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return {name: _to_python(element) for name, element in value.items()}
    if isinstance(value, list | tuple) and any(type(element) not in PLAIN_TYPES for element in value):
        return [_to_python(element) for element in value]
    return value


class Sink(io.RawIOBase):
    """A file in memory whose bytes are removed while it is being written."""

    def __init__(self) -> None:
        super().__init__()
        self._chunks: list[bytes] = []
        self._at = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        self._chunks.append(bytes(data))
        self._at += len(self._chunks[-1])
        return len(self._chunks[-1])

    def tell(self) -> int:
        return self._at

    def drain(self) -> bytes:
        drain, self._chunks = b"".join(self._chunks), []
        return drain
