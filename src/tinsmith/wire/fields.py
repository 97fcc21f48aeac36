"""Typed reading of JSON objects, with errors that name the field by its full path.

`Fields` wraps one object and remembers where it was found, so that a message reads
"sampling_params.top_p is 'high'; it must be a number". null and an absent field mean the same (the SDK leaves
out what is None). JSON's true is never taken for a 1.

Moments: seconds since the epoch here, RFC 3339 with a zone on the wire.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

import orjson

from tinsmith.errors import UserError

T = TypeVar("T")

INT64_MAX = 2**63 - 1
MAX_TEXT = 4096
MAX_METADATA_BYTES = 65536
MAX_DEPTH = 64
"""Nesting of a JSON body. Whatever is read can be written again: orjson itself reads 1024 levels and writes 254."""

MAX_CONTAINERS = 2**18
"""Objects and lists of a JSON body. An empty one takes 3 bytes of it, and 60 of memory."""

SHOWN = 80  # characters of an offending value that a message repeats


def show(value: object) -> str:
    """A value as a message quotes it: short, on one line, ASCII. Never formats more of it than it shows."""
    # One character more than is shown, so that it is shown as cut.
    text = ascii(value[: SHOWN + 1]) if isinstance(value, str) else reprlib.repr(value)
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object. `x(name)` requires the field; `x_or(name, default)` answers the default without it."""

    values: Mapping[str, object]
    where: str = ""

    def path(self, name: str) -> str:
        return self.where + (name if len(name) <= SHOWN else show(name))

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def refuse_unknown(self, known: frozenset[str]) -> None:
        """Refuse unknown fields, except one at its empty value (null, 0, "", []), which asks for nothing."""
        for name in self.values.keys() - known:
            if self.values[name]:
                raise UserError(
                    f"{self.path(name)} is not supported by this server; leave it out (known here: "
                    f"{', '.join(sorted(known))})"
                )

    def integer(self, name: str) -> int:
        return self._required(name, self.integer_or(name, None))

    def integer_or(self, name: str, default: T) -> int | T:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "an integer")
        if not -INT64_MAX <= value <= INT64_MAX:
            raise self._wrong(name, "an integer of at most 64 bits")
        return value

    def number(self, name: str) -> float:
        return self._required(name, self.number_or(name, None))

    def number_or(self, name: str, default: T) -> float | T:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number")
        return float(value)

    def flag_or(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str) -> str:
        return self._required(name, self.text_or(name, None))

    def text_or(self, name: str, default: T, *, max_length: int = MAX_TEXT) -> str | T:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        if len(value) > max_length or "\x00" in value:
            raise self._wrong(name, f"a string of at most {max_length} characters without NUL")
        return value

    def texts_or_empty(self, name: str, *, max_items: int) -> list[str]:
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > max_items:
            raise self._wrong(name, f"a list of at most {max_items} strings")
        return [Fields({name: item}, self.where).text(name) for item in value]

    def fields(self, name: str) -> Fields:
        return self._required(name, self.fields_or(name, None))

    def fields_or(self, name: str, default: T) -> Fields | T:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return Fields(value, f"{self.where}{name}.")

    def metadata_or_none(self, name: str) -> dict[str, object] | None:
        """A JSON object of the user's own, bounded in size."""
        found = self.fields_or(name, None)
        if found is None:
            return None
        size = len(orjson.dumps(found.values))
        if size > MAX_METADATA_BYTES:
            raise UserError(f"{self.path(name)} is {size} bytes of JSON; at most {MAX_METADATA_BYTES} are kept")
        return dict(found.values)

    def text_metadata_or_none(self, name: str) -> dict[str, str] | None:
        """The same with string values only, which is what the SDK can read back from a checkpoint."""
        found = self.metadata_or_none(name)
        if found is None:
            return None
        inner = Fields(found, f"{self.where}{name}.")
        return {key: inner.text_or(key, "", max_length=MAX_METADATA_BYTES) for key in found}

    def _required(self, name: str, value: T | None) -> T:
        if value is None:
            raise UserError(f"{self.path(name)} is missing")
        return value

    def _wrong(self, name: str, wanted: str) -> UserError:
        return UserError(f"{self.path(name)} is {show(self.values[name])}; it must be {wanted}")


def json_bytes(value: object) -> bytes:
    """A body as it is stored."""
    return orjson.dumps(value)


def read_object(body: bytes) -> Fields:
    """The body as one JSON object."""
    containers = body.count(b"{") + body.count(b"[")  # at most so many: some may be in strings
    if containers > MAX_CONTAINERS:
        raise UserError(f"the body holds more than {MAX_CONTAINERS} lists and objects; send less data per request")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UserError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"the body must be a JSON object, not {show(value)}")
    if containers > MAX_DEPTH:
        _check_depth(value)
    return Fields(value)


def _check_depth(value: dict[str, object]) -> None:
    """Level by level, so that no depth is too much for this function itself."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for each in level for child in _children(each) if isinstance(child, dict | list)]
        if not level:
            return
    raise UserError(f"the body is nested more than {MAX_DEPTH} levels deep")


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def text_values(metadata: Mapping[str, object] | None) -> dict[str, str] | None:
    """Metadata as the SDK reads it back: whatever is not a string becomes its JSON text."""
    if metadata is None:
        return None
    return {key: value if isinstance(value, str) else orjson.dumps(value).decode() for key, value in metadata.items()}


def iso(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).isoformat().replace("+00:00", "Z")


def moment_of(name: str, text: str) -> float:
    """Seconds since the epoch of a moment with a zone. Raises UserError that names the field."""
    try:
        found = datetime.fromisoformat(text)
        if found.tzinfo is not None:
            return found.timestamp()
    except (ValueError, OverflowError):
        pass
    raise UserError(f"{name} is {show(text)}; it must be a moment with a zone, like 2026-07-13T00:00:00Z")
