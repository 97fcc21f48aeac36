"""A packed step over ranks: each data rank runs its share of the sequences, each context rank its share of the rows of
those sequences, each stage its layers of all rows, and all ranks end with the same gradients.

Every rank receives all passes and decides alike. Sequences are distributed to data ranks by length, the longest first,
so that all have about as many tokens; a rank with fewer micro-batches than another still takes part in collectives.
Losses are sums, so gradients are summed, in float32, once per step; ranks exchange their log probabilities. Ranks agree
on outcomes that may differ: memory that ran out, and why a custom loss failed.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from tinsmith.backends.distributed.context_parallel import ContextParallel, RowShare
from tinsmith.backends.distributed.model import ShardedBase
from tinsmith.backends.distributed.pipeline_parallel import Schedule, StageRows
from tinsmith.backends.distributed.ranks import Ranks
from tinsmith.backends.distributed.tensor_parallel import GatheredLinear, full_gradient
from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.attention import AttentionPlan
from tinsmith.backends.torch.batch import Example, MicroBatch, pack
from tinsmith.backends.torch.host import read
from tinsmith.backends.torch.lora_batch import AdapterGroup
from tinsmith.backends.torch.loss import Chunk, Head, LossSpec
from tinsmith.backends.torch.memory import memory_errors
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.trainer import CheckedPass, Trainer
from tinsmith.errors import RanksLostError, UserError
from tinsmith.plan.memory import MICRO_BATCHES_PER_STAGE
from tinsmith.types import F32

if TYPE_CHECKING:
    from tinsmith.backends.torch.head_kernels import Softmax

EMPTY = MicroBatch(())
DONE = object()

LEAST_TOKENS = {False: 32, True: 256}
"""Without and with CUDA: smaller micro-batches take as long, because every weight is read for each."""


class _Shortage(NamedTuple):
    """Memory ran out over a micro-batch; `alone` is its pass if it was a single sequence."""

    alone: int | None
    num_tokens: int
    problem: str


class RankedTrainer(Trainer):
    def __init__(self, base: BaseModel, max_tokens: int, chunk_rows: int, ranks: Ranks) -> None:
        super().__init__(base, max_tokens, chunk_rows)
        make = _ShardedHead if isinstance(base.unembedding, GatheredLinear) else _RankedHead
        self._head = make(base, chunk_rows, ranks)
        self._ranks = ranks
        self._shortage = _Shortage(None, 0, "")

    def _pack(self, examples: Sequence[Example]) -> list[MicroBatch]:
        shares = share_out(examples, self._ranks.degrees.data)
        limit = self._tokens_of(shares)
        batches = [pack(share, limit) for share in shares]
        own = batches[self._ranks.data_index]
        return own + [EMPTY] * (max(map(len, batches)) - len(own))

    def _tokens_of(self, shares: Sequence[Sequence[Example]]) -> int:
        """Tokens of a micro-batch: with stages, fewer, so that all of them have work."""
        degrees = self._ranks.degrees
        limit = self._limit * degrees.context
        if degrees.pipeline == 1:
            return limit
        most = max(sum(example.num_tokens for example in share) for share in shares)
        least = LEAST_TOKENS[self._base.device.type == "cuda"]
        return min(limit, max(least, math.ceil(most / (MICRO_BATCHES_PER_STAGE * degrees.pipeline))))

    def _run_micro_batches(
        self,
        batches: Sequence[tuple[MicroBatch, bool]],
        specs: Mapping[int, LossSpec],
        checked: Sequence[CheckedPass | UserError],
    ) -> Generator[None, None, dict[int, Tensor]]:
        adapters = _trained(checked)
        buffers = {key: adapter.open_gradients() for key, adapter in adapters.items()}
        shortage = None
        try:
            if self._ranks.degrees.pipeline > 1:
                yield from self._run_stage(batches, specs, checked)
                batches = ()
            for number, (batch, train) in enumerate(batches):
                if number:
                    yield
                if shortage is None:
                    shortage = self._try(batch, specs, checked, train=train)
        finally:
            for adapter in adapters.values():
                adapter.close_gradients()
        self._agree(shortage)
        self._exchange(checked)
        self._finish_custom(checked)
        return {key: self._ranks.sum_all(full_gradient(adapter, buffers[key])) for key, adapter in adapters.items()}

    def _try(
        self,
        batch: MicroBatch,
        specs: Mapping[int, LossSpec],
        checked: Sequence[CheckedPass | UserError],
        *,
        train: bool,
    ) -> _Shortage | None:
        if isinstance(self._base, ShardedBase) and self._base.exchange is not None:
            self._base.exchange.adapters = _adapters(checked)
        try:
            with memory_errors(self._base.device):
                if batch.examples:
                    self._store_logprobs(batch, self._run_micro_batch(batch, specs, train=train), checked)
                elif self._ranks.degrees.in_step:
                    assert isinstance(self._base, ShardedBase)
                    self._base.idle(train=train)
        except MemoryError as error:
            if self._ranks.degrees.sharded or self._ranks.degrees.context > 1:
                # The other ranks wait for this one in the middle of a layer.
                raise RanksLostError(
                    f"rank {self._ranks.rank} ran out of memory over {sum(batch.lengths)} tokens: {error}"
                ) from error
            alone = batch.examples[0].pass_index if len(batch.examples) == 1 else None
            return _Shortage(alone, sum(batch.lengths), str(error))
        return None

    def _run_micro_batch(self, batch: MicroBatch, specs: Mapping[int, LossSpec], *, train: bool) -> F32:
        """[P] log probabilities: zeros where another context rank has the row."""
        share = self._share(batch)
        return _whole(share, super()._run_micro_batch(share, specs, train=train))

    def _share(self, batch: MicroBatch) -> MicroBatch:
        """This rank's rows."""
        return batch if self._ranks.degrees.context == 1 else RowShare.of(batch, self._ranks)

    def _run_stage(
        self,
        batches: Sequence[tuple[MicroBatch, bool]],
        specs: Mapping[int, LossSpec],
        checked: Sequence[CheckedPass | UserError],
    ) -> Generator[None, None, None]:
        """This rank's part of every micro-batch."""
        assert isinstance(self._base, ShardedBase) and self._base.stage is not None
        shares = [(self._share(batch) if batch.examples else batch, train) for batch, train in batches]
        base, stage, adapters = self._base, self._base.stage, _adapters(checked)

        def forward(number: int) -> Tensor:
            share, train = shares[number]
            return self._hidden(share, train=train) if share.examples else base.idle_hidden(train=train)

        def head(number: int, hidden_TD: Tensor) -> Tensor | None:
            share, train = shares[number]
            if not share.examples:
                return torch.zeros_like(hidden_TD)
            logprob_P, grad_TD = (
                self._head.differentiate(share, hidden_TD, specs)
                if train
                else (self._head.score(share, hidden_TD), None)
            )
            self._store_logprobs(share.full_batch, _whole(share, read(logprob_P)[0]), checked)
            return grad_TD

        idle_rows = int(self._ranks.degrees.in_step)  # other ranks of the stage wait for this one's exchanges
        rows = [StageRows(len(share.tokens_T) if share.examples else idle_rows, train) for share, train in shares]
        steps = Schedule(stage, rows, forward, head).run()
        try:
            while True:
                if base.exchange is not None:  # samples may have been drawn since
                    base.exchange.adapters = adapters
                with memory_errors(base.device):
                    if next(steps, DONE) is DONE:
                        return
                yield
        except MemoryError as error:
            # The other stages wait for this one.
            raise RanksLostError(f"rank {self._ranks.rank} ran out of memory in its stage: {error}") from error
        finally:
            steps.close()

    def _attention_plan(self, batch: MicroBatch) -> AttentionPlan:
        return ContextParallel(batch, self._ranks) if isinstance(batch, RowShare) else super()._attention_plan(batch)

    def _agree(self, shortage: _Shortage | None) -> None:
        """Raise MemoryError on all ranks if memory ran out on one."""
        self._running = None
        found = next((each for each in self._ranks.gather(shortage and tuple(shortage)) if each is not None), None)
        if found is not None:
            self._shortage = _Shortage(*cast("tuple[int | None, int, str]", found))
            self._running = EMPTY
            raise MemoryError(self._shortage.problem)

    def _shrink(self, batch: MicroBatch, problem: str) -> tuple[int, UserError] | None:
        return self._shrink_to(self._shortage.num_tokens, self._shortage.alone, problem)

    def _exchange(self, checked: Sequence[CheckedPass | UserError]) -> None:
        """Exchange log probabilities between data ranks, context ranks and stages, as a sum with zeros for the rows of
        others.
        """
        if self._ranks.degrees.devices == self._ranks.degrees.tensor:
            return
        examples = [example for entry in checked if isinstance(entry, CheckedPass) for example in entry.examples]
        ends = np.cumsum([0, *(len(example.targets_P) for example in examples)])
        all_P = np.zeros(ends[-1], np.float32)
        places = list(zip(examples, ends[:-1].tolist(), ends[1:].tolist(), strict=True))
        for example, start, stop in places:
            if (own := _pass_of(example, checked).logprobs[example.datum_index]) is not None:
                all_P[start:stop] = own.reshape(-1)
        found_P = self._ranks.sum_replicas(torch.from_numpy(all_P)).numpy()
        for example, start, stop in places:
            logprobs = found_P[start:stop].reshape(example.target_shape)
            _pass_of(example, checked).logprobs[example.datum_index] = logprobs

    def _finish_custom(self, checked: Sequence[CheckedPass | UserError]) -> None:
        """Whether a custom loss fails may depend on a rank's clock: the failure on the lowest rank counts for all."""
        runs = [(entry, entry.spec.custom) for entry in checked if isinstance(entry, CheckedPass) and entry.spec.custom]
        if not runs:
            return
        failures = []
        for entry, custom in runs:
            outcome = custom.finish([array for array in entry.logprobs if array is not None])
            failures.append(str(outcome) if isinstance(outcome, UserError) else None)
        all_failures = cast("list[list[str | None]]", self._ranks.gather(failures))
        for (_, custom), found in zip(runs, zip(*all_failures, strict=True), strict=True):
            reason = next((text for text in found if text is not None), None)
            custom.failure = None if reason is None else UserError(reason)


class _RankedHead(Head):
    def __init__(self, base: BaseModel, chunk_rows: int, ranks: Ranks) -> None:
        super().__init__(base, chunk_rows)
        self._ranks = ranks

    def _pair_weights(self, batch: MicroBatch, hidden_TD: Tensor, specs: Mapping[int, LossSpec]) -> F32:
        weight_P = super()._pair_weights(batch, hidden_TD, specs)
        if not any(specs[example.pass_index].custom is not None for example in batch.examples):
            return weight_P
        # The weights decide which rows are differentiated.
        agreed_P = self._ranks.broadcast_tensor(torch.from_numpy(weight_P))
        return self._ranks.broadcast_context(agreed_P).numpy()

    def _score_examples(self, batch: MicroBatch, hidden_TD: Tensor, chosen: Sequence[bool]) -> Tensor:
        own_P = super()._score_examples(batch, hidden_TD, chosen)
        all_P = own_P.new_zeros(len(batch.full_batch.row_P))
        all_P[batch.pairs] = own_P
        return self._ranks.sum_context(all_P)


class _ShardedHead(_RankedHead):
    """Each tensor rank has the logits of its part of the vocabulary. Ranks exchange a row's largest logit, its sum of
    exponentials and its targets' logits, never whole rows.
    """

    def _logprobs(self, chunk: Chunk, frozen_CV: Tensor | None) -> Tensor:
        if self._has_kernels:
            return super()._logprobs(chunk, frozen_CV)
        raw_CW, _ = self._raw_logits(chunk, frozen_CV)
        return self._log_sums(self._base.finish_logits_(raw_CW), chunk)[1]

    def _raw_logits(self, chunk: Chunk, frozen_CV: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        adapter_groups = self._unembedding.groups(chunk.lora_batch)
        return self._unembedding.forward_part(chunk.hidden_CD, adapter_groups, torch.float32, frozen_CV)

    def _read_logprobs(self, raw_CV: Tensor, chunk: Chunk) -> tuple[Softmax, Tensor, Tensor]:
        own = self._softmax(raw_CV)
        softmax = own._replace(sums_CS=self._ranks.gather_tensor(own.sums_CS))
        cells_p = torch.where(*self._own_cells(chunk), -1)
        return softmax, cells_p, self._ranks.sum_tensor(softmax.logprobs(cells_p))

    def _normalise(self, logits_CV: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        log_sum_C, logprob_p = self._log_sums(logits_CV, chunk)
        return (logits_CV - log_sum_C[:, None]).exp_(), logprob_p

    def _target_gradients(self, chunk: Chunk, grad_p: Tensor) -> tuple[Tensor, Tensor]:
        is_own_p, cells_p = self._own_cells(chunk)
        # Not a product with zero: the first cell, which stands in for others' targets, may be another tenant's NaN.
        return cells_p, torch.where(is_own_p, grad_p, 0.0)

    def _backward(
        self, grad_CV: Tensor, hidden_CD: Tensor, adapter_groups: Sequence[AdapterGroup], a_outputs: Sequence[Tensor]
    ) -> Tensor:
        return self._unembedding.backward_part(grad_CV, hidden_CD, adapter_groups, a_outputs)

    @property
    def _unembedding(self) -> GatheredLinear:
        return cast(GatheredLinear, self._base.unembedding)

    def _log_sums(self, logits_CW: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """[C] the logarithms of the rows' sums over the whole vocabulary, and [p] log probabilities."""
        most_C = self._ranks.max_tensor(logits_CW.amax(-1))
        is_own_p, cells_p = self._own_cells(chunk)
        own_p = torch.where(is_own_p, logits_CW.view(-1)[cells_p], 0.0)
        sums = torch.cat([(logits_CW - most_C[:, None]).exp_().sum(-1), own_p])
        sum_C, target_p = self._ranks.sum_tensor(sums).split([len(most_C), len(own_p)])
        log_sum_C = most_C + sum_C.log()
        return log_sum_C, target_p - log_sum_C[chunk.local_p]

    def _own_cells(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Whether each pair's target is in this rank's part, and its index in the flattened part, 0 for others."""
        part = self._unembedding.part
        target_p = chunk.cells_p - chunk.local_p * self._base.vocab_size - part.start
        is_own_p = (target_p >= 0) & (target_p < part.stop - part.start)
        cells_p = chunk.local_p * (part.stop - part.start) + target_p
        return is_own_p, torch.where(is_own_p, cells_p, 0)


def share_out(examples: Sequence[Example], num_shares: int) -> list[list[Example]]:
    """Longest first, each to the share with the fewest tokens so far."""
    shares: list[list[Example]] = [[] for _ in range(num_shares)]
    filled = [0] * num_shares
    for example in sorted(examples, key=lambda example: -example.num_tokens):
        least = filled.index(min(filled))
        shares[least].append(example)
        filled[least] += example.num_tokens
    return shares


def _whole(share: MicroBatch, logprob_P: F32) -> F32:
    """[P] of the whole micro-batch: zeros where another context rank has the row."""
    if not isinstance(share, RowShare):
        return logprob_P
    whole_P = np.zeros(len(share.full_batch.row_P), np.float32)
    whole_P[share.pairs] = logprob_P
    return whole_P


def _trained(checked: Sequence[CheckedPass | UserError]) -> Mapping[int, Adapter]:
    """By id, the adapters for which any rank's sequences have a gradient."""
    return {
        id(entry.trained.adapter): entry.trained.adapter
        for entry in checked
        if isinstance(entry, CheckedPass)
        and entry.trained is not None
        and any(example.has_weight for example in entry.examples)
    }


def _adapters(checked: Sequence[CheckedPass | UserError]) -> list[Adapter]:
    """Every adapter of a step, in one order on all ranks."""
    examples = (example for entry in checked if isinstance(entry, CheckedPass) for example in entry.examples)
    return list({id(example.adapter): example.adapter for example in examples}.values())


def _pass_of(example: Example, checked: Sequence[CheckedPass | UserError]) -> CheckedPass:
    entry = checked[example.pass_index]
    assert isinstance(entry, CheckedPass)
    return entry
