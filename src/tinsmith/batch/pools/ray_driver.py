"""The process that talks to Ray for one coordinator: `python -m tinsmith.batch.pools.ray_driver`.

Standard input and output have frames (`frames.py`). The coordinator sends the `address` of the cluster, then
- `start` with the name of a worker, perhaps with nodes to `avoid`, and `kill`;
- `call` with a number, the `worker`, the `name` of the call, and its `request` as msgpack; `cancel` with the number.

This process sends
- `started` with the worker's host and process, and `gone` with the reason, both with the `nodes` of the cluster, each
  with its resources; or, once, `refused`: the cluster cannot be joined;
- `reply` with the number of a call and a `part` of its reply (`ray_actor.MESSAGE`), or with the reason why it was
  `lost`;
- `log` with the worker and the `text` that its children wrote.

This process owns the actors: when its input closes, it ends, and Ray ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Coroutine
from typing import IO, Any

import ray
from ray.exceptions import RayError

from tinsmith.batch.pools.ray_actor import WorkerActor, host_name
from tinsmith.batch.worker.frames import Message, pack, read_frame, read_frames

NAMESPACE = "tinsmith-batch"
CONNECT_S = 60.0
"""How long to try an unreachable cluster, whose head may be restarting."""
PAUSE_S = 2.0
END_S = 2.0
"""How long a worker may take to end its children and send the rest of its log."""
SLICE_BYTES = 1 << 16
"""A request travels in arguments of this size, which Ray sends inline, up to 10 MiB together. Others lie in its object
store, or on disk if that is full; secrets are at the beginning of a request."""
NODE_LABEL = "ray.io/node-id"
"""The label that Ray gives each node."""


class Actors:
    """The workers of one coordinator, and the calls to them."""

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._actors: dict[str, Any] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, message: Message) -> None:
        if "start" in message:
            self._start(message)
        elif "kill" in message:
            self._kill(message["kill"])
        elif "call" in message:
            self._calls[message["call"]] = self._create_task(self._call(message))
        elif message["cancel"] in self._calls:
            self._calls[message["cancel"]].cancel()

    def _create_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _start(self, request: Message) -> None:
        worker_id = request["start"]
        options = {
            "name": f"batch-{worker_id}",
            **request["reserved"],
            "max_restarts": 0,
            "scheduling_strategy": "SPREAD",
        }
        try:
            actor = self._actors[worker_id] = _create_actor(options, request["avoid"])
        except Exception as error:  # noqa: BLE001  an error of this worker alone
            self.send({"gone": worker_id, "why": _describe(error), "host": "", "nodes": {}})
            return
        self._followers[worker_id] = self._create_task(self._follow(worker_id, actor, request["setup"]))

    async def _follow(self, worker_id: str, actor: Any, setup: str) -> None:  # noqa: ANN401
        """Start a worker and send its log until it has ended."""
        reason, host = "it has ended", ""
        try:
            reply = await actor.start.remote(setup)
            reason, host = reply.get("failed", reason), reply["host"]
            if "failed" not in reply:
                self.send({"started": worker_id, **reply, "nodes": await asyncio.to_thread(_nodes)})
                async for page in actor.follow_log.remote():
                    self.send({"log": worker_id, "text": await page})
        except Exception as error:  # noqa: BLE001  any error ends the worker, and is reported
            reason = _describe(error)
        self.send({"gone": worker_id, "why": reason, "host": host, "nodes": await asyncio.to_thread(_nodes)})
        self._actors.pop(worker_id, None)
        self._followers.pop(worker_id, None)
        ray.kill(actor)

    async def _call(self, request: Message) -> None:
        call_id, data = request["call"], request["request"]
        slices = [data[start : start + SLICE_BYTES] for start in range(0, len(data), SLICE_BYTES)]
        parts: Any = None
        try:
            parts = self._actors[request["worker"]].call.remote(request["name"], *slices)
            async for part in parts:
                self.send({"reply": call_id, "part": await part})
        except asyncio.CancelledError:
            if parts is not None:
                ray.cancel(parts)
            raise
        except Exception as error:  # noqa: BLE001  any error ends the call, and is reported
            self.send({"reply": call_id, "lost": _describe(error)})
        finally:
            del self._calls[call_id]

    def _kill(self, worker_id: str) -> None:
        """End a worker, which gets `END_S` to end its children."""
        actor, follower = self._actors.pop(worker_id, None), self._followers.get(worker_id)
        if actor is not None and follower is not None:
            self._create_task(self._end(actor, follower))

    async def _end(self, actor: Any, follower: asyncio.Task[None]) -> None:  # noqa: ANN401
        with contextlib.suppress(TimeoutError, RayError):
            async with asyncio.timeout(END_S):
                await actor.kill.remote()
                await asyncio.shield(follower)
        ray.kill(actor)

    def send(self, message: Message) -> None:
        self._output.write(pack(message))
        self._output.flush()


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, RayError) else f"{type(error).__name__}: {error}"


def _create_actor(options: dict[str, Any], avoided_hosts: list[str]) -> Any:  # noqa: ANN401
    remote: Any = ray.remote(WorkerActor)
    if avoided_hosts:
        avoided = [node["NodeID"] for node in ray.nodes() if _name(node) in avoided_hosts]
        selector = {NODE_LABEL: f"!in({','.join(avoided)})"}
        with contextlib.suppress(ValueError):  # an older Ray, whose worker may start on such a node again
            return remote.options(**options, label_selector=selector).remote()
    return remote.options(**options).remote()


def _name(node: dict[str, Any]) -> str:
    return host_name(node["NodeManagerAddress"], node["NodeID"])


def _nodes() -> dict[str, dict[str, float]]:
    """The resources of each node that is alive, by its name; empty if the cluster does not answer."""
    try:
        return {_name(node): node["Resources"] for node in ray.nodes() if node["Alive"]}
    except Exception:  # noqa: BLE001  of a connection that ends
        return {}


def connect(address: str) -> str:
    """Connect to the cluster; returns the error, or an empty string."""
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
            return ""
        except (ConnectionError, RuntimeError, ValueError) as error:
            if time.monotonic() > deadline:
                return f"there is no Ray cluster at {address!r} that can be joined from here: {error}"
        time.sleep(PAUSE_S)


async def serve(source: IO[bytes], actors: Actors) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    while (message := await read_frame(reader)) is not None:
        actors.handle(message)


def main() -> None:
    source, output = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print
    first = next(read_frames(source), None)
    if first is None:
        return
    actors = Actors(output)
    if problem := connect(first["address"]):
        actors.send({"refused": problem})
        return
    try:
        asyncio.run(serve(source, actors))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
