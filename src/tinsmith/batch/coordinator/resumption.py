"""Resumption: which job's batches a new job begins with, and their copy. SQL only.

A job that resumes another begins without batches. Its coordinator copies those of the nearest planned job among its
ancestors, in chunks of one short transaction each, in the order of their numbers. A copy that was interrupted goes on
after its last batch. The ancestors have ended, so their batches do not change. Those that stay completed are the first
commits of the new job, in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tinsmith.batch.coordinator.rows import update_job
from tinsmith.batch.types import SOURCE_FIELDS, JobSpec, staging_of
from tinsmith.db.database import now
from tinsmith.db.schema import BATCH_JOBS as JOBS
from tinsmith.db.schema import BATCH_STATES as STATES
from tinsmith.errors import NotFoundError, UserError

RESULTS = ("rows_ok", "rows_failed", "tokens_in", "tokens_out")


def is_of_root(root: sa.ColumnElement[int] | int) -> sa.ColumnElement[bool]:
    return sa.or_(JOBS.c.root_job_id == root, JOBS.c.job_id == root)


def lock_resumed_job(connection: Connection, tenant_id: str, spec: JobSpec, other_outputs: bool) -> dict[str, Any]:
    """Lock the job to resume; returns the columns of the new job that follow from it, `spec` among them with the
    fields that it takes over. Raises NotFoundError, UserError."""
    query = sa.select(JOBS).where(JOBS.c.job_id == spec.resume_from, JOBS.c.tenant_id == tenant_id)
    old = connection.execute(query.with_for_update()).one_or_none()
    if old is None:
        raise NotFoundError(f"resume_from is {spec.resume_from}, but there is no such bulk job")
    chain = connection.execute(sa.select(JOBS).where(is_of_root(old.root_job_id or old.job_id))).all()
    refusal = f"bulk job {old.job_id} cannot be resumed"
    for other in chain:
        if other.status not in ("FAILED", "CANCELLED"):
            status = "has succeeded" if other.status == "SUCCEEDED" else f"is {other.status}: cancel it first"
            raise UserError(f"{refusal}: job {other.job_id} {status}")
    for other in chain:
        if other.cleaned or other.spec.get("purge"):
            raise UserError(f"{refusal}: the parts of job {other.job_id} were deleted; submit a new job")
    for name in ("batch_input_format", "limit", "rows", *(() if other_outputs else ("batch_output_formats",))):
        if old.spec.get(name) != getattr(spec, name):
            raise UserError(f"{refusal}: its {name} differs; give the same, or submit a new job")
    before, after = old.spec["batch_output_formats"], spec.batch_output_formats
    if len(before) != len(after):
        raise UserError(f"{refusal}: it has {len(before)} outputs and the new job has {len(after)}; give as many")
    part_formats = dict(old.spec.get("part_formats") or {})
    for index, (written, new) in enumerate(zip(before, after, strict=True)):
        if written != new:
            part_formats = {staging_of(written["path"], job.job_id, index): written for job in chain} | part_formats
    columns = {"root_job_id": old.root_job_id or old.job_id}
    source = _find_planned_job(chain, old.job_id)
    if source is None:
        return columns
    fields = {name: source.spec.get(name) for name in SOURCE_FIELDS} | {"part_formats": part_formats}
    return {**columns, "total_rows": source.total_rows, "spec": fields}


def _find_planned_job(chain: Sequence[sa.Row[Any]], job_id: int | None) -> sa.Row[Any] | None:
    """The nearest job that has all its batches: this one, or the one that it resumes, and so on."""
    by_id = {job.job_id: job for job in chain}
    while job_id is not None and not by_id[job_id].sealed:
        job_id = by_id[job_id].resume_from
    return None if job_id is None else by_id[job_id]


def find_source(connection: Connection, job_id: int) -> int | None:
    """The job whose batches a job begins with; None if it has to be planned."""
    columns = [JOBS.c[name] for name in ("job_id", "resume_from", "root_job_id", "sealed")]
    job = connection.execute(sa.select(*columns).where(JOBS.c.job_id == job_id)).one()
    if job.resume_from is None:
        return None
    chain = connection.execute(sa.select(*columns).where(is_of_root(job.root_job_id))).all()
    source = _find_planned_job(chain, job.resume_from)
    return None if source is None else int(source.job_id)


def copy_chunk(connection: Connection, source_id: int, job_id: int, limit: int) -> int:
    """Copy the next batches, at most `limit`, and count them for the job; returns how many. Batches that were completed
    without a failed row stay completed; the others are pending."""
    last = sa.select(sa.func.max(STATES.c.batch_idx)).where(STATES.c.job_id == job_id)
    after = connection.scalar(last)
    after = -1 if after is None else after
    is_complete = sa.and_(STATES.c.status == "COMPLETED", STATES.c.rows_failed == 0)
    first_number = sa.select(JOBS.c.completed_batches).where(JOBS.c.job_id == job_id).scalar_subquery()
    num_complete = sa.func.sum(sa.case((is_complete, 1), else_=0)).over(order_by=STATES.c.batch_idx, rows=(None, 0))
    columns = {
        "job_id": sa.literal(job_id),
        "status": sa.case((is_complete, "COMPLETED"), else_="PENDING"),
        "updated_at": sa.literal(now()),
        "parts": STATES.c.parts,
        "commit_number": sa.case((is_complete, first_number + num_complete)),
        **{name: sa.case((is_complete, STATES.c[name]), else_=0) for name in ("rows_ok", "tokens_in", "tokens_out")},
        **{name: STATES.c[name] for name in ("batch_idx", "start_idx", "end_idx", "attempt_id", "worker_cluster")},
    }
    is_next = sa.and_(STATES.c.job_id == source_id, STATES.c.batch_idx > after, STATES.c.status != "SPLIT")
    source = sa.select(*columns.values()).where(is_next).order_by(STATES.c.batch_idx).limit(limit)
    connection.execute(STATES.insert().from_select(list(columns), source))
    completed = sa.case((STATES.c.status == "COMPLETED", 1), else_=0)
    counted = {"completed_batches": completed, **{name: STATES.c[name] for name in RESULTS}}
    sums = [sa.func.coalesce(sa.func.sum(column), 0).label(name) for name, column in counted.items()]
    is_copied = sa.and_(STATES.c.job_id == job_id, STATES.c.batch_idx > after)
    query = sa.select(sa.func.count().label("total_batches"), *sums).where(is_copied)
    totals = {name: int(total) for name, total in connection.execute(query).one()._mapping.items()}
    update_job(connection, job_id, **{name: JOBS.c[name] + total for name, total in totals.items()})
    return totals["total_batches"]
