"""The kernels that only a GPU has, each against the portable path that stands in for it elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu.device import DEVICE, device, only_cuda
from support import tiny_models
from support.local_sampling import make_prompt, make_sample
from tinsmith.backends.torch import TorchBackend, varlen
from tinsmith.backends.torch.attention import PackedCausal
from tinsmith.backends.torch.quantization import QuantisedLinear
from tinsmith.types import ModelShape


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().float() - expected.detach().float()).norm() / expected.detach().float().norm())


@only_cuda
def test_the_kernels_are_right_here() -> None:
    capability = torch.cuda.get_device_capability(device())
    if capability >= varlen.LEAST_CAPABILITY:
        assert varlen.is_right_on(device())


@only_cuda
@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("seed", range(3))
def test_packed_attention_is_what_padded_batches_compute(
    window: int | None, head_dim: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not varlen.is_right_on(device()):
        pytest.skip("not to be had here")
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(1, 300, 7)]
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (
        torch.randn(sum(lengths), heads, head_dim, generator=generator).to(DEVICE, torch.bfloat16)
        for heads in (8, 2, 2, 8)
    )
    sick = slice(lengths[0], lengths[0] + lengths[1])
    found = []
    for packed in (True, False):
        monkeypatch.setattr(varlen, "_is_fit", lambda where, packed=packed: packed)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = PackedCausal(lengths, device()).attend(0, *leaves, scale=0.2, window=window)
        out.backward(grad)
        found.append([out, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None and theirs is not None and relative(ours, theirs) < 0.02
    # The second sequence is not finite: nobody else notices.
    monkeypatch.setattr(varlen, "_is_fit", lambda where: True)
    leaves = [x.clone() for x in (q, k, v)]
    for leaf in leaves:
        leaf[sick] = float("nan")
        leaf.requires_grad_()
    out = PackedCausal(lengths, device()).attend(0, *leaves, scale=0.2, window=window)
    out.backward(grad)
    others = torch.ones(len(q), dtype=torch.bool, device=DEVICE)
    others[sick] = False
    for ours, healthy in zip([out, *(leaf.grad for leaf in leaves)], found[0], strict=True):
        assert ours is not None and healthy is not None
        assert relative(ours[others], healthy[others]) < 0.01


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_are_the_hosts_and_sampling_works_over_them(shape: ModelShape, kind: str, dtype: str) -> None:
    pytest.importorskip("bitsandbytes")
    host, there = (TorchBackend(shape, device=where, dtype=dtype, quantize=kind) for where in ("cpu", DEVICE))
    for name, linear in there.base.targets.items():
        if isinstance(linear, QuantisedLinear):
            assert linear.weight.device == device()
            found, expected = linear.weight.cpu(), host.base.targets[name].weight
            # Codes may differ where a number lies between two of them.
            assert relative(found, expected) < (1e-6 if kind == "int8" else 0.01), name
    from support.local_sampling import HOT, run

    answer = run(there.sampler, make_sample("s", make_prompt(12), HOT))["s"]
    assert len(answer.sequences[0].tokens_T) == HOT.max_tokens
