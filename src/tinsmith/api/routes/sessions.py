"""Sessions: open, heartbeat, finish, project, list.

Searching sessions: filters, pages by cursor, and what each session has stored.

Exporting a session's timeline: a signed link, and the trace behind it, made while it is downloaded.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tinsmith.api.operation import Call, JsonObject, endpoint
from tinsmith.api.routes.links import follow_link, sign_link
from tinsmith.auth import user_urn
from tinsmith.errors import UserError
from tinsmith.store.sessions import FINISH_TYPES, NewSession, Search, Session
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import Fields, iso, moment_of, show, text_values

MAX_TAGS = 100
MAX_PROJECT_ID = 128


def create_session(call: Call) -> JsonObject:
    fields = call.fields()
    new = NewSession(
        tags=fields.texts_or_empty("tags", max_items=MAX_TAGS),
        user_metadata=fields.metadata_or_none("user_metadata"),
        sdk_version=fields.text_or("sdk_version", None, max_length=64),
        project_id=fields.text_or("project_id", None, max_length=MAX_PROJECT_ID) or None,
        display_name=fields.text_or("display_name", None),
    )
    session = call.services.sessions.open(call.tenant_id, new)
    opened = {"session_id": session.session_id, "project_id": new.project_id}
    call.services.audit.record(call.tenant_id, "session_opened", opened)
    return {"type": "create_session", "session_id": session.session_id}


def session_heartbeat(call: Call) -> JsonObject:
    call.services.sessions.heartbeat(call.tenant_id, call.fields().text("session_id"))
    return {"type": "session_heartbeat"}


def finish(call: Call) -> JsonObject:
    session = call.services.sessions.get(call.tenant_id, call.path["session_id"])
    fields = call.fields()
    reason = fields.fields("reason")
    finish_type = reason.text("type")
    if finish_type not in FINISH_TYPES:
        raise UserError(f"reason.type is {show(finish_type)}; it must be one of {', '.join(FINISH_TYPES)}")
    detail = fields.text_or("detail", "")
    if call.services.sessions.finish(call.tenant_id, session.session_id, finish_type, detail):
        finished = {"session_id": session.session_id, "reason": finish_type}
        call.services.audit.record(call.tenant_id, "session_finished", finished)
    return {}


def set_project(call: Call) -> JsonObject:
    session = call.services.sessions.get(call.tenant_id, call.path["session_id"])
    project_id = call.fields().text("project_id")
    if not 0 < len(project_id) <= MAX_PROJECT_ID:
        raise UserError(f"project_id has {len(project_id)} characters; use 1 to {MAX_PROJECT_ID}")
    call.services.sessions.set_project(call.tenant_id, session.session_id, project_id)
    moved = {"session_id": session.session_id, "project_id": project_id}
    call.services.audit.record(call.tenant_id, "project_session_assigned", moved)
    return {}


def list_sessions(call: Call) -> JsonObject:
    check_scope(call)
    limit, offset = call.page(default_limit=20)
    found = call.services.sessions.list_ids(call.tenant_id, limit, offset, call.query.get("project_id"))
    return {"sessions": found}


def get_session(call: Call) -> JsonObject:
    check_scope(call)
    session = call.services.sessions.get(call.tenant_id, call.path["session_id"])
    return {
        "training_run_ids": [model.model_id for model in call.services.models.of_session(session.session_id)],
        "sampler_ids": call.services.sampling_sessions.of_session(session.session_id),
        "user_metadata": text_values(session.user_metadata),
        "display_name": session.display_name,
    }


def check_scope(call: Call) -> None:
    """A tenant is an organization of one: what it can access is what it owns, so both scopes mean the same."""
    scope = call.query.get("access_scope", "owned")
    if scope not in ("owned", "accessible"):
        raise UserError(f"the query's access_scope is {show(scope)}; it must be 'owned' or 'accessible'")


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


PURPOSE = "trace"


def trace_export(call: Call) -> JsonObject:
    """Ready at once: there is nothing to prepare. The wire's 'pending' and 'failed' are never answered."""
    session = call.services.sessions.get(call.tenant_id, call.path["session_id"])
    return {"status": "ready", "url": sign_link(call, PURPOSE, f"/sessions/{session.session_id}/trace").url}


async def trace(request: Request) -> Response:
    """No key: the link was made for a tenant that may see the session."""
    services = follow_link(request, PURPOSE)
    session_id = request.path_params["session_id"]
    headers = {"content-disposition": f'attachment; filename="{session_id}.pftrace"'}
    return StreamingResponse(services.traces.write(session_id), media_type=JSON_TYPE, headers=headers)


ROUTES = [
    Route("/create_session", endpoint(create_session, JSON_TYPE, quick=True), methods=["POST"]),
    Route("/session_heartbeat", endpoint(session_heartbeat, JSON_TYPE, quick=True), methods=["POST"]),
    Route("/sessions", endpoint(list_sessions), methods=["GET"]),
    Route("/sessions/{session_id}", endpoint(get_session), methods=["GET"]),
    Route("/sessions/{session_id}/finish", endpoint(finish, JSON_TYPE), methods=["POST"]),
    Route("/sessions/{session_id}/project", endpoint(set_project, JSON_TYPE), methods=["PUT"]),
    Route("/sessions/search", endpoint(search_sessions, JSON_TYPE), methods=["POST"]),
    Route("/sessions/{session_id}/trace_export", endpoint(trace_export), methods=["GET"]),
    Route("/sessions/{session_id}/trace", trace, methods=["GET"]),
]
