"""The Prometheus metrics of a server: the table of all meters, and the server's own counters.

A meter is a Prometheus metric; the word distinguishes it from training metrics. Engines count in memory-mapped files of
prometheus-client below `metrics/` in the data directory. The files outlive the engines: counters continue after a
restart, gauges end with the process. The server reads the files at a scrape, so engines need no port. Counts of
database rows are queried at the scrape.

Labels are bounded: base models, kinds and outcomes are few, and tenants beyond a limit share one label.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.samples import Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER = "other"
"""The shared label of tenants without their own."""

MAX_IGNORED_FIELDS = 200
"""Most labels of ignored fields."""

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = (16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class Meter:
    """One metric: a histogram if it has buckets, a counter if its name ends with _total, otherwise a gauge."""

    name: str
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        return "histogram" if self.buckets else "counter" if self.name.endswith("_total") else "gauge"


_ENGINE = ("base_model",)
_KIND = ("base_model", "kind")
_SEAT = ("base_model", "engine")  # for gauges; counters are summed over the engines
_TABLE = (
    # RowCount from rows at the scrape, the same by every server of a database.
    Meter("tinsmith_queue_requests", "requests that are not settled", _KIND),
    Meter("tinsmith_queue_oldest_seconds", "age of the oldest request that is not settled", _KIND),
    Meter("tinsmith_engine_ready", "1 if the engine or sampler is ready, otherwise 0", _SEAT),
    Meter("tinsmith_models", "models in training, by state creating or ready", ("base_model", "state")),
    Meter(
        "tinsmith_snapshot_lag_operations",
        "most operations of a model that a restart would replay on its newest snapshot",
        _ENGINE,
    ),
    Meter("tinsmith_sessions_open", "active sessions"),
    Meter("tinsmith_batch_jobs", "bulk jobs that have not ended", ("status",)),
    Meter(
        "tinsmith_engine_resident_bytes",
        "resident memory of each engine or sampler process of this server",
        _SEAT,
    ),
    # The server, counted since it started.
    Meter("tinsmith_http_responses_total", "answers, by status", ("status",)),
    Meter(
        "tinsmith_futures_submitted_total",
        "stored requests: accepted, or refused with an error for the client",
        ("kind", "outcome"),
    ),
    Meter("tinsmith_tenant_requests_total", "stored requests, by tenant", ("tenant",)),
    Meter(
        "tinsmith_background_failures_total",
        "errors after which background work was restarted",
        ("task",),
    ),
    Meter("tinsmith_janitor_runs_total", "runs of the janitor's parts: ok or failed", ("part", "outcome")),
    Meter("tinsmith_janitor_seconds_total", "time of the janitor's parts", ("part",)),
    Meter(
        "tinsmith_janitor_last_success_seconds",
        "time of the last successful run of each part of the janitor, since the epoch, on the server that ran it",
        ("part",),
    ),
    Meter(
        "tinsmith_ignored_fields_total",
        "fields of OpenAI's and Anthropic's clients that were ignored, by name; names after the first 200 are 'other'",
        ("field",),
    ),
    Meter("tinsmith_held_polls", "polls that wait for a result"),
    Meter(
        "tinsmith_server_database_seconds",
        "duration of each use of a database connection, including waits for locks",
        buckets=SECONDS,
    ),
    # The engines, counted since their server started.
    Meter(
        "tinsmith_engine_step_seconds",
        "duration of one kind of work in a step: packed passes, merged optim_steps, a single operation, a decode step",
        ("base_model", "work"),
        SECONDS,
    ),
    Meter("tinsmith_engine_step_tokens", "tokens of passes that shared a step", _ENGINE, TOKENS),
    Meter("tinsmith_engine_step_passes", "passes that shared a step", _ENGINE, COUNTS),
    Meter("tinsmith_engine_step_tenants", "tenants whose passes shared a step", _ENGINE, COUNTS),
    Meter(
        "tinsmith_engine_pack_efficiency",
        "share of step_token_budget that the passes of a step filled, for steps after which passes still waited",
        _ENGINE,
        SHARES,
    ),
    Meter(
        "tinsmith_engine_tokens_total",
        "tokens: forward and forward_backward (sent), shared (of these, computed for other data), prompt (computed), "
        "cached (of prompts), sampled",
        _KIND,
    ),
    Meter(
        "tinsmith_engine_tenant_tokens_total",
        "processed tokens by tenant: training, prompt, cached, sampled",
        ("base_model", "tenant", "kind"),
    ),
    Meter(
        "tinsmith_engine_futures_settled_total",
        "settled requests: done, user_error or server_error",
        ("base_model", "kind", "outcome"),
    ),
    Meter("tinsmith_engine_wait_seconds", "from a request's arrival to the beginning of its work", _KIND, SECONDS),
    Meter("tinsmith_engine_run_seconds", "from the beginning of a request's work to its result", _KIND, SECONDS),
    Meter("tinsmith_engine_samples_running", "samples in the sampler", _SEAT),
    Meter(
        "tinsmith_engine_kv_blocks",
        "blocks of the KV cache: live (of running samples), cached (of earlier prompts), limit",
        (*_SEAT, "state"),
    ),
    Meter(
        "tinsmith_engine_uncaptured_steps_total",
        "decode steps without a CUDA graph on a GPU that has graphs, by reason",
        (*_SEAT, "reason"),
    ),
    Meter("tinsmith_engine_kv_use", "live blocks as a share of the limit", _SEAT),
    Meter(
        "tinsmith_engine_memory_bytes",
        "estimated device memory by holder: base, models (in training), versions, sampling, kv_cache, activations "
        "(peak since the last update), and the budget, if set",
        (*_SEAT, "holder"),
    ),
    Meter(
        "tinsmith_engine_database_seconds",
        "duration of each use of a database connection, including waits for locks",
        _ENGINE,
        SECONDS,
    ),
)
METERS: Mapping[str, Meter] = {meter.name: meter for meter in _TABLE}


def counter(name: str, registry: CollectorRegistry) -> Counter:
    meter = METERS[name]
    return Counter(name, meter.meaning, meter.labels, registry=registry)


def gauge(name: str, registry: CollectorRegistry) -> Gauge:
    meter = METERS[name]
    return Gauge(name, meter.meaning, meter.labels, registry=registry, multiprocess_mode="livemostrecent")


def histogram(name: str, registry: CollectorRegistry) -> Histogram:
    meter = METERS[name]
    return Histogram(name, meter.meaning, meter.labels, registry=registry, buckets=meter.buckets)


class TenantLabels:
    """Labels for tenants, or for other names of clients: the first `capacity` have their own, all others share one."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._labels: set[str] = set()

    def __call__(self, tenant_id: str) -> str:
        if tenant_id in self._labels:
            return tenant_id
        if len(self._labels) >= self._capacity or tenant_id == OTHER:
            return OTHER
        self._labels.add(tenant_id)
        return tenant_id


@dataclass(frozen=True, slots=True)
class RowCount:
    """A meter's value, counted from rows."""

    meter: str
    labels: tuple[str, ...]
    value: float


@dataclass(slots=True)
class EngineCounts:
    """What the engines of a base model counted since the start of their server, and the memory that they hold now.

    `seconds` are by kind of work, `tenants` are trained and sampled tokens.
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    trained: float = 0.0
    sampled: float = 0.0
    tenants: dict[str, tuple[float, float]] = field(default_factory=dict)
    memory_bytes: int = 0
    budget_bytes: int = 0


class ServerMeters:
    """The server's own counters, and the text of all metrics. Methods may be called from any thread."""

    def __init__(
        self, directory: Path | None, max_tenants: int, counts: Callable[[], Iterable[RowCount]] = tuple
    ) -> None:
        """`directory` has the files of the engines; None if this process has no engines."""
        prometheus_client.disable_created_metrics()  # they would be a second series for each counter
        self._directory = directory
        self._registry = CollectorRegistry()
        self._tenants = TenantLabels(max_tenants)
        self._responses = counter("tinsmith_http_responses_total", self._registry)
        self._submitted = counter("tinsmith_futures_submitted_total", self._registry)
        self._of_tenant = counter("tinsmith_tenant_requests_total", self._registry)
        self._background = counter("tinsmith_background_failures_total", self._registry)
        self._janitor_runs = counter("tinsmith_janitor_runs_total", self._registry)
        self._janitor_seconds = counter("tinsmith_janitor_seconds_total", self._registry)
        self._janitor_success = gauge("tinsmith_janitor_last_success_seconds", self._registry)
        self._ignored = counter("tinsmith_ignored_fields_total", self._registry)
        self._ignored_labels = TenantLabels(MAX_IGNORED_FIELDS)
        self._held_polls = gauge("tinsmith_held_polls", self._registry)
        self._database = histogram("tinsmith_server_database_seconds", self._registry)
        ProcessCollector(registry=self._registry)
        self._registry.register(_RowCollector(counts))
        if directory is not None:
            MultiProcessCollector(self._registry, str(directory))

    def count_response(self, status: int) -> None:
        self._responses.labels(str(status)).inc()

    def count_request(self, kind: str, tenant_id: str, refused: bool) -> None:
        self._submitted.labels(kind, "refused" if refused else "accepted").inc()
        self._of_tenant.labels(self._tenants(tenant_id)).inc()

    def count_background_failure(self, task: str) -> None:
        self._background.labels(task).inc()

    def observe_janitor(self, part: str, seconds: float, *, failed: bool) -> None:
        self._janitor_runs.labels(part, "failed" if failed else "ok").inc()
        self._janitor_seconds.labels(part).inc(seconds)
        if not failed:
            self._janitor_success.labels(part).set_to_current_time()

    def count_ignored_field(self, name: str) -> None:
        self._ignored.labels(self._ignored_labels(name)).inc()

    def watch_long_polls(self, count: Callable[[], int]) -> None:
        """Set the function that returns the number of held polls."""
        self._held_polls.set_function(count)

    def observe_database(self, seconds: float) -> None:
        self._database.observe(seconds)

    def remove_engine_gauges(self, pid: int) -> None:
        """Remove the gauges of an engine that has ended; its counters remain."""
        if self._directory is not None:
            mark_process_dead(pid, str(self._directory))

    def device_memory(self) -> dict[str, dict[str, int]]:
        """Bytes of device memory by base model and holder, summed over the engines of this data directory."""
        usage: dict[str, dict[str, int]] = {}
        for sample in self._engine_samples(_MEMORY):
            holders = usage.setdefault(sample.labels["base_model"], {})
            holder = sample.labels["holder"]
            holders[holder] = holders.get(holder, 0) + int(sample.value)
        return usage

    def engine_counts(self) -> dict[str, EngineCounts]:
        """The counts of this data directory's engines by base model."""
        counts_by_model: dict[str, EngineCounts] = defaultdict(EngineCounts)
        for sample in self._engine_samples(_STEP_SECONDS, _TOKENS, _TENANT_TOKENS, _MEMORY):
            _count_sample(counts_by_model[sample.labels["base_model"]], sample)
        return counts_by_model

    def work_counts(self) -> dict[str, float]:
        """Counts since the start: stored requests, and tokens that the engines trained and sampled."""
        stored = (sample for metric in self._submitted.collect() for sample in metric.samples)
        counts = {
            "requests": sum(stored_sample.value for stored_sample in stored if stored_sample.name.endswith("_total"))
        }
        counts |= {"trained": 0.0, "sampled": 0.0}
        kinds = dict.fromkeys(_TRAINED, "trained") | {"sampled": "sampled"}
        for sample in self._engine_samples(_TOKENS):
            if name := kinds.get(sample.labels["kind"]):
                counts[name] += sample.value
        return counts

    def _engine_samples(self, *names: str) -> Iterator[Sample]:
        """The samples of these names from the engines of this data directory."""
        if self._directory is None:
            return
        for metric in MultiProcessCollector(CollectorRegistry(), str(self._directory)).collect():
            yield from (sample for sample in metric.samples if sample.name in names)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format. Queries the database."""
        return generate_latest(self._registry)


_STEP_SECONDS = "tinsmith_engine_step_seconds_sum"
_TOKENS = "tinsmith_engine_tokens_total"
_TENANT_TOKENS = "tinsmith_engine_tenant_tokens_total"
_MEMORY = "tinsmith_engine_memory_bytes"
_TRAINED = ("forward", "forward_backward")
"""Kinds of tokens that are trained."""


def _count_sample(counts: EngineCounts, sample: Sample) -> None:
    labels, value = sample.labels, sample.value
    if sample.name == _STEP_SECONDS:
        counts.seconds[labels["work"]] += value
    elif sample.name == _MEMORY:
        if labels["holder"] == "budget":
            counts.budget_bytes += int(value)
        else:
            counts.memory_bytes += int(value)
    elif sample.name == _TOKENS:
        counts.trained += value if labels["kind"] in _TRAINED else 0.0
        counts.sampled += value if labels["kind"] == "sampled" else 0.0
    elif labels["kind"] in ("training", "sampled"):
        trained, sampled = counts.tenants.get(labels["tenant"], (0.0, 0.0))
        is_trained = labels["kind"] == "training"
        counts.tenants[labels["tenant"]] = trained + value * is_trained, sampled + value * (not is_trained)


class _RowCollector:
    """A prometheus-client collector of the counts from rows."""

    def __init__(self, counts: Callable[[], Iterable[RowCount]]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for count in self._counts():
            meter = METERS[count.meter]
            if count.meter not in families:
                families[count.meter] = GaugeMetricFamily(count.meter, meter.meaning, labels=meter.labels)
            families[count.meter].add_metric(count.labels, count.value)
        return families.values()


def metrics_directory(data_dir: Path) -> Path:
    """The directory of the engines' metric files."""
    return data_dir / "metrics"


def reset_metrics_directory(data_dir: Path) -> Path:
    """The directory of the engines' metric files, after deletion of an earlier server's files."""
    directory = metrics_directory(data_dir)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory
