"""What the engine asks of a sampler: continuous batching over frozen weight versions.

The engine submits requests at any time and calls `step` as long as `has_work`; each step decodes one token of
every running sequence (or prefills a bounded number of prompt tokens) and returns what finished. A sampler knows
no SQL, answers no HTTP and is driven from one thread. One may have another engine sample, which it then asks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tinsmith.errors import TinsmithError
from tinsmith.types import Partial, Sample, SampleResult


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The blocks of a key-value cache: of running samples, kept for prompts to come, and how many at most; and the
    sequences that wait for a place or for blocks.
    """

    live_blocks: int
    cached_blocks: int
    max_blocks: int
    waiting_sequences: int = 0


class Sampler(Protocol):
    """`runs_by_itself`: what was submitted goes on without `step`, which only collects it."""

    @property
    def runs_by_itself(self) -> bool: ...

    @property
    def has_work(self) -> bool: ...

    def submit(self, sample: Sample) -> None:
        """Enqueue a request whose version exists. Its seeds make the answer independent of its company."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Forget a waiting or running request; False if it is unknown or finished."""
        ...

    def step(self, scopes: Collection[str] | None = None) -> Sequence[tuple[str, SampleResult | TinsmithError]]:
        """Run one step and return the finished requests as (request_id, outcome). With `scopes`, a sampler that can
        leaves requests of other cache_scopes out of the step.
        """
        ...

    def partials(self) -> list[Partial]:
        """What was drawn since the last call for requests that stream; nothing, if a sampler cannot tell."""
        ...

    def cache_use(self) -> CacheUse:
        """How full the key-value cache is now; zeros, if a sampler has none."""
        ...


class VersionHolder(Protocol):
    """A sampler and its versions: what a dedicated sampler asks of its device. A backend is one."""

    @property
    def sampler(self) -> Sampler: ...
    @property
    def model_budget_bytes(self) -> int: ...
    def load_version(self, version_id: str, directory: Path) -> None: ...
    def has_version(self, version_id: str) -> bool: ...
    def drop_version(self, version_id: str) -> None: ...
