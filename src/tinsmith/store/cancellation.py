"""Requests to cancel: what they name, whom they go to, and what is left of a sample that was cancelled.

Only samples that wait or run can be cancelled. A request to cancel is a future itself, so that it outlives an engine;
it names one sample, or a sampling session for all of its samples that one engine or sampler has. Reads rows; `futures`
stores what is found here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import sqlalchemy as sa

from tinsmith.db.database import Database
from tinsmith.db.schema import ENGINES, FUTURES, MODELS, SAMPLERS, SESSIONS
from tinsmith.errors import NotFoundError

_CANCEL = ":cancel"
# Who is to do a sample, or does what is asked of its run: see `ownership`.
_WITH_OWNERS = FUTURES.outerjoin(SAMPLERS, SAMPLERS.c.sampling_session_id == FUTURES.c.sampling_session_id).outerjoin(
    MODELS, MODELS.c.model_id == SAMPLERS.c.model_id
)
_OWNER = sa.func.coalesce(FUTURES.c.executor, MODELS.c.engine_id).label("owner")


@dataclass(frozen=True, slots=True)
class Cancel:
    """To be given up: a sample by its request_id, or all of a sampling session's that `owner` has."""

    name: str
    tenant_id: str
    session_id: str
    base_model: str
    owner: str | None
    reason: str

    @property
    def request_id(self) -> str:
        if self.owner is None:
            return self.name + _CANCEL
        return f"{self.name}{_CANCEL}.{hashlib.blake2b(self.owner.encode(), digest_size=4).hexdigest()}"


def of_sample(db: Database, tenant_id: str, request_id: str, reason: str) -> Cancel | None:
    """None for what has ended, and for every other kind of request: operations on a model are ordered, and a later one
    may have been sent in the belief that an earlier one takes effect. Raises NotFoundError.
    """
    query = (
        sa.select(FUTURES.c.session_id, FUTURES.c.base_model, FUTURES.c.kind, FUTURES.c.state, _OWNER)
        .select_from(_WITH_OWNERS)
        .where(FUTURES.c.request_id == request_id, FUTURES.c.tenant_id == tenant_id)
    )
    with db.read() as connection:
        row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFoundError(f"request_id {request_id!r} is unknown, or its result was kept past its time")
    if row.kind != "sample" or row.state != "pending":
        return None
    return Cancel(request_id, tenant_id, row.session_id, row.base_model, row.owner, reason)


def of_closed_sessions(db: Database) -> list[Cancel]:
    """The samples whose session was closed, by sampling session and owner."""
    samples = sa.and_(FUTURES.c.state == "pending", FUTURES.c.kind == "sample")
    query = (
        sa.select(
            FUTURES.c.sampling_session_id,
            FUTURES.c.tenant_id,
            FUTURES.c.session_id,
            FUTURES.c.base_model,
            _OWNER,
            SESSIONS.c.reason,
        )
        .select_from(_WITH_OWNERS.join(SESSIONS, SESSIONS.c.session_id == FUTURES.c.session_id))
        # An engine's rows by the index of its queue: the settled ones are many.
        .where(FUTURES.c.base_model.in_(sa.select(ENGINES.c.base_model)), samples)
        .where(SESSIONS.c.closed_at.is_not(None))
        .distinct()
    )
    with db.read() as connection:
        rows = connection.execute(query).all()
    return [
        Cancel(
            row.sampling_session_id,
            row.tenant_id,
            row.session_id,
            row.base_model,
            row.owner,
            f"its session ended ({row.reason})",
        )
        for row in rows
    ]


def cancelled_name(request_id: str) -> str:
    """What a request to cancel names: a sample, or a sampling session for all of its samples."""
    return request_id.rpartition(_CANCEL)[0]


def deletion(request_id: str) -> sa.Executable:
    """A statement for the transaction that settles a request of which nothing is to remain."""
    return FUTURES.delete().where(FUTURES.c.request_id == request_id)
