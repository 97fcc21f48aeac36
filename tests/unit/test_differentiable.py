"""Fused layers in training have the modules' hidden states and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

from support import tiny_models
from tinsmith.backends.torch import lora, transformer
from tinsmith.backends.torch.adapters import Adapter, initialise_weights, layout_for
from tinsmith.backends.torch.attention import PackedCausal
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.model import BaseModel
from tinsmith.types import LoraSpec, ModelShape

torch.set_num_threads(1)

LENGTHS = [3, 17, 1, 20, 6, 6, 6, 6]


def load_base(directory: Path, arch: str, dtype: str = "float32") -> BaseModel:
    if arch in ("mistral", "qwen2"):
        mistral = MistralConfig(**tiny_models._COMMON, sliding_window=6) if arch == "mistral" else None
        config = mistral or Qwen2Config(**tiny_models._COMMON, tie_word_embeddings=False)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
        model.save_pretrained(directory)
        tiny_models.tokenizer().save_pretrained(directory)
        shape = ModelShape(f"tiny/{arch}", str(directory), tiny_models.VOCAB, 256, type(model).__name__)
    else:
        shape = tiny_models.make(directory, arch)
    return BaseModel.load(shape, device="cpu", dtype=dtype)


def adapter(base: BaseModel, seed: int, rank: int, *, attn: bool = True, mlp: bool = True) -> Adapter:
    spec = LoraSpec(rank=rank, seed=seed, train_attn=attn, train_mlp=mlp, train_unembed=False)
    layout = layout_for(spec, base.adaptable_targets())
    flat_P = initialise_weights(layout, seed, base.device)
    generator = torch.Generator().manual_seed(seed)
    for _, b_Or in layout.views(flat_P).values():
        b_Or.normal_(0, 0.1, generator=generator)
    return Adapter(spec, layout, flat_P, base.dtype)


def make_adapters(base: BaseModel) -> list[Adapter | None]:
    """Long segments and short ones, every subset of linears, and four of one layout and length, which are batched."""
    return [
        adapter(base, 1, 8),
        adapter(base, 2, 4, mlp=False),
        None,
        adapter(base, 3, 16, attn=False),
        *(adapter(base, seed, 8) for seed in range(4, 8)),
    ]


def forward_backward(base: BaseModel, adapters: list[Adapter | None], *, written: bool = True) -> list[Tensor]:
    """Hidden states, then each adapter's gradient, of one forward and backward."""
    fused = base._fused
    assert fused is not None
    tokens_T = torch.randint(0, tiny_models.VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions_T = torch.cat([torch.arange(n) for n in LENGTHS])
    adapters_by_id = {id(a): a for a in adapters if a is not None}
    buffers = [a.open_gradients() for a in adapters_by_id.values()]
    base._fused = fused if written else None
    try:
        hidden_TD = base.hidden(tokens_T, positions_T, PackedCausal(LENGTHS), LoRABatch.of(adapters, LENGTHS))
    finally:
        base._fused = fused
    assert hidden_TD.grad_fn is not None and ("RMSNorm" in type(hidden_TD.grad_fn).__name__) is written
    grad_TD = torch.randn(hidden_TD.shape, generator=torch.Generator().manual_seed(1)).to(hidden_TD)
    hidden_TD.backward(grad_TD)
    for a in adapters_by_id.values():
        a.close_gradients()
    return [hidden_TD.detach(), *buffers]


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("arch", ["qwen3", "llama", "mistral", "qwen2"])
def test_hidden_states_and_gradients_are_the_modules_own(tmp_path: Path, arch: str) -> None:
    base = load_base(tmp_path, arch)
    adapters = make_adapters(base)
    ours, modules = forward_backward(base, adapters), forward_backward(base, adapters, written=False)
    assert len(ours) == len(modules) == 8
    for actual, expected in zip(ours, modules, strict=True):
        assert float(expected.norm()) > 0 and relative(actual, expected) < 2e-5


def test_in_bfloat16_they_differ_by_rounding(tmp_path: Path) -> None:
    base = load_base(tmp_path, "qwen3", "bfloat16")
    adapters = make_adapters(base)
    for actual, expected in zip(
        forward_backward(base, adapters), forward_backward(base, adapters, written=False), strict=True
    ):
        assert relative(actual.float(), expected.float()) < 0.06


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_segments_in_one_batch_get_what_each_gets_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    base = load_base(tmp_path, "qwen3", dtype)
    adapters = make_adapters(base)
    batched = []
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda *args: batched.append(1) or stack(*args))
    together = forward_backward(base, adapters)
    assert batched
    batched.clear()
    monkeypatch.setattr(lora, "BATCHED_MAX_ROWS", 0)
    separate = forward_backward(base, adapters)
    assert not batched
    for actual, expected in zip(together, separate, strict=True):
        assert relative(actual, expected) < (1e-5 if dtype == "float32" else 0.03)


def test_non_finite_values_stay_in_their_rows_in_a_batch(tmp_path: Path) -> None:
    base = load_base(tmp_path, "qwen3")
    adapters = make_adapters(base)
    before = forward_backward(base, adapters)
    sick = adapters[5]
    assert sick is not None
    sick.flat_P.fill_(float("nan"))
    after = forward_backward(base, adapters)
    start = sum(LENGTHS[:5])
    rows = torch.ones(sum(LENGTHS), dtype=torch.bool)
    rows[start : start + LENGTHS[5]] = False
    assert torch.equal(after[0][rows], before[0][rows]) and after[0][~rows].isnan().all()
    owners = [a for a in adapters if a is not None]
    for owner, actual, expected in zip(owners, after[1:], before[1:], strict=True):
        assert torch.equal(actual, expected) if owner is not sick else bool(actual.isnan().any())


def test_joined_weights_are_held_once(tmp_path: Path) -> None:
    base = load_base(tmp_path, "qwen3")
    assert base._fused is not None
    for layer in base._fused._layers:
        for joined in layer.linears:
            begin = joined.weight.data_ptr()
            for name in joined.delta._names:
                weight = base.targets[name].weight
                assert begin <= weight.data_ptr() < joined.weight.data_ptr() + joined.weight.nbytes


def test_neighbours_in_a_layout_share_one_matrix(tmp_path: Path) -> None:
    base = load_base(tmp_path, "qwen3")
    assert base._fused is not None
    qkv = base._fused._layers[0].qkv.delta
    owner = adapter(base, 1, 8)
    (block,) = qkv._matrices(owner).stacked_a
    assert torch.equal(block.a_RI, torch.cat([owner.compute[name][0] for name in qkv._names]))
    owner.flat_P += 1
    assert torch.equal(block.a_RI, torch.cat([owner.compute[name][0] for name in qkv._names])), "it is a view"


def test_adapters_of_the_unembedding_alone_leave_nothing_to_go_back_through(tmp_path: Path) -> None:
    base = load_base(tmp_path, "qwen3")
    layout = layout_for(LoraSpec(4, None, False, False, True), base.adaptable_targets())
    owner = Adapter(LoraSpec(4), layout, torch.zeros(layout.numel), torch.float32)
    tokens = torch.arange(5)
    assert not base.hidden(tokens, tokens, PackedCausal([5]), LoRABatch.of([owner], [5])).requires_grad


@pytest.mark.parametrize("arch", ["gemma2", "gpt_oss"])
def test_other_layers_go_through_their_modules(tmp_path: Path, arch: str) -> None:
    assert load_base(tmp_path, arch)._fused is None


def test_layers_that_train_differently_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer._SwiGLU, "forward", lambda _, gate_up: 1.01 * gate_up.chunk(2, -1)[0])
    assert load_base(tmp_path, "qwen3")._fused is None
