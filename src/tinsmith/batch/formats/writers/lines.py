"""Rows as lines of one file: JSON Lines and text, plain or packed (`.gz`, `.zst`, by the path's ending).

A part is what its rows will be in the file, packed already: joined gzip members are a gzip file, and joined zstd
frames a zstd file. So publishing only joins, and needs no memory.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import orjson

from tinsmith.batch.formats import publishing
from tinsmith.batch.formats.encoding import encode, selected
from tinsmith.batch.formats.protocols import OutputInfo, OutputWriter, PartInfo, Row, Span, part_name
from tinsmith.batch.formats.registry import OUTPUT_WRITER_REGISTRY
from tinsmith.storage.stores import join, open_object


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
