"""OpenAI's own client against `/v1/responses` of a live server: whole, streamed, with tools, after earlier ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.chat_models import make_tool_model
from support.live import API_KEY, serving

NANO, TOOLS = "tinsmith/nano", "local/tools"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    directory = tmp_path_factory.mktemp("responses")
    models = ("--model", NANO, "--model", f"{TOOLS}={make_tool_model(directory / 'tools')}")
    with serving(directory / "data", *models) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0) as openai_client:
            yield openai_client


def test_a_response_is_the_chat_completion_and_can_be_read_again(client: openai.OpenAI) -> None:
    response = client.responses.create(model=NANO, input="Say hello.", max_output_tokens=200, temperature=0)
    chat = client.chat.completions.create(
        model=NANO, messages=[{"role": "user", "content": "Say hello."}], max_tokens=200, temperature=0
    )
    said = chat.choices[0]
    assert response.output_text == (said.message.content or "")
    thoughts = [item for item in response.output if item.type == "reasoning"]
    expected = getattr(said.message, "reasoning_content", None)
    assert [item.content[0].text for item in thoughts if item.content] == ([expected] if expected else [])
    assert response.status == ("incomplete" if said.finish_reason == "length" else "completed")
    assert chat.usage is not None and response.usage is not None
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert chat.usage.completion_tokens_details is not None
    reasoning = response.usage.output_tokens_details.reasoning_tokens
    assert reasoning == chat.usage.completion_tokens_details.reasoning_tokens > 0
    again = client.responses.retrieve(response.id)
    assert again == response
    next_one = client.responses.create(
        model=NANO, input="And again.", previous_response_id=response.id, max_output_tokens=4
    )
    assert next_one.usage is not None and next_one.usage.input_tokens > response.usage.input_tokens
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


@pytest.mark.parametrize("model", [NANO, TOOLS])
def test_the_events_of_a_stream_make_the_response(client: openai.OpenAI, model: str) -> None:
    tool_options: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required"} if model == TOOLS else {}
    arguments: dict[str, Any] = {"model": model, "input": "Is it raining?", "max_output_tokens": 120, "temperature": 0}
    response = client.responses.create(**arguments, **tool_options)
    events = list(client.responses.create(**arguments, **tool_options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last: Any = events[-1]
    assert last.type == f"response.{response.status}" and last.response.output_text == response.output_text
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == response.output_text
    items: list[Any] = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in items] == [item.type for item in response.output]
    if model == TOOLS:
        (call,) = [item for item in items if item.type == "function_call"]
        assert call.name == "weather" and call.arguments in ('{"city": "Rome"}', '{"city": "Oslo"}')
        added_items: list[Any] = [event.item for event in events if event.type == "response.output_item.added"]
        assert len(added_items) == len(items)


def test_a_called_tool_answers_and_the_chat_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model=TOOLS, input="Is it raining?", tools=[WEATHER], tool_choice="required", max_output_tokens=120
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    second = client.responses.create(
        model=TOOLS,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "yes, it rains"}],
        tools=[WEATHER],
        max_output_tokens=8,
    )
    assert second.status in ("completed", "incomplete") and second.previous_response_id == first.id


def test_a_response_in_the_background_is_polled(client: openai.OpenAI) -> None:
    response = client.responses.create(model=NANO, input="Say hello.", background=True, max_output_tokens=8)
    while response.status in ("queued", "in_progress"):
        response = client.responses.retrieve(response.id)
    assert response.status in ("completed", "incomplete") and response.output
    long = client.responses.create(
        model=NANO, input="Go on.", background=True, max_output_tokens=1900, extra_body={"temperature": 2.0}
    )
    assert client.responses.cancel(long.id).status in ("cancelled", "completed", "incomplete")
