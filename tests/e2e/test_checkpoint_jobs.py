"""Merges and uploads of checkpoints by a live server: results, progress, cancelling, restarts and refusals."""

from __future__ import annotations

import io
import os
import signal
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types

from support import peft_adapters
from support.fake_hub import FakeHub, fake_hub
from support.live import API_KEY, LiveServer, serving
from tinsmith.base_models import nano

TOKENS = list(range(40, 60))
PATIENCE_S = 120.0
MODULE = "tinsmith.exchange.checkpoint_job"


@dataclass
class Trained:
    """A server, a checkpoint on it, and the logprobs of its weights."""

    server: LiveServer
    hub: FakeHub
    path: str
    scored: np.ndarray

    @property
    def route(self) -> str:
        run, kind, name = self.path.removeprefix("tinker://").split("/")
        return f"training_runs/{run}/checkpoints/{kind}/{name}"

    def ok(self, method: str, path: str, json: object = None) -> dict[str, Any]:
        answer = self.ask(method, path, json)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ask(self, method: str, path: str, json: object = None) -> httpx.Response:
        headers = {"X-API-Key": API_KEY}
        return httpx.request(method, f"{self.server.url}/api/v1/{path}", json=json, headers=headers, timeout=60)

    def follow(self, job_id: str, is_reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The job when a condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_reached(job := self.ok("GET", f"checkpoint_jobs/{job_id}")):
            assert time.monotonic() < deadline, job
            time.sleep(0.05)
        return job

    def end(self, job_id: str) -> dict[str, Any]:
        return self.follow(job_id, lambda job: job["ended_at"] is not None)

    def children(self) -> list[int]:
        return self.server.child_pids(MODULE)


def logprobs(directory: Path, adapter: Path | None = None) -> np.ndarray:
    """Those that transformers and PEFT compute."""
    logits = peft_adapters.logits(directory, adapter, torch.tensor([TOKENS[:-1]])).double()
    return logits.log_softmax(-1)[range(len(TOKENS) - 1), TOKENS[1:]].numpy()


def close(actual: np.ndarray, desired: np.ndarray) -> None:
    np.testing.assert_allclose(actual, desired, rtol=1e-4, atol=1e-4)


def train(server: LiveServer) -> tuple[str, np.ndarray]:
    """The path of a trained checkpoint, and the service's logprobs."""
    inputs = {"target_tokens": np.array(TOKENS[1:]), "weights": np.ones(len(TOKENS) - 1, np.float32)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        client = service.create_lora_training_client(nano.MODEL_NAME, rank=4).result()
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        path = client.save_state("state").result().path
        (output,) = client.forward([datum], "cross_entropy").result().loss_fn_outputs
        return path, np.asarray(output["logprobs"].to_numpy(), np.float32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    with fake_hub() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.delenv("HF_TOKEN", raising=False)
        with serving(tmp_path_factory.mktemp("jobs") / "data") as server:
            yield Trained(server, hub, *train(server))


def test_a_merged_model_is_downloaded_whole_and_by_file_and_deleted(trained: Trained, tmp_path: Path) -> None:
    started = trained.ok("POST", f"{trained.route}/merge", {"dtype": "float32"})
    assert started["state"] in {"queued", "running"}, "a free server begins at once"
    assert (started["kind"], started["tinker_path"]) == ("merge", trained.path)
    job = trained.end(started["job_id"])
    assert (job["state"], job["phase"], job["reason"]) == ("done", "merging", None)
    assert job["done"] == job["total"] > 10 and job["done_bytes"] == job["total_bytes"] > 0
    close(logprobs(Path(job["directory"])), trained.scored)
    sizes = {file["name"]: file["size_bytes"] for file in job["files"]}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= sizes.keys()
    links = trained.ok("GET", f"checkpoint_jobs/{job['job_id']}/links")
    with tarfile.open(fileobj=io.BytesIO(httpx.get(links["archive"]).content)) as archive:
        assert {member.name: member.size for member in archive} == sizes
        archive.extractall(tmp_path / "model", filter="data")
    close(logprobs(tmp_path / "model"), trained.scored)
    config = (tmp_path / "model" / "config.json").read_bytes()
    assert httpx.get(links["files"]["config.json"]).content == config
    part = httpx.get(links["files"]["config.json"], headers={"Range": "bytes=1-4"})
    assert (part.status_code, part.content) == (206, config[1:5])
    listed = trained.ok("GET", f"checkpoint_jobs?tinker_path={trained.path}")
    assert listed["checkpoint_jobs"] == [job] and listed["result_bytes"] == sum(sizes.values())
    trained.ok("DELETE", f"checkpoint_jobs/{job['job_id']}")
    assert not Path(job["directory"]).exists() and httpx.get(links["archive"]).status_code == 410
    assert trained.ask("GET", f"checkpoint_jobs/{job['job_id']}").status_code == 404


@pytest.mark.extended
def test_an_upload_is_one_commit_and_its_token_is_nowhere(trained: Trained, tmp_path: Path) -> None:
    hub, token = trained.hub, trained.hub.token
    refused = trained.ask("POST", f"{trained.route}/upload", {"repository": "someone/model"})
    assert refused.status_code == 400 and "token is missing" in refused.text
    hub.held.clear()
    asked = {"repository": "someone/model", "dtype": "float32", "token": token}
    started = trained.ok("POST", f"{trained.route}/upload", asked)
    job = trained.follow(started["job_id"], lambda job: job["phase"] == "uploading" and job["total_bytes"] > 0)
    (child,) = trained.children()
    for name in ("cmdline", "environ"):
        assert token.encode() not in Path(f"/proc/{child}/{name}").read_bytes()
    assert os.getpriority(os.PRIO_PROCESS, child) == 19
    assert hub.files == {}
    hub.held.set()
    job = trained.end(started["job_id"])
    assert (job["state"], job["url"], job["directory"]) == ("done", f"{hub.url}/someone/model", None), job
    assert job["done"] == job["total"] and hub.private == {"someone/model": True}
    assert f"Bearer {token}" in hub.authorizations
    for name, content in hub.files["someone/model"].items():
        (tmp_path / name).write_bytes(content)
    close(logprobs(tmp_path), trained.scored)
    assert "library_name: transformers" in (tmp_path / "README.md").read_text()
    for path in (path for path in trained.server.data_dir.rglob("*") if path.is_file()):
        assert token.encode() not in path.read_bytes(), path
    assert not list((trained.server.data_dir / "merged").iterdir())


@pytest.mark.extended
def test_an_adapter_is_uploaded_for_peft_without_its_optimizer(trained: Trained, tmp_path: Path) -> None:
    asked = {"repository": "someone/adapter", "form": "adapter", "private": False, "token": trained.hub.token}
    job = trained.end(trained.ok("POST", f"{trained.route}/upload", asked)["job_id"])
    assert job["state"] == "done", job
    files = trained.hub.files["someone/adapter"]
    assert files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    close(logprobs(nano.path(), tmp_path), trained.scored)
    assert f"base_model: {nano.MODEL_NAME}" in files["README.md"].decode()
    again = trained.ok("POST", f"{trained.route}/upload", {**asked, "private": True})
    assert "exists and is public" in trained.end(again["job_id"])["reason"]


@pytest.mark.extended
def test_a_refused_token_is_named_and_the_job_starts_again_with_another(trained: Trained) -> None:
    asked = {"repository": "someone/again", "form": "adapter", "token": "hf_wrong"}
    job = trained.end(trained.ok("POST", f"{trained.route}/upload", asked)["job_id"])
    assert job["state"] == "failed" and "does not accept the token" in job["reason"]
    route = f"checkpoint_jobs/{job['job_id']}"
    assert "token is missing" in trained.ask("POST", f"{route}/restart", {}).text
    trained.ok("POST", f"{route}/restart", {"token": trained.hub.token})
    job = trained.end(job["job_id"])
    assert (job["state"], job["reason"]) == ("done", None) and "someone/again" in trained.hub.files
    assert "the job is done" in trained.ask("POST", f"{route}/restart", {"token": "x"}).text


@pytest.mark.extended
def test_a_cancelled_job_leaves_nothing_and_the_next_runs(trained: Trained) -> None:
    trained.hub.held.clear()
    asked = {"repository": "someone/cancelled", "token": trained.hub.token}
    first = trained.ok("POST", f"{trained.route}/upload", asked)["job_id"]
    waiting, last = (trained.ok("POST", f"{trained.route}/merge", {})["job_id"] for _ in range(2))
    trained.follow(first, lambda job: job["phase"] == "uploading")
    assert "cancel it before" in trained.ask("DELETE", f"checkpoint_jobs/{first}").text
    assert trained.ok("POST", f"checkpoint_jobs/{waiting}/cancel")["state"] == "cancelled"
    trained.ok("POST", f"checkpoint_jobs/{first}/cancel")
    assert trained.end(first)["state"] == "cancelled"
    trained.hub.held.set()
    job = trained.end(last)
    assert job["state"] == "done" and "someone/cancelled" not in trained.hub.files
    assert [path.name for path in (trained.server.data_dir / "merged").iterdir()] == [last]
    assert trained.ok("GET", f"checkpoint_jobs/{waiting}")["state"] == "cancelled"
    trained.ok("DELETE", f"checkpoint_jobs/{last}")


@pytest.mark.extended
def test_a_killed_process_is_explained(trained: Trained) -> None:
    trained.hub.held.clear()
    asked = {"repository": "someone/killed", "token": trained.hub.token}
    killed = trained.ok("POST", f"{trained.route}/upload", asked)["job_id"]
    trained.follow(killed, lambda job: job["phase"] == "uploading")
    os.kill(trained.children()[0], signal.SIGKILL)
    assert "ran out of memory" in trained.end(killed)["reason"]
    trained.hub.held.set()


@pytest.mark.extended
def test_a_restart_of_the_server_interrupts_jobs_and_deletes_what_they_left(tmp_path: Path) -> None:
    with fake_hub() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setenv("HF_TOKEN", hub.token)
        with serving(tmp_path / "data") as server:
            trained = Trained(server, hub, *train(server))
            hub.held.clear()
            running = trained.ok("POST", f"{trained.route}/upload", {"repository": "someone/model"})["job_id"]
            typed = {"repository": "someone/typed", "token": hub.token, "form": "adapter"}
            waiting = trained.ok("POST", f"{trained.route}/upload", typed)["job_id"]
            merge = trained.ok("POST", f"{trained.route}/merge", {})["job_id"]
            trained.follow(running, lambda job: job["phase"] == "uploading")
            server.stop(signal.SIGKILL)
        assert list((tmp_path / "data" / "merged").iterdir())
        hub.held.set()
        with serving(tmp_path / "data") as server:
            trained.server = server
            job = trained.end(running)
            assert job["state"] == "interrupted" and "start it again" in job["reason"]
            job = trained.end(waiting)
            assert job["state"] == "interrupted" and "never stores a typed token" in job["reason"]
            assert trained.end(merge)["state"] == "done"
            assert [path.name for path in (tmp_path / "data" / "merged").iterdir()] == [merge]
            trained.ok("POST", f"checkpoint_jobs/{running}/restart", {})
            assert trained.end(running)["state"] == "done" and "someone/model" in hub.files
