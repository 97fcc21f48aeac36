"""A quantised base model, against the same model with dequantised weights."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support import families, tiny_models
from support.local_sampling import finish, make_prompt, make_sample
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.frozen_weights import Quantise
from tinsmith.backends.torch.quantization import choose_quantiser
from tinsmith.errors import SettingsError
from tinsmith.types import AdamParams, Datum, LoraSpec, ModelShape, OptimStep, Pass, PassResult

pytest.importorskip("bitsandbytes")
torch.set_num_threads(1)

SPEC = LoraSpec(4, seed=1)


MIXTURES = ("qwen3_moe", "gpt_oss", "llama4_text")
"""Experts whose matrices are stored by outputs; by inputs, with gates between ups and biases; and by inputs."""


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("quantised"), "llama")


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> ModelShape:
    (family,) = [family for family in families.FAMILIES if family.model_type == request.param]
    return families.make(tmp_path_factory.mktemp(request.param), family)


def backend_of(shape: ModelShape, **options: str) -> TorchBackend:
    backend = TorchBackend(shape, device="cpu", **options)  # pyright: ignore[reportArgumentType]
    backend.create_model("m", SPEC)
    generator = torch.Generator().manual_seed(0)
    for _, b_Or in backend._models["m"].adapter.weights.values():
        b_Or.normal_(0, 0.02, generator=generator)
    backend._models["m"].adapter.refresh()
    return backend


def quantiser_of(kind: str) -> Quantise:
    quantise = choose_quantiser(kind, torch.device("cpu"))
    assert quantise is not None
    return quantise


def make_dequantised_model(shape: ModelShape, backend: TorchBackend, directory: Path) -> ModelShape:
    """A directory of transformers' model with the dequantised weights."""
    model = AutoModelForCausalLM.from_pretrained(shape.path, dtype=torch.float32)
    for name, linear in backend.base.targets.items():
        model.get_submodule(name).weight = torch.nn.Parameter(linear.weight.detach().clone())
    for experts in backend.base.experts:
        for name, codes in zip(("gate_up_proj", "down_proj"), experts.list_codes(), strict=True):
            weight_EOI = codes.weights()
            stored = model.get_submodule(experts.name).get_parameter(name)
            stored.data = weight_EOI.mT.contiguous() if experts.transposed else weight_EOI
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
    check_training(shape, kind, tmp_path, weights_bound=1e-5)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_experts_over_codes_train_as_over_dequantised_weights(mixture: ModelShape, kind: str, tmp_path: Path) -> None:
    check_training(mixture, kind, tmp_path, weights_bound=1e-4)


def check_training(shape: ModelShape, kind: str, directory: Path, weights_bound: float) -> None:
    backend = backend_of(shape, quantize=kind)
    oracle = backend_of(make_dequantised_model(shape, backend, directory))
    ours, theirs = train_steps(backend), train_steps(oracle)
    for actual, expected in zip(ours[0], theirs[0], strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert relative(ours[1], theirs[1]) < 1e-4
    assert relative(ours[2], theirs[2]) < weights_bound
    plain = train_steps(backend_of(shape))
    assert np.abs(plain[0][0] - ours[0][0]).max() > 1e-3, "quantising changes something"


@pytest.mark.parametrize("kind", ["int8", "nf4", "fp8"])
def test_experts_codes_take_less_room_and_the_matrices_are_gone(mixture: ModelShape, kind: str) -> None:
    quantised, plain = backend_of(mixture, quantize=kind).base, backend_of(mixture).base
    assert {name.rpartition(".")[2] for name, _ in quantised.model.named_parameters()}.isdisjoint(
        {"gate_up_proj", "down_proj"}
    )
    for codes, weights in zip(quantised.experts, plain.experts, strict=True):
        assert codes.is_quantised and not weights.is_quantised and not weights.list_codes()
        before = weights.outer_proj.nbytes + weights.down_proj.nbytes
        after = sum(tensor.nbytes for matrices in codes.list_codes() for tensor in matrices.tensors())
        assert after < before / {"int8": 2.5, "nf4": 6, "fp8": 2.5}[kind]  # rows of 16 to 32 weights have a scale each
        assert codes.copied_bytes == (1 if kind == "fp8" else 4) * 2 * codes.hidden_features * codes.inner_features
    assert quantised.num_bytes < 0.8 * plain.num_bytes
    stored = {tensor.untyped_storage()._cdata for tensor in quantised.frozen_tensors()}
    codes_stores = {t.untyped_storage()._cdata for codes in quantised.list_codes() for t in codes.tensors()}
    assert codes_stores <= stored, "they leave a sleeping device with the rest"


@pytest.mark.parametrize("kind", ["off", "int8", "nf4", "fp8"])
def test_a_mixture_starts_in_16_bits_though_a_last_bit_chooses_another_expert(mixture: ModelShape, kind: str) -> None:
    """For some of these, one row of the check at start is up to 0.7 from the model's own."""
    base = backend_of(mixture, quantize=kind, dtype="bfloat16").base
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    one_differs, most_differ = logits.clone(), logits.clone()
    one_differs[3], most_differ[1:4] = -logits[3], -logits[1:4]
    base._compare(one_differs, logits, "in one row")
    for bad in (most_differ, torch.full_like(logits, float("nan"))):
        with pytest.raises(SettingsError, match="its logits in most rows differ from its own"):
            base._compare(bad, logits, "in most rows")


def test_a_dense_model_is_compared_in_every_row(shape: ModelShape) -> None:
    base = backend_of(shape, dtype="bfloat16").base
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    one_differs = logits.clone()
    one_differs[3] = -logits[3]
    with pytest.raises(SettingsError, match="its logits in one row differ from its own"):
        base._compare(one_differs, logits, "in one row")


@pytest.mark.parametrize("kind", ["int8", "nf4", "fp8"])
def test_one_experts_matrix_is_that_of_the_stack(kind: str) -> None:
    weight_EOI = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))  # not whole blocks of nf4
    quantise = quantiser_of(kind)
    codes = quantise(weight_EOI)
    assert torch.equal(torch.stack([codes.weight(index) for index in range(3)]), codes.weights())
    for index in range(3):
        alone = quantise(weight_EOI[index : index + 1])
        assert torch.equal(alone.weight(0), codes.weight(index)), "no expert changes another's codes"
        assert relative(codes.weight(index), weight_EOI[index]) < {"int8": 0.01, "nf4": 0.15, "fp8": 0.05}[kind]


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("back", [False, True])
def test_few_rows_dequantise_the_matrices_that_they_meet_alone(
    kind: str, back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantise = quantiser_of(kind)
    codes = quantise(torch.randn(6, 20, 28, generator=torch.Generator().manual_seed(0)))
    ends_E = torch.tensor([0, 1, 1, 1, 3, 4], dtype=torch.int32)
    x_NC = torch.randn(4, 20 if back else 28, generator=torch.Generator().manual_seed(1))
    expected_NK = torch.cat([codes.multiply(x_NC[n : n + 1], e, back=back) for n, e in enumerate((1, 4, 4, 5))])
    dequantised = []
    dequantise = type(codes)._dequantise  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(
        type(codes), "_dequantise", lambda *inputs: dequantised.append(dequantise(*inputs)) or dequantised[-1]
    )
    assert relative(codes.multiply_groups(x_NC, ends_E, back=back), expected_NK) < 1e-6
    (weights,) = dequantised
    assert weights.numel() == 4 * 20 * 28


@pytest.mark.parametrize("kind", ["int8", "nf4", "fp8"])
def test_a_part_of_the_codes_stands_for_the_same_numbers(kind: str) -> None:
    """Through every cut that ranks make, and a cut of a cut."""
    quantise = quantiser_of(kind)
    codes = quantise(torch.randn(4, 12, 256, generator=torch.Generator().manual_seed(0)))
    half, quarter = slice(128, 256), slice(64, 128)
    for cut in (
        {"experts": slice(1, 3)},
        {"outputs": slice(3, 9)},
        {"inputs": half},
        {"experts": slice(2, 4), "inputs": half},
    ):
        index = tuple(cut.get(name, slice(None)) for name in ("experts", "outputs", "inputs"))
        part, expected_EOI = codes.select(**cut), codes.weights()[index]
        assert part.shape == expected_EOI.shape and part.num_weights == expected_EOI.numel()
        assert torch.equal(part.weights(), expected_EOI) and torch.equal(part.weight(0), expected_EOI[0])
        stores = [tensor.untyped_storage().nbytes() for tensor in part.tensors()]
        assert stores == [tensor.nbytes for tensor in part.tensors()], "the rest is not kept"
        x_nI = torch.randn(5, expected_EOI.shape[2], generator=torch.Generator().manual_seed(1))
        assert relative(part.multiply(x_nI, 1), x_nI @ expected_EOI[1].t()) < (0.1 if kind == "fp8" else 1e-5)
    assert torch.equal(codes.select(inputs=half).select(inputs=quarter).weights(), codes.weights()[..., 192:])
    if kind == "nf4":
        for cut in ({"inputs": slice(0, 100)}, {"inputs": slice(32, 96)}):
            with pytest.raises(ValueError, match="a scale for 64 inputs"):
                codes.select(**cut)
        with pytest.raises(ValueError, match="would have 100 of 100"):
            quantise(torch.ones(1, 4, 100)).select(outputs=slice(0, 2))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_codes_are_near_the_weights_and_take_less_room(shape: ModelShape, kind: str) -> None:
    quantised, plain = backend_of(shape, quantize=kind).base, backend_of(shape).base
    for name, linear in quantised.targets.items():
        expected = plain.targets[name].weight
        if linear.group == "unembed":
            assert linear.codes is None and torch.equal(linear.weight, expected)
            continue
        assert linear.codes is not None
        assert relative(linear.weight, expected) < (0.01 if kind == "int8" else 0.12)
        assert linear.weight.dtype == expected.dtype and linear.weight.shape == expected.shape
        num_bytes = sum(tensor.nbytes for tensor in linear.codes.tensors())
        assert num_bytes < expected.nbytes / (3.5 if kind == "int8" else 6)
        assert "weight" not in dict(linear.named_parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_sampling_and_training_agree(shape: ModelShape, kind: str, dtype: str) -> None:
    check_sampling(shape, kind, dtype)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_experts_sample_with_the_logprobs_of_training(mixture: ModelShape, kind: str) -> None:
    check_sampling(mixture, kind, "float32")


def check_sampling(shape: ModelShape, kind: str, dtype: str) -> None:
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


def test_unsupported_quantization_is_refused(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="quantize is 'int3'"):
        backend_of(shape, quantize="int3")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(SettingsError, match=r"install tinsmith\[quantize\]"):
        backend_of(shape, quantize="nf4")
