"""OpenAI's chat completions and completions and Anthropic's messages for any base model or checkpoint, and vLLM's
token endpoints.

`tinsmith.chat` translates requests and results, `generation` samples, and `streaming` sends the response.
"""

from __future__ import annotations

from starlette.responses import Response

from tinsmith.api.access import Access
from tinsmith.api.declaration import operation
from tinsmith.api.event_stream import cancel_on_disconnect
from tinsmith.api.openai.generation import read_request, sample_all
from tinsmith.api.openai.streaming import respond
from tinsmith.api.openai.weights import find_weights, resolve_model_name
from tinsmith.api.openapi import ANYTHING, COUNT, GENERATION, LIST, TEXT, TEXTS, fields, for_anthropic, for_openai
from tinsmith.api.request import Call, JsonObject, json_response, run
from tinsmith.chat.chats import ChatRequest, CompletionRequest
from tinsmith.chat.generation_request import MAX_TOKENS, ModelTarget
from tinsmith.chat.messages import CountRequest, MessageAnswer, MessageRequest
from tinsmith.chat.results import ChatAnswer, CompletionAnswer
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.chat.tokens import DetokenizeRequest, GenerateRequest, TokenizeRequest, build_generate_response
from tinsmith.errors import RequestError, not_supported
from tinsmith.types import ModelShape

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
async def chat_completions(call: Call) -> Response:
    prepared = await read_request(call, ChatRequest)
    return await respond(call.request, prepared, ChatAnswer(prepared.plan, prepared.tokenizer))


@for_openai(
    "POST",
    "/completions",
    "Create a completion, whole or streamed",
    body=CompletionRequest,
    answer=ANSWER,
    example={"model": "{model}", "prompt": "hi"},
    errors=GENERATION,
)
async def completions(call: Call) -> Response:
    prepared = await read_request(call, CompletionRequest)
    return await respond(call.request, prepared, CompletionAnswer(prepared.plan, prepared.tokenizer))


# Anthropic's messages.

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
async def messages(call: Call) -> Response:
    prepared = await read_request(call, MessageRequest)
    return await respond(call.request, prepared, MessageAnswer(prepared.plan, prepared.tokenizer))


@for_anthropic(
    "POST",
    "/messages/count_tokens",
    "Count the prompt's tokens",
    body=CountRequest,
    answer=fields({"input_tokens": COUNT}),
    example={"model": "{model}", "messages": [{"role": "user", "content": "hi"}]},
)
async def count_tokens(call: Call) -> Response:
    prepared = await read_request(call, CountRequest)
    return json_response({"input_tokens": len(prepared.plan.prompts[0])}, headers=prepared.headers)


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
    shape, tokenizer = _model(call, request.model)
    token_ids = request.token_ids(tokenizer, call.ignored)
    return {
        "count": len(token_ids),
        "max_model_len": shape.max_context_length,
        "tokens": list(token_ids),
        "token_strs": [tokenizer.backend_tokenizer.id_to_token(token_id) for token_id in token_ids]
        if request.return_token_strs
        else None,
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
    shape, tokenizer = _model(call, request.model)
    if (largest := max(request.tokens, default=0)) >= shape.vocab_size:
        raise RequestError("tokens", f"tokens has {largest}; ids of this model lie below {shape.vocab_size}")
    return {"prompt": tokenizer.decode(request.tokens, special=True)}


def _model(call: Call, name: str | None) -> tuple[ModelShape, ModelTokenizer]:
    target = ModelTarget.of(resolve_model_name(call.services, name))
    shape = find_weights(call.services, call.tenant_id, target).shape
    return shape, call.services.tokenizers.get(shape)


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
async def generate(call: Call) -> Response:
    prepared = await read_request(call, GenerateRequest)
    results = await cancel_on_disconnect(call.request.receive, sample_all(prepared))
    content = await run(build_generate_response, prepared.plan, prepared.tokenizer, results[0])
    return json_response(content, headers=prepared.headers)
