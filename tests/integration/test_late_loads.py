"""A checkpoint that is loaded in the middle of a run: rollbacks and resets of several tenants, crashes, curves. With a
real database and the fake backend.
"""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from support.engine_bench import BASE, Bench
from tinsmith.db.schema import AUDIT
from tinsmith.store.checkpoints import parse_path
from tinsmith.store.curves import Curves
from tinsmith.store.models import NewModel
from tinsmith.types import LoraSpec

ALICE, BOB = "s:train:0", "b:train:0"


def train_and_save(bench: Bench, model: str, tenant: str = "alice") -> float:
    """Requests 1 to 3: a step and a checkpoint `one`. Returns its weight."""
    bench.train(model, 1, tenant=tenant)
    bench.step(model, 2, tenant=tenant)
    bench.submit(model, 3, "save_weights", {"path": "one"}, tenant=tenant)
    bench.run_until_idle()
    return bench.weight(model)


def load(bench: Bench, model: str, seq_id: int, tenant: str = "alice", *, optimizer: bool = True) -> str:
    body = {"path": f"tinker://{model}/weights/one", "optimizer": optimizer}
    return bench.submit(model, seq_id, "load_weights", body, tenant=tenant)


def test_requests_around_a_load_have_the_weights_of_their_place(bench: Bench) -> None:
    """All are sent at once, those of two tenants among each other; an unstepped gradient goes with the old weights."""
    tenants = {ALICE: "alice", BOB: "bob"}
    for model, tenant in tenants.items():
        bench.model(model, tenant)
    saved = {model: train_and_save(bench, model, tenant) for model, tenant in tenants.items()}
    requests: dict[str, list[str]] = {}
    for model, tenant in tenants.items():
        requests[model] = [
            bench.forward(model, 4, tenant=tenant),
            bench.train(model, 5, tenant=tenant),
            bench.step(model, 6, tenant=tenant),
            bench.forward(model, 7, tenant=tenant),
            bench.train(model, 8, tokens=(7, 8, 9), tenant=tenant),  # its gradient is never stepped
            load(bench, model, 9, tenant),
            bench.forward(model, 10, tenant=tenant),
            bench.train(model, 11, tenant=tenant),
            bench.step(model, 12, tenant=tenant),
            bench.forward(model, 13, tenant=tenant),
        ]
    bench.run_until_idle()
    for model, tenant in tenants.items():
        body = {index: bench.outcome(requests[model][index], tenant).body for index in (0, 3, 6, 9)}
        assert body[6] == body[0] != body[3], "it is back where it was saved"
        assert body[9] == body[3], "and goes the same way again"
        first, second = (bench.result(requests[model][index], tenant)["metrics"] for index in (2, 8))
        assert first == second, "the same step of the same optimizer, without the dropped gradient"
        assert bench.weight(model) != saved[model]


@pytest.mark.parametrize(("optimizer", "step"), [(True, 2.0), (False, 1.0)])
def test_the_optimizer_is_loaded_or_reset_as_the_request_says(bench: Bench, optimizer: bool, step: float) -> None:
    model = bench.model()
    train_and_save(bench, model)
    bench.train(model, 4)
    bench.step(model, 5)
    load(bench, model, 6, optimizer=optimizer)
    bench.train(model, 7)
    after = bench.step(model, 8)
    bench.run_until_idle()
    assert bench.optimizer_step(after) == step


def test_a_run_that_is_set_back_equals_one_created_from_the_checkpoint(bench: Bench) -> None:
    model = bench.model()
    train_and_save(bench, model)
    bench.train(model, 4)
    load(bench, model, 5)
    fresh = "s:train:1"
    bench.models.create(NewModel(fresh, "s", "alice", BASE, LoraSpec(4)))
    bench.submit(fresh, 0, "load_model", {"path": f"tinker://{model}/weights/one", "optimizer": True})
    for start, run in ((6, model), (1, fresh)):
        for seq_id in range(start, start + 6, 2):
            bench.train(run, seq_id, tokens=(seq_id - start, 3))
            bench.step(run, seq_id + 1)
    bench.run_until_idle()
    assert bench.weight(model) == bench.weight(fresh)


@pytest.mark.parametrize("killed_after", range(1, 8))
def test_a_kill_leaves_the_run_before_the_load_or_after_it(bench: Bench, killed_after: int) -> None:
    """The engine dies after so many iterations, and its successor ends with the same weights."""
    model = bench.model()
    saved = train_and_save(bench, model)
    bench.train(model, 4)
    bench.step(model, 5)
    bench.train(model, 6)
    load(bench, model, 7)
    after = bench.forward(model, 8)
    for _ in range(killed_after):
        bench.engine.run_once(0.0)
    bench.restart()
    next_step = bench.step(model, 9, rate=0.0)
    bench.run_until_idle()
    assert bench.outcome(after) is not None and bench.weight() == saved
    metrics = bench.result(next_step)["metrics"]
    assert isinstance(metrics, dict) and metrics["step"] == 2.0 and metrics["grad_norm"] == 0.0


def test_a_load_survives_a_restart_without_its_snapshot_and_without_its_checkpoint(bench: Bench) -> None:
    model = bench.model()
    saved = train_and_save(bench, model)
    bench.train(model, 4)
    bench.step(model, 5)
    load(bench, model, 6)
    bench.run_until_idle()
    bench.checkpoints.delete("alice", parse_path(f"tinker://{model}/weights/one"))
    bench.restart()
    bench.forward(model, 7)
    bench.run_until_idle()
    assert bench.weight() == saved


def test_a_load_that_fails_changes_nothing(bench: Bench) -> None:
    model = bench.model()
    train_and_save(bench, model)
    bench.train(model, 4)
    other = "s:train:1"
    bench.models.create(NewModel(other, "s", "alice", BASE, LoraSpec(4, alpha=8)))
    bench.submit(other, 0, "create_model", {})
    bench.submit(other, 1, "save_weights", {"path": "one"})
    bench.run_until_idle()
    missing = bench.submit(model, 5, "load_weights", {"path": f"tinker://{model}/weights/two", "optimizer": True})
    of_other_alpha = bench.submit(model, 6, "load_weights", {"path": f"tinker://{other}/weights/one"})
    stepped = bench.step(model, 7)
    bench.run_until_idle()
    assert "does not exist" in bench.error(missing)
    assert "has alpha 8, the model has 32" in bench.error(of_other_alpha)
    assert bench.optimizer_step(stepped) == 2.0
    metrics = bench.result(stepped)["metrics"]
    assert isinstance(metrics, dict) and metrics["grad_norm"] > 0, "the gradient was still there"


def test_curves_count_on_and_leave_out_dropped_passes(bench: Bench) -> None:
    model = bench.model()
    train_and_save(bench, model)
    bench.train(model, 4, tokens=(1, 2, 3, 4, 5))
    load(bench, model, 5)
    bench.train(model, 6)
    bench.step(model, 7)
    bench.run_until_idle()
    points = Curves(bench.db).points(model)
    assert [(point.step, point.metrics["tokens:sum"]) for point in points] == [(1, 3.0), (2, 3.0)]
    details = bench.scalar(sa.select(AUDIT.c.details).where(AUDIT.c.event == "checkpoint_loaded"))
    assert details == {"model_id": model, "tinker_path": f"tinker://{model}/weights/one", "optimizer": True}
