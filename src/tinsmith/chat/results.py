"""Sampled tokens -> OpenAI's answers, whole and in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith.chat.choices import LOWEST_LOGPROB, Choice, Piece, ShownToken, TopRow
from tinsmith.chat.generation_request import Plan
from tinsmith.chat.texts import Text
from tinsmith.chat.tools import ToolCall
from tinsmith.types import EMPTY_LOGPROB, SampledSequence, SampleResult, TopK

JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True)
class Head:
    """The common fields of all answers to one request; `chat` is the endpoint."""

    answer_id: str
    created: int
    name: str
    chat: bool

    def of(self, *, chunk: bool = False) -> JsonObject:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.name}


def top_rows(sequence: SampledSequence) -> list[TopRow]:
    topk = sequence.topk
    if topk is None:
        return [((), ())] * len(sequence.tokens_T)
    return [top_row(topk, position) for position in range(len(topk.token_ids_Tk))]


def top_row(topk: TopK, position: int) -> TopRow:
    """A position's likeliest tokens, without the empty cells of a small vocabulary."""
    full = topk.logprobs_Tk[position] > EMPTY_LOGPROB
    return topk.token_ids_Tk[position][full].tolist(), topk.logprobs_Tk[position][full].tolist()


def read_sequence(choice: Choice, sequence: SampledSequence, first: int = 0) -> None:
    """Feed a choice the tokens of a sequence from `first` on, and its end."""
    tokens, logprobs, tops = sequence.tokens_T.tolist(), sequence.logprobs_T.tolist(), top_rows(sequence)
    for position in range(first, len(tokens)):
        choice.push(tokens[position], logprobs[position], tops[position])
    choice.finish()


def whole(plan: Plan, text: Text, head: Head, results: Sequence[SampleResult]) -> JsonObject:
    """The answer to a request that is not a stream."""
    choices: list[JsonObject] = []
    for number, result in enumerate(results):
        for sequence in result.sequences:
            index = len(choices)
            choice = Choice(plan, text, index)
            if not plan.echo_only:
                read_sequence(choice, sequence)
            piece = choice.piece()
            reason = finish_reason(plan, piece.calls, sequence.stop_reason)
            if head.chat:
                choices.append(_chat_choice(plan, text, index, piece, reason))
            else:
                choices.append(_completion_choice(plan, text, index, piece, reason, plan.prompts[number], result))
    return head.of() | {"choices": choices, "usage": usage(plan, results)}


def finish_reason(plan: Plan, calls: Sequence[ToolCall], stop_reason: str) -> str:
    if calls and plan.tools and not plan.tools.named:
        return "tool_calls"
    return "stop" if calls else stop_reason


def usage(plan: Plan, results: Sequence[SampleResult]) -> JsonObject:
    prompt = sum(len(tokens) for tokens in plan.prompts)
    sampled = 0 if plan.echo_only else sum(len(one.tokens_T) for result in results for one in result.sequences)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": sum(result.prompt_cache_hit_tokens for result in results)},
    }


def _chat_choice(plan: Plan, text: Text, index: int, piece: Piece, reason: str) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": piece.text, "refusal": None}
    if piece.calls:
        message |= {"content": piece.text or None, "tool_calls": [call_json(call) for call in piece.calls]}
    if piece.reasoning:
        message["reasoning_content"] = piece.reasoning
    logprobs = None if plan.top_logprobs is None else {"content": chat_logprobs(text, piece.tokens), "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def call_json(call: ToolCall) -> JsonObject:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def chat_logprobs(text: Text, tokens: Sequence[ShownToken]) -> list[JsonObject]:
    return [
        _token(text, token.token_id, token.logprob)
        | {"top_logprobs": [_token(text, token_id, logprob) for token_id, logprob in zip(*token.top, strict=True)]}
        for token in tokens
    ]


def _token(text: Text, token_id: int, logprob: float) -> JsonObject:
    spelled = text.token_bytes(token_id)
    shown = spelled.decode(errors="replace")
    return {"token": shown, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(spelled)}


# Completions.


def _completion_choice(
    plan: Plan, text: Text, index: int, piece: Piece, reason: str, prompt: Sequence[int], result: SampleResult
) -> JsonObject:
    before = text.decode(prompt) if plan.echo else ""
    logprobs = None
    if plan.top_logprobs is not None:
        shown = echoed_tokens(text, prompt, result) if plan.echo else []
        logprobs = completion_logprobs(plan, text, shown, 0)
        for name, values in completion_logprobs(plan, text, piece.tokens, len(before)).items():
            logprobs[name] += values
    reason = "length" if plan.echo_only else reason
    return {"index": index, "text": before + piece.text, "logprobs": logprobs, "finish_reason": reason}


def echoed_tokens(text: Text, prompt: Sequence[int], result: SampleResult) -> list[ShownToken]:
    """The prompt's own tokens; the first has no logprob, which NaN says."""
    assert result.prompt_logprobs_T is not None
    logprobs = result.prompt_logprobs_T.tolist()
    shown: list[ShownToken] = []
    offset = 0
    for position, token_id in enumerate(prompt):
        top: TopRow = ((), ())
        if result.topk_prompt is not None and position:
            top = top_row(result.topk_prompt, position)
        shown.append(ShownToken(token_id, logprobs[position], top, offset))
        offset += len(text.token_bytes(token_id).decode(errors="replace"))
    return shown


def completion_logprobs(plan: Plan, text: Text, tokens: Sequence[ShownToken], offset: int) -> dict[str, list[object]]:
    """The older form: parallel lists. The first token of a prompt has null."""
    found: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        logprob = None if token.logprob != token.logprob else max(token.logprob, LOWEST_LOGPROB)
        spelled = _spelled(text, token.token_id)
        found["tokens"].append(spelled)
        found["token_logprobs"].append(logprob)
        found["text_offset"].append(offset + token.offset)
        tops = {_spelled(text, one): max(value, LOWEST_LOGPROB) for one, value in zip(*token.top, strict=True)}
        if logprob is None:
            found["top_logprobs"].append(None)
        elif plan.top_logprobs:
            found["top_logprobs"].append({spelled: logprob} | tops)
        else:
            found["top_logprobs"].append({})
    return found


def _spelled(text: Text, token_id: int) -> str:
    return text.token_bytes(token_id).decode(errors="replace")


# Pieces.


def opening(plan: Plan, head: Head, index: int) -> JsonObject | None:
    """The first chunk of a choice, before its first token."""
    if not head.chat:
        return None
    delta = {"role": "assistant", "content": "", "refusal": None}
    return _chunk(plan, head, {"index": index, "delta": delta, "logprobs": None, "finish_reason": None})


def piece_chunk(plan: Plan, text: Text, head: Head, index: int, piece: Piece, reason: str | None) -> JsonObject:
    if not head.chat:
        logprobs = None
        if plan.top_logprobs is not None:
            logprobs = completion_logprobs(plan, text, piece.tokens, 0)
        choice = {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": reason}
        return _chunk(plan, head, choice)
    delta: JsonObject = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
    if piece.text:
        delta["content"] = piece.text
    if piece.calls:
        delta["tool_calls"] = [{"index": number} | call_json(call) for number, call in enumerate(piece.calls)]
    logprobs = None
    if plan.top_logprobs is not None and piece.tokens:
        logprobs = {"content": chat_logprobs(text, piece.tokens), "refusal": None}
    return _chunk(plan, head, {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})


def usage_chunk(plan: Plan, head: Head, results: Sequence[SampleResult]) -> JsonObject:
    return head.of(chunk=True) | {"choices": [], "usage": usage(plan, results)}


def _chunk(plan: Plan, head: Head, choice: JsonObject) -> JsonObject:
    return head.of(chunk=True) | {"choices": [choice]} | ({"usage": None} if plan.include_usage else {})
