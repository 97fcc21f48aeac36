"""The history of the machine, from the engines' counters to the dashboard's route."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.http_harness import BASE, BOB, Harness, close, make_harness
from tinsmith.cluster.engines import Engines, Seat
from tinsmith.db.database import now
from tinsmith.server.machine_history import MachineObserver
from tinsmith.store.machine_history import LEVELS, MachineHistory, MachineWork
from tinsmith.telemetry.metrics import OTHER, EngineCounts

HERE = "here:1:/data"


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path, operator_tenants=("alice",))
    yield new_harness
    close(new_harness)


def read(harness: Harness, key: str | None = None, span: str = "hour") -> dict[str, Any]:
    path = f"dashboard/machine/history?span={span}"
    answer = harness.get(path, key) if key else harness.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def add_work(harness: Harness, tenants: dict[str, tuple[float, float]]) -> None:
    trained, sampled = (sum(pair[index] for pair in tenants.values()) for index in (0, 1))
    sums = {"training_s": 5.0, "sampling_s": 2.0, "loading_s": 1.0, "memory_byte_s": 10.0 * 2**30}
    observed = MachineWork(10.0, 10.0, trained_tokens=trained, sampled_tokens=sampled, tenants=tenants, **sums)
    machine = MachineWork(10.0, device_s=10.0, device_busy_s=2.5)
    harness.services.machine_history.add(HERE, now() - 30, {BASE: observed, "": machine})


def summed(answer: dict[str, Any], name: str) -> float:
    (entry,) = answer["base_models"]
    return sum(point[name] or 0.0 for point in entry["points"])


@pytest.mark.parametrize("span", ["day", "month"])
def test_a_tenant_sees_the_machines_totals_and_its_own_samples_alone(harness: Harness, span: str) -> None:
    add_work(harness, {"alice": (600.0, 30.0), "bob": (200.0, 10.0)})
    theirs = read(harness, BOB, span)
    whole = read(harness, span=span)
    assert (theirs["is_operator"], theirs["tenants"]) == (False, [])
    (entry,) = theirs["base_models"]
    assert entry["base_model"] == BASE
    assert (entry["trained_tokens"], entry["sampled_tokens"]) == pytest.approx((800.0, 10.0)), "not of the whole step"
    point = entry["points"][-1]
    assert point["trained_tokens"] == pytest.approx(80.0) and point["sampled_tokens"] == pytest.approx(1.0)
    assert point["memory_bytes"] == pytest.approx(2**30) and point["memory_budget"] is None
    shares = [point[name] for name in ("training", "sampling", "loading", "idle")]
    assert shares == pytest.approx([0.5, 0.2, 0.1, 0.2])
    assert [device["utilisation"] for device in theirs["device"]] == pytest.approx([0.25] * len(theirs["device"]))
    assert "alice" not in harness.get(f"dashboard/machine/history?span={span}", BOB).text
    assert whole["is_operator"] and summed(whole, "sampled_tokens") == pytest.approx(
        4 * summed(theirs, "sampled_tokens")
    )
    assert [(row["tenant_id"], row["trained_share"], row["sampled_share"]) for row in whole["tenants"]] == [
        ("alice", pytest.approx(0.75), pytest.approx(0.75)),
        ("bob", pytest.approx(0.25), pytest.approx(0.25)),
    ]


def test_samples_that_are_counted_with_those_of_others_are_not_known(harness: Harness) -> None:
    add_work(harness, {"alice": (600.0, 30.0), OTHER: (200.0, 10.0)})
    (entry,) = read(harness, BOB)["base_models"]
    assert {point["sampled_tokens"] for point in entry["points"]} <= {None, 0.0}
    assert entry["sampled_tokens"] is None and entry["trained_tokens"] == pytest.approx(800.0)


def test_an_unknown_span_is_refused_and_an_empty_history_is_empty(harness: Harness) -> None:
    refusal = harness.get("dashboard/machine/history?span=year")
    assert refusal.status_code == 400 and "hour" in refusal.text
    empty = read(harness)
    assert empty["base_models"] == empty["device"] == empty["tenants"] == [] and empty["step_s"] == 10


def test_what_engines_count_is_recorded_once(harness: Harness) -> None:
    database = harness.services.models._db
    seconds = iter([0.0, 10.0, 20.0, 5000.0])
    work_s = {"passes": 3.0, "optim_steps": 1.0, "decode": 2.0, "load_state": 0.5}
    counts = {BASE: EngineCounts(work_s, 90.0, 7.0, {"a": (90.0, 7.0)}, 2**20)}
    engines = Engines(database, HERE)
    engines.take(Seat(BASE), 600.0)
    observer = MachineObserver(
        MachineHistory(database),
        SimpleNamespace(engine_counts=lambda: counts),  # type: ignore[arg-type]
        engines,
        SimpleNamespace(list_shares=lambda: [0.2, 0.6]),  # type: ignore[arg-type]
        lambda: next(seconds),
    )
    observer.observe()
    observer.observe()  # nothing is new
    engines.set_state(Seat(BASE), "ready")
    observer.observe()  # after a long sleep
    total = MachineWork()
    for period in harness.services.machine_history.list_periods(LEVELS["month"], now()):
        if period.base_model == BASE:
            total.add(period.totals)
        else:
            assert period.totals.device_busy_s == pytest.approx(0.4 * period.totals.device_s)
    assert total.observed_s == total.engine_s == pytest.approx(10 + 10 + 60)
    assert (total.training_s, total.sampling_s) == pytest.approx((4.0, 2.0))
    assert total.loading_s == pytest.approx(0.5 + 20.0), "an engine that starts is loading"
    assert (total.trained_tokens, total.sampled_tokens) == pytest.approx((90.0, 7.0))
    assert total.tenants == {"a": pytest.approx((90.0, 7.0))}
    assert total.memory_byte_s == pytest.approx(80.0 * 2**20)
