"""The durable queue: idempotent submission, single settlement, atomic steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import orjson
import pytest
import sqlalchemy as sa

from support.pending_requests import incoming, pending_ids
from tinsmith.db.database import Database
from tinsmith.db.schema import BODIES, ENGINES, FUTURES, MODELS, RESULTS, SAMPLERS, SESSIONS
from tinsmith.db.wakeups import SERVER, engine_mailbox
from tinsmith.errors import EngineFailedError, GoneError, NotFoundError, SeqIdTakenError, UserError
from tinsmith.store import futures as futures_module
from tinsmith.store.futures import (
    Futures,
    FutureUsage,
    NewFuture,
    SampleCost,
    Settlement,
    WorkTimes,
    cancel_target,
    deletion,
)
from tinsmith.store.models import Models, NewModel, log_deletion, unload_statement
from tinsmith.types import LoraSpec

MODEL = "s:train:0"


@pytest.fixture
def db(db: Database) -> Database:
    Models(db).create(NewModel(MODEL, "s", "alice", "base", LoraSpec(4)))
    return db


@pytest.fixture
def futures(db: Database) -> Futures:
    return Futures(db)


def new(seq_id: int, kind: str = "forward_backward", body: bytes = b"body") -> NewFuture:
    return NewFuture(f"{MODEL}:{seq_id}", "alice", "s", "base", kind, body, model_id=MODEL, seq_id=seq_id)


def count(db: Database, table: sa.Table) -> int:
    with db.read() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0


def test_a_request_sent_by_many_at_once_is_stored_once(futures: Futures, db: Database) -> None:
    threads = [threading.Thread(target=futures.submit, args=(new(1),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(db, FUTURES) == count(db, BODIES) == 1


def test_the_first_body_of_a_number_counts(futures: Futures) -> None:
    futures.submit(new(1, body=b"first"))
    for other in (b"second", b"other"):  # one of another length, one of the same
        with pytest.raises(SeqIdTakenError, match=r"seq_id 1 of model .* belongs to another request"):
            futures.submit(new(1, body=other))
    futures.submit(new(1, body=b"first"))
    futures.submit(new(1, body=b"third"), UserError("too late to refuse"))
    assert futures.bodies([f"{MODEL}:1"]) == {f"{MODEL}:1": b"first"}
    assert futures.outcome("alice", f"{MODEL}:1") is None


def test_a_sampler_save_is_sent_again_under_another_number_of_its_sampling_session(futures: Futures) -> None:
    def save(**fields: object) -> NewFuture:
        return new(1, kind="save_weights_for_sampler", body=orjson.dumps({"seq_id": 1, **fields}))

    first = save(kind="snapshot", sampling_session_seq_id=9)
    request_id = futures.submit(first)
    assert futures.submit(save(kind="snapshot", sampling_session_seq_id=10)) == request_id
    assert futures.bodies([request_id]) == {request_id: first.body}, "the first number counts"
    for other in (save(kind="inflight", sampling_session_seq_id=10), save(path="mine")):
        with pytest.raises(SeqIdTakenError, match="belongs to another request"):
            futures.submit(other)


def test_a_settled_future_never_changes(futures: Futures) -> None:
    request_id = futures.submit(new(1))
    futures.settle([Settlement(request_id, b"first")], {})
    futures.settle([Settlement(request_id, b"second")], {})
    futures.settle([Settlement(request_id, error=EngineFailedError("late"))], {})
    outcome = futures.outcome("alice", request_id)
    assert outcome is not None and (outcome.body, outcome.error) == (b"first", None)


def test_a_step_is_settled_whole_or_not_at_all(futures: Futures, db: Database) -> None:
    ids = [futures.submit(new(seq_id)) for seq_id in (1, 2)]
    broken = sa.text("INSERT INTO no_such_table VALUES (1)")
    cleaned: list[str] = []
    settlements = [
        Settlement(ids[0], b"one", clean_up=lambda: cleaned.append("one")),
        Settlement(ids[1], b"two", effects=[broken]),
    ]
    with pytest.raises(sa.exc.DBAPIError):
        futures.settle(settlements, {MODEL: 2})
    assert [futures.outcome("alice", request_id) for request_id in ids] == [None, None]
    assert (count(db, RESULTS), count(db, BODIES), cleaned) == (0, 2, [])
    model = Models(db).find(MODEL)
    assert model is not None and model.applied_seq_id == -1


def test_effects_of_a_future_that_was_settled_before_do_not_happen_again(futures: Futures, db: Database) -> None:
    request_id = futures.submit(new(1))
    reason = MODELS.update().values(reason=sa.func.coalesce(MODELS.c.reason, "") + "x")
    for _ in range(2):
        futures.settle([Settlement(request_id, b"", effects=[reason])], {})
    model = Models(db).find(MODEL)
    assert model is not None and model.reason == "x"


def test_progress_never_goes_back(futures: Futures, db: Database) -> None:
    futures.settle([], {MODEL: 5})
    futures.settle([], {MODEL: 3})
    model = Models(db).find(MODEL)
    assert model is not None and model.applied_seq_id == 5


def test_bodies_go_when_settled_unless_kept(futures: Futures, db: Database) -> None:
    retained, dropped = futures.submit(new(1)), futures.submit(new(2))
    futures.settle([Settlement(retained, b"", keep_body=True), Settlement(dropped, b"")], {})
    assert set(futures.bodies([retained, dropped])) == {retained}


def test_all_bodies_that_a_step_does_not_keep_are_freed(futures: Futures) -> None:
    first, retained, last = (futures.submit(new(seq_id)) for seq_id in (1, 2, 3))
    futures.settle([Settlement(first, b""), Settlement(retained, b"", keep_body=True), Settlement(last, b"")], {})
    assert set(futures.bodies([first, retained, last])) == {retained}


def test_the_log_is_in_order_and_holds_what_is_replayed(futures: Futures) -> None:
    kinds = {4: "optim_step", 1: "forward_backward", 2: "forward", 3: "save_weights", 5: "load_weights"}
    kinds[6] = "optim_step"
    for seq_id, kind in kinds.items():
        futures.submit(new(seq_id, kind))
    futures.submit(new(7, "optim_step"), UserError("refused"))
    settlements = [Settlement(f"{MODEL}:{seq_id}", b"", keep_body=True) for seq_id in kinds if seq_id != 6]
    futures.settle(settlements, {})
    assert [request.seq_id for request in futures.log_of(MODEL, 0, 10)] == [1, 4, 5]
    assert [request.seq_id for request in futures.log_of(MODEL, 1, 4)] == [4]


def test_a_snapshot_frees_the_bodies_that_the_one_before_covers_too(futures: Futures, db: Database) -> None:
    ids = [futures.submit(new(seq_id)) for seq_id in range(1, 7)]
    futures.settle([Settlement(request_id, b"", keep_body=True) for request_id in ids], {})

    def state() -> tuple[int, int | None, str | None, int | None, str | None]:
        model = Models(db).find(MODEL)
        assert model is not None
        snapshots = model.snapshot_seq_id, model.snapshot_directory
        return len(futures.bodies(ids)), *snapshots, model.previous_snapshot_seq_id, model.previous_snapshot_directory

    assert Models(db).record_snapshot(MODEL, 2, "a") is None
    assert state() == (6, 2, "a", None, None)
    assert Models(db).record_snapshot(MODEL, 3, "b") is None
    assert state() == (4, 3, "b", 2, "a")
    assert Models(db).record_snapshot(MODEL, 5, "c") == "a", "the third newest is not needed"
    assert state() == (3, 5, "c", 3, "b")
    assert Models(db).record_snapshot(MODEL, 4, "late") == "late", "one that was overtaken is of no use"
    assert state() == (3, 5, "c", 3, "b")
    Models(db).forget_snapshot(MODEL, "b")
    assert state() == (3, 5, "c", 3, "b"), "not the newest"
    Models(db).forget_snapshot(MODEL, "c")
    assert state() == (3, 3, "b", None, None)
    with db.write() as connection:
        connection.execute(unload_statement(MODEL, "done"))
        connection.execute(log_deletion(MODEL))
    assert Models(db).record_snapshot(MODEL, 6, "too late") == "too late"
    assert state() == (0, None, None, None, None)


def test_incoming_requests_are_pending_or_refused(futures: Futures) -> None:
    settled, pending = futures.submit(new(1)), futures.submit(new(2))
    refused = futures.submit(new(3), UserError("no"))
    futures.submit(replace(new(4), base_model="other"))
    futures.settle([Settlement(settled, b"")], {})
    arrivals = incoming(futures._db, "base")
    assert [(request.request_id, request.state) for request in arrivals] == [(pending, "pending"), (refused, "refused")]
    assert [request.request_id for request in incoming(futures._db, "base", arrivals[0].arrival)] == [refused]
    assert pending_ids(futures._db, "base") == {pending}


def test_results_are_forgotten_with_their_session_and_pending_work_is_not(futures: Futures, db: Database) -> None:
    settled, pending = futures.submit(new(1)), futures.submit(new(2))
    other = futures.submit(replace(new(3), session_id="t", model_id=None, seq_id=None, request_id="t:1"))
    futures.settle([Settlement(settled, b"a", keep_body=True), Settlement(other, b"b")], {})
    deleted: list[str] = []

    def keep(spent: Sequence[FutureUsage]) -> list[sa.Executable]:
        deleted.extend(usage.request_id for usage in spent)
        return []

    assert futures.delete_of_sessions(["s"], keep) == 1
    assert deleted == [settled]
    with pytest.raises(NotFoundError):
        futures.outcome("alice", settled)
    assert futures.outcome("alice", pending) is None
    assert futures.outcome("alice", other) is not None
    assert (count(db, RESULTS), count(db, BODIES)) == (1, 1)


def test_a_future_belongs_to_its_tenant(futures: Futures) -> None:
    request_id = futures.submit(new(1))
    with pytest.raises(NotFoundError, match=request_id):
        futures.outcome("bob", request_id)


def test_many_bodies_are_read_at_once(futures: Futures) -> None:
    ids = [futures.submit(new(seq_id, body=bytes([seq_id % 256]) * 10)) for seq_id in range(1, 1203)]
    bodies = futures.bodies(ids)
    assert all(bodies[request_id][0] == (index + 1) % 256 for index, request_id in enumerate(ids))


# What callers are told.


def row_of(db: Database, request_id: str) -> sa.Row[tuple[object, ...]]:
    with db.read() as connection:
        return connection.execute(sa.select(FUTURES).where(FUTURES.c.request_id == request_id)).one()


def sample(seq_id: int, **fields: object) -> NewFuture:
    future = NewFuture(f"s:sample:9:{seq_id}", "alice", "s", "base", "sample", b"prompt", num_tokens=6)
    return replace(future, **{"sampling_session_id": "s:sample:9", "seq_id": seq_id, **fields})  # type: ignore[arg-type]


def test_a_result_larger_than_the_callers_limit_is_announced_and_not_sent(futures: Futures) -> None:
    request_id = futures.submit(new(1))
    futures.settle([Settlement(request_id, b"12345", "proto")], {})
    for limit, body in ((4, None), (5, b"12345"), (6, b"12345")):
        outcome = futures.outcome("alice", request_id, limit)
        assert outcome is not None and (outcome.body, outcome.body_bytes) == (body, 5)
        assert (outcome.result_type, outcome.error, outcome.category) == ("proto", None, None)


def test_a_result_that_was_deleted_is_gone_and_an_error_stays(futures: Futures, db: Database) -> None:
    done, failed = futures.submit(new(1)), futures.submit(new(2))
    futures.settle([Settlement(done, b"x"), Settlement(failed, b"y", error=EngineFailedError("broken"))], {})
    assert count(db, RESULTS) == 1, "a failed request has no result"
    with db.write() as connection:
        connection.execute(RESULTS.delete())
    with pytest.raises(GoneError, match=f"the result of '{done}' was acknowledged and deleted"):
        futures.outcome("alice", done)
    outcome = futures.outcome("alice", failed)
    assert outcome is not None and (outcome.error, outcome.category) == ("broken", "server")
    assert (outcome.result_type, outcome.body, outcome.body_bytes) == (None, None, None)


def test_a_refused_request_is_settled_at_once_without_its_body(futures: Futures, db: Database) -> None:
    request_id = futures.submit(new(1), UserError("too\0long \ud800"))
    outcome = futures.outcome("alice", request_id)
    assert outcome is not None and (outcome.error, outcome.category) == ("too\\x00long \\ud800", "user")
    row = row_of(db, request_id)
    assert (row.state, row.body_bytes, row.settled_at, row.result_type) == ("refused", 0, row.created_at, None)
    assert count(db, BODIES) == 0
    pending = row_of(db, futures.submit(new(2)))
    assert (pending.state, pending.body_bytes, pending.settled_at, pending.error) == ("pending", 4, None, None)


def test_a_recorded_request_is_done_once_with_its_effects(futures: Futures, db: Database) -> None:
    reason = MODELS.update().values(reason=sa.func.coalesce(MODELS.c.reason, "") + "x")
    for answer in (b"first", b"second"):
        assert futures.record(new(1), answer, [reason]) == f"{MODEL}:1"
    with pytest.raises(sa.exc.DBAPIError):
        futures.record(new(2), b"", [sa.text("INSERT INTO no_such_table VALUES (1)")])
    assert futures.record(replace(new(1), request_id="another"), b"third") == "another", "its seq_id is taken"
    outcome = futures.outcome("alice", f"{MODEL}:1")
    assert outcome is not None and (outcome.body, outcome.result_type) == (b"first", "json")
    model = Models(db).find(MODEL)
    assert model is not None and model.reason == "x" and count(db, FUTURES) == count(db, RESULTS) == 1
    row = row_of(db, f"{MODEL}:1")
    assert (row.state, row.settled_at) == ("done", row.created_at) and row.body_bytes == 0


def test_a_number_is_taken_by_kind_length_and_bytes_until_the_body_is_freed(futures: Futures) -> None:
    futures.submit(new(1, body=b"first"))
    with pytest.raises(SeqIdTakenError, match=r"belongs to another request \(forward_backward\)"):
        futures.submit(new(1, kind="forward", body=b"first"))
    with pytest.raises(SeqIdTakenError, match="which was sent without a seq_id and took the next number"):
        futures.submit(replace(new(1), request_id="another"))
    with pytest.raises(SeqIdTakenError, match=r"\(forward_backward\)"):
        futures.submit(new(1, kind="forward", body=b"first"), UserError("refused"))
    futures.settle([Settlement(f"{MODEL}:1", b"")], {})
    futures.submit(new(1, body=b"other"))  # of which only the length is known now
    with pytest.raises(SeqIdTakenError):
        futures.submit(new(1, body=b"longer"))


def test_a_sampling_sessions_number_is_named_when_it_is_taken(futures: Futures) -> None:
    futures.submit(sample(1))
    with pytest.raises(SeqIdTakenError, match="seq_id 1 of sampling session 's:sample:9' belongs to another"):
        futures.submit(sample(1, body=b"other!"))


def test_settled_samples_of_a_session_are_numbered_and_nothing_else(futures: Futures, db: Database) -> None:
    other = replace(sample(1), request_id="other", sampling_session_id="s:sample:8")
    ids = [futures.submit(request) for request in (sample(1), sample(2), other, new(1))]
    futures.settle([Settlement(ids[1], b"")], {})
    refused = futures.submit(sample(3), UserError("no"))
    futures.settle([Settlement(request_id, b"") for request_id in (ids[0], ids[2], ids[3])], {})
    last = futures.submit(sample(4), UserError("no"))
    orders = [row_of(db, request_id).settle_order for request_id in (ids[1], refused, ids[0], last, ids[2], ids[3])]
    assert orders == [1, 2, 3, 4, 1, None]
    settled = futures.filter_settled([*ids, refused, "unknown", futures.submit(sample(5))])
    assert sorted(settled) == sorted([*ids, refused])


def test_costs_and_times_of_work_are_stored_with_the_result(futures: Futures, db: Database) -> None:
    first, second = futures.submit(sample(1)), futures.submit(new(1))
    cost, times = SampleCost(6, 4, 30), WorkTimes(100.0, 101.5, 7)
    futures.settle([Settlement(first, b"", cost=cost, work_times=times), Settlement(second, b"")], {MODEL: 1})
    row, plain = row_of(db, first), row_of(db, second)
    assert (row.prefill_tokens, row.cached_tokens, row.sampled_tokens) == (6, 4, 30)
    assert (row.started_at, row.ran_at, row.step) == (100.0, 101.5, 7)
    assert (plain.prefill_tokens, plain.sampled_tokens, plain.started_at, plain.step) == (None,) * 4
    assert futures.settlement_time(first) == row.settled_at == plain.settled_at
    assert futures.settlement_time("unknown") is None
    usage: list[FutureUsage] = []

    def keep(deleted: Sequence[FutureUsage]) -> list[sa.Executable]:
        usage.extend(deleted)
        return []

    assert futures.delete_of_sessions(["s"], keep) == 2
    (of_sample,) = [entry for entry in usage if entry.kind == "sample"]
    assert of_sample == FutureUsage(first, "alice", "s", "base", "sample", "done", 6, 6, 4, 30, row.settled_at)


def test_a_session_is_deleted_in_batches_each_with_its_effects(
    futures: Futures, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures_module, "_DELETE_BATCH", 2)
    ids = [futures.submit(new(seq_id)) for seq_id in range(1, 6)]
    futures.settle([Settlement(request_id, b"") for request_id in ids], {})
    batches: list[int] = []

    def keep(deleted: Sequence[FutureUsage]) -> list[sa.Executable]:
        batches.append(len(deleted))
        return [MODELS.update().values(reason=sa.func.coalesce(MODELS.c.reason, "") + "x")]

    assert futures.delete_of_sessions(["s", "unknown"], keep) == 5
    model = Models(db).find(MODEL)
    assert [size for size in batches if size] == [2, 2, 1] and model is not None and model.reason == "x" * len(batches)


def test_a_stored_request_wakes_its_engine_and_is_counted_once(db: Database) -> None:
    woken: list[tuple[str, str | None]] = []
    counted: list[tuple[str, str, bool]] = []
    chosen: list[str] = []

    def choose_engine(base_model: str, request_id: str) -> str:
        chosen.append(request_id)
        return f"engine-of-{base_model}"

    futures = Futures(db, lambda *call: woken.append(call), lambda *call: counted.append(call), choose_engine)
    unbound = futures.submit(sample(1))
    futures.submit(sample(1))
    of_run = futures.submit(sample(2, run_id=MODEL, engine_id="engine-2"))
    bound = futures.submit(sample(3, executor="engine-3"))
    refused = futures.submit(sample(4), UserError("no"))
    training = futures.submit(new(1))
    assert woken == [("base", name) for name in ("engine-of-base", "engine-2", "engine-3", None, None)]
    assert counted == [("sample", "alice", name == refused) for name in (unbound, of_run, bound, refused)] + [
        ("forward_backward", "alice", False)
    ]
    assert set(chosen) == {unbound}
    executors = [row_of(db, name).executor for name in (unbound, of_run, bound, refused, training)]
    assert executors == ["engine-of-base", None, "engine-3", None, None]


# Cancellation.


def test_only_a_waiting_sample_is_cancelled_by_a_request_of_its_own(futures: Futures, db: Database) -> None:
    waiting, bound, done = (
        futures.submit(request) for request in (sample(1), sample(2, executor="engine-1"), sample(3))
    )
    training = futures.submit(new(1))
    futures.settle([Settlement(done, b"")], {})
    for request_id in (waiting, waiting, bound, done, training):
        futures.cancel("alice", request_id, "not wanted")
    with db.read() as connection:
        rows = connection.execute(sa.select(FUTURES).where(FUTURES.c.kind == "cancel")).all()
    assert {(cancel_target(row.request_id), row.executor) for row in rows} == {(waiting, None), (bound, "engine-1")}
    assert len(rows) == 2 and {(row.tenant_id, row.session_id, row.base_model) for row in rows} == {
        ("alice", "s", "base")
    }
    assert set(futures.bodies([row.request_id for row in rows]).values()) == {b"not wanted"}
    for tenant_id, request_id in (("bob", waiting), ("alice", "unknown")):
        with pytest.raises(NotFoundError, match=request_id):
            futures.cancel(tenant_id, request_id, "not wanted")


def test_a_settled_cancellation_leaves_no_row(futures: Futures, db: Database) -> None:
    futures.cancel("alice", futures.submit(sample(1)), "not wanted")
    with db.read() as connection:
        cancellation = connection.scalars(sa.select(FUTURES.c.request_id).where(FUTURES.c.kind == "cancel")).one()
    futures.settle([Settlement(cancellation, effects=[deletion(cancellation)])], {})
    assert count(db, FUTURES) == 1 and futures.outcome("alice", "s:sample:9:1") is None


# Look-ups.


def test_the_next_number_follows_the_highest_of_the_model(futures: Futures) -> None:
    assert futures.next_seq_id(MODEL) == 1
    for seq_id in (4, 2):
        futures.submit(new(seq_id))
    assert futures.next_seq_id(MODEL) == 5 and futures.next_seq_id("s:train:1") == 1


def test_a_request_has_one_kind_and_base_model(futures: Futures) -> None:
    request_id = futures.submit(new(1))
    assert futures.kind_of("alice", request_id) == "forward_backward"
    assert futures.kind_of("bob", request_id) is None and futures.kind_of("alice", "unknown") is None
    assert futures.base_model_of(request_id) == "base" and futures.base_model_of("unknown") is None


def test_refused_requests_are_listed_from_a_number_on(futures: Futures) -> None:
    for seq_id in (1, 2, 4):
        futures.submit(new(seq_id), UserError("no"))
    futures.submit(new(3))
    assert {request.seq_id for request in futures.list_refused(MODEL, 2)} == {2, 4}
    assert futures.list_refused("s:train:1", 0) == []


def test_an_engines_progress_is_the_time_of_a_models_last_request(futures: Futures, db: Database) -> None:
    futures.settle([], {MODEL: 5})
    with db.read() as connection:
        advanced_at = connection.scalar(sa.select(MODELS.c.last_request_at))
    futures.settle([], {MODEL: 5})
    with db.read() as connection:
        assert connection.scalar(sa.select(MODELS.c.last_request_at)) == advanced_at != 0


def test_servers_are_told_of_what_is_settled_and_the_engine_of_what_waits(
    futures: Futures, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(db, "notify", lambda _connection, mailbox, lines: told.append((mailbox, list(lines))))
    waiting = futures.submit(sample(1, executor="engine-1"))
    refused = futures.submit(new(1), UserError("no"))
    futures.submit(sample(1, executor="engine-1"))
    futures.settle([Settlement(waiting, b"")], {})
    assert told == [
        (engine_mailbox("base", "engine-1"), [waiting]),
        (engine_mailbox("base", None), [refused]),
        (SERVER, [refused]),
        (SERVER, [waiting]),
    ]


def add_session(db: Database, session_id: str, closed_at: float | None) -> None:
    times = {"created_at": 1.0, "last_heartbeat_at": 1.0, "closed_at": closed_at}
    row = {"session_id": session_id, "tenant_id": "alice", "state": "active", "reason": "expired", "tags": []}
    with db.write() as connection:
        connection.execute(SESSIONS.insert(), {**row, **times})


def test_the_waiting_samples_of_closed_sessions_are_cancelled(futures: Futures, db: Database) -> None:
    add_session(db, "closed", 2.0)
    add_session(db, "open", None)
    engine = {"engine_id": "e", "base_model": "base", "pid": 1, "state": "ready", "started_at": 1.0}
    with db.write() as connection:
        connection.execute(ENGINES.insert(), engine)

    def submit(name: str, seq_id: int, session_id: str = "closed", **fields: object) -> str:
        request = sample(seq_id, request_id=f"{name}:{seq_id}", session_id=session_id)
        return futures.submit(replace(request, sampling_session_id=name, **fields))  # type: ignore[arg-type]

    first = [submit("a", seq_id) for seq_id in (1, 2)]
    moved = submit("a", 3, executor="engine-2")
    second = submit("b", 1)
    done, other_base = submit("c", 1), submit("d", 1, base_model="another")
    still_open = submit("e", 1, "open")
    futures.submit(replace(new(1), session_id="closed"))
    futures.settle([Settlement(done, b"")], {})
    assert futures.cancel_of_closed_sessions() == 2
    with db.read() as connection:
        rows = connection.execute(sa.select(FUTURES).where(FUTURES.c.kind == "cancel")).all()
    assert {(cancel_target(row.request_id), row.executor) for row in rows} == {
        ("a", None),
        ("a", "engine-2"),
        ("b", None),
    }
    bodies = futures.bodies([row.request_id for row in rows])
    assert len(bodies) == 3 and set(bodies.values()) == {b"its session ended (expired)"}
    futures.settle([Settlement(request_id, b"") for request_id in (*first, moved, second)], {})
    assert futures.cancel_of_closed_sessions() == 0, f"{other_base} and {still_open} go on"


def test_the_cancellation_of_a_runs_sample_goes_to_the_runs_engine(futures: Futures, db: Database) -> None:
    row = {"sampling_session_id": "s:sample:9", "session_id": "s", "tenant_id": "alice", "base_model": "base"}
    with db.write() as connection:
        connection.execute(MODELS.update().values(engine_id="engine-7"))
        connection.execute(SAMPLERS.insert(), {**row, "model_id": MODEL, "created_at": 1.0})
    futures.cancel("alice", futures.submit(sample(1)), "not wanted")
    futures.cancel("alice", futures.submit(sample(2, sampling_session_id="s:sample:8")), "not wanted")
    with db.read() as connection:
        rows = connection.execute(sa.select(FUTURES).where(FUTURES.c.kind == "cancel")).all()
    assert {(cancel_target(row.request_id), row.executor) for row in rows} == {
        ("s:sample:9:1", "engine-7"),
        ("s:sample:9:2", None),
    }
