"""Moments: seconds since the epoch here, RFC 3339 with a zone on the wire."""

from __future__ import annotations

from datetime import UTC, datetime

from tinsmith.errors import UserError
from tinsmith.wire.fields import show


def iso(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).isoformat().replace("+00:00", "Z")


def moment_of(name: str, text: str) -> float:
    """Seconds since the epoch of a moment with a zone. Raises UserError that names the field."""
    try:
        found = datetime.fromisoformat(text)
        if found.tzinfo is not None:
            return found.timestamp()
    except (ValueError, OverflowError):
        pass
    raise UserError(f"{name} is {show(text)}; it must be a moment with a zone, like 2026-07-13T00:00:00Z")
