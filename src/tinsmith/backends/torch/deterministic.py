"""Training whose every bit is the request's own: whoever shares the step, however the data are cut into requests.

A kernel adds in an order that it chooses by the shape it is given. So each sequence goes through the model alone, in
shapes of its own, whether a gradient is wanted or not, and gradients are added sequence by sequence in the order of
the requests and of the data within each. The order in which a client sends its data is a part of what it asked for.
Threads are as many all the time (`BaseModel.pin`). What it takes beyond that, that the same call gives the same bits,
is tried when the backend is made (`samplers.deterministic`) and by the tests.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor

from tinsmith.backends.torch.batch import Example, MicroBatch
from tinsmith.backends.torch.loss import Head, LossSpec
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.trained import Trained
from tinsmith.backends.torch.trainer import CheckedPass, Trainer
from tinsmith.errors import SettingsError, UserError


def pin(base: BaseModel) -> None:
    """Prepare a base model for deterministic work. Raises SettingsError where that is not possible."""
    if base.device.type != "cpu":
        raise SettingsError(f"deterministic is 'on' and device is {str(base.device)!r}; it is for device 'cpu' only")
    base.pin()
    torch.backends.mkldnn.deterministic = True


class DeterministicTrainer(Trainer):
    def __init__(self, base: BaseModel, max_tokens: int, chunk_rows: int) -> None:
        super().__init__(base, max_tokens, chunk_rows)
        self._head = _EvenHead(base, chunk_rows)

    def _cut(self, examples: Sequence[Example]) -> list[MicroBatch]:
        return [MicroBatch((example,)) for example in examples]

    def _hidden(self, batch: MicroBatch, *, train: bool) -> Tensor:
        # Some kernels are chosen by whether there will be a way back.
        hidden_TD = super()._hidden(batch, train=True)
        return hidden_TD if train else hidden_TD.detach()

    def _join(self, trained: Trained, buffer_P: Tensor) -> None:
        trained.gradient_P = buffer_P  # which began with what had accumulated

    def _run_all(
        self,
        batches: Sequence[tuple[MicroBatch, bool]],
        specs: Mapping[int, LossSpec],
        checked: Sequence[CheckedPass | UserError],
    ) -> Generator[None, None, dict[int, Tensor]]:
        totals: dict[int, Tensor] = {}
        for number, (batch, train) in enumerate(batches):
            if number:
                yield
            own = yield from super()._run_all([(batch, train)], specs, checked)
            for key, gradient_P in own.items():
                if key not in totals:
                    totals[key] = _accumulated(batch, checked)
                totals[key] += gradient_P
        return totals


def _accumulated(batch: MicroBatch, checked: Sequence[CheckedPass | UserError]) -> Tensor:
    entry = checked[batch.examples[0].pass_index]
    assert isinstance(entry, CheckedPass) and entry.trained is not None
    return entry.trained.gradient_or_zeros().clone()


class _EvenHead(Head):
    """Scores all rows in chunks of their own, so that what is differentiated changes no log probability."""

    def differentiate(
        self, batch: MicroBatch, hidden_TD: Tensor, specs: Mapping[int, LossSpec]
    ) -> tuple[Tensor, Tensor]:
        _, grad_TD = super().differentiate(batch, hidden_TD, specs)
        return self.score(batch, hidden_TD), grad_TD
