"""Sessions: open, heartbeat, finish, list."""

from __future__ import annotations

from starlette.routing import Route

from tinsmith.errors import NotSupportedError
from tinsmith.routes.call import Call, JsonObject, endpoint
from tinsmith.sessions import NewSession
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import Fields, text_values

MAX_TAGS = 100


def create_session(call: Call) -> JsonObject:
    fields = call.fields()
    new = NewSession(
        tags=fields.texts_or_empty("tags", max_items=MAX_TAGS),
        user_metadata=fields.metadata_or_none("user_metadata"),
        sdk_version=fields.text_or("sdk_version", None, max_length=64),
        project_id=fields.text_or("project_id", None, max_length=128),
        display_name=fields.text_or("display_name", None),
    )
    session = call.services.sessions.open(call.tenant_id, new)
    return {"type": "create_session", "session_id": session.session_id}


def session_heartbeat(call: Call) -> JsonObject:
    call.services.sessions.heartbeat(call.tenant_id, call.fields().text("session_id"))
    return {"type": "session_heartbeat"}


def finish(call: Call) -> JsonObject:
    fields = call.fields()
    reason = fields.fields_or("reason", Fields({})).text_or("type", "no reason given", max_length=64)
    detail = fields.text_or("detail", "")
    call.services.sessions.finish(call.tenant_id, call.path["session_id"], f"{reason}: {detail}" if detail else reason)
    return {}


def set_project(call: Call) -> JsonObject:
    project_id = call.fields().text_or("project_id", "", max_length=128)
    call.services.sessions.set_project(call.tenant_id, call.path["session_id"], project_id)
    return {}


def list_sessions(call: Call) -> JsonObject:
    refuse_project_filter(call)
    limit, offset = call.page(default_limit=20)
    return {"sessions": call.services.sessions.list_ids(call.tenant_id, limit, offset)}


def get_session(call: Call) -> JsonObject:
    session = call.services.sessions.get(call.tenant_id, call.path["session_id"])
    return {
        "training_run_ids": [model.model_id for model in call.services.models.of_session(session.session_id)],
        "sampler_ids": call.services.sampling_sessions.of_session(session.session_id),
        "user_metadata": text_values(session.user_metadata),
        "display_name": session.display_name,
    }


def refuse_project_filter(call: Call) -> None:
    """A filter that is not applied would give a wrong answer, so it is refused."""
    if "project_id" in call.query:
        raise NotSupportedError("filtering by project_id is not supported yet; leave the parameter out")


ROUTES = [
    Route("/create_session", endpoint(create_session, JSON_TYPE), methods=["POST"]),
    Route("/session_heartbeat", endpoint(session_heartbeat, JSON_TYPE), methods=["POST"]),
    Route("/sessions", endpoint(list_sessions), methods=["GET"]),
    Route("/sessions/{session_id}", endpoint(get_session), methods=["GET"]),
    Route("/sessions/{session_id}/finish", endpoint(finish, JSON_TYPE), methods=["POST"]),
    Route("/sessions/{session_id}/project", endpoint(set_project, JSON_TYPE), methods=["PUT"]),
]
