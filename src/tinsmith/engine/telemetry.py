"""The engine's telemetry: curves of runs, recent steps, stored samples; the times of requests; and its metrics.

`Recorder` gathers the metrics of passes in memory until the optimizer step that uses them, and writes them in the
transaction that settles that step: one more row, no extra transaction. So the first point after an engine's death
covers only the passes since then. Steps are written about once a second. `SampleRecorder` keeps samples at a limited
rate per tenant, so that bursts cost next to nothing. Errors here fail nothing else.

`RequestTimings` has the times of a request from its arrival in memory to its settlement: when it was planned, started
and done. They are written with the settlement into the request's row, without a write of their own. Then the metrics
count it, and its spans are sent if it came with a trace. It uses the wall clock, like the server's part of the trace.

`EngineMeters` are the Prometheus metrics of a base model. One thread writes; readers read the files. Every label set is
looked up once: an update takes a microsecond or two, and some run in every decode step.
"""

from __future__ import annotations

import base64
import hashlib
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
from tinsmith.db.statements import Effect
from tinsmith.engine.scheduler import PASS_KINDS, Step
from tinsmith.losses import floats, loss_registry, token_weight
from tinsmith.losses.divergence import SUMMARIZED, summarize_divergence
from tinsmith.samplers import CacheUse
from tinsmith.store.curves import MAX_NAMES, MAX_POINTS, SERVER, THINNED_POINTS, Curves, thin_points
from tinsmith.store.futures import SampleCost, Settlement, WorkTimes
from tinsmith.store.recent_steps import MAX_RECENT_STEPS, RecentStep, RecentSteps
from tinsmith.store.sampling_sessions import SamplingSession
from tinsmith.store.stored_samples import (
    MAX_IMAGES_BYTES,
    MAX_PROMPT_TOKENS,
    MAX_SEQUENCE_TOKENS,
    MAX_SEQUENCES,
    SampleContent,
    SampledLogprobs,
    SampleLimits,
    StoredImage,
    StoredSample,
    StoredSamples,
    StoredSequence,
    TrainedAnswer,
    keep_sample,
    new_sample,
    run_of_weights,
    thin_samples,
)
from tinsmith.telemetry import metrics
from tinsmith.telemetry.tracing import Tracing
from tinsmith.types import (
    F32,
    I32,
    OptimStep,
    Pass,
    PassResult,
    Pending,
    Sample,
    SampledSequence,
    SampleResult,
    SparseRows,
    tokens_digest,
)

DECODE = "decode"


class EngineMeters:
    def __init__(
        self,
        base_model: str,
        engine_id: str,
        token_budget: int,
        max_tenants: int,
        registry: CollectorRegistry | None = None,
    ) -> None:
        seat = (base_model, engine_id)
        registry = registry or CollectorRegistry()
        self._token_budget = token_budget
        self._tenants = metrics.TenantLabels(max_tenants)
        prefix = "tinsmith_engine_"
        step_seconds = metrics.histogram(prefix + "step_seconds", registry)
        tokens = metrics.counter(prefix + "tokens_total", registry)
        tenant_tokens = metrics.counter(prefix + "tenant_tokens_total", registry)
        settled = metrics.counter(prefix + "futures_settled_total", registry)
        waits = metrics.histogram(prefix + "wait_seconds", registry)
        runs = metrics.histogram(prefix + "run_seconds", registry)
        blocks = metrics.gauge(prefix + "kv_blocks", registry)
        self._seconds = cache(lambda phase: step_seconds.labels(base_model, phase))
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
        memory_bytes = metrics.gauge(prefix + "memory_bytes", registry)
        self._memory_bytes = cache(lambda holder: memory_bytes.labels(*seat, holder))
        uncaptured = metrics.counter(prefix + "uncaptured_steps_total", registry)
        self._uncaptured = cache(lambda reason: uncaptured.labels(*seat, reason))
        self._num_uncaptured: dict[str, int] = {}
        self._kv_use = metrics.gauge(prefix + "kv_use", registry).labels(*seat)
        self._database = metrics.histogram(prefix + "database_seconds", registry).labels(base_model)

    def observe_passes(self, requests: Sequence[Pending], seconds: float, *, others_wait: bool) -> None:
        """Passes shared a step; `others_wait`: more of them were waiting."""
        if not requests:
            return
        num_tokens = sum(request.cost_tokens for request in requests)
        self._seconds("passes").observe(seconds)
        self._step_tokens.observe(num_tokens)
        self._step_passes.observe(len(requests))
        self._step_tenants.observe(len({request.tenant_id for request in requests}))
        if others_wait:
            self._efficiency.observe(min(1.0, num_tokens / self._token_budget))

    def observe_work(self, phase: str, seconds: float) -> None:
        """Other work of a step."""
        self._seconds(phase).observe(seconds)

    def set_sampler_load(self, running: int, use: CacheUse) -> None:
        """The current load of the sampler."""
        self._running.set(running)
        for state, blocks in (("live", use.live_blocks), ("cached", use.cached_blocks), ("limit", use.max_blocks)):
            self._blocks[state].set(blocks)
        self._kv_use.set(use.live_blocks / use.max_blocks if use.max_blocks else 0.0)
        for reason, steps in use.uncaptured_steps.items():
            self._uncaptured(reason).inc(steps - self._num_uncaptured.get(reason, 0))
            self._num_uncaptured[reason] = steps

    def set_memory_use(self, use: Mapping[str, int]) -> None:
        """Device memory in bytes by holder."""
        for holder, num_bytes in use.items():
            self._memory_bytes(holder).set(num_bytes)

    def count_settled(self, request: Pending, outcome: str, cost: SampleCost | None) -> None:
        """A request ended: done, user_error or server_error."""
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

    def count_shared(self, request: Pending, result: PassResult) -> None:
        """Count the tokens of a pass that did not go through the model, because other data began with them."""
        if result.num_rows is not None:
            self._tokens("shared").inc(max(0, request.num_tokens - result.num_rows))

    def observe_times(self, kind: str, waited_s: float, ran_s: float) -> None:
        self._waits(kind).observe(waited_s)
        self._runs(kind).observe(ran_s)

    def observe_database(self, seconds: float) -> None:
        self._database.observe(seconds)


MAX_RUNS = 10_000
"""Runs whose gathered metrics are in memory; the least recently used is dropped first."""

MAX_NAMED_MODELS = 64
"""Models whose share of a step is recorded by name; the share of others is their tenant's."""

MAX_ANSWERS = 16_384
"""Answers whose lengths are kept between two optimizer steps."""

MAX_COMPARED = 256
"""Trained positions of an answer whose sampling logprobs are compared with those of stored samples."""

MAX_TRAINED = 4096
"""Trained answers recorded at one flush, about once a second."""

SAMPLES_PER_S = 2.0
BURST_OF_SAMPLES = 32.0
"""Rate limit for keeping samples of one tenant: a burst of this many, then SAMPLES_PER_S. A group of samples of one
prompt and weights counts once, so that a recipe that asks for its answers one by one has whole groups."""

MAX_GROUP_SAMPLES = 16
"""Samples of one group that count once."""

MAX_GROUPS = 64
"""Groups of a tenant that may get further samples; the least recently sampled is dropped first."""

MAX_UNTHINNED = 64
"""Samples of a run that are kept until what exceeds the limits is deleted; fewer if the limits are small."""

FULL_BURST_AFTER_S = BURST_OF_SAMPLES / SAMPLES_PER_S
"""After this long without a sample a tenant has its full burst again."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Mean:
    total: float = 0.0
    weight: float = 0.0


@dataclass(slots=True)
class _PassMetrics:
    """The metrics of passes of one kind since the last optimizer step, combined as the SDK combines chunks.

    Also the mean loss, per token, or per datum where a loss is not a sum over tokens (losses.token_weight), and the
    estimates of train-sample divergence in place of their sums.
    """

    sums: dict[str, float] = field(default_factory=dict)
    means: dict[str, _Mean] = field(default_factory=dict)
    extremes: dict[str, float] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)

    def add_answer(self, advantages: F32, logprobs: F32) -> None:
        """The trained positions of one datum of a policy loss; logprobs are those of its sampling."""
        if len(self.lengths) < MAX_ANSWERS:
            self.lengths.append(len(advantages))
            self.advantages.append(float(advantages.mean(dtype=np.float64)))
        entropy = self.means.setdefault("entropy", _Mean())
        entropy.total -= float(logprobs.sum(dtype=np.float64))
        entropy.weight += len(logprobs)

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
        combined = {name: total for name, total in self.sums.items() if name not in SUMMARIZED}
        combined |= summarize_divergence(self.sums)
        combined |= {name: mean.total / mean.weight for name, mean in self.means.items() if mean.weight}
        for name, values in (("response_tokens", self.lengths), ("advantage", self.advantages)):
            if values:
                low, high = np.quantile(values, (0.1, 0.9)).tolist()
                combined |= {name: float(np.mean(values)), f"{name}:p10": low, f"{name}:p90": high}
        return combined | self.extremes


@dataclass(slots=True)
class _Run:
    """`steps` optimizer steps were done, and `points` of them have a row."""

    steps: int
    points: int
    passes: _PassMetrics = field(default_factory=_PassMetrics)
    forwards: _PassMetrics = field(default_factory=_PassMetrics)
    stepped_at: float | None = None


@dataclass(slots=True)
class _Allowance:
    """The samples that a tenant may have at once, those of each group, and those of each run since it was thinned."""

    samples: float
    at: float
    groups: OrderedDict[tuple[str | None, str], int] = field(default_factory=OrderedDict)
    unthinned: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """The record of an unfinished sample, which is kept when the sample is settled."""

    sample: StoredSample
    requested: Sample


class Records:
    """The stores of records, and how many samples are kept."""

    def __init__(self, db: Database, limits: SampleLimits) -> None:
        self.curves = Curves(db)
        self.recent_steps = RecentSteps(db)
        self.samples = StoredSamples(db)
        self.sample_limits = limits


class Recorder:
    """Records training. Does nothing without records."""

    def __init__(self, base_model: str, records: Records | None) -> None:
        self._base_model = base_model
        self._records = records
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._steps: list[RecentStep] = []
        self._trained: list[TrainedAnswer] = []

    # Curves.

    def record_pass(self, request: Pending, pass_: Pass, result: PassResult) -> None:
        if (run := self._run(request.model_id)) is not None:
            gathered = run.forwards if request.kind == "forward" else run.passes
            metrics = dict(result.metrics)
            if result.num_rows is not None:
                metrics["rows:sum"] = float(result.num_rows)
            gathered.add(metrics, len(result.logprobs), token_weight(pass_))
            if loss_registry()[pass_.loss_fn].is_policy:
                self._record_answers(request, pass_, result, run.steps + 1, gathered)

    def _record_answers(
        self, request: Pending, pass_: Pass, result: PassResult, step: int, gathered: _PassMetrics
    ) -> None:
        """Record the answers that a pass trains on: for each datum, the positions whose advantage is not 0."""
        for datum, logprobs_N in zip(pass_.data, result.logprobs, strict=True):
            targets, advantages_N = datum.inputs["target_tokens"], floats(datum.inputs["advantages"])
            at = np.flatnonzero(advantages_N)
            if isinstance(targets, SparseRows) or targets.ndim != 1 or not len(at):
                continue
            gathered.add_answer(advantages_N[at], floats(datum.inputs["logprobs"])[at])
            if request.kind == "forward" or not self._keeps_samples or len(self._trained) >= MAX_TRAINED:
                continue
            digest = tokens_digest(datum.tokens_N, targets[-1:].astype(np.int32))
            tail = slice(max(int(at[0]), len(targets) - MAX_SEQUENCE_TOKENS), None)
            advantage = float(advantages_N[at].mean(dtype=np.float64))
            answer = TrainedAnswer(request.tenant_id, digest, request.model_id or "", step, advantage, logprobs_N[tail])
            chosen = at[np.unique(np.linspace(0, len(at) - 1, MAX_COMPARED).astype(np.intp))]
            from_end = (len(targets) - chosen).astype(np.int32)
            sampled = SampledLogprobs(from_end, floats(datum.inputs["logprobs"])[chosen])
            self._trained.append(replace(answer, advantages=advantages_N[tail], trained_at=now(), sampled=sampled))

    @property
    def _keeps_samples(self) -> bool:
        return self._records is not None and self._records.sample_limits.of_tenant > 0

    def record_step(self, request: Pending, step: OptimStep, metrics: Mapping[str, float]) -> list[Effect]:
        """Statements for the transaction that settles an optimizer step."""
        run = self._run(request.model_id)
        if run is None or request.model_id is None or self._records is None:
            return []
        now_s = time.monotonic()
        passed, forward = run.passes.metrics(), run.forwards.metrics()
        point = {"learning_rate": step.params.learning_rate, **passed}
        point |= {name: value for name, value in metrics.items() if name != "step"}
        if run.stepped_at is not None and now_s > run.stepped_at:
            point["step_seconds"] = now_s - run.stepped_at
            point["tokens_per_second"] = passed.get("tokens:sum", 0.0) / point["step_seconds"]
        point |= {f"forward/{name}": value for name, value in forward.items()}
        run.passes, run.forwards, run.stepped_at = _PassMetrics(), _PassMetrics(), now_s
        run.steps += 1
        run.points += 1
        point = dict(list(point.items())[:MAX_NAMES])
        statements: list[Effect] = [self._records.curves.step_statement(request.model_id, run.steps, point)]
        if run.points > MAX_POINTS:
            statements.append(thin_points(request.model_id, SERVER, 0, run.steps))
            run.points = THINNED_POINTS
        return statements

    def drop_passes(self, model_id: str) -> None:
        """Forget the passes since the last optimizer step, whose gradient a load has dropped. Steps are counted on."""
        if (run := self._runs.get(model_id)) is not None:
            run.passes, run.forwards = _PassMetrics(), _PassMetrics()

    def forget(self, model_id: str) -> None:
        self._runs.pop(model_id, None)

    def _run(self, model_id: str | None) -> _Run | None:
        if model_id is None or self._records is None:
            return None
        run = self._runs.get(model_id)
        if run is None:
            try:
                run = _Run(*self._records.curves.count_steps_and_points(model_id))
            except SQLAlchemyError as error:
                log.warning("the curves of a run cannot be read", model_id=model_id, error=repr(error))
                return None
            self._runs[model_id] = run
            if len(self._runs) > MAX_RUNS:
                self._runs.popitem(last=False)
        self._runs.move_to_end(model_id)
        return run

    # Steps.

    def record_duration(self, step: Step, duration_s: float) -> None:
        shares: dict[str, dict[str, int]] = {}
        listed_ids: set[str] = set()
        for request in step.passes:
            model_id = request.model_id or ""
            if model_id not in listed_ids and len(listed_ids) >= MAX_NAMED_MODELS:
                model_id = ""
            listed_ids.add(model_id)
            of_tenant = shares.setdefault(request.tenant_id, {})
            of_tenant[model_id] = of_tenant.get(model_id, 0) + request.num_tokens
        for request in (*step.optim_steps, *step.singles):
            shares.setdefault(request.tenant_id, {})
        num_tokens = sum(request.num_tokens for request in step.passes)
        sizes = len(step.passes), len(step.optim_steps), len(step.singles)
        self._steps.append(RecentStep(now(), duration_s, *sizes, num_tokens, shares))
        del self._steps[:-MAX_RECENT_STEPS]

    def record_snapshot(self, tenant_id: str, model_id: str, ended_at: float, duration_s: float) -> None:
        self._steps.append(RecentStep(ended_at, duration_s, 0, 0, 0, 0, {tenant_id: {model_id: 0}}))

    def flush(self) -> None:
        """Write the recorded steps and trained answers."""
        if not (self._steps or self._trained) or self._records is None:
            return
        steps, self._steps = self._steps, []
        trained, self._trained = self._trained, []
        try:
            if trained:
                self._records.samples.note_training(trained)
            if steps:
                self._records.recent_steps.add(self._base_model, steps)
        except SQLAlchemyError as error:
            log.warning("recent steps could not be recorded", error=repr(error))


class SampleRecorder:
    """Keeps samples; none without records."""

    def __init__(self, records: Records | None) -> None:
        self._limits = records.sample_limits if records else SampleLimits(0, 0)
        self._thin_after = max(1, min(MAX_UNTHINNED, self._limits.of_run // 16, self._limits.of_tenant // 16))
        self._allowances: OrderedDict[str, _Allowance] = OrderedDict()  # least recently used first

    def begin(
        self, request: Pending, sampler: SamplingSession, requested: Sample, weight_version: str | None = None
    ) -> SampleRecord | None:
        """A sample to keep; None if the rate limit is exceeded. `weight_version` names the weights that answer, where
        it differs from the session's.
        """
        weights = None if sampler.version_id is None and sampler.model_path is None else weight_version
        weights = weights or sampler.model_path or sampler.version_id
        if not self._limits.of_tenant:
            return None
        prompt_digest = tokens_digest(requested.prompt_T)
        if not self._take_allowance(request.tenant_id, (weights, prompt_digest)):
            return None
        run = run_of_weights(sampler.model_id, sampler.model_path)
        tenant_id = request.tenant_id
        sample = new_sample(request.request_id, tenant_id, request.session_id, sampler.base_model, weights, run)
        return SampleRecord(replace(sample, prompt_digest=prompt_digest), requested)

    def record(self, sample_record: SampleRecord, result: SampleResult) -> list[Effect]:
        """Statements for the transaction that settles the sample."""
        requested, sequences = sample_record.requested, result.sequences
        content = SampleContent(
            prompt=requested.prompt_T[-MAX_PROMPT_TOKENS:].tolist(),
            prompt_cut=max(0, len(requested.prompt_T) - MAX_PROMPT_TOKENS),
            params={
                name: getattr(requested.params, name)
                for name in ("max_tokens", "seed", "temperature", "top_k", "top_p")
            },
            sequences=[_build_stored_sequence(requested.prompt_T, sequence) for sequence in sequences[:MAX_SEQUENCES]],
            images=_build_stored_images(requested),
        )
        sample = replace(
            sample_record.sample,
            prompt_tokens=len(requested.prompt_T),
            sampled_tokens=sum(len(sequence.tokens_T) for sequence in sequences),
            num_sequences=len(sequences),
            prompt_digest=_digest_images(sample_record.sample.prompt_digest, requested),
        )
        return [*keep_sample(sample, content), *self._thin(sample)]

    def _thin(self, sample: StoredSample) -> list[Effect]:
        """Statements that thin the sample's run: for its first sample in a while, and then for every few."""
        allowance = self._allowances.get(sample.tenant_id)
        if allowance is not None:
            unthinned = allowance.unthinned.get(sample.model_id, self._thin_after) + 1
            allowance.unthinned[sample.model_id] = unthinned
            if unthinned < self._thin_after:
                return []
            allowance.unthinned[sample.model_id] = 0
        return thin_samples(sample.tenant_id, sample.model_id, self._limits)

    def _take_allowance(self, tenant_id: str, group: tuple[str | None, str]) -> bool:
        now_s = time.monotonic()
        allowance = self._allowances.setdefault(tenant_id, _Allowance(BURST_OF_SAMPLES, now_s))
        grown = allowance.samples + SAMPLES_PER_S * (now_s - allowance.at)
        allowance.samples, allowance.at = min(BURST_OF_SAMPLES, grown), now_s
        self._allowances.move_to_end(tenant_id)
        while now_s - next(iter(self._allowances.values())).at >= FULL_BURST_AFTER_S:  # their burst is full
            self._allowances.popitem(last=False)
        num_samples = allowance.groups.get(group, 0)
        if num_samples % MAX_GROUP_SAMPLES == 0:
            if allowance.samples < 1:
                return False
            allowance.samples -= 1
        allowance.groups[group] = num_samples + 1
        allowance.groups.move_to_end(group)
        if len(allowance.groups) > MAX_GROUPS:
            allowance.groups.popitem(last=False)
        return True


def _digest_images(digest: str, requested: Sample) -> str:
    """The digest of a prompt's tokens, extended by its images: other images have the same tokens in their place."""
    if not requested.images:
        return digest
    of_images = hashlib.blake2b(digest.encode(), digest_size=16)
    for image in requested.images:
        of_images.update(hashlib.blake2b(image.data, digest_size=16).digest())
    return of_images.hexdigest()


def _build_stored_sequence(prompt_T: I32, sequence: SampledSequence) -> StoredSequence:
    logprobs = np.round(sequence.logprobs_T[:MAX_SEQUENCE_TOKENS].astype(np.float64), 6)
    finite_logprobs: Sequence[float | None] = logprobs.tolist()
    if not np.isfinite(logprobs).all():
        finite_logprobs = [value if math.isfinite(value) else None for value in logprobs.tolist()]
    tokens = sequence.tokens_T[:MAX_SEQUENCE_TOKENS].tolist()
    digest = tokens_digest(prompt_T, sequence.tokens_T)
    return StoredSequence(tokens, finite_logprobs, sequence.stop_reason, digest, len(sequence.tokens_T))


def _build_stored_images(requested: Sample) -> list[StoredImage]:
    cut, room, images = max(0, len(requested.prompt_T) - MAX_PROMPT_TOKENS), MAX_IMAGES_BYTES, list[StoredImage]()
    for image in requested.images:
        if image.start < cut:
            continue
        data = base64.b64encode(image.data).decode() if len(image.data) <= room else ""
        room -= len(image.data) if data else 0
        images.append(StoredImage(image.start - cut, image.num_tokens, image.format, image.width, image.height, data))
    return images


@dataclass(slots=True)
class _RequestTimes:
    request: Pending
    planned_at: float | None = None
    started_at: float | None = None
    step: int | None = None


class RequestTimings:
    def __init__(self, meters: EngineMeters, tracing: Tracing) -> None:
        self._meters = meters
        self._tracing = tracing
        self._times: dict[str, _RequestTimes] = {}
        self._step = 0

    def record_arrival(self, request: Pending) -> None:
        self._times[request.request_id] = _RequestTimes(request)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests belong to another process now."""
        for request_id in request_ids:
            self._times.pop(request_id, None)

    def record_plan(self, requests: Iterable[Pending], planned_at: float) -> None:
        """These requests form one step, whose planning began at `planned_at`."""
        self._step += 1
        for request in requests:
            if times := self._times.get(request.request_id):
                times.planned_at, times.step = planned_at, self._step

    def record_start(self, requests: Iterable[Pending]) -> None:
        """Work on these requests starts, or starts again."""
        started_at = time.time()
        for request in requests:
            if times := self._times.get(request.request_id):
                times.started_at = started_at

    def add_work_times(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """The settlements with the times of their work, which ends now."""
        ran_at = time.time()
        return [
            replace(settlement, work_times=WorkTimes(times.started_at, max(times.started_at, ran_at), times.step))
            if (times := self._times.get(settlement.request_id)) and times.started_at is not None
            else settlement
            for settlement in settlements
        ]

    def record_commit(self, settlements: Sequence[Settlement]) -> None:
        """Called after the commit."""
        settled_at = time.time()
        for settlement in settlements:
            times = self._times.pop(settlement.request_id, None)
            if times is None:
                continue
            error = settlement.error
            outcome = "done" if error is None else "user_error" if error.category == "user" else "server_error"
            self._meters.count_settled(times.request, outcome, settlement.cost)
            if (work_times := settlement.work_times) is not None:
                waited_s = max(0.0, work_times.started_at - times.request.created_at)
                self._meters.observe_times(times.request.kind, waited_s, work_times.ran_at - work_times.started_at)
            request = times.request
            log.debug(
                "settled",
                request_id=request.request_id,
                model_id=request.model_id,
                tenant_id=request.tenant_id,
                kind=request.kind,
                outcome=outcome,
                step=times.step,
            )
            if times.request.traceparent:
                self._send(times, settlement, outcome, settled_at)

    def _send(self, times: _RequestTimes, settlement: Settlement, outcome: str, settled_at: float) -> None:
        request, work_times = times.request, settlement.work_times
        assert request.traceparent is not None
        attributes: dict[str, str | int | float] = {
            "tinsmith.request_id": request.request_id,
            "tinsmith.tenant_id": request.tenant_id,
            "tinsmith.outcome": outcome,
        }
        if request.model_id:
            attributes["tinsmith.model_id"] = request.model_id
        root = self._tracing.record(request.kind, request.traceparent, request.created_at, settled_at, attributes)
        if work_times is None:
            return
        planned_at = times.planned_at if times.planned_at is not None else work_times.started_at
        of_step = {} if work_times.step is None else {"tinsmith.step": work_times.step}
        self._tracing.record("wait", root, request.created_at, planned_at, {})
        if times.planned_at is not None:
            self._tracing.record("plan", root, planned_at, work_times.started_at, of_step)
        self._tracing.record("run", root, work_times.started_at, work_times.ran_at, of_step)
        self._tracing.record("settle", root, work_times.ran_at, settled_at, {})
