"""Samples of a session without heartbeats release their slots, and are dropped only if the session expires."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
import tinker
from tinker import types

from support.engine_bench import BASE, Bench
from support.http_harness import Harness, sample_request
from support.live import API_KEY, serving
from tinsmith.db.database import now
from tinsmith.db.schema import SESSIONS
from tinsmith.store.sampling_sessions import NewSamplingSession
from tinsmith.store.sessions import POLL_SIGN_S

PLACES = 8
LONG_AGO_S = 100.0


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="tn-") as sockets:  # a socket's path must be short
        monkeypatch.setattr("tinsmith.engine.sampling.MAX_IN_SAMPLER", PLACES)
        new_bench = Bench(tmp_path, Path(sockets))
        for session in ("gone", "here"):
            new_bench.samplers.create(NewSamplingSession(f"{session}:sample:0", session, "alice", BASE))
            row = {"session_id": session, "tenant_id": "alice", "state": "active", "tags": [], "created_at": now()}
            with new_bench.db.write() as connection:
                connection.execute(SESSIONS.insert(), {**row, "last_heartbeat_at": now()})
        # One decode step in each turn finishes no sample, so that slots stay occupied for as long as a test needs.
        new_bench.backend.sampler.step = lambda scopes=None: []  # type: ignore[method-assign]
        yield new_bench
        new_bench.close()


def heard(bench: Bench, session: str, ago_s: float = 0.0) -> None:
    with bench.db.write() as connection:
        update = SESSIONS.update().where(SESSIONS.c.session_id == session)
        connection.execute(update.values(last_heartbeat_at=now() - ago_s))


def samples(bench: Bench, session: str, count: int) -> list[str]:
    return [bench.sample(f"{session}:sample:0", seq_id) for seq_id in range(count)]


def look(bench: Bench) -> None:
    for _ in range(2):  # arrivals are read at the end of a turn
        bench.engine.run_once(0.0)
    bench.engine._next_check = 0.0
    bench.engine.run_once(0.0)
    bench.engine.run_once(0.0)


def inside(bench: Bench) -> set[str]:
    return set(bench.engine._sampling._running)


def draw(bench: Bench) -> None:
    """Let decode steps finish samples."""
    del bench.backend.sampler.step  # type: ignore[attr-defined]


def test_samples_of_an_absent_session_give_their_places_to_others_that_wait(bench: Bench) -> None:
    absent_ids = samples(bench, "gone", 3 * PLACES)
    look(bench)
    assert inside(bench) == set(absent_ids[:PLACES])
    heard(bench, "gone", LONG_AGO_S)
    present_ids = samples(bench, "here", 4)
    look(bench)
    assert inside(bench) == set(present_ids)
    draw(bench)
    while any(bench.outcome(request_id) is None for request_id in present_ids):
        bench.engine.run_once(0.0)
    assert all(bench.outcome(request_id) is None for request_id in absent_ids)


def test_places_that_no_other_wants_stay_with_an_absent_session(bench: Bench) -> None:
    absent_ids = samples(bench, "gone", PLACES + 2)
    look(bench)
    heard(bench, "gone", LONG_AGO_S)
    look(bench)
    assert inside(bench) == set(absent_ids[:PLACES])
    draw(bench)
    bench.run_until_idle(60)
    assert all(bench.outcome(request_id) is not None for request_id in absent_ids)


def test_a_sample_beside_free_places_does_not_drive_out_an_absent_session(bench: Bench) -> None:
    absent_ids = samples(bench, "gone", 2)
    look(bench)
    heard(bench, "gone", LONG_AGO_S)
    present_ids = samples(bench, "here", 2)
    look(bench)
    assert inside(bench) == {*absent_ids, *present_ids}


@pytest.mark.parametrize("ago_s", [0.0, 30.0])
def test_a_session_that_is_heard_of_keeps_its_places(bench: Bench, ago_s: float) -> None:
    absent_ids = samples(bench, "gone", PLACES)
    look(bench)
    heard(bench, "gone", ago_s)
    samples(bench, "here", 4)
    look(bench)
    assert inside(bench) == set(absent_ids)


def test_a_client_that_comes_back_gets_all_of_its_results(bench: Bench) -> None:
    absent_ids = samples(bench, "gone", PLACES)
    look(bench)
    heard(bench, "gone", LONG_AGO_S)
    present_ids = samples(bench, "here", PLACES)
    look(bench)
    assert inside(bench) == set(present_ids)
    heard(bench, "gone")
    look(bench)
    draw(bench)
    bench.run_until_idle(60)
    for request_id in (*absent_ids, *present_ids):
        outcome = bench.outcome(request_id)
        assert outcome is not None and outcome.error is None


def test_samples_that_made_way_are_drawn_when_nothing_else_is_left(bench: Bench) -> None:
    absent_ids = samples(bench, "gone", PLACES)
    look(bench)
    heard(bench, "gone", LONG_AGO_S)
    present_ids = samples(bench, "here", PLACES)
    look(bench)
    draw(bench)
    bench.run_until_idle(60)
    assert all(bench.outcome(request_id) is not None for request_id in (*present_ids, *absent_ids))


def test_a_sample_that_made_way_can_be_cancelled(bench: Bench) -> None:
    absent_ids = samples(bench, "gone", PLACES)
    look(bench)
    heard(bench, "gone", LONG_AGO_S)
    samples(bench, "here", PLACES)
    look(bench)
    bench.futures.cancel("alice", absent_ids[0], "cancelled by the client")
    look(bench)
    assert bench.error(absent_ids[0]) == "cancelled by the client"


def test_without_a_limit_an_absent_session_keeps_its_places(bench: Bench) -> None:
    bench.engine._settings = bench.settings.model_copy(update={"absent_after_s": 0.0})
    absent_ids = samples(bench, "gone", PLACES)
    look(bench)
    heard(bench, "gone", LONG_AGO_S)
    samples(bench, "here", 4)
    look(bench)
    assert inside(bench) == set(absent_ids)


# The routes.


@pytest.mark.parametrize("path", ["retrieve_future", "retrieve_futures"])
def test_a_poll_is_a_sign_of_life(harness: Harness, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = harness.sampler()
    session = sampler.partition(":")[0]
    request_id = harness.ok("asample", sample_request(sampler))["request_id"]
    harness.settle(request_id)
    is_session = SESSIONS.c.session_id == session
    body: dict[str, object] = {"request_id": request_id}
    if path == "retrieve_futures":
        body = {"target": {"type": "sampling_session", "sampling_session_id": sampler}, "timeout": 0}

    def heard_at() -> float:
        with harness.services.models._db.read() as connection:
            return connection.scalar(sa.select(SESSIONS.c.last_heartbeat_at).where(is_session)) or 0.0

    def age(by_s: float) -> float:
        with harness.services.models._db.write() as connection:
            connection.execute(SESSIONS.update().where(is_session).values(last_heartbeat_at=now() - by_s))
        return heard_at()

    recent = age(POLL_SIGN_S / 2)
    harness.ok(path, body)
    assert heard_at() == recent, "a heartbeat is newer than that"
    before = age(10 * POLL_SIGN_S)
    harness.ok(path, body)
    assert heard_at() == before, "it was looked at a moment ago"
    monkeypatch.setattr(harness.services.sessions, "_polled_at", {})
    harness.ok(path, body)
    assert heard_at() > before + 9 * POLL_SIGN_S


# A client that is killed.

CLIENT = """
import sys, tinker
from tinker import types
service = tinker.ServiceClient(base_url=sys.argv[1])
sampler = service.create_sampling_client(base_model="tinsmith/nano").result()
params = types.SamplingParams(max_tokens=1500, stop=[])
futures = [sampler.sample(types.ModelInput.from_ints([1, 2, 3]), 1, params) for _ in range(300)]
print(sampler._sampling_session_id, flush=True)
futures[0].result()
"""


@pytest.mark.slow
def test_a_killed_clients_samples_do_not_hold_up_its_successor(tmp_path: Path) -> None:
    with serving(tmp_path, settings={"ABSENT_AFTER_S": "3"}) as server:
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, server.url],
            stdout=subprocess.PIPE,
            env={**os.environ, "TINKER_API_KEY": API_KEY, "TINKER_TELEMETRY": "0"},
        )
        try:
            assert client.stdout is not None
            client.stdout.readline()
            theirs = "futures WHERE kind = 'sample' AND state = 'pending'"
            deadline = time.monotonic() + 60
            while server.count(theirs) < 290 and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            client.send_signal(signal.SIGKILL)
            client.wait()
        time.sleep(3.5)
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            sampler = service.create_sampling_client(base_model="tinsmith/nano").result()
            prompt = types.ModelInput.from_ints([4, 5, 6])
            answer = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=8, stop=[])).result(timeout=120)
        assert len(answer.sequences[0].tokens) == 8
        assert server.count(theirs) > 200, "the successor did not wait for them"
