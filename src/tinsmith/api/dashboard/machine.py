"""The dashboard's view of the machine: rates, queue, memory and engines; recent requests; why a request waits.

Rates are means over the last `RATE_S` seconds. The training rate counts the tokens of all tenants' steps, as the
queue's page does; sampling and requests are the caller's own. An engine is busy during its steps. The busy share is a
lower bound, since sampling has no steps. Utilisation covers the server's machine: its GPUs, if NVIDIA's management
library finds any, otherwise its CPUs. The timeline shows when other tenants trained and sampled, without their names.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from tinsmith.api.openapi import ANYTHING, LIST, fields, listing
from tinsmith.api.request import Call, JsonObject
from tinsmith.db.database import now
from tinsmith.store.overview import Row
from tinsmith.wire.fields import Query

RATE_S = 60.0
DEFAULT_MINUTES = 10.0
MAX_MINUTES = 120.0
MAX_REQUESTS = 2000


class Utilisation:
    """The utilisation of this machine's devices, 0 to 1. That of CPUs is since the last reading, or boot."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._lock = threading.Lock()
        self._before = 0, 0
        self._share: float | None = None

    def read(self) -> JsonObject:
        gpus = self._gpus()
        return {"gpus": gpus} if gpus else {"cpu": self._cpu()}

    def list_shares(self) -> list[float]:
        """The utilisation of each GPU, otherwise that of the CPUs; empty if neither is known."""
        if gpus := self._gpus():
            return gpus
        cpu = self._cpu()
        return [] if cpu is None else [cpu]

    def _gpus(self) -> list[float]:
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            return [nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles]
        except Exception:  # noqa: BLE001 - no library, driver or device; its errors have no common base class
            return []

    def _cpu(self) -> float | None:
        """Return None if the system does not provide the counters."""
        with self._lock, contextlib.suppress(OSError, ValueError, IndexError):
            # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user
            ticks = [int(word) for word in self._stat.read_text().split("\n", 1)[0].split()[1:9]]
            total, idle = sum(ticks), ticks[3] + ticks[4]
            passed, idled = total - self._before[0], idle - self._before[1]
            if passed > 0:
                self._share, self._before = min(1.0, max(0.0, 1 - idled / passed)), (total, idle)
        return self._share


_UTILISATION = Utilisation()


@listing(
    "/dashboard/machine",
    "Read the machine's current state",
    answer=fields({"rates": ANYTHING, "queue": ANYTHING, "engines": LIST, "utilisation": ANYTHING}),
)
def machine(call: Call) -> JsonObject:
    services, read_at = call.services, now()
    memory = services.meters.device_memory()
    waiting = services.overview.list_waiting(call.tenant_id)
    engines: list[JsonObject] = []
    training = 0.0
    for shape in services.bases:
        if services.engines.is_unloaded(shape.name):
            continue
        steps = [step for _, step in services.recent_steps.newest(shape.name) if step.ended_at > read_at - RATE_S]
        # During the first minute of a base model the window is shorter.
        window_start = min((step.ended_at - step.duration_s for step in steps), default=read_at - RATE_S)
        span = max(1.0, min(RATE_S, read_at - window_start))
        training += sum(step.num_tokens for step in steps) / span
        holders = dict(memory.get(shape.name, {}))
        budget = holders.pop("budget", 0)
        state, reason = services.engines.queue_state(shape.name)
        busy = min(1.0, sum(step.duration_s for step in steps) / span)
        engines.append(
            {"base_model": shape.name, "state": state, "reason": reason, "busy": busy}
            | {"memory_bytes": sum(holders.values()), "memory_budget": budget or None}
        )
    return {
        "rates": {
            "training_tokens": training,
            "sampling_tokens": services.overview.count_sampled_tokens(call.tenant_id, read_at - RATE_S) / RATE_S,
            "seconds": RATE_S,
        },
        "queue": {
            "requests": sum(row["requests"] for row in waiting),
            "oldest_s": max((read_at - row["oldest_at"] for row in waiting), default=None),
        },
        "engines": engines,
        "utilisation": _UTILISATION.read(),
    }


class TimelineQuery(Query):
    minutes: Annotated[float, Field(gt=0, le=MAX_MINUTES)] = DEFAULT_MINUTES


@listing(
    "/dashboard/timeline",
    "List requests of the last minutes",
    answer=fields({"requests": LIST, "steps": LIST, "snapshots": LIST, "others_sampling": LIST}),
    query=TimelineQuery,
)
def timeline(call: Call, query: TimelineQuery) -> JsonObject:
    """Return the caller's requests and snapshots by run or sampler, and other tenants' tokens and sampling times."""
    read_at = now()
    since = read_at - 60.0 * query.minutes
    settled = call.services.overview.list_settled(call.tenant_id, since, MAX_REQUESTS)
    steps = [
        {
            "base_model": shape.name,
            "began": step.ended_at - step.duration_s,
            "ended": step.ended_at,
            "others_tokens": step.num_tokens - sum(step.shares.get(call.tenant_id, {}).values()),
        }
        for shape in call.services.bases
        for _, step in call.services.recent_steps.newest(shape.name)
        if step.ended_at >= since
    ]
    return {
        "now": read_at,
        "since": since,
        "requests": settled,
        "waiting": call.services.overview.list_waiting(call.tenant_id),
        "steps": [step for step in steps if step["others_tokens"]],
        "snapshots": [
            {"lane": model_id, "began": snapshot.ended_at - snapshot.duration_s, "ended": snapshot.ended_at}
            for shape in call.services.bases
            for _, snapshot in call.services.recent_steps.newest(shape.name, snapshots=True)
            if snapshot.ended_at >= since
            for model_id in snapshot.shares.get(call.tenant_id, {})
        ],
        "others_sampling": [
            {"began": began_at, "ended": ended_at}
            for began_at, ended_at in call.services.overview.sampling_of_others(call.tenant_id, since, MAX_REQUESTS)
        ],
    }


def explain_wait(call: Call, row: Row, waiting: Sequence[Row], seats: Sequence[Row]) -> str:
    """Explain in a sentence why the requests of a row of `Overview.waiting` are waiting."""
    base_model = row["base_model"]
    state, reason = call.services.engines.queue_state(base_model)
    if state != "active":
        return f"The engine accepts no work: {reason or state.replace('_', ' ')}."
    base_seats = [seat for seat in seats if seat["base_model"] == base_model]
    if base_seats and not any(seat["state"] == "ready" for seat in base_seats):
        states = ", ".join(f"{seat['name']} is {seat['state']}" for seat in base_seats)
        return f"No engine of {base_model} is ready: {states}."
    earlier = [
        request for request in waiting if request["lane"] == row["lane"] and request["oldest_at"] < row["oldest_at"]
    ]
    if row["kind"] == "sample":
        return "It is being sampled, or waits for a free slot in the sampler."
    if earlier:
        kind = earlier[0]["kind"].replace("_", " ")
        return f"A run's requests run in order: an earlier {kind} of the same run comes first."
    return f"It runs in the current or the next step{_last_step(call, base_model)}."


def _last_step(call: Call, base_model: str) -> str:
    newest = call.services.recent_steps.newest(base_model, 1)
    if not newest:
        return ""
    step = newest[0][1]
    tenants: Mapping[str, object] = step.shares
    shared = f", shared by {len(tenants)} tenants" if len(tenants) > 1 else ""
    return f". The last step took {step.duration_s:.2g} s for {step.num_tokens:,} tokens{shared}"
