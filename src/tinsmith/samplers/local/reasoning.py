"""Reasoning before the text of a grammar: which tokens may come next in an answer that thinks first.

Inside the reasoning every token is allowed but those that end the answer. At its budget the closing token is the only
one. After it come a few tokens of white space, as chat templates write them, and then the grammar's text. An answer
that does not open its reasoning is the grammar's text from its first token on. Without a grammar, only the budget
holds.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tinsmith.errors import UserError
from tinsmith.types import ReasoningSpan

MAX_SPACE = 2
"""Most tokens of white space between the reasoning and the text."""

Mask = npt.NDArray[np.bool_]


class Constraint(Protocol):
    """One answer's position in what it must match."""

    def token_mask(self) -> Mask:
        """[V]: the tokens that may come next, including an end token where the answer may end."""
        ...

    def push(self, token: int) -> None: ...

    @property
    def is_finished(self) -> bool:
        """True if no token may follow; also after an error."""
        ...

    @property
    def error(self) -> UserError | None: ...


class _Part(Enum):
    START, REASONING, SPACE, TEXT = range(4)


class ReasoningConstraint:
    def __init__(self, reasoning: ReasoningSpan, grammar: Constraint | None, ends_V: Mask, spaces_V: Mask) -> None:
        """`ends_V` are the tokens that end an answer, and `spaces_V` those of white space."""
        self._reasoning = reasoning
        self._grammar = grammar
        self._ends_V, self._spaces_V = ends_V, spaces_V
        self._part = _Part.REASONING if reasoning.is_open else _Part.START
        self._count = 0  # tokens of the reasoning, then of the white space after it

    def token_mask(self) -> Mask:
        if self._part is _Part.REASONING:
            return self._reasoning_mask()
        if self._grammar is None:
            return np.ones_like(self._ends_V)
        allowed_V = self._grammar.token_mask()
        if self._part is _Part.SPACE and self._count < MAX_SPACE:
            return allowed_V | self._spaces_V
        if self._part is _Part.START:
            allowed_V = allowed_V.copy()
            allowed_V[self._reasoning.open_id] = True
        return allowed_V

    def _reasoning_mask(self) -> Mask:
        budget = self._reasoning.max_tokens
        if budget is not None and self._count >= budget:
            closing_V = np.zeros_like(self._ends_V)
            closing_V[self._reasoning.close_id] = True
            return closing_V
        return np.ones_like(self._ends_V) if self._grammar is None else ~self._ends_V

    def push(self, token: int) -> None:
        if self._part is _Part.REASONING:
            self._count += 1
            if token == self._reasoning.close_id:
                self._part, self._count = _Part.SPACE, 0
        elif self._part is _Part.START and token == self._reasoning.open_id:
            self._part = _Part.REASONING
        elif self._part is _Part.SPACE and self._is_space(token):
            self._count += 1
        else:
            self._part = _Part.TEXT
            if self._grammar is not None:
                self._grammar.push(token)

    def _is_space(self, token: int) -> bool:
        """Whether a token after the reasoning is white space before the text, which may begin with white space, too."""
        if self._grammar is None or self._count >= MAX_SPACE or not self._spaces_V[token]:
            return False
        return not self._grammar.token_mask()[token]

    @property
    def is_finished(self) -> bool:
        return self._part is _Part.TEXT and self._grammar is not None and self._grammar.is_finished

    @property
    def error(self) -> UserError | None:
        return None if self._grammar is None else self._grammar.error
