"""The calls of a conversation's history, in the form that the model's chat template accepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinsmith.chat.dialects.dialect import ToolDialect
from tinsmith.chat.tokenizer import Message


def write_call_ids(dialect: ToolDialect, messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the ids of calls in the dialect's form, also in the results that refer to them."""
    if dialect.write_id is None:
        return list(messages)
    written: list[Message] = []
    id_by_client_id: dict[str, str] = {}
    num_calls = 0
    for message in messages:
        calls: Any = message.get("tool_calls")
        if calls:
            new_calls: list[dict[str, object]] = []
            for call in calls:
                client_id = str(call.get("id") or f"call_{num_calls}")
                call_id = dialect.write_id(client_id, str(call["function"]["name"]), num_calls)
                id_by_client_id[client_id] = call_id
                new_calls.append({**call, "id": call_id})
                num_calls += 1
            message = {**message, "tool_calls": new_calls}
        elif (result_id := message.get("tool_call_id")) in id_by_client_id:
            message = {**message, "tool_call_id": id_by_client_id[str(result_id)]}
        written.append(message)
    return written
