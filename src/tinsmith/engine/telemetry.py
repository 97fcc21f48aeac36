"""The engine's telemetry: curves of runs, recent steps, kept samples; the times of requests; and its meters.

`Recorder` gathers the metrics of passes in memory until the optimizer step that uses them, and writes them in the
transaction that settles that step: one row more, and no transaction. So the first point after an engine's death covers
only the passes since then. Steps are written about once a second. `SampleKeeper` keeps samples within a rate for each
tenant, so that a burst of them costs next to nothing. A failure here fails nothing else.

`RequestTimings` has an entry from a request's arrival in memory to its settlement: when it was planned, begun and done.
The entry goes into the request's row with the settlement, and costs no write of its own. Then the meters count it, and
its spans are sent if it came with a trace. It uses the wall clock, as the server's part of the trace does.

`EngineMeters` are the Prometheus meters of a base model. One thread writes; readers read the files. Every label set is
looked up once: a meter costs a microsecond or two, and some are written in every decode step.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import structlog
from prometheus_client import CollectorRegistry
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.db.database import Database, now
from tinsmith.db.statements import Bound, Effect
from tinsmith.engine.scheduler import PASS_KINDS, Step
from tinsmith.losses import token_weight
from tinsmith.samplers import CacheUse
from tinsmith.store.futures import SampleCost, Settlement, WorkTimes
from tinsmith.store.history import (
    KEPT_POINTS,
    KEPT_STEPS,
    MOST_NAMES,
    MOST_POINTS,
    MOST_PROMPT_TOKENS,
    MOST_SEQUENCE_TOKENS,
    MOST_SEQUENCES,
    SERVER,
    Curves,
    KeptSample,
    KeptSequence,
    RecentStep,
    RecentSteps,
    SampleContent,
    keeping,
    new_sample,
    thinning,
)
from tinsmith.store.sampling_sessions import SamplingSession
from tinsmith.telemetry import metrics
from tinsmith.telemetry.tracing import Tracing
from tinsmith.types import OptimStep, Pass, PassResult, Pending, Sample, SampledSequence, SampleResult

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
        """Passes shared a step; `others_wait` says that more of them waited."""
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
        """Other work of a step."""
        self._seconds(work).observe(seconds)

    def sampler(self, running: int, use: CacheUse) -> None:
        """How full the sampler is now."""
        self._running.set(running)
        for state, blocks in (("live", use.live_blocks), ("cached", use.cached_blocks), ("limit", use.max_blocks)):
            self._blocks[state].set(blocks)
        self._kv_use.set(use.live_blocks / use.max_blocks if use.max_blocks else 0.0)

    def memory(self, use: Mapping[str, int]) -> None:
        """Bytes of the device by holder."""
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


MOST_RUNS = 10_000
"""Runs whose gathered metrics are in memory; the least recently used is dropped first."""

MOST_NAMED_MODELS = 64
"""Models whose share of a step is kept by name; that of the others is their tenant's."""

SAMPLES_PER_S = 2.0
BURST_OF_SAMPLES = 32.0
"""How fast samples of one tenant are kept: so many at once, and then so many a second."""

WHOLE_AFTER_S = BURST_OF_SAMPLES / SAMPLES_PER_S
"""After so long without a sample a tenant has its whole burst again."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Mean:
    total: float = 0.0
    weight: float = 0.0


@dataclass(slots=True)
class _Gathered:
    """The metrics of passes of one kind since the last optimizer step, put together as the SDK does for its chunks.

    Beside them the mean loss: per token, or per datum where a loss is no sum over tokens (losses.token_weight).
    """

    sums: dict[str, float] = field(default_factory=dict)
    means: dict[str, _Mean] = field(default_factory=dict)
    extremes: dict[str, float] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, float], num_data: int, tokens: float | None) -> None:
        """`tokens` is the pass's losses.token_weight."""
        if "loss:sum" in metrics:
            name, weight = ("loss_per_datum", num_data) if tokens is None else ("loss_per_token", tokens)
            loss = self.means.setdefault(name, _Mean())
            loss.total += metrics["loss:sum"]
            loss.weight += weight
        for name, value in metrics.items():
            reduction = name.rpartition(":")[2]
            if reduction == "sum":
                self.sums[name] = self.sums.get(name, 0.0) + value
            elif reduction == "mean":
                mean = self.means.setdefault(name, _Mean())
                mean.total += value * num_data
                mean.weight += num_data
            elif reduction in ("max", "min"):
                choose = max if reduction == "max" else min
                self.extremes[name] = choose(value, self.extremes.get(name, value))

    def metrics(self) -> dict[str, float]:
        found = dict(self.sums)
        found |= {name: mean.total / mean.weight for name, mean in self.means.items() if mean.weight}
        return found | self.extremes


@dataclass(slots=True)
class _Run:
    """`steps` optimizer steps were done, and `points` of them have a row."""

    steps: int
    points: int
    passes: _Gathered = field(default_factory=_Gathered)
    forwards: _Gathered = field(default_factory=_Gathered)
    stepped_at: float | None = None


@dataclass(slots=True)
class _Allowance:
    samples: float
    at: float


@dataclass(frozen=True, slots=True)
class BegunSample:
    """A sample that will be kept when it is done."""

    sample: KeptSample
    asked: Sample


class Records:
    """The stores of records, and how many samples of each tenant are kept; 0 keeps none."""

    def __init__(self, db: Database, kept_samples: int) -> None:
        self.curves = Curves(db)
        self.recent_steps = RecentSteps(db)
        self.kept_samples = kept_samples


class Recorder:
    """Of training. Without records it does nothing."""

    def __init__(self, base_model: str, records: Records | None) -> None:
        self._base_model = base_model
        self._records = records
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._steps: list[RecentStep] = []

    # Curves.

    def passed(self, request: Pending, pass_: Pass, result: PassResult) -> None:
        if (run := self._run(request.model_id)) is not None:
            gathered = run.forwards if request.kind == "forward" else run.passes
            gathered.add(result.metrics, len(result.logprobs), token_weight(pass_))

    def stepped(self, request: Pending, step: OptimStep, metrics: Mapping[str, float]) -> list[Effect]:
        """Statements for the transaction that settles an optimizer step."""
        run = self._run(request.model_id)
        if run is None or request.model_id is None or self._records is None:
            return []
        moment = time.monotonic()
        passed, forward = run.passes.metrics(), run.forwards.metrics()
        point = {"learning_rate": step.params.learning_rate, **passed}
        point |= {name: value for name, value in metrics.items() if name != "step"}
        if run.stepped_at is not None and moment > run.stepped_at:
            point["step_seconds"] = moment - run.stepped_at
            point["tokens_per_second"] = passed.get("tokens:sum", 0.0) / point["step_seconds"]
        point |= {f"forward/{name}": value for name, value in forward.items()}
        run.passes, run.forwards, run.stepped_at = _Gathered(), _Gathered(), moment
        run.steps += 1
        run.points += 1
        point = dict(list(point.items())[:MOST_NAMES])
        statements: list[Effect] = [self._records.curves.recording(request.model_id, run.steps, point)]
        if run.points > MOST_POINTS:
            statements.append(thinning(request.model_id, SERVER, 0, run.steps))
            run.points = KEPT_POINTS
        return statements

    def forget(self, model_id: str) -> None:
        self._runs.pop(model_id, None)

    def _run(self, model_id: str | None) -> _Run | None:
        if model_id is None or self._records is None:
            return None
        run = self._runs.get(model_id)
        if run is None:
            try:
                run = _Run(*self._records.curves.known(model_id))
            except SQLAlchemyError as error:
                log.warning("the curves of a run cannot be read", model_id=model_id, error=repr(error))
                return None
            self._runs[model_id] = run
            if len(self._runs) > MOST_RUNS:
                self._runs.popitem(last=False)
        self._runs.move_to_end(model_id)
        return run

    # Steps.

    def ran(self, step: Step, duration_s: float) -> None:
        shares: dict[str, dict[str, int]] = {}
        named: set[str] = set()
        for request in step.passes:
            model_id = request.model_id or ""
            if model_id not in named and len(named) >= MOST_NAMED_MODELS:
                model_id = ""
            named.add(model_id)
            of_tenant = shares.setdefault(request.tenant_id, {})
            of_tenant[model_id] = of_tenant.get(model_id, 0) + request.num_tokens
        for request in (*step.optim_steps, *step.singles):
            shares.setdefault(request.tenant_id, {})
        num_tokens = sum(request.num_tokens for request in step.passes)
        sizes = len(step.passes), len(step.optim_steps), len(step.singles)
        self._steps.append(RecentStep(now(), duration_s, *sizes, num_tokens, shares))
        del self._steps[:-KEPT_STEPS]

    def flush(self) -> None:
        """Write the steps that were noted."""
        if not self._steps or self._records is None:
            return
        steps, self._steps = self._steps, []
        try:
            self._records.recent_steps.add(self._base_model, steps)
        except SQLAlchemyError as error:
            log.warning("what was run lately could not be recorded", error=repr(error))


class SampleKeeper:
    """Of samples. Without records it keeps none."""

    def __init__(self, records: Records | None) -> None:
        self._most = records.kept_samples if records else 0
        self._allowances: OrderedDict[str, _Allowance] = OrderedDict()  # the least recently used first

    def begin(self, request: Pending, sampler: SamplingSession, asked: Sample) -> BegunSample | None:
        """A sample that is to be kept; None if it is one of too many."""
        if not self._most or not self._allowed(request.tenant_id):
            return None
        weights = sampler.model_path or sampler.version_id
        sample = new_sample(request.request_id, request.tenant_id, request.session_id, sampler.base_model, weights)
        return BegunSample(sample, asked)

    def kept(self, begun: BegunSample, result: SampleResult) -> list[Bound]:
        """Statements for the transaction that settles the sample."""
        asked, sequences = begun.asked, result.sequences
        content = SampleContent(
            prompt=asked.prompt_T[-MOST_PROMPT_TOKENS:].tolist(),
            prompt_cut=max(0, len(asked.prompt_T) - MOST_PROMPT_TOKENS),
            params={
                name: getattr(asked.params, name) for name in ("max_tokens", "seed", "temperature", "top_k", "top_p")
            },
            sequences=[_kept_sequence(sequence) for sequence in sequences[:MOST_SEQUENCES]],
        )
        sample = replace(
            begun.sample,
            prompt_tokens=len(asked.prompt_T),
            sampled_tokens=sum(len(sequence.tokens_T) for sequence in sequences),
            num_sequences=len(sequences),
        )
        return keeping(sample, content, self._most)

    def _allowed(self, tenant_id: str) -> bool:
        moment = time.monotonic()
        allowance = self._allowances.setdefault(tenant_id, _Allowance(BURST_OF_SAMPLES, moment))
        grown = allowance.samples + SAMPLES_PER_S * (moment - allowance.at)
        allowance.samples, allowance.at = min(BURST_OF_SAMPLES, grown), moment
        self._allowances.move_to_end(tenant_id)
        while moment - next(iter(self._allowances.values())).at >= WHOLE_AFTER_S:  # as good as new
            self._allowances.popitem(last=False)
        if allowance.samples < 1:
            return False
        allowance.samples -= 1
        return True


def _kept_sequence(sequence: SampledSequence) -> KeptSequence:
    logprobs = np.round(sequence.logprobs_T[:MOST_SEQUENCE_TOKENS].astype(np.float64), 6)
    shown: Sequence[float | None] = logprobs.tolist()
    if not np.isfinite(logprobs).all():
        shown = [value if math.isfinite(value) else None for value in logprobs.tolist()]
    return KeptSequence(sequence.tokens_T[:MOST_SEQUENCE_TOKENS].tolist(), shown, sequence.stop_reason)


@dataclass(slots=True)
class _Entry:
    request: Pending
    planned_at: float | None = None
    started_at: float | None = None
    step: int | None = None


class RequestTimings:
    def __init__(self, meters: EngineMeters, tracing: Tracing) -> None:
        self._meters = meters
        self._tracing = tracing
        self._entries: dict[str, _Entry] = {}
        self._step = 0

    def arrived(self, request: Pending) -> None:
        self._entries[request.request_id] = _Entry(request)

    def forget(self, request_ids: Iterable[str]) -> None:
        """They belong to another process now."""
        for request_id in request_ids:
            self._entries.pop(request_id, None)

    def planned(self, requests: Iterable[Pending], planned_at: float) -> None:
        """They are one step, whose planning began at `planned_at`."""
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
        """The same settlements with the times of the work, which ends now."""
        ran_at = time.time()
        return [
            replace(settlement, work=WorkTimes(entry.started_at, max(entry.started_at, ran_at), entry.step))
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
        attributes: dict[str, str | int | float] = {
            "tinsmith.request_id": request.request_id,
            "tinsmith.tenant_id": request.tenant_id,
            "tinsmith.outcome": outcome,
        }
        if request.model_id:
            attributes["tinsmith.model_id"] = request.model_id
        whole = self._tracing.record(request.kind, request.traceparent, request.created_at, settled_at, attributes)
        if work is None:
            return
        planned_at = entry.planned_at if entry.planned_at is not None else work.started_at
        of_step = {} if work.step is None else {"tinsmith.step": work.step}
        self._tracing.record("wait", whole, request.created_at, planned_at, {})
        if entry.planned_at is not None:
            self._tracing.record("plan", whole, planned_at, work.started_at, of_step)
        self._tracing.record("run", whole, work.started_at, work.ran_at, of_step)
        self._tracing.record("settle", whole, work.ran_at, settled_at, {})
