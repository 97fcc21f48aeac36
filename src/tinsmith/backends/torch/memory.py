"""The memory manager of a device: who holds how much of the memory budget, and what is evicted when another needs it.

Holders report what they hold whenever they are asked; a step reserves memory for its activations while it runs. Nothing
is measured: equal requests lead to equal decisions, on every rank and in every run. Without a budget the manager only
counts. Holders are evicted in the order of cost: features of images, optimizer states of models in training, cached
prefixes that are idle, cached prefixes of running samples, captured graphs.

Under a budget `StepMemory` takes the cheapest way that fits: activations are kept if idle memory can be evicted for
them, else recomputed, and only then running samples lose their cache. A step that does not fit even so raises
OverBudgetError, and the trainer tries smaller micro-batches.

CUDA raises an error of its own when memory runs out, its libraries and the CPU's allocator a RuntimeError that is
recognised by its text. `memory_errors` turns all of them into MemoryError, which the engine understands.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tinsmith.backends.torch.batch import MicroBatch
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import SettingsError
from tinsmith.plan import memory as plan_memory
from tinsmith.plan.architecture import read_directory
from tinsmith.plan.degrees import gib
from tinsmith.plan.memory import Activations

SIGNS = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED", "not enough memory")

GIBIBYTE = 2**30

MODELS_SHARE = 0.4
"""Of what is free once the base model is there: the rest is for activations, the KV cache and published versions."""


class OverBudgetError(MemoryError):
    """A budget has not so much: the device itself was not asked."""


@contextmanager
def memory_errors(device: torch.device) -> Iterator[None]:
    """Turn whatever means that memory ran out into MemoryError."""
    try:
        yield
    except OverBudgetError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not _ran_out(error):
            raise
        text = str(error).strip().partition("\n")[0][:200] or "an allocation failed"
        free = f"{device} has {free_bytes(device) / GIBIBYTE:.1f} GiB free"
        raise MemoryError(f"{free} ({text})") from None


def _ran_out(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(sign in str(error) for sign in SIGNS)


def free_bytes(device: torch.device) -> int:
    """What could be allocated now, as far as the system tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


BASE, IMAGES, MODELS, VERSIONS, SAMPLING = "base", "images", "models", "versions", "sampling"
ACTIVATIONS, KV_CACHE = "activations", "kv_cache"
MEBIBYTE = 2**20

VERSIONS_SHARE = 0.1
"""Of what the base model leaves: published versions, with what is derived from them to multiply faster."""


@dataclass(frozen=True, slots=True)
class Evictable:
    """What a holder can free. `idle_bytes` costs no running work, `most_bytes` is all that it could free. `evict` is
    given the number of bytes that are missing, and frees what it can.
    """

    idle_bytes: Callable[[], int]
    most_bytes: Callable[[], int]
    evict: Callable[[int], None]


class MemoryManager:
    """Called from one thread."""

    def __init__(self, budget_bytes: int = 0) -> None:
        """0: no budget."""
        self.budget_bytes = budget_bytes
        self._holders: dict[str, Callable[[], int]] = {}
        self._evictable: dict[str, Evictable] = {}
        self._reserved = 0
        self._peak = 0

    @property
    def is_limited(self) -> bool:
        return self.budget_bytes > 0

    @property
    def is_reserved(self) -> bool:
        """Whether a step has reserved memory for its activations."""
        return self._reserved > 0

    def register(self, name: str, held: Callable[[], int], evictable: Evictable | None = None) -> None:
        self._holders[name] = held
        if evictable is not None:
            self._evictable[name] = evictable

    def use(self) -> dict[str, int]:
        """Bytes by holder."""
        return {name: held() for name, held in self._holders.items()} | {ACTIVATIONS: self._reserved}

    def take_peak(self) -> int:
        """The most that activations had since the last call: between steps they have nothing."""
        peak, self._peak = self._peak, self._reserved
        return peak

    def free(self) -> float:
        """What is held by no one; negative if holders hold too much."""
        return self.budget_bytes - sum(self.use().values()) if self.is_limited else math.inf

    def limit_of(self, name: str) -> float:
        """How much a holder may hold now, without any eviction."""
        return self.free() + self.use()[name]

    def steady_limit(self) -> float:
        """What activations or the KV cache may count on at any time: what the base model and adapters leave."""
        left = self.budget_bytes - self._holders[BASE]() if self.is_limited else math.inf
        return (1.0 - MODELS_SHARE - VERSIONS_SHARE) * left

    def available(self, name: str, *, idle_only: bool) -> float:
        """How much a holder may hold once others were evicted: only what is idle, or all that can be."""
        others = [evictable for other, evictable in self._evictable.items() if other != name]
        return self.limit_of(name) + sum(each.idle_bytes() if idle_only else each.most_bytes() for each in others)

    def evict_for(self, num_bytes: float, name: str) -> bool:
        """Evict others until a holder may have this much more; False if that is impossible."""
        for other, evictable in self._evictable.items():
            missing = num_bytes - self.free()
            if missing <= 0:
                return True
            if other != name:
                evictable.evict(math.ceil(missing))
        return num_bytes <= self.free()

    @contextmanager
    def reserved(self, num_bytes: int) -> Iterator[None]:
        """Memory for the activations of a step. Raises OverBudgetError, with the numbers, if it does not fit."""
        if self.is_limited and not self.evict_for(num_bytes, ACTIVATIONS):
            raise OverBudgetError(f"activations take {in_words(num_bytes)}; {self.described()}")
        self._reserved += num_bytes
        self._peak = max(self._peak, self._reserved)
        try:
            yield
        finally:
            self._reserved -= num_bytes

    def described(self) -> str:
        """Who holds what, for an error message."""
        parts = ", ".join(f"{name} {in_words(num_bytes)}" for name, num_bytes in self.use().items() if num_bytes)
        return f"of the memory budget of {in_words(self.budget_bytes)}, {parts or 'nothing'} is held"


def in_words(num_bytes: float) -> str:
    return gib(num_bytes) if num_bytes >= 2**30 else f"{num_bytes / MEBIBYTE:.1f} MiB"


SAMPLED_ROWS = 512
"""Rows of a sampler's step, which needs a layer's worth of each, and logits of some."""


class StepMemory:
    """What a training step takes of the device while it runs."""

    def __init__(self, base: BaseModel, memory: MemoryManager, chunk_rows: int) -> None:
        self._recompute = base.recompute
        self._memory = memory
        self.activations = replace(
            activations_of(base), logits_bytes=4.0 * plan_memory.LOGIT_COPIES * chunk_rows * base.vocab_size
        )
        self.shortage_bytes = 0
        """How much the last step that did not fit was short of; 0 once a whole one has."""

    @property
    def sampling_bytes(self) -> int:
        """Activations of a sampler's step."""
        return self.activations.num_bytes(SAMPLED_ROWS, recompute=True)

    @contextmanager
    def reserved(
        self, batches: Sequence[tuple[MicroBatch, bool]], gradient_bytes: int, *, uncut: bool
    ) -> Iterator[None]:
        """For steps of these micro-batches, one after the other, and the gradients of all of them. `uncut`: they are as
        large as they ever are.
        """
        sizes = {train: max((sum(batch.lengths) for batch, kind in batches if kind == train), default=0)
                 for train in (True, False)}  # fmt: skip
        recompute = self._choose(sizes, gradient_bytes)
        if self._memory.is_limited:
            self._recompute.chosen = recompute
        needed = self._needed(sizes, recompute=recompute) + gradient_bytes
        try:
            with self._memory.reserved(needed):
                if uncut and batches:
                    self.shortage_bytes = 0
                yield
        except OverBudgetError:
            self.shortage_bytes = max(0, int(needed - self._memory.available(ACTIVATIONS, idle_only=False)))
            raise

    def _choose(self, sizes: dict[bool, int], gradient_bytes: int) -> bool:
        """Whether activations are recomputed."""
        ways = {"on": (True,), "off": (False,), "auto": (False, True)}[self._recompute.mode]
        for idle_only in (True, False):
            limit = self._memory.available(ACTIVATIONS, idle_only=idle_only)
            for recompute in ways:
                if self._needed(sizes, recompute=recompute) + gradient_bytes <= limit:
                    return recompute
        return ways[-1]

    def _needed(self, sizes: dict[bool, int], *, recompute: bool) -> int:
        trained = self.activations.num_bytes(sizes[True], recompute=recompute) if sizes[True] else 0
        scored = replace(self.activations, inputs=0.0).num_bytes(sizes[False], recompute=True) if sizes[False] else 0
        return max(trained, scored)


def activations_of(base: BaseModel) -> Activations:
    """By the plan's arithmetic, or, for a family that it does not count, by the linears that are there."""
    dtype = str(base.dtype).removeprefix("torch.")
    cuda = base.device.type == "cuda"
    try:
        model = replace(
            read_directory(Path(base.shape.path)), written_out=base.trains_written_out and base.vision is None
        )
        return plan_memory.activations(model, dtype=dtype, cuda=cuda)
    except SettingsError:
        config = base.model.config.get_text_config()
        layers, hidden = config.num_hidden_layers, config.hidden_size
        kept = base.recompute.bytes_per_token() / base.dtype.itemsize
        logits = plan_memory.logits_bytes(base.vocab_size, cuda=cuda)
        return Activations(kept, kept / layers, layers * hidden, base.dtype.itemsize, logits)
