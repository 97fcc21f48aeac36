"""Stored responses that have no answer yet: their samples stay alive, and they are completed when the samples settle.

Nothing else remembers such a response: its client may be polling, may come back in a week, or may never come back, and
the server that accepted it may be dead. The work therefore follows from the database alone. Its first round begins with
the server, before any session can expire. One server of a database does it at a time.

A response whose model is not served at the moment cannot be completed. It stays unanswered, with its samples, and is
tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.api.openai.responses import complete_response, keep_samples_alive
from tinsmith.api.services import Services
from tinsmith.errors import NotFoundError, TinsmithError
from tinsmith.store.responses import UnansweredResponse

ROUND_S = 2.0
"""The interval of rounds; shorter if sessions expire so soon that a session could expire between two rounds."""
RETRY_S = 60.0
"""The pause before a response that could not be completed is tried again."""

log = structlog.get_logger()


class PendingResponses:
    def __init__(
        self,
        services: Services,
        try_lock: Callable[[], AbstractContextManager[bool]] = lambda: nullcontext(True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`try_lock` yields whether this server may do the work."""
        self._services = services
        self._try_lock = try_lock
        self._clock = clock
        self._not_before: dict[str, float] = {}  # response_id -> time of the next attempt to complete it

    async def run(self, threads: Executor | None = None) -> None:
        """Do rounds on one of `threads` until cancelled."""
        interval_s = min(ROUND_S, self._services.implicit_sessions.heartbeat_s)
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(threads, self._run_round_locked)
            except (SQLAlchemyError, OSError) as error:
                log.error("pending responses could not be read; the next round tries again", exc_info=error)
            await asyncio.sleep(interval_s)

    def _run_round_locked(self) -> None:
        with self._try_lock() as locked:
            if locked:
                self.run_round()

    def run_round(self) -> None:
        """Keep the pending samples alive and complete the responses whose samples have settled."""
        unanswered = self._services.responses.list_unanswered()
        for response in unanswered:  # before any is completed, which may take longer
            keep_samples_alive(self._services, response.tenant_id, response.pending)
        self._not_before = {
            response.response_id: self._not_before[response.response_id]
            for response in unanswered
            if response.response_id in self._not_before
        }
        for response in unanswered:
            if not response.pending and self._clock() >= self._not_before.get(response.response_id, 0.0):
                self._complete(response)

    def _complete(self, response: UnansweredResponse) -> None:
        self._not_before[response.response_id] = self._clock() + RETRY_S
        try:
            stored = self._services.responses.find(response.tenant_id, response.response_id)
        except NotFoundError:
            return  # deleted a moment ago
        try:
            if stored.answer is None:
                complete_response(self._services, stored)
        except TinsmithError as error:
            log.warning("a response cannot be completed now", response_id=response.response_id, error=str(error))
