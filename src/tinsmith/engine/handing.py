"""Handing out: what an engine does for dedicated samplers, as long as there are any, and nothing otherwise.

Once a second it looks whether there are samplers of its base model. With the first one it opens its outbox (`handover`)
and says in its row where that is; from then on every version in its memory is offered there, and written to the storage
as soon as its publish is settled rather than with the next snapshot. Called from the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from tinsmith.backends import Capture
from tinsmith.cluster.executors import Executors
from tinsmith.engine.transfer import Outbox

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Peering:
    """How this process is reached by others: `key` is what they all know, `directory` is for files on their way, and
    `announce` tells the others the address.
    """

    key: bytes
    host: str
    directory: Path
    announce: Callable[[str], None]


class Handing:
    def __init__(self, executors: Executors, base_model: str, peering: Peering) -> None:
        self._executors = executors
        self._base_model = base_model
        self._peering = peering
        self._outbox: Outbox | None = None
        self._tried = False
        self.is_wanted = False

    def look(self, in_memory: Iterable[str], capture: Callable[[str], Capture]) -> None:
        """Whether there are samplers; `in_memory` are the versions that the first one may ask for."""
        self.is_wanted = bool(self._executors.live(self._base_model))
        if not self.is_wanted or self._tried:
            return
        self._tried = True
        try:
            self._outbox = Outbox(self._peering.key, self._peering.host, self._peering.directory)
        except OSError as error:  # the storage is the other way
            log.error("versions cannot be handed over directly; peer_host is no address of this machine", error=error)
            return
        for version_id in in_memory:
            self._outbox.offer(version_id, capture(version_id))
        self._peering.announce(self._outbox.address)

    def offer(self, version_id: str, capture: Callable[[str], Capture]) -> None:
        """A version was published in memory."""
        if self._outbox is not None:
            self._outbox.offer(version_id, capture(version_id))

    def withdraw(self, version_id: str) -> None:
        """It left memory."""
        if self._outbox is not None:
            self._outbox.withdraw(version_id)

    def close(self) -> None:
        if self._outbox is not None:
            self._outbox.close()
