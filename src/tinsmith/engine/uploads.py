"""Files on their way to a bucket, while the engine goes on.

Where files are far away (`Directories.is_far`), to make them durable takes as long as the network does. What a save or
a load has to store is made on the engine's thread and sent by others; meanwhile the model's lane is held, so that
nothing of it is applied out of turn, and all other models train. The request is settled when its files are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass

from tinsmith.store.futures import Settlement
from tinsmith.types import Pending

THREADS = 4

POLL_S = 0.02
"""How often an engine that has nothing else to do looks whether something has arrived."""


@dataclass(frozen=True, slots=True)
class Sending:
    """`send` runs on any thread and returns the directory and its bytes; `settled` runs on the engine's."""

    send: Callable[[], tuple[str, int]]
    settled: Callable[[str, int], Settlement]


@dataclass(frozen=True, slots=True)
class Sent:
    request: Pending
    body: bytes
    sending: Sending
    placed: Future[tuple[str, int]]

    def settlement(self) -> Settlement:
        """Raises whatever went wrong."""
        return self.sending.settled(*self.placed.result())


class Sendings:
    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: list[Sent] = []

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, request: Pending, body: bytes, sending: Sending) -> None:
        self._pool = self._pool or ThreadPoolExecutor(THREADS, thread_name_prefix="sending")
        self._under_way.append(Sent(request, body, sending, self._pool.submit(sending.send)))

    def finished(self) -> Iterator[Sent]:
        """What has arrived, or failed to, since the last time."""
        for sent in [one for one in self._under_way if one.placed.done()]:
            self._under_way.remove(sent)
            yield sent

    def wait(self) -> None:
        """Until nothing is under way."""
        wait_for([sent.placed for sent in self._under_way])
