"""Requests to an external sampling engine and its replies, in a form that does not depend on the engine.

A `Dialect` (vllm.py, sglang.py) turns an `Ask` into a request of its engine's HTTP interface, and a reply into an
`EngineReply`. It is pure: it sends nothing and keeps no state. It refuses by name what its engine cannot do exactly,
before anything is sent. Logprobs are defined as in types.py: those of answers at the sampling temperature over the
whole vocabulary, those of prompts at temperature 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tinsmith.errors import EngineFailedError, NotSupportedError
from tinsmith.types import Adjustments, SamplingParams

LEAST_LOGPROB = -9999.0
"""What engines write for a logprob that JSON has no word for: NaN, or minus infinity."""

NO_ADJUSTMENTS = Adjustments()

Row = Mapping[int, float]
"""Logprobs of some tokens at one position."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One POST."""

    path: str
    body: Json


@dataclass(frozen=True, slots=True)
class PromptAsk:
    """Logprobs of the prompt: of its own tokens from `first` (1 or more) on, of the k likeliest, of `ids` or, with
    `everything`, of the whole vocabulary.
    """

    first: int = 1
    topk: int = 0
    ids: tuple[int, ...] = ()
    everything: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer to one prompt, with the likeliest tokens of each position, or with `only` these."""

    request_id: str
    adapter: str | None
    tokens: Sequence[int]
    params: SamplingParams
    max_tokens: int
    seed: int | None = None
    topk: int = 0
    only: tuple[int, ...] = ()
    prompt: PromptAsk | None = None
    cache_scope: str = ""
    stream: bool = False


@dataclass(slots=True)
class EngineReply:
    """An answer, or the part of it that one event of a stream brings. `finish` is 'stop', 'length', 'abort' or, as long
    as there is more to come, empty. `prompt_rows[t]` is about prompt token t; the first is empty.
    """

    tokens: list[int]
    logprobs: list[float]
    topk: list[Row]
    finish: str = ""
    cached_tokens: int = 0
    prompt_rows: list[Row] | None = None

    def add(self, more: EngineReply) -> None:
        self.tokens += more.tokens
        self.logprobs += more.logprobs
        self.topk += more.topk
        self.finish = more.finish or self.finish
        self.cached_tokens = max(self.cached_tokens, more.cached_tokens)


class Dialect(Protocol):
    """`name` is the engine's, `health` a path that answers 200 when it is up. `seed_bits`: how long its seeds are;
    `needs_seeds`: without one its answers are always the same. `takes_unembeddings`: it applies adapters of the
    unembedding; `scores_unembeddings`: to prompts, too; `scores_alone`: prompts are right only while nothing else runs.
    `max_context_length` is its own bound, once it is known.
    """

    name: str
    health: str
    scores_alone: bool
    takes_unembeddings: bool
    scores_unembeddings: bool
    streams: bool
    needs_seeds: bool
    seed_bits: int
    max_context_length: int | None

    def learn(self, facts: Sequence[Json]) -> None:
        """Take in what the engine answered to `questions`, in their order. Raises SettingsError if it cannot serve."""
        ...

    def questions(self) -> Sequence[str]:
        """Paths to GET once the engine is up."""
        ...

    def learn_mode(self, drawn: float, scored: float) -> None:
        """Take in which logprobs it reports: that of a token with an answer at temperature 0.5, and the same token's as
        part of a prompt. Raises SettingsError if it cannot serve.
        """
        ...

    def check(self, params: SamplingParams, *, alternatives: int) -> None:
        """Raises NotSupportedError for what the engine cannot do exactly; `alternatives` is how many draws in place of
        each token of the prompt are wanted.
        """
        ...

    def about_prompt(self, first: int, topk: int, ids: tuple[int, ...], length: int) -> PromptAsk:
        """How to ask for logprobs of a prompt of so many tokens, at all positions from `first` on: of its own, of the k
        likeliest, and of `ids`. Raises NotSupportedError if that is too much.
        """
        ...

    def rescores(self, params: SamplingParams) -> bool:
        """Whether the logprobs that come with an answer are not ours: they are asked for with a second request."""
        ...

    def call(self, ask: Ask) -> EngineCall: ...

    def read(self, ask: Ask, answer: Json) -> EngineReply:
        """Raises EngineFailedError if the answer is not one."""
        ...

    def abort(self, request_id: str) -> EngineCall | None:
        """What ends a request, if closing its connection does not."""
        ...

    def load(self, name: str, directory: str) -> EngineCall: ...

    def unload(self, name: str) -> EngineCall: ...

    def sleep(self) -> Sequence[EngineCall]:
        """What leaves the device to others, in this order, when nothing runs."""
        ...

    def wake(self) -> Sequence[EngineCall]:
        """What takes it back, in this order."""
        ...

    def command(self, python: str, model: str, port: int, options: Sequence[str], shares_device: bool) -> list[str]:
        """What starts an engine on this machine; what the options say of it is taken in."""
        ...


def seed_of(seed: int, index: int, bits: int) -> int:
    """The seed of sample `index`. Engines count up from a request's seed, so that neighbouring seeds share answers; a
    hash does not.
    """
    digest = hashlib.blake2b(f"{seed},{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits)


def refuse_masks(params: SamplingParams, engine: str) -> None:
    """Raises NotSupportedError for masks, after which an engine reports logprobs of what they leave."""
    given = params.adjustments or NO_ADJUSTMENTS
    for name in ("allowed_token_ids", "bad_words", "min_tokens"):
        if getattr(given, name):
            raise NotSupportedError(f"{name} is not supported where {engine} samples; leave it out")


def truncates(params: SamplingParams) -> bool:
    """Whether tokens are left out of the distribution that is drawn from."""
    if params.temperature == 0:
        return False
    return params.top_k > 0 or params.top_p < 1 or (params.adjustments or NO_ADJUSTMENTS).min_p > 0


def penalises(params: SamplingParams) -> bool:
    """Whether logits are changed before the temperature."""
    given = params.adjustments or NO_ADJUSTMENTS
    return (given.repetition_penalty != 1 or given.presence_penalty != 0 or given.frequency_penalty != 0) or bool(
        given.logit_bias
    )


def likeliest(row: Row, k: int) -> list[tuple[int, float]]:
    """The k likeliest tokens of a row, best first."""
    known = [entry for entry in row.items() if not math.isnan(entry[1])]
    return sorted(known, key=lambda entry: (-entry[1], entry[0]))[:k]


def number(value: object, what: str) -> float:
    """A logprob as JSON has it; not a number is NaN."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EngineFailedError(f"the sampling engine answered {value!r} where {what} should be")
    return math.nan if value <= LEAST_LOGPROB else float(value)
