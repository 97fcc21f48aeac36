"""Translates one sample into requests to an external engine, and their replies into one result.

The constructor of `Answering` refuses what the engine can never answer. `result` sends one request with its own seed
for each answer; the first also asks for logprobs of the prompt. Where the engine's logprobs follow another definition
than ours, one more request for each answer scores it. This module knows a dialect but no connection.

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
from tinsmith.samplers.remote.connection import EngineGone
from tinsmith.samplers.remote.dialect import Ask, Dialect, EngineReply, PromptAsk, Row, likeliest, seed_of
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


OnPart = Callable[[int, EngineReply], None]
"""Takes the number of an answer's tokens so far, and the next part of it."""


class Sender(Protocol):
    """Sends requests to the engine."""

    async def send(self, ask: Ask, on_part: OnPart) -> EngineReply: ...

    async def send_exclusively(self, asks: Sequence[Ask]) -> list[EngineReply]:
        """Send these requests together while no others run."""
        ...


Publish = Callable[[int, int, EngineReply], None]
"""Takes the index of an answer, the number of its tokens so far, and the next part of it."""


class Answering:
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
        self._max_tokens = self._room(min(context_length, self._engine_context))
        self._prompt_scores = self._prompt_ask()
        self._stream = sample.stream and not self._rescores
        # A stream may be drawn again after its first tokens were published, so it needs a seed.
        drawn = secrets.randbits(62) if dialect.needs_seeds or self._stream else None
        self._alone = dialect.scores_alone or self._stream
        self._seed = drawn if sample.params.seed is None else sample.params.seed

    async def result(self, sender: Sender, adapter: str | None, publish: Publish, *, by_token: bool) -> SampleResult:
        """`by_token`: whether to score prompts token by token, because the adapter adapts the unembedding."""
        try:
            async with asyncio.TaskGroup() as group:
                answers = [
                    group.create_task(self._answer(sender, adapter, index, publish, by_token))
                    for index in range(self._sample.num_samples)
                ]
                scored = None
                if self._prompt_scores is not None and (self._alone or by_token or not self._max_tokens):
                    scored = group.create_task(self._score_prompt(sender, adapter, self._prompt_scores, by_token))
        except BaseExceptionGroup as group_of_errors:
            raise _worst(group_of_errors) from None
        replies = [task.result() for task in answers]
        rows = scored.result() if scored is not None else replies[0].prompt_rows
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

    def _room(self, context_length: int) -> int:
        """The most tokens that an answer may have; 0 if the prompt is only scored, since the engine cannot draw the one
        token that may follow a full context.
        """
        room = context_length - len(self._prompt) - (1 if self._rescores else 0)
        wanted = self._sample.params.max_tokens
        if room < 1 and self._sample.scores_prompt and (wanted or 1) <= self._sample.max_answer_tokens(context_length):
            return 0
        if room < 1 or (wanted or 1) > room:
            spare = ", of which one is needed to score the answer" if self._rescores else ""
            raise UserError(
                f"prompt ({len(self._prompt)} tokens) + max_tokens ({wanted or 'at least 1'}) exceed the context of "
                f"{self._dialect.name} ({context_length} tokens{spare})"
            )
        return wanted or room

    def _prompt_ask(self) -> PromptAsk | None:
        sample, length = self._sample, len(self._prompt)
        targets = sample.target_prompt_logprobs
        if length < 2 or not (sample.prompt_logprobs or sample.topk_prompt_logprobs or targets is not None):
            return None
        last_n = sample.prompt_logprobs_last_n
        first = 1 if last_n is None or targets is not None else length - last_n
        ids = () if targets is None else tuple(sorted({int(one) for one in _ids(targets) if one >= 0}))
        return self._dialect.about_prompt(first, sample.topk_prompt_logprobs, ids, length)

    def _ask(self, adapter: str | None, tokens: Sequence[int], params: SamplingParams, max_tokens: int) -> Ask:
        return Ask(secrets.token_hex(12), adapter, tokens, params, max_tokens, cache_scope=self._sample.cache_scope)

    async def _answer(
        self, sender: Sender, adapter: str | None, index: int, publish: Publish, by_token: bool
    ) -> EngineReply:
        if not self._max_tokens:
            return EngineReply([], [], [], "length")
        ask = replace(
            self._ask(adapter, self._prompt, self._sample.params, self._max_tokens),
            seed=None if self._seed is None else seed_of(self._seed, index, self._dialect.seed_bits),
            topk=0 if self._rescores else self._sample.topk_sample_logprobs,
            prompt=None if index or self._alone or by_token else self._prompt_scores,
            stream=self._stream,
        )
        reply = await sender.send(ask, partial(publish, index))
        self._check(reply, self._max_tokens)
        if self._rescores:
            await self._rescore(sender, adapter, reply, by_token)
        if any(np.isnan(reply.logprobs)):
            raise UserError(NOT_FINITE)
        return reply

    def _check(self, reply: EngineReply, max_tokens: int) -> None:
        if reply.finish == "abort":
            raise EngineGone("the engine aborted the request")
        if reply.finish not in ("stop", "length") or not reply.tokens or len(reply.tokens) > max_tokens:
            raise EngineFailedError(
                f"{self._dialect.name} answered {len(reply.tokens)} of at most {max_tokens} tokens, reason "
                f"{reply.finish!r}"
            )

    async def _rescore(self, sender: Sender, adapter: str | None, reply: EngineReply, by_token: bool) -> None:
        """Score the answer as part of a prompt: at temperature 1, over the whole vocabulary."""
        start, k = len(self._prompt), self._sample.topk_sample_logprobs
        rows = await self._scored(sender, adapter, [*self._prompt, *reply.tokens], PromptAsk(start, k), by_token)
        reply.logprobs = [row.get(token, np.nan) for token, row in zip(reply.tokens, rows[start:], strict=True)]
        reply.topk = list(rows[start:]) if k else []

    async def _score_prompt(
        self, sender: Sender, adapter: str | None, about: PromptAsk, by_token: bool
    ) -> Sequence[Row]:
        """Logprobs of the prompt. An engine draws a token after every prompt, so it scores one that fills its context
        without the last token, and that token as a continuation.
        """
        last = len(self._prompt) - 1
        if by_token or last < self._engine_context - 1:
            return await self._scored(sender, adapter, self._prompt, about, by_token)
        rows: list[Row] = [{} for _ in range(last)]
        if about.first < last:
            rows = [*await self._scored(sender, adapter, self._prompt[:last], about, by_token)]
        return [*rows, (await self._scored_by_token(sender, adapter, self._prompt, replace(about, first=last)))[last]]

    async def _scored(
        self, sender: Sender, adapter: str | None, tokens: Sequence[int], about: PromptAsk, by_token: bool
    ) -> Sequence[Row]:
        """Logprobs of a prompt, by one request or, with `by_token`, by one request for each token."""
        if by_token:
            return await self._scored_by_token(sender, adapter, tokens, about)
        ask = self._ask(adapter, tokens, SamplingParams(max_tokens=1), 1)
        ask = replace(ask, prompt=about)
        alone = self._dialect.scores_alone
        reply = (await sender.send_exclusively([ask]))[0] if alone else await sender.send(ask, _ignore)
        rows = reply.prompt_rows
        if rows is None or len(rows) != len(tokens):
            raise EngineFailedError(f"{self._dialect.name} answered without the logprobs of the prompt")
        return rows

    async def _scored_by_token(
        self, sender: Sender, adapter: str | None, tokens: Sequence[int], about: PromptAsk
    ) -> Sequence[Row]:
        """Score each token of a prompt as the continuation of its prefix, which the engine has cached.

        Requests for chosen token ids run exclusively, because vLLM omits top logprobs of requests that run beside them.
        """
        positions = range(about.first, len(tokens))
        asks = [self._ask(adapter, tokens[:position], SamplingParams(max_tokens=1), 1) for position in positions]
        chosen = [replace(a, only=tuple({tokens[at], *about.ids})) for a, at in zip(asks, positions, strict=True)]
        replies = await sender.send_exclusively(chosen)
        if about.topk:
            likely = [replace(ask, request_id=secrets.token_hex(12), topk=about.topk) for ask in asks]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(sender.send(ask, _ignore)) for ask in likely]
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

    def _prompt_logprobs(self, rows: Sequence[Row] | None) -> F32:
        logprobs_T = np.full(len(self._prompt), np.nan, np.float32)
        for position in range(self._first_scored, len(self._prompt) if rows else 0):
            assert rows is not None
            logprobs_T[position] = rows[position].get(self._prompt[position], np.nan)
        if np.isnan(logprobs_T[self._first_scored :]).any():
            raise UserError(NOT_FINITE)
        return logprobs_T

    def _topk_prompt(self, rows: Sequence[Row] | None) -> TopK:
        shown = [rows[at] if rows and at >= self._first_scored else {} for at in range(len(self._prompt))]
        return _topk(shown, self._sample.topk_prompt_logprobs)

    @property
    def _first_scored(self) -> int:
        last_n = self._sample.prompt_logprobs_last_n
        return 1 if last_n is None else len(self._prompt) - last_n

    def _targets(self, rows: Sequence[Row] | None) -> F32 | SparseRows | None:
        targets = self._sample.target_prompt_logprobs
        if targets is None:
            return None
        assert rows is not None
        ids = _ids(targets)
        sizes = np.diff(targets.crow_indices) if isinstance(targets, SparseRows) else targets.shape[1]
        at = np.repeat(np.arange(targets.shape[0]), sizes)
        told = [rows[int(row) + 1].get(int(one), np.nan) if one >= 0 else 0.0 for row, one in zip(at, ids, strict=True)]
        values = np.array(told, np.float32)
        if np.isnan(values).any():
            raise UserError(NOT_FINITE)
        return replace(targets, values=values) if isinstance(targets, SparseRows) else values.reshape(targets.shape)


def new_tokens(sample: Sample, index: int, start: int, part: EngineReply, published: int) -> Partial | None:
    """The tokens of a part of an answer, which begins at token `start`, beyond those that were published; None if there
    are none.
    """
    old = max(published - start, 0)
    if old >= len(part.tokens):
        return None
    k = sample.topk_sample_logprobs
    tops = [likeliest(row, k) for row in part.topk[old:]] if k else []
    return Partial(
        sample.request_id,
        index,
        start + old,
        tuple(part.tokens[old:]),
        tuple(part.logprobs[old:]),
        tuple((tuple(token for token, _ in top), tuple(value for _, value in top)) for top in tops),
    )


def _topk(rows: Sequence[Row], k: int) -> TopK:
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


def _worst(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The most useful error of a group: a refusal rather than the loss of the engine."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found.append(_worst(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((error for error in found if isinstance(error, UserError)), found[0])
