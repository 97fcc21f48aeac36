"""Samples of tar files: the members that share a name up to the first dot, one row of them, `__key__` and the rest.

`.json` members come parsed, `.txt` as text, `.cls` as a number, all others as bytes.

Rows as samples in tar files, one file for each batch, in a directory.

A column's name is a member's ending, and says what it holds: text in `txt`, a whole number in `cls`, a list or object
in `json`, bytes in any other. The sample's key is the row's `__key__`, or else its index in the input.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import orjson

from tinsmith.batch.formats import publishing
from tinsmith.batch.formats.encoding import encode
from tinsmith.batch.formats.publishing import PublishedFile
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY, OUTPUT_WRITER_REGISTRY, InputReader, OutputWriter
from tinsmith.batch.types import OutputInfo, PartInfo, ProgramError, Row, Span, part_name
from tinsmith.storage.locations import locations, open_object, open_store
from tinsmith.storage.stores import join


@dataclass(frozen=True)
class Sample:
    location: str
    key: str
    members: list[tuple[str, int, int]]


@INPUT_READER_REGISTRY.type_register(name="webdataset")
@dataclass
class WebdatasetReader(InputReader):
    """`path` is a tar file, a directory with a final slash, or a pattern."""

    in_store = True

    _samples: list[Sample] | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self._index())

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        return [_row(sample) for sample in self._index()[start_idx : end_idx + 1]]

    def _index(self) -> list[Sample]:
        if self._samples is None:
            self._samples = []
            for location in locations(self.path):
                if location.endswith(".tar"):
                    self._samples += samples_of(location)
        return self._samples


def samples_of(location: str) -> list[Sample]:
    """The samples of one file, in order; members of a sample lie side by side."""
    samples: list[Sample] = []
    with tarfile.open(fileobj=open_object(location), mode="r:") as archive:
        for member in archive:
            if not member.isfile():
                continue
            directory, slash, name = member.name.rpartition("/")
            stem, _, ending = name.partition(".")
            key = directory + slash + stem
            if not samples or samples[-1].key != key:
                samples.append(Sample(location, key, []))
            samples[-1].members.append((ending, member.offset_data, member.size))
    return samples


def _row(sample: Sample) -> Row:
    store, key = open_store(sample.location)
    found = store.get_ranges(key, [(offset, offset + size) for _, offset, size in sample.members])
    row: Row = {"__key__": sample.key}
    for (ending, _, _), data in zip(sample.members, found, strict=True):
        row[ending] = _value(ending, data)
    return row


def _value(ending: str, data: bytes) -> object:
    kind = ending.rpartition(".")[2].lower()
    if kind == "json":
        return orjson.loads(data)
    if kind == "txt":
        return data.decode()
    if kind == "cls":
        return int(data)
    return data


KEY = "__key__"


@OUTPUT_WRITER_REGISTRY.type_register(name="webdataset")
@dataclass
class WebdatasetWriter(OutputWriter):
    """`path` is a directory, with or without a final slash."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("the path of a WebdatasetWriter is empty; it must name a directory")
        self.path = self.path.rstrip("/") + "/"

    def check(self, row: Row) -> None:
        for ending, value in row.items():
            if ending != KEY:
                _member(ending, value)

    def write_part(self, rows: Sequence[Row | None], span: Span, part_base: str) -> PartInfo:
        if len(rows) != span.rows:
            raise ProgramError("samples are named after the rows of the input, so a row cannot become several or none")
        buffer, count = io.BytesIO(), 0
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for index, row in enumerate(rows, span.start_idx):
                if row is None:
                    continue
                count += 1
                for ending, value in row.items():
                    if ending != KEY:
                        data = _member(ending, value)
                        member = tarfile.TarInfo(f"{row.get(KEY, f'{index:08d}')}.{ending}")
                        member.size = len(data)
                        archive.addfile(member, io.BytesIO(data))
        return publishing.store_part(join(part_base, part_name(span, "tar")), buffer.getvalue(), count)

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        filled = [part for part in parts if part.rows]
        files = [
            PublishedFile(f"shard-{number:06d}.tar", part.path, part.bytes, part.sha256)
            for number, part in enumerate(filled)
        ]
        return publishing.publish_directory(self.path, files, sum(part.rows for part in parts), staging, if_exists)

    def read_part(self, part: PartInfo) -> Iterator[Row]:
        reader = WebdatasetReader(part.path)
        for index in range(len(reader)):
            yield from reader.download_batch(index, index, "")


def _member(ending: str, value: object) -> bytes:
    kind = ending.rpartition(".")[2].lower()
    if kind == "json":
        return encode(value)
    if kind == "txt" and isinstance(value, str):
        return value.encode()
    if kind == "cls" and isinstance(value, int):
        return b"%d" % value
    if kind not in ("txt", "cls") and isinstance(value, bytes | bytearray):
        return bytes(value)
    raise TypeError(
        f"column {ending!r} is a {type(value).__name__}: text belongs in a column that ends with 'txt', a whole number "
        "in 'cls', lists and objects in 'json', bytes in any other"
    )
