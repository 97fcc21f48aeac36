"""A sampler without a model: tokens from a seeded generator, one step per request."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from tinsmith.errors import UserError
from tinsmith.samplers import CacheUse
from tinsmith.types import (
    EMPTY_LOGPROB,
    F32,
    I64,
    AltTokens,
    ModelShape,
    Partial,
    Sample,
    SampledSequence,
    SampleResult,
    SparseRows,
    TopK,
)

DEFAULT_MAX_TOKENS = 8
# The first tokens of nano's vocabulary begin and end turns, reasoning and calls: answers of a fake are text.
NUM_CONTROL_TOKENS = 16


class FakeSampler:
    """Finishes its oldest request in each step. The version's weight seeds the tokens."""

    runs_by_itself = False
    inference_server = None
    _paused: Collection[str] = ()

    def __init__(self, shape: ModelShape, versions: Mapping[str, float]) -> None:
        self._shape = shape
        self._versions = versions
        self._waiting: deque[tuple[Sample, float]] = deque()

    @property
    def has_work(self) -> bool:
        return any(sample.request_id not in self._paused for sample, _ in self._waiting)

    def submit(self, sample: Sample) -> None:
        weight = 0.0 if sample.version_id is None else self._versions[sample.version_id]
        self._waiting.append((sample, weight))

    def cancel(self, request_id: str) -> bool:
        before = len(self._waiting)
        self._waiting = deque(entry for entry in self._waiting if entry[0].request_id != request_id)
        return len(self._waiting) < before

    def pause(self, request_ids: Collection[str]) -> None:
        self._paused = frozenset(request_ids)

    def step(self, scopes: Collection[str] | None = None) -> list[tuple[str, SampleResult | UserError]]:
        entry = next((entry for entry in self._waiting if entry[0].request_id not in self._paused), None)
        if entry is None:
            return []
        self._waiting.remove(entry)
        sample, weight = entry
        return [(sample.request_id, self._answer(sample, weight))]

    def partials(self) -> list[Partial]:
        return []

    def cache_use(self) -> CacheUse:
        return CacheUse(0, 0, 0)

    def _answer(self, sample: Sample, weight: float) -> SampleResult:
        length = len(sample.prompt_T)
        seed = [sample.params.seed or 0, int(abs(weight) * 1e6), length]
        sequences = tuple(self._sequence(sample, [*seed, index]) for index in range(sample.num_samples))
        first = 1 if sample.prompt_logprobs_last_n is None else length - sample.prompt_logprobs_last_n
        prompt = np.full(length, -0.5, np.float32)
        prompt[:first] = np.nan
        return SampleResult(
            request_id=sample.request_id,
            sequences=sequences,
            prompt_logprobs_T=prompt if sample.prompt_logprobs else None,
            topk_prompt=_topk(length, sample.topk_prompt_logprobs, num_empty=first),
            target_prompt=_target_logprobs(sample.target_prompt_logprobs),
            alt_tokens=self._alt_tokens(length - 1, sample.prompt_alt_tokens_k, seed),
        )

    def _alt_tokens(self, num_rows: int, k: int, seed: list[int]) -> AltTokens | None:
        if k == 0:
            return None
        tokens = np.random.default_rng(seed).integers(0, self._shape.vocab_size, (num_rows, k))
        return AltTokens(tokens, np.full((num_rows, k), -0.5, np.float32))

    def _sequence(self, sample: Sample, seed: list[int]) -> SampledSequence:
        room = max(0, sample.max_answer_tokens(self._shape.max_context_length))
        count = min(sample.params.max_tokens or room, room, DEFAULT_MAX_TOKENS)
        first = min(NUM_CONTROL_TOKENS, self._shape.vocab_size - 1)
        tokens = np.random.default_rng(seed).integers(first, self._shape.vocab_size, count).astype(np.int32)
        topk = _topk(count, sample.topk_sample_logprobs, num_empty=0)
        return SampledSequence(tokens, np.full(count, -0.25, np.float32), "length", topk)


def _target_logprobs(targets: I64 | SparseRows | None) -> F32 | SparseRows | None:
    if targets is None:
        return None
    ids = targets.values if isinstance(targets, SparseRows) else targets
    logprobs = np.where(ids < 0, 0.0, -0.75).astype(np.float32)
    return replace(targets, values=logprobs) if isinstance(targets, SparseRows) else logprobs


def _topk(length: int, k: int, *, num_empty: int) -> TopK | None:
    if k == 0:
        return None
    token_ids = np.tile(np.arange(k, dtype=np.int32), (length, 1))
    logprobs = np.tile(-np.arange(1, k + 1, dtype=np.float32), (length, 1))
    token_ids[:num_empty], logprobs[:num_empty] = 0, EMPTY_LOGPROB
    return TopK(token_ids, logprobs)
