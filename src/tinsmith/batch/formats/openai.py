"""OpenAI's batch files: requests `{custom_id, method, url, body}`, results `{id, custom_id, response, error}`."""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tinsmith.batch.formats.encoding import encode
from tinsmith.batch.formats.lines import JsonReader, JsonWriter
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY, OUTPUT_WRITER_REGISTRY
from tinsmith.batch.types import PartInfo, Row, RowRange
from tinsmith.errors import UserError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
MAX_SHOWN = 100
PAGE = 256


@INPUT_READER_REGISTRY.type_register(name="openai_batch")
@dataclass
class OpenAIBatchReader(JsonReader):
    """The requests. All are checked before the first is run, since each `custom_id` must be unique."""

    @cached_property
    def _rows(self) -> int:
        if problems := self.problems():
            raise UserError(
                f"{self.path} is not a batch file: " + "; ".join(str(problem["message"]) for problem in problems)
            )
        return super().__len__()

    def __len__(self) -> int:
        return self._rows

    def problems(self) -> list[Row]:
        """The errors of the file, at most `MAX_SHOWN`: {code, line, message, param}."""
        errors: list[Row] = []
        custom_ids: set[str] = set()
        for row, request in self._requests(super().__len__()):
            if len(errors) == MAX_SHOWN:
                break
            if isinstance(request, ValueError):
                errors.append({"code": "invalid_json_line", "line": row + 1, "message": str(request), "param": None})
            elif problem := problem_of(request, custom_ids):
                code, param, message = problem
                text = f"request {row + 1}: {message}"
                errors.append({"code": code, "line": row + 1, "message": text, "param": param})
        return errors

    def _requests(self, rows: int) -> Iterator[tuple[int, Row | ValueError]]:
        """Each row with its request or error. Rows are read by pages, and alone where a page has an error."""
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


def problem_of(request: Row, custom_ids: set[str], urls: Sequence[str] = URLS) -> tuple[str, str, str] | None:
    """(code, param, message) of a request's error, or None; `custom_ids` holds those of earlier requests."""
    for param in ("custom_id", "method", "url", "body"):
        if request.get(param) is None:
            return "missing_required_parameter", param, f"{param} is missing"
    name, url = request["custom_id"], request["url"]
    if not isinstance(name, str) or not name:
        return "invalid_custom_id", "custom_id", f"custom_id is {_quote(name)}; it must be a text that is not empty"
    if name in custom_ids:
        return "duplicate_custom_id", "custom_id", f"custom_id {_quote(name)} is used by an earlier request"
    custom_ids.add(name)
    if request["method"] != "POST":
        return "invalid_method", "method", f"method is {_quote(request['method'])}; it must be 'POST'"
    if url not in urls:
        allowed = repr(urls[0]) if len(urls) == 1 else f"one of {list(urls)}"
        return "url_mismatch", "url", f"url is {_quote(url)}; it must be {allowed}"
    if not isinstance(request["body"], dict):
        return "invalid_body", "body", f"body is {_quote(request['body'])}; it must be an object"
    return None


def _quote(value: object) -> str:
    return repr(value[:200]) if isinstance(value, str) else reprlib.repr(value)


KEEP_CHOICES = ("all", "succeeded", "failed")


@OUTPUT_WRITER_REGISTRY.type_register(name="openai_batch")
@dataclass
class OpenAIBatchWriter(JsonWriter):
    """A row is `{custom_id, response}` or `{custom_id, error}`; a response is `{status_code, request_id, body}`.

    Two writers with `keep="succeeded"` and `keep="failed"` share the rows, as the Batch API's two files do: a request
    failed if it has an error, or a response whose status is not 200."""

    keep: str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.column is not None:
            raise ValueError(f"column is {self.column!r}, but the fields of a result are fixed; leave it out")
        if self.keep not in KEEP_CHOICES:
            raise ValueError(f"keep is {self.keep!r}; it must be one of {list(KEEP_CHOICES)}")

    def write_part(self, rows: Sequence[Row | None], span: RowRange, part_base: str) -> PartInfo:
        return super().write_part([row for row in rows if row is not None and self._keeps(row)], span, part_base)

    def _keeps(self, row: Row) -> bool:
        response = row.get("response")
        succeeded = response is not None and response.get("status_code") == 200
        return self.keep == "all" or succeeded == (self.keep == "succeeded")

    def line(self, row: Row) -> bytes:
        name = row.get("custom_id")
        if not isinstance(name, str) or (row.get("response") is None) == (row.get("error") is None):
            raise ValueError(f"a result has a custom_id and either a response or an error; this one has {sorted(row)}")
        return encode(
            {
                "id": row.get("id", line_id(name)),
                "custom_id": name,
                "response": row.get("response"),
                "error": row.get("error"),
            }
        )


def line_id(custom_id: str) -> str:
    return f"batch_req_{hashlib.sha256(custom_id.encode()).hexdigest()[:24]}"
