"""Rows that are lines of files: JSON Lines and text, plain or packed, one file or many.

`path` is a file, a directory with a final slash, or a pattern (`s3://b/in/*.jsonl`); files are taken in order of their
names. The offset of each row is found once and kept (`cache.py`), so any batch is one ranged read of its own bytes.
Blank lines are no rows. A byte order mark, CRLF and a missing final newline are fine. `.gz` and `.zst` files, and JSON
documents that are one array, are unpacked into the cache first.

Rows as lines of one file: JSON Lines and text, plain or packed (`.gz`, `.zst`, by the path's ending).

A part is what its rows will be in the file, packed already: joined gzip members are a gzip file, and joined zstd
frames a zstd file. So publishing only joins, and needs no memory.
"""

from __future__ import annotations

import gzip
import io
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

import orjson

from tinsmith.batch.formats import publishing
from tinsmith.batch.formats.encoding import encode, selected
from tinsmith.batch.formats.input_versions import InputChangedError
from tinsmith.batch.formats.offset_cache import cached
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY, OUTPUT_WRITER_REGISTRY, InputReader, OutputWriter
from tinsmith.batch.types import OutputInfo, PartInfo, Row, Span, part_name
from tinsmith.storage.locations import locations, open_object, open_store
from tinsmith.storage.stores import CHUNK_BYTES, LocalStore, join

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BYTES_PER_TOKEN = 4
OFFSET = struct.Struct("<Q")
SPACES = b" \t\r\n"


class IndexedFile(NamedTuple):
    """A file of lines, and the file that has the offset of each row and, last, the file's size. `etag` is that of
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
        # Offsets of one version in the bytes of another are rows that nobody wrote. A look costs nothing on a disk; in
        # a bucket it would be one more request for each batch.
        if self.data == self.location and isinstance(store, LocalStore) and store.head(key).etag != self.etag:
            raise InputChangedError(f"the input {self.location} was changed while the job ran; resume it to see how")
        return store.get_range(key, start, end)


@dataclass
class LinesReader(InputReader):
    """The lines of files, whatever they hold."""

    in_store = True

    _files: list[IndexedFile] | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return sum(file.rows for file in self.files())

    def files(self) -> list[IndexedFile]:
        if self._files is None:
            found = locations(self.path)
            if not found:
                raise FileNotFoundError(f"no file is named {self.path}")
            try:
                self._files = [indexed(location, self.unroll) for location in found]
            except FileNotFoundError:
                raise FileNotFoundError(f"no file is named {self.path}") from None
        return self._files

    def unroll(self, location: str) -> Iterator[bytes] | None:
        """One line of JSON for each row of a file whose own lines are not its rows; else None."""
        return None

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        ends = list(accumulate(file.rows for file in self.files()))
        if not 0 <= start_idx <= end_idx < (ends[-1] if ends else 0):
            raise IndexError(f"rows {start_idx} to {end_idx} of {self.path}, which has {ends[-1] if ends else 0}")
        rows: list[Row] = []
        number = bisect_right(ends, start_idx)
        while len(rows) <= end_idx - start_idx:
            file, before = self.files()[number], ends[number - 1] if number else 0
            first, last = max(start_idx, before) - before, min(end_idx + 1, ends[number]) - before - 1
            if last >= first:
                lines = [line for line in file.read(first, last).split(b"\n") if line.strip(SPACES)]
                rows += [self.parse(line, file.location, first + at) for at, line in enumerate(lines)]
            number += 1
        return rows

    def parse(self, line: bytes, location: str, row: int) -> Row:
        raise NotImplementedError

    def row_sizes(self) -> Iterator[int]:
        for file in self.files():
            with open(file.offsets, "rb") as index:
                before = None
                while packed := index.read(OFFSET.size * 8192):
                    for (offset,) in OFFSET.iter_unpack(packed):
                        if before is not None:
                            yield 1 + (offset - before) // BYTES_PER_TOKEN
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
            elements = orjson.loads(store.get(key).removeprefix(BYTE_ORDER_MARK))
        except orjson.JSONDecodeError:
            return None  # lines that happen to be arrays: each is refused as a row
        return (orjson.dumps(element) for element in elements)

    def parse(self, line: bytes, location: str, row: int) -> Row:
        try:
            value = orjson.loads(line.strip(SPACES))
        except orjson.JSONDecodeError as error:
            raise ValueError(f"row {row} of {location} is not JSON: {error}: {_shown(line)}") from None
        if not isinstance(value, dict):
            raise ValueError(f"row {row} of {location} is not an object: {_shown(line)}")
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


def indexed(location: str, unroll: Callable[[str], Iterator[bytes] | None]) -> IndexedFile:
    store, key = open_store(location)
    info = store.head(key)
    identity = (unroll.__qualname__, location if "://" in location else key, info.etag, info.size)
    data = location
    if location.endswith((".gz", ".zst")):
        data = str(cached(lambda path: _unpack(location, path), "unpacked", *identity))
    if (lines := unroll(data)) is not None:
        data = str(cached(lambda path: _write_lines(lines, path), "unrolled", *identity))
    return IndexedFile(location, data, cached(lambda path: _index(data, path), "offsets", *identity), info.etag)


def _write_lines(lines: Iterator[bytes], path: Path) -> None:
    with open(path, "wb") as target:
        target.writelines(line + b"\n" for line in lines)


def _unpack(location: str, path: Path) -> None:
    store, key = open_store(location)
    with open(path, "wb") as target:
        if location.endswith(".gz"):
            with gzip.GzipFile(fileobj=_Chunks(store.chunks(key))) as stream:  # type: ignore[arg-type]
                while chunk := stream.read(CHUNK_BYTES):
                    target.write(chunk)
        else:
            import zstandard

            source: BinaryIO = _Chunks(store.chunks(key))  # type: ignore[assignment]
            with zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True) as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    target.write(chunk)


def _index(location: str, path: Path) -> None:
    """Writes the offset of each line that is not blank, then the size of the file."""
    import numpy as np

    store, key = open_store(location)
    position, skipped = 0, 0
    carried = b""  # the beginning of a line whose end was not read yet
    with open(path, "wb") as target:
        for chunk in _large(store.chunks(key)):
            if position == 0 and not carried and not skipped and chunk.startswith(BYTE_ORDER_MARK):
                skipped = len(BYTE_ORDER_MARK)
                chunk = chunk[skipped:]
                position = skipped
            block = carried + chunk
            end = block.rfind(b"\n") + 1
            if end:
                _starts(np.frombuffer(block[:end], np.uint8), block, position).astype("<u8").tofile(target)
                position += end
            carried = block[end:]
        if carried.strip(SPACES):
            target.write(OFFSET.pack(position))
        target.write(OFFSET.pack(position + len(carried)))


def _starts(data: np.ndarray, block: bytes, position: int) -> np.ndarray:  # type: ignore[name-defined]  # noqa: F821
    """Offsets of the lines in `data`, which ends with a newline, that hold more than spaces."""
    import numpy as np

    ends = np.flatnonzero(data == 10) + 1
    starts = np.concatenate(([0], ends[:-1]))
    keep = np.ones(len(starts), bool)
    for at in np.flatnonzero(np.isin(data[starts], np.frombuffer(SPACES, np.uint8))):
        keep[at] = bool(block[starts[at] : ends[at]].strip(SPACES))
    return starts[keep] + position


def _large(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of at least 4 MiB, so that a long line is not copied once for each small piece."""
    held: list[bytes] = []
    for chunk in chunks:
        held.append(chunk)
        if sum(map(len, held)) >= 4 * CHUNK_BYTES:
            yield b"".join(held)
            held = []
    if held:
        yield b"".join(held)


class _Chunks:
    """A file to read from, made of pieces."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._held = b""

    def read(self, size: int = -1) -> bytes:
        while size < 0 or len(self._held) < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._held += chunk
        taken, self._held = (self._held, b"") if size < 0 else (self._held[:size], self._held[size:])
        return taken


def _shown(line: bytes) -> str:
    text = line[:80].decode(errors="replace")
    return text + ("..." if len(line) > 80 else "")


@dataclass
class LinesWriter(OutputWriter):
    """A file of lines, whatever they hold. The path names a file."""

    extension = "jsonl"

    def line(self, row: Row) -> bytes:
        raise NotImplementedError

    def __post_init__(self) -> None:
        if not self.path or self.is_directory:
            raise ValueError(f"the path of a {type(self).__name__} is {self.path!r}; it must name a file")

    def check(self, row: Row) -> None:
        self.line(row)

    def write_part(self, rows: Sequence[Row | None], span: Span, part_base: str) -> PartInfo:
        lines = [self.line(row) for row in rows if row is not None]
        data = pack(b"".join(line + b"\n" for line in lines), self.path)
        return publishing.store_part(join(part_base, part_name(span, self.extension)), data, len(lines))

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        return publishing.publish_file(self.path, parts, staging, if_exists)

    def read_part(self, part: PartInfo) -> Iterator[Row]:
        for line in unpack(publishing.read_verified(part), self.path).splitlines():
            yield self.row(line)

    def read_published(self, output: OutputInfo) -> Iterator[Row]:
        with unpacked(output.path) as lines:
            for line in lines:
                yield self.row(line.removesuffix(b"\n"))

    def row(self, line: bytes) -> Row:
        raise NotImplementedError


@OUTPUT_WRITER_REGISTRY.type_register(name="json")
@dataclass
class JsonWriter(LinesWriter):
    """JSON Lines. `column` names the columns to write, all where it is None. `encoding.py` says how values look."""

    column: str | list[str] | None = None

    def line(self, row: Row) -> bytes:
        return encode(selected(row, self.column))

    def row(self, line: bytes) -> Row:
        return orjson.loads(line)


@OUTPUT_WRITER_REGISTRY.type_register(name="text")
@dataclass
class TextWriter(LinesWriter):
    """One line for each row: the text in its `column`."""

    column: str = "text"
    extension = "txt"

    def line(self, row: Row) -> bytes:
        text = selected(row, self.column)[self.column]
        if not isinstance(text, str):
            raise TypeError(f"column {self.column!r} is a {type(text).__name__}; a text file takes text")
        if "\n" in text or "\r" in text:
            raise ValueError(
                f"column {self.column!r} has a line break, which a file of lines cannot hold; use JsonWriter"
            )
        return text.encode()

    def row(self, line: bytes) -> Row:
        return {self.column: line.decode()}


def pack(data: bytes, path: str) -> bytes:
    """The bytes as a file of this name has them; the same for the same bytes, always."""
    if path.endswith(".gz"):
        return gzip.compress(data, mtime=0)
    if path.endswith(".zst"):
        import zstandard

        return zstandard.ZstdCompressor().compress(data)
    return data


def unpacked(path: str) -> IO[bytes]:
    """The bytes that were packed into a file, for reading; little of it is in memory."""
    source = open_object(path)
    if path.endswith(".gz"):
        return gzip.open(source)  # type: ignore[return-value]
    if path.endswith(".zst"):
        import zstandard

        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True))
    return source


def unpack(data: bytes, path: str) -> bytes:
    if path.endswith(".gz"):
        return gzip.decompress(data)
    if path.endswith(".zst"):
        import zstandard

        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True) as stream:
            return stream.read()
    return data
