"""Tokenizers and chat templates of base models, read from their directories without torch.

`Texts` reads each model's files once, on first use. All functions may be called from several threads, and a tokenizer
can be shared between threads. Requests that need a missing tokenizer or template are refused by name.

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
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinsmith.base_models import json_object, read_special_tokens
from tinsmith.errors import NotSupportedError, RequestError
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
        return CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    @staticmethod
    def _as_it_is(caller: jinja2.runtime.Macro) -> str:
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
        given = {"messages": list(messages), "tools": tools, "documents": None}
        given["add_generation_prompt"] = generation_prompt
        try:
            parts: list[str] = []
            size = 0
            for part in self._template.generate(**(self._special_tokens | dict(variables) | given)):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED:
                    raise RequestError("messages", f"messages become more than {MAX_RENDERED} characters; shorten them")
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError("messages", f"messages do not fit the model's chat template: {error}") from error
        return "".join(parts)


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


UNFINISHED = "\ufffd"


class Text:
    """One model's."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._directory = Path(shape.path)

    @property
    def vision(self) -> VisionShape | None:
        """How the model counts image tokens; None for a model of text only."""
        return self._shape.vision

    @cached_property
    def tokenizer(self) -> Tokenizer:
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
        found = json_object(self._directory / "tokenizer_config.json").get("chat_template")
        if isinstance(found, list):  # several, by name
            named = {str(one.get("name")): one.get("template") for one in found if isinstance(one, dict)}
            found = named.get("default")
        return found if isinstance(found, str) else None

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Encode a text. `special` adds the tokenizer's special tokens, such as the beginning of the text."""
        _check_text(text)
        return self.tokenizer.encode(text, add_special_tokens=special).ids

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
            rendered = self._unfinished(messages, tools, variables or {})
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
        begin, image, end = (self.tokenizer.id_to_token(token_id) or "" for token_id in ids)
        return rendered.replace(begin, f"\n\n{begin}{image}{end}\n\n") if begin else rendered

    def _unfinished(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, variables: Mapping[str, object]
    ) -> str:
        """End the text inside the last message. As in transformers, a marker with a space shows where the message ends
        and whether the template trims spaces.
        """
        mark = secrets.token_hex(16)
        *before, last = messages
        marked = {**last, "content": f"{last['content']}{mark} "}
        rendered = self.template.render([*before, marked], tools, variables, generation_prompt=False)
        text, found, after = rendered.rpartition(mark)
        if not found:
            raise RequestError(
                "continue_final_message", "continue_final_message is set, but the chat template drops the last message"
            )
        return text if after.startswith(" ") else text.rstrip()

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Decode tokens. `special` keeps special tokens in the text."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=not special)

    def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of words, each at the start of a text and after a space."""
        texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
        found = (tuple(self.encode(text, special=False)) for text in texts)
        return tuple(dict.fromkeys(ids for ids in found if ids))

    def token_id(self, text: str) -> int | None:
        """Return the id of a text that is a single token."""
        return self.tokenizer.token_to_id(text)

    def has_token(self, text: str) -> bool:
        return self.token_id(text) is not None

    def token_bytes(self, token_id: int, *, special: bool = True) -> bytes:
        """Return the bytes of a token, which may be a part of a character; without `special`, none of special tokens,
        as `decode` does.
        """
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""  # the model has more logits than the tokenizer has tokens
        if token_id in self._added:
            return b"" if self._added[token_id] and not special else token.encode()
        if self._is_byte_level:
            return bytes(_BYTES[letter] for letter in token if letter in _BYTES)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    @cached_property
    def _added(self) -> dict[int, bool]:
        """Whether each added token is special."""
        return {token_id: token.special for token_id, token in self.tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in json.dumps(json.loads(self.tokenizer.to_str()).get("decoder"))

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """All end-of-sequence tokens; the engine reads the same files."""
        ids: set[int] = set()
        config = json_object(self._directory / "config.json")
        text_config = config.get("text_config")
        for one in (
            json_object(self._directory / "generation_config.json"),
            cast("dict[str, object]", text_config) if isinstance(text_config, dict) else config,
        ):
            found = one.get("eos_token_id")
            ids.update(each for each in (found if isinstance(found, list) else [found]) if isinstance(each, int))
        eos = read_special_tokens(self._shape).get("eos_token")
        if eos is not None and (token_id := self.tokenizer.token_to_id(eos)) is not None:
            ids.add(token_id)
        return frozenset(ids)


class Texts:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, Text] = {}

    def of(self, shape: ModelShape) -> Text:
        with self._lock:
            return self._of.setdefault(shape.name, Text(shape))


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("messages", "the text contains half of a surrogate pair; remove it") from None


def _byte_alphabet() -> dict[str, int]:
    """Return the alphabet of byte-level tokenizers: printable bytes are themselves, others are letters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Opening and closing tags of reasoning."""
SWITCH = "enable_thinking"
"""The template variable that turns reasoning on and off, if the template has one."""

MAX_SPACE = 4
"""Most tokens of white space that a template may write after the opening tag."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tag tokens of reasoning. `begun`: the prompt ends inside the reasoning."""

    open_id: int
    close_id: int
    begun: bool = False


def thinking_of(text: Text, prompt: Sequence[int] = ()) -> Thinking | None:
    """Return the tags of a model that reasons, or None."""
    return _tags(text, prompt, [tags for tags in TAGS if tags[1] in text.template.source])


def tags_of(text: Text, prompt: Sequence[int] = ()) -> Thinking | None:
    """Return the tags of any model that has them as tokens, whatever its template."""
    return _tags(text, prompt, TAGS)


@dataclass(frozen=True, slots=True)
class Channels:
    """The tokens of the harmony format (gpt-oss), in which a turn is a sequence of messages with a header each.

    `header` has the tokens of the header at the end of the prompt; with `begun` it is complete, and the completion
    continues with the message. `thoughts` selects how the channel "analysis" is returned: apart, hidden, or as text.
    """

    start_id: int
    channel_id: int
    message_id: int
    end_id: int
    header: tuple[int, ...] = ()
    begun: bool = False
    thoughts: str = "apart"


CHANNEL_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")


def channels_of(text: Text, prompt: Sequence[int] = ()) -> Channels | None:
    """Return the channels of a model whose chat template writes them, or None."""
    start_id, channel_id, message_id, end_id = (text.token_id(each) for each in CHANNEL_TOKENS)
    if CHANNEL_TOKENS[1] not in text.template.source or start_id is None or channel_id is None:
        return None
    if message_id is None or end_id is None:
        return None
    found = Channels(start_id, channel_id, message_id, end_id)
    tokens = list(prompt)
    if found.start_id not in tokens:
        return found
    last = tokens[len(tokens) - tokens[::-1].index(found.start_id) :]
    if found.end_id in last:
        return found
    begun = found.message_id in last
    header = last[: last.index(found.message_id)] if begun else last
    return replace(found, header=tuple(header), begun=begun)


def _tags(text: Text, prompt: Sequence[int], among: Sequence[tuple[str, str]]) -> Thinking | None:
    for opening, closing in among:
        open_id, close_id = text.token_id(opening), text.token_id(closing)
        if open_id is not None and close_id is not None:
            return Thinking(open_id, close_id, _is_begun(text, prompt, open_id))
    return None


def _is_begun(text: Text, prompt: Sequence[int], open_id: int) -> bool:
    for token_id in reversed(prompt[-MAX_SPACE - 1 :]):
        if token_id == open_id:
            return True
        if text.token_bytes(token_id).strip():
            return False
    return False
