"""A view of who there is for a base model and how much each has, that is asked for at most twice a second.

In between, whoever gives work away adds it. If the database cannot be read there is nobody, until the next look: the
request itself will say what is wrong. Called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from sqlalchemy.exc import SQLAlchemyError

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
