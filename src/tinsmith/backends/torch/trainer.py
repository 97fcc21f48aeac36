"""One packed training step over the passes of many tenants.

All or nothing: a step's gradients are accumulated in its own buffers and added to the adapters' gradients only after
every micro-batch has run, so an exception changes nothing. Data that cannot change a weight (forward-only, or all
weights zero) run without autograd. A malformed pass fails alone. Knows no optimizer and no file.

When memory runs out, or the memory budget is too small, the step restarts with micro-batches of half the size, down to
one sequence; a sequence that does not fit alone fails its pass. The smaller size is kept for GROW_AFTER steps.

A custom loss fails only while it runs, when parts of its gradient may already be in its adapter's buffer. That buffer
is dropped, and the other passes of the adapter run again without the failed one; other adapters are not affected.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import structlog
import torch
from torch import Tensor

from tinsmith import losses
from tinsmith.backends import MicroBatches
from tinsmith.backends.torch.adapters import Adapter, AdapterStack, TrainedModel
from tinsmith.backends.torch.attention import AttentionPlan, PackedCausal
from tinsmith.backends.torch.batch import Example, MicroBatch, build_examples
from tinsmith.backends.torch.custom_loss import CustomRun
from tinsmith.backends.torch.host import read, upload
from tinsmith.backends.torch.loss import Head, LossSpec, compute_metrics
from tinsmith.backends.torch.matmul import is_launch_bound
from tinsmith.backends.torch.memory import StepMemory, memory_errors
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.packing import pack
from tinsmith.backends.torch.profiling import stage
from tinsmith.backends.torch.tree_attention import PackedTree
from tinsmith.errors import SettingsError, UserError
from tinsmith.losses.graphs import MAX_SECONDS
from tinsmith.plan.prefix_tree import MIN_SHARED_ROWS
from tinsmith.runtime.devices import kind_of
from tinsmith.types import F32, Pass, PassResult

GROW_AFTER = 64
"""Steps without a shortage of memory after which the micro-batch size doubles again."""

TREE_TOKENS = (8192, 4096, 2048)
"""Sizes of micro-batches whose examples share rows, the first whose activations may be kept: a smaller one repeats the
shared rows more often.
"""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CheckedPass:
    """`logprobs` is filled as micro-batches finish."""

    spec: LossSpec
    examples: list[Example]
    logprobs: list[F32 | None]
    trained: TrainedModel | None  # None for forward-only


class Trainer:
    _min_shared_rows = MIN_SHARED_ROWS

    def __init__(self, base: BaseModel, max_tokens: int, chunk_rows: int) -> None:
        self._base = base
        self._max_tokens = max_tokens
        self._limit = max_tokens
        self._fitting: Sequence[int] = ()
        self._recomputed = max_tokens
        self._steps_at_limit = 0
        self._running: MicroBatch | None = None
        self._head = Head(base, chunk_rows)
        self.tree_sizes: Sequence[int] = ()
        """Sizes that micro-batches of examples that share rows may have beyond the usual one, if they fit."""
        self._num_rows: Counter[int] = Counter()  # of the current step, by pass
        self.memory: StepMemory | None = None

    def use_fitting(self, sizes: Sequence[int]) -> None:
        """Micro-batches of the first of these sizes, largest first, whose activations may be kept; where none may be,
        of the usual size, with recomputation.
        """
        self._fitting, self._max_tokens, self._limit = sizes, sizes[0], sizes[0]

    @property
    def sizes(self) -> Sequence[int]:
        """The sizes of micro-batches that are tried."""
        return self._fitting or (self._max_tokens,)

    def run(self, passes: Sequence[Pass], models: Mapping[str, TrainedModel]) -> MicroBatches:
        refused: dict[int, UserError] = {}
        while True:
            remaining = [index for index in range(len(passes)) if index not in refused]
            self._running = None
            try:
                with memory_errors(self._base.device):
                    outcomes = yield from self._run([passes[index] for index in remaining], models)
                    results = dict(zip(remaining, outcomes, strict=True))
            except MemoryError as error:
                if self._running is None:
                    raise  # smaller micro-batches would not help
                if self._base.recompute.recompute_all():
                    self._steps_at_limit = 0
                    log.warning("out of memory; recomputing the activations of all layers", problem=str(error))
                    continue
                if unfit := self._shrink(self._running, str(error)):
                    index, refusal = unfit
                    refused[remaining[index]] = refusal
                continue
            self._grow()
            results |= refused
            return [results[index] for index in range(len(passes))]

    def _shrink(self, batch: MicroBatch, problem: str) -> tuple[int, UserError] | None:
        """Memory ran out over this micro-batch: the pass that cannot run, or None if a smaller one may fit."""
        return self._shrink_to(batch.num_rows, batch.single_pass, problem)

    def _shrink_to(self, num_tokens: int, single_pass: int | None, problem: str) -> tuple[int, UserError] | None:
        """`alone`: the pass of the micro-batch, if it was a single sequence."""
        self._steps_at_limit = 0
        if single_pass is not None:
            text = f"a sequence of {num_tokens} tokens does not fit into the engine's memory, even alone: {problem}"
            return single_pass, UserError(text)
        self._limit = max(1, num_tokens // 2)
        log.warning("out of memory; reducing the size of micro-batches", num_tokens=self._limit, problem=problem)
        return None

    def _grow(self) -> None:
        self._steps_at_limit += 1
        if self._steps_at_limit < GROW_AFTER:
            return
        self._base.recompute.relax()
        if self._limit < self._max_tokens:
            self._limit, self._steps_at_limit = min(2 * self._limit, self._max_tokens), 0

    def _run(self, passes: Sequence[Pass], models: Mapping[str, TrainedModel]) -> MicroBatches:
        checked = [self._check(index, request, models) for index, request in enumerate(passes)]
        good = [entry for entry in checked if isinstance(entry, CheckedPass)]
        train, score = [], []
        self._num_rows = Counter()
        for entry in good:
            for example in entry.examples:
                (train if entry.trained is not None and example.has_weight else score).append(example)
        batches = [(batch, True) for batch in self._pack(train)]
        batches += [(batch, False) for batch in self._pack(score)]
        specs = {index: entry.spec for index, entry in enumerate(checked) if isinstance(entry, CheckedPass)}
        num_rows = self._num_rows
        buffers = yield from self._run_micro_batches(batches, specs, checked)
        results = [
            _result(entry, num_rows[index]) if isinstance(entry, CheckedPass) else entry
            for index, entry in enumerate(checked)
        ]
        failed_adapters = {
            id(entry.trained.adapter)
            for entry, result in zip(checked, results, strict=True)
            if isinstance(entry, CheckedPass) and isinstance(result, UserError) and entry.trained is not None
        }
        rerun = [
            index
            for index, entry in enumerate(checked)
            if isinstance(entry, CheckedPass)
            and not isinstance(results[index], UserError)
            and entry.trained is not None
            and id(entry.trained.adapter) in failed_adapters
        ]
        if rerun:
            outcomes = yield from self.run([passes[index] for index in rerun], models)
            for index, result in zip(rerun, outcomes, strict=True):
                results[index] = result
        trained_by_adapter = {id(entry.trained.adapter): entry.trained for entry in good if entry.trained is not None}
        for key, buffer_P in buffers.items():
            if key not in failed_adapters:
                self._accumulate(trained_by_adapter[key], buffer_P)
        return results

    def _pack(self, examples: Sequence[Example]) -> list[MicroBatch]:
        recompute, device, limit = self._base.recompute, self._base.device, self._limit
        if self._fitting:
            sizes = [size for size in self._fitting if size <= limit]
            limit = next((size for size in sizes if recompute.fits(size, device)), min(limit, self._recomputed))
        return self._count_rows(pack(examples, limit, self._min_shared_rows, self._tree_limit(limit)))

    def _tree_limit(self, limit: int) -> int:
        """The most rows of a micro-batch whose examples share rows."""
        if limit < self._max_tokens or self._base.recompute.mode == "on":
            return limit
        fits, device = self._base.recompute.fits, self._base.device
        return next((size for size in self.tree_sizes if size > limit and fits(size, device)), limit)

    def _count_rows(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Count the rows of each pass; shared ones belong to the first example that has them."""
        for batch in batches:
            for node in batch.nodes:
                self._num_rows[batch.examples[node.sequence].pass_index] += node.num_tokens
        return batches

    def _accumulate(self, trained: TrainedModel, buffer_P: Tensor) -> None:
        trained.add_gradient(buffer_P)

    def _check(self, index: int, request: Pass, models: Mapping[str, TrainedModel]) -> CheckedPass | UserError:
        trained = models.get(request.model_id)
        if trained is None:
            return UserError(f"model {request.model_id!r} is not loaded")
        try:
            losses.check_pass(request, self._base.shape)
            image_inputs = [
                self._base.prepare_images(datum.tokens_N, datum.images, request.model_id) for datum in request.data
            ]
            custom = _custom_run(request)
            spec = LossSpec(losses.loss_registry()[request.loss_fn], losses.resolve_config(request), custom)
            examples = build_examples(request, index, trained.adapter, image_inputs)
            _try_plugin(spec, examples)
        except UserError as error:
            return error
        return CheckedPass(
            spec,
            examples,
            [None] * len(request.data),
            None if request.forward_only else trained,
        )

    def _run_micro_batches(
        self,
        batches: Sequence[tuple[MicroBatch, bool]],
        specs: Mapping[int, LossSpec],
        checked: Sequence[CheckedPass | UserError],
    ) -> Generator[None, None, dict[int, Tensor]]:
        """This step's gradients by id(adapter)."""
        adapters = {id(e.adapter): e.adapter for batch, train in batches if train for e in batch.examples}
        # The micro-batch to shrink if the memory budget is too small.
        self._running = max((batch for batch, _ in batches), key=lambda batch: batch.num_rows, default=None)
        # Matrices of several adapters may be stacked while a micro-batch runs.
        stacked_bytes = sum(adapter.compute_P.nbytes for adapter in adapters.values()) if len(adapters) > 1 else 0
        with self._reserve_memory(batches, stacked_bytes + sum(adapter.flat_P.nbytes for adapter in adapters.values())):
            self._running = None  # smaller micro-batches would not free memory for gradients
            try:
                buffers, stacks = self._open_gradients(adapters)
                for index, (batch, train) in enumerate(batches):
                    if index:
                        yield
                    self._running = batch
                    self._store_logprobs(batch, self._run_micro_batch(batch, specs, train=train), checked)
                self._running = None
            finally:
                for adapter in adapters.values():
                    adapter.close_gradients()
            for keys, stack in stacks:
                buffers |= zip(keys, stack.take_gradients(), strict=True)
            return buffers

    def _open_gradients(
        self, adapters: Mapping[int, Adapter]
    ) -> tuple[dict[int, Tensor], list[tuple[list[int], AdapterStack]]]:
        """Buffers of single adapters by id, and the adapters of a layout that a GPU takes together."""
        groups: dict[int, list[int]] = {}
        for key, adapter in adapters.items():
            if is_launch_bound(adapter.flat_P) and type(adapter) is Adapter:
                groups.setdefault(id(adapter.layout), []).append(key)
        stacks = [(keys, AdapterStack([adapters[key] for key in keys])) for keys in groups.values() if len(keys) > 1]
        single_keys = adapters.keys() - {key for keys, _ in stacks for key in keys}
        return {key: adapters[key].open_gradients() for key in single_keys}, stacks

    def _reserve_memory(
        self, batches: Sequence[tuple[MicroBatch, bool]], gradient_bytes: int
    ) -> AbstractContextManager[None]:
        if self.memory is None:
            return nullcontext()
        return self.memory.reserve(batches, gradient_bytes, uncut=self._limit == self._max_tokens)

    def _run_micro_batch(self, batch: MicroBatch, specs: Mapping[int, LossSpec], *, train: bool) -> F32:
        """[P] log probabilities of the micro-batch."""
        with stage("forward"):
            hidden_TD = self._hidden(batch, train=train)
        with stage("loss"):
            if train:
                logprob_P, grad_TD = self._head.differentiate(batch, hidden_TD.detach(), specs)
            else:
                logprob_P, grad_TD = self._head.score(batch, hidden_TD), None
        # Without a grad_fn no adapter below the unembedding takes part, so there is nothing to differentiate.
        if grad_TD is not None and hidden_TD.requires_grad:
            with stage("backward"):
                hidden_TD.backward(grad_TD)
        with stage("read logprobs"):
            return read(logprob_P)[0]

    def _hidden(self, batch: MicroBatch, *, train: bool) -> Tensor:
        """[T, D], differentiable if adapters are trained."""
        device = self._base.device
        tokens_T = upload(batch.tokens_T, device)
        positions, images = (
            self._base.pack_positions(batch.input_spans) if batch.has_images else (batch.positions_T, None)
        )
        positions_T = upload(positions, device)
        plan = self._attention_plan(batch)
        if train:
            self._base.recompute.decide(len(tokens_T), device)
        with torch.set_grad_enabled(train):
            return self._base.hidden(tokens_T, positions_T, plan, batch.lora_batch, images=images)

    def _attention_plan(self, batch: MicroBatch) -> AttentionPlan:
        visible_counts = batch.visible_counts if batch.has_images else ()
        if batch.tree is None:
            return PackedCausal(batch.lengths, self._base.device, visible_counts)
        return PackedTree(batch.tree, self._base.device, visible_counts)

    @staticmethod
    def _store_logprobs(batch: MicroBatch, logprob_P: F32, checked: Sequence[CheckedPass | UserError]) -> None:
        starts = batch.example_starts.tolist()
        for example, start, stop in zip(batch.examples, starts, starts[1:], strict=False):
            entry = checked[example.pass_index]
            assert isinstance(entry, CheckedPass)
            entry.logprobs[example.datum_index] = logprob_P[start:stop].reshape(example.target_shape)


def _try_plugin(spec: LossSpec, examples: Sequence[Example]) -> None:
    """Raises UserError if a plug-in's formula fails on these inputs: on all ranks, before one waits for others."""
    if spec.loss.distribution:
        compute_metrics(spec, examples, [np.full(len(example.targets_P), -1.0, np.float32) for example in examples])


def _custom_run(request: Pass) -> CustomRun | None:
    if (loss_id := losses.loss_id_of(request)) is None:
        return None
    if request.custom_loss is None:
        raise UserError(f"loss_id {loss_id!r} is unknown")
    # A replayed pass met its time limit before and must take effect again.
    return CustomRun(request.custom_loss, request.data, max_seconds=math.inf if request.replayed else MAX_SECONDS)


def _result(entry: CheckedPass, num_rows: int) -> PassResult | UserError:
    logprobs = [array for array in entry.logprobs if array is not None]
    if entry.spec.custom is None:
        metrics = compute_metrics(entry.spec, entry.examples, logprobs)
        return PassResult(tuple(logprobs), metrics, _elementwise(entry, logprobs), num_rows)
    outcome = entry.spec.custom.finish(logprobs)
    if isinstance(outcome, UserError):
        return outcome
    num_tokens = float(sum(example.num_tokens for example in entry.examples))
    return PassResult(tuple(logprobs), {**outcome, "tokens:sum": num_tokens}, num_rows=num_rows)


def _elementwise(entry: CheckedPass, logprobs: Sequence[F32]) -> tuple[F32, ...]:
    if not entry.spec.loss.elementwise:
        return ()
    return tuple(
        losses.elementwise_cross_entropy(example.columns["weight"].reshape(example.target_shape), array)
        for example, array in zip(entry.examples, logprobs, strict=True)
    )


class DeterministicTrainer(Trainer):
    """Every bit of a result depends on its own request alone, however a client splits its data into requests.

    A kernel chooses the order of its additions by its input's shape. So each sequence goes through the model alone,
    with or without a gradient, always with the same number of threads, and gradients are added sequence by sequence in
    the order of the requests and their data. The sampler verifies at start that repeated calls give the same bits. Pins
    the base model; raises SettingsError where that is not possible.
    """

    def __init__(self, base: BaseModel, max_tokens: int, chunk_rows: int) -> None:
        if not kind_of(base.device).is_host:
            raise SettingsError(
                f"deterministic is 'on' and device is {str(base.device)!r}; it is for device 'cpu' only"
            )
        base.pin()
        torch.backends.mkldnn.deterministic = True
        super().__init__(base, max_tokens, chunk_rows)
        self._head = _BatchInvariantHead(base, chunk_rows)

    def _pack(self, examples: Sequence[Example]) -> list[MicroBatch]:
        return self._count_rows([MicroBatch((example,)) for example in examples])

    def _hidden(self, batch: MicroBatch, *, train: bool) -> Tensor:
        # Some kernels are chosen by whether a backward will follow.
        hidden_TD = super()._hidden(batch, train=True)
        return hidden_TD if train else hidden_TD.detach()

    def _accumulate(self, trained: TrainedModel, buffer_P: Tensor) -> None:
        trained.gradient_P = buffer_P  # it started from the accumulated gradient

    def _run_micro_batches(
        self,
        batches: Sequence[tuple[MicroBatch, bool]],
        specs: Mapping[int, LossSpec],
        checked: Sequence[CheckedPass | UserError],
    ) -> Generator[None, None, dict[int, Tensor]]:
        totals: dict[int, Tensor] = {}
        for index, (batch, train) in enumerate(batches):
            if index:
                yield
            gradients = yield from super()._run_micro_batches([(batch, train)], specs, checked)
            for key, gradient_P in gradients.items():
                if key not in totals:
                    totals[key] = _clone_gradient(batch, checked)
                totals[key] += gradient_P
        return totals


def _clone_gradient(batch: MicroBatch, checked: Sequence[CheckedPass | UserError]) -> Tensor:
    entry = checked[batch.examples[0].pass_index]
    assert isinstance(entry, CheckedPass) and entry.trained is not None
    return entry.trained.gradient_or_zeros().clone()


class _BatchInvariantHead(Head):
    """Scores all rows in separate chunks, so that differentiated rows do not change a log probability."""

    def differentiate(
        self, batch: MicroBatch, hidden_TD: Tensor, specs: Mapping[int, LossSpec]
    ) -> tuple[Tensor, Tensor]:
        _, grad_TD = super().differentiate(batch, hidden_TD, specs)
        return self.score(batch, hidden_TD), grad_TD
