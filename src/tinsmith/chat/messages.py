"""`/v1/messages`: Anthropic's requests -> plans, and results -> its messages, whole and as events.

A request is put into the words of a chat completion and read as one, so that both are judged by the same rules. What
has no counterpart there is refused here, by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tinsmith.chat.chats import may_think, read_chat
from tinsmith.chat.choices import Choice, Piece
from tinsmith.chat.generation_request import Plan, read_within
from tinsmith.chat.refusals import RequestError, not_supported, refuse_unknown
from tinsmith.chat.results import read_sequence
from tinsmith.chat.texts import SWITCH, Text, marks_of, thinking_of
from tinsmith.chat.tools import ToolCall
from tinsmith.types import SampleResult
from tinsmith.wire.fields import Fields, show

JsonObject = dict[str, object]
Event = tuple[str, JsonObject]

COUNTED = frozenset(
    ["model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control"]
)
KNOWN = COUNTED | frozenset(
    ["max_tokens", "metadata", "service_tier", "stop_sequences", "stream", "temperature", "top_k", "top_p"]
)
REASONS = {
    "container": "this server runs no code of a model's",
    "mcp_servers": "this server calls no tools itself",
    "inference_geo": "there is one place, where this server is",
    "speed": "there is one speed",
    "prefill": "an answer begins with its first token",
}
BLOCK_FIELDS = {
    "text": frozenset(["type", "text", "cache_control", "citations"]),
    "tool_use": frozenset(["type", "id", "name", "input", "cache_control", "caller"]),
    "tool_result": frozenset(["type", "tool_use_id", "content", "is_error", "cache_control"]),
    "thinking": frozenset(["type", "thinking", "signature"]),
}
THINKING_FIELDS = {
    "enabled": frozenset(["type", "budget_tokens"]),
    "adaptive": frozenset(["type"]),
    "disabled": frozenset(["type"]),
}
MIN_BUDGET = 1024  # Anthropic's
MAX_TEXT = 2**31


def read_message(fields: Fields, text: Text) -> Plan:
    """Raises RequestError."""
    refuse_unknown(fields, KNOWN, REASONS)
    if not fields.has("max_tokens"):
        raise RequestError("max_tokens", "max_tokens is missing")
    if fields.text_or("service_tier", "auto") not in ("auto", "standard_only"):
        raise not_supported("service_tier", "there is one tier, 'standard_only'")
    body = _chat(fields, text) | {"max_tokens": fields.integer("max_tokens"), "stream": fields.flag_or("stream", False)}
    read_within(fields, "temperature", 0.0, 1.0, 1.0)
    for name in ("temperature", "top_p", "top_k"):
        if fields.has(name):
            body[name] = fields.values[name]
    if fields.has("stop_sequences"):
        body["stop"] = fields.values["stop_sequences"]
    plan = read_chat(Fields(body), text)
    if body["separate_reasoning"]:
        if plan.thinking is None:
            raise not_supported("thinking", "together with output_config.format or a tool that must be called")
        return plan
    hidden = marks_of(text, plan.prompts[0]) if may_think(plan.params, plan.tools) else None
    return replace(plan, hidden=hidden)


def read_counted(fields: Fields, text: Text) -> Plan:
    """A request whose prompt is only to be counted."""
    refuse_unknown(fields, COUNTED, REASONS)
    return read_chat(Fields(_chat(fields, text)), text)


def _chat(fields: Fields, text: Text) -> JsonObject:
    messages: list[object] = []
    if fields.has("system"):
        messages.append({"role": "system", "content": _text(fields.values["system"], "system")})
    items = fields.values.get("messages")
    if not isinstance(items, list) or not items:
        raise RequestError("messages", "messages must be a list of at least one message")
    for index, item in enumerate(items):
        messages += _message(item, f"messages[{index}]")
    if isinstance(items[-1], dict) and items[-1].get("role") == "assistant":
        raise not_supported("messages", "an answer that is begun already; the last message must be the user's")
    body: JsonObject = {"model": fields.text("model"), "messages": messages}
    return body | _tools(fields) | _format(fields) | _thinking(fields, text)


def _thinking(fields: Fields, text: Text) -> JsonObject:
    """Thoughts come as blocks of their own if they are asked for; otherwise they are left out of the answer."""
    wanted = fields.fields_or("thinking", None)
    if wanted is None:
        return {"separate_reasoning": False}
    kind = wanted.text("type")
    if kind not in THINKING_FIELDS:
        raise not_supported("thinking.type", f"{show(kind)}; known are {', '.join(THINKING_FIELDS)}")
    refuse_unknown(wanted, THINKING_FIELDS[kind], {})
    thinks = kind != "disabled"
    if thinks and thinking_of(text) is None:
        raise not_supported("thinking", "this model's chat template and tokenizer mark no thoughts; leave it out")
    most = fields.integer_or("max_tokens", None) or MAX_TEXT
    if kind == "enabled" and not MIN_BUDGET <= wanted.integer("budget_tokens") < most:
        raise RequestError("thinking", f"thinking.budget_tokens must be at least {MIN_BUDGET} and less than max_tokens")
    body: JsonObject = {"separate_reasoning": thinks}
    return body | ({"chat_template_kwargs": {SWITCH: thinks}} if SWITCH in text.template.source else {})


def _message(item: object, where: str) -> Iterator[JsonObject]:
    """What a turn holds, in order: results of tools become messages of their own."""
    if not isinstance(item, dict):
        raise RequestError("messages", f"{where} is {show(item)}; it must be an object")
    fields = Fields(item, f"{where}.")
    refuse_unknown(fields, frozenset(["role", "content"]), {})
    role = fields.text("role")
    if role not in ("user", "assistant"):
        raise RequestError("messages", f"{where}.role is {show(role)}; it must be user or assistant")
    content = item.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise RequestError("messages", f"{where}.content is {show(content)}; it must be a text or a list of blocks")
    said: dict[str, object] = {}
    texts: list[str] = []
    calls: list[object] = []
    for index, block in enumerate(content):
        kind, found = _block(block, f"{where}.content[{index}]")
        if kind == "tool_result" and role == "user":
            yield found
        elif kind == "tool_use" and role == "assistant":
            calls.append(found)
        elif kind == "thinking" and role == "assistant":
            said["reasoning_content"] = found["text"]
        elif kind == "text":
            texts.append(str(found["text"]))
        else:
            raise RequestError("messages", f"{where}.content[{index}] is a {kind}, which a {role} does not write")
    if texts or calls or said:
        yield {"role": role, "content": "\n".join(texts)} | said | ({"tool_calls": calls} if calls else {})


def _block(block: object, where: str) -> tuple[str, JsonObject]:
    if not isinstance(block, dict):
        raise RequestError("messages", f"{where} is {show(block)}; it must be an object with a type")
    fields = Fields(block, f"{where}.")
    kind = fields.text("type")
    if kind not in BLOCK_FIELDS:
        raise not_supported(f"{where}.type", f"{show(kind)}; known are {', '.join(BLOCK_FIELDS)}")
    refuse_unknown(fields, BLOCK_FIELDS[kind], {})
    if kind == "tool_use":
        function = {"name": fields.text("name"), "arguments": json.dumps(fields.fields("input").values)}
        return kind, {"id": fields.text("id"), "type": "function", "function": function}
    if kind == "tool_result":
        content = _text(block.get("content") or "", fields.path("content"))
        return kind, {"role": "tool", "tool_call_id": fields.text("tool_use_id"), "content": content}
    return kind, {"text": fields.text_or(kind, "", max_length=MAX_TEXT)}


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(where, f"{where} is {show(content)}; it must be a text or a list of text blocks")
    blocks = [_block(block, f"{where}[{index}]") for index, block in enumerate(content)]
    if any(kind != "text" for kind, _ in blocks):
        raise not_supported(where, "models here read text only")
    return "\n".join(str(found["text"]) for _, found in blocks)


def _tools(fields: Fields) -> JsonObject:
    items = fields.values.get("tools") or []
    if not isinstance(items, list):
        raise RequestError("tools", f"tools is {show(items)}; it must be a list")
    body: JsonObject = {"tools": [_tool(item, f"tools[{index}]") for index, item in enumerate(items)]}
    choice = fields.fields_or("tool_choice", None)
    if choice is None:
        return body
    body["parallel_tool_calls"] = not choice.flag_or("disable_parallel_tool_use", False)
    kind = choice.text("type")
    if kind == "tool":
        body["tool_choice"] = {"type": "function", "function": {"name": choice.text("name")}}
    elif kind in ("auto", "any", "none"):
        body["tool_choice"] = "required" if kind == "any" else kind
    else:
        raise RequestError("tool_choice", f"tool_choice.type is {show(kind)}; use auto, any, tool or none")
    return body


def _tool(item: object, where: str) -> JsonObject:
    if not isinstance(item, dict):
        raise RequestError("tools", f"{where} is {show(item)}; it must be an object")
    fields = Fields(item, f"{where}.")
    if fields.text_or("type", "custom") != "custom":
        raise not_supported(f"{where}.type", "this server calls no tools itself; describe one of your own")
    refuse_unknown(fields, frozenset(["type", "name", "description", "input_schema", "strict", "cache_control"]), {})
    function = {"name": fields.text("name"), "parameters": fields.fields("input_schema").values}
    for name in ("description", "strict"):
        if fields.has(name):
            function[name] = fields.values[name]
    return {"type": "function", "function": function}


def _format(fields: Fields) -> JsonObject:
    config = fields.fields_or("output_config", None)
    if config is None:
        return {}
    refuse_unknown(config, frozenset(["format"]), {"effort": "a model thinks as its chat template has it"})
    wanted = config.fields_or("format", None)
    if wanted is None:
        return {}
    if wanted.text("type") != "json_schema":
        raise not_supported("output_config.format.type", "only 'json_schema' is known")
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": wanted.fields("schema").values}}}


# Answers.


def usage(plan: Plan, result: SampleResult | None, num_sampled: int) -> JsonObject:
    """What was found in the cache counts apart. Before the end nothing is known of it."""
    cached = result.prompt_cache_hit_tokens if result else 0
    return {
        "input_tokens": len(plan.prompts[0]) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": num_sampled,
    }


def message(message_id: str, plan: Plan, content: Sequence[JsonObject], used: JsonObject) -> JsonObject:
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": plan.name,
        "content": list(content),
        "stop_reason": None,
        "stop_sequence": None,
        "usage": used,
    }


def whole_message(message_id: str, plan: Plan, text: Text, result: SampleResult) -> JsonObject:
    sequence = result.sequences[0]
    choice = Choice(plan, text, 0)
    read_sequence(choice, sequence)
    piece = choice.piece()
    content: list[JsonObject] = [_thought(piece.reasoning)] if piece.reasoning else []
    if piece.text:
        content.append({"type": "text", "text": piece.text})
    content += [_call(call) for call in piece.calls]
    used = usage(plan, result, len(sequence.tokens_T))
    return message(message_id, plan, content, used) | stop(choice, piece.calls, sequence.stop_reason)


def stop(choice: Choice, calls: Sequence[ToolCall], stop_reason: str) -> JsonObject:
    if calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if choice.stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stopped_by}
    return {"stop_reason": "max_tokens" if stop_reason == "length" else "end_turn", "stop_sequence": None}


def _thought(reasoning: str) -> JsonObject:
    """Unsigned: whoever sends it back need not prove where it is from."""
    return {"type": "thinking", "thinking": reasoning, "signature": ""}


def _call(call: ToolCall) -> JsonObject:
    call_id = "toolu_" + call.call_id.removeprefix("call_")
    return {"type": "tool_use", "id": call_id, "name": call.name, "input": json.loads(call.arguments)}


class Blocks:
    """The content blocks of a stream: which one is open, and the events that follow from a piece."""

    def __init__(self) -> None:
        self._next = 0
        self._open: str | None = None

    def events(self, piece: Piece) -> Iterator[Event]:
        if piece.reasoning:
            yield from self._opened(_thought(""))
            yield self._delta({"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text:
            yield from self._opened({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": piece.text})
        for call in piece.calls:
            yield from self.close()
            yield self._start(_call(call) | {"input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            yield self._stop()

    def close(self) -> Iterator[Event]:
        if self._open is not None:
            self._open = None
            yield self._stop()

    def _opened(self, block: JsonObject) -> Iterator[Event]:
        if self._open != block["type"]:
            yield from self.close()
            self._open = str(block["type"])
            yield self._start(block)

    def _start(self, block: JsonObject) -> Event:
        return "content_block_start", {"type": "content_block_start", "index": self._next, "content_block": block}

    def _delta(self, delta: JsonObject) -> Event:
        return "content_block_delta", {"type": "content_block_delta", "index": self._next, "delta": delta}

    def _stop(self) -> Event:
        self._next += 1
        return "content_block_stop", {"type": "content_block_stop", "index": self._next - 1}
