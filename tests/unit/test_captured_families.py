"""Which families' decode steps a CUDA graph can hold: a step is launched on a simulated device that refuses waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from support import families
from support.fake_cuda import DEVICE, FakeCudaBackend, FakeDevice, fake_cuda
from support.families import Family
from tinsmith.backends.torch import expert_decode_kernels
from tinsmith.samplers.local.decode_graphs import MIN_TABLE_WIDTH, DecodeGraphs, _Key

ROWS = 4
UNCAPTURED = {
    # transformers computes its frequencies on the host in every forward, and copies them from memory that moves.
    "Phi-3.5-MoE": "a copy that waits",
}
"""The others run without a graph, for the reason that the error gives."""

SIZES = {"Nemotron-H with experts": {"moe_latent_size": 24}}
"""Of families whose small experts the grouped kernel would not take."""


@pytest.fixture(autouse=True)
def sort_pairs() -> Iterator[None]:
    """A kernel cannot be launched with fake tensors."""

    def sort(index_nk: Tensor, num_experts: int) -> expert_decode_kernels.SortedPairs:
        pair_N = torch.empty_like(index_nk.reshape(-1), dtype=torch.int64)
        ends_E = torch.empty(num_experts, dtype=torch.int32, device=index_nk.device)
        return expert_decode_kernels.SortedPairs(index_nk, pair_N, torch.empty_like(pair_N), ends_E)

    with mock.patch.object(expert_decode_kernels, "sort_pairs", sort):
        yield


def launch_step(device: FakeDevice, backend: FakeCudaBackend) -> Tensor:
    """[n, D]: what a graph of rows without adapters would hold."""
    sampler = backend.sampler
    assert backend.base.can_capture, backend.kernels()
    graphs = DecodeGraphs(backend.base, sampler._cache, sampler._states)
    key = _Key(ROWS, MIN_TABLE_WIDTH, ())
    step = graphs._make_step(key, ())
    device.strict, device.reads = True, 0
    with torch.inference_mode():
        hidden_nD = graphs._forward(key, step)
    assert device.reads == 0, "a value was read"
    return hidden_nD


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.title, marks=() if family.core else pytest.mark.extended)
        for family in families.FAMILIES
    ],
)
def test_a_graph_can_hold_a_familys_decode_steps(family: Family, tmp_path: Path) -> None:
    sized = replace(family, config={**family.config, **SIZES.get(family.title, {})})
    shape = families.make(tmp_path, sized)
    with fake_cuda() as device:
        backend = FakeCudaBackend(shape)
        if (reason := UNCAPTURED.get(family.title)) is not None:
            with pytest.raises((RuntimeError, AssertionError), match=reason):
                launch_step(device, backend)
            return
        hidden_nD = launch_step(device, backend)
        assert hidden_nD.shape[0] == ROWS and hidden_nD.device == DEVICE
