"""The responses API: requests as chats, answers as items, and stored responses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.arrived import incoming
from support.http_harness import Harness, close, make_harness
from tinsmith.api.openai.generation import RESPONSES, answer
from tinsmith.base_models import Bases, nano, read_shape
from tinsmith.chat.chats import ChatRequest
from tinsmith.chat.responses import ResponseRequest
from tinsmith.chat.texts import Text
from tinsmith.store.futures import Settlement
from tinsmith.types import SampledSequence, SampleResult
from tinsmith.wire.fields import validate
from tinsmith.wire.sampling import write_sample_result

SHAPE = read_shape(nano.MODEL_NAME, nano.path())
TEXT = Text(SHAPE)
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
HEADERS = {"Authorization": "Bearer tml-alice"}


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = make_harness(tmp_path)
    services = replace(made.services, bases=Bases((SHAPE,)))
    made.app.state.services = services
    yield replace(made, services=services)
    close(made)


def messages(given: object, **more: object) -> list[dict[str, Any]]:
    return validate(ResponseRequest, {"model": "m", "input": given, **more}).chat()["messages"]


@pytest.mark.parametrize(
    ("given", "expected"),
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
def test_items_become_messages(given: object, expected: list[dict[str, Any]]) -> None:
    assert messages(given) == expected
    assert messages(given, instructions="be brief") == [{"role": "system", "content": "be brief"}, *expected]


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
    asked = {
        "model": "m",
        "input": "hi",
        "tools": [{"type": "function", **tool}],
        "tool_choice": {"type": "function", "name": "f"},
    }
    body = validate(ResponseRequest, asked).chat()
    assert body["tools"] == [{"type": "function", "function": tool}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("more", "words"),
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
def test_unsupported_fields_are_refused_by_name(harness: Harness, more: dict[str, Any], words: str) -> None:
    asked = {"model": nano.MODEL_NAME, "input": "hi", **more}
    found = harness.client.post("/v1/responses", json=asked, headers=HEADERS)
    assert found.status_code == 400 and words in found.json()["error"]["message"], found.text


def pending(harness: Harness) -> list[str]:
    rows = incoming(harness.services.futures._db, nano.MODEL_NAME)
    return [row.request_id for row in rows if row.state == "pending"]


def settle(harness: Harness, request_id: str, text: str, reason: str = "stop") -> None:
    ids = np.array(TEXT.encode(text, special=False), np.int32)
    result = SampleResult(request_id, (SampledSequence(ids, np.full(len(ids), -0.5, np.float32), reason),))
    harness.services.futures.settle([Settlement(request_id, write_sample_result(result), "proto")], {})


def in_background(harness: Harness, **more: object) -> dict[str, Any]:
    asked = {"model": nano.MODEL_NAME, "input": "hi", "background": True, "max_output_tokens": 9, **more}
    found = harness.client.post("/v1/responses", json=asked, headers=HEADERS)
    assert found.status_code == 200, found.text
    return found.json()


def seen(harness: Harness, response_id: str, method: str = "GET", path: str = "") -> dict[str, Any]:
    return harness.client.request(method, f"/v1/responses/{response_id}{path}", headers=HEADERS).json()


def test_a_response_in_the_background_is_polled_and_gone_on_from(harness: Harness) -> None:
    """The first server that is asked creates the answer from the durable sample; no background task can be lost."""
    made = in_background(harness, instructions="be brief")
    assert made["status"] == "queued" and seen(harness, made["id"])["status"] == "in_progress"
    early = {"model": nano.MODEL_NAME, "input": "so", "previous_response_id": made["id"]}
    refused = harness.client.post("/v1/responses", json=early, headers=HEADERS)
    assert refused.status_code == 400 and "is in_progress; wait" in refused.json()["error"]["message"]
    (request_id,) = pending(harness)
    settle(harness, request_id, "hello<|im_end|>")
    done = seen(harness, made["id"])
    assert done["status"] == "completed" and done["output"][0]["content"][0]["text"] == "hello"
    assert seen(harness, made["id"]) == done and done["instructions"] == "be brief"
    second = in_background(harness, input="so", previous_response_id=made["id"])
    (row,) = [row for row in incoming(harness.services.futures._db, nano.MODEL_NAME) if row.state == "pending"]
    chat = [("user", "hi"), ("assistant", "hello"), ("user", "so")]
    expected = TEXT.chat([{"role": role, "content": content} for role, content in chat])
    body = harness.services.futures.bodies([row.request_id])[row.request_id]
    assert validate_tokens(body) == expected
    settle(harness, row.request_id, "x", "length")
    cut = seen(harness, second["id"])
    assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert seen(harness, second["id"], "DELETE")["deleted"] is True
    assert harness.client.get(f"/v1/responses/{second['id']}", headers=HEADERS).status_code == 404


def validate_tokens(body: bytes) -> list[int]:
    from tinsmith.wire.sampling import read_sample

    return read_sample(body, "r", None).prompt_T.tolist()


def test_a_cancelled_response_stays_cancelled(harness: Harness) -> None:
    made = in_background(harness)
    (request_id,) = pending(harness)
    assert seen(harness, made["id"], "POST", "/cancel")["status"] == "cancelled"
    settle(harness, request_id, "late")
    assert seen(harness, made["id"])["status"] == "cancelled"
    done = in_background(harness)
    settle(harness, next(each for each in pending(harness) if "cancel" not in each), "in time")
    assert seen(harness, done["id"], "POST", "/cancel")["status"] == "completed"


def test_a_line_of_a_batch_may_ask_for_a_response(harness: Harness) -> None:
    async def scenario() -> None:
        asked = {"model": nano.MODEL_NAME, "input": "hi", "max_output_tokens": 4}
        answering = asyncio.create_task(answer(harness.services, "alice", RESPONSES, asked))
        while not (found := pending(harness)):
            await asyncio.sleep(0.01)
        settle(harness, found[0], "yes")
        harness.services.waiters.settled([found[0]])
        status, body = await answering
        assert status == 200 and body["store"] is False
        status, refused = await answer(harness.services, "alice", RESPONSES, asked | {"background": True})
        assert status == 400 and "line of a file" in str(refused)

    asyncio.run(scenario())
