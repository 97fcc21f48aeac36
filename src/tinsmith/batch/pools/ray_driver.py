"""The process that talks to Ray for one coordinator: `python -m tinsmith.batch.pools.ray_driver`.

Standard input has lines of JSON: first the `address` of the cluster, then workers to `start`, perhaps with nodes to
`avoid`, and to `kill`. Standard output has lines: a worker is `started`, with its address; a worker is `gone`, with the
reason and its host; or the cluster `refused` the connection. The first two list the `nodes` of the cluster, each with
its resources. This process owns the actors: when its input closes, it ends, and Ray ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from typing import IO, Any

import ray
from ray.exceptions import RayError

from tinsmith.batch.pools.ray_host import WorkerHost, host_name

NAMESPACE = "tinsmith-batch"
CONNECT_S = 60.0
"""How long to try an unreachable cluster, whose head may be restarting."""
PAUSE_S = 2.0
NODE_LABEL = "ray.io/node-id"
"""The label that Ray gives each node."""


class Hosts:
    def __init__(self, output: IO[str]) -> None:
        self._output = output
        self._hosts: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, request: dict[str, Any]) -> None:
        options = {
            "name": f"batch-{request['start']}",
            **request["reserved"],
            "max_restarts": 0,
            "max_concurrency": 4,
            "scheduling_strategy": "SPREAD",
        }
        try:
            host = _create_host(options, request)
        except Exception as error:  # noqa: BLE001  an error of this worker alone
            self.say({"gone": request["start"], "why": f"{type(error).__name__}: {error}"})
            return
        self._hosts[request["start"]] = host
        task = asyncio.create_task(self._keep(request["start"], host))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, worker_id: str, host: Any) -> None:  # noqa: ANN401
        reason, name = "it has ended", ""
        try:
            reply = await host.start.remote()
            reason, name = reply.get("failed", reason), reply["host"]
            if "failed" not in reply:
                nodes = await asyncio.to_thread(_nodes)
                self.say({"started": worker_id, **reply, "nodes": nodes})
                await host.wait.remote()
        except Exception as error:  # noqa: BLE001  any error ends the worker, and is reported
            reason = str(error) if isinstance(error, RayError) else f"{type(error).__name__}: {error}"
        self.say({"gone": worker_id, "why": reason, "host": name, "nodes": await asyncio.to_thread(_nodes)})
        self._hosts.pop(worker_id, None)
        ray.kill(host)

    def kill(self, worker_id: str) -> None:
        """End a worker. A running worker gets `PAUSE_S` to end its children; one that waits for room ends at once."""
        host = self._hosts.pop(worker_id, None)
        if host is not None:
            task = asyncio.create_task(self._end(host))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _end(self, host: Any) -> None:  # noqa: ANN401
        try:
            async with asyncio.timeout(PAUSE_S):
                await host.end.remote()
        except (TimeoutError, RayError):
            pass
        ray.kill(host)

    def say(self, message: dict[str, Any]) -> None:
        self._output.write(json.dumps(message) + "\n")
        self._output.flush()


def _create_host(options: dict[str, Any], request: dict[str, Any]) -> Any:  # noqa: ANN401
    remote: Any = ray.remote(WorkerHost)
    arguments = request["token"], request["setup"]
    if request["avoid"]:
        avoided = [node["NodeID"] for node in ray.nodes() if _name(node) in request["avoid"]]
        selector = {NODE_LABEL: f"!in({','.join(avoided)})"}
        with contextlib.suppress(ValueError):  # an older Ray, whose worker may start on such a node again
            return remote.options(**options, label_selector=selector).remote(*arguments)
    return remote.options(**options).remote(*arguments)


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


async def serve(output: IO[str]) -> None:
    hosts = Hosts(output)
    while line := await asyncio.to_thread(sys.stdin.readline):
        message = json.loads(line)
        if "start" in message:
            hosts.start(message)
        else:
            hosts.kill(message["kill"])


def main() -> None:
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries may print
    refused = connect(json.loads(sys.stdin.readline())["address"])
    if refused:
        output.write(json.dumps({"refused": refused}) + "\n")
        output.flush()
        return
    try:
        asyncio.run(serve(output))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
