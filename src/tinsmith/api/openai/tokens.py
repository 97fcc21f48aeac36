"""vLLM's endpoints about tokens, at the root of the server: tokenize, detokenize, and generate from ids to ids."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.api.openai.generation import named_or_only, read, sampled, weights_of
from tinsmith.api.openai.streaming import unless_gone
from tinsmith.api.openapi import ANYTHING, COUNT, LIST, TEXT, TEXTS, fields
from tinsmith.api.operation import Call, JsonObject, answer, operation, run
from tinsmith.chat.generation_request import MAX_TOKENS, Target
from tinsmith.chat.texts import Text
from tinsmith.chat.tokens import DetokenizeRequest, GenerateRequest, TokenizeRequest, generated
from tinsmith.errors import RequestError
from tinsmith.types import ModelShape

TOKEN_IDS = {"type": "array", "items": COUNT}


@operation(
    "POST",
    "/tokenize",
    "The tokens of a text or a chat",
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
    "The text of tokens, special ones included",
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
    target = Target.of(named_or_only(call.services, name))
    shape, _ = weights_of(call.services, call.tenant_id, target)
    return shape, call.services.texts.of(shape)


@operation(
    "POST",
    "/inference/v1/generate",
    "An answer in tokens to a prompt in tokens",
    body=GenerateRequest,
    answer=fields({"request_id": TEXT, "choices": LIST, "usage": ANYTHING}),
    errors=(404, 429, 503),
    example={"model": "{model}", "token_ids": [1], "sampling_params": {"max_tokens": MAX_TOKENS}},
    prefixes=("",),
)
async def generate(request: Request) -> Response:
    services, tenant_id, prepared = await read(request, GenerateRequest)
    results = await unless_gone(request.receive, sampled(services, tenant_id, prepared))
    return answer(await run(generated, prepared.plan, prepared.text, results[0]))
