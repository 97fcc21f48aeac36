"""Rows to and from Ray Data: `Dataset.to_ray` and `Dataset.from_ray`.

To Ray: Ray's tasks read ranges of rows with the reader of the data set, as a job's workers do, so the rows are those
that a job reads, as Arrow holds them, and in their order. Nothing is read before Ray runs its data set.

From Ray: a data set of Ray has no rows that keep their numbers from one run to the next. So it is run once, when a job
is submitted or rows are taken, and its rows are written to one Parquet file, some at a time: at the user's path, or in
the cache of this machine, which deletes files that are a week old.
"""

from __future__ import annotations

import json
import math
import tempfile
import threading
import uuid
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any

from tinsmith.batch.formats.input_versions import Version
from tinsmith.batch.formats.offset_cache import cache_directory
from tinsmith.batch.formats.parquet import ParquetReader, ParquetWriter
from tinsmith.batch.formats.publishing import check_output
from tinsmith.batch.formats.registry import InputReader, canonical_json, has_snapshot, request_dict
from tinsmith.batch.formats.row_groups import RowGroup
from tinsmith.batch.types import PartInfo, Row, RowRange, staging_of
from tinsmith.batch.worker.io_operations import delete_staging
from tinsmith.errors import NotSupportedError, UserError

SPAN_ROWS = 128
"""Rows that a task of Ray reads at a time."""
PART_ROWS = 4096
"""Rows of Ray that are in memory at a time."""


def to_ray(reader: InputReader, limit: int | None) -> Any:  # noqa: ANN401  a data set of Ray
    """A data set of Ray with the first rows of a reader, or all. Raises UserError, NotSupportedError."""
    data = request_dict(reader)
    if has_snapshot(data):
        raise NotSupportedError(
            f"the rows of {reader.path} may change while Ray reads them, of which a job makes a copy; write them to a "
            "file first, and read that with batch.load(PATH).to_ray()"
        )
    ray_data = _import_ray_data()
    total = len(reader) if limit is None else min(len(reader), limit)
    if not total:
        return ray_data.from_items([])
    spans = ray_data.range(math.ceil(total / SPAN_ROWS))
    spans.context.execution_options.preserve_order = True
    return spans.flat_map(read_span, fn_kwargs={"reader": canonical_json(data), "total": total})


def read_span(span: Row, reader: str, total: int) -> list[Row]:
    """The rows of one range, on a worker of Ray."""
    start = int(span["id"]) * SPAN_ROWS
    return _open_reader(reader).download_batch(start, min(start + SPAN_ROWS, total) - 1, str(cache_directory()))


@lru_cache(maxsize=4)
def _open_reader(reader: str) -> InputReader:
    """One reader for all ranges that a process reads: it knows where the rows are."""
    return InputReader.from_dict(json.loads(reader))


def _import_ray_data() -> Any:  # noqa: ANN401  a module
    try:
        import ray.data
    except ImportError:
        raise UserError("to_ray needs Ray Data in this Python; pip install 'ray[data]'") from None
    return ray.data


class RayReader(ParquetReader):
    """The rows of a data set of Ray, which is run when they are first needed, and once."""

    def __init__(self, dataset: Any, path: str | None) -> None:  # noqa: ANN401  a data set of Ray
        """`path` is where the workers find the rows, which must not exist; by default a file of this machine."""
        if not all(hasattr(dataset, name) for name in ("iter_batches", "context")):
            raise UserError(f"the source is a {type(dataset).__name__}; from_ray takes a data set of Ray Data")
        if path is not None and not path.endswith(".parquet"):
            raise UserError(f"path is {path!r}; it must be a file that ends in .parquet")
        super().__init__(path or f"{cache_directory()}/ray-{uuid.uuid4().hex}.parquet")
        self._dataset = dataset
        self._lock = threading.Lock()
        self._is_written = False

    @cached_property
    def _groups(self) -> list[RowGroup]:
        self._write_once()
        return super()._groups

    def to_dict(self) -> dict[str, Any]:
        self._write_once()
        return super().to_dict()

    def version(self) -> Version | None:
        self._write_once()
        return super().version()

    def _write_once(self) -> None:
        """Write the rows, unless that is done. Raises FileExistsError, UserError."""
        with self._lock:
            if not self._is_written:
                _write_rows(self._dataset, self.path)
                self._is_written = True


def _write_rows(dataset: Any, path: str) -> None:  # noqa: ANN401  a data set of Ray
    check_output(path, "error")
    writer, name = ParquetWriter(path), f"ray-{uuid.uuid4().hex}"
    try:
        with tempfile.TemporaryDirectory(prefix="tinsmith-ray-") as directory:
            parts: list[PartInfo] = []
            start = 0
            for rows in _iter_pages(dataset):
                span = RowRange(start, start + len(rows) - 1)
                parts.append(writer.write_part(rows, span, directory))
                start = span.end_idx + 1
            writer.publish(parts, staging_of(path, name, 0), "error")
    finally:
        delete_staging(path, name)


def _iter_pages(dataset: Any) -> Iterator[list[Row]]:  # noqa: ANN401  a data set of Ray
    """The rows in the order of the data set, whose own setting of the order is as before afterwards."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        for table in dataset.iter_batches(batch_size=PART_ROWS, batch_format="pyarrow", prefetch_batches=0):
            yield table.to_pylist()
    finally:
        options.preserve_order = before
