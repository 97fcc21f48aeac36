"""Servers with storage in a bucket, through the real SDK: one reads what another wrote."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import tinker
from tinker import types

from support import buckets
from support.buckets import Bucket
from support.live import API_KEY, LiveServer, serving
from support.raw_client import engine_of

BASE = "tinsmith/nano"
ADAM = types.AdamParams(learning_rate=0.1)
BODY = {"model": BASE, "max_tokens": 4, "temperature": 0}
LINES = b"".join(
    json.dumps(
        {
            "custom_id": f"request-{index}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {**BODY, "messages": [{"role": "user", "content": f"Say {index}."}]},
        }
    ).encode()
    + b"\n"
    for index in range(3)
)


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with buckets.bucket() as new_bucket:
        yield new_bucket


@contextlib.contextmanager
def server_on(bucket: Bucket, tmp_path: Path, name: str) -> Iterator[LiveServer]:
    """A server with its own data directory; bucket and database are shared."""
    settings = {
        "STORAGE_DIR": f"{bucket.url}/tinsmith",
        "DATABASE_URL": f"sqlite:///{tmp_path / 'shared.db'}",
        "ENGINE_LEASE_S": "2",
    }
    with serving(tmp_path / name, "--backend", "fake", settings=settings) as server:
        yield server


def openai_client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY)


def download(server: LiveServer, path: str) -> dict[str, bytes]:
    """The files of a checkpoint, read from its archive."""
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    link = server.get(f"training_runs/{run_id}/checkpoints/{kind}/{name}/archive_link").json()["url"]
    with tarfile.open(fileobj=io.BytesIO(httpx.get(link).content)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def run_batch(client: openai.OpenAI) -> str:
    """Run an OpenAI batch; return the id of its output."""
    file = client.files.create(file=("in.jsonl", LINES), purpose="batch")
    assert client.files.content(file.id).content == LINES
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + 120
    while (polled := client.batches.retrieve(batch.id)).status not in ("completed", "failed", "expired"):
        assert time.monotonic() < deadline, polled
        time.sleep(0.1)
    assert polled.status == "completed" and polled.output_file_id, polled
    return polled.output_file_id


def test_another_machine_continues_from_the_bucket(bucket: Bucket, tmp_path: Path) -> None:
    with server_on(bucket, tmp_path, "one") as first:
        with tinker.ServiceClient(base_url=first.url, api_key=API_KEY) as service:
            model = service.create_lora_training_client(BASE, rank=4).result()
            for _ in range(3):
                model.optim_step(ADAM).result()
            path = model.save_state("kept").result().path
            model.optim_step(ADAM).result()
            # The engine dies, and the local cache of the bucket is deleted.
            os.kill(engine_of(first), signal.SIGKILL)
            shutil.rmtree(first.data_dir / "cache")
            resumed = service.create_training_client_from_state_with_optimizer(path).result()
            assert resumed.optim_step(ADAM).result().metrics["step"] == 4
            assert model.optim_step(ADAM).result().metrics["step"] == 5
            model_id = model.model_id
        output_id = run_batch(openai_client(first))
        deadline = time.monotonic() + 60  # a batch is completed before its directory is deleted
        while bucket.keys("tinsmith/openai_batches/"):
            assert time.monotonic() < deadline, "the directory of a batch goes with it"
            time.sleep(0.1)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
    assert not {"checkpoints", "versions", "snapshots", "files", "openai_batches"} & set(os.listdir(first.data_dir))

    with server_on(bucket, tmp_path, "two") as two:
        files = download(two, path)
        assert files.keys() == {"fake_adapter.json"}
        assert json.loads(files["fake_adapter.json"])["step"] == 3
        lines = openai_client(two).files.content(output_id).text.splitlines()
        assert {json.loads(line)["custom_id"] for line in lines} == {f"request-{index}" for index in range(3)}
        ranged = httpx.get(
            f"{two.url}/v1/files/{output_id}/content",
            headers={"authorization": f"Bearer {API_KEY}", "range": "bytes=2-5"},
        )
        assert (ranged.status_code, ranged.content) == (206, "\n".join(lines).encode()[2:6])
        with tinker.ServiceClient(base_url=two.url, api_key=API_KEY) as service:
            sampler = service.create_sampling_client(model_path=path).result()
            prompt = types.ModelInput.from_ints([1, 2, 3])
            assert sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result().sequences
        key = next(key for key in bucket.keys("tinsmith/checkpoints/") if key.endswith("fake_adapter.json"))
        bucket.put(key, bucket.get(key)[:-1] + b" ")
        shutil.rmtree(two.data_dir / "cache")
        with tinker.ServiceClient(base_url=two.url, api_key=API_KEY) as service:
            with pytest.raises(tinker.RequestFailedError, match=r"is damaged: fake_adapter\.json does not hold"):
                service.create_training_client_from_state(path).result()
        assert model_id


def test_a_server_whose_bucket_is_not_there_does_not_start(bucket: Bucket, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tinsmith.cli.main", "serve", "--port", "0", "--data-dir", str(tmp_path)]
    environment = {**os.environ, "TINSMITH_STORAGE_DIR": f"s3://no-{bucket.name}/tinsmith"}
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert completed.returncode != 0
    assert "storage_dir is" in completed.stdout + completed.stderr
