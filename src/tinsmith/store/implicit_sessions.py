"""Implicit sessions: sessions that the server opens for clients without sessions, such as OpenAI's.

Each tenant has one at a time, opened by its first request and replaced after `SESSION_LIFETIME_S`, so that the usual
retention deletes its results. It has one sampling session for each weight version in use. A caller that waits for a
result calls `keep` to keep the session alive. Thread-safe.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tinsmith.errors import GoneError, NotFoundError
from tinsmith.store.sampling_sessions import NewSamplingSession, SamplingSessions
from tinsmith.store.sessions import NewSession, Sessions

SESSION_LIFETIME_S = 600.0
HEARTBEAT_S = 15.0
DISPLAY_NAME = "chat and completions"


@dataclass(slots=True)
class _CurrentSession:
    """A tenant's current implicit session, and its sampling sessions with their next seq_ids."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    session_id: str | None = None
    opened_at: float = 0.0
    samplers: dict[tuple[str, str | None], tuple[str, Iterator[int]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleId:
    """The session and sampling session of one sample."""

    tenant_id: str
    session_id: str
    sampling_session_id: str
    seq_id: int

    @property
    def request_id(self) -> str:
        return f"{self.sampling_session_id}:{self.seq_id}"


def session_of(request_id: str) -> str:
    """Return the session of a sample of an implicit session, by the sample's request_id."""
    return request_id.partition(":sample:")[0]


class ImplicitSessions:
    def __init__(
        self,
        sessions: Sessions,
        samplers: SamplingSessions,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s` is the time without heartbeats after which a session expires; negative means never."""
        self._sessions = sessions
        self._samplers = samplers
        self._clock = clock
        self.heartbeat_s = min(HEARTBEAT_S, timeout_s / 4) if timeout_s >= 0 else HEARTBEAT_S
        self._lock = threading.Lock()
        self._current: dict[str, _CurrentSession] = {}
        self._kept_at: dict[str, float] = {}  # session_id -> time of its last heartbeat

    def next_sample(self, tenant_id: str, base_model: str, model_path: str | None) -> SampleId:
        """The id of a new sample of these weights; the caller has checked that the tenant may read them."""
        with self._lock:
            current = self._current.setdefault(tenant_id, _CurrentSession())
        with current.lock:
            session_id = self._session(tenant_id, current)
            if (base_model, model_path) not in current.samplers:
                new = NewSamplingSession(
                    sampling_session_id=f"{session_id}:sample:{len(current.samplers)}",
                    session_id=session_id,
                    tenant_id=tenant_id,
                    base_model=base_model,
                    model_path=model_path,
                    version_id=model_path,
                )
                current.samplers[base_model, model_path] = self._samplers.create(new), itertools.count()
            sampling_session_id, seq_ids = current.samplers[base_model, model_path]
            return SampleId(tenant_id, session_id, sampling_session_id, next(seq_ids))

    def keep(self, tenant_id: str, session_id: str) -> None:
        """Record a heartbeat if one is due. Raises GoneError if the session has ended."""
        if self._clock() - self._kept_at.get(session_id, -self.heartbeat_s) < self.heartbeat_s:
            return
        self._sessions.heartbeat(tenant_id, session_id)
        with self._lock:
            self._kept_at[session_id] = self._clock()
            if len(self._kept_at) > 2 * len(self._current):
                recent = self._clock() - 2 * self.heartbeat_s
                self._kept_at = {name: at for name, at in self._kept_at.items() if at >= recent}

    def _session(self, tenant_id: str, current: _CurrentSession) -> str:
        if current.session_id is not None and self._clock() - current.opened_at < SESSION_LIFETIME_S:
            try:
                self.keep(tenant_id, current.session_id)
                return current.session_id
            except (GoneError, NotFoundError):
                pass  # it has expired since the tenant's last request
        elif current.session_id is not None:
            self._sessions.finish(tenant_id, current.session_id, "success")
        opened = self._sessions.open(tenant_id, NewSession(tags=["standing"], display_name=DISPLAY_NAME))
        current.session_id, current.opened_at, current.samplers = opened.session_id, self._clock(), {}
        with self._lock:
            self._kept_at[opened.session_id] = self._clock()
        return opened.session_id
