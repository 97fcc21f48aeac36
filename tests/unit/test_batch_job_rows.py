"""Bulk jobs as rows: pages, owners, resumption, deletion, and that jobs leave each other alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import sqlalchemy as sa

from support.job_rows import APP, APP_AGAIN, INFRA, LEASE_S, claim, create_owned_job, end_job, outcome, settle, spec
from tinsmith.batch.coordinator import state
from tinsmith.batch.coordinator.rows import JobRecord
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.types import OutputInfo, staging_of
from tinsmith.db.database import Database
from tinsmith.db.schema import BATCH_JOBS as JOBS
from tinsmith.db.schema import BATCH_OUTPUTS as OUTPUTS
from tinsmith.db.schema import BATCH_ROW_ERRORS as ROW_ERRORS
from tinsmith.db.schema import BATCH_STATES as STATES
from tinsmith.db.schema import BATCH_WORKERS as WORKERS
from tinsmith.errors import NotFoundError, UserError


@pytest.fixture
def jobs(db: Database) -> BatchJobs:
    return BatchJobs(db)


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
    assert [batch.span for batch in jobs.list_commits(job.job_id, 0, 2)] == [(2, 3), (4, 5)]
    monkeypatch.setattr(state, "PAGE", 1)
    assert [batch.span for batch in jobs.iter_committed_batches(job.job_id)] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_the_schemas_of_an_output_are_listed_once_each(jobs: BatchJobs) -> None:
    job = create_owned_job(jobs, rows=8)
    for attempt, schema in zip(claim(jobs, job, 4), ({"a": "int"}, {"a": "int"}, None, {"a": "float"}), strict=True):
        (part,) = outcome(attempt).parts
        typed = replace(part, schema=schema)  # type: ignore[arg-type]
        settle(jobs, job, (attempt, replace(outcome(attempt), parts=(typed,))))
    assert sorted(map(str, jobs.schemas(job.job_id, 0))) == ["{'a': 'float'}", "{'a': 'int'}"]
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
    observed = {seen.job.job_id: seen.job.status for seen in jobs.members.observe([plain, left, cancelled])}
    assert observed == {plain: "PENDING", left: "PENDING", cancelled: "CANCELLING"} and jobs.members.observe([]) == []
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
    jobs.save_batch_states(job_id, "one", range(2), 2, {"input_version": {"etag": "x"}, "input_snapshot": "/rows"})
    assert jobs.spec(job_id).input_version == {"etag": "x"} and jobs.spec(job_id).input_snapshot == "/rows"
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
    jobs.record_worker("w1", "pid 7")
    first, second = jobs.workers(job.job_id)
    assert (first["state"], first["pid_or_actor"]) == ("ready", "pid 7")
    assert (second["state"], second["pid_or_actor"]) == ("starting", None)


# Resuming and deleting.


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
    settle(jobs, job, (good, outcome(good)), (bad, outcome(bad, failed=1)), (waits, APP_AGAIN))
    jobs.set_status(job.job_id, "one", "FAILED")
    resumed_id = jobs.create("alice", spec(resume_from=job.job_id, max_failed_rows=5))
    jobs.acquire_batch_coordinator(resumed_id, "two", "here", LEASE_S)
    resumed = jobs.copy_resumed_batches(resumed_id, "two")
    assert resumed is not None
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
    settle(jobs, job, (done, outcome(done, failed=1)), (retried, APP), (split, APP_AGAIN))
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
        lambda: jobs.record_worker(f"w{name}", "pid 1"),
        lambda: jobs.delete_worker(f"w{name}"),
        lambda: jobs.record_launch("local", f"w{name}", name, "one", "local"),
        lambda: jobs.release(name, "one"),
        lambda: jobs.acquire_batch_coordinator(name, "one", "here", LEASE_S),
        lambda: jobs.save_batch_states(name, "one", range(0, 9, 3), 9, {"input_snapshot": "x"}),
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
    assert [batch.span for batch in jobs.iter_committed_batches(job.job_id)] == [(0, 1)]
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
