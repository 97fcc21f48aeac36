"""Sessions: who is connected, and when that ended.

States: active -> finished (the client said so) | expired (its heartbeats stopped). A session that ended is closed
once its models have been told to unload. A finished session may still be used until it is closed, since the
SDK's last requests can arrive after its farewell.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import sqlalchemy as sa

from tinsmith.db import FUTURES, SESSIONS, Database, now
from tinsmith.errors import GoneError, NotFoundError


@dataclass(frozen=True, slots=True)
class NewSession:
    tags: Sequence[str] = ()
    user_metadata: Mapping[str, object] | None = None
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None


@dataclass(frozen=True, slots=True)
class Session:
    session_id: str
    tenant_id: str
    state: str
    reason: str | None
    tags: Sequence[str]
    user_metadata: Mapping[str, object] | None
    sdk_version: str | None
    project_id: str | None
    display_name: str | None
    created_at: float
    last_heartbeat_at: float
    ended_at: float | None = None
    closed_at: float | None = None
    finish_type: str | None = None


# Built once: every request asks.
_BY_ID = sa.select(SESSIONS).where(
    SESSIONS.c.session_id == sa.bindparam("session_id"), SESSIONS.c.tenant_id == sa.bindparam("tenant_id")
)


class Sessions:
    def __init__(self, db: Database) -> None:
        self._db = db

    def open(self, tenant_id: str, new: NewSession) -> Session:
        created_at = now()
        session = Session(
            session_id=str(uuid.uuid4()),
            tenant_id=tenant_id,
            state="active",
            reason=None,
            tags=list(new.tags),
            user_metadata=new.user_metadata,
            sdk_version=new.sdk_version,
            project_id=new.project_id,
            display_name=new.display_name,
            created_at=created_at,
            last_heartbeat_at=created_at,
        )
        with self._db.write() as connection:
            connection.execute(SESSIONS.insert(), asdict(session))
        return session

    def get(self, tenant_id: str, session_id: str) -> Session:
        with self._db.read() as connection:
            row = connection.execute(_BY_ID, {"session_id": session_id, "tenant_id": tenant_id}).one_or_none()
        if row is None:
            raise NotFoundError(f"session_id {session_id!r} is unknown; create a new ServiceClient")
        return Session(**row._mapping)

    def require_active(self, tenant_id: str, session_id: str) -> Session:
        """The session, if it may still be used. Raises GoneError with the reason why it ended."""
        session = self.get(tenant_id, session_id)
        if session.closed_at is not None:
            raise GoneError(f"session {session_id!r} has ended ({session.reason}); create a new ServiceClient")
        return session

    def heartbeat(self, tenant_id: str, session_id: str) -> None:
        self.require_active(tenant_id, session_id)
        with self._db.write() as connection:
            mine = SESSIONS.update().where(SESSIONS.c.session_id == session_id)
            connection.execute(mine.values(last_heartbeat_at=now()))

    def finish(self, tenant_id: str, session_id: str, reason: str) -> None:
        """The client's farewell; the first one counts."""
        self.get(tenant_id, session_id)
        with self._db.write() as connection:
            mine = SESSIONS.update().where(SESSIONS.c.session_id == session_id, SESSIONS.c.state == "active")
            connection.execute(mine.values(state="finished", reason=f"finished: {reason}", ended_at=now()))

    def set_project(self, tenant_id: str, session_id: str, project_id: str) -> None:
        self.get(tenant_id, session_id)
        with self._db.write() as connection:
            mine = SESSIONS.update().where(SESSIONS.c.session_id == session_id)
            connection.execute(mine.values(project_id=project_id))

    def list_ids(self, tenant_id: str, limit: int, offset: int) -> list[str]:
        """Newest first."""
        query = (
            sa.select(SESSIONS.c.session_id)
            .where(SESSIONS.c.tenant_id == tenant_id)
            .order_by(SESSIONS.c.created_at.desc())
            .limit(limit)
            .offset(offset)
        )
        with self._db.read() as connection:
            return list(connection.scalars(query))

    def silent(self, timeout_s: float) -> list[Session]:
        """Open sessions whose last heartbeat is older than `timeout_s`."""
        query = sa.select(SESSIONS).where(
            SESSIONS.c.closed_at.is_(None), SESSIONS.c.last_heartbeat_at < now() - timeout_s
        )
        with self._db.read() as connection:
            return [Session(**row._mapping) for row in connection.execute(query)]

    def close(self, session_id: str, reason: str, *, timeout_s: float = 0.0) -> bool:
        """Close a session silent for `timeout_s`; False if a heartbeat or another sweep came first."""
        open_and_silent = (
            SESSIONS.c.session_id == session_id,
            SESSIONS.c.closed_at.is_(None),
            SESSIONS.c.last_heartbeat_at <= now() - timeout_s,
        )
        with self._db.write() as connection:
            row = connection.execute(sa.select(SESSIONS.c.state).where(*open_and_silent)).one_or_none()
            if row is None:
                return False
            values: dict[str, object] = {"closed_at": now()}
            if row.state == "active":
                values |= {"state": "expired", "reason": reason, "ended_at": now()}
            connection.execute(SESSIONS.update().where(SESSIONS.c.session_id == session_id).values(**values))
        return True

    def closed_before(self, moment: float, limit: int = 100) -> list[str]:
        """Sessions that were closed before `moment` and still have settled futures to forget."""
        has_futures = sa.exists().where(FUTURES.c.session_id == SESSIONS.c.session_id, FUTURES.c.state != "pending")
        query = sa.select(SESSIONS.c.session_id).where(SESSIONS.c.closed_at < moment, has_futures).limit(limit)
        with self._db.read() as connection:
            return list(connection.scalars(query))
