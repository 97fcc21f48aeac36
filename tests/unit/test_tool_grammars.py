"""A grammar of the answer together with tools: the completion is a call, or an answer of the grammar."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from support.chat_models import make_tool_model
from support.harmony import make_harmony_model
from tinsmith.base_models import read_shape
from tinsmith.chat.chats import ChatRequest
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.harmony import new_choice
from tinsmith.chat.messages import MessageRequest
from tinsmith.chat.responses import ResponseRequest
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.samplers.local.grammar import GrammarCache
from tinsmith.wire.fields import validate

SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ANSWER = '{"colour": "red"}'
ARGUMENTS = '{"city": "Rome"}'
LLAMA = "{% if tools %}python_tag{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "harmony": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}",
}
ANSWERS = {"hermes": ANSWER, "llama": ANSWER, "harmony": f"<|channel|>final<|message|>{ANSWER}"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelTokenizer]:
    root = tmp_path_factory.mktemp("models")
    found = {"hermes": make_tool_model(root / "hermes"), "harmony": make_harmony_model(root / "harmony")}
    found["llama"] = make_tool_model(root / "llama")
    (found["llama"] / "chat_template.jinja").write_text(LLAMA)
    return {form: ModelTokenizer(read_shape(f"local/{form}", directory)) for form, directory in found.items()}


def planned(text: ModelTokenizer, **more: object) -> GenerationPlan:
    return validate(ChatRequest, BODY | {"tools": [TOOL]} | more).plan(text)


def accepted(plan: GenerationPlan, text: ModelTokenizer, *completions: str) -> list[bool]:
    adjustments = plan.params.adjustments
    assert adjustments and adjustments.grammar
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=text.backend_tokenizer)
    grammars = GrammarCache(tokenizer, text.backend_tokenizer.get_vocab_size(), text.end_token_ids)
    matcher = grammars.compile(adjustments.grammar)
    found: list[bool] = []
    for each in completions:
        copied, tokens = matcher.deep_copy(), text.encode(each, special=False)
        found.append(copied.try_consume_tokens(tokens) == len(tokens) and copied.is_accepting())
    return found


@pytest.mark.parametrize("form", sorted(CALLS))
def test_an_answer_of_the_schema_or_a_call_in_the_models_form(texts: dict[str, ModelTokenizer], form: str) -> None:
    text, call, answer = texts[form], CALLS[form], ANSWERS[form]
    plan = planned(text, response_format=FORMAT)
    assert accepted(plan, text, call, answer, "free text", call.replace("Rome", "Oslo")) == [True, True, False, False]
    assert plan.reasoning_tags is None, "a grammar from the first token on excludes reasoning"
    required = planned(text, response_format=FORMAT, tool_choice="required")
    assert accepted(required, text, call, answer) == [True, False]
    excluded = planned(text, response_format=FORMAT, tool_choice="none")
    assert excluded.tools is None and accepted(excluded, text, ANSWER, call) == [True, False]


@pytest.mark.parametrize("form", sorted(CALLS))
def test_both_are_read_whole_and_streamed(texts: dict[str, ModelTokenizer], form: str) -> None:
    text = texts[form]
    plan = planned(text, response_format=FORMAT)
    for completion, expected, calls in ((ANSWERS[form], ANSWER, []), (CALLS[form], "", [json.loads(ARGUMENTS)])):
        for whole in (True, False):
            choice, pieces = new_choice(plan, text, 0), []
            for token in text.encode(completion, special=False):
                choice.push(token, -0.5)
                if not whole:
                    pieces.append(choice.take_delta())
            choice.finish()
            pieces.append(choice.take_delta())
            assert "".join(piece.text for piece in pieces) == expected
            assert [json.loads(call.arguments) for piece in pieces for call in piece.calls] == calls


@pytest.mark.parametrize(
    ("more", "answer", "other"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, ANSWER, "red"),
        ({"structured_outputs": {"choice": ["red", 'a "b"']}}, 'a "b"', "green"),
        ({"structured_outputs": {"regex": "[a-z]+/\\d{2}|\\/"}}, "ab/12", "ab"),
        ({"guided_grammar": 'start: "x" | "y" B\nB: /[0-9]+/\n'}, "y12", "z"),
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
    ],
)
def test_every_kind_of_structure_goes_with_tools(
    texts: dict[str, ModelTokenizer], more: dict[str, Any], answer: str, other: str
) -> None:
    text = texts["hermes"]
    assert accepted(planned(text, **more), text, answer, CALLS["hermes"], other) == [True, True, False]


@pytest.mark.parametrize("form", sorted(CALLS))
def test_references_of_both_schemas_hold(texts: dict[str, ModelTokenizer], form: str) -> None:
    text = texts[form]
    schema = {"$defs": {"c": SCHEMA["properties"]["colour"]}, "type": "object"}  # type: ignore[index]
    schema |= {"properties": {"colour": {"$ref": "#/$defs/c"}}, "required": ["colour"]}
    parameters = {"$defs": {"c": {"enum": ["Rome"]}}, "properties": {"city": {"$ref": "#/$defs/c"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters | {"required": ["city"]}}}
    plan = planned(text, tools=[tool], response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    wrong = (CALLS[form].replace("Rome", "red"), ANSWERS[form].replace("red", "Rome"))
    assert accepted(plan, text, CALLS[form], ANSWERS[form], *wrong) == [True, True, False, False]


def test_the_other_protocols_say_the_same(texts: dict[str, ModelTokenizer]) -> None:
    text = texts["hermes"]
    expected = planned(text, response_format=FORMAT).params
    function = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    asked = {"model": "m", "input": "hi", "tools": [function], "text": {"format": {"schema": SCHEMA, "name": "n"}}}
    asked["text"]["format"]["type"] = "json_schema"  # type: ignore[index]
    assert validate(ResponseRequest, asked).plan(text).params == expected
    tool = {"name": "weather", "input_schema": CITY}
    message = BODY | {"tools": [tool], "max_tokens": 9}
    message["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert validate(MessageRequest, message).plan(text).params == replace(expected, max_tokens=9)
