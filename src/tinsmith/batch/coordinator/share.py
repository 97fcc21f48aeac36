"""Whose turn it is: jobs that share the slots of a pool, each by its weight. Pure, but for the clock it is given.

Each job has a virtual time: the seconds that slots worked for it, over its weight. A free slot goes to the job with
the least (of those with the highest priority). A new job begins with the least virtual time of those that are there, so
that it is owed nothing for the time before it came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Share:
    weight: float
    priority: int
    virtual: float = 0.0
    holding: dict[int, float] = field(default_factory=dict)  # slot -> since when

    def at(self, now: float, quantum_s: float) -> float:
        """Its virtual time, counting what slots do for it at this moment; a slot that it holds counts at once."""
        held = sum(max(now - since, 0.0) + quantum_s for since in self.holding.values())
        return self.virtual + held / self.weight


class FairShare:
    def __init__(self, clock: Callable[[], float], quantum_s: float) -> None:
        self._clock = clock
        self._quantum_s = quantum_s
        self._shares: dict[int, Share] = {}

    def join(self, job_id: int, weight: float, priority: int) -> None:
        now = self._clock()
        least = min((share.at(now, 0.0) for share in self._shares.values()), default=0.0)
        self._shares[job_id] = Share(weight, priority, least)

    def leave(self, job_id: int) -> None:
        self._shares.pop(job_id, None)

    def hold(self, job_id: int, slot: int) -> None:
        self._shares[job_id].holding[slot] = self._clock()

    def give_back(self, job_id: int, slot: int) -> None:
        share = self._shares.get(job_id)
        if share is not None and slot in share.holding:
            share.virtual += (self._clock() - share.holding.pop(slot)) / share.weight

    def choose(self, runnable: Iterable[int]) -> int | None:
        """The job that the next free slot goes to."""
        now = self._clock()
        shares = [(job_id, self._shares[job_id]) for job_id in runnable]
        if not shares:
            return None
        return min(shares, key=lambda one: (-one[1].priority, one[1].at(now, self._quantum_s), one[0]))[0]

    def should_yield(self, job_id: int, slot: int, others: Iterable[int]) -> bool:
        """Whether a slot that works for a job should go to another one now: one that is a quantum behind it."""
        mine = self._shares.get(job_id)
        if mine is None or slot not in mine.holding:
            return True
        now = self._clock()
        if now - mine.holding[slot] < self._quantum_s:
            return False
        for other_id in others:
            other = self._shares[other_id]
            if other.priority > mine.priority:
                return True
            behind = mine.at(now, self._quantum_s) - other.at(now, self._quantum_s)
            if other.priority == mine.priority and behind * min(mine.weight, other.weight) > self._quantum_s:
                return True
        return False
