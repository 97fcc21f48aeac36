"""A step's states in layers that cache no keys and values, and snapshots of states.

`Recurrence` is a step's part of an `AttentionPlan`: spans of equal length go through a layer together, one batch row
each; a span is cut at the positions of its snapshots. It takes the slots (`state_pool`) of the states after all spans
and at all cuts when it is created.

`StateSnapshots` maps prefix keys of blocks to the state after that block and evicts the least recently used one. Cached
blocks serve a prompt only up to a snapshot: attention needs the keys and values of those tokens, the other layers their
state.

Letters: T rows of a step, n spans of a group, L rows of each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tinsmith.backends.torch.attention import AttentionProbe, Mixer
from tinsmith.backends.torch.host import upload_all
from tinsmith.plan.memory import STATES_PER_SEQUENCE
from tinsmith.samplers.local.state_pool import SequenceState, StatePool
from tinsmith.types import I64


def state_bytes(probe: AttentionProbe) -> int:
    """Bytes of one sequence's state; 0 if no layer keeps any."""
    return sum(part.nbytes for states in probe.states.values() for part in states[-1] if part is not None)


STATES_SHARE = 0.5
"""The largest share of the cache's bytes that states may use."""

SNAPSHOTS_SHARE = 0.25
"""The largest share of the bytes for states that snapshots may use."""

MAX_SNAPSHOTS = 1024

SPARE_SLOTS = 2
"""Slots beside those of running sequences and snapshots: slot 0, and one with which a sequence that runs alone can also
store the state at a cut of its prompt.
"""


class StateBudget(NamedTuple):
    """How many sequences may run, how many snapshots may be stored, and the bytes of both. During a step a sequence
    holds the state before it, the state after it, and the state at its answer's last block.
    """

    max_sequences: int
    max_snapshots: int
    num_bytes: int

    @classmethod
    def of(cls, state_bytes: int, cache_bytes: float, max_sequences: int) -> StateBudget:
        if not state_bytes:
            return cls(max_sequences, 0, 0)
        room = STATES_SHARE * cache_bytes
        num_snapshots = min(int(SNAPSHOTS_SHARE * room // state_bytes), MAX_SNAPSHOTS)
        num_running = max(1, min(max_sequences, int((room / state_bytes - num_snapshots) // STATES_PER_SEQUENCE)))
        return cls(num_running, num_snapshots, (STATES_PER_SEQUENCE * num_running + num_snapshots) * state_bytes)

    @property
    def max_slots(self) -> int:
        return STATES_PER_SEQUENCE * self.max_sequences + self.max_snapshots + SPARE_SLOTS


class StateSnapshots:
    """At most `max_states` states by prefix key."""

    def __init__(self, max_states: int) -> None:
        self.max_states = max_states
        self._states: OrderedDict[bytes, tuple[int, SequenceState]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, key: bytes) -> bool:
        return key in self._states

    def get(self, key: bytes) -> SequenceState:
        self._states.move_to_end(key)
        return self._states[key][1]

    def add(self, key: bytes, namespace: int, state: SequenceState) -> None:
        """A key keeps its first state."""
        if key not in self._states and self.max_states:
            self._states[key] = namespace, state
            self.shrink(self.max_states)

    def drop_oldest(self) -> bool:
        """Drop the one used longest ago; False if there is none."""
        is_any = bool(self._states)
        self.shrink(len(self._states) - 1)
        return is_any

    def shrink(self, size: int) -> None:
        while len(self._states) > max(size, 0):
            self._states.popitem(last=False)

    def forget(self, namespace: int) -> None:
        for key in [key for key, (owner, _) in self._states.items() if owner == namespace]:
            del self._states[key]


class RecurrentSpan(NamedTuple):
    """A sequence's rows of a step: `size` rows from `first` on, starting from `state`. `cuts`: ascending row counts
    below `size` after which the state is recorded, too.
    """

    first: int
    size: int
    state: SequenceState | None
    cuts: Sequence[int] = ()


@dataclass(slots=True)
class _Group:
    """Spans, or parts of spans, of equal length that go through a layer together. `read`: the slots of the states that
    they continue, none where they begin; `write`: the slots of those after them.
    """

    length: int
    starts: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    write: list[int] = field(default_factory=list)


class _DeviceGroup(NamedTuple):
    """A `_Group` with its rows and slots on the device."""

    length: int
    starts: tuple[int, ...]
    rows: slice | Tensor
    read_n: Tensor | None
    write_n: Tensor


class Recurrence:
    """A step's rows in stateful layers. After all layers, `final_states[i]` is the state after span i, and
    `cut_states[i]` are the states at its cuts. Raises MemoryError if there are no slots for them.
    """

    def __init__(self, spans: Sequence[RecurrentSpan], pool: StatePool) -> None:
        self._spans = spans
        self._pool = pool
        self.final_states = [pool.take() for _ in spans]
        self.cut_states = [[pool.take() for _ in span.cuts] for span in spans]

    @property
    def slots_2n(self) -> I64:
        """The slots that each row reads and those that it writes, where every span is one row that continues."""
        states = [span.state for span in self._spans if span.size == 1 and span.state is not None]
        assert len(states) == len(self._spans)
        return np.array([[state.slot for state in states], [state.slot for state in self.final_states]], np.int64)

    @cached_property
    def _groups(self) -> list[_DeviceGroup]:
        """The first parts of all spans, then the second parts and so on, in groups of equal length."""
        groups = []
        for round_index in range(max(len(span.cuts) for span in self._spans) + 1):
            by_kind: dict[tuple[int, bool], _Group] = {}
            for span, cut_states, final in zip(self._spans, self.cut_states, self.final_states, strict=True):
                if round_index > len(span.cuts):
                    continue
                bounds, states = [0, *span.cuts, span.size], [span.state, *cut_states, final]
                start, length = bounds[round_index], bounds[round_index + 1] - bounds[round_index]
                before, after = states[round_index : round_index + 2]
                assert after is not None
                group = by_kind.setdefault((length, before is not None), _Group(length))
                group.starts.append(span.first + start)
                group.read += [] if before is None else [before.slot]
                group.write.append(after.slot)
            groups += by_kind.values()
        return self._upload(groups)

    def _upload(self, groups: Sequence[_Group]) -> list[_DeviceGroup]:
        arrays, rows_by_group = list[I64](), list[I64]()
        for group in groups:
            rows = (np.array(group.starts, np.int64)[:, None] + np.arange(group.length)).ravel()
            is_range = bool((np.diff(rows) == 1).all())
            rows_by_group.append(rows)
            arrays += [rows[: 0 if is_range else None], np.array(group.read, np.int64), np.array(group.write, np.int64)]
        on_device = iter(upload_all(arrays, self._pool.device))
        device_groups = []
        for group, rows in zip(groups, rows_by_group, strict=True):
            rows_T, read_n, write_n = next(on_device), next(on_device), next(on_device)
            selected = rows_T if len(rows_T) else slice(int(rows[0]), int(rows[-1]) + 1)
            is_continued = len(group.read) > 0
            device_groups.append(
                _DeviceGroup(group.length, tuple(group.starts), selected, read_n if is_continued else None, write_n)
            )
        return device_groups

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        y_TD = None
        for group in self._groups:
            group_TD = x_TD[group.rows]
            part_TD = self._mix_group(group, mixer, group_TD)
            if len(group_TD) == len(x_TD):
                return part_TD
            if y_TD is None:
                y_TD = part_TD.new_empty(len(x_TD), part_TD.shape[-1])
            y_TD[group.rows] = part_TD
        assert y_TD is not None
        return y_TD

    def _mix_group(self, group: _DeviceGroup, mixer: Mixer, x_TD: Tensor) -> Tensor:
        if group.length == 1 and group.read_n is not None:
            slots = self._pool.slots(mixer.layer, group.read_n, group.write_n)
            return mixer(x_TD[:, None], group.starts, slots)[0][:, 0]
        state = None if group.read_n is None else self._pool.read(mixer.layer, group.read_n)
        x_nLD = x_TD.view(len(group.starts), group.length, -1)
        y_nLD, state = mixer(x_nLD, group.starts, state, keep=True)
        assert state is not None
        self._pool.write(mixer.layer, group.write_n, state)
        return y_nLD.flatten(0, 1)


def cuts_between(start: int, stop: int, positions: Iterable[int]) -> list[int]:
    """The positions strictly between start and stop, relative to start, ascending."""
    return sorted({position - start for position in positions if start < position < stop})
