"""Tokens of running samples, from the engine to the streams of the server.

They are sent with the wake-ups and may be lost. The stored result is authoritative: it supplies missing tokens, and a
contradiction is an error. Each partial has its position in the answer, so that gaps are detected; the tokens after a
gap come with the result. `Partials` belongs to the server's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence

import orjson

from tinsmith.types import Partial

PARTIAL_MARK = "+"
"""The first character of a line that is a partial; other lines are request_ids."""


def line_of(partial: Partial) -> str:
    fields = [partial.request_id, partial.index, partial.start, partial.tokens, partial.logprobs, partial.topk]
    return PARTIAL_MARK + orjson.dumps(fields).decode()


def _read(line: str) -> Partial | None:
    try:
        request_id, index, start, tokens, logprobs, topk = orjson.loads(line.removeprefix(PARTIAL_MARK))
        return Partial(request_id, index, start, tuple(tokens), tuple(logprobs), tuple(topk))
    except (ValueError, TypeError):
        return None  # truncated


class Partials:
    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[Partial]] = {}
        self._early: dict[str, list[Partial]] = {}  # of samples whose stream does not listen yet

    def expect(self, request_id: str) -> None:
        """Keep the partials of a sample until `listen`. Call this before an engine can see the sample. Thread-safe."""
        self._early[request_id] = []

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the partials of samples that `expect` announced and nothing listened to."""
        for request_id in request_ids:
            self._early.pop(request_id, None)

    @contextlib.contextmanager
    def listen(self, request_ids: Sequence[str]) -> Iterator[asyncio.Queue[Partial]]:
        """A queue of the partials of these samples: those kept since `expect`, and those that arrive in the block."""
        queue: asyncio.Queue[Partial] = asyncio.Queue()
        for partial in (early for request_id in request_ids for early in self._early.pop(request_id, ())):
            queue.put_nowait(partial)
        self._queues |= dict.fromkeys(request_ids, queue)
        try:
            yield queue
        finally:
            for request_id in request_ids:
                self._queues.pop(request_id, None)

    def deliver(self, lines: Iterable[str]) -> None:
        """Deliver partials, sorted by their position, since wake-ups are unordered."""
        if not self._queues and not self._early:
            return
        partials = [partial for line in lines if (partial := _read(line))]
        for partial in sorted(partials, key=lambda partial: (partial.request_id, partial.index, partial.start)):
            if (queue := self._queues.get(partial.request_id)) is not None:
                queue.put_nowait(partial)
            elif (early := self._early.get(partial.request_id)) is not None:
                early.append(partial)
