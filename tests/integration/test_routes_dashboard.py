"""The dashboard's routes and static files."""

from __future__ import annotations

import math
import re
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from support.http_harness import ALICE, BASE, BOB, Harness, close, make_harness, sample_request
from tinsmith.api.dashboard import routes
from tinsmith.api.dashboard import warnings as dashboard_warnings
from tinsmith.api.dashboard.machine import Utilisation
from tinsmith.auth.keys import Keys
from tinsmith.auth.quotas import QuotaLimits
from tinsmith.cluster.engines import Engines, Seat
from tinsmith.db.schema import BATCH_JOBS, CHECKPOINTS, FUTURES, MODELS
from tinsmith.db.statements import execute
from tinsmith.store.curves import Curves
from tinsmith.store.database_counts import DatabaseCounts
from tinsmith.store.futures import Futures, NewFuture
from tinsmith.store.recent_steps import RecentStep

FILES = Path(routes.__file__).parent / "static"
VENDORED = {"uplot.min.js", "uplot.min.css", "uplot.LICENSE.txt"}


# Checkpoints.


def log_step(harness: Harness, model_id: str, step: int, loss: float) -> None:
    with harness.services.models._db.write() as connection:
        execute(
            connection, Curves(harness.services.models._db).step_statement(model_id, step, {"loss_per_token": loss})
        )


def test_a_checkpoint_has_the_metrics_of_the_step_at_which_it_was_saved(harness: Harness) -> None:
    model_id = harness.model()
    log_step(harness, model_id, 1, 2.5)
    log_step(harness, model_id, 2, 2.0)
    harness.ok("log_metrics", {"model_id": model_id, "step": 2, "metrics": {"reward": 0.5}})
    path = harness.checkpoint(model_id, name="early")
    log_step(harness, model_id, 3, 1.0)
    harness.ok("log_metrics", {"model_id": model_id, "step": 3, "metrics": {"reward": 0.9}})
    harness.checkpoint(model_id, name="late")
    page = harness.get("dashboard/checkpoints").json()
    late, early = page["checkpoints"]
    assert (late["step"], late["metrics"]) == (3, {"reward": 0.9, "loss_per_token": 1.0})
    assert (early["step"], early["metrics"]) == (2, {"reward": 0.5, "loss_per_token": 2.0})
    assert early["tinker_path"] == path and page["cursor"]["total_count"] == 2
    # One of an earlier release has no step: times tell what its run had.
    harness.services.models._db.execute(CHECKPOINTS.update().values(step=None))
    early = harness.get("dashboard/checkpoints").json()["checkpoints"][1]
    assert (early["step"], early["metrics"]) == (2, {"reward": 0.5, "loss_per_token": 2.0})
    assert harness.client.get("/api/v1/dashboard/checkpoints", headers={"X-API-Key": BOB}).json()["checkpoints"] == []


def test_a_copy_of_a_checkpoint_has_its_step(harness: Harness) -> None:
    model_id = harness.model()
    log_step(harness, model_id, 7, 2.0)
    path = harness.save_checkpoint(model_id, name="one")
    harness.ok("copy_weights", {"source_path": path, "destination_project_id": "p"})
    assert [row["step"] for row in harness.get("dashboard/checkpoints").json()["checkpoints"]] == [7, 7]


def test_checkpoints_are_searched_by_words_and_by_run(harness: Harness) -> None:
    first, second = harness.model(), harness.model()
    harness.checkpoint(first, name="final_a")
    harness.checkpoint(second, name="final-b")
    harness.client.put(f"/api/v1/dashboard/runs/{second}", json={"name": "Sweep"}, headers={"X-API-Key": ALICE})

    def search(query: str) -> list[str]:
        rows = harness.get(f"dashboard/checkpoints?{query}").json()["checkpoints"]
        return [row["checkpoint_id"].partition("/")[2] for row in rows]

    assert search("search=FINAL+tiny") == ["final-b", "final_a"]
    assert search("search=l_a") == ["final_a"], "an underscore is no wildcard"
    assert search("search=sweep") == ["final-b"], "the name of its run"
    assert search(f"run_id={first}") == search(f"search=tinker://{first}/weights") == ["final_a"]
    assert search("search=nothing") == []


# Metrics.


def test_metrics_of_a_client_are_read_back_with_the_servers(harness: Harness) -> None:
    model_id = harness.model()
    with harness.services.models._db.write() as connection:
        execute(connection, Curves(harness.services.models._db).step_statement(model_id, 1, {"loss_per_token": 2.5}))
    assert harness.ok("log_metrics", {"model_id": model_id, "metrics": {"reward": 1}}) == {
        "model_id": model_id,
        "step": 1,
    }
    assert harness.ok("log_metrics", {"model_id": model_id, "step": 4, "metrics": {"reward": 2}})["step"] == 4
    page = harness.get(f"training_runs/{model_id}/metrics").json()
    assert [(point["source"], point["step"], point["metrics"]) for point in page["points"]] == [
        ("client", 1, {"reward": 1.0}),
        ("client", 4, {"reward": 2.0}),
        ("server", 1, {"loss_per_token": 2.5}),
    ]
    later = harness.get(f"training_runs/{model_id}/metrics?after={page['cursor'] + 60}").json()
    assert later == {"points": [], "cursor": page["cursor"] + 60}


def check_refused_metrics(harness: Harness, body: dict[str, object], words: str) -> None:
    """The refusal says why, and nothing is stored."""
    model_id = harness.model()
    answer = harness.post("log_metrics", {"model_id": model_id} | body)
    assert answer.status_code == 400
    assert words in answer.json()["detail"]
    assert harness.get(f"training_runs/{model_id}/metrics").json()["points"] == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "metrics is missing"),
        ({"metrics": {}}, "metrics has 0 names"),
        ({"metrics": {f"n{index}": 1 for index in range(65)}}, "metrics has 65 names"),
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
    check_refused_metrics(harness, body, words)


@pytest.mark.parametrize("literal", ["1e999", "-1e999", "1" + "0" * 400, "NaN", "Infinity"])
def test_a_number_that_is_none_is_refused(harness: Harness, literal: str) -> None:
    body = f'{{"model_id": "{harness.model()}", "metrics": {{"reward": {literal}}}}}'
    headers = {"X-API-Key": ALICE, "Content-Type": "application/json"}
    answer = harness.client.post("/api/v1/log_metrics", content=body, headers=headers)
    assert answer.status_code == 400 and answer.json()["detail"]


@pytest.mark.parametrize("after", ["x", "-1", "nan", "inf", "1e300", "%00"])
def test_a_cursor_that_is_none_is_refused(harness: Harness, after: str) -> None:
    assert harness.get(f"training_runs/{harness.model()}/metrics?after={after}").status_code == 400


def test_a_batch_of_points_is_logged_once_however_often_it_is_sent(harness: Harness) -> None:
    model_id = harness.model()
    points = [{"step": step, "metrics": {"reward": [0.0, 1.0, 2.0, 3.0, 4.0], "kl": step}} for step in (3, 1)]
    for _ in range(2):
        assert harness.ok("log_metrics", {"model_id": model_id, "points": points})["step"] == 1
    shown_points = harness.get(f"training_runs/{model_id}/metrics").json()["points"]
    levels = {"": 2.0, ":min": 0.0, ":p10": 0.4, ":p50": 2.0, ":p90": 3.6, ":max": 4.0}
    reward = {f"reward{suffix}": pytest.approx(value) for suffix, value in levels.items()}
    assert [(point["step"], point["metrics"]) for point in shown_points] == [
        (1, reward | {"kl": 1}),
        (3, reward | {"kl": 3}),
    ]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"points": []}, "points is []"),
        ({"points": [{"metrics": {"a": 1}}] * 257}, "1 to 256 objects"),
        ({"points": [{"step": 1}]}, "points[0].metrics is missing"),
        ({"points": [{"metrics": {"a": 1}}], "metrics": {"a": 1}}, "points cannot be combined with metrics"),
        ({"points": [{"metrics": {"a": 1}}], "step": 1}, "points cannot be combined with metrics"),
        ({"metrics": {"reward": []}}, "metrics.reward is []"),
        ({"metrics": {"reward": [1, "x"]}}, "metrics.reward[1] is 'x'"),
        ({"metrics": {"x" * 62: [1]}}, "1 to 60 printable"),
    ],
)
def test_a_batch_that_is_none_is_refused_and_nothing_of_it_is_kept(
    harness: Harness, body: dict[str, object], words: str
) -> None:
    check_refused_metrics(harness, body, words)


# Runs.


def create_named_run(harness: Harness, name: str | None, model_seq_id: int = 0, **changes: object) -> str:
    session_id = harness.ok("create_session", {"tags": [], "display_name": name, "project_id": f"of {name}"})
    return harness.model(session_id["session_id"], model_seq_id, **changes)


def ids(harness: Harness, query: str = "", key: str = ALICE) -> list[str]:
    answer = harness.get(f"dashboard/runs{query}", key)
    assert answer.status_code == 200, answer.text
    return [run["model_id"] for run in answer.json()["runs"]]


def test_runs_are_found_by_all_their_names_and_sorted(harness: Harness) -> None:
    first = create_named_run(harness, "Maths, first try")
    second = create_named_run(harness, "maths again", lora_config={"rank": 4})
    third = create_named_run(harness, None, lora_config={"rank": 64})
    harness.model(key=BOB)
    assert ids(harness) == [third, second, first]
    assert ids(harness, "?search=MATHS") == [second, first]
    assert ids(harness, "?search=try+maths") == [first]
    assert ids(harness, "?search=of+maths+again") == [second]
    assert ids(harness, f"?search={second[:20]}") == [second]
    assert ids(harness, "?search=%25") == ids(harness, "?search=_aths") == []
    assert ids(harness, "?sort=lora_rank&order=asc") == [second, first, third]
    assert ids(harness, "?sort=lora_rank") == [third, first, second]
    assert ids(harness, "?limit=1&offset=1") == [second]


@pytest.mark.parametrize("query", ["sort=", "order=up", "search=" + "x" * 201, "limit=x"])
def test_a_list_of_runs_that_cannot_be_is_refused(harness: Harness, query: str) -> None:
    assert harness.get(f"dashboard/runs?{query}").status_code == 400


def create_sweep(harness: Harness) -> dict[tuple[str, str], str]:
    """Runs of two learning rates with three seeds each, by both; rewards are seed + 10 lr, losses 1 to 6."""
    runs: dict[tuple[str, str], str] = {}
    for lr in ("1e-4", "0.1"):
        for seed in ("0", "1", "2"):
            metadata = {"name": f"math {lr} {seed}", "lr": lr, "seed": seed, "tags": "sweep,math"}
            run = runs[lr, seed] = harness.model(user_metadata=metadata)
            reward = int(seed) + 10 * float(lr)
            harness.ok("log_metrics", {"model_id": run, "step": 1, "metrics": {"reward": 77.0}})
            harness.ok("log_metrics", {"model_id": run, "step": 7, "metrics": {"env/all/reward": reward, "reward": 1}})
            db = harness.services.models._db
            with db.write() as connection:
                execute(connection, Curves(db).step_statement(run, 1, {"loss_per_token": float(len(runs))}))
    return runs


def test_runs_are_filtered_sorted_and_shown_by_any_value(harness: Harness) -> None:
    sweep = create_sweep(harness)
    bare, _ = harness.model(), harness.model(key=BOB, user_metadata={"lr": "0.1"})

    def ask(**query: str) -> dict[str, Any]:
        answer = harness.client.get("/api/v1/dashboard/runs", params=query, headers={"X-API-Key": ALICE})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def seeds(answer: dict[str, Any]) -> list[str]:
        return [(run["user_metadata"] or {}).get("name", "-") for run in answer["runs"]]

    assert seeds(ask(filter="lr > 1e-3 and seed != 1")) == ["math 0.1 2", "math 0.1 0"]
    assert seeds(ask(filter="loss < 3 or `env/all/reward` = 3")) == ["math 0.1 2", "math 1e-4 1", "math 1e-4 0"]
    assert seeds(ask(filter='name ~ "MATH 1E" and tag = sweep and not seed = 0')) == ["math 1e-4 2", "math 1e-4 1"]
    assert [run["model_id"] for run in ask(filter="not lr")["runs"]] == [bare]
    assert seeds(ask(filter="reward = 1", limit="2", offset="5")) == ["math 1e-4 0"], "the newest step, and pages"
    columns = ask(sort="env/all/reward", order="asc", columns="env/all/reward,lr,status,missing", limit="2")
    assert seeds(columns) == ["math 1e-4 0", "math 0.1 0"]
    assert columns["runs"][0]["values"] == {"env/all/reward": 0.001, "lr": 1e-4, "status": "running", "missing": None}
    descending = ask(sort="env/all/reward")
    assert seeds(descending)[0] == "math 0.1 2" and descending["runs"][-1]["model_id"] == bare, "missing ones are last"
    assert ask(filter="lrr > 1", sort="losss")["unknown"] == ["losss", "lrr"]
    names = ask(names="true")["names"]
    assert names["settings"] == ["lr", "seed"] and {"loss", "env/all/reward"} <= set(names["metrics"])
    assert sweep and ask(names="true")["considered"] == 7, "of one tenant"


def test_runs_are_grouped_with_mean_and_deviation(harness: Harness) -> None:
    sweep = create_sweep(harness)
    answer = harness.get("dashboard/runs?group=lr&columns=env/all/reward,status,seed,name&sort=env/all/reward").json()
    assert answer["runs"] == [] and answer["cursor"]["total_count"] == 2
    best, other = answer["groups"]
    assert (best["values"], other["values"]) == ({"lr": 0.1}, {"lr": 1e-4})
    assert set(best["run_ids"]) == {sweep["0.1", seed] for seed in "012"}
    assert best["columns"]["env/all/reward"] == {"mean": 2.0, "deviation": 1.0, "count": 3}
    assert best["columns"]["status"] == {"value": "running", "different": 1, "count": 3}
    assert best["columns"]["name"] == {"value": None, "different": 3, "count": 3}
    single = harness.get("dashboard/runs?group=lr,seed&columns=loss&limit=1&offset=5").json()
    assert single["groups"][0]["columns"]["loss"]["deviation"] is None and single["cursor"]["total_count"] == 6


def test_warnings_are_of_ones_own_runs_and_of_a_full_machine(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(key: str = ALICE) -> list[tuple[str, str | None]]:
        warnings = harness.get("dashboard/warnings", key).json()["warnings"]
        return [(warning["kind"], warning["run"]) for warning in warnings]

    monkeypatch.setattr(dashboard_warnings, "FULL", 2.0)
    run, healthy = create_named_run(harness, "fragile"), harness.model()
    db = harness.services.models._db
    for step in range(1, 13):
        reward = step / 10 if step < 8 else 0.0
        harness.ok("log_metrics", {"model_id": run, "step": step, "metrics": {"reward": reward}})
    with db.write() as connection:
        execute(connection, Curves(db).step_statement(run, 1, {"loss_per_token": math.nan}))
        execute(connection, Curves(db).step_statement(healthy, 1, {"loss_per_token": 1.0}))
    assert warned() == [("diverged", run), ("reward collapsed", run)] and warned(BOB) == []
    harness.services.models._db.execute(MODELS.update().values(last_request_at=time.time() - 90_000))
    assert warned() == [], "not of yesterday's runs"
    monkeypatch.setattr(dashboard_warnings, "FULL", 0.0)
    assert {("disk nearly full", None), ("memory nearly full", None)} <= set(warned(BOB))


def test_a_filter_names_the_place_of_its_mistake(harness: Harness) -> None:
    answer = harness.get("dashboard/runs?filter=lr+%3E+and")
    assert answer.status_code == 400
    assert "at character 6, a number or text is expected after lr >" in answer.text


def test_notes_of_a_run_are_kept_and_searched(harness: Harness) -> None:
    model_id = harness.model(user_metadata={"dataset": "gsm8k"})
    harness.model()
    text = "Reward rose after the fix.\nSecond line"
    harness.send("PUT", f"dashboard/runs/{model_id}", {"notes": text}).raise_for_status()
    assert harness.get(f"dashboard/runs/{model_id}").json()["user_metadata"] == {"dataset": "gsm8k", "notes": text}
    assert ids(harness, "?search=after+fix") == ids(harness, "?filter=notes+~+reward") == [model_id]
    assert harness.send("PUT", f"dashboard/runs/{model_id}", {"notes": "x" * 4001}).status_code == 400
    harness.send("PUT", f"dashboard/runs/{model_id}", {"notes": ""}).raise_for_status()
    assert "notes" not in harness.get(f"dashboard/runs/{model_id}").json()["user_metadata"]


def test_a_run_is_shown_with_its_last_metrics(harness: Harness) -> None:
    model_id = create_named_run(harness, "mine")
    empty = harness.get(f"dashboard/runs/{model_id}").json()
    assert (empty["step"], empty["metrics"]) == (0, {})
    db = harness.services.models._db
    with db.write() as connection:
        for step in (1, 2):
            execute(connection, Curves(db).step_statement(model_id, step, {"loss_per_token": 1 / step}))
    harness.ok("log_metrics", {"model_id": model_id, "step": 9, "metrics": {"reward": 1}})
    run = harness.get(f"dashboard/runs/{model_id}").json()
    assert (run["step"], run["metrics"]) == (2, {"loss_per_token": 0.5})
    assert (run["display_name"], run["project_id"], run["state"], run["owner"]) == ("mine", "of mine", "ready", "alice")
    (listed,) = harness.get("dashboard/runs").json()["runs"]
    assert listed.pop("duration_s") >= run.pop("duration_s") >= 0 and listed == run | {"outline": None}


def test_a_page_of_a_thousand_runs_is_a_page(harness: Harness) -> None:
    first = harness.model()
    with harness.services.models._db.write() as connection:
        row = dict(connection.execute(sa.select(MODELS).where(MODELS.c.model_id == first)).one()._mapping)
        rows = [row | {"model_id": f"s:train:{index}", "created_at": float(index)} for index in range(1, 1001)]
        connection.execute(MODELS.insert(), rows)
    page = harness.get("dashboard/runs?limit=50&offset=500").json()
    assert page["cursor"] == {"offset": 500, "limit": 50, "total_count": 1001}
    assert [run["model_id"] for run in page["runs"]] == [f"s:train:{index}" for index in range(501, 451, -1)]


def test_a_run_is_named_and_tagged_and_found_by_both(harness: Harness) -> None:
    model_id = harness.model(user_metadata={"dataset": "gsm8k"})
    harness.model()
    changed = harness.send(
        "PUT", f"dashboard/runs/{model_id}", {"name": "First try", "tags": ["zig zag", "zip", "zig zag"]}
    )
    assert changed.json()["user_metadata"] == {"dataset": "gsm8k", "name": "First try", "tags": "zig zag,zip"}
    for search in ("first", "gsm8k", "zag+try"):
        assert ids(harness, f"?search={search}") == [model_id]
    harness.send("PUT", f"dashboard/runs/{model_id}", {"tags": []}).raise_for_status()
    assert harness.get(f"dashboard/runs/{model_id}").json()["user_metadata"] == {
        "dataset": "gsm8k",
        "name": "First try",
    }
    for body in ({"name": "x" * 129}, {"tags": ["a,b"]}, {"tags": [" "]}, {"tags": ["x"] * 17}, {"tags": ["x" * 33]}):
        assert harness.send("PUT", f"dashboard/runs/{model_id}", body).status_code == 400, body


def test_checkpoints_lead_from_run_to_run(harness: Harness) -> None:
    names = ("grandparent", "parent", "run", "child", "other")
    runs = dict(zip(names, (harness.model() for _ in names), strict=True))
    links = [("grandparent", "parent"), ("parent", "run"), ("run", "child"), ("parent", "other"), ("other", "other")]
    for parent, child in (*links, *links[:1]):
        loaded = {"model_id": runs[child], "tinker_path": f"tinker://{runs[parent]}/weights/one"}
        harness.services.audit.record("alice", "checkpoint_loaded", loaded)

    def lineage(name: str) -> set[tuple[str, str]]:
        run_links = harness.get(f"dashboard/runs/{runs[name]}/lineage").json()["links"]
        names_by_id = {model_id: name for name, model_id in runs.items()}
        assert all(link["path"] == f"tinker://{link['parent']}/weights/one" for link in run_links)
        return {(names_by_id[link["parent"]], names_by_id[link["child"]]) for link in run_links}

    assert lineage("run") == {("grandparent", "parent"), ("parent", "run"), ("run", "child")}
    assert lineage("grandparent") == set(links)
    assert lineage("other") == {("grandparent", "parent"), ("parent", "other"), ("other", "other")}, "it was set back"


def test_the_list_of_runs_has_outlines_of_their_curves(harness: Harness) -> None:
    session_id = harness.session()
    rewarded, trained, empty = (harness.model(session_id, model_seq_id) for model_seq_id in range(3))
    db = harness.services.models._db
    with db.write() as connection:
        for step in range(1, 101):
            for model_id in (rewarded, trained):
                execute(connection, Curves(db).step_statement(model_id, step, {"loss_per_token": float(step)}))
    harness.services.curves.log_points(rewarded, [(step, {"reward": step / 2}) for step in range(5)])
    outlines = {run["model_id"]: run["outline"] for run in harness.get("dashboard/runs?outlines=true").json()["runs"]}
    assert outlines[rewarded] == {"name": "reward", "values": [0.0, 0.5, 1.0, 1.5, 2.0]}
    assert outlines[trained] == {"name": "loss_per_token", "values": [float(step) for step in range(4, 101, 4)]}
    assert outlines[empty] is None
    assert {run["outline"] for run in harness.get("dashboard/runs").json()["runs"]} == {None}


# The queue.


def test_the_queue_shows_what_waits_of_ones_own(harness: Harness) -> None:
    session_id = harness.session()
    model_id, sampler = harness.model(session_id), harness.sampler(session_id)
    for seq_id in (1, 2):
        harness.ok("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {}})
    harness.ok("asample", sample_request(sampler))
    other = harness.model(key=BOB)
    harness.ok("optim_step", {"model_id": other, "seq_id": 1, "adam_params": {}}, BOB)
    groups = harness.get("dashboard/queue").json()["waiting"]
    assert [(group["kind"], group["lane"], group["requests"]) for group in groups] == [
        ("optim_step", model_id, 2),
        ("sample", sampler, 1),
    ]
    assert groups[1]["tokens"] > 0


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


def test_the_machine_has_rates_of_the_last_minute_and_its_queue(harness: Harness) -> None:
    now = time.time()
    shares = {"bob": {"secret:train:0": 600}}
    steps = [RecentStep(now - age, 2.0, 1, 0, 0, 600, shares) for age in (300.0, 38.0, 8.0)]
    harness.services.recent_steps.add(BASE, steps)
    idle = harness.get("dashboard/machine").json()
    assert idle["rates"]["training_tokens"] == pytest.approx(1200 / 40, rel=0.1)
    assert idle["engines"][0]["busy"] == pytest.approx(4 / 40, rel=0.1)
    assert idle["queue"] == {"requests": 0, "oldest_s": None} and idle["rates"]["sampling_tokens"] == 0
    model_id = harness.model()
    harness.ok("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    busy = harness.get("dashboard/machine").json()["queue"]
    assert busy["requests"] == 1 and 0 <= busy["oldest_s"] < 60
    other = harness.get("dashboard/machine", BOB)
    assert other.json()["queue"]["requests"] == 0
    timeline = harness.get("dashboard/timeline").json()
    assert [step["others_tokens"] for step in timeline["steps"]] == [600, 600, 600]
    assert [request["kind"] for request in timeline["requests"]] == ["create_model"]
    assert [request["kind"] for request in timeline["waiting"]] == ["optim_step"]
    theirs = harness.get("dashboard/timeline?minutes=1", BOB).json()
    assert theirs["requests"] == theirs["waiting"] == theirs["steps"] == []
    assert "secret" not in harness.get("dashboard/timeline").text


def test_the_timeline_has_snapshots_of_the_caller_and_when_others_sampled(harness: Harness) -> None:
    now = time.time()
    spans = [RecentStep(now - 5, 2.0, 0, 0, 0, 0, {"bob": {"secret:train:0": 0}})]
    spans.append(RecentStep(now - 1, 0.5, 0, 0, 0, 0, {"alice": {"mine:train:0": 0}}))
    harness.services.recent_steps.add(BASE, spans)
    rows = [(30, 20), (25, 15), (9, 8)]
    sampled = [
        {"request_id": f"bob:{index}", "tenant_id": "bob", "session_id": "secret", "kind": "sample", "state": "done"}
        | {
            "base_model": BASE,
            "num_tokens": 1,
            "created_at": now - begin_age,
            "started_at": now - begin_age,
            "ran_at": now - end_age,
            "settled_at": now - end_age,
        }
        for index, (begin_age, end_age) in enumerate(rows)
    ]
    with harness.services.models._db.write() as connection:
        connection.execute(FUTURES.insert(), sampled)
    timeline = harness.get("dashboard/timeline").json()
    assert [(span["lane"], span["ended"] - span["began"]) for span in timeline["snapshots"]] == [("mine:train:0", 0.5)]
    assert [(round(now - span["began"]), round(now - span["ended"])) for span in timeline["others_sampling"]] == [
        (30, 15),
        (9, 8),
    ]
    assert (
        "secret" not in harness.get("dashboard/timeline").text and "bob" not in harness.get("dashboard/timeline").text
    )
    assert harness.get("dashboard/timeline", BOB).json()["others_sampling"] == []
    assert harness.get("dashboard/queue").json()["engines"][0]["steps"] == []


def test_utilisation_is_that_of_gpus_or_of_cpus_since_the_last_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 1 1 1\n")
    used = Utilisation(stat)
    assert used.read() == {"cpu": pytest.approx(0.2)}
    stat.write_text("cpu  160 0 120 710 110 0 0 0 0 0\n")
    assert used.read() == {"cpu": pytest.approx(0.8)}
    assert used.read() == {"cpu": pytest.approx(0.8)}  # no time has passed
    assert Utilisation(tmp_path / "absent").read() == {"cpu": None}
    nvml = ModuleType("pynvml")
    nvml_functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
    }
    nvml_functions["nvmlDeviceGetUtilizationRates"] = lambda index: SimpleNamespace(gpu=(37, 100)[index])
    for name, value in nvml_functions.items():
        monkeypatch.setattr(nvml, name, value, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert used.read() == {"gpus": [0.37, 1.0]}


@pytest.mark.parametrize("minutes", ["x", "0", "-1", "nan", "121"])
def test_a_timeline_that_cannot_be_is_refused(harness: Harness, minutes: str) -> None:
    assert harness.get(f"dashboard/timeline?minutes={minutes}").status_code == 400


def test_why_a_request_waits_is_said(harness: Harness) -> None:
    session_id = harness.session()
    model_id, sampler = harness.model(session_id), harness.sampler(session_id)
    harness.ok("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    harness.ok("save_weights", {"model_id": model_id, "seq_id": 2, "path": "later"})
    harness.ok("asample", sample_request(sampler))

    def whys() -> list[str]:
        return [row["why"] for row in harness.get("dashboard/queue").json()["waiting"]]

    step, save, sample = whys()
    assert step == "It runs in the current or the next step."
    assert save == "A run's requests run in order: an earlier optim step of the same run comes first."
    assert sample == "It is being sampled, or waits for a free slot in the sampler."
    harness.services.recent_steps.add(BASE, [RecentStep(time.time(), 0.25, 1, 0, 0, 1200, {"a": {}, "b": {}})])
    assert whys()[0].endswith("The last step took 0.25 s for 1,200 tokens, shared by 2 tenants.")
    engines = Engines(harness.services.models._db, "here")
    lease = engines.take(Seat(BASE), 0.0)
    engines.set_state(Seat(BASE), "ready")
    assert whys()[0] == f"No engine of {BASE} is ready: {lease.engine_id} is silent."
    harness.queue[BASE] = ("paused_capacity", "it is loading")
    assert set(whys()) == {"The engine accepts no work: it is loading."}


def test_an_engine_that_does_not_work_says_why(harness: Harness) -> None:
    harness.queue[BASE] = ("paused_capacity", "it is loading")
    engine = harness.get("dashboard/overview").json()["engines"][0]
    assert (engine["state"], engine["reason"]) == ("paused_capacity", "it is loading")


def test_the_overview_lists_engines_and_samplers_with_what_is_ones_own(harness: Harness) -> None:
    database = harness.services.models._db
    engines = Engines(database, "here")
    lease = engines.take(Seat(BASE, "sampler", 1), 60)
    engines.set_state(Seat(BASE, "sampler", 1), "ready")
    silent_engine = engines.take(Seat(BASE), 0.0)
    run = harness.model()
    with database.write() as connection:
        connection.execute(MODELS.update().where(MODELS.c.model_id == run).values(engine_id=silent_engine.engine_id))
    Futures(database).submit(NewFuture("r", "alice", "s", BASE, "sample", b"", executor=lease.engine_id))
    seats = {seat["name"]: seat for seat in harness.get("dashboard/overview").json()["seats"]}
    assert list(seats) == [silent_engine.engine_id, lease.engine_id]
    alice_seats = [(seat["kind"], seat["state"], seat["runs"], seat["waiting_requests"]) for seat in seats.values()]
    assert alice_seats == [("engine", "silent", 1, 0), ("sampler", "ready", 0, 1)]
    bob_seats = harness.get("dashboard/overview", BOB).json()["seats"]
    assert [(seat["runs"], seat["waiting_requests"]) for seat in bob_seats] == [(0, 0), (0, 0)]


# A tenant's objects.


def test_the_overview_counts_what_is_ones_own(harness: Harness) -> None:
    session_id = harness.session()
    model_id = harness.model(session_id)
    harness.save_checkpoint(model_id)
    harness.ok("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    counts = harness.get("dashboard/overview").json()["counts"]
    ones = ("runs", "loaded_runs", "sessions", "active_sessions", "checkpoints", "waiting_requests")
    assert {name: counts[name] for name in ones} == dict.fromkeys(ones, 1)
    assert counts["checkpoint_bytes"] > 0 and counts["waiting_bytes"] > 0
    assert set(harness.get("dashboard/overview", BOB).json()["counts"].values()) == {0}


def test_a_session_is_active_in_every_place_until_its_client_says_farewell(harness: Harness) -> None:
    active, finished = harness.session(), harness.session()
    harness.post(f"sessions/{finished}/finish", {"reason": {"type": "success"}}).raise_for_status()
    counts = harness.get("dashboard/overview").json()["counts"]
    listed = harness.post("sessions/search", {"statuses": [{"type": "active"}]}).json()["sessions"]
    census = {row.meter: row.value for row in DatabaseCounts(harness.services.models._db, "server").counts()}
    assert [row["session_id"] for row in listed] == [active]
    assert (counts["active_sessions"], counts["sessions"]) == (1, 2)
    assert census["tinsmith_sessions_open"] == 1


def test_a_job_that_is_being_cancelled_is_not_finished(harness: Harness) -> None:
    row = {"tenant_id": "alice", "name": "", "pool": "local", "priority": 0, "weight": 1.0, "spec": {}, "sealed": True}
    row |= {"max_failed_rows": 0.0, "cleaned": False, "created_at": 0.0, "updated_at": 0.0}
    with harness.services.models._db.write() as connection:
        connection.execute(
            BATCH_JOBS.insert(), [row | {"status": status} for status in ("CANCELLING", "RUNNING", "FAILED")]
        )
    counts = harness.get("dashboard/overview").json()["counts"]
    assert (counts["unfinished_jobs"], counts["jobs"]) == (2, 3)


def test_keys_and_quotas_of_the_tenant_are_shown_without_secrets(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, limits=QuotaLimits(models=4, tokens_per_minute=100))
    try:
        keys = Keys(harness.services.models._db)
        first_key, secret = keys.create("alice", "laptop")
        keys.revoke(first_key.key_id)
        harness.model()
        answer = harness.get("dashboard/tenant")
        assert secret not in answer.text and "digest" not in answer.text
        tenant = answer.json()
        assert (tenant["tenant_id"], tenant["takes_any_key"]) == ("alice", False)
        current_key, other = tenant["keys"]
        assert current_key["current"] and current_key["revoked_at"] is None
        assert (other["name"], other["current"], bool(other["revoked_at"])) == ("laptop", False, True)
        quotas = {quota["name"]: (quota["limit"], quota["used"]) for quota in tenant["quotas"]}
        assert quotas["models"] == (4, 1)
        assert quotas["tokens_per_minute"] == (100, None)
        assert len(harness.get("dashboard/tenant", BOB).json()["keys"]) == 1
    finally:
        close(harness)


def test_without_keys_the_tenant_is_local(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, local=True)
    try:
        tenant = harness.get("dashboard/tenant", "tml-any").json()
        assert (tenant["tenant_id"], tenant["takes_any_key"], tenant["keys"]) == ("local", True, [])
    finally:
        close(harness)


def test_a_link_to_an_archive_leads_to_it(harness: Harness) -> None:
    path = harness.save_checkpoint(harness.model()).removeprefix("tinker://")
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


def test_clients_other_than_browsers_receive_the_addresses(harness: Harness) -> None:
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
    paths = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert paths and all(name.startswith("/dashboard/") for name in paths)
    assert {name.removeprefix("/dashboard/") for name in paths} <= set(routes.assets())
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
