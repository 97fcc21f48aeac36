"""What runs in a mapper's process: `load()` and `save_results()`, the loop around the mapper, and splitting the input.

A mapper that raises is called again, so what it loaded is loaded again, and the batch it raised in has failed. One that
raises before it takes its first batch, or twice without taking one, is a MapperStartError.

`plan` splits a job's input into batches: spans of its rows, in order, that cover each row once. It runs readers, so it
runs in workers only. Nothing here knows the coordinator, a database or the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, overload

from tinsmith.batch import operations
from tinsmith.batch.client import adapters, functions
from tinsmith.batch.formats import registry
from tinsmith.batch.formats.input_versions import Version
from tinsmith.batch.formats.registry import InputReader
from tinsmith.batch.operations import runtime as answering
from tinsmith.batch.operations.runtime import Channel
from tinsmith.batch.types import FINAL_ERRORS, Assignment, JobSpec, MapperStartError, ProgramError, Row, Span
from tinsmith.batch.worker.feed import Feed, Report, text_of
from tinsmith.batch.worker.markers import Marker
from tinsmith.errors import UserError

if TYPE_CHECKING:
    from tinsmith.batch.client.dataset import Dataset

_feed: Feed | None = None


def batch_at_work() -> Assignment | None:
    """The batch that the mapper has at this moment; None between batches, and in threads that read or store others."""
    return _feed.at_work if _feed is not None else None


@overload
def load() -> Feed: ...
@overload
def load(source: InputReader | str | Sequence[Row]) -> Dataset: ...


def load(source: InputReader | str | Sequence[Row] | None = None) -> Feed | Dataset:
    """On a worker: the batches of rows of this job, to loop over. With a path or reader, the data set that it names."""
    if source is not None:
        from tinsmith.batch.client.dataset import Dataset

        return Dataset(source)
    if _feed is None:
        raise RuntimeError(
            "load() gives batches on a worker only; here, load(PATH) makes a Dataset and Dataset.map runs the mapper"
        )
    return _feed


def save_results(results: Sequence[object], *, tokens_in: int = 0, tokens_out: int = 0) -> None:
    """On a worker: the results of the batch at hand, one for each row, in order, or with `rows="any"` any number of
    them; each a dict or a RowError. Another number of them fails the job."""
    if _feed is None:
        raise RuntimeError("save_results stores results on a worker only; there was no load() before it")
    _feed.save(results, tokens_in, tokens_out)


def run(
    spec: JobSpec,
    assignments: Iterable[Assignment],
    report: Report,
    channel: Channel | None = None,
    marker: Marker | None = None,
    eager: bool = True,
) -> None:
    """Runs a job's mapper over assignments until there are no more; calls `report` once for each, from any thread.
    Operations ask on the channel what they need of the service. `marker` is told what is worked on. Rows are read
    before the mapper asks for them only if `eager`.

    Raises MapperStartError, with the mapper's traceback as text, if it cannot be loaded or does not get to work, and
    what `assignments` raises, once what it gave before is stored and reported.
    """
    global _feed
    try:
        steps = operations.steps_of(spec.batch_serialized_fn)
        mapper = functions.load_mapper(spec.batch_serialized_fn) if steps is None else None
        feed = Feed(spec, assignments, report, marker, eager)
    except Exception as error:
        raise MapperStartError(text_of(error), final=True) from error
    _feed = feed
    try:
        if mapper is None:
            assert steps is not None and channel is not None
            loop, name = partial(answering.run, steps, feed, channel), "operations"
        else:
            loop, name = adapters.loop_of(mapper, feed), mapper.name
        while not feed.ended:
            _run_once(loop, name, feed)
        feed.finish()
        if feed.broken is not None:
            raise feed.broken
    finally:
        _feed = None


def _run_once(loop: Callable[[], object], name: str, feed: Feed) -> None:
    taken = feed.taken
    feed.start()
    try:
        made = loop()
        if asyncio.iscoroutine(made):
            asyncio.run(made)
        if not feed.ended and feed.taken == taken:
            raise ProgramError(f"the mapper {name!r} returned without taking a batch; it must loop over load()")
        if not feed.ended:
            feed.fail_current(ProgramError(f"the mapper {name!r} returned while there were batches left"))
    except Exception as error:
        # After the last batch, what the mapper raises takes nothing away from what it saved.
        if not feed.fail_current(error) and feed.taken == taken and not feed.ended:
            raise MapperStartError(text_of(error), final=isinstance(error, FINAL_ERRORS)) from error


@dataclass(frozen=True)
class Even:
    """Batches of one size, but perhaps the last: a million of them are told in two numbers."""

    total_rows: int
    batch_size: int

    def __iter__(self) -> Iterator[Span]:
        for start in range(0, self.total_rows, self.batch_size):
            yield Span(start, min(start + self.batch_size, self.total_rows) - 1)


def version_of(spec: JobSpec) -> Version | None:
    """What the input is now. To be taken before `plan`: a change between the two is then seen, and not missed."""
    try:
        return registry.reader_from_dict(spec.batch_input_format).version()
    except FileNotFoundError:  # `plan` says what is missing in the reader's words
        return None


def plan(spec: JobSpec) -> Iterable[Span]:
    """Checks that the outputs can be published, counts the rows and splits them.

    A batch has `batch_size` rows, and, where the job has `batch_tokens`, fewer where these would be more tokens by
    the reader's estimate. A row that is larger than that alone is a batch of its own.
    """
    reader = registry.reader_from_dict(spec.batch_input_format)
    for output in [*spec.batch_output_formats, *([spec.batch_error_format] if spec.batch_error_format else [])]:
        registry.writer_from_dict(output).check_output(spec.if_exists)
    if spec.batch_tokens is None:
        return Even(len(reader), spec.batch_size)
    sizes = reader.row_sizes()
    if sizes is None:
        raise UserError(f"a {type(reader).__name__} cannot tell how large its rows are; leave batch_tokens out")
    return _by_tokens(sizes, spec.batch_size, spec.batch_tokens)


def _by_tokens(sizes: Iterable[int], batch_size: int, batch_tokens: int) -> Iterator[Span]:
    start, count, tokens = 0, 0, 0
    for size in sizes:
        if count and (count == batch_size or tokens + size > batch_tokens):
            yield Span(start, start + count - 1)
            start, count, tokens = start + count, 0, 0
        count += 1
        tokens += size
    if count:
        yield Span(start, start + count - 1)
