"""Objects of one tenant do not exist for another, on every route that takes an id and through the real SDK.

The cases are those of the declarations (`access`, `example` and `filters`), so that every route has one.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
from httpx import Response

from support.every_route import (
    BODIES,
    FILTERS,
    LISTING_QUERIES,
    UNPREFIXED_PATHS,
    RouteObjects,
    ask,
    create_objects,
    fill_ids,
    url_of,
)
from support.http_harness import ALICE, BASE, BOB, Harness, close, make_harness
from tinsmith.api.access import Access
from tinsmith.api.app import OPERATIONS
from tinsmith.api.declaration import Operation
from tinsmith.api.openapi import body_schema
from tinsmith.api.request import PREFIX
from tinsmith.cluster.engines import Engines, Seat
from tinsmith.cluster.executors import Executors
from tinsmith.wire.fields import json_schemas

LISTINGS = [(operation.method, operation.path) for operation in OPERATIONS if operation.access is Access.LISTING]
OPERATOR = [
    operation for operation in OPERATIONS if operation.access is Access.OPERATOR and "sampler" in operation.path
]
NO_IDS = {"telemetry session_id", "batches custom_id", "models after_id", "models before_id"}
"""Fields that are named like ids, but are not ids of objects, or are compared only with the caller's own list."""


def id_routes() -> list[tuple[str, str]]:
    """(method, path below the prefix) of every route that takes ids and a key."""
    return [
        (operation.method, operation.route.removeprefix(PREFIX))
        for operation in OPERATIONS
        if operation.access is Access.IDS
    ]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path, batch_tenants=("alice", "bob"), operator_tenants=("alice",))
    yield new_harness
    close(new_harness)


def test_every_route_that_takes_ids_has_them_somewhere() -> None:
    """The ids are in its path, or in the example of its declaration."""
    for operation in OPERATIONS:
        ids = operation.access is Access.IDS
        assert not ids or "{" in operation.path or re.search(r"{\w+}", str(operation.example)), operation.name


def names_in(schema: object) -> set[str]:
    """Names of the fields of a body, at any depth."""
    if isinstance(schema, list):
        return set().union(*map(names_in, schema))
    if not isinstance(schema, dict):
        return set()
    properties = schema.get("properties")
    names = set(properties) if isinstance(properties, dict) else set()
    return names.union(*map(names_in, schema.values()))


def test_no_operation_of_the_document_takes_an_id_that_is_not_tried() -> None:
    """Every route without a case below has no id in path, query or body."""
    filtered = {path for path, _ in FILTERS}
    for operation in OPERATIONS:
        if operation.access in (Access.IDS, Access.LINK) or operation.path in filtered:
            continue
        schemas = json_schemas(operation.body) if isinstance(operation.body, type) else body_schema(operation)
        names = set().union(*map(names_in, schemas.values())) | names_in(schemas)
        names |= set(operation.query.model_fields) if operation.query else set()
        ids = {name for name in names if name.endswith(("_id", "_ids", "_path", "after"))}
        ids -= {"project_id", "project_ids", "destination_project_id"}  # the tenant's own words
        assert {f"{operation.path.rpartition('/')[2]} {name}" for name in ids} <= NO_IDS, f"{operation.name} takes ids"


@pytest.mark.matrix(6)
@pytest.mark.parametrize("index", range(len(FILTERS)), ids=lambda index: FILTERS[index][0])
def test_a_filter_finds_nothing_of_another_tenant(harness: Harness, index: int) -> None:
    """The response is the same as for an object that does not exist."""
    path, filter_ = FILTERS[index]
    theirs = create_objects(harness)
    answers = []
    for ids in (theirs, make_missing_ids(theirs)):
        request = fill_ids(filter_, ids)
        url, headers = url_of(path), {"X-API-Key": BOB}
        if isinstance(request, dict):
            answer = harness.client.post(url, json=request, headers=headers)
        else:
            answer = harness.client.get(url + str(request), headers=headers)
        assert answer.status_code in (200, 404), answer.text
        answers.append((answer.status_code, without_ids(answer.text, ids)))
    assert answers[0] == answers[1]
    assert theirs.session_id not in answers[0][1] and "alice" not in answers[0][1]


@pytest.mark.matrix(40)
@pytest.mark.parametrize(("method", "path"), id_routes())
def test_an_id_of_another_tenant_is_404_and_ones_own_is_not(harness: Harness, method: str, path: str) -> None:
    ids = create_objects(harness)
    before = harness.get(f"sessions/{ids.session_id}").json(), len(harness.pending())
    refused = ask(harness, method, path, ids, BOB)
    assert refused.status_code == 404, refused.text
    assert "alice" not in refused.text
    assert (harness.get(f"sessions/{ids.session_id}").json(), len(harness.pending())) == before
    answer = ask(harness, method, path, ids, ALICE)
    assert answer.status_code != 404 and (answer.status_code < 500 or answer.status_code in (501, 503)), answer.text


@pytest.mark.matrix(12)
@pytest.mark.parametrize(("method", "path"), LISTINGS)
def test_a_listing_shows_nothing_of_another_tenant(harness: Harness, method: str, path: str) -> None:
    ids = create_objects(harness)
    body = {} if method == "POST" else None
    url = url_of(path) + LISTING_QUERIES.get(path, "")
    answer = harness.client.request(method, url, json=body, headers={"X-API-Key": BOB})
    assert answer.status_code == 200 or not path.startswith(UNPREFIXED_PATHS)
    assert not [name for name in (ids.session_id, ids.file_id, ids.batch_id, "alice") if name in answer.text]


@pytest.mark.parametrize("operation", OPERATOR, ids=lambda operation: operation.name)
def test_operators_change_samplers_and_no_other_tenant_learns_of_one(harness: Harness, operation: Operation) -> None:
    engines, seat = Engines(harness.services.models._db, "here"), Seat(BASE, "sampler")
    name = engines.take(seat, 60).engine_id
    Executors(harness.services.models._db).report(name, {"cannot_sleep": ""})
    engines.set_state(seat, "draining" if operation.path.endswith("wake") else "ready")

    def answer(sampler: str, key: str) -> Response:
        url = PREFIX + operation.path.replace("{sampler}", sampler)
        return harness.client.request(operation.method, url, headers={"X-API-Key": key})  # type: ignore[return-value]

    before = harness.services.dedicated_samplers.all()
    refused = [answer(sampler, BOB) for sampler in (name, "sampler-0-unknown")]
    assert [response.status_code for response in refused] == [403, 403] and refused[0].text == refused[1].text
    assert "TINSMITH_OPERATOR_TENANTS" in refused[0].text and name not in refused[0].text
    assert harness.services.dedicated_samplers.all() == before
    allowed = answer(name, ALICE)
    assert allowed.status_code == 200 and name in allowed.text
    if operation.method == "POST":
        assert (allowed.json()["state"] != before[0]["state"]) and answer(name, ALICE).status_code == 400
    if "{" in operation.path:
        assert answer("sampler-0-unknown", ALICE).status_code == 404


def test_a_pool_shows_only_the_callers_jobs(harness: Harness) -> None:
    run = SimpleNamespace(job=SimpleNamespace(job_id=4711, tenant_id="alice", pool="local"))
    harness.services.coordinator._runs[4711] = run  # type: ignore[assignment]
    for key, jobs in ((ALICE, [4711]), (BOB, [])):
        (pool,) = harness.get("batch/pools", key).json()["pools"]
        assert pool["jobs"] == jobs
        assert harness.send("PUT", "batch/pools/local", {"workers": 2}, key).json()["pools"] == [pool]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("create_model", {"model_seq_id": 7, "base_model": BASE}),
        ("load_weights", {"model_seq_id": 7, "path": "{weights}", "optimizer": False}),
        ("create_sampling_session", {"sampling_session_seq_id": 7, "model_path": "{weights}"}),
        ("weights_info", {"tinker_path": "{weights}"}),
        ("copy_weights", {"source_path": "{weights}", "model_seq_id": 7}),
    ],
)
def test_a_foreign_checkpoint_loads_only_when_published(harness: Harness, path: str, body: dict[str, object]) -> None:
    ids = create_objects(harness)
    request_fields = {name: ids.weights if value == "{weights}" else value for name, value in body.items()}
    request_fields |= {} if path == "weights_info" else {"session_id": harness.session(BOB)}

    def answer() -> str:
        response = harness.post(path, request_fields, BOB)
        if response.status_code != 200:
            return response.text
        request_id = response.json().get("request_id")
        polled = harness.post("retrieve_future", {"request_id": request_id}, BOB) if request_id else response
        return polled.text

    if path != "create_model":
        assert "does not exist" in answer()
        if "model_seq_id" in request_fields:
            request_fields["model_seq_id"] = 8  # the first number is used
    run_id, kind, name = ids.weights.removeprefix("tinker://").split("/")
    published = harness.send("POST", f"training_runs/{run_id}/checkpoints/{kind}/{name}/publish")
    assert published.status_code == 200
    assert "does not exist" not in answer()


@pytest.mark.parametrize(
    ("method", "action"),
    [
        ("DELETE", ""),
        ("PUT", "/ttl"),
        ("POST", "/publish"),
        ("DELETE", "/publish"),
        ("POST", "/merge"),
        ("POST", "/upload"),
    ],
)
def test_a_published_checkpoint_is_read_by_all_and_changed_by_its_owner_only(
    harness: Harness, method: str, action: str
) -> None:
    ids = create_objects(harness)
    run_id, kind, name = ids.weights.removeprefix("tinker://").split("/")
    path = f"training_runs/{run_id}/checkpoints/{kind}/{name}"
    harness.send("POST", f"{path}/publish")
    bodies = {"/ttl": {"ttl_seconds": 3600}, "/merge": {}, "/upload": {"repository": "some/one", "token": "hf_x"}}
    body = bodies.get(action)
    assert harness.send(method, path + action, body, BOB).status_code == 404
    assert harness.post("weights_info", {"tinker_path": ids.weights}, BOB).status_code == 200
    assert harness.send(method, path + action, body, ALICE).status_code == 200


def make_missing_ids(ids: RouteObjects) -> RouteObjects:
    """Return ids and paths of the same form that do not exist."""
    session_id = str(uuid.uuid4())
    renamed = [text.replace(ids.session_id, session_id) for text in astuple(ids)]
    replaced_ids = {"file_id": f"file-{uuid.uuid4().hex}", "batch_id": f"batch_{uuid.uuid4().hex}"}
    replaced_ids |= {"message_batch_id": f"msgbatch_{uuid.uuid4().hex}"}
    replaced_ids |= {"trajectory_id": f"{ids.trajectory_id[:-1]}9", "capture": uuid.uuid4().hex}
    replaced_ids |= {"response_id": f"resp_{uuid.uuid4().hex}", "checkpoint_job_id": uuid.uuid4().hex}
    return replace(RouteObjects(*renamed), job_id=str(int(ids.job_id) + 7), **replaced_ids)


def without_ids(text: str, ids: RouteObjects) -> str:
    text = text.replace(ids.message_batch_id, "MESSAGES")
    text = text.replace(ids.checkpoint_job_id, "MERGE")
    text = text.replace(ids.file_id, "FILE").replace(ids.batch_id, "BATCH")
    text = text.replace(ids.response_id, "RESPONSE").replace(ids.trajectory_id, "TRAJECTORY")
    return text.replace(ids.session_id, "SESSION").replace(f" {ids.job_id}", " JOB")


@pytest.mark.matrix(30)
@pytest.mark.parametrize(("method", "path"), id_routes())
def test_foreign_and_missing_objects_have_the_same_answer(harness: Harness, method: str, path: str) -> None:
    """A foreign object and a missing one have the same status, body and headers."""
    theirs = create_objects(harness)
    nobodys = make_missing_ids(theirs)
    answers = [
        (answer.status_code, *(without_ids(str(said), ids) for said in (answer.text, headers)))
        for ids in (theirs, nobodys)
        for answer in [ask(harness, method, path, ids, BOB)]
        for headers in [{k: v for k, v in answer.headers.items() if k != "date"}]
    ]
    assert answers[0] == answers[1]


PARTS = ("session_id", "run_id", "kind", "name", "sampling_session_id", "request_id", "job_id", "file_id", "batch_id")
PARTS += ("response_id", "message_batch_id", "repo", "revision", "file", "directory", "checkpoint_id")
STRANGE_IDS = {
    "a way up": "..%2F..%2Fsigning.key",
    "a way up, twice encoded": "%252e%252e%252f",
    "an absolute path": "%2Fetc%2Fpasswd",
    "a backslash": "..%5C..%5Csigning.key",
    "NUL": "a%00b",
    "a line end": "a%0d%0aSet-Cookie:%20a=b",
    "colons": "a:train:0:train:1",
    "another scheme": "tinker:%2F%2Fa%2Fweights%2Fb",
    "a wildcard": "%25",
    "an SQL quote": "'%20OR%20'1'='1",
    "full width": "%EF%BC%8E%EF%BC%8E%EF%BC%8F",
    "a lone surrogate": "%ED%A0%80",
    "no UTF-8": "%FF%FE",
    "very long": "x" * 50_000,
    "a template": "{run_id}",
    "empty braces": "{0.__class__}",
}


@pytest.mark.matrix(4)
@pytest.mark.parametrize("strange", STRANGE_IDS)
def test_a_strange_name_in_a_path_is_found_nowhere(harness: Harness, strange: str) -> None:
    create_objects(harness)
    name = STRANGE_IDS[strange]
    for method, path in id_routes():
        for part in (part for part in PARTS if f"{{{part}}}" in path.replace(":path", "")):
            url_path = path.replace(":path", "").format_map(dict.fromkeys(PARTS, "weights") | {part: "NAME"})
            body = BODIES.get(path, lambda _ids: {})(RouteObjects("", "", "", "", "", ""))
            url = url_of(url_path).replace("NAME", name)
            answer = harness.client.request(
                method, url, json=body, headers={"X-API-Key": ALICE}, follow_redirects=False
            )
            assert answer.status_code in (400, 404), (method, path, part, answer.text[:300])
            assert len(answer.text) < 2000, "what is refused is not repeated at length"
            assert "set-cookie" not in answer.headers


@pytest.mark.matrix(4)
@pytest.mark.parametrize("strange", STRANGE_IDS)
def test_a_strange_name_in_a_body_is_found_nowhere(harness: Harness, strange: str) -> None:
    alice = create_objects(harness)
    name = unquote(STRANGE_IDS[strange])[:4000]
    path = f"tinker://{name}/weights/{name}"
    ids = RouteObjects(name, name, name, path, path, name, name, name)
    for path, body in BODIES.items():
        if "{" in path or isinstance(request_fields := body(ids), bytes):
            continue
        if request_fields == body(alice):  # names nothing of a tenant
            continue
        answer = harness.client.post(url_of(path), json=request_fields, headers={"X-API-Key": ALICE})
        assert answer.status_code in (400, 404, 410), (path, answer.text[:300])
    saved = harness.post("save_weights", {"model_id": alice.model_id, "seq_id": 1, "path": name})
    assert harness.result(saved.json()["request_id"])["category"] == "user"
