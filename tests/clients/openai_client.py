"""OpenAI's own client against a server: chats, completions, responses, files, batches, models, errors."""

import json
import time

import openai
from checks import KEY, NANO, SAY, TOOL, TOOLS, URL, check

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
chats, responses = client.chat.completions, client.responses
GIVEN = {"model": NANO, "messages": SAY, "max_tokens": 12, "temperature": 0}

answer = chats.create(logprobs=True, top_logprobs=2, **GIVEN)
said = answer.choices[0].message.content
with check("chat"):
    assert said and 0 < len(answer.choices[0].logprobs.content) <= answer.usage.completion_tokens <= 12
    assert answer.usage.completion_tokens_details.reasoning_tokens >= 0
with check("several answers"):
    assert len(chats.create(n=3, seed=1, **(GIVEN | {"temperature": 1})).choices) == 3
with check("stream"):
    chunks = list(chats.create(stream=True, stream_options={"include_usage": True}, **GIVEN))
    assert "".join(resource.choices[0].delta.content or "" for resource in chunks if resource.choices) == said
    assert chunks[-1].usage == answer.usage
with check("tools"):
    tool_request = {"tools": [TOOL], "model": TOOLS, "messages": SAY, "max_tokens": 80, "temperature": 0}
    (call,) = (
        chats.create(tool_choice="required", parallel_tool_calls=False, **tool_request).choices[0].message.tool_calls
    )
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
with check("tools in a stream"):
    with chats.stream(tool_choice={"type": "function", "function": {"name": "weather"}}, **tool_request) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.tool_calls[0].function.name == "weather"
with check("structured output"):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert "n" in json.loads(
        chats.create(response_format=form, **(GIVEN | {"max_tokens": 60})).choices[0].message.content
    )
with check("token ids"):
    ids = chats.create(extra_body={"return_token_ids": True}, **GIVEN)
    assert len(ids.choices[0].token_ids) == ids.usage.completion_tokens and ids.prompt_token_ids
with check("completions"):
    text = client.completions.create(model=NANO, prompt=["a", "b"], max_tokens=4, echo=True, logprobs=1)
    assert [resource.text[0] for resource in text.choices] == ["a", "b"] and text.choices[0].logprobs.token_logprobs[
        0
    ] is None
with check("completions in a stream"):
    assert "".join(
        resource.choices[0].text for resource in client.completions.create(model=NANO, prompt="a", stream=True)
    )
with check("a response, and the next one"):
    first = responses.create(model=NANO, input="Say hello.", max_output_tokens=40, temperature=0)
    assert responses.retrieve(first.id).output_text == first.output_text
    second = responses.create(model=NANO, input="Again.", previous_response_id=first.id, max_output_tokens=5)
    assert second.usage.input_tokens > first.usage.input_tokens
    responses.delete(first.id)
with check("a response in a stream"):
    with responses.stream(model=NANO, input="Say hello.", max_output_tokens=40, temperature=0) as events:
        kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
with check("a response in the background"):
    later = responses.create(model=NANO, input="Say hello.", max_output_tokens=5, background=True)
    while (later := responses.retrieve(later.id)).status in ("queued", "in_progress"):
        time.sleep(0.1)
    assert later.status in ("completed", "incomplete")
with check("files and a batch"):
    body = {"model": NANO, "messages": SAY, "max_tokens": 3}
    rows = [{"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(3)]
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    file = client.files.create(file=("in.jsonl", lines), purpose="batch")
    assert client.files.content(file.id).read() == lines and file.id in {
        resource.id for resource in client.files.list()
    }
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + 120
    while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
        assert time.monotonic() < deadline, batch.status
        time.sleep(0.2)
    results = client.files.content(batch.output_file_id).text.splitlines()
    assert batch.request_counts.completed == 3 == len(results)
    client.files.delete(file.id)
with check("models"):
    assert NANO in {resource.id for resource in client.models.list()} and client.models.retrieve(NANO).id == NANO
with check("errors have their classes"):
    for kind, wrong_fields in (
        (openai.NotFoundError, GIVEN | {"model": "unknown"}),
        (openai.BadRequestError, GIVEN | {"temperature": 9}),
        (openai.BadRequestError, GIVEN | {"extra_body": {"use_beam_search": True}}),
    ):
        try:
            chats.create(**wrong_fields)
        except kind:
            continue
        raise AssertionError(kind)
