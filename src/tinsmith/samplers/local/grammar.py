"""Grammars that answers are held to: which tokens may come next (llguidance does the work).

A grammar is compiled once, within limits, and kept for the next request that has it; each answer walks a copy. What is
too large or too ambiguous is refused at submission, or ends its request when the limit of a step is met. Knows tokens
and no model; the library is an extra (`tinsmith[grammar]`), and is loaded by the first request that needs it.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from tinsmith.errors import NotSupportedError, UserError
from tinsmith.types import JSON_FORM, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions
    from transformers import PreTrainedTokenizerFast

MOST_KEPT = 64
SHOWN = 300  # characters of the library's reason

LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Of what the library computes: a compilation ends within a second, a step within some 10 ms, whatever the grammar."""

_JSON = cast("JsonCompileOptions", dict(JSON_FORM))


MOST_NUMBER = 40
"""Characters of a number in JSON. A double takes 25 at most; a schema sets no bound, and some models find no end."""

_NUMBER = frozenset(b"0123456789+-.eE")
_QUOTE, _ESCAPE = b'"\\'


class Spellings:
    """What the tokens of a vocabulary are, byte by byte."""

    def __init__(self, tokenizer: LLTokenizer, num_vocab: int) -> None:
        self.bytes_of = [tokenizer.decode_bytes([token]) for token in range(num_vocab)]
        self.continues_number = np.array([bool(spelled) and spelled[0] in _NUMBER for spelled in self.bytes_of])


class NumberRun:
    """How long the number is that JSON ends with, as it comes token by token; 0 in a string and elsewhere."""

    def __init__(self, spellings: Spellings) -> None:
        self.spellings = spellings
        self.length = 0
        self._in_string = self._escaped = False

    def push(self, token: int) -> None:
        for byte in self.spellings.bytes_of[token]:
            if self._in_string:
                self._in_string = self._escaped or byte != _QUOTE
                self._escaped = byte == _ESCAPE and not self._escaped
            else:
                self._in_string = byte == _QUOTE
                self.length = self.length + 1 if byte in _NUMBER else 0


class Constraint:
    """One answer's way through its grammar; `number` bounds the numbers of one that is JSON."""

    def __init__(self, matcher: LLMatcher, num_vocab: int, number: NumberRun | None = None) -> None:
        self._matcher = matcher
        self._num_vocab = num_vocab
        self._number = number

    def allowed(self) -> npt.NDArray[np.bool_]:
        """[V]: the tokens that may come next; an end token where the answer may end."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = bits[: self._num_vocab].astype(np.bool_)
        if self._number is not None and self._number.length >= MOST_NUMBER:
            ending = allowed & ~self._number.spellings.continues_number
            return ending if ending.any() else allowed  # a schema may want a longer one
        return allowed

    def push(self, token: int) -> None:
        self._matcher.consume_token(token)
        if self._number is not None:
            self._number.push(token)

    @property
    def finished(self) -> bool:
        """Nothing may follow; also after an error."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> UserError | None:
        if not self._matcher.is_error():
            return None
        return UserError(f"the grammar takes more work than a token may: {self._matcher.get_error()[:SHOWN]}")


class Grammars:
    def __init__(self, tokenizer: PreTrainedTokenizerFast, num_vocab: int, end_token_ids: frozenset[int]) -> None:
        self._hf_tokenizer = tokenizer
        self._num_vocab = num_vocab
        self._end_token_ids = sorted(end_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._spellings: Spellings | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def compiled(self, grammar: Grammar) -> LLMatcher:
        """Raises UserError, and NotSupportedError for a model without an end token."""
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compiled[grammar] = self._compile(grammar)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MOST_KEPT:
            self._compiled.popitem(last=False)
        return matcher

    def constraint(self, grammar: Grammar) -> Constraint:
        matcher = self.compiled(grammar).deep_copy()
        if grammar.kind not in ("json_schema", "json_lark"):
            return Constraint(matcher, self._num_vocab)
        if self._spellings is None:
            assert self._tokenizer is not None
            self._spellings = Spellings(self._tokenizer, self._num_vocab)
        return Constraint(matcher, self._num_vocab, NumberRun(self._spellings))

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits  # when a grammar is first used: an engine may never need it
        from llguidance.hf import from_tokenizer

        if self._tokenizer is None:
            if not self._end_token_ids:
                raise NotSupportedError("this model has no end token, so that no answer can be held to a grammar")
            self._tokenizer = from_tokenizer(self._hf_tokenizer, self._num_vocab, self._end_token_ids)
        of_kind = {
            "json_schema": partial(LLMatcher.grammar_from_json_schema, overrides=_JSON),
            "regex": LLMatcher.grammar_from_regex,
            "lark": LLMatcher.grammar_from_lark,
            "json_lark": LLMatcher.grammar_from_lark,
        }
        try:
            source = of_kind[grammar.kind](grammar.text)
        except ValueError as error:
            raise UserError(f"the {grammar.kind} cannot be compiled: {str(error)[:SHOWN]}") from None
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise UserError(f"the {grammar.kind} cannot be compiled: {matcher.get_error()[:SHOWN]}")
        return matcher
