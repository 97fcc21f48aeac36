"""Files of linears with an adapter for each of several parts: Tinker's names, PEFT's single adapter, and back."""

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
from tinsmith.types import LoraSpec
from tinsmith.wire.adapter_files import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from unit.test_families import check_sampling, reference

LAYER = "base_model.model.model.layers.0"


def backend_of(family: str, directory: Path) -> TorchBackend:
    chosen_family = next(candidate for candidate in FAMILIES if candidate.model_type == family)
    backend = TorchBackend(make(directory, chosen_family), device="cpu")
    backend.create_model("m", LoraSpec(2, seed=1))
    backend._models["m"].adapter.flat_P.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    return backend


def shapes(directory: Path, path: str) -> dict[str, list[int]]:
    tensors = load_file(directory / WEIGHTS_FILE)
    return {name.removeprefix(f"{LAYER}.{path}."): list(x.shape) for name, x in tensors.items() if f"0.{path}." in name}


def test_parts_have_tinkers_names_in_an_export_and_are_one_adapter_to_peft(tmp_path: Path) -> None:
    backend = backend_of("qwen3_5_text", tmp_path / "base")
    backend.save("m", tmp_path / "export", optimizer=False, stacked=True)
    backend.save("m", tmp_path / "peft", optimizer=False)
    exported = {name: sizes for name, sizes in shapes(tmp_path / "export", "linear_attn").items() if "proj_" in name}
    assert exported == {
        "in_proj_q.lora_A.weight": [2, 32], "in_proj_q.lora_B.weight": [32, 2],
        "in_proj_k.lora_A.weight": [2, 32], "in_proj_k.lora_B.weight": [32, 2],
        "in_proj_v.lora_A.weight": [2, 32], "in_proj_v.lora_B.weight": [48, 2],
        "in_proj_z.lora_A.weight": [2, 32], "in_proj_z.lora_B.weight": [48, 2],
        "in_proj_a.lora_A.weight": [2, 32], "in_proj_a.lora_B.weight": [4, 2],
        "in_proj_b.lora_A.weight": [2, 32], "in_proj_b.lora_B.weight": [4, 2],
    }  # fmt: skip
    saved = shapes(tmp_path / "peft", "linear_attn")
    assert saved["in_proj_qkv.lora_A.weight"] == [6, 32] and saved["in_proj_qkv.lora_B.weight"] == [112, 6]
    config = json.loads((tmp_path / "peft" / CONFIG_FILE).read_text())
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({"in_proj_qkv": 6}, {"in_proj_qkv": 96})
    assert "in_proj_qkv" in config["target_modules"] and "in_proj_q" not in config["target_modules"]


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_a_checkpoint_may_be_uploaded_and_other_ranks_may_not(family: str, tmp_path: Path) -> None:
    backend = backend_of(family, tmp_path / "base")
    backend.save("m", tmp_path / "peft", optimizer=False)
    description = read_adapter(tmp_path / "peft", plain=True)
    assert (description.rank, description.spec) == (2, LoraSpec(2))
    config = json.loads((tmp_path / "peft" / CONFIG_FILE).read_text())
    config["rank_pattern"] = dict.fromkeys(config["rank_pattern"], 5)
    (tmp_path / "peft" / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(UserError, match="rank_pattern"):
        read_adapter(tmp_path / "peft", plain=True)
    with pytest.raises(UserError, match="rank_pattern"):
        backend.load_version("v", tmp_path / "peft")


def test_an_adapter_of_pefts_own_on_the_whole_linear_is_that_of_parts_which_share_a(tmp_path: Path) -> None:
    import peft

    backend = backend_of("qwen3_5_text", tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["in_proj_qkv"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, config)
        generator = torch.Generator().manual_seed(3)
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(parameter, 0, 0.1, generator=generator)
        adapted.save_pretrained(str(tmp_path / "own"))
    backend.load_version("v", tmp_path / "own")
    check_sampling(backend, "v", reference(tmp_path / "base", tmp_path / "own"))


def test_an_adapter_that_changes_outputs_without_one_is_refused(tmp_path: Path) -> None:
    backend = backend_of("nemotron_h", tmp_path / "base")
    backend.save("m", tmp_path / "peft", optimizer=False)
    tensors = load_file(tmp_path / "peft" / WEIGHTS_FILE)
    tensors[f"{LAYER}.mixer.in_proj.lora_B.weight"][-1, 0] = 1.0
    save_file(tensors, tmp_path / "peft" / WEIGHTS_FILE)
    with pytest.raises(UserError, match=r"mixer\.in_proj: here gate_proj, x_proj carry one adapter each"):
        backend.load_version("v", tmp_path / "peft")
