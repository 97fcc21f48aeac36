"""`/completions`: a request's JSON -> a plan. A prompt is text, or token ids as they are."""

from __future__ import annotations

from collections.abc import Sequence

from tinsmith.chat.generation_request import (
    MAX_CHOICES,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    SHARED,
    Plan,
    read_count,
    read_params,
    read_response_format,
    read_stream,
)
from tinsmith.chat.refusals import RequestError, not_supported, refuse_unknown
from tinsmith.chat.texts import Text
from tinsmith.wire.fields import Fields, show

KNOWN = SHARED | frozenset(
    ["prompt", "model", "max_tokens", "logprobs", "echo", "best_of", "response_format", "add_special_tokens"]
)
REASONS = {"suffix": "models here continue a text and do not fill one in"}
MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16  # OpenAI's


def read_completion(fields: Fields, text: Text) -> Plan:
    refuse_unknown(fields, KNOWN, REASONS)
    num_choices = read_count(fields, "n", 1, MAX_CHOICES, 1)
    if fields.integer_or("best_of", num_choices) != num_choices:
        raise not_supported("best_of", "every answer is returned; ask for n and choose")
    echo = fields.flag_or("echo", False)
    max_tokens = read_count(fields, "max_tokens", 0 if echo else 1, MAX_TOKENS, DEFAULT_MAX_TOKENS)
    echo_only = echo and max_tokens == 0
    stream, include_usage = read_stream(fields)
    if echo and stream:
        raise not_supported("echo", "together with stream")
    prompts = _prompts(fields, text)
    if len(prompts) * num_choices > MAX_PROMPTS:
        raise RequestError("n", f"{len(prompts)} prompts with {num_choices} answers each are more than {MAX_PROMPTS}")
    return Plan(
        name=fields.text("model"),
        prompts=tuple(prompts),
        num_choices=num_choices,
        params=read_params(fields, 1 if echo_only else max_tokens, read_response_format(fields)),
        top_logprobs=_logprobs(fields),
        echo=echo,
        echo_only=echo_only,
        stream=stream,
        include_usage=include_usage,
        prompt_field="prompt",
    )


def _logprobs(fields: Fields) -> int | None:
    return read_count(fields, "logprobs", 0, MAX_TOP_LOGPROBS, 0) if fields.has("logprobs") else None


def _prompts(fields: Fields, text: Text) -> list[Sequence[int]]:
    prompt = fields.values.get("prompt")
    if isinstance(prompt, str) or _is_ids(prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not 0 < len(prompt) <= MAX_PROMPTS:
        raise RequestError("prompt", f"prompt must be a text, token ids, or a list of 1 to {MAX_PROMPTS} of either")
    special = fields.flag_or("add_special_tokens", True)
    return [_prompt(one, f"prompt[{index}]", text, special) for index, one in enumerate(prompt)]


def _prompt(prompt: object, where: str, text: Text, special: bool) -> Sequence[int]:
    if isinstance(prompt, str):
        found = text.encode(prompt, special=special)
        if not found:
            raise RequestError("prompt", f"{where} has no token; it must have at least one")
        return found
    if isinstance(prompt, list) and _is_ids(prompt):
        return prompt
    raise RequestError("prompt", f"{where} is {show(prompt)}; it must be a text or a list of token ids")


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and len(prompt) > 0 and all(type(one) is int and 0 <= one < 2**31 for one in prompt)
