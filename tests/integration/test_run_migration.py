"""Idle runs migrate to an engine with far fewer runs: unchanged, one at a time, and not back and forth."""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from support import tiny_models
from support.engine_bench import BASE, OPTIM, SHAPE, Bench
from tinsmith.backends import Backend, Capture
from tinsmith.backends.fake import FakeBackend
from tinsmith.cluster.engines import Engines, Lease, LeaseLostError, Seat, fence
from tinsmith.cluster.ownership import Ownership
from tinsmith.db.database import Database, now
from tinsmith.db.factory import open_database
from tinsmith.db.schema import ENGINES, MODELS
from tinsmith.engine import queues
from tinsmith.engine.loop import Engine, Stores
from tinsmith.engine.snapshots import MAX_POLLS
from tinsmith.storage.directories import Directories
from tinsmith.store.custom_losses import CustomLosses
from tinsmith.store.futures import Futures, NewFuture, Settlement
from tinsmith.store.models import Models, NewModel
from tinsmith.store.sampling_sessions import NewSamplingSession, SamplingSessions
from tinsmith.types import LoraSpec

IDLE_S = 0.001
LONG_S = 60.0
RUN, OTHER = "s:train:0", "s:train:1"


# The choice of the run, the source and the target.


def ready(db: Database, index: int, kind: str = "engine") -> Lease:
    seat, engines = Seat(BASE, kind, index), Engines(db, "here")
    lease = engines.take(seat, LONG_S)
    engines.set_state(seat, "ready")
    with db.write() as connection:
        joined = ENGINES.update().where(ENGINES.c.engine_id == lease.engine_id)
        connection.execute(joined.values(started_at=now() - LONG_S))
    return lease


def as_seen_by(db: Database, lease: Lease, idle_s: float = IDLE_S) -> Ownership:
    return Ownership(db, BASE, lease.engine_id, idle_s)


def runs_of(db: Database, lease: Lease, count: int, idle_for_s: float = 1.0) -> list[str]:
    """Create runs of an engine; the first was used last."""
    names = [f"{lease.engine_id}:train:{index}" for index in range(count)]
    for age, name in enumerate(names):
        Models(db).create(NewModel(name, "s", "alice", BASE, LoraSpec(4), engine_id=lease.engine_id))
        with db.write() as connection:
            used = MODELS.update().where(MODELS.c.model_id == name)
            connection.execute(used.values(state="ready", last_request_at=now() - idle_for_s - age))
    return names


def counts(db: Database) -> list[int]:
    with db.read() as connection:
        return sorted(Counter(connection.scalars(sa.select(MODELS.c.engine_id))).values())


def test_runs_migrate_until_no_engine_has_two_fewer(db: Database) -> None:
    giver, second, third = (ready(db, index) for index in range(3))
    ready(db, 0, "sampler")
    runs = runs_of(db, giver, 7)
    runs_of(db, second, 1)
    ownership = as_seen_by(db, giver)
    moved_runs: list[str] = []
    while taker := ownership.migration_target():
        assert taker == third.engine_id if not moved_runs else taker in (second.engine_id, third.engine_id)
        moved_runs.append(ownership.idle_runs()[0])
        assert ownership.migrate(moved_runs[-1], taker)
    assert moved_runs == runs[:4], "those that were used last"
    assert counts(db) == [2, 3, 3]
    assert [as_seen_by(db, lease).migration_target() for lease in (giver, second, third)] == [None] * 3, (
        "nothing comes back"
    )


def test_an_engine_that_has_just_joined_or_is_not_there_gets_nothing(db: Database) -> None:
    giver, taker = ready(db, 0), ready(db, 1)
    (run, *_) = runs_of(db, giver, 4)
    assert as_seen_by(db, giver, 2 * LONG_S).migration_target() is None, "it joined a moment ago"
    assert as_seen_by(db, giver, 0).migration_target() is None, "it is turned off"
    ownership = as_seen_by(db, giver)
    assert ownership.migration_target() == taker.engine_id
    Engines(db, "here").set_state(Seat(BASE, index=1), "loading")
    assert ownership.migration_target() is None and not ownership.migrate(run, taker.engine_id)
    Engines(db, "here").release(Seat(BASE, index=1), "ready")
    assert ownership.migration_target() is None and not ownership.migrate(run, taker.engine_id), "the engine has ended"
    assert counts(db) == [4]


def test_a_run_with_work_or_without_rest_stays(db: Database) -> None:
    giver, taker = ready(db, 0), ready(db, 1)
    train_runs, sampled, quiet, late = runs_of(db, giver, 4)
    futures, samplers = Futures(db), SamplingSessions(db)
    pass_id = futures.submit(
        NewFuture(f"{train_runs}:1", "alice", "s", BASE, "optim_step", b"{}", model_id=train_runs, seq_id=1)
    )
    samplers.create(NewSamplingSession("s:sample:0", "s", "alice", BASE, version_id="v", model_id=sampled))
    drawn = futures.submit(
        NewFuture("s:sample:0:0", "alice", "s", BASE, "sample", b"{}", sampling_session_id="s:sample:0", seq_id=0)
    )
    with db.write() as connection:
        connection.execute(MODELS.update().where(MODELS.c.model_id == late).values(last_request_at=now() + LONG_S))
    ownership = as_seen_by(db, giver)
    assert ownership.idle_runs() == [quiet]
    assert [ownership.migrate(run, taker.engine_id) for run in (train_runs, sampled)] == [False, False]
    futures.settle([Settlement(pass_id, b"{}"), Settlement(drawn, b"{}")], {})
    assert ownership.idle_runs() == [train_runs, sampled, quiet]
    assert ownership.migrate(sampled, taker.engine_id)
    assert not ownership.migrate(sampled, taker.engine_id), "it is another's"
    assert as_seen_by(db, taker).idle_runs() == [sampled]


def test_missing_and_unusable_runs_are_not_migrated(db: Database) -> None:
    giver, taker = ready(db, 0), ready(db, 1)
    run, *_ = runs_of(db, giver, 3)
    ownership = as_seen_by(db, giver)
    for state in ("creating", "failed", "unloaded"):
        with db.write() as connection:
            connection.execute(MODELS.update().where(MODELS.c.model_id == run).values(state=state))
        assert run not in ownership.idle_runs() and not ownership.migrate(run, taker.engine_id)
    assert not ownership.migrate("s:train:nobody", taker.engine_id)


def test_an_engine_that_was_taken_for_dead_hands_nothing_over(db: Database, database_url: str) -> None:
    giver, taker = ready(db, 0), ready(db, 1)
    run, *_ = runs_of(db, giver, 4)
    fenced = open_database(database_url, fence(giver))
    Engines(db, "here").take(Seat(BASE), LONG_S)
    with pytest.raises(LeaseLostError):
        as_seen_by(fenced, giver).migrate(run, taker.engine_id)
    fenced.close()
    assert counts(db) == [4]


def test_several_that_give_to_one_at_the_same_time_do_not_give_too_much(db: Database, database_url: str) -> None:
    givers, taker = [ready(db, index) for index in range(3)], ready(db, 3)
    runs = {giver.engine_id: runs_of(db, giver, 6) for giver in givers}
    chosen = [as_seen_by(db, giver).migration_target() for giver in givers]
    assert chosen == [taker.engine_id] * 3

    def give(giver: Lease) -> None:
        database = open_database(database_url)
        ownership = as_seen_by(database, giver)
        for run in runs[giver.engine_id]:
            ownership.migrate(run, taker.engine_id)
        database.close()

    threads = [threading.Thread(target=give, args=(giver,)) for giver in givers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run_counts = counts(db)
    assert sum(run_counts) == 18 and max(run_counts) - min(run_counts) >= 0
    with db.read() as connection:
        num_taken = Counter(connection.scalars(sa.select(MODELS.c.engine_id)))[taker.engine_id]
    assert num_taken <= 5, "one that has as many as a giver gets none from it"


# Migration by the engines.


class Pair(Bench):
    """Two engines; the second starts at `joins`."""

    kind = "fake"

    def restart(self) -> None:
        if not hasattr(self, "shape"):
            self.shape = SHAPE
            if self.kind == "torch":
                self.shape = replace(tiny_models.make(self.directory / "tiny"), name=BASE)
            self.leases = [ready(self.db, 0)]
        self.engines: list[Engine] = []
        self.backends: list[Backend] = []
        for index in range(2):
            self.add(Engines(self.db, "here").id_of(Seat(BASE, index=index)))
        self.engine = self.engines[0]

    def add(self, engine_id: str) -> None:
        from tinsmith.backends.torch import TorchBackend

        backend = FakeBackend(self.shape) if self.kind == "fake" else TorchBackend(self.shape, device="cpu")
        versions, snapshots = (Directories(self.directory / name) for name in ("versions", "snapshots"))
        durable = (self.futures, self.models, self.samplers, self.checkpoints)
        ownership = Ownership(self.db, BASE, engine_id, IDLE_S)
        stores = Stores(*durable, versions, snapshots, CustomLosses(self.db), ownership)
        engine = Engine(self.shape, backend, stores, self.mailbox, self.settings)
        engine.start()
        self.engines.append(engine)
        self.backends.append(backend)

    def join(self) -> None:
        self.leases.append(ready(self.db, 1))

    def run_until_idle(self, count: int = 30) -> None:
        for _ in range(count):
            busy = False
            for engine in self.engines:
                engine._arrivals.fetch_late()
                busy = engine.run_once(0.0) or engine.run_once(0.0) or busy
                engine.flush()
            if not busy:
                return

    def create_owned_run(self, model_id: str) -> str:
        self.models.create(NewModel(model_id, "s", "alice", BASE, LoraSpec(4, 1), engine_id=self.leases[0].engine_id))
        self.submit(model_id, 0, "create_model", {})
        self.run_until_idle()
        return model_id

    def owner(self, model_id: str = RUN) -> int:
        model = self.models.find(model_id)
        assert model is not None
        return [lease.engine_id for lease in self.leases].index(model.engine_id or "")

    def look(self, index: int = 0) -> None:
        """Run an engine's migration check, and wait for the snapshots that it began."""
        self.engines[index]._migration.poll()
        self.engines[index].flush()


@pytest.fixture(params=["fake", "torch"])
def pair(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    # The batching window would make the steps, and so the last bits of results, depend on this machine's speed.
    monkeypatch.setattr(queues, "MAX_HOLD_S", 0.0)
    with tempfile.TemporaryDirectory(prefix="tn-") as sockets:
        new_pair = type("Pair", (Pair,), {"kind": request.param})(tmp_path, Path(sockets))
        yield new_pair
        new_pair.close()


def train_runs(pair: Pair, runs: list[str], move_at: int | None) -> list[bytes | None]:
    """Train some runs for ten steps, with a pending gradient, a version and an in-flight version at one step."""
    request_ids: list[str] = []
    published: list[str] = []
    for step in range(10):
        for run in runs:
            first = 4 * step + 1
            request_ids.append(pair.train(run, first, (step + 1, 2, 3)))
            pair.run_until_idle()
            if run == runs[0]:
                published.append(pair.publish(run, first + 1, step, "snapshot" if step % 2 else "inflight"))
                pair.run_until_idle()
            else:
                request_ids.append(pair.forward(run, first + 1))
            if step == move_at and run == runs[0]:
                move_run(pair, run)
            request_ids.append(pair.train(run, first + 2, (7, step, 9)))
            request_ids.append(pair.submit(run, first + 3, "optim_step", {**OPTIM}))
            pair.run_until_idle()
        request_ids += [pair.sample(session, step) for session in published[-3:]]
        pair.run_until_idle()
    return [
        outcome.body for request_id in request_ids if (outcome := pair.outcome(request_id)) and outcome.error is None
    ]


def move_run(pair: Pair, run: str) -> None:
    pair.join()
    for _ in range(5):
        pair.look()
        if pair.owner(run) == 1:
            break
    assert pair.owner(run) == 1
    assert not pair.backends[0].has_model(run)


@pytest.mark.matrix(1)
def test_ten_steps_with_a_move_in_the_middle_are_ten_steps_bit_for_bit(pair: Pair, tmp_path: Path) -> None:
    runs = [pair.create_owned_run(RUN), pair.create_owned_run(OTHER)]
    disturbed = train_runs(pair, runs, move_at=5)
    assert (pair.owner(RUN), pair.owner(OTHER)) == (1, 0)
    with tempfile.TemporaryDirectory(prefix="tn-") as sockets:
        (tmp_path / "calm").mkdir()
        calm = type(pair)(tmp_path / "calm", Path(sockets))
        runs = [calm.create_owned_run(RUN), calm.create_owned_run(OTHER)]
        undisturbed = train_runs(calm, runs, move_at=None)
        calm.close()
    assert len(undisturbed) == 10 * 7 + 27
    assert disturbed == undisturbed


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="tn-") as sockets:
        new_pair = Pair(tmp_path, Path(sockets))
        yield new_pair
        new_pair.close()


def count_steps_after_one_more(pair: Pair, run: str, seq_id: int) -> float:
    """Take one more optimizer step on any engine; return the run's step count."""
    pair.train(run, seq_id)
    request_id = pair.step(run, seq_id + 1)
    pair.run_until_idle()
    return pair.optimizer_step(request_id)


def test_at_each_look_one_run_moves_and_then_none(fakes: Pair) -> None:
    runs = [fakes.create_owned_run(f"s:train:{run_index}") for run_index in range(6)]
    assert [count_steps_after_one_more(fakes, run, 1) for run in runs] == [1] * 6
    fakes.join()
    spread = []
    for _ in range(10):
        fakes.look(0)
        fakes.look(1)
        spread.append([fakes.owner(run) for run in runs].count(1))
    assert all(after - before in (0, 1) for before, after in zip([0, *spread], spread, strict=False))
    assert spread[-3:] == [3] * 3, "then they are spread evenly, and stay"
    assert sum(fakes.backends[index].has_model(run) for index in range(2) for run in runs) == 3, "the others are files"
    for index in range(2):
        owned_runs = {run for run in runs if fakes.owner(run) == index}
        assert fakes.engines[index]._snapshots._resident.keys() == (owned_runs if index == 0 else set())
    assert [count_steps_after_one_more(fakes, run, 3) for run in runs] == [2] * 6
    Engines(fakes.db, "here").release(Seat(BASE, index=1), "lost")
    fakes.engines.pop()
    assert [count_steps_after_one_more(fakes, run, 5) for run in runs] == [3] * 6, "those that went and came back, too"


def test_a_run_that_wakes_while_it_is_written_stays(fakes: Pair) -> None:
    runs = [fakes.create_owned_run(RUN), fakes.create_owned_run(OTHER)]
    assert count_steps_after_one_more(fakes, OTHER, 1) == count_steps_after_one_more(fakes, RUN, 1) == 1
    fakes.join()
    fakes.look()  # the one that was used last is written
    fakes.train(RUN, 3)
    fakes.look()
    assert [fakes.owner(run) for run in runs] == [0, 0]
    fakes.run_until_idle()
    assert fakes.owner(RUN) == 0
    request_id = fakes.step(RUN, 4)
    fakes.run_until_idle()
    assert fakes.optimizer_step(request_id) == 2


def test_a_run_that_cannot_be_written_stays_and_another_goes(fakes: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [fakes.create_owned_run(OTHER), fakes.create_owned_run(RUN)]
    assert [count_steps_after_one_more(fakes, run, 1) for run in runs] == [1, 1]
    original_capture = fakes.backends[0].capture

    def capture(model_id: str) -> Capture:
        captured = original_capture(model_id)
        return replace(captured, write=full) if model_id == RUN else captured

    def full(_directory: Path) -> None:
        raise OSError("no space left on the device")

    monkeypatch.setattr(fakes.backends[0], "capture", capture)
    fakes.join()
    for _ in range(MAX_POLLS):
        fakes.look()
    assert [fakes.owner(run) for run in runs] == [0, 0]
    for _ in range(3):
        fakes.look()
    assert [fakes.owner(run) for run in runs] == [1, 0]
    assert [count_steps_after_one_more(fakes, run, 3) for run in runs] == [2, 2]


def test_a_version_that_is_written_apart_is_waited_for(fakes: Pair) -> None:
    fakes.create_owned_run(OTHER)
    run = fakes.create_owned_run(RUN)
    session = fakes.publish(run, 1, 0)
    fakes.run_until_idle()
    fakes.look()
    fakes.engines[0]._versions._written.clear()  # as if it had a later snapshot
    fakes.join()
    fakes.look()
    assert fakes.owner(run) == 0
    fakes.look()
    assert fakes.owner(run) == 1
    request_id = fakes.sample(session)
    fakes.run_until_idle()
    outcome = fakes.outcome(request_id)
    assert outcome is not None and outcome.error is None
