"""Machines that run one bulk job together, as rows: what a member may write, and what follows from its end."""

from __future__ import annotations

import pytest

from support.job_rows import LEASE_S, claim, create_owned_job, outcome
from tinsmith.batch.coordinator.rows import JobRecord, SupersededError
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.types import AttemptFailure, AttemptOutcome, FailureCause, PartInfo
from tinsmith.db.database import Database
from tinsmith.db.schema import BATCH_MEMBERS as MEMBERS
from tinsmith.db.schema import BATCH_STATES as STATES


@pytest.fixture
def jobs(db: Database) -> BatchJobs:
    return BatchJobs(db)


def join(jobs: BatchJobs, job: JobRecord, token: str = "two") -> None:
    assert jobs.members.join(job.job_id, token, f"machine {token}", LEASE_S) is not None


def expire(jobs: BatchJobs, job: JobRecord, token: str) -> None:
    """End the leases of a member and of its batches now."""
    jobs._db.execute(
        MEMBERS.update().where(MEMBERS.c.job_id == job.job_id, MEMBERS.c.token == token).values(lease_at=0)
    )
    of_member = STATES.update().where(STATES.c.job_id == job.job_id, STATES.c.attempt_owner_token == token)
    jobs._db.execute(of_member.values(lease_expires_at=0))


def commit(jobs: BatchJobs, job: JobRecord, token: str, count: int = 1) -> JobRecord:
    claims = claim(jobs, job, count, token)
    settled = [(batch, outcome(batch)) for batch in claims]
    return jobs.settle_and_claim(job.job_id, token, settled, {}, LEASE_S).job


def test_owner_and_members_commit_batches_of_one_job(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=8)
    assert jobs.members.joinable_jobs("two", ["local"]) == [job.job_id]
    assert jobs.members.joinable_jobs("one", ["local"]) == [], "its owner"
    assert jobs.members.joinable_jobs("two", ["gpu"]) == [], "another pool"
    join(jobs, job)
    assert jobs.members.joinable_jobs("two", ["local"]) == [], "it has joined"
    commit(jobs, job, "two")
    commit(jobs, job, "one")
    last = commit(jobs, job, "two", 2)
    assert last.done and last.rows_ok == 8
    assert [batch.span.start_idx for batch in jobs.iter_committed_batches(job.job_id)] == [0, 2, 4, 6]
    assert jobs.members.joinable_jobs("three", ["local"]) == [], "nothing is left to do"


def test_a_member_writes_nothing_but_attempts_and_only_while_the_job_runs(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs)
    join(jobs, job)
    for change in (
        lambda: jobs.renew(job.job_id, "two", LEASE_S),
        lambda: jobs.set_status(job.job_id, "two", "FAILED"),
        lambda: jobs.save_batch_states(job.job_id, "two", range(2), 2),
        lambda: jobs.finish(job.job_id, "two", []),
        lambda: jobs.save_schemas(job.job_id, "two", []),
    ):
        with pytest.raises(SupersededError):
            change()
    claims = claim(jobs, job, 1, "two")
    jobs.cancel("alice", job.job_id)
    with pytest.raises(SupersededError):
        jobs.settle_and_claim(job.job_id, "two", [(claims[0], outcome(claims[0]))], {}, LEASE_S)
    with pytest.raises(SupersededError):
        claim(jobs, job, 1, "three")
    assert jobs.members.join(job.job_id, "three", "late", LEASE_S) is None


def test_batches_of_a_lost_member_are_pending_again_and_those_of_a_living_one_are_not(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=8)
    join(jobs, job, "lost")
    join(jobs, job, "alive")
    assert jobs.record_launch("local", "w-lost", job.job_id, "lost", "local")
    (late,) = jobs.settle_and_claim(job.job_id, "lost", [], {"w-lost": 1}, LEASE_S).claims["w-lost"]
    (held,) = claim(jobs, job, 1, "alive")
    (observed,) = jobs.members.observe([job.job_id])
    assert observed.num_members == 2 and observed.has_due_batch
    expire(jobs, job, "lost")
    jobs.renew(job.job_id, "one", LEASE_S)
    (observed,) = jobs.members.observe([job.job_id])
    assert observed.num_members == 1 and jobs.workers(job.job_id) == []
    assert [batch.span for batch in claim(jobs, job, 4)] == [late.span, (4, 5), (6, 7)], "but not the living one's"
    with pytest.raises(SupersededError):
        jobs.settle_and_claim(job.job_id, "lost", [(late, outcome(late))], {}, LEASE_S)
    turn = jobs.settle_and_claim(job.job_id, "alive", [(held, outcome(held))], {}, LEASE_S)
    assert not turn.rejected


def test_a_new_owner_leaves_the_members_at_their_work(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=8)
    (of_owner,) = claim(jobs, job)
    join(jobs, job)
    (of_member,) = claim(jobs, job, 1, "two")
    for worker, token in (("w1", "one"), ("w2", "two")):
        assert jobs.record_launch("local", worker, job.job_id, token, "local")
    jobs.release(job.job_id, "one")
    assert jobs.acquire_batch_coordinator(job.job_id, "three", "elsewhere", LEASE_S)
    assert [worker["worker_id"] for worker in jobs.workers(job.job_id)] == ["w2"]
    turn = jobs.settle_and_claim(job.job_id, "two", [(of_member, outcome(of_member))], {"w2": 9}, LEASE_S)
    assert not turn.rejected and turn.claims["w2"][0].span == of_owner.span


def test_a_member_that_leaves_returns_its_batches_at_no_cost(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs)
    join(jobs, job)
    (batch,) = claim(jobs, job, 1, "two")
    jobs.members.leave(job.job_id, "two")
    (again,) = claim(jobs, job)
    assert again.span == batch.span and (again.retry_count, again.infra_retries) == (0, 0)
    with pytest.raises(SupersededError):
        jobs.members.renew(job.job_id, "two", LEASE_S, [])
    join(jobs, job)


def test_the_workers_of_all_machines_together_are_at_most_the_jobs_concurrency(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, concurrency=2)
    join(jobs, job)
    assert jobs.record_launch("local", "a", job.job_id, "one", "local", max_others=1)
    assert jobs.record_launch("local", "b", job.job_id, "two", "local", max_others=1)
    assert not jobs.record_launch("local", "c", job.job_id, "two", "local", max_others=0)
    jobs.delete_worker("a")
    assert jobs.record_launch("local", "c", job.job_id, "two", "local", max_others=0)


def test_types_are_checked_against_what_all_machines_have_committed(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=6)
    join(jobs, job)

    def commit_type(token: str, kind: str) -> JobRecord:
        (batch,) = claim(jobs, job, 1, token)
        part = PartInfo(f"/parts/{batch.attempt_id}/{batch.start_idx}", 2, 10, "a" * 64, schema={"n": kind})
        result = AttemptOutcome(batch.batch_idx, batch.attempt_id, (part,), 2)
        return jobs.settle_and_claim(job.job_id, token, [(batch, result)], {}, LEASE_S, max_retries=0).job

    assert commit_type("one", "int").schemas == [{"n": "int"}]
    assert commit_type("two", "float").schemas == [{"n": "float"}]
    refused = commit_type("two", "string")
    assert refused.completed_batches == 2 and refused.schemas == [{"n": "float"}]
    assert jobs.get_batch_states(job.job_id)[2]["error_class"] == "SchemaConflictError"


def test_the_owner_sees_that_a_members_batch_has_failed(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=2, size=1)
    join(jobs, job)
    (batch,) = claim(jobs, job, 1, "two")
    broken = AttemptFailure("ProgramError", "the program is wrong", FailureCause.PROGRAM)
    turn = jobs.settle_and_claim(job.job_id, "two", [(batch, broken)], {}, LEASE_S)
    assert turn.failed
    (observed,) = jobs.members.observe([job.job_id])
    assert observed.job.error == jobs.failure(job.job_id) == "row 0: the program is wrong"


def test_parts_stay_while_a_member_may_write_one(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs)
    join(jobs, job)
    assert jobs.set_status(job.job_id, "one", "FAILED")
    jobs.purge("alice", job.job_id)
    assert jobs.cleanable_jobs(0.0) == []
    expire(jobs, job, "two")
    assert jobs.cleanable_jobs(0.0) == [job.job_id]
