"""A server with canned responses, which measures the SDK's own share of a call.

    python benchmarks/canned_server.py 8001        # serves on 127.0.0.1 until it is ended

No database, no engine and no framework; an answer takes it some 0.05 ms. It knows what `latency.py` asks for its rows
`forward`, `step` and `crowd`, and the bytes are of the size that a server's are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import cast

import numpy as np
import uvloop
from harness import wait_for

from tinsmith.types import PassResult
from tinsmith.wire.bodies import JSON_TYPE, PROTO_TYPE
from tinsmith.wire.training import write_pass_result

MODEL = "bench/canned"
LENGTH = 32
PASS = write_pass_result(PassResult((np.full(LENGTH, -9.0, np.float32),), {"loss:sum": 288.0, "tokens:sum": 32.0}))
INFO = {"model_data": {"model_name": MODEL, "arch": "canned"}, "model_id": "m", "is_lora": True, "lora_rank": 32}
PREFIX = "/api/v1/"
SUBMITTED = {"create_model": "create", "forward_backward": "pass", "optim_step": "step"}
"""The routes that have a result, and the prefix of their request_ids."""

ANSWERS: dict[str, object] = {
    "client/config": {"use_pyqwest_transport": False, "pjwt_auth_enabled": False},
    "client/dynamic_config": {"refresh_interval_sec": 300},
    "create_session": {"type": "create_session", "session_id": "s"},
    "create_sampling_session": {"type": "create_sampling_session", "sampling_session_id": "s:sample:0"},
    "session_heartbeat": {"type": "session_heartbeat"},
    "get_info": INFO,
}
RESULTS: dict[str, object] = {
    "create": {"model_id": "m", "type": "create_model"},
    "step": {"metrics": {"grad_norm": 1.0}, "type": "optim_step"},
}


def build_answer(path: str, body: bytes) -> tuple[str, bytes]:
    """The content type and the body."""
    noun = path.removeprefix(PREFIX)
    if noun in SUBMITTED:
        return JSON_TYPE, json.dumps({"request_id": f"{SUBMITTED[noun]}:1", "model_id": "m"}).encode()
    if noun == "retrieve_future":
        kind = json.loads(body)["request_id"].partition(":")[0]
        return (PROTO_TYPE, PASS) if kind == "pass" else (JSON_TYPE, json.dumps(RESULTS[kind]).encode())
    return JSON_TYPE, json.dumps(ANSWERS.get(noun, {})).encode()


class Connection(asyncio.Protocol):
    """One client's; requests with a length, one after the other."""

    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head, start = self._received[:end].lower(), end + 4
            _, length_header, behind = head.partition(b"\r\ncontent-length:")
            stop = start + (int(behind.partition(b"\r\n")[0]) if length_header else 0)
            if len(self._received) < stop:
                return
            path = head.split(b" ", 2)[1].decode()
            kind, content = build_answer(path, self._received[start:stop])
            self._received = self._received[stop:]
            lines = f"HTTP/1.1 200 OK\r\ncontent-length: {len(content)}\r\ncontent-type: {kind}\r\n\r\n"
            self._transport.write(lines.encode() + content)


async def serve(port: int) -> None:
    # With the protocol given, the event loop sends answers without delay.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    server = await asyncio.get_running_loop().create_server(Connection, sock=listener)
    await server.serve_forever()


@contextlib.contextmanager
def run_canned_server() -> Iterator[str]:
    """The address of one in a process of its own, until the end of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, __file__, str(port)])
    try:
        wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
