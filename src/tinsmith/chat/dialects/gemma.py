"""Gemma 4: `<|tool_call>call:NAME{key:value}<tool_call|>`, with strings between `<|"|>` marks and bare keys.

Gemma 3's template has no tools; a template written for it may use another dialect, such as `pythonic`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tinsmith.chat.calls import DialectParser
from tinsmith.chat.dialects.dialect import Tool, ToolDialect, ToolSchemas
from tinsmith.chat.dialects.grammar_writer import GrammarWriter, MarkedForm, normalize_arguments, write_sequence
from tinsmith.chat.dialects.json_objects import NotACallError
from tinsmith.chat.dialects.literals import GEMMA, LiteralReader, LiteralScanner, read_name
from tinsmith.chat.dialects.marked import MarkedParser, ReadCall, skip_words
from tinsmith.chat.dialects.parameter_values import (
    FORM,
    INTEGER,
    NUMBER,
    check_parameters,
    write_json_value,
    write_text,
)
from tinsmith.chat.dialects.typed_values import resolve_reference
from tinsmith.errors import not_supported

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_FORBIDDEN = " \n\t:,{}[]()\"'<>="
_ALL_TYPES = ("string", "number", "boolean", "null")


class GemmaReader:
    def __init__(self, start: int) -> None:
        self._at = start  # of the arguments, once the name is read
        self._name: str | None = None
        self._scanner: LiteralScanner | None = None
        self._end: int | None = None  # of the arguments
        self._num_searched = start + len(OPEN)

    def read(self, text: str) -> ReadCall | None:
        if self._scanner is None and not self._read_name(text):
            return None
        assert self._scanner is not None and self._name is not None
        if self._end is None:
            next_call = text.find(OPEN, self._num_searched)
            self._end = self._scanner.end_in(text if next_call < 0 else text[:next_call])
            if self._end is None and next_call >= 0:
                raise NotACallError(next_call)  # so that no character is read for several calls
            self._num_searched = max(self._num_searched, len(text) - len(OPEN) + 1)
        if self._end is None or (end := skip_words(text, self._end, (CLOSE,))) is None:
            return None
        arguments = LiteralReader(text[self._at : self._end - 1], GEMMA).read_arguments(":")
        return ReadCall(self._name, json.dumps(arguments, ensure_ascii=False), end)

    def _read_name(self, text: str) -> bool:
        if (start := skip_words(text, self._at, (OPEN, "call:"))) is None:
            return False
        if (name := read_name(text, start, "{")) is None:
            return False
        self._name, self._at = name
        self._scanner = LiteralScanner(self._at, "{", GEMMA)
        return True


def _new_parser(_schemas: ToolSchemas) -> DialectParser:
    return MarkedParser([(OPEN, GemmaReader)])


class ValueWriter:
    """Writes the rules of values of one tool's schema. A definition is one rule, so that it may refer to itself."""

    def __init__(self, writer: GrammarWriter, root: Mapping[str, Any], index: int) -> None:
        self._writer = writer
        self._root = root
        self._prefix = f"value_{index}"
        self._num_rules = 0
        self._rule_of_reference: dict[str, str] = {}

    def write_object(self, schema: Mapping[str, Any], path: str) -> str:
        """Return the expression of an object's items, without braces."""
        properties = check_parameters(schema, path, _FORBIDDEN)
        required = schema.get("required", ())
        items = [
            (
                f"{self._writer.write_literal(f'{key}:')} {self.write(value, f'{path}.properties.{key}')}",
                key in required,
            )
            for key, value in properties.items()
        ]
        return write_sequence(self._writer, self._new_name(), items, '","')

    def write(self, schema: Mapping[str, Any], path: str) -> str:
        """Return the expression of a value. Raises RequestError for keywords that cannot be written."""
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                options = [self.write(option, f"{path}.{keyword}") for option in schema[keyword]]
                return f"({' | '.join(options)})"
        if "$ref" in schema:
            return self._write_reference(schema, path)
        if "allOf" in schema:
            if len(schema["allOf"]) > 1:
                raise not_supported(f"{path}.allOf", f"of several schemas {FORM}; write them as one")
            return self.write(schema["allOf"][0], f"{path}.allOf[0]")
        values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
        if values is not None:
            return f"({' | '.join(self._writer.write_literal(write_literal(value)) for value in values)})"
        types = schema.get("type", _ALL_TYPES)
        names = [types] if isinstance(types, str) else list(types)
        return f"({' | '.join(self._write_type(name, schema, path) for name in names)})"

    def _write_reference(self, schema: Mapping[str, Any], path: str) -> str:
        reference = schema["$ref"]
        if reference not in self._rule_of_reference:
            definition = resolve_reference(reference, self._root)
            if not isinstance(definition, Mapping):
                raise not_supported(f"{path}.$ref", f"{reference!r}; use a definition in the schema")
            name = self._rule_of_reference[reference] = self._new_name()
            self._writer.add_rule(name, self.write(definition, path))
        return self._rule_of_reference[reference]

    def _write_type(self, name: str, schema: Mapping[str, Any], path: str) -> str:
        rule = self._new_name()
        match name:
            case "string":
                limits = {key: value for key, value in schema.items() if key not in ("type", "enum", "const")}
                return f"{self._writer.write_literal(QUOTE)} {write_text(self._writer, rule, limits, path, QUOTE)}"
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
            case "integer" | "number":
                limits = {key: value for key, value in schema.items() if key in _LIMITS}
                if limits:
                    return write_json_value(self._writer, rule, {"type": name, **limits}, {})
                return self._writer.add_rule(rule, INTEGER if name == "integer" else NUMBER)
            case "array":
                return self._write_array(schema, path)
            case _:
                return f'"{{" {self.write_object(schema, path)} "}}"'

    def _write_array(self, schema: Mapping[str, Any], path: str) -> str:
        if "prefixItems" in schema:
            raise not_supported(f"{path}.prefixItems", f"{FORM}; use items")
        items = schema.get("items")
        item = self._writer.add_rule(
            self._new_name(), self.write(items if isinstance(items, Mapping) else {}, f"{path}.items")
        )
        min_items, max_items = schema.get("minItems", 0), schema.get("maxItems")
        if max_items == 0 or items is False:
            return '"[]"'
        last = "" if max_items is None else max_items - 1
        repetition = f'{item} ("," {item}){{{max(min_items - 1, 0)},{last}}}'
        optional = "" if min_items else "?"
        return f'"[" ({repetition}){optional} "]"'

    def _new_name(self) -> str:
        self._num_rules += 1
        return f"{self._prefix}_{self._num_rules}"


_LIMITS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))


def write_literal(value: object) -> str:
    """Return a value as the template writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{write_literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write_literal, value)) + "]"
    return json.dumps(value)


def _write_call(writer: GrammarWriter, tool: Tool, index: int) -> str:
    schema = normalize_arguments(tool)
    values = ValueWriter(writer, schema, index)
    opening = writer.write_literal(f"call:{tool.name}{{")
    arguments = values.write_object(schema, f"tools[{tool.name}].parameters")
    return f"{opening} {arguments} {writer.write_literal('}' + CLOSE)}"


GEMMA4 = ToolDialect(
    name="gemma4",
    is_in=lambda template: OPEN in template and CLOSE in template,
    form=MarkedForm(OPEN, _write_call),
    new_parser=_new_parser,
    marks=(OPEN, CLOSE, QUOTE),
    closing=CLOSE,
)
