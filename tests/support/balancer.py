"""One address in front of several servers: each new connection goes to the next one that takes it."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator, Sequence


class Balancer:
    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = itertools.cycle(ports)
        self._tries = len(ports)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connection_counts: dict[int, int] = dict.fromkeys(ports, 0)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = self._connect()
                if server is None:
                    client.close()
                    continue
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=pump, args=(source, target), daemon=True).start()

    def _connect(self) -> socket.socket | None:
        for port in itertools.islice(self._ports, self._tries):
            with contextlib.suppress(OSError):
                server = socket.create_connection(("127.0.0.1", port), timeout=5)
                server.settimeout(None)
                self.connection_counts[port] += 1
                return server
        return None


def pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def run_balancer(ports: Sequence[int]) -> Iterator[Balancer]:
    balancer = Balancer(ports)
    try:
        yield balancer
    finally:
        balancer.close()
