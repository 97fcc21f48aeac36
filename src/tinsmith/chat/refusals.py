"""What a request is refused with: a user's error that also names the field, as these clients expect it."""

from __future__ import annotations

from tinsmith.errors import UserError
from tinsmith.wire.fields import Fields


class RequestError(UserError):
    """The request cannot be served as it is."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def not_supported(param: str, why: str) -> RequestError:
    """What this server has not got: a 400 all the same, since these clients send a 501 again."""
    return RequestError(param, f"{param} is not supported by this server: {why}", "unsupported_parameter")


def refuse_unknown(fields: Fields, known: frozenset[str], reasons: dict[str, str]) -> None:
    """Refuse fields that are not known; one at its empty value (null, false, 0, "", []) asks for nothing."""
    for name in fields.values.keys() - known:
        if fields.values[name] or (isinstance(fields.values[name], int | float) and name not in reasons):
            path = fields.path(name)
            raise not_supported(path, reasons.get(name, f"leave it out (known: {', '.join(sorted(known))})"))
