"""States of checkpoint jobs in the database, and the bounds of memory and disk of a merge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa

from support.databases import fresh_url
from tinsmith.db.database import now
from tinsmith.db.factory import open_database
from tinsmith.db.schema import CHECKPOINT_JOBS
from tinsmith.errors import NotFoundError, TooManyRequestsError, UserError
from tinsmith.exchange import checkpoint_job
from tinsmith.runtime.sizes import GIBIBYTE
from tinsmith.store import checkpoint_jobs
from tinsmith.store.checkpoint_jobs import CheckpointJobs, JobProgress, JobResult, NewCheckpointJob

MERGE = NewCheckpointJob("alice", "tinker://run/weights/one", "base", "merge")


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[CheckpointJobs]:
    database = open_database(fresh_url(tmp_path))
    yield CheckpointJobs(database, "here")
    database.close()


def test_jobs_run_one_after_another_and_report_a_rate(jobs: CheckpointJobs) -> None:
    first, second = jobs.add(MERGE), jobs.add(MERGE)
    running = jobs.begin_next()
    assert running is not None and (running.job_id, running.state) == (first.job_id, "running")
    assert jobs.report(running, JobProgress("merging", 0, 10, 0, 100)) == "running"
    jobs._db.execute(CHECKPOINT_JOBS.update().values(phase_began_at=now() - 10))
    jobs.report(running, JobProgress("merging", 4, 10, 40, 100))
    job = jobs.get("alice", first.job_id)
    assert job.bytes_per_s == pytest.approx(4, rel=0.1) and job.remaining_s == pytest.approx(15, rel=0.1)
    assert jobs.finish(running, JobResult("/merged/one", {"config.json": 7}, 7))
    assert jobs.get("alice", first.job_id).state == "done" and jobs.result_bytes("alice") == 7
    assert jobs.begin_next() is not None and jobs.get("alice", second.job_id).state == "running"


def test_a_job_of_a_silent_server_is_interrupted_and_a_late_report_changes_nothing(jobs: CheckpointJobs) -> None:
    job_id = jobs.add(MERGE).job_id
    lost = jobs.begin_next()
    assert lost is not None
    silent_since = now() - checkpoint_jobs.SILENCE_S - 1
    jobs._db.execute(CHECKPOINT_JOBS.update().values(reported_at=silent_since))
    assert jobs.get("alice", job_id).state == "interrupted"
    elsewhere = CheckpointJobs(jobs._db, "there")
    assert elsewhere.restart("alice", job_id).state == "queued" and jobs.begin_next() is None
    again = elsewhere.begin_next()
    assert again is not None and again.attempt == 2
    assert jobs.report(lost, JobProgress("merging")) is None and not jobs.finish(lost, JobResult("/merged/old"))
    assert elsewhere.finish(again, JobResult("/merged/new", {}, 0))
    assert jobs.get("alice", job_id).directory == "/merged/new"


def test_a_cancelled_job_has_no_result(jobs: CheckpointJobs) -> None:
    job_id = jobs.add(MERGE).job_id
    job = jobs.begin_next()
    assert job is not None
    with pytest.raises(UserError, match="cancel it before"):
        jobs.delete("alice", job_id)
    assert jobs.cancel("alice", job_id).state == "cancelling"
    assert jobs.report(job, JobProgress("merging")) == "cancelling" and not jobs.finish(job, JobResult("/merged/x"))
    jobs.recover()
    assert jobs.get("alice", job_id).state == "cancelled" and jobs.cancel("alice", job_id).state == "cancelled"
    jobs.delete("alice", job_id)
    with pytest.raises(NotFoundError):
        jobs.get("alice", job_id)


def test_another_tenant_sees_and_changes_nothing(jobs: CheckpointJobs) -> None:
    job_id = jobs.add(MERGE).job_id
    for act in (jobs.get, jobs.cancel, jobs.restart, jobs.delete):
        with pytest.raises(NotFoundError):
            act("bob", job_id)
    assert jobs.page("bob", 10, 0) == ([], 0) and jobs.get("alice", job_id).state == "queued"


def test_waiting_jobs_of_a_tenant_are_bounded_and_a_typed_token_is_not_stored(jobs: CheckpointJobs) -> None:
    upload = NewCheckpointJob("alice", MERGE.tinker_path, "base", "upload", repository="a/b", has_token=True)
    job = jobs.add(upload, "hf_secret")
    with jobs._db.read() as connection:
        assert "hf_secret" not in str(connection.execute(sa.select(CHECKPOINT_JOBS)).all())
    assert jobs.tokens.take(job.job_id) == "hf_secret" and jobs.tokens.take(job.job_id) is None
    for _ in range(checkpoint_jobs.MAX_UNFINISHED - 1):
        jobs.add(MERGE)
    with pytest.raises(TooManyRequestsError):
        jobs.add(MERGE)
    jobs.cancel("alice", job.job_id)
    jobs.add(MERGE)
    with pytest.raises(TooManyRequestsError):
        jobs.restart("alice", job.job_id, "hf_secret")
    assert jobs.tokens.take(job.job_id) is None
    jobs.add(NewCheckpointJob("bob", MERGE.tinker_path, "base", "merge"))


@dataclass(frozen=True)
class Sizes:
    largest_tensor_bytes: int
    largest_work_bytes: int


def test_a_merge_is_bounded_by_the_free_memory_or_refused_with_the_figures() -> None:
    plan = Sizes(GIBIBYTE, 4 * GIBIBYTE)
    assert checkpoint_job.choose_shard_bytes(plan, 100 * GIBIBYTE) == 5_000_000_000  # type: ignore[arg-type]
    assert checkpoint_job.choose_shard_bytes(plan, 8 * GIBIBYTE) == (8 * GIBIBYTE - GIBIBYTE // 2 - 4 * GIBIBYTE) // 2  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"needs 6\.5 GiB of free memory, and the server's host has 6\.0 GiB"):
        checkpoint_job.choose_shard_bytes(plan, 6 * GIBIBYTE)  # type: ignore[arg-type]


def test_a_merge_that_would_fill_the_disk_is_refused() -> None:
    checkpoint_job.check_disk(GIBIBYTE, 3 * GIBIBYTE)
    with pytest.raises(UserError, match=r"takes 2\.5 GiB, and the server's disk has 3\.0 GiB free"):
        checkpoint_job.check_disk(5 * GIBIBYTE // 2, 3 * GIBIBYTE)
