"""Wake-ups between processes: datagrams over Unix-domain sockets on one machine, or Postgres (`pg_notify`).

A wake-up is a hint without state: its receiver reads the database. It may be lost (no reader, full buffer), so every
reader also polls slowly. `WakeUps` is the interface of both kinds of endpoint, `Mailbox` the endpoint on one machine.
`Waiters` wakes the server's coroutines by the ids that arrive.

An endpoint is a member of a group and is named `GROUP.MEMBER`: the servers are one group, the engines and samplers of a
base model another. A wake-up to a group reaches all its members.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import select
import socket
import stat
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from tinsmith.errors import SettingsError

SERVER = "server"

EVERYTHING = "*"
"""In place of an id: rows of another engine were released, anywhere in the queue."""

JOB_PREFIX = "batch-job:"
"""Prefix of a bulk job's number, in place of an id: the job's row has changed."""

SAFETY_POLL_S = 1.0
MAX_DATAGRAM_BYTES = 60_000 if os.uname().sysname == "Linux" else 2_000

MAX_UNSENT = 200
"""Datagrams of token streams that are kept for one reader whose buffer is full; more are lost."""

_FULL = (errno.EAGAIN, errno.ENOBUFS)

_MTIME_RESOLUTION_S = 0.1
"""A directory that changed this recently may change again within the same time stamp."""


def engine_mailbox(base_model: str, engine_id: str | None = None) -> str:
    """The mailbox name of one engine or sampler of a base model, or of their group."""
    group = _group_of(base_model)
    return f"{group}.{engine_id}" if engine_id else group


@lru_cache
def _group_of(base_model: str) -> str:
    return "engine-" + hashlib.sha256(base_model.encode()).hexdigest()[:16]


def job_line(job_id: int) -> str:
    """The id that is sent to the servers when a bulk job has changed."""
    return f"{JOB_PREFIX}{job_id}"


def server_mailbox(data_dir: Path) -> str:
    """The mailbox name of the server on a data directory."""
    return f"{SERVER}.{hashlib.sha256(str(data_dir).encode()).hexdigest()[:12]}"


MAX_TEMPORARY = 25
"""Bytes of a directory for temporary files that leave room for the longest name of a socket, whose path macOS limits to
103 bytes; its own such directory has 48.
"""


def socket_dir(data_dir: Path) -> Path:
    """The directory of a data directory's sockets. It is short, since a socket's path is limited to about 100 bytes."""
    key = hashlib.sha256(str(data_dir).encode()).hexdigest()[:16]
    temporary = tempfile.gettempdir()
    short = temporary if len(os.fsencode(temporary)) <= MAX_TEMPORARY else "/tmp"  # a private directory in it
    return Path(short) / f"tinsmith-{os.getuid()}" / key


class WakeUps(Protocol):
    """An endpoint that receives hints and sends them to other endpoints by name."""

    def fileno(self) -> int: ...
    def wake(self, name: str, ids: Iterable[str] = ()) -> None: ...
    def stream(self, name: str, lines: Iterable[str]) -> None: ...
    def drain(self) -> set[str]: ...
    def wait(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...


class Mailbox:
    """A datagram socket that is bound to a name in a directory."""

    def __init__(self, directory: Path, name: str) -> None:
        _make_private(directory.parent)
        _make_private(directory)
        self._directory = directory
        self._path = directory / name
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._socket.bind(str(self._path))
        self._inode = self._path.stat().st_ino
        self._endpoints: list[str] = []
        self._endpoints_at = 0
        self._unsent: dict[str, deque[bytes]] = {}  # by endpoint: datagrams of token streams

    def fileno(self) -> int:
        return self._socket.fileno()

    def wake(self, name: str, ids: Iterable[str] = ()) -> None:
        """Send a hint to the mailbox `name`, or to the group `name`; undeliverable hints are dropped. Thread-safe."""
        texts = [payload.encode() for payload in payloads(ids, MAX_DATAGRAM_BYTES)]
        for endpoint in self._members(name):
            # If the reader is gone or its buffer is full, its safety poll finds the rows.
            with contextlib.suppress(OSError):
                for text in texts:
                    self._socket.sendto(text, f"{self._directory}/{endpoint}")

    def stream(self, name: str, lines: Iterable[str]) -> None:
        """Send lines of token streams, which no table has; they may be lost. One thread.

        What a full buffer does not take is sent with the next lines, because the tokens after a gap come with the
        result only. A kernel may hold as few as ten datagrams for a reader.
        """
        texts = [text.encode() for text in payloads(lines, MAX_DATAGRAM_BYTES) if text]
        self._unsent = {endpoint: self._unsent.get(endpoint) or deque() for endpoint in self._members(name)}
        for endpoint, unsent in self._unsent.items():
            for text in texts:
                if unsent and len(unsent[-1]) + len(text) < MAX_DATAGRAM_BYTES:
                    text = unsent.pop() + b"\n" + text
                unsent.append(text)
            self._send_until_full(endpoint, unsent)

    def _send_until_full(self, endpoint: str, unsent: deque[bytes]) -> None:
        try:
            while unsent:
                self._socket.sendto(unsent[0], f"{self._directory}/{endpoint}")
                unsent.popleft()
        except OSError as error:
            if error.errno not in _FULL or len(unsent) > MAX_UNSENT:  # the reader is gone, or does not read
                unsent.clear()

    def _members(self, name: str) -> list[str]:
        """The mailbox `name`, or those of the group `name`."""
        return [endpoint for endpoint in self._list_endpoints() if endpoint == name or endpoint.startswith(f"{name}.")]

    def _list_endpoints(self) -> list[str]:
        """The names in the directory, which is read again when it has changed."""
        try:
            changed_at = os.stat(self._directory).st_mtime_ns
            if changed_at != self._endpoints_at:
                self._endpoints = os.listdir(self._directory)
                self._endpoints_at = changed_at if time.time_ns() - changed_at > _MTIME_RESOLUTION_S * 1e9 else 0
        except OSError:  # temporary files were cleaned up
            return []
        return self._endpoints

    def drain(self) -> set[str]:
        """All ids that arrived; an empty id is a wake-up without ids."""
        ids: set[str] = set()
        while True:
            try:
                payload = self._socket.recv(65536)
            except BlockingIOError:
                return ids
            ids.update(payload.decode(errors="replace").split("\n"))

    def wait(self, timeout_s: float) -> bool:
        """Block until a wake-up arrives; returns False after the timeout."""
        readable, _, _ = select.select([self._socket], [], [], timeout_s)
        return bool(readable)

    def close(self) -> None:
        self._socket.close()
        # A successor may have bound the same name already; its socket must not be removed.
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


def _make_private(directory: Path) -> None:
    """Make a directory that only this user can enter. Raises SettingsError if another user could change it.

    The system's directory of temporary files is accepted: its sticky bit protects the files in it.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700, parents=True)
    status = directory.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX and status.st_uid == 0:
        return
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise SettingsError(
            f"{directory}, the directory of Tinsmith's sockets, could be changed by other users; remove it, or set "
            "TMPDIR to another directory"
        )


def payloads(ids: Iterable[str], max_bytes: int) -> Iterator[str]:
    """The ids, one per line, in texts of at most `max_bytes`; one empty text if `ids` is empty."""
    lines: list[str] = []
    size = 0
    for request_id in ids:
        length = len(request_id.encode()) + 1
        if lines and size + length > max_bytes:
            yield "\n".join(lines)
            lines, size = [], 0
        lines.append(request_id)
        size += length
    yield "\n".join(lines)


_Events = defaultdict[str, set[asyncio.Event]]


class Waiters:
    """Coroutines of one event loop that wait for a future to settle, for any sample of a sampling session (its id is a
    prefix of the request_ids), or for a bulk job to change.
    """

    def __init__(self) -> None:
        self._requests: _Events = defaultdict(set)
        self._sessions: _Events = defaultdict(set)
        self._jobs: _Events = defaultdict(set)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closed = False

    def watch(self, request_id: str) -> AbstractContextManager[asyncio.Event]:
        """Register before reading the row, so that no settlement between reading and waiting is missed."""
        return self._watch(self._requests, request_id)

    def watch_session(self, sampling_session_id: str) -> AbstractContextManager[asyncio.Event]:
        """Register for the settlement of any sample of a sampling session, before reading its rows."""
        return self._watch(self._sessions, sampling_session_id)

    def watch_job(self, job_id: int) -> AbstractContextManager[asyncio.Event]:
        """Register for any change of a bulk job, before reading its row."""
        return self._watch(self._jobs, job_line(job_id))

    @contextlib.contextmanager
    def _watch(self, events: _Events, name: str) -> Iterator[asyncio.Event]:
        self._loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        events[name].add(woken)
        try:
            yield woken
        finally:
            events[name].discard(woken)
            if not events[name]:
                del events[name]

    def list_watched(self) -> tuple[list[str], list[str]]:
        """The request_ids and the sampling sessions with waiters."""
        return list(self._requests), list(self._sessions)

    def wake(self, request_ids: Iterable[str]) -> None:
        """Wake the waiters of these requests, or of the bulk jobs that the ids name."""
        sampling_session_ids: set[str] = set()
        for request_id in request_ids:
            _set(self._jobs if request_id.startswith(JOB_PREFIX) else self._requests, request_id)
            sampling_session_ids.add(request_id.rpartition(":")[0])
        self.wake_sessions(sampling_session_ids)

    def wake_sessions(self, sampling_session_ids: Iterable[str]) -> None:
        """Wake the waiters of any sample of these sampling sessions."""
        for sampling_session_id in sampling_session_ids:
            _set(self._sessions, sampling_session_id)

    def wake_from_thread(self, request_ids: Sequence[str]) -> None:
        """Wake the waiters of these requests from any thread."""
        if self._loop is not None and len(self):
            with contextlib.suppress(RuntimeError):  # the loop has just ended, with all waiters
                self._loop.call_soon_threadsafe(self.wake, request_ids)

    def wake_all(self) -> None:
        """Wake every waiter, so that it reads its row again."""
        for events in (self._requests, self._sessions, self._jobs):
            for name in events:
                _set(events, name)

    def close(self) -> None:
        """Wake all waiters because the server is stopping."""
        self.closed = True
        self.wake_all()

    def __len__(self) -> int:
        """The number of held polls."""
        return sum(len(waiting) for events in (self._requests, self._sessions) for waiting in events.values())


def _set(events: _Events, name: str) -> None:
    for event in events.get(name, ()):
        event.set()
