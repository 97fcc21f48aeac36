"""From hidden states to log probabilities and back, one chunk of rows at a time; and the metrics of a pass.

Logits of all rows never exist at once: a chunk's logits are computed, read, turned into the gradient of the hidden
states in place, and dropped. Every pair's log probability is returned; only rows with a pair of non-zero weight are
differentiated. The unembedding's adapters are applied and trained here. `compute_metrics` computes metrics on the host
from the log probabilities that the client gets, with the formulas of the gradient, and sums in float64. Every metric
key has one ':', whose right side tells the SDK how to combine chunks.

On CUDA `head_kernels` reads a chunk's logits once for the log probabilities and once for their gradient, which it
writes in the model's dtype. What the host computes of a call's rows is uploaded at once, before its first matmul.

Shapes: T rows of a micro-batch, R chosen rows, C rows of a chunk, P pairs, p pairs of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import islice, pairwise
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.backends.device_errors import is_device_fault, is_out_of_memory
from tinsmith.backends.torch.batch import ADVANTAGE, COLUMNS, SAMPLING_LOGPROB, Example, MicroBatch, extra_column
from tinsmith.backends.torch.custom_loss import CustomRun
from tinsmith.backends.torch.host import read, upload, upload_all
from tinsmith.backends.torch.lora_batch import AdapterGroup, LoRABatch
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import UserError
from tinsmith.losses import Loss
from tinsmith.losses.divergence import measure_divergence
from tinsmith.losses.formulas import SEQUENCE_COUNT, Columns, LossTerms, sequence_log_ratios
from tinsmith.runtime.devices import is_on_host, kind_of
from tinsmith.types import F32, I64

if TYPE_CHECKING:
    from tinsmith.backends.torch.head_kernels import Softmax

CACHED_ELEMENTS = 2**18
"""Float32 elements that stay in the cache of a CPU's core."""

MATMUL_CHUNKS, SUBCHUNKS = 2, 4
"""In bfloat16 on a CPU: the chunks whose logits are one matmul, and the subchunks of each that become float32."""


class LossSpec(NamedTuple):
    """A pass's loss: its registry entry and its complete configuration; `custom` runs a client's own loss."""

    loss: Loss
    config: Mapping[str, float]
    custom: CustomRun | None = None

    @property
    def extra_columns(self) -> dict[str, str]:
        """A plug-in's columns, and the names under which its formula reads them."""
        counts = (SEQUENCE_COUNT,) if self.loss.distribution and self.loss.sequence_ratio else ()
        return {extra_column(name): name for name in (*self.loss.extra_inputs, *counts)}

    def evaluate(self, x: Columns) -> LossTerms:
        """The formula's terms. Raises UserError if a plug-in fails; errors of the device or of memory pass."""
        if not self.loss.distribution:
            return self.loss.formula(x, self.config)
        try:
            terms = self.loss.formula(x, self.config)
        except Exception as error:
            if is_out_of_memory(error) or is_device_fault(error):
                raise
            raise self._failure(f"{type(error).__name__}: {error}") from error
        if not isinstance(terms, LossTerms):
            raise self._failure(f"its formula returned {type(terms).__name__}, not LossTerms")
        for name, term in terms._asdict().items():
            if not isinstance(term, Tensor) or (term.shape, term.dtype) != (x.logprob_P.shape, torch.float32):
                kind = f"{term.dtype} of shape {list(term.shape)}" if isinstance(term, Tensor) else type(term).__name__
                raise self._failure(f"its {name} is {kind}, not float32 of shape {list(x.logprob_P.shape)}")
        return terms

    def _failure(self, reason: str) -> UserError:
        return UserError(f"the loss {self.loss.name!r} of {self.loss.distribution} failed: {reason}")


class Chunk(NamedTuple):
    """Rows, their pairs, and each pair's index into the chunk's flattened logits and rows. Row c's pairs are those from
    `starts_C[c]` to `starts_C[c + 1]`. `subchunks`: the same rows in smaller chunks, if not all float32 logits may
    exist at once.
    """

    hidden_CD: Tensor
    rows: Tensor | slice
    lora_batch: LoRABatch
    pairs_p: Tensor | slice
    cells_p: Tensor
    local_p: Tensor
    starts_C: Tensor
    pass_spans: list[tuple[int, int, int]]  # pass index, first and last + 1 of the chunk's pairs
    subchunks: list[Chunk]


class Head:
    def __init__(self, base: BaseModel, chunk_rows: int) -> None:
        self._base = base
        kind = kind_of(base.device)
        self._has_kernels = kind.has_kernels
        self._chunk_rows = self._subchunk_rows = chunk_rows
        self._scratch: Tensor | None = None
        if kind.is_host and base.dtype == torch.bfloat16:
            # A CPU rounds matmuls to bfloat16. Stored so and widened in subchunks, logits of more rows take no more
            # memory, and their matmuls less time.
            self._chunk_rows, self._subchunk_rows = MATMUL_CHUNKS * chunk_rows, max(1, chunk_rows // SUBCHUNKS)

    @torch.no_grad()
    def score(self, batch: MicroBatch, hidden_TD: Tensor) -> Tensor:
        """[P] log probabilities."""
        logprob_P = torch.empty(len(batch.row_P), device=hidden_TD.device)
        self._score(batch, hidden_TD, np.arange(len(hidden_TD)), logprob_P)
        return logprob_P

    @torch.no_grad()
    def differentiate(
        self, batch: MicroBatch, hidden_TD: Tensor, specs: Mapping[int, LossSpec]
    ) -> tuple[Tensor, Tensor]:
        """[P] log probabilities and [T, D] the loss's gradient; adds the gradients of the unembedding's adapters."""
        logprob_P = torch.empty(len(batch.row_P), device=hidden_TD.device)
        weight_P = self._pair_weights(batch, hidden_TD, specs)[batch.pairs]
        active_T = batch.rows_of_pairs(weight_P != 0)
        self._score(batch, hidden_TD, np.flatnonzero(~active_T), logprob_P)
        extra = {name: None for example in batch.examples for name in specs[example.pass_index].extra_columns}
        host_columns = {name: batch.column_P(name) for name in (*COLUMNS, *extra)} | {"weight": weight_P}
        columns = dict(zip(host_columns, upload_all([*host_columns.values()], self._base.device), strict=True))
        columns["sequence_log_ratio"] = self._log_ratios(batch, hidden_TD, specs)[batch.pairs]
        grad_TD = torch.zeros_like(hidden_TD)
        for chunk in self._chunks(batch, hidden_TD, np.flatnonzero(active_T), self._chunk_rows):
            grad_TD[chunk.rows] = self._differentiate(chunk, specs, columns, logprob_P)
        return logprob_P, grad_TD

    def _score(self, batch: MicroBatch, hidden_TD: Tensor, rows_R: I64, logprob_P: Tensor) -> None:
        for chunk in self._chunks(batch, hidden_TD, rows_R, self._chunk_rows):
            for subchunk, frozen_CV in self._iterate_subchunks(chunk):
                logprob_P[subchunk.pairs_p] = self._logprobs(subchunk, frozen_CV)

    def _logprobs(self, chunk: Chunk, frozen_CV: Tensor | None) -> Tensor:
        """[p]"""
        raw_CV, _ = self._raw_logits(chunk, frozen_CV)
        if self._has_kernels:
            return self._read_logprobs(raw_CV, chunk)[2]
        return self._normalise(self._base.finish_logits_(raw_CV), chunk)[1]

    def _iterate_subchunks(self, chunk: Chunk) -> Iterator[tuple[Chunk, Tensor | None]]:
        """The chunk, or its subchunks, each with its part of x W^T in the scratch.

        The scratch stays, since page faults of its size take much of a step with a large vocabulary.
        """
        if not chunk.subchunks:
            yield chunk, None
            return
        unembedding, num_rows = self._base.unembedding, len(chunk.hidden_CD)
        if self._scratch is None or len(self._scratch) < num_rows:
            self._scratch = chunk.hidden_CD.new_empty(num_rows, unembedding.out_features)
        frozen_CV = torch.mm(chunk.hidden_CD, unembedding.weight.t(), out=self._scratch[:num_rows])
        yield from zip(chunk.subchunks, frozen_CV.split(self._subchunk_rows), strict=True)

    def _differentiate(
        self, chunk: Chunk, specs: Mapping[int, LossSpec], columns: Mapping[str, Tensor], logprob_P: Tensor
    ) -> Tensor:
        """[C, D]"""
        adapter_groups = self._base.unembedding.groups(chunk.lora_batch)
        if not chunk.subchunks:
            grad_CV, a_outputs = self._gradient(chunk, None, specs, columns, logprob_P)
            return self._backward(grad_CV.to(chunk.hidden_CD.dtype), chunk.hidden_CD, adapter_groups, a_outputs)
        for subchunk, frozen_CV in self._iterate_subchunks(chunk):
            assert frozen_CV is not None
            frozen_CV.copy_(self._gradient(subchunk, frozen_CV, specs, columns, logprob_P)[0])
        assert self._scratch is not None  # where the subchunks' gradients are now
        a_outputs = self._base.unembedding.delta.shrink(chunk.hidden_CD, adapter_groups)
        return self._backward(self._scratch[: len(chunk.hidden_CD)], chunk.hidden_CD, adapter_groups, a_outputs)

    def _gradient(
        self,
        chunk: Chunk,
        frozen_CV: Tensor | None,
        specs: Mapping[int, LossSpec],
        columns: Mapping[str, Tensor],
        logprob_P: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """[C, V] the gradient of the unembedding's output, and what `_backward` needs of the adapters."""
        raw_CV, a_outputs = self._raw_logits(chunk, frozen_CV)
        if self._has_kernels:
            softmax, cells_p, logprob_p = self._read_logprobs(raw_CV, chunk)
            logprob_P[chunk.pairs_p] = logprob_p
            grad_p = self._dloss_dlogprob(chunk, specs, logprob_p, columns)
            return softmax.gradient(cells_p, chunk.starts_C, grad_p, chunk.hidden_CD.dtype), a_outputs
        logits_CV = self._base.finish_logits_(raw_CV)
        probs_CV, logprob_p = self._normalise(logits_CV, chunk)
        logprob_P[chunk.pairs_p] = logprob_p
        grad_p = self._dloss_dlogprob(chunk, specs, logprob_p, columns)
        # d logprob[target] / d logits = onehot(target) - softmax, summed over a row's pairs.
        grad_C = torch.zeros(len(probs_CV), device=grad_p.device).index_add_(0, chunk.local_p, grad_p)
        grad_CV = probs_CV.mul_(-grad_C[:, None])
        grad_CV.view(-1).index_add_(0, *self._target_gradients(chunk, grad_p))
        return self._base.unfinish_gradient_(grad_CV, logits_CV), a_outputs

    def _raw_logits(self, chunk: Chunk, frozen_CV: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """[C, V] float32, not finished, and what `_backward` needs of the adapters."""
        unembedding = self._base.unembedding
        return unembedding.forward_rows(chunk.hidden_CD, unembedding.groups(chunk.lora_batch), torch.float32, frozen_CV)

    def _read_logprobs(self, raw_CV: Tensor, chunk: Chunk) -> tuple[Softmax, Tensor, Tensor]:
        """The rows' softmax, each pair's cell in it, and [p] log probabilities."""
        softmax = self._softmax(raw_CV)
        return softmax, chunk.cells_p, softmax.logprobs(chunk.cells_p)

    def _softmax(self, raw_CV: Tensor) -> Softmax:
        return head_kernels().Softmax.of(raw_CV, self._base.multiplier, self._base.softcap)

    def _normalise(self, logits_CV: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """[C, V] probabilities, in place of the logits unless these are capped, and [p] log probabilities."""
        chosen_p = logits_CV.view(-1)[chunk.cells_p]
        probs_CV = logits_CV if self._base.softcap is None else logits_CV.clone()
        log_sums = []
        # A few rows at a time, which stay in a CPU's cache: faster than softmax and another pass for the sums.
        for rows_CV in probs_CV.split(
            max(1, CACHED_ELEMENTS // probs_CV.shape[1]) if is_on_host(probs_CV) else len(probs_CV)
        ):
            largest = rows_CV.amax(-1, keepdim=True)
            sums = rows_CV.sub_(largest).exp_().sum(-1, keepdim=True)
            rows_CV.div_(sums)
            log_sums.append(largest.add_(sums.log_())[:, 0])
        return probs_CV, chosen_p - torch.cat(log_sums)[chunk.local_p]

    def _target_gradients(self, chunk: Chunk, grad_p: Tensor) -> tuple[Tensor, Tensor]:
        """Each pair's index into the chunk's flattened logits, and what is added to the gradient there."""
        return chunk.cells_p, grad_p

    def _backward(
        self, grad_CV: Tensor, hidden_CD: Tensor, adapter_groups: Sequence[AdapterGroup], a_outputs: Sequence[Tensor]
    ) -> Tensor:
        """[C, D]: the gradient of the hidden states; adds the gradients of the unembedding's adapters."""
        grad_CD = self._base.unembedding.backward_rows(grad_CV, hidden_CD, adapter_groups, a_outputs, need_input=True)
        assert grad_CD is not None
        return grad_CD

    @staticmethod
    def _dloss_dlogprob(
        chunk: Chunk, specs: Mapping[int, LossSpec], logprob_p: Tensor, columns: Mapping[str, Tensor]
    ) -> Tensor:
        """[p]"""
        gradients = []
        for spec, start, stop in _merge_pass_spans(chunk.pass_spans, specs):
            pairs = _slice_indices(chunk.pairs_p, start, stop)
            old, weight, low, high, log_ratio = (
                columns[name][pairs] for name in ("old_logprob", "weight", "low", "high", "sequence_log_ratio")
            )
            inputs = {name: columns[column][pairs] for column, name in spec.extra_columns.items()}
            x = Columns(logprob_p[start:stop], old, weight, low, high, log_ratio, inputs)
            # A pair of weight 0 has no gradient, also where another pair of its row has one.
            gradients.append(spec.evaluate(x).dloss_dlogprob_P.masked_fill(weight == 0, 0.0))
        return torch.cat(gradients)

    def _log_ratios(self, batch: MicroBatch, hidden_TD: Tensor, specs: Mapping[int, LossSpec]) -> Tensor:
        """[P] of the full micro-batch: the mean log ratio of the pair's sequence, for losses that need it; 0
        elsewhere.

        Such a loss needs a whole sequence before it can differentiate a token, so its rows are scored first.
        """
        full_batch, needs_ratio = (
            batch.full_batch,
            [specs[example.pass_index].loss.sequence_ratio for example in batch.examples],
        )
        if not any(needs_ratio):
            return torch.zeros(len(full_batch.row_P), device=hidden_TD.device)
        logprob_P = self._score_examples(batch, hidden_TD, needs_ratio)
        mask_P = self._device((full_batch.column_P("ratio_mask") != 0) & full_batch.expand_to_pairs(needs_ratio))
        old_P, example_P = self._device(full_batch.column_P("old_logprob")), self._device(full_batch.example_P)
        return sequence_log_ratios(logprob_P, old_P, mask_P, example_P, len(full_batch.examples))

    def _pair_weights(self, batch: MicroBatch, hidden_TD: Tensor, specs: Mapping[int, LossSpec]) -> F32:
        """[P] of the full micro-batch: each pair's weight. For a custom loss, minus its gradient at log probabilities
        that are scored here.
        """
        full_batch, is_custom = (
            batch.full_batch,
            [specs[example.pass_index].custom is not None for example in batch.examples],
        )
        weight_P = full_batch.column_P("weight")
        if not any(is_custom):
            return weight_P
        scored_P = torch.from_numpy(read(self._score_examples(batch, hidden_TD, is_custom))[0])
        for example, (start, stop) in zip(
            full_batch.examples, pairwise(full_batch.example_starts.tolist()), strict=True
        ):
            if (custom := specs[example.pass_index].custom) is not None:
                logprobs = scored_P[start:stop].view(example.target_shape)
                weight_P[start:stop] = custom.weights(example.datum_index, logprobs).reshape(-1)
        return weight_P

    def _score_examples(self, batch: MicroBatch, hidden_TD: Tensor, chosen: Sequence[bool]) -> Tensor:
        """[P] of the full micro-batch: log probabilities of the chosen examples; 0 elsewhere."""
        chosen_P = batch.expand_to_pairs(chosen)
        logprob_P = torch.zeros(len(chosen_P), device=hidden_TD.device)
        self._score(batch, hidden_TD, np.flatnonzero(batch.rows_of_pairs(chosen_P)), logprob_P)
        return logprob_P

    def _chunks(self, batch: MicroBatch, hidden_TD: Tensor, rows_R: I64, max_rows: int) -> Iterator[Chunk]:
        chunks_C = [rows_R[first : first + max_rows] for first in range(0, len(rows_R), max_rows)]
        indices = [_chunk_indices(batch, rows_C, self._base.vocab_size) for rows_C in chunks_C]
        uploaded = iter(
            upload_all([array for chunk_arrays in indices for array in chunk_arrays], self._base.device)
            if indices
            else ()
        )
        for rows_C, (_, pairs_p, *_) in zip(chunks_C, indices, strict=True):
            rows, pairs, cells_p, local_p, starts_C = islice(uploaded, 5)
            rows = _as_slice(rows_C) or rows
            yield Chunk(
                hidden_TD[rows],
                rows,
                _lora_batch_of_rows(batch.lora_batch, rows_C),
                _as_slice(pairs_p) or pairs,
                cells_p,
                local_p,
                starts_C,
                _pass_spans(batch.pass_P[pairs_p]),
                [*self._chunks(batch, hidden_TD, rows_C, self._subchunk_rows)]
                if len(rows_C) > self._subchunk_rows
                else [],
            )

    def _device(self, array: np.ndarray) -> Tensor:
        return upload(array, self._base.device)


@cache
def head_kernels() -> ModuleType:
    """Imported on CUDA only: CPU installations have no Triton."""
    return import_module("tinsmith.backends.torch.head_kernels")


def _chunk_indices(batch: MicroBatch, rows_C: I64, vocab_size: int) -> list[I64]:
    """A chunk's rows and pairs, and `cells_p`, `local_p` and `starts_C` of `Chunk`."""
    member_T = np.zeros(len(batch.tokens_T), np.bool_)
    member_T[rows_C] = True
    pairs_p = np.flatnonzero(member_T[batch.row_P])
    row_p = batch.row_P[pairs_p]
    if (np.diff(row_p) < 0).any():  # examples share rows
        pairs_p = pairs_p[np.argsort(row_p, kind="stable")]
        row_p = batch.row_P[pairs_p]
    local_p = np.searchsorted(rows_C, row_p)
    starts_C = np.searchsorted(local_p, np.arange(len(rows_C) + 1))
    return [rows_C, pairs_p, local_p * vocab_size + batch.targets_P[pairs_p], local_p, starts_C]


def _as_slice(indices: I64) -> slice | None:
    """A slice if the indices are adjacent and ascending, which selects without a copy."""
    if len(indices) and indices[-1] - indices[0] == len(indices) - 1 and (np.diff(indices) == 1).all():
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return None


def _lora_batch_of_rows(lora_batch: LoRABatch, rows_C: I64) -> LoRABatch:
    bounds = np.searchsorted(rows_C, [segment.start for segment in lora_batch.segments] + [lora_batch.num_rows])
    lengths = np.diff(bounds).tolist()
    present = [
        (segment.adapter, length) for segment, length in zip(lora_batch.segments, lengths, strict=True) if length
    ]
    return LoRABatch.of([adapter for adapter, _ in present], [length for _, length in present])


def _slice_indices(indices: Tensor | slice, start: int, stop: int) -> Tensor | slice:
    return slice(indices.start + start, indices.start + stop) if isinstance(indices, slice) else indices[start:stop]


def _merge_pass_spans(
    runs: Sequence[tuple[int, int, int]], specs: Mapping[int, LossSpec]
) -> list[tuple[LossSpec, int, int]]:
    """Each loss with its pairs; neighbours with equal loss and configuration are merged, also across tenants."""
    merged: list[tuple[LossSpec, int, int]] = []
    for index, start, stop in runs:
        spec = specs[index]
        if merged and merged[-1][0].loss is spec.loss and merged[-1][0].config == spec.config:
            merged[-1] = (merged[-1][0], merged[-1][1], stop)
        else:
            merged.append((spec, start, stop))
    return merged


def _pass_spans(pass_p: I64) -> list[tuple[int, int, int]]:
    if not len(pass_p):
        return []  # rows that only pad
    starts = [0, *(np.flatnonzero(np.diff(pass_p)) + 1).tolist(), len(pass_p)]
    return [(int(pass_p[start]), start, stop) for start, stop in pairwise(starts)]


def compute_metrics(spec: LossSpec, examples: Sequence[Example], logprobs: Sequence[F32]) -> dict[str, float]:
    """`logprobs[i]` are those of example i's pairs. Positions of weight 0 count in `tokens:sum` only."""
    names = (*COLUMNS, *spec.extra_columns)
    columns = {name: np.concatenate([example.columns[name] for example in examples]) for name in names}
    columns["logprob"] = np.concatenate([array.reshape(-1) for array in logprobs])
    columns["log_ratio"] = np.zeros_like(columns["logprob"])
    if spec.loss.sequence_ratio:
        example_P = np.repeat(np.arange(len(examples)), [len(example.targets_P) for example in examples])
        ratio_columns = (columns[name] for name in ("logprob", "old_logprob", "ratio_mask"))
        logprob_P, old_P, mask_P = map(torch.from_numpy, ratio_columns)
        ratio_P = sequence_log_ratios(logprob_P, old_P, mask_P != 0, torch.from_numpy(example_P), len(examples))
        columns["log_ratio"] = ratio_P.numpy()
    active_P = columns["weight"] != 0
    chosen = slice(None) if active_P.all() else active_P  # usually all, and then nothing is copied
    names = "logprob", "old_logprob", "weight", "low", "high", "log_ratio"
    inputs = {name: torch.from_numpy(columns[column][chosen]) for column, name in spec.extra_columns.items()}
    x = Columns(*(torch.from_numpy(columns[name][chosen]) for name in names), inputs=inputs)
    terms = spec.evaluate(x)
    metrics = {
        "loss:sum": float(terms.loss_P.sum(dtype=torch.float64)),
        "tokens:sum": float(sum(example.num_tokens for example in examples)),
    }
    if not spec.loss.is_policy:
        return metrics
    count = max(1, len(x.logprob_P))
    metrics["ratio:mean"] = float(terms.ratio_P.sum(dtype=torch.float64)) / count if active_P.any() else 1.0
    metrics["ppo_kl:mean"] = float((x.old_logprob_P - x.logprob_P).sum(dtype=torch.float64)) / count
    metrics["pg_clipfrac:mean"] = float(terms.clipped_P.sum(dtype=torch.float64)) / count
    return {**metrics, **_measure_divergence(examples, columns["logprob"]), **spec.loss.constant_metrics}


def _measure_divergence(examples: Sequence[Example], logprob_P: F32) -> dict[str, float]:
    """Of the positions with an advantage, also where a rollout's weight has made it 0."""
    advantage_P, sampling_logprob_P = (
        np.concatenate([example.columns[name] for example in examples]) for name in (ADVANTAGE, SAMPLING_LOGPROB)
    )
    trained_P = advantage_P != 0
    return measure_divergence(logprob_P[trained_P], sampling_logprob_P[trained_P])
