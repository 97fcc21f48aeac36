"""The parser of dialects whose calls begin with a mark, such as `<tool_call>`.

A dialect says how one call is read after the mark. If the text after a mark is not a call, the mark is text, and the
search for the next one goes on directly after it: a broken call does not hide those that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tinsmith.chat.calls import CallArguments, CallEnd, CallEvent, CallStart, TextEvent
from tinsmith.chat.dialects.json_objects import NotACallError


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A call as it was read. `arguments` is JSON text, and `end` is the offset after the call."""

    name: str
    arguments: str
    end: int


class CallReader(Protocol):
    """Reads one call. It keeps its position, so that no character is read twice."""

    def read(self, text: str) -> ReadCall | None:
        """Return the call, or None while the text, which may only grow between calls, is incomplete. Raises
        NotACallError.
        """
        ...


class MarkedParser:
    def __init__(self, mark: str, new_reader: Callable[[int], CallReader]) -> None:
        """`new_reader` makes the reader of a call from the offset of its mark in the text."""
        self._mark = mark
        self._new_reader = new_reader
        self._text = ""
        self._at = 0  # offset in `_text` of the first undecided character
        self._reader: CallReader | None = None  # set while a mark begins at `_at`

    def feed(self, text: str) -> Iterable[CallEvent]:
        self._text += text
        return self._read()

    def finish(self) -> Iterator[CallEvent]:
        while self._reader is not None:
            yield self._reject()
            yield from self._read()
        if self._at < len(self._text):
            yield TextEvent(self._take_up_to(len(self._text)))

    def _read(self) -> Iterator[CallEvent]:
        while True:
            if self._reader is None:
                if (before := self._next_mark()) > self._at:
                    yield TextEvent(self._take_up_to(before))
                if not self._text.startswith(self._mark, self._at):
                    self._text, self._at = self._text[self._at :], 0
                    return
                self._reader = self._new_reader(self._at)
            try:
                call = self._reader.read(self._text)
            except NotACallError:
                yield self._reject()
                continue
            if call is None:
                return
            self._reader = None
            yield CallStart(call.name, self._take_up_to(call.end))
            yield CallArguments(call.arguments, "")
            yield CallEnd("")

    def _next_mark(self) -> int:
        """Return where the next mark begins, or may begin."""
        at = self._text.find(self._mark, self._at)
        return at if at >= 0 else max(len(self._text) - partial_length(self._text, self._mark), self._at)

    def _reject(self) -> TextEvent:
        """Return the mark as text."""
        self._reader = None
        return TextEvent(self._take_up_to(self._at + len(self._mark)))

    def _take_up_to(self, end: int) -> str:
        source, self._at = self._text[self._at : end], end
        return source


def partial_length(text: str, word: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a word."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)


def follows(text: str, start: int, word: str) -> bool | None:
    """Whether `word` follows white space at `start`; None while that is undecided. Raises NotACallError if not."""
    at = start
    while at < len(text) and text[at].isspace():
        at += 1
    if text.startswith(word, at):
        return True
    if word.startswith(text[at:]):
        return None
    raise NotACallError(at)
