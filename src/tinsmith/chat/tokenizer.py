"""Tokenizers and chat templates of base models, read from their directories without torch.

`ModelTokenizers` reads each model's files once, on first use. All functions may be called from several threads, and a
tokenizer can be shared between threads. Requests that need a missing tokenizer or template are refused by name.

A chat template is a Jinja program of the model that renders a conversation as text. It runs in a sandbox. The
environment has the filters, functions and white-space rules of transformers 5 (utils/chat_template_utils.py), so that
the text is the same. Templates come with the model; their input comes from clients and is plain JSON.

Reasoning is text between two tag tokens before the rest of the completion, and is returned apart from it. A base model
reasons if its chat template contains a closing tag of TAGS and its tokenizer has both tags as tokens. Text that only
looks like a tag is text. Some templates open the reasoning in the prompt.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinsmith.base_models import json_object, read_special_tokens
from tinsmith.chat.dialects import choose_dialect, detect_dialect
from tinsmith.chat.dialects.dialect import ToolDialect
from tinsmith.errors import NotSupportedError, RequestError, not_supported
from tinsmith.types import ModelShape, VisionShape

Message = Mapping[str, object]

MAX_RENDERED = 16 << 20
"""Most characters of one conversation."""


class _Generation(Extension):
    """`{% generation %}` marks the model's own text for training; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _render_body(caller: jinja2.runtime.Macro) -> str:
        return caller()


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are keyed by their names in templates: bos_token, eos_token, ..."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._environment = environment
        self._template = environment.from_string(source)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        variables: Mapping[str, object],
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Render the conversation, with `generation_prompt` up to the model's turn. Raises RequestError."""
        if any(message.get("tool_calls") for message in messages) and self._takes_text_arguments:
            messages = [_with_text_arguments(message) for message in messages]
        return self._render(messages, tools, variables, generation_prompt=generation_prompt)

    @cached_property
    def thinking_switch(self) -> str | None:
        """The template's variable of SWITCHES, or None."""
        variables = jinja2.meta.find_undeclared_variables(self._environment.parse(self.source))
        return next((name for name in SWITCHES if name in variables), None)

    @cached_property
    def _takes_text_arguments(self) -> bool:
        """Whether the template takes the arguments of calls as JSON text. It does if it fails with an object or writes
        it as Python does, and not with text.
        """
        has_failed = False
        for message in (_PROBE_CALL, _with_text_arguments(_PROBE_CALL)):
            messages = [{"role": "user", "content": "probe"}, message]
            try:
                rendered = self._render(messages, [_PROBE_TOOL], {}, generation_prompt=False)
            except RequestError:
                rendered = ""
            is_written = "probe-value" in rendered and "'probe-key'" not in rendered
            if is_written:
                return has_failed
            has_failed = True
        return False

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        variables: Mapping[str, object],
        *,
        generation_prompt: bool,
    ) -> str:
        reserved_variables = {"messages": list(messages), "tools": tools, "documents": None}
        reserved_variables["add_generation_prompt"] = generation_prompt
        try:
            parts: list[str] = []
            size = 0
            for part in self._template.generate(**(self._special_tokens | dict(variables) | reserved_variables)):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED:
                    raise RequestError("messages", f"messages become more than {MAX_RENDERED} characters; shorten them")
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError("messages", f"messages do not fit the model's chat template: {error}") from error
        return "".join(parts)


_PROBE_TOOL = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}
_PROBE_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        # Some templates accept only ids of nine letters.
        {
            "id": "probecall",
            "type": "function",
            "function": {"name": "probe", "arguments": {"probe-key": "probe-value"}},
        }
    ],
}


def _with_text_arguments(message: Message) -> Message:
    """Return a message in which the arguments of calls are JSON text."""
    calls = cast("Sequence[dict[str, dict[str, object]]]", message.get("tool_calls") or ())
    if not calls:
        return message
    return {
        **message,
        "tool_calls": [
            {**call, "function": {**call["function"], "arguments": _to_json(call["function"]["arguments"])}}
            for call in calls
        ],
    }


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON. Jinja's built-in filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


if TYPE_CHECKING:
    from tokenizers import Tokenizer


REPLACEMENT_CHARACTER = "\ufffd"


class ModelTokenizer:
    """The tokenizer and the chat template of one base model, read from its directory on first use."""

    def __init__(self, shape: ModelShape, tool_parser: str = "auto") -> None:
        """`tool_parser` names the dialect of tool calls; `auto` lets the chat template decide."""
        self._shape = shape
        self._directory = Path(shape.path)
        self._tool_parser = tool_parser

    @property
    def vision(self) -> VisionShape | None:
        """How the model counts image tokens; None for a model of text only."""
        return self._shape.vision

    @cached_property
    def backend_tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        path = self._directory / "tokenizer.json"
        if not path.is_file():
            raise NotSupportedError(f"base model {self._shape.name!r} has no tokenizer.json; send token ids")
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    @cached_property
    def template(self) -> ChatTemplate:

        source = self._template_source()
        if source is None:
            raise NotSupportedError(
                f"base model {self._shape.name!r} has no chat template; send the prompt to /completions"
            )
        return ChatTemplate(source, read_special_tokens(self._shape))

    def _template_source(self) -> str | None:
        path = self._directory / "chat_template.jinja"
        if path.is_file():
            return path.read_text()
        template = json_object(self._directory / "tokenizer_config.json").get("chat_template")
        if isinstance(template, list):  # several, by name
            templates_by_name = {
                str(named_template.get("name")): named_template.get("template")
                for named_template in template
                if isinstance(named_template, dict)
            }
            template = templates_by_name.get("default")
        return template if isinstance(template, str) else None

    @cached_property
    def tool_dialect(self) -> ToolDialect:
        """The form of tool calls. Raises RequestError for a chat template without tools, or of an unknown form."""
        source = self.template.source
        if "tools" not in source:
            raise not_supported("tools", "this model's chat template does not support tools")
        is_named = self._tool_parser != "auto"
        dialect = choose_dialect(self._tool_parser, source) if is_named else detect_dialect(source)
        if dialect is None:
            raise not_supported(
                "tools",
                "this model's chat template shows no known form of calls; name one with --tool-parser",
            )
        if dialect.new_parser is None and find_channels(self) is None:
            raise not_supported(
                "tools",
                f"calls of the form {dialect.name} are messages between tokens, and this model's chat template or "
                f"tokenizer has not all of {', '.join(CHANNEL_TOKENS)}; name another form with --tool-parser",
            )
        return dialect

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Encode a text. `special` adds the tokenizer's special tokens, such as the beginning of the text."""
        _check_text(text)
        return self.backend_tokenizer.encode(text, add_special_tokens=special).ids

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, object] | None = None,
        *,
        generation_prompt: bool = True,
        continues: bool = False,
        special: bool = False,
        images: bool = False,
    ) -> list[int]:
        """Render a conversation with the model's chat template and the generation prompt, and encode it. `continues`
        ends the prompt inside the last message, which the completion continues; `special` is that of `encode`. With
        `images` the prompt has one image token per image.
        """
        if continues:
            rendered = self._render_unfinished(messages, tools, variables or {})
        else:
            rendered = self.template.render(messages, tools, variables or {}, generation_prompt=generation_prompt)
        return self.encode(self._with_image_tokens(rendered) if images else rendered, special=special)

    def _with_image_tokens(self, rendered: str) -> str:
        """Complete the image token's delimiters for templates that write only the first one (transformers,
        Gemma3Processor.full_image_sequence)."""
        vision = self.vision
        if vision is None or vision.begin_token_id is None or vision.end_token_id is None:
            return rendered
        ids = (vision.begin_token_id, vision.image_token_id, vision.end_token_id)
        begin, image, end = (self.backend_tokenizer.id_to_token(token_id) or "" for token_id in ids)
        return rendered.replace(begin, f"\n\n{begin}{image}{end}\n\n") if begin else rendered

    def _render_unfinished(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, variables: Mapping[str, object]
    ) -> str:
        """End the text inside the last message. As in transformers, a marker with a space shows where the message ends
        and whether the template trims spaces.
        """
        marker = secrets.token_hex(16)
        *earlier_messages, last = messages
        marked_message = {**last, "content": f"{last['content']}{marker} "}
        rendered = self.template.render([*earlier_messages, marked_message], tools, variables, generation_prompt=False)
        prompt, separator, after = rendered.rpartition(marker)
        if not separator:
            raise RequestError(
                "continue_final_message", "continue_final_message is set, but the chat template drops the last message"
            )
        return prompt if after.startswith(" ") else prompt.rstrip()

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Decode tokens. `special` keeps special tokens in the text."""
        return self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=not special)

    def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of words, each at the start of a text and after a space."""
        texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
        sequences = (tuple(self.encode(text, special=False)) for text in texts)
        return tuple(dict.fromkeys(ids for ids in sequences if ids))

    def token_id(self, text: str) -> int | None:
        """Return the id of a text that is a single token."""
        return self.backend_tokenizer.token_to_id(text)

    def has_token(self, text: str) -> bool:
        return self.token_id(text) is not None

    def is_added(self, token_id: int) -> bool:
        """Whether a token was added to the vocabulary, so that its text is always this token."""
        return token_id in self._is_special_by_added_id

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` drops a token."""
        return self._is_special_by_added_id.get(token_id, False)

    def token_bytes(self, token_id: int, *, special: bool = True) -> bytes:
        """Return the bytes of a token, which may be a part of a character; without `special`, none of special tokens,
        as `decode` does.
        """
        token = self.backend_tokenizer.id_to_token(token_id)
        if token is None:
            return b""  # the model has more logits than the tokenizer has tokens
        if token_id in self._is_special_by_added_id:
            return b"" if self._is_special_by_added_id[token_id] and not special else token.encode()
        if self._is_byte_level:
            return bytes(_BYTES[letter] for letter in token if letter in _BYTES)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    @cached_property
    def _is_special_by_added_id(self) -> dict[int, bool]:
        """Whether each added token is special."""
        return {
            token_id: token.special for token_id, token in self.backend_tokenizer.get_added_tokens_decoder().items()
        }

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in json.dumps(json.loads(self.backend_tokenizer.to_str()).get("decoder"))

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """All end-of-sequence tokens; the engine reads the same files."""
        ids: set[int] = set()
        config = json_object(self._directory / "config.json")
        text_config = config.get("text_config")
        for source in (
            json_object(self._directory / "generation_config.json"),
            cast("dict[str, object]", text_config) if isinstance(text_config, dict) else config,
        ):
            eos_token_id = source.get("eos_token_id")
            eos_token_ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
            ids.update(token_id for token_id in eos_token_ids if isinstance(token_id, int))
        eos = read_special_tokens(self._shape).get("eos_token")
        if eos is not None and (eos_id := self.backend_tokenizer.token_to_id(eos)) is not None:
            ids.add(eos_id)
        return frozenset(ids)


class ModelTokenizers:
    def __init__(self, tool_parsers: Mapping[str, str] | None = None) -> None:
        """`tool_parsers` are the names of the models' tool parsers; the name "" is every other model."""
        self._lock = threading.Lock()
        self._tool_parsers = dict(tool_parsers or {})
        self._by_model: dict[str, ModelTokenizer] = {}

    def get(self, shape: ModelShape) -> ModelTokenizer:
        parser = self._tool_parsers.get(shape.name, self._tool_parsers.get("", "auto"))
        with self._lock:
            return self._by_model.setdefault(shape.name, ModelTokenizer(shape, parser))


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("messages", "the text contains half of a surrogate pair; remove it") from None


def _byte_alphabet() -> dict[str, int]:
    """Return the alphabet of byte-level tokenizers: printable bytes are themselves, others are letters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(unprintable)}


_BYTES = _byte_alphabet()


TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Opening and closing tags of reasoning."""
SWITCHES = ("enable_thinking", "thinking")
"""The names of the template variable that turns reasoning on and off, the usual one first."""

MAX_SPACE = 4
"""Most tokens of white space that a template may write after the opening tag."""


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tag tokens of reasoning. `in_reasoning`: the prompt ends inside the reasoning; `is_over`: after it."""

    open_id: int
    close_id: int
    in_reasoning: bool = False
    is_over: bool = False


def find_reasoning_tags(tokenizer: ModelTokenizer, prompt: Sequence[int] = ()) -> ReasoningTags | None:
    """Return the tags of a model that reasons, or None."""
    return _tags(tokenizer, prompt, [tags for tags in TAGS if tags[1] in tokenizer.template.source])


def find_any_tags(tokenizer: ModelTokenizer, prompt: Sequence[int] = ()) -> ReasoningTags | None:
    """Return the tags of any model that has them as tokens, whatever its template."""
    return _tags(tokenizer, prompt, TAGS)


@dataclass(frozen=True, slots=True)
class Channels:
    """The tokens of the harmony format (gpt-oss), in which a turn is a sequence of messages with a header each.

    `header` has the tokens of the header at the end of the prompt; with `in_message` it is complete, and the completion
    continues with the message. `reasoning_mode` selects how the channel "analysis" is returned: apart, hidden, or as
    text.
    """

    start_id: int
    channel_id: int
    message_id: int
    end_id: int
    header: tuple[int, ...] = ()
    in_message: bool = False
    reasoning_mode: str = "apart"

    @property
    def begins_turn(self) -> bool:
        """Whether the completion begins with the channel of the turn's first message."""
        return not self.in_message and bool(self.header) and self.channel_id not in self.header


CHANNEL_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")


def find_channels(tokenizer: ModelTokenizer, prompt: Sequence[int] = ()) -> Channels | None:
    """Return the channels of a model whose chat template writes them, or None."""
    start_id, channel_id, message_id, end_id = (tokenizer.token_id(token) for token in CHANNEL_TOKENS)
    if CHANNEL_TOKENS[1] not in tokenizer.template.source or start_id is None or channel_id is None:
        return None
    if message_id is None or end_id is None:
        return None
    channels = Channels(start_id, channel_id, message_id, end_id)
    tokens = list(prompt)
    if channels.start_id not in tokens:
        return channels
    last_message = tokens[len(tokens) - tokens[::-1].index(channels.start_id) :]
    if channels.end_id in last_message:
        return channels
    in_message = channels.message_id in last_message
    header = last_message[: last_message.index(channels.message_id)] if in_message else last_message
    return replace(channels, header=tuple(header), in_message=in_message)


def _tags(
    tokenizer: ModelTokenizer, prompt: Sequence[int], tag_pairs: Sequence[tuple[str, str]]
) -> ReasoningTags | None:
    for opening, closing in tag_pairs:
        open_id, close_id = tokenizer.token_id(opening), tokenizer.token_id(closing)
        if open_id is not None and close_id is not None:
            last_id = _last_token(tokenizer, prompt)
            return ReasoningTags(open_id, close_id, last_id == open_id, last_id == close_id)
    return None


def _last_token(tokenizer: ModelTokenizer, prompt: Sequence[int]) -> int | None:
    """Return the last token of a prompt before white space."""
    last_ids = reversed(prompt[-MAX_SPACE - 1 :])
    return next((token_id for token_id in last_ids if tokenizer.token_bytes(token_id).strip()), None)
