"""Qwen3-Coder's, Qwen3.5's and Nemotron's form: `<tool_call>` around `<function=NAME>`, in which each argument is a
`<parameter=KEY>` element.

Values are plain text. The tool's JSON schema decides on their types: the value of a parameter that may be a string, or
that the schema does not describe, is a string. Other values are read as JSON, and stay strings if they do not fit. One
line end at both ends of a value belongs to the tags. A closing tag ends a value only if the next element or the end of
the function follows, so that values may contain tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tinsmith.chat.calls import read_json
from tinsmith.chat.dialects.hermes import CLOSE, OPEN
from tinsmith.chat.dialects.json_objects import NotACallError
from tinsmith.chat.dialects.marked import MarkedParser, ReadCall, follows

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]*")
_PYTHON_LITERALS = {"true": "true", "false": "false", "none": "null", "null": "null"}
"""Python's spellings of JSON's literals, without case."""

Schema = Mapping[str, Any]


def new_function_xml_parser(schemas: Mapping[str, Schema]) -> MarkedParser:
    return MarkedParser(OPEN, lambda start: FunctionReader(start, schemas))


class FunctionReader:
    def __init__(self, start: int, schemas: Mapping[str, Schema]) -> None:
        self._at = start + len(OPEN)
        self._schemas = schemas
        self._name: str | None = None
        self._key: str | None = None  # of the value that begins at `_at`
        self._search_start = 0  # where the search for the end of the value goes on
        self._values: dict[str, str] = {}
        self._is_complete = False

    def read(self, text: str) -> ReadCall | None:
        while not self._is_complete:
            if not self._step(text):
                return None
        if not follows(text, self._at, CLOSE):
            return None
        schema = self._schemas.get(self._name or "", {})
        arguments = {key: read_value(value, schema, key) for key, value in self._values.items()}
        end = text.index(CLOSE, self._at) + len(CLOSE)
        return ReadCall(self._name or "", json.dumps(arguments, ensure_ascii=False), end)

    def _step(self, text: str) -> bool:
        """Read the next element; returns False while it is incomplete."""
        if self._name is None:
            self._name = self._read_tag(text, FUNCTION)
            return self._name is not None
        if self._key is not None:
            return self._read_value(text)
        if (is_end := _can_follow(text, self._at, END_FUNCTION)) is None:
            return False
        if is_end:
            self._at = text.index(END_FUNCTION, self._at) + len(END_FUNCTION)
            self._is_complete = True
            return True
        self._key = self._read_tag(text, PARAMETER)
        self._search_start = self._at
        if self._key in self._values:
            raise NotACallError(self._at)
        return self._key is not None

    def _read_tag(self, text: str, tag: str) -> str | None:
        """Return the name in a tag, or None while the tag is incomplete."""
        if not follows(text, self._at, tag):
            return None
        start = text.index(tag, self._at) + len(tag)
        name = _NAME.match(text, start)
        end = start if name is None else name.end()
        if end == len(text):
            return None
        if text[end] != ">" or not text[start:end].strip():
            raise NotACallError(end)
        self._at = end + 1
        return text[start:end].strip()

    def _read_value(self, text: str) -> bool:
        end = text.find(END_PARAMETER, self._search_start)
        if end < 0:
            self._search_start = max(self._at, len(text) - len(END_PARAMETER) + 1)
            return False
        value_end = end + len(END_PARAMETER)
        next_matches = [_can_follow(text, value_end, tag) for tag in (PARAMETER, END_FUNCTION)]
        if True not in next_matches:
            if None in next_matches:
                return False
            self._search_start = value_end
            return True
        value = text[self._at : end]
        self._values[self._key or ""] = value.removeprefix("\n").removesuffix("\n")
        self._at, self._key = value_end, None
        return True


def _can_follow(text: str, start: int, word: str) -> bool | None:
    """Return what `follows` does, and False if the word cannot follow."""
    try:
        return follows(text, start, word)
    except NotACallError:
        return False


def read_value(value: str, schema: Schema, key: str) -> object:
    """Return a parameter's value in the type of its schema."""
    properties = schema.get("properties")
    property_schema = properties.get(key) if isinstance(properties, Mapping) else None
    types = set(_types_of(property_schema, schema, 0))
    if not types or "string" in types:
        return value
    text = value.strip()
    try:
        parsed = read_json(_PYTHON_LITERALS.get(text.lower(), text))
    except (ValueError, RecursionError):
        return value
    return parsed if _type_of(parsed) & types else value


def _type_of(value: object) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case None:
            return {"null"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def _types_of(schema: object, root: Schema, depth: int) -> Iterator[str]:
    """Yield the JSON types that a schema names. References and alternatives are followed to a depth."""
    if not isinstance(schema, Mapping) or depth > 8:
        return
    types = schema.get("type")
    yield from [types] if isinstance(types, str) else types if isinstance(types, list) else ()
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        for value in values if types is None and isinstance(values, list) else ():
            yield from _type_of(value)
    if types is None and "properties" in schema:
        yield "object"
    for name in ("anyOf", "oneOf", "allOf"):
        for alternative in schema.get(name) or ():
            yield from _types_of(alternative, root, depth + 1)
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        definition: object = root
        for segment in reference.removeprefix("#/").split("/"):
            definition = definition.get(segment) if isinstance(definition, Mapping) else None
        yield from _types_of(definition, root, depth + 1)
