"""The seeds of what an operation samples: functions of its own seed and of the row, and of nothing else.

A sample of row i of the input has `row_seed(seed, i)`, whatever its batch; answer k of a sample is then the one that
the service gives any request with that seed and `num_samples` above k. A rollout's turn has `row_seed(seed, i, rollout,
turn)`; what a model grades has its place among the row's answers for a rollout. Whoever samples by hand with these
seeds has the same tokens.
"""

from __future__ import annotations

import hashlib

BITS = 63


def row_seed(seed: int, row_idx: int, rollout_idx: int | str = 0, turn: int = 0) -> int:
    text = f"{seed},{row_idx},{rollout_idx},{turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - BITS)


def seed_for(seed: int | None, row_idx: int, rollout_idx: int | str = 0, turn: int = 0) -> int | None:
    """None where no seed is wanted: then every job has numbers of its own."""
    return None if seed is None else row_seed(seed, row_idx, rollout_idx, turn)
