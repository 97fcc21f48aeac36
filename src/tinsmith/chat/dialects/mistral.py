"""Mistral: `[TOOL_CALLS]` before a list of JSON objects, or, since 2025, before each call as `NAME[ARGS]{...}`.

The id of a call may stand between the name and the arguments, after `[CALL_ID]`. Templates accept only ids of nine
letters and digits.
"""

from __future__ import annotations

import hashlib
import re

from tinsmith.chat.calls import DialectParser
from tinsmith.chat.dialects.dialect import Tool, ToolDialect, ToolSchemas
from tinsmith.chat.dialects.grammar_writer import GrammarWriter, MarkedForm, write_json_arguments, write_object_call
from tinsmith.chat.dialects.json_calls import HeaderCallReader, ObjectCallReader
from tinsmith.chat.dialects.marked import CallReader, MarkedParser, ReadCall, Section

MARK, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_HEADER = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\][^\[\]{}]*)?\s*(?:\[ARGS\])?")
_ID = re.compile(r"[a-zA-Z0-9]{9}")


class MistralReader:
    """Reads either form, which the first character after the mark decides."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._reader: CallReader | None = None

    def read(self, text: str) -> ReadCall | None:
        if self._reader is None:
            at = self._start + len(MARK)
            while at < len(text) and text[at].isspace():
                at += 1
            if at == len(text):
                return None
            if text[at] == "[":
                self._reader = ObjectCallReader(self._start, (MARK, "["), in_list=True)
            else:
                self._reader = HeaderCallReader(self._start, (MARK,), _HEADER, ARGS)
        return self._reader.read(text)


def _new_parser(_schemas: ToolSchemas) -> DialectParser:
    section = Section(",", lambda start: ObjectCallReader(start, (",",), in_list=True), ("]",))
    return MarkedParser([(MARK, MistralReader)], section)


def _write_header_call(writer: GrammarWriter, tool: Tool, index: int) -> str:
    return f"{writer.write_literal(tool.name + ARGS)} {write_json_arguments(writer, tool, index)}"


def _write_id(call_id: str, _name: str, _index: int) -> str:
    if _ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


MISTRAL_LIST = ToolDialect(
    name="mistral_list",
    is_in=lambda template: MARK in template and ARGS not in template,
    form=MarkedForm(MARK + " [", write_object_call, separator=", ", closing="]", has_only_json=True),
    new_parser=_new_parser,
    aliases=("mistral",),
    marks=(MARK,),
    write_id=_write_id,
)
MISTRAL = ToolDialect(
    name="mistral_args",
    is_in=lambda template: MARK in template,
    form=MarkedForm(MARK, _write_header_call, has_only_json=True),
    new_parser=_new_parser,
    aliases=("mistral",),
    marks=(MARK, CALL_ID, ARGS),
    write_id=_write_id,
)
