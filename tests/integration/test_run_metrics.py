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
from tinsmith.errors import TinsmithError, UserError
from tinsmith.exchange.metrics import MAX_NAMES, MAX_WAITING, RunMetrics, parts_of, select_numbers, step_of


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path)
    yield new_harness
    close(new_harness)


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


def connect(harness: Harness, model_id: str) -> tuple[RunMetrics, Wire]:
    run, wire = RunMetrics(model_id, "http://there", ALICE), Wire(harness)
    run._http = httpx.Client(base_url="http://there/api/v1/", headers={"X-API-Key": ALICE}, transport=wire)
    return run, wire


def points(harness: Harness, model_id: str) -> list[tuple[int, dict[str, float]]]:
    rows = harness.get(f"training_runs/{model_id}/metrics").json()["points"]
    return [(point["step"], point["metrics"]) for point in rows]


def test_points_are_sent_together_and_at_the_end(harness: Harness) -> None:
    model_id = harness.model()
    run, wire = connect(harness, model_id)
    with run:
        for step in range(300):
            run.log({"reward": np.float32(step)}, step)
    assert points(harness, model_id) == [(step, {"reward": float(step)}) for step in range(300)]
    assert wire.requests < 10


def test_a_server_that_is_away_costs_no_point(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    model_id = harness.model()
    run, wire = connect(harness, model_id)
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
    run, _ = connect(harness, model_id)
    with pytest.raises(TinsmithError, match="printable"):
        run.log({"": 1.0}, None)
    run.log({"reward": 1.0}, None)
    run.close()
    assert points(harness, model_id) == [(0, {"reward": 1.0})]


def test_it_serves_as_a_logger_of_the_cookbook(harness: Harness, tmp_path: Path) -> None:
    ml_log = pytest.importorskip("tinker_cookbook.utils.ml_log", reason="a test of the cookbook's loggers")
    logger = ml_log.setup_logging(str(tmp_path / "logs"), config={"rate": 1}, do_configure_logging_module=False)
    model_id = harness.model()
    run, _ = connect(harness, model_id)
    logger.loggers.append(run)
    logger.log_hparams({"rate": 1})
    metrics = {"env/all/reward/total": 0.5, "name": "text", "bad": float("nan"), "x" * 80: 1.0}
    logger.log_metrics(metrics | {f"time/{index}": 1.0 for index in range(200)}, step=2)
    logger.log_metrics_event({"late": 1}, step=1, step_metric="version")
    logger.log_summary({"total": 1})
    logger.sync()
    logger.close()
    metrics_by_step = dict(points(harness, model_id))
    assert metrics_by_step[1] == {"late": 1.0}
    assert metrics_by_step[2]["env/all/reward/total"] == 0.5 and len(metrics_by_step[2]) == 2 * MAX_NAMES
    assert not {"name", "bad", "x" * 80} & set(metrics_by_step[2])


def test_timings_are_left_out_first() -> None:
    metrics = {f"time/{index}": 1.0 for index in range(120)} | {f"m{index}": 1.0 for index in range(100)}
    selected, reasons = select_numbers(metrics)
    assert len(reasons) == 220 - 2 * MAX_NAMES and all(name.startswith("time/") for name in reasons)
    first, second = parts_of(selected)
    assert len(first) == len(second) == MAX_NAMES
    assert sum(name.startswith("m") for name in {**first, **second}) == 100


def log_file(
    harness: Harness, model_id: str, file: Path, monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[int, str]:
    monkeypatch.setattr("tinsmith.exchange.metrics.RunMetrics", lambda run_id: connect(harness, run_id)[0])
    outcome = CliRunner().invoke(app, ["runs", "log", model_id, str(file), *words])
    return outcome.exit_code, outcome.output


def test_a_file_of_metrics_is_logged_by_a_command(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id = harness.model()
    file = tmp_path / "metrics.jsonl"
    lines = [{"step": 0, "reward": 0.25, "note": "x"}, {"step": 1.0, "reward": 0.5}]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    for _ in range(2):
        status, printed = log_file(harness, model_id, file, monkeypatch, "--json")
        assert (status, json.loads(printed)["points"], json.loads(printed)["left_out"]) == (0, 2, 0)
    assert points(harness, model_id) == [(0, {"reward": 0.25}), (1, {"reward": 0.5})]


def test_whatever_of_a_file_is_not_logged_is_told_by_line_and_reason(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id = harness.model()
    file = tmp_path / "metrics.jsonl"
    lines = {
        '{"step": 1, "loss": 1}': "",
        '{"step": 1.5, "loss": 1}': "step is 1.5; it must be a whole number",
        '{"step": "2", "loss": 1}': "step is '2'; it must be a whole number",
        '{"step": true, "loss": 1}': "step is True; it must be a whole number",
        '{"step": -1, "loss": 1}': "step is -1; it must be a whole number",
        f'{{"step": 1{"0" * 400}, "loss": 1}}': "step is 1000",
        '{"step": NaN, "loss": 1}': "step is nan; it must be a whole number",
        '{"step": null, "loss": 1}': "step is None; it must be a whole number",
        '{"total": 3}': "it has no step",
        "[1]": "it is a list",
        '{"step": 2, "loss': "it is not JSON",
        '{"step": 2, "note": "x"}': "it has no numbers",
        '{"step": 3, "loss": NaN, "reward": 0.5, "kl": -Infinity}': "'loss' is nan; a metric is a finite number",
        "": "",
        '{"step": 4, "loss": 0.5}': "",
    }
    file.write_text("".join(line + "\n" for line in lines))
    status, printed = log_file(harness, model_id, file, monkeypatch)
    assert status == 1
    for line_number, reason in enumerate(lines.values(), 1):
        assert (f"line {line_number}: {reason}" in printed) if reason else (f"line {line_number}:" not in printed)
    assert "line 13: 'kl' is -inf" in printed
    assert "logged 3 points" in printed and "12 of its lines" in printed
    assert points(harness, model_id) == [(1, {"loss": 1.0}), (3, {"reward": 0.5}), (4, {"loss": 0.5})]


def test_a_file_longer_than_what_may_wait_is_logged_whole(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, points_sent = tmp_path / "metrics.jsonl", []
    monkeypatch.setattr(
        RunMetrics, "_post", lambda _run, _path, body: points_sent.extend(body["points"]) or {"step": len(points_sent)}
    )
    file.write_text("".join(f'{{"step": {step}.0, "m": 1}}\n' for step in range(MAX_WAITING + 500)))
    assert log_file(harness, harness.model(), file, monkeypatch)[0] == 0
    assert [point["step"] for point in points_sent] == list(range(MAX_WAITING + 500))


def test_points_that_the_server_did_not_take_are_not_called_logged(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "m": 1}\n')
    monkeypatch.setattr(RunMetrics, "_post", lambda *_: {})
    monkeypatch.setattr("tinsmith.cli.runs.POLL_S", 0.0)
    status, printed = log_file(harness, harness.model(), file, monkeypatch)
    assert status == 2 and "did not take 1 points" in printed


def test_a_step_is_a_whole_number_of_any_type_at_every_door(harness: Harness) -> None:
    model_id = harness.model()
    run, _ = connect(harness, model_id)
    for step in (1, 2.0, np.int64(3), np.float32(4)):
        run.log({"m": np.float64(step)}, step)  # type: ignore[arg-type]
        assert step_of(step) == step
    for wrong in (1.5, True, "1", float("nan"), float("inf"), -1, 2**53):
        with pytest.raises(UserError, match="whole number"):
            run.log({"m": 1.0}, wrong)  # type: ignore[arg-type]
    run.close()
    body = {"model_id": model_id, "points": [{"step": 5.0, "metrics": {"m": 5}}]}
    assert harness.post("log_metrics", body).status_code == 200
    assert points(harness, model_id) == [(step, {"m": float(step)}) for step in range(1, 6)]
    body = {"model_id": model_id, "metrics": {"m": 5}, "step": 5.5}
    refused = harness.post("log_metrics", body)
    assert refused.status_code == 400 and "step is 5.5" in refused.text


def test_a_number_that_is_not_finite_loses_no_other_point(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    model_id = harness.model()
    run, _ = connect(harness, model_id)
    run.log({"m": 1.0}, 1)
    for wrong in (float("nan"), [1.0, float("inf")]):
        with pytest.raises(UserError, match="finite"):
            run.log({"m": wrong}, 2)
    with caplog.at_level(logging.WARNING):
        for step in (3, 4):
            run.log_metrics({"m": float("nan"), "k": np.array(1.0)}, step)
    assert [record.getMessage() for record in caplog.records] == [
        "a metric is not logged: 'm' is nan; a metric is a finite number"
    ]
    run.close()
    assert points(harness, model_id) == [(1, {"m": 1.0}), (3, {"k": 1.0}), (4, {"k": 1.0})]
