"""CSV files with a header line.

Reading: every value is text, since a file does not say what else it could be. A line with more or fewer values than the
header fails its row. Wrong quoting fails the file: where the next row begins is then a guess.

Writing: one file with the columns of all rows, in the order in which they first appear. None is an empty value; lists
and objects are JSON text; other values are as `encoding.py` has them. Each part has its own header. Where all headers
are equal and the file is not compressed, publishing concatenates bytes; else it reads and writes the rows again.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import IO, TYPE_CHECKING

import orjson

from tinsmith.batch.formats import publishing
from tinsmith.batch.formats.encoding import encode, select_columns
from tinsmith.batch.formats.file_split import SplitFileWriter, publish_split, split_items
from tinsmith.batch.formats.lines import LinesReader, compress_for_path, open_decompressed
from tinsmith.batch.formats.part_lists import FilledParts
from tinsmith.batch.formats.registry import (
    COMPRESSED_ENDINGS,
    INPUT_READER_REGISTRY,
    OUTPUT_WRITER_REGISTRY,
)
from tinsmith.batch.types import OutputInfo, PartInfo, Row, RowRange
from tinsmith.errors import UserError
from tinsmith.storage.locations import open_object

if TYPE_CHECKING:
    import _csv

FIELD_BYTES = 128 * 1024 * 1024
PAGE_ROWS = 1024


@INPUT_READER_REGISTRY.type_register(name="csv")
@dataclass
class CsvReader(LinesReader):
    """The default `delimiter` is a comma, or a tab for files named .tsv."""

    delimiter: str = ""

    def __post_init__(self) -> None:
        if self.delimiter:
            _check_delimiter(self.delimiter)

    def unroll(self, location: str) -> Iterator[bytes]:
        tabs = ".tsv" in self.path.rpartition("/")[2]
        with io.TextIOWrapper(open_object(location), "utf-8-sig", newline="") as text:
            lines = _read_lines(text, self.delimiter or ("\t" if tabs else ","))
            header = next(filter(None, lines), [])
            if len(set(header)) < len(header):
                twice = sorted({name for name in header if header.count(name) > 1})
                raise ValueError(f"{location} has the columns {twice} more than once; rename them")
            last_line = lines.line_num
            for values in lines:
                if len(values) == len(header):
                    yield orjson.dumps(dict(zip(header, values, strict=True)))
                elif values:
                    yield orjson.dumps([last_line + 1, len(values), len(header)])
                last_line = lines.line_num

    def parse(self, line: bytes, location: str, row: int) -> Row:
        values = orjson.loads(line)
        if isinstance(values, list):  # where `unroll` has read a line that is no row
            line_number, num_values, num_columns = values
            raise ValueError(f"line {line_number} of {location} has {num_values} values for {num_columns} columns")
        return values


@OUTPUT_WRITER_REGISTRY.type_register(name="csv")
@dataclass
class CsvWriter(SplitFileWriter):
    """`column` names the columns to write, all where it is None."""

    column: str | list[str] | None = None
    delimiter: str = ","

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_delimiter(self.delimiter)

    def check(self, row: Row) -> None:
        for value in select_columns(row, self.column).values():
            _text(value)

    def write_part(self, rows: Sequence[Row | None], span: RowRange, part_base: str) -> PartInfo:
        selected = [select_columns(row, self.column) for row in rows if row is not None]
        header = list(dict.fromkeys(name for row in selected for name in row))
        lines = [header, *([_text(row.get(name)) for name in header] for row in selected)] if selected else []
        return publishing.store_part(part_base, span, "csv", self._encode(lines), len(selected))

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        filled = FilledParts(parts)
        headers = list(dict.fromkeys(tuple(self._header(part)) for part in filled))
        columns = list(dict.fromkeys(name for header in headers for name in header))
        if headers and not columns:
            raise UserError(
                f"the rows of {self.path} have no columns, and a CSV file cannot count such rows. Return rows with a "
                "column, or resume the job with format='jsonl'"
            )
        if self.rows_per_file is not None:
            files = split_items(
                self._iter_values(filled, columns), self.rows_per_file, self._encode, self._encode([columns])
            )
            return publish_split(self.path, filled, files, self.rows_per_file, ".csv", staging, if_exists)
        if len(headers) > 1 or self.path.endswith(COMPRESSED_ENDINGS):
            return publishing.publish_stream(self.path, self._rewrite(filled, columns), filled, staging, if_exists)
        head = self._encode([columns]) if headers else b""
        return publishing.publish_file(self.path, filled, staging, if_exists, head=head, skip=len(head))

    def read_part(self, part: PartInfo) -> Iterator[Row]:
        return self._rows(self._lines(part))

    def _rows(self, lines: Iterator[list[str]]) -> Iterator[Row]:
        header = next(lines, [])
        yield from (dict(zip(header, values, strict=True)) for values in lines)

    def read_published(self, output: OutputInfo) -> Iterator[Row]:
        for file in publishing.iter_published_files(output, self.is_directory):
            with open_decompressed(open_object(file.path), file.path) as source:
                yield from self._rows(self._lines_in(source))

    def _rewrite(self, parts: Iterable[PartInfo], columns: list[str]) -> Iterator[bytes]:
        yield compress_for_path(self._encode([columns]) if columns else b"", self.path)
        rows = self._iter_values(parts, columns)
        while page := list(islice(rows, PAGE_ROWS)):
            yield compress_for_path(self._encode(page), self.path)

    def _iter_values(self, parts: Iterable[PartInfo], columns: list[str]) -> Iterator[list[str]]:
        for part in parts:
            publishing.check_part(part)
            for row in self.read_part(part):
                yield [row.get(name, "") for name in columns]

    def _header(self, part: PartInfo) -> list[str]:
        with closing(self._lines(part)) as lines:
            return next(lines, [])

    def _lines(self, part: PartInfo) -> Generator[list[str]]:
        return self._lines_in(publishing.open_part(part))

    def _lines_in(self, source: IO[bytes]) -> Generator[list[str]]:
        with io.TextIOWrapper(source, "utf-8", newline="") as text:
            yield from _read_lines(text, self.delimiter)

    def _encode(self, lines: Sequence[Sequence[str]]) -> bytes:
        text = io.StringIO(newline="")
        csv.writer(text, delimiter=self.delimiter, lineterminator="\n").writerows(lines)
        return text.getvalue().encode()


def _read_lines(text: IO[str], delimiter: str) -> _csv.Reader:
    csv.field_size_limit(FIELD_BYTES)  # of the whole process, 128 KiB by default
    return csv.reader(text, delimiter=delimiter, strict=True)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    plain = encode(value).decode()
    decoded = json.loads(plain)
    if decoded is None:
        return ""
    return decoded if isinstance(decoded, str) else plain


def _check_delimiter(delimiter: str) -> None:
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise ValueError(f"delimiter is {delimiter!r}; it must be one character, and no quote or line break")
