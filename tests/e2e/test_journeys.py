"""Typical scripts of users: the real SDK against a live server with the embedded model."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from support.live import API_KEY, LiveServer, serving

pytestmark = pytest.mark.smoke

NANO = "tinsmith/nano"
RNG = np.random.default_rng(0)


def datum(length: int = 12, rng: np.random.Generator = RNG) -> types.Datum:
    tokens = rng.integers(0, 400, length + 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)},
    )


def loss(client: tinker.TrainingClient, data: list[types.Datum]) -> float:
    return client.forward(data, "cross_entropy").result().metrics["loss:sum"]


def train(client: tinker.TrainingClient, data: list[types.Datum], steps: int, rate: float = 1e-2) -> list[float]:
    losses = []
    for _ in range(steps):
        passed = client.forward_backward(data, "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=rate))
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


@pytest.mark.covers("TrainingClient.forward_backward", "TrainingClient.optim_step")
def test_training_lowers_the_loss(nano_service: tinker.ServiceClient) -> None:
    client = nano_service.create_lora_training_client(NANO, rank=8).result()
    losses = train(client, [datum() for _ in range(4)], 8)
    assert losses[-1] < 0.8 * losses[0]


def test_train_and_sample_logprobs_of_the_same_tokens_agree(nano_service: tinker.ServiceClient) -> None:
    client = nano_service.create_lora_training_client(NANO, rank=8).result()
    data = [datum(20) for _ in range(4)]
    train(client, data, 3)
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = data[0].model_input.to_ints()
    params = types.SamplingParams(max_tokens=16, temperature=1.0, stop=[])
    for sequence in sampler.sample(types.ModelInput.from_ints(prompt), 3, params).result().sequences:
        tokens = prompt + list(sequence.tokens)
        checked = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)},
        )
        trained = client.forward([checked], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        np.testing.assert_allclose(sequence.logprobs, trained[len(prompt) - 1 :], atol=1e-4)
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
        assert scored[0] is None
        np.testing.assert_allclose(np.array(scored[1:], np.float32), trained, atol=1e-4)


def of_alpha(server: LiveServer, service: tinker.ServiceClient, alpha: float) -> tinker.TrainingClient:
    """Create a model with an alpha, which the SDK cannot send."""
    session = server.post("create_session", {"tags": [], "sdk_version": "0"}).json()["session_id"]
    lora = {"rank": 4, "seed": 7, "alpha": alpha}
    body = {"session_id": session, "model_seq_id": 0, "base_model": NANO, "lora_config": lora}
    created = server.post("create_model", body).json()
    assert server.post("retrieve_future", {"request_id": created["request_id"]}).json()["type"] == "create_model"
    info = types.GetInfoResponse.model_validate(server.post("get_info", {"model_id": created["model_id"]}).json())
    return tinker.TrainingClient(service.holder, 0, created["model_id"], info=info)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("optimizer", [True, False])
def test_a_run_that_is_set_back_continues_as_a_run_from_its_checkpoint(
    nano_service: tinker.ServiceClient, optimizer: bool
) -> None:
    """To the bit, with samples from before that keep their weights."""
    client, data = nano_service.create_lora_training_client(NANO, rank=8).result(), [datum() for _ in range(3)]
    train(client, data, 2)
    path = client.save_state("state").result().path
    train(client, data, 2)
    sampler = client.save_weights_and_get_sampling_client().result()
    tokens = data[0].model_input
    scored = sampler.compute_logprobs(tokens).result()
    client.forward_backward(data[:1], "cross_entropy")  # its gradient is never stepped
    if optimizer:
        client.load_state_with_optimizer(path)
        fresh = nano_service.create_training_client_from_state_with_optimizer(path).result()
    else:
        client.load_state(path)
        fresh = nano_service.create_training_client_from_state(path).result()
    assert train(client, data, 3) == train(fresh, data, 3)
    assert sampler.compute_logprobs(tokens).result() == scored
    drawn = (run.save_weights_and_get_sampling_client().result() for run in (client, fresh))
    first, second = (sampler.compute_logprobs(tokens).result() for sampler in drawn)
    assert first == second != scored


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_alpha_of_ones_own_holds_from_creation_to_resumption_and_export(
    nano_server: LiveServer, nano_service: tinker.ServiceClient
) -> None:
    alpha_run, data = of_alpha(nano_server, nano_service, 8), [datum()]
    usual = nano_service.create_lora_training_client(NANO, rank=4, seed=7).result()
    for client in (alpha_run, usual):
        train(client, data, 2)
    assert loss(alpha_run, data) != pytest.approx(loss(usual, data), rel=1e-3)
    path = alpha_run.save_state("state").result().path
    assert nano_server.post("weights_info", {"tinker_path": path}).json()["lora_alpha"] == 8
    resumed = nano_service.create_training_client_from_state_with_optimizer(path).result()
    # As older clients do: create a model with the default alpha, then load into it.
    older = nano_service.create_lora_training_client(NANO, rank=4).result()
    older.load_state_with_optimizer(path).result()
    for client in (alpha_run, resumed, older):
        assert nano_server.post("get_info", {"model_id": client.model_id}).json()["lora_alpha"] == 8
    assert train(alpha_run, data, 2) == train(resumed, data, 2) == train(older, data, 2)

    urls = older.save_weights_external("export", ttl_seconds=3600).result().path
    urls_by_file = (
        tinker.RestClient(base_url=nano_server.url, api_key=API_KEY).get_external_weights_urls(urls).result().urls
    )
    with urllib.request.urlopen(urls_by_file["adapter_config.json"], timeout=60) as answer:
        config = json.loads(answer.read())
    assert (config["r"], config["lora_alpha"]) == (4, 8)

    sampler = older.save_weights_and_get_sampling_client().result()
    trained = alpha_run.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    tokens = [*data[0].model_input.to_ints(), int(data[0].loss_fn_inputs["target_tokens"].to_numpy()[-1])]
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    np.testing.assert_allclose(np.array(scored[1:], np.float32), trained, atol=1e-4)


def test_a_batch_in_chunks_trains_as_the_same_batch_whole(nano_service: tinker.ServiceClient) -> None:
    data = [datum(8 + index) for index in range(10)]
    unsplit = nano_service.create_lora_training_client(NANO, rank=4, seed=7).result()
    split = nano_service.create_lora_training_client(NANO, rank=4, seed=7).result()
    unsplit.forward_backward(data, "cross_entropy").result()
    for start in range(0, 10, 3):
        split.forward_backward(data[start : start + 3], "cross_entropy").result()
    norms = [client.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics for client in (unsplit, split)]
    assert norms[0] is not None and norms[1] is not None
    assert norms[0]["grad_norm"] == pytest.approx(norms[1]["grad_norm"], rel=1e-4)
    assert loss(unsplit, data) == pytest.approx(loss(split, data), rel=1e-4)


def test_the_sdk_itself_splits_a_large_batch(nano_service: tinker.ServiceClient) -> None:
    client = nano_service.create_lora_training_client(NANO, rank=4).result()
    data = [datum(2) for _ in range(1100)]  # more than the client's 1,024 per request
    result = client.forward_backward(data, "cross_entropy").result()
    assert len(result.loss_fn_outputs) == 1100
    assert result.metrics["loss:sum"] == pytest.approx(loss(client, data[:1000]) + loss(client, data[1000:]), rel=1e-4)


@pytest.mark.covers("TrainingClient.forward_backward_custom")
def test_a_custom_loss_gets_its_gradient(nano_service: tinker.ServiceClient) -> None:
    data = [datum() for _ in range(3)]
    by_hand = nano_service.create_lora_training_client(NANO, rank=4, seed=3).result()
    built_in = nano_service.create_lora_training_client(NANO, rank=4, seed=3).result()

    def negative_log_likelihood(
        data: list[types.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        return -sum((values.sum() for values in logprobs), torch.zeros(())), {"custom": 1.0}

    result = by_hand.forward_backward_custom(data, negative_log_likelihood).result()
    expected = built_in.forward_backward(data, "cross_entropy").result()
    assert result.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-4)
    for client in (by_hand, built_in):
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert loss(by_hand, data) == pytest.approx(loss(built_in, data), rel=1e-4)


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.covers("TrainingClient.save_state", "POST /load_weights")
def test_a_restored_model_continues_as_the_original(nano_service: tinker.ServiceClient, optimizer: bool) -> None:
    data = [datum() for _ in range(3)]
    original = nano_service.create_lora_training_client(NANO, rank=4, user_metadata={"purpose": "test"}).result()
    train(original, data, 3)
    path = original.save_state("here").result().path
    restore = (
        nano_service.create_training_client_from_state_with_optimizer
        if optimizer
        else nano_service.create_training_client_from_state
    )
    restored = restore(path).result()
    assert loss(restored, data) == loss(original, data)
    after = [train(client, data, 3)[-1] for client in (original, restored)]
    assert (after[0] == after[1]) is optimizer, "the optimizer's moments decide the next steps"


def test_a_checkpoint_between_a_pass_and_its_step_has_the_gradient(nano_service: tinker.ServiceClient) -> None:
    """The restored run takes the step without sending the pass again, to the same bits."""
    data = [datum() for _ in range(2)]
    original = nano_service.create_lora_training_client(NANO, rank=4, seed=5).result()
    train(original, data, 2)
    original.forward_backward(data, "cross_entropy").result()
    path = original.save_state("between").result().path
    restored = nano_service.create_training_client_from_state_with_optimizer(path).result()
    weights_only = nano_service.create_training_client_from_state(path).result()
    params = types.AdamParams(learning_rate=1e-3)
    steps = [client.optim_step(params).result().metrics for client in (original, restored, weights_only)]
    assert steps[0] == steps[1] and steps[0]["grad_norm"] > 0.0 == steps[2]["grad_norm"]
    assert loss(restored, data) == loss(original, data) != loss(weights_only, data)


@pytest.mark.covers("TrainingClient.save_weights_and_get_sampling_client")
def test_a_snapshot_is_frozen_and_an_inflight_sampler_follows(nano_service: tinker.ServiceClient) -> None:
    client = nano_service.create_lora_training_client(NANO, rank=8).result()
    data = [datum()]
    tokens = data[0].model_input
    snapshot = client.save_weights_and_get_sampling_client().result()
    inflight = client.save_weights_and_get_sampling_client(kind="inflight").result()
    before = snapshot.compute_logprobs(tokens).result()
    assert inflight.compute_logprobs(tokens).result() == before
    train(client, data, 4)
    client.save_weights_and_get_sampling_client(kind="inflight").result()
    assert snapshot.compute_logprobs(tokens).result() == before
    assert inflight.compute_logprobs(tokens).result() != before


def test_versions_that_left_memory_still_sample_the_same(nano_service: tinker.ServiceClient) -> None:
    client = nano_service.create_lora_training_client(NANO, rank=4).result()
    data = [datum()]
    samplers, expected = [], []
    for _ in range(7):  # more than stay in memory
        samplers.append(client.save_weights_and_get_sampling_client().result())
        expected.append(samplers[-1].compute_logprobs(data[0].model_input).result())
        train(client, data, 1)
    assert len({tuple(values[1:]) for values in expected}) == 7
    for sampler, values in zip(samplers, expected, strict=True):
        got = sampler.compute_logprobs(data[0].model_input).result()
        np.testing.assert_allclose(np.array(got[1:], float), np.array(values[1:], float), atol=1e-5)


def test_seeds_of_adapters_and_samples_are_honoured(nano_service: tinker.ServiceClient) -> None:
    data = [datum()]
    same_seed = [nano_service.create_lora_training_client(NANO, rank=4, seed=5).result() for _ in range(2)]
    other = nano_service.create_lora_training_client(NANO, rank=4, seed=6).result()
    curves = [train(client, data, 3) for client in (*same_seed, other)]
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]
    sampler = nano_service.create_sampling_client(base_model=NANO).result()
    params = types.SamplingParams(max_tokens=12, seed=9, stop=[])
    answers = [sampler.sample(data[0].model_input, 2, params).result() for _ in range(2)]
    tokens = [[list(sequence.tokens) for sequence in answer.sequences] for answer in answers]
    assert tokens[0] == tokens[1]
    assert tokens[0][0] != tokens[0][1]


def test_many_tenants_at_once_each_learn_their_own(nano_server: LiveServer) -> None:
    def one(index: int) -> float:
        with tinker.ServiceClient(base_url=nano_server.url, api_key=API_KEY) as service:
            client = service.create_lora_training_client(NANO, rank=2 + index, seed=index).result()
            tenant_data = [datum(10, np.random.default_rng(index)) for _ in range(2)]
            losses = train(client, tenant_data, 6, rate=3e-3)
            return losses[-1] / losses[0]

    with ThreadPoolExecutor(6) as pool:
        ratios = list(pool.map(one, range(6)))
    assert max(ratios) < 0.9


def test_checkpoints_and_runs_are_listed_published_and_deleted(
    nano_service: tinker.ServiceClient, nano_server: LiveServer
) -> None:
    client = nano_service.create_lora_training_client(
        NANO, rank=4, user_metadata={"renderer_name": "role_colon"}
    ).result()
    rest_client = tinker.RestClient(base_url=nano_server.url, api_key=API_KEY)
    saved = client.save_state("one").result().path
    sampled = client.save_weights_for_sampler("two").result().path
    run = rest_client.get_training_run(client.model_id).result()
    assert run.user_metadata == {"renderer_name": "role_colon"}
    assert run.lora_rank == 4 and run.base_model == NANO
    listed = {
        checkpoint.tinker_path for checkpoint in rest_client.list_checkpoints(client.model_id).result().checkpoints
    }
    assert listed == {saved, sampled}
    rest_client.publish_checkpoint_from_tinker_path(saved).result()
    rest_client.publish_checkpoint_from_tinker_path(saved).result()  # no error, no wait
    assert (
        next(c for c in rest_client.list_checkpoints(client.model_id).result().checkpoints if c.public).tinker_path
        == saved
    )
    rest_client.delete_checkpoint_from_tinker_path(saved).result()
    listed = {
        checkpoint.tinker_path for checkpoint in rest_client.list_checkpoints(client.model_id).result().checkpoints
    }
    assert listed == {sampled}
    again = nano_service.create_sampling_client(model_path=sampled).result()
    assert len(again.sample(datum().model_input, 1, types.SamplingParams(max_tokens=3)).result().sequences) == 1


def test_a_name_is_not_taken_twice_without_overwrite(nano_service: tinker.ServiceClient) -> None:
    client = nano_service.create_lora_training_client(NANO, rank=4).result()
    data = [datum()]
    client.save_state("mine").result()
    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        client.save_state("mine").result()
    train(client, data, 2)
    path = client.save_state("mine", overwrite=True).result().path
    assert loss(nano_service.create_training_client_from_state(path).result(), data) == loss(client, data)


@pytest.mark.extended
def test_two_base_models_live_behind_one_address(tmp_path: Path, tiny_model_dir: Path) -> None:
    models = ("--model", NANO, "--model", f"local/tiny={tiny_model_dir}")
    with serving(tmp_path / "data", *models) as server:
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            rest_client = tinker.RestClient(base_url=server.url, api_key=API_KEY)
            names = {model.model_name for model in rest_client.get_server_capabilities().result().supported_models}
            assert names == {NANO, "local/tiny"}
            tokens = types.ModelInput.from_ints([1, 2, 3, 4])
            data = [
                types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": [2, 3, 4, 5], "weights": [1.0] * 4})
            ]
            clients = [service.create_lora_training_client(name, rank=4).result() for name in names]
            assert len({loss(client, data) for client in clients}) == 2
            with pytest.raises(tinker.TinkerError, match="local/tiny"):
                service.create_lora_training_client("no/such", rank=4).result()
