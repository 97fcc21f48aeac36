"""Server-sent events: their encoding, and a response that ends with its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tinsmith.wire.bodies import write_json_line

T = TypeVar("T")

EVENT_STREAM = "text/event-stream"
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
KEEP_ALIVE_S = 15.0
"""A stream without events sends a comment in this interval, so that proxies keep its connection."""
KEEP_ALIVE_COMMENT = b": still there\n\n"
DONE = b"data: [DONE]\n\n"
"""The end of OpenAI's streams."""


def encode_event(name: str | None, content: object) -> bytes:
    name_line = f"event: {name}\n".encode() if name else b""
    return name_line + b"data: " + write_json_line(content) + b"\n\n"


class EventStreamResponse(StreamingResponse):
    """A response of events. If the client disconnects, the source is closed."""

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        resources: AsyncExitStack | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`resources` is closed at the end, with the exception if one was raised."""
        super().__init__(source, media_type=EVENT_STREAM, headers={**HEADERS, **(headers or {})})
        self._source = source
        self._resources = resources or AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            async with self._resources, aclosing(self._source):
                await cancel_on_disconnect(receive, self.stream_response(send))


async def cancel_on_disconnect(receive: Receive, coroutine: Coroutine[object, object, T]) -> T:
    """Return the value of `coroutine`. If the client disconnects, cancel it and raise ClientDisconnect."""
    response_task = asyncio.create_task(coroutine)
    disconnect_task = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({response_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if not response_task.done():
            raise ClientDisconnect
        return response_task.result()
    finally:
        for task in (response_task, disconnect_task):
            task.cancel()
        await asyncio.wait({response_task, disconnect_task})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":  # the body was read earlier
        pass
