"""A base model's text side: its tokenizer and chat template, read from its directory without torch.

`Texts` reads each model's files once, when they are first needed. Everything here is called from several threads; the
tokenizer itself is safe to share. A model without a tokenizer or a template is refused by name, request by request.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tinsmith.base_models import json_object, named_tokens
from tinsmith.chat.refusals import RequestError
from tinsmith.errors import NotSupportedError
from tinsmith.types import ModelShape

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tinsmith.chat.templates import ChatTemplate, Message

UNFINISHED = "\ufffd"


class Text:
    """One model's."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._directory = Path(shape.path)

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
        from tinsmith.chat.templates import ChatTemplate

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
    ) -> list[int]:
        """A conversation as the model was taught to read it, up to where its own turn begins."""
        return self.encode(self.template.render(messages, tools, variables or {}), special=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token_id(self, text: str) -> int | None:
        """Of a text that is a token of its own."""
        return self.tokenizer.token_to_id(text)

    def has_token(self, text: str) -> bool:
        return self.token_id(text) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for; a part of a character, for some."""
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
        """Whatever ends an answer, as the engine has it."""
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
        raise RequestError("messages", "the text holds half of a surrogate pair, which is no character") from None


def _byte_alphabet() -> dict[str, int]:
    """Byte-level tokenizers write each byte as one letter: the printable ones as themselves, the others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()
