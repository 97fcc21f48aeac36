"""The parser of dialects whose calls begin with a mark, such as `<tool_call>`.

A dialect says how one call is read after the mark. If the text after a mark is not a call, the mark is text, and the
search for the next one goes on directly after it: a broken call does not hide those that follow. A mark may begin a
section of several calls: after a call, either another one or the closing follows, or the section is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tinsmith.chat.calls import CallArguments, CallEnd, CallEvent, CallStart, MarkEvent, TextEvent
from tinsmith.chat.dialects.json_objects import NotACallError


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A call as it was read. `arguments` is JSON text, and `end` is the offset after the call. Without a name it is
    something else in the place of a call.
    """

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


NewReader = Callable[[int], CallReader]
"""Makes the reader of a call from the offset of its mark in the text."""


@dataclass(frozen=True, slots=True)
class Section:
    """What follows a call: `next_mark` begins another one, and `closings` end the section, all but the first of them
    optional.
    """

    next_mark: str
    new_reader: NewReader
    closings: tuple[str, ...]


class MarkedParser:
    def __init__(
        self, marks: Iterable[tuple[str, NewReader]], section: Section | None = None, *, line_marks: Iterable[str] = ()
    ) -> None:
        """`line_marks` are marks only at the beginning of a line."""
        self._readers = dict(marks)
        self._section = section
        self._line_marks = frozenset(line_marks)
        self._text = ""
        self._at = 0  # offset in `_text` of the first undecided character
        self._search_starts: dict[str, int] = {}  # by mark, the offset before which it is not
        self._mark = ""  # the mark of the reader
        self._reader: CallReader | None = None  # set while a call may begin at `_at`
        self._closings: tuple[str, ...] | None = None  # set after a call of a section; those that may follow
        self._is_line_start = True  # whether only spaces precede `_at` in its line

    def feed(self, text: str) -> Iterable[CallEvent]:
        self._text += text
        return self._read()

    def finish(self) -> Iterator[CallEvent]:
        while self._reader is not None or self._closings is not None:
            if self._reader is not None:
                yield from self._reject()
            self._closings = None
            yield from self._read()
        if self._at < len(self._text):
            yield TextEvent(self._take_up_to(len(self._text)))

    def _read(self) -> Iterator[CallEvent]:
        while True:
            if self._reader is None and self._closings is not None:
                if not (yield from self._continue_section()):
                    return
                continue
            if self._reader is None and not (yield from self._find_mark()):
                return
            assert self._reader is not None
            try:
                call = self._reader.read(self._text)
            except NotACallError:
                yield from self._reject()
                continue
            if call is None:
                return
            self._reader = None
            self._closings = None if self._section is None else self._section.closings
            yield from self._take_call(call)

    def _take_call(self, call: ReadCall) -> Iterator[CallEvent]:
        source = self._take_up_to(call.end)
        yield CallStart(call.name, source)
        yield CallArguments(call.arguments, "")
        yield CallEnd("")

    def _find_mark(self) -> Iterator[CallEvent]:
        """Go to the next mark and make its reader; returns False at the end of the text."""
        before, mark = self._next_mark()
        if before > self._at:
            yield TextEvent(self._take_up_to(before))
        if not mark:
            self._search_starts = {word: start - self._at for word, start in self._search_starts.items()}
            self._text, self._at = self._text[self._at :], 0
            return False
        self._mark, self._reader = mark, self._readers[mark](self._at)
        return True

    def _next_mark(self) -> tuple[int, str]:
        """Return where the next mark begins, or may begin, and the mark, or "" while it is incomplete."""
        num_partial = max(partial_length(self._text, mark) for mark in self._readers)
        best = max(len(self._text) - num_partial, self._at), ""
        for mark in self._readers:
            at = self._find(mark)
            if at >= 0 and (at < best[0] or (at == best[0] and len(mark) > len(best[1]))):
                best = at, mark
        return best

    def _find(self, mark: str) -> int:
        """Return the offset of the next occurrence of a mark, or -1. No character is searched twice."""
        start = max(self._search_starts.get(mark, 0), self._at)
        at = self._text.find(mark, start)
        while at >= 0 and mark in self._line_marks and not self._begins_line(at):
            at = self._text.find(mark, at + 1)
        self._search_starts[mark] = at if at >= 0 else max(len(self._text) - len(mark) + 1, start)
        return at

    def _begins_line(self, at: int) -> bool:
        line_start = self._text.rfind("\n", self._at, at) + 1
        if line_start:
            return not self._text[line_start:at].strip()
        return self._is_line_start and not self._text[self._at : at].strip()

    def _continue_section(self) -> Iterator[CallEvent]:
        """Decide what follows a call; returns False while that is undecided."""
        assert self._section is not None and self._closings is not None
        start = self._at
        while start < len(self._text) and self._text[start].isspace():
            start += 1
        can_repeat = self._closings == self._section.closings
        words = [*self._closings[:1], *([self._section.next_mark] if can_repeat else [])]
        word = next((word for word in words if self._text.startswith(word, start)), None)
        if word is None and any(word.startswith(self._text[start:]) for word in words):
            return False
        if word is not None and word == self._section.next_mark and can_repeat:
            self._mark, self._reader = self._text[self._at : start] + word, self._section.new_reader(start)
            self._closings = None
        elif word is not None:
            self._closings = self._closings[1:] or None
            yield MarkEvent(self._take_up_to(start + len(word)))
        else:
            self._closings = None
        return True

    def _reject(self) -> Iterator[CallEvent]:
        """Return the mark as text."""
        self._reader = None
        yield TextEvent(self._take_up_to(self._at + len(self._mark)))

    def _take_up_to(self, end: int) -> str:
        source = self._text[self._at : end]
        line = source.rpartition("\n")
        self._is_line_start = (bool(line[1]) or self._is_line_start) and not line[2].strip()
        self._at = end
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


def skip_words(text: str, start: int, words: Iterable[str]) -> int | None:
    """Return the offset after words with white space before each; None while one is incomplete. Raises NotACallError
    if another text follows.
    """
    at = start
    for word in words:
        if not follows(text, at, word):
            return None
        at = text.index(word, at) + len(word)
    return at
