"""Sessions: open, heartbeat, finish, project, list."""

from __future__ import annotations

from starlette.routing import Route

from tinsmith.api.operation import Call, JsonObject, endpoint
from tinsmith.errors import UserError
from tinsmith.store.sessions import FINISH_TYPES, NewSession
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import show, text_values

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


ROUTES = [
    Route("/create_session", endpoint(create_session, JSON_TYPE, quick=True), methods=["POST"]),
    Route("/session_heartbeat", endpoint(session_heartbeat, JSON_TYPE, quick=True), methods=["POST"]),
    Route("/sessions", endpoint(list_sessions), methods=["GET"]),
    Route("/sessions/{session_id}", endpoint(get_session), methods=["GET"]),
    Route("/sessions/{session_id}/finish", endpoint(finish, JSON_TYPE), methods=["POST"]),
    Route("/sessions/{session_id}/project", endpoint(set_project, JSON_TYPE), methods=["PUT"]),
]
