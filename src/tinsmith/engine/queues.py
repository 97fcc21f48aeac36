"""The engine's view of its waiting requests: metadata in memory, mirrored from the database.

Holds which seq_id each model may run next; skips refused and given-up numbers. Knows no SQL and no device.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence

from tinsmith.engine.batching_window import LATE_S, Rhythm
from tinsmith.engine.scheduler import PASS_KINDS, ModelQueue
from tinsmith.types import Pending

IDLE_LANE_S = 600.0
"""After so long the rhythm of a run says nothing any more."""


class Lane:
    """One model's requests."""

    def __init__(self, model_id: str, tenant_id: str, next_seq_id: int) -> None:
        self.model_id = model_id
        self.tenant_id = tenant_id
        self.next_seq_id = next_seq_id
        self.idle_since = time.monotonic()
        """By the monotonic clock: when the last request left it, if none is waiting."""
        self.held_until = 0.0
        """By the monotonic clock: so long nothing of it is planned."""
        self.waiting: dict[int, Pending] = {}
        self.rhythm = Rhythm()
        self._refused: set[int] = set()
        self._gap: tuple[int, float] | None = None  # what waits behind missing ones, and since when

    def add(self, request: Pending) -> None:
        assert request.seq_id is not None
        if request.state == "refused":
            if request.seq_id >= self.next_seq_id:
                self._refused.add(request.seq_id)
        else:
            if request.seq_id == self.next_seq_id and request.kind in PASS_KINDS:
                self.rhythm.came(request.created_at)
            self.waiting[request.seq_id] = request
        self._skip_refused()

    def done(self, seq_id: int) -> int:
        """Move past an applied request; returns the highest seq_id that is now behind us."""
        del self.waiting[seq_id]
        self.next_seq_id = max(self.next_seq_id, seq_id + 1)
        self._skip_refused()
        if not self.waiting:
            self.idle_since = time.monotonic()
            self.rhythm.answered(time.time())
        return self.next_seq_id - 1

    def _skip_refused(self) -> None:
        while self.next_seq_id in self._refused:
            self._refused.discard(self.next_seq_id)
            self.next_seq_id += 1

    @property
    def is_held(self) -> bool:
        return self.held_until > 0.0 and time.monotonic() < self.held_until

    def pass_due_in_s(self, moment: float) -> float | None:
        """Until when its next pass is expected right after its last answer; None if it is not, or is there."""
        if not self.waiting:
            return self.rhythm.due_in_s(moment)
        if not self._ends_with_step:
            return None
        return LATE_S if self.next_seq_id + 1 in self.waiting else self.rhythm.pause_s

    def pass_due_beside_s(self, first: Lane, moment: float) -> float | None:
        """Until when its next pass is expected because that of `first` is there; None likewise."""
        if self.waiting and not (self._ends_with_step and len(self.waiting) == 1):
            return None
        return self.rhythm.due_beside_s(first.rhythm, moment)

    @property
    def _ends_with_step(self) -> bool:
        """An optimizer step could run, and then a pass, or nothing else is waiting."""
        head, behind = (self.waiting.get(self.next_seq_id + ahead) for ahead in (0, 1))
        if head is None or head.kind != "optim_step":
            return False
        return behind.kind in PASS_KINDS if behind else len(self.waiting) == 1

    @property
    def has_gap(self) -> bool:
        return bool(self.waiting) and self.next_seq_id not in self.waiting

    def give_up_gap(self, patience_s: float) -> tuple[int, int] | None:
        """Skip the missing seq_ids if what waits behind them has waited for `patience_s`: the first and last.

        The wall clock counts for what is seen for the first time only, since it can be set.
        """
        if not self.has_gap:
            self._gap = None
            return None
        nearest = min(self.waiting)
        if self._gap is None or self._gap[0] != nearest:
            self._gap = nearest, time.monotonic() - max(0.0, time.time() - self.waiting[nearest].created_at)
        if time.monotonic() - self._gap[1] < patience_s:
            return None
        missing = self.next_seq_id, nearest - 1
        self.next_seq_id = nearest
        return missing


class Queues:
    """All lanes, the samples by tenant, and what must happen out of order (unloading, cancelling)."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        # By request_id, in order of arrival. Linked, since a plain dict has to search for its first entry after many
        # were taken from its front.
        self.samples: defaultdict[str, OrderedDict[str, Pending]] = defaultdict(OrderedDict)
        self.unloads: list[Pending] = []
        self.cancels: list[Pending] = []
        self.known: set[str] = set()

    def add_sample(self, request: Pending) -> None:
        self.samples[request.tenant_id][request.request_id] = request

    def return_samples(self, requests: Sequence[Pending]) -> None:
        """To the front of their tenants' queues, in this order."""
        for request in reversed(requests):
            self.add_sample(request)
            self.samples[request.tenant_id].move_to_end(request.request_id, last=False)

    def waiting_samples(self) -> dict[str, Collection[Pending]]:
        """The samples of each tenant that has any."""
        return {tenant_id: requests.values() for tenant_id, requests in self.samples.items()}

    def take_samples(self, taken: Iterable[Pending]) -> None:
        for request in taken:
            del self.samples[request.tenant_id][request.request_id]
            if not self.samples[request.tenant_id]:
                del self.samples[request.tenant_id]

    def withdraw_samples(self, tenant_id: str, name: str) -> list[str]:
        """Take out one sample, or all of one sampling session; returns their request_ids."""
        requests = self.samples.get(tenant_id, OrderedDict())
        if name in requests:
            gone = [requests[name]]
        else:
            gone = [request for request in requests.values() if request.sampling_session_id == name]
        self.take_samples(gone)
        return [request.request_id for request in gone]

    def model_queues(self) -> list[ModelQueue]:
        return [
            ModelQueue(lane.model_id, lane.tenant_id, lane.next_seq_id, lane.waiting)
            for lane in self.lanes.values()
            if lane.waiting and not lane.is_held
        ]

    def passes_due(self, ready: Sequence[Pending]) -> tuple[list[float], list[float]]:
        """Until when passes of other models are expected: of those that came with the first of these before, and of
        those that come right after their answers. Only one tenant's passes wait for each other: a tenant does not wait
        for the convenience of another.
        """
        tenants = {request.tenant_id for request in ready}
        if len(tenants) > 1:
            return [], []
        moment = time.time()
        first = self.lanes[min(ready, key=lambda request: request.created_at).model_id or ""]
        lanes = [
            lane for lane in self.lanes.values() if lane is not first and lane.tenant_id in tenants and not lane.is_held
        ]
        beside = (lane.pass_due_beside_s(first, moment) for lane in lanes)
        quick = (lane.pass_due_in_s(moment) for lane in lanes)
        return [due_s for due_s in beside if due_s is not None], [due_s for due_s in quick if due_s is not None]

    def passes_wait(self) -> bool:
        """Whether a pass could be in the next step."""
        heads = (lane.waiting.get(lane.next_seq_id) for lane in self.lanes.values() if not lane.is_held)
        return any(head is not None and head.kind in PASS_KINDS for head in heads)

    def forget_idle_lanes(self) -> None:
        """Of runs that sent nothing for long. A request makes its lane anew, from what the run's row says."""
        until = time.monotonic() - IDLE_LANE_S
        for lane in [lane for lane in self.lanes.values() if not lane.waiting and lane.idle_since < until]:
            del self.lanes[lane.model_id]

    def forget_lane(self, model_id: str) -> list[Pending]:
        """Drop a model's lane; returns what still waited in it."""
        lane = self.lanes.pop(model_id, None)
        return list(lane.waiting.values()) if lane else []
