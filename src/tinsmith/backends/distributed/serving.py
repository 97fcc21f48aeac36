"""How a rank carries out commands, and what it answers: a result, or what went wrong, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import structlog

from tinsmith.backends.distributed.processes import Link, decode, encode
from tinsmith.backends.distributed.rank import COMMANDS, Rank
from tinsmith.errors import EngineFailedError, RanksLostError, TinsmithError

log = structlog.get_logger()

COMPARED = frozenset({"optim_step", "digest"})
"""Commands after which all ranks must have come to the same: a norm that differs in its last bit tells of adapters that
differ.
"""

SILENT = frozenset({"run_micro_batch"})
"""Commands whose results every rank has, and rank 0 needs from none: they are large."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`kind` is 'done' or the name of the error. `digest` is of what all ranks must have come to."""

    kind: str
    value: object = None
    error: Exception | None = None
    digest: str = ""

    @property
    def told(self) -> str:
        return self.kind if self.error is None else f"{self.kind}: {self.error}"

    def message(self) -> bytes:
        known = self.error if self.error is None or isinstance(self.error, TinsmithError) else str(self.error)
        return encode([self.kind, self.value, known, self.digest])

    @classmethod
    def read(cls, message: bytes) -> Outcome:
        kind, value, error, digest = cast("tuple[str, object, TinsmithError | str | None, str]", decode(message))
        if isinstance(error, str):
            return cls(kind, value, MemoryError(error) if kind == "MemoryError" else EngineFailedError(error), digest)
        return cls(kind, value, error, digest)


def carry_out(rank: Rank, name: str, args: Sequence[object]) -> Outcome:
    """Raises RanksLostError if the other ranks are gone."""
    assert name in COMMANDS
    try:
        value = getattr(rank, name)(*args)
    except RanksLostError:
        raise
    except Exception as error:  # noqa: BLE001  rank 0 raises it, or says who differs
        return Outcome(type(error).__name__, error=error)
    return Outcome("done", value, digest=repr(value) if name in COMPARED else "")


def serve(rank: Rank, link: Link) -> None:
    """Carry out commands until the stream ends (EOFError)."""
    while True:
        name, args = cast("tuple[str, list[object]]", decode(link.receive()))
        outcome = carry_out(rank, name, args)
        if not isinstance(outcome.error, TinsmithError | MemoryError | None):
            log.error("a rank failed", command=name, exc_info=outcome.error)
        if name in SILENT and outcome.error is None:
            outcome = Outcome("done")
        link.send(outcome.message())
