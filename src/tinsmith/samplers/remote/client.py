"""A sampler whose samples are drawn by an external engine, vLLM or SGLang, over HTTP.

The engine thread submits, cancels and collects. Everything else runs on an event loop in a separate thread, so sampling
continues while the trainer computes. One job answers one request: it asks for each sample separately, with a separate
seed, and assembles the result when all samples have arrived. If the external engine dies or fails, its running
jobs start again; jobs with a seed give the same samples. A job that was running at two failures then runs alone.
If the engine fails a third time, this job must be the cause, and it fails with a message that says so.

A version is captured when a request first names it, and the external engine loads it from files under a new name
(adapters.py), so a replaced version is never confused with its successor. `sleep` and `wake_up` share a device with a
trainer. This module does not access the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from tinsmith.errors import EngineFailedError, NotFoundError, TinsmithError, UserError
from tinsmith.samplers import CacheUse
from tinsmith.samplers.remote.adapters import LoadedAdapters, Version, WriteFiles
from tinsmith.samplers.remote.connection import (
    FIRST_PAUSE_S,
    PROBE_TIMEOUT_S,
    EngineConnection,
    EngineLost,
    RemoteEngine,
)
from tinsmith.samplers.remote.dialect import Dialect, EngineCall, EngineReply, EngineRequest, Json, PromptScoring
from tinsmith.samplers.remote.links import AdapterLinks
from tinsmith.samplers.remote.translation import OnDelta, SampleTranslator, new_tokens
from tinsmith.types import ModelShape, Partial, Sample, SampleResult, SamplingParams


class Gate:
    """A lock that many tasks hold together, or one exclusively; `close` holds it exclusively until `open`.

    A task that waits to hold it exclusively goes before tasks that arrive later. It belongs to one event loop.
    Releasing it never waits, so a cancelled task releases it, too.
    """

    def __init__(self) -> None:
        self._change = asyncio.Event()
        self._holders = 0
        self._closed = False

    @contextlib.asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        await self._until(lambda: not self._closed)
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            self._notify()

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        await self.close()
        try:
            yield
        finally:
            self.open()

    async def close(self) -> None:
        """Returns when no task holds it."""
        await self._until(lambda: not self._closed)
        self._closed = True
        try:
            await self._until(lambda: not self._holders)
        except BaseException:
            self.open()
            raise

    def open(self) -> None:
        self._closed = False
        self._notify()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._change.wait()

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


MAX_CONCURRENT = 256
"""Concurrent requests to the external engine, which queues what it cannot run yet."""

PROBE_TOKENS = 8
STEP_WAIT_S = 0.005
"""How long a step waits for a finished sample; between steps the engine thread does its other work."""

MAX_DEATHS = 3
STOP_TIMEOUT_S = 15.0
DRAIN_TIMEOUT_S = 60.0
"""How long running requests may continue when a trainer needs the device; then they are aborted and start again."""

log = structlog.get_logger()

Capture = Callable[[str], WriteFiles | None]
"""Returns a function that writes the current files of a version, or None if the version does not exist."""


class _Job:
    def __init__(self, sample: Sample, version: Version | None, translator: SampleTranslator) -> None:
        self.sample = sample
        self.version = version
        self.translator = translator
        self.deaths = 0
        self.published: dict[int, int] = {}  # tokens by the index of the answer
        self.task: asyncio.Task[None] | None = None
        self.attempt: asyncio.Task[SampleResult] | None = None


class ExternalSampler:
    """Implements the Sampler and InferenceServer protocols."""

    runs_by_itself = True

    def __init__(self, dialect: Dialect, engine: RemoteEngine, shape: ModelShape, capture: Capture) -> None:
        for directory in filter(None, (engine.directory, engine.memory)):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        self._dialect = dialect
        self._shape = shape
        self._capture = capture
        self._shares_device = engine.shares_device
        self._versions: dict[str, Version] = {}
        self._jobs: dict[str, _Job] = {}
        self._finished: queue.SimpleQueue[tuple[_Job, SampleResult | TinsmithError]] = queue.SimpleQueue()
        self._partials: queue.SimpleQueue[Partial] = queue.SimpleQueue()
        self._aborting: set[asyncio.Task[None]] = set()
        self._asleep = False
        self._sleeping_era = -1
        self._wake_calls: list[EngineCall] = []
        self.before_wake_up: Callable[[], None] = lambda: None
        """Frees the device for the engine."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="sampler", daemon=True)
        self._thread.start()
        self._links = AdapterLinks(engine.adapters_host, engine.adapters_url) if engine.adapters_url else None
        self._wait(self._open(engine))

    # The Sampler protocol, from the engine's thread.

    @property
    def inference_server(self) -> ExternalSampler:
        return self

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def submit(self, sample: Sample) -> None:
        translator = SampleTranslator(self._dialect, sample, self._shape.max_context_length, self._shape.vocab_size)
        version = None if sample.version_id is None else self._version(sample.version_id)
        job = self._jobs[sample.request_id] = _Job(sample, version, translator)
        self._loop.call_soon_threadsafe(self._start, job)

    def cancel(self, request_id: str) -> bool:
        job = self._jobs.pop(request_id, None)
        if job is not None:
            self._loop.call_soon_threadsafe(_cancel, job)
        return job is not None

    def pause(self, request_ids: Collection[str]) -> None:
        """The server finishes what it has begun."""

    def step(self, scopes: Collection[str] | None = None) -> Sequence[tuple[str, SampleResult | TinsmithError]]:
        self.wake_up()
        outcomes: list[tuple[str, SampleResult | TinsmithError]] = []
        wait_s: float | None = STEP_WAIT_S
        with contextlib.suppress(queue.Empty):
            while True:
                job, outcome = self._finished.get(timeout=wait_s) if wait_s else self._finished.get_nowait()
                wait_s = None
                request_id = job.sample.request_id
                if self._jobs.get(request_id) is job:
                    del self._jobs[request_id]
                    outcomes.append((request_id, outcome))
        return outcomes

    def partials(self) -> list[Partial]:
        partials: list[Partial] = []
        with contextlib.suppress(queue.Empty):
            while True:
                partials.append(self._partials.get_nowait())
        return partials

    def cache_use(self) -> CacheUse:
        return CacheUse(0, 0, 0)  # the external engine has its own metrics

    # Versions, from the engine's thread.

    def collect(self, version_id: str) -> None:
        """Unload a version that was replaced or dropped, after the requests that use it."""
        version = self._versions.pop(version_id, None)
        if version is not None:
            asyncio.run_coroutine_threadsafe(self._adapters.retire(version), self._loop)

    def _version(self, version_id: str) -> Version:
        version = self._versions.get(version_id)
        if version is None:
            write = self._capture(version_id)
            if write is None:
                raise NotFoundError(f"there are no weights called {version_id!r} to sample from")
            version = self._versions[version_id] = Version(version_id, write)
        return version

    # The InferenceServer protocol, from the engine's thread.

    @property
    def name(self) -> str:
        return self._dialect.name

    @property
    def address(self) -> str:
        return self._connection.url

    @property
    def cannot_sleep(self) -> str:
        if self._shares_device:
            return ""
        return f"{self.name} serves it without its sleep mode; start it with TINSMITH_SAMPLER_SHARES_DEVICE=true"

    def sleep(self) -> None:
        """Leave the device to a trainer; returns when the engine sleeps. Without `shares_device` nothing happens."""
        if self._shares_device and not self._asleep:
            self._wait(self._sleep())
            self._asleep = True

    def wake_up(self) -> None:
        """Take the device back; returns when the engine is awake. Raises the error of `before_wake_up`, or
        TinsmithError if the engine refuses; then it sleeps on, and the next call tries again.
        """
        if self._asleep:
            self.before_wake_up()
            self._wait(self._wake())
            self._asleep = False

    def close(self) -> None:
        """Cancel all jobs, and end the external engine if this process started it."""
        if not self._loop.is_closed():
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(STOP_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_TIMEOUT_S)
            if self._links:
                self._links.close()

    # The event loop.

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _wait(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _open(self, engine: RemoteEngine) -> None:
        self._connection = EngineConnection(self._dialect, engine, self._shape.path, self._learn)
        self._adapters = LoadedAdapters(engine.directory, engine.max_adapters, self._load, self._unload, engine.memory)
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._gate = Gate()
        self._scoring = Gate()  # held exclusively while prompts are scored
        self._connection_task = asyncio.create_task(self._connection.run())

    async def _close(self) -> None:
        for job in self._jobs.values():
            _cancel(job)
        self._adapters.close()
        self._connection_task.cancel()
        await asyncio.gather(self._connection_task, return_exceptions=True)

    async def _learn(self) -> None:
        """Read the engine's properties, and determine by two requests which logprobs it reports."""
        self._dialect.learn([await self._get_info(path) for path in self._dialect.info_paths])
        params = SamplingParams(max_tokens=PROBE_TOKENS, temperature=0.5)
        prompt = [1 % self._shape.vocab_size]
        drawn = await self._send_request(EngineRequest(secrets.token_hex(8), None, prompt, params, PROBE_TOKENS))
        tokens = [*prompt, *drawn.tokens]
        request = EngineRequest(secrets.token_hex(8), None, tokens, SamplingParams(1), 1, prompt=PromptScoring())
        rows = (await self._send_request(request)).prompt_rows or [{}]
        scored = [row.get(token) for token, row in zip(drawn.tokens, rows[1:], strict=False)]
        finite = [logprob for logprob in scored if logprob is not None]
        if not finite or not len(finite) == len(drawn.tokens) == len(drawn.logprobs):
            raise EngineFailedError(f"{self._dialect.name} answered a request for logprobs without any")
        self._dialect.learn_mode(drawn.logprobs, finite)

    async def _get_info(self, path: str) -> Json:
        try:
            return await self._connection.get(path)
        except NotFoundError:
            return await self._connection.get(path.replace("/", "/get_", 1))

    async def _send_request(self, request: EngineRequest) -> EngineReply:
        return self._dialect.read(request, await self._connection.post(self._dialect.call(request)))

    async def _load(self, version: Version, directory: Path) -> None:
        refusal = f"the weights {version.version_id!r} cannot be sampled from: "
        if version.adapts_unembedding and not self._dialect.takes_unembeddings:
            raise UserError(
                f"{refusal}{self._dialect.name} with these options does not support adapters of the unembedding; "
                "train with train_unembed=False"
            )
        location = self._links.open(directory) if self._links else str(directory)
        try:
            answer = await self._connection.send_command(self._dialect.load(version.name, location))
        except TinsmithError as error:
            raise UserError(f"{refusal}{error}") from error
        finally:
            if self._links:
                self._links.close_link(location)
        if answer.get("success") is False:
            raise UserError(f"{refusal}{self._dialect.name} answers: {answer.get('error_message') or answer}")

    async def _unload(self, name: str) -> None:
        with contextlib.suppress(EngineLost):
            await self._connection.send_command(self._dialect.unload(name))

    async def _sleep(self) -> None:
        """Hold new requests, wait up to DRAIN_TIMEOUT_S for running ones, abort those that remain, and put the engine
        to sleep.
        """
        jobs = [job for job in self._jobs.values() if job.attempt is not None]

        async def abort_late() -> None:
            await asyncio.sleep(DRAIN_TIMEOUT_S)
            for job in jobs:
                if job.attempt is not None:
                    job.attempt.cancel()

        aborting = asyncio.create_task(abort_late())
        try:
            await self._gate.close()
        finally:
            aborting.cancel()
        self._wake_calls = []
        await asyncio.gather(*self._aborting)
        await self._connection.pause()
        self._sleeping_era = self._connection.era
        if not self._connection.is_up(self._sleeping_era):
            return
        try:
            await self._adapters.clear()
            for num_slept, call in enumerate(self._dialect.sleep(), 1):
                await self._order_when_idle(call)
                self._wake_calls = self._dialect.wake_after(num_slept)
        except (EngineLost, TinsmithError) as error:
            if isinstance(error, EngineLost) and not await self._connection.is_healthy():
                return  # it ended, and its memory is free
            with contextlib.suppress(TinsmithError):
                await self._reclaim_device()
            self._reopen()
            raise EngineFailedError(f"{self.name} did not leave the device to the trainer: {error}") from error

    async def _order_when_idle(self, call: EngineCall) -> None:
        """An aborted request may end a little later, and SGLang refuses to flush its cache until then."""
        deadline = time.monotonic() + PROBE_TIMEOUT_S
        while True:
            try:
                await self._connection.send_command(call)
                return
            except UserError as error:
                if isinstance(error, NotFoundError) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(FIRST_PAUSE_S)

    async def _wake(self) -> None:
        await self._reclaim_device()
        self._reopen()

    async def _reclaim_device(self) -> None:
        # An engine that ended asleep, and one that took its place, have nothing to take back.
        with contextlib.suppress(EngineLost):
            while self._wake_calls and self._connection.is_up(self._sleeping_era):
                await self._connection.send_command(self._wake_calls[0])
                del self._wake_calls[0]

    def _reopen(self) -> None:
        self._connection.resume()
        self._gate.open()

    def _start(self, job: _Job) -> None:
        if job.version is not None:
            job.version.claims += 1
        job.task = asyncio.create_task(self._run(job))

    async def _run(self, job: _Job) -> None:
        try:
            outcome: SampleResult | TinsmithError = await self._complete(job)
        except TinsmithError as error:
            outcome = error
        except Exception as error:  # only this request fails
            log.error("a sample failed", request_id=job.sample.request_id, exc_info=error)
            outcome = EngineFailedError(f"sampling failed: {type(error).__name__}: {error}")
        finally:
            if job.version is not None:
                await self._adapters.release(job.version)
        self._finished.put((job, outcome))

    async def _complete(self, job: _Job) -> SampleResult:
        while True:
            era = await self._connection.ready()
            gate = self._gate.exclusive() if job.deaths >= MAX_DEATHS - 1 else self._gate.shared()
            async with gate:
                if not self._connection.is_up(era):
                    continue  # the engine died while this job waited
                job.attempt = asyncio.create_task(self._attempt(job, era))
                try:
                    return await job.attempt
                except asyncio.CancelledError:
                    if job.task is None or job.task.cancelling():
                        job.attempt.cancel()
                        raise
                    continue  # aborted for the trainer
                except EngineLost as error:
                    reason, is_cause = str(error), error.reached_engine
                    # Before the next job passes the gate, and is blamed for this end.
                    await self._connection.report_lost(era)
                except EngineFailedError as error:  # the engine is up, but failed on this request
                    reason, is_cause = str(error), True
                finally:
                    job.attempt = None
            if not is_cause:
                continue  # a request that was not sent is not the cause
            job.deaths += 1
            log.warning("the sampling engine failed", request_id=job.sample.request_id, deaths=job.deaths, error=reason)
            if job.deaths >= MAX_DEATHS:
                raise EngineFailedError(
                    f"{self._dialect.name} failed {job.deaths} times while it worked on this request, the last time on "
                    f"no other request: {reason}"
                )

    async def _attempt(self, job: _Job, era: int) -> SampleResult:
        # A request that came before the engine was up was checked without what the engine reports of itself.
        self._dialect.check(job.sample.params, alternatives=job.sample.prompt_alt_tokens_k)
        publish = partial(self._publish, job)
        if job.version is None:
            return await job.translator.result(self, None, publish, by_token=False)
        for last in (False, True):
            async with self._adapters.acquire(job.version, era) as name:
                try:
                    by_token = job.version.adapts_unembedding
                    return await job.translator.result(self, name, publish, by_token=by_token)
                except NotFoundError:
                    if last:
                        raise
                    await self._adapters.forget(job.version)  # another client of the engine unloaded it
        raise AssertionError("unreachable")

    async def send(self, request: EngineRequest, on_delta: OnDelta) -> EngineReply:
        """Called by `SampleTranslator` on the event loop."""
        async with self._scoring.shared():
            return await self._send(request, on_delta)

    async def send_exclusively(self, requests: Sequence[EngineRequest]) -> list[EngineReply]:
        """Called by `SampleTranslator` on the event loop."""
        async with self._scoring.exclusive(), asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._send(request, lambda _start, _part: None)) for request in requests]
        return [task.result() for task in tasks]

    async def _send(self, request: EngineRequest, on_delta: OnDelta) -> EngineReply:
        async with self._slots:
            try:
                call = self._dialect.call(request)
                if not call.body.get("stream"):
                    return await self._send_request(request)
                reply = EngineReply([], [], [])
                async for event in self._connection.events(call):
                    part = self._dialect.read(request, event, len(reply.tokens))
                    on_delta(len(reply.tokens), part)
                    reply.add(part)
                return reply
            except asyncio.CancelledError:
                if call := self._dialect.abort(request.request_id):
                    aborting = asyncio.create_task(self._abort(call))
                    self._aborting.add(aborting)
                    aborting.add_done_callback(self._aborting.discard)
                raise

    async def _abort(self, call: EngineCall) -> None:
        with contextlib.suppress(EngineLost, TinsmithError):
            await self._connection.send_command(call)

    def _publish(self, job: _Job, index: int, start: int, part: EngineReply) -> None:
        """Publish the tokens of a streaming request. After a restart, tokens that were published are skipped."""
        published = job.published.get(index, 0)
        if partial_answer := new_tokens(job.sample, index, start, part, published):
            job.published[index] = start + len(part.tokens)
            self._partials.put(partial_answer)


def _cancel(job: _Job) -> None:
    if job.attempt is not None:
        job.attempt.cancel()
    if job.task is not None:
        job.task.cancel()
