"""An engine dies while it migrates idle runs to a new engine: each run continues unchanged."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from fault.crash.restarted_server import RestartedServer, keep_server_running
from fault.crash.runs import NANO, PATIENCE_S
from fault.crash.test_engines import engine
from support.live import LiveServer

RUNS = 3


@contextlib.contextmanager
def moving_engine(server: RestartedServer, name: str, failpoints: str = "") -> Iterator[LiveServer]:
    with engine(server, name, failpoints, REBALANCE_IDLE_S="0.5") as engine_process:
        yield engine_process


def wait(reached: Callable[[], object], server: RestartedServer) -> None:
    deadline = time.monotonic() + 90
    while not reached():
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.1)


def train_and_collect(client: tinker.TrainingClient, steps: int, seed: int) -> list[object]:
    """Return a run's results of some steps; the last pass has no optimizer step yet."""
    results: list[object] = []
    for step in range(steps):
        tokens = [1 + step, 2 + seed, 3, 4]
        inputs: dict[str, Any] = {"target_tokens": np.array(tokens), "weights": np.ones(4, np.float32)}
        datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
        if step:
            stepped = client.optim_step(types.AdamParams(learning_rate=1 / 64)).result(PATIENCE_S)
            results.append(stepped.metrics)
        results.append(client.forward_backward([datum], "cross_entropy").result(PATIENCE_S).metrics["loss:sum"])
    return results


def all_told(clients: list[tinker.TrainingClient]) -> list[list[object]]:
    return [train_and_collect(client, 4, seed) for seed, client in enumerate(clients)]


def check(directory: Path, spec: str) -> None:
    with (
        keep_server_running(directory / "server", "--backend", "fake", "--role", "server") as server,
        contextlib.ExitStack() as stack,
    ):
        first = stack.enter_context(moving_engine(server, "one", spec))
        service = stack.enter_context(tinker.ServiceClient(base_url=server.url, api_key=server.keys["ann"]))
        clients = [service.create_lora_training_client(NANO, rank=4, seed=n).result() for n in range(RUNS)]
        before = all_told(clients)
        stack.enter_context(moving_engine(server, "two"))
        wait(lambda: (first.data_dir / f"crashed.{spec.partition('@')[0]}").exists(), server)
        after = all_told(clients)
        calm = [service.create_lora_training_client(NANO, rank=4, seed=n).result() for n in range(RUNS)]
        assert before == all_told(calm)
        assert after == all_told(calm), "they went on where they had been"


def test_a_machine_is_lost_that_has_just_handed_a_run_over(tmp_path: Path) -> None:
    check(tmp_path, "run.moved@both")


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["run.parked@engine", "run.parked@both", "run.moved@engine"])
def test_an_engine_dies_at_each_point_of_a_move(tmp_path: Path, spec: str) -> None:
    check(tmp_path, spec)
