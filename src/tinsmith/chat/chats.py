"""Turns OpenAI's requests to `/chat/completions` and `/completions` into plans."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from tinsmith.chat.dialects.harmony import write_final_answer
from tinsmith.chat.generation_request import (
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    GenerationPlan,
    GenerationRequest,
    check_grammar_size,
)
from tinsmith.chat.history import write_call_ids
from tinsmith.chat.images import Prompt, encode_conversation
from tinsmith.chat.splicing import FindRecording, digest_of, digests_of, splice
from tinsmith.chat.tokenizer import (
    Channels,
    ChatTemplate,
    Message,
    ModelTokenizer,
    ReasoningTags,
    find_any_tags,
    find_channels,
    find_reasoning_tags,
)
from tinsmith.chat.tools import MAX_TOOLS, ToolChoice, ToolField, ToolUse, read_tools, select_tools
from tinsmith.chat.turns import fit_turns
from tinsmith.chat.vendor_fields import VendorChatFields, VendorMessageFields
from tinsmith.errors import RequestError, not_supported
from tinsmith.types import ReasoningSpan, SamplingParams
from tinsmith.wire import fields
from tinsmith.wire.fields import (
    NO_EFFECT,
    ClosedBody,
    Ignored,
    LongText,
    OneOf,
    StrOr,
    Supported,
    refuse,
    show,
    validation_error,
)

MAX_MESSAGES = 10_000
MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16  # OpenAI's default


def _parse_arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise validation_error(f"is {show(text)}; it must be a JSON object")
    return arguments


class CalledFunction(ClosedBody):
    name: fields.Text
    arguments: Annotated[LongText, AfterValidator(_parse_arguments)] = Field("", validate_default=True)


class RecordedCall(ClosedBody):
    function: CalledFunction
    id: Ignored = None
    type: Ignored = None
    index: Ignored = None


_READS_REASONING = re.compile(r"\breasoning\b")


class ImageUrl(ClosedBody):
    url: LongText
    detail: Annotated[Ignored, NO_EFFECT] = None  # an image is taken whole


class TextPart(ClosedBody):
    type: Annotated[fields.Text, Supported(("text", "image_url"), "this server's models accept only text and images")]
    text: LongText = ""
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _check_image(self) -> TextPart:
        if self.type == "image_url" and self.image_url is None:
            raise validation_error("has no image_url")
        return self

    @property
    def template_part(self) -> Mapping[str, object]:
        if self.image_url is None:
            return {"type": "text", "text": self.text}
        return {"type": "image_url", "image_url": {"url": self.image_url.url}}


class ChatMessage(VendorMessageFields):
    role: Annotated[str, OneOf(("system", "developer", "user", "assistant", "tool"))]
    content: Annotated[str | list[TextPart], StrOr()] | None = None
    name: LongText | None = None
    tool_call_id: LongText | None = None
    reasoning_content: LongText | None = None
    reasoning: Annotated[LongText | None, Field(description="another name of reasoning_content")] = None
    tool_calls: list[RecordedCall] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise validation_error("has no content; only an assistant's message may omit it")
        return self

    def to_template(self, template: str) -> Mapping[str, object]:
        """Return the message for a chat template. Arguments of calls become objects, and text parts are joined by line
        ends; a message with images keeps its parts.
        """
        role = "system" if self.role == "developer" and "developer" not in template else self.role
        content = self.content or ""
        text: object = content if isinstance(content, str) else "\n".join(part.text for part in content)
        if not isinstance(content, str) and any(part.image_url for part in content):
            text = [part.template_part for part in content]
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        values = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": reasoning}
        if "message.thinking" in template:  # harmony's name for it
            values["thinking"] = reasoning
        if _READS_REASONING.search(template):
            values["reasoning"] = reasoning
        message: dict[str, object] = {"role": role, "content": text}
        message |= {name: value for name, value in values.items() if value is not None}
        if self.tool_calls is not None:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": dict(call.function)} for call in self.tool_calls
            ]
        return message


class ChatRequest(VendorChatFields, GenerationRequest):
    """A chat completion. `separate_reasoning` is a field of SGLang; `chat_template_kwargs`, `add_generation_prompt`,
    `continue_final_message` and `add_special_tokens` are fields of vLLM.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    tools: Annotated[list[ToolField], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    separate_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_TOKENS, description="most tokens of reasoning")] | None = (
        None
    )
    enable_thinking: Annotated[bool, Field(description="as in chat_template_kwargs")] | None = None
    reasoning_effort: Annotated[str, OneOf(("none", "minimal", "low", "medium", "high", "xhigh"))] | None = None
    verbosity: Annotated[str, OneOf(("low", "medium", "high"))] | None = None
    include_reasoning: Annotated[bool, Field(description="false removes reasoning from the response")] = True

    @model_validator(mode="after")
    def _check_limits(self) -> ChatRequest:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise RequestError("max_tokens", f"max_tokens is {old} and max_completion_tokens is {new}; send one")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs", f"top_logprobs is {self.top_logprobs}, but logprobs is not true")
        if self.continue_final_message:
            if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
                raise RequestError(
                    "continue_final_message", "continue_final_message cannot be combined with add_generation_prompt"
                )
            if self.messages[-1].role != "assistant":
                role = self.messages[-1].role
                raise RequestError(
                    "continue_final_message",
                    f"continue_final_message needs an assistant's message at the end; its role is {role!r}",
                )
        return self

    def plan(self, tokenizer: ModelTokenizer, find_recording: FindRecording | None = None) -> GenerationPlan:
        """Plan the sampling and the response. `find_recording` looks up the exchanges captured in the chat's session.
        Raises RequestError.
        """
        choice, allowed_tools = select_tools(self.tools, self.tool_choice)
        tools = read_tools(allowed_tools, choice, self.parallel_tool_calls, tokenizer, self.structure)
        rendered, images = self.render_prompt(tokenizer, tools)
        conversation = None
        if find_recording is not None and not (images or self.prompt_token_ids or self.continue_final_message):
            rendered, conversation = self._splice_recording(tokenizer, tools, rendered, find_recording)
        prompt = self.truncate_prompt(rendered)
        if images and len(prompt) < len(rendered):
            raise not_supported("truncate_prompt_tokens", "together with images; shorten the messages")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        # Calls are messages on channels, so that special tokens are never shown with tools.
        channels = find_channels(tokenizer, prompt) if self.skip_special_tokens or tools is not None else None
        grammar = tools.grammar() if tools else self.structure
        if grammar and not tools and channels is not None and channels.begins_turn:
            grammar = write_final_answer(grammar)
        elif grammar and not tools:
            channels = None  # the completion is the grammar's text, without messages
        tags = find_reasoning_tags(tokenizer, prompt)
        params = self.params(
            tokenizer,
            max_tokens,
            grammar and check_grammar_size(grammar),
            tools.stops if tools else (),
            self._reasoning(tokenizer, tags, channels) if grammar or self.thinking_token_budget is not None else None,
        )
        if tools and tools.stop_tokens:
            params = replace(params, stop_tokens=(*params.stop_tokens, *tools.stop_tokens))
        counted_tags = tags if may_think(params, tools) else None
        plan = GenerationPlan(
            name=self.model,
            prompts=(prompt,),
            num_choices=self.n,
            params=params,
            top_logprobs=self.top_logprobs if self.logprobs else None,
            tools=tools,
            reasoning_tags=counted_tags if self.separate_reasoning else None,
            counted_tags=counted_tags,
            channels=self._with_mode(channels),
            images=images,
            conversation=conversation,
            ignored=self._template_variables(tokenizer.template)[1],
            **self.response_options(),
        )
        return plan if self.include_reasoning else hide_reasoning(plan, tokenizer)

    def _reasoning(
        self, tokenizer: ModelTokenizer, tags: ReasoningTags | None, channels: Channels | None
    ) -> ReasoningSpan | None:
        """Return the reasoning before the answer; None for a model without, or if the prompt has closed it or ends
        within the answer. Raises RequestError for a budget of reasoning that cannot be found.
        """
        budget = self.thinking_token_budget
        if tags is None and channels is not None:
            return None if budget is None else limit_channel(tokenizer, channels, budget)
        if tags is None and budget is not None:
            raise not_supported("thinking_token_budget", "this model has no tags of reasoning; leave it out")
        if tags is None or tags.is_over or (self.continue_final_message and not tags.in_reasoning):
            return None
        return ReasoningSpan(tags.open_id, tags.close_id, tags.in_reasoning, budget)

    def _splice_recording(
        self, tokenizer: ModelTokenizer, tools: ToolUse | None, rendered: list[int], find_recording: FindRecording
    ) -> tuple[list[int], str]:
        """Return the prompt with the recorded tokens of earlier completions, and the digest of the chat."""
        messages = self._template_messages(tokenizer, tools)
        definitions = [tool.definition for tool in tools.tools] if tools else None
        variables, _ = self._template_variables(tokenizer.template)
        spliced = splice(
            tokenizer, messages, definitions, variables, find_recording, generation_prompt=self.add_generation_prompt
        )
        return spliced or rendered, digests_of(digest_of(definitions, variables), messages)[-1]

    def _template_messages(self, tokenizer: ModelTokenizer, tools: ToolUse | None) -> list[Message]:
        messages = [message.to_template(tokenizer.template.source) for message in self.messages]
        if tools is not None:
            messages = write_call_ids(tools.dialect, messages)
        return fit_turns(tokenizer.template, messages, tools=tools is not None)

    def render_prompt(self, tokenizer: ModelTokenizer, tools: ToolUse | None) -> Prompt:
        """Return the messages rendered by the model's chat template, or the token ids that replace them."""
        if self.prompt_token_ids:
            if any(isinstance(message.content, list) and any(part.image_url for part in message.content)
                   for message in self.messages):  # fmt: skip
                raise not_supported("prompt_token_ids", "together with images; send one of them")
            return self.prompt_token_ids, ()
        return encode_conversation(
            tokenizer,
            self._template_messages(tokenizer, tools),
            [tool.definition for tool in tools.tools] if tools else None,
            self._template_variables(tokenizer.template)[0],
            generation_prompt=self.add_generation_prompt,
            continues=self.continue_final_message,
            special=self.add_special_tokens,
        )

    @property
    def _grammar_field(self) -> str:
        return super()._grammar_field if self.structure else "tools"

    def _with_mode(self, channels: Channels | None) -> Channels | None:
        return channels if channels is None or self.separate_reasoning else replace(channels, reasoning_mode="text")

    def _template_variables(self, chat_template: ChatTemplate) -> tuple[dict[str, object], dict[str, str]]:
        """Return the template's variables, and the fields that the template does not read, with the reasons."""
        template, switch = chat_template.source, chat_template.thinking_switch
        variables, ignored = dict(self.chat_template_kwargs), dict[str, str]()
        if self.enable_thinking is not None and switch is not None:
            variables.setdefault(switch, self.enable_thinking)
        elif self.enable_thinking is not None:
            ignored["enable_thinking"] = "this model's chat template has no such switch; leave it out"
        effort = self.reasoning_effort
        if effort is not None and "reasoning_effort" in template:
            variables["reasoning_effort"] = effort
        elif effort == "none" and switch is not None:
            variables[switch] = False
        elif effort is not None:
            off = ", or send 'none' to turn thinking off" if switch is not None else ""
            ignored["reasoning_effort"] = f"{show(effort)}; this model's chat template has no levels; leave it out{off}"
        if self.verbosity is not None and "verbosity" in template:
            variables["verbosity"] = self.verbosity
        elif self.verbosity is not None:
            ignored["verbosity"] = f"{show(self.verbosity)}; this model's chat template has no levels; leave it out"
        if not any(name in template for name in ("reasoning", "message.thinking")):
            names = {
                name
                for name in ("reasoning", "reasoning_content")
                for message in self.messages
                if getattr(message, name)
            }
            reason = "this model's chat template does not read reasoning; leave it out"
            ignored |= {f"messages[].{name}": reason for name in sorted(names)}
        return variables, ignored


def limit_channel(tokenizer: ModelTokenizer, channels: Channels, budget: int) -> ReasoningSpan:
    """Return the reasoning of the harmony format, messages on the channel "analysis", with at most `budget` tokens."""
    name_ids = tuple(tokenizer.encode("analysis", special=False))
    is_open = channels.in_message and channels.header[-len(name_ids) :] == name_ids
    header_ids = (*name_ids, channels.message_id)
    return ReasoningSpan(channels.channel_id, channels.end_id, is_open, budget, header_ids=header_ids)


def may_think(params: SamplingParams, tools: ToolUse | None) -> bool:
    """Whether a completion may contain reasoning. A grammar from the first token on excludes it."""
    adjustments = params.adjustments
    if adjustments is None or adjustments.grammar is None or adjustments.reasoning is not None:
        return True
    return tools is not None and tools.is_auto and tools.answer_grammar is None


def hide_reasoning(plan: GenerationPlan, tokenizer: ModelTokenizer) -> GenerationPlan:
    """Return the plan of a response without reasoning, which is still counted."""
    if plan.channels is not None:
        return replace(plan, channels=replace(plan.channels, reasoning_mode="hidden"))
    hidden_tags = find_any_tags(tokenizer, plan.prompts[0]) if may_think(plan.params, plan.tools) else None
    return replace(plan, reasoning_tags=None, hidden_tags=hidden_tags, counted_tags=hidden_tags)


# Completions: a prompt is text or token ids.


def _list_prompts(prompt: object) -> list[object]:
    if isinstance(prompt, str) or _is_ids(prompt):
        return [prompt]
    if not isinstance(prompt, list) or not 0 < len(prompt) <= MAX_PROMPTS:
        raise validation_error(
            f"is {show(prompt)}; it must be a text, token ids, or a list of 1 to {MAX_PROMPTS} of either"
        )
    return prompt


def _is_ids(prompt: object) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in prompt)
    )


def _read_count(value: object) -> object:
    return {True: 1, False: None}[value] if isinstance(value, bool) else value


class CompletionRequest(GenerationRequest):
    prompt: Annotated[Any, AfterValidator(_list_prompts), WithJsonSchema({"type": ["string", "array"]})]
    """A text, token ids, or a list of either."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS, description="0 only with echo")] = DEFAULT_MAX_TOKENS
    logprobs: (
        Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS, description="true is 1"), BeforeValidator(_read_count)] | None
    ) = None
    echo: bool = False
    add_special_tokens: bool = True
    suffix: Annotated[Ignored, refuse("this server's models do not fill in the middle")] = None

    @model_validator(mode="after")
    def _check_limits(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens", f"max_tokens is 0; it must lie between 1 and {MAX_TOKENS} (0 with echo)")
        if self.echo and self.stream:
            raise not_supported("echo", "together with stream")
        if len(self.prompts) * self.n > MAX_PROMPTS:
            raise RequestError("n", f"n is {self.n} for {len(self.prompts)} prompts; use at most {MAX_PROMPTS} in all")
        return self

    @property
    def prompts(self) -> list[object]:
        return [self.prompt_token_ids] if self.prompt_token_ids else self.prompt

    def plan(self, tokenizer: ModelTokenizer) -> GenerationPlan:
        """Plan the sampling and the response. Raises RequestError."""
        echo_only = self.echo and self.max_tokens == 0
        special = self.add_special_tokens
        prompts = (
            _encode_prompt(prompt, f"prompt[{index}]", tokenizer, special) for index, prompt in enumerate(self.prompts)
        )
        return GenerationPlan(
            name=self.model,
            prompts=tuple(map(self.truncate_prompt, prompts)),
            num_choices=self.n,
            params=self.params(tokenizer, 1 if echo_only else self.max_tokens, self.structure),
            top_logprobs=self.logprobs,
            echo=self.echo,
            echo_only=echo_only,
            prompt_field="prompt",
            **self.response_options(),
        )


def _encode_prompt(prompt: object, field: str, tokenizer: ModelTokenizer, special: bool) -> Sequence[int]:
    if isinstance(prompt, str):
        token_ids = tokenizer.encode(prompt, special=special)
        if not token_ids:
            raise RequestError("prompt", f"{field} is empty; it must have at least one token")
        return token_ids
    if isinstance(prompt, list) and _is_ids(prompt):
        return prompt
    raise RequestError("prompt", f"{field} is {show(prompt)}; it must be a text or a list of token ids")
