"""Low-rank products of many adapters in one kernel: as each adapter's own products, and only where the kernel's
contract holds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.properties import examples
from tinsmith.backends.torch import grouped
from tinsmith.backends.torch.adapters import Adapter, Layout, Target
from tinsmith.backends.torch.grouped import grouped_product, is_right_on, offsets_of, suits
from tinsmith.backends.torch.lora import MultiLoRALinear, Switchboard
from tinsmith.backends.torch.lora_ops import Routing, Run, Site, Stretch
from tinsmith.types import LoraSpec

CPU = torch.device("cpu")
INPUTS, OUTPUTS = 32, 40
TARGETS = [Target(name, "attn", INPUTS, OUTPUTS) for name in ("q", "k", "v")]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grouped products here as on a GPU; how many rows each had."""
    calls: list[int] = []

    def counting(x_TI: Tensor, matrices_SIO: Tensor, offsets_S: Tensor) -> Tensor:
        assert int(offsets_S[-1]) == len(x_TI), "no rows are left over"
        assert offsets_S.dtype == torch.int32 and bool((offsets_S.diff() > 0).all()), "no group is empty"
        calls.append(len(x_TI))
        return grouped_product(x_TI, matrices_SIO, offsets_S)

    monkeypatch.setattr(grouped, "is_used_on", lambda device: True)
    monkeypatch.setattr(grouped, "grouped_product", counting)
    return calls


def adapter(rank: int, seed: int, targets: list[Target] = TARGETS, dtype: torch.dtype = torch.bfloat16) -> Adapter:
    layout = Layout.of(rank, targets)
    generator = torch.Generator().manual_seed(seed)
    return Adapter(LoraSpec(rank), layout, torch.randn(layout.numel, generator=generator) * 0.2, dtype)


def went(adapters: list[Adapter | None], sizes: list[int], seed: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What a site of three linears adds to outputs, to the gradient of its rows and to the adapters' gradients."""
    generator = torch.Generator().manual_seed(seed)
    routing = Routing.of(adapters, sizes)
    total = sum(sizes)
    x_TI = torch.randn(total, INPUTS, generator=generator).bfloat16()
    grad_TO = torch.randn(total, 3 * OUTPUTS, generator=generator).bfloat16()
    carriers = list({id(a): a for a in adapters if a is not None}.values())
    buffers = [torch.zeros_like(carrier.flat_P) for carrier in carriers]
    for carrier, buffer in zip(carriers, buffers, strict=True):
        carrier.gradients = carrier.layout.views(buffer)
        carrier.shares.clear()
    site = Site(TARGETS)
    work = site.work(routing)
    y_TO, grad_TI = torch.zeros(total, 3 * OUTPUTS).bfloat16(), torch.zeros(total, INPUTS).bfloat16()
    inner = site.forward_(y_TO, x_TI, work)
    site.backward_(grad_TI, grad_TO, x_TI, work, inner)
    return y_TO, grad_TI, buffers


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-6))


@examples(30)
@given(
    segments=st.lists(st.tuples(st.integers(1, 70), st.integers(-1, 5)), min_size=1, max_size=8),
    rank=st.sampled_from([3, 8, 16]),
    seed=st.integers(0, 999),
)
def test_stretches_add_what_each_segment_adds_alone(segments: list[tuple[int, int]], rank: int, seed: int) -> None:
    owners = [*(adapter(rank, i) for i in range(4)), adapter(8, 7, TARGETS[:2]), adapter(24, 8)]
    adapters = [owners[i] if i >= 0 else None for _, i in segments]
    sizes = [size for size, _ in segments]
    expected = went(adapters, sizes, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "is_used_on", lambda device: True)
        found = went(adapters, sizes, seed)
    for ours, theirs in zip((found[0], found[1], *found[2]), (expected[0], expected[1], *expected[2]), strict=True):
        assert relative(ours, theirs) < 0.02


def test_neighbours_of_one_layout_go_together_and_leave_no_rows_over(forced: list[int]) -> None:
    first, second, third = (adapter(8, seed) for seed in range(3))
    routing = Routing.of([None, first, second, None, third, adapter(16, 4)], [2, 5, 90, 3, 7, 1])
    kinds = [(type(run), run.start, [a.layout.rank for a in run.adapters]) for run in routing.stretches]
    assert kinds == [(Stretch, 2, [8, 8]), (Run, 100, [8]), (Run, 107, [16])]
    went([None, first, second, None, third], [2, 5, 90, 3, 7], 0)
    assert set(forced) == {95}


def test_what_the_kernel_cannot_take_does_not_reach_it(forced: list[int]) -> None:
    odd = [adapter(3, seed) for seed in range(2)]
    found = went([*odd], [9, 20], 1)
    assert not forced, "a rank of 3 is 6 bytes"
    assert all(part.isfinite().all() for part in (*found[:2], *found[2]))
    full = [adapter(8, seed, dtype=torch.float32) for seed in range(2)]
    assert all(isinstance(run, Run) for run in Routing.of(full, [9, 20]).stretches)


def test_what_is_not_finite_stays_with_its_own_rows(forced: list[int]) -> None:
    sound, sick = adapter(8, 1), adapter(8, 2)
    alone = went([sound, None, sound], [20, 3, 31], 5)
    sick.compute_P.fill_(float("nan"))
    y_TO, grad_TI, buffers = went([sound, sick, sound], [20, 3, 31], 5)
    assert forced
    assert y_TO[20:23].isnan().all() and grad_TI[20:23].isnan().any()
    for found, expected in ((y_TO, alone[0]), (grad_TI, alone[1])):
        assert relative(found[:20], expected[:20]) < 0.02 and relative(found[23:], expected[23:]) < 0.02
    assert relative(buffers[0], alone[2][0]) < 0.02


def test_logits_are_not_rounded_on_their_way(forced: list[int]) -> None:
    target = Target("head", "unembed", INPUTS, OUTPUTS)
    adapters = [adapter(8, seed, [target]) for seed in range(2)]
    x_TI = torch.randn(30, INPUTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False).bfloat16().requires_grad_(False)
    module = MultiLoRALinear("head", "unembed", linear, Switchboard())
    work = module.work(Routing.of(list(adapters), [11, 19]))
    assert isinstance(work[0], Stretch)
    logits_TV, _ = module.forward_rows(x_TI, work, torch.float32)
    assert logits_TV.dtype == torch.float32
    for rows, owner in ((slice(0, 11), adapters[0]), (slice(11, 30), adapters[1])):
        a_rI, b_Or = (matrix.double() for matrix in owner.compute["head"])
        x = x_TI[rows].double()
        expected = x @ linear.weight.double().t() + owner.scale * x @ a_rI.t() @ b_Or.t()
        assert relative(logits_TV[rows], expected) < 0.01


def test_the_contract_is_looked_at() -> None:
    x_TI, matrices = torch.zeros(6, 32, dtype=torch.bfloat16), torch.zeros(3, 16, 32, dtype=torch.bfloat16)
    assert suits(x_TI, matrices.mT)
    refused: dict[str, Callable[[], bool]] = {
        "float32": lambda: suits(x_TI.float(), matrices.float().mT),
        "an odd width": lambda: suits(torch.zeros(6, 33, dtype=torch.bfloat16)[:, :32], matrices.mT),
        "an odd beginning": lambda: suits(torch.zeros(6, 48, dtype=torch.bfloat16)[:, 4:36], matrices.mT),
        "rows that lie apart in memory": lambda: suits(torch.zeros(32, 6, dtype=torch.bfloat16).t(), matrices.mT),
        "an odd number of outputs": lambda: suits(x_TI, torch.zeros(3, 13, 32, dtype=torch.bfloat16).mT),
        "too many groups": lambda: suits(x_TI, torch.zeros(1024, 8, 32, dtype=torch.bfloat16).mT),
        "no group": lambda: suits(x_TI, matrices[:0].mT),
    }
    assert [why for why, asked in refused.items() if asked()] == []


def test_a_kernel_that_is_wrong_or_not_there_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_right_on(CPU)
    is_right_on.cache_clear()
    monkeypatch.setattr(grouped, "grouped_product", lambda x, m, ends: grouped_product(x, m, ends) * 1.5)
    assert not is_right_on(CPU)
    is_right_on.cache_clear()

    def refusing(x_TI: Tensor, matrices_SIO: Tensor, offsets_S: Tensor) -> Tensor:
        raise RuntimeError("torch._grouped_mm is only supported on CUDA devices with compute capability = 9.0")

    monkeypatch.setattr(grouped, "grouped_product", refusing)
    assert not is_right_on(CPU)
    is_right_on.cache_clear()
    assert not grouped.is_used_on(CPU), "one by one is as fast"


def test_offsets_are_ends() -> None:
    assert offsets_of([3, 0, 4], CPU).tolist() == [3, 3, 7]
