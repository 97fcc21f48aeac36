"""Cancellation: a cancelled sample leaves its queue or the batch; all others continue."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
import tinker
from tinker import types

from support.engine_bench import BASE, Bench
from support.http_harness import BOB, Harness, sample_request
from support.live import LiveServer, freeze
from support.pending_requests import incoming
from support.raw_client import connect, engine_of
from tinsmith.cluster.engines import Engines, Seat
from tinsmith.db.database import Database, now
from tinsmith.db.schema import BODIES, FUTURES, RESULTS, SESSIONS
from tinsmith.errors import NotFoundError
from tinsmith.store.sampling_sessions import NewSamplingSession

SAMPLER = "s:sample:0"
IN_SAMPLER = 8
REASON = "cancelled by the client"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="tn-") as sockets:  # a socket's path must be short
        monkeypatch.setattr("tinsmith.engine.sampling.MAX_IN_SAMPLER", IN_SAMPLER)
        new_bench = Bench(tmp_path, Path(sockets))
        new_bench.samplers.create(NewSamplingSession(SAMPLER, "s", "alice", BASE))
        yield new_bench
        new_bench.close()


def rows(db: Database, table: sa.Table) -> list[str]:
    with db.read() as connection:
        return list(connection.scalars(sa.select(table.c.request_id)))


def is_cancelled(bench: Bench, request_id: str) -> bool:
    outcome = bench.outcome(request_id)
    return outcome is not None and (outcome.error, outcome.category) == (REASON, "user")


# The engine.


def test_a_waiting_and_a_running_sample_are_given_up_and_the_others_are_drawn(bench: Bench) -> None:
    ids = [bench.sample(SAMPLER, seq_id) for seq_id in range(IN_SAMPLER + 20)]
    bench.engine.run_once(0.0)
    running, waiting = ids[6], ids[-1]
    for request_id in (running, waiting):
        bench.futures.cancel("alice", request_id, REASON)
    bench.run_until_idle(2 * len(ids))
    assert is_cancelled(bench, running) and is_cancelled(bench, waiting)
    outcomes = [bench.outcome(request_id) for request_id in ids if request_id not in (running, waiting)]
    assert all(outcome is not None and outcome.error is None for outcome in outcomes)
    assert sorted(rows(bench.db, FUTURES)) == sorted(ids), "nothing remains of the requests to cancel"
    assert rows(bench.db, BODIES) == [], "nothing remains of the cancelled either"


def test_a_cancel_is_idempotent_and_harmless_afterwards(bench: Bench) -> None:
    finished, between, pending = (bench.sample(SAMPLER, seq_id) for seq_id in range(3))
    for _ in range(2):
        bench.engine.run_once(0.0)
    assert bench.outcome(finished) is not None
    for _ in range(3):
        bench.futures.cancel("alice", finished, REASON)
        bench.futures.cancel("alice", pending, REASON)
    bench.run_until_idle()
    bench.futures.cancel("alice", pending, REASON)
    bench.run_until_idle()
    outcome = bench.outcome(finished)
    assert outcome is not None and outcome.error is None
    assert is_cancelled(bench, pending)
    assert sorted(rows(bench.db, FUTURES)) == [finished, between, pending]


def test_a_sample_that_ends_before_its_cancel_is_read_keeps_its_result(bench: Bench) -> None:
    request_id = bench.sample(SAMPLER, 0)
    bench.engine.run_once(0.0)
    assert bench.outcome(request_id) is None, "the engine has just read it"
    bench.server_mailbox.close()
    bench.futures._wake = None
    bench.futures.cancel("alice", request_id, REASON)
    bench.engine.run_once(0.0)
    outcome = bench.outcome(request_id)
    assert outcome is not None and outcome.error is None
    bench.engine._next_check = 0.0
    bench.run_until_idle()
    assert rows(bench.db, FUTURES) == [request_id]


def test_a_cancel_outlives_the_engine(bench: Bench) -> None:
    uncancelled, given_up = bench.sample(SAMPLER, 0), bench.sample(SAMPLER, 1)
    bench.futures.cancel("alice", given_up, REASON)
    bench.restart()
    bench.run_until_idle()
    assert is_cancelled(bench, given_up) and not is_cancelled(bench, uncancelled)


def test_operations_on_models_are_not_cancelled(bench: Bench) -> None:
    model = bench.model()
    request_id = bench.step(model, 2)
    bench.futures.cancel("alice", request_id, REASON)
    bench.run_until_idle()
    assert bench.outcome(request_id) is None
    bench.forward(model, 1)
    bench.run_until_idle()
    assert bench.optimizer_step(request_id) == 1


def test_only_its_owner_cancels_a_sample(bench: Bench) -> None:
    request_id = bench.sample(SAMPLER, 0)
    for tenant_id, name in (("bob", request_id), ("alice", "s:sample:0:99")):
        with pytest.raises(NotFoundError, match=name):
            bench.futures.cancel(tenant_id, name, REASON)
    bench.run_until_idle()
    outcome = bench.outcome(request_id)
    assert outcome is not None and outcome.error is None


def test_samples_of_a_closed_session_are_given_up_and_those_of_others_are_not(bench: Bench) -> None:
    now_s = now()
    session_columns = {"tenant_id": "alice", "tags": [], "created_at": now_s, "last_heartbeat_at": now_s}
    end_columns = {"state": "expired", "reason": "no heartbeat for 5 s", "closed_at": now_s}
    with bench.db.write() as connection:
        connection.execute(SESSIONS.insert(), {"session_id": "s", **session_columns, **end_columns})
        connection.execute(SESSIONS.insert().values(session_id="t", state="active", **session_columns))
    Engines(bench.db, "here").take(Seat(BASE), 60)
    bench.samplers.create(NewSamplingSession("t:sample:0", "t", "alice", BASE))
    ids = [bench.sample(SAMPLER, seq_id) for seq_id in range(IN_SAMPLER + 5)]
    other = bench.sample("t:sample:0", 0)
    bench.engine.run_once(0.0)
    assert bench.futures.cancel_of_closed_sessions() == 1
    bench.run_until_idle()
    outcomes = [bench.outcome(request_id) for request_id in ids]
    errors = {outcome.error for outcome in outcomes if outcome is not None}
    assert "its session ended (no heartbeat for 5 s)" in errors and None not in outcomes
    outcome = bench.outcome(other)
    assert outcome is not None and outcome.error is None
    assert bench.futures.cancel_of_closed_sessions() == 0
    late = bench.sample(SAMPLER, 9999)  # it was admitted while the session ended
    assert bench.futures.cancel_of_closed_sessions() == 1
    bench.run_until_idle()
    outcome = bench.outcome(late)
    assert outcome is not None and outcome.error is not None


def test_a_queue_of_ten_thousand_is_emptied_from_its_front_and_middle_in_no_time(bench: Bench) -> None:
    bench.sample(SAMPLER, 0)
    (request,) = incoming(bench.db, BASE)
    queues = bench.engine._queues
    names = [f"{SAMPLER}:{seq_id}" for seq_id in range(20_000)]
    for name in names:
        queues.add_sample(replace(request, request_id=name))
    started = time.process_time()
    for name in reversed(names[10_000:]):
        assert queues.withdraw_samples("alice", name) == [name]
    while queues.samples:
        front = next(iter(queues.waiting_samples()["alice"]))
        queues.take_samples([front])
    assert time.process_time() - started < 1.0


# The route.


def test_a_cancel_wakes_the_engine_once_for_a_pending_sample(harness: Harness) -> None:
    request_id = harness.ok("asample", sample_request(harness.sampler()))["request_id"]
    harness.woken.clear()
    for _ in range(2):
        assert harness.ok("cancel_future", {"request_id": request_id}) == {}
    assert harness.kinds() == {request_id: "sample", f"{request_id}:cancel": "cancel"}
    assert harness.read_request_body(f"{request_id}:cancel") == REASON.encode()
    assert harness.woken


def test_a_cancel_of_anything_else_is_answered_without_an_effect(harness: Harness) -> None:
    step = harness.ok("optim_step", {"model_id": harness.model(), "seq_id": 1, "adam_params": {}})["request_id"]
    sampler = harness.sampler()
    finished = harness.ok("asample", sample_request(sampler))["request_id"]
    harness.settle(finished)
    refused = harness.ok("asample", sample_request(sampler, 1, num_samples=0))["request_id"]
    for request_id in (step, finished, refused):
        assert harness.ok("cancel_future", {"request_id": request_id}) == {}
    assert harness.kinds() == {step: "optim_step"}


def test_cancelling_a_foreign_request_is_404_and_without_an_id_400(harness: Harness) -> None:
    request_id = harness.ok("asample", sample_request(harness.sampler()))["request_id"]
    assert harness.post("cancel_future", {"request_id": request_id}, BOB).status_code == 404
    assert harness.post("cancel_future", {"request_id": "nothing"}).status_code == 404
    assert harness.post("cancel_future", {}).status_code == 400
    assert harness.kinds() == {request_id: "sample"}


# The SDK.


def error_of(server: LiveServer, request_id: str) -> str:
    client = connect(server)
    try:
        return client.error(request_id)
    finally:
        client.http.close()


@pytest.mark.extended
@pytest.mark.covers("POST /cancel_future")
def test_the_sdk_gives_up_a_long_sample_and_the_engine_stops_drawing_it(
    nano_server: LiveServer, nano_service: tinker.ServiceClient
) -> None:
    sampler = nano_service.create_sampling_client(base_model="tinsmith/nano").result()
    prompt = types.ModelInput.from_ints([1, 2, 3])
    endless = types.SamplingParams(max_tokens=400, stop=[])

    async def impatient() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(sampler.sample(prompt, 1000, endless).result_async(), 1.0)

    asyncio.run(impatient())
    request_id = f"{sampler._sampling_session_id}:0"
    assert error_of(nano_server, request_id) == REASON
    engine = engine_of(nano_server)
    time.sleep(0.3)
    before = processor_seconds(engine)
    time.sleep(1.0)
    assert processor_seconds(engine) - before < 0.5, "the engine has nothing left to do"
    answer = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result(timeout=30)
    assert len(answer.sequences) == 1


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_cancel_that_comes_while_the_engine_is_down_takes_effect_when_it_is_back(fake_server: LiveServer) -> None:
    client = connect(fake_server)
    sampler = client.sampler()
    engine = engine_of(fake_server)
    freeze(engine, fake_server.data_dir)
    body = {**sample_request(sampler), "sampling_params": {"max_tokens": 3}}
    request_id = client.ok("asample", body)["request_id"]
    client.ok("cancel_future", {"request_id": request_id})
    os.kill(engine, signal.SIGKILL)
    assert client.error(request_id) == REASON
    client.http.close()


def test_nothing_is_stored_of_a_cancelled_sample(bench: Bench) -> None:
    bench.futures.cancel("alice", bench.sample(SAMPLER, 0), REASON)
    bench.run_until_idle()
    assert rows(bench.db, RESULTS) == rows(bench.db, BODIES) == []
