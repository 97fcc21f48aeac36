"""Declares endpoints: `@operation` on a handler is the only declaration of its endpoint.

The declaration defines the route, who may call it, the validation of query and body, the entry in the OpenAPI document,
the row on the reference page of routes, and the case of the isolation test. `app.py` collects the declarations of its
modules.

Each declared handler is wrapped: `access.authorize` runs first, whatever the handler's form. Then follow

- for a function: body size, content type, decoding, validation, the function. Its arguments are the `Call`, the typed
  body if one is declared, and the typed query if one is declared. It runs on a worker thread, may use the database, and
  returns a JSON object or a response.
- for a coroutine function: the coroutine, on the event loop. Its argument is the `Call`. It reads the body itself and
  returns a response.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from inspect import iscoroutinefunction
from types import ModuleType
from typing import TypeVar, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tinsmith.api.access import Access, authorize
from tinsmith.api.ignored_fields import build_header
from tinsmith.api.request import (
    ANTHROPIC_PATHS,
    HUB_PATHS,
    OPENAI_PATHS,
    PREFIX,
    Call,
    Draft,
    is_anthropic,
    is_openai,
    new_ignored,
    open_span,
    read_body,
    report_ignored,
    run,
)
from tinsmith.api.services import Services
from tinsmith.wire import bodies
from tinsmith.wire.fields import Body, Query, Schema, read_object, validate

KEY_SCHEME, BEARER_SCHEME, METRICS_SCHEME = "key", "bearer", "metrics_token"
"""Names of security schemes: the header X-API-Key, a key as bearer token, and the token of the metrics."""
MAX_PAGE = 1000
FORM_TYPE = "multipart/form-data"
FUTURE: Schema = {"$ref": "#/components/schemas/Future"}
SUBMITTED = (404, 410, 429, 501)
"""The error statuses of a request that becomes a future, in addition to those of its form."""
_ID_FIELDS = ("session_id", "model_id", "sampling_session_id", "request_id", "tinker_path")
"""Fields that hold ids of a tenant's objects. Examples give these ids in braces."""

Handler = Callable[..., object]
H = TypeVar("H", bound=Handler)
Endpoint = Callable[[Request], Awaitable[Response]]


class ThreadPool(Enum):
    """The threads on which a function runs."""

    HANDLERS = "for most requests"
    QUICK = "stay free for short, urgent requests when all others are busy"
    TRANSFERS = "for files"

    def executor(self, services: Services) -> Executor | None:
        pools = services.threads
        return {ThreadPool.QUICK: pools.quick, ThreadPool.TRANSFERS: pools.transfers}.get(self)


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One method of one path, as declared.

    `body` is a typed body, or the schema of one that the handler reads itself. `answer` is the schema of the response,
    or the content type if the response is not JSON. `errors` are the statuses in addition to those that follow from the
    declaration. `example` is a body, and `filters` are queries or bodies of a listing, with ids in braces.
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
    query: type[Query] | None
    example: object
    filters: tuple[object, ...]
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
        """The names of the alternative security schemes in the OpenAPI document; empty if none is needed."""
        if self.access is Access.METRICS:
            return (METRICS_SCHEME,)
        if not self.access.needs_key:
            return ()
        takes_bearer = self.route.startswith((*OPENAI_PATHS, *ANTHROPIC_PATHS, HUB_PATHS))
        return (KEY_SCHEME, BEARER_SCHEME) if takes_bearer else (KEY_SCHEME,)

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"


def operation(  # noqa: PLR0913  each parameter is one fact about an endpoint
    methods: str,
    path: str,
    summary: str,
    *,
    answer: Schema | str = FUTURE,
    access: Access = Access.IDS,
    purpose: str = "",
    body: type[Body] | Schema | None = None,
    takes: tuple[str, ...] = (bodies.JSON_TYPE,),
    errors: tuple[int, ...] | None = None,
    query: type[Query] | None = None,
    example: object = None,
    filters: tuple[object, ...] = (),
    prefixes: tuple[str, ...] = (PREFIX,),
    at_root: bool = False,
    late: bool = False,
    threads: ThreadPool = ThreadPool.HANDLERS,
) -> Callable[[H], H]:
    """Declare the handler of a path below each of the prefixes. One handler may have several declarations.

    The defaults fit most endpoints, and an example automatically contains the required ids of a typed body. `methods`
    are separated by spaces. `purpose` is that of the signed link which Access.LINK requires. `at_root` also serves the
    path without a prefix. With `late` the handler takes a `Draft` instead of a valid body. Raises TypeError for an
    option that would have no effect.
    """

    def declare(handler: H) -> H:
        is_coroutine = iscoroutinefunction(handler)
        if is_coroutine and (late or query is not None or threads is not ThreadPool.HANDLERS):
            raise TypeError(f"{handler.__name__} is a coroutine function, which ignores late, query and threads")
        if (access is Access.LINK) != bool(purpose):
            raise TypeError(f"{handler.__name__} needs a purpose if its access is a link, and only then")
        wrap = _wrap_coroutine if is_coroutine else _wrap_function
        endpoint = wrap(_Wrapped(handler, access, purpose, body, takes, query, late, threads))
        operations = [
            Operation(
                method=method,
                route=prefix + path,
                summary=summary,
                endpoint=endpoint,
                answer=answer,
                access=access,
                body=body,
                takes=takes if body is not None else (),
                errors=_errors(errors, access, answer),
                query=query,
                example=_example(example, access, body),
                filters=filters,
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


def endpoint_of(handler: Handler) -> Endpoint:
    """Return the endpoint of a declared handler."""
    return cast("list[Operation]", handler.__dict__["operations"])[0].endpoint


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """A handler, with what its wrapper must know."""

    handler: Handler
    access: Access
    purpose: str
    body: type[Body] | Schema | None
    takes: tuple[str, ...]
    query: type[Query] | None
    late: bool
    threads: ThreadPool

    def call(self, call: Call) -> object:
        """Validate body and query, and call the handler."""
        arguments: list[object] = [call]
        if isinstance(self.body, type):
            if self.late:
                values = read_object(call.body) if call.media_type == bodies.JSON_TYPE else {}
                arguments.append(Draft(self.body, values))
            else:
                values = read_object(call.body)
                takes_unknown = is_openai(call.request) or is_anthropic(call.request)
                arguments.append(validate(self.body, values, call.ignored if takes_unknown else None))
        if self.query is not None:
            arguments.append(validate(self.query, dict(call.request.query_params)))
        return self.handler(*arguments)


def _wrap_coroutine(wrapped: _Wrapped) -> Endpoint:
    handler = cast("Callable[[Call], Awaitable[Response]]", wrapped.handler)

    async def respond(request: Request) -> Response:
        services: Services = request.app.state.services
        tenant_id = await authorize(request, wrapped.access, wrapped.purpose)
        with open_span(request, services, tenant_id, wrapped.handler.__name__):
            return await handler(Call(services, tenant_id, request, ignored=new_ignored(services)))

    return respond


def _wrap_function(wrapped: _Wrapped) -> Endpoint:
    async def respond(request: Request) -> Response:
        services: Services = request.app.state.services
        tenant_id = await authorize(request, wrapped.access, wrapped.purpose)
        raw_body = b"" if wrapped.body is None else await read_body(request, wrapped.takes)
        encoding = request.headers.get("content-encoding")

        def handle() -> tuple[Response | bytes, tuple[str, ...]]:
            decoded = bodies.decode(raw_body, encoding, services.settings.max_body_bytes)
            call = Call(services, tenant_id, request, decoded, new_ignored(services))
            result = wrapped.call(call)
            return result if isinstance(result, Response) else orjson.dumps(result), call.ignored.names

        with open_span(request, services, tenant_id, wrapped.handler.__name__):
            result, names = await run(handle, on=wrapped.threads.executor(services))
            report_ignored(services, tenant_id, request.headers.get("user-agent", ""), names)
            if isinstance(result, Response):
                return result
            return Response(result, headers=build_header(names), media_type=bodies.JSON_TYPE)

    return respond
