"""Bulk jobs: submit, list, watch, cancel, resume, errors and committed parts.

A job's specification is validated and stored. Its functions are text in this process and run only on workers.
`batch.permissions` decides which tenants' jobs may run code on this machine, and which files the other jobs may use.

In a status, `worker_seconds` are those of workers that have ended, the `WORK_FIELDS` of a worker those of its batches
now, `first_error` the first failed row as `/errors` has it, `waiting` why no worker has started, after a minute, and
`machines_set_aside` those on which the function could not be set up.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated

import orjson
from pydantic import Field
from starlette.responses import Response

from tinsmith.api.access import Access
from tinsmith.api.declaration import MAX_PAGE, operation
from tinsmith.api.event_stream import EVENT_STREAM, KEEP_ALIVE_COMMENT, KEEP_ALIVE_S, EventStreamResponse, encode_event
from tinsmith.api.openapi import ANYTHING, COUNT, LIST, fields, listing
from tinsmith.api.queries import Limit, PageQuery
from tinsmith.api.request import Call, Draft, JsonObject, idempotency_key, run
from tinsmith.api.services import Services
from tinsmith.batch import permissions
from tinsmith.batch.coordinator.job_run import error_row
from tinsmith.batch.coordinator.rows import JobRecord
from tinsmith.batch.coordinator.stage_figures import describe_stages
from tinsmith.batch.coordinator.state import TERMINAL, WORK_FIELDS, IdempotentRequest
from tinsmith.batch.job_identity import describe_job
from tinsmith.batch.job_request import JOB_BODY, FormatBody, JobBody, check_paths
from tinsmith.batch.types import JobSpec
from tinsmith.db.database import now
from tinsmith.errors import ForbiddenError, NotFoundError
from tinsmith.wire.fields import INT64_MAX, ClosedBody, Integer, OneOf, Query, Text

EVENTS_PAUSE_S = 0.25
"""Pause between two reads of a job that changes continuously."""
SAFETY_POLL_S = 5.0
"""Longest delay of an event whose wake-up was lost."""
WAIT_S = 60.0
"""After this time a status says why no worker has started."""
MAX_SHOWN_ROW = 16_384
"""The most bytes of a failed row in a status, as JSON; `/errors` has the whole row."""
MAX_SHOWN_VALUE = 200
MAX_SHOWN_COLUMNS = 64
RowIndex = Annotated[int, Field(ge=-1, le=INT64_MAX)]


@operation(
    "POST",
    "/batch/jobs",
    "Submit a bulk job",
    body=JOB_BODY,
    answer=fields({"job_id": COUNT}),
    errors=(403, 404),
    example={
        "batch_serialized_fn": "",
        "batch_input_format": {"format": "json", "path": "/nowhere/in.jsonl"},
        "batch_output_formats": [{"format": "json", "path": "/nowhere/{session_id}.jsonl"}],
        "batch_size": 1,
        "name": "{session_id}",
        "resume_from": "{job_id}",
    },
)
def submit(call: Call, request: JobBody) -> JsonObject:
    """Create a job. A request with the `Idempotency-Key` of an earlier one returns the job of that one, and is refused
    if its body differs.
    """
    repeatable = _read_idempotent_request(call, "submit")
    job_id = call.services.batch_jobs.find_repeated(call.tenant_id, repeatable)
    return {"job_id": _create(call, request.spec(), repeatable) if job_id is None else job_id}


def _read_idempotent_request(call: Call, action: str) -> IdempotentRequest | None:
    """The idempotency key of a request and a digest of what it asks for, whatever the order of its fields."""
    key = idempotency_key(call)
    if key is None:
        return None
    body = orjson.dumps(orjson.loads(call.body), option=orjson.OPT_SORT_KEYS)
    return IdempotentRequest(key, hashlib.sha256(action.encode() + b"\n" + body).hexdigest())


def _create(call: Call, spec: JobSpec, repeatable: IdempotentRequest | None, *, other_outputs: bool = False) -> int:
    services = call.services
    spec = permissions.authorize_job(spec, services.settings, call.tenant_id, services.tenants.accepts_anyone())
    services.coordinator.check_pool(spec)
    services.coordinator.check_minimum(spec)
    services.coordinator.secrets.read(call.tenant_id, spec.secrets)  # refused now, and not when a worker starts
    job_id = services.batch_jobs.create(call.tenant_id, spec, other_outputs=other_outputs, request=repeatable)
    services.coordinator.wake()
    return job_id


class JobsQuery(PageQuery):
    limit: Limit = 100


@listing(
    "/batch/jobs", "List bulk jobs, newest first", answer=fields({"jobs": LIST, "total_count": COUNT}), query=JobsQuery
)
def jobs(call: Call, query: JobsQuery) -> JsonObject:
    job_records, count = call.services.batch_jobs.page(call.tenant_id, query.limit, query.offset)
    return {"jobs": [_summarize(job) for job in job_records], "total_count": count}


@operation("GET", "/batch/jobs/{job_id}", "Read a bulk job", answer=ANYTHING)
def job(call: Call) -> JsonObject:
    return _describe(call.services, find_job(call))


class JobBatchesQuery(PageQuery):
    limit: Limit = MAX_PAGE


@operation(
    "GET",
    "/batch/jobs/{job_id}/batches",
    "List a job's batches",
    answer=fields({"batches": LIST}),
    query=JobBatchesQuery,
)
def batches(call: Call, query: JobBatchesQuery) -> JsonObject:
    job_record = find_job(call)
    return {"batches": call.services.batch_jobs.get_batch_states(job_record.job_id, query.limit, query.offset)}


@operation("POST", "/batch/jobs/{job_id}/cancel", "Cancel a bulk job", answer=ANYTHING)
def cancel(call: Call) -> JsonObject:
    job_record = call.services.batch_jobs.cancel(call.tenant_id, find_job(call).job_id)
    call.services.coordinator.wake(job_record.job_id)
    return _describe(call.services, job_record)


@operation("POST", "/batch/jobs/{job_id}/purge", "Delete the parts of a failed job", answer=ANYTHING)
def purge(call: Call) -> JsonObject:
    job_record = call.services.batch_jobs.purge(call.tenant_id, find_job(call).job_id)
    call.services.coordinator.sweep_soon()
    return _describe(call.services, job_record)


class ResumeRequest(ClosedBody):
    batch_output_formats: list[FormatBody] | None = None


@operation(
    "POST",
    "/batch/jobs/{job_id}/resume",
    "Resume a job as a new job",
    body=ResumeRequest,
    late=True,
    answer=fields({"job_id": COUNT}),
    errors=(403, 404),
)
def resume(call: Call, draft: Draft[ResumeRequest]) -> JsonObject:
    """Create a job like the old one, optionally with other outputs, that reuses its committed parts. For a different
    function, submit a job with `resume_from` instead. A repeated request with the same `Idempotency-Key` returns the
    job of the first.
    """
    old_job = find_job(call)
    repeatable = _read_idempotent_request(call, f"resume {old_job.job_id}")
    if (job_id := call.services.batch_jobs.find_repeated(call.tenant_id, repeatable)) is not None:
        return {"job_id": job_id}
    outputs = draft.read().batch_output_formats
    spec = replace(call.services.batch_jobs.spec(old_job.job_id), resume_from=old_job.job_id, roots=None)
    if outputs is not None:
        formats = [output_format.model_dump() for output_format in outputs]
        check_paths(spec.batch_input_format, formats, spec.batch_error_format)
        spec = replace(spec, batch_output_formats=formats)
    return {"job_id": _create(call, spec, repeatable, other_outputs=outputs is not None)}


class RowsQuery(Query):
    """Rows, or batches that begin, after a row's index; -1 is before the first."""

    after: RowIndex = -1
    limit: Limit = MAX_PAGE


@operation(
    "GET",
    "/batch/jobs/{job_id}/errors",
    "List a job's failed rows",
    answer=fields({"errors": LIST, "next": ANYTHING}),
    query=RowsQuery,
)
def errors(call: Call, query: RowsQuery) -> JsonObject:
    """Return a page of failed rows in row order. `next` is the `after` of the next page, or null after the last one. A
    page of large rows may have fewer than `limit`.
    """
    page, after = call.services.batch_jobs.row_errors_page(find_job(call).job_id, query.limit, query.after)
    return {"errors": [error_row(error) for error in page], "next": after}


class PartsQuery(RowsQuery):
    """Batches after a row, or, in the order of commits, after the number of one."""

    order: Annotated[str, OneOf(("rows", "commits"))] = "rows"


@operation(
    "GET",
    "/batch/jobs/{job_id}/partial",
    "List a job's committed parts",
    answer=fields({"outputs": LIST, "batches": LIST}),
    query=PartsQuery,
)
def partial(call: Call, query: PartsQuery) -> JsonObject:
    """Return the parts of the committed batches, by default in row order. They are in the same storage as the
    outputs."""
    job_record = find_job(call)
    spec = call.services.batch_jobs.spec(job_record.job_id)
    return {
        "outputs": spec.batch_output_formats,
        "part_formats": spec.part_formats,
        **describe_job(spec),
        "input_version": spec.input_version,
        "batches": [
            {**batch.span._asdict(), "parts": batch.parts, "commit_number": batch.commit_number}
            for batch in call.services.batch_jobs.list_commits(job_record.job_id, query.after, query.limit, query.order)
        ],
    }


class LogsQuery(Query):
    worker: Text | None = None
    after: RowIndex = -1


@operation(
    "GET",
    "/batch/jobs/{job_id}/logs",
    "Read the output of a job's workers",
    answer=fields({"workers": LIST, "lines": LIST, "after": COUNT}),
    query=LogsQuery,
)
def logs(call: Call, query: LogsQuery) -> JsonObject:
    """Return the workers with output, and the lines of one worker. Only its own server has the output."""
    job_record = find_job(call)
    worker_logs = call.services.coordinator.logs
    after = query.after
    lines: list[JsonObject] = []
    if query.worker:
        lines, after = worker_logs.read(job_record.job_id, query.worker, max(after, 0))
    workers = [{"worker_id": worker_id, "bytes": size} for worker_id, size in worker_logs.workers(job_record.job_id)]
    return {"workers": workers, "lines": lines, "after": max(after, 0)}


@operation("GET", "/batch/jobs/{job_id}/events", "Stream a job's status", answer=EVENT_STREAM)
async def events(call: Call) -> Response:
    """Send the job's status as server-sent events: at once, at each change and at the end."""
    services, tenant_id = call.services, call.tenant_id
    job_id = _id(call.path["job_id"])
    await run(services.batch_jobs.find, tenant_id, job_id)
    return EventStreamResponse(_events(services, tenant_id, job_id))


async def _events(services: Services, tenant_id: str, job_id: int) -> AsyncGenerator[bytes, None]:
    sent_record: JobRecord | None = None
    sent_at = time.monotonic()
    with services.waiters.watch_job(job_id) as changed:
        while not services.waiters.closed:
            changed.clear()
            job_record = await run(services.batch_jobs.find, tenant_id, job_id)
            if sent_record is None or replace(job_record, updated_at=sent_record.updated_at) != sent_record:
                sent_record, sent_at = job_record, time.monotonic()
                yield encode_event("status", await run(_describe, services, job_record))
            elif time.monotonic() - sent_at >= KEEP_ALIVE_S:
                sent_at = time.monotonic()
                yield KEEP_ALIVE_COMMENT
            if sent_record.status in TERMINAL:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(SAFETY_POLL_S):
                    await changed.wait()
                    await asyncio.sleep(EVENTS_PAUSE_S)


@listing("/batch/pools", "List the pools of workers", answer=fields({"pools": LIST}))
def pools(call: Call) -> JsonObject:
    return {"pools": call.services.coordinator.pools(call.tenant_id)}


class ResizePoolRequest(ClosedBody):
    workers: Annotated[Integer, Field(json_schema_extra={"minimum": 0, "maximum": 1024})]


@operation(
    "PUT",
    "/batch/pools/{name}",
    "Resize a pool",
    body=ResizePoolRequest,
    late=True,
    answer=fields({"pools": LIST}),
    errors=(403, 404),
    access=Access.NOTHING,
)
def resize_pool(call: Call, draft: Draft[ResizePoolRequest]) -> JsonObject:
    """Set the number of workers until the server ends. Settings and YAML give the initial size."""
    services = call.services
    if not permissions.is_trusted(services.settings, call.tenant_id, services.tenants.accepts_anyone()):
        raise ForbiddenError(
            f"tenant {call.tenant_id!r} may not resize pools, which all tenants share; the operator can "
            "allow it with TINSMITH_BATCH_TENANTS"
        )
    call.services.coordinator.resize(call.path["name"], draft.read().workers)
    return {"pools": call.services.coordinator.pools(call.tenant_id)}


def find_job(call: Call) -> JobRecord:
    """The job of a path. Raises NotFoundError."""
    return call.services.batch_jobs.find(call.tenant_id, _id(call.path["job_id"]))


def _id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise NotFoundError("there is no such bulk job; a job's id is a number")
    return int(text)


def _summarize(job: JobRecord) -> JsonObject:
    names = (
        "job_id name pool priority weight status total_rows rows_ok rows_failed tokens_in tokens_out max_failed_rows "
        "worker_seconds resume_from error created_at started_at ended_at"
    )
    fields: JsonObject = {name: getattr(job, name) for name in names.split()}
    return {**fields, "batch_total_batches": job.total_batches, "batch_completed_batches": job.completed_batches}


def _describe(services: Services, job: JobRecord) -> JsonObject:
    outputs = services.batch_jobs.outputs(job.job_id)
    names = ("path", "rows", "bytes", "sha256", "etag")
    workers = services.batch_jobs.workers(job.job_id)
    work_by_worker = services.batch_jobs.work_by_worker(job.job_id) if workers else {}
    first_errors = services.batch_jobs.row_errors(job.job_id, 1) if job.rows_failed else []
    return {
        **_summarize(job),
        "outputs": [{name: output[name] for name in names} for output in outputs],
        "machines_set_aside": job.machines_set_aside or [],
        "stages": describe_stages(job, services.batch_jobs.stages(job.job_id), now()),
        "waiting": _explain_wait(services, job, workers),
        "first_error": shorten_error(error_row(first_errors[0])) if first_errors else None,
        "workers": [
            {name: worker[name] for name in ("worker_id", "kind", "state", "started_at")}
            | (work_by_worker.get(worker["worker_id"]) or dict.fromkeys(WORK_FIELDS, 0))
            for worker in workers
        ],
    }


def _explain_wait(services: Services, job: JobRecord, workers: Sequence[Mapping[str, object]]) -> str | None:
    """Why no worker has started for a job that has waited for one; None for any other job. Names no other job."""
    has_worker = any(worker["state"] == "ready" for worker in workers) or job.completed_batches
    waited_s = now() - job.created_at
    if has_worker or job.status not in ("PENDING", "RUNNING") or waited_s < WAIT_S:
        return None
    sizes = {str(pool["name"]): pool["workers"] for pool in services.coordinator.pools(job.tenant_id)}
    begin = f"no worker of the pool {job.pool!r} has started for {waited_s:.0f} s"
    if job.pool not in sizes:
        return f"{begin}: this server has no such pool now"
    if not sizes[job.pool]:
        return f"{begin}: it has no workers; the operator changes its size"
    if num_jobs := services.batch_jobs.count_jobs_with_workers(job.pool):
        jobs = "another job" if num_jobs == 1 else f"{num_jobs} other jobs"
        return f"{begin}: its {sizes[job.pool]} workers run {jobs}; a higher priority or weight goes first"
    return f"{begin}: its machines have no room, or none has what the job or the pool asks for"


def shorten_error(error: JsonObject) -> JsonObject:
    """Return a failed row for a status, which is sent often: the values of a large row are cut."""
    row = error["row"]
    if not isinstance(row, dict) or len(orjson.dumps(row)) <= MAX_SHOWN_ROW:
        return error
    return {**error, "row": {name: shorten(value) for name, value in list(row.items())[:MAX_SHOWN_COLUMNS]}}


def shorten(value: object) -> object:
    """A value, cut to the beginning of its JSON if that is long."""
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return value if len(text) <= MAX_SHOWN_VALUE else f"{text[:MAX_SHOWN_VALUE]}... ({len(text)} characters)"
