"""Every dialect of tool calls: what its template writes is read back, cut anywhere, whole and streamed, and its
grammars allow exactly the calls of the tools.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from support.answers import result_of, stream_events
from support.properties import examples
from support.tool_templates import CALLS, make_dialect_model
from tinsmith.base_models import read_shape
from tinsmith.chat.calls import CallAssembler, CallEvent, DialectParser, ToolCall
from tinsmith.chat.chats import ChatRequest
from tinsmith.chat.dialects import DIALECTS, choose_dialect, detect_dialect, list_names, read_tool_parsers
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.messages import MessageAnswer
from tinsmith.chat.responses import ResponseAnswer, ResponseRequest
from tinsmith.chat.results import ChatAnswer
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.errors import RequestError, SettingsError
from tinsmith.samplers.local.grammar import GrammarCache
from tinsmith.types import Adjustments, Grammar, SampleResult
from tinsmith.wire.fields import validate

NAMES = sorted(CALLS)
LINE_DIALECTS = ("llama", "pythonic")
"""Dialects without marks, whose calls begin a line."""
SINGLE_FORM = ("mistral_list", "mistral_args", "llama", "pythonic", "granite", "nemotron")
"""Dialects whose calls have no closing of their own."""

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "sure": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "place": {"type": "object"},
    "none": {"type": "null"},
}
WEATHER = {"type": "object", "properties": PROPERTIES}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get-time.now", "parameters": {"type": "object"}}},
]
SCHEMAS: Mapping[str, Mapping[str, object]] = {"weather": WEATHER, "get-time.now": {}}
Parts = list[str | tuple[str, dict[str, Any]]]


def new_parser(name: str) -> DialectParser:
    make_parser = choose_dialect(name, "").new_parser
    assert make_parser is not None
    return make_parser(SCHEMAS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, bool], ModelTokenizer]:
    """Models of every dialect, with its marks as special tokens and as text."""
    root = tmp_path_factory.mktemp("models")
    return {
        (name, special): make_dialect_model(root / f"{name}-{special}", name, special=special)
        for name in NAMES
        for special in (True, False)
    }


def plan_of(model: ModelTokenizer, **fields: object) -> GenerationPlan:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    return validate(ChatRequest, body | fields).plan(model)


def render_calls(model: ModelTokenizer, content: str, calls: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """Return the completion that the chat template writes for a message with calls."""
    written = [
        {"id": f"call_{index}", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": written}
    messages = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "and"}]
    request = validate(ChatRequest, {"model": "m", "messages": messages, "tools": TOOLS})
    prompt = model.decode(request.plan(model).prompts[0], special=True)
    return prompt.split("<|im_start|>assistant\n")[1].partition("<|im_end|>")[0]


def join_parts(parts: Iterable[str | ToolCall]) -> Parts:
    merged: Parts = []
    for part in parts:
        if isinstance(part, ToolCall):
            merged.append((part.name, json.loads(part.arguments)))
        elif merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    return merged


def parse(name: str, chunks: Iterable[str]) -> Parts:
    assembler = CallAssembler(SCHEMAS, new_parser(name))
    parts: list[str | ToolCall] = []
    for chunk in chunks:
        assembler.feed(chunk)
        parts += assembler.take_parts()
    assembler.finish()
    return join_parts([*parts, *assembler.take_parts()])


# Recognition.


@pytest.mark.parametrize("name", NAMES)
def test_a_chat_template_shows_its_dialect(models: Mapping[tuple[str, bool], ModelTokenizer], name: str) -> None:
    for special in (True, False):
        assert models[name, special].tool_dialect.name == name


def test_every_dialect_has_a_template_and_a_name_of_its_own() -> None:
    assert {dialect.name for dialect in DIALECTS} == {*NAMES, "harmony"}
    assert detect_dialect("{% if tools %}{{ tools }}{% endif %}") is None
    assert detect_dialect("<tool_call>{{ name }}<tool_sep><arg_key>{{ key }}</arg_key>") is None, "another form"
    vllm = ("hermes", "qwen3_coder", "qwen3_xml", "llama3_json", "llama4_pythonic", "pythonic", "mistral", "openai",
            "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "kimi_k2", "glm45", "glm47", "minimax_m2",
            "gemma4", "granite", "granite4", "seed_oss")  # fmt: skip
    assert set(vllm) <= set(list_names())


def test_the_documents_list_every_dialect_and_name() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "openai.md").read_text()
    section = page.partition("## Tool calls")[2].partition("\n## ")[0]
    first_cells = "".join(line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([a-z0-9_]+)`", first_cells)) >= set(list_names())


def test_a_name_chooses_the_dialect_where_the_template_does_not(tmp_path: Path) -> None:
    model = make_dialect_model(tmp_path / "m", "pythonic", special=False)
    template = model.template.source.replace("func_name1(param1=value1, param2=value2), func_name2()", "...")
    (tmp_path / "m" / "chat_template.jinja").write_text(template)
    shape = read_shape("local/m", tmp_path / "m")
    with pytest.raises(RequestError, match=r"no known form of calls; name one with --tool-parser"):
        ModelTokenizer(shape).tool_dialect  # noqa: B018
    assert ModelTokenizer(shape, "llama4_pythonic").tool_dialect.name == "pythonic"
    assert choose_dialect("mistral", "[TOOL_CALLS]").name == "mistral_list"
    assert choose_dialect("mistral", "[TOOL_CALLS] [ARGS]").name == "mistral_args"
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(RequestError, match=r"chat template does not support tools"):
        ModelTokenizer(shape, "hermes").tool_dialect  # noqa: B018


def test_the_setting_names_a_parser_for_all_models_or_for_some() -> None:
    assert read_tool_parsers("auto") == {"": "auto"}
    assert read_tool_parsers("org/a=hermes, auto") == {"org/a": "hermes", "": "auto"}
    with pytest.raises(SettingsError, match=r"--tool-parser names 'hermez'; use auto or one of .*hermes"):
        read_tool_parsers("hermez")


# Templates.


def texts_for(name: str) -> st.SearchStrategy[str]:
    """Strings that the dialect can write: plain text cannot contain the mark that ends it."""
    letters = st.characters(exclude_categories=["Cs"], exclude_characters="<" if name not in LINE_DIALECTS else "")
    return st.text(letters, max_size=12)


def arguments_for(name: str) -> st.SearchStrategy[dict[str, Any]]:
    texts = texts_for(name)
    numbers = st.floats(allow_nan=False, allow_infinity=False).filter(lambda number: number != 0)
    scalars = st.none() | st.booleans() | st.integers() | texts
    keys = st.from_regex("[a-z]{1,6}", fullmatch=True)
    values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(keys, st.lists(scalars, max_size=2), max_size=2)
    optional: dict[str, Any] = {
        "city": texts,
        "days": st.integers(-(10**12), 10**12),
        "share": numbers,
        "sure": st.booleans(),
        "tags": st.lists(texts, max_size=3),
        "place": st.dictionaries(keys, values, max_size=3),
        "none": st.none(),
    }
    return st.fixed_dictionaries({}, optional=optional)


@pytest.mark.matrix(5)
@pytest.mark.parametrize("name", NAMES)
@examples(40)
@given(st.data())
def test_a_call_that_the_template_writes_is_read_as_the_same_call(
    models: Mapping[tuple[str, bool], ModelTokenizer], name: str, data: st.DataObject
) -> None:
    model = models[name, data.draw(st.booleans())]
    calls = [
        ("weather", data.draw(arguments_for(name))) if data.draw(st.booleans()) else ("get-time.now", {})
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    written = render_calls(model, "Sure.\n", calls)
    assert parse(name, [written]) == ["Sure.", *calls]
    assert parse(name, written) == ["Sure.", *calls]


def test_ids_of_the_history_have_the_form_that_the_template_writes(
    models: Mapping[tuple[str, bool], ModelTokenizer],
) -> None:
    call = {"id": "call_0123456789", "function": {"name": "get-time.now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call, {**call, "id": "call_9"}]},
        {"role": "tool", "tool_call_id": "call_9", "content": "12"},
    ]
    request = validate(ChatRequest, {"model": "m", "messages": messages, "tools": TOOLS})
    kimi = models["kimi_k2", False]
    prompt = kimi.decode(request.plan(kimi).prompts[0])
    assert "<|tool_call_begin|>functions.get-time.now:0<|" in prompt
    assert "<|tool_call_begin|>functions.get-time.now:1<|" in prompt
    mistral = models["mistral_args", False]
    assert "[CALL_ID]" in mistral.decode(request.plan(mistral).prompts[0]), "which refuses other ids"


# Text.


def words_of(model: ModelTokenizer, name: str) -> list[str]:
    """Calls of a dialect, broken ones, and parts of them."""
    call = render_calls(model, "", [("weather", {"city": "Rome"})])
    both = render_calls(model, "", [("weather", {"days": 3}), ("get-time.now", {})])
    marks = choose_dialect(name, "").marks
    parts = [part for mark in marks for part in (mark, call.partition(mark)[2][:20], both.partition(mark)[0])]
    common = ["Sure. ", "a", "\n", " ", "\u00e9", "<", "{", "}", "[", "]", '"', ",", "(", ")", "\\"]
    return [
        call,
        both,
        call.replace("weather", "nope"),
        call[: len(call) // 2],
        call[len(call) // 2 :],
        *parts,
        *common,
    ]


@pytest.mark.matrix(5)
@pytest.mark.parametrize("name", NAMES)
@examples(40)
@given(st.data())
def test_text_cut_anywhere_has_the_same_text_and_calls(
    models: Mapping[tuple[str, bool], ModelTokenizer], name: str, data: st.DataObject
) -> None:
    written = "".join(data.draw(st.lists(st.sampled_from(words_of(models[name, False], name)), max_size=10)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(written)))) | {0, len(written)})
    chunks = [written[start:end] for start, end in pairwise(cuts)]
    parser = new_parser(name)
    events: list[CallEvent] = [event for chunk in chunks for event in parser.feed(chunk)]
    events += parser.finish()
    assert "".join(event.source for event in events) == written
    parts = parse(name, [written])
    assert parts == parse(name, chunks) == parse(name, written)
    if len(parts) <= 1 and all(isinstance(part, str) for part in parts):
        assert "".join(map(str, parts)) == written, "a completion without calls does not change"


@dataclass
class Completion:
    """What the three protocols return: text and calls, the reason of the end, and the reasoning of the chat."""

    parts: Parts
    reason: str
    reasoning: str


def read_chat(plan: GenerationPlan, model: ModelTokenizer, result: SampleResult) -> list[Completion]:
    """Return the chat, whole and streamed. Its text is one, so that it stands before the calls."""
    choice: Any = ChatAnswer(plan, model).build_response([result])["choices"]
    message = choice[0]["message"]
    calls = message.get("tool_calls") or []
    completions = [_chat(message.get("content") or "", calls, choice[0]["finish_reason"], message)]
    deltas = [event["choices"][0] for event in stream_events(ChatAnswer(plan, model), model, result)]
    content = "".join(delta["delta"].get("content") or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    reasoning = "".join(delta["delta"].get("reasoning_content") or "" for delta in deltas)
    completions.append(_chat(content, calls, deltas[-1]["finish_reason"], {"reasoning_content": reasoning}))
    return completions


def _chat(content: str, calls: list[Any], reason: str, message: dict[str, Any]) -> Completion:
    parts: Parts = [content] if content else []
    for call in calls:
        parts.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
    return Completion(parts, reason, message.get("reasoning_content") or "")


def read_blocks(plan: GenerationPlan, model: ModelTokenizer, result: SampleResult) -> list[Completion]:
    """Return the message of Anthropic's protocol, whole and streamed."""
    body: Any = MessageAnswer(plan, model).build_response([result])
    parts: Parts = [
        block["text"] if block["type"] == "text" else (block["name"], block["input"])
        for block in body["content"]
        if block["type"] in ("text", "tool_use")
    ]
    streamed: list[list[str]] = []
    reason = ""
    for event in stream_events(MessageAnswer(plan, model), model, result):
        if event["type"] == "content_block_start":
            block = event["content_block"]
            streamed.append([block["type"], block.get("name", ""), ""])
        elif event["type"] == "content_block_delta":
            streamed[-1][2] += event["delta"].get("text", "") + event["delta"].get("partial_json", "")
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    streamed_parts: Parts = [
        text if kind == "text" else (name, json.loads(text))
        for kind, name, text in streamed
        if kind in ("text", "tool_use")
    ]
    return [Completion(parts, body["stop_reason"], ""), Completion(streamed_parts, reason, "")]


def read_items(plan: GenerationPlan, model: ModelTokenizer, result: SampleResult) -> list[Completion]:
    """Return the response of OpenAI's responses, whole and at the end of its stream."""
    request = validate(ResponseRequest, {"model": "m", "input": "hi"})
    body: Any = ResponseAnswer(request, plan, model, "resp_1").build_response([result])
    events = stream_events(ResponseAnswer(request, plan, model, "resp_1"), model, result)
    bodies = [body, next(event["response"] for event in reversed(events) if "response" in event)]
    return [
        Completion(
            [
                (item["name"], json.loads(item["arguments"]))
                if item["type"] == "function_call"
                else item["content"][0]["text"]
                for item in output["output"]
                if item["type"] != "reasoning"
            ],
            output["status"],
            "",
        )
        for output in bodies
    ]


def read_all(plan: GenerationPlan, model: ModelTokenizer, written: str, reason: str = "stop") -> Parts:
    """Check that all protocols return the same, and return the text and the calls."""
    result = result_of(model, written, reason)
    blocks = [*read_blocks(plan, model, result), *read_items(plan, model, result)]
    assert all(completion.parts == blocks[0].parts for completion in blocks), "in their order"
    calls = [part for part in blocks[0].parts if not isinstance(part, str)]
    text = "\n".join(part for part in blocks[0].parts if isinstance(part, str))
    chats = read_chat(plan, model, result)
    for chat in chats:
        assert chat.parts == [*([text] if text else []), *calls]
        assert chat.reason == ("tool_calls" if calls else "length" if reason == "length" else "stop")
    assert chats[0].reasoning == chats[1].reasoning
    return blocks[0].parts


ROME = ("weather", {"city": "Rome"})
TIME = ("get-time.now", dict[str, Any]())


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_text_and_calls_stand_in_their_order(
    models: Mapping[tuple[str, bool], ModelTokenizer], name: str, special: bool
) -> None:
    model = models[name, special]
    plan = plan_of(model)
    rome, time = (render_calls(model, "", [call]) for call in (ROME, TIME))
    both = render_calls(model, "", [ROME, TIME])
    written = f"Sure.\n{rome}\nNow the time.\n{time}\nDone."
    assert read_all(plan, model, written) == ["Sure.", ROME, "Now the time.", TIME, "Done."]
    assert read_all(plan, model, both) == [ROME, TIME]
    half = rome[: len(rome) * 2 // 3]
    shown_half = half
    for mark in choose_dialect(name, "").marks if special else ():
        shown_half = shown_half.replace(mark, "")
    for reason in ("stop", "length"):
        assert read_all(plan, model, f"{time}\n{half}", reason) == [TIME, shown_half.lstrip()], "half a call is text"
    unknown = rome.replace("weather", "nope")
    parts = read_all(plan, model, f"{unknown}\n{time}")
    assert parts[-1] == TIME and len(parts) == 2 and "nope" in parts[0], "an unknown name hides no other call"


HEADER_DIALECTS = ("deepseek_v3", "deepseek_v31", "kimi_k2")


@pytest.mark.parametrize("arguments", ["null", '"{}"', '""', "{}", ""])
@pytest.mark.parametrize("name", ["hermes", "llama", "mistral_list", "mistral_args", "granite", "nemotron",
                                  *HEADER_DIALECTS])  # fmt: skip
def test_a_call_without_arguments_is_a_call(
    models: Mapping[tuple[str, bool], ModelTokenizer], name: str, arguments: str
) -> None:
    model = models[name, True]
    call = render_calls(model, "", [TIME])
    before, braces, after = call.rpartition("{}")
    assert braces
    written = f"{before}{arguments}{after}"
    if not arguments and name not in HEADER_DIALECTS:
        field = re.compile(r', "(arguments|parameters)": ')
        if not field.search(before):
            return  # the arguments end the completion
        written = field.sub("", before) + after
    rome = render_calls(model, "", [ROME])
    assert read_all(plan_of(model), model, f"{written}\n{rome}") == [TIME, ROME]


@pytest.mark.matrix(10)
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_inside_unclosed_reasoning_ends_the_reasoning(
    models: Mapping[tuple[str, bool], ModelTokenizer], name: str, special: bool
) -> None:
    path = models[name, special]._directory
    model = ModelTokenizer(models[name, special]._shape)
    original = (path / "chat_template.jinja").read_text()
    try:
        (path / "chat_template.jinja").write_text(original + "{# </think> #}")
        plan = plan_of(model)
    finally:
        (path / "chat_template.jinja").write_text(original)
    assert plan.reasoning_tags is not None
    call = render_calls(model, "", [ROME])
    for written, parts in (
        (f"<think>\nI need it.\n{call}", [ROME]),
        (f"<think>\nI need it.\n{call}\nSo.", [ROME, "So."]),
        (f"<think>\nI need it.\n</think>\n\n{call}", [ROME]),
    ):
        result = result_of(model, written, "stop")
        for chat in read_chat(plan, model, result):
            assert chat.reasoning == "I need it." and sorted(map(str, chat.parts)) == sorted(map(str, parts))
        assert read_all(plan, model, written) == parts
    closed = read_chat(plan, model, result_of(model, f"<think>\n{call}\n</think>\n\nNo.", "stop"))
    assert all(chat.parts == ["No."] and "Rome" in chat.reasoning for chat in closed), (
        "calls in reasoning are reasoning"
    )
    hidden = validate(
        ChatRequest,
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "include_reasoning": False},
    ).plan(model)
    assert read_all(hidden, model, f"<think>\nI need it.\n{call}\nSo.") == [ROME, "So."]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_without_parallel_calls_a_completion_ends_with_its_first_call(
    models: Mapping[tuple[str, bool], ModelTokenizer], name: str, special: bool
) -> None:
    model = models[name, special]
    plan = plan_of(model, parallel_tool_calls=False)
    both = render_calls(model, "", [ROME, TIME])
    assert read_all(plan, model, f"Sure.\n{both}\nDone.") == ["Sure.", ROME]
    assert plan.tools is not None
    closing = choose_dialect(name, "").closing
    if special and closing in choose_dialect(name, "").marks:
        assert plan.params.stop_tokens == (model.token_id(closing),) and not plan.params.stop_strings
    elif closing:
        assert plan.params.stop_strings == (closing,)
    stopped = both[: both.index(closing) + len(closing)] if closing else render_calls(model, "", [ROME])
    assert read_all(plan, model, stopped) == [ROME], "the stop is part of the call"


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_string_inside_a_call_leaves_its_text(
    models: Mapping[tuple[str, bool], ModelTokenizer], name: str
) -> None:
    model = models[name, True]
    call = render_calls(model, "", [ROME])
    parts = read_all(plan_of(model, stop="Rome"), model, f"{call}\n{call}")
    assert len(parts) == 1 and isinstance(parts[0], str) and "weather" in parts[0] and "Rome" not in parts[0]
    assert not any(mark in parts[0] for mark in choose_dialect(name, "").marks), "special tokens are no text"


@pytest.mark.parametrize("name", [name for name in NAMES if choose_dialect(name, "").marks])
def test_a_stop_string_is_not_found_in_a_special_token(
    models: Mapping[tuple[str, bool], ModelTokenizer], name: str
) -> None:
    model = models[name, True]
    mark = choose_dialect(name, "").marks[0]
    plan = plan_of(model, stop=[mark[1:4], f"{mark[-2:]}w"])
    assert read_all(plan, model, render_calls(model, "Sure.\n", [ROME])) == ["Sure.", ROME]


@pytest.mark.parametrize("name", [name for name in NAMES if choose_dialect(name, "").marks])
def test_a_special_token_alone_is_no_text(models: Mapping[tuple[str, bool], ModelTokenizer], name: str) -> None:
    model = models[name, True]
    mark = choose_dialect(name, "").marks[0]
    assert read_all(plan_of(model), model, f"I use {mark}") == ["I use "]
    assert read_all(plan_of(model, skip_special_tokens=False), model, f"I use {mark}") == [f"I use {mark}"]
    assert read_all(plan_of(model, tools=[]), model, f"I use {mark} here") == ["I use  here"]


@pytest.mark.matrix(6)
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", NAMES)
@examples(25)
@given(st.data())
def test_a_stream_has_the_text_and_calls_of_the_whole_completion(
    models: Mapping[tuple[str, bool], ModelTokenizer], name: str, special: bool, data: st.DataObject
) -> None:
    model = models[name, special]
    stops = data.draw(st.lists(st.sampled_from(["a", "}", "ro", "Sure. a"]), max_size=2))
    words = [*words_of(model, name), "<think>", "</think>"]
    written = "".join(data.draw(st.lists(st.sampled_from(words), max_size=8)))
    plan = plan_of(model, stop=stops, parallel_tool_calls=data.draw(st.booleans()))
    read_all(plan, model, written)


# Grammars.

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
CITY_TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
TIME_TOOL = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}, "strict": True}}
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red"]}}, "required": ["colour"]}
FORMAT = {"type": "json_schema", "json_schema": {"schema": COLOUR | {"additionalProperties": False}}}


class Matchers:
    """Compiled grammars of one model."""

    def __init__(self, model: ModelTokenizer) -> None:
        self.model = model
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=model.backend_tokenizer)
        self._grammars = GrammarCache(tokenizer, model.backend_tokenizer.get_vocab_size(), model.end_token_ids)

    def accepts(self, plan: GenerationPlan, written: str) -> bool:
        matcher = self._grammars.compile(grammar_of(plan)).deep_copy()
        tokens = self.model.encode(written, special=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def sample(self, plan: GenerationPlan, seed: int, max_tokens: int = 1500) -> str | None:
        """Return a completion of uniformly drawn tokens; None if it does not end in time."""
        rng = random.Random(seed)
        constraint = self._grammars.constraint(Adjustments(grammar=grammar_of(plan)))
        assert constraint is not None
        tokens: list[int] = []
        while len(tokens) < max_tokens:
            allowed = np.flatnonzero(constraint.token_mask()).tolist()
            ends = [token for token in allowed if token in self.model.end_token_ids]
            if ends and (len(allowed) == len(ends) or rng.random() < 0.3):
                return self.model.decode(tokens, special=True)
            token = rng.choice([token for token in allowed if token not in ends])
            constraint.push(token)
            assert constraint.error is None
            tokens.append(token)
            if constraint.is_finished:
                return self.model.decode(tokens, special=True)
        return None


def grammar_of(plan: GenerationPlan) -> Grammar:
    adjustments = plan.params.adjustments
    assert adjustments is not None and adjustments.grammar is not None
    return adjustments.grammar


@pytest.fixture(scope="module")
def matchers(models: Mapping[tuple[str, bool], ModelTokenizer]) -> Mapping[tuple[str, bool], Matchers]:
    return {key: Matchers(model) for key, model in models.items()}


def render_for_grammar(model: ModelTokenizer, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Return calls without ids, which grammars leave out."""
    written = render_calls(model, "", calls)
    for index in range(len(calls)):
        identifier = choose_dialect("mistral", "").write_id
        assert identifier is not None
        call_id = identifier(f"call_{index}", "", index)
        written = written.replace(f"[CALL_ID]{call_id}", "").replace(f', "id": "{call_id}"', "")
    return written


@pytest.mark.matrix(10)
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_grammars_allow_the_calls_of_the_template_and_nothing_else(
    matchers: Mapping[tuple[str, bool], Matchers], name: str, special: bool
) -> None:
    matcher = matchers[name, special]
    model = matcher.model
    tools = [CITY_TOOL, TIME_TOOL]
    rome, time, both = (
        render_for_grammar(model, calls)
        for calls in ([("weather", {"city": "Rome"})], [("time", {})], [("weather", {"city": "Rome"}), ("time", {})])
    )
    oslo, text = rome.replace("Rome", "Oslo"), "Just text."

    def accepted(**fields: object) -> list[bool]:
        plan = plan_of(model, tools=tools, **fields)
        return [matcher.accepts(plan, written) for written in (rome, time, both, oslo, text, '{"colour": "red"}')]

    assert accepted(tool_choice="required") == [True, True, True, False, False, False]
    assert accepted(tool_choice="required", parallel_tool_calls=False) == [True, True, False, False, False, False]
    named = {"type": "function", "function": {"name": "weather"}}
    assert accepted(tool_choice=named) == [True, False, False, False, False, False]
    assert accepted(response_format=FORMAT)[:5] == [True, True, name != "llama", False, False]
    assert accepted(response_format=FORMAT)[5]
    is_object_text = name != "llama"
    assert accepted() == [True, True, True, False, True, is_object_text], "strict arguments, and any text"
    assert accepted(parallel_tool_calls=False) == [True, True, False, False, True, is_object_text]
    before = f"{text}\n{rome}"
    assert matcher.accepts(plan_of(model, tools=tools), before)
    assert not matcher.accepts(plan_of(model, tools=tools), before.replace("Rome", "Oslo"))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama"])
def test_an_answer_that_is_an_array_is_no_call(matchers: Mapping[tuple[str, bool], Matchers], name: str) -> None:
    items = {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "array"}, {"type": "object"}, {"const": True}]}
    response_format = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": items}}}
    for special in (True, False):
        matcher = matchers[name, special]
        plan = plan_of(matcher.model, tools=[CITY_TOOL], response_format=response_format)
        for answer in ("[]", "[1, 2]", "[true]", '["[weather(city=1)]", "a"]', "[[1]]", '[{"city": "Rome"}]'):
            assert matcher.accepts(plan, answer), (name, answer)
            assert parse(name, [answer]) == parse(name, answer) == [answer]
        assert matcher.accepts(plan, render_for_grammar(matcher.model, [("weather", {"city": "Rome"})]))


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("function_xml", "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>"),
        ("kimi_k2", '<|tool_call_begin|>weather:0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'),
        ("pythonic", 'So <|python_start|>[weather(city="Oslo")]'),
    ],
)
def test_strict_arguments_hold_in_calls_without_their_first_mark(
    matchers: Mapping[tuple[str, bool], Matchers], name: str, written: str
) -> None:
    assert parse(name, [written])[-1] == ("weather", {"city": "Oslo"})
    for special in (True, False):
        matcher = matchers[name, special]
        assert not matcher.accepts(plan_of(matcher.model, tools=[CITY_TOOL]), written)


LIMITED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "code": {"type": "string", "pattern": "^[A-Z]{2}(-[0-9]+)?$"},
        "kind": {"enum": ["a", "b c"]},
        "level": {"type": "integer", "minimum": 1, "maximum": 30},
        "days": {"type": "integer"},
        "sure": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "place": {"$ref": "#/$defs/place"},
        "maybe": {"anyOf": [{"type": "string", "enum": ["x"]}, {"type": "null"}]},
    },
    "required": ["city", "level", "place"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number", "minimum": 0, "maximum": 9}, "in": {"$ref": "#/$defs/place"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


def check_drawn_calls(matcher: Matchers, name: str, seeds: Iterable[int], **fields: object) -> int:
    """Check that every completion of a grammar is calls whose arguments fit the schema. Returns how many ended."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": LIMITED, "strict": True}}
    plan = plan_of(matcher.model, tools=[tool], **fields)
    make_parser = choose_dialect(name, "").new_parser
    assert make_parser is not None
    num_ended = 0
    for seed in seeds:
        written = matcher.sample(plan, seed)
        if written is None:
            continue
        num_ended += 1
        assembler = CallAssembler({"weather"}, make_parser({"weather": LIMITED}))
        assembler.feed(written)
        assembler.finish()
        parts = assembler.take_parts()
        calls = [part for part in parts if isinstance(part, ToolCall)]
        if "tool_choice" in fields:
            assert calls and not any(isinstance(part, str) for part in parts), written
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), LIMITED)
    return num_ended


@pytest.mark.matrix(6)
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_what_a_grammar_draws_is_calls_of_the_schema(
    matchers: Mapping[tuple[str, bool], Matchers], name: str, special: bool
) -> None:
    assert check_drawn_calls(matchers[name, special], name, range(6), tool_choice="required") >= 2


@pytest.mark.extended
@pytest.mark.parametrize("name", NAMES)
def test_what_a_grammar_draws_is_calls_of_the_schema_with_many_seeds(
    matchers: Mapping[tuple[str, bool], Matchers], name: str
) -> None:
    assert check_drawn_calls(matchers[name, True], name, range(50), tool_choice="required") >= 20
    assert check_drawn_calls(matchers[name, False], name, range(50, 100)) >= 20


TEXT: dict[str, Any] = {"type": "string"}


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("function_xml", {"anyOf": [{"required": ["a"]}]}, "parameters.anyOf is not supported.*describe each argument"),
        ("glm47", {"properties": {"a": TEXT}, "minProperties": 1}, "parameters.minProperties is not supported"),
        ("minimax_m2", {"properties": {"<a>": TEXT}}, "parameters.properties.<a> is not supported.*use a name without"),
        ("gemma4", {"properties": {"a b": TEXT}}, "parameters.properties.a b is not supported"),
        ("pythonic", {"properties": {"a-b": TEXT}}, "'a-b', which is no Python keyword"),
        ("function_xml", {"properties": {"a": TEXT | {"format": "uuid"}}}, "a.format is not supported.*use pattern"),
        (
            "deepseek_v4",
            {"properties": {"a": TEXT | {"pattern": "^a|b$"}}},
            r"put the alternatives between \^\( and \)\$",
        ),
        ("seed_oss", {"properties": {"a": TEXT | {"pattern": "a^b"}}}, r"use \^ and \$ only at its ends"),
        ("glm45", {"properties": {"a": {"enum": ["x</arg_value>\n"]}}}, "a.enum is not supported.*the end of a value"),
        ("gemma4", {"properties": {"a": {"type": "array", "prefixItems": [TEXT]}}}, "prefixItems is not supported"),
        (
            "function_xml",
            {"properties": {"a": {"allOf": [TEXT, {"pattern": "^a"}]}}},
            "a.allOf is not supported.*write them as one",
        ),
    ],
)
def test_a_schema_that_a_form_cannot_hold_is_refused_by_its_path(
    models: Mapping[tuple[str, bool], ModelTokenizer], name: str, parameters: dict[str, Any], words: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"} | parameters}}
    assert plan_of(models[name, True], tools=[tool]).params.adjustments is None, "without a grammar it may be used"
    with pytest.raises(RequestError, match=words):
        plan_of(models[name, True], tools=[tool], tool_choice="required")


@pytest.mark.parametrize(
    ("schema", "texts", "rejected"),
    [
        ({"pattern": "b+"}, ["abbc", "b"], ["ac"]),
        ({"pattern": "^a/[$]$"}, ["a/$"], ["a/$x", "xa/$"]),
        ({"pattern": "^(a|b)$"}, ["a", "b"], ["ab"]),
        ({"pattern": "\\$$"}, ["a$"], ["$a"]),
        ({"minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["a", "abcd"]),
        ({"format": "date"}, ["2024-02-29"], ["2023-02-29"]),
        ({"enum": ["a", "a<b", ""]}, ["a", "a<b", ""], ["b"]),
        ({"anyOf": [{"const": "a"}, {"pattern": "^x"}]}, ["a", "xy"], ["b"]),
        ({"$ref": "#/$defs/t"}, ["t"], ["u"]),
        ({"type": ["string", "null"], "minLength": 2}, ["ab", "null"], ["a"]),
    ],
)
def test_texts_between_tags_fit_their_schema(
    matchers: Mapping[tuple[str, bool], Matchers], schema: dict[str, Any], texts: list[str], rejected: list[str]
) -> None:
    parameters = {"type": "object", "properties": {"a": TEXT | schema}, "required": ["a"]}
    if not schema.keys().isdisjoint(("$ref", "anyOf", "enum")):
        parameters["properties"] = {"a": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters | {"$defs": {"t": {"const": "t"}}}}}
    for special in (True, False):
        matcher = matchers["function_xml", special]
        plan = plan_of(matcher.model, tools=[tool], tool_choice="required")
        call = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
        verdicts = [matcher.accepts(plan, call.format(text)) for text in (*texts, *rejected)]
        assert verdicts == [True] * len(texts) + [False] * len(rejected)


def test_null_is_null_where_a_schema_has_nothing_else_but_strings() -> None:
    properties = {"a": {"type": ["string", "null"]}, "b": {"type": "string"}, "c": {"anyOf": [TEXT, {"type": "null"}]}}
    make_parser = choose_dialect("function_xml", "").new_parser
    assert make_parser is not None
    schemas = {"f": {"properties": properties}}
    assembler = CallAssembler(schemas, make_parser(schemas))
    written = {"a": "null", "b": "null", "c": "None"}
    values = "".join(f"<parameter={key}>{value}</parameter>" for key, value in written.items())
    assembler.feed(f"<tool_call><function=f>{values}</function></tool_call>")
    assembler.finish()
    assert join_parts(assembler.take_parts()) == [("f", {"a": None, "b": "null", "c": None})]
