"""Turns OpenAI's requests to `/v1/responses` into plans, and results into its responses, whole and as events.

A request is translated into a chat completion and validated as one, so that both follow the same rules. The items of an
earlier response precede the request's own; the caller reads them from the store.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BeforeValidator, Field, WrapValidator, model_validator

from tinsmith.chat.calls import ToolCall
from tinsmith.chat.chats import ChatRequest
from tinsmith.chat.choices import Choice, CompletionDelta
from tinsmith.chat.generation_request import MAX_TOKENS, MAX_TOP_LOGPROBS, GenerationPlan
from tinsmith.chat.harmony import new_choice
from tinsmith.chat.results import ClientAnswer, Event, openai_error, read_sequence, version_fields
from tinsmith.chat.schemas import normalize_schema
from tinsmith.chat.splicing import FindRecording
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.chat.tools import MAX_TOOLS, drop_other_tool
from tinsmith.chat.vendor_fields import ChatOnlyFields
from tinsmith.errors import RequestError, TinsmithError, not_supported
from tinsmith.types import SampleResult
from tinsmith.wire import fields
from tinsmith.wire.fields import (
    NO_EFFECT,
    ByType,
    ClosedBody,
    Ignored,
    LongText,
    OneOf,
    StrOr,
    Supported,
    advice_error,
    advisory,
    printable_name,
    refuse,
    show,
    support_error,
    validate,
)

JsonObject = dict[str, Any]
MAX_ITEMS = 10_000
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
"""The valid names in `include`. Reasoning is never encrypted; its items contain the text."""


# Requests.


class InputText(ClosedBody):
    type: Ignored = None
    text: LongText
    annotations: Ignored = None
    logprobs: Ignored = None

    @property
    def part(self) -> JsonObject:
        return {"type": "text", "text": self.text}


def _check_url(url: str) -> str:
    if not url.lower().startswith("data:"):
        raise support_error(f"{show(url)}; this server fetches nothing; send the image as data:image/png;base64,...")
    return url


class InputImage(ClosedBody):
    type: Ignored = None
    image_url: Annotated[LongText, AfterValidator(_check_url)]
    detail: Annotated[Ignored, NO_EFFECT] = None  # an image is taken whole
    file_id: Annotated[Ignored, refuse("images of files are not read; send image_url as data:image/png;base64,...")] = (
        None
    )

    @property
    def part(self) -> JsonObject:
        return {"type": "image_url", "image_url": {"url": self.image_url}}


InputPart = InputText | InputImage
PARTS = {"input_text": InputText, "output_text": InputText, "text": InputText, "input_image": InputImage}
Content = Annotated[str | list[Annotated[InputPart, ByType(PARTS)]], StrOr()]


class MessageItem(ClosedBody):
    type: Ignored = None
    role: Annotated[str, OneOf(("user", "assistant", "system", "developer"))]
    content: Content
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class CallItem(ClosedBody):
    type: Ignored = None
    call_id: fields.Text
    name: fields.Text
    namespace: fields.Text | None = None
    arguments: LongText
    id: Ignored = None
    status: Ignored = None


class CallOutputItem(ClosedBody):
    type: Ignored = None
    call_id: fields.Text
    output: Content
    id: Ignored = None
    status: Ignored = None


class ReasoningItem(ClosedBody):
    type: Ignored = None
    content: list[dict[str, Any]] | None = None
    summary: Ignored = None
    encrypted_content: Annotated[Ignored, NO_EFFECT] = None
    id: Ignored = None
    status: Ignored = None


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem
ITEMS = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}
_VENDOR_RUNS_IT = "only its vendor runs this tool; leave it out"
_VENDOR_CALLS = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_list_tools",
)
DROPPED_ITEMS: Mapping[str, str] = dict.fromkeys(
    (*_VENDOR_CALLS, "mcp_call", "tool_search_call", "tool_search_output"), _VENDOR_RUNS_IT
)


def _add_item_types(items: object) -> object:
    """Add the type to the short form of a message."""
    if not isinstance(items, list):
        return items
    return [{"type": "message", **item} if isinstance(item, dict) else item for item in items]


Items = Annotated[list[Annotated[Item, ByType(ITEMS, DROPPED_ITEMS)]], Field(min_length=1, max_length=MAX_ITEMS)]


class FunctionTool(ClosedBody):
    type: Ignored = "function"
    name: fields.Text
    description: fields.LongText | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Annotated[Ignored, NO_EFFECT] = None

    def chat(self, name: str) -> JsonObject:
        optional_fields = {field: getattr(self, field) for field in ("description", "parameters", "strict")}
        function = {"name": name} | {field: value for field, value in optional_fields.items() if value is not None}
        return {"type": "function", "function": function}


def _read_tool(item: object, read: Callable[[object], Any]) -> object:
    drop_other_tool(item, ("function", "namespace"))
    return read(item)


def _read_function(item: object, read: Callable[[object], Any]) -> object:
    drop_other_tool(item, ("function",))
    return read(item)


class NamespaceTool(ClosedBody):
    """Functions under a common name. The model sees `namespace.name`, and its calls have both names."""

    type: Ignored = "namespace"
    name: fields.Text
    description: Ignored = None
    tools: list[Annotated[FunctionTool, WrapValidator(_read_function)]] = Field(default_factory=list)


ToolField = Annotated[
    Annotated[FunctionTool | NamespaceTool, ByType({"function": FunctionTool, "namespace": NamespaceTool})],
    WrapValidator(_read_tool),
]


class ResponseFunction(ClosedBody):
    type: Annotated[fields.Text, Supported(("function",), "use 'function'")]
    name: fields.Text
    namespace: fields.Text | None = None

    def chat(self) -> JsonObject:
        return {"type": "function", "function": {"name": _full_name(self.namespace, self.name)}}


class AllowedFunctions(ClosedBody):
    type: Ignored = "allowed_tools"
    mode: Annotated[str, OneOf(("auto", "required"))]
    tools: Annotated[list[ResponseFunction], Field(min_length=1)]

    def chat(self) -> JsonObject:
        allowed_tools = {"mode": self.mode, "tools": [tool.chat() for tool in self.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed_tools}


FunctionChoice = Annotated[
    ResponseFunction | AllowedFunctions, ByType({"function": ResponseFunction, "allowed_tools": AllowedFunctions})
]


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    normalize_schema(schema, "text.format.schema")
    return schema


class TextFormat(ClosedBody):
    type: Annotated[fields.Text, Supported(("text", "json_object", "json_schema"), "use one of these three")]
    name: fields.Text | None = None
    definition: Annotated[Annotated[dict[str, Any], AfterValidator(_check_schema)] | None, Field(alias="schema")] = None
    description: Ignored = None
    strict: Ignored = None


class TextConfig(ClosedBody):
    format: TextFormat | None = None
    verbosity: Annotated[str, OneOf(("low", "medium", "high"))] | None = None


class Reasoning(ClosedBody):
    effort: fields.Text | None = None
    summary: Annotated[Ignored, NO_EFFECT] = None
    generate_summary: Annotated[Ignored, NO_EFFECT] = None


def _check_included(name: str) -> str:
    if name not in INCLUDABLE:
        raise advice_error(f"{show(name)}; use {', '.join(INCLUDABLE)}", f"[{printable_name(name)}]")
    return name


class ResponseRequest(ChatOnlyFields):
    ignores_zero = False

    model: Annotated[fields.Text, Field(description="a base model, or the tinker:// path of a checkpoint")]
    input: Annotated[str | Items, StrOr(), BeforeValidator(_add_item_types)]
    instructions: LongText | None = None
    previous_response_id: fields.Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[Annotated[fields.Text, AfterValidator(_check_included)]] = Field(default_factory=list)
    tools: Annotated[list[ToolField], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Annotated[str | FunctionChoice, StrOr(("none", "auto", "required"))] | None = None
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream: bool = False
    stream_options: Annotated[Ignored, NO_EFFECT] = None
    store: bool = True
    background: bool = False
    truncation: Annotated[fields.Text, Supported(("disabled",), "prompts are not truncated")] = "disabled"
    metadata: dict[str, fields.Text] | None = None
    client_metadata: Annotated[Ignored, NO_EFFECT] = None
    max_tool_calls: Annotated[Ignored, NO_EFFECT] = None  # it limits the vendor's tools
    context_management: Annotated[Ignored, advisory("this server does not edit prompts; leave it out")] = None
    max_tokens: Annotated[Ignored, refuse("send max_output_tokens")] = None
    max_completion_tokens: Annotated[Ignored, refuse("send max_output_tokens")] = None
    stop_sequences: Annotated[Ignored, refuse("send it to /v1/chat/completions")] = None
    conversation: Annotated[Ignored, refuse("send previous_response_id, or all items")] = None
    prompt: Annotated[Ignored, refuse("this server stores no prompts; send input")] = None
    messages: Annotated[Ignored, refuse("send input")] = None

    @model_validator(mode="after")
    def _check_background(self) -> ResponseRequest:
        if self.background and (self.stream or not self.store):
            raise not_supported("background", "together with stream or store=false; poll the stored response")
        return self

    def items(self) -> list[JsonObject]:
        """Return the input in the form in which a later response reads it."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return [item.model_dump(exclude_none=True) for item in self.input]

    def chat(self, earlier_items: Sequence[JsonObject] = ()) -> JsonObject:
        """Return the body of the equivalent chat completion, after the items of earlier responses."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        body: JsonObject = {
            "model": self.model,
            "messages": [*system, *_messages([*earlier_items, *self.items()])],
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [tool.chat(_full_name(*names)) for names, tool in self._functions()],
            "parallel_tool_calls": self.parallel_tool_calls,
            "stream": self.stream,
            "logprobs": LOGPROBS in self.include or self.top_logprobs is not None,
            "top_logprobs": self.top_logprobs or 0,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "verbosity": self.text and self.text.verbosity,
            "tool_choice": self.tool_choice if isinstance(self.tool_choice, str | None) else self.tool_choice.chat(),
        }
        if self.text and (text_format := self.text.format):
            schema = {"json_schema": {"schema": text_format.definition}} if text_format.type == "json_schema" else {}
            body["response_format"] = {"type": text_format.type, **schema}
        return body

    def plan(
        self,
        tokenizer: ModelTokenizer,
        earlier_items: Sequence[JsonObject] = (),
        find_recording: FindRecording | None = None,
    ) -> GenerationPlan:
        """Plan the sampling and the response. Raises RequestError."""
        body = self.chat(earlier_items)
        if tokenizer.vision is None and any(isinstance(message["content"], list) for message in body["messages"]):
            raise not_supported("input", "an input_image: this model takes text only; leave it out")
        plan = validate(ChatRequest, body).plan(tokenizer, find_recording)
        return replace(plan, ignored={FIELD_NAMES.get(name, name): reason for name, reason in plan.ignored.items()})

    def name_fields(self, name: str) -> JsonObject:
        """Return a called function's name, and its namespace if it has one."""
        for (namespace, function), _ in self._functions():
            if namespace is not None and _full_name(namespace, function) == name:
                return {"name": function, "namespace": namespace}
        return {"name": name}

    def _functions(self) -> Iterator[tuple[tuple[str | None, str], FunctionTool]]:
        """Yield every function with its namespace and name."""
        for tool in self.tools:
            if isinstance(tool, NamespaceTool):
                yield from (((tool.name, inner.name), inner) for inner in tool.tools)
            else:
                yield (None, tool.name), tool


FIELD_NAMES = {
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "messages[].reasoning_content": "input[].content",
}
"""This protocol's names of fields of a chat."""


def _full_name(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}.{name}"


def _messages(items: Sequence[JsonObject]) -> list[JsonObject]:
    """Convert items to messages of a chat. Reasoning and calls become parts of one assistant message."""
    messages: list[JsonObject] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _join_content(item["output"])})
            continue
        role = item["role"] if kind == "message" else "assistant"
        last = messages[-1] if messages else {}
        has_content = kind == "message" and bool(last.get("content")) and "tool_calls" not in last
        joins_last = role == "assistant" and last.get("role") == "assistant" and not has_content
        if not joins_last or (kind == "reasoning" and (last["content"] or "tool_calls" in last)):
            messages.append(last := {"role": role, "content": ""})
        if kind == "message":
            last["content"] = _append_content(last["content"], _join_content(item["content"]))
        elif kind == "reasoning":
            if reasoning := "".join(part.get("text", "") for part in item.get("content") or ()):
                last["reasoning_content"] = reasoning
        else:
            name = _full_name(item.get("namespace"), item["name"])
            function = {"name": name, "arguments": item["arguments"]}
            last.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    return messages


def _join_content(content: str | Sequence[JsonObject]) -> str | list[JsonObject]:
    """Return the text of an item, or the parts of a chat's message if it has images."""
    if isinstance(content, str):
        return content
    if all("text" in part for part in content):
        return "\n".join(part["text"] for part in content)
    kinds = (InputImage if "image_url" in part else InputText for part in content)
    return [kind.model_construct(None, **part).part for kind, part in zip(kinds, content, strict=True)]


def _append_content(content: str, addition: str | list[JsonObject]) -> str | list[JsonObject]:
    """Return the content of a message to which an item is joined."""
    if isinstance(addition, str):
        return "\n".join(filter(None, (content, addition)))
    return [{"type": "text", "text": content}, *addition] if content else addition


# Responses.


class ResponseAnswer(ClientAnswer):
    """A response under construction: its items and its events."""

    def __init__(
        self,
        request: ResponseRequest,
        plan: GenerationPlan,
        tokenizer: ModelTokenizer,
        response_id: str = "",
        created_at: float | None = None,
        on_end: Callable[[JsonObject], JsonObject] = lambda body: body,
    ) -> None:
        """`on_end` is called with the body of the ended response, and returns the body to send."""
        super().__init__(plan, tokenizer)
        self.response_id = response_id or "resp_" + secrets.token_hex(24)
        self._created_at = int(time.time() if created_at is None else created_at)
        self._request = request
        self._on_end = on_end
        self._output: list[JsonObject] = []
        self._reasoning = 0
        self._sequence_number = 0

    def build_response(self, results: Sequence[SampleResult]) -> JsonObject:
        choice = new_choice(self.plan, self.tokenizer, 0)
        read_sequence(choice, results[0].sequences[0])
        for _ in (*self.delta_events(choice, choice.take_delta(), None), *self._close_item()):
            pass
        return self._on_end(self._build_final_body(results[0]))

    def start_events(self) -> Iterator[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self.body("in_progress"))

    def delta_events(self, choice: Choice, delta: CompletionDelta, reason: str | None) -> Iterator[Event]:
        self._reasoning = choice.reasoning_tokens
        if delta.reasoning:
            yield from self._delta("reasoning", "response.reasoning_text", delta.reasoning, [])
        logprobs = [] if self.plan.top_logprobs is None else self.token_logprobs(delta.tokens)
        for part in delta.parts:
            if isinstance(part, str):
                yield from self._delta("message", "response.output_text", part, logprobs)
                logprobs = []
            else:
                yield from self._close_item()
                yield from self._add_call(part)

    def end_events(self, results: Sequence[SampleResult]) -> Iterator[Event]:
        yield from self._close_item()
        body = self._on_end(self._build_final_body(results[0]))
        yield self._event(f"response.{body['status']}", response=body)

    def error_events(self, error: TinsmithError) -> Iterator[Event]:
        body = self.build_failure(error)
        self._on_end(body)
        yield self._event("response.failed", response=body)

    def build_failure(self, error: TinsmithError) -> JsonObject:
        """Return the body of the failed response."""
        error_fields = openai_error(str(error), error.status, error)
        return self.body("failed", {"code": error_fields["code"] or "server_error", "message": error_fields["message"]})

    def body(self, status: str, error: JsonObject | None = None) -> JsonObject:
        request = self._request
        is_incomplete = status == "incomplete"
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": request.background,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": request.model,
            "output": self._output,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "store": request.store,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}} if request.text is None else _dump_body(request.text),
            "tool_choice": _dump_body(request.tool_choice) if request.tool_choice else "auto",
            "tools": [_dump_body(tool) for tool in request.tools],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": request.metadata or {},
        }

    def _build_final_body(self, result: SampleResult) -> JsonObject:
        status = "incomplete" if result.sequences[0].stop_reason == "length" else "completed"
        num_input, num_output = len(self.plan.prompts[0]), sum(len(sequence.tokens_T) for sequence in result.sequences)
        usage = {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": result.prompt_cache_hit_tokens},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._reasoning},
            "total_tokens": num_input + num_output,
        }
        return self.body(status) | {"usage": usage} | version_fields(result.weight_version)

    def _event(self, kind: str, **event_fields: object) -> Event:
        self._sequence_number += 1
        return kind, {"type": kind, "sequence_number": self._sequence_number - 1, **event_fields}

    def _close_item(self) -> Iterator[Event]:
        """Yield the events that end the open item."""
        if not self._output or self._output[-1]["status"] != "in_progress":
            return
        item, location = self._output[-1], self._location
        part = item["content"][0]
        kind = "response.output_text" if item["type"] == "message" else "response.reasoning_text"
        logprobs = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        yield self._event(f"{kind}.done", **location, text=part["text"], **logprobs)
        yield self._event("response.content_part.done", **location, part=part)
        item["status"] = "completed"
        yield self._event("response.output_item.done", output_index=location["output_index"], item=item)

    @property
    def _location(self) -> JsonObject:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}

    def _delta(self, item_type: str, kind: str, text: str, logprobs: list[JsonObject]) -> Iterator[Event]:
        if not self._output or self._output[-1]["type"] != item_type or self._output[-1]["status"] != "in_progress":
            yield from self._close_item()
            yield from self._open_item(item_type)
        part = self._output[-1]["content"][0]
        part["text"] += text
        logprob_fields: JsonObject = {}
        if item_type == "message":
            part["logprobs"] += logprobs
            logprob_fields = {"logprobs": logprobs}
        yield self._event(f"{kind}.delta", **self._location, delta=text, **logprob_fields)

    def _open_item(self, item_type: str) -> Iterator[Event]:
        item: JsonObject = {"id": self._item_id("msg" if item_type == "message" else "rs"), "type": item_type}
        if item_type == "message":
            part: JsonObject = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item |= {"role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item |= {"summary": []}
        item |= {"status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=len(self._output), item=dict(item))
        self._output.append(item)
        yield self._event("response.content_part.added", **self._location, part=dict(part))
        item["content"] = [part]

    def _add_call(self, call: ToolCall) -> Iterator[Event]:
        item: JsonObject = {
            "id": self._item_id("fc"),
            "type": "function_call",
            "call_id": self._item_id("call"),  # the same on every server that builds this response
            **self._request.name_fields(call.name),
            "arguments": call.arguments,
            "status": "completed",
        }
        started_item = item | {"arguments": "", "status": "in_progress"}
        location = {"item_id": item["id"], "output_index": len(self._output)}
        yield self._event("response.output_item.added", output_index=len(self._output), item=started_item)
        yield self._event("response.function_call_arguments.delta", **location, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **location, name=call.name, arguments=call.arguments)
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self.response_id.removeprefix('resp_')}{len(self._output):02d}"


def _dump_body(body: object) -> Any:  # noqa: ANN401  JSON
    return body.model_dump(by_alias=True, exclude_none=True) if isinstance(body, ClosedBody) else body


def items_after(request: ResponseRequest, earlier_items: Sequence[JsonObject], body: JsonObject) -> list[JsonObject]:
    """Return the conversation after a response: earlier items, its input and its output."""
    return [*earlier_items, *request.items(), *cast("list[JsonObject]", body["output"])]


def refuse_in_batch(request: ResponseRequest) -> None:
    """Raise RequestError for fields that a line of a batch file cannot have."""
    if request.previous_response_id is not None or request.background:
        name = "background" if request.background else "previous_response_id"
        raise RequestError(name, f"{name} is not possible in a line of a file; leave it out")
