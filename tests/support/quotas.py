"""What tests of quotas share: a clock that they move, and requests for samples."""

from __future__ import annotations

import dataclasses

from tinsmith.store.futures import NewFuture

BASE = "base"


@dataclasses.dataclass
class ManualClock:
    now_s: float = 0.0
    readings: int = 0

    def __call__(self) -> float:
        self.readings += 1
        return self.now_s


def sample(seq_id: int, tenant_id: str = "alice", body: bytes = b"12345", num_tokens: int = 0) -> NewFuture:
    return NewFuture(f"s:{tenant_id}:{seq_id}", tenant_id, "s", BASE, "sample", body, num_tokens)
