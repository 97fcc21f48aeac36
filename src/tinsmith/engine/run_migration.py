"""Moving: an idle run goes to another engine of its base model that has far fewer: one that joins gets its share.

Once a second at most one run is handed over, and to an engine that has at least two fewer: the difference shrinks, and
nothing comes back. A run is idle when nothing waits of it and nothing took effect for a while; so long, too, must the
other engine have been there. First everything of the run is written (a snapshot with optimizer and gradient, its
versions), which takes its time and is given up if the run wakes; then one transaction makes it the other's, and then it
is forgotten here. The other brings it back from its files at its next request, as after a restart, bit for bit.
"""

from __future__ import annotations

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.cluster.ownership import Ownership
from tinsmith.db.wakeups import EVERYTHING, WakeUps, engine_mailbox
from tinsmith.engine.operations import Operations
from tinsmith.engine.queues import Queues
from tinsmith.engine.snapshots import Snapshots
from tinsmith.engine.telemetry import Recorder
from tinsmith.runtime.failpoints import hit

PATIENCE = 30
"""Looks at a run that is still not written, until another is tried: a disk may be full."""

log = structlog.get_logger()


class Moving:
    def __init__(
        self,
        ownership: Ownership,
        queues: Queues,
        snapshots: Snapshots,
        recorder: Recorder,
        operations: Operations,
        mailbox: WakeUps,
    ) -> None:
        self._ownership = ownership
        self._queues = queues
        self._snapshots = snapshots
        self._recorder = recorder
        self._operations = operations
        self._mailbox = mailbox
        self._chosen: str | None = None
        self._looks = 0
        self._tried: set[str] = set()

    def look(self) -> None:
        """Once a second: hand over one run, or come nearer to it, if another engine has far fewer."""
        taker = self._ownership.lighter()
        self._choose(self._idle() if taker else [])
        if taker is None or self._chosen is None or not self._snapshots.is_parked(self._chosen):
            return
        hit("run.parked")
        model_id, self._chosen = self._chosen, None
        try:
            if not self._ownership.hand_over(model_id, taker):
                return
        except SQLAlchemyError:
            # It may have been committed. All of the run is in files, so it can be forgotten in either case; what stayed
            # in memory would be out of date if the run came back.
            self._forget(model_id)
            raise
        hit("run.moved")
        self._forget(model_id)
        self._mailbox.wake(engine_mailbox(self._ownership.base_model, taker), [EVERYTHING])
        log.info("an idle run was handed over", model_id=model_id, engine_id=taker)

    def _forget(self, model_id: str) -> None:
        self._queues.forget_lane(model_id)
        self._recorder.forget(model_id)
        self._operations.unload(model_id)
        self._snapshots.left(model_id)

    def _idle(self) -> list[str]:
        lanes = self._queues.lanes
        runs = self._ownership.idle_runs()
        return [run for run in runs if run not in lanes or not lanes[run].waiting]

    def _choose(self, idle: list[str]) -> None:
        """Stay with the run that is being written, as long as it is idle."""
        self._looks += 1
        if self._chosen in idle and self._looks < PATIENCE:
            return
        if self._chosen in idle:
            self._tried.add(self._chosen)
        untried = [run for run in idle if run not in self._tried]
        if not untried:
            self._tried.clear()
        self._chosen = next(iter(untried or idle), None)
        self._looks = 0
