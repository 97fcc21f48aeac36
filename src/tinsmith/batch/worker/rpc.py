"""One worker as the coordinator sees it: calls over HTTP, and the streamed answers of those that take long.

A worker that refuses, breaks the connection, or is silent for longer than its heartbeats allow is lost
(`WorkerLostError`): what it was doing is nobody's fault, and it is not asked again. httpcore and not httpx: a batch is
one call, and all that httpx adds to it is time (2 ms).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import httpcore
import orjson

from tinsmith.batch.coordinator.attempts import Lost
from tinsmith.batch.coordinator.model_gateway import Desk
from tinsmith.batch.pools.specs import Started
from tinsmith.batch.types import Limits, Outcome

CALL_S = 10.0
MAX_SETUP_FAILURES = 2
"""A mapper that did not start so often in one worker is tried in another one."""
MAX_INFRA_FAILURES = 3
PIECE_BYTES = 1 << 20

Told = tuple[tuple[int, int], Outcome | Lost]
"""An attempt by (batch_idx, attempt_id), and what it came to."""


async def _pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
        yield piece


class WorkerLostError(Exception):
    """The worker cannot be reached any more."""


class OperationError(Exception):
    """An operation failed in the worker: what it raised there."""

    def __init__(self, error_type: str, message: str, trace: str) -> None:
        super().__init__(message)
        self.error_type = error_type
        self.trace = trace


class SetupFailedError(Exception):
    """The mapper does not start; the message is its traceback. `final`: it starts on no other worker either."""

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class RemoteWorker:
    """`desk` answers what operations ask; a user's function has none."""

    def __init__(
        self,
        worker_id: str,
        started: Started,
        job_id: int,
        limits: Limits,
        slot: int | None,
        desk: Desk | None = None,
    ) -> None:
        self._desk = desk
        self.worker_id = worker_id
        self.started = started
        self.slot = slot
        self.setup_failures = 0
        self.infra_failures = 0
        self.lost = False
        self._job_id = job_id
        timeout = {"connect": CALL_S, "write": CALL_S, "pool": CALL_S, "read": limits.heartbeat_timeout_s}
        self._extensions = {"timeout": timeout}
        self._headers = [(b"host", b"worker"), (b"authorization", f"Bearer {started.token}".encode())]
        is_url = started.address.startswith("http")
        self._base = started.address if is_url else "http://worker"
        self._pool = httpcore.AsyncConnectionPool(uds=None if is_url else started.address)

    @property
    def useless(self) -> bool:
        worn = self.setup_failures >= MAX_SETUP_FAILURES or self.infra_failures >= MAX_INFRA_FAILURES
        return self.lost or worn or self.started.gone

    async def call(self, path: str, **body: object) -> None:
        async for _ in self._stream(path, body):
            pass

    async def feed(self, assignments: Sequence[Mapping[str, object]]) -> AsyncIterator[list[Told]]:
        """What attempts came to, as it is told. Raises WorkerLostError, SetupFailedError for what was not told."""
        left = len(assignments)
        setup_error: SetupFailedError | None = None
        async for told in self._fed(assignments):
            left -= len(told)
            settled: list[Told] = []
            for each in told:
                result = self._result(each)
                if isinstance(result, SetupFailedError):
                    setup_error = result
                else:
                    settled.append(((each["key"][0], each["key"][1]), result))
            if settled:
                yield settled
        if setup_error is not None:
            self.setup_failures += 1
            raise setup_error
        if left:
            raise self._gone("the answer has no end")

    async def _fed(self, assignments: Sequence[Mapping[str, object]]) -> AsyncIterator[list[dict[str, Any]]]:
        stream = self._stream("/feed_batch", {"assignments": assignments})
        if self._desk is None:
            async for message in stream:
                if told := message.get("settled"):
                    yield told
        else:
            async with self._desk.answering(lambda answers: self.call("/answer", answers=answers)) as take:
                async for message in stream:
                    take(message.get("asks", ()))
                    if told := message.get("settled"):
                        yield told

    def _result(self, told: dict[str, Any]) -> Outcome | Lost | SetupFailedError:
        if "outcome" in told:
            self.infra_failures = self.setup_failures = 0
            return Outcome.from_dict(told["outcome"])
        lost = told["lost"]
        if lost["setup"]:
            return SetupFailedError(lost["error"], lost["final"])
        self.infra_failures += bool(lost["infra"] and lost["begun"])
        told = {name: lost[name] for name in ("infra", "begun", "final", "died", "row")}
        return Lost(lost["error_class"], lost["error"], **told)

    async def operate(self, op: str, **request: object) -> AsyncIterator[dict[str, Any]]:
        """The lines of an operation; the last one is its result, as `end`. Raises OperationError, WorkerLostError."""
        ended = False
        async for message in self._stream("/operate", {"op": op, **request}):
            if "error" in message:
                raise OperationError(message["error_type"], message["message"], message["error"])
            if "lost" in message:
                raise WorkerLostError(message["lost"]["error"])
            if "alive" not in message:
                yield message
            ended = "end" in message
        if not ended:
            raise self._gone("the answer has no end")

    async def place(self, path: Path) -> str:
        """Where the worker finds a file of ours: there, or a copy that it is sent. Raises WorkerLostError."""
        if self.started.shares_files:
            return str(path)
        with path.open("rb") as file:
            headers = [*self._headers, (b"content-length", b"%d" % path.stat().st_size)]
            request = {"headers": headers, "content": _pieces(file), "extensions": self._extensions}
            try:
                answer = await self._pool.request("POST", self._base + "/receive", **request)
            except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
                raise self._gone(error) from error
        if answer.status != 200:
            raise self._gone(f"it took no file: {answer.content[:500]!r}")
        return str(orjson.loads(answer.content)["path"])

    async def result_of(self, op: str, **request: object) -> dict[str, Any]:
        """The result alone."""
        result: dict[str, Any] = {}
        async for message in self.operate(op, **request):
            result = message.get("end", {})
        return result

    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        content = orjson.dumps({"job_id": self._job_id, **body})
        headers = [*self._headers, (b"content-length", b"%d" % len(content))]
        request = {"headers": headers, "content": content, "extensions": self._extensions}
        try:
            async with self._pool.stream("POST", self._base + path, **request) as answer:
                rest = b""
                async for chunk in answer.aiter_stream():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield orjson.loads(line)
                if answer.status != 200:
                    text = rest.decode(errors="replace")[:500]
                    raise WorkerLostError(f"the worker answered {path} with {answer.status}: {text}")
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise self._gone(error) from error

    def _gone(self, why: object) -> WorkerLostError:
        self.lost = True
        return WorkerLostError(f"worker {self.worker_id} was lost: {why!r}")

    async def close(self) -> None:
        """End the process and all that it started, now."""
        self.lost = True
        await self._pool.aclose()
        await self.started.kill()
