"""What a dialect of tool calls consists of, and the requests and tools that dialects know.

A `ToolDialect` has everything about one form of calls: how a chat template shows it, its parser, its grammar, the texts
that may be single tokens, and the ids that its templates accept. `chat.tools` asks the dialect and compares no names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tinsmith.chat.calls import DialectParser
from tinsmith.types import Grammar

ToolSchemas = Mapping[str, Mapping[str, object]]
"""The JSON schemas of the arguments, by the names of the tools."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. `definition` is its form for the chat template."""

    name: str
    parameters: Mapping[str, object]
    definition: Mapping[str, object]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class CallRequest:
    """The calls that a grammar allows.

    `tools` may be called, up to `max_calls` times. With `allows_text` any text may stand before and after the calls,
    and there may be none. `answer` is the grammar of a completion without a call. `mark_ids` are the ids of the marks
    that grammars must write as tokens.
    """

    tools: tuple[Tool, ...]
    max_calls: int
    allows_text: bool = False
    answer: Grammar | None = None
    mark_ids: Mapping[str, int] = field(default_factory=dict)


class CallForm(Protocol):
    """Writes the grammars of a dialect."""

    def write_grammar(self, request: CallRequest) -> Grammar:
        """Return the grammar of a completion. Raises RequestError for what this form cannot hold."""
        ...


@dataclass(frozen=True, slots=True)
class ToolDialect:
    """One form of tool calls.

    `is_in` says whether a chat template shows this form. `new_parser` is None for a form whose calls are not text.
    `aliases` are other names, vLLM's among them. `marks` are texts that may be single tokens; as special tokens they
    are shown to the parser and are no part of the text. `closing` ends a call, and is part of it as a stop string.
    `write_id` returns the id under which a template accepts a call: of the client's id, the name, and the call's number
    in the conversation.
    """

    name: str
    is_in: Callable[[str], bool]
    form: CallForm
    new_parser: Callable[[ToolSchemas], DialectParser] | None
    aliases: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    closing: str = ""
    write_id: Callable[[str, str, int], str] | None = None
