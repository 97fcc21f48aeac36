"""What a rollout's model talks with, declared and not programmed: turns from a column, or try after try.

An environment gives each answer a reward, or none, and says what comes next, or nothing more. One that is code belongs
into a function that runs on workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from tinsmith.batch.operations.base import RowService, check_template, check_text, column_of, render
from tinsmith.batch.operations.grade import Grade
from tinsmith.batch.types import Row
from tinsmith.errors import NotSupportedError, UserError


class Reply(NamedTuple):
    """`message` None ends the conversation."""

    reward: float | None
    message: str | None


@dataclass(frozen=True)
class Environment(ABC):
    @abstractmethod
    def check(self) -> None:
        """Raises UserError."""

    @abstractmethod
    async def reply(self, answer: str, turn: int, row: Row, service: RowService, key: str) -> Reply:
        """`turn` counts the answers from 0; `key` is this answer's alone."""


@dataclass(frozen=True)
class Turns(Environment):
    """The user's turns after the first answer are the texts in a column, one after another."""

    column: str
    kind: str = "turns"

    def check(self) -> None:
        check_text("environment.column", self.column)

    async def reply(self, answer: str, turn: int, row: Row, service: RowService, key: str) -> Reply:
        turns = column_of(row, self.column)
        if not isinstance(turns, list) or not all(isinstance(each, str) for each in turns):
            raise ValueError(f"column {self.column!r} must hold a list of texts")
        return Reply(None, turns[turn] if turn < len(turns) else None)


@dataclass(frozen=True)
class Retry(Environment):
    """Each answer is graded: the score is its reward, and one that does not pass is answered with `feedback`, a
    template of the row's columns, the answer (as the grade's `output`) and its score."""

    grade: Grade
    feedback: str = "That is not right. Try again."
    kind: str = "retry"

    def __post_init__(self) -> None:
        if isinstance(self.grade, Mapping):  # as it travelled
            object.__setattr__(self, "grade", made_of(Grade, self.grade, "environment.grade"))

    def check(self) -> None:
        check_grade("environment.grade", self.grade)
        check_template("environment.feedback", self.feedback)

    async def reply(self, answer: str, turn: int, row: Row, service: RowService, key: str) -> Reply:
        score = await self.grade.score_of(answer, row, service, key)
        if score >= self.grade.passing:
            return Reply(score, None)
        return Reply(score, render(self.feedback, {**row, self.grade.output: answer, self.grade.score: score}))


KINDS: dict[str, type[Environment]] = {"turns": Turns, "retry": Retry}


def environment_of(given: object) -> Environment:
    """Raises UserError, and NotSupportedError for what would be code."""
    if isinstance(given, Environment):
        return given
    if isinstance(given, Mapping):
        cls = KINDS.get(str(given.get("kind")))
        if cls is None:
            raise UserError(f"environment.kind is {given.get('kind')!r}; it must be one of {sorted(KINDS)}")
        return made_of(cls, given, "environment")
    raise NotSupportedError(
        f"environment is a {type(given).__name__}; the service runs Turns and Retry. One of your own is code: write it "
        "into a function, which runs on workers (Dataset.map(function, ...)), and sample there with the SDK"
    )


def check_grade(name: str, grade: object) -> None:
    if not isinstance(grade, Grade):
        raise UserError(f"{name} is {grade!r}; it must be a Grade")
    grade.check()


def made_of(cls: Any, given: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401  a dataclass of these
    known = sorted(each.name for each in fields(cls))
    if unknown := sorted(set(given) - set(known)):
        raise UserError(f"{name} has no field {unknown}; it has {known}")
    try:
        return cls(**given)
    except TypeError as error:
        raise UserError(f"{name}: {error}") from None
