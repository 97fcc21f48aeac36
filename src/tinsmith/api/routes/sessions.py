"""Sessions: open, heartbeat, finish, project, list, search by filters, and the timeline behind a signed link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from starlette.responses import Response, StreamingResponse

from tinsmith.api.access import Access
from tinsmith.api.declaration import ThreadPool, operation
from tinsmith.api.links import sign_link
from tinsmith.api.openapi import (
    ANYTHING,
    LIST,
    TEXT,
    TEXTS,
    fields,
    linked,
    listing,
)
from tinsmith.api.queries import RunsQuery, ScopeQuery
from tinsmith.api.request import Call, Draft, JsonObject
from tinsmith.auth import user_urn
from tinsmith.errors import UserError
from tinsmith.store.sessions import FINISH_TYPES, NewSession, Session, SessionSearch
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import (
    MAX_TEXT,
    NO_NUL,
    Body,
    ClosedBody,
    Metadata,
    OneOf,
    Text,
    TextMetadata,
    iso,
    parse_time,
    text_values,
)

MAX_TAGS = 100
MAX_PROJECT_ID = 128
SESSION_IDS = fields({"sessions": TEXTS})
ProjectId = Annotated[str, Field(max_length=MAX_PROJECT_ID, pattern=NO_NUL)]
FinishType = Annotated[str, OneOf(FINISH_TYPES)]


class CreateSessionRequest(Body):
    tags: Annotated[list[Text], Field(max_length=MAX_TAGS, fail_fast=True)] = Field(default_factory=list)
    user_metadata: Metadata | None = None
    sdk_version: Annotated[str, Field(max_length=64, pattern=NO_NUL)] | None = None
    project_id: ProjectId | None = None
    display_name: Text | None = None


@operation(
    "POST",
    "/create_session",
    "Open a session",
    body=CreateSessionRequest,
    answer=fields({"session_id": TEXT, "type": TEXT}),
    access=Access.NOTHING,
    threads=ThreadPool.QUICK,
)
def create_session(call: Call, request: CreateSessionRequest) -> JsonObject:
    new = replace(NewSession(**request.model_dump()), project_id=request.project_id or None)
    session = call.services.sessions.open(call.tenant_id, new)
    return {"type": "create_session", "session_id": session.session_id}


class SessionHeartbeatRequest(Body):
    session_id: Text


@operation(
    "POST",
    "/session_heartbeat",
    "Keep a session open",
    body=SessionHeartbeatRequest,
    answer=fields({"type": TEXT}),
    errors=(404, 410),
    threads=ThreadPool.QUICK,
)
def session_heartbeat(call: Call, request: SessionHeartbeatRequest) -> JsonObject:
    call.services.sessions.heartbeat(call.tenant_id, request.session_id)
    return {"type": "session_heartbeat"}


class FinishReasonBody(Body):
    type: FinishType


class FinishRequest(Body):
    reason: FinishReasonBody
    detail: Text = ""


@operation(
    "POST",
    "/sessions/{session_id}/finish",
    "Report how a client ended",
    body=FinishRequest,
    answer=ANYTHING,
    errors=(404, 410),
    example={"reason": {"type": "success"}},
    late=True,
)
def finish(call: Call, draft: Draft[FinishRequest]) -> JsonObject:
    session = call.services.sessions.get(call.tenant_id, call.path["session_id"])
    request = draft.read()
    call.services.sessions.finish(call.tenant_id, session.session_id, request.reason.type, request.detail)
    return {}


class SetProjectRequest(Body):
    project_id: Annotated[ProjectId, Field(min_length=1)]


@operation(
    "PUT",
    "/sessions/{session_id}/project",
    "Assign a session to a project",
    body=SetProjectRequest,
    answer=ANYTHING,
    example={"project_id": "p"},
    late=True,
)
def set_project(call: Call, draft: Draft[SetProjectRequest]) -> JsonObject:
    session = call.services.sessions.get(call.tenant_id, call.path["session_id"])
    project_id = draft.read().project_id
    call.services.sessions.set_project(call.tenant_id, session.session_id, project_id)
    return {}


@listing("/sessions", "List sessions, newest first", answer=SESSION_IDS, query=RunsQuery)
def list_sessions(call: Call, query: RunsQuery) -> JsonObject:
    session_ids = call.services.sessions.list_ids(call.tenant_id, query.limit, query.offset, query.project_id)
    return {"sessions": session_ids}


@operation(
    "GET",
    "/sessions/{session_id}",
    "Read a session",
    answer=fields({"training_run_ids": TEXTS, "sampler_ids": TEXTS}),
    query=ScopeQuery,
)
def get_session(call: Call, _query: ScopeQuery) -> JsonObject:
    session = call.services.sessions.get(call.tenant_id, call.path["session_id"])
    return {
        "training_run_ids": [model.model_id for model in call.services.models.of_session(session.session_id)],
        "sampler_ids": call.services.sampling_sessions.of_session(session.session_id),
        "user_metadata": text_values(session.user_metadata),
        "display_name": session.display_name,
        "sampling": "running" if session.sampling_paused_at is None else "paused",
    }


MAX_PAGE = 200
MAX_OWNERS = 10
MAX_PROJECTS = 1000
STATUS_TYPES = ("active", "cancelled", "failed", "client_finished")
OWNER_TYPES = ("own", "accessible", "user")


class SearchOwnerBody(Body):
    type: Annotated[str, OneOf(OWNER_TYPES)] = "own"
    owner_urns: Annotated[list[Text], Field(max_length=MAX_OWNERS, fail_fast=True)] = Field(default_factory=list)


class StatusQueryBody(Body):
    """`reasons` applies to client_finished; the default is all reasons."""

    type: Annotated[str, OneOf(STATUS_TYPES)]
    reasons: Annotated[list[FinishType], Field(min_length=1, max_length=16, fail_fast=True)] | None = None


class SearchCursorBody(Body):
    last_created_at: Annotated[Text, Field(json_schema_extra={"format": "date-time"})]
    last_session_id: Text


class SearchSessionsRequest(ClosedBody):
    session_id: Text | None = None
    project_ids: Annotated[list[Text], Field(max_length=MAX_PROJECTS, fail_fast=True)] | None = None
    user_metadata: TextMetadata | None = None
    display_name: Annotated[str, Field(min_length=1, max_length=MAX_TEXT, pattern=NO_NUL)] | None = None
    owner: SearchOwnerBody = SearchOwnerBody()
    statuses: Annotated[list[StatusQueryBody], Field(min_length=1, max_length=16, fail_fast=True)] | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = 50
    cursor: SearchCursorBody | None = None


@operation(
    "POST",
    "/sessions/search",
    "Search sessions",
    body=SearchSessionsRequest,
    answer=fields({"sessions": LIST}, {"next_cursor": ANYTHING}),
    errors=(404, 501),
    access=Access.LISTING,
    filters=(
        {"session_id": "{session_id}"},
        {"cursor": {"last_created_at": "2100-01-01T00:00:00Z", "last_session_id": "{session_id}"}},
    ),
)
def search_sessions(call: Call, request: SearchSessionsRequest) -> JsonObject:
    metadata = request.user_metadata or {}
    filters = _search_of(call, request)
    if not includes_caller(request.owner, call.tenant_id):
        return {"sessions": [], "next_cursor": None}

    def has_metadata(session: Session) -> bool:
        return metadata.items() <= (text_values(session.user_metadata) or {}).items()

    sessions, has_more = call.services.sessions.search(call.tenant_id, filters, has_metadata)
    storage_by_session = call.services.usage.sum_stored_by_session([session.session_id for session in sessions])
    last = sessions[-1] if has_more else None
    return {
        "sessions": [_summary(session, *storage_by_session.get(session.session_id, (0, 0))) for session in sessions],
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
    """Return the status; None for an expired session, which is neither active nor finished."""
    if session.state == "active":
        return {"type": "active"}
    if session.state == "finished" and session.finish_type is not None:
        reason = {"type": session.finish_type}
        return {"type": "client_finished", "reason": reason, "detail": session.finish_detail}
    return None


def _search_of(call: Call, request: SearchSessionsRequest) -> SessionSearch:
    states, finish_types = _statuses(request.statuses)
    return SessionSearch(
        session_id=request.session_id,
        display_name=request.display_name,
        project_ids=request.project_ids,
        states=states,
        finish_types=finish_types,
        limit=request.limit,
        after=_cursor(call, request.cursor),
    )


def _cursor(call: Call, cursor: SearchCursorBody | None) -> tuple[float, str] | None:
    """Return the position after the last session of a page. The exact time comes from the session's row, if it still
    exists, because the wire has only microseconds.
    """
    if cursor is None:
        return None
    session_id = cursor.last_session_id
    created_at = parse_time("cursor.last_created_at", cursor.last_created_at)
    last = call.services.sessions.of_ids([session_id]).get(session_id)
    return (created_at if last is None or last.tenant_id != call.tenant_id else last.created_at), session_id


def _statuses(statuses: Sequence[StatusQueryBody] | None) -> tuple[list[str] | None, list[str]]:
    """Return the states and finish types of statuses. `cancelled` and `failed` match no session of this server."""
    if statuses is None:
        return None, []
    states = {"active" for status in statuses if status.type == "active"}
    finish_types: set[str] = set()
    for status in statuses:
        if status.type == "client_finished":
            finish_types.update(status.reasons or FINISH_TYPES)
    return sorted(states), sorted(finish_types)


def includes_caller(owner: SearchOwnerBody, tenant_id: str) -> bool:
    """Whether the requested owners include the caller, who can list only its own sessions."""
    if owner.type != "user":
        return True
    if not owner.owner_urns:
        raise UserError(f"owner.owner_urns is empty; list 1 to {MAX_OWNERS} owners")
    return user_urn(tenant_id) in owner.owner_urns


PURPOSE = "trace"


@operation(
    "GET",
    "/sessions/{session_id}/trace_export",
    "Get a link to a session's timeline",
    answer=fields({"status": TEXT, "url": TEXT}),
)
def trace_export(call: Call) -> JsonObject:
    """Return a link that is ready at once. The wire's 'pending' and 'failed' never occur."""
    session = call.services.sessions.get(call.tenant_id, call.path["session_id"])
    return {"status": "ready", "url": sign_link(call, PURPOSE, f"/sessions/{session.session_id}/trace").url}


@linked("GET", "/sessions/{session_id}/trace", "Download a session's timeline", answer=ANYTHING, purpose=PURPOSE)
async def trace(call: Call) -> Response:
    """Send the timeline. The link was issued to the session's tenant, so no key is needed."""
    session_id = call.path["session_id"]
    headers = {"content-disposition": f'attachment; filename="{session_id}.pftrace"'}
    return StreamingResponse(call.services.traces.write(session_id), media_type=JSON_TYPE, headers=headers)
