"""Calls written as elements: a tag with the name, an element for each argument, and the end of the call.

`ElementReader` reads them and `write_elements` writes their grammar; a dialect says what its tags are. A closing tag
ends a value only if the next element or the end of the call follows, so that values may contain tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from tinsmith.chat.dialects.dialect import Tool, ToolSchemas
from tinsmith.chat.dialects.grammar_writer import GrammarWriter, normalize_arguments
from tinsmith.chat.dialects.json_objects import NotACallError
from tinsmith.chat.dialects.marked import ReadCall, follows, skip_words
from tinsmith.chat.dialects.parameter_values import check_parameters, write_parameter
from tinsmith.chat.dialects.typed_values import is_text, parameter_types, read_value

MAX_TAG = 512
"""Most characters of a tag after its opening."""
MAX_INNER_TAGS = 256
"""Most closing tags within a value; the limit bounds the work for text that only begins like calls."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag that begins with `opening`. `body` matches what follows it, up to the first of the characters `ends`; its
    first group is the name. `keeps_end`: the end character is not part of the tag.
    """

    opening: str
    body: re.Pattern[str]
    ends: str = ">"
    keeps_end: bool = False

    def read(self, text: str, at: int) -> tuple[re.Match[str], int] | None:
        """Return the body and the offset after the tag, or None while it is incomplete. Raises NotACallError."""
        if (start := skip_words(text, at, [self.opening])) is None:
            return None
        limit = min(len(text), start + MAX_TAG)
        end = next((index for index in range(start, limit) if text[index] in self.ends), None)
        if end is None:
            if len(text) < start + MAX_TAG:
                return None
            raise NotACallError(start)
        body = self.body.fullmatch(text, start, end)
        if body is None or not body[1].strip():
            raise NotACallError(end)
        return body, end if self.keeps_end else end + 1


@dataclass(frozen=True, slots=True)
class Elements:
    """The tags of a dialect's calls.

    `before` and `after` are the words around a call. `key_end` stands between an argument's name and its value.
    `trims_lines`: one line end at both ends of a value belongs to the tags. `is_string` says whether a value is text by
    its tag, for dialects whose tags say so; else the schema decides.
    """

    before: tuple[str, ...]
    name: Tag
    key: Tag
    value_end: str
    end: str
    after: tuple[str, ...] = ()
    key_end: tuple[str, ...] = ()
    trims_lines: bool = False
    is_string: Callable[[re.Match[str]], bool] | None = None


class ElementReader:
    def __init__(self, start: int, elements: Elements, schemas: ToolSchemas) -> None:
        self._at = start
        self._elements = elements
        self._schemas = schemas
        self._name: str | None = None
        self._key: re.Match[str] | None = None  # of the value that begins at `_at`
        self._search_start = 0  # where the search for the end of the value goes on
        self._num_inner_tags = 0
        self._values: dict[str, object] = {}
        self._is_complete = False

    def read(self, text: str) -> ReadCall | None:
        while not self._is_complete:
            if not self._step(text):
                return None
        if (end := skip_words(text, self._at, self._elements.after)) is None:
            return None
        return ReadCall(self._name or "", json.dumps(self._values, ensure_ascii=False), end)

    def _step(self, text: str) -> bool:
        """Read the next element; returns False while it is incomplete."""
        elements = self._elements
        if self._name is None:
            if (start := skip_words(text, self._at, elements.before)) is None:
                return False
            if (tag := elements.name.read(text, start)) is None:
                return False
            self._name, self._at = tag[0][1].strip(), tag[1]
            return True
        if self._key is not None:
            return self._read_value(text)
        if (is_end := _can_follow(text, self._at, elements.end)) is None:
            return False
        if is_end:
            self._at = text.index(elements.end, self._at) + len(elements.end)
            self._is_complete = True
            return True
        if (tag := elements.key.read(text, self._at)) is None:
            return False
        if (start := skip_words(text, tag[1], elements.key_end)) is None:
            return False
        self._key, self._at, self._search_start = tag[0], start, start
        if tag[0][1].strip() in self._values:
            raise NotACallError(self._at)
        return True

    def _read_value(self, text: str) -> bool:
        assert self._key is not None
        elements = self._elements
        end = text.find(elements.value_end, self._search_start)
        if end < 0:
            self._search_start = max(self._at, len(text) - len(elements.value_end) + 1)
            return False
        after_value = end + len(elements.value_end)
        next_matches = [_can_follow(text, after_value, tag) for tag in (elements.key.opening, elements.end)]
        if True not in next_matches:
            if None in next_matches:
                return False
            self._search_start = after_value
            self._num_inner_tags += 1
            if self._num_inner_tags > MAX_INNER_TAGS:
                raise NotACallError(after_value)
            return True
        value = text[self._at : end]
        if elements.trims_lines:
            value = value.removeprefix("\n").removesuffix("\n")
        key = self._key[1].strip()
        self._values[key] = self._type_value(value, key)
        self._at, self._key = after_value, None
        return True

    def _type_value(self, value: str, key: str) -> object:
        assert self._key is not None
        if self._elements.is_string is None:
            return read_value(value, self._schemas.get(self._name or "", {}), key)
        if self._elements.is_string(self._key):
            return value
        return read_value(value, {"properties": {key: {"type": list(_JSON_TYPES)}}}, key)


_JSON_TYPES = ("number", "integer", "boolean", "null", "array", "object")


def _can_follow(text: str, start: int, word: str) -> bool | None:
    """Return what `follows` does, and False if the word cannot follow."""
    try:
        return follows(text, start, word)
    except NotACallError:
        return False


@dataclass(frozen=True, slots=True)
class ElementForm:
    """The texts of a call's elements in grammars: before and after the name, before a value by its key and whether it
    is text, after a value, and at the end. `forbidden` are characters that names of arguments cannot contain.
    """

    before_name: str
    after_name: str
    write_opening: Callable[[str, bool], str]
    value_end: str
    end: str
    forbidden: str = '<>"\n'


def write_elements(writer: GrammarWriter, form: ElementForm, tool: Tool, index: int) -> str:
    """Add the rules of a call of a tool, and return its expression. Required arguments must come, in the order of the
    schema; others may be left out. Raises RequestError for schemas that elements cannot hold.
    """
    schema = normalize_arguments(tool)
    path = f"tools[{tool.name}].parameters"
    properties = check_parameters(schema, path, form.forbidden)
    expression = [writer.write_literal(form.before_name + tool.name + form.after_name)]
    for position, (key, property_schema) in enumerate(properties.items()):
        is_value_text = is_text(parameter_types(schema, key))
        name = f"value_{index}_{position}"
        opening = writer.write_literal(form.write_opening(key, is_value_text))
        value = write_parameter(
            writer, name, property_schema, schema, f"{path}.properties.{key}", form.value_end, is_text=is_value_text
        )
        element = f"{opening} {value}"
        if is_value_text and parameter_types(schema, key) == {"string", "null"}:
            null = writer.write_literal(form.write_opening(key, False) + "null" + form.value_end)
            element = f"({element} | {null})"
        expression.append(element if key in schema.get("required", ()) else f"({element})?")
    return " ".join([*expression, writer.write_literal(form.end)])
