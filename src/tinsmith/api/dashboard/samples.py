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

from tinsmith.api.dashboard.routes import MAX_SEARCH, search_of
from tinsmith.api.openapi import ANYTHING, COUNT, LIST, NUMBER, PAGE, TEXT, fields, integer, listing, one_of, ref
from tinsmith.api.operation import Access, Call, JsonObject, operation
from tinsmith.chat.texts import Text as ModelText
from tinsmith.errors import NotFoundError, NotSupportedError, UserError
from tinsmith.store.history import AnswerNotes, KeptSample, KeptSequence, SampleContent
from tinsmith.wire.fields import ClosedBody, Number, iso, show

PREVIEW_TOKENS = 24
MAX_GROUPED = 1000
MAX_STEP = 2**53 - 1


@listing(
    "/dashboard/samples",
    "List kept samples, newest first",
    answer=fields({"samples": LIST, "cursor": ref("Cursor")}),
    query={**PAGE, "search": TEXT | {"maxLength": MAX_SEARCH}},
    filters=("?search={model_id}:0",),
)
def samples(call: Call) -> JsonObject:
    limit, offset = call.page(default_limit=50)
    search = search_of(call)
    found, total = call.services.kept_samples.page(call.tenant_id, limit, offset, search)
    return {
        "samples": [_shown(one) | _preview(_text(call, one.base_model), content) for one, content in found],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
        "kept": call.services.settings.kept_samples,
    }


@operation(
    "GET",
    "/dashboard/samples/{request_id}",
    "Read a kept sample token by token",
    answer=fields({"request_id": TEXT, "prompt": ANYTHING, "sequences": LIST}),
)
def sample(call: Call) -> JsonObject:
    kept = call.services.kept_samples
    found, content = kept.get(call.tenant_id, call.path["request_id"])
    text = _text(call, found.base_model)
    notes = kept.notes(call.tenant_id, [found.request_id])
    return _shown(found) | {
        "prompt": _tokens(text, content.prompt),
        "prompt_cut": content.prompt_cut,
        "params": content.params,
        "images": content.images,
        "sequences": [
            _tokens(text, one.tokens)
            | {"logprobs": one.logprobs, "stop_reason": one.stop_reason}
            | _training(one, notes.get((found.request_id, number)))
            for number, one in enumerate(content.sequences)
        ],
        "turns_before": kept.turns_before(found, content),
    }


def _training(sequence: KeptSequence, notes: AnswerNotes | None) -> JsonObject:
    """Return the notes of an answer. `training_logprobs` has one entry per kept token."""
    known: JsonObject = {"reward": None, "run": None, "step": None, "advantage": None, "training_logprobs": None}
    if notes is None:
        return known
    known |= {"reward": notes.reward, "run": notes.model_id, "step": notes.step, "advantage": notes.advantage}
    if notes.logprobs is not None:
        # The logprobs end at the answer's last token, which is not kept if the answer was truncated.
        before = sequence.num_tokens - len(notes.logprobs)
        at = (index - before for index in range(len(sequence.tokens)))
        known["training_logprobs"] = [notes.logprobs[index] if index >= 0 else None for index in at]
    return known


class AnswerRewardBody(ClosedBody):
    digest: Annotated[str, Field(min_length=32, max_length=32, pattern="^[0-9a-f]*$")]
    reward: Number


class AnswerRewardsRequest(ClosedBody):
    rewards: Annotated[list[AnswerRewardBody], Field(min_length=1, max_length=10_000)]


@operation(
    "POST",
    "/dashboard/samples/rewards",
    "Set rewards of kept answers by digest",
    body=AnswerRewardsRequest,
    answer=fields({"updated": COUNT}),
    access=Access.LISTING,
)
def rewards(call: Call, request: AnswerRewardsRequest) -> JsonObject:
    """Rewards of answers that are not kept are ignored. The digest is types.tokens_digest of prompt and answer."""
    given = {each.digest: each.reward for each in request.rewards}
    return {"updated": call.services.kept_samples.set_rewards(call.tenant_id, given)}


# Groups.


@dataclass(frozen=True, slots=True)
class _Answer:
    sample: KeptSample
    content: SampleContent
    number: int
    notes: AnswerNotes | None

    @property
    def sequence(self) -> KeptSequence:
        return self.content.sequences[self.number]

    @property
    def length(self) -> int:
        return self.sequence.num_tokens or len(self.sequence.tokens)

    def note(self, name: str) -> float | None:
        return None if self.notes is None else getattr(self.notes, name)


SORTS: dict[str, Callable[[Sequence[_Answer]], float | None]] = {
    "newest": lambda answers: max(one.sample.created_at for one in answers),
    "reward": lambda answers: _mean([one.note("reward") for one in answers]),
    "spread": lambda answers: _spread([one.note("reward") for one in answers]),
    "advantage": lambda answers: max((abs(one.note("advantage") or 0.0) for one in answers), default=None),
    "length": lambda answers: _mean([float(one.length) for one in answers]),
    "step": lambda answers: max((float(one.note("step") or 0) for one in answers), default=None),
}


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return math.fsum(found) / len(found) if found else None


def _spread(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return max(found) - min(found) if found else None


@listing(
    "/dashboard/groups",
    "List kept answers by prompt",
    answer=fields({"groups": LIST, "cursor": ref("Cursor")}),
    query={
        **PAGE,
        "run": TEXT,
        "step": integer(0, MAX_STEP),
        "least": NUMBER,
        "most": NUMBER,
        "text": TEXT | {"maxLength": MAX_SEARCH},
        "sort": one_of(*SORTS),
        "order": one_of("asc", "desc"),
    },
    filters=("?run={model_id}",),
)
def groups(call: Call) -> JsonObject:
    """Return the groups with an answer that passes every filter. A group keeps all its answers."""
    limit, offset = call.page(default_limit=20)
    sort, order = call.query.get("sort", "newest"), call.query.get("order", "desc")
    if sort not in SORTS or order not in ("asc", "desc"):
        raise UserError(f"the query's sort is {show(sort)} and its order {show(order)}; see /openapi.json for both")
    passes = _filter(call)
    found = [answers for answers in _grouped(call) if any(passes(one) for one in answers)]
    # Groups without a value come last in both orders.
    sign = -1.0 if order == "desc" else 1.0
    keyed = [(SORTS[sort](answers), answers) for answers in found]
    keyed.sort(key=lambda each: math.inf if each[0] is None else sign * each[0])
    ordered = [answers for _, answers in keyed]
    return {
        "groups": [_group(call, answers) for answers in ordered[offset : offset + limit]],
        "cursor": {"offset": offset, "limit": limit, "total_count": len(ordered)},
        "kept": call.services.settings.kept_samples,
    }


def _grouped(call: Call) -> Iterator[list[_Answer]]:
    kept = call.services.kept_samples
    page, _ = kept.page(call.tenant_id, MAX_GROUPED, 0)
    notes = kept.notes(call.tenant_id, [one.request_id for one, _ in page])
    found: dict[tuple[str, str | None, tuple[int, ...]], list[_Answer]] = {}
    for one, content in page:
        key = one.session_id, one.weights, tuple(content.prompt)
        found.setdefault(key, []).extend(
            _Answer(one, content, number, notes.get((one.request_id, number)))
            for number in range(len(content.sequences))
        )
    return (answers for answers in found.values() if answers)


def _filter(call: Call) -> Callable[[_Answer], bool]:
    run, text = call.query.get("run"), call.query.get("text", "").lower()
    if len(text) > MAX_SEARCH:
        raise UserError(f"the query's text has {len(text)} characters; use at most {MAX_SEARCH}")
    step, least, most = (_number(call, name) for name in ("step", "least", "most"))

    def passes(one: _Answer) -> bool:
        reward = one.note("reward")
        if run and run != (one.notes and one.notes.model_id) and run not in (one.sample.weights or ""):
            return False
        if step is not None and one.note("step") != step:
            return False
        if least is not None and (reward is None or reward < least):
            return False
        if most is not None and (reward is None or reward > most):
            return False
        return not text or text in _whole(call, one).lower()

    return passes


def _number(call: Call, name: str) -> float | None:
    given = call.query.get(name)
    if given is None:
        return None
    try:
        found = float(given)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise UserError(f"the query's {name} is {show(given)}; it must be a number")
    return found


def _whole(call: Call, one: _Answer) -> str:
    """Return prompt and answer as text, for the search."""
    tokens = [*one.content.prompt, *one.sequence.tokens]
    return _words(_text(call, one.sample.base_model), tokens) or " ".join(map(str, tokens))


def _group(call: Call, answers: Sequence[_Answer]) -> JsonObject:
    first = answers[0]
    text = _text(call, first.sample.base_model)
    return {
        "prompt_ends": _words(text, first.content.prompt[-4 * PREVIEW_TOKENS :]),
        "prompt_tokens": first.sample.prompt_tokens,
        "weights": first.sample.weights,
        "base_model": first.sample.base_model,
        "created_at": iso(max(one.sample.created_at for one in answers)),
        "answers": [
            {
                "request_id": one.sample.request_id,
                "number": one.number,
                "begins": _words(text, one.sequence.tokens[: 2 * PREVIEW_TOKENS]),
                "tokens": one.length,
                "stop_reason": one.sequence.stop_reason,
                "logprob": _mean(one.sequence.logprobs),
                **{name: one.note(name) for name in ("reward", "advantage", "step")},
                "run": one.notes.model_id if one.notes else None,
            }
            for one in answers
        ],
    }


# Decoded text.


def _shown(sample: KeptSample) -> JsonObject:
    shown: JsonObject = {**asdict(sample), "created_at": iso(sample.created_at)}
    del shown["tenant_id"]
    return shown


def _preview(text: ModelText | None, content: SampleContent) -> JsonObject:
    """Return the end of the prompt and the beginning of the first answer."""
    answer = content.sequences[0].tokens if content.sequences else ()
    return {
        "prompt_ends": _words(text, content.prompt[-PREVIEW_TOKENS:]),
        "answer_begins": _words(text, answer[:PREVIEW_TOKENS]),
    }


def _words(text: ModelText | None, tokens: Sequence[int]) -> str | None:
    return None if text is None else text.decode(tokens)


def _text(call: Call, base_model: str) -> ModelText | None:
    """Return the ModelText of a base model, or None if the model is not served or has no tokenizer."""
    try:
        text = call.services.texts.of(call.services.bases.get(base_model))
        _ = text.tokenizer
    except (NotFoundError, NotSupportedError):
        return None
    return text


def _tokens(text: ModelText | None, tokens: Sequence[int]) -> JsonObject:
    if text is None:
        return {"tokens": tokens, "pieces": None, "text": None}
    pieces = [text.token_bytes(token).decode(errors="replace") for token in tokens]
    return {"tokens": tokens, "pieces": pieces, "text": text.tokenizer.decode(list(tokens), skip_special_tokens=False)}
