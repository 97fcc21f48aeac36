"""Faults of the database, the disk and the clock: only the affected requests fail."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import NoReturn

import pytest
import tinker
from sqlalchemy import exc
from sqlalchemy.engine import Connection
from tinker import types

from fault.test_recovery import DATA, NANO
from support.databases import SQLITE, chosen, fresh_url
from support.engine_bench import Bench
from support.http_harness import close, make_harness
from support.live import API_KEY, serving
from support.raw_client import connect, engine_of
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database
from tinsmith.db.schema import SESSIONS
from tinsmith.errors import SettingsError
from tinsmith.runtime.clocks import WatchedClock
from tinsmith.server.process import build
from tinsmith.settings import Settings
from unit.test_janitor import Parts, janitor_of, parts, silent_session, unloads  # noqa: F401  fixtures

only_sqlite = pytest.mark.skipif(chosen != SQLITE, reason="Postgres locks rows, not the database")


# A database that another process locks.


@contextlib.contextmanager
def lock_database(path: Path) -> Iterator[None]:
    """Another process locks the database until the end of the block."""
    other = sqlite3.connect(path, isolation_level=None, timeout=10)
    other.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


@only_sqlite
def test_a_writer_times_out_and_those_behind_it_fail_at_once(tmp_path: Path) -> None:
    url = fresh_url(tmp_path)
    database = open_database(url, patience_s=0.5)
    with lock_database(tmp_path / "tinsmith.db"):
        started = time.monotonic()
        for _ in range(2):
            with pytest.raises(exc.OperationalError, match="locked"), database.write():
                pass
        assert time.monotonic() - started > 0.8
        assert database._write_lock._stuck_until > started
    with database.write() as connection:
        connection.execute(SESSIONS.delete())
    database.close()
    patient = open_database(url, patience_s=60)
    patient._write_lock._stuck_until = time.monotonic() + 60  # as after a writer's timeout
    with contextlib.ExitStack() as waiting:
        with lock_database(tmp_path / "tinsmith.db"):
            first = waiting.enter_context(ThreadedWriter(patient))
            while not patient._write_lock._lock.locked():
                time.sleep(0.01)
            with pytest.raises(exc.TimeoutError), patient.write():
                pass
            assert first.waits, "the second writer is told while the first one waits"
    assert first.error is None
    patient.close()


class ThreadedWriter:
    """A thread that writes once; it waits for the lock when the block begins."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._thread = threading.Thread(target=self._write)
        self.error: Exception | None = None

    def _write(self) -> None:
        try:
            with self._database.write():
                pass
        except Exception as error:  # noqa: BLE001  the test looks at it
            self.error = error

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def __enter__(self) -> ThreadedWriter:
        self._thread.start()
        time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(30)


@only_sqlite
def test_a_database_without_a_time_limit_waits_for_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.db.sqlite.MAX_BUSY_TIMEOUT_S", 0.1)
    url = fresh_url(tmp_path)
    database = open_database(url, patience_s=float("inf"))
    with contextlib.ExitStack() as waiting:
        with lock_database(tmp_path / "tinsmith.db"):
            writer = waiting.enter_context(ThreadedWriter(database))
            time.sleep(0.6)
            assert writer.waits
    assert not writer.waits and writer.error is None
    database.close()


@only_sqlite
def test_a_run_beside_a_database_that_is_held_is_a_delay(tmp_path: Path) -> None:
    # A lease that expires meanwhile is not taken by another engine.
    with serving(tmp_path / "data", "--backend", "fake", settings={"ENGINE_LEASE_S": "2"}) as server:
        engine = engine_of(server)
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            client = service.create_lora_training_client(NANO, rank=4).result()
            first = client.forward_backward(DATA, "cross_entropy").result()
            raw = connect(server)
            model = raw.model()
            passed = client.forward_backward(DATA, "cross_entropy")
            with lock_database(server.data_dir / "tinsmith.db"):
                stepped = client.optim_step(types.AdamParams(learning_rate=1e-2))
                started = time.monotonic()
                answer = raw.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
                assert answer.status_code == 503 and time.monotonic() - started < 60
                assert float(answer.headers["retry-after"]) > 0
                assert server.get("healthz").status_code == 200
            assert passed.result().metrics == first.metrics
            assert stepped.result().metrics["step"] == 1
            assert raw.steps_taken(raw.step(model, 1)) == 1, "the refused one was not stored, and its number is free"
        assert engine_of(server) == engine, "the engine waited with its results"
        assert server.count("futures WHERE state <> 'done'") == 0


# The clock.


WALL = time.time


class SetClock:
    """A clock that can be set."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def wall(self) -> float:
        return WALL() + self.offset_s


def test_a_clock_that_is_corrected_a_little_has_not_jumped() -> None:
    clock = SetClock()
    watched = WatchedClock(clock.wall)
    assert watched.jump_s() == 0
    clock.offset_s = 1.0
    assert watched.jump_s() == 0
    clock.offset_s += 3600
    assert round(watched.jump_s()) == 3600
    assert watched.jump_s() == 0, "once"
    clock.offset_s -= 7200
    assert round(watched.jump_s()) == -7200


@pytest.mark.smoke
def test_a_clock_set_forward_expires_no_active_session(
    parts: Parts,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, steady = SetClock(), SetClock()
    watched = WatchedClock(clock.wall, steady.wall)
    janitor = janitor_of(parts, watched)
    monkeypatch.setattr("tinsmith.server.janitor.time.monotonic", steady.wall)
    monkeypatch.setattr("tinsmith.store.sessions.now", clock.wall)
    silent_session(parts, silent_s=10)
    janitor.sweep()
    clock.offset_s = 3 * 3600
    for _ in range(3):
        janitor.sweep()
    assert unloads(parts) == []
    clock.offset_s += 301
    steady.offset_s += 301
    janitor.sweep()
    assert len(unloads(parts)) == 1, "who says nothing for the timeout that follows is gone"


def test_a_clock_set_back_delays_no_expiry(
    parts: Parts,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SetClock()
    janitor = janitor_of(parts)
    monkeypatch.setattr("tinsmith.store.sessions.now", clock.wall)
    silent_session(parts, silent_s=-5 * 3600)
    janitor.sweep()
    clock.offset_s = 299
    janitor.sweep()
    assert unloads(parts) == []
    clock.offset_s = 302
    janitor.sweep()
    assert len(unloads(parts)) == 1


@pytest.mark.smoke
def test_a_clock_set_forward_gives_up_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench_in(tmp_path) as bench:
        model = bench.model()
        waiting = bench.step(model, 2)
        bench.run_until_idle()
        bench.engine._skip_gaps()
        clock = SetClock()
        clock.offset_s = 3600
        monkeypatch.setattr("tinsmith.engine.queues.time.time", clock.wall)
        bench.engine._skip_gaps()
        bench.run_until_idle()
        assert bench.outcome(waiting) is None
        missing = bench.forward(model, 1)
        bench.run_until_idle()
        assert bench.outcome(missing) is not None and bench.outcome(waiting) is not None


# The disk.


@contextlib.contextmanager
def bench_in(directory: Path) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="faults-") as sockets:
        new_bench = Bench(directory, Path(sockets))
        yield new_bench
        new_bench.close()


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("failing_call", ["mkdir", "fsync", "rename"])
def test_a_save_on_a_disk_that_fails_is_its_own_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_number: int, failing_call: str
) -> None:
    with bench_in(tmp_path) as bench:
        model = bench.model()
        first_step = bench.step(model, 1)
        bench.run_until_idle()

        def fail(*_: object, **__: object) -> None:
            raise OSError(error_number, os.strerror(error_number))

        with monkeypatch.context() as broken:
            target = {"mkdir": "pathlib.Path.mkdir", "fsync": "os.fsync", "rename": "pathlib.Path.rename"}[failing_call]
            broken.setattr(target, fail)
            failed = bench.submit(model, 2, "save_weights", {"path": "one"})
            bench.run_until_idle()
        assert os.strerror(error_number) in bench.error(failed)
        leftovers = [path for root in ("checkpoints", "snapshots") for path in (tmp_path / root).glob("*")]
        assert leftovers == [], "neither half a checkpoint nor half a snapshot"
        again = bench.submit(model, 3, "save_weights", {"path": "one"})
        step = bench.step(model, 4)
        bench.run_until_idle()
        assert [bench.outcome(request_id).error for request_id in (first_step, again, step)] == [None, None, None]


def test_a_server_on_a_directory_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(SettingsError, match="cannot write to"):
        build(Settings(data_dir=tmp_path / "file" / "data", port=0))


def refuse_writes(database: Database) -> Callable[[], None]:
    """Make the database read-only until the returned function is called."""

    def refuse(_connection: Connection) -> NoReturn:
        raise exc.OperationalError("BEGIN IMMEDIATE", None, Exception("attempt to write a readonly database"))

    patch = pytest.MonkeyPatch()
    patch.setattr(database._write_lock, "begin", refuse)
    return patch.undo


@pytest.mark.smoke
@only_sqlite
def test_an_engine_whose_database_turns_read_only_waits_and_goes_on(tmp_path: Path) -> None:
    with bench_in(tmp_path) as bench:
        model = bench.model()
        first = bench.step(model, 1)
        bench.run_until_idle()
        second = bench.step(model, 2)
        end = refuse_writes(bench.db)
        looks = count()

        def stopping() -> bool:
            if next(looks) == 4:  # it is called before every attempt
                assert bench.outcome(second) is None and bench.outcome(first) is not None
                end()
            return bench.outcome(second) is not None

        bench.engine.run(stopping)
        assert bench.optimizer_step(second) == 2
        bench.restart()
        assert not bench.engine.quarantine


@only_sqlite
def test_a_server_whose_database_turns_read_only_asks_to_try_again(tmp_path: Path) -> None:
    harness = make_harness(tmp_path)
    before = harness.session()
    end = refuse_writes(harness.services.models._db)
    answer = harness.post("create_session", {"tags": [], "sdk_version": "0.38.0"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert harness.get("healthz").status_code == 200
    assert harness.get(f"sessions/{before}").status_code == 200, "what only reads goes on"
    end()
    assert harness.session() != before
    close(harness)


@pytest.mark.parametrize("verb", ["GET", "POST"])
def test_a_server_that_cannot_ask_whether_there_are_keys_asks_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    harness = make_harness(tmp_path, local=True)
    path, body = (
        ("sessions/unknown", None) if verb == "GET" else ("create_session", {"tags": [], "sdk_version": "0.38.0"})
    )

    def raise_gone(_database: Database) -> NoReturn:
        raise exc.OperationalError("SELECT", None, Exception("the connection was lost"))

    with monkeypatch.context() as broken:
        broken.setattr(type(harness.services.models._db), "read", raise_gone)
        answer = harness.send(verb, path, body)
    assert (answer.status_code, answer.headers.get("retry-after")) == (503, "1")
    assert "database does not answer" in answer.json()["detail"]
    assert harness.send(verb, path, body).status_code != 503
    close(harness)
