"""Whether passes that could run now wait for others that will be here in a moment, so that all share one step.

A short step takes about as long for one model as for several. Clients that work in lockstep send within milliseconds of
each other, and an engine that begins with the first of them has the others wait for all of its step. So each model's
`Rhythm` notes when its client sends. A model is expected if its last two passes came at the same time as those of one
that is here again, or if both came right after an answer. Passes are held for as long as somebody is expected, and for
a share of what a short step takes at most, whatever comes; so a model that is alone never waits, and a wait for nobody
costs little. An optimizer step with a pass behind it is as good as that pass.

Seconds and moments are given: no clock here. Knows no request, no tenant and no device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

MOST_S = 0.1
SHARE = 0.5
"""Passes are held for MOST_S, or this share of a short step's time, whichever is less."""

LATE_S = 0.002
"""Somebody is expected until this much later than before, and by half of the time that it took then."""

REMEMBERED = 9


class Rhythm:
    """When one model's client sends a pass while nothing else of the model is left to do."""

    __slots__ = ("_answered_at", "_came_at", "_pauses_s")

    def __init__(self) -> None:
        self._answered_at: float | None = None
        self._pauses_s: deque[float] = deque(maxlen=2)
        self._came_at: deque[float] = deque(maxlen=3)

    def answered(self, moment: float) -> None:
        """Nothing of the model is left to do."""
        self._answered_at = moment

    def came(self, moment: float) -> None:
        """A pass is there, and nothing was before it."""
        self._came_at.append(moment)
        if self._answered_at is not None:
            self._pauses_s.append(max(0.0, moment - self._answered_at))
            self._answered_at = None

    @property
    def pause_s(self) -> float | None:
        """The pause after the next answer; None if it cannot be told."""
        return max(self._pauses_s) if len(self._pauses_s) == self._pauses_s.maxlen else None

    def due_in_s(self, moment: float) -> float | None:
        """Until when the next pass is expected after the last answer; None if it is not, or not any more."""
        if self._answered_at is None or (pause_s := self.pause_s) is None:
            return None
        return _left(self._answered_at, pause_s, moment)

    def due_beside_s(self, first: Rhythm, moment: float) -> float | None:
        """Until when the next pass is expected because `first`, who came with this one before, is here again."""
        if len(first._came_at) < 3 or len(self._came_at) < 2:
            return None
        again, *before = reversed(first._came_at)
        lags_s = [mine - others for mine, others in zip(reversed(self._came_at), before, strict=False)]
        if max(map(abs, lags_s)) > MOST_S:
            return None
        return _left(again, max(0.0, *lags_s), moment)


def _left(since: float, usual_s: float, moment: float) -> float | None:
    left = since + 1.5 * usual_s + LATE_S - moment
    return left if left > 0.0 else None


class Gathering:
    """Of one engine's passes."""

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=REMEMBERED)
        self._held_since: float | None = None

    def ran(self, passes_s: float) -> None:
        """Passes ran, and nothing is held any more."""
        self._steps_s.append(passes_s)
        self._held_since = None

    def most_s(self) -> float:
        """For how long passes are held at most."""
        return min(MOST_S, SHARE * min(self._steps_s, default=0.0))

    def wait_s(self, beside_s: Sequence[float], quick_s: Sequence[float], moment: float) -> float:
        """For how long to hold what is ready, if nothing comes; 0 to run it. `beside_s` says until when others are
        expected who came with the first of those that are ready: all of them, or there are two steps all the same.
        `quick_s` are those that come right after their answers; they may have nothing to do with who is here, who waits
        for them half as long.
        """
        since = moment if self._held_since is None else self._held_since
        left = self.most_s() - (moment - since)
        worth = [due_s for due_s in quick_s if 2 * due_s <= left]
        if beside_s and max(beside_s) <= left:
            worth += beside_s
        if not worth:
            return 0.0
        self._held_since = since
        return max(worth)
