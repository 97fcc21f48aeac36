"""Anthropic's messages endpoint, for any base model or checkpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.api.errors import anthropic_error
from tinsmith.api.openai.generation import Prepared, cancel_samples, new_message_id, read, sample_all, submitted_samples
from tinsmith.api.openai.streaming import Events, cancel_on_disconnect, event, follow
from tinsmith.api.openapi import ANYTHING, COUNT, GENERATION, LIST, TEXT, fields, for_anthropic
from tinsmith.api.operation import JsonObject, Services, answer, run
from tinsmith.chat.messages import Blocks, CountRequest, MessageRequest, message, stop, usage, whole_message
from tinsmith.errors import TinsmithError
from tinsmith.store.implicit_sessions import SampleId
from tinsmith.types import SampleResult

MESSAGE = fields({"id": TEXT, "type": TEXT, "model": TEXT, "content": LIST, "usage": ANYTHING})


@for_anthropic(
    "POST",
    "/messages",
    "Create a message, whole or streamed",
    body=MessageRequest,
    answer=MESSAGE,
    errors=GENERATION,
    example={"model": "{model}", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
)
async def messages(request: Request) -> Response:
    services, tenant_id, prepared = await read(request, MessageRequest)
    message_id = new_message_id()
    if prepared.plan.stream:
        stack = AsyncExitStack()
        seats = await stack.enter_async_context(submitted_samples(services, tenant_id, prepared, stream=True))
        return Events(_events(services, prepared, message_id, seats), stack)
    results = await cancel_on_disconnect(request.receive, sample_all(services, tenant_id, prepared))
    return answer(await run(whole_message, message_id, prepared.plan, prepared.text, results[0]))


@for_anthropic(
    "POST",
    "/messages/count_tokens",
    "Count the prompt's tokens",
    body=CountRequest,
    answer=fields({"input_tokens": COUNT}),
    example={"model": "{model}", "messages": [{"role": "user", "content": "hi"}]},
)
async def count_tokens(request: Request) -> Response:
    _, _, prepared = await read(request, CountRequest)
    return answer({"input_tokens": len(prepared.plan.prompts[0])})


async def _events(
    services: Services, prepared: Prepared, message_id: str, seats: list[SampleId]
) -> AsyncGenerator[bytes, None]:
    plan = prepared.plan
    results: list[SampleResult] = []
    blocks = Blocks()
    ended: JsonObject = {}
    reasoning = 0
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
                reasoning = news.choice.reasoning_tokens
                ended = stop(news.choice, news.piece.calls, length)
        for name, content in blocks.close():
            yield event(content, name)
        used = usage(plan, results[0], len(results[0].sequences[0].tokens_T), reasoning)
        yield event({"type": "message_delta", "delta": ended, "usage": used}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")
    except TinsmithError as error:
        await run(cancel_samples, services, seats)
        yield event(anthropic_error(str(error), error.status), "error")
