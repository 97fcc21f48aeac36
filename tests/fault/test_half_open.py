"""A thousand connections that send half a request, or read nothing, are closed and hardly slow other clients."""

from __future__ import annotations

import contextlib
import resource
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.live import API_KEY, LiveServer, serving
from support.raw_client import RawClient, connect

OF_EACH_KIND = 250
FEW = 10  # the server's own connections
MAX_MIB = 48  # a connection takes some 25 KiB, half a body 20 more; unread answers share their bytes
IMPATIENCE_S = 2.0
IMPATIENT = f"from tinsmith.api import connections\nconnections.HEAD_S = connections.SILENCE_S = {IMPATIENCE_S}"
LINE = b"POST /api/v1/forward_backward HTTP/1.1\r\nHost: 127.0.0.1\r\n"
HEAD = (
    LINE
    + b"X-API-Key: %s\r\nContent-Type: application/x-protobuf\r\nContent-Length: 4000000\r\n\r\n" % API_KEY.encode()
)
ANSWER = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
STARTS = {"nothing": b"", "half a line": LINE[:20], "half a body": HEAD + b"x" * 20_000, "no reading": ANSWER * 40}


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192 if hard < 0 else min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("half") / "data", "--backend", "fake", before=IMPATIENT) as new_server:
        yield new_server


def open_files(server: LiveServer) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def resident_mib(server: LiveServer) -> float:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def half_open(server: LiveServer, start: bytes) -> socket.socket:
    address = urlsplit(server.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((str(address.hostname), int(address.port or 0)))
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        connection.send(start)
    return connection


def seconds_of_steps(client: RawClient, model: str, first_seq_id: int) -> list[float]:
    times = []
    for seq_id in range(first_seq_id, first_seq_id + 15):
        started = time.monotonic()
        client.result(client.step(model, seq_id))
        times.append(time.monotonic() - started)
    return times


@contextlib.contextmanager
def watch_peaks(server: LiveServer) -> Iterator[dict[str, float]]:
    """The peak of the server's open files and memory during the block."""
    peaks = {"files": 0.0, "mib": 0.0}
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            peaks["files"] = max(peaks["files"], open_files(server))
            peaks["mib"] = max(peaks["mib"], resident_mib(server))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join()


def test_a_thousand_half_open_connections_cost_little_and_end(server: LiveServer) -> None:
    client = connect(server)
    model = client.model()
    seconds_of_steps(client, model, 1)
    files, memory_mib = open_files(server), resident_mib(server)
    with watch_peaks(server) as peaks:
        connections = [half_open(server, start) for start in STARTS.values() for _ in range(OF_EACH_KIND)]
        step_seconds = seconds_of_steps(client, model, 16)
        deadline = time.monotonic() + 10 * IMPATIENCE_S
        while open_files(server) > files + FEW and time.monotonic() < deadline:
            time.sleep(0.05)
        assert open_files(server) <= files + FEW, "each was closed by the server"
    assert statistics.median(step_seconds) < IMPATIENCE_S / 2, "nobody waits until they are closed"
    assert peaks["files"] > files + 2 * OF_EACH_KIND, "they were there meanwhile"
    assert peaks["mib"] < memory_mib + MAX_MIB
    for connection in connections:
        connection.close()
    client.http.close()
