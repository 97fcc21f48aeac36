"""What the engine requires of a sampler: continuous batching over frozen weight versions.

The engine submits requests at any time and calls `step` as long as `has_work`; each step decodes one token of every
running sequence (or prefills a bounded number of prompt tokens) and returns finished requests. A sampler uses no SQL,
serves no HTTP and is driven from one thread. A remote sampler forwards requests to another engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tinsmith.errors import TinsmithError
from tinsmith.types import Partial, Sample, SampleResult


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Blocks of the KV cache: those of running sequences, those cached for later prompts, and the maximum; and the
    sequences that wait for a slot or for blocks. `uncaptured_steps`: the decode steps so far that ran without a CUDA
    graph on a GPU that has graphs, by reason.
    """

    live_blocks: int
    cached_blocks: int
    max_blocks: int
    waiting_sequences: int = 0
    uncaptured_steps: Mapping[str, int] = field(default_factory=dict)


class InferenceServer(Protocol):
    """An inference engine in a process of its own, such as vLLM. `cannot_sleep` is the reason, or empty."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def cannot_sleep(self) -> str: ...

    def sleep(self) -> None:
        """Release the device's memory; returns when it is released. Raises TinsmithError if the server refuses."""
        ...

    def wake_up(self) -> None:
        """Take the memory back; returns when the server can sample."""
        ...


class Sampler(Protocol):
    """`runs_by_itself`: submitted requests progress without `step`, which then only collects results.
    `inference_server` is where they run, None if that is this process.
    """

    @property
    def runs_by_itself(self) -> bool: ...

    @property
    def inference_server(self) -> InferenceServer | None: ...

    @property
    def has_work(self) -> bool: ...

    def submit(self, sample: Sample) -> None:
        """Enqueue a request whose version exists. Its seeds make the answer independent of other requests."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Drop a waiting or running request; False if it is unknown or finished."""
        ...

    def pause(self, request_ids: Collection[str]) -> None:
        """Pause these of the submitted requests, and continue all others. A paused request keeps its tokens and draws
        no more; it is no work, and leaves its slot and its memory to others. A sampler that cannot pause finishes it.
        """
        ...

    def step(self, scopes: Collection[str] | None = None) -> Sequence[tuple[str, SampleResult | TinsmithError]]:
        """Run one step and return the finished requests as (request_id, outcome). With `scopes`, a sampler that
        supports it leaves requests of other cache_scopes out of the step.
        """
        ...

    def partials(self) -> list[Partial]:
        """Tokens drawn since the last call for streaming requests; empty if the sampler does not support it."""
        ...

    def cache_use(self) -> CacheUse:
        """The current use of the KV cache; zeros if the sampler has none."""
        ...


class VersionHolder(Protocol):
    """A sampler and its versions: what a dedicated sampler process needs of its device. A backend implements it."""

    @property
    def sampler(self) -> Sampler: ...
    @property
    def model_budget_bytes(self) -> int: ...
    def load_version(self, version_id: str, directory: Path) -> None: ...
    def has_version(self, version_id: str) -> bool: ...
    def drop_version(self, version_id: str) -> None: ...
