"""`Sample`: a model's answers to a column of the rows, the same as those of `SamplingClient.sample`.

The prompt is a column of one of three kinds: text, which is tokenized as it is; messages, which the base's chat
template turns into a prompt; token ids. With `image`, another column holds a PNG or JPEG file or a list of them, which
go before the text of the last message. Row i is one request for `num_samples` answers with the seed `row_seed(seed,
i)`, so any client that sends this request gets the same tokens.

The row gets the text under the name `into`, and `{into}_stop_reason`; with `tokens=True` `{into}_tokens`; with
`logprobs=True` `{into}_logprobs`; where `num_samples` was given, lists of these with one entry for each answer. With
`prompt_logprobs=True` it gets `prompt_logprobs` (None for the first token), with `topk_prompt_logprobs=K` that too.

`OpenAIRequest`: the answer to a row that is a line of OpenAI's batch files, `{custom_id, method, url, body}`. The row
becomes `{custom_id, response: {status_code, request_id, body}}`, whatever the status, since a refused request is also
a result. `OpenAIBatchWriter` writes such rows.
"""

from __future__ import annotations

import base64
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from tinsmith.batch.operations import OPERATION_REGISTRY
from tinsmith.batch.operations.base import (
    Answer,
    Flag,
    MaxTokens,
    NonEmpty,
    NonEmptyOrNone,
    RowOperation,
    RowService,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    column_of,
    integer_between,
    seed_for,
)
from tinsmith.batch.types import Row
from tinsmith.errors import UserError

if TYPE_CHECKING:
    from tinsmith.chat.tokenizer import ModelTokenizer
    from tinsmith.types import Image


MAX_NUM_SAMPLES = 1024
MAX_TOPK = 1024
PROMPT_COLUMNS = ("prompt", "messages", "tokens_column")


def sampling_request(
    tokens: list[int],
    max_tokens: int | None,
    temperature: float,
    top_p: float,
    top_k: int,
    stop: Stop,
    seed: int | None,
    num_samples: int = 1,
) -> dict[str, Any]:
    """The fields of a request to /asample."""
    params = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    chosen = {"max_tokens": max_tokens, "stop": stop, "seed": seed}
    params |= {name: value for name, value in chosen.items() if value is not None}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    return {"prompt": prompt, "num_samples": num_samples, "sampling_params": params}


def messages_of(value: object, column: str) -> list[dict[str, Any]]:
    """A conversation; a plain text is one message of the user."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return value
    raise ValueError(f"column {column!r} must hold a list of messages (objects with role and content), or a string")


def with_images(messages: list[dict[str, Any]], value: object, column: str) -> list[dict[str, Any]]:
    """The conversation with files of images before the text of its last message."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": _image_url(data, column)}}
        for data in (value if isinstance(value, list) else [value])
    ]
    content = messages[-1].get("content")
    texts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [*messages[:-1], {**messages[-1], "content": [*parts, *texts]}]


def _image_url(value: object, column: str) -> str:
    """A data: URL of the bytes of an image file, which are base64 text in rows that came as JSON."""
    from tinsmith.chat.images import data_url
    from tinsmith.wire.images import sniff_format

    if isinstance(value, str) and value.startswith("data:"):
        return value
    data = bytes(value) if isinstance(value, bytes | bytearray) else b""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            data = base64.b64decode(value, validate=True)
    if (form := sniff_format(data)) is None:
        raise ValueError(f"column {column!r} must hold PNG or JPEG files, as bytes or base64, or a list of these")
    return data_url(data, form)


def token_ids_of(value: object, column: str) -> list[int]:
    if isinstance(value, list) and all(type(token_id) is int for token_id in value):
        return value
    raise ValueError(f"column {column!r} must hold a list of token ids")


@OPERATION_REGISTRY.type_register(name="sample")
@dataclass(frozen=True)
class Sample(RowOperation):
    """`model` is a base model's id, or the tinker:// path of a checkpoint. One of `prompt` (text), `messages` and
    `tokens_column` names the column with the prompt."""

    name: ClassVar[str] = "sample"

    model: NonEmpty
    prompt: NonEmptyOrNone = None
    messages: NonEmptyOrNone = None
    tokens_column: NonEmptyOrNone = None
    max_tokens: MaxTokens = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    stop: Stop = None
    seed: Seed = 0
    num_samples: Annotated[int | None, integer_between(1, MAX_NUM_SAMPLES)] = None
    image: NonEmptyOrNone = None
    tokens: Flag = False
    logprobs: Flag = False
    prompt_logprobs: Flag = False
    topk_prompt_logprobs: Annotated[int, integer_between(0, MAX_TOPK)] = 0
    into: NonEmpty = "output"

    def check(self) -> None:
        super().check()
        prompt_columns = [name for name in PROMPT_COLUMNS if getattr(self, name) is not None]
        if len(prompt_columns) != 1:
            raise UserError(
                f"a Sample has {prompt_columns or 'no column'} for its prompt; give one of {list(PROMPT_COLUMNS)}"
            )
        if self.image is not None and self.messages is None:
            raise UserError(f"a Sample has image {self.image!r} without messages; name the column of messages")

    async def answer(self, row: Row, service: RowService) -> Row:
        text = await service.text(self.model)
        tokens, images = self._prompt(row, text)
        request = sampling_request(
            tokens, self.max_tokens, self.temperature, self.top_p, self.top_k, self.stop,
            seed_for(self.seed, service.row_idx), self.num_samples or 1,
        )  # fmt: skip
        if images:
            from tinsmith.wire.images import chunks_of

            request["prompt"] = {"chunks": chunks_of(tokens, images)}
        if self.prompt_logprobs or self.topk_prompt_logprobs:
            request["prompt_logprobs"] = self.prompt_logprobs
            request["topk_prompt_logprobs"] = self.topk_prompt_logprobs
        sampled = await service.sample(self.model, request)
        answer_columns = [self._columns(answer, text) for answer in sampled.sequences]
        columns: Row = (
            answer_columns[0]
            if self.num_samples is None
            else {name: [values[name] for values in answer_columns] for name in answer_columns[0]}
        )
        if self.prompt_logprobs:
            columns["prompt_logprobs"] = sampled.prompt_logprobs
        if self.topk_prompt_logprobs:
            columns["topk_prompt_logprobs"] = sampled.topk_prompt_logprobs
        return {**row, **columns}

    def _prompt(self, row: Row, text: ModelTokenizer) -> tuple[list[int], tuple[Image, ...]]:
        if self.tokens_column is not None:
            return token_ids_of(column_of(row, self.tokens_column), self.tokens_column), ()
        if self.messages is not None:
            from tinsmith.chat.images import encode_conversation

            messages = messages_of(column_of(row, self.messages), self.messages)
            if self.image is not None:
                messages = with_images(messages, column_of(row, self.image), self.image)
            return encode_conversation(text, messages)
        assert self.prompt is not None
        prompt_text = column_of(row, self.prompt)
        if not isinstance(prompt_text, str):
            raise ValueError(f"column {self.prompt!r} holds a {type(prompt_text).__name__}; it must hold a string")
        return text.encode(prompt_text, special=True), ()

    def _columns(self, answer: Answer, text: ModelTokenizer) -> dict[str, Any]:
        columns: dict[str, Any] = {
            self.into: text.decode(answer.tokens),
            f"{self.into}_stop_reason": answer.stop_reason,
        }
        if self.tokens:
            columns[f"{self.into}_tokens"] = answer.tokens
        if self.logprobs:
            columns[f"{self.into}_logprobs"] = answer.logprobs
        return columns


VERB = "openai_request"


class TokensUsed(NamedTuple):
    """The tokens of one request: `cached` is part of `read`, and `reasoning` of `written`."""

    read: int
    cached: int
    written: int
    reasoning: int

    @classmethod
    def of(cls, usage: dict[str, Any]) -> TokensUsed:
        """Read the usage object of a chat, a completion, a response or a message."""
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        output_details = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        cache_reads = usage.get("cache_read_input_tokens") or 0  # Anthropic does not count these in input_tokens
        return cls(
            (usage.get("prompt_tokens") or usage.get("input_tokens") or 0) + cache_reads,
            (details.get("cached_tokens") or 0) + cache_reads,
            usage.get("completion_tokens") or usage.get("output_tokens") or 0,
            output_details.get("reasoning_tokens") or output_details.get("thinking_tokens") or 0,
        )


@OPERATION_REGISTRY.type_register(name=VERB)
@dataclass(frozen=True)
class OpenAIRequest(RowOperation):
    name: ClassVar[str] = VERB

    async def answer(self, row: Row, service: RowService) -> Row:
        custom_id = column_of(row, "custom_id")
        response = await service.ask(VERB, {"url": column_of(row, "url"), "body": column_of(row, "body")})
        used = TokensUsed.of(response["body"].get("usage") or {})
        service.count(used.read, used.written)
        return {"custom_id": custom_id, "response": response}
