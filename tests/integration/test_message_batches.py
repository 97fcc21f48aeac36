"""Anthropic's message batches through the real `anthropic` client: results, counts, pages, cancel and delete."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from support.http_harness import ALICE, BASE, Harness
from support.live import LiveServer
from tinsmith.batch.openai.reconciler import Reconciler

MODEL = "tinsmith/nano"
WAIT_S = 30.0


@pytest.fixture
def client(fake_server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=fake_server.url, api_key="tml-test", max_retries=2) as anthropic_client:
        yield anthropic_client


def request(name: str, **fields: object) -> Any:  # noqa: ANN401  the client's own type
    params = {"model": MODEL, "max_tokens": 4, "temperature": 0.0, "messages": [{"role": "user", "content": name}]}
    return {"custom_id": name, "params": params | fields}


def wait_until_ended(client: anthropic.Anthropic, batch_id: str) -> Any:  # noqa: ANN401
    deadline = time.monotonic() + WAIT_S
    while (batch := client.messages.batches.retrieve(batch_id)).processing_status != "ended":
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
    return batch


def test_every_request_has_a_result_and_a_wrong_one_an_error(client: anthropic.Anthropic) -> None:
    names = [f"request_{index}" for index in range(6)]
    wrong = [request("hot", temperature=2.0), request("unknown", model="no/such"), request("piece", stream=True)]
    created = client.messages.batches.create(requests=[*map(request, names), *wrong])
    assert (created.type, created.processing_status, created.results_url) == ("message_batch", "in_progress", None)
    assert created.request_counts.processing == 9 and created.request_counts.succeeded == 0
    assert created.id.startswith("msgbatch_") and (created.expires_at - created.created_at).total_seconds() == 86400
    batch = wait_until_ended(client, created.id)
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired) == (0, 6, 3, 0, 0)
    assert batch.ended_at and batch.ended_at >= batch.created_at and batch.cancel_initiated_at is None
    results: dict[str, Any] = {line.custom_id: line.result for line in client.messages.batches.results(created.id)}
    assert set(results) == {*names, "hot", "unknown", "piece"}
    for name in names:
        made_one = results[name]
        assert made_one.type == "succeeded" and made_one.message.content[0].text and made_one.message.model == MODEL
        params = {key: request(name)["params"][key] for key in ("model", "messages")}
        usage = made_one.message.usage
        assert (usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens) == (
            client.messages.count_tokens(**params).input_tokens,
            4,
        )
    errors = {name: results[name].error.error for name in ("hot", "unknown", "piece")}
    assert errors["hot"].type == "invalid_request_error" and "temperature" in errors["hot"].message
    assert errors["unknown"].type == "not_found_error" and "stream" in errors["piece"].message


def test_batches_come_in_pages_and_are_not_openais(client: anthropic.Anthropic, fake_server: LiveServer) -> None:
    ids = [client.messages.batches.create(requests=[request("a")]).id for _ in range(3)]
    page = client.messages.batches.list(limit=2)
    assert [batch.id for batch in page.data] == ids[:0:-1] and page.has_more
    assert (page.first_id, page.last_id) == (ids[2], ids[1])
    assert page.get_next_page().data[0].id == ids[0]
    before = client.messages.batches.list(limit=1, before_id=ids[0])
    assert [batch.id for batch in before.data] == [ids[1]] and before.has_more
    with openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="tml-test") as other:
        assert not {batch.id for batch in other.batches.list(limit=100)} & set(ids)
        with pytest.raises(openai.NotFoundError):
            other.batches.retrieve(ids[0])
    for batch_id in ids:
        wait_until_ended(client, batch_id)
        assert client.messages.batches.delete(batch_id).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError):
            client.messages.batches.retrieve(batch_id)


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "requests"),
        ([request("a"), request("a")], r"requests\[1\]: custom_id 'a' is used by an earlier request"),
        ([{"custom_id": "a b", "params": {}}], "custom_id"),
        ([{"custom_id": "a" * 65, "params": {}}], "custom_id"),
        ([{"custom_id": "a", "params": []}], "params"),
    ],
)
def test_invalid_batches_are_refused_by_name(client: anthropic.Anthropic, requests: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(anthropic.BadRequestError, match=words):
        client.messages.batches.create(requests=requests)


def create_batch(harness: Harness, *names: str) -> str:
    body = {"requests": [request(name, model=BASE) for name in names]}
    return harness.client.post("/v1/messages/batches", headers={"X-API-Key": ALICE}, json=body).json()["id"]


def send(harness: Harness, method: str, path: str) -> Any:  # noqa: ANN401  JSON
    return harness.client.request(method, f"/v1/messages/batches{path}", headers={"X-API-Key": ALICE})


def test_a_batch_that_is_cancelled_before_it_runs_names_every_request(harness: Harness) -> None:
    batch_id = create_batch(harness, "a", "b")
    for method, path, words in (("GET", "/results", "when it has ended"), ("DELETE", "", "when it has ended")):
        refused = send(harness, method, f"/{batch_id}{path}")
        assert refused.status_code == 400 and words in refused.json()["error"]["message"]
    cancelled = send(harness, "POST", f"/{batch_id}/cancel").json()
    assert cancelled["processing_status"] == "canceling" and cancelled["cancel_initiated_at"]
    reconciler: Reconciler = harness.services.batch_reconciler
    reconciler.reconcile()
    batch = send(harness, "GET", f"/{batch_id}").json()
    assert batch["processing_status"] == "ended" and batch["results_url"].endswith(f"/{batch_id}/results")
    none = {"processing": 0, "succeeded": 0, "errored": 0, "expired": 0}
    assert batch["request_counts"] == none | {"canceled": 2}
    lines = send(harness, "GET", f"/{batch_id}/results").text.splitlines()
    assert [line for line in lines if '"canceled"' in line] == lines and len(lines) == 2
    assert send(harness, "GET", "?after_id=x&before_id=y").status_code == 400
    assert send(harness, "DELETE", f"/{batch_id}").json() == {"id": batch_id, "type": "message_batch_deleted"}
    assert harness.services.files.page("alice", 10, after=None, ascending=False, purpose=None)[0] == []


def test_a_batch_whose_requests_are_gone_has_ended_with_the_reason(harness: Harness) -> None:
    batch_id = create_batch(harness, "a")
    batch = harness.services.openai_batches.find("alice", batch_id, messages=True)
    harness.services.files.delete("alice", batch.input_file_id)
    harness.services.batch_reconciler.reconcile()
    ended_batch = send(harness, "GET", f"/{batch_id}").json()
    assert ended_batch["processing_status"] == "ended" and ended_batch["request_counts"]["errored"] == 1
    results_answer = send(harness, "GET", f"/{batch_id}/results")
    assert results_answer.status_code == 404 and "no results" in results_answer.json()["error"]["message"]
