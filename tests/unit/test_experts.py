"""Adapters on a mixture's experts, against a loop over rows in float64 that shares no code with them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from support import interpreted  # noqa: F401 - before the kernels
from support.properties import examples
from tinsmith.backends.torch import expert_pairs, moe, optim, recompute
from tinsmith.backends.torch.adapters import Adapter, ExpertStack, Layout, Target, TrainedModel
from tinsmith.backends.torch.lora import ForwardContext
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.moe import MultiLoRAExperts
from tinsmith.errors import SettingsError
from tinsmith.types import DimuonParams, LoraSpec

HIDDEN, INNER, EXPERTS, CHOICES = 6, 5, 4, 2
LIMIT, ALPHA = 7.0, 1.702  # of GptOssConfig
KINDS = ("concatenated", "interleaved")


class Rows(NamedTuple):
    hidden_TD: Tensor
    index_Tk: Tensor
    weights_Tk: Tensor


def make_experts(kind: str, dtype: torch.dtype = torch.float32) -> tuple[MultiLoRAExperts, nn.Module]:
    """Our module, and that of transformers that it replaces."""
    torch.manual_seed(0)
    if kind == "concatenated":
        config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
        config._experts_implementation = "eager"
        module = Qwen3MoeExperts(config)
    else:
        config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS)
        config._experts_implementation = "eager"
        module = GptOssExperts(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0, 0.5)
    module = module.to(dtype).requires_grad_(False)
    return MultiLoRAExperts("mlp.experts", module, ForwardContext()), module


def adapter(experts: MultiLoRAExperts, seed: int, rank: int, dtype: torch.dtype = torch.float32) -> Adapter:
    layout = Layout.of(rank, experts.targets)
    flat_P = torch.zeros(layout.numel)
    generator = torch.Generator().manual_seed(seed)
    for pair in layout.views(flat_P).values():
        for matrix in pair:
            matrix.normal_(0, 0.1, generator=generator)
    return Adapter(LoraSpec(rank), layout, flat_P, dtype)


def rows(num: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    index_Tk = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(num)])
    return Rows(torch.randn(num, HIDDEN, generator=generator), index_Tk, torch.rand(num, CHOICES, generator=generator))


def call(experts: MultiLoRAExperts, lora_batch: LoRABatch, inputs: Rows) -> Tensor:
    experts._context.lora_batch = lora_batch
    try:
        return experts(*inputs)
    finally:
        experts._context.lora_batch = None


Leaves = dict[int, dict[str, tuple[Tensor, Tensor]]]


def leaves_of(adapters: list[Adapter]) -> Leaves:
    return {
        id(a): {name: (x.double().requires_grad_(), y.double().requires_grad_()) for name, (x, y) in a.weights.items()}
        for a in adapters
    }


def oracle(module: nn.Module, kind: str, lora_batch: LoRABatch, inputs: Rows, leaves: Leaves) -> Tensor:
    """Row by row, choice by choice, with plain products in float64."""
    interleaved = kind == "interleaved"
    weights = {name: p.double() for name, p in module.named_parameters()}
    owners = [segment.adapter for segment in lora_batch.segments for _ in range(segment.stop - segment.start)]
    out = []
    for t, owner in enumerate(owners):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for j in range(CHOICES):
            e, x = int(inputs.index_Tk[t, j]), inputs.hidden_TD[t]
            gate_up, down = (weights[n][e].t() if interleaved else weights[n][e] for n in ("gate_up_proj", "down_proj"))
            y = gate_up @ x
            if interleaved:
                y = y + weights["gate_up_proj_bias"][e]
            gate, up = (y[::2], y[1::2]) if interleaved else (y[:INNER], y[INNER:])
            if owner is not None:
                (a1, b1), (a3, b3) = (leaves[id(owner)][f"mlp.experts.{n}"] for n in ("w1", "w3"))
                gate = gate + owner.scale * b1[e] @ (a1[0] @ x)
                up = up + owner.scale * b3[e] @ (a3[0] @ x)
            if interleaved:
                gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
                inner = (up + 1) * gate * torch.sigmoid(gate * ALPHA)
            else:
                inner = nn.functional.silu(gate) * up
            y = down @ inner
            if interleaved:
                y = y + weights["down_proj_bias"][e]
            if owner is not None:
                a2, b2 = leaves[id(owner)]["mlp.experts.w2"]
                y = y + owner.scale * b2[0] @ (a2[e] @ inner)
            total = total + inputs.weights_Tk[t, j] * y
        out.append(total)
    return torch.stack(out)


@examples(20)
@given(
    kind=st.sampled_from(KINDS),
    parts=st.lists(st.tuples(st.integers(1, 18), st.integers(-1, 2)), min_size=1, max_size=4),
    trained=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_results_and_gradients_are_those_of_a_loop_in_float64(
    kind: str, parts: list[tuple[int, int]], trained: bool, seed: int
) -> None:
    experts, module = make_experts(kind)
    adapters = [adapter(experts, seed + i, rank) for i, rank in enumerate((1, 3, 4))]
    lora_batch = LoRABatch.of([adapters[i] if i >= 0 else None for _, i in parts], [n for n, _ in parts])
    inputs = rows(lora_batch.num_rows, seed)
    hidden, index, weights = (inputs.hidden_TD.requires_grad_(), inputs.index_Tk, inputs.weights_Tk.requires_grad_())
    buffers = [a.open_gradients() if trained else torch.zeros_like(a.flat_P) for a in adapters]
    output = call(experts, lora_batch, inputs)
    leaves = leaves_of(adapters)
    exact = Rows(hidden.detach().double().requires_grad_(), index, weights.detach().double().requires_grad_())
    expected = oracle(module, kind, lora_batch, exact, leaves)
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-4)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed))
    output.backward(grad)
    expected.backward(grad.double())
    pairs = [(hidden.grad, exact.hidden_TD.grad), (weights.grad, exact.weights_Tk.grad)]
    for a, buffer in zip(adapters, buffers, strict=True):
        a.close_gradients()
        for name, views in a.layout.views(buffer).items():
            for view, leaf in zip(views, leaves[id(a)][name], strict=True):
                leaf_grad = leaf.grad if trained and leaf.grad is not None else torch.zeros_like(leaf)
                pairs.append((view, leaf_grad))
    for actual, reference in pairs:
        assert actual is not None and reference is not None
        torch.testing.assert_close(actual.double(), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_without_adapters_rows_get_what_the_module_gives(kind: str) -> None:
    experts, module = make_experts(kind)
    inputs = rows(17)
    expected = module(*inputs)
    assert torch.equal(experts(*inputs), expected)
    torch.testing.assert_close(call(experts, LoRABatch.of([None], [17]), inputs), expected)
    assert {name for name, _ in experts.named_parameters()} == {name for name, _ in module.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_values_stay_in_their_rows(kind: str) -> None:
    experts, _ = make_experts(kind)
    broken, sound = adapter(experts, 1, 4), adapter(experts, 2, 4)
    lora_batch, inputs = LoRABatch.of([sound, broken, None, sound], [9, 8, 3, 20]), rows(40)
    sound_output = call(experts, lora_batch, inputs)
    broken.flat_P.fill_(float("nan"))
    inputs.hidden_TD[9:17] = float("inf")
    buffers = [a.open_gradients() for a in (sound, broken)]
    output = call(experts, lora_batch, inputs._replace(hidden_TD=inputs.hidden_TD.requires_grad_()))
    output.backward(torch.ones_like(output))
    assert output[9:17].isnan().all()
    sound_rows = torch.ones(40, dtype=torch.bool)
    sound_rows[9:17] = False
    assert torch.equal(output[sound_rows], sound_output[sound_rows])
    assert inputs.hidden_TD.grad is not None and inputs.hidden_TD.grad[sound_rows].isfinite().all()
    for a in (sound, broken):
        a.close_gradients()
    assert buffers[0].isfinite().all() and buffers[0].any() and buffers[1].isnan().any()


def test_an_adapter_without_experts_leaves_them_alone() -> None:
    experts, module = make_experts("concatenated")
    other = adapter(experts, 1, 4)
    other.compute = {}
    inputs = rows(11)
    torch.testing.assert_close(call(experts, LoRABatch.of([other], [11]), inputs), module(*inputs))
    assert not call(experts, LoRABatch.of([other], [11]), inputs).requires_grad


def test_rows_that_ask_for_no_gradient_still_train_the_experts() -> None:
    experts, _ = make_experts("concatenated")
    first = adapter(experts, 1, 4)
    buffer = first.open_gradients()
    call(experts, LoRABatch.of([first], [11]), rows(11)).sum().backward()
    first.close_gradients()
    assert all(view.any() for pair in first.layout.views(buffer).values() for view in pair)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_near(kind: str) -> None:
    exact, half = make_experts(kind)[0], make_experts(kind, torch.bfloat16)[0]
    inputs, lora_batch = rows(50), LoRABatch.of([adapter(exact, 1, 4)], [50])
    expected = call(exact, lora_batch, inputs)
    low = Rows(inputs.hidden_TD.bfloat16(), inputs.index_Tk, inputs.weights_Tk)
    actual = call(half, LoRABatch.of([adapter(half, 1, 4, torch.bfloat16)], [50]), low)
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in Triton's interpreter
@examples(6)
@given(
    kind=st.sampled_from(KINDS),
    parts=st.lists(st.tuples(st.integers(1, 12), st.integers(-1, 2)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_grouped_products_equal_the_float64_loop_without_host_reads(
    kind: str, parts: list[tuple[int, int]], seed: int
) -> None:
    """On a CPU torch goes through the groups one by one, behind the same checks of strides, and Triton interprets."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("HIDDEN", 16), ("INNER", 8)):
            patch.setitem(globals(), name, value)
        patch.setattr(moe, "has_grouped_mm", lambda device: True)
        patch.setattr(expert_pairs, "read", None)
        experts, module = make_experts(kind, torch.bfloat16)
        adapters = [adapter(experts, seed + i, rank, torch.bfloat16) for i, rank in enumerate((3, 8, 24))]
        lora_batch = LoRABatch.of([adapters[i] if i >= 0 else None for _, i in parts], [n for n, _ in parts])
        inputs = rows(lora_batch.num_rows, seed)
        # Small, so that rounding moves no value over the limit, where its gradient ends.
        hidden, weights = (inputs.hidden_TD / 2).bfloat16().requires_grad_(), inputs.weights_Tk.requires_grad_()
        buffers = [a.open_gradients() for a in adapters]
        output = call(experts, lora_batch, Rows(hidden, inputs.index_Tk, weights))
        leaves = leaves_of(adapters)
        exact = Rows(
            hidden.detach().double().requires_grad_(), inputs.index_Tk, weights.detach().double().requires_grad_()
        )
        expected = oracle(module, kind, lora_batch, exact, leaves)
        grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        output.backward(grad)
        expected.backward(grad.double())
        pairs = [(output, expected), (hidden.grad, exact.hidden_TD.grad)]
        for i in {i for _, i in parts if i >= 0}:
            adapters[i].close_gradients()
            pairs += [
                (view, leaf.grad)
                for name, views in adapters[i].layout.views(buffers[i]).items()
                for view, leaf in zip(views, leaves[id(adapters[i])][name], strict=True)
            ]
        for actual, reference in pairs:
            assert actual is not None and reference is not None
            assert (actual - reference).norm() < 0.04 * reference.norm()
        # A weight's gradient is a product of two vectors, of which most may cancel out.
        assert weights.grad is not None and exact.weights_Tk.grad is not None
        largest = (expected.norm(dim=1) * grad.double().norm(dim=1)).norm()
        reference = exact.weights_Tk.grad
        assert (weights.grad - reference).norm() < 0.04 * (reference.norm() + largest)


def test_memory_for_experts_counts_where_activations_may_be_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, _ = make_experts("concatenated")
    context = experts._context
    choice = recompute.Recompute("auto", context)
    choice.wrap(nn.ModuleList([experts]))
    call(experts, LoRABatch.of([None], [3]), rows(3))
    needed_bytes = 100 * recompute.SAVED_PER_LINEAR * CHOICES * (2 * HIDDEN + 3 * INNER) * 4
    for free, expected in ((1.01 * needed_bytes / recompute.RECOMPUTE_SHARE[False], False), (needed_bytes, True)):
        monkeypatch.setattr(recompute, "_free_bytes", lambda device, free=free: free)
        choice.decide(100, torch.device("cpu"))
        assert choice.active == expected


def test_fused_experts_keep_the_outputs_of_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultiLoRAExperts, "_is_grouped", lambda self, adapters: True)
    experts, context = [make_experts("concatenated", torch.bfloat16)[0] for _ in range(3)], ForwardContext()
    for module in experts:
        module._choices = CHOICES
    choice = recompute.Recompute("auto", context)
    choice.wrap(nn.ModuleList(experts))
    saved, working = HIDDEN + 2 * CHOICES * INNER, CHOICES * (HIDDEN + 2 * INNER)
    assert choice.bytes_per_token() == 2 * (3 * saved + working)
    experts[0].activation = "gelu"
    unfused = recompute.SAVED_PER_LINEAR * CHOICES * (2 * HIDDEN + 3 * INNER)
    assert choice.bytes_per_token() == 2 * (2 * saved + unfused + working)


def test_dimuon_steps_each_experts_matrix_as_one_of_its_own() -> None:
    # More experts than a matrix has rows or columns.
    layout = Layout.of(3, [Target("x.w1", "mlp", HIDDEN, INNER, ExpertStack(9, "A", interleaved=False))])
    dimuon_adapter = Adapter(LoraSpec(3), layout, torch.ones(layout.numel), torch.float32)
    before = {name: (a.clone(), b.clone()) for name, (a, b) in dimuon_adapter.weights.items()}
    gradient_P = torch.randn(dimuon_adapter.layout.numel, generator=torch.Generator().manual_seed(0))
    optim.prepare_dimuon(
        [optim.ClippedGradient(TrainedModel(dimuon_adapter, optimizer_type="dimuon"), gradient_P, 1.0)],
        DimuonParams(0.1),
    )()
    for name, gradients in dimuon_adapter.layout.views(gradient_P).items():
        for old, new, stacked in zip(before[name], dimuon_adapter.weights[name], gradients, strict=True):
            for old_weight, new_weight, gradient in zip(old, new, stacked, strict=True):
                update = optim.orthogonalise(gradient) * optim.RMS * max(gradient.shape) ** 0.5
                torch.testing.assert_close(new_weight, old_weight - 0.1 * update)


def test_an_adapters_parameter_count_equals_tinkers() -> None:
    # Qwen/Qwen3-30B-A3B has 48 layers; the cookbook's table says 14,450,688 weights of the MLP at rank 1.
    with torch.device("meta"):
        module = Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_experts=128))
    targets = MultiLoRAExperts("mlp.experts", module, ForwardContext()).targets
    shapes = [shape for target in targets for shape in target.shapes(1)]
    assert 48 * sum(torch.Size(shape).numel() for shape in shapes) == 14_450_688


def test_experts_of_another_form_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _, module = make_experts("concatenated")
    monkeypatch.setattr(module, "has_post_expert_norm", True)
    with pytest.raises(SettingsError, match="Qwen3MoeExperts has a norm after each expert"):
        MultiLoRAExperts("mlp.experts", module, ForwardContext())
