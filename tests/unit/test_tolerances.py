"""A tolerance is wider than rounding and narrower than a fault."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support import vision_models
from support.families import FAMILIES, Family, make
from support.tolerances import rounding, rounding_of_model
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.plan.architecture import read_config
from tinsmith.types import LoraSpec, PassResult
from unit.test_families import batch, train

MODELS = [family for family in FAMILIES if family.model_type in ("llama", "qwen3", "qwen3_moe", "qwen3_5")]


def logprobs(backend: TorchBackend) -> np.ndarray:
    (result,) = run_to_end(backend.run_passes([batch("m", 7, forward_only=True)]))
    assert isinstance(result, PassResult)
    return np.concatenate(result.logprobs)


@pytest.mark.parametrize("family", MODELS, ids=lambda family: family.model_type)
@pytest.mark.parametrize("fault", ["an adapter's scale", "a norm's epsilon"])
def test_a_fault_of_a_thousandth_is_seen(family: Family, fault: str, tmp_path: Path) -> None:
    backend = TorchBackend(make(tmp_path, family), device="cpu")
    backend.create_model("m", LoraSpec(3, seed=1))
    for _ in range(3):
        train(backend, "m")
    config = backend.base.model.config
    tolerance = rounding_of_model(config)
    right = logprobs(backend)
    if fault == "an adapter's scale":
        backend._models["m"].adapter.flat_P.mul_(1.001**0.5)
    else:
        for module in backend.base.model.modules():
            if type(module).__name__.endswith("RMSNorm") and isinstance(module.weight, torch.nn.Parameter):
                module.weight.data.mul_(1.001)
    assert np.abs(logprobs(backend) - right).max() > tolerance


def test_a_longer_sum_and_a_deeper_model_round_more() -> None:
    eps = torch.finfo(torch.float32).eps
    assert rounding(torch.float32, sums=1, length=64) == 4 * eps * 8
    assert rounding(torch.bfloat16, sums=2, length=64, scale=3) == 6 * 4 * torch.finfo(torch.bfloat16).eps * 8
    text = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24}
    assert rounding_of_model(text) == rounding(torch.float32, sums=22, length=64)
    assert rounding_of_model({"text_config": text, "vision_config": vision}) == rounding(
        torch.float32, sums=36, length=64
    )


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5"])
def test_the_tolerance_of_a_model_with_images_comes_from_its_files(model_type: str, tmp_path: Path) -> None:
    shape = vision_models.make(tmp_path, model_type)
    config = read_config(Path(shape.path) / "config.json")
    assert 2e-5 < rounding_of_model(config) < 2e-4
