"""An output as a directory of numbered files with `rows_per_file` rows each, the last one with the remaining rows.

The files are staged one after the other from the rows of the parts, which are read once, and then published with a
manifest as every directory is. Their names sort in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, TypeVar

from tinsmith.batch.formats import publishing
from tinsmith.batch.formats.part_lists import FilledParts, PublishedFile, files_on_disk, sum_parts
from tinsmith.batch.formats.registry import FileWriter
from tinsmith.batch.types import OutputInfo, PartInfo

Item = TypeVar("Item")
PAGE_ROWS = 1000


def rows_per_file_field() -> Any:  # noqa: ANN401  as dataclasses.field
    """The field of a writer whose output may be split into files."""
    return field(default=None, kw_only=True, metadata={"optional": True})


@dataclass
class SplitFileWriter(FileWriter):
    """A writer of one file, or of a directory of numbered files."""

    rows_per_file: int | None = rows_per_file_field()
    """The rows of each file of a directory; None for one file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rows_per_file(self.rows_per_file, self.path)

    @property
    def _is_split(self) -> bool:
        return self.rows_per_file is not None


def check_rows_per_file(rows_per_file: object, path: str) -> None:
    """Raises ValueError for a number that is none, or with a path that is no directory."""
    if rows_per_file is None:
        return
    if isinstance(rows_per_file, bool) or not isinstance(rows_per_file, int) or rows_per_file < 1:
        raise ValueError(f"rows_per_file is {rows_per_file!r}; it must be a whole number from 1")
    if not path.endswith("/"):
        raise ValueError(f"rows_per_file is {rows_per_file} and the path is {path!r}; end it with a slash: a directory")


def publish_split(
    path: str,
    parts: Iterable[PartInfo],
    files: Iterable[Iterable[bytes]],
    rows_per_file: int,
    ending: str,
    staging: str,
    if_exists: str,
) -> OutputInfo:
    """Publish files whose bytes are given one after the other. `parts` has the rows of all of them."""
    rows, num_bytes = sum_parts(FilledParts(parts))
    name = publishing.number_format(-(-rows // rows_per_file), ending)

    def stage_files() -> Iterator[PublishedFile]:
        for file_idx, chunks in enumerate(files):
            yield publishing.stage_file(staging, name.format(file_idx), chunks, parts_bytes=num_bytes)

    with files_on_disk(stage_files()) as staged:
        return publishing.publish_directory(path, staged, rows, staging, if_exists)


def split_items(
    items: Iterable[Item], items_per_file: int, encode: Callable[[list[Item]], bytes], head: bytes = b""
) -> Iterator[Iterator[bytes]]:
    """The bytes of files with so many items each, some items at a time. A file is read to its end before the next."""
    remaining = iter(items)

    def read_file(first: list[Item]) -> Iterator[bytes]:
        page, num_left = first, items_per_file - len(first)
        yield head
        while page:
            yield encode(page)
            page = list(islice(remaining, min(PAGE_ROWS, num_left)))
            num_left -= len(page)

    for _ in count():
        first = list(islice(remaining, min(PAGE_ROWS, items_per_file)))
        if not first:
            return
        yield read_file(first)


def split_tables(tables: Iterable[Any], rows_per_file: int) -> Iterator[Iterator[Any]]:
    """The tables of Arrow of files with so many rows each. A file is read to its end before the next."""
    remaining = iter(tables)
    waiting: list[Any] = []

    def read_file() -> Iterator[Any]:
        num_left = rows_per_file
        while num_left and (table := waiting.pop() if waiting else next(remaining, None)) is not None:
            if table.num_rows > num_left:
                waiting.append(table.slice(num_left))
                table = table.slice(0, num_left)
            num_left -= table.num_rows
            yield table

    while True:
        if not waiting:
            table = next(remaining, None)
            if table is None:
                return
            waiting.append(table)
        yield read_file()
