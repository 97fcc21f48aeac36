"""A packed step over ranks: each data rank runs some of the sequences, each context rank some rows of those sequences,
each stage its layers of all rows, and each ends with the gradients of what it steps (`placement`).

Every rank receives all passes and packs them in the same way. Sequences that share rows go to one data rank, the most
rows first, so that all have about as many; a rank with fewer micro-batches than another still takes part in
collectives. Losses are sums, so gradients are summed, in float32, once per step; ranks exchange their log
probabilities. Ranks agree on outcomes that may differ: memory that ran out, and why a custom loss failed.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from tinsmith.backends.distributed.collectives import Ranks
from tinsmith.backends.distributed.context_parallel import ContextParallel, RowShard
from tinsmith.backends.distributed.model import ShardedBase
from tinsmith.backends.distributed.pipeline_parallel import Schedule, StageRows
from tinsmith.backends.distributed.placement import RankShare
from tinsmith.backends.distributed.tensor_parallel import GatheredLinear, full_gradient
from tinsmith.backends.torch.adapters import Adapter, TrainedModel
from tinsmith.backends.torch.attention import AttentionPlan
from tinsmith.backends.torch.batch import Example, MicroBatch
from tinsmith.backends.torch.host import read
from tinsmith.backends.torch.lora_batch import AdapterGroup
from tinsmith.backends.torch.loss import Chunk, Head, LossSpec
from tinsmith.backends.torch.memory import memory_errors
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.packing import list_units, pack
from tinsmith.backends.torch.trainer import CheckedPass, Trainer
from tinsmith.errors import RanksLostError, UserError
from tinsmith.plan.memory import MICRO_BATCHES_PER_STAGE
from tinsmith.types import F32

if TYPE_CHECKING:
    from tinsmith.backends.torch.head_kernels import Softmax

EMPTY = MicroBatch(())
DONE = object()

MIN_TOKENS = {False: 32, True: 256}
"""Of a micro-batch, without and with CUDA: a smaller one takes as long, because it reads every weight."""


class _Shortage(NamedTuple):
    """Memory ran out over a micro-batch; `pass_index` is its pass if it is a single sequence."""

    pass_index: int | None
    num_tokens: int
    problem: str


class RankedTrainer(Trainer):
    def __init__(self, base: BaseModel, max_tokens: int, chunk_rows: int, ranks: Ranks) -> None:
        super().__init__(base, max_tokens, chunk_rows)
        head_class = _ShardedHead if isinstance(base.unembedding, GatheredLinear) else _RankedHead
        self._head = head_class(base, chunk_rows, ranks)
        self._ranks = ranks
        self._shortage = _Shortage(None, 0, "")
        if ranks.degrees.context > 1:
            self._min_shared_rows = 0  # the ranks of a sequence exchange its rows in order

    def _pack(self, examples: Sequence[Example]) -> list[MicroBatch]:
        shares = distribute_examples(examples, self._ranks.degrees.data, self._min_shared_rows)
        limit = self._micro_batch_tokens(shares)
        batches = [self._count_rows(pack(share, limit, self._min_shared_rows)) for share in shares]
        local_batches = batches[self._ranks.data_index]
        return local_batches + [EMPTY] * (max(map(len, batches)) - len(local_batches))

    def _micro_batch_tokens(self, shares: Sequence[Sequence[Example]]) -> int:
        """Tokens of a micro-batch; fewer with several stages, so that all of them are busy."""
        degrees = self._ranks.degrees
        limit = self._limit * degrees.context
        if degrees.pipeline == 1:
            return limit
        max_tokens = max(sum(example.num_tokens for example in share) for share in shares)
        min_tokens = MIN_TOKENS[self._base.device.type == "cuda"]
        return min(limit, max(min_tokens, math.ceil(max_tokens / (MICRO_BATCHES_PER_STAGE * degrees.pipeline))))

    def _run_micro_batches(
        self,
        batches: Sequence[tuple[MicroBatch, bool]],
        specs: Mapping[int, LossSpec],
        checked: Sequence[CheckedPass | UserError],
    ) -> Generator[None, None, dict[int, Tensor]]:
        models = _models_with_gradients(checked)
        buffers = {key: trained.adapter.open_gradients() for key, trained in models.items()}
        shortage = None
        try:
            if self._ranks.degrees.pipeline > 1:
                yield from self._run_stage(batches, specs, checked)
                batches = ()
            for index, (batch, train) in enumerate(batches):
                if index:
                    yield
                if shortage is None:
                    shortage = self._try_batch(batch, specs, checked, train=train)
        finally:
            for trained in models.values():
                trained.adapter.close_gradients()
        self._raise_shortage(shortage)
        self._exchange_logprobs(checked)
        self._finish_custom(checked)
        return self._reduce_gradients(models, buffers) if models else {}

    def _reduce_gradients(self, models: Mapping[int, TrainedModel], buffers: dict[int, Tensor]) -> dict[int, Tensor]:
        """[p] of each model: the sums that this rank steps. Raises MemoryError on all ranks if one has no memory."""
        for key, trained in models.items():
            assert isinstance(trained.share, RankShare)
            buffers[key] = full_gradient(trained.adapter, buffers[key])
            trained.share.reduce(buffers[key])
        gradients, problem = {}, None
        try:
            with memory_errors(self._base.device):
                gradients = {key: trained.select(buffers.pop(key)) for key, trained in models.items()}
        except MemoryError as error:
            problem = str(error)
        problems = [text for text in self._ranks.gather(problem) if text is not None]
        if problems:
            self._running = None  # smaller micro-batches would not help
            raise MemoryError(problems[0])
        return gradients

    def _try_batch(
        self,
        batch: MicroBatch,
        specs: Mapping[int, LossSpec],
        checked: Sequence[CheckedPass | UserError],
        *,
        train: bool,
    ) -> _Shortage | None:
        if isinstance(self._base, ShardedBase) and self._base.exchange is not None:
            self._base.exchange.adapters = _step_adapters(checked)
        try:
            with memory_errors(self._base.device):
                if batch.examples:
                    self._store_logprobs(batch, self._run_micro_batch(batch, specs, train=train), checked)
                elif self._ranks.degrees.in_step:
                    assert isinstance(self._base, ShardedBase)
                    self._base.idle(train=train)
        except MemoryError as error:
            if self._ranks.degrees.sharded or self._ranks.degrees.context > 1:
                # The other ranks wait for this rank in the middle of a layer.
                raise RanksLostError(
                    f"rank {self._ranks.rank} ran out of memory over {batch.num_rows} tokens: {error}"
                ) from error
            return _Shortage(batch.single_pass, batch.num_rows, str(error))
        return None

    def _run_micro_batch(self, batch: MicroBatch, specs: Mapping[int, LossSpec], *, train: bool) -> F32:
        """[P] log probabilities: zeros where another context rank has the row."""
        shard = self._shard_rows(batch)
        return _scatter_logprobs(shard, super()._run_micro_batch(shard, specs, train=train))

    def _shard_rows(self, batch: MicroBatch) -> MicroBatch:
        """This context rank's rows."""
        return batch if self._ranks.degrees.context == 1 else RowShard.of(batch, self._ranks)

    def _run_stage(
        self,
        batches: Sequence[tuple[MicroBatch, bool]],
        specs: Mapping[int, LossSpec],
        checked: Sequence[CheckedPass | UserError],
    ) -> Generator[None, None, None]:
        """Run this rank's stage for all micro-batches."""
        assert isinstance(self._base, ShardedBase) and self._base.stage is not None
        shards = [(self._shard_rows(batch) if batch.examples else batch, train) for batch, train in batches]
        base, stage, adapters = self._base, self._base.stage, _step_adapters(checked)

        def forward(index: int) -> Tensor:
            shard, train = shards[index]
            return self._hidden(shard, train=train) if shard.examples else base.idle_hidden(train=train)

        def head(index: int, hidden_TD: Tensor) -> Tensor | None:
            shard, train = shards[index]
            if not shard.examples:
                return torch.zeros_like(hidden_TD)
            logprob_P, grad_TD = (
                self._head.differentiate(shard, hidden_TD, specs)
                if train
                else (self._head.score(shard, hidden_TD), None)
            )
            self._store_logprobs(shard.full_batch, _scatter_logprobs(shard, read(logprob_P)[0]), checked)
            return grad_TD

        idle_rows = int(self._ranks.degrees.in_step)  # other ranks of the stage wait for this one's exchanges
        rows = [StageRows(len(shard.tokens_T) if shard.examples else idle_rows, train) for shard, train in shards]
        schedule = Schedule(stage, rows, forward, head).run()
        try:
            while True:
                if base.exchange is not None:  # samples may have been drawn since
                    base.exchange.adapters = adapters
                with memory_errors(base.device):
                    if next(schedule, DONE) is DONE:
                        return
                yield
        except MemoryError as error:
            # The other stages wait for this stage.
            raise RanksLostError(f"rank {self._ranks.rank} ran out of memory in its stage: {error}") from error
        finally:
            schedule.close()

    def _attention_plan(self, batch: MicroBatch) -> AttentionPlan:
        return ContextParallel(batch, self._ranks) if isinstance(batch, RowShard) else super()._attention_plan(batch)

    def _raise_shortage(self, local_shortage: _Shortage | None) -> None:
        """Raise MemoryError on all ranks if memory ran out on one."""
        self._running = None
        shortages = self._ranks.gather(local_shortage and tuple(local_shortage))
        shortage = next((shortage for shortage in shortages if shortage is not None), None)
        if shortage is not None:
            self._shortage = _Shortage(*cast("tuple[int | None, int, str]", shortage))
            self._running = EMPTY
            raise MemoryError(self._shortage.problem)

    def _shrink(self, batch: MicroBatch, problem: str) -> tuple[int, UserError] | None:
        return self._shrink_to(self._shortage.num_tokens, self._shortage.pass_index, problem)

    def _exchange_logprobs(self, checked: Sequence[CheckedPass | UserError]) -> None:
        """Exchange log probabilities between data ranks, context ranks and stages, as a sum in which each rank has
        zeros for the other ranks' rows.
        """
        if self._ranks.degrees.devices == self._ranks.degrees.tensor:
            return
        examples = [example for entry in checked if isinstance(entry, CheckedPass) for example in entry.examples]
        ends = np.cumsum([0, *(len(example.targets_P) for example in examples)])
        all_P = np.zeros(ends[-1], np.float32)
        spans = list(zip(examples, ends[:-1].tolist(), ends[1:].tolist(), strict=True))
        for example, start, stop in spans:
            if (local_logprobs := _pass_of(example, checked).logprobs[example.datum_index]) is not None:
                all_P[start:stop] = local_logprobs.reshape(-1)
        summed_P = self._ranks.sum_replicas(torch.from_numpy(all_P)).numpy()
        for example, start, stop in spans:
            logprobs = summed_P[start:stop].reshape(example.target_shape)
            _pass_of(example, checked).logprobs[example.datum_index] = logprobs

    def _finish_custom(self, checked: Sequence[CheckedPass | UserError]) -> None:
        """Finish custom losses. Whether one fails may depend on a rank's clock: all ranks take the failure of the
        lowest.
        """
        entries = (entry for entry in checked if isinstance(entry, CheckedPass))
        custom_passes = [(entry, entry.spec.custom) for entry in entries if entry.spec.custom]
        if not custom_passes:
            return
        failures = []
        for entry, custom in custom_passes:
            outcome = custom.finish([array for array in entry.logprobs if array is not None])
            failures.append(str(outcome) if isinstance(outcome, UserError) else None)
        all_failures = cast("list[list[str | None]]", self._ranks.gather(failures))
        for (_, custom), reasons in zip(custom_passes, zip(*all_failures, strict=True), strict=True):
            reason = next((text for text in reasons if text is not None), None)
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
        local_P = super()._score_examples(batch, hidden_TD, chosen)
        all_P = local_P.new_zeros(len(batch.full_batch.row_P))
        all_P[batch.pairs] = local_P
        return self._ranks.sum_context(all_P)


class _ShardedHead(_RankedHead):
    """Each tensor rank has the logits of its shard of the vocabulary. Ranks exchange a row's largest logit, its sum of
    exponentials and its targets' logits, never complete rows.
    """

    def _logprobs(self, chunk: Chunk, frozen_CV: Tensor | None) -> Tensor:
        if self._has_kernels:
            return super()._logprobs(chunk, frozen_CV)
        raw_CW, _ = self._raw_logits(chunk, frozen_CV)
        return self._log_sums(self._base.finish_logits_(raw_CW), chunk)[1]

    def _raw_logits(self, chunk: Chunk, frozen_CV: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        adapter_groups = self._unembedding.groups(chunk.lora_batch)
        return self._unembedding.forward_shard(chunk.hidden_CD, adapter_groups, torch.float32, frozen_CV)

    def _read_logprobs(self, raw_CV: Tensor, chunk: Chunk) -> tuple[Softmax, Tensor, Tensor]:
        local_softmax = self._softmax(raw_CV)
        softmax = local_softmax._replace(sums_CS=self._ranks.gather_tensor(local_softmax.sums_CS))
        cells_p = torch.where(*self._local_cells(chunk), -1)
        return softmax, cells_p, self._ranks.sum_tensor(softmax.logprobs(cells_p))

    def _normalise(self, logits_CV: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        log_sum_C, logprob_p = self._log_sums(logits_CV, chunk)
        return (logits_CV - log_sum_C[:, None]).exp_(), logprob_p

    def _target_gradients(self, chunk: Chunk, grad_p: Tensor) -> tuple[Tensor, Tensor]:
        is_local_p, cells_p = self._local_cells(chunk)
        # No multiplication by zero: targets of other ranks have the first cell, which may be another tenant's NaN.
        return cells_p, torch.where(is_local_p, grad_p, 0.0)

    def _backward(
        self, grad_CV: Tensor, hidden_CD: Tensor, adapter_groups: Sequence[AdapterGroup], a_outputs: Sequence[Tensor]
    ) -> Tensor:
        return self._unembedding.backward_shard(grad_CV, hidden_CD, adapter_groups, a_outputs)

    @property
    def _unembedding(self) -> GatheredLinear:
        return cast(GatheredLinear, self._base.unembedding)

    def _log_sums(self, logits_CW: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """[C]: the log of each row's sum of exponentials over all logits; [p]: log probabilities."""
        max_C = self._ranks.max_tensor(logits_CW.amax(-1))
        is_local_p, cells_p = self._local_cells(chunk)
        local_logit_p = torch.where(is_local_p, logits_CW.view(-1)[cells_p], 0.0)
        sums = torch.cat([(logits_CW - max_C[:, None]).exp_().sum(-1), local_logit_p])
        sum_C, logit_p = self._ranks.sum_tensor(sums).split([len(max_C), len(local_logit_p)])
        log_sum_C = max_C + sum_C.log()
        return log_sum_C, logit_p - log_sum_C[chunk.local_p]

    def _local_cells(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """[p], [p]: whether a pair's target is in this rank's shard; its index in the flattened logits of the shard, or
        0.
        """
        shard = self._unembedding.shard
        target_p = chunk.cells_p - chunk.local_p * self._base.vocab_size - shard.start
        is_local_p = (target_p >= 0) & (target_p < shard.stop - shard.start)
        cells_p = chunk.local_p * (shard.stop - shard.start) + target_p
        return is_local_p, torch.where(is_local_p, cells_p, 0)


def distribute_examples(examples: Sequence[Example], num_shares: int, min_shared_rows: int = 0) -> list[list[Example]]:
    """Distribute examples, those that share rows together unless they are more than a share; those with the most rows
    first, each to the share with the fewest rows so far.
    """
    units = list_units(examples, min_shared_rows)
    share_rows = sum(unit.num_rows for unit in units) / num_shares
    pending, parts = units[::-1], []
    while pending:
        unit = pending.pop()
        if unit.num_rows > share_rows and len(unit.sequences) > 1:
            pending += unit.halve()
        else:
            parts.append(unit)
    shares: list[list[Example]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for unit in sorted(parts, key=lambda unit: -unit.num_rows):
        target = loads.index(min(loads))
        shares[target] += unit.members
        loads[target] += unit.num_rows
    return shares


def _scatter_logprobs(shard: MicroBatch, logprob_P: F32) -> F32:
    """[P] of all rows of the micro-batch: zeros where another context rank has the row."""
    if not isinstance(shard, RowShard):
        return logprob_P
    all_P = np.zeros(len(shard.full_batch.row_P), np.float32)
    all_P[shard.pairs] = logprob_P
    return all_P


def _models_with_gradients(checked: Sequence[CheckedPass | UserError]) -> Mapping[int, TrainedModel]:
    """The models to which some rank's sequences give a gradient, by the ids of their adapters."""
    return {
        id(entry.trained.adapter): entry.trained
        for entry in checked
        if isinstance(entry, CheckedPass)
        and entry.trained is not None
        and any(example.has_weight for example in entry.examples)
    }


def _step_adapters(checked: Sequence[CheckedPass | UserError]) -> list[Adapter]:
    """Every adapter of a step, in one order on all ranks."""
    examples = (example for entry in checked if isinstance(entry, CheckedPass) for example in entry.examples)
    return list({id(example.adapter): example.adapter for example in examples}.values())


def _pass_of(example: Example, checked: Sequence[CheckedPass | UserError]) -> CheckedPass:
    entry = checked[example.pass_index]
    assert isinstance(entry, CheckedPass)
    return entry
