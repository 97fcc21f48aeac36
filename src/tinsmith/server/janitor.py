"""The janitor: periodic expiry and deletion.

Each sweep closes sessions whose heartbeats stopped, unloads their models and cancels their samples (by futures that the
engine settles). It deletes the files of their ephemeral versions and, later, their results, whose usage is kept. It
deletes acknowledged results, expired checkpoints, expired audit entries and unreferenced directories. After a jump of
the wall clock, no session expires until every client has had a full timeout for a heartbeat. Each sweep ends by
returning freed memory to the system. Only one server of a database sweeps at a time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.api.operation import Services
from tinsmith.cluster.engines import Engines
from tinsmith.db.database import now
from tinsmith.runtime import malloc
from tinsmith.runtime.clocks import WatchedClock
from tinsmith.storage.directories import Directories
from tinsmith.store import usage
from tinsmith.store.history import RETENTION_S
from tinsmith.store.models import unload_request

TryLock = Callable[[], AbstractContextManager[bool]]
"""A context manager that yields whether this server holds the janitor's lock."""

DAY_S = 86400

SWEEP_S = 30.0
"""How often the other parts are swept where `session_sweep_s` turns off the expiry of sessions."""

UNREFERENCED_AGE_S = 3600.0
"""The age at which unreferenced directories are deleted; a younger one may still get its row."""

DIRECTORIES_SWEEP_S = 3600.0
"""The interval of the sweeps of directories."""

log = structlog.get_logger()


class Janitor:
    def __init__(
        self,
        services: Services,
        engines: Engines,
        versions: Directories,
        snapshots: Directories,
        try_lock: TryLock = lambda: nullcontext(True),
        clock: WatchedClock | None = None,
    ) -> None:
        self._settings = services.settings
        self._services = services
        self._engines = engines
        self._versions = versions
        self._snapshots = snapshots
        self._try_lock = try_lock
        self._clock = clock or WatchedClock()
        self._next_expiry = 0.0
        self._next_directories = 0.0  # with the first sweep

    async def run(self, threads: Executor | None = None) -> None:
        """Sweep on one of `threads` until cancelled."""
        interval_s = self._settings.session_sweep_s
        while True:
            await asyncio.sleep(interval_s if interval_s >= 0 else SWEEP_S)
            try:
                await asyncio.get_running_loop().run_in_executor(threads, self._sweep_locked)
            except (SQLAlchemyError, OSError) as error:
                log.error("a sweep failed; the next one tries again", exc_info=error)

    def _sweep_locked(self) -> None:
        """Sweep, unless another server of the database is sweeping."""
        self._services.sampling_sessions.delete_acknowledged()  # on every server: acknowledgements are in its memory
        with self._try_lock() as locked:
            if locked:
                self.sweep()
        malloc.trim()

    def sweep(self) -> None:
        """One sweep. Each part may be interrupted; the next sweep completes it."""
        parts = self._services
        timeout_s = self._settings.session_timeout_s
        if jump_s := self._clock.jump_s():
            log.warning("the clock was set, or the machine slept; expiry is postponed", jump_s=round(jump_s))
            self._next_expiry = time.monotonic() + self._settings.session_timeout_s
            self._next_directories = time.monotonic() + UNREFERENCED_AGE_S
        parts.sessions.reset_future_heartbeats()
        if timeout_s >= 0 and self._settings.session_sweep_s >= 0 and time.monotonic() >= self._next_expiry:
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
        for directory in parts.sampling_sessions.release_directories():
            self._versions.discard(directory)
        if session_ids := parts.sessions.closed_before(now() - self._settings.result_grace_s):
            parts.futures.delete_of_sessions(session_ids, usage.fold_usage)
        parts.custom_losses.sweep(now() - self._settings.result_grace_s)
        parts.sequences.sweep()
        for checkpoint in parts.checkpoints.sweep_expired():
            log.info("checkpoint expired", path=checkpoint.ref.path)
            parts.audit.record(checkpoint.tenant_id, "checkpoint_expired", {"tinker_path": checkpoint.ref.path})
        parts.files.sweep_expired()
        parts.kept_samples.sweep(now() - RETENTION_S)
        parts.responses.sweep()
        parts.exchanges.sweep()
        self._engines.delete_unused()
        if time.monotonic() >= self._next_directories:
            self._next_directories = time.monotonic() + DIRECTORIES_SWEEP_S
            for directory in parts.checkpoints.sweep_directories(UNREFERENCED_AGE_S):
                log.info("an unreferenced directory of a checkpoint was deleted", directory=directory)
            parts.files.sweep_unreferenced(UNREFERENCED_AGE_S)
            self._sweep_directories(self._versions, parts.sampling_sessions.directories)
            self._sweep_directories(self._snapshots, parts.models.snapshot_directories)
        parts.audit.sweep(now() - self._settings.audit_retention_days * DAY_S)

    def _sweep_directories(self, directories: Directories, referenced: Callable[[], set[str]]) -> None:
        candidates = directories.old(UNREFERENCED_AGE_S)  # before the rows are read: later rows name newer directories
        for directory in directories.discard_all(candidates, but=referenced()):
            log.info("an unreferenced directory of an engine was deleted", directory=directory)
