"""Turns sampled tokens into OpenAI's responses, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith.chat.choices import LOWEST_LOGPROB, Choice, ShownToken, TextPiece, TopRow
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.harmony import new_choice
from tinsmith.chat.texts import Text
from tinsmith.chat.tools import ToolCall
from tinsmith.types import EMPTY_LOGPROB, SampledSequence, SampleResult, TopK

JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The common fields of a response and its chunks. `chat` selects the endpoint."""

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
    """Return a position's most likely tokens, without the empty cells of a small vocabulary."""
    full = topk.logprobs_Tk[position] > EMPTY_LOGPROB
    return topk.token_ids_Tk[position][full].tolist(), topk.logprobs_Tk[position][full].tolist()


def read_sequence(choice: Choice, sequence: SampledSequence, first: int = 0) -> None:
    """Push the tokens of a sequence from `first` on into a choice, and finish it."""
    tokens, logprobs, tops = sequence.tokens_T.tolist(), sequence.logprobs_T.tolist(), top_rows(sequence)
    for position in range(first, len(tokens)):
        choice.push(tokens[position], logprobs[position], tops[position])
    choice.finish()


def whole(plan: GenerationPlan, text: Text, head: AnswerHead, results: Sequence[SampleResult]) -> JsonObject:
    """Make the response to a request without streaming."""
    choices: list[JsonObject] = []
    reasoning = 0
    for number, result in enumerate(results):
        for sequence in result.sequences:
            index = len(choices)
            choice = new_choice(plan, text, index)
            if not plan.echo_only:
                read_sequence(choice, sequence)
            reasoning += choice.reasoning_tokens
            piece = choice.piece()
            reason = finish_reason(plan, piece.calls, sequence.stop_reason)
            if head.chat:
                made = _chat_choice(plan, text, index, piece, reason)
            else:
                made = _completion_choice(plan, text, index, piece, reason, plan.prompts[number], result)
                made |= _about_prompt(plan, text, plan.prompts[number], result)
            choices.append(made | _token_ids(plan, piece))
    about = _about_prompt(plan, text, plan.prompts[0], results[0]) if head.chat else {}
    return head.of() | {"choices": choices, "usage": usage(plan, results, reasoning)} | about


def _token_ids(plan: GenerationPlan, piece: TextPiece) -> JsonObject:
    return {"token_ids": [token.token_id for token in piece.sampled]} if plan.token_ids else {}


def _about_prompt(plan: GenerationPlan, text: Text, prompt: Sequence[int], result: SampleResult) -> JsonObject:
    """Return vLLM's fields about the prompt, which are part of a chat's response and of each choice of a completion."""
    found: JsonObject = {"prompt_token_ids": list(prompt)} if plan.token_ids else {}
    if plan.prompt_logprobs is not None:
        found["prompt_logprobs"] = prompt_logprobs(text, prompt, result, plan.prompt_logprobs)
    return found


def prompt_logprobs(text: Text, prompt: Sequence[int], result: SampleResult, num_top: int) -> list[JsonObject | None]:
    """Return, for each prompt token, its logprob and those of the most likely tokens, by id; null for the first. The
    rank of a token that is not among the most likely is unknown and null.
    """
    found: list[JsonObject | None] = []
    for token in echoed_tokens(text, prompt, result, num_top):
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


def finish_reason(plan: GenerationPlan, calls: Sequence[ToolCall], stop_reason: str) -> str:
    if calls and plan.tools and not plan.tools.named:
        return "tool_calls"
    return "stop" if calls else stop_reason


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


def _chat_choice(plan: GenerationPlan, text: Text, index: int, piece: TextPiece, reason: str) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": piece.text, "refusal": None}
    if piece.calls:
        message |= {"content": piece.text or None, "tool_calls": [call_json(call) for call in piece.calls]}
    if piece.reasoning:
        message["reasoning_content"] = piece.reasoning
    logprobs = None
    if plan.top_logprobs is not None:
        logprobs = {"content": chat_logprobs(plan, text, _scored(plan, piece)), "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def call_json(call: ToolCall) -> JsonObject:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _scored(plan: GenerationPlan, piece: TextPiece) -> list[ShownToken]:
    return piece.sampled if plan.exact else piece.tokens


def chat_logprobs(plan: GenerationPlan, text: Text, tokens: Sequence[ShownToken]) -> list[JsonObject]:
    return [
        _token(plan, text, token.token_id, token.logprob)
        | {"top_logprobs": [_token(plan, text, one, logprob) for one, logprob in zip(*token.top, strict=True)]}
        for token in tokens
    ]


def _token(plan: GenerationPlan, text: Text, token_id: int, logprob: float) -> JsonObject:
    shown: JsonObject = {"token": _named(plan, text, token_id), "logprob": max(logprob, LOWEST_LOGPROB)}
    return shown | {"bytes": list(text.token_bytes(token_id))}


def _named(plan: GenerationPlan, text: Text, token_id: int) -> str:
    return f"token_id:{token_id}" if plan.tokens_as_ids else _spelled(text, token_id)


# Completions.


def _completion_choice(
    plan: GenerationPlan,
    text: Text,
    index: int,
    piece: TextPiece,
    reason: str,
    prompt: Sequence[int],
    result: SampleResult,
) -> JsonObject:
    before = text.decode(prompt, special=plan.shows_special) if plan.echo else ""
    logprobs = None
    if plan.top_logprobs is not None:
        shown = echoed_tokens(text, prompt, result, plan.top_logprobs) if plan.echo else []
        logprobs = completion_logprobs(plan, text, shown, 0)
        for name, values in completion_logprobs(plan, text, _scored(plan, piece), len(before)).items():
            logprobs[name] += values
    reason = "length" if plan.echo_only else reason
    return {"index": index, "text": before + piece.text, "logprobs": logprobs, "finish_reason": reason}


def echoed_tokens(text: Text, prompt: Sequence[int], result: SampleResult, num_top: int) -> list[ShownToken]:
    """Return the prompt's tokens with their `num_top` most likely ones. The first token's logprob is NaN."""
    assert result.prompt_logprobs_T is not None
    logprobs = result.prompt_logprobs_T.tolist()
    shown: list[ShownToken] = []
    offset = 0
    for position, token_id in enumerate(prompt):
        top: TopRow = ((), ())
        if result.topk_prompt is not None and position:
            ids, values = top_row(result.topk_prompt, position)
            top = (ids[:num_top], values[:num_top])
        shown.append(ShownToken(token_id, logprobs[position], top, offset))
        offset += len(text.token_bytes(token_id).decode(errors="replace"))
    return shown


def completion_logprobs(
    plan: GenerationPlan, text: Text, tokens: Sequence[ShownToken], offset: int
) -> dict[str, list[object]]:
    """Return the older form, parallel lists. The first token of a prompt has null."""
    found: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        logprob = None if token.logprob != token.logprob else max(token.logprob, LOWEST_LOGPROB)
        spelled = _named(plan, text, token.token_id)
        found["tokens"].append(spelled)
        found["token_logprobs"].append(logprob)
        found["text_offset"].append(offset + token.offset)
        tops = {_named(plan, text, one): max(value, LOWEST_LOGPROB) for one, value in zip(*token.top, strict=True)}
        if logprob is None:
            found["top_logprobs"].append(None)
        elif plan.top_logprobs:
            found["top_logprobs"].append({spelled: logprob} | tops)
        else:
            found["top_logprobs"].append({})
    return found


def _spelled(text: Text, token_id: int) -> str:
    return text.token_bytes(token_id).decode(errors="replace")


# Chunks.


def opening(plan: GenerationPlan, head: AnswerHead, index: int) -> JsonObject | None:
    """Make the first chunk of a choice, before its first token."""
    prompt: JsonObject = {"prompt_token_ids": list(plan.prompts[index // plan.num_choices])} if plan.token_ids else {}
    if not head.chat:
        choice: JsonObject = {"index": index, "text": "", "logprobs": None, "finish_reason": None, "token_ids": []}
        return _chunk(plan, head, choice | prompt) if plan.token_ids else None
    delta = {"role": "assistant", "content": "", "refusal": None}
    return _chunk(plan, head, {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}) | prompt


def piece_chunk(
    plan: GenerationPlan, text: Text, head: AnswerHead, index: int, piece: TextPiece, reason: str | None
) -> JsonObject:
    if not head.chat:
        logprobs = None
        if plan.top_logprobs is not None:
            logprobs = completion_logprobs(plan, text, _scored(plan, piece), 0)
        choice: JsonObject = {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": reason}
        return _chunk(plan, head, choice | _token_ids(plan, piece))
    delta: JsonObject = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
    if piece.text:
        delta["content"] = piece.text
    if piece.calls:
        delta["tool_calls"] = [{"index": number} | call_json(call) for number, call in enumerate(piece.calls)]
    logprobs = None
    if plan.top_logprobs is not None and (tokens := _scored(plan, piece)):
        logprobs = {"content": chat_logprobs(plan, text, tokens), "refusal": None}
    choice: JsonObject = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    return _chunk(plan, head, choice | _token_ids(plan, piece))


def usage_chunk(plan: GenerationPlan, head: AnswerHead, results: Sequence[SampleResult], reasoning: int) -> JsonObject:
    return head.of(chunk=True) | {"choices": [], "usage": usage(plan, results, reasoning)}


def _chunk(plan: GenerationPlan, head: AnswerHead, choice: JsonObject) -> JsonObject:
    return head.of(chunk=True) | {"choices": [choice]} | ({"usage": None} if plan.include_usage else {})
