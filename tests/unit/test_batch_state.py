"""Bulk jobs as rows: fencing, counts and retries."""

from __future__ import annotations

import sqlite3
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import sqlalchemy as sa

from tinsmith.batch.coordinator import state
from tinsmith.batch.coordinator.state import (
    INSERT_CHUNK,
    MAX_INFRA_RETRIES,
    BatchJobs,
    Claim,
    JobRecord,
    SupersededError,
)
from tinsmith.batch.types import (
    AttemptFailure,
    AttemptOutcome,
    JobSpec,
    OutputInfo,
    PartInfo,
    RowFailure,
    staging_of,
)
from tinsmith.db.database import Database
from tinsmith.db.schema import BATCH_JOBS as JOBS
from tinsmith.db.schema import BATCH_OUTPUTS as OUTPUTS
from tinsmith.db.schema import BATCH_ROW_ERRORS as ROW_ERRORS
from tinsmith.db.schema import BATCH_STATES as STATES
from tinsmith.db.schema import BATCH_WORKERS as WORKERS
from tinsmith.db.sqlite_database import SQLiteDatabase
from tinsmith.errors import NotFoundError, UserError

APP = AttemptFailure("ValueError", "the row is bad", infra=False)
INFRA = AttemptFailure("WorkerLost", "it was killed", infra=True)
LEASE_S = 60.0


@pytest.fixture
def jobs(db: Database) -> BatchJobs:
    return BatchJobs(db)


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


def statuses(jobs: BatchJobs, job: JobRecord) -> list[str]:
    return [state["status"] for state in jobs.get_batch_states(job.job_id)]


def test_batches_are_claimed_in_the_order_of_their_rows_and_counted_when_they_are_committed(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=5)
    claims = claim(jobs, job, 2)
    assert [batch.span for batch in claims] == [(0, 1), (2, 3)]
    turn = jobs.settle_and_claim(job.job_id, "one", [(batch, outcome(batch)) for batch in claims], {"w": 5}, LEASE_S)
    assert not turn.rejected and [batch.span for batch in turn.claims["w"]] == [(4, 4)]
    (last,) = turn.claims["w"]
    finished_job = jobs.settle_and_claim(job.job_id, "one", [(last, outcome(last))], {}, LEASE_S).job
    assert finished_job.done and (
        finished_job.completed_batches,
        finished_job.rows_ok,
        finished_job.tokens_in,
        finished_job.tokens_out,
    ) == (3, 5, 15, 21)
    assert [span for span, _ in jobs.iter_committed_batches(job.job_id)] == [(0, 1), (2, 3), (4, 4)]


def test_an_attempt_counts_once_and_only_while_the_batch_is_its_own(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs)
    (zombie,) = claim(jobs, job)
    jobs.settle_and_claim(job.job_id, "one", [(zombie, INFRA)], {}, LEASE_S)
    (again,) = claim(jobs, job)
    assert again.span == zombie.span and again.attempt_id == zombie.attempt_id + 1
    turn = jobs.settle_and_claim(job.job_id, "one", [(zombie, outcome(zombie)), (again, outcome(again))], {}, LEASE_S)
    assert turn.rejected == [zombie] and turn.job.completed_batches == 1
    twice = jobs.settle_and_claim(job.job_id, "one", [(again, outcome(again))], {}, LEASE_S)
    assert twice.rejected == [again] and twice.job.completed_batches == 1
    ((_, parts),) = jobs.iter_committed_batches(job.job_id)
    assert parts[0]["path"] == "/parts/2/0"


def test_a_coordinator_that_was_superseded_changes_nothing(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs)
    (attempt,) = claim(jobs, job)
    assert jobs.acquire_batch_coordinator(job.job_id, "two", "elsewhere", LEASE_S) is None
    assert jobs.acquirable_jobs("elsewhere") == []
    assert jobs.acquire_batch_coordinator(job.job_id, "two", "here", LEASE_S)
    for change in (
        lambda: jobs.settle_and_claim(job.job_id, "one", [(attempt, outcome(attempt))], {"w": 1}, LEASE_S),
        lambda: jobs.renew(job.job_id, "one", LEASE_S),
        lambda: jobs.set_status(job.job_id, "one", "FAILED"),
        lambda: jobs.save_batch_states(job.job_id, "one", range(2), 2),
        lambda: jobs.finish(job.job_id, "one", []),
        lambda: jobs.record_launch("local", "w", job.job_id, "one", "local"),
    ):
        with pytest.raises(SupersededError):
            change()
    jobs.release(job.job_id, "one")
    assert statuses(jobs, job) == ["PENDING"] * 3
    stale = jobs.settle_and_claim(job.job_id, "two", [(attempt, outcome(attempt))], {}, LEASE_S)
    assert stale.rejected == [attempt], "an attempt of the old coordinator, reported by the new one"


def test_a_batch_whose_rows_raise_the_same_again_is_halved_at_once(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=4, size=4)
    hopeless = replace(APP, retry=False)
    (batch,) = claim(jobs, job)
    assert jobs.work_by_worker(job.job_id) == {"w": {"batches": 1, "rows": 4, "first_row": 0, "retried": 0}}
    jobs.settle_and_claim(job.job_id, "one", [(batch, hopeless)], {}, LEASE_S)
    halves = claim(jobs, job, 2)
    assert [half.span for half in halves] == [(0, 1), (2, 3)]
    jobs.settle_and_claim(job.job_id, "one", [(half, hopeless) for half in halves], {}, LEASE_S)
    single = claim(jobs, job, 4)
    assert [part.span.rows for part in single] == [1] * 4
    assert jobs.work_by_worker(job.job_id) == {"w": {"batches": 4, "rows": 4, "first_row": 0, "retried": 0}}


def test_a_job_with_an_expired_lease_can_be_acquired(jobs: BatchJobs) -> None:
    job_id = jobs.create("alice", spec())
    jobs.acquire_batch_coordinator(job_id, "one", "here", 0.05)
    time.sleep(0.1)
    assert jobs.acquirable_jobs("elsewhere") == [job_id]
    assert jobs.acquire_batch_coordinator(job_id, "two", "elsewhere", LEASE_S)


def test_a_failing_batch_is_retried_later_then_halved_down_to_its_row(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=4, size=4)
    for retry in range(1, 4):
        (batch,) = claim(jobs, job)
        assert batch.retry_count == retry - 1
        jobs.settle_and_claim(job.job_id, "one", [(batch, APP)], {}, LEASE_S, backoff_s=0.1)
        assert claim(jobs, job) == [], "it waits"
        assert 0 < (jobs.next_retry_in(job.job_id) or 0) <= 0.1 * 2**retry
        time.sleep(0.1 * 2**retry + 0.02)
    (batch,) = claim(jobs, job)
    assert jobs.settle_and_claim(job.job_id, "one", [(batch, APP)], {}, LEASE_S).job.total_batches == 2
    first_half, second_half = claim(jobs, job, 2)
    assert (first_half.span, second_half.span) == ((0, 1), (2, 3))
    assert (first_half.retry_count, second_half.retry_count) == (0, 0), "a part has a retry of its own"
    turn = jobs.settle_and_claim(
        job.job_id, "one", [(first_half, APP), (second_half, outcome(second_half))], {"w": 5}, LEASE_S
    )
    (again,) = turn.claims["w"]
    assert again.span == (0, 1) and again.retry_count == 1
    turn = jobs.settle_and_claim(job.job_id, "one", [(again, APP)], {"w": 5}, LEASE_S)
    first, second = turn.claims["w"]
    assert (first.span, second.span) == ((0, 0), (1, 1)) and turn.job.total_batches == 3
    turn = jobs.settle_and_claim(job.job_id, "one", [(first, outcome(first)), (second, APP)], {"w": 1}, LEASE_S)
    (again,) = turn.claims["w"]
    turn = jobs.settle_and_claim(job.job_id, "one", [(again, APP)], {"w": 1}, LEASE_S)
    (given_up,) = turn.claims["w"]
    assert given_up.retry_count == 4 and given_up.error == "the row is bad"
    finished_job = jobs.settle_and_claim(job.job_id, "one", [(given_up, outcome(given_up, failed=1))], {}, LEASE_S).job
    assert (
        finished_job.done
        and (finished_job.rows_ok, finished_job.rows_failed) == (3, 1)
        and finished_job.failed_too_many
    )
    assert [(error["row_idx"], error["message"]) for error in jobs.row_errors(job.job_id)] == [(1, "bad")]
    assert [span for span, _ in jobs.iter_committed_batches(job.job_id)] == [(0, 0), (1, 1), (2, 3)]


def test_a_row_that_cannot_even_be_recorded_as_failed_fails_its_batch(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=1)
    failed = []
    for _ in range(5):
        (batch,) = claim(jobs, job)
        failed.append(jobs.settle_and_claim(job.job_id, "one", [(batch, APP)], {}, LEASE_S, backoff_s=0).failed)
    assert failed == [False, False, False, False, True]
    assert statuses(jobs, job) == ["FAILED"]
    assert jobs.failure(job.job_id) == "row 0: ValueError: the row is bad"


def test_workers_of_a_job_that_has_ended_are_not_shown(jobs: BatchJobs) -> None:
    """Neither after its coordinator released it, nor after the coordinator was killed."""
    released, killed, runs = (create_owned_job(jobs, rows=1) for _ in range(3))
    for job in (released, killed, runs):
        jobs.record_launch("local", f"w{job.job_id}", job.job_id, "one", "local")
    for job in (released, killed):
        jobs.set_status(job.job_id, "one", "FAILED", "for a test")
    jobs.release(released.job_id, "one")
    assert jobs.workers(released.job_id) == [] and jobs.workers(killed.job_id)
    jobs.delete_ended_workers()
    assert jobs.workers(killed.job_id) == [] and jobs.workers(runs.job_id)


def test_the_time_of_workers_is_counted_however_they_end(
    jobs: BatchJobs, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a dead coordinator's workers is counted until its last write."""
    job, clock = create_owned_job(jobs), [time.time()]
    monkeypatch.setattr(state, "now", lambda: clock[0])
    for name in ("ends", "is released", "is left"):
        jobs.record_launch("local", name, job.job_id, "one", "local")
    clock[0] += 10
    jobs.delete_worker("ends")
    jobs.delete_worker("ends")  # is not counted twice
    assert jobs.find("alice", job.job_id).worker_seconds == pytest.approx(10)
    clock[0] += 10
    with db.write() as connection:
        connection.execute(WORKERS.update().where(WORKERS.c.worker_id == "is left").values(owner_token="another"))
    jobs.release(job.job_id, "one")
    assert jobs.find("alice", job.job_id).worker_seconds == pytest.approx(30)
    jobs.cancel("alice", job.job_id)  # the last write
    clock[0] += 1000
    assert jobs.acquire_batch_coordinator(job.job_id, "two", "here", LEASE_S)
    assert jobs.find("alice", job.job_id).worker_seconds == pytest.approx(50) and not jobs.workers(job.job_id)


def test_lost_workers_do_not_spend_the_retries_of_a_batch_but_there_is_an_end(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=1)
    for lost in range(MAX_INFRA_RETRIES + 1):
        (batch,) = claim(jobs, job)
        assert (batch.retry_count, batch.infra_retries) == (0, lost)
        jobs.settle_and_claim(job.job_id, "one", [(batch, INFRA)], {}, LEASE_S)
    assert statuses(jobs, job) == ["FAILED"]


def test_returned_batches_do_not_count_as_retries(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=1)
    for tries in range(MAX_INFRA_RETRIES + 2):
        (batch,) = claim(jobs, job)
        assert (batch.attempt_id, batch.retry_count, batch.infra_retries) == (tries + 1, 0, 0)
        jobs.settle_and_claim(
            job.job_id, "one", [(batch, AttemptFailure("GivenBack", "not begun", infra=True, begun=False))], {}, LEASE_S
        )
    assert statuses(jobs, job) == ["PENDING"]


def test_an_expired_attempt_is_put_back_once_and_a_renewed_one_is_not(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs)
    expired, renewed = jobs.settle_and_claim(job.job_id, "one", [], {"w": 2}, 0.05).claims["w"]
    jobs.renew(job.job_id, "one", LEASE_S, [renewed.batch_idx])
    time.sleep(0.1)
    jobs.renew(job.job_id, "one", LEASE_S)
    jobs.renew(job.job_id, "one", LEASE_S)
    assert statuses(jobs, job) == ["PENDING", "DISPATCHED", "PENDING"]
    (again,) = claim(jobs, job)
    assert again.span == expired.span and again.infra_retries == 1


def test_max_failed_rows_is_a_count_or_a_share(jobs: BatchJobs) -> None:
    for allowed, failed, too_many in ((0, 1, True), (1, 1, False), (1, 2, True), (0.4, 2, False), (0.2, 2, True)):
        job = create_owned_job(jobs, rows=6, size=2, max_failed_rows=allowed)
        (batch,) = claim(jobs, job)
        job = jobs.settle_and_claim(job.job_id, "one", [(batch, outcome(batch, failed))], {}, LEASE_S).job
        assert job.failed_too_many is too_many, (allowed, failed)


def test_a_job_that_is_being_cancelled_can_only_be_cancelled(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs)
    assert jobs.cancel("alice", job.job_id).status == "CANCELLING"
    assert not jobs.set_status(job.job_id, "one", "WINDING_DOWN")
    assert not jobs.finish(job.job_id, "one", [])
    assert jobs.set_status(job.job_id, "one", "CANCELLED")
    assert jobs.cancel("alice", job.job_id).status == "CANCELLED", "and stays so"
    assert jobs.acquirable_jobs("here") == []


def test_a_job_belongs_to_its_tenant(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs)
    for ask in (
        lambda: jobs.find("bob", job.job_id),
        lambda: jobs.cancel("bob", job.job_id),
        lambda: jobs.create("bob", spec(resume_from=job.job_id)),
    ):
        with pytest.raises(NotFoundError, match=str(job.job_id)):
            ask()
    assert jobs.page("bob", 10, 0) == ([], 0) and jobs.page("alice", 10, 0)[1] == 1


def test_a_resumed_job_keeps_what_was_completed_without_a_failed_row(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=8, max_failed_rows=5)
    good, bad, _ = claim(jobs, job, 3)
    jobs.settle_and_claim(job.job_id, "one", [(good, outcome(good)), (bad, outcome(bad, failed=1))], {}, LEASE_S)
    jobs.cancel("alice", job.job_id)
    with pytest.raises(UserError, match="CANCELLING: cancel it first"):
        jobs.create("alice", spec(resume_from=job.job_id))
    jobs.set_status(job.job_id, "one", "CANCELLED")
    with pytest.raises(UserError, match="batch_input_format"):
        other = {"format": "json", "path": "/other.jsonl"}
        jobs.create("alice", spec(resume_from=job.job_id, batch_input_format=other))
    resumed = jobs.find("alice", jobs.create("alice", spec(resume_from=job.job_id, batch_serialized_fn="another")))
    assert (resumed.total_batches, resumed.completed_batches, resumed.rows_ok, resumed.rows_failed) == (4, 1, 2, 0)
    assert resumed.root_job_id == job.job_id and resumed.total_rows == 8 and resumed.sealed
    assert jobs.resume_chain(resumed.job_id) == [job.job_id, resumed.job_id]
    jobs.acquire_batch_coordinator(resumed.job_id, "two", "here", LEASE_S)
    claims = claim(jobs, resumed, 9, "two")
    assert [batch.span for batch in claims] == [(2, 3), (4, 5), (6, 7)]
    with pytest.raises(UserError, match=f"job {resumed.job_id} is PENDING"):
        jobs.create("alice", spec(resume_from=job.job_id))
    jobs.finish(resumed.job_id, "two", [("json", OutputInfo("/out.jsonl", 8, 100, "b" * 64))])
    with pytest.raises(UserError, match="has succeeded"):
        jobs.create("alice", spec(resume_from=job.job_id))


def test_outputs_are_recorded_with_the_success(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs)
    assert jobs.finish(job.job_id, "one", [("json", OutputInfo("/out.jsonl", 6, 100, "b" * 64))])
    assert jobs.find("alice", job.job_id).status == "SUCCEEDED"
    (stored,) = jobs.outputs(job.job_id)
    assert (stored["path"], stored["rows"], stored["format"]) == ("/out.jsonl", 6, "json")
    assert jobs.cleanable_jobs(0) == [job.job_id]
    jobs.record_cleaned([job.job_id])
    assert jobs.cleanable_jobs(0) == []


class Broken(list[int]):
    """The first rows of batches; iteration fails in the second chunk."""

    def __getitem__(self, index: object) -> object:
        if isinstance(index, slice) and index.start >= INSERT_CHUNK:
            raise OSError("the input went away")
        return super().__getitem__(index)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_an_interrupted_split_is_repeated(jobs: BatchJobs) -> None:
    job_id = jobs.create("alice", spec())
    jobs.acquire_batch_coordinator(job_id, "one", "here", LEASE_S)
    with pytest.raises(OSError, match="went away"):
        jobs.save_batch_states(job_id, "one", Broken(range(INSERT_CHUNK + 1)), INSERT_CHUNK + 1)
    assert not jobs.find("alice", job_id).sealed
    assert len(jobs.get_batch_states(job_id)) == INSERT_CHUNK
    assert jobs.save_batch_states(job_id, "one", range(0, 3, 2), 3).total_batches == 2
    assert [(state["start_idx"], state["end_idx"]) for state in jobs.get_batch_states(job_id)] == [(0, 1), (2, 2)]


@pytest.mark.parametrize("even", [True, False])
def test_batches_of_many_chunks_cover_each_row_once(jobs: BatchJobs, even: bool) -> None:
    rows = 5 * INSERT_CHUNK + 7
    starts = range(0, rows, 2) if even else array("q", (start for start in range(rows) if start % 3 != 2))
    job_id = jobs.create("alice", spec())
    jobs.acquire_batch_coordinator(job_id, "one", "here", LEASE_S)
    assert jobs.save_batch_states(job_id, "one", starts, rows).total_batches == len(starts)
    states = jobs.get_batch_states(job_id, limit=rows)
    assert [state["batch_idx"] for state in states] == list(range(len(starts)))
    assert [state["start_idx"] for state in states] == list(starts)
    assert [state["end_idx"] + 1 for state in states] == [*starts[1:], rows]
    assert {(state["status"], state["retry_count"], state["attempt_id"]) for state in states} == {("PENDING", 0, 0)}


def test_the_dispatched_batches_of_a_large_job_are_found_without_the_others(jobs: BatchJobs, db: Database) -> None:
    job = create_owned_job(jobs, rows=2 * INSERT_CHUNK, size=1)
    claim(jobs, job, 3)
    statements: list[str] = []

    def explain(
        _: object, cursor: sqlite3.Cursor, statement: str, parameters: tuple[object, ...], *args: object
    ) -> None:
        if statement.startswith("UPDATE batch_state"):
            cursor.execute(f"EXPLAIN {'QUERY PLAN ' if isinstance(db, SQLiteDatabase) else ''}{statement}", parameters)
            statements.append(str(cursor.fetchall()))

    sa.event.listen(db.engine, "before_cursor_execute", explain)
    jobs.renew(job.job_id, "one", LEASE_S)
    jobs.acquire_batch_coordinator(job.job_id, "two", "here", LEASE_S)
    assert len(statements) == 2 and all("ix_batch_state_dispatched" in plan for plan in statements), statements
    assert set(statuses(jobs, job)) == {"PENDING"}


# Failed attempts.

DIED = AttemptFailure("MapperKilled", "the process was killed", died=True)


def settle(jobs: BatchJobs, job: JobRecord, *attempts: state.SettledAttempt, **options: float) -> state.Transition:
    return jobs.settle_and_claim(job.job_id, "one", attempts, {}, LEASE_S, **options)  # type: ignore[arg-type]


def batches(jobs: BatchJobs, job: JobRecord) -> list[tuple[int, int, str, int, int]]:
    """Rows, status, retries and retries after lost workers, of each batch that is not split."""
    return [
        (row["start_idx"], row["end_idx"], row["status"], row["retry_count"], row["infra_retries"])
        for row in jobs.get_batch_states(job.job_id)
        if row["status"] != "SPLIT"
    ]


def test_a_second_death_on_the_same_rows_splits_them_without_a_retry(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=2)
    (first,) = claim(jobs, job)
    settle(jobs, job, (first, DIED))
    assert batches(jobs, job) == [(0, 1, "PENDING", 0, 1)]
    (second,) = claim(jobs, job)
    assert (second.error_class, second.error) == ("MapperKilled", "the process was killed")
    settle(jobs, job, (second, DIED))
    assert batches(jobs, job) == [(0, 0, "PENDING", 0, 0), (1, 1, "PENDING", 0, 0)]
    for _ in range(2):
        (single,) = claim(jobs, job)
        settle(jobs, job, (single, DIED))
    assert batches(jobs, job)[0] == (0, 0, "PENDING", 4, 1), "its only row is recorded as failed next"
    (last,) = claim(jobs, job)
    done = settle(jobs, job, (last, outcome(last, failed=1))).job
    assert done.rows_failed == 1 and not done.done
    (error,) = jobs.row_errors(job.job_id)
    assert (error["attempt_id"], error["details"]["attempts"], error["details"]["worker"]) == (3, 2, "w")


def test_the_error_of_a_death_outlives_a_lost_worker(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=2)
    for failure in (DIED, INFRA):
        (attempt,) = claim(jobs, job)
        settle(jobs, job, (attempt, failure))
    (attempt,) = claim(jobs, job)
    assert attempt.error_class == "MapperKilled" and attempt.infra_retries == 2
    settle(jobs, job, (attempt, DIED))
    assert [rows[:3] for rows in batches(jobs, job)] == [(0, 0, "PENDING"), (1, 1, "PENDING")]


@pytest.mark.parametrize(
    ("row", "spans"),
    [
        (2, [(0, 1), (2, 2), (3, 4)]),
        (0, [(0, 0), (1, 4)]),
        (4, [(0, 3), (4, 4)]),
        (5, [(0, 2), (3, 4)]),
        (None, [(0, 2), (3, 4)]),
    ],
)
def test_a_batch_is_split_around_the_row_that_is_to_blame(
    jobs: BatchJobs, row: int | None, spans: list[tuple[int, int]]
) -> None:
    job = create_owned_job(jobs, rows=8, size=5)
    (attempt,) = claim(jobs, job)
    turn = settle(jobs, job, (attempt, replace(APP, retry=False, row=row)))
    assert turn.job.total_batches == 2 + len(spans) - 1 and not turn.failed
    assert [rows[:2] for rows in batches(jobs, job)] == [*spans, (5, 7)]
    assert {stored["parent_idx"] for stored in jobs.get_batch_states(job.job_id)} == {None, attempt.batch_idx}
    assert len({stored["batch_idx"] for stored in jobs.get_batch_states(job.job_id)}) == 2 + len(spans)


def test_a_final_failure_fails_the_batch_at_once_and_says_where(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=6)
    assert jobs.failure(job.job_id) is None
    first, second, third = claim(jobs, job, 3)
    final = replace(APP, final=True)
    assert settle(jobs, job, (second, replace(final, error_class="ProgramError"))).failed
    assert jobs.failure(job.job_id) == "rows 2 to 3: the row is bad"
    assert settle(jobs, job, (first, final)).failed and not settle(jobs, job, (third, APP)).failed
    assert jobs.failure(job.job_id) == "rows 0 to 1: ValueError: the row is bad", "the first by its rows"
    assert [rows[2:4] for rows in batches(jobs, job)] == [("FAILED", 1), ("FAILED", 1), ("PENDING", 1)]


def test_an_attempt_that_is_rejected_fails_nothing(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=1)
    (attempt,) = claim(jobs, job)
    settle(jobs, job, (attempt, outcome(attempt)))
    turn = settle(jobs, job, (attempt, replace(APP, final=True)))
    assert turn.rejected == [attempt] and not turn.failed


@pytest.mark.parametrize(("max_retries", "retries"), [(0, []), (1, [1]), (2, [1, 2])])
def test_a_row_is_tried_so_many_times_more_with_growing_pauses(
    jobs: BatchJobs, max_retries: int, retries: list[int]
) -> None:
    job = create_owned_job(jobs, rows=1)
    waits_s = []
    for retry in retries:
        (attempt,) = claim(jobs, job)
        settle(jobs, job, (attempt, APP), max_retries=max_retries, backoff_s=100.0)
        waits_s.append(round(jobs.next_retry_in(job.job_id) or 0))
        assert batches(jobs, job) == [(0, 0, "PENDING", retry, 0)]
        with jobs._db.write() as connection:
            connection.execute(STATES.update().values(next_retry_at=None))
    assert waits_s == [200, 400][: len(retries)]
    (attempt,) = claim(jobs, job)
    settle(jobs, job, (attempt, APP), max_retries=max_retries)
    assert batches(jobs, job) == [(0, 0, "PENDING", max_retries + 1, 0)] and jobs.next_retry_in(job.job_id) is None
    (attempt,) = claim(jobs, job)
    assert settle(jobs, job, (attempt, APP), max_retries=max_retries).failed


def test_a_part_of_a_batch_has_one_retry_unless_there_are_none(jobs: BatchJobs) -> None:
    for max_retries in (0, 1):
        job = create_owned_job(jobs, rows=2)
        (attempt,) = claim(jobs, job)
        settle(jobs, job, (attempt, replace(APP, retry=False)), max_retries=max_retries)
        (part,) = claim(jobs, job)
        settle(jobs, job, (part, APP), max_retries=max_retries)
        assert batches(jobs, job)[0] == (0, 0, "PENDING", 1, 0)
        (part,) = claim(jobs, job)
        assert part.start_idx == 0, "at once"
        settle(jobs, job, (part, APP), max_retries=max_retries)
        expected = (0, 0, "FAILED", 2, 0) if max_retries == 0 else (0, 0, "PENDING", 2, 0)
        assert batches(jobs, job)[0] == expected


def test_errors_are_stored_up_to_a_length(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=1)
    (attempt,) = claim(jobs, job)
    settle(jobs, job, (attempt, replace(APP, error_class="E" * 200, error="a" + "b" * 20_000)), backoff_s=0)
    (attempt,) = claim(jobs, job)
    assert (attempt.error_class, attempt.error) == ("E" * 128, "b" * 20_000)
    failure = RowFailure(0, "E" * 200, "m" * 3000, "a" + "t" * 20_000, {"text": "x"})
    settle(jobs, job, (attempt, replace(outcome(attempt, failed=1), row_failures=(failure,))))
    (error,) = jobs.row_errors(job.job_id)
    assert (error["error_class"], error["message"]) == ("E" * 128, "m" * 2000)
    assert error["details"] == {"row": {"text": "x"}, "traceback": "t" * 20_000, "attempts": 2, "worker": "w"}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (sa.exc.OperationalError("", None, Exception()), True),
        (sa.exc.TimeoutError(), True),
        (sa.exc.DataError("", None, Exception()), False),
        (sa.exc.IntegrityError("", None, Exception()), False),
        (sa.exc.ProgrammingError("", None, Exception()), False),
        (sa.exc.StatementError("not JSON", "", None, TypeError()), False),
        (ValueError(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_the_databases_own_errors_are_transient(error: Exception, expected: bool) -> None:
    assert state.is_transient(error) is expected


# Pages.


def test_jobs_and_batches_are_listed_in_pages(jobs: BatchJobs) -> None:
    created = [create_owned_job(jobs).job_id for _ in range(3)]
    jobs.create("bob", spec())
    first, count = jobs.page("alice", 2, 0)
    assert ([job.job_id for job in first], count) == (created[:0:-1], 3)
    assert [job.job_id for job in jobs.page("alice", 2, 2)[0]] == created[:1]
    pages = [jobs.get_batch_states(created[0], 2, offset) for offset in (0, 2, 3)]
    assert [[row["start_idx"] for row in page] for page in pages] == [[0, 2], [4], []]


def test_failed_rows_are_listed_up_to_a_size_and_at_least_one(jobs: BatchJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    job = create_owned_job(jobs, rows=4, size=4)
    (attempt,) = claim(jobs, job)
    settle(jobs, job, (attempt, outcome(attempt, failed=4)))

    def rows_after(after: int, limit: int = 10) -> list[int]:
        return [error["row_idx"] for error in jobs.row_errors(job.job_id, limit, after)]

    assert rows_after(-1) == [0, 1, 2, 3] and rows_after(1) == [2, 3] and rows_after(3) == []
    assert rows_after(0, 2) == [1, 2]
    with jobs._db.read() as connection:
        sizes = connection.scalars(sa.select(sa.func.length(sa.cast(ROW_ERRORS.c.details, sa.Text)))).all()
    monkeypatch.setattr(state, "ERRORS_BYTES", sizes[0] + sizes[1])
    assert rows_after(-1) == [0, 1]
    monkeypatch.setattr(state, "ERRORS_BYTES", sizes[0] + sizes[1] - 1)
    assert rows_after(-1) == [0]
    monkeypatch.setattr(state, "ERRORS_BYTES", 1)
    assert rows_after(-1) == [0] and rows_after(0) == [1]


def test_committed_batches_are_listed_after_a_row_and_iterated_over_pages(
    jobs: BatchJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = create_owned_job(jobs, rows=9)
    claims = claim(jobs, job, 4)
    settle(jobs, job, *((attempt, outcome(attempt)) for attempt in claims))
    assert [span for span, _ in jobs.list_committed_batches(job.job_id, 0, 2)] == [(2, 3), (4, 5)]
    monkeypatch.setattr(state, "PAGE", 1)
    assert [span for span, _ in jobs.iter_committed_batches(job.job_id)] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_the_schemas_of_an_output_are_listed_once_each(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=8)
    for attempt, schema in zip(
        claim(jobs, job, 4), ({"a": "int64"}, {"a": "int64"}, None, {"a": "string"}), strict=True
    ):
        (part,) = outcome(attempt).parts
        typed = replace(part, schema=schema)  # type: ignore[arg-type]
        settle(jobs, job, (attempt, replace(outcome(attempt), parts=(typed,))))
    assert sorted(map(str, jobs.schemas(job.job_id, 0))) == ["{'a': 'int64'}", "{'a': 'string'}"]
    assert jobs.schemas(job.job_id, 1) == []


def test_work_is_counted_by_worker_with_its_retries(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=5)
    first, second = claim(jobs, job, 2)
    settle(jobs, job, (first, APP), (second, INFRA), backoff_s=0)
    jobs.settle_and_claim(job.job_id, "one", [], {"v": 2, "w": 1}, LEASE_S)
    assert jobs.work_by_worker(job.job_id) == {
        "v": {"batches": 2, "rows": 4, "first_row": 0, "retried": 2},
        "w": {"batches": 1, "rows": 1, "first_row": 4, "retried": 0},
    }


# Owners.


def test_a_job_is_free_for_others_after_its_release_and_its_end_frees_it(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs)
    jobs.release(job.job_id, "another")
    assert jobs.acquirable_jobs("elsewhere") == []
    jobs.release(job.job_id, "one")
    assert jobs.acquirable_jobs("elsewhere") == [job.job_id]
    assert jobs.acquire_batch_coordinator(job.job_id, "two", "elsewhere", LEASE_S)
    assert not jobs.has_ended(job.job_id) and jobs.has_ended(job.job_id + 1)
    assert jobs.set_status(job.job_id, "two", "FAILED", "broken")
    ended = jobs.find("alice", job.job_id)
    assert (ended.status, ended.error) == ("FAILED", "broken") and ended.ended_at is not None
    assert jobs.has_ended(job.job_id) and jobs.acquirable_jobs("elsewhere") == []


def test_jobs_of_pools_that_are_left_to_others_are_taken_only_to_be_cancelled(jobs: BatchJobs) -> None:
    plain, left, cancelled = (jobs.create("alice", spec(batch_pool_name=pool)) for pool in ("a", "b", "b"))
    jobs.cancel("alice", cancelled)
    assert jobs.acquirable_jobs("here", lambda pool: pool == "b") == [plain, cancelled]
    assert jobs.acquirable_jobs("here") == [plain, left, cancelled]
    assert jobs.cancelling_jobs([plain, left, cancelled]) == [cancelled] and jobs.cancelling_jobs([]) == []
    assert [job.job_id for job in jobs.active_in(["b"])] == [left, cancelled]
    assert [job.job_id for job in jobs.active_in(["a", "b"])] == [plain, left, cancelled]


def test_a_job_starts_once_and_ends_when_its_status_says_so(jobs: BatchJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    job = create_owned_job(jobs)
    assert job.started_at is not None and job.ended_at is None
    monkeypatch.setattr(state, "now", lambda: 5e9)
    jobs.set_status(job.job_id, "one", "WINDING_DOWN")
    jobs.set_status(job.job_id, "one", "RUNNING")
    again = jobs.find("alice", job.job_id)
    assert (again.started_at, again.ended_at) == (job.started_at, None)


def test_all_batches_of_a_renewal_keep_their_lease_and_those_of_others_do_not(jobs: BatchJobs, db: Database) -> None:
    job = create_owned_job(jobs, rows=1101, size=1)
    claims = jobs.settle_and_claim(job.job_id, "one", [], {"w": 1101}, 0.01).claims["w"]
    with db.write() as connection:
        is_last = STATES.c.batch_idx == claims[-1].batch_idx
        connection.execute(STATES.update().where(is_last).values(attempt_owner_token="another"))
    time.sleep(0.02)
    jobs.renew(job.job_id, "one", LEASE_S, [attempt.batch_idx for attempt in claims])
    assert [row["status"] for row in jobs.get_batch_states(job.job_id)] == ["DISPATCHED"] * 1100 + ["PENDING"]


def test_followers_hear_of_every_change_after_it_is_stored(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs)
    heard: list[tuple[int, str]] = []
    jobs.on_change(lambda job_id: heard.append((job_id, jobs.find("alice", job_id).status)))
    claim(jobs, job)
    assert heard == [], "a claim changes nothing that they see"
    jobs.set_status(job.job_id, "one", "WINDING_DOWN")
    jobs.cancel("alice", job.job_id)
    assert heard == [(job.job_id, "WINDING_DOWN"), (job.job_id, "CANCELLING")]


def test_what_a_coordinator_knows_of_its_job_is_stored(jobs: BatchJobs) -> None:
    job_id = jobs.create("alice", spec(weight=2.0, priority=3, name="nightly"))
    jobs.acquire_batch_coordinator(job_id, "one", "here", LEASE_S)
    jobs.save_batch_states(job_id, "one", range(2), 2, {"etag": "x"})  # type: ignore[arg-type]
    assert jobs.spec(job_id).input_version == {"etag": "x"}
    jobs.settle_and_claim(job_id, "one", [], {}, LEASE_S, paid_until={"rows": 12.5})
    jobs.set_machines_aside(job_id, "one", [{"machine": "m1"}])
    job = jobs.find("alice", job_id)
    assert (job.paid_until, job.machines_set_aside) == ({"rows": 12.5}, [{"machine": "m1"}])
    assert (job.weight, job.priority, job.name, job.sealed, job.total_rows) == (2.0, 3, "nightly", True, 2)
    jobs.settle_and_claim(job_id, "one", [], {}, LEASE_S)
    jobs.set_machines_aside(job_id, "one", [])
    job = jobs.find("alice", job_id)
    assert (job.paid_until, job.machines_set_aside) == ({"rows": 12.5}, None)
    with pytest.raises(NotFoundError, match="there is no bulk job 99"):
        jobs.spec(99)


def test_a_worker_is_starting_until_it_is_recorded_as_ready(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs)
    for worker_id in ("w1", "w2"):
        jobs.record_launch("local", worker_id, job.job_id, "one", "local")
    jobs.record_worker("w1", "127.0.0.1:1", "pid 7")
    first, second = jobs.workers(job.job_id)
    assert (first["state"], first["address"], first["pid_or_actor"]) == ("ready", "127.0.0.1:1", "pid 7")
    assert (second["state"], second["address"]) == ("starting", None)


# Resuming and deleting.


def end_job(jobs: BatchJobs, status: str = "FAILED", **changes: object) -> JobRecord:
    job = create_owned_job(jobs, **changes)  # type: ignore[arg-type]
    assert jobs.set_status(job.job_id, "one", status)
    return jobs.find("alice", job.job_id)


def test_parts_of_failed_jobs_are_deleted_when_due_purged_or_never_while_they_are_in_use(jobs: BatchJobs) -> None:
    succeeded, failed, cancelled = (end_job(jobs, status) for status in ("SUCCEEDED", "FAILED", "CANCELLED"))
    active = create_owned_job(jobs)

    def cleanable_jobs(ended_before: float, excluded: Sequence[int] = ()) -> list[int]:
        return sorted(jobs.cleanable_jobs(ended_before, excluded))

    assert cleanable_jobs(0) == [succeeded.job_id]
    assert cleanable_jobs(time.time() + 60, [failed.job_id]) == [succeeded.job_id, cancelled.job_id]
    for job in (succeeded, failed):
        jobs.purge("alice", job.job_id)
    with pytest.raises(UserError, match=f"{active.job_id} is RUNNING; cancel it before"):
        jobs.purge("alice", active.job_id)
    assert not jobs.spec(succeeded.job_id).purge and jobs.spec(failed.job_id).purge
    assert cleanable_jobs(0) == [succeeded.job_id, failed.job_id]
    with pytest.raises(UserError, match=f"the parts of job {failed.job_id} were deleted; submit a new job"):
        jobs.create("alice", spec(resume_from=failed.job_id))
    resuming = jobs.create("alice", spec(resume_from=cancelled.job_id))
    assert cleanable_jobs(time.time() + 60) == [succeeded.job_id, failed.job_id], "the new job needs its parts"
    jobs.acquire_batch_coordinator(resuming, "two", "here", LEASE_S)
    jobs.set_status(resuming, "two", "CANCELLED")
    ended = [succeeded.job_id, failed.job_id, cancelled.job_id, resuming]
    assert cleanable_jobs(time.time() + 60) == ended
    jobs.record_cleaned([cancelled.job_id])
    with pytest.raises(UserError, match=f"the parts of job {cancelled.job_id} were deleted"):
        jobs.create("alice", spec(resume_from=resuming))


def test_a_job_that_was_not_planned_is_resumed_from_its_beginning(jobs: BatchJobs) -> None:
    job_id = jobs.create("alice", spec())
    jobs.acquire_batch_coordinator(job_id, "one", "here", LEASE_S)
    jobs.set_status(job_id, "one", "FAILED", "no such file")
    resumed = jobs.find("alice", jobs.create("alice", spec(resume_from=job_id)))
    assert (resumed.sealed, resumed.total_batches, resumed.root_job_id) == (False, 0, job_id)
    assert jobs.get_batch_states(resumed.job_id) == []


def test_a_resumed_job_may_write_to_as_many_other_outputs(jobs: BatchJobs) -> None:
    job = end_job(jobs)
    other = [{"format": "json", "path": "/elsewhere.jsonl"}]
    with pytest.raises(UserError, match="its batch_output_formats differs"):
        jobs.create("alice", spec(resume_from=job.job_id, batch_output_formats=other))
    with pytest.raises(UserError, match="it has 1 outputs and the new job has 2; give as many"):
        jobs.create("alice", spec(resume_from=job.job_id, batch_output_formats=other * 2), other_outputs=True)
    with pytest.raises(UserError, match="its rows differs"):
        jobs.create("alice", spec(resume_from=job.job_id, rows="any"), other_outputs=True)
    new_id = jobs.create("alice", spec(resume_from=job.job_id, batch_output_formats=other), other_outputs=True)
    written = {"format": "json", "path": "/out.jsonl"}
    assert jobs.spec(new_id).part_formats == {staging_of("/out.jsonl", job.job_id, 0): written}
    same_id = jobs.create("alice", spec(resume_from=end_job(jobs).job_id))
    assert jobs.spec(same_id).part_formats == {}


def test_a_chain_of_resumed_jobs_has_one_root(jobs: BatchJobs) -> None:
    first = end_job(jobs)
    second = jobs.create("alice", spec(resume_from=first.job_id))
    jobs.acquire_batch_coordinator(second, "one", "here", LEASE_S)
    jobs.set_status(second, "one", "FAILED")
    third = jobs.find("alice", jobs.create("alice", spec(resume_from=second)))
    assert (third.root_job_id, third.resume_from) == (first.job_id, second)
    create_owned_job(jobs)
    for job_id in (first.job_id, second, third.job_id):
        assert jobs.resume_chain(job_id) == [first.job_id, second, third.job_id]


def test_a_resumed_job_counts_what_was_completed(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=8, max_failed_rows=5)
    good, bad, waits = claim(jobs, job, 3)
    settle(jobs, job, (good, outcome(good)), (bad, outcome(bad, failed=1)), (waits, replace(APP, retry=False)))
    jobs.set_status(job.job_id, "one", "FAILED")
    resumed = jobs.find("alice", jobs.create("alice", spec(resume_from=job.job_id, max_failed_rows=5)))
    assert (resumed.tokens_in, resumed.tokens_out, resumed.total_batches) == (5, 7, 5)
    stored = jobs.get_batch_states(resumed.job_id)
    assert [(row["start_idx"], row["status"], row["rows_ok"], row["tokens_in"]) for row in stored] == [
        (0, "COMPLETED", 2, 5),
        (2, "PENDING", 0, 0),
        (4, "PENDING", 0, 0),
        (5, "PENDING", 0, 0),
        (6, "PENDING", 0, 0),
    ]
    assert [row["retry_count"] for row in stored] == [0] * 5 and {row["error"] for row in stored} == {None}


# Neighbours.


def rows_of(db: Database, job_id: int) -> dict[str, list[tuple[object, ...]]]:
    """Everything that is stored of a job."""
    with db.read() as connection:
        return {
            table.name: sorted(
                (tuple(row) for row in connection.execute(sa.select(table).where(table.c.job_id == job_id))), key=str
            )
            for table in (JOBS, STATES, WORKERS, OUTPUTS, ROW_ERRORS)
        }


def start_busy_job(jobs: BatchJobs) -> JobRecord:
    """A job with batches in every state, a failed row, a worker and an output, under the token of all jobs here."""
    job = create_owned_job(jobs, rows=10, max_failed_rows=9)
    done, retried, split, _dispatched = claim(jobs, job, 4)
    jobs.record_launch("local", f"w{job.job_id}", job.job_id, "one", "local")
    settle(jobs, job, (done, outcome(done, failed=1)), (retried, APP), (split, replace(APP, retry=False)))
    with jobs._db.write() as connection:
        row = {"job_id": job.job_id, "output_idx": 0, "format": "json", "published_at": 1.0}
        connection.execute(OUTPUTS.insert(), {**row, **OutputInfo(f"/{job.job_id}", 1, 1, "a" * 64).to_dict()})
    return jobs.find("alice", job.job_id)


def test_nothing_that_happens_to_a_job_changes_its_neighbours(jobs: BatchJobs, db: Database) -> None:
    before, job, after = (start_busy_job(jobs) for _ in range(3))
    neighbours = (before.job_id, after.job_id)
    expected = [rows_of(db, job_id) for job_id in neighbours]
    name = job.job_id
    dispatched = [row["batch_idx"] for row in jobs.get_batch_states(name) if row["status"] == "DISPATCHED"]
    for change in (
        lambda: jobs.renew(name, "one", -1.0, dispatched),
        lambda: jobs.renew(name, "one", LEASE_S),
        lambda: jobs.settle_and_claim(name, "one", [], {"w": 9}, LEASE_S, paid_until={"rows": 1.0}),
        lambda: jobs.set_machines_aside(name, "one", [{"machine": "m1"}]),
        lambda: jobs.record_worker(f"w{name}", "127.0.0.1:1", "pid 1"),
        lambda: jobs.delete_worker(f"w{name}"),
        lambda: jobs.record_launch("local", f"w{name}", name, "one", "local"),
        lambda: jobs.release(name, "one"),
        lambda: jobs.acquire_batch_coordinator(name, "one", "here", LEASE_S),
        lambda: jobs.save_batch_states(name, "one", range(0, 9, 3), 9, {"etag": "x"}),  # type: ignore[arg-type]
        lambda: jobs.finish(name, "one", [("json", OutputInfo("/out.jsonl", 9, 1, "b" * 64))]),
        lambda: jobs.delete_ended_workers(),
        lambda: jobs.record_cleaned([name]),
    ):
        change()
        assert [rows_of(db, job_id) for job_id in neighbours] == expected
    assert jobs.find("alice", name).status == "SUCCEEDED"
    cancelled = start_busy_job(jobs)
    for change in (
        lambda: jobs.cancel("alice", cancelled.job_id),
        lambda: jobs.set_status(cancelled.job_id, "one", "CANCELLED"),
        lambda: jobs.create("alice", spec(resume_from=cancelled.job_id, max_failed_rows=9)),
    ):
        change()
        assert [rows_of(db, job_id) for job_id in neighbours] == expected
    failed = end_job(jobs)
    jobs.purge("alice", failed.job_id)
    assert [rows_of(db, job_id) for job_id in neighbours] == expected


def test_what_is_read_of_a_job_is_its_own(jobs: BatchJobs) -> None:
    before, job, after = (start_busy_job(jobs) for _ in range(3))
    with jobs._db.write() as connection:
        for neighbour in (before, after):
            of_neighbour = STATES.c.job_id == neighbour.job_id
            connection.execute(
                STATES.update().where(of_neighbour, STATES.c.status == "PENDING").values(status="FAILED")
            )
    assert [output["path"] for output in jobs.outputs(job.job_id)] == [f"/{job.job_id}"]
    assert [error["row_idx"] for error in jobs.row_errors(job.job_id)] == [0]
    assert [worker["worker_id"] for worker in jobs.workers(job.job_id)] == [f"w{job.job_id}"]
    assert len(jobs.get_batch_states(job.job_id)) == 7
    assert jobs.work_by_worker(job.job_id) == {"w": {"batches": 1, "rows": 2, "first_row": 6, "retried": 0}}
    assert [span for span, _ in jobs.iter_committed_batches(job.job_id)] == [(0, 1)]
    assert jobs.failure(job.job_id) is None and jobs.failure(after.job_id) is not None
    assert jobs.next_retry_in(job.job_id) is not None and jobs.next_retry_in(after.job_id) is None
    assert jobs.resume_chain(job.job_id) == [job.job_id]
    assert [schema for schema in jobs.schemas(job.job_id, 0) if schema] == []


def test_a_log_is_written_back_while_many_batches_are_stored(
    jobs: BatchJobs, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "INSERT_CHUNK", 2)
    monkeypatch.setattr(state, "CHECKPOINT_CHUNKS", 3)
    checkpoints: list[int] = []
    monkeypatch.setattr(db, "checkpoint", lambda: checkpoints.append(len(jobs.get_batch_states(job_id))))
    job_id = jobs.create("alice", spec())
    jobs.acquire_batch_coordinator(job_id, "one", "here", LEASE_S)
    jobs.save_batch_states(job_id, "one", range(14), 14)
    assert checkpoints == [6, 12]
