"""Answers in the harmony format: channels become thoughts, text and calls, whole and token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.harmony import make_harmony_model
from support.properties import examples
from tinsmith.base_models import nano, read_shape
from tinsmith.chat.chats import ChatRequest
from tinsmith.chat.choices import CompletionDelta
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.harmony import HarmonyChoice, new_choice
from tinsmith.chat.messages import MessageRequest
from tinsmith.chat.tokenizer import ModelTokenizer, find_channels
from tinsmith.errors import RequestError
from tinsmith.samplers.local.grammar import MAX_NUMBER_LENGTH, GrammarCache
from tinsmith.wire.fields import validate

WEATHER = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER | {"additionalProperties": False}}}]
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
NEXT = "<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer(read_shape("local/harmony", make_harmony_model(tmp_path_factory.mktemp("harmony") / "m")))


def grammar_cache(text: ModelTokenizer) -> GrammarCache:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=text.backend_tokenizer)
    return GrammarCache(tokenizer, text.backend_tokenizer.get_vocab_size(), text.end_token_ids)


def chat(text: ModelTokenizer, **fields: Any) -> GenerationPlan:  # noqa: ANN401  JSON
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
    return validate(ChatRequest, body).plan(text)


def join_pieces(
    plan: GenerationPlan, text: ModelTokenizer, written: str, *, at_once: bool
) -> tuple[CompletionDelta, HarmonyChoice]:
    """The joined pieces of an answer that is parsed whole, or piece by piece."""
    choice = new_choice(plan, text, 0)
    assert isinstance(choice, HarmonyChoice)
    joined = CompletionDelta()

    def take() -> None:
        text_piece = choice.take_delta()
        joined.reasoning += text_piece.reasoning
        joined.text += text_piece.text
        joined.parts += text_piece.parts
        joined.tokens += text_piece.tokens

    for token_id in text.encode(written, special=False):
        choice.push(token_id, -0.5)
        if not at_once:
            take()
    choice.finish()
    take()
    return joined, choice


def parse_both_ways(plan: GenerationPlan, text: ModelTokenizer, written: str) -> tuple[CompletionDelta, HarmonyChoice]:
    once, choice = join_pieces(plan, text, written, at_once=True)
    streamed, other = join_pieces(plan, text, written, at_once=False)
    summaries = [
        (text_piece.reasoning, text_piece.text, [(call.name, call.arguments) for call in text_piece.calls])
        for text_piece in (once, streamed)
    ]
    assert summaries[0] == summaries[1]
    assert [token.token_id for token in once.tokens] == [token.token_id for token in streamed.tokens]
    assert choice.reasoning_tokens == other.reasoning_tokens and choice.stopped_by == other.stopped_by
    return once, choice


def test_channels_are_thoughts_text_and_a_call(text: ModelTokenizer) -> None:
    written = f'{ANALYSIS}Rome?{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{CALL}{{"city": "Rome"}}<|call|>'
    answer, choice = parse_both_ways(chat(text), text, written)
    assert (answer.reasoning, answer.text) == ("Rome?", "I look.")
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("weather", {"city": "Rome"})]
    thought = text.encode(f"{ANALYSIS}Rome?<|end|>", special=False)
    assert choice.reasoning_tokens == len(thought) + len(text.encode("assistant", special=False))
    answer, _ = parse_both_ways(chat(text), text, f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c<|return|>")
    assert (answer.reasoning, answer.text, answer.calls) == ("a\nb", "c", [])
    role = 'assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
    answer, _ = parse_both_ways(chat(text), text, f"{ANALYSIS}a<|end|><|start|>{role}")
    assert [call.arguments for call in answer.calls] == ['{"city": "Oslo"}']


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (CALL.replace("weather", "other") + '{"a": 1}<|call|>', '{"a": 1}'),  # a tool that the request does not have
        (CALL + '{"city": "Ro', '{"city": "Ro'),  # cut off
        (CALL + "[1]<|call|>", "[1]"),
        ("just words", "just words"),  # a model that does not write the format
        (f"{FINAL}half{NEXT}<|channel|>fin", "half"),  # cut off in a header
    ],
)
def test_text_that_resembles_a_call_or_a_message_stays_text(text: ModelTokenizer, written: str, expected: str) -> None:
    answer, _ = parse_both_ways(chat(text), text, written)
    assert (answer.reasoning, answer.text, answer.calls) == ("", expected, [])


def test_thoughts_are_apart_or_text_or_left_out(text: ModelTokenizer) -> None:
    written = f"{ANALYSIS}hm{NEXT}{FINAL}yes<|return|>"
    answer, _ = parse_both_ways(chat(text, separate_reasoning=False), text, written)
    assert (answer.reasoning, answer.text) == ("", "hm\nyes")
    request = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    answer, choice = parse_both_ways(validate(MessageRequest, request).plan(text), text, written)
    assert (answer.reasoning, answer.text) == ("", "yes") and choice.reasoning_tokens > 2
    thinks = {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    answer, _ = parse_both_ways(validate(MessageRequest, request | thinks).plan(text), text, written)
    assert (answer.reasoning, answer.text) == ("hm", "yes")


def test_special_tokens_that_are_shown_and_answers_that_go_on_in_a_grammar_are_no_messages(
    text: ModelTokenizer,
) -> None:
    assert chat(text, tools=[], skip_special_tokens=False).channels is None
    json_format = {"type": "json_object"}
    assert chat(text, tools=[], skip_special_tokens=False, response_format=json_format).channels is None
    ids = text.encode(f"<|start|>user<|message|>hi<|end|><|start|>assistant{FINAL}", special=False)
    within = chat(text, tools=[], response_format=json_format, prompt_token_ids=ids)
    assert within.channels is None and not accepts(within, text, f"{FINAL}{{}}") and accepts(within, text, "{}")
    assert chat(text, tool_choice="required").channels is not None


def accepts(plan: GenerationPlan, text: ModelTokenizer, written: str) -> bool:
    assert plan.params.adjustments and plan.params.adjustments.grammar
    matcher = grammar_cache(text).compile(plan.params.adjustments.grammar).deep_copy()
    ids = text.encode(written, special=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "answer", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', "[1]"),
        ({"structured_outputs": {"regex": "a+/b"}}, "aa/b", "a"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "perhaps"),
        ({"guided_grammar": 'start: "x" /[0-9]/'}, "x1", "x"),
    ],
)
def test_a_format_holds_in_the_final_message_after_reasoning(
    text: ModelTokenizer, fields: dict[str, Any], answer: str, wrong: str
) -> None:
    thought = f'{ANALYSIS}Is it "5 feet?{NEXT}'
    for tools in ([], TOOLS):
        plan = chat(text, tools=tools, **fields)
        for before in ("", thought, thought + thought):
            assert accepts(plan, text, f"{before}{FINAL}{answer}")
            assert not accepts(plan, text, f"{before}{FINAL}{wrong}") and not accepts(plan, text, before + answer)
            assert accepts(plan, text, f'{before}{CALL}{{"city": "Rome"}}') == bool(tools)
        assert not accepts(plan, text, f"<|channel|>commentary<|message|>I look.{NEXT}{FINAL}{answer}")
        parsed, _ = parse_both_ways(plan, text, f"{thought}{FINAL}{answer}<|return|>")
        assert (parsed.reasoning, parsed.text) == ('Is it "5 feet?', answer)
    required = chat(text, tool_choice="required")
    assert accepts(required, text, f'{thought}{CALL}{{"city": "Rome"}}')
    assert not accepts(required, text, f"{thought}{FINAL}Rome")


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "json_object"}}])
@pytest.mark.parametrize("budget", [0, 1, 4])
def test_a_budget_counts_all_messages_of_reasoning(text: ModelTokenizer, fields: dict[str, Any], budget: int) -> None:
    plan = chat(text, tools=[], thinking_token_budget=budget, **fields)
    constraint = grammar_cache(text).constraint(plan.params.adjustments)
    assert constraint is not None and plan.channels is not None
    (end_id,) = text.encode("<|end|>", special=False)
    thoughts = text.encode("It rains all day.", special=False)[:6]
    num_thoughts = 0
    for _ in range(2):  # messages
        for token in text.encode(ANALYSIS, special=False):
            assert constraint.token_mask()[token]
            constraint.push(token)
        for token in thoughts[:2]:
            is_allowed = num_thoughts < budget
            mask = constraint.token_mask()
            assert mask[token] == is_allowed and mask[end_id]
            if not is_allowed:
                assert np.flatnonzero(mask).tolist() == [end_id]
                break
            constraint.push(token)
            num_thoughts += 1
        for token in text.encode(NEXT, special=False):
            assert constraint.token_mask()[token]
            constraint.push(token)
    assert num_thoughts == min(budget, 4)
    for token in text.encode(f"{FINAL}{{}}", special=False):
        assert constraint.token_mask()[token]
        constraint.push(token)


def test_the_budget_of_a_prompt_that_ends_in_reasoning_counts_from_there(text: ModelTokenizer) -> None:
    ids = text.encode(f"<|start|>user<|message|>hi<|end|><|start|>assistant{ANALYSIS}", special=False)
    for prompt, is_open in ((ids, True), (ids[:-3], False)):
        plan = chat(text, tools=[], prompt_token_ids=prompt, thinking_token_budget=3)
        assert plan.params.adjustments and plan.params.adjustments.reasoning
        assert plan.params.adjustments.reasoning.is_open == is_open
    message = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000}
    message["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    plan = validate(MessageRequest, message).plan(text)
    assert plan.params.adjustments and plan.params.adjustments.reasoning
    assert plan.params.adjustments.reasoning.max_tokens == 1024 and plan.params.adjustments.reasoning.is_advisory
    assert not plan.ignored


def test_numbers_of_json_after_reasoning_are_bounded(text: ModelTokenizer) -> None:
    plan = chat(text, tools=[], response_format={"type": "json_object"})
    constraint = grammar_cache(text).constraint(plan.params.adjustments)
    assert constraint is not None
    digit = text.encode("7", special=False)[0]
    for token in text.encode(f'{ANALYSIS}a " mark{NEXT}{FINAL}{{"a": ', special=False):
        constraint.push(token)
    num_digits = 0
    while constraint.token_mask()[digit]:
        constraint.push(digit)
        num_digits += 1
    assert num_digits == MAX_NUMBER_LENGTH


def test_calls_are_read_also_if_special_tokens_are_shown(text: ModelTokenizer) -> None:
    answer, _ = parse_both_ways(chat(text, skip_special_tokens=False), text, f'{CALL}{{"city":"Rome"}}<|call|>')
    assert [(call.name, call.arguments) for call in answer.calls] == [("weather", '{"city": "Rome"}')]


def test_the_form_needs_the_tokens_of_channels() -> None:
    with pytest.raises(RequestError, match=r"form harmony .* has not all of <\|start\|>, .*; name another form"):
        chat(ModelTokenizer(read_shape(nano.MODEL_NAME, nano.path()), "harmony"))


def test_a_stop_string_ends_a_thought_or_a_text(text: ModelTokenizer) -> None:
    answer, choice = parse_both_ways(
        chat(text, stop=["END"]), text, f"{ANALYSIS}a{NEXT}{FINAL}words EN ENDmore<|return|>"
    )
    assert (answer.reasoning, answer.text, choice.stopped_by) == ("a", "words EN ", "END")
    answer, choice = parse_both_ways(chat(text, stop=["b c"]), text, f"{ANALYSIS}a b c d{NEXT}{FINAL}x<|return|>")
    assert (answer.reasoning, answer.text, choice.stopped_by) == ("a ", "", "b c")


def test_an_answer_goes_on_with_the_message_that_the_prompt_began(text: ModelTokenizer) -> None:
    prompt = text.encode(f"<|start|>user<|message|>hi<|end|><|start|>assistant{FINAL}The answer", special=False)
    channels = find_channels(text, prompt)
    assert channels is not None and channels.in_message
    plan = replace(chat(text), channels=channels)
    answer, _ = parse_both_ways(plan, text, " is 4.<|return|>")
    assert (answer.reasoning, answer.text) == ("", " is 4.")


_WORDS = st.text(st.sampled_from("ab \u00e9\U0001f600{}\n"), max_size=6)
_MESSAGES = st.lists(st.tuples(st.sampled_from([ANALYSIS, FINAL, CALL, "<|channel|>commentary<|message|>"]), _WORDS))


@examples(80)
@given(messages=_MESSAGES, cut=st.integers(0, 3), stop=st.sampled_from([None, "b", "a b"]))
def test_pieces_of_a_stream_are_the_whole_answer(
    text: ModelTokenizer, messages: Sequence[tuple[str, str]], cut: int, stop: str | None
) -> None:
    written = NEXT.join(header + words for header, words in messages)
    plan = chat(text, **({"stop": [stop]} if stop else {}))
    ids = text.encode(written, special=False)
    parse_both_ways(plan, text, text.decode(ids[: len(ids) - cut], special=True))


@pytest.mark.parametrize(
    ("choice", "call", "fits"),
    [
        ("required", '{"city": "Rome"}', True),
        ({"type": "function", "function": {"name": "weather"}}, '{"city": "Oslo"}', True),
        ("required", '{"city": "Bonn"}', False),
        ("required", '{"place": "Rome"}', False),
    ],
)
def test_a_required_call_is_held_to_the_format_and_the_schema(
    text: ModelTokenizer, tmp_path: Path, choice: object, call: str, fits: bool
) -> None:
    plan = chat(text, tool_choice=choice)
    assert plan.params.adjustments and plan.params.adjustments.grammar
    matcher = grammar_cache(text).compile(plan.params.adjustments.grammar).deep_copy()
    ids = text.encode(CALL + call, special=False)
    assert (matcher.validate_tokens(ids) == len(ids)) == fits
    if fits:
        answer, _ = parse_both_ways(plan, text, CALL + call + "<|call|>")
        assert [parsed_call.arguments for parsed_call in answer.calls] == [call]


def test_earlier_turns_are_written_in_the_format(text: ModelTokenizer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "dry"},
    ]
    prompt = text.decode(chat(text, messages=turns).prompts[0], special=True)
    assert 'to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>' in prompt
    assert prompt.endswith(
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"dry"<|end|><|start|>assistant'
    )
