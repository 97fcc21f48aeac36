"""Anthropic's messages endpoint, for any base model or checkpoint."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.api.openai.generation import read
from tinsmith.api.openai.streaming import respond
from tinsmith.api.openapi import ANYTHING, COUNT, GENERATION, LIST, TEXT, fields, for_anthropic
from tinsmith.api.operation import answer
from tinsmith.chat.messages import CountRequest, MessageAnswer, MessageRequest

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
    return await respond(request, services, tenant_id, prepared, MessageAnswer(prepared.plan, prepared.text))


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
