"""Readers of calls whose arguments are a JSON object: with the name as a field, or in a header before the object."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tinsmith.chat.calls import read_json
from tinsmith.chat.dialects.json_objects import NotACallError, ObjectScanner
from tinsmith.chat.dialects.marked import ReadCall, follows, skip_words

MAX_HEADER = 512
"""Most characters between a mark and the arguments."""
_NULL = "null"


class ObjectCallReader:
    """Reads an object with `name` and arguments, between words such as tags.

    The object ends where its JSON ends, so that a string in the arguments may contain the words. Inside a list another
    object, which is no call, does not end the list.
    """

    def __init__(
        self, start: int, before: Sequence[str], after: Sequence[str] = (), field: str = "arguments", *, in_list: bool
    ) -> None:
        self._at = start
        self._before, self._after, self._field, self._in_list = before, after, field, in_list
        self._scanner: ObjectScanner | None = None
        self._end: int | None = None  # of the object

    def read(self, text: str) -> ReadCall | None:
        if self._scanner is None:
            if (start := skip_words(text, self._at, self._before)) is None:
                return None
            self._at = start
            self._scanner = ObjectScanner(start)
        if self._end is None:
            self._end = self._scanner.end_in(text)
        if self._end is None or (end := skip_words(text, self._end, self._after)) is None:
            return None
        try:
            name, arguments = name_and_arguments(read_object(text[self._at : self._end]), self._field)
        except NotACallError:
            if not self._in_list:
                raise
            name, arguments = "", ""
        return ReadCall(name, arguments, end)


class HeaderCallReader:
    """Reads a header with the name and the arguments after it, between words such as tags.

    The arguments are an object; `null`, a JSON string with an object, and nothing at all are read, too.
    """

    def __init__(
        self, start: int, before: Sequence[str], header: re.Pattern[str], separator: str, after: Sequence[str] = ()
    ) -> None:
        """`header` matches the text up to the arguments, which follow the first `separator`, or a brace without one.
        Its first group is the name.
        """
        self._start = start
        self._before, self._header, self._separator, self._after = before, header, separator, after
        self._name: str | None = None
        self._at = start  # of the arguments
        self._scanner: ObjectScanner | StringScanner | None = None
        self._end: int | None = None  # of the arguments

    def read(self, text: str) -> ReadCall | None:
        if self._name is None and not self._read_header(text):
            return None
        if self._end is None:
            self._end = self._find_end(text)
        if self._end is None or (end := skip_words(text, self._end, self._after)) is None:
            return None
        arguments = text[self._at : self._end]
        if arguments.startswith("{"):
            arguments = json.dumps(read_object(arguments), ensure_ascii=False)
        return ReadCall(self._name or "", arguments, end)

    def _read_header(self, text: str) -> bool:
        if (start := skip_words(text, self._start, self._before)) is None:
            return False
        limit = start + MAX_HEADER
        brace, separator = text.find("{", start, limit), text.find(self._separator, start, limit)
        if separator >= 0 and (brace < 0 or separator < brace):
            end = separator + len(self._separator)
        elif brace >= 0:
            end = brace
        elif len(text) < limit:
            return False
        else:
            raise NotACallError(start)
        header = self._header.fullmatch(text, start, end)
        if header is None:
            raise NotACallError(start)
        self._name, self._at = header[1], end
        return True

    def _find_end(self, text: str) -> int | None:
        """Return the end of the arguments, or None while they are incomplete."""
        if self._scanner is None:
            while self._at < len(text) and text[self._at].isspace():
                self._at += 1
            if self._at == len(text):
                return None
            if text[self._at] == "{":
                self._scanner = ObjectScanner(self._at)
            elif text[self._at] == '"':
                self._scanner = StringScanner(self._at)
            else:
                return self._find_empty_end(text)
        return self._scanner.end_in(text)

    def _find_empty_end(self, text: str) -> int | None:
        """Return the end of `null` or of nothing."""
        beginning = text[self._at : self._at + len(_NULL)]
        if beginning == _NULL:
            return self._at + len(_NULL)
        if _NULL.startswith(beginning):
            return None
        if self._after and follows(text, self._at, self._after[0]) is not None:
            return self._at
        if not self._after:
            raise NotACallError(self._at)
        return None


class StringScanner:
    """Finds the end of a JSON string in growing text."""

    def __init__(self, start: int) -> None:
        self._at = start + 1

    def end_in(self, text: str) -> int | None:
        """Return the offset after the closing quotation mark, or None while the string is incomplete."""
        while self._at < len(text):
            letter = text[self._at]
            if letter == "\\" and self._at + 1 == len(text):
                return None
            self._at += 2 if letter == "\\" else 1
            if letter == '"':
                return self._at
        return None


def read_object(text: str) -> dict[str, Any]:
    """Parse a complete JSON object. Raises NotACallError."""
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        raise NotACallError(0) from None


def name_and_arguments(call: dict[str, Any], field: str) -> tuple[str, str]:
    """Return a call's name, and as JSON text its arguments, which are in `field` or in `arguments`; empty if there are
    none. Raises NotACallError.
    """
    name = call.get("name")
    if not isinstance(name, str):
        raise NotACallError(0)
    key = field if field in call else "arguments"
    return name, json.dumps(call[key], ensure_ascii=False) if key in call else ""
