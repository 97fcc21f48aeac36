"""Implicit sessions: sessions that the server opens for clients without sessions, such as OpenAI's.

Each tenant has one at a time, opened by its first request and replaced after `REPLACED_EVERY_S`, so that its results
are deleted by the ordinary retention. It has one sampling session for each weight version in use. A caller that waits
for a result calls `keep`, which keeps the session alive. Thread-safe.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tinsmith.errors import GoneError, NotFoundError
from tinsmith.store.audit import Audit
from tinsmith.store.sampling_sessions import NewSamplingSession, SamplingSessions
from tinsmith.store.sessions import NewSession, Sessions

REPLACED_EVERY_S = 600.0
HEARTBEAT_S = 15.0
DISPLAY_NAME = "chat and completions"


@dataclass(slots=True)
class _Sampler:
    sampling_session_id: str
    seq_ids: Iterator[int]


@dataclass(slots=True)
class _Standing:
    """A tenant's current implicit session."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    session_id: str | None = None
    opened_at: float = 0.0
    samplers: dict[tuple[str, str | None], _Sampler] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seat:
    """The session and sampling session of one sample."""

    tenant_id: str
    session_id: str
    sampling_session_id: str
    seq_id: int

    @property
    def request_id(self) -> str:
        return f"{self.sampling_session_id}:{self.seq_id}"


class StandingSessions:
    def __init__(
        self,
        sessions: Sessions,
        samplers: SamplingSessions,
        audit: Audit,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s` is the silence after which a session expires; negative if none does."""
        self._sessions = sessions
        self._samplers = samplers
        self._audit = audit
        self._clock = clock
        self.heartbeat_s = min(HEARTBEAT_S, timeout_s / 4) if timeout_s >= 0 else HEARTBEAT_S
        self._lock = threading.Lock()
        self._standing: dict[str, _Standing] = {}
        self._kept_at: dict[str, float] = {}  # sessions by their last heartbeat

    def seat(self, tenant_id: str, base_model: str, model_path: str | None) -> Seat:
        """A seat for one more sample of these weights; the caller has checked that the tenant may read them."""
        with self._lock:
            standing = self._standing.setdefault(tenant_id, _Standing())
        with standing.lock:
            session_id = self._session(tenant_id, standing)
            sampler = standing.samplers.get((base_model, model_path))
            if sampler is None:
                sampler = self._sampler(tenant_id, session_id, len(standing.samplers), base_model, model_path)
                standing.samplers[base_model, model_path] = sampler
            return Seat(tenant_id, session_id, sampler.sampling_session_id, next(sampler.seq_ids))

    def keep(self, tenant_id: str, session_id: str) -> None:
        """Send a heartbeat, if one is due. Raises GoneError once the session has ended."""
        if self._clock() - self._kept_at.get(session_id, -self.heartbeat_s) < self.heartbeat_s:
            return
        self._sessions.heartbeat(tenant_id, session_id)
        with self._lock:
            self._kept_at[session_id] = self._clock()
            if len(self._kept_at) > 2 * len(self._standing):
                recent = self._clock() - 2 * self.heartbeat_s
                self._kept_at = {name: at for name, at in self._kept_at.items() if at >= recent}

    def _session(self, tenant_id: str, standing: _Standing) -> str:
        if standing.session_id is not None and self._clock() - standing.opened_at < REPLACED_EVERY_S:
            try:
                self.keep(tenant_id, standing.session_id)
                return standing.session_id
            except (GoneError, NotFoundError):
                pass  # nothing was asked for longer than a session lives
        elif standing.session_id is not None:
            self._sessions.finish(tenant_id, standing.session_id, "success")
        opened = self._sessions.open(tenant_id, NewSession(tags=["standing"], display_name=DISPLAY_NAME))
        self._audit.record(tenant_id, "session_opened", {"session_id": opened.session_id, "project_id": None})
        standing.session_id, standing.opened_at, standing.samplers = opened.session_id, self._clock(), {}
        with self._lock:
            self._kept_at[opened.session_id] = self._clock()
        return opened.session_id

    def _sampler(
        self, tenant_id: str, session_id: str, number: int, base_model: str, model_path: str | None
    ) -> _Sampler:
        sampling_session_id = self._samplers.create(
            NewSamplingSession(
                sampling_session_id=f"{session_id}:sample:{number}",
                session_id=session_id,
                tenant_id=tenant_id,
                base_model=base_model,
                model_path=model_path,
                version_id=model_path,
            )
        )
        return _Sampler(sampling_session_id, itertools.count())
