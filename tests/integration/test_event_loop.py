"""The event loop delegates files, large results and writes that may wait to threads."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.batch_files import lines_of_size
from support.http_harness import (
    ALICE,
    BASE,
    Harness,
    close,
    json_bytes,
    make_harness,
    pass_bytes,
    sample_request,
    send_pass,
)
from tinsmith.api.routes.futures import CHUNK_BYTES, EVENT_LOOP_READ_BYTES
from tinsmith.api.services import MAX_LARGE_RESULTS
from tinsmith.auth.keys import Keys
from tinsmith.db.database import Database
from tinsmith.runtime.threads import RESULTS
from tinsmith.store.futures import FutureOutcome, Futures

LARGE_BYTES = 3 * EVENT_LOOP_READ_BYTES + 1
READERS = 12
PATIENCE_S = 60.0

opened_on_a_loop: list[str] | None = None


def on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and opened_on_a_loop is not None and on_a_loop():
        opened_on_a_loop.append(str(arguments[0]))


sys.addaudithook(_watch)  # permanently: audit hooks cannot be removed


@contextmanager
def watching() -> Iterator[list[str]]:
    """Record the files that an event loop opens within the block."""
    global opened_on_a_loop
    opened_on_a_loop = opened_paths = []
    try:
        yield opened_paths
    finally:
        opened_on_a_loop = None


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path)
    with new_harness.client:
        yield new_harness
    close(new_harness)


def settle_result(harness: Harness, size_bytes: int) -> str:
    model_id = harness.model()
    request_id = send_pass(harness, pass_bytes(model_id, 1)).json()["request_id"]
    harness.settle(request_id, bytes(range(256)) * (size_bytes // 256) + bytes(size_bytes % 256), "proto")
    return request_id


def fetch_result(harness: Harness, request_id: str) -> bytes:
    answer = harness.post("retrieve_future", {"request_id": request_id})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-protobuf"
    return answer.content


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Record the bytes of each result that is read, and whether an event loop read it."""
    sizes: list[tuple[int, bool]] = []
    outcome = Futures.outcome

    def outcome_and_record(self: Futures, *args: object) -> FutureOutcome | None:
        result = outcome(self, *args)  # type: ignore[arg-type]
        if result is not None and result.body is not None:
            sizes.append((len(result.body), on_a_loop()))
        return result

    monkeypatch.setattr(Futures, "outcome", outcome_and_record)
    return sizes


def test_a_large_result_is_read_by_a_thread(harness: Harness, reads: list[tuple[int, bool]]) -> None:
    request_id = settle_result(harness, LARGE_BYTES)
    assert len(fetch_result(harness, request_id)) == LARGE_BYTES
    by_path = harness.get(f"retrieve_future/{request_id}")  # as older clients, which request JSON
    assert by_path.status_code in (200, 500)  # these bytes are not a readable result
    assert reads == [(LARGE_BYTES, False)] * 2


def test_a_small_one_is_read_where_it_is_asked_for(harness: Harness, reads: list[tuple[int, bool]]) -> None:
    request_id = settle_result(harness, EVENT_LOOP_READ_BYTES)
    assert len(fetch_result(harness, request_id)) == EVENT_LOOP_READ_BYTES
    assert reads == [(EVENT_LOOP_READ_BYTES, not harness.services.reads_wait)]


def test_few_large_results_are_read_at_once_and_others_are_answered_meanwhile(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id = settle_result(harness, LARGE_BYTES)
    may_end = threading.Event()
    changed = threading.Condition()
    reading, max_reading = 0, 0
    outcome = Futures.outcome

    def slowly(self: Futures, tenant_id: str, request_id_: str, inline_bytes: int = 0) -> FutureOutcome | None:
        nonlocal reading, max_reading
        if inline_bytes > EVENT_LOOP_READ_BYTES:
            with changed:
                reading += 1
                max_reading = max(max_reading, reading)
                changed.notify_all()
            assert may_end.wait(PATIENCE_S)
            with changed:
                reading -= 1
        return outcome(self, tenant_id, request_id_, inline_bytes)

    monkeypatch.setattr(Futures, "outcome", slowly)
    session_id = harness.session()
    with ThreadPoolExecutor(READERS) as pool:
        try:
            readers = [pool.submit(fetch_result, harness, request_id) for _ in range(READERS)]
            with changed:
                assert changed.wait_for(lambda: reading == min(MAX_LARGE_RESULTS, RESULTS), PATIENCE_S)
            harness.ok("session_heartbeat", {"session_id": session_id, "type": "session_heartbeat"})
            assert harness.get("get_server_capabilities").status_code == 200
        finally:
            may_end.set()
        assert [len(reader.result()) for reader in readers] == [LARGE_BYTES] * READERS
    assert max_reading == min(MAX_LARGE_RESULTS, RESULTS)
    assert harness.services.large_results._value == MAX_LARGE_RESULTS


def test_a_large_result_is_sent_in_pieces(harness: Harness) -> None:
    request_id = settle_result(harness, LARGE_BYTES)
    messages: list[dict[str, object]] = []

    async def poll() -> None:
        body = json_bytes({"request_id": request_id})
        headers = [(b"host", b"127.0.0.1"), (b"x-api-key", ALICE.encode()), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "method": "POST", "path": "/api/v1/retrieve_future", "raw_path": b"", "query_string": b"",
            "headers": headers, "scheme": "http", "http_version": "1.1", "client": ("127.0.0.1", 1), "root_path": "",
            "server": ("127.0.0.1", 80),
        }  # fmt: skip

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, object]) -> None:
            messages.append(message)

        await harness.app(scope, receive, send)  # type: ignore[arg-type]

    asyncio.run(poll())
    chunks = [message["body"] for message in messages[1:]]
    assert all(isinstance(chunk, bytes) and len(chunk) <= CHUNK_BYTES for chunk in chunks)
    assert sum(map(len, chunks)) == LARGE_BYTES  # type: ignore[arg-type]
    assert dict(messages[0]["headers"])[b"content-length"] == str(LARGE_BYTES).encode()  # type: ignore[call-overload]


def test_whether_there_are_keys_is_asked_by_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    any_key = Keys.any
    monkeypatch.setattr(Keys, "any", lambda self: (calls.append(on_a_loop()), any_key(self))[1])
    harness = make_harness(tmp_path, local=True)
    with harness.client:
        assert harness.client.get("/nothing").status_code == 404
        assert harness.client.get("/api/v1/healthz").status_code == 200
    close(harness)
    assert calls == [False]


def tour(harness: Harness) -> None:
    """Send one request of every kind that reads or writes files, or writes to the database."""
    session_id = harness.session()
    model_id = harness.model(session_id)
    sampler = harness.sampler(session_id)
    harness.ok("session_heartbeat", {"session_id": session_id, "type": "session_heartbeat"})
    harness.ok("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    harness.ok("asample", sample_request(sampler))
    harness.post("retrieve_futures", {"target": {"sampling_session_id": sampler}, "timeout": 0})
    path = harness.save_checkpoint(model_id).removeprefix("tinker://")
    for path_ in ("sessions", "training_runs", f"training_runs/{model_id}", "checkpoints", "batch/jobs", "health"):
        harness.get(path_)
    run_id, kind, name = path.split("/")
    link_answer = harness.get(f"training_runs/{run_id}/checkpoints/{kind}/{name}/archive_link").json()
    link = next(value for value in link_answer.values() if isinstance(value, str) and value.startswith("http"))
    assert harness.client.get(link).status_code == 200
    key = {"X-API-Key": ALICE, "Authorization": f"Bearer {ALICE}"}
    large = lines_of_size(3 << 20)  # more than is kept in memory
    form = {"file": ("rows.jsonl", large)}
    stored = harness.client.post("/v1/files", files=form, data={"purpose": "batch"}, headers=key)
    assert stored.status_code == 200, stored.text
    assert harness.client.get(f"/v1/files/{stored.json()['id']}/content", headers=key).content == large
    harness.client.post("/api/v1/upload_weights", files={"adapter_config.json": ("a", b"{}")}, headers=key)
    harness.client.get(f"/hub/{BASE}/resolve/main/config.json", headers=key)
    harness.client.get("/metrics", headers=key)
    harness.client.get("/", headers=key)


def test_no_file_is_opened_on_the_event_loop(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, max_file_bytes=1 << 24)
    with harness.client:
        tour(harness)  # imports and files that are read once are loaded now
        with watching() as opened_paths:
            tour(harness)
    close(harness)
    assert [path for path in opened_paths if not path.startswith("/proc")] == []


def test_no_writer_waits_on_the_event_loop(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers may wait for the lock, so they run on threads."""
    writers: list[bool] = []
    implementation = type(harness.services.models._db)
    write = implementation.write

    def write_and_record(self: Database) -> object:
        writers.append(on_a_loop())
        return write(self)

    monkeypatch.setattr(implementation, "write", write_and_record)
    tour(harness)
    # The harness settles requests itself, on the test's thread.
    assert writers and not any(writers)
