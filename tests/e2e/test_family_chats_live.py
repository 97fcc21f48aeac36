"""OpenAI's and Anthropic's clients converse and call tools on tiny models of four families with their templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from support.family_chat_models import FAMILY_CHATS, make_family_chat_model
from support.live import API_KEY, LiveServer, serving

CITIES = {"Rome", "Oslo"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": sorted(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
QUESTION: Any = {"role": "user", "content": "Is it raining?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory: Path = tmp_path_factory.mktemp("families")
    models: list[str] = []
    for family in FAMILY_CHATS:
        models += ["--model", f"local/{family}={make_family_chat_model(directory / family, family)}"]
    with serving(directory / "data", *models) as live:
        yield live


@pytest.mark.parametrize("family", FAMILY_CHATS)
def test_openais_client_gets_calls_and_sends_results(server: LiveServer, family: str) -> None:
    chats = openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0).chat.completions
    request: Any = {
        "model": f"local/{family}",
        "max_tokens": 2000,
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    turns = [QUESTION]
    message = chats.create(messages=turns, tool_choice="required", **request).choices[0].message
    calls = message.tool_calls or []
    assert calls and all(json.loads(call.function.arguments)["city"] in CITIES for call in calls)
    turns += [message, *({"role": "tool", "tool_call_id": call.id, "content": "dry"} for call in calls)]
    named: Any = {"type": "function", "function": {"name": "weather"}}
    with chats.stream(messages=turns, tool_choice=named, **request) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed and streamed[0].function.name == "weather"
    assert chats.create(messages=turns, tool_choice="none", **request).usage.completion_tokens > 0


@pytest.mark.parametrize("family", FAMILY_CHATS)
def test_two_calls_and_their_results_are_in_the_prompt(server: LiveServer, family: str) -> None:
    """Also where the template writes only one call of a message, as those of Llama 3 and gpt-oss."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0)
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
        for call_id, city in (("a", "Rome"), ("b", "Oslo"))
    ]
    turns: Any = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "first result"},
        {"role": "tool", "tool_call_id": "b", "content": "second result"},
    ]
    tokenized = client.post(
        f"{server.url}/tokenize", cast_to=object, body={"model": f"local/{family}", "messages": turns}
    )
    body = {"model": f"local/{family}", "tokens": tokenized["tokens"]}  # type: ignore[index]
    prompt = str(client.post(f"{server.url}/detokenize", cast_to=object, body=body))
    assert all(text in prompt for text in ("Rome", "first result", "Oslo", "second result"))
    answer = client.chat.completions.create(model=f"local/{family}", messages=turns, max_tokens=2000)
    assert answer.usage is not None and answer.usage.completion_tokens > 0


@pytest.mark.parametrize("family", FAMILY_CHATS)
def test_responses_continue_after_calls_and_have_forms(server: LiveServer, family: str) -> None:
    responses = openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0).responses
    request: Any = {"model": f"local/{family}", "max_output_tokens": 2000, "tools": [{"type": "function", **FUNCTION}]}
    first = responses.create(input=[QUESTION], tool_choice="required", **request)
    calls = [item for item in first.output if item.type == "function_call"]
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "dry"} for call in calls]
    with responses.stream(input=results, previous_response_id=first.id, **request) as stream:
        kinds = [event.type for event in stream]
    assert calls and kinds[-1] in ("response.completed", "response.incomplete")
    form: Any = {"format": {"type": "json_schema", "name": "forecast", "schema": SCHEMA, "strict": True}}
    answer = responses.create(model=f"local/{family}", input=[QUESTION], max_output_tokens=2000, text=form)
    assert json.loads(answer.output_text)["city"] in CITIES


@pytest.mark.parametrize("family", FAMILY_CHATS)
def test_anthropics_client_gets_calls_and_sends_results(server: LiveServer, family: str) -> None:
    messages = anthropic.Anthropic(base_url=server.url, api_key=API_KEY, max_retries=0).messages
    tool: Any = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
    request: Any = {"model": f"local/{family}", "max_tokens": 2000, "tools": [tool]}
    turns = [QUESTION]
    called = messages.create(messages=turns, tool_choice={"type": "any"}, **request)
    calls = [block for block in called.content if block.type == "tool_use"]
    assert calls and called.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "dry"} for call in calls]
    turns += [{"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    with messages.stream(messages=turns, thinking={"type": "adaptive"}, **request) as stream:
        assert stream.get_final_message().usage.output_tokens > 0
