"""Operations, whose rows the service itself answers, return what the real SDK returns."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.live import LiveServer
from tinsmith import batch
from tinsmith.batch import operations
from tinsmith.batch.client.http import Client
from tinsmith.batch.client.job import Job
from tinsmith.errors import UserError

KEY = "tml-test"
FAKE = "tinsmith/nano"
QUICK = {"backoff_s": 0.01, "grace_s": 1.0}


def run(client: Client, rows: list[Any], steps: Any, out: Path, **options: Any) -> Job:  # noqa: ANN401
    limits = {**QUICK, **options.pop("limits", {})}
    job = batch.Dataset(rows).map(
        steps, output=batch.JsonWriter(str(out)), stream=False, client=client, limits=limits, **options
    )
    assert isinstance(job, Job)
    return job


def until(condition: Any, timeout_s: float = 20) -> Any:  # noqa: ANN401
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
    return value


def used(server: LiveServer, session_id: str) -> tuple[int, int]:
    """The tokens of a session's prompts and answers in the tenant's usage."""
    hour = int(time.time()) // 3600 * 3600
    start, end = (
        time.strftime("%Y-%m-%dT%H:00:00Z", time.gmtime(hour_start)) for hour_start in (hour - 3600, hour + 3600)
    )
    events = server.get(f"billing/usage/events?starting_on={start}&ending_before={end}").json()["data"]
    infos = [event["event_info"] for event in events if event.get("session_id") == session_id]
    counts: Counter[str] = Counter()
    for info in infos:
        counts[info["type"]] += info["token_count"]
    return counts["sampling_prefill"], counts["sampling_sample"]


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.extended
def test_rows_are_answered_by_the_service(client: Client, server: LiveServer, tmp_path: Path) -> None:
    rows = [{"id": index, "q": f"number {index}"} for index in range(7)]
    sample = batch.Sample(model=FAKE, prompt="q", max_tokens=5, tokens=True, logprobs=True)
    job = run(client, rows, sample, tmp_path / "out.jsonl", batch_size=3)
    job.wait()
    rows_out = lines(tmp_path / "out.jsonl")
    assert [row["id"] for row in rows_out] == list(range(7))
    for row in rows_out:
        assert len(row["output_tokens"]) == len(row["output_logprobs"]) > 0
        assert row["output_stop_reason"] in ("stop", "length")
        assert isinstance(row["output"], str)
    status = client.status(int(job))
    assert status["rows_ok"] == 7
    assert status["tokens_out"] == sum(len(row["output_tokens"]) for row in rows_out)
    assert status["tokens_in"] > 0
    assert used(server, f"bulk-job-{int(job)}-1") == (status["tokens_in"], status["tokens_out"])
    session = f"session_id = 'bulk-job-{int(job)}-1'"
    assert server.count(f"futures WHERE {session} AND kind = 'sample' AND state = 'done'") == 7
    until(lambda: server.count(f"sessions WHERE {session} AND closed_at IS NOT NULL AND finish_type = 'success'"))


def test_a_row_that_the_service_refuses_fails_alone(client: Client, tmp_path: Path) -> None:
    rows = [{"ids": [1, 2, 3]}, {"ids": [10**9]}, {"ids": []}, {"other": 1}, {"ids": "text"}, {"ids": [4]}]
    sample = batch.Sample(model=FAKE, tokens_column="ids", max_tokens=3)
    errors = batch.JsonWriter(str(tmp_path / "err.jsonl"))
    job = run(client, rows, sample, tmp_path / "out.jsonl", batch_size=6, errors=errors, max_failed_rows=4)
    job.wait()
    assert [row["ids"] for row in lines(tmp_path / "out.jsonl")] == [[1, 2, 3], [4]]
    failed = {row["idx"]: row["message"] for row in lines(tmp_path / "err.jsonl")}
    assert "prompt token 0 is 1000000000" in failed[1]
    assert "prompt is empty" in failed[2]
    assert "no column 'ids'" in failed[3]
    assert "must hold a list of token ids" in failed[4]


def test_a_model_that_is_not_there_is_named(client: Client, tmp_path: Path) -> None:
    errors = batch.JsonWriter(str(tmp_path / "err.jsonl"))
    out = batch.JsonWriter(str(tmp_path / "out.jsonl"))
    options: dict[str, Any] = {
        "errors": errors,
        "max_failed_rows": 1,
        "client": client,
        "stream": False,
        "limits": QUICK,
    }
    job = batch.Dataset([{"q": "x"}]).sample("no/such", prompt="q", output=out, **options)
    assert isinstance(job, Job)
    job.wait()
    assert "'no/such' is not served here" in lines(tmp_path / "err.jsonl")[0]["message"]


def test_a_cancelled_job_gives_up_its_samples(client: Client, server: LiveServer, tmp_path: Path) -> None:
    rows = [{"ids": [index % 60 + 1]} for index in range(20_000)]
    sample = batch.Sample(model=FAKE, tokens_column="ids", max_tokens=3)
    job = run(client, rows, sample, tmp_path / "out.jsonl", batch_size=200)
    session = f"session_id = 'bulk-job-{int(job)}-1'"
    until(lambda: server.count(f"futures WHERE {session} AND state = 'done'"))
    job.cancel()
    until(lambda: client.status(int(job))["status"] == "CANCELLED")
    until(lambda: server.count(f"sessions WHERE {session} AND closed_at IS NOT NULL"))
    until(lambda: not server.count(f"futures WHERE {session} AND state = 'pending'"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": ""}, "model is ''"),
        ({"model": "m"}, "a Sample has no column for its prompt"),
        ({"model": "m", "prompt": "a", "messages": "b"}, "a Sample has ['prompt', 'messages']"),
        ({"model": "m", "prompt": "a", "temperature": -1}, "temperature is -1"),
        ({"model": "m", "prompt": "a", "top_p": "high"}, "top_p is 'high'"),
        ({"model": "m", "prompt": "a", "stop": [1, "a"]}, "stop is [1, 'a']"),
        ({"model": "m", "prompt": "a", "num_samples": 0}, "num_samples is 0"),
        ({"model": "m", "prompt": "a", "tokens": 1}, "tokens is 1"),
        ({"model": "m", "prompt": "a", "seed": True}, "seed is True"),
    ],
)
def test_a_sample_that_cannot_be_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        operations.payload_of([batch.Sample(**fields)])
    assert message in str(caught.value)
