"""vLLM's token requests: `/tokenize`, `/detokenize`, and `/inference/v1/generate`, which takes and returns token ids.

The first two need a tokenizer and no engine. A chat to tokenize is validated as a chat completion, so that its ids are
the prompt of that completion. Without `model` a request uses the server's only base model.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from tinsmith.chat.chats import ChatRequest
from tinsmith.chat.choices import LOWEST_LOGPROB
from tinsmith.chat.generation_request import MAX_TOKENS, MAX_TOP_LOGPROBS, GenerationPlan, SamplingFields
from tinsmith.chat.results import finish_reason, prompt_logprobs, top_rows, usage, version_fields
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.errors import RequestError, not_supported
from tinsmith.types import SampledSequence, SampleResult
from tinsmith.wire import fields
from tinsmith.wire.fields import (
    NO_EFFECT,
    ClosedBody,
    Ignored,
    IgnoredFields,
    LongText,
    Position,
    Supported,
    refuse,
    validate,
)

JsonObject = dict[str, object]
Model = Annotated[fields.Text | None, Field(description="required if the server has several base models")]

CHAT_FIELDS = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class TokenizeRequest(ClosedBody):
    """A text or a chat. `add_special_tokens` is true by default for a text and false for a chat."""

    ignores_zero = False

    model: Model = None
    prompt: LongText | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    chat_template: Annotated[Ignored, refuse("the model's own is used; render yours and send prompt")] = None

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt", "send either prompt or messages")
        for name in CHAT_FIELDS:
            if self.prompt is not None and getattr(self, name):
                raise RequestError(name, f"{name} cannot be combined with prompt; send messages")
        return self

    def token_ids(self, tokenizer: ModelTokenizer, ignored: IgnoredFields | None = None) -> Sequence[int]:
        """Return the token ids of the text or the chat. Raises RequestError."""
        if self.prompt is not None:
            return tokenizer.encode(self.prompt, special=self.add_special_tokens is not False)
        chat_fields = {name: getattr(self, name) for name in (*CHAT_FIELDS, "add_special_tokens")}
        return validate(ChatRequest, {"model": "", **chat_fields}, ignored).plan(tokenizer).prompts[0]


class DetokenizeRequest(ClosedBody):
    ignores_zero = False

    model: Model = None
    tokens: list[Position]


class GenerateParams(SamplingFields):
    """vLLM's SamplingParams as JSON."""

    max_tokens: (
        Annotated[int, Field(ge=1, le=MAX_TOKENS, description="without it, to the end of the context")] | None
    ) = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    detokenize: Ignored = None  # the response has no text, so skip_special_tokens has no effect
    routed_experts_prompt_start: Ignored = None  # and no routed experts


class GenerateRequest(ClosedBody):
    ignores_zero = False

    token_ids: Annotated[list[Position], Field(min_length=1)]
    sampling_params: GenerateParams = Field(default_factory=lambda: validate(GenerateParams, {}))
    model: Model = None
    request_id: fields.Text | None = None
    stream: Annotated[bool, Supported((False,), "the response is sent whole; use /v1/completions for a stream")] = False
    features: Annotated[Ignored, refuse("images go to /v1/chat/completions")] = None
    cache_salt: Annotated[Ignored, NO_EFFECT] = None
    priority: Annotated[Ignored, NO_EFFECT] = None

    def plan(self, tokenizer: ModelTokenizer) -> GenerationPlan:
        """Plan the sampling and the response. Raises RequestError."""
        params = self.sampling_params
        if params.include_stop_str_in_output:
            raise not_supported("sampling_params.include_stop_str_in_output", "the response has no text")
        return GenerationPlan(
            name=self.model or "",
            prompts=(params.truncate_prompt(self.token_ids),),
            num_choices=params.n,
            params=params.params(tokenizer, params.max_tokens, params.structure),
            top_logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            token_ids=True,
            prompt_field="token_ids",
            answer_id=self.request_id,
        )


def build_generate_response(plan: GenerationPlan, tokenizer: ModelTokenizer, result: SampleResult) -> JsonObject:
    """Make the response to a GenerateRequest: token ids, each with its logprob."""
    prompt_rows = None
    if plan.prompt_logprobs is not None:
        prompt_rows = prompt_logprobs(tokenizer, plan.prompts[0], result, plan.prompt_logprobs)
    choices = [
        {
            "index": index,
            "token_ids": sequence.tokens_T.tolist(),
            "finish_reason": finish_reason(plan, 0, sequence.stop_reason),
            "logprobs": None if plan.top_logprobs is None else {"content": _logprobs(sequence)},
        }
        for index, sequence in enumerate(result.sequences)
    ]
    return {
        "request_id": plan.answer_id or secrets.token_hex(16),
        "prompt_token_ids": list(plan.prompts[0]),
        "choices": choices,
        "prompt_logprobs": prompt_rows,
        "usage": usage(plan, [result]),
    } | version_fields(result.weight_version)


def _logprobs(sequence: SampledSequence) -> list[JsonObject]:
    rows = zip(sequence.tokens_T.tolist(), sequence.logprobs_T.tolist(), top_rows(sequence), strict=True)
    return [
        _token(token_id, logprob) | {"top_logprobs": [_token(*pair) for pair in zip(*top, strict=True)]}
        for token_id, logprob, top in rows
    ]


def _token(token_id: int, logprob: float) -> JsonObject:
    return {"token": f"token_id:{token_id}", "logprob": max(logprob, LOWEST_LOGPROB)}
