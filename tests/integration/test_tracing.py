"""Spans and log lines of a live server and its engine, as a collector and a log reader receive them."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from support.http_harness import close, make_harness, pass_bytes, send_pass
from support.live import API_KEY, LiveServer, serving
from tinsmith.errors import SettingsError
from tinsmith.telemetry.logs import configure_logs
from tinsmith.telemetry.tracing import CURRENT, Tracing, open_tracing
from tinsmith.wire.bodies import PROTO_TYPE

T = TypeVar("T")

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CLIENT_SPAN}-01"


@dataclass
class Collector:
    """Receives spans by OTLP, by service."""

    url: str
    spans: list[tuple[str, Span]] = field(default_factory=list)

    def spans_named(self, name: str, trace_id: str = TRACE) -> list[Span]:
        return [span for _, span in self.spans if span.name == name and span.trace_id.hex() == trace_id]

    def await_named(self, name: str, count: int = 1) -> list[Span]:
        return wait_for(lambda: spans if len(spans := self.spans_named(name)) >= count else None)


def wait_for(look: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (value := look()) is not None:
            return value
        time.sleep(0.05)
    raise AssertionError("it did not come")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    new_collector = Collector("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource_attributes = {
                    attribute.key: attribute.value.string_value for attribute in resource.resource.attributes
                }
                new_collector.spans += [
                    (resource_attributes["service.name"], span)
                    for scope in resource.scope_spans
                    for span in scope.spans
                ]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    new_collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield new_collector
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    settings = {"OTLP_ENDPOINT": collector.url, "LOG_LEVEL": "DEBUG", "LOG_FORMAT": "json"}
    with serving(tmp_path_factory.mktemp("traced") / "data", "--backend", "fake", settings=settings) as new_server:
        yield new_server


@pytest.fixture(scope="module")
def model_id(server: LiveServer) -> str:
    """A model that a tracing client created and trained once."""
    session_id = post(server, "create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tinsmith/nano"}
    created = post(server, "create_model", body)
    result(server, created["request_id"])
    headers = {"X-API-Key": API_KEY, "Content-Type": PROTO_TYPE, "traceparent": TRACEPARENT}
    passed = httpx.post(
        f"{server.url}/api/v1/forward_backward", content=pass_bytes(created["model_id"], 1), headers=headers, timeout=60
    ).json()
    result(server, passed["request_id"])
    return created["model_id"]


def post(server: LiveServer, path: str, body: object, **headers: str) -> dict:
    all_headers = {"X-API-Key": API_KEY, **headers}
    answer = httpx.post(f"{server.url}/api/v1/{path}", json=body, headers=all_headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def result(server: LiveServer, request_id: str) -> None:
    all_headers = {"X-API-Key": API_KEY, "traceparent": TRACEPARENT}
    answer = httpx.post(
        f"{server.url}/api/v1/retrieve_future", json={"request_id": request_id}, headers=all_headers, timeout=60
    )
    assert answer.status_code == 200, answer.text


def attributes(span: Span) -> dict[str, str | int]:
    return {attribute.key: attribute.value.string_value or attribute.value.int_value for attribute in span.attributes}


def test_a_request_is_one_trace_from_the_client_to_its_settlement(collector: Collector, model_id: str) -> None:
    (settle,) = collector.await_named("settle")
    submitted, full_span = sorted(
        collector.await_named("forward_backward", 2), key=lambda span: span.start_time_unix_nano
    )
    assert submitted.parent_span_id.hex() == CLIENT_SPAN
    assert full_span.parent_span_id == submitted.span_id
    services = {name for name, span in collector.spans if span.trace_id.hex() == TRACE}
    assert services == {"tinsmith-server", "tinsmith-engine"}
    (wait,), (plan,), (run,) = (collector.spans_named(name) for name in ("wait", "plan", "run"))
    parts = [wait, plan, run, settle]
    assert {part.parent_span_id for part in parts} == {full_span.span_id}
    assert wait.start_time_unix_nano == full_span.start_time_unix_nano
    assert settle.end_time_unix_nano == full_span.end_time_unix_nano
    for earlier, later in pairwise(parts):
        assert earlier.end_time_unix_nano == later.start_time_unix_nano
        assert later.end_time_unix_nano >= later.start_time_unix_nano
    span_attributes = attributes(full_span)
    assert (
        span_attributes["tinsmith.request_id"] == f"{model_id}:1" and span_attributes["tinsmith.model_id"] == model_id
    )
    assert span_attributes["tinsmith.tenant_id"] == "local" and span_attributes["tinsmith.outcome"] == "done"
    assert attributes(run)["tinsmith.step"] == attributes(plan)["tinsmith.step"] >= 1
    polls = collector.await_named("retrieve_future", 2)
    assert {span.parent_span_id.hex() for span in polls} == {CLIENT_SPAN}


def test_without_a_traceparent_a_trace_of_its_own_begins(collector: Collector, model_id: str) -> None:
    created = wait_for(lambda: [span for _, span in collector.spans if span.name == "create_model"] or None)
    assert all(span.trace_id.hex() != TRACE for span in created)
    assert [span for span in created if not span.parent_span_id]


def test_a_nonsensical_traceparent_is_none(server: LiveServer, collector: Collector) -> None:
    for nonsense in ("x", "00-0-0-00", "ff" * 200, "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
        post(server, "create_session", {"tags": [], "sdk_version": nonsense[:8]}, traceparent=nonsense)
    wait_for(lambda: len([1 for _, span in collector.spans if span.name == "create_session"]) >= 5 or None)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def test_lines_of_the_log_name_request_model_and_tenant(server: LiveServer, model_id: str) -> None:
    (path,) = (server.data_dir / "logs").glob("engine-*.log")
    settled = wait_for(lambda: [line for line in lines(path) if line["event"] == "settled"][1:] or None)[0]
    expected_keys = {
        "request_id": f"{model_id}:1",
        "model_id": model_id,
        "tenant_id": "local",
        "base_model": "tinsmith/nano",
    }
    assert expected_keys.items() <= settled.items()
    assert settled["level"] == "debug" and settled["outcome"] == "done" and settled["timestamp"].endswith("Z")
    post(server, "telemetry", {"events": [], "platform": "x", "sdk_version": "x", "session_id": "s"})
    telemetry_lines = [line for line in lines(server.data_dir / "server.log") if line["event"] == "telemetry"]
    assert telemetry_lines[-1]["tenant_id"] == "local"


@pytest.mark.parametrize(
    ("form", "beginning"), [("logfmt", "timestamp="), ("json", "{"), ("console", "\x1b[")], ids=lambda value: value[:8]
)
def test_a_line_has_the_form_that_was_asked_for(form: str, beginning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = structlog.get_config()
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", written)
    try:
        configure_logs("INFO", form)
        with structlog.contextvars.bound_contextvars(tenant_id="alice"):
            structlog.get_logger().info("hello", api_key="tml-secret", number=3)
        structlog.get_logger().debug("quiet")
    finally:
        structlog.configure(**before)
    (line,) = written.getvalue().splitlines()
    assert line.startswith(beginning) and "hello" in line and "alice" in line and "tml-secret" not in line


def test_without_an_endpoint_nothing_is_loaded_and_nothing_stored(tmp_path: Path) -> None:
    assert type(open_tracing("", "server", {})) is Tracing
    harness = make_harness(tmp_path)
    model_id = harness.model()
    assert send_pass(harness, pass_bytes(model_id, 1), traceparent=TRACEPARENT).status_code == 200
    assert {row.traceparent for row in harness.pending()} == {None}
    close(harness)


def test_a_trace_without_the_package_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"tinsmith\[otel\]"):
        open_tracing("http://127.0.0.1:9", "server", {})


def test_what_a_block_does_is_below_its_span(collector: Collector) -> None:
    tracing = open_tracing(collector.url, "test", {})
    with pytest.raises(ValueError, match="inside"), tracing.span("outer", TRACEPARENT, {}):
        outer = CURRENT.get()
        assert outer is not None and outer.split("-")[1] == TRACE and CLIENT_SPAN not in outer
        raise ValueError("inside")
    assert CURRENT.get() is None
    tracing.close()
    (span,) = collector.spans_named("outer")
    assert attributes(span)["error.type"] == "ValueError"
