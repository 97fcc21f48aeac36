"""The packed training step where every weight of the base model is trained.

As `backends.torch.trainer`, but for three things: a micro-batch belongs to one model, whose weights are put into the
base model for it; backward adds to the gradients of its parameters; and the unembedding, whose logits never exist
whole, gets its own gradient chunk by chunk.

Shapes: C rows of a chunk, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from tinsmith.backends.full.base import FullBase
from tinsmith.backends.full.weights import FullGradients, FullWeights
from tinsmith.backends.torch.batch import Example, MicroBatch, pack
from tinsmith.backends.torch.lora import Adapter, Run
from tinsmith.backends.torch.loss import Head, Objective
from tinsmith.backends.torch.stretches import Stretch
from tinsmith.backends.torch.trainer import Trainer
from tinsmith.types import F32


class FullHead(Head):
    def _back(
        self, grad_CV: Tensor, hidden_CD: Tensor, work: Sequence[Run | Stretch], inner: Sequence[Tensor]
    ) -> Tensor:
        unembedding = self._base.unembedding
        assert unembedding.weight.grad is not None
        unembedding.weight.grad.addmm_(grad_CV.t(), hidden_CD)
        if unembedding.bias is not None:
            assert unembedding.bias.grad is not None
            unembedding.bias.grad += grad_CV.sum(0)
        return super()._back(grad_CV, hidden_CD, work, inner)


class FullTrainer(Trainer):
    _base: FullBase

    def __init__(self, base: FullBase, max_tokens: int, chunk_rows: int) -> None:
        super().__init__(base, max_tokens, chunk_rows)
        self._head = FullHead(base, chunk_rows)

    def _cut(self, examples: Sequence[Example]) -> list[MicroBatch]:
        own: dict[int, list[Example]] = {}
        for example in examples:
            own.setdefault(id(example.adapter), []).append(example)
        return [batch for group in own.values() for batch in pack(group, self._limit)]

    def _gradients(self, adapters: Sequence[Adapter]) -> list[FullGradients]:
        return [FullGradients(weights) for weights in adapters if isinstance(weights, FullWeights)]

    def _run_one(self, batch: MicroBatch, objectives: Sequence[Objective], *, train: bool) -> F32:
        weights = batch.examples[0].adapter
        assert isinstance(weights, FullWeights)
        self._base.bind(weights)
        gradients = weights.gradients if train else None
        with nullcontext() if gradients is None else self._base.training(dict(gradients)):  # pyright: ignore[reportArgumentType]
            return super()._run_one(batch, objectives, train=train)
