"""Turns sampled tokens into responses: `ClientAnswer`, which each protocol implements, and OpenAI's choices.

`ChatAnswer` and `CompletionAnswer` are OpenAI's, `messages.MessageAnswer` is Anthropic's, and
`responses.ResponseAnswer` is that of OpenAI's responses.
"""

from __future__ import annotations

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from http import HTTPStatus

from tinsmith.chat.calls import ToolCall
from tinsmith.chat.choices import LOWEST_LOGPROB, Choice, CompletionDelta, CompletionToken, TopRow
from tinsmith.chat.detokenizer import decode_with_starts
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.harmony import new_choice
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.errors import RequestError, TinsmithError
from tinsmith.types import EMPTY_LOGPROB, SampledSequence, SampleResult, TopK

JsonObject = dict[str, object]
Event = tuple[str | None, JsonObject]
"""The name of a server-sent event, if it has one, and its content."""


class ClientAnswer(ABC):
    """The response to one request, whole or as the events of a stream. An instance makes one of them once."""

    keep_alive: Event | None = None
    """An event without content; without one, the protocol keeps streams alive by comments."""

    ends_with_done = False
    """Whether a complete stream ends with `[DONE]`."""

    def __init__(self, plan: GenerationPlan, tokenizer: ModelTokenizer) -> None:
        self.plan, self.tokenizer = plan, tokenizer

    @abstractmethod
    def build_response(self, results: Sequence[SampleResult]) -> JsonObject:
        """Make the response to a request without streaming; `results` has one for each prompt."""

    @abstractmethod
    def start_events(self) -> Iterator[Event]:
        """Yield the events before the first token."""

    @abstractmethod
    def delta_events(self, choice: Choice, delta: CompletionDelta, reason: str | None) -> Iterator[Event]:
        """Yield the events of a choice's next delta; the last delta has the reason of the choice's end."""

    @abstractmethod
    def end_events(self, results: Sequence[SampleResult]) -> Iterator[Event]:
        """Yield the events after the last delta of the last choice."""

    @abstractmethod
    def error_events(self, error: TinsmithError) -> Iterator[Event]:
        """Yield the events that end a stream after an error."""

    def token_logprobs(self, tokens: Sequence[CompletionToken]) -> list[JsonObject]:
        return [
            self._token(token.token_id, token.logprob)
            | {"top_logprobs": [self._token(top_id, logprob) for top_id, logprob in zip(*token.top, strict=True)]}
            for token in tokens
        ]

    def _token(self, token_id: int, logprob: float) -> JsonObject:
        fields: JsonObject = {"token": self._token_text(token_id), "logprob": max(logprob, LOWEST_LOGPROB)}
        return fields | {"bytes": list(self.tokenizer.token_bytes(token_id))}

    def _token_text(self, token_id: int) -> str:
        return _id_key(token_id) if self.plan.tokens_as_ids else _spell_token(self.tokenizer, token_id)


class ChoicesAnswer(ClientAnswer):
    """A list of choices; a chunk has one of them."""

    ends_with_done = True
    prefix: str
    kind: str
    chunk_kind: str
    describes_each_prompt = False
    """Whether vLLM's fields about a prompt are in each choice, not in the response."""

    def __init__(self, plan: GenerationPlan, tokenizer: ModelTokenizer) -> None:
        super().__init__(plan, tokenizer)
        self._answer_id, self._created = self.prefix + secrets.token_hex(16), int(time.time())
        self._reasoning = 0
        self._num_sampled: dict[int, int] = {}  # by choice

    def build_response(self, results: Sequence[SampleResult]) -> JsonObject:
        choices: list[JsonObject] = []
        for prompt_index, result in enumerate(results):
            for sequence in result.sequences:
                choice = new_choice(self.plan, self.tokenizer, len(choices))
                if not self.plan.echo_only:
                    read_sequence(choice, sequence)
                self._reasoning += choice.reasoning_tokens
                completion = choice.take_delta()
                choice_fields: JsonObject = {"index": choice.index}
                choice_fields |= self._choice(completion, self.plan.prompts[prompt_index], result)
                reason = finish_reason(self.plan, choice.num_calls, sequence.stop_reason)
                choice_fields["finish_reason"] = "length" if self.plan.echo_only else reason
                if self.describes_each_prompt:
                    choice_fields |= self._prompt_fields(prompt_index, result)
                choices.append(choice_fields | self._token_ids(completion))
        prompt_fields = {} if self.describes_each_prompt else self._prompt_fields(0, results[0])
        usage_fields = usage(self.plan, results, self._reasoning)
        return self._head(self.kind) | {"choices": choices, "usage": usage_fields} | prompt_fields

    def start_events(self) -> Iterator[Event]:
        for prompt_index in range(len(self.plan.prompts)):
            for index in range(prompt_index * self.plan.num_choices, (prompt_index + 1) * self.plan.num_choices):
                yield from self._opening(index, self._prompt_fields(prompt_index))

    def delta_events(self, choice: Choice, delta: CompletionDelta, reason: str | None) -> Iterator[Event]:
        self._num_sampled[choice.index] = len(choice.token_ids)
        if delta or delta.sampled or (delta.tokens and self.plan.top_logprobs is not None):
            yield self._chunk(choice.index, delta, None)
        if reason:
            self._reasoning += choice.reasoning_tokens
            yield self._chunk(choice.index, CompletionDelta(), reason, version_fields(choice.weight_version))

    def end_events(self, results: Sequence[SampleResult]) -> Iterator[Event]:
        if self.plan.include_usage:
            usage_fields = usage(self.plan, results, self._reasoning)
            yield None, self._head(self.chunk_kind) | {"choices": [], "usage": usage_fields}

    def error_events(self, error: TinsmithError) -> Iterator[Event]:
        yield None, {"error": openai_error(str(error), error.status, error)}

    @abstractmethod
    def _opening(self, index: int, prompt_fields: JsonObject) -> Iterator[Event]:
        """Yield the first chunk of a choice, if it has one before its first token."""

    @abstractmethod
    def _choice(self, completion: CompletionDelta, prompt: Sequence[int], result: SampleResult) -> JsonObject:
        """Return a choice of a whole response, between its index and its finish_reason."""

    @abstractmethod
    def _delta(self, delta: CompletionDelta) -> JsonObject:
        """Return a choice of a chunk, between its index and its finish_reason."""

    def _prompt_fields(self, prompt_index: int, result: SampleResult | None = None) -> JsonObject:
        """Return vLLM's fields about a prompt, and the weights that answered it. The prompt's logprobs are not
        streamed, so chunks have no result.
        """
        prompt = self.plan.prompts[prompt_index]
        fields: JsonObject = {"prompt_token_ids": list(prompt)} if self.plan.token_ids else {}
        if result is None:
            return fields
        if self.plan.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self.tokenizer, prompt, result, self.plan.prompt_logprobs)
        return fields | version_fields(result.weight_version)

    def _head(self, kind: str) -> JsonObject:
        return {"id": self._answer_id, "object": kind, "created": self._created, "model": self.plan.name}

    def _chunk(
        self, index: int, delta: CompletionDelta, reason: str | None, end_fields: JsonObject | None = None
    ) -> Event:
        choice = {"index": index, **self._delta(delta), "finish_reason": reason} | self._token_ids(delta)
        if self.describes_each_prompt:
            return self._chunk_of(choice | (end_fields or {}))
        return self._chunk_of(choice, **(end_fields or {}))

    def _chunk_of(self, choice: JsonObject, **extra_fields: object) -> Event:
        usage_fields: JsonObject = {"usage": None} if self.plan.include_usage else {}
        if self.plan.continuous_usage:
            usage_fields = {"usage": self._usage_so_far()}
        return None, self._head(self.chunk_kind) | {"choices": [choice]} | usage_fields | extra_fields

    def _usage_so_far(self) -> JsonObject:
        num_prompt, num_sampled = sum(map(len, self.plan.prompts)), sum(self._num_sampled.values())
        return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}

    def _token_ids(self, delta: CompletionDelta) -> JsonObject:
        return {"token_ids": [token.token_id for token in delta.sampled]} if self.plan.token_ids else {}

    def _logprob_tokens(self, delta: CompletionDelta) -> list[CompletionToken]:
        return delta.sampled if self.plan.exact else delta.tokens


class ChatAnswer(ChoicesAnswer):
    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _opening(self, index: int, prompt_fields: JsonObject) -> Iterator[Event]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        choice: JsonObject = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        yield self._chunk_of(choice, **prompt_fields)

    def _choice(self, completion: CompletionDelta, prompt: Sequence[int], result: SampleResult) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": completion.text, "refusal": None}
        if completion.calls:
            message |= {"content": completion.text or None, "tool_calls": [_call(call) for call in completion.calls]}
        if completion.reasoning:
            message["reasoning_content"] = completion.reasoning
        return {"message": message, "logprobs": self._logprobs(self._logprob_tokens(completion))}

    def _delta(self, delta: CompletionDelta) -> JsonObject:
        fields: JsonObject = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        if delta.text:
            fields["content"] = delta.text
        if delta.calls:
            fields["tool_calls"] = [{"index": call.index} | _call(call) for call in delta.calls]
        tokens = self._logprob_tokens(delta)
        return {"delta": fields, "logprobs": self._logprobs(tokens) if tokens else None}

    def _logprobs(self, tokens: Sequence[CompletionToken]) -> JsonObject | None:
        return None if self.plan.top_logprobs is None else {"content": self.token_logprobs(tokens), "refusal": None}


class CompletionAnswer(ChoicesAnswer):
    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    describes_each_prompt = True

    def _opening(self, index: int, prompt_fields: JsonObject) -> Iterator[Event]:
        if self.plan.token_ids:
            choice: JsonObject = {"index": index, "text": "", "logprobs": None, "finish_reason": None, "token_ids": []}
            yield self._chunk_of(choice | prompt_fields)

    def _choice(self, completion: CompletionDelta, prompt: Sequence[int], result: SampleResult) -> JsonObject:
        plan = self.plan
        if not plan.echo:
            return {"text": completion.text, "logprobs": self._logprobs(self._logprob_tokens(completion))}
        prompt_text, starts = decode_with_starts(self.tokenizer, prompt, special=plan.shows_special)
        logprobs = self._logprobs(self._logprob_tokens(completion), len(prompt_text))
        if logprobs is not None:
            tokens = prompt_tokens(prompt, result, plan.top_logprobs or 0, starts)
            prompt_lists = self._logprobs(tokens) or {}
            logprobs = {name: [*prompt_lists[name], *values] for name, values in logprobs.items()}
        return {"text": prompt_text + completion.text, "logprobs": logprobs}

    def _delta(self, delta: CompletionDelta) -> JsonObject:
        return {"text": delta.text, "logprobs": self._logprobs(self._logprob_tokens(delta))}

    def _logprobs(self, tokens: Sequence[CompletionToken], offset: int = 0) -> dict[str, list[object]] | None:
        """Return the older form, parallel lists, with offsets in characters. The first token of a prompt has null."""
        if self.plan.top_logprobs is None:
            return None
        lists: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            is_first = math.isnan(token.logprob)
            lists["tokens"].append(self._key(token.token_id))
            lists["token_logprobs"].append(None if is_first else max(token.logprob, LOWEST_LOGPROB))
            lists["text_offset"].append(offset + token.offset)
            lists["top_logprobs"].append(None if is_first else self._top_logprobs(token))
        return lists

    def _top_logprobs(self, token: CompletionToken) -> JsonObject:
        """Return the logprobs by the tokens' texts. Of tokens with one text, all but the first have their id as key."""
        row: JsonObject = {}
        if not self.plan.top_logprobs:
            return row
        values = {token.token_id: token.logprob} | dict(zip(*token.top, strict=True))
        for token_id, logprob in values.items():
            key = self._key(token_id)
            row[_id_key(token_id) if key in row else key] = max(logprob, LOWEST_LOGPROB)
        return row

    def _key(self, token_id: int) -> str:
        """Return a token's text, as OpenAI writes it: `bytes:\\xe2\\x82` for a part of a character."""
        token_bytes = self.tokenizer.token_bytes(token_id)
        if self.plan.tokens_as_ids or not token_bytes:
            return _id_key(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def version_fields(weight_version: str) -> JsonObject:
    """Return the field that names the weights of an answer; none for a result without a name."""
    return {"weight_version": weight_version} if weight_version else {}


def openai_error(text: str, status: int, error: TinsmithError | None = None) -> JsonObject:
    """Return OpenAI's error body; `param` names the invalid field, if there is one."""
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    if status == HTTPStatus.UNAUTHORIZED:
        code = "invalid_api_key"
    return {"message": text, "type": kind, "param": param, "code": code}


def read_sequence(choice: Choice, sequence: SampledSequence, first: int = 0) -> None:
    """Push the tokens of a sequence from `first` on into a choice, and finish it."""
    tokens, logprobs, tops = sequence.tokens_T.tolist(), sequence.logprobs_T.tolist(), top_rows(sequence)
    for position in range(first, len(tokens)):
        choice.push(tokens[position], logprobs[position], tops[position])
    choice.finish()


def top_rows(sequence: SampledSequence) -> list[TopRow]:
    topk = sequence.topk
    if topk is None:
        return [((), ())] * len(sequence.tokens_T)
    return [top_row(topk, position) for position in range(len(topk.token_ids_Tk))]


def top_row(topk: TopK, position: int) -> TopRow:
    """Return a position's most likely tokens, without the empty cells of a small vocabulary."""
    full = topk.logprobs_Tk[position] > EMPTY_LOGPROB
    return topk.token_ids_Tk[position][full].tolist(), topk.logprobs_Tk[position][full].tolist()


def prompt_logprobs(
    tokenizer: ModelTokenizer, prompt: Sequence[int], result: SampleResult, num_top: int
) -> list[JsonObject | None]:
    """Return, for each prompt token, its logprob and those of the most likely tokens, by id; null for the first. The
    rank of a token that is not among the most likely is unknown and null.
    """
    rows: list[JsonObject | None] = []
    for token in prompt_tokens(prompt, result, num_top):
        ranks = {token_id: rank for rank, token_id in enumerate(token.top[0], 1)}
        values = {token.token_id: token.logprob} | dict(zip(*token.top, strict=True))
        row: JsonObject = {
            str(token_id): {
                "logprob": max(logprob, LOWEST_LOGPROB),
                "rank": ranks.get(token_id),
                "decoded_token": _spell_token(tokenizer, token_id),
            }
            for token_id, logprob in values.items()
        }
        rows.append(row if rows else None)
    return rows


def prompt_tokens(
    prompt: Sequence[int], result: SampleResult, num_top: int, starts: Sequence[int] | None = None
) -> list[CompletionToken]:
    """Return the prompt's tokens with their `num_top` most likely ones, and their starts in the prompt's text if they
    are known. The first token's logprob is NaN.
    """
    assert result.prompt_logprobs_T is not None
    logprobs = result.prompt_logprobs_T.tolist()
    tokens: list[CompletionToken] = []
    for position, token_id in enumerate(prompt):
        top: TopRow = ((), ())
        if result.topk_prompt is not None and position:
            ids, values = top_row(result.topk_prompt, position)
            top = (ids[:num_top], values[:num_top])
        tokens.append(CompletionToken(token_id, logprobs[position], top, starts[position] if starts else 0))
    return tokens


def finish_reason(plan: GenerationPlan, num_calls: int, stop_reason: str) -> str:
    """Return why a completion with `num_calls` calls ended. A call that a client demanded by name ends with `stop`."""
    if num_calls and plan.tools and not plan.tools.is_named:
        return "tool_calls"
    return "stop" if num_calls else stop_reason


def usage(plan: GenerationPlan, results: Sequence[SampleResult], num_reasoning: int = 0) -> JsonObject:
    """`reasoning` is the number of sampled reasoning tokens."""
    num_prompt = sum(len(tokens) for tokens in plan.prompts)
    num_sampled = (
        0 if plan.echo_only else sum(len(sequence.tokens_T) for result in results for sequence in result.sequences)
    )
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": sum(result.prompt_cache_hit_tokens for result in results)},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def _call(call: ToolCall) -> JsonObject:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _id_key(token_id: int) -> str:
    return f"token_id:{token_id}"


def _spell_token(tokenizer: ModelTokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")
