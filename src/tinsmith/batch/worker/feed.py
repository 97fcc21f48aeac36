"""The batches of one job on one worker: read, mapped, stored, reported.

`Feed` reads the next batch while the mapper works on one, and stores the previous one: three threads with a batch each.
The mapper's code runs only in the calling thread.

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
import queue
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tinsmith.batch.formats import input_versions, registry, schemas
from tinsmith.batch.formats.encoding import plain
from tinsmith.batch.formats.offset_cache import cache_directory
from tinsmith.batch.formats.registry import InputReader, OutputWriter
from tinsmith.batch.types import FINAL_ERRORS, Assignment, AttemptOutcome, JobSpec, ProgramError, Row, RowFailure
from tinsmith.batch.worker.children import MAP, READ, STORE, Marker

Report = Callable[[AttemptOutcome], None]
Result = Row | list[Row] | None


class RowError(Exception):
    """In place of a result: this row failed. Takes the exception, or a text."""

    def __init__(self, cause: BaseException | str) -> None:
        super().__init__(str(cause))
        self.cause = cause if isinstance(cause, BaseException) else None


@dataclass
class _Batch:
    """A batch on its way through reading, mapping and storing."""

    assignment: Assignment
    rows: list[Row] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    """The indices of `rows`, without those that could not be read."""
    failures: list[RowFailure] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    tokens: tuple[int, int] = (0, 0)
    saved: bool = False
    error: BaseException | None = None

    def output_rows(self) -> list[Row | None]:
        """For each row of the span its results, or None; if the number of results differs (`rows="any"`), these."""
        if len(self.results) != len(self.indices):
            return [row for result in self.results for row in rows_of(result)]
        by_index = dict(zip(self.indices, self.results, strict=True))
        rows: list[Row | None] = []
        for index in range(self.assignment.start_idx, self.assignment.end_idx + 1):
            result = by_index.get(index)
            rows += result if isinstance(result, list) else [result]
        return rows

    def fail_result(self, place: int, error: BaseException) -> None:
        """Fail the row of a result. If the numbers differ, the row is known only in a batch of one row: a larger batch
        fails as a whole, and is halved until it has one."""
        if len(self.results) != len(self.indices):
            if len(self.rows) > 1:
                self.error = error
                return
            self.results, place = [None], 0
        self.results[place] = None
        self.failures.append(_failure(self.indices[place], self.rows[place], error))


def rows_of(result: Result) -> list[Row]:
    return result if isinstance(result, list) else [result] if result is not None else []


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
        self._marker = marker or Marker()
        self._may_read = threading.Event()
        if eager:
            self._may_read.set()
        self._cache = str(cache_directory())
        self._reader: InputReader = registry.reader_from_dict(spec.batch_input_format)
        if spec.input_version is not None:
            input_versions.check(spec.input_version, self._reader.version())
        self._writers: list[OutputWriter] = [registry.writer_from_dict(each) for each in spec.batch_output_formats]
        self._to_map: queue.Queue[_Batch | BaseException | None] = queue.Queue(maxsize=1)
        self._to_store: queue.Queue[_Batch | None] = queue.Queue(maxsize=1)
        self._current: _Batch | None = None
        self.num_taken = 0
        self.ended = False
        self.error: BaseException | None = None
        """What the source of assignments raised."""
        self._reading = threading.Thread(target=self._read_all, args=(assignments,), name="read", daemon=True)
        self._storing = threading.Thread(target=self._store_all, name="store", daemon=True)
        self._reading.start()
        self._storing.start()

    def __iter__(self) -> Iterator[list[Row]]:
        while (rows := self.next_rows()) is not None:
            yield rows

    async def __aiter__(self) -> AsyncIterator[list[Row]]:
        while (rows := await asyncio.to_thread(self.next_rows)) is not None:
            yield rows

    @property
    def indices(self) -> Sequence[int]:
        """The indices of the input rows in the current batch."""
        return self._current.indices if self._current is not None else []

    @property
    def at_work(self) -> Assignment | None:
        """The assignment of the current batch."""
        if self._current is None or threading.current_thread() in (self._reading, self._storing):
            return None
        return self._current.assignment

    def next_rows(self) -> list[Row] | None:
        """The rows of the next batch that has any; None when there are no more batches."""
        while True:
            self._finish_current("the function asked for the next batch before it called save_results for this one")
            self._may_read.set()
            if self.ended:
                return None
            batch = self._to_map.get()
            if not isinstance(batch, _Batch):
                self.ended, self.error = True, batch
                return None
            self.num_taken += 1
            if batch.rows:
                self._current = batch
                self._marker.begin(MAP, batch.assignment)
                return batch.rows
            self._to_store.put(batch)

    def start(self) -> None:
        """The mapper begins, perhaps again."""
        self._marker.start()

    def at_row(self, row_idx: int) -> None:
        """The row of the current batch that is mapped from now on; `NO_ROW` after the last."""
        self._marker.row(row_idx)

    def save(self, results: Sequence[object], tokens_in: int, tokens_out: int) -> None:
        batch = self._current
        if batch is None:
            raise RuntimeError("save_results was called before load() gave a batch; call it once for each batch")
        if batch.saved:
            batch.error = ProgramError("save_results was called twice for one batch; call it once, with all results")
            raise batch.error
        batch.saved = True
        batch.tokens = (tokens_in, tokens_out)
        results = list(results)
        if self._spec.rows != "any" and len(results) != len(batch.rows):
            batch.error = wrong_number(len(results), len(batch.rows))
            return
        batch.results = [None] * len(results)
        for place, result in enumerate(results):
            try:
                batch.results[place] = self._checked(result)
            except Exception as error:  # noqa: BLE001  fails the row
                batch.fail_result(place, error)
                if len(results) != len(batch.rows):
                    return

    def fail_current(self, error: BaseException) -> bool:
        """Fail the current batch; False if there is none that has not been saved."""
        if self._current is None or self._current.saved:
            return False
        self._current.saved, self._current.error = True, error
        return True

    def finish(self) -> None:
        """Wait until everything is stored and reported."""
        self._finish_current("the function returned before it called save_results for this batch")
        self._to_store.put(None)
        self._storing.join()

    def _finish_current(self, complaint: str) -> None:
        """Only now is it certain that the current batch was saved once."""
        batch, self._current = self._current, None
        self._marker.end(MAP)
        if batch is None:
            return
        error = batch.error if batch.saved else ProgramError(f"{complaint}; call it once for each batch")
        if error is None:
            self._to_store.put(batch)
        else:
            self._report(_failed(batch.assignment, error))

    def _checked(self, result: object) -> Result:
        """The result as it is written. Raises the result's own error, or TypeError."""
        if isinstance(result, RowError):
            raise (result.cause or result)
        if isinstance(result, BaseException):
            raise result
        if self._spec.rows == "any" and (result is None or isinstance(result, list)):
            rows = result or []
        elif isinstance(result, dict):
            rows = [result]
        else:
            allowed = "a dict, a list of them or None" if self._spec.rows == "any" else 'a dict (see also rows="any")'
            raise TypeError(f"the result of a row is a {type(result).__name__}; it must be {allowed}")
        for row in rows:
            if not isinstance(row, dict):
                raise TypeError(f"the result of a row is a list with a {type(row).__name__}; it must hold objects")
            for writer in self._writers:
                writer.check(row)
        return rows if isinstance(result, list) else result

    # The reading thread.

    def _read_all(self, assignments: Iterable[Assignment]) -> None:
        try:
            for assignment in assignments:
                self._may_read.wait()
                self._marker.begin(READ, assignment)
                try:
                    batch = self._read(assignment)
                except Exception as error:  # noqa: BLE001  fails the batch
                    self._report(_failed(assignment, error))
                    continue
                finally:
                    self._marker.end(READ)
                self._to_map.put(batch)
            self._to_map.put(None)
        except BaseException as error:  # noqa: BLE001  of the source of assignments; `run` raises it
            self._to_map.put(error)

    def _read(self, assignment: Assignment) -> _Batch:
        """The rows of an assignment. If they cannot be read together, each is read alone."""
        batch = _Batch(assignment)
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
                    batch.failures.append(_failure(index, None, error))
        if len(batch.rows) != len(batch.indices):
            raise ProgramError(
                f"the {type(self._reader).__name__} gave {len(batch.rows)} rows for {start} to {end}, both included"
            )
        return batch

    # The storing thread.

    def _store_all(self) -> None:
        while (batch := self._to_store.get()) is not None:
            self._marker.begin(STORE, batch.assignment)
            try:
                outcome = self._store(batch)
            except Exception as error:  # noqa: BLE001  fails the batch
                outcome = _failed(batch.assignment, error)
            self._report(outcome)
            self._marker.end(STORE)

    def _check_schemas(self, batch: _Batch) -> None:
        """Rows whose types conflict with those of earlier rows, in the batch or in what is committed, fail."""
        known = batch.assignment.schemas or (None,) * len(self._writers)
        for writer, types in zip(self._writers, known, strict=True):
            found, results = types or {}, batch.results
            for place, result in enumerate(results):
                try:
                    for row in rows_of(result):
                        schema = writer.schema(row)
                        found = schemas.merged(found, schema) if schema is not None else found
                except schemas.SchemaConflictError as error:
                    batch.fail_result(place, error)
                    if batch.results is not results:
                        break  # its one row has failed
                    if batch.error is not None:
                        return

    def _store(self, batch: _Batch) -> AttemptOutcome:
        assignment = batch.assignment
        self._check_schemas(batch)
        if batch.error is not None:
            return _failed(assignment, batch.error)
        rows = batch.output_rows()
        parts = [
            writer.write_part(rows, assignment.span, base)
            for writer, base in zip(self._writers, assignment.part_bases, strict=True)
        ]
        return AttemptOutcome(
            batch_idx=assignment.batch_idx,
            attempt_id=assignment.attempt_id,
            parts=tuple(parts),
            rows_ok=assignment.span.rows - len(batch.failures),
            rows_failed=len(batch.failures),
            tokens_in=batch.tokens[0],
            tokens_out=batch.tokens[1],
            row_failures=tuple(sorted(batch.failures, key=lambda failure: failure.idx)),
        )


def wrong_number(results: int, rows: int) -> ProgramError:
    return ProgramError(
        f"the function gave {results} {'row' if results == 1 else 'rows'} for a batch of {rows}; it must give one for "
        'each row, in the same order. With rows="any" (in the shell: --rows any) a batch may give any number of rows'
    )


def _failed(assignment: Assignment, error: BaseException) -> AttemptOutcome:
    return AttemptOutcome(
        batch_idx=assignment.batch_idx,
        attempt_id=assignment.attempt_id,
        error_type=type(error).__name__,
        error=text_of(error),
        final=isinstance(error, FINAL_ERRORS),
    )


def _failure(index: int, row: Row | None, error: BaseException) -> RowFailure:
    shown = plain(row) if row is not None else None
    return RowFailure(
        idx=index,
        error_type=type(error).__name__,
        message=str(error),
        traceback=text_of(error),
        row=shown if isinstance(shown, dict) else None,
    )


def text_of(error: BaseException) -> str:
    """The traceback without this package's frames above the mapper's; for a broken rule, only the message."""
    if isinstance(error, ProgramError | input_versions.InputChangedError):
        return str(error)
    frames = error.__traceback__
    while frames is not None and "/tinsmith/batch/" in frames.tb_frame.f_code.co_filename and frames.tb_next:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))
