"""A live server with data for every page of the dashboard, for its tests and screenshots."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import tinker
from tinker import types

from support.live import LiveServer, environment, serving
from tinsmith.batch import operations
from tinsmith.batch.operations.sample import Sample

BASE = "tinsmith/nano"
TENANT = "alice"
STRANGE_NAME = '<img src=x onerror=alert(1)> & "quotes"'
STEPS = 8


@dataclass(slots=True)
class Site:
    """A server with keys, and alice's objects."""

    server: LiveServer
    key: str
    service: tinker.ServiceClient
    http: httpx.Client
    model: tinker.TrainingClient
    run: str = ""
    strange_run: str = ""
    checkpoints: list[str] = field(default_factory=list)
    sample: str = ""
    job_id: int = 0
    steps: int = 0

    def train(self, steps: int) -> None:
        """Train the first run for more steps, each with a logged reward."""
        datum = make_datum(self.model)
        for _ in range(steps):
            passed = self.model.forward_backward([datum] * 4, "cross_entropy")
            stepped = self.model.optim_step(types.AdamParams(learning_rate=1e-3))
            passed.result()
            stepped.result()
            self.steps += 1
            reward = 1 - math.exp(-self.steps / 4) + 0.05 * math.sin(3 * self.steps)
            body = {"model_id": self.run, "step": self.steps, "metrics": {"reward": reward}}
            self.http.post("log_metrics", json=body).raise_for_status()

    def long_job(self) -> int:
        """A job that runs until it is cancelled."""
        return self.submit("evaluation", [f"Say {index}." for index in range(5000)], max_tokens=64)

    def submit(self, name: str, texts: Sequence[object], max_tokens: int) -> int:
        directory = self.server.data_dir / "batch" / TENANT
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        spec = {
            "name": name,
            "batch_serialized_fn": operations.payload_of([Sample(model=BASE, prompt="text", max_tokens=max_tokens)]),
            "batch_input_format": {"format": "json", "path": f"{name}.in.jsonl"},
            "batch_output_formats": [{"format": "json", "path": f"{name}.jsonl"}],
            "batch_size": 2,
            "max_failed_rows": 0.5,
        }
        answer = self.http.post("batch/jobs", json=spec)
        assert answer.status_code == 200, answer.text
        return answer.json()["job_id"]


def make_datum(model: tinker.TrainingClient) -> types.Datum:
    text = "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>"
    tokens = model.get_tokenizer().encode(text)
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def new_key(data_dir: Path, tenant: str, *key_options: str) -> str:
    def run(*words: str) -> str:
        command = [sys.executable, "-m", "tinsmith.cli", *words, "--data-dir", str(data_dir)]
        options = {"capture_output": True, "text": True, "timeout": 60, "check": True, "env": environment(data_dir)}
        return subprocess.run(command, **options).stdout.strip()

    run("migrate")  # before the first start of the server
    return run("keys", "create", tenant, *key_options)


@contextlib.contextmanager
def neighbour(alice: Site) -> Iterator[None]:
    """Another tenant trains until the end of the block."""
    key, stop = new_key(alice.server.data_dir, "bob"), threading.Event()

    def train() -> None:
        with tinker.ServiceClient(base_url=alice.server.url, api_key=key) as service:
            model = service.create_lora_training_client(BASE, rank=4).result()
            data = [make_datum(model)] * 3
            while not stop.is_set():
                passed = model.forward_backward(data, "cross_entropy")
                stepped = model.optim_step(types.AdamParams(learning_rate=1e-3))
                passed.result()
                stepped.result()

    working = threading.Thread(target=train)
    working.start()
    try:
        yield
    finally:
        stop.set()
        working.join()


@contextlib.contextmanager
def site(data_dir: Path) -> Iterator[Site]:
    key = new_key(data_dir, TENANT, "--name", "laptop", "--quota", "models=8")
    with serving(data_dir) as server, contextlib.ExitStack() as stack:
        http = stack.enter_context(
            httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": key}, timeout=60)
        )
        service = stack.enter_context(tinker.ServiceClient(base_url=server.url, api_key=key))
        model = service.create_lora_training_client(BASE, rank=8).result()
        dashboard_site = Site(server, key, service, http, model, run=model.model_id)
        # A short job with a failed row.
        texts: list[object] = [*(f"Say {word}." for word in ("hello", "yes", "no", "please")), 7]
        dashboard_site.job_id = dashboard_site.submit("greetings", texts, max_tokens=4)
        dashboard_site.train(STEPS)
        _store(dashboard_site)
        _converse(dashboard_site)
        yield dashboard_site


def _store(target_site: Site) -> None:
    target_site.checkpoints.append(target_site.model.save_state("first").result().path)
    target_site.checkpoints.append(target_site.model.save_weights_for_sampler("answers").result().path)
    opened = target_site.http.post(
        "create_session", json={"tags": [], "display_name": STRANGE_NAME, "project_id": "maths"}
    )
    session_id = opened.raise_for_status().json()["session_id"]
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
    target_site.strange_run = target_site.http.post("create_model", json=body).raise_for_status().json()["model_id"]


def _converse(target_site: Site) -> None:
    """Sample two turns of one conversation; the site has the request of the second."""
    tokenizer = target_site.model.get_tokenizer()
    sampler = target_site.model.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=8, temperature=0.7, seed=3)
    prompt = tokenizer.encode("<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n")
    for turn in ("\n<|im_start|>user\nOnce more.<|im_end|>\n<|im_start|>assistant\n", ""):
        answer = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params).result()
        prompt += [*answer.sequences[0].tokens, *tokenizer.encode(turn)]
    (target_site.sample, *_) = (sample["request_id"] for sample in _samples(target_site, 2))


def _samples(target_site: Site, count: int) -> list[dict[str, str]]:
    listed = target_site.http.get("dashboard/samples").raise_for_status().json()["samples"]
    assert len(listed) >= count
    return listed
