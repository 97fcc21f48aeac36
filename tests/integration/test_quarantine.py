"""Requests that kill the engine's process are isolated from the others, and finally fail."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from support.engine_bench import BASE, Bench, FlakyBackend
from tinsmith.backends import MicroBatches
from tinsmith.cluster.engines import Engines, Seat
from tinsmith.cluster.in_flight_journal import BATCH_SHRINK_FACTOR, JournalNote, Suspect, read_journal
from tinsmith.db.schema import BODIES, MODELS
from tinsmith.engine.faults import EngineFaultError, Fault
from tinsmith.engine.quarantine import MAX_BUGS, MAX_DEATHS, Quarantine
from tinsmith.engine.settling import IterationFailedError
from tinsmith.errors import UserError
from tinsmith.store.sampling_sessions import NewSamplingSession
from tinsmith.types import LoraSpec, OptimStep, Pass, Pending, Sample, SampleResult

POISON = 49
SAMPLER = "s:sample:0"
MOST_STARTS = 12


class DeathError(BaseException):
    """Simulates the death of the process."""


def pending(request_id: str) -> Pending:
    return Pending(1, request_id, "alice", "s", "sample", "pending", None, SAMPLER, 0, 0, 0.0)


# The note.


def test_suspects_run_in_batches_of_an_eighth(tmp_path: Path) -> None:
    path = tmp_path / "note"
    names = [f"r{index}" for index in range(64)]
    with pytest.raises(DeathError), Quarantine(path).running(names):
        raise DeathError
    quarantine = Quarantine(path)
    assert {quarantine.batch_size(name) for name in names} == {64 // BATCH_SHRINK_FACTOR} and not quarantine.batch_size(
        "other"
    )
    quarantine.keep({*names[:20], "other"})
    assert [len(group) for group in quarantine.groups([pending(name) for name in names[:20]])] == [8, 8, 4]
    with pytest.raises(DeathError), quarantine.running(names[:8]):
        raise DeathError
    third = Quarantine(path)
    assert [third.batch_size(name) for name in (names[0], names[8], names[20])] == [1, 8, 0]


def test_deaths_count_only_while_alone_and_over_engines_that_had_other_work(tmp_path: Path) -> None:
    path = tmp_path / "note"
    for running in (["a", "b"], ["a"], ["b"], *[["a"]] * (MAX_DEATHS - 1)):
        quarantine = Quarantine(path)
        assert quarantine.verdict("a") is None and quarantine.verdict("b") is None
        quarantine.keep({"a", "b"})
        with pytest.raises(DeathError), quarantine.running(running):
            raise DeathError
    last = Quarantine(path)
    assert f"'a' ended the engine's process {MAX_DEATHS} times" in str(last.verdict("a"))
    assert last.verdict("b") is None


def test_a_settled_request_is_none_any_more(tmp_path: Path) -> None:
    path = tmp_path / "note"
    with Quarantine(path).running(["a", "b"]):
        pass
    quarantine = Quarantine(path)
    assert quarantine
    quarantine.forget(["a", "b"])
    assert not quarantine and [len(group) for group in quarantine.groups([pending(n) for n in "abc"])] == [3]


def test_a_dead_engines_suspects_move_with_its_requests(tmp_path: Path) -> None:
    names = [f"r{index}" for index in range(64)]
    with pytest.raises(DeathError), Quarantine(tmp_path / "0").running(names):
        raise DeathError
    notes = [read_journal(tmp_path / "0") or ""]
    other = Quarantine(tmp_path / "1")
    other.adopt([*notes, "no note"], {"r0", "r1", "mine"})
    assert [other.batch_size(name) for name in ("r0", "r1", "r2", "mine")] == [8, 8, 0, 0], "not waiting here"
    assert other.verdict("r0") is None


def test_a_request_that_ends_one_engine_after_the_other_is_given_up_wherever_it_is(tmp_path: Path) -> None:
    notes: list[str] = []
    for index in range(MAX_DEATHS):
        path = tmp_path / str(index)
        quarantine = Quarantine(path)
        quarantine.adopt(notes, {"poison", "innocent"})
        assert quarantine.verdict("poison") is None
        with pytest.raises(DeathError), quarantine.running(["poison"]):
            raise DeathError
        notes.append(read_journal(path) or "")
    last = Quarantine(tmp_path / "last")
    last.adopt(notes, {"poison", "innocent"})
    assert f"ended the engine's process {MAX_DEATHS} times" in str(last.verdict("poison"))
    assert last.verdict("innocent") is None


@pytest.mark.parametrize(
    ("error", "deaths"),
    [(AssertionError("ours"), MAX_BUGS), (RuntimeError("CUDA error: an illegal memory access"), MAX_DEATHS)],
)
def test_a_bug_is_given_up_sooner_than_a_fault_of_the_device(error: Exception, deaths: int, tmp_path: Path) -> None:
    path = tmp_path / "note"
    with pytest.raises(EngineFaultError), Quarantine(path).running(["poison", "innocent"]):
        raise error
    for _ in range(deaths):
        quarantine = Quarantine(path)
        quarantine.keep({"poison", "innocent"})
        assert quarantine.verdict("poison") is None and quarantine.verdict("innocent") is None
        with pytest.raises(EngineFaultError), quarantine.running(["poison"]):
            raise error
    last = Quarantine(path)
    text = (
        f"'poison' ended the engine's process {deaths} times while nothing else ran ({type(error).__name__}: {error})"
    )
    assert text in str(last.verdict("poison")) and last.verdict("innocent") is None


@pytest.mark.parametrize("error", [UserError("no"), MemoryError(), OSError(28, "full"), KeyboardInterrupt()])
def test_what_is_an_answer_or_an_end_from_outside_leaves_the_block_as_it_is(
    error: BaseException, tmp_path: Path
) -> None:
    faults: list[EngineFaultError] = []
    quarantine = Quarantine(tmp_path / "note")
    quarantine.on_fault = faults.append
    with pytest.raises(type(error)) as raised, quarantine.running(["a"]):
        raise error
    assert raised.value is error and not faults


def test_the_requests_that_ran_are_blamed_and_not_those_around_them(tmp_path: Path) -> None:
    """A decode step in the middle of a training step, whose exception passes through the training step."""
    path, faults = tmp_path / "note", []
    quarantine = Quarantine(path)
    quarantine.on_fault = faults.append
    with pytest.raises(EngineFaultError) as raised, quarantine.running(["pass"]), quarantine.running(["sample"]):
        raise AssertionError("ours")
    assert faults == [raised.value] and raised.value.fault is Fault.BUG
    with quarantine.running(["later"]):
        pass  # the note is final
    suspects = Quarantine(path)
    assert suspects.batch_size("sample") and not suspects.batch_size("pass") and not suspects.batch_size("later")


def test_notes_of_earlier_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "note").write_text('{"running": ["a"], "suspects": {"a": [1, 4], "b": [8, 0]}}\n')
    quarantine = Quarantine(tmp_path / "note")
    assert quarantine.verdict("a") is not None and quarantine.batch_size("b") == 8


def test_a_gracefully_stopped_engine_leaves_no_suspects(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "note")
    with pytest.raises(DeathError), quarantine.running(["a"]):
        quarantine.clear()
        raise DeathError
    assert read_journal(tmp_path / "note") is None
    assert read_journal(tmp_path / "none") is None


def test_an_engine_that_claims_a_run_heeds_what_its_last_one_left(bench: Bench) -> None:
    model = bench.model()
    other_engines = Engines(bench.db, "there")
    lease = other_engines.take(Seat(BASE), 60)
    with bench.db.write() as connection:
        connection.execute(MODELS.update().values(engine_id=lease.engine_id))
    bench.engine._queues.forget_lane(model)
    request_id = bench.step(model, 1)
    bench.run_until_idle()
    assert bench.outcome(request_id) is None, "it is another's"
    other_engines.release(
        Seat(BASE), "restarting", suspects=JournalNote([], {request_id: Suspect(1, MAX_DEATHS)}).text().decode()
    )
    bench.engine._slow_poll()
    bench.run_until_idle()
    outcome = bench.outcome(request_id)
    assert outcome is not None and "ended the engine's process" in str(outcome.error)


def test_an_inner_block_ends_and_the_outer_one_is_to_blame_again(tmp_path: Path) -> None:
    path = tmp_path / "note"
    quarantine = Quarantine(path)
    with quarantine.running(["outer"]):
        with quarantine.running(["inner"]):
            assert Quarantine(path).batch_size("inner") and not Quarantine(path).batch_size("outer")
        assert Quarantine(path).batch_size("outer") and not Quarantine(path).batch_size("inner")


def test_a_stopped_engine_has_no_suspects(tmp_path: Path) -> None:
    path = tmp_path / "note"
    quarantine = Quarantine(path)
    with quarantine.running(["a"]):
        quarantine.clear()
    with quarantine.running(["b"]):
        assert not Quarantine(path)


@pytest.mark.parametrize(
    "note", [b"", b"\n", b"{", b"[]\n", b'{"running": 3, "suspects": {}}\n', b"\xff\n", b'{"running"']
)
def test_an_unreadable_note_has_no_suspects(tmp_path: Path, note: bytes) -> None:
    (tmp_path / "note").write_bytes(note)
    assert not Quarantine(tmp_path / "note")


def test_an_unwritable_note_stops_no_request(tmp_path: Path) -> None:
    with Quarantine(tmp_path / "no such directory" / "note").running(["a"]):
        pass


@given(st.lists(st.sampled_from([0, 0, 1, 2, 3]), max_size=30))
def test_groups_keep_the_order_and_never_mix(sizes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "note"
        names = [f"r{index}" for index in range(len(sizes))]
        suspects = {name: (size, 0) for name, size in zip(names, sizes, strict=True) if size}
        path.write_text(json.dumps({"running": [], "suspects": suspects}) + "\n")
        quarantine = Quarantine(path)
        groups = quarantine.groups([pending(name) for name in names])
    assert [request.request_id for group in groups for request in group] == names
    for group in groups:
        (size,) = {quarantine.batch_size(request.request_id) for request in group}
        assert size == 0 or len(group) <= size


# The engine.


class DeadlyBackend(FlakyBackend):
    """Dies on a pass or a sample with the token POISON, and on any optim_step of the models in `deadly`."""

    deadly: frozenset[str] = frozenset()

    def run_passes(self, passes: Sequence[Pass]) -> MicroBatches:
        self.steps.append([pass_.request_id for pass_ in passes])
        if any(POISON in datum.tokens_N for pass_ in passes for datum in pass_.data):
            raise DeathError
        return super(FlakyBackend, self).run_passes(passes)

    def optim_step(self, steps: Sequence[OptimStep]) -> list[dict[str, float] | UserError]:
        if any(step.model_id in self.deadly for step in steps):
            raise DeathError
        return super().optim_step(steps)


class DeadlySampler:
    """Dies in the step after a sample with the token POISON was submitted; otherwise delegates to a sampler."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self._poisoned = False
        self.waiting: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def submit(self, sample: Sample) -> None:
        self._poisoned = self._poisoned or POISON in sample.prompt_T
        self._inner.submit(sample)  # type: ignore[attr-defined]

    def step(self) -> list[tuple[str, SampleResult | UserError]]:
        self.waiting.append(len(self._inner._waiting))  # type: ignore[attr-defined]
        if self._poisoned:
            raise DeathError
        return self._inner.step()  # type: ignore[attr-defined]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("support.engine_bench.FlakyBackend", DeadlyBackend)
    with tempfile.TemporaryDirectory(prefix="tn-") as sockets:  # a socket's path must be short
        new_bench = Bench(tmp_path, Path(sockets))
        yield new_bench
        new_bench.close()


def work(bench: Bench) -> int:
    """Start engines until one has done all work; return the number of deaths."""
    for deaths in range(MOST_STARTS):
        try:
            bench.run_until_idle(300)
        except DeathError:
            bench.restart()
        else:
            return deaths
    raise AssertionError("the engines die for ever")


def test_a_pass_that_kills_fails_by_name_and_the_others_are_done(bench: Bench) -> None:
    models = [bench.model(f"s{index}:train:0") for index in range(4)]
    ids = [bench.train(model, 1, (1, POISON) if model == models[2] else (1, 2)) for model in models]
    after = [bench.step(model, 2) for model in models]
    assert work(bench) == 1 + MAX_DEATHS
    assert f"ended the engine's process {MAX_DEATHS} times" in bench.error(ids[2])
    outcome = bench.outcome(ids[2])
    assert outcome is not None and outcome.category == "server"
    norms = [bench.result(request_id)["metrics"]["grad_norm"] for request_id in after]  # type: ignore[index]
    assert norms == [pytest.approx(0.625), pytest.approx(0.625), 0.0, pytest.approx(0.625)]
    bench.restart()
    assert not bench.engine.quarantine


def test_a_models_passes_keep_their_order_around_a_suspect(bench: Bench) -> None:
    model = bench.model()
    ids = [bench.train(model, seq_id, (1, POISON) if seq_id == 3 else (seq_id,)) for seq_id in range(1, 6)]
    work(bench)
    assert "ended the engine's process" in bench.error(ids[2])
    assert all(bench.outcome(request_id).error is None for request_id in ids if request_id != ids[2])  # type: ignore[union-attr]
    step = bench.step(model, 6)
    bench.run_until_idle()
    expected = sum((token + 1) / 8 for token in (1, 2, 4, 5))
    assert bench.result(step)["metrics"]["grad_norm"] == pytest.approx(expected)  # type: ignore[index]


def test_an_optim_step_that_kills_leaves_its_gradient_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = bench.model(), bench.model("t:train:0")
    bench.train(model, 1)
    deadly = bench.step(model, 2)
    harmless = [bench.train(other, 1), bench.step(other, 2)][1]
    monkeypatch.setattr(DeadlyBackend, "deadly", frozenset({model}))
    work(bench)
    monkeypatch.setattr(DeadlyBackend, "deadly", frozenset())
    assert "ended the engine's process" in bench.error(deadly)
    assert bench.optimizer_step(harmless) == 1
    for restart in (False, True):
        if restart:
            bench.restart()
        again = bench.step(model, 3 + restart)
        bench.run_until_idle()
        norm = bench.result(again)["metrics"]["grad_norm"]  # type: ignore[index]
        assert norm == (0.0 if restart else pytest.approx(1.125))


def test_a_sample_that_kills_is_found_among_many_and_the_others_are_drawn(bench: Bench) -> None:
    bench.samplers.create(NewSamplingSession(SAMPLER, "s", "alice", BASE))
    samplers: list[DeadlySampler] = []
    start = bench.restart

    def restart() -> None:
        start()
        samplers.append(DeadlySampler(bench.backend._sampler))
        bench.backend._sampler = samplers[-1]  # type: ignore[assignment]

    bench.restart = restart  # type: ignore[method-assign]
    bench.restart()
    ids = [bench.sample(SAMPLER, seq_id) for seq_id in range(40)]
    poisoned = poison_sample(bench, 40)
    ids += [bench.sample(SAMPLER, seq_id) for seq_id in range(41, 60)]
    deaths = work(bench)
    assert deaths == 2 + MAX_DEATHS, "sixty, then seven, then alone"
    assert "ended the engine's process" in bench.error(poisoned)
    outcomes = [bench.outcome(request_id) for request_id in ids]
    assert all(outcome is not None and outcome.error is None for outcome in outcomes)
    assert max(samplers[0].waiting) == 60 and max(samplers[1].waiting) == 60 // BATCH_SHRINK_FACTOR


def poison_sample(bench: Bench, seq_id: int) -> str:
    """Rewrite the stored request so that it contains POISON."""
    request_id = bench.sample(SAMPLER, seq_id)
    body = json.loads(bench.futures.bodies([request_id])[request_id])
    body["prompt"]["chunks"][0]["tokens"] = [1, POISON]
    packed = zstandard.ZstdCompressor().compress(json.dumps(body).encode())
    with bench.db.write() as connection:
        connection.execute(BODIES.update().where(BODIES.c.request_id == request_id).values(body=packed))
    return request_id


def test_an_engines_own_failure_has_no_suspects(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bench.model()
    request_id = bench.train(model, 1)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    for _ in range(2 * MAX_DEATHS):
        with monkeypatch.context() as broken:
            broken.setattr(bench.futures, "settle", full)
            with pytest.raises(IterationFailedError) as raised:
                bench.engine.run(lambda: False)
            assert "no space" in str(raised.value.__cause__)
        bench.restart()
        assert not bench.engine.quarantine
    bench.run_until_idle()
    outcome = bench.outcome(request_id)
    assert outcome is not None and outcome.error is None


# Faults that the process reports itself.


class FaultyBackend(FlakyBackend):
    """Raises `error` for a pass or a sample with the token POISON, and for the methods in `breaks`."""

    error: Exception = AssertionError("a bug of ours")
    broken: frozenset[str] = frozenset()

    def run_passes(self, passes: Sequence[Pass]) -> MicroBatches:
        self.steps.append([pass_.request_id for pass_ in passes])
        if any(POISON in datum.tokens_N for pass_ in passes for datum in pass_.data):
            raise self.error
        return super(FlakyBackend, self).run_passes(passes)

    def optim_step(self, steps: Sequence[OptimStep]) -> list[dict[str, float] | UserError]:
        if any(step.params.learning_rate == 0.125 for step in steps):
            raise self.error
        return super().optim_step(steps)

    def publish(self, model_id: str, version_id: str) -> None:
        if version_id.endswith(":7"):
            raise self.error
        super().publish(model_id, version_id)

    def load(self, model_id: str, spec: LoraSpec, directory: Path, **options: object) -> None:
        if "load" in self.broken and model_id.startswith("s:"):
            raise self.error
        super().load(model_id, spec, directory, **options)  # type: ignore[arg-type]

    def create_model(self, model_id: str, spec: LoraSpec, optimizer_type: str = "adamw") -> None:
        if "create" in self.broken and model_id.startswith("s:"):
            raise self.error
        super().create_model(model_id, spec, optimizer_type)


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("support.engine_bench.FlakyBackend", FaultyBackend)
    with tempfile.TemporaryDirectory(prefix="tn-") as sockets:
        bench = Bench(tmp_path, Path(sockets))
        yield bench
        bench.close()


def run_through_faults(bench: Bench) -> int:
    """Start engines until one has done all work; return the number of faults."""
    for faults in range(MOST_STARTS):
        try:
            bench.run_until_idle(300)
        except EngineFaultError:
            bench.restart()
        else:
            return faults
    raise AssertionError("the engines end for ever")


def submit_poison(bench: Bench, model: str, kind: str) -> str:
    if kind == "optim_step":
        return bench.step(model, 2, rate=0.125)
    if kind == "publish":
        bench.publish(model, 2, 7)
        return f"{model}:2"
    return bench.train(model, 2, (1, POISON))


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["pass", "optim_step", "publish"])
def test_a_bug_on_one_request_ends_engines_until_it_fails_by_name(faulty: Bench, kind: str) -> None:
    guilty, other = faulty.model(), faulty.model("t:train:0")
    faulty.train(guilty, 1)
    poison = submit_poison(faulty, guilty, kind)
    innocent = [faulty.train(other, 1), faulty.step(other, 2)][1]
    assert 0 < run_through_faults(faulty) <= MAX_BUGS + 1
    assert "ended the engine's process" in faulty.error(poison) and "a bug of ours" in faulty.error(poison)
    outcome = faulty.outcome(poison)
    assert outcome is not None and outcome.category == "server"
    assert faulty.result(innocent)["metrics"] == {"grad_norm": 1.125, "step": 1.0}
    after = faulty.step(guilty, 3)
    faulty.run_until_idle()
    assert faulty.result(after)["metrics"] == {"grad_norm": 1.125, "step": 1.0}, "the gradient before is there"


def test_a_device_fault_that_passes_costs_no_request(faulty: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultyBackend, "error", RuntimeError("CUDA error: an illegal memory access"))
    model = faulty.model()
    poisoned = faulty.train(model, 1, (1, POISON))
    with pytest.raises(EngineFaultError):
        faulty.run_until_idle()
    monkeypatch.setattr(FaultyBackend, "run_passes", FlakyBackend.run_passes)
    faulty.restart()
    faulty.run_until_idle()
    outcome = faulty.outcome(poisoned)
    assert outcome is not None and outcome.error is None


@pytest.mark.extended
def test_a_model_whose_restoring_ends_engines_is_not_restored_for_its_next_request(
    faulty: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = faulty.model(), faulty.model("t:train:0")
    faulty.train(model, 1)
    faulty.run_until_idle()
    faulty.restart()
    monkeypatch.setattr(FaultyBackend, "broken", frozenset({"load", "create"}))
    guilty, innocent = faulty.train(model, 2), faulty.train(other, 1)
    assert run_through_faults(faulty) == MAX_BUGS
    assert "ended the engine's process" in faulty.error(guilty)
    outcome = faulty.outcome(innocent)
    assert outcome is not None and outcome.error is None
    later = faulty.train(model, 3)
    assert run_through_faults(faulty) == 0, "it ends no further engine"
    assert f"model {model!r} could not be restored" in faulty.error(later)
    monkeypatch.setattr(FaultyBackend, "broken", frozenset())
    faulty.restart()
    after = faulty.step(model, 4)
    faulty.run_until_idle()
    assert faulty.result(after)["metrics"] == {"grad_norm": 1.125, "step": 1.0}, "nothing of it was deleted"


def test_a_bug_in_a_decode_step_blames_the_sample_and_not_the_step_around_it(faulty: Bench) -> None:
    model = faulty.model()
    faulty.samplers.create(NewSamplingSession(SAMPLER, "s", "alice", BASE))
    poisoned = poison_sample(faulty, 3)
    trained = faulty.train(model, 1)
    start = faulty.restart

    def restart() -> None:
        start()
        step = faulty.backend._sampler.step

        def faulty_step(scopes: object = None) -> object:
            if any(POISON in sample.prompt_T for sample, _ in faulty.backend._sampler._waiting):
                raise AssertionError("a bug of ours")
            return step()

        faulty.backend._sampler.step = faulty_step  # type: ignore[assignment,method-assign]

    faulty.restart = restart  # type: ignore[method-assign]
    faulty.restart()
    assert run_through_faults(faulty) == MAX_BUGS
    assert "a bug of ours" in faulty.error(poisoned)
    outcome = faulty.outcome(trained)
    assert outcome is not None and outcome.error is None


def test_a_device_fault_of_the_writer_of_snapshots_ends_the_engine_and_a_bug_there_does_not(
    faulty: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = faulty.model()
    for error in (AssertionError("a bug of ours"), RuntimeError("CUDA error: an illegal memory access")):
        faulty.backend.breaks["save"] = error
        faulty.train(model, 1)
        monkeypatch.setattr("tinsmith.engine.snapshots.SNAPSHOT_BODY_BYTES", 1)
        if isinstance(error, AssertionError):
            faulty.run_until_idle()
        else:
            faulty.engine._snapshots._resident[model].retry_at = 0.0
            faulty.train(model, 2)
            with pytest.raises(EngineFaultError, match="illegal memory access"):
                faulty.run_until_idle()


# A process.

KILLER = f"""
import os, sys
from tinsmith.backends import fake

class Backend(fake.FakeBackend):
    def run_passes(self, passes):
        if any({POISON} in datum.tokens_N for pass_ in passes for datum in pass_.data):
            os._exit(99)
        return super().run_passes(passes)

fake.FakeBackend = Backend
from tinsmith.engine.__main__ import main
sys.exit(main())
"""


@pytest.mark.extended
def test_a_pass_that_ends_real_processes_is_given_up_and_the_rest_is_done(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tn-") as sockets:
        bench = Bench(tmp_path, Path(sockets))
        model, other = bench.model(), bench.model("t:train:0")
        guilty, innocent = bench.train(model, 1, (1, POISON)), bench.train(other, 1)
        with bench.db.write() as connection:
            connection.execute(MODELS.update().values(engine_id=None))  # the bench's engine has settled them
        (tmp_path / "config.json").write_text(json.dumps(MODEL_CONFIG))
        settings = {"data_dir": str(tmp_path), "backend": "fake", "database_url": bench.db.url}
        seat = {"name": BASE, "path": str(tmp_path), "kind": "engine", "index": 0, "peer_key": "00", "rank_key": "00"}
        spec = json.dumps({**seat, "settings": settings, "log": str(tmp_path / "engine.log")}) + "\n"
        statuses: list[int] = []
        while bench.outcome(guilty) is None:
            assert len(statuses) < MOST_STARTS, "the engines die for ever"
            statuses.append(run_engine(bench, spec, guilty))
        assert statuses[: 1 + MAX_DEATHS] == [99] * (1 + MAX_DEATHS)
        assert "ended the engine's process" in bench.error(guilty)
        outcome = bench.outcome(innocent)
        assert outcome is not None and outcome.error is None
        bench.close()


MODEL_CONFIG = {"architectures": ["Tiny"], "vocab_size": 50, "max_position_embeddings": 64, "model_type": "tiny"}


def run_engine(bench: Bench, spec: str, awaited: str) -> int:
    """Run one engine until it dies, or settles a request and is stopped; return its exit status."""
    process = subprocess.Popen([sys.executable, "-c", KILLER], stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(spec)
    process.stdin.flush()
    deadline = time.monotonic() + 60
    while process.poll() is None and bench.outcome(awaited) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.stdin.close()
    return process.wait(30)
