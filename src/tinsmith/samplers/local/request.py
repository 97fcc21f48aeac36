"""State of a sampling request and of each answer that is being generated for it.

A `Request` captures its weights when it arrives, so a version may be replaced or dropped while the request runs. A
`Sequence` is one answer: prompt and generated tokens, the blocks that cache the first `num_cached` of them, and the
state after those in a stateful model. The remaining `num_pending` tokens go through the model next: many for a prompt,
one while decoding, many again after a preemption, which drops the blocks and keeps the tokens. The last `num_unread`
tokens are drawn and still on the device: they count, but their values are unknown. No arithmetic, no model.

Letters: T tokens, k entries of a top-k row.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.vision import ImageInput
from tinsmith.samplers.local.kv_cache import chain_key, root_key
from tinsmith.samplers.local.prompt_logprobs import PromptScores, empty_topk
from tinsmith.samplers.local.reasoning import Constraint
from tinsmith.samplers.local.state_pool import SequenceState
from tinsmith.types import F32, I32, I64, Sample, SampledSequence, SampleResult

TopRow = tuple[I32, F32]
"""The top-k tokens of one position and their logprobs."""


Decode = Callable[[list[int]], str]

WINDOW_TOKENS = 24  # decoded per token; the window is then cut back to KEEP_TOKENS
KEEP_TOKENS = 8  # a character has at most 4 bytes, a token at least one, so an unfinished character is inside
UNFINISHED = "\ufffd"  # decoders write this for bytes that are not (yet) a character


class StopRule:
    """When a sequence stops: end-of-sequence tokens, stop tokens, and stop strings in the decoded text.

    It takes one token at a time and returns whether that token completes a stop. Strings are matched against the text
    that a client decodes, special tokens included; a string may span tokens, and a character may be split over tokens.
    Each token decodes a window of at most WINDOW_TOKENS tokens, never the whole answer.
    """

    def __init__(self, decode: Decode, *, strings: Seq[str], tokens: frozenset[int], min_tokens: int = 0) -> None:
        """`tokens` holds every token that stops the sequence, including end-of-sequence tokens. The first `min_tokens`
        tokens cannot complete a stop string.
        """
        self._decode = decode
        self.tokens = tokens
        self._min_tokens = min_tokens
        self._num_pushed = 0
        self._strings = tuple(text for text in strings if text)
        self._tail_length = max((len(text) for text in self._strings), default=1) - 1
        self._tail = ""  # the last characters before the window's new ones, shorter than any stop string
        self._window: list[int] = []
        self._num_matched = 0  # characters of the window's text that are already matched

    def push(self, token: int) -> bool:
        """Whether the sequence ends with this token."""
        return token in self.tokens or (bool(self._strings) and self._push_text(token))

    def _push_text(self, token: int) -> bool:
        self._num_pushed += 1
        self._window.append(token)
        text = self._stable_text()
        new, self._num_matched = text[self._num_matched :], max(self._num_matched, len(text))
        if new:
            recent = self._tail + new
            if self._num_pushed > self._min_tokens:
                for stop in self._strings:
                    if recent.find(stop, max(len(self._tail) - len(stop) + 1, 0)) >= 0:
                        return True
            self._tail = recent[len(recent) - min(self._tail_length, len(recent)) :]
        if len(self._window) >= WINDOW_TOKENS:
            del self._window[:-KEEP_TOKENS]
            self._num_matched = len(self._stable_text())
        return False

    def _stable_text(self) -> str:
        """The window's text without a final character that later tokens may still complete."""
        return self._decode(self._window).rstrip(UNFINISHED)


@dataclass(slots=True, eq=False)
class Weights:
    """Weights that requests run on: the base model or an immutable adapter.

    `weights_id` is never reused; it orders the rows of a step and is the namespace of the cache blocks. A replaced or
    dropped version is no longer `alive`: its requests continue, but their blocks are not shared any more.
    """

    adapter: Adapter | None
    weights_id: int
    alive: bool = True


class Request:
    def __init__(
        self,
        sample: Sample,
        weights: Weights,
        arrival_index: int,
        max_new_tokens: int,
        image_input: ImageInput | None = None,
    ) -> None:
        """`image_input`: the images of the prompt and its positions; None without images."""
        self.sample = sample
        self.image_input = image_input
        self.num_prompt = len(sample.prompt_T)
        self.weights = weights
        self.arrival_index = arrival_index
        self.max_new_tokens = max_new_tokens
        self.seed = secrets.randbits(64) if sample.params.seed is None else sample.params.seed
        self.prompt_cache_hit_tokens: int | None = None
        self.max_length = self.num_prompt + max_new_tokens
        self.forked = sample.num_samples == 1
        """Whether all of its answers exist."""
        self.scores = PromptScores(sample, self.seed)
        self._answers: dict[int, SampledSequence] = {}

    @cached_property
    def draw(self) -> tuple[float, float, float, float, float]:
        """Temperature, top_k, top_p, min_p, and the number of top-k logprobs to return, for `DrawParams`."""
        params = self.sample.params
        min_p = params.adjustments.min_p if params.adjustments else 0.0
        return params.temperature, params.top_k, params.top_p, min_p, self.sample.topk_sample_logprobs

    @cached_property
    def needs_answer(self) -> bool:
        """Whether drawing a token depends on the values of the answer's tokens so far."""
        adjustments = self.sample.params.adjustments
        if adjustments is None:
            return False
        is_constrained = adjustments.grammar or adjustments.reasoning or adjustments.bad_words
        return bool(is_constrained) or adjustments.has_penalty

    @cached_property
    def allowed_ids(self) -> I64:
        """The tokens that the request allows; empty: all."""
        adjustments = self.sample.params.adjustments
        return np.array(adjustments.allowed_token_ids if adjustments else (), np.int64)

    @cached_property
    def prompt_ids(self) -> I64:
        """The distinct tokens of the prompt."""
        return np.unique(self.sample.prompt_T).astype(np.int64)

    def stop_rule(self, decode: Decode, eos_token_ids: frozenset[int]) -> StopRule:
        params = self.sample.params
        tokens = frozenset(params.stop_tokens) | (eos_token_ids if params.stop_eos else frozenset())
        min_tokens = params.adjustments.min_tokens if params.adjustments else 0
        return StopRule(decode, strings=params.stop_strings, tokens=tokens, min_tokens=min_tokens)

    def finish(self, index: int, answer: SampledSequence) -> SampleResult | None:
        """Store one answer; returns the request's result with the last one."""
        self._answers[index] = answer
        if len(self._answers) < self.sample.num_samples:
            return None
        return SampleResult(
            request_id=self.sample.request_id,
            sequences=tuple(self._answers[i] for i in range(self.sample.num_samples)),
            prompt_logprobs_T=self.scores.prompt_logprobs_T,
            topk_prompt=self.scores.topk_prompt,
            prompt_cache_hit_tokens=self.prompt_cache_hit_tokens or 0,
            target_prompt=self.scores.target_prompt(),
            alt_tokens=self.scores.alt_tokens,
        )


class Sequence:
    """Answer `index` of a request. `order` is the age: the youngest is preempted first. Sequences of one `scope` share
    the batch's slots.
    """

    def __init__(self, request: Request, index: int, stop: StopRule, constraint: Constraint | None = None) -> None:
        self.request = request
        self.index = index
        self.order = (request.arrival_index, index)
        self.scope = request.sample.cache_scope
        self.stop = stop
        self.constraint = constraint
        self.length = request.num_prompt
        self.num_unread = 0
        self.unread_row = 0
        """The row of the newest unread token among those of its step."""
        self.is_open = True
        """False after the end, a failure or a cancellation: later tokens are discarded."""
        self.tokens_T = np.empty(self.length + min(request.max_new_tokens, 256), np.int32)
        self.tokens_T[: self.length] = request.sample.prompt_T
        self.num_cached = 0
        self.blocks: list[int] = []
        self.writable_end = 0
        """Positions before it that are not cached yet have a block that no other sequence reads."""
        self.state: SequenceState | None = None
        self.cuts: tuple[int, ...] = ()
        """Block boundaries at which a snapshot of the state is stored."""
        self.tail: tuple[int, SequenceState] | None = None
        """The position of the answer's last full block so far, and the state there."""
        self._keys: list[bytes] = [root_key(request.weights.weights_id, request.sample.cache_scope)]
        self._logprobs: list[float] = []
        self._topk: list[TopRow] = []

    @property
    def num_pending(self) -> int:
        return self.length - self.num_cached

    @property
    def num_read(self) -> int:
        """Tokens whose values were read."""
        return self.length - self.num_unread

    @property
    def answer_T(self) -> I32:
        """The generated tokens."""
        return self.tokens_T[self.request.num_prompt : self.length]

    @property
    def num_generated(self) -> int:
        return self.length - self.request.num_prompt

    @property
    def is_full(self) -> bool:
        """Whether as many tokens were drawn as the request allows."""
        return self.length >= self.request.max_length

    @property
    def num_reusable(self) -> int:
        """How many tokens may come from the cache: those before the first row whose hidden state is needed, for prompt
        logprobs or for the next token.
        """
        next_row = self.request.scores.next_row
        return self.length - 1 if next_row is None else next_row

    def key(self, block_index: int, block_size: int) -> bytes:
        """The prefix key of a full block."""
        while len(self._keys) < block_index + 2:
            start = (len(self._keys) - 1) * block_size
            tokens = self.tokens_T[start : start + block_size].tobytes()
            self._keys.append(chain_key(self._keys[-1], tokens + self._image_marks(start, start + block_size)))
        return self._keys[block_index + 1]

    def _image_marks(self, start: int, stop: int) -> bytes:
        """Distinguishes an image's placeholder tokens, which are the same for every image: its digest and offset."""
        return b"".join(
            image.digest + (start - image.start).to_bytes(8, "little", signed=True)
            for image in self.request.sample.images
            if image.start < stop and image.stop > start
        )

    def extend(self, row: int) -> None:
        """Count a token that was drawn in this row of a step and will be read later."""
        if self.length == len(self.tokens_T):
            self.tokens_T = np.concatenate([self.tokens_T, np.empty(self.length, np.int32)])
        self.tokens_T[self.length] = 0
        self.length += 1
        self.num_unread += 1
        self.unread_row = row

    def append(self, token: int, logprob: float, topk: TopRow | None) -> str | None:
        """Add a generated token, or the value of the first unread one; returns 'stop' or 'length' if it is the last.
        Unread tokens after a last one are dropped.
        """
        if not self.num_unread:
            self.extend(0)
        position = self.length - self.num_unread
        self.tokens_T[position] = token
        self.num_unread -= 1
        self._logprobs.append(logprob)
        if topk is not None:
            self._topk.append(topk)
        is_last = self.stop.push(token)
        if not is_last and self.constraint is not None:
            self.constraint.push(token)
            is_last = self.constraint.is_finished
        if is_last:
            reason = "stop"
        elif position + 1 >= self.request.max_length:
            reason = "length"
        else:
            return None
        self.length, self.num_unread = position + 1, 0
        return reason

    def answer(self, stop_reason: str) -> SampledSequence:
        topk = empty_topk(len(self._topk), self.request.sample.topk_sample_logprobs) if self._topk else None
        for row, (ids_k, logprobs_k) in enumerate(self._topk):
            assert topk is not None
            topk.token_ids_Tk[row, : len(ids_k)] = ids_k
            topk.logprobs_Tk[row, : len(ids_k)] = logprobs_k
        return SampledSequence(
            tokens_T=self.answer_T.copy(),
            logprobs_T=np.array(self._logprobs, np.float32),
            stop_reason=stop_reason,
            topk=topk,
        )
