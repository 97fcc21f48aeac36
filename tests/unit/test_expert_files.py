"""Adapters of experts in files: PEFT's own files are read if they can be represented, and otherwise refused by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from support.families import FAMILIES, make
from tinsmith.backends.torch import TorchBackend
from tinsmith.errors import UserError
from tinsmith.types import LoraSpec, ModelShape
from tinsmith.wire.adapter_files import CONFIG_FILE, WEIGHTS_FILE, read_adapter

EXPERTS = "base_model.model.model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    (family,) = (family for family in FAMILIES if family.model_type == "qwen3_moe")
    return make(tmp_path_factory.mktemp("base"), family)


@pytest.fixture(scope="module")
def backend(shape: ModelShape) -> TorchBackend:
    backend = TorchBackend(shape, device="cpu")
    backend.create_model("m", LoraSpec(2, seed=1))
    adapter = backend._models["m"].adapter
    adapter.flat_P.normal_(generator=torch.Generator().manual_seed(0))
    return backend


def test_shared_matrices_of_experts_are_written_once_except_for_peft(backend: TorchBackend, tmp_path: Path) -> None:
    backend.save("m", tmp_path / "stacked", optimizer=False, stacked=True)
    backend.save("m", tmp_path / "peft", optimizer=False)
    stacked, peft = (load_file(tmp_path / name / WEIGHTS_FILE) for name in ("stacked", "peft"))
    assert {name.rpartition("experts.")[2]: list(t.shape) for name, t in stacked.items() if "layers.1.mlp" in name} == {
        "w1.lora_A.weight": [1, 2, 32],
        "w1.lora_B.weight": [4, 24, 2],
        "w3.lora_A.weight": [1, 2, 32],
        "w3.lora_B.weight": [4, 24, 2],
        "w2.lora_A.weight": [4, 2, 24],
        "w2.lora_B.weight": [1, 32, 2],
    }
    assert {name.removeprefix(EXPERTS): list(t.shape) for name, t in peft.items() if "layers.1.mlp" in name} == {
        ".base_layer.lora_A.weight": [16, 32],
        ".base_layer.lora_B.weight": [48, 16],
        ".lora_A.weight": [8, 24],
        ".lora_B.weight": [32, 8],
    }
    config = json.loads((tmp_path / "peft" / CONFIG_FILE).read_text())
    assert config["rank_pattern"] == {"experts.gate_up_proj": 4} and config["target_modules"] == [
        "k_proj", "lm_head", "o_proj", "q_proj", "v_proj"
    ]  # fmt: skip
    assert "model.layers.1.mlp.experts.down_proj" in config["target_parameters"]
    assert "model.layers.0.mlp.gate_proj.weight" in config["target_parameters"]


def test_an_adapter_whose_experts_share_nothing_is_refused(
    backend: TorchBackend, shape: ModelShape, tmp_path: Path
) -> None:
    import peft

    model = AutoModelForCausalLM.from_pretrained(shape.path)
    pattern = {"experts.gate_up_proj": 4}
    config = peft.LoraConfig(
        r=2, lora_alpha=8, target_modules=["q_proj"], rank_pattern=pattern, alpha_pattern={"experts.gate_up_proj": 16},
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], task_type="CAUSAL_LM",
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(model, config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts: here all experts share A of gate and of up"):
        backend.load_version("v", tmp_path)
    changed = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**changed, "rank_pattern": {}, "alpha_pattern": {}}))
    with pytest.raises(UserError, match="target_parameters"):
        backend.load_version("v", tmp_path)
    assert not backend.has_version("v")


@pytest.mark.parametrize(
    ("stacked", "name", "message"),
    [
        (False, f"{EXPERTS}.lora_A.weight", r"experts must have .*; it has lora_A \[7, 24\] and lora_B \[32, 8\]"),
        (False, f"{EXPERTS}.base_layer.lora_B.weight", r"experts\.gate_up_proj must have lora_A \[16, 32\]"),
        (True, f"{EXPERTS}.w1.lora_B.weight", r"experts\.w1 must have lora_A \[1, 2, 32\] and lora_B \[4, 24, 2\]"),
        (True, f"{EXPERTS}.w2.lora_B.weight", r"experts\.w2 must have .*; it has .* and lora_B \[0, 32, 2\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    backend: TorchBackend, tmp_path: Path, stacked: bool, name: str, message: str
) -> None:
    backend.save("m", tmp_path, optimizer=False, stacked=stacked)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    cut = tensors.pop(name)[:-1].contiguous()
    other_side = "B" if name.endswith("lora_A.weight") else "A"
    for changed, words in (({**tensors, name: cut}, message), (tensors, rf"; it has lora_{other_side} \[[0-9, ]*\]$")):
        save_file(changed, tmp_path / WEIGHTS_FILE)
        with pytest.raises(UserError, match=words):
            backend.load("n", LoraSpec(2), tmp_path, optimizer=False)


@pytest.mark.parametrize("name", ["base_layer.lora_A", "base_layer.lora_B", "lora_B"])
def test_one_number_that_experts_do_not_share_is_seen(backend: TorchBackend, tmp_path: Path, name: str) -> None:
    backend.save("m", tmp_path, optimizer=False)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    matrix = tensors[f"{EXPERTS}.{name}.weight"]
    # For lora_B: the first output of gate, at an inner row of up's; otherwise any number.
    matrix[0, -1] += 1.0
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    with pytest.raises(UserError, match="here all experts share"):
        backend.load_version("v", tmp_path)


@pytest.mark.parametrize("train_attn", [True, False])
def test_experts_without_a_gate_are_known_to_the_server_and_come_back(train_attn: bool, tmp_path: Path) -> None:
    """Without adapters of the mixers all ranks are equal; only the parameters show that these are experts."""
    family = next(candidate for candidate in FAMILIES if candidate.title == "Nemotron-H with experts")
    backend = TorchBackend(make(tmp_path / "base", family), device="cpu")
    spec = LoraSpec(2, seed=1, train_attn=train_attn)
    backend.create_model("m", spec)
    adapter = backend._models["m"].adapter
    adapter.flat_P.normal_(generator=torch.Generator().manual_seed(0))
    backend.save("m", tmp_path / "peft", optimizer=False)
    description = read_adapter(tmp_path / "peft", plain=True)
    assert description.rank == 2 and description.spec.train_attn == train_attn and description.spec.train_mlp
    assert {name.partition("mixer.")[2] for name in description.experts} == {"experts", "experts.base_layer"}
    config = json.loads((tmp_path / "peft" / CONFIG_FILE).read_text())
    assert bool(config["rank_pattern"]) == train_attn
    expected = {pair.rpartition(".")[2] for pair in config["target_parameters"] if ".experts." in pair}
    assert expected == {"up_proj", "down_proj"}
    backend.load("n", spec, tmp_path / "peft", optimizer=False)
    again = backend._models["n"].adapter.weights
    for name, pair in adapter.weights.items():
        assert all(torch.equal(first, second) for first, second in zip(pair, again[name], strict=True)), name
