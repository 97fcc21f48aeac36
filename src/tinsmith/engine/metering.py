"""What an engine counts and times, in the meters of its base model. One thread writes; whoever reads, reads the files.

Every label set is looked up once: a meter costs a microsecond or two, and some are written in every decode step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from prometheus_client import CollectorRegistry

from tinsmith.engine.scheduler import PASS_KINDS
from tinsmith.samplers import CacheUse
from tinsmith.store.futures import SampleCost
from tinsmith.telemetry import metrics
from tinsmith.types import Pending

DECODE = "decode"


class EngineMeters:
    def __init__(
        self,
        base_model: str,
        engine_id: str,
        token_budget: int,
        most_tenants: int,
        registry: CollectorRegistry | None = None,
    ) -> None:
        seat = (base_model, engine_id)
        registry = registry or CollectorRegistry()
        self._token_budget = token_budget
        self._tenants = metrics.TenantLabels(most_tenants)
        prefix = "tinsmith_engine_"
        step_seconds = metrics.histogram(prefix + "step_seconds", registry)
        tokens = metrics.counter(prefix + "tokens_total", registry)
        tenant_tokens = metrics.counter(prefix + "tenant_tokens_total", registry)
        settled = metrics.counter(prefix + "futures_settled_total", registry)
        waits = metrics.histogram(prefix + "wait_seconds", registry)
        runs = metrics.histogram(prefix + "run_seconds", registry)
        blocks = metrics.gauge(prefix + "kv_blocks", registry)
        self._seconds = cache(lambda work: step_seconds.labels(base_model, work))
        self._tokens = cache(lambda kind: tokens.labels(base_model, kind))
        self._tenant_tokens = cache(lambda tenant, kind: tenant_tokens.labels(base_model, tenant, kind))
        self._settled = cache(lambda kind, outcome: settled.labels(base_model, kind, outcome))
        self._waits = cache(lambda kind: waits.labels(base_model, kind))
        self._runs = cache(lambda kind: runs.labels(base_model, kind))
        self._step_tokens = metrics.histogram(prefix + "step_tokens", registry).labels(base_model)
        self._step_passes = metrics.histogram(prefix + "step_passes", registry).labels(base_model)
        self._step_tenants = metrics.histogram(prefix + "step_tenants", registry).labels(base_model)
        self._efficiency = metrics.histogram(prefix + "pack_efficiency", registry).labels(base_model)
        self._running = metrics.gauge(prefix + "samples_running", registry).labels(*seat)
        self._blocks = {state: blocks.labels(*seat, state) for state in ("live", "cached", "limit")}
        held = metrics.gauge(prefix + "memory_bytes", registry)
        self._held = cache(lambda holder: held.labels(*seat, holder))
        self._kv_use = metrics.gauge(prefix + "kv_use", registry).labels(*seat)
        self._database = metrics.histogram(prefix + "database_seconds", registry).labels(base_model)

    def passes(self, requests: Sequence[Pending], seconds: float, *, others_wait: bool) -> None:
        """Passes shared a step; `others_wait` says that more of them were there."""
        if not requests:
            return
        num_tokens = sum(request.num_tokens for request in requests)
        self._seconds("passes").observe(seconds)
        self._step_tokens.observe(num_tokens)
        self._step_passes.observe(len(requests))
        self._step_tenants.observe(len({request.tenant_id for request in requests}))
        if others_wait:
            self._efficiency.observe(min(1.0, num_tokens / self._token_budget))

    def worked(self, work: str, seconds: float) -> None:
        """Anything else that a step did."""
        self._seconds(work).observe(seconds)

    def sampler(self, running: int, use: CacheUse) -> None:
        """How full the sampler is now."""
        self._running.set(running)
        for state, blocks in (("live", use.live_blocks), ("cached", use.cached_blocks), ("limit", use.max_blocks)):
            self._blocks[state].set(blocks)
        self._kv_use.set(use.live_blocks / use.max_blocks if use.max_blocks else 0.0)

    def memory(self, use: Mapping[str, int]) -> None:
        """Who holds how much of the device now."""
        for holder, num_bytes in use.items():
            self._held(holder).set(num_bytes)

    def settled(self, request: Pending, outcome: str, cost: SampleCost | None) -> None:
        """A request has ended: done, user_error or server_error."""
        self._settled(request.kind, outcome).inc()
        if outcome != "done":
            return
        tenant = self._tenants(request.tenant_id)
        if request.kind in PASS_KINDS:
            self._tokens(request.kind).inc(request.num_tokens)
            self._tenant_tokens(tenant, "training").inc(request.num_tokens)
        if cost is not None:
            computed = cost.prefill_tokens - cost.cached_tokens
            for kind, count in (("prompt", computed), ("cached", cost.cached_tokens), ("sampled", cost.sampled_tokens)):
                self._tokens(kind).inc(count)
                self._tenant_tokens(tenant, kind).inc(count)

    def timed(self, kind: str, waited_s: float, ran_s: float) -> None:
        self._waits(kind).observe(waited_s)
        self._runs(kind).observe(ran_s)

    def database_used(self, seconds: float) -> None:
        self._database.observe(seconds)
