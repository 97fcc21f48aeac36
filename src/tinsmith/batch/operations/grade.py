"""`Grade`: a score for a model's answer, by a rule or by another model.

It grades the column `output`, a text or the list of texts of a Sample with `num_samples`. The row gets the column
`score`: a number, or for a list a list, with its mean as `{score}_mean` and, for every k of `pass_at`, the unbiased
estimate `{score}_pass@k` of the probability that one of k answers has a score of at least `passing`.

| by | 1 means |
|---|---|
| exact, contains | the text equals the reference; contains it |
| regex | `pattern` is found in the text |
| numeric | the last number, or the one in a box, equals the reference |
| choice | the chosen letter equals the reference |
| json_equal, json_schema | the same JSON; JSON that `schema` allows |
| f1, rouge_l, edit | all words in common; in the same order; no character changed |
| model | the score that `pattern` finds in the answer of `model` to `template` |

`extract` is a pattern; its last match (its first group, if it has one) is graded instead of the whole text. Patterns
are RE2's. A reference may be a list; the best score counts. A row fails if `pattern` finds no score in the grading
model's answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import JSONDecodeError
from typing import Annotated, Any, ClassVar

from tinsmith.batch.operations import OPERATION_REGISTRY, graders
from tinsmith.batch.operations.base import (
    Flag,
    MaxTokens,
    NonEmpty,
    NonEmptyOrNone,
    RowOperation,
    RowService,
    Seed,
    Temperature,
    check_template,
    column_of,
    integer_between,
    number_between,
    one_of,
    render,
    seed_for,
)
from tinsmith.batch.operations.patterns import check_pattern, check_schema, escape, last_match, matches_schema
from tinsmith.batch.operations.sample import sampling_request
from tinsmith.batch.types import Row
from tinsmith.errors import UserError

WITH_REFERENCE = ("exact", "contains", "numeric", "choice", "json_equal", "f1", "rouge_l", "edit")
KINDS = (*WITH_REFERENCE, "regex", "json_schema", "model")
OPTIONAL = {
    "exact": {"ignore_case"},
    "contains": {"ignore_case"},
    "regex": {"ignore_case"},
    "numeric": {"tolerance"},
    "model": {"pattern", "scores", "max_tokens", "temperature", "seed"},
}
"""The fields that a kind uses beside those that it needs, `extract`, `pass_at` and the names of columns."""
MAX_LENGTH = 200_000
"""The most characters of a text for rouge_l and edit."""
NUMBER = r"([-+]?\d+(?:\.\d+)?)"


def check_ks(name: str, value: object) -> None:
    if not isinstance(value, tuple):
        raise UserError(f"{name} is {value!r}; it must be a list of whole numbers")
    for k in value:
        integer_between(1, 1024)(name, k)


def check_scores(name: str, value: object) -> None:
    items = value.items() if isinstance(value, dict) else ()
    are_numbers = all(isinstance(score, int | float) and not isinstance(score, bool) for _, score in items)
    if not (items and are_numbers and all(isinstance(text, str) and text for text, _ in items)):
        raise UserError(f"{name} is {value!r}; it must map strings to numbers")


@OPERATION_REGISTRY.type_register(name="grade")
@dataclass(frozen=True)
class Grade(RowOperation):
    name: ClassVar[str] = "grade"

    by: Annotated[str, one_of(KINDS)]
    reference: NonEmptyOrNone = None
    output: NonEmpty = "output"
    score: NonEmpty = "score"
    pattern: Annotated[str | None, check_pattern] = None
    extract: Annotated[str | None, check_pattern] = None
    ignore_case: Flag = False
    tolerance: Annotated[float, number_between(0, 1e9)] = 0.0
    schema: dict[str, Any] | None = None
    pass_at: Annotated[Sequence[int], check_ks] = ()
    passing: Annotated[float, number_between(-1e9, 1e9)] = 1.0
    model: NonEmptyOrNone = None
    template: Annotated[str | None, check_template] = None
    scores: Annotated[dict[str, float] | None, check_scores] = None
    max_tokens: MaxTokens = None
    temperature: Temperature = 0.0
    seed: Seed = 0

    def __post_init__(self) -> None:
        if isinstance(self.pass_at, list):
            object.__setattr__(self, "pass_at", tuple(self.pass_at))

    def check(self) -> None:
        """Raises UserError for invalid fields, also for fields that this kind would ignore."""
        super().check()
        required_by_kind = {"regex": {"pattern"}, "json_schema": {"schema"}, "model": {"model", "template"}}
        required = required_by_kind.get(self.by, {"reference"})
        usable = required | OPTIONAL.get(self.by, frozenset())
        for name in ("reference", "pattern", "schema", "model", "template", "scores", "max_tokens"):
            is_set = getattr(self, name) is not None
            if name in required and not is_set:
                raise UserError(f"a Grade by {self.by!r} needs {name!r}")
            if is_set and name not in usable:
                raise UserError(f"a Grade by {self.by!r} does not use {name!r}; leave it out")
        for name in ("ignore_case", "tolerance", "temperature", "seed"):
            if getattr(self, name) != getattr(Grade, name) and name not in usable:
                raise UserError(f"a Grade by {self.by!r} does not use {name!r}; leave it out")
        if self.by == "json_schema":
            check_schema("schema", self.schema)

    async def answer(self, row: Row, service: RowService) -> Row:
        output = column_of(row, self.output)
        if isinstance(output, str):
            return {**row, self.score: await self.score_of(output, row, service)}
        if not (isinstance(output, list) and output and all(isinstance(text, str) for text in output)):
            raise ValueError(f"column {self.output!r} must hold a string or a list of strings")
        scores = [await self.score_of(text, row, service, f"{index}") for index, text in enumerate(output)]
        passed = sum(score >= self.passing for score in scores)
        graded_row: Row = {**row, self.score: scores, f"{self.score}_mean": statistics.fmean(scores)}
        for k in self.pass_at:
            if k > len(scores):
                raise ValueError(f"pass_at has {k}, but the row has {len(scores)} answers")
            graded_row[f"{self.score}_pass@{k}"] = graders.pass_at_k(len(scores), passed, k)
        return graded_row

    async def score_of(self, text: str, row: Row, service: RowService, key: str = "0") -> float:
        """The score of one text of this row; `key` is unique among the row's texts."""
        if self.extract is not None:
            extracted = last_match(self.extract, text)
            if extracted is None:
                return 0.0
            text = extracted
        if self.by == "model":
            return await self._ask_judge(text, row, service, key)
        if self.by == "regex":
            assert self.pattern is not None
            return float(last_match(self.pattern, text, self.ignore_case) is not None)
        if self.by == "json_schema":
            assert self.schema is not None
            try:
                return float(matches_schema(graders.json_in(text), self.schema))
            except JSONDecodeError:
                return 0.0
        assert self.reference is not None
        reference = column_of(row, self.reference)
        has_several = isinstance(reference, list) and self.by != "json_equal"
        if has_several and not reference:
            raise ValueError(f"column {self.reference!r} is an empty list; give a reference")
        return max(self._compare(text, candidate) for candidate in (reference if has_several else [reference]))

    def _compare(self, text: str, reference: object) -> float:
        if self.by == "numeric":
            return graders.numeric(text, reference, self.tolerance)
        if self.by == "choice":
            return graders.choice(text, reference)
        if self.by == "json_equal":
            return graders.json_equal(text, reference)
        expected = reference if isinstance(reference, str) else str(reference)
        if self.by in ("exact", "contains"):
            return getattr(graders, self.by)(text, expected, self.ignore_case)
        if self.by == "f1":
            return graders.f1(text, expected)
        if max(len(text), len(expected)) > MAX_LENGTH:
            raise ValueError(f"{self.by} compares at most {MAX_LENGTH} characters, not {max(len(text), len(expected))}")
        return graders.rouge_l(text, expected) if self.by == "rouge_l" else graders.edit_similarity(text, expected)

    async def _ask_judge(self, text: str, row: Row, service: RowService, key: str) -> float:
        assert self.model is not None and self.template is not None
        tokenizer = await service.text(self.model)
        question = render(self.template, {**row, self.output: text})
        prompt = tokenizer.chat([{"role": "user", "content": question}])
        seed = seed_for(self.seed, service.row_idx, key)
        request = sampling_request(prompt, self.max_tokens, self.temperature, 1.0, -1, None, seed)
        sampled = await service.sample(self.model, request, key)
        verdict = tokenizer.decode(sampled.sequences[0].tokens)
        pattern = self.pattern or (NUMBER if self.scores is None else "|".join(map(escape, self.scores)))
        match = last_match(pattern, verdict, self.scores is not None)
        if match is not None and self.scores is not None:
            folded_scores: Mapping[str, float] = {name.casefold(): score for name, score in self.scores.items()}
            if match.casefold() in folded_scores:
                return float(folded_scores[match.casefold()])
        elif match is not None:
            try:
                return float(match)
            except ValueError:
                pass
        raise ValueError(f"the grading model's answer has no score that matches {pattern!r}: {verdict[:500]!r}")
