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
from tinsmith.db.schema import ENGINES, FUTURES, MODELS
from tinsmith.store.futures import Futures, NewFuture, Settlement
from tinsmith.store.models import Models, NewModel
from tinsmith.types import LoraSpec

BASE = "local/tiny"
LONG_S = 60.0


@pytest.fixture
def here(db: Database) -> Engines:
    return Engines(db, "here")


@pytest.fixture
def there(db: Database) -> Engines:
    return Engines(db, "there")


def taken(engines: Engines, lease_s: float = LONG_S, index: int = 0) -> Lease:
    return engines.take(Seat(BASE, index=index), lease_s)


def freed(engines: Engines, db: Database) -> list[str]:
    """The engines whose runs another engine frees because they are dead."""
    return Ownership(db, BASE, engines.id_of(Seat(BASE, index=9))).free_expired()


def run_of(db: Database, lease: Lease | None = None, model_id: str = "s:train:0") -> str:
    engine_id = lease.engine_id if lease else None
    Models(db).create(NewModel(model_id, "s", "alice", BASE, LoraSpec(4), engine_id=engine_id))
    return model_id


def owner(db: Database, model_id: str) -> str | None:
    found = Models(db).find(model_id)
    assert found is not None
    return found.engine_id


def test_every_seat_has_a_lease_of_its_own(here: Engines, there: Engines) -> None:
    leases = [taken(here), taken(here, index=1), taken(there), here.take(Seat(BASE, "sampler"), LONG_S)]
    assert len({lease.engine_id for lease in leases}) == 4
    assert [here.renew(lease, LONG_S) for lease in leases] == [True] * 4
    assert [row.kind for row in here.of_base(BASE)] == ["engine", "engine", "engine", "sampler"]
    assert [row.engine_id for row in here.of_base(BASE, "sampler")] == [leases[3].engine_id]
    assert here.of_base("local/other") == []


def test_a_lapsed_lease_is_ended_by_an_engine_that_claims_its_runs(here: Engines, db: Database) -> None:
    lease = taken(here, 0.01)
    model = run_of(db, lease)
    time.sleep(0.05)
    assert freed(here, db) == [lease.engine_id]
    assert owner(db, model) is None
    assert not here.renew(lease, LONG_S)
    row = here.find(Seat(BASE))
    assert row is not None and (row.state, row.epoch > lease.epoch) == ("lost", True)
    assert freed(here, db) == [], "there is nothing more to free"


def test_a_lapsed_lease_of_an_engine_that_has_nothing_is_left_alone(here: Engines, db: Database) -> None:
    lease = taken(here, 0.01)
    time.sleep(0.05)
    assert freed(here, db) == []
    assert here.renew(lease, LONG_S), "it is still good"


def test_a_lease_that_has_not_lapsed_is_not_ended(here: Engines, db: Database) -> None:
    lease = taken(here)
    run_of(db, lease)
    assert freed(here, db) == []
    assert here.renew(lease, LONG_S)


def test_the_next_engine_on_a_seat_does_not_wait_and_goes_on_with_its_runs(here: Engines, db: Database) -> None:
    first = taken(here)
    model = run_of(db, first)
    second = taken(here)
    assert (second.engine_id, second.epoch) == (first.engine_id, first.epoch + 1)
    assert not here.renew(first, LONG_S)
    assert owner(db, model) == second.engine_id


def test_a_seat_that_is_released_frees_its_runs_and_samples_at_once(
    here: Engines, there: Engines, db: Database
) -> None:
    mine, other = taken(here), taken(there)
    runs = [run_of(db, mine), run_of(db, other, "s:train:1")]
    futures = Futures(db)
    for number, lease in enumerate((mine, mine, other)):
        new = NewFuture(f"x:sample:0:{number}", "alice", "s", BASE, "sample", b"{}", executor=lease.engine_id)
        futures.submit(new)
    futures.settle([Settlement("x:sample:0:1", b"done")], {})
    here.release(Seat(BASE), "stopped", suspects="a note")
    assert [owner(db, run) for run in runs] == [None, other.engine_id]
    with db.read() as connection:
        executors = connection.execute(sa.select(FUTURES.c.executor).order_by(FUTURES.c.request_id)).scalars().all()
    assert executors == [None, mine.engine_id, other.engine_id], "what was settled keeps its executor"
    row = here.find(Seat(BASE))
    assert row is not None and (row.state, row.suspects, row.lease_expires_at) == ("stopped", "a note", 0)
    assert taken(here).epoch > mine.epoch + 1


def test_polls_report_the_engines_state(here: Engines, there: Engines) -> None:
    assert here.queue_state(BASE) == ("paused_capacity", f"the engine of {BASE} is starting")
    taken(here)
    assert there.queue_state(BASE) == ("paused_capacity", f"the engine of {BASE} is loading")
    here.set_state(Seat(BASE), "ready")
    assert there.queue_state(BASE) == ("active", None)
    taken(there)
    here.release(Seat(BASE), "restarting", "it ended with status 1")
    assert here.queue_state(BASE) == ("paused_capacity", f"the engine of {BASE} is loading"), "the other one"
    there.set_state(Seat(BASE), "ready")
    assert here.queue_state(BASE) == ("active", None), "one is enough"


def test_a_base_model_cannot_start_only_while_no_engine_of_it_may_yet_run(here: Engines, there: Engines) -> None:
    assert here.cannot_start(BASE) is None
    taken(here)
    assert here.cannot_start(BASE) is None
    why = f"{NO_START}it ended with status 1 (ImportError: x)"
    here.release(Seat(BASE), "restarting", why)
    assert there.cannot_start(BASE) == f"the engine of {BASE} does not run; {why}"
    taken(here)  # the next start
    assert (here.queue_state(BASE)[1] or "").endswith(why) and there.cannot_start(BASE)
    taken(there)
    assert here.cannot_start(BASE) is None, "the other one may get ready"
    there.release(Seat(BASE), "lost")
    assert here.cannot_start(BASE)
    here.set_state(Seat(BASE), "ready")
    assert here.cannot_start(BASE) is None and here.queue_state(BASE) == ("active", None)
    here.release(Seat(BASE), "restarting", "it ended with status 1")
    assert here.cannot_start(BASE) is None


def test_a_sampler_alone_does_not_move_the_queue(here: Engines) -> None:
    sampler = Seat(BASE, "sampler")
    here.take(sampler, LONG_S)
    here.set_state(sampler, "ready", address="tcp://127.0.0.1:1")
    assert here.queue_state(BASE)[0] == "paused_capacity"
    row = here.find(sampler)
    assert row is not None and row.address == "tcp://127.0.0.1:1"


def test_polls_report_a_silent_engine(here: Engines) -> None:
    taken(here, 0.01)
    here.set_state(Seat(BASE), "ready")
    time.sleep(0.05)
    state, reason = here.queue_state(BASE)
    assert (state, "does not renew its lease" in (reason or "")) == ("paused_capacity", True)


def test_processes_that_take_one_seat_at_once_have_different_epochs(database_url: str) -> None:
    databases = [Database(database_url) for _ in range(4)]
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


def test_a_seat_unused_for_a_day_is_deleted_and_never_repeats_an_epoch(here: Engines, db: Database) -> None:
    first, owning = taken(here), taken(here, index=1)
    taken(here, index=2)
    run_of(db, owning)
    with db.write() as connection:
        old = ENGINES.update().where(ENGINES.c.engine_id.in_((first.engine_id, owning.engine_id)))
        connection.execute(old.values(lease_expires_at=1.0, started_at=1.0, epoch=3))
    assert here.delete_unused() == 1
    assert [row.engine_id for row in here.of_base(BASE)] == sorted((owning.engine_id, here.id_of(Seat(BASE, index=2))))
    assert taken(here).epoch > first.epoch - 10**6 > 3


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
    leases = [taken(Engines(db, name)) for name in names]
    assert len({lease.engine_id for lease in leases}) == 2
    assert [Engines(db, name).renew(lease, LONG_S) for name, lease in zip(names, leases, strict=True)] == [True] * 2


def test_concurrent_requests_for_a_name_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = itertools.count()
    monkeypatch.setattr("secrets.token_hex", lambda _size: time.sleep(0.02) or f"{next(drawn):016x}")
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: holder_of(tmp_path), range(32)))) == 1


def test_a_seat_that_a_copy_of_the_data_directory_took_is_known_from_one_that_was_freed(here: Engines) -> None:
    seat, lease = Seat(BASE), taken(here)
    assert not here.is_taken(seat, lease)
    here.release(seat, "lost")
    assert not here.is_taken(seat, lease)
    taken(here)
    assert here.is_taken(seat, lease)


def test_an_engine_that_lost_its_lease_writes_nothing(
    database_url: str, here: Engines, there: Engines, db: Database
) -> None:
    old = taken(here, 0.01)
    model = run_of(db, old)
    request = NewFuture(f"{model}:1", "alice", "s", BASE, "optim_step", b"{}", model_id=model, seq_id=1)
    Futures(db).submit(request)
    stale = Database(database_url, fence(old))
    time.sleep(0.05)
    new = taken(there)
    current = Database(database_url, fence(new))
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
    found = Models(db).find(model)
    assert found is not None and (found.reason, found.applied_seq_id, found.snapshot_seq_id) == (None, -1, None)
    assert cleaned == [] and found.engine_id == new.engine_id
    Futures(current).settle([Settlement(request.request_id, b"current")], {model: 1})
    outcome = Futures(stale).outcome("alice", request.request_id)
    assert outcome is not None and outcome.body == b"current", "reading stays free"
    stale.close()
    current.close()


def test_a_lost_lease_is_no_failure_of_a_request() -> None:
    assert not issubclass(LeaseLostError, Exception)


@pytest.mark.parametrize("database_kind", [POSTGRES])
def test_a_release_waits_for_what_is_being_settled_and_a_renewal_does_not(
    database_url: str, here: Engines, db: Database
) -> None:
    lease = taken(here, 0.01)
    run_of(db, lease)
    settling = Database(database_url, fence(lease))
    releasing = threading.Thread(target=lambda: here.release(Seat(BASE), "stopped"))
    with settling.write() as connection:
        assert here.renew(lease, 0.0), "the lease is renewed while a transaction is open"
        time.sleep(0.05)
        assert freed(here, db) == [], "one that is in the middle of a transaction is there"
        releasing.start()
        releasing.join(0.3)
        assert releasing.is_alive()
        connection.execute(ENGINES.update().values(reason="settled"))
    releasing.join(10)
    row = here.find(Seat(BASE))
    assert row is not None and (row.state, row.epoch) == ("stopped", lease.epoch + 1)
    with pytest.raises(LeaseLostError), settling.write() as connection:
        connection.execute(sa.text("SELECT 1"))
    settling.close()


def test_a_lease_is_renewed_however_long_a_step_takes_until_it_is_lost(here: Engines, db: Database) -> None:
    lost = threading.Event()
    lease = taken(here, 0.3)
    run_of(db, lease)
    renewal = Renewal(here, lease, 0.3, lost.set)
    deadline = time.monotonic() + 0.8
    while time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lost.is_set()
    taken(here)  # another epoch
    assert lost.wait(10)
    renewal.close()
