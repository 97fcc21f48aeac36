"""Writers with the three older methods (`upload_batch`, `reduce_results`, `cleanup`), made safe.

Workers only keep the rows, pickled, as immutable parts. Publishing hands the winners' rows, batch by batch, to the
writer, whose `path` is then a staging directory; what it makes there is published like any output. So an attempt that
lost, or a publication that was cut short, has written nothing that anybody sees.

The parts are pickles that this job's own workers wrote below the job's staging directory, and are checked against
their sha256 before they are read.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tinsmith.batch.formats import publishing
from tinsmith.batch.formats.protocols import OutputInfo, OutputWriter, PartInfo, Row, Span, part_name
from tinsmith.batch.formats.publishing import PublishedFile
from tinsmith.errors import UserError
from tinsmith.storage.locations import open_store
from tinsmith.storage.stores import LocalStore, join

STAGED_JOB = "job"


@dataclass
class LegacyWriter(OutputWriter):
    inner: OutputWriter

    def check(self, row: Row) -> None:
        self.inner.check(row)

    def write_part(self, rows: Sequence[Row | None], span: Span, part_base: str) -> PartInfo:
        data = pickle.dumps((tuple(span), list(rows)), protocol=5)
        kept = sum(row is not None for row in rows)
        return publishing.store_part(join(part_base, part_name(span, "pickle")), data, kept)

    def read_part(self, part: PartInfo) -> Iterator[Row]:
        _, rows = pickle.loads(publishing.read_verified(part))
        yield from (row for row in rows if row is not None)

    def read_published(self, output: OutputInfo) -> Iterator[Row]:
        raise UserError(f"the output is {output.path}, as {type(self.inner).__name__} makes it: read it there")

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        name = self.path.rstrip("/").rpartition("/")[2]
        staged = join(staging, f"staged/{name}") + ("/" if self.is_directory else "")
        store, key = open_store(staged)
        store.delete_below(open_store(join(staging, "staged"))[1])  # what a publication that was cut short made
        if isinstance(store, LocalStore):  # what the path is below is there, as it is for any file that one writes
            os.makedirs(key if self.is_directory else os.path.dirname(key), exist_ok=True)
        writer = replace(self.inner, path=staged)
        for part in parts:
            (start, end), rows = pickle.loads(publishing.read_verified(part))
            if all(row is not None for row in rows):
                writer.upload_batch(rows, start, end, STAGED_JOB)
                continue
            for index, row in enumerate(rows, start):
                if row is not None:
                    writer.upload_batch([row], index, index, STAGED_JOB)
        writer.reduce_results(STAGED_JOB)
        writer.cleanup(STAGED_JOB)
        count = sum(part.rows for part in parts)
        if store.exists(key):
            made = PartInfo(staged, count, store.head(key).size, publishing.digest_of(store, key))
            return publishing.publish_file(self.path, [made], staging, if_exists)
        return self._publish_directory(staged, count, staging, if_exists)

    def _publish_directory(self, staged: str, rows: int, staging: str, if_exists: str) -> OutputInfo:
        store, key = open_store(staged)
        root = key.rstrip("/") + "/"
        location = staged.rstrip("/") + "/"
        files = [
            PublishedFile(
                found[len(root) :],
                location + found[len(root) :],
                store.head(found).size,
                publishing.digest_of(store, found),
            )
            for found in sorted(store.list(key))
        ]
        if rows and not files:
            raise UserError(
                f"{type(self.inner).__name__} wrote nothing below its path, though it was given {rows} rows"
            )
        return publishing.publish_directory(self.path.rstrip("/") + "/", files, rows, staging, if_exists)
