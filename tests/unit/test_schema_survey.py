"""Every keyword of JSON Schema that grammars hold: what they draw at a high temperature validates, formats included."""

from __future__ import annotations

import ipaddress
import json
import re
import uuid
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from email.headerregistry import Address
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator, FormatChecker
from transformers import AutoTokenizer

from tinsmith.base_models import nano, read_shape
from tinsmith.chat.schemas import FORMATS, check_grammar, schema_grammar
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.samplers.local.grammar import GrammarCache
from tinsmith.types import Adjustments

SHAPE = read_shape(nano.MODEL_NAME, nano.path())
TEXT = ModelTokenizer(SHAPE)
GRAMMARS = GrammarCache(AutoTokenizer.from_pretrained(str(nano.path())), SHAPE.vocab_size, TEXT.end_token_ids)
CLOSING = frozenset(b'"}]')
NUM_SEEDS = 50


def closed(**properties: Any) -> dict[str, Any]:  # noqa: ANN401  schemas
    """An object with exactly these properties."""
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


INTEGER: dict[str, Any] = {"type": "integer"}
NULL: dict[str, Any] = {"type": "null"}
TREE = {"type": "object", "properties": {"v": INTEGER, "next": {"$ref": "#/$defs/t"}}, "required": ["v"]}
SCHEMAS: Mapping[str, dict[str, Any]] = {
    "type": {"type": ["integer", "boolean", "null"]},
    "enum": {"enum": [1, "a", None, [1], {"a": 1}]},
    "enum beside type": {"type": "string", "enum": ["a", 1, "bb"]},
    "enum beside minLength": {"enum": ["a", "bbb"], "minLength": 2},
    "const": {"const": {"a": [1]}},
    "minLength": {"type": "string", "minLength": 2, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[a-c]+\\d$"},
    "pattern anywhere": {"type": "string", "pattern": "ab"},
    "pattern beside minLength": {"type": "string", "pattern": "^[a-c]*$", "minLength": 2, "maxLength": 4},
    "minimum": {"type": "integer", "minimum": -3, "maximum": 17},
    "minimum of numbers": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "exclusiveMinimum": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "multipleOf": {"type": "integer", "multipleOf": 3, "minimum": 4, "maximum": 20},
    "multipleOf a fraction": {"type": "number", "multipleOf": 0.25},
    "items": {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3},
    "prefixItems": {"type": "array", "prefixItems": [INTEGER], "items": {"type": "boolean"}, "minItems": 2},
    "properties": {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": {"type": "boolean"}},
    "required": {"type": "object", "required": ["b"], "additionalProperties": {"type": "boolean"}},
    "patternProperties": {"type": "object", "patternProperties": {"^a": INTEGER}, "additionalProperties": False},
    "patternProperties beside properties": {
        "type": "object",
        "properties": {"ab": INTEGER},
        "patternProperties": {"^a": {"minimum": 3}},
        "additionalProperties": False,
    },
    "maxProperties": {"type": "object", "additionalProperties": NULL, "maxProperties": 2},
    "minProperties": {"type": "object", "additionalProperties": NULL, "minProperties": 1},
    "anyOf": {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string", "maxLength": 2}]},
    "anyOf beside properties": {
        "type": "object",
        "properties": {"a": INTEGER},
        "required": ["a"],
        "anyOf": [
            {"properties": {"b": NULL}, "required": ["b"]},
            {"properties": {"c": {"type": "boolean"}}, "required": ["c"]},
        ],
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}, {"multipleOf": 2}]},
    "allOf of patterns": {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "b$"}, {"maxLength": 5}]},
    "oneOf": {"oneOf": [closed(k={"const": "a"}, v=INTEGER), closed(k={"const": "b"}, v=NULL)]},
    "$ref": {"$ref": "#/$defs/t", "$defs": {"t": {**TREE, "additionalProperties": False}}},
    "$ref beside minimum": {"$ref": "#/$defs/t", "minimum": 4, "$defs": {"t": {"type": "integer", "maximum": 9}}},
    "$ref to the root": {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
    "definitions": {"definitions": {"t": NULL}, "$ref": "#/definitions/t"},
    "false": {"type": "object", "properties": {"a": False, "b": NULL}, "additionalProperties": False},
    "keywords of other types": {"type": "integer", "maxLength": 2, "minItems": 3, "madeUp": 4},
} | {f"format {name}": {"type": "string", "format": name} for name in FORMATS}

LABELS = re.compile(r"(?!-)[a-zA-Z0-9-]{1,63}(?<!-)(\.(?!-)[a-zA-Z0-9-]{1,63}(?<!-))*")
DURATION = re.compile(r"P(?=.)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)")
READERS: Mapping[str, Callable[[str], object]] = {
    "date": date.fromisoformat,
    "date-time": datetime.fromisoformat,
    "time": time.fromisoformat,
    "uuid": uuid.UUID,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
}
CHECKER = FormatChecker(formats=())


def is_email(text: str) -> bool:
    address = Address(addr_spec=text)
    return len(address.username) <= 64 and LABELS.fullmatch(address.domain) is not None


def add_checks() -> None:
    for name, read in READERS.items():
        CHECKER.checks(name, raises=ValueError)(lambda text, read=read: read(text) is not None)
    CHECKER.checks("email", raises=Exception)(is_email)
    CHECKER.checks("hostname")(lambda text: len(text) <= 253 and LABELS.fullmatch(text) is not None)
    CHECKER.checks("duration")(lambda text: DURATION.fullmatch(text) is not None)
    CHECKER.checks("uri")(lambda text: re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", text) is not None and " " not in text)


add_checks()


def draw_answer(keyword: str, seed: int, max_tokens: int = 600) -> str | None:
    """Draw an answer of random tokens that the grammar allows; None if it does not end in time. Tokens that close
    strings and containers are drawn more often, so that most answers end.
    """
    grammar = schema_grammar(SCHEMAS[keyword], "schema")
    check_grammar(grammar, "schema")
    generator, tokens = np.random.default_rng(seed), list[int]()
    constraint = GRAMMARS.constraint(Adjustments(grammar=grammar))
    assert constraint is not None
    while len(tokens) < max_tokens:
        allowed = np.flatnonzero(constraint.token_mask()).tolist()
        ends = [token for token in allowed if token in TEXT.end_token_ids]
        others = [token for token in allowed if token not in TEXT.end_token_ids]
        if ends and (not others or generator.random() < 0.3):
            return TEXT.decode(tokens)
        closings = [token for token in others if len(text := TEXT.token_bytes(token)) == 1 and text[0] in CLOSING]
        token = int(generator.choice(closings if closings and generator.random() < 0.2 else others))
        constraint.push(token)
        assert constraint.error is None, constraint.error
        tokens.append(token)
    return None


def check_draws(keyword: str, seeds: range) -> int:
    validator = Draft202012Validator(SCHEMAS[keyword], format_checker=CHECKER)
    answers = [answer for seed in seeds if (answer := draw_answer(keyword, seed)) is not None]
    for answer in answers:
        validator.validate(json.loads(answer))
    return len(answers)


@pytest.mark.parametrize("keyword", SCHEMAS)
def test_what_the_grammar_of_a_keyword_draws_validates(keyword: str) -> None:
    assert check_draws(keyword, range(4)) >= 1


@pytest.mark.extended
@pytest.mark.parametrize("keyword", SCHEMAS)
def test_what_the_grammar_of_a_keyword_draws_validates_with_many_seeds(keyword: str) -> None:
    assert check_draws(keyword, range(4, NUM_SEEDS)) >= NUM_SEEDS // 5
