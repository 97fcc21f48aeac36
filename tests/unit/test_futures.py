"""The durable queue: idempotent submission, single settlement, atomic steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import orjson
import pytest
import sqlalchemy as sa

from support.arrived import incoming, pending_ids
from tinsmith.db.database import Database
from tinsmith.db.schema import BODIES, FUTURES, MODELS, RESULTS
from tinsmith.errors import EngineFailedError, NotFoundError, SeqIdTakenError, UserError
from tinsmith.store.futures import Futures, FutureUsage, NewFuture, Settlement
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
