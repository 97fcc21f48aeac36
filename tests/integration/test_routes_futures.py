"""The long poll: the response for each outcome, and its timing."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest
import zstandard
from tinker.types import RequestFailedResponse
from tinker.types.try_again_response import TryAgainResponse

from support.http_harness import ALICE, BASE, BOB, MAX_BODY_BYTES, Harness, close, json_bytes, make_harness
from tinsmith.api.request import INLINE_BODY_BYTES
from tinsmith.errors import EngineFailedError, UserError
from tinsmith.store.futures import FutureOutcome, Settlement


def submit_step(harness: Harness) -> str:
    body = {"model_id": harness.model(), "seq_id": 1, "adam_params": {}}
    return harness.ok("optim_step", body)["request_id"]


def test_a_pending_future_is_408_after_the_hold(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, hold_s=0.2)
    try:
        request_id = submit_step(harness)
        started = time.monotonic()
        answer = harness.post("retrieve_future", {"request_id": request_id})
        assert time.monotonic() - started >= 0.2
        assert answer.status_code == 408
        assert answer.json() == {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        assert len(harness.services.waiters) == 0
    finally:
        close(harness)


def test_a_paused_queue_says_why(harness: Harness) -> None:
    request_id = submit_step(harness)
    harness.queue[BASE] = ("paused_capacity", "the engine is loading")
    answer = TryAgainResponse.model_validate(harness.post("retrieve_future", {"request_id": request_id}).json())
    assert answer.queue_state == "paused_capacity"
    assert harness.post("retrieve_future", {"request_id": request_id}).json()["queue_state_reason"] == (
        "the engine is loading"
    )


@pytest.mark.parametrize(
    ("result_type", "media_type"), [("proto", "application/x-protobuf"), ("json", "application/json")]
)
def test_a_result_comes_byte_for_byte_and_again(harness: Harness, result_type: str, media_type: str) -> None:
    request_id = submit_step(harness)
    body = bytes(range(256)) if result_type == "proto" else b'{"metrics": {"a": 1.0}}'
    harness.settle(request_id, body, result_type)
    for _ in range(2):
        answer = harness.post("retrieve_future", {"request_id": request_id, "allow_metadata_only": True})
        assert (answer.status_code, answer.content) == (200, body)
        assert answer.headers["content-type"] == media_type


@pytest.mark.parametrize(("error", "category"), [(UserError("too wide"), "user"), (EngineFailedError("oh"), "server")])
def test_a_failure_is_a_200_with_its_category(harness: Harness, error: Exception, category: str) -> None:
    request_id = submit_step(harness)
    harness.fail(request_id, error)  # type: ignore[arg-type]
    failed = RequestFailedResponse.model_validate(harness.result(request_id))
    assert (failed.error, failed.category.value) == (str(error), category)


def test_a_settlement_wakes_the_poll_that_waits_for_it(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, hold_s=20)
    try:
        request_id = submit_step(harness)
        looks = count_looks(harness)

        async def poll_and_settle() -> tuple[httpx.Response, float]:
            transport = httpx.ASGITransport(app=harness.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                polling = asyncio.create_task(
                    client.post(
                        "/api/v1/retrieve_future", json={"request_id": request_id}, headers={"X-API-Key": ALICE}
                    )
                )
                while len(harness.services.waiters) == 0:
                    await asyncio.sleep(0.005)
                harness.services.waiters.wake_all()  # a hint without a settlement changes nothing
                await asyncio.sleep(0.05)
                assert not polling.done()
                assert len(looks) == 2  # once at first and once after the hint, not repeatedly
                started = time.monotonic()
                await asyncio.to_thread(
                    harness.services.futures.settle, [Settlement(request_id, body=b'{"done":true}')], {}
                )
                harness.services.waiters.wake([request_id])
                return await polling, time.monotonic() - started

        answer, delay_s = asyncio.run(poll_and_settle())
        assert answer.json() == {"done": True}
        assert delay_s < 5
    finally:
        close(harness)


def count_looks(harness: Harness) -> list[str]:
    """Record the request_ids that are looked up."""
    looks: list[str] = []
    outcome = harness.services.futures.outcome

    def look(tenant_id: str, request_id: str, inline_bytes: int) -> FutureOutcome | None:
        looks.append(request_id)
        return outcome(tenant_id, request_id, inline_bytes)

    harness.services.futures.outcome = look  # type: ignore[method-assign]
    return looks


@pytest.mark.parametrize("request_id", ["no-such", "a\udcffb".encode("utf-8", "replace").decode()])
def test_an_unknown_request_is_404(harness: Harness, request_id: str) -> None:
    answer = harness.post("retrieve_future", {"request_id": request_id})
    assert answer.status_code == 404
    assert request_id in answer.json()["detail"]


def test_another_tenants_request_is_unknown(harness: Harness) -> None:
    request_id = submit_step(harness)
    harness.settle(request_id)
    assert harness.post("retrieve_future", {"request_id": request_id}, BOB).status_code == 404


@pytest.mark.parametrize(("body", "words"), [({}, "request_id is missing"), ({"request_id": 3}, "request_id is 3")])
def test_a_poll_for_nothing_is_a_400(harness: Harness, body: object, words: str) -> None:
    answer = harness.post("retrieve_future", body)
    assert answer.status_code == 400
    assert words in answer.json()["detail"]


@pytest.mark.parametrize("path", ["retrieve_future", "retrieve_futures", "delete_model"])
def test_a_poll_may_be_compressed_and_is_bounded(harness: Harness, path: str) -> None:
    model_id = harness.model()
    body = {"request_id": f"{model_id}:0", "model_id": model_id, "target": {"sampling_session_id": harness.sampler()}}

    def send(content: bytes, **headers: str) -> httpx.Response:
        all_headers = {"X-API-Key": ALICE, "Content-Type": "application/json"} | headers
        return harness.client.post(f"/api/v1/{path}", content=content, headers=all_headers)  # type: ignore[return-value]

    packed = zstandard.ZstdCompressor().compress(json_bytes(body))
    assert send(packed, **{"Content-Encoding": "zstd"}).status_code == 200
    bomb = zstandard.ZstdCompressor().compress(b" " * (MAX_BODY_BYTES + 1))
    assert send(bomb, **{"Content-Encoding": "zstd"}).status_code == 413
    long = json_bytes(body | {"retrieved_request_ids": ["x" * 60] * 1400})
    assert MAX_BODY_BYTES > len(long) > INLINE_BODY_BYTES
    assert send(long).status_code == 200
    deep = json_bytes(body)[:-1] + b',"x":' + b"[" * 70 + b"]" * 70 + b"}"
    assert "64 levels" in send(deep).json()["detail"]
