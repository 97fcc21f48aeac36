"""A primary that vanishes without a word: every wait for it ends, and everything resumes when it answers again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from support import postgres
from support.black_hole import BlackHole, black_hole
from support.databases import POSTGRES, fresh_url
from support.live import API_KEY, serving
from support.raw_client import RawClient
from tinsmith.cluster.engines import Engines, Renewal, Seat
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database
from tinsmith.db.pg_notify import STREAM_S, PostgresMailbox
from tinsmith.db.postgres import (
    ENGINE_CONNECTIONS,
    GRACE_S,
    LEASE_CONNECTIONS,
    PostgresTimeouts,
    connection_parameters,
    long_statements,
)
from tinsmith.server.process import pool_size
from tinsmith.settings import Settings

TIMEOUTS = PostgresTimeouts(connect_s=2, statement_s=1.0)
LONGEST_S = TIMEOUTS.statement_s + GRACE_S + TIMEOUTS.connect_s
SLACK_S = 4.0  # of a busy machine


@pytest.fixture
def hole() -> Iterator[BlackHole]:
    with black_hole(postgres.shared_server()._directory) as new_hole:
        yield new_hole


@pytest.fixture
def url(hole: BlackHole, tmp_path: Path) -> str:
    """A migrated database, through the proxy."""
    name = fresh_url(tmp_path, POSTGRES).partition("/?")[0].partition("?")[0].rpartition("/")[2]
    return f"postgresql://postgres@127.0.0.1:{hole.port}/{name}"


@pytest.fixture
def db(url: str) -> Iterator[Database]:
    new_database = open_database(url, timeouts=TIMEOUTS)
    yield new_database
    new_database.close()


def seconds(action: Callable[[], object]) -> tuple[float, BaseException | None]:
    """How long an action takes, and its error."""
    began = time.monotonic()
    try:
        action()
    except OperationalError as error:
        return time.monotonic() - began, error
    return time.monotonic() - began, None


def eventually(holds: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def answers(db: Database) -> bool:
    return seconds(lambda: db.scalar(sa.select(sa.literal(1))))[1] is None


def test_a_statement_and_all_that_wait_for_a_connection_end_in_time(hole: BlackHole, db: Database) -> None:
    assert answers(db)
    hole.swallow()
    query = sa.select(sa.literal(1))
    with ThreadPoolExecutor(16) as threads:
        for limit_s in (LONGEST_S, TIMEOUTS.connect_s):  # the first finds idle connections, later ones none
            ends = list(threads.map(lambda _: seconds(lambda: db.scalar(query)), range(64)))
            assert all(error is not None for _, error in ends)
            assert max(took_s for took_s, _ in ends) < limit_s + SLACK_S
        began = time.monotonic()
        list(threads.map(lambda _: seconds(lambda: db.scalar(query)), range(160)))
        assert time.monotonic() - began < 3 * TIMEOUTS.connect_s + SLACK_S, "one thread at a time tries to connect"
    hole.forward()
    eventually(lambda: answers(db))


def test_a_statement_that_runs_when_the_primary_vanishes_ends_in_time(hole: BlackHole, db: Database) -> None:
    def write() -> None:
        with db.write() as connection:
            hole.swallow()
            connection.execute(sa.text("SELECT 1"))

    took_s, error = seconds(write)
    assert error is not None and took_s < LONGEST_S + SLACK_S
    hole.forward()
    eventually(lambda: answers(db))


def test_postgres_ends_a_statement_that_takes_too_long(db: Database) -> None:
    sleep = sa.text("SELECT pg_sleep(30)")
    took_s, error = seconds(lambda: db.execute(sleep))
    assert "statement timeout" in str(error) and took_s < TIMEOUTS.statement_s + SLACK_S
    with long_statements(20.0):
        took_s, error = seconds(lambda: db.execute(sa.text("SELECT pg_sleep(3)")))
        assert error is None and took_s > TIMEOUTS.statement_s + GRACE_S
        with db.read() as connection:
            assert connection.scalar(sa.text("SHOW statement_timeout")) == "20s"
    with db.read() as connection:
        assert connection.scalar(sa.text("SHOW statement_timeout")) == "1s"


def test_wake_ups_arrive_again_after_the_listening_connection_was_swallowed(
    hole: BlackHole, url: str, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.db.pg_notify.QUIET_S", 0.5)
    mailbox = PostgresMailbox(url, "server", timeouts=TIMEOUTS)
    try:
        assert mailbox.wait(10) and mailbox.drain() == {""}
        hole.swallow()
        time.sleep(1.0)  # it is in the middle of a probe
        hole.forward()
        assert mailbox.wait(0.5 + LONGEST_S + SLACK_S) and mailbox.drain() == {""}, "missed ones may be anywhere"
        eventually(lambda: answers(db))
        with db.write() as connection:
            db.notify(connection, "server", ["a"])
        assert mailbox.wait(10) and mailbox.drain() == {"a"}
    finally:
        mailbox.close()


def test_token_streams_hardly_delay_an_engine_while_the_primary_is_lost(hole: BlackHole, url: str) -> None:
    mailbox = PostgresMailbox(url, "engine", timeouts=TIMEOUTS)
    try:
        mailbox.stream("server", ["+first"])
        hole.swallow()
        began = time.monotonic()
        for _ in range(100):
            mailbox.stream("server", ["+lost"])
        assert time.monotonic() - began < STREAM_S + GRACE_S + SLACK_S
        hole.forward()
        mailbox._streams_at = 0.0
        mailbox.stream("server", ["+later"])
        assert mailbox._sender is not None and not mailbox._sender.closed
    finally:
        mailbox.close()


def test_a_lease_is_renewed_again_and_lost_only_if_it_was_taken(hole: BlackHole, url: str, db: Database) -> None:
    direct = open_database(str(postgres.shared_server().url(url.rpartition("/")[2])))
    engines, seat = Engines(db, "here"), Seat("local/tiny")
    lost = threading.Event()
    lease = engines.take(seat, 1.5)
    renewal = Renewal(engines, lease, 1.5, lost.set)

    def expires_in() -> float:
        return float(
            direct.scalar(sa.text("SELECT lease_expires_at - extract(epoch FROM clock_timestamp()) FROM engines"))
        )

    try:
        eventually(lambda: expires_in() > 0)
        hole.swallow()
        eventually(lambda: expires_in() < 0)  # as designed: others may take its runs
        hole.forward()
        eventually(lambda: expires_in() > 0)
        assert not renewal.lost
        hole.swallow()
        Engines(direct, "here").take(seat, 60.0)
        hole.forward()
        assert lost.wait(20), "another process has begun a new epoch"
    finally:
        renewal.close()
        direct.close()


@pytest.mark.parametrize(
    "form",
    [
        "postgresql://postgres@127.0.0.1:1,127.0.0.1:{port}/{name}?target_session_attrs=read-write",
        "postgresql://postgres@/{name}?host=127.0.0.1:1&host=127.0.0.1:{port}&target_session_attrs=read-write",
        "postgres://postgres@/{name}?host=127.0.0.1,127.0.0.1&port=1,{port}",
    ],
    ids=["libpq", "sqlalchemy", "lists"],
)
def test_a_url_of_several_hosts_reaches_the_one_that_answers(form: str, hole: BlackHole, url: str) -> None:
    multi_host_url = form.format(port=hole.port, name=url.rpartition("/")[2])
    db = open_database(multi_host_url, timeouts=TIMEOUTS)
    mailbox = PostgresMailbox(multi_host_url, "server", timeouts=TIMEOUTS)
    try:
        assert db.scalar(sa.text("SELECT count(*) FROM futures")) == 0
        assert mailbox.wait(10) and mailbox.drain() == {""}
    finally:
        mailbox.close()
        db.close()


def test_parameters_of_the_url_override_the_defaults() -> None:
    plain = connection_parameters("postgresql://u@host/name", PostgresTimeouts(connect_s=7, statement_s=9.5))
    assert (plain["connect_timeout"], plain["tcp_user_timeout"], plain["keepalives"]) == (7, 10_500, 1)
    parameters = connection_parameters("postgresql://u@host/name?connect_timeout=33&keepalives_idle=60", TIMEOUTS)
    assert (parameters["connect_timeout"], parameters["keepalives_idle"]) == ("33", "60")


def test_a_server_answers_503_while_the_primary_is_lost_and_resumes_when_it_is_back(
    hole: BlackHole, url: str, tmp_path: Path
) -> None:
    settings = {
        "DATABASE_URL": url,
        "DATABASE_TIMEOUT_S": "2",
        "DATABASE_CONNECT_TIMEOUT_S": "2",
        "ENGINE_LEASE_S": "3",
    }
    limit_s = 2 + GRACE_S + 2 + SLACK_S
    with (
        serving(tmp_path / "data", "--backend", "fake", settings=settings) as server,
        httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": API_KEY}, timeout=60) as http,
    ):
        client = RawClient(http)
        model = client.model()
        client.result(client.step(model, 1))
        hole.swallow()
        with ThreadPoolExecutor(24) as threads:
            for _ in range(2):
                began = time.monotonic()
                answers = list(threads.map(lambda _: client.post("create_session", {"tags": []}), range(48)))
                assert time.monotonic() - began < 2 * limit_s
                assert {answer.status_code for answer in answers} == {503}
                assert {answer.headers["retry-after"] for answer in answers} == {"1"}
        assert http.get("healthz").status_code == 200, "the process itself is healthy"
        hole.forward()
        eventually(lambda: client.post("create_session", {"tags": []}).status_code == 200)
        assert client.steps_taken(client.step(model, 2)) == 2, "the same run goes on"
        sampler = client.sampler()
        assert sampler


def test_a_server_and_its_engine_use_no_more_connections_than_documented(tmp_path: Path) -> None:
    url = fresh_url(tmp_path, POSTGRES)
    server_limit, engine_limit = pool_size(Settings()) + 1, LEASE_CONNECTIONS + ENGINE_CONNECTIONS + 2
    page = (Path(__file__).parents[2] / "docs" / "howto" / "cluster.md").read_text()
    assert f"at most {server_limit} connections for each server" in page and f"{engine_limit} for each engine" in page
    threads_of_settings = Settings().handler_threads + 2 * Settings().transfer_threads
    assert f"{server_limit - threads_of_settings} plus `TINSMITH_HANDLER_THREADS`" in page
    direct = open_database(url, connections=1)
    count = sa.text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    counts: list[int] = []
    with (
        serving(tmp_path / "data", "--backend", "fake", settings={"DATABASE_URL": url}) as server,
        httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": API_KEY}, timeout=60) as http,
        ThreadPoolExecutor(64) as threads,
    ):
        client = RawClient(http)
        session_id = client.session()

        def work(model_seq_id: int) -> None:
            client.model(session_id, model_seq_id)
            for path in ("sessions", "dashboard/overview", "dashboard/queue", "training_runs"):
                assert http.get(path).status_code == 200

        running = [threads.submit(work, model_seq_id) for model_seq_id in range(64)]
        while not all(running_future.done() for running_future in running):
            counts.append(int(direct.scalar(count)))
            time.sleep(0.02)
        for running_future in running:
            running_future.result()
    direct.close()
    assert 12 < max(counts) <= server_limit + engine_limit
