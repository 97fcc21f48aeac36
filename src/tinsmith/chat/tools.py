"""Tools: functions that a model may call, and the grammars of its calls.

The model's chat template decides on one of four formats: Hermes (`<tool_call>` around a JSON object with name and
arguments; also Qwen's), Qwen3.5's (`<tool_call>` around `<function=NAME>`), Llama 3.1's (a bare JSON object with name
and parameters) and harmony (gpt-oss). A grammar enforces a required call, and arguments that match their schema
(`strict`); there is none for Qwen3.5's. `dialects` and `harmony` read the calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import AfterValidator, Field, WrapValidator

from tinsmith.chat.calls import CallAssembler, read_json
from tinsmith.chat.dialects import PARSERS
from tinsmith.chat.dialects.hermes import CLOSE, OPEN
from tinsmith.chat.schemas import normalize_schema
from tinsmith.errors import RequestError, not_supported
from tinsmith.types import JSON_FORM, Grammar
from tinsmith.wire.fields import (
    ByType,
    ClosedBody,
    Ignored,
    OneOf,
    StrOr,
    Supported,
    Text,
    advice_error,
    printable_name,
    show,
    support_error,
    validation_error,
)

MAX_TOOLS = 128
MAX_CALLS = 16
"""Most calls of a completion that must call tools; some models would never stop."""
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
NEWLINE = json.dumps("\n")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. `definition` is its form for the chat template."""

    name: str
    parameters: Mapping[str, object]
    definition: Mapping[str, object]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request; `choice` is auto, required or a tool's name. `answer_grammar` is the grammar of a
    completion that calls no tool.
    """

    tools: tuple[Tool, ...]
    choice: str
    is_named: bool
    parallel: bool
    dialect: str  # hermes | function_xml | llama | harmony
    has_tag_tokens: bool = True  # whether OPEN and CLOSE are single tokens
    answer_grammar: Grammar | None = None

    def grammar(self) -> Grammar | None:
        """Return the grammar of a completion, or None if any text is allowed."""
        if self.choice == "auto" and self.answer_grammar is None:
            return self._strict_grammar() if any(tool.strict for tool in self.tools) else None
        if self.dialect == "function_xml":
            if self.choice == "auto":
                raise not_supported("response_format", "together with tools in this model's form of calls")
            raise not_supported("tool_choice", "with this model's form of calls, other than 'auto' and 'none'")
        callable_tools = [tool for tool in self.tools if not self.is_named or tool.name == self.choice]
        kind, start = "json_lark", "start: calls"
        if self.choice == "auto" and self.answer_grammar is not None:
            kind = "json_lark" if self.answer_grammar.kind == "json_schema" else "lark"
            head = '<|channel|> "final" <|message|> ' if self.dialect == "harmony" else ""
            start = f"start: calls | {head}answer\nanswer: {_embed_grammar(self.answer_grammar)}"
        if self.dialect == "llama" and self.choice == "auto":
            return Grammar(kind, _llama_union(callable_tools, self.answer_grammar))
        if self.dialect == "llama":
            return Grammar(kind, _rules(f"{start}\ncalls: call", callable_tools, _open_json_call("parameters")))
        if self.dialect == "harmony":
            return Grammar(kind, _rules(f"{start}\ncalls: call", callable_tools, _open_harmony_call, closing=""))
        call = f"{self._mark(OPEN)} {NEWLINE} call {NEWLINE} {self._mark(CLOSE)}"
        repetition = "" if self.is_named or not self.parallel else f" ({NEWLINE} one){{0,{MAX_CALLS - 1}}}"
        return Grammar(
            kind, _rules(f"{start}\ncalls: one{repetition}\none: {call}", callable_tools, _open_json_call("arguments"))
        )

    def _strict_grammar(self) -> Grammar:
        if self.dialect != "hermes":
            exception = "" if self.dialect == "function_xml" else " unless tool_choice requires a call"
            raise not_supported("tools[].function.strict", f"with this model{exception}")
        repetition = "*" if self.parallel else "?"
        begin = f"begin: TEXT {OPEN}" if self.has_tag_tokens else f"begin[lazy]: TEXT {_quote(OPEN)}"
        head = (
            f"start: tagged{repetition} last\nlast: TEXT\nTEXT: /(.|\\n)*/\n{begin}\n"
            f"tagged: begin {NEWLINE} call {NEWLINE} {self._mark(CLOSE)}"
        )
        return Grammar("lark", _rules(head, self.tools, _open_json_call("arguments")))

    def _mark(self, mark: str) -> str:
        """Return a tag as grammars write it: a single token has no quotes."""
        return mark if self.has_tag_tokens else _quote(mark)

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop string of a completion with at most one call. It is part of the call."""
        return self.closings if not self.parallel and self.choice == "auto" else ()

    @property
    def closings(self) -> tuple[str, ...]:
        """Return the strings that end a call; as stop strings of a request they are part of it."""
        return (CLOSE,) if self.dialect in ("hermes", "function_xml") else ()

    def new_assembler(self) -> CallAssembler:
        """Make the assembler of one completion. The harmony format takes the events of its messages."""
        schemas = {tool.name: tool.parameters for tool in self.tools}
        parser = PARSERS[self.dialect](schemas) if self.dialect in PARSERS else None
        return CallAssembler(schemas, parser)


def _check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise validation_error(f"is {show(name)}; use 1 to 128 of a-z, A-Z, 0-9, _, - and .")
    return name


class FunctionBody(ClosedBody):
    name: Annotated[Text, AfterValidator(_check_name)]
    description: Ignored = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(ClosedBody):
    type: Annotated[Text, Supported(("function",), "use 'function'")]
    function: FunctionBody


def drop_other_tool(item: object, kinds: Sequence[str]) -> None:
    """Raise the error that removes a tool of another type from a request. No model here can call it, because only its
    vendor describes and runs it.
    """
    kind = item.get("type", kinds[0]) if isinstance(item, dict) else None
    if kind == "custom" and kind not in kinds:
        raise support_error("'custom'; describe a function with one string")
    if isinstance(kind, str) and kind not in kinds:
        raise advice_error(
            f"{show(kind)}; this server does not run tools; describe a function", f"[{printable_name(kind)}]"
        )


def _read_tool(definition: dict[str, Any], read: Callable[[object], ToolBody]) -> Tool:
    drop_other_tool(definition, ("function",))
    function = read(definition).function
    parameters = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
    return Tool(function.name, parameters, definition, bool(function.strict))


class NamedFunction(ClosedBody):
    name: Text


class NamedTool(ClosedBody):
    type: Annotated[Text, Supported(("function",), "use 'function'")]
    function: NamedFunction


class ListedTools(ClosedBody):
    mode: Annotated[str, OneOf(("auto", "required"))]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedTools(ClosedBody):
    type: Ignored
    allowed_tools: ListedTools


ToolField = Annotated[ToolBody, WrapValidator(_read_tool)]
ToolChoiceObject = Annotated[NamedTool | AllowedTools, ByType({"function": NamedTool, "allowed_tools": AllowedTools})]
ToolChoice = Annotated[str | ToolChoiceObject, StrOr(("none", "auto", "required"))]


def select_tools(
    tools: Sequence[ToolBody], choice: NamedTool | AllowedTools | str | None
) -> tuple[NamedTool | str | None, Sequence[Tool]]:
    """Return the tool choice and the tools that it allows. Raises RequestError."""
    all_tools = cast("Sequence[Tool]", tools)
    if not isinstance(choice, AllowedTools):
        return choice, all_tools
    allowed_names = [tool.function.name for tool in choice.allowed_tools.tools]
    for name in allowed_names:
        if name not in {tool.name for tool in all_tools}:
            raise RequestError("tool_choice", f"tool_choice allows {show(name)}, which is not one of the tools")
    return choice.allowed_tools.mode, [tool for tool in all_tools if tool.name in allowed_names]


def read_tools(
    tools: Sequence[Tool],
    tool_choice: NamedTool | str | None,
    parallel: bool,
    template: str,
    has_tag_tokens: bool,
    answer_grammar: Grammar | None = None,
) -> ToolUse | None:
    """Read a request's tools. Returns None if there are none, or if tool_choice excludes them. `answer_grammar`
    is the grammar of a completion without a call.
    """
    is_named = isinstance(tool_choice, NamedTool)
    choice = tool_choice.function.name if isinstance(tool_choice, NamedTool) else tool_choice or "auto"
    if not tools:
        if is_named or choice == "required":
            raise RequestError("tool_choice", f"tool_choice is {show(choice)}, but tools is missing; send tools")
        return None
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError("tools", "two tools have the same name; use each name once")
    if choice == "none" and not is_named:
        return None
    if is_named and choice not in names:
        raise RequestError("tool_choice", f"tool_choice names {show(choice)}, which is not one of the tools")
    return ToolUse(tuple(tools), choice, is_named, parallel, _detect_dialect(template), has_tag_tokens, answer_grammar)


def _detect_dialect(template: str) -> str:
    if "tools" not in template:
        raise not_supported("tools", "this model's chat template does not support tools")
    if OPEN in template:
        return "function_xml" if "<function=" in template else "hermes"
    if "<|channel|>" in template and "functions." in template:
        return "harmony"
    if "python_tag" in template or '"parameters": dictionary' in template:
        return "llama"
    raise not_supported(
        "tools", "this model's chat template uses none of the formats Hermes, Qwen3.5, Llama 3.1 and harmony"
    )


def _open_json_call(arguments: str) -> Callable[[str], str]:
    return lambda name: _quote(f'{{"name": {json.dumps(name)}, "{arguments}": ')


def _open_harmony_call(name: str) -> str:
    """Return the grammar of a message's opening to the tool on the channel "commentary"."""
    return f'<|channel|> {_quote(f"commentary to=functions.{name} ")} <|constrain|> "json" <|message|>'


def _rules(header: str, tools: Sequence[Tool], write_opening: Callable[[str], str], closing: str = ' "}"') -> str:
    """Return the rules of a call of one of the tools: `write_opening` of its name, its arguments, and `closing`."""
    calls = " | ".join(f"call_{index}" for index in range(len(tools)))
    lines = ["%llguidance {}", header, f"call: {calls}"]
    for index, tool in enumerate(tools):
        lines += [
            f"call_{index}: {write_opening(tool.name)} arguments_{index}{closing}",
            f"arguments_{index}: %json {json.dumps(_arguments_schema(tool))}",
        ]
    return "\n".join(lines) + "\n"


def _arguments_schema(tool: Tool) -> dict[str, object]:
    schema = normalize_schema({"type": "object"} | dict(tool.parameters), f"tools[{tool.name}].parameters")
    return {**schema, "x-guidance": dict(JSON_FORM)}


def _embed_grammar(grammar: Grammar) -> str:
    """Return a grammar as a part of a rule. Raises RequestError for a schema that is not JSON."""
    if grammar.kind == "regex":
        return f"/{_SLASH.sub(lambda match: match[1] or REGEX_ESCAPES[match[0]], grammar.text)}/"
    if grammar.kind != "json_schema":
        return f"%lark {{\n{grammar.text}\n}}"
    schema = _read_object(grammar.text)
    if schema is None:
        raise RequestError("response_format", "the schema must be a JSON object if tools are sent, too")
    return f"%json {json.dumps(schema | {'x-guidance': dict(JSON_FORM)})}"


def _llama_union(tools: Sequence[Tool], answer_grammar: Grammar | None) -> str:
    """Return the rules of a call of one of the tools or an answer. Both may be JSON objects, and the library decides at
    the first character between the beginnings of two rules, so objects become alternatives of one schema.
    """
    options: list[object] = []
    for index, tool in enumerate(tools):
        arguments = _rebase(_arguments_schema(tool), f"#/anyOf/{index}/properties/parameters")
        properties = {"name": {"const": tool.name}, "parameters": arguments}
        object_limits = {"required": list(properties), "additionalProperties": False}
        options.append({"type": "object", "properties": properties, **object_limits})
    rule = ""
    if answer_grammar is not None and answer_grammar.kind == "json_schema":
        options.append(_rebase(_read_object(answer_grammar.text), f"#/anyOf/{len(tools)}"))
    elif answer_grammar is not None:
        rule = f" | answer\nanswer: {_embed_grammar(answer_grammar)}"
    schema = {"anyOf": options, "x-guidance": dict(JSON_FORM)}
    return f"%llguidance {{}}\nstart: calls{rule}\ncalls: %json {json.dumps(schema)}\n"


def _rebase(schema: object, path: str) -> object:
    """Return a schema whose references resolve when it is placed at `path` of another schema."""
    if isinstance(schema, list):
        return [_rebase(inner, path) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    rebased = {name: _rebase(value, path) for name, value in schema.items() if name != "x-guidance"}
    reference = rebased.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        rebased["$ref"] = path + reference.removeprefix("#")
    return rebased


REGEX_ESCAPES = {"/": "\\/", "\n": "\\n", "\r": "\\r"}
_SLASH = re.compile(r"(\\.)|[/\n\r]")


def _read_object(text: str) -> dict[str, Any] | None:
    try:
        value = read_json(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _quote(text: str) -> str:
    return json.dumps(text)
