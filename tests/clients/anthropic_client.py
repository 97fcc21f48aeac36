"""Anthropic's own client against a server: messages, stream, tools, thinking, counts, models, batches, errors; for
every family a loop as Claude's agents run it, whole and streamed, the client's tool runner, and objects of a schema."""

import time
from typing import Literal

import anthropic
from checks import FAMILIES, KEY, NANO, SAY, TOOLS, URL, WEATHER, check
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
messages, batches = client.messages, client.messages.batches
GIVEN = {"model": NANO, "messages": SAY, "max_tokens": 40, "extra_body": {"temperature": 0}}
TOOL = {"name": "weather", "description": "of a city", "input_schema": WEATHER}

answer = messages.create(**GIVEN)
with check("a message"):
    assert answer.content[0].text and answer.stop_reason == "end_turn" and answer.usage.output_tokens > 0
with check("stream"):
    with messages.stream(**GIVEN) as stream:
        assert "".join(stream.text_stream) == answer.content[0].text
        assert stream.get_final_message().usage.output_tokens == answer.usage.output_tokens
with check("thinking"):
    thought = messages.create(thinking={"type": "enabled", "budget_tokens": 1024}, **(GIVEN | {"max_tokens": 1100}))
    assert {block.type for block in thought.content} <= {"thinking", "text"}
with check("tools"):
    tool_request = {
        "model": TOOLS,
        "messages": SAY,
        "max_tokens": 80,
        "tools": [TOOL],
        "extra_body": {"temperature": 0},
    }
    called = messages.create(tool_choice={"type": "any"}, **tool_request)
    (call,) = [block for block in called.content if block.type == "tool_use"]
    assert call.input["city"] in ("Rome", "Oslo") and called.stop_reason == "tool_use"
with check("a tool's result"):
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "It is dry."}]}
    turns = [*SAY, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert messages.create(**(tool_request | {"messages": turns, "max_tokens": 4})).usage.output_tokens == 4
with check("tools in a stream"):
    with messages.stream(tool_choice={"type": "tool", "name": "weather"}, **tool_request) as stream:
        assert stream.get_final_message().content[0].input["city"] in ("Rome", "Oslo")
with check("count_tokens"):
    assert messages.count_tokens(model=NANO, messages=SAY).input_tokens == answer.usage.input_tokens + (
        answer.usage.cache_read_input_tokens or 0
    )
with check("models"):
    model_ids = {resource.id for resource in client.models.list()}
    assert {NANO, TOOLS} <= model_ids and client.models.retrieve(NANO).type == "model"
with check("batches"):
    params = {"model": NANO, "messages": SAY, "max_tokens": 3}
    batch = batches.create(requests=[{"custom_id": f"n{n}", "params": params} for n in range(3)])
    deadline = time.monotonic() + 120
    while (batch := batches.retrieve(batch.id)).processing_status != "ended":
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
    results = {resource.custom_id: resource.result for resource in batches.results(batch.id)}
    assert batch.request_counts.succeeded == 3 and {resource.type for resource in results.values()} == {"succeeded"}
    assert batch.id in {resource.id for resource in batches.list()} and batches.delete(batch.id).id == batch.id
with check("a batch that is cancelled"):
    batch = batches.create(requests=[{"custom_id": "a", "params": params}])
    try:
        assert batches.cancel(batch.id).processing_status in ("canceling", "ended")
    except anthropic.BadRequestError:
        assert batches.retrieve(batch.id).processing_status == "ended"
with check("errors have their classes"):
    for kind, wrong_fields in (
        (anthropic.NotFoundError, {"model": "unknown"}),
        (anthropic.BadRequestError, {"extra_body": {"use_beam_search": True}}),
        (anthropic.AuthenticationError, {"extra_headers": {"x-api-key": "wrong"}}),
    ):
        try:
            messages.create(**(GIVEN | wrong_fields))
        except kind:
            continue
        raise AssertionError(kind)


class Forecast(BaseModel, extra="forbid"):
    city: Literal["Rome", "Oslo"]
    rain: bool


@anthropic.beta_tool
def weather(city: str) -> str:
    """Look up the weather of a city.

    Args:
        city: its name
    """
    return f"It is dry in {city}."


SYSTEM = [{"type": "text", "text": "Look up the weather.", "cache_control": {"type": "ephemeral"}}]


def hold_loop(family, streamed, **fields) -> None:
    """Call a tool, send its results, and ask for more until there is an answer."""
    turns = [{"role": "user", "content": "Is it raining?"}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "auto"}, {"type": "none"}):
        request = {"model": family, "max_tokens": 4000, "system": SYSTEM, "messages": turns, "tools": [TOOL], **fields}
        if streamed:
            with messages.stream(tool_choice=choice, **request) as stream:
                for _ in stream:
                    pass
                answer = stream.get_final_message()
        else:
            answer = messages.create(tool_choice=choice, **request)
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert all(call.name == "weather" and call.input["city"] in ("Rome", "Oslo") for call in calls)
        assert bool(calls) == (answer.stop_reason == "tool_use")
        assert calls or choice["type"] in ("auto", "none"), answer
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "It is dry."} for call in calls]
        next_content = [*results, {"type": "text", "text": "Go on."}]
        turns += [{"role": "assistant", "content": answer.content}] if answer.content else []
        turns += [{"role": "user", "content": next_content}]
    assert not calls


for family in FAMILIES:
    with check(f"{family}: a loop"):
        hold_loop(family, False)
    with check(f"{family}: a loop in streams"):
        hold_loop(family, True)
    with check(f"{family}: a loop that thinks"):
        hold_loop(family, True, thinking={"type": "adaptive"})
    if "llama" not in family:  # it does not reason
        with check(f"{family}: thoughts before an answer"):
            thinks = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 4000}
            thought = messages.create(model=family, messages=SAY, tools=[TOOL], **thinks)
            assert {block.type for block in thought.content} <= {"thinking", "text", "tool_use"}
            turns = [*SAY, {"role": "assistant", "content": thought.content}, {"role": "user", "content": "Go on."}]
            assert messages.create(model=family, messages=turns if thought.content else SAY, **thinks).usage
    with check(f"{family}: the tool runner"):
        limits = {"model": family, "max_tokens": 4000, "max_iterations": 6}
        runner = client.beta.messages.tool_runner(messages=SAY, tools=[weather], **limits)
        assert [message.usage.output_tokens > 0 for message in runner]
    with check(f"{family}: an object of a schema"):
        parsed = messages.parse(model=family, max_tokens=2000, messages=SAY, output_format=Forecast)
        assert isinstance(parsed.parsed_output, Forecast)
