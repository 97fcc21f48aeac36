"""OpenAI's batch files: requests `{custom_id, method, url, body}`, results `{id, custom_id, response, error}`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tinsmith.batch.formats.encoding import encode
from tinsmith.batch.formats.lines import JsonReader, JsonWriter
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY, OUTPUT_WRITER_REGISTRY
from tinsmith.batch.openai.requests import check_requests, read_lines
from tinsmith.batch.types import PartInfo, Row, RowRange
from tinsmith.errors import UserError
from tinsmith.storage.locations import open_object


@INPUT_READER_REGISTRY.type_register(name="openai_batch")
@dataclass
class OpenAIBatchReader(JsonReader):
    """The requests. All are checked before the first is run (`batch/openai/requests.py`)."""

    @cached_property
    def _rows(self) -> int:
        checked = check_requests(self._lines())
        if checked.problems:
            raise UserError(f"{self.path} is not a batch file: {checked}")
        return super().__len__()

    def __len__(self) -> int:
        return self._rows

    def unroll(self, location: str) -> None:
        """A batch file is lines; a document that is an array is refused as any other line that is none."""

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        for file in self.files:
            with open_object(file.data) as source:
                yield from read_lines(source)


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
                "id": row.get("id", line_id(self.path, name)),
                "custom_id": name,
                "response": row.get("response"),
                "error": row.get("error"),
            }
        )


def line_id(scope: str, custom_id: str) -> str:
    """The id of a result: of one request of one batch, whose id or output's path is the `scope`. Another attempt at the
    request gives the same."""
    return f"batch_req_{hashlib.sha256(encode([scope, custom_id])).hexdigest()[:24]}"
