"""`/completions`: a request -> a plan. A prompt is text, or token ids as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from tinsmith.chat.generation_request import MAX_TOKENS, MAX_TOP_LOGPROBS, GenerationRequest, Plan
from tinsmith.chat.texts import Text
from tinsmith.errors import RequestError, not_supported
from tinsmith.wire.fields import Integer, Unread, refused, show, wrong

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16  # OpenAI's


def _prompts(prompt: object) -> list[object]:
    if isinstance(prompt, str) or _is_ids(prompt):
        return [prompt]
    if not isinstance(prompt, list) or not 0 < len(prompt) <= MAX_PROMPTS:
        raise wrong(f"is {show(prompt)}; it must be a text, token ids, or a list of 1 to {MAX_PROMPTS} of either")
    return prompt


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and len(prompt) > 0 and all(type(one) is int and 0 <= one < 2**31 for one in prompt)


class CompletionRequest(GenerationRequest):
    prompt: Annotated[Any, AfterValidator(_prompts), WithJsonSchema({"type": ["string", "array"]})]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS, description="0 only with echo")] = DEFAULT_MAX_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    best_of: Integer | None = None
    add_special_tokens: bool = True
    suffix: Annotated[Unread, refused("models here continue a text and do not fill one in")] = None

    @model_validator(mode="after")
    def _check_limits(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise not_supported("best_of", "every answer is returned; ask for n and choose")
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens", f"max_tokens is 0; it must lie between 1 and {MAX_TOKENS} (0 with echo)")
        if self.echo and self.stream:
            raise not_supported("echo", "together with stream")
        if len(self.prompt) * self.n > MAX_PROMPTS:
            raise RequestError("n", f"{len(self.prompt)} prompts with n={self.n} answers are more than {MAX_PROMPTS}")
        return self

    def plan(self, text: Text) -> Plan:
        """Raises RequestError."""
        echo_only = self.echo and self.max_tokens == 0
        special = self.add_special_tokens
        return Plan(
            name=self.model,
            prompts=tuple(_prompt(one, f"prompt[{index}]", text, special) for index, one in enumerate(self.prompt)),
            num_choices=self.n,
            params=self.params(1 if echo_only else self.max_tokens, self.asked_grammar),
            top_logprobs=self.logprobs,
            echo=self.echo,
            echo_only=echo_only,
            stream=self.stream,
            include_usage=self.include_usage,
            prompt_field="prompt",
        )


def _prompt(prompt: object, where: str, text: Text, special: bool) -> Sequence[int]:
    if isinstance(prompt, str):
        found = text.encode(prompt, special=special)
        if not found:
            raise RequestError("prompt", f"{where} has no token; it must have at least one")
        return found
    if isinstance(prompt, list) and _is_ids(prompt):
        return prompt
    raise RequestError("prompt", f"{where} is {show(prompt)}; it must be a text or a list of token ids")
