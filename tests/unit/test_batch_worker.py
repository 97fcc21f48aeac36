"""The calls of a worker of bulk jobs, its children, the frames, the files of pools, and fair shares."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from support import payloads
from support.raw_client import wait_until_gone
from tinsmith import batch
from tinsmith.batch.coordinator.coordinator import FairShare
from tinsmith.batch.coordinator.job_run import DispatchWindow
from tinsmith.batch.coordinator.workers import RemoteWorker
from tinsmith.batch.pools import ray_actor
from tinsmith.batch.pools.local import LocalPool
from tinsmith.batch.pools.ray import Driver, reservation
from tinsmith.batch.pools.ray_actor import DONE, MESSAGE, PREFIX, REFUSED, WorkerActor
from tinsmith.batch.pools.specs import (
    MAX_SLOTS,
    PoolSpec,
    WorkerLostError,
    WorkerStartError,
    max_job_workers,
    parse_pool,
    read_pool,
)
from tinsmith.batch.types import FailureCause, JobSpec, Limits
from tinsmith.batch.worker import frames
from tinsmith.batch.worker import worker as workers
from tinsmith.batch.worker.frames import LENGTH, FrameError, decode, encode, pack, read_frame, read_frames
from tinsmith.batch.worker.logs import JobLogs
from tinsmith.batch.worker.worker import CallRefusedError, Worker
from tinsmith.errors import SettingsError, UserError

JOB = 7
PATIENCE_S = 60.0


@batch.remote_function
def count(seconds: float) -> None:
    import time

    from tinsmith import batch

    for rows in batch.load():
        time.sleep(seconds)
        batch.save_results([{"n": row["n"] + 1} for row in rows])


class Owner:
    """Makes the calls of a worker, whose event loop runs on another thread."""

    def __init__(self, directory: Path) -> None:
        self.spec = spec_of(directory, 0)
        self.parts = directory / "parts"
        self.worker = Worker(directory / "log", dict(os.environ), "here")
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.worker.kill(), self.loop).result(PATIENCE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def call(self, name: str, **request: object) -> dict[str, Any]:
        """The last message of a call; an empty one if it has none."""
        messages = list(self.stream(name, **request))
        return messages[-1] if messages else {}

    def refusal(self, name: str, **request: object) -> str:
        with pytest.raises(CallRefusedError) as refused:
            self.call(name, **request)
        return str(refused.value)

    def stream(self, name: str, **request: object) -> Iterator[dict[str, Any]]:
        """The messages of a call, which begins at once. Raises CallRefusedError."""
        arrived: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

        async def receive() -> None:
            try:
                async for message in self.worker.call(name, {"job_id": JOB, **request}):
                    arrived.put(message)
            finally:
                arrived.put(None)

        future = asyncio.run_coroutine_threadsafe(receive(), self.loop)

        def messages() -> Iterator[dict[str, Any]]:
            while (message := arrived.get(timeout=PATIENCE_S)) is not None:
                yield message
            future.result(PATIENCE_S)

        return messages()

    def assignment(self, batch_idx: int = 0, attempt_id: int = 1) -> dict[str, Any]:
        start = 2 * batch_idx
        base = str(self.parts / f"attempt-{attempt_id}")
        indices = {"batch_idx": batch_idx, "start_idx": start, "end_idx": start + 1, "attempt_id": attempt_id}
        return {**indices, "part_bases": [base]}

    def feed(self, *batches: int) -> dict[int, dict[str, Any]]:
        return index_settlements(self.feeding(*batches))

    def feeding(self, *batches: int, attempt_id: int = 1) -> Iterator[dict[str, Any]]:
        return self.stream("feed_batch", assignments=[self.assignment(batch_idx, attempt_id) for batch_idx in batches])


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
def owner(tmp_path: Path) -> Iterator[Owner]:
    new_owner = Owner(tmp_path)
    yield new_owner
    new_owner.close()


def children_of(pid: int) -> set[int]:
    """The living children of a process."""
    pids: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids |= set(map(int, path.read_text().split()))
    return pids


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_attempt_runs_once_and_its_results_are_stored(owner: Owner) -> None:
    owner.call("configure", spec=owner.spec)
    outcome = owner.feed(0)[0]["outcome"]
    assert outcome["rows_ok"] == 2
    assert Path(outcome["parts"][0]["path"]).read_text() == '{"n":1}\n{"n":2}\n'
    assert owner.call("health") == {"state": "ready"}


def test_a_group_is_answered_in_few_messages_and_has_a_limit(owner: Owner) -> None:
    owner.call("configure", spec=owner.spec)
    owner.feed(0)
    remaining = list(range(32))
    for attempt_id in range(2, 12):
        messages = list(owner.feeding(*remaining, attempt_id=attempt_id))
        settled = index_settlements(messages)
        assert sorted(settled) == remaining and len(messages) < 32
        remaining = [index for index in remaining if settled[index].get("lost", {}).get("error_class") == "GivenBack"]
        assert all(settled[index]["outcome"]["rows_ok"] == 2 for index in settled.keys() - remaining)
        if not remaining:  # a machine that stalls for a second returns some batches
            break
    assert not remaining
    assert "assignments has 0 items" in owner.refusal("feed_batch", assignments=[])
    too_many = [owner.assignment(index) for index in range(257)]
    assert "from 1 to 256" in owner.refusal("feed_batch", assignments=too_many)


def test_batches_that_wait_behind_a_long_one_are_given_back(owner: Owner, tmp_path: Path) -> None:
    owner.call("configure", spec=spec_of(tmp_path, 1.4))
    settled = index_settlements(owner.feeding(*range(6)))
    assert sorted(settled) == list(range(6))
    outcomes = {index for index, settlement in settled.items() if "outcome" in settlement}
    assert outcomes == {0, 1, 2}, "what the child works on is not taken from it"
    assert {settlement["lost"]["error_class"] for settlement in settled.values() if "lost" in settlement} == {
        "GivenBack"
    }
    causes = {settlement["lost"]["cause"] for settlement in settled.values() if "lost" in settlement}
    assert causes == {FailureCause.NOT_BEGUN}


def test_it_serves_its_job_alone_and_refuses_other_calls_by_name(owner: Owner) -> None:
    assert "not configured" in owner.refusal("feed_batch")
    owner.call("configure", spec=owner.spec)
    assert "is configured for job 7" in owner.refusal("configure", spec=owner.spec)
    assert "is configured for job 7" in owner.refusal("feed_batch", job_id=8, assignments=[])
    assert "op is 'format_disk'" in owner.refusal("operate", op="format_disk")
    assert "unknown call 'nowhere'" in owner.refusal("nowhere")
    assert "the request is not valid: KeyError('assignments')" in owner.refusal("feed_batch")


def test_it_answers_while_the_mapper_works_and_refuses_a_third_group(
    owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MAX_IN_FLIGHT", 2)
    owner.call("configure", spec=spec_of(tmp_path, 20))
    streams = [owner.feeding(0), owner.feeding(1)]
    time.sleep(0.2)  # both are there
    began = time.monotonic()
    assert "2 groups" in owner.refusal("feed_batch", assignments=[owner.assignment(2)])
    assert owner.call("health")["state"] in ("starting", "ready")
    assert time.monotonic() - began < 2
    assert next(streams[0]) == {"alive": True}
    owner.call("shutdown", grace_s=0)
    for batch_idx, stream in enumerate(streams):
        lost = index_settlements(stream)[batch_idx]["lost"]
        assert (lost["cause"], lost["error_class"]) == (FailureCause.WORKER, "Shutdown")
    asyncio.run_coroutine_threadsafe(owner.worker.wait(), owner.loop).result(5)
    assert owner.worker.has_ended and owner.call("health") == {"state": "draining"}
    assert "shutting down" in owner.refusal("feed_batch", assignments=[owner.assignment(2)])


def test_an_error_of_a_call_refuses_it_and_is_logged(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: object) -> dict[str, Any]:
        raise OSError("the disk is gone")

    monkeypatch.setitem(owner.worker._handlers, "health", fail)  # type: ignore[arg-type]
    with structlog.testing.capture_logs() as records:
        assert "the disk is gone" in owner.refusal("health")
    assert [(record["log_level"], record["exc_info"]) for record in records] == [("error", True)]


@batch.remote_function
def speak_nonsense(marker: str, frame: str) -> None:
    """At its first batch, write to the pipe of its worker."""
    import os
    import sys
    import time
    from pathlib import Path

    from tinsmith import batch

    for rows in batch.load():
        if not Path(marker).exists():
            Path(marker).touch()
            os.write(int(sys.argv[2]), bytes.fromhex(frame))
            time.sleep(600)
        batch.save_results(rows)


@pytest.mark.parametrize("message", [{"outcomes": [{}]}, {"outcomes": 5}, {"taken_back": [0]}, {"asks": [{}]}, {}, [1]])
def test_a_child_that_sends_no_message_of_its_protocol_is_replaced(
    owner: Owner, tmp_path: Path, message: object
) -> None:
    options = {"marker": str(tmp_path / "marker"), "frame": pack(message).hex()}
    payload = payloads.serialize_function(speak_nonsense, kwargs=options)
    owner.call("configure", spec=owner.spec | {"batch_serialized_fn": payload})
    lost = owner.feed(0)[0]["lost"]
    assert (lost["cause"], lost["error_class"]) == (FailureCause.DEATH, "MapperKilled")
    assert owner.feed(1)[1]["outcome"]["rows_ok"] == 2


# The end of a worker. Its children are children of the process that holds it, which may be a server.


def test_an_ended_worker_leaves_no_process_descriptor_or_thread(tmp_path: Path) -> None:
    def resources() -> tuple[int, int, int]:
        gc.collect()  # what earlier tests left
        return len(children_of(os.getpid())), len(os.listdir("/proc/self/fd")), threading.active_count()

    before, children = resources(), children_of(os.getpid())
    for how in ("kill", "shutdown", "kill before its job"):
        owner = Owner(tmp_path)
        if how != "kill before its job":
            owner.call("configure", spec=owner.spec)
            assert owner.feed(0)[0]["outcome"]["rows_ok"] == 2
            assert owner.call("operate", op="plan")["end"]["total_rows"] == 80
            until(lambda: len(children_of(os.getpid()) - children) == 2)  # the list may miss one while others end
        if how == "shutdown":
            owner.call("shutdown", grace_s=10)
            asyncio.run_coroutine_threadsafe(owner.worker.wait(), owner.loop).result(PATIENCE_S)
        owner.close()
    until(lambda: all(count <= count_before for count, count_before in zip(resources(), before, strict=True)))


def test_a_killed_worker_starts_no_child_for_a_request_that_was_under_way(owner: Owner) -> None:
    owner.call("configure", spec=owner.spec)
    before = children_of(os.getpid())
    owner.worker._mapper.kill()  # type: ignore[union-attr]  as `Worker.kill` does first
    lost = owner.feed(0)[0]["lost"]
    assert lost["error_class"] == "Shutdown" and children_of(os.getpid()) == before


def test_a_child_that_reads_nothing_does_not_hold_up_the_end(owner: Owner) -> None:
    owner.call("configure", spec=owner.spec, start_mapper=True)
    assert owner.feed(0)[0]["outcome"]["rows_ok"] == 2
    pid = int(owner.worker.process_name)
    os.kill(pid, signal.SIGSTOP)
    long_base = {**owner.assignment(1), "part_bases": ["x" * (1 << 20)]}  # more than a pipe holds
    stream = owner.stream("feed_batch", assignments=[long_base])
    time.sleep(0.5)  # a thread is blocked on the pipe, with the mapper's lock
    began = time.monotonic()
    asyncio.run_coroutine_threadsafe(owner.worker.kill(), owner.loop).result(PATIENCE_S)
    assert time.monotonic() - began < 10
    assert index_settlements(stream)[1]["lost"]["cause"] == FailureCause.WORKER
    assert wait_until_gone(pid)


def test_children_end_with_the_process_that_holds_their_worker(tmp_path: Path) -> None:
    script = """
        import asyncio, json, os, sys
        from pathlib import Path
        from tinsmith.batch.worker.worker import Worker
        async def main():
            directory, spec, assignment = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
            worker = Worker(directory / "log", dict(os.environ), "here")
            async def last(name, **request):
                return [message async for message in worker.call(name, {"job_id": 7, **request})][-1:]
            await last("configure", spec=spec, start_mapper=True)
            assert (await last("operate", op="plan"))[0]["end"]["total_rows"] == 80
            feeding = asyncio.create_task(last("feed_batch", assignments=[assignment]))
            while not (directory / "begun").exists():
                await asyncio.sleep(0.01)
            print("ready", flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """

    @batch.remote_function
    def begin_and_sleep(marker: str) -> None:
        import time
        from pathlib import Path

        from tinsmith import batch

        for _ in batch.load():
            Path(marker).touch()
            time.sleep(600)

    payload = payloads.serialize_function(begin_and_sleep, kwargs={"marker": str(tmp_path / "begun")})
    spec = spec_of(tmp_path, 0) | {"batch_serialized_fn": payload}
    parts = {"batch_idx": 0, "start_idx": 0, "end_idx": 1, "attempt_id": 1, "part_bases": [str(tmp_path / "parts")]}
    arguments = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), json.dumps(spec), json.dumps(parts)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        children = children_of(process.pid)
        process.kill()
    assert len(children) == 2
    for pid in children:
        assert wait_until_gone(pid)


# Frames.


@pytest.mark.parametrize(
    "value", [2**63 - 1, 2**64, -(10**30), "\ud800 half a pair", {"nested": [None, True, 0.1, "x"]}, float("inf")]
)
def test_a_message_arrives_as_it_was(value: object) -> None:
    frame = pack({"value": value})
    assert decode(frame[LENGTH.size :]) == decode(encode({"value": value})) == {"value": value}
    assert list(read_frames(io.BytesIO(frame + frame[:-1]))) == [{"value": value}], "a cut frame is none"


def test_a_type_that_json_lacks_is_not_sent() -> None:
    with pytest.raises(TypeError, match="a set cannot be sent"):
        pack({"value": {1}})


def read_all(data: bytes) -> list[Any]:
    """The messages that an event loop reads from a pipe with these bytes."""

    async def read() -> list[Any]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return [message async for message in _messages(reader)]

    return asyncio.run(read())


async def _messages(reader: asyncio.StreamReader) -> AsyncGenerator[Any, None]:
    while (message := await read_frame(reader)) is not None:
        yield message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (LENGTH.pack(frames.MAX_FRAME_BYTES + 1), "the maximum is"),
        (LENGTH.pack(1) + b"\xc1", "not msgpack"),
        (LENGTH.pack(2) + b"\x80\x80", "not msgpack"),
    ],
)
def test_bytes_that_are_no_frame_are_one_error_that_says_so(data: bytes, words: str) -> None:
    with pytest.raises(FrameError, match=words):
        list(read_frames(io.BytesIO(data)))
    with pytest.raises(FrameError, match=words):
        read_all(data)


def test_a_frame_that_is_cut_by_its_senders_death_is_dropped() -> None:
    frame = pack({"n": 1})
    for size in range(len(frame)):
        assert read_all(frame + frame[:size]) == list(read_frames(io.BytesIO(frame + frame[:size]))) == [{"n": 1}]


# The coordinator's side of a worker.


class ScriptedWorker:
    """A worker whose calls yield these messages, then raise the error, end, or are silent."""

    host, process_name, has_ended = "there", "1", False

    def __init__(self, *messages: dict[str, Any], then: Exception | str = "end") -> None:
        self.messages, self.then = messages, then
        self.closed_calls = 0

    async def call(self, name: str, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        try:
            for message in self.messages:
                yield message
            if isinstance(self.then, Exception):
                raise self.then
            while self.then == "be silent":
                await asyncio.sleep(3600)
        finally:
            self.closed_calls += 1

    async def send_file(self, path: Path) -> AsyncGenerator[dict[str, Any], None]:
        async for message in self.call("receive", {"path": path}):
            yield message

    async def wait(self) -> None: ...

    async def kill(self) -> None: ...


def remote(*messages: dict[str, Any], then: Exception | str = "end") -> RemoteWorker:
    limits = Limits(heartbeat_timeout_s=0.2)
    return RemoteWorker("1-a", ScriptedWorker(*messages, then=then), 1, limits, None)


@pytest.mark.parametrize(
    ("then", "words", "is_lost"),
    [
        ("be silent", "worker 1-a was lost: it was silent for 0.2 s", True),
        (WorkerLostError("its node is gone"), "worker 1-a was lost: its node is gone", True),
        ("end", "worker 1-a was lost: the reply is incomplete", True),
        (CallRefusedError("2 groups of batches are in flight"), "the worker refused feed_batch: 2 groups", False),
    ],
)
def test_a_worker_that_is_silent_gone_or_refuses_is_one_error_with_its_machine(
    then: Exception | str, words: str, is_lost: bool
) -> None:
    worker = remote({"alive": True}, then=then)

    async def feed() -> None:
        async for _ in worker.feed([{"batch_idx": 0, "attempt_id": 1}]):
            pass

    with pytest.raises(WorkerLostError, match=words) as lost:
        asyncio.run(feed())
    assert lost.value.host == "there" and worker.lost == is_lost == worker.unusable
    assert worker.handle.closed_calls == 1, "the call is not left open"  # type: ignore[attr-defined]


def test_a_file_that_a_silent_worker_does_not_take_loses_the_worker(tmp_path: Path) -> None:
    worker = remote({"path": "/there"}, then="be silent")
    with pytest.raises(WorkerLostError, match="silent"):
        asyncio.run(worker.send(tmp_path))
    assert asyncio.run(remote({"path": "/a"}, {"path": "/b"}).send(tmp_path)) == "/b"


# The driver of a Ray cluster, without Ray.

FAKE_DRIVER = r"""
import os, sys
from tinsmith.batch.pools.ray_actor import DONE, MESSAGE, REFUSED
from tinsmith.batch.worker.frames import decode, encode, pack, read_frames

def send(**message):
    sys.stdout.buffer.write(pack(message))
    sys.stdout.buffer.flush()

for message in read_frames(sys.stdin.buffer):
    if "address" in message and message["address"] == "nowhere":
        send(refused="there is no Ray cluster at 'nowhere'")
        break
    if "start" in message:
        if message["setup"] == "broken":
            send(gone=message["start"], why="the setup failed", host="n1", nodes={"n1": {"CPU": 4.0}})
        else:
            send(started=message["start"], host="n1", process="n1:5", nodes={"n1": {"CPU": 4.0}})
            send(log=message["start"], text="one line\n")
    elif "kill" in message:
        send(gone=message["kill"], why="it has ended", host="n1", nodes={})
    elif "cancel" in message:
        send(log=WORKER, text=f"cancelled {message['cancel']}\n")
    elif "call" in message:
        WORKER, request = message["worker"], decode(message["request"])
        reply = lambda kind, value: send(reply=message["call"], part=encode([kind, value]))
        if message["name"] == "die":
            os._exit(1)
        if message["name"] == "refuse":
            reply(REFUSED, "no")
        elif message["name"] == "lose":
            send(reply=message["call"], lost="its node is gone")
        elif message["name"] == "confuse":
            send(nonsense=1)
        else:
            reply(MESSAGE, {"echo": request})
            if message["name"] != "hang":
                reply(DONE, None)
"""


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    create = asyncio.create_subprocess_exec

    async def create_fake(*_: str, **options: Any) -> asyncio.subprocess.Process:  # noqa: ANN401
        return await create(sys.executable, "-c", FAKE_DRIVER, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_fake)


def request(setup: str = "") -> dict[str, Any]:
    return {"setup": setup, "reserved": {}, "avoid": []}


async def messages_of(calls: AsyncGenerator[dict[str, Any], None]) -> list[dict[str, Any]]:
    return [message async for message in calls]


@pytest.mark.usefixtures("fake_driver")
def test_calls_and_logs_of_a_ray_worker_go_through_the_driver(tmp_path: Path) -> None:
    async def run() -> None:
        driver = Driver("head:1")
        try:
            worker = await driver.start("1-a", tmp_path / "log", request())
            assert (worker.host, worker.process_name, worker.has_ended) == ("n1", "n1:5", False)
            assert driver.nodes == {"n1": {"CPU": 4.0}}
            sent = {"big": 2**70, "bytes": b"\0", "long": "x" * 300_000}
            assert await messages_of(worker.call("echo", sent)) == [{"echo": sent}]
            with pytest.raises(CallRefusedError, match="no"):
                await messages_of(worker.call("refuse", {}))
            with pytest.raises(WorkerLostError, match="its node is gone"):
                await messages_of(worker.call("lose", {}))
            async with contextlib.aclosing(worker.call("hang", {})) as hanging:
                assert await anext(hanging) == {"echo": {}}
            assert await messages_of(worker.call("echo", {})) == [{"echo": {}}]
            await worker.kill()
            assert worker.has_ended
            with pytest.raises(WorkerLostError, match="has ended"):
                await messages_of(worker.call("echo", {}))
            with pytest.raises(WorkerStartError, match="the setup failed") as failed:
                await driver.start("1-b", tmp_path / "log", request("broken"))
            assert failed.value.host == "n1"
        finally:
            await driver.close()
        assert (tmp_path / "log").read_text() == "one line\ncancelled 3\n"

    asyncio.run(run())


@pytest.mark.usefixtures("fake_driver")
@pytest.mark.parametrize(("how", "words"), [("die", "has ended"), ("confuse", "invalid message")])
def test_a_driver_that_ends_loses_its_workers_and_another_one_starts(tmp_path: Path, how: str, words: str) -> None:
    async def run() -> None:
        driver = Driver("head:1")
        try:
            workers = [await driver.start(f"1-{index}", tmp_path / "log", request()) for index in range(2)]
            hanging = workers[0].call("hang", {})
            await anext(hanging)
            for call in (workers[1].call(how, {}), hanging):
                with pytest.raises(WorkerLostError, match=words):
                    await messages_of(call)
            assert all(worker.has_ended for worker in workers)
            again = await driver.start("1-c", tmp_path / "log", request())
            assert await messages_of(again.call("echo", {})) == [{"echo": {}}]
        finally:
            await driver.close()

    async def refuse() -> None:
        driver = Driver("nowhere")
        with pytest.raises(WorkerStartError, match="there is no Ray cluster at 'nowhere'"):
            await driver.start("1-a", tmp_path / "log", request())
        await driver.close()

    asyncio.run(run())
    asyncio.run(refuse())


@pytest.fixture
def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerActor]:
    """An actor in this process, without Ray; its worker is there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray_actor, "LOG_S", 0.05)
    new_actor = WorkerActor()
    new_actor._worker = Worker(new_actor._log_path, dict(os.environ), "here")
    yield new_actor


def test_a_call_of_an_actor_is_msgpack_in_slices(actor: WorkerActor) -> None:
    async def parts(name: str, message: dict[str, Any], size: int) -> list[Any]:
        data = encode(message)
        slices = [data[start : start + size] for start in range(0, len(data), size)]
        return [decode(part) async for part in actor.call(name, *slices)]

    async def run() -> None:
        assert await parts("health", {"job_id": JOB}, 3) == [[MESSAGE, {"state": "starting"}], [DONE, None]]
        [(kind, refusal)] = await parts("feed_batch", {"job_id": JOB}, 1000)
        assert kind == REFUSED and "not configured" in refusal

    asyncio.run(run())


def test_a_file_arrives_whole_replaces_the_last_one_and_fits_on_the_disk(actor: WorkerActor) -> None:
    data = os.urandom(3_000_001)

    async def receive(is_first: bool, chunk: bytes, size: int) -> list[Any]:
        message = {"is_first": is_first, "size": size, "data": chunk}
        return [decode(part) async for part in actor.call("receive", encode(message))]

    async def run() -> None:
        paths: list[str] = []
        for content in (data, b""):
            for start in range(0, max(1, len(content)), 1 << 20):
                [(_, message), _] = await receive(start == 0, content[start : start + (1 << 20)], len(content))
            paths.append(message["path"])
            assert Path(paths[-1]).read_bytes() == content
        assert paths[0] != paths[1] and not Path(paths[0]).exists()
        [(kind, refusal)] = await receive(True, b"x", 10**17)
        assert kind == REFUSED and "the disk has" in refusal

    asyncio.run(run())


@pytest.mark.parametrize("how", ["killed", "shut down"])
def test_the_log_of_an_actor_is_sent_once_to_its_end_and_its_files_are_deleted(actor: WorkerActor, how: str) -> None:
    async def scenario() -> str:
        assert actor._worker is not None
        pages: list[str] = []

        async def follow() -> None:
            async for page in actor.follow_log():
                pages.append(page)

        following = asyncio.create_task(follow())
        actor._log_path.write_text("first\n")
        async with asyncio.timeout(20):
            while not pages:
                await asyncio.sleep(0.01)
            with actor._log_path.open("a") as file:
                file.write("last\n")
            if how == "shut down":
                await messages_of(actor._worker.call("shutdown", {"grace_s": 0}))
            else:
                await actor.kill()
            await following
        return "".join(pages)

    directory = actor._directory
    assert directory.is_dir() and asyncio.run(scenario()) == "first\nlast\n" and not directory.exists()


def test_the_next_actor_on_a_node_deletes_an_ended_ones_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended_process = subprocess.Popen(["true"])
    ended_process.wait()
    leftover, other = tmp_path / f"{PREFIX}{ended_process.pid}-abc", tmp_path / "tinsmith-something"
    for directory in (leftover, other):
        directory.mkdir()
    first, second = WorkerActor(), WorkerActor()
    assert not leftover.exists() and other.exists(), "the directories of others are theirs"
    assert first._directory.is_dir() and second._directory.is_dir()


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
        ({"pool": {"workers": 1}, "envs": {"A": "b"}}, "envs"),
        ({"pool": {"workers": 1}, "resources": {"disk_size": 9}}, "disk_size"),
        ({"pool": {"workers": 1}, "resources": {"cpus": "many"}}, "resources.cpus is 'many'"),
        ({"pool": {"workers": 1}, "resources": {"cpus": 4096}}, "this machine has"),
        ({"pool": {"workers": 1}, "resources": {"region": "us-east-1"}}, "region"),
        ({"pool": {"workers": 1}, "resources": {"cloud": "aws", "infra": "aws"}}, "give infra alone, or cloud"),
        ({"pool": {"workers": 1}, "resources": {"accelerators": "H100:x"}}, "NAME:COUNT"),
        ({"pool": {"workers": 1}, "num_nodes": 0, "resources": {"infra": "aws"}}, "num_nodes is 0"),
        ({"pool": {"workers": 1}, "num_nodes": 2}, "more than 1 only with SkyPilot's infra"),
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


def test_a_job_has_its_minimum_of_slots_before_and_in_spite_of_others() -> None:
    now = 0.0
    fair = FairShare(lambda: now, 0.2)
    fair.join(1, 100.0, 0)
    fair.acquire(1, 0)
    fair.acquire(1, 1)
    fair.join(2, 1.0, 0, min_slots=2)
    now = 1.0
    assert fair.should_yield(1, 0, [2]) and fair.should_yield(1, 1, [2]), "whatever the weights"
    for slot in (0, 1):
        fair.release(1, slot)
        assert fair.choose([1, 2]) == 2
        fair.acquire(2, slot)
    now = 60.0
    assert fair.choose([1, 2]) == 1, "it has its minimum, and no more before others"
    assert not fair.should_yield(2, 0, [1]), "it keeps its minimum"
    fair.acquire(2, 2)
    now = 120.0
    assert fair.should_yield(2, 2, [1]), "and shares what is above it"
    fair.join(3, 1.0, 5)
    assert fair.should_yield(2, 0, [3]), "a higher priority has all slots"


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


def test_the_next_job_gets_children_that_wait_for_it(tmp_path: Path) -> None:
    """Their output goes to the log of their later worker. Unused ones end with the pool."""

    @batch.remote_function
    def tell() -> None:
        import os

        from tinsmith import batch

        for rows in batch.load():
            print("mapped by", os.getpid())  # noqa: T201
            batch.save_results([{"n": os.getpid()} for _ in rows])

    spec = spec_of(tmp_path, 0) | {"batch_serialized_fn": payloads.serialize_function(tell)}
    parts = {"batch_idx": 0, "start_idx": 0, "end_idx": 1, "attempt_id": 1, "part_bases": [str(tmp_path / "parts")]}

    async def run() -> None:
        pool = LocalPool(PoolSpec("default", 2), JobLogs(tmp_path / "logs"))
        await pool.warm_up()
        first, second = pool._spares["mapper"]
        (io_spare,) = pool._spares["io"]
        worker = await pool.start("w", None)
        await messages_of(worker.call("configure", {"job_id": JOB, "spec": spec}))
        settled = await messages_of(worker.call("feed_batch", {"job_id": JOB, "assignments": [parts]}))
        assert index_settlements(settled)[0]["outcome"]["rows_ok"] == 2, settled
        planned = await messages_of(worker.call("operate", {"job_id": JOB, "op": "plan"}))
        assert planned[-1]["end"]["total_rows"] == 80
        assert worker._io_process is not None and worker._io_process._child is io_spare
        await worker.kill()
        assert f"mapped by {first.process.pid}" in pool._logs.path("w").read_text()

        second.kill()  # a spare that died is passed over
        second.process.wait()
        again = await pool.start("v", None)
        await messages_of(again.call("configure", {"job_id": JOB, "spec": spec, "start_mapper": True}))
        assert again.process_name != str(second.process.pid)
        await again.kill()
        await pool.warm_up()
        with_variables = JobSpec.from_dict(spec | {"env": {"OMP_NUM_THREADS": "1"}})
        other = await pool.start("u", 0, with_variables)
        assert other._spares == {} and len(pool._spares["mapper"]) == 2, "they have imported modules without them"
        await other.kill()
        spares = [*pool._spares["mapper"], *pool._spares["io"]]
        await pool.close()
        assert len(spares) == 3 and all(spare.process.returncode is not None for spare in spares)
        assert not any(pool._spares.values())

    asyncio.run(run())


def test_children_have_the_servers_environment_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_SIGNING_SECRET", "a secret of the server")
    monkeypatch.setenv("HF_TOKEN", "another")
    monkeypatch.setenv("COLOUR", "blue")

    async def run() -> list[bytes]:
        pool = LocalPool(PoolSpec("default", 1), JobLogs(tmp_path / "logs"))
        await pool.warm_up()
        spec = spec_of(tmp_path, 0)
        spawned, environments = list(pool._spares["mapper"]), []
        for variables in ({}, {"A_VARIABLE": "of the job"}):
            worker = await pool.start("w", None, JobSpec.from_dict(spec | {"env": variables}))
            configure = {"job_id": JOB, "spec": spec | {"env": variables}, "secrets": {}, "start_mapper": True}
            await messages_of(worker.call("configure", configure))
            assert worker.process_name != str(os.getpid())
            path = Path(f"/proc/{worker.process_name}/environ")
            until(path.read_bytes)  # it is empty until the process has begun its program
            environments.append(path.read_bytes())
            await worker.kill()
        await pool.close()
        assert len(spawned) == 1
        return environments

    plain, with_variables = asyncio.run(run())
    for environment in (plain, with_variables):
        assert b"COLOUR=blue" in environment
        assert b"a secret of the server" not in environment and b"HF_TOKEN" not in environment
    assert b"A_VARIABLE=of the job" in with_variables and b"A_VARIABLE" not in plain
