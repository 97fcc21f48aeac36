"""The two files at the end of a batch: the successful requests, and those that failed or were not done.

Lines come from the outputs of a bulk job that succeeded, or from the committed parts of another; each source is
compared with its digest. Requests without a line are then named in the error file, by a pass over the input. Written
again after a crash, the files are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import orjson

from tinsmith.batch.coordinator.state import BatchJobs, JobRecord
from tinsmith.batch.formats.encoding import encode
from tinsmith.batch.formats.openai import line_id
from tinsmith.batch.openai.rows import lines
from tinsmith.batch.operations.sample import TokensUsed
from tinsmith.batch.types import RowRange
from tinsmith.errors import CorruptFilesError
from tinsmith.storage.locations import open_store

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
class ResultFile:
    path: str
    sha256: str


@dataclass
class Results:
    """The results of a bulk job. `missing` are rows without a result, `refused` failed rows with their errors."""

    succeeded: list[ResultFile] = field(default_factory=list)
    failed: list[ResultFile] = field(default_factory=list)
    missing: list[RowRange] = field(default_factory=list)
    refused: dict[int, dict[str, str]] = field(default_factory=dict)


def results_of(jobs: BatchJobs, job: JobRecord | None, total: int) -> Results:
    found = Results()
    if job is None:
        found.missing = [RowRange(0, total - 1)] if total else []
        return found
    if job.status == "SUCCEEDED":
        outputs = [ResultFile(str(each["path"]), str(each["sha256"])) for each in jobs.outputs(job.job_id)]
        found.succeeded, found.failed = outputs[:1], outputs[1:2]
    else:
        expected = 0
        for span, parts in jobs.winners(job.job_id):
            for sources, part in zip((found.succeeded, found.failed), parts, strict=False):
                sources.append(ResultFile(str(part["path"]), str(part["sha256"])))
            if span.start_idx > expected:
                found.missing.append(RowRange(expected, span.start_idx - 1))
            expected = span.end_idx + 1
        if expected < total:
            found.missing.append(RowRange(expected, total - 1))
    after = -1
    while page := jobs.row_errors(job.job_id, PAGE, after):
        after = page[-1]["row_idx"]
        for error in page:
            found.refused[int(error["row_idx"])] = {
                "code": "request_failed",
                "message": f"{error['error_class']}: {error['message']}",
            }
    return found


def counted(lines_of: Iterable[bytes], tally: Tally) -> Iterator[bytes]:
    for line in lines_of:
        tally.add(line)
        yield line


def success_lines(found: Results) -> Iterator[bytes]:
    return chain.from_iterable(_lines_of(source) for source in found.succeeded)


def error_lines(found: Results, input_location: str, max_line_bytes: int, why: Mapping[str, str]) -> Iterator[bytes]:
    """`why` is the error of the requests that were not done."""
    yield from chain.from_iterable(_lines_of(source) for source in found.failed)
    if not (found.missing or found.refused):
        return
    spans = iter(found.missing)
    span = next(spans, None)
    for row, (_, line) in enumerate(lines(input_location, max_line_bytes)):
        while span is not None and row > span.end_idx:
            span = next(spans, None)
        error = why if span is not None and row >= span.start_idx else found.refused.get(row)
        if error is not None:
            name = orjson.loads(line)["custom_id"]
            yield encode({"id": line_id(name), "custom_id": name, "response": None, "error": dict(error)}) + b"\n"


def _lines_of(source: ResultFile) -> Iterator[bytes]:
    digest = hashlib.sha256()
    try:
        store, key = open_store(source.path)
        with store.open(key) as file:
            for line in file:
                digest.update(line)
                yield line
    except FileNotFoundError:
        raise CorruptFilesError(f"{source.path} does not exist") from None
    if digest.hexdigest() != source.sha256:
        raise CorruptFilesError(f"{source.path} differs from what was written (SHA-256)")
