"""What is one tenant's is, to every other, not there: on every route that takes an id, and through the real SDK.

The cases are held against the route table, so that a route without one fails.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
from httpx import Response
from starlette.routing import Route

from support.http_harness import ALICE, BASE, BOB, Harness, close, make_harness, pass_bytes, sample_request
from tinsmith.api.app import API
from tinsmith.api.openapi import ELSEWHERE, OPERATIONS
from tinsmith.api.operation import ANTHROPIC, HUB, OPENAI, PREFIX
from tinsmith.api.requests import REQUESTS
from tinsmith.db.statements import execute
from tinsmith.exchange.hub import repository_of
from tinsmith.store.checkpoints import parse_path
from tinsmith.store.history import KeptSequence, SampleContent, keeping, new_sample
from tinsmith.wire.bodies import PROTO_TYPE


@dataclass(frozen=True, slots=True)
class Things:
    """One of everything that alice has."""

    session_id: str
    model_id: str
    sampler_id: str
    weights: str  # a path
    export: str
    job_id: str  # of a bulk job that failed
    file_id: str = ""
    batch_id: str = ""  # of OpenAI's

    def fill(self, path: str) -> str:
        return path.replace(":path", "").format(
            model=self.weights,
            session_id=self.session_id,
            run_id=self.model_id,
            kind="external_weights" if path.endswith("external_weights_urls") else "weights",
            name="one",
            sampling_session_id=self.sampler_id,
            request_id=f"{self.model_id}:0",
            job_id=self.job_id,
            checkpoint_id="one",
            file_id=self.file_id,
            batch_id=self.batch_id,
            repo=repository_of(parse_path(self.weights)) if self.weights.startswith("tinker://") else "weights",
            revision="main",
            file="adapter_config.json",
            directory="",
        )


def load(things: Things) -> dict[str, object]:
    return {"model_id": things.model_id, "seq_id": 5, "path": things.weights, "optimizer": False}


def custom_loss(things: Things) -> dict[str, object]:
    node = {"op": "output", "args": []}
    graph = {"format": 1, "nodes": [node]}
    return {"session_id": things.session_id, "custom_loss_seq_id": 0, "name": "x", "inputs": [], "graph": graph}


def bulk_job(name: str, resume_from: object = None) -> dict[str, object]:
    rows = {"format": "json", "path": "/nowhere/in.jsonl"}
    output = {"format": "json", "path": f"/nowhere/{name}.jsonl"}
    spec = {"batch_serialized_fn": "", "batch_input_format": rows, "batch_output_formats": [output], "batch_size": 1}
    return spec | {"name": name, "resume_from": resume_from}


def resumed_job(things: Things) -> dict[str, object]:
    job_id = int(things.job_id) if things.job_id.isdecimal() else things.job_id
    return bulk_job(things.session_id, job_id)


# The body of each route that takes ids in its body; those with ids in their path need none here.
BODIES: dict[str, Callable[[Things], dict[str, object] | bytes]] = {
    "/retrieve_future": lambda things: {"request_id": f"{things.model_id}:0"},
    "/retrieve_futures": lambda things: {
        "target": {"type": "sampling_session", "sampling_session_id": things.sampler_id},
        "timeout": 0,
    },
    "/cancel_future": lambda things: {"request_id": f"{things.model_id}:0"},
    "/asample": lambda things: sample_request(things.sampler_id, 5),
    "/create_sampling_session": lambda things: {
        "session_id": things.session_id,
        "sampling_session_seq_id": 5,
        "base_model": BASE,
    },
    "/join_sampling_session": lambda things: {
        "session_id": things.session_id,
        "sampling_session_id": things.sampler_id,
    },
    "/forward_backward": lambda things: pass_bytes(things.model_id, 5),
    "/forward": lambda things: pass_bytes(things.model_id, 5),
    "/optim_step": lambda things: {"model_id": things.model_id, "seq_id": 5, "adam_params": {"learning_rate": 0.1}},
    "/save_weights": lambda things: {"model_id": things.model_id, "seq_id": 5, "path": "mine"},
    "/save_weights_for_sampler": lambda things: {"model_id": things.model_id, "seq_id": 5, "path": "mine"},
    "/save_weights_external": lambda things: {"model_id": things.model_id, "seq_id": 5, "path": "mine"},
    "/session_heartbeat": lambda things: {"session_id": things.session_id},
    "/sessions/{session_id}/finish": lambda _things: {"reason": {"type": "success"}},
    "/sessions/{session_id}/project": lambda _things: {"project_id": "p"},
    "/create_model": lambda things: {"session_id": things.session_id, "model_seq_id": 5, "base_model": BASE},
    "/load_weights": load,
    "/get_info": lambda things: {"model_id": things.model_id},
    "/unload_model": lambda things: {"model_id": things.model_id},
    "/weights_info": lambda things: {"tinker_path": things.weights},
    "/copy_weights": lambda things: {"source_path": things.weights, "destination_project_id": "p"},
    "/create_custom_loss": custom_loss,
    "/delete_model": lambda things: {"model_id": things.model_id},
    "/create_sampling_client": lambda things: {"model_path": things.weights},
    "/sample": lambda things: {"sampling_client_id": things.sampler_id, "prompts": [[1, 2]]},
    "/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl": lambda _things: {"ttl_seconds": 3600},
    "/batch/jobs": resumed_job,
    "/log_metrics": lambda things: {"model_id": things.model_id, "metrics": {"reward": 1.0}},
}


def openai_batch(file_id: str) -> dict[str, object]:
    return {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}


BODIES |= {prefix + "/batches": lambda things: openai_batch(things.file_id) for prefix in OPENAI}
CHAT_MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
BODIES |= {
    path: lambda things, more=more: {"model": things.weights, **more}
    for path, more in {
        **{prefix + "/chat/completions": CHAT_MESSAGES for prefix in OPENAI},
        **{prefix + "/completions": {"prompt": "hi"} for prefix in OPENAI},
        **{prefix + "/messages": CHAT_MESSAGES | {"max_tokens": 1} for prefix in ANTHROPIC},
        **{prefix + "/messages/count_tokens": CHAT_MESSAGES for prefix in ANTHROPIC},
    }.items()
}

# The same for ids in the query.
QUERIES = {"/get_tokenizer": "?model_id={run_id}"}

# Routes that take no id: they speak of the server, or of everything of whoever asks.
WITHOUT_IDS = {
    HUB + "/api/whoami-v2",
    "/upload_weights",
    *(prefix + "/embeddings" for prefix in OPENAI),
    "/healthz",
    "/openapi.json",
    "/metrics",
    "/health",
    "/client/config",
    "/client/dynamic_config",
    "/get_server_capabilities",
    "/telemetry",
    "/auth/token",
    "/auth/apikey/me",
    "/create_session",
    "/batch/pools/{name}",
}
# Of these: what lists or counts the tenant's own things.
LISTINGS = {
    **{prefix + "/models": "" for prefix in ANTHROPIC},
    **{prefix + "/files": "" for prefix in OPENAI},
    **{prefix + "/batches": "" for prefix in OPENAI},
    "/sessions": "",
    "/list_sessions": "",
    "/cleanup_futures": "",
    "/sessions/search": "",
    "/training_runs": "",
    "/checkpoints": "",
    "/audit": "?event_type=all&event_date=2020-01-01",
    "/billing/usage/events": "",
    "/billing/usage/checkpoints/current": "",
    "/batch/jobs": "",
    "/batch/pools": "",
    "/dashboard/overview": "",
    "/dashboard/runs": "",
    "/dashboard/queue": "",
    "/dashboard/tenant": "",
    "/dashboard/samples": "",
}
# Ids that a listing takes as a filter or a cursor: (path, query or body).
FILTERS: tuple[tuple[str, Callable[[Things], str | dict[str, object]]], ...] = (
    *((prefix + "/files", lambda things: f"?after={things.file_id}") for prefix in OPENAI),
    *((prefix + "/batches", lambda things: f"?after={things.batch_id}") for prefix in OPENAI),
    ("/sessions/search", lambda things: {"session_id": things.session_id}),
    ("/sessions/search", lambda things: {"cursor": cursor_behind(things.session_id)}),
    ("/dashboard/runs", lambda things: f"?search={things.model_id}"),
    ("/dashboard/samples", lambda things: f"?search={things.model_id}:0"),
)
NO_IDS = {"telemetry session_id"}
"""Fields that are named like ids of things, and are not looked at."""


def cursor_behind(session_id: str) -> dict[str, object]:
    return {"last_created_at": "2100-01-01T00:00:00Z", "last_session_id": session_id}


# Routes whose link is the permission; test_routes_downloads.py shows what it takes.
BY_LINK = {"/sessions/{session_id}/trace"}


def is_link(path: str) -> bool:
    return path.startswith("/downloads/") or path in BY_LINK


# The same path with another method takes ids.
ALSO_WITH_IDS = {("POST", "/batch/jobs"), *(("POST", prefix + "/batches") for prefix in OPENAI)}


def id_routes() -> list[tuple[str, str]]:
    """(method, path below the prefix) of every route that takes ids and a key."""
    return [
        (method, path)
        for route in API
        for method in sorted((route.methods or set()) - {"HEAD"})
        if (path := route.path.removeprefix(PREFIX)) not in WITHOUT_IDS
        and (path not in LISTINGS or (method, path) in ALSO_WITH_IDS)
        and not is_link(path)
    ]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = make_harness(tmp_path, batch_tenants=("alice", "bob"))
    yield made
    close(made)


def things_of(harness: Harness, key: str = ALICE) -> Things:
    session_id = harness.session(key)
    model_id = harness.model(session_id, key=key)
    keep_sample(harness, key.removeprefix("tml-"), session_id, f"{model_id}:0")
    return Things(
        session_id,
        model_id,
        harness.sampler(session_id, key=key),
        harness.saved(model_id),
        harness.saved(model_id, "external_weights"),
        failed_job(harness, session_id, key),
        *uploaded(harness, key),
    )


def keep_sample(harness: Harness, tenant_id: str, session_id: str, request_id: str) -> None:
    """As the engine does it with a sample of this name."""
    content = SampleContent([1, 2], 0, {}, [KeptSequence([3], [-0.5], "stop")])
    with harness.services.models._db.write() as connection:
        for statement in keeping(new_sample(request_id, tenant_id, session_id, BASE, None), content, 10):
            execute(connection, statement)


def uploaded(harness: Harness, key: str) -> tuple[str, str]:
    """A file and a batch of it."""
    headers, file = {"X-API-Key": key}, {"file": ("in.jsonl", b"x")}
    made = harness.client.post("/v1/files", headers=headers, files=file, data={"purpose": "batch"}).json()
    batch = harness.client.post("/v1/batches", headers=headers, json=openai_batch(made["id"])).json()
    return made["id"], batch["id"]


def failed_job(harness: Harness, name: str, key: str = ALICE) -> str:
    """A bulk job that can be read and resumed, and that nobody waits for."""
    job_id = harness.ok("batch/jobs", bulk_job(name), key)["job_id"]
    jobs = harness.services.batch_jobs
    assert jobs.acquire_batch_coordinator(job_id, "token", "here", 60)
    assert jobs.set_status(job_id, "token", "FAILED", "for a test")
    return str(job_id)


def url_of(path: str) -> str:
    return path if path.startswith(ELSEWHERE) else PREFIX + path


def ask(harness: Harness, method: str, path: str, things: Things, key: str) -> Response:
    body = BODIES.get(path, lambda _things: {})(things)
    headers = {"X-API-Key": key}
    url = url_of(things.fill(path + QUERIES.get(path, "")))
    if isinstance(body, bytes):
        return harness.client.request(method, url, content=body, headers=headers | {"Content-Type": PROTO_TYPE})  # type: ignore[return-value]
    return harness.client.request(method, url, json=body, headers=headers, follow_redirects=False)  # type: ignore[return-value]


def test_every_route_is_sorted_into_those_with_ids_and_those_without() -> None:
    """A new route must say which it is; one with ids must have them in its path, or a body here."""
    paths = {route.path.removeprefix(PREFIX) for route in API if isinstance(route, Route)}
    assert set(BODIES) | set(QUERIES) <= paths
    assert set(LISTINGS) | WITHOUT_IDS <= paths
    for _method, path in id_routes():
        assert "{" in path or path in BODIES or path in QUERIES, f"{path} takes ids somewhere: add them to BODIES"


def names_in(schema: object) -> set[str]:
    """Of the fields of a body, at any depth."""
    if isinstance(schema, list):
        return set().union(*map(names_in, schema))
    if not isinstance(schema, dict):
        return set()
    properties = schema.get("properties")
    own = set(properties) if isinstance(properties, dict) else set()
    return own.union(*map(names_in, schema.values()))


def test_no_operation_of_the_document_takes_an_id_that_is_not_tried() -> None:
    """What has no case of its own below has neither a path, nor a query, nor a body with an id in it."""
    tried = {(method, path.replace(":path", "")) for method, path in id_routes()}
    filtered = {path for path, _ in FILTERS}
    for operation in OPERATIONS:
        path = operation.path
        if (operation.method, path) in tried or is_link(path) or path in filtered:
            continue
        assert path in WITHOUT_IDS or path in LISTINGS, f"{operation.name} is not sorted"
        names = names_in(REQUESTS.get(path)) if operation.method != "GET" else set()
        ids = {name for name in {*names, *(operation.query or {})} if name.endswith(("_id", "_ids", "_path", "after"))}
        ids -= {"project_id"}  # the tenant's own word
        assert {f"{path.rpartition('/')[2]} {name}" for name in ids} <= NO_IDS, f"{operation.name} takes ids"


@pytest.mark.parametrize("number", range(len(FILTERS)), ids=lambda number: FILTERS[number][0])
def test_a_filter_finds_nothing_of_another_tenant(harness: Harness, number: int) -> None:
    """And says no more of it than of what is not there."""
    path, given = FILTERS[number]
    theirs = things_of(harness)
    seen = []
    for things in (theirs, nothing_like(theirs)):
        asked = given(things)
        url, headers = url_of(path), {"X-API-Key": BOB}
        if isinstance(asked, dict):
            answer = harness.client.post(url, json=asked, headers=headers)
        else:
            answer = harness.client.get(url + asked, headers=headers)
        assert answer.status_code in (200, 404), answer.text
        seen.append((answer.status_code, without_ids(answer.text, things)))
    assert seen[0] == seen[1]
    assert theirs.session_id not in seen[0][1] and "alice" not in seen[0][1]


@pytest.mark.parametrize(("method", "path"), id_routes())
def test_an_id_of_another_tenant_is_404_and_ones_own_is_not(harness: Harness, method: str, path: str) -> None:
    things = things_of(harness)
    before = harness.get(f"sessions/{things.session_id}").json(), len(harness.pending())
    refused = ask(harness, method, path, things, BOB)
    assert refused.status_code == 404, refused.text
    assert "alice" not in refused.text
    assert (harness.get(f"sessions/{things.session_id}").json(), len(harness.pending())) == before
    own = ask(harness, method, path, things, ALICE)
    assert own.status_code != 404 and (own.status_code < 500 or own.status_code in (501, 503)), own.text


@pytest.mark.parametrize("path", LISTINGS)
def test_a_listing_shows_nothing_of_another_tenant(harness: Harness, path: str) -> None:
    things = things_of(harness)
    routes = [route for route in API if route.path == url_of(path)]
    methods = {method for route in routes for method in route.methods or ()} - {"HEAD"}
    methods = {method for method in methods if (method, path) not in ALSO_WITH_IDS}
    method = "GET" if path.startswith(ELSEWHERE) else max(methods)
    body = {} if method == "POST" else None
    answer = harness.client.request(method, url_of(path) + LISTINGS[path], json=body, headers={"X-API-Key": BOB})
    assert answer.status_code == 200 or not path.startswith(ELSEWHERE)
    assert not [name for name in (things.session_id, things.file_id, things.batch_id, "alice") if name in answer.text]


def test_a_pool_shows_the_jobs_of_whoever_asks_only(harness: Harness) -> None:
    run = SimpleNamespace(job=SimpleNamespace(tenant_id="alice", pool="local"))
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
def test_anothers_checkpoint_opens_in_ones_own_session_only_when_published(
    harness: Harness, path: str, body: dict[str, object]
) -> None:
    things = things_of(harness)
    filled = {name: things.weights if value == "{weights}" else value for name, value in body.items()}
    filled |= {} if path == "weights_info" else {"session_id": harness.session(BOB)}

    def answer() -> str:
        sent = harness.post(path, filled, BOB)
        if sent.status_code != 200:
            return sent.text
        request_id = sent.json().get("request_id")
        polled = harness.post("retrieve_future", {"request_id": request_id}, BOB) if request_id else sent
        return polled.text

    if path != "create_model":
        assert "does not exist" in answer()
        if "model_seq_id" in filled:
            filled["model_seq_id"] = 8  # the first number is used
    run_id, kind, name = things.weights.removeprefix("tinker://").split("/")
    published = harness.send("POST", f"training_runs/{run_id}/checkpoints/{kind}/{name}/publish")
    assert published.status_code == 200
    assert "does not exist" not in answer()


@pytest.mark.parametrize(
    ("method", "action"), [("DELETE", ""), ("PUT", "/ttl"), ("POST", "/publish"), ("DELETE", "/publish")]
)
def test_a_published_checkpoint_is_read_by_all_and_changed_by_its_owner_only(
    harness: Harness, method: str, action: str
) -> None:
    things = things_of(harness)
    run_id, kind, name = things.weights.removeprefix("tinker://").split("/")
    path = f"training_runs/{run_id}/checkpoints/{kind}/{name}"
    harness.send("POST", f"{path}/publish")
    body = {"ttl_seconds": 3600} if action == "/ttl" else None
    assert harness.send(method, path + action, body, BOB).status_code == 404
    assert harness.post("weights_info", {"tinker_path": things.weights}, BOB).status_code == 200
    assert harness.send(method, path + action, body, ALICE).status_code == 200


def nothing_like(things: Things) -> Things:
    """Ids and paths of the same form, which nobody has."""
    session_id = str(uuid.uuid4())
    changed = [text.replace(things.session_id, session_id) for text in astuple(things)]
    others = {"file_id": f"file-{uuid.uuid4().hex}", "batch_id": f"batch_{uuid.uuid4().hex}"}
    return replace(Things(*changed), job_id=str(int(things.job_id) + 7), **others)


def without_ids(text: str, things: Things) -> str:
    text = text.replace(things.file_id, "FILE").replace(things.batch_id, "BATCH")
    return text.replace(things.session_id, "SESSION").replace(f" {things.job_id}", " JOB")


@pytest.mark.parametrize(("method", "path"), id_routes())
def test_what_is_anothers_is_told_from_what_is_not_there_by_nothing(harness: Harness, method: str, path: str) -> None:
    """Neither by the status, nor by a word, nor by a header."""
    theirs = things_of(harness)
    nobodys = nothing_like(theirs)
    answers = [
        (answer.status_code, *(without_ids(str(said), things) for said in (answer.text, headers)))
        for things in (theirs, nobodys)
        for answer in [ask(harness, method, path, things, BOB)]
        for headers in [{k: v for k, v in answer.headers.items() if k != "date"}]
    ]
    assert answers[0] == answers[1]


PARTS = ("session_id", "run_id", "kind", "name", "sampling_session_id", "request_id", "job_id", "file_id", "batch_id")
PARTS += ("repo", "revision", "file", "directory", "checkpoint_id")
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


@pytest.mark.parametrize("strange", STRANGE_IDS)
def test_a_strange_name_in_a_path_is_found_nowhere(harness: Harness, strange: str) -> None:
    things_of(harness)
    name = STRANGE_IDS[strange]
    for method, path in id_routes():
        for part in (part for part in PARTS if f"{{{part}}}" in path.replace(":path", "")):
            rest = path.replace(":path", "").format_map(dict.fromkeys(PARTS, "weights") | {part: "NAME"})
            body = BODIES.get(path, lambda _things: {})(Things("", "", "", "", "", ""))
            url = url_of(rest).replace("NAME", name)
            answer = harness.client.request(
                method, url, json=body, headers={"X-API-Key": ALICE}, follow_redirects=False
            )
            assert answer.status_code in (400, 404), (method, path, part, answer.text[:300])
            assert len(answer.text) < 2000, "what is refused is not repeated at length"
            assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("strange", STRANGE_IDS)
def test_a_strange_name_in_a_body_is_found_nowhere(harness: Harness, strange: str) -> None:
    alice = things_of(harness)
    name = unquote(STRANGE_IDS[strange])[:4000]
    path = f"tinker://{name}/weights/{name}"
    things = Things(name, name, name, path, path, name, name, name)
    for path, body in BODIES.items():
        if "{" in path or isinstance(filled := body(things), bytes):
            continue
        answer = harness.client.post(url_of(path), json=filled, headers={"X-API-Key": ALICE})
        assert answer.status_code in (400, 404, 410), (path, answer.text[:300])
    named = harness.post("save_weights", {"model_id": alice.model_id, "seq_id": 1, "path": name})
    assert harness.result(named.json()["request_id"])["category"] == "user"
