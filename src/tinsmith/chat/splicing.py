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

from tinsmith.chat.choices import CompletionDelta
from tinsmith.chat.tokenizer import Message, ModelTokenizer, find_channels
from tinsmith.errors import RequestError
from tinsmith.types import I32

FindRecording = Callable[[Sequence[str]], tuple[int, I32, I32] | None]
"""Maps digests of chats, the longest first, to the index of the first recorded one, its prompt and its completion."""

MAX_LOOKUPS = 256
"""Most completions of a chat to look up, counted from the last."""


def digest_of(tools: Sequence[Message] | None, variables: Mapping[str, object]) -> str:
    """Return the digest of a chat without messages."""
    return _chain_digest("", {"tools": tools, "variables": dict(variables)})


def digests_of(digest: str, messages: Sequence[Message]) -> list[str]:
    """Return the digest of the chat after each message."""
    digests: list[str] = []
    for message in messages:
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in _calls(message)]
        digest = _digest_turn(digest, str(message["role"]), message["content"], calls)
        digests.append(digest)
    return digests


def digest_answer(conversation: str, completion: CompletionDelta) -> str:
    """Return the digest of a chat after its completion."""
    calls = [(call.name, orjson.loads(call.arguments)) for call in completion.calls]
    return _digest_turn(conversation, "assistant", completion.text, calls)


def splice(
    tokenizer: ModelTokenizer,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    variables: Mapping[str, object],
    find_recording: FindRecording,
    *,
    generation_prompt: bool,
) -> list[int] | None:
    """Return the prompt with the recorded tokens of the longest recorded prefix. Returns None without such a prefix, or
    if the end of a completion cannot be found in the template's text. `messages` have no images.
    """
    digests = digests_of(digest_of(tools, variables), messages)
    answer_indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    answer_indices = answer_indices[: -MAX_LOOKUPS - 1 : -1]
    recording = find_recording([digests[index] for index in answer_indices]) if answer_indices else None
    if recording is None:
        return None
    suffix = _encode_suffix(tokenizer, messages, answer_indices[recording[0]], tools, variables, generation_prompt)
    if suffix is None:
        return None
    recorded_tokens = [*recording[1].tolist(), *recording[2].tolist()]
    end_token_ids = _end_token_ids(tokenizer)
    if recorded_tokens[-1] in end_token_ids and suffix and suffix[0] in end_token_ids:
        suffix = suffix[1:]
    return [*recorded_tokens, *suffix]


def _encode_suffix(
    tokenizer: ModelTokenizer,
    messages: Sequence[Message],
    answer_index: int,
    tools: Sequence[Message] | None,
    variables: Mapping[str, object],
    generation_prompt: bool,
) -> list[int] | None:
    """Return the tokens after the message at `answer_index`, whose end is found by a marker in its text."""
    marker = secrets.token_hex(16)
    answer = dict(messages[answer_index])
    if calls := _calls(answer):
        function = {**calls[-1]["function"], "arguments": {"mark": marker}}
        answer["tool_calls"] = [*calls[:-1], {**calls[-1], "function": function}]
    else:
        answer["content"] = marker
    marked_messages = [*messages[:answer_index], answer, *messages[answer_index + 1 :]]
    try:
        rendered = tokenizer.template.render(marked_messages, tools, variables, generation_prompt=generation_prompt)
    except RequestError:
        return None
    _, separator, after = rendered.partition(marker)
    if not separator or marker in after:
        return None
    tokens = tokenizer.encode(after, special=False)
    end = next((index for index, token_id in enumerate(tokens) if token_id in _end_token_ids(tokenizer)), None)
    if end is None:
        return None if calls else tokens
    return tokens[end:]


def _end_token_ids(tokenizer: ModelTokenizer) -> frozenset[int]:
    """Return the tokens that end a completion, both sampled ones and those of the template."""
    channels = find_channels(tokenizer)
    return tokenizer.end_token_ids | ({channels.end_id} if channels else set())


def _calls(message: Message) -> list[dict[str, dict[str, object]]]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _digest_turn(previous_digest: str, role: str, content: object, calls: Sequence[tuple[object, object]]) -> str:
    stripped_content = content.strip() if isinstance(content, str) and role == "assistant" else content
    return _chain_digest(
        previous_digest, {"role": role, "content": stripped_content, "calls": [list(call) for call in calls]}
    )


def _chain_digest(previous_digest: str, value: object) -> str:
    encoded = orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=str)
    return hashlib.sha256(previous_digest.encode() + encoded).hexdigest()
