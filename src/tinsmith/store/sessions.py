"""Sessions of clients.

States: active -> finished (by the client) | expired (no heartbeats). An ended session is closed once the unloading of
its models is submitted. Until then a finished session accepts requests, since the SDK's last requests can arrive after
its finish. Only the first finish takes effect, and none after expiry. Each change writes its audit entry in its own
transaction.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import sqlalchemy as sa

from tinsmith.db.database import Database, now
from tinsmith.db.schema import FUTURES, MODELS, SESSIONS
from tinsmith.db.statements import Statement
from tinsmith.errors import GoneError, NotFoundError
from tinsmith.runtime.clocks import TOLERANCE_S
from tinsmith.store.audit import entry

FINISH_TYPES = ("success", "errored", "interrupted")
_SCAN_ROWS = 500  # of a search with filters outside SQL
_DELETE_BATCH = 100

POLL_HEARTBEAT_S = 15.0
"""Interval at which a poll counts as a heartbeat; longer than that of the SDK's heartbeats, 10 s."""

IS_ACTIVE = SESSIONS.c.closed_at.is_(None) & (SESSIONS.c.state == "active")
"""Not finished and not expired. A finished session stays open for its last requests, but is not active."""


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
    forgotten_at: float | None = None
    sampling_paused_at: float | None = None

    @property
    def finish_detail(self) -> str | None:
        """The client's detail of its finish."""
        if self.state != "finished" or self.reason is None:
            return None
        return self.reason.removeprefix(_finish_reason(self.finish_type or "", "")).removeprefix(": ") or None


@dataclass(frozen=True, slots=True)
class SessionSearch:
    """Filters of a search; a filter of None is off.

    If both `session_id` and `display_name` are given, one of them must match. A session's name matches if it contains
    every word, case-insensitively. `finish_types` select finished sessions, `states` sessions in other states.
    """

    session_id: str | None = None
    display_name: str | None = None
    project_ids: Sequence[str] | None = None
    states: Sequence[str] | None = None
    finish_types: Sequence[str] = ()
    limit: int = 50
    after: tuple[float, str] | None = None  # created_at and id of the previous page's last session


# Built once, for every request.
_BY_ID = Statement(
    sa.select(*(SESSIONS.c[name] for name in Session.__dataclass_fields__)).where(
        SESSIONS.c.session_id == sa.bindparam("session_id"), SESSIONS.c.tenant_id == sa.bindparam("tenant_id")
    )
)


class Sessions:
    def __init__(self, db: Database) -> None:
        self._db = db
        self._polled_at: dict[str, float] = {}  # session_id -> monotonic time, oldest first

    def open(self, tenant_id: str, new: NewSession, session_id: str | None = None) -> Session:
        """Open a session with a new id or with `session_id`, or return the existing session of that id."""
        created_at, fields = now(), cast("dict[str, Any]", asdict(new) | {"tags": list(new.tags)})
        session = Session(
            session_id=session_id or str(uuid.uuid4()),
            tenant_id=tenant_id,
            state="active",
            reason=None,
            **fields,
            created_at=created_at,
            last_heartbeat_at=created_at,
        )
        with self._db.write() as connection:
            connection.execute(self._db.insert_once(SESSIONS), asdict(session))
            if session_id is None:  # a client's session; those with given ids belong to other changes
                opened = {"session_id": session.session_id, "project_id": new.project_id}
                connection.execute(entry(tenant_id, "session_opened", opened))
        return session if session_id is None else self.get(tenant_id, session_id)

    def get(self, tenant_id: str, session_id: str) -> Session:
        row = self._db.first(_BY_ID, {"session_id": session_id, "tenant_id": tenant_id})
        if row is None:
            raise NotFoundError(f"session_id {session_id!r} is unknown; create a new ServiceClient")
        return Session(*row)

    def require_active(self, tenant_id: str, session_id: str) -> Session:
        """The session, unless it is closed. Raises GoneError with the reason why it ended."""
        session = self.get(tenant_id, session_id)
        if session.closed_at is not None:
            raise session_has_ended(session_id, session.reason)
        return session

    def heartbeat(self, tenant_id: str, session_id: str) -> None:
        self.require_active(tenant_id, session_id)
        self._update(session_id, last_heartbeat_at=now())

    def keep(self, tenant_id: str, session_id: str) -> None:
        """Record a heartbeat when a client polls for a sample of this session, unless sampling is paused: then only
        the heartbeats of the client that paused it count. Raises GoneError."""
        if self.require_active(tenant_id, session_id).sampling_paused_at is None:
            self._update(session_id, last_heartbeat_at=now())

    def pause_sampling(self, tenant_id: str, session_id: str) -> None:
        """Pause the session's samples until `continue_sampling`; a repetition changes nothing. Raises GoneError."""
        if self.require_active(tenant_id, session_id).sampling_paused_at is None:
            self._update(session_id, sampling_paused_at=now())

    def continue_sampling(self, tenant_id: str, session_id: str) -> None:
        self.require_active(tenant_id, session_id)
        self._update(session_id, sampling_paused_at=None)

    def is_poll_heartbeat_due(self, session_id: str) -> bool:
        """Whether to call `record_poll` for this poll: once in POLL_HEARTBEAT_S. Must be called from one thread."""
        read_at = time.monotonic()
        if read_at - self._polled_at.get(session_id, -POLL_HEARTBEAT_S) < POLL_HEARTBEAT_S:
            return False
        self._polled_at.pop(session_id, None)
        self._polled_at[session_id] = read_at
        while read_at - self._polled_at[oldest := next(iter(self._polled_at))] >= POLL_HEARTBEAT_S:
            del self._polled_at[oldest]
        return True

    def record_poll(self, tenant_id: str, session_id: str) -> None:
        """Record a poll as a heartbeat of the session, unless its samples are paused."""
        is_open = SESSIONS.c.session_id == session_id, SESSIONS.c.tenant_id == tenant_id, SESSIONS.c.closed_at.is_(None)
        stale = (SESSIONS.c.last_heartbeat_at < now() - POLL_HEARTBEAT_S) & SESSIONS.c.sampling_paused_at.is_(None)
        if self._db.scalar(sa.select(SESSIONS.c.session_id).where(*is_open, stale)) is not None:
            self._db.execute(SESSIONS.update().where(*is_open, stale).values(last_heartbeat_at=now()))

    def finish(self, tenant_id: str, session_id: str, finish_type: str, detail: str = "") -> bool:
        """Finish a session with one of FINISH_TYPES; returns False if it had finished or expired."""
        self.get(tenant_id, session_id)
        reason = _finish_reason(finish_type, detail)
        active = SESSIONS.update().where(SESSIONS.c.session_id == session_id, SESSIONS.c.state == "active")
        finish = active.values(state="finished", finish_type=finish_type, reason=reason, ended_at=now())
        with self._db.write() as connection:
            if connection.execute(finish).rowcount != 1:
                return False
            finished = {"session_id": session_id, "reason": finish_type}
            connection.execute(entry(tenant_id, "session_finished", finished))
        return True

    def set_project(self, tenant_id: str, session_id: str, project_id: str) -> None:
        self.get(tenant_id, session_id)
        with self._db.write() as connection:
            connection.execute(
                SESSIONS.update().where(SESSIONS.c.session_id == session_id).values(project_id=project_id)
            )
            moved = {"session_id": session_id, "project_id": project_id}
            connection.execute(entry(tenant_id, "project_session_assigned", moved))

    def _update(self, session_id: str, **values: object) -> None:
        self._db.execute(SESSIONS.update().where(SESSIONS.c.session_id == session_id).values(**values))

    def projects(self, tenant_id: str) -> list[str]:
        """The projects of the tenant's sessions and copies."""
        of = (
            sa.select(table.c.project_id).where(table.c.tenant_id == tenant_id).distinct()
            for table in (SESSIONS, MODELS)
        )
        return [name for query in of for name in self._db.scalars(query) if name is not None]

    def list_ids(self, tenant_id: str, limit: int, offset: int, project_id: str | None = None) -> list[str]:
        """A page of the tenant's session ids (of one project), newest first."""
        query = sa.select(SESSIONS.c.session_id).where(SESSIONS.c.tenant_id == tenant_id)
        if project_id is not None:
            query = query.where(SESSIONS.c.project_id == project_id)
        query = query.order_by(SESSIONS.c.created_at.desc(), SESSIONS.c.session_id.desc()).limit(limit).offset(offset)
        return self._db.scalars(query)

    def of_ids(self, session_ids: Sequence[str]) -> dict[str, Session]:
        """Sessions of any tenant; the caller must have read the ids from its tenant's rows."""
        query = sa.select(SESSIONS).where(SESSIONS.c.session_id.in_(session_ids))
        return {row.session_id: Session(**row._mapping) for row in self._db.rows(query)}

    def search(
        self, tenant_id: str, filters: SessionSearch, has_metadata: Callable[[Session], bool]
    ) -> tuple[list[Session], bool]:
        """A page of the tenant's sessions, newest first, and whether more follow. `has_metadata` filters, too."""
        sessions: list[Session] = []
        after = filters.after
        while len(sessions) <= filters.limit:
            batch = self._scan(tenant_id, filters, after)
            sessions += [session for session in batch if _matches_name(session, filters) and has_metadata(session)]
            if len(batch) < _SCAN_ROWS:
                break
            after = (batch[-1].created_at, batch[-1].session_id)
        return sessions[: filters.limit], len(sessions) > filters.limit

    def _scan(self, tenant_id: str, filters: SessionSearch, after: tuple[float, str] | None) -> list[Session]:
        """The next sessions that pass the filters that SQL evaluates in the same way on every database."""
        created_at, session_id = SESSIONS.c.created_at, SESSIONS.c.session_id
        query = sa.select(SESSIONS).where(SESSIONS.c.tenant_id == tenant_id)
        if filters.session_id is not None and filters.display_name is None:
            query = query.where(session_id == filters.session_id)
        if filters.project_ids is not None:
            query = query.where(SESSIONS.c.project_id.in_(filters.project_ids))
        if filters.states is not None or filters.finish_types:
            finished = (SESSIONS.c.state == "finished") & SESSIONS.c.finish_type.in_(filters.finish_types)
            query = query.where(SESSIONS.c.state.in_(filters.states or ()) | finished)
        if after is not None:
            query = query.where((created_at < after[0]) | ((created_at == after[0]) & (session_id < after[1])))
        query = query.order_by(created_at.desc(), session_id.desc()).limit(_SCAN_ROWS)
        return [Session(**row._mapping) for row in self._db.rows(query)]

    def reset_future_heartbeats(self) -> None:
        """Reset heartbeats that lie in the future, so that a clock set back does not keep silent sessions open."""
        future = SESSIONS.c.closed_at.is_(None), SESSIONS.c.last_heartbeat_at > now() + TOLERANCE_S
        self._db.execute(SESSIONS.update().where(*future).values(last_heartbeat_at=now()))

    def list_silent(self, timeout_s: float) -> list[Session]:
        """Open sessions whose last heartbeat is older than `timeout_s`."""
        silent = SESSIONS.c.closed_at.is_(None), SESSIONS.c.last_heartbeat_at < now() - timeout_s
        return [Session(**row._mapping) for row in self._db.rows(sa.select(SESSIONS).where(*silent))]

    def close(self, session_id: str, reason: str, *, timeout_s: float = 0.0) -> bool:
        """Close a session silent for `timeout_s`; returns False if a heartbeat or another sweep came first."""
        open_and_silent = (
            SESSIONS.c.session_id == session_id,
            SESSIONS.c.closed_at.is_(None),
            SESSIONS.c.last_heartbeat_at <= now() - timeout_s,
        )
        with self._db.write() as connection:
            locked = sa.select(SESSIONS.c.state, SESSIONS.c.tenant_id).where(*open_and_silent).with_for_update()
            row = connection.execute(locked).one_or_none()
            if row is None:
                return False
            values: dict[str, object] = {"closed_at": now()}
            if row.state == "active":
                values |= {"state": "expired", "reason": reason, "ended_at": now()}
                expired = {"session_id": session_id, "reason": reason}
                connection.execute(entry(row.tenant_id, "session_expired", expired))
            connection.execute(SESSIONS.update().where(SESSIONS.c.session_id == session_id).values(**values))
        return True

    def list_closed(self, before: float, *, tenant_id: str | None = None) -> list[str]:
        """A batch of sessions (of one tenant) closed before `before` whose futures can be deleted."""
        # Postgres would turn EXISTS into a hash of all futures.
        futures = sa.select(FUTURES.c.arrival).where(FUTURES.c.session_id == SESSIONS.c.session_id).limit(1)
        settled = futures.where(FUTURES.c.state != "pending").scalar_subquery()
        deletable = settled.is_not(None) | futures.scalar_subquery().is_(None)
        is_stored = SESSIONS.c.forgotten_at.is_(None) & (SESSIONS.c.closed_at < before)
        query = sa.select(SESSIONS.c.session_id).where(is_stored, deletable).limit(_DELETE_BATCH)
        if tenant_id is not None:
            query = query.where(SESSIONS.c.tenant_id == tenant_id)
        return self._db.scalars(query)


def session_has_ended(session_id: str, reason: str | None) -> GoneError:
    """The error of a request to a closed session."""
    return GoneError(f"session {session_id!r} has ended ({reason}); create a new ServiceClient")


def _finish_reason(finish_type: str, detail: str) -> str:
    return f"finished: {finish_type}: {detail}" if detail else f"finished: {finish_type}"


def _matches_name(session: Session, filters: SessionSearch) -> bool:
    if filters.display_name is None:
        return True  # SQL has compared the id
    name = (session.display_name or "").casefold()
    by_name = all(word in name for word in filters.display_name.casefold().split())
    return by_name or (filters.session_id is not None and session.session_id == filters.session_id)
