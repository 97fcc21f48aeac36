"""Hermes, also Qwen's and Granite 4's: `<tool_call>` around a JSON object with `name` and `arguments`.

The object ends where its JSON ends, so that a string in the arguments may contain the closing tag.
"""

from __future__ import annotations

import json

from tinsmith.chat.dialects.dialect import Tool, ToolDialect, ToolSchemas
from tinsmith.chat.dialects.grammar_writer import GrammarWriter, MarkedForm, write_json_arguments
from tinsmith.chat.dialects.json_calls import ObjectCallReader
from tinsmith.chat.dialects.marked import MarkedParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def new_parser(_schemas: ToolSchemas) -> MarkedParser:
    return MarkedParser([(OPEN, lambda start: ObjectCallReader(start, (OPEN,), (CLOSE,), in_list=False))])


def _write_call(writer: GrammarWriter, tool: Tool, index: int) -> str:
    opening = writer.write_literal(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
    closing = writer.write_literal("}\n" + CLOSE)
    return f"{opening} {write_json_arguments(writer, tool, index)} {closing}"


HERMES = ToolDialect(
    name="hermes",
    is_in=lambda template: OPEN in template and "<arg_key>" not in template,
    form=MarkedForm(OPEN, _write_call, gap="\n", has_only_json=True),
    new_parser=new_parser,
    aliases=("granite4", "qwen25"),
    marks=(OPEN, CLOSE),
    closing=CLOSE,
)
