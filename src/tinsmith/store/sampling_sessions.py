"""Sampling sessions: each samples one frozen weight version (or the base model, or an inflight target), and lists its
samples in the order of settlement.

The weights of a row never change; a new version is a new row. The server creates the rows of base models and
checkpoints; the transaction that settles an ephemeral publish creates the row of its version. Several clients may share
a sampling session; each has a number and its own block of CLONE_SIZE seq_ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import sqlalchemy as sa

from tinsmith.db.database import Database, chunks, now
from tinsmith.db.schema import FUTURES, MODELS, RESULTS, SAMPLERS, SESSIONS
from tinsmith.db.statements import Bound, Statement
from tinsmith.errors import NotFoundError, SeqIdTakenError

CLONE_SIZE = 1_000_000_000
"""The seq_ids of one client of a sampling session."""

MAX_COMPLETIONS = 1000
"""Most completions in one answer; the next poll gets the rest."""


@dataclass(frozen=True, slots=True)
class NewSamplingSession:
    sampling_session_id: str
    session_id: str
    tenant_id: str
    base_model: str
    model_path: str | None = None
    version_id: str | None = None
    model_id: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingSession:
    sampling_session_id: str
    session_id: str
    tenant_id: str
    base_model: str
    model_path: str | None
    version_id: str | None
    model_id: str | None
    directory: str | None
    created_at: float
    num_clones: int

    @property
    def is_inflight(self) -> bool:
        """Whether its version is the model's inflight version, which every publish replaces."""
        return self.model_id is not None and self.version_id == inflight_version(self.model_id)

    @property
    def weight_version(self) -> str:
        """The name of its weights: the base model, a checkpoint's path, or the sampling session of their publish. For
        an inflight version, it names the weights of the session's own publish, which later publishes replace.
        """
        return self.model_path or (self.base_model if self.version_id is None else self.sampling_session_id)


def inflight_version(model_id: str) -> str:
    """The version that all inflight samplers of a model share."""
    return f"{model_id}:inflight"


@dataclass(frozen=True, slots=True)
class Completion:
    """A settled sample; `body_bytes` is the size of its result, or None."""

    request_id: str
    settle_order: int
    state: str
    body_bytes: int | None


_ADD = Statement(SAMPLERS.insert())
_COLUMNS = [SAMPLERS.c[name] for name in SamplingSession.__dataclass_fields__]
_NEWEST_FIRST = SAMPLERS.c.created_at.desc(), SAMPLERS.c.sampling_session_id.desc()
_BY_ID = Statement(sa.select(*_COLUMNS).where(SAMPLERS.c.sampling_session_id == sa.bindparam("sampling_session_id")))
# Built once, for every poll.
_COMPLETIONS = (
    sa.select(
        FUTURES.c.request_id,
        FUTURES.c.settle_order,
        FUTURES.c.state,
        sa.func.length(RESULTS.c.body).label("body_bytes"),
    )
    .select_from(FUTURES.outerjoin(RESULTS, RESULTS.c.request_id == FUTURES.c.request_id))
    .where(FUTURES.c.sampling_session_id == sa.bindparam("sampling_session_id"))
    .where(FUTURES.c.settle_order > sa.bindparam("after_order"))
    .where(FUTURES.c.seq_id >= sa.bindparam("first_seq_id"), FUTURES.c.seq_id <= sa.bindparam("last_seq_id"))
    .order_by(FUTURES.c.settle_order)
    .limit(MAX_COMPLETIONS)
)
_LAST_ORDERS = sa.select(
    SAMPLERS.c.sampling_session_id,
    sa.select(sa.func.max(FUTURES.c.settle_order))
    .where(FUTURES.c.sampling_session_id == SAMPLERS.c.sampling_session_id)
    .scalar_subquery()
    .label("settle_order"),
).where(SAMPLERS.c.sampling_session_id.in_(sa.bindparam("sampling_session_ids", expanding=True)))
_DELETE_RESULTS = RESULTS.delete().where(RESULTS.c.request_id.in_(sa.bindparam("request_ids", expanding=True)))


class SamplingSessions:
    def __init__(self, db: Database) -> None:
        self._db = db
        self._acknowledged: deque[str] = deque()  # its append and popleft are thread-safe

    def create(self, new: NewSamplingSession) -> str:
        """Add a sampling session; a repetition changes nothing. Returns the id.

        Raises SeqIdTakenError if a session with this id samples another model.
        """
        with self._db.write() as connection:
            if connection.execute(self._db.insert_once(SAMPLERS), asdict(new) | {"created_at": now()}).rowcount == 0:
                row = _BY_ID.first(connection, {"sampling_session_id": new.sampling_session_id})
                stored = None if row is None else SamplingSession(*row)
                if stored and (stored.base_model, stored.model_path) != (new.base_model, new.model_path):
                    raise SeqIdTakenError(
                        f"sampling session {new.sampling_session_id!r} exists already and samples "
                        f"{stored.model_path or stored.base_model!r}; use another sampling_session_seq_id"
                    )
        return new.sampling_session_id

    def get(self, tenant_id: str, sampling_session_id: str) -> SamplingSession:
        sampling_session = self.find(sampling_session_id)
        if sampling_session is None or sampling_session.tenant_id != tenant_id:
            raise NotFoundError(f"sampling_session_id {sampling_session_id!r} is unknown")
        return sampling_session

    def find(self, sampling_session_id: str) -> SamplingSession | None:
        """A sampling session of any tenant; for the engine."""
        row = self._db.first(_BY_ID, {"sampling_session_id": sampling_session_id})
        return None if row is None else SamplingSession(*row)

    def join(self, tenant_id: str, sampling_session_id: str) -> int:
        """Add a client and return its number; the client that created the session has 0. Raises NotFoundError."""
        of_tenant = SAMPLERS.c.sampling_session_id == sampling_session_id, SAMPLERS.c.tenant_id == tenant_id
        with self._db.write() as connection:
            joined = connection.execute(
                SAMPLERS.update().where(*of_tenant).values(num_clones=SAMPLERS.c.num_clones + 1)
            )
            if joined.rowcount != 1:
                raise NotFoundError(f"sampling_session_id {sampling_session_id!r} is unknown")
            return connection.scalar(sa.select(SAMPLERS.c.num_clones).where(*of_tenant)) or 0

    def completions(self, sampling_session_id: str, clone: int, after_order: int) -> list[Completion]:
        """One client's samples that were settled after `after_order`, at most MAX_COMPLETIONS."""
        first = clone * CLONE_SIZE
        values = {"first_seq_id": first, "last_seq_id": first + CLONE_SIZE - 1, "after_order": after_order}
        rows = self._db.rows(_COMPLETIONS, values | {"sampling_session_id": sampling_session_id})
        return [Completion(*row) for row in rows]

    def pending(self, sampling_session_id: str, clone: int) -> list[str]:
        """The request_ids of one client's samples that are not settled, at most MAX_COMPLETIONS."""
        first = clone * CLONE_SIZE
        is_pending = (FUTURES.c.sampling_session_id == sampling_session_id) & (FUTURES.c.state == "pending")
        is_pending &= FUTURES.c.seq_id.between(first, first + CLONE_SIZE - 1)
        query = sa.select(FUTURES.c.request_id).where(is_pending, FUTURES.c.kind == "sample")
        return self._db.scalars(query.order_by(FUTURES.c.seq_id).limit(MAX_COMPLETIONS))

    def last_orders(self, sampling_session_ids: Sequence[str]) -> dict[str, int | None]:
        """The last settle_order of each sampling session."""
        parts = (self._db.rows(_LAST_ORDERS, {"sampling_session_ids": chunk}) for chunk in chunks(sampling_session_ids))
        return {row.sampling_session_id: row.settle_order for rows in parts for row in rows}

    def acknowledge(self, sampling_session_id: str, request_ids: Iterable[str]) -> None:
        """Mark these results of the sampling session as received by the client; other ids are ignored.

        The marks are in memory: after a restart, the results are deleted with their session.
        """
        prefix = f"{sampling_session_id}:"
        self._acknowledged.extend(request_id for request_id in request_ids if request_id.startswith(prefix))

    def delete_acknowledged(self) -> int:
        """Delete the results acknowledged since the last call; returns how many. Batched, because a write for each poll
        would delay other writers.
        """
        ids = [self._acknowledged.popleft() for _ in range(len(self._acknowledged))]
        for chunk in chunks(ids):
            self._db.execute(_DELETE_RESULTS, {"request_ids": chunk})
        return len(ids)

    def record_files(self, version_id: str, directory: str) -> str | None:
        """Record the directory of a version's files. Returns the directory that is no longer needed: the earlier one,
        or `directory` if no open session has the version.
        """
        of_version = SAMPLERS.c.version_id == version_id
        closed = sa.select(SESSIONS.c.session_id).where(SESSIONS.c.closed_at.is_not(None))
        in_use = of_version & ~closed.where(SESSIONS.c.session_id == SAMPLERS.c.session_id).exists()
        with self._db.write() as connection:
            previous = connection.scalar(sa.select(sa.func.max(SAMPLERS.c.directory)).where(of_version))
            changed = connection.execute(SAMPLERS.update().where(in_use).values(directory=directory))
        return previous if changed.rowcount else directory

    def directory_of(self, version_id: str) -> str | None:
        """The directory of a version's files, if it has files."""
        query = sa.select(sa.func.max(SAMPLERS.c.directory)).where(SAMPLERS.c.version_id == version_id)
        return self._db.scalar(query)

    def newest_of_version(self, version_id: str) -> SamplingSession | None:
        """The newest sampling session of a version; for an inflight version, that of its last publish."""
        return self._newest(sa.select(*_COLUMNS).where(SAMPLERS.c.version_id == version_id))

    def newest_of_model(self, tenant_id: str, model_id: str) -> SamplingSession | None:
        """The sampling session of a training run's last ephemeral publish, if its session is open and its model
        loaded."""
        query = sa.select(*_COLUMNS).join(SESSIONS, SESSIONS.c.session_id == SAMPLERS.c.session_id)
        query = query.join(MODELS, MODELS.c.model_id == SAMPLERS.c.model_id)
        of_model = SAMPLERS.c.model_id == model_id, SAMPLERS.c.tenant_id == tenant_id
        return self._newest(query.where(*of_model, SESSIONS.c.closed_at.is_(None), MODELS.c.state == "ready"))

    def _newest(self, query: sa.Select) -> SamplingSession | None:
        row = self._db.first(query.order_by(*_NEWEST_FIRST).limit(1))
        return None if row is None else SamplingSession(*row)

    def directories(self) -> set[str]:
        """The directories of all versions that can be sampled."""
        return set(self._db.scalars(sa.select(SAMPLERS.c.directory).where(SAMPLERS.c.directory.is_not(None))))

    def release_directories(self) -> list[str]:
        """Clear the directories of versions whose session is closed, and return them."""
        # Starts from the rows with files, since most sessions are closed.
        closed = sa.exists().where(SESSIONS.c.session_id == SAMPLERS.c.session_id, SESSIONS.c.closed_at.is_not(None))
        unused = SAMPLERS.c.directory.is_not(None) & closed
        with self._db.write() as connection:
            directories = list(connection.scalars(sa.select(SAMPLERS.c.directory).where(unused)))
            if directories:
                connection.execute(SAMPLERS.update().where(unused).values(directory=None))
        return directories

    def filter_silent(self, session_ids: Sequence[str], silent_s: float) -> set[str]:
        """Return those of `session_ids` without a heartbeat or poll for `silent_s` seconds."""
        silent = sa.select(SESSIONS.c.session_id).where(SESSIONS.c.last_heartbeat_at < now() - silent_s)
        parts = (self._db.scalars(silent.where(SESSIONS.c.session_id.in_(chunk))) for chunk in chunks(session_ids))
        return {session_id for part in parts for session_id in part}

    def filter_paused(self, session_ids: Sequence[str]) -> set[str]:
        """Return those of `session_ids` whose sampling is paused."""
        paused = sa.select(SESSIONS.c.session_id).where(SESSIONS.c.sampling_paused_at.is_not(None))
        parts = (self._db.scalars(paused.where(SESSIONS.c.session_id.in_(chunk))) for chunk in chunks(session_ids))
        return {session_id for part in parts for session_id in part}

    def of_session(self, session_id: str) -> list[str]:
        query = (
            sa.select(SAMPLERS.c.sampling_session_id)
            .where(SAMPLERS.c.session_id == session_id)
            .order_by(SAMPLERS.c.created_at)
        )
        return self._db.scalars(query)


def insertion(new: NewSamplingSession) -> Bound:
    """A statement for the transaction that settles an ephemeral publish."""
    return Bound(_ADD, asdict(new) | {"created_at": now()})
