"""Background writes: successes, failures and fatal errors are reported to the engine's thread."""

from __future__ import annotations

import pytest

from tinsmith.cluster.engines import LeaseLostError
from tinsmith.engine.snapshots import SnapshotWriter, WriteTask


def test_jobs_are_done_in_order_and_their_errors_are_told() -> None:
    reports: list[object] = []
    writer = SnapshotWriter()

    def fail() -> None:
        raise OSError("the disk is full")

    writer.submit(WriteTask(1, lambda: reports.append("first"), lambda error: reports.append(error)))
    writer.submit(WriteTask(1, fail, lambda error: reports.append(str(error))))
    writer.flush()
    assert reports == ["first", None, "the disk is full"]


def test_the_end_of_the_engine_is_raised_on_its_own_thread_and_nothing_more_is_written() -> None:
    reports: list[object] = []
    writer = SnapshotWriter()

    def lose() -> None:
        raise LeaseLostError("taken for dead")

    for write in (lose, lambda: reports.append("written all the same")):
        writer.submit(WriteTask(1, write, reports.append))
    with pytest.raises(LeaseLostError, match="taken for dead"):
        writer.flush()
    with pytest.raises(LeaseLostError):
        writer.collect()
    assert "written all the same" not in reports
