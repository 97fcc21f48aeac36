"""The responses API: requests as chats, answers as items, and stored responses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.http_harness import Harness, close, make_harness
from support.pending_requests import incoming
from tinsmith.api.openai.generation import RESPONSES, serve_request
from tinsmith.auth.quotas import QuotaLimits
from tinsmith.base_models import Bases, nano, read_shape
from tinsmith.chat.chats import ChatRequest
from tinsmith.chat.dialects import choose_dialect
from tinsmith.chat.messages import MessageRequest
from tinsmith.chat.responses import ResponseAnswer, ResponseRequest
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.chat.tools import Tool, ToolUse
from tinsmith.cluster.engines import Engines
from tinsmith.db.schema import RESPONSES as RESPONSES_TABLE
from tinsmith.db.schema import SESSIONS
from tinsmith.errors import UserError
from tinsmith.server.janitor import Janitor
from tinsmith.server.pending_responses import PendingResponses
from tinsmith.storage.directories import Directories
from tinsmith.store.futures import Settlement
from tinsmith.store.server_sessions import ImplicitSessions, ServerSessions, session_of
from tinsmith.types import SampledSequence, SampleResult
from tinsmith.wire.fields import validate
from tinsmith.wire.sampling import write_sample_result

SHAPE = read_shape(nano.MODEL_NAME, nano.path())
TEXT = ModelTokenizer(SHAPE)
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
HEADERS = {"Authorization": "Bearer tml-alice"}


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path)
    services = replace(new_harness.services, bases=Bases((SHAPE,)))
    new_harness.app.state.services = services
    yield replace(new_harness, services=services)
    close(new_harness)


def messages(response_input: object, **fields: object) -> list[dict[str, Any]]:
    return validate(ResponseRequest, {"model": "m", "input": response_input, **fields}).chat()["messages"]


@pytest.mark.parametrize(
    ("response_input", "expected"),
    [
        ("hi", [{"role": "user", "content": "hi"}]),
        (
            [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                CALL,
                CALL | {"call_id": "c2"},
                {"type": "function_call_output", "call_id": "c1", "output": "one"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
                {"role": "assistant", "content": "again"},
            ],
            [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a\nb"},
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {"id": name, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
                        for name in ("c1", "c2")
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "one"},
                {"role": "tool", "tool_call_id": "c2", "content": "two"},
                {"role": "assistant", "content": "done"},
                {"role": "assistant", "content": "again"},
            ],
        ),
    ],
)
def test_items_become_messages(response_input: object, expected: list[dict[str, Any]]) -> None:
    assert messages(response_input) == expected
    assert messages(response_input, instructions="be brief") == [{"role": "system", "content": "be brief"}, *expected]


def test_a_request_is_the_chat_in_other_words() -> None:
    tool = {"name": "f", "parameters": {"type": "object"}}
    request = {
        "model": "m", "input": "hi", "max_output_tokens": 7, "temperature": 0.5, "top_p": 0.25,
        "top_logprobs": 3, "include": ["message.output_text.logprobs"],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}},
    }  # fmt: skip
    chat = {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7, "temperature": 0.5,
        "top_p": 0.25, "logprobs": True, "top_logprobs": 3,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}},
    }  # fmt: skip
    assert validate(ResponseRequest, request).plan(TEXT) == validate(ChatRequest, chat).plan(TEXT)
    fields = {
        "model": "m",
        "input": "hi",
        "tools": [{"type": "function", **tool}],
        "tool_choice": {"type": "function", "name": "f"},
    }
    body = validate(ResponseRequest, fields).chat()
    assert body["tools"] == [{"type": "function", "function": tool}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role is 'robot'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type is 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio", "text": "x"}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0] is not supported"),
        ({"background": True, "stream": True}, "background is not supported"),
        ({"background": True, "store": False}, "background is not supported"),
        ({"truncation": "auto"}, "truncation is not supported"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}]},
            "input[0].content[0].image_url is not supported by this server: 'http://x/y.png'; this server fetches",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f", "image_url": "data:,"}]}]},
            "input[0].content[0].file_id is not supported by this server: images of files are not read",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input is not supported by this server: an input_image: this model takes text only",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"uniqueItems": True}}}},
            "text.format.schema.uniqueItems is not supported",
        ),
        ({"previous_response_id": "resp_no"}, "response 'resp_no' does not exist"),
        ({"conversation": "x"}, "conversation is not supported"),
    ],
)
def test_unsupported_fields_are_refused_by_name(harness: Harness, fields: dict[str, Any], words: str) -> None:
    request = {"model": nano.MODEL_NAME, "input": "hi", **fields}
    answer = harness.client.post("/v1/responses", json=request, headers=HEADERS)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def pending(harness: Harness) -> list[str]:
    rows = incoming(harness.services.futures._db, nano.MODEL_NAME)
    return [row.request_id for row in rows if row.state == "pending"]


def settle(harness: Harness, request_id: str, text: str, reason: str = "stop") -> None:
    ids = np.array(TEXT.encode(text, special=False), np.int32)
    result = SampleResult(request_id, (SampledSequence(ids, np.full(len(ids), -0.5, np.float32), reason),))
    harness.services.futures.settle([Settlement(request_id, write_sample_result(result), "proto")], {})


def in_background(harness: Harness, **fields: object) -> dict[str, Any]:
    request = {"model": nano.MODEL_NAME, "input": "hi", "background": True, "max_output_tokens": 9, **fields}
    answer = harness.client.post("/v1/responses", json=request, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def fetch(harness: Harness, response_id: str, method: str = "GET", path: str = "") -> dict[str, Any]:
    return harness.client.request(method, f"/v1/responses/{response_id}{path}", headers=HEADERS).json()


def test_a_response_in_the_background_is_polled_and_gone_on_from(harness: Harness) -> None:
    """The first server that is asked creates the answer from the durable sample; no background task can be lost."""
    created = in_background(harness, instructions="be brief")
    assert created["status"] == "queued" and fetch(harness, created["id"])["status"] == "in_progress"
    early = {"model": nano.MODEL_NAME, "input": "so", "previous_response_id": created["id"]}
    refused = harness.client.post("/v1/responses", json=early, headers=HEADERS)
    assert refused.status_code == 400 and "is in_progress; wait" in refused.json()["error"]["message"]
    (request_id,) = pending(harness)
    settle(harness, request_id, "hello<|im_end|>")
    final = fetch(harness, created["id"])
    assert final["status"] == "completed" and final["output"][0]["content"][0]["text"] == "hello"
    assert fetch(harness, created["id"]) == final and final["instructions"] == "be brief"
    second = in_background(harness, input="so", previous_response_id=created["id"])
    (row,) = [row for row in incoming(harness.services.futures._db, nano.MODEL_NAME) if row.state == "pending"]
    chat = [("user", "hi"), ("assistant", "hello"), ("user", "so")]
    expected = TEXT.chat([{"role": role, "content": content} for role, content in chat])
    body = harness.services.futures.bodies([row.request_id])[row.request_id]
    assert validate_tokens(body) == expected
    settle(harness, row.request_id, "x", "length")
    cut = fetch(harness, second["id"])
    assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert fetch(harness, second["id"], "DELETE")["deleted"] is True
    assert harness.client.get(f"/v1/responses/{second['id']}", headers=HEADERS).status_code == 404


def test_text_with_nul_that_a_model_wrote_can_be_sent_back(harness: Harness) -> None:
    written = "a\x00b"
    created = in_background(harness)
    (request_id,) = pending(harness)
    settle(harness, request_id, f"{written}<|im_end|>")
    assert fetch(harness, created["id"])["output"][0]["content"][0]["text"] == written
    assert in_background(harness, input="so", previous_response_id=created["id"])["status"] == "queued"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{written[0]}"}}'}}
    part = [{"type": "text", "text": written}]
    answer = {"role": "assistant", "content": part, "reasoning_content": written, "tool_calls": [call]}
    chat = [{"role": "user", "content": written}, answer, {"role": "tool", "tool_call_id": "c", "content": written}]
    blocks = [{"type": "thinking", "thinking": written, "signature": ""}, *part]
    turns = [{"role": "user", "content": written}, {"role": "assistant", "content": blocks}, chat[0]]
    items = [{"role": "assistant", "content": [{"type": "output_text", "text": written}]}, chat[0]]
    validate(ChatRequest, {"model": "m", "messages": chat})
    validate(MessageRequest, {"model": "m", "max_tokens": 9, "messages": turns})
    validate(ResponseRequest, {"model": "m", "input": items})


def validate_tokens(body: bytes) -> list[int]:
    from tinsmith.wire.sampling import read_sample

    return read_sample(body, "r", None).prompt_T.tolist()


def test_a_cancelled_response_stays_cancelled(harness: Harness) -> None:
    cancelled = in_background(harness)
    (request_id,) = pending(harness)
    assert fetch(harness, cancelled["id"], "POST", "/cancel")["status"] == "cancelled"
    settle(harness, request_id, "late")
    assert fetch(harness, cancelled["id"])["status"] == "cancelled"
    completed = in_background(harness)
    settle(harness, next(name for name in pending(harness) if "cancel" not in name), "in time")
    assert fetch(harness, completed["id"], "POST", "/cancel")["status"] == "completed"


def test_a_line_of_a_batch_may_ask_for_a_response(harness: Harness) -> None:
    async def scenario() -> None:
        request = {"model": nano.MODEL_NAME, "input": "hi", "max_output_tokens": 4}
        answering = asyncio.create_task(serve_request(harness.services, "alice", RESPONSES, request))
        while not (request_ids := pending(harness)):
            await asyncio.sleep(0.01)
        settle(harness, request_ids[0], "yes")
        harness.services.waiters.wake([request_ids[0]])
        status, body = await answering
        assert status == 200 and body["store"] is False
        status, refused = await serve_request(harness.services, "alice", RESPONSES, request | {"background": True})
        assert status == 400 and "line of a file" in str(refused)

    asyncio.run(scenario())


# Pending responses: only the database has them.

TIMEOUT_S = 300.0


def sweep(harness: Harness, tmp_path: Path) -> None:
    """One round of the work for pending responses, and a sweep of the janitor."""
    PendingResponses(harness.services).run_round()
    db = harness.services.futures._db
    directories = (Directories(tmp_path / name) for name in ("versions", "snapshots"))
    Janitor(harness.services, Engines(db, "here"), *directories).sweep()


def let_pass(harness: Harness, seconds: float) -> None:
    """Move everything that the database remembers into the past."""
    with harness.services.futures._db.write() as connection:
        connection.execute(SESSIONS.update().values(last_heartbeat_at=SESSIONS.c.last_heartbeat_at - seconds))
        connection.execute(SESSIONS.update().values(closed_at=SESSIONS.c.closed_at - seconds))
        connection.execute(RESPONSES_TABLE.update().values(created_at=RESPONSES_TABLE.c.created_at - seconds))
    server_sessions = harness.services.implicit_sessions._server_sessions
    server_sessions._heartbeat_times = {name: at - seconds for name, at in server_sessions._heartbeat_times.items()}


def is_open(harness: Harness, request_id: str) -> bool:
    """Whether the session of a sample is open; the samples of a closed one are cancelled."""
    return harness.services.sessions.get("alice", session_of(request_id)).closed_at is None


def read_answer(harness: Harness, response_id: str) -> dict[str, Any] | None:
    return harness.services.responses.find("alice", response_id).answer


@pytest.mark.parametrize("polled", [True, False])
def test_a_pending_response_outlives_the_timeout_of_sessions(harness: Harness, tmp_path: Path, polled: bool) -> None:
    response = in_background(harness)
    (request_id,) = pending(harness)
    for _ in range(3):
        let_pass(harness, 2 * TIMEOUT_S)
        if polled:
            assert fetch(harness, response["id"])["status"] == "in_progress"
        sweep(harness, tmp_path)
        assert is_open(harness, request_id), "its samples would be cancelled"
    settle(harness, request_id, "late<|im_end|>")
    sweep(harness, tmp_path)
    assert fetch(harness, response["id"])["output"][0]["content"][0]["text"] == "late"


def test_polls_alone_keep_a_pending_response(harness: Harness, tmp_path: Path) -> None:
    response = in_background(harness)
    let_pass(harness, 2 * TIMEOUT_S)
    assert fetch(harness, response["id"])["status"] == "in_progress"
    assert harness.services.sessions.list_silent(TIMEOUT_S) == []


def test_a_server_that_starts_keeps_what_another_accepted(harness: Harness, tmp_path: Path) -> None:
    in_background(harness)
    let_pass(harness, 100 * TIMEOUT_S)
    services = harness.services
    sessions, samplers = services.sessions, services.sampling_sessions
    fresh = ImplicitSessions(ServerSessions(sessions, samplers, TIMEOUT_S))  # with an empty memory
    sweep(replace(harness, services=replace(services, implicit_sessions=fresh)), tmp_path)
    (request_id,) = pending(harness)
    assert is_open(harness, request_id)


def test_a_response_is_stored_when_it_is_complete_and_read_much_later(harness: Harness, tmp_path: Path) -> None:
    response = in_background(harness)
    (request_id,) = pending(harness)
    settle(harness, request_id, "hello<|im_end|>")
    sweep(harness, tmp_path)
    body = read_answer(harness, response["id"])
    assert body is not None and body["status"] == "completed", "nobody has read it"
    let_pass(harness, 29 * 86400)
    for _ in range(3):  # the session is closed, and its futures are deleted
        sweep(harness, tmp_path)
        let_pass(harness, 7200)
    assert harness.services.futures.filter_settled([request_id]) == []
    assert fetch(harness, response["id"]) == body
    let_pass(harness, 2 * 86400)
    sweep(harness, tmp_path)
    assert harness.client.get(f"/v1/responses/{response['id']}", headers=HEADERS).status_code == 404


def test_a_sample_that_fails_makes_a_failed_response(harness: Harness, tmp_path: Path) -> None:
    response = in_background(harness)
    harness.services.futures.settle([Settlement(pending(harness)[0], error=UserError("no such tokens"))], {})
    sweep(harness, tmp_path)
    body = read_answer(harness, response["id"])
    assert body is not None and body["status"] == "failed" and "no such tokens" in body["error"]["message"]


def test_a_response_whose_model_is_away_waits_for_it(harness: Harness, tmp_path: Path) -> None:
    response, other = in_background(harness), in_background(harness, input="ho")
    for request_id in pending(harness):
        settle(harness, request_id, "hello")
    moments = [0.0]
    away = PendingResponses(replace(harness.services, bases=Bases(())), clock=lambda: moments[0])
    away.run_round()
    assert read_answer(harness, response["id"]) is None and read_answer(harness, other["id"]) is None
    away._services = harness.services
    away.run_round()
    assert read_answer(harness, response["id"]) is None, "a pause first"
    moments[0] = 120.0
    away.run_round()
    assert read_answer(harness, response["id"]) and read_answer(harness, other["id"])


def test_a_deleted_response_is_not_sampled_on(harness: Harness) -> None:
    response = in_background(harness)
    (request_id,) = pending(harness)
    assert fetch(harness, response["id"], "DELETE")["deleted"] is True
    assert any(pending_id.startswith(f"{request_id}:") and "cancel" in pending_id for pending_id in pending(harness))
    assert harness.client.delete(f"/v1/responses/{response['id']}", headers=HEADERS).status_code == 404


def test_stored_responses_have_a_quota(tmp_path: Path) -> None:
    limited_harness = make_harness(tmp_path, limits=QuotaLimits(response_bytes=2000))
    services = replace(limited_harness.services, bases=Bases((SHAPE,)))
    limited_harness.app.state.services = services
    harness = replace(limited_harness, services=services)
    first = in_background(harness)
    settle(harness, pending(harness)[0], "hello " * 300)
    PendingResponses(services).run_round()
    assert services.overview.counts("alice")["response_bytes"] > 2000
    request = {"model": nano.MODEL_NAME, "input": "hi", "background": True}
    refused = harness.client.post("/v1/responses", json=request, headers=HEADERS)
    assert refused.status_code == 429 and "quota response_bytes" in refused.json()["error"]["message"]
    fetch(harness, first["id"], "DELETE")
    in_background(harness)
    close(limited_harness)


def test_every_server_gives_a_response_the_same_ids(harness: Harness) -> None:
    """A streamed response may be read from another server before its own has stored it."""
    request = validate(ResponseRequest, {"model": nano.MODEL_NAME, "input": "hi"})
    use = ToolUse((Tool("f", {}, {}),), "auto", False, True, choose_dialect("hermes", ""))
    plan = replace(request.plan(TEXT), tools=use, reasoning_tags=None)
    ids = np.array(TEXT.encode('<tool_call>{"name": "f"}</tool_call>', special=False), np.int32)
    result = SampleResult("r", (SampledSequence(ids, np.full(len(ids), -0.5, np.float32), "stop"),))
    first, second = (ResponseAnswer(request, plan, TEXT, "resp_1", 1.0).build_response([result]) for _ in range(2))
    assert first == second and first["output"]
