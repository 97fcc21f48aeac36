"""The memory manager of a device: the holders' use of the memory budget, and eviction.

Holders report their bytes on request; a step reserves memory for its activations while it runs. Nothing is measured, so
equal requests lead to equal decisions on every rank and in every run. Without a budget the manager only counts. Holders
are evicted in the order of cost: image features, optimizer states of models in training, idle cached prefixes, cached
prefixes of running samples.

Under a budget `StepMemory` takes the cheapest option that fits: activations are kept if evicting idle memory makes
room, otherwise recomputed; only then do running samples lose their cache. If even that does not fit, it raises
OverBudgetError, and the trainer tries smaller micro-batches.

CUDA raises its own error when memory runs out, CUDA libraries and the CPU allocator a RuntimeError that is recognised
by its text. `memory_errors` turns all of them into MemoryError, which the engine handles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from tinsmith.backends.device_errors import is_out_of_memory
from tinsmith.backends.torch.batch import MicroBatch
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.recompute import RECOMPUTE_SHARE
from tinsmith.errors import SettingsError
from tinsmith.plan import memory as plan_memory
from tinsmith.plan.architecture import read_directory, tower_activations
from tinsmith.plan.memory import RESERVED_SHARE, Activations
from tinsmith.runtime.devices import free_bytes, kind_of
from tinsmith.runtime.sizes import format_bytes

MODELS_PART, VERSIONS_PART = 0.2, 0.05
"""Of what the base, activations and graphs leave of a GPU, the parts of models in training and of published versions;
the KV cache has the rest. Models beyond their part are stored on disk, samples beyond the cache wait.
"""

MODELS_SHARE = 0.4
"""Share of the memory left by the base model; the rest is for activations, the KV cache and published versions."""


class OverBudgetError(MemoryError):
    """The budget is exhausted; nothing was allocated on the device."""


@contextmanager
def memory_errors(device: torch.device) -> Iterator[None]:
    """Turn all out-of-memory errors into MemoryError."""
    try:
        yield
    except OverBudgetError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        text = str(error).strip().partition("\n")[0][:200] or "an allocation failed"
        free = f"{device} has {format_bytes(free_bytes(device))} free"
        raise MemoryError(f"{free} ({text})") from None


def use_expandable_segments() -> None:
    """Let CUDA's allocator extend segments, which micro-batches of many sizes would fragment, unless the environment
    configures it. Not through the environment: vLLM would inherit that, and its sleep mode refuses such segments.
    """
    current = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # absent from older versions of torch
    if torch.cuda.is_available() and current is not None and not current():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # pyright: ignore[reportAttributeAccessIssue]


BASE, IMAGES, MODELS, VERSIONS, SAMPLING = "base", "images", "models", "versions", "sampling"
ACTIVATIONS, KV_CACHE = "activations", "kv_cache"

VERSIONS_SHARE = 0.1
"""Share of the memory left by the base model for published versions, with their derived copies."""


@dataclass(frozen=True, slots=True)
class Evictable:
    """Bytes that a holder can free: `idle_bytes` without cost for running work, `evictable_bytes` in all. `evict`
    receives the number of missing bytes and frees what it can.
    """

    idle_bytes: Callable[[], int]
    evictable_bytes: Callable[[], int]
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

    def register(self, name: str, count_bytes: Callable[[], int], evictable: Evictable | None = None) -> None:
        self._holders[name] = count_bytes
        if evictable is not None:
            self._evictable[name] = evictable

    def bytes_by_holder(self) -> dict[str, int]:
        """Bytes by holder."""
        return {name: count_bytes() for name, count_bytes in self._holders.items()} | {ACTIVATIONS: self._reserved}

    def take_peak(self) -> int:
        """The most bytes of activations since the last call; there are none between steps."""
        peak, self._peak = self._peak, self._reserved
        return peak

    def free(self) -> float:
        """Unused bytes of the budget; negative if holders exceed it."""
        return self.budget_bytes - sum(self.bytes_by_holder().values()) if self.is_limited else math.inf

    def limit_of(self, name: str) -> float:
        """The bytes that a holder may use now without evictions."""
        return self.free() + self.bytes_by_holder()[name]

    def steady_limit(self) -> float:
        """The bytes that activations or the KV cache can always rely on: what the base model and adapters leave."""
        remaining_bytes = self.budget_bytes - self._holders[BASE]() if self.is_limited else math.inf
        return (1.0 - MODELS_SHARE - VERSIONS_SHARE) * remaining_bytes

    def available(self, name: str, *, idle_only: bool) -> float:
        """The bytes that a holder may use after evicting others: only what is idle, or all that can be freed."""
        if not self.is_limited:
            return math.inf
        other_holders = [evictable for other, evictable in self._evictable.items() if other != name]
        return self.limit_of(name) + sum(
            holder.idle_bytes() if idle_only else holder.evictable_bytes() for holder in other_holders
        )

    def evict_for(self, num_bytes: float, name: str) -> bool:
        """Evict others until a holder may use `num_bytes` more; False if that is impossible."""
        for other, evictable in self._evictable.items():
            missing = num_bytes - self.free()
            if missing <= 0:
                return True
            if other != name:
                evictable.evict(math.ceil(missing))
        return num_bytes <= self.free()

    @contextmanager
    def reserve(self, num_bytes: int) -> Iterator[None]:
        """Reserve memory for a step's activations. Raises OverBudgetError, with the bytes, if it does not fit."""
        if self.is_limited and not self.evict_for(num_bytes, ACTIVATIONS):
            raise OverBudgetError(f"activations take {format_bytes(num_bytes)}; {self.describe_use()}")
        self._reserved += num_bytes
        self._peak = max(self._peak, self._reserved)
        try:
            yield
        finally:
            self._reserved -= num_bytes

    def describe_use(self) -> str:
        """The current holders, for an error message."""
        parts = ", ".join(
            f"{name} {format_bytes(num_bytes)}" for name, num_bytes in self.bytes_by_holder().items() if num_bytes
        )
        return f"of the memory budget of {format_bytes(self.budget_bytes)}, {parts or 'nothing'} is held"


STEP_ROWS, LARGE_MODEL_STEP_ROWS = 2048, 512
"""Rows of a sampler's step, unless set. A step needs one layer's activations for each, and logits for some. On a CPU
larger models take LARGE_MODEL_STEP_ROWS, since samples wait for the prompts of others.
"""

SMALL_PARAMETERS, SMALL_WIDE_PARAMETERS = 10**8, 10**7
"""The most parameters with which a CPU takes STEP_ROWS: in bfloat16, and in wider dtypes."""


def choose_step_rows(base: BaseModel) -> int:
    max_parameters = SMALL_PARAMETERS if base.dtype == torch.bfloat16 else SMALL_WIDE_PARAMETERS
    return LARGE_MODEL_STEP_ROWS if kind_of(base.device).is_host and base.num_parameters > max_parameters else STEP_ROWS


class Division(NamedTuple):
    """Bytes of a GPU's free memory, once the base is on it."""

    activations: int
    models: int
    kv_cache: int


def divide(
    free: int, total: int, activations: Activations, tokens: Sequence[int], longest: int, sampling: int
) -> Division:
    """Divide the memory that a base model leaves of a GPU. Activations have what the longest sequence needs if it is
    recomputed, and what the largest of the usual micro-batches of `tokens` needs if it is not, of those that need at
    most a quarter; at most half in all.
    `sampling`: bytes of a sampler's step, of which its graphs hold the rows that only decode, a quarter, once more.
    """
    usable = max(0, free - int(RESERVED_SHARE * total) - sampling - sampling // 4)
    sizes_bytes = (activations.num_bytes(size, recompute=False) for size in sorted(tokens, reverse=True))
    largest = next((size for size in sizes_bytes if size <= usable // 4), 0)
    # Micro-batches keep activations within a share of what is free by then.
    reserved = max(activations.num_bytes(longest, recompute=True), int(largest / RECOMPUTE_SHARE[True]))
    reserved = min(reserved, usable // 2)
    models, versions = (int(part * (usable - reserved)) for part in (MODELS_PART, VERSIONS_PART))
    return Division(reserved, models, usable - reserved - models - versions)


class _Sizes(NamedTuple):
    """Tokens of the largest micro-batches with and without gradients, and of the largest image."""

    trained: int
    scored: int
    image: int


class StepMemory:
    """Device memory of a training step while it runs."""

    def __init__(self, base: BaseModel, memory: MemoryManager, chunk_rows: int, rows: int) -> None:
        """`rows`: of a sampler's step; 0 for the default of the device."""
        self._sampled_rows = rows or choose_step_rows(base)
        self._recompute = base.recompute
        self._memory = memory
        copies = plan_memory.LOGIT_COPIES[kind_of(base.device).has_kernels]
        self.activations = replace(activations_of(base), logits_bytes=4.0 * copies * chunk_rows * base.vocab_size)
        self._tower_elements = tower_activations(base.model.config) if base.vision else 0.0
        vision = base.shape.vision
        self._max_image_tokens = min(vision.most_tokens, base.max_context_length) if vision else 0
        self._dtype = str(base.dtype).removeprefix("torch.")
        self.shortage_bytes = 0
        """The shortage of the last step that did not fit; 0 after a full-size step fitted."""

    @property
    def sampling_bytes(self) -> int:
        """Activations of a sampler's step, or of the vision tower for the largest image, whichever is more."""
        rows = self.activations.num_bytes(self._sampled_rows, recompute=True)
        return max(rows, self._tower_bytes(self._max_image_tokens))

    @contextmanager
    def reserve(
        self, batches: Sequence[tuple[MicroBatch, bool]], gradient_bytes: int, *, uncut: bool
    ) -> Iterator[None]:
        """Reserve memory for these micro-batches, one after the other, and all their gradients. `uncut`: their size is
        not reduced.
        """
        trained, scored = (max((batch.num_rows for batch, kind in batches if kind == train), default=0)
                           for train in (True, False))  # fmt: skip
        sizes = _Sizes(trained, scored, max((batch.largest_image for batch, _ in batches), default=0))
        recompute = self._choose_recompute(sizes, gradient_bytes)
        if self._memory.is_limited:
            self._recompute.chosen = recompute
        needed_bytes = self._step_bytes(sizes, recompute=recompute) + gradient_bytes
        try:
            with self._memory.reserve(needed_bytes):
                if uncut and batches:
                    self.shortage_bytes = 0
                yield
        except OverBudgetError:
            self.shortage_bytes = max(0, int(needed_bytes - self._memory.available(ACTIVATIONS, idle_only=False)))
            raise

    def _choose_recompute(self, sizes: _Sizes, gradient_bytes: int) -> bool:
        """Whether to recompute activations."""
        ways = {"on": (True,), "off": (False,), "auto": (False, True)}[self._recompute.mode]
        for idle_only in (True, False):
            limit = self._memory.available(ACTIVATIONS, idle_only=idle_only)
            for recompute in ways:
                if self._step_bytes(sizes, recompute=recompute) + gradient_bytes <= limit:
                    return recompute
        return ways[-1]

    def _step_bytes(self, sizes: _Sizes, *, recompute: bool) -> int:
        trained = self.activations.num_bytes(sizes.trained, recompute=recompute) if sizes.trained else 0
        scored = replace(self.activations, inputs=0.0).num_bytes(sizes.scored, recompute=True) if sizes.scored else 0
        # Images go through the vision tower before the layers run.
        return max(trained, scored, self._tower_bytes(sizes.image))

    def _tower_bytes(self, num_tokens: int) -> int:
        return plan_memory.tower_bytes(self._tower_elements, num_tokens, dtype=self._dtype)


def activations_of(base: BaseModel) -> Activations:
    """From the plan's arithmetic, or, for a family that the plan does not cover, from the model's linears."""
    dtype = str(base.dtype).removeprefix("torch.")
    cuda = kind_of(base.device).has_kernels
    try:
        model = replace(
            read_directory(Path(base.shape.path)), has_fused_layers=base.has_fused_layers and base.vision is None
        )
        return plan_memory.activations(model, dtype=dtype, cuda=cuda)
    except SettingsError:
        config = base.model.config.get_text_config()
        layers, hidden = config.num_hidden_layers, config.hidden_size
        saved_elements = base.recompute.bytes_per_token() / base.dtype.itemsize
        logits = plan_memory.logits_bytes(base.vocab_size, cuda=cuda)
        return Activations(saved_elements, saved_elements / layers, layers * hidden, base.dtype.itemsize, logits)
