"""Gradients of adapters as they gather in a step: what is written first, what is added, and what nobody touches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.properties import examples
from tinsmith.backends.torch import gradients, lora_ops
from tinsmith.backends.torch.adapters import Adapter, Layout, Target, view_of
from tinsmith.backends.torch.gradients import A, B, Gradients, claim, gather_, groups_of
from tinsmith.backends.torch.lora_ops import BATCHED_NUMBERS, Routing, Site
from tinsmith.types import LoraSpec

CPU = torch.device("cpu")


def make(sizes: tuple[int, tuple[int, ...]], rank: int, seed: int, dtype: torch.dtype = torch.float32) -> Adapter:
    """An adapter of random numbers on linears of so many inputs and each of these outputs."""
    layout = Layout.of(rank, [Target(f"x{i}", "mlp", sizes[0], outputs) for i, outputs in enumerate(sizes[1])])
    flat_P = torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed)).mul_(0.1)
    return Adapter(LoraSpec(rank), layout, flat_P, dtype)


def open_gradients(adapter: Adapter) -> Gradients:
    (found,) = Gradients.of([adapter.layout], CPU)
    # Whatever the memory held before.
    found.flat_P.masked_fill_(_inside(adapter.layout), float("nan"))
    return found


def _inside(layout: Layout) -> Tensor:
    """[P] whether a number is a matrix's, not a gap's."""
    mask_P = torch.zeros(layout.numel)
    for pair in layout.views(mask_P).values():
        for matrix in pair:
            matrix.fill_(1.0)
    return mask_P.bool()


def test_what_nobody_wrote_is_zero_and_so_are_gaps() -> None:
    adapter = make((3, (5, 7)), 2, 0)
    assert adapter.layout.has_gaps
    opened = open_gradients(adapter)
    own, is_first = claim(opened, ("x1",), B)
    assert is_first
    own.fill_(1.0)
    flat_P = opened.finish()
    assert float(flat_P.sum()) == own.numel() and torch.equal(adapter.layout.views(flat_P)["x1"][B], own)


def test_the_first_writes_and_the_next_adds() -> None:
    opened = open_gradients(make((3, (5,)), 2, 0))
    for expected in (True, False):
        own, is_first = opened.claim(("x0",), A)
        assert is_first is expected
        own.copy_(torch.ones_like(own)) if is_first else own.add_(1.0)
    assert torch.equal(opened["x0"][A], torch.full((2, 3), 2.0))


def test_matrices_of_which_one_was_written_are_zeros_otherwise() -> None:
    opened = open_gradients(make((16, (16, 16)), 2, 0))
    opened.claim(("x1",), A)[0].fill_(1.0)
    both, is_first = opened.claim(("x0", "x1"), A)
    assert not is_first and both.shape == (4, 16) and not both[:2].any() and bool((both[2:] == 1).all())
    assert torch.equal(torch.cat([opened["x0"][A], opened["x1"][A]]), both)


def test_who_looks_a_pair_up_finds_zeros_and_is_not_the_first() -> None:
    opened = open_gradients(make((3, (5,)), 2, 0))
    assert not opened["x0"][A].any() and not opened["x0"][B].any()
    assert not opened.claim(("x0",), A)[1] and len(opened) == 1 and list(opened) == ["x0"]


def test_gradients_that_began_as_zeros_are_added_to() -> None:
    adapter = make((3, (5,)), 2, 0)
    views = adapter.layout.views(torch.zeros(adapter.layout.numel))
    assert claim(views, ("x0",), B) == (views["x0"][B], False)


def blocks(layout: Layout, count: int, owned: str) -> list[Gradients | None]:
    """`owned` has a letter for each: the place in the block it has, or '-' for none at all."""
    made = Gradients.of([layout] * count, CPU)
    for own in made:
        own.flat_P.masked_fill_(_inside(layout), float("nan"))
    return [None if letter == "-" else made[int(letter)] for letter in owned]


@pytest.mark.parametrize(
    ("owned", "expected"),
    [
        ("0123", [(0, 4)]),
        ("0-12", [(0, 1), (2, 4)]),
        ("01-3", [(0, 2), (3, 4)]),
        ("1023", [(0, 1), (1, 2), (2, 4)]),
        ("----", []),
    ],
)
def test_neighbours_in_a_block_are_gathered_at_once(owned: str, expected: list[tuple[int, int]]) -> None:
    layout = make((16, (16, 16)), 2, 0).layout
    owners = blocks(layout, 4, owned)
    groups = groups_of(owners)
    assert [(rows.start, rows.stop) for rows, _ in groups] == expected
    found = torch.arange(4.0)[:, None, None].expand(4, 4, 16)
    if owners[3] is not None:
        owners[3].claim(("x1",), A)[0].fill_(10.0)  # somebody was here before
    for sofar in (1, 2):
        gather_(groups, ("x0", "x1"), A, found)
        for place, own in enumerate(owners):
            if own is None:
                continue
            matrix = torch.cat([view_of(own.flat_P, own.place((name,), A)) for name in ("x0", "x1")])
            before = torch.zeros(4, 16)
            before[2:] = 10.0 if place == 3 else 0.0
            assert torch.equal(matrix, before + sofar * found[place])
    for own in owners:
        if own is not None:
            assert not own["x0"][B].any(), "zeros until somebody writes"


def test_a_run_that_goes_back_twice_fills_the_gradients_of_each_time() -> None:
    owners = [make((16, (16,)), 2, seed) for seed in range(2)]
    (run,) = Routing.of(owners, [4, 4]).runs
    for _ in range(2):
        made = Gradients.of([owner.layout for owner in owners], CPU)
        for owner, own in zip(owners, made, strict=True):
            owner.gradients = own
        ((rows, found),) = run.groups
        assert (rows.start, rows.stop) == (0, 2) and found[0] is made[0] and found[1] is made[1]


def test_blocks_are_small_and_of_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = make((16, (16,)), 2, 0).layout, make((16, (16,)), 4, 0).layout
    monkeypatch.setattr(gradients, "BLOCK_BYTES", 8 * one.numel)
    made = Gradients.of([one, one, one, two, one], CPU)
    assert [len(own.block_SP) for own in made] == [2, 2, 1, 1, 1] and [own.row for own in made] == [0, 1, 0, 0, 0]
    assert len({own.flat_P.data_ptr() for own in made}) == 5


LARGE = (128, (BATCHED_NUMBERS // 32 + 64, 96))


@examples(12)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([(24, (16, 8, 8)), LARGE]),
    st.integers(0, 2**32 - 1),
)
def test_a_site_adds_and_differentiates_as_plain_products_in_float64(
    parts: list[tuple[int, int]], dtype: torch.dtype, sizes: tuple[int, tuple[int, ...]], seed: int
) -> None:
    """Ragged and equal lengths, two ranks, and every gradient gathered twice: written first, added then."""
    owners = [make(sizes, rank, place, dtype) for place, rank in enumerate((32, 32, 32, 5))]
    site = Site(owners[0].layout.targets)
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(length for length, _ in parts)
    x_TI, grad_TO = (torch.randn(num_rows, size, generator=generator).to(dtype) for size in (sizes[0], sum(sizes[1])))
    for owner, own in zip(owners, Gradients.of([owner.layout for owner in owners], CPU), strict=True):
        own.flat_P.masked_fill_(_inside(owner.layout), float("nan"))
        owner.gradients = own
    y_TO, grad_TI = torch.zeros_like(grad_TO), torch.zeros_like(x_TI)
    for _ in range(2):
        work = site.work(Routing.of([owners[i] for _, i in parts], [length for length, _ in parts]))
        site.backward_(grad_TI, grad_TO, x_TI, work, site.forward_(y_TO, x_TI, work))
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
    found = [y_TO, grad_TI]
    for owner in owners:
        assert isinstance(owner.gradients, Gradients)
        found.append(owner.gradients.finish())
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for one, wanted in zip(found, [expected_TO, expected_TI, *expected_P], strict=True):
        assert bool(one.isfinite().all())
        assert float((one.double() - wanted).norm()) <= tolerance * max(float(wanted.norm()), 1e-6)


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
    owners = [make((24, (16, 8, 8)), rank, place, dtype) for place, rank in enumerate((32, 32, 32, 5))]
    site = Site(owners[0].layout.targets)
    generator = torch.Generator().manual_seed(seed)
    lengths = [2 if equal else length for length, _ in parts]
    x_TI = torch.randn(sum(lengths), 24, generator=generator).to(dtype)
    chosen = [owners[i] if i >= 0 else None for _, i in parts]
    for changed in (False, True):
        if changed:
            owners[0].flat_P.mul_(1.5)
            owners[0].refresh()
        expected_TO = torch.zeros(sum(lengths), 32, dtype=dtype)
        site.reference_(expected_TO, x_TI, Routing.of(chosen, lengths))
        with torch.inference_mode():
            for _ in range(3):
                found_TO = torch.zeros(sum(lengths), 32, dtype=dtype)
                site.forward_(found_TO, x_TI, site.work(Routing.of(chosen, lengths)))
                error = float((found_TO - expected_TO).norm())
                assert error <= (1e-5 if dtype == torch.float32 else 0.02) * max(float(expected_TO.norm()), 1e-6)


def test_a_large_site_is_one_batched_product_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    batched: list[int] = []
    bmm, add_products_ = torch.bmm, lora_ops.add_products_
    monkeypatch.setattr(torch, "bmm", lambda a, b: batched.append(len(a)) or bmm(a, b))
    monkeypatch.setattr(lora_ops, "add_products_", lambda y, a, b: batched.append(len(a)) or add_products_(y, a, b))
    for dtype, expected in ((torch.float32, []), (torch.bfloat16, [2, 2, 2])):
        owners = [make(LARGE, 32, seed, dtype) for seed in range(2)]
        site = Site(owners[0].layout.targets)
        work = site.work(Routing.of(owners, [4, 4]))
        site.forward_(torch.zeros(8, sum(LARGE[1]), dtype=dtype), torch.zeros(8, 128, dtype=dtype), work)
        assert batched == expected
