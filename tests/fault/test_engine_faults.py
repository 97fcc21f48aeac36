"""Requests that cannot be computed, and faults of the device, on a real server: such a request fails by name, and the
runs of others end as if nothing had happened.

A failpoint raises the exception where a kernel or our own code would. The neighbours are other tenants, who train and
sample meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from fault.test_recovery import DATA, NANO
from support.databases import database_url
from support.live import LiveServer, serving
from tinsmith.auth.keys import Keys
from tinsmith.cluster.engines import EXIT_FAULT
from tinsmith.db.factory import open_database

pytestmark = pytest.mark.timeout(900)

WAIT_S = 240.0
NEIGHBOURS = ("ann", "bob")
STEPS = 10
POISON_PASS, POISON_STEP, POISON_SAMPLE = "train:2:2", "train:2:5", "sample:2:1"
ARGUMENTS = {"fake": ("--backend", "fake"), "torch": ()}
ROUNDING = {"fake": 0.0, "torch": 2e-5}
"""How far a loss may differ, relatively: what shares a step decides how torch rounds."""

Results = list[float | list[int]]


@pytest.fixture(params=[pytest.param("fake", marks=pytest.mark.smoke), "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def create_keys(server: LiveServer, tenants: Sequence[str]) -> dict[str, str]:
    database = open_database(database_url(server.data_dir) or f"sqlite:///{server.data_dir / 'tinsmith.db'}")
    keys = {tenant: Keys(database).create(tenant)[1] for tenant in tenants}
    database.close()
    headers, deadline = {"X-API-Key": "tml-stranger"}, time.monotonic() + 60
    while httpx.get(f"{server.url}/api/v1/get_server_capabilities", headers=headers, timeout=5).status_code != 401:
        assert time.monotonic() < deadline, "the server goes on without keys"
        time.sleep(0.1)
    return keys


def run_neighbour(server: LiveServer, key: str, seed: int, is_over: Callable[[], bool] = lambda: True) -> Results:
    """The losses and samples of one run; it repeats forward passes until `is_over`."""
    results: Results = []
    with tinker.ServiceClient(base_url=server.url, api_key=key) as service:
        client = service.create_lora_training_client(NANO, rank=4, seed=seed).result(WAIT_S)
        for step in range(STEPS):
            trained = client.forward_backward(DATA, "cross_entropy")
            stepped = client.optim_step(types.AdamParams(learning_rate=1 / 64))
            results.append(trained.result(WAIT_S).metrics["loss:sum"])
            stepped.result(WAIT_S)
            if step == STEPS // 2:
                while not is_over():
                    client.forward(DATA, "cross_entropy").result(WAIT_S)
                    time.sleep(0.05)
        sampler = client.save_weights_and_get_sampling_client().result(WAIT_S)
        params = types.SamplingParams(max_tokens=8, seed=seed)
        for datum in DATA:
            sample = sampler.sample(datum.model_input, 1, params).result(WAIT_S)
            results.append(list(sample.sequences[0].tokens))
    return results


def run_neighbours(
    server: LiveServer, keys: dict[str, str], is_over: Callable[[], bool] = lambda: True
) -> list[Results]:
    with ThreadPoolExecutor(len(NEIGHBOURS)) as pool:
        runs = [
            pool.submit(run_neighbour, server, keys[name], index, is_over) for index, name in enumerate(NEIGHBOURS, 1)
        ]
        return [run.result() for run in runs]


def compare(runs: list[Results], expected: list[Results], backend: str) -> None:
    for run, undisturbed in zip(runs, expected, strict=True):
        assert run[:STEPS] == pytest.approx(undisturbed[:STEPS], rel=ROUNDING[backend], abs=0.0)
        assert run[STEPS:] == undisturbed[STEPS:]


def engine_log(server: LiveServer) -> str:
    return next((server.data_dir / "logs").glob("engine-*.log")).read_text()


def fail_by_name(result: Callable[[float], object]) -> None:
    with pytest.raises(
        tinker.RequestFailedError, match=r"ended the engine's process .* times .*AssertionError"
    ) as raised:
        result(WAIT_S)
    assert raised.value.category is types.RequestErrorCategory.Server


def send_poison(server: LiveServer, key: str) -> None:
    """A pass, an optimizer step and a sample that can never be computed, and what comes after them."""
    with tinker.ServiceClient(base_url=server.url, api_key=key) as service:
        client = [service.create_lora_training_client(NANO, rank=4, seed=9).result(WAIT_S) for _ in range(3)][2]
        before = client.forward_backward(DATA, "cross_entropy").result(WAIT_S).metrics["loss:sum"]
        fail_by_name(client.forward_backward(DATA, "cross_entropy").result)
        client.optim_step(types.AdamParams(learning_rate=1 / 64)).result(WAIT_S)
        after = client.forward_backward(DATA, "cross_entropy").result(WAIT_S).metrics["loss:sum"]
        assert np.isfinite(after) and after != before, "the run goes on with the gradient of its first pass"
        fail_by_name(client.optim_step(types.AdamParams(learning_rate=1 / 64)).result)
        sampler = [service.create_sampling_client(base_model=NANO).result() for _ in range(3)][2]
        params = types.SamplingParams(max_tokens=4, seed=1)
        sampler.sample(DATA[0].model_input, 1, params).result(WAIT_S)
        fail_by_name(sampler.sample(DATA[0].model_input, 1, params).result)
        sampler.sample(DATA[0].model_input, 1, params).result(WAIT_S)


@pytest.fixture
def undisturbed(backend: str, tmp_path: Path) -> Iterator[list[Results]]:
    with serving(tmp_path / "undisturbed", *ARGUMENTS[backend]) as server:
        yield run_neighbours(server, create_keys(server, NEIGHBOURS))


@pytest.mark.extended
def test_a_request_that_cannot_be_computed_fails_by_name_and_disturbs_no_other_tenant(
    backend: str, undisturbed: list[Results], tmp_path: Path
) -> None:
    failpoints = f"engine.computing!bug/{POISON_PASS}|{POISON_STEP}|{POISON_SAMPLE}"
    with serving(tmp_path / "data", *ARGUMENTS[backend], settings={"FAILPOINTS": failpoints}) as server:
        keys = create_keys(server, [*NEIGHBOURS, "eve"])
        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            neighbours = pool.submit(run_neighbours, server, keys, over.is_set)
            try:
                send_poison(server, keys["eve"])
            finally:
                over.set()
            compare(neighbours.result(), undisturbed, backend)
        assert engine_log(server).count("EngineFaultError: a bug: AssertionError") >= 3 * 2
        assert f"status={EXIT_FAULT}" in (server.data_dir / "server.log").read_text().replace("\x1b[0m", "")


@pytest.mark.extended
def test_a_fault_of_the_device_ends_the_engine_and_costs_no_request(
    backend: str, undisturbed: list[Results], tmp_path: Path
) -> None:
    with serving(
        tmp_path / "data", *ARGUMENTS[backend], settings={"FAILPOINTS": "engine.computing:25!device"}
    ) as server:
        keys = create_keys(server, NEIGHBOURS)
        compare(run_neighbours(server, keys), undisturbed, backend)
        assert engine_log(server).count("EngineFaultError: a fault of the device") == 1
