"""The engine of one base model: plan, run, settle. The only module in which durable state meets compute.

One thread, one loop. Each iteration reads what arrived, lets `scheduler.plan` choose a step, runs it on the backend,
settles all its futures in one transaction, and lets the sampler decode for about as long as the step took; `pacing`
bounds both while several tenants have work. An error of one request is that request's answer. After an error that is
an answer (`faults`) in a packed step the engine runs its requests one by one, so that only the one at fault fails. Any
other exception ends the process, and `quarantine` finds requests that do so. Only the engine settles futures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import orjson
import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.backends import Backend, run_to_end
from tinsmith.cluster.in_flight_journal import journal_path
from tinsmith.db.wakeups import EVERYTHING, SAFETY_POLL_S, SERVER, WakeUps, engine_mailbox
from tinsmith.engine.faults import answer_of, classify
from tinsmith.engine.operations import POLL_S, Operations, Upload, Uploads
from tinsmith.engine.pacing import CostModel, StepPacer
from tinsmith.engine.passes import PassReader
from tinsmith.engine.profiling import build_operator_profiles
from tinsmith.engine.quarantine import Quarantine
from tinsmith.engine.queues import Arrivals, BatchingWindow, Queues
from tinsmith.engine.sampling import Sampling
from tinsmith.engine.scheduler import Fairness, ModelQueue, Step, plan
from tinsmith.engine.settling import DatabaseRetry, IterationFailedError, Outbox
from tinsmith.engine.snapshots import RETRY_S, Recovery, RunMigration, Snapshots
from tinsmith.engine.stores import Stores
from tinsmith.engine.telemetry import EngineMeters, Recorder, RequestTimings
from tinsmith.engine.versions import PreparedVersion, Versions
from tinsmith.errors import GoneError, LostStateError, TinsmithError, UserError
from tinsmith.runtime import malloc
from tinsmith.runtime.failpoints import hit
from tinsmith.settings import Settings
from tinsmith.settings.groups import DEGREES
from tinsmith.storage.stores import UnreachableError
from tinsmith.store.audit import entry
from tinsmith.store.futures import REPLAYED_KINDS, Settlement
from tinsmith.store.models import Model, log_deletion, unload_statement
from tinsmith.store.sampling_sessions import SamplingSession
from tinsmith.types import ModelShape, Partial, Pass, PassResult, Pending
from tinsmith.wire.token_stream import line_of
from tinsmith.wire.training import read_optim_step, write_pass_result

QUIET_S = 0.05
"""An engine that is idle for this long does deferrable work; a training loop sends its requests faster."""

TRIM_AFTER_S = 60.0
"""An engine that is idle for this long returns freed memory to the system, which costs its next step page faults."""

log = structlog.get_logger()


class Engine:
    def __init__(
        self, shape: ModelShape, backend: Backend, stores: Stores, mailbox: WakeUps, settings: Settings
    ) -> None:
        self._shape = shape
        self._backend = backend
        self._stores = stores
        self._mailbox = mailbox
        self._settings = settings
        self._queues = Queues()
        budget_bytes = settings.resident_model_bytes or backend.model_budget_bytes
        self._versions = Versions(
            backend, stores.samplers, stores.checkpoints, stores.versions, budget_bytes, stores.transfer
        )
        self._operations = Operations(
            backend, stores.checkpoints, self._versions, {name: getattr(settings, name) or 1 for name in DEGREES}
        )
        self._passes = PassReader(stores.custom_losses, shape.vision)
        self._recorder = Recorder(shape.name, stores.records)
        self._snapshots = Snapshots(
            backend, stores.models, stores.snapshots, self._versions, self._recorder, settings.resident_model_bytes
        )
        self._recovery = Recovery(
            backend, stores.futures, stores.models, self._operations, stores.snapshots, self._snapshots, self._passes
        )
        self.quarantine = Quarantine(journal_path(settings.resolved_data_dir, stores.ownership.engine_id))
        self.meters = EngineMeters(
            shape.name, stores.ownership.engine_id, settings.step_token_budget, settings.metrics_tenants
        )
        self._timings = RequestTimings(self.meters, stores.tracing)
        self._database_retry = DatabaseRetry()
        self._outbox = Outbox(stores.futures, self._timings, self._database_retry, self._handle_commit)
        self._sampling = Sampling(
            backend,
            stores,
            self._prepare_version,
            self.quarantine,
            self._outbox,
            self._send_partials,
            self._timings,
            self.meters,
            shape.vision,
        )
        self._fairness = Fairness()
        self._costs = CostModel()
        self._pacer = StepPacer(settings.step_seconds)
        self._batching_window = BatchingWindow()
        self._hold_s = 0.0
        self._arrivals = Arrivals(
            stores.ownership, stores.futures, stores.models, self._queues, self.quarantine, self._timings, self._fail
        )
        self._uploads = Uploads()
        self._migration = RunMigration(
            stores.ownership, self._queues, self._snapshots, self._recorder, self._operations, mailbox
        )
        self._profiles = build_operator_profiles(
            stores.profiles, backend, shape.name, stores.ownership.engine_id, settings.resolved_data_dir
        )
        self._decode_share_s = self._next_check = 0.0
        self._trim_at = math.inf
        self._part_began = 0.0
        self._writes_at_once = False

    def run(self, stopping: Callable[[], bool]) -> None:
        """Work until `stopping`; finishes and settles a step that has begun.

        An iteration that the database interrupts starts again: until a request is settled, it stays in its queue.
        """
        self._database_retry.stopping = stopping
        with self.quarantine.clearing():
            self._database_retry.run(self.start)
            while not stopping():
                self._database_retry.run(partial(self.run_once, SAFETY_POLL_S))
        self.stop()

    def flush_settlements(self, stopping: Callable[[], bool]) -> None:
        """Commit what was computed before a fault, until `stopping`. Does not use the device."""
        self._database_retry.stopping = stopping
        self._outbox.flush()

    def stop(self) -> None:
        """Write state that only this engine's memory holds, for the next engine."""
        self.quarantine.clear()
        self.flush()
        self._snapshots.snapshot_all()
        try:
            self._versions.write_all()
        except Exception as error:  # the next engine recreates them by a replay
            log.error("ephemeral versions could not be written", exc_info=error)

    def flush(self) -> None:
        """Wait for running uploads, settlements and snapshots."""
        self._uploads.wait()
        self._settle_uploads()
        self._outbox.flush()
        self._snapshots.flush()

    def start(self) -> None:
        """Take over from the previous engine of this base model."""
        self._stores.checkpoints.recover(self._shape.name, self._stores.ownership.engine_id)
        self._arrivals.fetch_late()
        self.quarantine.keep(self._queues.request_ids)

    def run_once(self, patience_s: float) -> bool:
        """One training step and a share of decoding; without either, wait for work. False if there was no work."""
        self._outbox.flush()
        self._snapshots.collect()
        if self._uploads:
            self._settle_uploads()
            patience_s = min(patience_s, POLL_S)
        trained = self._run_training_step()
        self._snapshots.evict({lane.model_id for lane in self._queues.lanes.values() if lane.waiting})
        sampled = self._sampling.run_once(self._queues, self._decode_share_s if trained else None)
        busy = trained or sampled
        if self._hold_s:
            patience_s = min(patience_s, self._hold_s, QUIET_S)  # longer holds only occur where work takes long
        if time.monotonic() >= self._next_check:
            # Also when busy: one tenant's load must not hide a lost wake-up or another tenant's gap.
            self._next_check = time.monotonic() + SAFETY_POLL_S
            self._slow_poll()
            self._skip_gaps()
            self._recorder.flush()
            self._sampling.update_sessions(self._queues, self._settings.absent_after_s)
            self._sampling.measure()
            self.meters.set_memory_use(self._backend.memory_use())
        self._trim_when_idle(busy)
        if self._mailbox.wait(0.0 if busy else min(patience_s, QUIET_S)) or self._wait_longer(busy, patience_s):
            self._arrivals.fetch(self._mailbox.drain())
        return busy

    def _trim_when_idle(self, busy: bool) -> None:
        """Freed blocks are kept for the next step (`settings.MALLOC_TUNABLES`); an engine without work returns them,
        once.
        """
        if busy:
            self._trim_at = time.monotonic() + TRIM_AFTER_S
        elif time.monotonic() >= self._trim_at:
            self._trim_at = math.inf
            malloc.trim()

    def _slow_poll(self) -> None:
        if self._arrivals.fetch_late():
            self._mailbox.wake(engine_mailbox(self._shape.name), [EVERYTHING])
        self._writes_at_once = self._versions.poll_samplers()
        self._migration.poll()
        if self._profiles is not None:
            self._profiles.poll()

    def _wait_longer(self, busy: bool, patience_s: float) -> bool:
        """Nothing arrived for a moment: do deferrable work, then wait. False if still nothing arrived."""
        if busy or patience_s <= QUIET_S:
            return False
        while self._offload_one_version():
            if self._mailbox.wait(0.0):
                return True
        return self._mailbox.wait(patience_s - QUIET_S)

    def _offload_one_version(self) -> bool:
        try:
            return self._versions.offload_one()
        except OSError as error:  # a full disk: the versions stay in memory
            log.error("an ephemeral version could not be moved to disk", exc_info=error)
            return False

    def _skip_gaps(self) -> None:
        """Skip seq_ids that are missing for long: the SDK stops re-sending a request after some minutes."""
        for lane in self._queues.lanes.values():
            if missing := lane.skip_gap(self._settings.seq_gap_s):
                first, last = missing
                log.warning("stopped waiting for seq_ids", model_id=lane.model_id, first=first, last=last)
        self._queues.forget_idle_lanes()

    # Training.

    def _run_training_step(self) -> bool:
        """Run one planned step; False if there was nothing to run."""
        self._unload()
        planned_at = time.time()
        queues = self._queues.model_queues()
        budget = self._step_tokens(queues)
        step, fairness = plan(queues, self._fairness, budget, self._costs.in_tokens())
        if self._should_hold(step, budget):
            step = Step(step.optim_steps)  # these delay no pass
        else:
            self._fairness = fairness
        if not step:
            return False
        hit("engine.planned")
        self._timings.record_plan((*step.optim_steps, *step.singles, *step.passes), planned_at)
        started, decoded_s = time.monotonic(), self._sampling.decoded_s
        self._run_all_optim_steps(step.optim_steps)
        for request in step.singles:
            work_started = time.monotonic()
            self._run_single(request)
            self._costs.record_single(request.kind, time.monotonic() - work_started)
            self.meters.observe_work(request.kind, time.monotonic() - work_started)
        work_started, decoded_before_s = time.monotonic(), self._sampling.decoded_s
        for group in self.quarantine.groups(step.passes):
            self._run_passes(group)
        passes_s = time.monotonic() - work_started - (self._sampling.decoded_s - decoded_before_s)
        if step.passes:
            self._batching_window.record_passes(passes_s)
            step = self._run_steps_after(step, planned_at)
        step_s, decoded_s = time.monotonic() - started, self._sampling.decoded_s - decoded_s
        self._decode_share_s = self._pacer.decode_s(step_s - decoded_s, decoded_s)
        self._snapshots.add_training_time(step_s)
        self._recorder.record_duration(step, step_s)
        self._costs.record_passes(sum(request.cost_tokens for request in step.passes), passes_s)
        self.meters.observe_passes(step.passes, passes_s, others_wait=self._queues.passes_wait())
        log.debug(
            "step",
            passes=len(step.passes),
            optim_steps=len(step.optim_steps),
            singles=len(step.singles),
            milliseconds=round(1000 * step_s, 1),
        )
        return True

    def _run_all_optim_steps(self, requests: Sequence[Pending]) -> None:
        started = time.monotonic()
        for group in self.quarantine.groups(requests):
            self._run_optim_steps(group)
        if requests:
            self.meters.observe_work("optim_steps", time.monotonic() - started)

    def _run_steps_after(self, step: Step, planned_at: float) -> Step:
        """Run the optimizer steps that waited for the passes of this step; returns the step with them."""
        if not (requests := self._queues.steps_after(step.passes)):
            return step
        self._timings.record_plan(requests, planned_at)
        self._run_all_optim_steps(requests)
        return replace(step, optim_steps=(*step.optim_steps, *requests))

    def _step_tokens(self, queues: Sequence[ModelQueue]) -> int:
        """The most tokens of the next step."""
        tenants = {queue.tenant_id for queue in queues} | self._queues.samples.keys() | self._sampling.tenants
        self._pacer.record_tenants(tenants, time.monotonic())
        samples = self._sampling.has_work or self._sampling.has_waiting(self._queues)
        return self._pacer.step_tokens(self._settings.step_token_budget, self._costs.token_s(), samples=samples)

    def _decode_between_parts(self) -> None:
        """At a pause of a step: admit samples that have arrived, and decode all."""
        trained_s = time.monotonic() - self._part_began
        try:
            if self._mailbox.wait(0.0):
                self._arrivals.fetch(self._mailbox.drain())
                self._pacer.record_tenants(self._queues.samples.keys(), time.monotonic())
            self._sampling.admit_loaded(self._queues)
        except SQLAlchemyError as error:  # the step continues; the next iteration polls everything
            log.warning("new requests could not be read during a step", error=repr(error))
            self._next_check = 0.0
        except Exception as error:
            raise IterationFailedError(f"new requests could not be queued in a step: {type(error).__name__}") from error
        self._sampling.decode_during_step(self._pacer.decode_between_s(trained_s))
        self._part_began = time.monotonic()

    def _should_hold(self, step: Step, budget: int) -> bool:
        """Whether the passes of this step wait for others; sets `_hold_s`."""
        self._hold_s = 0.0
        tokens = sum(request.cost_tokens for request in step.passes)
        if step.passes and not step.singles and not self.quarantine and 2 * tokens <= budget:
            window = self._batching_window
            self._hold_s = window.wait_s(*self._queues.passes_due(step.passes, window.late_s()), time.monotonic())
        return self._hold_s > 0.0

    def _unload(self) -> None:
        while self._queues.unloads:
            # Read everything first: after a database error the request is still queued.
            request = self._queues.unloads[0]
            assert request.model_id is not None
            body = self._stores.futures.bodies([request.request_id]).get(request.request_id, b"{}")
            model = self._stores.models.find(request.model_id)
            del self._queues.unloads[0]
            reason = str(orjson.loads(body).get("reason") or "the client unloaded it")
            unloaded_error = GoneError(f"model {request.model_id!r} was unloaded: {reason}")
            waiting = self._queues.forget_lane(request.model_id)
            self._recorder.forget(request.model_id)
            self._operations.unload(request.model_id)
            hit("model.unloaded")
            if model is not None:
                self._snapshots.forget(model)
            answer = orjson.dumps({"model_id": request.model_id, "type": "unload_model", "status": "unloaded"})
            settlements = [Settlement(waiter.request_id, error=unloaded_error) for waiter in waiting]
            details = {"model_id": request.model_id, "reason": reason}
            effects = [
                unload_statement(request.model_id, reason),
                log_deletion(request.model_id),
                entry(request.tenant_id, "model_unloaded", details),
            ]
            settlements.append(Settlement(request.request_id, body=answer, effects=effects))
            self._outbox.settle(settlements)

    def _select_runnable(self, requests: Sequence[Pending]) -> list[tuple[Pending, bytes]]:
        """The requests whose models are in memory or can be restored, with their bodies; settles the others."""
        bodies = self._stores.futures.bodies([request.request_id for request in requests])
        ready: list[tuple[Pending, bytes]] = []
        usable: dict[str, TinsmithError | None] = {}
        later: set[str] = set()
        for request in requests:
            assert request.model_id is not None
            if request.model_id in later:
                continue
            error: TinsmithError | None = self.quarantine.verdict(request.request_id)
            if error is None and request.model_id not in usable:
                try:
                    with self.quarantine.running([request.request_id]):
                        usable[request.model_id] = self._restore_model(request.model_id, interleave=True)
                except UnreachableError as unreachable:
                    self._retry_later(request, unreachable)
                    later.add(request.model_id)
                    continue
            error = error or usable[request.model_id]
            if error is None:
                ready.append((request, bodies[request.request_id]))
            else:
                self._settle_in_lane([(request, Settlement(request.request_id, error=error))])
        return ready

    def _send_partials(self, partials: Sequence[Partial]) -> None:
        self._mailbox.stream(SERVER, map(line_of, partials))

    def _prepare_version(self, sampler: SamplingSession, _request: Pending) -> PreparedVersion:
        return self._versions.prepare(sampler, self._restore_model)

    def _restore_model(self, model_id: str, *, interleave: bool = False) -> TinsmithError | None:
        """Load a model; returns the reason if that fails, otherwise None. With `interleave`, samples are decoded
        meanwhile. Raises UnreachableError and SQLAlchemyError, after which another attempt may succeed, and faults.
        """
        if self._backend.has_model(model_id):
            return None
        if reason := self.quarantine.unrestorable(model_id):
            return LostStateError(f"model {model_id!r} could not be restored: {reason}")
        model = self._stores.models.find(model_id)
        if model is None:
            return UserError(f"model_id {model_id!r} is unknown")
        try:
            model.require_usable()
            self._part_began = time.monotonic()
            with self.quarantine.restoring(model_id):
                run_to_end(self._recovery.restore(model), self._decode_between_parts if interleave else None)
        except TinsmithError as error:
            return error
        except (UnreachableError, SQLAlchemyError):
            raise
        except Exception as error:  # one model's unreadable state must not stop the others
            if classify(error).is_fatal:
                raise
            log.error("a model could not be restored", model_id=model_id, exc_info=error)
            self._backend.unload_model(model_id)
            return LostStateError(f"model {model_id!r} could not be restored: {type(error).__name__}: {error}")
        return None

    def _running(self, ready: Sequence[tuple[Pending, bytes]]) -> AbstractContextManager[None]:
        return self.quarantine.running([request.request_id for request, _ in ready])

    def _run_passes(self, requests: Sequence[Pending]) -> None:
        self._timings.record_start(requests)
        ready = self._select_runnable(requests)
        if not ready:
            return
        passes: list[Pass] = []
        try:
            with self._running(ready):
                passes = [self._passes.read(body, request) for request, body in ready]
                self._part_began = time.monotonic()
                outcomes = run_to_end(self._backend.run_passes(passes), self._decode_between_parts)
        except SQLAlchemyError:  # reading a custom loss failed: nothing was computed, and the next iteration retries
            raise
        except Exception as error:  # noqa: BLE001  one bad request must not fail the step's others
            if len(ready) > 1:
                log.warning("a packed step failed; running its requests one by one", error=repr(error))
                for request, _ in ready:
                    self._run_passes([request])
                return
            outcomes = [answer_of(error, ready[0][0])]
        settlements: list[tuple[Pending, Settlement]] = []
        for index, ((request, body), outcome) in enumerate(zip(ready, outcomes, strict=True)):
            if isinstance(outcome, PassResult):
                keep = request.kind in REPLAYED_KINDS
                if keep and request.model_id:
                    self._snapshots.add_replay_work(request.model_id, body_bytes=len(body))
                self._recorder.record_pass(request, passes[index], outcome)
                self.meters.count_shared(request, outcome)
                answer = write_pass_result(outcome)
                settlement = Settlement(request.request_id, answer, "proto", keep_body=keep)
            else:
                settlement = Settlement(request.request_id, error=outcome)
            settlements.append((request, settlement))
        self._settle_in_lane(settlements)

    def _run_optim_steps(self, requests: Sequence[Pending]) -> None:
        self._timings.record_start(requests)
        ready = self._select_runnable(requests)
        if not ready:
            return
        try:
            with self._running(ready):
                steps = [read_optim_step(body, request.request_id) for request, body in ready]
                outcomes = self._backend.optim_step(steps)
        except Exception as error:  # noqa: BLE001  one bad request must not fail the others
            if len(ready) > 1:
                log.warning("a merged optim_step failed; running its requests one by one", error=repr(error))
                for request, _ in ready:
                    self._run_optim_steps([request])
                return
            (request, _) = ready[0]
            # It changed nothing, and will change nothing in a replay.
            self._settle_in_lane([(request, Settlement(request.request_id, error=answer_of(error, request)))])
            return
        settlements: list[tuple[Pending, Settlement]] = []
        for (request, body), step, outcome in zip(ready, steps, outcomes, strict=True):
            assert request.model_id is not None
            self._snapshots.add_replay_work(request.model_id, steps=1, body_bytes=len(body))
            if isinstance(outcome, TinsmithError):
                # A refused step dropped its gradient: a replay must do the same, so keep its body.
                settlements.append((request, Settlement(request.request_id, error=outcome, keep_body=True)))
            else:
                answer = orjson.dumps({"metrics": outcome, "type": "optim_step"})
                effects = self._recorder.record_step(request, step, outcome)
                settlements.append((request, Settlement(request.request_id, answer, keep_body=True, effects=effects)))
        self._settle_in_lane(settlements)

    def _run_single(self, request: Pending) -> None:
        assert request.model_id is not None
        self._timings.record_start([request])
        model = self._stores.models.find(request.model_id)
        body = self._stores.futures.bodies([request.request_id])[request.request_id]
        try:
            settlement = self._single_settlement(request, model, body)
        except UnreachableError as error:
            self._retry_later(request, error)
            return
        except SQLAlchemyError:  # the request stays in its lane
            raise
        except Exception as error:  # noqa: BLE001  becomes this request's answer
            failure = answer_of(error, request)
            effects = self._operations.failure_effects(request, body, failure)
            settlement = Settlement(request.request_id, error=failure, effects=effects)
        if isinstance(settlement, Upload):
            self._queues.lanes[request.model_id].held_until = math.inf
            self._uploads.begin(request, body, settlement)
            return
        self._settle_in_lane([(request, settlement)])

    def _settle_uploads(self) -> None:
        """Settle the requests whose uploads have ended."""
        for upload in self._uploads.take_finished():
            request = upload.request
            if request.request_id not in self._queues.request_ids:
                continue  # its model was unloaded meanwhile; the unreferenced files are swept
            try:
                with self.quarantine.blaming([request.request_id]):
                    settlement = upload.settlement()
            except Exception as error:  # noqa: BLE001  becomes this request's answer
                failure = answer_of(error, request)
                effects = self._operations.failure_effects(request, upload.body, failure)
                settlement = Settlement(request.request_id, error=failure, effects=effects)
            assert request.model_id is not None
            self._queues.lanes[request.model_id].held_until = 0.0
            self._settle_in_lane([(request, settlement)])

    def _retry_later(self, request: Pending, error: UnreachableError) -> None:
        """The request's files are unreachable: hold its model's lane and retry later."""
        assert request.model_id is not None
        log.error("a model waits for its files", model_id=request.model_id, error=str(error))
        self._queues.lanes[request.model_id].held_until = time.monotonic() + RETRY_S

    def _single_settlement(self, request: Pending, model: Model | None, body: bytes) -> Settlement | Upload:
        assert model is not None
        if verdict := self.quarantine.verdict(request.request_id):
            raise verdict
        creating = request.kind in ("create_model", "load_model")
        with self._running([(request, body)]):
            if not creating and (error := self._restore_model(model.model_id)):
                raise error
            settlement = self._operations.run(request, model, body)
        if isinstance(settlement, Upload):
            return settlement
        assert request.seq_id is not None
        if request.kind == "create_model":
            self._snapshots.add_model(model.model_id)
        elif request.kind in ("load_model", "load_weights"):
            self._recorder.drop_passes(model.model_id)
            loaded = self._snapshots.save_loaded(model.model_id, request.seq_id)

            def build_settlement(directory: str, _size_bytes: int) -> Settlement:
                return replace(settlement, keep_body=True, clean_up=loaded.clean_up(directory))

            return (
                Upload(loaded.run, build_settlement) if self._snapshots.is_remote else build_settlement(*loaded.run())
            )
        elif settlement.keep_body:
            self._snapshots.add_replay_work(model.model_id, body_bytes=len(body))
            if self._writes_at_once:
                return replace(settlement, clean_up=partial(self._snapshots.write_versions, model.model_id))
        return settlement

    # Settling.

    def _settle_in_lane(self, settlements: Sequence[tuple[Pending, Settlement]]) -> None:
        applied: dict[str, int] = {}
        changed: set[str] = set()
        for request, settlement in settlements:
            assert request.model_id is not None and request.seq_id is not None
            applied[request.model_id] = self._queues.lanes[request.model_id].mark_applied(request.seq_id)
            if settlement.keep_body:
                changed.add(request.model_id)
        with self.quarantine.blaming([request.request_id for request, _ in settlements]):
            self._outbox.settle([settlement for _, settlement in settlements], applied)
        for model_id, seq_id in applied.items():
            self._snapshots.note_settled(model_id, seq_id, changed=model_id in changed)

    def _fail(self, requests: Sequence[Pending], error: TinsmithError) -> None:
        self._outbox.settle([Settlement(request.request_id, error=error) for request in requests])

    def _handle_commit(self, settlements: Sequence[Settlement]) -> None:
        """Forget settled requests and wake their callers; called after the commit."""
        ids = [settlement.request_id for settlement in settlements]
        self._queues.request_ids.difference_update(ids)
        self.quarantine.forget(ids)
        self._mailbox.wake(SERVER, ids)
        self._timings.record_commit(settlements)
