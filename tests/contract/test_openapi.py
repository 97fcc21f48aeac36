"""The OpenAPI document is valid, complete and consistent with the SDK's types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pydantic
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from tinker import types
from tinker.types._pydantic_types.datum import Datum
from tinker.types._pydantic_types.sampling_params import SamplingParams
from tinker.types._pydantic_types.tensor_data import TensorData
from tinker.types.custom_loss_graph import CustomLossGraph, CustomLossNode
from tinker.types.custom_loss_input import CustomLossInput
from tinker.types.futures_retrieve_request import FuturesRetrieveRequest, SamplingSessionFuturesTarget
from tinker.types.join_sampling_session_request import JoinSamplingSessionRequest
from tinker.types.optimizer import AdamParams, DimuonOptimizerConfig
from tinker.types.session_search_cursor import SessionSearchCursor
from tinker.types.session_search_request import SessionSearchRequest
from tinker.types.session_status_query import ClientFinishedSessionStatusQuery

from support.http_harness import ALICE, Harness
from tinsmith.api.access import Access
from tinsmith.api.app import API, OPERATIONS
from tinsmith.api.declaration import BEARER_SCHEME, KEY_SCHEME, METRICS_SCHEME
from tinsmith.api.openapi import body_schema, document, statuses
from tinsmith.api.request import PREFIX
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import Schema, json_schemas
from tinsmith.wire.sampling import EncodedTextChunkBody

DOCUMENT = cast("dict[str, Any]", document(OPERATIONS))
REQUESTS: Mapping[str, Schema] = {operation.path: body_schema(operation) for operation in OPERATIONS if operation.takes}
SHARED: Mapping[str, Schema] = DOCUMENT["components"]["schemas"] | json_schemas(EncodedTextChunkBody)

# Bodies and routes of the SDK.
SENT: Mapping[str, type[pydantic.BaseModel]] = {
    "/asample": types.SampleRequest,
    "/create_model": types.CreateModelRequest,
    "/load_weights": types.LoadWeightsRequest,
    "/save_weights": types.SaveWeightsRequest,
    "/save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "/save_weights_external": types.SaveWeightsExternalRequest,
    "/optim_step": types.OptimStepRequest,
    "/get_info": types.GetInfoRequest,
    "/unload_model": types.UnloadModelRequest,
    "/create_session": types.CreateSessionRequest,
    "/session_heartbeat": types.SessionHeartbeatRequest,
    "/create_sampling_session": types.CreateSamplingSessionRequest,
    "/join_sampling_session": JoinSamplingSessionRequest,
    "/create_custom_loss": types.CreateCustomLossRequest,
    "/retrieve_future": types.FutureRetrieveRequest,
    "/retrieve_futures": FuturesRetrieveRequest,
    "/sessions/search": SessionSearchRequest,
    "/copy_weights": types.CopyWeightsRequest,
    "/telemetry": types.TelemetrySendRequest,
    "/client/config": types.ClientConfigRequest,
}
PARTS: Mapping[str, type[pydantic.BaseModel]] = {
    "Datum": Datum,
    "SamplingParams": SamplingParams,
    "TensorData": TensorData,
    "ModelInput": types.ModelInput,
    "EncodedTextChunk": types.EncodedTextChunk,
    "LoraConfig": types.LoraConfig,
    "AdamParams": AdamParams,
    "OptimizerConfig": DimuonOptimizerConfig,
    "CustomLossInput": CustomLossInput,
    "CustomLossGraph": CustomLossGraph,
}
# Fields of the SDK's types that this server refuses, or that the SDK sends in another place.
ABSENT = {
    "/optim_step": {"optim_params"},  # the SDK replaces it by two fields
    "/copy_weights": {"weights_access_token"},  # sent as a header
}
BEYOND = {"/optim_step": {"adam_params", "optimizer_params"}}
BEYOND |= {f"/save_weights{kind}": {"keep_last"} for kind in ("", "_for_sampler", "_external")}  # an extension
BEYOND["LoraConfig"] = {"alpha"}  # an extension


def properties_of(schema: Schema) -> dict[str, Any]:
    return cast(dict[str, Any], schema["properties"])


def list_required(schema: Schema) -> set[str]:
    return set(cast(list[str], schema["required"]))


def test_the_document_is_valid_and_needs_no_key(harness: Harness) -> None:
    for path in ("/openapi.json", "/api/v1/openapi.json"):
        answer = harness.client.get(path)
        assert answer.status_code == 200
        OpenAPIV31SpecValidator(answer.json()).validate()
    assert answer.json() == DOCUMENT


def test_it_names_the_routes_and_nothing_else() -> None:
    served = {
        f"{method} {route.path.removeprefix(PREFIX).replace(':path', '')}"
        for route in API
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {operation.name for operation in OPERATIONS} == served
    assert len(OPERATIONS) == len(served)


def test_every_operation_has_a_summary_and_declares_its_ids() -> None:
    """An operation that takes ids declares them, or has them in its path; one that is opened by a link needs no key."""
    handlers = {id(route.endpoint) for route in API}
    assert handlers == {id(operation.endpoint) for operation in OPERATIONS}, "a route without a declaration"
    for operation in OPERATIONS:
        assert operation.summary and operation.answer, operation.name
        assert isinstance(operation.access, Access), operation.name
        in_path = operation.access is Access.IDS and "{" in operation.path
        assert in_path or operation.example is not None or operation.access is not Access.IDS, operation.name
        assert operation.access is not Access.IDS or operation.schemes, operation.name
        if operation.access in (Access.IDS, Access.LINK):
            assert 404 in operation.errors, f"{operation.name}: what is not there is an error"
        assert bool(operation.takes) == (operation.body is not None)


def test_an_operation_with_a_typed_body_has_an_example_that_it_takes() -> None:
    for operation in OPERATIONS:
        if operation.takes == (JSON_TYPE,) and isinstance(operation.example, dict):
            schema = {"components": DOCUMENT["components"], **body_schema(operation)}
            values = cast("dict[str, Any]", operation.example)
            job_ids = {name: 1 for name, value in values.items() if value == "{job_id}"}
            Draft202012Validator(schema).validate(values | job_ids)


def test_a_path_that_takes_json_refuses_other_types_and_one_without_a_body_never_asks(harness: Harness) -> None:
    headers = {"X-API-Key": "tml-alice", "Content-Type": "text/plain"}
    for operation in OPERATIONS:
        if operation.access is Access.OPERATOR:
            continue  # refused before its body is looked at
        if operation.method in ("POST", "PUT") and operation.access.needs_key:
            answer = harness.client.request(operation.method, operation.url, content=b"{}", headers=headers)
            assert (answer.status_code == 415) == bool(operation.takes), operation.name


def test_a_path_asks_for_a_key_where_the_document_says_so(harness: Harness) -> None:
    for operation in OPERATIONS:
        answer = harness.client.request(operation.method, operation.url)
        assert (answer.status_code == 401) == bool(operation.schemes), operation.name
        assert 401 in statuses(operation) or not operation.schemes, operation.name


def test_a_path_takes_a_key_as_bearer_token_where_the_document_says_so(harness: Harness) -> None:
    accepted: set[bool] = set()
    for operation in OPERATIONS:
        if KEY_SCHEME in operation.schemes:
            headers = {"Authorization": f"Bearer {ALICE}"}
            answer = harness.client.request(operation.method, operation.url, headers=headers)
            assert (answer.status_code != 401) == (BEARER_SCHEME in operation.schemes), operation.name
            accepted.add(BEARER_SCHEME in operation.schemes)
    assert accepted == {True, False}
    schemes = {
        name
        for path in DOCUMENT["paths"].values()
        for described in path.values()
        for requirement in described.get("security", ())
        for name in requirement
    }
    assert schemes <= set(DOCUMENT["components"]["securitySchemes"])
    assert DOCUMENT["paths"]["/api/v1/metrics"]["get"]["security"] == [{METRICS_SCHEME: []}]


@pytest.mark.parametrize("path", SENT)
def test_a_request_has_the_fields_that_the_sdk_sends(path: str) -> None:
    kind = SENT[path]
    sent_fields = set(kind.model_fields) - {"type"}
    assert set(properties_of(REQUESTS[path])) == (sent_fields - ABSENT.get(path, set())) | BEYOND.get(path, set())
    always = {name for name, field in kind.model_fields.items() if field.is_required()}
    # Headers that the SDK always sends, or sends with each use of the path.
    assert list_required(REQUESTS[path]) <= always | {"sampling_session_id", "seq_id"}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_has_the_fields_that_the_sdk_sends(name: str) -> None:
    kind = PARTS[name]
    assert set(properties_of(SHARED[name])) == set(kind.model_fields) | BEYOND.get(name, set())
    assert list_required(SHARED[name]) <= {
        field_name for field_name, field in kind.model_fields.items() if field.is_required()
    } | {"type"}


def test_parts_that_are_written_in_place_have_the_sdk_s_fields_too() -> None:
    assert set(properties_of(SHARED["SamplingSessionTarget"])) == set(SamplingSessionFuturesTarget.model_fields)
    assert set(properties_of(SHARED["SearchCursor"])) == set(SessionSearchCursor.model_fields)
    assert set(properties_of(SHARED["StatusQuery"])) == set(ClientFinishedSessionStatusQuery.model_fields)
    assert set(properties_of(SHARED["CustomLossNode"])) | {"args", "kwargs"} == set(CustomLossNode.model_fields)
