"""One sample as requests to an external engine, and their replies as one result.

`Answering` refuses what can never be answered when it is made. `result` asks for every answer with a request of its own
and a seed of its own; what is to be known of the prompt comes with the first. Logprobs that are not ours are asked for
with one request more for each answer. Knows ops and a dialect, no connection.

Letters: T tokens of the prompt, K targets of a row, k entries of a top-k list.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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


class Post(Protocol):
    """What sends requests to the engine."""

    async def beside_others(self, ask: Ask, heard: Callable[[EngineReply], None]) -> EngineReply: ...

    async def apart(self, asks: Sequence[Ask]) -> list[EngineReply]:
        """Together, while nothing else runs."""
        ...


Tell = Callable[[int, EngineReply], None]


class Answering:
    def __init__(self, dialect: Dialect, sample: Sample, context_length: int, vocab_size: int) -> None:
        """Raises UserError if the engine can never answer it as it is asked."""
        self._dialect = dialect
        self._sample = sample
        self._prompt = sample.prompt_T.tolist()
        if not self._prompt or sample.prompt_T.min() < 0 or sample.prompt_T.max() >= vocab_size:
            raise UserError(f"the prompt is empty or holds token ids outside the vocabulary [0, {vocab_size})")
        if sample.images:
            raise UserError(
                f"{sample.images[0].where} is an image, and {dialect.name} is given token ids here; sample with this "
                "server's own sampler (setting sampler), or without images"
            )
        dialect.check(sample.params, alternatives=sample.prompt_alt_tokens_k)
        self._rescores = dialect.rescores(sample.params)
        self._max_tokens = self._room(min(context_length, dialect.max_context_length or context_length))
        self._about_prompt = self._prompt_ask()
        self._stream = sample.stream and dialect.streams and not self._rescores
        # What may be shown before it is complete must come out the same if it has to be drawn again.
        drawn = secrets.randbits(62) if dialect.needs_seeds or self._stream else None
        self._alone = dialect.scores_alone or self._stream
        self._seed = drawn if sample.params.seed is None else sample.params.seed

    async def result(self, post: Post, adapter: str | None, tell: Tell, *, unembedding: bool) -> SampleResult:
        """`unembedding`: whether the adapter changes it."""
        slowly = unembedding and not self._dialect.scores_unembeddings
        try:
            async with asyncio.TaskGroup() as group:
                answers = [
                    group.create_task(self._answer(post, adapter, index, tell, slowly))
                    for index in range(self._sample.num_samples)
                ]
                about = None
                if self._about_prompt is not None and (self._alone or slowly):
                    about = group.create_task(self._scored(post, adapter, self._prompt, self._about_prompt, slowly))
        except BaseExceptionGroup as group_of_errors:
            raise _worst(group_of_errors) from None
        replies = [reply for task in answers for reply in [task.result()]]
        rows = about.result() if about is not None else replies[0].prompt_rows
        if self._about_prompt and (rows is None or len(rows) != len(self._prompt)):
            raise EngineFailedError(f"{self._dialect.name} answered without the logprobs of the prompt")
        return SampleResult(
            request_id=self._sample.request_id,
            sequences=tuple(self._sequence(reply) for reply in replies),
            prompt_logprobs_T=self._own(rows) if self._sample.prompt_logprobs else None,
            topk_prompt=self._topk_prompt(rows) if self._sample.topk_prompt_logprobs else None,
            prompt_cache_hit_tokens=replies[0].cached_tokens,
            target_prompt=self._targets(rows),
        )

    def _room(self, context_length: int) -> int:
        """How many tokens an answer may have."""
        room = context_length - len(self._prompt) - (1 if self._rescores else 0)
        wanted = self._sample.params.max_tokens
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

    async def _answer(self, post: Post, adapter: str | None, index: int, tell: Tell, slowly: bool) -> EngineReply:
        ask = replace(
            self._ask(adapter, self._prompt, self._sample.params, self._max_tokens),
            seed=None if self._seed is None else seed_of(self._seed, index, self._dialect.seed_bits),
            topk=0 if self._rescores else self._sample.topk_sample_logprobs,
            prompt=None if index or self._alone or slowly else self._about_prompt,
            stream=self._stream,
        )
        reply = await post.beside_others(ask, partial(tell, index))
        self._check(reply)
        if self._rescores:
            await self._rescore(post, adapter, reply, slowly)
        if any(np.isnan(reply.logprobs)):
            raise UserError(NOT_FINITE)
        return reply

    def _check(self, reply: EngineReply) -> None:
        if reply.finish == "abort":
            raise EngineGone("it ended the request itself")
        if reply.finish not in ("stop", "length") or not reply.tokens or len(reply.tokens) > self._max_tokens:
            raise EngineFailedError(
                f"{self._dialect.name} answered {len(reply.tokens)} of at most {self._max_tokens} tokens, reason "
                f"{reply.finish!r}"
            )

    async def _rescore(self, post: Post, adapter: str | None, reply: EngineReply, slowly: bool) -> None:
        """The answer's logprobs as those of a prompt: at temperature 1, of the whole distribution."""
        start, k = len(self._prompt), self._sample.topk_sample_logprobs
        rows = await self._scored(post, adapter, [*self._prompt, *reply.tokens], PromptAsk(start, k), slowly)
        reply.logprobs = [row.get(token, np.nan) for token, row in zip(reply.tokens, rows[start:], strict=True)]
        reply.topk = list(rows[start:]) if k else []

    async def _scored(
        self, post: Post, adapter: str | None, tokens: Sequence[int], about: PromptAsk, slowly: bool
    ) -> Sequence[Row]:
        """What is to be known of a prompt, with one request or, `slowly`, with one for each token."""
        if slowly:
            return await self._scored_by_token(post, adapter, tokens, about)
        ask = self._ask(adapter, tokens, SamplingParams(max_tokens=1), 1)
        ask = replace(ask, prompt=about)
        alone = self._dialect.scores_alone
        reply = (await post.apart([ask]))[0] if alone else await post.beside_others(ask, _ignore)
        rows = reply.prompt_rows
        if rows is None or len(rows) != len(tokens):
            raise EngineFailedError(f"{self._dialect.name} answered without the logprobs of the prompt")
        return rows

    async def _scored_by_token(
        self, post: Post, adapter: str | None, tokens: Sequence[int], about: PromptAsk
    ) -> Sequence[Row]:
        """Each token of a prompt as the next one of those before it, which the engine has in its cache.

        Requests for chosen tokens run apart: vLLM, beside them, tells others nothing of their likeliest tokens.
        """
        positions = range(about.first, len(tokens))
        asks = [self._ask(adapter, tokens[:position], SamplingParams(max_tokens=1), 1) for position in positions]
        chosen = [replace(a, only=tuple({tokens[at], *about.ids})) for a, at in zip(asks, positions, strict=True)]
        replies = await post.apart(chosen)
        if about.topk:
            likely = [replace(ask, request_id=secrets.token_hex(12), topk=about.topk) for ask in asks]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(post.beside_others(ask, _ignore)) for ask in likely]
            replies += [task.result() for task in tasks]
        rows: list[dict[int, float]] = [{} for _ in tokens]
        for reply, position in zip(replies, [*positions, *positions][: len(replies)], strict=True):
            self._check(reply)
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

    def _own(self, rows: Sequence[Row] | None) -> F32:
        own_T = np.full(len(self._prompt), np.nan, np.float32)
        for position in range(self._first_own, len(self._prompt) if rows else 0):
            assert rows is not None
            own_T[position] = rows[position].get(self._prompt[position], np.nan)
        if np.isnan(own_T[self._first_own :]).any():
            raise UserError(NOT_FINITE)
        return own_T

    def _topk_prompt(self, rows: Sequence[Row] | None) -> TopK:
        shown = [rows[at] if rows and at >= self._first_own else {} for at in range(len(self._prompt))]
        return _topk(shown, self._sample.topk_prompt_logprobs)

    @property
    def _first_own(self) -> int:
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


@dataclass(slots=True)
class Told:
    """How many tokens of an answer were shown."""

    tokens: int = 0

    def more(self, sample: Sample, index: int, start: int, part: EngineReply) -> Partial | None:
        """What of this part, which begins at `start`, is new."""
        known = max(self.tokens - start, 0)
        if known >= len(part.tokens):
            return None
        k = sample.topk_sample_logprobs
        tops = [likeliest(row, k) for row in part.topk[known:]] if k else []
        self.tokens = start + len(part.tokens)
        return Partial(
            sample.request_id,
            index,
            start + known,
            tuple(part.tokens[known:]),
            tuple(part.logprobs[known:]),
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


def _ignore(_: EngineReply) -> None:
    return None


def _worst(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of several errors, the one that says most: a refusal, before that the engine is gone."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found.append(_worst(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((error for error in found if isinstance(error, UserError)), found[0])
