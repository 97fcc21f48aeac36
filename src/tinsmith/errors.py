"""The exceptions that Tinsmith raises deliberately.

`category` (the SDK's RequestErrorCategory) names the side that must act, `status` is the HTTP status of an immediate
response, and the docstring is the default message. `api/errors.py` maps the classes to HTTP responses, the engine to
failed futures.
"""

from __future__ import annotations

import json


class TinsmithError(Exception):
    """Something went wrong in Tinsmith."""

    category: str = "server"
    status: int = 500

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (self.__doc__ or "").strip())


class UserError(TinsmithError):
    """The request is not valid."""

    category = "user"
    status = 400


class RequestError(UserError):
    """A field of a request is wrong; `param` is its path, `code` is OpenAI's error code."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def not_supported(param: str, reason: str) -> RequestError:
    """The error for a field or value that this server does not support: a 400, because OpenAI's clients retry a 501."""
    return RequestError(param, f"{param} is not supported by this server: {reason}", "unsupported_parameter")


class NotAuthenticatedError(UserError):
    """Missing or malformed API key: send the X-API-Key header with a key that starts with 'tml-'."""

    status = 401


class MissingKeyError(NotAuthenticatedError):
    """The API key is missing: send the X-API-Key header with a key that starts with 'tml-'."""


class ForbiddenError(UserError):
    """This is not allowed."""

    status = 403


class InvalidTokenError(NotAuthenticatedError):
    """The token is invalid or has expired: exchange the key for a new one."""


class NotFoundError(UserError):
    """Not found, or it belongs to another tenant."""

    status = 404


class GoneError(UserError):
    """The session has ended."""

    status = 410


class TooLargeError(UserError):
    """The request body is too large."""

    status = 413


class UnsupportedMediaError(UserError):
    """The content type or encoding of the body is not supported."""

    status = 415


class TooManyRequestsError(UserError):
    """A limit is reached; try again later."""

    status = 429

    def __init__(self, message: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SeqIdTakenError(UserError):
    """The seq_id belongs to another request."""

    # Not 409: the SDK would retry it.


class NotSupportedError(UserError):
    """Tinsmith does not support this yet."""

    status = 501


class StoppingError(TinsmithError):
    """The server is stopping; send the request again."""

    status = 503


class CheckpointExistsError(UserError):
    """A checkpoint of this name exists already; pass overwrite=True or choose another name."""


class LateLoadError(UserError):
    """This server loads a checkpoint into a model only before its first operation (`refuse_late_loads`)."""


class NonFiniteGradientError(UserError):
    """The gradient contains NaN or infinite numbers, so the step was not applied and the gradient was dropped."""


class LostStateError(TinsmithError):
    """The state that this request needs was lost when an engine stopped."""


class CorruptFilesError(TinsmithError):
    """Files in the server's storage differ from what was written."""


class EngineFailedError(TinsmithError):
    """The engine failed while it worked on this request."""


class RanksLostError(TinsmithError):
    """A rank of the base model has ended, does not respond, or is out of step with the others."""


class RankFailedError(TinsmithError):
    """A rank of the base model failed while it executed a command."""


class SettingsError(TinsmithError):
    """The settings contradict each other."""

    category = "user"


def refusal(status: int, text: str) -> TinsmithError:
    """Return the exception for another server's error response, with its `detail` or the start of its text."""
    try:
        message = str(json.loads(text).get("detail") or text)
    except (ValueError, AttributeError):
        message = text[:500]
    if status == NotFoundError.status:
        return NotFoundError(message)
    kind = TinsmithError if status >= TinsmithError.status else UserError
    return kind(f"{message} (HTTP {status})")
