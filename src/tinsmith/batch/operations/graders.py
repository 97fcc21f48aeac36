"""Scores of a text against a reference, from 0 to 1. Pure functions.

A text without an answer scores 0; a reference without one is an error in the data, and raises ValueError.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Any

MAX_DIGITS = 400
_NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?"
_FRACTION = re.compile(rf"\\d?frac\{{({_NUMBER})\}}\{{({_NUMBER})\}}|({_NUMBER})(?:\s*/\s*({_NUMBER}))?")
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_ANSWER_IS = re.compile(r"answer\s*(?:is|:)?\s*:?\s*\**\(?([A-Za-z])\)?(?![A-Za-z])", re.IGNORECASE)
_PARENTHESIZED = re.compile(r"\(([A-Za-z])\)")
_ALONE = re.compile(r"\s*\**\(?([A-Za-z])\)?\**[.):]?(?:\s|$)")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str, ignore_case: bool) -> str:
    """The text with white space collapsed to single spaces, and in lower case with `ignore_case`."""
    plain = " ".join(text.split())
    return plain.casefold() if ignore_case else plain


def exact(text: str, reference: str, ignore_case: bool) -> float:
    return float(normalized(text, ignore_case) == normalized(reference, ignore_case))


def contains(text: str, reference: str, ignore_case: bool) -> float:
    return float(normalized(reference, ignore_case) in normalized(text, ignore_case))


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for index in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : index]
    return None


def number_in(text: str) -> Fraction | None:
    r"""The number in `\boxed{...}`, if there is one, or else the last number: 1,234.5, -3e2, 3/4, \frac{3}{4}."""
    inside = boxed(text)
    for part in [text] if inside is None else [inside]:
        found = [value for each in _FRACTION.finditer(part) if (value := _fraction(each)) is not None]
        if found:
            return found[-1]
    return None


def _fraction(found: re.Match[str]) -> Fraction | None:
    above, below = (found[1], found[2]) if found[1] is not None else (found[3], found[4] or "1")
    if len(above) > MAX_DIGITS or len(below) > MAX_DIGITS:
        return None
    try:
        return Fraction(above.replace(",", "")) / Fraction(below.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def numeric(text: str, reference: object, tolerance: float) -> float:
    """1 if both have the same number. `tolerance` is relative to the reference, or absolute below 1."""
    wanted = number_in(reference if isinstance(reference, str) else json.dumps(reference))
    if wanted is None:
        raise ValueError(f"the reference {reference!r} holds no number")
    found = number_in(text)
    if found is None:
        return 0.0
    return float(abs(found - wanted) <= Fraction(tolerance) * max(Fraction(1), abs(wanted)))


def letter_in(text: str) -> str | None:
    r"""The letter of a choice: in `\boxed{...}`, after `answer is`, in brackets, or at the beginning, alone."""
    inside = boxed(text)
    if inside is not None:
        found = re.search(r"[A-Za-z](?![A-Za-z])", inside)
        return found[0].upper() if found else None
    for pattern in (_ANSWER_IS, _PARENTHESIZED):
        letters = pattern.findall(text)
        if letters:
            return letters[-1].upper()
    alone = _ALONE.match(text)
    return alone[1].upper() if alone else None


def choice(text: str, reference: object) -> float:
    """`reference` is a letter, or the index of a choice from 0."""
    if isinstance(reference, int) and not isinstance(reference, bool) and 0 <= reference < 26:
        wanted = string.ascii_uppercase[reference]
    elif isinstance(reference, str) and (letter := letter_in(reference)) is not None:
        wanted = letter
    else:
        raise ValueError(f"the reference {reference!r} is neither the letter of a choice nor an index from 0 to 25")
    return float(letter_in(text) == wanted)


def json_in(text: str) -> Any:  # noqa: ANN401  any JSON
    """The text, or the content of its last code fence, as JSON. Raises JSONDecodeError."""
    fenced = _FENCE.findall(text)
    try:
        return json.loads(fenced[-1] if fenced else text, parse_constant=_no_constant)
    except (RecursionError, ValueError) as error:  # too deep; a number of too many digits
        raise json.JSONDecodeError(str(error), text, 0) from None


def _no_constant(name: str) -> None:
    raise json.JSONDecodeError(f"{name} is not JSON", name, 0)


def json_equal(text: str, reference: object) -> float:
    """1 if both are equal as JSON: in any order of keys; 1 equals 1.0 and not true."""
    wanted = json_in(reference) if isinstance(reference, str) else reference
    try:
        return float(_same(json_in(text), wanted))
    except json.JSONDecodeError:
        return 0.0


def _same(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return one == other


def words_of(text: str) -> list[str]:
    """The words in lower case, without punctuation and articles, as usual for questions with short answers."""
    plain = text.lower().translate(_PUNCTUATION).split()
    return [word for word in plain if word not in ("a", "an", "the")]


def f1(text: str, reference: str) -> float:
    """The F1 score of the words, with multiplicity."""
    found, wanted = words_of(text), words_of(reference)
    if not found or not wanted:
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted))


def rouge_l(text: str, reference: str) -> float:
    """The F-measure of the longest common subsequence of words."""
    found, wanted = (re.findall(r"[a-z0-9]+", each.lower()) for each in (text, reference))
    if not found or not wanted:
        return float(found == wanted)
    return 2 * common_length(found, wanted) / (len(found) + len(wanted))


def edit_similarity(text: str, reference: str) -> float:
    """1 minus the edit distance divided by the longer length."""
    longest = max(len(text), len(reference))
    return 1.0 - edit_distance(text, reference) / longest if longest else 1.0


def common_length(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """The length of the longest common subsequence; bit-parallel (Hyyro, 2004)."""
    where = _positions(one)
    full = (1 << len(one)) - 1
    row = full
    for item in other:
        hits = row & where.get(item, 0)
        row = ((row + hits) | (row - hits)) & full
    return len(one) - row.bit_count()


def edit_distance(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """The Levenshtein distance; bit-parallel (Myers, 1999)."""
    if not one:
        return len(other)
    where, full, last = _positions(one), (1 << len(one)) - 1, 1 << (len(one) - 1)
    rises, falls, distance = full, 0, len(one)
    for item in other:
        hits = where.get(item, 0)
        vertical = hits | falls
        horizontal = (((hits & rises) + rises) ^ rises) | hits
        more = falls | (full & ~(horizontal | rises))
        fewer = rises & horizontal
        distance += bool(more & last) - bool(fewer & last)
        more, fewer = (more << 1 | 1) & full, fewer << 1 & full
        rises, falls = fewer | (full & ~(vertical | more)), more & vertical
    return distance


def _positions(items: Sequence[Hashable]) -> dict[Hashable, int]:
    where: dict[Hashable, int] = {}
    for index, item in enumerate(items):
        where[item] = where.get(item, 0) | 1 << index
    return where


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k samples passes."""
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
