"""Rows of CSV files with a header line. Every value is text: a file does not say what else it could be."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from tinsmith.batch.formats.protocols import Row
from tinsmith.batch.formats.readers.lines import LinesReader
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY
from tinsmith.storage.stores import open_object

FIELD_BYTES = 128 * 1024 * 1024


@INPUT_READER_REGISTRY.type_register(name="csv")
@dataclass
class CsvReader(LinesReader):
    """`delimiter` is a comma, or a tab in files named .tsv, unless it is given."""

    delimiter: str = ""

    def unroll(self, location: str) -> Iterator[bytes]:
        csv.field_size_limit(FIELD_BYTES)
        tabs = ".tsv" in self.path.rpartition("/")[2]
        with io.TextIOWrapper(open_object(location), "utf-8-sig", newline="") as text:
            lines = csv.reader(text, delimiter=self.delimiter or ("\t" if tabs else ","), strict=True)
            header = next(lines, None)
            for values in lines:
                if not values:
                    continue
                if header is None or len(values) != len(header):
                    raise ValueError(
                        f"line {lines.line_num} of {self.path} has {len(values)} values, its header {len(header or ())}"
                    )
                yield orjson.dumps(dict(zip(header, values, strict=True)))

    def parse(self, line: bytes, location: str, row: int) -> Row:
        return orjson.loads(line)
