"""Requests to an external sampling engine and its replies, in a form that does not depend on the engine.

A `Dialect` (vllm.py, sglang.py) turns an `EngineRequest` into a request of its engine's HTTP interface, and a reply
into an `EngineReply`. It is pure: it sends nothing and keeps no state. It refuses by name what its engine cannot do
exactly, before anything is sent. Logprobs are defined as in types.py: those of answers at the sampling temperature over
the whole vocabulary, those of prompts at temperature 1.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.errors import EngineFailedError, NotSupportedError
from tinsmith.types import Adjustments, SamplingParams

MISSING_LOGPROB = -9999.0
"""The value that engines write for NaN and minus infinity, which JSON cannot express."""

NO_ADJUSTMENTS = Adjustments()

MAX_BATCH_ADAPTERS, MAX_LORA_RANK = 8, 64
"""Limits of an engine that this process starts: adapters in one batch, and the rank of an adapter."""

LogprobRow = Mapping[int, float]
"""Logprobs of some tokens at one position."""

Json = dict[str, Any]


def logprobs_match(drawn: Sequence[float], scored: Sequence[float]) -> bool:
    """Whether the logprobs of tokens drawn at temperature 0.5 are all those at temperature 1; then the engine reports
    logprobs at temperature 1.
    """
    pairs = zip(drawn, scored, strict=True)
    return all(abs(sampled - reference) <= 1e-3 * max(1.0, abs(reference)) for sampled, reference in pairs)


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A POST request to the engine."""

    path: str
    body: Json


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """The logprobs to report at each prompt position from `first` (1 or more) on: of the prompt token, of the `topk`
    likeliest tokens, of `ids` or, with `whole_vocabulary`, of all tokens.
    """

    first: int = 1
    topk: int = 0
    ids: tuple[int, ...] = ()
    whole_vocabulary: bool = False


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request for one answer to a prompt, with logprobs of the `topk` likeliest tokens or of those in `only_ids`."""

    request_id: str
    adapter: str | None
    tokens: Sequence[int]
    params: SamplingParams
    max_tokens: int
    seed: int | None = None
    topk: int = 0
    only_ids: tuple[int, ...] = ()
    prompt: PromptScoring | None = None
    cache_scope: str = ""
    stream: bool = False


@dataclass(slots=True)
class EngineReply:
    """An answer, or the part of it in one event of a stream. `finish` is 'stop', 'length', 'abort' or, while the stream
    continues, empty. `prompt_rows[t]` has the logprobs at prompt token t; the first row is empty.
    """

    tokens: list[int]
    logprobs: list[float]
    topk: list[LogprobRow]
    finish: str = ""
    cached_tokens: int = 0
    prompt_rows: list[LogprobRow] | None = None

    def add(self, part: EngineReply) -> None:
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        self.topk += part.topk
        self.finish = part.finish or self.finish
        self.cached_tokens = max(self.cached_tokens, part.cached_tokens)


class Dialect(ABC):
    """The HTTP interface of one kind of engine.

    `name` is the engine's name. `health` is a path that returns 200 while it is up, and `health_asleep` one that does
    so without using the device. `info_paths` are paths to GET once it is up. `seed_bits` is the size of its seeds; an
    engine that `needs_seeds` repeats its answers without one. `takes_unembeddings`: it applies adapters of the
    unembedding to answers; none does so in the logprobs of prompts. `scores_alone`: logprobs of a prompt are correct
    only while no other request runs. `max_context_length` is None until the engine has reported it.
    """

    name: str
    health: str
    health_asleep: str
    info_paths: Sequence[str]
    seed_bits: int
    needs_seeds = False
    root = ""
    """The prefix of the paths that load and unload adapters."""

    environment: Sequence[str]
    module: str
    model_option = "--model-path"
    fixed_options: Sequence[str]
    sleep_option: str
    default_options: Mapping[str, str]
    """Parts of the command that starts an engine; `options` of the user replace `default_options`."""

    def __init__(self, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self.scores_alone = False
        self.takes_unembeddings = True
        self.max_context_length: int | None = None

    @abstractmethod
    def learn(self, answers: Sequence[Json]) -> None:
        """Take the engine's answers to `info_paths`, in order. Raises SettingsError if the engine cannot be used."""

    @abstractmethod
    def learn_mode(self, drawn: Sequence[float], scored: Sequence[float]) -> None:
        """Conclude which logprobs the engine reports, from those of tokens that were drawn at temperature 0.5 and those
        of the same tokens in a prompt. Raises SettingsError if the engine cannot be used.
        """

    def check(self, params: SamplingParams, *, alternatives: int) -> None:
        """Raises NotSupportedError for what the engine cannot do exactly. `alternatives` is the number of alternative
        tokens to draw at each position of the prompt. Masks are refused, because the engine would report logprobs of
        the masked distribution.
        """
        adjustments = params.adjustments or NO_ADJUSTMENTS
        if adjustments.grammar is not None:
            raise NotSupportedError(f"a grammar (response_format, tools) is not supported where {self.name} samples")
        if adjustments.reasoning is not None and not adjustments.reasoning.is_advisory:
            raise NotSupportedError(f"a budget of reasoning is not supported where {self.name} samples; leave it out")
        for name in ("allowed_token_ids", "bad_words", "min_tokens"):
            if getattr(adjustments, name):
                raise NotSupportedError(f"{name} is not supported where {self.name} samples; leave it out")
        if alternatives:
            raise NotSupportedError(
                f"prompt_alt_tokens_k is not supported where {self.name} samples: {self.name} draws no such tokens"
            )

    @abstractmethod
    def prompt_scoring(self, first: int, topk: int, ids: tuple[int, ...], length: int) -> PromptScoring:
        """How to ask for logprobs of a prompt of `length` tokens from position `first` on: of the prompt tokens, of the
        `topk` likeliest and of `ids`. Raises NotSupportedError if the engine would report too many.
        """

    @abstractmethod
    def rescores(self, params: SamplingParams) -> bool:
        """Whether the logprobs of an answer follow another definition, so that a second request must score it."""

    @abstractmethod
    def call(self, request: EngineRequest) -> EngineCall: ...

    def read(self, request: EngineRequest, answer: Json, start: int = 0) -> EngineReply:
        """The answer, or what an event of a stream adds to the first `start` tokens. Raises EngineFailedError if it
        cannot be read.
        """
        try:
            return self._read(request, answer, start)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise EngineFailedError(f"{self.name}'s answer cannot be read: {type(error).__name__}: {error}") from error

    @abstractmethod
    def _read(self, request: EngineRequest, answer: Json, start: int) -> EngineReply: ...

    def abort(self, request_id: str) -> EngineCall | None:
        """The call that aborts a request; None if closing the connection does."""
        return None

    def load(self, name: str, directory: str) -> EngineCall:
        return EngineCall(f"{self.root}/load_lora_adapter", {"lora_name": name, "lora_path": directory})

    def unload(self, name: str) -> EngineCall:
        return EngineCall(f"{self.root}/unload_lora_adapter", {"lora_name": name})

    @abstractmethod
    def sleep(self) -> Sequence[EngineCall]:
        """The calls that release the device, in order, while no request runs."""

    @abstractmethod
    def wake_after(self, num_slept: int) -> list[EngineCall]:
        """The calls that take back, in order, what the first `num_slept` calls of `sleep` released: the weights first,
        the KV cache last.
        """

    def command(self, python: str, model: str, port: int, options: Sequence[str], shares_device: bool) -> list[str]:
        """The command that starts an engine on this machine. Notes how the options change what the engine can do."""
        flags = {option.partition("=")[0] for option in options}
        defaults = [word for flag, value in self.default_options.items() if flag not in flags for word in (flag, value)]
        sleep_flags = [self.sleep_option] if shares_device else []
        address_flags = [self.model_option, model, "--host", "127.0.0.1", "--port", str(port)]
        return ["env", *self.environment, python, "-m", self.module, *address_flags, *self.fixed_options, *sleep_flags,
                *defaults, *options]  # fmt: skip


def derive_seed(seed: int, index: int, bits: int) -> int:
    """The seed of sample `index`. It is a hash, because engines count up from a request's seed, and consecutive seeds
    would share answers.
    """
    digest = hashlib.blake2b(f"{seed},{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits)


def sampling_fields(params: SamplingParams, no_top_k: int) -> Json:
    """The fields with the same name in all engines; `no_top_k` is the engine's top_k for all tokens."""
    adjustments, is_greedy = params.adjustments or NO_ADJUSTMENTS, params.temperature == 0
    fields: Json = {
        "temperature": params.temperature,
        "top_k": no_top_k if is_greedy or params.top_k < 1 else params.top_k,
        "top_p": 1.0 if is_greedy else params.top_p,
        "min_p": 0.0 if is_greedy else adjustments.min_p,
        "repetition_penalty": adjustments.repetition_penalty,
        "presence_penalty": adjustments.presence_penalty,
        "frequency_penalty": adjustments.frequency_penalty,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    return fields | (
        {"logit_bias": {str(token): bias for token, bias in adjustments.logit_bias}} if adjustments.logit_bias else {}
    )


def truncates(params: SamplingParams) -> bool:
    """Whether top_k, top_p or min_p remove tokens from the distribution."""
    if params.temperature == 0:
        return False
    return params.top_k > 0 or params.top_p < 1 or (params.adjustments or NO_ADJUSTMENTS).min_p > 0


def penalises(params: SamplingParams) -> bool:
    """Whether penalties or biases change the logits."""
    adjustments = params.adjustments or NO_ADJUSTMENTS
    return (
        adjustments.repetition_penalty != 1 or adjustments.presence_penalty != 0 or adjustments.frequency_penalty != 0
    ) or bool(adjustments.logit_bias)


def likeliest(row: LogprobRow, k: int) -> list[tuple[int, float]]:
    """The k likeliest tokens of a row, best first."""
    finite = [entry for entry in row.items() if not math.isnan(entry[1])]
    return sorted(finite, key=lambda entry: (-entry[1], entry[0]))[:k]


def logprob_of(value: object) -> float:
    """A logprob from JSON; null and MISSING_LOGPROB become NaN."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EngineFailedError(f"the sampling engine answered {value!r} where a logprob should be")
    return math.nan if value <= MISSING_LOGPROB else float(value)
