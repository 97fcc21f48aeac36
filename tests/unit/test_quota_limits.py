"""Quotas by themselves: at which byte, token and second a request is refused, and when the client may try again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.databases import fresh_url
from support.quotas import BASE, ManualClock, sample
from tinsmith.auth import quotas as quotas_module
from tinsmith.auth.quotas import IDLE_S, LIMITS_REFRESH_S, QuotaLimits, Quotas, read_quotas
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database
from tinsmith.db.schema import CHECKPOINTS, RESPONSES, TENANTS, UPLOADS
from tinsmith.errors import TooManyRequestsError, UserError
from tinsmith.store.files import EXTERNAL_UPLOAD
from tinsmith.store.futures import Futures, NewFuture, Settlement
from tinsmith.store.models import Models, NewModel
from tinsmith.types import LoraSpec


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    new_database = open_database(fresh_url(tmp_path))
    yield new_database
    new_database.close()


def operation(model_id: str, seq_id: int) -> NewFuture:
    return NewFuture(f"{model_id}:{seq_id}", "alice", "s", BASE, "optim_step", b"{}", model_id=model_id, seq_id=seq_id)


def add_checkpoint(database: Database, name: str, size_bytes: int | None, tenant_id: str = "alice") -> None:
    flags = dict.fromkeys(("train_attn", "train_mlp", "train_unembed", "public"), True)
    row = {
        "training_run_id": "s:train:0",
        "kind": "weights",
        "name": name,
        "tenant_id": tenant_id,
        "state": "completed",
    }
    model = {"base_model": BASE, "lora_rank": 4, "lora_alpha": 32.0, "optimizer_type": "adam", "created_at": 1.0}
    with database.write() as connection:
        connection.execute(CHECKPOINTS.insert(), {**row, **flags, **model, "size_bytes": size_bytes})


def add_file(
    database: Database, file_id: str, size_bytes: int, purpose: str = "batch", tenant_id: str = "alice"
) -> None:
    row = {"file_id": file_id, "tenant_id": tenant_id, "filename": "f", "purpose": purpose, "size_bytes": size_bytes}
    with database.write() as connection:
        connection.execute(UPLOADS.insert(), {**row, "sha256": "", "created_at": 1.0})


def add_response(database: Database, response_id: str, size_bytes: int, tenant_id: str = "alice") -> None:
    row = {"response_id": response_id, "tenant_id": tenant_id, "size_bytes": size_bytes, "created_at": 1.0}
    with database.write() as connection:
        connection.execute(RESPONSES.insert(), {**row, "request": {}, "before": [], "request_ids": []})


def refusal_of(action: Callable[[], object]) -> TooManyRequestsError:
    with pytest.raises(TooManyRequestsError) as refusal:
        action()
    return refusal.value


# Bytes.


def test_stored_bytes_are_counted_by_tenant_and_kind(database: Database) -> None:
    quotas = Quotas(database, QuotaLimits())
    assert (quotas.checkpoint_bytes("alice"), quotas.file_bytes("alice")) == (0, 0)
    add_checkpoint(database, "one", 300)
    add_checkpoint(database, "pending", None)
    add_checkpoint(database, "other", 1000, "bob")
    add_file(database, "f1", 20)
    add_file(database, "f2", 5, "batch_output")
    add_file(database, "f3", 7, EXTERNAL_UPLOAD)
    add_file(database, "f4", 4000, tenant_id="bob")
    assert quotas.checkpoint_bytes("alice") == 307, "uploads that become checkpoints count as checkpoints"
    assert quotas.file_bytes("alice") == 25


@pytest.mark.parametrize("stored", [99, 100, 101])
def test_a_checkpoint_is_refused_once_the_limit_is_reached(database: Database, stored: int) -> None:
    add_checkpoint(database, "one", stored)
    quotas = Quotas(database, QuotaLimits(checkpoint_bytes=100))
    if stored < 100:
        quotas.admit_checkpoint("alice")
    else:
        refusal = refusal_of(lambda: quotas.admit_checkpoint("alice", "s:train:0:5"))
        assert f"the checkpoints take {stored} bytes, the limit is 100" in str(refusal)
        assert refusal.retry_after_s == 5.0
    Futures(database).submit(operation("s:train:0", 5))
    quotas.admit_checkpoint("alice", "s:train:0:5")
    quotas.admit_checkpoint("bob")
    Quotas(database, QuotaLimits()).admit_checkpoint("alice")


@pytest.mark.parametrize("stored", [99, 100, 101])
def test_a_response_is_refused_once_the_limit_is_reached(database: Database, stored: int) -> None:
    add_response(database, "r1", stored - 40)
    add_response(database, "r2", 40)
    quotas = Quotas(database, QuotaLimits(response_bytes=100))
    if stored < 100:
        quotas.admit_response("alice")
    else:
        refusal = refusal_of(lambda: quotas.admit_response("alice"))
        assert f"the stored responses take {stored} bytes" in str(refusal) and refusal.retry_after_s == 5.0
    quotas.admit_response("bob")
    Quotas(database, QuotaLimits()).admit_response("alice")


@pytest.mark.parametrize(("name", "objects"), [("file_bytes", "files"), ("checkpoint_bytes", "checkpoints")])
def test_an_upload_may_fill_the_limit_to_its_last_byte(database: Database, name: str, objects: str) -> None:
    add_file(database, "f1", 30)
    add_checkpoint(database, "one", 30)
    quotas = Quotas(database, QuotaLimits(**{name: 100}))
    reserve = quotas.reserve_file if name == "file_bytes" else quotas.reserve_checkpoint
    with reserve("alice", 70) as reservation:
        refusal = refusal_of(lambda: reservation.cover(71))
        assert f"quota {name}: the {objects} take 30 bytes, and uploads under way 71" in str(refusal)
        assert refusal.retry_after_s == 5.0
        reservation.cover(70)
    with reserve("alice", 1):
        assert quotas._reserved.totals == {(name, "alice"): 1}
    assert quotas._reserved.totals == {}


def test_an_upload_without_a_byte_is_admitted_even_over_the_limit(database: Database) -> None:
    add_file(database, "f1", 300)
    quotas = Quotas(database, QuotaLimits(file_bytes=100))
    with quotas.reserve_file("alice") as reservation:
        refusal_of(lambda: reservation.cover(1))
        assert quotas._reserved.totals.total() == 0


def test_a_limit_of_zero_reserves_without_reading_what_is_stored(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_file(database, "f1", 300)
    quotas = Quotas(database, QuotaLimits(file_bytes=0))
    monkeypatch.setattr(quotas, "_sum_bytes", lambda *_arguments: pytest.fail("it reads the tenant's files"))
    with quotas.reserve_file("alice", 10**12) as reservation:
        reservation.cover(10**13)
        assert quotas._reserved.totals == {("file_bytes", "alice"): 10**13}


# Models.


def test_models_are_admitted_below_the_limit_only(database: Database) -> None:
    assert Quotas(database, QuotaLimits()).admission_of_models("alice") is None
    admit = Quotas(database, QuotaLimits(models=2)).admission_of_models("alice")
    assert admit is not None
    admit(1)
    for loaded in (2, 3):
        refusal = refusal_of(lambda loaded=loaded: admit(loaded))
        assert f"quota models: {loaded} models are loaded, the limit is 2" in str(refusal)
        assert refusal.retry_after_s == 5.0


# The queue.


def test_a_full_queue_admits_only_what_the_same_models_queue_waits_for(database: Database, clock: ManualClock) -> None:
    futures = Futures(database)
    for model_id in ("s:train:0", "s:train:1", "s:train:2"):
        Models(database).create(NewModel(model_id, "s", "alice", BASE, LoraSpec(4)))
    for waiting in (operation("s:train:0", 9), operation("s:train:1", 5), operation("s:train:2", 9)):
        futures.submit(waiting)
    quotas = Quotas(database, QuotaLimits(queued_requests=1), clock)
    quotas.admit(operation("s:train:1", 4))
    for seq_id in (6, 8):
        refusal = refusal_of(lambda seq_id=seq_id: quotas.admit(operation("s:train:1", seq_id)))
        assert refusal.retry_after_s == 1.0
    futures.settle([Settlement("s:train:1:5", b"{}")], {"s:train:1": 5})
    refusal_of(lambda: quotas.admit(operation("s:train:1", 4)))


def test_operations_that_a_model_has_applied_wait_for_nothing(database: Database, clock: ManualClock) -> None:
    futures = Futures(database)
    for model_id in ("s:train:0", "s:train:1", "s:train:2"):  # the others have applied nothing
        Models(database).create(NewModel(model_id, "s", "alice", BASE, LoraSpec(4)))
    futures.submit(operation("s:train:1", 3))
    futures.settle([], {"s:train:1": 3})
    futures.submit(operation("s:train:1", 8))
    quotas = Quotas(database, QuotaLimits(queued_requests=1), clock)
    quotas.admit(operation("s:train:1", 7))
    refusal_of(lambda: quotas.admit(operation("s:train:1", 8 + 1)))


def test_queued_bytes_are_admitted_up_to_the_limit(database: Database, clock: ManualClock) -> None:
    quotas = Quotas(database, QuotaLimits(queued_bytes=10), clock)
    quotas.admit(sample(0, body=b"1234"))
    quotas.admit(sample(1, body=b"123456"))
    refusal = refusal_of(lambda: quotas.admit(sample(2, body=b"1")))
    assert "quota queued_bytes: 10 bytes are queued and this request has 1, the limit is 10" in str(refusal)
    assert refusal.retry_after_s == 1.0
    quotas.admit(sample(3, body=b""))


def test_each_tenant_has_its_own_count(database: Database, clock: ManualClock) -> None:
    quotas = Quotas(database, QuotaLimits(queued_requests=1), clock)
    for tenant_id in ("alice", "bob"):
        quotas.admit(sample(0, tenant_id))
        refusal_of(lambda tenant_id=tenant_id: quotas.admit(sample(1, tenant_id)))


# Tokens.


def test_a_refusal_says_when_the_debt_is_paid(database: Database, clock: ManualClock) -> None:
    quotas = Quotas(database, QuotaLimits(tokens_per_minute=60), clock)
    quotas.admit(sample(0, num_tokens=64))
    refusal = refusal_of(lambda: quotas.admit(sample(1, num_tokens=1)))
    assert refusal.retry_after_s == 4.0 and "64 tokens were admitted within a minute, the limit is 60" in str(refusal)
    clock.now_s += 4.0
    refusal = refusal_of(lambda: quotas.admit(sample(1, num_tokens=1)))
    assert refusal.retry_after_s == 0.1, "a bucket that is just empty"
    quotas.admit(sample(2, num_tokens=0))
    clock.now_s += 0.5
    quotas.admit(sample(1, num_tokens=1))
    clock.now_s += 0.25
    assert refusal_of(lambda: quotas.admit(sample(3, num_tokens=1))).retry_after_s == 0.25


def test_tokens_that_data_share_count_once(database: Database, clock: ManualClock) -> None:
    quotas = Quotas(database, QuotaLimits(tokens_per_minute=60), clock)
    quotas.admit(replace(sample(0, num_tokens=100), shared_tokens=50))
    quotas.admit(replace(sample(1, num_tokens=40), shared_tokens=20))
    refusal = refusal_of(lambda: quotas.admit(sample(2, num_tokens=1)))
    assert "70 tokens were admitted within a minute" in str(refusal)


def test_a_limit_that_is_lifted_forgets_the_debt(database: Database, clock: ManualClock) -> None:
    def set_limit(tokens: int) -> None:
        row = {"tenant_id": "alice", "quotas": {"tokens_per_minute": tokens}, "created_at": 1.0}
        with database.write() as connection:
            connection.execute(TENANTS.delete())
            connection.execute(TENANTS.insert(), row)
        clock.now_s += LIMITS_REFRESH_S

    quotas = Quotas(database, QuotaLimits(), clock)
    set_limit(60)
    quotas.admit(sample(0, num_tokens=600))
    refusal_of(lambda: quotas.admit(sample(1, num_tokens=1)))
    set_limit(0)
    quotas.admit(sample(1, num_tokens=100))
    set_limit(60)
    quotas.admit(sample(2, num_tokens=1))


# Cached state of tenants.


def test_limits_are_read_again_after_their_time(database: Database, clock: ManualClock) -> None:
    quotas = Quotas(database, QuotaLimits(models=1), clock)
    assert quotas.limits("alice").models == 1
    with database.write() as connection:
        connection.execute(TENANTS.insert(), {"tenant_id": "alice", "quotas": {"models": 5}, "created_at": 1.0})
    clock.now_s += LIMITS_REFRESH_S - 0.5
    assert quotas.limits("alice").models == 1
    clock.now_s += 0.5
    assert quotas.limits("alice").models == 5


@pytest.mark.parametrize(
    ("idle_s", "num_tokens", "is_evicted"),
    [(IDLE_S, 0, True), (IDLE_S - 1, 0, False), (IDLE_S, 60, True), (IDLE_S, 61, False), (IDLE_S + 1, 61, True)],
)
def test_a_tenant_is_evicted_when_it_is_idle_and_its_bucket_is_full(
    database: Database,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    idle_s: float,
    num_tokens: int,
    is_evicted: bool,
) -> None:
    monkeypatch.setattr(quotas_module, "MAX_TENANTS", 1)
    quotas = Quotas(database, QuotaLimits(tokens_per_minute=60), clock)
    quotas.admit(sample(0, num_tokens=num_tokens))
    clock.now_s += idle_s
    quotas.limits("bob")
    assert ("alice" in quotas._tenants) is not is_evicted


def test_tenants_stay_while_there_is_room_and_few_are_examined_at_once(
    database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas = Quotas(database, QuotaLimits(), clock)
    names = [f"tenant-{index:02}" for index in range(40)]
    for name in names:
        quotas.limits(name)
    clock.now_s += IDLE_S
    monkeypatch.setattr(quotas_module, "MAX_TENANTS", 35)
    quotas.limits("new")
    assert list(quotas._tenants) == [*names[6:], "new"], "the least recently used go, and no more than needed"
    monkeypatch.setattr(quotas_module, "MAX_TENANTS", 1)
    quotas.limits(names[6])
    assert len(quotas._tenants) == 35 - quotas_module.EVICTION_SCAN


# Reading.


def test_a_quota_is_a_decimal_number_that_the_database_can_store() -> None:
    assert read_quotas([f"models={2**63 - 1}", "queued_bytes=0"]) == {"models": 2**63 - 1, "queued_bytes": 0}
    for value in (str(2**63), "\u0663", "1.5", "+1", " 1"):
        with pytest.raises(UserError, match="it must be an integer of 0"):
            read_quotas([f"models={value}"])
