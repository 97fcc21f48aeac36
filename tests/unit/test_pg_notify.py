"""Wake-ups through Postgres: sent with the commit, of any size, and across broken connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from support.databases import POSTGRES
from support.engine_bench import BASE, Bench
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database, open_mailbox
from tinsmith.db.pg_notify import PostgresMailbox
from tinsmith.db.postgres import MAX_NOTIFY_BYTES
from tinsmith.db.postgres_database import PostgresDatabase
from tinsmith.db.wakeups import SAFETY_POLL_S, SERVER, Mailbox, engine_mailbox
from tinsmith.store.futures import Futures, NewFuture, Settlement
from tinsmith.store.models import Models, NewModel
from tinsmith.types import LoraSpec

SOON_S = 0.5 * SAFETY_POLL_S


@pytest.fixture
def database_kind() -> str:
    return POSTGRES


@pytest.fixture
def mailbox(database_url: str) -> Iterator[PostgresMailbox]:
    new_mailbox = PostgresMailbox(database_url, "server")
    assert new_mailbox.wait(10) and new_mailbox.drain() == {""}, "it says when it listens"
    yield new_mailbox
    new_mailbox.close()


def receive_until(mailbox: PostgresMailbox, enough: Callable[[set[str]], bool]) -> set[str]:
    ids: set[str] = set()
    deadline = time.monotonic() + 10
    while not enough(ids) and mailbox.wait(deadline - time.monotonic()):
        ids |= mailbox.drain()
    return ids


def test_a_wake_up_comes_with_the_commit_and_not_before(db: Database, mailbox: PostgresMailbox) -> None:
    with db.write() as connection:
        db.notify(connection, "server", ["a", "b"])
        assert not mailbox.wait(0.2)
    assert receive_until(mailbox, lambda ids: "a" in ids) == {"a", "b"}
    assert not mailbox.wait(0.0) and mailbox.drain() == set()


def test_uncommitted_wake_ups_are_not_sent(db: Database, mailbox: PostgresMailbox) -> None:
    with pytest.raises(RuntimeError), db.write() as connection:
        db.notify(connection, "server", ["a"])
        raise RuntimeError
    assert not mailbox.wait(0.2)


def test_any_number_of_ids_arrives(db: Database, mailbox: PostgresMailbox) -> None:
    ids = {f"{'x' * 100}:{index}" for index in range(2000)}
    assert len("\n".join(ids)) > 20 * MAX_NOTIFY_BYTES
    with db.write() as connection:
        db.notify(connection, "server", ids)
    assert receive_until(mailbox, lambda arrived: arrived >= ids) == ids


def test_lines_of_token_streams_arrive_without_a_transaction(database_url: str, mailbox: PostgresMailbox) -> None:
    engine = PostgresMailbox(database_url, engine_mailbox("base"))
    lines = {f'+["request-{i}",0,0,[1],[-0.5],[]]' for i in range(400)}
    try:
        too_long = "+" + "too long" * 1000
        engine.stream(SERVER, [too_long])
        engine.stream(SERVER, ["+short"])
        assert receive_until(mailbox, lambda ids: "+short" in ids) == {"+short"}, "nothing else wakes the readers"
        engine.stream(SERVER, [too_long, *lines])
        assert lines <= receive_until(mailbox, lambda ids: lines <= ids)
        assert engine._sender is not None
        engine._sender.close()
        engine.stream(SERVER, ["+after a broken connection"])
        assert "+after a broken connection" in receive_until(mailbox, lambda ids: "+after a broken connection" in ids)
    finally:
        engine.close()


def test_channels_are_apart(db: Database, mailbox: PostgresMailbox) -> None:
    with db.write() as connection:
        db.notify(connection, "engine", ["a"])
    assert not mailbox.wait(0.2)


def test_a_broken_connection_is_opened_again_and_says_that_something_may_be_missing(
    db: Database, mailbox: PostgresMailbox
) -> None:
    terminate_sql = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE "
    )
    with db.read() as connection:
        assert connection.scalar(sa.text(terminate_sql + "'LISTEN %'")), "one was cut"
    assert receive_until(mailbox, lambda ids: "" in ids) == {""}
    with db.write() as connection:
        db.notify(connection, "server", ["a"])
    assert receive_until(mailbox, lambda ids: "a" in ids) == {"a"}


def test_closing_takes_no_time(database_url: str) -> None:
    for reachable in (database_url, "postgresql://nobody@127.0.0.1:1/none"):
        mailbox = PostgresMailbox(reachable, "server")
        started = time.monotonic()
        mailbox.close()
        assert time.monotonic() - started < 5


def test_the_database_decides_how_wake_ups_go(database_url: str, tmp_path: Path) -> None:
    opened = [open_mailbox(database_url, "engine"), open_mailbox(f"sqlite:///{tmp_path}/x.db", "engine")]
    assert [type(mailbox) for mailbox in opened] == [PostgresMailbox, Mailbox]
    for mailbox in opened:
        mailbox.close()


def test_submissions_wake_the_engine_and_settlements_the_servers(database_url: str, db: Database) -> None:
    engine, server = PostgresMailbox(database_url, engine_mailbox("base")), PostgresMailbox(database_url, SERVER)
    for listening in (engine, server):
        receive_until(listening, lambda ids: "" in ids)
    futures = Futures(db)
    request_id = futures.submit(NewFuture("m:1", "alice", "s", "base", "forward", b"", model_id="m", seq_id=1))
    assert receive_until(engine, lambda ids: bool(ids)) == {request_id}
    futures.settle([Settlement(request_id, b"")], {})
    assert receive_until(server, lambda ids: bool(ids)) == {request_id}
    futures.submit(NewFuture("m:1", "alice", "s", "base", "forward", b"", model_id="m", seq_id=1))
    assert not engine.wait(0.2), "what was there already is no news"
    engine.close()
    server.close()


def test_one_engine_of_several_is_woken_alone_or_all_of_them(database_url: str, db: Database) -> None:
    first, second = (
        PostgresMailbox(database_url, engine_mailbox("base", engine_id)) for engine_id in ("engine-0-a", "engine-0-b")
    )
    for listening in (first, second):
        receive_until(listening, lambda ids: "" in ids)
    futures = Futures(db)
    step = NewFuture("m:1", "alice", "s", "base", "forward", b"", model_id="m", seq_id=1, engine_id="engine-0-b")
    futures.submit(step)
    assert receive_until(second, lambda ids: bool(ids)) == {"m:1"}
    assert not first.wait(0.2)
    futures.submit(replace(step, request_id="m:2", seq_id=2, engine_id=None))
    assert receive_until(first, lambda ids: bool(ids)) == receive_until(second, lambda ids: bool(ids)) == {"m:2"}
    first.close()
    second.close()


def test_processes_on_one_sqlite_file_find_each_other_wherever_their_data_are(tmp_path: Path) -> None:
    for name in ("tinsmith.db", "shared.db"):
        url = f"sqlite:///{tmp_path}/{name}"
        server, engine = open_mailbox(url, "server.a"), open_mailbox(f"sqlite:///{tmp_path}/x/../{name}", "engine-b.0")
        server.wake("engine-b", [name])
        assert engine.drain() == {name}
        engine.wake("server", [name])
        assert server.drain() == {name}
        server.close()
        engine.close()
    other = open_mailbox(f"sqlite:///{tmp_path}/other.db", "engine-b.0")
    other_server = open_mailbox(f"sqlite:///{tmp_path}/shared.db", "server.a")
    other_server.wake("engine-b", ["not theirs"])
    assert other.drain() == set()
    other.close()
    other_server.close()


class _Slow(PostgresDatabase):
    """Commits a submission on request."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.inserted, self.go = threading.Event(), threading.Event()

    def notify(self, connection: Connection, channel: str, ids: Sequence[str]) -> None:  # type: ignore[override]
        super().notify(connection, channel, ids)
        self.inserted.set()
        assert self.go.wait(30)


def test_a_request_that_is_committed_after_a_later_one_does_not_wait_for_the_slow_poll(
    tmp_path: Path, database_url: str
) -> None:
    bench = Bench(tmp_path, tmp_path, database_url)
    bench.engine._mailbox = mailbox = PostgresMailbox(database_url, engine_mailbox(BASE))
    model = bench.model()
    slow = _Slow(database_url)
    body = b'{"seq_id": 1, "adam_params": {"learning_rate": 1}}'
    first = NewFuture(f"{model}:1", "alice", "s", BASE, "optim_step", body, model_id=model, seq_id=1)
    thread = threading.Thread(target=Futures(slow).submit, args=(first,))
    thread.start()
    assert slow.inserted.wait(10)
    second = bench.step(model, 2)
    deadline = time.monotonic() + 10
    while second not in bench.engine._queues.request_ids and time.monotonic() < deadline:
        bench.engine.run_once(0.1)
    assert second in bench.engine._queues.request_ids and bench.outcome(second) is None, "it waits for the first"
    bench.engine._next_check = time.monotonic() + 60  # without the slow poll
    slow.go.set()
    thread.join()
    deadline = time.monotonic() + SOON_S + 5
    while bench.outcome(second) is None and time.monotonic() < deadline:
        bench.engine.run_once(SOON_S)
    assert bench.outcome(second) is not None
    mailbox.close()
    slow.close()
    bench.close()


def test_creations_at_once_make_one(database_url: str) -> None:
    databases = [open_database(database_url) for _ in range(6)]
    new = NewModel("s:train:0", "s", "alice", "base", LoraSpec(4))
    created_at: list[float] = []
    threads = [
        threading.Thread(target=lambda db=db: created_at.append(Models(db).create(new).created_at)) for db in databases
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for database in databases:
        database.close()
    assert len(created_at) == 6 and len(set(created_at)) == 1, "all were given the row of the first"
