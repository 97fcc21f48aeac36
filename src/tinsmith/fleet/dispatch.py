"""Dispatch: the server's choice of who takes a sample, made before its row is written, so that it costs no transaction.

Where there are dedicated samplers, `routing` chooses one; otherwise, and for inflight versions, whose weights change
under their name, nobody is chosen and the engines do it. Who there is and what waits for them is asked at most twice a
second, for each base model, by whoever needs it then; in between, what was given out is added. A view that is too old
by a moment does no harm: what was given to a dead sampler is taken from it (`executors`). Called from any thread.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.fleet.executors import Executors
from tinsmith.fleet.routing import Candidate, choose, prefix_key
from tinsmith.futures import NewFuture
from tinsmith.ops import Sample

FRESH_S = 0.5
"""How long a view of the samplers is good for."""

log = structlog.get_logger()


@dataclass(slots=True)
class _View:
    looked_at: float
    waiting_tokens: dict[str, int]


class Dispatch:
    def __init__(self, executors: Executors) -> None:
        self._executors = executors
        self._lock = threading.Lock()
        self._views: dict[str, _View] = {}

    def assigned(self, new: NewFuture, sample: Sample, *, inflight: bool = False) -> NewFuture:
        """The same request, given to a sampler if there is one for it."""
        if inflight:
            return new
        view = self._view(new.base_model)
        with self._lock:
            candidates = [Candidate(name, tokens) for name, tokens in view.waiting_tokens.items()]
            executor = choose(prefix_key(sample.version_id or new.base_model, sample.prompt_T), candidates)
            if executor is None:
                return new
            view.waiting_tokens[executor] += new.num_tokens
        return replace(new, executor=executor)

    def _view(self, base_model: str) -> _View:
        moment = time.monotonic()
        with self._lock:
            view = self._views.get(base_model)
            if view is not None:
                if moment - view.looked_at < FRESH_S:
                    return view
                view.looked_at = moment  # the others go on with what there is, while this thread looks
        waiting: dict[str, int] = {}
        try:
            waiting = {one.executor: one.waiting_tokens for one in self._executors.live(base_model)}
        except SQLAlchemyError as error:  # the engines do it; the request itself will say what is wrong
            log.warning("the samplers could not be looked up", base_model=base_model, error=repr(error))
        fresh = _View(moment, waiting)
        with self._lock:
            self._views[base_model] = fresh
        return fresh
