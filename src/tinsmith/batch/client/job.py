"""A bulk job as its owner holds it: follow it, stop it, resume it, read what it has so far.

What a job has, as a file or directory elsewhere: all of it once it has succeeded, what is committed before that.

The bytes are those that publishing makes of the same batches. Rows are not held in memory, whatever their number; the
list of parts is. An output that is no file (a table) is written in the format that the target's name says.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinsmith.batch.client.http import FINAL, Client, Status
from tinsmith.batch.client.results import CommittedRows
from tinsmith.batch.formats import publishing, registry
from tinsmith.batch.formats.publishing import MANIFEST, PublishedFile
from tinsmith.batch.formats.registry import OutputWriter, in_format, sent, writer_of_part
from tinsmith.batch.types import OutputInfo, PartInfo, Row, Span, part_base, staging_of
from tinsmith.batch.worker.utility import delete_staging
from tinsmith.errors import UserError
from tinsmith.storage.locations import open_store
from tinsmith.storage.stores import join

PACKED = (".gz", ".zst")


def export(client: Client, job_id: int, target: str, output: int = 0, if_exists: str = "error") -> OutputInfo:
    """Writes one output of a job to `target`. Raises UserError, FileExistsError, FileNotFoundError."""
    told = client.partial(job_id, limit=1)
    formats = told["outputs"]
    if not 0 <= output < len(formats):
        raise UserError(f"output is {output}; bulk job {job_id} has outputs 0 to {len(formats) - 1}")
    writer = registry.writer_from_dict(formats[output])
    publishing.check_output(target, if_exists)
    name = f"export-{job_id}-{uuid.uuid4().hex[:8]}"
    staging = staging_of(target, name, output)
    try:
        status = client.status(job_id)
        if status["status"] != "SUCCEEDED":
            try:
                return _committed(client, job_id, output, writer, target, name, if_exists, told["part_formats"])
            except FileNotFoundError:
                status = client.status(job_id)  # a job that succeeds meanwhile deletes its parts
                if status["status"] != "SUCCEEDED":
                    raise
        return _published(OutputInfo.from_dict(status["outputs"][output]), writer, target, staging, if_exists)
    finally:
        delete_staging(target, name)


def _committed(
    client: Client,
    job_id: int,
    output: int,
    writer: OutputWriter,
    target: str,
    name: str,
    if_exists: str,
    part_formats: dict[str, dict[str, object]],
) -> OutputInfo:
    """Of the parts as they are now. Raises FileNotFoundError if they are deleted meanwhile."""
    staging = staging_of(target, name, output)
    if not writer.in_store or part_formats:
        other = _writer_for(target) if not writer.in_store else replace(writer, path=target)
        converted = _converted(client, job_id, output, writer, other, name, part_formats)
        return other.publish(list(converted), staging, if_exists)
    _check_name(writer, target)
    parts = [part for _, part in _parts(client, job_id, output)]
    return replace(writer, path=target).publish(parts, staging, if_exists)


def _published(info: OutputInfo, writer: OutputWriter, target: str, staging: str, if_exists: str) -> OutputInfo:
    if not writer.in_store:
        raise UserError(f"the output is {info.path}, which is no file: read it there")
    store, root = open_store(info.path.rstrip("/"))
    if store.exists(root):
        _check_name(writer, target)
        return publishing.publish_file(target, [PartInfo(**info.to_dict())], staging, if_exists)
    manifest = join(root, MANIFEST)
    base = info.path.rstrip("/")
    files = [
        PublishedFile(file["name"], join(base, file["name"]), file["bytes"], file["sha256"])
        for file in json.loads(store.get(manifest))["files"]
    ]
    return publishing.publish_directory(target.rstrip("/") + "/", files, info.rows, staging, if_exists)


def _check_name(writer: OutputWriter, target: str) -> None:
    """Bytes that are packed, or of a directory, stay so."""
    kind = "a directory (with a final slash)" if writer.is_directory else "a file"
    if writer.is_directory != target.endswith("/"):
        raise UserError(f"the output {writer.path} is {kind}, and {target!r} is not")
    for packing in PACKED:
        if writer.path.endswith(packing) != target.endswith(packing):
            raise UserError(f"the output {writer.path} and {target!r} must both end in {packing}, or neither")


def _writer_for(target: str) -> OutputWriter:
    from tinsmith.batch.formats.registry import format_of

    return registry.OUTPUT_WRITER_REGISTRY.find(format_of(target))(target)


def _parts(client: Client, job_id: int, output: int) -> Iterator[tuple[Status, PartInfo]]:
    after = -1
    while found := client.partial(job_id, after)["batches"]:
        for batch in found:
            after = batch["start_idx"]
            if batch["parts"]:
                yield batch, PartInfo.from_dict(batch["parts"][output])


def _converted(
    client: Client,
    job_id: int,
    output: int,
    writer: OutputWriter,
    other: OutputWriter,
    name: str,
    part_formats: dict[str, dict[str, object]],
) -> Sequence[PartInfo]:
    found = []
    for batch, part in _parts(client, job_id, output):
        rows = list((writer_of_part(part, part_formats) or writer).read_part(part))
        base = part_base(other.path, name, output, 0)
        found.append(other.write_part(rows, Span(batch["start_idx"], batch["end_idx"]), base))
    return found


POLL_S = 0.5


SHOWN_CHARACTERS = 1000
"""Of a row, in a message."""


class JobFailedError(RuntimeError):
    """A bulk job did not succeed. The text says how it ended, shows the first failed row, and says how to go on.
    `status` is the job's."""

    def __init__(self, status: Status) -> None:
        super().__init__(ending_of(status))
        self.status = status


@dataclass(frozen=True)
class Progress:
    """How far a job is. Rates are over its whole run; `seconds_left` is None before anything can be told."""

    status: str
    batches: int
    batches_done: int
    rows: int | None
    rows_ok: int
    rows_failed: int
    rows_per_second: float
    tokens_per_second: float
    seconds_left: float | None


class Job:
    """A handle; `int(job)` is the job's id. Another process makes one with `Job(job_id)`."""

    def __init__(self, job_id: int, client: Client | None = None) -> None:
        self.job_id = int(job_id)
        self._client = client or Client()

    def __int__(self) -> int:
        return self.job_id

    def __index__(self) -> int:
        return self.job_id

    def __repr__(self) -> str:
        return f"Job({self.job_id})"

    def status(self) -> Status:
        return self._client.status(self.job_id)

    @property
    def progress(self) -> Progress:
        return progress_of(self.status())

    @property
    def outputs(self) -> list[OutputInfo]:
        """What was published; empty before the job has succeeded."""
        return [OutputInfo.from_dict(each) for each in self.status()["outputs"]]

    def wait(self, *, progress: bool = False, check: bool = True) -> Status:
        """Waits until the job has ended. With `check`, raises JobFailedError unless it succeeded."""
        status: Status = {}
        with _Bar(self.job_id, shown=progress) as bar:
            for status in self._client.statuses(self.job_id):
                bar.show(status)
        if check and status["status"] != "SUCCEEDED":
            raise JobFailedError(status)
        return status

    def cancel(self) -> Status:
        """Asks for the job's end; what is committed stays readable. `wait(check=False)` waits for it."""
        return self._client.cancel(self.job_id)

    def purge(self) -> Status:
        """Deletes what a failed or cancelled job left beside its outputs. It cannot be resumed or exported after that.
        Without it, the server deletes these parts when their retention ends.
        """
        return self._client.purge(self.job_id)

    def resume(self, *, format: str | None = None, output: OutputWriter | Sequence[OutputWriter] | None = None) -> Job:
        """A new job that does what this one, which failed or was cancelled, has left. With a `format` (`"jsonl"`) or
        other outputs, as many as it has, it writes these: what is done already is not done again."""
        outputs = None
        if output is not None:
            outputs = [sent(each) for each in ([output] if isinstance(output, OutputWriter) else output)]
        elif format is not None:
            old = self._client.partial(self.job_id, limit=1)["outputs"]
            outputs = [sent(in_format(registry.writer_from_dict(each), format)) for each in old]
        return Job(self._client.resume(self.job_id, outputs), self._client)

    def errors(self) -> Iterator[Row]:
        """The rows that have failed, by ascending index, with error_type, message and traceback."""
        return _pages(lambda after: self._client.errors(self.job_id, after), "idx")

    def logs(self) -> Iterator[Row]:
        """What the function has printed so far, worker by worker: `text`, and which batch it was printed for."""
        yield from (line for line in followed(self._client, self.job_id, to_its_end=False) if line["worker_id"])

    def batches(self) -> list[Status]:
        return self._client.batches(self.job_id)

    def partial(self, output: int = 0) -> Iterator[Row]:
        """The rows of what is committed now, in input order, whether the job runs, failed or was cancelled."""
        rows = CommittedRows(self._client, self.job_id, output)
        after = -1
        while batches := rows.page(after):
            for batch in batches:
                after = batch["start_idx"]
                yield from rows.of(batch)

    def export(self, target: str, output: int = 0, if_exists: str = "error") -> OutputInfo:
        """Writes an output as it is now to another place: what is committed, or all of it. `exporting.py` says how."""

        return export(self._client, self.job_id, target, output, if_exists)

    def stream(self, output: int = 0) -> Iterator[Row]:
        """The rows in input order, each once, as soon as those before it are there; ends with the job.

        A row that failed is passed over once the job has ended.
        """
        rows = CommittedRows(self._client, self.job_id, output)
        following = 0
        after = -1
        while True:
            ended = self.status()["status"] in FINAL
            batches = rows.page(after)
            moved = False
            for batch in batches:
                if batch["start_idx"] != following and not ended:
                    break
                yield from rows.of(batch)
                after, following, moved = batch["start_idx"], batch["end_idx"] + 1, True
            if ended and not batches:
                return
            if not moved:
                time.sleep(POLL_S)


def ending_of(status: Status, *, for_shell: bool = False) -> str:
    """How a job that did not succeed ended, with its first failed row and the traceback, and how to go on: by calls in
    Python, or by commands of the shell."""
    job_id, failed, kept = status["job_id"], status.get("rows_failed") or 0, status.get("rows_ok") or 0
    lines = [f"bulk job {job_id} is {status['status']}: {status.get('error') or 'no error was recorded'}"]
    if first := status.get("first_error"):
        lines += first_error_lines(first)
    if failed or kept:
        errors, partial = (
            (f"`tinsmith batch errors {job_id}`", f"`tinsmith batch export {job_id} PATH`")
            if for_shell
            else (f"batch.Job({job_id}).errors()", f"batch.Job({job_id}).partial()")
        )
        are = "is" if kept == 1 else "are"
        told = f"{_rows(failed)} failed ({errors} lists them) and {_rows(kept)} {are} kept ({partial} reads them)."
        lines.append(told)
        again, changed = (
            (f"`tinsmith batch resume {job_id}`", f"`tinsmith batch submit ... --resume-from {job_id}`")
            if for_shell
            else (f"batch.Job({job_id}).resume()", f"Dataset.map(..., resume_from={job_id})")
        )
        lines.append(f"Resume with {again}, or with a changed function by {changed}.")
    return "\n".join(lines)


def first_error_lines(error: Row) -> list[str]:
    """A failed row as it was, and the traceback of its failure."""
    shown = json.dumps(error["row"], ensure_ascii=False)
    if len(shown) > SHOWN_CHARACTERS:
        shown = f"{shown[:SHOWN_CHARACTERS]}... ({len(shown)} characters)"
    trace = error["traceback"].rstrip() or f"{error['error_type']}: {error['message']}"
    return [f"row {error['idx']} is {shown}", trace]


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def progress_of(status: Status) -> Progress:
    started, ended = status.get("started_at"), status.get("ended_at")
    elapsed = max(1e-3, (ended or time.time()) - started) if started else 0.0
    batches, done = status.get("batch_total_batches") or 0, status.get("batch_completed_batches") or 0
    rows = (status.get("rows_ok") or 0) + (status.get("rows_failed") or 0)
    tokens = (status.get("tokens_in") or 0) + (status.get("tokens_out") or 0)
    return Progress(
        status=status["status"],
        batches=batches,
        batches_done=done,
        rows=status.get("total_rows"),
        rows_ok=status.get("rows_ok") or 0,
        rows_failed=status.get("rows_failed") or 0,
        rows_per_second=rows / elapsed if elapsed else 0.0,
        tokens_per_second=tokens / elapsed if elapsed else 0.0,
        seconds_left=elapsed / done * (batches - done) if done and elapsed else None,
    )


def followed(client: Client, job_id: int, to_its_end: bool) -> Iterator[Row]:
    """What becomes of a job and what its function prints: {at, worker_id, batch_idx, attempt_id, stream, text}.

    Lines of the job itself have no worker. What is there now, or, on request, all until the job has ended.
    """
    read: dict[str, int] = {}
    told = 0
    while True:
        status = client.status(job_id)
        moments = _moments(status)
        ended = status["status"] in FINAL
        yield from (_moment(*moment) for moment in moments[told : len(moments) - ended])
        told = max(told, len(moments) - ended)
        for worker in client.logs(job_id)["workers"]:
            worker_id = worker["worker_id"]
            while (page := client.logs(job_id, worker_id, read.get(worker_id, 0)))["lines"]:
                yield from ({"worker_id": worker_id, **line} for line in page["lines"])
                read[worker_id] = page["after"]
        if ended:
            yield _moment(*moments[-1])
        if ended or not to_its_end:
            return
        time.sleep(POLL_S)


def _moments(status: Status) -> list[tuple[float, str]]:
    found = [(status["created_at"], f"submitted to pool {status['pool']}")]
    if status["started_at"]:
        found.append((status["started_at"], f"running: {status['total_rows']} rows"))
    if status["status"] in FINAL:
        error = f": {status['error']}" if status["error"] else ""
        found.append((status["ended_at"], status["status"] + error))
    return found


def _moment(at: float, text: str) -> Row:
    return {"worker_id": None, "at": at, "stream": None, "batch_idx": None, "attempt_id": None, "text": text}


class _Bar:
    """A tqdm bar of batches; the rest beside it."""

    def __init__(self, job_id: int, shown: bool) -> None:
        self._job_id = job_id
        self._shown = shown
        self._bar: Any = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, status: Status) -> None:
        if not self._shown:
            return
        now = progress_of(status)
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=now.batches, initial=now.batches_done, desc=f"Job {self._job_id}", unit="batch", leave=True
            )
        self._bar.total = now.batches
        self._bar.n = now.batches if now.status == "SUCCEEDED" else now.batches_done
        self._bar.set_postfix_str(
            f"{now.status}, {now.rows_per_second:.0f} rows/s, {now.tokens_per_second:.0f} tokens/s, "
            f"{now.rows_failed} failed"
        )


def _pages(page: Callable[[int], list[Row]], cursor: str) -> Iterator[Row]:
    after = -1
    while found := page(after):
        yield from found
        after = found[-1][cursor]
