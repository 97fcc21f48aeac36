"""Paused sessions in an engine: their samples take no slot of others, neither at the engine nor in the sampler."""

from __future__ import annotations

import pytest

from support.engine_bench import BASE, Bench
from tinsmith.engine.sampling import MAX_IN_SAMPLER
from tinsmith.store.sampling_sessions import NewSamplingSession
from tinsmith.store.sessions import NewSession, Sessions


@pytest.fixture(autouse=True)
def open_sessions(bench: Bench) -> None:
    for name in ("paused", "other"):
        Sessions(bench.db).open("alice", NewSession(), name)
        bench.samplers.create(NewSamplingSession(f"{name}:sample:0", name, "alice", BASE))


def run(bench: Bench) -> None:
    bench.engine._arrivals.fetch()
    bench.engine._next_check = 0.0
    bench.run_until_idle(400)


def num_answered(bench: Bench, samples: list[str]) -> int:
    return sum(bench.outcome(sample) is not None for sample in samples)


def test_samples_that_were_begun_wait_and_leave_all_slots_to_others(bench: Bench) -> None:
    paused = [bench.sample("paused:sample:0", index) for index in range(MAX_IN_SAMPLER + 20)]
    bench.engine._arrivals.fetch()
    bench.engine._sampling._admit(bench.engine._queues)
    Sessions(bench.db).pause_sampling("alice", "paused")
    bench.engine._sampling.update_sessions(bench.engine._queues, 0.0)
    others = [bench.sample("other:sample:0", index) for index in range(3)]
    run(bench)
    assert num_answered(bench, others) == 3
    assert num_answered(bench, paused) == 0
    bench.engine.run_once(0.0)
    sampling, queues = bench.engine._sampling, bench.engine._queues
    assert queues.samples and not sampling.has_work and not sampling.has_waiting(queues), "a pause is no work"
    Sessions(bench.db).continue_sampling("alice", "paused")
    run(bench)
    assert num_answered(bench, paused) == len(paused)


def test_no_sample_of_a_session_that_is_paused_already_begins(bench: Bench) -> None:
    Sessions(bench.db).pause_sampling("alice", "paused")
    paused, other = bench.sample("paused:sample:0"), bench.sample("other:sample:0")
    bench.engine._next_check = float("inf")  # between two updates
    bench.engine._arrivals.fetch()
    bench.run_until_idle()
    assert num_answered(bench, [other]) == 1 and num_answered(bench, [paused]) == 0
    bench.restart()
    run(bench)
    assert num_answered(bench, [paused]) == 0, "a new engine knows, too"
    Sessions(bench.db).continue_sampling("alice", "paused")
    run(bench)
    assert num_answered(bench, [paused]) == 1
