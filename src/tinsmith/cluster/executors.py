"""Executors: which samples were given to which dedicated sampler, and what it needs to know to do them.

A pending sample without an executor is for the engines. One with an executor is for that process alone, as long as it
is alive: its lease has not expired. What was given to one that is not is taken from it by whoever notices first, a
sampler or an engine (`ownership`): `engines.vacate` ends its epoch, so that whatever it still settles changes nothing,
and passes its rows on to the samplers that are left, or to the engines. So does a process that was told to stop.

Dispatch: the server's choice of who takes a sample, made before its row is written, so that it costs no transaction.

Where there are dedicated samplers, `routing` chooses one; otherwise, and for inflight versions, whose weights change
under their name, nobody is chosen and the engines do it. Who there is and what waits for them is asked at most twice a
second, for each base model, by whoever needs it then; in between, what was given out is added. A view that is too old
by a moment does no harm: what was given to a dead sampler is taken from it (`executors`). Called from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sqlalchemy as sa

from tinsmith.cluster.routing import Candidate, Loads, choose, prefix_key
from tinsmith.db.database import Database
from tinsmith.db.schema import ENGINES, FUTURES, MODELS
from tinsmith.db.wakeups import engine_mailbox
from tinsmith.store.futures import NewFuture, cancelled_name
from tinsmith.types import Pending, Sample

SAMPLER = "sampler"
"""The kind of seat of a dedicated sampler."""

_CHUNK = 500  # variables of one IN (...) clause

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

    # Who there is.

    def live(self, base_model: str) -> list[Candidate]:
        """The samplers that take samples now, and the tokens that wait for each of them."""
        with self._db.read() as connection:
            names = list(connection.scalars(live_samplers(self._db, base_model)))
            rows = connection.execute(_LOADS, {"base_model": base_model}).all() if names else []
        tokens = {row.executor: int(row.tokens) for row in rows}
        return [Candidate(name, tokens.get(name, 0)) for name in names]

    def owner_address(self, model_id: str) -> str | None:
        """Where the engine that owns a run hands over versions; None if it does not, or is not alive."""
        query = (
            sa.select(ENGINES.c.address)
            .join(MODELS, MODELS.c.engine_id == ENGINES.c.engine_id)
            .where(MODELS.c.model_id == model_id, ENGINES.c.lease_expires_at > self._db.clock())
        )
        with self._db.read() as connection:
            return connection.scalar(query)

    # The sampler's side.

    def incoming(self, base_model: str, executor: str, after_arrival: int) -> list[Pending]:
        """What was given to a sampler after `after_arrival`."""
        asked = {"base_model": base_model, "executor": executor, "after_arrival": after_arrival}
        with self._db.read() as connection:
            return [Pending(**row._mapping) for row in connection.execute(_INCOMING, asked)]

    def named(self, executor: str, request_ids: Sequence[str]) -> list[Pending]:
        """The same of requests that a wake-up named: they may be older, if another sampler had them before."""
        found: list[Pending] = []
        for start in range(0, len(request_ids), _CHUNK):
            asked = {"executor": executor, "request_ids": request_ids[start : start + _CHUNK]}
            with self._db.read() as connection:
                found += [Pending(**row._mapping) for row in connection.execute(_NAMED, asked)]
        return found

    def given_ids(self, base_model: str, executor: str) -> set[str]:
        """Everything that a sampler still has to do."""
        with self._db.read() as connection:
            return set(connection.scalars(_GIVEN_IDS, {"base_model": base_model, "executor": executor}))

    def hand_on(self, base_model: str, executor: str, request_ids: Sequence[str], *, to_samplers: bool) -> None:
        """Give away what a sampler has not begun: to the other samplers, if there are any, or to the engines."""
        with self._db.write() as connection:
            others = live_samplers(self._db, base_model).where(ENGINES.c.engine_id != executor)
            names = list(connection.scalars(others)) if to_samplers else []
            for start in range(0, len(request_ids), _CHUNK):
                some = FUTURES.c.request_id.in_(request_ids[start : start + _CHUNK])
                mine = (FUTURES.c.executor == executor) & (FUTURES.c.state == "pending")
                connection.execute(FUTURES.update().where(some, mine).values(executor=_in_turns(names)))
            self._db.notify(connection, engine_mailbox(base_model), request_ids)


def live_samplers(db: Database, base_model: str) -> sa.Select[str]:
    """The samplers of a base model that take samples now."""
    return (
        sa.select(ENGINES.c.engine_id)
        .where(ENGINES.c.base_model == base_model, ENGINES.c.kind == SAMPLER, ENGINES.c.state == "ready")
        .where(ENGINES.c.lease_expires_at > db.clock())
        .order_by(ENGINES.c.engine_id)
    )


def pass_on(db: Database, connection: sa.Connection, executor: str, base_model: str) -> None:
    """In one transaction with whatever else the caller does: what waits for an executor that is gone goes to others.

    A sampler's go to the samplers that are left, evenly; if there are none, and for engines, they are nobody's. A
    request to cancel goes where the sample goes that it names.
    """
    theirs = (FUTURES.c.base_model == base_model, FUTURES.c.state == "pending", FUTURES.c.executor == executor)
    sampler = sa.exists().where(ENGINES.c.engine_id == executor, ENGINES.c.kind == SAMPLER)
    others = live_samplers(db, base_model).where(ENGINES.c.engine_id != executor, sampler)
    names = list(connection.scalars(others))
    moved = FUTURES.update().where(*theirs).values(executor=_in_turns(names))
    if not names:
        connection.execute(moved)
        return
    returned = moved.returning(FUTURES.c.request_id, FUTURES.c.executor, FUTURES.c.kind)
    rows = connection.execute(returned).all()
    placed = {row.request_id: row.executor for row in rows}
    for row in rows:
        goes_to = placed.get(cancelled_name(row.request_id), row.executor) if row.kind == "cancel" else row.executor
        if goes_to != row.executor:
            connection.execute(FUTURES.update().where(FUTURES.c.request_id == row.request_id).values(executor=goes_to))


def _in_turns(executors: Sequence[str]) -> sa.ColumnElement[str] | None:
    if not executors:
        return None
    return sa.case(dict(enumerate(executors)), value=FUTURES.c.arrival % len(executors))


class Dispatch:
    def __init__(self, executors: Executors) -> None:
        self._executors = executors
        self._waiting_tokens = Loads(self._look)

    def assigned(self, new: NewFuture, sample: Sample, *, inflight: bool = False) -> NewFuture:
        """The same request, given to a sampler if there is one for it."""
        if inflight:
            return new
        waiting_tokens = self._waiting_tokens.of(new.base_model)
        with self._waiting_tokens.lock:
            candidates = [Candidate(name, tokens) for name, tokens in waiting_tokens.items()]
            executor = choose(prefix_key(sample.version_id or new.base_model, sample.prompt_T), candidates)
            if executor is None:
                return new
            waiting_tokens[executor] += new.num_tokens
        return replace(new, executor=executor)

    def _look(self, base_model: str) -> dict[str, int]:
        return {one.executor: one.waiting_tokens for one in self._executors.live(base_model)}
