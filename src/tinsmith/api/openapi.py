"""`GET /openapi.json`: what this server speaks, as an OpenAPI 3.1 document, without a key.

Written by hand next to the routes: these are plain functions, and nothing could be derived from them.
tests/contract/test_openapi.py holds it to the route table and to the SDK's types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from importlib.metadata import version

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinsmith.api.openai.files import JSONL_TYPE
from tinsmith.api.operation import ANTHROPIC, HUB, MAX_PAGE, OPENAI, PREFIX
from tinsmith.api.requests import ANYTHING, FLAG, NUMBER, REQUESTS, SHARED, Schema, fields, integer, one_of, ref
from tinsmith.api.routes.batch import EVENT_STREAM
from tinsmith.api.routes.checkpoints import BARE_CHECKPOINT, CHECKPOINT, RUN
from tinsmith.api.routes.downloads import DOWNLOAD
from tinsmith.api.routes.uploads import FORM_TYPE
from tinsmith.store.audit import PREFIXES
from tinsmith.store.overview import SORTS
from tinsmith.telemetry.metrics import CONTENT_TYPE as METRICS_TYPE
from tinsmith.wire.bodies import JSON_TYPE, PROTO_TYPE

TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"type": "array", "items": TEXT}
LIST: Schema = {"type": "array", "items": ANYTHING}
COUNT = integer(0, 2**63 - 1)
FUTURE = ref("Future")
PROTO_PASS = "a ForwardBackwardRequest (wire/tinker_public.proto), plain or as one zstd frame"
PROTO_RESULT = "a ForwardBackwardOutput or a SampleResponse (wire/tinker_public.proto)"
TAR_TYPE, FILE_TYPE = "application/x-tar", "application/octet-stream"

ANSWERS: Mapping[str, Schema] = {
    "Error": fields({"detail": TEXT | {"minLength": 1}}),
    "OpenAIError": fields({"error": fields({"message": TEXT, "type": TEXT}, {"param": TEXT, "code": TEXT})}),
    "AnthropicError": fields({"type": one_of("error"), "error": fields({"type": TEXT, "message": TEXT})}),
    "Future": fields({"request_id": TEXT}, {"model_id": TEXT, "sample_sequence_ids": TEXTS}),
    "Failure": fields({"error": TEXT, "category": one_of("user", "server", "unknown")}),
    "TryAgain": fields(
        {"type": one_of("try_again"), "request_id": TEXT, "queue_state": TEXT}, {"queue_state_reason": TEXT}
    ),
    "Cursor": fields({"offset": COUNT, "limit": COUNT, "total_count": COUNT}),
    "Checkpoint": fields(
        {
            "checkpoint_id": TEXT,
            "checkpoint_type": one_of("training", "sampler", "external"),
            "time": TEXT,
            "tinker_path": TEXT,
            "size_bytes": COUNT,
            "public": FLAG,
        },
        {"user_metadata": ANYTHING, "expires_at": TEXT},
    ),
    "TrainingRun": fields(
        {
            "training_run_id": TEXT,
            "base_model": TEXT,
            "model_owner": TEXT,
            "is_lora": FLAG,
            "corrupted": FLAG,
            "lora_rank": COUNT,
            "last_request_time": TEXT,
        },
        {
            "last_checkpoint": ref("Checkpoint"),
            "last_sampler_checkpoint": ref("Checkpoint"),
            "user_metadata": ANYTHING,
        },
    ),
    "File": fields(
        {"id": TEXT, "bytes": COUNT, "created_at": COUNT, "filename": TEXT, "purpose": one_of("batch", "batch_output")},
        {"expires_at": COUNT},
    ),
    "Batch": fields(
        {"id": TEXT, "endpoint": TEXT, "input_file_id": TEXT, "status": TEXT, "request_counts": ANYTHING},
        {"output_file_id": TEXT, "error_file_id": TEXT, "errors": fields({"data": LIST}), "usage": ANYTHING},
    ),
}
CHECKPOINTS = {"type": "array", "items": ref("Checkpoint")}
SESSION_IDS = fields({"sessions": TEXTS})
ANSWER = fields({"id": TEXT, "object": TEXT, "model": TEXT, "choices": LIST, "usage": ANYTHING})
MESSAGE = fields({"id": TEXT, "type": TEXT, "model": TEXT, "content": LIST, "usage": ANYTHING})
ELSEWHERE = tuple(f"{prefix}/" for prefix in (*ANTHROPIC, HUB))
UPLOADED = fields({"tinker_path": TEXT, "base_model": TEXT, "lora_rank": COUNT, "size_bytes": COUNT})
REPOSITORY = fields({"id": TEXT, "sha": TEXT, "lastModified": TEXT, "siblings": LIST, "tags": TEXTS})
HEALTH = fields({"status": one_of("healthy", "failing"), "version": TEXT, "timestamp": TEXT}, {"reason": TEXT})
BY_PATH = fields(
    {"request_id": TEXT, "status": one_of("pending", "completed", "failed")},
    {"result": ANYTHING, "error": TEXT, "category": TEXT},
)

FILES = fields({"data": {"type": "array", "items": ref("File")}, "has_more": FLAG})
BATCHES = fields({"data": {"type": "array", "items": ref("Batch")}, "has_more": FLAG})
BATCHES_QUERY: Mapping[str, Schema] = {"limit": integer(1, 100), "after": TEXT}
FILES_QUERY: Mapping[str, Schema] = {
    "limit": integer(1, 10_000),
    "after": TEXT,
    "order": one_of("asc", "desc"),
    "purpose": one_of("batch", "batch_output"),
}
PAGE: Mapping[str, Schema] = {"limit": integer(0, MAX_PAGE), "offset": integer(0)}
SCOPE: Mapping[str, Schema] = {"access_scope": one_of("owned", "accessible")}
PROJECT: Mapping[str, Schema] = {"project_id": TEXT}
AFTER: Mapping[str, Schema] = {"after": integer(-1), "limit": integer(0, MAX_PAGE)}
HOUR: Schema = {"type": "string", "format": "date-time", "description": "a full hour"}
DAY: Schema = {"type": "string", "format": "date"}
LINK: Mapping[str, Schema] = {"expires": TEXT, "signature": TEXT}

# Beside those that follow from the form of a request.
SUBMITTED = (404, 410, 429, 501)
LINKED = (403, 404, 410)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `answers` is a schema, or the content type of bytes that are not JSON."""

    name: str  # "METHOD /path"
    summary: str
    answers: Schema | str
    errors: tuple[int, ...] = ()
    query: Mapping[str, Schema] | None = None
    keyed: bool = True

    @property
    def method(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def path(self) -> str:
        """Below PREFIX, or whole where other services' clients expect it."""
        return self.name.partition(" ")[2]

    @property
    def url(self) -> str:
        return self.path if self.path.startswith(ELSEWHERE) else PREFIX + self.path


OPERATIONS = (
    Operation(
        "GET /healthz",
        "Whether the server answers",
        fields({"status": one_of("ok", "failing")}, {"reason": TEXT}),
        (503,),
        keyed=False,
    ),
    Operation("GET /health", "The same with its version", HEALTH, (503,), keyed=False),
    Operation("GET /openapi.json", "This document", ANYTHING, keyed=False),
    Operation("GET /metrics", "Figures for Prometheus; the bearer is metrics_token", METRICS_TYPE),
    Operation("POST /client/config", "Flags of a client", ANYTHING),
    Operation("POST /client/dynamic_config", "Flags that a client fetches again", ANYTHING),
    Operation("GET /get_server_capabilities", "The served base models", fields({"supported_models": LIST})),
    Operation("POST /auth/token", "A token in exchange for the key", fields({"jwt": TEXT})),
    Operation("GET /auth/apikey/me", "Whose the key is", fields({"key_id": COUNT, "name": TEXT})),
    Operation("DELETE /auth/apikey/me", "Revoke the key", ANYTHING),
    Operation("POST /telemetry", "Accepted and dropped", fields({"status": one_of("accepted")})),
    # Sessions.
    Operation("POST /create_session", "Open a session", fields({"session_id": TEXT, "type": TEXT})),
    Operation("POST /session_heartbeat", "Keep a session open", fields({"type": TEXT}), (404, 410)),
    Operation("GET /sessions", "Sessions, newest first", SESSION_IDS, query={**PAGE, **SCOPE, **PROJECT}),
    Operation(
        "POST /sessions/search", "Find sessions", fields({"sessions": LIST}, {"next_cursor": ANYTHING}), (404, 501)
    ),
    Operation(
        "GET /sessions/{session_id}",
        "What a session holds",
        fields({"training_run_ids": TEXTS, "sampler_ids": TEXTS}),
        (404,),
        SCOPE,
    ),
    Operation("POST /sessions/{session_id}/finish", "End a session", ANYTHING, (404, 410)),
    Operation("PUT /sessions/{session_id}/project", "Count it for a project", ANYTHING, (404,)),
    Operation(
        "GET /sessions/{session_id}/trace_export",
        "A link to its timeline",
        fields({"status": TEXT, "url": TEXT}),
        (404,),
    ),
    Operation("GET /sessions/{session_id}/trace", "Its timeline", ANYTHING, LINKED, LINK, keyed=False),
    # Training.
    Operation("POST /create_model", "A new model", FUTURE, SUBMITTED),
    Operation("POST /load_weights", "A model from a checkpoint, or a checkpoint into a model", FUTURE, SUBMITTED),
    Operation("POST /get_info", "What a model is", fields({"model_id": TEXT, "model_data": ANYTHING}), (404,)),
    Operation("POST /unload_model", "End a model", FUTURE, SUBMITTED),
    Operation("POST /forward_backward", "One pass, with gradients or without", FUTURE, SUBMITTED),
    Operation("POST /forward", "One pass without gradients", FUTURE, SUBMITTED),
    Operation("POST /optim_step", "One step of the optimizer", FUTURE, SUBMITTED),
    Operation("POST /create_custom_loss", "Store a loss that a client traced", FUTURE, SUBMITTED),
    Operation("POST /save_weights", "Save a training checkpoint", FUTURE, SUBMITTED),
    Operation("POST /save_weights_for_sampler", "Save weights to sample from", FUTURE, SUBMITTED),
    Operation("POST /save_weights_external", "Export the adapter", FUTURE, SUBMITTED),
    # Sampling.
    Operation(
        "POST /create_sampling_session",
        "Sample from weights that stay as they are",
        fields({"sampling_session_id": TEXT}),
        (404, 410, 501),
    ),
    Operation(
        "POST /join_sampling_session", "One more client of it", fields({"client_counter": COUNT}), (404, 410, 501)
    ),
    Operation("GET /samplers/{sampling_session_id}", "What it samples from", fields({"base_model": TEXT}), (404,)),
    Operation("POST /asample", "Sample", FUTURE, SUBMITTED),
    # Results.
    Operation(
        "POST /retrieve_future",
        "A result, as JSON or as " + PROTO_RESULT + "; held until it is there",
        {"anyOf": [ref("Failure"), ANYTHING]},
        (404, 408, 410),
    ),
    Operation(
        "POST /retrieve_futures",
        "The settled samples of a sampling session",
        fields({"completions": LIST, "cursor": COUNT}),
        (404, 410),
    ),
    Operation("POST /cancel_future", "Stop a sample", ANYTHING, (404,)),
    # Runs and checkpoints.
    Operation(
        "GET /training_runs",
        "Training runs, newest first",
        fields({"training_runs": {"type": "array", "items": ref("TrainingRun")}, "cursor": ref("Cursor")}),
        query={**PAGE, **SCOPE, **PROJECT},
    ),
    Operation("GET " + RUN, "A training run", ref("TrainingRun"), (404,), SCOPE),
    Operation("GET " + RUN + "/checkpoints", "Its checkpoints", fields({"checkpoints": CHECKPOINTS}), (404,)),
    Operation(
        "GET /checkpoints",
        "Checkpoints, newest first",
        fields({"checkpoints": CHECKPOINTS, "cursor": ref("Cursor")}),
        query={**PAGE, **PROJECT},
    ),
    Operation("POST /weights_info", "What an adapter is", fields({"base_model": TEXT, "is_lora": FLAG}), (404, 410)),
    Operation("POST /copy_weights", "Copy a checkpoint", fields({"tinker_path": TEXT}), (404, 410, 429)),
    Operation("POST /upload_weights", "Store an adapter as a checkpoint", UPLOADED, (404, 429)),
    Operation("DELETE " + CHECKPOINT, "Delete a checkpoint", ANYTHING, (404, 410)),
    Operation("DELETE " + BARE_CHECKPOINT, "Refused: the id lacks its kind", ANYTHING, (404,)),
    Operation("GET " + BARE_CHECKPOINT + "/archive", "Refused: the id lacks its kind", ANYTHING, (404,)),
    Operation("POST " + CHECKPOINT + "/publish", "Let everyone read it", ANYTHING, (404, 410)),
    Operation("DELETE " + CHECKPOINT + "/publish", "Let nobody else read it", ANYTHING, (404, 410)),
    Operation("PUT " + CHECKPOINT + "/ttl", "When it expires", ANYTHING, (404, 410)),
    Operation(
        "GET " + CHECKPOINT + "/external_weights_urls",
        "Links to the files of an export",
        fields({"urls": {"type": "object", "additionalProperties": TEXT}, "expires": TEXT}),
        (404, 410),
    ),
    Operation("GET " + CHECKPOINT + "/archive", "302 to a tar of all files", ANYTHING, (302, 404, 410)),
    Operation("GET " + DOWNLOAD + "/files/{file}", "One file", FILE_TYPE, (206, 416, *LINKED), LINK, keyed=False),
    Operation("GET " + DOWNLOAD + "/archive", "All files", TAR_TYPE, LINKED, LINK, keyed=False),
    Operation(
        "GET " + CHECKPOINT + "/archive_link",
        "The same link, as JSON",
        fields({"url": TEXT, "expires": TEXT}),
        (404, 410),
    ),
    # Curves, and what the dashboard shows.
    Operation("POST /log_metrics", "Log a run's metrics", fields({"model_id": TEXT, "step": COUNT}), (404,)),
    Operation(
        "GET " + RUN + "/metrics",
        "A run's metrics, step by step",
        fields({"points": LIST, "cursor": NUMBER}),
        (404,),
        {"after": {"type": "number", "minimum": 0}},
    ),
    Operation(
        "GET /dashboard/overview", "How much there is", fields({"counts": ANYTHING, "engines": LIST, "seats": LIST})
    ),
    Operation(
        "GET /dashboard/runs",
        "Runs by search",
        fields({"runs": LIST, "cursor": ref("Cursor")}),
        query={**PAGE, "search": TEXT | {"maxLength": 200}, "sort": one_of(*SORTS), "order": one_of("asc", "desc")},
    ),
    Operation("GET /dashboard/runs/{run_id}", "One run", fields({"model_id": TEXT, "metrics": ANYTHING}), (404,)),
    Operation("GET /dashboard/queue", "What waits, and the last steps", fields({"waiting": LIST, "engines": LIST})),
    Operation("GET /dashboard/tenant", "Keys and quotas", fields({"tenant_id": TEXT, "keys": LIST, "quotas": LIST})),
    Operation(
        "GET /dashboard/samples",
        "Kept samples, newest first",
        fields({"samples": LIST, "cursor": ref("Cursor")}),
        query={**PAGE, "search": TEXT | {"maxLength": 200}},
    ),
    Operation(
        "GET /dashboard/samples/{request_id}",
        "A kept sample, token by token",
        fields({"request_id": TEXT, "prompt": ANYTHING, "sequences": LIST}),
        (404,),
    ),
    # Accounts.
    Operation(
        "GET /billing/usage/events",
        "What was used, hour by hour",
        fields({"data": LIST, "sessions": ANYTHING}),
        query={"starting_on": HOUR, "ending_before": HOUR},
    ),
    Operation("GET /billing/usage/checkpoints/current", "What is stored", fields({"data": LIST}), query=PROJECT),
    Operation(
        "GET /audit",
        "The audit log of one day",
        fields({"entries": LIST}),
        query={"day": DAY, "event_type": one_of(*PREFIXES)},
    ),
    # Bulk jobs.
    Operation("POST /batch/jobs", "Submit a bulk job", fields({"job_id": COUNT}), (403, 404)),
    Operation("GET /batch/jobs", "Bulk jobs, newest first", fields({"jobs": LIST, "total_count": COUNT}), query=PAGE),
    Operation("GET /batch/jobs/{job_id}", "One bulk job", ANYTHING, (404,)),
    Operation("GET /batch/jobs/{job_id}/batches", "Its batches", fields({"batches": LIST}), (404,), PAGE),
    Operation("POST /batch/jobs/{job_id}/cancel", "End it", ANYTHING, (404,)),
    Operation("POST /batch/jobs/{job_id}/purge", "Delete the parts of a job that failed", ANYTHING, (404,)),
    Operation("POST /batch/jobs/{job_id}/resume", "A job that does the rest", fields({"job_id": COUNT}), (403, 404)),
    Operation("GET /batch/jobs/{job_id}/errors", "Its failed rows", fields({"errors": LIST}), (404,), AFTER),
    Operation(
        "GET /batch/jobs/{job_id}/partial",
        "The parts that are committed",
        fields({"outputs": LIST, "batches": LIST}),
        (404,),
        AFTER,
    ),
    Operation(
        "GET /batch/jobs/{job_id}/logs",
        "What its workers printed",
        fields({"workers": LIST, "lines": LIST, "after": COUNT}),
        (404,),
        {"worker": TEXT, "after": integer(-1)},
    ),
    Operation("GET /batch/jobs/{job_id}/events", "Its status whenever it changes", EVENT_STREAM, (404,)),
    Operation("GET /batch/pools", "Where bulk jobs can run", fields({"pools": LIST})),
    Operation("PUT /batch/pools/{name}", "How many workers a pool has", fields({"pools": LIST}), (403, 404)),
    # The older dialect.
    Operation("GET /list_sessions", "As GET /sessions", SESSION_IDS, query={**PAGE, **SCOPE, **PROJECT}),
    Operation("POST /list_sessions", "As GET /sessions", SESSION_IDS, query={**PAGE, **SCOPE, **PROJECT}),
    Operation(
        "POST /delete_model", "Unload, and wait", fields({"model_id": TEXT, "status": TEXT}), (404, 410, 429, 501)
    ),
    Operation("GET /get_tokenizer", "Facts of a tokenizer", fields({"vocab_size": COUNT}), (404,), {"model_id": TEXT}),
    Operation("POST /create_sampling_client", "A sampling session", fields({"session_id": TEXT}), (404, 410, 501)),
    Operation(
        "POST /sample",
        "Sample for several prompts",
        fields({"request_id": TEXT, "request_ids": TEXTS, "sampling_client_id": TEXT}),
        SUBMITTED,
    ),
    Operation("GET /retrieve_future/{request_id}", "A result as JSON", BY_PATH, (404, 410)),
    Operation("POST /retrieve_future/{request_id}", "A result as JSON", BY_PATH, (404, 410)),
    Operation("POST /cleanup_futures", "Forget old results", fields({"futures_cleaned": NUMBER})),
    # Other services' clients.
    *(
        Operation(f"{method} {prefix}{path}", summary, answers, errors)
        for prefix in OPENAI
        for method, path, summary, answers, errors in (
            ("POST", "/chat/completions", "An answer to a chat, or its pieces", ANSWER, (404, 429, 503)),
            ("POST", "/completions", "A text continued, or its pieces", ANSWER, (404, 429, 503)),
            ("POST", "/embeddings", "Refused: there are none", ANYTHING, ()),
        )
    ),
    *(
        Operation(f"{method} {prefix}{path}", summary, answers, errors, query)
        for prefix in OPENAI
        for method, path, summary, answers, errors, query in (
            ("POST", "/files", "Upload a file", ref("File"), (429,), None),
            ("GET", "/files", "Files, newest first", FILES, (404,), FILES_QUERY),
            ("GET", "/files/{file_id}", "A file", ref("File"), (404,), None),
            ("DELETE", "/files/{file_id}", "Delete it", fields({"id": TEXT, "deleted": FLAG}), (404,), None),
            ("GET", "/files/{file_id}/content", "Its bytes", JSONL_TYPE, (206, 404, 416), None),
            ("POST", "/batches", "Have the requests of a file answered", ref("Batch"), (404,), None),
            ("GET", "/batches", "Batches, newest first", BATCHES, (404,), BATCHES_QUERY),
            ("GET", "/batches/{batch_id}", "A batch", ref("Batch"), (404,), None),
            ("POST", "/batches/{batch_id}/cancel", "End it", ref("Batch"), (404,), None),
        )
    ),
    *(
        Operation(f"GET {HUB}{path}", summary, answers, (403, 404))
        for path, summary, answers in (
            ("/api/whoami-v2", "Whose the token is", fields({"name": TEXT})),
            ("/api/models/{repo}", "A repository", REPOSITORY),
            ("/api/models/{repo}/revision/{revision}", "A repository", REPOSITORY),
            ("/api/models/{repo}/tree/{revision}", "Its files", LIST),
            ("/api/models/{repo}/tree/{revision}/{directory}", "Files of a directory", LIST),
            ("/{repo}/resolve/{revision}/{file}", "A file, whole or by Range", FILE_TYPE),
        )
    ),
    *(
        Operation(f"{method} {prefix}{path}", summary, answers, errors)
        for prefix in ANTHROPIC
        for method, path, summary, answers, errors in (
            ("POST", "/messages", "An answer to a chat, or its pieces", MESSAGE, (404, 429, 503)),
            ("POST", "/messages/count_tokens", "Its prompt's tokens", fields({"input_tokens": COUNT}), (404,)),
            ("GET", "/models", "What can be sampled", fields({"data": LIST}), ()),
            ("GET", "/models/{model}", "Whether it can", fields({"id": TEXT}), (404, 410)),
        )
    ),
)


@cache
def document() -> Schema:
    paths: dict[str, dict[str, object]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.url, {})[operation.method.lower()] = _described(operation)
    key = {"type": "apiKey", "in": "header", "name": "X-API-Key"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tinsmith", "version": version("tinsmith"), "description": "docs/wire.md says more"},
        "paths": paths,
        "components": {"schemas": {**SHARED, **ANSWERS}, "securitySchemes": {"key": key}},
        "security": [{"key": []}],
    }


def _described(operation: Operation) -> Schema:
    described: Schema = {
        "operationId": re.sub(r"\W+", "_", operation.name.lower()).strip("_"),
        "summary": operation.summary,
        "parameters": _parameters(operation),
        "responses": {str(status): _answered(operation, status) for status in statuses(operation)},
    }
    if takes_body(operation):
        described["requestBody"] = {"required": True, "content": _contents(operation.path)}
    if not operation.keyed:
        described["security"] = []
    return described


def takes_body(operation: Operation) -> bool:
    return operation.method in ("POST", "PUT") and operation.path in REQUESTS


def statuses(operation: Operation) -> list[int]:
    of_form = {200, *operation.errors}
    if operation.keyed:
        of_form |= {400, 401}
    if takes_body(operation):
        of_form |= {413, 415}
    return sorted(of_form)


def _parameters(operation: Operation) -> list[Schema]:
    in_path: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": TEXT}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    return in_path + [
        {"name": name, "in": "query", "schema": schema} for name, schema in (operation.query or {}).items()
    ]


def _contents(path: str) -> Schema:
    if path.endswith(("/files", "/upload_weights")):
        return {FORM_TYPE: {"schema": REQUESTS[path]}}
    contents: Schema = {JSON_TYPE: {"schema": REQUESTS[path]}}
    if path in ("/forward_backward", "/forward"):
        contents[PROTO_TYPE] = {"schema": {"description": PROTO_PASS}}
    return contents


def _answered(operation: Operation, status: int) -> Schema:
    if status == HTTPStatus.REQUEST_TIMEOUT:
        return _content("Not yet: ask again", ref("TryAgain"))
    if status >= HTTPStatus.BAD_REQUEST:
        return _content(HTTPStatus(status).phrase, ref(_error_of(operation)))
    if status == HTTPStatus.FOUND:
        return {"description": "Where it is", "headers": {"location": {"schema": TEXT}}}
    if isinstance(operation.answers, str):
        return {"description": operation.summary, "content": {operation.answers: {}}}
    described = _content(operation.summary, operation.answers)
    if operation.path == "/retrieve_future":
        described["content"] = {JSON_TYPE: {"schema": operation.answers}, PROTO_TYPE: {}}
    return described


def _error_of(operation: Operation) -> str:
    if operation.path.startswith(ANTHROPIC[0]) or "/messages" in operation.path:
        return "AnthropicError"
    return "OpenAIError" if operation.path.startswith(OPENAI) else "Error"


def _content(description: str, schema: Schema) -> Schema:
    return {"description": description, "content": {JSON_TYPE: {"schema": schema}}}


async def openapi(_request: Request) -> Response:
    return Response(_bytes(), media_type=JSON_TYPE)


@cache
def _bytes() -> bytes:
    """Made once: nobody needs a key to ask for it."""
    return orjson.dumps(document())


ROUTES = [Route("/openapi.json", openapi, methods=["GET"])]
ROOT_ROUTES = ROUTES  # where tools look for it, without the prefix
