"""Settled futures of ended sessions are deleted, with their bodies and results, in transactions of some hundred.

What each transaction deletes it tells, from what the database says, and writes in its place what it is answered: so
nothing that was used is counted twice or forgotten. A session is done with when nothing of it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tinsmith.db.database import Database, now
from tinsmith.db.schema import BODIES, FUTURES, RESULTS, SESSIONS
from tinsmith.db.statements import Effects, execute

_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Spent:
    """What a settled future tells of its use."""

    request_id: str
    tenant_id: str
    session_id: str
    base_model: str
    kind: str
    state: str
    num_tokens: int
    prefill_tokens: int | None
    cached_tokens: int | None
    sampled_tokens: int | None
    settled_at: float | None


Keep = Callable[[Sequence[Spent]], Effects]
"""Is given what one transaction deletes; answers what that transaction is to write instead."""

_COLUMNS = [FUTURES.c[name] for name in Spent.__dataclass_fields__]


def delete_of_sessions(db: Database, session_ids: Sequence[str], keep: Keep) -> int:
    """How many were deleted."""
    left = sa.exists().where(FUTURES.c.session_id == SESSIONS.c.session_id)
    deleted = 0
    for session_id in session_ids:
        while some := _delete_some(db, session_id, keep):
            deleted += some
        with db.write() as connection:
            done_with = SESSIONS.update().where(SESSIONS.c.session_id == session_id, ~left)
            connection.execute(done_with.values(forgotten_at=now()))
    return deleted


def _delete_some(db: Database, session_id: str, keep: Keep) -> int:
    settled = sa.select(FUTURES.c.arrival).where(FUTURES.c.session_id == session_id, FUTURES.c.state != "pending")
    # What was deleted is what was kept, since the database itself tells: another future may settle meanwhile.
    deletion = FUTURES.delete().where(FUTURES.c.arrival.in_(settled.limit(_AT_ONCE))).returning(*_COLUMNS)
    with db.write() as connection:
        spent = [Spent(**row._mapping) for row in connection.execute(deletion)]
        ids = [one.request_id for one in spent]
        for table in (RESULTS, BODIES):
            connection.execute(table.delete().where(table.c.request_id.in_(ids)))
        for effect in keep(spent):
            execute(connection, effect)
    return len(spent)
