"""Prometheus metrics: every meter is documented, exported and counted by server and engine, and hidden from tenants."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from prometheus_client.parser import text_string_to_metric_families
from tinker import types

from support.databases import database_url
from support.http_harness import ALICE, BASE, BOB, Harness, close, make_harness, pass_bytes, send_pass
from support.live import LiveServer, serving
from tinsmith.cluster.engines import EngineRow, Engines
from tinsmith.db.factory import open_database
from tinsmith.telemetry.metrics import METERS, OTHER, ServerMeters, TenantLabels, counter, reset_metrics_directory

ROOT = Path(__file__).parents[2]
TOKEN = "scrape-me"
Samples = dict[tuple[str, tuple[str, ...]], float]


def samples_of(text: str) -> Samples:
    """Map (name, labels) to values. Raises for text that Prometheus could not parse."""
    return {
        (sample.name, tuple(value for name, value in sorted(sample.labels.items()) if name != "le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path, metrics_token=TOKEN)
    yield new_harness
    close(new_harness)


def scrape(harness: Harness) -> Samples:
    answer = harness.client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples_of(answer.text)


def test_the_server_counts_what_passes_through_it(harness: Harness) -> None:
    model_id = harness.model()
    assert send_pass(harness, pass_bytes(model_id, 1)).status_code == 200
    assert send_pass(harness, pass_bytes(model_id, 2, tokens=(99_999,))).status_code == 200
    assert harness.get("no/such/path").status_code == 404
    samples = scrape(harness)
    assert samples["tinsmith_futures_submitted_total", ("forward_backward", "accepted")] == 1
    assert samples["tinsmith_futures_submitted_total", ("forward_backward", "refused")] == 1
    assert samples["tinsmith_http_responses_total", ("404",)] == 1
    assert samples["tinsmith_http_responses_total", ("200",)] >= 4
    assert samples["tinsmith_tenant_requests_total", ("alice",)] == 3
    assert samples["tinsmith_sessions_open", ()] == 1
    assert samples["tinsmith_models", (BASE, "ready")] == 1
    assert samples["process_resident_memory_bytes", ()] > 1e6


def test_the_rows_say_what_waits_and_for_how_long(harness: Harness) -> None:
    from tinsmith.db.schema import ENGINES, FUTURES

    model_id = harness.model()
    with harness.services.models._db.write() as connection:
        row = {"base_model": BASE, "engine_id": "e", "pid": 0, "state": "ready", "started_at": 0.0}
        connection.execute(ENGINES.insert(), row)
    first = send_pass(harness, pass_bytes(model_id, 1)).json()["request_id"]
    send_pass(harness, pass_bytes(model_id, 2))
    with harness.services.models._db.write() as connection:
        older = FUTURES.update().where(FUTURES.c.request_id == first)
        connection.execute(older.values(created_at=time.time() - 100))
    samples = scrape(harness)
    assert samples["tinsmith_queue_requests", (BASE, "forward_backward")] == 2
    assert 100 <= samples["tinsmith_queue_oldest_seconds", (BASE, "forward_backward")] < 1000
    assert samples["tinsmith_engine_ready", (BASE, "e")] == 0  # its lease has expired
    harness.settle(first)
    assert scrape(harness)["tinsmith_queue_requests", (BASE, "forward_backward")] == 1


def test_figures_of_all_tenants_are_for_operators(harness: Harness, tmp_path: Path) -> None:
    for path in ("/metrics", "/api/v1/metrics"):
        for headers in (
            {},
            {"X-API-Key": ALICE},
            {"X-API-Key": BOB, "Authorization": "Bearer"},
            {"Authorization": f"Bearer {ALICE}"},
            {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": f"Bearer {TOKEN}x"},
        ):
            answer = harness.client.get(path, headers=headers)
            assert answer.status_code == 401 and "alice" not in answer.text, headers
        assert harness.client.get(path, headers={"Authorization": f"bearer {TOKEN} "}).status_code == 200
    for name in ("without", "local"):
        (tmp_path / name).mkdir()
    without = make_harness(tmp_path / "without")
    answer = without.client.get("/metrics", headers={"X-API-Key": ALICE})
    assert answer.status_code == 401 and "TINSMITH_METRICS_TOKEN" in answer.json()["detail"]
    close(without)
    local = make_harness(tmp_path / "local", local=True)
    assert local.client.get("/metrics").status_code == 200
    assert local.client.get("/metrics", headers={"Host": "evil.example"}).status_code == 403
    close(local)


def test_only_so_many_tenants_have_names_of_their_own(harness: Harness) -> None:
    labels = TenantLabels(2)
    assert [labels(name) for name in ("a", "b", "c", "a", "d", OTHER)] == ["a", "b", OTHER, "a", OTHER, OTHER]
    assert TenantLabels(0)("a") == OTHER
    for index in range(20):
        harness.services.meters.count_request("sample", f"tenant-{index}", refused=False)
    tenants = [labels for name, labels in scrape(harness) if name == "tinsmith_tenant_requests_total"]
    assert tenants == [("tenant-0",), ("tenant-1",), (OTHER,)]


def test_the_counters_of_an_earlier_server_are_forgotten(tmp_path: Path) -> None:
    directory = reset_metrics_directory(tmp_path)
    (directory / "counter_1.db").write_bytes(b"old")
    assert list(reset_metrics_directory(tmp_path).iterdir()) == []
    assert (tmp_path / "metrics").stat().st_mode & 0o777 == 0o700
    ServerMeters(directory, 1).text()


def train_and_sample(server: LiveServer) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
        model = service.create_lora_training_client("tinsmith/nano", rank=4).result()
        tensors = {"target_tokens": np.arange(1, 9), "weights": np.ones(8, np.float32)}
        datum = types.Datum(model_input=types.ModelInput.from_ints(list(range(8))), loss_fn_inputs=tensors)
        model.forward_backward([datum], "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        sampler = model.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=4)
        sampler.sample(types.ModelInput.from_ints([1, 2, 3]), num_samples=2, sampling_params=params).result()


def scrape_until(server: LiveServer, *expected_samples: tuple[str, tuple[str, ...]]) -> str:
    """Scrape until the text has all of these."""
    deadline = time.monotonic() + 60
    while True:
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        if set(expected_samples) <= set(samples_of(text)):
            return text
        assert time.monotonic() < deadline, f"{expected_samples} are not all there"
        time.sleep(0.1)


def server_engines(server: LiveServer) -> list[EngineRow]:
    database = open_database(database_url(server.data_dir) or f"sqlite:///{server.data_dir / 'tinsmith.db'}")
    try:
        while not (rows := Engines(database, "").of_base("tinsmith/nano")):
            time.sleep(0.05)  # a server answers before it has started one
        return rows
    finally:
        database.close()


@pytest.mark.extended
def test_a_live_server_shows_every_meter_and_keeps_counting_when_an_engine_dies(tmp_path: Path) -> None:
    with serving(tmp_path / "data", "--backend", "fake") as server:
        nano = "tinsmith/nano"
        (engine,) = (row.engine_id for row in server_engines(server))
        train_and_sample(server)
        # An engine writes its gauges once a second, and a sample is counted right after its result was sent.
        text = scrape_until(
            server,
            ("tinsmith_engine_samples_running", (nano, engine)),
            ("tinsmith_engine_tokens_total", (nano, "sampled")),
        )
        samples = samples_of(text)
        assert samples["tinsmith_engine_tokens_total", (nano, "forward_backward")] == 8
        assert samples["tinsmith_engine_tokens_total", (nano, "prompt")] == 3
        assert samples["tinsmith_engine_tenant_tokens_total", (nano, "training", "local")] == 8
        assert samples["tinsmith_engine_futures_settled_total", (nano, "sample", "done")] == 1
        assert samples["tinsmith_engine_step_seconds_count", (nano, "passes")] == 1
        assert samples["tinsmith_engine_wait_seconds_count", (nano, "optim_step")] == 1
        assert samples["tinsmith_engine_samples_running", (nano, engine)] == 0
        assert samples["tinsmith_engine_ready", (nano, engine)] == 1
        assert samples["tinsmith_engine_resident_bytes", (nano, engine)] > 1e6
        assert samples["tinsmith_engine_database_seconds_count", (nano,)] > 5
        assert samples["tinsmith_server_database_seconds_count", ()] > 5
        shown_names = {
            re.sub(r"_(total|bucket)$", "", name) for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
        }
        absent = {name.removesuffix("_total") for name in METERS} - shown_names
        # These appear only while requests wait, behind a step or in a bulk job, and on a GPU.
        waiting = {"tinsmith_queue_requests", "tinsmith_queue_oldest_seconds", "tinsmith_batch_jobs"}
        assert absent <= waiting | {"tinsmith_engine_uncaptured_steps"}
        (pid,) = server.engine_pids()
        os.kill(pid, signal.SIGKILL)
        train_and_sample(server)
        samples = samples_of(httpx.get(f"{server.url}/metrics", timeout=60).text)
        assert samples["tinsmith_engine_tokens_total", (nano, "forward_backward")] == 16
        alive = list((server.data_dir / "metrics").glob("gauge_live*.db"))
        assert all(f"_{pid}.db" not in path.name for path in alive)


def test_every_meter_is_documented_with_its_own_words() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    for meter in METERS.values():
        labels = f" by {', '.join(f'`{label}`' for label in meter.labels)}" if meter.labels else ""
        assert f"- `{meter.name}`, {meter.kind}{labels}: {meter.meaning}\n" in page, meter.name
    assert set(re.findall(r"^- `(tinsmith_\w+)`", page, re.MULTILINE)) == set(METERS)


def test_the_dashboard_asks_for_meters_that_there_are() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "tinsmith.json").read_text())
    labels_by_meter: dict[str, set[str]] = {}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            for name, labels in re.findall(r"(tinsmith_\w+|process_\w+)(?:\{([^}]*)\})?", target["expr"]):
                labels_by_meter.setdefault(name, set()).update(re.findall(r"(\w+)\s*[=!]", labels))
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            names = {word.strip() for group in grouped for word in group.split(",")} - {"le"}
            meters = [METERS[base_name(name)] for name in re.findall(r"tinsmith_\w+", target["expr"])]
            assert all(names <= set(meter.labels) for meter in meters), target["expr"]
    for name, labels in labels_by_meter.items():
        if name.startswith("process_"):
            continue
        assert labels <= set(METERS[base_name(name)].labels), name
    assert {base_name(name) for name in labels_by_meter if name.startswith("tinsmith")} == set(METERS)


def base_name(series: str) -> str:
    """The meter of a series: a histogram has three."""
    for suffix in ("_bucket", "_sum", "_count"):
        if METERS.get(series.removesuffix(suffix)) and series.endswith(suffix):
            return series.removesuffix(suffix)
    return series


def test_a_meter_that_is_not_in_the_table_cannot_be_made() -> None:
    from prometheus_client import CollectorRegistry

    with pytest.raises(KeyError):
        counter("tinsmith_invented_total", CollectorRegistry())
