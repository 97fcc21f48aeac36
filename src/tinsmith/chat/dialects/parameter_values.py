"""Grammars of arguments that are written as plain text or as JSON between tags, from their JSON schemas.

A text ends with the first closing tag after it. A schema that plain text cannot hold is refused by its path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tinsmith.chat.dialects.grammar_writer import ANY_TEXT, GrammarWriter, escape_regex, rebase_schema
from tinsmith.chat.dialects.typed_values import MAX_DEPTH, Schema, resolve_reference
from tinsmith.errors import RequestError, not_supported
from tinsmith.wire.fields import show

FORM = "in this model's form of calls"
_UNION_KEYWORDS = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties", "enum", "const", "maxProperties")
INTEGER, NUMBER = r"/-?(0|[1-9][0-9]{0,18})/", r"/-?(0|[1-9][0-9]{0,16})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,3})?/"
"""Numbers without limits in their schema. Their length is bounded, since some models never end one."""
_ANNOTATIONS = frozenset(("type", "title", "description", "default", "examples", "deprecated"))


def check_parameters(schema: Mapping[str, Any], path: str, forbidden: str) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the arguments. Raises RequestError for keywords about several arguments, and for names with
    `forbidden` characters.
    """
    for keyword in _UNION_KEYWORDS:
        if keyword in schema:
            raise not_supported(f"{path}.{keyword}", f"{FORM}; describe each argument in properties")
    properties = {
        key: value if isinstance(value, Mapping) else {} for key, value in schema.get("properties", {}).items()
    }
    for key in properties:
        if not key.strip() or any(letter in forbidden for letter in key):
            raise not_supported(f"{path}.properties.{key}", f"{FORM}; use a name without {show(forbidden)}")
    if schema.get("minProperties", 0) > len(schema.get("required", ())):
        raise not_supported(f"{path}.minProperties", f"{FORM}; name as many arguments in required")
    return properties


def write_parameter(
    writer: GrammarWriter, name: str, schema: Schema, root: Schema, path: str, closing: str, *, is_text: bool
) -> str:
    """Add the rules of a value and return its expression with `closing` after it. A text has no null, which the caller
    adds.
    """
    if not is_text:
        return f"{write_json_value(writer, name, schema, root)} {writer.write_literal(closing)}"
    options = [
        write_text(writer, f"{name}_{position}", branch, path, closing)
        for position, branch in enumerate(string_branches(schema, root, path, 0))
    ]
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def write_json_value(writer: GrammarWriter, name: str, schema: Schema, root: Schema) -> str:
    """Add the rule of a value as JSON."""
    plain = schema.get("type") if schema.keys() <= _ANNOTATIONS else None
    if plain in ("integer", "number"):
        return writer.add_rule(name, INTEGER if plain == "integer" else NUMBER)
    if '"$ref"' not in json.dumps(schema):
        return writer.add_json(name, schema)
    definitions = {"root": rebase_schema(dict(root), "#/$defs/root")}
    return writer.add_json(name, {**rebase_schema(dict(schema), "#/$defs/root"), "$defs": definitions})


def string_branches(schema: Schema, root: Schema, path: str, depth: int) -> Iterator[Schema]:
    """Yield the schemas of strings among a schema's alternatives. Raises RequestError if they are combined with other
    keywords.
    """
    if depth > MAX_DEPTH:
        raise not_supported(path, f"nested more than {MAX_DEPTH} levels deep {FORM}; describe the string directly")
    for keyword in ("anyOf", "oneOf", "allOf", "$ref"):
        if keyword not in schema:
            continue
        if schema.keys() - _ANNOTATIONS - {keyword, "$defs"}:
            raise not_supported(f"{path}.{keyword}", f"beside other keywords of a string {FORM}; use one of them")
        if keyword == "$ref":
            branches = [resolve_reference(schema["$ref"], root)]
        elif keyword == "allOf" and len(schema["allOf"]) > 1:
            raise not_supported(f"{path}.allOf", f"of several schemas of a string {FORM}; write them as one")
        else:
            branches = schema[keyword]
        for branch in branches:
            if isinstance(branch, Mapping):
                yield from string_branches(branch, root, path, depth + 1)
        return
    types = schema.get("type")
    names = {types} if isinstance(types, str) else set(types or ())
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if values is not None:
        texts = [value for value in values if isinstance(value, str)]
        if texts:
            yield {"enum": texts}
        return
    if not names or "string" in names:
        yield {key: value for key, value in schema.items() if key != "type"}


def write_text(writer: GrammarWriter, name: str, schema: Schema, path: str, closing: str) -> str:
    """Add the rules of a text of a string's schema and return its expression with `closing` after it."""
    ending = writer.write_literal(closing)
    if "enum" in schema:
        for text in schema["enum"]:
            if closing in text:
                raise not_supported(f"{path}.enum", f"{show(text)}, which contains the end of a value {FORM}")
        options = " | ".join(writer.write_literal(text) or '""' for text in schema["enum"])
        return f"({options}) {ending}"
    text = _text_terminal(schema, path)
    split = writer.split_at_token(closing)
    if split is not None:
        terminal = writer.add_rule(name.upper(), f"{text}")
        if not split[0]:
            return f"{terminal} {ending}"
        joined = writer.add_rule(f"{name.upper()}_END", f"{terminal} /{escape_regex(split[0])}/")
        return f"{joined} {split[1]}"
    has_closing = f"/(.|\\n)*{escape_regex(closing)}(.|\\n)*/"
    if text == ANY_TEXT:
        return writer.add_rule(f"{name}[suffix={json.dumps(closing)}]", text)
    terminal = writer.add_rule(name.upper(), f"{text} & ~{has_closing}")
    return writer.add_rule(f"{name}[suffix={json.dumps(closing)}]", terminal)


def _text_terminal(schema: Schema, path: str) -> str:
    """Return the regular expressions of a string's schema, joined by `&`."""
    if "format" in schema:
        raise not_supported(f"{path}.format", f"{show(schema['format'])} {FORM}; use pattern")
    parts: list[str] = []
    if "pattern" in schema:
        parts.append(f"/{translate_pattern(schema['pattern'], f'{path}.pattern')}/")
    if "minLength" in schema or "maxLength" in schema:
        parts.append(f"/(.|\\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/")
    return " & ".join(parts) or ANY_TEXT


def translate_pattern(pattern: str, path: str) -> str:
    """Return a regular expression of whole texts that a pattern of JSON Schema, which matches anywhere, allows. Raises
    RequestError for anchors elsewhere than at both ends.
    """
    starts = pattern.startswith("^")
    ends = pattern.endswith("$") and not _is_escaped(pattern, len(pattern) - 1)
    body = pattern[1 if starts else 0 : -1 if ends else None]
    if (starts or ends) and _has_top_alternative(body):
        raise not_supported(path, f"{show(pattern)} {FORM}; put the alternatives between ^( and )$")
    if _has_anchor(body):
        raise RequestError(path, f"{path} is {show(pattern)}; use ^ and $ only at its ends")
    body = "".join("\\/" if letter == "/" and not _is_escaped(body, at) else letter for at, letter in enumerate(body))
    anything = "(.|\\n)*"
    return f"{'' if starts else anything}({body}){'' if ends else anything}"


def _is_escaped(pattern: str, at: int) -> bool:
    before = pattern[:at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def _list_unescaped(pattern: str) -> Iterator[tuple[str, int]]:
    """Yield the characters outside of classes that are not escaped, with their depth in parentheses."""
    depth, in_class, at = 0, False, 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            at += 2
            continue
        if in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        else:
            depth += (letter == "(") - (letter == ")")
            yield letter, depth
        at += 1


def _has_top_alternative(pattern: str) -> bool:
    return ("|", 0) in list(_list_unescaped(pattern))


def _has_anchor(pattern: str) -> bool:
    return any(letter in "^$" for letter, _ in _list_unescaped(pattern))
