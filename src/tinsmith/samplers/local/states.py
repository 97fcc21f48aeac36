"""States of sequences in layers that cache no keys and values, and snapshots of those states.

A `SequenceState` holds the states of all such layers after a sequence's first `num_cached` tokens. It is immutable: a
step makes new ones, so the answers of one request share their prompt's state, and an interrupted step leaves the old
state intact. `Recurrence` is a step's part of an `AttentionPlan`: pieces of equal length go through a layer together,
one batch row each; a sequence is cut within a step where a snapshot is wanted.

`StateSnapshots` maps prefix keys of blocks to the state after that block and evicts the least recently used one. Cached
blocks serve a prompt only up to a snapshot: attention needs the keys and values of those tokens, the other layers their
state.

Letters: T rows of a step, n pieces of a group, L rows of each.
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
from tinsmith.plan.memory import STATES_EACH


class SequenceState:
    """By layer, one row of a batch of states."""

    def __init__(self, layers: Mapping[int, MixerState], *, shares_memory: bool) -> None:
        self.layers = layers
        self.shares_memory = shares_memory

    def unshared(self) -> SequenceState:
        """A copy in its own memory, so that it does not keep a whole batch alive."""
        if not self.shares_memory:
            return self
        own = {layer: MixerState(*(_copied(part) for part in state)) for layer, state in self.layers.items()}
        return SequenceState(own, shares_memory=False)


def state_bytes(probe: AttentionProbe) -> int:
    """Bytes of one sequence's state; 0 if no layer keeps any."""
    return sum(part.nbytes for states in probe.states.values() for part in states[-1] if part is not None)


STATES_SHARE = 0.5
"""The largest share of the cache's bytes that states may use."""

SNAPSHOTS_SHARE = 0.25
"""The largest share of the bytes for states that snapshots may use."""

MAX_SNAPSHOTS = 1024


class StateBudget(NamedTuple):
    """How many sequences may run, how many snapshots may be kept, and the bytes of both. During a step a sequence holds
    the state before it, the state after it, and the state at its answer's last block.
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
        num_running = max(1, min(max_sequences, int((room / state_bytes - num_snapshots) // STATES_EACH)))
        return cls(num_running, num_snapshots, (STATES_EACH * num_running + num_snapshots) * state_bytes)


class StateSnapshots:
    """At most `most` states by prefix key."""

    def __init__(self, most: int) -> None:
        self.most = most
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
        if key not in self._states and self.most:
            self._states[key] = namespace, state.unshared()
            self.shrink(self.most)

    def shrink(self, size: int) -> None:
        while len(self._states) > size:
            self._states.popitem(last=False)

    def forget(self, namespace: int) -> None:
        for key in [key for key, (own, _) in self._states.items() if own == namespace]:
            del self._states[key]


class SequencePiece(NamedTuple):
    """A sequence's rows of a step: `size` rows from `first` on, starting from `state`. `cuts`: ascending row counts
    below `size` after which the state is wanted, too.
    """

    first: int
    size: int
    state: SequenceState | None
    cuts: Sequence[int] = ()


@dataclass(slots=True)
class _Group:
    """Pieces, or parts of pieces, of equal length that go through a layer together."""

    pieces: list[int]
    starts: list[int]
    length: int
    rows: slice | Tensor = field(init=False)


class Recurrence:
    """A step's rows in stateful layers. After all layers, `after[i]` is piece i's final state and `at_cuts[i]` are the
    states at its cuts.
    """

    def __init__(self, pieces: Sequence[SequencePiece], device: torch.device) -> None:
        self._pieces = pieces
        self._device = device
        self._layers: list[dict[int, MixerState]] = [{} for _ in pieces]
        self._cut_layers: list[list[dict[int, MixerState]]] = [[{} for _ in piece.cuts] for piece in pieces]
        self._rounds = self._planned()
        self._shares = any(len(group.pieces) > 1 for groups in self._rounds for group in groups)

    def _planned(self) -> list[list[_Group]]:
        """First parts of all pieces, then second parts, and so on; each round in groups of equal length."""
        rounds = []
        for number in range(max(len(piece.cuts) for piece in self._pieces) + 1):
            groups: dict[tuple[int, bool], _Group] = {}
            for index, piece in enumerate(self._pieces):
                bounds = [0, *piece.cuts, piece.size]
                if number > len(piece.cuts):
                    continue
                start, length = piece.first + bounds[number], bounds[number + 1] - bounds[number]
                is_continued = number > 0 or piece.state is not None
                group = groups.setdefault((length, is_continued), _Group([], [], length))
                group.pieces.append(index)
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
        for number, groups in enumerate(self._rounds):
            for group in groups:
                own_TD = x_TD[group.rows]
                x_nLD = own_TD.view(len(group.pieces), group.length, -1)
                y_nLD, state = mixer(x_nLD, tuple(group.starts), self._before(group, number, mixer.layer), keep=True)
                assert state is not None
                self._leave(group, number, mixer.layer, state)
                if len(own_TD) == len(x_TD):
                    return y_nLD.flatten(0, 1)
                if y_TD is None:
                    y_TD = y_nLD.new_empty(len(x_TD), y_nLD.shape[-1])
                y_TD[group.rows] = y_nLD.flatten(0, 1)
        assert y_TD is not None
        return y_TD

    def _before(self, group: _Group, number: int, layer: int) -> MixerState | None:
        """The states of a group's sequences as one batch that the layer may overwrite."""
        states = []
        for index in group.pieces:
            if number:
                states.append(self._cut_layers[index][number - 1][layer])
            elif (state := self._pieces[index].state) is not None:
                states.append(state.layers[layer])
        if not states:
            return None
        return MixerState(*(None if parts[0] is None else torch.stack(parts) for parts in zip(*states, strict=True)))

    def _leave(self, group: _Group, number: int, layer: int, state: MixerState) -> None:
        parts = [[None] * len(group.pieces) if part is None else part.unbind() for part in state]
        for index, conv, recurrent in zip(group.pieces, *parts, strict=True):
            cuts = self._cut_layers[index]
            kept = cuts[number] if number < len(cuts) else self._layers[index]
            kept[layer] = MixerState(conv, recurrent)

    @property
    def after(self) -> list[SequenceState]:
        return [SequenceState(layers, shares_memory=self._shares) for layers in self._layers]

    @property
    def at_cuts(self) -> list[list[SequenceState]]:
        return [[SequenceState(layers, shares_memory=self._shares) for layers in cuts] for cuts in self._cut_layers]


def cuts_between(start: int, stop: int, positions: Iterable[int]) -> list[int]:
    """The positions strictly between start and stop, relative to start, ascending."""
    return sorted({position - start for position in positions if start < position < stop})


def _copied(part: Tensor | None) -> Tensor | None:
    return None if part is None else part.clone()
