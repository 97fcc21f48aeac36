"""States of sequences in layers that cache no keys and values, and snapshots of those states.

A `SequenceState` holds the states of all such layers after a sequence's first `num_cached` tokens. It is immutable: a
step creates new ones, so the answers of one request share their prompt's state, and an interrupted step leaves the old
state intact. `Recurrence` is a step's part of an `AttentionPlan`: spans of equal length go through a layer together,
one batch row each; a span is cut at the positions of its snapshots.

`StateSnapshots` maps prefix keys of blocks to the state after that block and evicts the least recently used one. Cached
blocks serve a prompt only up to a snapshot: attention needs the keys and values of those tokens, the other layers their
state.

Letters: T rows of a step, n spans of a group, L rows of each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.backends.torch.attention import AttentionProbe, Mixer, MixerState
from tinsmith.backends.torch.host import upload
from tinsmith.plan.memory import STATES_PER_SEQUENCE


class SequenceState:
    """A sequence's state in each stateful layer. `shares_memory`: the tensors are rows of a batch's tensors."""

    def __init__(self, layers: Mapping[int, MixerState], *, shares_memory: bool) -> None:
        self.layers = layers
        self.shares_memory = shares_memory

    def unshare(self) -> SequenceState:
        """This state in memory of its own, so that it does not keep a batch alive."""
        if not self.shares_memory:
            return self
        layers = {layer: MixerState(*(_clone(part) for part in state)) for layer, state in self.layers.items()}
        return SequenceState(layers, shares_memory=False)


def state_bytes(probe: AttentionProbe) -> int:
    """Bytes of one sequence's state; 0 if no layer keeps any."""
    return sum(part.nbytes for states in probe.states.values() for part in states[-1] if part is not None)


STATES_SHARE = 0.5
"""The largest share of the cache's bytes that states may use."""

SNAPSHOTS_SHARE = 0.25
"""The largest share of the bytes for states that snapshots may use."""

MAX_SNAPSHOTS = 1024


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
            self._states[key] = namespace, state.unshare()
            self.shrink(self.max_states)

    def shrink(self, size: int) -> None:
        while len(self._states) > size:
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
    """Spans, or parts of spans, of equal length that go through a layer together."""

    span_indices: list[int]
    starts: list[int]
    length: int
    rows: slice | Tensor = field(init=False)


class Recurrence:
    """A step's rows in stateful layers. After all layers, `final_states[i]` is the state after span i, and
    `cut_states[i]` are the states at its cuts.
    """

    def __init__(self, spans: Sequence[RecurrentSpan], device: torch.device) -> None:
        self._spans = spans
        self._device = device
        self._layers: list[dict[int, MixerState]] = [{} for _ in spans]
        self._cut_layers: list[list[dict[int, MixerState]]] = [[{} for _ in span.cuts] for span in spans]
        self._rounds = self._plan_rounds()
        self._shares = any(len(group.span_indices) > 1 for groups in self._rounds for group in groups)

    def _plan_rounds(self) -> list[list[_Group]]:
        """A round for the first parts of all spans, one for the second parts and so on, in groups of equal length."""
        rounds = []
        for round_index in range(max(len(span.cuts) for span in self._spans) + 1):
            groups: dict[tuple[int, bool], _Group] = {}
            for index, span in enumerate(self._spans):
                bounds = [0, *span.cuts, span.size]
                if round_index > len(span.cuts):
                    continue
                start, length = span.first + bounds[round_index], bounds[round_index + 1] - bounds[round_index]
                is_continued = round_index > 0 or span.state is not None
                group = groups.setdefault((length, is_continued), _Group([], [], length))
                group.span_indices.append(index)
                group.starts.append(start)
            for group in groups.values():
                group.rows = self._rows(group)
            rounds.append(list(groups.values()))
        return rounds

    def _rows(self, group: _Group) -> slice | Tensor:
        first, num_rows = group.starts[0], len(group.starts) * group.length
        if group.starts == list(range(first, first + num_rows, group.length)):
            return slice(first, first + num_rows)
        return upload((np.array(group.starts)[:, None] + np.arange(group.length)).ravel(), self._device)

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        y_TD = None
        for round_index, groups in enumerate(self._rounds):
            for group in groups:
                group_TD = x_TD[group.rows]
                x_nLD = group_TD.view(len(group.span_indices), group.length, -1)
                y_nLD, state = mixer(
                    x_nLD, tuple(group.starts), self._input_states(group, round_index, mixer.layer), keep=True
                )
                assert state is not None
                self._store_states(group, round_index, mixer.layer, state)
                if len(group_TD) == len(x_TD):
                    return y_nLD.flatten(0, 1)
                if y_TD is None:
                    y_TD = y_nLD.new_empty(len(x_TD), y_nLD.shape[-1])
                y_TD[group.rows] = y_nLD.flatten(0, 1)
        assert y_TD is not None
        return y_TD

    def _input_states(self, group: _Group, round_index: int, layer: int) -> MixerState | None:
        """The states of a group's sequences as one batch that the layer may overwrite."""
        states = []
        for index in group.span_indices:
            if round_index:
                states.append(self._cut_layers[index][round_index - 1][layer])
            elif (state := self._spans[index].state) is not None:
                states.append(state.layers[layer])
        if not states:
            return None
        return MixerState(*(None if parts[0] is None else torch.stack(parts) for parts in zip(*states, strict=True)))

    def _store_states(self, group: _Group, round_index: int, layer: int, state: MixerState) -> None:
        parts = [[None] * len(group.span_indices) if part is None else part.unbind() for part in state]
        for index, conv, recurrent in zip(group.span_indices, *parts, strict=True):
            cuts = self._cut_layers[index]
            layers = cuts[round_index] if round_index < len(cuts) else self._layers[index]
            layers[layer] = MixerState(conv, recurrent)

    @property
    def final_states(self) -> list[SequenceState]:
        return [SequenceState(layers, shares_memory=self._shares) for layers in self._layers]

    @property
    def cut_states(self) -> list[list[SequenceState]]:
        return [[SequenceState(layers, shares_memory=self._shares) for layers in cuts] for cuts in self._cut_layers]


def cuts_between(start: int, stop: int, positions: Iterable[int]) -> list[int]:
    """The positions strictly between start and stop, relative to start, ascending."""
    return sorted({position - start for position in positions if start < position < stop})


def _clone(part: Tensor | None) -> Tensor | None:
    return None if part is None else part.clone()
