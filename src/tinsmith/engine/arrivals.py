"""What arrives for an engine: its requests out of the rows and into its queues, each once.

The engine reads what came after the last row that it saw, what a wake-up names, and once a second what it may have
missed. What is nobody's it claims: at once what it is `preferred` for, what others are a second later, since they may
be busy or about to die. Once a second it also frees what lapsed engines had. With the runs of a dead engine comes the
word of what that was working on (`suspects`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import structlog

from tinsmith.cluster.ownership import Arrival, Ownership, preferred
from tinsmith.db.wakeups import EVERYTHING
from tinsmith.engine.quarantine import Suspects
from tinsmith.engine.queues import Lane, Queues
from tinsmith.engine.request_timings import Worklog
from tinsmith.errors import GoneError, TinsmithError, UserError
from tinsmith.runtime.failpoints import hit
from tinsmith.store.futures import Futures
from tinsmith.store.models import Models
from tinsmith.types import Pending

_WITHOUT_LANE = ("sample", "unload_model", "cancel")

Fail = Callable[[Sequence[Pending], TinsmithError], None]

log = structlog.get_logger()


class Arrivals:
    def __init__(
        self,
        ownership: Ownership,
        futures: Futures,
        models: Models,
        queues: Queues,
        suspects: Suspects,
        worklog: Worklog,
        fail: Fail,
    ) -> None:
        self._ownership = ownership
        self._futures = futures
        self._models = models
        self._queues = queues
        self._suspects = suspects
        self._worklog = worklog
        self._fail = fail
        self._last_arrival = 0
        self._others: list[str] = []
        self._left_to_others: set[str] = set()
        self._is_to_heed = False

    def fetch(self, named: Collection[str] = ()) -> None:
        """What came after the last arrival, and what a wake-up names: on Postgres, rows are not committed in order."""
        found = self._ownership.incoming(self._last_arrival)
        if found:
            hit("engine.fetched")
            self._last_arrival = max(self._last_arrival, found[-1].request.arrival)
        if late := set(named) - {"", EVERYTHING, *self._queues.known, *(one.request.request_id for one in found)}:
            found += self._ownership.named(sorted(late))
        self._take(found)
        if EVERYTHING in named:
            self._take(self._missed())

    def fetch_late(self) -> list[str]:
        """The slow poll: rows whose wake-up was lost, or that were committed out of order, or that nobody wanted.
        Returns the engines that were found to be dead.
        """
        gone = self._ownership.free_lapsed()
        if gone:
            log.warning("engines were not heard of; what they had is free", engine_ids=gone)
        self._others = self._ownership.others()
        self.fetch()
        missed = self._missed()
        self._take(missed)
        # What is free still at the next look is claimed then, whoever was to have it.
        self._left_to_others = {one.request.request_id for one in missed if one.free} - self._queues.known
        for lane in self._queues.lanes.values():
            if lane.has_gap:
                for request in self._futures.refused_of(lane.model_id, lane.next_seq_id):
                    lane.add(request)
        return gone

    def _missed(self) -> list[Arrival]:
        return self._ownership.named(sorted(self._ownership.waiting_ids() - self._queues.known))

    def _take(self, found: Sequence[Arrival]) -> None:
        wanted = [one.request.request_id for one in found if one.free and self._is_to_claim(one)]
        self._is_to_heed |= bool(wanted)  # also where the database does not say what was claimed
        claimed = self._ownership.claim(wanted) if wanted else set[str]()
        if claimed:
            hit("engine.claimed")
        for one in found:
            if not one.free or one.request.request_id in claimed:
                self._enqueue(one.request)
        if claimed:
            # Rows of the same runs may have been passed over while they were another's.
            for one in self._missed():
                if not one.free:
                    self._enqueue(one.request)
        if self._is_to_heed:
            self._suspects.heed(self._ownership.suspects(), self._queues.known)
            self._is_to_heed = False

    def _is_to_claim(self, one: Arrival) -> bool:
        if not self._others or one.request.request_id in self._left_to_others:
            return True
        me = self._ownership.engine_id
        return preferred(one.run_id or one.request.request_id, [me, *self._others]) == me

    def _enqueue(self, request: Pending) -> None:
        if request.request_id in self._queues.known:
            return
        lane, refusal = None, None
        if request.kind not in _WITHOUT_LANE and request.model_id is not None:
            # First, since it reads: what the database interrupts here is found again by the slow poll.
            lane, refusal = self._lane_of(request, request.model_id)
        if request.state == "pending":
            self._queues.known.add(request.request_id)
            self._worklog.arrived(request)
        if request.kind == "sample":
            if request.state == "pending":
                self._queues.add_sample(request)
        elif request.kind == "unload_model":
            self._queues.unloads.append(request)
        elif request.kind == "cancel":
            self._queues.cancels.append(request)
        elif lane is not None:
            lane.add(request)
        elif refusal is not None and request.state == "pending":
            self._fail([request], refusal)

    def _lane_of(self, request: Pending, model_id: str) -> tuple[Lane, None] | tuple[None, TinsmithError]:
        """The lane that a request belongs to, or why it cannot run any more."""
        lane = self._queues.lanes.get(model_id)
        if lane is None:
            model = self._models.find(model_id)
            if model is None:
                return None, UserError(f"model_id {model_id!r} is unknown")
            if request.state == "pending" and model.state == "unloaded":
                # What was waiting at its end was failed without being applied: a new lane would wait for it.
                return None, GoneError(f"model {model_id!r} was unloaded: {model.reason}")
            lane = Lane(model_id, model.tenant_id, model.applied_seq_id + 1)
            self._queues.lanes[model_id] = lane
        if request.state == "pending" and request.seq_id is not None and request.seq_id < lane.next_seq_id:
            late = f"seq_id {request.seq_id} arrived after seq_id {lane.next_seq_id - 1} had taken effect"
            return None, UserError(late)
        return lane, None
