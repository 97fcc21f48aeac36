"""Requests: the `Call` that a handler gets, which kind of client sent it, and its body.

A body is read up to the server's limit, decoded and validated. `errors` turns exceptions into responses.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tinsmith.api.services import Services
from tinsmith.errors import UserError
from tinsmith.wire import bodies
from tinsmith.wire.fields import Body, IgnoredFields, read_object, show, validate

T = TypeVar("T")
B = TypeVar("B", bound=Body)
Required = TypeVar("Required", bound=Body)
JsonObject = dict[str, object]

PREFIX = "/api/v1"  # of every path except those of OPENAI
OPENAI = ("/v1", "/oai/api/v1")
"""The two prefixes of OpenAI's paths."""
OPENAI_PATHS = (*(f"{prefix}/" for prefix in OPENAI), "/inference/v1/", "/tokenize", "/detokenize")
"""The prefixes of all paths for clients of OpenAI's protocol. The paths at the root are vLLM's."""
ANTHROPIC = ("/anthropic/api/v1", *OPENAI)
"""The prefixes of Anthropic's paths. On shared prefixes, the path or a header identifies Anthropic's clients."""
HUB = "/hub"
"""The prefix for clients of the Hugging Face hub."""
HUB_PATHS = f"{HUB}/"
ANTHROPIC_PATHS = (f"{ANTHROPIC[0]}/", *(f"{prefix}/messages" for prefix in OPENAI))
_ANTHROPIC_HEADER = "anthropic-version"
CAPTURE_HEADER, CAPTURE_SEPARATOR = "x-tinsmith-session", "#"
"""A request names its capture session in this header, or after this separator in its API key."""
MAX_CAPTURE = 128
IDEMPOTENCY_HEADERS = ("idempotency-key", "x-idempotency-key")
"""The header of an idempotency key: the name of the IETF's draft, and that of the SDK."""
MAX_IDEMPOTENCY_KEY = 256
MAX_POLL_BYTES = 16 << 20
INLINE_BODY_BYTES = 64 << 10
"""Largest body whose parsing takes less time than a thread switch."""


@dataclass(frozen=True, slots=True)
class Call:
    """An authorized request. `tenant_id` is "" on an endpoint that needs no key; `body` is empty for a coroutine, which
    reads the body itself.
    """

    services: Services
    tenant_id: str
    request: Request
    body: bytes = b""
    ignored: IgnoredFields = field(default_factory=IgnoredFields)

    @property
    def path(self) -> Mapping[str, str]:
        """The parameters in the path."""
        return self.request.path_params

    @property
    def headers(self) -> Mapping[str, str]:
        return self.request.headers

    @property
    def scheme(self) -> str:
        return self.request.scope["scheme"]

    @property
    def peer(self) -> str:
        """The address of the client or of the nearest proxy."""
        client = self.request.scope.get("client")
        return client[0] if client else ""

    @property
    def media_type(self) -> str:
        """The content type of the body, without parameters."""
        return bodies.read_media_type(self.request.headers.get("content-type"))


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


# Kinds of clients.


def is_openai(request: Request) -> bool:
    """Whether a request comes from an OpenAI client, by its path. Keys and errors then have OpenAI's form."""
    return request.scope["path"].startswith(OPENAI_PATHS) and not is_anthropic(request)


def is_anthropic(request: Request) -> bool:
    """Whether a request comes from an Anthropic client; these always send their API's version."""
    path = request.scope["path"]
    return path.startswith(ANTHROPIC_PATHS) or (path.startswith(OPENAI_PATHS) and _ANTHROPIC_HEADER in request.headers)


def is_hub(request: Request) -> bool:
    """Whether a request comes from a client of the Hugging Face hub."""
    return request.scope["path"].startswith(HUB_PATHS)


def capture_session(request: Request) -> str | None:
    """Return the capture session of an OpenAI or Anthropic request, from header or key. Raises UserError."""
    session = request.headers.get(CAPTURE_HEADER)
    if session is None:
        credential = request.headers.get("x-api-key") or request.headers.get("authorization", "")
        session = credential.partition(CAPTURE_SEPARATOR)[2].strip() or None
    if session is not None and not (0 < len(session) <= MAX_CAPTURE and session.isascii() and session.isprintable()):
        raise UserError(f"the capture session is {show(session)}; use 1 to {MAX_CAPTURE} printable ASCII characters")
    return session


def idempotency_key(call: Call) -> str | None:
    """The key that marks repetitions of a request, or None. Raises UserError."""
    keys = list(dict.fromkeys(key for name in IDEMPOTENCY_HEADERS if (key := call.headers.get(name))))
    if len(keys) > 1:
        raise UserError(
            f"Idempotency-Key is {show(keys[0])} and X-Idempotency-Key is {show(keys[1])}; send one of them"
        )
    if keys and len(keys[0]) > MAX_IDEMPOTENCY_KEY:
        raise UserError(f"the header Idempotency-Key is {show(keys[0])}; use at most {MAX_IDEMPOTENCY_KEY} characters")
    return keys[0] if keys else None


# Bodies.


async def read_body(request: Request, takes: Sequence[str], limit_bytes: int | None = None) -> bytes:
    """Read the raw body of one of the content types `takes`. Raises TooLargeError at the first byte beyond the limit,
    and UnsupportedMediaError.
    """
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
    body = await read_body(request, (bodies.JSON_TYPE,), limit_bytes)
    encoding = request.headers.get("content-encoding")

    def read() -> B:
        return validate(model, read_object(bodies.decode(body, encoding, limit_bytes)))

    return read() if encoding is None and len(body) <= INLINE_BODY_BYTES else await run(read)


def new_ignored(services: Services) -> IgnoredFields:
    """Make the collection of a request's ignored fields."""
    return IgnoredFields(strict=services.settings.strict_fields)


def report_ignored(services: Services, tenant_id: str, user_agent: str, names: Sequence[str]) -> None:
    """Count and log the fields of a request that had no effect."""
    services.ignored_fields.report(services.meters.count_ignored_field, tenant_id, user_agent, names)


# Work and responses.


def open_span(request: Request, services: Services, tenant_id: str, name: str) -> AbstractContextManager[None]:
    """Open a tracing span for the request, as a child of the client's span."""
    if not services.tracing.on:
        return nullcontext()
    attributes = {"tinsmith.tenant_id": tenant_id, "http.request.method": request.method}
    return services.tracing.span(name.lstrip("_"), request.headers.get("traceparent"), attributes)


async def run(function: Callable[..., T], *args: object, on: Executor | None = None) -> T:
    """Call `function` on a worker thread with the request's context. The default of `on` is the handlers' executor."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(on, lambda: context.run(function, *args))


def json_response(content: JsonObject, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, bodies.JSON_TYPE)
