"""DeepSeek V3, R1 and V3.1: calls between tokens, in a section of their own.

V3 writes the name in a line and the arguments in a code block; V3.1 writes the arguments directly after a separator.
"""

from __future__ import annotations

import re

from tinsmith.chat.calls import DialectParser
from tinsmith.chat.dialects.dialect import Tool, ToolDialect, ToolSchemas
from tinsmith.chat.dialects.grammar_writer import GrammarWriter, MarkedForm, write_json_arguments
from tinsmith.chat.dialects.json_calls import HeaderCallReader
from tinsmith.chat.dialects.marked import MarkedParser, Section


def _token(words: str) -> str:
    """Return a token in DeepSeek's spelling: between fullwidth bars, with block characters for spaces."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


BEGIN_CALLS, END_CALLS = _token("tool calls begin"), _token("tool calls end")
BEGIN_CALL, SEPARATOR, END_CALL = _token("tool call begin"), _token("tool sep"), _token("tool call end")
MARKS = (BEGIN_CALLS, BEGIN_CALL, SEPARATOR, END_CALL, END_CALLS)
_BEGIN_BLOCK, _END_BLOCK = "```json", "```"
_BLOCK_HEADER = re.compile(rf"(?:function)?{re.escape(SEPARATOR)}\s*([^\s`{{}}]+)\s*```json")
_HEADER = re.compile(rf"\s*([^\s`{{}}]+)\s*{re.escape(SEPARATOR)}")


def _new_parser(header: re.Pattern[str], separator: str, after: tuple[str, ...]) -> DialectParser:
    def new_reader(start: int) -> HeaderCallReader:
        return HeaderCallReader(start, (BEGIN_CALL,), header, separator, after)

    def new_first_reader(start: int) -> HeaderCallReader:
        return HeaderCallReader(start, (BEGIN_CALLS, BEGIN_CALL), header, separator, after)

    marks = [(BEGIN_CALLS, new_first_reader), (BEGIN_CALL, new_reader)]
    return MarkedParser(marks, Section(BEGIN_CALL, new_reader, (END_CALLS,)))


def _new_block_parser(_schemas: ToolSchemas) -> DialectParser:
    return _new_parser(_BLOCK_HEADER, _BEGIN_BLOCK, (_END_BLOCK, END_CALL))


def _new_plain_parser(_schemas: ToolSchemas) -> DialectParser:
    return _new_parser(_HEADER, SEPARATOR, (END_CALL,))


def _write_block_call(writer: GrammarWriter, tool: Tool, index: int) -> str:
    closing = f"\n{_END_BLOCK}{END_CALL}"
    opening = writer.write_literal(f"{BEGIN_CALL}function{SEPARATOR}{tool.name}\n{_BEGIN_BLOCK}\n")
    return f"{opening} {write_json_arguments(writer, tool, index)} {writer.write_literal(closing)}"


def _write_plain_call(writer: GrammarWriter, tool: Tool, index: int) -> str:
    opening = writer.write_literal(f"{BEGIN_CALL}{tool.name}{SEPARATOR}")
    return f"{opening} {write_json_arguments(writer, tool, index)} {writer.write_literal(END_CALL)}"


def _is_block(template: str) -> bool:
    return BEGIN_CALLS in template and "```json" in template


DEEPSEEK_V3 = ToolDialect(
    name="deepseek_v3",
    is_in=_is_block,
    form=MarkedForm(
        BEGIN_CALLS, _write_block_call, separator="\n", closing=END_CALLS, excluded=BEGIN_CALL, has_only_json=True
    ),
    new_parser=_new_block_parser,
    aliases=("deepseek_r1",),
    marks=MARKS,
    closing=END_CALL,
)
DEEPSEEK_V31 = ToolDialect(
    name="deepseek_v31",
    is_in=lambda template: BEGIN_CALLS in template,
    form=MarkedForm(
        BEGIN_CALLS, _write_plain_call, separator="", closing=END_CALLS, excluded=BEGIN_CALL, has_only_json=True
    ),
    new_parser=_new_plain_parser,
    marks=MARKS,
    closing=END_CALL,
)
