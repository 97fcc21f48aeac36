"""A bulk job on dedicated samplers, one of which is killed in the middle, returns each row once."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from support.databases import database_url
from support.live import API_KEY, LiveServer, freeze, serving
from tinsmith import batch
from tinsmith.batch.client.http import Client
from tinsmith.batch.client.job import Job
from tinsmith.cluster.engines import EngineRow, Engines
from tinsmith.db.factory import open_database
from tinsmith.samplers.fake import FakeSampler
from tinsmith.types import ModelShape, Sample, SamplingParams

NANO = "tinsmith/nano"
SEED, MAX_TOKENS, READY_S = 7, 6, 90.0
ROWS = [{"ids": [1 + index, 2, *range(3, 5 + index % 7)]} for index in range(60)]


def expected_tokens(index: int, shape: ModelShape) -> list[int]:
    """What any sampler answers to a row."""
    sampler = FakeSampler(shape, {})
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=batch.row_seed(SEED, index))
    sampler.submit(Sample("r", None, np.array(ROWS[index]["ids"], np.int32), 1, params))
    ((_, result),) = sampler.step()
    return result.sequences[0].tokens_T.tolist()  # type: ignore[union-attr]


def until(reached: Callable[[], object], server: LiveServer) -> None:
    deadline = time.monotonic() + READY_S
    while not reached():
        assert time.monotonic() < deadline, (server.data_dir / "server.log").read_text()[-3000:]
        time.sleep(0.05)


@pytest.mark.extended
def test_a_sampler_is_killed_in_the_middle_of_a_bulk_job(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = ("--backend", "fake", "--samplers", "2")
    with serving(tmp_path / "data", *arguments, settings={"ENGINE_LEASE_S": "30"}) as server:
        database = open_database(database_url(server.data_dir) or f"sqlite:///{server.data_dir / 'tinsmith.db'}")
        engines, client = Engines(database, ""), Client(server.url, API_KEY)

        def samplers() -> list[EngineRow]:
            return [row for row in engines.of_base(NANO, "sampler") if row.state == "ready"]

        def read_settled() -> dict[str, bytes]:
            with database.read() as connection:
                return {row.request_id: row.body for row in connection.execute(sa.text("SELECT * FROM future_results"))}

        until(lambda: len(samplers()) == 2, server)
        victim, other = samplers()
        freeze(victim.pid, server.data_dir)  # so that its requests are still pending when it dies
        sample = batch.Sample(NANO, tokens_column="ids", max_tokens=MAX_TOKENS, seed=SEED, tokens=True)
        writer = batch.JsonWriter(str(out))
        job = batch.Dataset(ROWS).map(sample, output=writer, stream=False, client=client, batch_size=10)
        assert isinstance(job, Job)
        pending_futures = f"futures WHERE executor = '{victim.engine_id}' AND state = 'pending'"
        until(lambda: server.count(pending_futures) > 2 and len(read_settled()) > 2, server)
        before = read_settled()
        os.kill(victim.pid, signal.SIGKILL)
        job.wait()
        after = read_settled()
        with database.read() as connection:
            future_rows = connection.execute(sa.text("SELECT state, executor FROM futures WHERE kind = 'sample'")).all()
        client.close()
        database.close()
    rows_out = [json.loads(line) for line in out.read_text().splitlines()]
    shape = ModelShape(NANO, "", 512, 2048, "fake")
    assert [row["output_tokens"] for row in rows_out] == [expected_tokens(index, shape) for index in range(len(ROWS))]
    assert len(future_rows) == len(after) == len(ROWS), "every row was asked for once"
    assert {name: after[name] for name in before} == before, "what was drawn stays"
    assert {row.state for row in future_rows} == {"done"}
    assert {row.executor for row in future_rows} <= {victim.engine_id, other.engine_id}, "no engine had to"
