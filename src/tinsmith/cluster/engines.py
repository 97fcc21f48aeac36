"""Seats, leases and fencing tokens of engines and dedicated samplers: one row per seat.

A seat is the slot of one process of a base model; a base model can have any number of seats. States: starting ->
loading -> ready; failed when the engine refused its model; restarting, stopped, lost. An engine renews its lease while
it runs. The row's epoch is the fencing token: every writing transaction of an engine checks it (`fence`), so an engine
that was declared dead but still runs cannot write. An expired lease stays valid until another process begins the next
epoch, which frees the engine's runs for others (`ownership`).

The holder of a seat is a data directory with a random id, because containers may share host names and paths. A file
lock (`storage.directories.claim`) ensures one process per seat, so a successor need not wait for the lease to expire.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.cluster.executors import reassign_all
from tinsmith.db.database import Database, Fence, now
from tinsmith.db.schema import ENGINES, FUTURES, MODELS
from tinsmith.db.statements import Statement
from tinsmith.db.wakeups import EVERYTHING, engine_mailbox
from tinsmith.runtime.background import start_supervised_thread

EXIT_UNUSABLE_MODEL = 3
"""Exit status of an engine that cannot serve its model; it is not restarted."""

EXIT_LEASE_LOST = 4
"""Exit status of an engine that was declared dead; its runs belong to other engines."""

EXIT_FAULT = 5
"""Exit status of an engine that ended itself after a fault; its successor replays."""

NO_START = "it cannot be started: "
"""The prefix of the reason of a seat whose engine failed at every start; it stays until an engine is ready."""

HOLDER = "holder"
"""The file with a data directory's id. Copies of the directory must not contain it."""

SEAT_RETENTION_S = 86400.0
"""Seats without a renewal for this long are deleted."""

log = structlog.get_logger()


class LeaseLostError(BaseException):
    """This engine was declared dead. A BaseException, so that it is never handled as a request's failure."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The slot of one process of a base model, within one holder."""

    base_model: str
    kind: str = "engine"
    index: int = 0


@dataclass(frozen=True, slots=True)
class EngineRow:
    engine_id: str
    base_model: str
    kind: str
    pid: int
    state: str
    reason: str | None
    started_at: float
    holder: str
    epoch: int
    lease_expires_at: float
    address: str | None
    suspects: str | None
    facts: dict[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write as the engine on a seat, until a later epoch begins."""

    engine_id: str
    epoch: int


class Engines:
    """Reads all seats, and changes those of one holder."""

    def __init__(self, db: Database, holder: str, on_demand: Collection[str] = ()) -> None:
        """`on_demand` are the base models whose engines run only while they are used."""
        self._db = db
        self.holder = holder
        self._on_demand = on_demand

    def id_of(self, seat: Seat) -> str:
        """The id of a seat, unique among all machines and the same for its successive engines."""
        digest = hashlib.sha256(f"{self.holder}\n{seat.base_model}".encode()).hexdigest()[:12]
        return f"{seat.kind}-{seat.index}-{digest}"

    # Methods for the engine.

    def take(self, seat: Seat, lease_s: float, suspects: str | None = None) -> Lease:
        """Begin a new epoch for the calling process. `suspects` is the in-flight note of its predecessor."""
        engine_id = self.id_of(seat)
        query = sa.select(ENGINES.c.epoch).where(ENGINES.c.engine_id == engine_id).with_for_update()
        with self._db.write() as connection:
            connection.execute(self._db.insert_once(ENGINES), self._first_row(seat))
            # Waits for the last transaction of a predecessor, and does not block renewals (see `fence`).
            epoch = connection.execute(query).scalar_one() + 1
            broken = sa.case((ENGINES.c.reason.startswith(NO_START), ENGINES.c.reason))
            values: dict[str, object] = {"pid": os.getpid(), "state": "loading", "reason": broken, "started_at": now()}
            values |= {"holder": self.holder, "epoch": epoch, "address": None, "facts": sa.null()}
            values |= {"suspects": suspects} if suspects else {}
            update = ENGINES.update().where(ENGINES.c.engine_id == engine_id).values(**values)
            connection.execute(update.values(lease_expires_at=self._db.clock() + lease_s))
        return Lease(engine_id, epoch)

    def _first_row(self, seat: Seat) -> dict[str, object]:
        # The epoch starts at the time, so that a seat which was deleted and is created again does not repeat one.
        first = {"engine_id": self.id_of(seat), "base_model": seat.base_model, "kind": seat.kind, "epoch": int(now())}
        return {**first, "pid": 0, "state": "starting", "started_at": now()}

    def renew(self, lease: Lease, lease_s: float) -> bool:
        """Extend the lease; returns False if this engine was declared dead."""
        with self._db.write() as connection:  # the clock is read once the write lock is held
            update = ENGINES.update().where(*_is(lease))
            return connection.execute(update.values(lease_expires_at=self._db.clock() + lease_s)).rowcount == 1

    def is_taken(self, seat: Seat, lease: Lease) -> bool:
        """Whether another process took this seat, which requires a copy of the holder's id."""
        row = self.find(seat)
        return row is not None and row.epoch > lease.epoch and row.lease_expires_at > 0

    # Methods for the supervisor.

    def announce(self, seat: Seat) -> None:
        """Say that an engine will start on a seat, before there is a process."""
        of_seat = ENGINES.update().where(ENGINES.c.engine_id == self.id_of(seat))
        with self._db.write() as connection:
            connection.execute(self._db.insert_once(ENGINES), self._first_row(seat))
            connection.execute(of_seat.values(state="starting", reason=None, started_at=now()))

    def has_other(self, seat: Seat) -> bool:
        """Whether another seat of the base model has a live engine."""
        is_other = (ENGINES.c.base_model == seat.base_model) & (ENGINES.c.engine_id != self.id_of(seat))
        alive = (ENGINES.c.kind == "engine") & (ENGINES.c.lease_expires_at > self._db.clock())
        return self._db.scalar(sa.select(sa.func.count()).where(is_other, alive)) > 0

    # Methods for the engine and the supervisor.

    def set_state(self, seat: Seat, state: str, reason: str | None = None, address: str | None = None) -> None:
        """Set the state of the engine on a seat."""
        update = ENGINES.update().where(ENGINES.c.engine_id == self.id_of(seat))
        self._db.execute(update.values(state=state, reason=reason, address=address))

    def release(self, seat: Seat, state: str, reason: str | None = None, suspects: str | None = None) -> None:
        """End the epoch of an engine that has ended, and free its runs. `suspects` is its in-flight note."""
        with self._db.write() as connection:
            values = {"state": state, "reason": reason, "suspects": suspects}
            end_epoch(self._db, connection, self.id_of(seat), seat.base_model, **values)

    # Reads.

    def find(self, seat: Seat) -> EngineRow | None:
        """The row of a seat of this holder."""
        row = self._db.first(sa.select(ENGINES).where(ENGINES.c.engine_id == self.id_of(seat)))
        return None if row is None else EngineRow(**row._mapping)

    def of_base(self, base_model: str, kind: str | None = None) -> list[EngineRow]:
        """All seats of a base model, of every holder, ordered by id."""
        query = sa.select(ENGINES).where(ENGINES.c.base_model == base_model).order_by(ENGINES.c.engine_id)
        if kind is not None:
            query = query.where(ENGINES.c.kind == kind)
        return [EngineRow(**row._mapping) for row in self._db.rows(query)]

    def list_running(self) -> list[tuple[str, str]]:
        """The base model and the state of each process of this holder that runs or starts."""
        has_ended = ENGINES.c.state.in_(("failed", "restarting", "stopped", "lost"))
        query = sa.select(ENGINES.c.base_model, ENGINES.c.state).where(ENGINES.c.holder == self.holder, ~has_ended)
        return [(base_model, state) for base_model, state in self._db.rows(query)]

    def is_unloaded(self, base_model: str) -> bool:
        """Whether a base model on demand has no engine, and none that starts."""
        if base_model not in self._on_demand:
            return False
        is_engine = (ENGINES.c.base_model == base_model) & (ENGINES.c.kind == "engine")
        has_ended = ENGINES.c.state.in_(("failed", "stopped", "lost"))
        return not self._db.scalar(sa.select(sa.func.count()).where(is_engine, ~has_ended))

    def queue_state(self, base_model: str) -> tuple[str, str | None]:
        """The queue_state of a poll's answer, and its reason: paused_capacity while no engine is ready."""
        if self.is_unloaded(base_model):
            reason = f"{base_model} is loaded on demand, by a process that runs engines (--role all or engine)"
            return "paused_capacity", reason
        silent = (ENGINES.c.lease_expires_at <= self._db.clock()).label("silent")
        is_engine = (ENGINES.c.base_model == base_model) & (ENGINES.c.kind == "engine")
        query = (
            sa.select(ENGINES.c.state, ENGINES.c.reason, silent).where(is_engine).order_by(ENGINES.c.started_at.desc())
        )
        rows = self._db.rows(query)
        if any(row.state == "ready" and not row.silent for row in rows):
            return "active", None
        ready = [row for row in rows if row.state == "ready"]
        if ready and len(ready) == len(rows):
            return "paused_capacity", f"the engine of {base_model} does not renew its lease; another may take over"
        # The reason is that of the engine that will be ready first.
        nearest = sorted(rows, key=lambda row: _NEARNESS.get(row.state, len(_NEARNESS)))
        state, reason = (nearest[0].state, nearest[0].reason) if nearest else ("starting", None)
        return "paused_capacity", f"the engine of {base_model} is {state}{f': {reason}' if reason else ''}"

    def cannot_start(self, base_model: str) -> str | None:
        """The reason why no engine of a base model will be ready: all of them failed at each start. Otherwise None."""
        alive = ENGINES.c.lease_expires_at > self._db.clock()
        is_engine = (ENGINES.c.base_model == base_model) & (ENGINES.c.kind == "engine")
        rows = self._db.rows(sa.select(ENGINES.c.state, ENGINES.c.reason, alive.label("alive")).where(is_engine))
        broken = [row.reason for row in rows if (row.reason or "").startswith(NO_START)]
        usable = any(
            (row.state == "ready" and row.alive) or row.state in ("starting", "loading", "restarting")
            for row in rows
            if not (row.reason or "").startswith(NO_START)
        )
        return None if usable or not broken else f"the engine of {base_model} does not run; {broken[0]}"

    def delete_unused(self) -> int:
        """Delete the seats that were not used for SEAT_RETENTION_S; returns how many."""
        expired = ENGINES.c.lease_expires_at < self._db.clock() - SEAT_RETENTION_S
        old = ENGINES.c.started_at < now() - SEAT_RETENTION_S
        owns_runs = sa.exists().where(MODELS.c.engine_id == ENGINES.c.engine_id)
        has_requests = sa.exists().where(FUTURES.c.executor == ENGINES.c.engine_id, FUTURES.c.state == "pending")
        return self._db.execute(ENGINES.delete().where(expired, old, ~owns_runs, ~has_requests))


_NEARNESS = {state: rank for rank, state in enumerate(("loading", "starting", "restarting", "failed"))}


def end_epoch(db: Database, connection: Connection, engine_id: str, base_model: str, **values: str | None) -> None:
    """Within the caller's transaction: end the epoch of a seat's process and free its runs and samples."""
    seat = ENGINES.update().where(ENGINES.c.engine_id == engine_id)
    # On Postgres this waits for the last transaction of that process, unlike the update alone.
    connection.execute(sa.select(ENGINES.c.epoch).where(ENGINES.c.engine_id == engine_id).with_for_update())
    connection.execute(seat.values(epoch=ENGINES.c.epoch + 1, lease_expires_at=0, address=None, **values))
    connection.execute(MODELS.update().where(MODELS.c.engine_id == engine_id).values(engine_id=None))
    reassign_all(db, connection, engine_id, base_model)
    db.notify(connection, engine_mailbox(base_model), [EVERYTHING])


def holder_of(data_dir: Path) -> str:
    """The unique id of a data directory, created on first use."""
    with open(os.open(data_dir / HOLDER, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        holder_id = file.read().strip()
        if not holder_id:
            holder_id = secrets.token_hex(8)
            file.write(holder_id + "\n")
            file.flush()
            os.fsync(file.fileno())
    return f"{socket.gethostname()}:{holder_id}:{data_dir}"


def fence(lease: Lease) -> Fence:
    """The check at the beginning of every writing transaction of an engine. It raises LeaseLostError."""
    # Until the transaction ends, the row is locked against a new epoch, but not against a renewal.
    query = Statement(sa.select(ENGINES.c.epoch).where(*_is(lease)).with_for_update(read=True, key_share=True))

    def check(connection: Connection) -> None:
        if query.first(connection, {}) is None:
            raise LeaseLostError(f"{lease.engine_id} was declared dead after epoch {lease.epoch}")

    return check


def _is(lease: Lease) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return ENGINES.c.engine_id == lease.engine_id, ENGINES.c.epoch == lease.epoch


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """The deaths of an engine in a row; `reason` may name hosts and users, so it is for operators only."""

    engine: str
    base_model: str
    deaths: int
    reason: str


class Renewal:
    """A thread that renews a lease, also during long steps; calls `on_loss` once if the lease is lost."""

    def __init__(self, engines: Engines, lease: Lease, lease_s: float, on_loss: Callable[[], None]) -> None:
        self._engines = engines
        self._lease = lease
        self._lease_s = lease_s
        self._on_loss = on_loss
        self.lost = False
        self._closing = threading.Event()
        self._thread = start_supervised_thread("lease", self._run, self._closing.wait)

    def _run(self) -> None:
        while not self._closing.wait(self._lease_s / 3):
            try:
                is_renewed = self._engines.renew(self._lease, self._lease_s)
            except SQLAlchemyError as error:  # retried after the interval; meanwhile the fence protects the data
                log.warning("the lease could not be renewed", engine_id=self._lease.engine_id, exc_info=error)
                continue
            if not is_renewed:
                self.lost = True
                self._on_loss()
                return

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
