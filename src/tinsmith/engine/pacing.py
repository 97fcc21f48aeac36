"""How long one iteration of an engine may take: the bound that keeps one tenant's flood from delaying others.

An engine alternates training and decoding, and new requests wait meanwhile. While several tenants have work, or had
some recently, a step of passes and the decoding after it take at most `step_seconds` together, as predicted by the cost
model: a step is limited by tokens, and further passes wait for the next. Where samples wait as well, training and
decoding get half of the time each. For a single tenant, decoding lasts as long as the step, and steps are
SINGLE_TENANT_FACTOR times as long: a second tenant may arrive at any moment, and by then the overhead of a step is less
than a hundredth of it. Before the first pass no cost is known, and a step is short (COLD_TOKENS).

`CostModel` predicts the time of work from recent measurements. Singles use the median of the last few, so that one
whose model had to be restored first does not make its kind look expensive. A token's cost is the larger of two values:
the median over the tokens of the last steps, in which a short step, mostly overhead, counts for little; and the mean of
the last two steps, so that a change to more expensive work shows after one step.

Callers pass times: no clock here. Knows no request and no device.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable

ACTIVE_S = 60.0
"""A tenant counts as active for this long after its last work: training loops pause between their steps."""

COLD_TOKENS = 1024
"""Tokens of a step before the cost of a token is known."""

SINGLE_TENANT_FACTOR = 5
"""The step of a single tenant may be predicted to take this many times as long as a step among several."""


class StepPacer:
    def __init__(self, step_seconds: float) -> None:
        """`step_seconds` bounds an iteration among several tenants; 0 disables the bound."""
        self._step_s = step_seconds
        self._seen_at: dict[str, float] = {}
        self._is_shared = False

    def record_tenants(self, tenant_ids: Iterable[str], now_s: float) -> None:
        """These tenants have work now."""
        for tenant_id in tenant_ids:
            self._seen_at[tenant_id] = now_s
        self._seen_at = {name: at for name, at in self._seen_at.items() if now_s - at <= ACTIVE_S}
        self._is_shared = self._step_s > 0 and len(self._seen_at) > 1

    @property
    def is_shared(self) -> bool:
        """Whether several tenants have work or recently had."""
        return self._is_shared

    def step_tokens(self, token_budget: int, token_s: float | None, *, samples: bool) -> int:
        """The most tokens of the next step, within `token_budget`. `token_s`: seconds per token, None if unknown;
        `samples`: whether there are samples to decode as well.
        """
        if not self._step_s or token_s == 0:
            return token_budget
        if token_s is None:
            return min(COLD_TOKENS, token_budget)
        bound_s = SINGLE_TENANT_FACTOR * self._step_s
        if self._is_shared:
            bound_s = self._step_s / 2 if samples else self._step_s
        return max(1, min(token_budget, int(bound_s / token_s)))

    def decode_s(self, trained_s: float, decoded_s: float) -> float:
        """Seconds to decode after a step that trained for `trained_s` and decoded for `decoded_s` meanwhile."""
        if not self._is_shared:
            return trained_s + decoded_s
        return max(0.0, min(trained_s, self._step_s / 2) - decoded_s)

    def decode_between_s(self, trained_s: float) -> float:
        """Seconds to decode between two parts of a step, `trained_s` after the last time; 0 still means one decode
        step.
        """
        return min(trained_s, self._step_s / 2) if self._is_shared else 0.0


MEASURED_STEPS = 9


NEWEST_STEPS = 2


class CostModel:
    """Seconds per token of passes, and the cost of a save, load or creation in tokens."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=MEASURED_STEPS)  # tokens and seconds
        self._single_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MEASURED_STEPS))

    def record_passes(self, num_tokens: int, seconds: float) -> None:
        if num_tokens:
            self._steps.append((num_tokens, seconds))

    def record_single(self, kind: str, seconds: float) -> None:
        self._single_s[kind].append(seconds)

    def in_tokens(self) -> dict[str, int]:
        """Cost in tokens by kind of single; empty before the first pass, without kinds that have not run."""
        if not self._steps or not (token_s := statistics.median(seconds / tokens for tokens, seconds in self._steps)):
            return {}
        return {kind: round(statistics.median(seconds) / token_s) for kind, seconds in self._single_s.items()}

    def token_s(self) -> float | None:
        """Predicted seconds per token of a step; None before the first pass."""
        if not self._steps:
            return None
        newest = list(self._steps)[-NEWEST_STEPS:]
        mean = sum(seconds for _, seconds in newest) / sum(tokens for tokens, _ in newest)
        return max(mean, self._median())

    def _median(self) -> float:
        """Half of the tokens took at least this long each."""
        costs = sorted((seconds / tokens, tokens) for tokens, seconds in self._steps)
        remaining_tokens = sum(tokens for _, tokens in costs) / 2
        for cost_s, tokens in costs:
            remaining_tokens -= tokens
            if remaining_tokens <= 0:
                return cost_s
        return costs[-1][0]
