"""Reasoning before the text of a grammar: which tokens may come next in an answer that thinks first.

Inside the reasoning every token is allowed but those that end the answer. At its budget the closing token is the only
one. After it come a few tokens of white space, as chat templates write them, and then the grammar's text. An answer
that does not open its reasoning is the grammar's text from its first token on. Without a grammar, only the budget
holds.

In a format of messages the grammar covers the reasoning, too, and only the budget is added.
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


class MessageBudget:
    """A budget of all messages of reasoning together; a message that begins after it is closed at once."""

    def __init__(self, reasoning: ReasoningSpan, grammar: Constraint | None, num_vocab: int) -> None:
        self._reasoning = reasoning
        self._grammar = grammar
        self._opening = (reasoning.open_id, *reasoning.header_ids)
        self._num_matched = 0  # tokens of the opening that the last tokens are
        self._is_inside = reasoning.is_open
        self._count = 0
        self._all_V = np.ones(num_vocab, np.bool_)
        self._close_V = np.zeros(num_vocab, np.bool_)
        self._close_V[reasoning.close_id] = True

    def token_mask(self) -> Mask:
        budget = self._reasoning.max_tokens
        if self._is_inside and budget is not None and self._count >= budget:
            return self._close_V
        return self._all_V if self._grammar is None else self._grammar.token_mask()

    def push(self, token: int) -> None:
        if self._is_inside:
            self._is_inside = token != self._reasoning.close_id
            self._count += self._is_inside
        elif token == self._opening[self._num_matched]:
            self._num_matched += 1
            if self._num_matched == len(self._opening):
                self._is_inside, self._num_matched = True, 0
        else:
            self._num_matched = int(token == self._opening[0])
        if self._grammar is not None:
            self._grammar.push(token)

    @property
    def is_finished(self) -> bool:
        return self._grammar is not None and self._grammar.is_finished

    @property
    def error(self) -> UserError | None:
        return None if self._grammar is None else self._grammar.error
