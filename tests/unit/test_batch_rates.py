"""Rate limits of bulk jobs, in simulated time."""

from __future__ import annotations

import itertools
import random
from collections import deque

import pytest

from tinsmith.batch.coordinator.job_run import BURST_S, RateLimits
from tinsmith.batch.coordinator.rows import JobRecord
from tinsmith.batch.coordinator.state import Claim
from tinsmith.batch.job_request import read_job
from tinsmith.batch.types import JobSpec, RowRange
from tinsmith.errors import UserError

MINUTE = 60.0
JOB = {
    "batch_serialized_fn": "payload",
    "batch_input_format": {"format": "json", "path": "/in.jsonl"},
    "batch_output_formats": [{"format": "json", "path": "/out.jsonl"}],
}


class Clock:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def spec(batch_size: int, **limits: float) -> JobSpec:
    return read_job({**JOB, "batch_size": batch_size, **limits})


def claims_of(count: int, rows: int, batch_ids: itertools.count[int]) -> list[Claim]:
    claims = []
    for batch_id in itertools.islice(batch_ids, count):
        start, end = RowRange(batch_id * rows, batch_id * rows + rows - 1)
        claims.append(Claim(batch_id, start, end, 1, 0, 0, None, None, "w"))
    return claims


def peak_per_minute(starts: list[tuple[float, float]]) -> float:
    peak = total = 0.0
    window: deque[tuple[float, float]] = deque()
    for at, amount in starts:
        window.append((at, amount))
        total += amount
        while window[0][0] <= at - MINUTE:
            total -= window.popleft()[1]
        peak = max(peak, total)
    return peak


@pytest.mark.parametrize(("per_minute", "batch_size"), [(600, 7), (30, 30), (6000, 1)])
def test_no_minute_has_more_requests_than_its_limit_and_none_is_wasted(per_minute: int, batch_size: int) -> None:
    """Several workers claim random numbers of batches at random moments; the coordinator is sometimes replaced, and its
    successor knows only the job's rows."""
    clock, chance, batch_ids = Clock(), random.Random(1), itertools.count()
    limits = RateLimits(spec(batch_size, requests_per_minute=per_minute), None, clock)
    starts: list[tuple[float, float]] = []
    while clock.at < 1000 + 5 * MINUTE:
        if chance.random() < 0.01:
            limits = RateLimits(spec(batch_size, requests_per_minute=per_minute), dict(limits.paid_until), clock)
        grant = limits.take(chance.randint(1, 50))
        pending = chance.randint(0, grant.batches)
        claims = claims_of(pending, batch_size, batch_ids)
        limits.record_claims(grant, claims)
        starts += [(clock.at, batch_size) for _ in claims]
        for claim in claims:
            limits.record_end(claim, 0)
        clock.at += min(chance.uniform(0.0, 0.2), max(limits.wait_s(), 0.01))
    assert peak_per_minute(starts) <= per_minute * (1 + BURST_S / MINUTE) + batch_size
    assert sum(rows for _, rows in starts) >= 0.95 * 5 * per_minute


def test_tokens_are_charged_as_they_come_out() -> None:
    """Rows take 100 tokens on average. This is unknown until the first batch has ended, so that batch runs alone."""
    clock, chance, batch_ids, per_minute = Clock(), random.Random(2), itertools.count(), 60_000
    limits = RateLimits(spec(4, tokens_per_minute=per_minute), None, clock)
    starts: list[tuple[float, float]] = []
    running: list[tuple[float, Claim, int]] = []
    job, rows, tokens = None, 0, 0
    while clock.at < 1000 + 5 * MINUTE:
        grant = limits.take(8)
        assert job is not None or len(running) + grant.batches <= 1, "the first batch runs alone"
        claims = claims_of(grant.batches, 4, batch_ids)
        limits.record_claims(grant, claims)
        for claim in claims:
            took = sum(chance.randint(50, 150) for _ in range(4))
            running.append((clock.at + chance.uniform(0.1, 2.0), claim, took))
            starts.append((clock.at, took))
        clock.at += 0.1
        for ends in [attempt for attempt in running if attempt[0] <= clock.at]:
            running.remove(ends)
            limits.record_end(ends[1], ends[2])
            rows, tokens = rows + 4, tokens + ends[2]
            job = record(rows_ok=rows, tokens_out=tokens)
            limits.learn(job)
    assert peak_per_minute(starts) <= per_minute * (1 + BURST_S / MINUTE) + 8 * 4 * 150
    assert sum(took for _, took in starts) >= 0.95 * 5 * per_minute


def record(**changes: int) -> JobRecord:
    values = dict.fromkeys(JobRecord.__dataclass_fields__, 0)
    return JobRecord(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute"])
@pytest.mark.parametrize("limit", [0, -5, float("nan")])
def test_a_limit_that_is_not_positive_is_refused_by_its_name(name: str, limit: float) -> None:
    with pytest.raises(UserError, match=name):
        spec(1, **{name: limit})


def test_a_batch_with_more_rows_than_a_minute_allows_is_refused() -> None:
    with pytest.raises(UserError, match="batch_size is 32 and requests_per_minute is 10"):
        spec(32, requests_per_minute=10)
