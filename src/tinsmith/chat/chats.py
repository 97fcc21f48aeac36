"""`/chat/completions`: a request's JSON -> a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tinsmith.chat.generation_request import (
    MAX_CHOICES,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    SHARED,
    Plan,
    bounded,
    read_count,
    read_params,
    read_response_format,
    read_stream,
)
from tinsmith.chat.refusals import RequestError, not_supported, refuse_unknown
from tinsmith.chat.texts import Text, Thinking, thinking_of
from tinsmith.chat.tools import OPEN, ToolUse, read_tools
from tinsmith.types import Grammar, SamplingParams
from tinsmith.wire.fields import Fields, show

KNOWN = SHARED | frozenset(
    [
        "messages",
        "model",
        "max_tokens",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "response_format",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "separate_reasoning",
    ]
)
REASONS = {
    "functions": "an older form; send tools",
    "function_call": "an older form; send tool_choice",
    "audio": "models here write text only",
    "modalities": "models here write text only; leave it out",
    "prediction": "answers are sampled one token at a time",
    "reasoning_effort": "say it in chat_template_kwargs, in the words of the model's own template",
    "verbosity": "models here know no such thing",
    "web_search_options": "this server fetches nothing",
    "moderation": "this server judges no content",
}
ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_FIELDS = frozenset(["role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal"])
MAX_MESSAGES = 10_000


def read_chat(fields: Fields, text: Text) -> Plan:
    refuse_unknown(without_text_modality(fields), KNOWN, REASONS)
    template = text.template.source
    tools = read_tools(fields, template, text.has_token(OPEN))
    messages = read_messages(fields, template)
    variables = fields.fields_or("chat_template_kwargs", Fields({})).values
    grammar = one_grammar(read_response_format(fields), tools)
    stream, include_usage = read_stream(fields)
    shown = [tool.definition for tool in tools.tools] if tools else None
    prompt = text.chat(messages, shown, variables)
    params = read_params(fields, _max_tokens(fields), grammar, tools.stops if tools else ())
    return Plan(
        name=fields.text("model"),
        prompts=(prompt,),
        num_choices=read_count(fields, "n", 1, MAX_CHOICES, 1),
        params=params,
        top_logprobs=_top_logprobs(fields),
        stream=stream,
        include_usage=include_usage,
        tools=tools,
        thinking=_thinking(fields, text, prompt, params, tools),
    )


def _thinking(
    fields: Fields, text: Text, prompt: Sequence[int], params: SamplingParams, tools: ToolUse | None
) -> Thinking | None:
    """`separate_reasoning` is SGLang's."""
    wanted = fields.flag_or("separate_reasoning", True)
    return thinking_of(text, prompt) if wanted and may_think(params, tools) else None


def may_think(params: SamplingParams, tools: ToolUse | None) -> bool:
    """An answer that is held to a grammar from its first token does not think."""
    held = params.adjustments is not None and params.adjustments.grammar is not None
    return not held or (tools is not None and tools.choice == "auto")


def without_text_modality(fields: Fields) -> Fields:
    """Text is the one modality there is, so it may be asked for."""
    if fields.values.get("modalities") != ["text"]:
        return fields
    return Fields({name: value for name, value in fields.values.items() if name != "modalities"})


def one_grammar(wanted: Grammar | None, tools: ToolUse | None) -> Grammar | None:
    """An answer can be held to one grammar."""
    called = tools.grammar() if tools else None
    if wanted and tools:
        raise not_supported("response_format", "together with tools; set tool_choice to 'none', or leave one out")
    return bounded(called) if called else wanted


def _max_tokens(fields: Fields) -> int | None:
    old, new = (
        read_count(fields, name, 1, MAX_TOKENS, 1) if fields.has(name) else None
        for name in ("max_tokens", "max_completion_tokens")
    )
    if old is not None and new is not None and old != new:
        raise RequestError("max_tokens", f"max_tokens is {old} and max_completion_tokens {new}; send one of them")
    return old if new is None else new


def _top_logprobs(fields: Fields) -> int | None:
    wanted = fields.flag_or("logprobs", False)
    count = read_count(fields, "top_logprobs", 0, MAX_TOP_LOGPROBS, 0)
    if count and not wanted:
        raise RequestError("top_logprobs", f"top_logprobs is {count}, but logprobs is not true")
    return count if wanted else None


# Messages.


def read_messages(fields: Fields, template: str) -> list[Mapping[str, object]]:
    items = fields.values.get("messages")
    if not isinstance(items, list) or not 0 < len(items) <= MAX_MESSAGES:
        raise RequestError("messages", f"messages must be a list of 1 to {MAX_MESSAGES} messages")
    return [_message(item, f"messages[{index}]", template) for index, item in enumerate(items)]


def _message(item: object, where: str, template: str) -> Mapping[str, object]:
    if not isinstance(item, dict):
        raise RequestError("messages", f"{where} is {show(item)}; it must be an object")
    fields = Fields(item, f"{where}.")
    refuse_unknown(fields, MESSAGE_FIELDS, {"audio": "models here know text only", "function_call": "send tool_calls"})
    if fields.has("refusal"):
        raise not_supported(fields.path("refusal"), "put what was said into content")
    role = fields.text("role")
    if role not in ROLES:
        raise RequestError("messages", f"{where}.role is {show(role)}; it must be one of {', '.join(ROLES)}")
    if role == "developer" and "developer" not in template:
        role = "system"
    message: dict[str, object] = {"role": role, "content": read_content(fields, role)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if fields.has(name):
            message[name] = fields.text_or(name, "", max_length=2**31)
    if fields.has("tool_calls"):
        message["tool_calls"] = _calls(fields)
    return message


def read_content(fields: Fields, role: str) -> str:
    """Parts of a text stand on lines of their own."""
    content = fields.values.get("content")
    if isinstance(content, list):
        return "\n".join(_part(part, f"{fields.path('content')}[{index}]") for index, part in enumerate(content))
    if content is None and role != "assistant":
        raise RequestError("messages", f"{fields.path('content')} is missing")
    return fields.text_or("content", "", max_length=2**31)


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise RequestError("messages", f"{where} is {show(part)}; it must be an object with a type")
    fields = Fields(part, f"{where}.")
    kind = fields.text("type")
    if kind != "text":
        raise not_supported(f"{where}.type", f"{show(kind)}; models here read text only")
    return fields.text_or("text", "", max_length=2**31)


def _calls(fields: Fields) -> list[object]:
    """Arguments as objects, which is how chat templates write them down."""
    items = fields.values["tool_calls"]
    if not isinstance(items, list):
        raise RequestError("messages", f"{fields.path('tool_calls')} is {show(items)}; it must be a list")
    calls: list[object] = []
    for index, item in enumerate(items):
        where = f"{fields.path('tool_calls')}[{index}]"
        if not isinstance(item, dict):
            raise RequestError("messages", f"{where} is {show(item)}; it must be an object")
        function = Fields(item, f"{where}.").fields("function")
        text = function.text_or("arguments", "", max_length=2**31) or "{}"
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError("messages", f"{function.path('arguments')} is {show(text)}; it must be a JSON object")
        called = {"name": function.text("name"), "arguments": arguments}
        calls.append({"id": item.get("id"), "type": "function", "function": called})
    return calls
