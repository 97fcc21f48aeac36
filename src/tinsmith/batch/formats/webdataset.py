"""WebDataset tar files: the members that share a name up to the first dot are one row, `__key__` and their endings.

A column's name is a member's ending, and gives its type: `txt` is text, `cls` a whole number, `json` JSON, any other
bytes. The output is a directory with one tar file for each batch; a sample's key is the row's `__key__`, or its index
in the input.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import orjson

from tinsmith.batch.formats import publishing
from tinsmith.batch.formats.encoding import encode
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY, OUTPUT_WRITER_REGISTRY, DirectoryWriter, InputReader
from tinsmith.batch.types import OutputInfo, PartInfo, Row, RowRange
from tinsmith.storage.locations import locations, open_object, open_store


@dataclass(frozen=True)
class ShardSample:
    location: str
    key: str
    members: list[tuple[str, int, int]]


@INPUT_READER_REGISTRY.type_register(name="webdataset")
@dataclass
class WebdatasetReader(InputReader):
    """`path` is a tar file, a directory with a final slash, or a pattern."""

    in_store = True

    @cached_property
    def _samples(self) -> list[ShardSample]:
        return [each for name in locations(self.path) if name.endswith(".tar") for each in samples_of(name)]

    def __len__(self) -> int:
        return len(self._samples)

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        return [_row(sample) for sample in self._samples[start_idx : end_idx + 1]]


def samples_of(location: str) -> list[ShardSample]:
    """The samples of one file, in order. The members of a sample are adjacent."""
    samples: list[ShardSample] = []
    with tarfile.open(fileobj=open_object(location), mode="r:") as archive:
        for member in archive:
            if not member.isfile():
                continue
            directory, slash, name = member.name.rpartition("/")
            stem, _, ending = name.partition(".")
            key = directory + slash + stem
            if not samples or samples[-1].key != key:
                samples.append(ShardSample(location, key, []))
            samples[-1].members.append((ending, member.offset_data, member.size))
    return samples


def _row(sample: ShardSample) -> Row:
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
class WebdatasetWriter(DirectoryWriter):
    """One tar file for each batch."""

    def check(self, row: Row) -> None:
        for ending, value in row.items():
            if ending != KEY:
                _member(ending, value)

    def write_part(self, rows: Sequence[Row | None], span: RowRange, part_base: str) -> PartInfo:
        self.check_one_each(rows, span)
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
        return publishing.store_part(part_base, span, "tar", buffer.getvalue(), count, alone=True)

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        return publishing.publish_parts(self.path, parts, "shard-{:06d}.tar", staging, if_exists)

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
