"""The steps of a data set over some of its rows, in this process and without a server: `Dataset.take` and `dry_run`.

The functions are packed and called as a worker does it, so that one that cannot be sent fails here, too. They have this
process's interpreter, packages and environment: `python`, `activate_env`, `env` and `secrets` are those of workers.
Nothing is retried, written or published.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tinsmith.batch import operations
from tinsmith.batch.formats import schemas
from tinsmith.batch.formats.registry import OUTPUT_WRITER_REGISTRY, OutputWriter
from tinsmith.batch.formats.schemas import Schema
from tinsmith.batch.formats.snapshots import open_input
from tinsmith.batch.types import (
    Assignment,
    AttemptOutcome,
    JobSpec,
    MapperStartError,
    PartInfo,
    Row,
    RowFailure,
    RowRange,
)
from tinsmith.errors import NotSupportedError, UserError
from tinsmith.runtime import notebook

ROWS = 10
"""The rows of a dry run."""
_collections: dict[str, dict[RowRange, list[Row]]] = {}
"""The results of each run in progress, by the rows of their batch."""


class RowFailedError(RuntimeError):
    """A row failed while rows were taken. `failure` says which one, and why."""

    def __init__(self, failure: RowFailure) -> None:
        super().__init__(f"row {failure.idx} failed: {failure.traceback or failure.message}".rstrip())
        self.failure = failure


@dataclass(frozen=True)
class DryRun:
    """The results of some rows, and those that failed."""

    rows: list[Row]
    errors: list[RowFailure] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"DryRun({len(self.rows)} rows, {len(self.errors)} failed)"

    def _repr_html_(self) -> str:
        failures = [{"row": error.idx, "error": error.error_type, "message": error.message} for error in self.errors]
        return notebook.table("Results", self.rows) + (notebook.table("Failed rows", failures) if failures else "")

    def check(self) -> DryRun:
        """Raises RowFailedError for the first failed row."""
        if self.errors:
            raise RowFailedError(self.errors[0])
        return self


@OUTPUT_WRITER_REGISTRY.type_register(name="collected")
@dataclass
class CollectingWriter(OutputWriter):
    """Keeps rows in this process; `path` names the run."""

    in_store = False

    def check_output(self, if_exists: str) -> None:
        """Nothing exists before a run."""

    def write_part(self, rows: Sequence[Row | None], span: RowRange, part_base: str) -> PartInfo:
        results = [row for row in rows if row is not None]
        _collections[self.path][span] = results
        return PartInfo(part_base, len(results), 0, "")


@contextlib.contextmanager
def collect() -> Iterator[tuple[CollectingWriter, dict[RowRange, list[Row]]]]:
    """A writer, and the results that its parts have, by the rows of their batches."""
    path = uuid.uuid4().hex
    _collections[path] = {}
    try:
        yield CollectingWriter(path), _collections[path]
    finally:
        del _collections[path]


def run_rows(
    spec: JobSpec, collected: dict[RowRange, list[Row]], max_rows: int | None, max_results: int | None
) -> DryRun:
    """Runs the first `max_rows` rows, one batch after the other, until there are `max_results`; None for all. Functions
    of rows get smaller batches, so that no row is run in vain. Raises UserError, NotSupportedError."""
    if operations.asks_service(spec.batch_serialized_fn):
        raise NotSupportedError(
            "Sample, Rollout and Grade(by='model') ask a server's models, so these steps do not run in this process; "
            "submit them for some rows: .limit(10).write_json(PATH)"
        )
    total = len(open_input(spec))
    for bound in (spec.limit, max_rows):
        total = total if bound is None else min(total, bound)

    is_by_row = operations.is_by_row(spec.batch_serialized_fn)

    def spans() -> Iterator[RowRange]:
        start = 0
        while start < total:
            size = spec.batch_size
            if max_results is not None:
                missing = max_results - sum(map(len, collected.values()))
                if missing <= 0:
                    return
                size = min(size, missing) if is_by_row else size
            end = min(start + size, total)
            yield RowRange(start, end - 1)
            start = end

    failures: list[RowFailure] = []
    to_repeat = _run_spans(spec, spans(), failures)
    single_rows = (RowRange(row_idx, row_idx) for span in to_repeat for row_idx in range(span[0], span[1] + 1))
    _run_spans(spec, single_rows, failures)
    rows = [row for span in sorted(collected) for row in collected[span]]
    return DryRun(rows, sorted(failures, key=lambda failure: failure.idx))


def _run_spans(spec: JobSpec, spans: Iterable[RowRange], failures: list[RowFailure]) -> list[RowRange]:
    """Runs batches, each after the end of the one before, and collects the rows that fail; returns the batches of
    several rows that failed as a whole."""
    from tinsmith.batch.worker import runtime

    span_by_batch: dict[int, RowRange] = {}
    outcomes: list[AttemptOutcome] = []
    reported = threading.Condition()

    def report(new_outcomes: Sequence[AttemptOutcome]) -> None:
        with reported:
            outcomes.extend(new_outcomes)
            reported.notify_all()

    def assignments() -> Iterator[Assignment]:
        for batch_idx, span in enumerate(spans):
            span_by_batch[batch_idx] = span
            yield Assignment(batch_idx, span.start_idx, span.end_idx, 1, ("",))
            with reported:
                reported.wait_for(lambda: len(outcomes) == len(span_by_batch))

    try:
        with ThreadPoolExecutor(1) as executor:  # a notebook's thread has a running event loop
            executor.submit(runtime.run, spec, assignments(), report).result()
    except MapperStartError as error:
        raise UserError(f"the function does not start: {error}") from None
    to_repeat: list[RowRange] = []
    for outcome in outcomes:
        span = span_by_batch[outcome.batch_idx]
        failures += outcome.row_failures
        if outcome.error and (outcome.final or span.rows == 1):
            message = outcome.error.strip().rpartition("\n")[2]
            failures.append(RowFailure(span.start_idx, outcome.error_type, message, outcome.error))
        elif outcome.error:
            to_repeat.append(span)
    return to_repeat


def check_outputs(result: DryRun, writers: Sequence[OutputWriter]) -> None:
    """Raises UserError for a row that an output could not hold."""
    for writer in writers:
        schema: Schema = {}
        for row in result.rows:
            try:
                writer.check(row)
                schema = schemas.merge_schemas(schema, writer.schema(row) or {}, values=row)
            except (ValueError, TypeError) as error:
                raise UserError(f"{writer.path} cannot hold the row {row}: {error}") from None
