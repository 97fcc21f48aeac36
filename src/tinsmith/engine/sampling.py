"""Samples: from their queues into the sampler's continuous batch, and their settlement one by one.

Tenants are admitted in turn, each with a share of the sampler's slots, so that a flood of one tenant's samples does not
delay another's. After a training step the sampler decodes for as long as the engine says; in the pauses of a long step
samples are admitted and decoded, too. Where a decode step of many sequences takes long, tenants with few sequences get
additional steps of their own. A cancelled sample leaves the queue or the batch and is settled as failed, together with
the cancellation.

A session is absent if it was silent for a while: its client may have been killed, or cut off. Its samples make way for
waiting samples of others: they return to the queue, and are admitted again once the session is back or nothing else is
to be sampled. If the client comes back, only the tokens drawn so far are lost.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.backends.device_errors import is_out_of_memory
from tinsmith.cluster.engines import LeaseLostError
from tinsmith.db.statements import Effect
from tinsmith.engine.faults import answer_of
from tinsmith.engine.quarantine import Quarantine
from tinsmith.engine.queues import Queues
from tinsmith.engine.scheduler import take_in_turns
from tinsmith.engine.settling import IterationFailedError, Outbox
from tinsmith.engine.stores import Stores
from tinsmith.engine.telemetry import DECODE, EngineMeters, RequestTimings, SampleRecord, SampleRecorder
from tinsmith.engine.versions import PreparedVersion
from tinsmith.errors import EngineFailedError, TinsmithError, UserError
from tinsmith.runtime.failpoints import hit
from tinsmith.samplers import VersionHolder
from tinsmith.store import recorded_sequences
from tinsmith.store.futures import SampleCost, Settlement, cancel_target, deletion
from tinsmith.store.sampling_sessions import SamplingSession
from tinsmith.types import Partial, Pending, SampleResult, VisionShape
from tinsmith.wire.sampling import read_sample, write_sample_result

MAX_IN_SAMPLER = 256
"""Requests in the sampler at a time; the others wait in their tenants' queues. A tenant below its share can always add
one.
"""

LONG_STEP_S = 0.05
"""Tenants with few sequences get steps of their own only if a full decode step takes longer than this."""

FEW_SEQUENCES_RATIO = 8
"""A tenant has few sequences if the largest tenant has at least this many times as many."""

MIN_STEP_S = 0.01
"""The least time counted for a decode step: a step that could not compute anything takes no time."""

MAX_CANCELLED_AT_ONCE = 500
"""Cancelled samples that are settled in one transaction, which bounds how long other writers wait."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _RunningSample:
    """A request in the sampler: its prompt tokens, the session for which its sequences are recorded, the sample to
    keep, whether it streams, its number of answers, and the name of its weights.
    """

    request: Pending
    prompt_tokens: int = 0
    recorded_for: str | None = None
    record: SampleRecord | None = None
    streams: bool = False
    num_samples: int = 1
    weight_version: str = ""


@dataclass(eq=False)
class Sampling:
    backend: VersionHolder
    stores: Stores
    prepare_version: Callable[[SamplingSession, Pending], PreparedVersion]
    quarantine: Quarantine
    outbox: Outbox
    send_partials: Callable[[Sequence[Partial]], None]
    timings: RequestTimings
    meters: EngineMeters
    vision: VisionShape | None

    def __post_init__(self) -> None:
        self._sample_recorder = SampleRecorder(self.stores.records)
        self._absent: set[str] = set()  # sessions
        self._paused: set[str] = set()  # sessions
        self._looked_up: set[str] = set()  # sessions of which it is known whether they are paused
        self._paused_samples: set[str] = set()  # of them, those in the sampler
        self._running: dict[str, _RunningSample] = {}
        self._max_running = MAX_IN_SAMPLER
        self._returned: list[Pending] = []
        self._last_tenant = ""
        self._full_step_s = 0.0  # the last decode step of all
        self._few_ahead_s = 0.0  # time of steps with few sequences in excess of half the time of full steps
        self.decoded_s = 0.0
        """Total seconds of decoding."""

    @property
    def tenants(self) -> set[str]:
        """The tenants that have a sample in the sampler."""
        return {running.request.tenant_id for running in self._running.values()}

    @property
    def has_work(self) -> bool:
        """Whether samples need the trainer's device."""
        return self.backend.sampler.has_work and not self.backend.sampler.runs_by_itself

    def has_waiting(self, queues: Queues) -> bool:
        """Whether samples wait for their turn; those of paused sessions do not."""
        return bool(self._without_paused(queues.waiting_samples()) if self._paused else queues.samples)

    def run_once(self, queues: Queues, share_s: float | None) -> bool:
        """Cancel and admit, then decode one step, or `share_s` seconds if the trainer is busy. False if idle."""
        queues.return_samples(self._returned)
        self._returned.clear()
        self._cancel(queues)
        self._admit(queues)
        if not self.backend.sampler.has_work:
            return False
        is_independent = self.backend.sampler.runs_by_itself  # training does not delay it
        deadline = time.monotonic() + (0.0 if is_independent else share_s or 0.0)
        self.decode_step()
        while self.backend.sampler.has_work and time.monotonic() < deadline:
            self.decode_step()
        return True

    def admit_loaded(self, queues: Queues) -> None:
        """Admit samples whose weights are in memory, in the middle of a training step."""
        if not self.quarantine:
            self._admit(queues, loads=False)

    def decode_during_step(self, share_s: float) -> None:
        """Decode for `share_s` seconds, at least one step, in the middle of a training step. Raises
        IterationFailedError: errors here are not the training step's fault, and finished samples are not lost.
        """
        deadline = time.monotonic() + share_s
        try:
            self.decode_step()
            while self.has_work and time.monotonic() < deadline:
                self.decode_step()
        except Exception as error:
            raise IterationFailedError(
                f"a decode step during a training step failed: {type(error).__name__}"
            ) from error

    def decode_step(self) -> None:
        """One decode step; settles finished requests as soon as the database permits."""
        if not self.backend.sampler.has_work:
            return
        small_tenants = self._tenants_with_few_sequences()
        started = time.monotonic()
        try:
            with self.quarantine.running(list(self._running)):
                finished = self.backend.sampler.step(small_tenants) if small_tenants else self.backend.sampler.step()
                settlements = [self._settlement(request_id, outcome) for request_id, outcome in finished]
        except Exception as error:  # noqa: BLE001  becomes an answer, or more attempts
            if is_out_of_memory(error):
                self._recover_memory(str(error))
            else:
                self._fail_all(error)
            return
        decoded_s = time.monotonic() - started
        self.decoded_s += decoded_s
        self.meters.observe_work(DECODE, decoded_s)
        if small_tenants:
            self._few_ahead_s += max(decoded_s, MIN_STEP_S)
        else:
            self._full_step_s = decoded_s
            self._few_ahead_s = max(self._few_ahead_s - decoded_s / 2, -decoded_s / 2)
        if finished:
            self._max_running = min(MAX_IN_SAMPLER, 2 * self._max_running)
        if partials := self.backend.sampler.partials():
            self.send_partials(partials)
        if settlements:
            self._finish(settlements)

    def _fail_all(self, error: Exception) -> None:
        """A decode step failed for all: its storage or its remote engine did not answer."""
        for request_id in self._running:
            self.backend.sampler.cancel(request_id)
        self._finish(
            [Settlement(name, error=answer_of(error, running.request)) for name, running in self._running.items()]
        )

    def _recover_memory(self, shortage: str) -> None:
        """The sampler has no memory for a step and cannot reduce it further: all samples return to their queues, and
        half as many are admitted again. A sample that does not fit even alone fails.
        """
        running = len(self._running)
        log.warning("out of memory in a decode step; continuing with fewer samples", running=running, lack=shortage)
        for request_id in self._running:
            self.backend.sampler.cancel(request_id)
        if len(self._running) > 1:
            self._max_running = len(self._running) // 2
            self._returned += [running.request for running in self._running.values()]
            self._running.clear()
            return
        for running in list(self._running.values()):
            error = UserError(
                f"this sample, a prompt of {running.prompt_tokens} tokens, does not fit into the engine's memory, even "
                f"alone: {shortage}; shorten the prompt or lower max_tokens"
            )
            self._finish([Settlement(running.request.request_id, error=error)])

    def update_sessions(self, queues: Queues, absent_after_s: float) -> None:
        """Update which sessions are paused, and which are absent: those give the slots of their samples to others that
        wait. A session is absent after `absent_after_s` of silence; 0 disables this.
        """
        waiting = [request for requests in queues.waiting_samples().values() for request in requests]
        sessions = {running.request.session_id for running in self._running.values()}
        sessions.update(request.session_id for request in waiting)
        self._update_paused(sessions)
        sessions -= self._paused
        waiting = [request for request in waiting if request.session_id not in self._paused]
        if not absent_after_s or len(sessions) < 2:
            self._absent = set()
            return
        self._absent = self.stores.samplers.filter_silent(sorted(sessions), absent_after_s)
        present_sessions = sessions - self._absent
        present_wait = any(request.session_id in present_sessions for request in waiting)
        if self._absent and present_sessions and (present_wait or self.backend.sampler.cache_use().waiting_sequences):
            self._requeue_absent(queues)

    def _update_paused(self, sessions: Collection[str]) -> None:
        self._paused = self.stores.samplers.filter_paused(sorted(sessions)) if sessions else set()
        self._looked_up = set(sessions)
        samples = {name for name, running in self._running.items() if running.request.session_id in self._paused}
        if samples != self._paused_samples:
            self.backend.sampler.pause(samples)
            log.info("sampling is paused" if samples else "sampling goes on", sessions=sorted(self._paused)[:20])
            self._paused_samples = samples

    def _requeue_absent(self, queues: Queues) -> None:
        """Move samples of absent sessions from the sampler back into the queue, except streaming ones."""
        requests = [
            running.request
            for running in self._running.values()
            if running.request.session_id in self._absent and not running.streams
        ]
        for request in requests:
            if self.backend.sampler.cancel(request.request_id):
                del self._running[request.request_id]
                queues.add_sample(request)
        if requests:
            absent = sorted({request.session_id for request in requests})
            log.info("samples of absent sessions make way for others", session_ids=absent[:20], samples=len(requests))

    def _tenants_with_few_sequences(self) -> set[str]:
        """The tenants whose sequences get the next decode step to themselves; empty for a full step."""
        if self._full_step_s <= LONG_STEP_S or self._few_ahead_s > 0 or self.quarantine:
            return set()
        counts: Counter[str] = Counter()
        for running in self._running.values():
            counts[running.request.tenant_id] += running.num_samples
        largest = max(counts.values(), default=0)
        return {tenant_id for tenant_id, count in counts.items() if FEW_SEQUENCES_RATIO * count <= largest}

    def measure(self) -> None:
        """Update the metrics of the sampler's load."""
        self.meters.set_sampler_load(len(self._running), self.backend.sampler.cache_use())

    def _cancel(self, queues: Queues) -> None:
        if not queues.cancels:
            return
        bodies = self.stores.futures.bodies([cancel.request_id for cancel in queues.cancels])
        settlements: list[Settlement] = []
        try:
            while queues.cancels:
                settlements += self._withdraw_cancelled(queues, queues.cancels[0], bodies)
                del queues.cancels[0]
        finally:  # also after a database error: these samples are in no queue any more
            for start in range(0, len(settlements), MAX_CANCELLED_AT_ONCE):
                self._finish(settlements[start : start + MAX_CANCELLED_AT_ONCE])

    def _withdraw_cancelled(self, queues: Queues, cancel: Pending, bodies: Mapping[str, bytes]) -> list[Settlement]:
        """Withdraw what a cancellation names; returns the settlements of the samples and of the cancellation. A
        database error changes nothing.
        """
        name = cancel_target(cancel.request_id)
        reason = UserError(bodies[cancel.request_id].decode())
        running_ids = [
            request_id for request_id in self._running if name in (request_id, request_id.rpartition(":")[0])
        ]
        cancelled_ids = queues.withdraw_samples(cancel.tenant_id, name)
        cancelled_ids += [request_id for request_id in running_ids if self.backend.sampler.cancel(request_id)]
        if not cancelled_ids and self.stores.ownership.forward(cancel.request_id, name):
            queues.request_ids.discard(cancel.request_id)  # its sample was assigned to another process meanwhile
            self.timings.forget([cancel.request_id])
            return []
        settlement = Settlement(cancel.request_id, effects=[deletion(cancel.request_id)])
        return [*(Settlement(request_id, error=reason) for request_id in cancelled_ids), settlement]

    def _admit(self, queues: Queues, *, loads: bool = True) -> None:
        """Move waiting samples into the sampler; without `loads` only those whose weights are in memory."""
        if not queues.samples:
            return
        requests = self._drop_paused(self._choose_next(queues))
        sessions: dict[str, SamplingSession | None] = {}
        if not loads:
            requests = [request for request in requests if self._is_loaded(request, sessions)]
        if not requests:
            return
        bodies = self.stores.futures.bodies([request.request_id for request in requests])
        for request in requests:
            if (body := bodies.get(request.request_id)) is None:
                # Only a settlement deletes the body, and it was not ours: this process was suspended or cut off.
                raise LeaseLostError(f"{request.request_id} was settled by another process")
            self._submit(request, body, sessions)
            queues.take_samples([request])

    def _is_loaded(self, request: Pending, sessions: dict[str, SamplingSession | None]) -> bool:
        sampler = self._find_session(request, sessions)
        return sampler is not None and (sampler.version_id is None or self.backend.has_version(sampler.version_id))

    def _find_session(self, request: Pending, sessions: dict[str, SamplingSession | None]) -> SamplingSession | None:
        """The sampling session of a sample; `sessions` caches those of this iteration."""
        name = request.sampling_session_id or ""
        if name not in sessions:
            sessions[name] = self.stores.samplers.find(name)
        return sessions[name]

    def _choose_next(self, queues: Queues) -> list[Pending]:
        if self.quarantine:
            if any(self.quarantine.batch_size(request_id) for request_id in self._running):
                return []
            waiting = [request for requests in queues.waiting_samples().values() for request in requests]
            if quarantined := [request for request in waiting if self.quarantine.batch_size(request.request_id)]:
                # Suspects run first, while the sampler is empty, so that no other sample fails with them.
                return self.quarantine.groups(quarantined)[0]
        active = [running for name, running in self._running.items() if name not in self._paused_samples]
        occupied = Counter(running.request.tenant_id for running in active)
        waiting = self._without_absent(self._without_paused(queues.waiting_samples()))
        requests, self._last_tenant = take_in_turns(waiting, self._max_running, self._last_tenant, occupied)
        if self._max_running < MAX_IN_SAMPLER:  # after a memory shortage, no tenant exceeds the limit
            return requests[: max(0, self._max_running - len(active))]
        return requests

    def _drop_paused(self, requests: list[Pending]) -> list[Pending]:
        """`requests` without those of sessions that are found paused at their first sample since the last update."""
        new_sessions = {request.session_id for request in requests} - self._looked_up
        if not new_sessions:
            return requests
        self._paused |= self.stores.samplers.filter_paused(sorted(new_sessions))
        self._looked_up |= new_sessions
        return [request for request in requests if request.session_id not in self._paused]

    def _without_paused(self, waiting: dict[str, Collection[Pending]]) -> dict[str, Collection[Pending]]:
        if not self._paused:
            return waiting
        parts = {
            tenant_id: [request for request in requests if request.session_id not in self._paused]
            for tenant_id, requests in waiting.items()
        }
        return {tenant_id: requests for tenant_id, requests in parts.items() if requests}

    def _without_absent(self, waiting: dict[str, Collection[Pending]]) -> dict[str, Collection[Pending]]:
        """`waiting` without the samples of absent sessions, unless there are no others, here or in the sampler."""
        if not self._absent:
            return waiting
        present: dict[str, Collection[Pending]] = {}
        for tenant_id, requests in waiting.items():
            if present_requests := [request for request in requests if request.session_id not in self._absent]:
                present[tenant_id] = present_requests
        if present or any(running.request.session_id not in self._absent for running in self._running.values()):
            return present
        return waiting

    def _submit(self, request: Pending, body: bytes, sessions: dict[str, SamplingSession | None]) -> None:
        """Submit a request to the sampler. `sessions` caches the sampling sessions of this iteration. A database error
        changes nothing.
        """
        self._running[request.request_id] = _RunningSample(request)
        self.timings.record_start([request])
        try:
            if verdict := self.quarantine.verdict(request.request_id):
                raise verdict
            if (sampler := self._find_session(request, sessions)) is None:
                raise EngineFailedError(f"sampling session {request.sampling_session_id!r} is unknown")
            with self.quarantine.running([request.request_id]):
                version = self.prepare_version(sampler, request)
                sample = read_sample(body, request.request_id, version.version_id, self.vision)
                sample = replace(sample, cache_scope=request.tenant_id)
                recorded_for = request.session_id if sample.record_stability_info else None
                record = self._sample_recorder.begin(request, sampler, sample, version.weight_version)
                self._running[request.request_id] = _RunningSample(
                    request,
                    len(sample.prompt_T),
                    recorded_for,
                    record,
                    sample.stream,
                    sample.num_samples,
                    version.weight_version,
                )
                self.backend.sampler.submit(sample)
                hit("sample.admitted")
        except TinsmithError as error:
            self._finish([Settlement(request.request_id, error=error)])
        except SQLAlchemyError:
            del self._running[request.request_id]
            raise
        except Exception as error:  # noqa: BLE001  becomes this request's answer
            self._finish([Settlement(request.request_id, error=answer_of(error, request))])

    def _finish(self, settlements: Sequence[Settlement]) -> None:
        for settlement in settlements:
            self._running.pop(settlement.request_id, None)
        with self.quarantine.blaming([settlement.request_id for settlement in settlements]):
            self.outbox.try_settle(settlements)

    def _settlement(self, request_id: str, outcome: SampleResult | TinsmithError) -> Settlement:
        if not isinstance(outcome, SampleResult):
            return Settlement(request_id, error=outcome)
        running = self._running[request_id]
        lengths = [len(sequence.tokens_T) for sequence in outcome.sequences]
        cost = SampleCost(running.prompt_tokens, outcome.prompt_cache_hit_tokens, sum(lengths))
        effects: list[Effect] = []
        if running.recorded_for is not None:
            effects.append(
                recorded_sequences.insertion(running.recorded_for, request_id, running.prompt_tokens, lengths)
            )
        if running.record is not None:
            effects += self._sample_recorder.record(running.record, outcome)
        result = replace(outcome, weight_version=running.weight_version)
        return Settlement(request_id, write_sample_result(result), "proto", cost=cost, effects=effects)
