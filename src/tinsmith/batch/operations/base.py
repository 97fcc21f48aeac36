"""The interfaces of an operation and of the service for one row. No pipes and no arithmetic.

Seeds depend on the operation's own seed and on the row alone. A sample of input row i has `row_seed(seed, i)`, whatever
its batch; answer k is the one that the service gives any request with that seed and `num_samples` above k. A turn of a
rollout has `row_seed(seed, i, rollout, turn)`; a grading model's sample has the answer's index in place of the rollout.
A client that samples with these seeds gets the same tokens.

Templates: `{column}` is the row's value, text as it is and anything else as JSON; `{{` and `}}` are braces. Nothing
else is interpreted.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, get_args, get_type_hints

from tinsmith.batch.types import Row
from tinsmith.errors import UserError

if TYPE_CHECKING:
    from tinsmith.chat.tokenizer import ModelTokenizer


Check = Callable[[str, object], None]
"""Raises UserError for a wrong value of a field."""


class RowRefusedError(Exception):
    """The service refused a row's request, or failed at it; the message says why. The row has failed."""


@dataclass(frozen=True)
class Answer:
    """One answer: its tokens, their logprobs at the sampling temperature, and why it ended (stop or length)."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str
    topk: list[list[tuple[int, float]]] | None = None


@dataclass(frozen=True)
class SampleResponse:
    """The answers to a sample. A prompt token without a logprob has None."""

    sequences: list[Answer]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]]] | None = None


class RowService(Protocol):
    """The service as one row of one step sees it."""

    @property
    def row_idx(self) -> int: ...

    async def sample(self, model: str, request: Mapping[str, Any], key: str = "") -> SampleResponse:
        """`request` has the fields of /asample without its session and number. Counted in the job's tokens."""
        ...

    async def text(self, model: str) -> ModelTokenizer:
        """The tokenizer and chat template of a model's base."""
        ...

    async def context(self, model: str) -> int:
        """The most tokens that a prompt and its answer may have together."""
        ...

    async def ask(self, verb: str, payload: Mapping[str, Any], key: str = "") -> dict[str, Any]:
        """Call a handler of the server by its verb. Raises RowRefusedError."""
        ...

    def count(self, tokens_in: int, tokens_out: int) -> None:
        """Add to the job's tokens."""
        ...


@dataclass(frozen=True)
class RowOperation(ABC):
    """A frozen dataclass whose fields are JSON. A field `Annotated[type, check]` is checked by `check(name, value)`."""

    name: ClassVar[str]
    """The name under which it is registered."""

    def check(self) -> None:
        """Checks each field as its annotation says. Raises UserError that names the field, its value and what it must
        be."""
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            for check in getattr(hint, "__metadata__", ()):
                if value is not None or NoneType not in get_args(hint.__origin__):
                    check(name, value)

    @abstractmethod
    async def answer(self, row: Row, service: RowService) -> Row:
        """The row's result. An exception fails the row."""


def check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise UserError(f"{name} is {value!r}; it must be a string that is not empty")


def integer_between(low: int, high: int) -> Check:
    def check(name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise UserError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")

    return check


def number_between(low: float, high: float) -> Check:
    def check(name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise UserError(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}")

    return check


def one_of(choices: Sequence[str]) -> Check:
    def check(name: str, value: object) -> None:
        if value not in choices:
            raise UserError(f"{name} is {value!r}; it must be one of {sorted(choices)}")

    return check


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UserError(f"{name} is {value!r}; it must be true or false")


def check_stop(name: str, value: object) -> None:
    is_list = isinstance(value, list) and (
        all(isinstance(element, str) for element in value) or all(type(element) is int for element in value)
    )
    if not (isinstance(value, str) or is_list):
        raise UserError(f"{name} is {value!r}; it must be a string, a list of strings or a list of token ids")


NonEmpty = Annotated[str, check_text]
NonEmptyOrNone = Annotated[str | None, check_text]
Flag = Annotated[bool, check_flag]
MaxTokens = Annotated[int | None, integer_between(1, 2**31 - 1)]
Temperature = Annotated[float, number_between(0, 1e30)]
TopP = Annotated[float, number_between(0, 1)]
TopK = Annotated[int, integer_between(-1, 2**31 - 1)]
Stop = Annotated[str | list[str] | list[int] | None, check_stop]
Seed = Annotated[int | None, integer_between(-(2**63 - 1), 2**63 - 1)]


def column_of(row: Row, column: str) -> Any:  # noqa: ANN401  whatever the row holds
    if column not in row:
        raise KeyError(f"the row has no column {column!r}; it has {sorted(map(str, row))}")
    return row[column]


BITS = 63


def row_seed(seed: int, row_idx: int, rollout_idx: int | str = 0, turn: int = 0) -> int:
    text = f"{seed},{row_idx},{rollout_idx},{turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - BITS)


def seed_for(seed: int | None, row_idx: int, rollout_idx: int | str = 0, turn: int = 0) -> int | None:
    """`row_seed`, or None without a seed: then every job samples differently."""
    return None if seed is None else row_seed(seed, row_idx, rollout_idx, turn)


MAX_LENGTH = 100_000
_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def check_template(name: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_LENGTH:
        raise UserError(f"{name} must be a string of 1 to {MAX_LENGTH} characters, with the names of columns in braces")
    for match in _PIECE.finditer(value):
        if match[0] in "{}" or match[1] == "":
            raise UserError(
                f"{name} has {match[0]!r} at {match.start()}; write a column as {{name}}, and a literal brace twice"
            )


def render(template: str, row: Row) -> str:
    """Fill a template with the row's columns. Raises KeyError that names a column which the row lacks."""

    def fill(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        value = column_of(row, match[1])
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return _PIECE.sub(fill, template)
