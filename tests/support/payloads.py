"""Functions as payloads of bulk jobs, and the spans that a job's input is split into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinsmith.batch.client.functions import Mapper, describe_function, mapper_of
from tinsmith.batch.types import JobSpec, pack_payload, unpack_payload
from tinsmith.batch.worker import io_operations


def serialize_function(function: Callable[..., object], **options: Any) -> str:  # noqa: ANN401
    return pack_payload(describe_function(function, **options))


def load_mapper(payload: str) -> Mapper:
    return mapper_of(unpack_payload(payload))


def spans_of(spec: JobSpec) -> list[tuple[int, int]]:
    """What a worker's plan says: the spans themselves, or their size and the number of rows."""
    *pages, last = io_operations.plan(spec, 1)
    end = last["end"]
    total, size = end["total_rows"], end.get("batch_size", 0)
    if size:
        return [(start, min(start + size, total) - 1) for start in range(0, total, size)]
    return [tuple(span) for page in pages for span in page["spans"]]
