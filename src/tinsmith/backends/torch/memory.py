"""Memory that ran out, whatever the allocator calls it; and how much there is.

CUDA raises an error of its own, its libraries and the CPU's allocator a RuntimeError that only its text tells from
others. All of them become MemoryError, which the engine understands.

One budget for everything that a device holds: who has how much of it, and who gives when another needs room.

Holders say what they hold whenever they are asked; activations are claimed for the length of a step. Nothing is
measured: equal requests lead to equal decisions, on every rank and in every run. Without a budget the ledger only
counts. The order in which room is made is the order of cost: prefixes that nobody uses, then what running samples have
cached, then what else can be had back.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tinsmith.plan.degrees import gib

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


BASE, MODELS, VERSIONS, SAMPLING = "base", "models", "versions", "sampling"
ACTIVATIONS, KV_CACHE = "activations", "kv_cache"
MEBIBYTE = 2**20

VERSIONS_SHARE = 0.1
"""Of what the base model leaves: published versions, with what is derived from them to multiply faster."""


@dataclass(frozen=True, slots=True)
class Giver:
    """How a holder makes room. `spare`: what it could give without anybody's work being done again; `most`: what it
    could give at all. `give` is told how many bytes are wanted, and gives what it can.
    """

    spare: Callable[[], int]
    most: Callable[[], int]
    give: Callable[[int], None]


class Ledger:
    """Called from one thread."""

    def __init__(self, budget_bytes: int = 0) -> None:
        """0: no budget."""
        self.budget_bytes = budget_bytes
        self._holders: dict[str, Callable[[], int]] = {}
        self._givers: dict[str, Giver] = {}
        self._claimed = 0
        self._most_claimed = 0

    @property
    def is_limited(self) -> bool:
        return self.budget_bytes > 0

    @property
    def is_claimed(self) -> bool:
        """Whether a step has claimed memory for its activations."""
        return self._claimed > 0

    def add(self, name: str, held: Callable[[], int], giver: Giver | None = None) -> None:
        self._holders[name] = held
        if giver is not None:
            self._givers[name] = giver

    def use(self) -> dict[str, int]:
        """Bytes by holder."""
        return {name: held() for name, held in self._holders.items()} | {ACTIVATIONS: self._claimed}

    def take_most_claimed(self) -> int:
        """The most that activations had since the last call: between steps they have nothing."""
        most, self._most_claimed = self._most_claimed, self._claimed
        return most

    def free(self) -> float:
        """What nobody holds; negative if others hold too much."""
        return self.budget_bytes - sum(self.use().values()) if self.is_limited else math.inf

    def room_for(self, name: str) -> float:
        """What a holder may have in all, as things are."""
        return self.free() + self.use()[name]

    def lasting_room(self) -> float:
        """What activations, and keys and values, may count on: what the base model and adapters leave."""
        left = self.budget_bytes - self._holders[BASE]() if self.is_limited else math.inf
        return (1.0 - MODELS_SHARE - VERSIONS_SHARE) * left

    def could_have(self, name: str, *, spare: bool) -> float:
        """What a holder may have once others gave: only what they can spare, or all."""
        others = [other for other in self._givers if other != name]
        given = sum(self._givers[other].spare() if spare else self._givers[other].most() for other in others)
        return self.room_for(name) + given

    def make_room(self, num_bytes: float, name: str) -> bool:
        """Have others give until a holder may have this much more; False if it cannot."""
        for other, giver in self._givers.items():
            missing = num_bytes - self.free()
            if missing <= 0:
                return True
            if other != name:
                giver.give(math.ceil(missing))
        return num_bytes <= self.free()

    @contextmanager
    def claimed(self, num_bytes: int) -> Iterator[None]:
        """Memory for the activations of a step. Raises OverBudgetError, with the numbers, if there is not so much."""
        if self.is_limited and not self.make_room(num_bytes, ACTIVATIONS):
            raise OverBudgetError(f"activations take {in_words(num_bytes)}; {self.described()}")
        self._claimed += num_bytes
        self._most_claimed = max(self._most_claimed, self._claimed)
        try:
            yield
        finally:
            self._claimed -= num_bytes

    def described(self) -> str:
        """Who has what, in words."""
        parts = ", ".join(f"{name} {in_words(num_bytes)}" for name, num_bytes in self.use().items() if num_bytes)
        return f"of the memory budget of {in_words(self.budget_bytes)}, {parts or 'nothing'} is held"


def in_words(num_bytes: float) -> str:
    return gib(num_bytes) if num_bytes >= 2**30 else f"{num_bytes / MEBIBYTE:.1f} MiB"
