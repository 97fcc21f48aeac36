"""Pools on machines that SkyPilot rents: their specifications, the task that starts them, and which process runs their
jobs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from support.coordinating import PATIENCE_S, submit
from support.databases import fresh_url
from tinsmith import batch
from tinsmith.batch.coordinator import coordinator as coordinators
from tinsmith.batch.coordinator.coordinator import Coordinator
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.pools.specs import PoolSpec, parse_pool, read_pool, skypilot_task
from tinsmith.cli import main as cli
from tinsmith.db.factory import open_database
from tinsmith.errors import SettingsError, UserError
from tinsmith.settings import Settings


@pytest.mark.parametrize(
    "infra",
    ["aws", "aws/us-east-1", "aws/*/us-east-1a", "Kubernetes/my-context", "k8s/a/b", "ssh/pool", "slurm/c", "*"],
)
def test_a_pool_of_skypilots_infra_is_rented(infra: str) -> None:
    pool = parse_pool("p", {"pool": {"workers": 2}, "resources": {"infra": infra, "cpus": 4}})
    assert pool.rented and pool.infra == infra


PUBLISHED_POOLS = {
    "simple": (
        "pool: {workers: 2}\nresources: {cpus: 1}\nsetup: echo done\n",
        PoolSpec("p", 2, setup="echo done", cpus=1.0),
    ),
    "diffusion": (
        "pool: {workers: 2}\nresources: {cloud: aws, accelerators: 'L4:1'}\nsetup: |\n  uv venv .venv\n",
        PoolSpec("p", 2, 1, "uv venv .venv\n", "aws"),
    ),
    "custom formats": (
        "pool: {workers: 2}\nresources: {cpus: 1+}\nsetup: echo a\nrun: echo b\n",
        PoolSpec("p", 2, setup="echo a", cpus=1.0),
    ),
    "autoscaling": (
        "pool: {min_workers: 1, max_workers: 4, queue_length_threshold: 8, upscale_delay_seconds: 9, "
        "downscale_delay_seconds: 9}\nresources: {cloud: gcp, region: us-central1, zone: us-central1-a, memory: 8+}\n",
        PoolSpec("p", 4, infra="gcp/us-central1/us-central1-a"),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED_POOLS)
def test_files_of_sky_batchs_pools_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    text, expected = PUBLISHED_POOLS[name]
    (tmp_path / "pool.yaml").write_text(text)
    assert read_pool("p", tmp_path / "pool.yaml") == expected
    if expected.rented:
        task = skypilot_task("p", tmp_path / "pool.yaml", 1, {})
        assert task["resources"]["infra"] == expected.infra and "cloud" not in task["resources"]  # type: ignore[index, operator]


def test_machines_of_skypilot_serve_the_pool_that_their_task_was_made_of(tmp_path: Path) -> None:
    """The task's file and environment configure an equal pool on the machine, with the same workers and devices."""
    path = tmp_path / "pool.yaml"
    path.write_text(
        "pool: {workers: 3}\nresources: {infra: aws/us-east-1, accelerators: H100:2, cpus: 8}\nsetup: echo it's here\n"
    )
    environment = {"COLUMNS": "200", "TINSMITH_STORAGE_DIR": "s3://bucket/x", "TINSMITH_MODELS": '["a=b"]'}
    words = ("batch", "task", f"gpu={path}", "--machines", "2")
    task = yaml.safe_load(CliRunner(env=environment).invoke(cli.app, words).stdout)
    assert task["num_nodes"] == 2
    assert task["resources"] == {"infra": "aws/us-east-1", "accelerators": "H100:2", "cpus": 8}
    assert task["setup"].endswith("echo it's here")
    writes = task["run"].splitlines()[0]
    subprocess.run(["bash", "-c", writes], check=True, env={**os.environ, "HOME": str(tmp_path)})
    assert read_pool("gpu", path) == PoolSpec("gpu", 3, 2)
    values = {name.removeprefix("TINSMITH_").lower(): value for name, value in task["envs"].items()}
    assert json.loads(values.pop("batch_pools")) == ["gpu=~/pool.yaml"] and json.loads(values.pop("models")) == ["a=b"]
    assert {*values} | {name.removeprefix("TINSMITH_").lower() for name in task["secrets"]} <= {*Settings.model_fields}
    assert Settings.model_validate(values).storage_dir == "s3://bucket/x"
    path.write_text("pool: {workers: 1}\nresources: {infra: aws}\nnum_nodes: 4\n")
    assert skypilot_task("gpu", path, None, {})["num_nodes"] == 4, "as many as the file says"
    path.write_text("pool: {workers: 3}\n")
    refused = CliRunner(env=environment).invoke(cli.app, ("batch", "task", f"gpu={path}"))
    assert isinstance(refused.exception, SettingsError) and "infra is 'local'" in str(refused.exception)


@batch.remote_function
def keep() -> None:
    from tinsmith import batch

    for rows in batch.load():
        batch.save_results(rows)


def test_jobs_of_a_rented_pool_are_left_to_its_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server runs its own jobs, and ends cancelled ones of every pool. A machine runs only jobs of its pool."""
    monkeypatch.setattr(coordinators, "POLL_S", 0.05)
    rented, machine_pool = tmp_path / "rented.yaml", tmp_path / "there.yaml"
    rented.write_text("pool: {workers: 1}\nresources: {infra: k8s}\n")
    machine_pool.write_text("pool: {workers: 1}\n")
    server_settings = {"data_dir": tmp_path / "server", "backend": "fake", "batch_pools": (f"gpu={rented}",)}
    machine_settings: dict[str, object] = {"data_dir": tmp_path / "machine", "role": "batch-worker", "batch_workers": 0}
    with contextlib.closing(open_database(fresh_url(tmp_path))) as database:
        jobs = BatchJobs(database)
        server = Coordinator(Settings.model_validate(server_settings), jobs, "server")
        machine = Coordinator(
            Settings.model_validate(server_settings | machine_settings | {"batch_pools": (f"gpu={machine_pool}",)}),
            jobs,
            "machine",
        )

        def submit_job(name: str, pool: str) -> int:
            output = {"format": "json", "path": str(tmp_path / f"{name}.jsonl")}
            return submit(jobs, tmp_path, keep, rows=2, batch_pool_name=pool, batch_output_formats=[output])

        async def until(job_id: int, status: str) -> None:
            deadline = time.monotonic() + PATIENCE_S
            while jobs.find("local", job_id).status != status:
                assert time.monotonic() < deadline, jobs.find("local", job_id)
                await asyncio.sleep(0.02)

        async def run() -> None:
            server.start()
            try:
                theirs, cancelled = submit_job("theirs", "gpu"), submit_job("cancelled", "gpu")
                jobs.cancel("local", cancelled)
                await until(cancelled, "CANCELLED")
                await until(submit_job("ours", "local"), "SUCCEEDED")
                assert jobs.find("local", theirs).status == "PENDING"
                with pytest.raises(UserError, match="num_nodes"):
                    server.resize("gpu", 2)
                machine.start()
                assert machine._leaves_pool("local") and machine._leaves_pool("unknown")
                await until(theirs, "SUCCEEDED")
            finally:
                await machine.stop()
                await server.stop()

        asyncio.run(run())
    assert len((tmp_path / "theirs.jsonl").read_text().splitlines()) == 2


def test_a_cloud_that_skypilot_does_not_know_is_refused() -> None:
    with pytest.raises(UserError, match="SkyPilot's, such as aws/us-east-1"):
        parse_pool("p", {"pool": {"workers": 1}, "resources": {"infra": "awss/us-east-1"}})
