"""Hermes, also Qwen's: `<tool_call>` around a JSON object with `name` and `arguments`.

The object ends where its JSON ends, so that a string in the arguments may contain the closing tag.
"""

from __future__ import annotations

import json
from typing import Any

from tinsmith.chat.calls import read_json
from tinsmith.chat.dialects.json_objects import NotACallError, ObjectScanner
from tinsmith.chat.dialects.marked import MarkedParser, ReadCall, follows

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def new_hermes_parser() -> MarkedParser:
    return MarkedParser(OPEN, HermesReader)


class HermesReader:
    def __init__(self, start: int) -> None:
        self._start = start + len(OPEN)
        self._scanner = ObjectScanner(self._start)
        self._end: int | None = None  # of the object

    def read(self, text: str) -> ReadCall | None:
        if self._end is None:
            self._end = self._scanner.end_in(text)
        if self._end is None or not follows(text, self._end, CLOSE):
            return None
        name, arguments = name_and_arguments(read_object(text[self._start : self._end]), "arguments")
        return ReadCall(name, arguments, text.index(CLOSE, self._end) + len(CLOSE))


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
