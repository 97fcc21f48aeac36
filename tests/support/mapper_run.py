"""A bulk job's mapper in this process: `MapperRun`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.payloads import serialize_function, spans_of
from tinsmith import batch
from tinsmith.batch.client.dataset import Dataset
from tinsmith.batch.formats.lines import ItemsReader
from tinsmith.batch.formats.registry import OutputWriter
from tinsmith.batch.types import Assignment, AttemptOutcome, JobSpec, Limits, part_base
from tinsmith.batch.worker import io_operations, runtime

Rows = list[dict[str, Any]]
ROWS: Rows = [{"n": index} for index in range(10)]
JOB_FIELDS = ("rows_mode", "batch_size", "retry_on", "limits", "max_concurrent_batches")


class MapperRun:
    """A job run in this process: its reports and output rows, and the `order` in which its batches ended."""

    def __init__(
        self,
        tmp_path: Path,
        function: Callable[..., object] | Dataset,
        *,
        rows: Rows | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        writers: list[OutputWriter] = options.pop("writers", None) or [batch.JsonWriter(f"{tmp_path}/o.jsonl")]
        fields = {
            name: options.pop(name)
            for name in ("rows_mode", "batch_size", "retry_on", "limits", "max_concurrent_batches")
            if name in options
        }
        chain = isinstance(function, Dataset)
        if chain:
            fields["rows_mode"], function._forgotten = function._spec(writers).rows, False
        self.spec = JobSpec(
            batch_serialized_fn=function._payload() if chain else serialize_function(function, **options),
            batch_input_format=ItemsReader(items=ROWS if rows is None else rows).to_dict(),
            batch_output_formats=[writer.to_dict() for writer in writers],
            batch_size=fields.get("batch_size", 3),
            rows=fields.get("rows_mode", "one"),
            retry_on=fields.get("retry_on"),
            limits=Limits(**fields.get("limits", {})),
            max_concurrent_batches=fields.get("max_concurrent_batches", 8),
        )
        self.outcomes: list[AttemptOutcome] = []
        bases = [part_base(writer.path, 1, index, 0) for index, writer in enumerate(writers)]
        assignments = [Assignment(index, *span, 0, tuple(bases)) for index, span in enumerate(spans_of(self.spec))]
        runtime.run(self.spec, assignments, self.outcomes.extend)
        self.order = [outcome.batch_idx for outcome in self.outcomes]
        self.outcomes.sort(key=lambda outcome: outcome.batch_idx)
        assert [outcome.batch_idx for outcome in self.outcomes] == list(range(len(assignments)))

    def output(self, index: int = 0) -> Rows:
        parts = [outcome.parts[index] for outcome in self.outcomes if not outcome.error]
        path = io_operations.publish_output(self.spec, index, 1, parts).path
        reader = batch.JsonReader(path)
        return reader.download_batch(0, len(reader) - 1, "") if len(reader) else []

    @property
    def failed_rows(self) -> dict[int, str]:
        return {failure.idx: failure.error_type for outcome in self.outcomes for failure in outcome.row_failures}
