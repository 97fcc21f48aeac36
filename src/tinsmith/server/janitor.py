"""The janitor: periodic expiry and deletion.

Each sweep closes sessions whose heartbeats stopped, unloads their models and cancels their samples (by futures that the
engine settles). It deletes the files of their ephemeral versions and, later, their results, whose usage is kept. It
deletes acknowledged results, expired checkpoints, audit entries past their retention, and directories that no row
names. After a jump of the wall clock nothing expires until every client has had one full timeout for a heartbeat. Each
sweep ends by returning freed memory to the system. Of servers that share a database, one sweeps at a time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.cluster.engines import Engines
from tinsmith.db.database import now
from tinsmith.runtime import malloc
from tinsmith.runtime.clocks import WatchedClock
from tinsmith.settings import Settings
from tinsmith.storage.directories import Directories
from tinsmith.store import usage
from tinsmith.store.audit import Audit
from tinsmith.store.checkpoints import Checkpoints
from tinsmith.store.custom_losses import CustomLosses
from tinsmith.store.exchanges import Exchanges
from tinsmith.store.files import Files
from tinsmith.store.futures import Futures
from tinsmith.store.history import KEPT_S, KeptSamples
from tinsmith.store.models import Models, unload_request
from tinsmith.store.recorded_sequences import Sequences
from tinsmith.store.responses import Responses
from tinsmith.store.sampling_sessions import SamplingSessions
from tinsmith.store.sessions import Sessions

Alone = Callable[[], AbstractContextManager[bool]]
"""A block that yields whether this server may sweep now."""

DAY_S = 86400

UNNAMED_AGE_S = 3600.0
"""A younger directory that no row names may get its row soon; an older one is deleted."""

DIRECTORIES_SWEEP_S = 3600.0
"""How often such directories are searched for."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SweptParts:
    """The stores that a sweep works on."""

    sessions: Sessions
    models: Models
    samplers: SamplingSessions
    futures: Futures
    checkpoints: Checkpoints
    versions: Directories
    snapshots: Directories
    audit: Audit
    custom_losses: CustomLosses
    sequences: Sequences
    files: Files
    kept_samples: KeptSamples
    responses: Responses
    exchanges: Exchanges
    engines: Engines


class Janitor:
    def __init__(
        self,
        settings: Settings,
        parts: SweptParts,
        alone: Alone = lambda: nullcontext(True),
        clock: WatchedClock | None = None,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._alone = alone
        self._clock = clock or WatchedClock()
        self._next_expiry = 0.0
        self._next_directories = 0.0  # with the first sweep

    async def run(self, threads: Executor | None = None) -> None:
        """Sweep on one of `threads` until cancelled; does nothing if either interval is negative."""
        if self._settings.session_sweep_s < 0:
            return
        while True:
            await asyncio.sleep(self._settings.session_sweep_s)
            try:
                await asyncio.get_running_loop().run_in_executor(threads, self._sweep_alone)
            except (SQLAlchemyError, OSError) as error:
                log.error("a sweep failed; the next one tries again", exc_info=error)

    def _sweep_alone(self) -> None:
        """Sweep, unless another server of the database is sweeping."""
        self._parts.samplers.delete_acknowledged()  # each server knows what its own clients acknowledged
        with self._alone() as alone:
            if alone:
                self.sweep()
        malloc.give_back()

    def sweep(self) -> None:
        """One sweep; each part may be interrupted and is completed by the next sweep."""
        parts = self._parts
        timeout_s = self._settings.session_timeout_s
        self._look_at_the_clock()
        parts.sessions.forget_future_heartbeats()
        if timeout_s >= 0 and time.monotonic() >= self._next_expiry:
            for session in parts.sessions.silent(timeout_s):
                reason = f"no heartbeat for {timeout_s:g} s"
                if parts.sessions.close(session.session_id, reason, timeout_s=timeout_s):
                    log.info("session closed", session_id=session.session_id, reason=session.reason or reason)
                    if session.state == "active":
                        expired = {"session_id": session.session_id, "reason": reason}
                        parts.audit.record(session.tenant_id, "session_expired", expired)
        for model, reason in parts.models.orphaned():
            body = {"model_id": model.model_id, "reason": f"its session ended ({reason})"}
            parts.futures.submit(unload_request(model, json.dumps(body).encode()))
        parts.futures.cancel_of_closed_sessions()
        for directory in parts.samplers.forget_written():
            parts.versions.discard(directory)
        if forgotten := parts.sessions.closed_before(now() - self._settings.result_grace_s):
            parts.futures.delete_of_sessions(forgotten, usage.folded)
        parts.custom_losses.sweep(now() - self._settings.result_grace_s)
        parts.sequences.sweep()
        for checkpoint in parts.checkpoints.sweep_expired():
            log.info("checkpoint expired", path=checkpoint.ref.path)
            parts.audit.record(checkpoint.tenant_id, "checkpoint_expired", {"tinker_path": checkpoint.ref.path})
        parts.files.sweep_expired()
        parts.kept_samples.sweep(now() - KEPT_S)
        parts.responses.sweep()
        parts.exchanges.sweep()
        parts.engines.forget_gone()
        if time.monotonic() >= self._next_directories:
            self._next_directories = time.monotonic() + DIRECTORIES_SWEEP_S
            for directory in parts.checkpoints.sweep_directories(UNNAMED_AGE_S):
                log.info("a checkpoint's directory that no row names was deleted", directory=directory)
            parts.files.sweep_unnamed(UNNAMED_AGE_S)
            self._sweep_directories(parts.versions, parts.samplers.directories)
            self._sweep_directories(parts.snapshots, parts.models.snapshot_directories)
        parts.audit.sweep(now() - self._settings.audit_retention_days * DAY_S)

    def _look_at_the_clock(self) -> None:
        if jump_s := self._clock.jump_s():
            log.warning("the clock was set, or the machine slept; expiry is postponed", jump_s=round(jump_s))
            self._next_expiry = time.monotonic() + self._settings.session_timeout_s
            self._next_directories = time.monotonic() + UNNAMED_AGE_S

    def _sweep_directories(self, directories: Directories, named: Callable[[], set[str]]) -> None:
        candidates = directories.old(UNNAMED_AGE_S)  # before the rows are read: a row that is added names a newer one
        for directory in directories.discard_all(candidates, but=named()):
            log.info("an engine's directory that no row names was deleted", directory=directory)
