"""A base model's text side: its tokenizer and chat template, read from its directory without torch.

`Texts` reads each model's files once, when they are first needed. Everything here is called from several threads; the
tokenizer itself is safe to share. A model without a tokenizer or a template is refused by name, request by request.

Chat templates: a model's own Jinja program that writes a conversation as text, run in a sandbox.

The environment is that of transformers (its version 5, utils/chat_template_utils.py): the
same filters, functions and white space, so that the text is the same. Templates come with the model; what they are
given comes from clients and is plain JSON.

Thinking: text between two special tokens before the answer, which is shown apart from it.

A base model thinks if its chat template has a closing mark of MARKS and its tokenizer has both marks as tokens: text
that only looks like a mark is text. Some templates begin the thought in the prompt.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinsmith.base_models import json_object, named_tokens
from tinsmith.errors import NotSupportedError, RequestError
from tinsmith.types import ModelShape, VisionShape

Message = Mapping[str, object]

MAX_RENDERED = 16 << 20
"""Characters of one conversation."""


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
        """`special_tokens` by the names that templates call them: bos_token, eos_token, ..."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
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
        """The conversation, with `generation_prompt` up to where the model's turn begins. Raises RequestError with the
        template's own reason.
        """
        given = {"messages": list(messages), "tools": tools, "documents": None}
        given["add_generation_prompt"] = generation_prompt
        try:
            parts: list[str] = []
            size = 0
            for part in self._template.generate(**(self._special_tokens | dict(variables) | given)):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED:
                    raise RequestError("messages", f"messages become more than {MAX_RENDERED} characters of prompt")
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
    """Jinja's own filter would escape what HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


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
        """How the model counts images; None if it takes text only."""
        return self._shape.vision

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        path = self._directory / "tokenizer.json"
        if not path.is_file():
            raise NotSupportedError(f"base model {self._shape.name!r} has no tokenizer.json; send it token ids")
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
        return ChatTemplate(source, named_tokens(self._shape))

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
        """`special` adds what the tokenizer puts around a text (the beginning of the text, for some)."""
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
    ) -> list[int]:
        """The prompt of a conversation in the model's chat template, with the generation prompt. `continues` ends it
        within the last message, which the answer continues; `special` is that of `encode`.
        """
        if continues:
            return self.encode(self._unfinished(messages, tools, variables or {}), special=special)
        rendered = self.template.render(messages, tools, variables or {}, generation_prompt=generation_prompt)
        return self.encode(rendered, special=special)

    def _unfinished(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, variables: Mapping[str, object]
    ) -> str:
        """As transformers does it: a mark with a space shows where the message ends, and whether spaces are trimmed."""
        mark = secrets.token_hex(16)
        *before, last = messages
        marked = {**last, "content": f"{last['content']}{mark} "}
        rendered = self.template.render([*before, marked], tools, variables, generation_prompt=False)
        text, found, after = rendered.rpartition(mark)
        if not found:
            raise RequestError(
                "continue_final_message", "continue_final_message: the chat template leaves out the last message"
            )
        return text if after.startswith(" ") else text.rstrip()

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """`special` keeps special tokens in the text."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=not special)

    def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of words, each at the beginning of a text and after a space."""
        texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
        found = (tuple(self.encode(text, special=False)) for text in texts)
        return tuple(dict.fromkeys(ids for ids in found if ids))

    def token_id(self, text: str) -> int | None:
        """Of a text that is a token of its own."""
        return self.tokenizer.token_to_id(text)

    def has_token(self, text: str) -> bool:
        return self.token_id(text) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; some are a part of a character."""
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""  # the model has more logits than the tokenizer has tokens
        if token_id in self._added:
            return token.encode()
        if self._is_byte_level:
            return bytes(_BYTES[letter] for letter in token if letter in _BYTES)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.tokenizer.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in json.dumps(json.loads(self.tokenizer.to_str()).get("decoder"))

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """All end-of-sequence tokens, as the engine reads them."""
        ids: set[int] = set()
        config = json_object(self._directory / "config.json")
        text_config = config.get("text_config")
        for one in (
            json_object(self._directory / "generation_config.json"),
            cast("dict[str, object]", text_config) if isinstance(text_config, dict) else config,
        ):
            found = one.get("eos_token_id")
            ids.update(each for each in (found if isinstance(found, list) else [found]) if isinstance(each, int))
        eos = named_tokens(self._shape).get("eos_token")
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
        raise RequestError("messages", "the text holds half of a surrogate pair, which is not a character") from None


def _byte_alphabet() -> dict[str, int]:
    """Byte-level tokenizers write each byte as one letter: the printable ones as themselves, the others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""What models write around a thought."""
SWITCH = "enable_thinking"
"""The template's variable that turns thinking on and off, where it has one."""

MOST_SPACE = 4
"""Tokens of white space that a template may write after the mark."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks' tokens; `begun`: the prompt ends inside a thought."""

    open_id: int
    close_id: int
    begun: bool = False


def thinking_of(text: Text, prompt: Sequence[int] = ()) -> Thinking | None:
    """How a model thinks in its answer to a prompt; None for one that does not."""
    return _marks(text, prompt, [marks for marks in MARKS if marks[1] in text.template.source])


def marks_of(text: Text, prompt: Sequence[int] = ()) -> Thinking | None:
    """The marks of any model that has them as tokens, without a look at its template."""
    return _marks(text, prompt, MARKS)


def _marks(text: Text, prompt: Sequence[int], among: Sequence[tuple[str, str]]) -> Thinking | None:
    for opening, closing in among:
        open_id, close_id = text.token_id(opening), text.token_id(closing)
        if open_id is not None and close_id is not None:
            return Thinking(open_id, close_id, _is_begun(text, prompt, open_id))
    return None


def _is_begun(text: Text, prompt: Sequence[int], open_id: int) -> bool:
    for token_id in reversed(prompt[-MOST_SPACE - 1 :]):
        if token_id == open_id:
            return True
        if text.token_bytes(token_id).strip():
            return False
    return False
