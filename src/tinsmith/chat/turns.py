"""Fits the turns of a conversation to what a model's chat template writes.

Agents send system messages between the turns, several of them at the beginning, and several messages of the user in a
row, and several calls in one message. Some templates refuse such conversations, and some drop a part of them in
silence. A probe of the template decides, once per template: what it writes stays as it is, so that the prompt is the
template's own. Otherwise system messages at the beginning become one, a later one becomes the user's, neighbouring
messages of the user become one, and each call becomes a message of its own, followed by its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from tinsmith.chat.tokenizer import ChatTemplate, Message
from tinsmith.errors import RequestError

SYSTEM_ROLES = ("system", "developer")
_PROBE_TEXTS = ("probe-alpha", "probe-beta", "probe-gamma")
_PROBE_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True)
class TurnRules:
    """What a template writes: several system messages at the beginning, one after the first turn, and two messages of
    the user in a row.
    """

    several_systems: bool
    later_system: bool
    repeated_user: bool


def fit_turns(template: ChatTemplate, messages: Sequence[Message], *, tools: bool) -> list[Message]:
    """Return the messages, changed only where the template would refuse or drop some of them."""
    messages = _fit_calls(template, messages, tools)
    system = next((str(message["role"]) for message in messages if message["role"] in SYSTEM_ROLES), SYSTEM_ROLES[0])
    systems = [message["role"] in SYSTEM_ROLES for message in messages]
    if True not in systems[1:] and not _has_repeated_user(messages):
        return list(messages)
    rules = _probe_rules(template, system, tools)
    fitted: list[Message] = []
    is_before_first_turn = True  # no turn so far
    for message in messages:
        is_system = message["role"] in SYSTEM_ROLES
        if is_system and is_before_first_turn and fitted and not rules.several_systems:
            fitted[-1] = _join(fitted[-1], message)
            continue
        if is_system and not is_before_first_turn and not rules.later_system:
            message = {"role": "user", "content": message["content"]}
        is_before_first_turn = is_before_first_turn and is_system
        if message["role"] == "user" and fitted and fitted[-1]["role"] == "user" and not rules.repeated_user:
            fitted[-1] = _join(fitted[-1], message)
        else:
            fitted.append(message)
    return fitted


def _fit_calls(template: ChatTemplate, messages: Sequence[Message], tools: bool) -> list[Message]:
    """Return the messages, with several calls of a message in messages of their own if the template needs it."""
    if all(len(_calls(message)) < 2 for message in messages) or not _needs_single_calls(template, tools):
        return list(messages)
    fitted: list[Message] = []
    index = 0
    while index < len(messages):
        message, calls = messages[index], _calls(messages[index])
        index += 1
        if len(calls) < 2:
            fitted.append(message)
            continue
        num_results = next(
            (count for count, later in enumerate(messages[index:]) if later["role"] != "tool"), len(messages) - index
        )
        results = messages[index : index + num_results]
        index += num_results
        fitted += _split_calls(message, calls, results)
    return fitted


def _split_calls(message: Message, calls: Sequence[Mapping[str, object]], results: Sequence[Message]) -> list[Message]:
    """Return a message for each call, followed by its results. They have the call's id, or the order of the calls if
    calls have no ids; other results come last.
    """
    remaining = list(results)
    split: list[Message] = []
    for position, call in enumerate(calls):
        first = message if position == 0 else {"role": message["role"], "content": ""}
        call_id = call.get("id")
        if call_id is None:
            matches, remaining = remaining[:1], remaining[1:]
        else:
            matches = [result for result in remaining if result.get("tool_call_id") == call_id]
            remaining = [result for result in remaining if result.get("tool_call_id") != call_id]
        split += [{**first, "tool_calls": [call]}, *matches]
    return split + remaining


def _calls(message: Message) -> Sequence[Mapping[str, object]]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


@lru_cache(maxsize=64)
def _needs_single_calls(template: ChatTemplate, tools: bool) -> bool:
    """Whether the template writes one call of a message, and not two."""
    return _keeps_calls(template, 1, tools) and not _keeps_calls(template, 2, tools)


def _keeps_calls(template: ChatTemplate, num_calls: int, tools: bool) -> bool:
    """Whether the template writes all calls of a message, and their results."""
    call_ids = [f"probecal{index}" for index in range(num_calls)]  # some templates accept only ids of nine letters
    marks = _PROBE_TEXTS[:num_calls]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "f", "arguments": {"key": mark}}}
        for call_id, mark in zip(call_ids, marks, strict=True)
    ]
    messages: list[Message] = [
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call_id, "content": "result"} for call_id in call_ids),
    ]
    return _writes(template, messages, marks, tools)


def _has_repeated_user(messages: Sequence[Message]) -> bool:
    return any(first["role"] == second["role"] == "user" for first, second in pairwise(messages))


@lru_cache(maxsize=64)
def _probe_rules(template: ChatTemplate, system: str, tools: bool) -> TurnRules:
    return TurnRules(
        several_systems=_keeps_texts(template, (system, system, "user"), tools),
        later_system=_keeps_texts(template, (system, "user", system), tools),
        repeated_user=_keeps_texts(template, ("user", "user"), tools),
    )


def _keeps_texts(template: ChatTemplate, roles: Sequence[str], tools: bool) -> bool:
    """Whether the template writes the text of a message of each of these roles, in order."""
    marks = _PROBE_TEXTS[: len(roles)]
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    return _writes(template, messages, marks, tools)


def _writes(template: ChatTemplate, messages: Sequence[Message], marks: Sequence[str], tools: bool) -> bool:
    """Whether the template writes these texts of the messages, in order."""
    try:
        rendered = template.render(messages, [_PROBE_TOOL] if tools else None, {})
    except RequestError:
        return False
    offsets = [rendered.find(mark) for mark in marks]
    return -1 not in offsets and offsets == sorted(offsets)


def _join(first: Message, second: Message) -> Message:
    return {**first, "content": _join_contents(first["content"], second["content"])}


def _join_contents(first: object, second: object) -> object:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: object) -> list[object]:
    return list(content) if isinstance(content, list) else [{"type": "text", "text": content}]
