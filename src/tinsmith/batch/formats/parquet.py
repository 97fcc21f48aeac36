"""Parquet files. Reading goes by row groups: a batch reads those that it touches, and no others.

The output is one file, or a directory (a path with a final slash) with one file for each batch. In one file, a column
has the type that holds the values of all rows, by the rules of `schemas.py`; a row whose types cannot be merged with
those of the others fails. Row groups are made of whole batches until they hold `GROUP_ROWS` rows or `GROUP_BYTES`
bytes, which bounds the memory of publishing.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

from tinsmith.batch.formats import publishing, schemas
from tinsmith.batch.formats.encoding import selected
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY, OUTPUT_WRITER_REGISTRY, InputReader, OutputWriter
from tinsmith.batch.formats.schemas import Schema
from tinsmith.batch.types import OutputInfo, PartInfo, Row, RowRange
from tinsmith.storage.locations import locations, open_object


@INPUT_READER_REGISTRY.type_register(name="parquet")
@dataclass
class ParquetReader(InputReader):
    """`path` is a file, a directory with a final slash, or a pattern. `columns`, if given, are the ones to read."""

    in_store = True

    columns: list[str] | None = None

    @cached_property
    def _groups(self) -> list[tuple[Any, int]]:
        """Each row group as a file and its number there."""
        import pyarrow.parquet

        found = [name for name in locations(self.path) if not self.path.endswith("/") or name.endswith(".parquet")]
        files = self.open_files(found, lambda location: pyarrow.parquet.ParquetFile(open_object(location)))
        return [(file, group) for file in files for group in range(file.num_row_groups)]

    @cached_property
    def _rows(self) -> list[int]:
        return [file.metadata.row_group(group).num_rows for file, group in self._groups]

    def __len__(self) -> int:
        return sum(self._rows)

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        rows: list[Row] = []
        for number, first, last in self.pieces(self._rows, start_idx, end_idx):
            file, group = self._groups[number]
            table = file.read_row_group(group, columns=self.columns)
            rows += table.slice(first, last + 1 - first).to_pylist()
        return rows


GROUP_ROWS = 65_536
PLAIN = frozenset((int, float, str, bool, type(None)))
GROUP_BYTES = 8 * 1024 * 1024


@OUTPUT_WRITER_REGISTRY.type_register(name="parquet")
@dataclass
class ParquetWriter(OutputWriter):
    """`column` names the columns to write, all where it is None. `compression` is one that pyarrow knows."""

    column: str | list[str] | None = None
    compression: str = "zstd"

    def check(self, row: Row) -> None:
        kept = selected(row, self.column)
        _table([kept], _schema_of(kept))

    def schema(self, row: Row) -> Schema:
        return _schema_of(selected(row, self.column))

    def write_part(self, rows: Sequence[Row | None], span: RowRange, part_base: str) -> PartInfo:
        import pyarrow.parquet

        kept = [selected(row, self.column) for row in rows if row is not None]
        schema = reduce(schemas.merged, map(_schema_of, kept), {})
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(_table(kept, schema), buffer, compression=self.compression)
        return replace(publishing.store_part(part_base, span, "parquet", buffer.getvalue(), len(kept)), schema=schema)

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        if self.is_directory:
            return publishing.publish_parts(self.path, parts, "part-{:05d}.parquet", staging, if_exists)
        filled = [part for part in parts if part.rows]
        rows = sum(part.rows for part in filled)
        return publishing.publish_stream(self.path, self.joined(filled), rows, staging, if_exists)

    def read_part(self, part: PartInfo) -> Iterator[Row]:
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(publishing.open_part(part)).iter_batches():
            yield from batch.to_pylist()

    def joined(self, parts: Sequence[PartInfo]) -> Iterator[bytes]:
        """The bytes of one file with the rows of all parts."""
        schema, sink = _arrow_schema(reduce(schemas.merged, [part.schema or {} for part in parts], {})), Sink()
        with self.opened(sink, schema) as writer:
            for table in _tables_of(parts, schema):
                writer.write_table(table, max(1, table.num_rows))
                yield sink.taken()
        yield sink.taken()

    def opened(self, sink: Sink, schema: Any) -> Any:  # noqa: ANN401
        """A writer of pyarrow, whose tables become row groups."""
        import pyarrow.parquet

        return pyarrow.parquet.ParquetWriter(sink, schema, compression=self.compression)


def _tables_of(parts: Sequence[PartInfo], schema: Any) -> Iterator[Any]:  # noqa: ANN401
    """The rows of the parts as tables of one schema."""
    import pyarrow
    import pyarrow.parquet

    held: list[Any] = []
    for part in parts:
        publishing.check_part(part)
        for batch in pyarrow.parquet.ParquetFile(publishing.open_part(part)).iter_batches():
            held.append(_of_schema(pyarrow.Table.from_batches([batch]), schema))
            if sum(t.num_rows for t in held) >= GROUP_ROWS or sum(t.nbytes for t in held) >= GROUP_BYTES:
                yield pyarrow.concat_tables(held)
                held = []
    if held:
        yield pyarrow.concat_tables(held)


def _of_schema(table: Any, schema: Any) -> Any:  # noqa: ANN401
    import pyarrow

    for name in schema.names:
        if name not in table.column_names:
            table = table.append_column(schema.field(name), pyarrow.nulls(table.num_rows, schema.field(name).type))
    table = table.select(schema.names)
    try:
        return table.cast(schema)
    except pyarrow.ArrowException:  # structs that get fields inside lists, which no cast does
        return pyarrow.Table.from_pylist(table.to_pylist(), schema=schema)


def _table(rows: list[Row], schema: Schema) -> Any:  # noqa: ANN401
    import pyarrow

    arrow = _arrow_schema(schema)
    try:
        arrays = [pyarrow.array([_plain(row.get(name)) for row in rows], arrow.field(name).type) for name in schema]
    except (pyarrow.ArrowException, OverflowError) as error:
        raise TypeError(f"the rows do not form a table: {error}") from None
    return pyarrow.Table.from_arrays(arrays, schema=arrow)


def _schema_of(row: Row) -> Schema:
    return schemas.schema_of({name: _plain(value) for name, value in row.items()})


def _arrow_schema(schema: Schema) -> Any:  # noqa: ANN401
    import pyarrow

    return pyarrow.schema([(name, _arrow_type(kind)) for name, kind in schema.items()])


def _arrow_type(kind: Any) -> Any:  # noqa: ANN401
    import pyarrow

    if isinstance(kind, dict):
        if "list" in kind:
            return pyarrow.list_(_arrow_type(kind["list"]))
        if "struct" in kind:
            if not kind["struct"]:
                raise TypeError("Parquet cannot store an object without fields; leave it out, or give it a field")
            return pyarrow.struct([(name, _arrow_type(each)) for name, each in kind["struct"].items()])
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


def _plain(value: object) -> object:
    """Values of numpy and torch as Python values, at any depth."""
    if hasattr(value, "tolist"):
        return value.tolist()  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple) and any(type(each) not in PLAIN for each in value):
        return [_plain(each) for each in value]
    return value


class Sink(io.RawIOBase):
    """A file in memory whose bytes are removed while it is being written."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[bytes] = []
        self._at = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        self._held.append(bytes(data))
        self._at += len(self._held[-1])
        return len(self._held[-1])

    def tell(self) -> int:
        return self._at

    def taken(self) -> bytes:
        taken, self._held = b"".join(self._held), []
        return taken
