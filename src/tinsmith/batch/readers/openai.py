"""Files of OpenAI's Batch API: `{custom_id, method, url, body}`, a request a line."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinsmith.batch.protocols import Row
from tinsmith.batch.readers.lines import JsonReader
from tinsmith.batch.registry import INPUT_READER_REGISTRY
from tinsmith.errors import UserError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_SHOWN = 100


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
        rows = super().__len__()
        for row in range(rows):
            if len(found) == MAX_SHOWN:
                break
            try:
                [request] = self.download_batch(row, row, "")
            except ValueError as error:
                found.append({"code": "invalid_json", "line": row + 1, "message": str(error), "param": None})
                continue
            if problem := _problem(request, seen):
                param, message = problem
                text = f"request {row + 1}: {message}"
                found.append({"code": "invalid_request", "line": row + 1, "message": text, "param": param})
        return found


def _problem(request: Row, seen: set[str]) -> tuple[str, str] | None:
    name = request.get("custom_id")
    if not isinstance(name, str) or not name:
        return "custom_id", f"custom_id is {name!r}; it must be a text that is not empty"
    if name in seen:
        return "custom_id", f"custom_id {name!r} is that of an earlier request"
    seen.add(name)
    if request.get("method") != "POST":
        return "method", f"method is {request.get('method')!r}; it must be 'POST'"
    if request.get("url") not in URLS:
        return "url", f"url is {request.get('url')!r}; it must be one of {list(URLS)}"
    if not isinstance(request.get("body"), dict):
        return "body", f"body is {request.get('body')!r}; it must be an object"
    return None
