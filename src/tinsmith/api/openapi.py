"""`GET /openapi.json`: the OpenAPI 3.1 document of this API, served without authentication.

The document is built from the declarations of the endpoints. This module also has the schema helpers for responses and
queries, and the responses and declarations that several endpoints share. tests/contract/test_openapi.py compares the
document with the SDK's types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from functools import cache, partial
from http import HTTPStatus
from importlib.metadata import version
from typing import cast

import orjson
from starlette.responses import Response

from tinsmith.api.access import Access
from tinsmith.api.declaration import BEARER_SCHEME, KEY_SCHEME, METRICS_SCHEME, Operation, operation
from tinsmith.api.request import ANTHROPIC, OPENAI, OPENAI_PATHS, Call
from tinsmith.wire.bodies import JSON_TYPE, PROTO_TYPE
from tinsmith.wire.fields import Schema, json_schemas

TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"type": "array", "items": TEXT}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
ANYTHING: Schema = {"type": "object"}
LIST: Schema = {"type": "array", "items": ANYTHING}


def one_of(*words: str | int) -> Schema:
    return {"enum": list(words)}


def integer(low: int, high: int = 2**31 - 1) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def fields(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    properties = dict(required) | {
        name: {"anyOf": [schema, {"type": "null"}]} for name, schema in (optional or {}).items()
    }
    return {"type": "object", "required": list(required), "properties": properties}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


COUNT = integer(0, 2**63 - 1)
TAR_TYPE, FILE_TYPE = "application/x-tar", "application/octet-stream"
PROTO_PASS = "a ForwardBackwardRequest (wire/tinker_public.proto), plain or as one zstd frame"
PROTO_RESULT = "a ForwardBackwardOutput or a SampleResponse (wire/tinker_public.proto)"

RESPONSE_SCHEMAS: Mapping[str, Schema] = {
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
            "base_model": TEXT,
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
        {"last_checkpoint": ref("Checkpoint"), "last_sampler_checkpoint": ref("Checkpoint"), "user_metadata": ANYTHING},
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

LINKED = (403, 404, 410)
GENERATION = (404, 429, 503)
"""The error statuses of an endpoint whose answer is generated."""

# Declarations of endpoints with something in common.
listing = partial(operation, "GET", access=Access.LISTING)
linked = partial(operation, errors=LINKED, access=Access.LINK)
for_openai = partial(operation, prefixes=OPENAI)
for_anthropic = partial(operation, prefixes=ANTHROPIC)


@operation(
    "GET",
    "/openapi.json",
    "Get the OpenAPI document",
    answer=ANYTHING,
    access=Access.PUBLIC,
    at_root=True,
)
async def openapi(call: Call) -> Response:
    return Response(_bytes(call.request.app.state.operations), media_type=JSON_TYPE)


@cache
def _bytes(operations: tuple[Operation, ...]) -> bytes:
    """Return the serialized document, cached because callers are not authenticated."""
    return orjson.dumps(document(operations))


@cache
def document(operations: tuple[Operation, ...]) -> Schema:
    paths: dict[str, dict[str, object]] = {}
    schemas: dict[str, Schema] = dict(RESPONSE_SCHEMAS)
    for op in operations:
        paths.setdefault(op.url, {})[op.method.lower()] = _describe_operation(op)
        schemas |= _inner_schemas(op)
    schemes = {
        KEY_SCHEME: {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        BEARER_SCHEME: {"type": "http", "scheme": "bearer", "description": "the same key"},
        METRICS_SCHEME: {"type": "http", "scheme": "bearer", "description": "the setting metrics_token"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tinsmith", "version": version("tinsmith"), "description": "see docs/wire.md"},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": schemes},
        "security": [{KEY_SCHEME: []}],
    }


def body_schema(operation: Operation) -> Schema:
    """Return the schema of a body. Its references point to the document's components."""
    if isinstance(operation.body, type):
        return json_schemas(operation.body)[operation.body.__name__.removesuffix("Body")]
    return operation.body or {}


def _inner_schemas(operation: Operation) -> dict[str, Schema]:
    """Return the schemas of the objects inside a body, by name."""
    if not isinstance(operation.body, type):
        return {}
    body_name = operation.body.__name__.removesuffix("Body")
    return {name: schema for name, schema in json_schemas(operation.body).items() if name != body_name}


def _describe_operation(operation: Operation) -> Schema:
    entry: Schema = {
        "operationId": re.sub(r"\W+", "_", operation.name.lower()).strip("_"),
        "summary": operation.summary,
        "parameters": _parameters(operation),
        "responses": {str(status): _describe_response(operation, status) for status in statuses(operation)},
    }
    if operation.takes:
        content = {
            takes: {"schema": {"description": PROTO_PASS} if takes == PROTO_TYPE else deepcopy(body_schema(operation))}
            for takes in operation.takes
        }
        entry["requestBody"] = {"required": True, "content": content}
    if operation.schemes != (KEY_SCHEME,):
        entry["security"] = [{name: []} for name in operation.schemes]
    return entry


def statuses(operation: Operation) -> list[int]:
    codes = {200, *operation.errors}
    if operation.access.needs_key:
        codes |= {400, 401}
    if operation.takes:
        codes |= {413, 415}
    return sorted(codes)


def _parameters(operation: Operation) -> list[Schema]:
    query_name = operation.query.__name__ if operation.query is not None else ""
    schema = json_schemas(operation.query)[query_name] if operation.query is not None else {}
    properties = cast("Mapping[str, Schema]", schema.get("properties", {}))
    required = cast("list[str]", schema.get("required", []))
    if operation.access is Access.LINK:
        properties, required = {"token": TEXT}, ["token"]
    in_path: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": TEXT}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    return in_path + [
        {"name": name, "in": "query", "schema": schema, **({"required": True} if name in required else {})}
        for name, schema in properties.items()
    ]


def _describe_response(operation: Operation, status: int) -> Schema:
    if status == HTTPStatus.REQUEST_TIMEOUT:
        return _content("Not ready; ask again", ref("TryAgain"))
    if status >= HTTPStatus.BAD_REQUEST:
        return _content(HTTPStatus(status).phrase, ref(_error_of(operation)))
    if status == HTTPStatus.FOUND:
        return {"description": "The location", "headers": {"location": {"schema": TEXT}}}
    if isinstance(operation.answer, str):
        return {"description": operation.summary, "content": {operation.answer: {}}}
    response = _content(operation.summary, operation.answer)
    if operation.path == "/retrieve_future":
        response["content"] = {JSON_TYPE: {"schema": operation.answer}, PROTO_TYPE: {}}
    return response


def _error_of(operation: Operation) -> str:
    if operation.path.startswith(ANTHROPIC[0]) or "/messages" in operation.path:
        return "AnthropicError"
    return "OpenAIError" if operation.path.startswith(OPENAI_PATHS) else "Error"


def _content(description: str, schema: Schema) -> Schema:
    return {"description": description, "content": {JSON_TYPE: {"schema": schema}}}
