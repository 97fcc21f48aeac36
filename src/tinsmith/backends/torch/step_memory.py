"""What a training step takes of the device while it runs, claimed from the ledger before it begins.

Under a budget the cheapest way that fits is taken: activations are kept if idle prefixes can make room for them, else
computed again, and only then running samples give up what they have cached. A step for which even that is too
little raises OverBudgetError, and its owner tries smaller micro-batches. Without a budget nothing is refused, and
`recompute` looks at what is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tinsmith.backends.torch.batch import MicroBatch
from tinsmith.backends.torch.memory import ACTIVATIONS, Ledger, OverBudgetError
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import SettingsError
from tinsmith.plan import memory
from tinsmith.plan.architecture import read_directory
from tinsmith.plan.memory import Activations

SAMPLED_ROWS = 512
"""Rows of a sampler's step, which needs a layer's worth of each, and logits of some."""


class StepMemory:
    def __init__(self, base: BaseModel, ledger: Ledger, chunk_rows: int) -> None:
        self._recompute = base.recompute
        self._ledger = ledger
        self.activations = replace(
            activations_of(base), logits_bytes=4.0 * memory.LOGIT_COPIES * chunk_rows * base.vocab_size
        )
        self.lacked_bytes = 0
        """What the last step that did not fit was short of; 0 once a whole one has."""

    @property
    def sampling_bytes(self) -> int:
        """Of a sampler's step."""
        return self.activations.num_bytes(SAMPLED_ROWS, recompute=True)

    @contextmanager
    def claimed(
        self, batches: Sequence[tuple[MicroBatch, bool]], gradient_bytes: int, *, uncut: bool
    ) -> Iterator[None]:
        """For steps of these micro-batches, one after the other, and the gradients of all of them. `uncut`: they are as
        large as they ever are.
        """
        sizes = {train: max((sum(batch.lengths) for batch, kind in batches if kind == train), default=0)
                 for train in (True, False)}  # fmt: skip
        again = self._choose(sizes, gradient_bytes)
        if self._ledger.is_limited:
            self._recompute.chosen = again
        needed = self._needed(sizes, again=again) + gradient_bytes
        try:
            with self._ledger.claimed(needed):
                if uncut and batches:
                    self.lacked_bytes = 0
                yield
        except OverBudgetError:
            self.lacked_bytes = max(0, int(needed - self._ledger.could_have(ACTIVATIONS, spare=False)))
            raise

    def _choose(self, sizes: dict[bool, int], gradient_bytes: int) -> bool:
        """Whether layers run again."""
        ways = {"on": (True,), "off": (False,), "auto": (False, True)}[self._recompute.mode]
        for spare in (True, False):
            room = self._ledger.could_have(ACTIVATIONS, spare=spare)
            for again in ways:
                if self._needed(sizes, again=again) + gradient_bytes <= room:
                    return again
        return ways[-1]

    def _needed(self, sizes: dict[bool, int], *, again: bool) -> int:
        trained = self.activations.num_bytes(sizes[True], recompute=again) if sizes[True] else 0
        scored = replace(self.activations, inputs=0.0).num_bytes(sizes[False], recompute=True) if sizes[False] else 0
        return max(trained, scored)


def activations_of(base: BaseModel) -> Activations:
    """By the plan's arithmetic, or, for a family that it does not count, by the linears that are there."""
    dtype = str(base.dtype).removeprefix("torch.")
    cuda = base.device.type == "cuda"
    try:
        model = replace(read_directory(Path(base.shape.path)), written_out=base.trains_written_out)
        return memory.activations(model, dtype=dtype, cuda=cuda)
    except SettingsError:
        config = base.model.config.get_text_config()
        layers, hidden = config.num_hidden_layers, config.hidden_size
        kept = base.recompute.bytes_per_token() / base.dtype.itemsize
        logits = memory.logits_bytes(base.vocab_size, cuda=cuda)
        return Activations(kept, kept / layers, layers * hidden, base.dtype.itemsize, logits)
