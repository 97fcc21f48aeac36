"""Tool calls: text cut anywhere has the same text and calls in each dialect, and every protocol has both in order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.answers import result_of, stream_events
from support.properties import examples
from tinsmith.base_models import nano, read_shape
from tinsmith.chat.calls import CallAssembler, CallEvent, DialectParser, ToolCall
from tinsmith.chat.chats import ChatRequest
from tinsmith.chat.choices import Choice
from tinsmith.chat.dialects import choose_dialect
from tinsmith.chat.dialects.dialect import Tool, ToolSchemas
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.messages import MessageAnswer
from tinsmith.chat.responses import ResponseAnswer, ResponseRequest
from tinsmith.chat.results import ChatAnswer
from tinsmith.chat.tokenizer import ModelTokenizer, ReasoningTags
from tinsmith.chat.tools import ToolUse
from tinsmith.types import SamplingParams
from tinsmith.wire.fields import validate

TEXT = ModelTokenizer(read_shape(nano.MODEL_NAME, nano.path()))
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = Tool("weather", WEATHER, {}), Tool("time", {}, {})
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
TAGS = [TEXT.encode(tag, special=False)[0] for tag in ("<think>", "</think>")]

HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Rome"}}'
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
WORDS = {
    "function_xml": [
        XML, XML.replace("Rome", "a</parameter>b\n</function>"), XML.replace("weather", "nope"), "<tool_call>",
        "<function=time>", "<parameter=n>", "</parameter>", "</function>", "</tool_call>", "<parameter=", ">",
    ],
    "hermes": [
        HERMES, HERMES.replace("Rome", 'a\\"</tool_call>{'), HERMES.replace("weather", "nope"),
        "<tool_call>", "</tool_call>", '\n{"name": "time"}', '{"name": "time", "arguments": null}\n', "{", "}", '"',
    ],
    "llama": [
        LLAMA, LLAMA.replace("Rome", "\\u00fc}{"), LLAMA.replace("weather", "nope"), '{"name": "time"}', "\n", ";",
        '{"a": [1, {"b": 2}]}', "{", "}", '"', "[",
    ],
}  # fmt: skip
COMMON = ["Sure. ", "a", "\n\n", "  ", "\u00e9", "<", "\\", ":", "\u2028"]
Parts = list[str | tuple[str, str]]


def new_parser(name: str, schemas: ToolSchemas) -> DialectParser:
    make_parser = choose_dialect(name, "").new_parser
    assert make_parser is not None
    return make_parser(schemas)


def completions_of(name: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(WORDS[name] + COMMON), max_size=12).map("".join)


def parts_of(chunks: Iterable[str], parser: DialectParser) -> Parts:
    assembler = CallAssembler(SCHEMAS, parser)
    parts: list[str | ToolCall] = []
    for chunk in chunks:
        assembler.feed(chunk)
        parts += assembler.take_parts()
    assembler.finish()
    parts += assembler.take_parts()
    return join_text(parts)


def join_text(parts: Iterable[str | ToolCall]) -> Parts:
    """The parts, with adjacent text joined."""
    merged: Parts = []
    for part in parts:
        if isinstance(part, ToolCall):
            merged.append((part.name, part.arguments))
        elif merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    return merged


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", WORDS)
@examples(300)
@given(st.data())
def test_text_cut_anywhere_has_the_same_text_and_calls(name: str, data: st.DataObject) -> None:
    written = data.draw(completions_of(name))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(written)))) | {0, len(written)})
    chunks = [written[start:end] for start, end in pairwise(cuts)]
    parser = new_parser(name, SCHEMAS)
    events: list[CallEvent] = [event for chunk in chunks for event in parser.feed(chunk)]
    events += parser.finish()
    assert "".join(event.source for event in events) == written
    uncut_parts = parts_of([written], new_parser(name, SCHEMAS))
    assert uncut_parts == parts_of(chunks, new_parser(name, SCHEMAS)) == parts_of(written, new_parser(name, SCHEMAS))
    text = "".join(part for part in uncut_parts if isinstance(part, str))
    assert not any(isinstance(part, tuple) for part in uncut_parts) or len(text) < len(written)
    if len(uncut_parts) <= 1 and all(isinstance(part, str) for part in uncut_parts):
        assert text == written, "a completion without calls does not change"


CASES: list[tuple[str, str, Parts]] = [
    ("hermes", f"Sure.{HERMES}Now the time.{HERMES} Done.",
     ["Sure.", "CALL", "Now the time.", "CALL", "Done."]),
    ("hermes", f"{HERMES}\n{HERMES[:40]}", ["CALL", HERMES[:40]]),
    ("hermes", f'{HERMES}\n<tool_call>\n{{"name": "time", "arguments": {{]}}\n</tool_call>',
     ["CALL", '<tool_call>\n{"name": "time", "arguments": {]}\n</tool_call>']),
    ("hermes", f"{HERMES.replace('weather', 'nope')}\n{HERMES}", [HERMES.replace("weather", "nope"), "CALL"]),
    ("hermes", f"{HERMES}\nI used <tool_call> for it.", ["CALL", "I used <tool_call> for it."]),
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "Ro}}}}\n</tool_call>\n{HERMES}',
     ['<tool_call>\n{"name": "weather", "arguments": {"city": "Ro}}\n</tool_call>', "CALL"]),
    ("hermes", HERMES.replace("Rome", "a </tool_call> b"), [("weather", '{"city": "a </tool_call> b"}')]),
    ("hermes", HERMES.replace("Rome", "two\nlines"), [("weather", '{"city": "two\\nlines"}')]),
    ("function_xml", f"Sure.{XML}Now the time.{XML} Done.", ["Sure.", "CALL", "Now the time.", "CALL", "Done."]),
    ("function_xml", f"{XML}\n{XML[:60]}", ["CALL", XML[:60]]),
    ("function_xml", f"{XML.replace('weather', 'nope')}\n{XML}", [XML.replace("weather", "nope"), "CALL"]),
    ("function_xml", XML.replace("<parameter=city>\nRome\n</parameter>\n", ""), [("weather", "{}")]),
    ("function_xml", f"<tool_call>\n<function=weather\n{XML}", ["<tool_call>\n<function=weather", "CALL"]),
    ("function_xml", XML.replace("Rome", "<b>\n</parameter> c"), [("weather", '{"city": "<b>\\n</parameter> c"}')]),
    ("llama", LLAMA, ["CALL"]),
    ("llama", f"Sure.\n{LLAMA}; {LLAMA}\nDone.", ["Sure.", "CALL", "CALL", "Done."]),
    ("llama", f"Sure: {LLAMA}", [f"Sure: {LLAMA}"]),
    ("llama", LLAMA[:-1], [LLAMA[:-1]]),
    ("llama", '{"name": "Ann", "age": 3}', ['{"name": "Ann", "age": 3}']),
    ("llama", f'{{"a":\n{{"b"\n{LLAMA}', ['{"a":\n{"b"', "CALL"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "written", "expected"), CASES)
def test_one_bad_call_does_not_hide_the_text_and_calls_around_it(name: str, written: str, expected: Parts) -> None:
    call = ("weather", '{"city": "Rome"}')
    parts = parts_of([written], new_parser(name, SCHEMAS))
    assert parts == [call if part == "CALL" else part for part in expected]
    assert parts == parts_of(written, new_parser(name, SCHEMAS))


@pytest.mark.parametrize(
    ("given_as", "expected"),
    [
        ("", "{}"),
        (', "arguments": null', "{}"),
        (', "arguments": {}', "{}"),
        (', "arguments": "{}"', "{}"),
        (', "arguments": ""', "{}"),
        (', "arguments": "{\\"city\\": \\"Rome\\"}"', '{"city": "Rome"}'),
        (', "arguments": {"n": 1e999}', '{"n": 1.7976931348623157e+308}'),
        (', "arguments": [1]', None),
        (', "arguments": "Rome"', None),
    ],
)
def test_arguments_are_an_object_in_any_form(given_as: str, expected: str | None) -> None:
    written = f'<tool_call>\n{{"name": "weather"{given_as}}}\n</tool_call>'
    parts = parts_of([written], new_parser("hermes", SCHEMAS))
    assert parts == ([written] if expected is None else [("weather", expected)])


TYPED = {
    "type": "object",
    "properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "share": {"type": "number"},
        "sure": {"type": "boolean"}, "list": {"type": "array"}, "thing": {"$ref": "#/$defs/Thing"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "either": {"type": ["integer", "string"]},
        "level": {"enum": [1, 2]}, "any": {},
    },
    "$defs": {"Thing": {"type": "object"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "written", "expected"),
    [
        ("text", "12", "12"), ("text", "null", "null"), ("text", "\n a\n", "\n a\n"), ("count", " 12 ", 12),
        ("count", "twelve", "twelve"), ("count", "1.5", "1.5"), ("share", "1e3", 1000.0), ("share", "2", 2),
        ("sure", "True", True), ("sure", "yes", "yes"), ("list", '["a", 1]', ["a", 1]), ("list", "{}", "{}"),
        ("thing", '{"a": null}', {"a": None}), ("maybe", "None", None), ("maybe", "3", 3), ("either", "3", "3"),
        ("level", "2", 2), ("any", "3", "3"), ("other", "[]", "[]"), ("count", "true", "true"),
    ],
)  # fmt: skip
def test_values_have_the_types_of_the_tools_schema(key: str, written: str, expected: object) -> None:
    call = f"<tool_call><function=t><parameter={key}>\n{written}\n</parameter></function></tool_call>"
    assembler = CallAssembler({"t"}, new_parser("function_xml", {"t": TYPED}))
    assembler.feed(call)
    assembler.finish()
    (part,) = assembler.take_parts()
    assert isinstance(part, ToolCall) and json.loads(part.arguments) == {key: expected}


# Completions.


def plan_of(form: str = "hermes", *stops: str, **fields: Any) -> GenerationPlan:  # noqa: ANN401  fields
    use = ToolUse(TOOLS, "auto", False, True, choose_dialect(form, ""))
    return GenerationPlan("m", ([1],), 1, SamplingParams(stop_strings=stops), tools=use, **fields)


def read(plan: GenerationPlan, written: str, *, at_once: bool) -> tuple[str, Parts, str, str | None]:
    """A completion's reasoning, parts, text, and the stop string that ended it."""
    choice = Choice(plan, TEXT, 0)
    reasoning = text = ""
    parts: list[str | ToolCall] = []
    for token in [*TEXT.encode(written, special=False), None]:
        if token is None:
            choice.finish()
        else:
            choice.push(token, -0.5)
        if token is None or not at_once:
            text_piece = choice.take_delta()
            reasoning, text, parts = reasoning + text_piece.reasoning, text + text_piece.text, parts + text_piece.parts
    assert [part.index for part in parts if isinstance(part, ToolCall)] == list(range(choice.num_calls))
    return reasoning, join_text(parts), text, choice.stopped_by


@pytest.mark.matrix(4)
@pytest.mark.parametrize("form", WORDS)
@pytest.mark.parametrize("mode", ["plain", "thinking", "begun", "hidden"])
@examples(60)
@given(st.data())
def test_a_stream_has_the_text_and_calls_of_the_whole_completion(form: str, mode: str, data: st.DataObject) -> None:
    tags = ReasoningTags(*TAGS, in_reasoning=mode == "begun")
    reasoning = {"reasoning_tags": tags}
    modes = {"plain": {}, "thinking": reasoning, "begun": reasoning, "hidden": {"hidden_tags": tags}}
    stops = data.draw(st.lists(st.sampled_from(["a", "}", "ro", "Sure. a", "</tool_call>"]), max_size=2))
    words = st.sampled_from([*WORDS[form], *COMMON, "<think>", "</think>"])
    written = "".join(data.draw(st.lists(words, max_size=10)))
    plan = plan_of(form, *stops, **modes[mode])
    assert read(plan, written, at_once=True) == read(plan, written, at_once=False)


CALL = ("weather", '{"city": "Rome"}')


@pytest.mark.parametrize("at_once", [True, False])
def test_a_call_in_unclosed_reasoning_ends_the_reasoning(at_once: bool) -> None:
    for written in (f"<think>\nI need it.\n{HERMES}", f"<think>\nI need it.\n{HERMES}\nSo."):
        expected: Parts = [CALL] if written.endswith(">") else [CALL, "So."]
        answer = read(plan_of(reasoning_tags=ReasoningTags(*TAGS)), written, at_once=at_once)
        assert answer[:2] == ("I need it.", expected)
        assert read(plan_of(hidden_tags=ReasoningTags(*TAGS)), written, at_once=at_once)[:2] == ("", expected)
    closed = f"<think>\n{HERMES}\n</think>\n\nNo."
    assert read(plan_of(reasoning_tags=ReasoningTags(*TAGS)), closed, at_once=at_once)[:2] == (HERMES, ["No."])
    half = f"<think>\n{HERMES[:30]}"
    assert read(plan_of(reasoning_tags=ReasoningTags(*TAGS)), half, at_once=at_once)[:2] == (HERMES[:30], [])


@pytest.mark.parametrize("at_once", [True, False])
def test_a_stop_string_inside_a_call_leaves_its_text(at_once: bool) -> None:
    written = f"{HERMES}\nThen {HERMES}"
    cut = '<tool_call>\n{"name": "weather", "arguments": {"'
    assert read(plan_of("hermes", "city"), written, at_once=at_once) == ("", [cut], cut, "city")
    assert read(plan_of("hermes", "The"), written, at_once=at_once) == ("", [CALL], "", "The")
    assert read(plan_of("hermes", "</tool_call>"), HERMES, at_once=at_once)[1] == [CALL], (
        "the end of a call is part of it"
    )


# Protocols.


IN_ORDER = f"Sure.\n{HERMES}\nNow the time.\n{HERMES}\nDone."


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_chat_has_the_text_and_the_calls(reason: str) -> None:
    plan, result = plan_of(), result_of(TEXT, IN_ORDER, reason)
    body: Any = ChatAnswer(plan, TEXT).build_response([result])
    message = body["choices"][0]["message"]
    assert message["content"] == "Sure.\nNow the time.\nDone." and len(message["tool_calls"]) == 2
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    choices = [event["choices"][0] for event in stream_events(ChatAnswer(plan, TEXT), TEXT, result)]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1] and calls[0]["function"] == message["tool_calls"][0]["function"]
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_a_message_has_its_blocks_in_their_order() -> None:
    plan, result = plan_of(), result_of(TEXT, IN_ORDER)
    body: Any = MessageAnswer(plan, TEXT).build_response([result])
    blocks = [(block["type"], block.get("text") or block.get("input")) for block in body["content"]]
    use = ("tool_use", {"city": "Rome"})
    assert blocks == [("text", "Sure."), use, ("text", "Now the time."), use, ("text", "Done.")]
    assert body["stop_reason"] == "tool_use"
    streamed: list[list[str]] = []
    for event in stream_events(MessageAnswer(plan, TEXT), TEXT, result):
        if event["type"] == "content_block_start":
            assert event["index"] == len(streamed)
            streamed.append([event["content_block"]["type"], ""])
        elif event["type"] == "content_block_delta":
            streamed[-1][1] += event["delta"].get("text", "") + event["delta"].get("partial_json", "")
        elif event["type"] == "message_delta":
            assert event["delta"]["stop_reason"] == "tool_use"
    assert [(kind, json.loads(text) if kind == "tool_use" else text) for kind, text in streamed] == blocks


def test_a_response_has_its_items_in_their_order() -> None:
    request = validate(ResponseRequest, {"model": "m", "input": "hi"})
    plan, result = plan_of(), result_of(TEXT, IN_ORDER)
    body: Any = ResponseAnswer(request, plan, TEXT, "resp_1").build_response([result])
    kinds = ["message", "function_call", "message", "function_call", "message"]
    assert [item["type"] for item in body["output"]] == kinds
    assert [item["content"][0]["text"] for item in body["output"][::2]] == ["Sure.", "Now the time.", "Done."]
    events = stream_events(ResponseAnswer(request, plan, TEXT, "resp_1"), TEXT, result)
    assert events[-1]["response"]["output"] == body["output"], "also the ids, which every server builds alike"


def test_a_chat_template_decides_on_the_dialect(tmp_path_factory: pytest.TempPathFactory) -> None:
    from support.chat_models import make_tool_model

    text = ModelTokenizer(read_shape("local/x", make_tool_model(tmp_path_factory.mktemp("tools") / "m")))
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    plan = validate(ChatRequest, body).plan(text)
    assert plan.tools is not None and plan.tools.dialect.name == "hermes"
    assert read(replace(plan, reasoning_tags=None), IN_ORDER, at_once=False)[1][1] == CALL


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("function_xml", "<tool_call><function=weather><parameter=a>"),
        ("hermes", '<tool_call>{"'),
        ("hermes", '<tool_call>{"a": ['),
        ("llama", '{"a":\n'),
        ("llama", '{"a":"b"}\n'),
        ("deepseek_v31", "<\uff5ctool\u2581call\u2581begin\uff5c>weather"),
        ("kimi_k2", "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"a'),
    ],
)
def test_many_beginnings_of_calls_are_not_read_again_for_each_of_them(name: str, unit: str) -> None:
    written = unit * 30_000  # quadratic work would take hours
    assert parts_of([written], new_parser(name, SCHEMAS)) == [written]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("function_xml", "<tool_call><function=weather><parameter=city>Rome</parameter>\n<parameter"),
        ("glm47", "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="weather"><parameter name="city">Rome</parameter>'),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>Rome<|"'),
        ("pythonic", "[weather(city\n"),
        ("pythonic", '[weather(city="Rome\n'),
    ],
)
def test_the_work_for_beginnings_with_texts_is_bounded(name: str, unit: str) -> None:
    written = unit * (60_000 // len(unit)) + "."  # quadratic work would take minutes
    assert parts_of([written], new_parser(name, SCHEMAS)) == [written]
