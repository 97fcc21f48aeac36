"""Tools: functions that a model may call, and what a request says about its calls.

The form of calls is a dialect of `chat.dialects`, which the model's chat template or the server's settings choose. Its
grammar enforces a required call, and arguments that match their schema (`strict`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import AfterValidator, Field, WrapValidator

from tinsmith.chat.calls import CallAssembler
from tinsmith.chat.dialects.dialect import CallRequest, Tool, ToolDialect
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.errors import RequestError
from tinsmith.types import Grammar
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


@dataclass(frozen=True, slots=True)
class MarkToken:
    """A mark of the dialect that is one token of the model. `is_special`: decoding without special tokens drops it.
    `is_separate`: grammars must write it as a token, since its text as other tokens is something else.
    """

    text: str
    token_id: int
    is_special: bool
    is_separate: bool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request; `choice` is auto, required or a tool's name. `answer_grammar` is the grammar of a
    completion that calls no tool.
    """

    tools: tuple[Tool, ...]
    choice: str
    is_named: bool
    parallel: bool
    dialect: ToolDialect
    marks: tuple[MarkToken, ...] = ()
    answer_grammar: Grammar | None = None

    def grammar(self) -> Grammar | None:
        """Return the grammar of a completion, or None if any text is allowed."""
        allows_text = self.is_auto and self.answer_grammar is None
        if allows_text and not any(tool.strict for tool in self.tools):
            return None
        request = CallRequest(
            tools=tuple(tool for tool in self.tools if not self.is_named or tool.name == self.choice),
            max_calls=1 if self.is_named or not self.parallel else MAX_CALLS,
            allows_text=allows_text,
            answer=self.answer_grammar if self.is_auto else None,
            mark_ids={mark.text: mark.token_id for mark in self.marks if mark.is_separate},
        )
        return self.dialect.form.write_grammar(request)

    @property
    def is_auto(self) -> bool:
        """Whether the model decides between a call and text."""
        return self.choice == "auto" and not self.is_named

    @property
    def ends_at_call(self) -> bool:
        """Whether the completion ends with its first call."""
        return not self.parallel and self.is_auto

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop string of a completion with at most one call. It is part of the call."""
        return self.closings if self.ends_at_call and not self.stop_tokens else ()

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Return the stop token of a completion with at most one call, if a special token ends calls."""
        if not self.ends_at_call:
            return ()
        return tuple(mark.token_id for mark in self.marks if mark.is_special and mark.text == self.dialect.closing)

    @property
    def closings(self) -> tuple[str, ...]:
        """Return the strings that end a call; as stop strings of a request they are part of it."""
        return (self.dialect.closing,) if self.dialect.closing else ()

    @property
    def shown_tokens(self) -> dict[int, str]:
        """Return the special tokens that are marks, with their texts, which the parser must see."""
        return {mark.token_id: mark.text for mark in self.marks if mark.is_special}

    def new_assembler(self) -> CallAssembler:
        """Make the assembler of one completion. The harmony format takes the events of its messages."""
        schemas = {tool.name: tool.parameters for tool in self.tools}
        parser = self.dialect.new_parser(schemas) if self.dialect.new_parser else None
        return CallAssembler(schemas, parser, 1 if self.ends_at_call else None)


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
    tokenizer: ModelTokenizer,
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
    dialect = tokenizer.tool_dialect
    marks = find_marks(dialect, tokenizer)
    return ToolUse(tuple(tools), choice, is_named, parallel, dialect, marks, answer_grammar)


def find_marks(dialect: ToolDialect, tokenizer: ModelTokenizer) -> tuple[MarkToken, ...]:
    """Return the marks of a dialect that are single tokens of a model."""
    marks: list[MarkToken] = []
    for text in dialect.marks:
        token_id = tokenizer.token_id(text)
        if token_id is None or not tokenizer.is_added(token_id):
            continue
        is_special = tokenizer.is_special(token_id)
        # llguidance takes added tokens in angle brackets for special ones.
        is_separate = is_special or (text.startswith("<") and text.endswith(">"))
        marks.append(MarkToken(text, token_id, is_special, is_separate))
    return tuple(marks)
