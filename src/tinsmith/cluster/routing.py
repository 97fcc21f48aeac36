"""Routing: which sampler gets a sample, and a cached view of the load of each.

`choose` is a pure function. Samples of one version whose prompts begin alike go to the same sampler, which has the
prefix in its cache: a hash of version and prefix ranks the samplers (rendezvous hashing, Thaler and Ravishankar, 1998),
so a sampler that joins or leaves moves only its own keys. The first sampler in the ranking whose load is not far above
the mean gets the sample (bounded loads, after Mirrokni, Thorup and Zadimoghaddam, 2018).

`Loads` caches the processes of a base model and their load for FRESH_S; callers add what they assign in between. If the
database cannot be read, the view is empty until the next look, and the request itself reports the error. Thread-safe.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.types import I32

PREFIX_TOKENS = 64
"""Prompts that share this many first tokens are alike; shorter ones must be equal."""

MOST_OVER_MEAN = 1.25
"""A sampler with more than this times the mean of waiting tokens is passed over ..."""

SLACK_TOKENS = 8192
"""... unless it is within this many tokens of the mean: a cached prefix is worth a short wait."""


def prefix_key(version: str, prompt_T: I32) -> bytes:
    """The key of samples that can share a cached prefix: the version and the first tokens."""
    return version.encode() + b"\n" + prompt_T[:PREFIX_TOKENS].astype("<i4").tobytes()


def choose(key: bytes, waiting_tokens: Mapping[str, int]) -> str | None:
    """The executor for a sample, by the tokens that wait for each live sampler; None without one."""
    if not waiting_tokens:
        return None
    mean = sum(waiting_tokens.values()) / len(waiting_tokens)
    most = max(MOST_OVER_MEAN * mean, mean + SLACK_TOKENS)
    free = [executor for executor, tokens in waiting_tokens.items() if tokens <= most]
    return max(free, key=lambda executor: (_weight(key, executor), executor))


def _weight(key: bytes, executor: str) -> bytes:
    return hashlib.blake2b(key, digest_size=8, key=hashlib.blake2b(executor.encode(), digest_size=32).digest()).digest()


FRESH_S = 0.5
"""How long a view is used before it is read again."""

log = structlog.get_logger()


@dataclass(slots=True)
class _View:
    looked_at: float
    loads: dict[str, int]


class Loads:
    """Loads by base model and process. Callers hold `lock` while they read or change what `of` returned."""

    def __init__(self, look: Callable[[str], dict[str, int]], clock: Callable[[], float] | None = None) -> None:
        """`look` reads the load of each process of a base model; it may raise SQLAlchemyError."""
        self._look = look
        self._clock = clock or (lambda: time.monotonic())
        self.lock = threading.Lock()
        self._views: dict[str, _View] = {}

    def of(self, base_model: str) -> dict[str, int]:
        """The load of each process, by its id."""
        moment = self._clock()
        with self.lock:
            view = self._views.get(base_model)
            if view is not None:
                if moment - view.looked_at < FRESH_S:
                    return view.loads
                view.looked_at = moment  # the others go on with what there is, while this thread looks
        loads: dict[str, int] = {}
        try:
            loads = self._look(base_model)
        except SQLAlchemyError as error:
            log.warning("the processes of a base model could not be read", base_model=base_model, error=repr(error))
        with self.lock:
            self._views[base_model] = _View(moment, loads)
        return loads
