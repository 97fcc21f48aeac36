"""The decoded row groups of a reader's Parquet files, so that the batches of a row group decode it once.

A row group is decoded in chunks, in order, as far as a batch needs it. Decoded chunks stay until they have
`DECODED_BYTES` together, the oldest go first, so that a row group of any size takes bounded memory: batches that come
in order decode each chunk once, and one that comes late decodes its row group again.

At most `MAX_OPEN` files are open, however many there are; one that changed before it is opened again is refused. One
thread at a time uses an object.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from typing import IO, Any, NamedTuple

from tinsmith.batch.formats.input_versions import InputChangedError
from tinsmith.batch.types import Row
from tinsmith.errors import UserError
from tinsmith.storage.locations import open_object, open_store

DECODED_BYTES = 128 * 1024 * 1024
CHUNK_ROWS = 4096
CHUNK_BYTES = 4 * 1024 * 1024
MAX_OPEN = 16


class RowGroup(NamedTuple):
    """A row group of a file. `bytes` are those of its encoded columns, before compression."""

    location: str
    group_idx: int
    rows: int
    bytes: int

    @property
    def chunk_rows(self) -> int:
        return max(1, min(CHUNK_ROWS, CHUNK_BYTES * self.rows // max(1, self.bytes)))


class _Decoding(NamedTuple):
    """A row group that is being decoded: its chunks from the next one on."""

    group: RowGroup
    chunks: Iterator[tuple[int, Any]]


class RowGroups:
    """The row groups of some files, of which only these columns are read; None for all. A column that a file lacks is
    null there."""

    def __init__(self, columns: Sequence[str] | None) -> None:
        self._columns = None if columns is None else list(columns)
        self._files: OrderedDict[str, tuple[IO[bytes], Any]] = OrderedDict()
        self._etags: dict[str, str | None] = {}
        self._names: dict[str, None] = {}
        self._decoded: OrderedDict[tuple[RowGroup, int], Any] = OrderedDict()
        self._decoded_bytes = 0
        self._decoding: _Decoding | None = None
        self._next_chunk = 0

    def read_footer(self, location: str) -> list[RowGroup]:
        """The row groups of a file."""
        file = self._open(location)
        self._names |= dict.fromkeys(file.schema_arrow.names)
        groups = (file.metadata.row_group(idx) for idx in range(file.num_row_groups))
        return [RowGroup(location, idx, group.num_rows, group.total_byte_size) for idx, group in enumerate(groups)]

    def check_columns(self) -> None:
        """Raises UserError if a column that is to be read is in none of the files whose footers were read."""
        if missing := [name for name in self._columns or () if not _is_in(name, self._names)]:
            raise UserError(f"columns has {missing}, and the files have only {list(self._names)}")

    def read_rows(self, group: RowGroup, first: int, last: int) -> list[Row]:
        """An inclusive range of the rows of a group."""
        size = group.chunk_rows
        rows: list[Row] = []
        for chunk_idx in range(first // size, last // size + 1):
            begin = max(first - chunk_idx * size, 0)
            rows += self._chunk(group, chunk_idx).slice(begin, last + 1 - chunk_idx * size - begin).to_pylist()
        return rows

    def _chunk(self, group: RowGroup, chunk_idx: int) -> Any:  # noqa: ANN401  a table of pyarrow
        if (group, chunk_idx) in self._decoded:
            self._decoded.move_to_end((group, chunk_idx))
            return self._decoded[group, chunk_idx]
        if self._decoding is None or self._decoding.group != group or self._next_chunk > chunk_idx:
            self._decoding, self._next_chunk = _Decoding(group, self._decode(group)), 0
        for at, table in self._decoding.chunks:
            self._next_chunk = at + 1
            self._keep((group, at), table)
            if at == chunk_idx:
                return table
        raise EOFError(f"row group {group.group_idx} of {group.location} ends before chunk {chunk_idx}")

    def _keep(self, key: tuple[RowGroup, int], table: Any) -> None:  # noqa: ANN401
        if (older := self._decoded.pop(key, None)) is not None:
            self._decoded_bytes -= older.nbytes
        self._decoded[key] = table
        self._decoded_bytes += table.nbytes
        while self._decoded_bytes > DECODED_BYTES and len(self._decoded) > 1:
            self._decoded_bytes -= self._decoded.popitem(last=False)[1].nbytes

    def _decode(self, group: RowGroup) -> Iterator[tuple[int, Any]]:
        """The chunks of a row group with their indices; all but the last have `chunk_rows` rows."""
        import pyarrow

        size, chunk_idx, waiting = group.chunk_rows, 0, None
        file = self._open(group.location)
        missing = [name for name in self._columns or () if not _is_in(name, file.schema_arrow.names)]
        for batch in file.iter_batches(size, row_groups=[group.group_idx], columns=self._columns):
            table = pyarrow.Table.from_batches([batch])
            for name in missing:
                table = table.append_column(name, pyarrow.nulls(batch.num_rows))
            waiting = table if waiting is None else pyarrow.concat_tables([waiting, table])
            while waiting.num_rows >= size:
                yield chunk_idx, waiting.slice(0, size)
                waiting, chunk_idx = waiting.slice(size), chunk_idx + 1
        if waiting is not None and waiting.num_rows:
            yield chunk_idx, waiting

    def _open(self, location: str) -> Any:  # noqa: ANN401  a ParquetFile
        import pyarrow.parquet

        if location in self._files:
            self._files.move_to_end(location)
            return self._files[location][1]
        store, key = open_store(location)
        etag = store.head(key).etag
        if self._etags.setdefault(location, etag) != etag:
            raise InputChangedError(f"the input {location} changed while the job ran; resume the job for details")
        source = open_object(location)
        try:
            self._files[location] = source, pyarrow.parquet.ParquetFile(source)
        except BaseException:
            source.close()
            raise
        if len(self._files) > MAX_OPEN:
            oldest, (source, _) = self._files.popitem(last=False)
            if self._decoding is not None and self._decoding.group.location == oldest:
                self._decoding = None
            source.close()
        return self._files[location][1]


def _is_in(column: str, names: Container[str]) -> bool:
    """Whether a file with these columns has a column, or a field of one (`column.field`)."""
    return column in names or column.partition(".")[0] in names
