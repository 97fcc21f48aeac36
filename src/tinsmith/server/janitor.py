"""The janitor: periodic expiry and deletion, in independent parts.

Each part has its own period, back-off and metrics: one that raises is tried again later, and all others run as usual.
The parts of a sweep run one after the other. They close sessions whose heartbeats stopped, unload their models and
cancel their samples (by futures that the engine settles), delete the files of their ephemeral versions and, later,
their results, whose usage is kept, and delete acknowledged results, expired checkpoints, files and audit entries, and
unreferenced directories. The last part posts warnings. A part may be interrupted anywhere; its next run completes its
work. After a jump of the wall clock, no session expires until every client has had a full timeout for a heartbeat.
Each sweep ends by returning freed memory to the system. Only one server of a database sweeps at a time.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.api.services import Services
from tinsmith.cluster.engines import Engines
from tinsmith.db.database import now
from tinsmith.db.postgres import MAINTENANCE_S, long_statements
from tinsmith.runtime import malloc
from tinsmith.runtime.background import Backoff
from tinsmith.runtime.clocks import WatchedClock
from tinsmith.server.warning_posts import WARNINGS_S, WarningPoster, has_warnings_url
from tinsmith.storage.directories import Directories
from tinsmith.store import usage
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

FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 1800.0
"""The pauses of a part after its first failure and after many in a row."""

log = structlog.get_logger()


@dataclass(slots=True)
class Part:
    """One part of a sweep: it runs with every sweep, or once in `period_s`. `next_at` is a monotonic time."""

    name: str
    run: Callable[[], object]
    period_s: float = 0.0
    next_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S))


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
        self._stopping = threading.Event()
        self._acknowledged = Part("acknowledged_results", self._delete_acknowledged)
        self.parts: Sequence[Part] = (
            Part("clock", self._watch_clock),
            Part("sessions", self._close_sessions),
            Part("models", self._unload_models),
            Part("samples", self._cancel_samples),
            Part("versions", self._discard_versions),
            Part("results", self._delete_results),
            Part("custom_losses", self._delete_custom_losses),
            Part("sequences", services.sequences.sweep),
            Part("checkpoints", self._delete_checkpoints),
            Part("files", services.files.sweep_expired),
            Part("kept_samples", self._delete_stored_samples),
            Part("responses", services.responses.sweep),
            Part("exchanges", services.exchanges.sweep),
            Part("engines", engines.delete_unused),
            Part("checkpoint_directories", self._sweep_checkpoint_directories, DIRECTORIES_SWEEP_S),
            Part("file_directories", self._sweep_files, DIRECTORIES_SWEEP_S),
            Part("version_directories", self._sweep_versions, DIRECTORIES_SWEEP_S),
            Part("snapshot_directories", self._sweep_snapshots, DIRECTORIES_SWEEP_S),
            Part("audit", self._delete_audit_entries),
            *((Part("warnings", WarningPoster(services).post_new, WARNINGS_S),) if has_warnings_url(services) else ()),
        )

    async def run(self, threads: Executor | None = None) -> None:
        """Sweep on one of `threads` until cancelled. The sweep of that moment then ends after its current part."""
        interval_s = self._settings.session_sweep_s
        try:
            while True:
                await asyncio.sleep(interval_s if interval_s >= 0 else SWEEP_S)
                try:
                    await asyncio.get_running_loop().run_in_executor(threads, self._sweep_locked)
                except (SQLAlchemyError, OSError) as error:
                    log.error("the janitor's lock failed; the next sweep tries again", exc_info=error)
        finally:
            self._stopping.set()

    def _sweep_locked(self) -> None:
        """Sweep, unless another server of the database is sweeping."""
        self._run_part(self._acknowledged)  # on every server: acknowledgements are in its memory
        with self._try_lock() as locked:
            if locked:
                self.sweep()
        malloc.trim()

    def sweep(self) -> None:
        """Run all parts that are due, each with its own error."""
        for part in self.parts:
            if self._stopping.is_set():
                return
            if time.monotonic() >= part.next_at:
                self._run_part(part)

    def _run_part(self, part: Part) -> None:
        began = time.monotonic()
        try:
            with long_statements(MAINTENANCE_S):
                part.run()
        except Exception as error:
            pause_s = part.backoff.after()
            part.next_at = time.monotonic() + pause_s
            log.error(
                "a part of the janitor failed; it is tried again", part=part.name, pause_s=pause_s, exc_info=error
            )
            failed = True
        else:
            part.backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
            # The clock's part may have postponed this one.
            part.next_at = max(part.next_at, time.monotonic() + part.period_s if part.period_s else 0.0)
            failed = False
        self._services.meters.observe_janitor(part.name, time.monotonic() - began, failed=failed)

    # The parts.

    def _watch_clock(self) -> None:
        if jump_s := self._clock.jump_s():
            log.warning("the clock was set, or the machine slept; expiry is postponed", jump_s=round(jump_s))
            self._next_expiry = time.monotonic() + self._settings.session_timeout_s
            for part in self.parts:
                if part.period_s == DIRECTORIES_SWEEP_S:
                    part.next_at = time.monotonic() + UNREFERENCED_AGE_S
        self._services.sessions.reset_future_heartbeats()

    def _close_sessions(self) -> None:
        timeout_s = self._settings.session_timeout_s
        if timeout_s < 0 or self._settings.session_sweep_s < 0 or time.monotonic() < self._next_expiry:
            return
        for session in self._services.sessions.list_silent(timeout_s):
            reason = f"no heartbeat for {timeout_s:g} s"
            if self._services.sessions.close(session.session_id, reason, timeout_s=timeout_s):
                log.info("session closed", session_id=session.session_id, reason=session.reason or reason)

    def _unload_models(self) -> None:
        for model, reason in self._services.models.list_orphaned():
            body = {"model_id": model.model_id, "reason": f"its session ended ({reason})"}
            self._services.futures.submit(unload_request(model, json.dumps(body).encode()))

    def _cancel_samples(self) -> None:
        self._services.futures.cancel_of_closed_sessions()

    def _delete_acknowledged(self) -> None:
        self._services.sampling_sessions.delete_acknowledged()

    def _discard_versions(self) -> None:
        for directory in self._services.sampling_sessions.release_directories():
            self._versions.discard(directory)

    def _delete_results(self) -> None:
        if session_ids := self._services.sessions.list_closed(now() - self._settings.result_grace_s):
            self._services.futures.delete_of_sessions(session_ids, usage.fold_usage)

    def _delete_custom_losses(self) -> None:
        self._services.custom_losses.sweep(now() - self._settings.result_grace_s)

    def _delete_checkpoints(self) -> None:
        for checkpoint in self._services.checkpoints.sweep_expired():
            log.info("checkpoint expired", path=checkpoint.ref.path)

    def _sweep_checkpoint_directories(self) -> None:
        for directory in self._services.checkpoints.sweep_directories(UNREFERENCED_AGE_S):
            log.info("an unreferenced directory of a checkpoint was deleted", directory=directory)

    def _sweep_files(self) -> None:
        self._services.files.sweep_unreferenced(UNREFERENCED_AGE_S)

    def _sweep_versions(self) -> None:
        self._sweep_directories(self._versions, self._services.sampling_sessions.directories)

    def _sweep_snapshots(self) -> None:
        self._sweep_directories(self._snapshots, self._services.models.snapshot_directories)

    def _sweep_directories(self, directories: Directories, referenced: Callable[[], set[str]]) -> None:
        candidates = directories.old(UNREFERENCED_AGE_S)  # before the rows are read: later rows name newer directories
        for directory in directories.discard_all(candidates, but=referenced()):
            log.info("an unreferenced directory of an engine was deleted", directory=directory)

    def _delete_stored_samples(self) -> None:
        self._services.stored_samples.sweep(now() - self._settings.stored_samples_days * DAY_S)

    def _delete_audit_entries(self) -> None:
        self._services.audit.sweep(now() - self._settings.audit_retention_days * DAY_S)
