"""Thousands of bad requests of every kind to a live server: it answers each, and its memory and that of its engine stay
bounded."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import zstandard

from support.live import LiveServer, serving
from support.raw_client import PROTO, RawClient, connect, engine_of, pass_body, resident_bytes
from tinsmith.wire import bodies

MIB = 1 << 20
WARM, REQUESTS = 700, 2000
AT_MOST_S = 5.0
JSON = {"Content_Type": "application/json"}
PASS = {"Content_Type": PROTO["Content-Type"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("abuse") / "data", "--backend", "fake", settings={"HOLD_S": "1"}) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[RawClient]:
    new_client = connect(server)
    yield new_client
    new_client.http.close()


def compress_without_size(body: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(body) + compressor.flush()


def kinds(client: RawClient, model: str, sampler: str) -> list[Callable[[int], httpx.Response]]:
    """Yield bad requests, each different from the last of its kind, so that any retained memory adds up."""
    rng = random.Random(0)
    bomb, sly = zstandard.ZstdCompressor().compress(b"\0" * 100 * MIB), compress_without_size(b"\0" * 65 * MIB)

    def noise(size: int) -> bytes:
        return rng.randbytes(rng.randrange(size))

    def step(index: int, adam: object) -> dict[str, object]:
        return {"model_id": model, "seq_id": index + 1, "adam_params": adam}

    def sample(index: int, **changes: object) -> dict[str, object]:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 500}]}
        return {"sampling_session_id": sampler, "seq_id": index, "prompt": prompt} | changes

    deep = b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"
    return [
        lambda n: client.send("asample", noise(80_000), **JSON),
        lambda n: client.send("forward_backward", noise(80_000), **PASS),
        lambda n: client.send("forward_backward", noise(80_000), Content_Encoding="zstd", **PASS),
        lambda n: client.send("create_session", b'{"%d":' % n + deep[5:], **JSON),
        lambda n: client.send("load_weights", deep, **JSON),
        lambda n: client.send("retrieve_future", b'{"request_id":"%d:0"}' % n, **JSON),
        lambda n: client.post("retrieve_futures", {"target": {"sampling_session_id": f"{n}:sample:0"}}),
        lambda n: client.post("optim_step", step(n, {"learning_rate": f"{n}" * 1000})),
        lambda n: client.post("optim_step", {"model_id": f"{n}:train:0", "seq_id": 1, "adam_params": {}}),
        lambda n: client.send_pass(pass_body(model, n + 1, [n + 512] * 500)),
        lambda n: client.send_pass(pass_body(f"{n}", 1, loss_fn="x" * 10_000)),
        lambda n: client.post("asample", sample(n, num_samples=-n)),
        lambda n: client.post("asample", sample(n, **{f"unknown_{n}": True})),
        lambda n: client.post("create_custom_loss", {"session_id": model.partition(":")[0], "graph": {str(n): []}}),
        lambda n: client.http.get("sessions", headers={"X-API-Key": f"wrong-{n}"}),
        lambda n: client.http.get("sessions", headers={"X-API-Key": f"{n}" * 1000}),
        lambda n: client.http.get(f"sessions/{n}%00%ff%2f..%2f"),
        lambda n: client.http.get(f"nowhere/{n}/{'x' * 500}"),
        lambda n: client.http.get(f"sessions?limit={n}x&offset=-{n}&access_scope={n}"),
        lambda n: client.http.get(f"downloads/{n}/a/weights/b/archive?expires={n}&signature={n}"),
        lambda n: client.http.get("healthz", headers={"Host": f"{n}.example"}),
        lambda n: client.http.request("BREW", f"sessions/{n}"),
        lambda n: client.http.post("telemetry", json=[{"event": f"{n}"}]),
        lambda n: client.send("forward_backward", bomb, Content_Encoding="zstd", **PASS),
        lambda n: client.send("forward_backward", sly, Content_Encoding="zstd", **PASS) if n % 5 == 0 else
        client.send("forward_backward", sly[:-1], Content_Encoding=f"zstd, {n}", **PASS),
    ]  # fmt: skip


def test_two_thousand_bad_requests_leave_nothing_behind(server: LiveServer, client: RawClient) -> None:
    model = client.model()
    pids = [server.process.pid, engine_of(server)]
    bad = itertools.cycle(kinds(client, model, client.sampler()))
    slowest = 0.0
    sizes: list[list[int]] = []
    for index in range(WARM + REQUESTS):
        if index == WARM:
            sizes.append([resident_bytes(pid) for pid in pids])
        started = time.monotonic()
        answer = next(bad)(index)
        slowest = max(slowest, time.monotonic() - started)
        # Some are stored as refused; the reason is in the result.
        assert answer.status_code in (200, 400, 401, 403, 404, 405, 413, 415), (answer.url, answer.text)
        said = answer.json()
        assert said.get("detail") or "request_id" in said, (answer.url, said)
    sizes.append([resident_bytes(pid) for pid in pids])
    grown = [after - before for before, after in zip(*sizes, strict=True)]
    assert max(grown) < 4 * MIB, f"server and engine grew by {grown} bytes over {REQUESTS} bad requests"
    assert slowest < AT_MOST_S
    assert "unexpected error" not in (server.data_dir / "server.log").read_text()
    assert client.steps_taken(client.step(client.model(), 1)) == 1


def peak_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def test_small_bodies_need_bounded_memory(server: LiveServer, client: RawClient) -> None:
    """Ten megabytes of brackets or of empty messages would need hundreds of megabytes as objects."""
    before = resident_bytes(server.process.pid)
    brackets = b'{"a":[' + b",".join([b"[]"] * (3 * MIB)) + b"]}"
    empty = b"\x1a\x00" * (bodies.FREE_BYTES // 2 + 1000) * 2
    requests = [("asample", brackets, JSON), ("forward_backward", empty, PASS)] * 2
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda request: client.send(request[0], request[1], **request[2]), requests))
    assert [answer.status_code for answer in answers] == [400] * 4
    assert peak_bytes(server.process.pid) - before < 300 * MIB
