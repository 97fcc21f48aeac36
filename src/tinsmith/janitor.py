"""The janitor: what must happen as time passes.

Sessions whose heartbeats stopped are closed and their models told to unload (as futures, which the engine
settles); results are forgotten some time after their session closed; checkpoints past their TTL are deleted.
"""

from __future__ import annotations

import asyncio
import json

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.checkpoints import Checkpoints
from tinsmith.db import now
from tinsmith.futures import Futures, NewFuture
from tinsmith.models import Models
from tinsmith.sessions import Session, Sessions
from tinsmith.settings import Settings

log = structlog.get_logger()


class Janitor:
    def __init__(
        self, settings: Settings, sessions: Sessions, models: Models, futures: Futures, checkpoints: Checkpoints
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._models = models
        self._futures = futures
        self._checkpoints = checkpoints

    async def run(self) -> None:
        """Sweep until cancelled; does nothing if either interval is negative."""
        if self._settings.session_sweep_s < 0:
            return
        while True:
            await asyncio.sleep(self._settings.session_sweep_s)
            try:
                await asyncio.to_thread(self.sweep)
            except (SQLAlchemyError, OSError) as error:
                log.error("a sweep failed; the next one tries again", exc_info=error)

    def sweep(self) -> None:
        timeout_s = self._settings.session_timeout_s
        if timeout_s >= 0:
            for session in self._sessions.silent(timeout_s):
                self._close(session, f"no heartbeat for {timeout_s:g} s")
        if forgotten := self._sessions.closed_before(now() - self._settings.result_grace_s):
            self._futures.delete_of_sessions(forgotten)
        for ref in self._checkpoints.sweep_expired():
            log.info("checkpoint expired", path=ref.path)

    def _close(self, session: Session, reason: str) -> None:
        if not self._sessions.close(session.session_id, reason):
            return
        cause = f"its session ended ({session.reason or reason})"
        log.info("session closed", session_id=session.session_id, reason=cause)
        for model in self._models.of_session(session.session_id):
            if model.state in ("creating", "ready"):
                self._futures.submit(
                    NewFuture(
                        request_id=f"{model.model_id}:unload",
                        tenant_id=model.tenant_id,
                        session_id=model.session_id,
                        base_model=model.base_model,
                        kind="unload_model",
                        model_id=model.model_id,
                        body=json.dumps({"model_id": model.model_id, "reason": cause}).encode(),
                    )
                )
