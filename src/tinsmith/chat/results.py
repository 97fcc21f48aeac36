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
from tinsmith.chat.choices import LOWEST_LOGPROB, Choice, ShownToken, TextPiece, TopRow
from tinsmith.chat.detokenizer import decode_with_starts
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.harmony import new_choice
from tinsmith.chat.texts import Text
from tinsmith.errors import RequestError, TinsmithError
from tinsmith.types import EMPTY_LOGPROB, SampledSequence, SampleResult, TopK

JsonObject = dict[str, object]
Event = tuple[str | None, JsonObject]
"""The name of a server-sent event, if it has one, and its content."""


class ClientAnswer(ABC):
    """The response to one request, whole or as the events of a stream. An instance makes one of them once."""

    keep_alive: Event | None = None
    """An event without content; without one, the protocol keeps streams alive by comments."""

    ends_with_mark = False
    """Whether a complete stream ends with `[DONE]`."""

    def __init__(self, plan: GenerationPlan, text: Text) -> None:
        self.plan, self.text = plan, text

    @abstractmethod
    def whole(self, results: Sequence[SampleResult]) -> JsonObject:
        """Make the response to a request without streaming; `results` has one for each prompt."""

    @abstractmethod
    def begun(self) -> Iterator[Event]:
        """Yield the events before the first token."""

    @abstractmethod
    def added(self, choice: Choice, piece: TextPiece, reason: str | None) -> Iterator[Event]:
        """Yield the events of a choice's next piece; the last piece has the reason of the choice's end."""

    @abstractmethod
    def ended(self, results: Sequence[SampleResult]) -> Iterator[Event]:
        """Yield the events after the last piece of the last choice."""

    @abstractmethod
    def failed(self, error: TinsmithError) -> Iterator[Event]:
        """Yield the events that end a stream after an error."""

    def token_logprobs(self, tokens: Sequence[ShownToken]) -> list[JsonObject]:
        return [
            self._token(token.token_id, token.logprob)
            | {"top_logprobs": [self._token(one, logprob) for one, logprob in zip(*token.top, strict=True)]}
            for token in tokens
        ]

    def _token(self, token_id: int, logprob: float) -> JsonObject:
        shown: JsonObject = {"token": self._named(token_id), "logprob": max(logprob, LOWEST_LOGPROB)}
        return shown | {"bytes": list(self.text.token_bytes(token_id))}

    def _named(self, token_id: int) -> str:
        return _id_key(token_id) if self.plan.tokens_as_ids else _spelled(self.text, token_id)


class ChoicesAnswer(ClientAnswer):
    """A list of choices; a chunk has one of them."""

    ends_with_mark = True
    prefix: str
    kind: str
    chunk_kind: str
    describes_each_prompt = False
    """Whether vLLM's fields about a prompt are in each choice, not in the response."""

    def __init__(self, plan: GenerationPlan, text: Text) -> None:
        super().__init__(plan, text)
        self._answer_id, self._created = self.prefix + secrets.token_hex(16), int(time.time())
        self._reasoning = 0
        self._num_sampled: dict[int, int] = {}  # by choice

    def whole(self, results: Sequence[SampleResult]) -> JsonObject:
        choices: list[JsonObject] = []
        for number, result in enumerate(results):
            for sequence in result.sequences:
                choice = new_choice(self.plan, self.text, len(choices))
                if not self.plan.echo_only:
                    read_sequence(choice, sequence)
                self._reasoning += choice.reasoning_tokens
                piece = choice.piece()
                shown: JsonObject = {"index": choice.index}
                shown |= self._choice(piece, self.plan.prompts[number], result)
                reason = finish_reason(self.plan, choice.num_calls, sequence.stop_reason)
                shown["finish_reason"] = "length" if self.plan.echo_only else reason
                if self.describes_each_prompt:
                    shown |= self._about_prompt(number, result)
                choices.append(shown | self._token_ids(piece))
        about = {} if self.describes_each_prompt else self._about_prompt(0, results[0])
        used = usage(self.plan, results, self._reasoning)
        return self._head(self.kind) | {"choices": choices, "usage": used} | about

    def begun(self) -> Iterator[Event]:
        for number in range(len(self.plan.prompts)):
            for index in range(number * self.plan.num_choices, (number + 1) * self.plan.num_choices):
                yield from self._opening(index, self._about_prompt(number))

    def added(self, choice: Choice, piece: TextPiece, reason: str | None) -> Iterator[Event]:
        self._num_sampled[choice.index] = len(choice.token_ids)
        if piece or piece.sampled or (piece.tokens and self.plan.top_logprobs is not None):
            yield self._chunk(choice.index, piece, None)
        if reason:
            self._reasoning += choice.reasoning_tokens
            yield self._chunk(choice.index, TextPiece(), reason)

    def ended(self, results: Sequence[SampleResult]) -> Iterator[Event]:
        if self.plan.include_usage:
            used = usage(self.plan, results, self._reasoning)
            yield None, self._head(self.chunk_kind) | {"choices": [], "usage": used}

    def failed(self, error: TinsmithError) -> Iterator[Event]:
        yield None, {"error": openai_error(str(error), error.status, error)}

    @abstractmethod
    def _opening(self, index: int, about: JsonObject) -> Iterator[Event]:
        """Yield the first chunk of a choice, if it has one before its first token."""

    @abstractmethod
    def _choice(self, piece: TextPiece, prompt: Sequence[int], result: SampleResult) -> JsonObject:
        """Return a choice of a whole response, between its index and its finish_reason."""

    @abstractmethod
    def _delta(self, piece: TextPiece) -> JsonObject:
        """Return a choice of a chunk, between its index and its finish_reason."""

    def _about_prompt(self, number: int, result: SampleResult | None = None) -> JsonObject:
        """Return vLLM's fields about a prompt; its logprobs are not streamed, so chunks have no result."""
        prompt = self.plan.prompts[number]
        found: JsonObject = {"prompt_token_ids": list(prompt)} if self.plan.token_ids else {}
        if self.plan.prompt_logprobs is not None and result is not None:
            found["prompt_logprobs"] = prompt_logprobs(self.text, prompt, result, self.plan.prompt_logprobs)
        return found

    def _head(self, kind: str) -> JsonObject:
        return {"id": self._answer_id, "object": kind, "created": self._created, "model": self.plan.name}

    def _chunk(self, index: int, piece: TextPiece, reason: str | None) -> Event:
        choice = {"index": index, **self._delta(piece), "finish_reason": reason}
        return self._chunk_of(choice | self._token_ids(piece))

    def _chunk_of(self, choice: JsonObject, **more: object) -> Event:
        unused: JsonObject = {"usage": None} if self.plan.include_usage else {}
        if self.plan.continuous_usage:
            unused = {"usage": self._usage_so_far()}
        return None, self._head(self.chunk_kind) | {"choices": [choice]} | unused | more

    def _usage_so_far(self) -> JsonObject:
        prompt, sampled = sum(map(len, self.plan.prompts)), sum(self._num_sampled.values())
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _token_ids(self, piece: TextPiece) -> JsonObject:
        return {"token_ids": [token.token_id for token in piece.sampled]} if self.plan.token_ids else {}

    def _scored(self, piece: TextPiece) -> list[ShownToken]:
        return piece.sampled if self.plan.exact else piece.tokens


class ChatAnswer(ChoicesAnswer):
    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _opening(self, index: int, about: JsonObject) -> Iterator[Event]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        choice: JsonObject = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        yield self._chunk_of(choice, **about)

    def _choice(self, piece: TextPiece, prompt: Sequence[int], result: SampleResult) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            message |= {"content": piece.text or None, "tool_calls": [_call(call) for call in piece.calls]}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        return {"message": message, "logprobs": self._logprobs(self._scored(piece))}

    def _delta(self, piece: TextPiece) -> JsonObject:
        delta: JsonObject = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        if piece.text:
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = [{"index": call.index} | _call(call) for call in piece.calls]
        tokens = self._scored(piece)
        return {"delta": delta, "logprobs": self._logprobs(tokens) if tokens else None}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> JsonObject | None:
        return None if self.plan.top_logprobs is None else {"content": self.token_logprobs(tokens), "refusal": None}


class CompletionAnswer(ChoicesAnswer):
    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    describes_each_prompt = True

    def _opening(self, index: int, about: JsonObject) -> Iterator[Event]:
        if self.plan.token_ids:
            choice: JsonObject = {"index": index, "text": "", "logprobs": None, "finish_reason": None, "token_ids": []}
            yield self._chunk_of(choice | about)

    def _choice(self, piece: TextPiece, prompt: Sequence[int], result: SampleResult) -> JsonObject:
        plan = self.plan
        if not plan.echo:
            return {"text": piece.text, "logprobs": self._logprobs(self._scored(piece))}
        before, starts = decode_with_starts(self.text, prompt, special=plan.shows_special)
        logprobs = self._logprobs(self._scored(piece), len(before))
        if logprobs is not None:
            tokens = prompt_tokens(prompt, result, plan.top_logprobs or 0, starts)
            of_prompt = self._logprobs(tokens) or {}
            logprobs = {name: [*of_prompt[name], *values] for name, values in logprobs.items()}
        return {"text": before + piece.text, "logprobs": logprobs}

    def _delta(self, piece: TextPiece) -> JsonObject:
        return {"text": piece.text, "logprobs": self._logprobs(self._scored(piece))}

    def _logprobs(self, tokens: Sequence[ShownToken], offset: int = 0) -> dict[str, list[object]] | None:
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

    def _top_logprobs(self, token: ShownToken) -> JsonObject:
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
        spelled = self.text.token_bytes(token_id)
        if self.plan.tokens_as_ids or not spelled:
            return _id_key(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


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


def prompt_logprobs(text: Text, prompt: Sequence[int], result: SampleResult, num_top: int) -> list[JsonObject | None]:
    """Return, for each prompt token, its logprob and those of the most likely tokens, by id; null for the first. The
    rank of a token that is not among the most likely is unknown and null.
    """
    found: list[JsonObject | None] = []
    for token in prompt_tokens(prompt, result, num_top):
        ranks = {token_id: rank for rank, token_id in enumerate(token.top[0], 1)}
        values = {token.token_id: token.logprob} | dict(zip(*token.top, strict=True))
        row: JsonObject = {
            str(token_id): {
                "logprob": max(logprob, LOWEST_LOGPROB),
                "rank": ranks.get(token_id),
                "decoded_token": _spelled(text, token_id),
            }
            for token_id, logprob in values.items()
        }
        found.append(row if found else None)
    return found


def prompt_tokens(
    prompt: Sequence[int], result: SampleResult, num_top: int, starts: Sequence[int] | None = None
) -> list[ShownToken]:
    """Return the prompt's tokens with their `num_top` most likely ones, and their starts in the prompt's text if they
    are known. The first token's logprob is NaN.
    """
    assert result.prompt_logprobs_T is not None
    logprobs = result.prompt_logprobs_T.tolist()
    tokens: list[ShownToken] = []
    for position, token_id in enumerate(prompt):
        top: TopRow = ((), ())
        if result.topk_prompt is not None and position:
            ids, values = top_row(result.topk_prompt, position)
            top = (ids[:num_top], values[:num_top])
        tokens.append(ShownToken(token_id, logprobs[position], top, starts[position] if starts else 0))
    return tokens


def finish_reason(plan: GenerationPlan, num_calls: int, stop_reason: str) -> str:
    """Return why a completion with `num_calls` calls ended. A call that a client demanded by name ends with `stop`."""
    if num_calls and plan.tools and not plan.tools.named:
        return "tool_calls"
    return "stop" if num_calls else stop_reason


def usage(plan: GenerationPlan, results: Sequence[SampleResult], reasoning: int = 0) -> JsonObject:
    """`reasoning` is the number of sampled reasoning tokens."""
    prompt = sum(len(tokens) for tokens in plan.prompts)
    sampled = 0 if plan.echo_only else sum(len(one.tokens_T) for result in results for one in result.sequences)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": sum(result.prompt_cache_hit_tokens for result in results)},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def _call(call: ToolCall) -> JsonObject:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _id_key(token_id: int) -> str:
    return f"token_id:{token_id}"


def _spelled(text: Text, token_id: int) -> str:
    return text.token_bytes(token_id).decode(errors="replace")
