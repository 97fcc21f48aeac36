"""What a grammar holds of a JSON schema: answers of random schemas validate, and everything else is refused by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from transformers import AutoTokenizer

from support.properties import examples
from tinsmith.base_models import nano, read_shape
from tinsmith.chat.chats import ChatRequest
from tinsmith.chat.schemas import (
    FORMATS,
    NEUTRAL_VALUES,
    UNSUPPORTED_KEYWORDS,
    check_grammar,
    normalize_schema,
    schema_grammar,
)
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.errors import RequestError, UserError
from tinsmith.samplers.local.grammar import GrammarCache
from tinsmith.types import Adjustments, Grammar
from tinsmith.wire.fields import validate

SHAPE = read_shape(nano.MODEL_NAME, nano.path())
TEXT = ModelTokenizer(SHAPE)
TOKENIZER = AutoTokenizer.from_pretrained(str(nano.path()))
GRAMMARS = GrammarCache(TOKENIZER, SHAPE.vocab_size, TEXT.end_token_ids)
INTEGER = {"type": "integer"}
X_KEYS = {"type": "object", "patternProperties": {"^x": INTEGER}, "required": ["xa"], "additionalProperties": False}


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = GRAMMARS.compile(grammar).deep_copy()
    tokens = TEXT.encode(text, special=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def draw_answer(grammar: Grammar, seed: int, max_tokens: int = 250) -> str | None:
    """An answer of random tokens that the grammar allows, as at a high temperature; None if it does not end in time."""
    generator, tokens = np.random.default_rng(seed), list[int]()
    constraint = GRAMMARS.constraint(Adjustments(grammar=grammar))
    assert constraint is not None
    for _ in range(max_tokens):
        allowed = np.flatnonzero(constraint.token_mask())
        assert len(allowed), "no token may follow"
        ends = [token for token in allowed if token in TEXT.end_token_ids]
        if ends and generator.random() < 0.3:
            return TEXT.decode(tokens)
        token = int(generator.choice(allowed))
        if token in TEXT.end_token_ids:
            return TEXT.decode(tokens)
        tokens.append(token)
        constraint.push(token)
        assert constraint.error is None, constraint.error
        if constraint.is_finished:
            return TEXT.decode(tokens)
    return None


KEYS = st.sampled_from(["a", "b", "xa", "xy", "ya", "0"])
PATTERNS = st.sampled_from(["^x", "^[a-c]{1,2}$", "y$", "^[0-9]+$", "a", "^x|y"])
LEAVES = st.sampled_from(
    [
        INTEGER,
        {"type": "integer", "minimum": -3, "exclusiveMaximum": 6},
        {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 50},
        {"type": "number", "minimum": -1.5, "maximum": 2.5},
        {"type": "string", "minLength": 1, "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]{1,5}$"},
        {"type": "boolean"},
        {"type": ["null", "integer"]},
        {"enum": [1, "a", None, [1], {"a": 1}]},
        {"const": {"a": [1]}},
        {"type": "array", "items": INTEGER, "maxItems": 2, "uniqueItems": True},
        {"not": INTEGER},
        {"if": INTEGER, "then": {"minimum": 3}},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        *({"type": "string", "format": form} for form in FORMATS),
    ]
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    required = {"type": st.just("object")}
    optional = {
        "properties": st.dictionaries(KEYS, inner, max_size=3),
        "patternProperties": st.dictionaries(PATTERNS, inner, min_size=1, max_size=2),
        "additionalProperties": st.one_of(st.just(False), st.just(False), inner),
        "required": st.lists(KEYS, min_size=1, max_size=2, unique=True),
        "minProperties": st.integers(0, 2),
        "maxProperties": st.integers(1, 3),
        "unevaluatedProperties": st.booleans(),
    }
    return st.fixed_dictionaries(required, optional=optional)


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"oneOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": st.integers(0, 2)}),
        st.fixed_dictionaries({"type": st.just("array"), "prefixItems": st.lists(inner, min_size=1, max_size=2)}),
    ),
    max_leaves=6,
)


@examples(300)
@given(SCHEMAS, st.integers(0, 2**32))
def test_an_answer_validates_or_its_schema_is_refused_before_the_first_token(schema: dict[str, Any], seed: int) -> None:
    try:
        grammar = schema_grammar(schema, "schema")
        check_grammar(grammar, "schema")
    except RequestError as error:
        assert str(error).startswith("schema")
        return
    try:
        answer = draw_answer(grammar, seed)
    except UserError:
        raise AssertionError("the engine refuses what the server accepted") from None
    if answer is not None:
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(answer))


@pytest.mark.parametrize(
    ("schema", "answers", "rejected"),
    [
        (X_KEYS, ['{"xa": 1}', '{"xa": 1, "xb": 2}'], ["{}", '{"xb": 1}', '{"xa": "s"}']),
        ({"type": "object", "required": ["z"], "additionalProperties": INTEGER}, ['{"z": 1}'], ["{}", '{"z": true}']),
        ({"type": "array", "items": INTEGER, "uniqueItems": False}, ["[1, 1]"], ['["a"]']),
        ({"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False}, ['{"a": 1}'], ['{"b": 1}']),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER}, ['{"a": 1}'], []),
        ({"type": "integer", "format": "int64"}, ["7"], ['"7"']),
        ({"type": "string", "format": "password"}, ['"x"'], ["1"]),
        ({"oneOf": [{"const": "a"}, INTEGER]}, ['"a"', "3"], ["true"]),
    ],
)
def test_a_schema_is_held_exactly(schema: dict[str, Any], answers: list[str], rejected: list[str]) -> None:
    grammar = schema_grammar(schema, "schema")
    assert [accepts(grammar, completion) for completion in (*answers, *rejected)] == [True] * len(answers) + [
        False
    ] * len(rejected)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "schema.properties.a.items.uniqueItems is not supp"),
        ({"anyOf": [INTEGER, {"not": INTEGER}]}, "schema.anyOf[1].not is not supported"),
        ({"$defs": {"n": {"format": "iban"}}}, "schema.$defs.n.format is not supported by this server: 'iban'; use pa"),
        ({"$ref": "http://127.0.0.1:1/x"}, "schema.$ref is not supported by this server: 'http://127.0.0.1:1/x'; this"),
        ({"if": INTEGER, "else": INTEGER}, "schema.if is not supported"),
        ({"type": "object", "minProperties": 2}, "schema.minProperties is not supported by this server: 2; name as"),
        ({"required": ["z"], "additionalProperties": False}, "schema.required names 'z', which the schema excludes"),
        ({"patternProperties": {"^x": {}}, "required": ["y"], "additionalProperties": False}, "names 'y', which"),
    ],
)
def test_a_keyword_that_is_not_held_is_refused_by_its_path(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as refused:
        normalize_schema(schema, "schema")
    assert words in str(refused.value)


@pytest.mark.parametrize("keyword", sorted(UNSUPPORTED_KEYWORDS))
def test_the_table_of_refused_keywords_is_that_of_the_library(keyword: str) -> None:
    """A keyword that a newer version holds can leave the table."""
    values = {"minContains": 2, "maxContains": 1, "uniqueItems": True, "$dynamicRef": "#n", "$recursiveRef": "#"}
    values |= {"dependentRequired": {"a": ["b"]}, "dependencies": {"a": ["b"]}}
    value = values.get(keyword, False if keyword.startswith("unevaluated") else INTEGER)
    if keyword == "dependentSchemas":
        value = {"a": INTEGER}
    with pytest.raises(RequestError, match="cannot be enforced"):
        check_grammar(Grammar("json_schema", json.dumps({keyword: value})), "schema")


@pytest.mark.parametrize("keyword", sorted(NEUTRAL_VALUES))
def test_a_neutral_value_of_a_refused_keyword_is_removed(keyword: str) -> None:
    for value in NEUTRAL_VALUES[keyword]:
        check_grammar(schema_grammar({"type": "object", keyword: value}, "schema"), "schema")


def plan(**fields: object) -> Grammar | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    adjustments = validate(ChatRequest, body).plan(TEXT).params.adjustments
    return adjustments and adjustments.grammar


def test_a_grammar_in_larks_form_is_enforced() -> None:
    lark = 'start: "a" B | %json {"type": "integer"}\nB: /[0-9]{2}/\n'
    for fields in ({"structured_outputs": {"grammar": lark}}, {"guided_grammar": lark}):
        grammar = plan(**fields)
        assert grammar and [accepts(grammar, completion) for completion in ("a12", "7", "b")] == [True, True, False]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"guided_grammar": 'root ::= "a"'},
            "guided_grammar is not supported by this server: a grammar in the form of",
        ),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs is not supported"),
        ({"guided_grammar": "a: b"}, "guided_grammar has the grammar 'a: b'; it must be in Lark's form, with a rule"),
        ({"guided_grammar": "start: b"}, "guided_grammar cannot be enforced: "),
        ({"guided_regex": "a("}, "guided_regex cannot be enforced: "),
        ({"guided_json": "[]"}, "guided_json has the json '[]'; it must be a JSON object, the schema"),
        ({"guided_json": {"uniqueItems": True}}, "guided_json.uniqueItems is not supported"),
        ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs.json.uniqueItems is not supp"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}},
            "response_format.json_schema.schema.uniqueItems is not supported",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"oneOf": [INTEGER, INTEGER]}}}},
            "response_format cannot be enforced: alternatives of oneOf may overlap",
        ),
    ],
)
def test_a_grammar_that_cannot_be_enforced_is_refused_before_sampling(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as refused:
        plan(**fields)
    assert words in str(refused.value)
