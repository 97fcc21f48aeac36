"""Quantised base models on the device have the host's codes, and sampling works with them."""

from __future__ import annotations

import pytest
from torch import Tensor

from gpu.device import DEVICE, device
from support import tiny_models
from support.local_sampling import make_prompt, make_sample
from tinsmith.backends.torch import TorchBackend
from tinsmith.types import ModelShape


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().float() - expected.detach().float()).norm() / expected.detach().float().norm())


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def shape(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_are_the_hosts_and_sampling_works_over_them(shape: ModelShape, kind: str, dtype: str) -> None:
    pytest.importorskip("bitsandbytes")
    cpu, gpu = (
        TorchBackend(shape, device=backend_device, dtype=dtype, quantize=kind) for backend_device in ("cpu", DEVICE)
    )
    for name, linear in gpu.base.targets.items():
        if linear.codes is not None:
            assert linear.weight.device == device()
            actual, expected = linear.weight.cpu(), cpu.base.targets[name].weight
            # Codes may differ for numbers halfway between two codes.
            assert relative(actual, expected) < (1e-6 if kind == "int8" else 0.01), name
    for there, here in zip(gpu.base.experts, cpu.base.experts, strict=True):
        for codes, expected_codes in zip(there.list_codes(), here.list_codes(), strict=True):
            actual_EOI, expected_EOI = codes.weights(), expected_codes.weights()
            assert actual_EOI.device == device()
            assert relative(actual_EOI.cpu(), expected_EOI) < (1e-6 if kind == "int8" else 0.01)
    assert {tensor.device for tensor in gpu.base.frozen_tensors()} == {device()}
    from support.local_sampling import HOT, run

    answer = run(gpu.sampler, make_sample("s", make_prompt(12), HOT))["s"]
    assert len(answer.sequences[0].tokens_T) == HOT.max_tokens
