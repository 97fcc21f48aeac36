"""Tool calls in a completion: the events of a dialect's parser, and the assembler that turns them into text and calls.

A dialect is a `DialectParser`. It turns text, cut anywhere, into events: text, the start of a call with its name,
arguments as JSON text, the end of the call, and the end of a section of calls. Each event has its characters of the
completion, so that the sources of all events are the completion. The cuts decide only how text is divided into events.

`CallAssembler` is the only reader of events, for whole completions and streams. A call counts once it is complete,
names a tool of the request, and has an object as arguments (none, null and an object written as a string are read as
the object). Every other call becomes text, character for character. White space beside a call belongs to it.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call. `arguments` is JSON text; `index` is the call's number in its completion."""

    call_id: str
    name: str
    arguments: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class TextEvent:
    source: str


@dataclass(frozen=True, slots=True)
class CallStart:
    name: str
    source: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of the call's arguments as JSON text."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    source: str


@dataclass(frozen=True, slots=True)
class MarkEvent:
    """The end of a section of calls. It is part of the call before it, and text if that is text."""

    source: str


CallEvent = TextEvent | CallStart | CallArguments | CallEnd | MarkEvent
"""A call without its end, followed by text or by the end of the completion, is not a call."""


class DialectParser(Protocol):
    """An incremental parser of one completion."""

    def feed(self, text: str) -> Iterable[CallEvent]:
        """Return the events that the next characters decide."""
        ...

    def finish(self) -> Iterable[CallEvent]:
        """Return the events of the characters that were undecided at the end of the completion."""
        ...


class CallAssembler:
    """The text and the calls of one completion, in order."""

    def __init__(
        self, names: Collection[str], parser: DialectParser | None = None, max_calls: int | None = None
    ) -> None:
        """`names` are the tools of the request. Without a parser, the caller takes events itself. The completion ends
        with call `max_calls`.
        """
        self.num_calls = 0
        self.first_call_at: int | None = None
        """Where the first call begins, in characters."""
        self.end: int | None = None
        """Where the completion ends because of its last call, in characters."""
        self._names = names
        self._parser = parser
        self._max_calls = max_calls
        self._hidden: list[tuple[int, int]] = []  # characters that are no part of the text, in order
        self._parts: list[str | ToolCall] = []
        self._num_read = 0  # characters of all events
        self._space = ""  # white space that belongs to the text if text follows it, and to a call if a call does
        self._has_text = False  # whether there is text since the last call
        self._is_separate = False  # whether the next text begins a line of its own
        self._name = ""
        self._arguments = ""
        self._source: str | None = None  # the characters of the unfinished call
        self._source_start = 0

    @property
    def num_undecided(self) -> int:
        """The number of characters at the end that may be part of a call."""
        return len(self._space) + len(self._source or "")

    @property
    def num_decided(self) -> int:
        """The number of characters of which it is decided whether they are text or part of a call."""
        return self._num_read - self.num_undecided

    def feed(self, text: str) -> None:
        assert self._parser is not None
        for event in self._parser.feed(text):
            self.take(event)

    def finish(self) -> None:
        """Call this after the last character. An unfinished call becomes text."""
        for event in self._parser.finish() if self._parser else ():
            self.take(event)
        self._reject()
        if self._space and (self._has_text or not self.num_calls):
            self._parts.append(self._space)
        self._space = ""

    def hide(self, start: int, end: int) -> None:
        """Leave characters out of the text, such as those of a special token; calls may still contain them. Call this
        in order, before the characters are read.
        """
        self._hidden.append((start, end))

    def separate(self) -> None:
        """Begin the next text on a line of its own, if there is text before it."""
        self._is_separate = True

    def take(self, event: CallEvent) -> None:
        start = self._num_read
        self._num_read += len(event.source)
        if self.end is not None:
            return
        match event:
            case TextEvent():
                self._reject()
                self._add_text(self._without_hidden(event.source, start))
            case CallStart():
                self._reject()
                self._name, self._arguments, self._source = event.name, "", event.source
                self._source_start = start
            case CallArguments():
                assert self._source is not None
                self._arguments += event.text
                self._source += event.source
            case CallEnd():
                assert self._source is not None
                self._source += event.source
                self._complete()
            case MarkEvent():
                if self._has_text or not self.num_calls:
                    self._add_text(self._without_hidden(event.source, start))
                else:
                    self._space = ""

    def take_parts(self) -> list[str | ToolCall]:
        """Return the text and calls that were not returned before."""
        parts, self._parts = self._parts, []
        return parts

    def _complete(self) -> None:
        arguments = read_arguments(self._arguments)
        if arguments is None or self._name not in self._names:
            self._reject()
            return
        if self.first_call_at is None:
            self.first_call_at = self._num_read - len(self._source or "")
        self._parts.append(ToolCall("call_" + secrets.token_hex(12), self._name, arguments, self.num_calls))
        self.num_calls += 1
        self._source, self._space, self._has_text = None, "", False
        if self.num_calls == self._max_calls:
            self.end = self._num_read

    def _reject(self) -> None:
        """Turn the unfinished call into text."""
        source, self._source = self._source, None
        if source:
            self._add_text(self._without_hidden(source, self._source_start))

    def _without_hidden(self, source: str, start: int) -> str:
        """Return the characters from `start` on without the hidden ones."""
        while self._hidden and self._hidden[0][1] <= start:
            self._hidden.pop(0)
        parts: list[str] = []
        at = start
        for hidden_start, hidden_end in self._hidden:
            if hidden_start >= start + len(source):
                break
            parts.append(source[at - start : max(hidden_start, at) - start])
            at = max(hidden_end, at)
        return "".join([*parts, source[at - start :]])

    def _add_text(self, new_text: str) -> None:
        if self._is_separate and new_text:
            new_text = "\n" + new_text if self._has_text else new_text
            self._is_separate = False
        text = self._space + new_text
        if not self._has_text and self.num_calls:
            text = text.lstrip()
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        if stripped:
            self._parts.append(stripped)
            self._has_text = True


# Arguments.


def read_arguments(text: str) -> str | None:
    """Return the arguments of a call as the JSON text of an object, or None if they are not an object."""
    if not text.strip():
        return "{}"
    try:
        value = read_json(text)
        if isinstance(value, str):
            value = read_json(value) if value.strip() else None
    except (ValueError, RecursionError):
        return None
    value = {} if value is None else value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None


def read_json(text: str) -> Any:  # noqa: ANN401  JSON
    """Parse JSON as models write it: strings may contain line ends. Raises ValueError or RecursionError."""
    return json.loads(text, parse_float=_finite, strict=False)


def _finite(literal: str) -> float:
    """Return the nearest finite number, since a number too large for a double would become Infinity."""
    return max(-sys.float_info.max, min(float(literal), sys.float_info.max))
