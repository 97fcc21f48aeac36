"""The winners' parts made into a job's outputs. Runs writers, so in workers only; again after a crash, at any time."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, overload

import orjson

from tinsmith.batch.formats import registry
from tinsmith.batch.formats.registry import OutputWriter, writer_of_part
from tinsmith.batch.types import JobSpec, OutputInfo, PartInfo, Row, Span, part_base, staging_of
from tinsmith.storage.locations import open_store
from tinsmith.storage.stores import LocalStore


class Winners(Sequence[PartInfo]):
    """The parts of one output in a file that has a batch a line. They are read when they are asked for: of a million,
    only where each begins is in memory."""

    def __init__(self, path: str, output_idx: int) -> None:
        self._path = path
        self._output_idx = output_idx
        self._offsets = array("q", [0])
        with open(path, "rb") as lines:
            for line in lines:
                self._offsets.append(self._offsets[-1] + len(line))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __iter__(self) -> Iterator[PartInfo]:
        return self._after(0)

    @overload
    def __getitem__(self, index: int) -> PartInfo: ...
    @overload
    def __getitem__(self, index: slice) -> list[PartInfo]: ...
    def __getitem__(self, index: int | slice) -> PartInfo | list[PartInfo]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return next(self._after(range(len(self))[index]))

    def _after(self, first: int) -> Iterator[PartInfo]:
        with open(self._path, "rb") as lines:
            lines.seek(self._offsets[first])
            for line in islice(lines, len(self) - first):
                yield PartInfo.from_dict(orjson.loads(line)[self._output_idx])


def publish_output(
    spec: JobSpec, output_idx: int, job_id: str | int, parts: Winners | Sequence[PartInfo | Mapping[str, Any]]
) -> OutputInfo:
    """Publishes one output of a job from the parts of its batches, in the order of their rows."""
    writer = registry.writer_from_dict(spec.batch_output_formats[output_idx])
    winners: Sequence[PartInfo] = (
        parts
        if isinstance(parts, Winners)
        else [part if isinstance(part, PartInfo) else PartInfo.from_dict(part) for part in parts]
    )
    if spec.part_formats:
        winners = _rewritten(spec, output_idx, job_id, winners, writer)
    return writer.publish(winners, staging_of(writer.path, job_id, output_idx), spec.if_exists)


def _rewritten(
    spec: JobSpec, output_idx: int, job_id: str | int, winners: Sequence[PartInfo], writer: OutputWriter
) -> list[PartInfo]:
    """With the parts of another format made anew in this one, the same every time."""
    base = part_base(writer.path, job_id, output_idx, 0)  # attempts begin at 1
    made: list[PartInfo] = []
    at = 0
    for part in winners:
        if (old := writer_of_part(part, spec.part_formats)) is not None:
            rows = list(old.read_part(part))
            for row in rows:
                writer.check(row)
            part = writer.write_part(rows, Span(at, at + len(rows) - 1), base)
        made.append(part)
        at += part.rows
    return made


def publish_errors(spec: JobSpec, job_id: str | int, failures: Sequence[Row]) -> OutputInfo | None:
    """Publishes the failed rows, ascending by `idx`, where the job has an output for them."""
    if spec.batch_error_format is None:
        return None
    writer = registry.writer_from_dict(spec.batch_error_format)
    staging = staging_of(writer.path, job_id, len(spec.batch_output_formats))
    span = Span(0, max(0, len(failures) - 1))
    parts = [writer.write_part(failures, span, f"{staging}/attempt-0")] if failures else []
    return writer.publish(parts, staging, spec.if_exists)


def delete_parts(output: Mapping[str, Any], output_idx: int, job_id: str | int) -> None:
    """Deletes the parts of one output of a job, wherever its writer has put them."""
    if "_class_source" not in output:
        writer = registry.writer_from_dict(output)
        if not writer.in_store:
            writer.delete_staging(staging_of(writer.path, job_id, output_idx))
            return
    delete_staging(output["path"], job_id)


def delete_staging(path: str, job_id: str | int) -> None:
    """Deletes everything that a job left beside one output. Idempotent; nothing of other jobs is touched."""
    store, key = open_store(staging_of(path, job_id, 0).rpartition("/")[0])
    store.delete_below(key)
    if isinstance(store, LocalStore):
        with contextlib.suppress(OSError):  # another job's are in it
            os.rmdir(os.path.dirname(key))
