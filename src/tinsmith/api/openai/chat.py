"""OpenAI's chat completions and completions for any base model or checkpoint, and vLLM's token endpoints.

`tinsmith.chat` translates requests, `generation` samples, and `streaming` sends chunks. A request without `stream`
holds its connection until the response; a disconnect cancels the samples.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tinsmith.api.errors import openai_error
from tinsmith.api.openai.generation import (
    Prepared,
    cancel_samples,
    named_or_only,
    new_head,
    read,
    sample_all,
    submitted_samples,
    weights_of,
)
from tinsmith.api.openai.streaming import DONE, STILL_THERE, Events, cancel_on_disconnect, event, follow
from tinsmith.api.openapi import ANYTHING, COUNT, GENERATION, LIST, TEXT, TEXTS, fields, for_openai
from tinsmith.api.operation import Access, Call, JsonObject, Services, answer, operation, run
from tinsmith.chat.chats import ChatRequest, CompletionRequest
from tinsmith.chat.choices import TextPiece
from tinsmith.chat.generation_request import MAX_TOKENS, ModelTarget
from tinsmith.chat.results import AnswerHead, opening, piece_chunk, usage_chunk, whole
from tinsmith.chat.texts import Text
from tinsmith.chat.tokens import DetokenizeRequest, GenerateRequest, TokenizeRequest, generated
from tinsmith.errors import RequestError, TinsmithError, not_supported
from tinsmith.store.implicit_sessions import SampleId
from tinsmith.types import ModelShape, SampleResult
from tinsmith.wire.bodies import JSON_TYPE

ANSWER = fields({"id": TEXT, "object": TEXT, "model": TEXT, "choices": LIST, "usage": ANYTHING})


@for_openai(
    "POST",
    "/chat/completions",
    "Create a chat completion, whole or streamed",
    body=ChatRequest,
    answer=ANSWER,
    example={"model": "{model}", "messages": [{"role": "user", "content": "hi"}]},
    errors=GENERATION,
)
async def chat_completions(request: Request) -> Response:
    return await _generated(request, chat=True)


@for_openai(
    "POST",
    "/completions",
    "Create a completion, whole or streamed",
    body=CompletionRequest,
    answer=ANSWER,
    example={"model": "{model}", "prompt": "hi"},
    errors=GENERATION,
)
async def completions(request: Request) -> Response:
    return await _generated(request, chat=False)


async def _generated(request: Request, *, chat: bool) -> Response:
    services, tenant_id, prepared = await read(request, ChatRequest if chat else CompletionRequest)
    head = new_head(prepared.plan, chat=chat)
    if prepared.plan.stream:  # refuse invalid requests before the stream begins, while a status can still be sent
        stack = AsyncExitStack()
        seats = await stack.enter_async_context(submitted_samples(services, tenant_id, prepared, stream=True))
        return Events(_events(services, prepared, head, seats), stack)
    results = await cancel_on_disconnect(request.receive, sample_all(services, tenant_id, prepared))
    return Response(await run(_whole, prepared, head, results), media_type=JSON_TYPE)


def _whole(prepared: Prepared, head: AnswerHead, results: list[SampleResult]) -> bytes:
    return orjson.dumps(whole(prepared.plan, prepared.text, head, results))


async def _events(
    services: Services, prepared: Prepared, head: AnswerHead, seats: list[SampleId]
) -> AsyncGenerator[bytes, None]:
    plan, text = prepared.plan, prepared.text
    results: list[SampleResult] = []
    reasoning = 0
    try:
        for index in range(len(seats) * plan.num_choices):
            if first := opening(plan, head, index):
                yield event(first)
        async for news in follow(services, prepared, seats, results):
            if news.choice is None or news.piece is None:
                yield STILL_THERE
                continue
            if news.piece or news.piece.sampled or (news.piece.tokens and plan.top_logprobs is not None):
                yield event(piece_chunk(plan, text, head, news.choice.index, news.piece, None))
            if news.reason:
                reasoning += news.choice.reasoning_tokens
                yield event(piece_chunk(plan, text, head, news.choice.index, TextPiece(), news.reason))
        if plan.include_usage:
            yield event(usage_chunk(plan, head, results, reasoning))
        yield DONE
    except TinsmithError as error:
        await run(cancel_samples, services, seats)
        yield event({"error": openai_error(str(error), error.status, error)})


@for_openai(
    "POST",
    "/embeddings",
    "Refused: embeddings are not supported",
    body=ANYTHING,
    answer=ANYTHING,
    access=Access.NOTHING,
)
def embeddings(_call: Call) -> JsonObject:
    raise not_supported("/embeddings", "this server's models generate text")


# vLLM's endpoints, at the root of the server.

TOKEN_IDS = {"type": "array", "items": COUNT}


@operation(
    "POST",
    "/tokenize",
    "Tokenize a text or a chat",
    body=TokenizeRequest,
    answer=fields({"count": COUNT, "max_model_len": COUNT, "tokens": TOKEN_IDS}, {"token_strs": TEXTS}),
    example={"model": "{model}", "prompt": "hi"},
    prefixes=("",),
)
def tokenize(call: Call, request: TokenizeRequest) -> JsonObject:
    shape, text = _model(call, request.model)
    token_ids = request.token_ids(text)
    return {
        "count": len(token_ids),
        "max_model_len": shape.max_context_length,
        "tokens": list(token_ids),
        "token_strs": [text.tokenizer.id_to_token(each) for each in token_ids] if request.return_token_strs else None,
    }


@operation(
    "POST",
    "/detokenize",
    "Decode tokens, including special tokens",
    body=DetokenizeRequest,
    answer=fields({"prompt": TEXT}),
    example={"model": "{model}", "tokens": [1]},
    prefixes=("",),
)
def detokenize(call: Call, request: DetokenizeRequest) -> JsonObject:
    shape, text = _model(call, request.model)
    if (largest := max(request.tokens, default=0)) >= shape.vocab_size:
        raise RequestError("tokens", f"tokens has {largest}; ids of this model lie below {shape.vocab_size}")
    return {"prompt": text.decode(request.tokens, special=True)}


def _model(call: Call, name: str | None) -> tuple[ModelShape, Text]:
    target = ModelTarget.of(named_or_only(call.services, name))
    shape, _ = weights_of(call.services, call.tenant_id, target)
    return shape, call.services.texts.of(shape)


@operation(
    "POST",
    "/inference/v1/generate",
    "Generate tokens from a prompt of tokens",
    body=GenerateRequest,
    answer=fields({"request_id": TEXT, "choices": LIST, "usage": ANYTHING}),
    errors=(404, 429, 503),
    example={"model": "{model}", "token_ids": [1], "sampling_params": {"max_tokens": MAX_TOKENS}},
    prefixes=("",),
)
async def generate(request: Request) -> Response:
    services, tenant_id, prepared = await read(request, GenerateRequest)
    results = await cancel_on_disconnect(request.receive, sample_all(services, tenant_id, prepared))
    return answer(await run(generated, prepared.plan, prepared.text, results[0]))
