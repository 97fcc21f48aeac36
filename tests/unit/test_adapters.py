"""Adapters as files and as versions: PEFT reads them, training resumes bit for bit, and foreign files are refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support import tiny_models
from support.local_sampling import HOT, make_sample, run
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.attention import PackedCausal
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.errors import UserError
from tinsmith.types import AdamParams, Datum, LoraSpec, ModelShape, OptimStep, Pass, PassResult

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def backend(shape: ModelShape) -> TorchBackend:
    return TorchBackend(shape, device="cpu")


def train(backend: TorchBackend, model_id: str, steps: range) -> list[float]:
    losses = []
    for step in steps:
        rng = np.random.default_rng(step)
        tokens = rng.integers(0, tiny_models.VOCAB, 20)
        inputs = {"target_tokens": np.roll(tokens, -1), "weights": np.ones(20, np.float32)}
        datum = Datum(tokens.astype(np.int32), inputs)
        (result,) = run_to_end(backend.run_passes([Pass("r", model_id, (datum,), "cross_entropy", {}, False)]))
        assert isinstance(result, PassResult)
        losses.append(result.metrics["loss:sum"])
        backend.optim_step([OptimStep("o", model_id, AdamParams(5e-3, weight_decay=0.01))])
    return losses


def logits(backend: TorchBackend, adapter: Adapter) -> Tensor:
    tokens = torch.arange(3, 15)
    lora_batch = LoRABatch.of([adapter], [12])
    with torch.no_grad():
        return backend.base.logits(
            backend.base.hidden(tokens, torch.arange(12), PackedCausal([12]), lora_batch), lora_batch
        )


SUBSETS = [(True, True, True), (True, False, False), (False, True, False), (False, False, True), (True, False, True)]


@pytest.mark.parametrize("subset", SUBSETS)
def test_peft_computes_the_same_logits(backend: TorchBackend, tmp_path: Path, subset: tuple[bool, bool, bool]) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    backend.create_model("m", LoraSpec(4, 0, *subset))
    train(backend, "m", range(4))
    backend.save("m", tmp_path, optimizer=False)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"], config["task_type"]) == (4, 32, "none", "CAUSAL_LM")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    base = AutoModelForCausalLM.from_pretrained(backend.base.shape.path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(base, tmp_path)
    adapted = {name.rpartition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    assert {name.removeprefix("base_model.model.") for name in adapted} == backend._models["m"].adapter.weights.keys()
    with torch.no_grad():
        theirs = model(input_ids=torch.arange(3, 15)[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits(backend, backend._models["m"].adapter), theirs, rtol=1e-4, atol=1e-4)
    fresh = TorchBackend(backend.base.shape, device="cpu")
    fresh.create_model("m", LoraSpec(4, 0, *subset))
    assert not torch.allclose(logits(fresh, fresh._models["m"].adapter), theirs, atol=1e-2)


@pytest.mark.parametrize("alpha", [10.0, 2.5, 96.0])
def test_an_adapters_own_alpha_counts_in_training_in_samples_and_in_files(
    backend: TorchBackend, tmp_path: Path, alpha: float
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    spec = LoraSpec(4, seed=0, alpha=alpha)
    backend.create_model("m", spec)
    train(backend, "m", range(3))
    backend.save("m", tmp_path / "peft", optimizer=True)
    backend.save("m", tmp_path / "export", optimizer=False, stacked=True)
    for name in ("peft", "export"):
        config = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (4, alpha)
    base = AutoModelForCausalLM.from_pretrained(backend.base.shape.path).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
    with torch.no_grad():
        theirs = model(input_ids=torch.arange(3, 15)[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits(backend, backend._models["m"].adapter).double(), theirs, rtol=1e-4, atol=1e-4)

    backend.publish("m", "v")
    backend.load_version("w", tmp_path / "export")
    expected = theirs.log_softmax(-1)[torch.arange(11), torch.arange(4, 15)]
    for version in ("v", "w"):
        sample = make_sample("a", np.arange(3, 15, dtype=np.int32), HOT, version_id=version, prompt_logprobs=True)
        scored = run(backend.sampler, sample)["a"].prompt_logprobs_T
        assert scored is not None
        np.testing.assert_allclose(scored[1:], expected, atol=1e-4)

    # A model with another alpha gets the same function; one with the same alpha is equal bit for bit.
    backend.load("default", LoraSpec(4, seed=0), tmp_path / "peft", optimizer=False)
    default_logits = logits(backend, backend._models["default"].adapter)
    torch.testing.assert_close(default_logits.double(), theirs, rtol=1e-4, atol=1e-4)
    backend.load("resumed", spec, tmp_path / "peft", optimizer=True)
    assert train(backend, "resumed", range(3, 5)) == train(backend, "m", range(3, 5))


def test_training_goes_on_bit_for_bit_after_a_load(backend: TorchBackend, shape: ModelShape, tmp_path: Path) -> None:
    spec = LoraSpec(4, seed=1)
    backend.create_model("m", spec)
    train(backend, "m", range(3))
    backend.save("m", tmp_path, optimizer=True)
    straight = train(backend, "m", range(3, 6))
    other = TorchBackend(shape, device="cpu")
    other.load("n", spec, tmp_path, optimizer=True)
    assert train(other, "n", range(3, 6)) == straight
    assert torch.equal(other._models["n"].adapter.flat_P, backend._models["m"].adapter.flat_P)
    other.load("without", spec, tmp_path, optimizer=False)
    assert train(other, "without", range(3, 6)) != straight


def test_an_untrained_model_can_be_saved_with_its_optimizer(backend: TorchBackend, tmp_path: Path) -> None:
    spec = LoraSpec(4, seed=1)
    backend.create_model("m", spec)
    backend.save("m", tmp_path, optimizer=True)
    backend.load("n", spec, tmp_path, optimizer=True)
    assert train(backend, "m", range(3)) == train(backend, "n", range(3))


def test_a_pending_gradient_is_saved_with_the_optimizer(backend: TorchBackend, tmp_path: Path) -> None:
    backend.create_model("m", LoraSpec(4, seed=1))
    datum = Datum(np.arange(5, dtype=np.int32), {"target_tokens": np.arange(5), "weights": np.ones(5, np.float32)})
    run_to_end(backend.run_passes([Pass("r", "m", (datum,), "cross_entropy", {}, False)]))
    backend.save("m", tmp_path, optimizer=True)
    backend.load("n", LoraSpec(4, seed=1), tmp_path, optimizer=True)
    pending, restored = (backend._models[name].gradient_P for name in "mn")
    assert pending is not None and restored is not None and torch.equal(pending, restored)


def test_a_version_is_a_copy_that_training_does_not_touch(backend: TorchBackend) -> None:
    backend.create_model("m", LoraSpec(4, seed=1))
    train(backend, "m", range(2))
    backend.publish("m", "v")
    version = backend._versions["v"]
    before = logits(backend, version)
    assert torch.equal(before, logits(backend, backend._models["m"].adapter))
    train(backend, "m", range(2, 4))
    assert torch.equal(before, logits(backend, version))
    assert not torch.equal(before, logits(backend, backend._models["m"].adapter))
    backend.publish("m", "v")
    assert backend._versions["v"] is not version and torch.equal(before, logits(backend, version))
    backend.unload_model("m")
    assert backend.has_version("v") and not backend.has_model("m")
    backend.drop_version("v")
    backend.drop_version("v")
    assert not backend.has_version("v")


@pytest.mark.parametrize("subset", SUBSETS)
def test_a_version_survives_its_file(backend: TorchBackend, tmp_path: Path, subset: tuple[bool, bool, bool]) -> None:
    backend.create_model("m", LoraSpec(4, 1, *subset))
    train(backend, "m", range(2))
    backend.publish("m", "v")
    backend.capture_version("v").write(tmp_path / "a")
    backend.save("m", tmp_path / "b", optimizer=False)
    backend.load_version("w", tmp_path / "a")
    assert torch.equal(*(logits(backend, backend._versions[name]) for name in "vw"))
    assert (tmp_path / "a/adapter_model.safetensors").read_bytes() == (
        tmp_path / "b/adapter_model.safetensors"
    ).read_bytes()


def test_a_foreign_peft_adapter_keeps_its_own_alpha(backend: TorchBackend, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(backend.base.shape.path)
    config = peft.LoraConfig(
        r=6, lora_alpha=10, target_modules=["q_proj", "v_proj"], use_rslora=True, task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(tmp_path)
    backend.load_version("v", tmp_path)
    with torch.no_grad():
        theirs = model(input_ids=torch.arange(3, 15)[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits(backend, backend._versions["v"]), theirs, rtol=1e-4, atol=1e-4)


def test_files_that_do_not_fit_are_refused_by_name(backend: TorchBackend, tmp_path: Path) -> None:
    spec = LoraSpec(4, seed=1)
    backend.create_model("m", spec)
    backend.save("m", tmp_path, optimizer=False)
    with pytest.raises(UserError, match="holds no optimizer state"):
        backend.load("n", spec, tmp_path, optimizer=True)
    with pytest.raises(UserError, match="has rank 4 on 15 linears; lora_config asks for rank 8 on 15"):
        backend.load("n", LoraSpec(8), tmp_path, optimizer=False)
    with pytest.raises(UserError, match="asks for rank 4 on 9"):
        backend.load("n", LoraSpec(4, train_mlp=False), tmp_path, optimizer=False)
    with pytest.raises(UserError, match=r"there is no adapter_config\.json"):
        backend.load_version("v", tmp_path / "nowhere")
    assert not backend.has_model("n") and not backend.has_version("v")
    config_path, weights_path = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    good = json.loads(config_path.read_text())
    for change, message in (
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "does not describe a LoRA"),
        ({"r": 5}, "has rank 4, and adapter_config.json says 5"),
        ({"r": "4"}, "r is '4'"),
    ):
        config_path.write_text(json.dumps({**good, **change}))
        with pytest.raises(UserError, match=message):
            backend.load_version("v", tmp_path)
    config_path.write_text(json.dumps(good))
    tensors = load_file(weights_path)
    linear = "base_model.model.model.layers.9.self_attn.q_proj"
    elsewhere = {f"{linear}.lora_A.weight": torch.zeros(4, 64), f"{linear}.lora_B.weight": torch.zeros(64, 4)}
    save_file({**tensors, **elsewhere}, weights_path)
    with pytest.raises(UserError, match="cannot carry"):
        backend.load_version("v", tmp_path)
    weights_path.write_bytes(b"\2" + bytes(9))
    with pytest.raises(UserError, match="is not a complete safetensors file"):
        backend.load_version("v", tmp_path)


def test_unknown_models_and_versions_are_refused(backend: TorchBackend, tmp_path: Path) -> None:
    for call in (
        lambda: backend.publish("x", "v"),
        lambda: backend.save("x", tmp_path, optimizer=False),
        lambda: backend.capture_version("x").write(tmp_path),
    ):
        with pytest.raises(UserError, match="'x' is not loaded"):
            call()
    backend.unload_model("x")
