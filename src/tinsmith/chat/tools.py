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
from typing import Annotated, Any

from pydantic import AfterValidator, WrapValidator

from tinsmith.chat.calls import CallAssembler
from tinsmith.chat.dialects import PARSERS
from tinsmith.chat.dialects.hermes import CLOSE, OPEN
from tinsmith.errors import RequestError, not_supported
from tinsmith.types import JSON_FORM, Grammar
from tinsmith.wire.fields import Body, Only, OrText, Text, show, wrong

MAX_TOOLS = 128
MAX_CALLS = 16
"""Most calls of a completion that must call tools; some models would never stop."""
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
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
    """The tools of a request; `choice` is auto, required or a tool's name."""

    tools: tuple[Tool, ...]
    choice: str
    named: bool
    parallel: bool
    form: str  # hermes | function_xml | llama | harmony
    marked: bool = True  # whether OPEN and CLOSE are single tokens

    def grammar(self) -> Grammar | None:
        """Return the grammar of a completion, or None if any text is allowed."""
        if self.choice == "auto":
            return self._strict_grammar() if any(tool.strict for tool in self.tools) else None
        if self.form == "function_xml":
            raise not_supported("tool_choice", "with this model's form of calls, other than 'auto' and 'none'")
        wanted = [tool for tool in self.tools if not self.named or tool.name == self.choice]
        if self.form == "llama":
            return Grammar("json_lark", _rules("start: call", wanted, _begun("parameters")))
        if self.form == "harmony":
            return Grammar("json_lark", _rules("start: call", wanted, _begun_in_harmony, end=""))
        call = f"{self._mark(OPEN)} {NEWLINE} call {NEWLINE} {self._mark(CLOSE)}"
        several = "" if self.named or not self.parallel else f" ({NEWLINE} one){{0,{MAX_CALLS - 1}}}"
        return Grammar("json_lark", _rules(f"start: one{several}\none: {call}", wanted, _begun("arguments")))

    def _strict_grammar(self) -> Grammar:
        if self.form != "hermes":
            unless = "" if self.form == "function_xml" else " unless tool_choice requires a call"
            raise not_supported("tools[].function.strict", f"with this model{unless}")
        again = "*" if self.parallel else "?"
        begin = f"begin: TEXT {OPEN}" if self.marked else f"begin[lazy]: TEXT {_quoted(OPEN)}"
        head = (
            f"start: tagged{again} last\nlast: TEXT\nTEXT: /(.|\\n)*/\n{begin}\n"
            f"tagged: begin {NEWLINE} call {NEWLINE} {self._mark(CLOSE)}"
        )
        return Grammar("lark", _rules(head, self.tools, _begun("arguments")))

    def _mark(self, mark: str) -> str:
        """Return a tag as grammars write it: a single token has no quotes."""
        return mark if self.marked else _quoted(mark)

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop string of a completion with at most one call. It is part of the call."""
        return self.closings if not self.parallel and self.choice == "auto" else ()

    @property
    def closings(self) -> tuple[str, ...]:
        """Return the strings that end a call; as stop strings of a request they are part of it."""
        return (CLOSE,) if self.form in ("hermes", "function_xml") else ()

    def new_assembler(self) -> CallAssembler:
        """Make the assembler of one completion. The harmony format takes the events of its messages."""
        schemas = {tool.name: tool.parameters for tool in self.tools}
        parser = PARSERS[self.form](schemas) if self.form in PARSERS else None
        return CallAssembler(schemas, parser)


def _check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise wrong(f"is {show(name)}; use 1 to 64 of a-z, A-Z, 0-9, _, - and .")
    return name


class FunctionBody(Body):
    name: Annotated[Text, AfterValidator(_check_name)]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Body):
    type: Annotated[Text, Only(("function",), "use 'function'")]
    function: FunctionBody


def _tool(item: dict[str, Any], read: Callable[[object], ToolBody]) -> Tool:
    function = read(item).function
    parameters = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
    return Tool(function.name, parameters, item, bool(function.strict))


class NamedFunction(Body):
    name: Text


class NamedTool(Body):
    type: Annotated[Text, Only(("function",), "use 'function'")]
    function: NamedFunction


GivenTool = Annotated[ToolBody, WrapValidator(_tool)]
ToolChoice = Annotated[str | NamedTool, OrText(("none", "auto", "required"))]


def read_tools(
    tools: Sequence[Tool], wanted: NamedTool | str | None, parallel: bool, template: str, marked: bool
) -> ToolUse | None:
    """Read a request's tools. Returns None if there are none, or if tool_choice excludes them."""
    named = isinstance(wanted, NamedTool)
    choice = wanted.function.name if isinstance(wanted, NamedTool) else wanted or "auto"
    if not tools:
        if named or choice == "required":
            raise RequestError("tool_choice", f"tool_choice is {show(choice)}, but tools is missing; send tools")
        return None
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError("tools", "two tools have the same name; use each name once")
    if choice == "none" and not named:
        return None
    if named and choice not in names:
        raise RequestError("tool_choice", f"tool_choice names {show(choice)}, which is not one of the tools")
    return ToolUse(tuple(tools), choice, named, parallel, _form(template), marked)


def _form(template: str) -> str:
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


def _begun(arguments: str) -> Callable[[str], str]:
    return lambda name: _quoted(f'{{"name": {json.dumps(name)}, "{arguments}": ')


def _begun_in_harmony(name: str) -> str:
    """A message to the tool on the channel "commentary"."""
    return f'<|channel|> {_quoted(f"commentary to=functions.{name} ")} <|constrain|> "json" <|message|>'


def _rules(head: str, tools: Sequence[Tool], begun: Callable[[str], str], end: str = ' "}"') -> str:
    """Return the rules of a call of one of the tools: what `begun` writes for its name, its arguments, and `end`."""
    calls = " | ".join(f"call_{index}" for index in range(len(tools)))
    lines = ["%llguidance {}", head, f"call: {calls}"]
    for index, tool in enumerate(tools):
        lines += [
            f"call_{index}: {begun(tool.name)} arguments_{index}{end}",
            f"arguments_{index}: %json {json.dumps(_arguments_schema(tool))}",
        ]
    return "\n".join(lines) + "\n"


def _arguments_schema(tool: Tool) -> dict[str, object]:
    return {"type": "object"} | dict(tool.parameters) | {"x-guidance": dict(JSON_FORM)}


def _quoted(text: str) -> str:
    return json.dumps(text)
