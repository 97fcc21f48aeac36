"""Every error that Tinsmith raises on purpose, in one tree.

Each class says whose fault it is (`category`, the SDK's RequestErrorCategory) and which HTTP status it has when
it is answered at once. The docstring is the default message. `api/errors.py` maps the tree to HTTP; the
engine maps it to a failed future. Nothing here does I/O.
"""

from __future__ import annotations


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


class NotAuthenticatedError(UserError):
    """Missing or malformed API key: send the X-API-Key header with a key that starts with 'tml-'."""

    status = 401


class MissingKeyError(NotAuthenticatedError):
    """There is no API key: send the X-API-Key header with a key that starts with 'tml-'."""


class ForbiddenError(UserError):
    """This is not allowed."""

    status = 403


class InvalidTokenError(NotAuthenticatedError):
    """The token is not valid (any more): exchange the key for a new one."""


class NotFoundError(UserError):
    """There is no such thing, or it belongs to someone else."""

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

    # Not 409: the SDK sends what is answered so again.


class NotSupportedError(UserError):
    """Tinsmith does not support this yet."""

    status = 501


class StoppingError(TinsmithError):
    """The server is stopping; send the request again."""

    status = 503


class CheckpointExistsError(UserError):
    """A checkpoint of this name exists already; pass overwrite=True or choose another name."""


class LateLoadError(UserError):
    """A checkpoint can only be loaded into a model that has done nothing yet."""


class NonFiniteGradientError(UserError):
    """The gradient holds NaN or infinite numbers, so the step was not applied and the gradient was dropped."""


class LostStateError(TinsmithError):
    """The state that this request needs was lost when an engine stopped."""


class CorruptFilesError(TinsmithError):
    """Files on the server's disk are not as they were written."""


class EngineFailedError(TinsmithError):
    """The engine failed while it worked on this request."""


class RanksLostError(TinsmithError):
    """A rank of the group that holds the base model has ended, does not answer, or does other work than the rest."""


class SettingsError(TinsmithError):
    """The settings contradict each other."""

    category = "user"
