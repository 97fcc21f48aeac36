"""What work cost lately: seconds per token of passes, and how many tokens take as long as one save, load or creation.

Singles have medians of the last few: one that had to bring its model back first must not make all of its kind look
expensive. A step's price is by the token, too, and the larger of two: the median over the tokens of the last steps,
where a short step, which is mostly overhead, counts for little; and the mean of the last two, so that a change to more
expensive work shows after one step. Without a pass to compare with there are no prices. Knows no request.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque

REMEMBERED = 9
NEWEST = 2


class Prices:
    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # tokens and seconds
        self._single_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def note_passes(self, num_tokens: int, seconds: float) -> None:
        if num_tokens:
            self._steps.append((num_tokens, seconds))

    def note_single(self, kind: str, seconds: float) -> None:
        self._single_s[kind].append(seconds)

    def in_tokens(self) -> dict[str, int]:
        """By kind of single; no entry where there is nothing to go by."""
        if not self._steps or not (token_s := statistics.median(seconds / tokens for tokens, seconds in self._steps)):
            return {}
        return {kind: round(statistics.median(seconds) / token_s) for kind, seconds in self._single_s.items()}

    def token_s(self) -> float | None:
        """Seconds that one token of a step is expected to take; None before the first pass."""
        if not self._steps:
            return None
        newest = list(self._steps)[-NEWEST:]
        mean = sum(seconds for _, seconds in newest) / sum(tokens for tokens, _ in newest)
        return max(mean, self._median())

    def _median(self) -> float:
        """Half of the tokens took at least this long each."""
        prices = sorted((seconds / tokens, tokens) for tokens, seconds in self._steps)
        left = sum(tokens for _, tokens in prices) / 2
        for price, tokens in prices:
            left -= tokens
            if left <= 0:
                return price
        return prices[-1][0]
