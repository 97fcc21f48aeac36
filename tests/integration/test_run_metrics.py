"""The client of a run's metrics, and the command that logs a file of them, against the server's routes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from support.http_harness import ALICE, Harness, close, make_harness
from tinsmith.cli.main import app
from tinsmith.errors import TinsmithError
from tinsmith.exchange.metrics import MAX_NAMES, RunMetrics, parts_of


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = make_harness(tmp_path)
    yield made
    close(made)


class Wire(httpx.BaseTransport):
    """A transport to the harness that can be cut."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.cut = False
        self.requests = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.cut:
            raise httpx.ConnectError("cut")
        self.requests += 1
        headers = dict(request.headers)
        answer = self.harness.client.request(request.method, request.url.path, content=request.read(), headers=headers)
        return httpx.Response(answer.status_code, content=answer.content)


def connected(harness: Harness, model_id: str) -> tuple[RunMetrics, Wire]:
    run, wire = RunMetrics(model_id, "http://there", ALICE), Wire(harness)
    run._http = httpx.Client(base_url="http://there/api/v1/", headers={"X-API-Key": ALICE}, transport=wire)
    return run, wire


def points(harness: Harness, model_id: str) -> list[tuple[int, dict[str, float]]]:
    found = harness.get(f"training_runs/{model_id}/metrics").json()["points"]
    return [(point["step"], point["metrics"]) for point in found]


def test_points_are_sent_together_and_at_the_end(harness: Harness) -> None:
    model_id = harness.model()
    run, wire = connected(harness, model_id)
    with run:
        for step in range(300):
            run.log({"reward": np.float32(step)}, step)
    assert points(harness, model_id) == [(step, {"reward": float(step)}) for step in range(300)]
    assert wire.requests < 10


def test_a_server_that_is_away_costs_no_point(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    model_id = harness.model()
    run, wire = connected(harness, model_id)
    wire.cut = True
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            run.log({"reward": np.array([0.0, 1.0])}, step)
            run.flush()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    wire.cut = False
    run.close()
    assert [(step, metrics["reward"]) for step, metrics in points(harness, model_id)] == [(1, 0.5), (2, 0.5)]


def test_refusals_are_raised_and_not_retried(harness: Harness) -> None:
    model_id = harness.model()
    run, _ = connected(harness, model_id)
    with pytest.raises(TinsmithError, match="printable"):
        run.log({"": 1.0}, None)
    run.log({"reward": 1.0}, None)
    run.close()
    assert points(harness, model_id) == [(0, {"reward": 1.0})]


def test_it_serves_as_a_logger_of_the_cookbook(harness: Harness, tmp_path: Path) -> None:
    ml_log = pytest.importorskip("tinker_cookbook.utils.ml_log", reason="a test of the cookbook's loggers")
    logger = ml_log.setup_logging(str(tmp_path / "logs"), config={"rate": 1}, do_configure_logging_module=False)
    model_id = harness.model()
    run, _ = connected(harness, model_id)
    logger.loggers.append(run)
    logger.log_hparams({"rate": 1})
    metrics = {"env/all/reward/total": 0.5, "name": "text", "bad": float("nan"), "x" * 80: 1.0}
    logger.log_metrics(metrics | {f"time/{number}": 1.0 for number in range(200)}, step=2)
    logger.log_metrics_event({"late": 1}, step=1, step_metric="version")
    logger.log_summary({"total": 1})
    logger.sync()
    logger.close()
    found = dict(points(harness, model_id))
    assert found[1] == {"late": 1.0}
    assert found[2]["env/all/reward/total"] == 0.5 and len(found[2]) == 2 * MAX_NAMES
    assert not {"name", "bad", "x" * 80} & set(found[2])


def test_timings_are_left_out_first() -> None:
    many = {f"time/{number}": 1.0 for number in range(120)} | {f"m{number}": 1.0 for number in range(100)}
    first, second = parts_of(many)
    assert len(first) == len(second) == MAX_NAMES
    assert sum(name.startswith("m") for name in {**first, **second}) == 100


def test_a_file_of_metrics_is_logged_by_a_command(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id = harness.model()
    monkeypatch.setattr("tinsmith.exchange.metrics.RunMetrics", lambda run_id: connected(harness, run_id)[0])
    file = tmp_path / "metrics.jsonl"
    lines = [{"step": 0, "reward": 0.25, "note": "x"}, {"total": 3}, {"step": 1, "reward": 0.5}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for _ in range(2):
        done = CliRunner().invoke(app, ["runs", "log", model_id, str(file), "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.output)["points"] == 2
    assert points(harness, model_id) == [(0, {"reward": 0.25}), (1, {"reward": 0.5})]
    file.write_text("no json\n")
    refused = CliRunner().invoke(app, ["runs", "log", model_id, str(file)])
    assert refused.exit_code == 2
