"""The batches of one stage of a job in one of its processes: they come from the pipeline and go back to it.

A message to the process is a batch: the pickle of `StagedBatch`. Its answers are `{"ready": True}`, once all functions
are set up; for each batch `{"key", "rows", "changes"}`, where `rows` is the pickle of the results and `changes` that of
their positions and of the rows that failed, or `{"key", "error"}`; and `start_error`, as from a mapper's process. Both
ends run code of the same job, so a pickle between them grants no access that the other end lacks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from tinsmith.batch.types import Assignment, JobSpec
from tinsmith.batch.worker.feed import BatchRows, ErrorReport, report_error, task_assignment
from tinsmith.batch.worker.frames import Message
from tinsmith.batch.worker.marker import Marker


@dataclass(frozen=True)
class StagedBatch:
    """What a stage needs of a batch. `slot` is its slot in the marker that the processes share."""

    assignment: Assignment
    indices: list[int]
    positions: Sequence[int]
    slot: int
    rows: bytes


class StageFeed:
    """A `BatchSource`. A loop over it has one batch at a time, or several if its functions are asynchronous."""

    def __init__(
        self,
        name: str,
        spec: JobSpec,
        batches: Iterator[Message],
        send: Callable[[Message], None],
        marker: Marker,
    ) -> None:
        self.marker = marker
        self.num_taken = 0
        self.is_at_end = False
        self._name = name
        self._spec = spec
        self._batches = batches
        self._send = send
        self._current: BatchRows | None = None

    @property
    def current_assignment(self) -> Assignment | None:
        current = self._current
        return task_assignment.get() or (current.assignment if current is not None else None)

    def next_batch(self) -> BatchRows | None:
        batch, self._current = self._current, None
        if batch is not None:
            self.finish_batch(batch, batch.error)
        self._current = self.take_batch()
        return self._current

    def take_batch(self) -> BatchRows | None:
        if not self.num_taken:
            self._send({"ready": True})
        self.num_taken += 1
        message = next(self._batches, None)
        if message is None:
            self.is_at_end = True
            return None
        staged: StagedBatch = pickle.loads(message["batch"])
        batch = BatchRows(staged.assignment, indices=staged.indices, positions=staged.positions, slot=staged.slot)
        try:
            batch.rows = batch.results = pickle.loads(staged.rows)
        except Exception as error:  # noqa: BLE001  a value's class may do what it likes
            self.finish_batch(batch, error)
            return self.take_batch()
        return batch

    def finish_batch(self, batch: BatchRows, error: BaseException | None = None) -> None:
        message: Message = {"key": batch.key}
        if error is None:
            changes = batch.positions, {position: self._report(error) for position, error in batch.row_errors.items()}
            try:
                message |= {"rows": pickle.dumps(list(batch.results), 5), "changes": pickle.dumps(changes, 5)}
            except Exception as cause:  # noqa: BLE001  as above
                error = TypeError(f"the results cannot go to another process, where the next step runs: {cause!r}")
        self._send(message if error is None else {"key": batch.key, "error": asdict(self._report(error))})

    def fail_current(self, error: BaseException) -> bool:
        return self._current is not None and self._current.fail_unsaved(error)

    def stop_taking(self) -> None:
        """The process ends with its input."""

    def _report(self, error: BaseException) -> ErrorReport:
        report = report_error(error, self._spec.retry_on)
        return replace(report, traceback=f"{self._name}: {report.traceback}")
