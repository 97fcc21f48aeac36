"""The batches of a job: spans of its rows, in order, that cover each row once. Runs readers, so in workers only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tinsmith.batch.formats import registry
from tinsmith.batch.formats.input_versions import Version
from tinsmith.batch.formats.protocols import JobSpec, Span
from tinsmith.errors import UserError


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
