"""From hidden states to log probabilities and back, a chunk of rows at a time.

Logits of all rows never exist at once: a chunk's are made, read, turned into the gradient of the hidden
states in place and dropped. Every pair's log probability is returned; only rows with a pair of non-zero
weight are differentiated. The unembedding's adapters are served and trained here. Knows formulas only by
`OBJECTIVES`.

Shapes: T rows of a micro-batch, R chosen rows, C rows of a chunk, P pairs, p pairs of a chunk, D hidden, V
vocabulary.

The formulas of the losses that `tinsmith.losses` admits: value and slope, token by token.

Every loss is a sum over tokens, and all but one see a token alone, so each is written as two columns: the
loss and its derivative with respect to that token's log probability. Written out, the derivative lets a chunk
of logits be turned into gradients while it is still there. gspo's one look at the whole sequence, the mean
log ratio, is computed beforehand and is a constant to the derivative (docs/losses.md). Everything is float32.

Shapes: P pairs of (position, target).

What a pass reports besides log probabilities: its loss, and figures that tell how far the policy has
moved.

Computed on the host from the log probabilities that the client gets, with the formulas that the gradient
used, and summed in float64. Every key has one ':', whose right side tells the SDK how to combine chunks.

Shapes: P pairs of all data of one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.backends.torch.batch import COLUMNS, Example, MicroBatch
from tinsmith.backends.torch.custom_loss import CustomRun
from tinsmith.backends.torch.lora_ops import Routing, Run
from tinsmith.backends.torch.model import BaseModel
from tinsmith.types import F32, I64


@dataclass(frozen=True, slots=True)
class Columns:
    """One pass's pairs in a chunk. `weight` is cross_entropy's weights or the others' advantages."""

    logprob_P: Tensor
    old_logprob_P: Tensor
    weight_P: Tensor
    low_P: Tensor
    high_P: Tensor
    sequence_log_ratio_P: Tensor


class Terms(NamedTuple):
    """`slope` is d loss / d logprob. `ratio` and `clipped` only feed metrics."""

    loss_P: Tensor
    slope_P: Tensor
    ratio_P: Tensor
    clipped_P: Tensor


def cross_entropy(x: Columns, config: Mapping[str, float]) -> Terms:
    # A pair of weight 0 says nothing even if its logprob is -inf.
    loss_P = torch.where(x.weight_P == 0, 0.0, -x.weight_P * x.logprob_P)
    return Terms(loss_P, -x.weight_P, torch.ones_like(loss_P), torch.zeros_like(loss_P))


def importance_sampling(x: Columns, config: Mapping[str, float]) -> Terms:
    ratio_P = torch.exp(x.logprob_P - x.old_logprob_P)
    loss_P = -ratio_P * x.weight_P
    return Terms(loss_P, loss_P, ratio_P, torch.zeros_like(loss_P))


def ppo(x: Columns, config: Mapping[str, float]) -> Terms:
    return _clipped_surrogate(torch.exp(x.logprob_P - x.old_logprob_P), x)


def gspo(x: Columns, config: Mapping[str, float]) -> Terms:
    # s_t = exp(m + lp_t - sg(lp_t)): the value is the sequence's ratio, the slope flows through the token.
    return _clipped_surrogate(torch.exp(x.sequence_log_ratio_P), x)


def cispo(x: Columns, config: Mapping[str, float]) -> Terms:
    ratio_P = torch.exp(x.logprob_P - x.old_logprob_P)
    slope_P = -torch.clamp(ratio_P, x.low_P, x.high_P) * x.weight_P
    outside_P = (ratio_P < x.low_P) | (ratio_P > x.high_P)
    return Terms(slope_P * x.logprob_P, slope_P, ratio_P, outside_P.float())


def dro(x: Columns, config: Mapping[str, float]) -> Terms:
    beta = config["beta"]
    away_P = x.logprob_P - x.old_logprob_P
    loss_P = 0.5 * beta * away_P.square() - x.logprob_P * x.weight_P
    return Terms(loss_P, beta * away_P - x.weight_P, torch.exp(away_P), torch.zeros_like(loss_P))


def stable_reinforce(x: Columns, config: Mapping[str, float]) -> Terms:
    kl_coeff = config["kl_coeff"]
    away_P = x.logprob_P - x.old_logprob_P
    plain = importance_sampling(x, config)
    loss_P = plain.loss_P + 0.5 * kl_coeff * away_P.square()
    return Terms(loss_P, plain.slope_P + kl_coeff * away_P, plain.ratio_P, plain.clipped_P)


def sequence_log_ratios(
    logprob_P: Tensor, old_logprob_P: Tensor, counted_P: Tensor, example_P: Tensor, num_examples: int
) -> Tensor:
    """[P] For each pair, the mean log ratio over the counted pairs of its example; 0 where none is
    counted.
    """
    away_P = torch.where(counted_P, logprob_P - old_logprob_P, 0.0)
    sums = torch.zeros(num_examples, device=away_P.device).index_add_(0, example_P, away_P)
    counts = torch.zeros_like(sums).index_add_(0, example_P, counted_P.float())
    return (sums / counts.clamp_min(1.0))[example_P]


def _clipped_surrogate(ratio_P: Tensor, x: Columns) -> Terms:
    """-min(r A, clip(r) A); the clipped branch is flat."""
    free_P = ratio_P * x.weight_P
    bound_P = torch.clamp(ratio_P, x.low_P, x.high_P) * x.weight_P
    clipped_P = bound_P < free_P
    return Terms(-torch.minimum(free_P, bound_P), torch.where(clipped_P, 0.0, -free_P), ratio_P, clipped_P.float())


OBJECTIVES: Mapping[str, Callable[[Columns, Mapping[str, float]], Terms]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
    # What its gradient makes of it, as weights; see head.
    "custom": cross_entropy,
}


class Objective(NamedTuple):
    """A pass's loss: a name in OBJECTIVES and its complete configuration, or the client's own loss at work."""

    loss_fn: str
    config: Mapping[str, float]
    custom: CustomRun | None = None


class _Chunk(NamedTuple):
    """Rows, their pairs, and each pair's place in the chunk's flattened logits and rows."""

    hidden_CD: Tensor
    rows: Tensor | slice
    routing: Routing
    pairs_p: Tensor | slice
    cells_p: Tensor
    local_p: Tensor
    runs: list[tuple[int, int, int]]  # pass index, first and last + 1 of the chunk's pairs


class Head:
    def __init__(self, base: BaseModel, chunk_rows: int) -> None:
        self._base = base
        self._chunk_rows = chunk_rows

    @torch.no_grad()
    def score(self, batch: MicroBatch, hidden_TD: Tensor) -> Tensor:
        """[P] log probabilities."""
        logprob_P = torch.empty(len(batch.row_P), device=hidden_TD.device)
        self._score(batch, hidden_TD, np.arange(len(hidden_TD)), logprob_P)
        return logprob_P

    @torch.no_grad()
    def differentiate(
        self, batch: MicroBatch, hidden_TD: Tensor, objectives: Sequence[Objective]
    ) -> tuple[Tensor, Tensor]:
        """[P] log probabilities and [T, D] the loss's gradient; the unembedding's adapters get theirs."""
        logprob_P = torch.empty(len(batch.row_P), device=hidden_TD.device)
        weight_P = self._weights(batch, hidden_TD, objectives)
        active_T = batch.rows_with(weight_P != 0)
        self._score(batch, hidden_TD, np.flatnonzero(~active_T), logprob_P)
        columns = {name: self._device(batch.column_P(name)) for name in COLUMNS}
        columns["weight"] = self._device(weight_P)
        columns["sequence_log_ratio"] = self._log_ratios(batch, hidden_TD, objectives, columns)
        grad_TD = torch.zeros_like(hidden_TD)
        for chunk in self._chunks(batch, hidden_TD, np.flatnonzero(active_T)):
            grad_TD[chunk.rows] = self._differentiate(chunk, objectives, columns, logprob_P)
        return logprob_P, grad_TD

    def _score(self, batch: MicroBatch, hidden_TD: Tensor, rows_R: I64, logprob_P: Tensor) -> None:
        for chunk in self._chunks(batch, hidden_TD, rows_R):
            logprobs_CV = torch.log_softmax(self._base.logits(chunk.hidden_CD, chunk.routing), -1)
            logprob_P[chunk.pairs_p] = logprobs_CV.view(-1)[chunk.cells_p]

    def _differentiate(
        self, chunk: _Chunk, objectives: Sequence[Objective], columns: Mapping[str, Tensor], logprob_P: Tensor
    ) -> Tensor:
        """[C, D]"""
        unembedding = self._base.unembedding
        work = unembedding.work(chunk.routing)
        raw_CV, inner = unembedding.forward_rows(chunk.hidden_CD, work, torch.float32)
        logits_CV = self._base.finish_logits_(raw_CV)
        probs_CV = torch.softmax(logits_CV, -1)
        # The logarithm of a row's sum by way of its most probable token: log_softmax would take another exponential of
        # every logit, and logsumexp is slower than both.
        log_sum_C = logits_CV.amax(-1) - probs_CV.amax(-1).log_()
        logprob_p = logits_CV.view(-1)[chunk.cells_p] - log_sum_C[chunk.local_p]
        logprob_P[chunk.pairs_p] = logprob_p
        slope_p = torch.cat([self._slope(objective, chunk, start, stop, logprob_p, columns)
                             for objective, start, stop in _together(chunk.runs, objectives)])  # fmt: skip
        # d logprob[target] / d logits = onehot(target) - softmax, summed over a row's pairs.
        slope_C = torch.zeros(len(probs_CV), device=slope_p.device).index_add_(0, chunk.local_p, slope_p)
        grad_CV = probs_CV.mul_(-slope_C[:, None])
        grad_CV.view(-1).index_add_(0, chunk.cells_p, slope_p)
        grad_CV = self._base.unfinish_gradient_(grad_CV, logits_CV).to(chunk.hidden_CD.dtype)
        return self._back(grad_CV, chunk.hidden_CD, work, inner)

    def _back(self, grad_CV: Tensor, hidden_CD: Tensor, work: Sequence[Run], inner: Sequence[Tensor]) -> Tensor:
        """[C, D] the gradient of the hidden states; the unembedding's adapters get theirs."""
        grad_CD = self._base.unembedding.backward_rows(grad_CV, hidden_CD, work, inner, need_input=True)
        assert grad_CD is not None
        return grad_CD

    @staticmethod
    def _slope(
        objective: Objective,
        chunk: _Chunk,
        start: int,
        stop: int,
        logprob_p: Tensor,
        columns: Mapping[str, Tensor],
    ) -> Tensor:
        pairs = _part_of(chunk.pairs_p, start, stop)
        old, weight, low, high, log_ratio = (
            columns[name][pairs] for name in ("old_logprob", "weight", "low", "high", "sequence_log_ratio")
        )
        x = Columns(logprob_p[start:stop], old, weight, low, high, log_ratio)
        return OBJECTIVES[objective.loss_fn](x, objective.config).slope_P

    def _log_ratios(
        self,
        batch: MicroBatch,
        hidden_TD: Tensor,
        objectives: Sequence[Objective],
        columns: Mapping[str, Tensor],
    ) -> Tensor:
        """[P] gspo's mean log ratio of the pair's sequence; elsewhere 0.

        The one loss that must know a whole sequence before it can differentiate a token: its rows are scored
        beforehand.
        """
        gspo_P = np.array([objective.loss_fn == "gspo" for objective in objectives])[batch.pass_P]
        logprob_P = torch.zeros(len(gspo_P), device=hidden_TD.device)
        if not gspo_P.any():
            return logprob_P
        self._score(batch, hidden_TD, np.flatnonzero(batch.rows_with(gspo_P)), logprob_P)
        counted_P = (columns["ratio_mask"] != 0) & self._device(gspo_P)
        example_P = self._device(batch.example_P)
        return sequence_log_ratios(logprob_P, columns["old_logprob"], counted_P, example_P, len(batch.examples))

    def _weights(self, batch: MicroBatch, hidden_TD: Tensor, objectives: Sequence[Objective]) -> F32:
        """[P] Each pair's weight. A custom loss gives its own: minus its gradient, at log probabilities scored here."""
        weight_P = batch.column_P("weight")
        custom_P = np.array([objective.custom is not None for objective in objectives])[batch.pass_P]
        if not custom_P.any():
            return weight_P
        scored_P = torch.zeros(len(weight_P), device=hidden_TD.device)
        self._score(batch, hidden_TD, np.flatnonzero(batch.rows_with(custom_P)), scored_P)
        scored_P = scored_P.cpu()
        for example, (start, stop) in zip(batch.examples, pairwise(batch.example_starts.tolist()), strict=True):
            if (custom := objectives[example.pass_index].custom) is not None:
                logprobs = scored_P[start:stop].view(example.target_shape)
                weight_P[start:stop] = custom.weights(example.datum_index, logprobs).reshape(-1)
        return weight_P

    def _chunks(self, batch: MicroBatch, hidden_TD: Tensor, rows_R: I64) -> Iterator[_Chunk]:
        for first in range(0, len(rows_R), self._chunk_rows):
            rows_C = rows_R[first : first + self._chunk_rows]
            member_T = np.zeros(len(hidden_TD), np.bool_)
            member_T[rows_C] = True
            pairs_p = np.flatnonzero(member_T[batch.row_P])
            local_p = np.searchsorted(rows_C, batch.row_P[pairs_p])
            rows = self._places(rows_C)
            yield _Chunk(
                hidden_TD[rows],
                rows,
                _routing_of_rows(batch.routing, rows_C),
                self._places(pairs_p),
                self._device(local_p * self._base.vocab_size + batch.targets_P[pairs_p]),
                self._device(local_p),
                _runs(batch.pass_P[pairs_p]),
            )

    def _places(self, rising: I64) -> Tensor | slice:
        """A slice where they lie side by side: what it takes is no copy."""
        if len(rising) and rising[-1] - rising[0] == len(rising) - 1:
            return slice(int(rising[0]), int(rising[-1]) + 1)
        return self._device(rising)

    def _device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._base.device, non_blocking=True)


def _routing_of_rows(routing: Routing, rows_C: I64) -> Routing:
    bounds = np.searchsorted(rows_C, [segment.start for segment in routing.segments] + [routing.num_rows])
    lengths = np.diff(bounds).tolist()
    present = [(segment.adapter, length) for segment, length in zip(routing.segments, lengths, strict=True) if length]
    return Routing.of([adapter for adapter, _ in present], [length for _, length in present])


def _part_of(places: Tensor | slice, start: int, stop: int) -> Tensor | slice:
    return slice(places.start + start, places.start + stop) if isinstance(places, slice) else places[start:stop]


def _together(
    runs: Sequence[tuple[int, int, int]], objectives: Sequence[Objective]
) -> list[tuple[Objective, int, int]]:
    """Each objective with its pairs: neighbours of one formula and configuration as one, whosever they are."""
    found: list[tuple[Objective, int, int]] = []
    for index, start, stop in runs:
        objective = objectives[index]
        if found and (found[-1][0].loss_fn, found[-1][0].config) == (objective.loss_fn, objective.config):
            found[-1] = (found[-1][0], found[-1][1], stop)
        else:
            found.append((objective, start, stop))
    return found


def _runs(pass_p: I64) -> list[tuple[int, int, int]]:
    starts = [0, *(np.flatnonzero(np.diff(pass_p)) + 1).tolist(), len(pass_p)]
    return [(int(pass_p[start]), start, stop) for start, stop in pairwise(starts)]


def measure(
    loss_fn: str, config: Mapping[str, float], examples: Sequence[Example], logprobs: Sequence[F32]
) -> dict[str, float]:
    """`logprobs[i]` are those of example i's pairs. Positions of weight 0 count in `tokens:sum` only."""
    logprob_P = torch.from_numpy(np.concatenate([array.reshape(-1) for array in logprobs]))
    columns = {
        name: torch.from_numpy(np.concatenate([example.columns[name] for example in examples])) for name in COLUMNS
    }
    active_P = columns["weight"] != 0
    log_ratio_P = torch.zeros_like(logprob_P)
    if loss_fn == "gspo":
        sizes = torch.tensor([len(example.targets_P) for example in examples])
        example_P = torch.repeat_interleave(torch.arange(len(examples)), sizes)
        counted_P = columns["ratio_mask"] != 0
        log_ratio_P = sequence_log_ratios(logprob_P, columns["old_logprob"], counted_P, example_P, len(examples))
    chosen = slice(None) if active_P.all() else active_P  # all, as a rule: nothing is copied then
    x = Columns(
        *(
            column[chosen]
            for column in (
                logprob_P, columns["old_logprob"], columns["weight"], columns["low"], columns["high"], log_ratio_P
            )
        )
    )  # fmt: skip
    terms = OBJECTIVES[loss_fn](x, config)
    metrics = {
        "loss:sum": float(terms.loss_P.sum(dtype=torch.float64)),
        "tokens:sum": float(sum(example.num_tokens for example in examples)),
    }
    if loss_fn == "cross_entropy":
        return metrics
    count = max(1, len(x.logprob_P))
    metrics["ratio:mean"] = float(terms.ratio_P.sum(dtype=torch.float64)) / count if active_P.any() else 1.0
    metrics["ppo_kl:mean"] = float((x.old_logprob_P - x.logprob_P).sum(dtype=torch.float64)) / count
    metrics["pg_clipfrac:mean"] = float(terms.clipped_P.sum(dtype=torch.float64)) / count
    if loss_fn == "stable_reinforce":
        metrics["stable_reinforce_approximation:max"] = 1.0
    return metrics
