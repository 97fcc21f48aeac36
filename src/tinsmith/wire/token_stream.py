"""Tokens of running samples, from the engine to the streams of the server.

They are sent with the wake-ups and may be lost. The stored result is authoritative: it supplies missing tokens, and a
contradiction is an error. Each partial has its position in the answer, so that gaps are detected. `Partials` belongs to
the server's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence

import orjson

from tinsmith.types import Partial

MARK = "+"
"""The first character of a line that is a partial; other lines are request_ids."""


def line_of(partial: Partial) -> str:
    fields = [partial.request_id, partial.index, partial.start, partial.tokens, partial.logprobs, partial.topk]
    return MARK + orjson.dumps(fields).decode()


def _read(line: str) -> Partial | None:
    try:
        request_id, index, start, tokens, logprobs, topk = orjson.loads(line.removeprefix(MARK))
        return Partial(request_id, index, start, tuple(tokens), tuple(logprobs), tuple(topk))
    except (ValueError, TypeError):
        return None  # truncated


class Partials:
    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[Partial]] = {}

    @contextlib.contextmanager
    def listen(self, request_ids: Sequence[str]) -> Iterator[asyncio.Queue[Partial]]:
        """A queue of the partials of these samples that arrive during the block."""
        queue: asyncio.Queue[Partial] = asyncio.Queue()
        self._queues |= dict.fromkeys(request_ids, queue)
        try:
            yield queue
        finally:
            for request_id in request_ids:
                self._queues.pop(request_id, None)

    def arrived(self, lines: Iterable[str]) -> None:
        """Deliver partials, sorted by their position, since wake-ups are unordered."""
        found = [partial for line in lines if self._queues and (partial := _read(line))]
        for partial in sorted(found, key=lambda one: (one.request_id, one.index, one.start)):
            queue = self._queues.get(partial.request_id)
            if queue is not None:
                queue.put_nowait(partial)
