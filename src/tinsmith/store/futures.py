"""Futures: the durable queue between server and engines, and the write-ahead log from which model state is rebuilt.

States: pending -> done | failed; a request that is invalid at admission is stored as refused, which is settled.
Invariants: a request_id, a (model_id, seq_id) and a (sampling_session_id, seq_id) exist at most once; a settled future
never changes; one transaction settles a step with every row that the step changes. The server submits and reads; the
engine settles. Payloads are compared here, never parsed.

The settled samples of a sampling session are numbered (`settle_order`) in the order in which they become visible, for
polls of a whole session. The settling transaction assigns the number. Both the engine and a refusing server may settle:
SQLite has one writer at a time; on Postgres the sampling session's row is locked first.

Cancellation: only waiting and running samples can be cancelled. A cancellation is itself a future, so that it survives
an engine's restart. It names one sample, or a sampling session for all its samples on one engine or sampler. Settling
it deletes its row.

Retention: the settled futures of ended sessions are deleted with their bodies and results, in batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import orjson
import sqlalchemy as sa
import zstandard

from tinsmith.db.database import Database, chunks, now
from tinsmith.db.schema import BODIES, ENGINES, FUTURES, MODELS, RESULTS, SAMPLERS, SESSIONS
from tinsmith.db.statements import Effects, Statement, execute
from tinsmith.db.wakeups import SERVER, engine_mailbox
from tinsmith.errors import GoneError, NotFoundError, SeqIdTakenError, TinsmithError, UserError
from tinsmith.runtime.failpoints import hit
from tinsmith.telemetry.tracing import CURRENT
from tinsmith.types import Pending

REPLAYED_KINDS = ("load_model", "load_weights", "forward_backward", "optim_step", "save_weights_for_sampler")
"""The kinds that change a model's state or versions; their bodies are kept until two snapshots cover them."""

RENUMBERED_FIELDS = {"save_weights_for_sampler": "sampling_session_seq_id"}
"""Kind of request -> the field that the SDK numbers anew each time it sends the same request again. The first number
counts, since the result names the sampling session.
"""

UNBOUNDED = 2**62
_CANCEL = ":cancel"
_DELETE_BATCH = 500


@dataclass(frozen=True, slots=True)
class NewFuture:
    """`run_id` is the run whose ephemeral version is sampled. `engine_id` is the engine of the run, if known; only
    that engine is woken. `executor` is the engine or sampler of a request without a run.
    """

    request_id: str
    tenant_id: str
    session_id: str
    base_model: str
    kind: str
    body: bytes
    num_tokens: int = 0
    model_id: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    run_id: str | None = None
    engine_id: str | None = None
    executor: str | None = None
    shared_tokens: int = 0

    @property
    def cost_tokens(self) -> int:
        """The tokens that the request is expected to send through the model."""
        return self.num_tokens - self.shared_tokens


@dataclass(frozen=True, slots=True)
class FutureOutcome:
    """The result of a future: `error` and `category`, or `body` of `result_type` proto or json.

    `body_bytes` is the size of the body; `body` is None if it is larger than the caller's limit.
    """

    result_type: str | None
    body: bytes | None
    error: str | None
    category: str | None
    body_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SampleCost:
    """The tokens of one sample: its prompt, the cached part of the prompt, and all answers."""

    prefill_tokens: int
    cached_tokens: int
    sampled_tokens: int


@dataclass(frozen=True, slots=True)
class WorkTimes:
    """When an engine worked on a request, and in which step."""

    started_at: float
    ran_at: float
    step: int | None


@dataclass(frozen=True, slots=True)
class Settlement:
    """The result of one future. `effects` are statements for the same transaction; the settling process runs `clean_up`
    after the wake-ups. `cost` is set for samples.
    """

    request_id: str
    body: bytes | None = None
    result_type: str = "json"
    error: TinsmithError | None = None
    keep_body: bool = False
    effects: Effects = field(default=())
    clean_up: Callable[[], None] | None = None
    cost: SampleCost | None = None
    work_times: WorkTimes | None = None


@dataclass(frozen=True, slots=True)
class WaitingKind:
    """Pending requests of one kind, and the arrival of the oldest."""

    base_model: str
    kind: str
    arrival: int


@dataclass(frozen=True, slots=True)
class FutureUsage:
    """The token counts of a settled future."""

    request_id: str
    tenant_id: str
    session_id: str
    base_model: str
    kind: str
    state: str
    num_tokens: int
    prefill_tokens: int | None
    cached_tokens: int | None
    sampled_tokens: int | None
    settled_at: float | None


# Statements of every request are built once: building and hashing them takes longer than their execution by SQLite.
_COLUMNS = [FUTURES.c[name] for name in Pending.__dataclass_fields__]
_COPIED_COLUMNS = (
    *("request_id", "tenant_id", "session_id", "base_model", "kind", "model_id", "sampling_session_id", "seq_id"),
    *("num_tokens", "shared_tokens", "executor"),
)
"""The columns with the values of a NewFuture's fields."""

# Submission.
_FIND = sa.select(FUTURES.c.arrival).where(FUTURES.c.request_id == sa.bindparam("request_id"))
_ADD_BODY = Statement(BODIES.insert())
_ADD_RESULT = Statement(RESULTS.insert())
_STORED = Statement(
    sa.select(FUTURES.c.kind, FUTURES.c.body_bytes, BODIES.c.body)
    .select_from(FUTURES.outerjoin(BODIES, BODIES.c.request_id == FUTURES.c.request_id))
    .where(FUTURES.c.request_id == sa.bindparam("request_id"))
)

# Outcomes.
_OUTCOME = Statement(
    sa.select(
        FUTURES.c.state,
        FUTURES.c.result_type,
        FUTURES.c.error,
        FUTURES.c.category,
        sa.func.length(RESULTS.c.body).label("body_bytes"),
        sa.case((sa.func.length(RESULTS.c.body) <= sa.bindparam("inline_bytes"), RESULTS.c.body)).label("body"),
    )
    .select_from(FUTURES.outerjoin(RESULTS, RESULTS.c.request_id == FUTURES.c.request_id))
    .where(FUTURES.c.request_id == sa.bindparam("request_id"), FUTURES.c.tenant_id == sa.bindparam("tenant_id"))
)
_FILTER_SETTLED = sa.select(FUTURES.c.request_id).where(
    FUTURES.c.request_id.in_(sa.bindparam("request_ids", expanding=True)), FUTURES.c.state != "pending"
)

# The order in which the samples of a sampling session are settled.
_EARLIER = FUTURES.alias("earlier")
_LAST_ORDER = sa.select(sa.func.max(_EARLIER.c.settle_order))
_NEXT_ORDER = _LAST_ORDER.where(_EARLIER.c.sampling_session_id == FUTURES.c.sampling_session_id).correlate(FUTURES)
_ORDER_OF = _LAST_ORDER.where(_EARLIER.c.sampling_session_id == sa.bindparam("sampling_session_id"))
_SESSIONS_OF = sa.select(FUTURES.c.sampling_session_id).where(
    FUTURES.c.request_id.in_(sa.bindparam("request_ids", expanding=True))
)
# In a fixed order, so that transactions cannot deadlock.
_LOCKED_SESSIONS = sa.select(SAMPLERS.c.num_clones).order_by(SAMPLERS.c.sampling_session_id).with_for_update()
_LOCK_SESSION = _LOCKED_SESSIONS.where(SAMPLERS.c.sampling_session_id == sa.bindparam("sampling_session_id"))
_LOCK_SESSIONS = _LOCKED_SESSIONS.where(SAMPLERS.c.sampling_session_id.in_(_SESSIONS_OF))

# Settlement.
_BODIES = sa.select(BODIES).where(BODIES.c.request_id.in_(sa.bindparam("request_ids", expanding=True)))
_BODY = Statement(sa.select(BODIES).where(BODIES.c.request_id == sa.bindparam("request_id")))
_FREE = Statement(BODIES.delete().where(BODIES.c.request_id == sa.bindparam("freed_id")))
_COST, _WORK = tuple(SampleCost.__dataclass_fields__), tuple(WorkTimes.__dataclass_fields__)
_SETTLED_COLUMNS = ("state", "error", "category", "result_type", "settled_at", *_COST, *_WORK)
_SETTLE = Statement(
    FUTURES.update()
    .where(FUTURES.c.request_id == sa.bindparam("settled_id"), FUTURES.c.state == "pending")
    .values({name: sa.bindparam(name) for name in _SETTLED_COLUMNS})
    .values(
        settle_order=sa.case(
            (FUTURES.c.sampling_session_id.is_not(None), sa.func.coalesce(_NEXT_ORDER.scalar_subquery(), 0) + 1)
        )
    )
)
_ADVANCE = Statement(
    MODELS.update()
    .where(MODELS.c.model_id == sa.bindparam("advanced_id"), MODELS.c.applied_seq_id < sa.bindparam("to_seq_id"))
    .values(applied_seq_id=sa.bindparam("to_seq_id"), last_request_at=sa.bindparam("at"))
)

# Cancellation: the engine or sampler of a sample or its run (`cluster.ownership`).
_WITH_OWNERS = FUTURES.outerjoin(SAMPLERS, SAMPLERS.c.sampling_session_id == FUTURES.c.sampling_session_id).outerjoin(
    MODELS, MODELS.c.model_id == SAMPLERS.c.model_id
)
_OWNER = sa.func.coalesce(FUTURES.c.executor, MODELS.c.engine_id).label("owner")

# Retention.
_USAGE_COLUMNS = [FUTURES.c[name] for name in FutureUsage.__dataclass_fields__]


class Futures:
    def __init__(
        self,
        db: Database,
        wake: Callable[[str, str | None], None] | None = None,
        count: Callable[[str, str, bool], None] | None = None,
        engine_for_sample: Callable[[str, str], str | None] | None = None,
    ) -> None:
        """For each stored request, `wake` is called with its base model and its engine (None: all engines), and `count`
        with its kind, its tenant and whether it was refused. `engine_for_sample` returns the engine for a sample
        without a run, by base model and request_id.
        """
        self._db = db
        self._wake = wake
        self._count = count
        self._engine_for_sample = engine_for_sample
        self._add = Statement(db.insert_once(FUTURES))

    # Methods for the server.

    def submit(self, new: NewFuture, refusal: UserError | None = None) -> str:
        """Store a request; a repetition changes nothing. Returns the request_id.

        Raises SeqIdTakenError if the seq_id belongs to another request.
        """
        hit("submit.before")
        if self._engine_for_sample and new.kind == "sample" and not (refusal or new.run_id or new.executor):
            new = replace(new, executor=self._engine_for_sample(new.base_model, new.request_id))
        target = new.executor or new.engine_id
        row = _row(new, "refused" if refusal else "pending", refusal)
        # Level 1 keeps the cost of a megabyte body near a millisecond; compressed outside the write lock.
        packed = None if refusal else zstandard.ZstdCompressor(level=1).compress(new.body)
        with self._db.write() as connection:
            if refusal and new.sampling_session_id:
                row["settle_order"] = self._next_order(connection, new.sampling_session_id)
            if self._add.count(connection, row) == 0:
                _refuse_other_request(connection, new, compare_bodies=refusal is None)
                return new.request_id
            if packed is not None:
                _ADD_BODY.count(connection, {"request_id": new.request_id, "body": packed})
            self._db.notify(connection, engine_mailbox(new.base_model, target), [new.request_id])
            if refusal:
                self._db.notify(connection, SERVER, [new.request_id])
        hit("submit.stored")
        if self._count:
            self._count(new.kind, new.tenant_id, refusal is not None)
        if self._wake:
            self._wake(new.base_model, target)
        return new.request_id

    def record(self, new: NewFuture, answer: bytes, effects: Effects = ()) -> str:
        """Store a request that needs no engine as done, in one transaction with its effects. Returns the request_id."""
        with self._db.write() as connection:
            if connection.scalar(_FIND, {"request_id": new.request_id}) is not None:
                return new.request_id
            if self._add.count(connection, _row(new, "done")) == 0:
                return new.request_id
            _ADD_RESULT.count(connection, {"request_id": new.request_id, "body": answer})
            for effect in effects:
                execute(connection, effect)
        return new.request_id

    def _next_order(self, connection: sa.Connection, sampling_session_id: str) -> int:
        session = {"sampling_session_id": sampling_session_id}
        self._db.lock_rows(connection, _LOCK_SESSION, session)
        return (connection.scalar(_ORDER_OF, session) or 0) + 1

    def outcome(self, tenant_id: str, request_id: str, inline_bytes: int = UNBOUNDED) -> FutureOutcome | None:
        """The outcome of a request, None while it is pending. A body of more than `inline_bytes` is omitted.

        Raises NotFoundError, and GoneError if the result was acknowledged and deleted.
        """
        values = {"request_id": request_id, "tenant_id": tenant_id, "inline_bytes": inline_bytes}
        row = self._db.first(_OUTCOME, values)
        if row is None:
            raise NotFoundError(f"request_id {request_id!r} is unknown, or its result has expired")
        state, result_type, error, category, body_bytes, body = row
        if state == "pending":
            return None
        if state == "done" and body_bytes is None:
            raise GoneError(f"the result of {request_id!r} was acknowledged and deleted")
        return FutureOutcome(result_type, body, error, category, body_bytes)

    def filter_settled(self, request_ids: Sequence[str]) -> list[str]:
        """Return those of `request_ids` that are settled."""
        parts = (self._db.scalars(_FILTER_SETTLED, {"request_ids": chunk}) for chunk in chunks(request_ids))
        return [request_id for part in parts for request_id in part]

    def cancel(self, tenant_id: str, request_id: str, reason: str) -> None:
        """Cancel a pending sample. Raises NotFoundError.

        Does nothing for a settled request and for other kinds: operations on a model are ordered, and later ones may
        depend on this one.
        """
        query = (
            sa.select(FUTURES.c.session_id, FUTURES.c.base_model, FUTURES.c.kind, FUTURES.c.state, _OWNER)
            .select_from(_WITH_OWNERS)
            .where(FUTURES.c.request_id == request_id, FUTURES.c.tenant_id == tenant_id)
        )
        row = self._db.first(query)
        if row is None:
            raise NotFoundError(f"request_id {request_id!r} is unknown, or its result has expired")
        if row.kind == "sample" and row.state == "pending":
            self._submit_cancel(request_id, tenant_id, row.session_id, row.base_model, row.owner, reason)

    def cancel_of_closed_sessions(self) -> int:
        """Cancel the pending samples of closed sessions; returns the number of their sampling sessions."""
        sampling_session = (FUTURES.c.sampling_session_id, FUTURES.c.tenant_id, FUTURES.c.session_id)
        query = (
            sa.select(*sampling_session, FUTURES.c.base_model, _OWNER, SESSIONS.c.reason)
            .select_from(_WITH_OWNERS.join(SESSIONS, SESSIONS.c.session_id == FUTURES.c.session_id))
            # For the index of the engines' queues, since most rows are settled.
            .where(FUTURES.c.base_model.in_(sa.select(ENGINES.c.base_model)))
            .where(FUTURES.c.state == "pending", FUTURES.c.kind == "sample", SESSIONS.c.closed_at.is_not(None))
            .distinct()
        )
        rows = self._db.rows(query)
        for name, tenant_id, session_id, base_model, owner, reason in rows:
            self._submit_cancel(name, tenant_id, session_id, base_model, owner, f"its session ended ({reason})")
        return len({row.sampling_session_id for row in rows})

    def _submit_cancel(
        self, name: str, tenant_id: str, session_id: str, base_model: str, owner: str | None, reason: str
    ) -> None:
        """`name` is a sample's request_id, or a sampling session for all of its samples on `owner`."""
        suffix = "" if owner is None else f".{hashlib.blake2b(owner.encode(), digest_size=4).hexdigest()}"
        request_id = f"{name}{_CANCEL}{suffix}"
        body = reason.encode()
        self.submit(NewFuture(request_id, tenant_id, session_id, base_model, "cancel", body, executor=owner))

    def base_model_of(self, request_id: str) -> str | None:
        """The base model whose queue holds the request."""
        return self._db.scalar(sa.select(FUTURES.c.base_model).where(FUTURES.c.request_id == request_id))

    def kind_of(self, tenant_id: str, request_id: str) -> str | None:
        of_tenant = (FUTURES.c.request_id == request_id) & (FUTURES.c.tenant_id == tenant_id)
        return self._db.scalar(sa.select(FUTURES.c.kind).where(of_tenant))

    def next_seq_id(self, model_id: str) -> int:
        """One more than the model's highest seq_id; another request may take it first."""
        highest = self._db.scalar(sa.select(sa.func.max(FUTURES.c.seq_id)).where(FUTURES.c.model_id == model_id))
        return 1 if highest is None else highest + 1

    def delete_of_sessions(self, session_ids: Sequence[str], keep: Callable[[Sequence[FutureUsage]], Effects]) -> int:
        """Delete all settled futures of ended sessions, with bodies and results; returns how many.

        `keep` receives the usage of the futures that a transaction deletes and returns statements for the same
        transaction, so that usage is counted exactly once. Sets `forgotten_at` of sessions without futures.
        """
        has_futures = sa.exists().where(FUTURES.c.session_id == SESSIONS.c.session_id)
        deleted = 0
        for session_id in session_ids:
            while num_deleted := self._delete_some(session_id, keep):
                deleted += num_deleted
            emptied = SESSIONS.update().where(SESSIONS.c.session_id == session_id, ~has_futures)
            self._db.execute(emptied.values(forgotten_at=now()))
        return deleted

    def _delete_some(self, session_id: str, keep: Callable[[Sequence[FutureUsage]], Effects]) -> int:
        settled = sa.select(FUTURES.c.arrival).where(FUTURES.c.session_id == session_id, FUTURES.c.state != "pending")
        is_in_batch = FUTURES.c.arrival.in_(settled.limit(_DELETE_BATCH))
        with self._db.write() as connection:
            deleted = connection.execute(FUTURES.delete().where(is_in_batch).returning(*_USAGE_COLUMNS))
            usage = [FutureUsage(**row._mapping) for row in deleted]
            ids = [usage_row.request_id for usage_row in usage]
            for table in (RESULTS, BODIES):
                connection.execute(table.delete().where(table.c.request_id.in_(ids)))
            for effect in keep(usage):
                execute(connection, effect)
        return len(usage)

    # Methods for the supervisor of engines on demand.

    def list_waiting(self, base_models: Collection[str]) -> list[WaitingKind]:
        """The kinds of pending requests of these base models."""
        queue = (FUTURES.c.base_model.in_(base_models), FUTURES.c.state == "pending")
        oldest = sa.func.min(FUTURES.c.arrival).label("arrival")
        query = sa.select(FUTURES.c.base_model, FUTURES.c.kind, oldest).where(*queue)
        rows = self._db.rows(query.group_by(FUTURES.c.base_model, FUTURES.c.kind))
        return [WaitingKind(**row._mapping) for row in rows]

    def list_pending(self, base_model: str, kinds: Collection[str] = ()) -> list[Pending]:
        """The pending requests of a base model, of some kinds or of all, in order of arrival."""
        query = sa.select(*_COLUMNS).where(FUTURES.c.base_model == base_model, FUTURES.c.state == "pending")
        query = query.where(FUTURES.c.kind.in_(kinds)) if kinds else query
        return [Pending(**row._mapping) for row in self._db.rows(query.order_by(FUTURES.c.arrival))]

    def newest_arrival(self, base_model: str) -> int:
        """The arrival of a base model's newest request, 0 without any: it changes with each request."""
        # A query for each state uses the index of the engines' queues.
        queries = [
            sa.select(sa.func.max(FUTURES.c.arrival)).where(
                FUTURES.c.base_model == base_model, FUTURES.c.state == state
            )
            for state in ("pending", "done", "failed", "refused")
        ]
        return max(self._db.scalar(query) or 0 for query in queries)

    # Methods for the engine.

    def list_refused(self, model_id: str, from_seq_id: int) -> list[Pending]:
        """The refused requests of a model from `from_seq_id` on, which the engine skips."""
        from_number = (FUTURES.c.model_id == model_id) & (FUTURES.c.seq_id >= from_seq_id)
        query = sa.select(*_COLUMNS).where(from_number, FUTURES.c.state == "refused")
        return [Pending(**row._mapping) for row in self._db.rows(query)]

    def bodies(self, request_ids: Sequence[str]) -> dict[str, bytes]:
        """The request bodies as the clients sent them, by request_id."""
        body_by_id: dict[str, bytes] = {}
        unpack = zstandard.ZstdDecompressor().decompress
        with self._db.read() as connection:
            for chunk in chunks(request_ids):
                is_single = len(chunk) == 1  # the usual case; an IN list is compiled for each length
                rows = _BODY.rows(connection, {"request_id": chunk[0]}) if is_single else None
                for request_id, body in rows or connection.execute(_BODIES, {"request_ids": chunk}):
                    body_by_id[request_id] = unpack(body)
        return body_by_id

    def settle(
        self, settlements: Sequence[Settlement], applied: Mapping[str, int], *, error_state: str = "failed"
    ) -> None:
        """Settle a step in one transaction: results, freed bodies, effects and the progress of each model.

        With the `error_state` refused, errors are as those at admission: the next engine skips their numbers.
        """
        freed_ids = [settlement.request_id for settlement in settlements if not settlement.keep_body]
        with self._db.write() as connection:
            settled_at = now()  # once the write lock is held
            request_ids = [settlement.request_id for settlement in settlements]
            self._db.lock_rows(connection, _LOCK_SESSIONS, {"request_ids": request_ids})
            for settlement in settlements:
                values = _settlement_values(settlement, settled_at, error_state)
                changed = _SETTLE.count(connection, values)
                if changed != 1:
                    continue  # settled by an earlier engine
                if settlement.body is not None and settlement.error is None:
                    _ADD_RESULT.count(connection, {"request_id": settlement.request_id, "body": settlement.body})
                for effect in settlement.effects:
                    execute(connection, effect)
            for request_id in freed_ids:
                _FREE.count(connection, {"freed_id": request_id})
            for model_id, seq_id in applied.items():
                _ADVANCE.count(connection, {"advanced_id": model_id, "to_seq_id": seq_id, "at": settled_at})
            self._db.notify(connection, SERVER, request_ids)
            hit("settle.uncommitted")

    def log_of(self, model_id: str, after_seq_id: int, up_to_seq_id: int) -> list[Pending]:
        """The operations to replay on a snapshot that covers `after_seq_id`, in order."""
        query = (
            sa.select(*_COLUMNS)
            .where(FUTURES.c.model_id == model_id, FUTURES.c.kind.in_(REPLAYED_KINDS))
            .where(FUTURES.c.state.in_(("done", "failed")))
            .where(FUTURES.c.seq_id > after_seq_id, FUTURES.c.seq_id <= up_to_seq_id)
            .order_by(FUTURES.c.seq_id)
        )
        return [Pending(**row._mapping) for row in self._db.rows(query)]

    def settlement_time(self, request_id: str) -> float | None:
        return self._db.scalar(sa.select(FUTURES.c.settled_at).where(FUTURES.c.request_id == request_id))


def cancel_target(request_id: str) -> str:
    """The target of a cancellation: a sample, or a sampling session for all of its samples."""
    return request_id.rpartition(_CANCEL)[0]


def deletion(request_id: str) -> sa.Executable:
    """A statement for the transaction that settles a request without keeping its row."""
    return FUTURES.delete().where(FUTURES.c.request_id == request_id)


def _row(new: NewFuture, state: str, refusal: UserError | None = None) -> dict[str, object]:
    created_at = now()
    return {
        **{name: getattr(new, name) for name in _COPIED_COLUMNS},
        "state": state,
        "body_bytes": len(new.body) if state == "pending" else 0,
        "error": _storable_text(refusal) if refusal else None,
        "category": refusal.category if refusal else None,
        "result_type": "json" if state == "done" else None,
        "created_at": created_at,
        "settled_at": None if state == "pending" else created_at,
        "settle_order": None,
        "traceparent": CURRENT.get(),
    }


def _refuse_other_request(connection: sa.Connection, new: NewFuture, *, compare_bodies: bool) -> None:
    """Raise SeqIdTakenError unless `new`, which could not be added, equals the request stored under its request_id.

    The length of a body is always compared, its bytes until it is freed. Requests without a seq_id are not compared,
    because their request_id names their effect.
    """
    stored = _STORED.first(connection, {"request_id": new.request_id})
    owner = f"model {new.model_id!r}" if new.model_id else f"sampling session {new.sampling_session_id!r}"
    if stored is None:
        raise SeqIdTakenError(
            f"seq_id {new.seq_id} of {owner} belongs to another request, which was sent without a seq_id and took the "
            "next number; send all requests of a model with a seq_id, or all without"
        )
    kind, body_bytes, packed = stored
    if new.seq_id is None:
        return
    is_same = kind == new.kind
    if is_same and compare_bodies and body_bytes:
        body = None if packed is None else zstandard.ZstdDecompressor().decompress(packed)
        is_same = _is_same_body(new, body_bytes, body)
    if not is_same:
        raise SeqIdTakenError(
            f"seq_id {new.seq_id} of {owner} belongs to another request ({kind}) with another body; only an identical "
            "request may be sent again under its seq_id, so use the next number"
        )


def _is_same_body(new: NewFuture, body_bytes: int, stored: bytes | None) -> bool:
    """Whether the body is the stored one, of which only the length is known once it is freed."""
    field = RENUMBERED_FIELDS.get(new.kind)
    fields = orjson.loads(new.body) if field else {}
    if field not in fields:
        return body_bytes == len(new.body) and stored in (None, new.body)
    return stored is None or {**orjson.loads(stored), field: None} == {**fields, field: None}


def _settlement_values(settlement: Settlement, settled_at: float, error_state: str) -> dict[str, object]:
    """The parameters of `_SETTLE`."""
    error, cost, times = settlement.error, settlement.cost, settlement.work_times
    return {
        "settled_id": settlement.request_id,
        "state": error_state if error else "done",
        "error": _storable_text(error) if error else None,
        "category": error.category if error else None,
        "result_type": None if error else settlement.result_type,
        "settled_at": settled_at,
        **{name: getattr(cost, name, None) for name in _COST},
        **{name: getattr(times, name, None) for name in _WORK},
    }


def _storable_text(error: TinsmithError) -> str:
    """The error's text without characters that databases refuse: Postgres takes no NUL, UTF-8 no lone surrogates."""
    return str(error).replace("\0", "\\x00").encode(errors="backslashreplace").decode()
