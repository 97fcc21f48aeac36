"""Every route of the OpenAPI document, with data that fit their schemas and data that do not, by schemathesis.

Nothing answers 500 or takes long, every answer is one that the document declares, and every refusal says why. Most
of the ids are those of things that exist. `make fuzz` runs the same for longer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from http_harness import ALICE, BASE, BOB, Harness, close, make_harness, pass_bytes
from tinsmith.routes.openapi import document
from tinsmith.routes.requests import SHARED
from tinsmith.wire.bodies import PROTO_TYPE

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "8"))
AT_MOST_S = 5.0
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=EXAMPLES < 20,  # the short run is the same every time; the long one looks further
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


def strict(schema: object) -> object:
    """The document without fields that nobody reads: random ones would be most of what is generated."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return {name: strict(each) for name, each in schema.items()} | closed


def operations() -> dict[str, Any]:
    described = deepcopy(document())
    described["components"]["schemas"] |= {name: strict(SHARED[name]) for name in SHARED}  # type: ignore[index]
    for path in described["paths"].values():  # type: ignore[attr-defined]
        for operation in path.values():
            if "requestBody" in operation:
                operation["requestBody"] = strict(operation["requestBody"])
    loaded = schemathesis.openapi.from_dict(described)
    return {found.ok().label: found.ok() for found in loaded.get_all_operations()}


OPERATIONS = operations()
TAKE_NOTHING = ("healthz", "health", "openapi.json")


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    made = make_harness(tmp_path_factory.mktemp("fuzz"))
    yield made
    close(made)


@pytest.fixture
def things(harness: Harness) -> dict[str, str]:
    """Ids that exist, by the names of the fields that hold them."""
    session_id = harness.session()
    model_id = harness.model(session_id)
    sampler_id = harness.sampler(session_id)
    path = harness.saved(model_id)
    return {
        "session_id": session_id,
        "last_session_id": session_id,
        "model_id": model_id,
        "run_id": model_id,
        "sampling_session_id": sampler_id,
        "sampling_client_id": sampler_id,
        "request_id": f"{model_id}:0",
        "base_model": BASE,
        "kind": "weights",
        "name": "one",
        "tinker_path": path,
        "source_path": path,
        "model_path": path,
    }


def aimed(value: object, things: dict[str, str], draw: Callable) -> object:
    """The same with most ids replaced by ids that exist."""
    if isinstance(value, list):
        return [aimed(each, things, draw) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: things[name] if name in things and draw(st.integers(0, 4)) else aimed(each, things, draw)
        for name, each in value.items()
    }


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("label", [label for label in OPERATIONS if label.rpartition("/")[2] not in TAKE_NOTHING])
def test_no_data_break_a_route(harness: Harness, things: dict[str, str], label: str, mode: GenerationMode) -> None:
    key = BOB if label.startswith("DELETE /api/v1/auth") else ALICE

    @FUZZ
    @given(OPERATIONS[label].as_strategy(generation_mode=mode), st.data())
    def ask(case: schemathesis.Case, data: st.DataObject) -> None:
        case.path_parameters = aimed(case.path_parameters, things, data.draw)  # type: ignore[assignment]
        case.body = aimed(case.body, things, data.draw)
        sent = case.as_transport_kwargs(base_url="http://127.0.0.1")
        sent["headers"]["X-API-Key"] = key
        sent["content"] = sent.pop("data", None)
        sent.pop("cookies", None)
        started = time.monotonic()
        answer = harness.client.request(**sent, follow_redirects=False)
        assert time.monotonic() - started < AT_MOST_S
        case.validate_response(answer, checks=CHECKS)

    ask()


BODY = pass_bytes("m", 1)


@FUZZ
@given(st.integers(0, len(BODY) - 1), st.binary(max_size=4), st.sampled_from(["", "zstd", "identity", "gzip"]))
def test_no_pass_breaks_its_route(harness: Harness, at: int, change: bytes, encoding: str) -> None:
    headers = {"X-API-Key": ALICE, "Content-Type": PROTO_TYPE, "Content-Encoding": encoding}
    body = BODY[:at] + change + BODY[at + len(change) :]
    answer = harness.client.post("/api/v1/forward_backward", content=body, headers=headers)
    assert answer.status_code in (400, 404, 415)
    assert answer.json()["detail"]
