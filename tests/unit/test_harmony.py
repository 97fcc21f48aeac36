"""Answers in the harmony format: channels become thoughts, text and calls, whole and token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.harmony import make_harmony_model
from support.properties import examples
from tinsmith.base_models import read_shape
from tinsmith.chat.chats import ChatRequest
from tinsmith.chat.choices import TextPiece
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.harmony import HarmonyChoice, new_choice
from tinsmith.chat.messages import MessageRequest
from tinsmith.chat.texts import Text, channels_of
from tinsmith.samplers.local.grammar import Grammars
from tinsmith.wire.fields import validate

WEATHER = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER | {"additionalProperties": False}}}]
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
NEXT = "<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(read_shape("local/harmony", make_harmony_model(tmp_path_factory.mktemp("harmony") / "m")))


def chat(text: Text, **fields: Any) -> GenerationPlan:  # noqa: ANN401  JSON
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
    return validate(ChatRequest, body).plan(text)


def join_pieces(plan: GenerationPlan, text: Text, written: str, *, at_once: bool) -> tuple[TextPiece, HarmonyChoice]:
    """The joined pieces of an answer that is parsed whole, or piece by piece."""
    choice = new_choice(plan, text, 0)
    assert isinstance(choice, HarmonyChoice)
    joined = TextPiece()

    def take() -> None:
        text_piece = choice.piece()
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


def parse_both_ways(plan: GenerationPlan, text: Text, written: str) -> tuple[TextPiece, HarmonyChoice]:
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


def test_channels_are_thoughts_text_and_a_call(text: Text) -> None:
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
def test_text_that_resembles_a_call_or_a_message_stays_text(text: Text, written: str, expected: str) -> None:
    answer, _ = parse_both_ways(chat(text), text, written)
    assert (answer.reasoning, answer.text, answer.calls) == ("", expected, [])


def test_thoughts_are_apart_or_text_or_left_out(text: Text) -> None:
    written = f"{ANALYSIS}hm{NEXT}{FINAL}yes<|return|>"
    answer, _ = parse_both_ways(chat(text, separate_reasoning=False), text, written)
    assert (answer.reasoning, answer.text) == ("", "hm\nyes")
    request = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    answer, choice = parse_both_ways(validate(MessageRequest, request).plan(text), text, written)
    assert (answer.reasoning, answer.text) == ("", "yes") and choice.reasoning_tokens > 2
    thinks = {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    answer, _ = parse_both_ways(validate(MessageRequest, request | thinks).plan(text), text, written)
    assert (answer.reasoning, answer.text) == ("hm", "yes")


def test_special_tokens_that_are_shown_and_answers_in_a_grammar_are_no_messages(text: Text) -> None:
    assert chat(text, tools=[], skip_special_tokens=False).channels is None
    assert chat(text, tools=[], response_format={"type": "json_object"}).channels is None
    assert chat(text, tool_choice="required").channels is not None


def test_a_stop_string_ends_a_thought_or_a_text(text: Text) -> None:
    answer, choice = parse_both_ways(
        chat(text, stop=["END"]), text, f"{ANALYSIS}a{NEXT}{FINAL}words EN ENDmore<|return|>"
    )
    assert (answer.reasoning, answer.text, choice.stopped_by) == ("a", "words EN ", "END")
    answer, choice = parse_both_ways(chat(text, stop=["b c"]), text, f"{ANALYSIS}a b c d{NEXT}{FINAL}x<|return|>")
    assert (answer.reasoning, answer.text, choice.stopped_by) == ("a ", "", "b c")


def test_an_answer_goes_on_with_the_message_that_the_prompt_began(text: Text) -> None:
    prompt = text.encode(f"<|start|>user<|message|>hi<|end|><|start|>assistant{FINAL}The answer", special=False)
    channels = channels_of(text, prompt)
    assert channels is not None and channels.begun
    plan = replace(chat(text), channels=channels)
    answer, _ = parse_both_ways(plan, text, " is 4.<|return|>")
    assert (answer.reasoning, answer.text) == ("", " is 4.")


_WORDS = st.text(st.sampled_from("ab \u00e9\U0001f600{}\n"), max_size=6)
_MESSAGES = st.lists(st.tuples(st.sampled_from([ANALYSIS, FINAL, CALL, "<|channel|>commentary<|message|>"]), _WORDS))


@examples(80)
@given(messages=_MESSAGES, cut=st.integers(0, 3), stop=st.sampled_from([None, "b", "a b"]))
def test_pieces_of_a_stream_are_the_whole_answer(
    text: Text, messages: Sequence[tuple[str, str]], cut: int, stop: str | None
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
    text: Text, tmp_path: Path, choice: object, call: str, fits: bool
) -> None:
    from transformers import PreTrainedTokenizerFast

    plan = chat(text, tool_choice=choice)
    assert plan.params.adjustments and plan.params.adjustments.grammar
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=text.tokenizer)
    grammars = Grammars(tokenizer, text.tokenizer.get_vocab_size(), text.end_token_ids)
    matcher = grammars.compiled(plan.params.adjustments.grammar).deep_copy()
    ids = text.encode(CALL + call, special=False)
    assert (matcher.validate_tokens(ids) == len(ids)) == fits
    if fits:
        answer, _ = parse_both_ways(plan, text, CALL + call + "<|call|>")
        assert [parsed_call.arguments for parsed_call in answer.calls] == [call]


def test_earlier_turns_are_written_in_the_format(text: Text) -> None:
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
