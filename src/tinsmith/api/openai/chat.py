"""OpenAI's chat completions and completions, over any base model or checkpoint.

`chat` has the words, `generation` the sampling, `streams` the pieces. An answer that is not a stream is waited for on
the request's connection, however long it takes; when that ends, so do the samples.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinsmith.api.errors import openai_error
from tinsmith.api.openai.generation import Prepared, give_up, new_head, prepare, reader_of, sampled, seated
from tinsmith.api.openai.streaming import DONE, STILL_THERE, Events, event, follow, unless_gone
from tinsmith.api.operation import OPENAI, Call, Endpoint, JsonObject, Services, authenticate, endpoint, read_body, run
from tinsmith.chat.choices import Piece
from tinsmith.chat.refusals import not_supported
from tinsmith.chat.results import Head, opening, piece_chunk, usage_chunk, whole
from tinsmith.errors import TinsmithError
from tinsmith.store.implicit_sessions import Seat
from tinsmith.types import SampleResult
from tinsmith.wire import bodies
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import Fields, read_object


def generate(chat: bool) -> Endpoint:
    async def respond(request: Request) -> Response:
        services, tenant_id = await authenticate(request)
        fields = await run(read_fields, services, request, await read_body(request, JSON_TYPE))
        prepared = await run(prepare, services, tenant_id, fields, reader_of(chat))
        head = new_head(prepared.plan, chat=chat)
        if prepared.plan.stream:
            return await _stream(services, tenant_id, prepared, head)
        results = await unless_gone(request.receive, sampled(services, tenant_id, prepared))
        return Response(await run(_whole, prepared, head, results), media_type=JSON_TYPE)

    return respond


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


async def _events(services: Services, prepared: Prepared, head: Head, seats: list[Seat]) -> AsyncGenerator[bytes, None]:
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


def embeddings(_call: Call) -> JsonObject:
    raise not_supported("/embeddings", "models here write text and embed none")


ROUTES = [
    Route("/chat/completions", generate(chat=True), methods=["POST"]),
    Route("/completions", generate(chat=False), methods=["POST"]),
    Route("/embeddings", endpoint(embeddings, JSON_TYPE), methods=["POST"]),
]
ROOT_ROUTES = [
    Route(prefix + route.path, route.endpoint, methods=route.methods) for prefix in OPENAI for route in ROUTES
]
