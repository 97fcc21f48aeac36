"""Owners of runs and requests: exclusive claims, visibility, and assignment of new runs."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from tinsmith.cluster.engines import Engines, Seat
from tinsmith.cluster.ownership import EngineRouter, Ownership, choose_engine
from tinsmith.cluster.routing import FRESH_S
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database
from tinsmith.db.schema import MODELS
from tinsmith.store.futures import Futures, NewFuture, Settlement
from tinsmith.store.models import Models, NewModel, unload_statement
from tinsmith.store.sampling_sessions import NewSamplingSession, SamplingSessions
from tinsmith.types import LoraSpec

BASE = "local/tiny"
LONG_S = 60.0
RUN = "s:train:0"


@pytest.fixture
def first_owner(db: Database) -> Ownership:
    return Ownership(db, BASE, "engine-one")


@pytest.fixture
def second_owner(db: Database) -> Ownership:
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


def list_incoming(ownership: Ownership) -> list[tuple[str, bool]]:
    return [(arrival.request.request_id, arrival.is_unassigned) for arrival in ownership.incoming(0)]


def test_a_claim_takes_the_run_with_all_its_requests(
    db: Database, first_owner: Ownership, second_owner: Ownership
) -> None:
    first, second = step(db, make_run(db), 1), step(db, RUN, 2)
    assert list_incoming(first_owner) == list_incoming(second_owner) == [(first, True), (second, True)]
    assert first_owner.claim([first]) == {first}
    assert list_incoming(first_owner) == [(first, False), (second, False)]
    assert (
        list_incoming(second_owner) == []
        and second_owner.fetch_by_ids([first, second]) == []
        and second_owner.pending_ids() == set()
    )
    assert second_owner.claim([first, second]) == set()
    assert first_owner.pending_ids() == {first, second}
    assert first_owner.claim([first, second]) == {first, second}, "claiming what is one's own changes nothing"


def test_a_sample_of_a_runs_own_version_goes_with_the_run(
    db: Database, first_owner: Ownership, second_owner: Ownership
) -> None:
    make_run(db, engine_id="engine-one")
    SamplingSessions(db).create(NewSamplingSession("s:sample:0", "s", "alice", BASE, version_id="v", model_id=RUN))
    request_id = sample(db, "s:sample:0", 0)
    (arrival,) = first_owner.incoming(0)
    assert (arrival.request.request_id, arrival.is_unassigned, arrival.run_id) == (request_id, False, RUN)
    assert list_incoming(second_owner) == [] and second_owner.claim([request_id]) == set()
    with db.write() as connection:
        connection.execute(MODELS.update().values(engine_id=None))
    assert list_incoming(second_owner) == [(request_id, True)]
    assert second_owner.claim([request_id]) == {request_id}
    found_run = Models(db).find(RUN)
    assert found_run is not None and found_run.engine_id == "engine-two", "the run came with it"
    assert list_incoming(first_owner) == []


def test_a_sample_that_was_given_away_is_that_processes_alone(
    db: Database, first_owner: Ownership, second_owner: Ownership
) -> None:
    make_run(db, engine_id="engine-one")
    samplers = SamplingSessions(db)
    samplers.create(NewSamplingSession("s:sample:0", "s", "alice", BASE, version_id="v", model_id=RUN))
    samplers.create(NewSamplingSession("s:sample:1", "s", "alice", BASE))
    of_run, of_base = sample(db, "s:sample:0", 0, "sampler-x"), sample(db, "s:sample:1", 0, "engine-two")
    free = sample(db, "s:sample:1", 1)
    assert list_incoming(first_owner) == [(free, True)]
    assert list_incoming(second_owner) == [(of_base, False), (free, True)]
    assert first_owner.claim([of_run, of_base, free]) == {free}
    assert list_incoming(second_owner) == [(of_base, False)]


def test_a_sample_of_an_unloaded_run_can_be_claimed_by_any_engine(
    db: Database, first_owner: Ownership, second_owner: Ownership
) -> None:
    make_run(db, engine_id="engine-one")
    SamplingSessions(db).create(NewSamplingSession("s:sample:0", "s", "alice", BASE, version_id="v", model_id=RUN))
    with db.write() as connection:
        connection.execute(unload_statement(RUN, "the client unloaded it"))
    request_id = sample(db, "s:sample:0", 0)
    assert list_incoming(first_owner) == list_incoming(second_owner) == [(request_id, True)]
    assert second_owner.claim([request_id]) == {request_id}


def test_settled_requests_and_those_of_other_bases_are_not_claimed(db: Database, first_owner: Ownership) -> None:
    settled, pending_step = step(db, make_run(db), 1), step(db, RUN, 2)
    Futures(db).settle([Settlement(settled, b"{}")], {RUN: 1})
    assert list_incoming(first_owner) == [(pending_step, True)]
    assert Ownership(db, "local/other", "engine-one").incoming(0) == []
    assert Ownership(db, "local/other", "engine-one").fetch_by_ids([pending_step]) == []


def test_many_that_claim_at_once_get_each_run_once(database_url: str, db: Database) -> None:
    runs = [make_run(db, f"s:train:{index}") for index in range(24)]
    requests = [step(db, run, 1) for run in runs]
    claimed: dict[str, set[str]] = {}

    def claim(name: str, order: list[str]) -> None:
        database = open_database(database_url)
        ownership = Ownership(database, BASE, name)
        got: set[str] = set()
        for _ in range(5):  # a row that another engine was claiming is free or owned at the next poll
            got |= ownership.claim(order)
        claimed[name] = got
        database.close()

    orders = {"a": requests, "b": requests[::-1], "c": requests[12:] + requests[:12]}
    threads = [threading.Thread(target=claim, args=item) for item in orders.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(request_id for got in claimed.values() for request_id in got) == sorted(requests)


def test_the_preferred_engine_is_the_same_for_all_and_moves_little() -> None:
    engines = ["a", "b", "c"]
    chosen = {run: choose_engine(run, engines) for run in map(str, range(900))}
    assert chosen == {run: choose_engine(run, engines[::-1]) for run in chosen}
    assert all(200 < count < 400 for count in Counter(chosen.values()).values())
    fewer = {run: choose_engine(run, ["a", "b"]) for run in chosen}
    assert all(fewer[run] == engine for run, engine in chosen.items() if engine != "c")


# Assignment of new work.


def start_engine(engines: Engines, index: int) -> str:
    seat = Seat(BASE, index=index)
    engines.take(seat, LONG_S)
    engines.set_state(seat, "ready")
    return engines.id_of(seat)


def test_new_runs_go_to_the_engine_with_the_fewest(db: Database) -> None:
    engines = Engines(db, "here")
    clock = [0.0]
    fleet = EngineRouter(db, lambda: clock[0])
    assert fleet.for_run(BASE) is None and fleet.for_sample(BASE, "r") is None
    busy, idle = start_engine(engines, 0), start_engine(engines, 1)
    engines.take(Seat(BASE, "sampler"), LONG_S)
    for index in range(3):
        make_run(db, f"s:train:{index}", busy)
    assert fleet.for_run(BASE) is None, "a view is good for a while"
    clock[0] += 2 * FRESH_S
    choices = [fleet.for_run(BASE) for _ in range(5)]
    assert Counter(choices) == {idle: 4, busy: 1} and choices[:3] == [idle] * 3
    assert fleet.for_run("local/other") is None


def test_a_loading_engine_gets_work_only_while_there_is_no_other(db: Database) -> None:
    engines = Engines(db, "here")
    loading = Seat(BASE, index=5)
    engines.take(loading, LONG_S)
    assert EngineRouter(db).for_run(BASE) == engines.id_of(loading)
    ready = start_engine(engines, 0)
    assert {EngineRouter(db).for_run(BASE) for _ in range(3)} == {ready}
    engines.release(Seat(BASE), "stopped")
    assert EngineRouter(db).for_run(BASE) == engines.id_of(loading)


def test_samples_that_are_bound_to_no_run_are_spread(db: Database) -> None:
    engines = Engines(db, "here")
    ready = {start_engine(engines, index) for index in range(2)}
    futures = Futures(db, engine_for_sample=EngineRouter(db).for_sample)
    for seq_id in range(32):
        futures.submit(NewFuture(f"s:sample:0:{seq_id}", "alice", "s", BASE, "sample", b"{}"))
    bound = NewFuture("s:sample:1:0", "alice", "s", BASE, "sample", b"{}", run_id=RUN)
    assigned = NewFuture("s:sample:1:1", "alice", "s", BASE, "sample", b"{}", executor="sampler-x")
    for new in (bound, assigned):
        futures.submit(new)
    arrivals_by_engine = {name: Ownership(db, BASE, name).incoming(0) for name in ready}
    assert all(any(not arrival.is_unassigned for arrival in arrivals) for arrivals in arrivals_by_engine.values())
    assert {
        arrival.request.request_id
        for arrivals in arrivals_by_engine.values()
        for arrival in arrivals
        if arrival.is_unassigned
    } == {"s:sample:1:0"}
    assert sum(not arrival.is_unassigned for arrivals in arrivals_by_engine.values() for arrival in arrivals) == 32
