"""Continuous batching where each version is a whole model: requests of one version at a time.

A request waits, in order of arrival, until the versions of those before it have been sampled; meanwhile others of the
version that is running join it only if nobody else waits before them. Prefixes that are cached belong to their
version, as everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from tinsmith.backends.full.base import FullBase
from tinsmith.backends.full.weights import FullWeights
from tinsmith.backends.torch.lora import Adapter
from tinsmith.errors import UserError
from tinsmith.samplers.local.engine import LocalSampler
from tinsmith.samplers.local.request import Sequence as Running
from tinsmith.types import SampleResult


class FullSampler(LocalSampler):
    _base: FullBase

    def __init__(self, base: FullBase, versions: Mapping[str, Adapter]) -> None:
        super().__init__(base, versions)
        self._held: deque[Running] = deque()
        self._active: Adapter | None = None

    def _admit(self, sequence: Running) -> None:
        self._held.append(sequence)

    def cancel(self, request_id: str) -> bool:
        self._held = deque(held for held in self._held if held.request.sample.request_id != request_id)
        return super().cancel(request_id)

    def step(self, scopes: Collection[str] | None = None) -> list[tuple[str, SampleResult | UserError]]:
        if self._held and len(self._held) == len(self._requests):
            self._active = self._held[0].request.weights.adapter
        while self._held and self._held[0].request.weights.adapter is self._active:
            super()._admit(self._held.popleft())
        self._base.bind(self._active if isinstance(self._active, FullWeights) else self._base.original)
        return super().step(scopes)
