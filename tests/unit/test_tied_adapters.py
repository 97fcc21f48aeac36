"""Adapters of a model whose unembedding shares the embeddings' weights, in the form that each reader expects.

PEFT, vLLM and SGLang read `lm_head` in saved checkpoints. tinker_cookbook.weights reads exports and finds no `lm_head`
in the base's files: it merges Tinker's `unembed_tokens` into the embeddings.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from support.families import FAMILIES, make
from tinsmith.backends.torch import TorchBackend
from tinsmith.exchange.merging import merge, rewrite
from tinsmith.types import LoraSpec, ModelShape
from tinsmith.wire.adapter_files import read_adapter
from unit.test_families import check_training, reference, train
from unit.test_wrappers import make_wrapper

HEAD, TINKER_HEAD = "base_model.model.lm_head.", "base_model.model.model.unembed_tokens."


@pytest.fixture(params=["qwen3", "qwen3_5"])
def tied(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ModelShape, type]:
    """A tied text model, and a tied text model in a wrapper."""
    if request.param == "qwen3_5":
        return make_wrapper(tmp_path / "base", "qwen3_5", tied=True)[0], AutoModelForImageTextToText
    (family,) = (family for family in FAMILIES if family.model_type == "qwen3")
    family = replace(family, config={**family.config, "tie_word_embeddings": True})
    return make(tmp_path / "base", family), AutoModelForCausalLM


def train_backend(shape: ModelShape, *, train_unembed: bool = True) -> TorchBackend:
    backend = TorchBackend(shape, device="cpu")
    backend.create_model("m", LoraSpec(3, seed=1, train_unembed=train_unembed))
    train(backend, "m")
    return backend


def heads(directory: Path) -> set[str]:
    """The prefixes of the unembedding's matrices in a file."""
    keys = load_file(directory / "adapter_model.safetensors")
    return {key.partition("lora_")[0] for key in keys if "layers." not in key}


def merge_by_cookbook(base: str, adapter: Path, output: Path, kind: type) -> nn.Module:
    from tinker_cookbook import weights

    weights.build_hf_model(base_model=base, adapter_path=str(adapter), output_path=str(output), dtype="float32")
    return kind.from_pretrained(output, dtype=torch.float32).eval()  # type: ignore[attr-defined]


def test_peft_applies_a_saved_checkpoint_to_the_unembedding_alone(
    tied: tuple[ModelShape, type], tmp_path: Path
) -> None:
    shape, _ = tied
    backend = train_backend(shape)
    backend.save("m", tmp_path / "saved", optimizer=False)
    assert heads(tmp_path / "saved") == {HEAD}
    check_training(backend, "m", reference(shape.path, tmp_path / "saved"))


def test_the_cookbook_merges_an_export(tied: tuple[ModelShape, type], tmp_path: Path) -> None:
    """The merged unembedding is the trained one. It is also the embedding, so the base's embedding is put back."""
    shape, kind = tied
    backend = train_backend(shape)
    backend.save("m", tmp_path / "export", optimizer=False, stacked=True)
    assert heads(tmp_path / "export") == {TINKER_HEAD}
    merged = merge_by_cookbook(shape.path, tmp_path / "export", tmp_path / "merged", kind)
    embeddings: Tensor = reference(shape.path).get_input_embeddings().weight  # type: ignore[operator]
    assert not torch.allclose(merged.get_output_embeddings().weight, embeddings, atol=1e-3)  # type: ignore[operator]
    merged.get_input_embeddings().weight = nn.Parameter(embeddings)  # type: ignore[operator]
    check_training(backend, "m", merged)


def test_without_the_unembedding_a_merged_model_is_the_trained_one(
    tied: tuple[ModelShape, type], tmp_path: Path
) -> None:
    shape, kind = tied
    backend = train_backend(shape, train_unembed=False)
    backend.save("m", tmp_path / "export", optimizer=False, stacked=True)
    assert not heads(tmp_path / "export")
    check_training(backend, "m", merge_by_cookbook(shape.path, tmp_path / "export", tmp_path / "merged", kind))


def test_external_engines_get_the_form_of_peft(tied: tuple[ModelShape, type], tmp_path: Path) -> None:
    backend = train_backend(tied[0])
    backend.publish("m", "v")
    backend.capture_version("v").write(tmp_path / "version")
    assert heads(tmp_path / "version") == {HEAD}


def test_both_forms_are_loaded(tied: tuple[ModelShape, type], tmp_path: Path) -> None:
    backend = train_backend(tied[0])
    flat_P = backend._models["m"].adapter.flat_P
    for name, stacked in (("saved", False), ("export", True)):
        backend.save("m", tmp_path / name, optimizer=False, stacked=stacked)
        description = read_adapter(tmp_path / name, plain=tied[1] is AutoModelForCausalLM)
        assert description.spec.train_unembed and "lm_head" in description.linears
        backend.load(name, LoraSpec(3, seed=1), tmp_path / name, optimizer=False)
        assert torch.equal(backend._models[name].adapter.flat_P, flat_P)


def test_our_own_merge_unties_an_export(tmp_path: Path) -> None:
    (family,) = (family for family in FAMILIES if family.model_type == "qwen3")
    shape = make(tmp_path / "base", replace(family, config={**family.config, "tie_word_embeddings": True}))
    backend = train_backend(shape)
    backend.save("m", tmp_path / "export", optimizer=False, stacked=True)
    merge(Path(shape.path), tmp_path / "export", tmp_path / "merged")
    check_training(backend, "m", reference(tmp_path / "merged"))
    imported = rewrite(tmp_path / "export", tmp_path / "imported", lambda: Path(shape.path))
    assert heads(tmp_path / "imported") == {HEAD} and "lm_head" in imported.linears
