"""A plain installation, without extras: everything runs but what computes, and that says what it needs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from support.cluster import BASE, Cluster, start_cluster
from support.databases import SQLITE
from support.live import API_KEY, LiveServer, environment
from tinsmith import batch
from tinsmith.batch import Client, Dataset, Job

OF_EXTRAS = ("torch", "functorch", "transformers", "triton", "tinker")


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has this one's packages but those of engines and clients."""
    directory = tmp_path_factory.mktemp("base") / "venv"
    venv.create(directory, symlinks=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.startswith(OF_EXTRAS):
            (packages / path.name).symlink_to(path)
    return directory / "bin" / "python"


def run(python: Path, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "tinsmith.cli", *arguments]
    settings = environment(directory, {"DATA_DIR": str(directory), "SIGNING_SECRET": "s" * 32})
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("role", ["all", "engine"])
def test_an_engine_names_the_packages_that_it_lacks(bare_python: Path, tmp_path: Path, role: str) -> None:
    completed = run(bare_python, tmp_path, "serve", "--role", role)
    assert completed.returncode == 2
    assert completed.stderr == (
        "error: an engine needs torch and transformers: pip install 'tinsmith[engine]'; to run a server whose engines "
        "are elsewhere, pass --role server\n"
    )


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [(("demo",), "tinker", "demo"), (("rank", "--join", "127.0.0.1:1"), "torch", "engine")],
    ids=["demo", "rank"],
)
def test_a_command_that_computes_names_the_package_that_it_lacks(
    bare_python: Path, tmp_path: Path, command: tuple[str, ...], package: str, extra: str
) -> None:
    completed = run(bare_python, tmp_path, *command)
    assert completed.returncode == 2, completed.stderr
    assert completed.stderr == f"error: this command needs {package}: pip install 'tinsmith[{extra}]'\n"


@pytest.mark.extended
def test_doctor_reports_the_missing_package(bare_python: Path, tmp_path: Path) -> None:
    completed = run(bare_python, tmp_path, "doctor", "--json")
    details = {finding["what"]: finding["detail"] for finding in json.loads(completed.stdout)}
    assert completed.returncode == 1, completed
    assert details["torch"] == "cannot be imported: No module named 'torch'; pip install 'tinsmith[engine]'"
    assert "sampler" not in details and details["model"].startswith("tinsmith/nano: ")
    assert "'tinsmith[engine]'" in run(bare_python, tmp_path, "doctor").stdout


@pytest.fixture
def service(tmp_path: Path, bare_python: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """A server and a worker of bulk jobs without the packages of engines, and an engine that has them."""
    with start_cluster(tmp_path, SQLITE) as cluster, contextlib.ExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(bare_python))
            server = _start(stack, cluster, "server")
            _start(stack, cluster, "batch-worker")
        _start(stack, cluster, "engine")
        cluster.await_ready("engine")
        yield server


def _start(stack: contextlib.ExitStack, cluster: Cluster, role: str) -> LiveServer:
    return stack.enter_context(cluster.process(role, role, "--backend", "torch"))


@batch.remote_function
def find_torch() -> None:
    import importlib.util

    from tinsmith import batch

    for rows in batch.load():
        has_torch = importlib.util.find_spec("torch") is not None
        batch.save_results([{"n": row["n"], "has_torch": has_torch} for row in rows])


@pytest.mark.extended
def test_servers_and_workers_of_bulk_jobs_run_without_them(service: LiveServer, tmp_path: Path) -> None:
    inputs = {"target_tokens": np.arange(1, 9), "weights": np.ones(8, np.float32)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(list(range(8))), loss_fn_inputs=inputs)
    with tinker.ServiceClient(base_url=service.url, api_key=API_KEY) as client:
        model = client.create_lora_training_client(BASE, rank=4).result()
        losses = []
        for _ in range(2):
            passed = model.forward_backward([datum], "cross_entropy")
            model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            losses.append(passed.result().metrics["loss:sum"])
        assert losses[1] < losses[0]
        sampler = model.save_weights_and_get_sampling_client().result()
        sampled = sampler.sample(types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=3)).result()
        assert 1 <= len(sampled.sequences[0].tokens) <= 3
    path = tmp_path / "out.jsonl"
    rows = Dataset([{"n": number} for number in range(6)])
    job = rows.map(find_torch, batch_size=2, output=batch.JsonWriter(str(path)), client=Client(service.url, API_KEY))
    assert isinstance(job, Job)
    job.wait()
    expected = [{"n": number, "has_torch": False} for number in range(6)]
    assert [json.loads(line) for line in path.read_text().splitlines()] == expected
