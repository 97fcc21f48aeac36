"""Graders against plain references: tables, manual counts, all subsets."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest

from tinsmith import batch
from tinsmith.batch.operations import graders, patterns, payload_of, steps_of
from tinsmith.batch.operations.base import RowService, check_template, render
from tinsmith.errors import NotSupportedError, UserError

ROW_ONLY: Any = None  # a grade by a rule does not call the service


def score_of(text: str, reference: object = None, **fields: Any) -> float:  # noqa: ANN401
    reference_field = {} if reference is None else {"reference": "wanted"}
    grade = batch.Grade(**{**reference_field, **fields})
    grade.check()
    service: RowService = ROW_ONLY
    return asyncio.run(grade.answer({"output": text, "wanted": reference}, service))["score"]


@pytest.mark.parametrize(
    ("by", "text", "reference", "score"),
    [
        ("exact", " two  words\n", "two words", 1),
        ("exact", "Two", "two", 0),
        ("exact", "2", 2, 1),
        ("exact", "b", ["a", "b"], 1),
        ("contains", "it is forty two, I think", "forty two", 1),
        ("contains", "it is forty", "forty two", 0),
        ("numeric", "first 3, then 1,234.50", 1234.5, 1),
        ("numeric", "it is 12 or \\boxed{\\frac{3}{4}} and 7", "0.75", 1),
        ("numeric", "3/4", "6/8", 1),
        ("numeric", "-3e2", -300, 1),
        ("numeric", "1.0", "#### 1", 1),
        ("numeric", "41", "42", 0),
        ("numeric", "none at all", "42", 0),
        ("numeric", "1/0", "42", 0),
        ("numeric", "\\boxed{x}", "42", 0),
        ("choice", "I think the answer is (C).", "C", 1),
        ("choice", "A man said: the answer is B", "B", 1),
        ("choice", "B) because", "b", 1),
        ("choice", "\\boxed{\\text{D}}", "D", 0),
        ("choice", "\\boxed{D}", 3, 1),
        ("choice", "Answer: **A**", 0, 1),
        ("choice", "Anything else", "A", 0),
        ("json_equal", '```json\n{"b": 1.0, "a": [true]}\n```', {"a": [True], "b": 1}, 1),
        ("json_equal", '{"a": 1}', '{"a": true}', 0),
        ("json_equal", '{"a": 1', {"a": 1}, 0),
        ("json_equal", "[1, 2]", [2, 1], 0),
        ("json_equal", "9" * 5000, [1], 0),
        ("f1", "The cat sat", "a cat sat down", 0.8),
        ("f1", "", "x", 0),
        ("rouge_l", "police kill the gunman", "police killed the gunman", 0.75),
        ("edit", "kitten", "sitting", 1 - 3 / 7),
        ("edit", "", "", 1),
    ],
)
def test_scores(by: str, text: str, reference: object, score: float) -> None:
    assert score_of(text, reference, by=by) == pytest.approx(score)


def test_options_of_a_grade() -> None:
    assert score_of("TWO", "two", by="exact", ignore_case=True) == 1
    assert score_of("3.1", "3.14159", by="numeric", tolerance=0.02) == 1
    assert score_of("3.0", "3.14159", by="numeric", tolerance=0.02) == 0
    assert score_of("so <answer>7</answer>, not 8", "7", by="numeric", extract="<answer>(.*?)</answer>") == 1
    assert score_of("so 7", "7", by="numeric", extract="<answer>(.*?)</answer>") == 0
    assert score_of("ab12", by="regex", pattern=r"^[a-z]+\d+$") == 1
    assert score_of("12ab", by="regex", pattern=r"^[a-z]+\d+$") == 0
    schema = {"type": "object", "properties": {"n": {"type": "string", "pattern": "^a+$"}}, "required": ["n"]}
    assert score_of('{"n": "aa"}', by="json_schema", schema=schema) == 1
    assert score_of('{"n": "b"}', by="json_schema", schema=schema) == 0
    assert score_of("{", by="json_schema", schema=schema) == 0


@pytest.mark.parametrize("by", ["numeric", "choice"])
def test_a_reference_that_holds_no_answer_fails_the_row(by: str) -> None:
    with pytest.raises(ValueError, match="reference"):
        score_of("1", "??", by=by)


def test_distances_are_those_of_the_usual_tables() -> None:
    drawn = random.Random(0)
    for _ in range(300):
        first, second = ("".join(drawn.choices("abc", k=drawn.randrange(12))) for _ in range(2))
        assert graders.edit_distance(first, second) == _edit_table(first, second)
        assert graders.common_length(first, second) == _common_table(first, second)


def _edit_table(first: str, second: str) -> int:
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        above, row = row, [i]
        for j, b in enumerate(second, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b)))
    return row[-1]


def _common_table(first: str, second: str) -> int:
    row = [0] * (len(second) + 1)
    for a in first:
        above, row = row, [0]
        for j, b in enumerate(second, 1):
            row.append(above[j - 1] + 1 if a == b else max(above[j], row[-1]))
    return row[-1]


def test_pass_at_k_is_the_share_of_subsets_that_hold_one_that_passed() -> None:
    for size, passed in itertools.product(range(1, 8), range(8)):
        if passed > size:
            continue
        for k in range(1, size + 1):
            subsets = list(itertools.combinations([index < passed for index in range(size)], k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert graders.pass_at_k(size, passed, k) == pytest.approx(share)


def test_several_answers_have_scores_a_mean_and_pass_at_k() -> None:
    grade = batch.Grade(by="exact", reference="wanted", pass_at=[1, 2])
    row = asyncio.run(grade.answer({"output": ["x", "y", "x", "z"], "wanted": "x"}, ROW_ONLY))
    assert row["score"] == [1, 0, 1, 0]
    assert row["score_mean"] == 0.5
    assert row["score_pass@1"] == pytest.approx(0.5)
    assert row["score_pass@2"] == pytest.approx(1 - 1 / 6)


def test_a_template_takes_columns_and_nothing_else() -> None:
    row = {"q": "why?", "n": [1, {"a": None}], "a.b": "dotted"}
    assert render("{{{q}}} {n} {a.b} {{x}}", row) == '{why?} [1, {"a": null}] dotted {x}'
    with pytest.raises(KeyError, match=r"no column 'q\.__class__'"):
        render("{q.__class__}", row)
    for bad in ("", "{", "}", "{}", "a {b"):
        with pytest.raises(UserError, match="template"):
            check_template("template", bad)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"by": "vibes"}, "by is 'vibes'"),
        ({"by": "exact"}, "needs 'reference'"),
        ({"by": "regex", "reference": "r", "pattern": "a"}, "does not use 'reference'"),
        ({"by": "regex", "pattern": "("}, "is not a regular expression of RE2"),
        ({"by": "regex", "pattern": r"(a)\1"}, "is not a regular expression of RE2"),
        ({"by": "regex", "pattern": "((a{1000}){1000}){1000}"}, "is not a regular expression of RE2"),
        ({"by": "json_schema", "schema": {"type": "objet"}}, "is not a JSON schema"),
        ({"by": "json_schema", "schema": {"patternProperties": {"a": {}}}}, "patternProperties"),
        ({"by": "model", "model": "m", "template": "{"}, "template has '{'"),
        ({"by": "model", "model": "m", "template": "x", "scores": {"a": "b"}}, "scores is"),
        ({"by": "exact", "reference": "r", "pass_at": [0]}, "pass_at is 0"),
    ],
)
def test_a_grade_that_cannot_be_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        payload_of([batch.Grade(**fields)])
    assert message in str(caught.value)


def test_a_schema_fetches_nothing() -> None:
    with pytest.raises(ValueError, match="refers to another document"):
        patterns.fits({}, {"$ref": "http://127.0.0.1:9/schema.json"})


def test_a_hostile_pattern_ends() -> None:
    assert patterns.last_match("(a|a)*b|(a+)+c", "a" * 50_000) is None


def test_operations_travel_whole() -> None:
    retry = batch.Retry(grade=batch.Grade(by="numeric", reference="wanted"), feedback="no: {wanted}")
    final = batch.Grade(by="contains", reference="wanted")
    steps = [
        batch.Sample("m", prompt="q", stop=["a"], seed=None),
        batch.Grade(by="exact", reference="wanted", pass_at=[1]),
        batch.Rollout("m", messages="q", environment=retry, grade=final),
        batch.Rollout("m", messages="q", environment=batch.Turns("rest")),
    ]
    assert steps_of(payload_of(steps)) == steps


def test_an_environment_of_ones_own_is_a_function() -> None:
    class Mine:
        def step(self) -> None: ...

    environment: Any = Mine()
    with pytest.raises(NotSupportedError, match=r"environment is a Mine.*Dataset\.map\(function"):
        batch.Rollout("m", messages="q", environment=environment)
