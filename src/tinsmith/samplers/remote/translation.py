"""Translates one sample into requests to an external engine, and their replies into one result.

The constructor of `SampleTranslator` refuses what the engine can never answer. `result` sends one request with its own
seed for each answer; the first also asks for logprobs of the prompt. Where the engine's logprobs follow another
definition than ours, one more request for each answer scores it. This module knows a dialect but no connection.

Letters: T tokens of the prompt, K targets of a row, k entries of a top-k list.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from tinsmith.errors import EngineFailedError, UserError
from tinsmith.samplers.remote.connection import EngineLost
from tinsmith.samplers.remote.dialect import (
    Dialect,
    EngineReply,
    EngineRequest,
    LogprobRow,
    PromptScoring,
    derive_seed,
    likeliest,
)
from tinsmith.types import (
    EMPTY_LOGPROB,
    F32,
    I64,
    Partial,
    Sample,
    SampledSequence,
    SampleResult,
    SamplingParams,
    SparseRows,
    TopK,
)

NOT_FINITE = "the logits are not finite: the weights of this version hold, or lead to, NaN or infinite numbers"


OnDelta = Callable[[int, EngineReply], None]
"""Takes the number of an answer's tokens so far, and the next part of it."""


class Sender(Protocol):
    """Sends requests to the engine."""

    async def send(self, request: EngineRequest, on_delta: OnDelta) -> EngineReply: ...

    async def send_exclusively(self, requests: Sequence[EngineRequest]) -> list[EngineReply]:
        """Send these requests together while no others run."""
        ...


Publish = Callable[[int, int, EngineReply], None]
"""Takes the index of an answer, the number of its tokens so far, and the next part of it."""


class SampleTranslator:
    """The requests that answer one sample."""

    def __init__(self, dialect: Dialect, sample: Sample, context_length: int, vocab_size: int) -> None:
        """Raises UserError if the engine can never answer this sample."""
        self._dialect = dialect
        self._sample = sample
        self._prompt = sample.prompt_T.tolist()
        if not self._prompt or sample.prompt_T.min() < 0 or sample.prompt_T.max() >= vocab_size:
            raise UserError(f"the prompt is empty or holds token ids outside the vocabulary [0, {vocab_size})")
        if sample.images:
            raise UserError(
                f"{sample.images[0].path} is an image, but {dialect.name} receives only token ids; sample with this "
                "server's own sampler (setting sampler), or without images"
            )
        dialect.check(sample.params, alternatives=sample.prompt_alt_tokens_k)
        self._rescores = dialect.rescores(sample.params)
        self._engine_context = dialect.max_context_length or context_length
        self._max_tokens = self._answer_room(min(context_length, self._engine_context))
        self._prompt_scores = self._build_prompt_scoring()
        self._stream = sample.stream and not self._rescores
        # A stream may be drawn again after its first tokens were published, so it needs a seed.
        random_seed = secrets.randbits(62) if dialect.needs_seeds or self._stream else None
        self._scores_separately = dialect.scores_alone or self._stream
        self._seed = random_seed if sample.params.seed is None else sample.params.seed

    async def result(self, sender: Sender, adapter: str | None, publish: Publish, *, by_token: bool) -> SampleResult:
        """`by_token`: whether to score prompts token by token, because the adapter adapts the unembedding."""
        try:
            async with asyncio.TaskGroup() as group:
                answer_tasks = [
                    group.create_task(self._answer(sender, adapter, index, publish, by_token))
                    for index in range(self._sample.num_samples)
                ]
                scoring_task = None
                if self._prompt_scores is not None and (self._scores_separately or by_token or not self._max_tokens):
                    scoring_task = group.create_task(self._score_prompt(sender, adapter, self._prompt_scores, by_token))
        except BaseExceptionGroup as group_of_errors:
            raise _pick_error(group_of_errors) from None
        replies = [task.result() for task in answer_tasks]
        rows = scoring_task.result() if scoring_task is not None else replies[0].prompt_rows
        if self._prompt_scores and (rows is None or len(rows) != len(self._prompt)):
            raise EngineFailedError(f"{self._dialect.name} answered without the logprobs of the prompt")
        return SampleResult(
            request_id=self._sample.request_id,
            sequences=tuple(self._sequence(reply) for reply in replies),
            prompt_logprobs_T=self._prompt_logprobs(rows) if self._sample.prompt_logprobs else None,
            topk_prompt=self._topk_prompt(rows) if self._sample.topk_prompt_logprobs else None,
            prompt_cache_hit_tokens=replies[0].cached_tokens,
            target_prompt=self._targets(rows),
        )

    def _answer_room(self, context_length: int) -> int:
        """The most tokens that an answer may have; 0 if the prompt is only scored, since the engine cannot draw the one
        token that may follow a full context.
        """
        room = context_length - len(self._prompt) - (1 if self._rescores else 0)
        max_tokens = self._sample.params.max_tokens
        if (
            room < 1
            and self._sample.scores_prompt
            and (max_tokens or 1) <= self._sample.max_answer_tokens(context_length)
        ):
            return 0
        if room < 1 or (max_tokens or 1) > room:
            spare = ", of which one is needed to score the answer" if self._rescores else ""
            raise UserError(
                f"prompt ({len(self._prompt)} tokens) + max_tokens ({max_tokens or 'at least 1'}) exceed the context "
                f"of {self._dialect.name} ({context_length} tokens{spare})"
            )
        return max_tokens or room

    def _build_prompt_scoring(self) -> PromptScoring | None:
        sample, length = self._sample, len(self._prompt)
        targets = sample.target_prompt_logprobs
        if length < 2 or not (sample.prompt_logprobs or sample.topk_prompt_logprobs or targets is not None):
            return None
        last_n = sample.prompt_logprobs_last_n
        first = 1 if last_n is None or targets is not None else length - last_n
        ids = () if targets is None else tuple(sorted({int(token) for token in _ids(targets) if token >= 0}))
        return self._dialect.prompt_scoring(first, sample.topk_prompt_logprobs, ids, length)

    def _build_request(
        self, adapter: str | None, tokens: Sequence[int], params: SamplingParams, max_tokens: int
    ) -> EngineRequest:
        return EngineRequest(
            secrets.token_hex(12), adapter, tokens, params, max_tokens, cache_scope=self._sample.cache_scope
        )

    async def _answer(
        self, sender: Sender, adapter: str | None, index: int, publish: Publish, by_token: bool
    ) -> EngineReply:
        if not self._max_tokens:
            return EngineReply([], [], [], "length")
        request = replace(
            self._build_request(adapter, self._prompt, self._sample.params, self._max_tokens),
            seed=None if self._seed is None else derive_seed(self._seed, index, self._dialect.seed_bits),
            topk=0 if self._rescores else self._sample.topk_sample_logprobs,
            prompt=None if index or self._scores_separately or by_token else self._prompt_scores,
            stream=self._stream,
        )
        reply = await sender.send(request, partial(publish, index))
        self._check(reply, self._max_tokens)
        if self._rescores:
            await self._rescore(sender, adapter, reply, by_token)
        if any(np.isnan(reply.logprobs)):
            raise UserError(NOT_FINITE)
        return reply

    def _check(self, reply: EngineReply, max_tokens: int) -> None:
        if reply.finish == "abort":
            raise EngineLost("the engine aborted the request")
        if reply.finish not in ("stop", "length") or not reply.tokens or len(reply.tokens) > max_tokens:
            raise EngineFailedError(
                f"{self._dialect.name} answered {len(reply.tokens)} of at most {max_tokens} tokens, reason "
                f"{reply.finish!r}"
            )

    async def _rescore(self, sender: Sender, adapter: str | None, reply: EngineReply, by_token: bool) -> None:
        """Score the answer as part of a prompt: at temperature 1, over the whole vocabulary."""
        start, k = len(self._prompt), self._sample.topk_sample_logprobs
        rows = await self._score_tokens(
            sender, adapter, [*self._prompt, *reply.tokens], PromptScoring(start, k), by_token
        )
        reply.logprobs = [row.get(token, np.nan) for token, row in zip(reply.tokens, rows[start:], strict=True)]
        reply.topk = list(rows[start:]) if k else []

    async def _score_prompt(
        self, sender: Sender, adapter: str | None, scoring: PromptScoring, by_token: bool
    ) -> Sequence[LogprobRow]:
        """Logprobs of the prompt. An engine draws a token after every prompt, so it scores one that fills its context
        without the last token, and that token as a continuation.
        """
        last = len(self._prompt) - 1
        if by_token or last < self._engine_context - 1:
            return await self._score_tokens(sender, adapter, self._prompt, scoring, by_token)
        rows: list[LogprobRow] = [{} for _ in range(last)]
        if scoring.first < last:
            rows = [*await self._score_tokens(sender, adapter, self._prompt[:last], scoring, by_token)]
        return [*rows, (await self._score_by_token(sender, adapter, self._prompt, replace(scoring, first=last)))[last]]

    async def _score_tokens(
        self, sender: Sender, adapter: str | None, tokens: Sequence[int], scoring: PromptScoring, by_token: bool
    ) -> Sequence[LogprobRow]:
        """Logprobs of a prompt, by one request or, with `by_token`, by one request for each token."""
        if by_token:
            return await self._score_by_token(sender, adapter, tokens, scoring)
        request = self._build_request(adapter, tokens, SamplingParams(max_tokens=1), 1)
        request = replace(request, prompt=scoring)
        is_exclusive = self._dialect.scores_alone
        reply = (await sender.send_exclusively([request]))[0] if is_exclusive else await sender.send(request, _ignore)
        rows = reply.prompt_rows
        if rows is None or len(rows) != len(tokens):
            raise EngineFailedError(f"{self._dialect.name} answered without the logprobs of the prompt")
        return rows

    async def _score_by_token(
        self, sender: Sender, adapter: str | None, tokens: Sequence[int], scoring: PromptScoring
    ) -> Sequence[LogprobRow]:
        """Score each token of a prompt as the continuation of its prefix, which the engine has cached.

        Requests for chosen token ids run exclusively, because vLLM omits top logprobs of requests that run beside them.
        """
        positions = range(scoring.first, len(tokens))
        params = SamplingParams(max_tokens=1)
        requests = [self._build_request(adapter, tokens[:position], params, 1) for position in positions]
        target_requests = [
            replace(request, only_ids=tuple({tokens[position], *scoring.ids}))
            for request, position in zip(requests, positions, strict=True)
        ]
        replies = await sender.send_exclusively(target_requests)
        if scoring.topk:
            topk_requests = [
                replace(request, request_id=secrets.token_hex(12), topk=scoring.topk) for request in requests
            ]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(sender.send(request, _ignore)) for request in topk_requests]
            replies += [task.result() for task in tasks]
        rows: list[dict[int, float]] = [{} for _ in tokens]
        for reply, position in zip(replies, [*positions, *positions][: len(replies)], strict=True):
            self._check(reply, 1)
            rows[position].update(reply.topk[0])
        return [*rows]

    def _sequence(self, reply: EngineReply) -> SampledSequence:
        k = self._sample.topk_sample_logprobs
        return SampledSequence(
            tokens_T=np.array(reply.tokens, np.int32),
            logprobs_T=np.array(reply.logprobs, np.float32),
            stop_reason=reply.finish,
            topk=_topk(reply.topk, k) if k else None,
        )

    def _prompt_logprobs(self, rows: Sequence[LogprobRow] | None) -> F32:
        logprobs_T = np.full(len(self._prompt), np.nan, np.float32)
        for position in range(self._first_scored, len(self._prompt) if rows else 0):
            assert rows is not None
            logprobs_T[position] = rows[position].get(self._prompt[position], np.nan)
        if np.isnan(logprobs_T[self._first_scored :]).any():
            raise UserError(NOT_FINITE)
        return logprobs_T

    def _topk_prompt(self, rows: Sequence[LogprobRow] | None) -> TopK:
        positions = range(len(self._prompt))
        scored_rows = [rows[position] if rows and position >= self._first_scored else {} for position in positions]
        return _topk(scored_rows, self._sample.topk_prompt_logprobs)

    @property
    def _first_scored(self) -> int:
        last_n = self._sample.prompt_logprobs_last_n
        return 1 if last_n is None else len(self._prompt) - last_n

    def _targets(self, rows: Sequence[LogprobRow] | None) -> F32 | SparseRows | None:
        targets = self._sample.target_prompt_logprobs
        if targets is None:
            return None
        assert rows is not None
        ids = _ids(targets)
        sizes = np.diff(targets.crow_indices) if isinstance(targets, SparseRows) else targets.shape[1]
        target_rows = np.repeat(np.arange(targets.shape[0]), sizes)
        logprobs = [
            rows[int(row) + 1].get(int(token), np.nan) if token >= 0 else 0.0
            for row, token in zip(target_rows, ids, strict=True)
        ]
        values = np.array(logprobs, np.float32)
        if np.isnan(values).any():
            raise UserError(NOT_FINITE)
        return replace(targets, values=values) if isinstance(targets, SparseRows) else values.reshape(targets.shape)


def new_tokens(sample: Sample, index: int, start: int, part: EngineReply, published: int) -> Partial | None:
    """The tokens of a part of an answer, which begins at token `start`, beyond those that were published; None if there
    are none.
    """
    num_old = max(published - start, 0)
    if num_old >= len(part.tokens):
        return None
    k = sample.topk_sample_logprobs
    tops = [likeliest(row, k) for row in part.topk[num_old:]] if k else []
    return Partial(
        sample.request_id,
        index,
        start + num_old,
        tuple(part.tokens[num_old:]),
        tuple(part.logprobs[num_old:]),
        tuple((tuple(token for token, _ in top), tuple(value for _, value in top)) for top in tops),
    )


def _topk(rows: Sequence[LogprobRow], k: int) -> TopK:
    ids = np.zeros((len(rows), k), np.int32)
    logprobs = np.full((len(rows), k), EMPTY_LOGPROB, np.float32)
    for row, entries in enumerate(rows):
        for column, (token, value) in enumerate(likeliest(entries, k)):
            ids[row, column], logprobs[row, column] = token, value
    return TopK(ids, logprobs)


def _ids(targets: I64 | SparseRows) -> I64:
    return (targets.values if isinstance(targets, SparseRows) else targets.ravel()).astype(np.int64)


def _ignore(_start: int, _part: EngineReply) -> None:
    return None


def _pick_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a group to report: a refusal rather than the loss of the engine."""
    errors: list[BaseException] = []
    for error in group.exceptions:
        errors.append(_pick_error(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((error for error in errors if isinstance(error, UserError)), errors[0])
