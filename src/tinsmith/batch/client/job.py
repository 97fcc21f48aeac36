"""The client's handle of a bulk job: follow, cancel and resume it, read its rows, export its outputs.

The rows of a job that runs are in parts; once it has succeeded, its parts are deleted, and the published output holds
the same rows in the same order. A reader that finds a part deleted goes on in the output, so each row is given once. An
output that was replaced after it was published is refused.

An export has the bytes that publishing makes of the same batches. Neither rows nor the list of parts are in memory. An
output that is not a file (a table) is exported in the format that the target's name says. The code of a user's writer
runs in a child (`shipped_writers.py`), never in this process.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from tinsmith.batch.client.http import FINAL, Client, Status
from tinsmith.batch.client.shipped_writers import ShippedWriter, client_writer
from tinsmith.batch.formats import publishing, registry
from tinsmith.batch.formats.part_lists import PublishedFile, files_on_disk, parts_on_disk
from tinsmith.batch.formats.publishing import MANIFEST
from tinsmith.batch.formats.registry import (
    COMPRESSED_ENDINGS,
    OutputWriter,
    format_of,
    format_of_part,
    in_format,
    request_dict,
)
from tinsmith.batch.types import IF_EXISTS, OutputInfo, PartInfo, Row, RowRange, part_base, staging_of
from tinsmith.batch.worker.io_operations import delete_staging
from tinsmith.errors import NotFoundError, TinsmithError, UserError
from tinsmith.runtime import notebook
from tinsmith.storage.locations import open_store
from tinsmith.storage.stores import join

POLL_S = 0.5
LOOK_S = 5.0
"""How long a notebook waits for the state of a job that it shows."""
ORDERS = ("input", "any")
ERRORS_PAGE = 1000
"""Failed rows in one request."""
SHOWN_CHARACTERS = 1000
"""The most characters of a row in a message."""


class CommittedRows:
    """One output of one job. Batches are read in the order of their rows, each once."""

    def __init__(self, client: Client, job_id: int, output: int) -> None:
        self._client = client
        self._job_id = job_id
        self._output = output
        self._published: Iterator[Row] | None = None
        self._offsets: Iterator[tuple[int, int]] = iter(())
        self._at = 0  # rows of the published output that were skipped or given
        formats = self._page(-1, limit=1)["outputs"]
        if not 0 <= output < len(formats):
            raise UserError(f"output is {output}; bulk job {job_id} has outputs 0 to {len(formats) - 1}")
        self.writer = client_writer(formats[output], self.part_formats)
        self._older_writers: dict[str, OutputWriter] = {}

    def _page(self, after: int, limit: int = 1000, order: str = "rows") -> Status:
        page = self._client.partial(self._job_id, after, limit, order)
        self.part_formats: dict[str, Row] = page["part_formats"]
        return page

    def batches(self, after: int = -1) -> Iterator[Row]:
        """The committed batches that begin after a row, as the server lists them."""
        while page := self._page(after)["batches"]:
            yield from page
            after = page[-1]["start_idx"]

    def commits(self, after: int) -> Iterator[Row]:
        """The batches that were committed after the one with a number, in the order of commits."""
        while page := self._page(after, order="commits")["batches"]:
            yield from page
            after = page[-1]["commit_number"]

    def part(self, batch: Row) -> PartInfo | None:
        return PartInfo.from_dict(batch["parts"][self._output]) if batch["parts"] else None

    def rows_of_part(self, part: PartInfo) -> Iterator[Row]:
        return self._writer_of(part).read_part(part)

    def _writer_of(self, part: PartInfo) -> OutputWriter:
        data = format_of_part(part, self.part_formats)
        if data is None:
            return self.writer
        name = json.dumps(data, sort_keys=True)
        if name not in self._older_writers:
            self._older_writers[name] = client_writer(data)
        return self._older_writers[name]

    def of(self, batch: Row) -> Iterator[Row]:
        """The rows of a batch. Raises NotFoundError if they were deleted and are in no output."""
        part = self.part(batch)
        if part is None:
            return
        num_read = 0
        if self._published is None:
            try:
                for row in self.rows_of_part(part):
                    num_read += 1
                    yield row
                return
            except FileNotFoundError:
                self._published = self._open_published()
                self._offsets = self._find_offsets()
        begin = next(offset for start, offset in self._offsets if start == batch["start_idx"])
        for _ in islice(self._published, begin + num_read - self._at):
            continue
        yield from islice(self._published, part.rows - num_read)
        self._at = begin + part.rows

    def following(self, batch_in_reading: Row, num_read: int) -> Iterator[Row]:
        """Once the parts are deleted: what is left of a batch of which so many rows were read, and the rows of those
        that were committed after it, in input order. Raises NotFoundError."""
        for batch in self.batches():
            later = batch["commit_number"] - batch_in_reading["commit_number"]
            if later >= 0:
                yield from islice(self.of(batch), num_read if later == 0 else 0, None)

    def _open_published(self) -> Iterator[Row]:
        status = self._client.status(self._job_id)
        if status["status"] != "SUCCEEDED":
            raise NotFoundError(
                f"the parts of bulk job {self._job_id} were deleted: a job that resumed it has succeeded, or their "
                "retention (TINSMITH_BATCH_RETENTION_DAYS) has ended"
            ) from None
        published = OutputInfo.from_dict(status["outputs"][self._output])
        if self.writer.in_store:
            store, key = open_store(join(published.path, MANIFEST) if self.writer.is_directory else published.path)
            if not store.exists(key) or store.head(key).etag != published.etag:
                raise NotFoundError(
                    f"the output {published.path} of bulk job {self._job_id} was deleted or replaced after it was "
                    "published, and its parts no longer exist; submit the job again"
                ) from None
        return self.writer.read_published(published)

    def _find_offsets(self) -> Iterator[tuple[int, int]]:
        """Yield (start_idx, rows of the output before it) of each batch."""
        offset = 0
        for batch in self.batches():
            yield batch["start_idx"], offset
            part = self.part(batch)
            offset += part.rows if part else 0


def _parts_for_export(rows: CommittedRows, target: str, base: str) -> tuple[OutputWriter, Iterator[PartInfo]]:
    """The target's writer and its parts, converted below `base` where the job's own cannot be used as they are."""
    writer = rows.writer
    if writer.in_store:
        other = replace(writer, path=target)
    else:
        other = registry.OUTPUT_WRITER_REGISTRY.find(format_of(target))(target)
    converted = (bool(rows.part_formats) and not isinstance(writer, ShippedWriter)) or not writer.in_store
    if not converted:
        _check_name(writer, target)

    def parts() -> Iterator[PartInfo]:
        for batch in rows.batches():
            part = rows.part(batch)
            if part is not None and converted:
                span = RowRange(batch["start_idx"], batch["end_idx"])
                part = other.write_part(list(rows.rows_of_part(part)), span, base)
            if part is not None:
                yield part

    return other, parts()


def _export_published(info: OutputInfo, writer: OutputWriter, target: str, staging: str, if_exists: str) -> OutputInfo:
    if not writer.in_store:
        raise UserError(f"the parts of the job were deleted, and its output {info.path} is not a file; read it there")
    base = info.path.rstrip("/")
    store, root = open_store(base)
    if store.exists(root):
        _check_name(writer, target)
        return publishing.publish_file(target, [PartInfo(**info.to_dict())], staging, if_exists)
    published_files = publishing.iter_published_files(info, is_directory=True)
    with files_on_disk(PublishedFile(file.path.removeprefix(f"{base}/"), file) for file in published_files) as files:
        return publishing.publish_directory(target.rstrip("/") + "/", files, info.rows, staging, if_exists)


def _check_name(writer: OutputWriter, target: str) -> None:
    """Raises UserError unless the target is compressed, or a directory, if and only if the output is: its bytes are
    copied."""
    kind = "a directory (with a final slash)" if writer.is_directory else "a file"
    if writer.is_directory != target.endswith("/"):
        raise UserError(f"the target is {target!r}; it must be {kind}, as the output {writer.path} is")
    formats = [_format_by_ending(path) for path in (target, writer.path)]
    if None not in formats and formats[0] != formats[1]:
        raise UserError(
            f"the target is {target!r}, and an export has the bytes of the output {writer.path}; end it as that, and "
            "convert it with batch.load(PATH)"
        )
    for packing in COMPRESSED_ENDINGS:
        if writer.path.endswith(packing) != target.endswith(packing):
            raise UserError(f"the target is {target!r}; it must end in {packing} if and only if {writer.path} does")


def _format_by_ending(path: str) -> str | None:
    try:
        return format_of(path)
    except UserError:
        return None


class JobFailedError(RuntimeError):
    """A bulk job did not succeed. The text has the reason, the first failed row, and the next steps. `status` is the
    job's."""

    def __init__(self, status: Status) -> None:
        super().__init__(describe_failure(status))
        self.status = status


@dataclass(frozen=True)
class Progress:
    """The progress of a job. Rates are over its whole run; `seconds_left` is None before a batch is done."""

    status: str
    batches: int
    batches_done: int
    rows: int | None
    rows_ok: int
    rows_failed: int
    rows_per_second: float
    tokens_per_second: float
    seconds_left: float | None
    workers: int = 0
    retried: int = 0
    """Batches whose current attempt is a retry."""

    def __str__(self) -> str:
        workers = f", {self.workers} worker{'s' * (self.workers != 1)}" if self.status == "RUNNING" else ""
        retried = f", {self.retried} retried" if self.retried else ""
        return (
            f"{self.status}, {self.rows_per_second:.0f} rows/s, {self.tokens_per_second:.0f} tokens/s, "
            f"{self.rows_failed} failed{retried}{workers}"
        )

    @property
    def share(self) -> float:
        """The share of the batches that are done, 0 to 1; 1 for a job without rows that has succeeded."""
        return self.batches_done / self.batches if self.batches else float(self.status == "SUCCEEDED")

    def fields(self) -> dict[str, object]:
        """What a notebook shows, by name."""
        rows = "not yet counted" if self.rows is None else f"{self.rows_ok:,} of {self.rows:,}"
        is_running = self.status == "RUNNING"
        remaining = None if self.seconds_left is None or not is_running else f"about {self.seconds_left:.0f} s"
        rates = f"{self.rows_per_second:.1f} rows/s, {self.tokens_per_second:.0f} tokens/s"
        return {
            "Status": self.status,
            "Batches": f"{self.batches_done:,} of {self.batches:,}",
            "Rows": rows,
            "Failed rows": self.rows_failed or None,
            "Speed": rates if self.rows_per_second else None,
            "Left": remaining,
            "Workers": self.workers if is_running else None,
            "Retried batches": self.retried or None,
        }

    def _repr_html_(self) -> str:
        return notebook.card("Progress of a bulk job", self.fields(), share=self.share)


@dataclass(frozen=True)
class Report:
    """The time, work and cost of a job. `worker_hours` are from the start of each worker to its end. `tries` counts the
    attempts at its batches, `batches` those that were not split; `cost` is in the unit of the prices."""

    seconds_waiting: float
    seconds: float
    worker_hours: float
    rows_ok: int
    rows_failed: int
    batches: int
    tries: int
    tokens_in: int
    tokens_out: int
    cost: float

    def _repr_html_(self) -> str:
        fields = {
            "Waited": f"{self.seconds_waiting:.1f} s",
            "Ran": f"{self.seconds:.1f} s, {self.worker_hours:.3g} worker-hours",
            "Rows": f"{self.rows_ok:,}, and {self.rows_failed:,} failed",
            "Batches": f"{self.batches:,} in {self.tries:,} tries",
            "Tokens": f"{self.tokens_in:,} in, {self.tokens_out:,} out",
            "Cost": f"{self.cost:.4g}",
        }
        return notebook.card("Report of a bulk job", fields)


class Job:
    """A handle of a bulk job; `int(job)` is its id. Another process makes one with `Job(job_id)`."""

    def __init__(self, job_id: int, client: Client | None = None) -> None:
        self.job_id = int(job_id)
        self._client = client or Client()

    def __int__(self) -> int:
        return self.job_id

    def __index__(self) -> int:
        return self.job_id

    def __repr__(self) -> str:
        return f"Job({self.job_id})"

    def _repr_html_(self) -> str:
        """The job's state now, or the reason why it is unknown."""
        try:
            return self._card(self._client.status(self.job_id, LOOK_S))
        except TinsmithError as error:
            return notebook.card(f"Bulk job {self.job_id}", {}, link=self._page, note=str(error))

    @property
    def _page(self) -> str:
        return f"{self._client.base_url}/#/jobs/{self.job_id}"

    def _card(self, status: Status) -> str:
        progress, name = progress_of(status), status.get("name")
        title = f"Bulk job {self.job_id}: {name}" if name else f"Bulk job {self.job_id}"
        outputs = ", ".join(output["path"] for output in status.get("outputs") or ())
        fields = {**progress.fields(), "Pool": status.get("pool"), "Waiting": status.get("waiting"), "Outputs": outputs}
        note = "" if status["status"] == "SUCCEEDED" else status.get("error") or ""
        return notebook.card(title, fields, link=self._page, share=progress.share, note=note)

    def status(self) -> Status:
        return self._client.status(self.job_id)

    @property
    def progress(self) -> Progress:
        return progress_of(self.status())

    @property
    def outputs(self) -> list[OutputInfo]:
        """The published outputs; empty before the job has succeeded."""
        return [OutputInfo.from_dict(output) for output in self.status()["outputs"]]

    def wait(self, *, progress: bool = True, check: bool = True) -> Status:
        """Waits until the job has ended, and shows its progress in a notebook and in a terminal. With `check`, raises
        JobFailedError unless it succeeded."""
        statuses = self._client.statuses(self.job_id)
        (status,) = deque(self._show_progress(statuses) if progress else statuses, maxlen=1)
        if check and status["status"] != "SUCCEEDED":
            raise JobFailedError(status)
        return status

    def report(self, per_million_in: float = 0.0, per_million_out: float = 0.0, per_worker_hour: float = 0.0) -> Report:
        """The time, tries and tokens of the job so far, and the price of its tokens and workers."""
        status = self.status()
        batches = tries = 0
        for batch in self._iter_batches():
            if batch["status"] != "SPLIT":
                batches += 1
                tries += batch["attempt_id"]
        created_at, started_at, ended_at = (status[f"{name}_at"] for name in ("created", "started", "ended"))
        until = ended_at or time.time()
        tokens_in, tokens_out = status["tokens_in"], status["tokens_out"]
        running_s = sum(max(0.0, time.time() - worker["started_at"]) for worker in status["workers"])
        worker_hours = (status["worker_seconds"] + running_s) / 3600
        tokens_cost = (tokens_in * per_million_in + tokens_out * per_million_out) / 1e6
        return Report(
            seconds_waiting=(started_at or until) - created_at,
            seconds=until - started_at if started_at else 0.0,
            worker_hours=worker_hours,
            rows_ok=status["rows_ok"],
            rows_failed=status["rows_failed"],
            batches=batches,
            tries=tries,
            tokens_in=tokens_in,
            tokens_out=tokens_out,
            cost=tokens_cost + worker_hours * per_worker_hour,
        )

    def _show_progress(self, statuses: Iterable[Status]) -> Iterator[Status]:
        """Yield the statuses and show them."""
        with notebook.LiveDisplay() as display:
            for status in statuses:
                progress = progress_of(status)
                batches = f"{progress.batches_done}/{progress.batches} batches"
                line = f"Job {self.job_id} {notebook.text_bar(progress.share)} {batches}, {progress}"
                display.show(line, self._card(status))
                yield status

    def cancel(self) -> Status:
        """Cancels the job; its committed batches stay readable. `wait(check=False)` waits for the end."""
        return self._client.cancel(self.job_id)

    def purge(self) -> Status:
        """Deletes the parts of a failed or cancelled job, which cannot be resumed or exported after that. Without it,
        the server deletes them when their retention ends.
        """
        return self._client.purge(self.job_id)

    def resume(self, *, format: str | None = None, output: OutputWriter | Sequence[OutputWriter] | None = None) -> Job:
        """A new job that does the rest of this one, which failed or was cancelled. With a `format` (`"jsonl"`) or as
        many other outputs as it has, it writes these instead; completed batches are converted, not computed again."""
        outputs = None
        if output is not None:
            outputs = [request_dict(data) for data in ([output] if isinstance(output, OutputWriter) else output)]
        elif format is not None:
            old = self._client.partial(self.job_id, limit=1)["outputs"]
            outputs = [request_dict(in_format(client_writer(data), format)) for data in old]
        return Job(self._client.resume(self.job_id, outputs), self._client)

    def errors(self, after: int = -1, limit: int | None = None) -> Iterator[Row]:
        """The failed rows after row `after`, by ascending index, with error_type, message and traceback; at most
        `limit`. They are read in pages."""
        num_left, start = limit, after
        while start is not None and num_left != 0:
            page = self._client.errors(self.job_id, start, min(num_left or ERRORS_PAGE, ERRORS_PAGE))
            yield from page["errors"]
            start = page["next"]
            num_left = None if num_left is None else num_left - len(page["errors"])

    def logs(self) -> Iterator[Row]:
        """The function's output so far, by worker: `text`, and the batch for which it was printed."""
        yield from (line for line in follow_logs(self._client, self.job_id, until_end=False) if line["worker_id"])

    def batches(self) -> list[Status]:
        """All batches, in the order of their rows."""
        return list(self._iter_batches())

    def _iter_batches(self) -> Iterator[Status]:
        offset = 0
        while page := self._client.batches(self.job_id, offset):
            yield from page
            offset += len(page)

    def partial(self, output: int = 0) -> Iterator[Row]:
        """The rows committed now, in input order, whether the job runs, failed or was cancelled."""
        rows = CommittedRows(self._client, self.job_id, output)
        for batch in rows.batches():
            yield from rows.of(batch)

    def take(self, rows: int = 20) -> list[Row]:
        """The first committed rows of the first output."""
        return list(islice(self.partial(), rows))

    def export(self, target: str, output: int = 0, if_exists: str = "error") -> OutputInfo:
        """Writes one output to `target`: all of it once the job has succeeded, before that what is committed. Raises
        UserError, FileExistsError, FileNotFoundError."""
        if if_exists not in IF_EXISTS:
            raise UserError(f"if_exists is {if_exists!r}; it must be one of {list(IF_EXISTS)}")
        rows = CommittedRows(self._client, self.job_id, output)
        publishing.check_output(target, if_exists)
        name = f"export-{self.job_id}-{uuid.uuid4().hex[:8]}"
        staging = staging_of(target, name, output)
        try:
            status = self.status()
            if status["status"] != "SUCCEEDED":
                try:
                    other, parts = _parts_for_export(rows, target, part_base(target, name, output, 0))
                    with parts_on_disk(parts) as stored:
                        return other.publish(stored, staging, if_exists)
                except FileNotFoundError:
                    status = self.status()  # a job that succeeds meanwhile deletes its parts
                    if status["status"] != "SUCCEEDED":
                        raise
            return _export_published(
                OutputInfo.from_dict(status["outputs"][output]), rows.writer, target, staging, if_exists
            )
        finally:
            delete_staging(target, name)

    def stream(self, output: int = 0, order: str = "input") -> Iterator[Row]:
        """The rows, each once; ends with the job. In input order each as soon as all rows before it are committed;
        failed rows are skipped once the job has ended. With `order="any"` as soon as its own batch is committed, in the
        order of commits; what was not read when the job succeeded, and its parts were deleted, follows in input order.
        """
        if order not in ORDERS:
            raise ValueError(f"order is {order!r}; it must be one of {list(ORDERS)}")
        return self._stream_input(output) if order == "input" else self._stream_commits(output)

    def _stream_commits(self, output: int) -> Iterator[Row]:
        rows = CommittedRows(self._client, self.job_id, output)
        after, has_ended = 0, False
        while not has_ended:
            has_ended = self.status()["status"] in FINAL
            for batch in rows.commits(after):
                part, num_read = rows.part(batch), 0
                try:
                    for row in rows.rows_of_part(part) if part is not None else ():
                        num_read += 1
                        yield row
                except FileNotFoundError:
                    yield from rows.following(batch, num_read)
                    return
                after = batch["commit_number"]
            if not has_ended:
                time.sleep(POLL_S)

    def _stream_input(self, output: int) -> Iterator[Row]:
        rows = CommittedRows(self._client, self.job_id, output)
        following, after, has_ended = 0, -1, False
        while not has_ended:
            has_ended = self.status()["status"] in FINAL
            for batch in rows.batches(after):
                if batch["start_idx"] != following and not has_ended:
                    break
                yield from rows.of(batch)
                after, following = batch["start_idx"], batch["end_idx"] + 1
            if not has_ended:
                time.sleep(POLL_S)


def describe_failure(status: Status, *, for_shell: bool = False) -> str:
    """The report of a job that did not succeed: its first failed row, the traceback, and the next steps as calls in
    Python or commands of the shell."""
    job_id, num_failed, num_ok = status["job_id"], status.get("rows_failed") or 0, status.get("rows_ok") or 0
    lines = [f"bulk job {job_id} is {status['status']}: {status.get('error') or 'no error was recorded'}"]
    if first := status.get("first_error"):
        lines += first_error_lines(first)
    if num_failed or num_ok:
        errors, partial, again, changed = (
            (
                f"`tinsmith batch errors {job_id}`",
                f"`tinsmith batch export {job_id} PATH`",
                f"`tinsmith batch resume {job_id}`",
                f"`tinsmith batch submit ... --resume-from {job_id}`",
            )
            if for_shell
            else (
                f"batch.Job({job_id}).errors()",
                f"batch.Job({job_id}).partial()",
                f"batch.Job({job_id}).resume()",
                f"Dataset.map(..., resume_from={job_id})",
            )
        )
        are = "is" if num_ok == 1 else "are"
        lines.append(
            f"{_rows(num_failed)} failed ({errors} lists them) and {_rows(num_ok)} {are} kept ({partial} reads them)."
        )
        lines.append(f"Resume with {again}, or with a changed function by {changed}.")
    return "\n".join(lines)


def first_error_lines(error: Row) -> list[str]:
    """A failed row, and the traceback of its failure."""
    row_text = json.dumps(error["row"], ensure_ascii=False)
    if len(row_text) > SHOWN_CHARACTERS:
        row_text = f"{row_text[:SHOWN_CHARACTERS]}... ({len(row_text)} characters)"
    trace = error["traceback"].rstrip() or f"{error['error_type']}: {error['message']}"
    return [f"row {error['idx']} is {row_text}", trace]


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def progress_of(status: Status) -> Progress:
    counts = ("batch_total_batches", "batch_completed_batches", "rows_ok", "rows_failed", "tokens_in", "tokens_out")
    batches, num_done, ok, failed, tokens_in, tokens_out = (status.get(name) or 0 for name in counts)
    started_at, ended_at = status.get("started_at"), status.get("ended_at")
    elapsed = max(1e-3, (ended_at or time.time()) - started_at) if started_at else 0.0
    return Progress(
        status=status["status"],
        batches=batches,
        batches_done=num_done,
        rows=status.get("total_rows"),
        rows_ok=ok,
        rows_failed=failed,
        rows_per_second=(ok + failed) / elapsed if elapsed else 0.0,
        tokens_per_second=(tokens_in + tokens_out) / elapsed if elapsed else 0.0,
        seconds_left=elapsed / num_done * (batches - num_done) if num_done and elapsed else None,
        workers=len(status.get("workers") or ()),
        retried=sum(worker["retried"] for worker in status.get("workers") or ()),
    )


def follow_logs(client: Client, job_id: int, until_end: bool) -> Iterator[Row]:
    """The events of a job and the output of its function: {at, worker_id, batch_idx, attempt_id, stream, text}.

    Events of the job have no worker. Yields the present ones or, with `until_end`, all until the job has ended.
    """
    offsets: dict[str, int] = {}
    num_events = 0
    while True:
        status = client.status(job_id)
        events = _lifecycle_events(status)
        has_ended = status["status"] in FINAL
        yield from events[num_events : len(events) - has_ended]
        num_events = max(num_events, len(events) - has_ended)
        for worker in client.logs(job_id)["workers"]:
            worker_id = worker["worker_id"]
            while (page := client.logs(job_id, worker_id, offsets.get(worker_id, 0)))["lines"]:
                yield from ({"worker_id": worker_id, **line} for line in page["lines"])
                offsets[worker_id] = page["after"]
        if has_ended:
            yield events[-1]
        if has_ended or not until_end:
            return
        time.sleep(POLL_S)


def _lifecycle_events(status: Status) -> list[Row]:
    events = [(status["created_at"], f"submitted to pool {status['pool']}")]
    if status["started_at"]:
        events.append((status["started_at"], f"running: {status['total_rows']} rows"))
    if status["status"] in FINAL:
        error = f": {status['error']}" if status["error"] else ""
        events.append((status["ended_at"], status["status"] + error))
    no_worker = dict.fromkeys(("worker_id", "stream", "batch_idx", "attempt_id"))
    return [{**no_worker, "at": at, "text": text} for at, text in events]
