"""Adapters' contributions to linears with the same input, and their gradients, against plain products in float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import lora_reference
from support.properties import examples
from tinsmith.backends.torch import lora, lora_batch
from tinsmith.backends.torch.adapters import Adapter, AdapterStack, Layout, Target
from tinsmith.backends.torch.lora import BATCHED_MAX_ELEMENTS, LoRADelta
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.types import LoraSpec


def make(sizes: tuple[int, tuple[int, ...]], rank: int, seed: int, dtype: torch.dtype = torch.float32) -> Adapter:
    """A random adapter on linears with this number of inputs and each of these numbers of outputs."""
    layout = Layout.of(rank, [Target(f"x{i}", "mlp", sizes[0], outputs) for i, outputs in enumerate(sizes[1])])
    flat_P = torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed)).mul_(0.1)
    return Adapter(LoraSpec(rank), layout, flat_P, dtype)


LARGE = (128, (BATCHED_MAX_ELEMENTS // 32 + 64, 96))


@examples(12)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([(24, (16, 8, 8)), LARGE]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_a_site_adds_and_differentiates_as_plain_products_in_float64(
    parts: list[tuple[int, int]], dtype: torch.dtype, sizes: tuple[int, tuple[int, ...]], fewest: bool, seed: int
) -> None:
    """Ragged and equal lengths, two ranks, and every gradient added twice. `fewest`: as on CUDA."""
    owners = [make(sizes, rank, index, dtype) for index, rank in enumerate((32, 32, 32, 5))]
    delta = LoRADelta(owners[0].layout.targets)
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(length for length, _ in parts)
    x_TI, grad_TO = (torch.randn(num_rows, size, generator=generator).to(dtype) for size in (sizes[0], sum(sizes[1])))
    stack = AdapterStack(owners[:3]) if fewest else None
    gradients = [owner.open_gradients() for owner in owners[3 if fewest else 0 :]]
    y_TO, grad_TI = torch.zeros_like(grad_TO), torch.zeros_like(x_TI)
    for _ in range(2):
        runs = delta.groups(LoRABatch.of([owners[i] for _, i in parts], [length for length, _ in parts]))
        with mock.patch.object(lora, "is_launch_bound", lambda _: fewest):
            delta.backward_(grad_TI, grad_TO, x_TI, runs, delta.forward_(y_TO, x_TI, runs))
    expected_TO, expected_TI = torch.zeros_like(y_TO).double(), torch.zeros_like(x_TI).double()
    expected_P = [torch.zeros(owner.layout.numel, dtype=torch.float64) for owner in owners]
    start = 0
    for length, i in parts:
        rows, owner, output = slice(start, start + length), owners[i], 0
        start += length
        for name, (a_rI, b_Or) in owner.compute.items():
            columns = slice(output, output + len(b_Or))
            output += len(b_Or)
            a, b, x, grad = a_rI.double(), b_Or.double(), x_TI[rows].double(), grad_TO[rows, columns].double()
            expected_TO[rows, columns] += 2 * owner.scale * x @ a.t() @ b.t()
            expected_TI[rows] += 2 * owner.scale * grad @ b @ a
            own_a, own_b = owner.layout.views(expected_P[i])[name]
            own_a += 2 * owner.scale * (grad @ b).t() @ x
            own_b += 2 * owner.scale * grad.t() @ (x @ a.t())
    for owner in owners:
        owner.close_gradients()
    gradients = gradients if stack is None else [*stack.take_gradients(), *gradients]
    actual_tensors = [y_TO, grad_TI, *gradients]
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for actual, reference in zip(actual_tensors, [expected_TO, expected_TI, *expected_P], strict=True):
        assert bool(actual.isfinite().all())
        assert float((actual.double() - reference).norm()) <= tolerance * max(float(reference.norm()), 1e-6)


@examples(20)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(-1, 3)), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_a_site_adds_what_the_reference_adds_also_where_sampling_keeps_stacks(
    parts: list[tuple[int, int]], dtype: torch.dtype, equal: bool, seed: int
) -> None:
    owners = [make((24, (16, 8, 8)), rank, index, dtype) for index, rank in enumerate((32, 32, 32, 5))]
    delta = LoRADelta(owners[0].layout.targets)
    generator = torch.Generator().manual_seed(seed)
    lengths = [2 if equal else length for length, _ in parts]
    x_TI = torch.randn(sum(lengths), 24, generator=generator).to(dtype)
    chosen = [owners[i] if i >= 0 else None for _, i in parts]
    for changed in (False, True):
        if changed:
            owners[0].flat_P.mul_(1.5)
            owners[0].refresh()
        expected_TO = torch.zeros(sum(lengths), 32, dtype=dtype)
        lora_reference.add_deltas_(delta, expected_TO, x_TI, LoRABatch.of(chosen, lengths))
        with torch.inference_mode():
            for _ in range(3):
                found_TO = torch.zeros(sum(lengths), 32, dtype=dtype)
                delta.forward_(found_TO, x_TI, delta.groups(LoRABatch.of(chosen, lengths)))
                error = float((found_TO - expected_TO).norm())
                assert error <= (1e-5 if dtype == torch.float32 else 0.02) * max(float(expected_TO.norm()), 1e-6)


def test_a_large_site_is_one_batched_product_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    batched: list[int] = []
    bmm, add_products_ = torch.bmm, lora_batch.add_bmm_
    monkeypatch.setattr(torch, "bmm", lambda a, b: batched.append(len(a)) or bmm(a, b))
    monkeypatch.setattr(lora_batch, "add_bmm_", lambda y, a, b: batched.append(len(a)) or add_products_(y, a, b))
    for dtype, expected in ((torch.float32, []), (torch.bfloat16, [2, 2, 2])):
        owners = [make(LARGE, 32, seed, dtype) for seed in range(2)]
        delta = LoRADelta(owners[0].layout.targets)
        runs = delta.groups(LoRABatch.of(owners, [4, 4]))
        delta.forward_(torch.zeros(8, sum(LARGE[1]), dtype=dtype), torch.zeros(8, 128, dtype=dtype), runs)
        assert batched == expected
