"""Kills during training runs with the real SDK: the client sees only a delay."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from support.live import API_KEY, LiveServer, free_port, freeze, serving
from support.raw_client import engine_of

NANO = "tinsmith/nano"
STEPS = 8


def make_data(count: int = 3, length: int = 12, seed: int = 0) -> list[types.Datum]:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 400, length + 1) for _ in range(count)]
    weights = np.ones(length, np.float32)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={"target_tokens": row[1:], "weights": weights},
        )
        for row in rows
    ]


DATA = make_data()


def run(
    service: tinker.ServiceClient, kills: Mapping[tuple[int, str], Callable[[], None]] | None = None
) -> list[float]:
    """The losses of a run with two accumulated passes per step; `kills` are (step, moment) pairs."""
    client = service.create_lora_training_client(NANO, rank=4, seed=11).result()
    losses = []

    def interrupt(step: int, now: str) -> None:
        if kill := (kills or {}).get((step, now)):
            kill()

    for step in range(STEPS):
        first = client.forward_backward(DATA[:2], "cross_entropy")
        interrupt(step, "while a pass runs")
        first_loss = first.result().metrics["loss:sum"]
        interrupt(step, "with a gradient")
        second = client.forward_backward(DATA[2:], "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0))
        losses.append(first_loss + second.result().metrics["loss:sum"])
        stepped.result()
        interrupt(step, "after a step")
    return losses


@contextlib.contextmanager
def service_of(server: LiveServer) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        yield service


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("recovery") / "data") as live:
        yield live


@pytest.fixture(scope="module")
def undisturbed(server: LiveServer) -> list[float]:
    with service_of(server) as service:
        losses = run(service)
    assert losses[-1] < losses[0]
    return losses


def kill_engine(server: LiveServer) -> int:
    """Kill the engine and return its pid; the supervisor starts another."""
    engine = engine_of(server)
    os.kill(engine, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while engine_of(server) == engine:
        assert time.monotonic() < deadline, "the engine did not die"
        time.sleep(0.02)
    return engine


def engine_log(server: LiveServer) -> str:
    return next((server.data_dir / "logs").glob("engine-*.log")).read_text()


def test_a_run_whose_engine_is_killed_again_and_again_ends_as_if_it_had_not_been(
    server: LiveServer, undisturbed: list[float]
) -> None:
    killed: list[int] = []
    moments = [(1, "while a pass runs"), (3, "with a gradient"), (5, "after a step")]
    with service_of(server) as service:
        losses = run(service, dict.fromkeys(moments, lambda: killed.append(kill_engine(server))))
    assert len(set(killed)) == 3
    assert losses == undisturbed


def test_a_run_survives_a_kill_of_everything_while_its_poll_is_held(tmp_path: Path, undisturbed: list[float]) -> None:
    port, data_dir = free_port(), tmp_path / "data"
    with contextlib.ExitStack() as servers:
        first = servers.enter_context(serving(data_dir, port=port))
        engine = engine_of(first)

        def stand_still() -> None:
            freeze(engine, data_dir)  # so that the answer cannot come before the end

        def kill_all_and_start_again() -> None:
            time.sleep(0.3)  # the poll is probably held by now; otherwise the test is merely easier
            os.kill(engine, signal.SIGKILL)
            first.stop(signal.SIGKILL)
            servers.enter_context(serving(data_dir, port=port))

        with service_of(first) as service:
            losses = run(
                service, {(2, "after a step"): stand_still, (3, "while a pass runs"): kill_all_and_start_again}
            )
    assert losses == undisturbed


def test_samplers_checkpoints_and_long_runs_outlive_the_engine(server: LiveServer) -> None:
    prompt = DATA[0].model_input
    with service_of(server) as service:
        client = service.create_lora_training_client(NANO, rank=4, seed=1).result()
        stepped = []
        for _ in range(21):
            client.forward_backward(DATA[:1], "cross_entropy")
            stepped.append(client.optim_step(types.AdamParams(learning_rate=1e-3)))
        for step in stepped:
            step.result()
        path = client.save_weights_for_sampler("named").result().path
        checkpoint_sampler = service.create_sampling_client(model_path=path).result()
        ephemeral = client.save_weights_and_get_sampling_client().result()
        expected = checkpoint_sampler.compute_logprobs(prompt).result()
        assert ephemeral.compute_logprobs(prompt).result() == expected
        loss = client.forward(DATA, "cross_entropy").result().metrics["loss:sum"]

        kill_engine(server)
        assert checkpoint_sampler.compute_logprobs(prompt).result() == expected
        assert ephemeral.compute_logprobs(prompt).result() == expected
        assert client.forward(DATA, "cross_entropy").result().metrics["loss:sum"] == loss
        again = client.save_weights_and_get_sampling_client().result()
        assert again.compute_logprobs(prompt).result() == expected
        restored = [line for line in engine_log(server).splitlines() if client.model_id in line and "restored" in line]
        (replayed,) = re.findall(r"replayed=(\d+)", restored[-1])
        assert int(replayed) == 2 * (21 - 16) + 2, "passes, steps and saves after the snapshot that covers 16 steps"
