"""`load`, which has one name for two things, as in Sky Batch: a job's rows on a worker, and a data set for a client.

A worker's function calls it without a source, and then no client library is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from tinsmith.batch.formats.registry import InputReader
from tinsmith.batch.types import Row
from tinsmith.batch.worker.runtime import current_feed

if TYPE_CHECKING:
    from tinsmith.batch.client.dataset import Dataset
    from tinsmith.batch.worker.feed import Feed


@overload
def load() -> Feed: ...
@overload
def load(source: InputReader | str | Sequence[Row]) -> Dataset: ...


def load(source: InputReader | str | Sequence[Row] | None = None) -> Feed | Dataset:
    """On a worker: the batches of rows of this job, to iterate over. With a path or reader, the data set it names."""
    if source is None:
        return current_feed()
    from tinsmith.batch.client.dataset import Dataset

    return Dataset(source)
