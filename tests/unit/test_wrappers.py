"""Directories whose architecture wraps a text model and a vision tower; only the text model is served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from support import tiny_models
from support.families import COMMON, EXPERTS, GATED_DELTA, LATENT, SHARED_EXPERT, randomise_weights
from support.local_sampling import make_prompt
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.model import BaseModel
from tinsmith.base_models import read_shape
from tinsmith.errors import SettingsError
from tinsmith.types import LoraSpec, ModelShape
from unit.test_families import check_sampling, check_training, reference, train

torch.set_num_threads(1)

QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
PIXTRAL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
           "image_size": 28, "patch_size": 14}  # fmt: skip
KIMI_TEXT = {**EXPERTS, **LATENT, "model_type": "deepseek_v3", "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
             "n_shared_experts": 1, "first_k_dense_replace": 1}  # fmt: skip
KIMI_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
               "pos_emb_height": 4, "pos_emb_width": 4}  # fmt: skip
LLAMA4_TEXT = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 24, "intermediate_size_mlp": 40,
               "moe_layers": [1], "no_rope_layers": [1, 0], "attention_chunk_size": 6, "floor_scale": 4}  # fmt: skip
LLAMA4_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
                 "image_size": 28, "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32,
                 "projector_output_dim": 32}  # fmt: skip
WRAPPERS = {
    "llama4": ("Llama4ForCausalLM", LLAMA4_TEXT, LLAMA4_VISION),
    "qwen3_5": ("Qwen3_5ForCausalLM", GATED_DELTA, QWEN_VISION),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {**GATED_DELTA, **SHARED_EXPERT}, QWEN_VISION),
    "mistral3": ("MistralForCausalLM", {}, PIXTRAL),
    "kimi_k25": ("DeepseekV3ForCausalLM", KIMI_TEXT, KIMI_VISION),
}


def make_wrapper(directory: Path, model_type: str, *, tied: bool = False) -> tuple[ModelShape, PreTrainedModel]:
    _, text, vision = WRAPPERS[model_type]
    tie = {"tie_word_embeddings": tied}
    config = AutoConfig.for_model(model_type, text_config={**COMMON, **text, **tie}, vision_config=vision, **tie)
    model = randomise_weights(AutoModelForImageTextToText.from_config(config, dtype=torch.float32), 1.0).eval()
    model.save_pretrained(directory)
    if model_type == "kimi_k25":  # its save_pretrained gives layers of the text model the tower's name
        file = directory / "model.safetensors"
        tensors = {name.replace("model.blocks.", "model.layers."): tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    tiny_models.tokenizer().save_pretrained(directory)
    return read_shape("tiny/wrapper", directory), model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", WRAPPERS)
def test_the_text_model_of_a_wrapper_is_served_alone(model_type: str, tied: bool, tmp_path: Path) -> None:
    shape, wrapper = make_wrapper(tmp_path, model_type, tied=tied)
    assert (shape.vocab_size, shape.max_context_length) == (tiny_models.VOCAB, 128)
    backend = TorchBackend(shape, device="cpu")
    assert type(backend.base.model).__name__ == WRAPPERS[model_type][0]
    assert not any("visual" in name or "vision" in name for name, _ in backend.base.model.named_parameters())
    # Llama 4's wrapper of transformers 5.24 fails without images, but not its text model.
    check_sampling(backend, None, wrapper.language_model if model_type == "llama4" else wrapper)


def test_a_wrappers_checkpoint_loads_in_peft_and_merges(tmp_path: Path) -> None:
    """PEFT reads the checkpoint, and the cookbook merges an export under the names of the wrapper's own weights."""
    from tinker_cookbook import weights

    shape, wrapper = make_wrapper(tmp_path / "base", "qwen3_5")
    backend = TorchBackend(shape, device="cpu")
    backend.create_model("m", LoraSpec(3, seed=1))
    train(backend, "m")
    backend.save("m", tmp_path / "saved", optimizer=False)
    check_training(backend, "m", reference(tmp_path / "base", tmp_path / "saved"))
    backend.save("m", tmp_path / "export", optimizer=False, stacked=True)
    weights.build_hf_model(
        base_model=str(tmp_path / "base"), adapter_path=str(tmp_path / "export"), output_path=str(tmp_path / "merged"),
        dtype="float32",
    )  # fmt: skip
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    check_training(backend, "m", merged)
    tokens = torch.from_numpy(make_prompt(9).astype(np.int64))[None]
    with torch.no_grad():
        assert not torch.allclose(merged(input_ids=tokens).logits, wrapper(input_ids=tokens).logits, atol=1e-3)


def test_files_without_some_of_the_weights_are_refused(tmp_path: Path) -> None:
    shape, _ = make_wrapper(tmp_path, "qwen3_5")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.language_model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        SettingsError, match=r"lacks 1 weights of Qwen3_5ForCausalLM, such as model\.layers\.1\.mlp\.up_proj"
    ):
        BaseModel.load(shape, device="cpu")


def test_a_wrapper_without_a_causal_text_model_is_refused_by_name(tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen2_5_vl", text_config=dict(COMMON), vision_config={})
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **COMMON)).save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match="'qwen2_5_vl' has no causal language model in transformers"):
        BaseModel.load(ModelShape("x", str(tmp_path), 300, 128, "X"), device="cpu")
