"""Attempts at batches: claimed, completed, lost. One object is the changes of one job within one transaction.

A result counts only while the batch is DISPATCHED to that very attempt, of that very coordinator. What an attempt that
was lost leads to is decided here alone: the same batch later, its halves, a row that is recorded as failed, the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tinsmith.batch.types import DEATHS, Outcome, Span
from tinsmith.db.database import Database, now
from tinsmith.db.schema import BATCH_ROW_ERRORS as ROW_ERRORS
from tinsmith.db.schema import BATCH_STATES as STATES

PENDING = sa.literal_column("'PENDING'")

MAX_INFRA_RETRIES = 20
"""A batch that was lost this often with its worker is no accident any more."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One attempt at one batch, and what is known of those before."""

    batch_idx: int
    start_idx: int
    end_idx: int
    attempt_id: int
    retry_count: int
    infra_retries: int
    error_class: str | None
    error: str | None
    worker_cluster: str
    parent_idx: int | None = None
    """The batch that this one was split from."""

    @property
    def span(self) -> Span:
        return Span(self.start_idx, self.end_idx)


@dataclass(frozen=True, slots=True)
class Lost:
    """An attempt that ended without a result. `infra`: its worker is to blame, and not the batch; or nobody, if the
    worker gave it back before it had `begun`."""

    error_class: str
    error: str
    infra: bool
    begun: bool = True
    final: bool = False
    """No other attempt can succeed: the batch has failed, and with it the job."""
    died: bool = False
    """The mapper's process ended while it worked on the batch."""
    row: int | None = None
    """The row that it worked on, if that is known."""


Settled = tuple[Claim, Outcome | Lost]


_CLAIM_COLUMNS = [STATES.c[name] for name in Claim.__dataclass_fields__]


class Attempts:
    """The changes of one job's batches within one transaction."""

    def __init__(
        self, connection: Connection, job_id: int, token: str, db: Database, max_retries: int, backoff_s: float
    ) -> None:
        self._connection = connection
        self._job_id = job_id
        self._token = token
        self._db = db
        self._max_retries = max_retries
        self._backoff_s = backoff_s
        self.failed = False  # whether a batch has failed for good

    def _held(self, claim: Claim) -> sa.Update:
        return STATES.update().where(
            STATES.c.job_id == self._job_id,
            STATES.c.batch_idx == claim.batch_idx,
            STATES.c.attempt_id == claim.attempt_id,
            STATES.c.attempt_owner_token == self._token,
            STATES.c.status == "DISPATCHED",
        )

    def _set(self, claim: Claim, **values: object) -> bool:
        change = self._held(claim).values(**values, updated_at=now(), lease_expires_at=None)
        return self._connection.execute(change).rowcount == 1

    def complete(self, claim: Claim, outcome: Outcome, counts: dict[str, int]) -> bool:
        """The commit of a batch."""
        numbers = {name: getattr(outcome, name) for name in ("rows_ok", "rows_failed", "tokens_in", "tokens_out")}
        parts = [part.to_dict() for part in outcome.parts]
        new = {"status": "COMPLETED", "parts": parts, "updated_at": now(), **numbers}
        held = {"job": self._job_id, "batch": claim.batch_idx, "attempt": claim.attempt_id, "token": self._token}
        given = {**held, **{f"new_{name}": value for name, value in new.items()}}
        if self._connection.execute(_COMPLETE, given).rowcount != 1:
            return False
        for name, number in {"completed_batches": 1, **numbers}.items():
            counts[name] = counts.get(name, 0) + number
        if outcome.row_failures:
            gave_up = claim.retry_count > self._max_retries  # this attempt only recorded what others came to
            attempts = claim.attempt_id - 1 if gave_up else claim.retry_count + 1
            rows = [
                {
                    "job_id": self._job_id,
                    "row_idx": failure.idx,
                    "attempt_id": claim.attempt_id,
                    "error_class": failure.error_type[:128],
                    "message": failure.message[:2000],
                    "details": {
                        "row": failure.row,
                        "traceback": failure.traceback[-20_000:],
                        "attempts": attempts,
                        "worker": claim.worker_cluster,
                    },
                }
                for failure in outcome.row_failures
            ]
            self._connection.execute(self._db.insert_once(ROW_ERRORS), rows)
        return True

    def lose(self, claim: Claim, lost: Lost, counts: dict[str, int]) -> bool:
        """Once more, later; or in parts; or, for a row that failed often enough, as a failed row; or never.

        A batch that raised is tried `max_retries` times more, each time later. A part of one that was split has a
        retry of its own, at once: what passes with time had its time. A batch on which the mapper's process ended is
        tried once more, whatever retries are left: the first time, that may have been an accident of the machine.
        """
        told = {"error_class": lost.error_class[:128], "error": lost.error[-20_000:]}
        if not lost.begun:
            return self._give(claim, "PENDING")
        died_before = claim.error_class in DEATHS
        if lost.infra or (lost.died and not died_before):
            tries = claim.infra_retries + 1
            status = "PENDING" if tries <= MAX_INFRA_RETRIES else "FAILED"
            keep = status == "PENDING" and died_before  # what is told is what the second death is known by
            return self._give(claim, status, infra_retries=tries, **({} if keep else told))
        tries = claim.retry_count + 1
        if lost.final or claim.retry_count > self._max_retries:  # even recording the row as failed has failed
            return self._give(claim, "FAILED", retry_count=tries, **told)
        if not lost.died and claim.parent_idx is None and tries <= self._max_retries:
            later = self._db.clock() + self._backoff_s * 2**tries
            return self._set(claim, status="PENDING", retry_count=tries, next_retry_at=later, **told)
        if not lost.died and claim.parent_idx is not None and tries <= min(1, self._max_retries):
            return self._give(claim, "PENDING", retry_count=tries, **told)
        if claim.span.rows > 1:
            return self._split(claim, lost.row, told, counts)
        # The attempt after the last one only records the row as failed.
        return self._give(claim, "PENDING", retry_count=self._max_retries + 1, **told)

    def _give(self, claim: Claim, status: str, **values: object) -> bool:
        accepted = self._set(claim, status=status, next_retry_at=None, **values)
        self.failed |= accepted and status == "FAILED"
        return accepted

    def _split(self, claim: Claim, row: int | None, told: dict[str, str], counts: dict[str, int]) -> bool:
        """Into halves; where the row is known that failed, into that row and what is on either side of it."""
        if not self._set(claim, status="SPLIT", retry_count=claim.retry_count + 1, **told):
            return False
        last = sa.select(sa.func.max(STATES.c.batch_idx)).where(STATES.c.job_id == self._job_id)
        last_idx = self._connection.scalar(last) or 0
        if row is not None and row in range(claim.start_idx, claim.end_idx + 1):
            spans = [Span(claim.start_idx, row - 1), Span(row, row), Span(row + 1, claim.end_idx)]
        else:
            middle = (claim.start_idx + claim.end_idx) // 2
            spans = [Span(claim.start_idx, middle), Span(middle + 1, claim.end_idx)]
        parts = [span for span in spans if span.rows > 0]
        common = {"job_id": self._job_id, "status": "PENDING", "parent_idx": claim.batch_idx, "updated_at": now()}
        rows = [
            {**common, "batch_idx": last_idx + 1 + index, "start_idx": part.start_idx, "end_idx": part.end_idx}
            for index, part in enumerate(parts)
        ]
        self._connection.execute(STATES.insert(), rows)
        counts["total_batches"] = counts.get("total_batches", 0) + len(parts) - 1
        return True

    def claim(self, worker: str, count: int, lease_s: float) -> list[Claim]:
        given: dict[str, object] = {"job": self._job_id, "worker": worker, "count": count, "token": self._token}
        given |= {"lease": lease_s, "updated": now()}
        if self._db.is_sqlite:
            given["clock"] = now()
        taken = self._connection.execute(_taking(self._db.is_sqlite, self._db.clock()), given)
        return sorted((Claim(*row) for row in taken), key=lambda claim: claim.start_idx)


_PARAMETERS = ("status", "parts", "rows_ok", "rows_failed", "tokens_in", "tokens_out", "updated_at")
# Statements of every turn: made once, as making one takes longer than it takes the database to carry it out.
_COMPLETE = (
    STATES.update()
    .where(
        STATES.c.job_id == sa.bindparam("job"),
        STATES.c.batch_idx == sa.bindparam("batch"),
        STATES.c.attempt_id == sa.bindparam("attempt"),
        STATES.c.attempt_owner_token == sa.bindparam("token"),
        STATES.c.status == "DISPATCHED",
    )
    .values(
        **{name: sa.bindparam(f"new_{name}", type_=STATES.c[name].type) for name in _PARAMETERS},
        error_class=None,
        error=None,
        lease_expires_at=None,
    )
)
_taking_statements: dict[bool, sa.Executable] = {}


def _taking(is_sqlite: bool, database_clock: sa.ColumnElement[float]) -> sa.Executable:
    """The claim of the first batches that are due."""
    if is_sqlite not in _taking_statements:
        clock = sa.bindparam("clock", type_=sa.Float) if is_sqlite else database_clock
        due = sa.or_(STATES.c.next_retry_at.is_(None), STATES.c.next_retry_at <= clock)
        first = (
            sa.select(STATES.c.batch_idx)
            .where(STATES.c.job_id == sa.bindparam("job"), STATES.c.status == PENDING, due)
            .order_by(STATES.c.start_idx)
            .limit(sa.bindparam("count", type_=sa.Integer))
            .with_for_update(skip_locked=True)
            .cte("first")  # as a plain subquery, Postgres may run it once for each row
        )
        numbers = sa.select(first.c.batch_idx)
        chosen = STATES.update().where(STATES.c.job_id == sa.bindparam("job"), STATES.c.batch_idx.in_(numbers))
        _taking_statements[is_sqlite] = chosen.values(
            status="DISPATCHED",
            worker_cluster=sa.bindparam("worker", type_=sa.String),
            attempt_id=STATES.c.attempt_id + 1,
            attempt_owner_token=sa.bindparam("token", type_=sa.String),
            lease_expires_at=clock + sa.bindparam("lease", type_=sa.Float),
            updated_at=sa.bindparam("updated", type_=sa.Float),
        ).returning(*_CLAIM_COLUMNS)
    return _taking_statements[is_sqlite]
