"""Every family of families.py is trained, sampled and exported, and matches transformers to 1e-4; others are refused.

PEFT is the reference: transformers' model, with the checkpoint that was saved here loaded by PEFT into it.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from support import tiny_models
from support.families import (
    ALL_FAMILIES,
    DOCUMENT,
    FAMILIES,
    REFUSED,
    Family,
    Refusal,
    make,
    make_later,
    make_refused,
    render,
)
from support.local_sampling import make_prompt, make_sample, run
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import SettingsError
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.types import AdamParams, Datum, LoraSpec, OptimStep, Pass, PassResult, SamplingParams

torch.set_num_threads(1)

LENGTHS = (11, 1, 23, 16)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, stop_eos=False)


def in_make_test(family: Family) -> object:
    return pytest.param(family, id=family.model_type, marks=() if family.core else pytest.mark.slow)


def datum(length: int, seed: int) -> Datum:
    rng = np.random.default_rng([seed, length])
    inputs = {"target_tokens": rng.integers(0, tiny_models.VOCAB, length), "weights": np.ones(length, np.float32)}
    return Datum(rng.integers(0, tiny_models.VOCAB, length).astype(np.int32), inputs)


def batch(model_id: str, seed: int, *, forward_only: bool = False) -> Pass:
    data = tuple(datum(length, seed) for length in LENGTHS)
    return Pass(f"r-{model_id}", model_id, data, "cross_entropy", {}, forward_only)


def train(backend: TorchBackend, *model_ids: str) -> None:
    for step in range(2):
        run_to_end(backend.run_passes([batch(model_id, step) for model_id in model_ids]))
        results = backend.optim_step([OptimStep("o", model_id, AdamParams(2e-2)) for model_id in model_ids])
        assert not any(isinstance(result, Exception) for result in results), results


def reference(path: str | Path, adapter: Path | None = None) -> nn.Module:
    """transformers' own model, with a checkpoint of ours as PEFT reads it."""
    import peft

    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    if adapter is None:
        return model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = peft.PeftModel.from_pretrained(model, adapter)
    adapter_weights = {name.replace(".default.", "."): p for name, p in loaded.named_parameters() if ".lora_" in name}
    saved = load_file(adapter / "adapter_model.safetensors")
    assert adapter_weights.keys() == saved.keys()
    assert all(torch.equal(adapter_weights[name], tensor) for name, tensor in saved.items())
    return loaded.eval()


def logprobs(model: nn.Module, tokens: np.ndarray) -> Tensor:
    """[T, V]"""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), -1)


def check_training(backend: TorchBackend, model_id: str, model: nn.Module) -> None:
    (result,) = run_to_end(backend.run_passes([batch(model_id, 7, forward_only=True)]))
    assert isinstance(result, PassResult)
    for length, actual in zip(LENGTHS, result.logprobs, strict=True):
        example = datum(length, 7)
        targets = torch.from_numpy(np.asarray(example.inputs["target_tokens"]))
        expected = logprobs(model, example.tokens_N)[torch.arange(length), targets]
        np.testing.assert_allclose(actual, expected, atol=1e-4)


def check_sampling(backend: TorchBackend, version_id: str | None, model: nn.Module) -> None:
    sampler = LocalSampler(backend.base, backend._versions, options=SamplerOptions(block_size=4, max_tokens_per_step=9))
    prompts = {str(length): make_prompt(length) for length in (1, 7, 30)}
    samples = [
        make_sample(name, prompt, GREEDY, version_id=version_id, prompt_logprobs=True)
        for name, prompt in prompts.items()
    ]
    for name, result in run(sampler, *samples).items():
        prompt, answer = prompts[name], result.sequences[0]
        expected = logprobs(model, np.concatenate([prompt, answer.tokens_T]))
        answer_logprobs = expected[len(prompt) - 1 : -1]
        assert answer.tokens_T.tolist() == answer_logprobs.argmax(-1).tolist()
        np.testing.assert_allclose(answer.logprobs_T, answer_logprobs.max(-1).values, atol=1e-4)
        prompt_logprobs = expected[torch.arange(len(prompt) - 1), torch.from_numpy(prompt[1:].astype(np.int64))]
        assert result.prompt_logprobs_T is not None
        np.testing.assert_allclose(result.prompt_logprobs_T[1:], prompt_logprobs, atol=1e-4)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("family", [in_make_test(family) for family in FAMILIES])
def test_a_family_is_what_transformers_and_peft_compute(family: Family, tmp_path: Path) -> None:
    shape = make(tmp_path / "base", family)
    backend = TorchBackend(shape, device="cpu")
    check_sampling(backend, None, reference(shape.path))
    spec = LoraSpec(3, seed=1)
    backend.create_model("m", spec)
    backend.create_model("n", LoraSpec(5, seed=2))
    train(backend, "m", "n")
    adapter = backend._models["m"].adapter
    assert any(target.experts for target in adapter.layout.targets) == family.experts
    assert all(matrix.any() for pair in adapter.weights.values() for matrix in pair), "something was not trained"
    backend.save("m", tmp_path / "saved", optimizer=True)
    backend.publish("m", "v")
    model = reference(shape.path, tmp_path / "saved")
    check_training(backend, "m", model)
    check_sampling(backend, "v", model)
    # Each file format restores the same values.
    backend.save("m", tmp_path / "export", optimizer=False, stacked=True)
    backend.capture("m").write(tmp_path / "snapshot")
    for name in ("saved", "export", "snapshot"):
        backend.load(name, spec, tmp_path / name, optimizer=name != "export")
        assert torch.equal(backend._models[name].adapter.flat_P, adapter.flat_P), name
        backend.load_version(name, tmp_path / name)
        assert torch.equal(backend._versions[name].flat_P, adapter.flat_P), name


@pytest.mark.parametrize("how", ["plain", "deterministic", "budget"])
def test_a_model_without_attention_samples_many_at_once(how: str, tmp_path: Path) -> None:
    """No layer caches keys and values, so blocks hold nothing and contiguous slots have no layers."""
    (family,) = (family for family in FAMILIES if family.model_type == "mamba2")
    shape = make(tmp_path, family)
    backend = TorchBackend(shape, device="cpu", memory_budget=64 << 20 if how == "budget" else 0)
    options = SamplerOptions(block_size=4, deterministic=how == "deterministic")
    sampler = LocalSampler(backend.base, backend._versions, options=options, memory=backend._memory)
    prompts = {str(index): make_prompt(7 + index) for index in range(6)}
    results = run(sampler, *(make_sample(name, prompt, GREEDY) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        answer = results[name].sequences[0]
        expected = logprobs(reference(shape.path), np.concatenate([prompt, answer.tokens_T]))[len(prompt) - 1 : -1]
        assert answer.tokens_T.tolist() == expected.argmax(-1).tolist()
        np.testing.assert_allclose(answer.logprobs_T, expected.max(-1).values, atol=1e-4)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.model_type in ("qwen3_moe", "gpt_oss", "deepseek_v3")],
                         ids=lambda family: family.model_type)  # fmt: skip
def test_the_cookbook_merges_and_converts_an_export(family: Family, tmp_path: Path) -> None:
    from tinker_cookbook import weights

    backend = TorchBackend(make(tmp_path / "base", family), device="cpu")
    backend.create_model("m", LoraSpec(3, seed=1))
    train(backend, "m")
    backend.save("m", tmp_path / "export", optimizer=False, stacked=True)
    base, export = str(tmp_path / "base"), str(tmp_path / "export")
    weights.build_hf_model(base_model=base, adapter_path=export, output_path=str(tmp_path / "merged"), dtype="float32")
    check_training(backend, "m", reference(tmp_path / "merged"))
    if family.model_type == "qwen3_moe":
        # PEFT can load it unless a dense layer has linears with the experts' names.
        weights.build_lora_adapter(base_model=base, adapter_path=export, output_path=str(tmp_path / "peft"))
        keys = load_file(tmp_path / "peft" / "adapter_model.safetensors").keys()
        assert "base_model.model.model.layers.1.mlp.experts.3.gate_proj.lora_B.weight" in keys


def test_experts_that_run_again_in_backward_give_the_same_gradients(tmp_path: Path) -> None:
    (family,) = (family for family in FAMILIES if family.model_type == "qwen3_moe")
    shape, gradients = make(tmp_path, family), []
    for mode in ("off", "on"):
        backend = TorchBackend(shape, device="cpu", recompute=mode)
        for index, model_id in enumerate("mn"):
            backend.create_model(model_id, LoraSpec(3 + index, seed=index))
        train(backend, "m", "n")
        run_to_end(backend.run_passes([batch("m", 3), batch("n", 3)]))
        gradients.append([backend._models[model_id].gradient_P for model_id in "mn"])
    for once, twice in zip(*gradients, strict=True):
        assert once is not None and torch.equal(once, twice)


@pytest.mark.parametrize("refusal", [pytest.param(r, id=r.model_type) for r in REFUSED])
def test_unsupported_models_are_refused_with_a_reason(refusal: Refusal, tmp_path: Path) -> None:
    shape = make_refused(tmp_path, refusal)
    with pytest.raises(SettingsError) as refused:
        BaseModel.load(shape, device="cpu")
    assert refusal.reason in str(refused.value)


def test_a_family_of_a_later_release_is_refused(tmp_path: Path) -> None:
    for family in ALL_FAMILIES:
        if family not in FAMILIES:
            with pytest.raises(SettingsError):
                BaseModel.load(make_later(tmp_path / family.model_type, family), device="cpu")


def test_the_document_is_what_the_tests_verify() -> None:
    assert DOCUMENT.read_text() == render(), "run scripts/write-models"
