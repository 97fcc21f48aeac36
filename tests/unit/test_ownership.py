"""Owners of runs and requests: exclusive claims, visibility, and assignment of new runs."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from tinsmith.cluster.engines import Engines, Seat
from tinsmith.cluster.ownership import EngineRouter, Ownership, choose_engine
from tinsmith.cluster.routing import FRESH_S
from tinsmith.db.database import Database
from tinsmith.db.schema import MODELS
from tinsmith.store.futures import Futures, NewFuture, Settlement
from tinsmith.store.models import Models, NewModel, unload_statement
from tinsmith.store.sampling_sessions import NewSamplingSession, SamplingSessions
from tinsmith.types import LoraSpec

BASE = "local/tiny"
LONG_S = 60.0
RUN = "s:train:0"


@pytest.fixture
def one(db: Database) -> Ownership:
    return Ownership(db, BASE, "engine-one")


@pytest.fixture
def two(db: Database) -> Ownership:
    return Ownership(db, BASE, "engine-two")


def make_run(db: Database, model_id: str = RUN, engine_id: str | None = None) -> str:
    Models(db).create(NewModel(model_id, "s", "alice", BASE, LoraSpec(4), engine_id=engine_id))
    return model_id


def step(db: Database, model_id: str, seq_id: int) -> str:
    new = NewFuture(f"{model_id}:{seq_id}", "alice", "s", BASE, "optim_step", b"{}", model_id=model_id, seq_id=seq_id)
    return Futures(db).submit(new)


def sample(db: Database, sampler: str, seq_id: int, executor: str | None = None) -> str:
    new = NewFuture(f"{sampler}:{seq_id}", "alice", "s", BASE, "sample", b"{}", seq_id=seq_id)
    return Futures(db).submit(
        NewFuture(**{**vars_of(new), "sampling_session_id": sampler, "executor": executor})  # type: ignore[arg-type]
    )


def vars_of(new: NewFuture) -> dict[str, object]:
    return {name: getattr(new, name) for name in NewFuture.__dataclass_fields__}


def seen(ownership: Ownership) -> list[tuple[str, bool]]:
    return [(each.request.request_id, each.is_unassigned) for each in ownership.incoming(0)]


def test_a_claim_takes_the_run_with_all_its_requests(db: Database, one: Ownership, two: Ownership) -> None:
    first, second = step(db, make_run(db), 1), step(db, RUN, 2)
    assert seen(one) == seen(two) == [(first, True), (second, True)]
    assert one.claim([first]) == {first}
    assert seen(one) == [(first, False), (second, False)]
    assert seen(two) == [] and two.fetch_by_ids([first, second]) == [] and two.pending_ids() == set()
    assert two.claim([first, second]) == set()
    assert one.pending_ids() == {first, second}
    assert one.claim([first, second]) == {first, second}, "claiming what is one's own changes nothing"


def test_a_sample_of_a_runs_own_version_goes_with_the_run(db: Database, one: Ownership, two: Ownership) -> None:
    make_run(db, engine_id="engine-one")
    SamplingSessions(db).create(NewSamplingSession("s:sample:0", "s", "alice", BASE, version_id="v", model_id=RUN))
    asked = sample(db, "s:sample:0", 0)
    (found,) = one.incoming(0)
    assert (found.request.request_id, found.is_unassigned, found.run_id) == (asked, False, RUN)
    assert seen(two) == [] and two.claim([asked]) == set()
    with db.write() as connection:
        connection.execute(MODELS.update().values(engine_id=None))
    assert seen(two) == [(asked, True)]
    assert two.claim([asked]) == {asked}
    found_run = Models(db).find(RUN)
    assert found_run is not None and found_run.engine_id == "engine-two", "the run came with it"
    assert seen(one) == []


def test_a_sample_that_was_given_away_is_that_processes_alone(db: Database, one: Ownership, two: Ownership) -> None:
    make_run(db, engine_id="engine-one")
    samplers = SamplingSessions(db)
    samplers.create(NewSamplingSession("s:sample:0", "s", "alice", BASE, version_id="v", model_id=RUN))
    samplers.create(NewSamplingSession("s:sample:1", "s", "alice", BASE))
    of_run, of_base = sample(db, "s:sample:0", 0, "sampler-x"), sample(db, "s:sample:1", 0, "engine-two")
    free = sample(db, "s:sample:1", 1)
    assert seen(one) == [(free, True)]
    assert seen(two) == [(of_base, False), (free, True)]
    assert one.claim([of_run, of_base, free]) == {free}
    assert seen(two) == [(of_base, False)]


def test_a_sample_of_an_unloaded_run_can_be_claimed_by_any_engine(db: Database, one: Ownership, two: Ownership) -> None:
    make_run(db, engine_id="engine-one")
    SamplingSessions(db).create(NewSamplingSession("s:sample:0", "s", "alice", BASE, version_id="v", model_id=RUN))
    with db.write() as connection:
        connection.execute(unload_statement(RUN, "the client unloaded it"))
    asked = sample(db, "s:sample:0", 0)
    assert seen(one) == seen(two) == [(asked, True)]
    assert two.claim([asked]) == {asked}


def test_settled_requests_and_those_of_other_bases_are_not_claimed(db: Database, one: Ownership) -> None:
    done, other = step(db, make_run(db), 1), step(db, RUN, 2)
    Futures(db).settle([Settlement(done, b"{}")], {RUN: 1})
    assert seen(one) == [(other, True)]
    assert Ownership(db, "local/other", "engine-one").incoming(0) == []
    assert Ownership(db, "local/other", "engine-one").fetch_by_ids([other]) == []


def test_many_that_claim_at_once_get_each_run_once(database_url: str, db: Database) -> None:
    runs = [make_run(db, f"s:train:{number}") for number in range(24)]
    requests = [step(db, run, 1) for run in runs]
    claimed: dict[str, set[str]] = {}

    def claim(name: str, order: list[str]) -> None:
        mine = Database(database_url)
        ownership = Ownership(mine, BASE, name)
        got: set[str] = set()
        for _ in range(5):  # a row that another engine was claiming is free or owned at the next poll
            got |= ownership.claim(order)
        claimed[name] = got
        mine.close()

    orders = {"a": requests, "b": requests[::-1], "c": requests[12:] + requests[:12]}
    threads = [threading.Thread(target=claim, args=item) for item in orders.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one for got in claimed.values() for one in got) == sorted(requests)


def test_the_preferred_engine_is_the_same_for_all_and_moves_little() -> None:
    engines = ["a", "b", "c"]
    chosen = {run: choose_engine(run, engines) for run in map(str, range(900))}
    assert chosen == {run: choose_engine(run, engines[::-1]) for run in chosen}
    assert all(200 < count < 400 for count in Counter(chosen.values()).values())
    fewer = {run: choose_engine(run, ["a", "b"]) for run in chosen}
    assert all(fewer[run] == engine for run, engine in chosen.items() if engine != "c")


# Assignment of new work.


def made_ready(engines: Engines, index: int) -> str:
    seat = Seat(BASE, index=index)
    engines.take(seat, LONG_S)
    engines.set_state(seat, "ready")
    return engines.id_of(seat)


def test_new_runs_go_to_the_engine_with_the_fewest(db: Database) -> None:
    engines = Engines(db, "here")
    moment = [0.0]
    fleet = EngineRouter(db, lambda: moment[0])
    assert fleet.for_run(BASE) is None and fleet.for_sample(BASE, "r") is None
    busy, idle = made_ready(engines, 0), made_ready(engines, 1)
    engines.take(Seat(BASE, "sampler"), LONG_S)
    for number in range(3):
        make_run(db, f"s:train:{number}", busy)
    assert fleet.for_run(BASE) is None, "a view is good for a while"
    moment[0] += 2 * FRESH_S
    given = [fleet.for_run(BASE) for _ in range(5)]
    assert Counter(given) == {idle: 4, busy: 1} and given[:3] == [idle] * 3
    assert fleet.for_run("local/other") is None


def test_a_loading_engine_gets_work_only_while_there_is_no_other(db: Database) -> None:
    engines = Engines(db, "here")
    loading = Seat(BASE, index=5)
    engines.take(loading, LONG_S)
    assert EngineRouter(db).for_run(BASE) == engines.id_of(loading)
    ready = made_ready(engines, 0)
    assert {EngineRouter(db).for_run(BASE) for _ in range(3)} == {ready}
    engines.release(Seat(BASE), "stopped")
    assert EngineRouter(db).for_run(BASE) == engines.id_of(loading)


def test_samples_that_are_bound_to_no_run_are_spread(db: Database) -> None:
    engines = Engines(db, "here")
    ready = {made_ready(engines, index) for index in range(2)}
    futures = Futures(db, engine_for_sample=EngineRouter(db).for_sample)
    for number in range(32):
        futures.submit(NewFuture(f"s:sample:0:{number}", "alice", "s", BASE, "sample", b"{}"))
    bound = NewFuture("s:sample:1:0", "alice", "s", BASE, "sample", b"{}", run_id=RUN)
    given = NewFuture("s:sample:1:1", "alice", "s", BASE, "sample", b"{}", executor="sampler-x")
    for new in (bound, given):
        futures.submit(new)
    found = {name: Ownership(db, BASE, name).incoming(0) for name in ready}
    assert all(any(not each.is_unassigned for each in arrivals) for arrivals in found.values())
    assert {each.request.request_id for arrivals in found.values() for each in arrivals if each.is_unassigned} == {
        "s:sample:1:0"
    }
    assert sum(not each.is_unassigned for arrivals in found.values() for each in arrivals) == 32
