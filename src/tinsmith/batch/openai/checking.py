"""What a file of requests must be before anything of it is done, and what is wrong with it, line by line.

One line is in memory at a time, and no line is longer than a request's body may be. The codes are OpenAI's where it has
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tinsmith.batch.formats.readers.openai import problem_of
from tinsmith.batch.openai import MAX_INPUT_BYTES, MAX_REQUESTS
from tinsmith.errors import UserError
from tinsmith.storage.stores import open_store
from tinsmith.wire.fields import read_object

MAX_SHOWN = 100
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SPACES = b" \t\r\n"

Problem = dict[str, object]


@dataclass(frozen=True, slots=True)
class Checked:
    """`problems` is empty where the file is good; at most a hundred are listed."""

    total: int
    model: str | None
    problems: list[Problem]


def check(location: str, endpoint: str, max_line_bytes: int) -> Checked:
    store, key = open_store(location)
    if store.head(key).size > MAX_INPUT_BYTES:
        return _refused("file_too_large", f"the file is larger than {MAX_INPUT_BYTES} bytes; split it")
    problems: list[Problem] = []
    seen: set[str] = set()
    model: str | None = None
    total = 0
    for number, line in lines(location, max_line_bytes):
        total += 1
        if total > MAX_REQUESTS:
            return _refused("too_many_tasks", f"the file has more than {MAX_REQUESTS} requests; split it")
        found, named = _judge(line, max_line_bytes, endpoint, seen, model)
        model = model or named
        if found is not None:
            code, param, message = found
            problems.append({"code": code, "line": number, "message": message, "param": param})
            if len(problems) == MAX_SHOWN:
                break
    if total == 0:
        return _refused("empty_file", "the file holds no request")
    return Checked(total, model, problems)


def lines(location: str, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Lines that hold more than spaces, each with its number; a longer one is cut one byte above the limit."""
    store, key = open_store(location)
    with store.open(key) as file:
        if file.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
            file.seek(0)
        number = 0
        while line := file.readline(max_line_bytes + 1):
            number += 1
            rest = line
            while not rest.endswith(b"\n") and (rest := file.readline(max_line_bytes)):
                pass
            if stripped := line.strip(SPACES):
                yield number, stripped


def _refused(code: str, message: str) -> Checked:
    return Checked(0, None, [{"code": code, "line": None, "message": message, "param": None}])


def _judge(
    line: bytes, max_line_bytes: int, endpoint: str, seen: set[str], model: str | None
) -> tuple[tuple[str, str | None, str] | None, str | None]:
    """(code, param, message) of what is wrong with a line, and the model that it names."""
    if len(line) > max_line_bytes:
        return ("request_too_large", None, f"the request is longer than {max_line_bytes} bytes"), None
    try:
        asked = read_object(line)
    except UserError as error:
        return ("invalid_json_line", None, str(error).replace("the body", "the line")), None
    if found := problem_of(dict(asked.values), seen, (endpoint,)):
        return found, None
    try:
        named = asked.fields("body").text_or("model", None)
    except UserError as error:
        return ("invalid_model", "body.model", str(error)), None
    if not named:
        return ("missing_required_parameter", "body.model", "body.model is missing; name the batch's model"), None
    if model not in (None, named):
        message = f"body.model is {named[:200]!a}, and that of earlier requests is {model[:200]!a}; use one for all"
        return ("model_mismatch", "body.model", message), named
    return None, named
