"""Expressions that choose runs by their values: `lr > 1e-4 and loss < 2`, `name ~ "math"`, `not (tag = old)`.

    expression  := conjunction ("or" conjunction)*
    conjunction := negation ("and" negation)*
    negation    := "not" negation | "(" expression ")" | NAME [operator value]
    operator    := < | <= | > | >= | = | == | != | ~ | !~
    value       := number | "text" | 'text' | word

A name alone means that the run has such a value. `~` means "contains". Text is compared without regard to case; a list,
such as tags, fits if one of its items does. A run without the value fits no comparison except != and !~. A name with
other characters than letters, digits and _ . / : @ - stands in backquotes. Nothing is evaluated as code.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tinsmith.errors import RequestError

Value: TypeAlias = float | str | Sequence[str]
Values: TypeAlias = Mapping[str, Value]
"""The values of a run by name; missing ones are absent."""
Condition: TypeAlias = Callable[[Values], bool]

MAX_DEPTH = 32
"""Most levels of brackets and negations."""

_TOKEN = re.compile(
    r"""\s*(?:(?P<operator><=|>=|==|!=|!~|<|>|=|~)|(?P<bracket>[()])
    |(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w./:@-]))
    |"(?P<double>[^"]*)"|'(?P<single>[^']*)'|`(?P<quoted>[^`]+)`|(?P<word>[\w./:@-]+))""",
    re.VERBOSE,
)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_ORDERS: Mapping[str, Callable[[float | str, float | str], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
}
_NEGATIONS = {"!=": "=", "!~": "~"}
_OPERATORS = "< <= > >= = != ~ !~"


def to_number(text: str) -> float | None:
    """The number that a text is, such as 1e-4; None for any other text."""
    return float(text) if _NUMBER.fullmatch(text) else None


@dataclass(frozen=True, slots=True)
class RunFilter:
    """A parsed expression, with the names in it."""

    fits: Condition
    names: frozenset[str]


def parse_filter(text: str) -> RunFilter:
    """Parse an expression; an empty one fits every run. Raises RequestError, which names the place of the mistake."""
    if not text.strip():
        return RunFilter(lambda _values: True, frozenset())
    return _Parser(text).parse()


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    position: int


def _split_tokens(text: str) -> Iterator[_Token]:
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            start = position + len(text[position:]) - len(text[position:].lstrip())
            raise _error(start, f"{text[start]!r} begins no name, number, operator or closed quotation")
        start = match.end() - len(match.group().lstrip())
        yield _Token(match.lastgroup, match.group(match.lastgroup), start)
        position = match.end()
    yield _Token("end", "the end", end)


def _is_join(token: _Token) -> bool:
    return token.kind == "word" and token.text.lower() in ("and", "or")


def _quote(token: _Token) -> str:
    return token.text if token.kind == "end" else repr(token.text)


def _is_word(token: _Token) -> bool:
    return token.kind == "word" and not _is_join(token)


def _error(position: int, reason: str) -> RequestError:
    return RequestError("filter", f"filter: at character {position + 1}, {reason}")


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = list(_split_tokens(text))
        self._at = 0
        self._names: set[str] = set()

    def parse(self) -> RunFilter:
        condition = self._disjunction(0)
        if self._token.kind != "end":
            raise _error(self._token.position, f"{self._token.text!r} follows a whole expression; join with and, or")
        return RunFilter(condition, frozenset(self._names))

    @property
    def _token(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._token
        self._at += 1
        return token

    def _accepts(self, kind: str, text: str) -> bool:
        """Whether the next token is this one, which is then taken."""
        fits = self._token.kind == kind and self._token.text.lower() == text
        self._at += fits
        return fits

    def _disjunction(self, depth: int) -> Condition:
        terms = [self._conjunction(depth)]
        while self._accepts("word", "or"):
            terms.append(self._conjunction(depth))
        return terms[0] if len(terms) == 1 else lambda values: any(term(values) for term in terms)

    def _conjunction(self, depth: int) -> Condition:
        terms = [self._negation(depth)]
        while self._accepts("word", "and"):
            terms.append(self._negation(depth))
        return terms[0] if len(terms) == 1 else lambda values: all(term(values) for term in terms)

    def _negation(self, depth: int) -> Condition:
        if depth > MAX_DEPTH:
            raise _error(self._token.position, f"brackets and negations are nested more than {MAX_DEPTH} deep")
        if self._accepts("word", "not"):
            negated = self._negation(depth + 1)
            return lambda values: not negated(values)
        opening = self._token.position
        if self._accepts("bracket", "("):
            inner = self._disjunction(depth + 1)
            if not self._accepts("bracket", ")"):
                raise _error(self._token.position, f"the bracket opened at character {opening + 1} is not closed")
            return inner
        return self._comparison()

    def _comparison(self) -> Condition:
        token = self._take()
        if token.kind != "quoted" and not _is_word(token):
            raise _error(token.position, f"the name of a value is expected, not {_quote(token)}")
        name = token.text
        self._names.add(name)
        if self._token.kind in ("end", "bracket") or _is_join(self._token):
            return lambda values: name in values
        sign = self._take()
        if sign.kind != "operator":
            raise _error(sign.position, f"one of {_OPERATORS} is expected after {name}, not {_quote(sign)}")
        target = self._take()
        if target.kind not in ("number", "double", "single") and not _is_word(target):
            raise _error(
                target.position, f"a number or text is expected after {name} {sign.text}, not {_quote(target)}"
            )
        return _compare(name, sign.text, target.text)


def _compare(name: str, sign: str, target: str) -> Condition:
    if positive := _NEGATIONS.get(sign):
        fits = _compare(name, positive, target)
        return lambda values: not fits(values)
    text, target_number = target.casefold(), to_number(target)

    def fits_one(value: float | str) -> bool:
        if sign == "~":
            return text in _text_of(value).casefold()
        if target_number is None:
            return isinstance(value, str) and _ORDERS[sign](value.casefold(), text)
        value_number = to_number(value) if isinstance(value, str) else value
        return value_number is not None and _ORDERS[sign](value_number, target_number)

    def fits_any(values: Values) -> bool:
        value = values.get(name)
        if value is None:
            return False
        return any(map(fits_one, [value] if isinstance(value, float | int | str) else value))

    return fits_any


def _text_of(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
