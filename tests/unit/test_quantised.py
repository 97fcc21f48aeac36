"""A quantised base model, against the same model with dequantised weights."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support import tiny_models
from support.local_sampling import finish, make_prompt, make_sample
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.quantised_linear import QuantisedLinear
from tinsmith.errors import SettingsError
from tinsmith.types import AdamParams, Datum, LoraSpec, ModelShape, OptimStep, Pass, PassResult

pytest.importorskip("bitsandbytes")
torch.set_num_threads(1)

SPEC = LoraSpec(4, seed=1)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("quantised"), "llama")


def backend_of(shape: ModelShape, **options: str) -> TorchBackend:
    backend = TorchBackend(shape, device="cpu", **options)  # pyright: ignore[reportArgumentType]
    backend.create_model("m", SPEC)
    generator = torch.Generator().manual_seed(0)
    for _, b_Or in backend._models["m"].adapter.weights.values():
        b_Or.normal_(0, 0.02, generator=generator)
    backend._models["m"].adapter.refresh()
    return backend


def make_dequantised_model(shape: ModelShape, backend: TorchBackend, directory: Path) -> ModelShape:
    """A directory of transformers' model with the dequantised weights."""
    model = AutoModelForCausalLM.from_pretrained(shape.path, dtype=torch.float32)
    for name, linear in backend.base.targets.items():
        model.get_submodule(name).weight = torch.nn.Parameter(linear.weight.detach().clone())
    model.save_pretrained(directory)
    tiny_models.tokenizer().save_pretrained(directory)
    return ModelShape(shape.name, str(directory), shape.vocab_size, shape.max_context_length, shape.arch)


def data(seed: int = 0) -> tuple[Datum, ...]:
    rng = np.random.default_rng(seed)
    datums = []
    for length in (23, 7, 40):
        inputs = {"target_tokens": rng.integers(0, 300, length), "weights": rng.random(length).astype(np.float32)}
        datums.append(Datum(rng.integers(0, 300, length).astype(np.int32), inputs))
    return tuple(datums)


def train_steps(backend: TorchBackend, steps: int = 3) -> tuple[list[np.ndarray], torch.Tensor, torch.Tensor]:
    """Logprobs and gradient of the first step, and the weights after the last."""
    logprobs: list[np.ndarray] = []
    gradient = torch.empty(0)
    for step in range(steps):
        (result,) = run_to_end(backend.run_passes([Pass("r", "m", data(), "cross_entropy", {}, False)]))
        assert isinstance(result, PassResult), result
        if step == 0:
            logprobs, gradient = list(result.logprobs), backend._models["m"].gradient_or_zeros().clone()
        (outcome,) = backend.optim_step([OptimStep("o", "m", AdamParams(1e-3))])
        assert isinstance(outcome, dict), outcome
    return logprobs, gradient, backend._models["m"].adapter.flat_P


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_training_over_codes_equals_training_over_dequantised_weights(
    shape: ModelShape, kind: str, tmp_path: Path
) -> None:
    backend = backend_of(shape, quantize=kind)
    oracle = backend_of(make_dequantised_model(shape, backend, tmp_path))
    ours, theirs = train_steps(backend), train_steps(oracle)
    for actual, expected in zip(ours[0], theirs[0], strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert relative(ours[1], theirs[1]) < 1e-4
    assert relative(ours[2], theirs[2]) < 1e-5
    plain = train_steps(backend_of(shape))
    assert np.abs(plain[0][0] - ours[0][0]).max() > 1e-3, "quantising changes something"


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_codes_are_near_the_weights_and_take_less_room(shape: ModelShape, kind: str) -> None:
    quantised, plain = backend_of(shape, quantize=kind).base, backend_of(shape).base
    assert {type(linear) for linear in quantised.targets.values()} > {QuantisedLinear}
    for name, linear in quantised.targets.items():
        expected = plain.targets[name].weight
        if linear.group == "unembed":
            assert type(linear) is not QuantisedLinear and torch.equal(linear.weight, expected)
            continue
        assert isinstance(linear, QuantisedLinear)
        assert relative(linear.weight, expected) < (0.01 if kind == "int8" else 0.12)
        assert linear.weight.dtype == expected.dtype and linear.weight.shape == expected.shape
        assert linear.num_bytes < expected.nbytes / (3.5 if kind == "int8" else 6)
        assert "weight" not in dict(linear.named_parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_sampling_and_training_agree(shape: ModelShape, kind: str, dtype: str) -> None:
    backend = backend_of(shape, quantize=kind, dtype=dtype)
    backend.publish("m", "v")
    backend.sampler.submit(make_sample("s", make_prompt(20), version_id="v"))
    answer = finish(backend.sampler)["s"].sequences[0]
    tokens = np.concatenate([make_prompt(20), answer.tokens_T])
    inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
    (result,) = run_to_end(
        backend.run_passes([Pass("r", "m", (Datum(tokens[:-1], inputs),), "cross_entropy", {}, True)])
    )
    assert isinstance(result, PassResult), result
    np.testing.assert_allclose(result.logprobs[0][19:], answer.logprobs_T, atol=1e-4 if dtype == "float32" else 0.15)


def test_it_can_be_deterministic_too(shape: ModelShape) -> None:
    backend = backend_of(shape, quantize="int8", deterministic="on")
    assert backend.sampler._deterministic
    first, second = (train_steps(backend_of(shape, quantize="int8", deterministic="on")) for _ in range(2))
    assert torch.equal(first[2], second[2])


def test_unsupported_quantization_is_refused(
    shape: ModelShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="quantize is 'int3'"):
        backend_of(shape, quantize="int3")
    with pytest.raises(SettingsError, match="experts of GptOssForCausalLM cannot be quantised"):
        backend_of(tiny_models.make(tmp_path, "gpt_oss"), quantize="int8")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(SettingsError, match=r"install tinsmith\[quantize\]"):
        backend_of(shape, quantize="nf4")
