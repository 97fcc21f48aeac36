"""The parameters that chats, completions and token requests share, and the `GenerationPlan` that each becomes.

A `GenerationPlan` has the prompts as token ids and everything else that sampling and the response need. Parameters have
OpenAI's names, or vLLM's if OpenAI has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from tinsmith.chat.schemas import check_grammar, schema_grammar
from tinsmith.chat.tokenizer import Channels, ModelTokenizer, ReasoningTags
from tinsmith.chat.tools import ToolUse
from tinsmith.chat.vendor_fields import VendorFields, VendorSamplingFields
from tinsmith.errors import RequestError, not_supported
from tinsmith.types import Adjustments, Grammar, Image, ReasoningSpan, SamplingParams
from tinsmith.wire.fields import (
    MAX_TEXT,
    NO_EFFECT,
    ClosedBody,
    GrammarText,
    Ignored,
    Integer,
    Position,
    StrOr,
    Supported,
    Text,
    show,
    support_error,
    validation_error,
)

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1
MAX_BIASES = 1024
MAX_STRUCTURED_CHOICES = 1024
MAX_GRAMMAR_CHARACTERS = 32 << 10
MAX_BAD_WORDS = 1024
STRUCTURES = ("json", "regex", "choice", "grammar")


TINKER_SCHEME = "tinker://"


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """The weights to sample from: a base model, a checkpoint of it, or the newest ones that a training run published.
    `name` is the request's text.
    """

    name: str
    base_model: str | None
    model_path: str | None = None
    training_run_id: str | None = None

    @classmethod
    def of(cls, name: str) -> ModelTarget:
        """Parse `base`, `tinker://RUN/KIND/NAME` or `tinker://RUN`, the last two also after `base;`."""
        base_model, separator, path = name.rpartition(";")
        if not path.startswith(TINKER_SCHEME):
            return cls(name, base_model, path) if separator else cls(name, name)
        training_run_id = path.removeprefix(TINKER_SCHEME)
        if training_run_id and "/" not in training_run_id:
            return cls(name, base_model or None, training_run_id=training_run_id)
        return cls(name, base_model or None, path)


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """What to sample, and the contents of the response.

    `top_logprobs` is None for a response without logprobs. `echo` puts the prompt before a completion. `reasoning_tags`
    are the tags of reasoning that is returned apart from the text; without them, reasoning is part of the text, or is
    removed if `hidden_tags` has its tags. Reasoning tokens are counted by `counted_tags`. `channels` replaces all three
    for the harmony format. `prompt_field` is the request's field with the prompt. `prompt_logprobs` is the number
    of most likely tokens returned per prompt token. With `token_ids` the response has the ids of its tokens; with
    `tokens_as_ids` logprobs name tokens by id. With either, logprobs cover every sampled token, including those that
    are not part of the text. `answer_id` is chosen by the client. `conversation` is the digest of a captured chat.
    """

    name: str
    prompts: tuple[Sequence[int], ...]
    num_choices: int
    params: SamplingParams
    top_logprobs: int | None = None
    echo: bool = False
    echo_only: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    tools: ToolUse | None = None
    reasoning_tags: ReasoningTags | None = None
    hidden_tags: ReasoningTags | None = None
    counted_tags: ReasoningTags | None = None
    channels: Channels | None = None
    prompt_field: str = "messages"
    images: tuple[Image, ...] = ()  # of the one prompt of a chat
    prompt_logprobs: int | None = None
    token_ids: bool = False
    tokens_as_ids: bool = False
    shows_stop: bool = False
    shows_special: bool = False
    answer_id: str | None = None
    conversation: str | None = None
    ignored: Mapping[str, str] = field(default_factory=dict)  # fields that this model does not follow, and why

    @property
    def exact(self) -> bool:
        return self.token_ids or self.tokens_as_ids

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a completion without being part of it; the end of a call is part of it."""
        closings = self.tools.closings if self.tools else ()
        return tuple(text for text in self.params.stop_strings if text not in closings)


class ContextLengthError(RequestError):
    """Prompt and completion exceed the model's context. Clients match on the first words, OpenAI's or Anthropic's.

    `max_tokens` is None if the request has no limit; `param` is the field with the prompt.
    """

    def __init__(self, param: str, num_prompt: int, max_tokens: int | None, context: int) -> None:
        self.num_prompt, self.max_tokens, self.context = num_prompt, max_tokens, context
        reason = (
            f"your {param} resulted in {num_prompt} tokens, which leaves none for the completion"
            if max_tokens is None
            else f"you requested {num_prompt + max_tokens} tokens ({num_prompt} in the {param}, {max_tokens} in the "
            "completion)"
        )
        super().__init__(
            param,
            f"This model's maximum context length is {context} tokens. However, {reason}. Please reduce the length of "
            f"the {param} or of the completion (max_tokens).",
            "context_length_exceeded",
        )

    @property
    def anthropic(self) -> str:
        if self.max_tokens is None or self.num_prompt >= self.context:
            return f"prompt is too long: {self.num_prompt} tokens > {self.context - 1} maximum"
        return (
            f"input length and `max_tokens` exceed context limit: {self.num_prompt} + {self.max_tokens} > "
            f"{self.context}, decrease input length or `max_tokens` and try again"
        )


# Grammars.


def json_grammar(schema: Mapping[str, object] | None, path: str = "response_format.json_schema.schema") -> Grammar:
    """Make the grammar of a JSON schema; without a schema, of any object. Raises RequestError below `path`."""
    return check_grammar_size(schema_grammar({"type": "object"} if schema is None else schema, path))


def check_grammar_size(grammar: Grammar) -> Grammar:
    if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(
            "response_format",
            f"the schema is {len(grammar.text)} characters long; use at most {MAX_GRAMMAR_CHARACTERS}",
        )
    return grammar


class JsonSchemaFormat(ClosedBody):
    definition: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    name: Ignored = None
    description: Ignored = None
    strict: Ignored = None


class ResponseFormat(ClosedBody):
    type: Annotated[
        Text, Supported(("text", "json_object", "json_schema"), "use 'text', 'json_object' or 'json_schema'")
    ]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise validation_error("has no json_schema, which its type needs")
        return self

    @property
    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        return json_grammar(self.json_schema.definition if self.type == "json_schema" and self.json_schema else None)


def _parse_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise validation_error(f"has the json {show(text)}; it must be a JSON object, the schema")
    return schema


def _read_structure(structure: dict[str, Any], path: str = "structured_outputs.json") -> Grammar:
    """Read vLLM's structured outputs: exactly one of json, regex, choice and grammar."""
    present = [name for name, value in structure.items() if value is not None]
    if len(present) != 1 or present[0] not in STRUCTURES:
        raise support_error(f"{show(present)}; use exactly one of {', '.join(STRUCTURES)}")
    kind, value = present[0], structure[present[0]]
    if kind == "json" and isinstance(value, dict | str):
        return json_grammar(_parse_schema(value) if isinstance(value, str) else value, path)
    if kind == "regex" and _is_text(value):
        return check_grammar_size(Grammar("regex", value))
    if kind == "grammar" and isinstance(value, str):
        return _read_lark(value)
    texts = value if isinstance(value, list) and all(_is_text(text) and text for text in value) else []
    if kind == "choice" and 0 < len(texts) <= MAX_STRUCTURED_CHOICES:
        return check_grammar_size(Grammar("lark", "%llguidance {}\nstart: " + " | ".join(map(json.dumps, texts))))
    raise validation_error(
        f"has the {kind} {show(value)}; json is a schema, regex a string of at most {MAX_TEXT} characters without NUL, "
        f"choice a list of 1 to {MAX_STRUCTURED_CHOICES} such strings that are not empty, grammar a string"
    )


def _read_lark(text: str) -> Grammar:
    """Read a grammar in Lark's form. GBNF and EBNF are other forms, with other operators."""
    if "::=" in text:
        raise support_error("a grammar in the form of GBNF or EBNF ('::='); write it in Lark's form, with a rule start")
    if not re.search(r"^\s*\??start(\[.*?\])?\s*:", text, re.MULTILINE):
        raise validation_error(f"has the grammar {show(text)}; it must be in Lark's form, with a rule start")
    return check_grammar_size(Grammar("lark", text))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT and "\x00" not in value


# Requests.


def _read_stops(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise validation_error(f"is {show(value)}; use a non-empty string or a list of such strings")
    return tuple(texts)


def _check_bad_words(words: list[str]) -> list[str]:
    if len(words) > MAX_BAD_WORDS or not all(word.strip() and len(word) <= MAX_TEXT for word in words):
        raise validation_error(f"is {show(words)}; use at most {MAX_BAD_WORDS} strings of 1 to {MAX_TEXT} characters")
    return words


def _read_biases(biases: dict[str, float]) -> dict[int, float]:
    if len(biases) > MAX_BIASES:
        raise validation_error(f"has {len(biases)} tokens; at most {MAX_BIASES} are allowed")
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) <= 9):
            raise validation_error(f"has the key {show(name)}; keys are token ids")
    return {int(name): bias for name, bias in biases.items()}


class StreamOptions(ClosedBody):
    include_usage: bool = False
    continuous_usage_stats: Annotated[bool, Field(description="with include_usage, every chunk has the usage")] = False
    include_obfuscation: Annotated[Ignored, NO_EFFECT] = None


Stops = Annotated[
    Any,
    AfterValidator(_read_stops),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string", "minLength": 1}}]}),
]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class SamplingFields(VendorSamplingFields):
    """The parameters of sampling and of its end."""

    ignores_zero = False

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Integer | None = None
    stop: Stops = ()
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[str, Bias], AfterValidator(_read_biases)] = Field(default_factory=dict)
    # Fields of vLLM.
    top_k: Annotated[Integer, Field(description="-1 or 0 turns it off")] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    stop_token_ids: Annotated[list[Position], BeforeValidator(lambda ids: ids or [])] = Field(default_factory=list)
    ignore_eos: bool = False
    best_of: Annotated[Integer | None, Field(description="equal to n")] = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    allowed_token_ids: Annotated[list[Position], Field(min_length=1)] | None = None
    bad_words: Annotated[list[str], AfterValidator(_check_bad_words)] = Field(default_factory=list)
    structured_outputs: Annotated[dict[str, Any], AfterValidator(_read_structure)] | None = None
    guided_json: Annotated[dict[str, Any] | str, StrOr()] | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: GrammarText | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: Annotated[bool, Supported((True,), "the tokenizer decides on spaces")] = True
    truncate_prompt_tokens: (
        Annotated[int, Field(ge=1, le=MAX_TOKENS, description="keeps the prompt's last tokens")] | None
    ) = None

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of not in (None, self.n):
            raise not_supported("best_of", "all completions are returned; set n and choose among them")
        return self

    @property
    def _grammar_field(self) -> str:
        """The field that a grammar comes from, for errors."""
        structure = self._vendor_structure
        return structure[0] if structure else "response_format"

    @property
    def structure(self) -> Grammar | None:
        """The grammar of the answer. Raises RequestError for more than one."""
        structure = self._vendor_structure
        return None if structure is None else structure[1]

    @property
    def _vendor_structure(self) -> tuple[str, Grammar] | None:
        """Return the grammar of vLLM's fields, and the field that contains it."""
        grammars: dict[str, Any] = {"structured_outputs": self.structured_outputs}
        for kind in STRUCTURES:
            value = getattr(self, f"guided_{kind}")
            try:
                grammars[f"guided_{kind}"] = None if value is None else _read_structure({kind: value}, f"guided_{kind}")
            except PydanticCustomError as error:
                if error.type == "unsupported":
                    raise not_supported(f"guided_{kind}", error.message()) from None
                raise RequestError(f"guided_{kind}", f"guided_{kind} {error.message()}") from None
        set_grammars = [(name, grammar) for name, grammar in grammars.items() if grammar is not None]
        if len(set_grammars) > 1:
            raise RequestError(set_grammars[1][0], f"{set_grammars[1][0]} cannot be combined with {set_grammars[0][0]}")
        return set_grammars[0] if set_grammars else None

    def params(
        self,
        tokenizer: ModelTokenizer,
        max_tokens: int | None,
        grammar: Grammar | None,
        own_stops: Sequence[str] = (),
        reasoning: ReasoningSpan | None = None,
    ) -> SamplingParams:
        """Return the sampling parameters; `grammar` is that of the response, after the `reasoning`. Raises
        RequestError.
        """
        if grammar is not None:
            check_grammar(grammar, self._grammar_field)
        for name in ("min_tokens", "allowed_token_ids", "bad_words"):
            if grammar and getattr(self, name):
                raise not_supported(name, "together with a grammar (tools, response_format, guided decoding)")
        if max_tokens is not None and self.min_tokens > max_tokens:
            raise RequestError("min_tokens", f"min_tokens is {self.min_tokens}; max_tokens is {max_tokens}")
        biases: Any = self.logit_bias
        adjustments = Adjustments(
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(biases.items()),
            grammar=grammar,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            bad_words=tokenizer.spellings(self.bad_words),
            min_tokens=self.min_tokens,
            reasoning=reasoning,
        )
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self.seed,
            stop_strings=(*self.stop, *own_stops),
            stop_tokens=tuple(self.stop_token_ids),
            stop_eos=not self.ignore_eos,
            temperature=self.temperature,
            top_k=self.top_k or -1,
            top_p=self.top_p,
            adjustments=None if adjustments == Adjustments() else adjustments,
        )

    def truncate_prompt(self, prompt: Sequence[int]) -> Sequence[int]:
        """Truncate the prompt to the last tokens that the request keeps."""
        return prompt[-self.truncate_prompt_tokens :] if self.truncate_prompt_tokens else prompt


class GenerationRequest(VendorFields, SamplingFields):
    """The common fields of chats and completions."""

    model: Annotated[Text, Field(description="a base model, or the tinker:// path of a checkpoint")]
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_token_ids: (
        Annotated[list[Position], Field(min_length=1, description="the prompt as token ids, replacing its text")] | None
    ) = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "stream_options requires stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise not_supported("prompt_logprobs", "together with stream")
        return self

    @property
    def structure(self) -> Grammar | None:
        grammar = self.response_format.grammar if self.response_format else None
        structure = self._vendor_structure
        if structure and grammar:
            raise RequestError(structure[0], f"{structure[0]} cannot be combined with response_format")
        return structure[1] if structure else grammar

    def response_options(self) -> dict[str, Any]:
        """Return the plan's fields about the response's contents that all requests have."""
        options = self.stream_options
        return {
            "stream": self.stream,
            "include_usage": options is not None and options.include_usage,
            "continuous_usage": options is not None and options.include_usage and options.continuous_usage_stats,
            "prompt_logprobs": self.prompt_logprobs,
            "token_ids": self.return_token_ids,
            "tokens_as_ids": self.return_tokens_as_token_ids,
            "shows_stop": self.include_stop_str_in_output,
            "shows_special": not self.skip_special_tokens,
        }
