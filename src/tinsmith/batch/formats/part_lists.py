"""The parts of a job and the files of an output, in their order, read anew whenever they are iterated.

A job may have millions of parts, so their list is on disk: what is in memory does not grow with their number, except
for one offset for each `STRIDE` of them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, overload

import orjson

from tinsmith.batch.types import PartInfo

STRIDE = 256
"""Parts between two whose position in the file is in memory."""


class PublishedFile(NamedTuple):
    """One file of a published directory: its name there, and the part with its bytes."""

    name: str
    part: PartInfo


class CommittedParts(Sequence[PartInfo]):
    """The committed parts of one output, in a file with a line for each batch."""

    def __init__(self, path: str, output_idx: int) -> None:
        self._path = path
        self._output_idx = output_idx
        self._offsets = array("q")
        self._length = end = 0
        with open(path, "rb") as lines:
            for line in lines:
                if self._length % STRIDE == 0:
                    self._offsets.append(end)
                self._length += 1
                end += len(line)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[PartInfo]:
        return self._iter_from(0)

    @overload
    def __getitem__(self, index: int) -> PartInfo: ...
    @overload
    def __getitem__(self, index: slice) -> list[PartInfo]: ...
    def __getitem__(self, index: int | slice) -> PartInfo | list[PartInfo]:
        if isinstance(index, slice):
            return [self[part_idx] for part_idx in range(*index.indices(len(self)))]
        return next(self._iter_from(range(len(self))[index]))

    def _iter_from(self, first: int) -> Iterator[PartInfo]:
        if first >= len(self):
            return
        with open(self._path, "rb") as lines:
            lines.seek(self._offsets[first // STRIDE])
            for line in islice(lines, first % STRIDE, None):
                yield PartInfo.from_dict(orjson.loads(line)[self._output_idx])


@contextlib.contextmanager
def parts_on_disk(parts: Iterable[PartInfo]) -> Iterator[Sequence[PartInfo]]:
    """Parts in a temporary file, so that any number of them needs little memory."""
    with _lines_on_disk([part.to_dict()] for part in parts) as path:
        yield CommittedParts(path, 0)


class FilledParts:
    """Those of the parts that have rows."""

    def __init__(self, parts: Iterable[PartInfo]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[PartInfo]:
        return (part for part in self._parts if part.rows)


def sum_parts(parts: Iterable[PartInfo]) -> tuple[int, int]:
    """The rows and the bytes of all parts."""
    rows = num_bytes = 0
    for part in parts:
        rows, num_bytes = rows + part.rows, num_bytes + part.bytes
    return rows, num_bytes


class NumberedFiles:
    """Parts as files whose names are numbered; `name` formats the number of each."""

    def __init__(self, parts: Iterable[PartInfo], name: str) -> None:
        self._parts = parts
        self._name = name

    def __iter__(self) -> Iterator[PublishedFile]:
        return (PublishedFile(self._name.format(file_idx), part) for file_idx, part in enumerate(self._parts))


class _StoredFiles:
    def __init__(self, path: str) -> None:
        self._path = path

    def __iter__(self) -> Iterator[PublishedFile]:
        with open(self._path, "rb") as lines:
            for line in lines:
                name, part = orjson.loads(line)
                yield PublishedFile(name, PartInfo.from_dict(part))


@contextlib.contextmanager
def files_on_disk(files: Iterable[PublishedFile]) -> Iterator[Iterable[PublishedFile]]:
    """Files in a temporary list, for files that are written while they are listed."""
    with _lines_on_disk([file.name, file.part.to_dict()] for file in files) as path:
        yield _StoredFiles(path)


@contextlib.contextmanager
def _lines_on_disk(items: Iterable[object]) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tinsmith-parts-") as directory:
        path = os.path.join(directory, "parts")
        with open(path, "wb") as lines:
            for item in items:
                lines.write(orjson.dumps(item) + b"\n")
        yield path
