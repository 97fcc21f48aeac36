"""The batches of one job on one worker: read, mapped, stored, reported.

`Feed` reads the next batches while the mapper works on some, and stores the previous ones, on two threads of its own.
Short batches wait between the threads in larger numbers (`BoundedQueue`), and those that wait to be stored share
objects and one fsync. A function that loops over batches has one current batch; the steps of other mappers take batches
and finish each (`take_batch`, `finish_batch`), up to `MAX_CONCURRENT_BATCHES` at a time.

Invariants:
- Every assignment is reported once: parts and counts, or why it failed.
- A mapper that saves the wrong number of results, saves twice or does not save fails its batch with a ProgramError,
  which ends the job: it would do the same with every batch, and with half a batch the number may match by accident.
  With `rows="any"` a batch may have any number of results.
- A row that cannot be read, whose result is an error, or that an output cannot write, fails in every output. The other
  rows of its batch are stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

from tinsmith.batch.formats import input_versions, publishing, schemas
from tinsmith.batch.formats.encoding import plain
from tinsmith.batch.formats.offset_cache import cache_directory
from tinsmith.batch.formats.registry import InputReader, OutputWriter
from tinsmith.batch.formats.snapshots import open_input
from tinsmith.batch.types import (
    FINAL_ERRORS,
    MAX_CONCURRENT_BATCHES,
    Assignment,
    AttemptOutcome,
    JobSpec,
    PartInfo,
    ProgramError,
    Row,
    RowFailure,
    StageWork,
    is_retried,
)
from tinsmith.batch.worker.marker import MAP, NO_ROW, READ, STORE, Marker
from tinsmith.errors import UserError

Report = Callable[[Sequence[AttemptOutcome]], None]
task_assignment: ContextVar[Assignment | None] = ContextVar("task_assignment", default=None)
"""The assignment of the batch that a task or thread works on, where several batches run at a time."""
MAX_QUEUED_ROWS = 256
"""The most rows in a queue between two threads; a batch of more rows waits alone."""
FORMATS_DIRECTORY = "/tinsmith/batch/formats/"
UNKNOWN_POSITION = -1
"""The position of the input row of a result whose input row is unknown, since a function of batches changed the number
of rows."""


class BatchSource(Protocol):
    """The batches of a loop over them: those of a job on its worker, or of one stage of it in one of its processes."""

    marker: Marker
    num_taken: int
    is_at_end: bool

    @property
    def current_assignment(self) -> Assignment | None: ...

    def next_batch(self) -> BatchRows | None: ...

    def take_batch(self) -> BatchRows | None: ...

    def finish_batch(self, batch: BatchRows, error: BaseException | None = None) -> None: ...

    def fail_current(self, error: BaseException) -> bool: ...

    def stop_taking(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """What is reported of an error, in types of JSON."""

    error_type: str
    message: str
    traceback: str
    final: bool
    """Whether no other attempt can succeed."""
    retry: bool
    """Whether another attempt at the same rows may succeed."""


class ReportedError(Exception):
    """An error of another process."""

    def __init__(self, report: ErrorReport) -> None:
        super().__init__(report.message)
        self.report = report


def report_error(error: BaseException, retry_on: Sequence[str] | None) -> ErrorReport:
    if isinstance(error, ReportedError):
        return error.report
    is_final, retry = isinstance(error, FINAL_ERRORS), is_retried(error, retry_on)
    return ErrorReport(type(error).__name__, str(error), format_traceback(error), is_final, retry)


class RowError(Exception):
    """A result that fails its row, with an exception or a text as the cause."""

    def __init__(self, cause: BaseException | str) -> None:
        super().__init__(str(cause))
        self.cause = cause if isinstance(cause, BaseException) else None


@dataclass
class BatchRows:
    """A batch on its way through reading, the steps of the mapper, and storing."""

    assignment: Assignment
    rows: list[Row] = field(default_factory=list)
    """The input rows that could be read."""
    indices: list[int] = field(default_factory=list)
    """The indices of `rows`."""
    read_failures: list[RowFailure] = field(default_factory=list)
    """The rows that could not be read."""
    results: Sequence[Row] = ()
    """The results of the last step."""
    positions: Sequence[int] = ()
    """The position in `rows` of the input row of each result."""
    row_errors: dict[int, BaseException] = field(default_factory=dict)
    """The first error of each failed row, by its position in `rows`."""
    tokens: tuple[int, int] = (0, 0)
    stage_work: list[StageWork] = field(default_factory=list)
    began_at: float = 0.0
    """When the mapper took it, on the monotonic clock."""
    saved: bool = False
    error: BaseException | None = None
    """The error of the batch as a whole."""
    slot: int = MAP
    """The slot of the marker while it is mapped."""

    @contextlib.contextmanager
    def measure(self, stage: int = 0, began_at: float | None = None) -> Iterator[None]:
        """Record what a stage does within the block, unless it fails as a whole. `began_at` is a monotonic time."""
        rows_in, num_failed = len(self.results), len(self.row_errors)
        began_at = time.monotonic() if began_at is None else began_at
        yield
        work_s, rows_failed = time.monotonic() - began_at, len(self.row_errors) - num_failed
        self.stage_work.append(StageWork(stage, rows_in, len(self.results), rows_failed, work_s))

    @property
    def key(self) -> tuple[int, int]:
        return self.assignment.key

    @property
    def queued_rows(self) -> int:
        """How many of the `MAX_QUEUED_ROWS` of a queue the batch takes."""
        return max(1, len(self.rows))

    @property
    def result_indices(self) -> list[int]:
        """The index of the input row of each result."""
        return [NO_ROW if position == UNKNOWN_POSITION else self.indices[position] for position in self.positions]

    def set_results(self, results: Sequence[object], any_number: bool) -> None:
        """Store the results of a step; an error among them fails its row. `any_number`: a result may be several rows
        or none."""
        positions = self.positions if len(results) == len(self.positions) else [UNKNOWN_POSITION] * len(results)
        if all(type(result) is dict for result in results):
            self.results, self.positions = results, positions  # type: ignore[assignment]
            return
        parsed: list[tuple[int, Row]] = []
        for position, result in zip(positions, results, strict=True):
            try:
                parsed += [(position, row) for row in parse_result(result, any_number)]
            except Exception as error:  # noqa: BLE001  fails the row
                self.fail(position, error)
        surviving = [(position, row) for position, row in parsed if position not in self.row_errors]
        self.results, self.positions = [row for _, row in surviving], [position for position, _ in surviving]

    def fail_unsaved(self, error: BaseException) -> bool:
        """Fail the whole batch; False if its results were saved."""
        if self.saved:
            return False
        self.saved, self.error = True, error
        return True

    def fail(self, position: int, error: BaseException) -> None:
        self.row_errors.setdefault(position, error)

    def surviving_results(self) -> Iterator[tuple[int, Row]]:
        """The results of rows that have not failed, with their positions."""
        return (
            (position, row)
            for position, row in zip(self.positions, self.results, strict=True)
            if position not in self.row_errors
        )

    @property
    def batch_error(self) -> BaseException | None:
        """The error that fails the batch as a whole: its own, or a row's where it is not known which row it is. Such a
        batch is halved until it has one row, which then has failed."""
        if (
            self.error is None
            and len(self.rows) > 1
            and self.row_errors
            and UNKNOWN_POSITION in {*self.row_errors, *self.positions}
        ):
            return next(iter(self.row_errors.values()))
        return self.error

    @property
    def failures(self) -> list[RowFailure]:
        errors = self.row_errors.items()
        map_failures = [
            _build_row_failure(self.indices[position], self.rows[position], error) for position, error in errors
        ]
        return sorted([*self.read_failures, *map_failures], key=lambda failure: failure.idx)

    def output_rows(self) -> Sequence[Row | None]:
        """The results of each row of the span, or None in place of them; if the rows of the results are unknown, only
        the results."""
        is_one_per_row = isinstance(self.positions, range) and len(self.indices) == self.assignment.span.rows
        if not self.row_errors and (is_one_per_row or UNKNOWN_POSITION in self.positions):
            return self.results
        by_index: dict[int, list[Row | None]] = {}
        for position, row in self.surviving_results():
            by_index.setdefault(self.indices[position], []).append(row)
        start, end = self.assignment.span
        return [row for index in range(start, end + 1) for row in by_index.get(index, [None])]


def parse_result(result: object, any_number: bool) -> list[Row]:
    """The rows that a function returned for one; with `any_number`, there may be several or none. Raises the result's
    own error, or TypeError."""
    if isinstance(result, dict):
        return [result]
    if isinstance(result, RowError):
        raise (result.cause or result)
    if isinstance(result, BaseException):
        raise result
    if not any_number or not (result is None or isinstance(result, list)):
        allowed = "a dict, a list of them or None" if any_number else 'a dict (see also rows="any")'
        raise TypeError(f"the result of a row is a {type(result).__name__}; it must be {allowed}")
    for row in result or ():
        if not isinstance(row, dict):
            raise TypeError(f"the result of a row is a list with a {type(row).__name__}; it must hold dicts")
    return result or []


Item = TypeVar("Item", Assignment, BatchRows)


class BoundedQueue(Generic[Item]):
    """A queue between two threads with room for at least one item, and for more while they have few rows."""

    def __init__(self, rows_of: Callable[[Item], int]) -> None:
        self._items: deque[Item] = deque()
        self._rows_of = rows_of
        self._num_rows = 0
        self._closed = False
        self._changed = threading.Condition()

    def put(self, item: Item) -> None:
        """Add an item; waits for room."""
        rows = self._rows_of(item)
        with self._changed:
            self._changed.wait_for(lambda: not self._items or self._num_rows + rows <= MAX_QUEUED_ROWS)
            self._items.append(item)
            self._num_rows += rows
            self._changed.notify_all()

    def close(self) -> None:
        """End the queue after the items that wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self, limit: int | None = None) -> list[Item]:
        """Remove all waiting items, or the first `limit`; blocks until there is one, and returns none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed)
            return self._remove(list(islice(self._items, limit)))

    def take_back(self, keys: set[tuple[int, int]]) -> list[Item]:
        """Remove and return the items of these attempts."""
        with self._changed:
            return self._remove([item for item in self._items if item.key in keys])

    def __iter__(self) -> Iterator[Item]:
        while items := self.take(1):
            yield items[0]

    def _remove(self, items: list[Item]) -> list[Item]:
        for item in items:
            self._items.remove(item)
            self._num_rows -= self._rows_of(item)
        self._changed.notify_all()
        return items


class Feed:
    """The batches of one job on one worker; `load()` returns it, for `for` or `async for`."""

    def __init__(
        self,
        spec: JobSpec,
        assignments: Iterable[Assignment],
        report: Report,
        marker: Marker | None = None,
        eager: bool = True,
    ) -> None:
        self._spec = spec
        self._report = report
        self.marker = marker or Marker()
        self._may_read = threading.Event()
        if eager:
            self._may_read.set()
        self._cache = str(cache_directory())
        self._reader: InputReader = open_input(spec)
        if spec.input_version is not None:
            input_versions.check(spec.input_version, self._reader.version())
        self._writers: list[OutputWriter] = [OutputWriter.from_dict(data) for data in spec.batch_output_formats]
        self._have_schemas = any(type(writer).schema is not OutputWriter.schema for writer in self._writers)
        self._to_map = BoundedQueue[BatchRows](lambda batch: batch.queued_rows)
        self._to_store = BoundedQueue[BatchRows](lambda batch: batch.queued_rows)
        self._current: BatchRows | None = None
        self._free_slots = list(range(MAP, MAP + MAX_CONCURRENT_BATCHES))
        self.num_taken = 0
        self.is_at_end = False
        self.error: BaseException | None = None
        """The exception that the source of assignments raised."""
        self._read_thread = threading.Thread(target=self._read_all, args=(assignments,), name="read", daemon=True)
        self._store_thread = threading.Thread(target=self._store_all, name="store", daemon=True)
        self._read_thread.start()
        self._store_thread.start()

    def __iter__(self) -> Iterator[list[Row]]:
        while (batch := self.next_batch()) is not None:
            yield batch.rows

    async def __aiter__(self) -> AsyncIterator[list[Row]]:
        while (batch := await asyncio.to_thread(self.next_batch)) is not None:
            yield batch.rows

    def take_back(self, keys: set[tuple[int, int]]) -> list[Assignment]:
        """Remove the attempts whose rows were read and that the mapper has not begun."""
        return [batch.assignment for batch in self._to_map.take_back(keys)]

    @property
    def current_assignment(self) -> Assignment | None:
        """The assignment of the batch that the calling task works on, or else of the current batch."""
        if (assignment := task_assignment.get()) is not None:
            return assignment
        if self._current is None or threading.current_thread() in (self._read_thread, self._store_thread):
            return None
        return self._current.assignment

    def next_batch(self) -> BatchRows | None:
        """Finish the current batch, and make the next one that has rows current; None when there are no more."""
        self._finish_current("the function asked for the next batch before it called save_results for this one")
        self._current = self.take_batch()
        return self._current

    def take_batch(self) -> BatchRows | None:
        """The next batch that has rows, which is to be finished; None when there are no more. Blocks, on any thread."""
        self.marker.set_starting(False)
        self._may_read.set()
        while True:
            batches = [] if self.is_at_end else self._to_map.take(1)
            if not batches:
                self.is_at_end = True
                return None
            batch = batches[0]
            self.num_taken += 1
            if batch.rows:
                batch.slot = self._free_slots.pop()
                self.marker.begin(batch.slot, batch.assignment)
                batch.began_at = time.monotonic()
                return batch
            self._to_store.put(batch)

    def finish_batch(self, batch: BatchRows, error: BaseException | None = None) -> None:
        """Store a batch after its last step, or report that it failed. Waits for room, on any thread."""
        if error is None and len(self._writers) > 1:  # only the writer finds out which rows it cannot write
            self._fail_unwritable(batch)
        self.marker.end(batch.slot)
        self._free_slots.append(batch.slot)
        error = error or batch.batch_error
        if error is None:
            self._to_store.put(batch)
        else:
            self._report([self._failure_outcome(batch.assignment, error)])

    def stop_taking(self) -> None:
        """Make `take_batch` return on all threads: no batches come after those that wait."""
        self._to_map.close()

    def save(self, results: Sequence[object], tokens_in: int, tokens_out: int) -> None:
        """Save the results of the current batch, from a function that loops over batches."""
        batch = self._current
        if batch is None:
            raise RuntimeError("save_results was called before load() gave a batch; call it once for each batch")
        if batch.saved:
            batch.error = ProgramError("save_results was called twice for one batch; call it once, with all results")
            raise batch.error
        results, any_number = list(results), self._spec.rows == "any"
        if not any_number and len(results) != len(batch.rows):
            batch.saved, batch.error = True, row_count_error(len(results), len(batch.rows))
            return
        batch.tokens = tokens_in, tokens_out
        with batch.measure(began_at=batch.began_at):
            batch.set_results(results, any_number)
        batch.saved = True

    def fail_current(self, error: BaseException) -> bool:
        """Fail the current batch; False if there is none that has not been saved."""
        return self._current is not None and self._current.fail_unsaved(error)

    def finish(self) -> None:
        """Wait until everything is stored and reported."""
        self._finish_current("the function returned before it called save_results for this batch")
        self._to_store.close()
        self._store_thread.join()

    def _finish_current(self, complaint: str) -> None:
        """Finish the current batch, of which only now it is certain that it was saved once."""
        batch, self._current = self._current, None
        if batch is not None:
            complaint = f"{complaint}; call it once for each batch"
            self.finish_batch(batch, batch.error if batch.saved else ProgramError(complaint))

    # The reading thread.

    def _read_all(self, assignments: Iterable[Assignment]) -> None:
        try:
            for assignment in assignments:
                self._may_read.wait()
                self.marker.begin(READ, assignment)
                try:
                    batch = self._read(assignment)
                except Exception as error:  # noqa: BLE001  fails the batch
                    self._report([self._failure_outcome(assignment, error)])
                    continue
                finally:
                    self.marker.end(READ)
                self._to_map.put(batch)
        except BaseException as error:  # noqa: BLE001  of the source of assignments; `run` raises it
            self.error = error
        finally:
            self._to_map.close()

    def _read(self, assignment: Assignment) -> BatchRows:
        """The rows of an assignment. If they cannot be read together, each is read alone."""
        batch = BatchRows(assignment)
        start, end = assignment.span
        with contextlib.suppress(ValueError, TypeError, KeyError):
            batch.rows = list(self._reader.download_batch(start, end, self._cache))
            batch.indices = list(range(start, end + 1))
        if not batch.rows:
            for index in range(start, end + 1):
                try:
                    batch.rows += self._reader.download_batch(index, index, self._cache)
                    batch.indices.append(index)
                except (ValueError, TypeError, KeyError) as error:
                    batch.read_failures.append(_build_row_failure(index, None, error))
        if len(batch.rows) != len(batch.indices):
            raise ProgramError(
                f"the {type(self._reader).__name__} gave {len(batch.rows)} rows for {start} to {end}, both included"
            )
        batch.results, batch.positions = batch.rows, range(len(batch.rows))
        return batch

    # The storing thread.

    def _store_all(self) -> None:
        while batches := self._to_store.take():
            self._report(self._store_together(batches))
            self.marker.end(STORE)

    def _store_together(self, batches: Sequence[BatchRows]) -> list[AttemptOutcome]:
        """Store batches; returns the outcome of each. All their parts are durable when it returns."""
        outcomes = []
        try:
            with publishing.in_segments():
                for batch in batches:
                    self.marker.begin(STORE, batch.assignment)
                    try:
                        outcomes.append(self._store(batch))
                    except Exception as error:  # noqa: BLE001  fails the batch
                        outcomes.append(self._failure_outcome(batch.assignment, error))
        except Exception as error:  # noqa: BLE001  none of the parts may be there
            return [self._failure_outcome(batch.assignment, error) for batch in batches]
        return outcomes

    def _check_schemas(self, batch: BatchRows) -> None:
        """Fail the rows whose types conflict with those of earlier rows, in the batch or in what is committed."""
        if not self._have_schemas:
            return
        committed = batch.assignment.schemas or (None,) * len(self._writers)
        for writer, types in zip(self._writers, committed, strict=True):
            merged = types or {}
            for position, row in batch.surviving_results():
                try:
                    schema = writer.schema(row)
                    merged = schemas.merge_schemas(merged, schema, values=row) if schema is not None else merged
                except schemas.SchemaConflictError as error:
                    batch.fail(position, error)

    def _store(self, batch: BatchRows) -> AttemptOutcome:
        assignment = batch.assignment
        self._check_schemas(batch)
        try:
            parts = () if batch.batch_error else self._write_parts(batch)
        except (ValueError, TypeError, KeyError):
            if len(self._writers) > 1 or not self._fail_unwritable(batch):
                raise
            parts = () if batch.batch_error else self._write_parts(batch)
        if batch.batch_error is not None:
            return self._failure_outcome(assignment, batch.batch_error)
        failures = batch.failures
        return AttemptOutcome(
            batch_idx=assignment.batch_idx,
            attempt_id=assignment.attempt_id,
            parts=parts,
            rows_ok=assignment.span.rows - len(failures),
            rows_failed=len(failures),
            tokens_in=batch.tokens[0],
            tokens_out=batch.tokens[1],
            row_failures=tuple(failures),
            stage_work=tuple(batch.stage_work),
        )

    def _write_parts(self, batch: BatchRows) -> tuple[PartInfo, ...]:
        rows = batch.output_rows()
        destinations = zip(self._writers, batch.assignment.part_bases, strict=True)
        return tuple(writer.write_part(rows, batch.assignment.span, base) for writer, base in destinations)

    def _failure_outcome(self, assignment: Assignment, error: BaseException) -> AttemptOutcome:
        report = report_error(error, self._spec.retry_on)
        return AttemptOutcome(
            batch_idx=assignment.batch_idx,
            attempt_id=assignment.attempt_id,
            error_type=report.error_type,
            error=report.traceback,
            final=report.final,
            retry=report.retry,
        )

    def _fail_unwritable(self, batch: BatchRows) -> bool:
        """Fail the rows that an output cannot write; False if there are none."""
        has_failed_rows = False
        for position, row in batch.surviving_results():
            try:
                for writer in self._writers:
                    writer.check(row)
            except Exception as error:  # noqa: BLE001  fails the row
                has_failed_rows = True
                batch.fail(position, error)
        return has_failed_rows


def row_count_error(results: int, rows: int) -> ProgramError:
    return ProgramError(
        f"the function returned {results} {'row' if results == 1 else 'rows'} for a batch of {rows}; it must return "
        'one for each row, in the same order. With rows="any" (in the shell: --rows any) it may return any number'
    )


def _build_row_failure(index: int, row: Row | None, error: BaseException) -> RowFailure:
    json_row = plain(row) if row is not None else None
    report = report_error(error, None)
    return RowFailure(
        idx=index,
        error_type=report.error_type,
        message=report.message,
        traceback=report.traceback,
        row=json_row if isinstance(json_row, dict) else None,
    )


def format_traceback(error: BaseException) -> str:
    """The traceback without this package's frames above the mapper's; for a broken rule, or what a reader or writer
    refuses, only the message."""
    if isinstance(error, ProgramError | input_versions.InputChangedError):
        return str(error)
    frames = error.__traceback__
    if isinstance(error, UserError):
        innermost = traceback.extract_tb(frames, limit=-1)
        if innermost and FORMATS_DIRECTORY in innermost[0].filename:
            return str(error)
    while frames is not None and "/tinsmith/batch/" in frames.tb_frame.f_code.co_filename and frames.tb_next:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))
