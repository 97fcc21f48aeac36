"""Files of results as OpenAI's Batch API has them: `{id, custom_id, response, error}`, a request a line."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith.batch.formats.encoding import encode
from tinsmith.batch.formats.protocols import PartInfo, Row, Span
from tinsmith.batch.formats.registry import OUTPUT_WRITER_REGISTRY
from tinsmith.batch.formats.writers.lines import JsonWriter

KEPT = ("all", "succeeded", "failed")


@OUTPUT_WRITER_REGISTRY.type_register(name="openai_batch")
@dataclass
class OpenAIBatchWriter(JsonWriter):
    """A row is `{custom_id, response}` or `{custom_id, error}`; a response is `{status_code, request_id, body}`.

    Two writers with `keep="succeeded"` and `keep="failed"` share the rows, as the Batch API's two files do: a request
    failed if it has an error, or a response whose status is not 200."""

    keep: str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep not in KEPT:
            raise ValueError(f"keep is {self.keep!r}; it must be one of {list(KEPT)}")

    def write_part(self, rows: Sequence[Row | None], span: Span, part_base: str) -> PartInfo:
        return super().write_part([row for row in rows if row is not None and self._keeps(row)], span, part_base)

    def _keeps(self, row: Row) -> bool:
        response = row.get("response")
        succeeded = response is not None and response.get("status_code") == 200
        return self.keep == "all" or succeeded == (self.keep == "succeeded")

    def line(self, row: Row) -> bytes:
        name = row.get("custom_id")
        if not isinstance(name, str) or (row.get("response") is None) == (row.get("error") is None):
            raise ValueError(f"a result has a custom_id and either a response or an error; this one has {sorted(row)}")
        return encode(
            {
                "id": row.get("id", line_id(name)),
                "custom_id": name,
                "response": row.get("response"),
                "error": row.get("error"),
            }
        )


def line_id(custom_id: str) -> str:
    return f"batch_req_{hashlib.sha256(custom_id.encode()).hexdigest()[:24]}"
