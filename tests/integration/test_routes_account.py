"""A tenant's own data: search of sessions, projects, usage, audit log, traces."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa
from tinker.types import (
    AuditLogResponse,
    BillingUsageResponse,
    CheckpointsListResponse,
    CurrentCheckpointStorageUsageResponse,
    SessionSearchResponse,
    TrainingRunsResponse,
)

from support.http_harness import ALICE, BASE, BOB, Harness, pass_bytes, sample_request, send_pass
from tinsmith.db.schema import AUDIT, FUTURES, SESSIONS
from tinsmith.store.futures import SampleCost, Settlement


def open_session(harness: Harness, key: str = ALICE, **fields: object) -> str:
    return harness.ok("create_session", {"tags": [], "sdk_version": "x", **fields}, key)["session_id"]


def search_sessions(harness: Harness, key: str = ALICE, **query: object) -> list[str]:
    answer = SessionSearchResponse.model_validate(harness.ok("sessions/search", query, key))
    return [session.session_id for session in answer.sessions]


def urn(tenant_id: str) -> str:
    return f"tml:organization_user:{tenant_id}"


def end(harness: Harness, session_id: str, reason: str, detail: str | None = None) -> None:
    harness.ok(f"sessions/{session_id}/finish", {"reason": {"type": reason}, "detail": detail})


# Sessions.


def test_a_farewell_is_kept_as_the_client_said_it(harness: Harness) -> None:
    session_id = open_session(harness)
    end(harness, session_id, "errored", "out of memory: all of it")
    end(harness, session_id, "success")
    (session,) = harness.ok("sessions/search", {})["sessions"]
    reason = {"type": "errored"}
    assert session["status"] == {"type": "client_finished", "reason": reason, "detail": "out of memory: all of it"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "reason is missing"),
        ({"reason": {}}, "reason.type is missing"),
        ({"reason": {"type": "bored"}}, "reason.type is 'bored'; it must be one of success"),
        ({"reason": {"type": "success"}, "detail": 3}, "detail is 3"),
    ],
)
def test_a_farewell_of_another_form_ends_nothing(harness: Harness, body: object, words: str) -> None:
    session_id = open_session(harness)
    answer = harness.post(f"sessions/{session_id}/finish", body)
    assert answer.status_code == 400
    assert words in answer.json()["detail"]
    assert harness.services.sessions.get("alice", session_id).state == "active"


def test_a_farewell_after_the_expiry_changes_nothing(harness: Harness) -> None:
    session_id = open_session(harness)
    harness.services.sessions.close(session_id, "no heartbeat for 300 s")
    end(harness, session_id, "success")
    (session,) = harness.ok("sessions/search", {})["sessions"]
    assert session["status"] is None


def test_a_session_moves_between_projects_and_its_runs_with_it(harness: Harness) -> None:
    first, second = open_session(harness, project_id="p"), open_session(harness)
    models = [harness.model(first), harness.model(second)]
    for model_id in models:
        harness.checkpoint(model_id)

    def of_project(project_id: str) -> tuple[list[str], list[str], list[str]]:
        runs = TrainingRunsResponse.model_validate(harness.get(f"training_runs?project_id={project_id}").json())
        listing = CheckpointsListResponse.model_validate(harness.get(f"checkpoints?project_id={project_id}").json())
        assert runs.cursor.total_count == len(runs.training_runs)
        assert listing.cursor is not None and listing.cursor.total_count == len(listing.checkpoints)
        return (
            harness.get(f"sessions?project_id={project_id}").json()["sessions"],
            [run.training_run_id for run in runs.training_runs],
            [checkpoint.tinker_path for checkpoint in listing.checkpoints],
        )

    assert of_project("p") == ([first], [models[0]], [f"tinker://{models[0]}/weights/one"])
    assert of_project("q") == ([], [], [])
    assert harness.send("PUT", f"sessions/{first}/project", {"project_id": "q"}).status_code == 200
    assert of_project("q") == ([first], [models[0]], [f"tinker://{models[0]}/weights/one"])
    assert len(harness.get("training_runs").json()["training_runs"]) == 2
    assert harness.send("PUT", f"sessions/{first}/project", {"project_id": ""}).status_code == 400


@pytest.mark.parametrize("path", ["sessions", "training_runs"])
def test_the_scope_is_owned_or_accessible_which_is_the_same(harness: Harness, path: str) -> None:
    harness.model()
    harness.model(key=BOB)
    noun = "sessions" if path == "sessions" else "training_runs"
    assert len(harness.get(f"{path}?access_scope=accessible").json()[noun]) == 1
    answer = harness.get(f"{path}?access_scope=everyone")
    assert answer.status_code == 400
    assert "access_scope is 'everyone'" in answer.json()["detail"]


# Search.


def test_sessions_are_found_by_every_filter(harness: Harness) -> None:
    red = open_session(harness, project_id="p", display_name="Red Fox of June", user_metadata={"lr": "1", "n": 3})
    blue = open_session(harness, project_id="q", display_name="Blue fox", user_metadata={"lr": "1"})
    bare = open_session(harness)
    open_session(harness, BOB, display_name="Red fox", project_id="p")
    assert search_sessions(harness) == [bare, blue, red]
    assert search_sessions(harness, session_id=red) == [red]
    assert search_sessions(harness, session_id="nobody") == []
    assert search_sessions(harness, display_name="FOX") == [blue, red]
    assert search_sessions(harness, display_name="june RED") == [red]
    assert search_sessions(harness, display_name="blue", session_id=bare) == [bare, blue], "either one matches"
    assert search_sessions(harness, project_ids=["p"]) == [red]
    assert search_sessions(harness, project_ids=["p", "q"]) == [blue, red]
    assert search_sessions(harness, project_ids=[]) == []
    assert search_sessions(harness, user_metadata={"lr": "1"}) == [blue, red]
    assert search_sessions(harness, user_metadata={"lr": "1", "n": "3"}) == [red]
    assert search_sessions(harness, user_metadata={"lr": "2"}) == []
    assert search_sessions(harness, project_ids=["p"], display_name="blue") == []
    assert search_sessions(harness, owner={"type": "accessible"}) == [bare, blue, red]
    assert search_sessions(harness, owner={"type": "user", "owner_urns": [urn("alice"), urn("bob")]}) == [
        bare,
        blue,
        red,
    ]
    assert search_sessions(harness, owner={"type": "user", "owner_urns": [urn("bob")]}) == []


def test_sessions_are_found_by_how_they_ended(harness: Harness) -> None:
    active, good, bad, silent = (open_session(harness) for _ in range(4))
    end(harness, good, "success")
    end(harness, bad, "errored")
    harness.services.sessions.close(silent, "no heartbeat for 300 s")
    assert search_sessions(harness, statuses=[{"type": "active"}]) == [active]
    assert search_sessions(harness, statuses=[{"type": "client_finished"}]) == [bad, good]
    assert search_sessions(harness, statuses=[{"type": "client_finished", "reasons": ["errored"]}]) == [bad]
    assert search_sessions(
        harness, statuses=[{"type": "client_finished", "reasons": ["success"]}, {"type": "active"}]
    ) == [
        good,
        active,
    ]
    assert search_sessions(harness, statuses=[{"type": "failed"}, {"type": "cancelled"}]) == []


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
@pytest.mark.parametrize("filtered", [False, True])
def test_pages_by_cursor_show_every_session_once(harness: Harness, limit: int, filtered: bool) -> None:
    sessions = [open_session(harness, display_name="even" if index % 2 else "odd") for index in range(7)]
    with harness.services.models._db.write() as connection:  # four at the same moment, none at a full microsecond
        at = SESSIONS.update().where(SESSIONS.c.session_id.in_(sessions[2:6]))
        connection.execute(at.values(created_at=SESSIONS.c.created_at * 0 + 1_790_000_000.1234567))
    session_ids: list[str] = []
    query: dict[str, object] = {"limit": limit}
    if filtered:
        query["display_name"] = "even"
    while True:
        answer = harness.ok("sessions/search", query)
        page = SessionSearchResponse.model_validate(answer)
        assert len(page.sessions) <= limit
        session_ids += [session.session_id for session in page.sessions]
        assert len(session_ids) <= len(sessions), "a session is shown twice"
        if page.next_cursor is None:
            break
        assert len(page.sessions) == limit
        query["cursor"] = page.next_cursor.model_dump(mode="json")
    assert sorted(session_ids) == sorted(sessions[1::2] if filtered else sessions)


def test_a_search_reads_on_until_its_page_is_full(harness: Harness) -> None:
    searched_id = open_session(harness, display_name="wanted")
    row = harness.services.sessions.get("alice", searched_id)
    with harness.services.models._db.write() as connection:
        values = {"tenant_id": "alice", "state": "active", "tags": [], "last_heartbeat_at": 0.0}
        rows = [values | {"session_id": f"s{n}", "created_at": row.created_at + 1 + n} for n in range(1201)]
        connection.execute(SESSIONS.insert(), rows)
    assert search_sessions(harness, display_name="wanted") == [searched_id]


def test_a_search_result_says_what_the_session_stores(harness: Harness) -> None:
    session_id = open_session(harness, project_id="p", display_name="mine", user_metadata={"n": 3})
    model_id = harness.model(session_id)
    for name in ("one", "two"):
        harness.checkpoint(model_id, name=name)
    (session,) = SessionSearchResponse.model_validate(harness.ok("sessions/search", {})).sessions
    assert (session.checkpoints_count, session.checkpoint_storage_bytes) == (2, 14)
    assert (session.owner, session.project_id, session.display_name) == (urn("alice"), "p", "mine")
    assert session.user_metadata == {"n": "3"}
    assert session.created_at.tzinfo is not None


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"limit": 0}, "limit is 0; it must lie between 1 and 200"),
        ({"limit": 201}, "limit is 201"),
        ({"display_name": ""}, "display_name is ''; it must be a string of 1 to"),
        ({"statuses": []}, "statuses is []"),
        ({"statuses": [{"type": "asleep"}]}, "statuses[0].type is 'asleep'"),
        ({"statuses": [3]}, "statuses[0] is 3"),
        (
            {"statuses": [{"type": "client_finished", "reasons": []}]},
            "statuses[0].reasons is []; it must be",
        ),
        ({"statuses": [{"type": "client_finished", "reasons": ["bored"]}]}, "'bored'"),
        ({"owner": {"type": "king"}}, "owner.type is 'king'"),
        ({"owner": {"type": "user", "owner_urns": []}}, "owner.owner_urns is empty"),
        ({"user_metadata": {"a": 1}}, "user_metadata.a is 1"),
        ({"cursor": {"last_session_id": "x"}}, "cursor.last_created_at is missing"),
        ({"cursor": {"last_session_id": "x", "last_created_at": "yesterday"}}, "cursor.last_created_at is 'yesterday'"),
        ({"cursor": {"last_session_id": "x", "last_created_at": "2026-01-01T00:00:00"}}, "with a zone"),
        ({"colour": "red"}, "colour is not supported"),
    ],
)
def test_a_wrong_search_is_a_400_that_names_the_field(harness: Harness, query: object, words: str) -> None:
    answer = harness.post("sessions/search", query)
    assert answer.status_code == 400
    assert words in answer.json()["detail"]


# Usage.


def window(hours: int = 2) -> str:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    start, stop = hour - timedelta(hours=1), hour + timedelta(hours=hours - 1)
    return f"starting_on={start:%Y-%m-%dT%H:%M:%SZ}&ending_before={stop:%Y-%m-%dT%H:%M:%SZ}"


def test_usage_is_attributed_to_its_session(harness: Harness) -> None:
    session_id = open_session(harness, project_id="p", user_metadata={"team": "x"})
    model_id = harness.model(session_id)
    passed = send_pass(harness, pass_bytes(model_id, 1)).json()["request_id"]
    harness.settle(passed)
    sampler = harness.sampler(session_id)
    sampled = harness.ok("asample", sample_request(sampler))["request_id"]
    harness.services.futures.settle([Settlement(sampled, b"", cost=SampleCost(2, 1, 6))], {})
    usage = BillingUsageResponse.model_validate(harness.get(f"billing/usage/events?{window()}").json())
    events = [event.event_info.model_dump() for event in usage.data]
    assert events == [
        {"type": "sampling_sample", "token_count": 6},
        {"type": "training", "token_count": 3},
        {"type": "sampling_prefill", "cached": True, "token_count": 1},
        {"type": "sampling_prefill", "cached": False, "token_count": 1},
    ]
    event = usage.data[0]
    assert (event.session_id, event.project_id, event.base_model) == (session_id, "p", BASE)
    assert (event.user_id, event.user_name) == (urn("alice"), "alice")
    assert event.bucket_end - event.bucket_start == timedelta(hours=1)
    assert event.bucket_start <= datetime.now(UTC) < event.bucket_end
    assert event.estimated_cost_usd is None
    assert usage.sessions[session_id].user_metadata == {"team": "x"}
    assert harness.get(f"billing/usage/events?{window()}", BOB).json() == {"data": [], "sessions": {}}


def test_stored_checkpoints_are_listed_by_project(harness: Harness) -> None:
    for project in ("p", "p", None):
        harness.checkpoint(harness.model(open_session(harness, project_id=project)))
    answer = CurrentCheckpointStorageUsageResponse.model_validate(
        harness.get("billing/usage/checkpoints/current").json()
    )
    assert [(item.project_id, item.checkpoint_count, item.size_bytes) for item in answer.data] == [
        (None, 1, 7),
        ("p", 2, 14),
    ]
    assert answer.data[1].size_gigabytes == 14e-9
    assert answer.data[1].org_user_urn == urn("alice")
    assert (answer.data[1].user_email, answer.data[1].user_name) == ("alice@tinsmith.invalid", "alice")
    assert len(harness.get("billing/usage/checkpoints/current?project_id=p").json()["data"]) == 1
    assert harness.get("billing/usage/checkpoints/current", BOB).json() == {"data": []}
    events = BillingUsageResponse.model_validate(harness.get(f"billing/usage/events?{window()}").json()).data
    storage = [event for event in events if event.event_info.type == "storage"]
    assert {event.project_id for event in storage} == {None, "p"}
    assert all(0 <= event.event_info.gigabyte_hours < 14e-9 for event in storage)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("", "starting_on is missing"),
        ("starting_on=2026-07-13T00:00:00Z", "ending_before is missing"),
        ("starting_on=2026-07-13&ending_before=2026-07-14T00:00:00Z", "starting_on is '2026-07-13'"),
        ("starting_on=2026-07-13T00:30:00Z&ending_before=2026-07-14T00:00:00Z", "must be a full hour"),
        ("starting_on=2026-07-13T00:00:00Z&ending_before=2026-07-13T00:00:00Z", "must be after"),
        ("starting_on=2026-07-13T00:00:00Z&ending_before=2026-07-27T01:00:00Z", "at most 14 days"),
        ("starting_on=2226-07-13T00:00:00Z&ending_before=2226-07-14T00:00:00Z", "in the future"),
        ("starting_on=0001-01-01T00:00:00Z&ending_before=9999-12-31T23:00:00Z", "at most 14 days"),
        ("starting_on=0001-01-01T00:00:00%2B23:00&ending_before=0001-01-02T00:00:00Z", ""),
    ],
)
def test_a_wrong_window_is_a_400_that_says_so(harness: Harness, query: str, words: str) -> None:
    answer = harness.get(f"billing/usage/events?{query}")
    assert answer.status_code == 400 if words else answer.status_code in (200, 400)
    assert words in answer.json().get("detail", "")


# The audit log.


def events(harness: Harness, query: str = "", key: str = ALICE) -> list[str]:
    answer = AuditLogResponse.model_validate(harness.get(f"audit{query}", key).json())
    assert answer.entries == sorted(answer.entries, key=lambda entry: entry.timestamp)
    return [entry.event for entry in answer.entries]


def test_what_happened_to_a_session_is_in_the_log_once(harness: Harness) -> None:
    session_id = open_session(harness)
    harness.send("PUT", f"sessions/{session_id}/project", {"project_id": "p"})
    for _ in range(2):
        end(harness, session_id, "success")
    assert events(harness) == ["session_opened", "project_session_assigned", "session_finished"]
    assert events(harness, "?event_type=projects") == ["project_session_assigned"]
    assert events(harness, "?event_type=checkpoints") == []
    assert events(harness, key=BOB) == []
    entry = harness.get("audit").json()["entries"][2]
    assert entry["event_details"] == {"session_id": session_id, "reason": "success"}


def test_the_log_is_asked_for_by_day(harness: Harness) -> None:
    open_session(harness)
    with harness.services.models._db.write() as connection:
        day = datetime(2026, 1, 15, tzinfo=UTC).timestamp()
        for created_at in (day - 0.001, day, day + 86399.9, day + 86400):
            values = {"tenant_id": "alice", "event": f"e{created_at - day}", "details": {}, "created_at": created_at}
            connection.execute(AUDIT.insert().values(**values))
    assert events(harness, "?day=2026-01-15") == ["e0.0", "e86399.90000009537"]
    assert events(harness) == ["session_opened"]
    assert events(harness, f"?day={datetime.now(UTC):%Y-%m-%d}") == ["session_opened"]


@pytest.mark.parametrize("query", ["day=15.1.2026", "day=2026-13-01", "day=9999-12-31", "event_type=secrets"])
def test_a_wrong_question_to_the_log_is_a_400(harness: Harness, query: str) -> None:
    answer = harness.get(f"audit?{query}")
    assert answer.status_code == 400
    assert query.partition("=")[2] in answer.json()["detail"]


def test_old_entries_are_swept(harness: Harness) -> None:
    open_session(harness)
    created_at = harness.services.audit.entries("alice", "all", 0, 1e11)[0].created_at
    assert harness.services.audit.sweep(created_at) == 0
    assert harness.services.audit.sweep(created_at + 1) == 1
    with harness.services.models._db.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(AUDIT)) == 0


# Traces.


def test_a_trace_shows_every_request_in_the_lane_of_its_model_or_sampler(harness: Harness) -> None:
    session_id = harness.session()
    model_id, sampler = harness.model(session_id), harness.sampler(session_id)
    settled_id = send_pass(harness, pass_bytes(model_id, 1)).json()["request_id"]
    harness.settle(settled_id)
    pending = harness.ok("asample", sample_request(sampler))["request_id"]
    answer = harness.get(f"sessions/{session_id}/trace_export").json()
    assert answer["status"] == "ready"
    url = urlsplit(answer["url"])
    downloaded = harness.client.get(f"{url.path}?{url.query}")
    assert downloaded.status_code == 200
    trace = json.loads(downloaded.content)
    slices: dict[str, list[dict]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] != "M":
            slices.setdefault(event["id"], []).append(event)
    process_names = [event for event in trace["traceEvents"] if event["name"] == "process_name"]
    lanes = {event["pid"]: event["args"]["name"] for event in process_names}
    assert set(slices) == {f"{model_id}:0", settled_id, pending}
    start, stop = slices[settled_id]
    assert (start["ph"], stop["ph"], start["name"]) == ("b", "e", "forward_backward")
    assert start["ts"] <= stop["ts"]
    assert start["args"]["num_tokens"] == 3 and start["args"]["seq_id"] == 1
    assert lanes[start["pid"]] == model_id
    assert [event["ph"] for event in slices[pending]] == ["b"]
    assert lanes[slices[pending][0]["pid"]] == sampler


def test_a_trace_needs_its_link(harness: Harness) -> None:
    session_id, other = harness.session(), harness.session(BOB)
    url = urlsplit(harness.get(f"sessions/{session_id}/trace_export").json()["url"])
    assert harness.get(f"sessions/{session_id}/trace_export", BOB).status_code == 404
    empty = harness.client.get(f"{url.path}?{url.query}")
    assert empty.json()["traceEvents"] == []
    assert harness.client.get(f"{url.path.replace(session_id, other)}?{url.query}").status_code == 403
    assert harness.client.get(url.path).status_code == 403


def test_a_long_trace_is_read_in_parts(harness: Harness) -> None:
    with harness.services.models._db.write() as connection:
        row = {"tenant_id": "alice", "session_id": "s", "base_model": BASE, "kind": "sample", "state": "done"}
        row |= {"num_tokens": 1, "created_at": 1.0, "settled_at": 2.0, "sampling_session_id": "s:sample:0"}
        connection.execute(FUTURES.insert(), [row | {"request_id": str(n), "seq_id": n} for n in range(4001)])
    trace = json.loads(b"".join(harness.services.traces.write("s")))
    assert len(trace["traceEvents"]) == 2 + 2 * 4001


# Telemetry.


def test_a_report_is_bounded_and_its_words_go_nowhere(
    harness: Harness, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[dict] = []
    monkeypatch.setattr("tinsmith.api.routes.service.log.debug", lambda event, **words: logged.append(words))
    events = [
        {"event": "GENERIC_EVENT", "severity": "ERROR", "event_name": "tml-alice", "event_data": {"x": "tml-alice"}},
        {"event": "tml-alice", "severity": "tml-alice"},
        {"event": ["tml-alice"]},
        "tml-alice",
    ]
    assert harness.ok("telemetry", {"events": events}) == {"status": "accepted"}
    assert logged == [{"kinds": {"GENERIC_EVENT": 1, "other": 2}, "severities": {"ERROR": 1, "other": 2}}]
    for body in ({}, {"events": None}, {"events": {}}):
        assert harness.ok("telemetry", body) == {"status": "accepted"}
    assert "tml-alice" not in capsys.readouterr().out


def test_a_huge_report_is_refused_before_it_is_read(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.api.routes.service.MAX_BODY_BYTES", 1000)
    assert harness.post("telemetry", {"events": ["x" * 1000]}).status_code == 413
