"""Quantised weights in files are dequantised at load, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from support import families, tiny_models
from tinsmith.backends.torch import TorchBackend, loading
from tinsmith.backends.torch.attention import register_attention
from tinsmith.backends.torch.loading import load_model, move_unquantised
from tinsmith.errors import SettingsError
from tinsmith.types import ModelShape

BLOCK = 4
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of e2m1 (OCP Microscaling Formats 1.0); the fourth bit is the sign."""


def write_config(directory: Path, quantisation: dict[str, object]) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantisation}))


def encode_fp8(weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, a scale for each block, and the dequantised weight."""
    blocks = weight_OI.float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    numbers = codes.float() * scales[:, None, :, None]
    return codes.view(weight_OI.shape), scales, numbers.view(weight_OI.shape)


def write_fp8(shape: ModelShape, directory: Path) -> tuple[ModelShape, ModelShape]:
    """The model with its linears in fp8, as Qwen and DeepSeek publish theirs, and with the same numbers as such."""
    coded, plain = directory / "coded", directory / "plain"
    for copy in (coded, plain):
        shutil.copytree(shape.path, copy)
    stored = load_file(coded / "model.safetensors")
    codes, numbers = dict(stored), dict(stored)
    for name, weight in stored.items():
        if name.endswith("proj.weight") and weight.dim() == 2:
            codes[name], codes[f"{name}_scale_inv"], numbers[name] = encode_fp8(weight)
    assert len(codes) > len(stored)
    save_file(codes, coded / "model.safetensors", metadata={"format": "pt"})
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    write_config(coded, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]})
    return replace(shape, path=str(coded)), replace(shape, path=str(plain))


def write_mxfp4(directory: Path) -> tuple[ModelShape, ModelShape]:
    """gpt-oss with its experts in mxfp4, as it is published, and with the same numbers as such."""
    plain = tiny_models.make(directory / "plain", "gpt_oss", intermediate_size=64)
    coded = directory / "coded"
    shutil.copytree(plain.path, coded)
    numbers, codes = load_file(Path(plain.path) / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name, weight in numbers.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            codes[name] = weight
            continue
        num, inputs, outputs = weight.shape
        bytes_EOKH = torch.randint(0, 256, (num, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        exponents_EOK = torch.randint(120, 124, (num, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
        codes[f"{name}_blocks"], codes[f"{name}_scales"] = bytes_EOKH, exponents_EOK
        table = torch.tensor([*FP4, *(-value for value in FP4)])
        halves = torch.stack([bytes_EOKH & 15, bytes_EOKH >> 4], -1).long()
        values_EOI = (table[halves].flatten(3) * 2.0 ** (exponents_EOK.float()[..., None] - 127)).flatten(2)
        numbers[name] = values_EOI.mT.contiguous()
    save_file(codes, coded / "model.safetensors", metadata={"format": "pt"})
    save_file(numbers, Path(plain.path) / "model.safetensors", metadata={"format": "pt"})
    write_config(coded, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    return replace(plain, path=str(coded)), plain


def load(shape: ModelShape) -> PreTrainedModel:
    register_attention()
    return load_model(shape, torch.float32, {"trust_remote_code": False, "local_files_only": True})


def find_family(model_type: str) -> families.Family:
    return next(family for family in (*families.FAMILIES, *families.VISION) if family.model_type == model_type)


# Without the wrapper of qwen3_5, whose configuration alone names the format.
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5"])
@pytest.mark.parametrize("has_gpu", [False, True])
def test_fp8_is_loaded_as_its_numbers(
    model_type: str, has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(families.make(tmp_path / "model", find_family(model_type)), vision=None)
    coded, plain = write_fp8(shape, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    check_weights(coded, plain)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_mxfp4_is_loaded_as_its_numbers(has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coded, plain = write_mxfp4(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    check_weights(coded, plain)


def check_weights(coded: ModelShape, plain: ModelShape) -> None:
    actual, expected = load(coded).state_dict(), load(plain).state_dict()
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        assert actual[name].dtype == weight.dtype, name
        torch.testing.assert_close(actual[name], weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5"])
def test_what_will_be_quantised_waits_on_the_host(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a vision tower before the layers."""
    model = load(families.make(tmp_path, find_family(model_type)))
    moved: set[int] = set()

    def record(model: nn.Module, device: torch.device, is_moved: Callable[[Tensor], bool]) -> None:
        moved.update(id(weight) for weight in model.parameters() if is_moved(weight))

    monkeypatch.setattr(loading, "move_tensors", record)
    move_unquantised(model, "cuda")
    assert id(next(model.parameters())) in moved, "the model's device"
    waiting = {name for name, weight in model.named_parameters() if id(weight) not in moved}
    assert {name for name in waiting if ".layers." not in name or "visual" in name} == set()
    matrices = {
        name for name, weight in model.named_parameters()
        if (name.endswith("proj.weight") and ".layers." in name) or name.endswith("experts.gate_up_proj")
    }  # fmt: skip
    assert matrices and matrices <= waiting


@pytest.mark.parametrize("quantize", ["off", "int8", "fp8"])
def test_such_a_model_is_served_and_quantised_again(quantize: str, tmp_path: Path) -> None:
    coded, _ = write_mxfp4(tmp_path)
    if quantize == "int8":
        pytest.importorskip("bitsandbytes")
    base = TorchBackend(coded, device="cpu", dtype="float32", quantize=quantize).base
    assert base.experts[0].is_quantised == (quantize != "off")


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "compressed-tensors"])
def test_other_formats_are_refused_by_name(method: str, tmp_path: Path) -> None:
    shape = tiny_models.make(tmp_path)
    write_config(Path(shape.path), {"quant_method": method, "bits": 4})
    with pytest.raises(SettingsError, match=f"holds weights in {method} .* fp8 and mxfp4 alone are read; serve the"):
        TorchBackend(shape, device="cpu")
