"""The kernels between experts' grouped products against float64; in Triton's interpreter, or on the device that
TEST_DEVICE names. In float32 the grouped products themselves are loops, which a GPU has for bfloat16 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from gpu.device import DEVICE, NAMED, ON_CUDA

if not (NAMED and ON_CUDA):
    from support import interpreted  # noqa: F401 - before the kernels

from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tinsmith.backends.torch import expert_pairs, frozen_weights
from tinsmith.backends.torch.adapters import Adapter, AdapterStack, Layout
from tinsmith.backends.torch.expert_kernels import GroupedPairs
from tinsmith.backends.torch.expert_pairs import Factors, LoopedPairs
from tinsmith.backends.torch.lora import ForwardContext
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.moe import MultiLoRAExperts
from tinsmith.types import LoraSpec

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

WHERE = DEVICE if NAMED else "cpu"
EXPERTS, CHOICES, HIDDEN, INNER = 3, 2, 40, 72
W1, W3, W2 = NAMES = tuple(f"mlp.experts.{name}" for name in ("w1", "w3", "w2"))
LONG, SHORT, BARE = (0, 60), (1, 9), (None, 30)
BATCHES = {
    "one adapter": [(0, 70)],
    "no adapter": [BARE],
    "three": [LONG, BARE, SHORT, (2, 41)],
    "an adapter twice": [LONG, SHORT, (0, 20)],
    "eight": [SHORT, (2, 1), BARE, (3, 17), (4, 8), (5, 2), (6, 33), (7, 5)],
}
RANKS = (8, 32, 5, 16, 8, 40, 1, 8)


def _loop_experts(x_NC: Tensor, weight_ECO: Tensor, *, offs: Tensor) -> Tensor:
    bounds = pairwise([0, *offs.tolist()])
    return torch.cat([x_NC[start:stop] @ weight for (start, stop), weight in zip(bounds, weight_ECO, strict=True)])


@pytest.fixture
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Of a test whose experts all use kernels, without a read from the device."""
    chosen_dtype = getattr(request, "param", torch.float32)
    monkeypatch.setattr(MultiLoRAExperts, "_is_grouped", lambda self, adapters: True)
    monkeypatch.setattr(expert_pairs, "read", None)
    if chosen_dtype == torch.float32:
        monkeypatch.setattr(frozen_weights, "grouped_mm", _loop_experts)
    return chosen_dtype


def make_experts(dtype: torch.dtype) -> MultiLoRAExperts:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    module = module.to(WHERE, dtype).requires_grad_(False)
    return MultiLoRAExperts("mlp.experts", module, ForwardContext())


def make_adapter(
    experts: MultiLoRAExperts, seed: int, rank: int, dtype: torch.dtype, names: Sequence[str] = NAMES
) -> Adapter:
    layout = Layout.of(rank, [target for target in experts.targets if target.name in names])
    flat_P = torch.zeros(layout.numel)
    generator = torch.Generator().manual_seed(seed)
    for pair in layout.views(flat_P).values():
        for matrix in pair:
            matrix.normal_(0, 0.5 * matrix.shape[-1] ** -0.5, generator=generator)
    # Equal in both precisions, so that float64 computes with the same numbers.
    return Adapter(LoraSpec(rank, alpha=rank * 0.75), layout, flat_P.to(WHERE, dtype).float(), dtype)


class Inputs(NamedTuple):
    hidden_TD: Tensor
    weights_Tk: Tensor
    index_Tk: Tensor

    @classmethod
    def random(cls, num_rows: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        index_Tk = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(num_rows)])
        hidden_TD = torch.randn(num_rows, HIDDEN, generator=generator).to(WHERE, dtype)
        weights_Tk = torch.rand(num_rows, CHOICES, generator=generator).to(WHERE, dtype)
        return cls(hidden_TD.requires_grad_(), weights_Tk.requires_grad_(), index_Tk.to(WHERE))

    def widen(self) -> Inputs:
        hidden_TD, weights_Tk = (x.detach().double().requires_grad_() for x in (self.hidden_TD, self.weights_Tk))
        return Inputs(hidden_TD, weights_Tk, self.index_Tk)


def run(experts: MultiLoRAExperts, lora_batch: LoRABatch, inputs: Inputs) -> Tensor:
    return experts.forward_experts(inputs.hidden_TD, inputs.index_Tk, inputs.weights_Tk, lora_batch)


Leaves = dict[int, dict[str, tuple[Tensor, Tensor]]]


def make_leaves(adapters: Sequence[Adapter]) -> Leaves:
    return {
        id(adapter): {
            name: (a.double().requires_grad_(), b.double().requires_grad_()) for name, (a, b) in adapter.weights.items()
        }
        for adapter in adapters
    }


def run_float64(experts: MultiLoRAExperts, lora_batch: LoRABatch, inputs: Inputs, leaves: Leaves) -> Tensor:
    """All experts for all rows of a segment, of which the chosen ones are taken."""
    outer, down = experts.outer_proj.double(), experts.down_proj.double()
    outputs = []
    for start, stop, adapter in lora_batch.segments:
        x, index, weights = (part[start:stop] for part in (inputs.hidden_TD, inputs.index_Tk, inputs.weights_Tk))
        gate, up = torch.einsum("td,egd->teg", x, outer).chunk(2, -1)
        matrices = {} if adapter is None else leaves[id(adapter)]
        scale = 0.0 if adapter is None else adapter.scale
        if W1 in matrices:
            gate = gate + scale * torch.einsum("tr,eir->tei", x @ matrices[W1][0][0].t(), matrices[W1][1])
        if W3 in matrices:
            up = up + scale * torch.einsum("tr,eir->tei", x @ matrices[W3][0][0].t(), matrices[W3][1])
        inner = silu(gate) * up
        y = torch.einsum("tei,edi->ted", inner, down)
        if W2 in matrices:
            y = y + scale * torch.einsum("tei,eri->ter", inner, matrices[W2][0]) @ matrices[W2][1][0].t()
        chosen = y.gather(1, index[..., None].expand(-1, -1, HIDDEN))
        outputs.append((chosen * weights[..., None]).sum(1))
    return torch.cat(outputs)


def assert_near(actual: Tensor | None, expected: Tensor | None, dtype: torch.dtype, what: str) -> None:
    assert actual is not None and expected is not None
    actual, expected = actual.detach().double(), expected.detach()
    error = float((actual - expected).norm())
    bound = (3e-6 if dtype == torch.float32 else 2e-2) * float(expected.norm())
    assert error <= bound, f"{what}: {error:.3g}, at most {bound:.3g}"


def check(
    experts: MultiLoRAExperts, adapters: Sequence[Adapter], parts: Sequence[tuple[int | None, int]], dtype: torch.dtype
) -> None:
    """Output and all gradients of a batch against float64."""
    lora_batch = LoRABatch.of([None if i is None else adapters[i] for i, _ in parts], [count for _, count in parts])
    inputs = Inputs.random(lora_batch.num_rows, dtype)
    leaves, exact = make_leaves(adapters), inputs.widen()
    output, expected = run(experts, lora_batch, inputs), run_float64(experts, lora_batch, exact, leaves)
    assert_near(output, expected, dtype, "output")
    with torch.no_grad():
        assert torch.equal(run(experts, lora_batch, inputs), output)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(WHERE, dtype)
    output.backward(grad)
    expected.backward(grad.double())
    assert_near(inputs.hidden_TD.grad, exact.hidden_TD.grad, dtype, "rows")
    assert_near(inputs.weights_Tk.grad, exact.weights_Tk.grad, dtype, "weights of the router")
    for number in {i for i, _ in parts if i is not None}:
        gradients = adapters[number].gradients
        assert gradients is not None
        for name, leaf_pair in leaves[id(adapters[number])].items():
            for actual, leaf, matrix in zip(gradients[name], leaf_pair, "AB", strict=True):
                assert_near(actual, leaf.grad, dtype, f"{matrix} of {name}")


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "three"),
        (torch.float32, "three"),
        *(pytest.param(torch.float32, name, marks=pytest.mark.extended) for name in BATCHES if name != "three"),
    ],
    indirect=["dtype"],
)
def test_results_and_gradients_are_those_of_float64(dtype: torch.dtype, name: str) -> None:
    experts = make_experts(dtype)
    adapters = [make_adapter(experts, seed, rank, dtype) for seed, rank in enumerate(RANKS)]
    for adapter in adapters:
        adapter.open_gradients()
    check(experts, adapters, BATCHES[name], dtype)


@pytest.mark.extended
def test_adapters_with_some_projections_train_these(dtype: torch.dtype) -> None:
    experts = make_experts(dtype)
    sets = ([W1], [W3], [W2], [W3, W2], NAMES)
    adapters = [make_adapter(experts, seed, 8, dtype, names) for seed, names in enumerate(sets)]
    for adapter in adapters:
        adapter.open_gradients()
    check(experts, adapters, [(i, 10 + i) for i in range(len(sets))], dtype)


@pytest.mark.extended
def test_gradients_of_neighbours_in_one_buffer_stay_apart(dtype: torch.dtype) -> None:
    experts = make_experts(dtype)
    adapters = [make_adapter(experts, seed, 16, dtype) for seed in range(3)]
    AdapterStack(adapters)
    check(experts, adapters, [(1, 20), (0, 30), (2, 7)], dtype)


def test_backward_without_a_gradient_of_rows_or_adapters(dtype: torch.dtype) -> None:
    experts = make_experts(dtype)
    trained, frozen = (make_adapter(experts, seed, 8, dtype) for seed in range(2))
    buffer = trained.open_gradients()
    lora_batch, inputs = LoRABatch.of([trained, frozen], [12, 12]), Inputs.random(24, dtype)
    run(experts, lora_batch, inputs).sum().backward()
    expected = buffer.clone()
    buffer.zero_()
    run(experts, lora_batch, Inputs(inputs.hidden_TD.detach(), *inputs[1:])).sum().backward()
    assert torch.equal(buffer, expected) and all(
        view.any() for pair in trained.layout.views(buffer).values() for view in pair
    )


@pytest.mark.extended
def test_non_finite_numbers_stay_in_their_rows_and_their_adapter(dtype: torch.dtype) -> None:
    experts = make_experts(dtype)
    sound, sick, other = (make_adapter(experts, seed, rank, dtype) for seed, rank in ((1, 8), (2, 32), (3, 8)))
    lora_batch = LoRABatch.of([sound, sick, None, other, sound], [30, 20, 10, 9, 40])
    results = []
    for is_sick in (False, True):
        inputs = Inputs.random(lora_batch.num_rows, dtype)
        if is_sick:
            sick.compute_P.fill_(float("nan"))
            inputs.hidden_TD.data[30:40] = float("inf")
        buffers = [adapter.open_gradients() for adapter in (sound, other)]
        sick.open_gradients()
        output = run(experts, lora_batch, inputs)
        output.backward(torch.ones_like(output))
        assert inputs.hidden_TD.grad is not None and inputs.weights_Tk.grad is not None
        rows = [
            tensor[[*range(30), *range(50, 109)]] for tensor in (output, inputs.hidden_TD.grad, inputs.weights_Tk.grad)
        ]
        results.append([*rows, *buffers])
    assert all(torch.equal(*pair) and pair[0].isfinite().all() for pair in zip(*results, strict=True))
    assert output[30:50].isnan().all()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("projections", [
    [Factors(W1, 1, slice(0, None, 2)), Factors(W3, 1, slice(1, None, 2))],
    pytest.param([Factors(W1, 1, slice(0, INNER)), Factors(W3, 1, slice(INNER, None))], marks=pytest.mark.extended),
    pytest.param([Factors(W1, 1, slice(0, INNER))], marks=pytest.mark.extended),
    [Factors(W2, 0, slice(0, INNER))],
], ids=["alternating", "halves", "one", "down"])  # fmt: skip
def test_products_of_groups_are_those_of_the_loop(projections: list[Factors]) -> None:
    experts, dtype = make_experts(torch.float32), torch.float32
    adapters = [make_adapter(experts, seed, rank, dtype) for seed, rank in enumerate((8, 5, 128))]
    lora_batch = LoRABatch.of([adapters[0], None, adapters[1], adapters[2], adapters[0]], [70, 9, 30, 3, 12])
    inputs = Inputs.random(lora_batch.num_rows, dtype)
    width = INNER if projections[0].columns == slice(0, INNER) and len(projections) == 1 else 2 * INNER
    generator = torch.Generator().manual_seed(0)
    x_NC = torch.randn(len(inputs.hidden_TD) * CHOICES, width, generator=generator).to(WHERE)
    u_TR = torch.randn(len(inputs.hidden_TD), 256, generator=generator).to(WHERE)
    results = []
    for kind in (LoopedPairs, GroupedPairs):
        pairs = kind(inputs.index_Tk, lora_batch, EXPERTS)
        out_NC, buffers = x_NC.clone(), [adapter.open_gradients() for adapter in adapters]
        pairs.expand_(out_NC, u_TR, projections)
        pairs.add_outer_(x_NC, u_TR, projections)
        pairs.add_outer_(x_NC, u_TR, projections, inputs.weights_Tk.detach())
        shrunk_NR = pairs.shrink(x_NC, projections)
        for adapter in adapters:
            adapter.close_gradients()
        slots = {id(adapter): slot for slot, adapter in enumerate(pairs.adapters)}
        rows = [slice(0, 70), slice(79, 109), slice(109, 112)]
        combined_TR = pairs.combine(shrunk_NR, inputs.weights_Tk.detach())
        values = [combined_TR[part, : rank * len(projections)] for part, rank in zip(rows, (8, 5, 128), strict=True)]
        assert len(slots) == 4
        results.append([out_NC, *buffers, *values, pairs.repeat_rows(u_TR), pairs.combine(x_NC)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_block_table_covers_each_pair_once() -> None:
    index_Tk = torch.tensor([[0], [0], [2], [2], [2], [0]] * 40, device=WHERE)
    pairs = GroupedPairs(index_Tk, LoRABatch.of([None], [240]), 4)
    groups_B, ends_V = pairs._blocks.group_B.tolist(), pairs.ends_V.tolist()
    assert ends_V == [120, 120, 240, 240]
    assert groups_B == [0, 0, 2, 2, *[4] * (len(groups_B) - 4)]


def limited_gate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.clamp(-10.0, 10.0).chunk(2, -1)
    return nn.functional.silu(gate) * up


def interleaved_gate(gate_up: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(gate_up[..., ::2]) * gate_up[..., 1::2]


def test_the_numbers_of_a_gate_decide_whether_it_is_fused() -> None:
    module = make_experts(torch.float32).module
    for activation, name in ((nn.SiLU(), "silu"), (nn.GELU("tanh"), "gelu"), (nn.GELU(), None), (nn.Tanh(), None)):
        module.act_fn = activation
        assert MultiLoRAExperts("mlp.experts", module, ForwardContext()).activation == name
    module.act_fn = nn.SiLU()
    for gate in (limited_gate, interleaved_gate):
        vars(module)["_apply_gate"] = gate
        assert MultiLoRAExperts("mlp.experts", module, ForwardContext()).activation is None
