"""Functions as payloads of bulk jobs, and the spans that a job's input is split into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinsmith.batch.client.functions import Mapper, described, mapper_of
from tinsmith.batch.types import JobSpec, packed, unpacked
from tinsmith.batch.worker import utility


def serialize_function(function: Callable[..., object], **options: Any) -> str:  # noqa: ANN401
    return packed(described(function, **options))


def load_mapper(payload: str) -> Mapper:
    return mapper_of(unpacked(payload))


def spans_of(spec: JobSpec) -> list[tuple[int, int]]:
    """The spans of a plan, which lists them or gives their size and the number of rows."""
    *pages, last = utility.plan(spec)
    end = last["end"]
    total, size = end["total_rows"], end.get("batch_size", 0)
    if size:
        return [(start, min(start + size, total) - 1) for start in range(0, total, size)]
    return [tuple(span) for page in pages for span in page["spans"]]
