"""Turns Anthropic's requests to `/v1/messages` into plans, and results into its messages, whole and as events.

A request is translated into a chat completion and validated as one, so that both follow the same rules. What its model
cannot follow (thinking, effort) is named in the plan by this protocol's names.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WrapValidator, model_validator

from tinsmith.chat.calls import ToolCall
from tinsmith.chat.chats import ChatRequest, hide_reasoning
from tinsmith.chat.choices import Choice, CompletionDelta
from tinsmith.chat.generation_request import MAX_TOKENS, GenerationPlan, Stops
from tinsmith.chat.harmony import new_choice
from tinsmith.chat.results import ClientAnswer, Event, JsonObject, read_sequence, version_fields
from tinsmith.chat.schemas import normalize_schema
from tinsmith.chat.splicing import FindRecording
from tinsmith.chat.tokenizer import ModelTokenizer, find_channels, find_reasoning_tags
from tinsmith.chat.tools import drop_other_tool
from tinsmith.chat.vendor_fields import ChatOnlyFields
from tinsmith.errors import RequestError, TinsmithError, not_supported
from tinsmith.types import SampleResult, SamplingParams
from tinsmith.wire import fields
from tinsmith.wire.fields import (
    NO_EFFECT,
    ByType,
    ClosedBody,
    Ignored,
    Integer,
    LongText,
    OneOf,
    StrOr,
    Supported,
    advisory,
    refuse,
    validate,
    validation_error,
)

MIN_BUDGET = 1024  # Anthropic's minimum


# Requests.


class TextBlock(ClosedBody):
    type: Ignored = None
    text: LongText = ""
    cache_control: Annotated[Ignored, NO_EFFECT] = None
    citations: Annotated[Ignored, NO_EFFECT] = None

    @property
    def part(self) -> JsonObject:
        return {"type": "text", "text": self.text}


class ImageSource(ClosedBody):
    type: Annotated[
        fields.Text, Supported(("base64",), "this server fetches nothing; send the image's bytes as base64")
    ]
    media_type: fields.Text
    data: LongText


class ImageBlock(ClosedBody):
    type: Ignored = None
    source: ImageSource
    cache_control: Annotated[Ignored, NO_EFFECT] = None

    @property
    def part(self) -> JsonObject:
        url = f"data:{self.source.media_type};base64,{self.source.data}"
        return {"type": "image_url", "image_url": {"url": url}}


class ThinkingBlock(ClosedBody):
    type: Ignored = None
    thinking: LongText = ""
    signature: Ignored = None


class ToolUseBlock(ClosedBody):
    type: Ignored = None
    id: fields.Text
    name: fields.Text
    input: dict[str, Any]
    cache_control: Annotated[Ignored, NO_EFFECT] = None
    caller: Ignored = None


# Text, or blocks of text.
SystemPrompt = Annotated[str | list[Annotated[TextBlock, ByType({"text": TextBlock})]], StrOr()]


ResultBlock = Annotated[
    TextBlock | ImageBlock,
    ByType({"text": TextBlock, "image": ImageBlock}, {"tool_reference": "this server loads every tool; leave it out"}),
]


class ToolResultBlock(ClosedBody):
    type: Ignored = None
    tool_use_id: fields.Text
    content: Annotated[Annotated[str | list[ResultBlock], StrOr()], BeforeValidator(lambda content: content or "")] = ""
    is_error: Ignored = None
    cache_control: Annotated[Ignored, NO_EFFECT] = None

    @property
    def message(self) -> JsonObject:
        """Return the result as a separate message. A result with images keeps its parts."""
        content: object = self.content
        if not isinstance(self.content, str):
            texts = [block.text for block in self.content if isinstance(block, TextBlock)]
            content = "\n".join(texts) if len(texts) == len(self.content) else [block.part for block in self.content]
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


Block = TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
BLOCKS = {
    "text": TextBlock,
    "image": ImageBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "thinking": ThinkingBlock,
}
_VENDOR_ONLY = "only its vendor can read it; leave it out"
DROPPED_BLOCKS: Mapping[str, str] = dict.fromkeys(
    (
        "redacted_thinking",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "tool_search_tool_result",
        "container_upload",
    ),
    _VENDOR_ONLY,
)
BLOCKS_BY_ROLE: Mapping[str, tuple[type[Block], ...]] = {
    "user": (TextBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock),
    "system": (TextBlock,),
}


class Turn(ClosedBody):
    role: Annotated[str, OneOf(("user", "assistant", "system"))]
    content: Annotated[str | list[Annotated[Block, ByType(BLOCKS, DROPPED_BLOCKS)]], StrOr()]

    @model_validator(mode="after")
    def _check_blocks(self) -> Turn:
        for index, block in enumerate([] if isinstance(self.content, str) else self.content):
            if not isinstance(block, BLOCKS_BY_ROLE[self.role]):
                raise validation_error(f"has a {block.type} in content[{index}], which role {self.role} cannot have")
        return self

    def chat_messages(self) -> Iterator[JsonObject]:
        """Yield the turn's messages in order. Tool results become separate messages."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        reasoning_fields: JsonObject = {}
        parts: list[JsonObject] = []
        calls: list[JsonObject] = []
        for block in self.content:
            match block:
                case ToolResultBlock():
                    yield block.message
                case ToolUseBlock():
                    function = {"name": block.name, "arguments": json.dumps(block.input)}
                    calls.append({"id": block.id, "type": "function", "function": function})
                case ThinkingBlock():
                    reasoning_fields["reasoning_content"] = block.thinking
                case ImageBlock() | TextBlock():
                    parts.append(block.part)
        if parts or calls or reasoning_fields:
            content = {"role": self.role, "content": parts or ""}
            yield content | reasoning_fields | ({"tool_calls": calls} if calls else {})


def _join_texts(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class CustomTool(ClosedBody):
    name: fields.Text
    input_schema: dict[str, Any]
    description: Any = None
    strict: Any = None
    type: Ignored = None
    cache_control: Annotated[Ignored, NO_EFFECT] = None
    eager_input_streaming: Annotated[Ignored, NO_EFFECT] = None
    defer_loading: Annotated[Ignored, NO_EFFECT] = None
    allowed_callers: Annotated[Ignored, NO_EFFECT] = None
    input_examples: Annotated[Ignored, advisory("put the examples into the description")] = None

    def function(self) -> JsonObject:
        optional_fields = {"description": self.description, "strict": self.strict}
        set_fields = {name: value for name, value in optional_fields.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, "parameters": self.input_schema} | set_fields}


def _custom_tool(item: object, read: Callable[[object], CustomTool]) -> CustomTool:
    drop_other_tool(item, ("custom",))
    return read(item)


ToolsField = Annotated[
    list[Annotated[CustomTool, WrapValidator(_custom_tool)]], BeforeValidator(lambda tools: tools or [])
]


class ToolChoice(ClosedBody):
    type: Annotated[str, OneOf(("auto", "any", "tool", "none"))]
    name: fields.Text | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise validation_error("has no name; name the tool")
        return self


class ThinkingConfig(ClosedBody):
    type: Annotated[fields.Text, Supported(("enabled", "adaptive", "disabled"), "use enabled, adaptive or disabled")]
    budget_tokens: Annotated[Integer, Field(description=f"at least {MIN_BUDGET} and less than max_tokens")] | None = (
        None
    )

    @model_validator(mode="after")
    def _check_budget(self) -> ThinkingConfig:
        if self.type == "enabled" and (self.budget_tokens or 0) < MIN_BUDGET:
            raise validation_error(f"has budget_tokens {self.budget_tokens}; it must be at least {MIN_BUDGET}")
        return self


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    normalize_schema(schema, "output_config.format.schema")
    return schema


class OutputFormat(ClosedBody):
    type: Annotated[fields.Text, Supported(("json_schema",), "use 'json_schema'")]
    definition: Annotated[dict[str, Any], AfterValidator(_check_schema), Field(alias="schema")]


class OutputConfig(ClosedBody):
    format: OutputFormat | None = None
    effort: Annotated[str, OneOf(("low", "medium", "high", "xhigh", "max"))] | None = None


class CountRequest(ClosedBody):
    """A request that only counts the prompt's tokens."""

    ignores_zero = False

    model: Annotated[fields.Text, Field(description="a base model, or the tinker:// path of a checkpoint")]
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: SystemPrompt | None = None
    tools: ToolsField = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: Annotated[Ignored, NO_EFFECT] = None
    container: Annotated[Ignored, advisory("this server does not run code of models; leave it out")] = None
    mcp_servers: Annotated[Ignored, advisory("this server does not run tools; leave it out")] = None
    context_management: Annotated[Ignored, advisory("this server does not edit prompts; leave it out")] = None
    thread: Annotated[Ignored, advisory("this server keeps no threads; send all messages")] = None
    inference_geo: Annotated[Ignored, advisory("the only region is this server; leave it out")] = None
    speed: Annotated[Ignored, advisory("the only speed is the default; leave it out")] = None
    prefill: Annotated[Ignored, refuse("completions cannot be prefilled")] = None

    @model_validator(mode="after")
    def _check_end(self) -> CountRequest:
        if self.messages[-1].role == "assistant":
            raise not_supported("messages", "a prefilled completion; the last message must be the user's")
        return self

    def plan(self, tokenizer: ModelTokenizer, find_recording: FindRecording | None = None) -> GenerationPlan:
        """Plan the sampling and the response. Raises RequestError."""
        plan = validate(ChatRequest, self.chat(tokenizer)).plan(tokenizer, find_recording)
        ignored = {FIELD_NAMES.get(name, name): reason for name, reason in plan.ignored.items()}
        if self.thinking is not None and self.thinking.type == "adaptive" and not self._can_think(tokenizer):
            ignored["thinking"] = f"{_NO_TAGS}; leave it out"
        if self.output_config and self.output_config.effort == "max":
            ignored["output_config.effort"] = "'max'; no chat template has such a level; use 'xhigh'"
        return replace(plan, params=_soften_budget(plan.params), ignored=ignored)

    def chat(self, tokenizer: ModelTokenizer) -> JsonObject:
        """Return the body of the equivalent chat completion."""
        system = [] if self.system is None else [{"role": "system", "content": _join_texts(self.system)}]
        turns = [message for turn in self.messages for message in turn.chat_messages()]
        body: JsonObject = {"model": self.model, "messages": [*system, *turns]}
        body["tools"] = [tool.function() for tool in self.tools]
        if choice := self.tool_choice:
            body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
            function_choice = {"type": "function", "function": {"name": choice.name}}
            body["tool_choice"] = function_choice if choice.type == "tool" else choice.type.replace("any", "required")
        if self.output_config and (output_format := self.output_config.format):
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": output_format.definition}}
        return body | self._effort() | self._thinking(tokenizer)

    def _effort(self) -> JsonObject:
        effort = self.output_config and self.output_config.effort
        return {"reasoning_effort": effort} if effort and effort != "max" else {}

    def _can_think(self, tokenizer: ModelTokenizer) -> bool:
        return find_reasoning_tags(tokenizer) is not None or find_channels(tokenizer) is not None

    def _thinking(self, tokenizer: ModelTokenizer) -> JsonObject:
        """Return the field that separates reasoning into blocks if the request asks for it, or hides it."""
        if self.thinking is None or (self.thinking.type == "adaptive" and not self._can_think(tokenizer)):
            return {"separate_reasoning": False}
        thinks = self.thinking.type != "disabled"
        if thinks and not self._can_think(tokenizer):
            raise not_supported("thinking", f"{_NO_TAGS}; leave it out")
        name = tokenizer.template.thinking_switch
        switch = {} if name is None else {"chat_template_kwargs": {name: thinks}}
        budget = {"thinking_token_budget": self.thinking.budget_tokens} if self.thinking.type == "enabled" else {}
        return {"separate_reasoning": thinks, **switch, **budget}


def _soften_budget(params: SamplingParams) -> SamplingParams:
    """Return parameters whose budget of reasoning is a target, as this protocol defines `budget_tokens`."""
    if params.adjustments is None or params.adjustments.reasoning is None:
        return params
    reasoning = replace(params.adjustments.reasoning, is_advisory=True)
    return replace(params, adjustments=replace(params.adjustments, reasoning=reasoning))


_NO_TAGS = "this model has no tags for reasoning in template and tokenizer"
FIELD_NAMES = {
    "reasoning_effort": "output_config.effort",
    "messages[].reasoning_content": "messages[].content[].thinking",
}
"""This protocol's names of fields of a chat."""


class MessageRequest(ChatOnlyFields, CountRequest):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    stop_sequences: Stops | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Integer | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> MessageRequest:
        budget = self.thinking and self.thinking.type == "enabled" and self.thinking.budget_tokens
        if budget and budget >= self.max_tokens:
            path = "thinking.budget_tokens"
            raise RequestError(path, f"{path} is {budget}; it must be less than max_tokens")
        return self

    def chat(self, tokenizer: ModelTokenizer) -> JsonObject:
        own_fields = {name: getattr(self, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        return super().chat(tokenizer) | own_fields | {"stop": list(self.stop_sequences or ()) or None}

    def plan(self, tokenizer: ModelTokenizer, find_recording: FindRecording | None = None) -> GenerationPlan:
        plan = super().plan(tokenizer, find_recording)
        if self.thinking is None or self.thinking.type == "disabled" or "thinking" in plan.ignored:
            return hide_reasoning(plan, tokenizer)
        if plan.reasoning_tags is not None or plan.channels is not None:
            return plan
        reason = "together with output_config.format or a tool that must be called"
        if self.thinking.type == "enabled":
            raise not_supported("thinking", reason)
        return replace(hide_reasoning(plan, tokenizer), ignored={**plan.ignored, "thinking": reason})


# Responses.


class MessageAnswer(ClientAnswer):
    """A message. A stream has one open content block at a time."""

    keep_alive = "ping", {"type": "ping"}

    def __init__(self, plan: GenerationPlan, tokenizer: ModelTokenizer) -> None:
        super().__init__(plan, tokenizer)
        self._message_id = "msg_" + secrets.token_hex(12)
        self._block_index = 0  # the index of the open or next block
        self._open_type: object = None  # the type of the open block
        self._stop_fields: JsonObject = {}
        self._reasoning = 0

    def build_response(self, results: Sequence[SampleResult]) -> JsonObject:
        sequence = results[0].sequences[0]
        choice = new_choice(self.plan, self.tokenizer, 0)
        read_sequence(choice, sequence)
        self._reasoning = choice.reasoning_tokens
        completion = choice.take_delta()
        content = [_thinking_block(completion.reasoning)] if completion.reasoning else []
        content += [_text_block(part) if isinstance(part, str) else _call(part) for part in completion.parts]
        message = self._message(content, results) | _describe_stop(choice, sequence.stop_reason)
        return message | version_fields(results[0].weight_version)

    def start_events(self) -> Iterator[Event]:
        yield self._event("message_start", message=self._message([], ()))

    def delta_events(self, choice: Choice, delta: CompletionDelta, reason: str | None) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._open_block(_thinking_block(""))
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        for part in delta.parts:
            if isinstance(part, str):
                yield from self._open_block(_text_block(""))
                yield self._delta({"type": "text_delta", "text": part})
                continue
            yield from self._open_block(_call(part) | {"input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
            yield from self._close_block()
        if reason:
            self._reasoning = choice.reasoning_tokens
            self._stop_fields = _describe_stop(choice, reason)

    def end_events(self, results: Sequence[SampleResult]) -> Iterator[Event]:
        yield from self._close_block()
        versions = version_fields(results[0].weight_version)
        yield self._event("message_delta", delta=self._stop_fields, usage=self._usage(results), **versions)
        yield self._event("message_stop")

    def error_events(self, error: TinsmithError) -> Iterator[Event]:
        yield "error", anthropic_error(str(error), error.status)

    def _message(self, content: Sequence[JsonObject], results: Sequence[SampleResult]) -> JsonObject:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self.plan.name,
            "content": list(content),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(results),
        }

    def _usage(self, results: Sequence[SampleResult]) -> JsonObject:
        """Return the usage. Cached tokens are counted separately; their number is known only at the end."""
        cached = sum(result.prompt_cache_hit_tokens for result in results)
        return {
            "input_tokens": len(self.plan.prompts[0]) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": sum(len(result.sequences[0].tokens_T) for result in results),
            "output_tokens_details": {"thinking_tokens": self._reasoning},
        }

    def _open_block(self, block: JsonObject) -> Iterator[Event]:
        """Open a block, unless one of its type, which is not a call, is open."""
        if self._open_type != block["type"]:
            yield from self._close_block()
            self._open_type = block["type"]
            yield self._event("content_block_start", index=self._block_index, content_block=block)

    def _delta(self, delta: JsonObject) -> Event:
        return self._event("content_block_delta", index=self._block_index, delta=delta)

    def _close_block(self) -> Iterator[Event]:
        if self._open_type is not None:
            self._open_type = None
            self._block_index += 1
            yield self._event("content_block_stop", index=self._block_index - 1)

    @staticmethod
    def _event(kind: str, **event_fields: object) -> Event:
        return kind, {"type": kind, **event_fields}


def _describe_stop(choice: Choice, reason: str) -> JsonObject:
    """Return why a completion ended; `reason` is length, or any other."""
    if choice.num_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if choice.stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stopped_by}
    return {"stop_reason": "max_tokens" if reason == "length" else "end_turn", "stop_sequence": None}


def _thinking_block(reasoning: str) -> JsonObject:
    """Make a thinking block without a signature, since clients may send reasoning of any origin."""
    return {"type": "thinking", "thinking": reasoning, "signature": ""}


def _text_block(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def _call(call: ToolCall) -> JsonObject:
    call_id = "toolu_" + call.call_id.removeprefix("call_")
    return {"type": "tool_use", "id": call_id, "name": call.name, "input": json.loads(call.arguments)}


_ERROR_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


def anthropic_error(text: str, status: int) -> JsonObject:
    """Return Anthropic's error body."""
    default_type = "api_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return {"type": "error", "error": {"type": _ERROR_TYPES.get(status, default_type), "message": text}}
