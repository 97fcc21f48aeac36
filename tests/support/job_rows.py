"""Bulk jobs as rows, for tests of their state: jobs that a coordinator owns, claims, and the results of attempts."""

from __future__ import annotations

from dataclasses import replace

from tinsmith.batch.coordinator.rows import JobRecord
from tinsmith.batch.coordinator.state import BatchJobs, Claim, SettledAttempt, Transition
from tinsmith.batch.types import AttemptFailure, AttemptOutcome, FailureCause, JobSpec, PartInfo, RowFailure

APP = AttemptFailure("ValueError", "the row is bad")
APP_AGAIN = replace(APP, cause=FailureCause.SAME_ERROR)
INFRA = AttemptFailure("WorkerLost", "it was killed", FailureCause.WORKER)
LEASE_S = 60.0


def spec(**changes: object) -> JobSpec:
    fields = {
        "batch_serialized_fn": "payload",
        "batch_input_format": {"format": "json", "path": "/in.jsonl"},
        "batch_output_formats": [{"format": "json", "path": "/out.jsonl"}],
        "batch_size": 2,
    }
    return JobSpec.from_dict({**fields, **changes})


def create_owned_job(jobs: BatchJobs, rows: int = 6, size: int = 2, token: str = "one", **changes: object) -> JobRecord:
    job_id = jobs.create("alice", spec(**changes))
    assert jobs.acquire_batch_coordinator(job_id, token, "here", LEASE_S)
    jobs.save_batch_states(job_id, token, range(0, rows, size), rows)
    assert jobs.set_status(job_id, token, "RUNNING")
    return jobs.find("alice", job_id)


def outcome(claim: Claim, failed: int = 0) -> AttemptOutcome:
    part = PartInfo(f"/parts/{claim.attempt_id}/{claim.start_idx}", claim.span.rows - failed, 10, "a" * 64)
    failures = tuple(RowFailure(claim.start_idx + index, "ValueError", "bad") for index in range(failed))
    return AttemptOutcome(claim.batch_idx, claim.attempt_id, (part,), claim.span.rows - failed, failed, 5, 7, failures)


def claim(jobs: BatchJobs, job: JobRecord, count: int = 1, token: str = "one") -> list[Claim]:
    return list(jobs.settle_and_claim(job.job_id, token, [], {"w": count}, LEASE_S).claims["w"])


def settle(jobs: BatchJobs, job: JobRecord, *attempts: SettledAttempt, **options: float) -> Transition:
    return jobs.settle_and_claim(job.job_id, "one", attempts, {}, LEASE_S, **options)  # type: ignore[arg-type]


def end_job(jobs: BatchJobs, status: str = "FAILED", **changes: object) -> JobRecord:
    job = create_owned_job(jobs, **changes)  # type: ignore[arg-type]
    assert jobs.set_status(job.job_id, "one", status)
    return jobs.find("alice", job.job_id)
