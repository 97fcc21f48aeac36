"""`/chat/completions`: a request -> a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from tinsmith.chat.generation_request import (
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    GenerationRequest,
    Plan,
    bounded,
)
from tinsmith.chat.texts import Text, thinking_of
from tinsmith.chat.tools import MAX_TOOLS, OPEN, GivenTool, ToolChoice, ToolUse, read_tools
from tinsmith.errors import RequestError, not_supported
from tinsmith.types import Grammar, SamplingParams
from tinsmith.wire import fields
from tinsmith.wire.fields import Body, ClosedBody, LongText, OneOf, Only, OrText, Unread, refused, show, wrong

MAX_MESSAGES = 10_000


def _arguments(given: str) -> dict[str, Any]:
    try:
        arguments = json.loads(given or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise wrong(f"is {show(given)}; it must be a JSON object")
    return arguments


class CalledFunction(Body):
    name: fields.Text
    arguments: Annotated[LongText, AfterValidator(_arguments)] = Field("", validate_default=True)


class Call(Body):
    function: CalledFunction
    id: Unread = None


class Part(Body):
    type: Annotated[fields.Text, Only(("text",), "models here read text only")]
    text: LongText = ""


class ChatMessage(ClosedBody):
    role: Annotated[str, OneOf(("system", "developer", "user", "assistant", "tool"))]
    content: Annotated[str | list[Part], OrText()] | None = None
    name: LongText | None = None
    tool_call_id: LongText | None = None
    reasoning_content: LongText | None = None
    tool_calls: list[Call] | None = None
    refusal: Annotated[Unread, refused("put what was said into content")] = None
    audio: Annotated[Unread, refused("models here know text only")] = None
    function_call: Annotated[Unread, refused("send tool_calls")] = None

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise wrong("has no content; only an assistant's message may be without")
        return self

    def shown(self, template: str) -> Mapping[str, object]:
        """The message for a chat template: arguments of calls as objects, parts of a text on lines of their own."""
        role = "system" if self.role == "developer" and "developer" not in template else self.role
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        named = {name: getattr(self, name) for name in ("name", "tool_call_id", "reasoning_content")}
        message: dict[str, object] = {"role": role, "content": text}
        message |= {name: value for name, value in named.items() if value is not None}
        if self.tool_calls is not None:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": dict(call.function)} for call in self.tool_calls
            ]
        return message


class ChatRequest(GenerationRequest):
    """`separate_reasoning` is SGLang's, `chat_template_kwargs` vLLM's."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    tools: Annotated[list[GivenTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    separate_reasoning: bool = True
    functions: Annotated[Unread, refused("an older form; send tools")] = None
    function_call: Annotated[Unread, refused("an older form; send tool_choice")] = None
    audio: Annotated[Unread, refused("models here write text only")] = None
    modalities: Annotated[Unread, refused("models here write text only; leave it out", unless=["text"])] = None
    prediction: Annotated[Unread, refused("answers are sampled one token at a time")] = None
    reasoning_effort: Annotated[
        Unread, refused("say it in chat_template_kwargs, in the words of the model's own template")
    ] = None
    verbosity: Annotated[Unread, refused("models here have no such switch")] = None
    web_search_options: Annotated[Unread, refused("this server fetches nothing")] = None
    moderation: Annotated[Unread, refused("this server judges no content")] = None

    @model_validator(mode="after")
    def _check_limits(self) -> ChatRequest:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise RequestError("max_tokens", f"max_tokens is {old} and max_completion_tokens {new}; send one of them")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs", f"top_logprobs is {self.top_logprobs}, but logprobs is not true")
        return self

    def plan(self, text: Text) -> Plan:
        """Raises RequestError."""
        template = text.template.source
        definitions: Any = self.tools
        tools = read_tools(definitions, self.tool_choice, self.parallel_tool_calls, template, text.has_token(OPEN))
        shown = [tool.definition for tool in tools.tools] if tools else None
        prompt = text.chat([each.shown(template) for each in self.messages], shown, self.chat_template_kwargs)
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        params = self.params(max_tokens, _one_grammar(self.asked_grammar, tools), tools.stops if tools else ())
        return Plan(
            name=self.model,
            prompts=(prompt,),
            num_choices=self.n,
            params=params,
            top_logprobs=self.top_logprobs if self.logprobs else None,
            stream=self.stream,
            include_usage=self.include_usage,
            tools=tools,
            thinking=thinking_of(text, prompt) if self.separate_reasoning and may_think(params, tools) else None,
        )


def may_think(params: SamplingParams, tools: ToolUse | None) -> bool:
    """Whether an answer may think: not if a grammar constrains it from its first token."""
    held = params.adjustments is not None and params.adjustments.grammar is not None
    return not held or (tools is not None and tools.choice == "auto")


def _one_grammar(wanted: Grammar | None, tools: ToolUse | None) -> Grammar | None:
    """An answer follows one grammar at most."""
    called = tools.grammar() if tools else None
    if wanted and tools:
        raise not_supported("response_format", "together with tools; set tool_choice to 'none', or leave one out")
    return bounded(called) if called else wanted
