"""What each stage of a bulk job did, in its status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from tinsmith.batch.coordinator.rows import JobRecord
from tinsmith.batch.coordinator.stage_figures import MAX_STAGES, add_stage_work, describe_stages
from tinsmith.batch.stages import split
from tinsmith.batch.types import AttemptOutcome, StageWork

STEPS: list[dict[str, Any]] = [
    {"type": "map", "name": "clean", "stage_options": {"num_cpus": 2, "concurrency": 4}},
    {"type": "map", "name": "embed", "stage_options": {"num_gpus": 0.5, "concurrency": 1}},
    {"type": "operations", "name": "Grade"},
]
WORK = (StageWork(0, 10, 8, 1, 0.5), StageWork(1, 8, 8, 0, 2.0))


def job(**changes: object) -> JobRecord:
    values: dict[str, Any] = dict.fromkeys(JobRecord.__dataclass_fields__)
    return replace(cast("JobRecord", JobRecord(**values)), **changes)  # type: ignore[arg-type]


def test_a_batch_that_is_committed_adds_to_its_stages() -> None:
    figures = add_stage_work([], WORK)
    figures = add_stage_work(figures, [StageWork(1, 5, 10, 0, 1.0)])
    assert figures == [
        {"batches": 1, "rows_in": 10, "rows_out": 8, "rows_failed": 1, "work_s": 0.5},
        {"batches": 2, "rows_in": 13, "rows_out": 18, "rows_failed": 0, "work_s": 3.0},
    ]
    assert add_stage_work(figures, [StageWork(MAX_STAGES, 1, 1, 0, 1.0), StageWork(-1, 1, 1, 0, 1.0)]) == figures


def test_a_step_on_a_gpu_is_told_from_one_on_a_cpu() -> None:
    started = job(stage_figures=add_stage_work([], WORK), started_at=100.0, ended_at=None)
    first, second, third = describe_stages(started, split(STEPS), 110.0)
    assert [stage["device"] for stage in (first, second, third)] == ["CPU", "GPU", "service"]
    assert (first["name"], first["resources"], first["processes"]) == ("step 1 (clean)", {"num_cpus": 2}, 4)
    assert second["resources"] == {"num_gpus": 0.5}
    assert (first["rows_per_s"], first["busy"]) == pytest.approx((1.0, 0.05))
    assert (third["batches"], third["rows_in"], third["rows_per_s"]) == (0, 0, 0.0)
    ended = describe_stages(replace(started, ended_at=104.0), split(STEPS), 1e9)
    assert ended[1]["rows_per_s"] == pytest.approx(2.0), "the time since its end does not count"


def test_before_the_start_there_are_no_rates() -> None:
    (stage,) = describe_stages(job(), split([{"type": "map", "name": "a"}]), 110.0)
    assert (stage["rows_per_s"], stage["busy"], stage["device"], stage["batches"]) == (None, None, "CPU", 0)


def test_the_figures_of_a_batch_travel_with_its_outcome() -> None:
    outcome = AttemptOutcome(0, 1, rows_ok=8, rows_failed=2, stage_work=WORK)
    assert AttemptOutcome.from_dict(outcome.to_dict()) == outcome
