"""The order of a pipeline's actions: torch's own for 1F1B, and one that no stage deadlocks in, by NCCL's rules."""

from __future__ import annotations

from functools import reduce
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from tinsmith.backends import run_to_end
from tinsmith.backends.distributed.pipeline_parallel import (
    Action,
    Schedule,
    Stage,
    StageRows,
    _Boundary,
    build_ticks,
    order_1f1b,
)

STAGES, MICRO_BATCHES = st.integers(2, 6), st.integers(0, 15)


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 11])
def test_the_order_is_torchs(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        warmup = min(stages - 1 - stage, micro_batches)
        turns = micro_batches - warmup
        theirs = schedules._get_1f1b_rank_ops(1, stages, warmup, turns, warmup, stage, lambda _: 0, lambda _: 0)
        expected = [(step.computation_type.value == "F", step.microbatch_index) for step in theirs if step is not None]
        assert [tuple(action) for action in order_1f1b(stage, stages, micro_batches)] == expected


@given(STAGES, MICRO_BATCHES)
def test_every_input_was_sent_in_an_earlier_tick(stages: int, micro_batches: int) -> None:
    order = build_ticks(stages, micro_batches)
    assert len({len(actions) for actions in order}) == 1
    at = {
        (stage, action): tick
        for stage, stage_actions in enumerate(order)
        for tick, action in enumerate(stage_actions)
        if action
    }
    assert len(at) == 2 * stages * micro_batches
    for (stage, action), tick in at.items():
        if action.is_forward and stage:
            assert at[stage - 1, action] < tick
        if not action.is_forward:
            source = (stage, Action(True, action.micro_batch)) if stage == stages - 1 else (stage + 1, action)
            assert at[source] < tick


@given(STAGES, MICRO_BATCHES)
def test_a_stage_keeps_at_most_as_many_micro_batches_as_follow(stages: int, micro_batches: int) -> None:
    order = build_ticks(stages, micro_batches)
    assert len(order[0]) == (2 * (micro_batches + stages - 1) if micro_batches else 0)
    for stage, actions in enumerate(order):
        num_in_flight = max_in_flight = 0
        for action in filter(None, actions):
            num_in_flight += 1 if action.is_forward else -1
            max_in_flight = max(max_in_flight, num_in_flight)
        assert num_in_flight == 0 and max_in_flight == min(stages - stage, micro_batches)


class Call(NamedTuple):
    """A message of `size` rows, sent or received."""

    is_send: bool
    peer: int
    forward: bool
    size: int


class Recorder:
    """The `Ranks` of one stage: records calls in place of messages."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.degrees, self.device = stage, SimpleNamespace(pipeline=stages), "cpu"
        self.calls: list[Call] = []

    def receive(self, x: Tensor, *, forward: bool) -> Tensor:
        self.calls.append(Call(False, self.stage + (-1 if forward else 1), forward, len(x)))
        return x

    def send(self, x: Tensor, *, forward: bool) -> mock.Mock:
        self.calls.append(Call(True, self.stage + (1 if forward else -1), forward, len(x)))
        return mock.Mock()

    def finish(self, handle: mock.Mock) -> None:
        pass


@torch.no_grad()
def calls_of(stage: int, stages: int, batches: list[StageRows]) -> list[Call]:
    ranks: Any = Recorder(stage, stages)
    layers = [nn.Identity() for _ in range(stages)]
    pipeline_stage = Stage(layers, range(stage, stage + 1), ranks, [_Boundary(torch.float32, 1, None)] * stages)

    def forward(index: int) -> Tensor:
        rows_1TD = torch.zeros(1, batches[index].num_rows, 1)
        return pipeline_stage.run(
            lambda: reduce(lambda x, layer: layer(x), layers, rows_1TD)[0], rows_1TD.shape[1], is_probe=False
        )

    run_to_end(Schedule(pipeline_stage, batches, forward, lambda _, hidden_TD: hidden_TD).run())
    return ranks.calls


def pairs(programs: list[list[Call]], first: int, directions: tuple[bool, ...]) -> list[tuple[Call, Call]]:
    """What meets on a communicator of a stage and the next, which runs either side's operations one after the other."""
    calls, peer_calls = (
        [c for c in programs[stage] if c.peer == peer and c.forward in directions]
        for stage, peer in ((first, first + 1), (first + 1, first))
    )
    return list(zip(calls, peer_calls, strict=True))


@given(st.integers(2, 5), st.lists(st.builds(StageRows, st.integers(0, 3), st.booleans()), max_size=9))
def test_messages_meet_on_a_communicator_for_each_direction(stages: int, batches: list[StageRows]) -> None:
    programs = [calls_of(stage, stages, batches) for stage in range(stages)]
    for first in range(stages - 1):
        for direction in (True, False):
            for call, peer_call in pairs(programs, first, (direction,)):
                assert call.is_send != peer_call.is_send and call.size == peer_call.size


def test_messages_would_not_meet_on_one_communicator_for_both_directions() -> None:
    programs = [calls_of(stage, 2, [StageRows(2, True)] * 4) for stage in range(2)]
    assert any(call.is_send == peer_call.is_send for call, peer_call in pairs(programs, 0, (True, False)))
