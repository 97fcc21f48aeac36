"""Usage is counted once, before and after roll-ups, in its hour, and only for completed work."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.databases import fresh_url
from support.properties import examples
from tinsmith.db.database import Database, now
from tinsmith.db.factory import open_database
from tinsmith.db.schema import CHECKPOINTS, FUTURES, USAGE
from tinsmith.errors import UserError
from tinsmith.store.checkpoints import CheckpointRef, NewCheckpoint, completion
from tinsmith.store.futures import Futures, NewFuture, SampleCost, Settlement
from tinsmith.store.models import Models, NewModel
from tinsmith.store.sessions import NewSession, Sessions
from tinsmith.store.usage import HOUR_S, Usage, fold_usage, usage_increments
from tinsmith.types import LoraSpec

HOUR = 1_790_000_400.0 // HOUR_S * HOUR_S


def add(db: Database, name: str, kind: str = "forward_backward", **changes: object) -> None:
    """A settled future."""
    row = {
        "request_id": name,
        "tenant_id": "alice",
        "session_id": "s",
        "base_model": "base",
        "kind": kind,
        "state": "done",
        "num_tokens": 10,
        "created_at": HOUR - 50.0,
        "settled_at": HOUR + 1.0,
    }
    with db.write() as connection:
        connection.execute(FUTURES.insert().values(**(row | changes)))


def totals(db: Database, tenant_id: str = "alice", start: float = HOUR, end: float = HOUR + HOUR_S) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for row in Usage(db).rows(tenant_id, start, end):
        counted[row.type] += row.quantity
    return dict(counted)


def test_tokens_of_passes_and_samples_are_told_apart(db: Database) -> None:
    add(db, "a")
    add(db, "b", "forward", num_tokens=7)
    add(db, "c", "sample", num_tokens=999, prefill_tokens=20, cached_tokens=16, sampled_tokens=5)
    add(db, "d", "optim_step", num_tokens=0)
    assert totals(db) == {"training": 17, "sampling_prefill": 4, "sampling_cached": 16, "sampling_sample": 5}


@pytest.mark.parametrize("state", ["pending", "failed", "refused"])
def test_only_completed_work_counts(db: Database, state: str) -> None:
    add(db, "a", state=state)
    assert totals(db) == {}
    Futures(db).delete_of_sessions(["s"], fold_usage)
    assert totals(db) == {}


def test_a_samples_cost_is_its_settlements(db: Database) -> None:
    futures = Futures(db)
    fields = {"tenant_id": "alice", "session_id": "s", "base_model": "base", "kind": "sample", "body": b"{}"}
    request_id = futures.submit(NewFuture("a", num_tokens=500, **fields))  # type: ignore[arg-type]
    refused = futures.submit(NewFuture("b", num_tokens=500, **fields), UserError("no"))  # type: ignore[arg-type]
    futures.settle([Settlement(request_id, b"", cost=SampleCost(9, 4, 3)), Settlement(refused, b"")], {})
    this_hour = now() // HOUR_S * HOUR_S
    hour_totals = totals(db, start=this_hour - HOUR_S, end=this_hour + 2 * HOUR_S)
    assert hour_totals == {"sampling_prefill": 5, "sampling_cached": 4, "sampling_sample": 3}


@pytest.mark.parametrize(("offset_s", "bucket"), [(0.0, 0), (1799.9, 0), (1800.1, 0), (3599.99, 0), (3600.0, 1)])
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_request_counts_in_the_hour_of_its_settlement(
    db: Database, offset_s: float, bucket: int, forgotten: bool
) -> None:
    add(db, "a", settled_at=HOUR + offset_s)
    if forgotten:
        Futures(db).delete_of_sessions(["s"], fold_usage)
    (row,) = Usage(db).rows("alice", HOUR, HOUR + 2 * HOUR_S)
    assert row.bucket_start == HOUR + bucket * HOUR_S
    assert totals(db, end=HOUR + HOUR_S) == ({"training": 10} if bucket == 0 else {})


def test_another_tenant_sees_nothing(db: Database) -> None:
    add(db, "a")
    assert totals(db, "bob") == {}
    Futures(db).delete_of_sessions(["s"], fold_usage)
    assert totals(db, "bob") == {}
    assert totals(db) == {"training": 10}


def test_a_pending_request_survives_the_roll_up_and_counts_later(db: Database) -> None:
    add(db, "a")
    add(db, "b", state="pending", settled_at=None)
    assert Futures(db).delete_of_sessions(["s"], fold_usage) == 1
    with db.write() as connection:
        connection.execute(FUTURES.update().values(state="done", settled_at=HOUR + 2.0))
    assert totals(db) == {"training": 20}
    Futures(db).delete_of_sessions(["s"], fold_usage)
    assert totals(db) == {"training": 20}


def test_a_roll_up_that_fails_deletes_nothing(db: Database) -> None:
    add(db, "a")

    def broken(spent: object) -> list[sa.Executable]:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        Futures(db).delete_of_sessions(["s"], broken)
    assert totals(db) == {"training": 10}


def test_more_than_one_transaction_of_futures_is_folded_once(db: Database) -> None:
    with db.write() as connection:
        rows = [
            {"request_id": str(n), "tenant_id": "alice", "session_id": "s", "base_model": "base", "kind": "forward"}
            | {"state": "done", "num_tokens": n, "created_at": HOUR, "settled_at": HOUR}
            for n in range(1203)
        ]
        connection.execute(FUTURES.insert(), rows)
    assert Futures(db).delete_of_sessions(["s"], fold_usage) == 1203
    assert totals(db) == {"training": sum(range(1203))}
    with db.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(USAGE)) == 1


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["s", "t"]),
        st.sampled_from(["forward", "forward_backward", "sample", "optim_step"]),
        st.sampled_from(["done", "done", "failed", "refused", "pending"]),
        st.integers(0, 2**31 - 1),
        st.integers(0, 3 * HOUR_S - 1),
        st.booleans(),  # a roll-up follows
    ),
    max_size=12,
)


@pytest.mark.extended
@settings(examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(REQUESTS)
def test_the_sum_is_the_same_with_any_roll_ups(tmp_path: Path, requests: list[tuple]) -> None:
    db = open_database(fresh_url(tmp_path))
    expected: Counter[str] = Counter()
    for index, (session_id, kind, state, tokens, second, roll_up) in enumerate(requests):
        cost = {"prefill_tokens": tokens, "cached_tokens": tokens // 3, "sampled_tokens": second}
        sample_cost = cost if kind == "sample" else {}
        settled_at = None if state == "pending" else HOUR + second
        changes = {"session_id": session_id, "state": state, "num_tokens": tokens, "settled_at": settled_at}
        add(db, str(index), kind, **changes, **sample_cost)
        if state == "done" and kind in ("forward", "forward_backward"):
            expected["training"] += tokens
        if state == "done" and kind == "sample":
            expected["sampling_prefill"] += tokens - tokens // 3
            expected["sampling_cached"] += tokens // 3
            expected["sampling_sample"] += second
        if roll_up:
            Futures(db).delete_of_sessions([session_id], fold_usage)
        assert totals(db, end=HOUR + 3 * HOUR_S) == {name: total for name, total in expected.items() if total}
    db.close()


def test_what_is_added_twice_counts_twice(db: Database) -> None:
    with db.write() as connection:
        for statement in usage_increments("alice", "s", "base", "checkpoint", 1, HOUR + 5) * 2:
            connection.execute(statement)
    assert totals(db) == {"checkpoint": 2}


def store(db: Database, model_id: str, name: str, size_bytes: int, ttl_s: float | None = None) -> None:
    new = NewCheckpoint(CheckpointRef(model_id, "weights", name), "alice", "base", LoraSpec(4), ttl_s=ttl_s)
    with db.write() as connection:
        for statement in completion(new, name, size_bytes):
            connection.execute(statement)


def test_what_is_stored_counts_for_the_project_of_its_session(db: Database) -> None:
    sessions, models = Sessions(db), Models(db)
    ids = [sessions.open("alice", NewSession(project_id=project)).session_id for project in ("p", None)]
    for session_id in ids:
        models.create(NewModel(f"{session_id}:train:0", session_id, "alice", "base", LoraSpec(4)))
        store(db, f"{session_id}:train:0", "one", 100)
    store(db, f"{ids[0]}:train:0", "two", 11)
    store(db, f"{ids[0]}:train:0", "expired", 1000, ttl_s=-1.0)
    usage = Usage(db)
    assert sorted((stored.project_id or "", stored.size_bytes) for stored in usage.list_stored("alice")) == [
        ("", 100),
        ("p", 11),
        ("p", 100),
    ]
    assert [stored.size_bytes for stored in usage.list_stored("alice", "p")].count(1000) == 0
    assert len(usage.list_stored("alice", "p")) == 2
    assert usage.list_stored("bob") == []
    assert usage.sum_stored_by_session(ids) == {ids[0]: (2, 111), ids[1]: (1, 100)}


def test_storage_counts_from_the_creation_until_now(db: Database) -> None:
    store(db, "m", "one", 1000)
    created_at = Usage(db).list_stored("alice")[0].created_at
    first_hour = created_at // HOUR_S * HOUR_S
    with db.write() as connection:  # two and a half hours ago
        connection.execute(CHECKPOINTS.update().values(created_at=first_hour - 1.5 * HOUR_S))
    rows = Usage(db).storage_rows("alice", first_hour - 4 * HOUR_S, first_hour + 5 * HOUR_S)
    assert [(row.bucket_start, row.byte_seconds) for row in rows[:2]] == [
        (first_hour - 2 * HOUR_S, 1000 * HOUR_S / 2),
        (first_hour - HOUR_S, 1000 * HOUR_S),
    ]
    assert sum(row.byte_seconds for row in rows[2:]) == pytest.approx(1000 * (now() - first_hour), abs=10_000)
    assert all(row.bucket_start <= now() for row in rows)
