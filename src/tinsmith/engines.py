"""Engines: one row per base model, saying who works on it, how that engine is, and until when it may write.

States: starting -> loading -> ready; failed when the engine refused its model; restarting, stopped. At most one engine
holds the lease of a base model. The lease is renewed while the engine runs; once it has expired, any other may take it,
which makes a new epoch. Every writing transaction of an engine checks that its epoch is still the row's (`fence`): an
engine that was thought dead and comes back changes nothing. A lease that expired and was taken by nobody is still good.

The holder is the data directory that an engine belongs to. There is one engine of it at a time (`storage.claim`), so
that the next one of the same holder need not wait until the lease of its predecessor expires.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.db import Database, Fence, now
from tinsmith.tables import ENGINES

EXIT_UNUSABLE_MODEL = 3
"""How an engine process ends that cannot serve its model: a restart would not help, so nobody tries."""

EXIT_LEASE_HELD = 4
"""How an engine process ends when another one holds the lease of its base model."""

log = structlog.get_logger()


class LeaseLostError(BaseException):
    """Another engine has taken over. No Exception: nobody may take it for the failure of one request."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    base_model: str
    engine_id: str
    pid: int
    state: str
    reason: str | None
    started_at: float
    holder: str
    epoch: int
    lease_expires_at: float


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write as the engine of a base model, as long as no later epoch exists."""

    base_model: str
    epoch: int


class Engines:
    def __init__(self, db: Database, holder: str) -> None:
        self._db = db
        self._holder = holder

    # The engine's side.

    def take(self, base_model: str, lease_s: float) -> Lease | None:
        """Make the calling process the engine of this base model; None if another holder's lease has not expired."""
        mine = ENGINES.c.base_model == base_model
        first = {"base_model": base_model, "engine_id": "", "pid": 0, "state": "starting", "started_at": now()}
        query = sa.select(ENGINES.c.epoch, self._free()).where(mine)
        with self._db.write() as connection:
            connection.execute(self._db.insert_once(ENGINES), first)
            # Waits for the last transaction of a predecessor, and holds up no renewal (see `fence`).
            epoch, free = connection.execute(query.with_for_update()).one()
            if not free:
                return None
            connection.execute(
                ENGINES.update()
                .where(mine)
                .values(
                    engine_id=uuid.uuid4().hex,
                    pid=os.getpid(),
                    state="loading",
                    reason=None,
                    started_at=now(),
                    holder=self._holder,
                    epoch=epoch + 1,
                    lease_expires_at=self._db.clock() + lease_s,
                )
            )
        return Lease(base_model, epoch + 1)

    def renew(self, lease: Lease, lease_s: float) -> bool:
        """False if another engine has taken over."""
        with self._db.write() as connection:
            update = ENGINES.update().where(*_is(lease))
            return connection.execute(update.values(lease_expires_at=self._db.clock() + lease_s)).rowcount == 1

    # The supervisor's side.

    def is_free(self, base_model: str) -> bool:
        """Whether an engine of this holder would get the lease."""
        with self._db.read() as connection:
            free = connection.scalar(sa.select(self._free()).where(ENGINES.c.base_model == base_model))
        return free is None or bool(free)

    def _free(self) -> sa.ColumnElement[bool]:
        return sa.or_(ENGINES.c.lease_expires_at <= self._db.clock(), ENGINES.c.holder == self._holder)

    # Both.

    def set_state(self, base_model: str, state: str, reason: str | None = None) -> None:
        """Say how this holder's engine is; nothing if another holder's engine has the lease."""
        with self._db.write() as connection:
            mine = ENGINES.update().where(ENGINES.c.base_model == base_model, self._free())
            connection.execute(mine.values(state=state, reason=reason))

    def release(self, base_model: str, state: str, reason: str | None = None) -> None:
        """This holder's engine is gone: any other may take over at once."""
        with self._db.write() as connection:
            mine = ENGINES.update().where(ENGINES.c.base_model == base_model, ENGINES.c.holder == self._holder)
            connection.execute(mine.values(state=state, reason=reason, lease_expires_at=0))

    def find(self, base_model: str) -> EngineRow | None:
        with self._db.read() as connection:
            row = connection.execute(sa.select(ENGINES).where(ENGINES.c.base_model == base_model)).one_or_none()
        return None if row is None else EngineRow(**row._mapping)

    def queue_state(self, base_model: str) -> tuple[str, str | None]:
        """The wire's queue_state and its reason: paused_capacity as long as the engine cannot work."""
        silent = (ENGINES.c.lease_expires_at <= self._db.clock()).label("silent")
        query = sa.select(ENGINES.c.state, ENGINES.c.reason, silent).where(ENGINES.c.base_model == base_model)
        with self._db.read() as connection:
            row = connection.execute(query).one_or_none()
        if row is not None and row.state == "ready":
            if not row.silent:
                return "active", None
            return "paused_capacity", f"the engine of {base_model} has not been heard of; another may take over"
        state = "starting" if row is None else row.state
        detail = f": {row.reason}" if row is not None and row.reason else ""
        return "paused_capacity", f"the engine of {base_model} is {state}{detail}"


def holder_of(data_dir: Path) -> str:
    """The name of a data directory among those of all machines."""
    return f"{socket.gethostname()}:{data_dir}"


def fence(lease: Lease) -> Fence:
    """What an engine's database does first in every writing transaction. Raises LeaseLostError."""
    # The row stays locked against a take-over until the transaction ends, and not against a renewal.
    query = sa.select(ENGINES.c.epoch).where(*_is(lease)).with_for_update(read=True, key_share=True)

    def check(connection: Connection) -> None:
        if connection.scalar(query) is None:
            raise LeaseLostError(f"another engine of {lease.base_model} has taken over from epoch {lease.epoch}")

    return check


def _is(lease: Lease) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return ENGINES.c.base_model == lease.base_model, ENGINES.c.epoch == lease.epoch


class Renewal:
    """A thread that renews a lease, however long the engine's steps take; calls `on_loss` once if it is gone."""

    def __init__(self, engines: Engines, lease: Lease, lease_s: float, on_loss: Callable[[], None]) -> None:
        self._engines = engines
        self._lease = lease
        self._lease_s = lease_s
        self._on_loss = on_loss
        self.lost = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._lease_s / 3):
            try:
                held = self._engines.renew(self._lease, self._lease_s)
            except SQLAlchemyError as error:  # the next time may do; nothing wrong is written without a lease
                log.warning("the lease could not be renewed", base_model=self._lease.base_model, exc_info=error)
                continue
            if not held:
                self.lost = True
                self._on_loss()
                return

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
