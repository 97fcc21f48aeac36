"""The loop of a dedicated sampler: takes the samples assigned to it, caches versions, settles. It does not train.

One thread. A sample waits until its version is in memory. Versions are cached under keys whose weights never change: an
ephemeral version under its id, a checkpoint under its path and its directory when the sample arrived, so that
overwritten weights are never served again. Samples whose version cannot be fetched go back to the engines, which can
recreate every version. Admission, decoding and settling are those of an engine (`sampling`), and so are the fence and
the quarantine. About once a second it reports its versions and does what an operator asked for (`executors.CHANGES`).

`VersionLoader` has the samples that wait for versions. Versions are fetched in the order in which samples began to
wait. A sample uses its version from the moment it is ready until it is removed, and the version stays in memory
meanwhile. While one version has no space because all others are in use, every later sample waits, even if its version
is in memory: otherwise a busy version could keep the others out forever.

`VersionCache` evicts the least recently used versions beyond a budget of bytes, and never one in use. There is always
space for one, of any size. It knows no device and no clock.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from tinsmith.cluster.executors import RESTING, Executors
from tinsmith.cluster.in_flight_journal import journal_path
from tinsmith.db.wakeups import EVERYTHING, SAFETY_POLL_S, SERVER, WakeUps, engine_mailbox
from tinsmith.engine.faults import classify
from tinsmith.engine.quarantine import Quarantine
from tinsmith.engine.queues import Queues
from tinsmith.engine.sampling import Sampling
from tinsmith.engine.settling import DatabaseRetry, Outbox
from tinsmith.engine.stores import Stores
from tinsmith.engine.telemetry import EngineMeters, RequestTimings
from tinsmith.engine.transfer import FetchedVersion, VersionFetcher, VersionRef
from tinsmith.engine.versions import PreparedVersion
from tinsmith.errors import EngineFailedError, TinsmithError, UserError
from tinsmith.runtime.failpoints import hit
from tinsmith.samplers import VersionHolder
from tinsmith.settings import Settings
from tinsmith.store.checkpoints import parse_path
from tinsmith.store.futures import Settlement, cancel_target
from tinsmith.store.sampling_sessions import SamplingSession
from tinsmith.types import ModelShape, Partial, Pending
from tinsmith.wire.token_stream import line_of


class VersionCache:
    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._users: Counter[str] = Counter()
        self._largest_bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes by key, least recently used first."""
        return self._sizes

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def has_room(self, num_coming: int) -> bool:
        """Whether one more version may be fetched beside those in transfer, counting unused versions as free."""
        in_use = sum(size for key, size in self._sizes.items() if self._users[key])
        coming_bytes = num_coming * (self._largest_bytes or max(1, self._budget_bytes // 4))  # a guess, for the first
        return in_use + coming_bytes < self._budget_bytes or (in_use == 0 and num_coming == 0)

    def evict(self, coming_bytes: int) -> list[str]:
        """Evict until `coming_bytes` fit; returns the keys. Versions in use stay, even if it does not fit."""
        evicted_keys: list[str] = []
        excess = self.num_bytes + coming_bytes - self._budget_bytes
        for key, size in list(self._sizes.items()):
            if excess <= 0:
                break
            if not self._users[key]:
                del self._sizes[key]
                excess -= size
                evicted_keys.append(key)
        return evicted_keys

    def add(self, key: str, num_bytes: int) -> None:
        self._sizes[key] = num_bytes
        self._largest_bytes = max(self._largest_bytes, num_bytes)

    def use(self, key: str) -> None:
        """One more request uses this version until it releases it."""
        self._users[key] += 1
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def release(self, key: str) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]


@dataclass(slots=True)
class _AwaitedVersion:
    """A version that is not in memory, the samples that wait for it, and whether it is being fetched."""

    version: VersionRef
    requests: list[Pending]
    is_fetching: bool = False


@dataclass(frozen=True, slots=True)
class FetchFailure:
    """Samples whose version cannot be fetched, and the error."""

    requests: list[Pending]
    error: Exception


class VersionLoader:
    def __init__(
        self,
        fetcher: VersionFetcher,
        budget_bytes: int,
        load: Callable[[str, Path, list[Pending]], None],
        drop: Callable[[str], None],
    ) -> None:
        """`load` loads a version's files into memory for some requests; `drop` drops a version."""
        self._fetcher = fetcher
        self._cache = VersionCache(budget_bytes)
        self._load = load
        self._drop = drop
        self._keys: dict[str, str] = {}  # by sample, until it is removed
        self._using: dict[str, str] = {}  # by ready sample
        self._awaited: OrderedDict[str, _AwaitedVersion] = OrderedDict()

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each version in memory."""
        return self._cache.sizes

    @property
    def is_fetching(self) -> bool:
        return self._fetcher.num_running > 0

    def key_of(self, request_id: str) -> str | None:
        """The key of a sample's version; None for the base model."""
        return self._keys.get(request_id)

    def add(self, request: Pending, version: VersionRef) -> None:
        """Enqueue a sample of a version; `ready` returns it later."""
        self._keys[request.request_id] = version.key
        self._awaited.setdefault(version.key, _AwaitedVersion(version, [])).requests.append(request)

    def ready(self) -> tuple[list[Pending], list[FetchFailure]]:
        """Load fetched versions and fetch missing ones; returns the samples to admit, and those that failed."""
        ready: list[Pending] = []
        failures: list[FetchFailure] = []
        for fetched in self._fetcher.collect():
            error = self._put(fetched)
            if error is None:
                ready += self._use_version(fetched.key)
            else:
                failures.append(FetchFailure(self._awaited.pop(fetched.key).requests, error))
        for key, awaited in list(self._awaited.items()):
            if awaited.is_fetching:
                continue
            if key in self._cache:
                ready += self._use_version(key)
            elif self._cache.has_room(self._fetcher.num_running):
                awaited.is_fetching = True
                self._fetcher.begin(awaited.version)
            else:
                break
        return ready, failures

    def _put(self, fetched: FetchedVersion) -> Exception | None:
        """Load a fetched version into the cache; returns the error if that failed."""
        try:
            if fetched.path is None:
                return fetched.error
            for key in self._cache.evict(fetched.num_bytes):
                self._drop(key)
            self._load(fetched.key, fetched.path, self._awaited[fetched.key].requests)
            self._cache.add(fetched.key, fetched.num_bytes)
            return None
        except Exception as error:  # reported with the samples of this version
            if classify(error).is_fatal:
                raise
            return error
        finally:
            fetched.close()

    def _use_version(self, key: str) -> list[Pending]:
        requests = self._awaited.pop(key).requests
        for request in requests:
            self._cache.use(key)
            self._using[request.request_id] = key
        return requests

    def waiting(self) -> list[Pending]:
        """The samples whose version is not in memory."""
        return [request for awaited in self._awaited.values() for request in awaited.requests]

    def withdraw(self, name: str) -> list[Pending]:
        """Stop waiting for one sample, or for all of one sampling session; their keys stay until `remove`."""
        withdrawn = [sample for sample in self.waiting() if name in (sample.request_id, sample.sampling_session_id)]
        for request in withdrawn:
            self._stop_waiting(request.request_id)
        return withdrawn

    def remove(self, request_ids: Iterable[str]) -> None:
        """These samples were settled, or belong to another process."""
        for request_id in request_ids:
            if request_id in self._keys:
                self._stop_waiting(request_id)
                del self._keys[request_id]
                if (key := self._using.pop(request_id, None)) is not None:
                    self._cache.release(key)

    def _stop_waiting(self, request_id: str) -> None:
        key = self._keys[request_id]
        if (awaited := self._awaited.get(key)) is not None:
            awaited.requests = [request for request in awaited.requests if request.request_id != request_id]
            if not awaited.requests and not awaited.is_fetching:
                del self._awaited[key]


FETCHING_POLL_S = 0.005
"""How often a sampler that waits for versions checks for fetched ones."""

DRAIN_S = 12.0
"""How long a stopping sampler continues samples that have begun."""

_CANNOT_SLEEP = "Tinsmith's own sampler has no sleep mode; drain it, or stop its process"

log = structlog.get_logger()


class SamplerEngine:
    def __init__(
        self,
        seat: tuple[ModelShape, str],
        holder: VersionHolder,
        stores: Stores,
        executors: Executors,
        mailbox: WakeUps,
        fetcher: VersionFetcher,
        settings: Settings,
        budget_bytes: int,
    ) -> None:
        """`seat`: the base model and the engine id of this sampler; `budget_bytes`: memory for versions."""
        shape, self._engine_id = seat
        self._base_model = shape.name
        self._holder = holder
        self._stores = stores
        self._executors = executors
        self._mailbox = mailbox
        self.quarantine = Quarantine(journal_path(settings.resolved_data_dir, self._engine_id))
        self._queues = Queues()
        self._loader = VersionLoader(fetcher, budget_bytes, self._load, holder.drop_version)
        self.meters = EngineMeters(
            self._base_model, self._engine_id, settings.step_token_budget, settings.metrics_tenants
        )
        self._timings = RequestTimings(self.meters, stores.tracing)
        self._database_retry = DatabaseRetry()
        self._outbox = Outbox(stores.futures, self._timings, self._database_retry, self._handle_commit)
        self._sampling = Sampling(
            holder,
            stores,
            self._prepare_version,
            self.quarantine,
            self._outbox,
            self._send_partials,
            self._timings,
            self.meters,
            shape.vision,
        )
        self._failures: list[FetchFailure] = []
        self._absent_after_s = settings.absent_after_s
        self._last_arrival = 0
        self._next_check = 0.0
        self._resting = False
        self._reported: dict[str, object] = {}

    def run(self, stopping: Callable[[], bool]) -> None:
        """Work until `stopping`, then finish running samples within DRAIN_S."""
        self._database_retry.stopping = stopping
        with self.quarantine.clearing():
            self._database_retry.run(self.start)
            while not stopping():
                self._database_retry.run(partial(self.run_once, SAFETY_POLL_S))
            self.drain()
        self.quarantine.clear()

    def flush_settlements(self, stopping: Callable[[], bool]) -> None:
        """Commit what was computed before a fault, until `stopping`. Does not use the device."""
        self._database_retry.stopping = stopping
        self._outbox.flush()

    def start(self) -> None:
        """Take over the samples assigned to the predecessor."""
        self._fetch()
        self.quarantine.keep(self._queues.request_ids)

    def run_once(self, patience_s: float) -> bool:
        """One decode step; without samples to decode, wait for work. False if there was none."""
        self._outbox.flush()
        if self._resting:
            self._reassign_queued()
        self._admit()
        busy = self._sampling.run_once(self._queues, None)
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + SAFETY_POLL_S
            self._stores.ownership.free_expired()
            self._fetch_late()
            self._sampling.update_sessions(self._queues, self._absent_after_s)
            self._sampling.measure()
            self._report()
            self._follow_operator()
        if self._loader.is_fetching:
            patience_s = min(patience_s, FETCHING_POLL_S)
        if self._mailbox.wait(0.0 if busy else patience_s):
            woken_ids = self._mailbox.drain()
            self._next_check = 0.0 if EVERYTHING in woken_ids else self._next_check
            self._fetch(woken_ids)
        return busy

    def drain(self) -> None:
        """Pass on samples that have not begun; finish the others within DRAIN_S."""
        self._reassign_queued()
        deadline = time.monotonic() + DRAIN_S
        while self._holder.sampler.has_work and time.monotonic() < deadline:
            self._sampling.run_once(self._queues, None)
        self._outbox.flush()
        if self._resting and (server := self._holder.sampler.inference_server):
            server.wake_up()  # a running engine elsewhere would sleep on

    def _reassign_queued(self) -> None:
        queued = [request for requests in self._queues.waiting_samples().values() for request in requests]
        self._queues.take_samples(queued)
        self._reassign([*self._loader.waiting(), *queued], to_samplers=True)

    # Operators.

    def _report(self) -> None:
        server = self._holder.sampler.inference_server
        versions = [{"version": key.partition("@")[0], "bytes": size} for key, size in self._loader.sizes.items()]
        report: dict[str, object] = {"engine": "tinsmith", "address": None, "cannot_sleep": _CANNOT_SLEEP}
        if server is not None:
            report = {"engine": server.name, "address": server.address, "cannot_sleep": server.cannot_sleep}
        report["versions"] = versions
        if report != self._reported:
            self._executors.report(self._engine_id, report)
            self._reported = report

    def _follow_operator(self) -> None:
        state = self._executors.state_of(self._engine_id)
        self._resting = state in RESTING
        if (server := self._holder.sampler.inference_server) is None:
            return
        if state == "sleeping":
            self._reassign_queued()
            if not self._holder.sampler.has_work:
                self._change_sleep_state(server.sleep, "sleeping", "asleep")
        elif state == "waking":
            self._change_sleep_state(server.wake_up, "waking", "ready")

    def _change_sleep_state(self, change: Callable[[], None], before: str, after: str) -> None:
        """A server that refuses to sleep or to wake stays as it is, with its reason."""
        reason = None
        try:
            change()
        except TinsmithError as error:
            after, reason = ("ready" if before == "sleeping" else "asleep"), str(error)
            log.warning("the inference server refused", state=before, error=reason)
        self._executors.change_state(self._engine_id, before, after, reason)
        self._resting = after in RESTING

    # Reading what arrived.

    def _fetch(self, woken_ids: Iterable[str] = ()) -> None:
        """Samples assigned after the last arrival, and those named by a wake-up."""
        requests = self._executors.incoming(self._base_model, self._engine_id, self._last_arrival)
        missing_ids = set(woken_ids) - {
            "",
            EVERYTHING,
            *self._queues.request_ids,
            *(request.request_id for request in requests),
        }
        if missing_ids:
            requests += self._executors.fetch_by_ids(self._engine_id, sorted(missing_ids))
        self._enqueue(requests)

    def _fetch_late(self) -> None:
        """The slow poll: samples whose wake-up was lost."""
        self._fetch()
        missing_ids = self._executors.pending_ids(self._base_model, self._engine_id) - self._queues.request_ids
        if missing_ids:
            self._enqueue(self._executors.fetch_by_ids(self._engine_id, sorted(missing_ids)))

    def _enqueue(self, requests: Sequence[Pending]) -> None:
        if requests:
            hit("engine.fetched")
        versions: dict[str, VersionRef | None] = {}
        for request in requests:
            self._last_arrival = max(self._last_arrival, request.arrival)
            if request.request_id in self._queues.request_ids:
                continue
            if request.kind != "cancel":
                self._enqueue_sample(request, versions)
                continue
            self._register(request)
            self._queues.cancels.append(request)

    def _register(self, request: Pending) -> None:
        self._queues.request_ids.add(request.request_id)
        self._timings.record_arrival(request)

    def _enqueue_sample(self, request: Pending, versions: dict[str, VersionRef | None]) -> None:
        """`versions` caches the versions of this poll's sampling sessions. A database error changes nothing, and the
        slow poll finds the request again.
        """
        name = request.sampling_session_id or ""
        try:
            if name not in versions:
                versions[name] = self._current_version(name)
        except TinsmithError as error:  # for example, the checkpoint is gone
            self._register(request)
            self._outbox.settle([Settlement(request.request_id, error=error)])
            return
        version = versions[name]
        if version is not None and version.sampler.is_inflight:
            # Its weights change under one name; only their engine knows the current ones.
            self._reassign([request], to_samplers=False)
            return
        self._register(request)
        if version is None:
            self._queues.add_sample(request)
        else:
            self._loader.add(request, version)

    def _current_version(self, sampling_session_id: str) -> VersionRef | None:
        """The current version of a sampling session; None is the base model."""
        sampler = self._stores.samplers.find(sampling_session_id)
        if sampler is None:
            raise EngineFailedError(f"sampling session {sampling_session_id!r} is unknown")
        if sampler.version_id is None:
            return None
        if sampler.model_path is None:
            return VersionRef(sampler.version_id, sampler)
        checkpoint = self._stores.checkpoints.get(sampler.tenant_id, parse_path(sampler.model_path))
        return VersionRef(f"{sampler.model_path}@{checkpoint.directory}", sampler, checkpoint)

    # Versions.

    def _admit(self) -> None:
        for cancel in self._queues.cancels:
            # Move them to the queue, from which cancellations withdraw samples.
            for request in self._loader.withdraw(cancel_target(cancel.request_id)):
                self._queues.add_sample(request)
        ready, failures = self._loader.ready()
        for request in ready:
            self._queues.add_sample(request)
        self._failures += failures
        while self._failures:
            failure = self._failures[0]
            ids = [request.request_id for request in failure.requests]
            if isinstance(failure.error, UserError):
                self._outbox.settle([Settlement(request_id, error=failure.error) for request_id in ids])
            else:
                log.warning("a version cannot be fetched; its samples go to the engines", error=repr(failure.error))
                self._reassign(failure.requests, to_samplers=False)
            del self._failures[0]

    def _load(self, key: str, directory: Path, requests: Sequence[Pending]) -> None:
        with self.quarantine.running([request.request_id for request in requests]):
            self._holder.load_version(key, directory)

    def _prepare_version(self, sampler: SamplingSession, request: Pending) -> PreparedVersion:
        return PreparedVersion(self._loader.key_of(request.request_id), sampler.weight_version)

    def _reassign(self, requests: Sequence[Pending], *, to_samplers: bool) -> None:
        if not requests:
            return
        ids = [request.request_id for request in requests]
        self._executors.reassign(self._base_model, self._engine_id, ids, to_samplers=to_samplers)
        self._loader.remove(ids)
        self._queues.request_ids.difference_update(ids)
        self._timings.forget(ids)
        self._mailbox.wake(engine_mailbox(self._base_model), ids)

    # Telling.

    def _send_partials(self, partials: Sequence[Partial]) -> None:
        self._mailbox.stream(SERVER, map(line_of, partials))

    def _handle_commit(self, settlements: Sequence[Settlement]) -> None:
        """Forget settled samples and wake their callers; called after the commit."""
        ids = [settlement.request_id for settlement in settlements]
        self._queues.request_ids.difference_update(ids)
        self.quarantine.forget(ids)
        self._loader.remove(ids)
        self._mailbox.wake(SERVER, ids)
        self._timings.record_commit(settlements)
