"""Executors: which process computes a sample, and how the server chooses it.

A pending sample without an executor belongs to the engines. A sample with an executor belongs to that process while its
lease is valid. The first sampler or engine that notices an expired lease calls `engines.end_epoch`. It ends the epoch,
so that late settlements have no effect, and reassigns the samples to the remaining samplers or to the engines. A
stopping process reassigns its samples in the same way.

`Dispatch` chooses the executor before the row is written, so that the choice costs no transaction. With dedicated
samplers it uses `routing`. It chooses none without them, and for inflight versions, whose weights change under their
name. The samplers and their queues are read at most twice a second per base model; assignments in between are added. A
stale view is harmless, because samples of a dead sampler are reassigned. Thread-safe.

Operators list samplers and change their state (`CHANGES`). Only a `ready` sampler is given samples. A `draining` one
finishes its own and keeps its memory. A `sleeping` one finishes the samples that it has begun, reassigns the others,
has its inference server release the device and is `asleep`; a `waking` one takes the device back. The sampler itself
makes the last steps of both, within seconds. A restart of its process makes it ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sqlalchemy as sa

from tinsmith.cluster.routing import Loads, Prefixes
from tinsmith.db.database import Database, chunks
from tinsmith.db.schema import ENGINES, FUTURES, MODELS
from tinsmith.db.wakeups import EVERYTHING, engine_mailbox
from tinsmith.errors import NotFoundError, UserError
from tinsmith.store.futures import NewFuture, cancel_target
from tinsmith.types import Pending, Sample

SAMPLER = "sampler"
"""The kind of a dedicated sampler's seat."""

RESTING = ("sleeping", "asleep", "waking")
"""States in which a sampler begins no sample."""

CHANGES: Mapping[str, Mapping[str, str]] = {
    "drain": {"ready": "draining"},
    "sleep": {"ready": "sleeping", "draining": "sleeping"},
    "wake": {"draining": "ready", "sleeping": "waking", "asleep": "waking"},
}
"""What an operator may ask of a sampler: its state before, and after."""

EMPTY_REPORT: Mapping[str, object] = {"engine": None, "address": None, "cannot_sleep": None, "versions": []}
"""What a sampler reports: what samples, an inference server's address, why it cannot sleep, the versions in memory."""

_COLUMNS = [FUTURES.c[name] for name in Pending.__dataclass_fields__]
_WAITING = (FUTURES.c.base_model == sa.bindparam("base_model"), FUTURES.c.state == "pending")
_ASSIGNED = (*_WAITING, FUTURES.c.executor == sa.bindparam("executor"))
_INCOMING = (
    sa.select(*_COLUMNS)
    .where(*_ASSIGNED, FUTURES.c.arrival > sa.bindparam("after_arrival"))
    .order_by(FUTURES.c.arrival)
)
_ASSIGNED_IDS = sa.select(FUTURES.c.request_id).where(*_ASSIGNED)
_BY_IDS = (
    sa.select(*_COLUMNS)
    .where(FUTURES.c.request_id.in_(sa.bindparam("request_ids", expanding=True)))
    .where(FUTURES.c.state == "pending", FUTURES.c.executor == sa.bindparam("executor"))
    .order_by(FUTURES.c.arrival)
)
_LOADS = (
    sa.select(FUTURES.c.executor, sa.func.sum(FUTURES.c.num_tokens).label("tokens"))
    .where(*_WAITING, FUTURES.c.executor.is_not(None))
    .group_by(FUTURES.c.executor)
)


class Executors:
    def __init__(self, db: Database) -> None:
        self._db = db

    # Reads.

    def live(self, base_model: str) -> dict[str, int]:
        """The live samplers of a base model, with the waiting tokens of each."""
        names = self._db.scalars(live_samplers(self._db, base_model))
        rows = self._db.rows(_LOADS, {"base_model": base_model}) if names else []
        tokens = {row.executor: int(row.tokens) for row in rows}
        return {name: tokens.get(name, 0) for name in names}

    def owner_address(self, model_id: str) -> str | None:
        """The address at which a run's engine serves versions; None without an address or a live engine."""
        query = (
            sa.select(ENGINES.c.address)
            .join(MODELS, MODELS.c.engine_id == ENGINES.c.engine_id)
            .where(MODELS.c.model_id == model_id, ENGINES.c.lease_expires_at > self._db.clock())
        )
        return self._db.scalar(query)

    # Methods for the sampler.

    def incoming(self, base_model: str, executor: str, after_arrival: int) -> list[Pending]:
        """The requests of a sampler after `after_arrival`."""
        values = {"base_model": base_model, "executor": executor, "after_arrival": after_arrival}
        return [Pending(*row) for row in self._db.rows(_INCOMING, values)]

    def fetch_by_ids(self, executor: str, request_ids: Sequence[str]) -> list[Pending]:
        """The sampler's requests among those of a wake-up; reassigned ones may be older than others."""
        parts = (self._db.rows(_BY_IDS, {"executor": executor, "request_ids": chunk}) for chunk in chunks(request_ids))
        return [Pending(*row) for rows in parts for row in rows]

    def pending_ids(self, base_model: str, executor: str) -> set[str]:
        """The ids of a sampler's pending requests."""
        return set(self._db.scalars(_ASSIGNED_IDS, {"base_model": base_model, "executor": executor}))

    def report(self, executor: str, fields: Mapping[str, object]) -> None:
        """Replace what a sampler reports of itself, see `EMPTY_REPORT`."""
        self._db.execute(ENGINES.update().where(ENGINES.c.engine_id == executor).values(facts=dict(fields)))

    def state_of(self, executor: str) -> str | None:
        return self._db.scalar(sa.select(ENGINES.c.state).where(ENGINES.c.engine_id == executor))

    def change_state(self, executor: str, before: str, after: str, reason: str | None = None) -> bool:
        """False unless the sampler is in the state `before`."""
        in_state = (ENGINES.c.engine_id == executor) & (ENGINES.c.state == before)
        return self._db.execute(ENGINES.update().where(in_state).values(state=after, reason=reason)) == 1

    def reassign(self, base_model: str, executor: str, request_ids: Sequence[str], *, to_samplers: bool) -> None:
        """Reassign requests that a sampler has not begun, to the other samplers, if any, or else to the engines."""
        with self._db.write() as connection:
            samplers = live_samplers(self._db, base_model).where(ENGINES.c.engine_id != executor)
            names = list(connection.scalars(samplers)) if to_samplers else []
            update = FUTURES.update().where(FUTURES.c.executor == executor, FUTURES.c.state == "pending")
            for chunk in chunks(request_ids):
                moved = update.where(FUTURES.c.request_id.in_(chunk))
                connection.execute(moved.values(executor=_round_robin(names)))
            self._db.notify(connection, engine_mailbox(base_model), request_ids)


def live_samplers(db: Database, base_model: str) -> sa.Select[str]:
    """A query for the live samplers of a base model."""
    return (
        sa.select(ENGINES.c.engine_id)
        .where(ENGINES.c.base_model == base_model, ENGINES.c.kind == SAMPLER, ENGINES.c.state == "ready")
        .where(ENGINES.c.lease_expires_at > db.clock())
        .order_by(ENGINES.c.engine_id)
    )


def reassign_all(db: Database, connection: sa.Connection, executor: str, base_model: str) -> None:
    """Within the caller's transaction: reassign the pending requests of an executor that has ended.

    A sampler's requests are spread evenly over the remaining samplers. Without other samplers, and for engines, they
    become unassigned. A cancellation follows its sample.
    """
    pending = (FUTURES.c.base_model == base_model, FUTURES.c.state == "pending", FUTURES.c.executor == executor)
    sampler = sa.exists().where(ENGINES.c.engine_id == executor, ENGINES.c.kind == SAMPLER)
    samplers = live_samplers(db, base_model).where(ENGINES.c.engine_id != executor, sampler)
    names = list(connection.scalars(samplers))
    moved = FUTURES.update().where(*pending).values(executor=_round_robin(names))
    if not names:
        connection.execute(moved)
        return
    returned = moved.returning(FUTURES.c.request_id, FUTURES.c.executor, FUTURES.c.kind)
    rows = connection.execute(returned).all()
    assigned = {row.request_id: row.executor for row in rows}
    for row in rows:
        executor = assigned.get(cancel_target(row.request_id), row.executor) if row.kind == "cancel" else row.executor
        if executor != row.executor:
            connection.execute(FUTURES.update().where(FUTURES.c.request_id == row.request_id).values(executor=executor))


def _round_robin(executors: Sequence[str]) -> sa.ColumnElement[str] | None:
    if not executors:
        return None
    return sa.case(dict(enumerate(executors)), value=FUTURES.c.arrival % len(executors))


class DedicatedSamplers:
    """The dedicated samplers as operators see them."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def all(self) -> list[dict[str, object]]:
        """By base model and id, with their reports and the number of samples that each has; the state is `silent` once
        the lease expired.
        """
        owned = FUTURES.c.executor == ENGINES.c.engine_id
        samples = sa.select(sa.func.count()).where(owned, FUTURES.c.state == "pending").scalar_subquery()
        alive = ENGINES.c.state.in_(("ready", "draining", "loading", *RESTING))
        silent = (ENGINES.c.lease_expires_at <= self._db.clock()) & alive
        columns = (
            *(ENGINES.c.engine_id.label("sampler"), ENGINES.c.base_model, ENGINES.c.holder, ENGINES.c.pid),
            *(sa.case((silent, "silent"), else_=ENGINES.c.state).label("state"), ENGINES.c.reason),
            *(ENGINES.c.started_at, samples.label("samples"), ENGINES.c.facts),
        )
        query = sa.select(*columns).where(ENGINES.c.kind == SAMPLER)
        rows = self._db.rows(query.order_by(ENGINES.c.base_model, ENGINES.c.engine_id))
        samplers = [
            {str(name): value for name, value in row._mapping.items()} for row in rows
        ]  # orjson takes no subclass
        return [row | {**EMPTY_REPORT, **(row.pop("facts") or {})} for row in samplers]

    def find(self, name: str) -> dict[str, object]:
        """The row of a sampler. Raises NotFoundError with the known names."""
        samplers = {str(row["sampler"]): row for row in self.all()}
        if name not in samplers:
            raise NotFoundError(f"there is no sampler {name[:80]!a}; known: {', '.join(samplers) or 'none'}")
        return samplers[name]

    def change(self, name: str, action: str) -> dict[str, object]:
        """Ask a sampler for one of `CHANGES`; returns its row afterwards. Raises NotFoundError, and UserError if its
        state or its engine does not permit it.
        """
        row = self.find(name)
        before, changes = str(row["state"]), CHANGES[action]
        if before not in changes:
            raise UserError(f"sampler {name!r} is {before}; to {action} it, it must be {' or '.join(changes)}")
        if action == "sleep" and (obstacle := row["cannot_sleep"]) != "":
            raise UserError(
                f"sampler {name!r} cannot sleep: {obstacle or 'it has just started; try again in a few seconds'}"
            )
        changed = ENGINES.update().where(ENGINES.c.engine_id == name, ENGINES.c.state == before)
        with self._db.write() as connection:
            if not connection.execute(changed.values(state=changes[before], reason=None)).rowcount:
                raise UserError(f"sampler {name!r} changed its state meanwhile; try again")
            self._db.notify(connection, engine_mailbox(str(row["base_model"]), name), [EVERYTHING])
        return self.find(name)


class Dispatch:
    def __init__(self, executors: Executors) -> None:
        self._waiting_tokens = Loads(executors.live)
        self._prefixes = Prefixes()

    def assign(self, new: NewFuture, sample: Sample, *, inflight: bool = False) -> NewFuture:
        """The request with an executor, if a sampler can take it."""
        if inflight:
            return new
        waiting_tokens = self._waiting_tokens.of(new.base_model)
        with self._waiting_tokens.lock:
            scope = f"{new.tenant_id}\n{sample.version_id or new.base_model}\n"
            executor = self._prefixes.choose(scope, sample.prompt_T, waiting_tokens)
            if executor is None:
                return new
            waiting_tokens[executor] += new.num_tokens
        return replace(new, executor=executor)
