"""Anthropic's messages, over any base model or checkpoint: as `openai` does it, in other words."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.api.errors import anthropic_error
from tinsmith.api.openai.chat import GENERATION, MESSAGES, read_fields
from tinsmith.api.openai.generation import Prepared, give_up, prepare, sampled, seated
from tinsmith.api.openai.streaming import Events, event, follow, unless_gone
from tinsmith.api.openapi import ANYTHING, COUNT, LIST, SHORT_TEXT, TEXT, TEXTS, fields, integer
from tinsmith.api.operation import ANTHROPIC, JsonObject, Services, answer, authenticate, operation, read_body, run
from tinsmith.chat.messages import Blocks, message, read_counted, read_message, stop, usage, whole_message
from tinsmith.errors import TinsmithError
from tinsmith.store.implicit_sessions import SampleId
from tinsmith.types import SampleResult
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import Schema

COUNTED: Mapping[str, Schema] = {
    "system": {"type": ["string", "array"]},
    "tools": {"type": "array", "items": ANYTHING},
    "tool_choice": ANYTHING,
}
MESSAGE_BODY = fields(
    {"model": SHORT_TEXT, "messages": MESSAGES, "max_tokens": integer(1)},
    {**COUNTED, **GENERATION, "stop_sequences": TEXTS},
)
COUNT_BODY = fields({"model": SHORT_TEXT, "messages": MESSAGES}, COUNTED)
MESSAGE = fields({"id": TEXT, "type": TEXT, "model": TEXT, "content": LIST, "usage": ANYTHING})


@operation(
    "POST",
    "/messages",
    "An answer to a chat, or its pieces",
    body=MESSAGE_BODY,
    answer=MESSAGE,
    errors=(404, 429, 503),
    example={"model": "{model}", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    prefixes=ANTHROPIC,
)
async def messages(request: Request) -> Response:
    services, tenant_id = await authenticate(request)
    asked = await run(read_fields, services, request, await read_body(request, JSON_TYPE))
    prepared = await run(prepare, services, tenant_id, asked, read_message)
    message_id = "msg_" + secrets.token_hex(12)
    if prepared.plan.stream:
        stack = AsyncExitStack()
        seats = await stack.enter_async_context(seated(services, tenant_id, prepared, stream=True))
        return Events(_events(services, prepared, message_id, seats), stack)
    results = await unless_gone(request.receive, sampled(services, tenant_id, prepared))
    return answer(await run(whole_message, message_id, prepared.plan, prepared.text, results[0]))


@operation(
    "POST",
    "/messages/count_tokens",
    "Its prompt's tokens",
    body=COUNT_BODY,
    answer=fields({"input_tokens": COUNT}),
    example={"model": "{model}", "messages": [{"role": "user", "content": "hi"}]},
    prefixes=ANTHROPIC,
)
async def count_tokens(request: Request) -> Response:
    services, tenant_id = await authenticate(request)
    asked = await run(read_fields, services, request, await read_body(request, JSON_TYPE))
    prepared = await run(prepare, services, tenant_id, asked, read_counted)
    return answer({"input_tokens": len(prepared.plan.prompts[0])})


async def _events(
    services: Services, prepared: Prepared, message_id: str, seats: list[SampleId]
) -> AsyncGenerator[bytes, None]:
    plan = prepared.plan
    results: list[SampleResult] = []
    blocks = Blocks()
    ended: JsonObject = {}
    try:
        begun = message(message_id, plan, [], usage(plan, None, 0))
        yield event({"type": "message_start", "message": begun}, "message_start")
        async for news in follow(services, prepared, seats, results):
            if news.choice is None or news.piece is None:
                yield event({"type": "ping"}, "ping")
                continue
            for name, content in blocks.events(news.piece):
                yield event(content, name)
            if news.reason:
                length = "length" if news.reason == "length" else "stop"
                ended = stop(news.choice, news.piece.calls, length)
        for name, content in blocks.close():
            yield event(content, name)
        used = usage(plan, results[0], len(results[0].sequences[0].tokens_T))
        yield event({"type": "message_delta", "delta": ended, "usage": used}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")
    except TinsmithError as error:
        await run(give_up, services, seats)
        yield event(anthropic_error(str(error), error.status), "error")
