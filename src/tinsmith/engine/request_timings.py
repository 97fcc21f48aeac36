"""What the engine knows of the time of its requests: when it planned each, began it and had its result.

From a request's arrival in memory to its settlement there is one entry, which goes into the request's row with the
settlement, and so costs no write of its own. Then the meters count it, and its spans are sent if it came with a trace.
The wall clock is meant, since the server's part of the story is told by that, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import structlog

from tinsmith.engine.metering import EngineMeters
from tinsmith.store.futures import Settlement, Work
from tinsmith.telemetry.tracing import Tracing
from tinsmith.types import Pending

log = structlog.get_logger()


@dataclass(slots=True)
class _Entry:
    request: Pending
    planned_at: float | None = None
    started_at: float | None = None
    step: int | None = None


class Worklog:
    def __init__(self, meters: EngineMeters, tracing: Tracing) -> None:
        self._meters = meters
        self._tracing = tracing
        self._entries: dict[str, _Entry] = {}
        self._step = 0

    def arrived(self, request: Pending) -> None:
        self._entries[request.request_id] = _Entry(request)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Others work on these now."""
        for request_id in request_ids:
            self._entries.pop(request_id, None)

    def planned(self, requests: Iterable[Pending], planned_at: float) -> None:
        """These are one step; to plan it was begun at `planned_at`."""
        self._step += 1
        for request in requests:
            if entry := self._entries.get(request.request_id):
                entry.planned_at, entry.step = planned_at, self._step

    def began(self, requests: Iterable[Pending]) -> None:
        """The work on these begins, or begins once more."""
        started_at = time.time()
        for request in requests:
            if entry := self._entries.get(request.request_id):
                entry.started_at = started_at

    def timed(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """The same settlements with what is known of the work, which is over now."""
        ran_at = time.time()
        return [
            replace(settlement, work=Work(entry.started_at, max(entry.started_at, ran_at), entry.step))
            if (entry := self._entries.get(settlement.request_id)) and entry.started_at is not None
            else settlement
            for settlement in settlements
        ]

    def settled(self, settlements: Sequence[Settlement]) -> None:
        """They are in the database."""
        settled_at = time.time()
        for settlement in settlements:
            entry = self._entries.pop(settlement.request_id, None)
            if entry is None:
                continue
            error = settlement.error
            outcome = "done" if error is None else "user_error" if error.category == "user" else "server_error"
            self._meters.settled(entry.request, outcome, settlement.cost)
            if (work := settlement.work) is not None:
                waited_s = max(0.0, work.started_at - entry.request.created_at)
                self._meters.timed(entry.request.kind, waited_s, work.ran_at - work.started_at)
            request = entry.request
            log.debug(
                "settled",
                request_id=request.request_id,
                model_id=request.model_id,
                tenant_id=request.tenant_id,
                kind=request.kind,
                outcome=outcome,
                step=entry.step,
            )
            if entry.request.traceparent:
                self._send(entry, settlement, outcome, settled_at)

    def _send(self, entry: _Entry, settlement: Settlement, outcome: str, settled_at: float) -> None:
        request, work = entry.request, settlement.work
        assert request.traceparent is not None
        told: dict[str, str | int | float] = {
            "tinsmith.request_id": request.request_id,
            "tinsmith.tenant_id": request.tenant_id,
            "tinsmith.outcome": outcome,
        }
        if request.model_id:
            told["tinsmith.model_id"] = request.model_id
        whole = self._tracing.record(request.kind, request.traceparent, request.created_at, settled_at, told)
        if work is None:
            return
        planned_at = entry.planned_at if entry.planned_at is not None else work.started_at
        of_step = {} if work.step is None else {"tinsmith.step": work.step}
        self._tracing.record("wait", whole, request.created_at, planned_at, {})
        if entry.planned_at is not None:
            self._tracing.record("plan", whole, planned_at, work.started_at, of_step)
        self._tracing.record("run", whole, work.started_at, work.ran_at, of_step)
        self._tracing.record("settle", whole, work.ran_at, settled_at, {})
