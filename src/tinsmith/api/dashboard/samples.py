"""Kept samples for the dashboard: a list, groups of samples of one prompt, and one sample token by token.

A group has the kept samples that share prompt, weights and session. Its answers carry notes on top of the sample: the
client's reward, and from training on it the run, the step, the advantage and the logprobs. Filters and sorting cover
the newest `MAX_GROUPED` samples of the tenant. All data belongs to the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import Field

from tinsmith.api.access import Access
from tinsmith.api.dashboard.routes import Search, SearchQuery
from tinsmith.api.declaration import operation
from tinsmith.api.openapi import ANYTHING, COUNT, LIST, TEXT, fields, listing, ref
from tinsmith.api.queries import Order, PageQuery
from tinsmith.api.request import Call, JsonObject
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.errors import NotFoundError, NotSupportedError
from tinsmith.store.kept_samples import AnswerNotes, KeptSample, KeptSequence, SampleContent
from tinsmith.wire.fields import ClosedBody, Number, OneOf, Text, iso

PREVIEW_TOKENS = 24
MAX_GROUPED = 1000
MAX_STEP = 2**53 - 1


@listing(
    "/dashboard/samples",
    "List stored samples, newest first",
    answer=fields({"samples": LIST, "cursor": ref("Cursor")}),
    query=SearchQuery,
    filters=("?search={model_id}:0",),
)
def samples(call: Call, query: SearchQuery) -> JsonObject:
    rows, total = call.services.kept_samples.page(call.tenant_id, query.limit, query.offset, query.search)
    return {
        "samples": [
            _sample_fields(sample) | _preview(_find_tokenizer(call, sample.base_model), content)
            for sample, content in rows
        ],
        "cursor": {"offset": query.offset, "limit": query.limit, "total_count": total},
        "kept": call.services.settings.kept_samples,
    }


@operation(
    "GET",
    "/dashboard/samples/{request_id}",
    "Read a stored sample token by token",
    answer=fields({"request_id": TEXT, "prompt": ANYTHING, "sequences": LIST}),
)
def sample(call: Call) -> JsonObject:
    store = call.services.kept_samples
    row, content = store.get(call.tenant_id, call.path["request_id"])
    tokenizer = _find_tokenizer(call, row.base_model)
    notes = store.notes(call.tenant_id, [row.request_id])
    return _sample_fields(row) | {
        "prompt": _tokens(tokenizer, content.prompt),
        "prompt_cut": content.prompt_cut,
        "params": content.params,
        "images": content.images,
        "sequences": [
            _tokens(tokenizer, sequence.tokens)
            | {"logprobs": sequence.logprobs, "stop_reason": sequence.stop_reason}
            | _training(sequence, notes.get((row.request_id, index)))
            for index, sequence in enumerate(content.sequences)
        ],
        "turns_before": store.list_earlier_turns(row, content),
    }


def _training(sequence: KeptSequence, notes: AnswerNotes | None) -> JsonObject:
    """Return the notes of an answer. `training_logprobs` has one entry per kept token."""
    fields: JsonObject = {"reward": None, "run": None, "step": None, "advantage": None, "training_logprobs": None}
    if notes is None:
        return fields
    fields |= {"reward": notes.reward, "run": notes.model_id, "step": notes.step, "advantage": notes.advantage}
    if notes.logprobs is not None:
        # The logprobs end at the answer's last token, which is not kept if the answer was truncated.
        before = sequence.num_tokens - len(notes.logprobs)
        at = (index - before for index in range(len(sequence.tokens)))
        fields["training_logprobs"] = [notes.logprobs[index] if index >= 0 else None for index in at]
    return fields


class AnswerRewardBody(ClosedBody):
    digest: Annotated[str, Field(min_length=32, max_length=32, pattern="^[0-9a-f]*$")]
    reward: Number


class AnswerRewardsRequest(ClosedBody):
    rewards: Annotated[list[AnswerRewardBody], Field(min_length=1, max_length=10_000)]


@operation(
    "POST",
    "/dashboard/samples/rewards",
    "Set rewards of stored responses by digest",
    body=AnswerRewardsRequest,
    answer=fields({"updated": COUNT}),
    access=Access.LISTING,
)
def rewards(call: Call, request: AnswerRewardsRequest) -> JsonObject:
    """Rewards of answers that are not kept are ignored. The digest is types.tokens_digest of prompt and answer."""
    reward_by_digest = {entry.digest: entry.reward for entry in request.rewards}
    return {"updated": call.services.kept_samples.set_rewards(call.tenant_id, reward_by_digest)}


# Groups.


@dataclass(frozen=True, slots=True)
class _Answer:
    sample: KeptSample
    content: SampleContent
    sequence_index: int
    notes: AnswerNotes | None

    @property
    def sequence(self) -> KeptSequence:
        return self.content.sequences[self.sequence_index]

    @property
    def length(self) -> int:
        return self.sequence.num_tokens or len(self.sequence.tokens)

    def note(self, name: str) -> float | None:
        return None if self.notes is None else getattr(self.notes, name)


SORTS: dict[str, Callable[[Sequence[_Answer]], float | None]] = {
    "newest": lambda answers: max(answer.sample.created_at for answer in answers),
    "reward": lambda answers: _mean([answer.note("reward") for answer in answers]),
    "spread": lambda answers: _spread([answer.note("reward") for answer in answers]),
    "advantage": lambda answers: max((abs(answer.note("advantage") or 0.0) for answer in answers), default=None),
    "length": lambda answers: _mean([float(answer.length) for answer in answers]),
    "step": lambda answers: max((float(answer.note("step") or 0) for answer in answers), default=None),
}


def _mean(values: Sequence[float | None]) -> float | None:
    reported = [value for value in values if value is not None]
    return math.fsum(reported) / len(reported) if reported else None


def _spread(values: Sequence[float | None]) -> float | None:
    reported = [value for value in values if value is not None]
    return max(reported) - min(reported) if reported else None


class GroupsQuery(PageQuery):
    """`least` and `most` bound the reward; `text` is part of prompt or answer."""

    run: Text | None = None
    step: Annotated[int, Field(ge=0, le=MAX_STEP)] | None = None
    least: Number | None = None
    most: Number | None = None
    text: Search = ""
    sort: Annotated[str, OneOf(tuple(SORTS))] = "newest"
    order: Order = "desc"


@listing(
    "/dashboard/groups",
    "List stored responses by prompt",
    answer=fields({"groups": LIST, "cursor": ref("Cursor")}),
    query=GroupsQuery,
    filters=("?run={model_id}",),
)
def groups(call: Call, query: GroupsQuery) -> JsonObject:
    """Return the groups with an answer that passes every filter. A group keeps all its answers."""
    passes = _filter(call, query)
    passing = [answers for answers in _group_answers(call) if any(passes(answer) for answer in answers)]
    # Groups without a value come last in both orders.
    sign = -1.0 if query.order == "desc" else 1.0
    keyed = [(SORTS[query.sort](answers), answers) for answers in passing]
    keyed.sort(key=lambda entry: math.inf if entry[0] is None else sign * entry[0])
    ordered = [answers for _, answers in keyed]
    return {
        "groups": [_group(call, answers) for answers in ordered[query.offset : query.offset + query.limit]],
        "cursor": {"offset": query.offset, "limit": query.limit, "total_count": len(ordered)},
        "kept": call.services.settings.kept_samples,
    }


def _group_answers(call: Call) -> Iterator[list[_Answer]]:
    store = call.services.kept_samples
    page, _ = store.page(call.tenant_id, MAX_GROUPED, 0)
    notes = store.notes(call.tenant_id, [sample.request_id for sample, _ in page])
    answers_by_prompt: dict[tuple[str, str | None, tuple[int, ...]], list[_Answer]] = {}
    for sample, content in page:
        key = sample.session_id, sample.weights, tuple(content.prompt)
        answers_by_prompt.setdefault(key, []).extend(
            _Answer(sample, content, index, notes.get((sample.request_id, index)))
            for index in range(len(content.sequences))
        )
    return (answers for answers in answers_by_prompt.values() if answers)


def _filter(call: Call, query: GroupsQuery) -> Callable[[_Answer], bool]:
    run, step, lower, upper, text = query.run, query.step, query.least, query.most, query.text.lower()

    def passes(answer: _Answer) -> bool:
        reward = answer.note("reward")
        if run and run != (answer.notes and answer.notes.model_id) and run not in (answer.sample.weights or ""):
            return False
        if step is not None and answer.note("step") != step:
            return False
        if lower is not None and (reward is None or reward < lower):
            return False
        if upper is not None and (reward is None or reward > upper):
            return False
        return not text or text in _full_text(call, answer).lower()

    return passes


def _full_text(call: Call, answer: _Answer) -> str:
    """Return prompt and answer as text, for the search."""
    tokens = [*answer.content.prompt, *answer.sequence.tokens]
    return _decode(_find_tokenizer(call, answer.sample.base_model), tokens) or " ".join(map(str, tokens))


def _group(call: Call, answers: Sequence[_Answer]) -> JsonObject:
    first = answers[0]
    tokenizer = _find_tokenizer(call, first.sample.base_model)
    return {
        "prompt_ends": _decode(tokenizer, first.content.prompt[-4 * PREVIEW_TOKENS :]),
        "prompt_tokens": first.sample.prompt_tokens,
        "weights": first.sample.weights,
        "base_model": first.sample.base_model,
        "created_at": iso(max(answer.sample.created_at for answer in answers)),
        "answers": [
            {
                "request_id": answer.sample.request_id,
                "number": answer.sequence_index,
                "begins": _decode(tokenizer, answer.sequence.tokens[: 2 * PREVIEW_TOKENS]),
                "tokens": answer.length,
                "stop_reason": answer.sequence.stop_reason,
                "logprob": _mean(answer.sequence.logprobs),
                **{name: answer.note(name) for name in ("reward", "advantage", "step")},
                "run": answer.notes.model_id if answer.notes else None,
            }
            for answer in answers
        ],
    }


# Decoded text.


def _sample_fields(sample: KeptSample) -> JsonObject:
    fields: JsonObject = {**asdict(sample), "created_at": iso(sample.created_at)}
    del fields["tenant_id"]
    return fields


def _preview(tokenizer: ModelTokenizer | None, content: SampleContent) -> JsonObject:
    """Return the end of the prompt and the beginning of the first answer."""
    answer = content.sequences[0].tokens if content.sequences else ()
    return {
        "prompt_ends": _decode(tokenizer, content.prompt[-PREVIEW_TOKENS:]),
        "answer_begins": _decode(tokenizer, answer[:PREVIEW_TOKENS]),
    }


def _decode(tokenizer: ModelTokenizer | None, tokens: Sequence[int]) -> str | None:
    return None if tokenizer is None else tokenizer.decode(tokens)


def _find_tokenizer(call: Call, base_model: str) -> ModelTokenizer | None:
    """Return the tokenizer of a base model, or None if the model is not served or has no tokenizer."""
    try:
        tokenizer = call.services.tokenizers.get(call.services.bases.get(base_model))
        _ = tokenizer.backend_tokenizer
    except (NotFoundError, NotSupportedError):
        return None
    return tokenizer


def _tokens(tokenizer: ModelTokenizer | None, tokens: Sequence[int]) -> JsonObject:
    if tokenizer is None:
        return {"tokens": tokens, "pieces": None, "text": None}
    texts = [tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]
    return {
        "tokens": tokens,
        "pieces": texts,
        "text": tokenizer.backend_tokenizer.decode(list(tokens), skip_special_tokens=False),
    }
