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


class ContextLengthError(RequestError):
    """Prompt and answer are longer than the model's context. Clients match on the first words, OpenAI's or Anthropic's.

    `max_tokens` is None where the request set no limit; `param` is the field that holds the prompt.
    """

    def __init__(self, param: str, num_prompt: int, max_tokens: int | None, context: int) -> None:
        self.num_prompt, self.max_tokens, self.context = num_prompt, max_tokens, context
        asked = (
            f"your {param} resulted in {num_prompt} tokens, which leaves none for the completion"
            if max_tokens is None
            else f"you requested {num_prompt + max_tokens} tokens ({num_prompt} in the {param}, {max_tokens} in the "
            "completion)"
        )
        super().__init__(
            param,
            f"This model's maximum context length is {context} tokens. However, {asked}. Please reduce the length of "
            f"the {param} or of the completion (max_tokens).",
            "context_length_exceeded",
        )

    @property
    def anthropic(self) -> str:
        if self.max_tokens is None or self.num_prompt >= self.context:
            return f"prompt is too long: {self.num_prompt} tokens > {self.context - 1} maximum"
        return (
            f"input length and `max_tokens` exceed context limit: {self.num_prompt} + {self.max_tokens} > "
            f"{self.context}, decrease input length or `max_tokens` and try again"
        )


def not_supported(param: str, why: str) -> RequestError:
    """What this server has not got: a 400 all the same, since these clients send a 501 again."""
    return RequestError(param, f"{param} is not supported by this server: {why}", "unsupported_parameter")


def refuse_unknown(fields: Fields, known: frozenset[str], reasons: dict[str, str]) -> None:
    """Refuse fields that are not known; one at its empty value (null, false, 0, "", []) asks for nothing."""
    for name in fields.values.keys() - known:
        if fields.values[name] or (isinstance(fields.values[name], int | float) and name not in reasons):
            path = fields.path(name)
            raise not_supported(path, reasons.get(name, f"leave it out (known: {', '.join(sorted(known))})"))
