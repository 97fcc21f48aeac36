"""Samples: from their queue into the sampler's continuous batch, and out of it one by one.

Tenants are admitted in turn, and each has a share of the sampler's places, so that a flood of one tenant's samples does
not delay another's. After a training step the sampler decodes for as long as the engine says; in the pauses of a long
step `between` admits and decodes, too. Where a decode step of many sequences takes long, tenants with few of them have
steps of their own in between. A cancelled sample leaves the queue or the batch and is settled as failed, together with
the request to cancel it.

A session without a sign of life for a while is absent: its client may have been killed, or cut off. Its samples make
way for those of others that wait: they go back into the queue, and are admitted again once the session is back or
nothing else is to be sampled. If the client comes back, nothing is lost but the tokens drawn so far.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.cluster.engines import LeaseLostError
from tinsmith.db.statements import Effect
from tinsmith.engine.quarantine import Quarantine
from tinsmith.engine.queues import Queues
from tinsmith.engine.scheduler import take_in_turns
from tinsmith.engine.settling import Outbox, TurnFailedError
from tinsmith.engine.stores import Stores
from tinsmith.engine.telemetry import DECODE, BegunSample, EngineMeters, RequestTimings, SampleKeeper
from tinsmith.errors import EngineFailedError, TinsmithError, UserError
from tinsmith.runtime.failpoints import hit
from tinsmith.samplers import VersionHolder
from tinsmith.store import recorded_sequences
from tinsmith.store.futures import SampleCost, Settlement, cancelled_name, deletion
from tinsmith.store.sampling_sessions import SamplingSession
from tinsmith.types import Partial, Pending, SampleResult, VisionShape
from tinsmith.wire.sampling import read_sample, write_sample_result

MAX_IN_SAMPLER = 256
"""Requests handed to the sampler at a time; the others wait in their tenants' queues. A tenant with less than its share
of them gets one in any case.
"""

LONG_STEP_S = 0.05
"""A tenant with few sequences waits for the whole batch if a decode step takes no longer than this."""

FEW = 8
"""A tenant has few sequences if the largest tenant has at least this many times as many of them."""

LEAST_STEP_S = 0.01
"""The least time that a decode step counts for: one that could not compute anything takes no time."""

MOST_AT_ONCE = 500
"""Cancelled samples that are settled in one transaction, so that other writers wait for a short time only."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Inside:
    """A request in the sampler: the tokens of its prompt, the session that its sequences are recorded for, the sample
    to keep, whether its tokens are streamed, and how many answers it has.
    """

    request: Pending
    prompt_tokens: int = 0
    recorded_for: str | None = None
    begun: BegunSample | None = None
    streams: bool = False
    num_samples: int = 1


class Sampling:
    def __init__(  # noqa: PLR0913 - the parts of its engine
        self,
        backend: VersionHolder,
        stores: Stores,
        prepare_version: Callable[[SamplingSession, Pending], str | None],
        quarantine: Quarantine,
        outbox: Outbox,
        tell: Callable[[Sequence[Partial]], None],
        timings: RequestTimings,
        meters: EngineMeters,
        vision: VisionShape | None,
    ) -> None:
        self._backend = backend
        self._stores = stores
        self._prepare_version = prepare_version
        self._quarantine = quarantine
        self._outbox = outbox
        self._tell = tell
        self._timings = timings
        self._meters = meters
        self._vision = vision
        self._keeper = SampleKeeper(stores.records)
        self._absent: set[str] = set()  # sessions
        self._inside: dict[str, _Inside] = {}
        self._most_inside = MAX_IN_SAMPLER
        self._returned: list[Pending] = []
        self._last_tenant = ""
        self._whole_step_s = 0.0  # the last decode step of all
        self._few_ahead_s = 0.0  # time of steps with few sequences beyond half of that of whole steps
        self.decoded_s = 0.0
        """Seconds that decoding has taken so far."""

    @property
    def tenants(self) -> set[str]:
        """The tenants that have a sample in the sampler."""
        return {inside.request.tenant_id for inside in self._inside.values()}

    @property
    def has_work(self) -> bool:
        """Whether the trainer's device is needed for samples."""
        return self._backend.sampler.has_work and not self._backend.sampler.runs_by_itself

    def turn(self, queues: Queues, share_s: float | None) -> bool:
        """Cancel and admit, then decode one step, or for `share_s` seconds beside a busy trainer. False if idle."""
        queues.return_samples(self._returned)
        self._returned.clear()
        self._cancel(queues)
        self._admit(queues)
        if not self._backend.sampler.has_work:
            return False
        alone = self._backend.sampler.runs_by_itself  # training does not delay it
        deadline = time.monotonic() + (0.0 if alone else share_s or 0.0)
        self.slice()
        while self._backend.sampler.has_work and time.monotonic() < deadline:
            self.slice()
        return True

    def admit_at_hand(self, queues: Queues) -> None:
        """Admit samples whose weights are in memory, in the middle of a training step."""
        if not self._quarantine:
            self._admit(queues, loads=False)

    def between(self, share_s: float) -> None:
        """Decode for `share_s` seconds in the middle of a training step, one step at least. Raises TurnFailedError: the
        training step is not to blame for what goes wrong here, and nothing of what was finished here is lost.
        """
        deadline = time.monotonic() + share_s
        try:
            self.slice()
            while self.has_work and time.monotonic() < deadline:
                self.slice()
        except Exception as error:
            raise TurnFailedError(f"a decode step beside a training step failed: {type(error).__name__}") from error

    def slice(self) -> None:
        """One decode step; finished requests are settled as soon as the database permits it."""
        if not self._backend.sampler.has_work:
            return
        few = self._tenants_with_few()
        started = time.monotonic()
        try:
            with self._quarantine.running(list(self._inside)):
                finished = self._backend.sampler.step(few) if few else self._backend.sampler.step()
        except MemoryError as error:
            self._shed(str(error))
            return
        except Exception as error:  # the sampler's state is unknown: fail what is in it, go on
            log.error("a decode step failed", exc_info=error)
            failure = EngineFailedError(f"sampling failed in the engine: {type(error).__name__}: {error}")
            for request_id in self._inside:
                self._backend.sampler.cancel(request_id)
            self._finish([Settlement(request_id, error=failure) for request_id in self._inside])
            return
        decoded_s = time.monotonic() - started
        self.decoded_s += decoded_s
        self._meters.worked(DECODE, decoded_s)
        if few:
            self._few_ahead_s += max(decoded_s, LEAST_STEP_S)
        else:
            self._whole_step_s = decoded_s
            self._few_ahead_s = max(self._few_ahead_s - decoded_s / 2, -decoded_s / 2)
        if finished:
            self._most_inside = min(MAX_IN_SAMPLER, 2 * self._most_inside)
        if partials := self._backend.sampler.partials():
            self._tell(partials)
        settlements = [self._settlement(request_id, outcome) for request_id, outcome in finished]
        if settlements:
            self._finish(settlements)

    def _shed(self, lack: str) -> None:
        """The sampler has no memory for a step and cannot do with less by itself: all go back to their queues, and
        half as many are handed to it again. A sample for which there is no memory even alone fails.
        """
        log.warning("there is no memory for a decode step; fewer samples go on", inside=len(self._inside), lack=lack)
        for request_id in self._inside:
            self._backend.sampler.cancel(request_id)
        if len(self._inside) > 1:
            self._most_inside = len(self._inside) // 2
            self._returned += [inside.request for inside in self._inside.values()]
            self._inside.clear()
            return
        for inside in list(self._inside.values()):
            error = UserError(
                f"this sample, a prompt of {inside.prompt_tokens} tokens, does not fit into the engine's memory, even "
                f"alone: {lack}; shorten the prompt or lower max_tokens"
            )
            self._finish([Settlement(inside.request.request_id, error=error)])

    def look_for_absent(self, queues: Queues, absent_after_s: float) -> None:
        """Find out which sessions are absent, and give the places of their samples to others that wait. A session is
        absent after so many seconds without a sign of life; never if it is 0.
        """
        waiting = [request for requests in queues.waiting_samples().values() for request in requests]
        sessions = {inside.request.session_id for inside in self._inside.values()}
        sessions.update(request.session_id for request in waiting)
        if not absent_after_s or len(sessions) < 2:
            self._absent = set()
            return
        self._absent = self._stores.samplers.silent_among(sorted(sessions), absent_after_s)
        others = sessions - self._absent
        others_wait = any(request.session_id in others for request in waiting)
        if self._absent and others and (others_wait or self._backend.sampler.cache_use().waiting_sequences):
            self._put_back(queues)

    def _put_back(self, queues: Queues) -> None:
        """Move samples of absent sessions from the sampler back into the queue, unless their tokens are streamed."""
        gone = [
            inside.request
            for inside in self._inside.values()
            if inside.request.session_id in self._absent and not inside.streams
        ]
        for request in gone:
            if self._backend.sampler.cancel(request.request_id):
                del self._inside[request.request_id]
                queues.add_sample(request)
        if gone:
            absent = sorted({request.session_id for request in gone})
            log.info("samples of absent sessions make way for others", session_ids=absent[:20], samples=len(gone))

    def _tenants_with_few(self) -> set[str]:
        """The tenants whose sequences alone are in the next decode step; empty if all are."""
        if self._whole_step_s <= LONG_STEP_S or self._few_ahead_s > 0 or self._quarantine:
            return set()
        counts: Counter[str] = Counter()
        for inside in self._inside.values():
            counts[inside.request.tenant_id] += inside.num_samples
        largest = max(counts.values(), default=0)
        return {tenant_id for tenant_id, count in counts.items() if FEW * count <= largest}

    def measure(self) -> None:
        """Update the meters of the sampler's load."""
        self._meters.sampler(len(self._inside), self._backend.sampler.cache_use())

    def _cancel(self, queues: Queues) -> None:
        if not queues.cancels:
            return
        bodies = self._stores.futures.bodies([cancel.request_id for cancel in queues.cancels])
        settlements: list[Settlement] = []
        try:
            while queues.cancels:
                settlements += self._cancelled(queues, queues.cancels[0], bodies)
                del queues.cancels[0]
        finally:  # also if the database interrupts the loop: these samples are in no queue any more
            for start in range(0, len(settlements), MOST_AT_ONCE):
                self._finish(settlements[start : start + MOST_AT_ONCE])

    def _cancelled(self, queues: Queues, cancel: Pending, bodies: Mapping[str, bytes]) -> list[Settlement]:
        """Withdraw what a request to cancel names; the settlements of that and of the request itself. An error of the
        database changes nothing.
        """
        name = cancelled_name(cancel.request_id)
        reason = UserError(bodies[cancel.request_id].decode())
        gone = queues.withdraw_samples(cancel.tenant_id, name) + self._withdraw(name)
        if not gone and self._stores.ownership.forward(cancel.request_id, name):
            queues.known.discard(cancel.request_id)  # its sample was given to another one in between
            self._timings.forget([cancel.request_id])
            return []
        settlement = Settlement(cancel.request_id, effects=[deletion(cancel.request_id)])
        return [*(Settlement(request_id, error=reason) for request_id in gone), settlement]

    def _withdraw(self, name: str) -> list[str]:
        """Take one sample, or all of one sampling session, out of the sampler."""
        gone = [request_id for request_id in self._inside if name in (request_id, request_id.rpartition(":")[0])]
        return [request_id for request_id in gone if self._backend.sampler.cancel(request_id)]

    def _admit(self, queues: Queues, *, loads: bool = True) -> None:
        """Hand waiting samples to the sampler; without `loads` only those whose weights are in memory."""
        if not queues.samples:
            return
        taken = self._next(queues)
        seen: dict[str, SamplingSession | None] = {}
        if not loads:
            taken = [request for request in taken if self._is_at_hand(request, seen)]
        if not taken:
            return
        bodies = self._stores.futures.bodies([request.request_id for request in taken])
        for request in taken:
            if (body := bodies.get(request.request_id)) is None:
                # Only a settlement frees it, and it was none of ours: this process stood still, or was cut off.
                raise LeaseLostError(f"{request.request_id} was settled by another process")
            self._submit(request, body, seen)
            queues.take_samples([request])

    def _is_at_hand(self, request: Pending, seen: dict[str, SamplingSession | None]) -> bool:
        sampler = self._session(request, seen)
        return sampler is not None and (sampler.version_id is None or self._backend.has_version(sampler.version_id))

    def _session(self, request: Pending, seen: dict[str, SamplingSession | None]) -> SamplingSession | None:
        """`seen` are the sampling sessions that were looked up for others of the same turn."""
        name = request.sampling_session_id or ""
        if name not in seen:
            seen[name] = self._stores.samplers.find(name)
        return seen[name]

    def _next(self, queues: Queues) -> list[Pending]:
        if self._quarantine:
            if any(self._quarantine.batch_size(request_id) for request_id in self._inside):
                return []
            waiting = [request for requests in queues.waiting_samples().values() for request in requests]
            if quarantined := [request for request in waiting if self._quarantine.batch_size(request.request_id)]:
                # They come first, while the sampler is empty, so that no other sample fails with them.
                return self._quarantine.groups(quarantined)[0]
        inside = Counter(inside.request.tenant_id for inside in self._inside.values())
        waiting = self._present(queues.waiting_samples())
        taken, self._last_tenant = take_in_turns(waiting, self._most_inside, self._last_tenant, inside)
        if self._most_inside < MAX_IN_SAMPLER:  # no tenant's first sample is an exception where memory ran out
            return taken[: max(0, self._most_inside - len(self._inside))]
        return taken

    def _present(self, waiting: dict[str, Collection[Pending]]) -> dict[str, Collection[Pending]]:
        """Without the samples of absent sessions, unless there are no others, here or in the sampler."""
        if not self._absent:
            return waiting
        present: dict[str, Collection[Pending]] = {}
        for tenant_id, requests in waiting.items():
            if theirs := [request for request in requests if request.session_id not in self._absent]:
                present[tenant_id] = theirs
        if present or any(inside.request.session_id not in self._absent for inside in self._inside.values()):
            return present
        return waiting

    def _submit(self, request: Pending, body: bytes, seen: dict[str, SamplingSession | None]) -> None:
        """Hand it to the sampler. `seen` are the sampling sessions that were looked up for others of the same turn.
        An error of the database changes nothing.
        """
        self._inside[request.request_id] = _Inside(request)
        self._timings.began([request])
        try:
            if verdict := self._quarantine.verdict(request.request_id):
                raise verdict
            if (sampler := self._session(request, seen)) is None:
                raise EngineFailedError(f"sampling session {request.sampling_session_id!r} is unknown")
            with self._quarantine.running([request.request_id]):
                version_id = self._prepare_version(sampler, request)
                sample = read_sample(body, request.request_id, version_id, self._vision)
                sample = replace(sample, cache_scope=request.tenant_id)
                recorded_for = request.session_id if sample.record_stability_info else None
                begun = self._keeper.begin(request, sampler, sample)
                self._inside[request.request_id] = _Inside(
                    request, len(sample.prompt_T), recorded_for, begun, sample.stream, sample.num_samples
                )
                self._backend.sampler.submit(sample)
                hit("sample.admitted")
        except TinsmithError as error:
            self._finish([Settlement(request.request_id, error=error)])
        except SQLAlchemyError:
            del self._inside[request.request_id]
            raise
        except Exception as error:  # the answer of this request alone
            ids = {"request_id": request.request_id, "tenant_id": request.tenant_id}
            log.error("a sample could not start", exc_info=error, **ids)
            failure = EngineFailedError(f"sample failed in the engine: {type(error).__name__}: {error}")
            self._finish([Settlement(request.request_id, error=failure)])

    def _finish(self, settlements: Sequence[Settlement]) -> None:
        for settlement in settlements:
            self._inside.pop(settlement.request_id, None)
        self._outbox.leave(settlements)

    def _settlement(self, request_id: str, outcome: SampleResult | TinsmithError) -> Settlement:
        if not isinstance(outcome, SampleResult):
            return Settlement(request_id, error=outcome)
        inside = self._inside[request_id]
        lengths = [len(sequence.tokens_T) for sequence in outcome.sequences]
        cost = SampleCost(inside.prompt_tokens, outcome.prompt_cache_hit_tokens, sum(lengths))
        effects: list[Effect] = []
        if inside.recorded_for is not None:
            effects.append(recorded_sequences.insertion(inside.recorded_for, request_id, inside.prompt_tokens, lengths))
        if inside.begun is not None:
            effects += self._keeper.kept(inside.begun, outcome)
        return Settlement(request_id, write_sample_result(outcome), "proto", cost=cost, effects=effects)
