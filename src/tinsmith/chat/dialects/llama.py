"""The JSON of Llama 3.1, 3.2 and 4: a call is a bare JSON object with `name` and `parameters`.

Nothing marks a call. An object is one if it begins a line of the completion or follows another call, after `;` or white
space, and has a name and parameters, or nothing but a name. Other objects are text, as is an unfinished one.

In grammars, text has no line that begins with `{`. Calls and an answer of a schema may both be JSON objects, and the
library decides at the first character between the beginnings of two rules, so they become alternatives of one schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tinsmith.chat.calls import CallArguments, CallEnd, CallEvent, CallStart, TextEvent
from tinsmith.chat.dialects.dialect import CallRequest, ToolDialect
from tinsmith.chat.dialects.grammar_writer import (
    GrammarWriter,
    embed_grammar,
    normalize_arguments,
    read_schema,
    rebase_schema,
    write_lines_without,
    write_repetition,
)
from tinsmith.chat.dialects.json_calls import name_and_arguments, read_object
from tinsmith.chat.dialects.json_objects import NotACallError, ObjectScanner
from tinsmith.types import Grammar

_BEFORE_CALL = re.compile(r"\s*")
_AFTER_CALL = re.compile(r"\s*(?:;\s*)?")
_ONLY_NAME = {"name", "type"}


class LlamaParser:
    def __init__(self) -> None:
        self._text = ""  # the undecided characters
        self._scanner: ObjectScanner | None = None  # set while the text, after `_start` characters, may be a call
        self._start = 0
        self._is_line_start = True
        self._is_after_call = False

    def feed(self, text: str) -> Iterable[CallEvent]:
        self._text += text
        return self._read()

    def finish(self) -> Iterator[CallEvent]:
        if self._text:
            yield TextEvent(self._text)
        self._text, self._scanner = "", None

    def _read(self) -> Iterator[CallEvent]:
        while self._text:
            if self._scanner is None and not self._is_line_start:
                yield self._take_line()
                continue
            if self._scanner is None and not self._begins_object():
                return  # white space, whose meaning is undecided
            if self._scanner is None:
                continue
            try:
                end = self._scanner.end_in(self._text)
            except NotACallError as error:
                yield self._take_text(error.at)
                continue
            if end is None:
                return
            yield from self._take_object(end)

    def _begins_object(self) -> bool:
        """Decide what begins after white space; returns False while that is undecided."""
        before = (_AFTER_CALL if self._is_after_call else _BEFORE_CALL).match(self._text)
        self._start = before.end() if before else 0
        if self._start == len(self._text):
            return False
        if self._text[self._start] == "{":
            self._scanner = ObjectScanner(self._start, allows_lines=False)
        else:
            self._is_line_start = False
        return True

    def _take_line(self) -> TextEvent:
        """Return the text up to the end of the line."""
        return self._take_text(self._text.find("\n") + 1 or len(self._text))

    def _take_text(self, length: int) -> TextEvent:
        text, self._text = self._text[:length], self._text[length:]
        self._scanner, self._is_after_call = None, False
        self._is_line_start = "\n" in text and not text[text.rfind("\n") :].strip()
        return TextEvent(text)

    def _take_object(self, end: int) -> Iterator[CallEvent]:
        try:
            call = read_object(self._text[self._start : end])
            name, arguments = name_and_arguments(call, "parameters")
        except NotACallError:
            yield self._take_text(end)
            return
        if not arguments and not call.keys() <= _ONLY_NAME:
            yield self._take_text(end)
            return
        source = self._take_text(end).source
        self._is_line_start = self._is_after_call = True  # another call may follow on the same line
        yield CallStart(name, source)
        yield CallArguments(arguments, "")
        yield CallEnd("")


class LlamaForm:
    def write_grammar(self, request: CallRequest) -> Grammar:
        writer = GrammarWriter(request.mark_ids)
        options: list[object] = []
        for index, tool in enumerate(request.tools):
            arguments = rebase_schema(normalize_arguments(tool), f"#/anyOf/{index}/properties/parameters")
            properties = {"name": {"const": tool.name}, "parameters": arguments}
            limits = {"required": list(properties), "additionalProperties": False}
            options.append({"type": "object", "properties": properties, **limits})
        call = writer.add_json("call", {"anyOf": options})
        calls = call + write_repetition(f'"; " {call}', request.max_calls - 1)
        if request.allows_text:
            plain, lines = write_lines_without(writer, "{")
            return writer.write_grammar("lark", f"{plain} | {lines}? {calls}")
        if request.answer is None:
            return writer.write_grammar("json_lark", calls)
        if request.answer.kind != "json_schema":
            writer.add_rule("answer", embed_grammar(request.answer))
            return writer.write_grammar("lark", f"{calls} | answer")
        options.append(rebase_schema(read_schema(request.answer), f"#/anyOf/{len(options)}"))
        union = writer.add_json("object", {"anyOf": options})
        return writer.write_grammar("json_lark", union)


LLAMA = ToolDialect(
    name="llama",
    is_in=lambda template: "python_tag" in template or '"parameters": dictionary' in template,
    form=LlamaForm(),
    new_parser=lambda _schemas: LlamaParser(),
    aliases=("llama3_json", "llama4_json"),
)
