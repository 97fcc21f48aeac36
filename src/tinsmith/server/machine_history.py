"""The background task that records what this server's engines and devices do, for the history of the machine.

Every `OBSERVE_S` seconds it reads the engines' counters and gauges, which count since this server's start, and adds
what is new since its last reading. What is counted after the last reading of a server is lost. Of the tenants, the
first `metrics_tenants` have names; the tokens of others count together under `OTHER`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.api.dashboard.machine import Utilisation
from tinsmith.cluster.engines import Engines
from tinsmith.db.database import now
from tinsmith.store.machine_history import MACHINE, MachineHistory, MachineWork
from tinsmith.telemetry.metrics import EngineCounts, ServerMeters

OBSERVE_S = 10.0
MAX_OBSERVED_S = 60.0
"""A pause between two readings counts as at most this long: a machine that slept did nothing."""

TRAINING_WORK = ("passes", "optim_steps")
SAMPLING_WORK = ("decode",)
"""The kinds of work of an engine's steps; all other kinds load or save."""

log = structlog.get_logger()


class MachineObserver:
    def __init__(
        self,
        history: MachineHistory,
        meters: ServerMeters,
        engines: Engines,
        utilisation: Utilisation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history = history
        self._meters = meters
        self._engines = engines
        self._utilisation = utilisation or Utilisation()
        self._clock = clock
        self._read_at = clock()
        self._counts: Mapping[str, EngineCounts] = {}

    async def run(self, threads: Executor | None = None) -> None:
        """Observe on one of `threads` until cancelled."""
        while True:
            await asyncio.sleep(OBSERVE_S)
            try:
                await asyncio.get_running_loop().run_in_executor(threads, self.observe)
            except (SQLAlchemyError, OSError) as error:
                log.warning("the history of the machine could not be written; trying again", error=repr(error))

    def observe(self) -> None:
        """Record what is new since the last reading. After an error the next call records it too."""
        read_at = self._clock()
        elapsed_s = min(MAX_OBSERVED_S, max(0.0, read_at - self._read_at))
        counts = self._meters.engine_counts()
        states: dict[str, list[str]] = {}
        for base_model, state in self._engines.list_running():
            states.setdefault(base_model, []).append(state)
        observations = {
            base_model: _observe(
                counts.get(base_model) or EngineCounts(),
                self._counts.get(base_model) or EngineCounts(),
                states.get(base_model, []),
                elapsed_s,
            )
            for base_model in sorted({*counts, *states})
        }
        observations[MACHINE] = self._observe_machine(elapsed_s)
        self._history.add(self._engines.holder, now(), observations)
        self._counts, self._read_at = counts, read_at

    def _observe_machine(self, elapsed_s: float) -> MachineWork:
        shares = self._utilisation.list_shares()
        observation = MachineWork(observed_s=elapsed_s)
        if shares:
            observation.device_s, observation.device_busy_s = elapsed_s, elapsed_s * sum(shares) / len(shares)
        return observation


def _observe(counts: EngineCounts, before: EngineCounts, states: list[str], elapsed_s: float) -> MachineWork:
    """The work between two readings of a base model, whose engines have these states."""
    seconds = Counter(counts.seconds)
    seconds.subtract(before.seconds)
    training_s = sum(seconds[kind] for kind in TRAINING_WORK)
    sampling_s = sum(seconds[kind] for kind in SAMPLING_WORK)
    num_loading = sum(state in ("starting", "loading") for state in states)
    tenants: dict[str, tuple[float, float]] = {}
    for tenant_id, (trained, sampled) in counts.tenants.items():
        trained_before, sampled_before = before.tenants.get(tenant_id, (0.0, 0.0))
        if trained > trained_before or sampled > sampled_before:
            tenants[tenant_id] = trained - trained_before, sampled - sampled_before
    return MachineWork(
        observed_s=elapsed_s,
        engine_s=elapsed_s * len(states),
        training_s=training_s,
        sampling_s=sampling_s,
        loading_s=sum(seconds.values()) - training_s - sampling_s + elapsed_s * num_loading,
        trained_tokens=counts.trained - before.trained,
        sampled_tokens=counts.sampled - before.sampled,
        memory_byte_s=counts.memory_bytes * elapsed_s,
        budget_byte_s=counts.budget_bytes * elapsed_s,
        tenants=tenants,
    )
