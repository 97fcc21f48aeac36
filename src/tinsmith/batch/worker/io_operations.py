"""The operations of a worker beside mapping: plan, issue_token, publish, delete, give_up; and reading, for clients.

They run readers and writers, which may be a user's code, so they run in a worker's child of the role `io`
(`children.IoProcess`). Each can be repeated after a crash at any time. `plan` splits the input into spans of rows, in
order, that cover each row once.
"""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import orjson

from tinsmith.batch.formats import publishing
from tinsmith.batch.formats.input_versions import Version
from tinsmith.batch.formats.offset_cache import cache_directory
from tinsmith.batch.formats.part_lists import CommittedParts, parts_on_disk
from tinsmith.batch.formats.registry import InputReader, OutputWriter, format_of_part, is_shipped
from tinsmith.batch.formats.snapshots import open_input, write_snapshot
from tinsmith.batch.types import (
    PROCESS_DEATHS,
    Assignment,
    AttemptOutcome,
    JobSpec,
    OutputInfo,
    PartInfo,
    Row,
    RowFailure,
    RowRange,
    part_base,
    staging_of,
)
from tinsmith.batch.worker.frames import Message, pack
from tinsmith.errors import UserError
from tinsmith.storage.fencing import FencingToken
from tinsmith.storage.locations import open_store
from tinsmith.storage.stores import LocalStore, StaleWriterError

SPANS_IN_A_MESSAGE = 1000
FAILURES_IN_A_PART = 1000
ROWS_IN_A_MESSAGE = 100


def run(spec: JobSpec, job_id: int | str, request: Message) -> Iterator[Message]:
    """The messages of an operation, the last with its `end` or `error`."""
    try:
        match request["op"]:
            case "plan":
                yield from plan(spec, int(job_id))
            case "issue_token":
                yield {"end": {"token": _issue_token(spec, job_id, int(request["output_idx"]))}}
            case "publish":
                yield {"end": _publish(spec, job_id, request)}
            case "delete":
                _delete(spec, request["job_ids"])
                yield {"end": {}}
            case "give_up":
                yield {"end": _give_up(spec, request).to_dict()}
            case "read_part" | "read_published":
                yield from _read(spec, request)
    except Exception as error:  # noqa: BLE001  fails this operation only
        # An error that the user can fix is one line; where it was raised does not help.
        is_users = isinstance(error, UserError | OSError)
        text = str(error) if is_users else "".join(traceback.format_exception(error))
        yield {"error": text, "error_type": type(error).__name__, "message": str(error)}


# Planning.


def plan(spec: JobSpec, job_id: int) -> Iterator[Message]:
    """Checks that the outputs can be published, copies an input that has no version, counts the rows and splits them.

    A batch has `batch_size` rows. Where the job has `batch_tokens`, it has fewer if these would be more tokens by the
    reader's estimate; a row that exceeds `batch_tokens` alone is a batch. Spans of one size need two numbers, however
    many there are. Raises UserError.
    """
    # The version is read first: a change of the input between the two is then detected.
    source: Message = {"input_version": _input_version(spec)}
    reader = InputReader.from_dict(spec.batch_input_format)
    for output in spec.all_output_formats:
        OutputWriter.from_dict(output).check_output(spec.if_exists)
    if spec.batch_tokens is None:
        if (pages := reader.snapshot_pages()) is not None:
            directory = job_directory(spec, job_id)
            source["input_snapshot"], total_rows = write_snapshot(pages, directory, reader.path, spec.limit)
        else:
            total_rows = len(reader) if spec.limit is None else min(len(reader), spec.limit)
        yield {"end": {"total_rows": total_rows, "batch_size": spec.batch_size, **source}}
        return
    sizes = reader.row_sizes()
    if sizes is None:
        raise UserError(
            f"a {type(reader).__name__} does not know the sizes of its rows; leave batch_tokens out, or copy the rows "
            "to JSON Lines"
        )
    total = 0
    remaining = _split_by_tokens(islice(sizes, spec.limit), spec.batch_size, spec.batch_tokens)
    while page := list(islice(remaining, SPANS_IN_A_MESSAGE)):
        total = page[-1].end_idx + 1
        yield {"spans": [list(span) for span in page]}
    yield {"end": {"total_rows": total, **source}}


def _split_by_tokens(sizes: Iterable[int], batch_size: int, batch_tokens: int) -> Iterator[RowRange]:
    start, count, tokens = 0, 0, 0
    for size in sizes:
        if count and (count == batch_size or tokens + size > batch_tokens):
            yield RowRange(start, start + count - 1)
            start, count, tokens = start + count, 0, 0
        count += 1
        tokens += size
    if count:
        yield RowRange(start, start + count - 1)


def _input_version(spec: JobSpec) -> Version | None:
    try:
        return InputReader.from_dict(spec.batch_input_format).version()
    except FileNotFoundError:  # `plan` raises it with the reader's message
        return None


# Publishing.


def _issue_token(spec: JobSpec, job_id: int | str, output_idx: int) -> dict[str, str] | None:
    """The fencing token of a publication that follows. A table needs none: its writer publishes in one transaction,
    which is committed once."""
    output = spec.all_output_formats[output_idx]
    return asdict(publishing.issue_token(output["path"], job_id)) if _is_in_store(output) else None


def _publish(spec: JobSpec, job_id: int | str, request: Message) -> Message:
    """Publish an output from the file `path`, which has a line for each batch or, for the output of errors, for each
    failed row. The result has the `output`, or says why its `token` is stale."""
    index, path = int(request["output_idx"]), request["path"]
    token = None if request["token"] is None else FencingToken(**request["token"])
    try:
        with publishing.use_token(token):
            if index < len(spec.batch_output_formats):
                output = publish_output(spec, index, job_id, CommittedParts(path, index))
            else:
                with open(path, "rb") as lines:
                    output = publish_errors(spec, job_id, map(orjson.loads, lines))
    except StaleWriterError as error:
        return {"stale": str(error)}
    if token is not None:
        token.release()
    return {"output": output.to_dict()}


def publish_output(spec: JobSpec, output_idx: int, job_id: str | int, parts: Sequence[PartInfo]) -> OutputInfo:
    """Publishes one output of a job from the parts of its batches, in the order of their rows."""
    writer = OutputWriter.from_dict(spec.batch_output_formats[output_idx])
    staging = staging_of(writer.path, job_id, output_idx)
    if not spec.part_formats:
        return writer.publish(parts, staging, spec.if_exists)
    with parts_on_disk(_rewrite(spec, output_idx, job_id, parts, writer)) as rewritten:
        return writer.publish(rewritten, staging, spec.if_exists)


def _rewrite(
    spec: JobSpec, output_idx: int, job_id: str | int, parts: Sequence[PartInfo], writer: OutputWriter
) -> Iterator[PartInfo]:
    """The parts, with those of another format written again in this one. The result is the same each time."""
    base = part_base(writer.path, job_id, output_idx, 0)  # attempts begin at 1
    next_row = 0
    for part in parts:
        if (old := format_of_part(part, spec.part_formats)) is not None:
            rows = list(OutputWriter.from_dict(old).read_part(part))
            for row in rows:
                writer.check(row)
            part = writer.write_part(rows, RowRange(next_row, next_row + len(rows) - 1), base)
        yield part
        next_row += part.rows


def publish_errors(spec: JobSpec, job_id: str | int, failures: Iterable[Row]) -> OutputInfo:
    """Publishes the failed rows, ascending by `idx`. Some at a time are in memory."""
    assert spec.batch_error_format is not None
    writer = OutputWriter.from_dict(spec.batch_error_format)
    staging = staging_of(writer.path, job_id, len(spec.batch_output_formats))
    with parts_on_disk(_write_failures(writer, failures, f"{staging}/attempt-0")) as parts:
        return writer.publish(parts, staging, spec.if_exists)


def _write_failures(writer: OutputWriter, failures: Iterable[Row], base: str) -> Iterator[PartInfo]:
    rows, next_row = iter(failures), 0
    while page := list(islice(rows, FAILURES_IN_A_PART)):
        yield writer.write_part(page, RowRange(next_row, next_row + len(page) - 1), base)
        next_row += len(page)


# Deleting.


def _delete(spec: JobSpec, job_ids: Sequence[int]) -> None:
    outputs = list(enumerate(spec.all_output_formats))
    outputs += [(int(prefix.rpartition("-")[2]), output) for prefix, output in spec.part_formats.items()]
    for index, output in outputs:
        for job_id in job_ids:
            if _is_in_store(output):
                publishing.delete_token(output["path"], job_id)
            delete_parts(output, index, job_id)
    if spec.storage and not all(_is_in_store(output) for _, output in outputs):
        for job_id in job_ids:
            delete_staging(f"{spec.storage}/", job_id)


def job_directory(spec: JobSpec, job_id: int) -> str:
    """The directory of a job's files beside its first output in a store, or in the server's storage if all outputs are
    tables."""
    path = next((str(output["path"]) for output in spec.all_output_formats if _is_in_store(output)), f"{spec.storage}/")
    return _directory_beside(path, job_id)


def _is_in_store(output: Mapping[str, Any]) -> bool:
    """Whether an output's parts are files of a store, as those of every user's class are."""
    return is_shipped(output) or OutputWriter.from_dict(output).in_store


def _directory_beside(path: str, job_id: str | int) -> str:
    return staging_of(path, job_id, 0).rpartition("/")[0]


def delete_parts(output: Mapping[str, Any], output_idx: int, job_id: str | int) -> None:
    """Deletes the parts of one output of a job, wherever its writer put them."""
    if _is_in_store(output):
        delete_staging(output["path"], job_id)
    else:
        writer = OutputWriter.from_dict(output)
        writer.delete_staging(staging_of(writer.path, job_id, output_idx))


def delete_staging(path: str, job_id: str | int) -> None:
    """Deletes everything that a job stored beside one output, and nothing of other jobs. Idempotent."""
    store, key = open_store(_directory_beside(path, job_id))
    store.delete_below(key)
    if isinstance(store, LocalStore):
        with contextlib.suppress(OSError):  # other jobs have parts in it
            os.rmdir(os.path.dirname(key))


# Reading, for clients.


def _read(spec: JobSpec, request: Message) -> Iterator[Message]:
    """The rows of a part, or of the published output, as plain values."""
    writer = OutputWriter.from_dict(spec.batch_output_formats[0])
    source = request["source"]
    is_part = request["op"] == "read_part"
    rows = writer.read_part(PartInfo.from_dict(source)) if is_part else writer.read_published(OutputInfo(**source))
    while page := list(islice(rows, ROWS_IN_A_MESSAGE)):
        for row in page:
            try:
                pack(row)
            except TypeError as error:
                reason = f"the output of a {type(writer).__name__} has a row that a client cannot read"
                raise UserError(f"{reason}: {error}; export the output instead") from None
        yield {"rows": page}
    yield {"end": {}}


# Giving up.


def _give_up(spec: JobSpec, request: Message) -> AttemptOutcome:
    """Records a row that failed for the last time: it has no result in any output, and an entry among the errors."""
    assignment = Assignment.from_dict(request["assignment"])
    try:
        reader = open_input(spec)
        (row,) = reader.download_batch(assignment.start_idx, assignment.end_idx, str(cache_directory()))
    except Exception:  # noqa: BLE001  perhaps the row failed because it cannot be read
        row = None
    writers = [OutputWriter.from_dict(output) for output in spec.batch_output_formats]
    parts = [
        writer.write_part([None], assignment.span, base)
        for writer, base in zip(writers, assignment.part_bases, strict=True)
    ]
    error_type, trace = request["error_type"], request["error"]
    line = trace.strip().partition("\n")[0] if error_type in PROCESS_DEATHS else trace.strip().rpartition("\n")[2]
    message = re.sub(rf"^[\w.]*{re.escape(error_type)}: ", "", line)
    failure = RowFailure(assignment.start_idx, error_type, message, trace, row)
    return AttemptOutcome(
        assignment.batch_idx, assignment.attempt_id, tuple(parts), rows_failed=1, row_failures=(failure,)
    )
