"""Roles on a cluster of Ray with two nodes: `tinsmith up`, a lost node, a dead controller, `down`. The tests share one
cluster and one server and run in the order of the file. Tests that take minutes are in test_ray_nodes.py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

pytest.importorskip("ray")

from support.live import API_KEY, LiveServer, environment, serving
from support.raw_client import wait_until_gone
from support.ray_cluster import Nodes, ray_nodes
from tinsmith import batch
from tinsmith.base_models import nano
from tinsmith.batch.client.dataset import Dataset
from tinsmith.batch.client.http import Client
from tinsmith.batch.client.job import Job
from tinsmith.cluster.ray.controller import RayProcess

SECRET = "a-secret-that-is-nobodys-business-0123456789"
# Only slow machines need this long.
PATIENCE_S = 120.0
SETTINGS = {"ENGINE_LEASE_S": "3", "SIGNING_SECRET": SECRET}

pytestmark = pytest.mark.timeout(600)


def eventually(read: Callable[[], Any]) -> Any:  # noqa: ANN401
    deadline = time.monotonic() + PATIENCE_S
    while not (value := read()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return value


@dataclass
class Fleet:
    nodes: Nodes
    server: LiveServer

    def command(self, *arguments: str, status: int = 0) -> Any:  # noqa: ANN401
        """What a command prints, as JSON."""
        address = self.nodes.address
        command = [sys.executable, "-m", "tinsmith.cli", *arguments, "--ray", address, "--json"]
        directory = self.server.data_dir
        completed = subprocess.run(
            [*command, "--data-dir", str(directory)],
            capture_output=True, text=True, env=environment(directory, SETTINGS), timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert completed.returncode == status, completed.stderr[-3000:]
        return json.loads(completed.stdout) if completed.stdout else None

    def up(self, *arguments: str) -> None:
        self.command("up", "--backend", "fake", *arguments)

    def processes(self) -> dict[str, RayProcess]:
        """The processes that `tinsmith status` reports, without the seconds that its start takes."""
        from tinsmith.cluster.ray.cluster import RayCluster

        return {seat.name: seat for seat in RayCluster().seats()}

    def running(self, *names: str) -> dict[str, RayProcess]:
        """Wait until exactly these processes run."""

        def read_running() -> dict[str, RayProcess]:
            processes = self.processes()
            alive = all(seat.state == "running" and seat.pid for seat in processes.values())
            return processes if alive and set(processes) == set(names) else {}

        return eventually(read_running)

    def node_of(self, name: str) -> Any:  # noqa: ANN401
        """The node on which its resources are reserved."""
        from ray.util.placement_group import get_placement_group, placement_group_table

        (node_id,) = placement_group_table(get_placement_group(name))["bundles_to_node_id"].values()
        (node,) = [node for node in self.nodes.cluster.list_all_nodes() if node.node_id == node_id]
        return node


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    import ray

    data_dir = tmp_path_factory.mktemp("ray") / "data"
    with ray_nodes(4, 4) as nodes:
        settings = {**SETTINGS, "RAY_ADDRESS": nodes.address}
        with serving(data_dir, "--role", "server", "--backend", "fake", settings=settings) as server:
            new_fleet = Fleet(nodes, server)
            new_fleet.up("--engines", "1", "--batch-workers", "1")
            ray.init(address=nodes.address, namespace="tinsmith", log_to_driver=False, logging_level="ERROR")
            yield new_fleet


def train(service: tinker.ServiceClient, meanwhile: Callable[[int], None] = lambda _step: None) -> list[float]:
    """The loss of each of ten steps."""
    model = service.create_lora_training_client("tinsmith/nano", rank=4, seed=1).result(timeout=PATIENCE_S)
    weights = {"target_tokens": np.arange(1, 9), "weights": np.ones(8, np.float32)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(list(range(8))), loss_fn_inputs=weights)
    losses = []
    for step in range(10):
        passed = model.forward_backward([datum], "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=0.1))
        losses.append(passed.result(timeout=PATIENCE_S).metrics["loss:sum"])
        stepped.result(timeout=PATIENCE_S)
        meanwhile(step)
    return losses


def test_a_node_that_is_lost_costs_a_run_nothing_but_time(fleet: Fleet) -> None:
    first = fleet.running("engine-0", "batch-worker-0")["engine-0"]
    lost = fleet.node_of("engine-0")

    def lose(step: int) -> None:
        if step == 4:
            fleet.nodes.lose(lost)
            wait_until_gone(_pid(first))

    with tinker.ServiceClient(base_url=fleet.server.url, api_key=API_KEY) as service:
        undisturbed = train(service)
        disturbed = train(service, lose)
    assert disturbed == undisturbed and len(set(undisturbed)) > 5, "each step had its effect, once"
    again = fleet.running("engine-0", "batch-worker-0")["engine-0"]
    assert again.pid != first.pid
    assert fleet.node_of("engine-0").node_id != lost.node_id


def test_a_dead_controller_is_restarted_and_adopts_running_processes(fleet: Fleet) -> None:
    import ray

    from tinsmith.cluster.ray.cluster import report

    before = fleet.running("engine-0", "batch-worker-0")
    controller = ray.get_actor("controller", namespace="tinsmith")
    ray.kill(controller, no_restart=False)
    eventually(lambda: report().get("wanted") == {"engine": 1, "sampler": 0, "batch-worker": 1})
    assert fleet.running("engine-0", "batch-worker-0") == before
    assert {seat.restarts for seat in before.values()} == {0}


@batch.remote_function
def where() -> None:
    import os

    from tinsmith import batch

    for rows in batch.load():
        print(rows[0]["text"])  # noqa: T201
        batch.save_results([{"text": row["text"], "parent": os.getppid()} for row in rows])


def test_a_bulk_job_runs_on_workers_that_ray_places(fleet: Fleet, tmp_path: Path) -> None:
    client = Client(fleet.server.url, API_KEY)
    rows = Dataset([{"text": f"t{index}"} for index in range(40)])
    started = rows.map(
        where, pool="ray", batch_size=2, output=batch.JsonWriter(str(tmp_path / "out.jsonl")), client=client
    )
    assert isinstance(started, Job)
    started.wait()
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["text"] for row in written] == [f"t{index}" for index in range(40)]
    first_texts = {f"t{index}" for index in range(0, 40, 2)}
    # A job succeeds before its workers have ended, and they send the rest of their output when they end.
    eventually(lambda: not any(Path(f"/proc/{row['parent']}").exists() for row in written))
    eventually(lambda: read_printed(fleet) >= first_texts)


def read_printed(fleet: Fleet) -> set[str]:
    """What functions printed, from the logs of the coordinator."""
    return {
        line["text"]
        for path in fleet.server.data_dir.glob("batch-worker-0/logs/batch-*.log")
        for line in map(json.loads, path.read_text().replace("\x1e", "").splitlines())
    }


def test_no_secret_is_in_a_command_line_an_environment_or_a_log(fleet: Fleet) -> None:
    processes = fleet.running("engine-0", "batch-worker-0")
    assert SECRET not in fleet.nodes.logs()
    for name, process in processes.items():
        for file in ("cmdline", "environ"):
            assert SECRET.encode() not in Path(f"/proc/{process.pid}/{file}").read_bytes(), name
        assert SECRET not in (fleet.server.data_dir / name / "process.log").read_text(), name


@pytest.mark.slow
def test_new_settings_replace_processes_and_remove_surplus_ones(fleet: Fleet) -> None:
    before = fleet.running("engine-0", "batch-worker-0")
    fleet.up("--engines", "1", "--model", f"local/other={nano.path()}")
    after = fleet.running("engine-0")
    assert after["engine-0"].fingerprint != before["engine-0"].fingerprint
    for seat in before.values():
        wait_until_gone(_pid(seat))


def test_down_drains_everything_and_leaves_nothing(fleet: Fleet) -> None:
    from ray.util import list_named_actors
    from ray.util.placement_group import placement_group_table

    seats = fleet.processes()
    status = fleet.command("status")
    assert status["controller"] is True and status["wanted"]["engine"] == 1
    assert {row["name"]: row["pid"] for row in status["processes"]} == {name: seats[name].pid for name in seats}
    assert fleet.command("down") == {"killed": []}
    for seat in seats.values():
        wait_until_gone(_pid(seat))
    assert [row for row in list_named_actors(all_namespaces=True) if row["namespace"] == "tinsmith"] == []
    assert {row["state"] for row in placement_group_table().values()} <= {"REMOVED"}
    assert fleet.command("status", status=1)["controller"] is False


def _pid(seat: RayProcess) -> int:
    assert seat.pid is not None
    return seat.pid
