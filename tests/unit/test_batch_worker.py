"""The calls of a worker of bulk jobs, their protocol, the files of pools, and fair shares."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support import payloads
from tinsmith import batch
from tinsmith.batch.coordinator.coordinator import FairShare
from tinsmith.batch.coordinator.job_run import DispatchWindow
from tinsmith.batch.pools.local import LocalPool, sweep
from tinsmith.batch.pools.ray import Driver, RayWorker, reservation
from tinsmith.batch.pools.ray_host import PREFIX, WorkerHost
from tinsmith.batch.pools.specs import MAX_SLOTS, PoolSpec, max_job_workers, parse_pool, read_pool
from tinsmith.batch.types import JobSpec, Limits
from tinsmith.batch.worker import rpc
from tinsmith.batch.worker import worker as worker_service
from tinsmith.batch.worker.logs import JobLogs
from tinsmith.batch.worker.rpc import DONE, LENGTH, MESSAGE, REFUSED, pack
from tinsmith.errors import SettingsError, UserError

JOB = 7


@batch.remote_function
def count(seconds: float) -> None:
    import time

    from tinsmith import batch

    for rows in batch.load():
        time.sleep(seconds)
        batch.save_results([{"n": row["n"] + 1} for row in rows])


class Connection:
    """One connection to a worker, with the token unless it is empty, and its answers frame by frame."""

    def __init__(self, port: int, token: str = "secret") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        if token:
            self.send(pack({"token": token}))

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def frame(self) -> list[Any]:
        (size,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return rpc.unpack(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self.socket.recv(size - len(data))
            assert chunk, "the connection ended"
            data += chunk
        return data

    def rest(self) -> bytes:
        """Read until the peer closes the connection."""
        with self.socket, contextlib.suppress(ConnectionResetError):
            return b"".join(iter(lambda: self.socket.recv(65536), b""))
        return b""


@dataclass
class Worker:
    port: int
    process: subprocess.Popen[str]
    spec: dict[str, Any]
    parts: Path

    def call(self, name: str, *, token: str = "secret", **request: object) -> tuple[int, dict[str, Any]]:
        """The status of a call (200 if it was done) and the last frame of the reply."""
        connection = Connection(self.port, token)
        with connection.socket:
            connection.send(pack({"call": name, "job_id": JOB, **request}))
            while (answer := connection.frame())[0] == MESSAGE:
                pass
        kind, value = answer
        return (value["status"], value) if kind == REFUSED else (200, value)

    def assignment(self, batch_idx: int = 0, attempt_id: int = 1) -> dict[str, Any]:
        start = 2 * batch_idx
        base = str(self.parts / f"attempt-{attempt_id}")
        indices = {"batch_idx": batch_idx, "start_idx": start, "end_idx": start + 1, "attempt_id": attempt_id}
        return {**indices, "part_bases": [base]}

    def feed(self, *batches: int) -> dict[int, dict[str, Any]]:
        return index_settlements(self.feeding(*batches))

    def feeding(self, *batches: int, attempt_id: int = 1) -> Iterator[dict[str, Any]]:
        """The messages of the reply; the request is sent at once."""
        connection = Connection(self.port)
        assignments = [self.assignment(batch_idx, attempt_id) for batch_idx in batches]
        connection.send(pack({"call": "feed_batch", "job_id": JOB, "assignments": assignments}))

        def messages() -> Iterator[dict[str, Any]]:
            with connection.socket:
                while (answer := connection.frame())[0] == MESSAGE:
                    yield answer[1]
            assert answer[0] == DONE, answer

        return messages()


def index_settlements(messages: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {settlement["key"][0]: settlement for message in messages for settlement in message.get("settled", ())}


def spec_of(directory: Path, seconds: float) -> dict[str, Any]:
    (directory / "in.jsonl").write_text("".join(f'{{"n": {index}}}\n' for index in range(80)))
    return JobSpec(
        payloads.serialize_function(count, kwargs={"seconds": seconds}),
        batch.JsonReader(str(directory / "in.jsonl")).to_dict(),
        [batch.JsonWriter(str(directory / "out.jsonl")).to_dict()],
        2,
        limits=Limits(batch_timeout_s=30),
    ).to_dict()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tinsmith.batch.worker.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    (tmp_path / "received").mkdir()
    first = {"token": "secret", "log_path": str(tmp_path / "log"), "directory": str(tmp_path / "received")}
    process.stdin.write(json.dumps(first) + "\n")
    process.stdin.flush()
    address = json.loads(process.stdout.readline())["address"]
    assert address.startswith("tcp://127.0.0.1:")
    yield Worker(int(address.rpartition(":")[2]), process, spec_of(tmp_path, 0), tmp_path / "parts")
    process.stdin.close()  # as if its parent process had ended
    assert process.wait(5) == 0
    process.stdout.close()


def test_an_attempt_runs_once_and_its_results_are_stored(worker: Worker) -> None:
    assert worker.call("configure", spec=worker.spec)[0] == 200
    outcome = worker.feed(0)[0]["outcome"]
    assert outcome["rows_ok"] == 2
    assert Path(outcome["parts"][0]["path"]).read_text() == '{"n":1}\n{"n":2}\n'
    assert worker.call("health") == (200, {"state": "ready"})


def test_a_group_is_answered_in_few_messages_and_has_a_limit(worker: Worker) -> None:
    worker.call("configure", spec=worker.spec)
    worker.feed(0)
    remaining = list(range(32))
    for attempt_id in range(2, 12):
        messages = list(worker.feeding(*remaining, attempt_id=attempt_id))
        settled = index_settlements(messages)
        assert sorted(settled) == remaining and len(messages) < 32
        remaining = [index for index in remaining if settled[index].get("lost", {}).get("error_class") == "GivenBack"]
        assert all(settled[index]["outcome"]["rows_ok"] == 2 for index in settled.keys() - remaining)
        if not remaining:  # a machine that stalls for a second returns some batches
            break
    assert not remaining
    assert worker.call("feed_batch", assignments=[])[0] == 400
    assert worker.call("feed_batch", assignments=[worker.assignment(index) for index in range(257)])[0] == 400


def test_batches_that_wait_behind_a_long_one_are_given_back(worker: Worker, tmp_path: Path) -> None:
    worker.call("configure", spec=spec_of(tmp_path, 1.4))
    settled = index_settlements(worker.feeding(*range(6)))
    assert sorted(settled) == list(range(6))
    outcomes = {index for index, settlement in settled.items() if "outcome" in settlement}
    assert outcomes == {0, 1, 2}, "what the child works on is not taken from it"
    assert {settlement["lost"]["error_class"] for settlement in settled.values() if "lost" in settlement} == {
        "GivenBack"
    }
    assert not any(settlement["lost"]["begun"] for settlement in settled.values() if "lost" in settlement)


def test_it_serves_its_coordinator_and_its_job_alone(worker: Worker) -> None:
    assert "not configured" in worker.call("feed_batch")[1]["error"]
    worker.call("configure", spec=worker.spec)
    assert worker.call("configure", spec=worker.spec)[0] == 409
    assert worker.call("feed_batch", job_id=8, assignments=[])[0] == 409
    assert worker.call("shutdown", token="another")[0] == 409 and worker.process.poll() is None
    assert worker.call("operate", op="format_disk")[0] == 400
    assert worker.call("nowhere")[0] == 404
    assert worker.call("feed_batch")[0] == 400


def test_it_answers_while_the_mapper_works_and_refuses_a_third_group(worker: Worker, tmp_path: Path) -> None:
    worker.call("configure", spec=spec_of(tmp_path, 20))
    streams = [worker.feeding(0), worker.feeding(1)]
    time.sleep(0.2)  # both are there
    began = time.monotonic()
    assert worker.call("feed_batch", assignments=[worker.assignment(2)])[0] == 429
    assert worker.call("health")[1]["state"] in ("starting", "ready")
    assert time.monotonic() - began < 2
    assert next(streams[0]) == {"alive": True}
    assert worker.call("shutdown", grace_s=0)[0] == 200
    for batch_idx, stream in enumerate(streams):
        lost = index_settlements(stream)[batch_idx]["lost"]
        assert lost["infra"] and lost["error_class"] == "Shutdown"
    assert worker.process.wait(5) == 0


# The protocol.


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a worker in this process, with short timeouts."""
    monkeypatch.setattr(rpc, "TOKEN_S", 0.3)
    monkeypatch.setattr(rpc, "READ_S", 0.3)
    monkeypatch.setattr(rpc, "MAX_UNAUTHENTICATED", 8)
    monkeypatch.setattr(worker_service, "FLUSH_S", 0.1)
    addresses: queue.SimpleQueue[str] = queue.SimpleQueue()

    async def serve() -> None:
        worker = worker_service.Worker("secret", tmp_path / "log", tmp_path)
        addresses.put(await worker.listen(None, "127.0.0.1"))
        await worker.serve()

    serving = threading.Thread(target=lambda: asyncio.run(serve()))
    serving.start()
    port = int(addresses.get(timeout=10).rpartition(":")[2])
    yield port
    Connection(port).send(pack({"call": "shutdown"}))
    serving.join(10)
    assert not serving.is_alive()


@pytest.mark.parametrize(
    ("token", "data", "status"),
    [
        ("", LENGTH.pack(419430400), 409),
        ("", LENGTH.pack(2**32 - 1), 409),
        ("", pack({"token": "another"}) + LENGTH.pack(419430400), 409),
        ("", pack({"token": ["secret"]}), 409),
        ("", pack({"call": "health"}), 409),
        ("secret", LENGTH.pack(rpc.MAX_FRAME_BYTES + 1), 413),
        ("secret", LENGTH.pack(1) + b"\xc1", 400),
        ("secret", LENGTH.pack(2) + b"\x80\x80", 400),
        ("secret", pack(["health"]), 400),
        ("secret", pack({"call": 1}), 400),
    ],
)
def test_a_frame_that_is_not_allowed_is_refused_before_its_body(
    port: int, token: str, data: bytes, status: int
) -> None:
    """The refusal arrives and the connection is closed before any byte of a body is sent."""
    connection = Connection(port, token)
    connection.send(data)
    kind, refusal = connection.frame()
    assert kind == REFUSED and refusal["status"] == status
    assert connection.rest() == b""


@pytest.mark.parametrize(("size", "status"), [(10**17, 413), (-1, 400), ("ten", 400)])
def test_a_file_is_refused_before_its_bytes_are_sent(port: int, size: object, status: int) -> None:
    connection = Connection(port)
    connection.send(pack({"call": "receive", "size": size}))
    kind, refusal = connection.frame()
    assert kind == REFUSED and refusal["status"] == status
    connection.send(pack({"call": "health"}))
    assert connection.frame() == [DONE, {"state": "starting"}]
    connection.socket.close()


def test_a_file_arrives_whole(port: int) -> None:
    connection = Connection(port)
    data = os.urandom(3 * rpc.CHUNK_BYTES + 1)
    connection.send(pack({"call": "receive", "size": len(data)}))
    kind, placed = connection.frame()
    assert kind == MESSAGE
    connection.send(data)
    assert connection.frame() == [DONE, {}]
    assert Path(placed["path"]).read_bytes() == data
    connection.socket.close()


def test_half_a_request_ends_soon(port: int) -> None:
    half = Connection(port, "")
    half.send(pack({"token": "secret"})[:-1])
    assert half.rest() == b""
    assert Connection(port, "").rest() == b""
    half = Connection(port)
    half.send(LENGTH.pack(100) + b"{")
    assert half.rest() == b""


def test_many_unauthenticated_connections_do_not_keep_others_out(port: int) -> None:
    """Each new one replaces the oldest; an authenticated one stays."""
    authenticated = Connection(port)
    authenticated.send(pack({"call": "health"}))
    assert authenticated.frame() == [DONE, {"state": "starting"}]
    threads = threading.active_count()
    unauthenticated = [Connection(port, "") for _ in range(60)]
    another = Connection(port)
    another.send(pack({"call": "health"}))
    assert another.frame()[0] == DONE
    assert threading.active_count() - threads < 30
    assert [connection.rest() for connection in unauthenticated] == [b""] * 60
    time.sleep(0.4)  # longer than an unauthenticated connection lives
    authenticated.send(pack({"call": "health"}))
    assert authenticated.frame() == [DONE, {"state": "starting"}]
    authenticated.socket.close()
    another.socket.close()


@pytest.mark.parametrize(
    "value", [2**63 - 1, 2**64, -(10**30), "\ud800 half a pair", {"nested": [None, True, 0.1, "x"]}, float("inf")]
)
def test_a_message_arrives_as_it_was(value: object) -> None:
    frame = pack({"value": value})
    assert rpc.unpack(frame[LENGTH.size :]) == {"value": value}
    assert list(rpc.read_frames(io.BytesIO(frame + frame[:-1]))) == [{"value": value}], "a cut frame is none"


def test_a_type_that_json_lacks_is_not_sent() -> None:
    with pytest.raises(TypeError, match="a set cannot be sent"):
        pack({"value": {1}})


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"", "before the reply did"),
        (LENGTH.pack(9)[:2], "before the reply did"),
        (LENGTH.pack(9) + b"\x80", "8 bytes before the end of a frame"),
        (LENGTH.pack(rpc.MAX_FRAME_BYTES + 1), "the maximum is"),
        (LENGTH.pack(1) + b"\xc1", "not msgpack"),
    ],
)
def test_a_peer_that_disappears_within_a_frame_is_one_error_that_says_so(
    tmp_path: Path, reply: bytes, words: str
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(LENGTH.size)
        writer.write(reply)
        await rpc.close(writer)

    async def call() -> None:
        path = str(tmp_path / "s")
        async with await asyncio.start_unix_server(serve, path):
            client = rpc.RpcClient(path, "secret", connect_s=5, silence_s=5)
            with pytest.raises(rpc.ConnectionLostError, match=words):
                await client.call("health")
            await client.close()

    asyncio.run(call())


def test_a_handlers_error_refuses_its_call_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(_: rpc.Message, _reader: asyncio.StreamReader) -> rpc.Message:
        raise OSError("the disk is gone")

    async def call() -> None:
        server = rpc.RpcServer("secret", {"fail": fail})
        client = rpc.RpcClient(await server.listen(str(tmp_path / "s")), "secret", connect_s=5, silence_s=5)
        for _ in range(2):
            with pytest.raises(rpc.CallRefusedError, match="the disk is gone") as refused:
                await client.call("fail")
            assert refused.value.status == 500
        await client.close()
        await server.close()

    asyncio.run(call())
    assert [record.exc_info is not None for record in caplog.records if record.levelname == "ERROR"] == [True] * 2


def test_a_cancelled_call_leaves_no_connection_open(tmp_path: Path) -> None:
    async def slow(_: rpc.Message, _reader: asyncio.StreamReader) -> AsyncGenerator[rpc.Message, None]:
        for index in range(3):
            await asyncio.sleep(0.001)
            yield {"number": index}

    async def cancel_everywhere() -> None:
        server = rpc.RpcServer("secret", {"slow": slow})
        address = await server.listen(str(tmp_path / "s"))
        for steps in range(60):  # of the event loop, so that the call is cancelled at any point
            client = rpc.RpcClient(address, "secret", connect_s=5, silence_s=5)
            call = asyncio.create_task(client.call("slow"))
            for _ in range(steps):
                await asyncio.sleep(0.0005 if steps > 30 else 0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await client.close()
        await server.close()
        gc.collect()

    asyncio.run(cancel_everywhere())  # pytest fails on the warning of a writer that was not closed


# Pools.


def test_groups_grow_while_batches_are_short_and_are_single_when_they_are_long() -> None:
    window, sizes = DispatchWindow(), [1]
    for second in range(8):
        window.record(second, second + window.size / 512, window.size)
        sizes.append(window.size)
    assert sizes == [1, 2, 4, 8, 16, 25, 25, 25, 25]
    window.record(10, 15, window.size)
    assert window.size == 1
    window.record(14, 15.2, 1)
    window.record(14, 15.204, 1)
    assert window.size == 2, "the time behind another group is not its own"


def test_a_pool_is_read_from_skypilots_keys(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(
        "pool:\n  min_workers: 1\n  max_workers: 3\nresources:\n  accelerators: H100:2\nsetup: echo hello\n"
    )
    pool = read_pool("gpu", path)
    assert pool == PoolSpec("gpu", 3, 2, "echo hello\n".strip()) and pool.exclusive
    assert parse_pool("cpu", {"pool": {"workers": 2}}) == PoolSpec("cpu", 2)
    path.write_text("pool: [")
    with pytest.raises(SettingsError, match="pool"):
        read_pool("gpu", path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "pool is missing"),
        ({"pool": {"workers": -1}}, "workers is -1"),
        ({"pool": {"workers": True}}, "workers is True"),
        ({"pool": {"workers": 1, "speed": 3}}, "speed"),
        ({"pool": {"workers": 1}, "run": "x"}, "run"),
        ({"pool": {"workers": 1}, "resources": {"cloud": "aws"}}, "accelerators, infra, cpus and use_spot"),
        ({"pool": {"workers": 1}, "resources": {"accelerators": "H100:x"}}, "NAME:COUNT"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_by_name(data: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_pool("p", data)


# Shares.


def shares_of(weights: dict[int, float], slots: int, seconds: float, arrives: dict[int, float]) -> dict[int, float]:
    """Slot-seconds of each job with batches of 0.05 s, in simulated time."""
    now = 0.0
    fair = FairShare(lambda: now, 0.2)
    job_by_slot: dict[int, int] = {}
    worked = dict.fromkeys(weights, 0.0)
    present: list[int] = []
    while now < seconds:
        for job, at in arrives.items():
            if job not in present and now >= at:
                fair.join(job, weights[job], 0)
                present.append(job)
        for slot in range(slots):
            job = job_by_slot.get(slot)
            if job is not None and fair.should_yield(job, slot, [other for other in present if other != job]):
                fair.release(job_by_slot.pop(slot), slot)
            if slot not in job_by_slot and (chosen := fair.choose(present)) is not None:
                fair.acquire(chosen, slot)
                job_by_slot[slot] = chosen
        for job in job_by_slot.values():
            worked[job] += 0.05
        now += 0.05
    return worked


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_jobs_share_by_weight_on_any_number_of_slots(slots: int, weight: float) -> None:
    worked = shares_of({1: weight, 2: 1.0}, slots, 60, {1: 0, 2: 0})
    assert worked[1] / worked[2] == pytest.approx(weight, rel=0.1)
    assert sum(worked.values()) == pytest.approx(60 * slots, rel=0.01), "no slot is idle"


def test_a_later_job_has_no_claim_on_the_time_before_it_came() -> None:
    worked = shares_of({1: 1.0, 2: 1.0}, 2, 90, {1: 0, 2: 30})
    assert worked[2] == pytest.approx(60, rel=0.1)


def test_the_higher_priority_has_the_slots() -> None:
    fair = FairShare(lambda: 0.0, 0.2)
    fair.join(1, 1.0, 0)
    fair.join(2, 1.0, 5)
    assert fair.choose([1, 2]) == 2 and fair.choose([1]) == 1 and fair.choose([]) is None


def test_a_worker_whose_start_is_given_up_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[asyncio.subprocess.Process] = []
    create = asyncio.create_subprocess_exec

    async def record_process(*command: Any, **options: Any) -> asyncio.subprocess.Process:  # noqa: ANN401
        processes.append(await create(*command, **options))
        return processes[-1]

    async def cancel_start() -> None:
        starting = asyncio.create_task(LocalPool(PoolSpec("default", 1), JobLogs(tmp_path)).start("w", None))
        while not processes:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # it waits for the worker's first word
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert processes[0].returncode is not None

    monkeypatch.setattr(asyncio, "create_subprocess_exec", record_process)
    asyncio.run(cancel_start())


def asking(**needs: object) -> JobSpec:
    return JobSpec.from_dict(
        {"batch_serialized_fn": "", "batch_input_format": {}, "batch_output_formats": [], "batch_size": 1, **needs}
    )


def test_worker_resources_bound_the_workers_of_a_job_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    pool = PoolSpec("mine", 4, devices_per_worker=1)
    assert max_job_workers(pool, asking()) == MAX_SLOTS
    assert max_job_workers(pool, asking(num_cpus=3)) == 2
    assert max_job_workers(pool, asking(num_cpus=0.5, memory=1_000_000, num_gpus=1)) == 4
    for needs, said in {
        "num_cpus": (9, "num_cpus = 9, but a worker of pool 'mine' can have at most 8"),
        "memory": (5_000_000, "memory = 5000000, but a worker of pool 'mine' can have at most 4096000"),
        "num_gpus": (2, "num_gpus = 2, but a worker of pool 'mine' can have at most 1"),
        "resources": ({"fpga": 1}, "fpga = 1, but a worker of pool 'mine' can have at most 0"),
    }.items():
        with pytest.raises(UserError, match=said[1]):
            max_job_workers(pool, asking(**{needs: said[0]}))


def test_on_a_cluster_a_worker_reserves_what_the_job_needs_or_else_what_the_pool_gives() -> None:
    pool = PoolSpec("ray", 4, devices_per_worker=1, infra="ray", cpus=2.0)
    assert reservation(pool, asking()) == {"num_cpus": 2.0, "num_gpus": 1}
    needs = {"num_cpus": 0.0, "memory": 1 << 30, "resources": {"fpga": 1.0}}
    assert reservation(pool, asking(**needs)) == {**needs, "num_gpus": 1}
    assert max_job_workers(pool, asking(num_gpus=99)) == MAX_SLOTS, "Ray's autoscaler may bring a larger node"


def test_the_next_job_gets_processes_that_wait_for_it(tmp_path: Path) -> None:
    """Their output goes to the log of their later worker. Unused ones end with the pool."""

    @batch.remote_function
    def tell() -> None:
        import os

        from tinsmith import batch

        for rows in batch.load():
            print("mapped by", os.getppid())  # noqa: T201
            batch.save_results([{"n": os.getpid()} for _ in rows])

    spec = spec_of(tmp_path, 0) | {"batch_serialized_fn": payloads.serialize_function(tell)}
    parts = {"batch_idx": 0, "start_idx": 0, "end_idx": 1, "attempt_id": 1, "part_bases": [str(tmp_path / "parts")]}

    async def run() -> None:
        pool = LocalPool(PoolSpec("default", 2), JobLogs(tmp_path / "logs"))
        await pool.warm_up()
        first, second = (process.pid for process in pool._spares)
        worker = await pool.start("w", None)
        assert worker.process.pid == first
        client = rpc.RpcClient(worker.address, worker.token, connect_s=60, silence_s=60)
        try:
            await client.call("configure", job_id=JOB, spec=spec)
            settled = [
                message async for message in client.stream("feed_batch", {"job_id": JOB, "assignments": [parts]})
            ]
            assert index_settlements(settled)[0]["outcome"]["rows_ok"] == 2, settled
            planned = await client.call("operate", job_id=JOB, op="plan")
            assert planned["end"]["total_rows"] == 80
        finally:
            await client.close()
            await worker.kill()
        assert f"mapped by {first}" in pool._logs.path("w").read_text()
        pool._spares[0].kill()  # a spare that died is passed over
        await pool._spares[0].wait()
        again = await pool.start("v", None)
        assert again.process.pid != second
        await again.kill()
        await pool.warm_up()
        spares = list(pool._spares)
        await pool.close()
        assert len(spares) == 2 and all(process.returncode is not None for process in spares) and not pool._spares

    with tempfile.TemporaryDirectory(prefix="tn-") as temporary, pytest.MonkeyPatch.context() as patched:
        patched.setattr(tempfile, "tempdir", temporary)
        asyncio.run(run())


def test_the_next_host_on_a_node_deletes_an_ended_ones_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended_process = subprocess.Popen(["true"])
    ended_process.wait()
    leftover, other = tmp_path / f"{PREFIX}{ended_process.pid}-abc", tmp_path / "tinsmith-worker-local"
    for directory in (leftover, other):
        directory.mkdir()
    WorkerHost("token", "")
    host = WorkerHost("token", "")
    assert not leftover.exists() and other.exists(), "another pool's directories are its own"
    assert len(list(tmp_path.glob(f"{PREFIX}{os.getpid()}-*"))) == 2 and host


def test_a_worker_leaves_nothing_when_its_server_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="tn-") as temporary:  # a socket's path must be short
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        logs, other = JobLogs(tmp_path / "logs"), JobLogs(tmp_path / "other")

        async def kill_server() -> None:
            worker = await LocalPool(PoolSpec("default", 1), logs).start("w", None)
            assert worker.directory.is_dir() and worker.directory.parent == Path(temporary)
            assert worker.process.stdin is not None
            worker.process.stdin.close()  # as the kernel does for a server that is killed
            await worker.process.wait()

        asyncio.run(kill_server())
        assert list(Path(temporary).iterdir()) == [], "the worker tidied up"
        directories = []
        for server_logs in (logs, other):

            async def kill_both(logs: JobLogs = server_logs) -> Path:
                worker = await LocalPool(PoolSpec("default", 1), logs).start("w", None)
                os.killpg(worker.process.pid, signal.SIGKILL)
                await worker.process.wait()
                return worker.directory

            directories.append(asyncio.run(kill_both()))
        sweep(logs)
        assert [path.exists() for path in directories] == [False, True], "another server's workers are its own"


@pytest.mark.parametrize("how", ["killed", "shut down"])
def test_a_log_that_is_followed_over_a_network_is_copied_once_to_its_end(tmp_path: Path, how: str) -> None:
    async def scenario() -> None:
        source, copied = tmp_path / "log", tmp_path / "copied"
        source.write_text("first\n")
        worker = worker_service.Worker("secret", source, tmp_path)
        address = await worker.listen(str(tmp_path / "socket"), "127.0.0.1")
        serving = asyncio.create_task(worker.serve())
        exit_event = asyncio.Event()
        driver = cast(Driver, SimpleNamespace(kill=lambda _worker_id: exit_event.set()))
        ray_worker = RayWorker("1-a", address, "secret", "host", "process", driver, exit_event, copied)
        ray_worker.following = asyncio.create_task(ray_worker.follow())
        async with asyncio.timeout(20):
            while not copied.exists():
                await asyncio.sleep(0.01)
            source.write_text("first\nlast\n")
            if how == "shut down":
                client = rpc.RpcClient(address, "secret", connect_s=5, silence_s=5)
                await client.call("shutdown", grace_s=0)
                await client.close()
                await serving
                exit_event.set()
            await ray_worker.kill()
        assert copied.read_text() == "first\nlast\n"
        serving.cancel()

    asyncio.run(scenario())
