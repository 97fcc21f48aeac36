"""`OpenAIRequest`: answers rows that are lines of OpenAI's batch files, `{custom_id, method, url, body}`.

A row becomes `{custom_id, response: {status_code, request_id, body}}`, whatever the status: a request that is refused
is a result, too. `OpenAIBatchWriter` takes such rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinsmith.batch.operations import OPERATION_REGISTRY
from tinsmith.batch.operations.base import Operation, RowService, column_of
from tinsmith.batch.types import Row

VERB = "openai_request"


@OPERATION_REGISTRY.type_register(name=VERB)
@dataclass(frozen=True)
class OpenAIRequest(Operation):
    name: ClassVar[str] = VERB

    async def answer(self, row: Row, service: RowService) -> Row:
        custom_id = column_of(row, "custom_id")
        response = await service.ask(VERB, {"url": column_of(row, "url"), "body": column_of(row, "body")})
        usage = response["body"].get("usage") or {}
        service.count(int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0)))
        return {"custom_id": custom_id, "response": response}
