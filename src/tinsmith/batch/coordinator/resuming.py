"""What a bulk job begins with that resumes another one.

Of the jobs that resumed one another (those of one root) at most one is active, and once one has succeeded, or parts
were deleted, none can be resumed: so whoever resumes finds every part that its rows name. It reads the same rows:
input, outputs and `rows` must be the same, and mappers refuse an input that has changed since (`versions.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tinsmith.batch.formats.input_versions import Version
from tinsmith.batch.types import JobSpec, staging_of
from tinsmith.db.database import now
from tinsmith.db.schema import BATCH_JOBS as JOBS
from tinsmith.db.schema import BATCH_STATES as STATES
from tinsmith.errors import NotFoundError, UserError


class Resumed(NamedTuple):
    job_id: int
    root_job_id: int
    sealed: bool
    total_rows: int
    input_version: Version | None
    part_formats: dict[str, dict[str, Any]]
    """`JobSpec.part_formats` of the job that resumes it."""


def resumable(connection: Connection, tenant_id: str, spec: JobSpec, other_outputs: bool = False) -> Resumed:
    """The job to go on with, its row locked. Raises NotFoundError, UserError."""
    wanted = sa.select(JOBS.c.job_id, JOBS.c.root_job_id, JOBS.c.sealed, JOBS.c.total_rows, JOBS.c.spec).where(
        JOBS.c.job_id == spec.resume_from, JOBS.c.tenant_id == tenant_id
    )
    row = connection.execute(wanted.with_for_update()).one_or_none()
    if row is None:
        raise NotFoundError(f"resume_from is {spec.resume_from}, and there is no such bulk job")
    root = row.root_job_id or row.job_id
    same = sa.select(JOBS.c.job_id, JOBS.c.status, JOBS.c.cleaned, JOBS.c.spec)
    chain = connection.execute(same.where(sa.or_(JOBS.c.root_job_id == root, JOBS.c.job_id == root))).all()
    for other in chain:
        if other.status not in ("FAILED", "CANCELLED"):
            what = "has succeeded" if other.status == "SUCCEEDED" else f"is {other.status}: cancel it first"
            raise UserError(f"bulk job {row.job_id} cannot be resumed: job {other.job_id} {what}")
    for other in chain:
        if other.cleaned or other.spec.get("purge"):
            raise UserError(f"bulk job {row.job_id} cannot be resumed: the parts of job {other.job_id} were deleted")
    for name in ("batch_input_format", "rows", *(() if other_outputs else ("batch_output_formats",))):
        before, after = row.spec.get(name), getattr(spec, name)
        if before != after:
            raise UserError(f"bulk job {row.job_id} has another {name} than the one that resumes it")
    written = dict(row.spec.get("part_formats") or {})
    before = row.spec["batch_output_formats"]
    if len(before) != len(spec.batch_output_formats):
        count = len(spec.batch_output_formats)
        raise UserError(f"bulk job {row.job_id} has {len(before)} outputs, and the one that resumes it has {count}")
    for index, (old, new) in enumerate(zip(before, spec.batch_output_formats, strict=True)):
        if old != new:
            written = {staging_of(old["path"], each.job_id, index): old for each in chain} | written
    return Resumed(row.job_id, root, row.sealed, row.total_rows, row.spec.get("input_version"), written)


def copy_batches(connection: Connection, old_id: int, job_id: int) -> None:
    """What was completed without a failed row stays completed; all else is done again."""
    kept = sa.and_(STATES.c.status == "COMPLETED", STATES.c.rows_failed == 0)
    copied = {
        "job_id": sa.literal(job_id),
        "status": sa.case((kept, "COMPLETED"), else_="PENDING"),
        "updated_at": sa.literal(now()),
        "parts": STATES.c.parts,
        "rows_ok": sa.case((kept, STATES.c.rows_ok), else_=0),
        "tokens_in": sa.case((kept, STATES.c.tokens_in), else_=0),
        "tokens_out": sa.case((kept, STATES.c.tokens_out), else_=0),
        **{name: STATES.c[name] for name in ("batch_idx", "start_idx", "end_idx", "attempt_id", "worker_cluster")},
    }
    source = sa.select(*copied.values()).where(STATES.c.job_id == old_id, STATES.c.status != "SPLIT")
    connection.execute(STATES.insert().from_select(list(copied), source))
    done = STATES.c.status == "COMPLETED"
    sums = sa.select(
        sa.func.count().label("total_batches"),
        sa.func.coalesce(sa.func.sum(sa.case((done, 1), else_=0)), 0).label("completed_batches"),
        *(
            sa.func.coalesce(sa.func.sum(STATES.c[name]), 0).label(name)
            for name in ("rows_ok", "tokens_in", "tokens_out")
        ),
    ).where(STATES.c.job_id == job_id)
    totals = {name: int(total) for name, total in connection.execute(sums).one()._mapping.items()}
    connection.execute(JOBS.update().where(JOBS.c.job_id == job_id).values(**totals))
