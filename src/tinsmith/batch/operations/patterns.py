"""Regular expressions and JSON schemas of users, with bounded memory, and time linear in the text.

RE2 guarantees that and Python's `re` does not. Look-around and back-references, which RE2 lacks, are refused with RE2's
own message. A schema's patterns are RE2's, too, and it may refer only to itself: nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from tinsmith.errors import NotSupportedError, UserError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

MAX_PATTERN = 2000
MAX_DEPTH = 64


def check_pattern(name: str, pattern: object) -> None:
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN:
        raise UserError(f"{name} must be a regular expression of 1 to {MAX_PATTERN} characters")
    _compile(pattern, False, name)


def last_match(pattern: str, text: str, ignore_case: bool = False) -> str | None:
    """The text of the last match: of its first group that matched, or of the whole match."""
    last = None
    for match in _compile(pattern, ignore_case, "pattern").finditer(text):
        last = match
    if last is None:
        return None
    return next((group for group in last.groups() if group is not None), last[0])


def escape(text: str) -> str:
    import re2

    return re2.escape(text)


@lru_cache(maxsize=256)
def _compile(pattern: str, ignore_case: bool, name: str) -> Any:  # noqa: ANN401  the library has no types
    import re2

    options = re2.Options()
    options.log_errors = False
    options.case_sensitive = not ignore_case
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if error.args and isinstance(error.args[0], bytes) else error
        raise UserError(f"{name} {pattern!r} is not a regular expression of RE2: {reason}") from None


def check_schema(name: str, schema: object) -> None:
    """Raises UserError unless the schema is a supported JSON schema."""
    import jsonschema

    if not isinstance(schema, dict):
        raise UserError(f"{name} is {schema!r}; it must be an object")
    for keyword, value in _keywords(name, schema, 0):
        if keyword == "patternProperties":
            raise NotSupportedError(f"{name} has patternProperties, which is not supported; name the properties")
        if keyword == "pattern" and isinstance(value, str):
            check_pattern(f"{name}.pattern", value)
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise UserError(f"{name} is not a JSON schema: {error.message}") from None


def matches_schema(value: Any, schema: dict[str, Any]) -> bool:  # noqa: ANN401  any JSON
    """Whether a value matches a schema. Raises ValueError for a reference to outside the schema."""
    import referencing
    from referencing.exceptions import Unresolvable

    try:
        return _validator()(schema, registry=referencing.Registry()).is_valid(value)
    except Unresolvable as error:
        raise ValueError(f"the schema refers to another document; inline it: {error}") from None


@cache
def _validator() -> type[Validator]:
    from jsonschema import Draft202012Validator, validators

    return validators.extend(Draft202012Validator, {"pattern": _pattern})


def _pattern(_validator: object, pattern: str, instance: object, _schema: object) -> Iterator[Exception]:
    import jsonschema

    if isinstance(instance, str) and not _compile(pattern, False, "pattern").search(instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _keywords(name: str, value: object, depth: int) -> Iterator[tuple[str, object]]:
    if depth > MAX_DEPTH:
        raise UserError(f"{name} is nested deeper than {MAX_DEPTH} levels; flatten it")
    if isinstance(value, Mapping):
        for keyword, inside in value.items():
            yield keyword, inside
            yield from _keywords(name, inside, depth + 1)
    elif isinstance(value, list):
        for inside in value:
            yield from _keywords(name, inside, depth + 1)
