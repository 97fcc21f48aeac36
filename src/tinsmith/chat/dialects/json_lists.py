"""Lists of JSON objects after a mark: Granite 3's `<|tool_call|>[...]`, and `<TOOLCALL>[...]</TOOLCALL>` of Nemotron
Nano 2 and older Nemotron models.
"""

from __future__ import annotations

import json

from tinsmith.chat.calls import DialectParser
from tinsmith.chat.dialects.dialect import Tool, ToolDialect, ToolSchemas
from tinsmith.chat.dialects.grammar_writer import GrammarWriter, MarkedForm, write_json_arguments
from tinsmith.chat.dialects.json_calls import ObjectCallReader
from tinsmith.chat.dialects.marked import MarkedParser, Section


def _write_call(writer: GrammarWriter, tool: Tool, index: int) -> str:
    opening = writer.write_literal(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
    return f'{opening} {write_json_arguments(writer, tool, index)} "}}"'


def _new_dialect(name: str, mark: str, closings: tuple[str, ...], aliases: tuple[str, ...]) -> ToolDialect:
    def new_parser(_schemas: ToolSchemas) -> DialectParser:
        section = Section(",", lambda start: ObjectCallReader(start, (",",), in_list=True), closings)
        return MarkedParser([(mark, lambda start: ObjectCallReader(start, (mark, "["), in_list=True))], section)

    return ToolDialect(
        name=name,
        is_in=lambda template: mark in template,
        form=MarkedForm(f"{mark}[", _write_call, separator=", ", closing="".join(closings), has_only_json=True),
        new_parser=new_parser,
        aliases=aliases,
        marks=(mark, *closings[1:]),
    )


GRANITE = _new_dialect("granite", "<|tool_call|>", ("]",), ("granite3",))
NEMOTRON = _new_dialect("nemotron", "<TOOLCALL>", ("]", "</TOOLCALL>"), ("nemotron_json", "nemotron_nano_v2"))
