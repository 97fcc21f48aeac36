"""States of sequences in slots of preallocated tensors, by number, as blocks hold keys and values.

For each stateful layer and each part of its state a `StatePool` has one tensor with a row for each slot. A
`SequenceState` is a slot after a sequence's first `num_cached` tokens; it is free again once nothing refers to the
object. A state is immutable: a step reads the slots of the states before it and writes those of new ones. So the
answers of one request share their prompt's state, and an interrupted step leaves the old states as they are.

Slot 0 is never taken: the rows that pad a CUDA graph read and write it. What a slot held before is not cleared, since a
slot is written before it is read. On CUDA all slots are allocated at once and stay where they are, since graphs hold
their addresses; on a CPU they follow the use. If all are taken, snapshots are dropped, the one used longest ago first.

Knows no sequence, block or tenant. A pool of a rank without stateful layers counts slots like those of all others.

Letters: n sequences, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tinsmith.backends.torch.attention import LayerSlots, MixerState
from tinsmith.runtime.devices import runs_triton

FEWEST_SLOTS = 8
"""Slots of a pool that begins to grow."""


class SequenceState:
    """A sequence's state in each stateful layer: a slot of a pool, which this object owns."""

    __slots__ = ("__weakref__", "_pool", "slot")

    def __init__(self, pool: StatePool, slot: int) -> None:
        self._pool = pool
        self.slot = slot

    def __del__(self) -> None:
        self._pool.release(self.slot)


class StatePool:
    """`max_slots` counts slot 0; None: as many as are needed. `drop_snapshot`: stop referring to a state that can be
    computed again; False if there is none.
    """

    def __init__(
        self,
        device: torch.device,
        max_slots: int | None = None,
        drop_snapshot: Callable[[], bool] = lambda: False,
    ) -> None:
        self.device = device
        self.num_slots = 0
        self.kernels = step_kernels(device)
        self._max_slots = max_slots
        self._drop_snapshot = drop_snapshot
        self._stores: dict[int, MixerState] = {}  # of [S, ...]
        self._free: list[int] = []
        self._states: WeakValueDictionary[int, SequenceState] = WeakValueDictionary()

    @property
    def num_taken(self) -> int:
        return max(self.num_slots - 1, 0) - len(self._free)

    def allocate(self, layers: Mapping[int, MixerState]) -> None:
        """Allocate all slots for layers with such states [n, ...]."""
        assert self._max_slots is not None
        for layer, state in layers.items():
            self._stores[layer] = _empty_stores(state, 0)
        self._resize(self._max_slots, list(range(self.num_slots)))

    def take(self) -> SequenceState:
        """A slot that nothing refers to, with undefined values. Raises MemoryError if all are taken."""
        while not self._free:
            if self._max_slots is None or self.num_slots < self._max_slots:
                size = max(FEWEST_SLOTS, self.num_slots + self.num_slots // 2)
                self._resize(min(size, self._max_slots or size), list(range(self.num_slots)))
            elif not self._drop_snapshot():
                raise MemoryError(f"out of memory: all {self.num_slots} slots for states of sequences are taken")
        state = SequenceState(self, self._free.pop())
        self._states[state.slot] = state
        return state

    def release(self, slot: int) -> None:
        """Called by a state when nothing refers to it any more."""
        self._free.append(slot)

    def shrink(self, num_slots: int) -> None:
        """Keep at most this many slots, and all that are taken: their states move to the first ones."""
        states = sorted(self._states.items())
        size = max(num_slots, len(states) + 1) if states else num_slots
        if size >= self.num_slots:
            return
        sources, used_slots = list(range(size)), {slot for slot, _ in states}
        targets = [slot for slot in range(size - 1, 0, -1) if slot not in used_slots]
        for slot, state in states:
            if slot >= size:
                state.slot = targets.pop()
                sources[state.slot] = slot
        self._states = WeakValueDictionary((state.slot, state) for _, state in states)
        self._free = []
        self._resize(size, sources)
        self._free = [slot for slot in range(size - 1, 0, -1) if slot not in self._states]

    def read(self, layer: int, slots_n: Tensor) -> MixerState:
        """A layer's states in these slots, which may be overwritten."""
        return MixerState(*(None if store is None else store.index_select(0, slots_n) for store in self._stores[layer]))

    def write(self, layer: int, slots_n: Tensor, state: MixerState) -> None:
        if layer not in self._stores:
            self._stores[layer] = _empty_stores(state, self.num_slots)
        for store, part in zip(self._stores[layer], state, strict=True):
            if store is not None and part is not None:
                store.index_copy_(0, slots_n, part.to(store.dtype))

    def slots(self, layer: int, read_n: Tensor, write_n: Tensor) -> LayerSlots:
        """A layer's slots for a step of one row of each sequence."""
        return LayerSlots(self._stores[layer], read_n, write_n, self.kernels)

    def _resize(self, size: int, sources: list[int]) -> None:
        """Give all layers `size` slots, the first of which hold what is in the slots `sources`."""
        sources = sources[:size]
        for layer, stores in self._stores.items():
            # One layer after the other, so that only one exists twice.
            self._stores[layer] = MixerState(*(_resize_store(store, size, sources) for store in stores))
        self._free += range(size - 1, max(self.num_slots, 1) - 1, -1)
        self.num_slots = size


def step_kernels(device: torch.device) -> ModuleType | None:
    """The module `state_kernels`; None where it cannot run."""
    if not runs_triton(device):
        return None
    from tinsmith.backends.torch import state_kernels

    return state_kernels


def _empty_stores(state: MixerState, size: int) -> MixerState:
    return MixerState(*(None if part is None else _resize_store(part[:0], size, []) for part in state))


def _resize_store(store: Tensor | None, size: int, sources: list[int]) -> Tensor | None:
    if store is None:
        return None
    with torch.inference_mode(False):  # so that steps with and without gradients may write to it
        resized = torch.empty(size, *store.shape[1:], dtype=store.dtype, device=store.device)
        resized[:1] = 0
        if sources:
            index = torch.tensor(sources, device=store.device)
            torch.index_select(store, 0, index, out=resized[: len(sources)])
        return resized
