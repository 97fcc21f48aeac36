"""The order of a pipeline's actions: torch's own for 1F1B, and one that no stage deadlocks in, by NCCL's rules."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from tinsmith.backends.distributed.pipeline_parallel import (
    Action,
    Schedule,
    Stage,
    StageRows,
    _Boundary,
    order_1f1b,
    ticks,
)

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


class Call(NamedTuple):
    """What a rank's host does: send and receive (tensors of `size` rows), finish a send, or pause with all others."""

    kind: str
    peer: int = -1
    forward: bool = True
    size: int = 0


class Recorder:
    """The `Ranks` of one stage: records calls, and sends nothing."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.degrees, self.device = stage, SimpleNamespace(pipeline=stages), torch.device("cpu")
        self.calls: list[Call] = []

    def send(self, x: Tensor, *, forward: bool) -> Any:  # noqa: ANN401 - as torch's work
        self.calls.append(Call("send", self.stage + (1 if forward else -1), forward, len(x)))
        return SimpleNamespace(is_completed=lambda: False, call=self.calls[-1])

    def receive(self, x: Tensor, *, forward: bool) -> Tensor:
        self.calls.append(Call("receive", self.stage + (-1 if forward else 1), forward, len(x)))
        return x.zero_()

    def finish(self, work: Any) -> None:  # noqa: ANN401
        self.calls.append(work.call._replace(kind="finish"))


class Layer(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * 2.0


def calls_of(stage: int, stages: int, batches: Sequence[StageRows]) -> list[Call]:
    """What a stage does in a step."""
    ranks, layers = Recorder(stage, stages), [Layer() for _ in range(stages)]
    boundaries = [_Boundary(torch.float32, 1, None)] * stages
    own = Stage(layers, range(stage, stage + 1), ranks, boundaries)  # pyright: ignore[reportArgumentType]

    def through(num_rows: int) -> Tensor:
        rows_1TD = torch.zeros(1, num_rows, 1, requires_grad=True)
        for layer in layers:
            rows_1TD = layer(rows_1TD)
        return rows_1TD[0]

    def forward(number: int) -> Tensor:
        rows, train = batches[number]
        with torch.set_grad_enabled(train):
            return own.run(lambda: through(rows), rows, alone=False)

    def head(number: int, hidden_TD: Tensor) -> Tensor:
        return torch.ones_like(hidden_TD)

    for _ in Schedule(own, batches, forward, head).run():
        ranks.calls.append(Call("pause"))
    return ranks.calls


def finishes(programs: Sequence[Sequence[Call]], *, communicators: str) -> bool:
    """Whether all ranks come to their ends. Two ranks share a communicator for each direction, or one for both. Its
    operations run one after the other on either side, and each needs the other side's: a send a receive of as many
    rows. Its creation, at the first operation, blocks the host until the other host arrives. More strictly than on a
    GPU, hosts also wait for what they receive.
    """
    at, left = [0] * len(programs), defaultdict(deque)
    started: defaultdict[tuple[Any, int], int] = defaultdict(int)
    ended: defaultdict[tuple[Any, int], int] = defaultdict(int)
    numbers: list[dict[int, int]] = [{} for _ in programs]  # by call, its place on its communicator

    def key_of(rank: int, call: Call) -> Any:  # noqa: ANN401
        pair = frozenset((rank, call.peer))
        return (pair, call.forward) if communicators == "for each direction" else pair

    def advance(rank: int) -> bool:
        if at[rank] == len(programs[rank]):
            return False
        call = programs[rank][at[rank]]
        if call.kind == "pause":
            return False
        mine, theirs = (key_of(rank, call), rank), (key_of(rank, call), call.peer)
        if call.kind == "finish":
            place = next(i for i, each in enumerate(sends[rank, mine[0]]) if each is not None)
            if ended[mine] <= sends[rank, mine[0]][place]:
                return False
            sends[rank, mine[0]][place] = None
        else:
            if at[rank] not in numbers[rank]:
                numbers[rank][at[rank]] = started[mine]
                started[mine] += 1
                left[mine].append(call)
                if call.kind == "send":
                    sends[rank, mine[0]].append(numbers[rank][at[rank]])
            if not started[theirs]:
                return False
            while left[mine] and left[theirs]:
                ours, other = left[mine][0], left[theirs][0]
                if {ours.kind, other.kind} != {"send", "receive"}:
                    return False
                assert ours.size == other.size and ours.forward == other.forward
                for side in (mine, theirs):
                    left[side].popleft()
                    ended[side] += 1
            if call.kind == "receive" and ended[mine] <= numbers[rank][at[rank]]:
                return False
        at[rank] += 1
        return True

    sends: defaultdict[tuple[int, Any], list[int | None]] = defaultdict(list)
    while True:
        if any(advance(rank) for rank in range(len(programs))):
            continue
        here = [program[place] if place < len(program) else None for program, place in zip(programs, at, strict=True)]
        if not all(call is not None and call.kind == "pause" for call in here):
            return all(call is None for call in here) and not any(left.values())
        at = [place + 1 for place in at]


BATCHES = st.lists(st.builds(StageRows, st.integers(0, 3), st.booleans()), max_size=9)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 5), BATCHES)
def test_messages_match_on_a_communicator_for_each_direction(stages: int, batches: list[StageRows]) -> None:
    programs = [calls_of(stage, stages, batches) for stage in range(stages)]
    assert finishes(programs, communicators="for each direction")


def test_one_communicator_for_both_directions_would_deadlock() -> None:
    programs = [calls_of(stage, 2, [StageRows(2, True)] * 4) for stage in range(2)]
    assert finishes(programs, communicators="for each direction")
    assert not finishes(programs, communicators="for both")
