"""Anthropic's own client against a server: messages, stream, tools, thinking, counts, models, batches, errors."""

import time

import anthropic
from checks import KEY, NANO, SAY, TOOLS, URL, WEATHER, check

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
messages, batches = client.messages, client.messages.batches
GIVEN = {"model": NANO, "messages": SAY, "max_tokens": 40, "extra_body": {"temperature": 0}}
TOOL = {"name": "weather", "description": "of a city", "input_schema": WEATHER}

whole = messages.create(**GIVEN)
with check("a message"):
    assert whole.content[0].text and whole.stop_reason == "end_turn" and whole.usage.output_tokens > 0
with check("stream"):
    with messages.stream(**GIVEN) as pieces:
        assert "".join(pieces.text_stream) == whole.content[0].text
        assert pieces.get_final_message().usage.output_tokens == whole.usage.output_tokens
with check("thinking"):
    thought = messages.create(thinking={"type": "enabled", "budget_tokens": 1024}, **(GIVEN | {"max_tokens": 1100}))
    assert {block.type for block in thought.content} <= {"thinking", "text"}
with check("tools"):
    asked = {"model": TOOLS, "messages": SAY, "max_tokens": 80, "tools": [TOOL], "extra_body": {"temperature": 0}}
    called = messages.create(tool_choice={"type": "any"}, **asked)
    (call,) = [block for block in called.content if block.type == "tool_use"]
    assert call.input["city"] in ("Rome", "Oslo") and called.stop_reason == "tool_use"
with check("a tool's result"):
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "It is dry."}]}
    turns = [*SAY, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert messages.create(**(asked | {"messages": turns, "max_tokens": 4})).usage.output_tokens == 4
with check("tools in a stream"):
    with messages.stream(tool_choice={"type": "tool", "name": "weather"}, **asked) as pieces:
        assert pieces.get_final_message().content[0].input["city"] in ("Rome", "Oslo")
with check("count_tokens"):
    assert messages.count_tokens(model=NANO, messages=SAY).input_tokens == whole.usage.input_tokens + (
        whole.usage.cache_read_input_tokens or 0
    )
with check("models"):
    found = {each.id for each in client.models.list()}
    assert {NANO, TOOLS} <= found and client.models.retrieve(NANO).type == "model"
with check("batches"):
    params = {"model": NANO, "messages": SAY, "max_tokens": 3}
    made = batches.create(requests=[{"custom_id": f"n{n}", "params": params} for n in range(3)])
    deadline = time.monotonic() + 120
    while (made := batches.retrieve(made.id)).processing_status != "ended":
        assert time.monotonic() < deadline, made
        time.sleep(0.2)
    results = {each.custom_id: each.result for each in batches.results(made.id)}
    assert made.request_counts.succeeded == 3 and {each.type for each in results.values()} == {"succeeded"}
    assert made.id in {each.id for each in batches.list()} and batches.delete(made.id).id == made.id
with check("a batch that is cancelled"):
    made = batches.create(requests=[{"custom_id": "a", "params": params}])
    try:
        assert batches.cancel(made.id).processing_status in ("canceling", "ended")
    except anthropic.BadRequestError:
        assert batches.retrieve(made.id).processing_status == "ended"
with check("errors have their classes"):
    for kind, more in (
        (anthropic.NotFoundError, {"model": "unknown"}),
        (anthropic.BadRequestError, {"extra_body": {"use_beam_search": True}}),
        (anthropic.AuthenticationError, {"extra_headers": {"x-api-key": "wrong"}}),
    ):
        try:
            messages.create(**(GIVEN | more))
        except kind:
            continue
        raise AssertionError(kind)
