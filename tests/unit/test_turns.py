"""Conversations reach chat templates in a form in which they write all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from support.family_chat_models import FAMILY_CHATS
from tinsmith.chat.tokenizer import ChatTemplate
from tinsmith.chat.turns import fit_turns

USER: dict[str, Any] = {"role": "user", "content": "Is it raining?"}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
TOKENS = {"bos_token": "<bos>"}


def call(call_id: str | None, city: str, name: str = "weather") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"city": city}}}


def result(call_id: str | None, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text} | ({} if call_id is None else {"tool_call_id": call_id})


def calls_of(*calls: dict[str, Any], content: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def new_template(name: str) -> ChatTemplate:
    return ChatTemplate(FAMILY_CHATS[name].template, TOKENS)


CONVERSATION = [
    USER,
    calls_of(call("a", "Rome"), call("b", "Oslo", "sights"), content="Let me see."),
    result("b", "a fjord"),
    result("a", "dry"),
    {"role": "user", "content": "And now?"},
]


@pytest.mark.parametrize("name", ["llama3", "gpt_oss"])
def test_calls_of_a_message_are_messages_of_their_own_where_the_template_writes_only_one(name: str) -> None:
    template = new_template(name)
    fitted = fit_turns(template, CONVERSATION, tools=True)
    assert fitted == [
        USER,
        calls_of(call("a", "Rome"), content="Let me see."),
        result("a", "dry"),
        calls_of(call("b", "Oslo", "sights")),
        result("b", "a fjord"),
        {"role": "user", "content": "And now?"},
    ]
    rendered = template.render(fitted, [TOOL], {})
    texts = ["Rome", "dry", "Oslo", "fjord", "And now?"]
    assert [rendered.index(text) for text in texts] == sorted(rendered.index(text) for text in texts)


@pytest.mark.parametrize("name", ["qwen35", "deepseek"])
def test_calls_that_the_template_writes_stay_in_their_message(name: str) -> None:
    assert fit_turns(new_template(name), CONVERSATION, tools=True) == CONVERSATION


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([result(None, "dry"), result(None, "wet")], ["dry", "wet"]),
        ([result(None, "same"), result(None, "same")], ["same", "same"]),
        ([result(None, "dry")], ["dry"]),
        ([], []),
    ],
)
def test_results_without_ids_follow_the_calls_in_order(results: Sequence[dict[str, Any]], expected: list[str]) -> None:
    messages = [USER, calls_of(call(None, "Rome"), call(None, "Oslo")), *results]
    fitted: list[Any] = fit_turns(new_template("llama3"), messages, tools=False)
    assert [len(message.get("tool_calls", ())) for message in fitted if message["role"] == "assistant"] == [1, 1]
    assert [message["content"] for message in fitted if message["role"] == "tool"] == expected


def test_a_result_of_no_call_is_kept() -> None:
    messages = [USER, calls_of(call("a", "Rome"), call("b", "Oslo")), result("c", "lost"), result("a", "dry")]
    fitted: list[Any] = fit_turns(new_template("llama3"), messages, tools=False)
    assert [message["content"] for message in fitted if message["role"] == "tool"] == ["dry", "lost"]


def test_a_template_without_calls_decides_itself() -> None:
    plain = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {})
    messages = [USER, calls_of(call("a", "Rome"), call("b", "Oslo"))]
    assert fit_turns(plain, messages, tools=False) == messages
