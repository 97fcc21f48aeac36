"""Finds the end of a JSON object in text that grows, in time linear in its length.

The scan knows the structure of JSON: braces, brackets, strings and separators. Numbers and literals are read loosely;
the caller parses the complete object. Text that cannot become an object is noticed at its first wrong character.
"""

from __future__ import annotations

import re
from enum import Enum, auto

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'[^"\\]*')
_LINE_STRING = re.compile(r'[^"\\\r\n]*')
_SCALAR = re.compile(r"[-+.\w]*", re.ASCII)
_CLOSING = {"{": "}", "[": "]"}


class NotACallError(Exception):
    """The text at this position is not a call. `at` is the first character that shows it."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class _Next(Enum):
    """What the grammar expects at the position."""

    OBJECT = auto()
    FIRST_KEY = auto()
    KEY = auto()
    KEY_TEXT = auto()
    COLON = auto()
    VALUE = auto()
    FIRST_VALUE = auto()
    VALUE_TEXT = auto()
    SCALAR = auto()
    SEPARATOR = auto()


class ObjectScanner:
    def __init__(self, start: int, *, allows_lines: bool = True) -> None:
        """`start` is where the object, or white space before it, begins. `allows_lines`: whether strings may contain
        line ends, which models write although JSON does not allow them.
        """
        self._at = start
        self._next = _Next.OBJECT
        self._open: list[str] = []  # the braces and brackets that are open
        self._string = _STRING if allows_lines else _LINE_STRING

    def end_in(self, text: str) -> int | None:
        """Return the end of the object, or None while the text, which may only grow between calls, is incomplete.
        Raises NotACallError.
        """
        while self._at < len(text):
            if self._next in (_Next.KEY_TEXT, _Next.VALUE_TEXT):
                if not self._skip_string(text):
                    return None
                continue
            if self._next is _Next.SCALAR:
                self._at = _end(_SCALAR, text, self._at)
                if self._at < len(text):
                    self._next = _Next.SEPARATOR
                continue
            self._at = _end(_SPACE, text, self._at)
            if self._at < len(text):
                self._step(text[self._at])
                self._at += 1
                if not self._open:
                    return self._at
        return None

    def _skip_string(self, text: str) -> bool:
        """Go to the end of the string, or return False at the end of the text."""
        self._at = _end(self._string, text, self._at)
        if self._at >= len(text) or (text[self._at] == "\\" and self._at + 1 == len(text)):
            return False
        if text[self._at] == '"':
            self._next = _Next.COLON if self._next is _Next.KEY_TEXT else _Next.SEPARATOR
            self._at += 1
        elif text[self._at] == "\\":
            self._at += 2
        else:
            raise NotACallError(self._at)
        return True

    def _step(self, character: str) -> None:
        """Take a character outside of strings."""
        expected = self._next
        if character == '"' and expected in (_Next.FIRST_KEY, _Next.KEY):
            self._next = _Next.KEY_TEXT
        elif character == ":" and expected is _Next.COLON:
            self._next = _Next.VALUE
        elif expected is _Next.OBJECT and character != "{":
            raise NotACallError(self._at)
        elif expected in (_Next.OBJECT, _Next.VALUE, _Next.FIRST_VALUE) and self._begins_value(character):
            pass
        elif character == "," and expected is _Next.SEPARATOR:
            self._next = _Next.KEY if self._open[-1] == "{" else _Next.VALUE
        elif expected in self._before_close() and character == _CLOSING[self._open[-1]]:
            self._open.pop()
            self._next = _Next.SEPARATOR
        else:
            raise NotACallError(self._at)

    def _begins_value(self, character: str) -> bool:
        if character == "{":
            self._open.append(character)
            self._next = _Next.FIRST_KEY
        elif character == "[":
            self._open.append(character)
            self._next = _Next.FIRST_VALUE
        elif character == '"':
            self._next = _Next.VALUE_TEXT
        elif _SCALAR.fullmatch(character):
            self._next = _Next.SCALAR
        else:
            return False
        return True

    def _before_close(self) -> tuple[_Next, ...]:
        if not self._open:
            return ()
        return (_Next.SEPARATOR, _Next.FIRST_KEY if self._open[-1] == "{" else _Next.FIRST_VALUE)


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return start if match is None else match.end()
