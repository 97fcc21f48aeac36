"""The engine restores its models after any crash: a real database and the fake backend, step by step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from support.engine_bench import BASE, Bench, save_weights
from tinsmith.backends.fake import ADAPTER_BYTES
from tinsmith.db.schema import BODIES, MODELS, SAMPLERS
from tinsmith.engine.loop import QUIET_S
from tinsmith.engine.quarantine import MAX_DEATHS
from tinsmith.engine.snapshots import MAX_OPTIM_STEPS, SNAPSHOT_OPTIM_STEPS
from tinsmith.engine.versions import VERSIONS_IN_MEMORY
from tinsmith.errors import UserError
from tinsmith.storage.directories import MANIFEST
from tinsmith.store.checkpoints import parse_path
from tinsmith.store.sampling_sessions import NewSamplingSession
from tinsmith.types import OptimStep
from tinsmith.wire.sampling import read_sample_result

pytestmark = pytest.mark.smoke

FULL = OSError(28, "No space left on device")


def train_for(bench: Bench, model: str, steps: int, first_seq_id: int = 1) -> int:
    """Run passes and optimizer steps; return the next seq_id."""
    for index in range(steps):
        bench.train(model, first_seq_id + 2 * index)
        bench.step(model, first_seq_id + 2 * index + 1, rate=0.5 ** (first_seq_id + index))
    bench.run_until_idle(10 * steps)
    return first_seq_id + 2 * steps


def snapshots(bench: Bench) -> tuple[object, object]:
    with bench.db.read() as connection:
        row = connection.execute(sa.select(MODELS)).one()
    return row.snapshot_directory, row.previous_snapshot_directory


def bodies(bench: Bench) -> int:
    count = bench.scalar(sa.select(sa.func.count()).select_from(BODIES))
    assert isinstance(count, int)
    return count


def state(bench: Bench, model: str = "s:train:0") -> object:
    return bench.backend._models[model]


# Snapshots.


def test_a_client_that_accumulates_for_ever_has_a_bounded_log(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.engine.snapshots.SNAPSHOT_BODY_BYTES", 1000)
    model = bench.model()
    request_id = bench.train(model, 1)
    (body,) = bench.futures.bodies([request_id]).values()
    for seq_id in range(2, 60):
        bench.train(model, seq_id)
        bench.run_until_idle()
    assert bodies(bench) <= 2 * (1000 // len(body) + 2)
    before = state(bench)
    bench.restart()
    stepped = bench.step(model, 60)
    bench.forward(model, 61)
    bench.run_until_idle()
    assert bench.result(stepped)["metrics"] == {"grad_norm": pytest.approx(59 * 1.125), "step": 1.0}
    assert replace(before, gradient=0.0, step=1, weight=bench.weight()) == state(bench)  # type: ignore[type-var]


def test_snapshots_of_short_steps_are_further_apart_and_never_more_than_a_bound(bench: Bench) -> None:
    model = bench.model()
    bench.engine._snapshots._share = 0.0  # steps whose replay is cheaper than a snapshot
    snapshot_marks: list[object] = []
    for seq_id in range(1, SNAPSHOT_OPTIM_STEPS + 2 * MAX_OPTIM_STEPS + 1):
        bench.step(model, seq_id)
        bench.run_until_idle()
        snapshot_marks.append(bench.scalar(sa.select(MODELS.c.snapshot_seq_id)))
    marks = [SNAPSHOT_OPTIM_STEPS + rounds * MAX_OPTIM_STEPS for rounds in range(3)]
    assert list(dict.fromkeys(snapshot_marks)) == [None, *marks], "the first costs nothing that was known before"
    bench.restart()
    bench.engine._snapshots._share = 0.0
    for seq_id in range(marks[-1] + 1, marks[-1] + SNAPSHOT_OPTIM_STEPS + 1):
        bench.step(model, seq_id)
        bench.run_until_idle()
    assert bench.scalar(sa.select(MODELS.c.snapshot_seq_id)) == marks[-1] + SNAPSHOT_OPTIM_STEPS, (
        "debts end with an engine"
    )


def test_a_snapshot_waits_until_the_steps_have_paid_for_the_last_one(bench: Bench) -> None:
    model, snapshots = bench.model(), bench.engine._snapshots
    snapshots._share = 0.0
    next_seq_id = train_for(bench, model, SNAPSHOT_OPTIM_STEPS + 1)
    cost_s = snapshots._resident[model].cost_s
    assert cost_s > 0 and snapshots._paid_s == -cost_s
    next_seq_id = train_for(bench, model, SNAPSHOT_OPTIM_STEPS, next_seq_id)
    before = bench.scalar(sa.select(MODELS.c.snapshot_seq_id))
    snapshots._share = 1.0
    snapshots.add_training_time(0.9 * cost_s)
    assert snapshots._paid_s < 0
    snapshots.add_training_time(0.2 * cost_s)
    assert snapshots._paid_s == 0, "nothing is saved up"
    train_for(bench, model, 1, next_seq_id)
    assert bench.scalar(sa.select(MODELS.c.snapshot_seq_id)) != before


def test_the_engine_goes_on_while_a_snapshot_is_written_and_takes_one_at_a_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bench.model()
    may_write, writing = threading.Event(), []
    write = bench.engine._snapshots.directories.write

    def slow(fill: Callable[[Path], None]) -> tuple[str, int]:
        writing.append(threading.current_thread().name)
        may_write.wait(10)
        return write(fill)

    monkeypatch.setattr(bench.engine._snapshots.directories, "write", slow)
    for seq_id in range(1, 3 * SNAPSHOT_OPTIM_STEPS + 1):
        bench.step(model, seq_id)
        bench.engine.run_once(0.0)
        bench.engine.run_once(0.0)
    assert bench.optimizer_step(f"{model}:{3 * SNAPSHOT_OPTIM_STEPS}") == 3 * SNAPSHOT_OPTIM_STEPS
    assert writing == ["writer"]
    assert snapshots(bench) == (None, None) and bodies(bench) == 3 * SNAPSHOT_OPTIM_STEPS
    may_write.set()
    bench.engine.flush()
    assert bench.scalar(sa.select(MODELS.c.snapshot_seq_id)) == SNAPSHOT_OPTIM_STEPS, "as of its capture"
    for seq_id in (1, 2):  # the first turn measures the cost of the last snapshot
        bench.forward(model, 3 * SNAPSHOT_OPTIM_STEPS + seq_id)
        bench.run_until_idle()
    assert bench.scalar(sa.select(MODELS.c.snapshot_seq_id)) == 3 * SNAPSHOT_OPTIM_STEPS
    assert bodies(bench) == 2 * SNAPSHOT_OPTIM_STEPS


def test_captures_beyond_the_memory_for_them_wait(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.engine.snapshots.MAX_CAPTURED_BYTES", ADAPTER_BYTES)
    first, other = bench.model(), bench.model("t:train:0")
    captured: list[str] = []
    capture = bench.backend.capture
    bench.backend.capture = lambda model_id, **options: captured.append(model_id) or capture(model_id, **options)  # type: ignore[method-assign]
    may_write = threading.Event()
    write = bench.engine._snapshots.directories.write
    monkeypatch.setattr(bench.engine._snapshots.directories, "write", lambda fill: (may_write.wait(10), write(fill))[1])
    for seq_id in range(1, SNAPSHOT_OPTIM_STEPS + 1):
        for model in (first, other):
            bench.step(model, seq_id)
        bench.engine.run_once(0.0)
        bench.engine.run_once(0.0)
    assert len(captured) == 1
    may_write.set()
    bench.engine.flush()
    for seq_id in (1, 2):
        bench.step(first, SNAPSHOT_OPTIM_STEPS + seq_id)
        bench.step(other, SNAPSHOT_OPTIM_STEPS + seq_id)
        bench.run_until_idle()
    assert sorted(captured) == [first, other]


def damage_bits(path: Path) -> None:
    (file,) = (file for file in path.iterdir() if file.name != MANIFEST)
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))


def damage_length(path: Path) -> None:
    (file,) = (file for file in path.iterdir() if file.name != MANIFEST)
    file.write_bytes(file.read_bytes()[:-1])


def remove_file(path: Path) -> None:
    next(file for file in path.iterdir() if file.name != MANIFEST).unlink()


def remove_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


@pytest.mark.matrix(3)
@pytest.mark.parametrize("damage", [damage_bits, damage_length, remove_file, remove_manifest])
@pytest.mark.parametrize("num_snapshots", [1, 2])
def test_a_damaged_snapshot_is_passed_over_for_the_one_before_it(
    bench: Bench, damage: Callable[[Path], None], num_snapshots: int
) -> None:
    model = bench.model()
    next_seq_id = train_for(bench, model, num_snapshots * SNAPSHOT_OPTIM_STEPS + 3)
    bench.train(model, next_seq_id)
    bench.run_until_idle()
    before, (newest, previous) = state(bench), snapshots(bench)
    assert (newest is not None, previous is not None) == (True, num_snapshots == 2)
    damage(bench.directory / "snapshots" / str(newest))
    bench.restart()
    bench.forward(model, next_seq_id + 1)
    bench.run_until_idle()
    assert state(bench) == before
    assert newest not in snapshots(bench), "it is not counted on again"
    train_for(bench, model, 2 * SNAPSHOT_OPTIM_STEPS, next_seq_id + 2)
    before = state(bench)
    bench.restart()
    bench.forward(model, next_seq_id + 2 + 4 * SNAPSHOT_OPTIM_STEPS)
    bench.run_until_idle()
    assert state(bench) == before


def test_a_model_whose_snapshots_are_all_damaged_is_lost_by_name(bench: Bench) -> None:
    model, other = bench.model(), "t:train:0"
    next_seq_id = train_for(bench, model, 2 * SNAPSHOT_OPTIM_STEPS)
    bench.model(other)
    for path in (bench.directory / "snapshots").iterdir():
        damage_bits(path)
    bench.restart()
    lost, fine = bench.forward(model, next_seq_id), bench.forward(other, 1)
    bench.run_until_idle()
    assert model in bench.error(lost) and "SHA-256" in bench.error(lost)
    outcome = bench.outcome(lost)
    assert outcome is not None and outcome.category == "server"
    assert bench.outcome(fine) is not None
    assert not bench.backend.has_model(model)


def test_a_full_disk_is_not_tried_at_every_step(bench: Bench) -> None:
    model = bench.model()
    bench.backend.breaks["save"] = FULL
    captured: list[str] = []
    capture = bench.backend.capture
    bench.backend.capture = lambda model_id, **options: captured.append(model_id) or capture(model_id, **options)  # type: ignore[method-assign]
    next_seq_id = train_for(bench, model, SNAPSHOT_OPTIM_STEPS + 8)
    assert len(captured) == 1
    assert bodies(bench) == next_seq_id - 1
    before = state(bench)
    bench.restart()
    bench.forward(model, next_seq_id)
    bench.run_until_idle()
    assert state(bench) == before


def test_a_model_unloaded_during_a_snapshot_leaves_no_file(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bench.model()
    may_write = threading.Event()
    write = bench.engine._snapshots.directories.write
    monkeypatch.setattr(bench.engine._snapshots.directories, "write", lambda fill: (may_write.wait(10), write(fill))[1])
    for seq_id in range(1, SNAPSHOT_OPTIM_STEPS + 1):
        bench.step(model, seq_id)
        bench.engine.run_once(0.0)
    bench.submit(model, None, "unload_model", {"reason": "enough"})
    for _ in range(3):
        bench.engine.run_once(0.0)
    assert not bench.backend.has_model(model)
    may_write.set()
    bench.engine.flush()
    assert list((bench.directory / "snapshots").iterdir()) == []
    assert snapshots(bench) == (None, None) and bodies(bench) == 0


# Loads.


def test_a_replay_does_not_load_an_overwritten_checkpoint(bench: Bench) -> None:
    model = bench.model()
    train_for(bench, model, 1)
    save_weights(bench, model, 3)
    path = f"tinker://{model}/weights/one"
    bench.backend.breaks["save"] = FULL  # so that no snapshot covers the load
    bench.submit(model, 4, "load_weights", {"path": path, "optimizer": True})
    bench.run_until_idle()
    bench.backend.breaks.clear()
    weight = bench.weight()
    bench.restart()
    bench.forward(model, 5)
    bench.run_until_idle()
    assert bench.weight() == weight, "as long as it is there it is loaded again"
    train_for(bench, model, 1, 6)
    save_weights(bench, model, 8, overwrite=True)
    bench.restart()
    lost = bench.forward(model, 9)
    bench.run_until_idle()
    assert "was overwritten after it had been loaded" in bench.error(lost)


def test_a_load_is_on_disk_before_its_client_knows(bench: Bench) -> None:
    model = bench.model()
    train_for(bench, model, 1)
    save_weights(bench, model, 3)
    path = f"tinker://{model}/weights/one"
    settle, snapshot_counts = bench.futures.settle, []

    def watch(settlements: Sequence, applied: dict[str, int]) -> None:
        snapshot_counts.append(len(list((bench.directory / "snapshots").glob("*"))))
        settle(settlements, applied)

    bench.futures.settle = watch  # type: ignore[method-assign]
    bench.submit(model, 4, "load_weights", {"path": path, "optimizer": True})
    bench.run_until_idle()
    assert snapshot_counts == [1]
    bench.futures.settle = settle  # type: ignore[method-assign]
    bench.checkpoints.delete("alice", parse_path(path))
    weight = bench.weight()
    bench.restart()
    bench.forward(model, 5)
    bench.run_until_idle()
    assert bench.weight() == weight


# Versions.


def test_every_version_outlives_a_kill_whether_a_snapshot_covers_its_publish_or_not(bench: Bench) -> None:
    model = bench.model()
    seq_id, samplers = 1, []
    for index in range(SNAPSHOT_OPTIM_STEPS + 5):
        bench.train(model, seq_id)
        bench.step(model, seq_id + 1, rate=0.01 * (index + 1))
        samplers.append(bench.publish(model, seq_id + 2, index))
        seq_id += 3
    bench.run_until_idle(200)
    for sampler in samplers:
        bench.sample(sampler, 0)
    bench.run_until_idle()
    have_files = sa.select(sa.func.count()).select_from(SAMPLERS).where(SAMPLERS.c.directory.is_not(None))
    assert 0 < bench.scalar(have_files) < len(samplers)  # type: ignore[operator]
    bench.restart()
    for sampler in samplers:
        bench.sample(sampler, 1)
    bench.run_until_idle()
    before, after = ([bench.outcome(f"{sampler}:{n}") for sampler in samplers] for n in (0, 1))
    assert [outcome.error for outcome in after if outcome] == [None] * len(samplers)
    assert before == after and len({outcome.body for outcome in after if outcome}) == len(samplers)


def test_a_version_that_cannot_be_written_holds_its_snapshot_back(bench: Bench) -> None:
    model = bench.model()
    sampler = bench.publish(model, 1, 0)
    (bench.directory / "versions").write_text("no directory can be made here")
    next_seq_id = train_for(bench, model, SNAPSHOT_OPTIM_STEPS, 2)
    assert snapshots(bench) == (None, None)
    bench.restart()
    (bench.directory / "versions").unlink()
    sampled = bench.sample(sampler)
    bench.run_until_idle()
    outcome = bench.outcome(sampled)
    assert outcome is not None and outcome.error is None
    bench.step(model, next_seq_id)
    bench.run_until_idle()
    assert snapshots(bench)[0] is not None


@pytest.mark.parametrize("covered", [False, True])
def test_an_inflight_sampler_comes_back_with_its_newest_publish(bench: Bench, covered: bool) -> None:
    model = bench.model()
    seq_id = 1
    for index in range(3):
        bench.step(model, seq_id)
        bench.train(model, seq_id + 1)
        bench.step(model, seq_id + 2, rate=0.01 * (index + 1))
        sampler = bench.publish(model, seq_id + 3, index, kind="inflight")
        seq_id += 4
        bench.run_until_idle()
    if covered:
        seq_id = train_for(bench, model, SNAPSHOT_OPTIM_STEPS, seq_id)
        for later in (1, 2):  # files of an older publish, and a newer one in the log
            sampler = bench.publish(model, seq_id, 2 + later, kind="inflight")
            seq_id = train_for(bench, model, SNAPSHOT_OPTIM_STEPS - 3 * (later - 1), seq_id + 1)
    version = bench.backend._versions[f"{model}:inflight"]
    for attempt in range(2):
        bench.restart()
        sampled = bench.sample(sampler, attempt)
        bench.run_until_idle()
        outcome = bench.outcome(sampled)
        assert outcome is not None and outcome.error is None and outcome.body is not None
        assert bench.backend._versions[f"{model}:inflight"] == version
        assert read_sample_result(outcome.body, sampled).weight_version == sampler
    assert len(list((bench.directory / "versions").glob("*"))) == covered, "of inflight versions the newest files only"


def test_an_inflight_version_that_could_not_be_written_is_written_with_the_next_snapshot(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.engine.snapshots.RETRY_S", 0.0)
    model = bench.model()
    train_for(bench, model, 1)
    sampler = bench.publish(model, 3, 0, kind="inflight")
    (bench.directory / "versions").write_text("no directory can be made here")
    next_seq_id = train_for(bench, model, SNAPSHOT_OPTIM_STEPS, 4)
    assert snapshots(bench) == (None, None)
    (bench.directory / "versions").unlink()
    next_seq_id = train_for(bench, model, 2 * SNAPSHOT_OPTIM_STEPS, next_seq_id)
    assert None not in snapshots(bench)
    version = bench.backend._versions[f"{model}:inflight"]
    bench.restart()
    sampled = bench.sample(sampler)
    bench.run_until_idle()
    outcome = bench.outcome(sampled)
    assert outcome is not None and outcome.error is None
    assert bench.backend._versions[f"{model}:inflight"] == version


@pytest.mark.parametrize("kind", ["snapshot", "inflight"])
def test_a_sample_names_the_publish_whose_weights_it_got(bench: Bench, kind: str) -> None:
    model = bench.model()
    samplers = [bench.publish(model, seq_id, seq_id, kind=kind) for seq_id in (1, 2)]
    bench.run_until_idle()
    versions = []
    for sampler in samplers:
        sampled = bench.sample(sampler)
        bench.run_until_idle()
        outcome = bench.outcome(sampled)
        assert outcome is not None and outcome.body is not None
        versions.append(read_sample_result(outcome.body, sampled).weight_version)
    assert versions == (samplers if kind == "snapshot" else [samplers[1], samplers[1]])


@pytest.mark.parametrize("kind", ["snapshot", "inflight"])
def test_a_sampler_whose_model_was_unloaded_is_refused_for_good(bench: Bench, kind: str) -> None:
    model = bench.model()
    sampler = bench.publish(model, 1, 0, kind=kind)
    bench.run_until_idle()
    bench.submit(model, None, "unload_model", {"reason": "enough"})
    bench.run_until_idle()
    for restart in (False, True):
        if restart:
            bench.restart()
        sampled = bench.sample(sampler, int(restart))
        bench.run_until_idle()
        assert "was unloaded: enough" in bench.error(sampled)
        outcome = bench.outcome(sampled)
        assert outcome is not None and outcome.category == "user", "which is final"


def test_a_sampler_of_before_models_were_recorded_is_refused_by_name(bench: Bench) -> None:
    bench.samplers.create(NewSamplingSession("s:sample:7", "s", "alice", BASE, version_id="s:sample:7"))
    sampled = bench.sample("s:sample:7")
    bench.run_until_idle()
    assert "'s:sample:7'" in bench.error(sampled) and "publish them again" in bench.error(sampled)


def test_versions_that_have_files_leave_memory_without_being_written_again(bench: Bench) -> None:
    model = bench.model()
    for index in range(VERSIONS_IN_MEMORY + 2):
        bench.publish(model, index + 1, index)
    train_for(bench, model, SNAPSHOT_OPTIM_STEPS, VERSIONS_IN_MEMORY + 3)
    files = {path.name for path in (bench.directory / "versions").iterdir()}
    assert len(files) == VERSIONS_IN_MEMORY + 2
    bench.engine.run_once(2 * QUIET_S)  # idle for a moment
    assert len(bench.backend._versions) == VERSIONS_IN_MEMORY
    assert {path.name for path in (bench.directory / "versions").iterdir()} == files


# More models than memory holds.


def with_room_for(bench: Bench, models: int) -> None:
    bench.settings = bench.settings.model_copy(update={"resident_model_bytes": models * ADAPTER_BYTES})
    bench.restart()


def test_many_models_share_the_room_of_a_few_and_none_notices(bench: Bench) -> None:
    with_room_for(bench, 5)
    names = [f"s{index}:train:0" for index in range(40)]
    for name in names:
        bench.model(name)
        bench.train(name, 1)
    bench.run_until_idle(400)
    assert 0 < len(bench.backend._models) <= 6
    for name in names:
        bench.step(name, 2)
        bench.run_until_idle()
        assert len(bench.backend._models) <= 7
    steps = [bench.step(name, 3) for name in names]
    bench.run_until_idle(400)
    for name, last in zip(names, steps, strict=True):
        assert bench.result(f"{name}:2")["metrics"] == {"grad_norm": pytest.approx(1.125), "step": 1.0}, "its gradient"
        assert bench.optimizer_step(last) == 2
    assert len(bench.backend._models) <= 6


def test_a_model_that_leaves_memory_leaves_nothing_to_replay_and_keeps_its_samplers(bench: Bench) -> None:
    with_room_for(bench, 1)
    model = bench.model()
    bench.train(model, 1)
    bench.step(model, 2)
    sampler = bench.publish(model, 3, 0)
    bench.train(model, 4)
    bench.run_until_idle()
    before = state(bench)
    bench.model("t:train:0")
    bench.run_until_idle()
    assert not bench.backend.has_model(model)
    sampled = bench.sample(sampler)
    bench.run_until_idle()
    outcome = bench.outcome(sampled)
    assert outcome is not None and outcome.error is None
    assert not bench.backend.has_model(model), "its weights were there"
    replayed: list[str] = []
    bench.engine._recovery._replay = lambda *arguments: replayed.append("")  # type: ignore[method-assign]
    bench.forward(model, 5)
    bench.run_until_idle()
    assert state(bench) == before and not replayed


def test_models_stay_in_memory_as_long_as_they_cannot_be_written(bench: Bench) -> None:
    with_room_for(bench, 1)
    bench.backend.breaks["save"] = FULL
    models = [bench.model(f"s{index}:train:0") for index in range(3)]
    for model in models:
        bench.train(model, 1)
    bench.run_until_idle()
    assert len(bench.backend._models) == 3


# Attribution of crashes.


def test_an_optim_step_that_does_not_fit_into_a_merged_one_fails_alone(bench: Bench) -> None:
    guilty, innocent = bench.model(), bench.model("t:train:0")
    optim_step, sizes = bench.backend.optim_step, []

    def fail(steps: Sequence[OptimStep]) -> list[dict[str, float] | UserError]:
        sizes.append(len(steps))
        if any(step.model_id == guilty and step.params.learning_rate == 0.125 for step in steps):
            raise MemoryError("the device gave up")
        return optim_step(steps)

    bench.backend.optim_step = fail  # type: ignore[method-assign]
    for model in (guilty, innocent):
        bench.train(model, 1)
    failed, fine = bench.step(guilty, 2, rate=0.125), bench.step(innocent, 2)
    bench.run_until_idle()
    assert sizes == [2, 1, 1]
    assert "the device gave up" in bench.error(failed)
    assert bench.optimizer_step(fine) == 1
    bench.forward(guilty, 3)
    bench.run_until_idle()
    before = state(bench)
    bench.restart()
    again = bench.step(guilty, 4)
    bench.run_until_idle()
    assert bench.result(again)["metrics"] == {"grad_norm": pytest.approx(1.125), "step": 1.0}, "it changed nothing"
    assert before != state(bench)


@pytest.mark.parametrize("kind", ["forward_backward", "optim_step"])
def test_a_model_that_cannot_fit_alone_is_a_user_error(bench: Bench, kind: str) -> None:
    model, other = bench.model(), bench.model("t:train:0")
    method = "run_passes" if kind == "forward_backward" else "optim_step"
    inner = getattr(bench.backend, method)

    def fail(requests: Sequence, **options: object) -> object:
        if any(request.model_id == model for request in requests):
            raise MemoryError("cpu has 0.1 GiB free")
        return inner(requests, **options)

    setattr(bench.backend, method, fail)
    request_ids = [
        bench.train(name, 1) if kind == "forward_backward" else bench.step(name, 1) for name in (model, other)
    ]
    bench.run_until_idle()
    assert "does not fit into the engine's memory, even alone: cpu has 0.1 GiB free" in bench.error(request_ids[0])
    outcome = bench.outcome(request_ids[0])
    assert outcome is not None and outcome.category == "user"
    fine = bench.outcome(request_ids[1])
    assert fine is not None and fine.error is None


def test_the_server_is_woken_before_cleanup(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bench.model()
    save_weights(bench, model, 1)
    order: list[str] = []
    drop, wake = bench.backend.drop_version, bench.mailbox.wake
    bench.backend.drop_version = lambda version_id: order.append("tidied") or drop(version_id)  # type: ignore[method-assign]
    monkeypatch.setattr(bench.mailbox, "wake", lambda *arguments: order.append("told") or wake(*arguments))
    save_weights(bench, model, 2, overwrite=True)
    assert order == ["told", "tidied"]


def test_unloading_frees_the_log_and_both_snapshots(bench: Bench) -> None:
    model = bench.model()
    train_for(bench, model, 2 * SNAPSHOT_OPTIM_STEPS + 3)
    assert bodies(bench) and len(list((bench.directory / "snapshots").iterdir())) == 2
    bench.submit(model, None, "unload_model", {"reason": "enough"})
    bench.run_until_idle()
    assert bodies(bench) == 0 and not list((bench.directory / "snapshots").iterdir())


def test_a_model_that_ends_the_process_when_it_comes_back_does_not_end_it_for_ever(bench: Bench) -> None:
    class DeathError(BaseException):
        """Simulate a crash below Python."""

    model, other = bench.model(), bench.model("t:train:0")
    bench.train(model, 1)
    bench.run_until_idle()
    guilty, innocent = bench.train(model, 2), bench.train(other, 1)
    deaths = 0

    def die(*_arguments: object) -> None:
        raise DeathError

    for _ in range(MAX_DEATHS + 2):
        bench.restart()
        bench.engine._recovery._replay = die  # type: ignore[method-assign]
        try:
            bench.run_until_idle()
        except DeathError:
            deaths += 1
    assert deaths == MAX_DEATHS
    assert "ended the engine's process" in bench.error(guilty)
    outcome = bench.outcome(innocent)
    assert outcome is not None and outcome.error is None


def test_directories_in_use_are_not_swept(bench: Bench) -> None:
    model = bench.model()
    bench.publish(model, 1, 0)
    train_for(bench, model, 2 * SNAPSHOT_OPTIM_STEPS, 2)
    for directory_names, root in (
        (bench.models.snapshot_directories(), "snapshots"),
        (bench.samplers.directories(), "versions"),
    ):
        assert directory_names and directory_names == {path.name for path in (bench.directory / root).iterdir()}
