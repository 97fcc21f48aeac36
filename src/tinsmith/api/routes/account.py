"""The caller's account: its key, usage by the hour, stored checkpoints, and the audit log of a day.

The wire's cost fields are absent.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, date, datetime, timedelta
from typing import Annotated

from pydantic import Field

from tinsmith.api.access import Access
from tinsmith.api.declaration import ThreadPool, operation
from tinsmith.api.openapi import ANYTHING, COUNT, LIST, TEXT, fields, listing
from tinsmith.api.queries import ProjectQuery
from tinsmith.api.request import Call, JsonObject
from tinsmith.auth import Caller, user_email, user_urn
from tinsmith.errors import UserError
from tinsmith.store.audit import PREFIXES, AuditEntry
from tinsmith.store.sessions import Session
from tinsmith.store.usage import HOUR_S, StorageRow, UsageRow
from tinsmith.wire.fields import OneOf, Query, Text, iso, parse_time, show, text_values

MAX_WINDOW_S = 14 * 24 * HOUR_S
GIGABYTE = 10**9
Hour = Annotated[
    Text,
    Field(description="a full hour, like 2026-07-13T00:00:00Z", json_schema_extra={"format": "date-time"}),
]


@operation(
    "GET", "/auth/apikey/me", "Identify the key", answer=fields({"key_id": COUNT, "name": TEXT}), access=Access.NOTHING
)
def apikey_me(call: Call) -> JsonObject:
    caller = _caller(call)
    details = {"org_details": {"name": caller.tenant_id}, "user_details": {"email": user_email(caller.tenant_id)}}
    return {"key_id": caller.key_id, "name": caller.name or caller.tenant_id, "note": caller.name, "details": details}


@operation("DELETE", "/auth/apikey/me", "Revoke the key", answer=ANYTHING, access=Access.NOTHING)
def delete_apikey_me(call: Call) -> JsonObject:
    call.services.tenants.revoke(_caller(call))
    return {}


@operation(
    "POST",
    "/auth/token",
    "Exchange the key for a token",
    body=ANYTHING,
    answer=fields({"jwt": TEXT}),
    access=Access.NOTHING,
    threads=ThreadPool.QUICK,
)
def auth_token(call: Call) -> JsonObject:
    return {"jwt": call.services.tenants.issue_token(_caller(call))}


def _caller(call: Call) -> Caller:
    return call.services.tenants.authenticate(call.headers.get("x-api-key"))


class UsageQuery(Query):
    starting_on: Hour
    ending_before: Hour

    def window(self) -> tuple[float, float]:
        """Return start and end. Raises UserError."""
        start, end = (_read_hour(name, getattr(self, name)) for name in ("starting_on", "ending_before"))
        if start > time.time():
            raise UserError("starting_on is in the future; use a past hour")
        if not 0 < end - start <= MAX_WINDOW_S:
            raise UserError("ending_before must be after starting_on, by at most 14 days")
        return start, end


def _read_hour(name: str, text: str) -> float:
    hour = parse_time(name, text)
    if hour % HOUR_S:
        raise UserError(f"{name} is {show(text)}; it must be a full hour")
    return hour


@listing(
    "/billing/usage/events",
    "List usage by the hour",
    answer=fields({"data": LIST, "sessions": ANYTHING}),
    query=UsageQuery,
)
def usage_events(call: Call, query: UsageQuery) -> JsonObject:
    start, end = query.window()
    rows = call.services.usage.rows(call.tenant_id, start, end)
    sessions = call.services.sessions.of_ids(sorted({row.session_id for row in rows}))
    events = [_event(call, row, sessions.get(row.session_id)) for row in rows]
    events += [_storage_event(call, row) for row in call.services.usage.storage_rows(call.tenant_id, start, end)]
    return {
        "data": sorted(events, key=lambda event: str(event["bucket_start"])),  # stable: tokens stay first
        "sessions": {
            session_id: {"user_metadata": text_values(session.user_metadata)}
            for session_id, session in sessions.items()
        },
    }


def _event(call: Call, row: UsageRow, session: Session | None) -> JsonObject:
    """`session` is None for a copy into a project, whose run has no session."""
    event_info: JsonObject
    if row.type == "checkpoint":
        event_info = {"type": "checkpoint", "count": row.quantity}
    elif row.type == "sampling_cached":
        event_info = {"type": "sampling_prefill", "cached": True, "token_count": row.quantity}
    elif row.type == "sampling_prefill":
        event_info = {"type": "sampling_prefill", "cached": False, "token_count": row.quantity}
    else:
        event_info = {"type": row.type, "token_count": row.quantity}
    session_fields = {} if session is None else {"session_id": session.session_id, "project_id": session.project_id}
    owner_fields = {"base_model": row.base_model} | _user(call) | session_fields
    return _bucket(row.bucket_start) | owner_fields | {"event_info": event_info}


def _storage_event(call: Call, row: StorageRow) -> JsonObject:
    event_info = {"type": "storage", "free": False, "gigabyte_hours": row.byte_seconds / HOUR_S / GIGABYTE}
    owner_fields = _user(call) | {"project_id": row.project_id}
    return _bucket(row.bucket_start) | {"base_model": row.base_model} | owner_fields | {"event_info": event_info}


def _user(call: Call) -> JsonObject:
    return {"user_id": user_urn(call.tenant_id), "user_name": call.tenant_id}


def _bucket(start: float) -> JsonObject:
    return {"bucket_start": iso(start), "bucket_end": iso(start + HOUR_S)}


@listing(
    "/billing/usage/checkpoints/current", "List stored checkpoints", answer=fields({"data": LIST}), query=ProjectQuery
)
def list_stored_checkpoints(call: Call, query: ProjectQuery) -> JsonObject:
    totals: dict[str | None, tuple[int, int]] = {}
    for stored in call.services.usage.list_stored(call.tenant_id, query.project_id):
        count, size_bytes = totals.get(stored.project_id, (0, 0))
        totals[stored.project_id] = (count + 1, size_bytes + stored.size_bytes)
    return {
        "data": [
            {
                "project_id": project_id,
                "org_user_urn": user_urn(call.tenant_id),
                "user_email": user_email(call.tenant_id),
                "user_name": call.tenant_id,
                "checkpoint_count": count,
                "size_bytes": size_bytes,
                "size_gigabytes": size_bytes / GIGABYTE,
            }
            for project_id, (count, size_bytes) in sorted(totals.items(), key=lambda item: item[0] or "")
        ]
    }


# Repeated outside the details for older clients, for checkpoints only.
CHECKPOINT_FIELDS = ("model_id", "tinker_path", "purpose")


class AuditQuery(Query):
    """The default is all events of today."""

    day: Annotated[Text, Field(json_schema_extra={"format": "date"})] | None = None
    event_type: Annotated[str, OneOf(tuple(PREFIXES))] = "all"


@listing(
    "/audit",
    "Read the audit log of a day",
    answer=fields({"entries": LIST}),
    query=AuditQuery,
)
def get_audit(call: Call, query: AuditQuery) -> JsonObject:
    day = datetime.combine(_day(query.day), datetime.min.time(), UTC)
    start, end = day.timestamp(), (day + timedelta(days=1)).timestamp()
    entries = call.services.audit.entries(call.tenant_id, query.event_type, start, end)
    return {"entries": [_entry(entry) for entry in entries]}


def _day(text: str | None) -> date:
    if text is None:
        return datetime.now(UTC).date()
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) and text < "9999-12-31":
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise UserError(f"day is {show(text)}; it must be a day like 2026-07-13")


def _entry(entry: AuditEntry) -> JsonObject:
    body: JsonObject = {"timestamp": iso(entry.created_at), "event": entry.event, "event_details": entry.details}
    if entry.event.startswith("checkpoint_"):
        body |= {name: entry.details[name] for name in CHECKPOINT_FIELDS if name in entry.details}
    return body
