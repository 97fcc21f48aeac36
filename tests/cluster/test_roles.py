"""Processes of several roles: engines share the runs, each takes over from the other, clients see one service."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from tinker import types

from support.balancer import run_balancer
from support.cluster import BASE, Cluster, start_cluster
from support.databases import POSTGRES, SQLITE
from support.live import API_KEY, LiveServer, freeze
from support.raw_client import RawClient, connect

ADAM = types.AdamParams(learning_rate=0.1)


@pytest.fixture(scope="module", params=[SQLITE, pytest.param(POSTGRES, marks=pytest.mark.slow)])
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with start_cluster(tmp_path_factory.mktemp("roles"), request.param) as new_cluster:
        yield new_cluster


@pytest.fixture(scope="module")
def processes(cluster: Cluster) -> Iterator[dict[str, LiveServer]]:
    with contextlib.ExitStack() as stack:
        roles = {"server": "server", "one": "engine", "two": "engine"}
        servers = {name: stack.enter_context(cluster.process(name, role)) for name, role in roles.items()}
        cluster.await_ready("one", "two")
        yield servers


@pytest.fixture
def client(cluster: Cluster, processes: dict[str, LiveServer]) -> Iterator[RawClient]:
    cluster.await_ready("one", "two")  # processes that an earlier test killed
    raw_client = connect(processes["server"])
    yield raw_client
    raw_client.http.close()


def engine_pid(cluster: Cluster, name: str) -> int:
    return cluster.engines()[name].pid


def step_runs(client: RawClient, runs: list[str], seq_id: int) -> None:
    ids = [client.step(run, seq_id) for run in runs]
    assert [client.steps_taken(request_id) for request_id in ids] == [seq_id] * len(runs)


def test_new_runs_are_spread_over_the_engines(cluster: Cluster, client: RawClient) -> None:
    runs = [client.model() for _ in range(4)]
    step_runs(client, runs, 1)
    owners = cluster.owners()
    assert sorted(str(owners[run]) for run in runs) == ["one", "one", "two", "two"]


def test_the_other_engine_continues_a_killed_engines_runs(cluster: Cluster, client: RawClient) -> None:
    runs = [client.model() for _ in range(4)]
    step_runs(client, runs, 1)
    owners = cluster.owners()
    victim = str(owners[runs[0]])
    other_engine = {"one": "two", "two": "one"}[victim]
    os.kill(engine_pid(cluster, victim), signal.SIGKILL)
    for seq_id in (2, 3):
        step_runs(client, runs, seq_id)
    moved = cluster.owners()
    assert [moved[run] for run in runs if owners[run] == other_engine] == [other_engine] * 2, (
        "whose engine lives stay there"
    )
    cluster.await_ready(victim)
    assert "Traceback" not in cluster.log()


def test_an_engine_that_stood_still_is_replaced_and_writes_nothing(cluster: Cluster, client: RawClient) -> None:
    run = client.model()
    step_runs(client, [run], 1)
    victim = str(cluster.owners()[run])
    pid = engine_pid(cluster, victim)
    freeze(pid, cluster.directory)
    try:
        waiting = client.step(run, 2)
        assert client.steps_taken(waiting) == 2
        assert cluster.owners()[run] not in (victim, None)
        step_runs(client, [run], 3)
    finally:
        os.kill(pid, signal.SIGCONT)
    step_runs(client, [run], 4)
    cluster.wait(lambda: engine_pid(cluster, victim) != pid)
    cluster.wait(lambda: "this engine lost its lease" in cluster.log())
    assert "Traceback" not in cluster.log()


def test_a_stopping_engine_hands_over_its_runs(cluster: Cluster, client: RawClient) -> None:
    runs = [client.model() for _ in range(2)]
    with cluster.process("three", "engine", "--engines", "2") as leaving:
        cluster.await_ready("three", "three-1")
        cluster.wait(lambda: {str(owner) for owner in cluster.owners().values()} >= {"three"} or _more(client, runs))
        for seq_id in (1, 2):
            step_runs(client, runs, seq_id)
        assert leaving.stop() == 0
    assert not {"three", "three-1"} & {str(owner) for owner in cluster.owners().values()}
    assert {cluster.engines()[name].state for name in ("three", "three-1")} == {"stopped"}
    step_runs(client, runs, 3)
    snapshots = cluster.rows("count(*)", "models WHERE snapshot_seq_id >= 2")
    assert snapshots[0][0] >= 1, "what it had to leave is on disk"


def _more(client: RawClient, runs: list[str]) -> bool:
    runs.append(client.model())
    return False


def test_the_real_sdk_trains_and_samples_while_engines_die(
    cluster: Cluster, processes: dict[str, LiveServer], client: RawClient
) -> None:
    with tinker.ServiceClient(base_url=processes["server"].url, api_key=API_KEY) as service:
        model = service.create_lora_training_client(BASE, rank=4).result()
        base = service.create_sampling_client(base_model=BASE).result()
        prompt = types.ModelInput.from_ints([1, 2, 3])
        params = types.SamplingParams(max_tokens=4, seed=3)
        answers = [base.sample(prompt, 1, params).result().sequences[0].tokens]
        for step in range(1, 4):
            sampler = model.save_weights_and_get_sampling_client().result()
            waiting = sampler.sample(prompt, 2, params)
            os.kill(engine_pid(cluster, str(cluster.owners()[model.model_id])), signal.SIGKILL)
            assert model.optim_step(ADAM).result().metrics["step"] == step
            assert len(waiting.result().sequences) == 2
            answers.append(base.sample(prompt, 1, params).result().sequences[0].tokens)
            cluster.await_ready("one", "two")
    assert len({tuple(tokens) for tokens in answers}) == 1, "whoever samples the base with a seed says the same"


@pytest.mark.slow
@pytest.mark.parametrize("database_kind", [POSTGRES])
def test_four_servers_and_two_engines_behind_one_address(tmp_path: Path, database_kind: str) -> None:
    with start_cluster(tmp_path, database_kind) as cluster, contextlib.ExitStack() as stack:
        servers = [stack.enter_context(cluster.process(f"server{index}", "server")) for index in range(4)]
        for name in ("one", "two"):
            stack.enter_context(cluster.process(name, "engine"))
        ports = [int(server.url.rpartition(":")[2]) for server in servers]
        balancer = stack.enter_context(run_balancer(ports))
        cluster.await_ready("one", "two")
        with tinker.ServiceClient(base_url=balancer.url, api_key=API_KEY) as service:
            models = [service.create_lora_training_client(BASE, rank=4).result() for _ in range(4)]
            steps = [model.optim_step(ADAM) for _ in range(3) for model in models]
            assert [step.result().metrics["step"] for step in steps] == [1] * 4 + [2] * 4 + [3] * 4
        assert sorted(map(str, cluster.owners().values())) == ["one", "one", "two", "two"]
        assert min(balancer.connection_counts.values()) > 0, "all servers were asked"


@pytest.mark.slow
def test_a_real_model_trained_through_the_death_of_its_engine_has_the_losses_of_one_that_was_not(
    tmp_path: Path,
) -> None:
    with start_cluster(tmp_path, SQLITE) as cluster, contextlib.ExitStack() as stack:
        server = stack.enter_context(cluster.process("server", "server"))
        for name in ("one", "two"):
            stack.enter_context(cluster.process(name, "engine", "--backend", "torch"))
        cluster.await_ready("one", "two")
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            undisturbed = losses(service, cluster, kill_at=None)
            assert losses(service, cluster, kill_at=4) == pytest.approx(undisturbed, abs=1e-4)


def losses(service: tinker.ServiceClient, cluster: Cluster, kill_at: int | None) -> list[float]:
    model = service.create_lora_training_client(BASE, rank=8, seed=5).result()
    tokens = list(range(10, 42))
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    loss_values: list[float] = []
    for step in range(8):
        passed = model.forward_backward([datum], "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=1e-3))
        if step == kill_at:
            os.kill(engine_pid(cluster, str(cluster.owners()[model.model_id])), signal.SIGKILL)
        loss_values.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return loss_values
