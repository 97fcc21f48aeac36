"""A gate that many pass side by side, and that one may have alone, or close.

Whoever waits for it alone, or to close it, comes before those who come after. Lives on one event loop; leaving it never
waits, so that whoever is cancelled leaves it, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class Gate:
    def __init__(self) -> None:
        self._change = asyncio.Event()
        self._inside = 0
        self._closed = False

    @contextlib.asynccontextmanager
    async def beside_others(self) -> AsyncIterator[None]:
        await self._until(lambda: not self._closed)
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._tell()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        await self.close()
        try:
            yield
        finally:
            self.open()

    async def close(self) -> None:
        """Returns when nobody is inside."""
        await self._until(lambda: not self._closed)
        self._closed = True
        try:
            await self._until(lambda: not self._inside)
        except BaseException:
            self.open()
            raise

    def open(self) -> None:
        self._closed = False
        self._tell()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._change.wait()

    def _tell(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
