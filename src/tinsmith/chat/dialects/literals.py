"""Values as literals, such as `[1, {"a": True}]`: finds their end in growing text, and reads them.

Two dialects write arguments so. Python's literals have quotation marks and escapes; Gemma 4's strings stand between
marks and have no escapes, and its keys have no quotation marks. JSON's literals are read in both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tinsmith.chat.calls import read_json
from tinsmith.chat.dialects.json_objects import NotACallError

MAX_DEPTH = 64
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[-+.\w]+", re.ASCII)
_KEY = re.compile(r"[^\s:,{}\[\]()\"'<>]+")
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8})|(\r\n|[\s\S]))")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}


MAX_NAME = 128
_NAME = re.compile(r"\s*([\w.-]*)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class LiteralForm:
    """`quotes` begin and end strings; those of one character have escapes, and no line ends."""

    quotes: tuple[str, ...]


PYTHON = LiteralForm(('"', "'"))
GEMMA = LiteralForm(('<|"|>', '"'))


def read_name(text: str, start: int, bracket: str) -> tuple[str, int] | None:
    """Return the name before an open `bracket` and the offset after it, or None while they are incomplete. Raises
    NotACallError if something else follows.
    """
    match = _NAME.match(text, start)
    end = start if match is None else match.end()
    if end == len(text) and end - start <= MAX_NAME:
        return None
    if match is None or not match[1] or not text.startswith(bracket, end):
        raise NotACallError(end)
    return match[1], end + 1


class LiteralScanner:
    """Finds the bracket that closes an open one, in time linear in the text."""

    def __init__(self, start: int, bracket: str, form: LiteralForm) -> None:
        """`start` is the offset after the open `bracket`."""
        self._at = start
        self._open = [_CLOSING[bracket]]
        self._form = form
        self._quote = ""  # of the string at the offset

    def end_in(self, text: str) -> int | None:
        """Return the offset after the closing bracket, or None while the text, which may only grow between calls, is
        incomplete. Raises NotACallError.
        """
        while self._at < len(text):
            if self._quote:
                if not self._skip_string(text):
                    return None
                continue
            letter = text[self._at]
            quote = next((quote for quote in self._form.quotes if text.startswith(quote, self._at)), None)
            if quote is not None:
                self._quote, self._at = quote, self._at + len(quote)
                continue
            if any(quote.startswith(text[self._at :]) for quote in self._form.quotes):
                return None
            self._at += 1
            if letter in _CLOSING:
                if len(self._open) > MAX_DEPTH:
                    raise NotACallError(self._at - 1)
                self._open.append(_CLOSING[letter])
            elif letter in ")]}":
                if letter != self._open.pop():
                    raise NotACallError(self._at - 1)
                if not self._open:
                    return self._at
        return None

    def _skip_string(self, text: str) -> bool:
        """Go to the end of the string, or return False at the end of the text."""
        if len(self._quote) > 1:
            end = text.find(self._quote, self._at)
            if end < 0:
                self._at = max(self._at, len(text) - len(self._quote) + 1)
                return False
            self._at, self._quote = end + len(self._quote), ""
            return True
        while self._at < len(text):
            letter = text[self._at]
            if letter == "\n":
                raise NotACallError(self._at)
            if letter == "\\":
                if self._at + 1 == len(text):
                    return False
                self._at += 2
                continue
            self._at += 1
            if letter == self._quote:
                self._quote = ""
                return True
        return False


class LiteralReader:
    """Reads values from complete text; every method starts at `at`. Raises NotACallError."""

    def __init__(self, text: str, form: LiteralForm) -> None:
        self.at = 0
        self._text = text
        self._form = form

    def read_arguments(self, separator: str) -> dict[str, object]:
        """Read `NAME separator VALUE` items up to the end of the text."""
        arguments: dict[str, object] = {}
        while True:
            self._skip_space()
            if self.at == len(self._text):
                return arguments
            key = self._read_key()
            if key in arguments:
                raise NotACallError(self.at)
            self._expect(separator)
            arguments[key] = self._read_value(0)
            if not self._takes(",") and self._skip_space() < len(self._text):
                raise NotACallError(self.at)

    def _read_key(self) -> str:
        if (text := self._read_string()) is not None:
            return text
        match = _KEY.match(self._text, self._skip_space())
        key = "" if match is None else match[0].partition("=")[0]
        if not key:
            raise NotACallError(self.at)
        self.at += len(key)
        return key

    def _read_value(self, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise NotACallError(self.at)
        if (text := self._read_string()) is not None:
            return text
        if self._takes("["):
            return self._read_items("]", depth)
        if self._takes("("):
            return self._read_items(")", depth)
        if self._takes("{"):
            return self._read_object(depth)
        match = _WORD.match(self._text, self.at)
        if match is None:
            raise NotACallError(self.at)
        self.at = match.end()
        if match[0].lower() in _WORDS:
            return _WORDS[match[0].lower()]
        try:
            return read_json(match[0])
        except ValueError:
            raise NotACallError(match.start()) from None

    def _read_items(self, closing: str, depth: int) -> list[object]:
        items: list[object] = []
        while not self._takes(closing):
            items.append(self._read_value(depth + 1))
            if not self._takes(","):
                self._expect(closing)
                break
        return items

    def _read_object(self, depth: int) -> dict[str, object]:
        value: dict[str, object] = {}
        while not self._takes("}"):
            key = self._read_key()
            self._expect(":")
            value[key] = self._read_value(depth + 1)
            if not self._takes(","):
                self._expect("}")
                break
        return value

    def _read_string(self) -> str | None:
        start = self._skip_space()
        quote = next((quote for quote in self._form.quotes if self._text.startswith(quote, start)), None)
        if quote is None:
            return None
        at = start + len(quote)
        while (end := self._text.find(quote, at)) >= 0:
            before = self._text[start + len(quote) : end]
            num_backslashes = len(before) - len(before.rstrip("\\"))
            if len(quote) > 1 or num_backslashes % 2 == 0:
                self.at = end + len(quote)
                return before if len(quote) > 1 else unescape(before)
            at = end + 1
        raise NotACallError(start)

    def _takes(self, word: str) -> bool:
        if not self._text.startswith(word, self._skip_space()):
            return False
        self.at += len(word)
        return True

    def _expect(self, word: str) -> None:
        if not self._takes(word):
            raise NotACallError(self.at)

    def _skip_space(self) -> int:
        match = _SPACE.match(self._text, self.at)
        self.at = self.at if match is None else match.end()
        return self.at


def unescape(text: str) -> str:
    """Replace the escapes of Python and JSON. Raises NotACallError for halves of surrogate pairs."""
    replaced = _ESCAPE.sub(_replace_escape, text)
    try:
        return replaced.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise NotACallError(0) from None


def _replace_escape(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code is not None:
        return chr(int(code, 16)) if int(code, 16) <= 0x10FFFF else match[0]
    letter = match[4]
    return _ESCAPED.get(letter, letter if letter in "\\'\"/" else match[0])
