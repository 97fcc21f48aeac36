"""Routing: which sampler gets a sample, and a cached view of the load of each.

A sample goes to the sampler whose cache has the longest prefix of its prompt, according to the assignments that
`Prefixes` remembers: the turns of a conversation and the samples of one prompt stay together. A prefix with more than
MAX_CONTINUATIONS different continuations, such as a shared system prompt, is ignored, since every sampler soon has it.
Otherwise `choose`, a pure function, ranks the samplers by a hash of version and prompt (rendezvous hashing, Thaler and
Ravishankar, 1998), so a sampler that joins or leaves moves only its own keys. In both cases a sampler whose load is far
above the mean is skipped (bounded loads, after Mirrokni, Thorup and Zadimoghaddam, 2018).

`Loads` caches the processes of a base model and their load for FRESH_S; callers add their assignments in between. If
the database cannot be read, the view is empty until the next read, and the request reports the error. Thread-safe.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.types import I32

BLOCK_TOKENS = 32
"""Prefixes are compared in blocks of this many tokens."""

MAX_CONTINUATIONS = 2
MAX_PREFIXES = 131_072
"""The most recently used prefixes are remembered: those of four million tokens, in about 40 MB."""

MAX_LOAD_FACTOR = 1.25
"""A sampler with more than this factor times the mean of waiting tokens is skipped ..."""

SLACK_TOKENS = 8192
"""... unless it is within this many tokens of the mean, since a cached prefix is worth a short wait."""


def prefix_keys(scope: str, prompt_T: I32) -> list[bytes]:
    """A key of each prefix of whole blocks, then a key of the prompt. Equal keys mean equal scopes and tokens."""
    digest = hashlib.blake2b(scope.encode(), digest_size=16)
    keys: list[bytes] = []
    tokens = prompt_T.astype("<i4")
    blocks_end = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    for start in range(0, blocks_end, BLOCK_TOKENS):
        digest.update(tokens[start : start + BLOCK_TOKENS].tobytes())
        keys.append(digest.digest())
    digest.update(b"end" + tokens[blocks_end:].tobytes())
    return [*keys, digest.digest()]


def choose(key: bytes, waiting_tokens: Mapping[str, int]) -> str | None:
    """The executor for a sample, by the waiting tokens of the live samplers; None without a live sampler."""
    candidates = _below_load_limit(waiting_tokens)
    return max(candidates, key=lambda executor: (_weight(key, executor), executor)) if candidates else None


def _below_load_limit(waiting_tokens: Mapping[str, int]) -> list[str]:
    """The samplers whose load is not far above the mean."""
    if not waiting_tokens:
        return []
    mean = sum(waiting_tokens.values()) / len(waiting_tokens)
    limit = max(MAX_LOAD_FACTOR * mean, mean + SLACK_TOKENS)
    return [executor for executor, tokens in waiting_tokens.items() if tokens <= limit]


@dataclass(slots=True)
class _Prefix:
    """The last executor of a prefix, and the keys that followed it, at most MAX_CONTINUATIONS + 1."""

    executor: str
    continuations: set[bytes]


class Prefixes:
    """The prefixes in the samplers' caches, according to this server's assignments. Not thread-safe."""

    def __init__(self, capacity: int = MAX_PREFIXES) -> None:
        self._capacity = capacity
        self._prefixes: OrderedDict[bytes, _Prefix] = OrderedDict()

    def choose(self, scope: str, prompt_T: I32, waiting_tokens: Mapping[str, int]) -> str | None:
        """Choose and record the executor for a sample; None without a live sampler. Prompts of different scopes share
        no cache.
        """
        *blocks, prompt_key = prefix_keys(scope, prompt_T)
        depth = next((depth for depth in range(len(blocks), 0, -1) if blocks[depth - 1] in self._prefixes), 0)
        executor = self._affine_executor(blocks, depth, prompt_key)
        if executor is None or executor not in _below_load_limit(waiting_tokens):
            executor = choose(prompt_key, waiting_tokens)
        if executor is not None:
            self._add([*blocks, prompt_key], executor)
        return executor

    def _affine_executor(self, blocks: Sequence[bytes], depth: int, prompt_key: bytes) -> str | None:
        if not depth:
            return None
        prefix = self._prefixes[blocks[depth - 1]]
        after = blocks[depth] if depth < len(blocks) else prompt_key
        return prefix.executor if len(prefix.continuations | {after}) <= MAX_CONTINUATIONS else None

    def _add(self, chain: Sequence[bytes], executor: str) -> None:
        for key, after in pairwise(chain):
            prefix = self._prefixes.setdefault(key, _Prefix(executor, set()))
            prefix.executor = executor
            if len(prefix.continuations) <= MAX_CONTINUATIONS:
                prefix.continuations.add(after)
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > self._capacity:
            self._prefixes.popitem(last=False)


def _weight(key: bytes, executor: str) -> bytes:
    return hashlib.blake2b(key, digest_size=8, key=hashlib.blake2b(executor.encode(), digest_size=32).digest()).digest()


FRESH_S = 0.5
"""How long a view is used before it is refreshed."""

log = structlog.get_logger()


@dataclass(slots=True)
class _CachedLoads:
    read_at: float
    loads: dict[str, int]


class Loads:
    """Loads by base model and process. Callers hold `lock` while they use a result of `of`."""

    def __init__(self, read_loads: Callable[[str], dict[str, int]], clock: Callable[[], float] | None = None) -> None:
        """`read_loads` reads the load of each process of a base model; it may raise SQLAlchemyError."""
        self._read_loads = read_loads
        self._clock = clock or (lambda: time.monotonic())
        self.lock = threading.Lock()
        self._views: dict[str, _CachedLoads] = {}

    def of(self, base_model: str) -> dict[str, int]:
        """The load of each process, by its id."""
        read_at = self._clock()
        with self.lock:
            view = self._views.get(base_model)
            if view is not None:
                if read_at - view.read_at < FRESH_S:
                    return view.loads
                view.read_at = read_at  # other threads use the old view while this one reads
        loads: dict[str, int] = {}
        try:
            loads = self._read_loads(base_model)
        except SQLAlchemyError as error:
            log.warning("the processes of a base model could not be read", base_model=base_model, error=repr(error))
        with self.lock:
            self._views[base_model] = _CachedLoads(read_at, loads)
        return loads
