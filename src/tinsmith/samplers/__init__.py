"""What the engine asks of a sampler: continuous batching over frozen weight versions.

The engine submits requests at any time and calls `step` as long as `has_work`; each step decodes one token of
every running sequence (or prefills a bounded number of prompt tokens) and returns what finished. A sampler knows
no SQL and no HTTP and is driven from one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tinsmith.errors import UserError
from tinsmith.ops import Partial, Sample, SampleResult


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The blocks of a key-value cache: of running samples, kept for prompts to come, and how many at most."""

    live_blocks: int
    cached_blocks: int
    max_blocks: int


class Sampler(Protocol):
    @property
    def has_work(self) -> bool: ...

    def submit(self, sample: Sample) -> None:
        """Enqueue a request whose version exists. Its seeds make the answer independent of its company."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Forget a waiting or running request; False if it is unknown or finished."""
        ...

    def step(self) -> list[tuple[str, SampleResult | UserError]]:
        """Run one step and return the finished requests as (request_id, outcome)."""
        ...

    def partials(self) -> list[Partial]:
        """What was drawn since the last call for requests that stream; nothing, if a sampler cannot tell."""
        ...

    def cache_use(self) -> CacheUse:
        """How full the key-value cache is now; zeros, if a sampler has none."""
        ...
