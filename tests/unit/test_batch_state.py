"""Bulk jobs as rows: fencing, counts and retries."""

from __future__ import annotations

import sqlite3
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import sqlalchemy as sa

from support.job_rows import APP, APP_AGAIN, INFRA, LEASE_S, claim, create_owned_job, outcome, settle, spec
from tinsmith.batch.coordinator import state
from tinsmith.batch.coordinator.failures import MAX_INFRA_RETRIES
from tinsmith.batch.coordinator.rows import JobRecord, SupersededError, is_transient
from tinsmith.batch.coordinator.state import INSERT_CHUNK, BatchJobs, IdempotentRequest
from tinsmith.batch.types import (
    AttemptFailure,
    FailureCause,
    OutputInfo,
    RowFailure,
)
from tinsmith.db.database import Database
from tinsmith.db.schema import BATCH_STATES as STATES
from tinsmith.db.schema import BATCH_WORKERS as WORKERS
from tinsmith.db.sqlite_database import SQLiteDatabase
from tinsmith.errors import NotFoundError, UserError


@pytest.fixture
def jobs(db: Database) -> BatchJobs:
    return BatchJobs(db)


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
    assert [batch.span for batch in jobs.iter_committed_batches(job.job_id)] == [(0, 1), (2, 3), (4, 4)]


def commits_of(jobs: BatchJobs, job_id: int, after: int = 0) -> list[tuple[tuple[int, int], int]]:
    return [(batch.span, batch.commit_number) for batch in jobs.list_commits(job_id, after, 100, "commits")]


def test_batches_are_numbered_in_the_order_of_their_commits(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=8)
    first, second, third, fourth = claim(jobs, job, 4)
    settle(jobs, job, (third, outcome(third)))
    settle(jobs, job, (second, APP_AGAIN), (fourth, outcome(fourth)), (first, outcome(first)))
    assert commits_of(jobs, job.job_id) == [((4, 5), 1), ((6, 7), 2), ((0, 1), 3)]
    assert not settle(jobs, job, (first, outcome(first))).job.done, "a late result has no number"
    for part in reversed(claim(jobs, job, 2)):
        settle(jobs, job, (part, outcome(part)))
    assert commits_of(jobs, job.job_id, after=3) == [((3, 3), 4), ((2, 2), 5)], "the parts of a batch that was split"
    assert [batch.span for batch in jobs.list_commits(job.job_id, 0, 2)] == [(2, 2), (3, 3)]


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
    ((_, parts, _),) = jobs.iter_committed_batches(job.job_id)
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
    hopeless = APP_AGAIN
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
    assert [batch.span for batch in jobs.iter_committed_batches(job.job_id)] == [(0, 0), (1, 1), (2, 3)]


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
            job.job_id, "one", [(batch, AttemptFailure("GivenBack", "not begun", FailureCause.NOT_BEGUN))], {}, LEASE_S
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
    assert (resumed.total_batches, resumed.total_rows, resumed.sealed) == (0, 8, False)
    jobs.acquire_batch_coordinator(resumed.job_id, "two", "here", LEASE_S)
    resumed = jobs.copy_resumed_batches(resumed.job_id, "two")
    assert resumed is not None
    assert (resumed.total_batches, resumed.completed_batches, resumed.rows_ok, resumed.rows_failed) == (4, 1, 2, 0)
    assert resumed.root_job_id == job.job_id and resumed.total_rows == 8 and resumed.sealed
    assert jobs.resume_chain(resumed.job_id) == [job.job_id, resumed.job_id]
    claims = claim(jobs, resumed, 9, "two")
    assert [batch.span for batch in claims] == [(2, 3), (4, 5), (6, 7)]
    with pytest.raises(UserError, match=f"job {resumed.job_id} is PENDING"):
        jobs.create("alice", spec(resume_from=job.job_id))
    jobs.finish(resumed.job_id, "two", [("json", OutputInfo("/out.jsonl", 8, 100, "b" * 64))])
    with pytest.raises(UserError, match="has succeeded"):
        jobs.create("alice", spec(resume_from=job.job_id))


def test_the_batches_of_a_resumed_job_are_copied_in_chunks_and_an_interrupted_copy_goes_on(
    jobs: BatchJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "INSERT_CHUNK", 3)
    job = create_owned_job(jobs, rows=20, max_failed_rows=9)
    claims = claim(jobs, job, 9)
    outcomes = [(batch, outcome(batch, failed=int(index == 5))) for index, batch in enumerate(claims[:8])]
    jobs.settle_and_claim(job.job_id, "one", [*outcomes, (claims[8], APP_AGAIN)], {}, LEASE_S)
    jobs.set_status(job.job_id, "one", "FAILED")
    first = jobs.create("alice", spec(resume_from=job.job_id))
    jobs.acquire_batch_coordinator(first, "two", "here", LEASE_S)
    checks = iter([False, False, True])
    interrupted = jobs.copy_resumed_batches(first, "two", lambda: next(checks))
    assert interrupted is not None and not interrupted.sealed
    assert (interrupted.total_batches, interrupted.completed_batches, interrupted.rows_ok) == (6, 5, 10)
    assert jobs.acquire_batch_coordinator(first, "three", "here", LEASE_S)
    with pytest.raises(SupersededError):
        jobs.copy_resumed_batches(first, "two")
    copied = jobs.copy_resumed_batches(first, "three")
    assert copied is not None and copied.sealed
    assert (copied.total_batches, copied.completed_batches, copied.rows_ok, copied.rows_failed) == (11, 7, 14, 0)
    rows = jobs.get_batch_states(first)
    spans = [(row["start_idx"], row["end_idx"]) for row in rows]
    assert spans == [*((start, start + 1) for start in range(0, 16, 2)), (16, 16), (17, 17), (18, 19)]
    assert [row["status"] == "COMPLETED" for row in rows] == [True] * 5 + [False] + [True] * 2 + [False] * 3
    assert [row["commit_number"] for row in rows] == [1, 2, 3, 4, 5, None, 6, 7, None, None, None]
    (batch,) = claim(jobs, copied, 1, "three")
    jobs.settle_and_claim(first, "three", [(batch, outcome(batch))], {}, LEASE_S)
    assert commits_of(jobs, first, after=7) == [((10, 11), 8)]


def test_a_job_that_was_cancelled_while_it_copied_is_resumed_from_the_one_that_it_resumed(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs)
    (done,) = claim(jobs, job)
    jobs.settle_and_claim(job.job_id, "one", [(done, outcome(done))], {}, LEASE_S)
    jobs.set_status(job.job_id, "one", "FAILED")
    ids = [job.job_id]
    for _ in range(2):
        ids.append(jobs.create("alice", spec(resume_from=ids[-1])))
        jobs.acquire_batch_coordinator(ids[-1], "one", "here", LEASE_S)
        jobs.copy_resumed_batches(ids[-1], "one", lambda: True)
        jobs.cancel("alice", ids[-1])
        assert jobs.set_status(ids[-1], "one", "CANCELLED")
        assert jobs.find("alice", ids[-1]).total_batches == 0
    last = jobs.create("alice", spec(resume_from=ids[-1]))
    jobs.acquire_batch_coordinator(last, "one", "here", LEASE_S)
    copied = jobs.copy_resumed_batches(last, "one")
    assert copied is not None and (copied.total_batches, copied.completed_batches, copied.total_rows) == (3, 1, 6)
    never_planned = jobs.create("alice", spec())
    jobs.acquire_batch_coordinator(never_planned, "one", "here", LEASE_S)
    assert jobs.copy_resumed_batches(never_planned, "one") is None
    jobs.set_status(never_planned, "one", "FAILED")
    assert jobs.copy_resumed_batches(jobs.create("alice", spec(resume_from=never_planned)), "one") is None


def test_a_request_that_is_sent_again_finds_its_job(jobs: BatchJobs) -> None:
    request, other = IdempotentRequest("k", "a" * 64), IdempotentRequest("k", "b" * 64)
    assert jobs.find_repeated("alice", request) is None and jobs.find_repeated("alice", None) is None
    job_id = jobs.create("alice", spec(), request=request)
    assert jobs.find_repeated("alice", request) == jobs.create("alice", spec(), request=request) == job_id
    for repeat in (jobs.find_repeated, lambda tenant_id, again: jobs.create(tenant_id, spec(), request=again)):
        with pytest.raises(UserError, match=f"Idempotency-Key is 'k', .* created bulk job {job_id}"):
            repeat("alice", other)
    assert jobs.create("bob", spec(), request=other) != job_id, "a key is its tenant's"
    assert jobs.create("alice", spec()) != jobs.create("alice", spec()), "requests without a key are different ones"
    jobs.acquire_batch_coordinator(job_id, "one", "here", LEASE_S)
    jobs.set_status(job_id, "one", "FAILED")
    resumption = IdempotentRequest("r", "c" * 64)
    resumed_id = jobs.create("alice", spec(resume_from=job_id), request=resumption)
    # Without the key, it would be refused: the resumed job is pending.
    assert jobs.create("alice", spec(resume_from=job_id), request=resumption) == resumed_id
    assert jobs.page("alice", 10, 0)[1] == 4


def test_the_same_request_on_many_threads_creates_one_job(jobs: BatchJobs) -> None:
    request = IdempotentRequest("k", "a" * 64)
    with ThreadPoolExecutor(8) as pool:
        job_ids = set(pool.map(lambda _: jobs.create("alice", spec(), request=request), range(16)))
    assert len(job_ids) == 1 and jobs.page("alice", 10, 0)[1] == 1


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

DIED = AttemptFailure("MapperKilled", "the process was killed", FailureCause.DEATH)


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
    turn = settle(jobs, job, (attempt, replace(APP_AGAIN, row=row)))
    assert turn.job.total_batches == 2 + len(spans) - 1 and not turn.failed
    assert [rows[:2] for rows in batches(jobs, job)] == [*spans, (5, 7)]
    assert {stored["parent_idx"] for stored in jobs.get_batch_states(job.job_id)} == {None, attempt.batch_idx}
    assert len({stored["batch_idx"] for stored in jobs.get_batch_states(job.job_id)}) == 2 + len(spans)


def test_a_final_failure_fails_the_batch_at_once_and_says_where(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=6)
    assert jobs.failure(job.job_id) is None
    first, second, third = claim(jobs, job, 3)
    final = replace(APP, cause=FailureCause.PROGRAM)
    assert settle(jobs, job, (second, replace(final, error_class="ProgramError"))).failed
    assert jobs.failure(job.job_id) == "rows 2 to 3: the row is bad"
    assert settle(jobs, job, (first, final)).failed and not settle(jobs, job, (third, APP)).failed
    assert jobs.failure(job.job_id) == "rows 0 to 1: ValueError: the row is bad", "the first by its rows"
    assert [rows[2:4] for rows in batches(jobs, job)] == [("FAILED", 1), ("FAILED", 1), ("PENDING", 1)]


def test_an_attempt_that_is_rejected_fails_nothing(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=1)
    (attempt,) = claim(jobs, job)
    settle(jobs, job, (attempt, outcome(attempt)))
    turn = settle(jobs, job, (attempt, replace(APP, cause=FailureCause.PROGRAM)))
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
        settle(jobs, job, (attempt, APP_AGAIN), max_retries=max_retries)
        (part,) = claim(jobs, job)
        settle(jobs, job, (part, APP), max_retries=max_retries)
        assert batches(jobs, job)[0] == (0, 0, "PENDING", 1, 0)
        (part,) = claim(jobs, job)
        assert part.start_idx == 0, "at once"
        settle(jobs, job, (part, APP), max_retries=max_retries)
        expected = (0, 0, "FAILED", 2, 0) if max_retries == 0 else (0, 0, "PENDING", 2, 0)
        assert batches(jobs, job)[0] == expected


@pytest.mark.parametrize("max_retries", [0, 1])
def test_the_attempt_that_only_records_a_row_is_none_of_its_attempts(jobs: BatchJobs, max_retries: int) -> None:
    job = create_owned_job(jobs, rows=1)
    for _ in range(max_retries + 1):
        (attempt,) = claim(jobs, job)
        settle(jobs, job, (attempt, APP), max_retries=max_retries, backoff_s=0)
    (attempt,) = claim(jobs, job)
    settle(jobs, job, (attempt, outcome(attempt, failed=1)), max_retries=max_retries)
    (error,) = jobs.row_errors(job.job_id)
    assert (error["details"]["attempts"], error["attempt_id"]) == (max_retries + 1, max_retries + 2)


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
    assert is_transient(error) is expected
