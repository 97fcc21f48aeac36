"""Profiles of running engines on demand: an operator asks for one, the engine of the base model writes its traces.

A base model has one row, that of its last profile: `requested` until one of its engines begins, `tracing` until its
seconds have passed or an operator stops it (`stopping`), and then `finished` with its files, or `failed` with the
reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tinsmith.db.database import Database, now
from tinsmith.db.schema import ENGINES, PROFILES
from tinsmith.db.statements import Statement
from tinsmith.db.wakeups import EVERYTHING, engine_mailbox
from tinsmith.errors import NotFoundError, UserError

REQUESTED, TRACING, STOPPING, FINISHED, FAILED = "requested", "tracing", "stopping", "finished", "failed"
ACTIVE = (REQUESTED, TRACING, STOPPING)

PROFILE_S, MAX_PROFILE_S = 30.0, 3600.0
"""The seconds of a profile, by default and at most."""


@dataclass(frozen=True, slots=True)
class Profile:
    """`seconds` bound the tracing; `engine_id` has begun it, on the machine `host`, where the files lie."""

    base_model: str
    state: str
    seconds: float
    requested_at: float
    engine_id: str | None
    host: str | None
    files: Sequence[str]
    reason: str | None


_COLUMNS = [PROFILES.c[name] for name in Profile.__dataclass_fields__]
_ACTIVE = Statement(
    sa.select(*_COLUMNS).where(
        PROFILES.c.base_model == sa.bindparam("base_model"),
        PROFILES.c.state != FINISHED,
        PROFILES.c.state != FAILED,
    )
)


class Profiles:
    def __init__(self, db: Database) -> None:
        self._db = db

    def request(self, base_model: str, seconds: float) -> Profile:
        """Ask the engine of a base model for a profile. Raises UserError while another one is not finished."""
        row = {
            "base_model": base_model, "state": REQUESTED, "seconds": seconds, "requested_at": now(),
            "engine_id": None, "host": None, "files": [], "reason": None,
        }  # fmt: skip
        with self._db.write() as connection:
            of_base = PROFILES.c.base_model == base_model
            connection.execute(PROFILES.delete().where(of_base, PROFILES.c.state.not_in(ACTIVE)))
            if not connection.execute(self._db.insert_once(PROFILES), row).rowcount:
                raise UserError(f"a profile of {base_model!r} is not finished; stop it, or wait for its end")
            self._db.notify(connection, engine_mailbox(base_model), [EVERYTHING])
        return self.find(base_model)

    def stop(self, base_model: str) -> Profile:
        """End a profile early; one that has not begun is cancelled. Raises NotFoundError if there is none."""
        with self._db.write() as connection:
            of_base = PROFILES.c.base_model == base_model
            cancelled = {"state": FAILED, "reason": "it was stopped before its engine began"}
            connection.execute(PROFILES.update().where(of_base, PROFILES.c.state == REQUESTED).values(cancelled))
            connection.execute(PROFILES.update().where(of_base, PROFILES.c.state == TRACING).values(state=STOPPING))
            self._db.notify(connection, engine_mailbox(base_model), [EVERYTHING])
        return self.find(base_model)

    def find(self, base_model: str) -> Profile:
        """The last profile of a base model. Raises NotFoundError."""
        row = self._db.first(sa.select(*_COLUMNS).where(PROFILES.c.base_model == base_model))
        if row is None:
            raise NotFoundError(f"there is no profile of {base_model[:80]!a}")
        return Profile(*row)

    def base_models_with_engines(self) -> list[str]:
        """The base models that have engine processes, in any state; an engine in a server's process has none."""
        return self._db.scalars(sa.select(ENGINES.c.base_model).distinct().order_by(ENGINES.c.base_model))

    def all(self) -> list[Profile]:
        return [Profile(*row) for row in self._db.rows(sa.select(*_COLUMNS).order_by(PROFILES.c.base_model))]

    # Used by the engine.

    def find_active(self, base_model: str) -> Profile | None:
        """The profile that is not finished, if there is one."""
        row = self._db.first(_ACTIVE, {"base_model": base_model})
        return None if row is None else Profile(*row)

    def begin(self, base_model: str, engine_id: str, host: str) -> bool:
        """Give the requested profile to an engine; False if another one has it, or it was cancelled."""
        changed = PROFILES.update().where(PROFILES.c.base_model == base_model, PROFILES.c.state == REQUESTED)
        return self._db.execute(changed.values(state=TRACING, engine_id=engine_id, host=host)) == 1

    def finish(self, profile: Profile, files: Sequence[str], reason: str | None = None) -> None:
        """Record the end of an active profile: its files, or the reason why it failed."""
        state = FINISHED if reason is None else FAILED
        is_it = PROFILES.c.base_model == profile.base_model, PROFILES.c.requested_at == profile.requested_at
        changed = PROFILES.update().where(*is_it, PROFILES.c.state.in_(ACTIVE))
        self._db.execute(changed.values(state=state, files=list(files), reason=reason))

    def is_alive(self, engine_id: str | None) -> bool:
        """Whether an engine holds its lease."""
        alive = (ENGINES.c.engine_id == engine_id) & (ENGINES.c.lease_expires_at > self._db.clock())
        return self._db.scalar(sa.select(ENGINES.c.engine_id).where(alive)) is not None
