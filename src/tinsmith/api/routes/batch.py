"""Bulk jobs: submitting, watching, cancelling, resuming, and what came of them so far.

The specification of a job is checked and stored; its classes and its function are text here, and run on workers only.
`batch.permissions` says whose jobs may run code on this server's machine, and which files the others reach.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tinsmith.api.operation import MAX_PAGE, Call, JsonObject, Services, authenticate, endpoint, run
from tinsmith.batch import permissions
from tinsmith.batch.coordinator.coordinator import DEFAULT_POOL
from tinsmith.batch.coordinator.job_run import error_row
from tinsmith.batch.coordinator.state import TERMINAL, Job
from tinsmith.batch.types import JobSpec, identity_of
from tinsmith.errors import ForbiddenError, NotFoundError, UserError
from tinsmith.wire.bodies import JSON_TYPE

EVENTS_PAUSE_S = 0.25
"""Between two looks at a job that changes all the time."""
SAFETY_POLL_S = 5.0
"""A wake-up that was lost costs a follower this long."""
KEEP_ALIVE_S = 15.0
EVENT_STREAM = "text/event-stream"


def submit(call: Call) -> JsonObject:
    return {"job_id": _create(call, JobSpec.from_dict(call.fields().values))}


def _create(call: Call, spec: JobSpec, *, other_outputs: bool = False) -> int:
    services = call.services
    spec = permissions.admitted(spec, services.settings, call.tenant_id, services.tenants.accepts_anyone())
    if not services.coordinator.has_pool(spec.batch_pool_name):
        raise UserError(
            f"there is no pool {spec.batch_pool_name!r}; there are {list(services.coordinator.pool_names())}. Use "
            f"{DEFAULT_POOL!r}, or name it in the server's TINSMITH_BATCH_POOLS"
        )
    job_id = services.batch_jobs.create(call.tenant_id, spec, other_outputs=other_outputs)
    services.coordinator.wake()
    return job_id


def jobs(call: Call) -> JsonObject:
    limit, offset = call.page(100)
    found, count = call.services.batch_jobs.listing(call.tenant_id, limit, offset)
    return {"jobs": [_shown(job) for job in found], "total_count": count}


def job(call: Call) -> JsonObject:
    return _whole(call.services, _job(call))


def batches(call: Call) -> JsonObject:
    found = _job(call)
    limit, offset = call.page(MAX_PAGE)
    return {"batches": call.services.batch_jobs.get_batch_states(found.job_id, limit, offset)}


def cancel(call: Call) -> JsonObject:
    found = call.services.batch_jobs.cancel(call.tenant_id, _job(call).job_id)
    call.services.coordinator.wake(found.job_id)
    return _whole(call.services, found)


def purge(call: Call) -> JsonObject:
    found = call.services.batch_jobs.purge(call.tenant_id, _job(call).job_id)
    call.services.coordinator.sweep_soon()
    return _whole(call.services, found)


def resume(call: Call) -> JsonObject:
    """A new job as the old one was, or with other outputs, into which the old one's parts are then made; one with
    another function is submitted with `resume_from`."""
    old = _job(call)
    fields = call.fields()
    fields.refuse_unknown(frozenset({"batch_output_formats"}))
    spec = replace(call.services.batch_jobs.spec(old.job_id), resume_from=old.job_id, roots=None)
    if (outputs := fields.values.get("batch_output_formats")) is not None:
        spec = replace(spec, batch_output_formats=outputs)
        spec.check()
    return {"job_id": _create(call, spec, other_outputs=outputs is not None)}


def errors(call: Call) -> JsonObject:
    found = _job(call)
    after, limit = _after(call)
    return {"errors": [error_row(error) for error in call.services.batch_jobs.row_errors(found.job_id, limit, after)]}


def partial(call: Call) -> JsonObject:
    """The parts of what is committed, in the order of rows; whoever may read the outputs can read them."""
    found = _job(call)
    after, limit = _after(call)
    spec = call.services.batch_jobs.spec(found.job_id)
    return {
        "outputs": spec.batch_output_formats,
        "part_formats": spec.part_formats,
        "function": identity_of(spec.batch_serialized_fn),
        "input": {name: spec.batch_input_format[name] for name in ("format", "path")},
        "rows": spec.rows,
        "batches": [
            {"start_idx": span.start_idx, "end_idx": span.end_idx, "parts": parts}
            for span, parts in call.services.batch_jobs.committed(found.job_id, after, limit)
        ],
    }


def logs(call: Call) -> JsonObject:
    """Which workers wrote, and the lines of one of them; what they print is on the server that started them."""
    found = _job(call)
    written = call.services.coordinator.logs
    after = _after(call)[0]
    lines: list[JsonObject] = []
    if worker_id := call.query.get("worker"):
        lines, after = written.read(found.job_id, worker_id, max(after, 0))
    workers = [{"worker_id": worker_id, "bytes": size} for worker_id, size in written.workers(found.job_id)]
    return {"workers": workers, "lines": lines, "after": max(after, 0)}


async def events(request: Request) -> Response:
    """The job's status now, whenever it changes, and at its end."""
    services, tenant_id = await authenticate(request)
    job_id = _id(request.path_params["job_id"])
    await run(services.batch_jobs.find, tenant_id, job_id)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_events(services, tenant_id, job_id), media_type=EVENT_STREAM, headers=headers)


async def _events(services: Services, tenant_id: str, job_id: int) -> AsyncIterator[bytes]:
    told: Job | None = None
    told_at = time.monotonic()
    with services.waiters.watch_job(job_id) as changed:
        while not services.waiters.closed:
            changed.clear()
            found = await run(services.batch_jobs.find, tenant_id, job_id)
            if told is None or replace(found, updated_at=told.updated_at) != told:
                told, told_at = found, time.monotonic()
                yield b"event: status\ndata: " + orjson.dumps(await run(_whole, services, found)) + b"\n\n"
            elif time.monotonic() - told_at >= KEEP_ALIVE_S:
                told_at = time.monotonic()
                yield b": still there\n\n"
            if told.status in TERMINAL:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(SAFETY_POLL_S):
                    await changed.wait()
                    await asyncio.sleep(EVENTS_PAUSE_S)


def pools(call: Call) -> JsonObject:
    return {"pools": call.services.coordinator.pools(call.tenant_id)}


def resize_pool(call: Call) -> JsonObject:
    """Until the server ends; settings and YAML say what it begins with."""
    services = call.services
    if not permissions.is_trusted(services.settings, call.tenant_id, services.tenants.accepts_anyone()):
        raise ForbiddenError(
            f"tenant {call.tenant_id!r} may not resize pools, which all tenants share; whoever runs the server can "
            "allow it with TINSMITH_BATCH_TENANTS"
        )
    fields = call.fields()
    fields.refuse_unknown(frozenset({"workers"}))
    call.services.coordinator.resize(call.path["name"], fields.integer("workers"))
    return {"pools": call.services.coordinator.pools(call.tenant_id)}


def _job(call: Call) -> Job:
    return call.services.batch_jobs.find(call.tenant_id, _id(call.path["job_id"]))


def _id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise NotFoundError("there is no such bulk job; its id is a number")
    return int(text)


def _after(call: Call) -> tuple[int, int]:
    """Where a page begins, after a row, and how long it is."""
    after = call.query.get("after", "-1")
    if after != "-1" and not (after.isascii() and after.isdigit() and len(after) <= 18):
        raise UserError("the query's after must be a row's index, or -1")
    return int(after), call.page(MAX_PAGE)[0]


def _shown(job: Job) -> JsonObject:
    names = (
        "job_id name pool priority weight status total_rows rows_ok rows_failed tokens_in tokens_out max_failed_rows "
        "resume_from error created_at started_at ended_at"
    )
    shown: JsonObject = {name: getattr(job, name) for name in names.split()}
    return {
        **shown,
        "batch_total_batches": job.total_batches,
        "batch_completed_batches": job.completed_batches,
    }


def _whole(services: Services, job: Job) -> JsonObject:
    outputs = services.batch_jobs.outputs(job.job_id)
    names = ("path", "rows", "bytes", "sha256", "etag")
    workers = services.batch_jobs.workers(job.job_id)
    failed = services.batch_jobs.row_errors(job.job_id, 1) if job.rows_failed else []
    return {
        **_shown(job),
        "outputs": [{name: output[name] for name in names} for output in outputs],
        "first_error": error_row(failed[0]) if failed else None,
        "workers": [{name: worker[name] for name in ("worker_id", "kind", "state")} for worker in workers],
    }


ROUTES = [
    Route("/batch/jobs", endpoint(submit, takes=JSON_TYPE), methods=["POST"]),
    Route("/batch/jobs", endpoint(jobs), methods=["GET"]),
    Route("/batch/jobs/{job_id}", endpoint(job), methods=["GET"]),
    Route("/batch/jobs/{job_id}/batches", endpoint(batches), methods=["GET"]),
    Route("/batch/jobs/{job_id}/cancel", endpoint(cancel), methods=["POST"]),
    Route("/batch/jobs/{job_id}/purge", endpoint(purge), methods=["POST"]),
    Route("/batch/jobs/{job_id}/resume", endpoint(resume, takes=JSON_TYPE), methods=["POST"]),
    Route("/batch/jobs/{job_id}/errors", endpoint(errors), methods=["GET"]),
    Route("/batch/jobs/{job_id}/partial", endpoint(partial), methods=["GET"]),
    Route("/batch/jobs/{job_id}/logs", endpoint(logs), methods=["GET"]),
    Route("/batch/jobs/{job_id}/events", events, methods=["GET"]),
    Route("/batch/pools", endpoint(pools), methods=["GET"]),
    Route("/batch/pools/{name}", endpoint(resize_pool, takes=JSON_TYPE), methods=["PUT"]),
]
