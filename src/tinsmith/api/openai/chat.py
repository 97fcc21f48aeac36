"""OpenAI's chat completions and completions, over any base model or checkpoint.

`chat` has the words, `generation` the sampling, `streams` the pieces. An answer that is not a stream is waited for on
the request's connection, however long it takes; when that ends, so do the samples.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tinsmith.api.errors import openai_error
from tinsmith.api.openai.generation import Prepared, give_up, new_head, prepare, reader_of, sampled, seated
from tinsmith.api.openai.streaming import DONE, STILL_THERE, Events, event, follow, unless_gone
from tinsmith.api.openapi import ANYTHING, FLAG, LIST, NUMBER, SHORT_TEXT, TEXT, TEXTS, fields, integer
from tinsmith.api.operation import OPENAI, Access, Call, JsonObject, Services, authenticate, operation, read_body, run
from tinsmith.chat.choices import Piece
from tinsmith.chat.refusals import not_supported
from tinsmith.chat.results import Head, opening, piece_chunk, usage_chunk, whole
from tinsmith.errors import TinsmithError
from tinsmith.store.implicit_sessions import SampleId
from tinsmith.types import SampleResult
from tinsmith.wire import bodies
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import Fields, Schema, read_object

# What these clients send and this server honours; docs/openai.md says what it makes of it.
GENERATION: Mapping[str, Schema] = {
    "max_tokens": integer(0),
    "temperature": {"type": "number", "minimum": 0},
    "top_p": NUMBER,
    "top_k": integer(-1),
    "stream": FLAG,
}
OPENAI_GENERATION: Mapping[str, Schema] = {
    **GENERATION,
    "n": integer(1, 128),
    "seed": {"type": "integer"},
    "stop": {"anyOf": [{"type": "string"}, TEXTS]},
    "frequency_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "min_p": NUMBER,
    "logit_bias": {"type": "object", "additionalProperties": NUMBER},
    "response_format": ANYTHING,
    "stream_options": ANYTHING,
}
MESSAGES: Schema = {"type": "array", "items": ANYTHING, "minItems": 1}
CHAT = fields(
    {"model": SHORT_TEXT, "messages": MESSAGES},
    {
        **OPENAI_GENERATION,
        "max_completion_tokens": integer(1),
        "logprobs": FLAG,
        "top_logprobs": integer(0, 20),
        "tools": {"type": "array", "items": ANYTHING},
        "tool_choice": {"type": ["string", "object"]},
        "parallel_tool_calls": FLAG,
    },
)
COMPLETION = fields(
    {"model": SHORT_TEXT, "prompt": {"type": ["string", "array"]}},
    {**OPENAI_GENERATION, "logprobs": integer(0, 20), "echo": FLAG},
)
ANSWER = fields({"id": TEXT, "object": TEXT, "model": TEXT, "choices": LIST, "usage": ANYTHING})


@operation(
    "POST",
    "/chat/completions",
    "An answer to a chat, or its pieces",
    body=CHAT,
    answer=ANSWER,
    errors=(404, 429, 503),
    example={"model": "{model}", "messages": [{"role": "user", "content": "hi"}]},
    prefixes=OPENAI,
)
async def chat_completions(request: Request) -> Response:
    return await _generated(request, chat=True)


@operation(
    "POST",
    "/completions",
    "A text continued, or its pieces",
    body=COMPLETION,
    answer=ANSWER,
    errors=(404, 429, 503),
    example={"model": "{model}", "prompt": "hi"},
    prefixes=OPENAI,
)
async def completions(request: Request) -> Response:
    return await _generated(request, chat=False)


async def _generated(request: Request, *, chat: bool) -> Response:
    services, tenant_id = await authenticate(request)
    asked = await run(read_fields, services, request, await read_body(request, JSON_TYPE))
    prepared = await run(prepare, services, tenant_id, asked, reader_of(chat))
    head = new_head(prepared.plan, chat=chat)
    if prepared.plan.stream:
        return await _stream(services, tenant_id, prepared, head)
    results = await unless_gone(request.receive, sampled(services, tenant_id, prepared))
    return Response(await run(_whole, prepared, head, results), media_type=JSON_TYPE)


def read_fields(services: Services, request: Request, body: bytes) -> Fields:
    encoding = request.headers.get("content-encoding")
    return read_object(bodies.decode(body, encoding, services.settings.max_body_bytes))


def _whole(prepared: Prepared, head: Head, results: list[SampleResult]) -> bytes:
    return orjson.dumps(whole(prepared.plan, prepared.text, head, results))


async def _stream(services: Services, tenant_id: str, prepared: Prepared, head: Head) -> Response:
    """What can be refused is refused before the stream begins, with a status of its own."""
    stack = AsyncExitStack()
    seats = await stack.enter_async_context(seated(services, tenant_id, prepared, stream=True))
    return Events(_events(services, prepared, head, seats), stack)


async def _events(
    services: Services, prepared: Prepared, head: Head, seats: list[SampleId]
) -> AsyncGenerator[bytes, None]:
    plan, text = prepared.plan, prepared.text
    results: list[SampleResult] = []
    try:
        for index in range(len(seats) * plan.num_choices):
            if first := opening(plan, head, index):
                yield event(first)
        async for news in follow(services, prepared, seats, results):
            if news.choice is None or news.piece is None:
                yield STILL_THERE
                continue
            if news.piece or (news.piece.tokens and plan.top_logprobs is not None):
                yield event(piece_chunk(plan, text, head, news.choice.index, news.piece, None))
            if news.reason:
                yield event(piece_chunk(plan, text, head, news.choice.index, Piece(), news.reason))
        if plan.include_usage:
            yield event(usage_chunk(plan, head, results))
        yield DONE
    except TinsmithError as error:
        await run(give_up, services, seats)
        yield event({"error": openai_error(str(error), error.status, error)})


@operation(
    "POST",
    "/embeddings",
    "Refused: there are none",
    body=ANYTHING,
    answer=ANYTHING,
    access=Access.NOTHING,
    prefixes=OPENAI,
)
def embeddings(_call: Call) -> JsonObject:
    raise not_supported("/embeddings", "models here write text and embed none")
