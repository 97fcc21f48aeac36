"""Earlier answers of a captured chat keep their sampled tokens with any tokenizer and template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.chat_models import make_tool_model
from support.harmony import make_harmony_model
from tinsmith.base_models import nano, read_shape
from tinsmith.chat.chats import ChatRequest
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.harmony import new_choice
from tinsmith.chat.messages import MessageRequest
from tinsmith.chat.splicing import answered
from tinsmith.chat.texts import Text
from tinsmith.types import I32
from tinsmith.wire.fields import validate

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


class Session:
    """The stored data of a capture session, as in `store.exchanges`."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.recorded: dict[str, tuple[list[int], list[int]]] = {}

    def __call__(self, digests: Sequence[str]) -> tuple[int, I32, I32] | None:
        index = next((index for index, digest in enumerate(digests) if digest in self.recorded), None)
        if index is None:
            return None
        prompt, tokens = self.recorded[digests[index]]
        return index, np.array(prompt, np.int32), np.array(tokens, np.int32)

    def plan(self, messages: list[dict[str, Any]], **fields: object) -> GenerationPlan:
        return validate(ChatRequest, {"model": "m", "messages": messages, **fields}).plan(self.text, self)

    def answer(self, plan: GenerationPlan, tokens: list[int]) -> dict[str, Any]:
        """Record tokens as an answer; return the message that a client receives."""
        choice = new_choice(plan, self.text, 0)
        for token_id in tokens:
            choice.push(token_id, -1.0)
        choice.finish()
        text_piece = choice.piece()
        assert plan.conversation is not None
        self.recorded[answered(plan.conversation, text_piece)] = (list(plan.prompts[0]), tokens)
        calls = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in text_piece.calls
        ]
        return {"role": "assistant", "content": text_piece.text, **({"tool_calls": calls} if calls else {})}


@pytest.fixture(scope="module")
def thinker() -> Text:
    """A tokenizer whose template omits the thoughts of earlier turns."""
    return Text(read_shape(nano.MODEL_NAME, nano.path()))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(read_shape("local/tools", make_tool_model(tmp_path_factory.mktemp("tools") / "m")))


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def odd_tokens(text: Text, words: str) -> list[int]:
    """The text with one token per character, unlike the tokenizer's tokens."""
    token_ids = [token for letter in words for token in text.encode(letter, special=False)]
    assert text.decode(token_ids) == words and token_ids != text.encode(words, special=False)
    return token_ids


def end_of(text: Text) -> int:
    end = text.token_id("<|im_end|>")
    assert end in text.end_token_ids
    return end


@pytest.mark.parametrize("has_end_token", [True, False])
def test_an_answer_that_encodes_to_other_tokens_keeps_those_that_were_sampled(plain: Text, has_end_token: bool) -> None:
    session = Session(plain)
    chat = [user("Say hello.")]
    first = session.plan(chat)
    sampled = odd_tokens(plain, "Hello there, hello") + ([end_of(plain)] if has_end_token else [])
    chat += [session.answer(first, sampled), user("Again.")]
    second = session.plan(chat)
    before = [*first.prompts[0], *sampled]
    assert list(second.prompts[0][: len(before)]) == before
    usual = validate(ChatRequest, {"model": "m", "messages": chat}).plan(plain).prompts[0]
    assert list(usual[: len(before)]) != before
    assert plain.decode(second.prompts[0], special=True) == plain.decode(usual, special=True)
    answer = session.answer(second, [*odd_tokens(plain, "hello you"), end_of(plain)])
    third = session.plan([*chat, answer, user("Bye.")])
    assert list(third.prompts[0][: len(second.prompts[0])]) == list(second.prompts[0])
    assert third.prompts[0].count(end_of(plain)) == 5


def test_a_thought_that_the_template_drops_stays_in_the_prompt(thinker: Text) -> None:
    session = Session(thinker)
    chat = [user("12 + 7")]
    first = session.plan(chat)
    sampled = [*thinker.encode("<think>\ntwelve\n</think>\n\n19", special=False), end_of(thinker)]
    answer = session.answer(first, sampled)
    assert answer["content"] == "19"
    second = session.plan([*chat, {**answer, "content": " 19\n", "refusal": None}, user("and 1?")])
    before = [*first.prompts[0], *sampled]
    assert list(second.prompts[0][: len(before)]) == before and second.prompts[0].count(end_of(thinker)) == 3


@pytest.mark.parametrize("family", ["hermes", "harmony"])
def test_calls_and_their_results_continue_the_recorded_tokens(tmp_path: Path, family: str) -> None:
    make = make_harmony_model if family == "harmony" else make_tool_model
    text = Text(read_shape("local/m", make(tmp_path / "m")))
    session, chat = Session(text), [user("go")]
    first = session.plan(chat, tools=TOOLS)
    written = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"a":   1}}\n</tool_call><|im_end|>',
        "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a":   1}<|call|>',
    }[family]
    sampled = text.encode(written, special=False)
    answer = session.answer(first, sampled)
    assert answer["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "done"}
    second = session.plan([*chat, answer, result], tools=TOOLS)
    before = [*first.prompts[0], *sampled]
    assert list(second.prompts[0][: len(before)]) == before
    continuation = text.decode(second.prompts[0][len(before) :], special=True)
    assert (
        "done" in continuation
        and continuation.count("<|call|>") == 0
        and continuation.lstrip().startswith(("<|im_start|>", "<|start|>"))
    )


def test_only_the_same_chat_of_the_same_session_is_spliced(plain: Text) -> None:
    session = Session(plain)
    sampled = [*odd_tokens(plain, "Hello there, hello"), end_of(plain)]
    answer = session.answer(session.plan([user("Say hello.")]), sampled)

    def is_spliced(messages: list[dict[str, Any]], **fields: object) -> bool:
        prompt = list(session.plan(messages, **fields).prompts[0])
        return any(prompt[at : at + len(sampled)] == sampled for at in range(len(prompt)))

    later = user("Again.")
    assert is_spliced([user("Say hello."), answer, later])
    assert not is_spliced([user("Say hello!"), answer, later]), "another question"
    assert not is_spliced([user("Say hello."), {**answer, "content": "Hello"}, later]), "an answer that was changed"
    assert not is_spliced([user("Say hello."), answer, later], tools=TOOLS), "other tools"
    assert not is_spliced([user("Say hello."), answer, later], chat_template_kwargs={"x": 1}), "other variables"
    assert not is_spliced([user("Say hello."), answer, later], prompt_token_ids=[1, 2])
    image = [{"type": "text", "text": "Again."}]
    assert is_spliced([user("Say hello."), answer, {"role": "user", "content": image}])


def test_a_message_of_anthropics_is_the_same_chat(plain: Text) -> None:
    session = Session(plain)
    sampled = [*odd_tokens(plain, "Hello there, hello"), end_of(plain)]

    def plan(*messages: dict[str, Any]) -> GenerationPlan:
        body = {"model": "m", "max_tokens": 5, "messages": list(messages)}
        return validate(MessageRequest, body).plan(plain, session)

    first = plan(user("Say hello."))
    answer = session.answer(first, sampled)
    blocks = {"role": "assistant", "content": [{"type": "text", "text": answer["content"]}]}
    second = plan(user("Say hello."), blocks, user("Again."))
    before = [*first.prompts[0], *sampled]
    assert list(second.prompts[0][: len(before)]) == before
