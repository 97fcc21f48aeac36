"""The engine of one base model: plan, run, settle. The one place where durable state meets compute.

One thread, one loop. Each turn reads what arrived, has `scheduler.plan` choose a step, runs it on the backend,
settles all its futures in one transaction, and lets the sampler decode for about as long as the step took. An
error of one request is that request's answer; an exception out of a packed step makes the engine run its requests
one by one, so that only the guilty fail; what ends the process itself is found by its successors (`suspects`). The
engine is the only settler of futures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import orjson
import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.backends import Backend
from tinsmith.checkpoints import Checkpoints
from tinsmith.crashpoints import reach
from tinsmith.custom_losses import CustomLosses
from tinsmith.engine.metering import EngineMeters
from tinsmith.engine.operations import Operations
from tinsmith.engine.passes import PassReader
from tinsmith.engine.prices import Prices
from tinsmith.engine.queues import Lane, Queues
from tinsmith.engine.recording import Recorder, Records
from tinsmith.engine.recovery import Between, Recovery
from tinsmith.engine.sampling import Sampling
from tinsmith.engine.snapshots import Snapshots
from tinsmith.engine.suspects import Suspects
from tinsmith.engine.versions import Versions
from tinsmith.engine.worklog import Worklog
from tinsmith.engines import LeaseLostError
from tinsmith.errors import EngineFailedError, GoneError, LostStateError, TinsmithError, UserError
from tinsmith.futures import REPLAYED_KINDS, Futures, Settlement
from tinsmith.models import Model, Models, log_deletion, unloading
from tinsmith.notify import SAFETY_POLL_S, SERVER, WakeUps, engine_mailbox
from tinsmith.observing.tracing import NoTracing, Tracing
from tinsmith.ops import ModelShape, Partial, PassResult, Pending
from tinsmith.partials import line_of
from tinsmith.records.audit import entry
from tinsmith.sampling_sessions import SamplingSession, SamplingSessions
from tinsmith.scheduler import Fairness, plan
from tinsmith.settings import Settings
from tinsmith.storage import Directories
from tinsmith.wire.training import read_optim_step, write_pass_result

QUIET_S = 0.05
"""An engine without work for this long does what can wait; requests of a training loop follow each other faster."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Nouns:
    """The durable parts that an engine works with."""

    futures: Futures
    models: Models
    samplers: SamplingSessions
    checkpoints: Checkpoints
    versions: Directories
    snapshots: Directories
    custom_losses: CustomLosses
    records: Records | None = None
    tracing: Tracing = field(default_factory=NoTracing)


class Engine:
    def __init__(self, shape: ModelShape, backend: Backend, nouns: Nouns, mailbox: WakeUps, settings: Settings) -> None:
        self._shape = shape
        self._backend = backend
        self._nouns = nouns
        self._mailbox = mailbox
        self._settings = settings
        self._queues = Queues()
        room_bytes = settings.resident_model_bytes or backend.room_bytes
        self._versions = Versions(backend, nouns.samplers, nouns.checkpoints, nouns.versions, room_bytes)
        self._operations = Operations(backend, nouns.checkpoints, self._versions)
        self._passes = PassReader(nouns.custom_losses)
        self._snapshots = Snapshots(
            backend, nouns.models, nouns.snapshots, self._versions, settings.resident_model_bytes
        )
        self._recovery = Recovery(
            backend, nouns.futures, nouns.models, self._operations, nouns.snapshots, self._snapshots, self._passes
        )
        self._suspects = Suspects(settings.resolved_data_dir / f"{engine_mailbox(shape.name)}.running")
        self.meters = EngineMeters(shape.name, settings.step_token_budget, settings.metrics_tenants)
        self._worklog = Worklog(self.meters, nouns.tracing)
        self._sampling = Sampling(
            backend, nouns, self._prepare_version, self._suspects, self._settle, self._tell, self._worklog, self.meters
        )
        self._recorder = Recorder(shape.name, nouns.records)
        self._fairness = Fairness()
        self._prices = Prices()
        self._last_arrival = 0
        self._last_step_s = 0.0
        self._next_check = 0.0

    def run(self, stopping: Callable[[], bool]) -> None:
        """Work until `stopping`; a step that has begun is finished and settled first."""
        self.start()
        try:
            while not stopping():
                self.turn(SAFETY_POLL_S)
        except (SQLAlchemyError, OSError, LeaseLostError):
            self.pardon()
            raise
        self.stop()

    def pardon(self) -> None:
        """From now on no request is to blame for the end of this process; from any thread."""
        self._suspects.pardon()

    def stop(self) -> None:
        """Leave to the next engine what only this one's memory holds."""
        self.pardon()
        self.flush()
        try:
            self._versions.keep_all()
        except Exception as error:  # the next engine makes them again, by a replay
            log.error("ephemeral versions could not be kept", exc_info=error)

    def flush(self) -> None:
        """Wait until the snapshots that were begun are written."""
        self._snapshots.flush()

    def start(self) -> None:
        """Take over from whatever engine came before."""
        self._nouns.checkpoints.recover(self._shape.name)
        self._fetch()
        self._suspects.keep(self._queues.known)

    def turn(self, patience_s: float) -> bool:
        """One step of training and a share of decoding; without either, wait for work. False if there was none."""
        self._snapshots.collect()
        trained = self._training_turn()
        self._snapshots.make_room({lane.model_id for lane in self._queues.lanes.values() if lane.waiting})
        sampled = self._sampling.turn(self._queues, self._last_step_s if trained else None)
        busy = trained or sampled
        if time.monotonic() >= self._next_check:
            # However busy: a neighbour's load must not keep a lost wake-up lost, or a gap open.
            self._next_check = time.monotonic() + SAFETY_POLL_S
            self._fetch_late()
            self._give_up_gaps()
            self._recorder.flush()
            self._sampling.measure()
        if self._mailbox.wait(0.0 if busy else min(patience_s, QUIET_S)) or self._wait_longer(busy, patience_s):
            self._fetch(self._mailbox.drain())
        return busy

    def _wait_longer(self, busy: bool, patience_s: float) -> bool:
        """Nothing came for a moment: do what can wait, then wait for the rest. False if still nothing came."""
        if busy or patience_s <= QUIET_S:
            return False
        while self._tidied():
            if self._mailbox.wait(0.0):
                return True
        return self._mailbox.wait(patience_s - QUIET_S)

    def _tidied(self) -> bool:
        try:
            return self._versions.tidy()
        except OSError as error:  # a full disk: the versions stay where they are, in memory
            log.error("an ephemeral version could not be moved to disk", exc_info=error)
            return False

    # Reading what arrived.

    def _fetch(self, named: Collection[str] = ()) -> None:
        """What came after the last arrival, and what a wake-up names: on Postgres, rows are not committed in order."""
        found = self._nouns.futures.incoming(self._shape.name, self._last_arrival)
        if found:
            reach("engine.fetched")
        late = set(named) - {"", *self._queues.known, *(request.request_id for request in found)}
        for request in [*found, *self._nouns.futures.arrived(sorted(late))]:
            self._last_arrival = max(self._last_arrival, request.arrival)
            self._enqueue(request)

    def _fetch_late(self) -> None:
        """The slow poll: rows whose wake-up was lost, or that were committed out of order."""
        self._fetch()
        missed = self._nouns.futures.pending_ids(self._shape.name) - self._queues.known
        for request in self._nouns.futures.arrived(sorted(missed)):
            self._enqueue(request)
        for lane in self._queues.lanes.values():
            if lane.has_gap:
                for request in self._nouns.futures.refused_of(lane.model_id, lane.next_seq_id):
                    lane.add(request)

    def _enqueue(self, request: Pending) -> None:
        if request.request_id in self._queues.known:
            return
        if request.state == "pending":
            self._queues.known.add(request.request_id)
            self._worklog.arrived(request)
        if request.kind == "sample":
            if request.state == "pending":
                self._queues.add_sample(request)
        elif request.kind == "unload_model":
            self._queues.unloads.append(request)
        elif request.kind == "cancel":
            self._queues.cancels.append(request)
        elif request.model_id is not None:
            self._enqueue_in_lane(request, request.model_id)

    def _enqueue_in_lane(self, request: Pending, model_id: str) -> None:
        lane = self._queues.lanes.get(model_id)
        if lane is None:
            model = self._nouns.models.find(model_id)
            if model is None:
                if request.state == "pending":
                    self._fail([request], UserError(f"model_id {model_id!r} is unknown"))
                return
            if request.state == "pending" and model.state == "unloaded":
                # What was waiting at its end was failed without being applied: a new lane would wait for it.
                self._fail([request], GoneError(f"model {model_id!r} was unloaded: {model.reason}"))
                return
            lane = Lane(model_id, model.tenant_id, model.applied_seq_id + 1)
            self._queues.lanes[model_id] = lane
        if request.state == "pending" and request.seq_id is not None and request.seq_id < lane.next_seq_id:
            late = f"seq_id {request.seq_id} arrived after seq_id {lane.next_seq_id - 1} had taken effect"
            self._fail([request], UserError(late))
            return
        lane.add(request)

    def _give_up_gaps(self) -> None:
        """The SDK stops re-sending a request after some minutes: what waits behind it must not wait for ever."""
        for lane in self._queues.lanes.values():
            if missing := lane.give_up_gap(self._settings.seq_gap_s):
                first, last = missing
                log.warning("gave up waiting for seq_ids", model_id=lane.model_id, first=first, last=last)

    # Training.

    def _training_turn(self) -> bool:
        """Run one planned step; False if there was nothing to do."""
        self._unload()
        planned_at = time.time()
        queues, budget = self._queues.model_queues(), self._settings.step_token_budget
        step, self._fairness = plan(queues, self._fairness, budget, self._prices.in_tokens())
        if not step:
            return False
        reach("engine.planned")
        self._worklog.planned((*step.optim_steps, *step.singles, *step.passes), planned_at)
        started = time.monotonic()
        for group in self._suspects.groups(step.optim_steps):
            self._run_optim_steps(group)
        if step.optim_steps:
            self.meters.worked("optim_steps", time.monotonic() - started)
        for request in step.singles:
            begun = time.monotonic()
            self._run_single(request)
            self._prices.note_single(request.kind, time.monotonic() - begun)
            self.meters.worked(request.kind, time.monotonic() - begun)
        begun = time.monotonic()
        for group in self._suspects.groups(step.passes):
            self._run_passes(group)
        passes_s = time.monotonic() - begun
        self._last_step_s = time.monotonic() - started
        self._snapshots.worked(self._last_step_s)
        self._recorder.ran(step, self._last_step_s)
        self._prices.note_passes(sum(request.num_tokens for request in step.passes), passes_s)
        self.meters.passes(step.passes, passes_s, others_wait=self._queues.passes_wait())
        log.debug(
            "step",
            passes=len(step.passes),
            optim_steps=len(step.optim_steps),
            singles=len(step.singles),
            milliseconds=round(1000 * self._last_step_s, 1),
        )
        return True

    def _unload(self) -> None:
        while self._queues.unloads:
            request = self._queues.unloads.pop(0)
            assert request.model_id is not None
            body = self._nouns.futures.bodies([request.request_id]).get(request.request_id, b"{}")
            reason = str(orjson.loads(body).get("reason") or "the client unloaded it")
            gone = GoneError(f"model {request.model_id!r} was unloaded: {reason}")
            waiting = self._queues.forget_lane(request.model_id)
            self._recorder.forget(request.model_id)
            self._operations.unload(request.model_id)
            reach("model.unloaded")
            if model := self._nouns.models.find(request.model_id):
                self._snapshots.forget(model)
            answer = orjson.dumps({"model_id": request.model_id, "type": "unload_model"})
            settlements = [Settlement(waiter.request_id, error=gone) for waiter in waiting]
            unloaded = {"model_id": request.model_id, "reason": reason}
            effects = [
                unloading(request.model_id, reason),
                log_deletion(request.model_id),
                entry(request.tenant_id, "model_unloaded", unloaded),
            ]
            settlements.append(Settlement(request.request_id, body=answer, effects=effects))
            self._settle(settlements, {})

    def _ready(self, requests: Sequence[Pending]) -> list[tuple[Pending, bytes]]:
        """The requests whose models are (or come back) in memory, with their bodies; the others are settled."""
        bodies = self._nouns.futures.bodies([request.request_id for request in requests])
        ready: list[tuple[Pending, bytes]] = []
        usable: dict[str, TinsmithError | None] = {}
        for request in requests:
            assert request.model_id is not None
            error: TinsmithError | None = self._suspects.verdict(request.request_id)
            if error is None and request.model_id not in usable:
                with self._suspects.running([request.request_id]):
                    usable[request.model_id] = self._bring_back(request.model_id, self._sampling.slice)
            error = error or usable[request.model_id]
            if error is None:
                ready.append((request, bodies[request.request_id]))
            else:
                self._settle_in_lane([(request, Settlement(request.request_id, error=error))])
        return ready

    def _tell(self, partials: Sequence[Partial]) -> None:
        self._mailbox.wake(SERVER, map(line_of, partials))

    def _prepare_version(self, sampler: SamplingSession) -> str | None:
        return self._versions.prepare(sampler, self._bring_back)

    def _bring_back(self, model_id: str, between: Between | None = None) -> TinsmithError | None:
        """Why a model cannot be had in memory; None if it is there."""
        if self._backend.has_model(model_id):
            return None
        model = self._nouns.models.find(model_id)
        if model is None:
            return UserError(f"model_id {model_id!r} is unknown")
        try:
            model.require_usable()
            self._recovery.restore(model, between)
        except TinsmithError as error:
            return error
        except Exception as error:  # one model's unreadable state must not stop the others
            log.error("a model could not be brought back", model_id=model_id, exc_info=error)
            self._backend.unload_model(model_id)
            return LostStateError(f"model {model_id!r} could not be restored: {type(error).__name__}: {error}")
        return None

    def _running(self, ready: Sequence[tuple[Pending, bytes]]) -> AbstractContextManager[None]:
        return self._suspects.running([request.request_id for request, _ in ready])

    def _run_passes(self, requests: Sequence[Pending]) -> None:
        self._worklog.began(requests)
        ready = self._ready(requests)
        if not ready:
            return
        try:
            with self._running(ready):
                passes = [self._passes.read(body, request) for request, body in ready]
                outcomes = self._backend.run_passes(passes, between=self._sampling.slice)
        except Exception as error:  # noqa: BLE001  one bad request must not take the step's others with it
            if len(ready) > 1:
                log.warning("a packed step failed; running its requests one by one", error=repr(error))
                for request, _ in ready:
                    self._run_passes([request])
                return
            outcomes = [_as_error(error, ready[0][0])]
        settled: list[tuple[Pending, Settlement]] = []
        for (request, body), outcome in zip(ready, outcomes, strict=True):
            if isinstance(outcome, PassResult):
                keep = request.kind in REPLAYED_KINDS
                if keep and request.model_id:
                    self._snapshots.count(request.model_id, body_bytes=len(body))
                self._recorder.passed(request, outcome)
                answer = write_pass_result(outcome)
                settlement = Settlement(request.request_id, answer, "proto", keep_body=keep)
            else:
                settlement = Settlement(request.request_id, error=outcome)
            settled.append((request, settlement))
        self._settle_in_lane(settled)

    def _run_optim_steps(self, requests: Sequence[Pending]) -> None:
        self._worklog.began(requests)
        ready = self._ready(requests)
        if not ready:
            return
        try:
            with self._running(ready):
                steps = [read_optim_step(body, request.request_id) for request, body in ready]
                outcomes = self._backend.optim_step(steps)
        except Exception as error:  # noqa: BLE001  one bad request must not take the others with it
            if len(ready) > 1:
                log.warning("a merged optim_step failed; running its requests one by one", error=repr(error))
                for request, _ in ready:
                    self._run_optim_steps([request])
                return
            (request, _) = ready[0]
            # It changed nothing, and will not in a replay either.
            self._settle_in_lane([(request, Settlement(request.request_id, error=_as_error(error, request)))])
            return
        settled: list[tuple[Pending, Settlement]] = []
        for (request, body), step, outcome in zip(ready, steps, outcomes, strict=True):
            assert request.model_id is not None
            self._snapshots.count(request.model_id, steps=1, body_bytes=len(body))
            if isinstance(outcome, TinsmithError):
                # A refused step dropped its gradient: a replay must do the same, so its body stays.
                settled.append((request, Settlement(request.request_id, error=outcome, keep_body=True)))
            else:
                answer = orjson.dumps({"metrics": outcome, "type": "optim_step"})
                effects = self._recorder.stepped(request, step, outcome)
                settled.append((request, Settlement(request.request_id, answer, keep_body=True, effects=effects)))
        self._settle_in_lane(settled)

    def _run_single(self, request: Pending) -> None:
        assert request.model_id is not None
        self._worklog.began([request])
        model = self._nouns.models.find(request.model_id)
        body = self._nouns.futures.bodies([request.request_id])[request.request_id]
        try:
            settlement = self._single_settlement(request, model, body)
        except Exception as error:  # noqa: BLE001  the answer of this request alone
            failure = _as_error(error, request)
            effects = self._operations.failed(request, body, failure)
            settlement = Settlement(request.request_id, error=failure, effects=effects)
        self._settle_in_lane([(request, settlement)])

    def _single_settlement(self, request: Pending, model: Model | None, body: bytes) -> Settlement:
        assert model is not None
        if verdict := self._suspects.verdict(request.request_id):
            raise verdict
        creating = request.kind in ("create_model", "load_model")
        error = None if creating else self._bring_back(model.model_id)
        if error:
            raise error
        with self._running([(request, body)]):
            settlement = self._operations.run(request, model, body)
        assert request.seq_id is not None
        if request.kind == "create_model":
            self._snapshots.entered(model.model_id)
        elif request.kind in ("load_model", "load_weights"):
            clean_up = self._snapshots.loaded(model.model_id, request.seq_id)
            return replace(settlement, keep_body=True, clean_up=clean_up)
        elif settlement.keep_body:
            self._snapshots.count(model.model_id, body_bytes=len(body))
        return settlement

    # Settling.

    def _settle_in_lane(self, settled: Sequence[tuple[Pending, Settlement]]) -> None:
        applied: dict[str, int] = {}
        changed: set[str] = set()
        for request, settlement in settled:
            assert request.model_id is not None and request.seq_id is not None
            applied[request.model_id] = self._queues.lanes[request.model_id].done(request.seq_id)
            if settlement.keep_body:
                changed.add(request.model_id)
        self._settle([settlement for _, settlement in settled], applied)
        for model_id, seq_id in applied.items():
            self._snapshots.applied(model_id, seq_id, changed=model_id in changed)

    def _fail(self, requests: Sequence[Pending], error: TinsmithError) -> None:
        self._settle([Settlement(request.request_id, error=error) for request in requests], {})

    def _settle(self, settlements: Sequence[Settlement], applied: dict[str, int]) -> None:
        reach("engine.ran")
        settlements = self._worklog.timed(settlements)
        self._nouns.futures.settle(settlements, applied)
        reach("settle.committed")
        ids = [settlement.request_id for settlement in settlements]
        self._queues.known.difference_update(ids)
        self._suspects.forget(ids)
        self._mailbox.wake(SERVER, ids)
        self._worklog.settled(settlements)
        for settlement in settlements:
            if settlement.clean_up:
                settlement.clean_up()


def _as_error(error: Exception, request: Pending) -> TinsmithError:
    if isinstance(error, TinsmithError):
        return error
    if isinstance(error, MemoryError):
        size = f" of {request.num_tokens} tokens" if request.num_tokens else ""
        return UserError(f"this {request.kind}{size} does not fit into the engine's memory, even alone: {error}")
    ids = {"request_id": request.request_id, "model_id": request.model_id, "tenant_id": request.tenant_id}
    log.error("a request failed", kind=request.kind, exc_info=error, **ids)
    return EngineFailedError(f"{request.kind} failed in the engine: {type(error).__name__}: {error}")
