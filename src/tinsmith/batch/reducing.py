"""The winners' parts made into a job's outputs. Runs writers, so in workers only; again after a crash, at any time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.batch import registry
from tinsmith.batch.protocols import JobSpec, OutputInfo, PartInfo, Row, Span, staging_of
from tinsmith.batch.store import LocalStore, open_store


def publish_output(
    spec: JobSpec, output_idx: int, job_id: str | int, parts: Sequence[PartInfo | Mapping[str, Any]]
) -> OutputInfo:
    """Publishes one output of a job from the parts of its batches, in the order of their rows."""
    writer = registry.writer_from_dict(spec.batch_output_formats[output_idx])
    winners = [part if isinstance(part, PartInfo) else PartInfo.from_dict(part) for part in parts]
    return writer.publish(winners, staging_of(writer.path, job_id, output_idx), spec.if_exists)


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
