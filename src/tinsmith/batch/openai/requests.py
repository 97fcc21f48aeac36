"""The one check of a file of requests: at its upload, when its batch or bulk job begins, and of a message batch.

A line that is not blank is a request `{custom_id, method, url, body}`. All requests of a file are to one endpoint and,
except for messages, name one model; each `custom_id` is used once. A body is otherwise checked when it is answered. One
line is in memory at a time. Error codes are OpenAI's where it has one.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from tinsmith.batch.openai import ENDPOINTS, MAX_INPUT_BYTES, MAX_REQUESTS, MESSAGES
from tinsmith.errors import UserError

MAX_SHOWN = 100
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SPACES = b" \t\r\n"


class Problem(NamedTuple):
    """Why a line is no request, or with `line` None why the file is not one of requests. `param` is the field."""

    code: str
    param: str | None
    message: str
    line: int | None = None

    def __str__(self) -> str:
        return self.message if self.line is None else f"line {self.line}: {self.message}"


@dataclass(frozen=True, slots=True)
class RequestsCheck:
    """`problems` is empty for a valid file; at most `MAX_SHOWN` are listed. `model` is the one that all name."""

    total: int
    model: str | None
    problems: list[Problem]

    def __str__(self) -> str:
        return "; ".join(map(str, self.problems))


def check_file(file: IO[bytes], size: int, max_line_bytes: int, endpoints: Sequence[str] = ENDPOINTS) -> RequestsCheck:
    """Check the file of a batch, of so many bytes, whose requests are to one of these endpoints."""
    if size > MAX_INPUT_BYTES:
        problem = Problem("file_too_large", None, f"the file is larger than {MAX_INPUT_BYTES} bytes; split it")
        return RequestsCheck(0, None, [problem])
    return check_requests(read_lines(file, max_line_bytes), endpoints, max_line_bytes, MAX_REQUESTS)


def check_requests(
    lines: Iterable[tuple[int, bytes]],
    endpoints: Sequence[str] = (*ENDPOINTS, MESSAGES),
    max_line_bytes: int | None = None,
    max_requests: int | None = None,
) -> RequestsCheck:
    """Check the numbered lines of a file. None means no limit."""
    checker = _Checker(endpoints, max_line_bytes)
    problems: list[Problem] = []
    total = 0
    for line_number, line in lines:
        total += 1
        if max_requests is not None and total > max_requests:
            message = f"the file has more than {max_requests} requests; split it"
            return RequestsCheck(0, None, [Problem("too_many_tasks", None, message)])
        if (problem := checker.check(line)) is not None:
            problems.append(problem._replace(line=line_number))
            if len(problems) == MAX_SHOWN:
                break
    if total == 0:
        problems.append(Problem("empty_file", None, "the file holds no request"))
    return RequestsCheck(total, checker.model, problems)


def read_lines(file: IO[bytes], max_line_bytes: int | None = None) -> Iterator[tuple[int, bytes]]:
    """The numbered lines that are not blank; one above the limit, if there is one, is cut one byte after it."""
    size = -1 if max_line_bytes is None else max_line_bytes + 1
    if file.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
        file.seek(0)
    line_number = 0
    while line := file.readline(size):
        line_number += 1
        tail = line
        while not tail.endswith(b"\n") and (tail := file.readline(size)):
            pass
        if stripped := line.strip(SPACES):
            yield line_number, stripped


class _Checker:
    """What the requests of a file have in common, as far as it was read."""

    def __init__(self, endpoints: Sequence[str], max_line_bytes: int | None) -> None:
        self.model: str | None = None
        self._endpoints = endpoints
        self._max_line_bytes = max_line_bytes
        self._custom_ids: set[str] = set()

    def check(self, line: bytes) -> Problem | None:
        if self._max_line_bytes is not None and len(line) > self._max_line_bytes:
            return Problem("request_too_large", None, f"the request is longer than {self._max_line_bytes} bytes")
        # Loaded here, since the module needs pydantic, which a user's own interpreter may lack.
        from tinsmith.wire.fields import read_object

        try:
            request = read_object(line)
        except UserError as error:
            return Problem("invalid_json_line", None, str(error).replace("the body", "the line"))
        return self._check_envelope(request) or self._check_model(request["url"], request["body"])

    def _check_envelope(self, request: dict[str, Any]) -> Problem | None:
        for param in ("custom_id", "method", "url", "body"):
            if request.get(param) is None:
                return Problem("missing_required_parameter", param, f"{param} is missing")
        name, url = request["custom_id"], request["url"]
        if not isinstance(name, str) or not name:
            message = f"custom_id is {_quote(name)}; it must be a text that is not empty"
            return Problem("invalid_custom_id", "custom_id", message)
        if name in self._custom_ids:
            message = f"custom_id {_quote(name)} is used by an earlier request"
            return Problem("duplicate_custom_id", "custom_id", message)
        self._custom_ids.add(name)
        if request["method"] != "POST":
            return Problem("invalid_method", "method", f"method is {_quote(request['method'])}; it must be 'POST'")
        if url not in self._endpoints:
            is_fixed = len(self._endpoints) == 1
            allowed = (
                repr(self._endpoints[0]) if is_fixed else f"one of {list(self._endpoints)}, the same for all requests"
            )
            return Problem("url_mismatch", "url", f"url is {_quote(url)}; it must be {allowed}")
        self._endpoints = (url,)
        if not isinstance(request["body"], dict):
            return Problem("invalid_body", "body", f"body is {_quote(request['body'])}; it must be an object")
        return None

    def _check_model(self, url: str, body: dict[str, Any]) -> Problem | None:
        if url == MESSAGES:  # each request names its own, and is checked when it is answered
            return None
        from tinsmith.wire.fields import MAX_TEXT, show

        model, param = body.get("model"), "body.model"
        if model is None or model == "":
            message = "body.model is missing; name the model, the same for all requests"
            return Problem("missing_required_parameter", param, message)
        if not isinstance(model, str) or len(model) > MAX_TEXT or "\0" in model:
            message = f"body.model is {show(model)}; it must be a string of at most {MAX_TEXT} characters without NUL"
            return Problem("invalid_model", param, message)
        if self.model not in (None, model):
            message = f"body.model is {model[:200]!a}, but earlier requests use {self.model[:200]!a}; use one for all"
            return Problem("model_mismatch", param, message)
        self.model = model
        return None


def _quote(value: object) -> str:
    return repr(value[:200]) if isinstance(value, str) else reprlib.repr(value)
