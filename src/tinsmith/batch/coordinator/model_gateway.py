"""Model requests of bulk jobs' operations: the router of a job's requests, and the gateway that answers them.

`RequestRouter` takes the requests of a worker's attempts and sends the answers back. Answers that are ready together
share a call. Requests of an ended attempt are cancelled; a sample that has begun continues, and the next attempt finds
it.

`ModelGateway` answers. Each job with requests has its own session: it opens with the first request, stays alive while
the job sends requests, and closes with the job, which cancels its samples. Admission, quotas, fairness between tenants,
usage and traces therefore treat a job like any other client.

The request_id of a sample consists of the job's session, the model and the request's name (row, key, a digest of the
body). The same request from another attempt, or after a restart, finds the same future: nothing is sampled twice while
the session lives. A session expires if no coordinator runs the job for `session_timeout_s`; the next one begins without
results.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from typing import Any

import orjson
import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.base_models import Bases
from tinsmith.cluster.sample_admission import SampleAdmission, make_request
from tinsmith.db.wakeups import Waiters
from tinsmith.errors import GoneError, NotFoundError, NotSupportedError, TinsmithError, TooManyRequestsError, UserError
from tinsmith.runtime.background import within
from tinsmith.store.checkpoints import Checkpoints, parse_path
from tinsmith.store.futures import Futures
from tinsmith.store.server_sessions import ServerSessions
from tinsmith.store.sessions import NewSession, Sessions
from tinsmith.types import ModelShape
from tinsmith.wire.fields import show, validate
from tinsmith.wire.sampling import SampleRequest, sample_of

MAX_CONCURRENT_REQUESTS = 512
"""Concurrent requests of one worker."""
DATABASE_PAUSE_S = 1.0
MAX_KEY = 48
FINISH_TYPES = {"SUCCEEDED": "success", "FAILED": "errored", "CANCELLED": "interrupted"}
TINKER_SCHEME = "tinker://"

Message = dict[str, Any]
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A request of one row to the service, named by (job_id, row_idx, key, verb, payload)."""

    job_id: int
    tenant_id: str
    job_name: str
    verb: str
    row_idx: int
    key: str
    payload: Message


Handler = Callable[[RowRequest], Awaitable[Message]]


@dataclass
class ModelGateway:
    bases: Bases
    sessions: Sessions
    server_sessions: ServerSessions
    checkpoints: Checkpoints
    futures: Futures
    waiters: Waiters
    admission: SampleAdmission

    def __post_init__(self) -> None:
        self._handlers: dict[str, Handler] = {"sample": self._sample, "model": self._model}
        self._jobs: dict[int, _JobSession] = {}

    def register(self, verb: str, handler: Handler) -> None:
        """Answer `RowService.ask(verb, ...)` by this handler. A TinsmithError that it raises fails the row."""
        self._handlers[verb] = handler

    async def answer(self, request: RowRequest) -> Message:
        """Answer a request, after waits for quotas and the database. Raises TinsmithError, which fails the row."""
        handler = self._handlers.get(request.verb)
        if handler is None:
            raise NotSupportedError(f"verb is {show(request.verb)}; it must be one of {sorted(self._handlers)}")
        while True:
            try:
                return await handler(request)
            except TooManyRequestsError as error:
                await asyncio.sleep(error.retry_after_s)
            except SQLAlchemyError as error:
                log.warning("a model request of a bulk job waits for the database", error=repr(error))
                await asyncio.sleep(DATABASE_PAUSE_S)

    async def close_job(self, job_id: int, tenant_id: str, status: str) -> None:
        """The job has ended: its sessions close, and samples in progress are cancelled."""
        self._jobs.pop(job_id, None)
        await asyncio.to_thread(self._close, job_id, tenant_id, status)

    def _close(self, job_id: int, tenant_id: str, status: str) -> None:
        for generation in count(1):
            session_id = _session_id(job_id, generation)
            try:
                self.sessions.finish(tenant_id, session_id, FINISH_TYPES[status])
            except NotFoundError:
                return
            if self.sessions.close(session_id, f"bulk job {job_id} has ended"):
                self.futures.cancel_of_closed_sessions()

    # Verbs.

    async def _model(self, request: RowRequest) -> Message:
        shape, _ = await asyncio.to_thread(self._resolve, request.tenant_id, request.payload.get("model"))
        return {"shape": asdict(shape)}

    async def _sample(self, request: RowRequest) -> Message:
        job = self._jobs.setdefault(request.job_id, _JobSession())
        while True:
            session_id = job.session_id
            try:
                session_id = await self._ensure_session(job, request)
                request_id = await asyncio.to_thread(self._submit, session_id, request)
                body = await self._outcome(job, request, session_id, request_id)
            except GoneError:
                await self._drop_session(job, session_id)
            else:
                return {"result": base64.b64encode(body).decode()}

    def _resolve(self, tenant_id: str, model: object) -> tuple[ModelShape, str | None]:
        """The base model, and the path if the model is a checkpoint. Raises UserError."""
        if not isinstance(model, str):
            raise UserError(f"model is {show(model)}; it must be a base model's id or a checkpoint's path")
        if not model.startswith(TINKER_SCHEME):
            return self.bases.get(model), None
        checkpoint = self.checkpoints.get(tenant_id, parse_path(model, "model"))
        return self.bases.get(checkpoint.base_model), model

    async def _drop_session(self, job: _JobSession, session_id: str | None) -> None:
        """The session has expired; the next request opens another."""
        async with job.lock:
            if job.session_id == session_id:
                job.session_id = None

    async def _ensure_session(self, job: _JobSession, request: RowRequest) -> str:
        """The job's session, alive."""
        async with job.lock:
            if job.session_id is None:
                job.session_id = await asyncio.to_thread(self._open_session, request)
            elif self.server_sessions.is_heartbeat_due(job.session_id):
                await asyncio.to_thread(self.server_sessions.keep, request.tenant_id, job.session_id)
            return job.session_id

    def _open_session(self, request: RowRequest) -> str:
        """The newest session of the job that is alive, or a new one."""
        new = NewSession(tags=("bulk-job",), display_name=request.job_name or f"bulk job {request.job_id}")
        for generation in count(1):
            session_id = _session_id(request.job_id, generation)
            try:
                self.sessions.heartbeat(request.tenant_id, session_id)
                return session_id
            except NotFoundError:
                return self.server_sessions.open(request.tenant_id, new, session_id)
            except GoneError:
                continue
        raise AssertionError

    def _submit(self, session_id: str, request: RowRequest) -> str:
        """Stores the request unless it is stored already. Raises UserError if it is not valid."""
        fields = request.payload.get("request")
        if not isinstance(fields, dict):
            raise UserError(f"request is {show(fields)}; it must be an object")
        if not 0 < len(request.key) <= MAX_KEY:
            raise UserError(f"key is {show(request.key)}; it must have 1 to {MAX_KEY} characters")
        shape, path = self._resolve(request.tenant_id, request.payload.get("model"))
        session = self.server_sessions.sampling_session(request.tenant_id, session_id, shape.name, path)
        body = orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)
        digest = hashlib.blake2b(body, digest_size=16).hexdigest()
        request_id = f"{session.sampling_session_id}:{request.row_idx}-{request.key}-{digest}"
        sample = sample_of(validate(SampleRequest, fields), request_id, path, shape.vision)
        return self.futures.submit(self.admission.admit(make_request(session, request_id, None, body), sample, shape))

    async def _outcome(self, job: _JobSession, request: RowRequest, session_id: str, request_id: str) -> bytes:
        """Waits for the result of a sample. Raises its error, and GoneError if the session has expired."""
        with self.waiters.watch(request_id) as woken:
            find = partial(self._find_outcome, request.tenant_id, session_id, request_id)
            while (body := await asyncio.to_thread(find)) is None:
                await within(self.server_sessions.heartbeat_s, woken.wait())
                woken.clear()
                await self._ensure_session(job, request)
        return body

    def _find_outcome(self, tenant_id: str, session_id: str, request_id: str) -> bytes | None:
        try:
            outcome = self.futures.outcome(tenant_id, request_id)
            error = None if outcome is None else outcome.error
        except GoneError as gone_error:
            outcome, error = None, str(gone_error)
        if error is None:
            return None if outcome is None else outcome.body
        # A sample that was cancelled with its session is requested again in the next one.
        self.sessions.require_active(tenant_id, session_id)
        raise TinsmithError(error)


@dataclass(slots=True)
class _JobSession:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    session_id: str | None = None


def _session_id(job_id: int, generation: int) -> str:
    return f"bulk-job-{job_id}-{generation}"


@dataclass(frozen=True, slots=True)
class RequestRouter:
    """The model requests of one job."""

    gateway: ModelGateway
    job_id: int
    tenant_id: str
    job_name: str

    @contextlib.asynccontextmanager
    async def serve_requests(
        self, send: Callable[[list[Message]], Awaitable[None]], room: asyncio.Semaphore
    ) -> AsyncIterator[Callable[[Sequence[Message]], None]]:
        """Yield a function that accepts requests until the end of the block; `send` sends answers to their worker,
        which has `room` for so many requests at a time.

        The next call of that function, perhaps without requests, raises an exception of `send`.
        """
        ready: asyncio.Queue[Message] = asyncio.Queue()
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
            request = RowRequest(
                self.job_id, self.tenant_id, self.job_name, str(ask["verb"]), int(ask.get("row_idx", -1)),
                str(ask.get("key", "")), dict(ask["payload"]),
            )  # fmt: skip
            return {"answer": await self.gateway.answer(request)}
        except TinsmithError as error:
            return {"refused": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            return {"refused": str(UserError(f"the model request is not valid: {error!r}"))}
        except Exception as error:
            log.error("a model request of a bulk job failed", job_id=self.job_id, exc_info=error)
            return {"refused": f"the server failed on a model request: {type(error).__name__}: {error}"}
