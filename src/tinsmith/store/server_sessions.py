"""Sessions that the server opens itself: for clients without sessions, and for bulk jobs.

`ServerSessions` has what their owners share: heartbeats, and one sampling session for each weight version.
`ImplicitSessions` are those for clients without sessions, such as OpenAI's: each tenant has one at a time, opened by
its first request and replaced after `SESSION_LIFETIME_S`, so that the usual retention deletes its results. Samples of
weights that a trainer has published are part of the trainer's own sampling session, which ends with its weights. A
caller that waits for a result calls `keep` to keep the session alive. Thread-safe.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tinsmith.errors import GoneError, NotFoundError
from tinsmith.store.sampling_sessions import CLONE_SIZE, NewSamplingSession, SamplingSession, SamplingSessions
from tinsmith.store.sessions import NewSession, Sessions

SESSION_LIFETIME_S = 600.0
HEARTBEAT_S = 15.0
MAX_HEARTBEATS = 4096
"""Most sessions whose last heartbeat is remembered, beyond which old ones are forgotten."""
DISPLAY_NAME = "chat and completions"
MAX_JOINED = 1024
"""Most sampling sessions of trainers that are remembered; the least recently used one would be joined again."""


class ServerSessions:
    def __init__(
        self,
        sessions: Sessions,
        samplers: SamplingSessions,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s` is the time without heartbeats after which a session expires; negative means never."""
        self.sessions = sessions
        self._samplers = samplers
        self.clock = clock
        self.heartbeat_s = min(HEARTBEAT_S, timeout_s / 4) if timeout_s >= 0 else HEARTBEAT_S
        self._lock = threading.Lock()
        self._heartbeat_times: dict[str, float] = {}  # session_id -> time of its last heartbeat

    def open(self, tenant_id: str, new: NewSession, session_id: str | None = None) -> str:
        """Open a session and return its id."""
        session_id = self.sessions.open(tenant_id, new, session_id).session_id
        self._remember(session_id)
        return session_id

    def is_heartbeat_due(self, session_id: str) -> bool:
        return self.clock() - self._heartbeat_times.get(session_id, -self.heartbeat_s) >= self.heartbeat_s

    def keep(self, tenant_id: str, session_id: str) -> None:
        """As `Sessions.keep`, if a heartbeat is due. Raises GoneError if the session has ended."""
        if self.is_heartbeat_due(session_id):
            self.sessions.keep(tenant_id, session_id)
            self._remember(session_id)

    def sampling_session(
        self, tenant_id: str, session_id: str, base_model: str, model_path: str | None
    ) -> SamplingSession:
        """Return the session's sampling session of a weight version, which has the same name every time."""
        digest = hashlib.blake2b((model_path or base_model).encode(), digest_size=3).digest()
        seq_id = int.from_bytes(digest, "big")
        while True:
            name = f"{session_id}:sample:{seq_id}"
            session = self._samplers.find(name)
            if session is None:
                new = NewSamplingSession(name, session_id, tenant_id, base_model, model_path, model_path)
                self._samplers.create(new)
            elif (session.base_model, session.model_path) == (base_model, model_path):
                return session
            else:  # another version has the same digest
                seq_id += 1

    def join(self, sampling_session: SamplingSession) -> int:
        """Join a client's sampling session and return this client's number."""
        return self._samplers.join(sampling_session.tenant_id, sampling_session.sampling_session_id)

    def _remember(self, session_id: str) -> None:
        with self._lock:
            self._heartbeat_times[session_id] = self.clock()
            if len(self._heartbeat_times) > MAX_HEARTBEATS:
                recent = self.clock() - 2 * self.heartbeat_s
                self._heartbeat_times = {name: at for name, at in self._heartbeat_times.items() if at >= recent}


@dataclass(slots=True)
class _CurrentSession:
    """A tenant's current implicit session, and its sampling sessions with their next seq_ids."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    session_id: str | None = None
    opened_at: float = 0.0
    samplers: dict[tuple[str, str | None], tuple[SamplingSession, Iterator[int]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleId:
    """The sampling session of one sample, and its number there."""

    sampling_session: SamplingSession
    seq_id: int

    @property
    def tenant_id(self) -> str:
        return self.sampling_session.tenant_id

    @property
    def session_id(self) -> str:
        return self.sampling_session.session_id

    @property
    def request_id(self) -> str:
        return f"{self.sampling_session.sampling_session_id}:{self.seq_id}"


def session_of(request_id: str) -> str:
    """Return the session of a sample of an implicit session, by the sample's request_id."""
    return request_id.partition(":sample:")[0]


class ImplicitSessions:
    def __init__(self, server_sessions: ServerSessions) -> None:
        self._server_sessions = server_sessions
        self._lock = threading.Lock()
        self._current: dict[str, _CurrentSession] = {}
        self._joined: OrderedDict[str, Iterator[int]] = OrderedDict()  # seq_ids in trainers' sampling sessions

    @property
    def heartbeat_s(self) -> float:
        """The interval in which a caller that waits calls `keep`."""
        return self._server_sessions.heartbeat_s

    def next_sample(self, tenant_id: str, base_model: str, model_path: str | None) -> SampleId:
        """The id of a new sample of these weights; the caller has checked that the tenant may read them."""
        with self._lock:
            current = self._current.setdefault(tenant_id, _CurrentSession())
        with current.lock:
            session_id = self._ensure_session(tenant_id, current)
            if (base_model, model_path) not in current.samplers:
                session = self._server_sessions.sampling_session(tenant_id, session_id, base_model, model_path)
                current.samplers[base_model, model_path] = session, itertools.count()
            session, seq_ids = current.samplers[base_model, model_path]
            return SampleId(session, next(seq_ids))

    def next_sample_of(self, published: SamplingSession) -> SampleId:
        """The id of a new sample in a trainer's sampling session, in which this server has a block of seq_ids."""
        with self._lock:
            name = published.sampling_session_id
            if name not in self._joined:
                first = self._server_sessions.join(published) * CLONE_SIZE
                self._joined[name] = itertools.count(first)
                if len(self._joined) > MAX_JOINED:
                    self._joined.popitem(last=False)
            self._joined.move_to_end(name)
            return SampleId(published, next(self._joined[name]))

    def keep(self, tenant_id: str, session_id: str) -> None:
        """Record a heartbeat if one is due. Raises GoneError if the session has ended."""
        self._server_sessions.keep(tenant_id, session_id)

    def _ensure_session(self, tenant_id: str, current: _CurrentSession) -> str:
        """The tenant's session, alive."""
        now_s = self._server_sessions.clock()
        if current.session_id is not None and now_s - current.opened_at < SESSION_LIFETIME_S:
            try:
                self.keep(tenant_id, current.session_id)
                return current.session_id
            except (GoneError, NotFoundError):
                pass  # it has expired since the tenant's last request
        elif current.session_id is not None:
            self._server_sessions.sessions.finish(tenant_id, current.session_id, "success")
        current.session_id = self._server_sessions.open(
            tenant_id, NewSession(tags=["standing"], display_name=DISPLAY_NAME)
        )
        current.opened_at, current.samplers = now_s, {}
        return current.session_id
