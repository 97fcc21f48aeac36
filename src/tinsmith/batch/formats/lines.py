"""JSON Lines and text: files with one row in each line, plain or compressed (`.gz`, `.zst`, by the path's ending).

Reading: `path` is a file, a directory with a final slash, or a pattern (`s3://b/in/*.jsonl`); files are taken in order
of their names. The offset of each row is found once and cached, so a batch is one ranged read. Blank lines are not
rows. A byte order mark, CRLF and a missing final newline are accepted. Compressed files, and JSON documents that are
one array, are first unpacked into the cache.

Writing: a part holds the bytes of its rows in the output, already compressed, since concatenated gzip members are a
gzip file and concatenated zstd frames a zstd file. So publishing only concatenates parts, in constant memory.
"""

from __future__ import annotations

import gzip
import io
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, NamedTuple

import orjson

from tinsmith.batch.formats import publishing
from tinsmith.batch.formats.encoding import decode, encode, select_columns
from tinsmith.batch.formats.file_split import SplitFileWriter, publish_split, split_items
from tinsmith.batch.formats.input_versions import InputChangedError
from tinsmith.batch.formats.offset_cache import cached
from tinsmith.batch.formats.part_lists import FilledParts
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY, OUTPUT_WRITER_REGISTRY, FileWriter, InputReader
from tinsmith.batch.formats.row_sizes import tokens_in
from tinsmith.batch.types import OutputInfo, PartInfo, Row, RowRange
from tinsmith.storage.locations import locations, open_object, open_store
from tinsmith.storage.stores import CHUNK_BYTES, LocalStore

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
OFFSET = struct.Struct("<Q")
SPACES = b" \t\r\n"
MAX_ITEMS_BYTES = 8 * 1024 * 1024


class IndexedFile(NamedTuple):
    """A file of lines, and the file with the offset of each row and, last, the file's size. `etag` is that of
    `location` when the offsets were found."""

    location: str
    data: str
    offsets: Path
    etag: str | None

    @property
    def rows(self) -> int:
        return max(0, self.offsets.stat().st_size // OFFSET.size - 1)

    def read(self, first: int, last: int) -> bytes:
        """The bytes of an inclusive range of rows, and of the blank lines after each."""
        with open(self.offsets, "rb") as index:
            index.seek(first * OFFSET.size)
            (start,) = OFFSET.unpack(index.read(OFFSET.size))
            index.seek((last + 1) * OFFSET.size)
            (end,) = OFFSET.unpack(index.read(OFFSET.size))
        store, key = open_store(self.data)
        # Offsets of one version applied to the bytes of another would give wrong rows. The check is free on a disk; in
        # a bucket it would be one more request for each batch.
        if self.data == self.location and isinstance(store, LocalStore) and store.head(key).etag != self.etag:
            raise InputChangedError(f"the input {self.location} changed while the job ran; resume the job for details")
        return store.get_range(key, start, end)


@dataclass
class LinesReader(InputReader):
    """Files whose lines are rows; a subclass parses a line."""

    in_store = True

    @cached_property
    def files(self) -> list[IndexedFile]:
        return self.open_files(locations(self.path), lambda location: _index_file(location, self))

    @cached_property
    def counts(self) -> list[int]:
        """The rows of each file."""
        return [file.rows for file in self.files]

    def __len__(self) -> int:
        return sum(self.counts)

    def unroll(self, location: str) -> Iterator[bytes] | None:
        """The rows of a file as lines of JSON, if the file's own lines are not its rows; else None."""
        return None

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        rows: list[Row] = []
        for file_idx, first, last in self.locate_span(self.counts, start_idx, end_idx):
            file = self.files[file_idx]
            lines = [line for line in file.read(first, last).split(b"\n") if line.strip(SPACES)]
            rows += [self.parse(line, file.location, first + at) for at, line in enumerate(lines)]
        return rows

    def parse(self, line: bytes, location: str, row: int) -> Row:
        raise NotImplementedError

    def row_sizes(self) -> Iterator[int]:
        for file in self.files:
            with open(file.offsets, "rb") as index:
                before = None
                while packed := index.read(OFFSET.size * 8192):
                    for (offset,) in OFFSET.iter_unpack(packed):
                        if before is not None:
                            yield tokens_in(offset - before)
                        before = offset


@INPUT_READER_REGISTRY.type_register(name="json")
@dataclass
class JsonReader(LinesReader):
    """JSON Lines, or a document that is an array: each row is an object."""

    def unroll(self, location: str) -> Iterator[bytes] | None:
        store, key = open_store(location)
        head = store.get_range(key, 0, min(64, store.head(key).size))
        if head.removeprefix(BYTE_ORDER_MARK).lstrip(SPACES)[:1] != b"[":
            return None
        try:
            elements = decode(store.get(key).removeprefix(BYTE_ORDER_MARK))
        except orjson.JSONDecodeError:
            return None  # lines that happen to be arrays; `parse` refuses them
        return (encode(element) for element in elements)

    def parse(self, line: bytes, location: str, row: int) -> Row:
        try:
            value = decode(line.strip(SPACES))
        except orjson.JSONDecodeError as error:
            raise ValueError(f"row {row} of {location} is not JSON: {error}: {_excerpt(line)}") from None
        if not isinstance(value, dict):
            raise ValueError(f"row {row} of {location} is not an object: {_excerpt(line)}")
        return value


@INPUT_READER_REGISTRY.type_register(name="text")
@dataclass
class TextReader(LinesReader):
    """Each line is a row `{column: line}`."""

    column: str = "text"

    def parse(self, line: bytes, location: str, row: int) -> Row:
        try:
            return {self.column: line.removesuffix(b"\r").decode()}
        except UnicodeDecodeError as error:
            raise ValueError(f"row {row} of {location} is not UTF-8: {error}") from None


@INPUT_READER_REGISTRY.type_register(name="items")
@dataclass
class ItemsReader(InputReader):
    """A short list of rows inside the job's specification, which every worker gets whole."""

    path: str = "items"
    items: list[Row] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        for index, row in enumerate(self.items):
            if not isinstance(row, dict):
                raise ValueError(f"row {index} is a {type(row).__name__}; it must be a dict")
        size = len(encode(self.items))
        if size > MAX_ITEMS_BYTES:
            raise ValueError(
                f"the rows have {size} bytes; the maximum is {MAX_ITEMS_BYTES}. Put them in a file (batch.read_json)"
            )

    def __len__(self) -> int:
        return len(self.items)

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        return self.items[start_idx : end_idx + 1]

    def row_sizes(self) -> Iterator[int]:
        """Those of a file with these rows."""
        return (tokens_in(len(encode(row)) + len(b"\n")) for row in self.items)


def _index_file(location: str, reader: LinesReader) -> IndexedFile:
    store, key = open_store(location)
    info = store.head(key)
    source = (location if "://" in location else key, info.etag, info.size)
    data = location
    if location.endswith((".gz", ".zst")):
        data = str(cached(lambda path: _decompress(location, path), "unpacked", *source))
    if (lines := reader.unroll(data)) is not None:
        data = str(cached(lambda path: _write_lines(lines, path), "unrolled", *source, reader.identity))
    # The name of a cached file covers everything that decides its contents.
    return IndexedFile(
        location, data, cached(lambda path: _write_offsets(data, path), "offsets", data, *source), info.etag
    )


def _write_lines(lines: Iterator[bytes], path: Path) -> None:
    with open(path, "wb") as target:
        target.writelines(line + b"\n" for line in lines)


def _decompress(location: str, path: Path) -> None:
    store, key = open_store(location)
    with open_decompressed(store.open(key), location) as source, open(path, "wb") as target:
        shutil.copyfileobj(source, target, CHUNK_BYTES)


def _write_offsets(location: str, path: Path) -> None:
    """Writes the offset of each line that is not blank, then the size of the file."""
    import numpy as np

    store, key = open_store(location)
    position, skipped = 0, 0
    carried = b""  # the beginning of a line whose end was not read yet
    with open(path, "wb") as target:
        for chunk in _join_chunks(store.chunks(key)):
            if position == 0 and not carried and not skipped and chunk.startswith(BYTE_ORDER_MARK):
                skipped = len(BYTE_ORDER_MARK)
                chunk = chunk[skipped:]
                position = skipped
            block = carried + chunk
            end = block.rfind(b"\n") + 1
            if end:
                _line_starts(np.frombuffer(block[:end], np.uint8), block, position).astype("<u8").tofile(target)
                position += end
            carried = block[end:]
        if carried.strip(SPACES):
            target.write(OFFSET.pack(position))
        target.write(OFFSET.pack(position + len(carried)))


def _line_starts(data: np.ndarray, block: bytes, position: int) -> np.ndarray:  # type: ignore[name-defined]  # noqa: F821
    """Offsets of the lines in `data`, which ends with a newline, that hold more than spaces."""
    import numpy as np

    ends = np.flatnonzero(data == 10) + 1
    starts = np.concatenate(([0], ends[:-1]))
    keep = np.ones(len(starts), bool)
    for line_idx in np.flatnonzero(np.isin(data[starts], np.frombuffer(SPACES, np.uint8))):
        keep[line_idx] = bool(block[starts[line_idx] : ends[line_idx]].strip(SPACES))
    return starts[keep] + position


def _join_chunks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Join chunks to ones of at least 4 MiB, so that a long line is not copied once for each small chunk."""
    buffered: list[bytes] = []
    for chunk in chunks:
        buffered.append(chunk)
        if sum(map(len, buffered)) >= 4 * CHUNK_BYTES:
            yield b"".join(buffered)
            buffered = []
    if buffered:
        yield b"".join(buffered)


def _excerpt(line: bytes) -> str:
    text = line[:80].decode(errors="replace")
    return text + ("..." if len(line) > 80 else "")


@dataclass
class LinesWriter(FileWriter):
    """A file with one row in each line; a subclass encodes a row."""

    extension = "jsonl"

    def line(self, row: Row) -> bytes:
        raise NotImplementedError

    def row(self, line: bytes) -> Row:
        """The row of a line that `line` encoded."""
        raise NotImplementedError

    def check(self, row: Row) -> None:
        self.line(row)

    def write_part(self, rows: Sequence[Row | None], span: RowRange, part_base: str) -> PartInfo:
        lines = [self.line(row) for row in rows if row is not None]
        data = compress_for_path(b"".join(line + b"\n" for line in lines), self.path)
        return publishing.store_part(part_base, span, self.extension, data, len(lines))

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        return publishing.publish_file(self.path, parts, staging, if_exists)

    def read_part(self, part: PartInfo) -> Iterator[Row]:
        return self._rows(io.BytesIO(publishing.read_verified(part)))

    def read_published(self, output: OutputInfo) -> Iterator[Row]:
        for file in publishing.iter_published_files(output, self.is_directory):
            yield from self._rows(open_object(file.path))

    def _rows(self, source: IO[bytes]) -> Iterator[Row]:
        with open_decompressed(source, self.path) as lines:
            for line in lines:
                yield self.row(line.removesuffix(b"\n"))


@OUTPUT_WRITER_REGISTRY.type_register(name="json")
@dataclass
class JsonWriter(LinesWriter, SplitFileWriter):
    """JSON Lines. `column` names the columns to write, all where it is None. `encoding.py` says how values look."""

    column: str | list[str] | None = None

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        if self.rows_per_file is None:
            return super().publish(parts, staging, if_exists)
        lines = (
            line for part in FilledParts(parts) for line in publishing.read_verified(part).splitlines(keepends=True)
        )
        files = split_items(lines, self.rows_per_file, b"".join)
        return publish_split(self.path, parts, files, self.rows_per_file, ".jsonl", staging, if_exists)

    def line(self, row: Row) -> bytes:
        return encode(select_columns(row, self.column))

    def row(self, line: bytes) -> Row:
        return decode(line)


@OUTPUT_WRITER_REGISTRY.type_register(name="text")
@dataclass
class TextWriter(LinesWriter):
    """One line for each row: the text in its `column`."""

    column: str = "text"
    extension = "txt"

    def line(self, row: Row) -> bytes:
        text = select_columns(row, self.column)[self.column]
        if not isinstance(text, str):
            raise TypeError(f"column {self.column!r} is a {type(text).__name__}; it must be a str in a text file")
        if "\n" in text or "\r" in text:
            raise ValueError(f"column {self.column!r} has a line break, which a text file cannot store; use JsonWriter")
        return text.encode()

    def row(self, line: bytes) -> Row:
        return {self.column: line.decode()}


def compress_for_path(data: bytes, path: str) -> bytes:
    """Compress bytes as the ending of the path says; deterministic."""
    if path.endswith(".gz"):
        return gzip.compress(data, mtime=0)
    if path.endswith(".zst"):
        import zstandard

        return zstandard.ZstdCompressor().compress(data)
    return data


def open_decompressed(source: IO[bytes], path: str) -> IO[bytes]:
    """The decompressed bytes of a file, as a stream; the ending of its path names the compression."""
    if path.endswith(".gz"):
        return gzip.open(source)  # type: ignore[return-value]
    if path.endswith(".zst"):
        import zstandard

        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True))
    return source
