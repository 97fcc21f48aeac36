"""Sampling sessions: a client's name for one frozen weight version (or the base model, or an inflight target).

A row's weights never change: a new version is a new row. The server creates those of base models and checkpoints;
those of ephemeral publishes are created in the transaction that settles the publish.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import sqlalchemy as sa

from tinsmith.db import SAMPLERS, SESSIONS, Database, now
from tinsmith.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class NewSamplingSession:
    sampling_session_id: str
    session_id: str
    tenant_id: str
    base_model: str
    model_path: str | None = None
    version_id: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingSession:
    sampling_session_id: str
    session_id: str
    tenant_id: str
    base_model: str
    model_path: str | None
    version_id: str | None
    directory: str | None
    created_at: float
    num_clones: int


class SamplingSessions:
    def __init__(self, db: Database) -> None:
        self._db = db

    def create(self, new: NewSamplingSession) -> str:
        """Add a sampling session once; a repeated id changes nothing. Returns the id."""
        with self._db.write() as connection:
            connection.execute(self._db.insert_once(SAMPLERS), asdict(new) | {"created_at": now()})
        return new.sampling_session_id

    def get(self, tenant_id: str, sampling_session_id: str) -> SamplingSession:
        sampling_session = self.find(sampling_session_id)
        if sampling_session is None or sampling_session.tenant_id != tenant_id:
            raise NotFoundError(f"sampling_session_id {sampling_session_id!r} is unknown")
        return sampling_session

    def find(self, sampling_session_id: str) -> SamplingSession | None:
        """A sampling session whoever owns it; for the engine."""
        query = sa.select(SAMPLERS).where(SAMPLERS.c.sampling_session_id == sampling_session_id)
        with self._db.read() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else SamplingSession(**row._mapping)

    def moved(self, version_id: str, directory: str) -> None:
        """Record where a version's files are, now that it left the engine's memory."""
        with self._db.write() as connection:
            connection.execute(SAMPLERS.update().where(SAMPLERS.c.version_id == version_id).values(directory=directory))

    def forget_moved(self) -> list[str]:
        """The directories of versions whose session is closed; they are forgotten here and now."""
        closed = sa.select(SESSIONS.c.session_id).where(SESSIONS.c.closed_at.is_not(None))
        theirs = SAMPLERS.c.directory.is_not(None) & SAMPLERS.c.session_id.in_(closed)
        with self._db.write() as connection:
            directories = list(connection.scalars(sa.select(SAMPLERS.c.directory).where(theirs)))
            if directories:
                connection.execute(SAMPLERS.update().where(theirs).values(directory=None))
        return directories

    def of_session(self, session_id: str) -> list[str]:
        query = (
            sa.select(SAMPLERS.c.sampling_session_id)
            .where(SAMPLERS.c.session_id == session_id)
            .order_by(SAMPLERS.c.created_at)
        )
        with self._db.read() as connection:
            return list(connection.scalars(query))


def insertion(new: NewSamplingSession) -> sa.Executable:
    """A statement for the transaction that settles an ephemeral publish."""
    return SAMPLERS.insert().values(**asdict(new), created_at=now())
