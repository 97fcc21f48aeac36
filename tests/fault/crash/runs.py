"""The runs that crashes must not disturb: training loops of two tenants with the real SDK, and their comparison.

The loops differ in rank and loss, pipeline passes and steps, sample from ephemeral samplers, save, load, restart from a
checkpoint, and unload. The fake backend's arithmetic is exact here and does not depend on batching, so all results are
compared bit by bit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import numpy as np
import tinker
from tinker import types

from fault.crash.restarted_server import RestartedServer

NANO = "tinsmith/nano"
DEPRECATED = "ignore:.*TrainingClient.load_state:FutureWarning"
"""The SDK's deprecation warning of a method that must work as long as it exists."""
STEPS = 9
"""Steps between two publishes; twice as many exceed the interval of snapshots."""
PATIENCE_S = 120.0
"""A run that waits longer for one answer has failed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one tenant trains."""

    tenant: str
    rank: int
    loss_fn: str
    seed: int
    rate: float = 1 / 64  # powers of two, whose sums are exact
    patience_s: float = PATIENCE_S


PLANS = (Plan("ann", 4, "cross_entropy", 1), Plan("bob", 8, "importance_sampling", 2))


@dataclass
class Record:
    """All results that a tenant received, in order, without the ids that differ between runs."""

    results: list[tuple[str, object]] = field(default_factory=list)

    def note(self, name: str, value: object) -> None:
        self.results.append((name, value))


def run_all(server: RestartedServer, plans: Sequence[Plan] = PLANS) -> dict[str, Record]:
    """Run the loops of all tenants in parallel. Raises the first error that a tenant received."""
    with ThreadPoolExecutor(len(plans)) as pool:
        futures = {plan.tenant: pool.submit(_run, server, plan) for plan in plans}
        return {tenant: future.result() for tenant, future in futures.items()}


def _run(server: RestartedServer, plan: Plan) -> Record:
    record = Record()
    with tinker.ServiceClient(base_url=server.url, api_key=server.keys[plan.tenant]) as service:
        client = service.create_lora_training_client(NANO, rank=plan.rank, seed=plan.seed).result(plan.patience_s)
        _train(client, plan, record)
        middle = client.save_state("middle").result(plan.patience_s)
        _train(client, plan, record)
        client.forward_backward(_data(plan)[:1], plan.loss_fn)  # its gradient is dropped
        client.load_state_with_optimizer(middle.path)
        _train(client, plan, record)
        loaded = service.create_lora_training_client(NANO, rank=plan.rank, seed=plan.seed).result(plan.patience_s)
        loaded.load_state_with_optimizer(middle.path).result(plan.patience_s)
        _train(loaded, plan, record)
        final = loaded.save_state("final").result(plan.patience_s)
        loaded.save_weights_for_sampler("named").result(plan.patience_s)
        again = service.create_training_client_from_state_with_optimizer(final.path).result(plan.patience_s)
        _train(again, plan, record)
        again.save_state("again").result(plan.patience_s)
        for model in (client, loaded, again):
            _unload(server, plan, model.model_id)
    return record


def _unload(server: RestartedServer, plan: Plan, model_id: str) -> None:
    """Send the request directly, since the SDK has no method for it. It is idempotent."""
    body = {"model_id": model_id, "type": "unload_model"}
    deadline = time.monotonic() + plan.patience_s
    while server.rows(f"SELECT 1 FROM models WHERE model_id = '{model_id}' AND state <> 'unloaded'"):
        assert time.monotonic() < deadline, f"{model_id} is not unloaded"
        with contextlib.suppress(httpx.TransportError):
            key = {"X-API-Key": server.keys[plan.tenant]}
            httpx.post(f"{server.url}/api/v1/unload_model", json=body, headers=key, timeout=30)
        time.sleep(0.05)


def _train(client: tinker.TrainingClient, plan: Plan, record: Record) -> None:
    data = _data(plan)
    pending: list[tuple[str, Callable[[], object]]] = []
    for _ in range(STEPS):
        passes = [client.forward_backward(chunk, plan.loss_fn) for chunk in (data[:2], data[2:])]
        step = client.optim_step(types.AdamParams(learning_rate=plan.rate))
        pending += [("pass", lambda passed=passed: _of_pass(passed.result(plan.patience_s))) for passed in passes]
        pending.append(("step", lambda step=step: step.result(plan.patience_s).metrics))
    sampler = client.save_weights_and_get_sampling_client().result(plan.patience_s)
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=plan.seed)
    samples = [sampler.sample(datum.model_input, num_samples=2, sampling_params=params) for datum in data]
    pending += [("sample", lambda sample=sample: _of_sample(sample.result(plan.patience_s))) for sample in samples]
    for name, get in pending:
        record.note(name, get())


def _of_pass(output: types.ForwardBackwardOutput) -> object:
    logprobs = [row["logprobs"].data for row in output.loss_fn_outputs]
    return output.metrics["loss:sum"], logprobs


def _of_sample(response: types.SampleResponse) -> object:
    return [(list(sequence.tokens), list(sequence.logprobs or ())) for sequence in response.sequences]


def _data(plan: Plan, count: int = 3, length: int = 12) -> list[types.Datum]:
    rng = np.random.default_rng(plan.seed)
    rows = [rng.integers(0, 400, length + 1) for _ in range(count)]
    inputs: dict[str, np.ndarray] = {"weights": np.ones(length, np.float32)}
    if plan.loss_fn == "importance_sampling":
        inputs = {"logprobs": np.full(length, -1.0, np.float32), "advantages": np.ones(length, np.float32)}
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={"target_tokens": row[1:], **inputs},
        )
        for row in rows
    ]


@dataclass(frozen=True, slots=True)
class Books:
    """The server's stored state of the training tenants after runs: counts by tenant, the last step of each model,
    missing seq_ids, and the weights and steps in the fake backend's checkpoints.
    """

    futures: list[tuple]
    models: list[tuple]
    samplers: list[tuple]
    checkpoints: list[tuple]
    gaps: list[tuple]

    def times(self, runs: int) -> Books:
        """The state after this many equal runs."""
        return Books(
            [(*row[:-1], row[-1] * runs) for row in self.futures],
            sorted(self.models * runs),
            [(*row[:-1], row[-1] * runs) for row in self.samplers],
            sorted(self.checkpoints * runs),
            self.gaps,
        )


def books(server: RestartedServer) -> Books:
    saved = server.rows("SELECT tenant_id, name, state, directory FROM checkpoints")
    theirs = ", ".join(f"'{plan.tenant}'" for plan in PLANS)
    return Books(
        server.rows(
            f"SELECT tenant_id, kind, state, count(*) FROM futures WHERE tenant_id IN ({theirs}) "
            "GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
        ),
        sorted(server.rows("SELECT tenant_id, lora_rank, state, applied_seq_id FROM models")),
        server.rows(f"SELECT tenant_id, count(*) FROM samplers WHERE tenant_id IN ({theirs}) GROUP BY 1 ORDER BY 1"),
        sorted((*row, _read_saved_state(server, directory)) for *row, directory in saved),
        server.rows(
            "SELECT model_id, count(*), min(seq_id), max(seq_id) FROM futures WHERE seq_id IS NOT NULL "
            "AND sampling_session_id IS NULL GROUP BY 1 HAVING max(seq_id) - min(seq_id) + 1 <> count(*)"
        ),
    )


def _read_saved_state(server: RestartedServer, directory: str) -> str:
    path = server.data_dir / "checkpoints" / directory / "fake_adapter.json"
    return path.read_text() if path.exists() else ""
