"""Grammar-constrained decoding: which tokens may come next (llguidance does the work).

A grammar is compiled once, within limits, and cached; each answer walks a copy. A grammar that is too large or too
ambiguous is rejected at submission, or fails its request when a step exceeds its limit. Knows tokens and no model. The
library is imported with the first request that needs it.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property, partial
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from tinsmith.errors import NotSupportedError, UserError
from tinsmith.samplers.local.reasoning import Constraint, MessageBudget, ReasoningConstraint
from tinsmith.types import GRAMMAR_LIMITS, JSON_FORM, Adjustments, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions
    from transformers import PreTrainedTokenizerFast

MAX_COMPILED = 64
REASON_CHARS = 300  # characters of the library's reason

_JSON = cast("JsonCompileOptions", dict(JSON_FORM))


MAX_NUMBER_LENGTH = 40
"""Characters of a number in JSON. A double takes 25 at most; schemas set no bound, and some models never stop."""

_NUMBER = frozenset(b"0123456789+-.eE")
_QUOTE, _ESCAPE = b'"\\'


class TokenBytes:
    """The bytes of each token of a vocabulary, and the ids of special tokens, which no JSON has inside."""

    def __init__(self, tokenizer: LLTokenizer, num_vocab: int, special_ids: frozenset[int]) -> None:
        self.special_ids = special_ids
        self.bytes_of = [tokenizer.decode_bytes([token]) for token in range(num_vocab)]
        self.continues_number = np.array([bool(spelled) and spelled[0] in _NUMBER for spelled in self.bytes_of])


class NumberRun:
    """Length of the number that the JSON text ends with, updated token by token; 0 inside a string and elsewhere. A
    special token ends what was before it: reasoning, which may have a single quotation mark.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self.token_bytes = token_bytes
        self.length = 0
        self._in_string = self._escaped = False

    def push(self, token: int) -> None:
        if token in self.token_bytes.special_ids:
            self.length, self._in_string, self._escaped = 0, False, False
            return
        for byte in self.token_bytes.bytes_of[token]:
            if self._in_string:
                self._in_string = self._escaped or byte != _QUOTE
                self._escaped = byte == _ESCAPE and not self._escaped
            else:
                self._in_string = byte == _QUOTE
                self.length = self.length + 1 if byte in _NUMBER else 0


class GrammarConstraint:
    """One answer's position in its grammar; `number_run` bounds the length of JSON numbers."""

    def __init__(self, matcher: LLMatcher, num_vocab: int, number_run: NumberRun | None) -> None:
        self._matcher = matcher
        self._num_vocab = num_vocab
        self._number_run = number_run

    def token_mask(self) -> npt.NDArray[np.bool_]:
        """[V]: the tokens that may come next, including an end token where the answer may end."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        mask_V = bits[: self._num_vocab].astype(np.bool_)
        if self._number_run is not None and self._number_run.length >= MAX_NUMBER_LENGTH:
            ending_V = mask_V & ~self._number_run.token_bytes.continues_number
            return ending_V if ending_V.any() else mask_V  # a schema may require a longer number
        return mask_V

    def push(self, token: int) -> None:
        self._matcher.consume_token(token)
        if self._number_run is not None:
            self._number_run.push(token)

    @property
    def is_finished(self) -> bool:
        """True if no token may follow; also after an error."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> UserError | None:
        if not self._matcher.is_error():
            return None
        return UserError(f"the grammar exceeds the work allowed per token: {self._matcher.get_error()[:REASON_CHARS]}")


class GrammarCache:
    """Compiles grammars for one tokenizer and keeps the MAX_COMPILED most recently used."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, num_vocab: int, end_token_ids: frozenset[int]) -> None:
        self._hf_tokenizer = tokenizer
        self._num_vocab = num_vocab
        self._end_token_ids = sorted(end_token_ids)
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def compile(self, grammar: Grammar) -> LLMatcher:
        """The compiled grammar, from the cache if it is there. Raises UserError if it cannot be compiled, and
        NotSupportedError for a model without an end token.
        """
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compiled[grammar] = self._compile_uncached(grammar)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return matcher

    def constraint(self, adjustments: Adjustments | None) -> Constraint | None:
        """A new answer's position at the start of its reasoning and grammar; None if every text is allowed."""
        if adjustments is None:
            return None
        grammar = None if adjustments.grammar is None else self._grammar_constraint(adjustments.grammar)
        if adjustments.reasoning is None:
            return grammar
        if adjustments.reasoning.header_ids:
            return MessageBudget(adjustments.reasoning, grammar, self._num_vocab)
        return ReasoningConstraint(adjustments.reasoning, grammar, *self._token_kinds)

    def _grammar_constraint(self, grammar: Grammar) -> GrammarConstraint:
        matcher = self.compile(grammar).deep_copy()
        has_numbers = grammar.kind in ("json_schema", "json_lark")
        return GrammarConstraint(matcher, self._num_vocab, NumberRun(self._token_bytes) if has_numbers else None)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer  # lazy: many engines never need it

        if not self._end_token_ids:
            raise NotSupportedError("this model has no end token, so answers cannot be constrained by a grammar")
        return from_tokenizer(self._hf_tokenizer, self._num_vocab, self._end_token_ids)

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        added = self._hf_tokenizer.added_tokens_decoder
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        return TokenBytes(self._tokenizer, self._num_vocab, special_ids)

    @cached_property
    def _token_kinds(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """[V]: the tokens that end an answer, and those of white space."""
        ends_V = np.zeros(self._num_vocab, np.bool_)
        ends_V[self._end_token_ids] = True
        spelled = self._token_bytes.bytes_of
        return ends_V, np.array([bool(text) and not text.strip() for text in spelled])

    def _compile_uncached(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._tokenizer
        of_kind = {
            "json_schema": partial(LLMatcher.grammar_from_json_schema, overrides=_JSON),
            "regex": LLMatcher.grammar_from_regex,
            "lark": LLMatcher.grammar_from_lark,
            "json_lark": LLMatcher.grammar_from_lark,
        }
        try:
            source = of_kind[grammar.kind](grammar.text)
        except ValueError as error:
            raise UserError(f"the {grammar.kind} cannot be compiled: {str(error)[:REASON_CHARS]}") from None
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
        if matcher.is_error():
            raise UserError(f"the {grammar.kind} cannot be compiled: {matcher.get_error()[:REASON_CHARS]}")
        return matcher
