"""Experts of decode steps, in Triton's interpreter, against the path of training; on a GPU if TEST_DEVICE names one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu.device import DEVICE, NAMED, ON_CUDA

if not (NAMED and ON_CUDA):
    from support import interpreted  # noqa: F401 - before the kernels

from tinsmith.backends.torch import fp8, frozen_weights
from tinsmith.backends.torch.adapters import Adapter, Layout
from tinsmith.backends.torch.expert_decode_kernels import SORTED, sort_pairs
from tinsmith.backends.torch.lora import DeviceLoRABatch, ForwardContext
from tinsmith.backends.torch.lora_batch import LoRABatch, Segment
from tinsmith.backends.torch.moe import MultiLoRAExperts, quantise_experts
from tinsmith.backends.torch.quantization import choose_quantiser
from tinsmith.types import LoraSpec
from unit.test_experts import KINDS, adapter, make_experts

WHERE = DEVICE if NAMED else "cpu"
DTYPE = torch.bfloat16 if NAMED and ON_CUDA else torch.float32
HIDDEN, INNER, EXPERTS, CHOICES = 40, 24, 6, 3


def multiply_groups(x_NC: Tensor, weight_ECO: Tensor, *, offs: Tensor) -> Tensor:
    """What `grouped_mm` computes on a GPU."""
    starts = [0, *offs.tolist()[:-1]]
    parts = [x_NC[a:b] @ w for a, b, w in zip(starts, offs.tolist(), weight_ECO, strict=True)]
    return torch.cat([*parts, x_NC.new_zeros(len(x_NC) - int(offs[-1]), weight_ECO.shape[2])])


def multiply_scaled_groups(
    codes_NC: Tensor, codes_ECK: Tensor, scale_N: Tensor, scale_EK: Tensor, *, offs: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """What `_scaled_grouped_mm` computes on a GPU."""
    assert scale_N.dim() == 1 and scale_EK.dim() == 2 and {codes_NC.dtype, codes_ECK.dtype} == {fp8.E4M3}
    weight_ECK = codes_ECK.float() * scale_EK[:, None]
    return multiply_groups(codes_NC.float() * scale_N[:, None], weight_ECK, offs=offs).to(out_dtype)


@pytest.fixture(autouse=True)
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (NAMED and ON_CUDA):
        monkeypatch.setattr(frozen_weights, "grouped_mm", multiply_groups)
        monkeypatch.setattr(fp8, "_scaled_grouped_mm", multiply_scaled_groups)


def build_experts(kind: str, monkeypatch: pytest.MonkeyPatch, quantize: str = "off") -> MultiLoRAExperts:
    for name, value in (("HIDDEN", HIDDEN), ("INNER", INNER), ("EXPERTS", EXPERTS)):
        monkeypatch.setattr(f"unit.test_experts.{name}", value)
    _, module = make_experts(kind, DTYPE)
    quantise = choose_quantiser(quantize, torch.device(WHERE))
    codes = () if quantise is None else quantise_experts(module.to(WHERE), quantise)
    return MultiLoRAExperts("mlp.experts", module.to(WHERE), ForwardContext(), codes)


def build_adapter(experts: MultiLoRAExperts, seed: int, rank: int, names: slice = slice(None)) -> Adapter:
    trained = adapter(experts, seed, rank)
    layout = Layout.of(rank, experts.targets[names])
    flat_P = torch.zeros(layout.numel)
    for name, (a, b) in layout.views(flat_P).items():
        a.copy_(trained.weights[name][0])
        b.copy_(trained.weights[name][1])
    return Adapter(LoraSpec(rank, alpha=7.0 + seed), layout, flat_P.to(WHERE), DTYPE)


def draw_rows(num: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    index_nk = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(num)])
    hidden_nD = torch.randn(num, HIDDEN, generator=generator).to(DTYPE)
    weights_nk = torch.rand(num, CHOICES, generator=generator).to(DTYPE)
    return hidden_nD.to(WHERE), index_nk.to(WHERE), weights_nk.to(WHERE)


def captured(adapters: list[Adapter | None]) -> DeviceLoRABatch:
    """The batch as a graph's, which has tables alone."""
    tables = DeviceLoRABatch.of(adapters, [1] * len(adapters)).tables(torch.device(WHERE))
    return DeviceLoRABatch([Segment(0, len(adapters), None)], tables=tables)


@pytest.mark.parametrize(("num", "experts", "choices"), [(1, 4, 2), (SORTED, 7, 1), (53, 130, 8)])
def test_pairs_are_sorted_by_expert_and_stay_in_order(num: int, experts: int, choices: int) -> None:
    index_nk = torch.randint(experts, (num, choices), generator=torch.Generator().manual_seed(num)).to(WHERE)
    pairs = sort_pairs(index_nk, experts)
    expected_N = index_nk.flatten().argsort(stable=True)
    assert torch.equal(pairs.pair_N, expected_N)
    assert torch.equal(pairs.sorted_N[pairs.pair_N], torch.arange(num * choices, device=WHERE))
    assert torch.equal(pairs.ends_E.long(), torch.bincount(index_nk.flatten(), minlength=experts).cumsum(0))


@pytest.mark.matrix(2)
@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [(), (8, 3), *(pytest.param(x, marks=pytest.mark.extended) for x in ((8,), (8, 8)))])
def test_rows_are_what_training_computes(kind: str, ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of one or two layouts, rows without one, and an adapter without the inner projection."""
    check_rows(build_experts(kind, monkeypatch), ranks)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantize", ["int8", "nf4", "fp8"])
def test_rows_of_quantised_experts_are_what_training_computes(
    kind: str, quantize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quantize != "fp8":
        pytest.importorskip("bitsandbytes")
    if quantize == "fp8" and NAMED and ON_CUDA:
        monkeypatch.setitem(globals(), "INNER", 32)  # the kernel takes multiples of 16
        monkeypatch.setitem(globals(), "HIDDEN", 48)
    check_rows(build_experts(kind, monkeypatch, quantize), (8, 3), bound=0.1 if quantize == "fp8" else 0.0)


def check_rows(experts: MultiLoRAExperts, ranks: tuple[int, ...], bound: float = 0.0) -> None:
    trained: list[Adapter | None] = [build_adapter(experts, seed, rank) for seed, rank in enumerate(ranks)]
    if ranks:
        trained.append(build_adapter(experts, 9, 4, slice(0, 2)))
    adapters = [owner for owner, count in zip([None, *trained], (2, 17, 1, 3), strict=False) for _ in range(count)]
    inputs = draw_rows(len(adapters), len(ranks))
    expected = experts.forward_experts(*inputs, LoRABatch.of(adapters, [1] * len(adapters)))
    actual = experts.forward_captured(*inputs, captured(adapters))
    assert actual.dtype == expected.dtype
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    assert error < max(bound, 1e-5 if torch.float32 == DTYPE else 2e-2)


@torch.inference_mode()
def test_an_adapter_that_is_not_finite_stays_with_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = build_experts("concatenated", monkeypatch)
    sick, sound = build_adapter(experts, 1, 8), build_adapter(experts, 2, 8)
    sick.compute_P.fill_(float("nan"))
    adapters: list[Adapter | None] = [None, sick, sick, sound, sound]
    is_finite = experts.forward_captured(*draw_rows(5, 3), captured(adapters)).isfinite().all(1)
    assert is_finite.tolist() == [True, False, False, True, True]
