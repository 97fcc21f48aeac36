"""The loop of a dedicated sampler: takes the samples that were given to it, holds versions, settles. Trains nothing.

One thread. A sample waits until its version is in memory (`stock`). Versions are called by keys under which nothing
ever changes: an ephemeral version by its id, a checkpoint by its path and the directory that it was in when the sample
arrived, so that what is overwritten is never served again. What cannot be had from here is left to the engines, which
can make every version again. Admission, decoding and settling are those of an engine (`sampling`), and so are the fence
and the suspects.

The stock of a dedicated sampler: which versions it has, which are on their way, and which samples wait for those.

A sample whose version is not here waits; versions are sent for in the order in which samples began to wait for them.
From the moment that it is ready to the moment that it is removed it uses its version, which stays so long (`shelf`). As
long as one version finds no room, because all of it is in use, whoever comes later waits behind it, even for a version
that is here: otherwise a busy one could keep the others out for ever. Called from the sampler's thread.

What a sampler keeps of versions: least recently used first out beyond a budget of bytes, and never one in use.

Versions are called by keys. There is always room for one, whatever its size. Pure: knows no device and no clock.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.cluster.engines import LeaseLostError
from tinsmith.cluster.executors import Executors
from tinsmith.cluster.in_flight_journal import note_path
from tinsmith.db.wakeups import EVERYTHING, SAFETY_POLL_S, SERVER, WakeUps, engine_mailbox
from tinsmith.engine.quarantine import Suspects
from tinsmith.engine.queues import Queues
from tinsmith.engine.sampling import Sampling
from tinsmith.engine.settling import Outbox, Patience, TurnFailedError
from tinsmith.engine.stores import Stores
from tinsmith.engine.telemetry import EngineMeters, Worklog
from tinsmith.engine.transfer import Fetched, Fetcher, Wanted
from tinsmith.errors import EngineFailedError, TinsmithError, UserError
from tinsmith.runtime.failpoints import hit
from tinsmith.samplers import VersionHolder
from tinsmith.settings import Settings
from tinsmith.store.checkpoints import parse_path
from tinsmith.store.futures import Settlement, cancelled_name
from tinsmith.store.sampling_sessions import SamplingSession
from tinsmith.types import Partial, Pending
from tinsmith.wire.token_stream import line_of


class Shelf:
    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._users: Counter[str] = Counter()
        self._largest_bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def has_room(self, num_coming: int) -> bool:
        """Whether one more may be sent for while some are on their way: what is not in use would go."""
        in_use = sum(size for key, size in self._sizes.items() if self._users[key])
        coming = num_coming * (self._largest_bytes or max(1, self._budget_bytes // 4))  # a guess, for the first
        return in_use + coming < self._budget_bytes or (in_use == 0 and num_coming == 0)

    def evict(self, coming_bytes: int) -> list[str]:
        """Take off what has to go so that this much fits; returns the keys. What is in use stays, whatever fits."""
        gone: list[str] = []
        excess = self.num_bytes + coming_bytes - self._budget_bytes
        for key, size in list(self._sizes.items()):
            if excess <= 0:
                break
            if not self._users[key]:
                del self._sizes[key]
                excess -= size
                gone.append(key)
        return gone

    def add(self, key: str, num_bytes: int) -> None:
        self._sizes[key] = num_bytes
        self._largest_bytes = max(self._largest_bytes, num_bytes)

    def use(self, key: str) -> None:
        """One more request needs this version until it is released."""
        self._users[key] += 1
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def release(self, key: str) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]


@dataclass(slots=True)
class _Awaited:
    wanted: Wanted
    requests: list[Pending]
    coming: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """Samples whose version cannot be had here, and why."""

    requests: list[Pending]
    error: Exception


class Stock:
    def __init__(
        self,
        fetcher: Fetcher,
        budget_bytes: int,
        load: Callable[[str, Path, list[Pending]], None],
        drop: Callable[[str], None],
    ) -> None:
        """`load` puts a version's files into memory, for some requests; `drop` forgets a version."""
        self._fetcher = fetcher
        self._shelf = Shelf(budget_bytes)
        self._load = load
        self._drop = drop
        self._keys: dict[str, str] = {}  # of every sample that was added and not removed
        self._using: dict[str, str] = {}  # of those that are ready
        self._awaited: OrderedDict[str, _Awaited] = OrderedDict()

    @property
    def is_fetching(self) -> bool:
        return self._fetcher.num_running > 0

    def key_of(self, request_id: str) -> str | None:
        """Under which key the weights of a sample are in memory; None for the base model's own."""
        return self._keys.get(request_id)

    def add(self, request: Pending, wanted: Wanted) -> None:
        """A sample of a version; it comes out of `ready` sooner or later."""
        self._keys[request.request_id] = wanted.key
        self._awaited.setdefault(wanted.key, _Awaited(wanted, [])).requests.append(request)

    def ready(self) -> tuple[list[Pending], list[Failure]]:
        """Load what has come, send for what is missing; the samples that can be admitted, and those that never can."""
        ready: list[Pending] = []
        failures: list[Failure] = []
        for fetched in self._fetcher.collect():
            error = self._put(fetched)
            if error is None:
                ready += self._take(fetched.key)
            else:
                failures.append(Failure(self._awaited.pop(fetched.key).requests, error))
        for key, awaited in list(self._awaited.items()):
            if awaited.coming:
                continue
            if key in self._shelf:
                ready += self._take(key)
            elif self._shelf.has_room(self._fetcher.num_running):
                awaited.coming = True
                self._fetcher.begin(awaited.wanted)
            else:
                break
        return ready, failures

    def _put(self, fetched: Fetched) -> Exception | None:
        """On the shelf; or why that is impossible."""
        try:
            if fetched.path is None:
                return fetched.error
            for key in self._shelf.evict(fetched.num_bytes):
                self._drop(key)
            self._load(fetched.key, fetched.path, self._awaited[fetched.key].requests)
            self._shelf.add(fetched.key, fetched.num_bytes)
            return None
        except Exception as error:  # noqa: BLE001  told to whoever asked for the version
            return error
        finally:
            fetched.close()

    def _take(self, key: str) -> list[Pending]:
        requests = self._awaited.pop(key).requests
        for request in requests:
            self._shelf.use(key)
            self._using[request.request_id] = key
        return requests

    def waiting(self) -> list[Pending]:
        """The samples whose version is not here."""
        return [request for awaited in self._awaited.values() for request in awaited.requests]

    def withdraw(self, name: str) -> list[Pending]:
        """Let go of one waiting sample, or of all of one sampling session, which stay until they are removed."""
        found = [one for one in self.waiting() if name in (one.request_id, one.sampling_session_id)]
        for request in found:
            self._leave(request.request_id)
        return found

    def remove(self, request_ids: Iterable[str]) -> None:
        """These are settled, or another's."""
        for request_id in request_ids:
            if request_id in self._keys:
                self._leave(request_id)
                del self._keys[request_id]
                if (key := self._using.pop(request_id, None)) is not None:
                    self._shelf.release(key)

    def _leave(self, request_id: str) -> None:
        key = self._keys[request_id]
        if (awaited := self._awaited.get(key)) is not None:
            awaited.requests = [one for one in awaited.requests if one.request_id != request_id]
            if not awaited.requests and not awaited.coming:
                del self._awaited[key]


FETCHING_POLL_S = 0.005
"""How often a sampler that waits for versions looks whether one has come."""

DRAIN_S = 12.0
"""How long a sampler that was told to stop goes on with what it has begun."""

log = structlog.get_logger()


class SamplerEngine:
    def __init__(
        self,
        seat: tuple[str, str],
        holder: VersionHolder,
        nouns: Stores,
        executors: Executors,
        mailbox: WakeUps,
        fetcher: Fetcher,
        settings: Settings,
        budget_bytes: int,
    ) -> None:
        """`seat` is the base model and the name of this sampler's seat; `budget_bytes` is for versions."""
        self._base_model, self._engine_id = seat
        self._holder = holder
        self._nouns = nouns
        self._executors = executors
        self._mailbox = mailbox
        self._suspects = Suspects(note_path(settings.resolved_data_dir, self._engine_id))
        self._queues = Queues()
        self._stock = Stock(fetcher, budget_bytes, self._load, holder.drop_version)
        self.meters = EngineMeters(
            self._base_model, self._engine_id, settings.step_token_budget, settings.metrics_tenants
        )
        self._worklog = Worklog(self.meters, nouns.tracing)
        self._patience = Patience()
        self._outbox = Outbox(nouns.futures, self._worklog, self._patience, self._settled)
        self._sampling = Sampling(
            holder, nouns, self._key_of, self._suspects, self._outbox, self._tell, self._worklog, self.meters
        )
        self._failures: list[Failure] = []
        self._absent_after_s = settings.absent_after_s
        self._last_arrival = 0
        self._next_check = 0.0

    def run(self, stopping: Callable[[], bool]) -> None:
        """Work until `stopping`, then finish what was begun, as far as that is soon done."""
        self._patience.stopping = stopping
        try:
            self._patience.insist(self.start)
            while not stopping():
                self._patience.insist(partial(self.turn, SAFETY_POLL_S))
            self.drain()
        except (SQLAlchemyError, OSError, LeaseLostError, TurnFailedError):
            self.pardon()
            raise
        self.pardon()

    def pardon(self) -> None:
        """From now on no request is to blame for the end of this process; from any thread."""
        self._suspects.pardon()

    def start(self) -> None:
        """Take up what was given to whoever sat here before."""
        self._fetch()
        self._suspects.keep(self._queues.known)

    def turn(self, patience_s: float) -> bool:
        """One decode step, or, without anything to decode, wait for work. False if there was none."""
        self._outbox.flush()
        self._admit()
        busy = self._sampling.turn(self._queues, None)
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + SAFETY_POLL_S
            self._nouns.ownership.free_lapsed()
            self._fetch_late()
            self._sampling.look_for_absent(self._queues, self._absent_after_s)
            self._sampling.measure()
        if self._stock.is_fetching:
            patience_s = min(patience_s, FETCHING_POLL_S)
        if self._mailbox.wait(0.0 if busy else patience_s):
            self._fetch(self._mailbox.drain())
        return busy

    def drain(self) -> None:
        """Hand on what has not begun; finish the rest, if it takes no longer than DRAIN_S."""
        queued = [request for requests in self._queues.waiting_samples().values() for request in requests]
        self._queues.take_samples(queued)
        self._hand_on([*self._stock.waiting(), *queued], to_samplers=True)
        deadline = time.monotonic() + DRAIN_S
        while self._holder.sampler.has_work and time.monotonic() < deadline:
            self._sampling.turn(self._queues, None)
        self._outbox.flush()

    # Reading what arrived.

    def _fetch(self, named: Iterable[str] = ()) -> None:
        """What was given to us after the last arrival, and what a wake-up names: that may have been another's."""
        found = self._executors.incoming(self._base_model, self._engine_id, self._last_arrival)
        late = set(named) - {"", EVERYTHING, *self._queues.known, *(request.request_id for request in found)}
        if late:
            found += self._executors.named(self._engine_id, sorted(late))
        self._enqueue(found)

    def _fetch_late(self) -> None:
        """The slow poll: what wake-ups did not tell."""
        self._fetch()
        missed = self._executors.given_ids(self._base_model, self._engine_id) - self._queues.known
        if missed:
            self._enqueue(self._executors.named(self._engine_id, sorted(missed)))

    def _enqueue(self, requests: Sequence[Pending]) -> None:
        if requests:
            hit("engine.fetched")
        seen: dict[str, Wanted | None] = {}
        for request in requests:
            self._last_arrival = max(self._last_arrival, request.arrival)
            if request.request_id in self._queues.known:
                continue
            if request.kind != "cancel":
                self._enqueue_sample(request, seen)
                continue
            self._note(request)
            self._queues.cancels.append(request)

    def _note(self, request: Pending) -> None:
        self._queues.known.add(request.request_id)
        self._worklog.arrived(request)

    def _enqueue_sample(self, request: Pending, seen: dict[str, Wanted | None]) -> None:
        """`seen` are the sampling sessions that were looked up for requests of the same look. An error of the database
        changes nothing, and the slow poll finds the request again.
        """
        name = request.sampling_session_id or ""
        try:
            if name not in seen:
                seen[name] = self._wanted(name)
        except TinsmithError as error:  # the checkpoint is gone, for one
            self._note(request)
            self._outbox.settle([Settlement(request.request_id, error=error)])
            return
        wanted = seen[name]
        if wanted is not None and wanted.sampler.is_inflight:
            # Its weights change under their name; only their engine knows which count.
            self._hand_on([request], to_samplers=False)
            return
        self._note(request)
        if wanted is None:
            self._queues.add_sample(request)
        else:
            self._stock.add(request, wanted)

    def _wanted(self, sampling_session_id: str) -> Wanted | None:
        """The version of a sampling session as it is now; None is the base model."""
        sampler = self._nouns.samplers.find(sampling_session_id)
        if sampler is None:
            raise EngineFailedError(f"sampling session {sampling_session_id!r} is unknown")
        if sampler.version_id is None:
            return None
        if sampler.model_path is None:
            return Wanted(sampler.version_id, sampler)
        checkpoint = self._nouns.checkpoints.get(sampler.tenant_id, parse_path(sampler.model_path))
        return Wanted(f"{sampler.model_path}@{checkpoint.directory}", sampler, checkpoint)

    # Versions.

    def _admit(self) -> None:
        for cancel in self._queues.cancels:
            # Where the other samples wait they can be withdrawn.
            for request in self._stock.withdraw(cancelled_name(cancel.request_id)):
                self._queues.add_sample(request)
        ready, failures = self._stock.ready()
        for request in ready:
            self._queues.add_sample(request)
        self._failures += failures
        while self._failures:
            failure = self._failures[0]
            ids = [request.request_id for request in failure.requests]
            if isinstance(failure.error, UserError):
                self._outbox.settle([Settlement(request_id, error=failure.error) for request_id in ids])
            else:
                log.warning("a version cannot be had here; its samples go to the engines", error=repr(failure.error))
                self._hand_on(failure.requests, to_samplers=False)
            del self._failures[0]

    def _load(self, key: str, directory: Path, requests: Sequence[Pending]) -> None:
        with self._suspects.running([request.request_id for request in requests]):
            self._holder.load_version(key, directory)

    def _key_of(self, _sampler: SamplingSession, request: Pending) -> str | None:
        return self._stock.key_of(request.request_id)

    def _hand_on(self, requests: Sequence[Pending], *, to_samplers: bool) -> None:
        if not requests:
            return
        ids = [request.request_id for request in requests]
        self._executors.hand_on(self._base_model, self._engine_id, ids, to_samplers=to_samplers)
        self._stock.remove(ids)
        self._queues.known.difference_update(ids)
        self._worklog.forget(ids)
        self._mailbox.wake(engine_mailbox(self._base_model), ids)

    # Telling.

    def _tell(self, partials: Sequence[Partial]) -> None:
        self._mailbox.wake(SERVER, map(line_of, partials))

    def _settled(self, settlements: Sequence[Settlement]) -> None:
        """They are committed."""
        ids = [settlement.request_id for settlement in settlements]
        self._queues.known.difference_update(ids)
        self._suspects.forget(ids)
        self._stock.remove(ids)
        self._mailbox.wake(SERVER, ids)
        self._worklog.settled(settlements)
