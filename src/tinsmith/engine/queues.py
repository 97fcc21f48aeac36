"""The engine's view of its waiting requests: metadata in memory, mirrored from the database.

`Lane` knows which seq_id a model may run next, and skips refused and abandoned numbers. `Queues` has all lanes and the
samples by tenant. Both know no SQL and no device.

`Arrivals` reads each of the engine's requests once from the rows into its queues: those after the last row that it
read, those named by a wake-up, and once a second those that it may have missed. It claims requests without an engine:
immediately those that it is `choose_engine` for, the others a second later, since their preferred engine may be busy
or about to die. Once a second it also frees the requests of engines whose lease has expired. The runs of a dead engine
come with its in-flight journal (`quarantine`).

`BatchingWindow` decides whether passes that could run now wait for others that will arrive in a moment, so that all
share one step. A short step takes about as long for one model as for several. Clients that work in lockstep send within
milliseconds of each other, and an engine that starts with the first of them makes the others wait for its whole step.
So each model's `Rhythm` records when its client sends. A model is expected if its last two passes came together with
those of a model that is here again, or if both came right after an answer. Passes are held while a model is expected,
at most for a share of a short step's time; so a single model never waits, and a wrong guess costs little. An optimizer
step followed by a pass counts as that pass. Callers pass times: no clock here.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import structlog

from tinsmith.cluster.ownership import Arrival, Ownership, choose_engine
from tinsmith.db.wakeups import EVERYTHING
from tinsmith.engine.quarantine import Quarantine
from tinsmith.engine.scheduler import PASS_KINDS, ModelQueue
from tinsmith.engine.telemetry import RequestTimings
from tinsmith.errors import GoneError, TinsmithError, UserError
from tinsmith.runtime.failpoints import hit
from tinsmith.store.futures import Futures
from tinsmith.store.models import Models
from tinsmith.types import Pending

MAX_HOLD_S = 0.1
MAX_HOLD_SHARE = 0.5
"""Passes are held for at most MAX_HOLD_S, or this share of a short step's time, whichever is less."""

LATE_S = 0.002
"""A pass is expected until 1.5 times its usual delay plus this."""

LATE_SHARE = 0.1
"""A pass that came together with another before may be late by this share of a short step's time, if that is more than
LATE_S: a missed one takes a step of its own, and clients in lockstep send up to 10 ms apart.
"""

MEASURED_STEPS = 9


class Rhythm:
    """When a model's client sends a pass after all of the model's requests were answered."""

    __slots__ = ("_answered_at", "_came_at", "_pauses_s")

    def __init__(self) -> None:
        self._answered_at: float | None = None
        self._pauses_s: deque[float] = deque(maxlen=2)
        self._came_at: deque[float] = deque(maxlen=3)

    def record_answer(self, now_s: float) -> None:
        """No request of the model is left."""
        self._answered_at = now_s

    def record_pass(self, now_s: float) -> None:
        """A pass arrived, with no request before it."""
        self._came_at.append(now_s)
        if self._answered_at is not None:
            self._pauses_s.append(max(0.0, now_s - self._answered_at))
            self._answered_at = None

    @property
    def pause_s(self) -> float | None:
        """The expected pause after the next answer; None if unknown."""
        return max(self._pauses_s) if len(self._pauses_s) == self._pauses_s.maxlen else None

    def due_in_s(self, now_s: float) -> float | None:
        """How long the next pass is still expected after the last answer; None if it is not expected."""
        if self._answered_at is None or (pause_s := self.pause_s) is None:
            return None
        return _remaining_s(self._answered_at, pause_s, now_s)

    def due_in_lockstep_s(self, first: Rhythm, now_s: float, late_s: float = LATE_S) -> float | None:
        """How long the next pass is expected because `first`, whose passes came with this model's, is here again."""
        if len(first._came_at) < 3 or len(self._came_at) < 2:
            return None
        latest_at, *earlier_at = reversed(first._came_at)
        lags_s = [pass_at - first_at for pass_at, first_at in zip(reversed(self._came_at), earlier_at, strict=False)]
        if max(map(abs, lags_s)) > MAX_HOLD_S:
            return None
        return _remaining_s(latest_at, max(0.0, *lags_s), now_s, late_s)


def _remaining_s(since: float, usual_s: float, now_s: float, late_s: float = LATE_S) -> float | None:
    remaining_s = since + 1.5 * usual_s + late_s - now_s
    return remaining_s if remaining_s > 0.0 else None


class BatchingWindow:
    """Decides how long ready passes of an engine are held for others that are expected."""

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=MEASURED_STEPS)
        self._held_since: float | None = None

    def record_passes(self, passes_s: float) -> None:
        """Passes ran, so none are held."""
        self._steps_s.append(passes_s)
        self._held_since = None

    def max_hold_s(self) -> float:
        """The longest time for which passes are held."""
        return min(MAX_HOLD_S, MAX_HOLD_SHARE * min(self._steps_s, default=0.0))

    def late_s(self) -> float:
        """How late passes may be that came together before."""
        return max(LATE_S, LATE_SHARE * min(self._steps_s, default=0.0))

    def wait_s(self, lockstep_s: Sequence[float], quick_s: Sequence[float], now_s: float) -> float:
        """How long to hold ready passes if nothing arrives; 0 to run them. `lockstep_s`: until when passes are expected
        that came together with the first ready one; waiting pays only if all of them come in time. `quick_s`: until
        when passes are expected right after their answers; these may be unrelated to the ready ones, which wait half as
        long for them.
        """
        since = now_s if self._held_since is None else self._held_since
        remaining_s = self.max_hold_s() - (now_s - since)
        waits_s = [due_s for due_s in quick_s if 2 * due_s <= remaining_s]
        if lockstep_s and max(lockstep_s) <= remaining_s:
            waits_s += lockstep_s
        if not waits_s:
            return 0.0
        self._held_since = since
        return max(waits_s)


IDLE_LANE_S = 600.0
"""After this time a run's rhythm is outdated."""


class Lane:
    """The waiting requests of one model, by seq_id, and the seq_id that may run next."""

    def __init__(self, model_id: str, tenant_id: str, next_seq_id: int) -> None:
        self.model_id = model_id
        self.tenant_id = tenant_id
        self.next_seq_id = next_seq_id
        self.idle_since = time.monotonic()
        """Monotonic time at which the last request left, if none is waiting."""
        self.held_until = 0.0
        """Monotonic time until which none of its requests are planned."""
        self.waiting: dict[int, Pending] = {}
        self.rhythm = Rhythm()
        self._refused: set[int] = set()
        self._gap: tuple[int, float] | None = None  # the first seq_id after a gap, and since when it waits

    def add(self, request: Pending) -> None:
        assert request.seq_id is not None
        if request.state == "refused":
            if request.seq_id >= self.next_seq_id:
                self._refused.add(request.seq_id)
        else:
            if request.seq_id == self.next_seq_id and request.kind in PASS_KINDS:
                self.rhythm.record_pass(request.created_at)
            self.waiting[request.seq_id] = request
        self._skip_refused()

    def mark_applied(self, seq_id: int) -> int:
        """Move past an applied request; returns the highest seq_id that has taken effect."""
        del self.waiting[seq_id]
        self.next_seq_id = max(self.next_seq_id, seq_id + 1)
        self._skip_refused()
        if not self.waiting:
            self.idle_since = time.monotonic()
            self.rhythm.record_answer(time.time())
        return self.next_seq_id - 1

    def _skip_refused(self) -> None:
        while self.next_seq_id in self._refused:
            self._refused.discard(self.next_seq_id)
            self.next_seq_id += 1

    @property
    def is_held(self) -> bool:
        return self.held_until > 0.0 and time.monotonic() < self.held_until

    def pass_due_in_s(self, now_s: float) -> float | None:
        """How long its next pass is expected after its last answer; None if it is not expected, or has arrived."""
        if not self.waiting:
            return self.rhythm.due_in_s(now_s)
        if not self._ends_with_step:
            return None
        return LATE_S if self.next_seq_id + 1 in self.waiting else self.rhythm.pause_s

    def pass_due_in_lockstep_s(self, first: Lane, now_s: float, late_s: float = LATE_S) -> float | None:
        """How long its next pass is expected because that of `first` has arrived; None if it is not expected, or has
        arrived.
        """
        if self.waiting and not (self._ends_with_step and len(self.waiting) == 1):
            return None
        return self.rhythm.due_in_lockstep_s(first.rhythm, now_s, late_s)

    @property
    def _ends_with_step(self) -> bool:
        """Whether an optimizer step can run, and a pass or nothing follows it."""
        head, behind = (self.waiting.get(self.next_seq_id + ahead) for ahead in (0, 1))
        if head is None or head.kind != "optim_step":
            return False
        return behind.kind in PASS_KINDS if behind else len(self.waiting) == 1

    @property
    def has_gap(self) -> bool:
        return bool(self.waiting) and self.next_seq_id not in self.waiting

    def skip_gap(self, patience_s: float) -> tuple[int, int] | None:
        """Skip the missing seq_ids if the requests after them have waited for `patience_s`; returns the first and last.

        The wall clock, which can be set, only counts when a gap is first seen.
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
    """All lanes, the samples by tenant, and requests outside any order (unloads, cancellations)."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        # By request_id, in order of arrival. An OrderedDict, since a plain dict must search for its first entry after
        # many were removed from its front.
        self.samples: defaultdict[str, OrderedDict[str, Pending]] = defaultdict(OrderedDict)
        self.unloads: list[Pending] = []
        self.cancels: list[Pending] = []
        self.request_ids: set[str] = set()

    def add_sample(self, request: Pending) -> None:
        self.samples[request.tenant_id][request.request_id] = request

    def return_samples(self, requests: Sequence[Pending]) -> None:
        """Put samples back at the front of their tenants' queues, in this order."""
        for request in reversed(requests):
            self.add_sample(request)
            self.samples[request.tenant_id].move_to_end(request.request_id, last=False)

    def waiting_samples(self) -> dict[str, Collection[Pending]]:
        """The samples of each tenant that has any."""
        return {tenant_id: requests.values() for tenant_id, requests in self.samples.items()}

    def take_samples(self, requests: Iterable[Pending]) -> None:
        for request in requests:
            del self.samples[request.tenant_id][request.request_id]
            if not self.samples[request.tenant_id]:
                del self.samples[request.tenant_id]

    def withdraw_samples(self, tenant_id: str, name: str) -> list[str]:
        """Remove one sample, or all of one sampling session; returns their request_ids."""
        requests = self.samples.get(tenant_id, OrderedDict())
        if name in requests:
            withdrawn = [requests[name]]
        else:
            withdrawn = [request for request in requests.values() if request.sampling_session_id == name]
        self.take_samples(withdrawn)
        return [request.request_id for request in withdrawn]

    def model_queues(self) -> list[ModelQueue]:
        return [
            ModelQueue(lane.model_id, lane.tenant_id, lane.next_seq_id, lane.waiting)
            for lane in self.lanes.values()
            if lane.waiting and not lane.is_held
        ]

    def passes_due(self, ready: Sequence[Pending], late_s: float = LATE_S) -> tuple[list[float], list[float]]:
        """How long passes of other models are expected: those that came together with the first ready one before, and
        those that come right after their answers. Only passes of one tenant wait for each other.
        """
        tenants = {request.tenant_id for request in ready}
        if len(tenants) > 1:
            return [], []
        now_s = time.time()
        first = self.lanes[min(ready, key=lambda request: request.created_at).model_id or ""]
        lanes = [
            lane for lane in self.lanes.values() if lane is not first and lane.tenant_id in tenants and not lane.is_held
        ]
        lockstep = (lane.pass_due_in_lockstep_s(first, now_s, late_s) for lane in lanes)
        quick = (lane.pass_due_in_s(now_s) for lane in lanes)
        return [due_s for due_s in lockstep if due_s is not None], [due_s for due_s in quick if due_s is not None]

    def steps_after(self, passes: Sequence[Pending]) -> list[Pending]:
        """The optimizer steps that can run because these passes have: they need not wait for the decoding after a step
        and for the next one.
        """
        lanes = [self.lanes.get(model_id) for model_id in dict.fromkeys(request.model_id or "" for request in passes)]
        heads = [lane.waiting.get(lane.next_seq_id) for lane in lanes if lane is not None and not lane.is_held]
        return [head for head in heads if head is not None and head.kind == "optim_step"]

    def passes_wait(self) -> bool:
        """Whether a pass could be in the next step."""
        heads = (lane.waiting.get(lane.next_seq_id) for lane in self.lanes.values() if not lane.is_held)
        return any(head is not None and head.kind in PASS_KINDS for head in heads)

    def forget_idle_lanes(self) -> None:
        """Drop lanes of runs that are idle for long. A request recreates its lane from the run's row."""
        until = time.monotonic() - IDLE_LANE_S
        for lane in [lane for lane in self.lanes.values() if not lane.waiting and lane.idle_since < until]:
            del self.lanes[lane.model_id]

    def forget_lane(self, model_id: str) -> list[Pending]:
        """Drop a model's lane; returns its waiting requests."""
        lane = self.lanes.pop(model_id, None)
        return list(lane.waiting.values()) if lane else []


_WITHOUT_LANE = ("sample", "unload_model", "cancel")

Fail = Callable[[Sequence[Pending], TinsmithError], None]

log = structlog.get_logger()


@dataclass(eq=False)
class Arrivals:
    ownership: Ownership
    futures: Futures
    models: Models
    queues: Queues
    quarantine: Quarantine
    timings: RequestTimings
    fail: Fail

    def __post_init__(self) -> None:
        self._last_arrival = 0
        self._other_engines: list[str] = []
        self._left_to_other_engines: set[str] = set()
        self._journals_due = False

    def fetch(self, woken_ids: Collection[str] = ()) -> None:
        """Requests after the last arrival, and those named by a wake-up: Postgres does not commit rows in order."""
        arrivals = self.ownership.incoming(self._last_arrival)
        if arrivals:
            hit("engine.fetched")
            self._last_arrival = max(self._last_arrival, arrivals[-1].request.arrival)
        if missing_ids := set(woken_ids) - {
            "",
            EVERYTHING,
            *self.queues.request_ids,
            *(arrival.request.request_id for arrival in arrivals),
        }:
            arrivals += self.ownership.fetch_by_ids(sorted(missing_ids))
        self._claim_and_enqueue(arrivals)
        if EVERYTHING in woken_ids:
            self._claim_and_enqueue(self._fetch_missed())

    def fetch_late(self) -> list[str]:
        """The slow poll: rows whose wake-up was lost, that were committed out of order, or that no engine claimed.
        Returns the engines found dead.
        """
        expired_ids = self.ownership.free_expired()
        if expired_ids:
            log.warning("engines stopped renewing their leases; their requests are free", engine_ids=expired_ids)
        self._other_engines = self.ownership.list_others()
        self.fetch()
        missed = self._fetch_missed()
        self._claim_and_enqueue(missed)
        # Requests still free at the next poll are claimed then, whichever engine is preferred.
        self._left_to_other_engines = {
            arrival.request.request_id for arrival in missed if arrival.is_unassigned
        } - self.queues.request_ids
        for lane in self.queues.lanes.values():
            if lane.has_gap:
                for request in self.futures.list_refused(lane.model_id, lane.next_seq_id):
                    lane.add(request)
        return expired_ids

    def _fetch_missed(self) -> list[Arrival]:
        return self.ownership.fetch_by_ids(sorted(self.ownership.pending_ids() - self.queues.request_ids))

    def _claim_and_enqueue(self, arrivals: Sequence[Arrival]) -> None:
        ids_to_claim = [
            arrival.request.request_id for arrival in arrivals if arrival.is_unassigned and self._is_to_claim(arrival)
        ]
        self._journals_due |= bool(ids_to_claim)  # even if the database does not report the claims
        claimed = self.ownership.claim(ids_to_claim) if ids_to_claim else set[str]()
        if claimed:
            hit("engine.claimed")
        for arrival in arrivals:
            if not arrival.is_unassigned or arrival.request.request_id in claimed:
                self._enqueue(arrival.request)
        if claimed:
            # Rows of the same runs may have been skipped while another engine owned them.
            for arrival in self._fetch_missed():
                if not arrival.is_unassigned:
                    self._enqueue(arrival.request)
        if self._journals_due:
            self.quarantine.adopt(self.ownership.suspects(), self.queues.request_ids)
            self._journals_due = False

    def _is_to_claim(self, arrival: Arrival) -> bool:
        if not self._other_engines or arrival.request.request_id in self._left_to_other_engines:
            return True
        engine_id = self.ownership.engine_id
        return (
            choose_engine(arrival.run_id or arrival.request.request_id, [engine_id, *self._other_engines]) == engine_id
        )

    def _enqueue(self, request: Pending) -> None:
        if request.request_id in self.queues.request_ids:
            return
        lane, refusal = None, None
        if request.kind not in _WITHOUT_LANE and request.model_id is not None:
            # First, since it reads: after a database error the slow poll finds the request again.
            lane, refusal = self._lane_of(request, request.model_id)
        if request.state == "pending":
            self.queues.request_ids.add(request.request_id)
            self.timings.record_arrival(request)
        if request.kind == "sample":
            if request.state == "pending":
                self.queues.add_sample(request)
        elif request.kind == "unload_model":
            self.queues.unloads.append(request)
        elif request.kind == "cancel":
            self.queues.cancels.append(request)
        elif lane is not None:
            lane.add(request)
        elif refusal is not None and request.state == "pending":
            self.fail([request], refusal)

    def _lane_of(self, request: Pending, model_id: str) -> tuple[Lane, None] | tuple[None, TinsmithError]:
        """The lane of a request, or why it cannot run any more."""
        lane = self.queues.lanes.get(model_id)
        if lane is None:
            model = self.models.find(model_id)
            if model is None:
                return None, UserError(f"model_id {model_id!r} is unknown")
            if request.state == "pending" and model.state == "unloaded":
                # Requests waiting at the unload were failed without being applied: a new lane would wait for them.
                return None, GoneError(f"model {model_id!r} was unloaded: {model.reason}")
            lane = Lane(model_id, model.tenant_id, model.applied_seq_id + 1)
            self.queues.lanes[model_id] = lane
        if request.state == "pending" and request.seq_id is not None and request.seq_id < lane.next_seq_id:
            message = f"seq_id {request.seq_id} arrived after seq_id {lane.next_seq_id - 1} had taken effect"
            return None, UserError(message)
        return lane, None
