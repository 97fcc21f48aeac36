"""Recurrent layers: a packed row equals its sequences alone, in values and gradients and in any pieces. The reference
is transformers' own module over one sequence, in float64 as far as the module supports it, and for the gated delta net
a float64 recurrence written token by token. The last tests remove the boundary between sequences and show that both the
comparison and the server's own check at start notice it.
"""

from __future__ import annotations

import inspect
from functools import partial, wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from support.families import FAMILIES, Family, build, make
from support.properties import examples
from tinsmith.backends.distributed import Degrees
from tinsmith.backends.distributed.collectives import Ranks
from tinsmith.backends.distributed.context_parallel import ContextParallel, RowShard
from tinsmith.backends.torch import recurrent
from tinsmith.backends.torch.attention import Mixer, PackedCausal
from tinsmith.backends.torch.delta_rule import run_gated_delta
from tinsmith.backends.torch.lora import ForwardContext
from tinsmith.backends.torch.lora_batch import LoRABatch, Segment
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.recurrent import SequenceMixer, wrap_mixers
from tinsmith.errors import SettingsError
from tinsmith.plan import versions
from tinsmith.plan.mixers import is_mixer
from tinsmith.samplers.local.state_pool import SequenceState, StatePool
from tinsmith.samplers.local.states import (
    Recurrence,
    RecurrentSpan,
    StateBudget,
    StateSnapshots,
    cuts_between,
)

torch.set_num_threads(1)

STATEFUL = {family.model_type: family for family in FAMILIES if family.states}
DELTA = ("qwen3_next", "qwen3_5_text")
WHOLE = ("jamba", "mamba", "falcon_mamba", "minimax")
CPU = torch.device("cpu")
assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


class Layer(NamedTuple):
    mixer: SequenceMixer
    module: nn.Module
    board: ForwardContext
    hidden: int

    def rows(self, lengths: list[int], seed: int) -> Tensor:
        """[T, D], and a LoRA batch for them."""
        self.board.lora_batch = LoRABatch([Segment(0, sum(lengths), None)])
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(sum(lengths), self.hidden, generator=generator, dtype=torch.float64)

    def alone(self, x_LD: Tensor) -> Tensor:
        """[L, D]: the module itself over one sequence."""
        out = self.mixer._forward(hidden_states=x_LD[None], attention_mask=None, **self.mixer._required)
        return (out if isinstance(out, Tensor) else out[0])[0]


_layers: dict[str, Layer] = {}


def layer_of(family: str) -> Layer:
    if family not in _layers:
        decoder = build(STATEFUL[family]).double().eval().get_decoder()
        board = ForwardContext()
        mixer = wrap_mixers(decoder, board)[0]
        module = next(submodule for submodule in decoder.modules() if is_mixer(submodule))
        _layers[family] = Layer(mixer, module, board, decoder.config.hidden_size)
    return _layers[family]


def packed(layer: Layer, lengths: list[int], x_TD: Tensor) -> Tensor:
    return PackedCausal(lengths).mix(layer.mixer, x_TD)


def assert_near(ours: Tensor, expected: Tensor) -> None:
    """Within 1e-4 of the tensor's norm; gradients that are only rounding may differ by it."""
    assert float((ours - expected).detach().norm()) <= 1e-4 * max(float(expected.detach().norm()), 0.01)


LENGTHS = st.lists(st.integers(1, 80), min_size=1, max_size=5)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("family", STATEFUL)
@examples(6)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_a_packed_row_is_its_sequences_alone(family: str, lengths: list[int], seed: int) -> None:
    layer = layer_of(family)
    x_TD = layer.rows(lengths, seed)
    weight_TD = torch.randn(x_TD.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    parameters = [parameter for parameter in layer.module.parameters() if parameter.requires_grad]
    runs = []
    for how in ("packed", "alone"):
        leaf = x_TD.clone().requires_grad_()
        out = (
            packed(layer, lengths, leaf)
            if how == "packed"
            else torch.cat([layer.alone(x) for x in leaf.split(lengths)])
        )
        runs.append([out, *torch.autograd.grad((out * weight_TD).sum(), [leaf, *parameters])])
    for ours, expected in zip(*runs, strict=True):
        assert_near(ours, expected)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("family", STATEFUL)
@examples(6)
@given(lengths=LENGTHS, data=st.data())
def test_a_sequence_in_pieces_is_the_whole(family: str, lengths: list[int], data: st.DataObject) -> None:
    """Steps with pieces of several sequences, also cut within a step; some continue again from a snapshot."""
    layer = layer_of(family)
    seed = data.draw(st.integers(0, 99))
    sequences = layer.rows(lengths, seed).split(lengths)
    expected = [layer.alone(x_LD) for x_LD in sequences]
    lengths_done = [0] * len(lengths)
    states: list[SequenceState | None] = [None] * len(lengths)
    pool = StatePool(CPU)
    while unfinished := [i for i, length in enumerate(lengths) if lengths_done[i] < length]:
        sizes = [data.draw(st.integers(1, lengths[i] - lengths_done[i])) for i in unfinished]
        cuts = [data.draw(st.sets(st.integers(1, size - 1), max_size=2)) if size > 1 else set() for size in sizes]
        x_TD = torch.cat(
            [sequences[i][lengths_done[i] : lengths_done[i] + size] for i, size in zip(unfinished, sizes, strict=True)]
        )
        y_TD, recurrence = step(layer, x_TD, sizes, [states[i] for i in unfinished], cuts, pool)
        for index, (i, y_LD) in enumerate(zip(unfinished, y_TD.split(sizes), strict=True)):
            assert_close(y_LD, expected[i][lengths_done[i] : lengths_done[i] + len(y_LD)])
            states[i] = recurrence.final_states[index]
            recompute_after_cuts(
                layer,
                pool,
                recurrence,
                index,
                sorted(cuts[index]),
                sequences[i][lengths_done[i] : lengths_done[i] + sizes[index]],
                y_LD,
            )
            lengths_done[i] += sizes[index]


def recompute_after_cuts(
    layer: Layer, pool: StatePool, recurrence: Recurrence, index: int, cuts: list[int], x_LD: Tensor, y_LD: Tensor
) -> None:
    """Compute the rest after a cut again from its state."""
    for cut, state in zip(cuts, recurrence.cut_states[index], strict=True):
        again, _ = step(layer, x_LD[cut:], [len(x_LD) - cut], [state], [set()], pool)
        assert_close(again, y_LD[cut:])


def step(
    layer: Layer,
    x_TD: Tensor,
    sizes: list[int],
    states: list[SequenceState | None],
    cuts: list[set[int]],
    pool: StatePool,
) -> tuple[Tensor, Recurrence]:
    layer.board.lora_batch = LoRABatch([Segment(0, len(x_TD), None)])
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    sequence_pieces = [
        RecurrentSpan(first, size, state, sorted(sequence_cuts))
        for first, size, state, sequence_cuts in zip(firsts, sizes, states, cuts, strict=True)
    ]
    recurrence = Recurrence(sequence_pieces, pool)
    with torch.no_grad():
        return recurrence.mix(layer.mixer, x_TD), recurrence


class QueuedRanks:
    """A context rank of several that run one after another in this process; messages wait in queues."""

    device = CPU

    def __init__(self, index: int, queues: dict[Any, list[Tensor]], log: list[str]) -> None:
        self.degrees, self.index, self.queues, self.log = Degrees(context=3), index, queues, log

    def send_context(self, x: Tensor, step: int) -> None:
        self.log.append("send")
        self.queues.setdefault((self.index, self.index + step), []).append(x.clone())

    def receive_context(self, x: Tensor, step: int) -> None:
        x.copy_(self.queues[self.index + step, self.index].pop(0))

    def finish(self, _: None) -> None:
        self.log.append("wait")


@pytest.mark.matrix(4)
@pytest.mark.parametrize("family", [family for family in STATEFUL if family not in WHOLE])
@examples(4)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_context_ranks_that_hand_over_states_are_one_process(family: str, lengths: list[int], seed: int) -> None:
    """Projections never wait, in neither direction."""
    layer, log, logs = layer_of(family), list[str](), list[list[str]]()
    x_TD, num_rows = layer.rows(lengths, seed), max(-(-sum(lengths) // 3), 2)
    weight_TD = torch.randn(x_TD.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    layer.mixer(x_TD[None, :1], (0,), keep=True)
    parameters = list(layer.module.parameters())
    leaf = x_TD.clone().requires_grad_()
    out = packed(layer, lengths, leaf)
    expected = [out, *torch.autograd.grad((out * weight_TD).sum(), [leaf, *parameters])]
    layer.board.lora_batch = LoRABatch([Segment(0, num_rows, None)])
    layer.module.zero_grad()
    hooks = [
        linear.register_forward_hook(partial(record_event, log))
        for linear in layer.module.modules()
        if type(linear) is nn.Linear
    ]
    rows, weights = (nn.functional.pad(x, (0, 0, 0, 3 * num_rows - len(x))).split(num_rows) for x in (x_TD, weight_TD))
    leaves, outs, queues = [x.clone().requires_grad_() for x in rows], list[Tensor](), {}
    for index, tensor in enumerate(leaves):
        shard = SimpleNamespace(start=index * num_rows, shard_rows=num_rows, lengths=lengths)
        plan = ContextParallel(cast(RowShard, shard), cast(Ranks, QueuedRanks(index, queues, log)))
        outs.append(plan.mix(layer.mixer, tensor))
        logs.append([log.pop() for _ in log.copy()])
    for tensor, weight in list(zip(outs, weights, strict=True))[::-1]:
        (tensor * weight).sum().backward()
        logs.append([log.pop() for _ in log.copy()])
    for hook in hooks:
        hook.remove()
    actual = [torch.cat(outs)[: len(x_TD)], torch.cat([cast(Tensor, tensor.grad) for tensor in leaves])[: len(x_TD)]]
    for ours, theirs in zip([*actual, *(tensor.grad for tensor in parameters)], expected, strict=True):
        assert_near(cast(Tensor, ours), theirs)
    assert not any(queues.values()) and all(events[0] == events[-1] == "linear" for events in logs)
    if len(lengths) == 1 and len(x_TD) > 4:
        assert all({"wait", "send"} <= {*logs[index]} for index in (1, 4))


def record_event(log: list[str], module: nn.Module, args: object, output: Tensor) -> None:
    log.append("linear")
    output.register_hook(lambda _: log.append("linear"))


@pytest.mark.parametrize("family", STATEFUL)
def test_nan_stays_with_its_sequence(family: str) -> None:
    layer, lengths = layer_of(family), [5, 7, 7, 70]
    x_TD = layer.rows(lengths, 0)
    poisoned = x_TD.clone()
    poisoned[5:12] = torch.nan
    clean_rows = torch.cat([torch.arange(5), torch.arange(12, sum(lengths))])
    with torch.no_grad():
        ours, theirs = (packed(layer, lengths, rows) for rows in (x_TD, poisoned))
    in_steps = [step(layer, rows, lengths, [None] * 4, [set()] * 4, StatePool(CPU))[0] for rows in (x_TD, poisoned)]
    for clean, output in ((ours, theirs), in_steps):
        assert output[5:12].isnan().all()
        assert torch.equal(output[clean_rows], clean[clean_rows])


def gated_delta_net(module: nn.Module, family: str, x_LD: Tensor) -> Tensor:
    """[L, D] The formulas of Gated DeltaNet (arXiv 2412.06464), token by token."""
    module = cast("Any", module)
    keys, values = module.num_k_heads, module.num_v_heads
    key_dim, value_dim, repeat = module.head_k_dim, module.head_v_dim, values // keys
    if family == "qwen3_next":
        parts = module.in_proj_qkvz(x_LD).view(len(x_LD), keys, -1)
        q, k, v, z = parts.split([key_dim, key_dim, repeat * value_dim, repeat * value_dim], -1)
        b, a = (part.flatten(1) for part in module.in_proj_ba(x_LD).view(len(x_LD), keys, -1).chunk(2, -1))
        qkv, z = torch.cat([part.flatten(1) for part in (q, k, v)], -1), z.reshape(len(x_LD), values, value_dim)
    else:
        qkv, z = module.in_proj_qkv(x_LD), module.in_proj_z(x_LD).view(len(x_LD), values, value_dim)
        b, a = module.in_proj_b(x_LD), module.in_proj_a(x_LD)
    taps = module.conv1d.weight[:, 0]
    behind = torch.cat([qkv.new_zeros(taps.shape[1] - 1, qkv.shape[1]), qkv])
    mixed = torch.stack([(behind[t : t + taps.shape[1]].T * taps).sum(-1) for t in range(len(qkv))])
    mixed = nn.functional.silu(mixed)
    q, k, v = mixed.split([keys * key_dim, keys * key_dim, values * value_dim], -1)
    q, k = (unit(part.view(-1, keys, key_dim)).repeat_interleave(repeat, 1) for part in (q, k))
    v = v.view(-1, values, value_dim)
    decay = torch.exp(-module.A_log.exp() * nn.functional.softplus(a + module.dt_bias))
    state_HKV, out = x_LD.new_zeros(values, key_dim, value_dim), []
    for t in range(len(x_LD)):
        state_HKV = state_HKV * decay[t, :, None, None]
        error_HV = v[t] - torch.einsum("hkv,hk->hv", state_HKV, k[t])
        state_HKV = state_HKV + torch.einsum("hk,hv->hkv", k[t], error_HV * b[t].sigmoid()[:, None])
        out.append(torch.einsum("hkv,hk->hv", state_HKV, q[t]) / key_dim**0.5)
    out_LHV = torch.stack(out)
    normed = out_LHV * (out_LHV.square().mean(-1, keepdim=True) + module.norm.variance_epsilon).rsqrt()
    return module.out_proj((module.norm.weight * normed * nn.functional.silu(z)).flatten(1))


def unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.parametrize("family", DELTA)
def test_the_gated_delta_net_is_its_formulas(family: str) -> None:
    layer, lengths = layer_of(family), [3, 65, 64, 1, 130]
    x_TD = layer.rows(lengths, 3)
    leaves = [x_TD.clone().requires_grad_() for _ in range(2)]
    expected = torch.cat([gated_delta_net(layer.module, family, x_LD) for x_LD in leaves[0].split(lengths)])
    ours = packed(layer, lengths, leaves[1])
    assert_close(ours, expected)
    gradients = [
        torch.autograd.grad(out.square().sum(), leaf)[0] for out, leaf in ((expected, leaves[0]), (ours, leaves[1]))
    ]
    assert_near(gradients[1], gradients[0])


# Without the boundary.


@pytest.mark.parametrize("family", STATEFUL)
def test_without_its_boundaries_a_packed_row_is_far_from_its_sequences(family: str) -> None:
    layer, lengths = layer_of(family), [9, 8, 21]
    x_TD = layer.rows(lengths, 1)
    with torch.no_grad():
        expected = torch.cat([layer.alone(x_LD) for x_LD in x_TD.split(lengths)])
        right, wrong = (packed(layer, boundaries, x_TD) for boundaries in (lengths, [sum(lengths)]))
    scale = expected.norm()
    assert float((right - expected).norm() / scale) < 1e-5
    assert float((wrong[9:] - expected[9:]).norm() / scale) > 1e-2
    assert_close(wrong[:9], expected[:9])


def in_make_test(family: Family) -> object:
    return pytest.param(family, id=family.model_type, marks=() if family.core else pytest.mark.slow)


@pytest.mark.parametrize("family", [in_make_test(family) for family in STATEFUL.values()])
def test_a_server_without_the_boundaries_does_not_start(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leak(self: PackedCausal, mixer: Mixer, x_TD: Tensor) -> Tensor:
        return mixer(x_TD[None], (0,))[0][0]

    monkeypatch.setattr(PackedCausal, "mix", leak)
    with pytest.raises(SettingsError, match="its logits beside another sequence differ from its own"):
        BaseModel.load(make(tmp_path, family), device="cpu")


# StateSnapshots and their budget.


def test_snapshots_are_bounded_and_the_one_used_longest_ago_goes() -> None:
    snapshots = StateSnapshots(2)
    pool = StatePool(CPU)
    states = [pool.take() for _ in range(4)]
    for key, state in zip((b"a", b"b"), states, strict=False):
        snapshots.add(key, 1, state)
    assert snapshots.get(b"a") is states[0]
    snapshots.add(b"c", 2, states[2])
    assert b"b" not in snapshots and len(snapshots) == 2
    snapshots.add(b"a", 1, states[3])
    assert snapshots.get(b"a") is states[0]
    snapshots.forget(1)
    assert b"a" not in snapshots and b"c" in snapshots
    snapshots.shrink(0)
    assert len(snapshots) == 0


def test_states_take_at_most_half_of_a_cache_and_one_sequence_always_runs() -> None:
    assert StateBudget.of(0, 1000, 8) == (8, 0, 0)
    assert StateBudget.of(10, 1000, 8) == (8, 12, 360)
    assert StateBudget.of(10, 1000, 256) == (12, 12, 480)
    assert StateBudget.of(10, 15, 256) == (1, 0, 30)


def test_cuts_are_those_strictly_within_a_span() -> None:
    assert cuts_between(4, 12, (4, 12, 8, 6, 8, 20)) == [2, 4]


@pytest.mark.parametrize("family", [*DELTA, "kimi_linear"])
def test_gated_delta_nets_take_the_chunked_rule(family: str) -> None:
    """By the names that a layer's forward reads, where transformers has no kernel of a library for them."""
    forward = inspect.unwrap(type(layer_of(family).module).forward)
    rules = [name for name in forward.__code__.co_names if "chunk" in name]
    assert [forward.__globals__[name] for name in rules] == [run_gated_delta]


@pytest.mark.parametrize("installed", [False, True])
def test_tensors_of_a_cpu_do_not_reach_the_kernels_of_a_library(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(x: Tensor) -> str:
        return "torch"

    @wraps(plain)
    def kernel(x: Tensor) -> str:
        return "library"

    modeling = ModuleType(__name__)
    modeling.rule, modeling.other = kernel, plain  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(versions, "find_spec", lambda name: object() if installed and name == "fla" else None)
    recurrent._keep_host_functions(modeling)
    routes = [modeling.rule(torch.ones(1, device=device)) for device in ("cpu", "meta")]
    assert routes == (["torch", "library"] if installed else ["library", "library"])
    assert modeling.other is plain
