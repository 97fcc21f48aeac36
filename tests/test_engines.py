"""Leases: one engine at a time may write for a base model, and one that was thought dead may not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from databases import POSTGRES, fresh_url
from tinsmith.db import Database
from tinsmith.engines import Engines, Lease, LeaseLostError, Renewal, fence
from tinsmith.futures import Futures, NewFuture, Settlement
from tinsmith.models import Models, NewModel
from tinsmith.ops import LoraSpec
from tinsmith.tables import ENGINES, MODELS

BASE = "local/tiny"
LONG_S = 60.0


@pytest.fixture
def url(tmp_path: Path, database_kind: str) -> str:
    return fresh_url(tmp_path, database_kind)


@pytest.fixture
def db(url: str) -> Iterator[Database]:
    made = Database(url)
    yield made
    made.close()


@pytest.fixture
def here(db: Database) -> Engines:
    return Engines(db, "here")


@pytest.fixture
def there(db: Database) -> Engines:
    return Engines(db, "there")


def taken(engines: Engines, lease_s: float = LONG_S) -> Lease:
    lease = engines.take(BASE, lease_s)
    assert lease is not None
    return lease


def test_a_lease_has_one_holder_until_it_expires(here: Engines, there: Engines) -> None:
    assert here.is_free(BASE)
    lease = taken(here, 0.3)
    assert (here.is_free(BASE), there.is_free(BASE)) == (True, False)
    assert there.take(BASE, LONG_S) is None
    time.sleep(0.4)
    assert there.is_free(BASE)
    later = taken(there)
    assert later.epoch == lease.epoch + 1
    assert not here.renew(lease, LONG_S)
    assert here.take(BASE, LONG_S) is None
    assert there.renew(later, LONG_S)


def test_an_expired_lease_that_nobody_took_goes_on(here: Engines, there: Engines) -> None:
    lease = taken(here, 0.01)
    time.sleep(0.05)
    assert here.renew(lease, LONG_S)
    assert there.take(BASE, LONG_S) is None


def test_the_next_engine_of_the_same_holder_does_not_wait(here: Engines) -> None:
    first, second = taken(here), taken(here)
    assert second.epoch == first.epoch + 1
    assert not here.renew(first, LONG_S)


def test_a_released_lease_is_free_for_all_at_once(here: Engines, there: Engines) -> None:
    taken(here)
    there.release(BASE, "stopped")  # not theirs
    assert not there.is_free(BASE)
    here.release(BASE, "stopped")
    taken(there)


def test_only_the_holder_says_how_the_engine_is(here: Engines, there: Engines) -> None:
    taken(here)
    there.set_state(BASE, "starting")
    assert here.queue_state(BASE) == ("paused_capacity", f"the engine of {BASE} is loading")
    here.set_state(BASE, "ready")
    assert there.queue_state(BASE) == ("active", None)


def test_polls_are_told_of_an_engine_that_went_silent(here: Engines) -> None:
    taken(here, 0.01)
    here.set_state(BASE, "ready")
    time.sleep(0.05)
    state, reason = here.queue_state(BASE)
    assert (state, "has not been heard of" in (reason or "")) == ("paused_capacity", True)


def test_many_engines_that_start_at_once_make_one(url: str) -> None:
    databases = [Database(url) for _ in range(4)]
    leases: list[Lease | None] = []

    def take(number: int) -> None:
        leases.append(Engines(databases[number], f"holder {number}").take(BASE, LONG_S))

    threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for database in databases:
        database.close()
    assert len(leases) == 4 and sum(lease is not None for lease in leases) == 1


def test_an_engine_that_lost_its_lease_writes_nothing(url: str, here: Engines, there: Engines, db: Database) -> None:
    model = "s:train:0"
    Models(db).create(NewModel(model, "s", "alice", BASE, LoraSpec(4)))
    request = NewFuture(f"{model}:1", "alice", "s", BASE, "optim_step", b"{}", model_id=model, seq_id=1)
    Futures(db).submit(request)
    stale = Database(url, fence(taken(here, 0.01)))
    time.sleep(0.05)
    current = Database(url, fence(taken(there)))
    cleaned: list[str] = []
    effects = [MODELS.update().values(reason="written by the stale one")]
    settlement = Settlement(request.request_id, b"stale", effects=effects, clean_up=lambda: cleaned.append("stale"))
    with pytest.raises(LeaseLostError, match="epoch 1"):
        Futures(stale).settle([settlement], {model: 1})
    with pytest.raises(LeaseLostError):
        Models(stale).covered(model, 1, "directory")
    assert Futures(db).outcome("alice", request.request_id) is None
    found = Models(db).find(model)
    assert found is not None and (found.reason, found.applied_seq_id, found.snapshot_seq_id) == (None, -1, None)
    assert cleaned == []
    Futures(current).settle([Settlement(request.request_id, b"current")], {model: 1})
    outcome = Futures(stale).outcome("alice", request.request_id)
    assert outcome is not None and outcome.body == b"current", "reading stays free"
    stale.close()
    current.close()


def test_a_lost_lease_is_no_failure_of_a_request() -> None:
    assert not issubclass(LeaseLostError, Exception)


@pytest.mark.parametrize("database_kind", [POSTGRES])
def test_a_take_over_waits_for_what_is_being_settled_and_a_renewal_does_not(
    url: str, here: Engines, there: Engines
) -> None:
    lease = taken(here, 0.01)
    time.sleep(0.05)
    settling = Database(url, fence(lease))
    epochs: list[int] = []
    taking = threading.Thread(target=lambda: epochs.append(taken(there).epoch))
    with settling.write() as connection:
        assert here.renew(lease, 0.0), "the lease is renewed while a transaction is open"
        taking.start()
        taking.join(0.3)
        assert taking.is_alive() and not epochs
        connection.execute(ENGINES.update().values(reason="settled"))
    taking.join(10)
    assert epochs == [lease.epoch + 1]
    with pytest.raises(LeaseLostError), settling.write() as connection:
        connection.execute(sa.text("SELECT 1"))
    settling.close()


def test_a_lease_is_renewed_however_long_a_step_takes_until_it_is_lost(here: Engines, there: Engines) -> None:
    lost = threading.Event()
    renewal = Renewal(here, taken(here, 0.3), 0.3, lost.set)
    time.sleep(0.8)
    assert there.take(BASE, LONG_S) is None and not lost.is_set()
    taken(here)  # as a take-over is: another epoch
    assert lost.wait(5)
    renewal.close()
