"""Maps exceptions to HTTP responses.

The body is `{"detail": TEXT}`, or `{"error": {...}}` on the paths of OpenAI and Anthropic. It is never empty, because
the SDK retries an empty 400 for minutes. A TinsmithError carries its own status, an unreachable database or object
store is a 503, and any other exception is a 500 with the id of its log entry. Request bodies and headers are not
logged.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from http import HTTPStatus

import structlog
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, TimeoutError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import HTTPExceptionHandler

from tinsmith.api.request import is_anthropic, is_hub, is_openai, json_response
from tinsmith.chat.generation_request import ContextLengthError
from tinsmith.chat.messages import anthropic_error
from tinsmith.chat.results import openai_error
from tinsmith.db.database import DatabaseMovedError
from tinsmith.errors import InvalidTokenError, MissingKeyError, TinsmithError, TooManyRequestsError
from tinsmith.exchange.hub import MissingEntryError, MissingError
from tinsmith.storage.stores import UnreachableError

log = structlog.get_logger()

CLIENT_CLOSED_REQUEST = 499
MAX_HEADER = 1000


def error_response(
    request: Request,
    text: str,
    status: int,
    headers: Mapping[str, str] | None = None,
    error: TinsmithError | None = None,
) -> Response:
    if is_hub(request):
        return json_response({"detail": text}, status, {**(headers or {}), **hub_headers(text, status, error)})
    if not (is_openai(request) or is_anthropic(request)):
        return json_response({"detail": text}, status, headers)
    if status == HTTPStatus.NOT_IMPLEMENTED:  # these clients retry a 501
        status = HTTPStatus.BAD_REQUEST
    if is_anthropic(request):
        return json_response(anthropic_error(anthropic_text(text, status, error), status), status, headers)
    return json_response({"error": openai_error(_openai_text(text, status, error), status, error)}, status, headers)


def _openai_text(text: str, status: int, error: TinsmithError | None) -> str:
    """Return the text as OpenAI words it, since clients match on the first words of some errors."""
    if isinstance(error, MissingKeyError):
        return "You didn't provide an API key. Send it as Authorization: Bearer KEY; a key starts with 'tml-'"
    return f"Incorrect API key provided: {text}" if status == HTTPStatus.UNAUTHORIZED else text


def anthropic_text(text: str, status: int, error: TinsmithError | None) -> str:
    if isinstance(error, ContextLengthError):
        return error.anthropic
    if isinstance(error, MissingKeyError):
        return "x-api-key header is required; a key starts with 'tml-'"
    return f"invalid x-api-key: {text}" if status == HTTPStatus.UNAUTHORIZED else text


def hub_headers(text: str, status: int, error: TinsmithError | None) -> dict[str, str]:
    """Return the headers in which clients of the Hugging Face hub read an error."""
    headers = {"x-error-message": " ".join(text.encode("ascii", "backslashreplace").decode().split())[:MAX_HEADER]}
    if status == HTTPStatus.NOT_FOUND:
        headers["x-error-code"] = error.code if isinstance(error, MissingError) else MissingError.code
    if isinstance(error, MissingEntryError):
        headers["x-repo-commit"] = error.commit
    return headers


def on_tinsmith_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TinsmithError)
    headers = {}
    if isinstance(error, TooManyRequestsError):
        wait_s = error.retry_after_s
        headers = {"retry-after-ms": str(round(wait_s * 1000)), "retry-after": str(math.ceil(wait_s))}
    elif isinstance(error, InvalidTokenError):
        headers = {"WWW-Authenticate": 'Bearer error="invalid_token"'}  # makes the SDK exchange its key and retry
    return error_response(request, str(error), error.status, headers, error)


def on_http_exception(request: Request, error: Exception) -> Response:
    """Respond to an error of the router: an unknown path or method."""
    assert isinstance(error, HTTPException)
    detail = error.detail
    if error.status_code == HTTPStatus.NOT_FOUND:
        path = request.url.path[:200]
        detail = f"not found: {request.method} {path!a}; the API's paths begin with /api/v1/ or /v1/"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.url.path[:200]!a} does not accept {request.method}"
    return error_response(request, detail, error.status_code, error.headers)


def on_disconnect(request: Request, _error: Exception) -> Response:
    return error_response(request, "the client disconnected before its body was complete", CLIENT_CLOSED_REQUEST)


def on_unexpected(request: Request, error: Exception) -> Response:
    error_id = uuid.uuid4().hex
    log.error("unexpected error", error_id=error_id, method=request.method, path=request.url.path, exc_info=error)
    return error_response(
        request, f"the server failed on this request; its log has the details under error_id={error_id}", 500
    )


def _unavailable(request: Request, event: str, error: Exception, detail: str, level: str = "error") -> Response:
    getattr(log, level)(event, method=request.method, path=request.url.path, error=str(error))
    return error_response(request, detail, 503, {"retry-after-ms": "1000", "retry-after": "1"})


def on_unreachable_database(request: Request, error: Exception) -> Response:
    detail = "the server's database does not answer; try again in a moment"
    return _unavailable(request, "the database does not answer", error, detail)


def on_lost_database(request: Request, error: Exception) -> Response:
    detail = "the server's database was moved or deleted; nothing was stored, and the server stops: tell its operator"
    return _unavailable(request, "the database is gone", error, detail, "critical")


def on_unreachable_store(request: Request, error: Exception) -> Response:
    detail = "the server's object store does not answer; try again in a moment"
    return _unavailable(request, "the object store does not answer", error, detail)


def on_database_error(request: Request, error: Exception) -> Response:
    """Respond to an error of the database. A broken connection raises several classes, depending on when it breaks."""
    assert isinstance(error, DBAPIError)
    is_disconnected = error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)
    return on_unreachable_database(request, error) if is_disconnected else on_unexpected(request, error)


HANDLERS: dict[type[Exception], HTTPExceptionHandler] = {
    TinsmithError: on_tinsmith_error,
    HTTPException: on_http_exception,
    ClientDisconnect: on_disconnect,
    DBAPIError: on_database_error,
    DatabaseMovedError: on_lost_database,
    UnreachableError: on_unreachable_store,
    TimeoutError: on_unreachable_database,
    Exception: on_unexpected,
}
