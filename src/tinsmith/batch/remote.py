"""One worker as the coordinator sees it: calls over HTTP, and the streamed answers of those that take long.

A worker that refuses, breaks the connection, or is silent for longer than its heartbeats allow is lost
(`WorkerLostError`): what it was doing is nobody's fault, and it is not asked again.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from tinsmith.batch.attempts import Lost
from tinsmith.batch.pools.local import Started
from tinsmith.batch.protocols import Limits, Outcome

CALL_S = 10.0
MAX_SETUP_FAILURES = 2
"""A mapper that did not start so often in one worker is tried in another one."""
MAX_INFRA_FAILURES = 3


class WorkerLostError(Exception):
    """The worker cannot be reached any more."""


class OperationError(Exception):
    """An operation failed in the worker: what it raised there."""

    def __init__(self, error_type: str, message: str, trace: str) -> None:
        super().__init__(message)
        self.error_type = error_type
        self.trace = trace


class SetupFailedError(Exception):
    """The mapper does not start; the message is its traceback."""


class RemoteWorker:
    def __init__(self, worker_id: str, started: Started, job_id: int, limits: Limits, slot: int | None) -> None:
        self.worker_id = worker_id
        self.started = started
        self.slot = slot
        self.setup_failures = 0
        self.infra_failures = 0
        self.lost = False
        self._job_id = job_id
        timeout = httpx.Timeout(CALL_S, read=limits.heartbeat_timeout_s)
        path = started.address
        if path.startswith("http"):
            transport, base_url = httpx.AsyncHTTPTransport(), path
        else:
            transport, base_url = httpx.AsyncHTTPTransport(uds=path), "http://worker"
        headers = {"authorization": f"Bearer {started.token}"}
        self._client = httpx.AsyncClient(transport=transport, base_url=base_url, timeout=timeout, headers=headers)

    @property
    def useless(self) -> bool:
        worn = self.setup_failures >= MAX_SETUP_FAILURES or self.infra_failures >= MAX_INFRA_FAILURES
        return self.lost or worn or self.started.process.returncode is not None

    async def call(self, path: str, **body: object) -> None:
        try:
            answer = await self._client.post(path, json={"job_id": self._job_id, **body})
        except httpx.HTTPError as error:
            raise self._gone(error) from error
        if answer.status_code != 200:
            raise WorkerLostError(f"the worker answered {path} with {answer.status_code}: {answer.text[:500]}")

    async def feed(self, **assignment: object) -> Outcome | Lost:
        """What an attempt came to. Raises WorkerLostError, SetupFailedError."""
        async for message in self._stream("/feed_batch", assignment):
            if "outcome" in message:
                self.infra_failures = self.setup_failures = 0
                return Outcome.from_dict(message["outcome"])
            if "lost" in message:
                lost = message["lost"]
                if lost["setup"]:
                    self.setup_failures += 1
                    raise SetupFailedError(lost["error"])
                self.infra_failures += bool(lost["infra"])
                return Lost(lost["error_class"], lost["error"], lost["infra"])
        raise self._gone("the answer has no end")

    async def operate(self, op: str, **request: object) -> AsyncIterator[dict[str, Any]]:
        """The lines of an operation; the last one is its result, as `end`. Raises OperationError, WorkerLostError."""
        async for message in self._stream("/operate", {"op": op, **request}):
            if "error" in message:
                raise OperationError(message["error_type"], message["message"], message["error"])
            if "lost" in message:
                raise WorkerLostError(message["lost"]["error"])
            if "alive" not in message:
                yield message
            if "end" in message:
                return
        raise self._gone("the answer has no end")

    async def result_of(self, op: str, **request: object) -> dict[str, Any]:
        """The result alone."""
        result: dict[str, Any] = {}
        async for message in self.operate(op, **request):
            result = message.get("end", {})
        return result

    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        try:
            async with self._client.stream("POST", path, json={"job_id": self._job_id, **body}) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")[:500]
                    raise WorkerLostError(f"the worker answered {path} with {answer.status_code}: {text}")
                async for line in answer.aiter_lines():
                    yield json.loads(line)
        except httpx.HTTPError as error:
            raise self._gone(error) from error

    def _gone(self, why: object) -> WorkerLostError:
        self.lost = True
        return WorkerLostError(f"worker {self.worker_id} was lost: {why!r}")

    async def close(self) -> None:
        """End the process and all that it started, now."""
        self.lost = True
        await self._client.aclose()
        await self.started.kill()
