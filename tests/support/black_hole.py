"""A TCP proxy before a Postgres that can swallow everything, as a network does whose far end has vanished.

While it swallows, it accepts connections, reads what arrives and forwards nothing; nothing is closed. Connections that
were open at that time stay swallowed for ever, as those of a lost primary do.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

CHUNK = 1 << 16


class BlackHole:
    """Forwards connections on a port of loopback to a Unix socket, until `swallow`."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._swallows = False
        self._far: dict[socket.socket, socket.socket | None] = {}  # None: swallowed
        self._ending, self._end = socket.socketpair()
        for source in (self._listener, self._ending):
            self._selector.register(source, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def swallow(self) -> None:
        with self._lock:
            self._swallows = True
            self._far = dict.fromkeys(self._far)

    def forward(self, target: Path | None = None) -> None:
        """Forward new connections again, to another server if `target` is given."""
        with self._lock:
            self.target = target or self.target
            self._swallows = False

    def close(self) -> None:
        self._end.send(b"x")
        self._thread.join()
        for source in (*self._far, self._listener, self._ending, self._end):
            source.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._ending:
                    return
                with self._lock:
                    if connection is self._listener:
                        self._accept()
                    else:
                        self._pass_on(connection)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = None
        if not self._swallows:
            far = socket.socket(socket.AF_UNIX)
            far.connect(str(self.target))
            self._far[far] = near
            self._selector.register(far, selectors.EVENT_READ)
        self._far[near] = far
        self._selector.register(near, selectors.EVENT_READ)

    def _pass_on(self, connection: socket.socket) -> None:
        try:
            content = connection.recv(CHUNK)
        except OSError:
            content = b""
        far = self._far.get(connection)
        if not content:
            self._selector.unregister(connection)
            if far is not None:
                with contextlib.suppress(OSError):
                    far.shutdown(socket.SHUT_WR)
        elif far is not None:
            with contextlib.suppress(OSError):
                far.sendall(content)


@contextlib.contextmanager
def black_hole(directory: Path) -> Iterator[BlackHole]:
    """A proxy before the Postgres whose socket is in `directory`."""
    relay = BlackHole(directory / ".s.PGSQL.5432")
    try:
        yield relay
    finally:
        relay.close()
