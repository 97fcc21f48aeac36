"""JSON schemas and grammars of requests: what grammars enforce exactly, and what is refused before sampling.

The library that masks tokens (llguidance) knows most keywords of JSON Schema 2020-12 and refuses the others without
saying where they are. The table `UNSUPPORTED_KEYWORDS` names them with a way out. `normalize_schema` refuses by the
keyword's path, removes values that exclude nothing, and writes equivalent keywords where the library knows one.
`check_grammar` compiles without a tokenizer, so that a grammar that cannot be compiled is a refusal and not the end of
a stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, cast

from tinsmith.errors import RequestError, not_supported
from tinsmith.types import GRAMMAR_LIMITS, JSON_FORM, Grammar
from tinsmith.wire.fields import show

Schema = dict[str, Any]
MAX_SCHEMA_DEPTH = 64
REASON_CHARS = 300

UNSUPPORTED_KEYWORDS: Mapping[str, str] = {
    "uniqueItems": "it cannot be enforced; describe each item with prefixItems, or check the answer",
    "contains": "it cannot be enforced; describe the items with prefixItems",
    "minContains": "it cannot be enforced; describe the items with prefixItems",
    "maxContains": "it cannot be enforced; describe the items with prefixItems",
    "propertyNames": "use patternProperties with additionalProperties: false",
    "dependentRequired": "use anyOf with required in its alternatives",
    "dependentSchemas": "use anyOf with an alternative for each case",
    "dependencies": "use anyOf with an alternative for each case",
    "unevaluatedProperties": "use additionalProperties in each alternative",
    "unevaluatedItems": "use items",
    "not": "describe the allowed values with enum, pattern or anyOf",
    "if": "use anyOf with an alternative for each case",
    "then": "use anyOf with an alternative for each case",
    "else": "use anyOf with an alternative for each case",
    "$dynamicRef": "use $ref to a definition in the schema",
    "$recursiveRef": "use $ref to a definition in the schema",
}
"""Keywords that are not enforced. Neutral values of some are in NEUTRAL_VALUES."""

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "minContains": (0,),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "not": (False,),
}
"""Values that exclude nothing."""

FORMATS = (
    "date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
)  # fmt: skip
"""Formats of strings that are enforced. OpenAPI's `password` is a hint for forms and is removed."""

_YEAR = r"(000[1-9]|00[1-9]\d|0[1-9]\d{2}|[1-9]\d{3})"
_MULTIPLE_OF_4 = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = rf"(\d{{2}}{_MULTIPLE_OF_4}|{_MULTIPLE_OF_4}00)"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    rf"|{_LEAP_YEAR}-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,15}"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,20}[a-zA-Z0-9])?"
EXACT_PATTERNS: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "time": f"^{_TIME}$",
    "email": rf"^{_ATOM}(\.{_ATOM}){{0,3}}@{_LABEL}(\.{_LABEL}){{0,3}}$",
}
"""Formats for which the library also draws what RFC 3339 and RFC 5321 exclude: days such as 2023-02-29, leap seconds at
any time, and local parts of addresses with more than 64 characters.
"""

_SUBSCHEMA_KEYWORDS = ("items", "additionalItems", "additionalProperties")
_SUBSCHEMA_LIST_KEYWORDS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SUBSCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")
_IN_PLACE_APPLICATORS = ("anyOf", "oneOf", "allOf", "$ref")


def normalize_schema(schema: Mapping[str, object], path: str) -> Schema:
    """Return an equivalent schema that a grammar enforces exactly. Raises RequestError by the keyword's path."""
    return _normalize(schema, path, 0)


def _normalize(schema: Mapping[str, object], path: str, depth: int) -> Schema:
    if depth > MAX_SCHEMA_DEPTH:
        raise RequestError(path, f"{path} is nested more than {MAX_SCHEMA_DEPTH} levels deep")
    normalized = _rewrite_unevaluated(
        {name: value for name, value in schema.items() if not _is_neutral(schema, name, value)}
    )
    for name, reason in UNSUPPORTED_KEYWORDS.items():
        if name in normalized:
            raise not_supported(f"{path}.{name}", f"{show(normalized[name])}; {reason}")
    _check_format(normalized, path)
    _check_ref(normalized, path)
    for name in (*_SUBSCHEMA_KEYWORDS, *_SUBSCHEMA_LIST_KEYWORDS, *_SUBSCHEMA_MAP_KEYWORDS):
        if name in normalized:
            normalized[name] = _normalize_subschemas(normalized[name], f"{path}.{name}", depth)
    _check_required(normalized, path)
    return normalized


def _normalize_subschemas(value: object, path: str, depth: int) -> object:
    """Normalize the schemas below a keyword: one schema, a list, or an object of schemas."""
    if isinstance(value, list):
        return [
            _normalize(subschema, f"{path}[{index}]", depth + 1) if isinstance(subschema, dict) else subschema
            for index, subschema in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    if path.rpartition(".")[2] in _SUBSCHEMA_MAP_KEYWORDS:
        return {
            name: _normalize(subschema, f"{path}.{name}", depth + 1) if isinstance(subschema, dict) else subschema
            for name, subschema in value.items()
        }
    return _normalize(value, path, depth + 1)


def _is_neutral(schema: Mapping[str, object], name: str, value: object) -> bool:
    if name in ("then", "else"):
        return "if" not in schema
    if name == "if":
        return "then" not in schema and "else" not in schema
    if name == "maxContains":
        return "contains" not in schema
    if name == "format":
        return value == "password"
    if name == "x-guidance":  # options of the library, which are not the client's to choose
        return True
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in NEUTRAL_VALUES.get(name, ())
    )


def _rewrite_unevaluated(schema: Schema) -> Schema:
    """Without schemas beside it, an unevaluated property or item is an additional one."""
    for name, additional in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if (
            name in schema
            and additional not in schema
            and not any(applicator in schema for applicator in _IN_PLACE_APPLICATORS)
        ):
            schema[additional] = schema.pop(name)
    return schema


def _check_format(schema: Schema, path: str) -> None:
    format_name, types = schema.get("format"), schema.get("type", "string")
    if format_name in EXACT_PATTERNS and "pattern" in schema:
        raise not_supported(f"{path}.format", f"{show(format_name)} beside a pattern; use one of them")
    if format_name in EXACT_PATTERNS:
        schema |= {"pattern": EXACT_PATTERNS[schema.pop("format")]}
        return
    if format_name is None or format_name in FORMATS:
        return
    if "string" not in (types if isinstance(types, list) else [types]):
        del schema["format"]  # as int64 of an integer, which says how programs store it
        return
    raise not_supported(f"{path}.format", f"{show(format_name)}; use pattern, or one of {', '.join(FORMATS)}")


def _check_ref(schema: Schema, path: str) -> None:
    reference = schema.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        raise not_supported(
            f"{path}.$ref", f"{show(reference)}; this server fetches nothing, so use $defs of the schema"
        )


def _check_required(schema: Schema, path: str) -> None:
    """Give every required key its own property, and refuse keys that the schema excludes."""
    required, properties = schema.get("required"), schema.get("properties", {})
    if isinstance(required, list) and isinstance(properties, dict):
        patterns, additional = schema.get("patternProperties", {}), schema.get("additionalProperties", True)
        for key in required:
            if not isinstance(key, str) or key in properties:
                continue
            matched = isinstance(patterns, dict) and any(_matches(pattern, key) for pattern in patterns)
            if not matched and additional is False:
                raise RequestError(
                    f"{path}.required",
                    f"{path}.required names {show(key)}, which the schema excludes; describe it in properties",
                )
            # The schemas of its patterns apply to it as a property, too, and the one of additional keys does not.
            properties = {**properties, key: {} if matched or not isinstance(additional, dict) else additional}
        if properties:
            schema["properties"] = properties
    _check_counts(schema, path)


def _check_counts(schema: Schema, path: str) -> None:
    """Refuse a `minProperties` that repeated keys could satisfy."""
    min_properties, required = schema.get("minProperties", 0), schema.get("required", [])
    num_distinct = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(min_properties, int) and min_properties > max(1, num_distinct):
        raise not_supported(f"{path}.minProperties", f"{min_properties}; name as many keys in required")


def _matches(pattern: str, key: str) -> bool:
    import re2  # lazy: few requests need it. Linear time, whatever the pattern

    try:
        return re2.search(pattern, key) is not None
    except re2.error:
        return False  # the library refuses it


def schema_grammar(schema: Mapping[str, object], path: str) -> Grammar:
    return Grammar("json_schema", json.dumps(normalize_schema(schema, path)))


def check_grammar(grammar: Grammar, field: str) -> None:
    """Raise RequestError if the grammar cannot be compiled. The engine compiles it again, with its tokenizer."""
    if reason := _find_compile_error(grammar):
        raise RequestError(field, f"{field} cannot be enforced: {reason}")


@lru_cache(maxsize=256)
def _find_compile_error(grammar: Grammar) -> str:
    from llguidance import LLMatcher, LLParserLimits  # lazy: many servers never need it

    converters: Mapping[str, Callable[[str], str]] = {
        "json_schema": partial(LLMatcher.grammar_from_json_schema, overrides=cast("Any", dict(JSON_FORM))),
        "regex": LLMatcher.grammar_from_regex,
        "lark": LLMatcher.grammar_from_lark,
        "json_lark": LLMatcher.grammar_from_lark,
    }
    try:
        source = converters[grammar.kind](grammar.text)
        reason = LLMatcher.validate_grammar(source, None, limits=LLParserLimits(**GRAMMAR_LIMITS))
    except ValueError as error:
        reason = str(error)
    if "oneOf" in reason:
        return "alternatives of oneOf may overlap, which cannot be enforced; use anyOf"
    return reason[:REASON_CHARS]
