"""The audit log of one day."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta

from starlette.routing import Route

from tinsmith.api.operation import Call, JsonObject, endpoint
from tinsmith.errors import UserError
from tinsmith.store.audit import PREFIXES, Entry
from tinsmith.wire.fields import show
from tinsmith.wire.times import iso

# What older clients read beside the details, for checkpoints only.
CHECKPOINT_FIELDS = ("model_id", "tinker_path", "purpose")


def get_audit(call: Call) -> JsonObject:
    event_type = call.query.get("event_type", "all")
    if event_type not in PREFIXES:
        raise UserError(f"the query's event_type is {show(event_type)}; it must be one of {', '.join(PREFIXES)}")
    day = datetime.combine(_day(call.query.get("day")), datetime.min.time(), UTC)
    start, end = day.timestamp(), (day + timedelta(days=1)).timestamp()
    found = call.services.audit.entries(call.tenant_id, event_type, start, end)
    return {"entries": [_entry(entry) for entry in found]}


def _day(text: str | None) -> date:
    if text is None:
        return datetime.now(UTC).date()
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) and text < "9999-12-31":
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise UserError(f"the query's day is {show(text)}; it must be a day like 2026-07-13")


def _entry(entry: Entry) -> JsonObject:
    written: JsonObject = {"timestamp": iso(entry.created_at), "event": entry.event, "event_details": entry.details}
    if entry.event.startswith("checkpoint_"):
        written |= {name: entry.details[name] for name in CHECKPOINT_FIELDS if name in entry.details}
    return written


ROUTES = [Route("/audit", endpoint(get_audit), methods=["GET"])]
