"""Lists of JSON objects after a mark: Granite 3's `<|tool_call|>[...]`, and `<TOOLCALL>[...]</TOOLCALL>` of Nemotron
Nano 2 and older Nemotron models.
"""

from __future__ import annotations

from tinsmith.chat.calls import DialectParser
from tinsmith.chat.dialects.dialect import ToolDialect, ToolSchemas
from tinsmith.chat.dialects.grammar_writer import MarkedForm, write_object_call
from tinsmith.chat.dialects.json_calls import ObjectCallReader
from tinsmith.chat.dialects.marked import MarkedParser, Section


def _new_dialect(name: str, mark: str, closings: tuple[str, ...], aliases: tuple[str, ...]) -> ToolDialect:
    def new_parser(_schemas: ToolSchemas) -> DialectParser:
        section = Section(",", lambda start: ObjectCallReader(start, (",",), in_list=True), closings)
        return MarkedParser([(mark, lambda start: ObjectCallReader(start, (mark, "["), in_list=True))], section)

    return ToolDialect(
        name=name,
        is_in=lambda template: mark in template,
        form=MarkedForm(f"{mark}[", write_object_call, separator=", ", closing="".join(closings), has_only_json=True),
        new_parser=new_parser,
        aliases=aliases,
        marks=(mark, *closings[1:]),
    )


GRANITE = _new_dialect("granite", "<|tool_call|>", ("]",), ("granite3",))
NEMOTRON = _new_dialect("nemotron", "<TOOLCALL>", ("]", "</TOOLCALL>"), ("nemotron_json", "nemotron_nano_v2"))
