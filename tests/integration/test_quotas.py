"""Quotas: refusals and their messages, requests that are never refused, and that refusals store nothing."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import numpy as np
import pytest
import sqlalchemy as sa
import tinker
from tinker import types

from support.databases import fresh_url
from support.http_harness import ALICE, BASE, BOB, Harness, close, make_harness, pass_bytes, sample_request, send_pass
from support.live import LiveServer, serving
from support.quotas import ManualClock, sample
from tinsmith.auth import quotas as quotas_module
from tinsmith.auth.keys import Keys
from tinsmith.auth.quotas import IDLE_S, NAMES, QuotaLimits, Quotas, read_quotas
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database
from tinsmith.db.schema import BODIES, FUTURES, MODELS, TENANTS
from tinsmith.db.sqlite_database import SQLiteDatabase
from tinsmith.errors import TooManyRequestsError, UserError
from tinsmith.settings import Settings
from tinsmith.store.futures import Futures, Settlement
from tinsmith.store.models import Models, NewModel
from tinsmith.types import LoraSpec


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    new_database = open_database(fresh_url(tmp_path))
    yield new_database
    new_database.close()


def harness_with(directory: Path, **limits: int) -> Harness:
    """A harness whose clock advances ten seconds per reading, so that each request is counted anew."""
    limited_harness = make_harness(directory, limits=QuotaLimits(**limits))
    limited_harness.services.quotas._clock = itertools.count(0, 10).__next__
    return limited_harness


def assert_refused(answer: httpx.Response, *words: str) -> None:
    assert answer.status_code == 429, answer.text
    for word in words:
        assert word in answer.json()["detail"]
    assert 0 < float(answer.headers["retry-after-ms"]) <= 60_000
    assert int(answer.headers["retry-after"]) >= float(answer.headers["retry-after-ms"]) / 1000


def rows(harness: Harness, table: sa.Table) -> int:
    with harness.services.models._db.read() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0


# Counting.


def test_requests_that_wait_are_counted_and_those_that_ended_are_not(database: Database, clock: ManualClock) -> None:
    futures, quotas = Futures(database), Quotas(database, QuotaLimits(queued_requests=3), clock)
    for seq_id in range(3):
        quotas.admit(sample(seq_id))
        futures.submit(sample(seq_id))
    with pytest.raises(TooManyRequestsError, match="quota queued_requests: 3 requests are queued, the limit is 3"):
        quotas.admit(sample(3))
    futures.settle([Settlement("s:alice:0", body=b"{}")], {})
    clock.now_s += 1
    quotas.admit(sample(3))
    futures.submit(sample(3))
    with pytest.raises(TooManyRequestsError):
        quotas.admit(sample(4))


def test_a_full_queue_is_looked_at_again_soon_and_not_at_once(database: Database, clock: ManualClock) -> None:
    futures, quotas = Futures(database), Quotas(database, QuotaLimits(queued_requests=1), clock)
    quotas.admit(sample(0))
    futures.submit(sample(0))
    futures.settle([Settlement("s:alice:0", body=b"{}")], {})
    clock.now_s += 0.1
    with pytest.raises(TooManyRequestsError):
        quotas.admit(sample(1))
    clock.now_s += 0.1
    quotas.admit(sample(1))


def test_bytes_that_wait_are_counted(database: Database, clock: ManualClock) -> None:
    futures, quotas = Futures(database), Quotas(database, QuotaLimits(queued_bytes=12), clock)
    for seq_id in range(2):
        quotas.admit(sample(seq_id))
        futures.submit(sample(seq_id))
    with pytest.raises(TooManyRequestsError, match="10 bytes are queued and this request has 5, the limit is 12"):
        quotas.admit(sample(2))
    quotas.admit(sample(3, body=b"12"))


def test_a_body_larger_than_the_limit_is_taken_when_nothing_else_waits(database: Database, clock: ManualClock) -> None:
    quotas = Quotas(database, QuotaLimits(queued_bytes=3), clock)
    quotas.admit(sample(0))
    with pytest.raises(TooManyRequestsError):
        quotas.admit(sample(1, body=b"1"))


def test_many_threads_together_are_held_to_the_limit(database: Database) -> None:
    futures, quotas = Futures(database), Quotas(database, QuotaLimits(queued_requests=20), ManualClock())

    def submit(seq_id: int) -> bool:
        try:
            quotas.admit(sample(seq_id))
        except TooManyRequestsError:
            return False
        futures.submit(sample(seq_id))
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(submit, range(60))) == 20


def test_the_usual_request_costs_no_query(database: Database, clock: ManualClock) -> None:
    quotas = Quotas(database, QuotaLimits(queued_requests=1000, queued_bytes=10**9), clock)
    queries: list[str] = []
    sa.event.listen(database.engine, "before_cursor_execute", lambda *args: queries.append(args[2]))
    for seq_id in range(100):
        quotas.admit(sample(seq_id))
    assert len([text for text in queries if text.startswith("SELECT")]) <= 2, "one for the limits, one for the counts"
    clock.now_s += 1
    quotas.admit(sample(100))
    assert len([text for text in queries if "futures" in text]) == 2


def test_the_count_uses_an_index(database: Database) -> None:
    if not isinstance(database, SQLiteDatabase):
        pytest.skip("SQLite's words")
    query = "EXPLAIN QUERY PLAN SELECT count(*), sum(body_bytes) FROM futures WHERE tenant_id='a' AND state='pending'"
    with database.read() as connection:
        plan = " ".join(row.detail for row in connection.execute(sa.text(query)))
    assert "ix_futures_tenant" in plan


def test_tenants_do_not_share_a_quota(database: Database, clock: ManualClock) -> None:
    quotas = Quotas(database, QuotaLimits(queued_requests=1, tokens_per_minute=1), clock)
    for tenant_id in ("alice", "bob"):
        quotas.admit(sample(0, tenant_id, num_tokens=1))
        with pytest.raises(TooManyRequestsError):
            quotas.admit(sample(1, tenant_id, num_tokens=1))


def test_a_tenants_own_limits_come_before_the_servers(database: Database, clock: ManualClock) -> None:
    Keys(database).create("alice", quotas={"queued_requests": 2})
    Keys(database).create("carol", quotas={"queued_requests": 0})
    with database.write() as connection:
        connection.execute(TENANTS.insert(), {"tenant_id": "dora", "quotas": {"no_such": 1}, "created_at": 1.0})
    quotas = Quotas(database, QuotaLimits(queued_requests=1, models=7), clock)
    assert quotas.limits("alice") == QuotaLimits(queued_requests=2, models=7)
    assert quotas.limits("carol").queued_requests == 0
    assert quotas.limits("dora") == quotas.limits("nobody") == QuotaLimits(queued_requests=1, models=7)
    Keys(database).create("alice", quotas={"queued_requests": 5})
    clock.now_s += 10
    assert quotas.limits("alice").queued_requests == 5


def test_tokens_of_a_minute_are_counted(database: Database, clock: ManualClock) -> None:
    quotas = Quotas(database, QuotaLimits(tokens_per_minute=600), clock)
    for seq_id in range(6):
        quotas.admit(sample(seq_id, num_tokens=100))
    with pytest.raises(TooManyRequestsError, match="600 tokens were admitted within a minute, the limit is 600"):
        quotas.admit(sample(6, num_tokens=1))
    quotas.admit(sample(7, num_tokens=0))
    clock.now_s += 1  # ten tokens more
    quotas.admit(sample(8, num_tokens=500))
    with pytest.raises(TooManyRequestsError) as refusal:
        quotas.admit(sample(9, num_tokens=1))
    assert refusal.value.retry_after_s == 30.0, "49 seconds of debt, but no client is told to wait for longer than this"
    clock.now_s += 48.9
    with pytest.raises(TooManyRequestsError):
        quotas.admit(sample(9, num_tokens=1))
    clock.now_s += 0.2
    quotas.admit(sample(9, num_tokens=1))


def test_a_quiet_hour_saves_no_more_than_a_minute(database: Database, clock: ManualClock) -> None:
    quotas = Quotas(database, QuotaLimits(tokens_per_minute=60), clock)
    quotas.admit(sample(0, num_tokens=1))
    clock.now_s += 3600
    quotas.admit(sample(1, num_tokens=60))
    with pytest.raises(TooManyRequestsError):
        quotas.admit(sample(2, num_tokens=1))


def test_stored_requests_are_not_refused_and_count_once(database: Database, clock: ManualClock) -> None:
    futures, quotas = Futures(database), Quotas(database, QuotaLimits(queued_requests=1, tokens_per_minute=10), clock)
    quotas.admit(sample(0, num_tokens=6))
    futures.submit(sample(0, num_tokens=6))
    for _ in range(5):
        quotas.admit(sample(0, num_tokens=6))
    futures.settle([Settlement("s:alice:0", body=b"{}")], {})
    clock.now_s += 1
    quotas.admit(sample(1, num_tokens=4))
    with pytest.raises(TooManyRequestsError):
        quotas.admit(sample(2, num_tokens=4))


def test_quotas_are_read_from_a_command_line_by_name() -> None:
    assert read_quotas(["models=3", "queued_bytes=0"]) == {"models": 3, "queued_bytes": 0}
    for text, words in (
        ("model=3", "unknown quota 'model'"),
        ("models", "''"),
        ("models=-1", "'-1'"),
        ("models=1e3", "1e3"),
    ):
        with pytest.raises(UserError, match=words):
            read_quotas([text])


def test_every_quota_has_a_setting() -> None:
    settings = {name.removeprefix("quota_") for name in Settings.model_fields if name.startswith("quota_")}
    assert settings == set(NAMES)
    assert Settings().quota_queued_requests and Settings().quota_queued_bytes, "one tenant must not fill the disk"


# At the routes.


def test_a_refused_operation_stores_nothing_and_its_retry_is_taken(tmp_path: Path) -> None:
    harness = harness_with(tmp_path, queued_requests=2)
    try:
        model_id = harness.model()
        first, second, third = (pass_bytes(model_id, seq_id) for seq_id in (1, 2, 3))
        assert [send_pass(harness, body).status_code for body in (first, second)] == [200, 200]
        before = rows(harness, FUTURES), rows(harness, BODIES)
        assert_refused(send_pass(harness, third), "queued_requests", "2")
        adam = {"model_id": model_id, "seq_id": 3, "adam_params": {"learning_rate": 0.1}}
        assert_refused(harness.post("optim_step", adam), "queued_requests")
        assert (rows(harness, FUTURES), rows(harness, BODIES)) == before
        assert send_pass(harness, second).status_code == 200, "it is stored already"
        harness.settle(f"{model_id}:1")
        assert send_pass(harness, third).status_code == 200
    finally:
        close(harness)


def test_the_next_seq_id_is_accepted_in_a_full_queue(tmp_path: Path) -> None:
    """Otherwise later seq_ids that arrived first would occupy the quota that it needs."""
    harness = harness_with(tmp_path, queued_requests=2)
    try:
        model_id = harness.model()
        assert [send_pass(harness, pass_bytes(model_id, seq_id)).status_code for seq_id in (3, 4)] == [200, 200]
        assert_refused(send_pass(harness, pass_bytes(model_id, 5)), "queued_requests")
        assert send_pass(harness, pass_bytes(model_id, 1)).status_code == 200
        assert_refused(send_pass(harness, pass_bytes(model_id, 2)), "queued_requests")
        harness.settle(f"{model_id}:1")
        assert send_pass(harness, pass_bytes(model_id, 2)).status_code == 200
    finally:
        close(harness)


def test_samples_are_held_to_the_quotas(tmp_path: Path) -> None:
    harness = harness_with(tmp_path, queued_requests=1)
    try:
        sampler = harness.sampler()
        assert harness.post("asample", sample_request(sampler, 0)).status_code == 200
        assert_refused(harness.post("asample", sample_request(sampler, 1)), "queued_requests")
        assert harness.post("asample", sample_request(sampler, 0)).status_code == 200
        assert harness.post("asample", sample_request(harness.sampler(key=BOB), 0), BOB).status_code == 200
    finally:
        close(harness)


def test_an_invalid_request_is_refused_before_quotas(tmp_path: Path) -> None:
    harness = harness_with(tmp_path, queued_requests=1)
    try:
        sampler = harness.sampler()
        harness.ok("asample", sample_request(sampler, 0))
        wrong = harness.ok("asample", sample_request(sampler, 1, num_samples=0))
        assert "num_samples" in harness.result(wrong["request_id"])["error"]
    finally:
        close(harness)


def test_one_model_too_many_is_refused_until_one_is_unloaded(tmp_path: Path) -> None:
    harness = harness_with(tmp_path, models=2)
    try:
        session_id = harness.session()
        first = harness.model(session_id, 0)
        creation = {"session_id": session_id, "model_seq_id": 1, "base_model": BASE}
        harness.ok("create_model", creation)
        third = creation | {"model_seq_id": 2}
        before = rows(harness, MODELS), rows(harness, FUTURES)
        assert_refused(harness.post("create_model", third), "quota models", "2 models", "limit is 2")
        load = {"session_id": session_id, "model_seq_id": 2, "path": harness.checkpoint(first), "optimizer": False}
        assert_refused(harness.post("load_weights", load), "quota models")
        assert (rows(harness, MODELS), rows(harness, FUTURES)) == before
        assert harness.post("create_model", creation).status_code == 200, "it is there already"
        assert harness.post("create_model", creation | {"session_id": harness.session(BOB)}, BOB).status_code == 200
        with harness.services.models._db.write() as connection:
            connection.execute(MODELS.update().where(MODELS.c.model_id == first).values(state="unloaded"))
        assert harness.post("create_model", third).status_code == 200
    finally:
        close(harness)


def test_models_that_are_created_together_are_held_to_the_limit(tmp_path: Path) -> None:
    harness = harness_with(tmp_path, models=3)
    try:
        session_id = harness.session()

        def create(model_seq_id: int) -> int:
            body = {"session_id": session_id, "model_seq_id": model_seq_id, "base_model": BASE}
            return harness.post("create_model", body).status_code

        with ThreadPoolExecutor(8) as pool:
            statuses = list(pool.map(create, range(16)))
        assert sorted(statuses) == [200] * 3 + [429] * 13
    finally:
        close(harness)


@pytest.mark.parametrize("path", ["save_weights", "save_weights_for_sampler"])
def test_full_storage_takes_no_checkpoint_and_still_publishes(tmp_path: Path, path: str) -> None:
    harness = harness_with(tmp_path, checkpoint_bytes=14)
    try:
        model_id = harness.model()
        harness.checkpoint(model_id, name="one")
        save = {"model_id": model_id, "seq_id": 1, "path": "mine"}
        harness.ok(path, save)
        harness.checkpoint(model_id, name="two")
        assert_refused(harness.post(path, save | {"seq_id": 2}), "checkpoint_bytes", "14 bytes", "limit is 14")
        assert harness.post(path, save).status_code == 200, "it is stored already"
        ephemeral = {"model_id": model_id, "seq_id": 2, "sampling_session_seq_id": 0}
        assert harness.post("save_weights_for_sampler", ephemeral).status_code == 200
        assert harness.post(path, {**save, "model_id": harness.model(key=BOB)}, BOB).status_code == 200
        harness.send("DELETE", f"training_runs/{model_id}/checkpoints/weights/one")
        assert harness.post(path, save | {"seq_id": 3}).status_code == 200
    finally:
        close(harness)


def test_full_storage_takes_no_copy(tmp_path: Path) -> None:
    harness = harness_with(tmp_path, checkpoint_bytes=1)
    try:
        source = harness.save_checkpoint(harness.model())
        copy = {"source_path": source, "destination_project_id": "p"}
        assert_refused(harness.post("copy_weights", copy), "checkpoint_bytes")
        harness.services.quotas._defaults = QuotaLimits()
        assert harness.post("copy_weights", copy).status_code == 200
    finally:
        close(harness)


def test_unloading_is_never_refused(tmp_path: Path) -> None:
    harness = harness_with(tmp_path, queued_requests=1)
    try:
        model_id = harness.model()
        assert send_pass(harness, pass_bytes(model_id, 1)).status_code == 200
        assert harness.post("unload_model", {"model_id": model_id}).status_code == 200
    finally:
        close(harness)


def test_the_tokens_of_training_and_sampling_fill_one_quota(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, limits=QuotaLimits(tokens_per_minute=8))
    try:
        model_id, sampler = harness.model(), harness.sampler()
        assert send_pass(harness, pass_bytes(model_id, 1)).status_code == 200  # 3 tokens
        assert harness.post("asample", sample_request(sampler, 0)).status_code == 200  # 2 + 2 * 3
        for answer in (
            send_pass(harness, pass_bytes(model_id, 2)),
            harness.post("asample", sample_request(sampler, 1)),
        ):
            assert_refused(answer, "tokens_per_minute", "limit is 8")
        assert send_pass(harness, pass_bytes(model_id, 1), key=ALICE).status_code == 200, "a retry costs nothing"
    finally:
        close(harness)


# With the real SDK.


@pytest.fixture(scope="module")
def tight_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    tight = {"QUOTA_QUEUED_REQUESTS": "2"}
    with serving(tmp_path_factory.mktemp("tight") / "data", "--backend", "fake", settings=tight) as server:
        yield server


@pytest.mark.extended
def test_the_sdk_completes_a_run_that_is_throttled(tight_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": np.array([2, 3, 4]), "weights": np.ones(3, np.float32)},
    )
    refused: list[str] = []
    send = httpx.AsyncClient.send

    async def send_and_record(client: httpx.AsyncClient, request: httpx.Request, **options: object) -> httpx.Response:
        answer = await send(client, request, **options)  # type: ignore[arg-type]
        if answer.status_code == 429:
            refused.append(request.url.path.rpartition("/")[2])
        return answer

    monkeypatch.setattr(httpx.AsyncClient, "send", send_and_record)
    with tinker.ServiceClient(base_url=tight_server.url, api_key="tml-test") as service:
        model = service.create_lora_training_client("tinsmith/nano", rank=4).result()
        passes = [model.forward_backward([datum], "cross_entropy") for _ in range(8)]
        stepped = model.optim_step(types.AdamParams(learning_rate=0.1))
        assert len([future.result() for future in passes]) == 8
        stepped.result()
        sampler = model.save_weights_and_get_sampling_client().result()
        prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=2)
        samples = [sampler.sample(prompt, num_samples=1, sampling_params=params) for _ in range(6)]
        assert all(len(sample.result().sequences) == 1 for sample in samples)
    assert {"forward_backward", "asample"} <= set(refused), "or nothing was throttled"


# Several servers.

CREATING = """
import sys
from tinsmith.db.factory import open_database
from tinsmith.errors import TooManyRequestsError
from tinsmith.store.models import Models, NewModel
from tinsmith.types import LoraSpec
from tinsmith.auth.quotas import QuotaLimits, Quotas

url, server = sys.argv[1:]
database = open_database(url)
quotas, models = Quotas(database, QuotaLimits(models=5)), Models(database)
quotas.limits("alice")
print("ready", flush=True)
sys.stdin.readline()
created = 0
for number in range(8):
    new = NewModel(f"{server}:train:{number}", server, "alice", "local/tiny", LoraSpec(4))
    try:
        models.create(new, quotas.admission_of_models("alice"))
        created += 1
    except TooManyRequestsError:
        pass
print(created)
database.close()
"""


def test_servers_that_create_models_at_once_create_as_many_as_the_quota_says(tmp_path: Path, database_url: str) -> None:
    command = [sys.executable, "-c", CREATING, database_url]
    pipe = subprocess.PIPE
    servers = [subprocess.Popen([*command, name], stdin=pipe, stdout=pipe, text=True) for name in ("one", "two")]
    try:
        for server in servers:
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
        for server in servers:
            assert server.stdin is not None
            server.stdin.write("go\n")
            server.stdin.flush()
        created = [int(server.communicate(timeout=60)[0]) for server in servers]
    finally:
        for server in servers:
            server.kill()
            server.wait()
    assert sum(created) == 5
    database = open_database(database_url)
    with database.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(MODELS)) == 5
    database.close()


def test_a_creation_that_waits_for_another_servers_counts_it(tmp_path: Path, database_kind: str) -> None:
    """The first creation has not committed when the second one counts."""
    url = fresh_url(tmp_path, database_kind)
    first_database, second_database = open_database(url), open_database(url)
    counted: list[int] = []
    with ThreadPoolExecutor() as pool:
        second: list[Future[object]] = []

        def admit_first(loaded: int) -> None:
            counted.append(loaded)
            second.append(pool.submit(Models(second_database).create, model("s:train:1"), counted.append))
            wait(second, timeout=0.3)  # it must not continue before this transaction ends

        Models(first_database).create(model("s:train:0"), admit_first)
        second[0].result(timeout=60)
    assert counted == [0, 1]
    first_database.close()
    second_database.close()


def model(model_id: str) -> NewModel:
    return NewModel(model_id, "s", "alice", BASE, LoraSpec(4))


# Cached state of tenants.


def test_tenants_that_are_idle_are_forgotten_and_debts_are_not(
    database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas_module, "MAX_TENANTS", 10)
    quotas = Quotas(database, QuotaLimits(tokens_per_minute=600), clock)
    quotas.admit(sample(0, "debtor", num_tokens=6000))
    with pytest.raises(TooManyRequestsError):
        quotas.admit(sample(1, "debtor", num_tokens=1))
    for seq_id in range(100):
        quotas.admit(sample(0, f"tenant-{seq_id}", num_tokens=1))
        clock.now_s += 2.0
    assert len(quotas._tenants) <= 10 + IDLE_S / 2 + 2
    with pytest.raises(TooManyRequestsError):
        quotas.admit(sample(2, "debtor", num_tokens=1))
    clock.now_s += 2000.0
    for seq_id in range(100):
        quotas.admit(sample(1, f"other-{seq_id}", num_tokens=1))
    assert "debtor" not in quotas._tenants
