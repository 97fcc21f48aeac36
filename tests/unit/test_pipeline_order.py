"""The order of a pipeline's actions: torch's own for 1F1B, and one that no stage deadlocks in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from tinsmith.backends.distributed.pipeline_parallel import Action, order_1f1b, ticks

STAGES, MICRO_BATCHES = st.integers(2, 6), st.integers(0, 15)


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 11])
def test_the_order_is_torchs(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        warmup = min(stages - 1 - stage, micro_batches)
        turns = micro_batches - warmup
        theirs = schedules._get_1f1b_rank_ops(1, stages, warmup, turns, warmup, stage, lambda _: 0, lambda _: 0)
        expected = [(each.computation_type.value == "F", each.microbatch_index) for each in theirs if each is not None]
        assert [tuple(action) for action in order_1f1b(stage, stages, micro_batches)] == expected


@given(STAGES, MICRO_BATCHES)
def test_every_input_was_sent_in_an_earlier_tick(stages: int, micro_batches: int) -> None:
    order = ticks(stages, micro_batches)
    assert len({len(actions) for actions in order}) == 1
    at = {(stage, action): tick for stage, own in enumerate(order) for tick, action in enumerate(own) if action}
    assert len(at) == 2 * stages * micro_batches
    for (stage, action), tick in at.items():
        if action.is_forward and stage:
            assert at[stage - 1, action] < tick
        if not action.is_forward:
            source = (stage, Action(True, action.micro_batch)) if stage == stages - 1 else (stage + 1, action)
            assert at[source] < tick


@given(STAGES, MICRO_BATCHES)
def test_a_stage_keeps_at_most_as_many_micro_batches_as_follow(stages: int, micro_batches: int) -> None:
    order = ticks(stages, micro_batches)
    assert len(order[0]) == (2 * (micro_batches + stages - 1) if micro_batches else 0)
    for stage, actions in enumerate(order):
        kept = most = 0
        for action in filter(None, actions):
            kept += 1 if action.is_forward else -1
            most = max(most, kept)
        assert kept == 0 and most == min(stages - stage, micro_batches)
