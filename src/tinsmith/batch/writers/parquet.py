"""Rows as Parquet: one file, or a directory (a path with a final slash) of one file for each batch.

A column may be of one type here and of a wider one, or missing, there: one file takes the wider. Row groups are made of
whole batches until they hold `GROUP_ROWS` rows or `GROUP_BYTES` bytes, which bounds the memory of publishing.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.batch import publishing
from tinsmith.batch.encoding import selected
from tinsmith.batch.protocols import OutputInfo, OutputWriter, PartInfo, Row, Span, part_name
from tinsmith.batch.publishing import PublishedFile
from tinsmith.batch.registry import OUTPUT_WRITER_REGISTRY
from tinsmith.storage.stores import join, open_object, verified

GROUP_ROWS = 65_536
GROUP_BYTES = 8 * 1024 * 1024


@OUTPUT_WRITER_REGISTRY.type_register(name="parquet")
@dataclass
class ParquetWriter(OutputWriter):
    """`column` names the columns to write, all where it is None. `compression` is one that pyarrow knows."""

    column: str | list[str] | None = None
    compression: str = "zstd"

    def check(self, row: Row) -> None:
        _table([selected(row, self.column)])

    def write_part(self, rows: Sequence[Row | None], span: Span, part_base: str) -> PartInfo:
        import pyarrow.parquet

        kept = [selected(row, self.column) for row in rows if row is not None]
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(_table(kept), buffer, compression=self.compression)
        location = join(part_base, part_name(span, "parquet"))
        return publishing.store_part(location, buffer.getvalue(), len(kept))

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        filled = [part for part in parts if part.rows]
        rows = sum(part.rows for part in filled)
        if self.is_directory:
            files = [
                PublishedFile(f"part-{number:05d}.parquet", part.path, part.bytes, part.sha256)
                for number, part in enumerate(filled)
            ]
            return publishing.publish_directory(self.path, files, rows, staging, if_exists)
        return publishing.publish_stream(self.path, self._joined(filled), rows, staging, if_exists)

    def read_part(self, part: PartInfo) -> Iterator[Row]:
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(open_object(part.path)).iter_batches():
            yield from batch.to_pylist()

    def _joined(self, parts: Sequence[PartInfo]) -> Iterator[bytes]:
        import pyarrow
        import pyarrow.parquet

        schemas = [pyarrow.parquet.read_schema(open_object(part.path)) for part in parts]
        schema = pyarrow.unify_schemas(schemas, promote_options="permissive") if schemas else pyarrow.schema([])
        sink = _Sink()
        with pyarrow.parquet.ParquetWriter(sink, schema, compression=self.compression) as writer:
            for group in _groups(parts, schema):
                writer.write_table(group, row_group_size=max(1, group.num_rows))
                yield sink.taken()
        yield sink.taken()


def _groups(parts: Sequence[PartInfo], schema: Any) -> Iterator[Any]:  # noqa: ANN401
    """The rows of the parts as tables of one schema."""
    import pyarrow
    import pyarrow.parquet

    held: list[Any] = []
    for part in parts:
        for _ in verified(publishing.source_of(part)):
            continue  # the whole is checked before any of its rows is written
        for batch in pyarrow.parquet.ParquetFile(open_object(part.path)).iter_batches():
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
    return table.select(schema.names).cast(schema)


def _table(rows: list[Row]) -> Any:  # noqa: ANN401
    import pyarrow

    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return pyarrow.table({name: pyarrow.array([_plain(row.get(name)) for row in rows]) for name in names})
    except pyarrow.ArrowException as error:
        raise TypeError(f"the rows are no table: {error}") from None


def _plain(value: object) -> object:
    """numpy's scalars and arrays of more than one dimension, which pyarrow does not take, as numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value  # type: ignore[attr-defined]


class _Sink(io.RawIOBase):
    """A file to write to, whose bytes can be taken away as it grows."""

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
