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
    directories = {"hermes": make_tool_model(root / "hermes"), "harmony": make_harmony_model(root / "harmony")}
    directories["llama"] = make_tool_model(root / "llama")
    (directories["llama"] / "chat_template.jinja").write_text(LLAMA)
    return {form: ModelTokenizer(read_shape(f"local/{form}", directory)) for form, directory in directories.items()}


def plan_of(text: ModelTokenizer, **fields: object) -> GenerationPlan:
    return validate(ChatRequest, BODY | {"tools": [TOOL]} | fields).plan(text)


def check_completions(plan: GenerationPlan, text: ModelTokenizer, *completions: str) -> list[bool]:
    adjustments = plan.params.adjustments
    assert adjustments and adjustments.grammar
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=text.backend_tokenizer)
    grammars = GrammarCache(tokenizer, text.backend_tokenizer.get_vocab_size(), text.end_token_ids)
    matcher = grammars.compile(adjustments.grammar)
    verdicts: list[bool] = []
    for completion in completions:
        copied, tokens = matcher.deep_copy(), text.encode(completion, special=False)
        verdicts.append(copied.try_consume_tokens(tokens) == len(tokens) and copied.is_accepting())
    return verdicts


@pytest.mark.parametrize("form", sorted(CALLS))
def test_an_answer_of_the_schema_or_a_call_in_the_models_form(texts: dict[str, ModelTokenizer], form: str) -> None:
    text, call, answer = texts[form], CALLS[form], ANSWERS[form]
    plan = plan_of(text, response_format=FORMAT)
    assert check_completions(plan, text, call, answer, "free text", call.replace("Rome", "Oslo")) == [
        True,
        True,
        False,
        False,
    ]
    assert plan.reasoning_tags is None, "a grammar from the first token on excludes reasoning"
    required = plan_of(text, response_format=FORMAT, tool_choice="required")
    assert check_completions(required, text, call, answer) == [True, False]
    excluded = plan_of(text, response_format=FORMAT, tool_choice="none")
    assert excluded.tools is None and check_completions(excluded, text, answer, call) == [True, False]


@pytest.mark.parametrize("form", sorted(CALLS))
def test_both_are_read_whole_and_streamed(texts: dict[str, ModelTokenizer], form: str) -> None:
    text = texts[form]
    plan = plan_of(text, response_format=FORMAT)
    for completion, expected, calls in ((ANSWERS[form], ANSWER, []), (CALLS[form], "", [json.loads(ARGUMENTS)])):
        for at_once in (True, False):
            choice, text_pieces = new_choice(plan, text, 0), []
            for token in text.encode(completion, special=False):
                choice.push(token, -0.5)
                if not at_once:
                    text_pieces.append(choice.take_delta())
            choice.finish()
            text_pieces.append(choice.take_delta())
            assert "".join(text_piece.text for text_piece in text_pieces) == expected
            assert [json.loads(call.arguments) for text_piece in text_pieces for call in text_piece.calls] == calls


@pytest.mark.parametrize(
    ("fields", "answer", "other"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, ANSWER, "red"),
        ({"structured_outputs": {"choice": ["red", 'a "b"']}}, 'a "b"', "green"),
        ({"structured_outputs": {"regex": "[a-z]+/\\d{2}|\\/"}}, "ab/12", "ab"),
        ({"guided_grammar": 'start: "x" | "y" B\nB: /[0-9]+/\n'}, "y12", "z"),
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
    ],
)
def test_every_kind_of_structure_goes_with_tools(
    texts: dict[str, ModelTokenizer], fields: dict[str, Any], answer: str, other: str
) -> None:
    text = texts["hermes"]
    assert check_completions(plan_of(text, **fields), text, answer, CALLS["hermes"], other) == [True, True, False]


@pytest.mark.parametrize("form", sorted(CALLS))
def test_references_of_both_schemas_hold(texts: dict[str, ModelTokenizer], form: str) -> None:
    text = texts[form]
    schema = {"$defs": {"c": SCHEMA["properties"]["colour"]}, "type": "object"}  # type: ignore[index]
    schema |= {"properties": {"colour": {"$ref": "#/$defs/c"}}, "required": ["colour"]}
    parameters = {"$defs": {"c": {"enum": ["Rome"]}}, "properties": {"city": {"$ref": "#/$defs/c"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters | {"required": ["city"]}}}
    plan = plan_of(text, tools=[tool], response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    wrong = (CALLS[form].replace("Rome", "red"), ANSWERS[form].replace("red", "Rome"))
    assert check_completions(plan, text, CALLS[form], ANSWERS[form], *wrong) == [True, True, False, False]


def test_strict_arguments_hold_after_messages_of_the_harmony_format(texts: dict[str, ModelTokenizer]) -> None:
    text, call = texts["harmony"], CALLS["harmony"]
    tool = {"type": "function", "function": TOOL["function"] | {"strict": True}}  # type: ignore[operator]
    thought = "<|channel|>analysis<|message|>It rains.<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>I look.\n<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>It rains."
    completions = [call, thought + call, thought + preamble + call, thought + final, final]
    wrong = [completion.replace("Rome", "Oslo") for completion in completions[:3]] + ["It rains."]
    plan = plan_of(text, tools=[tool])
    assert check_completions(plan, text, *completions, *wrong) == [True] * 5 + [False] * 4
    assert plan.channels is not None, "reasoning is allowed"


def test_the_other_protocols_say_the_same(texts: dict[str, ModelTokenizer]) -> None:
    text = texts["hermes"]
    expected = plan_of(text, response_format=FORMAT).params
    function = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    request = {"model": "m", "input": "hi", "tools": [function], "text": {"format": {"schema": SCHEMA, "name": "n"}}}
    request["text"]["format"]["type"] = "json_schema"  # type: ignore[index]
    assert validate(ResponseRequest, request).plan(text).params == expected
    tool = {"name": "weather", "input_schema": CITY}
    message = BODY | {"tools": [tool], "max_tokens": 9}
    message["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert validate(MessageRequest, message).plan(text).params == replace(expected, max_tokens=9)
