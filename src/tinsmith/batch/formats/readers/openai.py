"""Files of OpenAI's Batch API: `{custom_id, method, url, body}`, a request a line."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tinsmith.batch.formats.protocols import Row
from tinsmith.batch.formats.readers.lines import JsonReader
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY
from tinsmith.errors import UserError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_SHOWN = 100
PAGE = 256


@INPUT_READER_REGISTRY.type_register(name="openai_batch")
@dataclass
class OpenAIBatchReader(JsonReader):
    """The requests; all are checked before any is made, as their `custom_id`s must differ."""

    _checked: bool = field(default=False, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        if not self._checked:
            if problems := self.problems():
                raise UserError(
                    f"{self.path} is no batch file: " + "; ".join(str(each["message"]) for each in problems)
                )
            self._checked = True
        return super().__len__()

    def problems(self) -> list[Row]:
        """What is wrong with the file, at most a hundred things: {code, line, message, param}."""
        found: list[Row] = []
        seen: set[str] = set()
        for row, request in self._requests(super().__len__()):
            if len(found) == MAX_SHOWN:
                break
            if isinstance(request, ValueError):
                found.append({"code": "invalid_json_line", "line": row + 1, "message": str(request), "param": None})
            elif problem := problem_of(request, seen):
                code, param, message = problem
                text = f"request {row + 1}: {message}"
                found.append({"code": code, "line": row + 1, "message": text, "param": param})
        return found

    def _requests(self, rows: int) -> Iterator[tuple[int, Row | ValueError]]:
        """Some hundred at a time; where these cannot be read together, each alone."""
        for start in range(0, rows, PAGE):
            end = min(start + PAGE, rows) - 1
            try:
                yield from enumerate(self.download_batch(start, end, ""), start)
            except ValueError:
                for row in range(start, end + 1):
                    try:
                        [request] = self.download_batch(row, row, "")
                        yield row, request
                    except ValueError as error:
                        yield row, error


def problem_of(request: Row, seen: set[str], urls: Sequence[str] = URLS) -> tuple[str, str, str] | None:
    """(code, param, message) of what is wrong with a request; `seen` are the custom_ids of those before it."""
    for param in ("custom_id", "method", "url", "body"):
        if request.get(param) is None:
            return "missing_required_parameter", param, f"{param} is missing"
    name, url = request["custom_id"], request["url"]
    if not isinstance(name, str) or not name:
        return "invalid_custom_id", "custom_id", f"custom_id is {_shown(name)}; it must be a text that is not empty"
    if name in seen:
        return "duplicate_custom_id", "custom_id", f"custom_id {_shown(name)} is that of an earlier request"
    seen.add(name)
    if request["method"] != "POST":
        return "invalid_method", "method", f"method is {_shown(request['method'])}; it must be 'POST'"
    if url not in urls:
        wanted = repr(urls[0]) if len(urls) == 1 else f"one of {list(urls)}"
        return "url_mismatch", "url", f"url is {_shown(url)}; it must be {wanted}"
    if not isinstance(request["body"], dict):
        return "invalid_body", "body", f"body is {_shown(request['body'])}; it must be an object"
    return None


def _shown(value: object) -> str:
    return repr(value[:200]) if isinstance(value, str) else reprlib.repr(value)
