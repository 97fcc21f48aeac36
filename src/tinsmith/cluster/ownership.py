"""Ownership: which engine has a run, and which requests an engine processes.

A run belongs to at most one engine (`models.engine_id`), which alone has it in memory and settles its requests. Samples
of a run's own versions follow the run. Every other sample, and a cancellation, belongs to the engine or sampler in
`futures.executor`, if any. The server assigns new work as it stores it (`EngineRouter`); engines claim unassigned work.

The owner of a run changes in two ways only: its engine migrates the idle run to an engine with at least two runs fewer,
or another process ends the engine's epoch in the transaction that frees its runs (`engines.end_epoch`). So only the
owner can write.

`EngineRouter` is a server's view of the engines of a base model. A new run goes to the engine with the fewest runs, a
sample without a run to an engine by a hash of its id. The view is read at most twice a second; assignments in between
are added. A stale view is harmless: other engines free the requests of a dead engine and claim unassigned ones.
Thread-safe.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tinsmith.cluster.engines import end_epoch
from tinsmith.cluster.routing import Loads
from tinsmith.db.database import Database, chunks, now
from tinsmith.db.schema import ENGINES, FUTURES, MODELS, SAMPLERS
from tinsmith.db.statements import Statement
from tinsmith.db.wakeups import EVERYTHING, engine_mailbox
from tinsmith.types import Pending

MIN_RUN_DIFFERENCE = 2
"""An engine migrates runs to one with at least this many fewer; a smaller difference would cause oscillation."""

_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class Arrival:
    """A new request, whether it has no engine or sampler yet, and its run."""

    request: Pending
    is_unassigned: bool
    run_id: str | None


_COLUMNS = [FUTURES.c[name] for name in Pending.__dataclass_fields__]
_RUN = sa.func.coalesce(FUTURES.c.model_id, SAMPLERS.c.model_id)
_OWNER = sa.func.coalesce(FUTURES.c.executor, MODELS.c.engine_id)
_REQUESTS = FUTURES.outerjoin(SAMPLERS, SAMPLERS.c.sampling_session_id == FUTURES.c.sampling_session_id).outerjoin(
    MODELS, MODELS.c.model_id == _RUN
)
_ENGINE_ID = sa.bindparam("engine_id", type_=sa.String)
_NOT_OF_OTHERS = _OWNER.is_(None) | (_ENGINE_ID == _OWNER)
_ARRIVALS = (
    sa.select(*_COLUMNS, _OWNER.label("owner"), _RUN.label("run_id")).select_from(_REQUESTS).where(_NOT_OF_OTHERS)
)
# Built once, for every request.
_INCOMING = Statement(
    _ARRIVALS.where(FUTURES.c.base_model == sa.bindparam("base_model"))
    .where((FUTURES.c.state == "pending") | (FUTURES.c.state == "refused"))  # IN would be compiled each time
    .where((FUTURES.c.state == "pending") | FUTURES.c.model_id.is_(None) | (FUTURES.c.seq_id > MODELS.c.applied_seq_id))
    .where(FUTURES.c.arrival > sa.bindparam("after_arrival"))
    .order_by(FUTURES.c.arrival)
)
_BY_IDS = (
    _ARRIVALS.where(FUTURES.c.request_id.in_(sa.bindparam("request_ids", expanding=True)))
    .where(FUTURES.c.base_model == sa.bindparam("base_model"), FUTURES.c.state.in_(("pending", "refused")))
    .order_by(FUTURES.c.arrival)
)
_WAITING_IDS = (
    sa.select(FUTURES.c.request_id)
    .select_from(_REQUESTS)
    .where(FUTURES.c.base_model == sa.bindparam("base_model"), FUTURES.c.state == "pending", _NOT_OF_OTHERS)
)
_NAMES = FUTURES.c.request_id.in_(sa.bindparam("request_ids", expanding=True))
_RUNS_OF = sa.select(_RUN).select_from(_REQUESTS).where(_NAMES, _RUN.is_not(None))
_FREE_RUNS = (
    sa.select(MODELS.c.model_id)
    .where(MODELS.c.model_id.in_(_RUNS_OF), MODELS.c.engine_id.is_(None))
    # Rows that another engine is claiming are skipped, so that engines never wait for each other.
    .with_for_update(skip_locked=True)
)
_CLAIM_RUNS = (
    MODELS.update()
    .where(MODELS.c.model_id.in_(sa.bindparam("model_ids", expanding=True)))
    .values(engine_id=sa.bindparam("claimant"))
)
_FREE_REQUESTS = (
    sa.select(FUTURES.c.request_id)
    .select_from(_REQUESTS)
    .where(_NAMES, _RUN.is_(None), FUTURES.c.executor.is_(None), FUTURES.c.state == "pending")
    .with_for_update(skip_locked=True, of=FUTURES)
)
_CLAIM_REQUESTS = FUTURES.update().where(_NAMES).values(executor=sa.bindparam("claimant"))
_CLAIMED = sa.select(FUTURES.c.request_id).select_from(_REQUESTS).where(_NAMES, _ENGINE_ID == _OWNER)
_NUM_RUNS = sa.select(sa.func.count()).where(MODELS.c.engine_id == ENGINES.c.engine_id).scalar_subquery()
_BUSY_RUNS = (
    sa.select(_RUN)
    .select_from(_REQUESTS)
    .where(FUTURES.c.base_model == sa.bindparam("of_base"), FUTURES.c.state == "pending", _RUN.is_not(None))
)


class Ownership:
    """Ownership as one engine reads and changes it."""

    def __init__(self, db: Database, base_model: str, engine_id: str, idle_s: float = 0.0) -> None:
        """Runs idle for `idle_s` may be migrated to engines that were started at least as long ago; 0: never."""
        self._db = db
        self._idle_s = idle_s
        self.base_model = base_model
        self.engine_id = engine_id
        self._bindings = {"base_model": base_model, "engine_id": engine_id}

    def incoming(self, after_arrival: int) -> list[Arrival]:
        """The pending and refused requests after `after_arrival` that do not belong to another engine."""
        return _arrivals(self._db.rows(_INCOMING, {**self._bindings, "after_arrival": after_arrival}))

    def fetch_by_ids(self, request_ids: Sequence[str]) -> list[Arrival]:
        """The pending and refused ones among the requests of a wake-up that do not belong to another engine; they may
        have been committed after later arrivals.
        """
        parts = (self._db.rows(_BY_IDS, {**self._bindings, "request_ids": chunk}) for chunk in chunks(request_ids))
        return [arrival for rows in parts for arrival in _arrivals(rows)]

    def pending_ids(self) -> set[str]:
        """The ids of all pending requests that do not belong to another engine, for the slow poll."""
        return set(self._db.scalars(_WAITING_IDS, self._bindings))

    def claim(self, request_ids: Sequence[str]) -> set[str]:
        """Claim unassigned requests and their runs for this engine; returns the claimed ids."""
        claimed_ids: set[str] = set()
        for chunk in chunks(request_ids):
            values = {**self._bindings, "request_ids": chunk}
            with self._db.write() as connection:
                if model_ids := list(connection.scalars(_FREE_RUNS, values)):
                    connection.execute(_CLAIM_RUNS, {"model_ids": model_ids, "claimant": self.engine_id})
                if free := list(connection.scalars(_FREE_REQUESTS, values)):
                    connection.execute(_CLAIM_REQUESTS, {"request_ids": free, "claimant": self.engine_id})
                claimed_ids.update(connection.scalars(_CLAIMED, values))
        return claimed_ids

    def forward(self, cancel_id: str, sample_id: str) -> bool:
        """Forward a cancellation to another process that has the pending sample; returns False if none has."""
        query = sa.select(_OWNER).select_from(_REQUESTS)
        elsewhere = _OWNER.is_not(None) & (self.engine_id != _OWNER)
        query = query.where(FUTURES.c.request_id == sample_id, FUTURES.c.state == "pending", elsewhere)
        owner = self._db.scalar(query)
        if owner is None:
            return False
        with self._db.write() as connection:
            connection.execute(FUTURES.update().where(FUTURES.c.request_id == cancel_id).values(executor=owner))
            self._db.notify(connection, engine_mailbox(self.base_model, owner), [cancel_id])
        return True

    # Migration of runs.

    def migration_target(self) -> str | None:
        """An engine with at least MIN_RUN_DIFFERENCE runs fewer than this one, or None."""
        if not self._idle_s:
            return None
        rows = {row.engine_id: row for row in self._db.rows(_live_engines(self._db, self.base_model, "ready"))}
        this_engine = rows.pop(self.engine_id, None)
        candidates = [row for row in rows.values() if row.started_at <= now() - self._idle_s]
        if this_engine is None or not candidates:
            return None
        lightest = min(candidates, key=lambda row: (row.runs, row.engine_id))
        return str(lightest.engine_id) if this_engine.runs - lightest.runs >= MIN_RUN_DIFFERENCE else None

    def idle_runs(self) -> list[str]:
        """Some idle runs of this engine, most recently used first, since these are most likely to be used again."""
        is_ready = (MODELS.c.engine_id == self.engine_id) & (MODELS.c.state == "ready")
        idle = (MODELS.c.last_request_at <= now() - self._idle_s) & MODELS.c.model_id.not_in(_BUSY_RUNS)
        query = sa.select(MODELS.c.model_id).where(is_ready, idle).order_by(MODELS.c.last_request_at.desc())
        return self._db.scalars(query.limit(_CANDIDATES), {"of_base": self.base_model})

    def migrate(self, model_id: str, engine_id: str) -> bool:
        """Migrate a run if it has no pending requests and the other engine is alive and has MIN_RUN_DIFFERENCE runs
        fewer.

        All state of the run must be in files, and the caller must drop the run from memory if this returns True.
        """
        alive = (ENGINES.c.state == "ready") & (ENGINES.c.lease_expires_at > self._db.clock())
        seat = sa.select(ENGINES.c.engine_id).where(ENGINES.c.engine_id == engine_id, alive)
        # Locks the receiving engine's row or skips it: one migration to it at a time, and none while its epoch ends.
        seat = seat.with_for_update(key_share=True, skip_locked=True)
        of_engines = MODELS.c.engine_id.in_((self.engine_id, engine_id))
        counted = sa.select(MODELS.c.engine_id, sa.func.count()).where(of_engines).group_by(MODELS.c.engine_id)
        run = (MODELS.c.model_id == model_id) & (MODELS.c.engine_id == self.engine_id) & (MODELS.c.state == "ready")
        idle = MODELS.c.model_id.not_in(_BUSY_RUNS)
        with self._db.write() as connection:
            if connection.scalar(seat) is None:
                return False
            runs = {name: int(count) for name, count in connection.execute(counted)}
            if runs.get(self.engine_id, 0) - runs.get(engine_id, 0) < MIN_RUN_DIFFERENCE:
                return False
            moved = MODELS.update().where(run, idle).values(engine_id=engine_id)
            if connection.execute(moved, {"of_base": self.base_model}).rowcount != 1:
                return False
            self._db.notify(connection, engine_mailbox(self.base_model, engine_id), [EVERYTHING])
        return True

    # Engines that have ended.

    def free_expired(self) -> list[str]:
        """End the epochs of engines with expired leases and free their runs; returns the ids of these engines."""
        has_runs = sa.exists().where(MODELS.c.engine_id == ENGINES.c.engine_id)
        assigned = (FUTURES.c.executor == ENGINES.c.engine_id) & (FUTURES.c.state == "pending")
        silent = ENGINES.c.lease_expires_at <= self._db.clock()
        is_other = (ENGINES.c.base_model == self.base_model) & (ENGINES.c.engine_id != self.engine_id)
        query = sa.select(ENGINES.c.engine_id).where(is_other, silent, has_runs | sa.exists().where(assigned))
        names = self._db.scalars(query)
        return [name for name in names if self._free(name)]

    def _free(self, engine_id: str) -> bool:
        silent = ENGINES.c.lease_expires_at <= self._db.clock()
        # Skips locked rows: an engine within a transaction is alive, and engines that free each other must not wait.
        seat = sa.select(ENGINES.c.state, ENGINES.c.reason).where(ENGINES.c.engine_id == engine_id, silent)
        with self._db.write() as connection:
            row = connection.execute(seat.with_for_update(skip_locked=True)).one_or_none()
            if row is None:
                return False
            has_ended = row.state in ("failed", "stopped", "restarting")  # set by its supervisor
            state, reason = (row.state, row.reason) if has_ended else ("lost", "its lease expired")
            end_epoch(self._db, connection, engine_id, self.base_model, state=state, reason=reason)
        return True

    def list_others(self) -> list[str]:
        """The other live engines of this base model."""
        names = self._db.scalars(_live_engines(self._db, self.base_model, "ready"))
        return [name for name in names if name != self.engine_id]

    def suspects(self) -> list[str]:
        """The in-flight notes of dead engines of this base model, from their rows."""
        has_note = (ENGINES.c.base_model == self.base_model) & ENGINES.c.suspects.is_not(None)
        return self._db.scalars(sa.select(ENGINES.c.suspects).where(has_note))


def choose_engine(key: str, engine_ids: Collection[str]) -> str:
    """The engine that claims unassigned work, by a hash: all engines agree, and the work is spread evenly."""
    return max(engine_ids, key=lambda engine_id: hashlib.blake2b(f"{engine_id}\n{key}".encode()).digest())


def _arrivals(rows: Iterable[Any]) -> list[Arrival]:
    return [Arrival(Pending(*values), owner is None, run_id) for *values, owner, run_id in rows]


def _live_engines(db: Database, base_model: str, *states: str) -> sa.Select:
    """A query for a base model's live engines in these states, with state, start time and number of runs."""
    alive = ENGINES.c.lease_expires_at > db.clock()
    in_states = (ENGINES.c.base_model == base_model) & (ENGINES.c.kind == "engine") & ENGINES.c.state.in_(states)
    columns = ENGINES.c.engine_id, ENGINES.c.state, ENGINES.c.started_at, _NUM_RUNS.label("runs")
    return sa.select(*columns).where(in_states, alive)


class EngineRouter:
    def __init__(self, db: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._db = db
        self._runs = Loads(self._read_runs, clock)

    def for_run(self, base_model: str) -> str | None:
        """The engine for a new run; None if no engine is alive."""
        runs = self._runs.of(base_model)
        with self._runs.lock:
            if not runs:
                return None
            engine_id = min(runs, key=lambda name: (runs[name], name))
            runs[engine_id] += 1
            return engine_id

    def for_sample(self, base_model: str, request_id: str) -> str | None:
        """The engine for a sample of a base model or checkpoint; None if no engine is alive."""
        runs = self._runs.of(base_model)
        with self._runs.lock:
            return choose_engine(request_id, list(runs)) if runs else None

    def _read_runs(self, base_model: str) -> dict[str, int]:
        rows = self._db.rows(_live_engines(self._db, base_model, "ready", "loading"))
        ready = [row for row in rows if row.state == "ready"]
        return {row.engine_id: int(row.runs) for row in ready or rows}  # loading engines only if none is ready
