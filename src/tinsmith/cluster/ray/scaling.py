"""How many processes of each role there should be: a pure function of what waits, the rules and the time.

A role grows once, for `up_after_s` without a break, more work waited than it is for, and then to the least that was
needed in that time. It shrinks to the most that was needed in `down_after_s`. So a burst that is over before it was
noticed starts nothing, and a pause between two steps ends nothing. A history that is shorter than the time it is asked
about decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Depths = Mapping[str, Mapping[str, float]]
"""What waits: role -> base model -> tokens or batches. One process serves all base models, side by side."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`work` is how much may wait for each process before there should be one more."""

    minimum: int
    maximum: int
    work: float
    up_after_s: float = 10.0
    down_after_s: float = 300.0

    def __post_init__(self) -> None:
        assert 0 <= self.minimum <= self.maximum and self.work > 0

    def bounded(self, count: int) -> int:
        return min(max(count, self.minimum), self.maximum)

    def needed(self, waiting: Mapping[str, float]) -> int:
        """By the base model for which most waits."""
        return self.bounded(math.ceil(max(waiting.values(), default=0.0) / self.work))


@dataclass(frozen=True, slots=True)
class Past:
    """What one role had, and what was needed at each look, oldest first."""

    count: int
    looks: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    counts: Mapping[str, int]
    past: Mapping[str, Past]
    """For the next look."""


def wanted(depths: Depths, rules: Mapping[str, Rule], past: Mapping[str, Past], now: float) -> Wanted:
    """`now` never goes back. A role without a past has its minimum."""
    after = {
        role: _look(rule, past.get(role, Past(rule.minimum)), rule.needed(depths.get(role, {})), now)
        for role, rule in rules.items()
    }
    return Wanted({role: each.count for role, each in after.items()}, after)


def _look(rule: Rule, past: Past, needed: int, now: float) -> Past:
    looks = (*past.looks, (now, needed))
    count = rule.bounded(past.count)
    lately, long_since = _since(looks, now - rule.up_after_s), _since(looks, now - rule.down_after_s)
    if lately and min(lately) > count:
        count = min(lately)
    elif long_since and max(long_since) < count:
        count = max(long_since)
    return Past(count, _pruned(looks, now - max(rule.up_after_s, rule.down_after_s)))


def _since(looks: tuple[tuple[float, int], ...], start: float) -> list[int]:
    """What was needed from `start` on; nothing if nobody looked at that time yet."""
    kept = _pruned(looks, start)
    return [needed for _, needed in kept] if kept[0][0] <= start else []


def _pruned(looks: tuple[tuple[float, int], ...], start: float) -> tuple[tuple[float, int], ...]:
    """Without what was over by `start`: the last look before it says what was needed then."""
    first = max((index for index, (at, _) in enumerate(looks) if at <= start), default=0)
    return looks[first:]
