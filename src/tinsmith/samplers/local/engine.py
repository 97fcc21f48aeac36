"""The sampler in the trainer's process: continuous batching on the engine's own base model and adapters.

`LocalSampler` turns requests into sequences, asks its `Batcher` what to compute next, runs the rows of all sequences,
of any weights, through the base model once, and samples. It owns no weights: on submission a request captures the
adapter that `versions` maps its version to, and keeps that adapter to its end even if the owner changes the mapping;
published adapters are immutable. Prefix blocks of a version are dropped with its entry.

A request whose logits are not finite fails alone: no kernel mixes rows of two sequences, and every block is zeroed
before use. A step synchronises with the device once, when it reads tokens, and once more for each chunk of a prompt
that is scored. Called by the engine in one thread, between training steps. Knows no SQL, HTTP or tenants.

With `SamplerOptions.reads_late` a step is launched before the tokens of the step before are read: the model takes them
from the device, and the host works while the device computes. A sequence that ends by its length leaves in time; one
that ends by its tokens computes one more, which is discarded. A step whose next draws depend on the values of its
tokens (`Request.needs_answer`) is read at once. Answers are the same either way.

Letters: T rows of a step, D hidden size, V vocabulary, B sampled rows, k of a top-k list.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import structlog
import torch
from torch import Tensor

from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.attention import AttentionProbe
from tinsmith.backends.torch.host import Readback, upload, upload_all
from tinsmith.backends.torch.lora import DeviceLoRABatch
from tinsmith.backends.torch.lora_batch import LoRABatch, Segment
from tinsmith.backends.torch.memory import MemoryManager, choose_step_rows, memory_errors
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.profiling import StepTraces, stage
from tinsmith.backends.torch.transformer import round_up
from tinsmith.backends.torch.vision import ImageInput, ImageRows, InputSpan
from tinsmith.errors import NotFoundError, SettingsError, UserError
from tinsmith.runtime.devices import is_on_host, kind_of, place_for_float64
from tinsmith.samplers import CacheUse
from tinsmith.samplers.local.adjusting import adjust
from tinsmith.samplers.local.contiguous_kv import ContiguousKV
from tinsmith.samplers.local.decode_graphs import DecodeGraphs
from tinsmith.samplers.local.grammar import GrammarCache
from tinsmith.samplers.local.kv_cache import BlockPool, KVCache, default_bytes, layer_shapes, probe_layers
from tinsmith.samplers.local.memory import CacheBudget
from tinsmith.samplers.local.paged_attention import PagedPlan, SequenceRows
from tinsmith.samplers.local.prompt_logprobs import max_target, score_prompt
from tinsmith.samplers.local.request import Request, Sequence, TopRow, Weights
from tinsmith.samplers.local.sampling import DrawParams, SampledTokens, choose, uniform
from tinsmith.samplers.local.scheduler import Batcher, SamplerStep, TokenSpan
from tinsmith.samplers.local.state_pool import SequenceState, StatePool
from tinsmith.samplers.local.states import (
    Recurrence,
    RecurrentSpan,
    StateBudget,
    StateSnapshots,
    cuts_between,
    state_bytes,
)
from tinsmith.types import F32, I32, I64, Grammar, Partial, Sample, SampleResult

log = structlog.get_logger()

CHUNK_ROWS = 16
"""Rows of a forward in deterministic mode: fewer waste less in decode steps, more make prompts cheaper. Mixtures of
experts use one, since the number of rows of an expert depends on which rows choose it.
"""

NOT_FINITE = "the logits are not finite: the weights of this version hold, or lead to, NaN or infinite numbers"

EXHAUSTED = (
    "allowed_token_ids, bad_words and min_tokens leave no token to draw: allow more tokens, or leave out bad_words or "
    "min_tokens"
)


MANY_ROWS = 32
"""Adapters with this many rows or more keep their order from step to step, and so reuse their stacked matrices."""

MAX_LORA_BATCHES = 4
"""Routings in the cache: a step has one for its rows and one for those it samples from."""

MAX_SEQUENCES = 512
"""Sequences that run at once."""


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """None selects a default for the device."""

    block_size: int = 16
    """Tokens per cache block; prefixes are shared in whole blocks."""

    kv_cache_bytes: int | None = None
    """Size of the cache: allocated at once on CUDA, a ceiling for growth elsewhere."""

    max_sequences: int | None = None
    """Sequences that run at once; the others wait."""

    max_tokens_per_step: int | None = None
    """Rows of one step. Smaller values stall decoding less behind long prompts; larger values make prompts cheaper."""

    deterministic: bool = False
    """Whether every sequence runs through the model alone, in forwards of fixed shapes (`_forward_chunks`)."""

    reads_late: bool | None = None
    """Whether tokens are read while the next step runs; by default on CUDA. Never if `deterministic`."""

    traces: StepTraces = field(default_factory=lambda: StepTraces(None))


@dataclass(frozen=True, slots=True)
class _PendingReadback:
    """A step's drawn tokens, whose copy to the host may not be complete."""

    sequences: Seq[Sequence]
    chosen: SampledTokens
    readback: Readback


class LocalSampler:
    """Implements the Sampler protocol."""

    runs_by_itself = False
    inference_server = None

    def __init__(
        self,
        base: BaseModel,
        versions: Mapping[str, Adapter],
        *,
        options: SamplerOptions | None = None,
        memory: MemoryManager | None = None,
    ) -> None:
        options = options or SamplerOptions()
        is_large = kind_of(base.device).has_kernels
        self._base = base
        self._versions = versions
        self._cache = KVCache(layer_shapes(base), options.block_size, base.device)
        memory = memory or MemoryManager()
        probe = probe_layers(base)
        token_bytes, state_size = self._sizes(self._cache.token_bytes, state_bytes(probe))
        token_bytes = max(token_bytes, 1)
        budget = options.kv_cache_bytes or default_bytes(base, token_bytes)
        max_sequences = options.max_sequences or MAX_SEQUENCES
        states = StateBudget.of(state_size, min(budget, memory.steady_limit()), max_sequences)
        self._keeps_states = state_size > 0
        snapshots = StateSnapshots(states.max_snapshots)
        self._states = self._make_pool(states, snapshots, probe)
        self._batcher = Batcher(
            BlockPool(max_blocks=max((budget - states.num_bytes) // (token_bytes * options.block_size), 1)),
            block_size=options.block_size,
            max_sequences=states.max_sequences,
            max_tokens=options.max_tokens_per_step or choose_step_rows(base),
            snapshots=snapshots if self._keeps_states else None,
        )
        self._deterministic = options.deterministic
        has_experts = any("expert" in name for name, _ in base.model.named_modules())
        self._chunk_rows = 1 if has_experts else CHUNK_ROWS
        if self._deterministic:
            self._check_repeatable()
        is_contiguous = kind_of(base.device).is_host and not self._deterministic
        self._contiguous = ContiguousKV(self._cache, budget, base.device) if is_contiguous else None
        with memory_errors(base.device):
            self._cache_budget = CacheBudget(
                memory, self._batcher, self._cache, self._contiguous, self._states, state_size, states, fixed=is_large
            )
        self._graphs = self._make_graphs(states.max_sequences)
        self._requests: dict[str, list[Sequence]] = {}
        self._settled: list[tuple[str, SampleResult | UserError]] = []
        self._lora_batches: OrderedDict[tuple[tuple[int | None, ...], tuple[int, ...]], LoRABatch | None]
        self._lora_batches = OrderedDict()
        self._decoding: tuple[list[Adapter | None], DeviceLoRABatch | None] = ([], None)
        self._drawing: tuple[list[Sequence], DrawParams | None] = ([], None)
        self._weights: dict[str | None, Weights] = {None: Weights(None, 0)}
        self._num_weights = 1
        self._num_requests = 0
        self._grammars = GrammarCache(base.tokenizer, base.vocab_size, base.eos_token_ids)
        self._partials: list[Partial] = []
        self._reads_late = not self._deterministic and (is_large if options.reads_late is None else options.reads_late)
        self._unread: list[_PendingReadback] = []
        """After a step: at most the tokens of that step."""
        self._traces = options.traces
        self._can_retry = True
        self._prepared = True
        self._spans: list[TokenSpan] = []
        self._paused: frozenset[str] = frozenset()  # ids of requests

    def _make_graphs(self, max_rows: int) -> DecodeGraphs | None:
        if self._deterministic or not self._base.can_capture:
            return None
        graphs = DecodeGraphs(self._base, self._cache, self._states)
        graphs.capture_sizes(max_rows)
        return graphs

    def _make_pool(self, states: StateBudget, snapshots: StateSnapshots, probe: AttentionProbe) -> StatePool:
        pool = StatePool(self._base.device, states.max_slots, snapshots.drop_oldest)
        if self._keeps_states and kind_of(self._base.device).has_kernels:
            with memory_errors(self._base.device):
                pool.allocate({layer: layer_states[-1] for layer, layer_states in probe.states.items()})
        return pool

    def _sizes(self, token_bytes: int, state_bytes: int) -> tuple[int, int]:
        """The bytes of a cached token and of a state that decide how many there may be."""
        return token_bytes, state_bytes

    @property
    def has_work(self) -> bool:
        return any(request_id not in self._paused for request_id in self._requests)

    def submit(self, sample: Sample) -> None:
        """Enqueue a request. Raises UserError, and stores nothing, if the request can never run."""
        max_new_tokens = self._max_new_tokens(sample)
        if grammar := _grammar_of(sample):
            self._grammars.compile(grammar)
        image_input = self._base.prepare_images(sample.prompt_T, sample.images, sample.cache_scope)
        request = Request(sample, self._capture(sample.version_id), self._num_requests, max_new_tokens, image_input)
        self._num_requests += 1
        self._requests[sample.request_id] = [self._sequence(request, 0)]
        self._admit(self._requests[sample.request_id][0])

    def _admit(self, sequence: Sequence) -> None:
        self._batcher.add(sequence)

    def cancel(self, request_id: str) -> bool:
        """Drop a waiting or running request and free its blocks at once."""
        sequences = self._requests.pop(request_id, None)
        if sequences is not None:
            self._batcher.remove(sequences)
        return sequences is not None

    def pause(self, request_ids: Collection[str]) -> None:
        """A paused request keeps its tokens; its keys and values stay as long as the cache has room for them."""
        self._paused = frozenset(request_ids)
        self._batcher.pause(self._paused)

    def step(self, scopes: Collection[str] | None = None) -> list[tuple[str, SampleResult | UserError]]:
        """Run one step. If memory runs out, the youngest half of the running sequences is preempted and the step is
        repeated with the others. A request that does not fit even alone fails.
        """
        with self._traces.sampling(lambda: self.has_work):
            return self._step(scopes)

    def _step(self, scopes: Collection[str] | None) -> list[tuple[str, SampleResult | UserError]]:
        self._settled = []
        self.collect()
        while True:
            self._prepared = True
            self._spans = []
            # The error is dropped before the next attempt: its traceback holds what the step had allocated.
            shortage = self._attempt(scopes)
            if shortage is None:
                break
            self._recover(shortage)
        if self._batcher.note_success():
            self._cache_budget.relax()
        return self._settled

    def _attempt(self, scopes: Collection[str] | None) -> str | None:
        """Run one step; returns the message of a shortage of memory, or None."""
        before = self._unread[-1] if self._unread else None
        try:
            with memory_errors(self._base.device):
                with stage("decode: schedule"):
                    self._cache_budget.fit()
                    step = self._schedule(scopes)
                self._spans = step.spans
                if step.spans:
                    self._prepared = False
                    with torch.inference_mode():
                        self._run(step)
                is_late = bool(self._unread) and self._unread[-1] is not before
                with stage("decode: read"):
                    self._read_all_but(int(is_late))
                if is_late:
                    self._retire([sequence for sequence in self._unread[-1].sequences if sequence.is_full])
        except MemoryError as error:
            if not self._can_retry:
                self._rewind()
                raise
            return str(error)
        return None

    def _schedule(self, scopes: Collection[str] | None) -> SamplerStep:
        step = self._batcher.schedule(scopes)
        is_whole = scopes is None and not self._unread
        while is_whole and not step.spans and self._batcher.waiting and self._batcher.pool.limit is not None:
            self._cache_budget.relax()  # the oldest sequence needs more than the lowered limit
            step = self._batcher.schedule()
        return step

    def _rewind(self) -> None:
        """Undo the interrupted step; requests that it has already finished stay finished."""
        if self._contiguous:
            self._contiguous.clear()
        if self._prepared:
            self._batcher.rewind(self._spans)
        else:  # block copies and zeroing may be incomplete
            self._cache_budget.abandon_growth()

    def _recover(self, shortage: str) -> None:
        num_ran = len(self._batcher.running)
        self._rewind()
        log.warning("out of memory in a decode step; continuing with fewer samples", running=num_ran, lack=shortage)
        if self._batcher.throttle(num_ran):
            return
        sequence = next(iter(self._batcher.running or self._batcher.waiting), None)
        if sequence is None:
            raise MemoryError(shortage)
        request = sequence.request
        self._settle(
            request,
            UserError(
                f"this sample, a prompt of {request.num_prompt} tokens and up to {request.max_new_tokens} new ones, "
                f"does not fit into the engine's memory, even alone: {shortage}; shorten the prompt or lower max_tokens"
            ),
        )

    def partials(self) -> list[Partial]:
        partials, self._partials = self._partials, []
        return partials

    def cache_use(self) -> CacheUse:
        pool = self._batcher.pool
        uncaptured_steps = {} if self._graphs is None else dict(self._graphs.uncaptured_steps)
        return CacheUse(pool.num_live, pool.num_cached, pool.max_blocks, len(self._batcher.waiting), uncaptured_steps)

    def forget_weight_addresses(self) -> None:
        """The base model's memory, and that of adapters, is elsewhere from now on."""
        self._decoding = [], None
        if self._graphs is not None:
            self._graphs.clear()

    def collect(self) -> None:
        """Drop the bookkeeping of versions that were replaced or removed; their owner may call this after either."""
        for version_id, weights in list(self._weights.items()):
            if version_id is not None and self._versions.get(version_id) is not weights.adapter:
                weights.alive = False
                self._batcher.pool.forget(weights.weights_id)
                if self._batcher.snapshots is not None:
                    self._batcher.snapshots.forget(weights.weights_id)
                del self._weights[version_id]
        if not self._requests:
            # They hold adapters; while there are requests, the next LoRA batches replace them.
            self._lora_batches.clear()
            self._decoding, self._drawing = ([], None), ([], None)

    def _max_new_tokens(self, sample: Sample) -> int:
        """Raises UserError if the request can never run."""
        num_prompt, context = len(sample.prompt_T), self._base.max_context_length
        if num_prompt == 0:
            raise UserError("the prompt is empty; it needs at least one token")
        if sample.prompt_T.min() < 0 or sample.prompt_T.max() >= self._base.vocab_size:
            raise UserError(f"the prompt holds token ids outside the vocabulary [0, {self._base.vocab_size})")
        if max_target(sample) >= self._base.vocab_size:
            raise UserError(f"target_prompt_logprobs holds ids outside the vocabulary [0, {self._base.vocab_size})")
        # The last token is only returned: its keys and values are never cached.
        capacity = self._cache_budget.capacity + 1
        room = min(sample.max_answer_tokens(context), capacity - num_prompt)
        max_tokens = sample.params.max_tokens
        num_new = max(room, 1) if max_tokens is None else max_tokens
        if num_new < 1 or sample.num_samples < 1:
            raise UserError(f"max_tokens is {num_new} and num_samples {sample.num_samples}; both must be at least 1")
        if num_new > room:
            least = " (at least 1)" if max_tokens is None else ""
            cache = f", of which the KV cache can hold {capacity}" if capacity < context else ""
            raise UserError(
                f"prompt ({num_prompt} tokens) + max_tokens ({num_new}{least}) exceed the context length "
                f"({context} tokens{cache})"
            )
        return num_new

    def _capture(self, version_id: str | None) -> Weights:
        self.collect()
        weights = self._weights.get(version_id)
        if weights is None:
            adapter = None if version_id is None else self._versions.get(version_id)
            if adapter is None:
                raise NotFoundError(f"weights {version_id!r} do not exist; publish or load them first")
            weights = self._weights[version_id] = Weights(adapter, self._num_weights)
            self._num_weights += 1
        return weights

    def _sequence(self, request: Request, index: int) -> Sequence:
        stop = request.stop_rule(self._decode, self._base.eos_token_ids)
        return Sequence(request, index, stop, self._grammars.constraint(request.sample.params.adjustments))

    def _decode(self, token_ids: list[int]) -> str:
        # Calls the Rust tokenizer: transformers' decode is much slower for a few tokens.
        return self._base.tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=False)

    def _run(self, step: SamplerStep) -> None:
        with stage("decode: forward"):
            self._prepare(step)
            forward = self._forward_chunks if self._deterministic else self._forward
            spans, hidden_TD = forward(step.spans)
        with stage("decode: sample"):
            self._sample(self._score(spans, hidden_TD), hidden_TD)

    def _prepare(self, step: SamplerStep) -> None:
        self._cache_budget.grow()
        self._cache.prepare(step.copies, step.fresh)
        self._prepared = True

    def _advance(self, spans: Seq[TokenSpan], recurrence: Recurrence | None) -> None:
        """Advance the spans, with their states, and store snapshots at their cuts."""
        self._batcher.advance(spans)
        if recurrence is None:
            return
        for span, state in zip(spans, recurrence.final_states, strict=True):
            span.sequence.state = state
        for span, states in zip(spans, recurrence.cut_states, strict=True):
            inside = cuts_between(span.start, span.stop, span.sequence.cuts)
            for cut, state in zip(inside, states, strict=True):
                self._snapshot(span.sequence, span.start + cut, state)
            self._store_state(span.sequence, span.stop, span.sequence.state)

    def _store_state(self, sequence: Sequence, position: int, state: SequenceState | None) -> None:
        """Store a snapshot if this position is a cut; keep the state of the answer's last block boundary."""
        if position in sequence.cuts:
            self._snapshot(sequence, position, state)
        elif state is not None and position > sequence.request.num_prompt and not position % self._batcher.block_size:
            sequence.tail = position, state

    def _snapshot(self, sequence: Sequence, position: int, state: SequenceState | None) -> None:
        snapshots, weights, size = self._batcher.snapshots, sequence.request.weights, self._batcher.block_size
        if snapshots is not None and state is not None and weights.alive:
            snapshots.add(sequence.key(position // size - 1, size), weights.weights_id, state)

    def _forward(self, spans: Seq[TokenSpan]) -> tuple[list[tuple[TokenSpan, int]], Tensor]:
        """Final hidden states of the rows to sample from or to score, and each span with its number of such rows.

        Where there are graphs, decoding rows are a batch of their own: beside a prompt, or a row of a sequence with
        images, they would leave them.
        """
        if self._graphs is None:
            return self._forward_spans(spans)
        decoding: list[TokenSpan] = []
        ungraphed: list[TokenSpan] = []
        for span in spans:
            is_single = span.start > 0 and span.stop - span.start == 1
            (decoding if is_single and span.sequence.request.image_input is None else ungraphed).append(span)
        # Prompts last: without rows to sample from they have a row that no span counts.
        parts = [self._forward_decoding(decoding)] if decoding else []
        parts += [self._forward_spans(ungraphed)] if ungraphed else []
        counted_spans = [counted for counted_part, _ in parts for counted in counted_part]
        return counted_spans, parts[0][1] if len(parts) == 1 else torch.cat([hidden_TD for _, hidden_TD in parts])

    def _forward_decoding(self, spans: Seq[TokenSpan]) -> tuple[list[tuple[TokenSpan, int]], Tensor]:
        """`_forward` of single rows that continue sequences without images."""
        assert self._graphs is not None
        spans = _sort_by_adapter(spans)
        lora_batch = self._decoding_batch([span.sequence.request.weights.adapter for span in spans])
        starts, blocks = [span.start for span in spans], [span.sequence.blocks for span in spans]
        tokens_T, recurrence = self._upload_tokens(spans), self._open_recurrence(spans)
        hidden_TD = self._graphs.hidden(tokens_T, starts, blocks, lora_batch, recurrence)
        if hidden_TD is not None:
            self._advance(spans, recurrence)
            return [(span, 1) for span in spans], hidden_TD
        del recurrence  # with its slots
        return self._forward_spans(spans)

    def _forward_spans(self, spans: Seq[TokenSpan]) -> tuple[list[tuple[TokenSpan, int]], Tensor]:
        """`_forward` of any rows, in one forward without a graph."""
        spans = _sort_by_adapter(spans)
        adapters = [span.sequence.request.weights.adapter for span in spans]
        rows = [_sequence_rows(span) for span in spans]
        tokens_T = self._upload_tokens(spans)
        sizes = [span.num_tokens for span in spans]
        has_images = any(span.sequence.request.image_input for span in spans)
        lora_batch = self._lora_batch(adapters, sizes, on_device=not has_images)
        recurrence = self._open_recurrence(spans)
        plan = PagedPlan(self._cache, rows, self._base.device, self._contiguous, recurrence=recurrence)
        counts = [span.num_output_rows for span in spans]
        ends = accumulate(sizes)
        output_rows = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
        if not output_rows:  # the first chunks of prompts need no logits: compute one row
            output_rows = [len(tokens_T) - 1]
        positions_T, images = self._positions(plan, spans)
        hidden_TD = self._base.hidden(
            tokens_T, positions_T, plan, lora_batch, None if len(output_rows) == len(tokens_T) else output_rows, images
        )
        self._advance(spans, recurrence)
        return list(zip(spans, counts, strict=True)), hidden_TD

    def _open_recurrence(self, spans: Seq[TokenSpan]) -> Recurrence | None:
        """The spans' states; None where no layer keeps any."""
        if not self._keeps_states:
            return None
        firsts = accumulate((span.num_tokens for span in spans), initial=0)
        return Recurrence(
            [_recurrent_span(span, first) for span, first in zip(spans, firsts, strict=False)], self._states
        )

    def _decoding_batch(self, adapters: Seq[Adapter | None]) -> DeviceLoRABatch:
        """One row for each adapter: mostly those of the step before, which its logits have, too."""
        last_adapters, lora_batch = self._decoding
        if lora_batch is None or adapters != last_adapters:
            lora_batch = DeviceLoRABatch.of(adapters, [1] * len(adapters))
            self._decoding = list(adapters), lora_batch
        return lora_batch

    def _lora_batch(self, adapters: Seq[Adapter | None], sizes: Seq[int], *, on_device: bool = True) -> LoRABatch:
        """Decode steps repeat their rows: the second LoRA batch of these rows is cached, with its stacked matrices. A
        GPU needs neither; `on_device` is False for rows with images, which take no DeviceLoRABatch.
        """
        if self._graphs is not None and on_device:
            return self._decoding_batch(adapters) if set(sizes) == {1} else DeviceLoRABatch.of(adapters, sizes)
        if self._graphs is not None or self._deterministic:
            return LoRABatch.of(adapters, sizes)
        key = tuple(None if adapter is None else adapter.version for adapter in adapters), tuple(sizes)
        is_repeated = key in self._lora_batches
        lora_batch = self._lora_batches.pop(key, None) or LoRABatch.of(adapters, sizes, repeats=is_repeated)
        self._lora_batches[key] = lora_batch if is_repeated else None
        while len(self._lora_batches) > MAX_LORA_BATCHES:
            self._lora_batches.popitem(last=False)
        return lora_batch

    def _upload_tokens(self, spans: Seq[TokenSpan]) -> Tensor:
        """[T]: the spans' tokens on the device, with those that are unread."""
        sizes = [stop - start for _, start, stop in spans]
        last_rows = np.cumsum(sizes) - 1
        if last_rows[-1] + 1 == len(spans):
            tokens_T = np.fromiter((sequence.tokens_T[start] for sequence, start, _ in spans), np.int64, len(spans))
        else:
            tokens_T = np.concatenate([sequence.tokens_T[start:stop] for sequence, start, stop in spans])
        on_device_T = upload(tokens_T, self._base.device, torch.int64)
        # The last row of a sequence with an unread token is that token.
        unread_rows = np.array([s.sequence.unread_row if s.sequence.num_unread else -1 for s in spans])
        if (is_unread := unread_rows >= 0).any():
            targets, sources = upload_all([last_rows[is_unread], unread_rows[is_unread]], self._base.device)
            drawn_B = self._unread[-1].chosen.token_ids_B
            on_device_T.index_copy_(0, targets, drawn_B.index_select(0, sources))
        return on_device_T

    def _positions(self, plan: PagedPlan, spans: Seq[TokenSpan]) -> tuple[Tensor, ImageRows | None]:
        """RoPE positions, which after an image differ from cache positions, and the rows of images."""
        if not any(span.sequence.request.image_input for span in spans):
            return plan.positions_T, None
        input_spans = [InputSpan(span.sequence.request.image_input, span.start, span.stop) for span in spans]
        positions, images = self._base.pack_positions(input_spans)
        return upload(positions, self._base.device), images

    def _forward_chunks(self, spans: Seq[TokenSpan]) -> tuple[list[tuple[TokenSpan, int]], Tensor]:
        """Final hidden states of every row of the spans, in forwards whose shapes depend on positions alone.

        A kernel chooses the order of its additions by the shapes of its inputs. So a position is always computed at the
        same row of the same chunk of its sequence, with no other sequence in the forward: earlier rows of the chunk are
        computed again, and later rows hold copies of the last token, whose keys and values are dropped.
        """
        hidden_parts = []
        for span in spans:
            sequence, state = span.sequence, span.sequence.state
            adapter, image_input = sequence.request.weights.adapter, sequence.request.image_input
            position, num = span.start, self._chunk_rows
            while position < span.stop:
                first, end = position - position % num, position - position % num + num
                if image_input is not None:
                    first, end, num = image_input.align_piece(position, self._chunk_rows)
                output_rows = slice(position - first, min(span.stop, end) - first)
                position, is_complete = first + output_rows.stop, output_rows.stop == num
                tokens_T = np.pad(sequence.tokens_T[first:position], (0, num - output_rows.stop), "edge")
                hidden_TD, after = self._forward_chunk(
                    self._cache, tokens_T, first, sequence.blocks, adapter, output_rows, state, image_input
                )
                hidden_parts.append(hidden_TD)
                if is_complete:  # the next chunk starts from this state
                    state = after
                    self._store_state(sequence, first + output_rows.stop, state)
            sequence.state = state
            self._batcher.advance([span])
        return [(span, span.num_tokens) for span in spans], torch.cat(hidden_parts)

    def _forward_chunk(
        self,
        cache: KVCache,
        tokens_T: I32,
        first: int,
        blocks: Seq[int],
        adapter: Adapter | None,
        output_rows: slice,
        state: SequenceState | None,
        image_input: ImageInput | None = None,
    ) -> tuple[Tensor, SequenceState | None]:
        """[n, D]: hidden states of `output_rows` of the chunk that begins at position `first` with `state`; and the
        state after the chunk.
        """
        num = len(tokens_T)
        visible_counts = image_input.visible_counts(first, first + num) if image_input is not None else None
        rows = SequenceRows(first, first + num, [*blocks, *[0] * num], None, visible_counts)
        recurrence = Recurrence([RecurrentSpan(0, num, state)], self._states) if self._keeps_states else None
        plan = PagedPlan(cache, [rows], self._base.device, written_rows=output_rows, recurrence=recurrence)
        rows_T = upload(tokens_T, self._base.device, torch.int64)
        positions_T, images = plan.positions_T, None
        if image_input is not None:
            positions, images = self._base.pack_positions([InputSpan(image_input, first, first + num)])
            positions_T = upload(positions, self._base.device)
        lora_batch = LoRABatch([Segment(0, num, adapter)])
        hidden_TD = self._base.hidden(rows_T, positions_T, plan, lora_batch, images=images)
        return hidden_TD[output_rows], recurrence.final_states[0] if recurrence is not None else None

    @torch.inference_mode()
    def _check_repeatable(self) -> None:
        """Raises SettingsError if repeating the same forward gives different bits."""
        num = self._chunk_rows
        tokens_T = (7 * np.arange(2 * num) % self._base.shape.vocab_size).astype(np.int32)
        runs = []
        for _ in range(2):
            cache = KVCache(layer_shapes(self._base), num, self._base.device)
            cache.resize(3)  # block 0 is the null block
            first, state = self._forward_chunk(cache, tokens_T[:num], 0, [1, 2], None, slice(num), None)
            second, _ = self._forward_chunk(cache, tokens_T[num:], num, [1, 2], None, slice(num), state)
            runs.append([first, second, self._base.logits(second[-1:], LoRABatch.of_base(1))])
        if not all(torch.equal(first, second) for first, second in zip(*runs, strict=True)):
            raise SettingsError("repeating a forward gives different bits on this machine: it is not deterministic")

    def _score(self, spans: Seq[tuple[TokenSpan, int]], hidden_TD: Tensor) -> list[tuple[TokenSpan, int]]:
        """Compute prompt logprobs where requested; returns the spans to sample from, each with its last row."""
        complete, end = [], 0
        for span, num_rows in spans:
            begin, end = end, end + num_rows
            sequence, start, stop = span
            scores = sequence.request.scores
            if scores.next_row is not None and not self._score_prompt(sequence.request, hidden_TD[begin:end], start):
                self._settle(sequence.request, UserError(NOT_FINITE))
            elif stop == sequence.length:
                complete.append((span, end - 1))
        return complete

    def _score_prompt(self, request: Request, hidden_TD: Tensor, start: int) -> bool:
        max_rows = 1 if self._deterministic else None
        return score_prompt(self._base, request.scores, request.weights.adapter, hidden_TD, start, max_rows)

    def _sample(self, spans: Seq[tuple[TokenSpan, int]], hidden_TD: Tensor) -> None:
        """Sample the next token of sequences without pending tokens, and the first token of forked siblings."""
        if self._deterministic and len(spans) > 1:
            for span in spans:
                self._sample([span], hidden_TD)
            return
        if not spans:
            return
        # Pad with copies of the last row, as in a CPU's layers: every new number of rows is another matmul to compile.
        num_padding = round_up(len(spans)) - len(spans) if is_on_host(hidden_TD) else 0
        rows = [row for _, row in [*spans, *[spans[-1]] * num_padding]]
        adapters = [span.sequence.request.weights.adapter for span, _ in spans]
        lora_batch = self._lora_batch([*adapters, *[None] * num_padding], [1] * len(rows))
        if rows != [*range(len(hidden_TD))]:
            hidden_TD = hidden_TD.index_select(0, upload(np.array(rows), hidden_TD.device))
        logits_BV = self._base.next_logits(hidden_TD, lora_batch)[: len(spans)]
        leaders, sequences = self._fork_prompts([span.sequence for span, _ in spans])
        if self._deterministic:
            for sequence in sequences:
                row_logits_1V = logits_BV.clone()  # `choose` works in place
                self._queue_readback([sequence], self._choose(row_logits_1V, [sequence]))
            return
        if len(sequences) > len(spans):
            logits_BV = logits_BV.index_select(0, upload(np.array(leaders), logits_BV.device))
        self._queue_readback(sequences, self._choose(logits_BV, sequences))

    def _choose(self, logits_BV: Tensor, sequences: Seq[Sequence]) -> SampledTokens:
        """Sample each sequence's next token. Overwrites the logits."""
        logits_BV = place_for_float64(logits_BV)
        adjusted, draws = adjust(logits_BV, sequences), self._draw_params(sequences)
        if adjusted is None:
            return choose(logits_BV, draws)
        return choose(logits_BV, draws, adjusted.logits_BV)._replace(exhausted_B=adjusted.exhausted_B)

    def _draw_params(self, sequences: Seq[Sequence]) -> DrawParams:
        """Mostly those of the step before, with other numbers."""
        uniform_B = np.array([uniform(s.request.seed, s.index, s.length - s.request.num_prompt) for s in sequences])
        last_sequences, draws = self._drawing
        if draws is not None and sequences == last_sequences:
            return replace(draws, uniform_B=uniform_B)
        temperature_B, top_k_B, top_p_B, min_p_B, num_top_B = np.array([s.request.draw for s in sequences]).T
        draws = DrawParams(
            temperature_B=temperature_B.astype(np.float32),
            top_k_B=top_k_B.astype(np.int64),
            top_p_B=top_p_B,
            uniform_B=uniform_B,
            min_p_B=min_p_B,
            num_top_B=num_top_B.astype(np.int64),
        )
        self._drawing = list(sequences), draws
        return draws

    def _fork_prompts(self, leaders: Seq[Sequence]) -> tuple[Seq[int], Seq[Sequence]]:
        """The sequences whose next token is drawn, and the index of each one's leader: leaders, and the other answers
        of requests whose prompt was just computed, as far as they can run at once.
        """
        if all(leader.request.forked for leader in leaders):
            return range(len(leaders)), leaders
        indices: list[int] = []
        sequences: list[Sequence] = []
        for index, leader in enumerate(leaders):
            family = [leader] if leader.request.forked else [leader, *self._fork(leader)]
            sequences += family
            indices += [index] * len(family)
        return indices, sequences

    def _fork(self, leader: Sequence) -> list[Sequence]:
        """The other answers of the request, as far as they can run at once."""
        request = leader.request
        request.forked = True
        children = [self._sequence(request, index) for index in range(1, request.sample.num_samples)]
        self._requests[request.sample.request_id] += children
        return self._batcher.fork(leader, children)

    def _queue_readback(self, sequences: Seq[Sequence], chosen: SampledTokens) -> None:
        """Append each sequence's token, at once or in the next step."""
        top = () if chosen.top is None else (chosen.top.ids_Rk, chosen.top.logprobs_Rk)
        flags = () if chosen.exhausted_B is None else (chosen.exhausted_B,)
        readback = Readback(chosen.token_ids_B, chosen.logprobs_B, *top, *flags)
        self._unread.append(_PendingReadback(sequences, chosen, readback))
        if self._reads_late and not any(sequence.request.needs_answer for sequence in sequences):
            for row, sequence in enumerate(sequences):
                sequence.extend(row)
        else:
            self._read_all_but(0)

    def _read_all_but(self, num: int) -> None:
        """Read the tokens of all steps but the last `num`."""
        while len(self._unread) > num:
            self._append(self._unread.pop(0))

    def _retire(self, sequences: Seq[Sequence]) -> None:
        """Free what sequences hold whose last token was drawn."""
        for sequence in sequences:
            if sequence.tail is not None:
                self._snapshot(sequence, *sequence.tail)
        if sequences:
            self._batcher.retire(sequences)

    def _append(self, pending: _PendingReadback) -> None:
        """Append each sequence's token and settle requests that end."""
        sequences, chosen = pending.sequences, pending.chosen
        if not any(sequence.is_open for sequence in sequences):
            return
        ids_B, logprobs_B, *topk_and_flags = pending.readback.values()
        topk_rows = (
            {} if chosen.top is None else _topk_rows(sequences, chosen.top.rows, topk_and_flags[0], topk_and_flags[1])
        )
        errors = {row: UserError(NOT_FINITE) for row in np.flatnonzero(np.isnan(logprobs_B)).tolist()}
        if chosen.exhausted_B is not None:
            errors |= {row: UserError(EXHAUSTED) for row in np.flatnonzero(topk_and_flags[-1]).tolist()}
        for row, (sequence, token, logprob) in enumerate(
            zip(sequences, ids_B.tolist(), logprobs_B.tolist(), strict=True)
        ):
            if not sequence.is_open:
                continue  # ended by an earlier token, cancelled, or failed with a sibling
            request = sequence.request
            if errors and row in errors:
                self._settle(request, errors[row])
                continue
            position = sequence.length - sequence.num_unread
            topk = topk_rows.get(row) if topk_rows else None
            reason = sequence.append(token, logprob, topk)
            if sequence.num_cached > position:
                self._batcher.register(sequence, position, position + 1)
            if sequence.constraint and (error := sequence.constraint.error):
                self._settle(request, error)
                continue
            if request.sample.stream:
                self._partials.append(_partial(sequence, token, logprob, topk))
            if reason is None:
                continue
            self._retire([sequence])
            sequence.is_open = False
            self._requests[request.sample.request_id].remove(sequence)
            result = request.finish(sequence.index, sequence.answer(reason))
            if result is not None:
                self._settle(request, result)

    def _settle(self, request: Request, outcome: SampleResult | UserError) -> None:
        request_id = request.sample.request_id
        self._batcher.remove(self._requests.pop(request_id))
        self._settled.append((request_id, outcome))


def _sort_by_adapter(spans: Seq[TokenSpan]) -> list[TokenSpan]:
    """Rows of one adapter are adjacent, so that each adapter multiplies once per linear. Adapters with equally many
    rows are adjacent, too, and those with many: they can share a batched matmul, whose matrices are reused.
    """
    if len({id(span.sequence.request.weights) for span in spans}) == 1:
        return list(spans)
    weights_ids = {id(span): span.sequence.request.weights.weights_id for span in spans}
    num_rows: Counter[int] = Counter()
    for span in spans:
        num_rows[weights_ids[id(span)]] += span.num_tokens
    return sorted(spans, key=lambda span: (min(num_rows[weights_ids[id(span)]], MANY_ROWS), weights_ids[id(span)]))


def _sequence_rows(span: TokenSpan) -> SequenceRows:
    image_input = span.sequence.request.image_input
    visible_counts = image_input.visible_counts(span.start, span.stop) if image_input is not None else None
    return SequenceRows(span.start, span.stop, span.sequence.blocks, span.sequence, visible_counts)


def _recurrent_span(span: TokenSpan, first: int) -> RecurrentSpan:
    sequence = span.sequence
    cuts = cuts_between(span.start, span.stop, sequence.cuts)
    return RecurrentSpan(first, span.num_tokens, sequence.state, cuts)


def _grammar_of(sample: Sample) -> Grammar | None:
    adjustments = sample.params.adjustments
    return adjustments.grammar if adjustments else None


def _partial(sequence: Sequence, token: int, logprob: float, top: TopRow | None) -> Partial:
    """The newest token of a sequence, for streaming."""
    topk = () if top is None else ((tuple(top[0].tolist()), tuple(top[1].tolist())),)
    request_id = sequence.request.sample.request_id
    position = sequence.num_read - sequence.request.num_prompt - 1
    return Partial(request_id, sequence.index, position, (token,), (logprob,), topk)


def _topk_rows(sequences: Seq[Sequence], rows: Seq[int], ids_Rk: I64, logprobs_Rk: F32) -> dict[int, TopRow]:
    """Row -> its likeliest tokens and their logprobs, for the rows whose request asks for them."""
    topk_by_row = {}
    for index, row in enumerate(rows):
        k = sequences[row].request.sample.topk_sample_logprobs
        # Copies, so that a row with small k does not keep the widest row's batch alive.
        topk_by_row[row] = (ids_Rk[index, :k].astype(np.int32), logprobs_Rk[index, :k].copy())
    return topk_by_row
