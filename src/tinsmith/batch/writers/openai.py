"""Files of results as OpenAI's Batch API has them: `{id, custom_id, response, error}`, a request a line."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tinsmith.batch.encoding import encode
from tinsmith.batch.protocols import Row
from tinsmith.batch.registry import OUTPUT_WRITER_REGISTRY
from tinsmith.batch.writers.lines import JsonWriter


@OUTPUT_WRITER_REGISTRY.type_register(name="openai_batch")
@dataclass
class OpenAIBatchWriter(JsonWriter):
    """A row is `{custom_id, response}` or `{custom_id, error}`; a response is `{status_code, request_id, body}`."""

    def line(self, row: Row) -> bytes:
        name = row.get("custom_id")
        if not isinstance(name, str) or (row.get("response") is None) == (row.get("error") is None):
            raise ValueError(f"a result has a custom_id and either a response or an error; this one has {sorted(row)}")
        made = f"batch_req_{hashlib.sha256(name.encode()).hexdigest()[:24]}"
        return encode(
            {
                "id": row.get("id", made),
                "custom_id": name,
                "response": row.get("response"),
                "error": row.get("error"),
            }
        )
