"""Seats and their leases: one engine at a time may write from a seat; one whose lease expired may not."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from support.databases import POSTGRES
from tinsmith.cluster.engines import HOLDER, NO_START, Engines, Lease, LeaseLostError, Renewal, Seat, fence, holder_of
from tinsmith.cluster.ownership import Ownership
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database
from tinsmith.db.schema import ENGINES, FUTURES, MODELS
from tinsmith.store.futures import Futures, NewFuture, Settlement
from tinsmith.store.models import Models, NewModel
from tinsmith.types import LoraSpec

BASE = "local/tiny"
LONG_S = 60.0


@pytest.fixture
def local_engines(db: Database) -> Engines:
    return Engines(db, "here")


@pytest.fixture
def peer_engines(db: Database) -> Engines:
    return Engines(db, "there")


def take_lease(engines: Engines, lease_s: float = LONG_S, index: int = 0) -> Lease:
    return engines.take(Seat(BASE, index=index), lease_s)


def free_dead_engines(engines: Engines, db: Database) -> list[str]:
    """The engines whose runs another engine frees because they are dead."""
    return Ownership(db, BASE, engines.id_of(Seat(BASE, index=9))).free_expired()


def run_of(db: Database, lease: Lease | None = None, model_id: str = "s:train:0") -> str:
    engine_id = lease.engine_id if lease else None
    Models(db).create(NewModel(model_id, "s", "alice", BASE, LoraSpec(4), engine_id=engine_id))
    return model_id


def owner(db: Database, model_id: str) -> str | None:
    model = Models(db).find(model_id)
    assert model is not None
    return model.engine_id


def test_every_seat_has_a_lease_of_its_own(local_engines: Engines, peer_engines: Engines) -> None:
    leases = [
        take_lease(local_engines),
        take_lease(local_engines, index=1),
        take_lease(peer_engines),
        local_engines.take(Seat(BASE, "sampler"), LONG_S),
    ]
    assert len({lease.engine_id for lease in leases}) == 4
    assert [local_engines.renew(lease, LONG_S) for lease in leases] == [True] * 4
    assert [row.kind for row in local_engines.of_base(BASE)] == ["engine", "engine", "engine", "sampler"]
    assert [row.engine_id for row in local_engines.of_base(BASE, "sampler")] == [leases[3].engine_id]
    assert local_engines.of_base("local/other") == []


def test_a_lapsed_lease_is_ended_by_an_engine_that_claims_its_runs(local_engines: Engines, db: Database) -> None:
    lease = take_lease(local_engines, 0.01)
    model = run_of(db, lease)
    time.sleep(0.05)
    assert free_dead_engines(local_engines, db) == [lease.engine_id]
    assert owner(db, model) is None
    assert not local_engines.renew(lease, LONG_S)
    row = local_engines.find(Seat(BASE))
    assert row is not None and (row.state, row.epoch > lease.epoch) == ("lost", True)
    assert free_dead_engines(local_engines, db) == [], "there is nothing more to free"


def test_a_lapsed_lease_of_an_engine_that_has_nothing_is_left_alone(local_engines: Engines, db: Database) -> None:
    lease = take_lease(local_engines, 0.01)
    time.sleep(0.05)
    assert free_dead_engines(local_engines, db) == []
    assert local_engines.renew(lease, LONG_S), "it is still good"


def test_a_lease_that_has_not_lapsed_is_not_ended(local_engines: Engines, db: Database) -> None:
    lease = take_lease(local_engines)
    run_of(db, lease)
    assert free_dead_engines(local_engines, db) == []
    assert local_engines.renew(lease, LONG_S)


def test_the_next_engine_on_a_seat_does_not_wait_and_goes_on_with_its_runs(
    local_engines: Engines, db: Database
) -> None:
    first = take_lease(local_engines)
    model = run_of(db, first)
    second = take_lease(local_engines)
    assert (second.engine_id, second.epoch) == (first.engine_id, first.epoch + 1)
    assert not local_engines.renew(first, LONG_S)
    assert owner(db, model) == second.engine_id


def test_a_seat_that_is_released_frees_its_runs_and_samples_at_once(
    local_engines: Engines, peer_engines: Engines, db: Database
) -> None:
    local_lease, peer_lease = take_lease(local_engines), take_lease(peer_engines)
    runs = [run_of(db, local_lease), run_of(db, peer_lease, "s:train:1")]
    futures = Futures(db)
    for seq_id, lease in enumerate((local_lease, local_lease, peer_lease)):
        new = NewFuture(f"x:sample:0:{seq_id}", "alice", "s", BASE, "sample", b"{}", executor=lease.engine_id)
        futures.submit(new)
    futures.settle([Settlement("x:sample:0:1", b"done")], {})
    local_engines.release(Seat(BASE), "stopped", suspects="a note")
    assert [owner(db, run) for run in runs] == [None, peer_lease.engine_id]
    with db.read() as connection:
        executors = connection.execute(sa.select(FUTURES.c.executor).order_by(FUTURES.c.request_id)).scalars().all()
    assert executors == [None, local_lease.engine_id, peer_lease.engine_id], "what was settled keeps its executor"
    row = local_engines.find(Seat(BASE))
    assert row is not None and (row.state, row.suspects, row.lease_expires_at) == ("stopped", "a note", 0)
    assert take_lease(local_engines).epoch > local_lease.epoch + 1


def test_polls_report_the_engines_state(local_engines: Engines, peer_engines: Engines) -> None:
    assert local_engines.queue_state(BASE) == ("paused_capacity", f"the engine of {BASE} is starting")
    take_lease(local_engines)
    assert peer_engines.queue_state(BASE) == ("paused_capacity", f"the engine of {BASE} is loading")
    local_engines.set_state(Seat(BASE), "ready")
    assert peer_engines.queue_state(BASE) == ("active", None)
    take_lease(peer_engines)
    local_engines.release(Seat(BASE), "restarting", "it ended with status 1")
    assert local_engines.queue_state(BASE) == ("paused_capacity", f"the engine of {BASE} is loading"), "the other one"
    peer_engines.set_state(Seat(BASE), "ready")
    assert local_engines.queue_state(BASE) == ("active", None), "one is enough"


def test_a_base_model_cannot_start_only_while_no_engine_of_it_may_yet_run(
    local_engines: Engines, peer_engines: Engines
) -> None:
    assert local_engines.cannot_start(BASE) is None
    take_lease(local_engines)
    assert local_engines.cannot_start(BASE) is None
    reason = f"{NO_START}it ended with status 1 (ImportError: x)"
    local_engines.release(Seat(BASE), "restarting", reason)
    assert peer_engines.cannot_start(BASE) == f"the engine of {BASE} does not run; {reason}"
    take_lease(local_engines)  # the next start
    assert (local_engines.queue_state(BASE)[1] or "").endswith(reason) and peer_engines.cannot_start(BASE)
    take_lease(peer_engines)
    assert local_engines.cannot_start(BASE) is None, "the other one may get ready"
    peer_engines.release(Seat(BASE), "lost")
    assert local_engines.cannot_start(BASE)
    local_engines.set_state(Seat(BASE), "ready")
    assert local_engines.cannot_start(BASE) is None and local_engines.queue_state(BASE) == ("active", None)
    local_engines.release(Seat(BASE), "restarting", "it ended with status 1")
    assert local_engines.cannot_start(BASE) is None


def test_a_sampler_alone_does_not_move_the_queue(local_engines: Engines) -> None:
    sampler = Seat(BASE, "sampler")
    local_engines.take(sampler, LONG_S)
    local_engines.set_state(sampler, "ready", address="tcp://127.0.0.1:1")
    assert local_engines.queue_state(BASE)[0] == "paused_capacity"
    row = local_engines.find(sampler)
    assert row is not None and row.address == "tcp://127.0.0.1:1"


def test_polls_report_a_silent_engine(local_engines: Engines) -> None:
    take_lease(local_engines, 0.01)
    local_engines.set_state(Seat(BASE), "ready")
    time.sleep(0.05)
    state, reason = local_engines.queue_state(BASE)
    assert (state, "does not renew its lease" in (reason or "")) == ("paused_capacity", True)


def test_processes_that_take_one_seat_at_once_have_different_epochs(database_url: str) -> None:
    databases = [open_database(database_url) for _ in range(4)]
    leases: list[Lease] = []
    take = [
        threading.Thread(target=lambda db=db: leases.append(Engines(db, "here").take(Seat(BASE), LONG_S)))
        for db in databases
    ]
    for thread in take:
        thread.start()
    for thread in take:
        thread.join()
    assert len({lease.epoch for lease in leases}) == 4
    assert sum(Engines(databases[0], "here").renew(lease, LONG_S) for lease in leases) == 1
    for database in databases:
        database.close()


def test_a_seat_unused_for_a_day_is_deleted_and_never_repeats_an_epoch(local_engines: Engines, db: Database) -> None:
    first, owning = take_lease(local_engines), take_lease(local_engines, index=1)
    take_lease(local_engines, index=2)
    run_of(db, owning)
    with db.write() as connection:
        old = ENGINES.update().where(ENGINES.c.engine_id.in_((first.engine_id, owning.engine_id)))
        connection.execute(old.values(lease_expires_at=1.0, started_at=1.0, epoch=3))
    assert local_engines.delete_unused() == 1
    assert [row.engine_id for row in local_engines.of_base(BASE)] == sorted(
        (owning.engine_id, local_engines.id_of(Seat(BASE, index=2)))
    )
    assert take_lease(local_engines).epoch > first.epoch - 10**6 > 3


def test_two_data_directories_have_separate_seats_on_any_hosts_and_paths(
    tmp_path: Path, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "app")
    names: list[str] = []
    for volume in ("one", "two"):
        (tmp_path / volume).mkdir()
        (tmp_path / "data").unlink(missing_ok=True)
        (tmp_path / "data").symlink_to(tmp_path / volume)  # two containers see their volumes at the same path
        names.append(holder_of(tmp_path / "data"))
        assert holder_of(tmp_path / "data") == names[-1], "it stays"
        assert (tmp_path / volume / HOLDER).stat().st_mode & 0o077 == 0
    leases = [take_lease(Engines(db, name)) for name in names]
    assert len({lease.engine_id for lease in leases}) == 2
    assert [Engines(db, name).renew(lease, LONG_S) for name, lease in zip(names, leases, strict=True)] == [True] * 2


def test_concurrent_requests_for_a_name_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = itertools.count()
    monkeypatch.setattr("secrets.token_hex", lambda _size: time.sleep(0.02) or f"{next(drawn):016x}")
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: holder_of(tmp_path), range(32)))) == 1


def test_a_seat_that_a_copy_of_the_data_directory_took_is_known_from_one_that_was_freed(local_engines: Engines) -> None:
    seat, lease = Seat(BASE), take_lease(local_engines)
    assert not local_engines.is_taken(seat, lease)
    local_engines.release(seat, "lost")
    assert not local_engines.is_taken(seat, lease)
    take_lease(local_engines)
    assert local_engines.is_taken(seat, lease)


def test_an_engine_that_lost_its_lease_writes_nothing(
    database_url: str, local_engines: Engines, peer_engines: Engines, db: Database
) -> None:
    old = take_lease(local_engines, 0.01)
    model = run_of(db, old)
    request = NewFuture(f"{model}:1", "alice", "s", BASE, "optim_step", b"{}", model_id=model, seq_id=1)
    Futures(db).submit(request)
    stale = open_database(database_url, fence(old))
    time.sleep(0.05)
    new = take_lease(peer_engines)
    current = open_database(database_url, fence(new))
    ownership = Ownership(current, BASE, new.engine_id)
    assert ownership.free_expired() == [old.engine_id]
    assert ownership.claim([request.request_id]) == {request.request_id}
    cleaned: list[str] = []
    effects = [MODELS.update().values(reason="written by the stale one")]
    settlement = Settlement(request.request_id, b"stale", effects=effects, clean_up=lambda: cleaned.append("stale"))
    with pytest.raises(LeaseLostError, match=old.engine_id):
        Futures(stale).settle([settlement], {model: 1})
    with pytest.raises(LeaseLostError):
        Models(stale).record_snapshot(model, 1, "directory")
    with pytest.raises(LeaseLostError):
        Ownership(stale, BASE, old.engine_id).claim([request.request_id])
    assert Futures(db).outcome("alice", request.request_id) is None
    run = Models(db).find(model)
    assert run is not None and (run.reason, run.applied_seq_id, run.snapshot_seq_id) == (None, -1, None)
    assert cleaned == [] and run.engine_id == new.engine_id
    Futures(current).settle([Settlement(request.request_id, b"current")], {model: 1})
    outcome = Futures(stale).outcome("alice", request.request_id)
    assert outcome is not None and outcome.body == b"current", "reading stays free"
    stale.close()
    current.close()


def test_a_lost_lease_is_no_failure_of_a_request() -> None:
    assert not issubclass(LeaseLostError, Exception)


@pytest.mark.parametrize("database_kind", [POSTGRES])
def test_a_release_waits_for_what_is_being_settled_and_a_renewal_does_not(
    database_url: str, local_engines: Engines, db: Database
) -> None:
    lease = take_lease(local_engines, 0.01)
    run_of(db, lease)
    settling = open_database(database_url, fence(lease))
    releasing = threading.Thread(target=lambda: local_engines.release(Seat(BASE), "stopped"))
    with settling.write() as connection:
        assert local_engines.renew(lease, 0.0), "the lease is renewed while a transaction is open"
        time.sleep(0.05)
        assert free_dead_engines(local_engines, db) == [], "one that is in the middle of a transaction is there"
        releasing.start()
        releasing.join(0.3)
        assert releasing.is_alive()
        connection.execute(ENGINES.update().values(reason="settled"))
    releasing.join(10)
    row = local_engines.find(Seat(BASE))
    assert row is not None and (row.state, row.epoch) == ("stopped", lease.epoch + 1)
    with pytest.raises(LeaseLostError), settling.write() as connection:
        connection.execute(sa.text("SELECT 1"))
    settling.close()


def test_a_lease_is_renewed_however_long_a_step_takes_until_it_is_lost(local_engines: Engines, db: Database) -> None:
    lost = threading.Event()
    lease = take_lease(local_engines, 0.3)
    run_of(db, lease)
    renewal = Renewal(local_engines, lease, 0.3, lost.set)
    deadline = time.monotonic() + 0.8
    while time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lost.is_set()
    take_lease(local_engines)  # another epoch
    assert lost.wait(10)
    renewal.close()
