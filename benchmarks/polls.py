"""Many polls held at once: memory, processor time, and what a result that comes meanwhile takes to arrive.

    python benchmarks/polls.py                     # 10,000 polls at a server of its own, with the fake backend
    python benchmarks/polls.py --polls 2000 --seconds 20

Each poll has a connection and a future of its own, which waits for an operation that does not come until the end. The
clients ask again when the server lets go of a poll, as the SDK does. Beside them one more client has an operation
settle that it polls for, again and again. At last everything settles at once. With --json FILE also writes the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from harness import API_KEY, processor_seconds, start_server, summarize_times

MODEL = "tinsmith/nano"
PER_MODEL = 500
SENDERS = 16
PROBES = 100
CONNECTING = 200
"""Connections that are being opened at one time."""


class Poll(asyncio.Protocol):
    """One connection with one poll on it, which is sent again until it has a result."""

    def __init__(self, request: bytes, answers: Counter[int]) -> None:
        self.finished_at: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._request = request
        self._answers = answers
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator or len(body) < length_of(head):
            return
        status, self._received = int(head.split(b" ", 2)[1]), b""
        self._answers[status] += 1
        if status == 408:
            self._transport.write(self._request)
        else:
            self.finished_at.set_result(time.perf_counter())
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.finished_at.done():
            self._answers[0] += 1
            self.finished_at.set_result(time.perf_counter())


def length_of(head: bytes) -> int:
    names = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    return int(names[b"content-length"])


class Client:
    """The benchmark's other requests to the server."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=f"{url}/api/v1", headers={"X-API-Key": API_KEY}, timeout=120)
        self._url = url

    async def ok(self, path: str, body: object) -> dict:
        answer = await self.http.post(path, json=body)
        answer.raise_for_status()
        return answer.json()

    async def model(self, seq_id: int, session_id: str) -> str:
        lora = {"rank": 4}
        body = {"session_id": session_id, "model_seq_id": seq_id, "base_model": MODEL, "lora_config": lora}
        created = await self.ok("create_model", body)
        while (await self.http.post("retrieve_future", json={"request_id": created["request_id"]})).status_code == 408:
            pass
        return created["model_id"]

    async def step(self, model_id: str, seq_id: int) -> str:
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": 0.1}}
        return (await self.ok("optim_step", body))["request_id"]

    def poll_of(self, request_id: str) -> bytes:
        body = json.dumps({"request_id": request_id}).encode()
        head = (
            f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {API_KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def hold(self, request_id: str, answers: Counter[int]) -> Poll:
        address = urlsplit(self._url)
        loop = asyncio.get_running_loop()
        _, poll = await loop.create_connection(
            lambda: Poll(self.poll_of(request_id), answers), str(address.hostname), int(address.port or 80)
        )
        return poll


async def probe(client: Client, model_id: str, first: int) -> list[float]:
    """Milliseconds from the sending of what was missing to the answer of the poll that waited for it."""
    times = []
    for seq_id in range(first, first + 2 * PROBES, 2):
        poll = await client.hold(await client.step(model_id, seq_id + 1), Counter())
        await asyncio.sleep(0.02)
        started = time.perf_counter()
        await client.step(model_id, seq_id)
        times.append(1000 * (await poll.finished_at - started))
    return times


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


async def measure(url: str, pid: int, num_polls: int, seconds: float) -> dict[str, float | dict[str, float]]:
    client = Client(url)
    session_id = (await client.ok("create_session", {"tags": [], "sdk_version": "0.38.0"}))["session_id"]
    probed = await client.model(0, session_id)
    before = summarize_times(await probe(client, probed, 1))
    models = [await client.model(1 + index, session_id) for index in range(-(-num_polls // PER_MODEL))]
    gate = asyncio.Semaphore(SENDERS)

    async def send(index: int) -> str:
        async with gate:
            return await client.step(models[index // PER_MODEL], 2 + index % PER_MODEL)

    request_ids = await asyncio.gather(*(send(index) for index in range(num_polls)))
    answers: Counter[int] = Counter()
    polls: list[Poll] = []
    empty_kib = resident_kib(pid)
    start_s = time.perf_counter()
    for start in range(0, num_polls, CONNECTING):
        group = request_ids[start : start + CONNECTING]
        polls += await asyncio.gather(*(client.hold(request_id, answers) for request_id in group))
    opened_s = time.perf_counter() - start_s
    await asyncio.sleep(5)
    held_kib = resident_kib(pid)
    used, start_s = processor_seconds(pid), time.perf_counter()
    await asyncio.sleep(seconds)
    idle_share = (processor_seconds(pid) - used) / (time.perf_counter() - start_s)
    after = summarize_times(await probe(client, probed, 1 + 2 * PROBES))
    used, start_s = processor_seconds(pid), time.perf_counter()
    await asyncio.gather(*(client.step(model, 1) for model in models))
    finish_times = await asyncio.gather(*(poll.finished_at for poll in polls))
    server_s = processor_seconds(pid) - used
    await client.http.aclose()
    return {
        "polls": num_polls,
        "opened_s": opened_s,
        "kib_per_poll": (held_kib - empty_kib) / num_polls,
        "idle_processor_share": idle_share,
        "without polls": before,
        "beside polls": after,
        "all_settled_s": max(finish_times) - start_s,
        "all_settled_server_ms_per_poll": 1000 * server_s / num_polls,
        "asked_again": answers[408],
        "failed": sum(answers.values()) - answers[200] - answers[408],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--polls", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long nothing settles")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # The futures wait until the end of the benchmark, and no client sends heartbeats meanwhile.
    os.environ |= {"TINSMITH_SEQ_GAP_S": "3600", "TINSMITH_SESSION_TIMEOUT_S": "-1"}
    with start_server(None, "--backend", "fake") as server:
        url, pid = server.url, server.pid
        figures = asyncio.run(measure(url, pid, args.polls, args.seconds))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name, value in figures.items():
        if isinstance(value, dict):
            print(f"result that comes, {name}: p50 {value['p50_ms']:.1f} ms, p95 {value['p95_ms']:.1f} ms")
        else:
            print(f"{name}: {value:.2f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
