"""Dispatch: the server's choice of who takes a sample, made before its row is written, so that it costs no transaction.

Where there are dedicated samplers, `routing` chooses one; otherwise, and for inflight versions, whose weights change
under their name, nobody is chosen and the engines do it. Who there is and what waits for them is asked at most twice a
second, for each base model, by whoever needs it then; in between, what was given out is added. A view that is too old
by a moment does no harm: what was given to a dead sampler is taken from it (`executors`). Called from any thread.
"""

from __future__ import annotations

from dataclasses import replace

from tinsmith.cluster.executors import Executors
from tinsmith.cluster.loads import Loads
from tinsmith.cluster.routing import Candidate, choose, prefix_key
from tinsmith.store.futures import NewFuture
from tinsmith.types import Sample


class Dispatch:
    def __init__(self, executors: Executors) -> None:
        self._executors = executors
        self._waiting_tokens = Loads(self._look)

    def assigned(self, new: NewFuture, sample: Sample, *, inflight: bool = False) -> NewFuture:
        """The same request, given to a sampler if there is one for it."""
        if inflight:
            return new
        waiting_tokens = self._waiting_tokens.of(new.base_model)
        with self._waiting_tokens.lock:
            candidates = [Candidate(name, tokens) for name, tokens in waiting_tokens.items()]
            executor = choose(prefix_key(sample.version_id or new.base_model, sample.prompt_T), candidates)
            if executor is None:
                return new
            waiting_tokens[executor] += new.num_tokens
        return replace(new, executor=executor)

    def _look(self, base_model: str) -> dict[str, int]:
        return {one.executor: one.waiting_tokens for one in self._executors.live(base_model)}
