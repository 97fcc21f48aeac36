"""Which sampler a sample goes to: a pure function of what it is about and of how much everyone has to do.

Samples of one version whose prompts begin alike go to the same sampler, which then has the beginning in its cache: the
samplers are ranked for each such key by a hash (rendezvous hashing, Thaler and Ravishankar, 1998), so that one that
comes or goes moves only the keys that it wins or had. The first in the ranking that is not much busier than the mean
gets the sample (bounded load, after Mirrokni, Thorup and Zadimoghaddam, 2018); there is always one. No I/O, no clock.

A view of who there is for a base model and how much each has, that is asked for at most twice a second.

In between, whoever gives work away adds it. If the database cannot be read there is nobody, until the next look: the
request itself will say what is wrong. Called from any thread.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.types import I32

PREFIX_TOKENS = 64
"""Prompts that have this many first tokens in common are alike; shorter ones, if they are equal."""

MOST_OVER_MEAN = 1.25
"""A sampler with more than this times the mean of waiting tokens gets nothing that another could do ..."""

SLACK_TOKENS = 8192
"""... unless that is less than this much more than the mean: a cached prompt is worth a short wait."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sampler that takes samples, and the tokens that wait for it."""

    executor: str
    waiting_tokens: int


def prefix_key(version: str, prompt_T: I32) -> bytes:
    """What two samples have in common that should find the same cache."""
    return version.encode() + b"\n" + prompt_T[:PREFIX_TOKENS].astype("<i4").tobytes()


def choose(key: bytes, candidates: Sequence[Candidate]) -> str | None:
    """The executor of a sample; None if there is no candidate."""
    if not candidates:
        return None
    mean = sum(candidate.waiting_tokens for candidate in candidates) / len(candidates)
    most = max(MOST_OVER_MEAN * mean, mean + SLACK_TOKENS)
    free = [candidate.executor for candidate in candidates if candidate.waiting_tokens <= most]
    return max(free, key=lambda executor: (_weight(key, executor), executor))


def _weight(key: bytes, executor: str) -> bytes:
    return hashlib.blake2b(key, digest_size=8, key=hashlib.blake2b(executor.encode(), digest_size=32).digest()).digest()


FRESH_S = 0.5
"""How long a view is good for."""

log = structlog.get_logger()


@dataclass(slots=True)
class _View:
    looked_at: float
    loads: dict[str, int]


class Loads:
    """`lock` is held by whoever reads or changes what `of` returned."""

    def __init__(self, look: Callable[[str], dict[str, int]], clock: Callable[[], float] | None = None) -> None:
        """`look` reads what each process of a base model has; it may raise SQLAlchemyError."""
        self._look = look
        self._clock = clock or (lambda: time.monotonic())
        self.lock = threading.Lock()
        self._views: dict[str, _View] = {}

    def of(self, base_model: str) -> dict[str, int]:
        """What each process has, by its name."""
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
            log.warning("who takes work could not be looked up", base_model=base_model, error=repr(error))
        with self.lock:
            self._views[base_model] = _View(moment, loads)
        return loads
