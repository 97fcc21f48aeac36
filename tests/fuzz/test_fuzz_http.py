"""Every route of the OpenAPI document, with data that fit their schemas and data that do not, by schemathesis.

No answer is a 500 or slow, the document declares every answer, and every refusal has a reason. Most ids are of existing
objects. `make test-fuzz` runs the same for longer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import cycle
from typing import Any
from urllib.parse import quote

import pytest
import schemathesis
from httpx import Response
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from support.batch_files import REQUEST_LINE
from support.http_harness import ALICE, BASE, BOB, Harness, close, make_harness, pass_bytes
from support.properties import examples
from tinsmith.api.app import OPERATIONS as DECLARED
from tinsmith.api.openapi import RESPONSE_SCHEMAS, body_schema, document
from tinsmith.api.request import PREFIX
from tinsmith.wire.bodies import PROTO_TYPE

AT_MOST_S = 5.0
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
FUZZ = settings(examples(6), phases=(Phase.generate,), suppress_health_check=list(HealthCheck))


def strict(schema: object) -> object:
    """The document without undeclared fields, which would otherwise be most of the generated data."""
    if isinstance(schema, list):
        return [strict(element) for element in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return {name: strict(element) for name, element in schema.items()} | closed


def operations() -> dict[str, Any]:
    described = deepcopy(document(DECLARED))
    shared: dict[str, object] = described["components"]["schemas"]  # type: ignore[index, assignment]
    shared |= {name: strict(shared[name]) for name in shared if name not in RESPONSE_SCHEMAS}
    for path in described["paths"].values():  # type: ignore[attr-defined]
        for operation in path.values():
            if "requestBody" in operation:
                operation["requestBody"] = strict(operation["requestBody"])
    loaded = schemathesis.openapi.from_dict(described)
    return {parsed.ok().label: parsed.ok() for parsed in loaded.get_all_operations()}


OPERATIONS = operations()
TAKE_NOTHING = ("healthz", "health", "openapi.json")


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path_factory.mktemp("fuzz"), operator_tenants=("alice",))
    yield new_harness
    close(new_harness)


@pytest.fixture
def existing_ids(harness: Harness) -> dict[str, str]:
    """Ids of existing objects, by the names of their fields."""
    session_id = harness.session()
    model_id = harness.model(session_id)
    sampler_id = harness.sampler(session_id)
    path = harness.save_checkpoint(model_id)
    pending = harness.ok("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    return {
        "session_id": session_id,
        "last_session_id": session_id,
        "model_id": model_id,
        "run_id": model_id,
        "sampling_session_id": sampler_id,
        "sampling_client_id": sampler_id,
        "request_id": pending["request_id"],
        "base_model": BASE,
        "kind": "weights",
        "name": "one",
        **upload_batch_file(harness),
        "tinker_path": path,
        "source_path": path,
        "model_path": path,
    }


def upload_batch_file(harness: Harness) -> dict[str, str]:
    headers, file = {"X-API-Key": ALICE}, {"file": ("in.jsonl", REQUEST_LINE)}
    file_id = harness.client.post("/v1/files", headers=headers, files=file, data={"purpose": "batch"}).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = harness.client.post("/v1/batches", headers=headers, json=body).json()["id"]
    return {"file_id": file_id, "input_file_id": file_id, "batch_id": batch_id, "after": file_id}


def parts_of(name: str, value: object) -> tuple[str, tuple[str | None, bytes]]:
    """Return a part of a form for a generated value."""
    filename, content = value[:2] if isinstance(value, tuple) else (None, value)
    return name, (filename, content if isinstance(content, bytes) else str(content).encode(errors="replace"))


def replace_ids(value: object, existing_ids: dict[str, str], draw: Callable) -> object:
    """The value with most ids replaced by existing ones."""
    if isinstance(value, list):
        return [replace_ids(element, existing_ids, draw) for element in value]
    if not isinstance(value, dict):
        return value
    return {
        name: existing_ids[name]
        if name in existing_ids and draw(st.integers(0, 4))
        else replace_ids(element, existing_ids, draw)
        for name, element in value.items()
    }


@pytest.mark.smoke
def test_every_operation_of_the_document_is_tried() -> None:
    paths = document(DECLARED)["paths"]
    assert set(OPERATIONS) == {f"{method.upper()} {path}" for path in paths for method in paths[path]}  # type: ignore[union-attr, index]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("label", [label for label in OPERATIONS if label.rpartition("/")[2] not in TAKE_NOTHING])
def test_no_data_break_a_route(
    harness: Harness, existing_ids: dict[str, str], label: str, mode: GenerationMode
) -> None:
    key = BOB if label.startswith("DELETE /api/v1/auth") else ALICE

    @FUZZ
    @given(OPERATIONS[label].as_strategy(generation_mode=mode), st.data())
    def ask(case: schemathesis.Case, data: st.DataObject) -> None:
        case.path_parameters = replace_ids(case.path_parameters, existing_ids, data.draw)  # type: ignore[assignment]
        case.body = replace_ids(case.body, existing_ids, data.draw)
        arguments = case.as_transport_kwargs(base_url="http://127.0.0.1")
        arguments["headers"]["X-API-Key"] = key
        arguments["content"] = arguments.pop("data", None)
        arguments.pop("cookies", None)
        if "files" in arguments:
            arguments["files"] = [parts_of(*part) for part in arguments["files"]]
        started = time.monotonic()
        answer = harness.client.request(**arguments, follow_redirects=False)
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


def ids_of(label: str) -> list[str]:
    """The fields of a body that hold ids or sequence numbers."""
    declared = next(operation for operation in DECLARED if f"{operation.method} {operation.url}" == label)
    schema = body_schema(declared).get("properties", {})
    assert isinstance(schema, dict)
    return [name for name in schema if name.endswith(("_id", "_path", "base_model"))]


NASTY = [
    "../../etc/passwd",
    "%2e%2e%2f%2e%2e",
    "a/b",
    "a:b",
    "a\x00b",
    "%00",
    "%25%30%30",
    "\ud7ff\u202e\U0001f600",
    "e\u0301",
    "x" * 5000,
    "' OR 1=1 --",
    "{}",
    "\r\nX-API-Key: tml-bob",
    "tinker://a/weights/b",
    " ",
    "-1",
]
BY_PATH = [label for label in OPERATIONS if "{" in label]
WITH_IDS = [label for label in OPERATIONS if ids_of(label)]
FORM = f"POST {PREFIX}/upload_weights"


def words_of(answer: Response) -> str:
    """Return the message of a refusal in any client's format."""
    body = answer.json()
    return body["error"]["message"] if "error" in body else body["detail"]


@pytest.mark.parametrize("label", BY_PATH)
def test_no_id_in_a_path_is_more_than_an_id(harness: Harness, existing_ids: dict[str, str], label: str) -> None:
    method, _, path = label.partition(" ")
    names = re.findall(r"{(\w+)}", path)
    for name, value in zip(cycle(names), NASTY, strict=False):
        filled = {field: quote(value if field == name else existing_ids.get(field, "x"), safe="") for field in names}
        url = "http://127.0.0.1" + path.format(**filled)
        answer = harness.client.request(method, url, headers={"X-API-Key": ALICE}, json={"project_id": "p"})
        # 405 if an id contains a slash, which makes another path. 403 is for signed links.
        assert answer.status_code in (400, 403, 404, 405), (url, answer.text)
        assert words_of(answer)


@pytest.mark.parametrize("label", WITH_IDS)
def test_no_id_in_a_body_is_more_than_an_id(harness: Harness, existing_ids: dict[str, str], label: str) -> None:
    method, _, path = label.partition(" ")
    ids = [name for name in ids_of(label) if name in existing_ids]
    seq_ids = {name: 1 for name in ids_of(label) if name.endswith("seq_id")}
    for name, value in zip(cycle(ids), NASTY, strict=False):
        body = {**seq_ids, **{field: existing_ids[field] for field in ids}, name: value}
        form = (
            {"files": {field: (None, str(text)) for field, text in body.items()}} if label == FORM else {"json": body}
        )
        answer = harness.client.request(method, path.format(**existing_ids), headers={"X-API-Key": ALICE}, **form)
        assert answer.status_code in (200, 400, 404), (body, answer.text)
        assert answer.status_code == 200 or words_of(answer)
