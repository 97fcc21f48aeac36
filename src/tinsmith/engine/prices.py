"""What barriers cost lately, in the currency of passes: how many tokens take as long as one save, load or creation.

Medians of the last few: one that had to bring its model back first must not make all of its kind look expensive.
Without a pass to compare with there are no prices. Knows no request.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque

REMEMBERED = 9


class Prices:
    def __init__(self) -> None:
        self._token_s: deque[float] = deque(maxlen=REMEMBERED)
        self._single_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def note_passes(self, num_tokens: int, seconds: float) -> None:
        if num_tokens:
            self._token_s.append(seconds / num_tokens)

    def note_single(self, kind: str, seconds: float) -> None:
        self._single_s[kind].append(seconds)

    def in_tokens(self) -> dict[str, int]:
        """By kind of single; no entry where there is nothing to go by."""
        if not self._token_s or not (token_s := statistics.median(self._token_s)):
            return {}
        return {kind: round(statistics.median(seconds) / token_s) for kind, seconds in self._single_s.items()}
