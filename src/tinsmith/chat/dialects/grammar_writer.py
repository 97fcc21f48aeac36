"""Writes grammars of tool calls in llguidance's Lark: literals with tokens in them, JSON by schema, and free text.

`MarkedForm` serves every dialect whose calls follow a trigger, such as `<tool_call>`. A section is the trigger, one
call or several with separators, and a closing. In a completion with free text the trigger is the end of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.chat.calls import read_json
from tinsmith.chat.dialects.dialect import CallRequest, Tool
from tinsmith.chat.schemas import normalize_schema
from tinsmith.errors import RequestError
from tinsmith.types import JSON_FORM, Grammar

ANY_TEXT = "/(.|\\n)*/"
_REGEX_ESCAPES = {"/": "\\/", "\n": "\\n", "\r": "\\r"}
_SLASH = re.compile(r"(\\.)|[/\n\r]")


class GrammarWriter:
    def __init__(self, mark_ids: Mapping[str, int]) -> None:
        """`mark_ids` are the ids of the marks that are written as tokens."""
        self.mark_ids = dict(mark_ids)
        self._rules: list[str] = []
        marks = sorted(self.mark_ids, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks))) if marks else None

    def write_literal(self, text: str) -> str:
        """Return a text as an expression: quoted, and with a token for each mark that is one."""
        if not text:
            return ""
        terms: list[str] = []
        at = 0
        for mark in self._marks.finditer(text) if self._marks else ():
            terms += [json.dumps(text[at : mark.start()])] if mark.start() > at else []
            terms.append(f"<[{self.mark_ids[mark[0]]}]>")
            at = mark.end()
        terms += [json.dumps(text[at:])] if at < len(text) else []
        return " ".join(terms)

    def split_at_token(self, text: str) -> tuple[str, str] | None:
        """Return the text before the first mark that is a token, and the expression from it on; None without one."""
        mark = self._marks.search(text) if self._marks else None
        return None if mark is None else (text[: mark.start()], self.write_literal(text[mark.start() :]))

    def add_rule(self, name: str, expression: str) -> str:
        """Add a rule and return its name. `name` may have attributes in brackets."""
        self._rules.append(f"{name}: {expression}")
        return name.partition("[")[0]

    def add_json(self, name: str, schema: Mapping[str, object]) -> str:
        return self.add_rule(name, f"%json {json.dumps({**schema, 'x-guidance': dict(JSON_FORM)})}")

    def add_text_before(self, name: str, literal: str, excluded: str) -> str:
        """Add a rule of free text without `excluded` that ends with the first `literal`."""
        split = self.split_at_token(literal)
        before = literal if split is None else split[0]
        text = self.add_rule(name.upper(), f"/(.|\\n)*{escape_regex(before)}/{without(excluded)}")
        return self.add_rule(f"{name}[lazy]", text) if split is None else self.add_rule(name, f"{text} {split[1]}")

    def write_grammar(self, kind: str, start: str) -> Grammar:
        return Grammar(kind, "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n")


@dataclass(frozen=True, slots=True)
class MarkedForm:
    """The grammar of calls after a trigger.

    `write_call` adds the rules of a call of a tool and returns the expression of the call after the trigger. Without a
    `separator` each call has its own trigger, and `gap` stands between calls. `excluded` also begins calls, so that
    free text must not contain it. `has_only_json`: the calls have no quotation marks outside of JSON.
    """

    trigger: str
    write_call: Callable[[GrammarWriter, Tool, int], str]
    separator: str | None = None
    closing: str = ""
    gap: str = ""
    excluded: str = ""
    has_only_json: bool = False

    def write_grammar(self, request: CallRequest) -> Grammar:
        writer = GrammarWriter(request.mark_ids)
        calls = [
            writer.add_rule(f"call_{index}", self.write_call(writer, tool, index))
            for index, tool in enumerate(request.tools)
        ]
        writer.add_rule("call", " | ".join(calls))
        body, more_sections = "call", ""
        if self.separator is not None:
            body += write_repetition(f"{writer.write_literal(self.separator)} call", request.max_calls - 1)
            body += f" {writer.write_literal(self.closing)}"
        elif request.max_calls > 1:
            more_sections = write_repetition(f"{writer.write_literal(self.gap)} section", request.max_calls - 1)
        if request.allows_text:
            begin = writer.add_text_before("begin", self.trigger, self.excluded)
            writer.add_rule("tagged", f"{begin} {body}")
            is_text = writer.split_at_token(self.trigger) is None
            writer.add_rule("TEXT", ANY_TEXT + without(self.excluded) + without(self.trigger if is_text else ""))
            writer.add_rule("last", "TEXT")
            return writer.write_grammar("lark", f"tagged{'?' if request.max_calls == 1 else '*'} last")
        writer.add_rule("section", f"{writer.write_literal(self.trigger)} {body}")
        writer.add_rule("calls", f"section{more_sections}")
        kind = "json_lark" if self.has_only_json else "lark"
        return write_union(writer, "calls", kind, request.answer)


def write_union(
    writer: GrammarWriter, calls: str, kind: str, answer: Grammar | None, *, before: str = "", answer_prefix: str = ""
) -> Grammar:
    """Return the grammar of calls, unless there are none, or, if it is set, an answer; `before` begins both."""
    options = [calls] if calls else []
    if answer is not None:
        writer.add_rule("answer", embed_grammar(answer))
        options.append(f"{answer_prefix}answer")
        kind = kind if answer.kind == "json_schema" else "lark"
    union = " | ".join(options)
    return writer.write_grammar(kind, f"{before} ({union})" if before else union)


def without(text: str) -> str:
    """Return the end of a terminal that excludes a text."""
    return f" & ~/(.|\\n)*{escape_regex(text)}(.|\\n)*/" if text else ""


def write_lines_without(writer: GrammarWriter, first: str, excluded: str = "") -> tuple[str, str]:
    """Add rules of text without `excluded` and without a line that begins with the character `first`, for dialects
    whose calls begin a line: of a completion, and of the lines before a call.
    """
    end = without(excluded)
    line = f"[ \\t]*([^ \\t\\n{escape_regex(first)}][^\\n]*)?"
    plain = writer.add_rule("PLAIN", f"/{line}(\\n{line})*/{end}")
    return plain, writer.add_rule("LINES", f"/({line}\\n)+[ \\t]*/{end}")


def write_repetition(expression: str, max_count: int) -> str:
    return f" ({expression}){{0,{max_count}}}" if max_count > 0 else ""


def write_json_arguments(writer: GrammarWriter, tool: Tool, index: int) -> str:
    """Add the rule of a tool's arguments as a JSON object."""
    return writer.add_json(f"arguments_{index}", normalize_arguments(tool))


def write_object_call(writer: GrammarWriter, tool: Tool, index: int) -> str:
    """Add the rules of a call as a JSON object with the name and the arguments, and return its expression."""
    opening = writer.write_literal(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
    return f'{opening} {write_json_arguments(writer, tool, index)} "}}"'


def normalize_arguments(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments as grammars hold it. Raises RequestError by the keyword's path."""
    return normalize_schema({"type": "object"} | dict(tool.parameters), f"tools[{tool.name}].parameters")


def embed_grammar(grammar: Grammar) -> str:
    """Return a grammar as a part of a rule. Raises RequestError for a schema that is not JSON."""
    if grammar.kind == "regex":
        return f"/{_SLASH.sub(lambda match: match[1] or _REGEX_ESCAPES[match[0]], grammar.text)}/"
    if grammar.kind != "json_schema":
        return f"%lark {{\n{grammar.text}\n}}"
    return f"%json {json.dumps(read_schema(grammar) | {'x-guidance': dict(JSON_FORM)})}"


def read_schema(grammar: Grammar) -> dict[str, Any]:
    """Return the schema of a grammar. Raises RequestError for one that is not an object."""
    try:
        schema = read_json(grammar.text)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise RequestError("response_format", "the schema must be a JSON object where calls or reasoning are possible")
    return schema


def rebase_schema(schema: object, path: str) -> Any:  # noqa: ANN401  JSON
    """Return a schema whose references resolve when it is placed at `path` of another schema."""
    if isinstance(schema, list):
        return [rebase_schema(inner, path) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    rebased = {name: rebase_schema(value, path) for name, value in schema.items() if name != "x-guidance"}
    reference = rebased.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        rebased["$ref"] = path + reference.removeprefix("#")
    return rebased


def escape_regex(text: str) -> str:
    """Return a regular expression of a text, for use between slashes."""
    return "".join(
        f"\\{letter}"
        if letter in "\\^$.|?*+()[]{}/&~-"
        else {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(letter, letter)
        for letter in text
    )


def write_sequence(writer: GrammarWriter, name: str, items: Sequence[tuple[str, bool]], separator: str) -> str:
    """Add rules of items in order, of which the second component says whether they are required, with separators."""
    tail = ""  # the items after this one, each after a separator
    first: list[str] = []
    for index in range(len(items) - 1, -1, -1):
        item, is_required = items[index]
        first = [f"{item} {tail}", *([] if is_required else first)]
        following = f"{separator} {item} {tail}".strip()
        tail = writer.add_rule(f"{name}_{index}", following if is_required else f"({separator} {item})? {tail}".strip())
    is_empty_allowed = not any(is_required for _, is_required in items)
    options = " | ".join(option.strip() for option in first)
    if not options:
        return '""'
    return f"({options}){'?' if is_empty_allowed else ''}"
