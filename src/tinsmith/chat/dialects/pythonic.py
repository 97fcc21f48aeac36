"""Pythonic calls of Llama 3.2 and 4: a list of calls with keyword arguments, `[f(a=1), g(b="x")]`.

A list is one of calls if it begins a line and its first item is a call, or if it follows `<|python_start|>`. In
grammars, text has no line that begins with `[`.
"""

from __future__ import annotations

import json
import re

from tinsmith.chat.calls import DialectParser
from tinsmith.chat.dialects.dialect import CallRequest, Tool, ToolDialect, ToolSchemas
from tinsmith.chat.dialects.grammar_writer import (
    GrammarWriter,
    normalize_arguments,
    write_lines_without,
    write_repetition,
    write_sequence,
    write_union,
)
from tinsmith.chat.dialects.literals import PYTHON, LiteralReader, LiteralScanner, read_name
from tinsmith.chat.dialects.marked import MarkedParser, ReadCall, Section, skip_words
from tinsmith.chat.dialects.parameter_values import check_parameters, write_json_value
from tinsmith.errors import RequestError
from tinsmith.types import Grammar

START, END = "<|python_start|>", "<|python_end|>"
_LITERALS = {"boolean": '"True" | "False"', "null": '"None"'}
_EXAMPLE = re.compile(r"\[\s*[A-Za-z_][\w.]*\(\s*\w+\s*=")
_KEYWORD = re.compile(r"[^\W\d]\w*")


class PythonicReader:
    def __init__(self, start: int, before: tuple[str, ...]) -> None:
        self._at = start  # of the arguments, once the name is read
        self._before = before
        self._name: str | None = None
        self._scanner: LiteralScanner | None = None

    def read(self, text: str) -> ReadCall | None:
        if self._scanner is None and not self._read_name(text):
            return None
        assert self._scanner is not None and self._name is not None
        if (end := self._scanner.end_in(text)) is None:
            return None
        arguments = LiteralReader(text[self._at : end - 1], PYTHON).read_arguments("=")
        return ReadCall(self._name, json.dumps(arguments, ensure_ascii=False), end)

    def _read_name(self, text: str) -> bool:
        if (start := skip_words(text, self._at, self._before)) is None:
            return False
        if (name := read_name(text, start, "(")) is None:
            return False
        self._name, self._at = name
        self._scanner = LiteralScanner(self._at, "(", PYTHON)
        return True


def _new_parser(_schemas: ToolSchemas) -> DialectParser:
    marks = [
        ("[", lambda start: PythonicReader(start, ("[",))),
        (START, lambda start: PythonicReader(start, (START, "["))),
    ]
    section = Section(",", lambda start: PythonicReader(start, (",",)), ("]", END))
    return MarkedParser(marks, section, line_marks=("[",))


class PythonicForm:
    def write_grammar(self, request: CallRequest) -> Grammar:
        writer = GrammarWriter(request.mark_ids)
        calls = [
            writer.add_rule(f"call_{index}", _write_call(writer, tool, index))
            for index, tool in enumerate(request.tools)
        ]
        writer.add_rule("call", " | ".join(calls))
        more_calls = write_repetition('", " call', request.max_calls - 1)
        writer.add_rule("calls", f'"[" call{more_calls} "]"')
        if request.allows_text:
            plain, lines = write_lines_without(writer, "[", START)
            return writer.write_grammar("lark", f"{plain} | {lines}? calls")
        return write_union(writer, "calls", "json_lark", request.answer)


def _write_call(writer: GrammarWriter, tool: Tool, index: int) -> str:
    schema = normalize_arguments(tool)
    path = f"tools[{tool.name}].parameters"
    properties = check_parameters(schema, path, "")
    items: list[tuple[str, bool]] = []
    for position, (key, property_schema) in enumerate(properties.items()):
        if not _KEYWORD.fullmatch(key):
            raise RequestError(f"{path}.properties.{key}", f"{path}.properties has {key!r}, which is no Python keyword")
        kind = property_schema.get("type")
        literal = _LITERALS.get(kind) if isinstance(kind, str) and property_schema.keys() <= {"type"} else None
        name = f"value_{index}_{position}"
        value = writer.add_rule(name, literal) if literal else write_json_value(writer, name, property_schema, schema)
        opening = json.dumps(f"{key}=")
        items.append((f"{opening} {value}", key in schema.get("required", ())))
    arguments = write_sequence(writer, f"arguments_{index}", items, '", "')
    opening = json.dumps(f"{tool.name}(")
    return f'{opening} {arguments} ")"'


PYTHONIC = ToolDialect(
    name="pythonic",
    is_in=lambda template: _EXAMPLE.search(template) is not None,
    form=PythonicForm(),
    new_parser=_new_parser,
    aliases=("llama4_pythonic",),
    marks=(START, END),
)
