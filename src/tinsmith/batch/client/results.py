"""The rows of a job's committed batches, wherever they are: in parts while it runs, in the output once it is published.

A job that succeeds deletes its parts, at any moment of a reader's work. The published output is these parts one after
the other, so a reader that finds a part gone goes on in the output, behind the rows of the batches before: each row is
given once. An output that is not the one that was published any more is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from tinsmith.batch.client.http import Client
from tinsmith.batch.formats import registry
from tinsmith.batch.formats.publishing import MANIFEST
from tinsmith.batch.formats.registry import OutputWriter, writer_of_part
from tinsmith.batch.types import OutputInfo, PartInfo, Row
from tinsmith.errors import NotFoundError, UserError
from tinsmith.storage.locations import open_store
from tinsmith.storage.stores import join


class CommittedRows:
    """One output of one job. Batches are to be read in the order of their rows, each once."""

    def __init__(self, client: Client, job_id: int, output: int) -> None:
        self._client = client
        self._job_id = job_id
        self._output = output
        self._writer: OutputWriter | None = None
        self._part_formats: dict[str, Row] = {}
        self._published: Iterator[Row] | None = None
        self._offsets: Iterator[tuple[int, int]] = iter(())
        self._at = 0  # how many rows of the published output were passed over or given

    def page(self, after: int) -> list[Row]:
        """Committed batches that begin after a row, as the server lists them."""
        page = self._client.partial(self._job_id, after)
        outputs = page["outputs"]
        if not 0 <= self._output < len(outputs):
            raise UserError(f"output is {self._output}; bulk job {self._job_id} has outputs 0 to {len(outputs) - 1}")
        self._part_formats = page["part_formats"]
        self._writer = self._writer or registry.writer_from_dict(outputs[self._output])
        return page["batches"]

    def of(self, batch: Row) -> Iterator[Row]:
        """The rows of a batch of a page. Raises NotFoundError if they were deleted and are in no output."""
        if not batch["parts"]:
            return
        assert self._writer is not None
        part = PartInfo.from_dict(batch["parts"][self._output])
        given = 0
        if self._published is None:
            try:
                writer = writer_of_part(part, self._part_formats) or self._writer
                for row in writer.read_part(part):
                    given += 1
                    yield row
                return
            except FileNotFoundError:
                self._published = self._open_published(self._writer)
                self._offsets = self._find_offsets()
        begin = next(offset for start, offset in self._offsets if start == batch["start_idx"])
        for _ in islice(self._published, begin + given - self._at):
            continue
        yield from islice(self._published, part.rows - given)
        self._at = begin + part.rows

    def _open_published(self, writer: OutputWriter) -> Iterator[Row]:
        status = self._client.status(self._job_id)
        if status["status"] != "SUCCEEDED":
            raise NotFoundError(
                f"the parts of bulk job {self._job_id} were deleted: a job that resumed it has succeeded, or it ended "
                "longer ago than parts are kept (TINSMITH_BATCH_RETENTION_DAYS)"
            ) from None
        published = OutputInfo.from_dict(status["outputs"][self._output])
        if writer.in_store:
            store, key = open_store(join(published.path, MANIFEST) if writer.is_directory else published.path)
            if not store.exists(key) or store.head(key).etag != published.etag:
                raise NotFoundError(
                    f"the output {published.path} of bulk job {self._job_id} was deleted or replaced after it was "
                    "published, and its parts were deleted then"
                ) from None
        return writer.read_published(published)

    def _find_offsets(self) -> Iterator[tuple[int, int]]:
        """(start_idx, rows of the output before it) of each batch."""
        after, offset = -1, 0
        while found := self.page(after):
            for batch in found:
                after = batch["start_idx"]
                yield after, offset
                offset += batch["parts"][self._output]["rows"] if batch["parts"] else 0
