"""Sessions, usage, audit log, traces and telemetry through the real SDK and its command line, on a live server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from support.live import LiveServer, serving

pytestmark = pytest.mark.filterwarnings("ignore:RestClient.search_sessions is experimental")

BASE = "tinsmith/nano"
KEY = "tml-the-secret-of-this-test-4711"
TOKENS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("account") / "data"
    with serving(directory, "--backend", "fake", settings={"LOG_LEVEL": "DEBUG"}) as live:
        yield live


@pytest.fixture(scope="module")
def used_session(server: LiveServer) -> str:
    """A session with 3 passes of 4 tokens, a sample of 5 tokens after a prompt of 4, and one saved checkpoint."""
    metadata = {"run": "7"}
    options = {"base_url": server.url, "api_key": KEY, "project_id": "p", "display_name": "Worked well"}
    with tinker.ServiceClient(user_metadata=metadata, **options) as service:
        model = service.create_lora_training_client(BASE, rank=4, user_metadata={"lr": "1"}).result()
        inputs = {"target_tokens": np.array(TOKENS), "weights": np.ones(4, np.float32)}
        datum = types.Datum(model_input=types.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)
        for _ in range(2):
            model.forward_backward([datum], "cross_entropy").result()
        model.forward([datum], "cross_entropy").result()
        with pytest.raises(tinker.RequestFailedError):
            model.forward_backward([datum], "no_such_loss").result()
        model.optim_step(types.AdamParams()).result()
        model.save_state("kept").result()
        sampler = model.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=5, stop=[])
        sampler.sample(types.ModelInput.from_ints(TOKENS), num_samples=1, sampling_params=params).result()
        return model.model_id.partition(":")[0]


@pytest.fixture
def rest_client(server: LiveServer) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=KEY)


def search(rest_client: tinker.RestClient, **query: object) -> types.SessionSearchResponse:
    return rest_client.search_sessions(types.SessionSearchRequest(**query)).result()  # type: ignore[arg-type]


def cli(server: LiveServer, *arguments: str, cwd: Path | None = None) -> str:
    environment = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
    command = [str(Path(sys.executable).with_name("tinker")), *arguments]
    completed = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=120, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def hours() -> tuple[str, str]:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return tuple(f"{hour + timedelta(hours=offset):%Y-%m-%dT%H:%M:%SZ}" for offset in (-1, 1))  # type: ignore[return-value]


@pytest.mark.parametrize("raised", [None, ValueError, KeyboardInterrupt])
def test_the_end_of_the_block_tells_how_the_session_ended(
    server: LiveServer, rest_client: tinker.RestClient, raised: type[BaseException] | None
) -> None:
    name = f"ends with {raised}"
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY, display_name=name)
    with service if raised is None else pytest.raises(raised), service:
        service.create_lora_training_client(BASE, rank=1).result()
        if raised:
            raise raised
    (session,) = search(rest_client, display_name=name).sessions
    assert session.status is not None and session.status.type == "client_finished"
    reason = {None: "success", ValueError: "errored", KeyboardInterrupt: "interrupted"}[raised]
    assert session.status.reason.type == reason


def test_the_sdk_finds_sessions_and_pages_through_them(used_session: str, rest_client: tinker.RestClient) -> None:
    page_of_matches = search(rest_client, display_name="well worked", user_metadata={"run": "7"})
    (session,) = page_of_matches.sessions
    assert (session.session_id, session.project_id, session.checkpoints_count) == (used_session, "p", 1)
    assert page_of_matches.next_cursor is None
    everything = search(rest_client, limit=200).sessions
    session_ids: list[str] = []
    cursor = None
    while True:
        page = search(rest_client, limit=1, cursor=cursor)
        session_ids += [session.session_id for session in page.sessions]
        if (cursor := page.next_cursor) is None:
            break
    assert session_ids == [session.session_id for session in everything]


def test_a_run_shows_its_metadata_and_moves_with_its_session(used_session: str, rest_client: tinker.RestClient) -> None:
    (run,) = rest_client.list_training_runs(project_id="p").result().training_runs
    assert run.training_run_id.startswith(used_session)
    assert run.user_metadata == {"lr": "1"}
    rest_client.assign_session_project(used_session, "q").result()
    assert rest_client.list_training_runs(project_id="p").result().cursor.total_count == 0
    assert rest_client.list_training_runs(project_id="q", access_scope="accessible").result().cursor.total_count == 1
    rest_client.assign_session_project(used_session, "p").result()
    assert used_session in rest_client.list_sessions(limit=1000).result().sessions
    assert len(rest_client.get_session(used_session).result().training_run_ids) == 1


def test_the_command_line_shows_usage(server: LiveServer, used_session: str) -> None:
    usage = json.loads(cli(server, "--format", "json", "billing", "usage", *hours()))
    session_rows = [row for row in usage["data"] if row["session_id"] == used_session]
    totals: dict[str, int] = {}
    for row in session_rows:
        info = row["event_info"]
        name = f"{info['type']} cached" if info.get("cached") else info["type"]
        totals[name] = totals.get(name, 0) + info.get("token_count", info.get("count"))
    assert totals.pop("sampling_prefill", 0) + totals.pop("sampling_prefill cached", 0) == 4
    assert totals == {"training": 12, "sampling_sample": 5, "checkpoint": 1}
    assert {row["project_id"] for row in session_rows} == {"p"}
    assert {row["estimated_cost_usd"] for row in session_rows} == {None}
    assert usage["sessions"][used_session] == {"user_metadata": {"run": "7"}}
    assert "hourly usage row(s)" in cli(server, "billing", "usage", *hours())
    assert used_session in cli(server, "billing", "usage", *hours(), "--csv", "-")


def test_the_command_line_shows_what_is_stored(server: LiveServer, used_session: str) -> None:
    stored = json.loads(cli(server, "--format", "json", "billing", "checkpoint-storage", "--project-id", "p"))
    (row,) = stored["data"]
    stored_bytes = sum(path.stat().st_size for path in (server.data_dir / "checkpoints").rglob("*") if path.is_file())
    assert row["checkpoint_count"] == 1
    assert 0 < row["size_bytes"] <= stored_bytes
    assert "Current checkpoint storage" in cli(server, "billing", "checkpoint-storage")


def test_the_command_line_exports_a_trace(server: LiveServer, used_session: str, tmp_path: Path) -> None:
    cli(server, "session", "export-trace", used_session, cwd=tmp_path)
    trace = json.loads((tmp_path / f"{used_session}.pftrace").read_bytes())
    started = [event for event in trace["traceEvents"] if event["ph"] == "b"]
    kinds = [event["name"] for event in started]
    assert (kinds.count("forward_backward"), kinds.count("forward"), kinds.count("sample")) == (3, 1, 1)
    assert {event["args"]["state"] for event in started if "args" in event} == {"done", "refused"}
    end_times = {(event["id"], event["name"]): event["ts"] for event in trace["traceEvents"] if event["ph"] == "e"}
    assert all(end_times[event["id"], event["name"]] >= event["ts"] for event in started)
    assert cli(server, "session", "export-trace", used_session, "--url-only").startswith(server.url)


def test_the_audit_log_tells_the_story_of_a_session(server: LiveServer, used_session: str) -> None:
    admin = tinker.AdminClient(base_url=server.url, api_key=KEY)
    today = admin.get_audit_log().result().entries
    session_entries = [
        entry for entry in today if used_session in json.dumps(entry.event_details) and "project" not in entry.event
    ]
    assert [entry.event for entry in session_entries] == [
        "session_opened",
        "model_created",
        "checkpoint_saved",
        "session_finished",
    ]
    saved = session_entries[2]
    assert saved.tinker_path == f"tinker://{used_session}:train:0/weights/kept"
    only = admin.get_audit_log(event_type="checkpoints", day=date.today()).result().entries
    assert {entry.event.partition("_")[0] for entry in only} <= {"checkpoint"}
    assert admin.get_audit_log(day=date(2020, 1, 1)).result().entries == []


REPORTING_CLIENT = """
import sys, time
import tinker
from tinker import types
from tinker.lib.api_future_impl import _APIFuture

with tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2]) as service:
    model = service.create_lora_training_client("tinsmith/nano", rank=1).result()
    unknown = types.UntypedAPIFuture(request_id="nobody", model_id=model.model_id)
    future = _APIFuture(types.OptimStepResponse, model.holder, unknown, time.time(), "OptimStep")
    try:
        future.result()
    except ValueError as error:
        print("failed:", error)
"""


def test_a_report_of_a_failed_request_leaves_its_key_nowhere(server: LiveServer) -> None:
    secret = KEY + "-reported"
    command = [sys.executable, "-c", REPORTING_CLIENT, server.url, secret]
    environment = {**os.environ, "TINKER_TELEMETRY": "1"}
    completed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert completed.returncode == 0, completed.stderr
    assert "failed:" in completed.stdout
    deadline = time.monotonic() + 20
    while "'GENERIC_EVENT'" not in (log := (server.data_dir / "server.log").read_text()):
        assert time.monotonic() < deadline, log[-2000:]
        time.sleep(0.2)
    assert "ERROR" in log.partition("telemetry")[2]
    for path in server.data_dir.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
    assert "request_headers" not in log and "APIFuture" not in log
