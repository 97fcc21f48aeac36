"""Thinking: what a model writes between two tokens of its own before it answers, and is shown apart from the answer.

A base model thinks if its chat template speaks of the mark and its tokenizer has both marks as tokens, as Qwen3's do:
text that only looks like a mark is text. Some templates begin the thought in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith.chat.texts import Text

OPEN, CLOSE = "<think>", "</think>"
SWITCH = "enable_thinking"
"""The template's variable that turns thinking on and off, where it has one."""

MOST_SPACE = 4
"""Tokens of white space that a template may write after the mark."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks' tokens; `begun`: the prompt ends inside a thought."""

    open_id: int
    close_id: int
    begun: bool = False


def thinking_of(text: Text, prompt: Sequence[int] = ()) -> Thinking | None:
    """How a model thinks in its answer to a prompt; None for one that does not."""
    return marks_of(text, prompt) if CLOSE in text.template.source else None


def marks_of(text: Text, prompt: Sequence[int] = ()) -> Thinking | None:
    """The marks of any model that has them as tokens, whatever its template says."""
    open_id, close_id = text.token_id(OPEN), text.token_id(CLOSE)
    if open_id is None or close_id is None:
        return None
    return Thinking(open_id, close_id, _is_begun(text, prompt, open_id))


def _is_begun(text: Text, prompt: Sequence[int], open_id: int) -> bool:
    for token_id in reversed(prompt[-MOST_SPACE - 1 :]):
        if token_id == open_id:
            return True
        if text.token_bytes(token_id).strip():
            return False
    return False
