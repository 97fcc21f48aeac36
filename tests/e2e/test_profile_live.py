"""`tinsmith profile` and its routes: a running engine traces its steps while a run trains on."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import tinker
from tinker import types

from support.live import API_KEY, LiveServer, environment, serving

NANO = "tinsmith/nano"
HEADERS = {"X-API-Key": API_KEY}


def train_until(model: tinker.TrainingClient, stop: threading.Event) -> None:
    tokens = np.arange(20, 60)
    datum = types.Datum(
        types.ModelInput.from_ints(tokens[:-1].tolist()),
        {"target_tokens": tokens[1:], "weights": np.ones(39, np.float32)},
    )
    sampler = model.save_weights_and_get_sampling_client().result()
    while not stop.is_set():
        model.forward_backward([datum], "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        sampler.sample(types.ModelInput.from_ints([20, 21]), 1, types.SamplingParams(max_tokens=8)).result()


def run_profile(server: LiveServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinsmith.cli", "profile", *arguments, "--data-dir", str(server.data_dir)]
    return subprocess.run(
        command, env=environment(server.data_dir), capture_output=True, text=True, timeout=120, check=False
    )


def test_a_running_engine_is_profiled_on_demand(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "data", "--model", NANO) as server,
        tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        model = service.create_lora_training_client(NANO, rank=4).result()
        stop = threading.Event()
        trainer = threading.Thread(target=train_until, args=(model, stop))
        trainer.start()
        try:
            done = run_profile(server, NANO, "--seconds", "30", "--json")
            assert done.returncode == 0, done.stderr
            profile = json.loads(done.stdout)
            kinds = [Path(path).name.split("-")[0] for path in profile["files"]]
            assert profile["state"] == "finished" and set(kinds) == {"training", "optimizer", "sampling"}
            assert all(Path(path).stat().st_size and server.data_dir in Path(path).parents for path in profile["files"])
            root = f"{server.url}/api/v1/operator"
            started = httpx.post(f"{root}/start_profile", json={"base_model": NANO}, headers=HEADERS)
            assert started.json()["state"] == "requested"
            again = httpx.post(f"{root}/start_profile", json={"base_model": NANO}, headers=HEADERS)
            assert again.status_code == 400 and "is not finished; stop it" in again.json()["detail"]
            stopped = httpx.post(f"{root}/stop_profile", json={"base_model": NANO}, headers=HEADERS)
            assert stopped.json()["state"] in ("failed", "stopping", "finished")
            (listed,) = httpx.get(f"{root}/profiles", headers=HEADERS).json()["profiles"]
            assert listed["base_model"] == NANO
            unknown = httpx.post(f"{root}/start_profile", json={"base_model": "no/such"}, headers=HEADERS)
            assert unknown.status_code == 404
        finally:
            stop.set()
            trainer.join()


def test_a_backend_that_cannot_trace_refuses_by_name(fake_server: LiveServer) -> None:
    done = run_profile(fake_server, NANO)
    assert done.returncode != 0 and "the fake backend computes nothing" in " ".join(done.stderr.split())
