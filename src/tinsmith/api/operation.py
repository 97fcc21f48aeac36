"""One authenticated request, what it may touch, and how a plain function becomes a route.

A route is a synchronous function from a `Call` to a JSON object; `endpoint` does the rest in the same order
for all: key, size of the body, content type, then decoding and the function itself on a worker thread (they
may touch the database, whose writers wait for one another), then the answer. Errors leave as exceptions;
`problems` maps them. Plain Starlette and orjson: no models are built and validated on the way.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from structlog.contextvars import bind_contextvars

from tinsmith.auth import ANY_KEY
from tinsmith.auth.quotas import Quotas
from tinsmith.auth.signing import Signer
from tinsmith.auth.tenants import StoredTenants
from tinsmith.base_models import Bases
from tinsmith.batch.coordinator.coordinator import Coordinator
from tinsmith.batch.coordinator.model_gateway import ServiceAnswers
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.openai.reconciler import Keeper
from tinsmith.batch.openai.rows import OpenAIBatches
from tinsmith.chat.texts import Texts
from tinsmith.cluster.dispatch import Dispatch
from tinsmith.db.wakeups import Waiters
from tinsmith.errors import NotFoundError, UserError
from tinsmith.runtime.threads import Threads
from tinsmith.settings import Settings
from tinsmith.store.audit import Audit
from tinsmith.store.checkpoints import Checkpoints
from tinsmith.store.custom_losses import CustomLosses
from tinsmith.store.files import Files
from tinsmith.store.futures import Futures
from tinsmith.store.history import Curves
from tinsmith.store.implicit_sessions import StandingSessions
from tinsmith.store.kept_samples import KeptSamples
from tinsmith.store.models import Models
from tinsmith.store.overview import Overview
from tinsmith.store.recent_steps import RecentSteps
from tinsmith.store.recorded_sequences import Sequences
from tinsmith.store.sampling_sessions import SamplingSessions
from tinsmith.store.sessions import Sessions
from tinsmith.store.usage import Usage
from tinsmith.telemetry.metrics import ServerMeters
from tinsmith.telemetry.timeline import Traces
from tinsmith.telemetry.tracing import Tracing
from tinsmith.wire import bodies
from tinsmith.wire.fields import Fields, read_object, show
from tinsmith.wire.token_stream import Partials

T = TypeVar("T")

PREFIX = "/api/v1"  # of every path but those of OPENAI
OPENAI = ("/v1", "/oai/api/v1")
"""Where OpenAI's paths are, each of them twice: its clients are pointed at either."""
ANTHROPIC = ("/anthropic/api/v1", *OPENAI)
"""Where Anthropic's are. A client that is pointed where OpenAI's are tells itself by its path or its header."""
HUB = "/hub"
"""What clients of the Hugging Face hub are given as its address."""
_OPENAI, _HUB = tuple(f"{prefix}/" for prefix in OPENAI), f"{HUB}/"
_ANTHROPIC = (f"{ANTHROPIC[0]}/", *(f"{prefix}/messages" for prefix in OPENAI))
_ANTHROPIC_HEADER = "anthropic-version"
JsonObject = dict[str, object]
MAX_PAGE = 1000
MAX_PATH = 2000
"""Characters of a path. The longest that leads anywhere names a file of a checkpoint."""
MAX_POLL_BYTES = 16 << 20
MOST_LARGE = 4
"""Large results that are in memory at once, to be read or sent."""
SHORT_BYTES = 64 << 10
"""What is parsed in less time than the way to a worker thread takes."""


@dataclass(frozen=True, slots=True)
class Services:
    """Everything that routes may touch. `queue_state` says why a base model's queue does not move; `reads_wait`
    that the database is across a network, so that no read belongs on the event loop; `failing` what is wrong with this
    process, empty if nothing is.
    """

    settings: Settings
    bases: Bases
    sessions: Sessions
    models: Models
    sampling_sessions: SamplingSessions
    checkpoints: Checkpoints
    futures: Futures
    usage: Usage
    audit: Audit
    traces: Traces
    waiters: Waiters
    signer: Signer
    tenants: StoredTenants
    quotas: Quotas
    custom_losses: CustomLosses
    sequences: Sequences
    batch_jobs: BatchJobs
    coordinator: Coordinator
    answers: ServiceAnswers
    files: Files
    openai_batches: OpenAIBatches
    batch_keeper: Keeper
    texts: Texts
    partials: Partials
    standing: StandingSessions
    curves: Curves
    recent_steps: RecentSteps
    kept_samples: KeptSamples
    overview: Overview
    queue_state: Callable[[str], tuple[str, str | None]]
    engine_for_run: Callable[[str], str | None]
    dispatch: Dispatch
    meters: ServerMeters
    tracing: Tracing
    threads: Threads
    reads_wait: bool = True
    failing: Callable[[], str] = str
    large_results: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_LARGE))


class WouldWaitError(Exception):
    """A worker thread has to do it, from the beginning: nothing was done yet."""


@dataclass(frozen=True, slots=True)
class Call:
    services: Services
    tenant_id: str
    body: bytes
    path: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    scheme: str
    peer: str = ""
    may_wait: bool = True

    def wait(self) -> None:
        """What follows may wait for others, or take long. Raises WouldWaitError on the event loop."""
        if not self.may_wait:
            raise WouldWaitError

    def fields(self) -> Fields:
        return read_object(self.body)

    def page(self, default_limit: int) -> tuple[int, int]:
        """The query's limit and offset."""
        limit = self._query_integer("limit", default_limit, MAX_PAGE)
        return limit, self._query_integer("offset", 0, 2**31 - 1)

    def _query_integer(self, name: str, default: int, high: int) -> int:
        text = self.query.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= high):
            raise UserError(f"the query's {name} is {show(text)}; it must be an integer between 0 and {high}")
        return int(text)


Handler = Callable[[Call], JsonObject | list[JsonObject]]
Endpoint = Callable[[Request], Awaitable[Response]]


def endpoint(handler: Handler, takes: str | None = None, *, quick: bool = False) -> Endpoint:
    """The route of a function; `takes` is the content type of its body, None if it has none. `quick` is for what every
    client needs in time, however busy the other threads are.
    """

    async def respond(request: Request) -> Response:
        services, tenant_id = await authenticate(request)
        body = b"" if takes is None else await read_body(request, takes)
        encoding = request.headers.get("content-encoding")

        def work() -> bytes:
            decoded = bodies.decode(body, encoding, services.settings.max_body_bytes)
            return orjson.dumps(handler(call_of(request, services, tenant_id, decoded)))

        lane = services.threads.quick if quick else None
        if not services.tracing.on:
            return Response(await run(work, on=lane), media_type=bodies.JSON_TYPE)
        with traced(request, services, tenant_id, handler.__name__):
            return Response(await run(work, on=lane), media_type=bodies.JSON_TYPE)

    return respond


def call_of(request: Request, services: Services, tenant_id: str, body: bytes) -> Call:
    """An authenticated request as routes see it; `body` is decoded."""
    scope = request.scope
    peer = scope["client"][0] if scope.get("client") else ""
    return Call(
        services, tenant_id, body, request.path_params, request.query_params, request.headers, scope["scheme"], peer
    )


async def authenticate(request: Request) -> tuple[Services, str]:
    services: Services = request.app.state.services
    if "\x00" in request.scope["path"]:
        raise NotFoundError("no id holds a NUL character")  # and Postgres could not even look for it
    if len(request.scope["path"]) > MAX_PATH:
        raise NotFoundError(
            f"the path has {len(request.scope['path'])} characters; no id makes it longer than {MAX_PATH}"
        )
    if b"%00" in request.scope["query_string"]:
        raise UserError("the query holds a NUL character; leave it out")
    credential = request.headers.get("x-api-key")
    if credential is None and (is_openai(request) or is_anthropic(request) or is_hub(request)):
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        credential = given.strip() if scheme.lower() == "bearer" else None
    quick = services.threads.quick
    if is_hub(request) and await run(services.tenants.accepts_anyone, on=quick):
        credential = ANY_KEY  # loaders of models have no key, or one of the hub's own
    caller = services.tenants.known(credential) or await run(services.tenants.authenticate, credential, on=quick)
    bind_contextvars(tenant_id=caller.tenant_id)  # each request has a context of its own
    return services, caller.tenant_id


def is_openai(request: Request) -> bool:
    """Whether a request is one of OpenAI's clients, by its path: they send their key, and read errors, in their way."""
    return request.scope["path"].startswith(_OPENAI) and not is_anthropic(request)


def is_anthropic(request: Request) -> bool:
    """The same for Anthropic's, who always name their API's version."""
    path = request.scope["path"]
    return path.startswith(_ANTHROPIC) or (path.startswith(_OPENAI) and _ANTHROPIC_HEADER in request.headers)


def is_hub(request: Request) -> bool:
    """The same for those of the Hugging Face hub."""
    return request.scope["path"].startswith(_HUB)


async def read_body(request: Request, takes: str, limit_bytes: int | None = None) -> bytes:
    """The body as sent, refused as soon as it is known to be too large."""
    services: Services = request.app.state.services
    limit_bytes = min(limit_bytes or services.settings.max_body_bytes, services.settings.max_body_bytes)
    bodies.check_content_type(request.headers.get("content-type"), takes)
    bodies.check_length(request.headers.get("content-length"), limit_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit_bytes:
            raise bodies.too_large(limit_bytes)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def read_json(request: Request) -> Fields:
    """The body of a poll, which is short but for what it acknowledges: on the event loop, unless it is long."""
    services: Services = request.app.state.services
    limit_bytes = min(MAX_POLL_BYTES, services.settings.max_body_bytes)
    body = await read_body(request, bodies.JSON_TYPE, limit_bytes)
    encoding = request.headers.get("content-encoding")

    def work() -> Fields:
        return read_object(bodies.decode(body, encoding, limit_bytes))

    return work() if encoding is None and len(body) <= SHORT_BYTES else await run(work)


def traced(request: Request, services: Services, tenant_id: str, name: str) -> AbstractContextManager[None]:
    """A span around the answer to a request, below its client's."""
    told = {"tinsmith.tenant_id": tenant_id, "http.request.method": request.method}
    return services.tracing.span(name, request.headers.get("traceparent"), told)


async def run(work: Callable[..., T], *args: object, on: Executor | None = None) -> T:
    """Call `work` on a worker thread, which logs and traces as part of the same request. `on` is a lane of the
    service's threads; without one, it is that of the handlers.
    """
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(on, lambda: context.run(work, *args))


def answer(content: JsonObject, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, bodies.JSON_TYPE)
