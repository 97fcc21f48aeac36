"""Decode attention in Triton against float64: in Triton's interpreter, and on the device that TEST_DEVICE names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu.device import DEVICE, NAMED, ON_CUDA

if not (NAMED and ON_CUDA):
    from support import interpreted  # noqa: F401 - before the kernels

from tinsmith.backends.torch.attention import AttentionOptions, Window, reference_attention, visibility_mask
from tinsmith.samplers.local import paged_kernel
from tinsmith.samplers.local.kv_cache import KVCache, LayerShape
from tinsmith.samplers.local.paged_attention import PagedPlan, SequenceRows

WHERE = DEVICE if NAMED else "cpu"
LENGTHS = [1, 15, 0, 16, 17, 500]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def paged(
    lengths: list[int], dtype: torch.dtype, sizes: tuple[int, int, int, int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, pages, a table and numbers of keys. Whatever no row sees is NaN, except for the null block."""
    num_heads, num_groups, key_dim, value_dim, block_size = sizes
    rng = np.random.default_rng(0)
    used = [-(-length // block_size) for length in lengths]
    block_ids = rng.permutation(np.arange(1, sum(used) + 9)).tolist()
    store = torch.full((sum(used) + 9, block_size, num_groups, key_dim + value_dim), torch.nan)
    store[0] = 0
    table = np.zeros((len(lengths), max(used) + 2), np.int32)
    for row, length in enumerate(lengths):
        for column in range(used[row]):
            block = table[row, column] = block_ids.pop()
            written = store[block, : length - column * block_size]
            written.copy_(torch.from_numpy(rng.standard_normal(written.shape)))
    q = torch.from_numpy(rng.standard_normal((len(lengths), num_heads, key_dim)))
    keys = torch.tensor(lengths, dtype=torch.int32)
    return q.to(WHERE, dtype), store.to(WHERE, dtype), torch.from_numpy(table).to(WHERE), keys.to(WHERE)


def attend_in_float64(
    q_nHD: Tensor, store_PSGE: Tensor, table_nC: Tensor, lengths: list[int], **options: object
) -> list[Tensor]:
    """In float64, each row alone."""
    outputs = []
    sinks = options.get("sinks_H")
    attention_options = AttentionOptions(**{**options, "sinks_H": None if sinks is None else sinks.double().cpu()})  # pyright: ignore
    for q_HD, blocks_C, length in zip(q_nHD.cpu().double(), table_nC.cpu().long(), lengths, strict=True):
        rows_GKE = store_PSGE.cpu()[blocks_C].flatten(0, 1)[:length].double().transpose(0, 1)
        mask = visibility_mask(torch.tensor([[length - 1]]), length, attention_options.get("window"), torch.float64)
        k, v = rows_GKE[None, ..., : q_HD.shape[1]], rows_GKE[None, ..., q_HD.shape[1] :]
        outputs.append(reference_attention(q_HD[None, :, None], k, v, mask, **attention_options)[0, :, 0])
    return outputs


CASES = [
    ((16, 8, 128, 128, 16), {}),
    ((6, 2, 8, 6, 4), {"window": Window(300)}),
    ((6, 1, 20, 20, 4), {"window": Window(7)}),
    ((6, 2, 16, 8, 4), {"window": Window(280, chunked=True), "softcap": 3.0}),
    ((3, 3, 8, 24, 16), {"softcap": 5.0, "sinks_H": torch.tensor([0.5, -1.0, 4.0])}),
    ((4, 1, 256, 256, 16), {"window": Window(250), "softcap": 30.0}),
]


@pytest.mark.extended
@pytest.mark.parametrize("programs", [1, 80], ids=["whole", "divided"])
@pytest.mark.parametrize(
    ("dtype", "sizes", "options"),
    [
        (torch.float16, *CASES[0]),
        *((dtype, *case) for case in CASES for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_each_row_attends_to_its_own_keys(
    dtype: torch.dtype,
    programs: int,
    sizes: tuple[int, int, int, int, int],
    options: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_kernel, "PROGRAMS", programs)
    q, store, table, keys = paged(LENGTHS, dtype, sizes)
    if isinstance(sinks := options.get("sinks_H"), Tensor):
        options = {**options, "sinks_H": sinks.to(WHERE, dtype)}
    actual = paged_kernel.paged_attention(q, store, table, keys, key_dim=sizes[2], scale=0.3, **options).cpu()  # pyright: ignore
    assert actual.dtype == dtype and actual.shape == (len(LENGTHS), sizes[0], sizes[3])
    assert not actual[2].any(), "padding"
    for row, expected_row in enumerate(attend_in_float64(q, store, table, LENGTHS, scale=0.3, **options)):
        if LENGTHS[row]:
            torch.testing.assert_close(
                actual[row].double(), expected_row, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
            )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_a_row_of_nans_leaves_the_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_kernel, "PROGRAMS", 48)
    lengths = [300, 20, 500, 1]
    q, store, table, keys = paged(lengths, torch.float32, (4, 2, 16, 16, 16))
    clean = paged_kernel.paged_attention(q, store, table, keys, key_dim=16, scale=0.3)
    for at, (row, value) in enumerate([(0, torch.nan), (2, torch.inf)]):
        q[row, at] = torch.nan
        store[table[row, 3].long(), :, :, 16:] = value
    output = paged_kernel.paged_attention(q, store, table, keys, key_dim=16, scale=0.3)
    assert not output[[0, 2]].isfinite().any()
    assert torch.equal(output[[1, 3]], clean[[1, 3]])


@pytest.mark.extended
def test_a_step_reads_pages_where_it_decodes_and_gathers_the_rest() -> None:
    shape, device = LayerShape(2, 16, 8, torch.float32), torch.empty(0, device=WHERE).device
    cache = KVCache({0: shape}, 4, device)
    cache.resize(200)
    cache._stores[shape].copy_(torch.randn(cache._stores[shape].shape))
    block_ids = np.random.default_rng(0).permutation(np.arange(1, 200)).tolist()
    spans = [(0, 3), (9, 10), (4, 9), (30, 31), (0, 1), (1, 2), (62, 63), (5, 30)]
    every = [SequenceRows(start, stop, [block_ids.pop() for _ in range(-(-stop // 4) + 1)]) for start, stop in spans]
    every[5] = every[5]._replace(visible_counts=np.array([2]))
    for rows in (every, every[1:2], every[3:4] + every[6:7], every[2:4], every[:1]):
        num = sum(row.stop - row.start for row in rows)
        q, k, v = (torch.randn(num, heads, dim, device=device) for heads, dim in ((6, 16), (2, 16), (2, 8)))
        results = []
        for kernels in (None, paged_kernel):
            cache.kernels = kernels
            plan = PagedPlan(cache, rows, device)
            results.append(plan.attend(0, q, k, v, scale=0.4, window=Window(20)))
        torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
