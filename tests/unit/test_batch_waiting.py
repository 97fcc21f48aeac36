"""Why a bulk job waits for its first worker, as its status says it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.job_rows import create_owned_job
from tinsmith.api.routes import batch as routes
from tinsmith.api.services import Services
from tinsmith.batch.coordinator.rows import JobRecord
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.db.database import Database

BEGIN = "no worker of the pool 'local' has started for"


@pytest.fixture
def jobs(db: Database) -> BatchJobs:
    return BatchJobs(db)


def explain(jobs: BatchJobs, job: JobRecord, **sizes: int) -> str | None:
    pools = [{"name": name, "workers": size} for name, size in sizes.items()]
    services = SimpleNamespace(batch_jobs=jobs, coordinator=SimpleNamespace(pools=lambda _: pools))
    current = jobs.find(job.tenant_id, job.job_id)
    return routes._explain_wait(cast("Services", services), current, jobs.workers(job.job_id))


def test_a_job_that_has_waited_a_minute_says_why(jobs: BatchJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    job = create_owned_job(jobs, rows=4)
    assert explain(jobs, job, local=2) is None, "it has just come"
    monkeypatch.setattr(routes, "now", lambda: job.created_at + 90)
    assert explain(jobs, job, gpu=2) == f"{BEGIN} 90 s: this server has no such pool now"
    assert explain(jobs, job, local=0) == f"{BEGIN} 90 s: it has no workers; the operator changes its size"
    no_room = f"{BEGIN} 90 s: its machines have no room, or none has what the job or the pool asks for"
    assert explain(jobs, job, local=2) == no_room
    jobs.record_launch("local", "w1", job.job_id, "one", "local")
    assert explain(jobs, job, local=2) == no_room, "a worker that starts"
    for index in range(2):
        other = create_owned_job(jobs, rows=1)
        jobs.record_launch("local", f"other-{index}", other.job_id, "one", "local")
        jobs.record_worker(f"other-{index}", "7")
        count = "another job" if index == 0 else "2 other jobs"
        assert explain(jobs, job, local=2) == (
            f"{BEGIN} 90 s: its 2 workers run {count}; a higher priority or weight goes first"
        )
    jobs.record_worker("w1", "8")
    assert explain(jobs, job, local=2) is None


def test_a_job_that_has_ended_or_worked_waits_for_nothing(jobs: BatchJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    job: Any = create_owned_job(jobs, rows=4)
    monkeypatch.setattr(routes, "now", lambda: job.created_at + 90)
    jobs.set_status(job.job_id, "one", "FAILED", "for a test")
    assert explain(jobs, job, local=2) is None
