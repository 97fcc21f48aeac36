"""An engine with a rank on each of two nodes of a Ray cluster trains a real model; a node is lost. Run by `make
test-ray`; it takes minutes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

pytest.importorskip("ray")

from support.live import API_KEY, environment, serving
from support.random_data import random_data
from support.raw_client import wait_until_gone
from support.ray_cluster import Nodes, ray_nodes

PATIENCE_S = 240.0
SECRET = "a-secret-of-all-nodes-0123456789abcdef"
SETTINGS = {
    **{"ENGINE_LEASE_S": "5", "SIGNING_SECRET": SECRET, "DEVICE": "cpu", "DATA_PARALLEL": "2", "SHARD_BASE": "true"},
    **{"SESSION_TIMEOUT_S": "-1", "RANK_TIMEOUT_S": "120"},
}
RANKS = "tinsmith.backends.distributed"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def eventually(read: Callable[[], Any]) -> Any:  # noqa: ANN401
    deadline = time.monotonic() + PATIENCE_S
    while not (value := read()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return value


def command(directory: Path, *arguments: str) -> Any:  # noqa: ANN401
    words = [sys.executable, "-m", "tinsmith.cli", *arguments, "--json", "--data-dir", str(directory)]
    completed = subprocess.run(
        words, capture_output=True, text=True, env=environment(directory, SETTINGS), timeout=PATIENCE_S, check=False
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return json.loads(completed.stdout)


def ranks_of(directory: Path) -> list[int]:
    """The processes of ranks on other machines: their parents write to the log of a shell below this directory."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if RANKS in (path / "cmdline").read_text() and str(directory) in str((path / "fd/2").readlink()):
                pids += [int(path.name)] if "rank-engine" in str((path / "fd/2").readlink()) else []
        except OSError:
            continue
    return pids


def train(service: tinker.ServiceClient, meanwhile: Callable[[int], None] = lambda _step: None) -> list[float]:
    """The loss and the norm of the gradient of each step, and the logprobs of the trained adapter."""
    model = service.create_lora_training_client("tinsmith/nano", rank=4, seed=1).result(timeout=PATIENCE_S)
    data = random_data(np.random.default_rng(0), (12, 30, 7), 200)
    losses: list[float] = []
    for step in range(6):
        passed = model.forward_backward(data, "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=1e-3, eps=1e-6))
        losses.append(passed.result(timeout=PATIENCE_S).metrics["loss:sum"])
        stepped.result(timeout=PATIENCE_S)
        meanwhile(step)
    outputs = model.forward(data, "cross_entropy").result(timeout=PATIENCE_S).loss_fn_outputs
    return losses + [value for output in outputs for value in output["logprobs"].data]


def node_of(nodes: Nodes, bundle: int) -> Any:  # noqa: ANN401
    from ray.util.placement_group import get_placement_group, placement_group_table

    node_ids = placement_group_table(get_placement_group("engine-0"))["bundles_to_node_id"]
    return next((node for node in nodes.cluster.list_all_nodes() if node.node_id == node_ids[bundle]), None)


def test_the_node_of_a_rank_is_lost_and_the_run_continues(tmp_path: Path) -> None:
    import ray

    directory = tmp_path / "data"
    with (
        ray_nodes(1, 1, 1) as nodes,
        serving(directory, "--role", "server", settings=SETTINGS) as server,
        tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        ray.init(address=nodes.address, namespace="tinsmith", log_to_driver=False, logging_level="ERROR")
        command(directory, "up", "--ray", nodes.address, "--engines", "1", "--machines", "2", "--engine-cpus", "1")
        undisturbed = train(service)
        (first,) = ranks_of(directory)
        surviving_node, lost_node = node_of(nodes, 0), node_of(nodes, 1)
        assert surviving_node.node_id != lost_node.node_id

        def lose(step: int) -> None:
            if step == 2:
                nodes.lose(lost_node)
                wait_until_gone(first)

        disturbed = train(service, lose)
        assert np.abs(np.array(disturbed) - undisturbed).max() < 1e-4 and len(set(undisturbed)) > 6
        assert node_of(nodes, 0).node_id == surviving_node.node_id
        assert node_of(nodes, 1).node_id not in (surviving_node.node_id, lost_node.node_id)
        assert ranks_of(directory) != [first]
        log = "".join(path.read_text() for path in (directory / "engine-0" / "logs").glob("engine-*.log"))
        assert "a rank of the base model is lost" in log and SECRET not in log + nodes.logs()
        second = ranks_of(directory)
        assert command(directory, "down", "--ray", nodes.address) == {"killed": []}
        for pid in second:
            wait_until_gone(pid)
        assert eventually(lambda: not ranks_of(directory))
