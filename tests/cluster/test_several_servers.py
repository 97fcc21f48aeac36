"""Two servers with one engine each share a Postgres and a storage. Both give the same answers, and either may die."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import tinker
from tinker import types

from support.balancer import run_balancer
from support.databases import POSTGRES, bare_url
from support.live import API_KEY, LiveServer, serving
from support.postgres import PostgresServer
from support.raw_client import RawClient, connect, engine_of, is_alive, wait_until_gone
from tinsmith.cluster.engines import EngineRow, Engines, holder_of
from tinsmith.db.factory import open_database
from tinsmith.db.wakeups import SAFETY_POLL_S
from tinsmith.store.models import Models

BASE = "tinsmith/nano"
LEASE_S = 2.0


@pytest.fixture
def url(tmp_path: Path) -> str:
    return bare_url(tmp_path, POSTGRES)


@contextlib.contextmanager
def one_of(tmp_path: Path, url: str, name: str) -> Iterator[LiveServer]:
    settings = {
        "DATABASE_URL": url,
        "STORAGE_DIR": str(tmp_path / "storage"),
        "ENGINE_LEASE_S": str(LEASE_S),
        "HOLD_S": "2",
    }
    with serving(tmp_path / name, "--backend", "fake", settings=settings) as server:
        yield server


@pytest.fixture
def servers(tmp_path: Path, url: str) -> Iterator[tuple[LiveServer, LiveServer]]:
    with one_of(tmp_path, url, "one") as first:
        engine_of(first)
        with one_of(tmp_path, url, "two") as second:
            deadline = time.monotonic() + 60
            while not both_ready(url):
                assert time.monotonic() < deadline, "an engine is not ready"
                time.sleep(0.05)
            yield first, second


@pytest.fixture
def clients(servers: tuple[LiveServer, LiveServer]) -> Iterator[tuple[RawClient, RawClient]]:
    first, second = (connect(server) for server in servers)
    yield first, second
    first.http.close()
    second.http.close()


def owner(url: str, model_id: str) -> EngineRow:
    """The seat of the engine that owns a run."""
    db = open_database(url)
    model = Models(db).find(model_id)
    rows = {row.engine_id: row for row in Engines(db, "").of_base(BASE)}
    db.close()
    assert model is not None and model.engine_id is not None
    return rows[model.engine_id]


def both_ready(url: str) -> bool:
    db = open_database(url)
    rows = Engines(db, "").of_base(BASE)
    db.close()
    return [row.state for row in rows] == ["ready"] * 2


def test_any_server_takes_any_request_and_answers_any_poll_at_once(
    servers: tuple[LiveServer, LiveServer], clients: tuple[RawClient, RawClient]
) -> None:
    first, second = clients
    model = first.model()
    took: list[float] = []
    for seq_id in range(1, 21):
        submit, poll = (first, second) if seq_id % 2 else (second, first)
        started = time.monotonic()
        assert poll.steps_taken(submit.step(model, seq_id)) == seq_id
        took.append(time.monotonic() - started)
    assert sorted(took)[len(took) // 2] < SAFETY_POLL_S / 2, "wake-ups reach both; without them each takes a second"
    session_id = model.split(":")[0]
    assert second.ok("session_heartbeat", {"session_id": session_id}) == {"type": "session_heartbeat"}
    assert second.http.get(f"sessions/{session_id}").json()["training_run_ids"] == [model]
    assert second.ok("get_info", {"model_id": model})["model_id"] == model


def test_a_run_through_one_address_survives_the_death_of_a_server(
    tmp_path: Path, url: str, servers: tuple[LiveServer, LiveServer]
) -> None:
    first, _ = servers
    adam = types.AdamParams(learning_rate=0.1)
    ports = [port for server in servers if (port := urlsplit(server.url).port)]
    with run_balancer(ports) as balancer:
        with tinker.ServiceClient(base_url=balancer.url, api_key=API_KEY) as service:
            model = service.create_lora_training_client(BASE, rank=4).result()
            for _ in range(3):
                model.optim_step(adam).result()
            path = model.save_state("kept").result().path
            model.optim_step(adam).result()
            os.kill(first.process.pid, signal.SIGKILL)
            first.process.wait()
            assert model.optim_step(adam).result().metrics["step"] == 5, "nothing that was acknowledged is lost"
            resumed = service.create_training_client_from_state_with_optimizer(path).result()
            assert resumed.optim_step(adam).result().metrics["step"] == 4
        assert min(balancer.connection_counts.values()) > 0, "both servers were asked"
        assert owner(url, resumed.model_id).holder.endswith(str(tmp_path / "two"))


def test_an_engine_that_was_paused_while_another_took_over_writes_nothing(
    tmp_path: Path, url: str, servers: tuple[LiveServer, LiveServer], clients: tuple[RawClient, RawClient]
) -> None:
    first, second = clients
    model = first.model()
    assert first.steps_taken(first.step(model, 1)) == 1
    old = owner(url, model)
    os.kill(old.pid, signal.SIGSTOP)
    try:
        waiting = first.step(model, 2)
        assert second.steps_taken(waiting) == 2, "the other server's engine took over"
        assert owner(url, model).engine_id != old.engine_id
    finally:
        os.kill(old.pid, signal.SIGCONT)
    # The replaced engine finds new work, and its memory says that it still holds the lease.
    assert first.steps_taken(first.step(model, 3)) == 3
    assert wait_until_gone(old.pid)
    assert second.steps_taken(second.step(model, 4)) == 4
    (data_dir,) = (server.data_dir for server in servers if holder_of(server.data_dir) == old.holder)
    log = next((data_dir / "logs").glob("engine-*.log")).read_text()
    assert "this engine lost its lease" in log and "Traceback" not in log, log
    assert not is_alive(old.pid)


def test_a_restart_of_postgres_is_a_delay_and_no_loss(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tn-pg-") as directory:
        postgres = PostgresServer(Path(directory))
        try:
            with one_of(tmp_path, postgres.fresh(), "one") as server:
                client = connect(server)
                model = client.model()
                assert client.steps_taken(client.step(model, 1)) == 1
                engine = engine_of(server)
                postgres.stop()
                body = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
                refused = client.post("optim_step", body)
                assert (refused.status_code, "database" in refused.json()["detail"]) == (503, True)
                postgres.start()
                deadline = time.monotonic() + 10
                while client.post("optim_step", body).status_code == 503:  # as clients do, until it is tried again
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
                assert client.steps_taken(client.step(model, 2)) == 2
                assert engine_of(server) == engine, "an engine waits for its database"
                client.http.close()
        finally:
            postgres.stop()
