"""Requests are stored once: on the event loop if the write lock is free, otherwise on a worker thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard

from support.http_harness import ALICE, BASE, Harness, close, make_harness, pass_bytes, sample_request
from tinsmith.errors import UserError
from tinsmith.store.recorded_sequences import Sequences
from tinsmith.wire import tinker_public_pb2 as pb


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path)
    if new_harness.services.reads_wait:
        close(new_harness)
        pytest.skip("of a database across a network, nothing is asked on the event loop")
    yield new_harness
    close(new_harness)


def step(model_id: str, seq_id: int | None = 1) -> dict[str, object]:
    request: dict[str, object] = {"model_id": model_id, "adam_params": {"learning_rate": 0.1}}
    return request if seq_id is None else request | {"seq_id": seq_id}


def send(harness: Harness, body: bytes, **headers: str) -> dict:
    all_headers = {"X-API-Key": ALICE, "content-type": "application/x-protobuf", **headers}
    answer = harness.client.post("/api/v1/forward_backward", content=body, headers=all_headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_requests_are_stored_by_threads_and_the_loop_does_not_wait_for_another_writer(
    harness: Harness, tmp_path: Path
) -> None:
    model_id, session_id = harness.model(), harness.session()
    sampler = harness.sampler(session_id)
    harness.get("healthz")  # caches the authentication
    with (
        sqlite3.connect(tmp_path / "tinsmith.db", isolation_level=None) as other,
        harness.client,
        ThreadPoolExecutor(1) as pool,
    ):
        other.execute("BEGIN IMMEDIATE")
        storing = pool.submit(harness.ok, "optim_step", step(model_id))
        for _ in range(20):
            assert harness.get("healthz").status_code == 200
        assert not storing.done()
        other.execute("ROLLBACK")
        assert storing.result() == {"request_id": f"{model_id}:1", "model_id": model_id}
    assert [row.request_id for row in harness.pending()] == [f"{model_id}:1"]
    send(harness, pass_bytes(model_id, seq_id=2))
    packed = zstandard.ZstdCompressor().compress(pass_bytes(model_id, seq_id=3))
    send(harness, packed, **{"content-encoding": "zstd"})
    request = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}}
    future = harness.ok("asample", request)
    assert future["request_id"] == f"{sampler}:0"
    assert harness.read_request_body(f"{model_id}:3") == pass_bytes(model_id, seq_id=3)
    assert harness.woken == ["local/tiny"] * 5  # the last was refused; an engine must skip it
    streamed = zstandard.ZstdCompressor().compressobj()  # such a frame does not declare its length
    packed = streamed.compress(pass_bytes(model_id, seq_id=4)) + streamed.flush()
    send(harness, packed, **{"content-encoding": "zstd"})
    assert harness.ok("optim_step", step(model_id, None))["request_id"].startswith(f"{model_id}:5:")


def test_a_sequence_that_cannot_be_admitted_is_the_answer(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def admit(*_args: object) -> None:
        raise UserError("not today")

    monkeypatch.setattr(Sequences, "admit", admit)
    model_id = harness.model()
    message = pb.ForwardBackwardRequest.FromString(pass_bytes(model_id, seq_id=1, loss_fn="stable_reinforce"))
    inputs = message.data[0].loss_fn_inputs
    for name in ("logprobs", "advantages"):
        inputs[name].CopyFrom(inputs["weights"])
    del inputs["weights"]
    body = message.SerializeToString()
    assert "not today" in harness.result(send(harness, body)["request_id"])["error"]


# A seq_id has one request: no request is acknowledged before it is stored.


@pytest.fixture
def any_harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path)
    yield new_harness
    close(new_harness)


def refuse_detail(harness: Harness, path: str, body: object) -> str:
    answer = harness.post(path, body)
    assert answer.status_code == 400, answer.text
    return answer.json()["detail"]


def test_a_number_that_a_request_without_one_took_is_not_acknowledged_again(any_harness: Harness) -> None:
    model_id = any_harness.model()
    request_id = any_harness.ok("optim_step", step(model_id, None))["request_id"]
    assert request_id.startswith(f"{model_id}:1:")
    detail = refuse_detail(any_harness, "optim_step", step(model_id, 1))
    assert "seq_id 1 of model" in detail and "without a seq_id" in detail
    assert any_harness.post("retrieve_future", {"request_id": f"{model_id}:1"}).status_code == 404
    # The next seq_ids are free for clients of both kinds.
    assert any_harness.ok("optim_step", step(model_id, 2))["request_id"] == f"{model_id}:2"
    assert any_harness.ok("optim_step", step(model_id, None))["request_id"].startswith(f"{model_id}:3:")
    assert len(any_harness.pending()) == 3


def test_a_request_that_is_sent_again_has_the_id_it_had(any_harness: Harness) -> None:
    model_id = any_harness.model()
    sampler = any_harness.sampler()
    request = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}}
    for _ in range(3):
        assert any_harness.ok("optim_step", step(model_id, 1))["request_id"] == f"{model_id}:1"
        assert send(any_harness, pass_bytes(model_id, seq_id=2))["request_id"] == f"{model_id}:2"
        assert any_harness.ok("asample", request)["request_id"] == f"{sampler}:0"  # which is refused
    any_harness.settle(f"{model_id}:1")  # and its body freed
    assert any_harness.ok("optim_step", step(model_id, 1))["request_id"] == f"{model_id}:1"


def test_another_request_under_the_same_number_is_refused(any_harness: Harness) -> None:
    model_id = any_harness.model()
    any_harness.ok("optim_step", step(model_id, 1))
    other = step(model_id, 1) | {"adam_params": {"learning_rate": 0.2}}  # of the same length
    assert "(optim_step) with another body" in refuse_detail(any_harness, "optim_step", other)
    assert "(optim_step)" in refuse_detail(
        any_harness, "save_weights", {"model_id": model_id, "seq_id": 1, "path": "one"}
    )
    answer = any_harness.client.post(
        "/api/v1/forward_backward",
        content=pass_bytes(model_id, seq_id=1),
        headers={"X-API-Key": ALICE, "content-type": "application/x-protobuf"},
    )
    assert answer.status_code == 400, answer.text
    any_harness.settle(f"{model_id}:1")  # and its body freed: its length is still known
    longer = step(model_id, 1) | {"adam_params": {"learning_rate": 0.25}}
    assert "with another body" in refuse_detail(any_harness, "optim_step", longer)


def test_samplers_models_and_losses_have_numbers_of_the_same_kind(any_harness: Harness) -> None:
    session_id = any_harness.session()
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE}
    model = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE}
    created = any_harness.ok("create_sampling_session", sampler), any_harness.ok("create_model", model)
    assert (any_harness.ok("create_sampling_session", sampler), any_harness.ok("create_model", model)) == created
    other = sampler | {"base_model": "local/other"}
    assert "use another sampling_session_seq_id" in refuse_detail(any_harness, "create_sampling_session", other)
    assert "with another body" in refuse_detail(any_harness, "create_model", model | {"base_model": "local/other"})
    sampler_id = created[0]["sampling_session_id"]
    sample = sample_request(sampler_id, 7)
    assert any_harness.ok("asample", sample) == any_harness.ok("asample", sample)
    assert "seq_id 7 of sampling session" in refuse_detail(any_harness, "asample", sample | {"num_samples": 3})


def test_a_seq_id_keeps_its_custom_loss(any_harness: Harness) -> None:
    from support import traced_losses

    def build_request(loss: traced_losses.Loss) -> dict[str, object]:
        handle = traced_losses.trace(loss, {"logprobs": 1, "weights": 1})
        return traced_losses.request(handle, session_id=session_id, custom_loss_seq_id=0)

    def other(logprobs, weights):
        loss = (logprobs * weights).sum()
        return loss, {"custom/loss:sum": loss}

    session_id = any_harness.session()
    created = any_harness.ok("create_custom_loss", build_request(traced_losses.weighted))
    assert any_harness.ok("create_custom_loss", build_request(traced_losses.weighted)) == created
    assert "use the next one" in refuse_detail(any_harness, "create_custom_loss", build_request(other))
