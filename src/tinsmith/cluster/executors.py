"""Executors: which process computes a sample, and how the server chooses it.

A pending sample without an executor is for the engines. One with an executor is for that process alone while its lease
is valid. The first sampler or engine that notices an expired lease calls `engines.vacate`, which ends the epoch, so
that late settlements change nothing, and passes the samples to the remaining samplers or to the engines. A stopping
process passes on its own samples in the same way.

`Dispatch` chooses the executor before the row is written, so that it costs no transaction. It uses `routing` where
there are dedicated samplers; without them, and for inflight versions, whose weights change under their name, no
executor is chosen. The samplers and their queues are read at most twice a second for each base model; assignments in
between are added. A stale view is harmless, because samples of a dead sampler are passed on. Thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sqlalchemy as sa

from tinsmith.cluster.routing import Loads, Prefixes
from tinsmith.db.database import Database, chunks
from tinsmith.db.schema import ENGINES, FUTURES, MODELS
from tinsmith.db.wakeups import engine_mailbox
from tinsmith.store.futures import NewFuture, cancelled_name
from tinsmith.types import Pending, Sample

SAMPLER = "sampler"
"""The kind of a dedicated sampler's seat."""

_COLUMNS = [FUTURES.c[name] for name in Pending.__dataclass_fields__]
_WAITING = (FUTURES.c.base_model == sa.bindparam("base_model"), FUTURES.c.state == "pending")
_GIVEN = (*_WAITING, FUTURES.c.executor == sa.bindparam("executor"))
_INCOMING = (
    sa.select(*_COLUMNS).where(*_GIVEN, FUTURES.c.arrival > sa.bindparam("after_arrival")).order_by(FUTURES.c.arrival)
)
_GIVEN_IDS = sa.select(FUTURES.c.request_id).where(*_GIVEN)
_NAMED = (
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

    # Reading.

    def live(self, base_model: str) -> dict[str, int]:
        """The live samplers of a base model, with the tokens that wait for each."""
        names = self._db.scalars(live_samplers(self._db, base_model))
        rows = self._db.rows(_LOADS, {"base_model": base_model}) if names else []
        tokens = {row.executor: int(row.tokens) for row in rows}
        return {name: tokens.get(name, 0) for name in names}

    def owner_address(self, model_id: str) -> str | None:
        """The address at which a run's engine serves versions; None if it serves none or is not alive."""
        query = (
            sa.select(ENGINES.c.address)
            .join(MODELS, MODELS.c.engine_id == ENGINES.c.engine_id)
            .where(MODELS.c.model_id == model_id, ENGINES.c.lease_expires_at > self._db.clock())
        )
        return self._db.scalar(query)

    # The sampler's side.

    def incoming(self, base_model: str, executor: str, after_arrival: int) -> list[Pending]:
        """A sampler's requests that arrived after `after_arrival`."""
        values = {"base_model": base_model, "executor": executor, "after_arrival": after_arrival}
        return [Pending(*row) for row in self._db.rows(_INCOMING, values)]

    def named(self, executor: str, request_ids: Sequence[str]) -> list[Pending]:
        """A sampler's requests among those that a wake-up named; they may be older, if passed on from another."""
        parts = (self._db.rows(_NAMED, {"executor": executor, "request_ids": some}) for some in chunks(request_ids))
        return [Pending(*row) for rows in parts for row in rows]

    def given_ids(self, base_model: str, executor: str) -> set[str]:
        """The ids of a sampler's pending requests."""
        return set(self._db.scalars(_GIVEN_IDS, {"base_model": base_model, "executor": executor}))

    def hand_on(self, base_model: str, executor: str, request_ids: Sequence[str], *, to_samplers: bool) -> None:
        """Pass on requests that a sampler has not begun: to the other samplers, if there are any, or to the engines."""
        with self._db.write() as connection:
            others = live_samplers(self._db, base_model).where(ENGINES.c.engine_id != executor)
            names = list(connection.scalars(others)) if to_samplers else []
            mine = FUTURES.update().where(FUTURES.c.executor == executor, FUTURES.c.state == "pending")
            for some in chunks(request_ids):
                moved = mine.where(FUTURES.c.request_id.in_(some))
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


def pass_on(db: Database, connection: sa.Connection, executor: str, base_model: str) -> None:
    """Within the caller's transaction: pass on the pending requests of an executor that is gone.

    A sampler's requests are spread evenly over the remaining samplers. If there are none, and for engines, they become
    unassigned. A cancellation goes where its sample goes.
    """
    theirs = (FUTURES.c.base_model == base_model, FUTURES.c.state == "pending", FUTURES.c.executor == executor)
    sampler = sa.exists().where(ENGINES.c.engine_id == executor, ENGINES.c.kind == SAMPLER)
    others = live_samplers(db, base_model).where(ENGINES.c.engine_id != executor, sampler)
    names = list(connection.scalars(others))
    moved = FUTURES.update().where(*theirs).values(executor=_round_robin(names))
    if not names:
        connection.execute(moved)
        return
    returned = moved.returning(FUTURES.c.request_id, FUTURES.c.executor, FUTURES.c.kind)
    rows = connection.execute(returned).all()
    assigned = {row.request_id: row.executor for row in rows}
    for row in rows:
        executor = assigned.get(cancelled_name(row.request_id), row.executor) if row.kind == "cancel" else row.executor
        if executor != row.executor:
            connection.execute(FUTURES.update().where(FUTURES.c.request_id == row.request_id).values(executor=executor))


def _round_robin(executors: Sequence[str]) -> sa.ColumnElement[str] | None:
    if not executors:
        return None
    return sa.case(dict(enumerate(executors)), value=FUTURES.c.arrival % len(executors))


class Dispatch:
    def __init__(self, executors: Executors) -> None:
        self._waiting_tokens = Loads(executors.live)
        self._prefixes = Prefixes()

    def assigned(self, new: NewFuture, sample: Sample, *, inflight: bool = False) -> NewFuture:
        """The request with an executor, if there is a sampler for it."""
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
