"""States of sequences beside the paged cache: what layers without keys and values keep, and snapshots of it.

A `SequenceState` is what all such layers keep behind a sequence's first `num_cached` tokens. It is never written to: a
step makes new ones, so that answers of one request share their prompt's, and a step that is cut off leaves the old ones
as they were. `Recurrence` is a step's part of an `AttentionPlan`: pieces of equal length go through a layer together,
each a batch row of its own, and a sequence may be cut within a step where a snapshot is wanted.

`StateSnapshots` holds states behind whole blocks under the blocks' prefix keys, as many as there is room for; the one
that was used longest ago leaves first. Cached blocks serve a prompt only up to a snapshot: attention knows those
tokens by their keys and values, the other layers by their state.

Letters: T rows of a step, n pieces of a group, L rows of each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.backends.torch.attention import AttentionProbe, Mixer, MixerState
from tinsmith.plan.memory import STATES_EACH


class SequenceState:
    """By layer, one row of the states of a batch."""

    def __init__(self, layers: Mapping[int, MixerState], *, shares_memory: bool) -> None:
        self.layers = layers
        self.shares_memory = shares_memory

    def apart(self) -> SequenceState:
        """The same in memory of its own, so that it does not keep a whole batch alive."""
        if not self.shares_memory:
            return self
        own = {layer: MixerState(*(_copied(part) for part in state)) for layer, state in self.layers.items()}
        return SequenceState(own, shares_memory=False)


def state_bytes(noted: AttentionProbe) -> int:
    """What a sequence's state takes; 0 if no layer keeps any."""
    return sum(part.nbytes for states in noted.kept.values() for part in states[-1] if part is not None)


STATES_SHARE = 0.5
"""Of a cache's bytes: the most that states may take; the rest is for keys and values."""

SNAPSHOTS_SHARE = 0.25
"""Of the bytes for states: the most that snapshots may take."""

MOST_SNAPSHOTS = 1024


class StateRoom(NamedTuple):
    """How many sequences of a model may run, how many snapshots may be kept, and what both take together in a step, in
    which a sequence has the state before it, that behind it, and the one at its answer's last block.
    """

    max_sequences: int
    max_snapshots: int
    num_bytes: int

    @classmethod
    def of(cls, state_bytes: int, cache_bytes: float, max_sequences: int) -> StateRoom:
        if not state_bytes:
            return cls(max_sequences, 0, 0)
        room = STATES_SHARE * cache_bytes
        num_snapshots = min(int(SNAPSHOTS_SHARE * room // state_bytes), MOST_SNAPSHOTS)
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
        """A key's first state stays."""
        if key not in self._states and self.most:
            self._states[key] = namespace, state.apart()
            self.shrink(self.most)

    def shrink(self, size: int) -> None:
        while len(self._states) > size:
            self._states.popitem(last=False)

    def forget(self, namespace: int) -> None:
        for key in [key for key, (own, _) in self._states.items() if own == namespace]:
            del self._states[key]


class SequencePiece(NamedTuple):
    """A sequence's rows of a step: `size` of them from `first` on, behind `state`. `cuts`: numbers of rows, rising and
    below `size`, behind which the state is wanted, too.
    """

    first: int
    size: int
    state: SequenceState | None
    cuts: Sequence[int] = ()


@dataclass(slots=True)
class _Group:
    """Pieces, or parts of them, of equal length that go through a layer together."""

    pieces: list[int]
    starts: list[int]
    length: int
    rows: slice | Tensor = field(init=False)


class Recurrence:
    """A step's rows in layers that keep a state. Once every layer has been through, `after[i]` is piece i's state at
    its end and `at_cuts[i]` are those behind its cuts.
    """

    def __init__(self, pieces: Sequence[SequencePiece], device: torch.device) -> None:
        self._pieces = pieces
        self._device = device
        self._layers: list[dict[int, MixerState]] = [{} for _ in pieces]
        self._cut_layers: list[list[dict[int, MixerState]]] = [[{} for _ in piece.cuts] for piece in pieces]
        self._rounds = self._planned()
        self._shares = any(len(group.pieces) > 1 for groups in self._rounds for group in groups)

    def _planned(self) -> list[list[_Group]]:
        """First parts of all pieces, then the second parts, and so on; each round in groups of one length."""
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
        starts_n1 = torch.tensor(group.starts)[:, None]
        return (starts_n1 + torch.arange(group.length)).flatten().to(self._device)

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
        """The states of a group's sequences, as one batch that the layer may write to."""
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
    """Those of some positions of a sequence that lie within rows start..stop, as numbers of these rows."""
    return sorted({position - start for position in positions if start < position < stop})


def _copied(part: Tensor | None) -> Tensor | None:
    return None if part is None else part.clone()
