"""The batches of one job on one worker: read, handed to the mapper, stored, reported.

`Feed` reads the next batch while the mapper works on one, and stores the one before: three threads, one batch each.
The mapper's own code runs in the calling thread alone.

Invariants:
- Every assignment is reported once: parts and counts, or why it failed.
- A mapper that saves too few results, saves twice or does not save fails that batch with a ProgramError, which ends
  the job: the same mapper does the same with every batch, and with half a batch the numbers may agree by accident.
- Where the job says `rows="any"`, a batch may give any number of results.
- A row that cannot be read, whose result is an error, or that an output cannot write, is a failed row in every output;
  the others of its batch are stored.
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
from tinsmith.batch.types import FINAL_ERRORS, Assignment, JobSpec, Outcome, PartInfo, ProgramError, Row, RowFailure
from tinsmith.batch.worker.markers import MAP, READ, STORE, Marker

Report = Callable[[Outcome], None]


class RowError(Exception):
    """In place of a result: this row failed. Takes the exception, or a text."""

    def __init__(self, cause: BaseException | str) -> None:
        super().__init__(str(cause))
        self.cause = cause if isinstance(cause, BaseException) else None


@dataclass
class _Batch:
    """A batch on its way through: read, mapped, stored."""

    assignment: Assignment
    rows: list[Row] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    failures: list[RowFailure] = field(default_factory=list)
    results: list[Row | list[Row] | None] = field(default_factory=list)
    tokens: tuple[int, int] = (0, 0)
    saved: bool = False
    error: BaseException | None = None

    @property
    def rows_made(self) -> list[Row | None]:
        """The rows of the output: for each row of the span its results, None where it has none; or, where the number
        of results is not that of the rows (`rows="any"`), the results."""
        made: list[Row | None] = []
        if len(self.results) != len(self.indices):
            for result in self.results:
                made += result if isinstance(result, list) else [result] if result is not None else []
            return made
        by_index = dict(zip(self.indices, self.results, strict=True))
        for index in range(self.assignment.start_idx, self.assignment.end_idx + 1):
            result = by_index.get(index)
            made += result if isinstance(result, list) else [result]
        return made


class Feed:
    """The batches of one job on one worker; `load()` iterates over it, with `for` or `async for`."""

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
        self._asked = threading.Event()
        if eager:
            self._asked.set()
        self._cache = str(cache_directory())
        self._reader: InputReader = registry.reader_from_dict(spec.batch_input_format)
        if spec.input_version is not None:
            input_versions.check(spec.input_version, self._reader.version())
        self._writers: list[OutputWriter] = [registry.writer_from_dict(each) for each in spec.batch_output_formats]
        self._read: queue.Queue[_Batch | BaseException | None] = queue.Queue(maxsize=1)
        self._mapped: queue.Queue[_Batch | None] = queue.Queue(maxsize=1)
        self._current: _Batch | None = None
        self.taken = 0
        self.ended = False
        self.broken: BaseException | None = None
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
        """Which rows of the input the batch at hand holds."""
        return self._current.indices if self._current is not None else []

    @property
    def at_work(self) -> Assignment | None:
        if self._current is None or threading.current_thread() in (self._reading, self._storing):
            return None
        return self._current.assignment

    def next_rows(self) -> list[Row] | None:
        """The rows of the next batch that has any; None when there are no more batches."""
        while True:
            self._let_go("the function asked for the next batch before it called save_results for this one")
            self._asked.set()
            if self.ended:
                return None
            got = self._read.get()
            if got is None:
                self.ended = True
                return None
            if isinstance(got, BaseException):
                self.ended, self.broken = True, got
                return None
            self.taken += 1
            if got.rows:
                self._current = got
                self._marker.begin(MAP, got.assignment)
                return got.rows
            self._mapped.put(got)

    def start(self) -> None:
        """The mapper begins, perhaps anew."""
        self._marker.start()

    def at_row(self, row_idx: int) -> None:
        """The row of the batch at hand that is mapped from now on, until the next one; `NO_ROW` after the last."""
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
        if len(results) == len(batch.rows):
            for index, row, result in zip(batch.indices, batch.rows, results, strict=True):
                try:
                    batch.results.append(self._checked(result))
                except Exception as error:  # noqa: BLE001 (whatever it is, the row fails)
                    batch.results.append(None)
                    batch.failures.append(_failure(index, row, error))
        elif self._spec.rows == "any":
            self._save_any_number(batch, results)
        else:
            batch.error = wrong_number(len(results), len(batch.rows))

    def _save_any_number(self, batch: _Batch, results: list[object]) -> None:
        """Which row an error among these belongs to is known only where the batch is one row. A larger batch fails,
        and is halved until it is."""
        try:
            batch.results = [self._checked(result) for result in results]
        except Exception as error:  # noqa: BLE001 (whatever it is, the row fails)
            if len(batch.rows) > 1:
                batch.error = error
                return
            batch.results = [None]
            batch.failures.append(_failure(batch.indices[0], batch.rows[0], error))

    def fail_current(self, error: BaseException) -> bool:
        """The batch at hand has failed; False if there is none that could have."""
        if self._current is None or self._current.saved:
            return False
        self._current.saved, self._current.error = True, error
        return True

    def finish(self) -> None:
        """Waits until everything is stored and reported."""
        self._let_go("the function returned before it called save_results for this batch")
        self._mapped.put(None)
        self._storing.join()

    def _let_go(self, complaint: str) -> None:
        """The batch at hand is done with: only now is it certain that it was saved once."""
        batch, self._current = self._current, None
        self._marker.end(MAP)
        if batch is None:
            return
        error = batch.error if batch.saved else ProgramError(f"{complaint}; call it once for each batch")
        if error is None:
            self._mapped.put(batch)
        else:
            self._report(_failed(batch.assignment, error))

    def _checked(self, result: object) -> Row | list[Row] | None:
        """The result as it is written. Raises what is wrong with it."""
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

    def _read_all(self, assignments: Iterable[Assignment]) -> None:
        try:
            for assignment in assignments:
                self._asked.wait()
                self._marker.begin(READ, assignment)
                try:
                    batch = self._read_batch(assignment)
                except Exception as error:  # noqa: BLE001 (whatever it is, the batch fails)
                    self._report(_failed(assignment, error))
                    continue
                finally:
                    self._marker.end(READ)
                self._read.put(batch)
            self._read.put(None)
        except BaseException as error:  # noqa: BLE001 (whoever assigns has failed: `run` says so)
            self._read.put(error)

    def _read_batch(self, assignment: Assignment) -> _Batch:
        """The rows of an assignment. Where they cannot be read together, each alone."""
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

    def _store_all(self) -> None:
        while (batch := self._mapped.get()) is not None:
            self._marker.begin(STORE, batch.assignment)
            try:
                outcome = self._store(batch)
            except Exception as error:  # noqa: BLE001 (whatever it is, the batch fails)
                outcome = _failed(batch.assignment, error)
            self._report(outcome)
            self._marker.end(STORE)

    def _fit(self, batch: _Batch) -> None:
        """Rows whose types do not go with those of the rows before them, here and in what is committed, fail."""
        known = batch.assignment.schemas or (None,) * len(self._writers)
        for writer, types in zip(self._writers, known, strict=True):
            found = types or {}
            for place, result in enumerate(batch.results):
                try:
                    for row in result if isinstance(result, list) else [result] if result is not None else []:
                        schema = writer.schema(row)
                        found = schemas.merged(found, schema) if schema is not None else found
                except schemas.SchemaConflictError as error:
                    if len(batch.results) == len(batch.indices):
                        batch.results[place] = None
                        batch.failures.append(_failure(batch.indices[place], batch.rows[place], error))
                    elif len(batch.rows) > 1:  # whose result it is shows when the batch is one row
                        batch.error = error
                        return
                    else:
                        batch.results = [None]
                        batch.failures.append(_failure(batch.indices[0], batch.rows[0], error))
                        break

    def _store(self, batch: _Batch) -> Outcome:
        assignment = batch.assignment
        self._fit(batch)
        if batch.error is not None:
            return _failed(assignment, batch.error)
        rows = batch.rows_made
        parts: list[PartInfo] = [
            writer.write_part(rows, assignment.span, base)
            for writer, base in zip(self._writers, assignment.part_bases, strict=True)
        ]
        return Outcome(
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


def _failed(assignment: Assignment, error: BaseException) -> Outcome:
    return Outcome(
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
    """The traceback, without this package's frames that lead to the mapper's; of a broken rule, the rule alone."""
    if isinstance(error, ProgramError | input_versions.InputChangedError):
        return str(error)
    frames = error.__traceback__
    while frames is not None and "/tinsmith/batch/" in frames.tb_frame.f_code.co_filename and frames.tb_next:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))
