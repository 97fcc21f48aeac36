"""How the operations of bulk jobs reach the service's models: the router of a job's requests, and what answers them.

`RequestRouter` takes a worker's questions and sends the answers back; answers of one moment share a call. Only jobs of
operations have one. Questions of an attempt that has ended are cancelled. A sample that was begun for one goes on, and
the next attempt finds it.

`ServiceGateway` answers. A job that asks has a session of its own: opened with its first question, kept alive while it
asks, closed with its end, which cancels its samples. So admission, quotas, fairness between tenants, usage and traces
treat it like any other client.

A sample's request_id is made of the job's session, the model and the question's name (row, key, a digest of the
request). A question that is asked again, by another attempt or after a restart, finds the same future: nothing is
sampled twice while the session lives. If the session has expired, because no coordinator ran the job for
`session_timeout_s`, the next session begins without results.

Other verbs are registered by the code that wires the server.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Protocol, TypeVar

import orjson
import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.auth.quotas import Quotas
from tinsmith.base_models import Bases
from tinsmith.cluster.executors import Dispatch
from tinsmith.db.wakeups import Waiters
from tinsmith.errors import GoneError, NotFoundError, NotSupportedError, TinsmithError, TooManyRequestsError, UserError
from tinsmith.store.checkpoints import Checkpoints, parse_path
from tinsmith.store.futures import Futures, NewFuture
from tinsmith.store.sampling_sessions import NewSamplingSession, SamplingSession, SamplingSessions
from tinsmith.store.sessions import NewSession, Sessions
from tinsmith.types import ModelShape, Sample
from tinsmith.wire.fields import show, validate
from tinsmith.wire.sampling import SampleRequest, sample_of

MAX_ANSWERED = 512
"""Questions of one worker that are being answered at a time."""


@dataclass(frozen=True, slots=True)
class Question:
    """What one row asks. (job_id, row_idx, key, verb, payload) is its name: the same name is the same question."""

    job_id: int
    tenant_id: str
    job_name: str
    verb: str
    row_idx: int
    key: str
    payload: Message


class ModelGateway(Protocol):
    async def answer(self, question: Question) -> Message:
        """Raises TinsmithError, which fails the row."""
        ...

    async def ended(self, job_id: int, tenant_id: str, status: str) -> None:
        """The job has come to its end: what was kept for its rows may go, what is still being done is given up."""
        ...


@dataclass(frozen=True, slots=True)
class RequestRouter:
    """The answers to one job."""

    gateway: ModelGateway
    job_id: int
    tenant_id: str
    job_name: str

    @contextlib.asynccontextmanager
    async def answering(
        self, send: Callable[[list[Message]], Awaitable[None]]
    ) -> AsyncIterator[Callable[[Sequence[Message]], None]]:
        """Takes the questions of some attempts until the end of the block; `send` gives answers to their worker.

        What that raises, the next `take` raises; a heartbeat without questions is enough.
        """
        ready: asyncio.Queue[Message] = asyncio.Queue()
        room = asyncio.Semaphore(MAX_ANSWERED)
        tasks: set[asyncio.Task[None]] = set()

        async def answer(ask: Message) -> None:
            async with room:
                ready.put_nowait({"number": ask["number"], **await self._answer(ask)})

        def take(asks: Sequence[Message]) -> None:
            if delivering.done():
                delivering.result()
            for ask in asks:
                task = asyncio.create_task(answer(ask))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        async def deliver() -> None:
            while True:
                answers = [await ready.get()]
                while not ready.empty():
                    answers.append(ready.get_nowait())
                await send(answers)

        delivering = asyncio.create_task(deliver())
        try:
            yield take
        finally:
            all_tasks = [delivering, *tasks]
            for task in all_tasks:
                task.cancel()
            await asyncio.gather(*all_tasks, return_exceptions=True)

    async def _answer(self, ask: Message) -> Message:
        try:
            question = Question(
                self.job_id, self.tenant_id, self.job_name, str(ask["verb"]), int(ask.get("row_idx", -1)),
                str(ask.get("key", "")), dict(ask["payload"]),
            )  # fmt: skip
            return {"answer": await self.gateway.answer(question)}
        except TinsmithError as error:
            return {"refused": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            return {"refused": str(UserError(f"the question is not as it must be: {error!r}"))}
        except Exception as error:
            log.error("a question of a bulk job could not be answered", job_id=self.job_id, exc_info=error)
            return {"refused": f"the server could not answer: {type(error).__name__}: {error}"}


HEARTBEAT_S = 15.0
DATABASE_PAUSE_S = 1.0
MAX_KEY = 48
FINISH_TYPES = {"SUCCEEDED": "success", "FAILED": "errored", "CANCELLED": "interrupted"}
PATH = "tinker://"

T = TypeVar("T")
Message = dict[str, Any]
Handler = Callable[[Question], Awaitable[Message]]
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Admission:
    """How a sample gets into the queue: what a model can serve, the tenant's quotas, and the executor."""

    check: Callable[[Sample, ModelShape], int]
    """The most tokens that the sample may cost. Raises UserError if the model cannot serve it."""
    quotas: Quotas
    dispatch: Dispatch


class ServiceGateway:
    """Lives on the server's event loop."""

    def __init__(
        self,
        bases: Bases,
        sessions: Sessions,
        samplers: SamplingSessions,
        checkpoints: Checkpoints,
        futures: Futures,
        waiters: Waiters,
        admission: Admission,
    ) -> None:
        self._bases = bases
        self._sessions = sessions
        self._samplers = samplers
        self._checkpoints = checkpoints
        self._futures = futures
        self._waiters = waiters
        self._admission = admission
        self._handlers: dict[str, Handler] = {"sample": self._sample, "model": self._model}
        self._jobs: dict[int, _JobSession] = {}

    def register(self, verb: str, handler: Handler) -> None:
        """`RowService.ask(verb, ...)` is answered by it from now on; a TinsmithError of its fails the row."""
        self._handlers[verb] = handler

    async def answer(self, question: Question) -> Message:
        handler = self._handlers.get(question.verb)
        if handler is None:
            raise NotSupportedError(f"operations cannot ask for {show(question.verb)}; known: {sorted(self._handlers)}")
        while True:
            try:
                return await handler(question)
            except TooManyRequestsError as error:
                await asyncio.sleep(error.retry_after_s)
            except SQLAlchemyError as error:
                log.warning("a question of a bulk job waits for the database", error=repr(error))
                await asyncio.sleep(DATABASE_PAUSE_S)

    async def ended(self, job_id: int, tenant_id: str, status: str) -> None:
        self._jobs.pop(job_id, None)
        await _run(self._close, job_id, tenant_id, status)

    def _close(self, job_id: int, tenant_id: str, status: str) -> None:
        for number in count(1):
            session_id = _session_id(job_id, number)
            try:
                self._sessions.finish(tenant_id, session_id, FINISH_TYPES[status])
            except NotFoundError:
                return
            if self._sessions.close(session_id, f"bulk job {job_id} has ended"):
                self._futures.cancel_of_closed_sessions()

    # Verbs.

    async def _model(self, question: Question) -> Message:
        shape, _ = await _run(self._resolve, question.tenant_id, question.payload.get("model"))
        return {"shape": asdict(shape)}

    async def _sample(self, question: Question) -> Message:
        job = self._jobs.setdefault(question.job_id, _JobSession())
        while True:
            session_id = job.session_id
            try:
                session_id = await self._session_of(job, question)
                request_id = await _run(self._submit, session_id, question)
                body = await self._outcome(job, question, session_id, request_id)
            except GoneError:
                await self._leave(job, session_id)
            else:
                return {"result": base64.b64encode(body).decode()}

    def _resolve(self, tenant_id: str, model: object) -> tuple[ModelShape, str | None]:
        """The base, and the checkpoint's path if it is one. Raises UserError."""
        if not isinstance(model, str):
            raise UserError(f"model is {show(model)}; it must be a base model's id or a checkpoint's path")
        if not model.startswith(PATH):
            return self._bases.get(model), None
        checkpoint = self._checkpoints.get(tenant_id, parse_path(model, "model"))
        return self._bases.get(checkpoint.base_model), model

    async def _leave(self, job: _JobSession, session_id: str | None) -> None:
        """It has expired; the next one takes its place."""
        async with job.lock:
            if job.session_id == session_id:
                job.session_id = None

    async def _session_of(self, job: _JobSession, question: Question) -> str:
        """The job's session, alive."""
        async with job.lock:
            if job.session_id is None:
                job.session_id = await _run(self._open, question)
                job.alive_at = time.monotonic()
            elif time.monotonic() - job.alive_at > HEARTBEAT_S:
                job.alive_at = time.monotonic()
                await _run(self._sessions.heartbeat, question.tenant_id, job.session_id)
            return job.session_id

    def _open(self, question: Question) -> str:
        """The newest one of the job's that may still be used, or one more."""
        new = NewSession(tags=("bulk-job",), display_name=question.job_name or f"bulk job {question.job_id}")
        for number in count(1):
            session_id = _session_id(question.job_id, number)
            try:
                self._sessions.heartbeat(question.tenant_id, session_id)
                return session_id
            except NotFoundError:
                return self._sessions.open(question.tenant_id, new, session_id).session_id
            except GoneError:
                continue
        raise AssertionError

    def _submit(self, session_id: str, question: Question) -> str:
        """Stores the request, unless it is. Raises UserError if it is not valid."""
        request = question.payload.get("request")
        if not isinstance(request, dict):
            raise UserError(f"request is {show(request)}; it must be an object")
        if not 0 < len(question.key) <= MAX_KEY:
            raise UserError(f"the key {show(question.key)} has {len(question.key)} characters; use 1 to {MAX_KEY}")
        shape, path = self._resolve(question.tenant_id, question.payload.get("model"))
        session = self._sampling_session(session_id, question.tenant_id, shape, path)
        body = orjson.dumps(request, option=orjson.OPT_SORT_KEYS)
        digest = hashlib.blake2b(body, digest_size=16).hexdigest()
        request_id = f"{session.sampling_session_id}:{question.row_idx}-{question.key}-{digest}"
        sample = sample_of(validate(SampleRequest, request), request_id, path)
        num_tokens = self._admission.check(sample, shape)
        new = NewFuture(
            request_id=request_id,
            tenant_id=question.tenant_id,
            session_id=session_id,
            base_model=shape.name,
            kind="sample",
            body=body,
            num_tokens=num_tokens,
            sampling_session_id=session.sampling_session_id,
        )
        self._admission.quotas.admit(new)
        return self._futures.submit(self._admission.dispatch.assigned(new, sample))

    def _sampling_session(
        self, session_id: str, tenant_id: str, shape: ModelShape, path: str | None
    ) -> SamplingSession:
        """The session's name for a model; the same one every time."""
        number = int.from_bytes(hashlib.blake2b((path or shape.name).encode(), digest_size=3).digest(), "big")
        while True:
            name = f"{session_id}:sample:{number}"
            found = self._samplers.find(name)
            if found is None:
                self._samplers.create(NewSamplingSession(name, session_id, tenant_id, shape.name, path, path))
            elif (found.base_model, found.model_path) == (shape.name, path):
                return found
            else:
                number += 1

    async def _outcome(self, job: _JobSession, question: Question, session_id: str, request_id: str) -> bytes:
        """Waits for a sample's end. Raises UserError with what it failed of, and GoneError if the session did."""
        with self._waiters.watch(request_id) as woken:
            while (found := await _run(self._found, question.tenant_id, session_id, request_id)) is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await woken.wait()
                woken.clear()
                await self._session_of(job, question)
        return found

    def _found(self, tenant_id: str, session_id: str, request_id: str) -> bytes | None:
        try:
            found = self._futures.outcome(tenant_id, request_id)
            error = None if found is None else found.error
        except GoneError as gone:
            found, error = None, str(gone)
        if error is None:
            return None if found is None else found.body
        # What was cancelled with its session is asked again in the next one.
        self._sessions.require_active(tenant_id, session_id)
        raise TinsmithError(error)


class _JobSession:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.session_id: str | None = None
        self.alive_at = 0.0


def _session_id(job_id: int, number: int) -> str:
    return f"bulk-job-{job_id}-{number}"


async def _run(work: Callable[..., T], *args: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, work, *args)
