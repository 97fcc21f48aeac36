"""Decode attention in Triton on the device."""

import pytest
import torch

from gpu.device import ON_CUDA
from unit import test_paged_kernel
from unit.test_paged_kernel import (
    test_a_row_of_nans_leaves_the_others_as_they_are,  # noqa: F401
    test_a_step_reads_pages_where_it_decodes_and_gathers_the_rest,  # noqa: F401
    test_each_row_attends_to_its_own_keys,  # noqa: F401
)


@pytest.mark.skipif(not ON_CUDA, reason="graphs of CUDA")
def test_a_captured_launch_reads_lengths_when_it_is_replayed() -> None:
    q, store, table, keys = test_paged_kernel.paged([40, 700, 3000], torch.bfloat16, (16, 8, 128, 128, 16))
    attend = test_paged_kernel.paged_kernel.paged_attention
    attend(q, store, table, keys, key_dim=128, scale=0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(q, store, table, keys, key_dim=128, scale=0.1)
    for lengths in ([1, 0, 2999], [40, 129, 17]):
        keys.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert torch.equal(output, attend(q, store, table, keys, key_dim=128, scale=0.1))
        assert output.isfinite().all()
