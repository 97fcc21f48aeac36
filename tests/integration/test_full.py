"""Full fine-tuning: losses, gradients, steps and samples match a float64 reference of the model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from support import tiny_models
from support.float64_reference import Reference, loss
from support.live import API_KEY, LiveServer, serving
from support.raw_client import engine_of, wait_until_gone
from tinsmith.backends import run_to_end
from tinsmith.backends.full import FullBackend
from tinsmith.backends.torch import TorchBackend
from tinsmith.engine.__main__ import open_backend
from tinsmith.errors import SettingsError, UserError
from tinsmith.losses import LOSSES, dense
from tinsmith.settings import Settings
from tinsmith.types import (
    AdamParams,
    Datum,
    LoraSpec,
    ModelShape,
    OptimStep,
    Pass,
    PassResult,
    Sample,
    SampleResult,
    SamplingParams,
)

FULL = LoraSpec(rank=0)
WIDE = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}
CONFIGS = {"ppo": WIDE, "cispo": WIDE, "gspo": WIDE, "dro": {"beta": 0.3}, "stable_reinforce": {"kl_coeff": 0.2}}


@pytest.fixture(scope="module", params=["qwen3", "llama", "gemma2"])  # tied; untied with biases; windows and soft caps
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("qwen"), "qwen3")


def datum(rng: np.random.Generator, length: int, loss_fn: str = "cross_entropy") -> Datum:
    targets = rng.integers(0, tiny_models.VOCAB, length)
    tokens = rng.integers(0, tiny_models.VOCAB, length).astype(np.int32)
    noise = rng.normal(size=length).astype(np.float32) * (rng.random(length) < 0.8)
    if loss_fn == "cross_entropy":
        return Datum(tokens, {"target_tokens": targets, "weights": noise.astype(np.float32)})
    old = (rng.normal(size=length) * 0.4 - 5.7).astype(np.float32)
    return Datum(tokens, {"target_tokens": targets, "logprobs": old, "advantages": noise.astype(np.float32)})


def fb(model_id: str, data: list[Datum], loss_fn: str = "cross_entropy") -> Pass:
    return Pass(f"r-{model_id}", model_id, tuple(data), loss_fn, CONFIGS.get(loss_fn, {}), False)


def run(backend: TorchBackend, *passes: Pass) -> list[PassResult]:
    results = run_to_end(backend.run_passes(passes))
    assert all(isinstance(result, PassResult) for result in results), results
    return [result for result in results if isinstance(result, PassResult)]


def reference_loss(reference: Reference, data: list[Datum], loss_fn: str) -> Tensor:
    """The loss; differentiating it gives the parameters their gradients."""
    total = torch.zeros((), dtype=torch.float64)
    for datum_ in data:
        inputs = {name: dense(array) for name, array in datum_.inputs.items()}
        logits = reference.model(torch.from_numpy(datum_.tokens_N.astype(np.int64))[None], use_cache=False).logits[0]
        lp = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(inputs["target_tokens"])[:, None])[:, 0]
        total = total + loss(loss_fn, lp, inputs, {**LOSSES[loss_fn].config, **CONFIGS.get(loss_fn, {})})
    return total


def gradients(backend: FullBackend, model_id: str) -> dict[str, Tensor]:
    gradient_P = backend._models[model_id].gradient_P
    assert gradient_P is not None
    return backend._base.layout.views(gradient_P)


def weights(backend: FullBackend, model_id: str) -> Tensor:
    return backend._models[model_id].adapter.flat_P


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-12))


@pytest.mark.parametrize("loss_fn", [name for name in LOSSES if name != "custom"])
def test_every_gradient_is_the_models_own(shape: ModelShape, loss_fn: str) -> None:
    rng = np.random.default_rng(len(loss_fn))
    backend = FullBackend(shape, logits_chunk="7", max_tokens_per_microbatch="30")
    backend.create_model("m", FULL)
    data = [datum(rng, length, loss_fn) for length in (5, 19, 1, 12)]
    (result,) = run(backend, fb("m", data, loss_fn))
    reference = Reference(shape.path)
    reference.model.requires_grad_(True)
    total = reference_loss(reference, data, loss_fn)
    total.backward()
    assert result.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4, abs=1e-4)
    if loss_fn == "cross_entropy":
        summed = sum(float(array.sum(dtype=np.float64)) for array in result.elementwise_loss)
        assert summed == pytest.approx(total.item(), rel=1e-4, abs=1e-4)
        assert [array.shape for array in result.elementwise_loss] == [(5,), (19,), (1,), (12,)]
    actual = gradients(backend, "m")
    expected = {name: p.grad for name, p in reference.model.named_parameters() if p.grad is not None}
    assert actual.keys() == expected.keys()
    largest = max(float(grad.norm()) for grad in expected.values())
    for name, gradient in actual.items():
        # Key biases do not change attention, so their gradient is only rounding.
        error = float((gradient.double() - expected[name]).norm())
        assert error < 1e-4 * max(float(expected[name].norm()), 1e-3 * largest), name


def test_steps_are_those_of_adamw(qwen: ModelShape) -> None:
    rng = np.random.default_rng(3)
    backend = FullBackend(qwen)
    backend.create_model("m", FULL)
    reference = Reference(qwen.path)
    reference.model.requires_grad_(True)
    options = {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(reference.model.parameters(), **options)
    params = AdamParams(1e-3, 0.8, 0.9, 1e-6, weight_decay=0.1, grad_clip_norm=0.5)
    for _ in range(4):
        data = [datum(rng, length) for length in (9, 14)]
        run(backend, fb("m", data[:1]), fb("m", data[1:]))  # they are accumulated
        (outcome,) = backend.optim_step([OptimStep("s", "m", params)])
        reference_loss(reference, data, "cross_entropy").backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert isinstance(outcome, dict) and outcome["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    actual = backend._base.layout.views(weights(backend, "m"))
    before = backend._base.original.weights
    for name, parameter in reference.model.named_parameters():
        moved = parameter.detach() - before[name].double()
        assert relative_error(actual[name] - before[name], moved) < 2e-3, name


def test_two_models_in_one_call_stay_apart(qwen: ModelShape) -> None:
    rng = np.random.default_rng(4)
    first, second = [datum(rng, 9), datum(rng, 4)], [datum(rng, 13)]
    together, separate = FullBackend(qwen), FullBackend(qwen)
    for backend in (together, separate):
        for model_id in ("a", "b"):
            backend.create_model(model_id, FULL)
    run(together, fb("a", first), fb("b", second))
    run(separate, fb("a", first))
    run(separate, fb("b", second))
    for model_id in ("a", "b"):
        for name, gradient in gradients(together, model_id).items():
            assert torch.equal(gradient, gradients(separate, model_id)[name])
    together.optim_step([OptimStep("s", "a", AdamParams(1e-2))])
    assert torch.equal(weights(together, "b"), together._base.original.flat_P)
    assert not torch.equal(weights(together, "a"), together._base.original.flat_P)


def finish(backend: FullBackend, *samples: Sample) -> dict[str, SampleResult]:
    for sample in samples:
        backend.sampler.submit(sample)
    results = {}
    while backend.sampler.has_work:
        results |= dict(backend.sampler.step())
    assert all(isinstance(result, SampleResult) for result in results.values()), results
    return results


def test_each_sample_comes_from_its_own_version(qwen: ModelShape, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    backend = FullBackend(qwen)
    backend.create_model("m", FULL)
    versions: list[str | None] = [None]
    models: dict[str | None, PreTrainedModel] = {
        None: AutoModelForCausalLM.from_pretrained(qwen.path, dtype=torch.float32)
    }
    for step in range(2):
        run(backend, fb("m", [datum(rng, 20)]))
        backend.optim_step([OptimStep("s", "m", AdamParams(2e-2))])
        backend.publish("m", f"v{step}")
        versions.append(f"v{step}")
        (tmp_path / f"v{step}").mkdir()
        backend.save("m", tmp_path / f"v{step}", optimizer=False)
        models[f"v{step}"] = AutoModelForCausalLM.from_pretrained(tmp_path / f"v{step}")
    prompts = [rng.integers(0, tiny_models.VOCAB, 11).astype(np.int32) for _ in range(2)]
    params = SamplingParams(max_tokens=6, temperature=0.0, stop_eos=False)
    samples = [
        Sample(f"{version}-{index}", version, prompt, 1, params, prompt_logprobs=True)
        for index, prompt in enumerate([*prompts, prompts[0]])
        for version in versions
    ]
    results = finish(backend, *samples)
    answers = set()
    for sample in samples:
        result = results[sample.request_id]
        tokens = np.concatenate([sample.prompt_T, result.sequences[0].tokens_T])
        with torch.no_grad():
            logits = models[sample.version_id](torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
        lp = torch.log_softmax(logits, -1)
        assert result.sequences[0].tokens_T.tolist() == lp[len(sample.prompt_T) - 1 : -1].argmax(-1).tolist()
        token_logprobs = lp[:-1].gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0].numpy()
        assert result.prompt_logprobs_T is not None
        assert np.abs(result.prompt_logprobs_T[1:] - token_logprobs[: len(sample.prompt_T) - 1]).max() < 1e-4
        assert np.abs(result.sequences[0].logprobs_T - token_logprobs[len(sample.prompt_T) - 1 :]).max() < 1e-4
        answers.add((sample.request_id[-1], tuple(result.sequences[0].tokens_T.tolist())))
    assert len(answers) == len(samples), "or the versions are too much alike for this test"


def test_training_goes_on_where_a_save_was_made(qwen: ModelShape, tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    data = [datum(rng, 15)]
    backend = FullBackend(qwen)
    backend.create_model("m", FULL)
    run(backend, fb("m", data))
    backend.optim_step([OptimStep("s", "m", AdamParams(1e-2))])
    run(backend, fb("m", data))
    saved, captured = tmp_path / "saved", tmp_path / "captured"
    saved.mkdir()
    captured.mkdir()
    backend.save("m", saved, optimizer=True)
    backend.capture("m").write(captured)
    other = FullBackend(qwen)
    other.load("m", FULL, captured, optimizer=True)
    other.load("n", FULL, saved, optimizer=False)
    assert torch.equal(weights(other, "n"), weights(backend, "m"))
    assert other._models["n"].moments is None
    for trained_backend in (backend, other):
        trained_backend.optim_step([OptimStep("s", "m", AdamParams(1e-2))])
    assert torch.equal(weights(other, "m"), weights(backend, "m"))
    assert AutoTokenizer.from_pretrained(saved)("hi")["input_ids"]
    os.truncate(saved / "model.safetensors", 1000)
    with pytest.raises(UserError, match=r"model\.safetensors is not a complete safetensors file"):
        other.load("o", FULL, saved, optimizer=False)
    with pytest.raises(UserError, match="no optimizer state"):
        (captured / "optimizer.safetensors").unlink()
        other.load("o", FULL, captured, optimizer=True)
    assert not other.has_model("o")


def test_options_unsupported_by_full_training_are_refused_by_name(qwen: ModelShape, tmp_path: Path) -> None:
    for options, words in (
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"quantize": "int8"}, "quantize"),
        ({"deterministic": "on"}, "deterministic"),
    ):
        with pytest.raises(SettingsError, match=words):
            FullBackend(qwen, **options)
    with pytest.raises(SettingsError, match="mixture"):
        FullBackend(tiny_models.make(tmp_path / "experts", "gpt_oss"))
    backend = FullBackend(qwen)
    with pytest.raises(UserError, match="rank 8"):
        backend.create_model("m", LoraSpec(8))
    with pytest.raises(UserError, match="dimuon"):
        backend.create_model("m", FULL, "dimuon")
    adapters = TorchBackend(qwen)
    with pytest.raises(UserError, match="backend 'full'"):
        adapters.load("m", FULL, tmp_path, optimizer=False)


# Through the service.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("full") / "data", "--backend", "full") as server:
        yield server


@pytest.mark.extended
def test_the_sdk_trains_all_weights_and_goes_on_after_a_crash(server: LiveServer) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        client = service.create_lora_training_client("tinsmith/nano", rank=16).result()
        info = client.get_info()
        assert (info.is_lora, info.lora_rank) == (False, None)
        prompt = tinker.ModelInput.from_ints([5, 6, 7, 8, 9, 10])
        inputs = {
            "target_tokens": tinker.TensorData.from_numpy(np.array([6, 7, 8, 9, 10, 11])),
            "weights": tinker.TensorData.from_numpy(np.ones(6, np.float32)),
        }
        data = [tinker.Datum(model_input=prompt, loss_fn_inputs=inputs)]
        losses, path = [], ""
        for step in range(6):
            passed = client.forward_backward(data, "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
            losses.append(passed.result().metrics["loss:sum"])
            if step == 2:
                path = client.save_state("third").result().path
                engine = engine_of(server)
                os.kill(engine, signal.SIGKILL)
                assert wait_until_gone(engine)
        assert losses[-1] < 0.5 * losses[0]
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        again = []
        for _ in range(3):
            again.append(resumed.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
            resumed.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
        assert again == losses[3:], "exactly once, before and after the crash"
        sampler = client.save_weights_and_get_sampling_client().result()
        sampled = sampler.compute_logprobs(tinker.ModelInput.from_ints([5, 6, 7, 8, 9, 10, 11])).result()
        scored = client.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        assert np.abs(np.array(sampled[1:], np.float32) - scored).max() < 1e-4
        weights_info = (
            tinker.RestClient(base_url=server.url, api_key=API_KEY).get_weights_info_by_tinker_path(path).result()
        )
        assert (weights_info.is_lora, weights_info.lora_rank) == (False, None)


def test_a_part_of_the_weights_is_refused(server: LiveServer) -> None:
    with (
        tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service,
        pytest.raises(tinker.TinkerError, match="train_mlp"),
    ):
        service.create_lora_training_client("tinsmith/nano", train_mlp=False).result()


@pytest.mark.parametrize(("name", "value"), [("sampler", "vllm"), ("data_parallel", 2), ("shard_base", True)])
def test_settings_that_need_adapters_are_refused_at_start(
    qwen: ModelShape, tmp_path: Path, name: str, value: object
) -> None:
    settings = Settings.model_validate({"backend": "full", "data_dir": tmp_path, name: value})
    with pytest.raises(SettingsError, match=name):
        open_backend(settings, qwen, "here", {})
