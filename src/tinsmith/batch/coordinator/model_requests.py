"""What the operations of a bulk job ask of the server that runs it: who answers, and how answers get back to a worker.

The server gives the coordinator one `Answers`; a worker's questions reach it only if its job is one of operations.
Answers of one moment share a call to the worker. Questions of an attempt that has ended are given up; what was begun
for them stays, and is found by whoever asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from tinsmith.errors import TinsmithError, UserError

MAX_ANSWERED = 512
"""Questions of one worker that are being answered at a time."""

log = structlog.get_logger()
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """What one row asks. (job_id, row_idx, key, verb, payload) is its name: the same name is the same question."""

    job_id: int
    tenant_id: str
    job_name: str
    verb: str
    row_idx: int
    key: str
    payload: Message


class Answers(Protocol):
    async def answer(self, question: Question) -> Message:
        """Raises TinsmithError, which fails the row."""
        ...

    async def ended(self, job_id: int, tenant_id: str, status: str) -> None:
        """The job has come to its end: what was kept for its rows may go, what is still being done is given up."""
        ...


@dataclass(frozen=True, slots=True)
class Desk:
    """The answers to one job."""

    answers: Answers
    job_id: int
    tenant_id: str
    job_name: str

    @contextlib.asynccontextmanager
    async def answering(
        self, send: Callable[[list[Message]], Awaitable[None]]
    ) -> AsyncIterator[Callable[[Sequence[Message]], None]]:
        """Takes the questions of some attempts until the end of the block; `send` gives answers to their worker.

        What that raises, the next `take` raises; a heartbeat without questions is enough.
        """
        ready: asyncio.Queue[Message] = asyncio.Queue()
        room = asyncio.Semaphore(MAX_ANSWERED)
        tasks: set[asyncio.Task[None]] = set()

        async def answer(ask: Message) -> None:
            async with room:
                ready.put_nowait({"number": ask["number"], **await self._answer(ask)})

        def take(asks: Sequence[Message]) -> None:
            if delivering.done():
                delivering.result()
            for ask in asks:
                task = asyncio.create_task(answer(ask))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        async def deliver() -> None:
            while True:
                answers = [await ready.get()]
                while not ready.empty():
                    answers.append(ready.get_nowait())
                await send(answers)

        delivering = asyncio.create_task(deliver())
        try:
            yield take
        finally:
            all_tasks = [delivering, *tasks]
            for task in all_tasks:
                task.cancel()
            await asyncio.gather(*all_tasks, return_exceptions=True)

    async def _answer(self, ask: Message) -> Message:
        try:
            question = Question(
                self.job_id, self.tenant_id, self.job_name, str(ask["verb"]), int(ask.get("row_idx", -1)),
                str(ask.get("key", "")), dict(ask["payload"]),
            )  # fmt: skip
            return {"answer": await self.answers.answer(question)}
        except TinsmithError as error:
            return {"refused": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            return {"refused": str(UserError(f"the question is not as it must be: {error!r}"))}
        except Exception as error:
            log.error("a question of a bulk job could not be answered", job_id=self.job_id, exc_info=error)
            return {"refused": f"the server could not answer: {type(error).__name__}: {error}"}
