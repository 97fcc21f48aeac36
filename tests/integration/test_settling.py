"""Finished requests are settled exactly once under database errors: nothing is lost or repeated."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import exc

import tinsmith.engine.loop as engine_module
from support.databases import fresh_url
from support.engine_bench import BASE, ENGINE, SHAPE, Bench
from support.faulty_database import WRITING, Fails, FaultyDatabase, TransactionPoint, connection_error, never
from tinsmith.backends.fake import FakeBackend
from tinsmith.cluster.engines import LeaseLostError
from tinsmith.cluster.executors import DedicatedSamplers, Executors
from tinsmith.cluster.ownership import Ownership
from tinsmith.db.schema import AUDIT, CHECKPOINTS, CURVE_POINTS, ENGINES, FUTURES
from tinsmith.engine import sampler_loop as sampler_module
from tinsmith.engine import settling
from tinsmith.engine.__main__ import open_stores
from tinsmith.engine.faults import EngineFaultError
from tinsmith.engine.sampler_loop import SamplerEngine
from tinsmith.engine.settling import IterationFailedError
from tinsmith.engine.transfer import VersionFetcher, VersionSources
from tinsmith.errors import UserError
from tinsmith.settings import Settings
from tinsmith.store.futures import FutureOutcome, Settlement
from tinsmith.store.models import NewModel
from tinsmith.store.sampling_sessions import NewSamplingSession
from tinsmith.types import LoraSpec

ONE, TWO = "s:train:0", "s:train:1"
SESSION = "s:sample:9"
"""A sampling session of the base model."""
STRIDE = 12
"""Transactions that fail in one run."""

KINDS = ("pass", "optim_step", "create", "save", "sample", "cancel", "unload", "gone", "far")


class FaultyBench(Bench):
    db: FaultyDatabase

    def open_database(self, url: str) -> FaultyDatabase:
        return FaultyDatabase(url)

    def pending(self) -> list[str]:
        """Pending requests; this read is not counted as a transaction."""
        with self.db.engine.connect() as connection:
            return list(connection.scalars(sa.select(FUTURES.c.request_id).where(FUTURES.c.state == "pending")))

    def run(self, most_turns: int = 300) -> None:
        """Run as the engine's process does, until nothing is pending."""
        turns = iter(range(most_turns))

        def stopping() -> bool:
            assert next(turns, None) is not None, f"not settled: {self.pending()}"
            return not (self.pending() or self.engine._queues.request_ids)

        try:
            self.engine.run(stopping)
        except exc.SQLAlchemyError:
            if not stopping():  # otherwise all is settled, and a stopping engine does not wait for the database
                raise

    def base_sampler(self, name: str = SESSION, version: str | None = None) -> str:
        self.samplers.create(NewSamplingSession(name, "s", "alice", BASE, version_id=version))
        return name

    def end_of(self, request_id: str) -> FutureOutcome:
        outcome = self.outcome(request_id)
        assert outcome is not None
        return outcome

    def read_settled(self) -> dict[str, tuple[str, str | None]]:
        with self.db.engine.connect() as connection:
            rows = connection.execute(sa.select(FUTURES.c.request_id, FUTURES.c.state, FUTURES.c.error)).all()
        return {row.request_id: (row.state, row.error) for row in rows}


@pytest.fixture
def bench(tmp_path: Path, database_kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyBench]:
    monkeypatch.setattr(engine_module, "SAFETY_POLL_S", 0.05)
    monkeypatch.setattr(settling, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(settling, "LONGEST_PAUSE_S", 0.01)
    with tempfile.TemporaryDirectory(prefix="tn-") as sockets:
        new_bench = FaultyBench(tmp_path, Path(sockets), fresh_url(tmp_path, database_kind))
        yield new_bench
        new_bench.db.reset()
        new_bench.close()


def new_model(model_id: str) -> NewModel:
    return NewModel(model_id, model_id.partition(":")[0], "alice", BASE, LoraSpec(4))


def gradient(bench: Bench, request_id: str) -> float:
    metrics = bench.result(request_id)["metrics"]
    assert isinstance(metrics, dict)
    return metrics["grad_norm"]


def at_settlement(bench: FaultyBench, point: TransactionPoint, error: BaseException | None = None) -> None:
    """The next settlement fails once, at `moment` of its transaction."""
    original = bench.futures.settle

    def settle(settlements: list[Settlement], applied: dict[str, int]) -> None:
        bench.futures.settle = original  # type: ignore[method-assign]
        bench.db.fail_once(point, error=error)
        original(settlements, applied)

    bench.futures.settle = settle  # type: ignore[method-assign]


# One error at each place where an engine settles.


@pytest.mark.matrix(4)
@pytest.mark.parametrize("point", WRITING)
@pytest.mark.parametrize("packed", [False, True])
def test_a_sample_that_ends_within_a_training_step_fails_neither_itself_nor_the_step(
    bench: FaultyBench, packed: bool, point: TransactionPoint
) -> None:
    bench.model(ONE)
    bench.model(TWO)
    sampler = bench.base_sampler()
    bench.train(ONE, 1)
    if packed:
        bench.train(TWO, 1)
    step, sample = bench.step(ONE, 2), bench.sample(sampler)
    bench.engine._arrivals.fetch()
    bench.engine._sampling._admit(bench.engine._queues)  # it runs in the sampler and ends in this step
    at_settlement(bench, point)
    bench.run()
    assert bench.db.raised == 1
    assert gradient(bench, step) == 1.125, "the gradient of one pass, neither lost nor applied twice"
    assert bench.optimizer_step(step) == 1
    assert bench.end_of(sample).body is not None
    assert {state for state, _ in bench.read_settled().values()} == {"done"}


@pytest.mark.parametrize("point", WRITING)
def test_a_sample_that_ends_within_a_replay_does_not_lose_the_model(
    bench: FaultyBench, point: TransactionPoint
) -> None:
    bench.model(ONE)
    bench.train(ONE, 1)
    bench.run_until_idle()
    sampler = bench.base_sampler()
    bench.restart()
    step, sample = bench.step(ONE, 2), bench.sample(sampler)
    bench.engine._arrivals.fetch()
    bench.engine._sampling._admit(bench.engine._queues)
    at_settlement(bench, point)
    bench.run()
    assert gradient(bench, step) == 1.125
    assert bench.end_of(sample).body is not None


@pytest.mark.matrix(12)
@pytest.mark.parametrize("point", WRITING)
@pytest.mark.parametrize("kind", ["pass", "optim_step", "create", "save", "sample", "cancel", "unload", "gone", "far"])
def test_finished_requests_are_settled_once_without_a_restart(
    bench: FaultyBench, kind: str, point: TransactionPoint
) -> None:
    if kind != "create":
        bench.model(ONE)
    if kind == "far":  # uploads are settled when they have finished
        bench.engine._operations._checkpoints.files.is_remote = True
    requests: dict[str, Callable[[], str]] = {
        "pass": lambda: bench.train(ONE, 1),
        "optim_step": lambda: bench.step(ONE, 1),
        "create": lambda: bench.submit(ONE, 0, "create_model", {}),
        "save": lambda: bench.submit(ONE, 1, "save_weights", {"path": "one"}),
        "far": lambda: bench.submit(ONE, 1, "save_weights", {"path": "one"}),
        "sample": lambda: bench.sample(bench.base_sampler()),
        "cancel": lambda: bench.sample(bench.base_sampler()),
        "unload": lambda: bench.submit(ONE, None, "unload_model", {"reason": "enough"}),
        "gone": lambda: bench.step(ONE, 1),
    }
    if kind == "create":
        bench.models.create(new_model(ONE))
    if kind == "gone":
        bench.submit(ONE, None, "unload_model", {"reason": "enough"})
        bench.run_until_idle()
    request = requests[kind]()
    if kind == "cancel":
        bench.futures.cancel("alice", request, "not wanted")
    engine = bench.engine
    at_settlement(bench, point)
    bench.run()
    assert bench.db.raised == 1 and bench.engine is engine
    outcome = bench.end_of(request)
    if kind in ("cancel", "gone"):
        assert outcome.error in ("not wanted", "model 's:train:0' was unloaded: enough")
    else:
        assert outcome.error is None and outcome.body is not None
    names = {"pass": "forward_backward", "optim_step": "optim_step", "create": "create_model"}
    if kind in names:
        follow_up = bench.step(ONE, 2 if kind != "create" else 1)
        bench.run()
        assert bench.optimizer_step(follow_up) == (2 if kind == "optim_step" else 1)
        assert gradient(bench, follow_up) == (1.125 if kind == "pass" else 0.0)
    if kind == "optim_step":
        assert bench.scalar(sa.select(sa.func.count()).select_from(CURVE_POINTS)) == 2
    if kind in ("save", "far"):
        assert bench.scalar(sa.select(CHECKPOINTS.c.state)) == "completed"
    if kind == "unload":
        unloaded = sa.select(sa.func.count()).select_from(AUDIT).where(AUDIT.c.event == "model_unloaded")
        assert bench.scalar(unloaded) == 1


# One error at every transaction of an engine.


class Workload:
    """Requests of one session. Each half is sent before the engine polls."""

    def __init__(self, bench: FaultyBench, name: str) -> None:
        self._bench = bench
        self._name = name
        self._first, self._second, self._base = f"{name}:train:0", f"{name}:train:1", f"{name}:sample:9"
        self._requests: list[str] = []
        self._cancelled = ""

    def first_half(self) -> None:
        bench, first, second = self._bench, self._first, self._second
        for model_id in (first, second):
            bench.models.create(new_model(model_id))
            bench.submit(model_id, 0, "create_model", {})
        bench.samplers.create(NewSamplingSession(self._base, self._name, "alice", BASE, version_id=None))
        self._requests += [
            bench.train(first, 1, (1, 2, 3)),
            bench.train(second, 1, (6,)),
            bench.train(first, 2, (4, 5)),
            bench.step(first, 3),
            bench.step(second, 2),
            bench.sample(self._base, 0),
            bench.sample(self._base, 1),
            bench.submit(first, 4, "save_weights_for_sampler", {"sampling_session_seq_id": 1, "kind": "snapshot"}),
            bench.submit(first, 5, "save_weights", {"path": "one"}),
        ]

    def second_half(self) -> None:
        bench, first, second = self._bench, self._first, self._second
        self._requests += [
            bench.sample(f"{self._name}:sample:1", 0),
            bench.submit(first, 6, "load_weights", {"path": f"tinker://{first}/weights/one", "optimizer": True}),
            bench.train(first, 7, (3, 3)),
            bench.step(first, 8),
            bench.submit(second, None, "unload_model", {"reason": "enough"}),
        ]
        self._cancelled = bench.sample(self._base, 2)
        bench.futures.cancel("alice", self._cancelled, "not wanted")

    def results(self) -> list[tuple[bytes | None, str | None]]:
        """The answers, and the number of writes of their effects, without this workload's name."""
        outcomes = [self._bench.outcome(request) for request in self._requests]
        name = self._name.encode()
        results_so_far = [
            (outcome.body and outcome.body.replace(name, b"NAME"), outcome.error) for outcome in outcomes if outcome
        ]
        cancelled = self._bench.outcome(self._cancelled)
        # The sample may have finished before its cancellation was read.
        assert cancelled is not None and cancelled.error in (None, "not wanted")
        with self._bench.db.engine.connect() as connection:
            points = connection.scalar(
                sa.select(sa.func.count()).where(CURVE_POINTS.c.model_id.startswith(f"{self._name}:"))
            )
            entries = connection.scalars(sa.select(AUDIT.c.details).where(AUDIT.c.tenant_id == "alice")).all()
        run_entries = [entry for entry in entries if entry["model_id"].startswith(f"{self._name}:")]
        return [*results_so_far, (None, f"{points} points, {len(run_entries)} entries")]


def run_workload(bench: FaultyBench, name: str, fails: Fails = never) -> tuple[Workload, int]:
    """Run a workload; also return the number of engine restarts. Submissions do not fail."""
    workload, restarts = Workload(bench, name), 0
    counts: dict[TransactionPoint, int] | None = None
    for submit in (workload.first_half, workload.second_half):
        bench.db.reset()
        submit()
        bench.db.reset(fails, counts)
        while bench.pending():
            try:
                bench.run()
            except (exc.SQLAlchemyError, IterationFailedError):
                restarts += 1
                bench.restart()
        counts = bench.db.counts
    bench.db.reset(counts=counts)
    return workload, restarts


@pytest.mark.extended
@pytest.mark.parametrize("point", ["read", *WRITING])
def test_an_error_at_any_transaction_of_an_engine_changes_no_result(
    bench: FaultyBench, point: TransactionPoint
) -> None:
    run_workload(bench, "warm-up")
    undisturbed, _ = run_workload(bench, "plain-000")  # results have names, and the lengths of names
    expected = undisturbed.results()
    assert all(error is None for _, error in expected[:-1]) and bench.db.counts[point] > 20
    for first in range(STRIDE):
        fails = partial(failing_every, point, first)
        workload, restarts = run_workload(bench, f"work-{first:04}", fails)
        assert workload.results() == expected, f"{point}, every {STRIDE} from {first}"
        assert restarts == 0, f"{point}, every {STRIDE} from {first}"
    assert not [error for _, error in bench.read_settled().values() if error and "UPDATE" in error]


def failing_every(point: TransactionPoint, first: int, at: TransactionPoint, count: int) -> BaseException | None:
    return connection_error() if at == point and count % STRIDE == first else None


# Permanent errors, and errors outside of the database.


@pytest.mark.matrix(1)
def test_a_database_that_is_away_for_long_costs_neither_results_nor_a_restart(bench: FaultyBench) -> None:
    workload = Workload(bench, "interrupted")
    workload.first_half()
    bench.db.reset(lambda _point, count: connection_error() if 5 < count < 25 else None)
    bench.run()
    bench.db.reset()
    workload.second_half()
    bench.db.reset(lambda _point, count: connection_error() if 5 < count < 25 else None)
    bench.run()
    assert bench.db.raised > 10
    bench.db.reset()
    undisturbed, _ = run_workload(bench, "undisturbed")
    assert workload.results() == undisturbed.results()


@pytest.mark.matrix(3)
@pytest.mark.parametrize("during", ["a step", "a replay"])
@pytest.mark.parametrize(
    "error",
    [
        exc.IntegrityError("INSERT INTO results", {}, Exception("duplicate key")),
        ValueError("a result that cannot be written"),
        LeaseLostError("another engine has taken over"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_settlement_that_cannot_succeed_ends_the_engine_and_its_successor_finishes(
    bench: FaultyBench, error: BaseException, during: str
) -> None:
    bench.model(ONE)
    sampler = bench.base_sampler()
    trained = bench.train(ONE, 1)
    if during == "a replay":
        bench.run_until_idle()
        bench.restart()
    step, sample = bench.step(ONE, 2), bench.sample(sampler)
    bench.engine._arrivals.fetch()
    bench.engine._sampling._admit(bench.engine._queues)
    at_settlement(bench, "uncommitted", error)
    with pytest.raises((IterationFailedError, EngineFaultError, LeaseLostError)) as raised:
        bench.run()
    assert error in (raised.value, raised.value.__cause__)
    assert bench.outcome(step) is None and bench.outcome(sample) is None
    assert (bench.outcome(trained) is None) == (during == "a step")
    bench.restart()
    bench.run()
    assert gradient(bench, step) == 1.125
    assert {state for state, _ in bench.read_settled().values()} == {"done"}


def test_an_engine_that_is_told_to_stop_does_not_wait_for_the_database(bench: FaultyBench) -> None:
    bench.model(ONE)
    trained = bench.train(ONE, 1)
    original, stop_answers = bench.futures.settle, iter([False, False, False])

    def settle(_settlements: list[Settlement], _applied: dict[str, int]) -> None:
        raise connection_error()

    bench.futures.settle = settle  # type: ignore[method-assign]
    with pytest.raises(IterationFailedError):
        bench.engine.run(lambda: next(stop_answers, True))
    bench.futures.settle = original  # type: ignore[method-assign]
    bench.restart()
    step = bench.step(ONE, 2)
    bench.run()
    assert gradient(bench, step) == 1.125 and bench.end_of(trained).error is None


def test_kept_settlements_are_not_retried_at_every_step(bench: FaultyBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "FIRST_PAUSE_S", 60.0)
    sampler = bench.base_sampler()
    samples = [bench.sample(sampler, seq_id) for seq_id in range(3)]
    bench.engine._arrivals.fetch()
    bench.engine._outbox._pause_s = 60.0
    bench.engine._sampling._admit(bench.engine._queues)
    bench.db.reset(lambda point, _count: connection_error() if point == "begin" else None)
    for _ in samples:
        bench.engine._sampling.decode_during_step(0.0)
    assert bench.db.raised == 1, "a training step must not wait for a database that is away at each micro-batch"
    bench.db.reset()
    bench.run()
    assert [bench.end_of(sample).error for sample in samples] == [None] * 3


def test_errors_with_unstorable_text_are_reported(bench: FaultyBench) -> None:
    request = bench.sample(bench.base_sampler())
    bench.futures.settle([Settlement(request, error=UserError("a\0b \ud800"))], {})
    assert bench.end_of(request).error == "a\\x00b \\ud800"


# Dedicated samplers.


class SamplerBench(FaultyBench):
    """A Bench with a dedicated sampler instead of an engine."""

    def restart(self) -> None:
        self.backend = FakeBackend(SHAPE)
        ownership = Ownership(self.db, BASE, ENGINE)
        settings = Settings(data_dir=self.directory, storage_dir=str(self.directory))
        stores = open_stores(self.db, settings, ownership)
        self.futures = stores.futures
        executors = Executors(self.db)
        sources = VersionSources(executors, stores.samplers, stores.checkpoints, stores.versions, b"")
        self.fetcher = VersionFetcher(sources, self.directory / "fetched")
        self.engine = SamplerEngine(
            (SHAPE, ENGINE), self.backend, stores, executors, self.mailbox, self.fetcher, settings, 2**20
        )

    def give(self) -> None:
        with self.db.engine.begin() as connection:
            connection.execute(FUTURES.update().values(executor=ENGINE))

    def close(self) -> None:
        self.fetcher.close()
        super().close()


@pytest.fixture
def sampler_bench(tmp_path: Path, database_kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SamplerBench]:
    monkeypatch.setattr(sampler_module, "SAFETY_POLL_S", 0.05)
    monkeypatch.setattr(settling, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(settling, "LONGEST_PAUSE_S", 0.01)
    with tempfile.TemporaryDirectory(prefix="tn-") as sockets:
        new_bench = SamplerBench(tmp_path, Path(sockets), fresh_url(tmp_path, database_kind))
        yield new_bench
        new_bench.db.reset()
        new_bench.close()


@pytest.mark.parametrize("point", ["read", *WRITING])
def test_one_error_at_any_transaction_of_a_dedicated_sampler_changes_no_result(
    sampler_bench: SamplerBench, point: TransactionPoint
) -> None:
    bench = sampler_bench

    def work(name: str, nth: int | None) -> tuple[list[object], int]:
        base = bench.base_sampler(f"{name}:sample:0")
        samples = [bench.sample(base, seq_id) for seq_id in range(2)]
        unknown, cancelled = bench.sample(f"{name}:sample:1"), bench.sample(base, 2)
        bench.futures.cancel("alice", cancelled, "not wanted")
        bench.give()
        bench.db.reset()
        if nth is not None:
            bench.db.fail_once(point, nth)
        bench.run()
        seq_id = bench.db.counts[point]
        bench.db.reset()
        outcomes = [bench.outcome(request) for request in (*samples, unknown)]
        assert bench.end_of(cancelled).error in (None, "not wanted")
        return [(outcome.body, (outcome.error or "").replace(name, "NAME")) for outcome in outcomes if outcome], seq_id

    work("warm-up", None)
    expected, seq_id = work("work", None)
    assert seq_id > 1
    for nth in range(seq_id):
        assert work(f"work{nth:03}", nth)[0] == expected, f"{point} {nth} of {seq_id}"


class RefusingServer:
    """An inference server that refuses to sleep and to wake up."""

    name, address, cannot_sleep = "vLLM", "http://127.0.0.1:1", ""

    def sleep(self) -> None:
        raise UserError("no sleep mode")

    wake_up = sleep


def test_a_sampler_whose_server_refuses_to_sleep_is_ready_again_with_the_reason(sampler_bench: SamplerBench) -> None:
    bench = sampler_bench
    bench.backend.sampler.inference_server = RefusingServer()  # type: ignore[assignment]
    seat = {
        "engine_id": ENGINE,
        "base_model": BASE,
        "kind": "sampler",
        "pid": 1,
        "state": "sleeping",
        "started_at": 1.0,
    }
    with bench.db.engine.begin() as connection:
        connection.execute(ENGINES.insert(), seat | {"lease_expires_at": 1e12})
    samplers = DedicatedSamplers(bench.db)
    for before, after in (("sleeping", "ready"), ("waking", "asleep")):
        with bench.db.engine.begin() as connection:
            connection.execute(ENGINES.update().values(state=before))
        bench.engine._next_check = 0.0
        bench.engine.run_once(0.0)
        row = samplers.find(ENGINE)
        assert (row["state"], row["reason"], row["address"]) == (after, "no sleep mode", RefusingServer.address)
