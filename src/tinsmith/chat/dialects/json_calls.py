"""Readers of calls whose arguments are a JSON object: with the name as a field, or in a header before the object."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tinsmith.chat.calls import read_json
from tinsmith.chat.dialects.json_objects import NotACallError, ObjectScanner
from tinsmith.chat.dialects.marked import ReadCall, skip_words

MAX_HEADER = 512
"""Most characters between a mark and the arguments."""


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
    """Reads a header with the name and the object with the arguments, between words such as tags."""

    def __init__(self, start: int, before: Sequence[str], header: re.Pattern[str], after: Sequence[str] = ()) -> None:
        """`header` matches the text up to the object; its first group is the name."""
        self._start = start
        self._before, self._header, self._after = before, header, after
        self._name: str | None = None
        self._at = start  # of the object
        self._scanner: ObjectScanner | None = None
        self._end: int | None = None  # of the object

    def read(self, text: str) -> ReadCall | None:
        if self._scanner is None and not self._read_header(text):
            return None
        assert self._scanner is not None and self._name is not None
        if self._end is None:
            self._end = self._scanner.end_in(text)
        if self._end is None or (end := skip_words(text, self._end, self._after)) is None:
            return None
        arguments = read_object(text[self._at : self._end])
        return ReadCall(self._name, json.dumps(arguments, ensure_ascii=False), end)

    def _read_header(self, text: str) -> bool:
        if (start := skip_words(text, self._start, self._before)) is None:
            return False
        end = text.find("{", start, start + MAX_HEADER)
        if end < 0 and len(text) - start < MAX_HEADER:
            return False
        header = self._header.fullmatch(text, start, max(end, start))
        if header is None:
            raise NotACallError(start)
        self._name, self._at, self._scanner = header[1], end, ObjectScanner(end)
        return True


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
