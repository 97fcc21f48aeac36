"""Where an engine on demand fits, and which engines end for it: decisions on values."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tinsmith.cluster.placement import EngineLayout, Full, MakeRoom, PlacedEngine, Start, Survey, decide

GIBIBYTE = 2**30


def survey(*slots: float, layouts: tuple[tuple[int, float], ...] = ((1, 4.0),), is_budget: bool = True) -> Survey:
    """A survey in GiB: the slots, and (slots, bytes of each) of each layout."""
    options = [EngineLayout(num_slots, int(size * GIBIBYTE)) for num_slots, size in layouts]
    return Survey(options, [int(size * GIBIBYTE) for size in slots], is_budget, has_gpus=len(slots) > 1)


def engine(
    name: str, size: float, *slots: int, idle_s: float = 9.0, use: str = "", is_ready: bool = True
) -> PlacedEngine:
    return PlacedEngine(name, slots or (0,), int(size * GIBIBYTE), is_ready, idle_s, use)


def test_it_starts_where_most_is_free() -> None:
    decision = decide("new", survey(16, 16, 16), [engine("a", 12, 0), engine("b", 4, 2)])
    assert isinstance(decision, Start) and decision.slots == (1,) and decision.has_gpus


def test_it_takes_several_devices_only_if_one_is_too_small() -> None:
    layouts = ((1, 20.0), (2, 12.0), (4, 7.0))
    two = decide("new", survey(16, 16, 16, 16, layouts=layouts), [engine("a", 10, 1)])
    assert isinstance(two, Start) and (two.layout.num_slots, two.slots) == (2, (0, 2))
    four = decide("new", survey(8, 8, 8, 8, layouts=layouts), [])
    assert isinstance(four, Start) and four.slots == (0, 1, 2, 3)
    assert isinstance(decide("new", survey(6, 6, 6, 6, layouts=layouts), []), Full)


def test_memory_that_was_measured_lacks_that_of_engines_that_still_load() -> None:
    loading = engine("a", 3, is_ready=False, use="it is loading")
    measured = survey(6, is_budget=False)
    assert isinstance(decide("new", measured, [replace(loading, is_ready=True)]), Start)
    assert isinstance(decide("new", measured, [loading]), Full)


def test_those_end_that_are_idle_longest_and_no_more_than_needed() -> None:
    engines = [engine("small", 1, idle_s=99), engine("old", 4, idle_s=50), engine("new", 4, idle_s=5)]
    assert decide("next", survey(9), engines) == MakeRoom(["old"])
    assert decide("next", survey(9, layouts=((1, 5.0),)), engines) == MakeRoom(["small", "old"])


def test_an_engine_in_use_never_ends_and_the_reason_names_it() -> None:
    engines = [engine("busy", 6, use="it has requests"), engine("idle", 1)]
    decision = decide("next", survey(8), engines)
    assert decision == Full(
        "base model 'next' cannot be loaded now: it needs 4.0 GiB of memory, and 1.0 GiB is free; on demand 'busy' "
        "with 6.0 GiB (it has requests), 'idle' with 1.0 GiB (idle); it can be loaded when 'busy' is idle"
    )
    alone = decide("next", survey(2, 2), [])
    assert isinstance(alone, Full) and alone.reason.endswith("no engine on demand runs that could make room")
    never = decide("next", survey(3), [engine("idle", 1)])
    assert isinstance(never, Full) and never.reason.endswith("and it would not fit without them")


def test_without_a_limit_everything_starts() -> None:
    assert decide("next", Survey([EngineLayout(1, 99 * GIBIBYTE)], []), [engine("a", 99)]) == Start(
        EngineLayout(1, 99 * GIBIBYTE), ()
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_budget_is_kept_and_what_ends_is_enough_and_minimal(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(50):
        slots = [draw.randint(4, 16)] * draw.randint(1, 4)
        engines = [
            engine(str(index), draw.randint(1, 4), draw.randrange(len(slots)), idle_s=draw.random(),
                   use=draw.choice(("", "in use")))
            for index in range(draw.randint(0, 4))
        ]  # fmt: skip
        new = survey(*slots, layouts=((1, draw.randint(1, 12)), (2, draw.randint(1, 8))))
        decision = decide("new", new, engines)
        if isinstance(decision, Start):
            for slot in decision.slots:
                taken = sum(other.num_bytes for other in engines if slot in other.slots)
                assert taken + decision.layout.num_bytes <= new.slots[slot]
        elif isinstance(decision, MakeRoom):
            rest = [other for other in engines if other.base_model not in decision.base_models]
            assert isinstance(decide("new", new, rest), Start)
            assert all(not other.use for other in engines if other.base_model in decision.base_models)
            for name in decision.base_models:
                spared = [other for other in engines if other in rest or other.base_model == name]
                assert not isinstance(decide("new", new, spared), Start), "no engine ends for nothing"
        else:
            assert not isinstance(decide("new", new, [other for other in engines if other.use]), Start)
