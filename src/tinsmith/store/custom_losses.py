"""Custom losses as clients sent them: immutable definitions, opaque bytes here (`wire` parses them).

A loss belongs to a session and is named `{session_id}:loss:{custom_loss_seq_id}`, so a repeated creation finds the
first one. It is kept after its session has ended, as long as a replay may refer to it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import sqlalchemy as sa
import zstandard

from tinsmith.db.database import Database, now
from tinsmith.db.schema import CUSTOM_LOSSES, FUTURES, MODELS, SESSIONS
from tinsmith.errors import NotFoundError
from tinsmith.store.models import LOADED

MAX_DEFINITION_BYTES = 1 << 20
MAX_LOSSES = 1024
"""Most losses of one session."""


@dataclass(frozen=True, slots=True)
class NewCustomLoss:
    loss_id: str
    session_id: str
    tenant_id: str
    name: str
    definition: bytes


_FIND = sa.select(CUSTOM_LOSSES.c.session_id, CUSTOM_LOSSES.c.definition).where(
    CUSTOM_LOSSES.c.loss_id == sa.bindparam("loss_id")
)


class CustomLosses:
    def __init__(self, db: Database) -> None:
        self._db = db

    def get(self, session_id: str, loss_id: str) -> bytes:
        """A session's own loss. Raises NotFoundError."""
        row = self._db.first(_FIND, {"loss_id": loss_id})
        if row is None or row.session_id != session_id:
            raise NotFoundError(
                f"loss_id {loss_id[:128]!r} is not a custom loss of session {session_id!r}; create it there first"
            )
        return zstandard.ZstdDecompressor().decompress(row.definition)

    def sweep(self, closed_before: float) -> int:
        """Delete the losses of sessions closed before `closed_before` without loaded models or pending requests."""
        loaded = sa.exists().where(MODELS.c.session_id == SESSIONS.c.session_id, MODELS.c.state.in_(LOADED))
        waiting = sa.exists().where(FUTURES.c.session_id == SESSIONS.c.session_id, FUTURES.c.state == "pending")
        over = sa.select(SESSIONS.c.session_id).where(SESSIONS.c.closed_at < closed_before, ~loaded, ~waiting)
        has_losses = sa.select(CUSTOM_LOSSES.c.session_id).distinct()
        session_ids = self._db.scalars(over.where(SESSIONS.c.session_id.in_(has_losses)).limit(100))
        if session_ids:
            self._db.execute(CUSTOM_LOSSES.delete().where(CUSTOM_LOSSES.c.session_id.in_(session_ids)))
        return len(session_ids)


def insertion(new: NewCustomLoss) -> sa.Executable:
    """A statement for the transaction that stores the creation."""
    packed = zstandard.ZstdCompressor(level=3).compress(new.definition)
    return CUSTOM_LOSSES.insert().values(**asdict(replace(new, definition=packed)), created_at=now())
