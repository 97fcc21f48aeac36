"""Prompts: the last layer computes only requested rows, and short prompts attend to themselves exactly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import tiny_models
from support.local_sampling import assert_same, make_adapter, make_prompt, make_sample, run, sample_alone
from support.properties import examples
from tinsmith.backends.torch.adapters import Adapter, initialise_weights, layout_for
from tinsmith.backends.torch.attention import PackedCausal
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.model import BaseModel
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.samplers.local.kv_cache import KVCache, LayerShape
from tinsmith.samplers.local.paged_attention import PagedPlan, SequenceRows
from tinsmith.types import LoraSpec

LENGTHS = [9, 30, 1, 17, 3]
ROW_SELECTIONS = [[59], [8, 38, 39, 56, 59], [0, 1, 2, 40, 41, 50], list(range(60))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["qwen3", "llama", "gemma2"])
def test_requested_rows_equal_those_among_all_rows(tmp_path: Path, arch: str, dtype: str) -> None:
    base = BaseModel.load(tiny_models.make(tmp_path, arch), device="cpu", dtype=dtype)
    adapters = [make_adapter(base, 1), None, make_adapter(base, 2, rank=8), make_adapter(base, 3), None]
    tokens_T = torch.randint(0, tiny_models.VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions_T = torch.cat([torch.arange(n) for n in LENGTHS])
    packed = tokens_T, positions_T, PackedCausal(LENGTHS), LoRABatch.of(adapters, LENGTHS)
    with torch.inference_mode():
        whole_TD = base.hidden(*packed)
        for rows in ROW_SELECTIONS:
            found_nD = base.hidden(*packed, rows)
            error = float((found_nD - whole_TD[rows]).abs().max())
            assert found_nD.shape == (len(rows), whole_TD.shape[1])
            assert error < (1e-4 if dtype == "float32" else 0.1), rows


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=8),
    rows=st.sets(st.integers(0, 71), min_size=1),
)
def test_a_lora_batch_of_some_rows_has_each_one_where_it_was(sizes: list[tuple[int, int]], rows: set[int]) -> None:
    lora_batch = LoRABatch.of([_placeholder(name) for _, name in sizes], [size for size, _ in sizes])
    selected = sorted(row % lora_batch.num_rows for row in rows)
    selected = sorted(set(selected))
    owners = [segment.adapter for segment in lora_batch.segments for _ in range(segment.start, segment.stop)]
    selected_adapters = [
        segment.adapter for segment in lora_batch.select(selected).segments for _ in range(segment.start, segment.stop)
    ]
    assert selected_adapters == [owners[row] for row in selected]


def _placeholder(name: int) -> Adapter | None:
    """A placeholder for an adapter; a LoRA batch only compares identity."""
    return (None, cast(Adapter, "one"), cast(Adapter, "other"))[name]


class Counting:
    """A base model that records the number of requested rows of hidden states."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self.calls: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._base, name)

    def hidden(self, *args: object) -> torch.Tensor:
        found_TD = self._base.hidden(*args)  # pyright: ignore[reportArgumentType]
        self.calls.append((len(args[0]), len(found_TD)))  # pyright: ignore[reportArgumentType]
        return found_TD


def test_of_a_prompt_only_the_last_row_is_asked_for_unless_it_is_scored(tmp_path: Path) -> None:
    base = BaseModel.load(tiny_models.make(tmp_path, "qwen3"), device="cpu", dtype="float32")
    counting = Counting(base)
    versions = {"v": make_adapter(base, 1)}
    sampler = LocalSampler(counting, versions, options=SamplerOptions(max_tokens_per_step=24))  # pyright: ignore[reportArgumentType]
    counting.calls.clear()
    run(sampler, make_sample("long", make_prompt(60), version_id="v"))
    # Two whole pieces without requested rows, the third with its last row, then one row per token.
    assert counting.calls[:4] == [(24, 1), (24, 1), (12, 1), (1, 1)]
    counting.calls.clear()
    short = make_sample("short", make_prompt(20, seed=1))
    scored = make_sample("scored", make_prompt(20, seed=2), version_id="v", prompt_logprobs=True)
    results = run(sampler, short, scored)
    assert counting.calls[0] == (24, 5), "one row of the first, and four of the scored one's"
    for sample in (short, scored):
        assert_same(results[sample.request_id], sample_alone(base, sample, versions))


GROUPED = LayerShape(2, 8, 6, torch.bfloat16)
HEADS = 6


@examples(30)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    equal_lengths=st.booleans(),
    cached=st.booleans(),
    seed=st.integers(0, 99),
)
def test_short_prompts_attend_to_their_own_tokens(
    lengths: list[int], equal_lengths: bool, cached: bool, seed: int
) -> None:
    lengths = [lengths[0]] * len(lengths) if equal_lengths else lengths
    rows = [SequenceRows(0, length, list(range(20 * i + 1, 20 * i + 21))) for i, length in enumerate(lengths)]
    if cached:  # one that continues a prompt, among them
        rows.insert(len(rows) // 2, SequenceRows(4, 10, list(range(200, 210))))
    cache = KVCache({0: GROUPED}, 4, torch.device("cpu"))
    cache.resize(220)
    generator = torch.Generator().manual_seed(seed)
    num = sum(row.stop - row.start for row in rows)
    q, k, v = (torch.randn(num, h, d, generator=generator).bfloat16() for h, d in ((HEADS, 8), (2, 8), (2, 6)))
    found_THD = PagedPlan(cache, rows, torch.device("cpu")).attend(0, q, k, v, scale=0.4).double()
    first = 0
    for row in rows:
        row_slice = slice(first, first := first + row.stop - row.start)
        if row.start:
            continue
        expected = _reference(q[row_slice], k[row_slice], v[row_slice])
        torch.testing.assert_close(found_THD[row_slice], expected, atol=0.03, rtol=0.03)


def _reference(q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
    repeat = q_THD.shape[1] // k_TGD.shape[1]
    k_THD, v_THD = k_TGD.double().repeat_interleave(repeat, 1), v_TGD.double().repeat_interleave(repeat, 1)
    scores_HTT = torch.einsum("thd,shd->hts", q_THD.double(), k_THD) * 0.4
    hidden_TT = torch.ones(len(q_THD), len(q_THD), dtype=torch.bool).triu(1)
    return torch.einsum("hts,shd->thd", scores_HTT.masked_fill(hidden_TT, -torch.inf).softmax(-1), v_THD)


@pytest.mark.parametrize("lengths", [[12, 12, 12], [12, 9, 12]])
def test_a_prompt_of_nans_leaves_its_neighbours_alone(lengths: Sequence[int]) -> None:
    rows = [SequenceRows(0, length, list(range(20 * i + 1, 20 * i + 21))) for i, length in enumerate(lengths)]
    cache = KVCache({0: GROUPED}, 4, torch.device("cpu"))
    cache.resize(64)
    q, k, v = (torch.randn(sum(lengths), h, d).bfloat16() for h, d in ((HEADS, 8), (2, 8), (2, 6)))
    bad = slice(lengths[0], lengths[0] + lengths[1])
    for tensor in (q, k, v):
        tensor[bad] = torch.nan
    found_THD = PagedPlan(cache, rows, torch.device("cpu")).attend(0, q, k, v, scale=0.4)
    assert found_THD[bad].isnan().all()
    assert found_THD[: bad.start].isfinite().all() and found_THD[bad.stop :].isfinite().all()


@pytest.mark.parametrize("groups", [{}, {"attn": False}, {"mlp": False}])
def test_of_many_rows_of_an_adapter_each_linear_adds_its_own(tmp_path: Path, groups: dict[str, bool]) -> None:
    base = BaseModel.load(tiny_models.make(tmp_path, "qwen3"), device="cpu", dtype="bfloat16")
    spec = LoraSpec(rank=4, seed=1, train_attn=groups.get("attn", True), train_mlp=groups.get("mlp", True))
    layout = layout_for(spec, base.adaptable_targets())
    flat_P = initialise_weights(layout, 1, base.device)
    for _, b_Or in layout.views(flat_P).values():
        b_Or.normal_(0, 0.05, generator=torch.Generator().manual_seed(2))
    adapter = Adapter(spec, layout, flat_P, base.dtype)
    lengths = [40, 130, 126, 50]
    tokens_T = torch.randint(0, tiny_models.VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    lora_batch = LoRABatch.of([None, adapter, adapter, None], lengths)
    inputs = tokens_T, positions_T, PackedCausal(lengths), lora_batch
    with torch.inference_mode():
        expected_TD = base.forward_modules(*inputs).float()
        found_TD = base.hidden(*inputs).float()
        plain_TD = base.hidden(*inputs[:3], LoRABatch.of([None], [sum(lengths)])).float()
    adapted_rows = slice(40, 296)
    assert float((found_TD - expected_TD).norm() / expected_TD.norm()) < 0.03
    assert float((plain_TD - expected_TD)[adapted_rows].norm() / expected_TD[adapted_rows].norm()) > 0.1, (
        "the adapter matters"
    )
    assert torch.equal(found_TD[:40], plain_TD[:40]), "others' rows are as they were"
