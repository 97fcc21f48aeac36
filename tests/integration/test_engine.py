"""The engine turn by turn, with a real database and the fake backend, but without other processes."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
import sqlalchemy as sa

from support.engine_bench import BASE, Bench, save_weights
from tinsmith.backends import MicroBatches
from tinsmith.db.database import now
from tinsmith.db.schema import BODIES, CHECKPOINTS, FUTURES, MODELS, SAMPLERS, SESSIONS
from tinsmith.engine.loop import QUIET_S
from tinsmith.engine.snapshots import SNAPSHOT_OPTIM_STEPS
from tinsmith.engine.versions import MAX_VERSIONS_IN_MEMORY, VERSIONS_IN_MEMORY
from tinsmith.errors import UserError
from tinsmith.runtime import malloc
from tinsmith.storage.directories import Directories
from tinsmith.store.checkpoints import parse_path
from tinsmith.store.custom_losses import CustomLosses, NewCustomLoss, insertion
from tinsmith.store.futures import Futures
from tinsmith.store.sampling_sessions import NewSamplingSession, SamplingSession, SamplingSessions
from tinsmith.types import LoraSpec, OptimStep, Pass, Sample
from tinsmith.wire import tinker_public_pb2 as pb

UNNAMED = {"tenant_id": "t", "session_id": "s", "base_model": "other", "num_tokens": 0, "created_at": 0.0}


# Order.


def test_requests_that_arrive_out_of_order_take_effect_in_order(bench: Bench) -> None:
    model = bench.model()
    second = bench.step(model, 2)
    bench.run_until_idle()
    assert bench.outcome(second) is None
    bench.train(model, 1)
    bench.run_until_idle()
    assert bench.result(second)["metrics"] == {"grad_norm": pytest.approx(1.125), "step": 1.0}


def test_a_refused_number_counts_as_used(bench: Bench) -> None:
    model = bench.model()
    bench.submit(model, 1, "forward_backward", b"", refusal=UserError("no"))
    after = bench.forward(model, 2)
    bench.run_until_idle()
    assert bench.outcome(after) is not None


def test_a_refused_number_whose_row_was_committed_late_is_found_by_the_gap(bench: Bench) -> None:
    model = bench.model()
    with bench.db.write() as connection:  # an arrival number that was allocated and is not yet visible
        reserved = connection.scalar(sa.select(sa.func.max(FUTURES.c.arrival))) + 1
        connection.execute(FUTURES.insert(), {"request_id": "x", "kind": "sample", "state": "done"} | UNNAMED)
    after = bench.forward(model, 2)
    bench.run_until_idle()
    assert bench.outcome(after) is None
    refused = bench.submit(model, 1, "forward_backward", b"", refusal=UserError("no"))
    with bench.db.write() as connection:
        connection.execute(FUTURES.delete().where(FUTURES.c.request_id == "x"))
        connection.execute(FUTURES.update().where(FUTURES.c.request_id == refused).values(arrival=reserved))
    bench.mailbox.drain()
    bench.engine._next_check = 0.0
    bench.run_until_idle()
    assert bench.outcome(after) is not None


def test_a_gap_is_given_up_after_its_time_even_for_a_number_far_away(bench: Bench) -> None:
    model = bench.model()
    far = bench.step(model, 2**61)
    bench.run_until_idle()
    assert bench.outcome(far) is None
    with bench.db.write() as connection:
        connection.execute(FUTURES.update().where(FUTURES.c.request_id == far).values(created_at=now() - 6))
    bench.restart()
    bench.run_until_idle()
    assert bench.outcome(far) is not None
    late = bench.forward(model, 5)
    bench.run_until_idle()
    assert "arrived after" in bench.error(late)


def test_a_gap_is_given_up_while_a_neighbour_keeps_the_engine_busy(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, busy = bench.model(), bench.model("t:train:0", "bob")
    stuck = bench.forward(model, 2)
    with bench.db.write() as connection:
        connection.execute(FUTURES.update().where(FUTURES.c.request_id == stuck).values(created_at=now() - 6))
    monkeypatch.setattr("tinsmith.engine.loop.SAFETY_POLL_S", 0.0)
    bench.restart()
    for seq_id in range(1, 8):
        bench.forward(busy, seq_id, tenant="bob")
        assert bench.engine.run_once(0.0) or seq_id == 1, "there was always something to do"
    assert bench.outcome(stuck) is not None


def test_a_request_whose_wake_up_was_lost_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bench.model()
    monkeypatch.setattr("tinsmith.engine.loop.SAFETY_POLL_S", 0.0)
    bench.restart()
    bench.run_until_idle()
    bench.server_mailbox.close()
    bench.futures = Futures(bench.db)
    lost = bench.forward(model, 1)
    bench.run_until_idle()
    assert bench.outcome(lost) is not None


# Fairness.


def test_a_flood_of_one_tenant_holds_up_another_for_two_steps_at_most(bench: Bench) -> None:
    flooding, quiet = bench.model(), bench.model("t:train:0", "bob")
    tokens = [1] * 60
    bench.engine._settings = bench.settings.model_copy(update={"step_token_budget": 600})
    for seq_id in range(1, 501):
        bench.forward(flooding, seq_id, tokens)
    bench.backend.steps.clear()
    bench.engine.run_once(0.0)
    single = bench.forward(quiet, 1, tokens, tenant="bob")
    bench.engine.run_once(0.0)
    before = len(bench.backend.steps)
    while bench.outcome(single, "bob") is None:
        bench.engine.run_once(0.0)
        assert len(bench.backend.steps) - before <= 2
    waiting = sa.select(sa.func.count()).select_from(FUTURES).where(FUTURES.c.state == "pending")
    assert bench.scalar(waiting) > 400, "the flood was far from over"  # type: ignore[operator]


def test_samples_that_begin_together_look_their_session_up_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.model()
    sessions = [bench.publish("s:train:0", seq_id, seq_id) for seq_id in (1, 2)]
    bench.run_until_idle()
    looked_up: list[str] = []
    find = SamplingSessions.find

    def find_and_record(self: SamplingSessions, name: str) -> SamplingSession | None:
        looked_up.append(name)
        return find(self, name)

    monkeypatch.setattr(SamplingSessions, "find", find_and_record)
    ids = [bench.sample(session, sample_index) for sample_index in range(5) for session in sessions]
    bench.run_until_idle()
    assert sorted(looked_up) == sorted(sessions)
    assert [outcome.error for request_id in ids if (outcome := bench.outcome(request_id))] == [None] * 10


def test_a_flood_of_samples_does_not_hold_up_another_tenants(bench: Bench) -> None:
    for name, tenant in (("s:sample:0", "alice"), ("t:sample:0", "bob")):
        bench.samplers.create(NewSamplingSession(name, name[0], tenant, BASE))
    for seq_id in range(400):
        bench.sample("s:sample:0", seq_id)
    single = bench.sample("t:sample:0", 0, tenant="bob")
    bench.engine.run_once(0.0)
    for _ in range(3):
        bench.engine.run_once(0.0)
    assert bench.outcome(single, "bob") is not None


def test_optimizer_steps_run_at_the_end_of_the_step_of_their_passes(bench: Bench) -> None:
    models = [bench.model(), bench.model("t:train:0"), bench.model("u:train:0")]
    for model in models:
        bench.train(model, 1)
    steps = [bench.step(models[0], 2), bench.step(models[1], 2)]
    last = bench.step(models[2], 3)  # number 2 has not arrived
    merged: list[int] = []
    optim_step = bench.backend.optim_step

    def record(requests: Sequence[OptimStep]) -> list[dict[str, float] | UserError]:
        merged.append(len(requests))
        return optim_step(requests)

    bench.backend.optim_step = record  # type: ignore[method-assign]
    bench.engine._arrivals.fetch()
    bench.engine.run_once(0.0)
    assert [bench.optimizer_step(request_id) for request_id in steps] == [1.0, 1.0] and merged == [2]
    assert bench.outcome(last) is None


# Attribution of crashes.


def test_a_request_that_breaks_a_packed_step_fails_alone(bench: Bench) -> None:
    model, other = bench.model(), bench.model("t:train:0")
    bench.backend.poison = 33
    guilty = bench.train(model, 1, (1, 33))
    innocent = bench.train(other, 1)
    bench.run_until_idle()
    assert bench.backend.steps[0] == [guilty, innocent], "they shared a step"
    assert "the device gave up" in bench.error(guilty)
    outcome = bench.outcome(guilty)
    assert outcome is not None and outcome.category == "server"
    assert bench.outcome(innocent) is not None
    after = [bench.step(model, 2), bench.step(other, 2)]
    bench.run_until_idle()
    norms = [bench.result(request_id)["metrics"] for request_id in after]
    assert norms == [{"grad_norm": 0.0, "step": 1.0}, {"grad_norm": 1.125, "step": 1.0}]


def test_a_model_with_a_failed_pass_in_its_log_comes_back(bench: Bench) -> None:
    model = bench.model()
    bench.backend.poison = 33
    bench.train(model, 1, (33,))
    bench.train(model, 2)
    bench.step(model, 3)
    bench.submit(model, 4, "load_weights", {"path": f"tinker://{model}/weights/none", "optimizer": False})
    bench.run_until_idle()
    weight = bench.weight()
    bench.restart()
    after = bench.step(model, 5)
    bench.run_until_idle()
    assert bench.optimizer_step(after) == 2
    assert bench.weight() == weight  # no gradient since


def test_a_model_that_cannot_be_read_back_fails_without_the_others(bench: Bench) -> None:
    broken, intact = bench.model(), bench.model("t:train:0")
    for model in (broken, intact):
        bench.train(model, 1)
    bench.run_until_idle()
    with bench.db.write() as connection:
        missing_snapshot = {"snapshot_seq_id": 1, "snapshot_directory": "no-such"}
        missing_snapshot |= {f"previous_{name}": value for name, value in missing_snapshot.items()}
        connection.execute(MODELS.update().where(MODELS.c.model_id == broken).values(**missing_snapshot))
    bench.restart()
    failed, fine = bench.step(broken, 2), bench.step(intact, 2)
    bench.run_until_idle()
    assert "could not be restored" in bench.error(failed)
    assert bench.optimizer_step(fine) == 1


def test_a_replay_without_its_body_is_refused_by_name(bench: Bench) -> None:
    model = bench.model()
    request_id = bench.train(model, 1)
    bench.run_until_idle()
    with bench.db.write() as connection:
        connection.execute(BODIES.delete().where(BODIES.c.request_id == request_id))
    bench.restart()
    after = bench.step(model, 2)
    bench.run_until_idle()
    assert request_id in bench.error(after) and "cannot be replayed" in bench.error(after)


# Recovery.


def test_an_unstepped_gradient_survives_a_restart(bench: Bench) -> None:
    model = bench.model()
    bench.train(model, 1)
    bench.run_until_idle()
    bench.restart()
    bench.train(model, 2)
    stepped = bench.step(model, 3)
    bench.run_until_idle()
    assert bench.result(stepped)["metrics"] == {"grad_norm": pytest.approx(2.25), "step": 1.0}


def test_a_refused_step_drops_its_gradient_again_in_the_replay(bench: Bench) -> None:
    model = bench.model()
    bench.train(model, 1)
    bench.run_until_idle()
    bench.backend._models[model] = type(bench.backend._models[model])(LoraSpec(4), 0.0, float("nan"))
    refused = bench.step(model, 2)
    bench.run_until_idle()
    assert "gradient" in bench.error(refused)
    assert bench.scalar(sa.select(BODIES.c.request_id).where(BODIES.c.request_id == refused)) == refused


@pytest.mark.parametrize("steps_before", [3, SNAPSHOT_OPTIM_STEPS, 2 * SNAPSHOT_OPTIM_STEPS + 5])
def test_a_restart_replays_no_more_than_a_snapshots_worth(bench: Bench, steps_before: int) -> None:
    model = bench.model()
    for index in range(steps_before):
        bench.train(model, 2 * index + 1)
        bench.step(model, 2 * index + 2, rate=0.5**index)
    bench.run_until_idle(400)
    weight = bench.weight()
    assert len(list((bench.directory / "snapshots").glob("*"))) == steps_before // SNAPSHOT_OPTIM_STEPS
    bench.restart()
    replayed: list[int] = []
    step = bench.backend.optim_step
    bench.backend.optim_step = lambda steps: replayed.append(1) or step(steps)  # type: ignore[method-assign]
    bench.forward(model, 2 * steps_before + 1)
    bench.run_until_idle()
    assert bench.weight() == weight
    assert len(replayed) == steps_before % SNAPSHOT_OPTIM_STEPS


def test_an_engine_that_keeps_dying_does_not_replay_ever_more(bench: Bench) -> None:
    model = bench.model()
    seq_id = 1
    for _ in range(4):
        for _ in range(SNAPSHOT_OPTIM_STEPS // 2 + 1):
            bench.step(model, seq_id)
            seq_id += 1
        bench.run_until_idle(100)
        bench.restart()
    snapshot = bench.scalar(sa.select(MODELS.c.snapshot_seq_id))
    assert isinstance(snapshot, int) and seq_id - snapshot <= SNAPSHOT_OPTIM_STEPS + 1


def test_two_snapshots_are_kept_and_the_bodies_that_the_older_one_does_not_cover(bench: Bench) -> None:
    model = bench.model()
    for seq_id in range(1, 3 * SNAPSHOT_OPTIM_STEPS + 1):
        bench.step(model, seq_id)
    bench.run_until_idle(200)
    stored_bodies = sa.select(sa.func.min(FUTURES.c.seq_id), sa.func.count()).join(
        BODIES, BODIES.c.request_id == FUTURES.c.request_id
    )
    with bench.db.read() as connection:
        assert tuple(connection.execute(stored_bodies).one()) == (2 * SNAPSHOT_OPTIM_STEPS + 1, SNAPSHOT_OPTIM_STEPS)
    assert len(list((bench.directory / "snapshots").iterdir())) == 2


def test_a_snapshot_that_cannot_be_written_costs_nothing_but_a_longer_replay(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.engine.snapshots.RETRY_S", 0.0)
    model = bench.model()
    bench.backend.breaks["save"] = OSError(28, "No space left on device")
    seq_id = 1
    for seq_id in range(1, SNAPSHOT_OPTIM_STEPS + 3):
        bench.step(model, seq_id)
    bench.run_until_idle(200)
    assert bench.optimizer_step(f"{model}:{seq_id}") == seq_id
    assert list((bench.directory / "snapshots").iterdir()) == []
    bench.backend.breaks.clear()
    bench.step(model, seq_id + 1)
    bench.run_until_idle()
    assert bench.scalar(sa.select(MODELS.c.snapshot_seq_id)) == seq_id + 1
    bench.restart()
    after = bench.step(model, seq_id + 2)
    bench.run_until_idle()
    assert bench.optimizer_step(after) == seq_id + 2


def test_a_load_survives_the_deletion_of_its_checkpoint(bench: Bench) -> None:
    model = bench.model()
    bench.train(model, 1)
    bench.step(model, 2)
    bench.submit(model, 3, "save_weights", {"path": "one"})
    bench.run_until_idle()
    weight = bench.weight()
    bench.train(model, 4)
    bench.step(model, 5)
    path = f"tinker://{model}/weights/one"
    bench.submit(model, 6, "load_weights", {"path": path, "optimizer": True})
    bench.run_until_idle()
    assert bench.weight() == weight
    bench.checkpoints.delete("alice", parse_path(path))
    bench.restart()
    bench.forward(model, 7)
    bench.run_until_idle()
    assert bench.weight() == weight


# Unloading.


def test_unloading_fails_what_waits_with_the_reason_and_forgets_everything(bench: Bench) -> None:
    model = bench.model()
    for seq_id in range(1, SNAPSHOT_OPTIM_STEPS + 1):
        bench.step(model, seq_id)
    bench.run_until_idle(100)
    bench.restart()
    waiting = bench.forward(model, SNAPSHOT_OPTIM_STEPS + 2)
    bench.run_until_idle()
    unloading = bench.submit(model, None, "unload_model", {"reason": "no heartbeat for 1 s"})
    bench.run_until_idle()
    assert bench.result(unloading) == {"model_id": model, "type": "unload_model", "status": "unloaded"}
    assert "no heartbeat for 1 s" in bench.error(waiting)
    assert not bench.backend.has_model(model)
    assert list((bench.directory / "snapshots").iterdir()) == []
    after = bench.forward(model, SNAPSHOT_OPTIM_STEPS + 1)
    bench.run_until_idle()
    assert "no heartbeat for 1 s" in bench.error(after)


# Checkpoints.


def directories(bench: Bench) -> set[str]:
    root = bench.directory / "checkpoints"
    return {path.name for path in root.iterdir()} if root.exists() else set()


def test_a_save_on_a_full_disk_fails_alone(bench: Bench) -> None:
    model, other = bench.model(), bench.model("t:train:0")
    bench.backend.breaks["save"] = OSError(28, "No space left on device")
    failed = bench.submit(model, 1, "save_weights", {"path": "one"})
    fine = bench.forward(other, 1)
    bench.run_until_idle()
    assert "No space left on device" in bench.error(failed)
    assert bench.outcome(fine) is not None
    assert bench.checkpoints.page("alice", 10, 0) == ([], 0)
    assert bench.scalar(sa.select(CHECKPOINTS.c.state)) == "failed"
    assert directories(bench) == set(), "nothing of it stays on the disk that is full"
    bench.backend.breaks.clear()
    bench.result(save_weights(bench, model, 2))
    assert bench.checkpoints.page("alice", 10, 0)[1] == 1


def test_a_failed_overwrite_leaves_what_was_there(bench: Bench) -> None:
    model = bench.model()
    save_weights(bench, model, 1)
    before = directories(bench)
    bench.backend.breaks["save"] = OSError(28, "No space left on device")
    bench.error(save_weights(bench, model, 2, overwrite=True))
    bench.backend.breaks.clear()
    assert directories(bench) == before
    checkpoint = bench.checkpoints.get("alice", parse_path(f"tinker://{model}/weights/one"))
    with bench.checkpoints.reading(checkpoint) as directory:
        assert directory.is_dir()


def test_an_overwritten_directory_is_removed_after_the_new_row_is_there(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bench.model()
    save_weights(bench, model, 1)
    (before,) = directories(bench)
    directories_seen: list[object] = []
    discard = Directories.discard

    def watch(self: Directories, name: str | None) -> None:
        if name == before:
            directories_seen.append(bench.scalar(sa.select(CHECKPOINTS.c.directory)))
        discard(self, name)

    monkeypatch.setattr(Directories, "discard", watch)
    bench.result(save_weights(bench, model, 2, overwrite=True))
    (after,) = directories(bench)
    assert after != before
    assert directories_seen == [after], "another connection sees the new row when the old directory goes"


def test_an_interrupted_save_has_failed_after_the_restart(bench: Bench) -> None:
    model = bench.model()
    bench.backend.breaks["save"] = KeyboardInterrupt()  # type: ignore[assignment]
    request_id = bench.submit(model, 1, "save_weights", {"path": "one"})
    with pytest.raises(KeyboardInterrupt):
        bench.run_until_idle()
    assert bench.scalar(sa.select(CHECKPOINTS.c.state)) == "pending"
    assert bench.outcome(request_id) is None
    bench.restart()
    assert bench.scalar(sa.select(CHECKPOINTS.c.state)) == "failed"
    bench.run_until_idle()  # the save is still wanted: it is done now
    assert bench.result(request_id)["path"] == f"tinker://{model}/weights/one"
    assert bench.scalar(sa.select(CHECKPOINTS.c.state)) == "completed"


# Versions.


def test_samplers_of_every_age_sample_their_own_weights(bench: Bench) -> None:
    model = bench.model()
    seq_id, samplers = 1, []
    for index in range(7):
        bench.train(model, seq_id)
        bench.step(model, seq_id + 1, rate=0.01 * (index + 1))
        samplers.append(bench.publish(model, seq_id + 2, index))
        seq_id += 3
    bench.run_until_idle(100)
    bench.engine.run_once(2 * QUIET_S)  # idle for a moment: the oldest leave memory
    results = [bench.sample(sampler) for sampler in samplers]
    bench.run_until_idle()
    answers = [bench.outcome(request_id) for request_id in results]
    assert [answer.error for answer in answers if answer] == [None] * 7
    assert len({answer.body for answer in answers if answer}) == 7
    on_disk = sa.select(sa.func.count()).select_from(SAMPLERS).where(SAMPLERS.c.directory.is_not(None))
    assert bench.scalar(on_disk) == 3


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_sampler_survives_any_end_of_its_engine(bench: Bench, end: str) -> None:
    model = bench.model()
    bench.train(model, 1)
    bench.step(model, 2)
    sampler = bench.publish(model, 3, 0)
    bench.train(model, 4)
    bench.step(model, 5, rate=0.25)
    bench.run_until_idle()
    before = bench.sample(sampler, 0)
    bench.run_until_idle()
    if end == "stop":
        bench.engine.stop()
    bench.restart()
    after = bench.sample(sampler, 1)
    bench.run_until_idle()
    outcomes = [bench.outcome(request_id) for request_id in (before, after)]
    assert outcomes[0] == outcomes[1] and outcomes[0] is not None and outcomes[0].error is None
    assert bench.backend.has_model(model) == (end == "kill"), "files need no replay"


def test_an_engine_that_cannot_keep_its_versions_stops_all_the_same(bench: Bench) -> None:
    model = bench.model()
    bench.publish(model, 1, 0)
    bench.run_until_idle()
    (bench.directory / "versions").write_text("no directory can be made here")
    bench.engine.stop()


def test_versions_that_are_sampled_from_disk_do_not_pile_up_in_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.engine.versions.LOADED_VERSIONS", 2)
    model = bench.model()
    samplers = [bench.publish(model, index + 1, index) for index in range(12)]
    bench.run_until_idle(20)
    bench.engine.run_once(2 * QUIET_S)  # idle for a moment
    for seq_id in range(2):
        for sampler in samplers:
            bench.sample(sampler, seq_id)
        bench.run_until_idle(40)
    assert len(bench.backend._versions) == VERSIONS_IN_MEMORY + 2
    assert all(bench.outcome(f"{sampler}:1") is not None for sampler in samplers)


def test_a_cached_prompt_is_found_by_its_own_tenant_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    scopes: list[str] = []
    submit = bench.backend.sampler.submit

    def note(sample: Sample) -> None:
        scopes.append(sample.cache_scope)
        submit(sample)

    monkeypatch.setattr(bench.backend.sampler, "submit", note)
    for tenant in ("alice", "bob"):
        sampler = f"{tenant}:sample:0"
        bench.samplers.create(NewSamplingSession(sampler, tenant, tenant, BASE))
        bench.sample(sampler, tenant=tenant)
    bench.run_until_idle()
    assert sorted(scopes) == ["alice", "bob"]


def test_a_publish_under_a_name_in_use_is_refused_without_effect(bench: Bench) -> None:
    model = bench.model()
    sampler = bench.publish(model, 1, sampler_seq_id=7)
    bench.run_until_idle()
    before = bench.sample(sampler)
    bench.train(model, 2)
    bench.step(model, 3)
    bench.publish(model, 4, sampler_seq_id=7)
    step = bench.step(model, 5)
    bench.run_until_idle()
    assert "is in use" in bench.error(f"{model}:4")
    assert bench.outcome(step) is not None
    after = bench.sample(sampler, 1)
    bench.run_until_idle()
    assert bench.outcome(before).body == bench.outcome(after).body  # type: ignore[union-attr]


def test_a_publish_writes_no_file_unless_the_engine_is_never_idle(bench: Bench) -> None:
    model = bench.model()
    for index in range(VERSIONS_IN_MEMORY + 3):
        bench.publish(model, index + 1, index)
    bench.run_until_idle(20)
    assert not list((bench.directory / "versions").glob("*"))
    bench.engine.run_once(2 * QUIET_S)  # idle for a moment
    assert len(list((bench.directory / "versions").glob("*"))) == 3
    for index in range(VERSIONS_IN_MEMORY + 3, VERSIONS_IN_MEMORY + MAX_VERSIONS_IN_MEMORY + 3):
        bench.publish(model, index + 1, index)
    bench.run_until_idle(200)
    assert len(list((bench.directory / "versions").glob("*"))) == 3 + VERSIONS_IN_MEMORY


TRACED: dict[str, object] = {
    "name": "sum",
    "inputs": [{"name": "logprobs", "rank": 1}],
    "graph": {
        "nodes": [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
            {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "logprobs"}]},
            {"op": "output", "name": "output", "target": "output",
             "args": [{"tuple": [{"ref": "sum_1"}, {"dict": {}}]}]},
        ]
    },
}  # fmt: skip


def custom_pass(bench: Bench, model: str, seq_id: int, loss_id: str) -> str:
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="custom")
    message.loss_fn_config_v2["loss_id"].text = loss_id
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
    targets = np.array([2, 3], "<i8").tobytes()
    datum.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(dense=targets, dtype=pb.DTYPE_INT64))
    return bench.submit(model, seq_id, "forward_backward", message.SerializeToString())


def test_a_replay_finds_the_custom_loss_although_its_session_has_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bench.model()
    losses = CustomLosses(bench.db)
    definition = json.dumps(TRACED).encode()
    with bench.db.write() as connection:
        connection.execute(insertion(NewCustomLoss("s:loss:0", "s", "alice", "sum", definition)))
    custom_pass(bench, model, 1, "s:loss:0")
    unknown = custom_pass(bench, model, 2, "s:loss:1")
    bench.run_until_idle()
    assert "'s:loss:1' is not a custom loss of session 's'" in bench.error(unknown)
    session_row = {"session_id": "s", "tenant_id": "alice", "state": "expired", "tags": [], "created_at": 0.0}
    with bench.db.write() as connection:
        connection.execute(SESSIONS.insert().values(**session_row, last_heartbeat_at=0.0, closed_at=1.0))
    assert losses.sweep(now()) == 0, "the model may still be replayed"
    bench.restart()
    passes_run: list[Pass] = []
    run = bench.backend.run_passes
    monkeypatch.setattr(bench.backend, "run_passes", lambda passes: passes_run.extend(passes) or run(passes))
    bench.step(model, 3)
    bench.run_until_idle()
    assert [(run_pass.custom_loss is not None, run_pass.replayed) for run_pass in passes_run] == [(True, True)]
    with bench.db.write() as connection:
        connection.execute(MODELS.update().values(state="unloaded"))
    assert losses.sweep(now()) == 1
    with pytest.raises(UserError, match="is not a custom loss"):
        losses.get("s", "s:loss:0")


def test_a_pass_that_cannot_be_replayed_costs_its_model_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = bench.model(), bench.model("t:train:0")
    bench.train(model, 1)
    bench.run_until_idle()
    bench.restart()

    def refuse(passes: Sequence[Pass]) -> MicroBatches:
        yield from ()
        return [UserError("no") for _ in passes]

    monkeypatch.setattr(bench.backend, "run_passes", refuse)
    failed, fine = bench.step(model, 2), bench.step(other, 1)
    bench.run_until_idle()
    assert "cannot be replayed: no" in bench.error(failed)
    assert bench.optimizer_step(fine) == 1


def test_the_lane_of_an_idle_run_is_forgotten_and_made_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bench.model()
    bench.step(model, 1)
    refused = bench.submit(model, 2, "forward", b"", refusal=UserError("no"))
    bench.run_until_idle()
    monkeypatch.setattr("tinsmith.engine.queues.IDLE_LANE_S", 0.0)
    bench.engine._skip_gaps()
    assert not bench.engine._queues.lanes
    third = bench.step(model, 3)
    bench.run_until_idle()
    bench.engine._arrivals.fetch_late()  # finds the refused requests
    bench.run_until_idle()
    assert bench.optimizer_step(third) == 2 and bench.outcome(refused) is not None


def test_an_engine_that_becomes_idle_returns_freed_memory_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[None] = []
    monkeypatch.setattr(malloc, "trim", lambda: trims.append(None))
    monkeypatch.setattr("tinsmith.engine.loop.TRIM_AFTER_S", 0.0)
    model = bench.model()
    for seq_id in (1, 2):
        bench.run_until_idle()
        trims.clear()
        bench.step(model, seq_id)
        bench.run_until_idle()
        assert len(trims) == 1
