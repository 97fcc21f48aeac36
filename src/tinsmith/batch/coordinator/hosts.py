"""The machines of one job's workers: on which of them its function can be set up. No I/O.

A set-up that fails is the machine's, since others may have what this one lacks: a module, a file, free memory, a
healthy GPU. The machine is set aside for a pause that doubles with each failure in a row, and the job goes on with the
others. The job fails when no machine can set it up: every machine that exists has failed, no worker is set up, and
there were `MAX_SETUP_FAILURES` failures in a row; or when no set-up has succeeded within the job's discovery timeout.

A machine is a name of the pool's (`WorkerHandle.host`), a GPU of its own where workers have accelerators. Failures
before a machine is known are the pool's, and count under `UNKNOWN`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tinsmith.batch.types import Limits

MAX_SETUP_FAILURES = 4
"""After this many failed set-ups in a row on all machines together, none of them can set the function up."""
MAX_PAUSE_S = 300.0
MAX_LISTED = 20
"""The most machines in a status."""
MAX_ERROR = 2000
"""The most characters of an error in a status, from its end."""
UNKNOWN = ""


@dataclass(slots=True)
class _Failures:
    count: int
    until: float
    error: str


class HostHealth:
    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.is_changed = False
        """Whether the list of machines that are set aside has changed since it was last stored; its owner resets it."""
        self._limits = limits
        self._clock = clock
        self._failures: dict[str, _Failures] = {}
        self._host_of: dict[str, str] = {}
        self._ready: set[str] = set()
        self._first_failure: float | None = None
        self._any_success = False

    def add_worker(self, worker_id: str, host: str) -> None:
        self._host_of[worker_id] = host

    def remove_worker(self, worker_id: str) -> None:
        self._host_of.pop(worker_id, None)
        self._ready.discard(worker_id)

    def record_success(self, worker_id: str) -> None:
        """Record that the function of a worker has worked on a batch."""
        if worker_id in self._ready or worker_id not in self._host_of:
            return
        self._ready.add(worker_id)
        self._any_success = True
        self._failures.pop(UNKNOWN, None)
        if self._failures.pop(self._host_of[worker_id], None) is not None:
            self.is_changed = True

    def record_failure(self, host: str, error: str, *, is_final: bool = False) -> None:
        """Record that a set-up has failed on a machine; `is_final` if another one would fail there, too."""
        now = self._clock()
        self._first_failure = now if self._first_failure is None else self._first_failure
        before = self._failures.get(host)
        count = (before.count if before else 0) + (MAX_SETUP_FAILURES if is_final else 1)
        pause_s = min(self._limits.backoff_s * 2**count, MAX_PAUSE_S)
        self._failures[host] = _Failures(count, now + pause_s, error)
        self.is_changed |= host != UNKNOWN

    def free_at(self, host: str) -> float:
        """When a worker may start on a machine again, on the clock."""
        failures = self._failures.get(host)
        return failures.until if failures is not None else 0.0

    def set_aside(self) -> dict[str, float]:
        """The machines on which no worker starts now, and until when."""
        now = self._clock()
        return {host: failures.until for host, failures in self._failures.items() if host and failures.until > now}

    def problem(self, existing: Collection[str]) -> str | None:
        """Why the function can be set up on none of the machines that exist; None while it may be."""
        if not self._failures or self._ready:
            return None
        now, error = self._clock(), next(reversed(self._failures.values())).error
        is_late = not self._any_success and now - (self._first_failure or now) > self._limits.discovery_timeout_s
        counts = {host: failures.count for host, failures in self._failures.items()}
        all_failed = sum(counts.values()) >= MAX_SETUP_FAILURES and counts.keys() >= set(existing)
        if is_late or all_failed or counts.get(UNKNOWN, 0) >= MAX_SETUP_FAILURES:
            hosts = sorted(filter(None, self._failures))
            machines = f" on all of {len(hosts)} machines ({', '.join(hosts[:MAX_LISTED])})" if len(hosts) > 1 else ""
            return f"setup_failed{machines}: {error}"
        return None

    def listing(self, wall_clock: float) -> list[dict[str, Any]]:
        """The machines whose last set-up failed, for a status; `until` as wall-clock time."""
        now = self._clock()
        failed = [(host, failures) for host, failures in sorted(self._failures.items()) if host]
        return [
            {
                "machine": host,
                "failures": failures.count,
                "until": wall_clock + failures.until - now,
                "error": failures.error[-MAX_ERROR:],
            }
            for host, failures in failed[:MAX_LISTED]
        ]
