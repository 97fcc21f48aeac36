"""`Job.stream(order="any")`: rows in the order of commits, each once, whatever happens to batches and connections."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tinsmith import batch
from tinsmith.batch.client import http
from tinsmith.batch.client.http import Client
from tinsmith.batch.client.job import CommittedRows, Job

Rows = list[dict[str, Any]]
BAD = "t5"


class FlakyTransport(httpx.HTTPTransport):
    """Loses every second request."""

    def __init__(self) -> None:
        super().__init__()
        self._requests = count()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if next(self._requests) % 2 == 0:
            raise httpx.ConnectError("down", request=request)
        return super().handle_request(request)


@pytest.fixture
def flaky(client: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(http, "PAUSE_S", 0.01)
    unreliable = Client(client.base_url, "tml-flaky")
    headers = {"X-API-Key": client._http.headers["X-API-Key"]}
    unreliable._http = httpx.Client(base_url=client.base_url, headers=headers, transport=FlakyTransport())
    return unreliable


def committed_texts(client: Client, job: Job, size: int = 1000) -> list[str]:
    """The texts of the committed rows in the order of commits, from the numbers of rows, in pages."""
    texts: list[str] = []
    after = 0
    while page := client.partial(int(job), after, size, "commits")["batches"]:
        numbers = [batch_range["commit_number"] for batch_range in page]
        assert numbers == list(range(after + 1, after + 1 + len(page)))
        spans = [(batch_range["start_idx"], batch_range["end_idx"]) for batch_range in page]
        texts += [f"t{index}" for start, end in spans for index in range(start, end + 1)]
        after = numbers[-1]
    return [text for text in texts if text != BAD]


@pytest.mark.extended
def test_rows_come_once_in_the_order_of_commits(client: Client, flaky: Client, tmp_path: Path) -> None:
    def echo(rows: Rows, gate: str) -> Rows:
        import os
        import time

        while any(row["text"] == "t0" for row in rows) and not os.path.exists(gate):
            time.sleep(0.01)
        if any(row["text"] == "t5" for row in rows):
            raise ValueError("bad")
        return rows

    data, gate = batch.from_items([{"text": f"t{index}"} for index in range(24)]), tmp_path / "gate"
    kwargs = {"fn_kwargs": {"gate": str(gate)}, "max_failed_rows": 1}
    output = batch.JsonWriter(f"{tmp_path}/o.jsonl")
    job = data.map_batches(echo, batch_size=2, output=output, stream=False, client=client, **kwargs)  # type: ignore[call-overload]
    reader = Job(int(job), flaky)
    with pytest.raises(ValueError, match=r"order is 'commits'; it must be one of \['input', 'any'\]"):
        reader.stream(order="commits")
    streamed = reader.stream(order="any")
    texts = [next(streamed)["text"] for _ in range(4)]
    assert "t0" not in texts and texts == committed_texts(client, job)[:4], "nothing waits for the first batch"
    job.cancel()
    job.wait(check=False)
    texts += [row["text"] for row in streamed]
    assert texts == committed_texts(client, job) == committed_texts(client, job, 1), "the parts of its commits are kept"

    again = job.resume()
    resumed = Job(int(again), flaky).stream(order="any")
    before = [next(resumed)["text"] for _ in texts]
    assert sorted(before) == sorted(texts), "first what the other job has committed"
    gate.touch()
    again.wait()
    after = [row["text"] for row in resumed]
    everything = [f"t{index}" for index in range(24) if f"t{index}" != BAD]
    assert len(before + after) == 23 and {*before, *after} == {*everything}
    rows = CommittedRows(client, int(again), 0)
    commits = list(rows.commits(0))
    assert [row["text"] for row in rows.following(commits[0], 0)] == everything, "from the output, in input order"
    tail = [row["text"] for row in CommittedRows(client, int(again), 0).following(commits[-1], 1)]
    assert tail == [f"t{index}" for index in range(commits[-1]["start_idx"] + 1, commits[-1]["end_idx"] + 1)]
    assert [row["text"] for row in again.stream()] == everything
