"""Turns OpenAI's requests to `/chat/completions` and `/completions` into plans."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from tinsmith.chat.generation_request import MAX_TOKENS, MAX_TOP_LOGPROBS, GenerationPlan, GenerationRequest, bounded
from tinsmith.chat.images import Prompt, prompt_of
from tinsmith.chat.splicing import Recorded, digest_of, digests_of, splice
from tinsmith.chat.texts import SWITCH, Channels, Text, channels_of, thinking_of
from tinsmith.chat.tools import MAX_TOOLS, OPEN, GivenTool, ToolChoice, ToolUse, read_tools
from tinsmith.errors import RequestError, not_supported
from tinsmith.types import Grammar, SamplingParams
from tinsmith.wire import fields
from tinsmith.wire.fields import Body, ClosedBody, Integer, LongText, OneOf, Only, OrText, Unread, refused, show, wrong

MAX_MESSAGES = 10_000
MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16  # OpenAI's default


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


class RecordedCall(Body):
    function: CalledFunction
    id: Unread = None


class ImageUrl(Body):
    url: LongText
    detail: Annotated[fields.Text, Only(("auto", "high"), "an image is taken whole; leave it out")] = "auto"


class TextPart(Body):
    type: Annotated[fields.Text, Only(("text", "image_url"), "this server's models accept only text and images")]
    text: LongText = ""
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _check_image(self) -> TextPart:
        if self.type == "image_url" and self.image_url is None:
            raise wrong("has no image_url")
        return self

    @property
    def shown(self) -> Mapping[str, object]:
        if self.image_url is None:
            return {"type": "text", "text": self.text}
        return {"type": "image_url", "image_url": {"url": self.image_url.url}}


class ChatMessage(ClosedBody):
    role: Annotated[str, OneOf(("system", "developer", "user", "assistant", "tool"))]
    content: Annotated[str | list[TextPart], OrText()] | None = None
    name: LongText | None = None
    tool_call_id: LongText | None = None
    reasoning_content: LongText | None = None
    tool_calls: list[RecordedCall] | None = None
    refusal: Annotated[Unread, refused("put the text into content")] = None
    audio: Annotated[Unread, refused("this server's models accept only text")] = None
    function_call: Annotated[Unread, refused("send tool_calls")] = None

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise wrong("has no content; only an assistant's message may omit it")
        return self

    def shown(self, template: str) -> Mapping[str, object]:
        """Return the message for a chat template. Arguments of calls become objects, and text parts are joined by line
        ends; a message with images keeps its parts.
        """
        role = "system" if self.role == "developer" and "developer" not in template else self.role
        content = self.content or ""
        text: object = content if isinstance(content, str) else "\n".join(part.text for part in content)
        if not isinstance(content, str) and any(part.image_url for part in content):
            text = [part.shown for part in content]
        named = {name: getattr(self, name) for name in ("name", "tool_call_id", "reasoning_content")}
        message: dict[str, object] = {"role": role, "content": text}
        message |= {name: value for name, value in named.items() if value is not None}
        if self.reasoning_content is not None and "message.thinking" in template:  # harmony's name for it
            message["thinking"] = self.reasoning_content
        if self.tool_calls is not None:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": dict(call.function)} for call in self.tool_calls
            ]
        return message


class ChatRequest(GenerationRequest):
    """A chat completion. `separate_reasoning` is a field of SGLang; `chat_template_kwargs`, `add_generation_prompt`,
    `continue_final_message` and `add_special_tokens` are fields of vLLM.
    """

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
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: Annotated[
        Unread, refused("the model's own template is used; render yours in the client and send prompt_token_ids")
    ] = None
    functions: Annotated[Unread, refused("an outdated field; send tools")] = None
    function_call: Annotated[Unread, refused("an outdated field; send tool_choice")] = None
    audio: Annotated[Unread, refused("this server's models generate only text")] = None
    modalities: Annotated[Unread, refused("this server's models generate only text", unless=["text"])] = None
    prediction: Annotated[Unread, refused("completions are sampled one token at a time")] = None
    reasoning_effort: Annotated[str, OneOf(("none", "minimal", "low", "medium", "high", "xhigh"))] | None = None
    verbosity: Annotated[Unread, refused("this server's models have no such option")] = None
    web_search_options: Annotated[Unread, refused("this server does not access the web")] = None
    moderation: Annotated[Unread, refused("this server does not moderate content")] = None

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

    def plan(self, text: Text, recorded: Recorded | None = None) -> GenerationPlan:
        """`recorded` looks up the exchanges captured in the chat's session. Raises RequestError."""
        template = text.template.source
        definitions: Any = self.tools
        tools = read_tools(definitions, self.tool_choice, self.parallel_tool_calls, template, text.has_token(OPEN))
        given, images = self.prompt(text, tools)
        conversation = None
        if recorded is not None and not (images or self.prompt_token_ids or self.continue_final_message):
            given, conversation = self._spliced(text, tools, given, recorded)
        prompt = self.kept(given)
        if images and len(prompt) < len(given):
            raise not_supported("truncate_prompt_tokens", "together with images; shorten the messages")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        params = self.params(text, max_tokens, _one_grammar(self.response_grammar, tools), tools.stops if tools else ())
        counted = thinking_of(text, prompt) if may_think(params, tools) else None
        return GenerationPlan(
            name=self.model,
            prompts=(prompt,),
            num_choices=self.n,
            params=params,
            top_logprobs=self.top_logprobs if self.logprobs else None,
            tools=tools,
            thinking=counted if self.separate_reasoning else None,
            counted=counted,
            channels=self._channels(text, prompt, may_think(params, tools) or tools is not None),
            images=images,
            conversation=conversation,
            **self.shown(),
        )

    def _spliced(
        self, text: Text, tools: ToolUse | None, given: list[int], recorded: Recorded
    ) -> tuple[list[int], str]:
        """Return the prompt with the recorded tokens of earlier completions, and the digest of the chat."""
        template = text.template.source
        messages = [each.shown(template) for each in self.messages]
        definitions = [tool.definition for tool in tools.tools] if tools else None
        variables = self._variables(template)
        found = splice(text, messages, definitions, variables, recorded, generation_prompt=self.add_generation_prompt)
        return found or given, digests_of(digest_of(definitions, variables), messages)[-1]

    def _variables(self, template: str) -> dict[str, object]:
        return self.chat_template_kwargs | self._effort(template)

    def prompt(self, text: Text, tools: ToolUse | None) -> Prompt:
        """Return the messages rendered by the model's chat template, or the token ids that replace them."""
        template = text.template.source
        if self.prompt_token_ids:
            if any(isinstance(each.content, list) and any(part.image_url for part in each.content)
                   for each in self.messages):  # fmt: skip
                raise not_supported("prompt_token_ids", "together with images; send one of them")
            return self.prompt_token_ids, ()
        return prompt_of(
            text,
            [each.shown(template) for each in self.messages],
            [tool.definition for tool in tools.tools] if tools else None,
            self._variables(template),
            generation_prompt=self.add_generation_prompt,
            continues=self.continue_final_message,
            special=self.add_special_tokens,
        )

    def _channels(self, text: Text, prompt: Sequence[int], written: bool) -> Channels | None:
        """Return the completion's channels; None if special tokens are shown or a grammar excludes channels."""
        found = channels_of(text, prompt) if written and self.skip_special_tokens else None
        return found if found is None or self.separate_reasoning else replace(found, thoughts="text")

    def _effort(self, template: str) -> dict[str, object]:
        """Return the template's variables for `reasoning_effort`. Raises RequestError for an unknown level."""
        effort = self.reasoning_effort
        if effort is not None and "reasoning_effort" in template:
            return {"reasoning_effort": effort}
        if effort == "none" and SWITCH in template:
            return {SWITCH: False}
        if effort not in (None, "medium"):
            off = ", or 'none' to turn thinking off" if SWITCH in template else ""
            raise not_supported(
                "reasoning_effort", f"{show(effort)}; this model's template has no levels, so use 'medium'{off}"
            )
        return {}


def may_think(params: SamplingParams, tools: ToolUse | None) -> bool:
    """Whether a completion may contain reasoning. A grammar from the first token on excludes it."""
    held = params.adjustments is not None and params.adjustments.grammar is not None
    return not held or (tools is not None and tools.choice == "auto")


def _one_grammar(wanted: Grammar | None, tools: ToolUse | None) -> Grammar | None:
    """Return the grammar of a completion. Raises RequestError for more than one."""
    called = tools.grammar() if tools else None
    if wanted and tools:
        raise not_supported("response_format", "together with tools; set tool_choice to 'none', or send one of them")
    return bounded(called) if called else wanted


# Completions: a prompt is text or token ids.


def _prompts(prompt: object) -> list[object]:
    if isinstance(prompt, str) or _is_ids(prompt):
        return [prompt]
    if not isinstance(prompt, list) or not 0 < len(prompt) <= MAX_PROMPTS:
        raise wrong(f"is {show(prompt)}; it must be a text, token ids, or a list of 1 to {MAX_PROMPTS} of either")
    return prompt


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and len(prompt) > 0 and all(type(one) is int and 0 <= one < 2**31 for one in prompt)


def _count(given: object) -> object:
    return {True: 1, False: None}[given] if isinstance(given, bool) else given


class CompletionRequest(GenerationRequest):
    prompt: Annotated[Any, AfterValidator(_prompts), WithJsonSchema({"type": ["string", "array"]})]
    """A text, token ids, or a list of either."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS, description="0 only with echo")] = DEFAULT_MAX_TOKENS
    logprobs: (
        Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS, description="true is 1"), BeforeValidator(_count)] | None
    ) = None
    echo: bool = False
    best_of: Integer | None = None
    add_special_tokens: bool = True
    suffix: Annotated[Unread, refused("this server's models do not fill in the middle")] = None

    @model_validator(mode="after")
    def _check_limits(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise not_supported("best_of", "all completions are returned; set n and choose among them")
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

    def plan(self, text: Text) -> GenerationPlan:
        """Raises RequestError."""
        echo_only = self.echo and self.max_tokens == 0
        special = self.add_special_tokens
        prompts = (_prompt(one, f"prompt[{index}]", text, special) for index, one in enumerate(self.prompts))
        return GenerationPlan(
            name=self.model,
            prompts=tuple(map(self.kept, prompts)),
            num_choices=self.n,
            params=self.params(text, 1 if echo_only else self.max_tokens, self.response_grammar),
            top_logprobs=self.logprobs,
            echo=self.echo,
            echo_only=echo_only,
            prompt_field="prompt",
            **self.shown(),
        )


def _prompt(prompt: object, where: str, text: Text, special: bool) -> Sequence[int]:
    if isinstance(prompt, str):
        found = text.encode(prompt, special=special)
        if not found:
            raise RequestError("prompt", f"{where} is empty; it must have at least one token")
        return found
    if isinstance(prompt, list) and _is_ids(prompt):
        return prompt
    raise RequestError("prompt", f"{where} is {show(prompt)}; it must be a text or a list of token ids")
