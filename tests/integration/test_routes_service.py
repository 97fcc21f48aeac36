"""Service and session routes, authentication, and the format of errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tinker.types import (
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    CreateSessionResponse,
    GetServerCapabilitiesResponse,
    GetSessionResponse,
    ListSessionsResponse,
    SessionHeartbeatResponse,
)

from support.http_harness import ALICE, BASE, BOB, MAX_BODY_BYTES, Harness, close, make_harness
from tinsmith.api.app import API, create_probe_app
from tinsmith.api.request import ANTHROPIC, HUB, OPENAI_PATHS, PREFIX
from tinsmith.api.routes.checkpoint_jobs import DOWNLOAD as MERGED
from tinsmith.api.routes.downloads import DOWNLOAD
from tinsmith.api.services import Services

ELSEWHERE = (*OPENAI_PATHS, *(f"{prefix}/" for prefix in (*ANTHROPIC, HUB)))
OPEN = {PREFIX + path for path in ("/healthz", "/health", "/openapi.json")} | {"/health", "/openapi.json"}
SIGNED = {  # the link is the key
    "/api/v1/external_weights_uploads/{number}/{file}",
    PREFIX + "/sessions/{session_id}/trace",
    PREFIX + DOWNLOAD + "/files/{file}",
    PREFIX + DOWNLOAD + "/archive",
    PREFIX + MERGED + "/files/{file:path}",
    PREFIX + MERGED + "/archive",
}


def test_the_sdk_reads_the_flags_it_is_given(harness: Harness) -> None:
    config = ClientConfigResponse.model_validate(harness.ok("client/config", {"sdk_version": "0.38.0"}))
    assert config.parallel_fwdbwd_chunks
    assert config.pjwt_auth_enabled
    assert not config.sample_use_retrieve_futures
    assert config.sample_join_sampling_session
    assert config.custom_loss_server_side
    dynamic = ClientDynamicConfigResponse.model_validate(harness.ok("client/dynamic_config", {}))
    assert dynamic.sample_cancel_enabled


@pytest.mark.parametrize(
    ("peer", "headers", "tunnelled", "compressed"),
    [
        ("127.0.0.1", {}, False, False),
        ("127.0.0.1", {}, True, True),
        ("127.0.0.1", {"X-Forwarded-For": "192.0.2.1"}, False, True),
        ("127.0.0.1", {"Via": "1.1 proxy"}, False, True),
        ("::1", {}, False, False),
        ("192.0.2.1", {}, False, True),
        ("testclient", {}, False, True),
    ],
)
def test_remote_clients_are_configured_to_compress(
    tmp_path: Path, peer: str, headers: dict[str, str], tunnelled: bool, compressed: bool
) -> None:
    harness = make_harness(tmp_path, tunnelled=tunnelled)
    client = TestClient(harness.app, base_url="http://127.0.0.1", client=(peer, 50_000))
    answer = client.post("/api/v1/client/config", json={}, headers={"X-API-Key": ALICE, **headers})
    assert ClientConfigResponse.model_validate(answer.json()).proto_compress_fwdbwd == compressed
    close(harness)


def test_capabilities_list_every_served_model(harness: Harness) -> None:
    capabilities = GetServerCapabilitiesResponse.model_validate(harness.get("get_server_capabilities").json())
    assert [model.model_name for model in capabilities.supported_models] == [BASE, "local/other"]
    assert capabilities.supported_models[0].max_context_length == 16
    assert capabilities.supported_models[0].trainable and capabilities.supported_models[0].sampleable


def test_health_needs_no_key(harness: Harness) -> None:
    answer = harness.client.get("/api/v1/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def with_status(harness: Harness, **changes: Callable[[], str]) -> Services:
    """The harness's services with another status of engines."""
    return replace(harness.services, engines=replace(harness.services.engines, **changes))


@pytest.mark.parametrize("path", ["/api/v1/healthz", "/api/v1/health", "/health"])
def test_health_says_what_is_wrong(harness: Harness, path: str) -> None:
    harness.app.state.services = with_status(harness, failing=lambda: "engine-0 died 3 times in a row")
    answer = harness.client.get(path)
    assert answer.status_code == 503
    assert (answer.json()["status"], answer.json()["reason"]) == ("failing", "engine-0 died 3 times in a row")


def test_a_process_without_clients_is_ready_once_its_engines_are(harness: Harness) -> None:
    for loading, failing, status in (("", "", 200), ("engine-0 is loading", "", 503), ("", "engine-0 died", 503)):
        services = with_status(harness, loading=lambda reason=loading: reason, failing=lambda reason=failing: reason)
        answer = TestClient(create_probe_app(services)).get("/readyz")
        assert (answer.status_code, answer.json().get("reason", "")) == (status, loading or failing)


def test_the_key_tells_who_is_asking(harness: Harness) -> None:
    assert harness.get("auth/apikey/me", BOB).json()["name"] == "bob"


def test_telemetry_is_accepted_and_dropped(harness: Harness) -> None:
    body = {"events": [{"event": "GENERIC_EVENT"}], "platform": "x", "sdk_version": "x", "session_id": "s"}
    assert harness.ok("telemetry", body) == {"status": "accepted"}


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "tml-carol"}, {"Authorization": "Bearer tml-alice"}])
def test_every_other_path_refuses_a_stranger(harness: Harness, headers: dict[str, str]) -> None:
    for route in API:
        if route.path in OPEN:
            continue
        path = re.sub(r"\{\w+\}", "x", route.path)
        for method in (route.methods or set()) - {"HEAD"}:
            request_headers = headers
            if path.startswith(ELSEWHERE) and "Authorization" in headers:
                request_headers = {"Authorization": "Bearer tml-carol"}  # these paths take a key there
            answer = harness.client.request(method, path, json={}, headers=request_headers)
            assert answer.status_code == (403 if route.path in SIGNED else 401), (method, path)
            body = answer.json()
            assert body["error"]["message"] if "error" in body else body["detail"]


def test_a_server_without_keys_takes_any_well_formed_key(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, local=True)
    try:
        assert harness.get("auth/apikey/me", "tml-anything").json()["name"] == "local"
        refusal = harness.get("auth/apikey/me", "sk-anything")
        assert refusal.status_code == 401
        assert "tml-" in refusal.json()["detail"]
    finally:
        close(harness)


def test_a_server_without_keys_does_not_answer_to_a_foreign_name(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, local=True)
    try:
        for host in ("localhost:8000", "[::1]:8000", "127.0.0.1", "LocalHost"):
            assert harness.client.get("/api/v1/healthz", headers={"Host": host}).status_code == 200, host
        for host in ("evil.example", "localhost.evil.example:8000", "localhost:80@evil.example", "[::1", "", "::1"):
            answer = harness.client.get("/api/v1/healthz", headers={"Host": host})
            assert answer.status_code == 403, host
            assert repr(host) in answer.json()["detail"]
        twice = [("Host", "localhost"), ("Host", "evil.example")]
        assert harness.client.get("/api/v1/healthz", headers=twice).status_code == 403
    finally:
        close(harness)


@pytest.mark.parametrize("local", [True, False])
def test_a_server_without_keys_refuses_web_pages_of_other_origins(tmp_path: Path, local: bool) -> None:
    """With keys, requests without a key are refused, and a page with a key may use it."""
    harness = make_harness(tmp_path, local=local)
    local_headers = {"Host": "localhost:8000", "X-API-Key": ALICE}
    foreign = ("https://evil.example", "null", "", "http://localhost:3000", "http://localhost", "file://")
    try:
        for origin in ("http://localhost:8000", "HTTP://LocalHost:8000"):
            assert harness.client.get("/api/v1/sessions", headers=local_headers | {"Origin": origin}).status_code == 200
        for origin in foreign:
            for method, path in (("GET", "healthz"), ("POST", "batch/jobs"), ("OPTIONS", "create_session")):
                answer = harness.client.request(method, f"/api/v1/{path}", headers=local_headers | {"Origin": origin})
                assert (answer.status_code == 403) == local, (origin, method, path)
                assert not local or "Origin" in answer.json()["detail"]
                assert not [name for name in answer.headers if name.startswith("access-control-")]
    finally:
        close(harness)


def test_a_session_keeps_what_it_was_opened_with(harness: Harness) -> None:
    body = {
        "tags": ["a"],
        "user_metadata": {"team": "x", "size": 3},
        "sdk_version": "0.38.0",
        "display_name": "mine",
        "type": "create_session",
    }
    session_id = CreateSessionResponse.model_validate(harness.ok("create_session", body)).session_id
    model_id = harness.model(session_id)
    sampler_id = harness.sampler(session_id)
    session = GetSessionResponse.model_validate(harness.get(f"sessions/{session_id}").json())
    assert session.training_run_ids == [model_id]
    assert session.sampler_ids == [sampler_id]
    assert session.user_metadata == {"team": "x", "size": "3"}
    assert session.display_name == "mine"
    stored = harness.services.sessions.get("alice", session_id)
    assert (list(stored.tags), stored.sdk_version) == (["a"], "0.38.0")


def test_a_heartbeat_moves_the_clock_of_the_session(harness: Harness) -> None:
    session_id = harness.session()
    before = harness.services.sessions.get("alice", session_id).last_heartbeat_at
    SessionHeartbeatResponse.model_validate(harness.ok("session_heartbeat", {"session_id": session_id}))
    assert harness.services.sessions.get("alice", session_id).last_heartbeat_at > before


def test_a_heartbeat_of_a_closed_session_is_410_with_the_reason(harness: Harness) -> None:
    session_id = harness.session()
    assert harness.services.sessions.close(session_id, "no heartbeat for 300 s")
    answer = harness.post("session_heartbeat", {"session_id": session_id})
    assert answer.status_code == 410
    assert "no heartbeat for 300 s" in answer.json()["detail"]


def test_the_first_farewell_counts(harness: Harness) -> None:
    session_id = harness.session()
    for reason in ("success", "errored"):
        harness.ok(f"sessions/{session_id}/finish", {"reason": {"type": reason}, "detail": None})
    assert harness.services.sessions.get("alice", session_id).reason == "finished: success"


def test_sessions_are_listed_newest_first_in_pages(harness: Harness) -> None:
    sessions = [harness.session() for _ in range(3)]
    harness.session(BOB)
    page = ListSessionsResponse.model_validate(harness.get("sessions?limit=2&offset=0&access_scope=owned").json())
    assert page.sessions == [sessions[2], sessions[1]]
    assert harness.get("sessions?offset=2").json()["sessions"] == [sessions[0]]


def test_another_tenants_session_is_unknown(harness: Harness) -> None:
    session_id = harness.session()
    answers = [
        harness.get(f"sessions/{session_id}", BOB),
        harness.post("session_heartbeat", {"session_id": session_id}, BOB),
        harness.post(f"sessions/{session_id}/finish", {}, BOB),
        harness.send("PUT", f"sessions/{session_id}/project", {"project_id": "p"}, BOB),
        harness.post("create_model", {"session_id": session_id, "model_seq_id": 0, "base_model": BASE}, BOB),
        harness.post(
            "create_sampling_session",
            {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE},
            BOB,
        ),
    ]
    assert [answer.status_code for answer in answers] == [404] * len(answers)
    assert harness.services.sessions.get("alice", session_id).state == "active"


@pytest.mark.parametrize(
    ("query", "words"),
    [("limit=-1", "limit is '-1'"), ("limit=x", "limit is 'x'"), ("limit=1001", "1001"), ("offset=1e9", "offset")],
)
def test_a_wrong_page_is_a_400_that_says_so(harness: Harness, query: str, words: str) -> None:
    answer = harness.get(f"sessions?{query}")
    assert answer.status_code == 400
    assert words in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tags": "a"}, "tags is 'a'"),
        ({"tags": [1]}, "tags[0] is 1"),
        ({"tags": ["x"] * 101}, "at most 100"),
        ({"tags": [], "user_metadata": []}, "user_metadata is []"),
        ({"tags": [], "display_name": 3}, "display_name is 3"),
        ({"tags": [], "project_id": "p" * 129}, "project_id"),
    ],
)
def test_a_wrong_session_is_a_400_that_names_the_field(harness: Harness, body: object, words: str) -> None:
    answer = harness.post("create_session", body)
    assert answer.status_code == 400
    assert words in answer.json()["detail"]


def test_an_unknown_path_and_a_wrong_method_are_told_apart(harness: Harness) -> None:
    unknown = harness.get("nothing_here")
    assert unknown.status_code == 404
    assert "/api/v1/nothing_here" in unknown.json()["detail"]
    wrong = harness.get("create_session")
    assert wrong.status_code == 405
    assert "does not accept GET" in wrong.json()["detail"]


def test_a_body_of_the_wrong_type_is_415(harness: Harness) -> None:
    answer = harness.client.post("/api/v1/create_session", content=b"{}", headers={"X-API-Key": ALICE})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["detail"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"'])
def test_a_body_that_is_no_object_is_a_400_with_words(harness: Harness, body: bytes) -> None:
    headers = {"X-API-Key": ALICE, "Content-Type": "application/json"}
    answer = harness.client.post("/api/v1/create_session", content=body, headers=headers)
    assert answer.status_code == 400
    assert "the body" in answer.json()["detail"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_413(harness: Harness, chunked: bool) -> None:
    body = b"x" * (MAX_BODY_BYTES + 1)
    headers = {"X-API-Key": ALICE, "Content-Type": "application/json"}
    content = iter([body[:500], body[500:]]) if chunked else body
    answer = harness.client.post("/api/v1/create_session", content=content, headers=headers)
    assert answer.status_code == 413
    assert str(MAX_BODY_BYTES) in answer.json()["detail"]


@pytest.mark.parametrize(("length", "most_reads"), [(str(MAX_BODY_BYTES + 1), 0), (None, MAX_BODY_BYTES // 1000 + 1)])
def test_no_more_of_a_body_is_read_than_allowed(harness: Harness, length: str | None, most_reads: int) -> None:
    reads = 0
    messages: list[dict] = []

    async def receive() -> dict:
        nonlocal reads
        reads += 1
        assert reads < 10_000, "the server reads for ever"
        return {"type": "http.request", "body": b" " * 1000, "more_body": True}

    async def send(message: dict) -> None:
        messages.append(message)

    headers = {"host": "x", "x-api-key": ALICE, "content-type": "application/json"}
    headers |= {"content-length": length} if length else {}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/v1/create_session",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    asyncio.run(harness.app(scope, receive, send))  # type: ignore[arg-type]
    assert messages[0]["status"] == 413
    assert reads <= most_reads


def test_a_nul_in_a_path_is_404_and_in_a_query_400(harness: Harness) -> None:
    assert harness.get("sessions/a%00b").status_code == 404
    for path in ("sessions?project_id=%00", "get_tokenizer?model_id=a%00b", "checkpoints?%00=1"):
        answer = harness.get(path)
        assert answer.status_code == 400
        assert "NUL" in answer.json()["detail"]


def test_an_unexpected_error_is_a_500_that_tells_nothing(harness: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    harness.services.models._db.engine.dispose()
    broken = harness.services.sessions

    def explode(*_: object) -> None:
        raise RuntimeError("the secret is tml-alice")

    broken.list_ids = explode  # type: ignore[method-assign, assignment]
    answer = harness.get("sessions")
    assert answer.status_code == 500
    detail = answer.json()["detail"]
    assert "secret" not in detail
    error_id = detail.rpartition("error_id=")[2]
    assert len(error_id) == 32
    logged = capsys.readouterr()
    assert error_id in logged.out + logged.err


def test_every_route_is_documented_and_nothing_else() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "routes.md").read_text()
    rows = re.findall(r"^- ([A-Z]+) `(/\S*)`: ", text, re.MULTILINE)
    openai = [(method, path) for method, path in rows if path.startswith("/v1/")]
    anthropic = [(method, path) for method, path in openai if path.startswith(("/v1/messages", "/v1/models"))]
    rows += [(method, f"/oai/api{path}") for method, path in openai]
    rows += [(method, f"/anthropic/api{path}") for method, path in anthropic]
    documented = {f"{method} {path.removeprefix(PREFIX)}" for method, path in rows}
    served = {
        f"{method} {route.path.removeprefix(PREFIX).replace(':path', '')}"
        for route in API
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert documented == served
