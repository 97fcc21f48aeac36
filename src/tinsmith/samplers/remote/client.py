"""The sampler that has another engine sample: vLLM or SGLang, spoken to over HTTP.

The engine thread submits, cancels and collects; everything else happens on an event loop in a thread of its own, so
sampling goes on while the trainer computes. A request is answered by one job: its answers are asked for one by one,
each with a seed of its own, and put together when the last is there. If the engine dies, or fails, jobs that were in
it begin again: those with a seed give the same answers. One that was in it at two deaths runs alone, and if it dies a
third time, nobody else can be to blame: the job fails by name.

Versions are captured when a request names them first, and given to the engine as files under a new name (adapters.py):
what replaces a version is another one. `rest` and `rise` take turns on a device with a trainer. Knows no SQL.

A gate that many pass side by side, and that one may have alone, or close.

Whoever waits for it alone, or to close it, comes before those who come after. Lives on one event loop; leaving it never
waits, so that whoever is cancelled leaves it, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from tinsmith.errors import EngineFailedError, NotFoundError, TinsmithError, UserError
from tinsmith.samplers import CacheUse
from tinsmith.samplers.remote.adapters import Adapters, Version, Write
from tinsmith.samplers.remote.answering import Answering, Told
from tinsmith.samplers.remote.connection import EngineConnection, EngineGone
from tinsmith.samplers.remote.dialect import Ask, Dialect, EngineCall, EngineReply, PromptAsk
from tinsmith.types import ModelShape, Partial, Sample, SampleResult, SamplingParams


class Gate:
    def __init__(self) -> None:
        self._change = asyncio.Event()
        self._inside = 0
        self._closed = False

    @contextlib.asynccontextmanager
    async def beside_others(self) -> AsyncIterator[None]:
        await self._until(lambda: not self._closed)
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._tell()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        await self.close()
        try:
            yield
        finally:
            self.open()

    async def close(self) -> None:
        """Returns when nobody is inside."""
        await self._until(lambda: not self._closed)
        self._closed = True
        try:
            await self._until(lambda: not self._inside)
        except BaseException:
            self.open()
            raise

    def open(self) -> None:
        self._closed = False
        self._tell()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._change.wait()

    def _tell(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


AT_ONCE = 256
"""Requests to the engine at a time; it queues what it cannot run yet."""

MOST_ADAPTERS = 32
WAIT_S = 0.005
"""How long a step waits for something to finish: the engine thread looks after its other work in between."""

DEATHS = 3
STOP_S = 15.0
DRAIN_S = 60.0
"""How long requests may go on when a trainer wants the device; then they end, and begin again when it is free."""

log = structlog.get_logger()

Capture = Callable[[str], Write | None]
"""What writes a version's files, as it is now; None if there is no such version."""


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """Where the engine is: somebody's address, or the Python and the options to start one with. `directory` is for
    files of adapters alone, and emptied first; an engine elsewhere must see it under the same name.
    """

    directory: Path
    log_path: Path
    url: str = ""
    python: str = ""
    options: tuple[str, ...] = ()
    shares_device: bool = False
    most_adapters: int = MOST_ADAPTERS


class _Job:
    def __init__(self, sample: Sample, version: Version | None, answering: Answering) -> None:
        self.sample = sample
        self.version = version
        self.answering = answering
        self.deaths = 0
        self.told: dict[int, Told] = {}
        self.task: asyncio.Task[None] | None = None
        self.attempt: asyncio.Task[SampleResult] | None = None


class ExternalSampler:
    """Implements the Sampler protocol."""

    runs_by_itself = True

    def __init__(self, dialect: Dialect, engine: RemoteEngine, shape: ModelShape, capture: Capture) -> None:
        shutil.rmtree(engine.directory, ignore_errors=True)
        engine.directory.mkdir(parents=True)
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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="sampler", daemon=True)
        self._thread.start()
        self._wait(self._open(engine))

    # The Sampler protocol, from the engine's thread.

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def submit(self, sample: Sample) -> None:
        answering = Answering(self._dialect, sample, self._shape.max_context_length, self._shape.vocab_size)
        version = None if sample.version_id is None else self._version(sample.version_id)
        job = self._jobs[sample.request_id] = _Job(sample, version, answering)
        self._loop.call_soon_threadsafe(self._start, job)

    def cancel(self, request_id: str) -> bool:
        job = self._jobs.pop(request_id, None)
        if job is not None:
            self._loop.call_soon_threadsafe(_cancel, job)
        return job is not None

    def step(self, scopes: Collection[str] | None = None) -> Sequence[tuple[str, SampleResult | TinsmithError]]:
        self.wake_up()
        settled: list[tuple[str, SampleResult | TinsmithError]] = []
        wait_s: float | None = WAIT_S
        with contextlib.suppress(queue.Empty):
            while True:
                job, outcome = self._finished.get(timeout=wait_s) if wait_s else self._finished.get_nowait()
                wait_s = None
                request_id = job.sample.request_id
                if self._jobs.get(request_id) is job:
                    del self._jobs[request_id]
                    settled.append((request_id, outcome))
        return settled

    def partials(self) -> list[Partial]:
        told: list[Partial] = []
        with contextlib.suppress(queue.Empty):
            while True:
                told.append(self._partials.get_nowait())
        return told

    def cache_use(self) -> CacheUse:
        return CacheUse(0, 0, 0)  # the engine's own meters tell

    # Versions, from the engine's thread.

    def collect(self, version_id: str) -> None:
        """A version was replaced or dropped: requests that are under way keep what they have."""
        version = self._versions.pop(version_id, None)
        if version is not None:
            self._spawn(self._adapters.retire(version))

    def _version(self, version_id: str) -> Version:
        version = self._versions.get(version_id)
        if version is None:
            write = self._capture(version_id)
            if write is None:
                raise NotFoundError(f"there are no weights called {version_id!r} to sample from")
            version = self._versions[version_id] = Version(version_id, write)
        return version

    # Taking turns on a device, from the engine's thread.

    def sleep(self) -> None:
        """Leave the device to the trainer; returns when the engine sleeps."""
        if self._shares_device and not self._asleep:
            self._asleep = True
            self._wait(self._sleep())

    def wake_up(self) -> None:
        """Take the device back; returns when the engine is awake."""
        if self._asleep:
            self._wait(self._wake_up())
            self._asleep = False

    def close(self) -> None:
        """End everything that was started."""
        if not self._loop.is_closed():
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(STOP_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)

    # The event loop.

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _wait(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _open(self, engine: RemoteEngine) -> None:
        command: Sequence[str] = ()
        url = engine.url
        if not url:
            port = _free_port()
            url = f"http://127.0.0.1:{port}"
            command = self._dialect.command(engine.python, self._shape.path, port, engine.options, engine.shares_device)
        self._connection = EngineConnection(
            self._dialect.name,
            self._dialect.health,
            self._learn,
            url=url,
            command=command,
            log_path=engine.log_path,
            directory=engine.directory,
        )
        self._adapters = Adapters(engine.directory, engine.most_adapters, self._load, self._unload)
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._gate = Gate()
        self._quiet = Gate()  # that prompts are scored alone
        self._keeping = asyncio.create_task(self._connection.run())

    async def _close(self) -> None:
        for job in self._jobs.values():
            _cancel(job)
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)

    async def _learn(self) -> None:
        """What the engine says of itself, and which logprobs it reports: two requests of one token."""
        self._dialect.learn([await self._connection.get(path) for path in self._dialect.questions()])
        half = SamplingParams(max_tokens=1, temperature=0.5)
        prompt = [1 % self._shape.vocab_size]
        drawn = await self._ask(Ask(secrets.token_hex(8), None, prompt, half, 1))
        whole = Ask(secrets.token_hex(8), None, [*prompt, *drawn.tokens], SamplingParams(1), 1, prompt=PromptAsk())
        rows = (await self._ask(whole)).prompt_rows
        if not rows or not drawn.logprobs or drawn.tokens[0] not in rows[1]:
            raise EngineFailedError(f"{self._dialect.name} answered a request for logprobs without any")
        self._dialect.learn_mode(drawn.logprobs[0], rows[1][drawn.tokens[0]])

    async def _ask(self, ask: Ask) -> EngineReply:
        return self._dialect.read(ask, await self._connection.post(self._dialect.call(ask)))

    async def _load(self, version: Version, directory: Path) -> None:
        refused = f"the weights {version.version_id!r} cannot be sampled from: "
        if version.adapts_unembedding and not self._dialect.takes_unembeddings:
            raise UserError(
                f"{refused}{self._dialect.name} as it runs here knows no adapter of an unembedding; train with "
                "train_unembed=False"
            )
        try:
            answer = await self._connection.order(self._dialect.load(version.name, str(directory)))
        except TinsmithError as error:
            raise UserError(f"{refused}{error}") from error
        if answer.get("success") is False:
            raise UserError(f"{refused}{self._dialect.name} answers: {answer.get('error_message') or answer}")

    async def _unload(self, name: str) -> None:
        with contextlib.suppress(EngineGone):
            await self._connection.order(self._dialect.unload(name))

    async def _sleep(self) -> None:
        """Nothing new begins; what runs ends or is ended; then the engine sleeps."""
        jobs = [job for job in self._jobs.values() if job.attempt is not None]

        async def end_late() -> None:
            await asyncio.sleep(DRAIN_S)
            for job in jobs:
                if job.attempt is not None:
                    job.attempt.cancel()

        ending = asyncio.create_task(end_late())
        try:
            await self._gate.close()
        finally:
            ending.cancel()
        with contextlib.suppress(EngineGone):
            await self._adapters.clear()
            for call in self._dialect.sleep():
                await self._connection.order(call)

    async def _wake_up(self) -> None:
        with contextlib.suppress(EngineGone):
            for call in self._dialect.wake():
                await self._connection.order(call)
        self._gate.open()

    def _start(self, job: _Job) -> None:
        if job.version is not None:
            job.version.claims += 1
        job.task = asyncio.create_task(self._run(job))

    async def _run(self, job: _Job) -> None:
        try:
            outcome: SampleResult | TinsmithError = await self._answered(job)
        except TinsmithError as error:
            outcome = error
        except Exception as error:  # the answer of this request alone
            log.error("a sample failed", request_id=job.sample.request_id, exc_info=error)
            outcome = EngineFailedError(f"sampling failed: {type(error).__name__}: {error}")
        finally:
            if job.version is not None:
                await self._adapters.release(job.version)
        self._finished.put((job, outcome))

    async def _answered(self, job: _Job) -> SampleResult:
        while True:
            era = await self._connection.ready()
            passing = self._gate.alone() if job.deaths >= DEATHS - 1 else self._gate.beside_others()
            async with passing:
                if not self._connection.is_up(era):
                    continue  # it died while this one waited
                job.attempt = asyncio.create_task(self._attempt(job, era))
                try:
                    return await job.attempt
                except asyncio.CancelledError:
                    if job.task is None or job.task.cancelling():
                        job.attempt.cancel()
                        raise
                    continue  # it had to make way
                except EngineGone as error:
                    reason, sent, gone = str(error), error.sent, True
                except EngineFailedError as error:  # it lives, but failed at this
                    reason, sent, gone = str(error), True, False
                finally:
                    job.attempt = None
            if gone:
                await self._connection.gone(era)
            if not sent:
                continue  # what did not reach it did not kill it
            job.deaths += 1
            log.warning("the sampling engine failed", request_id=job.sample.request_id, deaths=job.deaths, error=reason)
            if job.deaths >= DEATHS:
                raise EngineFailedError(
                    f"{self._dialect.name} failed {job.deaths} times while it worked on this request, the last time on "
                    f"nothing else: {reason}"
                )

    async def _attempt(self, job: _Job, era: int) -> SampleResult:
        if job.version is None:
            return await job.answering.result(self, None, self._tell(job), unembedding=False)
        for last in (False, True):
            async with self._adapters.held(job.version, era) as name:
                try:
                    unembedding = job.version.adapts_unembedding
                    return await job.answering.result(self, name, self._tell(job), unembedding=unembedding)
                except NotFoundError:
                    if last:
                        raise
                    await self._adapters.forget(job.version)  # somebody else unloaded it
        raise AssertionError("unreachable")

    async def beside_others(self, ask: Ask, heard: Callable[[EngineReply], None]) -> EngineReply:
        """For `Answering`, on the event loop."""
        async with self._quiet.beside_others():
            return await self._sent(ask, heard)

    async def apart(self, asks: Sequence[Ask]) -> list[EngineReply]:
        """For `Answering`, on the event loop."""
        async with self._quiet.alone(), asyncio.TaskGroup() as group:
            sent = [group.create_task(self._sent(ask, lambda _: None)) for ask in asks]
        return [one.result() for one in sent]

    async def _sent(self, ask: Ask, heard: Callable[[EngineReply], None]) -> EngineReply:
        async with self._slots:
            try:
                if not ask.stream:
                    return await self._ask(ask)
                whole = EngineReply([], [], [])
                async for event in self._connection.events(self._dialect.call(ask)):
                    part = self._dialect.read(ask, event)
                    heard(part)
                    whole.add(part)
                return whole
            except asyncio.CancelledError:
                if call := self._dialect.abort(ask.request_id):
                    aborting = asyncio.create_task(self._abort(call))
                    self._aborting.add(aborting)
                    aborting.add_done_callback(self._aborting.discard)
                raise

    async def _abort(self, call: EngineCall) -> None:
        with contextlib.suppress(EngineGone, TinsmithError):
            await self._connection.order(call)

    def _tell(self, job: _Job) -> Callable[[int, EngineReply], None]:
        """Tokens of a streaming request as they come; after a new beginning, those that were not told yet."""
        begun = dict.fromkeys(range(job.sample.num_samples), 0)

        def tell(index: int, part: EngineReply) -> None:
            told = job.told.setdefault(index, Told())
            partial = told.more(job.sample, index, begun[index], part)
            begun[index] += len(part.tokens)
            if partial is not None:
                self._partials.put(partial)

        return tell


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _cancel(job: _Job) -> None:
    if job.attempt is not None:
        job.attempt.cancel()
    if job.task is not None:
        job.task.cancel()
