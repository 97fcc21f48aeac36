"""The types of arguments that dialects write as plain text, decided by the tool's JSON schema.

The value of a parameter that may be a string, or that the schema does not describe, is a string; `null` is null if the
schema allows nothing but strings and null. Other values are read as JSON, and stay strings if they do not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tinsmith.chat.calls import read_json

Schema = Mapping[str, Any]
MAX_DEPTH = 8
"""Most references and alternatives that are followed."""
_PYTHON_LITERALS = {"true": "true", "false": "false", "none": "null", "null": "null"}
"""Python's spellings of JSON's literals, without case."""
_NULLS = frozenset(("null", "None"))


def read_value(value: str, schema: Schema, key: str) -> object:
    """Return a parameter's value in the type of its schema."""
    types = parameter_types(schema, key)
    if types == {"string", "null"} and value.strip() in _NULLS:
        return None
    if is_text(types):
        return value
    text = value.strip()
    try:
        parsed = read_json(_PYTHON_LITERALS.get(text.lower(), text))
    except (ValueError, RecursionError):
        return value
    return parsed if type_names(parsed) & types else value


def is_text(types: set[str]) -> bool:
    """Whether a parameter of these types is written as plain text."""
    return not types or "string" in types


def parameter_types(schema: Schema, key: str) -> set[str]:
    """Return the JSON types of a parameter; none if the schema does not name them."""
    properties = schema.get("properties")
    return set(_types_of(properties.get(key) if isinstance(properties, Mapping) else None, schema, 0))


def type_names(value: object) -> set[str]:
    """Return the JSON types of a value."""
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case None:
            return {"null"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def resolve_reference(reference: object, root: Schema) -> object:
    """Return the schema that a reference within `root` names; None without one."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    definition: object = root
    for segment in reference.split("/")[1:]:
        name = segment.replace("~1", "/").replace("~0", "~")
        definition = definition.get(name) if isinstance(definition, Mapping) else None
    return definition


def _types_of(schema: object, root: Schema, depth: int) -> Iterator[str]:
    """Yield the JSON types that a schema names. References and alternatives are followed to a depth."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return
    types = schema.get("type")
    yield from [types] if isinstance(types, str) else types if isinstance(types, list) else ()
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        for value in values if types is None and isinstance(values, list) else ():
            yield from type_names(value)
    if types is None and "properties" in schema:
        yield "object"
    for name in ("anyOf", "oneOf", "allOf"):
        for alternative in schema.get(name) or ():
            yield from _types_of(alternative, root, depth + 1)
    yield from _types_of(resolve_reference(schema.get("$ref"), root), root, depth + 1)
