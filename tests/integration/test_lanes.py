"""Slow work does not delay quick requests: uploads, downloads and sweeps have separate thread pools."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.http_harness import ALICE, Harness, close, make_harness
from tinsmith.api.openai import files
from tinsmith.api.request import INLINE_BODY_BYTES
from tinsmith.api.routes import downloads, uploads
from tinsmith.runtime.threads import TRANSFERS

MANY = 40
"""More than the threads of all pools of a server."""
PATIENCE_S = 60.0


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path)
    with new_harness.client:  # one event loop for all
        yield new_harness
    close(new_harness)


class BlockedCall:
    """Wraps a function so that its calls block until they are released."""

    def __init__(self) -> None:
        self._ends = threading.Event()
        self._changed = threading.Condition()
        self.running = 0

    def __call__(self, *_args: object) -> bytes:
        with self._changed:
            self.running += 1
            self._changed.notify_all()
        assert self._ends.wait(PATIENCE_S)
        return b"{}"

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.running >= count, PATIENCE_S), self.running

    def end(self) -> None:
        self._ends.set()


@contextlib.contextmanager
def all_at_once(harness: Harness, path: str, blocker: BlockedCall) -> Iterator[list[int]]:
    """Start the maximum number of uploads to `path`. They end with the block, which then has their statuses."""
    statuses: list[int] = []

    def upload(index: int) -> None:
        answer = harness.client.post(
            path,
            files={"file": (f"{index}.jsonl", b"{}")},
            headers={"X-API-Key": ALICE, "Authorization": f"Bearer {ALICE}"},
        )
        statuses.append(answer.status_code)

    with ThreadPoolExecutor(MANY) as pool:
        try:
            for index in range(MANY):
                pool.submit(upload, index)
            blocker.wait_for(TRANSFERS)
            yield statuses
        finally:
            blocker.end()


@pytest.mark.parametrize(
    ("module", "name", "path"),
    [(uploads, "_store_form", "/api/v1/upload_weights"), (files, "_store", "/v1/files")],
)
def test_uploads_hold_up_neither_heartbeats_nor_capabilities_nor_training(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, module: object, name: str, path: str
) -> None:
    session_id = harness.session()
    model_id = harness.model(session_id)
    blocker = BlockedCall()
    monkeypatch.setattr(module, name, blocker)
    with all_at_once(harness, path, blocker) as statuses:
        for seq_id in range(1, 6):
            harness.ok("session_heartbeat", {"session_id": session_id, "type": "session_heartbeat"})
            assert harness.get("get_server_capabilities").status_code == 200
            harness.ok("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {}})
            harness.ok(
                "optim_step",
                {"model_id": model_id, "adam_params": {}, "seq_id": 10 + seq_id, "type": "x" * INLINE_BODY_BYTES},
            )
            assert harness.post("retrieve_future", {"request_id": f"{model_id}:{seq_id}"}).status_code == 408
        assert blocker.running == TRANSFERS and not statuses
    assert statuses == [200] * MANY


def test_slow_handlers_hold_up_no_heartbeats(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    session_id = harness.session()
    blocker = BlockedCall()
    harness.services.tenants._cache.clear()
    monkeypatch.setattr(harness.services.batch_jobs.__class__, "page", lambda *_args: blocker() and ([], 0))
    with ThreadPoolExecutor(MANY) as pool:
        try:
            slow = [pool.submit(harness.get, "batch/jobs") for _ in range(MANY)]
            blocker.wait_for(6)  # the former number of threads of two processors
            for _ in range(5):
                harness.services.tenants._cache.clear()  # so that the database is asked who calls
                harness.ok("session_heartbeat", {"session_id": session_id, "type": "session_heartbeat"})
                assert harness.get("get_server_capabilities").status_code == 200
        finally:
            blocker.end()
        assert [answer.result().status_code for answer in slow] == [200] * MANY


@contextlib.contextmanager
def full(*pools: ThreadPoolExecutor) -> Iterator[None]:
    """Keep every thread of these pools busy, with more work queued, until the end of the block."""
    blocker = BlockedCall()
    try:
        for pool in pools:
            for _ in range(2 * pool._max_workers):
                pool.submit(blocker)
        blocker.wait_for(sum(pool._max_workers for pool in pools))
        yield
    finally:
        blocker.end()


def test_authentication_and_heartbeats_need_no_thread_of_other_work(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = harness.services
    session_id = harness.session()
    request_id = f"{session_id}:sample:0:0"
    monkeypatch.setattr(services.sessions, "is_poll_heartbeat_due", lambda _session_id: True)
    polled: list[str] = []
    monkeypatch.setattr(services.sessions, "record_poll", lambda _tenant_id, name: polled.append(name))
    threads = services.threads
    with full(threads.handlers, threads.transfers, threads.results, threads.sweeps):
        for path, body in (
            ("auth/token", {}),
            ("client/config", {}),
            ("client/dynamic_config", {}),
            ("create_session", {"tags": [], "type": "create_session"}),
            ("session_heartbeat", {"session_id": session_id, "type": "session_heartbeat"}),
        ):
            services.tenants._cache.clear()  # so that the database is asked who calls
            services.tenants._open_until = 0.0
            harness.ok(path, body)
        assert harness.get("get_server_capabilities").status_code == 200
        assert harness.client.get("/metrics").status_code in (200, 401)
        assert harness.post("retrieve_future", {"request_id": request_id}).status_code == 404
    assert polled == [session_id]


def test_downloads_are_opened_beside_other_requests(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    model_id = harness.model()
    path = harness.save_checkpoint(model_id)
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    link_answer = harness.get(f"training_runs/{run_id}/checkpoints/{kind}/{name}/archive_link")
    assert link_answer.status_code == 200, link_answer.text
    link = next(value for value in link_answer.json().values() if isinstance(value, str) and value.startswith("http"))
    blocker = BlockedCall()
    opened = downloads._open_linked

    def slowly(request: object) -> object:
        blocker()
        return opened(request)  # type: ignore[arg-type]

    monkeypatch.setattr(downloads, "_open_linked", slowly)
    with ThreadPoolExecutor(MANY) as pool:
        try:
            fetched = [pool.submit(harness.client.get, link) for _ in range(MANY)]
            blocker.wait_for(TRANSFERS)
            assert harness.get("get_server_capabilities").status_code == 200
            assert harness.get("sessions").status_code == 200
            assert blocker.running == TRANSFERS
        finally:
            blocker.end()
        assert [answer.result().status_code for answer in fetched] == [200] * MANY
