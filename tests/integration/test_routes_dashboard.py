"""The routes behind the dashboard, and the files that it is made of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sqlalchemy as sa

from support.http_harness import ALICE, BASE, BOB, Harness, close, make_harness, sample_request
from tinsmith.api.dashboard import routes
from tinsmith.auth.keys import Keys
from tinsmith.auth.quotas import QuotaLimits
from tinsmith.cluster.engines import Engines, Seat
from tinsmith.db.schema import BATCH_JOBS, MODELS
from tinsmith.db.statements import execute
from tinsmith.store.futures import Futures, NewFuture
from tinsmith.store.history import Curves, KeptSequence, RecentStep, SampleContent, keeping, new_sample
from tinsmith.store.overview import Census

FILES = Path(routes.__file__).parent / "static"
VENDORED = {"uplot.min.js", "uplot.min.css", "uplot.LICENSE.txt"}


# Metrics.


def test_metrics_of_a_client_are_read_back_with_the_servers(harness: Harness) -> None:
    model_id = harness.model()
    with harness.services.models._db.write() as connection:
        execute(connection, Curves(harness.services.models._db).recording(model_id, 1, {"loss_per_token": 2.5}))
    assert harness.ok("log_metrics", {"model_id": model_id, "metrics": {"reward": 1}}) == {
        "model_id": model_id,
        "step": 1,
    }
    assert harness.ok("log_metrics", {"model_id": model_id, "step": 4, "metrics": {"reward": 2}})["step"] == 4
    found = harness.get(f"training_runs/{model_id}/metrics").json()
    assert [(point["source"], point["step"], point["metrics"]) for point in found["points"]] == [
        ("client", 1, {"reward": 1.0}),
        ("client", 4, {"reward": 2.0}),
        ("server", 1, {"loss_per_token": 2.5}),
    ]
    later = harness.get(f"training_runs/{model_id}/metrics?after={found['cursor'] + 60}").json()
    assert later == {"points": [], "cursor": found["cursor"] + 60}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "metrics is missing"),
        ({"metrics": {}}, "metrics has 0 names"),
        ({"metrics": {f"n{number}": 1 for number in range(65)}}, "metrics has 65 names"),
        ({"metrics": {"reward": "high"}}, "metrics.reward is 'high'"),
        ({"metrics": {"reward": True}}, "metrics.reward is True"),
        ({"metrics": {"reward": None}}, "metrics.reward is None"),
        ({"metrics": {"": 1}}, "metrics has the name ''"),
        ({"metrics": {"x" * 65: 1}}, "1 to 64 printable"),
        ({"metrics": {"a\nb": 1}}, "printable"),
        ({"metrics": {"reward": 1}, "step": -1}, "step is -1"),
        ({"metrics": {"reward": 1}, "step": 2**53}, f"step is {2**53}"),
        ({"metrics": {"reward": 1}, "step": 1.5}, "step is 1.5"),
        ({"metrics": {"reward": 1}, "epoch": 3}, "epoch is not supported"),
    ],
)
def test_metrics_that_are_none_are_refused_with_the_reason(
    harness: Harness, body: dict[str, object], words: str
) -> None:
    model_id = harness.model()
    answer = harness.post("log_metrics", {"model_id": model_id} | body)
    assert answer.status_code == 400
    assert words in answer.json()["detail"]
    assert harness.get(f"training_runs/{model_id}/metrics").json()["points"] == []


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400, "NaN", "Infinity"])
def test_a_number_that_is_none_is_refused(harness: Harness, number: str) -> None:
    body = f'{{"model_id": "{harness.model()}", "metrics": {{"reward": {number}}}}}'
    headers = {"X-API-Key": ALICE, "Content-Type": "application/json"}
    answer = harness.client.post("/api/v1/log_metrics", content=body, headers=headers)
    assert answer.status_code == 400 and answer.json()["detail"]


@pytest.mark.parametrize("after", ["x", "-1", "nan", "inf", "1e300", "%00"])
def test_a_cursor_that_is_none_is_refused(harness: Harness, after: str) -> None:
    assert harness.get(f"training_runs/{harness.model()}/metrics?after={after}").status_code == 400


# Runs.


def named(harness: Harness, name: str | None, number: int = 0, **changes: object) -> str:
    session_id = harness.ok("create_session", {"tags": [], "display_name": name, "project_id": f"of {name}"})
    return harness.model(session_id["session_id"], number, **changes)


def ids(harness: Harness, query: str = "", key: str = ALICE) -> list[str]:
    answer = harness.get(f"dashboard/runs{query}", key)
    assert answer.status_code == 200, answer.text
    return [run["model_id"] for run in answer.json()["runs"]]


def test_runs_are_found_by_all_their_names_and_sorted(harness: Harness) -> None:
    one = named(harness, "Maths, first try")
    two = named(harness, "maths again", lora_config={"rank": 4})
    three = named(harness, None, lora_config={"rank": 64})
    harness.model(key=BOB)
    assert ids(harness) == [three, two, one]
    assert ids(harness, "?search=MATHS") == [two, one]
    assert ids(harness, "?search=try+maths") == [one]
    assert ids(harness, "?search=of+maths+again") == [two]
    assert ids(harness, f"?search={two[:20]}") == [two]
    assert ids(harness, "?search=%25") == ids(harness, "?search=_aths") == []
    assert ids(harness, "?sort=lora_rank&order=asc") == [two, one, three]
    assert ids(harness, "?sort=lora_rank") == [three, one, two]
    assert ids(harness, "?limit=1&offset=1") == [two]


@pytest.mark.parametrize("query", ["sort=tenant_id", "sort=", "order=up", "search=" + "x" * 201, "limit=x"])
def test_a_list_of_runs_that_cannot_be_is_refused(harness: Harness, query: str) -> None:
    assert harness.get(f"dashboard/runs?{query}").status_code == 400


def test_a_run_is_shown_with_its_last_metrics(harness: Harness) -> None:
    model_id = named(harness, "mine")
    empty = harness.get(f"dashboard/runs/{model_id}").json()
    assert (empty["step"], empty["metrics"]) == (0, {})
    db = harness.services.models._db
    with db.write() as connection:
        for step in (1, 2):
            execute(connection, Curves(db).recording(model_id, step, {"loss_per_token": 1 / step}))
    harness.ok("log_metrics", {"model_id": model_id, "step": 9, "metrics": {"reward": 1}})
    run = harness.get(f"dashboard/runs/{model_id}").json()
    assert (run["step"], run["metrics"]) == (2, {"loss_per_token": 0.5})
    assert (run["display_name"], run["project_id"], run["state"], run["owner"]) == ("mine", "of mine", "ready", "alice")
    assert harness.get("dashboard/runs").json()["runs"] == [run]


def test_a_page_of_a_thousand_runs_is_a_page(harness: Harness) -> None:
    first = harness.model()
    with harness.services.models._db.write() as connection:
        row = dict(connection.execute(sa.select(MODELS).where(MODELS.c.model_id == first)).one()._mapping)
        rows = [row | {"model_id": f"s:train:{number}", "created_at": float(number)} for number in range(1, 1001)]
        connection.execute(MODELS.insert(), rows)
    page = harness.get("dashboard/runs?limit=50&offset=500").json()
    assert page["cursor"] == {"offset": 500, "limit": 50, "total_count": 1001}
    assert [run["model_id"] for run in page["runs"]] == [f"s:train:{number}" for number in range(501, 451, -1)]


# The queue.


def test_the_queue_shows_what_waits_of_ones_own(harness: Harness) -> None:
    session_id = harness.session()
    model_id, sampler = harness.model(session_id), harness.sampler(session_id)
    for seq_id in (1, 2):
        harness.ok("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {}})
    harness.ok("asample", sample_request(sampler))
    other = harness.model(key=BOB)
    harness.ok("optim_step", {"model_id": other, "seq_id": 1, "adam_params": {}}, BOB)
    found = harness.get("dashboard/queue").json()["waiting"]
    assert [(one["kind"], one["lane"], one["requests"]) for one in found] == [
        ("optim_step", model_id, 2),
        ("sample", sampler, 1),
    ]
    assert found[1]["tokens"] > 0


def test_a_step_shows_ones_own_runs_and_of_others_only_how_much(harness: Harness) -> None:
    shares = {"alice": {"s:train:0": 10, "s:train:1": 5}, "bob": {"secret:train:0": 25}}
    harness.services.recent_steps.add(BASE, [RecentStep(1000.0, 0.25, 3, 1, 0, 40, shares)])
    engine = harness.get("dashboard/queue").json()["engines"][0]
    assert (engine["base_model"], engine["state"]) == (BASE, "active")
    (step,) = engine["steps"]
    assert (step["num_tokens"], step["own_tokens"], step["num_tenants"]) == (40, 15, 2)
    assert step["own_runs"] == [{"model_id": "s:train:0", "tokens": 10}, {"model_id": "s:train:1", "tokens": 5}]
    assert "secret" not in harness.get("dashboard/queue").text and "bob" not in harness.get("dashboard/queue").text
    assert harness.get("dashboard/queue", BOB).json()["engines"][0]["steps"][0]["own_tokens"] == 25


def test_an_engine_that_does_not_work_says_why(harness: Harness) -> None:
    harness.queue[BASE] = ("paused_capacity", "it is loading")
    found = harness.get("dashboard/overview").json()["engines"][0]
    assert (found["state"], found["reason"]) == ("paused_capacity", "it is loading")


def test_the_overview_lists_engines_and_samplers_with_what_is_ones_own(harness: Harness) -> None:
    database = harness.services.models._db
    engines = Engines(database, "here")
    lease = engines.take(Seat(BASE, "sampler", 1), 60)
    engines.set_state(Seat(BASE, "sampler", 1), "ready")
    gone = engines.take(Seat(BASE), 0.0)
    run = harness.model()
    with database.write() as connection:
        connection.execute(MODELS.update().where(MODELS.c.model_id == run).values(engine_id=gone.engine_id))
    Futures(database).submit(NewFuture("r", "alice", "s", BASE, "sample", b"", executor=lease.engine_id))
    seats = {seat["name"]: seat for seat in harness.get("dashboard/overview").json()["seats"]}
    assert list(seats) == [gone.engine_id, lease.engine_id]
    shown = [(seat["kind"], seat["state"], seat["runs"], seat["waiting_requests"]) for seat in seats.values()]
    assert shown == [("engine", "silent", 1, 0), ("sampler", "ready", 0, 1)]
    others = harness.get("dashboard/overview", BOB).json()["seats"]
    assert [(seat["runs"], seat["waiting_requests"]) for seat in others] == [(0, 0), (0, 0)]


# What a tenant has.


def test_the_overview_counts_what_is_ones_own(harness: Harness) -> None:
    session_id = harness.session()
    model_id = harness.model(session_id)
    harness.saved(model_id)
    harness.ok("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    counts = harness.get("dashboard/overview").json()["counts"]
    ones = ("runs", "loaded_runs", "sessions", "active_sessions", "checkpoints", "waiting_requests")
    assert {name: counts[name] for name in ones} == dict.fromkeys(ones, 1)
    assert counts["checkpoint_bytes"] > 0 and counts["waiting_bytes"] > 0
    assert set(harness.get("dashboard/overview", BOB).json()["counts"].values()) == {0}


def test_a_session_is_active_in_every_place_until_its_client_says_farewell(harness: Harness) -> None:
    kept, ended = harness.session(), harness.session()
    harness.post(f"sessions/{ended}/finish", {"reason": {"type": "success"}}).raise_for_status()
    counts = harness.get("dashboard/overview").json()["counts"]
    listed = harness.post("sessions/search", {"statuses": [{"type": "active"}]}).json()["sessions"]
    census = {one.meter: one.value for one in Census(harness.services.models._db, "server").counts()}
    assert [one["session_id"] for one in listed] == [kept]
    assert (counts["active_sessions"], counts["sessions"]) == (1, 2)
    assert census["tinsmith_sessions_open"] == 1


def test_a_job_that_is_being_cancelled_is_not_finished(harness: Harness) -> None:
    row = {"tenant_id": "alice", "name": "", "pool": "local", "priority": 0, "weight": 1.0, "spec": {}, "sealed": True}
    row |= {"max_failed_rows": 0.0, "cleaned": False, "created_at": 0.0, "updated_at": 0.0}
    with harness.services.models._db.write() as connection:
        connection.execute(BATCH_JOBS.insert(), [row | {"status": one} for one in ("CANCELLING", "RUNNING", "FAILED")])
    counts = harness.get("dashboard/overview").json()["counts"]
    assert (counts["unfinished_jobs"], counts["jobs"]) == (2, 3)


def test_keys_and_quotas_of_the_tenant_are_shown_without_secrets(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, limits=QuotaLimits(models=4, tokens_per_minute=100))
    try:
        keys = Keys(harness.services.models._db)
        made, secret = keys.create("alice", "laptop")
        keys.revoke(made.key_id)
        harness.model()
        answer = harness.get("dashboard/tenant")
        assert secret not in answer.text and "digest" not in answer.text
        found = answer.json()
        assert (found["tenant_id"], found["takes_any_key"]) == ("alice", False)
        mine, other = found["keys"]
        assert mine["current"] and mine["revoked_at"] is None
        assert (other["name"], other["current"], bool(other["revoked_at"])) == ("laptop", False, True)
        quotas = {one["name"]: (one["limit"], one["used"]) for one in found["quotas"]}
        assert quotas["models"] == (4, 1)
        assert quotas["tokens_per_minute"] == (100, None)
        assert len(harness.get("dashboard/tenant", BOB).json()["keys"]) == 1
    finally:
        close(harness)


def test_without_keys_the_tenant_is_local(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, local=True)
    try:
        found = harness.get("dashboard/tenant", "tml-any").json()
        assert (found["tenant_id"], found["takes_any_key"], found["keys"]) == ("local", True, [])
    finally:
        close(harness)


# Samples.


def test_a_sample_without_a_tokenizer_is_shown_as_ids(harness: Harness) -> None:
    content = SampleContent([1, 2], 0, {"temperature": 0.5}, [KeptSequence([3], [-0.25], "stop")])
    with harness.services.models._db.write() as connection:
        for statement in keeping(new_sample("s:sample:0:0", "alice", "s", BASE, None), content, 10):
            execute(connection, statement)
    (listed,) = harness.get("dashboard/samples").json()["samples"]
    assert listed["request_id"] == "s:sample:0:0" and listed["answer_begins"] is None
    found = harness.get("dashboard/samples/s:sample:0:0").json()
    assert found["prompt"] == {"tokens": [1, 2], "pieces": None, "text": None}
    assert found["sequences"] == [
        {"tokens": [3], "pieces": None, "text": None, "logprobs": [-0.25], "stop_reason": "stop"}
    ]
    assert found["params"] == {"temperature": 0.5} and found["turns_before"] == []
    assert harness.get("dashboard/samples?search=" + "x" * 201).status_code == 400


def test_a_link_to_an_archive_leads_to_it(harness: Harness) -> None:
    path = harness.saved(harness.model()).removeprefix("tinker://")
    run_id, kind, name = path.split("/")
    link = harness.get(f"training_runs/{run_id}/checkpoints/{kind}/{name}/archive_link").json()
    answer = harness.client.get(link["url"])
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-tar"


# The files.


def test_the_page_needs_no_key_and_lets_nothing_in(harness: Harness) -> None:
    answer = harness.client.get("/", headers={"Accept": "text/html,*/*"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(maxsplit=1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "set-cookie" not in answer.headers


def test_a_client_that_is_no_browser_is_told_the_addresses(harness: Harness) -> None:
    answer = harness.client.get("/")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert "TINKER_BASE_URL=http://" in answer.text and "<" not in answer.text
    assert harness.client.get("/healthz").json() == {"status": "ok"}


def test_each_file_is_sent_once_and_asked_for_again(harness: Harness) -> None:
    for name, file in routes.assets().items():
        answer = harness.client.get(f"/dashboard/{name}")
        assert answer.content == file.content
        assert answer.headers["content-type"].startswith(file.media_type)
        again = harness.client.get(f"/dashboard/{name}", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for name in ("__init__.py", "..%2Fdb.py", "nothing.js", "%00", ""):
        assert harness.client.get(f"/dashboard/{name}").status_code == 404
    assert harness.client.post("/").status_code == 405


def test_the_page_names_files_that_there_are_and_nothing_of_elsewhere() -> None:
    page = (FILES / "index.html").read_text()
    named = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert named and all(name.startswith("/dashboard/") for name in named)
    assert {name.removeprefix("/dashboard/") for name in named} <= set(routes.assets())
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|style=", page), "nothing inline"


@pytest.mark.parametrize("path", sorted(FILES.iterdir()), ids=lambda path: path.name)
def test_the_dashboards_files_stay_readable_and_local(path: Path) -> None:
    text = path.read_text()
    if path.name in VENDORED:
        assert path.stat().st_size < 100_000
        return
    assert text.isascii()
    assert len(text.splitlines()) <= 500
    addresses = set(re.findall(r"https?://[^\s\"']+", text)) - {"http://www.w3.org/2000/svg"}
    assert not addresses, "no other origin"
    if path.suffix == ".js":
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        assert "document.cookie" not in text
        imported = re.findall(r'from "(.*?)"', text)
        assert all((FILES / name).is_file() for name in imported)
