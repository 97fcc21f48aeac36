"""Builds the prompt of a captured chat so that earlier completions keep their sampled tokens.

A client sends the earlier completions of a chat as text. Encoding the text again, or rendering it with the chat
template, may give other tokens than were sampled, which would split the trajectory. This module finds the longest
prefix of the chat that has a recorded completion in the same capture session. The recorded prompt and completion
replace that prefix, and the template renders the rest.

Completions are found by digests of the tools, the template's variables, and each message's role, text and tool calls.
Surrounding white space of a completion, its reasoning and the ids of calls are not part of the digest. A recorded
completion keeps its reasoning in the prompt, even if the template drops the reasoning of earlier turns.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence

import orjson

from tinsmith.chat.choices import TextPiece
from tinsmith.chat.texts import Message, Text, channels_of
from tinsmith.errors import RequestError
from tinsmith.types import I32

Recorded = Callable[[Sequence[str]], tuple[int, I32, I32] | None]
"""Maps digests of chats, the longest first, to the index of the first recorded one, its prompt and its completion."""

MAX_TRIED = 256
"""Most completions of a chat to look up, counted from the last."""


def digest_of(tools: Sequence[Message] | None, variables: Mapping[str, object]) -> str:
    """Return the digest of a chat without messages."""
    return _chained("", {"tools": tools, "variables": dict(variables)})


def digests_of(start: str, messages: Sequence[Message]) -> list[str]:
    """Return the digest of the chat after each message."""
    found: list[str] = []
    for message in messages:
        calls = [(each["function"]["name"], each["function"]["arguments"]) for each in _calls(message)]
        start = _turn(start, str(message["role"]), message["content"], calls)
        found.append(start)
    return found


def answered(conversation: str, piece: TextPiece) -> str:
    """Return the digest of a chat after its completion."""
    calls = [(call.name, orjson.loads(call.arguments)) for call in piece.calls]
    return _turn(conversation, "assistant", piece.text, calls)


def splice(
    text: Text,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    variables: Mapping[str, object],
    recorded: Recorded,
    *,
    generation_prompt: bool,
) -> list[int] | None:
    """Return the prompt with the recorded tokens of the longest recorded prefix. Returns None without such a prefix, or
    if the end of a completion cannot be found in the template's text. `messages` have no images.
    """
    digests = digests_of(digest_of(tools, variables), messages)
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"][: -MAX_TRIED - 1 : -1]
    found = recorded([digests[place] for place in places]) if places else None
    if found is None:
        return None
    rest = _after(text, messages, places[found[0]], tools, variables, generation_prompt)
    if rest is None:
        return None
    sampled = [*found[1].tolist(), *found[2].tolist()]
    return [*sampled, *(rest[1:] if sampled[-1] in _ends(text) and rest[:1] and rest[0] in _ends(text) else rest)]


def _after(
    text: Text,
    messages: Sequence[Message],
    place: int,
    tools: Sequence[Message] | None,
    variables: Mapping[str, object],
    generation_prompt: bool,
) -> list[int] | None:
    """Return the tokens after the completion at `place`, whose end is found by a marker in its text."""
    mark = secrets.token_hex(16)
    answer = dict(messages[place])
    if calls := _calls(answer):
        function = {**calls[-1]["function"], "arguments": {"mark": mark}}
        answer["tool_calls"] = [*calls[:-1], {**calls[-1], "function": function}]
    else:
        answer["content"] = mark
    marked = [*messages[:place], answer, *messages[place + 1 :]]
    try:
        rendered = text.template.render(marked, tools, variables, generation_prompt=generation_prompt)
    except RequestError:
        return None
    _, found, after = rendered.partition(mark)
    if not found or mark in after:
        return None
    tokens = text.encode(after, special=False)
    end = next((place for place, token_id in enumerate(tokens) if token_id in _ends(text)), None)
    if end is None:
        return None if calls else tokens
    return tokens[end:]


def _ends(text: Text) -> frozenset[int]:
    """Return the tokens that end a completion, both sampled ones and those of the template."""
    channels = channels_of(text)
    return text.end_token_ids | ({channels.end_id} if channels else set())


def _calls(message: Message) -> list[dict[str, dict[str, object]]]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _turn(before: str, role: str, content: object, calls: Sequence[tuple[object, object]]) -> str:
    given = content.strip() if isinstance(content, str) and role == "assistant" else content
    return _chained(before, {"role": role, "content": given, "calls": [list(each) for each in calls]})


def _chained(before: str, value: object) -> str:
    written = orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=str)
    return hashlib.sha256(before.encode() + written).hexdigest()
