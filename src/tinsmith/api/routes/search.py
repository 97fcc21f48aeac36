"""Searching sessions: filters, pages by cursor, and what each session has stored."""

from __future__ import annotations

from starlette.routing import Route

from tinsmith.api.operation import Call, JsonObject, endpoint
from tinsmith.auth import user_urn
from tinsmith.errors import UserError
from tinsmith.store.sessions import FINISH_TYPES, Search, Session
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import Fields, show, text_values
from tinsmith.wire.times import iso, moment_of

MAX_PAGE = 200
MAX_OWNERS = 10
MAX_PROJECTS = 1000
FIELDS = frozenset(
    ("session_id", "project_ids", "user_metadata", "display_name", "owner", "statuses", "limit", "cursor")
)
STATUS_TYPES = ("active", "cancelled", "failed", "client_finished")
OWNER_TYPES = ("own", "accessible", "user")


def search_sessions(call: Call) -> JsonObject:
    fields = call.fields()
    fields.refuse_unknown(FIELDS)
    metadata = fields.text_metadata_or_none("user_metadata") or {}
    asked = _search_of(call, fields)
    if not _owner_asked_for(fields, call.tenant_id):
        return {"sessions": [], "next_cursor": None}

    def has_metadata(session: Session) -> bool:
        return metadata.items() <= (text_values(session.user_metadata) or {}).items()

    found, more = call.services.sessions.search(call.tenant_id, asked, has_metadata)
    stored = call.services.usage.stored_of_sessions([session.session_id for session in found])
    last = found[-1] if more else None
    return {
        "sessions": [_summary(session, *stored.get(session.session_id, (0, 0))) for session in found],
        "next_cursor": last and {"last_created_at": iso(last.created_at), "last_session_id": last.session_id},
    }


def _summary(session: Session, checkpoints_count: int, checkpoint_storage_bytes: int) -> JsonObject:
    return {
        "session_id": session.session_id,
        "created_at": iso(session.created_at),
        "owner": user_urn(session.tenant_id),
        "project_id": session.project_id or "",
        "status": _status(session),
        "checkpoints_count": checkpoints_count,
        "display_name": session.display_name,
        "user_metadata": text_values(session.user_metadata),
        "checkpoint_storage_bytes": checkpoint_storage_bytes,
    }


def _status(session: Session) -> JsonObject | None:
    """None for one that expired: it neither finished nor is it known to run."""
    if session.state == "active":
        return {"type": "active"}
    if session.state == "finished" and session.finish_type is not None:
        reason = {"type": session.finish_type}
        return {"type": "client_finished", "reason": reason, "detail": session.finish_detail}
    return None


def _search_of(call: Call, fields: Fields) -> Search:
    limit = fields.integer_or("limit", 50)
    if not 1 <= limit <= MAX_PAGE:
        raise UserError(f"limit is {limit}; it must lie between 1 and {MAX_PAGE}")
    display_name = fields.text_or("display_name", None)
    if display_name == "":
        raise UserError("display_name is empty; leave it out, or give at least one character")
    states, finish_types = _statuses(fields)
    projects = fields.texts_or_empty("project_ids", max_items=MAX_PROJECTS) if fields.has("project_ids") else None
    return Search(
        session_id=fields.text_or("session_id", None),
        display_name=display_name,
        project_ids=projects,
        states=states,
        finish_types=finish_types,
        limit=limit,
        after=_cursor(call, fields.fields_or("cursor", None)),
    )


def _cursor(call: Call, cursor: Fields | None) -> tuple[float, str] | None:
    """The wire cuts moments at the microsecond; the session itself, if it is still there, knows its own exactly."""
    if cursor is None:
        return None
    session_id = cursor.text("last_session_id")
    created_at = moment_of("cursor.last_created_at", cursor.text("last_created_at"))
    last = call.services.sessions.of_ids([session_id]).get(session_id)
    return (created_at if last is None or last.tenant_id != call.tenant_id else last.created_at), session_id


def _statuses(fields: Fields) -> tuple[list[str] | None, list[str]]:
    """States of sessions, and finish types, that the listed statuses stand for. No session is cancelled or failed
    by this server, so these two match none.
    """
    listed = fields.values.get("statuses")
    if listed is None:
        return None, []
    if not isinstance(listed, list) or not 0 < len(listed) <= len(STATUS_TYPES) * 4:
        raise UserError(f"statuses is {show(listed)}; it must be a list of at least one status")
    states: set[str] = set()
    finish_types: set[str] = set()
    for index, item in enumerate(listed):
        status = Fields({"status": item}, f"statuses[{index}].").fields("status")
        kind = _one_of(status, "type", STATUS_TYPES)
        if kind == "active":
            states.add("active")
        elif kind == "client_finished":
            finish_types.update(_reasons(status))
    return sorted(states), sorted(finish_types)


def _reasons(status: Fields) -> list[str]:
    if not status.has("reasons"):
        return list(FINISH_TYPES)
    reasons = status.texts_or_empty("reasons", max_items=16)
    if not reasons or not set(reasons) <= set(FINISH_TYPES):
        raise UserError(f"{status.path('reasons')} is {show(reasons)}; list some of {', '.join(FINISH_TYPES)}")
    return reasons


def _owner_asked_for(fields: Fields, tenant_id: str) -> bool:
    """Whether the caller is among the owners whose sessions are looked for: it can list nobody else's."""
    owner = fields.fields_or("owner", Fields({"type": "own"}))
    if _one_of(owner, "type", OWNER_TYPES) != "user":
        return True
    urns = owner.texts_or_empty("owner_urns", max_items=MAX_OWNERS)
    if not urns:
        raise UserError(f"owner.owner_urns is empty; list 1 to {MAX_OWNERS} owners")
    return user_urn(tenant_id) in urns


def _one_of(fields: Fields, name: str, allowed: tuple[str, ...]) -> str:
    value = fields.text(name)
    if value not in allowed:
        raise UserError(f"{fields.path(name)} is {show(value)}; it must be one of {', '.join(allowed)}")
    return value


ROUTES = [Route("/sessions/search", endpoint(search_sessions, JSON_TYPE), methods=["POST"])]
