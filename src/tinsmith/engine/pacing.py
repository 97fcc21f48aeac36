"""How long one turn of an engine may take: the bound that keeps one tenant's flood from delaying the others.

An engine trains and decodes in turn, and new requests wait meanwhile. While several tenants have work, or had some
lately, a step of passes and the decoding after it together take at most `step_seconds`, as far as the cost model
predicts: a step is cut by tokens, and passes beyond it wait for the next. Where samples wait as well, training and
decoding have half of the time each. A tenant that is alone decodes for as long as a step took, and its steps are ALONE
times as long: a second tenant may come at any moment, and what a step costs besides its tokens is by then less than a
hundredth of it. Before the first pass no cost is known, and a step is short (COLD_TOKENS).

`CostModel` predicts the time of work from recent measurements. Singles have the median of the last few, so that one
whose model had to be restored first does not make its kind look expensive. A token's cost is the larger of two: the
median over the tokens of the last steps, where a short step, which is mostly overhead, counts for little; and the mean
of the last two steps, so that a change to more expensive work shows after one.

The caller passes moments: no clock here. Knows no request and no device.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable

LATELY_S = 60.0
"""A tenant counts as active for this long after its last work: training loops pause between their steps."""

COLD_TOKENS = 1024
"""Tokens of a step before the cost of a token is known."""

ALONE = 5
"""The step of a tenant that is alone is predicted to take at most this many times as long as one among several."""


class Pace:
    def __init__(self, step_seconds: float) -> None:
        """`step_seconds` bounds a turn among several tenants, in seconds; 0 for no bound."""
        self._step_s = step_seconds
        self._seen_at: dict[str, float] = {}
        self._is_shared = False

    def saw(self, tenant_ids: Iterable[str], moment: float) -> None:
        """These tenants have work now."""
        for tenant_id in tenant_ids:
            self._seen_at[tenant_id] = moment
        self._seen_at = {name: at for name, at in self._seen_at.items() if moment - at <= LATELY_S}
        self._is_shared = self._step_s > 0 and len(self._seen_at) > 1

    @property
    def is_shared(self) -> bool:
        """Whether several tenants have work or lately had."""
        return self._is_shared

    def step_tokens(self, token_budget: int, token_s: float | None, *, samples: bool) -> int:
        """The most tokens of the next step, within `token_budget`. `token_s` is the cost of one in seconds, None if it
        is unknown; `samples` says whether there are samples to decode as well.
        """
        if not self._step_s or token_s == 0:
            return token_budget
        if token_s is None:
            return min(COLD_TOKENS, token_budget)
        bound_s = ALONE * self._step_s
        if self._is_shared:
            bound_s = self._step_s / 2 if samples else self._step_s
        return max(1, min(token_budget, int(bound_s / token_s)))

    def decode_s(self, trained_s: float, decoded_s: float) -> float:
        """For how long to decode after a step that trained for `trained_s` and decoded for `decoded_s` meanwhile."""
        if not self._is_shared:
            return trained_s + decoded_s
        return max(0.0, min(trained_s, self._step_s / 2) - decoded_s)

    def decode_between_s(self, trained_s: float) -> float:
        """For how long to decode between two parts of a step, `trained_s` after the last time; one decode step is due
        in any case.
        """
        return min(trained_s, self._step_s / 2) if self._is_shared else 0.0


REMEMBERED = 9


NEWEST = 2


class CostModel:
    """Seconds per token of passes, and how many tokens take as long as one save, load or creation."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # tokens and seconds
        self._single_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def note_passes(self, num_tokens: int, seconds: float) -> None:
        if num_tokens:
            self._steps.append((num_tokens, seconds))

    def note_single(self, kind: str, seconds: float) -> None:
        self._single_s[kind].append(seconds)

    def in_tokens(self) -> dict[str, int]:
        """Cost in tokens by kind of single; empty before the first pass, without the kinds that have not run."""
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
        costs = sorted((seconds / tokens, tokens) for tokens, seconds in self._steps)
        left = sum(tokens for _, tokens in costs) / 2
        for cost_s, tokens in costs:
            left -= tokens
            if left <= 0:
                return cost_s
        return costs[-1][0]
