"""The two files at the end of a batch: the successful requests, and those that failed or were not done.

Lines come from the outputs of a bulk job that succeeded, or from the committed parts of another; each source is
compared with its digest. Requests without a line are then named in the error file, by a pass over the input. Written
again after a crash, the files are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import orjson

from tinsmith.batch.coordinator.rows import JobRecord
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.formats.encoding import encode
from tinsmith.batch.formats.openai import line_id
from tinsmith.batch.formats.publishing import source_of
from tinsmith.batch.openai.requests import read_lines
from tinsmith.batch.operations.sample import TokensUsed
from tinsmith.batch.types import PartInfo, RowRange
from tinsmith.errors import CorruptFilesError
from tinsmith.storage.locations import open_store
from tinsmith.storage.stores import stream_verified

PAGE = 1000


@dataclass
class Tally:
    """Sums over the lines of a file."""

    lines: int = 0
    tokens: TokensUsed = field(default_factory=lambda: TokensUsed.of({}))

    def add(self, line: bytes) -> None:
        self.lines += 1
        body = (orjson.loads(line).get("response") or {}).get("body") or {}
        self.tokens = TokensUsed(*map(sum, zip(self.tokens, TokensUsed.of(body.get("usage") or {}), strict=True)))

    def usage(self) -> dict[str, object]:
        read, cached, written, reasoning = self.tokens
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": read + written,
        }


@dataclass
class Results:
    """The results of a bulk job. `missing` are rows without a result, `refused` failed rows with their errors."""

    succeeded: list[PartInfo] = field(default_factory=list)
    failed: list[PartInfo] = field(default_factory=list)
    missing: list[RowRange] = field(default_factory=list)
    refused: dict[int, dict[str, str]] = field(default_factory=dict)


def results_of(jobs: BatchJobs, job: JobRecord | None, total: int) -> Results:
    results = Results()
    if job is None:
        results.missing = [RowRange(0, total - 1)] if total else []
        return results
    if job.status == "SUCCEEDED":
        succeeded, failed = jobs.outputs(job.job_id)
        results.succeeded, results.failed = [_part_of_output(succeeded)], [_part_of_output(failed)]
    else:
        expected = 0
        for span, parts, _ in jobs.iter_committed_batches(job.job_id):
            for sources, part in zip((results.succeeded, results.failed), parts, strict=False):
                sources.append(PartInfo.from_dict(part))
            if span.start_idx > expected:
                results.missing.append(RowRange(expected, span.start_idx - 1))
            expected = span.end_idx + 1
        if expected < total:
            results.missing.append(RowRange(expected, total - 1))
    after = -1
    while page := jobs.row_errors(job.job_id, PAGE, after):
        after = page[-1]["row_idx"]
        for error in page:
            results.refused[int(error["row_idx"])] = {
                "code": "request_failed",
                "message": f"{error['error_class']}: {error['message']}",
            }
    return results


def tally_lines(lines_of: Iterable[bytes], tally: Tally) -> Iterator[bytes]:
    for line in lines_of:
        tally.add(line)
        yield line


def success_lines(results: Results) -> Iterator[bytes]:
    return chain.from_iterable(_lines_of(source) for source in results.succeeded)


def error_lines(
    results: Results, batch_id: str, input_location: str, max_line_bytes: int, undone_error: Mapping[str, str]
) -> Iterator[bytes]:
    """The lines of failed requests. `undone_error` is the error of the requests that were not done."""
    yield from chain.from_iterable(_lines_of(source) for source in results.failed)
    if not (results.missing or results.refused):
        return
    spans = iter(results.missing)
    span = next(spans, None)
    store, key = open_store(input_location)
    with store.open(key) as file:
        for row, (_, line) in enumerate(read_lines(file, max_line_bytes)):
            while span is not None and row > span.end_idx:
                span = next(spans, None)
            error = undone_error if span is not None and row >= span.start_idx else results.refused.get(row)
            if error is not None:
                name = orjson.loads(line)["custom_id"]
                result = {"id": line_id(batch_id, name), "custom_id": name, "response": None, "error": dict(error)}
                yield encode(result) + b"\n"


def _part_of_output(output: Mapping[str, Any]) -> PartInfo:
    """The part that covers a whole published output."""
    return PartInfo(output["path"], output["rows"], output["bytes"], output["sha256"])


def _lines_of(part: PartInfo) -> Iterator[bytes]:
    partial = b""
    try:
        for chunk in stream_verified(source_of(part)):
            *complete, partial = (partial + chunk).split(b"\n")
            yield from (line + b"\n" for line in complete)
    except FileNotFoundError:
        raise CorruptFilesError(f"{part.path} does not exist") from None
