"""Declares endpoints: `@operation` on a handler is the only declaration of its endpoint.

The declaration defines the route, the validation of the body, the entry in the OpenAPI document, the row on the
reference page of routes, and the case of the isolation test. `app.py` collects the declarations of its modules.

A handler has one of two forms:

- A function that takes a `Call`, and the typed body if one is declared, and returns a JSON object, or a
  `Submission`, which is stored before the response is sent. It runs on a worker thread and may use the database. The
  order is authentication, body size, content type, decoding, validation, the function, the response. `errors` turns
  exceptions into responses.
- A coroutine function that takes a Starlette request and returns a response. It authenticates and reads the body
  itself.

A request becomes a future as follows. Without a known model, an open session and a sequence number it is an HTTP error.
Any other request is stored. An invalid one becomes a future that has already failed, so that its number counts as used
and the client reads the reason where it waits for the result; its handler gets a `Draft` of the body (`late`). The
request_id consists of the model and the number, so a repeated request finds the existing future. A different request
with the same number is an HTTP error.

JSON operations of older clients have no number and take the model's next one on arrival. Repeating such a request
creates a second one, and the client must wait for each response before it sends the next request. If clients of both
kinds share a model, they may use the same number, which is the same error.
"""

from __future__ import annotations

import asyncio
import contextvars
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from http import HTTPStatus
from inspect import iscoroutinefunction
from types import ModuleType
from typing import Generic, TypeVar, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response
from structlog.contextvars import bind_contextvars

from tinsmith.api.admission import check_seq_id
from tinsmith.api.ignored_fields import IgnoredFieldReports, build_header
from tinsmith.auth import ANY_KEY, Caller
from tinsmith.auth.quotas import Quotas
from tinsmith.auth.signing import Signer
from tinsmith.auth.tenants import StoredTenants
from tinsmith.base_models import Bases
from tinsmith.batch.coordinator.coordinator import Coordinator
from tinsmith.batch.coordinator.model_gateway import ModelGateway
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.openai.reconciler import Reconciler
from tinsmith.batch.openai.rows import OpenAIBatches
from tinsmith.chat.tokenizer import ModelTokenizers
from tinsmith.cluster.engines import EngineFailure
from tinsmith.cluster.executors import DedicatedSamplers, Dispatch
from tinsmith.db.wakeups import Waiters
from tinsmith.errors import ForbiddenError, NotFoundError, SeqIdTakenError, TooManyRequestsError, UserError
from tinsmith.runtime.threads import ThreadPools
from tinsmith.settings import Settings
from tinsmith.store.audit import Audit
from tinsmith.store.checkpoints import Checkpoints
from tinsmith.store.custom_losses import CustomLosses
from tinsmith.store.exchanges import Exchanges
from tinsmith.store.files import Files
from tinsmith.store.futures import Futures, NewFuture
from tinsmith.store.history import Curves, KeptSamples, RecentSteps
from tinsmith.store.implicit_sessions import ImplicitSessions
from tinsmith.store.models import Model, Models
from tinsmith.store.overview import Overview
from tinsmith.store.recorded_sequences import Sequences
from tinsmith.store.responses import Responses
from tinsmith.store.sampling_sessions import SamplingSessions
from tinsmith.store.sessions import Sessions, session_has_ended
from tinsmith.store.usage import Usage
from tinsmith.telemetry.metrics import ServerMeters
from tinsmith.telemetry.timeline import Traces
from tinsmith.telemetry.tracing import Tracing
from tinsmith.wire import bodies
from tinsmith.wire.fields import Body, IgnoredFields, Integer, Schema, Text, read_object, show, validate
from tinsmith.wire.token_stream import Partials

T = TypeVar("T")
B = TypeVar("B", bound=Body)
Required = TypeVar("Required", bound=Body)

PREFIX = "/api/v1"  # of every path except those of OPENAI
OPENAI = ("/v1", "/oai/api/v1")
"""The two prefixes of OpenAI's paths."""
OPENAI_PATHS = (*(f"{prefix}/" for prefix in OPENAI), "/inference/v1/", "/tokenize", "/detokenize")
"""The prefixes of all paths for clients of OpenAI's protocol. The paths at the root are vLLM's."""
ANTHROPIC = ("/anthropic/api/v1", *OPENAI)
"""The prefixes of Anthropic's paths. On shared prefixes, the path or a header identifies Anthropic's clients."""
HUB = "/hub"
"""The prefix for clients of the Hugging Face hub."""
_HUB = f"{HUB}/"
_ANTHROPIC = (f"{ANTHROPIC[0]}/", *(f"{prefix}/messages" for prefix in OPENAI))
_ANTHROPIC_HEADER = "anthropic-version"
CAPTURE_HEADER, CAPTURE_SEPARATOR = "x-tinsmith-session", "#"
"""A request names its capture session in this header, or after this separator in its API key."""
MAX_CAPTURE = 128
KEY_SCHEME, BEARER_SCHEME, METRICS_SCHEME = "key", "bearer", "metrics_token"
"""Names of security schemes: the header X-API-Key, a key as bearer token, and the token of the metrics."""
JsonObject = dict[str, object]
MAX_PAGE = 1000
MAX_PATH = 2000
"""Most characters of a path. The longest valid path names a file of a checkpoint."""
MAX_POLL_BYTES = 16 << 20
MAX_LARGE_RESULTS = 4
"""Most large results in memory at the same time."""
INLINE_BODY_BYTES = 64 << 10
"""Largest body whose parsing takes less time than a thread switch."""


@dataclass(frozen=True, slots=True)
class Services:
    """The services that routes use.

    `queue_state` returns why a base model's queue is not moving, `cannot_start` why it will never move, `failing` why
    a process is failing (or ""), and `loading` which of its engines are not ready (or ""), both without details, since
    everyone may read them. `failures` has the details, for operators. `reads_wait` is True for a remote database, which
    must not be read on the event loop.
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
    model_gateway: ModelGateway
    files: Files
    openai_batches: OpenAIBatches
    batch_reconciler: Reconciler
    tokenizers: ModelTokenizers
    partials: Partials
    implicit_sessions: ImplicitSessions
    curves: Curves
    recent_steps: RecentSteps
    responses: Responses
    exchanges: Exchanges
    kept_samples: KeptSamples
    overview: Overview
    queue_state: Callable[[str], tuple[str, str | None]]
    engine_for_run: Callable[[str], str | None]
    dispatch: Dispatch
    dedicated_samplers: DedicatedSamplers
    meters: ServerMeters
    tracing: Tracing
    threads: ThreadPools
    reads_wait: bool = True
    failing: Callable[[], str] = str
    loading: Callable[[], str] = str
    failures: Callable[[], Sequence[EngineFailure]] = tuple
    cannot_start: Callable[[str], str | None] = lambda _base_model: None
    ignored_fields: IgnoredFieldReports = field(default_factory=IgnoredFieldReports)
    large_results: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LARGE_RESULTS))


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
    ignored: IgnoredFields = field(default_factory=IgnoredFields)

    def fields(self) -> dict[str, object]:
        """Return the JSON body, for handlers without a typed body."""
        return read_object(self.body)

    def page(self, default_limit: int) -> tuple[int, int]:
        """Return the query's limit and offset."""
        limit = self._query_integer("limit", default_limit, MAX_PAGE)
        return limit, self._query_integer("offset", 0, 2**31 - 1)

    def _query_integer(self, name: str, default: int, high: int) -> int:
        text = self.query.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= high):
            raise UserError(f"the query's {name} is {show(text)}; it must be an integer between 0 and {high}")
        return int(text)


Handler = Callable[..., object]
H = TypeVar("H", bound=Handler)
Endpoint = Callable[[Request], Awaitable[Response]]
FORM_TYPE = "multipart/form-data"
FUTURE: Schema = {"$ref": "#/components/schemas/Future"}
SUBMITTED = (404, 410, 429, 501)
"""The error statuses of a request that becomes a future, in addition to those of its form."""
_ID_FIELDS = ("session_id", "model_id", "sampling_session_id", "request_id", "tinker_path")
"""Fields that hold ids of a tenant's objects. Examples give these ids in braces."""


class Access(Enum):
    """How an endpoint accesses tenants' objects, which selects its case in the isolation test."""

    IDS = "takes ids of a tenant's objects; those of another tenant are 404"
    LISTING = "lists or counts the caller's own objects"
    LINK = "needs a signed link instead of a key"
    NOTHING = "shows no tenant's objects"
    OPERATOR = "for the tenants of TINSMITH_OPERATOR_TENANTS; 403 for others"


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One method of one path, as declared.

    `body` is a typed body, or the schema of one that the handler reads itself. `answer` is the schema of the response,
    or the content type if the response is not JSON. `scheme` is the security scheme, if it is not a key. `errors` are
    the statuses in addition to those that follow from the declaration. `example` is a body, and `filters` are queries
    or bodies of a listing, with ids in braces.
    """

    method: str
    route: str
    summary: str
    endpoint: Endpoint
    answer: Schema | str
    access: Access
    body: type[Body] | Schema | None
    takes: tuple[str, ...]
    errors: tuple[int, ...]
    query: Mapping[str, Schema]
    example: object
    filters: tuple[object, ...]
    keyed: bool
    scheme: str
    at_root: bool

    @property
    def url(self) -> str:
        """The URL template, without the router's converters."""
        return self.route.replace(":path", "")

    @property
    def path(self) -> str:
        """The path below PREFIX, or the whole path for clients of other services."""
        return self.url.removeprefix(PREFIX)

    @property
    def schemes(self) -> tuple[str, ...]:
        """The names of the alternative security schemes in the OpenAPI document; empty if everyone may call it."""
        if self.scheme != KEY_SCHEME:
            return (self.scheme,)
        if not self.keyed:
            return ()
        takes_bearer = self.route.startswith((*OPENAI_PATHS, *_ANTHROPIC, _HUB))
        return (KEY_SCHEME, BEARER_SCHEME) if takes_bearer else (KEY_SCHEME,)

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"


def operation(  # noqa: PLR0913
    methods: str,
    path: str,
    summary: str,
    *,
    answer: Schema | str = FUTURE,
    access: Access = Access.IDS,
    body: type[Body] | Schema | None = None,
    takes: tuple[str, ...] = (bodies.JSON_TYPE,),
    errors: tuple[int, ...] | None = None,
    query: Mapping[str, Schema] | None = None,
    example: object = None,
    filters: tuple[object, ...] = (),
    keyed: bool = True,
    scheme: str = KEY_SCHEME,
    prefixes: tuple[str, ...] = (PREFIX,),
    at_root: bool = False,
    late: bool = False,
    quick: bool = False,
) -> Callable[[H], H]:
    """Declare the handler of a path below each of the prefixes. One handler may have several declarations.

    The defaults fit most endpoints, and an example automatically contains the required ids of a typed body. `methods`
    are separated by spaces. `at_root` also serves the path without a prefix. With `late` the handler takes a `Draft`.
    `quick` runs the handler on threads that stay free for short, urgent requests when all other threads are busy.
    """

    def declare(handler: H) -> H:
        endpoint = json_endpoint(handler, body, late=late, quick=quick, operators=access is Access.OPERATOR)
        operations = [
            Operation(
                method=method,
                route=prefix + path,
                summary=summary,
                endpoint=handler if iscoroutinefunction(handler) else endpoint,
                answer=answer,
                access=access,
                body=body,
                takes=takes if body is not None else (),
                errors=_errors(errors, access, answer),
                query=query or {},
                example=_example(example, access, body),
                filters=filters,
                keyed=keyed,
                scheme=scheme,
                at_root=at_root,
            )
            for prefix in prefixes
            for method in methods.split()
        ]
        handler.__dict__["operations"] = [*operations, *handler.__dict__.get("operations", ())]
        return handler

    return declare


def _errors(errors: tuple[int, ...] | None, access: Access, answer: Schema | str) -> tuple[int, ...]:
    if errors is not None:
        return errors
    statuses_by_access = {Access.IDS: (HTTPStatus.NOT_FOUND,), Access.OPERATOR: (HTTPStatus.FORBIDDEN,)}
    return SUBMITTED if answer is FUTURE else statuses_by_access.get(access, ())


def _example(example: object, access: Access, body: type[Body] | Schema | None) -> object:
    if access is not Access.IDS or not isinstance(body, type) or isinstance(example, str):
        return example
    required = [name for name, field in body.model_fields.items() if field.is_required() and name in _ID_FIELDS]
    values = {name: f"{{{name}}}" for name in required} | cast("dict[str, object]", example or {})
    return values or None


def operations_in(*modules: ModuleType) -> list[Operation]:
    """Return the operations of the modules, in the order of declaration."""
    handlers = [member for module in modules for member in vars(module).values() if callable(member)]
    operations = [op for handler in handlers for op in getattr(handler, "operations", ())]
    return list(dict.fromkeys(operations))


@dataclass(frozen=True, slots=True)
class Draft(Generic[B]):
    """A JSON body before validation: an invalid body fails the future instead of the request."""

    model: type[B]
    values: Mapping[str, object]

    def read_required(self, model: type[Required]) -> Required:
        """Read the fields that are required for creating a future."""
        return validate(model, self.values)

    def read(self) -> B:
        return validate(self.model, self.values)


def json_endpoint(
    handler: Handler,
    body: type[Body] | Schema | None = None,
    *,
    takes: str = bodies.JSON_TYPE,
    late: bool = False,
    quick: bool = False,
    operators: bool = False,
) -> Endpoint:
    """Make the endpoint of a function that returns a JSON object or a Submission, for operators only or for every
    tenant. `takes` is the content type of its body.
    """

    async def respond(request: Request) -> Response:
        services, tenant_id = await authenticate(request)
        raw_body = b"" if body is None else await read_body(request, takes)
        encoding = request.headers.get("content-encoding")

        def handle() -> tuple[bytes, tuple[str, ...]]:
            if operators:
                _check_operator(services, tenant_id)
            decoded = bodies.decode(raw_body, encoding, services.settings.max_body_bytes)
            call = call_of(request, services, tenant_id, decoded)
            arguments: list[object] = [call]
            if isinstance(body, type):
                values = read_object(decoded)
                ignored = call.ignored if is_openai(request) or is_anthropic(request) else None
                arguments.append(Draft(body, values) if late else validate(body, values, ignored))
            result = handler(*arguments)
            content = orjson.dumps(store_submission(services, result) if isinstance(result, Submission) else result)
            return content, call.ignored.names

        with request_span(request, services, tenant_id, handler.__name__) if services.tracing.on else nullcontext():
            executor = services.threads.quick if quick else None
            content, names = await run(handle, on=executor)
            report_ignored(services, tenant_id, request.headers.get("user-agent", ""), names)
            return Response(content, headers=build_header(names), media_type=bodies.JSON_TYPE)

    return respond


def new_ignored(services: Services) -> IgnoredFields:
    """Make the collection of a request's ignored fields."""
    return IgnoredFields(strict=services.settings.strict_fields)


def report_ignored(services: Services, tenant_id: str, user_agent: str, names: Sequence[str]) -> None:
    """Count and log the fields of a request that had no effect."""
    services.ignored_fields.report(services.meters.count_ignored_field, tenant_id, user_agent, names)


def _check_operator(services: Services, tenant_id: str) -> None:
    if tenant_id not in services.settings.operator_tenants and not services.tenants.accepts_anyone():
        raise ForbiddenError(
            f"tenant {tenant_id!r} is no operator; the server allows it with TINSMITH_OPERATOR_TENANTS"
        )


def call_of(request: Request, services: Services, tenant_id: str, body: bytes) -> Call:
    """Make the Call of an authenticated request with a decoded body."""
    scope = request.scope
    peer = scope["client"][0] if scope.get("client") else ""
    path, query, headers = request.path_params, request.query_params, request.headers
    return Call(services, tenant_id, body, path, query, headers, scope["scheme"], peer, new_ignored(services))


async def authenticate(request: Request) -> tuple[Services, str]:
    services: Services = request.app.state.services
    if "\x00" in request.scope["path"]:
        raise NotFoundError("the id contains a NUL character")  # Postgres cannot compare it
    if len(request.scope["path"]) > MAX_PATH:
        raise NotFoundError(f"the path has {len(request.scope['path'])} characters; a path has at most {MAX_PATH}")
    if b"%00" in request.scope["query_string"]:
        raise UserError("the query contains a NUL character; leave it out")
    credential = request.headers.get("x-api-key")
    if credential is None and (is_openai(request) or is_anthropic(request) or is_hub(request)):
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        credential = token.strip() if scheme.lower() == "bearer" else None
    if credential is not None and (is_openai(request) or is_anthropic(request)):
        credential = credential.partition(CAPTURE_SEPARATOR)[0]
    quick = services.threads.quick
    if is_hub(request) and await run(services.tenants.accepts_anyone, on=quick):
        credential = ANY_KEY  # these clients send no key, or a token of the hub
    caller = services.tenants.find_cached(credential) or await _authenticate_uncached(services, credential)
    bind_contextvars(tenant_id=caller.tenant_id)  # each request has its own context
    return services, caller.tenant_id


async def _authenticate_uncached(services: Services, credential: str | None) -> Caller:
    """Return the caller of a credential that is not cached. Unknown keys are looked up on separate threads."""
    tenants, threads = services.tenants, services.threads
    if not tenants.is_stranger(credential):
        return await run(tenants.authenticate, credential, on=threads.quick)
    with tenants.admit_stranger():
        return await run(tenants.authenticate, credential, on=threads.strangers)


def capture_session(request: Request) -> str | None:
    """Return the capture session of an OpenAI or Anthropic request, from header or key. Raises UserError."""
    session = request.headers.get(CAPTURE_HEADER)
    if session is None:
        credential = request.headers.get("x-api-key") or request.headers.get("authorization", "")
        session = credential.partition(CAPTURE_SEPARATOR)[2].strip() or None
    if session is not None and not (0 < len(session) <= MAX_CAPTURE and session.isascii() and session.isprintable()):
        raise UserError(f"the capture session is {show(session)}; use 1 to {MAX_CAPTURE} printable ASCII characters")
    return session


def is_openai(request: Request) -> bool:
    """Whether a request comes from an OpenAI client, by its path. Keys and errors then have OpenAI's form."""
    return request.scope["path"].startswith(OPENAI_PATHS) and not is_anthropic(request)


def is_anthropic(request: Request) -> bool:
    """Whether a request comes from an Anthropic client; these always send their API's version."""
    path = request.scope["path"]
    return path.startswith(_ANTHROPIC) or (path.startswith(OPENAI_PATHS) and _ANTHROPIC_HEADER in request.headers)


def is_hub(request: Request) -> bool:
    """Whether a request comes from a client of the Hugging Face hub."""
    return request.scope["path"].startswith(_HUB)


async def read_body(request: Request, takes: str, limit_bytes: int | None = None) -> bytes:
    """Read the raw body. Raises TooLargeError at the first byte beyond the limit."""
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


async def read_json(request: Request, model: type[B]) -> B:
    """Read the typed body of a poll, on the event loop if it is short."""
    services: Services = request.app.state.services
    limit_bytes = min(MAX_POLL_BYTES, services.settings.max_body_bytes)
    body = await read_body(request, bodies.JSON_TYPE, limit_bytes)
    encoding = request.headers.get("content-encoding")

    def read() -> B:
        return validate(model, read_object(bodies.decode(body, encoding, limit_bytes)))

    return read() if encoding is None and len(body) <= INLINE_BODY_BYTES else await run(read)


def request_span(request: Request, services: Services, tenant_id: str, name: str) -> AbstractContextManager[None]:
    """Open a tracing span for the request, as a child of the client's span."""
    attributes = {"tinsmith.tenant_id": tenant_id, "http.request.method": request.method}
    return services.tracing.span(name.lstrip("_"), request.headers.get("traceparent"), attributes)


async def run(function: Callable[..., T], *args: object, on: Executor | None = None) -> T:
    """Call `function` on a worker thread with the request's context. The default of `on` is the handlers' executor."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(on, lambda: context.run(function, *args))


def json_response(content: JsonObject, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, bodies.JSON_TYPE)


MAX_ID_LENGTH = 128
SAVE_KINDS = (
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
)  # with a path, these save a checkpoint

Check = Callable[[Model, str], int]
"""Validates a request for (model, request_id). Returns its number of tokens, or raises UserError."""


class ModelRequest(Body):
    """The required fields of every JSON operation on a model."""

    model_id: Text
    seq_id: Integer | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request, which is stored before the response is sent. Without a seq_id it takes the model's next one.
    `extra_fields` are the fields of the response other than the request_id.
    """

    new: NewFuture
    refusal: UserError | None = None
    extra_fields: JsonObject = field(default_factory=dict)


def store_submission(services: Services, submission: Submission) -> JsonObject:
    """Store a request and return the response."""
    if submission.new.seq_id is None:
        request_id = _submit_next(services, submission)
    else:
        request_id = services.futures.submit(submission.new, submission.refusal)
    if submission.refusal is not None:  # a poll of the whole session may already be waiting for it
        services.waiters.wake_from_thread([request_id])
    return {"request_id": request_id, **submission.extra_fields}


def submit_operation(call: Call, kind: str, model_id: str, seq_id: int | None, check: Check) -> Submission:
    """Validate one operation on a model and return its Submission. Without a seq_id it takes the model's next one."""
    if seq_id is not None:
        check_seq_id(seq_id, first=1)
    model = get_trainable_model(call, model_id)
    request_id = f"{model.model_id}:{seq_id}"
    bind_contextvars(model_id=model.model_id, request_id=request_id)
    num_tokens, refusal = 0, None
    try:
        model.require_usable()
        num_tokens = check(model, request_id)
    except TooManyRequestsError:
        raise  # nothing is stored; the client retries
    except UserError as error:
        refusal = error
    new = NewFuture(
        request_id=request_id,
        tenant_id=call.tenant_id,
        session_id=model.session_id,
        base_model=model.base_model,
        kind=kind,
        body=call.body,
        num_tokens=num_tokens,
        model_id=model.model_id,
        seq_id=seq_id,
        engine_id=model.engine_id,
    )
    if refusal is None:
        call.services.quotas.admit(new)
    return Submission(new, refusal, {"model_id": model.model_id})


def _submit_next(services: Services, submission: Submission) -> str:
    """Store a request under the model's next number. Its id is unique, so that a collision is detected."""
    new, futures = submission.new, services.futures
    assert new.model_id is not None
    while True:
        seq_id = futures.next_seq_id(new.model_id)
        request_id = f"{new.model_id}:{seq_id}:{secrets.token_hex(4)}"
        with suppress(SeqIdTakenError):  # a concurrent request took the number
            return futures.submit(replace(new, request_id=request_id, seq_id=seq_id), submission.refusal)


def submit_json_operation(
    call: Call, kind: str, draft: Draft[B], check: Callable[[Model, B], object], refusal: UserError | None = None
) -> Submission:
    """Validate an operation with a JSON body and return its Submission. `refusal` is an error known before."""
    ids = draft.read_required(ModelRequest)

    def check_body(model: Model, request_id: str) -> int:
        if refusal is not None:
            raise refusal
        check(model, draft.read())
        if kind in SAVE_KINDS and draft.values.get("path") is not None:
            call.services.quotas.admit_checkpoint(call.tenant_id, request_id)
        return 0

    return submit_operation(call, kind, ids.model_id, ids.seq_id, check_body)


def get_trainable_model(call: Call, model_id: str) -> Model:
    """Return a model of the tenant whose session has not ended. Raises UserError otherwise."""
    if len(model_id) > MAX_ID_LENGTH or "\x00" in model_id:  # protobuf does not bound it
        raise NotFoundError(f"model_id {show(model_id)} is unknown")
    model, end_reason = call.services.models.get_with_session(call.tenant_id, model_id)
    if model.state == "copied":
        raise UserError(
            f"training run {model_id!r} holds a copied checkpoint ({model.reason}) and cannot be trained; "
            "create a model from its checkpoint (create_training_client_from_state)"
        )
    if end_reason is not None:
        raise session_has_ended(model.session_id, end_reason)
    return model
