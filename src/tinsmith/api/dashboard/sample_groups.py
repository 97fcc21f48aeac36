"""Groups of stored answers: those to the same prompt by the same weights, whichever request or session asked for them.

A group's question is the part of its prompt that differs from the other prompts of its run. Divergence is that of
`losses.divergence`, over the answers that were trained on: d is the training minus the sampling logprob of a token, of
the policy before the optimizer step and of the policy that sampled. Reads the caller's stored samples, changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from tinsmith.api.request import Call, JsonObject
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.errors import NotFoundError, NotSupportedError
from tinsmith.losses.divergence import EFFECTIVE_SHARE, KL_V3, TOKENS, measure_divergence, summarize_divergence
from tinsmith.store.stored_samples import AnswerNotes, StoredSample, StoredSequence
from tinsmith.types import F32, I32

MAX_GROUPED = 2000
"""Samples that are read for groups: the newest of the run, or of the tenant."""

MAX_QUESTION_CHARS = 600
_CUT = " \u2026 "


@dataclass(slots=True)
class GroupAnswer:
    """An answer as arrays, which are compact; logprobs are NaN where the sampler gave none."""

    sample: StoredSample
    index: int
    tokens_T: I32
    logprobs_T: F32
    stop_reason: str
    num_tokens: int
    notes: AnswerNotes | None = None

    def note(self, name: str) -> float | None:
        return None if self.notes is None else getattr(self.notes, name)

    def divergence_sums(self) -> dict[str, float]:
        """The sums of losses.divergence; empty if the answer was not trained on."""
        training_T = None if self.notes is None else self.place(self.notes.logprobs)
        if training_T is None:
            return {}
        is_trained_T = np.isfinite(training_T)
        return measure_divergence(training_T[is_trained_T], self.logprobs_T[is_trained_T])

    def place(self, values: F32 | None) -> F32 | None:
        return place_tail(values, self.num_tokens, len(self.tokens_T))


@dataclass(slots=True)
class AnswerGroup:
    """The answers to one prompt by one weight version, oldest first. `weights_step` are the optimizer steps that the
    weights have had; None if that is not recorded.
    """

    prompt_id: str
    prompt_T: I32
    answers: list[GroupAnswer] = field(default_factory=list)
    weights_step: int | None = None

    @property
    def newest(self) -> StoredSample:
        return self.answers[-1].sample

    def values(self, name: str) -> list[float]:
        """The values of a note of the answers that have it."""
        return [value for answer in self.answers if (value := answer.note(name)) is not None]

    @property
    def step(self) -> int | None:
        """The optimizer step that first trained on one of the answers."""
        return min((int(step) for step in self.values("step")), default=None)


def place_tail(values: F32 | None, num_tokens: int, num_stored: int) -> F32 | None:
    """Return values of an answer's last tokens by token, NaN where there is none. The stored tokens, for which they are
    returned, are the first `num_stored` of `num_tokens`.
    """
    if values is None:
        return None
    start = num_tokens - len(values)  # negative if the trained positions began before the answer
    values_T = np.full(num_tokens, np.nan, np.float32)
    values_T[max(0, start) :] = values[max(0, -start) :]
    return values_T[:num_stored]


def list_placed(values: F32 | None, sequence: StoredSequence) -> list[float | None] | None:
    """Return `place_tail` of an answer as a list, with None where there is no number."""
    placed_T = place_tail(values, sequence.num_sampled, len(sequence.tokens))
    if placed_T is None:
        return None
    rounded = np.round(placed_T.astype(np.float64), 6)
    return [value if math.isfinite(value) else None for value in rounded.tolist()]


def read_groups(call: Call, model_id: str = "") -> list[AnswerGroup]:
    """Return the groups of the newest stored samples, of a run or of all; the one with the newest sample is first."""
    store = call.services.stored_samples
    groups: dict[tuple[str, str | None, str], AnswerGroup] = {}
    samples: list[StoredSample] = []
    for sample, content in store.read(call.tenant_id, store.list_positions(call.tenant_id, MAX_GROUPED, model_id)):
        key = sample.base_model, sample.weights, sample.prompt_digest
        group = groups.pop(key, None) or AnswerGroup(sample.prompt_digest, np.array(content.prompt, np.int32))
        groups[key] = group
        group.answers += [_compact(sample, index, sequence) for index, sequence in enumerate(content.sequences)]
        samples.append(sample)
    notes = store.notes(call.tenant_id, [sample.request_id for sample in samples])
    steps = store.weights_steps(call.tenant_id, samples)
    for (_, weights, _), group in groups.items():
        group.weights_step = steps.get(weights or "")
        for answer in group.answers:
            answer.notes = notes.get((answer.sample.request_id, answer.index))
    return [group for group in reversed(groups.values()) if group.answers]


def _compact(sample: StoredSample, index: int, sequence: StoredSequence) -> GroupAnswer:
    tokens_T = np.array(sequence.tokens, np.int32)
    logprobs_T = np.array(sequence.logprobs, np.float32)  # None becomes NaN
    return GroupAnswer(sample, index, tokens_T, logprobs_T, sequence.stop_reason, sequence.num_sampled)


# Numbers.


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are reported."""
    reported = [value for value in values if value is not None]
    return math.fsum(reported) / len(reported) if reported else None


@dataclass(frozen=True, slots=True)
class Divergence:
    """The k3 estimate of KL(sampling || training) per token, and the effective sample share, over `trained_tokens`.
    None without a token.
    """

    kl: float | None
    effective_share: float | None
    trained_tokens: int


def summarize(sums: Iterable[Mapping[str, float]]) -> Divergence:
    """Return the divergence of answers from their sums."""
    total: dict[str, float] = {}
    for of_answer in sums:
        for name, value in of_answer.items():
            if name.endswith(":sum"):
                total[name] = total.get(name, 0.0) + value
    estimates = summarize_divergence(total)
    return Divergence(estimates.get(KL_V3), estimates.get(EFFECTIVE_SHARE), int(total.get(f"{TOKENS}:sum", 0)))


def summarize_steps(groups: Sequence[AnswerGroup]) -> list[JsonObject]:
    """Return numbers of the answers of each optimizer step that trained on some, in the order of steps."""
    answers_by_step: dict[int, list[GroupAnswer]] = {}
    for group in groups:
        for answer in group.answers:
            if (step := answer.note("step")) is not None:
                answers_by_step.setdefault(int(step), []).append(answer)
    return [
        {
            "step": step,
            "answers": len(answers),
            "reward": mean([answer.note("reward") for answer in answers]),
            **asdict(summarize(answer.divergence_sums() for answer in answers)),
        }
        for step, answers in sorted(answers_by_step.items())
    ]


# Text.


def find_tokenizer(call: Call, base_model: str) -> ModelTokenizer | None:
    """Return the tokenizer of a base model, or None if the model is not served or has no tokenizer."""
    try:
        tokenizer = call.services.tokenizers.get(call.services.bases.get(base_model))
        _ = tokenizer.backend_tokenizer
    except (NotFoundError, NotSupportedError):
        return None
    return tokenizer


def spell(tokenizer: ModelTokenizer | None, tokens: Sequence[int] | I32, *, special: bool = False) -> str:
    """Return tokens as text, or as numbers without a tokenizer. `special` includes special tokens."""
    ids = [int(token) for token in tokens]
    return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids, special=special)


@dataclass(frozen=True, slots=True)
class CommonEnds:
    """How many tokens all prompts of a run have in common at their beginning, and at their end."""

    before: int
    after: int


def find_common_ends(groups: Sequence[AnswerGroup]) -> dict[tuple[str, str], CommonEnds]:
    """Return the common ends by base model and run. A single prompt has none."""
    prompts_by_run: dict[tuple[str, str], dict[str, I32]] = {}
    for group in groups:
        run = group.newest.base_model, group.newest.model_id
        prompts_by_run.setdefault(run, {})[group.prompt_id] = group.prompt_T
    return {run: _common_ends(list(prompts.values())) for run, prompts in prompts_by_run.items()}


def _common_ends(prompts: Sequence[I32]) -> CommonEnds:
    first = prompts[0]
    if len(prompts) == 1:
        return CommonEnds(0, 0)
    before = after = min(map(len, prompts))
    shortest = before
    for prompt in prompts[1:]:
        before = _count_equal(first[:before], prompt[:before])
        after = _count_equal(first[::-1][:after], prompt[::-1][:after])
    return CommonEnds(before, min(after, shortest - before))


def _count_equal(first: I32, second: I32) -> int:
    """The length of the common beginning of two arrays of the same length."""
    different = np.flatnonzero(first != second)
    return int(different[0]) if len(different) else len(first)


def write_question(tokenizer: ModelTokenizer | None, prompt_T: I32, ends: CommonEnds) -> str:
    """Return the text between the common ends, widened to whole words; the whole prompt if nothing is left."""
    if tokenizer is None:
        return _shorten(spell(None, prompt_T[ends.before : len(prompt_T) - ends.after]) or spell(None, prompt_T))
    before, stop = ends.before, len(prompt_T) - ends.after
    body = spell(tokenizer, prompt_T[before:stop])
    while before and body.startswith("\ufffd"):  # a character whose first bytes are common
        before -= 1
        body = spell(tokenizer, prompt_T[before:stop])
    while stop < len(prompt_T) and body.endswith("\ufffd"):
        stop += 1
        body = spell(tokenizer, prompt_T[before:stop])
    if not body.strip():
        return _shorten(spell(tokenizer, prompt_T).strip())
    head, tail = spell(tokenizer, prompt_T[:before]), spell(tokenizer, prompt_T[stop:])
    if re.match(r"\w", body) and (word := re.search(r"\w+\Z", head)):
        body = word[0] + body
    if re.search(r"\w\Z", body) and (word := re.match(r"\w+", tail)):
        body += word[0]
    return _shorten(body.strip())


def _shorten(text: str) -> str:
    half = MAX_QUESTION_CHARS // 2
    return text if len(text) <= MAX_QUESTION_CHARS else text[:half] + _CUT + text[-half:]
