"""The sampler that lives beside the trainer: continuous batching on the engine's own base model and adapters.

`LocalSampler` turns requests into sequences, asks its `Batcher` what to compute next, runs the rows of all
sequences, whatever their weights, through the base model once, and samples. It owns no weights: a request
captures the adapter that `versions` maps its version to when it is submitted, and keeps it to its end
whatever the owner does to the mapping; published adapters are immutable. Blocks cached for others die with
the mapping's entry.

A request whose logits are not finite ends alone: no kernel mixes rows of two sequences, and every block is
zeroed before it is used. Called by the engine, in one thread, between training steps. Knows no SQL, no HTTP,
no tenants.

Letters: T rows of a step, D hidden size, V vocabulary, B sampled rows, k of a top-k list.

What requests do to their logits before a token is drawn: masks, bias and penalties, in this order.

The order and the formulas are vLLM's (and OpenAI's, for frequency and presence): a repetition penalty r divides a
positive logit and multiplies a negative one, for every token of the prompt or the answer so far; a frequency penalty is
subtracted once for each time that the answer has a token, a presence penalty once if it has it at all. Temperature and
min_p follow in `sampling`. Rows without adjustments are left as they are.

Letters: B rows, V vocabulary, S tokens of a row that are changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import structlog
import torch
from torch import Tensor

from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.lora_ops import Routing, Segment
from tinsmith.backends.torch.memory import MemoryManager, memory_errors
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.transformer import round_up
from tinsmith.backends.torch.vision import ImageRows, Placed, PlacedSpan
from tinsmith.errors import NotFoundError, SettingsError, UserError
from tinsmith.samplers import CacheUse
from tinsmith.samplers.local.contiguous_kv import StripCache
from tinsmith.samplers.local.grammar import Grammars
from tinsmith.samplers.local.kv_cache import BlockPool, KVCache, default_bytes, layer_shapes, noted_layers
from tinsmith.samplers.local.memory import CacheBudget
from tinsmith.samplers.local.paged_attention import PagedPlan, Rows
from tinsmith.samplers.local.prompt_logprobs import max_target
from tinsmith.samplers.local.request import Request, Sequence, TopRow, Weights
from tinsmith.samplers.local.sampling import Chosen, Draws, choose, uniform
from tinsmith.samplers.local.scheduler import Batcher, SamplerStep, TokenRun
from tinsmith.samplers.local.scoring import score_prompt
from tinsmith.samplers.local.states import (
    Recurrence,
    SequencePiece,
    SequenceState,
    StateRoom,
    StateSnapshots,
    cuts_between,
    state_bytes,
)
from tinsmith.types import I32, Adjustments, Grammar, Partial, Sample, SampleResult


def adjust(logits_BV: Tensor, sequences: Seq[Sequence]) -> Tensor | None:
    """The logits to draw from, None if they are the model's own."""
    if not any(sequence.request.sample.params.adjustments for sequence in sequences):
        return None
    adjusted_BV = logits_BV.float().clone()
    for row, sequence in enumerate(sequences):
        adjustments = sequence.request.sample.params.adjustments
        if adjustments is None:
            continue
        if sequence.constraint is not None:
            allowed_V = torch.from_numpy(sequence.constraint.allowed()).to(adjusted_BV.device)
            adjusted_BV[row].masked_fill_(~allowed_V, -torch.inf)
        _mask(adjusted_BV[row], adjustments, sequence)
        _add_bias(adjusted_BV[row], adjustments)
        _repeat_less(adjusted_BV[row], adjustments, sequence)
        _penalise(adjusted_BV[row], adjustments, sequence)
    return adjusted_BV


def _mask(logits_V: Tensor, adjustments: Adjustments, sequence: Sequence) -> None:
    """Leave out tokens that are not allowed, that would complete a bad word, or that would stop too short an answer."""
    if len(allowed := sequence.request.allowed_ids):
        ids_S = torch.from_numpy(allowed).to(logits_V.device)
        own_S = logits_V[ids_S]
        logits_V.fill_(-torch.inf)
        logits_V[ids_S] = own_S
    answer_T = sequence.tokens_T[sequence.request.num_prompt : sequence.length]
    masked = [
        word[-1]
        for word in adjustments.bad_words
        if len(word) <= len(answer_T) + 1 and tuple(answer_T[len(answer_T) + 1 - len(word) :].tolist()) == word[:-1]
    ]
    if sequence.num_generated < adjustments.min_tokens:
        masked += sequence.stop.tokens
    if masked:
        logits_V[torch.tensor(masked, device=logits_V.device)] = -torch.inf
    if masked or len(allowed):
        sequence.exhausted = bool(logits_V.amax() == -torch.inf)


def _add_bias(logits_V: Tensor, adjustments: Adjustments) -> None:
    if adjustments.logit_bias:
        ids_S, biases_S = zip(*adjustments.logit_bias, strict=True)
        logits_V[torch.tensor(ids_S, device=logits_V.device)] += torch.tensor(biases_S, device=logits_V.device)


def _repeat_less(logits_V: Tensor, adjustments: Adjustments, sequence: Sequence) -> None:
    penalty = adjustments.repetition_penalty
    if penalty == 1.0:
        return
    seen_S = np.union1d(sequence.request.prompt_ids, np.fromiter(sequence.counts, np.int64, len(sequence.counts)))
    ids_S = torch.from_numpy(seen_S).to(logits_V.device)
    own_S = logits_V[ids_S]
    logits_V[ids_S] = torch.where(own_S > 0, own_S / penalty, own_S * penalty)


def _penalise(logits_V: Tensor, adjustments: Adjustments, sequence: Sequence) -> None:
    if not sequence.counts or not (adjustments.frequency_penalty or adjustments.presence_penalty):
        return
    ids_S = torch.tensor(list(sequence.counts), device=logits_V.device)
    counts_S = torch.tensor(list(sequence.counts.values()), dtype=torch.float32, device=logits_V.device)
    logits_V[ids_S] -= adjustments.frequency_penalty * counts_S + adjustments.presence_penalty


log = structlog.get_logger()

PIECE_ROWS = 16
"""Rows of a forward of the deterministic mode: fewer waste less in decode steps, more cost less for prompts. Of a
mixture of experts one: an expert meets as many rows as choose it.
"""

NOT_FINITE = "the logits are not finite: the weights of this version hold, or lead to, NaN or infinite numbers"

EXHAUSTED = (
    "allowed_token_ids, bad_words and min_tokens leave no token to draw: allow more tokens, or leave out bad_words or "
    "min_tokens"
)


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    block_size: int = 16
    """Tokens per cache block; prefixes are shared in whole blocks."""

    kv_cache_bytes: int | None = None
    """The cache grows up to this. None: 512 MiB, or one whole context if that is more and fits in memory."""

    max_sequences: int = 256
    """Sequences that run at once; the others wait."""

    max_tokens_per_step: int = 512
    """Rows of one step. Smaller: decoding stalls less behind long prompts. Larger: prompts cost less."""

    deterministic: bool = False
    """Whether every sequence goes through the model alone, in forwards of fixed shapes (`_through_pieces`)."""


class LocalSampler:
    """Implements the Sampler protocol."""

    runs_by_itself = False

    def __init__(
        self,
        base: BaseModel,
        versions: Mapping[str, Adapter],
        *,
        options: SamplerOptions | None = None,
        memory: MemoryManager | None = None,
    ) -> None:
        options = options or SamplerOptions()
        self._base = base
        self._versions = versions
        self._cache = KVCache(layer_shapes(base), options.block_size, base.device)
        memory = memory or MemoryManager()
        token_bytes = max(self._cache.token_bytes, 1)
        budget = options.kv_cache_bytes or default_bytes(base, token_bytes)
        state_size = state_bytes(noted_layers(base))
        states = StateRoom.of(state_size, min(budget, memory.steady_limit()), options.max_sequences)
        self._keeps_states = state_size > 0
        self._batcher = Batcher(
            BlockPool(max_blocks=max((budget - states.num_bytes) // (token_bytes * options.block_size), 1)),
            block_size=options.block_size,
            max_sequences=states.max_sequences,
            max_tokens=options.max_tokens_per_step,
            snapshots=StateSnapshots(states.max_snapshots) if self._keeps_states else None,
        )
        self._deterministic = options.deterministic
        has_experts = any("expert" in name for name, _ in base.model.named_modules())
        self._piece_rows = 1 if has_experts else PIECE_ROWS
        if self._deterministic:
            self._check_repeatable()
        in_strips = base.device.type == "cpu" and not self._deterministic
        self._strips = StripCache(self._cache, budget, base.device) if in_strips else None
        self._cache_budget = CacheBudget(memory, self._batcher, self._cache, self._strips, state_size, states)
        self._requests: dict[str, list[Sequence]] = {}
        self._settled: list[tuple[str, SampleResult | UserError]] = []
        self._weights: dict[str | None, Weights] = {None: Weights(None, 0)}
        self._num_weights = 1
        self._num_requests = 0
        self._grammars = Grammars(base.tokenizer, base.vocab_size, base.eos_token_ids)
        self._partials: list[Partial] = []
        self._can_retry = True
        self._prepared = True
        self._spans: list[TokenRun] = []

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def submit(self, sample: Sample) -> None:
        """Enqueue a request. Raises UserError, and keeps nothing of it, if it can never run."""
        max_new_tokens = self._max_new_tokens(sample)
        if grammar := _grammar_of(sample):
            self._grammars.compiled(grammar)
        placed = self._base.place(sample.prompt_T, sample.images, sample.cache_scope)
        request = Request(sample, self._capture(sample.version_id), self._num_requests, max_new_tokens, placed)
        self._num_requests += 1
        self._requests[sample.request_id] = [self._sequence(request, 0)]
        self._admit(self._requests[sample.request_id][0])

    def _admit(self, sequence: Sequence) -> None:
        self._batcher.add(sequence)

    def cancel(self, request_id: str) -> bool:
        """Forget a waiting or running request and free its blocks at once."""
        sequences = self._requests.pop(request_id, None)
        if sequences is not None:
            self._batcher.remove(sequences)
        return sequences is not None

    def step(self, scopes: Collection[str] | None = None) -> list[tuple[str, SampleResult | UserError]]:
        """If memory runs out, the youngest half of what runs waits, and the step is made again with the others. A
        request for which there is no memory even alone fails.
        """
        self._settled = []
        self.collect()
        while True:
            self._prepared = True
            self._spans = []
            # The error is let go of before the next attempt: it holds what the step had allocated.
            lack = self._attempt(scopes)
            if lack is None:
                break
            self._recover(lack)
        if self._batcher.calm():
            self._cache_budget.relax()
        return self._settled

    def _attempt(self, scopes: Collection[str] | None) -> str | None:
        """One step; or why there was no memory for it."""
        try:
            with memory_errors(self._base.device):
                self._cache_budget.fit()
                step = self._scheduled(scopes)
                self._spans = step.spans
                if step.spans:
                    self._prepared = False
                    with torch.inference_mode():
                        self._run(step)
        except MemoryError as error:
            if not self._can_retry:
                self._rewind()
                raise
            return str(error)
        return None

    def _scheduled(self, scopes: Collection[str] | None) -> SamplerStep:
        step = self._batcher.schedule(scopes)
        while scopes is None and not step.spans and self._batcher.waiting and self._batcher.pool.limit is not None:
            self._cache_budget.relax()  # the oldest needs more than there was memory for
            step = self._batcher.schedule()
        return step

    def _rewind(self) -> None:
        """The sampler as if the step that was cut off had not been begun; what it has settled stays settled."""
        if self._strips:
            self._strips.clear()
        if self._prepared:
            self._batcher.rewind(self._spans)
        else:  # blocks may lack what was to be copied, or hold what was to be cleared
            self._cache_budget.give_up_growth()

    def _recover(self, lack: str) -> None:
        num_ran = len(self._batcher.running)
        self._rewind()
        log.warning("there is no memory for a decode step; fewer samples go on", running=num_ran, lack=lack)
        if self._batcher.restrain(num_ran):
            return
        sequence = next(iter(self._batcher.running or self._batcher.waiting), None)
        if sequence is None:
            raise MemoryError(lack)
        request = sequence.request
        self._settle(
            request,
            UserError(
                f"this sample, a prompt of {request.num_prompt} tokens and up to {request.max_new_tokens} new ones, "
                f"does not fit into the engine's memory, even alone: {lack}; shorten the prompt or lower max_tokens"
            ),
        )

    def partials(self) -> list[Partial]:
        told, self._partials = self._partials, []
        return told

    def cache_use(self) -> CacheUse:
        pool = self._batcher.pool
        return CacheUse(pool.num_live, pool.num_cached, pool.max_blocks, len(self._batcher.waiting))

    def collect(self) -> None:
        """Let go of versions that were replaced or dropped; their owner may call this after either."""
        for version_id, weights in list(self._weights.items()):
            if version_id is not None and self._versions.get(version_id) is not weights.adapter:
                weights.alive = False
                self._batcher.pool.forget(weights.number)
                if self._batcher.snapshots is not None:
                    self._batcher.snapshots.forget(weights.number)
                del self._weights[version_id]

    def _max_new_tokens(self, sample: Sample) -> int:
        """Raises UserError if the request can never run."""
        num_prompt, context = len(sample.prompt_T), self._base.max_context_length
        if num_prompt == 0:
            raise UserError("the prompt is empty; it needs at least one token")
        if sample.prompt_T.min() < 0 or sample.prompt_T.max() >= self._base.vocab_size:
            raise UserError(f"the prompt holds token ids outside the vocabulary [0, {self._base.vocab_size})")
        if max_target(sample) >= self._base.vocab_size:
            raise UserError(f"target_prompt_logprobs holds ids outside the vocabulary [0, {self._base.vocab_size})")
        # The last token is only ever returned: its keys and values need no room.
        capacity = self._cache_budget.capacity + 1
        room = min(context, capacity) - num_prompt
        max_tokens = sample.params.max_tokens
        wanted = max(room, 1) if max_tokens is None else max_tokens
        if wanted < 1 or sample.num_samples < 1:
            raise UserError(f"max_tokens is {wanted} and num_samples {sample.num_samples}; both must be at least 1")
        if wanted > room:
            least = " (at least 1)" if max_tokens is None else ""
            cache = f", of which the KV cache can hold {capacity}" if capacity < context else ""
            raise UserError(
                f"prompt ({num_prompt} tokens) + max_tokens ({wanted}{least}) exceed the context length "
                f"({context} tokens{cache})"
            )
        return wanted

    def _capture(self, version_id: str | None) -> Weights:
        self.collect()
        weights = self._weights.get(version_id)
        if weights is None:
            adapter = None if version_id is None else self._versions.get(version_id)
            if adapter is None:
                raise NotFoundError(f"there are no weights called {version_id!r} to sample from")
            weights = self._weights[version_id] = Weights(adapter, self._num_weights)
            self._num_weights += 1
        return weights

    def _sequence(self, request: Request, index: int) -> Sequence:
        stop = request.stop_rule(self._decode, self._base.eos_token_ids)
        grammar = _grammar_of(request.sample)
        return Sequence(request, index, stop, self._grammars.constraint(grammar) if grammar else None)

    def _decode(self, token_ids: list[int]) -> str:
        # The Rust tokenizer itself: transformers' decode costs ten times as much for a few tokens.
        return self._base.tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=False)

    def _run(self, step: SamplerStep) -> None:
        self._prepare(step)
        through = self._through_pieces if self._deterministic else self._through_layers
        spans, hidden_TD = through(step.spans)
        if self._keeps_states:
            self._part_from_batches(step.spans)
        self._sample(self._score(spans, hidden_TD), hidden_TD)

    def _prepare(self, step: SamplerStep) -> None:
        self._cache_budget.grow()
        self._cache.prepare(step.copies, step.fresh)
        self._prepared = True

    def _part_from_batches(self, spans: Seq[TokenRun]) -> None:
        """States of running sequences that had no part in a step are not to keep those of an older one in memory."""
        stepped = {id(span.sequence) for span in spans}
        for sequence in self._batcher.running:
            if sequence.state is not None and id(sequence) not in stepped:
                sequence.state = sequence.state.apart()

    def _leave_states(self, spans: Seq[TokenRun], recurrence: Recurrence) -> None:
        """Advance the spans with their states, and keep snapshots where these are wanted."""
        for span, state in zip(spans, recurrence.after, strict=True):
            span.sequence.state = state
            self._batcher.advance(span)
        for span, states in zip(spans, recurrence.at_cuts, strict=True):
            inside = cuts_between(span.start, span.stop, span.sequence.cuts)
            for cut, state in zip(inside, states, strict=True):
                self._snapshot(span.sequence, span.start + cut, state)
            self._state_behind(span.sequence, span.stop, span.sequence.state)

    def _state_behind(self, sequence: Sequence, position: int, state: SequenceState | None) -> None:
        """Keep the state for others, if a snapshot is wanted there, or as the answer's last one so far."""
        if position in sequence.cuts:
            self._snapshot(sequence, position, state)
        elif state is not None and position > sequence.request.num_prompt and not position % self._batcher.block_size:
            sequence.tail = position, state.apart()

    def _snapshot(self, sequence: Sequence, position: int, state: SequenceState | None) -> None:
        snapshots, weights, size = self._batcher.snapshots, sequence.request.weights, self._batcher.block_size
        if snapshots is not None and state is not None and weights.alive:
            snapshots.add(sequence.key(position // size - 1, size), weights.number, state)

    def _through_layers(self, spans: Seq[TokenRun]) -> tuple[list[tuple[TokenRun, int]], Tensor]:
        """Final hidden states of the rows that matter, and each span with how many of them are its last rows."""
        # Rows of one adapter lie side by side, so that each adapter multiplies once per linear.
        # Those of adapters that have equally many do, too: they are one batched product.
        num_rows: Counter[int] = Counter()
        for span in spans:
            num_rows[span.sequence.request.weights.number] += span.stop - span.start
        numbers = {id(span): span.sequence.request.weights.number for span in spans}
        spans = sorted(spans, key=lambda span: (num_rows[numbers[id(span)]], numbers[id(span)]))
        adapters = [span.sequence.request.weights.adapter for span in spans]
        rows = [Rows(span.start, span.stop, span.sequence.blocks, span.sequence) for span in spans]
        tokens_T = np.concatenate([span.sequence.tokens_T[span.start : span.stop] for span in spans])
        sizes = [span.stop - span.start for span in spans]
        recurrence = None
        if self._keeps_states:
            firsts = accumulate(sizes, initial=0)
            pieces = [_piece_of(span, first) for span, first in zip(spans, firsts, strict=False)]
            recurrence = Recurrence(pieces, self._base.device)
        plan = PagedPlan(self._cache, rows, self._base.device, self._strips, recurrence=recurrence)
        routing = Routing.of(adapters, sizes)
        tokens_T = torch.from_numpy(tokens_T).to(self._base.device, torch.int64)
        counts = [span.num_wanted for span in spans]
        ends = accumulate(sizes)
        wanted = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
        if not wanted:  # the first pieces of prompts need no logits: compute one row
            wanted = [len(tokens_T) - 1]
        positions_T, images = self._positions(plan, spans)
        hidden_TD = self._base.hidden(
            tokens_T, positions_T, plan, routing, None if len(wanted) == len(tokens_T) else wanted, images
        )
        if recurrence is not None:
            self._leave_states(spans, recurrence)
        else:
            for span in spans:
                self._batcher.advance(span)
        return list(zip(spans, counts, strict=True)), hidden_TD

    def _positions(self, plan: PagedPlan, spans: Seq[TokenRun]) -> tuple[Tensor, ImageRows | None]:
        """What RoPE is given, which differs from the places in the cache behind an image; and the rows of images."""
        if not any(span.sequence.request.placed for span in spans):
            return plan.positions_T, None
        placed = [PlacedSpan(span.sequence.request.placed, span.start, span.stop) for span in spans]
        positions, images = self._base.positions(placed)
        return torch.from_numpy(positions).to(self._base.device), images

    def _through_pieces(self, spans: Seq[TokenRun]) -> tuple[list[tuple[TokenRun, int]], Tensor]:
        """The same, of every row of the spans, in forwards whose shapes depend on positions alone.

        A kernel adds in an order that it chooses by the shapes that it is given. So a position is always computed in
        the same place of the same piece of its sequence, beside nothing else: those before it are computed again, and
        places behind it hold copies of the last token, whose keys and values are dropped.
        """
        found = []
        for span in spans:
            sequence, state = span.sequence, span.sequence.state
            begin = span.start - span.start % self._piece_rows
            for first in range(begin, span.stop, self._piece_rows):
                wanted = slice(max(span.start, first) - first, min(span.stop, first + self._piece_rows) - first)
                tokens_T = sequence.tokens_T[first : first + wanted.stop]
                adapter, whole = sequence.request.weights.adapter, wanted.stop == self._piece_rows
                placed, blocks = sequence.request.placed, sequence.blocks
                hidden_TD, after = self._piece(self._cache, tokens_T, first, blocks, adapter, wanted, state, placed)
                found.append(hidden_TD)
                if whole:  # the next piece begins behind it
                    state = after
                    self._state_behind(sequence, first + wanted.stop, state)
            sequence.state = state
            self._batcher.advance(span)
        return [(span, span.stop - span.start) for span in spans], torch.cat(found)

    def _piece(
        self,
        cache: KVCache,
        tokens_T: I32,
        first: int,
        blocks: Seq[int],
        adapter: Adapter | None,
        wanted: slice,
        state: SequenceState | None,
        placed: Placed | None = None,
    ) -> tuple[Tensor, SequenceState | None]:
        """[n, D]: hidden states of the wanted rows of the piece that begins at position `first`, behind `state`; and
        the state behind the piece.
        """
        num = self._piece_rows
        tokens_T = np.pad(tokens_T, (0, num - len(tokens_T)), "edge")
        rows = Rows(first, first + num, [*blocks, *[0] * num])
        recurrence = Recurrence([SequencePiece(0, num, state)], self._base.device) if self._keeps_states else None
        plan = PagedPlan(cache, [rows], self._base.device, written=wanted, recurrence=recurrence)
        rows_T = torch.from_numpy(tokens_T).to(self._base.device, torch.int64)
        positions_T, images = plan.positions_T, None
        if placed is not None:
            positions, images = self._base.positions([PlacedSpan(placed, first, first + num)])
            positions_T = torch.from_numpy(positions).to(self._base.device)
        routing = Routing([Segment(0, num, adapter)])
        hidden_TD = self._base.hidden(rows_T, positions_T, plan, routing, images=images)
        return hidden_TD[wanted], recurrence.after[0] if recurrence is not None else None

    @torch.inference_mode()
    def _check_repeatable(self) -> None:
        """Raises SettingsError if the same call gives other bits when it is made again."""
        num = self._piece_rows
        tokens_T = (7 * np.arange(2 * num) % self._base.shape.vocab_size).astype(np.int32)
        found = []
        for _ in range(2):
            cache = KVCache(layer_shapes(self._base), num, self._base.device)
            cache.resize(3)  # block 0 is the null block
            first, state = self._piece(cache, tokens_T[:num], 0, [1, 2], None, slice(num), None)
            second, _ = self._piece(cache, tokens_T[num:], num, [1, 2], None, slice(num), state)
            found.append([first, second, self._base.logits(second[-1:], Routing([Segment(0, 1, None)]))])
        if not all(torch.equal(ours, again) for ours, again in zip(*found, strict=True)):
            raise SettingsError("the same rows give other bits from call to call on this machine: not deterministic")

    def _score(self, spans: Seq[tuple[TokenRun, int]], hidden_TD: Tensor) -> list[tuple[TokenRun, int]]:
        """Prompt logprobs where they are asked for; then the spans to sample from, each with its last row."""
        complete, end = [], 0
        for span, num_rows in spans:
            begin, end = end, end + num_rows
            request = span.sequence.request
            if request.scores.next_row is not None and not score_prompt(
                self._base, request, hidden_TD[begin:end], span.start, 1 if self._deterministic else None
            ):
                self._settle(request, UserError(NOT_FINITE))
            elif span.completes:
                complete.append((span, end - 1))
        return complete

    def _sample(self, spans: Seq[tuple[TokenRun, int]], hidden_TD: Tensor) -> None:
        """The next token of sequences whose known tokens are all computed, and of siblings at the fork."""
        if self._deterministic and len(spans) > 1:
            for span in spans:
                self._sample([span], hidden_TD)
            return
        if not spans:
            return
        # Some rows twice, as in the layers: every number of rows is a product of its own to compile.
        repeated = round_up(len(spans)) - len(spans)
        rows = torch.tensor([row for _, row in [*spans, *[spans[-1]] * repeated]], device=hidden_TD.device)
        adapters = [span.sequence.request.weights.adapter for span, _ in spans]
        routing = Routing.of([*adapters, *[None] * repeated], [1] * len(rows))
        logits_BV = self._base.next_logits(hidden_TD.index_select(0, rows), routing)[: len(spans)]
        families = [[span.sequence, *self._fork(span.sequence)] for span, _ in spans]
        sequences = [sequence for family in families for sequence in family]
        if self._deterministic:
            for sequence in sequences:
                own_1V = logits_BV.clone()  # `choose` works in place
                self._append([sequence], choose(own_1V, draws_of([sequence]), adjust(own_1V, [sequence])))
            return
        if len(sequences) > len(spans):
            sizes = torch.tensor([len(family) for family in families], device=logits_BV.device)
            logits_BV = logits_BV.repeat_interleave(sizes, 0)
        self._append(sequences, choose(logits_BV, draws_of(sequences), adjust(logits_BV, sequences)))

    def _fork(self, leader: Sequence) -> list[Sequence]:
        """The other answers of a request whose prompt was just computed, those that can run at once."""
        request = leader.request
        if leader.index or request.forked or request.sample.num_samples == 1:
            return []
        request.forked = True
        children = [self._sequence(request, index) for index in range(1, request.sample.num_samples)]
        self._requests[request.sample.request_id] += children
        return self._batcher.fork(leader, children)

    def _append(self, sequences: Seq[Sequence], chosen: Chosen) -> None:
        topk_rows = _topk_rows(sequences, chosen)
        # One read from the device: a float64 holds either exactly.
        read_2B = torch.stack((chosen.token_ids_B.double(), chosen.logprobs_B.double())).cpu().numpy()
        token_ids, logprobs = read_2B[0].astype(np.int64).tolist(), read_2B[1].tolist()
        for row, sequence in enumerate(sequences):
            request = sequence.request
            if request.sample.request_id not in self._requests:
                continue  # a sibling failed in this very step
            if sequence.exhausted:
                self._settle(request, UserError(EXHAUSTED))
                continue
            if np.isnan(logprobs[row]):
                self._settle(request, UserError(NOT_FINITE))
                continue
            reason = sequence.append(token_ids[row], logprobs[row], topk_rows.get(row))
            if sequence.constraint and (error := sequence.constraint.error):
                self._settle(request, error)
                continue
            if request.sample.stream:
                self._partials.append(_partial(sequence, token_ids[row], logprobs[row], topk_rows.get(row)))
            if reason is None:
                continue
            if sequence.tail is not None:
                self._snapshot(sequence, *sequence.tail)
            self._batcher.remove([sequence])
            self._requests[request.sample.request_id].remove(sequence)
            result = request.finish(sequence.index, sequence.answer(reason))
            if result is not None:
                self._settle(request, result)

    def _settle(self, request: Request, outcome: SampleResult | UserError) -> None:
        request_id = request.sample.request_id
        self._batcher.remove(self._requests.pop(request_id))
        self._settled.append((request_id, outcome))


def _piece_of(span: TokenRun, first: int) -> SequencePiece:
    sequence = span.sequence
    cuts = cuts_between(span.start, span.stop, sequence.cuts)
    return SequencePiece(first, span.stop - span.start, sequence.state, cuts)


def draws_of(sequences: Seq[Sequence]) -> Draws:
    params = [sequence.request.sample.params for sequence in sequences]
    return Draws(
        temperature_B=np.array([p.temperature for p in params], np.float32),
        top_k_B=np.array([p.top_k for p in params], np.int64),
        top_p_B=np.array([p.top_p for p in params], np.float64),
        uniform_B=np.array([uniform(s.request.seed, s.index, s.num_generated) for s in sequences]),
        min_p_B=np.array([p.adjustments.min_p if p.adjustments else 0.0 for p in params], np.float64),
        num_top_B=np.array([sequence.request.sample.topk_sample_logprobs for sequence in sequences]),
    )


def _grammar_of(sample: Sample) -> Grammar | None:
    adjustments = sample.params.adjustments
    return adjustments.grammar if adjustments else None


def _partial(sequence: Sequence, token: int, logprob: float, top: TopRow | None) -> Partial:
    """The newest token of a sequence, to be told at once."""
    topk = () if top is None else ((tuple(top[0].tolist()), tuple(top[1].tolist())),)
    request_id = sequence.request.sample.request_id
    return Partial(request_id, sequence.index, sequence.num_generated - 1, (token,), (logprob,), topk)


def _topk_rows(sequences: Seq[Sequence], chosen: Chosen) -> dict[int, TopRow]:
    """Row -> its likeliest tokens and their logprobs, for the rows whose request asks for them."""
    if chosen.top is None:
        return {}
    ids, logprobs = chosen.top.ids_Rk.to(torch.int32).cpu().numpy(), chosen.top.logprobs_Rk.cpu().numpy()
    found = {}
    for place, row in enumerate(chosen.top.rows):
        k = sequences[row].request.sample.topk_sample_logprobs
        # Copies, lest a narrow row keep the widest one's batch alive.
        found[row] = (ids[place, :k].copy(), logprobs[place, :k].copy())
    return found
