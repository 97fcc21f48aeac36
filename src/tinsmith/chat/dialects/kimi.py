"""Kimi K2: calls between tokens in a section, each with an id that contains the name: `functions.NAME:INDEX`.

The template writes the ids of the history, so that they must have the model's form: the index counts the calls of the
conversation.
"""

from __future__ import annotations

import re

from tinsmith.chat.calls import DialectParser
from tinsmith.chat.dialects.dialect import Tool, ToolDialect, ToolSchemas
from tinsmith.chat.dialects.grammar_writer import GrammarWriter, MarkedForm, write_json_arguments
from tinsmith.chat.dialects.json_calls import HeaderCallReader
from tinsmith.chat.dialects.marked import MarkedParser, Section

BEGIN_CALLS, END_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN_CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_HEADER = re.compile(r"\s*(?:functions\.)?([a-zA-Z0-9_.-]+)(?::\d+)?\s*" + re.escape(ARGUMENTS))


def _new_parser(_schemas: ToolSchemas) -> DialectParser:
    def new_reader(start: int) -> HeaderCallReader:
        return HeaderCallReader(start, (BEGIN_CALL,), _HEADER, ARGUMENTS, (END_CALL,))

    def new_first_reader(start: int) -> HeaderCallReader:
        return HeaderCallReader(start, (BEGIN_CALLS, BEGIN_CALL), _HEADER, ARGUMENTS, (END_CALL,))

    marks = [(BEGIN_CALLS, new_first_reader), (BEGIN_CALL, new_reader)]
    return MarkedParser(marks, Section(BEGIN_CALL, new_reader, (END_CALLS,)))


def _write_call(writer: GrammarWriter, tool: Tool, index: int) -> str:
    opening = writer.write_literal(f"{BEGIN_CALL}functions.{tool.name}:")
    arguments = writer.write_literal(ARGUMENTS)
    return (
        f"{opening} /[0-9]{{1,4}}/ {arguments} {write_json_arguments(writer, tool, index)} "
        f"{writer.write_literal(END_CALL)}"
    )


KIMI_K2 = ToolDialect(
    name="kimi_k2",
    is_in=lambda template: BEGIN_CALLS in template,
    form=MarkedForm(BEGIN_CALLS, _write_call, separator="", closing=END_CALLS, excluded=BEGIN_CALL, has_only_json=True),
    new_parser=_new_parser,
    aliases=("kimi",),
    marks=(BEGIN_CALLS, BEGIN_CALL, ARGUMENTS, END_CALL, END_CALLS),
    closing=END_CALL,
    write_id=lambda _call_id, name, index: f"functions.{name}:{index}",
)
