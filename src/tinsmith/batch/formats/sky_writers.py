"""Writers with the three older methods (`upload_batch`, `reduce_results`, `cleanup`), made safe.

Workers store the rows, pickled, as immutable parts. Publishing passes the winners' rows, batch by batch, to a copy of
the writer whose `path` is a staging directory, and publishes what the copy wrote there like any output. So an attempt
that lost, or a publication that was interrupted, leaves nothing at the output's path.

The parts are pickles that this job's own workers wrote below the job's staging directory. Their sha256 is checked
before they are unpickled.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tinsmith.batch.formats import publishing
from tinsmith.batch.formats.part_lists import PublishedFile
from tinsmith.batch.types import OutputInfo, PartInfo, Row, RowRange
from tinsmith.errors import UserError
from tinsmith.storage.locations import open_store
from tinsmith.storage.stores import LocalStore, join

STAGED_JOB = "job"


class SkyWriter(Protocol):
    """A dataclass with `path` and the older methods."""

    path: str

    @property
    def is_directory(self) -> bool: ...
    def upload_batch(self, results: list[Row], start_idx: int, end_idx: int, job_id: str) -> None: ...
    def reduce_results(self, job_id: str) -> None: ...
    def cleanup(self, job_id: str) -> None: ...


def write_part(rows: Sequence[Row | None], span: RowRange, part_base: str) -> PartInfo:
    data = pickle.dumps((tuple(span), list(rows)), protocol=5)
    num_rows = sum(row is not None for row in rows)
    return publishing.store_part(part_base, span, "pickle", data, num_rows)


def read_part(part: PartInfo) -> Iterator[Row]:
    _, rows = _load(part)
    yield from (row for row in rows if row is not None)


def publish(writer: SkyWriter, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
    """Publish parts through the older methods of a writer. Raises UserError if it was given rows and wrote nothing."""
    name = writer.path.rstrip("/").rpartition("/")[2]
    staged = join(staging, f"staged/{name}") + ("/" if writer.is_directory else "")
    store, key = open_store(staged)
    store.delete_below(open_store(join(staging, "staged"))[1])  # files of an interrupted publication
    if isinstance(store, LocalStore):  # such writers expect the directory that they write to
        os.makedirs(key if writer.is_directory else os.path.dirname(key), exist_ok=True)
    copy: SkyWriter = replace(writer, path=staged)  # type: ignore[type-var]
    for part in parts:
        (start, end), rows = _load(part)
        if all(row is not None for row in rows):
            copy.upload_batch(rows, start, end, STAGED_JOB)
            continue
        for index, row in enumerate(rows, start):
            if row is not None:
                copy.upload_batch([row], index, index, STAGED_JOB)
    copy.reduce_results(STAGED_JOB)
    copy.cleanup(STAGED_JOB)
    count = sum(part.rows for part in parts)
    if store.exists(key):
        file = PartInfo(staged, count, store.head(key).size, store.digest(key))
        return publishing.publish_file(writer.path, [file], staging, if_exists)
    root, location = key.rstrip("/") + "/", staged.rstrip("/") + "/"
    files = [
        PublishedFile(
            file_key[len(root) :],
            PartInfo(location + file_key[len(root) :], 0, store.head(file_key).size, store.digest(file_key)),
        )
        for file_key in sorted(store.list(key))
    ]
    if count and not files:
        raise UserError(f"{type(writer).__name__} wrote nothing below its path for {count} rows")
    return publishing.publish_directory(writer.path.rstrip("/") + "/", files, count, staging, if_exists)


def _load(part: PartInfo) -> tuple[tuple[int, int], list[Any]]:
    return pickle.loads(publishing.read_verified(part))
