"""Fields without effect are ignored by name at every door; fields that would change the answer are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import structlog

from support.chat_models import make_tool_model
from support.http_harness import Harness, close, make_harness
from support.pending_requests import incoming
from tinsmith.api.ignored_fields import HEADER, MAX_CLIENTS, MAX_HEADER, IgnoredFieldReports, build_header
from tinsmith.api.openai.generation import CHAT, serve_request
from tinsmith.base_models import Bases, nano, read_shape
from tinsmith.chat.calls import ToolCall
from tinsmith.chat.chats import ChatRequest, CompletionRequest
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.messages import CountRequest, MessageRequest
from tinsmith.chat.responses import ResponseAnswer, ResponseRequest
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.errors import RequestError
from tinsmith.store.futures import Settlement
from tinsmith.types import SampledSequence, SampleResult
from tinsmith.wire.fields import MAX_IGNORED, Body, IgnoredFields, validate
from tinsmith.wire.sampling import write_sample_result

SHAPE = read_shape(nano.MODEL_NAME, nano.path())
TEXT = ModelTokenizer(SHAPE)
SAY = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
FUNCTION = {"name": "weather", "parameters": CITY}
TOOL = {"type": "function", "function": FUNCTION}
CHAT_BODY = {"model": "m", "messages": SAY}
PROMPT_BODY = {"model": "m", "prompt": "hi"}
INPUT_BODY = {"model": "m", "input": "hi"}
MESSAGE_BODY = {"model": "m", "messages": SAY, "max_tokens": 9}
HEADERS = {"Authorization": "Bearer tml-alice", "user-agent": "agent/1"}


@pytest.fixture(scope="module")
def tools_text(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer(read_shape("local/tools", make_tool_model(tmp_path_factory.mktemp("tools") / "m")))


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path)
    services = replace(new_harness.services, bases=Bases((SHAPE,)))
    new_harness.app.state.services = services
    yield replace(new_harness, services=services)
    close(new_harness)


def plan_request(
    kind: type[Any], body: dict[str, Any], text: ModelTokenizer = TEXT
) -> tuple[GenerationPlan, list[str]]:
    """The plan of a request, and the names of its ignored fields."""
    ignored = IgnoredFields()
    plan = validate(kind, body, ignored).plan(text)
    ignored.advise(plan.ignored)
    return plan, list(ignored.names)


EVERYWHERE: list[tuple[str, Any]] = [
    ("use_beam_search", False),
    ("length_penalty", 1),
    ("length_penalty", 1.0),
    ("early_stopping", False),
    ("num_beams", 1),
    ("typical_p", 1),
    ("no_repeat_ngram_size", 0),
    ("store", True),
    ("service_tier", "flex"),
    ("metadata", {"a": "b"}),
    ("user", "u"),
    ("safety_identifier", "s"),
    ("prompt_cache_key", "k"),
    ("prompt_cache_retention", "24h"),
    ("request_id", "r"),
    ("never_heard_of_it", {"a": [1]}),
]
OWN = {"store", "metadata"}  # fields that responses implement


@pytest.mark.parametrize(("name", "value"), EVERYWHERE)
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, CHAT_BODY),
        (CompletionRequest, PROMPT_BODY),
        (ResponseRequest, INPUT_BODY),
        (MessageRequest, MESSAGE_BODY),
    ],
)
def test_a_field_without_effect_is_ignored_by_name(
    kind: type[Body], body: dict[str, Any], name: str, value: object
) -> None:
    plan, names = plan_request(kind, body | {name: value})
    assert plan == plan_request(kind, body)[0]
    assert names == ([] if kind is ResponseRequest and name in OWN else [name])


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"best_of": 1, "use_beam_search": None}, []),
        ({"verbosity": "medium"}, ["verbosity"]),
        ({"reasoning_effort": "low"}, ["reasoning_effort"]),
        ({"reasoning_effort": "none"}, []),
        ({"include_reasoning": True, "echo": False}, ["echo"]),
        ({"modalities": ["text"], "prediction": {"type": "content"}}, ["prediction", "modalities"]),
        ({"web_search_options": {"a": 1}, "moderation": {"a": 1}}, ["moderation", "web_search_options"]),
        ({"messages": [{**SAY[0], "weight": 1, "annotations": []}]}, ["messages[].weight", "messages[].annotations"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"a": 1}}]}]},
         ["messages[].content[].cache_control"]),
        ({"response_format": {"type": "text", "strict": True}}, ["response_format.strict"]),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, ["stream_options.include_obfuscation"]),
        ({"tools": [{"type": "web_search"}, {"type": "mcp"}]}, ["tools[web_search]", "tools[mcp]"]),
        ({"tools": [{"type": "a,\nb"}]}, ["tools['a \\nb']"]),
    ],
)  # fmt: skip
def test_neutral_values_and_hints_of_a_chat_are_ignored_by_name(fields: dict[str, Any], names: list[str]) -> None:
    plan, ignored_names = plan_request(ChatRequest, CHAT_BODY | fields)
    assert sorted(ignored_names) == sorted(names) and plan.params == plan_request(ChatRequest, CHAT_BODY)[0].params


@pytest.mark.parametrize(
    ("kind", "body", "fields", "param"),
    [
        (ChatRequest, CHAT_BODY, {"use_beam_search": True}, "use_beam_search"),
        (ChatRequest, CHAT_BODY, {"length_penalty": 2}, "length_penalty"),
        (ChatRequest, CHAT_BODY, {"early_stopping": True}, "early_stopping"),
        (ChatRequest, CHAT_BODY, {"best_of": 2}, "best_of"),
        (ChatRequest, CHAT_BODY, {"mirostat": 2}, "mirostat"),
        (ChatRequest, CHAT_BODY, {"echo": True}, "echo"),
        (ChatRequest, CHAT_BODY, {"documents": [{"a": "b"}]}, "documents"),
        (ChatRequest, CHAT_BODY, {"max_output_tokens": 3}, "max_output_tokens"),
        (ChatRequest, CHAT_BODY, {"extra_body": {"top_k": 1}}, "extra_body"),
        (ChatRequest, CHAT_BODY, {"response_format": {"type": "yaml"}}, "response_format.type"),
        (ChatRequest, CHAT_BODY, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
        (ChatRequest, CHAT_BODY, {"messages": [{**SAY[0], "prefix": True}]}, "messages[0].prefix"),
        (ResponseRequest, INPUT_BODY, {"top_k": 3}, "top_k"),
        (ResponseRequest, INPUT_BODY, {"frequency_penalty": 1}, "frequency_penalty"),
        (ResponseRequest, INPUT_BODY, {"max_tokens": 3}, "max_tokens"),
        (ResponseRequest, INPUT_BODY, {"conversation": "c"}, "conversation"),
        (ResponseRequest, INPUT_BODY, {"truncation": "auto"}, "truncation"),
        (MessageRequest, MESSAGE_BODY, {"min_p": 0.5}, "min_p"),
        (MessageRequest, MESSAGE_BODY, {"seed": 3}, "seed"),
        (MessageRequest, MESSAGE_BODY, {"stop": ["a"]}, "stop"),
        (MessageRequest, MESSAGE_BODY, {"thinking": {"type": "adaptive", "budget": 1}, "n": 2}, "n"),
        (CompletionRequest, PROMPT_BODY, {"suffix": "x"}, "suffix"),
    ],
)  # fmt: skip
def test_a_field_that_would_change_the_answer_is_refused(
    kind: type[Body], body: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        plan_request(kind, body | fields)
    assert f"{param} is not supported by this server: " in str(refused.value) and refused.value.param == param


CLAUDE_CODE = {
    "model": "m",
    "max_tokens": 900,
    "system": [
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Agents: general-purpose"},
    ],
    "tools": [{"name": "Read", "description": "reads", "input_schema": CITY, "eager_input_streaming": True}],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
CODEX = {
    "model": "m",
    "stream": True,
    "input": [
        {"type": "message", "id": "a", "role": "developer", "content": [{"type": "input_text", "text": "You code."}]},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x", "id": "r"},
        {"type": "function_call", "call_id": "c", "namespace": "agents", "name": "close", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "description": "d", "strict": False, "parameters": CITY},
        {"type": "namespace", "name": "agents", "description": "d", "tools": [
            {"type": "function", "name": "close", "strict": False, "parameters": CITY}]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "text": {"verbosity": "low"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"thread_id": "t"},
}  # fmt: skip
TOOL_RUNNER = MESSAGE_BODY | {
    "thread": {"type": "create"},
    "tools": [
        {"name": "weather", "input_schema": CITY, "defer_loading": True, "allowed_callers": ["direct"]},
        {"type": "tool_search_tool_regex_20251119", "name": "search"},
        {"type": "bash_20250124", "name": "bash"},
    ],
}
AI_SDK = {
    "model": "m",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    "tools": [{"type": "function", "name": "weather", "parameters": CITY, "strict": True, "defer_loading": False}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
    "text": {"format": {"type": "json_schema", "strict": True, "name": "response", "schema": CITY}},
    "max_tool_calls": 3,
    "service_tier": "auto",
}
GUIDELLM = CHAT_BODY | {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_completion_tokens": 16,
    "ignore_eos": True,
}
LITELLM = CHAT_BODY | {
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "b", "reasoning": "r", "provider_specific_fields": {"refusal": None}},
        {"role": "user", "content": "so"},
    ],
    "caching": True,
}


@pytest.mark.parametrize(
    ("kind", "body", "names"),
    [
        (MessageRequest, CLAUDE_CODE, [
            "context_management", "messages[].content[].cache_control", "metadata", "output_config.effort",
            "system[].cache_control", "thinking", "tools[].eager_input_streaming"]),
        (ResponseRequest, CODEX, [
            "client_metadata", "input[].encrypted_content", "input[web_search_call]", "prompt_cache_key",
            "reasoning.summary", "text.verbosity", "tools[web_search]"]),
        (MessageRequest, TOOL_RUNNER, [
            "thread", "tools[].allowed_callers", "tools[].defer_loading", "tools[bash_20250124]",
            "tools[tool_search_tool_regex_20251119]"]),
        (ResponseRequest, AI_SDK, ["max_tool_calls", "service_tier", "tools[].defer_loading"]),
        (ChatRequest, GUIDELLM, []),
        (ChatRequest, LITELLM, ["caching", "messages[].provider_specific_fields", "messages[].reasoning"]),
    ],
)  # fmt: skip
def test_the_bodies_of_agents_and_libraries_are_answered(
    kind: type[Body], body: dict[str, Any], names: list[str], tools_text: ModelTokenizer
) -> None:
    plan, ignored_names = plan_request(kind, body, tools_text)
    assert sorted(ignored_names) == names and plan.prompts[0]


def test_a_system_message_between_turns_is_in_the_prompt_whatever_the_template_drops(
    tools_text: ModelTokenizer,
) -> None:
    """The template of the model writes no second system message if there are tools."""
    plan, _ = plan_request(MessageRequest, CLAUDE_CODE, tools_text)
    written = tools_text.decode(plan.prompts[0], special=True)
    assert "<|im_start|>user\nAgents: general-purpose<|im_end|>" in written
    plan, _ = plan_request(ResponseRequest, CODEX, tools_text)
    written = tools_text.decode(plan.prompts[0], special=True)
    assert "<|im_start|>system\nYou code.\n\n<permissions>" in written and '"name": "agents.close"' in written
    assert plan_request(MessageRequest, CLAUDE_CODE | {"tools": None})[0].prompts[0] == TEXT.chat(
        [
            {"role": "system", "content": "You are an agent.\nBe brief."},
            {"role": "user", "content": "hi"},
            {"role": "system", "content": "Agents: general-purpose"},
        ]
    ), "nano's template writes it where it is"


def test_a_template_that_wants_alternating_turns_gets_them(tmp_path: Path) -> None:
    directory = make_tool_model(tmp_path / "m")
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
        "{% if not loop.first and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('alternate') }}"
        "{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    )
    text = ModelTokenizer(read_shape("local/x", directory))
    roles = ("system", "developer", "user", "system", "user", "assistant", "system")
    messages = [{"role": role, "content": str(index)} for index, role in enumerate(roles)]
    plan, _ = plan_request(ChatRequest, {"model": "m", "messages": messages}, text)
    assert text.decode(plan.prompts[0]) == "[system:0\n\n1][user:2\n\n3\n\n4][assistant:5][user:6]"


def test_reasoning_goes_to_a_template_that_reads_it(tools_text: ModelTokenizer) -> None:
    turns = [*SAY, {"role": "assistant", "content": "b", "reasoning": "because"}, {"role": "user", "content": "so"}]
    called = [{"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}]
    last = [*turns[:1], {**turns[1], "tool_calls": called}]
    plan, names = plan_request(ChatRequest, {"model": "m", "messages": last, "add_generation_prompt": False})
    assert "because" in TEXT.decode(plan.prompts[0]) and not names
    assert plan_request(ChatRequest, {"model": "m", "messages": turns}, tools_text)[1] == ["messages[].reasoning"]


def test_allowed_tools_are_the_only_tools(tools_text: ModelTokenizer) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    body = CHAT_BODY | {"tools": [TOOL, other], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    plan, names = plan_request(ChatRequest, body, tools_text)
    assert plan.tools and [tool.name for tool in plan.tools.tools] == ["weather"] and plan.tools.choice == "required"
    assert not names
    allowed["tools"] = [{"type": "function", "function": {"name": "absent"}}]
    with pytest.raises(RequestError, match="tool_choice allows 'absent', which is not one of the tools"):
        plan_request(ChatRequest, body, tools_text)


def test_a_call_of_a_namespace_has_both_names(tools_text: ModelTokenizer) -> None:
    request = validate(ResponseRequest, CODEX, IgnoredFields())
    response = ResponseAnswer(request, request.plan(tools_text), tools_text)

    def items(name: str) -> list[dict[str, Any]]:
        events = [event for _, event in response._add_call(ToolCall("c", name, "{}"))]
        return [cast("dict[str, Any]", event["item"]) for event in events if "item" in event]

    assert all(item["name"] == "close" and item["namespace"] == "agents" for item in items("agents.close"))
    assert all(item["name"] == "exec_command" and "namespace" not in item for item in items("exec_command"))


def test_a_strict_server_refuses_what_it_would_ignore_but_not_neutral_values() -> None:
    for kind, body, fields, words in (
        (ChatRequest, CHAT_BODY, {"never_heard_of_it": 1}, "never_heard_of_it is not supported by this server: leave"),
        (ChatRequest, CHAT_BODY, {"tools": [{"type": "web_search"}]}, "tools[0] is not supported"),
        (ChatRequest, CHAT_BODY, {"reasoning_effort": "low"}, "reasoning_effort is not supported"),
        (MessageRequest, MESSAGE_BODY, {"thread": {"type": "create"}}, "thread is not supported"),
    ):
        ignored = IgnoredFields(strict=True)
        with pytest.raises(RequestError) as refused:
            ignored.advise(validate(kind, {**body, **fields}, ignored).plan(TEXT).ignored)
        assert words in str(refused.value)
    ignored = IgnoredFields(strict=True)
    validate(ChatRequest, CHAT_BODY | {"use_beam_search": False, "unknown": None, "empty": ""}, ignored)
    assert ignored.names == ("use_beam_search", "empty")


def test_names_headers_and_clients_are_bounded() -> None:
    ignored = IgnoredFields()
    validate(ChatRequest, CHAT_BODY | {f"{'x' * 60}{n}": n for n in range(3 * MAX_IGNORED)}, ignored)
    assert len(ignored.names) == MAX_IGNORED
    header = build_header(ignored.names)[HEADER]
    assert len(header) < MAX_HEADER + 40 and header.endswith("more") and build_header(()) == {}
    reports, counted = IgnoredFieldReports(), list[str]()
    with structlog.testing.capture_logs() as logs:
        for name in ("a", "a", "b"):
            reports.report(counted.append, "alice", "agent/1", [name])
        for index in range(MAX_CLIENTS + 5):
            reports.report(counted.append, "alice", f"agent/{index}", ["a"])
    assert [line["fields"] for line in logs[:2]] == [["a"], ["b"]] and counted[:3] == ["a", "a", "b"]
    assert len(logs) == 2 + MAX_CLIENTS + 4 and len(reports._clients) == MAX_CLIENTS


def test_a_large_body_of_unknown_fields_takes_linear_time() -> None:
    body = {"model": "m", "messages": [{**SAY[0], "unknown": 1} for _ in range(10_000)]}
    ignored = IgnoredFields()
    assert len(validate(ChatRequest, body, ignored).messages) == 10_000 and ignored.names == ("messages[].unknown",)


def post(harness: Harness, path: str, body: dict[str, Any]) -> Any:  # noqa: ANN401  the client's own class
    """Post a request whose sample, if it needs one, is settled with "hello"."""
    with ThreadPoolExecutor(1) as threads:
        posting = threads.submit(harness.client.post, path, json={**body, "model": nano.MODEL_NAME}, headers=HEADERS)
        while not posting.done():
            for row in incoming(harness.services.futures._db, nano.MODEL_NAME):
                if row.state == "pending":
                    ids = np.array(TEXT.encode("hello", special=False), np.int32)
                    sequence = SampledSequence(ids, np.full(len(ids), -0.5, np.float32), "stop")
                    settlement = Settlement(
                        row.request_id, write_sample_result(SampleResult("r", (sequence,))), "proto"
                    )
                    harness.services.futures.settle([settlement], {})
                    harness.services.waiters.wake_from_thread([row.request_id])
        return posting.result()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT_BODY),
        ("/v1/chat/completions", CHAT_BODY | {"stream": True}),
        ("/v1/completions", PROMPT_BODY),
        ("/v1/responses", INPUT_BODY),
        ("/v1/responses", INPUT_BODY | {"stream": True}),
        ("/v1/responses", INPUT_BODY | {"background": True}),
        ("/v1/messages", MESSAGE_BODY),
        ("/v1/messages", MESSAGE_BODY | {"stream": True}),
        ("/v1/messages/count_tokens", {"model": "m", "messages": SAY}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 3}}),
        ("/tokenize", PROMPT_BODY),
    ],
)
def test_the_response_names_the_ignored_fields_and_a_metric_counts_them(
    harness: Harness, path: str, body: dict[str, Any]
) -> None:
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            response = post(harness, path, body | {"zzz": 1, "yyy": "a"})
            assert response.status_code == 200, response.text
            assert set(response.headers[HEADER].split(", ")) == {"zzz", "yyy"}
    (line,) = [line_ for line_ in logs if line_["event"] == "fields ignored"]
    assert line["tenant_id"] == "alice" and "agent/1" in line["user_agent"]
    assert b'tinsmith_ignored_fields_total{field="zzz"} 2.0' in harness.services.meters.text()
    assert HEADER not in post(harness, path, body).headers


def test_a_setting_refuses_unknown_fields(harness: Harness) -> None:
    settings = harness.services.settings.model_copy(update={"strict_fields": True})
    harness.app.state.services = replace(harness.services, settings=settings)
    for path, body in (("/v1/chat/completions", CHAT_BODY), ("/v1/messages", MESSAGE_BODY), ("/tokenize", PROMPT_BODY)):
        response = post(harness, path, body | {"zzz": 1})
        assert response.status_code == 400 and "zzz is not supported" in response.text


def test_the_label_of_rare_names_is_shared(harness: Harness) -> None:
    for index in range(250):
        harness.services.meters.count_ignored_field(f"field{index}")
    assert b'tinsmith_ignored_fields_total{field="other"} 50.0' in harness.services.meters.text()


def test_a_line_of_a_batch_ignores_as_its_route_does(harness: Harness) -> None:
    async def scenario() -> None:
        body = {"model": nano.MODEL_NAME, "messages": SAY, "max_tokens": 10**6, "zzz": 1}
        status, body_of_answer = await serve_request(harness.services, "alice", CHAT, body)
        assert status == 400 and "maximum context length" in json.dumps(body_of_answer)

    asyncio.run(scenario())
    assert b'tinsmith_ignored_fields_total{field="zzz"} 1.0' in harness.services.meters.text()


def test_counting_tokens_takes_the_whole_body_of_a_message() -> None:
    ignored = IgnoredFields()
    validate(CountRequest, MESSAGE_BODY | {"temperature": 0.5, "stream": True}, ignored)
    assert set(ignored.names) == {"max_tokens", "temperature", "stream"}
