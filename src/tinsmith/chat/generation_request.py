"""What a request comes down to, whoever's words it was in, and the parameters that all of them share.

A `Plan` holds prompts as token ids and everything else that sampling and the answer need. Parameters have OpenAI's
names; vLLM's additions to them are known, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinsmith.chat.refusals import RequestError, not_supported
from tinsmith.chat.texts import Thinking
from tinsmith.chat.tools import ToolUse
from tinsmith.types import Adjustments, Grammar, SamplingParams
from tinsmith.wire.fields import Fields, show

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1
MAX_BIASES = 1024
MAX_GRAMMAR_CHARACTERS = 32 << 10

SAMPLING = frozenset(
    [
        "temperature",
        "top_p",
        "n",
        "seed",
        "stop",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "stream",
        "stream_options",
    ]
)
BEYOND = frozenset(
    [
        "top_k",
        "min_p",
        "repetition_penalty",
        "stop_token_ids",
        "ignore_eos",
        "structured_outputs",
        "skip_special_tokens",
    ]
)
"""vLLM's."""

PASSED_OVER = frozenset(["user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "store"])
"""Fields that ask for nothing of the answer; store and service_tier at the values that mean the usual."""

SHARED = SAMPLING | BEYOND | PASSED_OVER
"""What chats and completions know alike."""


@dataclass(frozen=True, slots=True)
class Target:
    """Whose weights answer: a base model's, or those of a checkpoint on it. `name` is the request's own word."""

    name: str
    base_model: str | None
    model_path: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """`top_logprobs` None: the answer shows no logprobs. `echo` has completions begin with their prompt. Without
    `thinking`, what a model thinks is part of its text, or is left out of it if `hidden` names the marks.
    `prompt_field` is the request's field that holds the prompt.
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
    tools: ToolUse | None = None
    thinking: Thinking | None = None
    hidden: Thinking | None = None
    prompt_field: str = "messages"

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end an answer and do not belong to it."""
        own = self.tools.stops if self.tools else ()
        return tuple(text for text in self.params.stop_strings if text not in own)


def read_target(fields: Fields) -> Target:
    """`base`, `tinker://...`, or `base;tinker://...`."""
    name = fields.text_or("model", None)
    if name is None:
        raise RequestError("model", "model is missing; name a base model, or the tinker:// path of a checkpoint")
    base_model, separator, path = name.partition(";")
    if separator:
        return Target(name, base_model, path)
    return Target(name, None, name) if name.startswith("tinker://") else Target(name, name, None)


def read_params(
    fields: Fields, max_tokens: int | None, grammar: Grammar | None, own_stops: Sequence[str] = ()
) -> SamplingParams:
    if fields.has("skip_special_tokens") and not fields.flag_or("skip_special_tokens", True):
        raise not_supported("skip_special_tokens", "special tokens are always left out of a text")
    check_passed_over(fields)
    asked = grammar_of_structured_outputs(fields)
    if asked and grammar:
        raise RequestError("structured_outputs", "structured_outputs does not go with tools or response_format")
    return SamplingParams(
        max_tokens=max_tokens,
        seed=fields.integer_or("seed", None),
        stop_strings=(*_stops(fields), *own_stops),
        stop_tokens=_stop_tokens(fields),
        stop_eos=not fields.flag_or("ignore_eos", False),
        temperature=read_within(fields, "temperature", 0.0, 2.0, 1.0),
        top_k=_top_k(fields),
        top_p=read_within(fields, "top_p", 0.0, 1.0, 1.0),
        adjustments=adjustments_of(fields, asked or grammar),
    )


def check_passed_over(fields: Fields) -> None:
    if fields.flag_or("store", False):
        raise not_supported("store", "answers are not kept for later; leave it out")
    tier = fields.text_or("service_tier", "auto")
    if tier not in ("auto", "default"):
        raise not_supported("service_tier", f"{show(tier)}; there is one tier, 'default'")


def adjustments_of(fields: Fields, grammar: Grammar | None) -> Adjustments | None:
    """None if they change nothing."""
    found = Adjustments(
        min_p=read_within(fields, "min_p", 0.0, 1.0, 0.0),
        repetition_penalty=read_within(fields, "repetition_penalty", 0.01, 100.0, 1.0),
        presence_penalty=read_within(fields, "presence_penalty", -2.0, 2.0, 0.0),
        frequency_penalty=read_within(fields, "frequency_penalty", -2.0, 2.0, 0.0),
        logit_bias=_biases(fields),
        grammar=grammar,
    )
    return None if found == Adjustments() else found


def read_within(fields: Fields, name: str, low: float, high: float, default: float) -> float:
    value = fields.number_or(name, default)
    if not low <= value <= high:
        raise RequestError(name, f"{name} is {value}; it must lie between {low:g} and {high:g}")
    return value


def _biases(fields: Fields) -> tuple[tuple[int, float], ...]:
    given = fields.fields_or("logit_bias", None)
    if given is None:
        return ()
    if len(given.values) > MAX_BIASES:
        raise RequestError("logit_bias", f"logit_bias has {len(given.values)} tokens; at most {MAX_BIASES} are allowed")
    found: dict[int, float] = {}
    for name in given.values:
        if not (name.isascii() and name.isdigit() and len(name) <= 9):
            raise RequestError("logit_bias", f"logit_bias has the key {show(name)}; keys are token ids")
        bias = given.number(name)
        if not -100.0 <= bias <= 100.0:
            raise RequestError("logit_bias", f"{given.path(name)} is {bias}; it must lie between -100 and 100")
        found[int(name)] = bias
    return tuple(found.items())


def _stops(fields: Fields) -> tuple[str, ...]:
    stop = fields.values.get("stop")
    if stop is None:
        return ()
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError("stop", f"stop is {show(stop)}; use a string that is not empty, or a list of them")
    return tuple(texts)


def _stop_tokens(fields: Fields) -> tuple[int, ...]:
    found = fields.values.get("stop_token_ids") or []
    if not isinstance(found, list) or not all(type(one) is int and 0 <= one < 2**31 for one in found):
        raise RequestError("stop_token_ids", f"stop_token_ids is {show(found)}; it must be a list of token ids")
    return tuple(found)


def _top_k(fields: Fields) -> int:
    top_k = fields.integer_or("top_k", -1)
    return -1 if top_k == 0 else top_k  # vLLM's other way to say: all


def read_count(fields: Fields, name: str, low: int, high: int, default: int) -> int:
    value = fields.integer_or(name, default)
    if not low <= value <= high:
        raise RequestError(name, f"{name} is {value}; it must lie between {low} and {high}")
    return value


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """Whether the answer comes in pieces, and whether the last of them tells its usage."""
    stream = fields.flag_or("stream", False)
    options = fields.fields_or("stream_options", None)
    if options is None:
        return stream, False
    if not stream:
        raise RequestError("stream_options", "stream_options is for stream=true only")
    for name in options.values.keys() - {"include_usage", "include_obfuscation"}:
        raise not_supported(options.path(name), "known is include_usage")
    if options.flag_or("include_obfuscation", False):
        raise not_supported("stream_options.include_obfuscation", "pieces are sent as they are")
    return stream, options.flag_or("include_usage", False)


# Grammars.


def json_grammar(schema: Mapping[str, object] | None) -> Grammar:
    """Any object, without a schema."""
    return bounded(Grammar("json_schema", json.dumps(schema if schema is not None else {"type": "object"})))


def bounded(grammar: Grammar) -> Grammar:
    if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(
            "response_format",
            f"the schema is {len(grammar.text)} characters long; at most {MAX_GRAMMAR_CHARACTERS} are compiled",
        )
    return grammar


def read_response_format(fields: Fields) -> Grammar | None:
    wanted = fields.fields_or("response_format", None)
    if wanted is None:
        return None
    kind = wanted.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_grammar(None)
    if kind == "json_schema":
        schema = wanted.fields("json_schema").fields_or("schema", None)
        return json_grammar(None if schema is None else schema.values)
    raise not_supported("response_format.type", f"{show(kind)}; use 'text', 'json_object' or 'json_schema'")


def grammar_of_structured_outputs(fields: Fields) -> Grammar | None:
    """vLLM's way to say it: exactly one of json, regex and choice."""
    wanted = fields.fields_or("structured_outputs", None)
    if wanted is None:
        return None
    named = [name for name, value in wanted.values.items() if value is not None]
    if len(named) != 1 or named[0] not in ("json", "regex", "choice"):
        raise not_supported("structured_outputs", f"{show(named)}; use exactly one of json, regex and choice")
    if named == ["regex"]:
        return bounded(Grammar("regex", wanted.text("regex")))
    if named == ["choice"]:
        return json_choice(wanted)
    schema = wanted.values["json"]
    if isinstance(schema, str):
        return bounded(Grammar("json_schema", schema))
    return json_grammar(wanted.fields("json").values)


def json_choice(wanted: Fields) -> Grammar:
    choices = wanted.texts_or_empty("choice", max_items=1024)
    if not choices or not all(choices):
        raise RequestError("structured_outputs.choice", "structured_outputs.choice must hold texts that are not empty")
    return bounded(Grammar("lark", "%llguidance {}\nstart: " + " | ".join(json.dumps(one) for one in choices)))
