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
_STANDALONE = re.compile(r"\s*\**\(?([A-Za-z])\)?\**[.):]?(?:\s|$)")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str, ignore_case: bool) -> str:
    """The text with white space collapsed to single spaces, and in lower case with `ignore_case`."""
    plain = " ".join(text.split())
    return plain.casefold() if ignore_case else plain


def exact(text: str, reference: str, ignore_case: bool) -> float:
    return float(normalize(text, ignore_case) == normalize(reference, ignore_case))


def contains(text: str, reference: str, ignore_case: bool) -> float:
    return float(normalize(reference, ignore_case) in normalize(text, ignore_case))


def find_boxed(text: str) -> str | None:
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
    inside = find_boxed(text)
    for part in [text] if inside is None else [inside]:
        values = [value for match in _FRACTION.finditer(part) if (value := _fraction(match)) is not None]
        if values:
            return values[-1]
    return None


def _fraction(match: re.Match[str]) -> Fraction | None:
    numerator, denominator = (match[1], match[2]) if match[1] is not None else (match[3], match[4] or "1")
    if len(numerator) > MAX_DIGITS or len(denominator) > MAX_DIGITS:
        return None
    try:
        return Fraction(numerator.replace(",", "")) / Fraction(denominator.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def numeric(text: str, reference: object, tolerance: float) -> float:
    """1 if both have the same number. `tolerance` is relative to the reference, or absolute below 1."""
    expected = number_in(reference if isinstance(reference, str) else json.dumps(reference))
    if expected is None:
        raise ValueError(f"the reference {reference!r} holds no number")
    actual = number_in(text)
    if actual is None:
        return 0.0
    return float(abs(actual - expected) <= Fraction(tolerance) * max(Fraction(1), abs(expected)))


def letter_in(text: str) -> str | None:
    r"""The letter of a choice: in `\boxed{...}`, after `answer is`, in brackets, or at the beginning, alone."""
    inside = find_boxed(text)
    if inside is not None:
        match = re.search(r"[A-Za-z](?![A-Za-z])", inside)
        return match[0].upper() if match else None
    for pattern in (_ANSWER_IS, _PARENTHESIZED):
        letters = pattern.findall(text)
        if letters:
            return letters[-1].upper()
    standalone = _STANDALONE.match(text)
    return standalone[1].upper() if standalone else None


def choice(text: str, reference: object) -> float:
    """`reference` is a letter, or the index of a choice from 0."""
    if isinstance(reference, int) and not isinstance(reference, bool) and 0 <= reference < 26:
        expected = string.ascii_uppercase[reference]
    elif isinstance(reference, str) and (letter := letter_in(reference)) is not None:
        expected = letter
    else:
        raise ValueError(f"the reference {reference!r} is neither the letter of a choice nor an index from 0 to 25")
    return float(letter_in(text) == expected)


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
    expected = json_in(reference) if isinstance(reference, str) else reference
    try:
        return float(_is_same_json(json_in(text), expected))
    except json.JSONDecodeError:
        return 0.0


def _is_same_json(first: object, second: object) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_is_same_json(first[name], second[name]) for name in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_is_same_json, first, second))
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    return first == second


def words_of(text: str) -> list[str]:
    """The words in lower case, without punctuation and articles, as usual for questions with short answers."""
    plain = text.lower().translate(_PUNCTUATION).split()
    return [word for word in plain if word not in ("a", "an", "the")]


def f1(text: str, reference: str) -> float:
    """The F1 score of the words, with multiplicity."""
    words, reference_words = words_of(text), words_of(reference)
    if not words or not reference_words:
        return float(words == reference_words)
    common = sum((Counter(words) & Counter(reference_words)).values())
    return 2 * common / (len(words) + len(reference_words))


def rouge_l(text: str, reference: str) -> float:
    """The F-measure of the longest common subsequence of words."""
    words, reference_words = (re.findall(r"[a-z0-9]+", string.lower()) for string in (text, reference))
    if not words or not reference_words:
        return float(words == reference_words)
    return 2 * common_length(words, reference_words) / (len(words) + len(reference_words))


def edit_similarity(text: str, reference: str) -> float:
    """1 minus the edit distance divided by the longer length."""
    longest = max(len(text), len(reference))
    return 1.0 - edit_distance(text, reference) / longest if longest else 1.0


def common_length(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """The length of the longest common subsequence; bit-parallel (Hyyro, 2004)."""
    positions = _positions(first)
    full = (1 << len(first)) - 1
    row = full
    for item in second:
        hits = row & positions.get(item, 0)
        row = ((row + hits) | (row - hits)) & full
    return len(first) - row.bit_count()


def edit_distance(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """The Levenshtein distance; bit-parallel (Myers, 1999)."""
    if not first:
        return len(second)
    positions, full, last = _positions(first), (1 << len(first)) - 1, 1 << (len(first) - 1)
    rises, falls, distance = full, 0, len(first)
    for item in second:
        hits = positions.get(item, 0)
        vertical = hits | falls
        horizontal = (((hits & rises) + rises) ^ rises) | hits
        increases = falls | (full & ~(horizontal | rises))
        decreases = rises & horizontal
        distance += bool(increases & last) - bool(decreases & last)
        increases, decreases = (increases << 1 | 1) & full, decreases << 1 & full
        rises, falls = decreases | (full & ~(vertical | increases)), increases & vertical
    return distance


def _positions(items: Sequence[Hashable]) -> dict[Hashable, int]:
    positions: dict[Hashable, int] = {}
    for index, item in enumerate(items):
        positions[item] = positions.get(item, 0) | 1 << index
    return positions


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k samples passes."""
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
