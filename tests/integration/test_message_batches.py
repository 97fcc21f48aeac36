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
    with anthropic.Anthropic(base_url=fake_server.url, api_key="tml-test", max_retries=2) as made:
        yield made


def request(name: str, **more: object) -> Any:  # noqa: ANN401  the client's own type
    params = {"model": MODEL, "max_tokens": 4, "temperature": 0.0, "messages": [{"role": "user", "content": name}]}
    return {"custom_id": name, "params": params | more}


def ended(client: anthropic.Anthropic, batch_id: str) -> Any:  # noqa: ANN401
    deadline = time.monotonic() + WAIT_S
    while (found := client.messages.batches.retrieve(batch_id)).processing_status != "ended":
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def test_every_request_has_a_result_and_a_wrong_one_an_error(client: anthropic.Anthropic) -> None:
    names = [f"request_{number}" for number in range(6)]
    wrong = [request("hot", temperature=2.0), request("unknown", model="no/such"), request("piece", stream=True)]
    made = client.messages.batches.create(requests=[*map(request, names), *wrong])
    assert (made.type, made.processing_status, made.results_url) == ("message_batch", "in_progress", None)
    assert made.request_counts.processing == 9 and made.request_counts.succeeded == 0
    assert made.id.startswith("msgbatch_") and (made.expires_at - made.created_at).total_seconds() == 86400
    found = ended(client, made.id)
    counts = found.request_counts
    assert (counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired) == (0, 6, 3, 0, 0)
    assert found.ended_at and found.ended_at >= found.created_at and found.cancel_initiated_at is None
    results: dict[str, Any] = {each.custom_id: each.result for each in client.messages.batches.results(made.id)}
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
    assert [each.id for each in page.data] == ids[:0:-1] and page.has_more
    assert (page.first_id, page.last_id) == (ids[2], ids[1])
    assert page.get_next_page().data[0].id == ids[0]
    before = client.messages.batches.list(limit=1, before_id=ids[0])
    assert [each.id for each in before.data] == [ids[1]] and before.has_more
    with openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="tml-test") as other:
        assert not {each.id for each in other.batches.list(limit=100)} & set(ids)
        with pytest.raises(openai.NotFoundError):
            other.batches.retrieve(ids[0])
    for batch_id in ids:
        ended(client, batch_id)
        assert client.messages.batches.delete(batch_id).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError):
            client.messages.batches.retrieve(batch_id)


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "requests"),
        ([request("a"), request("a")], "repeats the custom_id 'a'"),
        ([{"custom_id": "a b", "params": {}}], "custom_id"),
        ([{"custom_id": "a" * 65, "params": {}}], "custom_id"),
        ([{"custom_id": "a", "params": []}], "params"),
    ],
)
def test_invalid_batches_are_refused_by_name(client: anthropic.Anthropic, requests: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(anthropic.BadRequestError, match=words):
        client.messages.batches.create(requests=requests)


def made(harness: Harness, *names: str) -> str:
    body = {"requests": [request(name, model=BASE) for name in names]}
    return harness.client.post("/v1/messages/batches", headers={"X-API-Key": ALICE}, json=body).json()["id"]


def asked(harness: Harness, method: str, path: str) -> Any:  # noqa: ANN401  JSON
    return harness.client.request(method, f"/v1/messages/batches{path}", headers={"X-API-Key": ALICE})


def test_a_batch_that_is_cancelled_before_it_runs_names_every_request(harness: Harness) -> None:
    batch_id = made(harness, "a", "b")
    for method, path, words in (("GET", "/results", "when it has ended"), ("DELETE", "", "when it has ended")):
        refused = asked(harness, method, f"/{batch_id}{path}")
        assert refused.status_code == 400 and words in refused.json()["error"]["message"]
    cancelled = asked(harness, "POST", f"/{batch_id}/cancel").json()
    assert cancelled["processing_status"] == "canceling" and cancelled["cancel_initiated_at"]
    reconciler: Reconciler = harness.services.batch_reconciler
    reconciler.reconcile()
    found = asked(harness, "GET", f"/{batch_id}").json()
    assert found["processing_status"] == "ended" and found["results_url"].endswith(f"/{batch_id}/results")
    none = {"processing": 0, "succeeded": 0, "errored": 0, "expired": 0}
    assert found["request_counts"] == none | {"canceled": 2}
    lines = asked(harness, "GET", f"/{batch_id}/results").text.splitlines()
    assert [line for line in lines if '"canceled"' in line] == lines and len(lines) == 2
    assert asked(harness, "GET", "?after_id=x&before_id=y").status_code == 400
    assert asked(harness, "DELETE", f"/{batch_id}").json() == {"id": batch_id, "type": "message_batch_deleted"}
    assert harness.services.files.page("alice", 10, after=None, ascending=False, purpose=None)[0] == []


def test_a_batch_whose_requests_are_gone_has_ended_with_the_reason(harness: Harness) -> None:
    batch_id = made(harness, "a")
    batch = harness.services.openai_batches.find("alice", batch_id, messages=True)
    harness.services.files.delete("alice", batch.input_file_id)
    harness.services.batch_reconciler.reconcile()
    found = asked(harness, "GET", f"/{batch_id}").json()
    assert found["processing_status"] == "ended" and found["request_counts"]["errored"] == 1
    gone = asked(harness, "GET", f"/{batch_id}/results")
    assert gone.status_code == 404 and "no results" in gone.json()["error"]["message"]
