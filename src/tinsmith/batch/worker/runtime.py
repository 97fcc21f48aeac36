"""The runtime of a mapper's process: `load()`, `save_results()`, and the loop around the mapper.

A mapper that raises fails its current batch and is called again, so it loads its own state again. If it raises before
it takes its first batch, or twice without taking one, that is a MapperStartError. This module knows no coordinator,
database or network.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from tinsmith.batch.client.functions import mapper_of
from tinsmith.batch.operations.runtime import Channel
from tinsmith.batch.stages import JobStage, stages_of
from tinsmith.batch.types import (
    FINAL_ERRORS,
    MACHINE_ERRORS,
    Assignment,
    FailureCause,
    JobSpec,
    MapperStartError,
    ProgramError,
)
from tinsmith.batch.worker import adapters, pipeline
from tinsmith.batch.worker.event_loop import EventLoop
from tinsmith.batch.worker.feed import BatchSource, Feed, Report, format_traceback
from tinsmith.batch.worker.frames import Message
from tinsmith.batch.worker.marker import Marker
from tinsmith.batch.worker.pipeline import StageLauncher
from tinsmith.batch.worker.stage_feed import StageFeed

Send = Callable[[Message], None]

_feed: Feed | StageFeed | None = None


def current_batch() -> Assignment | None:
    """The batch that the mapper works on; None between batches, and on threads that read or store other batches."""
    return _feed.current_assignment if _feed is not None else None


def take_back(keys: set[tuple[int, int]]) -> list[Assignment]:
    """Remove the attempts that wait for the mapper, on any thread."""
    return _feed.take_back(keys) if isinstance(_feed, Feed) else []


def current_feed() -> Feed:
    """The batches of rows of this job. Raises RuntimeError outside a worker."""
    if not isinstance(_feed, Feed):
        raise RuntimeError(
            "load() gives batches on a worker only; here, load(PATH) makes a Dataset and Dataset.map runs the mapper"
        )
    return _feed


def save_results(results: Sequence[object], *, tokens_in: int = 0, tokens_out: int = 0) -> None:
    """On a worker: store the results of the current batch, one dict or RowError for each row, in order. With
    `rows="any"` there may be any number of results; otherwise another number fails the job."""
    if not isinstance(_feed, Feed):
        raise RuntimeError("save_results stores results on a worker only; there was no load() before it")
    _feed.save(results, tokens_in, tokens_out)


def run(
    spec: JobSpec,
    assignments: Iterable[Assignment],
    report: Report,
    channel: Channel | None = None,
    marker: Marker | None = None,
    eager: bool = True,
    launcher: StageLauncher | None = None,
) -> None:
    """Run a job's mapper over assignments to their end; calls `report` with some outcomes at a time, on any thread.

    Operations use the channel for requests to the service. `eager` reads rows before the mapper asks for them. Without
    a launcher, this process runs all stages. Raises MapperStartError with the mapper's traceback as text if the mapper
    cannot be loaded or does not take a batch, and what `assignments` raises, once the earlier batches are stored and
    reported.
    """
    global _feed
    try:
        stages = stages_of(spec.batch_serialized_fn) if launcher is not None else []
        steps = adapters.steps_of(spec.batch_serialized_fn) if len(stages) < 2 else []
        feed = Feed(spec, assignments, report, marker, eager)
    except Exception as error:
        raise MapperStartError(format_traceback(error), _permanent_cause(error)) from error
    _feed = feed
    with contextlib.closing(EventLoop()) as event_loop:  # closed when everything is stored: it may take long
        try:
            if launcher is not None and len(stages) > 1:
                loop = pipeline.loop_of(stages, spec, feed, channel, launcher)
            else:
                loop = adapters.loop_of(steps, spec, feed, channel, event_loop)
            name = getattr(steps[0], "name", "operations") if steps else "pipeline"
            while not feed.is_at_end:
                feed.marker.set_starting(True)
                _run_once(loop, name, feed, event_loop)
            feed.finish()
            if feed.error is not None:
                raise feed.error
        finally:
            _feed = None


def run_stage(spec: JobSpec, stage: JobStage, batches: Iterator[Message], send: Send, marker: Marker) -> None:
    """Run the steps of a stage over batches to their end, in one of its processes. Raises as `run` does."""
    global _feed
    try:
        steps = [mapper_of(step) for step in stage.steps]
    except Exception as error:
        raise MapperStartError(format_traceback(error), _permanent_cause(error)) from error
    _feed = feed = StageFeed(stage.name, spec, batches, send, marker)
    with contextlib.closing(EventLoop()) as event_loop:
        loop = adapters.loop_of(steps, spec, feed, None, event_loop)
        while not feed.is_at_end:
            _run_once(loop, stage.name, feed, event_loop)


def _run_once(loop: Callable[[], object], name: str, feed: BatchSource, event_loop: EventLoop) -> None:
    num_taken = feed.num_taken
    try:
        result = loop()
        if asyncio.iscoroutine(result):
            try:
                event_loop.run(result)
            finally:
                event_loop.cancel_tasks()  # it loads its own state again
        if not feed.is_at_end and feed.num_taken == num_taken:
            raise ProgramError(f"the mapper {name!r} returned without taking a batch; it must loop over load()")
        if not feed.is_at_end:
            feed.fail_current(ProgramError(f"the mapper {name!r} returned while there were batches left"))
    except MapperStartError:
        raise
    except Exception as error:
        # An error after the last batch does not affect the results that were saved.
        if not feed.fail_current(error) and feed.num_taken == num_taken and not feed.is_at_end:
            cause = _permanent_cause(error) if isinstance(error, FINAL_ERRORS) else FailureCause.SETUP
            raise MapperStartError(format_traceback(error), cause) from error


def _permanent_cause(error: Exception) -> FailureCause:
    """The cause of a start that would fail in the same way again, on this machine or on any."""
    return FailureCause.SETUP_OF_MACHINE if isinstance(error, MACHINE_ERRORS) else FailureCause.SETUP_OF_PROGRAM
