"""Samples of tar files: the members that share a name up to the first dot, one row of them, `__key__` and the rest.

`.json` members come parsed, `.txt` as text, `.cls` as a number, all others as bytes.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass, field

import orjson

from tinsmith.batch.formats.protocols import InputReader, Row
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY
from tinsmith.storage.stores import locations, open_object, open_store


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
