"""Slots of states: never shared by two states, never lost, and moved with what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.properties import examples
from tinsmith.backends.torch.attention import MixerState
from tinsmith.samplers.local.state_pool import SequenceState, StatePool
from tinsmith.samplers.local.states import Recurrence, RecurrentSpan, StateSnapshots

CPU = torch.device("cpu")
LAYERS = (0, 3)


def write(pool: StatePool, state: SequenceState, value: float) -> None:
    slots_n = torch.tensor([state.slot])
    for layer in LAYERS:
        recurrent = None if layer else torch.full((1, 2, 3), value + 0.5)
        pool.write(layer, slots_n, MixerState(torch.full((1, 4), value), recurrent))


def poison(pool: StatePool) -> None:
    """Fill what no state holds."""
    for stores in pool._stores.values():
        for store in stores:
            if store is not None:
                store[torch.tensor(pool._free, dtype=torch.int64)] = torch.nan


def check(pool: StatePool, values: Mapping[SequenceState, float]) -> None:
    """`values` are of all states."""
    taken = [state.slot for state in values]
    assert len({*taken, 0}) == len(taken) + 1, "two states in one slot, or one in slot 0"
    assert sorted([*taken, *pool._free]) == list(range(1, pool.num_slots))
    for state, value in values.items():
        for layer in LAYERS:
            conv, recurrent = pool.read(layer, torch.tensor([state.slot]))
            assert conv is not None and bool((conv == value).all())
            assert (recurrent is None) == bool(layer)
            assert recurrent is None or bool((recurrent == value + 0.5).all())


@examples(60)
@given(data=st.data(), max_slots=st.sampled_from([None, 5, 12]))
def test_every_state_keeps_its_slot_and_its_values(data: st.DataObject, max_slots: int | None) -> None:
    snapshots, values = StateSnapshots(3), WeakKeyDictionary[SequenceState, float]()
    pool, held = StatePool(CPU, max_slots, snapshots.drop_oldest), list[SequenceState]()
    for number in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["take", "take", "take", "drop", "snapshot", "shrink"]))
        if action == "take" and len(held) + 1 == max_slots:
            with pytest.raises(MemoryError):
                pool.take()
            assert not len(snapshots), "snapshots go first"
        elif action == "take":
            held.append(pool.take())
            values[held[-1]] = number
            write(pool, held[-1], float(number))
        elif action == "drop" and held:
            del held[data.draw(st.integers(0, len(held) - 1))]
        elif action == "snapshot" and held:
            snapshots.add(str(number).encode(), 0, held[data.draw(st.integers(0, len(held) - 1))])
        elif action == "shrink":
            pool.shrink(data.draw(st.integers(0, 12)))
        poison(pool)
        check(pool, values)
        assert pool.num_taken == len(values) <= len(held) + len(snapshots)
    snapshots.shrink(0)
    held.clear()
    pool.shrink(0)
    assert pool.num_slots == 0 and not values


def test_answers_share_their_prompts_state_and_a_step_that_fails_leaves_it() -> None:
    pool = StatePool(CPU)
    prompt = pool.take()
    write(pool, prompt, 7.0)
    spans = [RecurrentSpan(row, 1, prompt) for row in range(3)]
    recurrence = Recurrence(spans, pool)
    assert pool.num_taken == 4
    slots_2n = recurrence.slots_2n
    assert slots_2n[0].tolist() == [prompt.slot] * 3
    assert len({prompt.slot, *slots_2n[1].tolist()}) == 4
    for slot in slots_2n[1].tolist():
        pool.write(0, torch.tensor([slot]), MixerState(torch.full((1, 4), torch.nan), torch.full((1, 2, 3), torch.nan)))
    del recurrence, spans
    assert pool.num_taken == 1
    check(pool, {prompt: 7.0})


def test_slots_on_a_gpu_are_allocated_at_once_and_stay() -> None:
    pool = StatePool(CPU, 6)
    pool.allocate({0: MixerState(torch.ones(1, 4), torch.ones(1, 2, 3)), 3: MixerState(torch.ones(1, 4), None)})
    stores = pool._stores[0]
    states = [pool.take() for _ in range(5)]
    for value, state in enumerate(states):
        write(pool, state, float(value))
    assert pool.num_slots == 6 and pool._stores[0] is stores
    with pytest.raises(MemoryError):
        pool.take()
    check(pool, dict(zip(states, map(float, range(5)), strict=True)))
    assert not any(store[0].any() for store in stores if store is not None), "slot 0"
